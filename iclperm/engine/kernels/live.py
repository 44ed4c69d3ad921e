"""Where live rows stand and where their keys lie, on the devices that attend; from step to step it goes on there.

Between two steps of the same live rows every position grows by one, and the slot of each position is known beforehand:
nothing is made on the host or sent to a device until rows end or come.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from iclperm.engine.kernels.chunks import list_items
from iclperm.engine.link import Array
from iclperm.engine.plan import LiveRows
from iclperm.engine.tables import PackTables


@dataclass(frozen=True)
class LivePlaces:
    """Lane and position of each live row int32 [R]; what is new in the table of slots: places int64 and slots int32."""

    def arrays(self, tables: PackTables) -> tuple[Array, ...]:
        live = live_rows(tables)
        positions = tables.pack.positions[: len(live)].astype(np.int32)
        return live.lanes, positions, live.changed_place, live.changed_slot

    def advance(self, tensors: tuple[torch.Tensor, ...], token_ids: torch.Tensor) -> None:
        """Every row is one position further."""
        tensors[1].add_(1)


@dataclass(frozen=True)
class LiveItems:
    """The shared and the own work items of live rows, int32 [., 4], shared ones of at most ``block_rows`` rows."""

    block_rows: int

    def arrays(self, tables: PackTables) -> tuple[Array, ...]:
        live = live_rows(tables)
        items = list_items(live.lengths, live.shared, self.block_rows)
        return items.shared, items.own


def live_rows(tables: PackTables) -> LiveRows:
    """The live rows of a pack that has some."""
    assert tables.pack.live is not None
    return tables.pack.live


class LiveSlots:
    """The table of live rows' slots on each device, int32 [lanes, width]; what packs change in it stays."""

    def __init__(self) -> None:
        self._on: dict[torch.device, tuple[torch.Tensor, LiveRows | None]] = {}

    def of(self, tables: PackTables, device: torch.device) -> torch.Tensor:
        """The table for a pack, brought up to date at the first call for its live rows."""
        live = live_rows(tables)
        slots, current = self._on.get(device, (None, None))
        if slots is None:
            slots = torch.zeros(live.num_lanes, live.width, dtype=torch.int32, device=device)
        if current is not live:
            _, _, places, changed = tables.of(LivePlaces(), device)
            slots.view(-1)[places] = changed
            self._on[device] = slots, live
        return slots
