"""Arrays that are held in memory, or in a file where they would not fit."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

_MOST_HELD = 1 << 31  # of one array; a study of a thousand million answers still fits into a small machine


def held(shape: tuple[int, ...], dtype: npt.DTypeLike) -> NDArray[Any]:
    """An array in memory; one of more than `_MOST_HELD` bytes in a temporary file that the system reads in and out.

    What is made of it is the same. The file is gone when the array is.
    """
    if int(np.prod(shape)) * np.dtype(dtype).itemsize <= _MOST_HELD:
        return np.empty(shape, dtype)
    with tempfile.TemporaryFile(prefix="iclperm-") as file:
        return np.memmap(file, dtype=dtype, mode="w+", shape=shape)
