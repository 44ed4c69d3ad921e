"""Arrays that may be larger than memory: held there, or in a file that the system reads in and out."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

MOST_HELD = 1 << 31
"""Bytes of one array in memory at most: a study of a thousand million answers still fits into a small machine."""


def large_array(shape: tuple[int, ...], dtype: npt.DTypeLike, *, most_held: int = MOST_HELD) -> NDArray[Any]:
    """An array that is yet to be filled: in memory, or in a temporary file where it has more than `most_held` bytes.

    It is used in the same way wherever it lies. The file has no name and is gone when the array is. Raises OSError
    where the file cannot be made.
    """
    if int(np.prod(shape)) * np.dtype(dtype).itemsize <= most_held:
        return np.empty(shape, dtype)
    with tempfile.TemporaryFile(prefix="iclperm-") as file:
        return np.memmap(file, dtype=dtype, mode="w+", shape=shape)
