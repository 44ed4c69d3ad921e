"""Racing: which ordering is the best on a dev split, from a part of the answers that asking everything would take.

All orderings of a set answer the same few dev queries; those that can hardly be the best any more are left out, and the
rest answer more. Whatever is decided is a pure function of the answers so far (`next_step`), so that a race which was
interrupted goes on as if it had not been. Two rules say when enough is known:

*calibrated* goes by the posterior of the orderings' means over all N dev queries: an ordering's lead over the others is
its true lead plus noise; how true leads are distributed is estimated from all orderings (empirical Bayes), what was
asked of the finite split is known, and what was not adds noise. An ordering goes on where what it adds to the expected
mean of the best is worth the asking; as many go on as the promise takes, and a quarter in any case: the few answers of
a first wave may show no noise where there is some. Its errors are those measured on whole searches
(benchmarks/racing.py).

*certified* bets against every statement "this ordering is more than the tolerance above the leader", as sampling
without replacement from the finite split lets it (Waudby-Smith & Ramdas 2024, section 5): a capital that reaches
P(P - 1)/error refutes it at any time (Ville 1939), over all pairs of P orderings at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from iclperm.errors import RequestError
from iclperm.stats.intervals import Interval, Scale, bounded, jackknife_interval
from iclperm.stats.search import TIE_DECIMALS
from iclperm.stats.sensitivity import FloatArray

IntArray = npt.NDArray[np.int64]
RuleName = Literal["calibrated", "certified"]
RULE_VERSION = 4
"""Of both rules: whoever continues a race has to decide by the one that it began with."""
_GRID, _SWEEPS, _POINTS, _PARTS = 64, 60, 256, 8
_UNSEEN = 1.0  # answers that differ from what orderings and queries have by themselves, but were not yet seen to
_LUCKY = 1.5  # how much steadier the better half looks than it is, over the root of the queries
_ROUNDING = 1e-9
_REST = 0.1  # of the queries is too little for a wave of its own, which takes the demonstrations anew
_FAR = 8.0  # standard errors, and tolerances, below the best: whoever is further is as far as that
_STAY = 0.25  # of the orderings in a wave go on at least
_PRICE = 6.0  # of asking everything, in tolerances
_STOP, _SPEND = 0.7, 0.18  # of the error: with how much to stop, and of what is left of it what one wave may take


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
    first: int = 24
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
    among them as they were judged when they were; or (certified) the most that it can be. NaN before anything was
    asked."""
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
    past: dict[int, FloatArray] | None = None,
    classes: npt.ArrayLike | None = None,
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
        past: keeps what earlier waves of this very race lost, which is otherwise worked out anew in every step.
        classes: [N] the class of each query, where classes take turns in the order of queries: every block then has
            them as the whole has, but for one query, so that what an ordering has for a class is no noise. None where
            they do not.

    Ties go to the lowest ordering. Raises `RequestError` on shapes that do not fit. Cost: O(waves·P·(N + grid)).
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
    of_class = np.zeros(table.shape[1], np.int64) if classes is None else np.asarray(classes)
    if of_class.shape != table.shape[1:]:
        raise RequestError(f"classes must be {table.shape[1]}, one for each query")
    number = int(asked.max())
    if number == 0:
        return RaceStep(np.arange(len(table)), min(rule.first, table.shape[1]), -1, math.nan, len(table))
    filled = _filled(table, asked)
    if rule.name == "certified":
        return _certified(filled, asked, rule)
    return _calibrated(filled, asked, _Queries(counts, of_class), rule, most, {} if past is None else past)


