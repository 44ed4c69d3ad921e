"""Whether Triton kernels can run here, and which Triton that is; Triton itself is imported by none of this."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import warnings

import torch

from iclperm.engine.kernels.triton_compilation import TYPE_NAMES, architecture, least_architecture, multiplies_well
from iclperm.errors import said_by

_SILU_OF_2_TIMES_2 = 3.5231883


def is_interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors (TRITON_INTERPRET=1 when they were imported)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def may_launch(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton is installed and its kernels run on tensors of this device and dtype."""
    return not obstacle(device, dtype)


def may_read_head(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether, besides, the head's product is not slower than torch's for want of a matrix unit."""
    return may_launch(device, dtype) and multiplies_well(architecture(device), dtype)


def obstacle(device: torch.device, dtype: torch.dtype) -> str:
    """Why Triton's kernels do not run on tensors of this device and dtype, in a few words; empty where they do."""
    name = str(dtype).removeprefix("torch.")
    if dtype not in TYPE_NAMES:
        return f"Triton's kernels take no {name}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cpu":
        return "" if is_interpreted() else "Triton's kernels run on NVIDIA GPUs"
    # A ROCm build of torch calls its devices cuda too; the launch configurations are not made for them.
    if device.type != "cuda" or torch.version.hip is not None:
        return "Triton's kernels run on NVIDIA GPUs"
    least, own = least_architecture(dtype), architecture(device)
    if own < least:
        return f"{name} takes a compute capability of {least / 10}, and this one has {own / 10}"
    return _why_no_kernel_runs(device)


@functools.cache
def _why_no_kernel_runs(device: torch.device) -> str:
    """Why the smallest kernel does not compile and run, which wants a C compiler and Python's headers; empty where it
    does. Warns if not."""
    from iclperm.engine.kernels import triton_rowwise

    x = torch.full((1, 1), 2.0, device=device)
    try:
        triton_rowwise.gate("silu", x, x, x)
        value = x.item()
    except Exception as error:  # whatever it is, torch's operations serve
        reason = said_by(error)
        warnings.warn(
            f"Triton's kernels do not run on {device} ({reason}); torch's take their place and are slower",
            stacklevel=2,
        )
        return reason
    return "" if abs(value - _SILU_OF_2_TIMES_2) < 1e-5 else f"silu(2) * 2 gave {value:.6g}"


def installed_version() -> str | None:
    """The version of Triton, without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
