"""Slow oracles of the scores of demonstrations: one permutation and one demonstration at a time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from itertools import combinations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Orders = npt.NDArray[np.int64]
Seen = Callable[[int, int], "float | None"]


def _z(values: list[float], value: float) -> float:
    """z of `value` among `values`; 0 where they are equal."""
    spread = statistics.stdev(values)
    return (value - statistics.fmean(values)) / spread if spread > 1e-12 else 0.0


def _mean_and_se(values: list[float]) -> tuple[float, float]:
    mean = statistics.fmean(values) if values else math.nan
    return mean, statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _table(
    accuracy: FloatArray, orders: Orders, score: Callable[[int, int], tuple[float, float]]
) -> tuple[FloatArray, FloatArray]:
    pairs = np.array([[score(s, e) for e in range(orders.shape[1])] for s in range(len(accuracy))])
    return pairs[..., 0], pairs[..., 1]


def contributions(accuracy: FloatArray, orders: Orders, shots: list[int], kind: str, s: int, e: int) -> list[float]:
    """What demonstration e of set s adds in each permutation where that is known.

    `kind` is shapley, marginal, prefix or single.
    """
    found = []
    runs = range(accuracy.shape[1])
    for p in runs:
        after = orders[p].tolist().index(e) + 1
        if after not in shots or (kind in ("shapley", "marginal") and after - 1 not in shots):
            continue
        here = shots.index(after)
        if kind in ("shapley", "marginal"):
            steps = [accuracy[s, other, here] - accuracy[s, other, here - 1] for other in runs]
            found.append(steps[p] if kind == "shapley" else _z(steps, steps[p]))
        elif kind == "prefix":
            found.append(_z(accuracy[s, :, here].tolist(), accuracy[s, p, here]))
        elif after == 1:
            found.append(accuracy[s, p, here])
    return found


def mean_contribution(
    accuracy: FloatArray, orders: Orders, shots: list[int], kind: str
) -> tuple[FloatArray, FloatArray]:
    """Mean of `contributions` and its standard error, each [S, K]."""
    return _table(accuracy, orders, lambda s, e: _mean_and_se(contributions(accuracy, orders, shots, kind, s, e)))


def stability(accuracy: FloatArray, orders: Orders, shots: list[int], kind: str) -> FloatArray:
    """Mean over standard deviation of `contributions`, [S, K]."""

    def score(s: int, e: int) -> tuple[float, float]:
        z = contributions(accuracy, orders, shots, kind, s, e)
        if len(z) < 2:
            return math.nan, 0.0
        mean, spread = statistics.fmean(z), statistics.stdev(z)
        if spread <= 1e-12:
            return (0.0 if abs(mean) <= 1e-12 else math.nan), 0.0
        return mean / spread, 0.0

    return _table(accuracy, orders, score)[0]


def over_prefixes(accuracy: FloatArray, orders: Orders, shots: list[int], is_z: bool) -> FloatArray:
    """[S, K] mean over all prefixes that hold a demonstration of z (member), or of the deviation from the mean at the
    same k plus the mean level (condacc)."""
    runs = range(accuracy.shape[1])
    some = [n for n, k in enumerate(shots) if k > 0]

    def score(s: int, e: int) -> tuple[float, float]:
        found = []
        for p in runs:
            for n in some:
                if e in orders[p, : shots[n]].tolist():
                    values = accuracy[s, :, n].tolist()
                    value = accuracy[s, p, n]
                    found.append(_z(values, value) if is_z else value - statistics.fmean(values))
        level = 0.0 if is_z else statistics.fmean(accuracy[s, p, n] for p in runs for n in some)
        return (statistics.fmean(found) + level if found else math.nan), 0.0

    return _table(accuracy, orders, score)[0]


def influence(accuracy: FloatArray, orders: Orders, shots: list[int]) -> tuple[FloatArray, FloatArray]:
    """Least squares of accuracy on one level a k and the indicator that a demonstration is there, with the sandwich
    standard error clustered by permutation; each [S, K]."""
    num_permutations = accuracy.shape[1]

    def score(s: int, e: int) -> tuple[float, float]:
        there = np.array([[float(e in orders[p, :k].tolist()) for k in shots] for p in range(num_permutations)])
        levels = np.tile(np.eye(len(shots)), (num_permutations, 1))
        design = np.column_stack([there.ravel(), levels])
        if np.linalg.matrix_rank(design) < design.shape[1]:
            return math.nan, math.nan
        target = accuracy[s].ravel()
        solution = np.linalg.lstsq(design, target, rcond=None)[0]
        residual = (target - design @ solution).reshape(num_permutations, -1)
        bread = np.linalg.inv(design.T @ design)
        by_permutation = [
            design.reshape(num_permutations, len(shots), -1)[p].T @ residual[p] for p in range(len(there))
        ]
        meat = sum(np.outer(row, row) for row in by_permutation)
        variance = (bread @ meat @ bread)[0, 0] * num_permutations / (num_permutations - 1)
        return float(solution[0]), math.sqrt(max(variance, 0.0))

    return _table(accuracy, orders, score)


def truncated_shapley(accuracy: FloatArray, orders: Orders, tolerance: float) -> tuple[FloatArray, float]:
    """Algorithm 1 of Ghorbani & Zou (2019) over given permutations: values [S, K] and share of steps skipped."""
    num_sets, num_permutations, _ = accuracy.shape
    values, skipped = np.zeros((num_sets, orders.shape[1])), 0
    for s in range(num_sets):
        whole = statistics.fmean(accuracy[s, :, -1].tolist())
        for p in range(num_permutations):
            score, stopped = accuracy[s, p, 0], False
            for position, e in enumerate(orders[p].tolist()):
                stopped = stopped or abs(whole - score) < tolerance
                after = score if stopped else accuracy[s, p, position + 1]
                values[s, e] += (after - score) / num_permutations
                skipped += int(stopped)
                score = after
    return values, skipped / (num_sets * num_permutations * orders.shape[1])


def exact_shapley(value: Callable[[frozenset[int]], float], num: int) -> list[float]:
    """Shapley values of a game by its definition: a weighted sum over all coalitions."""
    found = []
    for e in range(num):
        rest = [other for other in range(num) if other != e]
        total = 0.0
        for size in range(num):
            weight = math.factorial(size) * math.factorial(num - 1 - size) / math.factorial(num)
            for coalition in combinations(rest, size):
                total += weight * (value(frozenset((*coalition, e))) - value(frozenset(coalition)))
        found.append(total)
    return found


def datamodel(accuracy: FloatArray, orders: Orders, shots: list[int], ridge: float) -> FloatArray:
    """[S, K, K] ridge effects (demonstration, position): least squares on data with √ridge rows added."""
    num_sets, num_permutations, _ = accuracy.shape
    num = orders.shape[1]
    found = np.zeros((num_sets, num, num))
    for s in range(num_sets):
        rows, targets = [], []
        for n, k in enumerate(shots):
            indicators = np.zeros((num_permutations, num, num))
            for p in range(num_permutations):
                for position in range(k):
                    indicators[p, orders[p, position], position] = 1.0
            rows.append((indicators - indicators.mean(axis=0)).reshape(num_permutations, -1))
            targets.append(accuracy[s, :, n] - accuracy[s, :, n].mean())
        design = np.vstack([*rows, math.sqrt(ridge) * np.eye(num * num)])
        target = np.concatenate([*targets, np.zeros(num * num)])
        found[s] = np.linalg.lstsq(design, target, rcond=None)[0].reshape(num, num)
    return found


def within_sets_correlation(ours: FloatArray, theirs: FloatArray) -> float:
    """Pearson correlation of the deviations from each set's mean, pooled over the sets."""
    left = [value - statistics.fmean(row) for row in ours.tolist() for value in row]
    right = [value - statistics.fmean(row) for row in theirs.tolist() for value in row]
    return statistics.correlation(left, right)


def diversity(similarities: FloatArray) -> FloatArray:
    """[S, K] one minus the mean similarity to the others of the set."""
    num = similarities.shape[1]
    return np.array(
        [[1 - statistics.fmean(one[e, o] for o in range(num) if o != e) for e in range(num)] for one in similarities]
    )


def total_similarity(similarities: FloatArray, chosen: list[int]) -> float:
    """Sum over the pairs of chosen demonstrations of a similarity table [K, K]."""
    return sum(float(similarities[a, b]) for a, b in combinations(chosen, 2))
