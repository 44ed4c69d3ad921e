"""Logits of cells and variances of queries from answers near floor and ceiling, by moments."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.errors import DataError, RequestError
from iclperm.stats.additive import additive_fit
from iclperm.stats.components import Effects, solve_components
from iclperm.stats.logistic_normal import (
    QueryVariances,
    marginal_logit,
    marginal_slopes,
    pair_counts,
    pair_sums,
    query_variances,
)
from iclperm.stats.sensitivity import FloatArray, accuracy, plain_array, query_weights

_MOST_SATURATED = 0.5  # of the cells
_LEAST_NOISE = 1e-6  # of that of binary answers: equal grades are not known without end


class LatentAnswers(NamedTuple):
    """Answers as they were given, and which there are."""

    values: npt.NDArray[Any]
    """[S, P, Q] bytes 0 and 1, or float64 within 0..1; 0 where there is none."""
    ok: npt.NDArray[np.bool_] | None
    """[S, P, Q] where there is an answer; None for everywhere."""


class QueryNoise(NamedTuple):
    """Variances over queries of linearised logits, one answer a cell: what a cell's logit has of it, over Q."""

    item: float
    with_set: float
    with_permutation: float
    single: float
    """Of a single answer, chance included."""


class LatentFit(NamedTuple):
    """Logits of the cells, and what queries and chance add to their spread."""

    num_queries: int
    accuracy: FloatArray
    """[S, P] share of right answers, adjusted for the queries that a cell lacks."""
    cells: FloatArray
    """[S, P] logits."""
    queries: QueryVariances
    noise: QueryNoise
    scale_error: float
    """Standard error of the logarithm of all logits' distances, for the error of the queries' variance."""
    saturated: int
    """Cells that are all right or all wrong."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """S, P and Q."""
        return self.cells.shape[0], self.cells.shape[1], self.num_queries


def read_answers(
    correct: npt.ArrayLike, state: npt.ArrayLike | None, weights: npt.ArrayLike | None
) -> tuple[LatentAnswers, FloatArray]:
    """The answers to the queries that have one, and the weights of those."""
    values = plain_array(correct)
    if values.ndim != 3:
        raise RequestError(f"latent components need correct of shape [S, P, Q], got {list(values.shape)}")
    if values.shape[0] < 2 or values.shape[1] < 2 or values.shape[2] < 2:
        sizes = ", ".join(f"{name} = {size}" for name, size in zip("SPQ", values.shape, strict=True))
        raise RequestError(f"latent components need at least 2 sets, permutations and queries, got {sizes}")
    weight = query_weights(weights, values.shape[2])
    scores = values.view(np.uint8) if values.dtype == np.bool_ else values
    if scores.dtype != np.uint8:
        scores = scores.astype(np.float64)
    ok = None
    if state is not None:
        states = np.asarray(state)
        if states.shape != values.shape:
            raise RequestError(f"state must have the shape of correct {list(values.shape)}, got {list(states.shape)}")
        if states.any():
            ok = states == 0
            scores = np.where(ok, scores, np.zeros((), scores.dtype))
    if not (np.isfinite(scores).all() and scores.min() >= 0 and scores.max() <= 1):
        s, p, q = np.argwhere(~((scores >= 0) & (scores <= 1)))[0]
        raise RequestError(
            f"correct[{s}, {p}, {q}] is {values[s, p, q]}; answers lie within 0..1, and state marks missing ones"
        )
    if ok is not None:
        kept = ok.any(axis=(0, 1))
        if not kept.all():
            scores, ok, weight = scores[..., kept], ok[..., kept], weight[kept]
        if not ok.any(axis=2).all():
            s, p = np.argwhere(~ok.any(axis=2))[0]
            raise DataError(f"set {s} under permutation {p} has no answer at all; leave the set or permutation out")
    if not weight.any():
        raise DataError("all queries with an answer have weight 0; give one of them a weight")
    return LatentAnswers(scores, ok), weight


def fit_answers(answers: LatentAnswers, queries: QueryVariances | None) -> LatentFit:
    """Logits of cells, variances of queries (given, or from the covariances), and the mean squares of both."""
    values, ok = answers
    num_s, num_p, num_q = values.shape
    count = np.full((num_s, num_p), float(num_q)) if ok is None else ok.sum(axis=2).astype(np.float64)
    accuracy = _adjusted_means(answers)
    error = values - accuracy[..., None]
    if ok is not None:
        error *= ok
    covariances, by_query = pair_covariances(error, ok)
    saturated = int(np.count_nonzero((accuracy <= 0) | (accuracy >= 1)))
    _refuse_degenerate(answers, saturated)
    # a graded answer has less noise than a binary one, and counts as so many of those
    seen = float((np.einsum("spq,spq->sp", error, error) / count).sum())
    trials = count / np.clip(seen / float((accuracy * (1 - accuracy)).sum()), _LEAST_NOISE, 1.0)
    if queries is None:
        queries = query_variances((accuracy * trials + 0.5) / (trials + 1), covariances)
    cells, drawn_in, shrink = cell_logits(accuracy, trials, queries.total)
    slope, _ = marginal_slopes(cells, queries.total)
    # The noise of x, per answer: binomial at the drawn-in share, exact to second order in 1/Q.
    variance = drawn_in * (1 - drawn_in) / slope**2 * num_q / (trials + 2 * shrink)
    error /= slope[..., None]
    latent, _ = pair_covariances(error, ok)
    of_item, of_set, of_permutation = latent[0], latent[1] - latent[0], latent[2] - latent[0]
    if ok is not None:  # the additive fit takes out what belongs to the query alone
        variance = variance - of_item * (num_q / count - 1)
    single = max(float(variance.mean()) - of_item - of_set - of_permutation, 0.0)
    noise = QueryNoise(of_item, of_set, of_permutation, single)
    total_error = float(np.std(np.array(queries.gradient) @ by_query)) / math.sqrt(num_q)
    scale_error = total_error * _scale_slope(accuracy, trials, queries.total)
    return LatentFit(num_q, accuracy, cells, queries, noise, scale_error, saturated)


def _adjusted_means(answers: LatentAnswers) -> FloatArray:
    """[S, P] mean of each cell; with missing answers that of an additive fit of cells and queries."""
    values, ok = answers
    if ok is None:
        return np.asarray(values.mean(axis=2))
    num_queries = values.shape[2]
    table = values.reshape(-1, num_queries), ok.reshape(-1, num_queries)
    fit = additive_fit(lambda: [table], np.ones(num_queries))
    return np.asarray(np.clip(fit.queries.mean() + fit.cells, 0.0, 1.0).reshape(values.shape[:2]))


def _refuse_degenerate(answers: LatentAnswers, saturated: int) -> None:
    """Raises DataError where the answers do not tell the logit."""
    values, ok = answers
    present = True if ok is None else ok
    lowest, highest = (
        values.min(axis=(0, 1), where=present, initial=1),
        values.max(axis=(0, 1), where=present, initial=0),
    )
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


def pair_covariances(error: FloatArray, ok: npt.NDArray[np.bool_] | None) -> tuple[FloatArray, FloatArray]:
    """Covariances over queries between cells that share [neither, the set, the permutation], and their [3, Q] parts.

    error: [S, P, Q] answers less the mean of their cell, 0 where missing. Complete answers give the components of the
    analysis of variance; with missing ones, means over the pairs that exist. A part is what its query adds to the
    covariance: the parts have mean 0, and their standard deviation over √Q is the standard error of the covariance.
    """
    num_s, num_p, num_q = error.shape
    sums = pair_sums(error)
    pairs = pair_counts(num_s, num_p)[:, None] * np.ones(num_q) if ok is None else pair_sums(ok)
    total = pairs.sum(axis=1)
    if (total == 0).any():
        raise DataError(
            "no query was answered in two cells of one set and of one permutation; the answers do not cross"
        )
    found = sums.sum(axis=1) / total
    parts = (sums - found[:, None] * pairs) * num_q / total[:, None]
    return found * num_q / (num_q - 1), parts


def cell_logits(accuracy: FloatArray, trials: FloatArray, variance: float) -> tuple[FloatArray, FloatArray, FloatArray]:
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


def mean_squares_of(cells: FloatArray, noise: QueryNoise, num_q: int) -> Effects:
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


def effect_variances(cells: FloatArray, noise: QueryNoise, num_q: int) -> tuple[float, float]:
    """σ²_P + σ²_SP and σ²_S + σ²_SP of a table of logits."""
    num_s, num_p = cells.shape
    solved = solve_components(mean_squares_of(cells, noise, num_q), num_s, num_p, num_q)
    return solved.P + solved.SP, solved.S + solved.SP


def population_accuracy(answers: LatentAnswers, weight: FloatArray) -> float:
    """Mean over cells of the weighted share of right answers, set right for what is missing (`stats.accuracy`)."""
    values, ok = answers
    return float(accuracy(values, None if ok is None else ~ok, weight).values.mean())
