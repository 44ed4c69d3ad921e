"""How sure a mean accuracy and both sensitivities are, against the size of the design, and the design that is needed.

Two routes to the same numbers. Variance components give the standard error of a mean for any number of sets,
permutations and queries. Subsampling the stored answers shows it, for the sensitivities too, up to the size of the run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from iclperm.errors import RequestError
from iclperm.stats.components import Effects, solve_components, variance_components
from iclperm.stats.incomplete import strata_of
from iclperm.stats.intervals import UNSEEN_Z, Interval, two_way_squares, unseen_error, upper_tail
from iclperm.stats.sensitivity import FloatArray, plain_array, query_weights, std_along

Axis = Literal["sets", "permutations", "queries"]

_NOTHING = Effects(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
_MAX_SIZE = 100_000
_MAX_BLOCKS = 64
_LEAST_QUERIES = 64
_WORK = 2e8  # accuracies drawn for one axis; larger designs are resampled less often


class MeanError(NamedTuple):
    """A mean of scores [S, P, Q] and how sure it is, sets, permutations and queries all being drawn at random."""

    mean: float
    se: float
    """Standard error for fresh draws of the axes in `covers`. At least `unseen_error` of n effective queries, as what
    none of them showed may still happen. NaN for one query."""
    degrees: float
    """Degrees of freedom of `se` (Satterthwaite), at least those of the shortest axis it covers."""
    se_held: float
    """Standard error for fresh sets and permutations on these very queries; 0 where there is one context."""
    degrees_held: float
    covers: tuple[Axis, ...]
    """The axes with two levels or more; of an axis with one level nothing is known, and `se` is for that level only."""
    sigma2: Effects
    """Variance components as estimated (they can be negative); 0 for effects of axes with one level. With one set, P
    stands for P + SP and so on."""
    parts: Effects
    """What each component, clipped at 0, adds to the variance of the mean."""

    def interval(self, level: float = 0.95, *, held: bool = False) -> Interval:
        """Student's interval of the mean; with `held` the one on these very queries. NaN bounds for one query."""
        se, degrees = (self.se_held, self.degrees_held) if held else (self.se, self.degrees)
        if math.isnan(se):
            return Interval(self.mean, math.nan, math.nan, level)
        half = float(special.stdtrit(degrees, upper_tail(level))) * se if se else 0.0
        return Interval(self.mean, self.mean - half, self.mean + half, level)


_FEW_SETS = 5


def degrees_for_tests(found: MeanError, num_sets: int) -> float:
    """Degrees of freedom of a test of a mean difference: below five sets S - 1 at most.

    Satterthwaite's are estimates themselves; with three sets they let tests of equal strategies cry wolf in one study
    of ten instead of twenty (benchmarks/null_studies.py). One set stands for itself and limits nothing.
    """
    return min(found.degrees, num_sets - 1) if 1 < num_sets < _FEW_SETS else found.degrees


class NeededSizes(NamedTuple):
    """The design that gives a mean accuracy a wanted half-width; None where none up to 100,000 does."""

    sets: int | None
    """With the permutations and queries of the run."""
    permutations: int | None
    """With the sets and queries of the run."""
    queries: int | None
    """With the sets and permutations of the run; None where the queries are held."""
    together: tuple[int, int, int] | None
    """Sets, permutations and queries: those of the run times one factor, held queries as they are."""


class Resampled(NamedTuple):
    """One statistic over random parts of one axis; N sizes by K."""

    mean: FloatArray
    """[N, K] over the parts: where it drifts with the size, the statistic depends on the size."""
    sd: FloatArray
    """[N, K] standard deviation over the parts; parts of a whole overlap, and at full size it is 0."""
    se: FloatArray
    """[N, K] standard error due to this axis for a fresh sample of the size; NaN where that is not known."""


class AxisConvergence(NamedTuple):
    """What smaller designs on one axis would have found."""

    axis: Axis
    sizes: tuple[int, ...]
    """[N] levels in a part, ascending; the last is the whole axis."""
    num_parts: tuple[int, ...]
    """[N] parts that were compared."""
    accuracy: Resampled
    """Of µ_k, the mean accuracy."""
    order: Resampled
    """Of the order sensitivity as printed in arXiv 2511.09700; NaN for P = 1."""
    selection: Resampled
    """Of the selection sensitivity; NaN for S = 1."""


