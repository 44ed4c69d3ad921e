"""Where Triton kernels are launched: on which device, and what is said of one that fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from iclperm.errors import KernelError, is_out_of_memory, said_by

TREE_ATTENTION, DECODE_ATTENTION = "tree attention", "decode attention"
NORM, LAYER_NORM, ROTATION, GATE, HEAD = "RMS norm", "layer norm", "rotation", "gated activation", "head"
PARTS = {
    TREE_ATTENTION: "attention",
    DECODE_ATTENTION: "decoding",
    NORM: "layers",
    LAYER_NORM: "layers",
    ROTATION: "layers",
    GATE: "layers",
    HEAD: "head",
}
"""The part of a model that goes another way where a kernel, by its name for users, cannot be used."""
_INSTEAD = {
    "attention": "attention='torch' (iclperm run --attention torch)",
    "layers": "layers='transformers' (iclperm run --layers transformers)",
}
_ATTEND = ("attention", "decoding")


def without(kernel: str) -> str:
    """How to begin anew without a kernel: transformers' layers come with the head as they make it."""
    return f"start anew with {_INSTEAD['attention' if PARTS[kernel] in _ATTEND else 'layers']}"


@contextmanager
def launching(kernel: str, x: torch.Tensor) -> Iterator[None]:
    """Within, kernels run on the device of ``x``, in its current stream.

    Raises `KernelError` in one line for whatever a compiler or a driver raises there, but for memory that runs out.
    """
    with torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext():
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise failure(kernel, x.device, error) from error


def failure(kernel: str, device: torch.device, error: Exception) -> KernelError:
    """What to raise for an error in a kernel on a device."""
    said = KernelError(f"iclperm's {kernel} kernel failed on {device} ({said_by(error)}); {without(kernel)}")
    said.kernel = kernel
    return said


def device_failure(name: str, error: Exception, *, is_plain: bool) -> KernelError:
    """What to raise for what a device says of something that it was told before, whichever kernel that was."""
    remedy = "device='cpu' (iclperm run --device cpu)"
    if not is_plain:
        remedy = "attention='torch' and layers='transformers' (iclperm run --attention torch --layers transformers)"
    return KernelError(f"{name} failed ({said_by(error)}); start anew, and if it fails again with {remedy}")


def is_lost(device: torch.device) -> bool:
    """Whether a device answers nothing more in this process, as after a kernel that left its memory."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except Exception:  # whatever it says
        return True
    return False
