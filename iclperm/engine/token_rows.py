"""What the first layer makes of a token before it knows its position: once a token id, looked up from then on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from iclperm.engine.link import Array
from iclperm.engine.shapes import padded_rows
from iclperm.engine.tables import PackTables, filled
from iclperm.engine.tree import IntArray
from iclperm.errors import PlanError


class TokenRows:
    """Rows [N] that depend on a token id alone, each computed once: the first layer's q, k, v before rotation.

    For each pack first ``assign`` says which ids are new, then ``fill`` takes their rows. When ``max_bytes`` are full,
    the table is emptied and begins anew with the ids at hand.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._places = np.empty(0, np.int64)  # in the table, of each id; -1 for none
        self._table: torch.Tensor | None = None
        self._num_rows = 0
        self._num_new = 0  # of those rows, the last ones, which are not filled yet

    @property
    def table(self) -> torch.Tensor:
        """All rows computed so far, in their places."""
        assert self._table is not None
        return self._table

    def assign(self, ids: IntArray) -> tuple[IntArray, IntArray]:
        """The place of each of ``ids`` [M], and where among them ids [m] that have no row yet first occur."""
        if self._num_new:
            raise PlanError(
                "rows of token ids were assigned and never filled; this is a defect of iclperm, please report it"
            )
        if int(ids.max()) >= self._places.size:
            self._places = np.append(self._places, np.full(int(ids.max()) + 1 - self._places.size, -1))
        new = self._unknown(ids)
        if new.size and self._table is not None and self._num_rows + new.size > self._table.shape[0]:
            self._places[:], self._num_rows = -1, 0
            new = self._unknown(ids)
        end = self._num_rows + new.size
        self._places[ids[new]] = np.arange(self._num_rows, end)
        self._num_rows, self._num_new = end, new.size
        return self._places[ids], new

    def fill(self, rows: torch.Tensor) -> None:
        """Take the rows [m or more, N] of the ids that ``assign`` said were new."""
        if self._table is None or self._num_new > self._table.shape[0]:
            most = self._max_bytes // (rows.shape[1] * rows.itemsize)
            self._table = rows.new_empty(max(self._num_new, most), rows.shape[1])
        self._table[self._num_rows - self._num_new : self._num_rows] = rows[: self._num_new]
        self._num_new = 0

    def _unknown(self, ids: IntArray) -> IntArray:
        """Where ids that have no row yet first occur."""
        unknown = np.flatnonzero(self._places[ids] < 0)
        return unknown[np.unique(ids[unknown], return_index=True)[1]]


@dataclass(frozen=True)
class TokenPlaces:
    """Each row's place in the table of its token's rows int64 [M], and which rows bring new ids, padded int64 [m']."""

    def arrays(self, tables: PackTables) -> tuple[Array, ...]:
        ids = np.full(tables.num_rows, tables.pack.token_ids[0], np.int64)
        ids[: len(tables.pack)] = tables.pack.token_ids
        places, new = tables.token_rows.assign(ids)
        tables.num_new_ids = new.size
        return places, filled(new, padded_rows(new.size, tables.device) if new.size else 0)
