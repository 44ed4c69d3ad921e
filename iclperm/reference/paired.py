"""Slow oracles of the paired comparisons and of the sums over the item tensor: plain loops and textbook definitions."""

from __future__ import annotations

import math
from itertools import combinations, product

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Array = npt.NDArray[np.generic]


def holm(p_values: list[float]) -> list[float]:
    """Adjusted p-values by the definition: the smallest level at which Holm's step-down test rejects each."""
    candidates = sorted({0.0, 1.0, *(min(p * step, 1.0) for p in p_values for step in range(1, len(p_values) + 1))})

    def rejected(level: float) -> set[int]:
        found: set[int] = set()
        for step, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
            if p_values[index] * (len(p_values) - step) > level:
                break
            found.add(index)
        return found

    # at level 1 nothing can be wrongly kept: what is not rejected before is adjusted to 1
    return [next((level for level in candidates if i in rejected(level)), 1.0) for i in range(len(p_values))]


def discordant(first: list[int], second: list[int]) -> tuple[int, int]:
    """Queries that only the first, and only the second, answers rightly."""
    pairs = list(zip(first, second, strict=True))
    return sum(pair == (1, 0) for pair in pairs), sum(pair == (0, 1) for pair in pairs)


def mcnemar(b: int, c: int) -> tuple[float, float]:
    """Exact and mid-p of McNemar's test, from every way to share b + c queries out by coin."""
    both = b + c
    ways = [math.comb(both, i) / 2**both for i in range(both + 1)]
    seen = ways[b]
    extreme = math.fsum(way for i, way in enumerate(ways) if abs(2 * i - both) >= abs(b - c))
    # two tails at least as far out as what was seen; half the weight of what was seen, on both sides
    return min(extreme, 1.0), min(extreme - (seen if b != c else 0.0), 1.0)


def paired_se(first: list[int], second: list[int]) -> float:
    """Standard error of a mean of differences -1, 0 and 1, with the variance over n."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    mean = sum(differences) / len(differences)
    return math.sqrt(sum((d - mean) ** 2 for d in differences) / len(differences) / len(differences))


def score_of_difference(b: float, c: float, n: float, delta: float) -> float:
    """Tango's score, from the likelihood: under a difference the likeliest chance of the second context alone is
    searched for, and the observed difference is told in standard errors of that model.
    """

    def likelihood(second: float) -> float:
        chances = (second + delta, second, 1 - 2 * second - delta)
        return math.fsum(
            count * (math.log(chance) if chance > 0 else -math.inf)
            for count, chance in zip((b, c, n - b - c), chances, strict=True)
            if count
        )

    low, high = max(0.0, -delta), (1 - delta) / 2
    for _ in range(80):  # concave: thirds
        left, right = low + (high - low) / 3, high - (high - low) / 3
        if likelihood(left) < likelihood(right):
            low = left
        else:
            high = right
    second = (low + high) / 2
    variance = n * (2 * second + delta - delta**2)
    return (b - c - n * delta) / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, b - c - n * delta)


def paired_interval(b: int, c: int, n: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Tango's score interval: the score is compared with z, difference by difference."""

    def bound(inside: float, outside: float) -> float:
        for _ in range(30):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if abs(score_of_difference(b, c, n, middle)) <= z else (inside, middle)
        return inside

    difference = (b - c) / n
    return (-1.0 if c == n else bound(difference, -1.0)), (1.0 if b == n else bound(difference, 1.0))


def paired_grades(first: list[float], second: list[float], quantile: float) -> tuple[float, float, float]:
    """Standard error and bounds of a mean difference with two pseudo-queries written out as weighted observations."""
    differences = [one - two for one, two in zip(first, second, strict=True)]
    largest = max(map(abs, differences)) or 1.0
    weighted = [*((d, 1.0) for d in differences), (largest, 0.5), (-largest, 0.5), (0.0, 1.0)]
    total = math.fsum(weight for _, weight in weighted)
    centre = math.fsum(weight * d for d, weight in weighted) / total
    variance = math.fsum(weight * (d - centre) ** 2 for d, weight in weighted) / total
    se = math.sqrt(variance / total)
    return se, max(centre - quantile * se, -1.0), min(centre + quantile * se, 1.0)


def clustered_paired_se(first: FloatArray, second: FloatArray, axes: list[int]) -> float:
    """Sandwich standard error of the mean difference: sums of residuals by cluster, one or two ways."""
    difference = first - second
    mean = math.fsum(difference.ravel().tolist()) / difference.size

    def variance(names: list[int]) -> float:
        clusters: dict[tuple[int, ...], float] = {}
        for place in np.ndindex(difference.shape):
            key = tuple(place[name] for name in names)
            clusters[key] = clusters.get(key, 0.0) + float(difference[place]) - mean
        num = len(clusters)
        return num / (num - 1) * math.fsum(value**2 for value in clusters.values()) / difference.size**2

    if len(axes) == 1:
        return math.sqrt(variance(axes))
    alone = [variance([axis]) for axis in axes]
    return math.sqrt(max(sum(alone) - variance(axes), *alone))


