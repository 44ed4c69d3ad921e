"""Where a curve over the number of demonstrations goes flat: paired differences between k and k', and equivalence.

That a difference is not significant does not show that there is none. A plateau is claimed only where two one-sided
tests reject every difference beyond a stated margin (Schuirmann 1987); what neither test settles stays undecided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from iclperm.errors import RequestError
from iclperm.stats.components import Effects, variance_components
from iclperm.stats.convergence import MeanError, degrees_for_tests, mean_error
from iclperm.stats.intervals import Interval, bounded
from iclperm.stats.paired import holm
from iclperm.stats.sensitivity import FloatArray, finite_items, query_weights
from iclperm.stats.verdicts import (
    LEVEL,
    MARGIN,
    STATES,
    State,
    Verdicts,
    normal,
    paired_difference,
    paired_sums,
    paired_tests,
    shares_of,
    states_of,
)
from iclperm.stats.winners_curse import order_noise

_POWER = 0.8


class CurveError(NamedTuple):
    """How sure each point of the averaged curve is; arrays [K] or [K, 3]."""

    mean: FloatArray
    """µ_k of arXiv 2503.22002."""
    se: FloatArray
    """Standard error of µ_k for fresh draws of the axes in `covers`."""
    se_held: FloatArray
    """For fresh sets and permutations on these very queries; 0 at k = 0."""
    degrees: FloatArray
    low: FloatArray
    high: FloatArray
    """Student's interval of µ_k at `level`."""
    level: float
    sources: FloatArray
    """[K, 3] variance of µ_k due to sets, permutations and queries, interactions with queries counted as queries and
    of sets with permutations as permutations."""
    order_noise: FloatArray
    """What finite queries alone add to the standard deviation over permutations, √((σ²_PI + σ²_SPI)/Q)."""
    covers: tuple[tuple[str, ...], ...]
    """[K] the axes that the error covers; at k = 0 queries only, as all cells are one context."""


class Overall(NamedTuple):
    """The averaged curve between two numbers of demonstrations, for fresh sets, permutations and queries."""

    error: MeanError
    interval: Interval
    """Of the mean difference, at 1 - 2·level: it lies within the margin exactly where equivalence is shown."""
    p_equivalent: float
    p_different: float
    state: State


class Plateau(NamedTuple):
    """What happens between two numbers of demonstrations, in every trajectory and on average."""

    first: int
    """The smaller number of demonstrations."""
    last: int
    margin: float
    level: float
    difference: FloatArray
    """[S, P] accuracy at `last` minus accuracy at `first`."""
    se: FloatArray
    """[S, P] its standard error over queries."""
    p_equivalent: FloatArray
    """[S, P] of the two one-sided tests, Holm-adjusted over the trajectories."""
    p_different: FloatArray
    """[S, P] of no difference, Holm-adjusted over the trajectories."""
    state: npt.NDArray[np.uint8]
    """[S, P] see `STATES`; a difference that is shown to lie within the margin is equivalent."""
    shares: FloatArray
    """[3] of the trajectories in each of `STATES`."""
    single_shares: FloatArray
    """[3] the same without Holm's adjustment, as if each trajectory were the only one; NaN of `decided` ones."""
    overall: Overall
    true_std: float
    """Standard deviation over trajectories of the difference, free of item noise, √(σ²_S + σ²_P + σ²_SP); NaN for one
    trajectory or query."""
    true_within: float
    """Share of trajectories within the margin if differences are Gaussian with the mean and `true_std` found."""
    resolvable: float
    """The margin within which a typical trajectory without any difference would be shown to be equivalent four times in
    five, one test at a time. A smaller margin leaves most trajectories undecided, whatever is true."""

    def decided(self, found: Verdicts) -> Plateau:
        """This one with verdicts of trajectories that were each asked until it had one."""
        scale, known = normal(1 - self.level) + normal((1 + _POWER) / 2), found.se[~np.isnan(found.se)]
        return self._replace(
            difference=found.difference,
            se=found.se,
            p_equivalent=found.p_equivalent,
            p_different=found.p_different,
            state=found.state,
            shares=shares_of(found.state),
            single_shares=np.full(len(STATES), np.nan),
            resolvable=float(scale * np.median(known)) if known.size else math.nan,
        )

    @property
    def num_queries_needed(self) -> float:
        """How many times the queries of this run would resolve the margin; NaN where unknown."""
        return (self.resolvable / self.margin) ** 2


class Steps(NamedTuple):
    """Rises and falls between neighbouring numbers of demonstrations, arrays [S, P] of shares of the K - 1 steps."""

    up: FloatArray
    down: FloatArray
    up_beyond_noise: FloatArray
    """Rises that a test at 5 % finds to be more than noise; where nothing changes, chance alone makes one step in forty
    look so."""
    down_beyond_noise: FloatArray
    never_down: float
    """Share of trajectories that never lose accuracy."""
    never_down_beyond_noise: float


