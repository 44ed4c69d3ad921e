"""Every kernel of ours by itself, on the device where a study will run it, against its float64 reference.

Prompts short enough for the check of a whole model leave most of a kernel's loops alone. The cases here have the
model's own sizes, so that what is compiled for them is what a study runs, and come to every loop and border of a
kernel: paths of 1 to 4,096 positions, the last tile of the vocabulary, as many rows as a pack has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from iclperm.engine.decodecases import decode_errors
from iclperm.engine.headcases import head_errors
from iclperm.engine.kernelcases import (
    attention_errors,
    gate_errors,
    layer_norm_errors,
    norm_errors,
    rotation_errors,
)
from iclperm.engine.kernels.launching import (
    DECODE_ATTENTION,
    GATE,
    HEAD,
    LAYER_NORM,
    NORM,
    PARTS,
    ROTATION,
    TREE_ATTENTION,
    failure,
    is_lost,
)
from iclperm.engine.model import TreeModel
from iclperm.errors import is_out_of_memory, said_by


@dataclass(frozen=True)
class KernelCheck:
    """What one kernel gave alone.

    ``name`` is what users call it; ``part`` what of a model goes another way where it is wrong: ``attention``,
    ``decoding``, ``layers`` or ``head``. ``error`` is the largest of all cases, as a share of the numbers that went
    into a result, and infinite where there is a number in the one and none in the other, or no result; ``seconds``
    include compilation. ``reason`` says in one line why the kernel cannot be used, and is empty where it is right.
    """

    name: str
    part: str
    is_right: bool
    error: float
    tolerance: float
    seconds: float
    reason: str


@dataclass(frozen=True)
class Kernel:
    """How a kernel is checked: ``errors`` yields that of each case for a model and the tokens of its packs, nothing if
    the model never runs it."""

    name: str
    tolerance: Mapping[torch.dtype, float]
    errors: Callable[[TreeModel, int], Iterator[float]]


def _by_dtype(float32: float, bfloat16: float, float16: float) -> dict[torch.dtype, float]:
    return {torch.float32: float32, torch.bfloat16: bfloat16, torch.float16: float16}


# In half precision half a unit in the last place of a result, and for attention that of its weights, too: rounding
# gives no more than 2 ** -7 in bfloat16 and 2 ** -10 in float16. The head stays in float32, whose sums tensor cores cut
# off rather than round.
KERNELS = [
    Kernel(TREE_ATTENTION, _by_dtype(1e-4, 8e-3, 1.2e-3), attention_errors),
    Kernel(DECODE_ATTENTION, _by_dtype(1e-4, 8e-3, 1.2e-3), decode_errors),
    Kernel(NORM, _by_dtype(2e-6, 5e-3, 6e-4), norm_errors),
    Kernel(LAYER_NORM, _by_dtype(2e-6, 5e-3, 6e-4), layer_norm_errors),
    Kernel(ROTATION, _by_dtype(1e-6, 5e-3, 6e-4), rotation_errors),
    Kernel(GATE, _by_dtype(3e-6, 5e-3, 6e-4), gate_errors),
    Kernel(HEAD, _by_dtype(2e-5, 2e-4, 2e-4), head_errors),
]


@torch.inference_mode()
def kernel_checks(model: TreeModel, pack_tokens: int) -> Iterator[KernelCheck]:
    """Each kernel that the model runs, one after the other; the caller may give up a part in between.

    Raises only what says that memory ran out, and `KernelError` for a kernel after which a device is lost. Cost: that
    of about a layer of one pack of ``pack_tokens`` tokens, in time and memory (at most 32,768), and the compilation of
    what the study needs as well.
    """
    for kernel in KERNELS:
        started = time.perf_counter()
        error, reason, has_run = 0.0, "", False
        try:
            for of_case in kernel.errors(model, pack_tokens):
                error, has_run = max(error, of_case), True
        except Exception as raised:  # a compiler's, a driver's: whatever it is, there is another way
            if is_out_of_memory(raised):
                raise
            if lost := next(filter(is_lost, model.devices), None):  # to all that comes after it in this process
                raise failure(kernel.name, lost, raised) from raised
            error, reason, has_run = float("inf"), said_by(raised), True
        if has_run:
            tolerance = kernel.tolerance[model.dtype]
            is_right = error <= tolerance
            if not is_right and not reason:
                reason = f"its numbers are not those of the reference (off by {error:.1g}, {tolerance:.1g} is allowed)"
            yield KernelCheck(
                kernel.name, PARTS[kernel.name], is_right, error, tolerance, time.perf_counter() - started, reason
            )
