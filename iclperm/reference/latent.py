"""Slow oracles of the effects on the logit: numerical integration, loops over pairs, and maximum likelihood."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import numpy.typing as npt
from scipy import integrate, optimize, special

FloatArray = npt.NDArray[np.float64]
Array = npt.NDArray[np.generic]


def _density(z: float) -> float:
    return math.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def marginal(x: float, variance: float) -> float:
    """E logistic(x + √v·z), z standard Gaussian, by adaptive quadrature."""
    scale = math.sqrt(variance)
    return float(
        integrate.quad(lambda z: float(special.expit(x + scale * z)) * _density(z), -9, 9, limit=400, epsabs=1e-12)[0]
    )


def covariance(x: float, y: float, variance: float, shared: float) -> float:
    """Covariance of logistic(x + u) and logistic(y + w), (u, w) Gaussian with the given variance and covariance.

    By adaptive quadrature over the plane of two independent standard Gaussians; shared < variance.
    """
    correlation = shared / variance
    scale, rest = math.sqrt(variance), math.sqrt(1 - correlation**2)

    def integrand(b: float, a: float) -> float:
        first, second = scale * a, scale * (correlation * a + rest * b)
        return float(special.expit(x + first) * special.expit(y + second)) * _density(a) * _density(b)

    joint = integrate.dblquad(integrand, -8, 8, -8, 8, epsabs=1e-8)[0]
    return float(joint) - marginal(x, variance) * marginal(y, variance)


def pair_covariances(correct: FloatArray, state: Array) -> list[float]:
    """Mean over pairs of different cells of correct [S, P, Q] that share [neither, the set, the permutation] of the
    covariance over queries, around the cells' means; pairs with a missing answer (state not 0) are left out.
    """
    num_s, num_p, num_q = correct.shape
    sums, counts = [0.0, 0.0, 0.0], [0, 0, 0]
    cells = list(product(range(num_s), range(num_p)))
    means = {
        cell: math.fsum(float(correct[*cell, q]) for q in range(num_q) if not state[*cell, q])
        / sum(not state[*cell, q] for q in range(num_q))
        for cell in cells
    }
    for one, two in product(cells, cells):
        if one == two:
            continue
        kind = 1 if one[0] == two[0] else 2 if one[1] == two[1] else 0
        for q in range(num_q):
            if not state[*one, q] and not state[*two, q]:
                sums[kind] += (float(correct[*one, q]) - means[one]) * (float(correct[*two, q]) - means[two])
                counts[kind] += 1
    return [total / count * num_q / (num_q - 1) for total, count in zip(sums, counts, strict=True)]


def maximum_likelihood(correct: Array) -> tuple[FloatArray, float]:
    """Logits [S, P] of cells and variance of queries that make correct [S, P, Q] most likely, cells fixed and queries
    Gaussian with no interaction: the likelihood of each query by quadrature over its ease.
    """
    num_s, num_p, num_q = correct.shape
    answers = correct.reshape(num_s * num_p, num_q).astype(np.float64)
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    weights = weights / weights.sum()

    def loss(parameters: FloatArray) -> float:
        cells, scale = parameters[:-1], math.exp(float(parameters[-1]))
        logit = cells[:, None, None] + scale * nodes
        signed = np.where(answers[:, :, None] > 0, logit, -logit)
        per_node = special.log_expit(signed).sum(axis=0)
        return -float(special.logsumexp(per_node, axis=1, b=weights).sum())

    start = np.append(special.logit((answers.sum(axis=1) + 0.5) / (num_q + 1)), 0.0)
    found = optimize.minimize(loss, start, method="BFGS").x
    return found[:-1].reshape(num_s, num_p), math.exp(2 * float(found[-1]))


def order_variance(num_right: Array, num_queries: int) -> float:
    """Variance over permutations of the logit by maximum likelihood, from right answers [P] out of num_queries equal
    ones: each permutation's binomial likelihood by quadrature over its Gaussian effect.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(100)
    weights = weights / weights.sum()
    right = num_right.astype(np.float64)[:, None]

    def loss(parameters: FloatArray) -> float:
        logit = float(parameters[0]) + math.exp(float(parameters[1])) * nodes
        likelihood = right * special.log_expit(logit) + (num_queries - right) * special.log_expit(-logit)
        return -float(special.logsumexp(likelihood, axis=1, b=weights).sum())

    start = np.array([float(special.logit(right.mean() / num_queries)), -0.5])
    return math.exp(2 * float(optimize.minimize(loss, start, method="Nelder-Mead").x[1]))
