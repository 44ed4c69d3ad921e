"""Choices that each query of a run has of its own: how many, which are right, and how long they are; and labels or
choices without a context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iclperm.study.states import OK, STATES
from iclperm.study.study import PMI

LENGTHS = {"mean": "choice_tokens", "characters": "choice_characters", "bytes": "choice_bytes"}
"""The columns of what log-likelihoods are divided by, by the values of ``normalize``."""
ALONE = "choice_logprob_alone"
"""The column of log-likelihoods of labels or choices without a context, in files of their own among a run's answers."""


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

    def tokens_after(self, asked: NDArray[np.bool_]) -> float:
        """Of queries ``asked`` [Q], how many tokens of choices before their last one has on average: what a model is
        fed after each of its prompts. 0 where none is asked."""
        lengths = self.lengths["mean"][asked]
        is_there = np.arange(lengths.shape[1]) < self.number[asked, None]
        return float(((lengths - 1) * is_there).sum() / max(1, len(lengths)))

    def scale(self, normalize: str) -> NDArray[np.float64]:
        """What log-likelihoods are divided by before choices are compared, float64 [Q, L]."""
        return np.ones(self.right.shape) if normalize in ("sum", PMI) else self.lengths[normalize]

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


PENDING = 255
"""In the place of a state where there is no answer yet."""


@dataclass(frozen=True)
class AloneScores:
    """Labels without a context: ``logprob`` float32 [R, L], in nats, and ``state`` uint8 [R]; R is 1, or as many as
    there are queries that have choices of their own, of which some are ``asked`` bool [R]."""

    logprob: NDArray[np.float32]
    state: NDArray[np.uint8]
    asked: NDArray[np.bool_]

    @classmethod
    def empty(cls, num_labels: int, query_states: NDArray[np.uint8], *, is_by_query: bool) -> AloneScores:
        """Yet to be filled in; queries [Q] that are not asked at all have no choices to ask."""
        asked = query_states == OK if is_by_query else np.ones(1, bool)
        state = np.full(len(asked), PENDING, np.uint8)
        return cls(np.full((len(asked), num_labels), np.nan, np.float32), state, asked)

    def fill(self, table: pa.Table, begins: Mapping[str, int]) -> None:
        """Adds the rows of a part; raises what a lookup does where it is no such table."""
        splits, queries = table["split"].to_pylist(), table["query"].to_pylist()
        rows = [0 if split is None else begins[split] + query for split, query in zip(splits, queries, strict=True)]
        self.state[rows] = states = [STATES.index(state) for state in table["state"].to_pylist()]
        for row, state, found in zip(rows, states, table[ALONE].to_pylist(), strict=True):
            if state == OK:
                self.logprob[row] = found

    @property
    def num_missing(self) -> int:
        """How many are in no part."""
        return int(np.count_nonzero(self.asked & (self.state == PENDING)))

    def of(self, queries: NDArray[np.int64] | slice) -> NDArray[np.float32]:
        """What is taken off the log-likelihoods of some queries [N], float32 [N, L], or [1, L] off those of all."""
        return self.logprob if len(self.logprob) == 1 else self.logprob[queries]
