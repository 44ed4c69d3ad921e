"""Keys and values of an open path outside the memory that is computed in: one layer's at a time are read back.

Beside a GPU they lie in the host's memory, on a host in a file. What is computed, and in which order, is what it would
be with all of them at hand.
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from iclperm.engine.forward import OneLayerPool, PassLimits
from iclperm.engine.memory import free_bytes
from iclperm.engine.plan import Pack
from iclperm.engine.tree import TokenArray
from iclperm.errors import RequestError
from iclperm.study.sizes import bytes_in_words

# No kernel's tile of keys is larger, and tiles are cut at multiples of their size: of each that is read, all is there.
_MOST_TILE_KEYS = 256
_SAMPLE_ROWS, _SAMPLE_ROW_BYTES, _SAMPLES = 4096, 2048, 4
_IN_CACHE = 0.5  # of the host's free memory, the share up to which a file is taken to stay in it


class Store(Protocol):
    """Rows of keys and of values by layer and slot; a place is (layer, 0 for keys or 1 for values)."""

    def write(self, place: tuple[int, int], num_slots: int, slot: int, rows: torch.Tensor) -> None:
        """Keep ``rows`` [n, ...] in slots from ``slot`` on, of ``num_slots``."""

    def read(self, place: tuple[int, int], slot: int, rows: torch.Tensor) -> None:
        """Fill ``rows`` [n, ...] from slots from ``slot`` on, which have been written."""


class HostStore:
    """In the host's memory, pinned if it is a GPU that copies."""

    def __init__(self, device: torch.device) -> None:
        self._is_pinned = device.type == "cuda"
        self._rows: dict[tuple[int, int], torch.Tensor] = {}

    def write(self, place: tuple[int, int], num_slots: int, slot: int, rows: torch.Tensor) -> None:
        if place not in self._rows:
            shape = (num_slots, *rows.shape[1:])
            self._rows[place] = torch.empty(shape, dtype=rows.dtype, device="cpu", pin_memory=self._is_pinned)
        # All copies go through one stream, in their order.
        self._rows[place][slot : slot + len(rows)].copy_(rows, non_blocking=self._is_pinned)

    def read(self, place: tuple[int, int], slot: int, rows: torch.Tensor) -> None:
        rows.copy_(self._rows[place][slot : slot + len(rows)], non_blocking=self._is_pinned)


