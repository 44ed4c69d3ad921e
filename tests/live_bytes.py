"""What torch holds at its fullest: its own count on a CUDA device, else all that operations make or see."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from devices import DEVICE, HAS_GPU
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(run: Callable[[], object], kept: int = 0) -> int:
    """Bytes at the peak of a call, less ``kept``, which were there before; what a first call leaves is left out."""
    if HAS_GPU:
        run()  # leaves the workspaces of the libraries
        torch.cuda.reset_peak_memory_stats(DEVICE)
        before = torch.cuda.memory_allocated(DEVICE)
        run()
        return torch.cuda.max_memory_allocated(DEVICE) - before
    with LiveBytes() as live:
        run()
    return live.peak - kept


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that are alive, from when an operation first has to do with them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # What is made of other operations is one here, in inference mode.
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        self._see((args, kwargs))
        made = func(*args, **kwargs)
        self._see(made)
        return made

    def _see(self, values: Any) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)

    def _forget(self, name: int, size: int) -> None:
        self._known.discard(name)
        self.now -= size
