"""Racing: which ordering is the best on a dev split, from a part of the answers that asking everything would take.

All orderings of a set answer the same few dev queries; those that can hardly be the best any more are left out, and the
rest answer more. Whatever is decided is a pure function of the answers so far (`next_step`), so that a race which was
interrupted goes on as if it had not been. Two rules say when enough is known:

*calibrated* draws from the posterior of the orderings' means over all N dev queries: an ordering's lead over the others
is its true lead plus noise; how true leads are distributed is estimated from all orderings (empirical Bayes), what was
asked of the finite split is known, and what was not adds noise. Its errors are those measured on whole searches
(benchmarks/racing.py).

*certified* bets against every statement "this ordering is more than the tolerance above the leader", as sampling
without replacement from the finite split lets it (Waudby-Smith & Ramdas 2024, section 5): a capital that reaches
P(P - 1)/error refutes it at any time (Ville 1939), over all pairs of P orderings at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.errors import RequestError
from iclperm.stats.intervals import Interval, Scale, bounded, jackknife_interval
from iclperm.stats.search import TIE_DECIMALS
from iclperm.stats.sensitivity import FloatArray

IntArray = npt.NDArray[np.int64]
RuleName = Literal["calibrated", "certified"]
_DRAWS = 2048
_GRID, _SWEEPS = 64, 60
_UNSEEN = 1.0  # answers of an ordering that differ from the others, but were not yet seen to
_STOP, _DROP = 0.5, 0.08  # of the error: what stopping may take, and what leaving out may in each wave


@dataclass(frozen=True)
class RaceRule:
    """When to leave an ordering out, and when to stop.

    ``tolerance`` is in units of the criterion (.01 is a point of accuracy): the promise is that the chosen ordering is
    no more than that below the best one over all dev queries, but for a share ``error`` of the races. The first block
    has ``first`` queries, and each later one ends at ``growth`` times as many.
    """

    name: RuleName = "calibrated"
    tolerance: float = 0.01
    error: float = 0.05
    first: int = 28
    growth: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < math.inf:
            raise RequestError(f"tolerance must be 0 or more, got {self.tolerance}")
        if not 0 < self.error < 1:
            raise RequestError(f"error must lie between 0 and 1, got {self.error}")
        if self.first < 2 or not self.growth > 1:
            raise RequestError(f"first must be at least 2 and growth above 1, got {self.first} and {self.growth}")


class RaceStep(NamedTuple):
    """What a race does next."""

    candidates: IntArray
    """The orderings that are to be asked, ascending; empty where it is decided."""
    num_queries: int
    """Each of them answers the first so many dev queries; those that it has answered already count."""
    leader: int
    """The ordering that is ahead; where it is decided, the chosen one. -1 before anything was asked."""
    failure: float
    """Estimated (calibrated) chance that the leader is more than the tolerance below the best of all, those left out
    among them, or (certified) the most that it can be; NaN before anything was asked."""
    num_left: int
    """Orderings that are not left out."""

    @property
    def is_decided(self) -> bool:
        """Whether the leader is the choice."""
        return not len(self.candidates)


def next_step(
    values: npt.ArrayLike,
    num_asked: npt.ArrayLike,
    rule: RaceRule,
    *,
    weights: npt.ArrayLike | None = None,
    most: int | None = None,
    seed: int = 0,
) -> RaceStep:
    """What to ask next, or what is chosen, from the answers so far.

    Args:
        values: [P, N] what each ordering gets for each dev query, higher is better, in the order in which queries are
            asked; only the first ``num_asked[p]`` of a row are looked at. NaN is an answer that there is none of: the
            mean of the others to the same query stands for it.
        num_asked: [P] how many queries each ordering was asked.
        rule: when to stop.
        weights: [N] how often each query counts; certified races need equal ones.
        most: at most so many orderings go on, the likeliest to be the best (a budget's halving); None for as many as
            the rule keeps.
        seed: of the posterior's draws.

    Ties go to the lowest ordering. Raises `RequestError` on shapes that do not fit. Cost: O(draws·P·n).
    """
    table, asked = np.asarray(values, dtype=np.float64), np.asarray(num_asked, dtype=np.int64)
    if table.ndim != 2 or asked.shape != table.shape[:1] or not table.size:
        raise RequestError(f"values must be [P, N] and num_asked [P], got {table.shape} and {asked.shape}")
    if asked.min() < 0 or asked.max() > table.shape[1]:
        raise RequestError(f"num_asked must lie in 0..{table.shape[1]}, got {asked.min()} to {asked.max()}")
    counts = np.ones(table.shape[1]) if weights is None else np.asarray(weights, dtype=np.float64)
    if counts.shape != table.shape[1:] or not (counts > 0).all():
        raise RequestError(f"weights must be {table.shape[1]} numbers above 0")
    if rule.name == "certified" and np.ptp(counts) > 0:
        raise RequestError("a certified race needs dev queries that count alike; use the rule 'calibrated'")
    number = int(asked.max())
    if number == 0:
        return RaceStep(np.arange(len(table)), min(rule.first, table.shape[1]), -1, math.nan, len(table))
    filled = _filled(table, asked)
    step = _calibrated if rule.name == "calibrated" else _certified
    return step(filled, asked, counts, rule, most, seed)


def _filled(table: FloatArray, asked: IntArray) -> FloatArray:
    """The answers, NaN beyond those asked; a missing one is the mean of the others to its query, or of all."""
    is_asked = np.arange(table.shape[1]) < asked[:, None]
    is_there = is_asked & ~np.isnan(table)
    if is_there.sum() == is_asked.sum():
        return np.where(is_asked, table, np.nan)
    sums, there = np.where(is_there, table, 0.0).sum(axis=0), is_there.sum(axis=0)
    level = np.where(there > 0, sums / np.maximum(there, 1), sums.sum() / max(int(there.sum()), 1))
    return np.where(is_there, table, np.where(is_asked, level, np.nan))


def _next_size(number: int, total: int, rule: RaceRule) -> int:
    return min(total, max(number + 1, math.ceil(number * rule.growth)))


def _calibrated(
    table: FloatArray, asked: IntArray, counts: FloatArray, rule: RaceRule, most: int | None, seed: int
) -> RaceStep:
    number, total = int(asked.max()), table.shape[1]
    alive = np.flatnonzero(asked == number)
    means = table[alive, :number] @ counts[:number] / counts[:number].sum()
    leader = int(means.round(TIE_DECIMALS).argmax())
    draws, left_out = _posterior(table, asked, counts, seed)
    best_out = left_out.max(axis=0, initial=-math.inf)
    if number == total or len(alive) == 1:
        failure = float((best_out > draws[leader] + rule.tolerance).mean())
        return RaceStep(np.empty(0, np.int64), 0, int(alive[leader]), failure, len(alive))
    best = draws.max(axis=0)
    failure = float((np.maximum(best, best_out) > draws[leader] + rule.tolerance).mean())
    if (best > draws[leader] + rule.tolerance).mean() <= _STOP * rule.error:
        return RaceStep(np.empty(0, np.int64), 0, int(alive[leader]), failure, len(alive))
    likeliest = np.argsort((draws > draws[leader] + rule.tolerance).mean(axis=1) + draws.mean(axis=1), kind="stable")
    ranked = np.append(likeliest[likeliest != leader], leader)
    out = np.maximum.accumulate(draws[ranked], axis=0)[:-1]
    kept = np.maximum.accumulate(draws[ranked[::-1]], axis=0)[::-1][1:]
    lost = (out > kept + rule.tolerance).mean(axis=1)
    following = _next_size(number, total, rule)
    num_out = int(np.searchsorted(np.maximum.accumulate(lost), _DROP * rule.error, side="right"))
    if most is not None:
        num_out = max(num_out, len(alive) - max(most, 1))
    stay = np.sort(ranked[num_out:])
    if len(stay) == 1:
        return RaceStep(np.empty(0, np.int64), 0, int(alive[leader]), failure, 1)
    return RaceStep(alive[stay], following, int(alive[leader]), failure, len(stay))


def _posterior(table: FloatArray, asked: IntArray, counts: FloatArray, seed: int) -> tuple[FloatArray, FloatArray]:
    """Draws [A, draws] of the means over all queries of those still in the race, and [P - A, draws] of those left out,
    less what the first have in common.

    Each ordering's lead (`leads`) is its true lead plus noise. How true leads are distributed over the orderings is
    estimated from all of them, those left out among them, on a grid (Kiefer & Wolfowitz 1956, by `_SWEEPS` steps of EM
    from a uniform start, which keeps it smooth). What was asked is known; the queries that are left add noise of their
    own.
    """
    number = int(asked.max())
    is_alive = asked == number
    alive = np.flatnonzero(is_alive)
    sizes = np.array([_effective(counts[:size]) for size in asked])
    lead = leads(table, asked, counts)
    noise = max(_noise(table[alive, :number]), _UNSEEN / number)
    grid = np.linspace(lead.min(), lead.max(), _GRID)
    width = max(float(grid[1] - grid[0]), 1e-12)
    likely = np.exp(-((lead[:, None] - grid) ** 2) / (2 * noise / sizes[:, None] + width**2 / 6))
    shares = np.full(_GRID, 1 / _GRID)
    for _ in range(_SWEEPS):
        found = likely * shares + 1e-300
        shares = (found / found.sum(axis=1, keepdims=True)).mean(axis=0)
    found = (likely * shares + 1e-300)[alive]
    chances = np.cumsum(found / found.sum(axis=1, keepdims=True), axis=1)
    stream = np.random.Generator(np.random.Philox(key=[seed, number]))
    uniform = stream.random((len(alive), _DRAWS))
    places = np.array([np.searchsorted(row, each) for row, each in zip(chances, uniform, strict=True)])
    true = grid[np.minimum(places, _GRID - 1)] + width * (stream.random(places.shape) - 0.5)
    left = max(_effective(counts[number:]), 1.0)
    share = counts[:number].sum() / counts.sum()
    unseen = true + math.sqrt(noise / left) * stream.standard_normal(true.shape)
    draws = np.asarray(share * lead[alive][:, None] + (1 - share) * unseen)
    return draws, _left_out(table, asked, counts, lead, noise, stream)


def _left_out(
    table: FloatArray, asked: IntArray, counts: FloatArray, lead: FloatArray, noise: float, stream: np.random.Generator
) -> FloatArray:
    """Draws [P - A, draws] of the means over all queries of the orderings that were left out, as `_posterior`.

    Those still in the race were lucky on the queries that left these out. So what an ordering and what a query adds are
    fitted together, with orderings Gaussian (Henderson 1975) of the variance that means over the first block have
    beyond noise: each wave's survivors tie the queries of the next to those before.
    """
    out, first = np.flatnonzero(asked < asked.max()), int(asked.min())
    if not len(out):
        return np.empty((0, _DRAWS))
    is_asked = np.arange(table.shape[1]) < asked[:, None]
    weight, values = np.where(is_asked, counts, 0.0), np.where(is_asked, table, 0.0)
    sizes = np.array([_effective(counts[:size]) for size in asked])
    shares = counts[:first] / counts[:first].sum()
    spread2 = max(float(np.var(table[:, :first] @ shares)) - noise / sizes.min(), 0.0)
    part = spread2 / (spread2 + noise / sizes)
    true = np.zeros(len(table))
    for _ in range(_SWEEPS):
        level = (values - true[:, None] * is_asked).sum(axis=0) / np.maximum(is_asked.sum(axis=0), 1)
        true = part * ((values - level) * weight).sum(axis=1) / weight.sum(axis=1)
    true = (true - true[asked == asked.max()].mean())[out]
    left = np.array([max(_effective(counts[size:]), 1.0) for size in asked[out]])
    spread = np.sqrt(part[out] * noise / sizes[out] + noise / left)
    unseen = true[:, None] + spread[:, None] * stream.standard_normal((len(out), _DRAWS))
    share = (weight.sum(axis=1) / counts.sum())[out, None]
    return np.asarray(share * lead[out, None] + (1 - share) * unseen)


def leads(table: FloatArray, asked: IntArray, counts: FloatArray) -> FloatArray:
    """[P] how much more each ordering got than those with the most answers, in the mean, on the queries it answered."""
    number = int(asked.max())
    common = table[asked == number, :number].mean(axis=0)
    gaps = (row[:size] - common[:size] for row, size in zip(table, asked, strict=True))
    return np.array([gap @ counts[: len(gap)] / counts[: len(gap)].sum() for gap in gaps])


def _effective(counts: FloatArray) -> float:
    """How many queries of equal weight these are worth (Kish)."""
    return float(counts.sum() ** 2 / (counts @ counts)) if len(counts) else 0.0


def _noise(answers: FloatArray) -> float:
    """Variance of a single answer [P, n] beyond what its ordering and its query have by themselves."""
    rest = answers - answers.mean(axis=0) - answers.mean(axis=1, keepdims=True) + answers.mean()
    return float((rest**2).sum() / max((len(answers) - 1) * (answers.shape[1] - 1), 1))


def _certified(
    table: FloatArray, asked: IntArray, counts: FloatArray, rule: RaceRule, most: int | None, seed: int
) -> RaceStep:
    number, total = int(asked.max()), table.shape[1]
    alive = np.flatnonzero(asked == number)
    leader = int(alive[table[alive, :number].mean(axis=1).round(TIE_DECIMALS).argmax()])
    pairs = max(len(table) * (len(table) - 1), 1)
    capital = np.array([
        math.inf if rival == leader else log_capital(
            table[rival, : asked[rival]] - table[leader, : asked[rival]], total, rule.tolerance
        )
        for rival in range(len(table))
    ])  # fmt: skip
    failure = float(min(1.0, pairs * math.exp(-min(capital.min(), 700.0))))
    is_open = capital < math.log(pairs / rule.error)
    if not is_open.any():
        return RaceStep(np.empty(0, np.int64), 0, leader, failure, 1)
    is_open[leader] = True
    candidates = np.flatnonzero(is_open)
    if number == total:  # others catch up
        return RaceStep(candidates[asked[candidates] < total], total, leader, failure, len(candidates))
    return RaceStep(candidates, _next_size(number, total, rule), leader, failure, len(candidates))


def log_capital(differences: npt.ArrayLike, total: int, tolerance: float) -> float:
    """The most that betting against "over all ``total`` queries the mean difference is above ``tolerance``" has had in
    its logarithm, at any of the n queries that were asked in random order.

    Args:
        differences: [n] in -1..1, of a rival and the leader, in the order in which they were asked.

    Under the statement the capital is a nonnegative supermartingale from 1 on: it exceeds 1/error with a chance of at
    most error, whenever one looks. What is bet on a query follows from those before it alone: the growth-optimal
    fraction for their mean and variance, with one draw of each end as if seen before. inf where the answers rule the
    statement out. O(n). Waudby-Smith & Ramdas 2024, section 5.
    """
    seen = np.asarray(differences, dtype=np.float64)
    if not seen.size:
        return 0.0
    least = tolerance * total  # the statement: the sum over all queries is above this
    before = np.concatenate([[0.0], np.cumsum(seen)[:-1]])
    squares = np.concatenate([[0.0], np.cumsum(seen**2)[:-1]])
    drawn = np.arange(len(seen))
    mean_left = (least - before) / (total - drawn)  # of the queries not yet asked, at the edge of the statement
    if (mean_left >= 1).any() or least - seen.sum() > total - len(seen):
        return math.inf
    guess = before / (drawn + 2)
    variance = (squares + 2) / (drawn + 2) - guess**2
    gap = mean_left - guess
    stake = np.clip(gap / (variance + gap**2), 0.0, 0.999 / (1 - mean_left))
    return float(np.maximum(np.cumsum(np.log1p(-stake * (seen - mean_left))).max(), 0.0))


class Wave(NamedTuple):
    """What was asked at once: ``candidates`` [A] answered until each had ``num_queries`` answers."""

    candidates: IntArray
    num_queries: int


@dataclass(frozen=True)
class Race:
    """A whole race, replayed on answers that are all there."""

    chosen: int
    failure: float
    """As `RaceStep.failure`."""
    num_asked: IntArray
    """[P] dev queries that each ordering answered."""
    waves: tuple[Wave, ...]

    def cost(self, context: npt.ArrayLike, query: npt.ArrayLike) -> float:
        """Tokens: of every ordering's demonstrations ``context`` [P] once a wave, and of the queries [N] asked."""
        contexts, ends = np.asarray(context, dtype=np.float64), np.concatenate([[0.0], np.cumsum(query)])
        return float(sum(contexts[wave.candidates].sum() for wave in self.waves) + ends[self.num_asked].sum())


def replay(
    values: npt.ArrayLike,
    rule: RaceRule,
    *,
    weights: npt.ArrayLike | None = None,
    halved: bool = False,
    seed: int = 0,
) -> Race:
    """Races on a whole table of answers [P, N], in its order of queries; args as `next_step`.

    With ``halved`` at most half of the orderings go on after each wave, whatever is known (`halving`).
    """
    table = np.asarray(values, dtype=np.float64)
    asked, waves = np.zeros(len(table), np.int64), list[Wave]()
    while True:
        most = -(-len(table) // 2 ** len(waves)) if halved else None
        step = next_step(table, asked, rule, weights=weights, most=most, seed=seed)
        if step.is_decided:
            return Race(step.leader, step.failure, asked, tuple(waves))
        asked[step.candidates] = step.num_queries
        waves.append(Wave(step.candidates, step.num_queries))


def halving(num_orderings: int, num_queries: int, context: float, query: float, budget: float) -> int | None:
    """The first block with which successive halving (Karnin, Koren & Somekh 2013) stays within a budget.

    Orderings are halved and their queries doubled wave by wave, until one is left or all queries are asked.

    Args:
        num_orderings, num_queries: P and N.
        context, query: mean tokens of an ordering's demonstrations, asked anew in every wave, and of a query.
        budget: tokens in all.

    None where not even blocks of two fit. O(log P · log N).
    """

    def cost(first: int) -> float:
        return halving_cost(num_orderings, num_queries, context, query, first)

    if cost(2) > budget:
        return None
    low, high = 2, num_queries
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost(middle) <= budget else (low, middle - 1)
    return low


def halving_cost(num_orderings: int, num_queries: int, context: float, query: float, first: int) -> float:
    """The tokens of successive halving from a ``first`` block on; the others as `halving` has them."""
    left, before, size, total = num_orderings, 0, first, 0.0
    while left > 1 and before < num_queries:
        total += left * (context + query * (size - before))
        before, size, left = size, min(2 * size, num_queries), -(-left // 2)
    return total


class TestedChoice(NamedTuple):
    """What the chosen orderings have on test beside a random one, from the answers that were asked; shares of 1."""

    average: Interval
    """Of an ordering drawn at random, mean over sets."""
    chosen: Interval
    """Of the chosen ordering, mean over sets."""
    gain: Interval
    """The difference, query by query."""
    by_set: FloatArray
    """[2, S] average and chosen of each set."""
    num_queries: int
    """Distinct test queries that both are known of in some set."""


def gain_on_test(
    correct: npt.ArrayLike,
    state: npt.ArrayLike,
    chosen: npt.ArrayLike,
    weights: npt.ArrayLike | None = None,
    *,
    level: float = 0.95,
) -> TestedChoice:
    """What choosing gains on test where a query was answered by the chosen ordering and by some that were drawn.

    Args:
        correct: [S, P, Q] 0 or 1, or grades; state: [S, P, Q], 0 where there is an answer.
        chosen: [S] permutations.
        weights: [Q] how often each query counts.

    A random ordering's accuracy is the mean, query by query, of the answers of all orderings but the chosen one, which
    each query has by chance alone, and 1/P of the chosen one's; so it is unbiased. Intervals leave out one set at a
    time (of one set one ordering) and one query at a time, with the choice held (`jackknife_interval`). O(S·P·Q).
    """
    items, there = np.asarray(correct, dtype=np.float64), np.asarray(state) == 0
    places = np.asarray(chosen, dtype=np.int64)
    num_sets, num_permutations, num_queries = items.shape
    weight = np.ones(num_queries) if weights is None else np.asarray(weights, dtype=np.float64)
    sets = np.arange(num_sets)
    of_chosen = np.where(there[sets, places], items[sets, places], np.nan)
    others = there.copy()
    others[sets, places] = False

    def average(mask: npt.NDArray[np.bool_]) -> FloatArray:
        count = mask.sum(axis=1)
        with np.errstate(invalid="ignore"):
            rest = np.where(count > 0, np.where(mask, items, 0.0).sum(axis=1) / np.maximum(count, 1), np.nan)
        return np.asarray(rest if num_permutations < 2 else rest + (of_chosen - rest) / num_permutations)

    pair = np.stack([average(others) if num_permutations > 1 else of_chosen, of_chosen])
    known = ~np.isnan(pair).any(axis=0)
    shares = np.where(known, weight, 0.0)

    def means(values: FloatArray, share: FloatArray) -> FloatArray:
        """[2, S] weighted means over queries."""
        return np.asarray(np.nansum(np.where(share > 0, values, 0.0) * share, axis=-1) / share.sum(axis=-1))

    with np.errstate(invalid="ignore", divide="ignore"):
        by_set = means(pair, shares)
        total = by_set.mean(axis=1)
        if num_sets > 1:
            units = (by_set.sum(axis=1)[:, None] - by_set) / (num_sets - 1)
        else:
            drawn = np.flatnonzero(others[0].any(axis=1)).tolist()
            units = np.array([_without(pair, shares, others, average, p) for p in drawn]).reshape(-1, 2).T
        sums = np.where(known, pair, 0.0) * shares
        without = (sums.sum(axis=2)[:, :, None] - sums) / (shares.sum(axis=1)[:, None] - shares)
        queries = np.asarray(without.mean(axis=1))
    turn = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 1.0]])
    found = [
        jackknife_interval(float(row @ total), row @ units, (row @ queries)[known.any(axis=0)], level=level)
        for row in turn
    ]
    scales: tuple[Scale, ...] = ("accuracy", "accuracy", "difference")
    average_, chosen_, gain = (bounded(one, scale) for one, scale in zip(found, scales, strict=True))
    return TestedChoice(average_, chosen_, gain, by_set, int(known.any(axis=0).sum()))


def _without(
    pair: FloatArray,
    shares: FloatArray,
    others: npt.NDArray[np.bool_],
    average: Callable[[npt.NDArray[np.bool_]], FloatArray],
    permutation: int,
) -> FloatArray:
    """[2] means of one set without the answers of an ordering that was drawn."""
    rest = others.copy()
    rest[:, permutation] = False
    values = np.stack([average(rest), pair[1]])
    share = np.where(np.isnan(values).any(axis=0), 0.0, shares)
    return np.asarray((np.where(share > 0, values, 0.0) * share).sum(axis=-1) / share.sum(axis=-1))[:, 0]
