"""Intervals and standard errors of sensitivities, their ratio and accuracies, and the design that would settle r."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from iclperm.errors import RequestError
from iclperm.stats.components import Effects, VarianceComponents
from iclperm.stats.sensitivity import (
    Estimator,
    FloatArray,
    accuracy_matrix,
    finite_items,
    order_sensitivity,
    query_weights,
    selection_sensitivity,
    sensitivity_ratio,
)


def jackknife_interval(estimate: float, *left_out: npt.ArrayLike, level: float = 0.95) -> Interval:
    """`estimate` with an interval from estimates without one unit at a time: one array [n] for each kind of unit.

    The jackknife variances of the kinds (sets, permutations, queries) are added: where the kinds are crossed that
    counts the noise of single cells twice, and the interval is too wide rather than too narrow. The t quantile has
    Satterthwaite's degrees of freedom, (Σ V)²/Σ V²/(n - 1). NaN below two units of a kind, and where some estimate is
    not finite.
    """
    error, degrees = jackknife_error(left_out)
    if not (math.isfinite(estimate) and math.isfinite(error)):
        return Interval(estimate, math.nan, math.nan, level)
    half = float(special.stdtrit(degrees, upper_tail(level))) * error
    return Interval(estimate, estimate - half, estimate + half, level)


def jackknife_error(left_out: Sequence[npt.ArrayLike]) -> tuple[float, float]:
    """Standard error and Satterthwaite's degrees of freedom; NaN where a kind has less than two units or a NaN."""
    values = [np.asarray(array, dtype=np.float64) for array in left_out]
    if not all(len(array) >= 2 and np.isfinite(array).all() for array in values):
        return math.nan, math.nan
    variances = np.array([_jackknife_variance(array) for array in values])
    counts = np.array([len(array) - 1.0 for array in values])
    total = float(variances.sum())
    degrees = total**2 / float((variances**2 / counts).sum()) if total > 0 else float(counts.min())
    return math.sqrt(total), degrees


_MAX_DESIGN = 100_000
_JACKKNIFE_EXCESS = 2.15
"""Fitted by benchmarks/needed_design.py --calibrate (see `needed_design`)."""


