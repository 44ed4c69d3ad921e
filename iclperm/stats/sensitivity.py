"""Accuracy, the order and selection sensitivity of arXiv 2511.09700, and the curve over shots of arXiv 2503.22002."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.errors import RequestError
from iclperm.stats.additive import AdditiveFit, Blocks, additive_fit
from iclperm.stats.limits import LIMITS, ComputeLimits

FloatArray = npt.NDArray[np.float64]
Estimator = Literal["mean_std", "rms", "c4"]


class Accuracy(NamedTuple):
    """Accuracy of every cell, with what was left out."""

    values: FloatArray
    """[...] share of correct answers; NaN where a cell has none."""
    dropped: float
    """Share of the queries (by weight) that were left out: of `accuracy` those without an answer in any cell, of
    `common_accuracy` those that some cell could not answer."""
    num_queries: int
    """Distinct queries that were used."""


class AccuracyBounds(NamedTuple):
    """How far missing answers could move accuracies, whatever they have to do with being right; each [...]."""

    lowest: FloatArray
    """If every missing answer were wrong."""
    highest: FloatArray
    """If every missing answer were right."""
    missing: FloatArray
    """Share of the queries (by weight) without an answer."""


class Curve(NamedTuple):
    """Accuracy against the number of shots, each entry [K]."""

    mean: FloatArray
    """Mean over permutations and sets (µ_k of arXiv 2503.22002)."""
    std_permutations: FloatArray
    """Mean over sets of the standard deviation over permutations; NaN for P = 1."""
    std_sets: FloatArray
    """Standard deviation over sets (trials) of a set's mean over permutations; NaN for S = 1."""
    dropped: float
    """Share of the queries (by weight) without an answer in any cell."""
    num_queries: int
    """Distinct queries that were used."""


def accuracy(
    correct: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    weights: npt.ArrayLike | None = None,
    *,
    limits: ComputeLimits = LIMITS,
) -> Accuracy:
    """Share of correct answers in every cell, from every answer there is.

    Args:
        correct: [..., Q] 0 or 1 (bool or integer), or partial credit in 0..1 (floating point); any number of leading
            axes.
        state: [..., Q] integers, 0 = ok; an answer that is not ok is missing, in its cell alone.
        weights: [Q] how often each query counts (an oversampled query is stored once); all 1 by default.
        limits: sizes from which it is computed in another way, to the same bits.

    Where a cell lacks answers, its accuracy over the others is set right for how hard they were: a missing answer
    counts as the mean of its query over all cells plus the cell's lead over other cells on the queries that it
    answered, within 0..1. A cell that met the easier queries gains nothing by it. Unbiased where what is missing does
    not depend on the answer, given query and cell; how far it could be off otherwise is what
    `accuracy_bounds` gives: its `lowest` and `highest`.

    Raises RequestError on shapes that do not fit, values outside 0..1, or weights that are negative or not finite.
    Cost: O(size of correct), without a float copy of it; a large contiguous tensor of bytes without missing answers is
    read once, at the speed of memory, where the weights are whole numbers.
    """
    items = plain_array(correct)
    states = _states(items.shape, state)
    if states is None or not states.any():
        return common_accuracy(correct, None, weights, limits=limits)
    items, weight = graded_items(items, limits), query_weights(weights, items.shape[-1])
    _refuse_nan(items, states)
    cells, ok = items.reshape(-1, items.shape[-1]), states.reshape(-1, items.shape[-1]) == 0
    step = max(limits.block_bytes // (8 * items.shape[-1]), 1)

    def blocks() -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]]:
        return ((cells[low : low + step], ok[low : low + step]) for low in range(0, len(cells), step))

    values, dropped, num_queries = accuracy_of_blocks(blocks, weight)
    return Accuracy(values.reshape(items.shape[:-1]), dropped, num_queries)


def accuracy_of_blocks(blocks: Blocks, weight: FloatArray) -> Accuracy:
    """`accuracy` [C] of answers that come in blocks of cells."""
    fit = additive_fit(blocks, weight)
    counted = weight[fit.usable]
    used, total = float(counted.sum()), float(weight.sum())
    if used == 0:
        return Accuracy(np.full(len(fit.cells), np.nan), 1.0, 0)
    return Accuracy(accuracy_of_fit(fit, counted), 1.0 - used / total, int(np.count_nonzero(counted)))


