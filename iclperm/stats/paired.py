"""Comparisons of contexts that answered the same queries: paired tests, their standard errors, and many at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from iclperm.errors import RequestError
from iclperm.stats.components import VarianceComponents
from iclperm.stats.intervals import Interval, upper_tail
from iclperm.stats.limits import LIMITS, ComputeLimits
from iclperm.stats.sensitivity import (
    FloatArray,
    binary_items,
    query_weights,
    usable_queries,
    zeros_and_ones,
)

_LEVEL = 0.95
_HALVINGS = 60  # of -1..1: below what a float64 resolves


class McNemar(NamedTuple):
    """Two contexts on the same queries, each distinct query once."""

    only_first: int
    """b: queries that only the first context answers rightly."""
    only_second: int
    """c: queries that only the second context answers rightly."""
    num_queries: int
    """n: queries that were used, those ok in both."""
    difference: float
    """Accuracy of the first less that of the second, (b - c)/n; NaN without a query."""
    se: float
    """Its standard error √((b + c) - (b - c)²/n)/n."""
    p_exact: float
    """Two-sided binomial p-value; true to its level, and cautious."""
    p_mid: float
    """Mid-p: half the weight of what was seen; less cautious, and rarely above its level."""


class StratifiedMcNemar(NamedTuple):
    """Two models, or two of anything, under the same contexts on the same queries; a context is a stratum."""

    only_first: int
    """b: answers that are right in the first only, over all contexts."""
    only_second: int
    """c: answers that are right in the second only."""
    num_contexts: int
    num_queries: int
    odds_ratio: float
    """b/c, the odds ratio of Mantel and Haenszel for matched pairs; NaN where both are 0, infinite where c is."""
    difference: float
    """Accuracy of the first less that of the second."""
    se: float
    """Its standard error over queries, for these contexts; NaN for one query."""
    statistic: float
    """χ² with one degree of freedom if both are alike, with the answers to one query as one draw."""
    p_value: float
    """1 where every query is answered alike."""
    p_holm: float = math.nan
    """Adjusted for all such tests that were made together (`holm`); NaN where that was not asked."""


class CochranQ(NamedTuple):
    """Whether C contexts differ in accuracy on the same queries."""

    statistic: float
    """0 where all contexts answer every query alike."""
    degrees: int
    p_value: float
    """From the χ² distribution; rough where contexts times informative queries are below 24 (Tate & Brown 1970)."""
    num_informative: int
    """Queries that some contexts answer rightly and others wrongly: only they count."""
    num_queries: int


class PairwiseTests(NamedTuple):
    """McNemar's test of every pair of contexts, each [pairs]."""

    first: npt.NDArray[np.int64]
    second: npt.NDArray[np.int64]
    difference: FloatArray
    """Accuracy of the first less that of the second."""
    se: FloatArray
    p_mid: FloatArray
    adjusted: FloatArray
    """`p_mid` adjusted for the number of pairs (Holm)."""
    low: FloatArray
    high: FloatArray
    """Tango's 95 % score interval of the difference (`paired_interval`), of each pair alone."""


class IntraclassCorrelations(NamedTuple):
    """Correlation of two answers of correct [S, P, Q] that share only what the name says; NaN where nothing varies."""

    same_set: float
    """Two queries, two permutations, one set."""
    same_permutation: float
    """Two queries, two sets, one permutation."""
    same_context: float
    """Two queries under one set and permutation."""
    same_query: float
    """One query under two sets and two permutations."""
    same_query_and_set: float
    same_query_and_permutation: float


class Bootstrap(NamedTuple):
    """A statistic with its product-reweighting bootstrap; arrays have the shape of the statistic."""

    estimate: FloatArray
    se: FloatArray
    """Standard deviation over the defined draws."""
    low: FloatArray
    high: FloatArray
    level: float
    num_undefined: int
    """Draws in which some entry was NaN or infinite; they are left out of that entry's standard error and interval."""
    draws: FloatArray
    """[draws, ...]"""