class Interval(NamedTuple):
    """An estimate with its confidence interval; `high` can be infinite, and all is NaN where nothing can be said."""

    estimate: float
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end."""
    level: float
    """Of the interval, such as 0.95."""


Scale = Literal[
    "accuracy", "difference", "spread", "spread difference", "variance", "correlation", "ratio", "share of a gap"
]
POSSIBLE: Mapping[Scale, tuple[float, float]] = {
    "accuracy": (0.0, 1.0),
    "difference": (-1.0, 1.0),
    "spread": (0.0, 0.5),
    "spread difference": (-0.5, 0.5),
    "variance": (-0.25, 0.25),
    "correlation": (-1.0, 1.0),
    "ratio": (0.0, math.inf),
    "share of a gap": (-math.inf, 1.0),
}
"""What numbers of each kind can be at all, in units of accuracy: the standard deviation of numbers in 0..1 is at most ½
(Popoviciu 1935). A variance free of item noise can be negative as an estimate."""


class CutToPossible:
    """Marks an interval that was cut to what is possible: its dictionary, and so report.json, says ``bounded``."""

    __slots__ = ()

    def _asdict(self) -> dict[str, Any]:
        return {**super()._asdict(), "bounded": True}  # type: ignore[misc]  # of the NamedTuple beside it


class BoundedInterval(CutToPossible, Interval):
    """An interval whose bounds went beyond what is possible."""

    __slots__ = ()


def bounded(interval: Interval, scale: Scale) -> Interval:
    """An interval cut to what is possible on its scale; the same one where nothing is beyond it.

    The estimate stays within: with few levels a standard deviation (ddof 1) can be above ½ by itself.
    """
    low, high, is_cut = within(interval.estimate, interval.low, interval.high, scale)
    return BoundedInterval(interval.estimate, low, high, interval.level) if is_cut else interval


def within(estimate: float, low: float, high: float, scale: Scale) -> tuple[float, float, bool]:
    """Bounds cut to what is possible, the estimate left inside, and whether one was cut; NaN stays NaN."""
    least, most = POSSIBLE[scale]
    if not math.isnan(estimate):
        least, most = min(least, estimate), max(most, estimate)
    cut_low, cut_high = (least if low < least else low), (most if high > most else high)
    return cut_low, cut_high, low < least or high > most


class SensitivityIntervals(NamedTuple):
    """Intervals of the two sensitivities and of their ratio r = selection / order."""

    order: Interval
    """In units of what the sensitivities are of: accuracy 0..1, or logits."""
    selection: Interval
    """Likewise."""
    ratio: Interval
    """Of r."""


def possible(intervals: SensitivityIntervals) -> SensitivityIntervals:
    """Intervals of spreads of accuracies cut to what is possible (`bounded`); that of their ratio has no end."""
    return intervals._replace(
        order=bounded(intervals.order, "spread"), selection=bounded(intervals.selection, "spread")
    )


UNSEEN_Z = float(special.ndtri(0.975))


class NeededDesign(NamedTuple):
    """The smallest square design whose interval of r would exclude 1."""

    ratio: float
    """The r it is meant for."""
    num_sets: int
    num_permutations: int
    power: float
    level: float


def generalized_interval(
    accuracy: npt.ArrayLike, level: float = 0.95, draws: int = 20_000, seed: int = 0
) -> SensitivityIntervals:
    """Generalised confidence intervals of the order and selection sensitivity (RMS) and of r, from accuracy [S, P].

    The mean squares of sets (A), permutations (B) and residual (E) are drawn as SS / χ²(df) and put into
    mean row variance = [MS_B + (S-1)·MS_E]/S, mean column variance = [MS_A + (P-1)·MS_E]/P; the interval is their
    quantiles. Item noise is part of both: `effect_interval` takes it out. Effects that are not Gaussian make
    it too narrow (`skewness_warnings`): docs/statistics.md has its simulated coverage.
    Raises RequestError unless S, P >= 2. Cost: O(S·P + draws). Weerahandi (1993).
    """
    matrix = _crossed_matrix(accuracy)
    num_sets, num_permutations = matrix.shape
    squares, degrees = two_way_squares(matrix)
    drawn = {effect: _drawn(squares[effect], degrees[effect], draws, seed, f"A.{effect}") for effect in squares}
    order = (drawn["P"] + (num_sets - 1) * drawn["E"]) / num_sets
    selection = (drawn["S"] + (num_permutations - 1) * drawn["E"]) / num_permutations
    return _root_intervals(
        (order_sensitivity(matrix, "rms"), selection_sensitivity(matrix, "rms"), sensitivity_ratio(matrix, "rms")),
        (order, selection),
        level,
    )


def effect_interval(
    components: VarianceComponents, level: float = 0.95, draws: int = 20_000, seed: int = 0
) -> SensitivityIntervals:
    """Generalised intervals of order effect, selection effect and de-noised ratio: free of item noise.

    Order effect √(σ²_P + σ²_SP), selection effect √(σ²_S + σ²_SP).

    Each mean square is drawn as SS / χ²(df), the variances are clipped at 0, and quantiles are taken. Draws in which
    both effects are clipped leave the ratio open and widen its interval on both sides. Coverage suffers from effects
    that are not Gaussian as that of `generalized_interval` does. Cost: O(draws).
    """
    order, selection = (_drawn_in_strata if components.strata else _drawn_effects)(components, draws, seed)
    estimates = (components.order_effect, components.selection_effect, components.ratio)
    return _root_intervals(estimates, (order, selection), level)


def _drawn_effects(components: VarianceComponents, draws: int, seed: int) -> tuple[FloatArray, FloatArray]:
    """Draws of the squares of the order and the selection effect, from the mean squares of complete answers."""
    num_s, num_p, num_q = components.num_sets, components.num_permutations, components.num_queries
    drawn = {
        effect: _drawn(mean_square * df, df, draws, seed, f"correct.{effect}")
        for effect, mean_square, df in zip(Effects._fields, components.mean_squares, components.degrees, strict=True)
    }
    interaction = (drawn["SP"] - drawn["SPI"]) / num_q
    order = interaction + (drawn["P"] - drawn["SP"] - drawn["PI"] + drawn["SPI"]) / (num_s * num_q)
    selection = interaction + (drawn["S"] - drawn["SP"] - drawn["SI"] + drawn["SPI"]) / (num_p * num_q)
    return order, selection


def _drawn_in_strata(components: VarianceComponents, draws: int, seed: int) -> tuple[FloatArray, FloatArray]:
    """The same where answers are missing or queries weigh differently: mean squares of the weighted accuracies less the
    noise of each class, whose own mean squares (SPI, SPI + P·SI, SPI + S·PI) are drawn with its own degrees of freedom.
    """
    num_s, num_p, squares = components.num_sets, components.num_permutations, components.mean_squares
    s, p = num_s - 1, num_p - 1
    drawn = {
        effect: _drawn(getattr(squares, effect) * df, df, draws, seed, f"accuracy.{effect}")
        for effect, df in (("S", s), ("P", p), ("SP", s * p))
    }
    noise = np.zeros((3, draws))
    for number, stratum in enumerate(components.strata):
        sigma2, q = Effects(*stratum.sigma2), stratum.num_queries - 1
        rest, with_set, with_permutation = (
            _drawn(max(square, 0.0) * df, df, draws, seed, f"stratum.{number}.{name}")
            for name, square, df in (
                ("SPI", sigma2.SPI, s * p * q),
                ("SI", sigma2.SPI + num_p * sigma2.SI, s * q),
                ("PI", sigma2.SPI + num_s * sigma2.PI, p * q),
            )
        )
        noise += np.asarray(stratum.loads) @ [(with_set - rest) / num_p, (with_permutation - rest) / num_s, rest]
    squares_less_noise = np.array([drawn["S"], drawn["P"], drawn["SP"]]) - noise
    of_set, of_permutation, both = np.linalg.solve(np.array(components.effect_loads), squares_less_noise)
    return both + of_permutation, both + of_set


def jackknife_ratio_interval(
    accuracy: npt.ArrayLike, estimator: Estimator = "mean_std", level: float = 0.95
) -> Interval:
    """Interval of r from accuracy [S, P] by leaving out one set, and one permutation, at a time.

    The two jackknife variances of log r are added, with a t quantile of min(S, P) - 1 degrees of freedom. It assumes no
    shape of the effects: docs/statistics.md has its simulated coverage, for many shapes. NaN where some leave-one-out
    ratio is 0 or undefined. Raises RequestError unless S, P >= 3. Cost: O(S·P·(S + P)).
    """
    matrix = _crossed_matrix(accuracy, least=3)
    ratio = sensitivity_ratio(matrix, estimator)
    variance = sum(_jackknife_variance(_leave_one_out_log_ratios(matrix, axis, estimator)) for axis in (0, 1))
    if not (ratio > 0 and math.isfinite(variance)):
        return Interval(ratio, math.nan, math.nan, level)
    half = float(special.stdtrit(min(matrix.shape) - 1, upper_tail(level))) * math.sqrt(variance)
    return Interval(ratio, ratio * math.exp(-half), ratio * math.exp(half), level)


def wilson_interval(num_correct: int, num_queries: int, level: float = 0.95) -> Interval:
    """Wilson score interval of one accuracy, num_correct of num_queries independent items (Wilson 1927).

    Raises RequestError unless 0 <= num_correct <= num_queries and num_queries >= 1.
    """
    if num_queries < 1 or not 0 <= num_correct <= num_queries:
        raise RequestError(f"need 0 <= num_correct <= num_queries >= 1, got {num_correct} of {num_queries}")
    z2 = float(special.ndtri(upper_tail(level))) ** 2
    share = num_correct / num_queries
    scale = num_queries / (num_queries + z2)
    centre = scale * (share + z2 / (2 * num_queries))
    half = scale * math.sqrt(z2 * (share * (1 - share) + z2 / (4 * num_queries)) / num_queries)
    # at 0 and n the bound is exactly 0 or 1; the square root misses it by a rounding
    low = 0.0 if num_correct == 0 else centre - half
    high = 1.0 if num_correct == num_queries else centre + half
    return Interval(share, low, high, level)


def unseen_error(num_queries: float) -> float:
    """Standard error of what none of n queries showed, z/(n + z²) with z = 1.96: then the half-width z²/(n + z²) is
    that of Wilson's interval of a share of 0, and of Tango's of a difference of 0. n may be an effective number."""
    return UNSEEN_Z / (num_queries + UNSEEN_Z**2)


def unseen_half(num_queries: float, level: float = 0.95) -> float:
    """Half-width, at any level, of an interval over n queries whose answers are all equal: z²/(n + z²), Wilson's."""
    square = float(special.ndtri(upper_tail(level))) ** 2
    return square / (num_queries + square)


