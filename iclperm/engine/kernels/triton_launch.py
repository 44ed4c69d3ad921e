"""Whether Triton kernels can run here, and which Triton that is; Triton itself is imported by none of this."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import warnings

import torch

from iclperm.engine.kernels.triton_compilation import TYPE_NAMES
from iclperm.errors import said_by

_SILU_OF_2_TIMES_2 = 3.5231883


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
        warnings.warn(
            f"Triton's kernels do not run on {device} ({said_by(error)}); torch's take their place and are slower",
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
