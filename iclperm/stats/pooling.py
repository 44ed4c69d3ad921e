"""Many estimates of one thing, as r of many models and tasks: their mean, how far they really differ, and a slope.

A random-effects model: estimate i = mean (or line) + what is its own, with standard deviation τ, + error. Errors may
be correlated, as those of models are that saw the same sets and permutations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from iclperm.errors import RequestError
from iclperm.stats.intervals import Interval, upper_tail
from iclperm.stats.sensitivity import FloatArray

Method = Literal["reml", "dl"]
_STEPS = 200  # of a bisection: to the last bits
_GRID_OF_TAU = 81
_GRID = 200
_REACH = 10  # times the spread of the estimates, or their error: the largest τ that is looked at


@dataclass(frozen=True)
class PooledEstimate:
    """N estimates under a random-effects model; everything in their units."""

    mean: Interval
    """With the interval of Knapp & Hartung: t with N - 1 degrees of freedom, never narrower than without them."""
    se: float
    tau: float
    """Standard deviation of the true values over cells; 0 where the errors explain all differences."""
    prediction: Interval
    """For the true value of one more cell of the kind, averaged over what τ may be; unbounded for N = 2."""
    q: float
    """Cochran's Q, Σ of squared deviations over their errors; large where the cells really differ."""
    q_p_value: float
    """By χ² with N - 1 degrees of freedom, which takes the errors as known: too small where they rest on few sets."""
    i_squared: float
    """Share of the differences that is not error, (Q - (N - 1))/Q, at least 0."""
    shrunken: FloatArray
    """[N] each estimate drawn to the mean, as far as its error and τ say, averaged over what τ may be."""
    shrunken_se: FloatArray
    """[N] their standard errors, those of the mean and of τ included."""
    method: Method

    def shrunken_interval(self, place: int) -> Interval:
        """That of one shrunken estimate: t with N - 1 degrees of freedom, as the errors themselves are estimates."""
        level, estimate = self.mean.level, float(self.shrunken[place])
        half = float(special.stdtrit(len(self.shrunken) - 1, upper_tail(level))) * float(self.shrunken_se[place])
        return Interval(estimate, estimate - half, estimate + half, level)


@dataclass(frozen=True)
class SizeSlope:
    """How a sensitivity changes with the size of the model: log sensitivity on log10 of the number of parameters."""

    factor: Interval
    """By which the sensitivity is multiplied at ten times the parameters; 1 where size does nothing."""
    slope: float
    """log of that."""
    se: float
    degrees: float
    p_value: float
    """Of no slope."""
    intercept: float
    """log sensitivity at one parameter."""
    tau: float
    """Standard deviation of log sensitivity around the line, beyond errors."""


class _Fit(NamedTuple):
    """A line through estimates: coefficients [C] with covariance [C, C], τ², the precision matrix [N, N] and N - C."""

    coefficients: FloatArray
    covariance: FloatArray
    tau2: float
    precision: FloatArray
    degrees: int


def pool(
    estimates: npt.ArrayLike, errors: npt.ArrayLike, *, method: Method = "reml", level: float = 0.95
) -> PooledEstimate:
    """The mean of N estimates, how far their true values differ, and each drawn to the mean (partial pooling).

    Args:
        estimates: [N], such as log r of models and tasks (`log_sensitivity`), taken as draws of one population.
        errors: [N] standard errors; or [N, N], their covariance (`jackknife_covariance`), where they share sets,
            permutations or queries. To leave that out makes the mean look surer than it is.
        method: of τ²: `reml`, restricted maximum likelihood, or `dl`, the moments of DerSimonian & Laird (1986).
        level: of the intervals.

    Weights are the inverse of τ²·I + covariance. The interval is that of Knapp & Hartung (2003), its factor at least 1
    (Röver, Knapp & Friede 2015). Shrunken estimates are the means of the hierarchical normal model with a flat prior of
    the mean and of τ, integrated over τ (Gelman et al. 2013, *Bayesian Data Analysis*, section 5.4; with one τ taken
    for true their errors would be too small), and so is what one more study would have; for N = 2, where that has no
    end, those at the τ found.

    Raises RequestError for fewer than two estimates, a NaN, errors that are not above 0 or a matrix that is no
    covariance. Cost: O(200·N³).
    """
    values, covariance = _checked(estimates, errors, 2)
    fit = _fitted(values, covariance, np.ones((len(values), 1)), method)
    num, upper = len(values), upper_tail(level)
    mean, se = float(fit.coefficients[0]), math.sqrt(float(fit.covariance[0, 0]))
    half = float(special.stdtrit(num - 1, upper)) * se
    fixed = _fitted(values, covariance, np.ones((num, 1)), None)
    residual = values - fixed.coefficients[0]
    q = float(residual @ fixed.precision @ residual)
    shrunken, shrunken_se, of_one_more = _shrunken(values, covariance, fit.tau2)
    low, high = (-math.inf, math.inf) if num < 3 else (of_one_more(1 - upper), of_one_more(upper))
    return PooledEstimate(
        mean=Interval(mean, mean - half, mean + half, level),
        se=se,
        tau=math.sqrt(fit.tau2),
        prediction=Interval(mean, low, high, level),
        q=q,
        q_p_value=float(special.chdtrc(num - 1, q)),
        i_squared=max(0.0, 1 - (num - 1) / q) if q > 0 else 0.0,
        shrunken=shrunken,
        shrunken_se=shrunken_se,
        method=method,
    )


