"""Slow oracles of the estimators: plain loops and textbook definitions, each by another route than the fast one."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import numpy.typing as npt
from scipy import integrate, optimize, special

FloatArray = npt.NDArray[np.float64]
Array = npt.NDArray[np.generic]

EFFECTS = ("S", "P", "I", "SP", "SI", "PI", "SPI")


def accuracy(correct: Array, state: Array, weights: FloatArray) -> FloatArray:
    """[...] weighted share of correct [..., Q] over the queries whose state is 0 in every cell; NaN without any."""
    cells = correct.shape[:-1]
    kept = [q for q in range(correct.shape[-1]) if all(int(state[(*cell, q)]) == 0 for cell in np.ndindex(*cells))]
    values = np.full(cells, np.nan)
    for cell in np.ndindex(*cells):
        hits = sum(float(weights[q]) * int(correct[(*cell, q)]) for q in kept)
        total = sum(float(weights[q]) for q in kept)
        values[cell] = hits / total if total else math.nan
    return values


def repeated(values: Array, weights: Sequence[int], axis: int = -1) -> Array:
    """`values` with entry q of `axis` written out weights[q] times, which is what a weight stands for."""
    return np.stack([np.take(values, q, axis) for q, weight in enumerate(weights) for _ in range(weight)], axis)


def order_sensitivity(accuracy: FloatArray, estimator: str) -> float:
    """Average over the rows of accuracy [S, P] of their standard deviation, by the statistics module."""
    deviations = [statistics.stdev(row) for row in accuracy.tolist()]
    if estimator == "rms":
        return math.sqrt(statistics.fmean(deviation**2 for deviation in deviations))
    return statistics.fmean(deviations) / (c4(accuracy.shape[1]) if estimator == "c4" else 1.0)


def selection_sensitivity(accuracy: FloatArray, estimator: str) -> float:
    """`order_sensitivity` with sets and permutations exchanged."""
    return order_sensitivity(accuracy.T, estimator)


def c4(num: int) -> float:
    """E[√(χ²/(num - 1))], by numerical integration over the χ² density."""
    df = num - 1

    def integrand(x: float) -> float:
        log_density = (df / 2 - 1) * math.log(x) - x / 2 - df / 2 * math.log(2) - math.lgamma(df / 2)
        return math.sqrt(x / df) * math.exp(log_density)

    return float(integrate.quad(integrand, 0, df + 40 * math.sqrt(2 * df), points=[df], limit=500)[0])


def curve(correct: Array) -> tuple[list[float], list[float], list[float]]:
    """Per number of shots of correct [S, P, K, Q]: mean, mean spread over permutations, spread of the sets' means."""
    means, over_permutations, over_sets = [], [], []
    for k in range(correct.shape[2]):
        table = [[statistics.fmean(cell[k]) for cell in one_set] for one_set in correct.tolist()]
        means.append(statistics.fmean(statistics.fmean(row) for row in table))
        over_permutations.append(statistics.fmean(statistics.stdev(row) for row in table))
        over_sets.append(statistics.stdev(statistics.fmean(row) for row in table))
    return means, over_permutations, over_sets


def _expectation(outer: str, inner: str, sizes: dict[str, int]) -> int:
    """Weight of the component of `inner` in E[MS of `outer`]: the answers that share a level of it."""
    return math.prod(sizes[name] for name in "SPI" if name not in inner) if set(outer) <= set(inner) else 0


