"""What a search over fewer permutations, or with fewer dev queries, would have given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.errors import RequestError
from iclperm.stats.intervals import upper_tail
from iclperm.stats.search import (
    TIE_DECIMALS,
    IntArray,
    drawn_accuracies,
    fitting_scores,
    half_accuracies,
    random_halves,
    random_stream,
    usable_items,
)
from iclperm.stats.sensitivity import FloatArray

_RESAMPLES = 200
_HALVINGS_A_RESAMPLE = 8


class Band(NamedTuple):
    """A value [N] at each of N sizes, with a band around it that is cut to 0..1."""

    estimate: FloatArray
    low: FloatArray
    high: FloatArray


class SearchCurve(NamedTuple):
    """What a search gives against its number of permutations or of dev queries, N sizes; the columns of `Search`."""

    sizes: IntArray
    """[N] ascending; the last is all there are."""
    average: Band
    highest_dev: Band
    honest: Band
    maximum: Band
    level: float
    """Of the bands."""
    resamples: int


def search_over_permutations(
    scores: npt.ArrayLike,
    correct: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    weights: npt.ArrayLike | None = None,
    *,
    sizes: Sequence[int] | None = None,
    level: float = 0.95,
    resamples: int = _RESAMPLES,
    seed: int = 0,
) -> SearchCurve:
    """What a search over fewer permutations gives, by drawing them from those that were run.

    Args as `search`; `sizes` are the numbers of permutations, by default `permutation_sizes`. Each resample draws
    nested lists of permutations without replacement, shared by the sets, eight random halvings of the queries for the
    honest oracle, and (for the band only) sets with replacement. Estimates are means over resamples. The band is the
    grand Average plus the quantiles of each line's lead over it within sets: it speaks of other sets and permutations,
    not of other test queries, and leaves out how far the sets' averages lie apart. Near P the draws overlap, and the
    band is that of the sets. A criterion that compares permutations (majority agreement) is that of all P. Cost:
    O(S·P·Q·resamples) multiplications. arXiv 2511.09700, Figure 3a, b.
    """
    whole = usable_items(correct, state, weights)
    items, cells = whole.items, whole.accuracy
    criterion, matrix = fitting_scores(scores, cells.values.shape), cells.values
    num_permutations = matrix.shape[1]
    counts = _sizes(sizes, permutation_sizes(num_permutations), num_permutations, "permutations")
    orders = np.stack([random_stream(seed, "permutations", r).permutation(num_permutations) for r in range(resamples)])
    halves = random_halves(items.shape[2], resamples, seed)
    first, second = half_accuracies(whole, halves)
    share = halves @ whole.weights / whole.weights.sum()
    average = matrix.mean(axis=1)
    lines = []
    for count in counts:
        drawn = np.sort(orders[:, :count], axis=1)  # [R, count], so that ties go to the lowest permutation
        of_test = matrix[:, drawn]
        chosen = _at(of_test, criterion[:, drawn].round(TIE_DECIMALS).argmax(axis=2))
        best = of_test.max(axis=2)
        honest = np.minimum(_honest(first, second, share, drawn), best)  # above it only where answers are missing
        lines.append((of_test.mean(axis=2), chosen, honest, best))
    return _curve(counts, lines, average, level, seed)


def search_over_dev_queries(
    dev_items: npt.ArrayLike,
    accuracy_on_test: npt.ArrayLike,
    dev_state: npt.ArrayLike | None = None,
    dev_weights: npt.ArrayLike | None = None,
    *,
    gold: npt.ArrayLike | None = None,
    honest_by_set: npt.ArrayLike | None = None,
    sizes: Sequence[int] | None = None,
    level: float = 0.95,
    resamples: int = _RESAMPLES,
    seed: int = 0,
) -> SearchCurve:
    """What a search with fewer dev queries gives, by drawing them from those that were asked.

    Args:
        dev_items: [S, P, Q] 0 or 1: `correct` on dev, or `majority_agreement`.
        accuracy_on_test: [S, P].
        dev_state, dev_weights: [S, P, Q] 0 = ok, and [Q] how often each query counts.
        gold: [Q] right labels; draws are then balanced as a study's are: classes take turns, and those that are short
            come round again.
        honest_by_set: [S] of `search`, drawn as a level.
        sizes: numbers of dev queries, by default 50, 100, 250, 500, ... and all.

    Each resample draws one random order of the dev queries, and a size takes the first of them, choosing by the answers
    that are there (`drawn_accuracies`); an ordering that answered none of them is not chosen. For the band it
    also draws sets with replacement (see `search_over_permutations`). At the last size every query counts as it did in
    the run. Cost: O(S·P·Q·resamples·sizes) multiplications. arXiv 2511.09700, Figure 3c, d.
    """
    whole = usable_items(dev_items, dev_state, dev_weights)
    items, usable, weight = whole.items, whole.usable, whole.weights
    matrix = fitting_scores(accuracy_on_test, items.shape[:2], "accuracy_on_test")
    total = round(float(weight.sum()))
    counts = _sizes(sizes, dev_sizes(total), total, "dev queries")
    truth = None if gold is None else np.asarray(gold)[usable]
    pools = [np.arange(items.shape[2])] if truth is None else [np.flatnonzero(truth == c) for c in np.unique(truth)]
    draws = [DevDraw(random_stream(seed, "dev", r), pools) for r in range(resamples)]
    average, best = matrix.mean(axis=1), matrix.max(axis=1)
    honest = np.full(len(matrix), np.nan) if honest_by_set is None else np.asarray(honest_by_set, dtype=np.float64)
    lines = []
    for count in counts:
        drawn = np.tile(weight, (resamples, 1)) if count == total else np.stack([draw.counts(count) for draw in draws])
        chosen = drawn_accuracies(whole, drawn, -np.inf).round(TIE_DECIMALS).argmax(axis=2)
        level_lines = (np.tile(line[:, None], resamples) for line in (average, honest, best))
        flat, of_honest, of_best = level_lines
        lines.append((flat, np.take_along_axis(matrix, chosen, axis=1), of_honest, of_best))
    return _curve(counts, lines, average, level, seed)


def permutation_sizes(num_permutations: int) -> list[int]:
    """16, 32, 64, ... up to P, and P; from 2 where P is at most 16."""
    start = 16 if num_permutations > 16 else 2
    doubled = [start << step for step in range(num_permutations.bit_length()) if start << step < num_permutations]
    return [*doubled, num_permutations]


def dev_sizes(num_queries: int) -> list[int]:
    """50, 100, 250, 500, 1000, ... and all; from 5 where there are at most 50."""
    start = 5 if num_queries <= 50 else 50
    steps = (round(start * digit * 10**power) for power in range(7) for digit in (1, 2, 5))
    return [*(size for size in steps if size < num_queries), num_queries]


def _honest(first: FloatArray, second: FloatArray, share: FloatArray, drawn: npt.NDArray[np.int64]) -> FloatArray:
    """[S, R] accuracy, on one half of the queries, of the permutation that is best on the other half.

    `first` and `second` [S, R, P] are accuracies on both halves of R halvings, `share` [R] what the first half weighs
    of both, `drawn` [R, N] the permutations that each resample chooses among. A resample takes the mean over a few of
    the halvings, both ways round, each half as it weighs: of complete answers that is never above the best accuracy of
    all, as no half has more than its own best.
    """
    total = np.zeros(first.shape[:2])
    for shift in range(_HALVINGS_A_RESAMPLE):
        one, other = (np.take_along_axis(np.roll(half, shift, axis=1), drawn[None], axis=2) for half in (first, second))
        of_one = np.roll(share, shift)
        total += (1 - of_one) * _at(other, one.argmax(axis=2)) + of_one * _at(one, other.argmax(axis=2))
    return total / _HALVINGS_A_RESAMPLE


class DevDraw:
    """One random order in which a study would ask its dev queries: classes take turns, and short ones begin again.

    `pools` are the queries of each class, by number.
    """

    def __init__(self, stream: np.random.Generator, pools: Sequence[npt.NDArray[np.int64]]) -> None:
        self._pools = [stream.permutation(pools[index]) for index in stream.permutation(len(pools))]

    def counts(self, asked: int) -> FloatArray:
        """[Q] how often each query is among the first `asked`."""
        counts = np.zeros(sum(map(len, self._pools)))
        for turn, pool in enumerate(self._pools):
            rounds, rest = divmod(len(range(turn, asked, len(self._pools))), len(pool))
            counts[pool] = rounds
            counts[pool[:rest]] += 1
        return counts


def _sizes(given: Sequence[int] | None, default: Sequence[int], total: int, what: str) -> IntArray:
    """The sizes asked for, or the usual ones, ascending; raises RequestError for one outside 1..total."""
    sizes = sorted({int(size) for size in (default if given is None else given)})
    if not sizes or sizes[0] < 1 or sizes[-1] > total:
        raise RequestError(f"sizes must be numbers of {what} from 1 to {total}, got {sizes}")
    return np.array(sizes, dtype=np.int64)


def _at(values: FloatArray, places: npt.NDArray[np.int64]) -> FloatArray:
    """[S, R] of values [S, R, N], those at places [S, R]."""
    return np.take_along_axis(values, places[..., None], axis=2)[..., 0]


def _curve(
    sizes: IntArray, lines: Sequence[tuple[FloatArray, ...]], average: FloatArray, level: float, seed: int
) -> SearchCurve:
    """Bands of the four columns, from their values [S, R] in R resamples at each size, and each set's average [S]."""
    num_sets, resamples = lines[0][0].shape
    again = np.stack([random_stream(seed, "sets", r).integers(num_sets, size=num_sets) for r in range(resamples)])
    tail, centre = 1 - upper_tail(level), float(average.mean())
    columns = []
    for column in range(4):
        leads = [line[column] - average[:, None] for line in lines]  # each [S, R]
        drawn = [np.take_along_axis(lead, again.T, axis=0).mean(axis=0) for lead in leads]
        bounds = [np.quantile(values, (tail, 1 - tail)) if num_sets > 1 else (math.nan, math.nan) for values in drawn]
        low, high = np.clip(centre + np.array(bounds), 0.0, 1.0).T
        columns.append(Band(centre + np.array([lead.mean() for lead in leads]), low, high))
    of_average, highest_dev, honest, maximum = columns
    return SearchCurve(sizes, of_average, highest_dev, honest, maximum, level, resamples)
