"""A study laid out: its prompts as tokens, its cells cut into products and units, and what they cost in tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iclperm.endpoint.bill import Prompt as ApiPrompt
from iclperm.engine.plan import ContextPaths, Plan, plan_product, plan_requests
from iclperm.engine.tree import Rows
from iclperm.prompts.cells import Cell
from iclperm.prompts.chat import TextTokenizer
from iclperm.prompts.design import CONTENT_FREE, CONTENT_FREE_INPUTS
from iclperm.prompts.encode import Ids
from iclperm.prompts.tokenise import Prompts, tokenise
from iclperm.runs.alone import Alone
from iclperm.runs.checks import fitting_queries, refuse_foreign_tokenizer, refuse_small_budget, refuse_ways
from iclperm.runs.dealing import dealt_asks
from iclperm.runs.reading import right_answers
from iclperm.runs.setting import ResolvedStudy, scoring_of, tokenizer_of
from iclperm.runs.waves import Decision
from iclperm.runs.work import Growth, Product, TokenCounts, Work
from iclperm.study.study import PMI

_BYTES_PER_TOKEN = 4  # of English, about
_FEWEST_OF_A_PRODUCT, _FEWEST_CELLS = 4, 256  # contexts, and cells: smaller ones are answered with others in one tree
_UNKNOWN = (np.zeros(1, dtype=np.int32),)  # in the place of labels for what will be generated; it is never fed


def lay_out(setting: ResolvedStudy, grown_from: Sequence[Mapping[str, int]] = ()) -> Work:
    """Tokenises a study's prompts and plans the work; loads no weights. O(tokens of demonstrations and queries).

    ``grown_from`` are the extents that the run already had, in order: their parts stay as they are. Raises
    `TokenizationError`, `DataError` or `ConfigError` for what cannot be run (`iclperm.runs.checks`).
    """
    refuse_ways(setting)
    tokenizer = tokenizer_of(setting)
    prompts = tokenised(setting, tokenizer)
    refuse_foreign_tokenizer(tokenizer, setting, prompts)
    kept = fitting_queries(setting, prompts)
    extents = [*map(dict, grown_from), setting.study.extent]
    before: list[Mapping[str, int] | None] = [None, *extents[:-1]]
    growths = tuple(_growth(setting, prompts, kept, *pair) for pair in zip(extents, before, strict=True))
    opening = tuple(tokenizer.convert_ids_to_tokens(prompts.start.tolist()))
    work = Work(setting, prompts, right_answers(setting), kept, growths, opening)
    if setting.study.cells != "crossed":
        work = _with_dealt_cells(work)
    if setting.study.normalize == PMI:
        alone = Alone.of(setting, prompts, tokenizer)
        work = replace(_with_alone(work, alone), nothing=tuple(tokenizer.convert_ids_to_tokens(alone.nothing.tolist())))
    refuse_small_budget(setting, lambda: plans_of(work))
    return work


def _with_dealt_cells(work: Work) -> Work:
    """The work of a study whose orderings are asked queries of their own, from that of its crossed cells.

    They follow from the seed alone, so that its one decision names only how they were dealt, and what all cells would
    have taken.
    """
    study, whole = work.setting.study, work.tokens
    dealt = with_wave(work, Decision(tuple(dealt_asks(work.setting, work.kept)), {}, is_last=True)).growths[-1]
    known = {
        "cells": study.cells,
        "queries_per_ordering": study.queries_per_ordering,
        "crossed": {"naive": whole.naive, "unique": whole.unique},
    }
    return replace(work, growths=(replace(dealt, whole=dealt.tokens, decision=Decision((), known, is_last=True)),))


def _with_alone(work: Work, alone: Alone) -> Work:
    """The work of a study that compares labels by pointwise mutual information: with the labels, or the choices of each
    query that fits, once without a context."""
    setting, step, growths = work.setting, work.setting.limits.general_cells, []
    there = np.zeros(len(alone.rows), dtype=bool)
    for growth in work.growths:
        _, queries = _extent_masks(setting, work.prompts, work.kept, growth.extent)
        whole, added = alone.cells(wanted := alone.wanted(queries)), alone.cells(wanted & ~there)
        costs = [
            sum((_general_tokens(setting, cells[at : at + step]) for at in range(0, len(cells), step)), TokenCounts())
            for cells in (added, whole)
        ]
        growths.append(
            replace(
                growth,
                alone=added,
                num_cells=growth.num_cells + len(added),
                tokens=growth.tokens + costs[0],
                whole=growth.whole + costs[1],
            )
        )
        there |= wanted
    return replace(work, growths=tuple(growths))


def with_wave(work: Work, decision: Decision) -> Work:
    """The work of a run that asks in waves, and of one more. O(asked cells, and contexts x queries bits)."""
    setting, prompts = work.setting, work.prompts
    if decision.extent is not None:
        there = [growth for growth in work.growths if growth.decision is not None]
        before = there[-1].extent if there else None
        grown = _growth(setting, prompts, work.kept, decision.extent, before)
        return replace(work, growths=(*there, replace(grown, decision=decision)))
    begins, num_queries = work.begins, len(prompts.queries)
    seen = np.zeros((len(prompts.contexts), num_queries), dtype=bool)
    in_product = np.zeros_like(seen)
    kept = np.zeros(num_queries, dtype=bool)
    kept[work.kept] = True
    earlier = (
        work.growths if work.growths[0].decision is not None else ()
    )  # the first wave follows a plan of everything
    for growth in earlier:
        for product in growth.products:
            seen[np.ix_(product.contexts, product.queries)] = True
            in_product[np.ix_(product.contexts, product.queries)] = True
        for cell in growth.general:
            seen[cell.context, cell.query] = True
    apart = {(cell.context, cell.query): cell for cell in prompts.general}
    general: list[Cell] = []
    masks: list[tuple[NDArray[np.bool_], NDArray[np.bool_]]] = []
    num_cells = 0
    for ask in decision.asks:
        contexts = ask.contexts(prompts.context_of)
        queries = begins[ask.split] + np.array(ask.queries, dtype=np.int64)
        queries = queries[kept[queries]]
        block = np.ix_(contexts, queries)
        is_new = ~seen[block]
        num_cells += int(is_new.sum())
        # What was answered outside a product may be in one: its answers there are not used.
        is_product = np.asarray(is_new.any(axis=1) & ~in_product[block].any(axis=1))
        if np.count_nonzero(is_product) < _FEWEST_OF_A_PRODUCT and len(contexts) * len(queries) < _FEWEST_CELLS:
            is_product[:] = False
        for place in np.flatnonzero(~is_product):
            general += [_cell(prompts, apart, int(contexts[place]), int(query)) for query in queries[is_new[place]]]
        inside = [(context, query) for context, query in apart if context in contexts[is_product] and query in queries]
        general += [apart[key] for key in inside if not seen[key]]
        seen[block] = True
        if is_product.any():
            in_product[np.ix_(contexts[is_product], queries)] = True
            wanted, columns = np.zeros(len(seen), dtype=bool), np.zeros(num_queries, dtype=bool)
            wanted[contexts[is_product]], columns[queries] = True, True
            masks.append((wanted, columns))
    here = {(cell.context, cell.query) for cell in general}
    products = [_plan_product(setting, prompts, *pair, [apart[key] for key in here & apart.keys()]) for pair in masks]
    step = setting.limits.general_cells
    costs = [_product_tokens(setting, prompts, product, ()) for product in products if product]
    costs += [_general_tokens(setting, general[begin : begin + step]) for begin in range(0, len(general), step)]
    wave = Growth(
        extent=dict(setting.study.extent),
        num_cells=num_cells,
        products=tuple(product for product in products if product),
        general=general,
        first_cells=_first_cells(prompts, setting.study.extent),
        tokens=sum(costs, TokenCounts()),
        whole=work.tokens,
        decision=decision,
    )
    return replace(work, growths=(*earlier, wave))


def _cell(prompts: Prompts, apart: Mapping[tuple[int, int], Cell], context: int, query: int) -> Cell:
    """One prompt by itself: of those whose parts do not join as they are, else its parts joined."""
    if (found := apart.get((context, query))) is not None:
        return found
    return Cell(
        context, query, np.concatenate([prompts.contexts[context], prompts.queries[query]]), prompts.after(query)
    )


def tokenised(setting: ResolvedStudy, tokenizer: Any) -> Prompts:
    """A study's prompts as tokens."""
    study = setting.study
    return tokenise(
        setting.design,
        setting.task,
        setting.examples,
        tokenizer,
        study.seed,
        # Of an API the endpoint knows what the first token of a label is; bytes, which stand for tokens, do not.
        scoring="generate" if setting.is_generated else "loglikelihood" if study.endpoint else scoring_of(study),
        chat=study.chat or "none",
    )


