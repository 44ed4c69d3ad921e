"""Rank and plain correlations within sets, with intervals that know what the sets share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from iclperm.errors import RequestError
from iclperm.stats.intervals import Interval, jackknife_error, jackknife_interval, upper_tail
from iclperm.stats.sensitivity import FloatArray


class Correlation(NamedTuple):
    """A correlation within sets, pooled over them, with its interval; NaN where undefined."""

    estimate: float
    low: float
    high: float
    level: float
    p_value: float
    """Of no correlation, by the t test that belongs to the interval."""
    by_set: FloatArray
    """[S] the correlation in each set; NaN where feature or value is constant there."""
    num_pairs: int
    """Pairs of values that were used."""

    @property
    def interval(self) -> Interval:
        """The estimate with its interval."""
        return Interval(self.estimate, self.low, self.high, self.level)


def rank_correlation(
    feature: npt.ArrayLike, value: npt.ArrayLike, *, crossed: bool = False, level: float = 0.95
) -> Correlation:
    """Spearman's correlation of feature and value [S, N] within sets, with an interval clustered by set.

    Args:
        feature: [S, N] numbers; where it or `value` is not finite, that pair is left out.
        value: [S, N], such as the accuracy of S sets under N permutations, or the gain of N demonstrations of S sets.
        crossed: whether column n is the same thing in every set, as a shared permutation is. Then columns are left out
            one at a time too, and the interval speaks of other columns as well as of other sets.
        level: of the interval.

    Ranks are taken within each set, ties share their mean rank; the estimate is Σ of the centred products over
    √(Σ squares · Σ squares), over the sets in which both vary. The interval is `jackknife_interval` on the scale of
    artanh r, over sets and (crossed) columns; ranks are taken anew without the column. NaN below three sets or
    (crossed) columns, and where some r is 1. Raises RequestError on shapes that do not fit. Cost: O(S·N²) time if
    crossed, O(S·N·log N) if not; O(S·N) memory.
    """
    return _correlation(feature, value, crossed, level, ranked=True)


def correlation(
    feature: npt.ArrayLike, value: npt.ArrayLike, *, crossed: bool = False, level: float = 0.95
) -> Correlation:
    """Pearson's correlation of feature and value [S, N] within sets; else as `rank_correlation`."""
    return _correlation(feature, value, crossed, level, ranked=False)


def pooled_rank_correlation(x: npt.ArrayLike, y: npt.ArrayLike) -> float:
    """The estimate of `rank_correlation` of x and y [S, N] alone, without its interval; NaN where undefined."""
    pair = [np.asarray(array, dtype=np.float64) for array in (x, y)]
    used = np.isfinite(pair[0]) & np.isfinite(pair[1])
    return _pooled(_products(*(_ranks(_scaled(np.where(used, array, np.nan))) for array in pair)))


def _correlation(
    feature: npt.ArrayLike, value: npt.ArrayLike, crossed: bool, level: float, *, ranked: bool
) -> Correlation:
    x, y = (np.asarray(array, dtype=np.float64) for array in (feature, value))
    if x.ndim != 2 or x.size == 0 or x.shape != y.shape:
        raise RequestError(f"feature and value must both have shape [S, N], got {list(x.shape)} and {list(y.shape)}")
    upper_tail(level)  # refuses what is no level
    used = np.isfinite(x) & np.isfinite(y)
    x, y = (_scaled(np.where(used, array, np.nan)) for array in (x, y))
    ranks = (_ranks(x), _ranks(y)) if ranked else (x, y)
    products = _products(*ranks)
    estimate, varies = _pooled(products), _varies(products)
    with np.errstate(divide="ignore", invalid="ignore"):
        by_set = np.where(varies, products[0] / np.sqrt(products[1] * products[2]), np.nan)
    sets = np.flatnonzero(varies)
    left_out = [np.array([_pooled(products[:, sets[sets != s]]) for s in sets])]
    if crossed:
        left_out.append(_without_columns((x, y), ranks, ranked))
    low, high, p_value = _fisher_interval(estimate, left_out, level)
    return Correlation(estimate, low, high, level, p_value, by_set, int(used.sum()))


