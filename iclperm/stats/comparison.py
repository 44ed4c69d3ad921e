"""Two studies side by side: r, order and selection effect, and accuracy, paired by whatever the two share.

Every number here is a difference of two estimates. How sure it is follows from leaving out one set, one permutation or
one query at a time: out of both studies at once where they share it, so that what it does to both cancels, and out of
one study at a time where they do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from iclperm.errors import DataError, RequestError
from iclperm.stats.components import (
    VarianceComponents,
    components_from_class_sums,
    components_from_sums,
    variance_components,
)
from iclperm.stats.incomplete import filled, strata_of
from iclperm.stats.intervals import jackknife_error, unseen_error, upper_tail
from iclperm.stats.paired import StratifiedMcNemar, holm, stratified_mcnemar
from iclperm.stats.sensitivity import (
    Estimator,
    FloatArray,
    accuracy_matrix,
    graded_items,
    order_sensitivity,
    plain_array,
    query_weights,
    selection_sensitivity,
    sensitivity_ratio,
    zeros_and_ones,
)

AXES = ("sets", "permutations", "queries")
"""What two studies can share."""
LEAST = 3
"""Sets, and permutations, below which r and the effects cannot be compared: without one of them two must be left."""
_ROUNDING = 1e-12
_LEAST_EFFECT = 1e-7  # the root of a component that is a rounding of 0
Of = Literal["ratio", "order", "selection"]
_SENSITIVITIES: Mapping[Of, Callable[[npt.ArrayLike, Estimator], float]] = {
    "ratio": sensitivity_ratio,
    "order": order_sensitivity,
    "selection": selection_sensitivity,
}


class Contrast(NamedTuple):
    """A difference of two studies, or a ratio, with its interval and test; NaN where nothing can be said."""

    estimate: float
    """First less second, in units of accuracy 0..1; of a ratio first / second."""
    se: float
    """Standard error of the difference; of a ratio that of its logarithm."""
    degrees: float
    """Degrees of freedom of `se` (Satterthwaite)."""
    low: float
    """Lower end of the interval of this contrast alone, not adjusted for others."""
    high: float
    """Upper end."""
    level: float
    """Of the interval."""
    p_value: float
    """Of no difference; of a ratio that it is 1."""
    p_holm: float
    """Adjusted for all tests that were made together (`holm`); NaN where that was not asked."""


class Jackknifed(NamedTuple):
    """An estimate, and what it is without each level of each axis in turn."""

    estimate: float
    left_out: Mapping[str, FloatArray]
    """By axis (`AXES`), [n] for n levels; an axis that is missing here is taken as it is."""


@dataclass(frozen=True)
class Comparison:
    """The first of two studies against the second."""

    shared: tuple[str, ...]
    """Of `AXES`: what both have in common."""
    ratio: Contrast
    """r of the first / r of the second, as printed in arXiv 2511.09700; item noise pulls each r towards 1."""
    ratio_free: Contrast
    """The same ratio free of item noise; NaN where one of the four effects is not above that noise."""
    order: Contrast
    """Order effect √(σ²_P + σ²_SP) of the first less that of the second, free of item noise; units of accuracy."""
    selection: Contrast
    """Selection effect √(σ²_S + σ²_SP), likewise."""
    shots: tuple[int, ...]
    """[K] numbers of shots that both have, for the two that follow; their places where the numbers are not known."""
    accuracy: tuple[Contrast, ...]
    """[K] mean accuracy of the first less that of the second, for fresh draws of `covers`."""
    mcnemar: tuple[StratifiedMcNemar | None, ...]
    """[K] on these very sets and permutations, for other queries, a family of their own; None unless everything is
    shared."""
    covers: tuple[str, ...]
    """Axes with two levels or more in both: what the errors of `accuracy` speak of."""
    num_queries: tuple[int, int]
    """Distinct queries that were used of each; 0 where only accuracies were given."""
    dropped: tuple[float, float]
    """Share of the queries of each (by weight) that some compared cell could not answer."""

    def tests(self) -> dict[str, Contrast]:
        """The family that `p_holm` is adjusted over, by name: r, order, selection, and accuracy at each k."""
        named = {"ratio": self.ratio, "order": self.order, "selection": self.selection}
        return named | {f"accuracy at k = {k}": each for k, each in zip(self.shots, self.accuracy, strict=True)}

    def adjusted(self, p_holm: Sequence[float]) -> Comparison:
        """Itself with the adjusted p-values of `tests`, in that order; for a family of several comparisons."""
        ratio, order, selection, *rest = (
            each._replace(p_holm=float(p)) for each, p in zip(self.tests().values(), p_holm, strict=True)
        )
        return replace(self, ratio=ratio, order=order, selection=selection, accuracy=tuple(rest))

    def matched_adjusted(self, p_holm: Sequence[float]) -> Comparison:
        """Itself with the adjusted p-values of `mcnemar`, NaN where there is none; likewise."""
        pairs = zip(self.mcnemar, map(float, p_holm), strict=True)
        return replace(self, mcnemar=tuple(None if test is None else test._replace(p_holm=p) for test, p in pairs))

    @property
    def matched(self) -> tuple[float, ...]:
        """[K] p-values of `mcnemar`, NaN where there is none."""
        return tuple(math.nan if test is None else test.p_value for test in self.mcnemar)


def compare(
    first: npt.ArrayLike,
    second: npt.ArrayLike,
    *,
    shared: str | Collection[str] = AXES,
    states: tuple[npt.ArrayLike | None, npt.ArrayLike | None] = (None, None),
    weights: tuple[npt.ArrayLike | None, npt.ArrayLike | None] = (None, None),
    shots: tuple[Sequence[int], Sequence[int]] | None = None,
    estimator: Estimator = "mean_std",
    level: float = 0.95,
    classes: tuple[npt.ArrayLike | None, npt.ArrayLike | None] = (None, None),
) -> Comparison:
    """Whether two studies differ in r, in the effects of order and of selection, and in accuracy at each k.

    Args:
        first: [S, P, Q] or [S, P, K, Q] of 0 and 1, or floating-point grades [S, P, K, Q] in 0..1; or
            floating-point accuracies [S, P], or with `shots` [S, P, K], which leave out what needs single answers.
        second: likewise, of the other study.
        shared: what both have in common, of "sets permutations queries": level i of one is then level i of the other.
        states: integers of the shape of the answers, 0 = ok. A query without any answer is left out; where
            queries are shared, out of both.
        weights: [Q] how often each query counts in accuracies, r and effects free of item noise.
        shots: the numbers of demonstrations of each, ascending. r and effects are those at the largest number of each,
            accuracy is compared at the numbers that both have. Without it both need the same K.
        estimator: of the sensitivities in r; `mean_std` is what arXiv 2511.09700 prints.
        level: of the intervals.
        classes: [Q] the class of each query, as `variance_components` takes it.

    Errors are jackknife variances over sets, permutations and (accuracy) queries, added, with Satterthwaite's degrees
    of freedom: leaving a shared level out of both at once counts the covariance. Where axes are crossed that counts
    the noise of single cells more than once, and intervals are rather too wide. Effects are clipped at 0 before they
    are subtracted. Order and selection effect need no part for queries: they are free of the difficulty of queries, and
    whatever else queries do differs by set or permutation. Coverage: benchmarks/compare_coverage.py.

    Below three sets or permutations r and effects are NaN. Raises RequestError on shapes that do not fit what is
    shared, and DataError where no query is left. Cost: O(S·P·K·Q).
    """
    common = _shared(shared)
    upper_tail(level)  # refuses what is no level
    sides = _sides((first, second), states, weights, classes, common, shots is not None)
    _refuse_other_sizes(sides, common)
    names, places = _common_shots(sides, shots)
    printed = [log_sensitivity(side.accuracy[:, :, -1], "ratio", estimator) for side in sides]
    effects = [_effects(side) for side in sides]
    free, order, selection = (_contrast(effects[0][of], effects[1][of], common, level) for of in _SENSITIVITIES)
    at_each = [
        _mean_contrast(sides, pair, common, k == 0 and shots is not None, level)
        for k, pair in zip(names, places, strict=True)
    ]
    found = Comparison(
        shared=common,
        ratio=_exponential(_contrast(printed[0], printed[1], common, level)),
        ratio_free=_exponential(free),
        order=order,
        selection=selection,
        shots=names,
        accuracy=tuple(at_each),
        mcnemar=tuple(_mcnemar(sides, pair, common) for pair in places),
        covers=tuple(axis for axis in AXES if min(side.size(axis) for side in sides) > 1),
        num_queries=(sides[0].size("queries"), sides[1].size("queries")),
        dropped=(sides[0].dropped, sides[1].dropped),
    )
    found = found.matched_adjusted(holm(found.matched).tolist())
    return found.adjusted(holm([each.p_value for each in found.tests().values()]).tolist())


def log_sensitivity(accuracy: npt.ArrayLike, of: Of = "ratio", estimator: Estimator = "mean_std") -> Jackknifed:
    """log of r, order or selection sensitivity of accuracy [S, P], as printed, and without each set and permutation.

    What `compare` takes differences of, and `pool` and `slope` are given. NaN below three sets or permutations, and
    where a sensitivity is 0. Raises RequestError on another shape or a NaN. Cost: O(S·P·(S + P)).
    """
    matrix = accuracy_matrix(accuracy)
    if min(matrix.shape) < LEAST:
        return _nothing(matrix.shape)
    left_out = {
        axis: np.array([_log_of(np.delete(matrix, i, place), of, estimator) for i in range(matrix.shape[place])])
        for place, axis in enumerate(AXES[:2])
    }
    return Jackknifed(_log_of(matrix, of, estimator), left_out)


def jackknifed_effects(
    correct: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    weights: npt.ArrayLike | None = None,
    classes: npt.ArrayLike | None = None,
) -> dict[Of, Jackknifed]:
    """r, order effect and selection effect of answers [S, P, Q] of 0 and 1, free of item noise, likewise.

    Not logarithms, except of the ratio; effects are clipped at 0. NaN below three sets or permutations. Answers that
    are not ok are missing, weights and classes count, as in `variance_components`. Raises RequestError on other shapes.
    Cost: O(S·P·Q); S + P times that where answers are missing or weights differ.
    """
    items = graded_items(correct)
    if items.ndim != 3:
        raise RequestError(f"effects need correct of shape [S, P, Q], got {list(items.shape)}")
    if min(items.shape[:2]) < LEAST or items.shape[2] < 2:
        return dict.fromkeys(_SENSITIVITIES, _nothing(items.shape))
    is_plain = items.dtype == np.uint8 and (state is None or not np.any(state))
    if is_plain and (weights is None or np.ptp(np.asarray(weights)) == 0):
        whole, left_out = _effect_sizes(items, strata_of(np.ones(items.shape[2]), classes))
    else:
        whole, left_out = _effect_sizes_one_by_one(
            items, None if state is None else np.asarray(state), weights, classes
        )

    def of(function: Callable[[FloatArray], FloatArray]) -> Jackknifed:
        return Jackknifed(float(function(whole)), {axis: function(sizes) for axis, sizes in left_out.items()})

    return {
        "ratio": of(_log_of_both),
        "order": of(lambda both: both[..., 0]),
        "selection": of(lambda both: both[..., 1]),
    }


def jackknife_covariance(estimates: Sequence[Jackknifed], shared: Sequence[Sequence[Collection[str]]]) -> FloatArray:
    """[N, N] covariance of N estimates; `shared[i][j]` are the axes (`AXES`) that i and j have in common.

    On each shared axis (n - 1)/n·Σ (a_i - ā)(b_i - b̄) over the values without level i, as the jackknife variance has
    a = b (Efron 1982). Raises RequestError where estimates share an axis of different sizes.
    """
    found = np.zeros((len(estimates), len(estimates)))
    for i, one in enumerate(estimates):
        for j, other in enumerate(estimates):
            common = set(AXES if i == j else shared[i][j]) & set(one.left_out) & set(other.left_out)
            for axis in common:
                pair = one.left_out[axis], other.left_out[axis]
                if len(pair[0]) != len(pair[1]):
                    raise RequestError(f"estimates {i} and {j} cannot share {len(pair[0])} and {len(pair[1])} {axis}")
                found[i, j] += (len(pair[0]) - 1) * float(
                    np.mean((pair[0] - pair[0].mean()) * (pair[1] - pair[1].mean()))
                )
    return found


@dataclass(frozen=True)
class _Side:
    """One study: accuracies [S, P, K] and, unless only these were given, answers [S, P, K, Q] of the usable queries."""

    accuracy: FloatArray
    items: npt.NDArray[Any] | None
    state: npt.NDArray[Any] | None
    """[S, P, K, Q]; None where every answer is there."""
    whole: npt.NDArray[Any] | None
    """`items`, what is missing filled in."""
    weight: FloatArray
    dropped: float
    classes: npt.NDArray[Any] | None = None

    def size(self, axis: str) -> int:
        """Levels of an axis; 0 queries where there are only accuracies."""
        if axis == "queries":
            return 0 if self.items is None else self.items.shape[3]
        return int(self.accuracy.shape[AXES.index(axis)])


def _shared(shared: str | Collection[str]) -> tuple[str, ...]:
    words = shared.replace(",", " ").split() if isinstance(shared, str) else list(shared)
    if unknown := [word for word in words if word not in AXES]:
        raise RequestError(f"studies share {', '.join(AXES)}, or nothing (an empty text); got {unknown[0]!r}")
    return tuple(axis for axis in AXES if axis in words)


def _sides(
    tensors: tuple[npt.ArrayLike, npt.ArrayLike],
    states: tuple[npt.ArrayLike | None, npt.ArrayLike | None],
    weights: tuple[npt.ArrayLike | None, npt.ArrayLike | None],
    classes: tuple[npt.ArrayLike | None, npt.ArrayLike | None],
    shared: tuple[str, ...],
    has_shots: bool,
) -> tuple[_Side, _Side]:
    values = [array if array.ndim < 4 else zeros_and_ones(array) for array in map(plain_array, tensors)]
    are_accuracies = [np.issubdtype(array.dtype, np.floating) and array.ndim < 4 for array in values]
    if any(are_accuracies):
        if not all(are_accuracies):
            raise RequestError("answers cannot be compared with accuracies; give the answers of both, or accuracies")
        one, two = (_of_accuracies(array, has_shots) for array in values)
        return one, two
    items = [_four_axes(array) for array in values]
    if "queries" in shared and items[0].shape[3] != items[1].shape[3]:
        raise RequestError(f"shared queries must be equally many, got {items[0].shape[3]} and {items[1].shape[3]}")
    given = [None if state is None else _four_axes(np.asarray(state), graded=False) for state in states]
    for array, state in zip(items, given, strict=True):
        if state is not None and state.shape != array.shape:
            raise RequestError(f"state must have the shape of correct {list(array.shape)}, got {list(state.shape)}")
    usable = [
        np.ones(array.shape[3], np.bool_) if state is None else (state == 0).any(axis=(0, 1, 2))
        for array, state in zip(items, given, strict=True)
    ]
    if "queries" in shared:
        usable = [usable[0] & usable[1]] * 2
    one, two = (_of_answers(*side) for side in zip(items, given, usable, weights, classes, strict=True))
    return one, two


def _four_axes(values: npt.NDArray[Any], *, graded: bool = True) -> npt.NDArray[Any]:
    """[S, P, K, Q]; a tensor without K has one."""
    items = graded_items(values) if graded else values
    if items.ndim not in (3, 4):
        raise RequestError(f"a comparison needs correct of shape [S, P, Q] or [S, P, K, Q], got {list(items.shape)}")
    return items if items.ndim == 4 else items[:, :, None]


def _of_accuracies(values: npt.NDArray[Any], has_shots: bool) -> _Side:
    if values.ndim == 3 and values.size and np.isin(values, (0, 1)).all():
        raise RequestError("accuracies are all 0 or 1: give answers [S, P, Q] as integers or bool, x.astype(int)")
    if values.ndim == 3 and values.shape[2] > 1 and not has_shots:
        raise RequestError(
            f"floats of shape {list(values.shape)} can be grades [S, P, Q] or accuracies [S, P, K]; give grades as "
            "[S, P, K, Q], x[:, :, None], and with accuracies their K numbers of demonstrations, with 'shots'"
        )
    cells = values if values.ndim == 3 else values[..., None]
    if cells.ndim != 3 or not cells.size or not np.isfinite(cells).all():
        raise RequestError(f"accuracies must be finite, of shape [S, P] or [S, P, K], got {list(values.shape)}")
    return _Side(cells.astype(np.float64), None, None, None, np.ones(0), 0.0)


def _of_answers(
    items: npt.NDArray[Any],
    state: npt.NDArray[Any] | None,
    usable: npt.NDArray[np.bool_],
    weights: npt.ArrayLike | None,
    classes: npt.ArrayLike | None,
) -> _Side:
    weight = query_weights(weights, items.shape[3])
    used = usable & (weight > 0)
    if classes is not None and np.shape(classes) != weight.shape:
        raise RequestError(f"classes must have shape [{len(weight)}], got {list(np.shape(classes))}")
    if not used.any():
        raise DataError("no query has an answer in both studies; see their states")
    kept = items if used.all() else items[..., used]
    states = None if state is None or not state[..., used].any() else state[..., used]
    dropped = 1 - float(weight[used].sum() / weight.sum())
    whole = filled(kept, states, weight[used])
    of_each = None if classes is None else np.asarray(classes)[used]
    return _Side(whole.accuracy.values, kept, states, whole.items, weight[used], dropped, of_each)


def _refuse_other_sizes(sides: tuple[_Side, _Side], shared: tuple[str, ...]) -> None:
    for axis in shared:
        one, two = (side.size(axis) for side in sides)
        if one != two:
            raise RequestError(f"shared {axis} must be equally many, got {one} and {two}; leave out what one lacks")


def _common_shots(
    sides: tuple[_Side, _Side], shots: tuple[Sequence[int], Sequence[int]] | None
) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """The numbers of shots that both have, and their places on the K axis of each."""
    counts = [side.accuracy.shape[2] for side in sides]
    if shots is None:
        if counts[0] != counts[1]:
            raise RequestError(f"there are {counts[0]} and {counts[1]} numbers of shots; say which, with 'shots'")
        return tuple(range(counts[0])), [(k, k) for k in range(counts[0])]
    given = [list(map(int, each)) for each in shots]
    for each, count in zip(given, counts, strict=True):
        if each != sorted(set(each)) or len(each) != count:
            raise RequestError(f"shots must be {count} ascending numbers, got {each}")
    names = tuple(k for k in given[0] if k in given[1])
    return names, [(given[0].index(k), given[1].index(k)) for k in names]


def _log_of(matrix: FloatArray, of: Of, estimator: Estimator) -> float:
    size = _SENSITIVITIES[of](matrix, estimator)
    return math.log(size) if size > 0 else math.nan


def _nothing(shape: tuple[int, ...]) -> Jackknifed:
    return Jackknifed(math.nan, {axis: np.full(size, math.nan) for axis, size in zip(AXES, shape[:2], strict=False)})


def _effects(side: _Side) -> dict[Of, Jackknifed]:
    """Those at the largest number of shots; NaN without answers."""
    if side.items is None:
        return dict.fromkeys(_SENSITIVITIES, _nothing(side.accuracy.shape))
    state = None if side.state is None else side.state[:, :, -1]
    return jackknifed_effects(side.items[:, :, -1], state, side.weight, side.classes)


def _log_of_both(sizes: FloatArray) -> FloatArray:
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.log(sizes[..., 1]) - np.log(sizes[..., 0])
    return np.where(np.isfinite(found), found, np.nan)


def _effect_sizes(
    items: npt.NDArray[np.uint8], strata: npt.NDArray[np.int64]
) -> tuple[FloatArray, dict[str, FloatArray]]:
    """Order and selection effect [2] of answers [S, P, Q], clipped at 0, and [n, 2] without each set and permutation.

    From sums of integers over each of the `strata` [Q]: what is left out is subtracted, so the whole costs a few passes
    over the answers.
    """
    parts = [items[:, :, strata == name] for name in range(int(strata.max()) + 1)]
    sums = [tuple(part.sum(axis=axis, dtype=np.int64) for axis in (2, 1, 0)) for part in parts]
    squares = [(pi**2).sum(axis=1) for _, _, pi in sums]  # by permutation
    without_set = [
        _sizes_of(
            (np.delete(sp, s, 0), np.delete(si, s, 0), int(((pi - part[s]) ** 2).sum()))
            for part, (sp, si, pi) in zip(parts, sums, strict=True)
        )
        for s in range(items.shape[0])
    ]
    without_permutation = [
        _sizes_of(
            (np.delete(sp, p, 1), si - part[:, p], int(square.sum()) - int(square[p]))
            for part, (sp, si, _), square in zip(parts, sums, squares, strict=True)
        )
        for p in range(items.shape[1])
    ]
    whole = _sizes_of((sp, si, int(square.sum())) for (sp, si, _), square in zip(sums, squares, strict=True))
    return whole, {"sets": np.array(without_set), "permutations": np.array(without_permutation)}


def _effect_sizes_one_by_one(
    items: npt.NDArray[Any],
    state: npt.NDArray[Any] | None,
    weights: npt.ArrayLike | None,
    classes: npt.ArrayLike | None,
) -> tuple[FloatArray, dict[str, FloatArray]]:
    """The same where answers are missing or weights differ: everything anew without each level."""

    def without(level: int, axis: int) -> FloatArray:
        states = None if state is None else np.delete(state, level, axis)
        return _clipped(variance_components(np.delete(items, level, axis), states, weights=weights, classes=classes))

    whole = _clipped(variance_components(items, state, weights=weights, classes=classes))
    left_out = (np.array([without(i, axis) for i in range(items.shape[axis])]) for axis in (0, 1))
    return whole, dict(zip(AXES, left_out, strict=False))


def _sizes_of(sums: Iterable[tuple[npt.NDArray[Any], npt.NDArray[Any], int]]) -> FloatArray:
    """From the sums of each class."""
    of_each = list(sums)
    return _clipped(components_from_sums(*of_each[0]) if len(of_each) == 1 else components_from_class_sums(of_each))


def _clipped(components: VarianceComponents) -> FloatArray:
    sizes = np.array([components.order_effect, components.selection_effect])
    return np.where(sizes > _LEAST_EFFECT, sizes, 0.0)


def _mean(side: _Side, place: int, *, is_one_context: bool) -> Jackknifed:
    """Mean accuracy at a place on the K axis; with `is_one_context` (k = 0) only queries are draws."""
    cells = side.accuracy[:, :, place]
    estimate = float(cells.mean())
    left_out = {
        axis: (len(means) * estimate - means) / (len(means) - 1)
        for axis, means in zip(AXES, (cells.mean(axis=1), cells.mean(axis=0)), strict=False)
        if len(means) > 1 and not is_one_context
    }
    if side.whole is not None and side.size("queries") > 1:
        by_query, weight = side.whole[:, :, place].mean(axis=(0, 1)), side.weight
        left_out["queries"] = (weight.sum() * estimate - weight * by_query) / (weight.sum() - weight)
    return Jackknifed(estimate, left_out)


def _mean_contrast(
    sides: tuple[_Side, _Side], places: tuple[int, int], shared: tuple[str, ...], is_one_context: bool, level: float
) -> Contrast:
    one, two = (_mean(side, place, is_one_context=is_one_context) for side, place in zip(sides, places, strict=True))
    fewest = min(
        (float(side.weight.sum() ** 2 / np.sum(side.weight**2)) for side in sides if len(side.weight)), default=0
    )
    return _contrast(one, two, shared, level, least=unseen_error(fewest) if fewest else 0.0)


def _mcnemar(sides: tuple[_Side, _Side], places: tuple[int, int], shared: tuple[str, ...]) -> StratifiedMcNemar | None:
    one, two = (side.items for side in sides)
    if one is None or two is None or shared != AXES:
        return None
    both = np.ones(one.shape[3], np.bool_)  # queries that every ordering of both answered
    for side, place in zip(sides, places, strict=True):
        if side.state is not None:
            both &= ~side.state[:, :, place].any(axis=(0, 1))
    if not both.any() or one.dtype != np.uint8 or two.dtype != np.uint8:
        return None
    return stratified_mcnemar(one[:, :, places[0]][..., both], two[:, :, places[1]][..., both])


def _contrast(one: Jackknifed, two: Jackknifed, shared: tuple[str, ...], level: float, least: float = 0.0) -> Contrast:
    """The difference, with the t interval and test of its jackknife error, which is at least `least`."""
    estimate = one.estimate - two.estimate
    error, degrees = jackknife_error(list(_left_out(one, two, shared)))
    error = max(error, least) if math.isfinite(error) else math.nan
    if not (math.isfinite(estimate) and error > _ROUNDING):
        return Contrast(estimate, math.nan, math.nan, math.nan, math.nan, level, math.nan, math.nan)
    half = float(special.stdtrit(degrees, upper_tail(level))) * error
    p_value = float(2 * special.stdtr(degrees, -abs(estimate) / error))
    return Contrast(estimate, error, degrees, estimate - half, estimate + half, level, p_value, math.nan)


def _left_out(one: Jackknifed, two: Jackknifed, shared: tuple[str, ...]) -> Iterator[FloatArray]:
    """The difference without each level: of both at once where they share it, else of one at a time."""
    for axis in AXES:
        pair = [side.left_out[axis] for side in (one, two) if axis in side.left_out]
        if axis in shared and len(pair) == 2:
            yield pair[0] - pair[1]
        else:
            yield from pair


def _exponential(contrast: Contrast) -> Contrast:
    """A difference of logarithms as a ratio."""
    estimate, low, high = (math.exp(value) for value in (contrast.estimate, contrast.low, contrast.high))
    return contrast._replace(estimate=estimate, low=low, high=high)