class Arrival(NamedTuple):
    """When a trajectory comes within the margin of its last accuracy, in demonstrations."""

    first: npt.NDArray[np.int64]
    """[S, P] the first k that is within the margin; item noise makes it earlier or later by chance."""
    stays: npt.NDArray[np.int64]
    """[S, P] the first k from which on every k is."""


class OneShot(NamedTuple):
    """One demonstration against none, for each that stands first in some permutation; arrays [N]."""

    rows: npt.NDArray[np.int64]
    """The demonstrations, by the numbers given; ascending."""
    zero_shot: float
    gain: FloatArray
    """Accuracy with this one demonstration minus accuracy with none."""
    se: FloatArray
    """Standard error over queries (see `PairedDifference`)."""
    p: FloatArray
    """Of no gain, by Student's t with the effective number of queries less one."""
    p_holm: FloatArray
    """Adjusted over the demonstrations."""
    true_std: float
    """Standard deviation of the gain over demonstrations, free of item noise; 0 where noise explains it all."""

    @property
    def num_better(self) -> int:
        """Demonstrations that help, by Holm's test at 5 %."""
        return int(np.count_nonzero((self.p_holm <= LEVEL) & (self.gain > 0)))

    @property
    def num_worse(self) -> int:
        """Demonstrations that hurt, by Holm's test at 5 %."""
        return int(np.count_nonzero((self.p_holm <= LEVEL) & (self.gain < 0)))


def curve_error(
    correct: npt.ArrayLike,
    weights: npt.ArrayLike | None = None,
    *,
    shots: Sequence[int],
    level: float = 0.95,
    classes: npt.ArrayLike | None = None,
) -> CurveError:
    """Standard error of µ_k that is honest about sets, permutations and queries, at every k (`stats.mean_error`).

    correct: [S, P, K, Q] 0 or 1, usable queries only; weights [Q]; shots [K]; classes [Q], by which item noise is told
    from what orders do (`order_noise`). At k = 0 all cells are one context, so
    only queries count. Raises RequestError on shapes that do not fit. Cost: O(S·P·K·Q).
    """
    items = _four_axes(correct, shots)
    errors = [
        mean_error(items[:1, :1, place] if k == 0 else items[:, :, place], weights) for place, k in enumerate(shots)
    ]
    intervals = [error.interval(level) for error in errors]
    weight, num_p = query_weights(weights, items.shape[3]), items.shape[1]
    can_tell = num_p > 1 and np.count_nonzero(weight) > 1
    noise = [
        order_noise(items[:, :, place], weight, classes).sum(axis=1).mean() / (num_p - 1) if k and can_tell else 0.0
        for place, k in enumerate(shots)
    ]
    return CurveError(
        mean=np.array([error.mean for error in errors]),
        se=np.array([error.se for error in errors]),
        se_held=np.array([error.se_held for error in errors]),
        degrees=np.array([error.degrees for error in errors]),
        low=np.array([interval.low for interval in intervals]),
        high=np.array([interval.high for interval in intervals]),
        level=level,
        sources=np.array([_sources(error.parts) for error in errors]),
        order_noise=np.sqrt(noise),
        covers=tuple(error.covers for error in errors),
    )


def plateau(
    correct: npt.ArrayLike,
    weights: npt.ArrayLike | None = None,
    *,
    shots: Sequence[int],
    first: int,
    last: int | None = None,
    margin: float = MARGIN,
    level: float = LEVEL,
    classes: npt.ArrayLike | None = None,
) -> Plateau:
    """Tests between two numbers of demonstrations in every trajectory (set, permutation), and on average.

    Args:
        correct: [S, P, K, Q] 0 or 1, usable queries only.
        weights: [Q] how often each query counts.
        shots: [K] numbers of demonstrations, ascending.
        first, last: two of them, by default up to the largest.
        margin: differences of accuracy up to this are no difference that matters (see `MARGIN`).
        level: of each test; Holm's adjustment keeps it over the S·P trajectories of a test.
        classes: [Q] of the queries, for the spread free of item noise (`variance_components`).

    A trajectory is tested for the queries of its kind, its demonstrations taken as given; the average for fresh sets,
    permutations and queries, clustered by all three (`stats.mean_error`). Raises RequestError on shapes that do not
    fit, a k that was not run, or a margin not above 0. Cost: O(S·P·Q).
    """
    items = _four_axes(correct, shots)
    end = shots[-1] if last is None else last
    places = [_place(shots, k) for k in (first, end)]
    if first >= end:
        raise RequestError(f"a plateau needs two numbers of demonstrations in ascending order, got {first} and {end}")
    if not margin > 0:
        raise RequestError(f"margin must be above 0, got {margin}")
    one, other = items[:, :, places[0]], items[:, :, places[1]]
    paired = paired_difference(one, other, weights)
    equivalent, different = paired_tests(paired, margin)
    adjusted = holm(equivalent), holm(different)
    state, single = states_of(*adjusted, level), states_of(equivalent, different, level)
    overall = _average(one, other, weights, margin, level)
    scale = normal(1 - level) + normal((1 + _POWER) / 2)
    by_class = overall.error
    if classes is not None:
        by_class = _by_class(overall.error, other.astype(np.float64) - one, weights, classes)
    spread = _true_std(by_class)
    return Plateau(
        first=first,
        last=end,
        margin=margin,
        level=level,
        difference=paired.difference,
        se=paired.se,
        p_equivalent=adjusted[0],
        p_different=adjusted[1],
        state=state,
        shares=shares_of(state),
        single_shares=shares_of(single),
        overall=overall,
        true_std=spread,
        true_within=_within(overall.error.mean, spread, margin),
        resolvable=float(scale * np.median(paired.se)),
    )


