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
from iclperm.stats.intervals import Interval, SensitivityIntervals, quantile_interval, side_of, upper_tail
from iclperm.stats.logistic_normal import (
    QueryVariances,
    marginal,
    marginal_logit,
    marginal_slopes,
    pair_counts,
    pair_sums,
    query_variances,
)
from iclperm.stats.sensitivity import FloatArray, query_weights

_SWEEPS, _SWEPT = 200, 1e-7
_MOST_SATURATED = 0.5  # of the cells


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
        spread = _total(self.sigma2.S, self.sigma2.P, self.sigma2.SP)
        drawn = _drawn(self.mean_squares, self._shape, self.scale_error, self.draws, self.seed)
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
        σ²_S makes up the rest (σ²_SP gives way where r is too small for it). Effects are Gaussian, the queries'
        variances those of the fit, and known: such power is an upper bound under effects with heavier tails.

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
        true_order, true_selection = _total(sigma2.P, sigma2.SP), _total(sigma2.S, sigma2.SP)
        wanted = int(np.sign(round(true_selection / true_order - 1, 9)))
        sees, tells = 0, 0
        for repeat in range(repeats):
            generator = np.random.default_rng([seed, repeat, *b"latent power"])
            values = _simulated(self.mu, sigma2, shape, generator)
            try:
                fit = _fit(_Answers(values, None), queries)
            except DataError:  # a study that cannot be fitted sees nothing
                continue
            level = self.gaussian.order.level
            gaussian = _gaussian_intervals(fit, level, draws=1_000, seed=repeat)
            sees += gaussian.order.low > 0
            side = side_of((_jackknife_intervals(fit, level) or gaussian).ratio, 1)
            tells += side != 0 and side == (wanted or side)
        return LatentPower(*shape, true_order, true_selection / true_order, sees / repeats, tells / repeats, repeats)

    @property
    def _shape(self) -> tuple[int, int, int]:
        return self.num_sets, self.num_permutations, self.num_queries

    @property
    def _quoted(self) -> SensitivityIntervals:
        return _quoted(self.gaussian, self.jackknife)


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
    logit; near 0 and 1 about half an answer is added to either side, which takes out the bias of x of order 1/Q (Haldane
    1956, Firth 1993). (2) v, and what of it belongs to the query alone, to query and set, and to query and permutation,
    are those at which pairs of different cells have the covariances over queries that are observed. (3) the mean squares
    of x, and of answers linearised at x, are solved for the components as on the scale of accuracies, the noise of
    single answers subtracted. Nothing is maximised over single query effects: with ten answers an effect that biases
    Laplace's approximation. Queries need not be Gaussian (benchmarks/latent_coverage.py).

    Classes of queries that react differently to order should be fitted apart, one call each.

    Raises RequestError on other shapes or values and for S or P below 2; DataError where answers do not tell the logit:
    all right or all wrong, every query always answered alike, or more than half of the cells without a wrong (or a
    right) answer. Cost: O(S·P·Q) and 0.1 s.
    """
    answers, weight = _read(correct, state, weights)
    fit = _fit(answers, None)
    mean_squares = _mean_squares(fit.cells, fit.noise, fit.num_queries)
    accuracy = _population_accuracy(answers, weight)
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
        gaussian=_gaussian_intervals(fit, level, draws, seed),
        jackknife=_jackknife_intervals(fit, level),
        mean_squares=mean_squares,
        scale_error=fit.scale_error,
        offset=float(weighted - plain),
        saturated=fit.saturated,
        draws=draws,
        seed=seed,
    )


class _Answers(NamedTuple):
    values: FloatArray
    """[S, P, Q] within 0..1; 0 where there is none."""
    ok: npt.NDArray[np.bool_] | None
    """[S, P, Q] where there is an answer; None for everywhere."""


class _QueryNoise(NamedTuple):
    """Variances over queries of linearised logits, one answer a cell: what a cell's logit has of it, over Q."""

    item: float
    with_set: float
    with_permutation: float
    single: float
    """Of a single answer, chance included."""


class _LatentFit(NamedTuple):
    num_queries: int
    accuracy: FloatArray
    """[S, P] share of right answers, adjusted for the queries that a cell lacks."""
    cells: FloatArray
    """[S, P] logits."""
    queries: QueryVariances
    noise: _QueryNoise
    scale_error: float
    saturated: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.cells.shape[0], self.cells.shape[1], self.num_queries


class _Draws(NamedTuple):
    """Draws of standard deviations on the logit, and of the error of the mean."""

    order: FloatArray
    selection: FloatArray
    total: FloatArray
    mean: FloatArray


