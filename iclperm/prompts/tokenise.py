"""Prompts as token ids: render, tokenise jointly, cut at the seams, and check that the cuts hold everywhere.

A prompt's ids are those of its whole text. The product of contexts and queries is valid only where the ids of a query
do not depend on the context before it; the cells where they do are listed apart, with their own ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from iclperm.prompts.cells import Cell, OwnCells
from iclperm.prompts.chat import ChatFormat, Mode, chat_format
from iclperm.prompts.contexts import DesignContexts, Laid, RowBeginnings, check_chats, failed_prompts, lay_contexts
from iclperm.prompts.design import CONTENT_FREE, Design
from iclperm.prompts.encode import (
    EncodedText,
    Ids,
    JointEncoder,
    Tokenizer,
    refuse_nothing,
    refuse_special_inputs,
    scored_ids,
    split_labels,
)
from iclperm.prompts.render import DesignTexts
from iclperm.prompts.retrieved import OwnContexts
from iclperm.prompts.seams import CHECKS, EncodedParts, JoinChecks, PromptParts
from iclperm.study.study import Scoring
from iclperm.tasks.examples import most_choices
from iclperm.tasks.task import Examples, Task


@dataclass(frozen=True)
class PromptCounts:
    """How many joins were looked at, and how many failed.

    Seams are between two adjoining parts, distinct by the words on both sides. General cells are the (context, query)
    pairs that are no concatenation of their parts. A resplit query ends in a token that merges with a label: that token
    was moved to the continuations.
    """

    num_seams: int
    num_failed_seams: int
    num_checked_prompts: int
    num_failed_prompts: int
    num_general_cells: int
    num_resplit_queries: int


@dataclass(frozen=True)
class Pieces:
    """What every prompt is put together of: the texts, and their tokens with the places where they end. ``contexts``
    has, by their numbers, those that are not their parts joined; ``before`` are the ids in front of every prompt, which
    no text shows. Without a tokenizer there are texts alone."""

    texts: DesignTexts
    chat: ChatFormat | None
    encoded: EncodedParts | None
    contexts: dict[int, EncodedText]
    before: Ids


@dataclass(frozen=True)
class Prompts:
    """The prompts of a design as the product of contexts and queries, and the cells outside that product.

    ``contexts`` [C] are the distinct ones, from BOS to the last separator; ``context_ids`` int64 [C] name them by
    content; ``context_of`` int64 [S, P, K] is the number of each cell's context. ``rows`` hold the same contexts as
    prefixes of fewer sequences: ``marks`` are the lengths of each row's contexts, ``marked`` their numbers. ``queries``
    [Q] are the ids up to the label, split by split; ``continuations`` [L] those of the labels, shared by all queries
    (one empty row where the model writes on); ``gold`` int64 [Q] is the right label, -1 where there is none. Where each
    query has choices of its own, ``choices`` [Q] are their ids, L for each: after its last comes its first again, as
    often as it has fewer, and there are no ``continuations``; ``num_choices`` int64 [Q] are how many it has. Every
    prompt begins with ``start``: BOS, if the tokenizer or the chat template puts it there. Where each query has
    demonstrations of its own, contexts are orders of ranks without ids, and all cells are ``general``.
    """

    start: Ids
    contexts: RowBeginnings
    context_ids: NDArray[np.int64]
    context_of: NDArray[np.int64]
    rows: list[Ids]
    marks: list[Ids]
    marked: list[NDArray[np.int64]]
    queries: list[Ids]
    continuations: list[Ids]
    gold: NDArray[np.int64]
    general: Sequence[Cell]
    counts: PromptCounts
    pieces: Pieces
    choices: list[list[Ids]] | None = None
    num_choices: NDArray[np.int64] | None = None

    def after(self, query: int) -> list[Ids]:
        """The ids of what may follow a query, [L]."""
        return self.continuations if self.choices is None else self.choices[query]

    @property
    def own(self) -> OwnCells | None:
        """All cells, where each query has demonstrations of its own."""
        return self.general if isinstance(self.general, OwnCells) else None

    @property
    def apart(self) -> Sequence[Cell]:
        """The cells that are not their parts joined."""
        return self.general if self.own is None else list(self.own.apart.values())

    @property
    def num_contexts(self) -> int:
        """Distinct contexts; where each query has its own, distinct sequences of demonstrations."""
        return len(self.context_ids) if self.own is None else self.own.num_contexts

    def fed_tokens(self, num_new: int = 0) -> NDArray[np.int64]:
        """Tokens of each query's longest prompt that enter the model, int64 [Q].

        ``num_new`` is the largest number of tokens that the model writes. The last token of all, of a label or written,
        never enters the model.
        """

        def num_after(continuations: Sequence[Ids]) -> int:
            return max(num_new, *map(len, continuations)) - 1

        after = np.array([num_after(self.after(query)) for query in range(len(self.queries))], dtype=np.int64)
        if self.own is not None:
            fed = np.zeros(len(self.queries), dtype=np.int64)
            np.maximum.at(fed, self.own.pairs[:, 1], self.own.lengths + after[self.own.pairs[:, 1]])
            for cell in self.apart:
                fed[cell.query] = max(fed[cell.query], len(cell.prompt) + num_after(cell.continuations))
            return fed
        longest = int(max(lengths[-1] for lengths in self.marks))
        fed = longest + after + np.array([len(query) for query in self.queries], dtype=np.int64)
        for cell in self.general:
            own = len(cell.prompt) + num_after(cell.continuations)
            fed[cell.query] = max(fed[cell.query], own)
        return fed


def tokenise(
    design: Design,
    task: Task,
    examples: Mapping[str, Examples],
    tokenizer: Tokenizer,
    seed: int,
    *,
    scoring: Scoring = "loglikelihood",
    chat: Mode = "none",
    checks: JoinChecks = CHECKS,
) -> Prompts:
    """The prompts of a design as ids, joined of their parts where the joins hold.

    Every distinct pair of adjoining words is tokenised across its seam (of more than ``checks.seams`` pairs a sample,
    and all where one of it fails), and a keyed sample of whole prompts is compared with their parts. A failing seam
    sends its cells to the general path; a failing whole prompt sends all cells there. ``scoring: first_token`` cuts
    every label to its first token, ``generate`` leaves the labels out. With ``chat`` the tokenizer's template stands
    around the text (see `iclperm.prompts.chat`), and a keyed sample of conversations is compared with what it renders.

    Raises `TokenizationError` for special tokens in the data, for labels without ids, with equal ids or (cut) with an
    equal first id, and for a tokenizer without offsets; for a chat also what `chat_format` raises. O(tokens of
    demonstrations and queries + seams).
    """
    format_ = chat_format(chat, task, tokenizer)
    texts = DesignTexts(design, task, examples, scoring, format_)
    encoder = JointEncoder(tokenizer, format_.opening + texts.queries[0] if format_ else None)
    if format_:
        encoder.refuse_control(texts.contents(), format_)
    if any(split.split == CONTENT_FREE for split in design.queries):
        refuse_special_inputs(encoder.refuse_special)
    parts = PromptParts(texts, encoder, checks.seams)
    own = None if design.neighbours is None else OwnContexts(design, texts, parts, encoder.start)
    contexts = lay_contexts(texts, parts, encoder) if own is None else _of_ranks(own, parts, encoder.start)
    laid: Laid = own or contexts
    if format_:
        check_chats(texts, laid, format_, seed, checks.chats)
    if own is None:
        outside = parts.cells_outside(contexts.orders)
    else:
        pairs = own.pairs()
        breaks = parts.pairs_outside(own.shown(pairs), pairs[:, 1])
        outside = set(map(tuple, pairs[breaks].tolist()))
    failed, checked = failed_prompts(texts, parts, laid, outside, encoder, seed, checks.prompts)
    if failed:
        outside = set(product(range(len(laid.sizes)), range(len(texts.queries))))
    is_cut, most = scoring == "first_token", most_choices(examples)

    def after(query: int, ids: list[Ids]) -> list[Ids]:
        """What is scored after a query, of the ids of all that may follow."""
        if not most:
            return scored_ids(texts.continuations, ids, is_cut=is_cut)
        refuse_nothing(texts.after(query), ids)
        return [*ids, *ids[:1] * (most - len(ids))]

    def cell(context: int, query: int) -> Cell:
        prompt = texts.context(laid.members(context, query)) + texts.queries[query]
        (split,) = split_labels(encoder, [prompt], texts.after(query))
        continuations = after(query, split.continuations)
        whole = encoder.begun(split.prompt)
        return Cell(context, query, whole.ids, continuations, whole.ends)

    choices = None if parts.choices is None else [after(query, ids) for query, ids in enumerate(parts.choices)]
    continuations = [] if choices else after(0, parts.continuations)
    apart = [cell(context, query) for context, query in sorted(outside)]
    general: Sequence[Cell] = apart
    if own is not None:
        general = OwnCells(own, {(one.context, one.query): one for one in apart}, continuations, pairs, choices)
    return Prompts(
        start=encoder.opening,
        contexts=contexts.distinct,
        context_ids=contexts.ids,
        context_of=contexts.of_cell,
        rows=contexts.rows,
        marks=contexts.marks,
        marked=contexts.marked,
        queries=parts.queries,
        continuations=continuations,
        gold=texts.gold,
        general=general,
        counts=PromptCounts(
            num_seams=parts.num_seams,
            num_failed_seams=len(parts.failed_seams),
            num_checked_prompts=checked,
            num_failed_prompts=failed,
            num_general_cells=len(apart),
            num_resplit_queries=parts.num_resplit,
        ),
        pieces=Pieces(texts, format_, parts.encoded, contexts.joint, encoder.start),
        choices=choices,
        num_choices=None if parts.choices is None else np.array(list(map(len, parts.choices)), dtype=np.int64),
    )


def _of_ranks(own: OwnContexts, parts: PromptParts, start: Ids) -> DesignContexts:
    """Orders of ranks as contexts without ids, beside one row of all ids that stand before queries."""
    nothing = RowBeginnings([np.empty(0, dtype=np.int32)], *np.zeros((2, len(own.sizes)), dtype=np.int32))
    every = np.concatenate([start, parts.opening, *parts.first, *parts.inner])
    return DesignContexts(
        distinct=nothing,
        ids=own.orders.ids,
        of_cell=own.of_cell,
        orders=nothing,
        rows=[every],
        marks=[np.array([len(every)], dtype=np.int32)],
        marked=[np.empty(0, dtype=np.int64)],
        joint={},
    )
