"""Choices that each query of a run has of its own: how many, which are right, and how long they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

LENGTHS = {"mean": "choice_tokens", "characters": "choice_characters", "bytes": "choice_bytes"}
"""The columns of what log-likelihoods are divided by, by the values of ``normalize``."""


@dataclass(frozen=True)
class QueryChoices:
    """Of each query how many choices it has, int64 [Q], which of them are ``right``, bool [Q, L], and what their
    log-likelihoods are divided by, float64 [Q, L] by value of ``normalize``; L is the most that one has.

    ``texts`` [Q] are the choices, empty of data that may not be handed on.
    """

    number: NDArray[np.int64]
    right: NDArray[np.bool_]
    lengths: dict[str, NDArray[np.float64]]
    texts: tuple[tuple[str, ...], ...]

    @classmethod
    def of_table(cls, queries: pa.Table, most: int) -> QueryChoices:
        """From the table of queries; raises `ValueError`, or what a lookup does, where that is none of such queries."""
        columns = {name: queries[column].to_pylist() for name, column in LENGTHS.items()}
        number = np.array([len(own) for own in columns["bytes"]], dtype=np.int64)
        lengths = {name: np.ones((len(number), most)) for name in LENGTHS}
        right = np.zeros((len(number), most), dtype=bool)
        for query, gold in enumerate(queries["right"].to_pylist()):
            right[query, gold] = True
            for name, own in columns.items():
                lengths[name][query, : number[query]] = own[query]
        is_there = np.arange(most) < number[:, None]
        if (number < 2).any() or (right & ~is_there).any() or not right.any(axis=1).all():
            raise ValueError("its choices and the right ones among them do not fit")
        if any((values <= 0).any() for values in lengths.values()):
            raise ValueError("a choice has no length")
        texts = tuple(tuple(own or ()) for own in queries["choices"].to_pylist())
        return cls(number, right, lengths, texts)

    def scale(self, normalize: str) -> NDArray[np.float64]:
        """What log-likelihoods are divided by before choices are compared, float64 [Q, L]."""
        return np.ones(self.right.shape) if normalize == "sum" else self.lengths[normalize]

    def of_queries(self, queries: slice) -> QueryChoices:
        """Those of some queries."""
        lengths = {name: values[queries] for name, values in self.lengths.items()}
        return QueryChoices(self.number[queries], self.right[queries], lengths, self.texts[queries])

    def comparable(self, scores: NDArray[Any], queries: NDArray[np.int64] | None = None) -> NDArray[Any]:
        """Scores [..., Q, L] of some queries int64 [Q], by default all, -inf for choices that a query lacks."""
        number = self.number if queries is None else self.number[queries]
        return np.where(np.arange(scores.shape[-1]) < number[:, None], scores, np.asarray(-np.inf, scores.dtype))

    def is_right(
        self, predictions: NDArray[np.signedinteger[Any]], queries: NDArray[np.int64] | None = None
    ) -> NDArray[np.bool_]:
        """Whether predictions [..., Q] for some queries int64 [Q], by default all, are right; -1 is not."""
        places = np.arange(len(self.right)) if queries is None else queries
        return np.asarray((predictions >= 0) & self.right[places, predictions])

    def chance(self, weights: NDArray[np.int64]) -> float:
        """Accuracy of guessing, over queries of these weights [Q]."""
        return float(np.average(self.right.sum(axis=1) / self.number, weights=weights))