def averages_to_last(
    correct: npt.ArrayLike,
    weights: npt.ArrayLike | None = None,
    *,
    shots: Sequence[int],
    margin: float = MARGIN,
    level: float = LEVEL,
) -> tuple[Overall, ...]:
    """What happens on average between every k and the largest one, [K - 1]; each as `Plateau.overall`, one test at a
    time. Cost: O(S·P·K·Q)."""
    items = _four_axes(correct, shots)
    return tuple(
        _average(items[:, :, place], items[:, :, -1], weights, margin, level) for place in range(len(shots) - 1)
    )


def _average(
    one: npt.NDArray[Any], other: npt.NDArray[Any], weights: npt.ArrayLike | None, margin: float, level: float
) -> Overall:
    """The tests of answers [S, P, Q] at two numbers of demonstrations, on average."""
    error = mean_error(other.astype(np.float64) - one, weights)
    return overall_of(error._replace(degrees=degrees_for_tests(error, len(one))), margin, level)


def plateau_shares(
    correct: npt.ArrayLike,
    weights: npt.ArrayLike | None = None,
    *,
    shots: Sequence[int],
    margin: float = MARGIN,
    level: float = LEVEL,
) -> FloatArray:
    """Share of the trajectories in each of `STATES` between every k and the largest one, [K - 1, 3].

    As `Plateau.shares`: Holm's adjustment is over the trajectories of one k. Cost: O(S·P·K·Q).
    """
    items = _four_axes(correct, shots)
    shares = np.full((len(shots) - 1, len(STATES)), np.nan)
    for place in range(len(shots) - 1):
        paired = paired_difference(items[:, :, place], items[:, :, -1], weights)
        equivalent, different = paired_tests(paired, margin)
        shares[place] = shares_of(states_of(holm(equivalent), holm(different), level))
    return shares


