"""How much of the lead of a chosen ordering is luck on the queries that chose it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from iclperm.errors import RequestError
from iclperm.stats.correlation import Correlation, correlation
from iclperm.stats.incomplete import strata_of
from iclperm.stats.intervals import Interval, jackknife_interval
from iclperm.stats.search import choose, fitting_scores, usable_items
from iclperm.stats.sensitivity import FloatArray, accuracy_matrix


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
    dev = fitting_scores(dev, test.shape, "dev_accuracy")
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


def noise_within_sets(
    correct: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    weights: npt.ArrayLike | None = None,
    classes: npt.ArrayLike | None = None,
) -> float:
    """Variance of one ordering's accuracy around its true one, within a set, from the items alone.

    correct [S, P, Q] 0 or 1, state [S, P, Q] with 0 = ok, weights and classes [Q] as `variance_components` takes them.
    (σ²_PI + σ²_SPI)/Q where all queries are alike, else that of the weighted accuracy, class by class: the mean square
    of permutations by queries within sets. The difficulty of the queries, which all orderings share, cancels, so that
    it is less than p(1 - p)/Q. NaN below two permutations or queries. Cost: O(S·P·Q).
    """
    whole = usable_items(correct, state, weights)
    _, num_p, num_q = whole.items.shape
    if min(num_p, num_q) < 2:
        return math.nan
    of_each = None if classes is None else np.asarray(classes)[whole.usable]
    return float(order_noise(whole.items, whole.weights, of_each).sum(axis=1).mean() / (num_p - 1))


def order_noise(items: npt.NDArray[Any], weights: FloatArray, classes: npt.ArrayLike | None = None) -> FloatArray:
    """[S, P] what each ordering adds to the noise of a set's accuracies, from items [S, P, Q] and weights [Q].

    Σ over the classes of share² · Σw²/(Σw)² · variance over the class's queries of an answer less its query's mean over
    the orderings; the sum over P of them over P - 1 is the variance that other queries would make. A class of one query
    cannot tell it: then all queries are one.
    """
    strata, total = strata_of(weights, classes), float(weights.sum())
    if np.bincount(strata[strata >= 0]).min() < 2:
        strata = np.minimum(strata, 0)
    parts = []
    for name in range(int(strata.max()) + 1):
        members = np.flatnonzero(strata == name)
        parts.append((members, float(weights[members] @ weights[members]) / total**2))
    found = np.zeros(items.shape[:2])
    for s, one in enumerate(items):  # a set at a time: no float copy of everything
        centred = one - one.mean(axis=0, dtype=np.float64)
        for members, scale in parts:
            found[s] += scale * centred[:, members].var(axis=1, ddof=1)
    return found