def _filled(table: FloatArray, asked: IntArray) -> FloatArray:
    """The answers, NaN beyond those asked; a missing one is the mean of the others to its query, or of all."""
    is_asked = np.arange(table.shape[1]) < asked[:, None]
    is_there = is_asked & ~np.isnan(table)
    if np.array_equal(is_there, is_asked):
        return np.where(is_asked, table, np.nan)
    sums, there = np.where(is_there, table, 0.0).sum(axis=0), is_there.sum(axis=0)
    level = np.where(there > 0, sums / np.maximum(there, 1), sums.sum() / max(int(there.sum()), 1))
    return np.where(is_there, table, np.where(is_asked, level, np.nan))


def _next_size(number: int, total: int, growth: float) -> int:
    size = max(number + 1, math.ceil(number * growth))
    return size if total - size > _REST * total else total


class _Queries(NamedTuple):
    """How often each of N queries counts, and its class."""

    counts: FloatArray
    classes: npt.NDArray[Any]


@dataclass(frozen=True)
class _Posterior:
    """Of the means over all queries of the orderings that are in the race after a wave."""

    ranked: IntArray
    """[A] orderings, the best mean first."""
    width: float
    """Between the points."""
    below: FloatArray
    """[A, X] chance that each, as ranked, is no more than each of X points."""
    first: FloatArray
    """[A, X] chance that none up to it is above."""
    last: FloatArray
    """[A + 1, X] chance that none from it on is above."""
    tolerance: float

    @classmethod
    def of(cls, ranked: IntArray, width: float, below: FloatArray, tolerance: float) -> _Posterior:
        """With products over the orderings."""
        first, last = np.multiply.accumulate(below, axis=0), np.ones((len(below) + 1, below.shape[1]))
        last[:-1] = np.multiply.accumulate(below[::-1], axis=0)[::-1]
        return cls(ranked, width, below, first, last, tolerance)

    def lost(self, kept: int) -> FloatArray:
        """[parts + 2] chance that the best of those that are left out, all but the first ``kept``, is above the best of
        these by nothing, by up to each part of the tolerance, and by more."""
        points = np.arange(self.below.shape[1])
        moved = points + self.tolerance / self.width * np.arange(_PARTS + 1)[:, None] / _PARTS
        out = np.interp(moved - 0.5, points, self.last[kept])  # at the middle of a step
        above = (1 - out) @ np.diff(self.first[kept - 1], prepend=0.0)
        return np.asarray(-np.diff(above, prepend=1.0, append=0.0))


def _calibrated(
    table: FloatArray,
    asked: IntArray,
    queries: _Queries,
    rule: RaceRule,
    most: int | None,
    past: dict[int, FloatArray],
) -> RaceStep:
    number, total = int(asked.max()), table.shape[1]
    lost = _lost_before(table, asked, queries, rule.tolerance, past)
    alive = np.flatnonzero(asked == number)
    if number == total or len(alive) == 1:
        counts = queries.counts[:number]
        means = table[alive, :number] @ counts / counts.sum()
        leader = int(alive[means.round(TIE_DECIMALS).argmax()])
        return RaceStep(np.empty(0, np.int64), 0, leader, _chance(lost), len(alive))
    known = _posterior(table, asked, queries, rule.tolerance)
    leader = int(known.ranked[0])
    failure = _chance(_added(lost, known.lost(1)))
    following = _next_size(number, total, rule.growth)
    worth = _PRICE * rule.tolerance * math.sqrt((following - number) * (total - number)) / (total * len(table))
    kept = max(_num_worth(known, worth), _num_promised(known, lost, rule.error), math.ceil(_STAY * len(alive)))
    kept = min(kept, len(alive) if most is None else max(most, 1))
    if kept == 1:
        return RaceStep(np.empty(0, np.int64), 0, leader, failure, len(alive) if most is None else 1)
    past[number] = known.lost(kept)
    return RaceStep(np.sort(known.ranked[:kept]), following, leader, failure, kept)


