"""The way to a device and back: small arrays go there in one piece, results come back without anything waiting.

Everything is in the order of the device's current stream. On a CPU there is no way to go: arrays are where they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
Mark = Any
"""A point that a device passes: seconds of the clock, or an event of a GPU."""
_T = TypeVar("_T")

_ALIGNMENT = 16  # bytes, which compiled kernels count on


class DeviceLink:
    """How a model's devices are reached. One GPU is told what comes next while it computes; several take turns."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._device = devices[0]
        self.is_asynchronous = len(devices) == 1 and self._device.type == "cuda"

    def upload(self, arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
        """The arrays on a device: views of one piece, each at a multiple of 16 bytes; nothing waits for the copy."""
        if device.type == "cpu" or not arrays:
            return [torch.from_numpy(array) for array in arrays]
        return self._in_one_piece(arrays, device)

    def _in_one_piece(self, arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
        sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
        begins = np.cumsum([0, *sizes]).tolist()
        # Pinned memory goes back to its allocator, which keeps it until the copy has been made.
        staged = torch.empty(begins[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
        for begin, array in zip(begins, arrays, strict=False):
            staged.numpy()[begin : begin + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        piece = staged.to(device, non_blocking=True)
        return [
            piece[begin : begin + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
            for begin, array in zip(begins, arrays, strict=False)
        ]

    def download(self, tensors: Sequence[torch.Tensor], finish: Callable[..., _T]) -> Callable[[], _T]:
        """A function that waits for the tensors and says what ``finish`` makes of them as arrays; on a CPU it has."""
        if tensors[0].device.type == "cpu":
            made = finish(*(tensor.numpy() for tensor in tensors))
            return lambda: made
        return self._awaited(tensors, finish)

    def _awaited(self, tensors: Sequence[torch.Tensor], finish: Callable[..., _T]) -> Callable[[], _T]:
        device = tensors[0].device
        joined = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
        there = torch.empty(joined.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
        there.copy_(joined, non_blocking=True)
        wait = _arrival(device)
        kinds = [
            (torch.empty(0, dtype=tensor.dtype, device="cpu").numpy().dtype, tensor.shape, tensor.nbytes)
            for tensor in tensors
        ]

        def result() -> _T:
            wait()
            borders = np.cumsum([size for *_, size in kinds])[:-1]
            pieces = zip(np.split(there.numpy(), borders), kinds, strict=True)
            return finish(*(piece.view(kind).reshape(shape) for piece, (kind, shape, _) in pieces))

        return result

    def mark(self) -> Mark:
        """The point to which a device has been told to go; without a GPU, now."""
        if not self.is_asynchronous:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Seconds between two points; waits until the second has been passed."""
        if not self.is_asynchronous:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def _arrival(device: torch.device) -> Callable[[], object]:
    """What waits until a device has done all that it was told so far."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event.synchronize