def variance_components(scores: FloatArray) -> tuple[dict[str, float], dict[str, float]]:
    """Mean squares and components of scores [S, P, Q]: project on each effect, then solve the table of expectations.

    The projection on an effect averages over the axes outside it and removes the mean along those inside it.
    """
    sizes = dict(zip("SPI", scores.shape, strict=True))
    squares, degrees = {}, {}
    for effect in EFFECTS:
        part = scores.astype(np.float64)
        for axis, name in enumerate("SPI"):
            mean = part.mean(axis=axis, keepdims=True)
            part = part - mean if name in effect else np.broadcast_to(mean, part.shape)
        squares[effect] = float(np.sum(part**2))
        degrees[effect] = math.prod(sizes[name] - 1 for name in effect)
    mean_squares = {effect: squares[effect] / degrees[effect] for effect in EFFECTS}
    table = [[float(_expectation(outer, inner, sizes)) for inner in EFFECTS] for outer in EFFECTS]
    solution = np.linalg.solve(table, [mean_squares[effect] for effect in EFFECTS])
    return mean_squares, dict(zip(EFFECTS, solution.tolist(), strict=True))


def sensitivity_draws(accuracy: FloatArray, draws: int, seed: int) -> list[tuple[float, float]]:
    """Draws of order and selection sensitivity (RMS) of accuracy [S, P], with the standard library's gamma variates."""
    num_sets, num_permutations = accuracy.shape
    row_variance = statistics.fmean(statistics.variance(row) for row in accuracy.tolist())
    column_variance = statistics.fmean(statistics.variance(row) for row in accuracy.T.tolist())
    ms_sets = num_permutations * statistics.variance(accuracy.mean(axis=1).tolist())
    ms_permutations = num_sets * statistics.variance(accuracy.mean(axis=0).tolist())
    # both identities give the same residual mean square
    ms_residual = (num_sets * row_variance - ms_permutations) / (num_sets - 1)
    assert math.isclose(
        ms_residual, (num_permutations * column_variance - ms_sets) / (num_permutations - 1), abs_tol=1e-12
    )
    generator = random.Random(seed)

    def draw(mean_square: float, df: int) -> float:
        return mean_square * df / (2 * generator.gammavariate(df / 2, 1))

    result = []
    for _ in range(draws):
        residual = draw(ms_residual, (num_sets - 1) * (num_permutations - 1))
        order = (draw(ms_permutations, num_permutations - 1) + (num_sets - 1) * residual) / num_sets
        selection = (draw(ms_sets, num_sets - 1) + (num_permutations - 1) * residual) / num_permutations
        result.append((math.sqrt(order), math.sqrt(selection)))
    return result


def jackknife_ratio(accuracy: FloatArray, level: float) -> tuple[float, float]:
    """Interval of r of accuracy [S, P] from pseudo-values of log r over sets and over permutations."""
    rows, columns = (list(range(size)) for size in accuracy.shape)

    def log_ratio(kept_rows: Sequence[int], kept_columns: Sequence[int]) -> float:
        part = accuracy[np.ix_(kept_rows, kept_columns)]
        return math.log(selection_sensitivity(part, "mean_std") / order_sensitivity(part, "mean_std"))

    def variance(names: list[int], without: Callable[[int], float]) -> float:
        whole = log_ratio(rows, columns)
        pseudo = [len(names) * whole - (len(names) - 1) * without(name) for name in names]
        return statistics.variance(pseudo) / len(names)

    total = variance(rows, lambda s: log_ratio([row for row in rows if row != s], columns))
    total += variance(columns, lambda p: log_ratio(rows, [column for column in columns if column != p]))
    half = float(special.stdtrit(min(accuracy.shape) - 1, (1 + level) / 2)) * math.sqrt(total)
    centre = log_ratio(rows, columns)
    return math.exp(centre - half), math.exp(centre + half)


def wilson(num_correct: int, num_queries: int, level: float) -> tuple[float, float]:
    """The two shares whose score test just accepts num_correct of num_queries, by root finding."""
    z = float(special.ndtri((1 + level) / 2))
    observed = num_correct / num_queries

    def excess(share: float) -> float:
        return float((observed - share) ** 2 - z**2 * share * (1 - share) / num_queries)

    inside = (num_correct + 1) / (num_queries + 2)  # strictly between the roots, and never 0 or 1
    low = 0.0 if num_correct == 0 else float(optimize.brentq(excess, 0.0, inside))
    high = 1.0 if num_correct == num_queries else float(optimize.brentq(excess, inside, 1.0))
    return low, high


