"""Intervals of the effects on the logit: of Gaussian effects by drawing mean squares, of others by the jackknife."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy import special

from iclperm.stats.components import Effects
from iclperm.stats.intervals import Interval, SensitivityIntervals, quantile_interval, upper_tail
from iclperm.stats.latent_fit import LatentFit, effect_variances, mean_squares_of
from iclperm.stats.sensitivity import FloatArray

_LARGEST_LOG = 700.0  # e to this is a float


class LatentDraws(NamedTuple):
    """Draws of standard deviations on the logit, and of the error of the mean."""

    order: FloatArray
    selection: FloatArray
    total: FloatArray
    mean: FloatArray


def root_of(*variances: float) -> float:
    """Root of a sum of variances, 0 where that is negative."""
    return math.sqrt(max(sum(variances), 0.0))


def drawn_effects(
    mean_squares: Effects, shape: tuple[int, int, int], scale_error: float, draws: int, seed: int
) -> LatentDraws:
    """Every mean square drawn as SS / χ²(df), and the scale of the logit as a log-normal factor."""
    num_s, num_p, num_q = shape
    s, p, q = num_s - 1, num_p - 1, num_q - 1
    degrees = Effects(s, p, q, s * p, s * q, p * q, s * p * q)
    ms = {
        name: mean_square * df / _generator(seed, name).chisquare(df, draws)
        for name, mean_square, df in zip(Effects._fields, mean_squares, degrees, strict=True)
    }
    interaction = (ms["SP"] - ms["SPI"]) / num_q
    of_p = (ms["P"] - ms["SP"] - ms["PI"] + ms["SPI"]) / (num_s * num_q)
    of_s = (ms["S"] - ms["SP"] - ms["SI"] + ms["SPI"]) / (num_p * num_q)
    of_mean = ms["S"] + ms["P"] - ms["SP"] + ms["I"] - ms["SI"] - ms["PI"] + ms["SPI"]
    scale = np.exp(scale_error * _generator(seed, "scale").standard_normal(draws))
    order, selection, total = (
        scale * np.sqrt(np.maximum(variance, 0.0))
        for variance in (interaction + of_p, interaction + of_s, interaction + of_p + of_s)
    )
    mean = np.sqrt(np.maximum(of_mean, 0.0) / math.prod(shape)) * _generator(seed, "mean").standard_normal(draws)
    return LatentDraws(order, selection, total, mean)


def _generator(seed: int, purpose: str) -> np.random.Generator:
    return np.random.default_rng([seed, *f"latent.{purpose}".encode()])


def gaussian_intervals(fit: LatentFit, level: float, draws: int, seed: int) -> SensitivityIntervals:
    """Generalised intervals of order effect, selection effect and their ratio."""
    drawn = drawn_effects(
        mean_squares_of(fit.cells, fit.noise, fit.num_queries), fit.shape, fit.scale_error, draws, seed
    )
    order, selection = map(root_of, effect_variances(fit.cells, fit.noise, fit.num_queries))
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn_ratio = drawn.selection / drawn.order
    return SensitivityIntervals(
        quantile_interval(order, drawn.order, level),
        quantile_interval(selection, drawn.selection, level),
        quantile_interval(selection / order if order > 0 else math.nan, drawn_ratio, level),
    )


def jackknife_intervals(fit: LatentFit, level: float) -> SensitivityIntervals | None:
    """Intervals of the logarithms by leaving out one set, and one permutation, at a time.

    The two jackknife variances are added, and that of the scale; t quantile with min(S, P) - 1 degrees of freedom, as
    for the printed r (`iclperm.stats.intervals.jackknife_ratio_interval`).
    """
    num_s, num_p = fit.cells.shape
    if min(num_s, num_p) < 3:
        return None
    whole = np.array([effect_variances(fit.cells, fit.noise, fit.num_queries)])
    without = [
        np.array([effect_variances(np.delete(fit.cells, i, axis), fit.noise, fit.num_queries) for i in range(size)])
        for axis, size in enumerate((num_s, num_p))
    ]
    if min(float(variances.min()) for variances in (whole, *without)) <= 0:
        return None
    logs = [np.log(variances) / 2 for variances in (whole, *without)]
    of_whole, *of_parts = [np.column_stack([log, log[:, 1] - log[:, 0]]) for log in logs]
    variance = sum((len(part) - 1) * part.var(axis=0) for part in of_parts)
    variance = variance + fit.scale_error**2 * np.array([1.0, 1.0, 0.0])
    half = float(special.stdtrit(min(num_s, num_p) - 1, upper_tail(level))) * np.sqrt(variance)
    return SensitivityIntervals(
        *(
            Interval(math.exp(log), math.exp(log - width), math.exp(min(log + width, _LARGEST_LOG)), level)
            for log, width in zip(of_whole[0], half, strict=True)
        )
    )


def quoted_intervals(gaussian: SensitivityIntervals, jackknife: SensitivityIntervals | None) -> SensitivityIntervals:
    """Of the two effects what either interval holds, of the ratio the jackknife's."""
    if jackknife is None:
        return gaussian
    order, selection = (
        one._replace(low=min(one.low, other.low), high=max(one.high, other.high))
        for one, other in zip(gaussian[:2], jackknife[:2], strict=True)
    )
    return SensitivityIntervals(order, selection, jackknife.ratio)
