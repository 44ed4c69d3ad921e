"""Order and selection effects on the logit, where those near floor and ceiling can be compared with others.

logit P(right) = µ + S + P + SP + I + SI + PI: Gaussian effects of the set, of the permutation, of both, of the query,
and of the query with either. On accuracies the same effect is small near 0 and 1 and large between; on the logit it is
one number. All effects are *conditional on the query*: what they do to the logit of one query, not to that of the mean.

One answer a cell does not identify σ²_SPI on this scale: Bernoulli answers with it are Bernoulli answers without it,
all other effects smaller by one factor. So σ²_SPI is NaN, and the logit is that of the chance left by it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from iclperm.errors import DataError, RequestError
from iclperm.stats.components import Effects, solve_components
from iclperm.stats.intervals import Interval, SensitivityIntervals, quantile_interval, side_of
from iclperm.stats.latent_fit import LatentAnswers, fit_answers, mean_squares_of, population_accuracy, read_answers
from iclperm.stats.latent_intervals import (
    drawn_effects,
    gaussian_intervals,
    jackknife_intervals,
    quoted_intervals,
    root_of,
)
from iclperm.stats.logistic_normal import QueryVariances, marginal, marginal_logit
from iclperm.stats.sensitivity import FloatArray


class TailRisk(NamedTuple):
    """Accuracy of a poor ordering on new queries, item noise taken out."""

    share: float
    """Of all orderings of all sets that are no better."""
    accuracy: Interval
    """Under Gaussian effects of sets and orders on the logit."""
    empirical: float
    """The same from the cells at hand, drawn in until they vary as much as orderings do; no shape assumed."""


class LatentPower(NamedTuple):
    """How often a study of a size would see what the fitted model holds, by simulation."""

    num_sets: int
    num_permutations: int
    num_queries: int
    order: float
    """Order effect on the logit that was simulated."""
    ratio: float
    """Selection / order that was simulated."""
    sees_order: float
    """Share of the studies whose Gaussian interval of the order effect excludes 0."""
    tells_ratio: float
    """Share of the studies whose interval of r excludes 1 on the right side; for r = 1, on any."""
    repeats: int
    """Simulated studies; a share p is known within √(p(1 - p)/repeats)."""


@dataclass(frozen=True)
class LatentComponents:
    """Crossed random effects on the logit of a right answer, conditional on the query."""

    num_sets: int
    num_permutations: int
    num_queries: int
    """Queries with an answer in some cell, each once."""
    accuracy: float
    """Mean accuracy of the cells, queries by their weights."""
    cells: FloatArray
    """[S, P] logit of every cell at a query of average difficulty, item noise included."""
    mu: float
    """Their mean: the logit of an average set and order at a query of average difficulty."""
    sigma2: Effects
    """Components in squared logits; estimates can be negative, and SPI is NaN: one answer a cell does not tell it."""
    gaussian: SensitivityIntervals
    """Generalised intervals: order, selection, ratio."""
    jackknife: SensitivityIntervals | None
    """Jackknife intervals of the same; None below three sets or permutations, or where some estimate without one of
    them is not above 0."""
    mean_squares: Effects
    """Of the linearised logits, from which the intervals are drawn."""
    scale_error: float
    """Standard error of the logarithm of all effects at once, for how well queries tell the scale."""
    offset: float
    """What the queries' weights add to the logit of an accuracy."""
    saturated: int
    """Cells in which all answers are right, or all wrong; their logit is drawn in by about half an answer."""
    draws: int
    seed: int

    @property
    def order_effect(self) -> Interval:
        """√(σ²_P + σ²_SP) in logits, with the interval to quote: all that the Gaussian or the jackknife's holds.

        Either alone covers too little where effects have heavy tails (docs/statistics.md).
        """
        return self._quoted.order

    @property
    def selection_effect(self) -> Interval:
        """√(σ²_S + σ²_SP) in logits, as `order_effect`."""
        return self._quoted.selection

    @property
    def ratio(self) -> Interval:
        """r = selection effect / order effect on the logit, with the jackknife's interval, or else the Gaussian one."""
        return self._quoted.ratio

    @property
    def query_variance(self) -> float:
        """σ²_I + σ²_SI + σ²_PI, none below 0: what flattens accuracy as a function of the logit."""
        return max(self.sigma2.I + max(self.sigma2.SI, 0.0) + max(self.sigma2.PI, 0.0), 0.0)

    def accuracy_at(self, shift: float = 0.0) -> float:
        """Accuracy over queries (by their weights) of an ordering whose logit lies `shift` from the mean."""
        return float(marginal(self.mu + self.offset + shift, self.query_variance))

    def order_in_accuracy(self) -> tuple[float, float]:
        """Accuracy of an order one standard deviation below, and one above the mean, in the average set."""
        size = self.order_effect.estimate
        return self.accuracy_at(-size), self.accuracy_at(size)

    def tail_risk(self, share: float = 0.05) -> TailRisk:
        """Accuracy, over new queries, of the ordering that a `share` of all orderings of all sets is no better than.

        µ + z·√(σ²_S + σ²_P + σ²_SP) as an accuracy; the interval draws µ and the components as the Gaussian intervals
        do. Raises RequestError unless 0 < share < 1. Cost: O(draws + S·P).
        """
        if not 0 < share < 1:
            raise RequestError(f"share must lie between 0 and 1, got {share}")
        z = float(special.ndtri(share))
        spread = root_of(self.sigma2.S, self.sigma2.P, self.sigma2.SP)
        drawn = drawn_effects(self.mean_squares, self._shape, self.scale_error, self.draws, self.seed)
        logits = self.mu + drawn.mean + z * drawn.total + self.offset
        interval = quantile_interval(self.accuracy_at(z * spread), logits, self.gaussian.order.level)
        low, high = (float(marginal(end, self.query_variance)) for end in (interval.low, interval.high))
        observed = float(self.cells.std(ddof=1))
        ranked = np.sort(self.cells, axis=None)[max(math.ceil(share * self.cells.size) - 1, 0)]
        empirical = self.accuracy_at((float(ranked) - self.mu) * (min(spread / observed, 1.0) if observed else 0.0))
        return TailRisk(share, interval._replace(low=low, high=high), empirical)

    def power(
        self,
        num_sets: int | None = None,
        num_permutations: int | None = None,
        num_queries: int | None = None,
        *,
        order: float | None = None,
        ratio: float | None = None,
        repeats: int = 200,
        seed: int = 0,
    ) -> LatentPower:
        """What a study of the given size (by default this one's) would see, by simulating answers from this model.

        `order` and `ratio` take the place of the estimated order effect and r: σ²_P and σ²_SP keep their proportion,
        σ²_S makes up the rest (σ²_SP gives way where r is too small for it). Effects are Gaussian; the queries'
        variances are those of the fit and taken for known. A simulated study that cannot be fitted sees nothing.

        Raises RequestError on sizes below 2, and where effect or ratio is not above 0. Cost: O(repeats·S·P·Q).
        """
        sizes = (num_sets, num_permutations, num_queries)
        s, p, q = (own if given is None else given for own, given in zip(self._shape, sizes, strict=True))
        shape = (s, p, q)
        if min(shape) < 2 or repeats < 1:
            raise RequestError(f"power needs sizes of at least 2 and a repeat, got {list(shape)} and {repeats} repeats")
        sigma2 = _with_effects(self.sigma2, order, ratio)
        items = (self.sigma2.I, self.sigma2.SI, self.sigma2.PI)
        queries = QueryVariances(self.query_variance, *items, (0.0, 0.0, 0.0))
        true_order, true_selection = root_of(sigma2.P, sigma2.SP), root_of(sigma2.S, sigma2.SP)
        wanted = int(np.sign(round(true_selection / true_order - 1, 9)))
        sees, tells = 0, 0
        for repeat in range(repeats):
            generator = np.random.default_rng([seed, repeat, *b"latent power"])
            values = _simulated(self.mu, sigma2, shape, generator)
            try:
                fit = fit_answers(LatentAnswers(values, None), queries)
            except DataError:
                continue
            level = self.gaussian.order.level
            gaussian = gaussian_intervals(fit, level, draws=1_000, seed=repeat)
            sees += gaussian.order.low > 0
            side = side_of((jackknife_intervals(fit, level) or gaussian).ratio, 1)
            tells += side != 0 and side == (wanted or side)
        return LatentPower(*shape, true_order, true_selection / true_order, sees / repeats, tells / repeats, repeats)

    @property
    def _shape(self) -> tuple[int, int, int]:
        return self.num_sets, self.num_permutations, self.num_queries

    @property
    def _quoted(self) -> SensitivityIntervals:
        return quoted_intervals(self.gaussian, self.jackknife)


