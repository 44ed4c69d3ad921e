"""Scores beyond accuracy, from the log-likelihoods of the labels."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.errors import RequestError
from iclperm.stats.sensitivity import FloatArray, query_weights, usable_queries

_NEAR_TIE_NATS = 1e-4


class Calibration(NamedTuple):
    """Probabilistic scores of every context, each [...] without the query and label axes; lower is better."""

    nll: FloatArray
    """Mean negative log-likelihood of the right label, nats, label probabilities normalised over the labels."""
    brier: FloatArray
    """Mean squared distance between label probabilities and truth, summed over labels (0 to 2)."""
    ece: FloatArray
    """Expected calibration error of the most likely label, 0 to 1."""


def calibration(
    label_logprob: npt.ArrayLike,
    targets: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    num_bins: int = 10,
    *,
    weights: npt.ArrayLike | None = None,
) -> Calibration:
    """Negative log-likelihood, Brier score and expected calibration error of every context.

    Args:
        label_logprob: [..., Q, L] log-likelihood of each label in nats; normalised over L here.
        targets: [Q] index of the right label.
        state: [..., Q] integers, 0 = ok; only queries ok in every context count.
        num_bins: equal-width bins of the confidence; with few queries a bin, chance alone makes the error positive.
        weights: [Q] how often each query counts.

    Returns NaN everywhere where no query is usable. Raises RequestError on shapes that do not fit, a target outside
    0..L-1, or a usable log-likelihood that is NaN. Cost: O(size), in float64 for one leading index at a time. Guo et
    al. (2017), eq. 3.
    """
    logprob = _label_logprob(label_logprob)
    *cells, num_queries, num_labels = logprob.shape
    usable = usable_queries(logprob.shape[:-1], state)
    truth, weight = _targets(targets, num_queries, num_labels)[usable], query_weights(weights, num_queries)[usable]
    contexts = logprob.reshape(-1, num_queries, num_labels)
    scores = np.full((3, len(contexts)), np.nan)
    for index, context in enumerate(contexts):
        if weight.any():
            scores[:, index] = _context_scores(context[usable], truth, weight, num_bins)
    return Calibration(*scores.reshape(3, *cells))


def near_tie_rate(
    label_logprob: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    tolerance: float = _NEAR_TIE_NATS,
    *,
    weights: npt.ArrayLike | None = None,
) -> float:
    """Share of the ok answers whose two best labels lie within `tolerance` nats: rounding could turn them.

    label_logprob [..., Q, L] in nats, state [..., Q] with 0 = ok, weights [Q] how often each query counts. NaN where no
    answer that counts is ok, or L = 1.
    """
    logprob = _label_logprob(label_logprob)
    ok = np.ones(logprob.shape[:-1], dtype=np.bool_) if state is None else np.asarray(state) == 0
    if ok.shape != logprob.shape[:-1]:
        raise RequestError(f"state must have shape {list(logprob.shape[:-1])}, got {list(ok.shape)}")
    answers = ok * query_weights(weights, logprob.shape[-2])
    if logprob.shape[-1] < 2 or not answers.any():
        return float("nan")
    best_two = np.partition(logprob, -2, axis=-1)[..., -2:]
    near = best_two[..., 1] - best_two[..., 0] <= tolerance  # NaN, where an answer is not ok, compares as False
    return float(answers[near].sum() / answers.sum())


def _label_logprob(label_logprob: npt.ArrayLike) -> npt.NDArray[Any]:
    logprob = np.asarray(label_logprob)
    if logprob.ndim < 2 or logprob.size == 0 or not np.issubdtype(logprob.dtype, np.floating):
        raise RequestError(
            f"label_logprob must be floating point [..., Q, L], got {logprob.dtype} {list(logprob.shape)}"
        )
    return logprob


def _targets(targets: npt.ArrayLike, num_queries: int, num_labels: int) -> npt.NDArray[np.int64]:
    truth = np.asarray(targets)
    if truth.shape != (num_queries,) or not np.issubdtype(truth.dtype, np.integer):
        raise RequestError(f"targets must be integers of shape [{num_queries}], got {truth.dtype} {list(truth.shape)}")
    outside = truth[(truth < 0) | (truth >= num_labels)]
    if outside.size:
        raise RequestError(f"targets must lie in 0..{num_labels - 1}, found {outside[0]}")
    return truth.astype(np.int64)


def _context_scores(
    logprob: npt.NDArray[Any], truth: npt.NDArray[np.int64], weight: FloatArray, num_bins: int
) -> tuple[float, float, float]:
    values = logprob.astype(np.float64)
    if np.isnan(values).any():
        raise RequestError("label_logprob holds NaN in a query that is ok; mark it in state")
    values -= np.logaddexp.reduce(values, axis=1, keepdims=True)
    queries = np.arange(len(truth))
    probability = np.exp(values)
    nll = -float(np.average(values[queries, truth], weights=weight))
    distance = probability.copy()
    distance[queries, truth] -= 1.0
    brier = float(np.average(np.sum(distance**2, axis=1), weights=weight))
    return nll, brier, _calibration_error(probability, truth, weight, num_bins)


def _calibration_error(
    probability: FloatArray, truth: npt.NDArray[np.int64], weight: FloatArray, num_bins: int
) -> float:
    """Σ over bins of the share of queries times |accuracy - mean confidence|."""
    confidence = probability.max(axis=1)
    hit = probability.argmax(axis=1) == truth
    bins = np.minimum((confidence * num_bins).astype(np.int64), num_bins - 1)
    gaps = np.bincount(bins, weights=weight * (hit - confidence), minlength=num_bins)
    return float(np.abs(gaps).sum() / weight.sum())