def holm(p_values: npt.ArrayLike) -> FloatArray:
    """Holm's adjusted p-values, of the shape of `p_values`: rejecting those at most a keeps the error rate of all at a.

    A NaN, a test that could not be made, stays NaN and is not counted. Raises RequestError for a p-value outside 0..1.
    Cost: O(n log n). Holm (1979).
    """
    given = np.asarray(p_values, dtype=np.float64)
    outside = given[(given < 0) | (given > 1)]
    if outside.size:
        raise RequestError(f"p-values must lie in 0..1, found {outside[0]}")
    adjusted = given.ravel().copy()
    order = np.argsort(adjusted, kind="stable")[: np.count_nonzero(~np.isnan(adjusted))]  # NaN sorts last
    stepped = adjusted[order] * np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(stepped), 1.0)
    return adjusted.reshape(given.shape)


def mcnemar(first: npt.ArrayLike, second: npt.ArrayLike, state: npt.ArrayLike | None = None) -> McNemar:
    """McNemar's test of two contexts, such as two orders: exact and mid-p, with the paired standard error.

    Args:
        first: [Q] 0 or 1.
        second: [Q] 0 or 1.
        state: [2, Q] integers, 0 = ok; a query that is not ok in both is left out.

    p-values are 1 where both contexts answer every query alike. Raises RequestError on shapes that do not fit and
    values but 0 and 1. McNemar (1947); Fagerland, Lydersen & Laake (2013) for mid-p.
    """
    items = _contexts(first, second, "McNemar's test")
    usable = usable_queries(items.shape, state)
    b, c = (int(np.count_nonzero(usable & (items[i] > items[1 - i]))) for i in (0, 1))
    num_queries = int(np.count_nonzero(usable))
    p_exact, p_mid = _mcnemar_p(np.array(b), np.array(c))
    se = float(_paired_se(np.array(b), np.array(c), num_queries))
    difference = (b - c) / num_queries if num_queries else math.nan
    return McNemar(b, c, num_queries, difference, se, float(p_exact), float(p_mid))


def stratified_mcnemar(
    first: npt.ArrayLike, second: npt.ArrayLike, state: npt.ArrayLike | None = None
) -> StratifiedMcNemar:
    """McNemar's test over many contexts at once, such as two models under the same sets and orders.

    Args:
        first: [..., Q] 0 or 1; the leading axes are contexts.
        second: the same of the other, of that shape.
        state: [2, ..., Q] integers, 0 = ok; only queries ok in every cell count, each once.

    With D_q = Σ over contexts of first - second, χ² = (Σ D_q)² / Σ D_q²: the Mantel-Haenszel statistic (b - c)²/(b + c)
    of matched pairs, whose variance under the null is clustered by query, as the answers to one query in many contexts
    move together (Obuchowski 1998; Durkalski et al. 2003). With one context it is McNemar's χ². The contexts are taken
    as they are. Raises RequestError on shapes that do not fit. Cost: O(size).
    """
    items = _contexts(first, second, "the stratified test")
    usable = usable_queries(items.shape, state)
    right = items[..., usable].reshape(2, -1, int(np.count_nonzero(usable)))
    num_contexts, num_queries = right.shape[1:]
    b, c = (int(np.count_nonzero(right[i] > right[1 - i])) for i in (0, 1))
    sums = right.sum(axis=1, dtype=np.int64)
    by_query = sums[0] - sums[1]
    total, square = int(by_query.sum()), int(by_query @ by_query)
    statistic = total**2 / square if square else 0.0
    spread = float(by_query.std(ddof=1)) if num_queries > 1 else math.nan
    return StratifiedMcNemar(
        only_first=b,
        only_second=c,
        num_contexts=num_contexts,
        num_queries=num_queries,
        odds_ratio=b / c if c else (math.inf if b else math.nan),
        difference=total / (num_contexts * num_queries) if num_queries else math.nan,
        se=spread / (num_contexts * math.sqrt(num_queries)) if num_queries else math.nan,
        statistic=statistic,
        p_value=float(special.chdtrc(1, statistic)),
    )


