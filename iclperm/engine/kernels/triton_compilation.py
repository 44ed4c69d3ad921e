"""How Triton kernels are compiled: types, limits and options; Triton is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

TYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
MAX_HEAD_DIM = 256  # that tree attention takes
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
"""Compute capabilities times ten that launch configurations are checked for, by compilation."""
_FIRST_WITH_BFLOAT16 = _FIRST_WITH_MATRIX_UNIT = 80
# Said at every launch, since what triton does unasked differs between 3.9 and 3.10.
FUSION = {"enable_fp_fusion": True}


def least_architecture(dtype: torch.dtype) -> int:
    """The oldest architecture that the kernels are compiled for in a dtype: what is older has no bfloat16."""
    return _FIRST_WITH_BFLOAT16 if dtype == torch.bfloat16 else ARCHITECTURES[0]


def architectures_of(dtype: torch.dtype) -> tuple[int, ...]:
    """Those of `ARCHITECTURES` that the kernels are compiled for in a dtype."""
    return tuple(arch for arch in ARCHITECTURES if arch >= least_architecture(dtype))


def multiplies_well(arch: int, dtype: torch.dtype) -> bool:
    """Whether Triton multiplies with the best that an architecture has for a dtype.

    For half precision that is the matrix unit; Turing has one, but Triton does without it from 3.3 on. float32 goes to
    the plain cores everywhere, so as not to be rounded to TF32.
    """
    return dtype == torch.float32 or arch >= _FIRST_WITH_MATRIX_UNIT


def decoding_architectures(dtype: torch.dtype) -> tuple[int, ...]:
    """Those of `ARCHITECTURES` on which rows that decode have a kernel of their own.

    On Turing its shapes spill (1.5 KB a thread in float32 at 128 dimensions): rows go through tree attention there.
    """
    return tuple(arch for arch in architectures_of(dtype) if arch >= _FIRST_WITH_MATRIX_UNIT)


@cache
def architecture(device: torch.device) -> int:
    """A GPU's compute capability times ten; 80 of a CPU, where kernels are interpreted."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


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


@dataclass(frozen=True)
class KernelShapes:
    """What of a model decides which variants of the kernels are compiled.

    Heads of ``head_dim`` columns, ``group`` of queries to one of keys; the head's matrix [``num_ids``, ``width``].
    ``gates`` are activations by their columns and whether they have factors, ``norms`` widths and whether a sum is
    normed, ``layer_norms`` the same of those that are centred and whether they have a bias, ``rotations`` heads by half
    the columns that are turned and whether these are neighbours; all four are empty where transformers' layers run,
    ``num_ids`` is 0 where transformers' head does.
    """

    dtype: torch.dtype
    head_dim: int
    group: int
    has_window: bool
    has_softcap: bool
    num_ids: int
    width: int
    has_bias: bool
    has_logit_softcap: bool
    gates: frozenset[tuple[str, int, bool]] = frozenset()
    norms: frozenset[tuple[int, bool]] = frozenset()
    layer_norms: frozenset[tuple[int, bool, bool]] = frozenset()
    rotations: frozenset[tuple[int, int, bool]] = frozenset()
    sinks: tuple[bool, ...] = (False,)
