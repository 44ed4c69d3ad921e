"""The search for the best ordering on a dev split (arXiv 2511.09700, Algorithm 1), and how much of it is luck."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.errors import RequestError
from iclperm.stats.incomplete import Filled, filled
from iclperm.stats.intervals import Interval, Scale, bounded, jackknife_interval
from iclperm.stats.sensitivity import FloatArray, accuracy_bounds, accuracy_matrix

IntArray = npt.NDArray[np.int64]
TIE_DECIMALS = 12
"""Scores that agree to so many decimals tie: they differ by rounding alone."""
_NOTHING = 1e-12  # what rounding makes of a difference of 0
_HALVES = 100
_SWEEPS = 5  # of a fit to a draw
_ACCURACIES: tuple[str, ...] = ("average", "highest_dev", "honest", "maximum")
_SCALES: dict[str, Scale] = {
    **dict.fromkeys((*_ACCURACIES, "share"), "accuracy"),  # Highest-Dev is never above Max
    "gain": "difference",
    "gap_closed": "share of a gap",
}
_PURPOSES = {"halves": 1, "permutations": 2, "dev": 3, "sets": 4}


@dataclass(frozen=True)
class Search:
    """What choosing one ordering of each set by a criterion gives on the test split, in units of accuracy."""

    accuracy: FloatArray
    """[S, P] on test, over every answer there is (`stats.incomplete.filled`)."""
    chosen: IntArray
    """[S] permutation with the highest criterion; ties go to the lowest."""
    best: IntArray
    """[S] permutation with the highest accuracy on test: known only to someone who has the test labels."""
    honest_by_set: FloatArray
    """[S] accuracy of the ordering that is best on one half of test, on the other half; see `search`."""
    average: Interval
    """Mean over all orderings: an ordering drawn at random."""
    highest_dev: Interval
    """Accuracy of the chosen orderings, mean over sets."""
    honest: Interval
    """Mean of `honest_by_set`: a best ordering that owes nothing to luck on the queries that judge it."""
    maximum: Interval
    """Max of the paper, mean over sets of the highest accuracy on test; luck on these queries is part of it."""
    gain: Interval
    """Highest-Dev - Average."""
    share: Interval
    """Highest-Dev / Max."""
    gap_closed: Interval
    """(Highest-Dev - Average) / (Max - Average); 0 for a random ordering, NaN where Max is Average."""
    num_queries: int
    """Distinct test queries that were used."""
    dropped: float
    """Share of the test queries (by weight) without an answer in any cell."""
    filled: float
    """Share of the test answers (by weight) that are missing and were filled in; intervals are too narrow by about
    as much."""

    @property
    def by_set(self) -> dict[str, FloatArray]:
        """Each column [S]."""
        sets = np.arange(len(self.accuracy))
        return {
            "average": self.accuracy.mean(axis=1),
            "highest_dev": self.accuracy[sets, self.chosen],
            "honest": self.honest_by_set,
            "maximum": self.accuracy[sets, self.best],
        }


class Choice(NamedTuple):
    """What one way of choosing gives on the test split."""

    name: str
    accuracy: float
    gain: Interval
    """Over a random ordering of a random set; the interval speaks of other queries, with the choice held."""
    oracle: float
    """The same way of choosing by test accuracy itself, luck included."""
    set: int | None
    """The one that was chosen; None where every set counts."""
    permutation: int | None


def gap_closed(average: float, highest_dev: float, maximum: float) -> float:
    """(Highest-Dev - Average) / (Max - Average); NaN where Max is Average."""
    return (highest_dev - average) / (maximum - average) if abs(maximum - average) > _NOTHING else math.nan


def share_of_oracle(highest_dev: float, maximum: float) -> float:
    """Highest-Dev / Max, as arXiv 2511.09700 prints it; NaN where Max is 0."""
    return highest_dev / maximum if maximum else math.nan


def choose(scores: npt.ArrayLike) -> IntArray:
    """[S] the permutation of the highest score [S, P] of each set; ties go to the lowest.

    Scores that agree to 12 decimals tie, so that the rounding of a mean decides nothing. Raises RequestError on a NaN.
    """
    return np.asarray(accuracy_matrix(scores).round(TIE_DECIMALS).argmax(axis=1), dtype=np.int64)


def search(
    scores: npt.ArrayLike,
    correct: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    weights: npt.ArrayLike | None = None,
    *,
    level: float = 0.95,
    halves: int = _HALVES,
    seed: int = 0,
) -> Search:
    """Average, Highest-Dev and Max on test, the share of the oracle, the gap closed, and an honest oracle.

    Args:
        scores: [S, P] criterion on dev, higher is better (`criteria_scores`).
        correct: [S, P, Q] 0 or 1, or partial credit, on test.
        state: [S, P, Q] integers, 0 = ok; what is missing is filled in (`stats.incomplete.filled`).
        weights: [Q] how often each query counts.
        level: of the intervals.
        halves: random halves of the test queries for the honest oracle: it chooses on one half and scores on the other,
            both ways, so that every query is answered by an ordering chosen without it. With half the queries to
            choose by it is a little too low, as Max is too high.
        seed: of the halves.

    Intervals are `jackknife_interval`: one set out at a time, and one distinct query out at a time, with the choices of
    ordering held. So they speak of other sets and other queries, and are too wide rather than too narrow; NaN for one
    set. Shares are ratios of means over sets, as in the paper. Raises RequestError on shapes that do not fit. Cost:
    O(S·P·Q·halves) multiplications in matrix products. arXiv 2511.09700, Algorithm 1.
    """
    whole = usable_items(correct, state, weights)
    items, weight, cells, share = whole.items, whole.weights, whole.accuracy, whole.share
    criterion = fitting_scores(scores, cells.values.shape)
    chosen, best = choose(criterion), choose(cells.values)
    sets = np.arange(len(items))
    by_query = {
        "average": np.stack([np.asarray(one.mean(axis=0)) for one in items]),
        "highest_dev": items[sets, chosen].astype(np.float64),
        "honest": _honest_items(whole, halves, seed),
        "maximum": items[sets, best].astype(np.float64),
    }
    columns = np.stack(list(by_query.values()))  # [4, S, Q]
    named: dict[str, Callable[[FloatArray], FloatArray]] = {
        "average": lambda means: means[0],
        "highest_dev": lambda means: means[1],
        "honest": lambda means: means[2],
        "maximum": lambda means: means[3],
        "gain": lambda means: means[1] - means[0],
        "share": lambda means: _ratio(means[1], means[3]),
        "gap_closed": lambda means: _ratio(means[1] - means[0], means[3] - means[0]),
    }
    found = {name: _interval(columns, weight, function, level) for name, function in named.items()}
    intervals = {name: bounded(one, _SCALES[name]) for name, one in found.items()}
    honest = by_query["honest"] @ weight / weight.sum()
    return Search(
        cells.values,
        chosen,
        best,
        honest,
        **intervals,
        num_queries=cells.num_queries,
        dropped=cells.dropped,
        filled=share,
    )


def choices(
    scores: npt.ArrayLike,
    correct: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    weights: npt.ArrayLike | None = None,
    *,
    level: float = 0.95,
) -> tuple[Choice, ...]:
    """Choosing nothing, the order, the set, or set and order together, by the criterion; args as `search`.

    `order`: the best order of every set, mean over sets. `set`: the set with the highest mean score, mean over its
    orders. `set and order`: the one ordering with the highest score of all S·P; ties go to the lowest set, then
    permutation. Intervals leave out one query at a time; a choice of one set out of S says nothing about other sets.
    Cost: O(S·P·Q).
    """
    whole = usable_items(correct, state, weights)
    items, weight, cells = whole.items, whole.weights, whole.accuracy
    criterion, matrix = fitting_scores(scores, cells.values.shape), cells.values
    sets, by_query = np.arange(len(items)), np.stack([one.mean(axis=0) for one in items])
    average = by_query.mean(axis=0)

    def choice(name: str, answers: FloatArray, oracle: float, where: tuple[int | None, int | None]) -> Choice:
        lead = answers - average
        left_out = (lead @ weight - lead * weight) / (weight.sum() - weight) if len(weight) > 1 else [math.nan]
        gain = bounded(jackknife_interval(float(lead @ weight / weight.sum()), left_out, level=level), "difference")
        return Choice(name, float(answers @ weight / weight.sum()), gain, oracle, *where)

    order = choose(criterion)
    best_set = int(choose(criterion.mean(axis=1, keepdims=True).T)[0])
    s, p = (int(index) for index in np.unravel_index(int(choose(criterion.reshape(1, -1))[0]), criterion.shape))
    return (
        choice("nothing", average, float(matrix.mean()), (None, None)),
        choice("order", items[sets, order].mean(axis=0), float(matrix.max(axis=1).mean()), (None, None)),
        choice("set", by_query[best_set], float(matrix.mean(axis=1).max()), (best_set, None)),
        choice("set and order", items[s, p].astype(np.float64), float(matrix.max()), (s, p)),
    )


class OpenChoice(NamedTuple):
    """What missing answers on dev leave open of a choice by the share of right answers there."""

    missing: float
    """Share of the answers on dev, by weight."""
    num_open: int
    """Sets in which another ordering would be the highest for some answers in place of those that are missing."""
    low: float
    """Least that the orderings which could be the highest have on test, mean over sets."""
    high: float
    """Most that they have."""


def open_choice(
    dev_items: npt.ArrayLike,
    chosen: npt.ArrayLike,
    accuracy_on_test: npt.ArrayLike,
    dev_state: npt.ArrayLike | None = None,
    dev_weights: npt.ArrayLike | None = None,
) -> OpenChoice:
    """Which choices the missing answers could overturn, whatever they would have been; worst-case bounds (Manski 1990).

    Args:
        dev_items: [S, P, Q] 0 or 1, or grades, that were chosen by.
        chosen: [S] permutations.
        accuracy_on_test: [S, P].
        dev_state, dev_weights: [S, P, Q] 0 = ok, and [Q] how often each query counts.

    An ordering could be the highest where, with its own missing answers right, no other is above it with those of the
    other wrong. Raises RequestError on shapes that do not fit. Cost: O(S·P·Q).
    """
    bounds = accuracy_bounds(dev_items, dev_state, dev_weights)
    matrix = fitting_scores(accuracy_on_test, bounds.lowest.shape, "accuracy_on_test")
    places = np.asarray(chosen, dtype=np.int64)[:, None]
    beaten = np.take_along_axis(bounds.lowest, places, axis=1)
    least = np.maximum(bounds.lowest.max(axis=1, keepdims=True) - _NOTHING, beaten + _NOTHING)
    rivals = bounds.highest > least
    np.put_along_axis(rivals, places, False, axis=1)
    could = rivals.copy()
    np.put_along_axis(could, places, True, axis=1)
    ends = (np.where(could, matrix, fill) for fill in (np.inf, -np.inf))
    low, high = (float(pick(end, axis=1).mean()) for pick, end in zip((np.min, np.max), ends, strict=True))
    return OpenChoice(float(bounds.missing.mean()), int(rivals.any(axis=1).sum()), low, high)


def usable_items(correct: npt.ArrayLike, state: npt.ArrayLike | None, weights: npt.ArrayLike | None) -> Filled:
    """Checks correct [S, P, Q] with its state and weights, and fills in what is missing; args as `search`."""
    if np.ndim(correct) != 3:
        raise RequestError(f"a search needs correct of shape [S, P, Q], got {list(np.shape(correct))}")
    return filled(correct, state, weights)


def fitting_scores(values: npt.ArrayLike, shape: tuple[int, ...], name: str = "scores") -> FloatArray:
    """Scores or accuracies as float64 of `shape` [S, P]; raises RequestError on another shape or a NaN."""
    matrix = accuracy_matrix(values)
    if matrix.shape != shape:
        raise RequestError(f"{name} must have shape {list(shape)}, got {list(matrix.shape)}")
    return matrix


def random_stream(seed: int, purpose: str, *indices: int) -> np.random.Generator:
    """Random numbers of their own for a purpose (halves, permutations, dev, sets) and each of its draws."""
    return np.random.default_rng([seed, _PURPOSES[purpose], *indices])


def random_halves(num_queries: int, count: int, seed: int) -> npt.NDArray[np.bool_]:
    """[count, Q] True for a random half of the queries, the larger one where Q is odd."""
    halves = np.zeros((count, num_queries), dtype=np.bool_)
    for index, half in enumerate(halves):
        half[random_stream(seed, "halves", index).permutation(num_queries)[: (num_queries + 1) // 2]] = True
    return halves


def scores_by_resample(items: npt.NDArray[Any], counts: FloatArray) -> FloatArray:
    """[P, R] right answers of items [P, Q] in R resamples that drew queries `counts` [R, Q] times; exact to 2^24."""
    return np.asarray(items.astype(np.float32) @ counts.astype(np.float32).T)


def drawn_accuracies(whole: Filled, counts: FloatArray, nothing: float = 0.0) -> FloatArray:
    """Accuracies [S, R, P] over R draws of the queries, each `counts` [R, Q] times; NaN for a draw of none.

    Where answers are missing, of the answers that are there: the level of the drawn queries plus the ordering's lead on
    those that it answered, which is fitted to the draw alone (`_drawn_leads`). `nothing` is the lead of an ordering
    that answered none of them.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        if whole.present is None or whole.queries is None:
            sums = np.stack([scores_by_resample(one, counts).T for one in whole.items])
            return np.asarray(sums / counts.sum(axis=1)[:, None])
        level = (counts @ whole.queries) / counts.sum(axis=1)
    leads = _drawn_leads(whole.items, whole.present, counts, nothing)
    return np.asarray(level[:, None] + leads.reshape(len(counts), *whole.items.shape[:2]).transpose(1, 0, 2))