def paired_se(first: npt.ArrayLike, second: npt.ArrayLike, state: npt.ArrayLike | None = None) -> FloatArray:
    """Standard error of accuracy(first) - accuracy(second), cell by cell: √((b + c) - (b - c)²/n)/n.

    Args:
        first: [..., Q] 0 or 1; the result is [...].
        second: the same of the other, of that shape.
        state: [2, ..., Q] integers, 0 = ok; only queries ok in every cell count, each once.

    NaN without a usable query; 0 for one. Raises RequestError on shapes that do not fit. Cost: O(size). METHODS §4.
    """
    items = _contexts(first, second, "the paired standard error")
    usable = usable_queries(items.shape, state)
    b, c = (np.count_nonzero(usable & (items[i] > items[1 - i]), axis=-1) for i in (0, 1))
    return np.asarray(_paired_se(np.asarray(b), np.asarray(c), int(np.count_nonzero(usable))))


def paired_interval(
    first: npt.ArrayLike, second: npt.ArrayLike, state: npt.ArrayLike | None = None, level: float = _LEVEL
) -> Interval:
    """Tango's score interval of accuracy(first) - accuracy(second), two contexts on the same queries.

    Args:
        first: [Q] 0 or 1.
        second: [Q] 0 or 1.
        state: [2, Q] integers, 0 = ok; only queries ok in both count, each once.
        level: of the interval.

    It holds every difference δ at which (b - c - n·δ)² ≤ z²·n·(2q + δ(1 - δ)), where b and c queries are answered
    rightly by only the first and only the second, and q is the likeliest chance of the latter under δ, the larger root
    of 2n·q² - (b + c - (2n - b + c)·δ)·q - c·δ·(1 - δ) = 0. So it lies within -1..1, never has the width 0, and leaves
    0 out where McNemar's χ² does. docs/statistics.md has its coverage beside Wald's and that of Agresti & Min (2005).

    NaN without a usable query. Raises RequestError on shapes that do not fit, and for graded answers (`paired_grades`).
    Cost: O(Q). Tango (1998), Statistics in Medicine 17.
    """
    items = _contexts(first, second, "Tango's interval")
    if items.ndim != 2:
        raise RequestError(f"an interval of two contexts needs answers [Q] of each, got {list(items.shape[1:])}")
    usable = usable_queries(items.shape, state)
    b, c = (int(np.count_nonzero(usable & (items[i] > items[1 - i]))) for i in (0, 1))
    num = int(np.count_nonzero(usable))
    low, high = _score_bounds(np.array([b]), np.array([c]), num, level)
    return Interval((b - c) / num if num else math.nan, float(low[0]), float(high[0]), level)


def clustered_paired_se(first: npt.ArrayLike, second: npt.ArrayLike, axes: Sequence[int] = (0,)) -> float:
    """Standard error of the mean of first - second over everything, clustered by the levels of one or two axes.

    Args:
        first: scores, such as correct [S, P, Q] at one number of shots.
        second: those of one shape with it, such as correct at another.
        axes: what is independent: (0,) sets, (-1,) queries, (0, -1) both at once. For two axes the variance is
            V_a + V_b - V_ab (Cameron, Gelbach & Miller 2011), and at least the larger of V_a and V_b.

    Each V is the variance of the cluster means over their number (ddof 1), as every cluster has equally many answers.
    NaN where an axis has one level. Raises RequestError on shapes that do not fit, a NaN, or other than one or two
    distinct axes. Cost: O(size).
    """
    one, two = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if one.shape != two.shape or not one.ndim or not one.size:
        raise RequestError(f"first and second need one shape without an empty axis, got {one.shape} and {two.shape}")
    difference = one - two
    if not np.isfinite(difference).all():
        raise RequestError("scores must be finite; leave out what has no answer in both")
    try:
        chosen = {range(one.ndim)[axis] for axis in axes}
    except IndexError:
        raise RequestError(f"axes must lie within {one.ndim} axes, got {list(axes)}") from None
    if not 1 <= len(chosen) == len(axes) <= 2:
        raise RequestError(f"axes must be one or two distinct axes, got {list(axes)}")
    alone = [_cluster_variance(difference, {axis}) for axis in chosen]
    if len(alone) == 1:
        return math.sqrt(alone[0])
    variance = sum(alone) - _cluster_variance(difference, chosen)
    return math.sqrt(max(variance, *alone)) if math.isfinite(variance) else math.nan


