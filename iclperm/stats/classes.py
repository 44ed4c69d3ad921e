"""Answers label by label: confusion, recall, precision, F1, and what weighted queries are worth.

Accuracy is one number of the diagonal. Where classes are not equally frequent, or a model hardly ever names some of
them, the rest of the table says what accuracy hides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.errors import RequestError
from iclperm.stats.sensitivity import FloatArray, query_weights

_CELLS_AT_ONCE = 1 << 16


class Confusion(NamedTuple):
    """Answers by right and by answered label, each query counted by its weight."""

    counts: FloatArray
    """[..., L, L] gold label (row) by answered label (column)."""
    unnamed: FloatArray
    """[..., L] answers to queries of each gold label that are ok but name no label: wrong, and in no column."""


class ClassScores(NamedTuple):
    """Scores of every label, and their means over labels; NaN where nothing can be said."""

    recall: FloatArray
    """[..., L] share of the queries of a label that are answered with it; NaN for a label without queries."""
    precision: FloatArray
    """[..., L] share of the answers with a label that are right; NaN for a label that is never answered."""
    f1: FloatArray
    """[..., L] 2·right / (queries of the label + answers with it); 0 for one that is never answered, NaN for one that
    has neither."""
    macro_f1: FloatArray
    """[...] mean of F1 over the labels that have one."""
    balanced_accuracy: FloatArray
    """[...] mean recall over the labels that have queries; 1/L for an answer that does not depend on the query."""


class EffectiveItems(NamedTuple):
    """What weighted queries are worth in equally weighted ones, (Σw)²/Σw² (Kish 1965, *Survey Sampling*, 11.7)."""

    by_label: FloatArray
    """[L] 0 for a label without queries."""
    total: float
    """Of all queries: the variance of a weighted mean of alike scores is that of so many equally weighted ones."""
    distinct: npt.NDArray[np.int64]
    """[L] queries, each once."""
    share: FloatArray
    """[L] of the weight: what naming this label always would have right."""


def confusion(
    predictions: npt.ArrayLike,
    gold: npt.ArrayLike,
    num_labels: int,
    state: npt.ArrayLike | None = None,
    weights: npt.ArrayLike | None = None,
) -> Confusion:
    """The confusion of every cell.

    Args:
        predictions: [..., Q] index of the answered label; -1 names none, nor does L (generated text without one).
        gold: [Q] index of the right label.
        num_labels: L.
        state: [..., Q] integers, 0 = ok; what is not ok is left out, cell by cell.
        weights: [Q] how often each query counts.

    Raises RequestError on shapes that do not fit and labels outside 0..L - 1. Cost: O(size), in pieces of 65,536
    answers.
    """
    answered, right = np.asarray(predictions), _labels(gold, num_labels)
    if answered.ndim < 1 or not answered.size or answered.shape[-1:] != right.shape:
        raise RequestError(f"predictions must be [..., Q] for gold of {len(right)} queries, got {list(answered.shape)}")
    if not np.issubdtype(answered.dtype, np.integer) or answered.min() < -1 or answered.max() > num_labels:
        raise RequestError(
            f"predictions must be whole numbers from -1 to {num_labels}, got {answered.min()} to {answered.max()}"
        )
    states = None if state is None else np.asarray(state)
    if states is not None and states.shape != answered.shape:
        raise RequestError(f"state must have the shape of predictions {list(answered.shape)}, got {list(states.shape)}")
    weight, width = query_weights(weights, len(right)), num_labels + 1
    rows = answered.reshape(-1, len(right))
    found = np.empty((len(rows), num_labels, width))
    step = max(1, _CELLS_AT_ONCE // len(right))
    for begin in range(0, len(rows), step):
        part = rows[begin : begin + step]
        cells = np.arange(len(part))[:, None] * num_labels * width
        place = cells + right * width + np.where(part < 0, num_labels, part)
        counted = np.broadcast_to(weight, part.shape)
        if states is not None:
            counted = np.where(states.reshape(rows.shape)[begin : begin + step] == 0, counted, 0.0)
        sums = np.bincount(place.ravel(), counted.ravel(), minlength=len(part) * num_labels * width)
        found[begin : begin + step] = sums.reshape(-1, num_labels, width)
    found = found.reshape(*answered.shape[:-1], num_labels, width)
    return Confusion(found[..., :num_labels], found[..., num_labels])


def class_scores(found: Confusion) -> ClassScores:
    """Recall, precision, F1, macro-F1 and balanced accuracy of a confusion, or of many [..., L, L].

    Macro-F1 is the mean of the labels' F1, not the F1 of mean recall and precision (Opitz & Burst 2019). Cost: O(size).
    """
    right = np.diagonal(found.counts, axis1=-2, axis2=-1)
    asked = found.counts.sum(axis=-1) + found.unnamed
    answered = found.counts.sum(axis=-2)
    recall, precision = _share(right, asked), _share(right, answered)
    f1 = _share(2 * right, asked + answered)
    return ClassScores(recall, precision, f1, _mean_known(f1), _mean_known(recall))


def effective_items(gold: npt.ArrayLike, num_labels: int, weights: npt.ArrayLike | None = None) -> EffectiveItems:
    """What the queries of every label, and all of them, are worth; args as `confusion`. Cost: O(Q)."""
    right = _labels(gold, num_labels)
    weight = query_weights(weights, len(right))
    once, twice = (np.bincount(right, values, minlength=num_labels) for values in (weight, weight**2))
    by_label = np.divide(once**2, twice, out=np.zeros(num_labels), where=twice > 0)
    distinct = np.bincount(right[weight > 0], minlength=num_labels).astype(np.int64)
    return EffectiveItems(by_label, float(once.sum() ** 2 / twice.sum()), distinct, once / once.sum())


def answered_shares(found: Confusion) -> FloatArray:
    """[..., L] share of all answers, by weight, that name each label; NaN without an answer."""
    named = found.counts.sum(axis=-2)
    total = found.counts.sum(axis=(-2, -1)) + found.unnamed.sum(axis=-1)
    return _share(named, total[..., None])


def _labels(gold: npt.ArrayLike, num_labels: int) -> npt.NDArray[np.int64]:
    right = np.asarray(gold)
    if right.ndim != 1 or not right.size or not np.issubdtype(right.dtype, np.integer):
        raise RequestError(f"gold must be whole numbers [Q], got {right.dtype} {list(right.shape)}")
    if right.min() < 0 or right.max() >= num_labels:
        raise RequestError(f"gold must lie in 0..{num_labels - 1}, got {right.min()} to {right.max()}")
    return right.astype(np.int64)


def _share(part: Any, whole: Any) -> FloatArray:
    parts, wholes = np.broadcast_arrays(np.asarray(part, dtype=np.float64), whole)
    return np.asarray(np.divide(parts, wholes, out=np.full(parts.shape, np.nan), where=wholes > 0))


def _mean_known(values: FloatArray) -> FloatArray:
    """Mean over the last axis of what is not NaN."""
    known = ~np.isnan(values)
    return _share(np.where(known, values, 0.0).sum(axis=-1), known.sum(axis=-1))