def accuracy_of_fit(fit: AdditiveFit, counted: FloatArray) -> FloatArray:
    """[C] level of all queries, of weight `counted` [U], plus each cell's lead; no further than if all that the cell
    lacks were wrong, or right."""
    used = float(counted.sum())
    level = float(fit.queries @ counted) / used
    return np.asarray(np.clip(level + fit.cells, fit.right / used, (fit.right + used - fit.there) / used))


def accuracy_bounds(
    correct: npt.ArrayLike, state: npt.ArrayLike | None = None, weights: npt.ArrayLike | None = None
) -> AccuracyBounds:
    """The accuracies of every cell if all of its missing answers were wrong, and if all were right.

    Takes what `accuracy` does. Queries that no cell answered are missing, too. Raises what it does. Cost: O(size).
    """
    items, states = graded_items(correct), _states(np.shape(correct), state)
    weight = query_weights(weights, items.shape[-1])
    lowest, missing = np.zeros(items.shape[:-1]), np.zeros(items.shape[:-1])
    for place in np.ndindex(items.shape[:-2]):  # a set at a time: no float copy of all
        of_set = items[place]
        ok = np.ones(of_set.shape, np.bool_) if states is None else states[place] == 0
        lowest[place] = np.where(ok, of_set, 0) @ weight / weight.sum()
        missing[place] = ~ok @ weight / weight.sum()
    return AccuracyBounds(lowest, lowest + missing, missing)


def common_accuracy(
    correct: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    weights: npt.ArrayLike | None = None,
    *,
    limits: ComputeLimits = LIMITS,
) -> Accuracy:
    """As `accuracy`, over the queries that are `ok` in all cells: what differs between two cells is never the queries.

    One missing answer leaves its query out everywhere: with a share m missing at random and C cells, (1 - m)^C of the
    queries are left, a fifth of a percent of them at m = .005 and C = 1,280.
    """
    items = plain_array(correct)
    if not (is_large(items, limits) and _is_whole(weights)):
        items = graded_items(items, limits)
    if np.issubdtype(items.dtype, np.floating):
        _refuse_nan(items, _states(items.shape, state))
        items = np.nan_to_num(items)
    usable = usable_queries(items.shape, state, limits)
    weight = query_weights(weights, items.shape[-1])
    sums = _weighted_sums(items, np.where(usable, weight, 0.0), limits)
    return accuracy_from_sums(sums, usable, weight)


def order_sensitivity(accuracy: npt.ArrayLike | Accuracy, estimator: Estimator = "mean_std") -> float:
    """How far accuracy moves with the order of the demonstrations: mean over sets of the std over permutations.

    Args:
        accuracy: [S, P] accuracy of each set under each permutation, or the `Accuracy` of answers [S, P, Q].
        estimator: `mean_std`, the paper's mean of standard deviations (ddof 1); `rms`, the root of the mean variance;
            `c4`, the mean of standard deviations divided by c4(P), unbiased for Gaussian effects.

    Returns the sensitivity in units of accuracy; NaN for P = 1. It contains the noise of a finite query sample:
    `variance_components` takes that out. Raises RequestError on another shape, a NaN or an unknown estimator.
    arXiv 2511.09700, order sensitivity.
    """
    return _mean_spread(accuracy_matrix(accuracy), estimator)


def selection_sensitivity(accuracy: npt.ArrayLike | Accuracy, estimator: Estimator = "mean_std") -> float:
    """How far accuracy moves with the choice of the demonstrations: mean over permutations of the std over sets.

    Takes and returns what `order_sensitivity` does, with sets and permutations exchanged; NaN for S = 1.
    arXiv 2511.09700, selection sensitivity.
    """
    return _mean_spread(accuracy_matrix(accuracy).T, estimator)