def cochran_q(correct: npt.ArrayLike, state: npt.ArrayLike | None = None) -> CochranQ:
    """Cochran's Q test that C contexts have one accuracy, from correct [C, Q] with state [C, Q], 0 = ok.

    With contexts j and queries i, Q = (C - 1)·(C·Σ G_j² - G²) / (C·G - Σ L_i²), where G_j are right answers of a
    context, L_i of a query and G of all; χ² with C - 1 degrees of freedom if all are alike. Only queries ok in every
    context count, each once. Raises RequestError unless C >= 2. Cost: O(C·Q). Cochran (1950).
    """
    items = _binary(correct, "Cochran's Q")
    if items.ndim != 2 or len(items) < 2:
        raise RequestError(f"Cochran's Q needs correct of shape [C, Q] with C >= 2, got {list(items.shape)}")
    usable = usable_queries(items.shape, state)
    num_contexts = len(items)
    by_query = items.sum(axis=0, dtype=np.int64)[usable]
    by_context = np.einsum("cq,q->c", items, usable.astype(np.int64))
    total = int(by_query.sum())
    spread = num_contexts * total - int(by_query @ by_query)
    excess = num_contexts * int(by_context @ by_context) - total**2
    statistic = (num_contexts - 1) * excess / spread if spread else 0.0
    return CochranQ(
        statistic=statistic,
        degrees=num_contexts - 1,
        p_value=float(special.chdtrc(num_contexts - 1, statistic)),
        num_informative=int(np.count_nonzero((by_query > 0) & (by_query < num_contexts))),
        num_queries=len(by_query),
    )


def pairwise_mcnemar(correct: npt.ArrayLike, state: npt.ArrayLike | None = None) -> PairwiseTests:
    """McNemar's mid-p test of every two contexts of correct [C, Q], adjusted by Holm for their C(C - 1)/2 pairs.

    State [C, Q], 0 = ok; only queries ok in every context count. Raises RequestError unless C >= 2. Cost: O(C²·Q).
    """
    items = _binary(correct, "McNemar's test")
    if items.ndim != 2 or len(items) < 2:
        raise RequestError(f"pairs need correct of shape [C, Q] with C >= 2, got {list(items.shape)}")
    right = items[:, usable_queries(items.shape, state)].astype(np.float64)  # sums of 0 and 1 are exact
    first, second = np.array(list(combinations(range(len(right)), 2)), dtype=np.int64).T
    together = right @ right.T
    b = (together[first, first] - together[first, second]).astype(np.int64)
    c = (together[second, second] - together[first, second]).astype(np.int64)
    num_queries = right.shape[1]
    p_mid = _mcnemar_p(b, c)[1]
    difference = (b - c) / num_queries if num_queries else np.full(len(b), math.nan)
    low, high = _score_bounds(b, c, num_queries, _LEVEL)
    return PairwiseTests(first, second, difference, _paired_se(b, c, num_queries), p_mid, holm(p_mid), low, high)