def latent_components(
    correct: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    *,
    weights: npt.ArrayLike | None = None,
    level: float = 0.95,
    draws: int = 10_000,
    seed: int = 0,
) -> LatentComponents:
    """Crossed random effects of sets, permutations and queries on the logit of a right answer.

    Args:
        correct: [S, P, Q] 0 or 1, or scores within 0..1 (a graded answer y counts as y right and 1 - y wrong ones, its
            noise by what is seen of it).
        state: [S, P, Q] integers, 0 = ok; other cells are left out. Means of cells are then those of an additive fit
            of cells and queries, so that a cell is not punished for the hard queries that it alone answered.
        weights: [Q] how often each query counts in accuracies. The effects are those of distinct queries, each once.
        level: of the intervals; draws, seed: of the Gaussian ones.

    How: (1) a cell's accuracy is g(x; v), the logistic averaged over Gaussian queries of total variance v, and x its
    logit; near 0 and 1 about half an answer is added on either side, which takes out the bias of x of order 1/Q
    (Haldane 1956, Firth 1993). (2) v, and what of it belongs to the query alone, to query and set, to query and
    permutation, are those at which pairs of different cells have the covariances over queries that are observed. (3)
    The mean squares of x, and of answers linearised at x, are solved for the components as on the scale of accuracies,
    so that the noise of single answers is subtracted. No effect of a query is estimated by itself: ten answers each
    would bias it, and by it the scale. Queries that are not Gaussian do little harm (benchmarks/latent_coverage.py).

    Classes of queries that react differently to order should be fitted apart, one call each.

    Raises RequestError on other shapes or values and for S or P below 2; DataError where answers do not tell the logit:
    all right or all wrong, every query always answered alike, or more than half of the cells without a wrong (or a
    right) answer. Cost: O(S·P·Q) and 0.1 s.
    """
    answers, weight = read_answers(correct, state, weights)
    fit = fit_answers(answers, None)
    mean_squares = mean_squares_of(fit.cells, fit.noise, fit.num_queries)
    accuracy = population_accuracy(answers, weight)
    mu = float(fit.cells.mean())
    at_mean = np.clip([accuracy, fit.accuracy.mean()], 1e-12, 1 - 1e-12)
    weighted, plain = marginal_logit(at_mean, fit.queries.total)
    solved = solve_components(mean_squares, *fit.shape)
    of_query = fit.queries
    return LatentComponents(
        *fit.shape,
        accuracy=accuracy,
        cells=fit.cells,
        mu=mu,
        sigma2=Effects(
            solved.S, solved.P, of_query.item, solved.SP, of_query.with_set, of_query.with_permutation, math.nan
        ),
        gaussian=gaussian_intervals(fit, level, draws, seed),
        jackknife=jackknife_intervals(fit, level),
        mean_squares=mean_squares,
        scale_error=fit.scale_error,
        offset=float(weighted - plain),
        saturated=fit.saturated,
        draws=draws,
        seed=seed,
    )


