"""What is scored, and what comes out: continuations by query, log-likelihoods with their states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from iclperm.engine.tree import IntArray
from iclperm.errors import RequestError

OK, INVALID = 0, 1


@dataclass(frozen=True)
class Scores:
    """One entry a request, in the order given: ``logprob`` in nats (float32), NaN where ``state`` is invalid."""

    logprob: npt.NDArray[np.float32]
    num_tokens: npt.NDArray[np.int32]
    is_greedy: npt.NDArray[np.bool_]
    state: npt.NDArray[np.uint8]  # 0 ok, 1 invalid: a row of logits was not finite


@dataclass(frozen=True)
class UnitResult:
    """A finished unit of a product: c distinct contexts x q queries x L continuations."""

    unit: int
    contexts: IntArray  # [c] distinct-context numbers
    queries: IntArray  # [q]
    logprob: npt.NDArray[np.float32]  # [c, q, L] nats
    is_greedy: npt.NDArray[np.bool_]  # [c, q, L]
    state: npt.NDArray[np.uint8]  # [c, q]


def by_query(continuations: Sequence[Any], num_queries: int) -> list[Sequence[Any]]:
    """One list of continuations a query, equally many for each, whether given so or shared by all (then one object)."""
    if not len(continuations) or _is_continuation(continuations[0]):
        return [continuations] * num_queries
    if len(continuations) != num_queries:
        raise RequestError(f"continuations are given for {len(continuations)} queries, but there are {num_queries}")
    for query, row in enumerate(continuations):
        if len(row) != len(continuations[0]):
            raise RequestError(f"query {query} has {len(row)} continuations, query 0 has {len(continuations[0])}")
    return list(continuations)


def _is_continuation(given: Any) -> bool:
    """A text or a row of token ids, not a list of them."""
    return isinstance(given, str) or not len(given) or not isinstance(given[0], str | Sequence | np.ndarray)
