"""What is scored, and what comes out: continuations by query, log-likelihoods with their states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from iclperm.engine.given import listed, pieces, shortly
from iclperm.engine.tree import IntArray, PrefixTree
from iclperm.errors import RequestError

if TYPE_CHECKING:
    from iclperm.engine.executor import UnitValues

OK, INVALID = 0, 1


@dataclass(frozen=True)
class Scores:
    """One entry a request, in the order given: ``logprob`` in nats (float32), NaN where ``state`` is invalid.

    ``token_logprob`` float32 are the log-probabilities of the continuations' tokens, end to end; ``tokens(n)`` those of
    request n.
    """

    logprob: npt.NDArray[np.float32]
    num_tokens: npt.NDArray[np.int32]
    is_greedy: npt.NDArray[np.bool_]
    state: npt.NDArray[np.uint8]  # 0 ok, 1 invalid: a row of logits was not finite
    token_logprob: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))

    @classmethod
    def of(
        cls,
        logprob: npt.NDArray[np.float32],
        is_greedy: npt.NDArray[np.bool_],
        is_finite: npt.NDArray[np.bool_],
        sizes: IntArray,
    ) -> Scores:
        """Of what was read of each token [T], ``sizes`` [N] a request, at least one; sums are of float64."""
        if not sizes.size:
            return cls(logprob, sizes.astype(np.int32), is_greedy, np.empty(0, np.uint8), logprob)
        begins = np.concatenate([[0], np.cumsum(sizes)])[:-1]
        finite = np.logical_and.reduceat(is_finite, begins)
        return cls(
            np.add.reduceat(logprob.astype(np.float64), begins).astype(np.float32),
            sizes.astype(np.int32),
            np.logical_and.reduceat(is_greedy, begins),
            np.where(finite, OK, INVALID).astype(np.uint8),
            logprob,
        )

    def tokens(self, number: int) -> npt.NDArray[np.float32]:
        """The log-probabilities in nats of the tokens of request ``number``'s continuation, without a copy."""
        begin = int(self.num_tokens[:number].sum())
        return self.token_logprob[begin : begin + int(self.num_tokens[number])]

    def joined(self, counts: IntArray) -> Scores:
        """As if each of ``counts`` requests, which follow each other, had been one."""
        sizes = np.add.reduceat(self.num_tokens.astype(np.int64), np.cumsum(counts) - counts)
        of_token = np.repeat(np.arange(self.num_tokens.size), self.num_tokens)
        return Scores.of(self.token_logprob, self.is_greedy[of_token], self.state[of_token] == OK, sizes)


@dataclass(frozen=True)
class UnitResult:
    """A finished unit of a product: c distinct contexts x q queries x L continuations."""

    unit: int
    contexts: IntArray  # [c] distinct-context numbers
    queries: IntArray  # [q]
    logprob: npt.NDArray[np.float32]  # [c, q, L] nats
    is_greedy: npt.NDArray[np.bool_]  # [c, q, L]
    state: npt.NDArray[np.uint8]  # [c, q]


@dataclass(frozen=True)
class ScoreBlock:
    """What `Engine.stream` has finished: some of the contexts with some of the queries, and all continuations.

    ``whole[np.ix_(block.contexts, block.queries)] = block.logprob`` puts it into what `Engine.score` gives.
    """

    contexts: IntArray  # [c] places among the contexts given
    queries: IntArray  # [q] places among the queries
    logprob: npt.NDArray[np.float32]  # [c, q, L] nats


def by_query(continuations: Sequence[Any], num_queries: int) -> list[Sequence[Any]]:
    """One list of continuations a query, equally many for each, whether given so or shared by all (then one object)."""
    continuations = listed(continuations, "continuations")
    if not len(continuations) or _is_continuation(continuations[0]):
        return [pieces(continuations, "continuations", "continuation")] * num_queries
    if len(continuations) != num_queries:
        raise RequestError(f"continuations are given for {len(continuations)} queries, but there are {num_queries}")
    for query, row in enumerate(continuations):
        if isinstance(row, str) or not hasattr(row, "__len__"):
            raise RequestError(f"the continuations of query {query} are {shortly(row)}; give a list of them")
        if len(row) != len(continuations[0]):
            raise RequestError(f"query {query} has {len(row)} continuations, query 0 has {len(continuations[0])}")
        pieces(row, "continuations", f"of query {query}, continuation")
    return list(continuations)


def _is_continuation(given: Any) -> bool:
    """A text or a row of token ids, not a list of them."""
    if isinstance(given, str | bytes) or not hasattr(given, "__len__") or not hasattr(given, "__getitem__"):
        return True  # or nothing of the kind, which is refused as one
    return not len(given) or not isinstance(given[0], str | Sequence | np.ndarray)


@dataclass(frozen=True)
class RowSums:
    """Per scored row [c, R]: float64 sums of its targets' log-probabilities as float32, all greedy, all finite."""

    logprob: npt.NDArray[np.float32]
    is_greedy: npt.NDArray[np.bool_]
    is_finite: npt.NDArray[np.bool_]


def sum_rows(tree: PrefixTree, units: Sequence[UnitValues], num_contexts: int) -> RowSums:
    """Add up the targets of each of the tree's rows, ``units`` holding [c, X] values end to end."""
    starts = tree.row_offsets[:-1]

    def by_item(values: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        return np.concatenate(values).reshape(num_contexts, -1)[:, tree.row_items]

    logprob = by_item([unit.logprob for unit in units]).astype(np.float64)
    return RowSums(
        np.add.reduceat(logprob, starts, axis=1).astype(np.float32),
        np.logical_and.reduceat(by_item([unit.is_greedy for unit in units]), starts, axis=1),
        np.logical_and.reduceat(by_item([unit.is_finite for unit in units]), starts, axis=1),
    )


def states_of(is_finite: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    return np.where(is_finite, OK, INVALID).astype(np.uint8)