def cochran_q(correct: Array) -> float:
    """Q of correct [C, Q]: squared deviations of the contexts' totals over the mean variance within a query."""
    table: list[list[int]] = correct.tolist()
    num_contexts = len(table)
    totals = [sum(row) for row in table]
    mean = sum(totals) / num_contexts
    by_query = [sum(column) / num_contexts for column in zip(*table, strict=True)]
    variance = math.fsum(share * (1 - share) for share in by_query) * num_contexts / (num_contexts - 1)
    return math.fsum((total - mean) ** 2 for total in totals) / variance if variance else 0.0


def intraclass_correlation(scores: FloatArray) -> float:
    """One-way ANOVA of scores [G, N] with sums of squares written out."""
    rows = scores.tolist()
    num_groups, size = scores.shape
    grand = math.fsum(math.fsum(row) for row in rows) / scores.size
    means = [math.fsum(row) / size for row in rows]
    between = size * math.fsum((mean - grand) ** 2 for mean in means) / (num_groups - 1)
    within = math.fsum((x - mean) ** 2 for row, mean in zip(rows, means, strict=True) for x in row)
    within /= num_groups * (size - 1)
    return float((between - within) / (between + (size - 1) * within))


def nested_components(scores: FloatArray) -> dict[str, float]:
    """Components of scores [S, P, Q], permutations within sets, by solving the expected mean squares."""
    num_s, num_p, num_q = scores.shape
    grand = scores.mean()
    by_s, by_i = scores.mean(axis=(1, 2)), scores.mean(axis=(0, 1))
    by_sp, by_si = scores.mean(axis=2), scores.mean(axis=1)
    squares: dict[str, float] = dict.fromkeys(("S", "P", "I", "SI", "PI"), 0.0)
    for s, p, i in product(range(num_s), range(num_p), range(num_q)):
        squares["S"] += (by_s[s] - grand) ** 2
        squares["P"] += (by_sp[s, p] - by_s[s]) ** 2
        squares["I"] += (by_i[i] - grand) ** 2
        squares["SI"] += (by_si[s, i] - by_s[s] - by_i[i] + grand) ** 2
        squares["PI"] += (float(scores[s, p, i]) - by_sp[s, p] - by_si[s, i] + by_s[s]) ** 2
    s, p, q = num_s - 1, num_s * (num_p - 1), num_q - 1
    degrees = {"S": s, "P": p, "I": q, "SI": s * q, "PI": p * q}
    mean_squares = [squares[name] / degrees[name] for name in degrees]
    # E[MS] in the components S, P(S), I, SI, PI(S)
    table = [
        [num_p * num_q, num_q, 0, num_p, 1],
        [0, num_q, 0, 0, 1],
        [0, 0, num_s * num_p, num_p, 1],
        [0, 0, 0, num_p, 1],
        [0, 0, 0, 0, 1],
    ]
    return dict(zip(degrees, np.linalg.solve(table, mean_squares).tolist(), strict=True))


def pairs(num_contexts: int) -> list[tuple[int, int]]:
    """Every two contexts."""
    return list(combinations(range(num_contexts), 2))


def segment_sums(correct: Array, edges: list[int], weights: list[int]) -> Array:
    """Weighted sums of correct [..., Q] between edges, answer by answer."""
    cells = correct.shape[:-1]
    sums = np.zeros((*cells, len(edges) - 1), np.int64)
    for cell in np.ndindex(*cells):
        for segment in range(len(edges) - 1):
            for q in range(edges[segment], edges[segment + 1]):
                sums[(*cell, segment)] += weights[q] * int(correct[(*cell, q)])
    return sums


def tensor_sums(correct: Array, usable: list[bool]) -> tuple[Array, Array, Array, Array, Array]:
    """Of correct [S, P, K, Q]: right answers [S, P, K] over usable queries, sums over P, over S and over both, and the
    squares [P, K] of the sums over S, over usable queries.
    """
    num_s, num_p, num_k, num_q = correct.shape
    right = np.zeros((num_s, num_p, num_k), np.int64)
    by_set = np.zeros((num_s, num_k, num_q), np.int64)
    by_permutation = np.zeros((num_p, num_k, num_q), np.int64)
    by_query = np.zeros((num_k, num_q), np.int64)
    for s, p, k, q in np.ndindex(correct.shape):
        answer = int(correct[s, p, k, q])
        right[s, p, k] += answer * usable[q]
        by_set[s, k, q] += answer
        by_permutation[p, k, q] += answer
        by_query[k, q] += answer
    squares = np.zeros((num_p, num_k), np.int64)
    for p, k, q in np.ndindex(by_permutation.shape):
        squares[p, k] += int(by_permutation[p, k, q]) ** 2 * usable[q]
    return right, by_set, by_permutation, by_query, squares