def _drawn_leads(
    items: npt.NDArray[Any], present: npt.NDArray[np.bool_], counts: FloatArray, nothing: float
) -> FloatArray:
    """[R, S·P] lead of every ordering in each of R draws `counts` [R, Q] of the queries: an additive fit of orderings
    and queries, as `additive_fit`, to what is there in the draw.

    It begins with the differences from the other answers to the same queries; where no drawn query has others, with the
    ordering's own mean. Cost: O(R·S·P·Q) multiplications a sweep.
    """
    has = present.reshape(-1, present.shape[-1]).astype(np.float64)
    right = np.where(present, items, 0.0).reshape(has.shape)
    total, num, cells = right.sum(axis=0), has.sum(axis=0), len(has)
    balanced = counts * (cells / num)
    sums, there = balanced @ right.T, balanced @ has.T
    told = (balanced * ((1 - 1 / num) * cells / max(cells - 1, 1))) @ has.T
    with np.errstate(invalid="ignore", divide="ignore"):
        alone = sums / there - (counts @ (total / num) / counts.sum(axis=1))[:, None]
        leads = np.where(told > 0, (sums - (balanced * (total / num)) @ has.T) / told, alone)
        for _ in range(_SWEEPS):
            leads[there == 0] = 0.0
            level = (total - leads @ has) / num
            leads = (sums - (balanced * level) @ has.T) / there
            leads -= np.nansum(leads, axis=1, keepdims=True) / np.maximum((there > 0).sum(axis=1, keepdims=True), 1)
    return np.where(there > 0, leads, nothing)


