"""Hypothesis strategies shared by the tests: small alphabets, so that prefixes meet often."""

from __future__ import annotations

from hypothesis import strategies as st

ids = st.integers(0, 3)
rows = st.lists(st.lists(ids, min_size=0, max_size=7), min_size=1, max_size=12)
filled_rows = st.lists(st.lists(ids, min_size=1, max_size=7), min_size=1, max_size=12)
requests = st.lists(
    st.tuples(st.lists(ids, min_size=1, max_size=7), st.lists(ids, min_size=1, max_size=3)), min_size=1, max_size=14
)
