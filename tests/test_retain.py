"""Rows of a pack that go to slots of the pool: every one of them, and nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import ZOO

from iclperm import _core
from iclperm.engine import Engine

NUM_ROWS, NUM_SLOTS = 40, 60

runs = st.lists(
    st.tuples(st.integers(0, NUM_ROWS), st.integers(0, 12), st.integers(0, NUM_SLOTS)).map(
        lambda run: (run[0], min(run[0] + run[1], NUM_ROWS, run[0] + NUM_SLOTS - run[2]), run[2])
    ),
    max_size=12,
)


@settings(deadline=None)
@given(
    runs=runs,
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 7, 64]),
    kind=st.sampled_from([np.float32, np.uint16]),
    is_by_head=st.booleans(),
    threads=st.integers(1, 2),
)
def test_slots_hold_the_last_run_that_went_there(
    runs: list[tuple[int, int, int]], heads: int, head_dim: int, kind: type, is_by_head: bool, threads: int
) -> None:
    rng = np.random.default_rng(0)
    wide = rng.integers(0, 1 << 15, (NUM_ROWS, heads + 2, head_dim)).astype(kind)
    rows = wide[:, 1:-1]  # as keys are a part of what one product gave
    pool = rng.integers(0, 1 << 15, (NUM_SLOTS, heads, head_dim)).astype(kind)
    if is_by_head:
        pool = np.ascontiguousarray(pool.swapaxes(0, 1)).swapaxes(0, 1)
    expected = pool.copy()
    for begin, end, slot in runs:
        expected[slot : slot + end - begin] = rows[begin:end]
    begins, ends, slots = (np.array(each, np.int64) for each in (zip(*runs, strict=True) if runs else ([], [], [])))
    _core.retain_rows(rows, pool, begins, ends, slots, num_threads=threads)
    np.testing.assert_array_equal(pool, expected)


def test_an_engine_on_a_cpu_retains_rows_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, told = Engine(ZOO["llama"].build()), []
    engine.loglikelihood([([1], [2])])
    retain = _core.retain_rows

    def counted(*given: np.ndarray, **options: int) -> None:
        told.append(given[2].size)
        retain(*given, **options)

    monkeypatch.setattr(_core, "retain_rows", counted)
    engine.generate([[3, 4, 5 + number] for number in range(3)], max_new_tokens=3)
    assert max(told) >= 3, "rows that decode are retained one by one"
