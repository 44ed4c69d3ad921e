"""The work of a run as data: which cells it has, how they are cut into units and files, and what identifies them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iclperm.engine.plan import Plan, plan_requests
from iclperm.engine.tree import Rows
from iclperm.prompts.cells import Cell
from iclperm.prompts.tokenise import Prompts
from iclperm.runs.reading import published_answers
from iclperm.runs.setting import ResolvedStudy
from iclperm.runs.waves import Decision
from iclperm.study.states import OK, OVERLONG


@dataclass(frozen=True)
class Product:
    """Cells that are every one of some contexts with every one of some queries.

    ``plan`` numbers its contexts and queries from 0 on; ``contexts`` int64 [C] and ``queries`` int64 [Q] give the
    number of each in `Prompts`.
    """

    plan: Plan
    contexts: NDArray[np.int64]
    queries: NDArray[np.int64]


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of all distinct prompts, distinct tokens, and the most whose keys and values are in memory at once.

    ``naive`` counts a prompt without its labels' tokens, unlike the engine's report: that is what run folders record.
    """

    naive: int = 0
    unique: int = 0
    kv_peak: int = 0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(self.naive + other.naive, self.unique + other.unique, max(self.kv_peak, other.kv_peak))


@dataclass(frozen=True)
class Part:
    """What one file holds: ``units`` of a ``product``, or ``cells`` outside the products."""

    growth: int
    """The number of the growth that added it to the run."""
    product: Product | None
    units: range
    cells: Sequence[Cell]
    is_alone: bool = False
    """Whether its cells are labels after no text at all (`iclperm.runs.alone`), which are rows of another table."""


