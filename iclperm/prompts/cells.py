"""Prompts that stand by themselves, outside any product of contexts and queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

import numpy as np
from numpy.typing import NDArray

from iclperm.prompts.encode import EncodedText, Ids
from iclperm.prompts.retrieved import OwnContexts


@dataclass(frozen=True)
class Cell:
    """One (context, query) pair that the product cannot hold, with the ids of its own jointly tokenised prompt, and
    the places in the prompt's text where they end."""

    context: int
    query: int
    prompt: Ids
    continuations: list[Ids]
    ends: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @property
    def tokens(self) -> EncodedText:
        """The ids of the prompt and their ends."""
        return EncodedText(self.prompt, self.ends)


@dataclass(frozen=True)
class OwnCells(Sequence[Cell]):
    """The prompts of queries with demonstrations of their own, each made when it is asked for.

    ``pairs`` int64 [N, 2] are orders of ranks and queries, those side by side that begin with the same demonstrations.
    ``apart`` are those whose parts do not simply join; all others are followed by ``continuations`` [L], or where there
    are ``choices`` [Q] by those of their query.
    """

    contexts: OwnContexts
    apart: Mapping[tuple[int, int], Cell]
    continuations: list[Ids]
    pairs: NDArray[np.int64]
    choices: list[list[Ids]] | None = None

    def __len__(self) -> int:
        return len(self.pairs)

    @overload
    def __getitem__(self, place: int) -> Cell: ...
    @overload
    def __getitem__(self, place: slice) -> OwnCells: ...
    def __getitem__(self, place: int | slice) -> Cell | OwnCells:
        if isinstance(place, slice):
            return self._of(self.pairs[place])
        order, query = self.pairs[place].tolist()
        found = self.apart.get((order, query))
        after = self.continuations if self.choices is None else self.choices[query]
        return found or Cell(order, query, self.contexts.joined(order, query), after)

    def among(self, orders: NDArray[np.bool_], queries: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Whether each is of one of some orders [C] and some queries [Q], bool [N]."""
        return orders[self.pairs[:, 0]] & queries[self.pairs[:, 1]]

    def where(self, wanted: NDArray[np.bool_]) -> OwnCells:
        """Those that are wanted, bool [N], in the same order."""
        return self._of(self.pairs[wanted])

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each prompt, int64 [N]."""
        return self._sizes[0]

    @property
    def num_contexts(self) -> int:
        """Distinct sequences of demonstrations. O(N log N)."""
        return len(np.unique(self.contexts.shown(self.pairs), axis=0))

    def cuts(self, tokens: float, most: int) -> tuple[int, ...]:
        """Where to cut them into pieces of about so many tokens that no earlier prompt of the piece has, and not into
        more than ``most``; the last is their number.

        A cut is where two neighbours share no demonstration, unless none comes before twice the size: what pieces have
        in common, each has to forward anew. O(N).
        """
        _, new, num_shared = self._sizes
        tokens, ends, size = max(tokens, float(new.sum()) / most), [], 0
        for place, (more, shared) in enumerate(zip(new.tolist(), num_shared.tolist(), strict=True)):
            if size >= 2 * tokens or (size >= tokens and not shared):
                ends.append(place)
                size = 0
            size += more
        return (*ends, len(self))

    @cached_property
    def _sizes(self) -> tuple[NDArray[np.int64], ...]:
        """Of each prompt its tokens, those that the prompt before it does not begin with, and how many demonstrations
        it begins with like that one, int64 [N] each."""
        shown = self.contexts.shown(self.pairs)
        until = self.contexts.lengths(self.pairs, shown)
        whole = until[:, -1].copy()
        for place, pair in enumerate(self.pairs.tolist() if self.apart else ()):
            if (cell := self.apart.get((pair[0], pair[1]))) is not None:
                whole[place] = len(cell.prompt)
        same = np.logical_and.accumulate((shown[1:] == shown[:-1]) & (shown[1:] >= 0), axis=1).sum(axis=1)
        shared = np.append(0, same)[: len(shown)].astype(np.int64)
        return whole, np.maximum(whole - until[np.arange(len(until)), shared], 0), shared

    def _of(self, pairs: NDArray[np.int64]) -> OwnCells:
        return OwnCells(self.contexts, self.apart, self.continuations, pairs, self.choices)
