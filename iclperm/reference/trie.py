"""A dictionary trie: what the radix tree must agree with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def distinct_prefixes(rows: Iterable[Sequence[int]]) -> set[tuple[int, ...]]:
    """Every distinct non-empty prefix of the rows; their number is the number of tokens that must be forwarded."""
    return {tuple(row[:n]) for row in rows for n in range(1, len(row) + 1)}


def fed_prefixes(requests: Iterable[tuple[Sequence[int], Sequence[int]]]) -> set[tuple[int, ...]]:
    """Distinct non-empty proper prefixes of context + continuation: the last token is never fed."""
    return distinct_prefixes([*context, *continuation][:-1] for context, continuation in requests)
