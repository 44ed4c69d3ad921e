"""The sizes that a wanted precision takes: the cheapest sets, permutations and queries, and when a run may stop.

An interval's half-width is a function of the seven mean squares of the crossed design, and their expectations follow
from the variance components at any sizes: so the sizes at which it will be short enough can be looked for without an
answer. Intervals of effects are replaced by their closed form for that (modified large sample, Graybill & Wang 1980;
Ting et al. 1990), which agrees with the generalised ones to a few per cent; what is shown is simulated with the latter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from iclperm.errors import RequestError
from iclperm.stats.components import Effects, VarianceComponents, variance_components
from iclperm.stats.convergence import mean_error
from iclperm.stats.incomplete import filled
from iclperm.stats.intervals import UNSEEN_Z, Interval, bounded, effect_interval, unseen_error, upper_tail
from iclperm.stats.sensitivity import FloatArray
from iclperm.study.precision import Quantity

LEVEL = 0.95
"""What is promised of an interval."""
LOOK_LEVEL = 0.98
"""Level at which the interval of a run that stops by itself is computed, so that it holds the truth at `LEVEL`: a run
stops rather where its interval came out short (benchmarks/precision_coverage.py)."""
CHANCE = 0.8
"""Chance to be short enough with which the next size is chosen."""
_CHANCES = (0.5, 0.8, 0.95)
_MOST_GROWTH, _LEAST_GROWTH = 6.0, 1.2
_FIRST = (8, 8, 64)
_PER_OCTAVE = 5
_SIMULATED, _DRAWS = 400, 1_000
_FEW = 100.0


class StudySizes(NamedTuple):
    """How large a crossed design is."""

    sets: int
    permutations: int
    queries: int


LEAST = StudySizes(4, 4, 16)
"""The smallest design that is proposed: fewer levels than these do not show whether effects are Gaussian at all."""


class TokenCosts(NamedTuple):
    """What a design costs in distinct tokens, about."""

    ordering: float
    """Tokens that one more ordering adds: what of its demonstrations no other has."""
    query: float
    """Tokens of a query under one ordering, at all numbers of shots together."""

    def of(self, sets: Any, permutations: Any, queries: Any) -> Any:
        """Of S sets, P permutations and Q queries, numbers or arrays."""
        return sets * permutations * (self.ordering + self.query * queries)


class SizeChoice(NamedTuple):
    """A design that may reach the precision, and what is to be expected of it."""

    sizes: StudySizes
    half_width: float
    """Median of the half-width of the 95 % interval, the components taken as known."""
    chance: float
    """Share of such designs whose interval is short enough."""


class Look(NamedTuple):
    """What the answers so far say of a quantity."""

    interval: Interval
    sigma2: Effects
    """Components of what it is a quantity of: a score, or of a difference that of two scores."""

    @property
    def half_width(self) -> float:
        """Of the interval; NaN where nothing bounds it."""
        return (self.interval.high - self.interval.low) / 2


def expected_squares(sigma2: Effects, sets: Any, permutations: Any, queries: Any) -> Effects:
    """Expected mean squares of a crossed design (Searle, Casella & McCulloch 1992) whose components, clipped at 0, are
    these; the inverse of `stats.components.solve_components`. Sizes are numbers or arrays that fit together."""
    c = Effects(*(np.maximum(value, 0.0) for value in sigma2))
    si, pi, sp = permutations * c.SI, sets * c.PI, queries * c.SP
    return Effects(
        S=c.SPI + si + sp + permutations * queries * c.S,
        P=c.SPI + pi + sp + sets * queries * c.P,
        I=c.SPI + si + pi + sets * permutations * c.I,
        SP=c.SPI + sp,
        SI=c.SPI + si,
        PI=c.SPI + pi,
        SPI=c.SPI + 0 * si,
    )


def half_width(
    quantity: Quantity,
    sigma2: Effects,
    sets: Any,
    permutations: Any,
    queries: Any,
    *,
    level: float = LEVEL,
    chance: float = 0.5,
) -> Any:
    """Half-width that the interval of a quantity stays within with about this ``chance``, in closed form.

    Args:
        quantity: an effect, r, or ``accuracy`` and ``difference``, both of which are means.
        sigma2: variance components, taken as known; those below 0 count as 0.
        sets, permutations, queries: 2 or more, numbers or arrays that fit together.

    Effects: the square is a sum of c·MS; its bounds are those of Graybill & Wang (1980) and Ting et al. (1990) without
    cross terms, and half the distance of their roots is returned. r: Student's of its logarithm, by the delta method,
    with the degrees of freedom of the shorter of both axes. Means: Student's, as `stats.mean_error`. An estimate moves
    by its own relative standard error, which the half-width follows: at a ``chance`` above one half that much is added.
    Infinite where nothing is bounded. Cost: O(sizes), and a quantile of χ² for each different number of degrees.
    """
    sizes = tuple(np.asarray(size, np.float64) for size in (sets, permutations, queries))
    squares, degrees = expected_squares(sigma2, *sizes), _degrees(*sizes)
    order, selection = _order_slopes(*sizes), _selection_slopes(*sizes)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if quantity in ("accuracy", "difference"):
            slopes = {name: sign / math.prod(sizes) for name, sign in _SIGNS.items()}
            estimate, variance = _of(slopes, squares), _variance(slopes, squares, degrees)
            freedom = 2 * estimate**2 / variance
            error = np.maximum(np.sqrt(estimate), UNSEEN_Z / (sizes[2] + UNSEEN_Z**2))
            half = special.stdtrit(np.minimum(freedom, 1e6), upper_tail(level)) * error
            relative = np.sqrt(variance) / (2 * estimate)
        elif quantity == "r":
            top, bottom = _of(selection, squares), _of(order, squares)
            slopes = {
                name: (selection.get(name, 0.0) / top - order.get(name, 0.0) / bottom) / 2
                for name in {*selection, *order}
            }
            relative = np.sqrt(_variance(slopes, squares, degrees))
            quantile = special.stdtrit(np.minimum(sizes[0], sizes[1]) - 1, upper_tail(level))
            half = np.sqrt(top / bottom) * np.sinh(quantile * relative)
            relative = 2 * relative
        else:
            slopes = order if quantity == "order_effect" else selection
            estimate = _of(slopes, squares)
            up, down = _distances(slopes, squares, degrees, level)
            half = (np.sqrt(estimate + up) - np.sqrt(np.maximum(estimate - down, 0.0))) / 2
            relative = np.sqrt(_variance(slopes, squares, degrees)) / (2 * np.maximum(estimate, up / 4))
        found = half * (1 + special.ndtri(chance) * np.minimum(relative, 1.0))
    return np.where(np.isnan(found), np.inf, found)


def simulated_half_widths(
    quantity: Quantity,
    sigma2: Effects,
    sizes: StudySizes,
    *,
    level: float = LEVEL,
    num: int = _SIMULATED,
    seed: int = 0,
) -> FloatArray:
    """[num] half-widths of the intervals of so many designs of a size, Gaussian with these components.

    Mean squares are drawn as E[MS]·χ²(df)/df, and the generalised interval of each as `stats.effect_interval` does, or
    Student's of a mean. Infinite where an interval has no end. Cost: O(num · 1,000), some 20 ms.
    """
    generator = np.random.default_rng([seed, *quantity.encode()])
    shape = tuple(map(float, sizes))
    squares, degrees = expected_squares(sigma2, *shape), _degrees(*shape)
    drawn = {
        name: getattr(squares, name) * generator.chisquare(df, num) / df
        for name, df in zip(Effects._fields, degrees, strict=True)
    }
    if quantity in ("accuracy", "difference"):
        terms = {name: sign * drawn[name] / math.prod(shape) for name, sign in _SIGNS.items()}
        variance = np.maximum(sum(terms.values()), np.maximum(terms["S"], 0.0) + 1e-300)
        spread = sum(term**2 / getattr(degrees, name) for name, term in terms.items())
        freedom = np.maximum(variance**2 / spread, min(degrees))
        error = np.maximum(np.sqrt(variance), unseen_error(shape[2]))
        return np.asarray(special.stdtrit(freedom, upper_tail(level)) * error)
    pivots = {name: df / generator.chisquare(df, _DRAWS) for name, df in zip(Effects._fields, degrees, strict=True)}

    def squared(slopes: dict[str, Any]) -> FloatArray:
        terms = [slope * np.outer(drawn[name], pivots[name]) for name, slope in slopes.items()]
        return np.asarray(np.maximum(np.sum(terms, axis=0), 0.0))

    order, selection = _order_slopes(*shape), _selection_slopes(*shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        if quantity == "r":
            values = np.sqrt(squared(selection) / squared(order))
        else:
            values = np.sqrt(squared(order if quantity == "order_effect" else selection))
    tail = 1 - upper_tail(level)
    low = np.quantile(np.nan_to_num(values, nan=0.0, posinf=np.inf), tail, axis=1, method="inverted_cdf")
    high = np.quantile(np.nan_to_num(values, nan=np.inf, posinf=np.inf), 1 - tail, axis=1, method="inverted_cdf")
    return np.asarray(np.where(np.isfinite(high) & (high > 0), high - np.where(np.isfinite(low), low, 0), np.inf) / 2)


def cheapest(
    quantity: Quantity,
    sigma2: Effects,
    wanted: float,
    costs: TokenCosts,
    most: StudySizes,
    *,
    least: StudySizes = LEAST,
    chance: float = CHANCE,
    level: float = LEVEL,
) -> StudySizes | None:
    """The design with the fewest tokens whose half-width stays within ``wanted`` with about this chance.

    Sizes from ``least`` to ``most`` on a grid of five to the doubling, by the closed form (`half_width`); of equally
    cheap ones the first. None where even ``most`` does not. Raises RequestError unless ``wanted`` is above 0. Cost:
    O(grid), some ms.
    """
    if not wanted > 0:
        raise RequestError(f"the half-width must be above 0, got {wanted}")
    grid = _grid(least, most)
    fits = half_width(quantity, sigma2, *grid, level=level, chance=chance) <= wanted
    tokens = np.where(fits, costs.of(*grid), np.inf)
    return _at(grid, int(np.argmin(tokens))) if fits.any() else None


def size_choices(
    quantity: Quantity, sigma2: Effects, wanted: float, costs: TokenCosts, most: StudySizes, *, seed: int = 0
) -> list[SizeChoice]:
    """A handful of designs that may reach a precision, the cheapest first, none of them worse than another in
    everything: tokens, chance, sets, queries.

    The cheapest ones for chances of .5, .8 and .95, and for .8 those with at most half the sets, and half the queries,
    of the cheapest. Each is simulated (`simulated_half_widths`), and is made larger until the simulation has the
    chance, too. Empty where even ``most`` does not reach it. Raises RequestError where the components leave nothing to
    be known, and as `cheapest`. Cost: some 0.2 s.
    """
    refuse_no_variance(quantity, sigma2)
    found: dict[StudySizes, SizeChoice] = {}

    def add(chance: float, within: StudySizes) -> StudySizes | None:
        choice = _simulated_choice(quantity, sigma2, wanted, costs, within, chance, seed)
        if choice is not None:
            found.setdefault(choice.sizes, choice)
        return None if choice is None else choice.sizes

    for chance in _CHANCES:
        add(chance, most)
    if (usual := add(CHANCE, most)) is not None:
        add(CHANCE, most._replace(sets=max(usual.sets // 2, LEAST.sets)))
        add(CHANCE, most._replace(queries=max(usual.queries // 2, LEAST.queries)))
    return sorted(_undominated(list(found.values()), costs), key=lambda choice: costs.of(*choice.sizes))


def refuse_no_variance(quantity: Quantity, sigma2: Effects) -> None:
    """Raises RequestError where components of 0 leave nothing to be known of a quantity."""
    c = Effects(*(max(value, 0.0) for value in sigma2))
    parts = {"order_effect": c.P + c.SP, "selection_effect": c.S + c.SP, "r": min(c.P + c.SP, c.S + c.SP)}
    if not sum(c) > 0:
        raise RequestError("nothing varies in these components, so no size follows from them; give other ones")
    if quantity in parts and not parts[quantity] > 0:
        what = "order and choice" if quantity == "r" else quantity.split("_")[0]
        raise RequestError(
            f"{what} shows no variance beyond item noise here, so what is to be measured is not there; ask for "
            "accuracy, or give a larger pilot"
        )


@dataclass(frozen=True)
class StoppingRule:
    """When a run that grows in sets, permutations and queries has what it was asked for, and how it goes on if not.

    A few looks of sizes computed from the components so far, as in the two-stage procedure of Stein (1945) with more
    stages: nothing is decided by the estimate itself, only by its interval's length.
    """

    quantity: Quantity
    half_width: float
    level: float = LOOK_LEVEL
    chance: float = CHANCE

    def first(self, most: StudySizes, least_queries: int = 2) -> StudySizes:
        """The first wave: 8 sets, 8 permutations and 64 queries, or more queries, within the most there may be."""
        sets, permutations, queries = _FIRST
        wanted = (sets, permutations, max(queries, least_queries))
        return StudySizes(*(min(size, end) for size, end in zip(wanted, most, strict=True)))

    def is_reached(self, look: Look) -> bool:
        """Whether the interval is short enough; one that nothing bounds is not."""
        return look.half_width <= self.half_width

    def next(self, look: Look, now: StudySizes, most: StudySizes, costs: TokenCosts) -> StudySizes | None:
        """The sizes of the next wave; None where the run stops: its precision is reached, or it is as large as may be.

        The cheapest sizes that will do with the chance, at least 1.2 times the tokens of those now and at most 6
        times: beyond that, what is known of the components is too little, and the sizes are those which bring the
        interval closest.
        """
        if self.is_reached(look) or now == most:
            return None
        grid = _grid(now, most)
        tokens = costs.of(*grid) / costs.of(*now)
        widths = half_width(self.quantity, look.sigma2, *grid, level=self.level, chance=self.chance)
        least = min(_LEAST_GROWTH, float(tokens.max()))
        fits = (widths <= self.half_width) & (tokens >= least)
        if fits.any() and float(tokens[fits].min()) <= _MOST_GROWTH:
            return _at(grid, int(np.argmin(np.where(fits, tokens, np.inf))))
        near = (tokens >= least) & (tokens <= max(_MOST_GROWTH, float(tokens[tokens >= least].min())))
        widths = np.where(near, np.minimum(widths, np.finfo(np.float64).max), np.inf)
        return _at(grid, int(np.lexsort((tokens.ravel(), widths.ravel()))[0]))


def look_at(
    quantity: Quantity,
    scores: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    *,
    weights: npt.ArrayLike | None = None,
    classes: npt.ArrayLike | None = None,
    level: float = LOOK_LEVEL,
    seed: int = 0,
) -> Look:
    """The interval of a quantity from answers [S, P, Q], and the components that sizes are computed from.

    Of a ``difference`` both are [2, S, P, Q], at two numbers of shots, the first of which is taken from the second.
    Effects have `stats.effect_interval`, means that of `stats.mean_error`; both cut to what is possible. Where every
    answer is the same, nothing bounds an effect. Raises what `stats.variance_components` does. Cost: O(S·P·Q).
    """
    if quantity == "difference":
        first, second = np.asarray(scores)
        gone = None if state is None else np.asarray(state).max(axis=0)
        before, after = filled(first, gone, weights), filled(second, gone, weights)
        error = mean_error(np.asarray(after.items, np.float64) - before.items, after.weights)
        return Look(bounded(error.interval(level), "difference"), error.sigma2)
    if quantity == "accuracy":
        whole = filled(scores, state, weights)
        error = mean_error(whole.items, whole.weights)
        return Look(bounded(error.interval(level), "accuracy"), error.sigma2)
    components = variance_components(scores, state, weights=weights, classes=classes)
    return Look(_interval_of(quantity, components, level, seed), components.sigma2)


def rank_half_width(spread: float, noise: float, num_demonstrations: int, level: float = LEVEL) -> float:
    """Half-width, in places, of a normal interval of a demonstration's rank among ``num_demonstrations``.

    True scores are Gaussian with the standard deviation ``spread`` and are seen with one of ``noise``; it is z times
    the root mean square of what that moves a rank by, from 500 simulated sets with fixed draws.
    """
    generator = np.random.default_rng([num_demonstrations, *b"ranks"])
    true, moved = generator.standard_normal((2, 500, num_demonstrations))
    ranks = (values.argsort(axis=1).argsort(axis=1) for values in (spread * true, spread * true + noise * moved))
    off = np.subtract(*ranks).astype(np.float64)
    return float(special.ndtri(upper_tail(level)) * math.sqrt(np.mean(off**2)))


def permutations_for_rank(spread: float, noise: float, num_demonstrations: int, wanted: float, most: int) -> int | None:
    """The fewest permutations with which a rank is known to ± ``wanted`` places; None beyond ``most``.

    ``noise`` is the standard deviation of the score of one permutation. Raises RequestError where scores have no
    spread of their own.
    """
    if not spread > 0:
        raise RequestError(
            "the scores of these demonstrations do not differ beyond noise, so they have no ranks; give a larger pilot"
        )
    sizes = _ladder(2, most, 2 * _PER_OCTAVE)
    return next(
        (int(size) for size in sizes if rank_half_width(spread, noise / math.sqrt(size), num_demonstrations) <= wanted),
        None,
    )


_SIGNS = {"S": 1.0, "P": 1.0, "I": 1.0, "SP": -1.0, "SI": -1.0, "PI": -1.0, "SPI": 1.0}
"""Of the mean squares in the variance of a mean, over S·P·Q."""


def _interval_of(quantity: Quantity, components: VarianceComponents, level: float, seed: int) -> Interval:
    found = effect_interval(components, level, seed=seed)
    if quantity == "r":
        return found.ratio
    return bounded(found.order if quantity == "order_effect" else found.selection, "spread")


def _degrees(sets: Any, permutations: Any, queries: Any) -> Effects:
    s, p, q = sets - 1, permutations - 1, queries - 1
    return Effects(s, p, q, s * p, s * q, p * q, s * p * q)


def _order_slopes(sets: Any, permutations: Any, queries: Any) -> dict[str, Any]:
    """What each mean square counts in σ²_P + σ²_SP (`solve_components`)."""
    whole = sets * queries
    return {"P": 1 / whole, "SP": (sets - 1) / whole, "PI": -1 / whole, "SPI": -(sets - 1) / whole}


def _selection_slopes(sets: Any, permutations: Any, queries: Any) -> dict[str, Any]:
    """The same of σ²_S + σ²_SP."""
    turned = _order_slopes(permutations, sets, queries)
    return {{"P": "S", "PI": "SI"}.get(name, name): slope for name, slope in turned.items()}


def _of(slopes: dict[str, Any], squares: Effects) -> Any:
    return sum(slope * getattr(squares, name) for name, slope in slopes.items())


def _variance(slopes: dict[str, Any], squares: Effects, degrees: Effects) -> Any:
    return sum(2 * (slope * getattr(squares, name)) ** 2 / getattr(degrees, name) for name, slope in slopes.items())


def _distances(slopes: dict[str, Any], squares: Effects, degrees: Effects, level: float) -> tuple[Any, Any]:
    """How far above and below Σ c·MS its bounds are."""
    up: Any = 0.0
    down: Any = 0.0
    for name, slope in slopes.items():
        term, (below, above) = slope * getattr(squares, name), _reach(getattr(degrees, name), level)
        up = up + np.where(term > 0, above * term, below * term) ** 2
        down = down + np.where(term > 0, below * term, above * term) ** 2
    return np.sqrt(up), np.sqrt(down)


def _reach(degrees: FloatArray, level: float) -> tuple[FloatArray, FloatArray]:
    """How far the interval of a mean square goes below and above it, as shares of it: 1 - df/χ²_high, df/χ²_low - 1."""
    values, inverse = np.unique(degrees, return_inverse=True)
    below, above = _quantiles(values.tobytes(), level)
    return below[inverse].reshape(degrees.shape), above[inverse].reshape(degrees.shape)


@lru_cache(maxsize=256)
def _quantiles(degrees: bytes, level: float) -> tuple[FloatArray, FloatArray]:
    """`_reach` of different degrees of freedom [N]; from 100 on by Wilson & Hilferty (1931)."""
    df = np.frombuffer(degrees)
    z = float(special.ndtri(upper_tail(level)))
    found = []
    for tail, sign in ((1 - upper_tail(level), 1.0), (upper_tail(level), -1.0)):
        quantile = df * (1 - 2 / (9 * df) + sign * z * np.sqrt(2 / (9 * df))) ** 3
        few = df < _FEW
        quantile[few] = special.chdtri(df[few], tail)
        found.append(df / quantile)
    return 1 - found[0], found[1] - 1


def _ladder(low: int, high: int, per_octave: int = _PER_OCTAVE) -> FloatArray:
    """Whole numbers from ``low`` to ``high``, so many to the doubling."""
    steps = max(math.ceil(per_octave * math.log2(high / low)), 1) if high > low else 0
    return np.unique(np.rint(np.geomspace(low, high, steps + 1)))


def _grid(least: StudySizes, most: StudySizes) -> list[FloatArray]:
    """All sizes that are looked at, three arrays of one shape."""
    axes = (_ladder(min(low, high), high) for low, high in zip(least, most, strict=True))
    return list(np.meshgrid(*axes, indexing="ij"))


def _at(grid: Sequence[FloatArray], place: int) -> StudySizes:
    return StudySizes(*(int(axis.ravel()[place]) for axis in grid))


def _simulated_choice(
    quantity: Quantity, sigma2: Effects, wanted: float, costs: TokenCosts, most: StudySizes, chance: float, seed: int
) -> SizeChoice | None:
    """The cheapest design that has the chance in the closed form and, made larger as needed, in a simulation."""
    for aim in _falling(wanted):
        sizes = cheapest(quantity, sigma2, aim, costs, most, chance=chance)
        if sizes is None:
            return None
        widths = simulated_half_widths(quantity, sigma2, sizes, seed=seed)
        reached = float(np.mean(widths <= wanted))
        if reached >= chance - 0.02:  # of 400 simulated designs
            return SizeChoice(sizes, float(np.median(widths)), reached)
    return None


def _falling(wanted: float) -> Iterator[float]:
    """Half-widths to aim at, from the wanted one down to half of it."""
    return (wanted * 0.97**step for step in range(23))


def _undominated(choices: Sequence[SizeChoice], costs: TokenCosts) -> list[SizeChoice]:
    def figures(choice: SizeChoice) -> tuple[float, ...]:
        return costs.of(*choice.sizes), -choice.chance, choice.sizes.sets, choice.sizes.queries

    return [
        one
        for one in choices
        if not any(
            other is not one and all(a <= b for a, b in zip(figures(other), figures(one), strict=True))
            for other in choices
        )
    ]
