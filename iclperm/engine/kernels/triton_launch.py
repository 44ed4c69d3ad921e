"""What the Triton kernels share: whether they can run here, and how each is compiled for a look at its resources."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

TYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
MAX_HEAD_DIM = 256  # that tree attention takes
_SILU_OF_2_TIMES_2 = 3.5231883
ARCHITECTURES = (80, 90)  # compute capabilities that launch configurations are made and checked for


def is_interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors (TRITON_INTERPRET=1 when they were imported)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def may_launch(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton is installed and its kernels run on tensors of this device and dtype."""
    if dtype not in TYPE_NAMES or importlib.util.find_spec("triton") is None:
        return False
    if device.type == "cpu":
        return is_interpreted()
    # A ROCm build of torch calls its devices cuda too; the launch configurations are not made for them.
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (8, 0) and _first_kernel_runs(device)


@functools.cache
def _first_kernel_runs(device: torch.device) -> bool:
    """Whether the smallest kernel compiles and runs: it wants a C compiler and Python's headers. Warns if not."""
    from iclperm.engine.kernels import triton_rowwise

    x = torch.full((1, 1), 2.0, device=device)
    try:
        triton_rowwise.gate("silu", x, x, x)
        value = x.item()
    except Exception as error:  # whatever it is, torch's operations serve
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(
            f"Triton's kernels do not run on {device} ({reason[:200]}); torch's take their place and are slower",
            stacklevel=2,
        )
        return False
    return abs(value - _SILU_OF_2_TIMES_2) < 1e-5


def installed_version() -> str | None:
    """The version of Triton, without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Compilation:
    """A kernel with one launch configuration as it ships, to be compiled without a device.

    ``signature`` gives each argument's type in order (``*bf16``, ``*i32``, ``i32``, ``fp32``, ``constexpr``);
    ``constexprs`` the values of the last kind; ``multiples_of_16`` the integers that are such at run time, as strides
    are. Pointers always are.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int
    multiples_of_16: tuple[str, ...] = ()
    architectures: tuple[int, ...] = ARCHITECTURES
    options: Mapping[str, Any] = field(default_factory=dict)