def _with_effects(sigma2: Effects, order: float | None, ratio: float | None) -> Effects:
    """The components, clipped at 0, with another order effect and another r."""
    s, p, sp = (max(value, 0.0) for value in (sigma2.S, sigma2.P, sigma2.SP))
    own_order = math.sqrt(p + sp)
    wanted_order = own_order if order is None else order
    wanted_ratio = (math.sqrt(s + sp) / own_order if own_order else math.nan) if ratio is None else ratio
    for name, value in (("order", wanted_order), ("ratio", wanted_ratio)):
        if not (value > 0 and math.isfinite(value)):
            raise RequestError(f"power needs {name} above 0, got {value}; give {name}=")
    share = sp / (p + sp) if own_order else 0.0
    sp = min(share, wanted_ratio**2) * wanted_order**2
    return sigma2._replace(S=(wanted_ratio * wanted_order) ** 2 - sp, P=wanted_order**2 - sp, SP=sp)


def _simulated(mu: float, sigma2: Effects, shape: tuple[int, int, int], generator: np.random.Generator) -> FloatArray:
    """Answers 0. or 1. [S, P, Q] under Gaussian effects on the logit; a negative component is none."""
    logit: FloatArray = np.full(shape, mu)
    for effect, variance in sigma2._asdict().items():
        if variance > 0:  # not NaN either
            size = [length if axis in effect else 1 for axis, length in zip("SPI", shape, strict=True)]
            logit += math.sqrt(variance) * generator.standard_normal(size)
    return np.asarray(generator.random(shape) < special.expit(logit), dtype=np.float64)