def clustered_se(correct: Array, weights: Sequence[int]) -> float:
    """Standard error of the mean of correct [..., Q], query q written out weights[q] times but one cluster.

    The sandwich over queries of the sums of their residuals.
    """
    answers: list[list[int]] = correct.reshape(-1, correct.shape[-1]).tolist()
    num_queries = len(answers[0])
    written_out = [row[q] for row in answers for q in range(num_queries) for _ in range(weights[q])]
    mean = statistics.fmean(written_out)
    clusters = [sum(row[q] - mean for row in answers for _ in range(weights[q])) for q in range(num_queries)]
    meat = sum(cluster**2 for cluster in clusters)
    return math.sqrt(num_queries / (num_queries - 1) * meat) / len(written_out)


def calibration(label_logprob: FloatArray, targets: Sequence[int], num_bins: int) -> tuple[float, float, float]:
    """Negative log-likelihood, Brier score and expected calibration error of one context [Q, L]."""
    bins: dict[int, list[tuple[bool, float]]] = {}
    losses, distances = [], []
    for row, target in zip(label_logprob.tolist(), targets, strict=True):
        total = math.fsum(math.exp(value) for value in row)
        shares = [math.exp(value) / total for value in row]
        losses.append(-math.log(shares[target]))
        distances.append(math.fsum((share - (label == target)) ** 2 for label, share in enumerate(shares)))
        best = max(range(len(shares)), key=shares.__getitem__)
        place = min(int(shares[best] * num_bins), num_bins - 1)
        bins.setdefault(place, []).append((best == target, shares[best]))
    error = math.fsum(
        len(members)
        * abs(statistics.fmean(hit for hit, _ in members) - statistics.fmean(share for _, share in members))
        for members in bins.values()
    )
    return statistics.fmean(losses), statistics.fmean(distances), error / len(targets)


def near_tie_rate(label_logprob: FloatArray, tolerance: float) -> float:
    """Share of label_logprob [..., Q, L] rows whose best label leads the second by at most `tolerance` nats."""
    rows = label_logprob.reshape(-1, label_logprob.shape[-1]).tolist()
    leads = [best - second for second, best in (sorted(row)[-2:] for row in rows)]
    return sum(lead <= tolerance for lead in leads) / len(rows)


def power_to_tell_from_one(
    sigma: tuple[float, float, float], size: int, level: float, repeats: int, seed: int
) -> float:
    """Share of simulated size x size designs whose log r (RMS) lies beyond the Gaussian bound from 0.

    sigma: standard deviations of sets, permutations and residual. The bound uses the simulated spread of log r.
    """
    generator = np.random.default_rng(seed)
    logs = []
    for _ in range(repeats):
        sets, permutations, residual = (
            scale * generator.standard_normal(shape)
            for scale, shape in zip(sigma, ((size, 1), (1, size), (size, size)), strict=True)
        )
        table = sets + permutations + residual
        logs.append(0.5 * math.log(table.var(axis=0, ddof=1).mean() / table.var(axis=1, ddof=1).mean()))
    bound = float(special.ndtri((1 + level) / 2)) * statistics.stdev(logs)
    return sum(abs(value) > bound for value in logs) / repeats


def crossed_sums(items: Array) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Sums of items [S, P, Q] over one axis each, answer by answer."""
    num_s, num_p, num_q = items.shape
    sums = np.zeros((num_s, num_p)), np.zeros((num_s, num_q)), np.zeros((num_p, num_q))
    for s, p, q in product(range(num_s), range(num_p), range(num_q)):
        for table, place in zip(sums, ((s, p), (s, q), (p, q)), strict=True):
            table[place] += int(items[s, p, q])
    return sums