def query_blocks(num_queries: int, most: int = _MAX_BLOCKS) -> npt.NDArray[np.int64]:
    """Edges of at most `most` blocks of queries, int64 [B + 1].

    All blocks have the same size, a power of two; the last may be shorter.
    """
    if num_queries < 1:
        raise RequestError(f"there must be at least one query, got {num_queries}")
    size = 1 << max(0, math.ceil(math.log2(num_queries / most)))
    return np.array([*range(0, num_queries, size), num_queries], dtype=np.int64)


def mean_variance(sigma2: Effects, num_sets: float, num_permutations: float, num_queries: float) -> float:
    """Variance of a mean over S fresh sets, P permutations and Q queries, all crossed; a size can be infinite.

    σ²_S/S + σ²_P/P + σ²_I/Q + σ²_SP/(S·P) + σ²_SI/(S·Q) + σ²_PI/(P·Q) + σ²_SPI/(S·P·Q): Brennan (2001),
    *Generalizability Theory*, the error variance of a mean when every facet is random.
    """
    return sum(_mean_parts(sigma2, num_sets, num_permutations, num_queries))


def mean_error(
    scores: npt.ArrayLike,
    weights: npt.ArrayLike | None = None,
    *,
    classes: npt.ArrayLike | None = None,
    least: float | None = None,
) -> MeanError:
    """The mean of scores [S, P, Q], with the standard error that fresh sets, permutations *and* queries would give.

    Args:
        scores: [S, P, Q] 0 or 1, or floating point in units of accuracy, such as differences of 0 and 1; every query
            usable in every cell.
        weights: [Q] how often each query counts in the mean. Effects of sets and permutations are those on the
            *weighted* mean; a query is one draw, and what queries do is divided by their effective number (Σw)²/Σw²
            (Kish 1965).
        classes: [Q] the class of each query, for which weights stand; only looked at where weights differ. Without it
            the queries of one weight are taken for a class.
        least: below which `se` never is, by default `unseen_error`; for scores whose Q axis is blocks of queries.

    The variance is `mean_variance` of the components, each clipped at 0, and never below the variance clustered by set
    alone; `se` is never below `unseen_error`, so that equal answers leave an error. Permutations are taken as shared by
    the sets. An axis with one level is taken as it is (see `covers`). Raises RequestError on another shape or a NaN.
    Cost: O(S·P·Q); no float copy of binary scores.
    """
    values = plain_array(scores)
    if values.ndim != 3 or values.size == 0:
        raise RequestError(f"the error of a mean needs scores of shape [S, P, Q], got {list(values.shape)}")
    if values.dtype.kind == "f" and (gaps := np.argwhere(~np.isfinite(values))).size:
        place = ", ".join(map(str, gaps[0]))
        raise RequestError(
            f"scores[{place}] is {values[tuple(gaps[0])]}; leave out the queries that lack an answer: "
            "x[..., numpy.isfinite(x).all(axis=(0, 1))]"
        )
    num_s, num_p, num_q = values.shape
    weight = query_weights(weights, num_q)
    set_means = np.einsum("spq,q->s", values, weight) / (num_p * weight.sum())
    mean = float(set_means.mean())
    axes: tuple[Axis, ...] = ("sets", "permutations", "queries")
    covers = tuple(axis for axis, size in zip(axes, values.shape, strict=True) if size > 1)
    if num_q < 2:
        return MeanError(mean, math.nan, math.nan, math.nan, math.nan, (), _NOTHING, _NOTHING)
    effective = float(weight.sum() ** 2 / np.sum(weight**2))
    if np.ptp(weight) == 0:
        shape, (squares, degrees) = (num_s, num_p, float(num_q)), _mean_squares(values)
    else:
        shape, (squares, degrees) = (num_s, num_p, effective), _weighted_squares(values, weight, classes)
    sigma2 = _components(squares, shape)
    clipped = Effects(*(max(value, 0.0) for value in sigma2))
    parts = _mean_parts(clipped, *shape)
    by_set = float(set_means.var(ddof=1)) / num_s if num_s > 1 else 0.0
    terms = {effect: _slopes(shape, effect) * np.array(squares) for effect in Effects._fields}

    def error(effects: Sequence[str]) -> tuple[float, float]:
        variance = max(sum(getattr(parts, effect) for effect in effects), by_set)
        return math.sqrt(variance), _degrees(variance, np.sum([terms[effect] for effect in effects], axis=0), degrees)

    (se, freedom), (held, held_freedom) = (
        error(Effects._fields),
        error([name for name in Effects._fields if name != "I"]),
    )
    return MeanError(
        mean,
        max(se, unseen_error(effective) if least is None else least),
        freedom,
        held,
        held_freedom,
        covers,
        sigma2,
        parts,
    )


