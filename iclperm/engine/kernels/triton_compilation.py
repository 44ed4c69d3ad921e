"""How Triton kernels are compiled: types, limits and options; Triton is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

TYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
MAX_HEAD_DIM = 256  # that tree attention takes
ARCHITECTURES = (80, 90)  # compute capabilities that launch configurations are made and checked for
# Said at every launch, since what triton does unasked differs between 3.9 and 3.10.
FUSION = {"enable_fp_fusion": True}


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
