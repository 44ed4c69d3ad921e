"""What the pool's keys and values take from memory (benchmarks/time_by_kernel.py): counted as rows see them."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tree_attention import NUM_SLOTS, Visit, forests, visit_arrays

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module", name="time_by_kernel")
def loaded() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("time_by_kernel")


def seen(visits: list[Visit], asked: list[int], window: int) -> set[int]:
    """Slots of the pool that any of the rows sees, row by row and key by key."""
    found: set[int] = set()
    for first, end, spans in visits:
        path = [(source, place) for source, begin, last in spans for place in range(begin, last)]
        for row in range(first, end):
            position = len(path) + row - first
            begins = max(0, position - window + 1) if window else 0
            found.update(place for source, place in path[begins:] if source == 0 and row in asked)
    return found


@given(forests(), st.sampled_from([0, 1, 7, 40]), st.none() | st.sets(st.integers(0, 120)))
def test_slots_are_those_that_rows_see(
    time_by_kernel: Any, visits: list[Visit], window: int, asked: set[int] | None
) -> None:
    rows = [row for first, end, _ in visits for row in range(first, end)]
    asked_for = rows if asked is None else [row for row in rows if row in asked]
    query_rows = None if asked is None else np.array(asked_for, np.int64)
    arrays = visit_arrays(visits).values()
    found = time_by_kernel.num_slots(*arrays, query_rows, window, NUM_SLOTS)
    assert found == len(seen(visits, asked_for, window))
