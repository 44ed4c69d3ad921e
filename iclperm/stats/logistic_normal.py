"""Logits averaged over Gaussian queries: the accuracy of a cell from its logit, and back, and how queries differ.

A cell's logit x is that at a query of average difficulty. Queries lie around it with variance v, so that its accuracy
is g(x; v) = E logistic(x + √v·z), z standard Gaussian: flatter than the logistic by about √(1 + .346·v).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from iclperm.errors import DataError
from iclperm.stats.limits import LIMITS
from iclperm.stats.sensitivity import FloatArray

# The trapezoid rule over a Gaussian: its error for the logistic, whose poles lie at ±πi, is e^(-2π²/(.3·√v)): 1e-7 at
# v = 16, where a Gauss-Hermite rule of as many nodes is far off.
_NODES = np.linspace(-6.0, 6.0, 41)
_WEIGHTS = np.exp(-(_NODES**2) / 2) / np.exp(-(_NODES**2) / 2).sum()
_PROBIT_SCALE = 0.346  # 16²·3/(15²·π²): Zeger, Liang & Albert (1988)
_MOST_VARIANCE = 400.0  # of queries; beyond it nearly all answers are the query's alone
_SHARES = np.array([0.25, 0.5, 0.75, 1.0])
_STEPS = 60  # of Newton or a secant at most; five to ten are enough but at the very ends
_TABLE = 500


class QueryVariances(NamedTuple):
    """How queries differ on the logit: in all, by themselves, with the set and with the permutation."""

    total: float
    """σ²_I + σ²_SI + σ²_PI, the last two and the whole at least 0."""
    item: float
    """σ²_I; this and the next two can be negative, as they are told from covariances."""
    with_set: float
    """σ²_SI"""
    with_permutation: float
    """σ²_PI"""
    gradient: tuple[float, float, float]
    """Derivatives of `total` by the three covariances; 0 where it is 0."""


def marginal(x: npt.ArrayLike, variance: float) -> FloatArray:
    """g(x; v): accuracy over Gaussian queries at logit x, of any shape."""
    return np.asarray(special.expit(np.asarray(x)[..., None] + math.sqrt(variance) * _NODES) @ _WEIGHTS)


def marginal_slopes(x: npt.ArrayLike, variance: float) -> tuple[FloatArray, FloatArray]:
    """First and second derivative of g(x; v) by x."""
    p = special.expit(np.asarray(x)[..., None] + math.sqrt(variance) * _NODES)
    first = p * (1 - p)
    return np.asarray(first @ _WEIGHTS), np.asarray((first * (1 - 2 * p)) @ _WEIGHTS)


def marginal_logit(accuracy: npt.ArrayLike, variance: float) -> FloatArray:
    """x with g(x; v) = accuracy, which lies within 0..1; by Newton's steps on the logit of g, nearly straight in x."""
    p = np.asarray(accuracy, dtype=np.float64)
    wanted = special.logit(p)
    x = wanted * math.sqrt(1 + _PROBIT_SCALE * variance)
    most = 2 * math.sqrt(1 + variance)
    for _ in range(_STEPS):
        chances = special.expit(x[..., None] + math.sqrt(variance) * _NODES)
        found, slope = chances @ _WEIGHTS, (chances * (1 - chances)) @ _WEIGHTS
        step = np.clip((special.logit(found) - wanted) * found * (1 - found) / slope, -most, most)
        x = x - step
        if np.abs(step).max(initial=0.0) < 1e-9:
            break
    return np.asarray(x)


def marginal_covariances(x: FloatArray, variance: float, shared: float) -> FloatArray:
    """Mean covariance over queries of two cells' chances, where `shared` of the queries' variance is common to both.

    x: [S, P] logits. Returns the means over all pairs of cells of [another set and permutation, the same set alone, the
    same permutation alone]. Given what is common, u, the two chances are independent: E_u of the products of
    g(x + u; v - shared), whose sums over pairs are those over all cells less what is alike. g is read from a table of
    500 places, within 3e-5. Cost: O(S·P·41).
    """
    num_s, num_p = x.shape
    logits = x[..., None] + math.sqrt(shared) * _NODES
    table = np.linspace(logits.min(), logits.max(), _TABLE)
    at_node = np.interp(logits, table, marginal(table, max(variance - shared, 0.0)))
    at_node -= (at_node @ _WEIGHTS)[..., None]
    return np.asarray(pair_sums(at_node) @ _WEIGHTS / pair_counts(num_s, num_p))


