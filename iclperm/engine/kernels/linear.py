"""Matrix products of our decoder layers and of the head: oneDNN's on an x86 CPU, torch's own elsewhere.

torch sends float32 products on a CPU to MKL, which on AMD's processors keeps to AVX2: where there is AVX-512 it is
15-25 % slower than oneDNN. With AVX2 alone it is the faster one in layers, but not for the many outputs of the head
(benchmarks/products.py). Its rows can change their last bits below 8 rows a thread; oneDNN's do not from 2 rows on. In
bfloat16 torch takes oneDNN itself.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from iclperm import _core

_X86 = ("x86_64", "AMD64")
_DTYPES = (torch.float32, torch.bfloat16)
_ALL = slice(None)


def uses_onednn(device: torch.device, dtype: torch.dtype, *, is_head: bool = False) -> bool:
    """Whether ``linear`` runs oneDNN's product rather than torch's own."""
    return device.type == "cpu" and _is_onednn(dtype, is_head)


@cache
def _is_onednn(dtype: torch.dtype, is_head: bool) -> bool:
    return (
        dtype in _DTYPES
        and platform.machine() in _X86
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and (is_head or "avx512" in _core.available_isas() if dtype == torch.float32 else _has_bfloat16())
    )


def _has_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 here at all; torch has a way of its own elsewhere."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@dataclass(frozen=True)
class MatrixProduct:
    """x [M, H] @ weight.T + bias [M, N] of an unhooked module's numbers, or those ``outputs`` of the N alone.

    They are the module's of when this was made, wherever they lie.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    is_onednn: bool

    @classmethod
    def of(cls, module: nn.Linear, outputs: slice = _ALL, *, is_head: bool = False) -> MatrixProduct:
        """The product of a module as it is now."""
        weight: torch.Tensor = module.weight
        bias: torch.Tensor | None = module.bias
        if outputs != _ALL:
            weight, bias = weight[outputs], None if bias is None else bias[outputs]
        return cls(weight, bias, uses_onednn(weight.device, weight.dtype, is_head=is_head))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Of x [M, H]."""
        if not self.is_onednn:
            return nn.functional.linear(x, self.weight, self.bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return product


def linear(module: nn.Linear, x: torch.Tensor, outputs: slice = _ALL, *, is_head: bool = False) -> torch.Tensor:
    """The `MatrixProduct` of a module as it is now with x [M, H]."""
    return MatrixProduct.of(module, outputs, is_head=is_head)(x)
