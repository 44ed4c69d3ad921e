"""Prompts of a design in which every query has demonstrations of its own: made one by one when they are asked for.

What such queries have in common is an *order of ranks*, such as the three nearest, the nearest last. It stands in the
place of a context: with a query it is one prompt, whose demonstrations are that query's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iclperm.prompts.contexts import context_ids
from iclperm.prompts.design import Design
from iclperm.prompts.encode import Ids
from iclperm.prompts.render import DesignTexts
from iclperm.prompts.seams import PromptParts


@dataclass(frozen=True)
class RankOrders:
    """The distinct orders of ranks of a design, which stand for its contexts.

    ``sets`` [C] are their retrievers and ``ranks`` [C] their ranks in the order of the prompt; ``ids`` int64 [C] name
    them by these, and ``of_cell`` int64 [S, P, K] is the number of each cell's.
    """

    sets: list[int]
    ranks: list[NDArray[np.int64]]
    ids: NDArray[np.int64]
    of_cell: NDArray[np.int64]

    @classmethod
    def of(cls, design: Design) -> RankOrders:
        """Those of a design. Without demonstrations, and with the same order of fewer ranks, all are one."""
        numbers: dict[int, int] = {}
        sets: list[int] = []
        ranks: list[NDArray[np.int64]] = []
        of_cell = np.empty((design.num_sets, design.num_permutations, len(design.orderings)), dtype=np.int64)
        for place, group in enumerate(design.orderings):
            for cell in np.ndindex(*of_cell.shape[:2]):
                order = group.permutations[cell[1]]
                name = rank_order_id(cell[0], order)
                if name not in numbers:
                    numbers[name] = len(numbers)
                    sets.append(cell[0])
                    ranks.append(order)
                of_cell[(*cell, place)] = numbers[name]
        return cls(sets, ranks, np.array(list(numbers), dtype=np.int64), of_cell)


def rank_order_id(index_set: int, ranks: Sequence[int] | NDArray[np.int64]) -> int:
    """What a run's tables call an order of the ranks of one retriever's neighbours; of no ranks it has no retriever."""
    row = np.array([index_set, *ranks] if len(ranks) else [], dtype=np.int32)
    return context_ids(row, np.array([len(row)]))[0]


class OwnContexts:
    """Which demonstrations each (order of ranks, query) shows, and how many tokens they take.

    ``places`` int32 [S, Q, K] are places among the demonstrations of `DesignTexts`, best first.
    """

    def __init__(self, design: Design, texts: DesignTexts, parts: PromptParts, start: Ids) -> None:
        self.orders = RankOrders.of(design)
        self.places = texts.of_rows(design.own).astype(np.int32)
        self._parts = parts
        self._before = np.concatenate([start, parts.opening])
        self._sizes = np.array([[len(ids) for ids in each] for each in (parts.first, parts.inner)], dtype=np.int64)
        self._query_sizes = np.array([len(ids) for ids in parts.queries], dtype=np.int64)

    @property
    def of_cell(self) -> NDArray[np.int64]:
        """See `RankOrders`."""
        return self.orders.of_cell

    @property
    def sizes(self) -> list[int]:
        """The number of demonstrations of each order, [C]."""
        return list(map(len, self.orders.ranks))

    def pairs(self) -> NDArray[np.int64]:
        """Every order with every query, int64 [C * Q, 2], sorted by the ids of their demonstrations, then of the query:
        about those side by side that begin with the same ids."""
        every = np.indices((len(self.orders.ranks), self.places.shape[1])).reshape(2, -1).T
        demonstrations, queries = map(_sorted_places, (self._parts.first, self._parts.queries))
        return every[np.lexsort([queries[every[:, 1]], *np.append(demonstrations, -1)[self.shown(every)].T[::-1]])]

    def members(self, order: int, query: int) -> NDArray[np.int32]:
        """The places of the demonstrations of one prompt, in order."""
        found: NDArray[np.int32] = self.places[self.orders.sets[order], query][self.orders.ranks[order]]
        return found

    def beginning(self, order: int, query: int) -> Ids:
        """The ids of one prompt up to its query, its parts joined."""
        members = self.members(order, query).tolist()
        pieces = [(self._parts.inner if place else self._parts.first)[member] for place, member in enumerate(members)]
        return np.concatenate([self._before, *pieces])

    def joined(self, order: int, query: int) -> Ids:
        """The ids of one prompt up to the label, its parts joined."""
        return np.concatenate([self.beginning(order, query), self._parts.queries[query]])

    def shown(self, pairs: NDArray[np.int64]) -> NDArray[np.int32]:
        """The places of the demonstrations of many prompts, int32 [N, K]; -1 where there are no more."""
        found = np.full((len(pairs), self.places.shape[2]), -1, dtype=np.int32)
        for order in np.unique(pairs[:, 0]).tolist():
            inside, ranks = np.flatnonzero(pairs[:, 0] == order), self.orders.ranks[order]
            queries = pairs[inside, 1]
            found[inside, : len(ranks)] = self.places[self.orders.sets[order]][queries][:, ranks]
        return found

    def lengths(self, pairs: NDArray[np.int64], shown: NDArray[np.int32]) -> NDArray[np.int64]:
        """The tokens of many prompts after 0, 1, ... K demonstrations, and with their query, int64 [N, K + 2]."""
        sizes = np.where(shown < 0, 0, self._sizes[1][shown])
        if sizes.shape[1]:
            sizes[:, 0] = np.where(shown[:, 0] < 0, 0, self._sizes[0][shown[:, 0]])
        opening = np.full((len(pairs), 1), len(self._before), dtype=np.int64)
        return np.cumsum(np.hstack([opening, sizes, self._query_sizes[pairs[:, 1]][:, None]]), axis=1)


def _sorted_places(rows: Sequence[Ids]) -> NDArray[np.int64]:
    """The place of each row of ids in their lexicographic order, int64 [N]."""
    order = sorted(range(len(rows)), key=lambda row: rows[row].tolist())
    places = np.empty(len(rows), dtype=np.int64)
    places[order] = np.arange(len(rows))
    return places
