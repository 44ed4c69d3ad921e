"""What a device is told of one pack: small tables of indices, made on the host and uploaded together.

A table is a value that says what it is made from; whoever needs one asks for it by that value. What the packs of a call
have asked for is made ahead for those that follow, so that each of them is one upload.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from iclperm.engine.link import Array, DeviceLink
from iclperm.engine.plan import Pack
from iclperm.engine.shapes import padded_rows
from iclperm.engine.tree import IntArray


class PackTable(Hashable, Protocol):
    """A frozen dataclass: what is to be known of a pack."""

    def arrays(self, tables: PackTables) -> tuple[Array, ...]:
        """The table's arrays for the pack of ``tables``; asked once a pack."""
        ...


@runtime_checkable
class StepTable(Protocol):
    """A table that changes between two steps of the same live rows."""

    def advance(self, tensors: tuple[torch.Tensor, ...], token_ids: torch.Tensor) -> None:
        """Make the tensors those of the next step, in which the rows' tokens are ``token_ids`` [R]."""
        ...


class IdRows(Protocol):
    """Rows that packs share by token id."""

    def assign(self, ids: IntArray) -> tuple[IntArray, IntArray]:
        """The place of each of ``ids`` [M], and where among them those that are new first occur."""
        ...


class _NoRows:
    """Where no layer runs."""

    def assign(self, ids: IntArray) -> tuple[IntArray, IntArray]:
        raise AssertionError("a kernel by itself looks up no rows by token")


class PackTables:
    """The tables of one pack, on whichever device asks.

    ``num_rows`` is the pack's rows with their padding, ``num_scored`` that of the scored rows. ``token_rows`` are those
    that packs share; ``wanted`` learns what is asked for.
    """

    def __init__(
        self,
        pack: Pack,
        link: DeviceLink,
        device: torch.device,
        token_rows: IdRows,
        wanted: dict[PackTable, None],
    ) -> None:
        scored = pack.scored_rows.size
        self.pack, self.device, self.token_rows = pack, device, token_rows
        self.num_rows = padded_rows(len(pack), device)
        self.num_scored = padded_rows(scored, device) if scored else 0
        self.num_new_ids = 0  # token ids that no pack before this one had
        self._link, self._wanted = link, wanted
        self._arrays: dict[PackTable, tuple[Array, ...]] = {}
        self._there: dict[torch.device, dict[PackTable, tuple[torch.Tensor, ...]]] = {}

    @classmethod
    def alone(cls, pack: Pack, device: torch.device, num_rows: int) -> PackTables:
        """Tables for a kernel that runs by itself, on ``num_rows`` rows of either kind."""
        tables = cls(pack, DeviceLink([device]), device, _NoRows(), {})
        tables.num_rows = tables.num_scored = num_rows
        return tables

    def make(self) -> None:
        """Make all that is known to be wanted, and send it to the device together."""
        for table in self._wanted:
            self.arrays_of(table)
        self._send(self.device)

    def of(self, table: PackTable, device: torch.device) -> tuple[torch.Tensor, ...]:
        """A table's arrays as tensors on a device."""
        there = self._there.get(device, {})
        if table not in there:
            self._wanted.setdefault(table)
            self.arrays_of(table)
            there = self._send(device)
        return there[table]

    def arrays_of(self, table: PackTable) -> tuple[Array, ...]:
        """A table's arrays on the host, made once."""
        if table not in self._arrays:
            self._arrays[table] = table.arrays(self)
        return self._arrays[table]

    def advance(self, token_ids: torch.Tensor) -> None:
        """Become those of the next step of live rows, whose ids [R] are on the device; nothing is made or sent."""
        self.pack = self.pack.next_step()
        for there in self._there.values():
            for table, tensors in there.items():
                if isinstance(table, StepTable):
                    table.advance(tensors, token_ids)

    def _send(self, device: torch.device) -> dict[PackTable, tuple[torch.Tensor, ...]]:
        """Upload what a device lacks, in one piece."""
        there = self._there.setdefault(device, {})
        missing = [table for table in self._arrays if table not in there]
        tensors = iter(self._link.upload([array for table in missing for array in self._arrays[table]], device))
        there.update({table: tuple(next(tensors) for _ in self._arrays[table]) for table in missing})
        return there


@dataclass(frozen=True)
class Inputs:
    """Token ids and positions int64 [1, M], zeros past the pack's end."""

    def arrays(self, tables: PackTables) -> tuple[Array, ...]:
        return tuple(filled(given, tables.num_rows)[None] for given in (tables.pack.token_ids, tables.pack.positions))

    def advance(self, tensors: tuple[torch.Tensor, ...], token_ids: torch.Tensor) -> None:
        ids, positions = (each[0, : token_ids.shape[0]] for each in tensors)
        ids.copy_(token_ids.clamp(min=0))  # a row that has no next token has ended
        positions.add_(1)


@dataclass(frozen=True)
class EachRow:
    """Every row with its padding, int64 [M]."""

    def arrays(self, tables: PackTables) -> tuple[Array, ...]:
        return (np.arange(tables.num_rows),)


@dataclass(frozen=True)
class ScoredRows:
    """The rows that logits are read of, int64 [R'], padded as matrix products need them, or [R]."""

    is_padded: bool

    def arrays(self, tables: PackTables) -> tuple[Array, ...]:
        rows = tables.pack.scored_rows
        return (filled(rows, tables.num_scored if self.is_padded else rows.size),)


@dataclass(frozen=True)
class WantedPairs:
    """Of each wanted pair its place among the scored rows and its token id, int64 [X] each."""

    def arrays(self, tables: PackTables) -> tuple[Array, ...]:
        return tables.pack.pair_row.astype(np.int64), tables.pack.pair_id.astype(np.int64)


def filled(values: Array, size: int) -> Array:
    """Values as int64, zeros after them up to ``size``."""
    out = np.zeros(size, np.int64)
    out[: values.size] = values
    return out