def side_of(interval: Interval, value: float) -> int:
    """1 where the whole interval lies above `value`, -1 where below, 0 where it holds the value or is NaN."""
    return int(interval.low > value) - int(interval.high < value)


def clustered_se(correct: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> float:
    """Standard error of the mean of correct [..., Q] over everything, clustered by query.

    The answers to one query, 0 or 1 or grades in 0..1, in many contexts move together: only distinct queries count as
    independent.
    `weights` [Q] says how often each counts in the mean; a query of any weight is one cluster. NaN for one query. Cost:
    O(size of correct).
    """
    items = finite_items(correct)
    num_queries = items.shape[-1]
    if num_queries < 2:
        return math.nan
    per_query = items.reshape(-1, num_queries).mean(axis=0, dtype=np.float64)
    weight = query_weights(weights, num_queries)
    residual = weight * (per_query - np.average(per_query, weights=weight))
    return float(np.sqrt(num_queries / (num_queries - 1) * np.sum(residual**2)) / weight.sum())


def skewness_warnings(accuracy: npt.ArrayLike) -> list[str]:
    """A line each if the means of sets or of permutations look skewed: |G1| above twice its Gaussian standard error.

    One-sided effects, such as a few orders that collapse, make `generalized_interval` and `effect_interval` too narrow.
    At 10 x 10 it warns of one table in ten under Gaussian effects, of half under one-sided exponential ones. Fewer
    than 3 levels say nothing.
    """
    matrix = accuracy_matrix(accuracy)
    means = {"set": matrix.mean(axis=1), "permutation": matrix.mean(axis=0)}
    return [
        f"{name} means are skewed (G1 = {skewness:+.1f} over {len(values)}): the generalised intervals, those free of "
        "item noise too, are too narrow here; quote r with the jackknife"
        for name, values in means.items()
        if abs(skewness := _skewness(values)) > 2 * _skewness_se(len(values))
    ]


def needed_design(
    accuracy: npt.ArrayLike, ratio: float | None = None, power: float = 0.8, level: float = 0.95
) -> NeededDesign | None:
    """The smallest S = P that tells r from 1 with the same queries; None if r is 1 or S = P would exceed 100,000.

    Calibrated for what a report decides, under Gaussian effects: that the jackknife interval of r excludes 1, and that
    of the generalised method agrees. The standard error of log r is that of the delta method, Var(MS) = 2·E[MS]²/df for
    each of the three mean squares of accuracy [S, P], their expectations moved to the larger design through its
    variance components (clipped at 0). |log r| has to be z_power + t of it, t the jackknife's quantile with S - 1
    degrees of freedom, times 1 + 2.15·(1 - w)/S, where w is the interaction's share √(σ²_SP/(σ²_P + σ²_SP) ·
    σ²_SP/(σ²_S + σ²_SP)): what the jackknife interval is too wide by, fitted to simulated power by
    benchmarks/needed_design.py, which also prints the power that comes of it (docs/statistics.md).

    With `ratio` given, the asked-for r takes the place of the estimated one. It is meant for a true r, not for the
    error of the estimate at hand; effects with long tails or skewed ones need more. Raises RequestError unless
    S, P >= 2, ratio > 0 and 0 < power < 1.
    """
    matrix = _crossed_matrix(accuracy)
    if ratio is not None and not (ratio > 0 and math.isfinite(ratio)):
        raise RequestError(f"ratio must be positive and finite, got {ratio}")
    variances = _two_way_components(matrix)
    order, selection = variances["P"] + variances["E"], variances["S"] + variances["E"]
    if min(order, selection) <= 0:
        return None
    target = math.sqrt(selection / order) if ratio is None else ratio
    if not 0 < power < 1:
        raise RequestError(f"power must lie between 0 and 1, got {power}")
    size = _smallest_size(variances, order, selection, abs(math.log(target)), upper_tail(level), power)
    return None if size is None else NeededDesign(target, size, size, power, level)


def _crossed_matrix(accuracy: npt.ArrayLike, least: int = 2) -> FloatArray:
    matrix = accuracy_matrix(accuracy)
    if min(matrix.shape) < least:
        shape = " x ".join(map(str, matrix.shape))
        raise RequestError(f"this needs at least {least} sets and {least} permutations, got {shape}")
    return matrix


def two_way_squares(matrix: FloatArray) -> tuple[dict[str, float], dict[str, int]]:
    """Sums of squares and degrees of freedom of sets, permutations and residual of [S, P]."""
    num_sets, num_permutations = matrix.shape
    centred = matrix - matrix[0, 0]  # equal accuracies become exact zeros
    centred = centred - centred.mean()
    rows, columns = centred.mean(axis=1), centred.mean(axis=0)
    residual = centred - rows[:, None] - columns
    squares = {
        "S": num_permutations * float(rows @ rows),
        "P": num_sets * float(columns @ columns),
        "E": float(np.sum(residual**2)),
    }
    s, p = num_sets - 1, num_permutations - 1
    return squares, {"S": s, "P": p, "E": s * p}


def _two_way_components(matrix: FloatArray) -> dict[str, float]:
    """Variance components of accuracy [S, P], clipped at 0."""
    squares, degrees = two_way_squares(matrix)
    mean_square = {effect: squares[effect] / degrees[effect] for effect in squares}
    return {
        "S": max((mean_square["S"] - mean_square["E"]) / matrix.shape[1], 0.0),
        "P": max((mean_square["P"] - mean_square["E"]) / matrix.shape[0], 0.0),
        "E": mean_square["E"],
    }


def _smallest_size(
    variances: dict[str, float], order: float, selection: float, distance: float, tail: float, power: float
) -> int | None:
    """Least n = S = P at which `distance` on the log scale is found with `power`, by bisection."""
    own = 1 - variances["E"] / math.sqrt(order * selection)

    def enough(size: int) -> bool:
        wanted = float(special.stdtrit(size - 1, tail) + special.ndtri(power)) * (1 + _JACKKNIFE_EXCESS * own / size)
        return distance >= wanted * _log_ratio_se(variances, order, selection, size)

    low, high = 3, _MAX_DESIGN
    if not enough(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low


def _log_ratio_se(variances: dict[str, float], order: float, selection: float, size: int) -> float:
    """Delta-method standard error of log r = ½·log(selection variance) - ½·log(order variance) at S = P = size."""
    expected_s, expected_p = (variances["E"] + size * variances[effect] for effect in ("S", "P"))
    slope_s, slope_p = 0.5 / (size * selection), -0.5 / (size * order)
    slope_e = (size - 1) * (slope_s + slope_p)
    variance = 2 / (size - 1) * ((slope_s * expected_s) ** 2 + (slope_p * expected_p) ** 2)
    return math.sqrt(variance + 2 / (size - 1) ** 2 * (slope_e * variances["E"]) ** 2)


def _drawn(square: float, degrees: float, draws: int, seed: int, purpose: str) -> FloatArray:
    """Draws of SS / χ²(df), keyed by (seed, purpose) and so independent of what else is drawn."""
    generator = np.random.default_rng([seed, *purpose.encode()])
    return np.asarray(square / generator.chisquare(degrees, size=draws))


def _root_intervals(
    estimates: tuple[float, float, float], variances: tuple[FloatArray, FloatArray], level: float
) -> SensitivityIntervals:
    order, selection = (np.sqrt(np.maximum(variance, 0.0)) for variance in variances)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = selection / order
    return SensitivityIntervals(
        *(quantile_interval(*pair, level) for pair in zip(estimates, (order, selection, ratio), strict=True))
    )


_NO_SPREAD = 1e-9  # of accuracies or of r; less is rounding


def quantile_interval(estimate: float, values: FloatArray, level: float) -> Interval:
    """Equal-tailed interval; an undefined draw counts as 0 below and as infinite above.

    Where both ends are 0, but for rounding, nothing is bounded: no effect was seen, which is not that there is none.
    Nor is it by an interval from 0 to infinity.
    """
    tail = 1 - upper_tail(level)
    low = np.quantile(np.nan_to_num(values, nan=0.0, posinf=np.inf), tail, method="inverted_cdf")
    high = np.quantile(np.nan_to_num(values, nan=np.inf, posinf=np.inf), 1 - tail, method="inverted_cdf")
    is_open = math.isinf(high) and (low <= _NO_SPREAD or math.isinf(low))
    if is_open or max(abs(low), abs(high)) <= _NO_SPREAD:
        return Interval(estimate, math.nan, math.nan, level)
    return Interval(estimate, float(low), float(high), level)


def upper_tail(level: float) -> float:
    """Upper tail probability of a two-sided interval."""
    if not 0 < level < 1:
        raise RequestError(f"level must lie between 0 and 1, got {level}")
    return (1 + level) / 2


def _leave_one_out_log_ratios(matrix: FloatArray, axis: int, estimator: Estimator) -> FloatArray:
    ratios = [sensitivity_ratio(np.delete(matrix, i, axis), estimator) for i in range(matrix.shape[axis])]
    return np.array([math.log(ratio) if ratio > 0 else math.nan for ratio in ratios])


def _jackknife_variance(values: FloatArray) -> float:
    return (len(values) - 1) * float(values.var())


def _skewness(values: FloatArray) -> float:
    """Adjusted Fisher-Pearson skewness G1; 0 for fewer than 3 values or for equal ones."""
    num = len(values)
    centred = values - values.mean()
    spread = float(np.mean(centred**2))
    if num < 3 or spread <= np.finfo(np.float64).eps ** 2:
        return 0.0
    third = float(np.mean((centred / math.sqrt(spread)) ** 3))
    return math.sqrt(num * (num - 1)) / (num - 2) * third


def _skewness_se(num: int) -> float:
    """Standard error of G1 for Gaussian values; infinite below 3."""
    return math.sqrt(6 * num * (num - 1) / ((num - 2) * (num + 1) * (num + 3))) if num >= 3 else math.inf
