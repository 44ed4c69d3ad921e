"""Accuracy, the order and selection sensitivity of arXiv 2511.09700, and the curve over shots of arXiv 2503.22002."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.errors import RequestError
from iclperm.stats.limits import LIMITS, ComputeLimits

FloatArray = npt.NDArray[np.float64]
Estimator = Literal["mean_std", "rms", "c4"]


class Accuracy(NamedTuple):
    """Accuracy over the queries that are `ok` in every compared cell, with what was left out."""

    values: FloatArray
    """[...] share of correct queries; NaN where no query is left."""
    dropped: float
    """Share of the queries (by weight) that at least one cell could not answer."""
    num_queries: int
    """Distinct queries that were used."""


class Curve(NamedTuple):
    """Accuracy against the number of shots, each entry [K]."""

    mean: FloatArray
    """Mean over permutations and sets (µ_k of arXiv 2503.22002)."""
    std_permutations: FloatArray
    """Mean over sets of the standard deviation over permutations; NaN for P = 1."""
    std_sets: FloatArray
    """Standard deviation over sets (trials) of a set's mean over permutations; NaN for S = 1."""
    dropped: float
    """Share of the queries (by weight) that at least one cell could not answer."""
    num_queries: int
    """Distinct queries that were used."""


def accuracy(
    correct: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    weights: npt.ArrayLike | None = None,
    *,
    limits: ComputeLimits = LIMITS,
) -> Accuracy:
    """Share of correct answers in every cell, over the queries that are `ok` in all of them.

    Args:
        correct: [..., Q] 0 or 1 (bool or integer), or floating-point grades in 0..1 such as F1 or partial credit; any
            number of leading axes.
        state: [..., Q] integers, 0 = ok; a query that is not ok anywhere is left out everywhere, so that cells stay
            comparable.
        weights: [Q] how often each query counts (an oversampled query is stored once); all 1 by default.
        limits: sizes from which it is computed in another way, to the same bits.

    Raises RequestError on shapes that do not fit, values outside 0..1, or weights that are negative or not
    finite. Cost: O(size of correct), without a float copy of it; a large contiguous tensor of bytes is read once, at
    the speed of memory, where the weights are whole numbers.
    """
    items = np.asarray(correct)
    if not (is_large(items, limits) and _is_whole(weights)):
        items = graded_items(items, limits)
    usable = usable_queries(items.shape, state, limits)
    weight = query_weights(weights, items.shape[-1])
    sums = _weighted_sums(items, np.where(usable, weight, 0.0), limits)
    return accuracy_from_sums(sums, usable, weight)


def order_sensitivity(accuracy: npt.ArrayLike, estimator: Estimator = "mean_std") -> float:
    """How far accuracy moves with the order of the demonstrations: mean over sets of the std over permutations.

    Args:
        accuracy: [S, P] accuracy of each set under each permutation.
        estimator: `mean_std`, the paper's mean of standard deviations (ddof 1); `rms`, the root of the mean variance;
            `c4`, the mean of standard deviations divided by c4(P), unbiased for Gaussian effects.

    Returns the sensitivity in units of accuracy; NaN for P = 1. It contains the noise of a finite query sample:
    `variance_components` takes that out. Raises RequestError on another shape, a NaN or an unknown estimator.
    arXiv 2511.09700, order sensitivity.
    """
    return _mean_spread(accuracy_matrix(accuracy), estimator)


def selection_sensitivity(accuracy: npt.ArrayLike, estimator: Estimator = "mean_std") -> float:
    """How far accuracy moves with the choice of the demonstrations: mean over permutations of the std over sets.

    Takes and returns what `order_sensitivity` does, with sets and permutations exchanged; NaN for S = 1.
    arXiv 2511.09700, selection sensitivity.
    """
    return _mean_spread(accuracy_matrix(accuracy).T, estimator)


def sensitivity_ratio(accuracy: npt.ArrayLike, estimator: Estimator = "mean_std") -> float:
    """r = selection sensitivity / order sensitivity of accuracy [S, P] (arXiv 2511.09700).

    Interaction and item noise stand in both, which pulls r towards 1: report `variance_components(...).ratio` beside
    it. NaN where the order sensitivity is 0 or undefined.
    """
    order = order_sensitivity(accuracy, estimator)
    return selection_sensitivity(accuracy, estimator) / order if order > 0 else math.nan