def needed_sizes(
    sigma2: Effects,
    shape: tuple[float, float, float],
    half_width: float = 0.01,
    level: float = 0.95,
    *,
    held: bool = False,
) -> NeededSizes:
    """The sets, permutations or queries with which a mean accuracy is known to ± half_width at `level`.

    Solves z·√`mean_variance` = half_width, components clipped at 0 and `shape` (S, P, Q) being that of the run,
    with enough queries for z · `unseen_error`, the least that `mean_error` gives, to be within it. With `held` the
    queries stay the very same, and σ²_I/Q is no error: what sets and permutations alone must do. A Gaussian
    quantile z: with few sets the interval of `mean_error` is wider. The answer is as uncertain as the components:
    those of S sets rest on S - 1 degrees of freedom. Of an axis with one level nothing is known: None. Raises
    RequestError unless half_width > 0. Cost: O(1).
    """
    if not half_width > 0:
        raise RequestError(f"half_width must be above 0, got {half_width}")
    quantile = float(special.ndtri(upper_tail(level)))
    wanted = (half_width / quantile) ** 2
    clipped = Effects(*(max(value, 0.0) for value in sigma2))
    if held:
        sets, permutations, _ = (_needed(clipped._replace(I=0.0), shape, place, wanted) for place in range(3))
        return NeededSizes(sets, permutations, None, _scaled(clipped._replace(I=0.0), shape, wanted, held))
    least = max(math.ceil(quantile * UNSEEN_Z / half_width - UNSEEN_Z**2 - 1e-9), 1)
    sets, permutations, queries = (_needed(clipped, shape, place, wanted) for place in range(3))
    together = _scaled(clipped, shape, wanted, held)
    return NeededSizes(
        sets if shape[2] >= least else None,
        permutations if shape[2] >= least else None,
        None if queries is None else max(queries, least),
        None if together is None else (*together[:2], max(together[2], least)),
    )


def convergence_over_permutations(
    accuracy: npt.ArrayLike, sizes: Sequence[int] | None = None, *, resamples: int = 400, seed: int = 0
) -> AxisConvergence:
    """µ_k and both sensitivities over parts of the permutations, from accuracy [S, P, K].

    Args:
        accuracy: [S, P, K], permutations shared by the sets.
        sizes: numbers of permutations, by default 5, 10, 20, … and P; P itself is always last.
        resamples: random parts of each size, fewer for large designs; all parts where there are no more.
        seed: parts are keyed by it, the axis and the size.

    Parts drawn without replacement from P move too little: their variance for a mean is (1 - P'/P) times that of a
    fresh sample (Cochran 1977, Theorem 2.2), so `se` is sd/√(1 - P'/P), and at P' = P the jackknife, which is the same
    correction at P' = P - 1. Exact for µ_k; for the sensitivities to first order. Raises RequestError on a NaN, another
    shape or a size outside 1..P. Cost: O(sizes · resamples · S·P·K).
    """
    values = _accuracies(accuracy)
    num_p, num_k = values.shape[1:]
    chosen = _sizes(sizes, num_p, 5, "permutations")
    limit = _most_parts(resamples, values.size * len(chosen))

    def statistics(parts: FloatArray) -> FloatArray:
        return np.stack([_over_parts(values[:, :, k], parts) for k in range(num_k)], axis=-1)

    return _converge("permutations", chosen, num_p, limit, seed, statistics)


def convergence_over_sets(
    accuracy: npt.ArrayLike, sizes: Sequence[int] | None = None, *, resamples: int = 400, seed: int = 0
) -> AxisConvergence:
    """As `convergence_over_permutations`, over parts of the sets: by default all sizes 1..S up to ten, then doubling.

    A part of one set has no selection sensitivity: NaN.
    """
    values = _accuracies(accuracy)
    num_s, _, num_k = values.shape
    chosen = _sizes(sizes if sizes is not None or num_s > 10 else range(1, num_s + 1), num_s, 1, "sets")
    limit = _most_parts(resamples, values.size * len(chosen))

    def statistics(parts: FloatArray) -> FloatArray:
        swapped = np.stack([_over_parts(values[:, :, k].T, parts) for k in range(num_k)], axis=-1)
        return swapped[:, [0, 2, 1]]  # with sets and permutations exchanged, order is selection

    return _converge("sets", chosen, num_s, limit, seed, statistics)