def _num_worth(known: _Posterior, worth: float) -> int:
    """How many orderings go on, the best first: as long as what one adds to the expected mean of the best of all before
    it, E[(its mean - theirs)+], is more than ``worth``.

    What m queries more of the r that are left can tell of that is a share of sqrt(m/r); what they cost is m of all P·N
    cells, at `_PRICE` tolerances for asking everything: hence ``worth``, price · tolerance · sqrt(m·r) / (P·N).
    """
    adds = ((1 - known.below[1:]) * known.first[:-1]).sum(axis=1) * known.width
    small = np.flatnonzero(adds <= worth)
    return 1 + (int(small[0]) if len(small) else len(adds))


def _num_promised(known: _Posterior, lost: FloatArray, error: float) -> int:
    """How many orderings go on so that the promise holds: leaving the others out takes at most `_SPEND` of what the
    waves before left of the error; or 1, where even stopping keeps within `_STOP` of it."""
    if _chance(_added(lost, known.lost(1))) <= _STOP * error:
        return 1
    spent = _chance(lost)
    allowed = spent + _SPEND * max(error - spent, 0.0)
    low, high = 1, len(known.ranked)  # the chance falls with each that is kept
    while low < high:
        middle = (low + high) // 2
        is_enough = _chance(_added(lost, known.lost(middle))) <= allowed
        low, high = (low, middle) if is_enough else (middle + 1, high)
    return low


def _lost_before(
    table: FloatArray, asked: IntArray, queries: _Queries, tolerance: float, past: dict[int, FloatArray]
) -> FloatArray:
    """What the waves before lost by leaving orderings out (`_Posterior.lost`), each by what was known when it did."""
    lost: FloatArray = np.eye(1, _PARTS + 2)[0]
    for size in np.unique(asked)[:-1].tolist():
        if size not in past:
            known = _posterior(table, np.minimum(asked, size), queries, tolerance)
            order = np.argsort(asked[known.ranked] <= size, kind="stable")  # whoever went on, whatever their rank
            known = _Posterior.of(known.ranked[order], known.width, known.below[order], tolerance)
            past[size] = known.lost(int((asked > size).sum()))
        lost = _added(lost, past[size])
    return lost


def _added(one: FloatArray, other: FloatArray) -> FloatArray:
    """What two waves lose together, one not depending on the other."""
    both = np.convolve(one, other)
    return np.append(both[: _PARTS + 1], both[_PARTS + 1 :].sum())


def _chance(lost: FloatArray) -> float:
    """That more than the tolerance was lost."""
    return float(np.clip(lost[-1], 0.0, 1.0))


def _posterior(table: FloatArray, asked: IntArray, queries: _Queries, tolerance: float) -> _Posterior:
    """What is known of the means over all queries of those still in the race, less what they have in common.

    Each ordering's lead (`leads`) is its true lead plus noise. How true leads are distributed over the orderings is
    estimated from all of them, those left out among them, on a grid (Kiefer & Wolfowitz 1956, by `_SWEEPS` steps of EM
    from a uniform start, which keeps it smooth); it reaches no further down than those that can matter, or it would be
    too coarse for these. What was asked is known; the queries that are left add noise of their own. Noise is that of
    the better half, who compete; that these were lucky makes them look steadier than they are, by a share that falls
    with the root of the queries.
    """
    counts = queries.counts
    number = int(asked.max())
    alive = np.flatnonzero(asked == number)
    different, place = np.unique(asked, return_inverse=True)
    sizes = np.array([_effective(counts[:size]) for size in different.tolist()])[place]
    lead = leads(table, asked, counts)
    ranked = alive[np.argsort(-lead[alive].round(TIE_DECIMALS), kind="stable")]
    better = table[ranked[: max(math.ceil(len(ranked) / 2), 2)], :number]
    noise = _noise(better, queries.classes[:number]) * (1 + _LUCKY / math.sqrt(number))
    floor = lead.max() - _FAR * (math.sqrt(noise / sizes.max()) + tolerance)
    grid = np.linspace(max(lead.min(), floor), lead.max(), _GRID)
    width = max(float(grid[1] - grid[0]), 1e-12)
    gaps = np.maximum(lead, grid[0])[:, None] - grid
    likely = np.exp(-(gaps**2) / (2 * noise / sizes[:, None] + width**2 / 6)) + 1e-300
    shares = np.full(_GRID, 1 / _GRID)
    for _ in range(_SWEEPS):
        shares = shares * ((1 / (likely @ shares)) @ likely) / len(likely)
    found = likely[ranked] * shares
    spread = math.sqrt(noise / max(_effective(counts[number:]), 1.0) + width**2 / 12)
    reached = np.linspace(grid[0] - 4 * spread, grid[-1] + 4 * spread, _POINTS)
    unseen = (found / found.sum(axis=1, keepdims=True)) @ special.ndtr((reached - grid[:, None]) / spread)
    share = float(counts[:number].sum() / counts.sum())
    behind = share * (lead[ranked[0]] - lead[ranked]) / (1 - share)
    points = np.arange(_POINTS) + (behind / (reached[1] - reached[0]))[:, None]
    whole = np.minimum(points.astype(np.int64), _POINTS - 2)
    low, high = (np.take_along_axis(unseen, each, axis=1) for each in (whole, whole + 1))
    below = low + np.minimum(points - whole, 1.0) * (high - low)
    return _Posterior.of(ranked, (1 - share) * (reached[1] - reached[0]), below, tolerance)