def half_accuracies(whole: Filled, halves: npt.NDArray[np.bool_]) -> tuple[FloatArray, FloatArray]:
    """`drawn_accuracies` on R halves [R, Q] of the queries, and on the other half of each, so that what is known of one
    half owes nothing to the other; NaN where one is empty."""
    first, second = (drawn_accuracies(whole, part * whole.weights) for part in (halves, ~halves))
    return first, second


def _honest_items(whole: Filled, num_halves: int, seed: int) -> FloatArray:
    """[S, Q] each query answered by the ordering that is best on the half without it; mean over halvings.

    Where answers are missing, what is put in for one rests on both halves: its mean over the queries is then that of
    the halves alone. NaN for one query.
    """
    items = whole.items
    num_sets, _, num_queries = items.shape
    if num_queries < 2 or num_halves < 1:
        return np.full((num_sets, num_queries), np.nan)
    halves = random_halves(num_queries, num_halves, seed)
    first, second = half_accuracies(whole, halves)
    totals, means = np.zeros((num_sets, num_queries)), np.zeros(num_sets)
    shares = halves @ whole.weights / whole.weights.sum()
    best = first.argmax(axis=2), second.argmax(axis=2)
    for r, half in enumerate(halves):
        for s in range(num_sets):
            p, other = best[0][s, r], best[1][s, r]
            totals[s] += np.where(half, items[s, other], items[s, p])
            means[s] += shares[r] * first[s, r, other] + (1 - shares[r]) * second[s, r, p]
    if whole.present is not None:
        means = np.minimum(means, num_halves * whole.accuracy.values.max(axis=1))  # as complete answers never are above
        totals += (means - totals @ whole.weights / whole.weights.sum())[:, None]
    return np.asarray(totals / num_halves)


def _ratio(numerator: FloatArray, denominator: FloatArray) -> FloatArray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.abs(denominator) > _NOTHING, numerator / denominator, np.nan)


def _interval(
    columns: FloatArray, weight: FloatArray, function: Callable[[FloatArray], FloatArray], level: float
) -> Interval:
    """Interval of a function of mean accuracies [4, ...], from the answers [4, S, Q] of each column."""
    by_set, by_query = columns @ weight / weight.sum(), columns.mean(axis=1)
    num_sets, total = by_set.shape[1], weight.sum()
    estimate = float(function(by_set.mean(axis=1)))
    nothing = np.array([math.nan])
    without_set = (by_set.sum(axis=1)[:, None] - by_set) / (num_sets - 1) if num_sets > 1 else None
    rest = total - weight
    without_query = ((by_query @ weight)[:, None] - by_query * weight) / rest if len(weight) > 1 else None
    left_out = [nothing if means is None else function(means) for means in (without_set, without_query)]
    return jackknife_interval(estimate, *left_out, level=level)
