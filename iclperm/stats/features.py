"""Features of an ordering that may go with its accuracy, and the recency bias."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from iclperm.errors import RequestError
from iclperm.stats.correlation import correlation_with_position
from iclperm.stats.intervals import Interval, bounded, jackknife_interval
from iclperm.stats.sensitivity import FloatArray, accuracy

IntArray = npt.NDArray[np.int64]


def ordering_features(
    labels: npt.ArrayLike,
    names: Sequence[str],
    *,
    lengths: npt.ArrayLike | None = None,
    similarity: npt.ArrayLike | None = None,
    last: int | None = None,
) -> dict[str, FloatArray]:
    """Features of every ordering by name, each [S, P], to correlate with its accuracy.

    Args:
        labels: [S, P, K] label of the demonstration at each position, 0 first and K-1 next to the query.
        names: [L] label words; none where any answer may be given, and then labels are left out of the features.
        lengths: [S, P, K] length of each demonstration, in any unit.
        similarity: [S, P, K] similarity of each demonstration to the queries (`lexical_similarity`).
        last: how many positions count as the last few; by default the number of labels (four without), at most K.

    `last label is X` (0 or 1), `longest run of one label`, `uneven label positions` (mean over labels of the distance
    of their mean position from the middle, 0 to 1), `distinct labels among the last n`; with lengths, `longer ones
    last` (Spearman's correlation of length and position within the ordering); with similarity, `similarity of the last`
    one, of the `last n`, and `similar ones last`. How many demonstrations have a label is no feature, as that is the
    same for all orderings of a set. Raises RequestError on shapes that do not fit. Cost: O(S·P·K·(K + L)).
    """
    shown = np.asarray(labels)
    if shown.ndim != 3 or shown.size == 0 or not np.issubdtype(shown.dtype, np.integer):
        raise RequestError(f"labels must be integers of shape [S, P, K], got {shown.dtype} {list(shown.shape)}")
    if names and (shown.min() < 0 or shown.max() >= len(names)):
        wrong = shown.min() if shown.min() < 0 else shown.max()
        raise RequestError(f"labels must lie in 0..{len(names) - 1}, found {wrong}")
    num_last = min((len(names) or 4) if last is None else last, shown.shape[2])
    features = {f"last label is {name}": (shown[..., -1] == label) * 1.0 for label, name in enumerate(names)}
    if names:
        features["longest run of one label"] = _longest_run(shown)
        features["uneven label positions"] = _uneven_positions(shown, len(names))
    if names and num_last > 1:
        features[f"distinct labels among the last {num_last}"] = _distinct(shown[..., -num_last:], len(names))
    if lengths is not None:
        features["longer ones last"] = correlation_with_position(_like(lengths, shown.shape, "lengths"))
    if similarity is not None:
        alike = _like(similarity, shown.shape, "similarity")
        features["similarity of the last to the queries"] = alike[..., -1]
        if num_last > 1:
            features[f"similarity of the last {num_last} to the queries"] = alike[..., -num_last:].mean(axis=2)
        features["similar ones last"] = correlation_with_position(alike)
    return features


def recency_bias(
    predictions: npt.ArrayLike,
    last_labels: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    weights: npt.ArrayLike | None = None,
    *,
    level: float = 0.95,
) -> Interval:
    """How much more often the label of the last demonstration is answered than it is over all orders of its set.

    Args:
        predictions: [S, P, Q] index of the answered label; anything where the state is not ok.
        last_labels: [S, P] label of the demonstration next to the query.
        state, weights: [S, P, Q] 0 = ok, and [Q] how often each query counts.
        level: of the interval.

    The mean over orderings of the share of answers that are the last label, less the mean share of that label over the
    set's permutations; 0 where order does not matter, also for a model that prefers a label. Its interval is
    `jackknife_interval` over sets and permutations. Raises RequestError on shapes that do not fit. Cost: O(S·P·Q·L).
    After the recency bias of Zhao et al. (2021).
    """
    answers, last = np.asarray(predictions), np.asarray(last_labels)
    if answers.ndim != 3 or last.shape != answers.shape[:2]:
        raise RequestError(
            f"predictions must be [S, P, Q] and last_labels [S, P], got {list(answers.shape)} and {list(last.shape)}"
        )
    excess = np.zeros(last.shape)
    for label in np.unique(last):
        share = accuracy(answers == label, state, weights).values
        excess += np.where(last == label, share - share.mean(axis=1, keepdims=True), 0.0)
    without = [
        (total.sum() - total) / (excess.size - excess.size // len(total)) if len(total) > 1 else [math.nan]
        for total in (excess.sum(axis=1), excess.sum(axis=0))
    ]
    return bounded(jackknife_interval(float(excess.mean()), *without, level=level), "difference")


def _like(values: npt.ArrayLike, shape: tuple[int, ...], name: str) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != shape:
        raise RequestError(f"{name} must have the shape of labels {list(shape)}, got {list(array.shape)}")
    return array


def _longest_run(labels: npt.NDArray[Any]) -> FloatArray:
    run, longest = np.ones(labels.shape[:2]), np.ones(labels.shape[:2])
    for place in range(1, labels.shape[2]):
        run = np.where(labels[..., place] == labels[..., place - 1], run + 1, 1.0)
        longest = np.maximum(longest, run)
    return longest


def _uneven_positions(labels: npt.NDArray[Any], num_labels: int) -> FloatArray:
    """Mean over the labels that occur of |mean position - middle| / middle; 0 for one demonstration."""
    middle = (labels.shape[2] - 1) / 2
    distance, occurs = np.zeros(labels.shape[:2]), np.zeros(labels.shape[:2])
    for label in range(num_labels):
        here = labels == label
        num = here.sum(axis=2)
        mean = (here * (np.arange(labels.shape[2]) - middle)).sum(axis=2) / np.maximum(num, 1)
        distance += np.abs(mean)
        occurs += num > 0
    return np.asarray(distance / occurs / max(middle, 1.0))


def _distinct(labels: npt.NDArray[Any], num_labels: int) -> FloatArray:
    return np.asarray(sum((labels == label).any(axis=2) * 1.0 for label in range(num_labels)))