def slope(
    sensitivities: npt.ArrayLike,
    sizes: npt.ArrayLike,
    errors: npt.ArrayLike,
    *,
    method: Method = "reml",
    level: float = 0.95,
) -> SizeSlope:
    """Whether a sensitivity, or r, changes with the size of the model: weighted regression of its log on log10 of size.

    Args:
        sensitivities: [N] above 0.
        sizes: [N] numbers of parameters, of at least two different ones.
        errors: [N] standard errors of the *logs* (of a sensitivity, its error over itself), or their covariance [N, N].
        method: as for `pool`.
        level: as for `pool`.

    Mixed-effects meta-regression, with the test of Knapp & Hartung (2003): t with N - 2 degrees of freedom. Raises
    RequestError for fewer than three models, equal sizes, numbers not above 0, and what `pool` does. Cost: O(N³).
    """
    positive = [np.asarray(array, dtype=np.float64) for array in (sensitivities, sizes)]
    for name, array in zip(("sensitivities", "sizes"), positive, strict=True):
        if array.ndim != 1 or not (np.isfinite(array) & (array > 0)).all():
            raise RequestError(f"{name} must be [N] finite numbers above 0, got {array.tolist()}")
    values, covariance = _checked(np.log(positive[0]), errors, 3)
    if len(positive[1]) != len(values) or len(set(positive[1].tolist())) < 2:
        raise RequestError(f"sizes must be {len(values)} numbers, not all equal, got {positive[1].tolist()}")
    by_ten = np.log10(positive[1])
    centre = float(by_ten.mean())  # centred, so that slope and level are hardly correlated
    fit = _fitted(values, covariance, np.stack([np.ones(len(values)), by_ten - centre], axis=1), method)
    steepness, se = float(fit.coefficients[1]), math.sqrt(float(fit.covariance[1, 1]))
    half = float(special.stdtrit(fit.degrees, upper_tail(level))) * se
    low, high = math.exp(steepness - half), math.exp(steepness + half)
    return SizeSlope(
        factor=Interval(math.exp(steepness), low, high, level),
        slope=steepness,
        se=se,
        degrees=float(fit.degrees),
        p_value=float(2 * special.stdtr(fit.degrees, -abs(steepness) / se)),
        intercept=float(fit.coefficients[0]) - steepness * centre,
        tau=math.sqrt(fit.tau2),
    )


def _shrunken(
    values: FloatArray, covariance: FloatArray, tau2: float
) -> tuple[FloatArray, FloatArray, Callable[[float], float]]:
    """Mean and standard deviation [N] of the true values, over a grid of τ weighted by its restricted likelihood; and
    the quantiles of one more true value.

    In the coordinates in which the covariance is diagonal, τ²·I + covariance is so at every τ.
    """
    variances, axes = np.linalg.eigh(covariance)
    y, x = axes.T @ values, axes.T @ np.ones(len(values))
    widest = _REACH * max(float(values.std(ddof=1)), math.sqrt(float(variances.mean())))
    taus = np.array([math.sqrt(tau2)]) if len(values) < 3 else widest * np.linspace(0, 1, _GRID) ** 2  # finer near 0
    precision = 1 / (variances + taus[:, None] ** 2)  # [G, N]
    information = precision @ x**2
    means = precision @ (x * y) / information
    residual = y - means[:, None] * x
    log_likelihood = -0.5 * (
        -np.log(precision).sum(axis=1) + np.log(information) + (precision * residual**2).sum(axis=1)
    )
    weight = np.exp(log_likelihood - log_likelihood.max()) * (np.gradient(taus) if len(taus) > 1 else 1.0)
    weight /= weight.sum()
    kept = taus[:, None] ** 2 * precision  # of each residual; the rest is drawn to the mean
    at_each = (means[:, None] * x + kept * residual) @ axes.T  # [G, N]
    within = (taus[:, None] ** 2 * (1 - kept)) @ (axes**2).T + (((1 - kept) * x) @ axes.T) ** 2 / information[:, None]
    centre = weight @ at_each
    spread = np.sqrt(taus**2 + 1 / information)

    def of_one_more(probability: float) -> float:
        far = 40 * float(spread.max())
        ends = float(means.min()) - far, float(means.max()) + far
        return _bisected(lambda x: probability - float(weight @ special.ndtr((x - means) / spread)), *ends)

    return centre, np.sqrt(weight @ (within + (at_each - centre) ** 2)), of_one_more


