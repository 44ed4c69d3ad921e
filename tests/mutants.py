"""A kernel of ours that is broken in one line, and where the first-use check must see that."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from iclperm.engine.kernelcheck import KERNELS
from iclperm.engine.kernels import triton_head, triton_math

TOLERANCE = {kernel.name: kernel.tolerance for kernel in KERNELS}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Site:
    """A kernel at one launch size: ``error`` runs its check on a module in place of the shipped one."""

    name: str
    error: Callable[[ModuleType], float]
    tolerance: float

    def is_right(self, module: ModuleType) -> bool:
        return self.error(module) <= self.tolerance


@dataclass(frozen=True)
class Mutant:
    """``old`` of a kernel's source is ``new``; ``sites`` are where that must be seen."""

    name: str
    module: ModuleType
    old: str
    new: str
    sites: list[Site]

    def build(self, folder: Path) -> ModuleType:
        """The shipped module, broken; of what several kernels call, a kernel that calls it broken."""
        caller = triton_head if self.module is triton_math else self.module
        broken = changed(self.module, self.old, self.new, folder)
        if caller is self.module:
            return broken
        return changed(caller, f"from {triton_math.__name__} import", f"from {broken.__name__} import", folder)


def changed(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert source.count(old) == 1, old
    name = f"mutant_{module.__name__.rpartition('.')[2]}_{abs(hash((old, new)))}"
    path = folder / f"{name}.py"
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    built = importlib.util.module_from_spec(spec)
    sys.modules[name] = built
    spec.loader.exec_module(built)
    return built