@dataclass(frozen=True)
class Growth:
    """The cells that a run's growth to an extent adds: those of the extent that no earlier growth has."""

    extent: dict[str, int]
    """Its sets, permutations, queries and dev queries, by the study's keys."""
    num_cells: int
    products: tuple[Product, ...]
    general: Sequence[Cell]
    """The added cells outside the products."""
    first_cells: NDArray[np.int64]
    """The first (set, permutation, place on the K axis) of each context within the extent, int64 [C, 3]; -1 for a
    context that is not in it."""
    tokens: TokenCounts
    """Those of the added cells."""
    whole: TokenCounts
    """Those of all cells of the extent, had they been computed at once."""
    decision: Decision | None = None
    """What it asks, of a run that asks in waves."""
    cuts: tuple[int, ...] | None = None
    """Where the files of its ``general`` cells end, if not after every so many."""
    alone: Sequence[Cell] = ()
    """Labels after no text at all that it adds; they count as its cells."""

    @property
    def num_units(self) -> int:
        """Units of the products."""
        return sum(product.plan.num_units for product in self.products)

    def parts(self, number: int, most_parts: int, general_cells: int) -> Iterator[Part]:
        """The files of this growth, which is the run's ``number``-th, in the order of work.

        At most ``most_parts`` files hold units, and as many hold other cells: ``general_cells`` each, more where
        needed.
        """
        per_part = -(-self.num_units // most_parts) or 1
        general_cells = max(general_cells, -(-max(len(self.general), len(self.alone)) // most_parts))
        cuts = self.cuts or (*range(general_cells, len(self.general), general_cells), len(self.general))
        for product in self.products:
            for begin in range(0, product.plan.num_units, per_part):
                yield Part(number, product, range(begin, min(begin + per_part, product.plan.num_units)), [])
        for begin, end in pairwise((0, *cuts)):
            if begin < end:
                yield Part(number, None, range(0), self.general[begin:end])
        for begin in range(0, len(self.alone), general_cells):
            yield Part(number, None, range(0), self.alone[begin : begin + general_cells], is_alone=True)


@dataclass(frozen=True)
class Work:
    """A study's prompts as tokens, and its cells as units and parts."""

    setting: ResolvedStudy
    prompts: Prompts
    right_answers: list[str]
    """The right label or answer of each query in its normal form, [Q]."""
    kept: NDArray[np.int64]
    """The numbers of the queries that fit the context window, int64."""
    growths: tuple[Growth, ...]
    """How the run has grown: the first is the run itself, the last goes as far as the study asks."""
    opening: tuple[str, ...]
    """The tokens that every prompt begins with."""
    nothing: tuple[str, ...] = ()
    """Those that stand for no text, before labels that are asked without a context."""

    @property
    def tokens(self) -> TokenCounts:
        """Those of the whole study, had it been computed at once."""
        return self.growths[-1].whole

    @property
    def choice_tokens(self) -> int:
        """Tokens of choices before their last that are fed after all prompts; 0 where all rows have the same labels, of
        an API, whose tokens are not known, and where cells are dealt, which are told beside all cells.

        The plans that run folders hold count prompts alone.
        """
        choices, number = self.prompts.choices, self.prompts.num_choices
        study = self.setting.study
        if choices is None or number is None or study.endpoint is not None or study.cells != "crossed":
            return 0
        each = [sum(len(ids) - 1 for ids in choices[query][: number[query]]) for query in self.kept]
        return round(sum(growth.num_cells for growth in self.growths) * float(np.mean(each)))

    @cached_property
    def plain_tokens(self) -> int:
        """Tokens that a model forwards prompt by prompt: every prompt, and before each label's later tokens once more;
        of generated answers those of the prompts alone."""
        cells = [cell for growth in self.growths for cell in (*growth.general, *growth.alone)]
        if self.setting.is_generated:
            in_products = sum(product.plan.prompt_tokens for product in self.products)
            return in_products + sum(len(cell.prompt) for cell in cells)
        requests = [(cell.prompt, ids) for cell in cells for ids in cell.continuations]
        begins = np.array([len(prompt) for prompt, _ in requests], dtype=np.int64)
        outside = plan_requests(Rows.of(list(map(np.concatenate, requests))), begins)
        return sum(product.plan.plain_tokens for product in self.products) + outside.plain_tokens

    @cached_property
    def products(self) -> tuple[Product, ...]:
        """Those of all growths."""
        return tuple(product for growth in self.growths for product in growth.products)

    @cached_property
    def parts(self) -> list[Part]:
        """The parts of the whole run, by their numbers."""
        limits = self.setting.limits
        cells = limits.generated_cells if self.setting.is_generated else limits.general_cells
        return [
            part for number, growth in enumerate(self.growths) for part in growth.parts(number, limits.parts, cells)
        ]

    @cached_property
    def general_cells(self) -> NDArray[np.int64]:
        """All cells outside the products, each as context * Q + query, int64."""
        cells = [cell for growth in self.growths for cell in growth.general]
        return np.array([cell.context * len(self.prompts.queries) + cell.query for cell in cells], dtype=np.int64)

    @property
    def query_states(self) -> NDArray[np.uint8]:
        """The state of each query before anything is scored, uint8 [Q]: ok or overlong."""
        states = np.full(len(self.prompts.queries), OVERLONG, dtype=np.uint8)
        states[self.kept] = OK
        return states

    @property
    def disk_bytes(self) -> int:
        """About what the files of all parts take; for generated answers a third of the longest that they can be, as
        they are stored compressed."""
        num_cells = sum(growth.num_cells for growth in self.growths)
        setting = self.setting
        each = 4 * setting.max_new_tokens // 3 + 32 if setting.is_generated else 4 * len(setting.labels) + 4
        return num_cells * each + (len(self.parts) << 12)

    @property
    def begins(self) -> dict[str, int]:
        """Where each split begins among all queries."""
        offsets = self.setting.design.query_offsets.tolist()
        return {one.split: begin for one, begin in zip(self.setting.design.queries, offsets[:-1], strict=True)}

    @cached_property
    def published_answers(self) -> list[str]:
        """The right label or answer of each query as the data holds it, [Q]."""
        return published_answers(self.setting)

    def identities(self) -> list[dict[str, Any]]:
        """What each growth's plan says, JSON-safe; the first begins with what identifies the run."""
        growths = [self._growth_identity(number) for number in range(len(self.growths))]
        return [{**self.setting.identity, "label_lengths": self._label_lengths(), **growths[0]}, *growths[1:]]

    def _label_lengths(self) -> dict[str, list[int]]:
        """What log-likelihoods of labels are divided by for each value of ``normalize``, [L] each.

        Empty where there is nothing to divide: generated answers have no log-likelihoods of labels, and how many tokens
        an API makes of a label is not known.
        """
        if self.setting.is_generated:
            return {"sum": [], "mean": [], "bytes": []}
        study = self.setting.study
        if self.setting.task.has_row_choices:  # the table of queries has theirs
            return {"sum": [1] * len(self.setting.labels), "mean": [], "bytes": []}
        strip = str.strip if study.chat != "none" else str
        texts = list(map(strip, self.setting.task.continuations()))
        ones = [1] * len(texts)
        if study.scoring == "first_token":
            return {"sum": ones, "mean": ones, "bytes": ones}
        return {
            "sum": ones,
            "mean": [] if study.endpoint else [len(ids) for ids in self.prompts.continuations],
            "bytes": [len(text.encode()) for text in texts],
        }

    def _num_odd_labels(self, growth: Growth) -> int:
        """How many cells have labels of other numbers of tokens than those of the products."""
        if self.prompts.own is not None and not self.prompts.apart:
            return 0  # without making every one
        return sum(
            list(map(len, cell.continuations)) != list(map(len, self.prompts.after(cell.query)))
            for cell in growth.general
        )

    def _num_apart(self, growth: Growth) -> int:
        """How many of its cells have parts that do not simply join."""
        if growth.decision is None and self.prompts.own is None:
            return len(growth.general)
        apart = {id(cell) for cell in self.prompts.apart}
        return sum(id(cell) in apart for cell in growth.general) if apart else 0

    def _growth_identity(self, number: int) -> dict[str, Any]:
        growth, setting = self.growths[number], self.setting
        has_dev = growth.extent["dev_queries"] > 0
        return {
            "extents": [growth.extent for growth in self.growths[: number + 1]],
            "dev": setting.examples["dev"].digest if has_dev else None,
            "tokens": {"naive": growth.whole.naive, "unique": growth.whole.unique},
            "counts": setting.counts(["test", "dev"] if has_dev else ["test"]),
            **({} if growth.decision is None else {"decision": growth.decision.to_dict()}),
            "work": {
                "cells": growth.num_cells,
                "units": growth.num_units,
                "parts": sum(part.growth == number for part in self.parts),
                "cut": _cut_hash(self.prompts, growth),
                **({"unit_tokens": setting.unit_tokens} if setting.limits.is_told else {}),
                "general_cells": self._num_apart(growth),
                "odd_labels": self._num_odd_labels(growth),
            },
        }


def _cut_hash(prompts: Prompts, growth: Growth) -> str:
    """SHA-256 of which cells each unit and each part holds: sessions that agree on it mean the same by a part.

    Cells count by their token ids, so that sessions whose tokenizers cut a prompt otherwise do not agree.
    """
    digest = hashlib.sha256(b"".join(ids.tobytes() + b"/" for ids in prompts.continuations))
    for product in growth.products:
        core = product.plan.core
        borders = (product.plan.block_offsets, core.unit_block, core.unit_context_begin, core.unit_context_end)
        for numbers in (*borders, product.plan.query_order, prompts.context_ids[product.contexts]):
            digest.update(np.asarray(numbers, dtype="<i8").tobytes())
        for query in product.queries:
            digest.update(prompts.queries[query].astype("<i4").tobytes() + b"/")
            for ids in prompts.choices[query] if prompts.choices else ():
                digest.update(ids.astype("<i4").tobytes() + b"/")
    for cell in (*growth.general, *growth.alone):
        digest.update(b"".join(ids.astype("<i4").tobytes() + b"/" for ids in (cell.prompt, *cell.continuations)))
    return digest.hexdigest()