def _checked(estimates: npt.ArrayLike, errors: npt.ArrayLike, least: int) -> tuple[FloatArray, FloatArray]:
    """Estimates [N] and the covariance [N, N] of their errors."""
    values, given = (np.asarray(array, dtype=np.float64) for array in (estimates, errors))
    if values.ndim != 1 or len(values) < least or not np.isfinite(values).all():
        raise RequestError(f"need at least {least} finite estimates [N], got {values.tolist()}")
    if given.shape not in ((len(values),), (len(values), len(values))) or not np.isfinite(given).all():
        raise RequestError(f"errors must be finite, [{len(values)}] or [{len(values)}, {len(values)}]")
    if given.ndim == 1:
        if not (given > 0).all():
            raise RequestError(f"standard errors must be above 0, found {given.min()}")
        return values, np.diag(given**2)
    if not np.allclose(given, given.T) or np.linalg.eigvalsh(given)[0] <= 1e-12 * np.trace(given):
        raise RequestError("the covariance of the errors must be symmetric and positive definite; give [N] errors")
    return values, given


def _fitted(values: FloatArray, covariance: FloatArray, design: FloatArray, method: Method | None) -> _Fit:
    """Generalised least squares with τ² by `method`, errors scaled as Knapp & Hartung do; None is τ² = 0, unscaled."""
    if method not in ("reml", "dl", None):
        raise RequestError(f"method must be 'reml' or 'dl', got {method!r}")
    tau2 = 0.0 if method is None else {"reml": _reml, "dl": _moments}[method](values, covariance, design)
    precision = _inverse(covariance, tau2)
    unscaled = np.linalg.inv(design.T @ precision @ design)
    coefficients = unscaled @ design.T @ precision @ values
    residual = values - design @ coefficients
    degrees = len(values) - design.shape[1]
    scale = 1.0 if method is None else max(1.0, float(residual @ precision @ residual) / degrees)
    return _Fit(coefficients, unscaled * scale, tau2, precision, degrees)


def _inverse(covariance: FloatArray, tau2: float) -> FloatArray:
    """(covariance + τ²·I)⁻¹"""
    return np.asarray(np.linalg.inv(covariance + tau2 * np.eye(len(covariance))), dtype=np.float64)


def _projection(precision: FloatArray, design: FloatArray) -> FloatArray:
    """P = V⁻¹ - V⁻¹X(X'V⁻¹X)⁻¹X'V⁻¹, which takes the line out."""
    weighted = precision @ design
    return np.asarray(precision - weighted @ np.linalg.inv(design.T @ weighted) @ weighted.T)


def _moments(values: FloatArray, covariance: FloatArray, design: FloatArray) -> float:
    """τ² at which Q, with the weights 1/variance, is what it is expected to be; at least 0."""
    taken = _projection(np.diag(1 / np.diag(covariance)), design)
    excess = float(values @ taken @ values) - float(np.trace(taken @ covariance))
    return max(0.0, excess / float(np.trace(taken)))


def _reml(values: FloatArray, covariance: FloatArray, design: FloatArray) -> float:
    """The τ² of the largest restricted likelihood: the best of a grid, then where its score y'PPy - tr P is 0; the
    likelihood can have a maximum at 0 and another one beyond."""

    def taken(tau2: float) -> tuple[FloatArray, FloatArray]:
        precision = _inverse(covariance, tau2)
        return precision, _projection(precision, design)

    def score(tau2: float) -> float:
        _, rest = taken(tau2)
        return float(np.sum((rest @ values) ** 2) - np.trace(rest))

    def likelihood(tau2: float) -> float:
        precision, rest = taken(tau2)
        determinants = np.linalg.slogdet(precision)[1] - np.linalg.slogdet(design.T @ precision @ design)[1]
        return float(determinants - values @ rest @ values)

    scale = float(np.trace(covariance)) / len(values) + float(values.var())
    grid = np.array([0.0, *(scale * np.geomspace(1e-5, 1e3, _GRID_OF_TAU))])
    best = int(np.argmax([likelihood(tau2) for tau2 in grid]))
    low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, len(grid) - 1)])
    if score(low) <= 0:
        return low
    return high if score(high) > 0 else _bisected(score, low, high)


def _bisected(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function turns from positive at `low` to negative at `high`."""
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return (low + high) / 2