def steps(correct: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> Steps:
    """Rises and falls of each trajectory of correct [S, P, K, Q] (usable queries only) between neighbouring k.

    Raises RequestError for fewer than two k. Cost: O(S·P·K·Q).
    """
    items = finite_items(correct)
    if items.ndim != 4 or items.shape[2] < 2:
        raise RequestError(f"steps need correct of shape [S, P, K, Q] with K >= 2, got {list(items.shape)}")
    pairs = [paired_difference(items[:, :, k], items[:, :, k + 1], weights) for k in range(items.shape[2] - 1)]
    change = np.stack([pair.difference for pair in pairs], axis=-1)
    bound = normal(1 - LEVEL / 2)
    z = np.stack([pair.centre / pair.se for pair in pairs], axis=-1)
    known = not np.isnan(z).any()
    up, down = np.where(known, (z > bound).mean(axis=-1), np.nan), np.where(known, (z < -bound).mean(axis=-1), np.nan)
    return Steps(
        up=(change > 0).mean(axis=-1),
        down=(change < 0).mean(axis=-1),
        up_beyond_noise=up,
        down_beyond_noise=down,
        never_down=float((change >= 0).all(axis=-1).mean()),
        never_down_beyond_noise=float((down == 0).mean()) if known else math.nan,
    )


def arrival(accuracy: npt.ArrayLike, shots: Sequence[int], margin: float = MARGIN) -> Arrival:
    """The k at which each trajectory of accuracy [S, P, K] first comes, and stays, within `margin` of its last value.

    Raises RequestError if shots and accuracy do not fit. Cost: O(S·P·K).
    """
    values = np.asarray(accuracy, dtype=np.float64)
    if values.ndim != 3 or values.shape[2] != len(shots):
        raise RequestError(f"accuracy must have shape [S, P, {len(shots)}], got {list(values.shape)}")
    counts = np.asarray(shots, dtype=np.int64)
    # differences of shares of the same queries: allow a rounding, or 0.7 - 0.68 would be above 0.02
    near = np.abs(values - values[:, :, -1:]) <= margin + 1e-12
    for_good = np.logical_and.accumulate(near[:, :, ::-1], axis=2)[:, :, ::-1]
    return Arrival(counts[near.argmax(axis=2)], counts[for_good.argmax(axis=2)])


def one_shot(
    zero: npt.ArrayLike, one: npt.ArrayLike, rows: npt.ArrayLike, weights: npt.ArrayLike | None = None
) -> OneShot:
    """One demonstration against none, for every demonstration that stands first somewhere.

    Args:
        zero: [Q] answers without demonstrations, usable queries only.
        one: [S, P, Q] answers at k = 1.
        rows: [S, P] which demonstration stands first; cells with the same one are the same context, and are averaged.
        weights: [Q] how often each query counts.

    Raises RequestError on shapes that do not fit. Cost: O(S·P·Q). arXiv 2503.22002, section 5.1.
    """
    none, single, names = finite_items(zero), finite_items(one), np.asarray(rows)
    if single.ndim != 3 or none.shape != single.shape[-1:] or names.shape != single.shape[:2]:
        raise RequestError(
            f"need zero [Q], one [S, P, Q] and rows [S, P], got {list(none.shape)}, {list(single.shape)} and "
            f"{list(names.shape)}"
        )
    weight = query_weights(weights, len(none))
    distinct, place = np.unique(names, return_inverse=True)
    change = np.zeros((len(distinct), len(none)))
    np.add.at(change, place.ravel(), single.reshape(-1, len(none)) - none.astype(np.float64))
    change /= np.bincount(place.ravel())[:, None]
    paired = paired_sums(change @ weight, change @ weight**2, change**2 @ weight**2, weight)
    # Student's t, as Holm's adjustment over many demonstrations looks far into the tails.
    effective = weight.sum() ** 2 / np.sum(weight**2)
    different = np.asarray(2 * special.stdtr(max(effective - 1, 1), -np.abs(paired.centre) / paired.se))
    error = mean_error(change[None], weights)
    return OneShot(
        rows=distinct.astype(np.int64),
        zero_shot=float(np.average(none, weights=weight)),
        gain=paired.difference,
        se=paired.se,
        p=different,
        p_holm=holm(different),
        true_std=_true_std(error),
    )


def _four_axes(correct: npt.ArrayLike, shots: Sequence[int]) -> npt.NDArray[Any]:
    items = finite_items(correct)
    if items.ndim != 4 or items.shape[2] != len(shots) or list(shots) != sorted(set(shots)):
        raise RequestError(
            f"need correct of shape [S, P, K, Q] and K ascending shots, got {list(items.shape)} and {list(shots)}"
        )
    return items


def _place(shots: Sequence[int], k: int) -> int:
    if k not in shots:
        raise RequestError(f"k = {k} was not run; choose from {', '.join(map(str, shots))}")
    return list(shots).index(k)


def overall_of(error: MeanError, margin: float = MARGIN, level: float = LEVEL) -> Overall:
    """Both tests of a mean difference, and its interval at 1 - 2·level."""
    interval = bounded(error.interval(1 - 2 * level), "difference")
    if math.isnan(error.se):
        return Overall(error, interval, math.nan, math.nan, "undecided")
    distance = abs(error.mean)
    equivalent = float(special.stdtr(error.degrees, (distance - margin) / error.se))
    different = float(2 * special.stdtr(error.degrees, -distance / error.se))
    state = STATES[int(states_of(np.array(equivalent), np.array(different), level))]
    return Overall(error, interval, equivalent, different, state)


def _by_class(error: MeanError, change: FloatArray, weights: npt.ArrayLike | None, classes: npt.ArrayLike) -> MeanError:
    """With the components of queries that were drawn class by class; as it is where too few tell them."""
    try:
        return error._replace(sigma2=variance_components(change, weights=weights, classes=classes).sigma2)
    except RequestError:
        return error


def _true_std(error: MeanError) -> float:
    """Over trajectories, item noise taken out; NaN where there is one trajectory or one query."""
    if "queries" not in error.covers or len(error.covers) < 2:
        return math.nan
    return math.sqrt(max(error.sigma2.S + error.sigma2.P + error.sigma2.SP, 0.0))


def _within(mean: float, spread: float, margin: float) -> float:
    if not spread > 0:
        return math.nan if math.isnan(spread) else float(abs(mean) <= margin)
    return float(special.ndtr((margin - mean) / spread) - special.ndtr((-margin - mean) / spread))


def _sources(parts: Effects) -> tuple[float, float, float]:
    return parts.S, parts.P + parts.SP, parts.I + parts.SI + parts.PI + parts.SPI