def c4(num: int) -> float:
    """E[sample standard deviation] / true standard deviation for `num` independent Gaussian values (.9727 at 10, .9980
    at 128).

    Raises RequestError below two values.
    """
    if num < 2:
        raise RequestError(f"c4 needs at least 2 values, got {num}")
    log_gamma_ratio = math.lgamma(num / 2) - math.lgamma((num - 1) / 2)
    return math.sqrt(2 / (num - 1)) * math.exp(log_gamma_ratio)


def curve(
    correct: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    weights: npt.ArrayLike | None = None,
    *,
    limits: ComputeLimits = LIMITS,
) -> Curve:
    """Accuracy against the number of shots, with the spread over permutations and over sets kept apart.

    Args:
        correct: [S, P, K, Q] 0 or 1, or grades in 0..1; K indexes the list of shots that were run.
        state: [S, P, K, Q] integers, 0 = ok.
        weights: [Q] how often each query counts.
        limits: as for `accuracy`.

    Raises RequestError unless correct has four axes. arXiv 2503.22002, Figure 1; standard deviations have ddof 1.
    """
    items = np.asarray(correct)
    if items.ndim != 4:
        raise RequestError(f"curve needs correct of shape [S, P, K, Q], got {list(items.shape)}")
    return curve_from_accuracy(accuracy(items, state, weights, limits=limits))


def curve_from_accuracy(cells: Accuracy) -> Curve:
    """The curve of accuracies [S, P, K] (`curve`)."""
    return Curve(
        mean=cells.values.mean(axis=(0, 1)),
        std_permutations=std_along(cells.values, axis=1).mean(axis=0),
        std_sets=std_along(cells.values.mean(axis=1), axis=0),
        dropped=cells.dropped,
        num_queries=cells.num_queries,
    )


def accuracy_from_sums(sums: FloatArray, usable: npt.NDArray[np.bool_], weight: FloatArray) -> Accuracy:
    """Accuracy of weighted sums [...] over the `usable` [Q] queries of weight [Q]."""
    kept, total = float(weight[usable].sum()), float(weight.sum())
    if kept == 0.0:
        return Accuracy(np.full(np.shape(sums), np.nan), 1.0, 0)
    return Accuracy(sums / kept, 1.0 - kept / total, int(np.count_nonzero(usable)))


def accuracy_matrix(accuracy: npt.ArrayLike) -> FloatArray:
    """`accuracy` as float64 [S, P]; raises RequestError on another shape, an empty axis or a NaN."""
    matrix = np.asarray(accuracy, dtype=np.float64)
    if matrix.ndim != 2 or matrix.size == 0:
        raise RequestError(f"accuracy must have shape [S, P] with S, P >= 1, got {list(matrix.shape)}")
    if not np.isfinite(matrix).all():
        s, p = np.argwhere(~np.isfinite(matrix))[0]
        raise RequestError(f"accuracy[{s}, {p}] is {matrix[s, p]}; leave out cells without a usable query")
    return matrix


def binary_items(correct: npt.ArrayLike, limits: ComputeLimits = LIMITS) -> npt.NDArray[np.uint8]:
    """`correct` [..., Q] as uint8 0/1, a view where it can be; raises RequestError on anything else."""
    items = np.asarray(correct)
    if items.ndim < 1 or items.size == 0:
        raise RequestError(f"correct must have shape [..., Q] with no empty axis, got {list(items.shape)}")
    if items.dtype == np.bool_:
        return items.view(np.uint8)
    if not np.issubdtype(items.dtype, np.integer):
        raise RequestError(f"correct must hold bool or integer 0 and 1, got {items.dtype}")
    if is_large(items, limits):
        from iclperm.stats import _kernels

        if _kernels.is_binary(items, limits):
            return items
    if items.min() < 0 or items.max() > 1:
        wrong = items.min() if items.min() < 0 else items.max()
        raise RequestError(f"correct must hold only 0 and 1, found {wrong}")
    return items.astype(np.uint8, copy=False)


def graded_items(correct: npt.ArrayLike, limits: ComputeLimits = LIMITS) -> npt.NDArray[Any]:
    """`correct` [..., Q] as float64 where it holds floating-point grades in 0..1, such as F1, else as `binary_items`.

    Raises RequestError on anything else, a NaN included.
    """
    items = np.asarray(correct)
    if items.dtype.kind != "f" or items.size == 0:
        return binary_items(items, limits)
    wrong = items[~((items >= 0) & (items <= 1))]
    if wrong.size:
        raise RequestError(
            f"graded answers must lie in 0..1, found {wrong.flat[0]}; what is missing is 0 and marked in state"
        )
    return items.astype(np.float64, copy=False)


