"""The search for the best ordering on a dev split (arXiv 2511.09700, Algorithm 1), and how much of it is luck."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from iclperm.errors import RequestError
from iclperm.stats.features import Correlation, correlation, jackknife_interval
from iclperm.stats.intervals import Interval, _upper
from iclperm.stats.sensitivity import (
    FloatArray,
    accuracy,
    accuracy_matrix,
    binary_items,
    query_weights,
    usable_queries,
)

IntArray = npt.NDArray[np.int64]

CRITERIA = (
    "dev_accuracy",
    "majority_agreement",
    "global_entropy",
    "local_entropy",
    "mutual_information",
    "dev_log_likelihood",
)
LABEL_FREE = ("majority_agreement", "global_entropy", "local_entropy", "mutual_information")
"""Criteria that need no right labels."""

_DECIMALS, _NOTHING = 12, 1e-12  # what rounding makes of a tie, and of a difference of 0
_HALVES, _RESAMPLES, _HALVINGS_A_RESAMPLE = 100, 200, 8
_PURPOSES = {"halves": 1, "permutations": 2, "dev": 3, "sets": 4}


@dataclass(frozen=True)
class Search:
    """What choosing one ordering of each set by a criterion gives on the test split, in units of accuracy."""

    accuracy: FloatArray
    """[S, P] on test, over the queries that are ok in every cell."""
    chosen: IntArray
    """[S] permutation with the highest criterion; ties go to the lowest."""
    best: IntArray
    """[S] permutation with the highest accuracy on test, which only the test labels tell."""
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
    """Share of the test queries (by weight) that some cell could not answer."""

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


class Band(NamedTuple):
    """A line [N] with a band around it."""

    estimate: FloatArray
    low: FloatArray
    high: FloatArray


class SearchCurve(NamedTuple):
    """The columns of a search against the number of permutations or of dev queries, each band [N]."""

    sizes: IntArray
    """[N] ascending; the last is all there are."""
    average: Band
    highest_dev: Band
    honest: Band
    maximum: Band
    level: float
    """Of the bands."""
    resamples: int


class WinnersCurse(NamedTuple):
    """How much of a gain over permutations repeats on other queries; variances over permutations, within sets."""

    correlation: Correlation
    """Pearson's, of the criterion on dev and accuracy on test."""
    tau2: Interval
    """Covariance of dev and test accuracy: the variance of true accuracy over permutations. Can be negative."""
    variance_dev: float
    variance_test: float
    noise_dev: float
    """variance_dev - τ²: of dev accuracies around the true ones."""
    noise_test: float
    expected_maximum: float
    """z_P: expected maximum of P independent standard Gaussians."""
    expected_gain: float
    """z_P·τ²/√variance_dev, of Highest-Dev over Average."""
    observed_gain: float
    expected_oracle_gain: float
    """z_P·τ: of the truly best ordering over Average."""
    observed_oracle_gain: float
    """Max - Average, luck included."""
    observed_optimism: float
    """How far the chosen orderings lead their average by more on dev than on test."""
    expected_optimism: float
    """z_P·noise_dev/√variance_dev."""


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
    return np.asarray(accuracy_matrix(scores).round(_DECIMALS).argmax(axis=1), dtype=np.int64)


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
        correct: [S, P, Q] 0 or 1 on test.
        state: [S, P, Q] integers, 0 = ok; a query that is not ok in some cell is left out of all.
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
    items, _, weight, cells = _usable(correct, state, weights)
    criterion = _fitting(scores, cells.values.shape)
    chosen, best = choose(criterion), choose(cells.values)
    sets = np.arange(len(items))
    by_query = {
        "average": np.stack([np.asarray(one.mean(axis=0)) for one in items]),
        "highest_dev": items[sets, chosen].astype(np.float64),
        "honest": _honest_items(items, weight, halves, seed),
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
    intervals = {name: _interval(columns, weight, function, level) for name, function in named.items()}
    honest = by_query["honest"] @ weight / weight.sum()
    return Search(cells.values, chosen, best, honest, **intervals, num_queries=cells.num_queries, dropped=cells.dropped)


def criteria_scores(
    correct: npt.ArrayLike,
    predictions: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    weights: npt.ArrayLike | None = None,
    *,
    label_scores: Iterator[npt.NDArray[Any]] | None = None,
    gold: npt.ArrayLike | None = None,
) -> dict[str, FloatArray]:
    """Every criterion by which an ordering can be chosen, [S, P] each, higher is better, on the dev split.

    Args:
        correct: [S, P, Q] 0 or 1.
        predictions: [S, P, Q] index of the label that was answered; anything where the state is not ok.
        state: [S, P, Q] integers, 0 = ok; only queries ok in every cell count.
        weights: [Q] how often each query counts.
        label_scores: the log-likelihoods [Q, L] (nats) of every set and permutation in turn, held one by one; without
            them there are three criteria fewer, and without `gold` one.
        gold: [Q] index of the right label.

    `dev_accuracy` (arXiv 2511.09700); `majority_agreement`: share of answers equal to those of most permutations of the
    set, ties to the lowest label; `global_entropy`: of the frequencies of the answers, `local_entropy`: mean over
    queries of that of the label probabilities (Lu et al. 2022, there on made-up queries); `mutual_information`:
    H(mean p) - mean H(p) (Sorensen et al. 2022); `dev_log_likelihood`: mean log-probability of the right label, over
    the labels. Entropies in nats. Raises RequestError on shapes that do not fit. Cost: O(S·P·Q·L).
    """
    _, usable, weight, cells = _usable(correct, state, weights)
    answers = np.asarray(predictions)
    if answers.shape != np.shape(correct):
        raise RequestError(f"predictions must have shape {list(np.shape(correct))}, got {list(answers.shape)}")
    answers = answers[..., usable]
    agreement = accuracy(majority_agreement(answers), weights=weight).values
    scores = {"dev_accuracy": cells.values, "majority_agreement": agreement}
    scores["global_entropy"] = _frequency_entropy(answers, weight)
    if label_scores is None:
        return scores
    truth = None if gold is None else np.asarray(gold)[usable]
    cell_scores = [_label_criteria(logprob[usable], weight, truth) for logprob in label_scores]
    if len(cell_scores) != cells.values.size:
        raise RequestError(f"label_scores must yield {cells.values.size} cells, got {len(cell_scores)}")
    for name, values in zip(CRITERIA[3:], np.array(cell_scores).T, strict=True):
        if name != "dev_log_likelihood" or truth is not None:
            scores[name] = values.reshape(cells.values.shape)
    return scores


def majority_agreement(predictions: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """[S, P, Q] 1 where an answer is that of most permutations of its set; ties to the lowest label.

    predictions: [S, P, Q] labels from 0. No right label is needed. The earlier code of arXiv 2511.09700 chose by it.
    """
    answers = np.asarray(predictions)
    if answers.ndim != 3 or not np.issubdtype(answers.dtype, np.integer):
        raise RequestError(f"predictions must be integers [S, P, Q], got {answers.dtype} {list(answers.shape)}")
    agreement = np.empty(answers.shape, dtype=np.uint8)
    labels = range(int(answers.max(initial=0)) + 1)
    for of_set, agrees in zip(answers, agreement, strict=True):
        votes = np.stack([np.count_nonzero(of_set == label, axis=0) for label in labels])
        agrees[:] = of_set == votes.argmax(axis=0)
    return agreement


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
    items, _, weight, cells = _usable(correct, state, weights)
    criterion, matrix = _fitting(scores, cells.values.shape), cells.values
    num_permutations = matrix.shape[1]
    counts = _sizes(sizes, permutation_sizes(num_permutations), num_permutations, "permutations")
    orders = np.stack([_stream(seed, "permutations", r).permutation(num_permutations) for r in range(resamples)])
    first, second = _half_accuracies(items, weight, _halves(items.shape[2], resamples, seed))
    average = matrix.mean(axis=1)
    lines = []
    for count in counts:
        drawn = np.sort(orders[:, :count], axis=1)  # [R, count], so that ties go to the lowest permutation
        of_test = matrix[:, drawn]
        chosen = _at(of_test, criterion[:, drawn].round(_DECIMALS).argmax(axis=2))
        lines.append((of_test.mean(axis=2), chosen, _honest(first, second, drawn), of_test.max(axis=2)))
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

    Each resample draws a random order of the dev queries, of which the sizes are beginnings, and (for the band only)
    sets with replacement; see `search_over_permutations` for the band. At the last size every query counts as it did in
    the run. Cost: O(S·P·Q·resamples·sizes) multiplications. arXiv 2511.09700, Figure 3c, d.
    """
    items, usable, weight, _ = _usable(dev_items, dev_state, dev_weights)
    matrix = _fitting(accuracy_on_test, items.shape[:2], "accuracy_on_test")
    total = round(float(weight.sum()))
    counts = _sizes(sizes, dev_sizes(total), total, "dev queries")
    truth = None if gold is None else np.asarray(gold)[usable]
    pools = [np.arange(items.shape[2])] if truth is None else [np.flatnonzero(truth == c) for c in np.unique(truth)]
    draws = [_DevDraw(_stream(seed, "dev", r), pools) for r in range(resamples)]
    average, best = matrix.mean(axis=1), matrix.max(axis=1)
    honest = np.full(len(matrix), np.nan) if honest_by_set is None else np.asarray(honest_by_set, dtype=np.float64)
    lines = []
    for count in counts:
        drawn = np.tile(weight, (resamples, 1)) if count == total else np.stack([draw.counts(count) for draw in draws])
        chosen = np.stack([_scores_by_resample(one, drawn).argmax(axis=0) for one in items])
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


def expected_maximum(num: int) -> float:
    """z_P: expected maximum of `num` independent standard Gaussians (1.77, 2.07, 2.34, 2.59 for 16, 32, 64, 128).

    The integral of x·num·φ(x)·Φ(x)^(num-1), by the trapezoid rule. Raises RequestError below 1.
    """
    if num < 1:
        raise RequestError(f"a maximum needs at least 1 value, got {num}")
    x = np.linspace(-12.0, 12.0, 4801)
    log_density = -(x**2) / 2 - math.log(2 * math.pi) / 2 + (num - 1) * special.log_ndtr(x) + math.log(num)
    return float(np.sum(x * np.exp(log_density)) * (x[1] - x[0]))


def winners_curse(dev_accuracy: npt.ArrayLike, accuracy_on_test: npt.ArrayLike, *, level: float = 0.95) -> WinnersCurse:
    """What a choice by dev accuracy can gain, from the spread over permutations that dev and test share.

    dev_accuracy, accuracy_on_test: [S, P]. Variances and covariance have ddof 1 within sets and are averaged over them;
    the errors of dev and test are independent, as they have no query in common, so that the covariance is the variance
    τ² of the true accuracies. Expected gains assume that permutations are Gaussian; a τ² below 0 counts as 0 there. NaN
    for one permutation. τ² has a jackknife interval over sets (it speaks of other sets under these permutations).
    Cost: O(S·P). METHODS: gain of Highest-Dev z_P·τ²/√(τ²+s_d²).
    """
    dev, test = (accuracy_matrix(values) for values in (dev_accuracy, accuracy_on_test))
    dev = _fitting(dev, test.shape, "dev_accuracy")
    num = dev.shape[1]
    d, t = (values - values.mean(axis=1, keepdims=True) for values in (dev, test))
    scale = num - 1 if num > 1 else math.nan
    covariances = (d * t).sum(axis=1) / scale
    v_dev, v_test = (float((x * x).sum(axis=1).mean() / scale) for x in (d, t))
    tau2 = float(covariances.mean())
    sets = np.arange(len(dev))
    without = [float(covariances[sets != s].mean()) for s in sets] if len(sets) > 1 else [math.nan]
    z, repeats = expected_maximum(num), max(tau2, 0.0) if num > 1 else math.nan
    chosen = choose(dev)
    gain = float(t[sets, chosen].mean())
    sd_dev = math.sqrt(v_dev)
    return WinnersCurse(
        correlation=correlation(dev, test, crossed=True, level=level),
        tau2=jackknife_interval(tau2, without, level=level),
        variance_dev=v_dev,
        variance_test=v_test,
        noise_dev=v_dev - tau2,
        noise_test=v_test - tau2,
        expected_maximum=z,
        expected_gain=z * repeats / sd_dev if sd_dev else 0.0,
        observed_gain=gain,
        expected_oracle_gain=z * math.sqrt(repeats),
        observed_oracle_gain=float(t.max(axis=1).mean()),
        observed_optimism=float(d[sets, chosen].mean()) - gain,
        expected_optimism=z * (v_dev - repeats) / sd_dev if sd_dev else 0.0,
    )


def noise_within_sets(correct: npt.ArrayLike, state: npt.ArrayLike | None = None) -> float:
    """Variance of one ordering's accuracy around its true one, within a set: (σ²_PI + σ²_SPI)/Q, from the items alone.

    correct [S, P, Q] 0 or 1, state [S, P, Q] with 0 = ok. The mean square of permutations by queries within sets over
    the number of queries; the difficulty of the queries, which all orderings share, cancels, so that it is less than
    p(1 - p)/Q. Every query counts once. NaN below two permutations or queries. Cost: O(S·P·Q).
    """
    items, _, _, _ = _usable(correct, state, None)
    _, num_p, num_q = items.shape
    if min(num_p, num_q) < 2:
        return math.nan
    squares = []
    for one in items:
        by_permutation, by_query = one.mean(axis=1), one.mean(axis=0)
        mean = float(by_query.mean())
        total = mean * (1 - mean) * num_p * num_q  # Σ(x - mean)² of 0 and 1
        between = num_q * float(np.sum((by_permutation - mean) ** 2)) + num_p * float(np.sum((by_query - mean) ** 2))
        squares.append(max(total - between, 0.0) / ((num_p - 1) * (num_q - 1)))
    return float(np.mean(squares)) / int(num_q)


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
    items, _, weight, cells = _usable(correct, state, weights)
    criterion, matrix = _fitting(scores, cells.values.shape), cells.values
    sets, by_query = np.arange(len(items)), np.stack([one.mean(axis=0) for one in items])
    average = by_query.mean(axis=0)

    def choice(name: str, answers: FloatArray, oracle: float, where: tuple[int | None, int | None]) -> Choice:
        lead = answers - average
        left_out = (lead @ weight - lead * weight) / (weight.sum() - weight) if len(weight) > 1 else [math.nan]
        gain = jackknife_interval(float(lead @ weight / weight.sum()), left_out, level=level)
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


def _usable(correct: npt.ArrayLike, state: npt.ArrayLike | None, weights: npt.ArrayLike | None) -> tuple[Any, ...]:
    """Items [S, P, Q] of the usable queries, which those are, their weights, and the accuracies of all cells."""
    items = binary_items(correct)
    if items.ndim != 3:
        raise RequestError(f"a search needs correct of shape [S, P, Q], got {list(items.shape)}")
    usable = usable_queries(items.shape, state) & (query_weights(weights, items.shape[2]) > 0)
    cells = accuracy(items, state, weights)
    if not usable.any():
        raise RequestError("no query is ok in every cell; leave out the set or permutation that fails")
    weight = query_weights(weights, items.shape[2])[usable]
    return (items if usable.all() else items[..., usable]), usable, weight, cells


def _fitting(values: npt.ArrayLike, shape: tuple[int, ...], name: str = "scores") -> FloatArray:
    matrix = accuracy_matrix(values)
    if matrix.shape != shape:
        raise RequestError(f"{name} must have shape {list(shape)}, got {list(matrix.shape)}")
    return matrix


def _stream(seed: int, purpose: str, *indices: int) -> np.random.Generator:
    return np.random.default_rng([seed, _PURPOSES[purpose], *indices])


def _halves(num_queries: int, count: int, seed: int) -> npt.NDArray[np.bool_]:
    """[count, Q] True for a random half of the queries, the larger one where Q is odd."""
    halves = np.zeros((count, num_queries), dtype=np.bool_)
    for index, half in enumerate(halves):
        half[_stream(seed, "halves", index).permutation(num_queries)[: (num_queries + 1) // 2]] = True
    return halves


def _scores_by_resample(items: npt.NDArray[np.uint8], counts: FloatArray) -> FloatArray:
    """[P, R] Σ over queries of items [P, Q] times how often each was drawn [R, Q]; exact in float32 below 2^24."""
    return np.asarray(items.astype(np.float32) @ counts.astype(np.float32).T)


def _half_accuracies(
    items: npt.NDArray[np.uint8], weight: FloatArray, halves: npt.NDArray[np.bool_]
) -> tuple[FloatArray, FloatArray]:
    """[S, R, P] accuracy on each half and on the rest; NaN where a half is empty."""
    sizes = (halves * weight).sum(axis=1), (~halves * weight).sum(axis=1)
    found = []
    for part, size in zip((halves, ~halves), sizes, strict=True):
        sums = np.stack([_scores_by_resample(one, part * weight).T for one in items])
        with np.errstate(invalid="ignore"):
            found.append(sums / size[:, None])
    return found[0], found[1]


def _honest_items(items: npt.NDArray[np.uint8], weight: FloatArray, num_halves: int, seed: int) -> FloatArray:
    """[S, Q] mean over halvings of the answer of the ordering that is best on the other half; NaN for one query."""
    num_sets, _, num_queries = items.shape
    if num_queries < 2 or num_halves < 1:
        return np.full((num_sets, num_queries), np.nan)
    halves = _halves(num_queries, num_halves, seed)
    first, second = _half_accuracies(items, weight, halves)
    totals = np.zeros((num_sets, num_queries))
    for half, by_first, by_second in zip(halves, first.argmax(axis=2).T, second.argmax(axis=2).T, strict=True):
        for s, (p, other) in enumerate(zip(by_first, by_second, strict=True)):
            totals[s] += np.where(half, items[s, other], items[s, p])
    return totals / num_halves


def _honest(first: FloatArray, second: FloatArray, drawn: npt.NDArray[np.int64]) -> FloatArray:
    """[S, R] accuracy on one half of the permutation drawn [R, N] that is best on the other, both ways.

    Every resample takes the mean over a few halvings of all, given as accuracies [S, R, P] on both halves.
    """
    total = np.zeros(first.shape[:2])
    for shift in range(_HALVINGS_A_RESAMPLE):
        one, other = (np.take_along_axis(np.roll(half, shift, axis=1), drawn[None], axis=2) for half in (first, second))
        total += _at(other, one.argmax(axis=2)) + _at(one, other.argmax(axis=2))
    return total / (2 * _HALVINGS_A_RESAMPLE)


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


def _frequency_entropy(answers: npt.NDArray[Any], weight: FloatArray) -> FloatArray:
    """[S, P] entropy in nats of the weighted frequencies of the answers."""
    entropy = np.zeros(answers.shape[:2])
    for label in range(int(answers.max(initial=0)) + 1):
        entropy += special.entr(accuracy(answers == label, weights=weight).values)
    return entropy


def _label_criteria(
    logprob: npt.NDArray[Any], weight: FloatArray, truth: npt.NDArray[Any] | None
) -> tuple[float, float, float]:
    """Local entropy, mutual information and mean log-probability of the right label of one cell [Q, L]."""
    values = logprob.astype(np.float64)
    if np.isnan(values).any():
        raise RequestError("label_scores hold NaN in a query that is ok; mark it in state")
    values -= np.logaddexp.reduce(values, axis=1, keepdims=True)
    probability, share = np.exp(values), weight / weight.sum()
    local = float(share @ special.entr(probability).sum(axis=1))
    overall = float(special.entr(share @ probability).sum())
    right = math.nan if truth is None else float(share @ values[np.arange(len(truth)), truth])
    return local, overall - local, right


class _DevDraw:
    """One random order in which a study would ask its dev queries: classes take turns, short ones come round again."""

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
    sizes = sorted({int(size) for size in (default if given is None else given)})
    if not sizes or sizes[0] < 1 or sizes[-1] > total:
        raise RequestError(f"sizes must be numbers of {what} from 1 to {total}, got {sizes}")
    return np.array(sizes, dtype=np.int64)


def _at(values: FloatArray, places: npt.NDArray[np.int64]) -> FloatArray:
    """values [S, R, N] at places [S, R]."""
    return np.take_along_axis(values, places[..., None], axis=2)[..., 0]


def _curve(
    sizes: IntArray, lines: Sequence[tuple[FloatArray, ...]], average: FloatArray, level: float, seed: int
) -> SearchCurve:
    """Bands of the four columns from their values [S, R] at each size, and each set's average [S]."""
    num_sets, resamples = lines[0][0].shape
    again = np.stack([_stream(seed, "sets", r).integers(num_sets, size=num_sets) for r in range(resamples)])
    tail, centre = 1 - _upper(level), float(average.mean())
    columns = []
    for column in range(4):
        leads = [line[column] - average[:, None] for line in lines]  # each [S, R]
        drawn = [np.take_along_axis(lead, again.T, axis=0).mean(axis=0) for lead in leads]
        bounds = [np.quantile(values, (tail, 1 - tail)) if num_sets > 1 else (math.nan, math.nan) for values in drawn]
        low, high = (centre + np.array(bounds)).T
        columns.append(Band(centre + np.array([lead.mean() for lead in leads]), low, high))
    of_average, highest_dev, honest, maximum = columns
    return SearchCurve(sizes, of_average, highest_dev, honest, maximum, level, resamples)
