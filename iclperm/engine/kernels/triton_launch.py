"""Whether Triton kernels can run here, and which Triton that is; Triton itself is imported by none of this."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import warnings

import torch

from iclperm.engine.kernels.triton_compilation import (
    MAX_HEAD_DIM,
    TYPE_NAMES,
    architecture,
    least_architecture,
    multiplies_well,
)
from iclperm.errors import said_by

_SILU_OF_2_TIMES_2 = 3.5231883


def is_interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors (TRITON_INTERPRET=1 when they were imported)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def may_launch(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton is installed and its kernels run on tensors of this device and dtype."""
    return not obstacle(device, dtype)


def may_read_head(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether, besides, the head's product is not slower than torch's."""
    return not head_obstacle(device, dtype)


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


def head_obstacle(device: torch.device, dtype: torch.dtype) -> str:
    """As ``obstacle``, of the head, which is nearly all product."""
    if reason := obstacle(device, dtype):
        return reason
    return "" if multiplies_well(architecture(device), dtype) else "torch uses this card's matrix unit, and Triton not"


@functools.cache
def _why_no_kernel_runs(device: torch.device) -> str:
    """Why the smallest kernel does not compile and run, which wants a C compiler and Python's headers; or empty."""
    from iclperm.engine.kernels import triton_rowwise

    x = torch.full((1, 1), 2.0, device=device)
    try:
        triton_rowwise.gate("silu", x, x, x)
        value = x.item()
    except Exception as error:  # whatever it is, torch's operations serve
        return said_by(error)
    return "" if abs(value - _SILU_OF_2_TIMES_2) < 1e-5 else f"silu(2) * 2 gave {value:.6g}"


def say_what_runs_instead(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Warn in one line, once in a process, of what takes the place of our kernels on a GPU where they do not run."""
    if device.type == "cpu":
        return
    if reason := obstacle(device, dtype):
        _say_once(
            f"iclperm's kernels do not run on {device} ({reason}): torch's operations attend and transformers' own "
            "layers run, which is slower"
        )
    elif head_dim > MAX_HEAD_DIM:
        _say_once(
            f"torch's operations attend on {device}, which is slower: heads have {head_dim} dimensions, and iclperm's "
            f"kernel takes up to {MAX_HEAD_DIM}"
        )


@functools.cache
def _say_once(line: str) -> None:
    warnings.warn(line, stacklevel=4)  # where a model is made


def installed_version() -> str | None:
    """The version of Triton, without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