def usable_queries(
    shape: tuple[int, ...], state: npt.ArrayLike | None, limits: ComputeLimits = LIMITS
) -> npt.NDArray[np.bool_]:
    """[Q] True where a query is ok (state 0) in every cell; raises RequestError if state has not `shape` [..., Q]."""
    if state is None:
        return np.ones(shape[-1], dtype=np.bool_)
    states = np.asarray(state)
    if states.shape != shape:
        raise RequestError(f"state must have the shape of correct {list(shape)}, got {list(states.shape)}")
    if is_large(states, limits):
        from iclperm.stats import _kernels

        return ~_kernels.any_by_query(states.view(np.uint8).reshape(-1, shape[-1]), limits)
    return np.asarray(~states.any(axis=tuple(range(states.ndim - 1))))


def is_large(values: npt.NDArray[Any], limits: ComputeLimits = LIMITS) -> bool:
    """Whether the Numba loops can read `values` and are worth their compilation: many bytes in one piece."""
    if values.size < limits.numba_from or values.dtype not in (np.uint8, np.bool_):
        return False
    return values.flags.c_contiguous and values.ctypes.data % 8 == 0


def query_weights(weights: npt.ArrayLike | None, num_queries: int) -> FloatArray:
    """`weights` as float64 [Q], all 1 by default; raises RequestError on another shape, a negative or only zeros."""
    if weights is None:
        return np.ones(num_queries)
    values: FloatArray = np.asarray(weights, dtype=np.float64)
    if values.shape != (num_queries,):
        raise RequestError(f"weights must have shape [{num_queries}], got {list(values.shape)}")
    if not np.isfinite(values).all() or (values < 0).any() or not values.any():
        raise RequestError(f"weights must be finite, >= 0 and not all 0, got {values.min()} to {values.max()}")
    return values


def _is_whole(weights: npt.ArrayLike | None) -> bool:
    """Whether weights are none, or whole numbers that sums of int64 can hold."""
    values = np.asarray(0 if weights is None else weights)
    if values.dtype.kind not in "biuf" or not values.size:
        return False
    return bool(np.all((values == np.floor(values)) & (values >= 0) & (values < 1 << 31)))


def _weighted_sums(items: npt.NDArray[Any], weight: FloatArray, limits: ComputeLimits) -> FloatArray:
    """Sums over Q of correct [..., Q] times weight [Q]. A large tensor is checked for 0 and 1 in the same pass."""
    if is_large(items, limits) and _is_whole(weight):
        from iclperm.stats import _kernels

        edges, whole = np.array([0, len(weight)]), weight.astype(np.int64)
        sums, is_binary = _kernels.segment_sums(items.view(np.uint8).reshape(-1, len(weight)), edges, whole, limits)
        if not is_binary:
            binary_items(items.view(np.uint8), limits)  # names the value
        return np.asarray(sums.reshape(items.shape[:-1]), dtype=np.float64)
    # einsum casts in small buffers; a matrix product would make a float copy of the whole tensor
    return np.asarray(np.einsum("...q,q->...", items, weight), dtype=np.float64)


def _mean_spread(matrix: FloatArray, estimator: Estimator) -> float:
    """Average over the rows of the spread within a row."""
    if estimator not in ("mean_std", "rms", "c4"):
        raise RequestError(f"unknown estimator {estimator!r}; choose mean_std, rms or c4")
    num_columns = matrix.shape[1]
    if num_columns < 2:
        return math.nan
    spread = std_along(matrix, axis=1)
    if estimator == "rms":
        return float(np.sqrt(np.mean(spread**2)))
    return float(spread.mean()) / (c4(num_columns) if estimator == "c4" else 1.0)


def std_along(values: FloatArray, axis: int) -> FloatArray:
    """Standard deviation with ddof 1, exactly 0 for equal values; NaN where the axis has one entry."""
    if values.shape[axis] < 2:
        return np.full(np.delete(values.shape, axis), np.nan)
    # a mean of equal values can miss them by one rounding; their difference from the first is exactly 0
    centred: Any = values - np.take(values, [0], axis=axis)
    return np.asarray(centred.std(axis=axis, ddof=1))