class FileStore:
    """In one file without a name, which is gone with the store; its pages in memory are the system's to take back."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  it lives as long as the store
        weakref.finalize(self, self._file.close)
        self._begins: dict[tuple[int, int], int] = {}
        self._end = 0

    def write(self, place: tuple[int, int], num_slots: int, slot: int, rows: torch.Tensor) -> None:
        row_bytes = rows[0].nbytes
        if place not in self._begins:
            self._reserve(num_slots * row_bytes)
            self._begins[place], self._end = self._end, self._end + num_slots * row_bytes
        left, offset = _as_bytes(rows), self._begins[place] + slot * row_bytes
        while left:
            done = os.pwrite(self._file.fileno(), left, offset)
            left, offset = left[done:], offset + done

    def read(self, place: tuple[int, int], slot: int, rows: torch.Tensor) -> None:
        left, offset = _as_bytes(rows), self._begins[place] + slot * rows[0].nbytes
        while left:
            done = os.preadv(self._file.fileno(), [left], offset)
            if not done:
                raise OSError(errno.EIO, f"the file of keys and values in {self._folder} ends early; it was cut short")
            left, offset = left[done:], offset + done

    def forget(self) -> None:
        """Have the system drop what it holds of the file in memory."""
        os.fsync(self._file.fileno())
        if sys.platform == "darwin":
            return
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _reserve(self, num_bytes: int) -> None:
        """Take room for so many more bytes now, not in the middle of a unit, where the system can."""
        if sys.platform == "darwin":  # it cannot: a full disk is met where it is written
            return
        try:
            os.posix_fallocate(self._file.fileno(), self._end, num_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise RequestError(
                f"{str(self._folder)!r} has no room for {bytes_in_words(self._end + num_bytes)} of keys and values of "
                "the open path; set TMPDIR to a folder on a disk that has, or raise memory_budget"
            ) from None


class OffloadedPool(OneLayerPool):
    """A pool whose layers lie in a store: a layer's rows are read for each pack that attends to them."""

    def __init__(self, num_slots: int, limits: PassLimits, store: Store) -> None:
        super().__init__(num_slots, limits)
        self._store = store
        self._read: list[tuple[int, int]] = []
        self._written: list[tuple[int, int]] = []
        self._first_position = 0

    def start(self, pack: Pack) -> None:
        in_pool = pack.span_source == 0
        self._read = joined(pack.span_begin[in_pool], pack.span_end[in_pool])
        self._written = joined(pack.retain_slot, pack.retain_slot + pack.retain_end - pack.retain_begin)
        self._first_position = int(pack.visit_pos.min())

    def layer(self, number: int, k: torch.Tensor, v: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        pools = self._shared(k, v)
        # Position p of a context lies in slot p, and a slot's position is never beyond it.
        first = max(0, self._first_position - window + 1) // _MOST_TILE_KEYS * _MOST_TILE_KEYS if window else 0
        for begin, end in self._read:
            for part, pool in enumerate(pools):
                if max(begin, first) < end:
                    self._store.read((number, part), max(begin, first), pool[max(begin, first) : end])
        return pools

    def leave(self, number: int) -> None:
        for begin, end in self._written:
            for part, pool in enumerate(self._layers[0]):
                self._store.write((number, part), self._num_slots, begin, pool[begin:end])


def joined(begins: TokenArray, ends: TokenArray) -> list[tuple[int, int]]:
    """Half-open ranges as few that do not touch, ascending."""
    found: list[tuple[int, int]] = []
    pairs = np.unique(np.stack([begins, ends], axis=1), axis=0).tolist() if begins.size else []
    for begin, end in pairs:
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif begin < end:
            found.append((begin, end))
    return found


def open_store(device: torch.device) -> Store:
    """A new store of the kind that serves a device."""
    return FileStore(scratch_folder()) if device.type == "cpu" else HostStore(device)


def scratch_folder() -> Path:
    """Where files of keys and values go: TMPDIR, else /var/tmp, which lies on a disk where /tmp may lie in memory."""
    given = os.environ.get("TMPDIR")
    usual = "/var/tmp" if os.access("/var/tmp", os.W_OK) else None
    return Path(given or usual or tempfile.gettempdir())


def room_in_store(device: torch.device) -> int:
    """Bytes that a store beside a device may take."""
    if device.type != "cpu":
        return free_bytes(torch.device("cpu"))
    found = os.statvfs(scratch_folder())
    return found.f_bavail * found.f_frsize


def store_rate(device: torch.device, num_bytes: int) -> float:
    """Bytes a second at which a store of ``num_bytes`` is read: the best of some samples of 8 MB, measured now.

    A file that the host's free memory holds is read from there, a larger one from its disk.
    """
    store, place = open_store(device), (0, 0)
    rows = torch.zeros(_SAMPLE_ROWS, _SAMPLE_ROW_BYTES, dtype=torch.uint8, device=device)
    store.write(place, len(rows), 0, rows)
    from_disk = isinstance(store, FileStore) and num_bytes > _IN_CACHE * free_bytes(device)
    best = 0.0
    for _ in range(_SAMPLES):
        if from_disk and isinstance(store, FileStore):
            store.forget()
        started = time.perf_counter()
        store.read(place, 0, rows)
        int(rows[0, 0])  # waits for a device
        best = max(best, rows.nbytes / (time.perf_counter() - started))
    return best


def _as_bytes(rows: torch.Tensor) -> memoryview:
    """The memory of contiguous rows on the host."""
    array: npt.NDArray[np.uint8] = rows.view(torch.uint8).numpy()
    return array.reshape(-1).data
