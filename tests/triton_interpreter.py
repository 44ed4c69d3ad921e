"""Makes Triton's interpreter compute what a GPU does, where it does not.

Its ``dot`` multiplies the bits of bfloat16 operands as if they were integers, and its casts from float32 to bfloat16
cut bits off instead of rounding (triton 3.6 to 3.9). A row of its products has other last bits in other company. With
NumPy 2.4 the one of triton 3.6 cannot count a loop. Without a CUDA device importing this has kernels interpreted, as
pytest's own start has: a test's file that is run by Python alone imports it before them.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_cast, _patch_tensor = InterpreterBuilder.cast_impl, interpreter._patch_lang_tensor


def _exact_cast(self: Any, src: Any, dst_type: Any) -> Any:
    pair = src.dtype.scalar, dst_type.scalar
    if pair == (tl.float32, tl.bfloat16):
        rounded = torch.from_numpy(np.array(src.data, np.float32)).to(torch.bfloat16)
        return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)
    if pair == (tl.bfloat16, tl.float32):
        return TensorHandle((src.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
    return _cast(self, src, dst_type)


def _exact_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    left, right = (
        _exact_cast(self, x, tl.float32).data if x.dtype.scalar == tl.bfloat16 else x.data.astype(np.float32)
        for x in (a, b)
    )
    # In float64, then rounded: NumPy's own product gives a row other last bits beside other rows on some processors.
    product = np.matmul(left.astype(np.float64), right.astype(np.float64)).astype(np.float32)
    return TensorHandle(product + d.data, d.dtype.scalar)


def _counting_tensor(tensor: Any, *scope: Any) -> None:
    _patch_tensor(tensor, *scope)
    tensor.__index__ = lambda self: int(self.handle.data.item())


def repair() -> None:
    """From now on the interpreter is exact; calling this again changes nothing."""
    InterpreterBuilder.cast_impl = _exact_cast
    InterpreterBuilder.create_dot = _exact_dot
    interpreter._patch_lang_tensor = _counting_tensor
