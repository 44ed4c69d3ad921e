"""Arrays that may be larger than memory: where they lie changes nothing of how they are used."""

from __future__ import annotations

import numpy as np
import pytest

from iclperm.base.arrays import MOST_HELD, large_array


@pytest.mark.parametrize("kind", [np.uint8, np.bool_, np.int16])
def test_an_array_lies_in_a_file_where_it_is_too_large_for_memory(kind):
    size = 6 * np.dtype(kind).itemsize
    for most_held, is_mapped in ((size, False), (size - 1, True), (0, True)):
        array = large_array((2, 3), kind, most_held=most_held)
        assert isinstance(array, np.memmap) == is_mapped
        assert (array.shape, array.dtype) == ((2, 3), kind)
        array[:] = 1
        assert array.sum() == 6
        assert array[:, ::2].copy().tolist() == [[1, 1], [1, 1]]


def test_small_arrays_are_held_in_memory():
    assert MOST_HELD >= 1 << 30
    assert type(large_array((1 << 10,), np.uint8)) is np.ndarray
