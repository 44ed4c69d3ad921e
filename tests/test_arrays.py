"""Arrays that may be larger than memory: where they lie changes nothing of how they are used."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from iclperm.base.arrays import MOST_HELD, large_array
from iclperm.external import load


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


@pytest.mark.parametrize(
    ("kind", "has_state", "most"), [(np.uint8, True, 3.3), (np.uint8, False, 1.3), (np.float64, False, 1.6)]
)
def test_a_tensor_is_read_with_no_more_copies_than_its_kind_asks_for(tmp_path, kind, has_state, most):
    correct = (np.random.default_rng(1).random((8, 10, 40_000)) < 0.6).astype(kind)
    state = {"state": np.ones_like(correct)} if has_state else {}
    np.savez(tmp_path / "a.npz", correct=correct, **state)
    load(tmp_path / "a.npz")  # what is imported then
    tracemalloc.start()
    try:
        found = load(tmp_path / "a.npz")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < most * correct.nbytes
    np.testing.assert_array_equal(found.values, correct)
    assert found.values.dtype == np.uint8
    assert has_state == (found.state is not None)