def intraclass_correlation(scores: npt.ArrayLike) -> float:
    """One-way intraclass correlation of scores [G, N]: N scores of each of G groups, such as the answers of a set.

    (MS_between - MS_within) / (MS_between + (N - 1)·MS_within). A mean of G·N scores is as uncertain as one of
    G·N / (1 + (N - 1)·ICC) independent ones. It can be negative, at least -1/(N - 1); NaN where nothing varies. Raises
    RequestError unless G, N >= 2, and on a NaN. Fisher (1925).
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 2 or min(values.shape) < 2:
        raise RequestError(f"an intraclass correlation needs at least 2 groups of 2 scores, got {list(values.shape)}")
    if not np.isfinite(values).all():
        raise RequestError("scores must be finite; leave out what has no answer")
    centred = values - values[0, 0]  # equal scores become exact zeros
    between = values.shape[1] * float(centred.mean(axis=1).var(ddof=1))
    within = float(centred.var(axis=1, ddof=1).mean())
    total = between + (values.shape[1] - 1) * within
    return (between - within) / total if total > 0 else math.nan


def intraclass_correlations(components: VarianceComponents) -> IntraclassCorrelations:
    """Correlations of two answers that share a set, a permutation, a query or two of them, from variance components.

    The components of all that is shared, over the sum of all seven; negative estimates count as 0. Searle, Casella &
    McCulloch (1992).
    """
    share = components.shares
    if sum(share) == 0:
        return IntraclassCorrelations(*[math.nan] * 6)
    return IntraclassCorrelations(
        same_set=share.S,
        same_permutation=share.P,
        same_context=share.S + share.P + share.SP,
        same_query=share.I,
        same_query_and_set=share.S + share.I + share.SI,
        same_query_and_permutation=share.P + share.I + share.PI,
    )


def product_bootstrap(
    correct: npt.ArrayLike,
    statistic: Callable[..., npt.ArrayLike],
    state: npt.ArrayLike | None = None,
    weights: npt.ArrayLike | None = None,
    *,
    resample: str = "SPQ",
    kind: Literal["poisson", "bayesian"] = "poisson",
    draws: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    limits: ComputeLimits = LIMITS,
) -> Bootstrap:
    """Bootstrap of a function of accuracy that gives sets, permutations and queries independent random weights.

    Args:
        correct: [S, P, Q] or [S, P, K, Q], 0 or 1.
        statistic: of accuracy [S, P] or [S, P, K] to a number or an array. `poisson` writes a set or a permutation of
            weight w out w times, so any function will do; `bayesian` calls statistic(accuracy, set_weights,
            permutation_weights), weights [S] and [P], which it has to heed.
        state: as for `accuracy`.
        weights: as for `accuracy`; a query's weight is multiplied by the drawn one.
        resample: the letters of the axes that are samples: of S, P, Q. The others stay as they are.
        kind: weights Poisson(1), or exponential(1) as in the Bayesian bootstrap.
        limits: how many sums are held at once.

    The weight of an answer is the product of its set's, permutation's and query's: for a mean this is mildly
    conservative (Owen & Eckles 2012). The interval is that of percentiles. For a *spread* beware:
    levels written out twice make it too small, by about √((n - 1)/n) for n sets or permutations, and with ten of them
    the interval of r covers less than it says; `jackknife_ratio_interval` is the better one there.

    Draws are keyed by (seed, axis). Cost: O(draws · size / 10⁹) seconds or so, and a float copy of some permutations.
    Raises RequestError on shapes that do not fit.
    """
    items = binary_items(correct)
    if items.ndim not in (3, 4):
        raise RequestError(f"the bootstrap needs correct of shape [S, P, Q] or [S, P, K, Q], got {list(items.shape)}")
    if not resample or set(resample) - set("SPQ"):
        raise RequestError(f"resample must name some of the axes S, P and Q, got {resample!r}")
    if kind not in ("poisson", "bayesian") or draws < 2 or not 0 < level < 1:
        raise RequestError(f"need poisson or bayesian, draws >= 2 and 0 < level < 1, got {kind!r}, {draws}, {level}")
    usable, weight = usable_queries(items.shape, state), query_weights(weights, items.shape[-1])
    if not weight[usable].any():
        raise RequestError("no query is ok in every cell; leave out the cells that lack most")
    drawn = {
        axis: _drawn_weights(axis, size, axis in resample, kind, draws, seed)
        for axis, size in (("S", items.shape[0]), ("P", items.shape[1]), ("Q", int(np.count_nonzero(usable))))
    }
    evaluate = _written_out if kind == "poisson" else _with_weights
    kept, kept_weight = items[..., usable], weight[usable]
    ones = np.ones((1, len(kept_weight)))
    estimate = evaluate(
        statistic, _reweighted(kept, ones * kept_weight, limits)[0], *(np.ones(n) for n in items.shape[:2])
    )
    values, step = [], max(1, limits.sums_at_once // math.prod(items.shape[:-1]))
    for begin in range(0, draws, step):
        part = slice(begin, begin + step)
        cells = _reweighted(kept, drawn["Q"][part] * kept_weight, limits)
        values += [evaluate(statistic, *one) for one in zip(cells, drawn["S"][part], drawn["P"][part], strict=True)]
    return _summarised(np.asarray(estimate), values, level)


def _binary(correct: npt.ArrayLike, what: str) -> npt.NDArray[np.uint8]:
    """`binary_items` of what is no grade; raises RequestError that names what needs 0 and 1."""
    items = zeros_and_ones(correct)
    if items.dtype.kind == "f":
        if np.isnan(items).any():
            raise RequestError(f"{what} got a NaN; give numpy.nan_to_num(x), and state=numpy.isnan(x)")
        raise RequestError(f"{what} needs answers 0 and 1, got others of {items.dtype}; paired_grades compares grades")
    return binary_items(items)


def _contexts(first: npt.ArrayLike, second: npt.ArrayLike, what: str) -> npt.NDArray[np.uint8]:
    """[2, ..., Q]"""
    one, two = _binary(first, what), _binary(second, what)
    if one.shape != two.shape:
        raise RequestError(f"first and second need one shape, got {list(one.shape)} and {list(two.shape)}")
    return np.stack([one, two])


def score_of_difference(
    b: npt.NDArray[Any], c: npt.NDArray[Any], num: npt.NDArray[Any] | int, delta: FloatArray
) -> FloatArray:
    """Tango's score of a difference ``delta`` of n queries of which b and c are answered rightly by only the first and
    only the second: (b - c - n·δ)/√(n·(2q + δ(1 - δ))), standard Gaussian where δ is the true one (`paired_interval`).
    """
    slope = (2 * num - b + c) * delta - b - c
    root = np.sqrt(np.maximum(slope**2 + 8 * num * c * delta * (1 - delta), 0.0))
    second = np.maximum(root - slope, 0.0) / (4 * num)
    variance = num * (2 * second + delta * (1 - delta))
    return np.asarray((b - c - num * delta) / np.sqrt(np.maximum(variance, np.finfo(np.float64).tiny)))


def _score_bounds(
    b: npt.NDArray[Any], c: npt.NDArray[Any], num_queries: int, level: float
) -> tuple[FloatArray, FloatArray]:
    """Tango's bounds of (b - c)/n, each [...], by bisection of the score, which falls as the difference grows."""
    z, num = float(special.ndtri(upper_tail(level))), num_queries
    if num == 0:
        return np.full(b.shape, math.nan), np.full(b.shape, math.nan)

    def score(delta: FloatArray) -> FloatArray:
        return score_of_difference(b, c, num, delta)

    def where(low: FloatArray, high: FloatArray, target: float) -> FloatArray:
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            above = score(middle) > target
            low, high = np.where(above, middle, low), np.where(above, high, middle)
        return (low + high) / 2

    difference = (b - c) / num
    one = np.ones(b.shape)
    low = np.where(c == num, -1.0, where(-one, difference, z))
    return low, np.where(b == num, 1.0, where(difference, one, -z))