def _scaled(values: FloatArray) -> FloatArray:
    """`values` by the size of the largest deviation, so that a small but real spread is not taken for rounding."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return values
    shifted: FloatArray = values - finite[0]
    size = float(np.nanmax(np.abs(shifted)))
    return shifted / size if size > 0 else shifted


def _ranks(values: FloatArray) -> FloatArray:
    """Mean ranks of values [S, N] within each set, from 1; NaN where the value is."""
    ranks = np.full(values.shape, np.nan)
    for row, rank in zip(values, ranks, strict=True):
        finite = np.isfinite(row)
        ascending = np.sort(row[finite])
        below, upto = (np.searchsorted(ascending, row[finite], side) for side in ("left", "right"))
        rank[finite] = (below + upto + 1) / 2
    return ranks


def _products(x: FloatArray, y: FloatArray) -> FloatArray:
    """[3, S] centred sums of x·y, x² and y² within sets; NaN entries do not count."""
    used = np.isfinite(x)
    num = np.maximum(used.sum(axis=1, keepdims=True), 1)
    x, y = (np.where(used, array, 0.0) for array in (x, y))
    x, y = (np.where(used, array - array.sum(axis=1, keepdims=True) / num, 0.0) for array in (x, y))
    return np.array([(x * y).sum(axis=1), (x * x).sum(axis=1), (y * y).sum(axis=1)])


def _varies(products: FloatArray) -> npt.NDArray[np.bool_]:
    """[S] whether both vary in a set, beyond what rounding makes of equal values."""
    return np.asarray(np.minimum(products[1], products[2]) > 1e-12)


def _pooled(products: FloatArray) -> float:
    product, square_x, square_y = products[:, _varies(products)].sum(axis=1)
    return float(product / math.sqrt(square_x * square_y)) if square_x > 0 and square_y > 0 else math.nan


def _without_columns(
    values: tuple[FloatArray, FloatArray], ranks: tuple[FloatArray, FloatArray], ranked: bool
) -> FloatArray:
    """[N] the pooled correlation without each column; of ranks, those above it fall by 1 and those beside it by 1/2."""

    def rest(value: FloatArray, rank: FloatArray, column: int) -> FloatArray:
        gone = value[:, column : column + 1]
        lowered = rank - (value > gone) - 0.5 * (value == gone) if ranked else rank
        return np.delete(lowered, column, axis=1)

    pairs = list(zip(values, ranks, strict=True))
    return np.array(
        [_pooled(_products(*(rest(*pair, column) for pair in pairs))) for column in range(values[0].shape[1])]
    )


def _fisher_interval(estimate: float, left_out: Sequence[FloatArray], level: float) -> tuple[float, float, float]:
    """Bounds and p value from jackknife variances on the scale of artanh."""
    nothing = math.nan, math.nan, math.nan
    enough = all(len(values) >= 3 and (np.abs(values) < 1 - 1e-9).all() for values in left_out)
    if not (enough and abs(estimate) < 1 - 1e-9):
        return nothing
    centre, scaled = math.atanh(estimate), [np.arctanh(values) for values in left_out]
    error, degrees = jackknife_error(scaled)
    if error == 0.0:
        return nothing
    interval = jackknife_interval(centre, *scaled, level=level)
    return math.tanh(interval.low), math.tanh(interval.high), float(2 * special.stdtr(degrees, -abs(centre) / error))


def correlation_with_position(values: FloatArray) -> FloatArray:
    """[S, P] Spearman's correlation of values [S, P, K] with the position; 0 where they are all equal."""
    ranks = _ranks(values.reshape(-1, values.shape[2]))
    position = np.broadcast_to(np.arange(values.shape[2]) + 1.0, ranks.shape)
    product, square_x, square_y = _products(ranks, position)
    scale = np.sqrt(square_x * square_y)
    return np.asarray(np.where(scale > 1e-12, product / np.where(scale > 1e-12, scale, 1.0), 0.0)).reshape(
        values.shape[:2]
    )