def _growth(
    setting: ResolvedStudy,
    prompts: Prompts,
    kept: NDArray[np.int64],
    extent: Mapping[str, int],
    before: Mapping[str, int] | None,
) -> Growth:
    """The cells of ``extent`` that the extent ``before`` lacks: at most two products, and cells outside them."""
    contexts, queries = _extent_masks(setting, prompts, kept, extent)
    old_contexts, old_queries = np.zeros_like(contexts), np.zeros_like(queries)
    if before is not None:
        old_contexts, old_queries = _extent_masks(setting, prompts, kept, before)
    num_old = np.count_nonzero(contexts & old_contexts) * np.count_nonzero(queries & old_queries)

    def is_new(cell: Cell) -> bool:
        is_there = contexts[cell.context] and queries[cell.query]
        return bool(is_there and not (old_contexts[cell.context] and old_queries[cell.query]))

    general: Sequence[Cell]
    if (own := prompts.own) is None:
        general, cuts = list(filter(is_new, prompts.general)), None
        factors = ((contexts & ~old_contexts, queries), (old_contexts, queries & ~old_queries))
        products = [_plan_product(setting, prompts, *pair, general) for pair in factors]
    else:
        general, products = own.where(own.among(contexts, queries) & ~own.among(old_contexts, old_queries)), []
        cuts = general.cuts(_unit_tokens(setting, general.lengths), setting.limits.parts)
    step = setting.limits.general_cells
    ends = cuts or (*range(step, len(general), step), len(general))
    costs = [_product_tokens(setting, prompts, product, general) for product in products if product]
    costs += [_general_tokens(setting, general[begin:end]) for begin, end in pairwise((0, *ends)) if begin < end]
    tokens = sum(costs, TokenCounts())
    return Growth(
        extent=dict(extent),
        num_cells=int(np.count_nonzero(contexts) * np.count_nonzero(queries) - num_old),
        products=tuple(product for product in products if product),
        general=general,
        first_cells=_first_cells(prompts, extent),
        tokens=tokens,
        whole=tokens if before is None else _growth(setting, prompts, kept, extent, None).tokens,
        cuts=cuts,
    )