def _paired_se(b: npt.NDArray[Any], c: npt.NDArray[Any], num_queries: int) -> FloatArray:
    if num_queries == 0:
        return np.full(b.shape, np.nan)
    return np.asarray(np.sqrt((b + c) - (b - c) ** 2 / num_queries) / num_queries)


def _mcnemar_p(b: npt.NDArray[Any], c: npt.NDArray[Any]) -> tuple[FloatArray, FloatArray]:
    """Two-sided p-values, exact and mid-p, by doubling a tail: the smaller of b and c is binomial (b + c, ½)."""
    fewer, both = np.minimum(b, c), b + c
    tail = special.bdtr(fewer, both, 0.5)
    beyond = np.where(fewer > 0, special.bdtr(np.maximum(fewer - 1, 0), both, 0.5), 0.0)
    exact = np.minimum(2 * tail, 1.0)
    mid = np.where(b == c, 1.0, tail + beyond)
    return np.asarray(exact), np.asarray(np.minimum(mid, 1.0))


def _cluster_variance(values: FloatArray, axes: set[int]) -> float:
    """Variance of the mean of the cluster means; clusters are the levels of `axes` together. NaN for one level."""
    if any(values.shape[axis] < 2 for axis in axes):
        return math.nan
    means: FloatArray = (values - values.flat[0]).mean(axis=tuple(set(range(values.ndim)) - axes))
    return float(means.var(ddof=1)) / means.size


