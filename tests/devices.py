"""Where tests marked ``gpu`` run: on a CUDA device under ``pytest -m gpu``, else on a CPU, in Triton's interpreter.

One body serves both places, so that it has run before it meets its first GPU. What is not marked never sees a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NO_ID = -(1 << 20)


def interpreted(why: str) -> pytest.MarkDecorator:
    """Of a test among those marked ``gpu``: a GPU has nothing to say to it, for this reason."""
    return pytest.mark.skipif(HAS_GPU, reason=why)


def moved(x: Tensor) -> Tensor:
    """A copy on the device, with its strides and with all that lies around it."""
    whole = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0).to(DEVICE, copy=True)
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


def poisoned_empty(*shape: Any, empty: Any = torch.empty, **options: Any) -> Tensor:
    """In place of ``torch.empty``: NaN, or an id that no vocabulary has; bytes stay as they are."""
    memory: Tensor = empty(*shape, **options)
    if memory.dtype == torch.uint8:
        return memory
    return memory.fill_(torch.nan if memory.is_floating_point() else NO_ID)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Within, an engine on CPU tensors goes the ways that it goes on a GPU, as far as a CPU can.

    All that is ours is Triton's, nothing stands in for a CPU's sake, packs are staged ahead and read late, and arrays
    go over in one piece.
    """
    from iclperm.engine import link
    from iclperm.engine.kernels import rowwise
    from iclperm.engine.link import DeviceLink
    from iclperm.engine.model import TreeModel

    make_link, make_model = DeviceLink.__init__, TreeModel.__init__

    def reached(self: DeviceLink, devices: Sequence[torch.device]) -> None:
        make_link(self, devices)
        self.is_asynchronous = True

    def chosen(self: TreeModel, model: Any, attention: str = "auto", layers: str = "auto") -> None:
        make_model(self, model, "triton" if attention == "auto" else attention, layers)
        self._row_wise_overrides = list  # type: ignore[method-assign]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rowwise, "runs_triton", lambda x: True)
        patch.setattr(TreeModel, "__init__", chosen)
        patch.setattr(DeviceLink, "__init__", reached)
        patch.setattr(DeviceLink, "upload", lambda self, arrays, to: self._in_one_piece(arrays, to) if arrays else [])
        patch.setattr(DeviceLink, "download", DeviceLink._awaited)
        patch.setattr(DeviceLink, "mark", lambda self: time.perf_counter())
        patch.setattr(DeviceLink, "seconds", lambda self, begin, end: end - begin)
        patch.setattr(link, "_arrival", lambda device: lambda: None)
        yield


def quick_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first-use check has few and short paths in the interpreter, which is slow; on a GPU it is as it is."""
    from iclperm.engine import decodecases, footprint, kernelcases

    if HAS_GPU:
        return
    monkeypatch.setitem(footprint._CHECKED_TOKENS, "cpu", 24)
    monkeypatch.setattr(kernelcases, "_LONGEST", {"cpu": 70})
    monkeypatch.setattr(kernelcases, "_MANY_ROWS", (9, 5))
    monkeypatch.setattr(kernelcases, "_MOST_ROWS", 1)
    monkeypatch.setattr(decodecases, "_LONGEST", {"cpu": 70})
    monkeypatch.setattr(decodecases, "_SHARING", {"cpu": 5})
    for cases in (kernelcases, decodecases):
        monkeypatch.setattr(cases, "_PATHS", (1, 33))