def _read(
    correct: npt.ArrayLike, state: npt.ArrayLike | None, weights: npt.ArrayLike | None
) -> tuple[_Answers, FloatArray]:
    """The answers to the queries that have one, and the weights of those."""
    values = np.asarray(correct)
    if values.ndim != 3:
        raise RequestError(f"latent components need correct of shape [S, P, Q], got {list(values.shape)}")
    if values.shape[0] < 2 or values.shape[1] < 2 or values.shape[2] < 2:
        sizes = ", ".join(f"{name} = {size}" for name, size in zip("SPQ", values.shape, strict=True))
        raise RequestError(f"latent components need at least 2 sets, permutations and queries, got {sizes}")
    weight = query_weights(weights, values.shape[2])
    scores = values.astype(np.float64)
    ok = None
    if state is not None:
        states = np.asarray(state)
        if states.shape != values.shape:
            raise RequestError(f"state must have the shape of correct {list(values.shape)}, got {list(states.shape)}")
        if states.any():
            ok = states == 0
            scores = np.where(ok, scores, 0.0)
    if not (np.isfinite(scores).all() and scores.min() >= 0 and scores.max() <= 1):
        s, p, q = np.argwhere(~((scores >= 0) & (scores <= 1)))[0]
        raise RequestError(
            f"correct[{s}, {p}, {q}] is {values[s, p, q]}; answers lie within 0..1, and state marks those that are missing"
        )
    if ok is not None:
        kept = ok.any(axis=(0, 1))
        scores, ok, weight = scores[..., kept], ok[..., kept], weight[kept]
        if not ok.any(axis=2).all():
            s, p = np.argwhere(~ok.any(axis=2))[0]
            raise DataError(f"set {s} under permutation {p} has no answer at all; leave the set or permutation out")
    if not weight.any():
        raise DataError("all queries with an answer have weight 0; give one of them a weight")
    return _Answers(scores, ok), weight


def _fit(answers: _Answers, queries: QueryVariances | None) -> _LatentFit:
    """Logits of cells, variances of queries (given, or from the covariances), and the mean squares of both."""
    values, ok = answers
    num_s, num_p, num_q = values.shape
    count = np.full((num_s, num_p), float(num_q)) if ok is None else ok.sum(axis=2).astype(np.float64)
    accuracy = _adjusted_means(answers)
    error = values - accuracy[..., None]
    if ok is not None:
        error = np.where(ok, error, 0.0)
    covariances, by_query = _pair_covariances(error, ok)
    saturated = int(np.count_nonzero((accuracy <= 0) | (accuracy >= 1)))
    _refuse_degenerate(answers, saturated)
    # a graded answer has less noise than a binary one, and counts as so many of those
    binary = float((accuracy * (1 - accuracy)).sum())
    trials = count / min(float((np.square(error).sum(axis=2) / count).sum()) / binary, 1.0)
    if queries is None:
        queries = query_variances((accuracy * trials + 0.5) / (trials + 1), covariances)
    cells, drawn_in, shrink = _logits(accuracy, trials, queries.total)
    slope, _ = marginal_slopes(cells, queries.total)
    # The noise of x, per answer: binomial at the drawn-in share, exact to second order in 1/Q.
    variance = drawn_in * (1 - drawn_in) / slope**2 * num_q / (trials + 2 * shrink)
    latent, _ = _pair_covariances(error / slope[..., None], ok)
    of_item, of_set, of_permutation = latent[0], latent[1] - latent[0], latent[2] - latent[0]
    if ok is not None:  # the additive fit takes out what belongs to the query alone
        variance = variance - of_item * (num_q / count - 1)
    single = max(float(variance.mean()) - of_item - of_set - of_permutation, 0.0)
    noise = _QueryNoise(of_item, of_set, of_permutation, single)
    total_error = float(np.std(np.array(queries.gradient) @ by_query)) / math.sqrt(num_q)
    scale_error = total_error * _scale_slope(accuracy, trials, queries.total)
    return _LatentFit(num_q, accuracy, cells, queries, noise, scale_error, saturated)