def _drawn_weights(axis: str, size: int, resampled: bool, kind: str, draws: int, seed: int) -> FloatArray:
    """[draws, size]"""
    if not resampled:
        return np.ones((draws, size))
    generator = np.random.default_rng([seed, *f"bootstrap {axis}".encode()])
    if kind == "poisson":
        return generator.poisson(1.0, (draws, size)).astype(np.float64)
    return np.asarray(generator.exponential(1.0, (draws, size)))


def _reweighted(items: npt.NDArray[np.uint8], weights: FloatArray, limits: ComputeLimits) -> FloatArray:
    """Accuracies [draws, S, P, ...] of items [S, P, ..., Q] under weights [draws, Q]; NaN where all are 0."""
    rows = items.reshape(-1, items.shape[-1])
    sums = np.empty((len(weights), len(rows)))
    step = max(1, limits.sums_at_once // items.shape[-1])
    for begin in range(0, len(rows), step):  # never a float copy of everything
        sums[:, begin : begin + step] = weights @ rows[begin : begin + step].T.astype(np.float64)
    total = weights.sum(axis=1, keepdims=True)
    values = np.divide(sums, total, out=np.full_like(sums, np.nan), where=total > 0)
    return np.asarray(values).reshape(len(weights), *items.shape[:-1])


def _written_out(statistic: Callable[..., Any], cells: FloatArray, sets: FloatArray, permutations: FloatArray) -> Any:
    """`statistic` of cells [S, P, ...] with every level written out as often as it weighs; NaN where none is left."""
    chosen = np.repeat(np.arange(len(sets)), sets.astype(int))
    ordered = np.repeat(np.arange(len(permutations)), permutations.astype(int))
    if not chosen.size or not ordered.size or np.isnan(cells).any():
        return math.nan
    return statistic(cells[np.ix_(chosen, ordered)])


def _with_weights(statistic: Callable[..., Any], cells: FloatArray, sets: FloatArray, permutations: FloatArray) -> Any:
    return statistic(cells, sets, permutations)


def _summarised(estimate: FloatArray, values: list[Any], level: float) -> Bootstrap:
    table = np.array([np.broadcast_to(value, estimate.shape) for value in values], dtype=np.float64)
    defined = np.isfinite(table)
    flat, good = table.reshape(len(table), -1), defined.reshape(len(table), -1)
    found = [_spread_of(column[kept], level) for column, kept in zip(flat.T, good.T, strict=True)]
    se, low, high = (np.array(part).reshape(estimate.shape) for part in zip(*found, strict=True))
    num_undefined = int(np.count_nonzero(~good.all(axis=1)))
    return Bootstrap(estimate.astype(np.float64), se, low, high, level, num_undefined, table)


def _spread_of(values: FloatArray, level: float) -> tuple[float, float, float]:
    if len(values) < 2:
        return math.nan, math.nan, math.nan
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(values.std(ddof=1)), float(low), float(high)
