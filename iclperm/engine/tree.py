"""Token rows and the radix tree over them: frozen integer arrays, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from iclperm import _core
from iclperm.errors import RequestError

IntArray: TypeAlias = npt.NDArray[np.int64]
TokenArray: TypeAlias = npt.NDArray[np.int32]
Ids: TypeAlias = Sequence[int] | npt.NDArray[np.integer]

PrefixTree = _core.PrefixTree

_MAX_ID = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Rows:
    """Ragged token rows as CSR: row r is ``tokens[offsets[r]:offsets[r + 1]]``.

    ``tokens`` int32 [T], ``offsets`` int64 [R + 1].
    """

    tokens: TokenArray
    offsets: IntArray

    @classmethod
    def of(cls, rows: Sequence[Ids], what: str = "row") -> Rows:
        """Collect ragged rows; raises RequestError naming the row that does not hold token ids."""
        arrays = [_token_ids(row, f"{what} {number}") for number, row in enumerate(rows)]
        offsets = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum([array.size for array in arrays], out=offsets[1:])
        tokens = np.concatenate(arrays) if arrays else np.empty(0, np.int32)
        return cls(np.ascontiguousarray(tokens, np.int32), offsets)

    def __len__(self) -> int:
        return self.offsets.size - 1

    def __getitem__(self, row: int) -> TokenArray:
        return self.tokens[self.offsets[row] : self.offsets[row + 1]]

    def part(self, begin: int, end: int) -> Rows:
        """Rows ``begin:end``."""
        first, last = self.offsets[begin], self.offsets[end]
        return Rows(self.tokens[first:last], self.offsets[begin : end + 1] - first)

    @property
    def lengths(self) -> IntArray:
        """Tokens of each row, int64 [R]."""
        return np.diff(self.offsets)


def _token_ids(row: Ids, name: str) -> TokenArray:
    array = np.asarray(row)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise RequestError(f"{name} is not a sequence of token ids: {str(row)[:60]!r}")
    if array.size and (array.min() < 0 or array.max() > _MAX_ID):
        wrong = array[(array < 0) | (array > _MAX_ID)][0]
        raise RequestError(f"{name} holds the token id {wrong}; ids lie in [0, {_MAX_ID}]")
    return array.astype(np.int32, copy=False)


def build_tree(rows: Rows, marks: Rows | None = None) -> tuple[PrefixTree, TokenArray]:
    """Radix tree of ``rows``, cut where rows branch and at every mark; cost O(tokens + R log R comparisons).

    ``marks`` gives for each row the depths (in tokens) of prefixes that must end at a node; by default its end.
    Returns the tree and the node of every mark, int32, in the order of the marks.
    """
    if marks is None:
        marks = Rows(rows.lengths.astype(np.int32), np.arange(len(rows) + 1, dtype=np.int64))
    return _core.build_tree(rows.tokens, rows.offsets, marks.offsets, marks.tokens)


def build_requests(rows: Rows, score_begin: IntArray) -> PrefixTree:
    """Tree over all but the last token of each row, with the tokens from ``score_begin[r]`` on as targets."""
    return _core.build_requests(rows.tokens, rows.offsets, np.ascontiguousarray(score_begin, np.int64))


def path_tokens(tree: PrefixTree, node: int) -> TokenArray:
    """Tokens from the root to the end of ``node``: the prefix that the node stands for."""
    edges: list[TokenArray] = []
    while node > 0:
        edges.append(tree.tokens[tree.token_offsets[node] : tree.token_offsets[node + 1]])
        node = int(tree.parent[node])
    return np.concatenate(edges[::-1]) if edges else np.empty(0, np.int32)


def path_to_token(tree: PrefixTree, token: int) -> TokenArray:
    """Tokens from the root to tree token ``token``, itself included."""
    node = int(np.searchsorted(tree.token_offsets, token, side="right")) - 1
    return np.concatenate(
        [path_tokens(tree, int(tree.parent[node])), tree.tokens[tree.token_offsets[node] : token + 1]]
    )