def _adjusted_means(answers: _Answers) -> FloatArray:
    """[S, P] mean of each cell; with missing answers that of an additive fit of cells and queries, by turns."""
    values, ok = answers
    if ok is None:
        return np.asarray(values.mean(axis=2))
    of_cell, of_query = ok.sum(axis=2), ok.sum(axis=(0, 1))
    cell_sums, query_sums, present = values.sum(axis=2), values.sum(axis=(0, 1)), ok.astype(np.float64)
    ease = np.zeros(values.shape[2])
    means = cell_sums / of_cell
    for _ in range(_SWEEPS):
        ease = (query_sums - np.einsum("spq,sp->q", present, means)) / of_query
        ease -= ease.mean()
        before, means = means, (cell_sums - present @ ease) / of_cell
        if np.abs(means - before).max() < _SWEPT:
            break
    return np.asarray(np.clip(means, 0.0, 1.0))


def _refuse_degenerate(answers: _Answers, saturated: int) -> None:
    """Raises DataError where the answers do not tell the logit."""
    values, ok = answers
    present = np.ones(values.shape, np.bool_) if ok is None else ok
    lowest = np.where(present, values, 1.0).min(axis=(0, 1))
    highest = np.where(present, values, 0.0).max(axis=(0, 1))
    if highest.max() == 0 or lowest.min() == 1:
        what = "wrong" if highest.max() == 0 else "right"
        raise DataError(f"all answers are {what}: on the logit nothing bounds them; take harder or easier queries")
    if (lowest == highest).all():
        raise DataError(
            "every query is answered alike in all cells: sets and orders did nothing, and on the logit queries are "
            "infinitely far apart; add queries that some contexts answer and others do not"
        )
    cells = values.shape[0] * values.shape[1]
    if saturated > _MOST_SATURATED * cells:
        raise DataError(
            f"{saturated} of {cells} cells are all right or all wrong, and have no logit; add queries, harder ones if "
            "most are right"
        )


def _pair_covariances(error: FloatArray, ok: npt.NDArray[np.bool_] | None) -> tuple[FloatArray, FloatArray]:
    """Covariances over queries between cells that share [neither, the set, the permutation], and their [3, Q] parts.

    error: [S, P, Q] answers less the mean of their cell, 0 where missing. Complete answers give the components of the
    analysis of variance; with missing ones, means over the pairs that exist. The parts have the covariance as mean 0
    offset: their standard deviation over √Q is its standard error.
    """
    num_s, num_p, num_q = error.shape
    sums = pair_sums(error)
    pairs = pair_counts(num_s, num_p)[:, None] * np.ones(num_q) if ok is None else pair_sums(ok.astype(np.float64))
    total = pairs.sum(axis=1)
    if (total == 0).any():
        raise DataError(
            "no query was answered in two cells of one set and of one permutation; the answers do not cross"
        )
    found = sums.sum(axis=1) / total
    parts = (sums - found[:, None] * pairs) * num_q / total[:, None]
    return found * num_q / (num_q - 1), parts


def _logits(accuracy: FloatArray, trials: FloatArray, variance: float) -> tuple[FloatArray, FloatArray, FloatArray]:
    """[S, P] logits, the drawn-in shares they are of, and how many answers were added on either side.

    E[h(p̂)] of h = g⁻¹ exceeds h(p) by ½·h''·p(1 - p)/n; adding c answers on either side lowers it by h'·c·(2p - 1)/n,
    which is equal for c = ½·(g''/g'²)·p(1 - p)/(1 - 2p): ½ for the logistic itself.
    """
    shrink = np.full_like(accuracy, 0.5)
    drawn_in = (accuracy * trials + shrink) / (trials + 2 * shrink)
    first, second = marginal_slopes(marginal_logit(drawn_in, variance), variance)
    tilt = 1 - 2 * drawn_in
    far = np.abs(tilt) > 0.05  # near one half there is no bias to take out
    best = 0.5 * second / first**2 * drawn_in * (1 - drawn_in) / np.where(far, tilt, 1.0)
    shrink = np.where(far, np.clip(best, 0.05, 0.6), 0.5)
    drawn_in = (accuracy * trials + shrink) / (trials + 2 * shrink)
    return marginal_logit(drawn_in, variance), drawn_in, shrink


def _scale_slope(accuracy: FloatArray, trials: FloatArray, variance: float) -> float:
    """Derivative by the queries' variance of the logarithm of how far logits lie apart at these accuracies."""
    drawn_in = (accuracy * trials + 0.5) / (trials + 1)
    step = max(0.01 * variance, 1e-3)
    logs = [
        -float(np.log(marginal_slopes(marginal_logit(drawn_in, v), v)[0]).mean()) for v in (variance, variance + step)
    ]
    return (logs[1] - logs[0]) / step