def _extent_masks(
    setting: ResolvedStudy, prompts: Prompts, kept: NDArray[np.int64], extent: Mapping[str, int]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which contexts [C] and which queries [Q] are in an extent; queries that are too long are not."""
    contexts = np.zeros(len(prompts.contexts), dtype=bool)
    contexts[prompts.context_of[: extent["sets"], : extent["permutations"]]] = True
    counts = {"test": extent["queries"], "dev": extent["dev_queries"], CONTENT_FREE: len(CONTENT_FREE_INPUTS)}
    by_split = [np.arange(len(one.rows)) < one.num_distinct(counts[one.split]) for one in setting.design.queries]
    queries = np.concatenate(by_split)
    queries[np.setdiff1d(np.arange(len(queries)), kept)] = False
    return contexts, queries


def _first_cells(prompts: Prompts, extent: Mapping[str, int]) -> NDArray[np.int64]:
    """See `Growth.first_cells`."""
    within = prompts.context_of[: extent["sets"], : extent["permutations"]]
    contexts, first = np.unique(within, return_index=True)
    cells = np.full((len(prompts.contexts), 3), -1, dtype=np.int64)
    cells[contexts] = np.stack(np.unravel_index(first, within.shape), axis=1)
    return cells


def _plan_product(
    setting: ResolvedStudy,
    prompts: Prompts,
    contexts: NDArray[np.bool_],
    queries: NDArray[np.bool_],
    general: Sequence[Cell],
) -> Product | None:
    """Plans the wanted contexts [C] times the wanted queries [Q]; None where nothing is left to plan.

    A context or query whose cells are all among the ``general`` ones is left out. Cells of which that is not so are
    computed with the product, too, and their answers there are not used.
    """
    apart = [cell for cell in general if contexts[cell.context] and queries[cell.query]]
    by_context = np.bincount([cell.context for cell in apart], minlength=len(contexts))
    by_query = np.bincount([cell.query for cell in apart], minlength=len(queries))
    wanted = contexts & (by_context < queries.sum())
    numbers = np.flatnonzero(queries & (by_query < contexts.sum()))
    rows, marks, marked = _marked_rows(prompts, wanted)
    if not rows or not len(numbers):
        return None
    ids, choices = [prompts.queries[query] for query in numbers], prompts.choices
    plan = plan_product(
        ContextPaths(Rows.of(rows), Rows.of(marks)),
        ids,
        continuations_of(setting, prompts) if choices is None else [choices[query] for query in numbers],
        unit_tokens=_unit_tokens(setting, [len(each) for each in ids]),
    )
    of_plan = np.empty(plan.num_contexts, dtype=np.int64)
    of_plan[plan.context_index] = marked
    return Product(plan, of_plan, numbers)


def paths_of(prompts: Prompts, product: Product) -> ContextPaths:
    """The contexts of a product as its plan was made from them."""
    wanted = np.zeros(len(prompts.contexts), dtype=bool)
    wanted[product.contexts] = True
    rows, marks, _ = _marked_rows(prompts, wanted)
    return ContextPaths(Rows.of(rows), Rows.of(marks))


def continuations_of(setting: ResolvedStudy, prompts: Prompts) -> Sequence[Ids]:
    """What follows each query of a product: the labels, or what stands for an answer that will be generated."""
    return _UNKNOWN if setting.is_generated else prompts.continuations


def _unit_tokens(setting: ResolvedStudy, lengths: Sequence[int] | NDArray[np.int64]) -> int:
    """Prompt tokens of a unit, from the lengths of the product's queries (of whole prompts where there is none).

    Fewer where answers are generated, which adds to the work of a unit; for an API as many as `WorkLimits.unit_prompts`
    queries of the mean length have.
    """
    if not setting.is_generated and setting.model is not None:
        return setting.unit_tokens
    query = float(np.mean(lengths))  # of this product alone: it stays when the run grows
    if setting.model is None:
        return int(setting.limits.unit_prompts * query)
    return max(1, int(setting.unit_tokens * query / (query + setting.max_new_tokens)))


def api_prompt(ids: Ids) -> ApiPrompt:
    """One prompt of an API as text, or as the messages of a chat."""
    text = TextTokenizer()
    is_chat = bool(len(ids)) and int(ids.max()) > 255
    return text.ids_to_messages(ids) if is_chat else text.ids_to_text(ids)


def _marked_rows(prompts: Prompts, wanted: NDArray[np.bool_]) -> tuple[list[Ids], list[Ids], NDArray[np.int64]]:
    """Rows of token ids that hold every wanted context [C] as a prefix, each once.

    Beside them the lengths of these prefixes by row, ascending, and the numbers of their contexts, all in one array.
    """
    rows, marks, marked = [], [], []
    missing = wanted.copy()
    for row, lengths, contexts in zip(prompts.rows, prompts.marks, prompts.marked, strict=True):
        inside = missing[contexts]
        if inside.any():
            missing[contexts] = False
            rows.append(row[: lengths[inside][-1]])
            marks.append(lengths[inside])
            marked.append(contexts[inside])
    return rows, marks, np.concatenate([*marked, np.empty(0, np.int64)])


def _product_tokens(setting: ResolvedStudy, prompts: Prompts, product: Product, general: Sequence[Cell]) -> TokenCounts:
    """What a product costs, without what plain prompting would spare: its cells that are ``general`` ones, too.

    For an API an estimate, as its tokens are not known.
    """
    if setting.study.endpoint is not None:  # the plan counts bytes
        return TokenCounts(
            product.plan.prompt_tokens // _BYTES_PER_TOKEN, product.plan.tokens_unique // _BYTES_PER_TOKEN
        )
    contexts, queries = (np.zeros(len(all_of), dtype=bool) for all_of in (prompts.contexts, prompts.queries))
    contexts[product.contexts], queries[product.queries] = True, True
    twice = [cell for cell in general if contexts[cell.context] and queries[cell.query]]
    spared = sum(len(prompts.contexts[cell.context]) + len(prompts.queries[cell.query]) for cell in twice)
    kv_peak = product.plan.kv_peak_tokens
    if setting.is_generated:
        from iclperm.engine.decode import generation_bounds

        kv_peak = generation_bounds(product.plan, setting.max_new_tokens).kv_peak_tokens
    return TokenCounts(product.plan.prompt_tokens - spared, product.plan.tokens_unique, kv_peak)


def _general_tokens(setting: ResolvedStudy, cells: Sequence[Cell]) -> TokenCounts:
    """What cells outside the products cost when they are computed together."""
    requested = _requested(setting, cells)
    if setting.study.endpoint is not None:  # bytes, as above
        return TokenCounts(requested.prompt_tokens // _BYTES_PER_TOKEN, requested.tokens_unique // _BYTES_PER_TOKEN)
    return TokenCounts(requested.prompt_tokens, requested.tokens_unique, requested.kv_peak_tokens)


def plans_of(work: Work) -> list[Plan]:
    """Those of the products; where each query has demonstrations of its own, of all its cells."""
    return [product.plan for product in work.products] if work.prompts.own is None else general_plans(work)


def general_plans(work: Work) -> list[Plan]:
    """The plans of all cells outside the products, file by file."""
    return [_requested(work.setting, part.cells) for part in work.parts if part.product is None]


def _requested(setting: ResolvedStudy, cells: Sequence[Cell]) -> Plan:
    """The plan of some cells in one tree."""
    requests = [
        (cell.prompt, ids) for cell in cells for ids in (_UNKNOWN if setting.is_generated else cell.continuations)
    ]
    begins = np.array([len(prompt) for prompt, _ in requests], dtype=np.int64)
    return plan_requests(Rows.of(list(map(np.concatenate, requests))), begins)