def leads(table: FloatArray, asked: IntArray, counts: FloatArray) -> FloatArray:
    """[P] how much more each ordering got than those with the most answers, in the mean, on the queries it answered."""
    number = int(asked.max())
    common = table[asked == number, :number].mean(axis=0)
    found = np.empty(len(table))
    for size in np.unique(asked).tolist():
        those = asked == size
        found[those] = (table[those, :size] - common[:size]) @ counts[:size] / counts[:size].sum()
    return found


def _effective(counts: FloatArray) -> float:
    """How many queries of equal weight these are worth (Kish)."""
    return float(counts.sum() ** 2 / (counts @ counts)) if len(counts) else 0.0


def _noise(answers: FloatArray, classes: npt.NDArray[Any]) -> float:
    """Variance of a single answer [P, n] beyond what its query has by itself and its ordering for the query's class
    [n]; or for all queries, where a class has but one."""
    _, place, sizes = np.unique(classes, return_inverse=True, return_counts=True)
    if sizes.min() < 2:
        place, sizes = np.zeros(len(place), np.int64), np.array([len(place)])
    rest = answers - answers.mean(axis=0)
    blocks = [rest[:, place == number] for number in range(len(sizes))]
    squares = sum(float(((block - block.mean(axis=1, keepdims=True)) ** 2).sum()) for block in blocks)
    return float((squares + _UNSEEN) / ((len(answers) - 1) * (answers.shape[1] - len(sizes)) + _UNSEEN))


def _certified(table: FloatArray, asked: IntArray, rule: RaceRule) -> RaceStep:
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
    return RaceStep(candidates, _next_size(number, total, rule.growth), leader, failure, len(candidates))


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
    if least - seen.sum() >= total - len(seen) - _ROUNDING:  # it is no more than that, whatever is left
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
    classes: npt.ArrayLike | None = None,
) -> Race:
    """Races on a whole table of answers [P, N], in its order of queries; args as `next_step`.

    With ``halved`` at most half of the orderings go on after each wave, whatever is known (`halving`).
    """
    table = np.asarray(values, dtype=np.float64)
    asked, waves, past = np.zeros(len(table), np.int64), list[Wave](), dict[int, FloatArray]()
    while True:
        most = -(-len(table) // 2 ** len(waves)) if halved else None
        step = next_step(table, asked, rule, weights=weights, most=most, past=past, classes=classes)
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
        before, size, left = size, _next_size(size, num_queries, 2.0), -(-left // 2)
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