def convergence_over_queries(
    sums: npt.ArrayLike,
    counts: npt.ArrayLike,
    sizes: Sequence[int] | None = None,
    *,
    resamples: int = 400,
    seed: int = 0,
) -> AxisConvergence:
    """µ_k and both sensitivities over parts of the queries, from sums [S, P, K, B] of blocks of queries.

    Args:
        sums: right answers in each block (`stats.tensor.segment_sums`), by weight.
        counts: [B] queries in each block, by weight.
        sizes: numbers of *blocks*, by default doubling from 64 queries (or a quarter of all, if less); B is
            always last.
        resamples, seed: as in `convergence_over_permutations`.

    Queries come in random order, so a block is a random part of them. Sensitivities as printed hold item noise and
    shrink with more queries: their `mean` shows it. Raises RequestError on shapes that do not fit. Cost: O(sizes ·
    resamples · S·P·K·B).
    """
    blocks, sizes_of = np.asarray(sums), np.asarray(counts, dtype=np.float64)
    if blocks.ndim != 4 or blocks.size == 0 or sizes_of.shape != blocks.shape[-1:]:
        raise RequestError(
            f"need sums [S, P, K, B] and counts [B], got {list(blocks.shape)} and {list(sizes_of.shape)}"
        )
    num_k, num_b = blocks.shape[2:]
    least = max(1, min(round(_LEAST_QUERIES / float(sizes_of.mean())), num_b // 4))
    chosen = _sizes(sizes, num_b, least, "blocks of queries")
    limit = _most_parts(resamples, math.prod(blocks.shape[:3]) * len(chosen))

    def statistics(parts: FloatArray) -> FloatArray:
        found = np.empty((len(parts), 3, num_k))
        for k in range(num_k):
            part = blocks[:, :, k].astype(np.float64) @ parts.T / (sizes_of @ parts.T)  # [S, P, R]
            found[:, :, k] = np.stack(
                [part.mean(axis=(0, 1)), std_along(part, axis=1).mean(axis=0), std_along(part, axis=0).mean(axis=0)],
                axis=1,
            )
        return found

    return _converge("queries", chosen, num_b, limit, seed, statistics)


def _accuracies(accuracy: npt.ArrayLike) -> FloatArray:
    values = np.asarray(accuracy, dtype=np.float64)
    if values.ndim != 3 or values.size == 0:
        raise RequestError(f"accuracy must have shape [S, P, K] with no empty axis, got {list(values.shape)}")
    if not np.isfinite(values).all():
        raise RequestError("accuracy holds a NaN; leave out cells without a usable query")
    return values


def _mean_parts(sigma2: Effects, num_s: float, num_p: float, num_q: float) -> Effects:
    divisors = Effects(num_s, num_p, num_q, num_s * num_p, num_s * num_q, num_p * num_q, num_s * num_p * num_q)
    return Effects(*(value / divisor for value, divisor in zip(sigma2, divisors, strict=True)))


def _mean_squares(values: npt.NDArray[Any]) -> tuple[Effects, Effects]:
    """Mean squares and degrees of freedom of scores [S, P, Q] with at least two queries; 0 where an axis has one."""
    num_s, num_p, num_q = values.shape
    if min(num_s, num_p) > 1:
        components = variance_components(values)
        return components.mean_squares, components.degrees
    if max(num_s, num_p) == 1:
        items = values[0, 0].astype(np.float64)
        return _NOTHING._replace(I=float((items - items[0]).var(ddof=1))), _NOTHING._replace(I=num_q - 1)
    squares, degrees = two_way_squares(values.reshape(-1, num_q).astype(np.float64))
    rows, columns, rest = ((squares[name] / degrees[name], degrees[name]) for name in ("S", "P", "E"))
    names = ("S", "I", "SI") if num_p == 1 else ("P", "I", "PI")
    found = dict(zip(names, (rows, columns, rest), strict=True))
    return tuple(  # type: ignore[return-value]
        _NOTHING._replace(**{name: pair[place] for name, pair in found.items()}) for place in (0, 1)
    )


def _weighted_squares(
    values: npt.NDArray[Any], weight: FloatArray, classes: npt.ArrayLike | None
) -> tuple[Effects, Effects]:
    """Mean squares of the weighted mean, as if of n = (Σw)²/Σw² queries of equal weight, and degrees of freedom.

    Those of sets, permutations and both are n times those of the weighted accuracies [S, P]. Those with queries are
    of each class by itself, w²·n_c of class c over Σw² of them; a class of few queries has few degrees of freedom
    (Satterthwaite).
    """
    num_s, num_p, _ = values.shape
    total, square = float(weight.sum()), float(weight @ weight)
    strata = strata_of(weight, classes)
    if np.bincount(strata[strata >= 0]).min() < 2:  # one query does not tell what queries of its class do
        strata = np.where(weight > 0, 0, -1)
    mean, over = np.zeros(len(Effects._fields)), np.zeros(len(Effects._fields))
    least = np.zeros(len(Effects._fields))
    for name in range(int(strata.max()) + 1):
        members = np.flatnonzero(strata == name)
        squares, degrees = map(np.array, _mean_squares(values[:, :, members]))
        part = float(weight[members] @ weight[members]) / square
        mean, least = mean + part * squares, degrees if not name else np.minimum(least, degrees)
        over += np.divide((part * squares) ** 2, degrees, out=np.zeros(len(degrees)), where=degrees > 0)
    found = Effects(*mean.tolist())
    freedom = Effects(*np.divide(mean**2, over, out=np.array(least, np.float64), where=over > 0).tolist())
    table = np.einsum("spq,q->sp", values, weight) / total
    names = [name for name, size in (("S", num_s), ("P", num_p)) if size > 1]
    if len(names) == 1:
        found = found._replace(**{names[0]: total**2 / square * float(table.var(ddof=1))})
        return found, freedom._replace(**{names[0]: float(table.size - 1)})
    if names:
        sums, of = two_way_squares(table)
        ours = {"S": "S", "P": "P", "SP": "E"}
        found = found._replace(**{name: total**2 / square * sums[key] / of[key] for name, key in ours.items()})
        freedom = freedom._replace(**{name: float(of[key]) for name, key in ours.items()})
    return found, freedom


def _components(ms: Effects, shape: tuple[float, ...]) -> Effects:
    """As `solve_components`, for axes with one level too."""
    num_s, num_p, num_q = shape
    if min(num_s, num_p) > 1:
        return solve_components(ms, num_s, num_p, num_q)
    if num_s > 1:
        return _NOTHING._replace(S=(ms.S - ms.SI) / num_q, I=(ms.I - ms.SI) / num_s, SI=ms.SI)
    if num_p > 1:
        return _NOTHING._replace(P=(ms.P - ms.PI) / num_q, I=(ms.I - ms.PI) / num_p, PI=ms.PI)
    return ms


@functools.lru_cache(maxsize=256)
def _slopes(shape: tuple[float, ...], effect: str) -> FloatArray:
    """What one unit of each mean square adds to one effect's part of the variance of the mean; [7], it is linear.

    Kept, as the strategies of a selection have one shape.
    """
    units = (_NOTHING._replace(**{name: 1.0}) for name in Effects._fields)
    parts = (_mean_parts(_components(unit, shape), *shape) for unit in units)
    found = np.array([getattr(part, effect) for part in parts])
    found.flags.writeable = False
    return found


def _degrees(variance: float, terms: FloatArray, degrees: Effects) -> float:
    """Satterthwaite's for a variance that is a sum of mean squares, `terms` [7]; at least the least of them."""
    known = np.array(degrees) > 0
    spread = float(np.sum(terms[known] ** 2 / np.array(degrees)[known]))
    least = float(np.array(degrees)[known].min())
    return min(max(variance**2 / spread if spread > 0 else least, least), float(np.sum(degrees)))


def _needed(sigma2: Effects, shape: tuple[float, ...], place: int, wanted: float) -> int | None:
    """Least size of one axis at which the variance of the mean is `wanted`: fixed + moving / size."""

    def variance(size: float) -> float:
        return mean_variance(sigma2, *(size if axis == place else other for axis, other in enumerate(shape)))

    fixed = variance(math.inf)
    moving = variance(1) - fixed
    if fixed >= wanted or shape[place] == 1:
        return None
    size = max(1, math.ceil(moving / (wanted - fixed) - 1e-9))
    return size if size <= _MAX_SIZE else None


def _scaled(sigma2: Effects, shape: tuple[float, ...], wanted: float, held: bool) -> tuple[int, int, int] | None:
    """`shape` times the least factor that is enough, by bisection; an axis with one level keeps it."""

    def sizes(factor: float) -> tuple[int, int, int]:
        num_s, num_p, num_q = (max(1, math.ceil(size * factor - 1e-9)) if size > 1 else 1 for size in shape)
        return num_s, num_p, math.ceil(shape[2] - 1e-9) if held else num_q

    low, high = 0.0, float(_MAX_SIZE) / max(shape)
    if mean_variance(sigma2, *sizes(high)) > wanted:
        return None
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if mean_variance(sigma2, *sizes(middle)) <= wanted else (middle, high)
    return sizes(high)


def _sizes(sizes: Sequence[int] | None, total: int, least: int, name: str) -> tuple[int, ...]:
    """The sizes asked for, or doubling from `least`; always ascending, the last of them `total`."""
    if sizes is None:
        sizes = [least << step for step in range(max(total // least, 1).bit_length()) if least << step < total]
    chosen = sorted({*(int(size) for size in sizes), total})
    if chosen[0] < 1 or chosen[-1] > total:
        wrong = chosen[0] if chosen[0] < 1 else chosen[-1]
        raise RequestError(f"there are {total} {name}; a part cannot have {wrong}")
    return tuple(chosen)


def _most_parts(resamples: int, work: int) -> int:
    """How many parts of a size are drawn: `resamples`, or fewer (20 at least) where each takes `work` accuracies."""
    if resamples < 2:
        raise RequestError(f"resamples must be at least 2, got {resamples}")
    return int(min(resamples, max(20, _WORK // work)))


def _converge(
    axis: Axis,
    sizes: tuple[int, ...],
    total: int,
    limit: int,
    seed: int,
    statistics: Callable[[FloatArray], FloatArray],
) -> AxisConvergence:
    """Statistics [R, 3, K] of parts, given as 0/1 [R, total], summarised for each size."""
    rows = [_at_size(axis, size, total, limit, seed, statistics) for size in sizes]
    mean, sd, se = (np.stack([row[place] for row in rows]) for place in (1, 2, 3))  # [N, 3, K]
    of_each = [Resampled(mean[:, which], sd[:, which], se[:, which]) for which in range(3)]
    return AxisConvergence(axis, sizes, tuple(row[0] for row in rows), *of_each)


def _at_size(
    axis: Axis, size: int, total: int, limit: int, seed: int, statistics: Callable[[FloatArray], FloatArray]
) -> tuple[int, FloatArray, FloatArray, FloatArray]:
    """Number of parts, mean, standard deviation and corrected standard error [3, K] at one size."""
    if size == total:
        whole = statistics(np.ones((1, total)))[0]
        if total == 1:
            return 1, whole, np.where(np.isnan(whole), np.nan, 0.0), np.full(whole.shape, np.nan)
        spread = statistics(1.0 - np.eye(total)).std(axis=0)
        return 1, whole, np.where(np.isnan(whole), np.nan, 0.0), spread * math.sqrt(total - 1)
    parts, ddof = _parts(axis, size, total, limit, seed)
    values = statistics(parts)
    spread = (values - values[0]).std(axis=0, ddof=ddof)
    return len(parts), values.mean(axis=0), spread, spread / math.sqrt(1 - size / total)


def _parts(axis: Axis, size: int, total: int, limit: int, seed: int) -> tuple[FloatArray, int]:
    """0/1 [R, total]: all parts of a size where there are at most `limit` (ddof 0), else that many drawn (ddof 1)."""
    if math.comb(total, size) <= limit:
        places, ddof = np.array(list(combinations(range(total), size))), 0
    else:
        generator = np.random.default_rng([seed, *axis.encode(), size])
        places, ddof = generator.permuted(np.tile(np.arange(total), (limit, 1)), axis=1)[:, :size], 1
    parts = np.zeros((len(places), total))
    np.put_along_axis(parts, places, 1.0, axis=1)
    return parts, ddof


def _over_parts(matrix: FloatArray, parts: FloatArray) -> FloatArray:
    """Mean, order and selection sensitivity [R, 3] of accuracy [S, P] over parts [R, P] of the permutations."""
    size = parts[0].sum()
    centred = matrix - matrix[:, :1]  # equal accuracies become exact zeros
    centre = centred.mean(axis=1, keepdims=True)
    mean = parts @ matrix.mean(axis=0) / size
    selection = parts @ std_along(matrix, axis=0) / size
    if size < 2:
        return np.stack([mean, np.full(len(parts), np.nan), selection], axis=1)
    centred = (centred - centre).T  # [P, S]; centred, so that the difference of squares loses no digits
    squares = parts @ centred**2 - (parts @ centred) ** 2 / size
    order = np.sqrt(np.maximum(squares, 0.0) / (size - 1)).mean(axis=1)
    return np.stack([mean, order, selection], axis=1)
