"""64 bits that tell the numbers of a matrix from others."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iclperm import _core

KINDS = [np.float32, np.uint16]


@settings(deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 100),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 9),
    data=st.data(),
)
def test_another_byte_is_another_checksum(rows: int, columns: int, kind: type, seed: int, data: st.DataObject) -> None:
    wide = np.random.default_rng(seed).integers(0, 1 << 15, (rows, columns + 3)).astype(kind)
    matrix = wide[:, 1 : columns + 1]
    was = _core.checksum(matrix)
    assert was == _core.checksum(matrix.copy(), num_threads=2)
    wide[:, [0, *range(columns + 1, columns + 3)]] = 7
    assert _core.checksum(matrix) == was, "what lies beside it counts"
    for place in data.draw(st.lists(st.integers(0, matrix.nbytes - 1), min_size=1, max_size=4, unique=True)):
        other = matrix.copy()
        other.view(np.uint8).reshape(-1)[place] ^= data.draw(st.integers(1, 255))
        assert _core.checksum(other) != was


@pytest.mark.parametrize("kind", KINDS)
def test_many_others_are_told_apart(kind: type) -> None:
    """Signs, an order, a shape, a shift by a column, numbers that change places: sums alone would not tell these."""
    ones = np.arange(3 << 19, dtype=np.uint32).reshape(3072, 512).astype(kind)  # several items of work: MiB
    signs = np.array(ones)
    signs.view(np.uint8)[:, ones.itemsize - 1 :: ones.itemsize] ^= 128
    halves, some = np.array(ones), np.array(ones)
    halves.view(np.uint8)[:, 7::8] ^= 128  # the highest bit of every eight bytes
    some.view(np.uint8)[::2, 63::64] ^= 128
    swapped = np.array(ones)
    swapped[[0, 3000]] = swapped[[3000, 0]]
    last = np.array(ones)
    last.view(np.uint8)[-1, -1] ^= 1
    others = [
        ones, signs, halves, some, swapped, ones[::-1].copy(), ones[:, ::-1].copy(), ones.reshape(512, 3072), last,
        ones.reshape(1536, 1024), np.roll(ones, 1), np.zeros_like(ones), np.zeros_like(ones)[:-1], ones[:-1],
        np.zeros_like(ones)[:, :-2].copy(),
    ]  # fmt: skip
    found = [_core.checksum(each) for each in others]
    assert len(set(found)) == len(others)
    assert found == [_core.checksum(each, num_threads=2) for each in others]


def test_nothing_has_a_checksum_too() -> None:
    shapes = ((0, 0), (0, 5), (5, 0))
    assert len({_core.checksum(np.zeros(shape, np.float32)) for shape in shapes}) == len(shapes)