def pair_sums(values: npt.NDArray[Any]) -> FloatArray:
    """[3, N] sums over ordered pairs of cells of the products of values [S, P, N]: neither set nor permutation alike,
    the same set, the same permutation. A mask is read in blocks of N.
    """
    if values.dtype != np.float64:
        step = max(LIMITS.block_bytes // (8 * values.shape[0] * values.shape[1]), 1)
        pieces = (values[..., low : low + step].astype(np.float64) for low in range(0, values.shape[2], step))
        return np.concatenate([pair_sums(piece) for piece in pieces], axis=1)
    alike = np.einsum("spn,spn->n", values, values)
    of_set = np.square(values.sum(axis=1)).sum(axis=0)
    of_permutation = np.square(values.sum(axis=0)).sum(axis=0)
    of_all = np.square(values.sum(axis=(0, 1)))
    return np.stack([of_all - of_set - of_permutation + alike, of_set - alike, of_permutation - alike])


def pair_counts(num_s: int, num_p: int) -> FloatArray:
    """[3] ordered pairs of cells that `pair_sums` adds."""
    return np.array([(num_s - 1) * (num_p - 1), num_p - 1, num_s - 1], np.float64) * (num_s * num_p)


def query_variances(accuracy: FloatArray, covariances: npt.ArrayLike) -> QueryVariances:
    """Variances of queries on the logit that give cells of `accuracy` [S, P] the observed `covariances` [3].

    covariances: of answers over queries, mean over pairs of cells that share [neither, the set, the permutation]; free
    of the noise of single answers, as the two answers of a pair are different ones. For a total v they say how much of
    it each kind of pair has in common: c_I, c_SI and c_PI; then v = c_I + (c_SI - c_I) + (c_PI - c_I), where a
    difference below 0 counts as 0.

    Raises DataError where v exceeds 400: hardly any answer then depends on anything but the query.
    """
    observed = np.asarray(covariances, dtype=np.float64)

    def excess(total: float) -> float:
        common, _ = _common(accuracy, total, observed)
        return _total(common) - total

    low, high = 1e-4, 1.0
    if excess(low) <= 0:
        common, _ = _common(accuracy, low, observed)
        return QueryVariances(0.0, *_split(common), (0.0, 0.0, 0.0))
    while excess(high) > 0:
        low, high = high, 2 * high
        if high > _MOST_VARIANCE:
            raise DataError(
                "answers follow the query and hardly anything else (queries' standard deviation above 20 on the logit):"
                " the scale of the other effects is not known; take queries that some contexts answer and others do not"
            )
    total = _root(excess, low, high, 1e-4)
    common, slopes = _common(accuracy, total, observed)
    total = _total(common)  # that of the parts, to the last digit
    step = 0.01 * total
    falls = (excess(total + step) - excess(total - step)) / (2 * step)
    with_set, with_permutation = float(common[1] > common[0]), float(common[2] > common[0])
    gradient = np.array([1.0 - with_set - with_permutation, with_set, with_permutation]) / slopes / -falls
    return QueryVariances(total, *_split(common), (float(gradient[0]), float(gradient[1]), float(gradient[2])))


def _total(common: FloatArray) -> float:
    item, with_set, with_permutation = _split(common)
    return max(item + max(with_set, 0.0) + max(with_permutation, 0.0), 0.0)


def _split(common: FloatArray) -> tuple[float, float, float]:
    neither, of_set, of_permutation = map(float, common)
    return neither, of_set - neither, of_permutation - neither


def _common(accuracy: FloatArray, total: float, observed: FloatArray) -> tuple[FloatArray, FloatArray]:
    """[3] variance that pairs must have in common for each observed covariance, and the slopes there.

    The covariance is a smooth function of what is common, 0 at 0: through four points of it and 0 goes a polynomial;
    outside of 0..total the straight line at its end.
    """
    x = marginal_logit(accuracy, total)
    at = np.stack([marginal_covariances(x, total, share * total) for share in _SHARES])
    common, slopes = zip(*(_inverted(at[:, kind], value) for kind, value in enumerate(observed)), strict=True)
    return np.array(common) * total, np.array(slopes) / total


def _inverted(at: FloatArray, value: float) -> tuple[float, float]:
    """Share at which the polynomial through (0, 0) and (`_SHARES`, at) is `value`, and its slope there."""
    powers = _SHARES[:, None] ** np.arange(1, 5)
    polynomial = np.polynomial.Polynomial([0.0, *np.linalg.solve(powers, at)])
    slope: Callable[[float], float] = polynomial.deriv()
    end = 0.0 if value <= 0 else 1.0
    if 0 < value < at[-1]:
        share = _root(lambda s: float(polynomial(s)) - value, 0.0, 1.0, 1e-9)
    else:
        share = end + (value - float(polynomial(end))) / float(slope(end))
    return share, float(slope(share if 0 <= share <= 1 else end))


def _root(function: Callable[[float], float], low: float, high: float, within: float) -> float:
    """Where `function`, of opposite signs at `low` and `high`, is 0 up to `within`; the Illinois rule.

    Secants; the value at an end that is kept twice is halved, so that both ends move. (scipy.optimize takes 0.4 s to
    load.)
    """
    at_low, at_high = function(low), function(high)
    middle, kept = low, 0
    for _ in range(_STEPS):
        middle = (low * at_high - high * at_low) / (at_high - at_low)
        value = function(middle)
        if abs(value) <= within:
            break
        if (value > 0) == (at_low > 0):
            low, at_low = middle, value
            at_high, kept = (at_high / 2 if kept > 0 else at_high), 1
        else:
            high, at_high = middle, value
            at_low, kept = (at_low / 2 if kept < 0 else at_low), -1
    return middle