def sensitivity_ratio(accuracy: npt.ArrayLike | Accuracy, estimator: Estimator = "mean_std") -> float:
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
        correct: [S, P, K, Q] 0 or 1, or partial credit; K indexes the list of shots that were run.
        state: [S, P, K, Q] integers, 0 = ok; every answer that is there counts, in its cell (`accuracy`).
        weights: [Q] how often each query counts.
        limits: as for `accuracy`.

    NaN at a k where some cell has no answer. Raises RequestError unless correct has four axes. arXiv 2503.22002,
    Figure 1; standard deviations have ddof 1.
    """
    items = plain_array(correct)
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
    return Accuracy(sums / kept, 1.0 - kept / total, int(np.count_nonzero(usable & (weight > 0))))


def accuracy_matrix(accuracy: npt.ArrayLike | Accuracy) -> FloatArray:
    """Accuracies, or the `Accuracy` that has them, as float64 [S, P]; raises RequestError on another shape, an empty
    axis or a NaN."""
    values = plain_array(accuracy.values if isinstance(accuracy, Accuracy) else accuracy)
    matrix: FloatArray = values.astype(np.float64, copy=False)
    if matrix.ndim != 2 or matrix.size == 0:
        raise RequestError(f"accuracy must have shape [S, P] with S, P >= 1, got {list(matrix.shape)}")
    if not np.isfinite(matrix).all():
        s, p = np.argwhere(~np.isfinite(matrix))[0]
        raise RequestError(f"accuracy[{s}, {p}] is {matrix[s, p]}; leave out cells without a usable query")
    return matrix


def plain_array(values: npt.ArrayLike) -> npt.NDArray[Any]:
    """An array; raises RequestError for a masked one with masked entries, whose mask would be lost."""
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise RequestError(
            "an array has masked entries; give x.filled(0), and state=numpy.ma.getmaskarray(x) where a state is taken"
        )
    return np.asarray(values)


def zeros_and_ones(values: npt.ArrayLike) -> npt.NDArray[Any]:
    """An array; one of floating point that is 0 or 1 everywhere as uint8."""
    items = plain_array(values)
    if items.dtype.kind != "f" or not ((items == 0) | (items == 1)).all():
        return items
    return items.astype(np.uint8)


def binary_items(correct: npt.ArrayLike, limits: ComputeLimits = LIMITS) -> npt.NDArray[np.uint8]:
    """`correct` [..., Q] as uint8 0/1, a view where it can be; raises RequestError on anything else."""
    items = plain_array(correct)
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
    """`correct` [..., Q] as uint8 0/1, or floats in 0..1 (partial credit) as they are; NaN is left for `state` to mark.

    Raises RequestError on anything else, naming the value.
    """
    items = plain_array(correct)
    if not np.issubdtype(items.dtype, np.floating):
        return binary_items(items, limits)
    if items.ndim < 1 or items.size == 0:
        raise RequestError(f"correct must have shape [..., Q] with no empty axis, got {list(items.shape)}")
    low, high = np.nanmin(items), np.nanmax(items)
    if not (low >= 0 and high <= 1):
        raise RequestError(f"correct must hold numbers from 0 to 1, found {low if not low >= 0 else high:g}")
    return items


def finite_items(values: npt.ArrayLike) -> npt.NDArray[Any]:
    """Answers [..., Q] as uint8 0/1, or finite floats: graded, or filled in (`stats.incomplete.filled`)."""
    items = plain_array(values)
    if not np.issubdtype(items.dtype, np.floating):
        return binary_items(items)
    if items.ndim < 1 or not items.size or not np.isfinite(items).all():
        raise RequestError(f"correct must be finite numbers [..., Q] with no empty axis, got {list(items.shape)}")
    return items


def _refuse_nan(items: npt.NDArray[Any], states: npt.NDArray[Any] | None) -> None:
    """Raises RequestError for a NaN among graded answers [..., Q] that `states` does not mark."""
    if np.issubdtype(items.dtype, np.floating):
        wrong = np.isnan(items) if states is None else np.isnan(items) & (states == 0)
        if wrong.any():
            place = ", ".join(map(str, np.argwhere(wrong)[0]))
            raise RequestError(f"correct[{place}] is NaN and its state is ok; mark it in state")


def _states(shape: tuple[int, ...], state: npt.ArrayLike | None) -> npt.NDArray[Any] | None:
    """`state` as an array; raises RequestError unless it has `shape`."""
    if state is None:
        return None
    states = np.asarray(state)
    if states.shape != shape:
        raise RequestError(f"state must have the shape of correct {list(shape)}, got {list(states.shape)}")
    return states


def usable_queries(
    shape: tuple[int, ...], state: npt.ArrayLike | None, limits: ComputeLimits = LIMITS
) -> npt.NDArray[np.bool_]:
    """[Q] True where a query is ok (state 0) in every cell; raises RequestError if state has not `shape` [..., Q]."""
    states = _states(shape, state)
    if states is None:
        return np.ones(shape[-1], dtype=np.bool_)
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