def _mean_squares(cells: FloatArray, noise: _QueryNoise, num_q: int) -> Effects:
    """Mean squares of the linearised logits: of the table [S, P], and of what queries add to it."""
    num_s, num_p = cells.shape
    centred = cells - cells.mean()
    rows, columns = centred.mean(axis=1), centred.mean(axis=0)
    residual = centred - rows[:, None] - columns
    s, p = num_s - 1, num_p - 1
    of_both = num_p * noise.with_set + num_s * noise.with_permutation
    return Effects(
        S=num_p * float(rows @ rows) / s * num_q,
        P=num_s * float(columns @ columns) / p * num_q,
        I=max(noise.single + of_both + num_s * num_p * noise.item, 0.0),
        SP=float(np.square(residual).sum()) / (s * p) * num_q,
        SI=max(noise.single + num_p * noise.with_set, 0.0),
        PI=max(noise.single + num_s * noise.with_permutation, 0.0),
        SPI=noise.single,
    )


def _effect_variances(cells: FloatArray, noise: _QueryNoise, num_q: int) -> tuple[float, float]:
    """σ²_P + σ²_SP and σ²_S + σ²_SP of a table of logits."""
    solved = solve_components(_mean_squares(cells, noise, num_q), *cells.shape, num_q)
    return solved.P + solved.SP, solved.S + solved.SP


def _total(*variances: float) -> float:
    """Root of a sum of variances, 0 where that is negative."""
    return math.sqrt(max(sum(variances), 0.0))


def _drawn(mean_squares: Effects, shape: tuple[int, int, int], scale_error: float, draws: int, seed: int) -> _Draws:
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
    return _Draws(order, selection, total, mean)


def _generator(seed: int, purpose: str) -> np.random.Generator:
    return np.random.default_rng([seed, *f"latent.{purpose}".encode()])


def _gaussian_intervals(fit: _LatentFit, level: float, draws: int, seed: int) -> SensitivityIntervals:
    """Generalised intervals of order effect, selection effect and their ratio."""
    drawn = _drawn(_mean_squares(fit.cells, fit.noise, fit.num_queries), fit.shape, fit.scale_error, draws, seed)
    order, selection = map(_total, _effect_variances(fit.cells, fit.noise, fit.num_queries))
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn_ratio = drawn.selection / drawn.order
    return SensitivityIntervals(
        quantile_interval(order, drawn.order, level),
        quantile_interval(selection, drawn.selection, level),
        quantile_interval(selection / order if order > 0 else math.nan, drawn_ratio, level),
    )


def _jackknife_intervals(fit: _LatentFit, level: float) -> SensitivityIntervals | None:
    """Intervals of the logarithms by leaving out one set, and one permutation, at a time.

    The two jackknife variances are added, and that of the scale; t quantile with min(S, P) - 1 degrees of freedom, as
    for the printed r (`iclperm.stats.intervals.jackknife_ratio_interval`).
    """
    num_s, num_p = fit.cells.shape
    if min(num_s, num_p) < 3:
        return None
    whole = np.array([_effect_variances(fit.cells, fit.noise, fit.num_queries)])
    without = [
        np.array([_effect_variances(np.delete(fit.cells, i, axis), fit.noise, fit.num_queries) for i in range(size)])
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
            Interval(math.exp(log), math.exp(log - width), math.exp(log + width), level)
            for log, width in zip(of_whole[0], half, strict=True)
        )
    )


def _quoted(gaussian: SensitivityIntervals, jackknife: SensitivityIntervals | None) -> SensitivityIntervals:
    """Of the two effects what either interval holds, of the ratio the jackknife's."""
    if jackknife is None:
        return gaussian
    order, selection = (
        one._replace(low=min(one.low, other.low), high=max(one.high, other.high))
        for one, other in zip(gaussian[:2], jackknife[:2], strict=True)
    )
    return SensitivityIntervals(order, selection, jackknife.ratio)


def _population_accuracy(answers: _Answers, weight: FloatArray) -> float:
    """Mean over cells of the weighted share of right answers."""
    values, ok = answers
    if ok is None:
        return float(np.average(values.mean(axis=(0, 1)), weights=weight))
    weighted = ok @ weight
    has_any = weighted > 0
    return float(((values @ weight)[has_any] / weighted[has_any]).mean())


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
    logit = np.full(shape, mu)
    for effect, variance in sigma2._asdict().items():
        if variance > 0:  # not NaN either
            size = [length if axis in effect else 1 for axis, length in zip("SPI", shape, strict=True)]
            logit += math.sqrt(variance) * generator.standard_normal(size)
    return (generator.random(shape) < special.expit(logit)).astype(np.float64)
