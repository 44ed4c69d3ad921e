"""Slow oracles of the curve and of convergence: definitions written out, by another route than the fast ones."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt

from iclperm.reference import stats
from iclperm.reference.paired import score_of_difference

FloatArray = npt.NDArray[np.float64]

Z = 1.959963984540054
"""The quantile of 95 % intervals."""
_GAUSS = statistics.NormalDist()


def paired(first: Sequence[float], second: Sequence[float], weights: Sequence[float]) -> tuple[float, float, float]:
    """Difference, shifted centre and standard error of two contexts: the pseudo-queries are really added.

    Half a query at +1, half at -1 and one at 0, each of the weight of a typical draw.
    """
    draws = [(weight, 1.0, after - before) for before, after, weight in zip(first, second, weights, strict=True)]
    total = math.fsum(weight for weight, _, _ in draws)
    plain = math.fsum(weight * change for weight, _, change in draws) / total
    typical = math.fsum(weight**2 for weight, _, _ in draws) / total
    draws += [(typical, 0.5, 1), (typical, 0.5, -1), (typical, 1.0, 0)]
    total = math.fsum(weight * count for weight, count, _ in draws)
    centre = math.fsum(weight * count * change for weight, count, change in draws) / total
    variance = math.fsum(count * (weight * (change - centre)) ** 2 for weight, count, change in draws)
    return plain, centre, math.sqrt(variance) / total


def equivalence(
    first: Sequence[float], second: Sequence[float], weights: Sequence[float], margin: float
) -> tuple[float, float]:
    """p-values of the two one-sided tests within ± margin (the larger one), and of the test of no difference.

    The former by Tango's score of a table of as many effective queries, with the difference and the mean square
    observed; the latter by the error of `paired`, or by the same score of no difference where that is less sure.
    """
    changes = [after - before for before, after in zip(first, second, strict=True)]
    squares = math.fsum(weight**2 for weight in weights)
    num = math.fsum(weights) ** 2 / squares
    mean = math.fsum(weight * change for weight, change in zip(weights, changes, strict=True)) / math.fsum(weights)
    moved = math.fsum((weight * change) ** 2 for weight, change in zip(weights, changes, strict=True)) / squares
    moved = max(moved, abs(mean))
    table = num * (moved + mean) / 2, num * (moved - mean) / 2, num
    below = _GAUSS.cdf(score_of_difference(*table, margin))
    above = 1 - _GAUSS.cdf(score_of_difference(*table, -margin))
    _, centre, se = paired(first, second, weights)
    sure = min(abs(centre) / se, abs(score_of_difference(*table, 0.0)))
    return max(above, below), 2 * (1 - _GAUSS.cdf(sure))


def unseen_error(num: float) -> float:
    """The standard error that gives a share of 0 of n, ± 1.96 of it, the upper end that Wilson's interval has."""
    return Z / (num + Z**2)


def mean_error(scores: FloatArray) -> float:
    """Standard error of the mean of scores [S, P, Q], all axes of two levels or more, from the table of components."""
    _, sigma2 = stats.variance_components(scores)
    sizes = dict(zip("SPI", scores.shape, strict=True))
    variance = sum(max(value, 0.0) / math.prod(sizes[name] for name in effect) for effect, value in sigma2.items())
    by_set = statistics.variance([float(one_set.mean()) for one_set in scores]) / len(scores)
    return math.sqrt(max(variance, by_set))


def weighted_mean_error(scores: FloatArray, weights: Sequence[float]) -> float:
    """The same of a weighted mean, the queries of one weight being a class of two at least.

    Sets, permutations and both from the two-way analysis of the weighted accuracies, less what queries add to them,
    class by class; queries from the analysis of each class alone.
    """
    num_s, num_p, _ = scores.shape
    classes = [[q for q, of in enumerate(weights) if of == weight] for weight in sorted(set(weights)) if weight > 0]
    shares = [len(members) * weights[members[0]] / math.fsum(weights) for members in classes]
    inside = [stats.variance_components(scores[:, :, members])[1] for members in classes]
    scale = [share**2 / len(members) for share, members in zip(shares, classes, strict=True)]
    noise = {
        effect: math.fsum(part * sigma2[effect] for part, sigma2 in zip(scale, inside, strict=True))
        for effect in ("I", "SI", "PI", "SPI")
    }
    table = [
        [math.fsum(w * x for w, x in zip(weights, cell, strict=True)) / math.fsum(weights) for cell in row]
        for row in scores
    ]
    rows = [statistics.fmean(row) for row in table]
    columns = [statistics.fmean(row[p] for row in table) for p in range(num_p)]
    mean = statistics.fmean(rows)
    rest = [(table[s][p] - rows[s] - columns[p] + mean) ** 2 for s in range(num_s) for p in range(num_p)]
    residual = math.fsum(rest) / ((num_s - 1) * (num_p - 1))
    parts = [
        max(statistics.variance(rows) - residual / num_p - noise["SI"], 0) / num_s,
        max(statistics.variance(columns) - residual / num_s - noise["PI"], 0) / num_p,
        max(residual - noise["SPI"], 0) / (num_s * num_p),
        max(noise["I"], 0),
        max(noise["SI"], 0) / num_s,
        max(noise["PI"], 0) / num_p,
        max(noise["SPI"], 0) / (num_s * num_p),
    ]
    return math.sqrt(max(math.fsum(parts), statistics.variance(rows) / num_s))


def needed(sigma2: dict[str, float], shape: tuple[int, int, int], place: int, variance: float, most: int) -> int | None:
    """Least size of one axis, tried one by one, at which the variance of a mean is at most `variance`."""
    for size in range(1, most + 1):
        sizes = dict(zip("SPI", shape, strict=True)) | {"SPI"[place]: size}
        found = sum(max(value, 0.0) / math.prod(sizes[name] for name in effect) for effect, value in sigma2.items())
        if found <= variance:
            return size
    return None


def over_parts(accuracy: FloatArray, axis: int, size: int) -> tuple[list[float], list[float], list[float]]:
    """Mean, order and selection sensitivity of accuracy [S, P] over all parts of an axis of a size, one by one."""
    rows = []
    for places in combinations(range(accuracy.shape[axis]), size):
        part = np.take(accuracy, places, axis)
        order = stats.order_sensitivity(part, "mean_std") if part.shape[1] > 1 else math.nan
        selection = stats.selection_sensitivity(part, "mean_std") if part.shape[0] > 1 else math.nan
        rows.append((float(part.mean()), order, selection))
    means, orders, selections = zip(*rows, strict=True)
    return list(means), list(orders), list(selections)


def jackknife_se(values: Sequence[float]) -> float:
    """From a statistic with one level left out at a time."""
    count, mean = len(values), statistics.fmean(values)
    return math.sqrt((count - 1) / count * math.fsum((value - mean) ** 2 for value in values))


def steps(accuracy: FloatArray) -> tuple[float, float]:
    """Shares of rises and of falls of one trajectory [K]."""
    pairs = list(pairwise(accuracy.tolist()))
    return sum(b > a for a, b in pairs) / len(pairs), sum(b < a for a, b in pairs) / len(pairs)


def arrival(accuracy: FloatArray, shots: Sequence[int], margin: float) -> tuple[int, int]:
    """The k at which one trajectory [K] first comes, and stays, within margin of its last value."""
    near = [abs(float(value) - float(accuracy[-1])) <= margin + 1e-12 for value in accuracy]
    first = next(k for k, is_near in zip(shots, near, strict=True) if is_near)
    stays = next(k for place, k in enumerate(shots) if all(near[place:]))
    return first, stays
