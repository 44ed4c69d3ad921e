"""Slow oracles of comparisons and pooling: loops over what is left out, and likelihoods searched on a grid."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from iclperm.reference import stats

FloatArray = npt.NDArray[np.float64]
Statistic = Callable[[FloatArray], float]


def joint_jackknife(
    statistic: Statistic, first: FloatArray, second: FloatArray, shared: Sequence[bool]
) -> tuple[float, float]:
    """Difference of a statistic of two arrays and its variance: one level of one axis left out at a time.

    `shared` says for each leading axis whether a level is left out of both at once.
    """

    def without(values: FloatArray, axis: int, level: int) -> float:
        return statistic(np.delete(values, level, axis))

    total = 0.0
    for axis, together in enumerate(shared):
        if together:
            rows = [
                [without(first, axis, i) - without(second, axis, i) for i in range(first.shape[axis])],
            ]
        else:
            rows = [[without(array, axis, i) for i in range(array.shape[axis])] for array in (first, second)]
        for row in rows:
            mean = statistics.fmean(row)
            total += (len(row) - 1) / len(row) * math.fsum((value - mean) ** 2 for value in row)
    return statistic(first) - statistic(second), total


def log_ratio(answers: FloatArray) -> float:
    """log of selection over order sensitivity (mean of standard deviations) of answers [S, P, Q]."""
    accuracy = answers.mean(axis=2)
    order = stats.order_sensitivity(accuracy, "mean_std")
    return math.log(stats.selection_sensitivity(accuracy, "mean_std") / order)


def effect(answers: FloatArray, main: str) -> float:
    """√(σ²_main + σ²_SP) of answers [S, P, Q], from the table of components; 0 where negative. `main` is S or P."""
    _, sigma2 = stats.variance_components(answers)
    return math.sqrt(max(sigma2[main] + sigma2["SP"], 0.0))


def stratified_mcnemar(first: FloatArray, second: FloatArray) -> tuple[float, float]:
    """χ² over contexts [C, Q], clustered by query, and the odds ratio, by counting."""
    num_contexts, num_queries = first.shape
    b = c = 0
    square = 0
    for q in range(num_queries):
        lead = 0
        for context in range(num_contexts):
            difference = int(first[context, q]) - int(second[context, q])
            b, c, lead = b + (difference == 1), c + (difference == -1), lead + difference
        square += lead**2
    return ((b - c) ** 2 / square if square else 0.0), (b / c if c else math.inf if b else math.nan)


def restricted_log_likelihood(values: FloatArray, covariance: FloatArray, design: FloatArray, tau2: float) -> float:
    """Of τ² in a random-effects regression, by determinants; up to a constant."""
    total = covariance + tau2 * np.eye(len(values))
    precision = np.linalg.inv(total)
    information = design.T @ precision @ design
    residual = values - design @ np.linalg.solve(information, design.T @ precision @ values)
    return float(
        -0.5 * (math.log(np.linalg.det(total)) + math.log(np.linalg.det(information)) + residual @ precision @ residual)
    )


def reml(values: FloatArray, covariance: FloatArray, design: FloatArray, most: float) -> float:
    """The τ² of the largest restricted likelihood in 0..most: a grid, made finer around its best point."""
    low, high = 0.0, most
    for _ in range(12):
        grid = np.linspace(low, high, 41)
        best = int(np.argmax([restricted_log_likelihood(values, covariance, design, tau2) for tau2 in grid.tolist()]))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, 40)]
    return float((low + high) / 2)


def shrunken(values: FloatArray, covariance: FloatArray, taus: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Means and standard deviations of the true values under flat priors of the mean and of τ, matrix by matrix."""
    ones, weights, means, squares = np.ones(len(values)), [], [], []
    for tau in taus.tolist():
        precision = np.linalg.inv(covariance + tau**2 * np.eye(len(values)))
        information = float(ones @ precision @ ones)
        mean = float(ones @ precision @ values) / information
        kept = tau**2 * precision
        centre = mean + kept @ (values - mean)
        drawn = ones - kept @ ones
        within = np.diag(tau**2 * np.eye(len(values)) - kept * tau**2) + drawn**2 / information
        weights.append(math.exp(restricted_log_likelihood(values, covariance, ones[:, None], tau**2)))
        means.append(centre)
        squares.append(within + centre**2)
    share = np.array(weights) / sum(weights)
    centre = share @ np.array(means)
    return centre, np.sqrt(share @ np.array(squares) - centre**2)


def one_more(values: FloatArray, covariance: FloatArray, taus: FloatArray, at: float) -> float:
    """Probability that one more true value is at most `at`, under the same model."""
    ones, weights, below = np.ones(len(values)), [], []
    for tau in taus.tolist():
        precision = np.linalg.inv(covariance + tau**2 * np.eye(len(values)))
        information = float(ones @ precision @ ones)
        normal = statistics.NormalDist(
            float(ones @ precision @ values) / information, math.hypot(tau, information**-0.5)
        )
        weights.append(math.exp(restricted_log_likelihood(values, covariance, ones[:, None], tau**2)))
        below.append(normal.cdf(at))
    return math.fsum(w * b for w, b in zip(weights, below, strict=True)) / math.fsum(weights)
