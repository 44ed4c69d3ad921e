"""Scores beyond accuracy, from log-likelihoods of labels; and what calibrating them by content-free inputs changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.errors import RequestError
from iclperm.stats.convergence import mean_error
from iclperm.stats.incomplete import filled
from iclperm.stats.intervals import Interval, bounded
from iclperm.stats.sensitivity import (
    FloatArray,
    binary_items,
    order_sensitivity,
    query_weights,
    selection_sensitivity,
    usable_queries,
)

_NEAR_TIE_NATS = 1e-4
_LEVEL = 0.95


class Calibration(NamedTuple):
    """Probabilistic scores of every context, each [...] without the query and label axes; lower is better."""

    nll: FloatArray
    """Mean negative log-likelihood of the right label, nats, label probabilities normalised over the labels."""
    brier: FloatArray
    """Mean squared distance between label probabilities and truth, summed over labels (0 to 2)."""
    ece: FloatArray
    """Expected calibration error of the most likely label, 0 to 1."""


class CalibrationEffect(NamedTuple):
    """What calibrated predictions change, from every answer there is; each entry [K]."""

    shots: tuple[int, ...]
    accuracy: FloatArray
    """Mean over sets and permutations, without calibration."""
    calibrated_accuracy: FloatArray
    gain: tuple[Interval, ...]
    """Calibrated minus uncalibrated accuracy with its 95 % interval, for other queries, sets and permutations
    (`stats.mean_error`); at k = 0, which is one context, for other queries alone. NaN bounds for one query."""
    order: FloatArray
    """Order sensitivity without calibration; NaN for P = 1. It holds item noise, as the calibrated one does."""
    calibrated_order: FloatArray
    selection: FloatArray
    """Selection sensitivity without calibration; NaN for S = 1."""
    calibrated_selection: FloatArray
    dropped: float
    """Share of the queries (by weight) without an answer in any cell."""
    num_queries: int
    """Distinct queries that were used."""


def content_free_prior(content_free_logprob: npt.ArrayLike, scale: npt.ArrayLike | None = None) -> FloatArray:
    """Logarithm of p_cf, the mean probabilities that a context gives the labels after content-free queries, in nats.

    Args:
        content_free_logprob: [..., M, L] log-likelihoods of the labels after M content-free queries.
        scale: [L] what log-likelihoods are divided by, as for the queries; all 1 by default.

    Returns float64 [..., L]: probabilities are normalised over the labels of each input, then averaged over the inputs;
    NaN where a log-likelihood is NaN. Raises RequestError on shapes that do not fit. Cost: O(size). Zhao et al. (2021),
    section 5; their code averages first and normalises then, which gives inputs with likelier labels more weight.
    """
    logprob = _label_logprob(content_free_logprob).astype(np.float64) / _scale(scale, content_free_logprob)
    with np.errstate(invalid="ignore"):  # NaN is no answer
        shares = logprob - np.logaddexp.reduce(logprob, axis=-1, keepdims=True)
        return np.asarray(np.logaddexp.reduce(shares, axis=-2) - np.log(logprob.shape[-2]))


def calibrated_scores(scores: npt.ArrayLike, prior: npt.ArrayLike) -> FloatArray:
    """Log-probabilities of the labels after contextual calibration: p(l) / p_cf(l), normalised over the labels.

    scores: [..., L] log-likelihoods in nats, normalised as the study asks; prior: [..., L] as `content_free_prior`
    gives it with the same scale, broadcast to scores. Float64 [..., L] in nats, NaN where either is NaN. Cost: O(size).
    Zhao et al. (2021), section 5, with W = diag(p_cf)⁻¹ and b = 0: the largest is the prediction.
    """
    ratio = np.asarray(scores, dtype=np.float64) - np.asarray(prior, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        return np.asarray(ratio - np.logaddexp.reduce(ratio, axis=-1, keepdims=True))


def calibration_effect(
    uncalibrated: npt.ArrayLike,
    calibrated: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    *,
    shots: Sequence[int],
    weights: npt.ArrayLike | None = None,
) -> CalibrationEffect:
    """Accuracy, order and selection sensitivity without and with calibration, k by k.

    Args:
        uncalibrated: [S, P, K, Q] 0 or 1.
        calibrated: [S, P, K, Q] 0 or 1, of the same prompts.
        state: [S, P, K, Q] integers, 0 = ok.
        shots: [K] numbers of demonstrations.
        weights: [Q] how often each query counts in the accuracies.

    Permutations must be shared by the sets. All is NaN where some cell has no answer. Raises RequestError on shapes
    that do not fit. Cost: O(size); a float copy of one k.
    """
    pair = [binary_items(items) for items in (uncalibrated, calibrated)]
    if pair[0].ndim != 4 or pair[0].shape != pair[1].shape or len(shots) != pair[0].shape[2]:
        raise RequestError(
            f"calibration_effect needs two arrays of one shape [S, P, K, Q] with K = {len(shots)}, got "
            f"{list(pair[0].shape)} and {list(pair[1].shape)}"
        )
    if state is not None and (np.asarray(state) != 0).all(axis=-1).any():
        nothing = np.full(len(shots), np.nan)
        unknown = (Interval(np.nan, np.nan, np.nan, _LEVEL),) * len(shots)
        counts = tuple(map(int, shots))
        return CalibrationEffect(counts, nothing, nothing, unknown, nothing, nothing, nothing, nothing, 1.0, 0)
    whole = [filled(items, state, weights) for items in pair]
    cells, weight = [table.accuracy for table in whole], whole[0].weights
    means, orders, selections = [], [], []
    for values in (cell.values for cell in cells):
        tables = np.moveaxis(values, 2, 0)
        means.append(tables.mean(axis=(1, 2)))
        orders.append(np.array([order_sensitivity(table) for table in tables]))
        selections.append(np.array([selection_sensitivity(table) for table in tables]))
    gains = []
    for place, count in enumerate(shots):
        contexts = slice(1 if count == 0 else None)
        before, after = (table.items[contexts, contexts, place] for table in whole)
        gains.append(_gain(before, after, weight))
    return CalibrationEffect(
        shots=tuple(map(int, shots)),
        accuracy=means[0],
        calibrated_accuracy=means[1],
        gain=tuple(gains),
        order=orders[0],
        calibrated_order=orders[1],
        selection=selections[0],
        calibrated_selection=selections[1],
        dropped=cells[0].dropped,
        num_queries=cells[0].num_queries,
    )


def _gain(before: npt.NDArray[Any], after: npt.NDArray[Any], weight: FloatArray) -> Interval:
    """The weighted mean of after - before, both [S, P, Q], with its interval."""
    return bounded(mean_error(after - before.astype(np.float64), weight).interval(_LEVEL), "difference")


def _scale(scale: npt.ArrayLike | None, label_logprob: npt.ArrayLike) -> FloatArray:
    """[L] what log-likelihoods are divided by, all 1 by default; raises RequestError unless L positive numbers."""
    num_labels = np.shape(label_logprob)[-1]
    values = np.ones(num_labels) if scale is None else np.asarray(scale, dtype=np.float64)
    if values.shape != (num_labels,) or not (values > 0).all():
        raise RequestError(f"scale must be {num_labels} positive numbers, got shape {list(values.shape)}")
    return np.asarray(values)


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
    """Share of the ok answers whose two best labels lie within `tolerance` nats, so that rounding decides the answer.

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
