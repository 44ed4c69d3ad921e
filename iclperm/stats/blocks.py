"""Order and selection effects where every ordering answered a block of queries of its own.

`own_block_components` knows an ordering by its own answers alone: the variance of the accuracies is that of the
orderings plus the noise of their blocks, which the spread within each block tells. It needs no query in common.
`variance_components` compares answers to the same query (`stats.incomplete`): where blocks overlap, what queries differ
in by themselves is then no noise. `block_effects` takes the better of the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from iclperm.errors import RequestError
from iclperm.stats.components import VarianceComponents, variance_components
from iclperm.stats.incomplete import mean_squares, strata_of
from iclperm.stats.intervals import (
    Interval,
    SensitivityIntervals,
    effect_interval,
    jackknife_error,
    quantile_interval,
    upper_tail,
)
from iclperm.stats.sensitivity import FloatArray, graded_items, query_weights

BlockTarget = Literal["others", "these"]
BlockMethod = Literal["own", "adjusted"]
_LEAST_SHARED = 4.0  # answers to a query, on average, from which comparing them is better than each block by itself


@dataclass(frozen=True)
class OwnBlockComponents:
    """Components of accuracy from the answers of every ordering to its own queries."""

    accuracy: FloatArray
    """[S, P] of each ordering over its own block, classes weighted as in the whole."""
    noise: FloatArray
    """[S, P] unbiased variance of each because of which queries its block holds."""
    S: float
    """σ²_S of accuracy; unbiased, as all of these, so that it can be negative."""
    P: float
    """σ²_P"""
    SP: float
    """σ²_SP"""
    pool: tuple[float, float, float]
    """What item noise of the pool itself, which all blocks share, was taken out of S, P and SP."""
    mean: Interval
    """Mean accuracy for other sets and permutations, on the queries that were aimed at."""
    se: float
    """Standard error of the mean, for all that the interval is about."""
    mean_degrees: float
    """Degrees of freedom of `se` (Satterthwaite)."""
    se_queries: float
    """Standard error of the mean for other queries alone, clustered by query."""
    degrees: float
    """Degrees of freedom of the noise."""
    target: BlockTarget

    @property
    def order2(self) -> float:
        """σ²_P + σ²_SP, free of item noise; can be negative."""
        return self.P + self.SP

    @property
    def selection2(self) -> float:
        """σ²_S + σ²_SP, likewise."""
        return self.S + self.SP


class BlockEffects(NamedTuple):
    """Effects free of item noise of orderings that answered different queries."""

    method: BlockMethod
    order2: float
    """Variance over orders, unbiased."""
    selection2: float
    """Variance over sets, unbiased."""
    generalised: SensitivityIntervals
    """Intervals from χ² draws of the mean squares."""
    jackknife: SensitivityIntervals
    """Intervals from leaving out one set, and one permutation, at a time, on the log scale."""


def own_block_components(
    scores: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    *,
    weights: npt.ArrayLike | None = None,
    classes: npt.ArrayLike | None = None,
    target: BlockTarget = "others",
    level: float = 0.95,
) -> OwnBlockComponents:
    """Components of accuracy where every ordering answered a random block of queries, overlapping or not.

    Args:
        scores: [S, P, Q] 0 or 1, or partial credit in 0..1, over a pool of Q queries.
        state: [S, P, Q] integers, 0 = answered; what an ordering was not asked is not 0. None: the Q axis is each
            ordering's own block, no two of which have a query in common.
        weights: [Q] how often each query counts in the accuracy; only with `state`.
        classes: [Q] the class of each query where blocks are drawn class by class; without it queries of one weight
            are a class, and blocks are random samples of each.
        target: ``these``: the accuracy on the pool, of which a block of n is drawn without replacement, so that its
            noise is (1 - n/N)·s²/n. ``others``: on other queries like them; item noise of the pool itself, which does
            not differ between orderings that answered the same query, is taken out too.

    Blocks are independent of each other given the pool, so that the mean squares of accuracies [S, P] hold the effects
    and the mean noise: σ²_SP = MS_SP - v, σ²_P = (MS_P - MS_SP)/S, σ²_S = (MS_S - MS_SP)/P, unbiased whatever the
    effects. Of ``others`` in an overlapping pool (σ²_PI + σ²_SPI)/N and (σ²_SI + σ²_SPI)/N, by class, are taken from
    the components of `variance_components`; without common queries there is nothing to take, and where too few are in
    common to tell, nothing is taken.

    Raises RequestError below two sets or permutations, and where an ordering has no answer, or none has two, in some
    class. Cost: O(S·P·Q).
    """
    items = graded_items(scores)
    if items.ndim != 3 or min(items.shape[:2]) < 2:
        raise RequestError(f"blocks need scores [S, P, Q] of 2 sets and 2 permutations, got {list(items.shape)}")
    if state is None and weights is not None:
        raise RequestError("blocks without a state have queries of their own each: leave out the weights")
    present = np.ones(items.shape, np.bool_) if state is None else np.asarray(state) == 0
    if present.shape != items.shape:
        raise RequestError(f"state must have the shape of scores {list(items.shape)}, got {list(present.shape)}")
    weight = query_weights(weights, items.shape[2])
    strata = strata_of(weight, classes)
    is_shared = state is not None and int(present.sum(axis=(0, 1)).max(initial=0)) > 1
    accuracy, noise, degrees, clustered = _own_accuracy(items, present, weight, strata, is_finite=is_shared)
    squares = mean_squares(accuracy)
    both = float(squares[2] - noise.mean())
    item, *pool = _of_pool(items, present, weight, classes) if is_shared and target == "others" else (0.0,) * 4
    num_s, num_p = accuracy.shape
    se, freedom = _mean_error(squares, accuracy.shape, max(item, 0.0))
    mean, half = float(accuracy.mean()), float(special.stdtrit(freedom, upper_tail(level))) * se
    return OwnBlockComponents(
        accuracy=accuracy,
        noise=noise,
        S=float(squares[0] - squares[2]) / num_p - pool[0],
        P=float(squares[1] - squares[2]) / num_s - pool[1],
        SP=both - pool[2],
        pool=(pool[0], pool[1], pool[2]),
        mean=Interval(mean, mean - half, mean + half, level),
        se=se,
        mean_degrees=freedom,
        se_queries=math.sqrt(clustered if is_shared else float(noise.sum()) / accuracy.size**2),
        degrees=degrees,
        target=target,
    )


def block_effects(
    scores: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    *,
    weights: npt.ArrayLike | None = None,
    classes: npt.ArrayLike | None = None,
    method: BlockMethod | None = None,
    level: float = 0.95,
    draws: int = 20_000,
    seed: int = 0,
) -> BlockEffects:
    """Order effect, selection effect and r on other queries, with two intervals each, from blocks of queries.

    Takes what `own_block_components` does. By default the method is ``adjusted`` where a query has four answers or
    more on average, and ``own`` below. Generalised intervals draw each mean square as SS / χ²(df), and the noise with
    its own degrees of freedom; the jackknife leaves out sets and permutations, its t quantile has Satterthwaite's
    degrees of freedom, and min(S, P) - 1 for r. benchmarks/designs.py has their coverage. Raises what
    `own_block_components` and `variance_components` do. Cost: O(S·P·Q), and for ``adjusted`` S + P times that.
    """
    items = graded_items(scores)
    if method is None:
        shared = 0.0
        if state is not None:
            answers = (np.asarray(state) == 0).sum(axis=(0, 1))
            shared = float(answers[answers > 0].mean()) if answers.any() else 0.0
        method = "adjusted" if shared >= _LEAST_SHARED else "own"
    if method == "own":
        found = own_block_components(items, state, weights=weights, classes=classes, level=level)
        generalised = _generalised(found, level, draws, seed)
        variances: Callable[[Any, Any], tuple[float, float]] = partial(_own_variances, found)
        order2, selection2 = found.order2, found.selection2
    else:
        states = np.zeros(items.shape, np.uint8) if state is None else np.asarray(state)
        whole = variance_components(items, states, weights=weights, classes=classes)
        generalised = effect_interval(whole, level, draws, seed)

        def variances(rows: Any, columns: Any) -> tuple[float, float]:
            part = variance_components(
                items[rows][:, columns], states[rows][:, columns], weights=weights, classes=classes
            )
            return _effects2(part)

        order2, selection2 = _effects2(whole)
    jackknife = _jackknifed(items.shape[:2], (order2, selection2), variances, level)
    return BlockEffects(method, order2, selection2, generalised, jackknife)


def _effects2(components: VarianceComponents) -> tuple[float, float]:
    sigma2 = components.sigma2
    return sigma2.P + sigma2.SP, sigma2.S + sigma2.SP


def _own_accuracy(
    items: npt.NDArray[Any],
    present: npt.NDArray[np.bool_],
    weight: FloatArray,
    strata: npt.NDArray[np.int64],
    *,
    is_finite: bool,
) -> tuple[FloatArray, FloatArray, float, float]:
    """[S, P] accuracy of each ordering over its block, the variance of each, and the degrees of freedom of that; and
    the variance of the mean over other queries, clustered by query."""
    shape = items.shape[:2]
    accuracy, noise, degrees, clustered = np.zeros(shape), np.zeros(shape), 0.0, 0.0
    total = float(weight[strata >= 0].sum())
    for name in range(int(strata.max()) + 1):
        members = np.flatnonzero(strata == name)
        w, there = weight[members], present[:, :, members]
        values = np.where(there, items[:, :, members], 0).astype(np.float64)
        share, count, sum_w = float(w.sum()) / total, there.sum(axis=2), there @ w
        if (count == 0).any():
            s, p = np.argwhere(count == 0)[0]
            raise RequestError(
                f"set {s} under permutation {p} has no answer to a query of some class; give every block one of each"
            )
        mean = values @ w / sum_w
        square = ((values - mean[..., None]) ** 2 * there) @ w**2 / sum_w**2
        several = count > 1
        if not several.any():
            raise RequestError("no ordering has 2 answers to queries of some class, whose noise is then not known")
        left = 1 - count / len(members) if is_finite else np.ones(shape)
        of_class = np.zeros(shape)
        of_class[several] = square[several] * count[several] / (count[several] - 1)
        if not several.all():  # a block of one query has the spread of the others
            spread = float(np.sum((of_class * count * (count - 1))[several]) / np.sum((count - 1)[several]))
            of_class[~several] = spread
        accuracy += share * mean
        noise += share**2 * left * of_class
        degrees += float((count - 1).sum())
        part = np.einsum("spq,sp->q", (values - mean[..., None]) * there, share / sum_w / accuracy.size) * w
        asked = int(np.count_nonzero(there.any(axis=(0, 1))))
        clustered += asked / max(asked - 1, 1) * float(part @ part)
    return accuracy, noise, degrees, clustered


def _of_pool(
    items: npt.NDArray[Any], present: npt.NDArray[np.bool_], weight: FloatArray, classes: npt.ArrayLike | None
) -> tuple[float, ...]:
    """What the pool's own queries add to the variance of the mean, and to σ²_S, σ²_P and σ²_SP."""
    weight = np.where(present.any(axis=(0, 1)), weight, 0.0)
    try:
        found = variance_components(items, None if present.all() else ~present, weights=weight, classes=classes)
    except RequestError:
        return (0.0,) * 4
    strata = [(one.share, one.num_queries, one.sigma2) for one in found.strata]
    added = np.zeros(4)
    for share, num_queries, sigma2 in strata or [(1.0, found.num_queries, tuple(found.sigma2))]:
        added += share**2 / num_queries * np.array(sigma2)[[2, 4, 5, 6]]
    return tuple(added.tolist())


def _mean_error(squares: FloatArray, shape: tuple[int, ...], pool: float) -> tuple[float, float]:
    """Standard error of the mean from (MS_S + MS_P - MS_SP)/(S·P), at least MS_S/(S·P), and what the pool itself adds;
    and its degrees of freedom."""
    num_s, num_p = shape
    degrees = np.array([num_s - 1, num_p - 1, (num_s - 1) * (num_p - 1)])
    terms = squares * [1, 1, -1] / (num_s * num_p)
    variance = max(float(terms.sum()), float(terms[0])) + pool
    uncertain = float(np.sum(terms**2 / degrees))
    freedom = variance**2 / uncertain if uncertain > 0 else float(degrees.min())
    return math.sqrt(variance), max(freedom, float(min(degrees[:2])))


def _own_variances(found: OwnBlockComponents, rows: Any, columns: Any) -> tuple[float, float]:
    accuracy, noise = found.accuracy[rows][:, columns], found.noise[rows][:, columns]
    order = float(accuracy.var(axis=1, ddof=1).mean() - noise.mean())
    selection = float(accuracy.var(axis=0, ddof=1).mean() - noise.mean())
    return order - found.pool[1] - found.pool[2], selection - found.pool[0] - found.pool[2]


def _generalised(found: OwnBlockComponents, level: float, draws: int, seed: int) -> SensitivityIntervals:
    num_s, num_p = found.accuracy.shape
    sizes = {"S": num_s - 1, "P": num_p - 1, "SP": (num_s - 1) * (num_p - 1), "noise": found.degrees}
    squares = dict(zip(sizes, (*mean_squares(found.accuracy).tolist(), float(found.noise.mean())), strict=True))
    drawn = {
        name: squares[name] * size / np.random.default_rng([seed, *f"block.{name}".encode()]).chisquare(size, draws)
        for name, size in sizes.items()
    }
    both = drawn["SP"] - drawn["noise"]
    order = both + (drawn["P"] - drawn["SP"]) / num_s - found.pool[1] - found.pool[2]
    selection = both + (drawn["S"] - drawn["SP"]) / num_p - found.pool[0] - found.pool[2]
    roots = [np.sqrt(np.maximum(values, 0.0)) for values in (order, selection)]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = roots[1] / roots[0]
    return SensitivityIntervals(
        *(
            quantile_interval(estimate, values, level)
            for estimate, values in zip(_estimates(found.order2, found.selection2), (*roots, ratio), strict=True)
        )
    )


def _estimates(order2: float, selection2: float) -> tuple[float, float, float]:
    order, selection = (math.sqrt(max(value, 0.0)) for value in (order2, selection2))
    return order, selection, selection / order if order > 0 else math.nan


def _jackknifed(
    shape: tuple[int, ...],
    estimates: tuple[float, float],
    variances: Callable[[Any, Any], tuple[float, float]],
    level: float,
) -> SensitivityIntervals:
    """Intervals from the two variances without one set, and without one permutation; NaN below three of either."""
    every = [np.arange(size) for size in shape]
    least = min(shape)
    roots = _estimates(*estimates)
    nothing = SensitivityIntervals(*(Interval(root, math.nan, math.nan, level) for root in roots))
    if least < 3:
        return nothing
    left_out = [
        np.array([variances(np.delete(every[0], s), every[1]) for s in every[0]]),
        np.array([variances(every[0], np.delete(every[1], p)) for p in every[1]]),
    ]
    found = []
    for place, root in enumerate(roots):
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = [np.log(np.maximum(values, 0.0)) / 2 for values in left_out]
            values = [log[:, 1] - log[:, 0] if place == 2 else log[:, place] for log in logs]
        if not (root > 0 and all(np.isfinite(value).all() for value in values)):
            found.append(nothing[place])
            continue
        error, degrees = jackknife_error(values)
        half = float(special.stdtrit(least - 1 if place == 2 else degrees, upper_tail(level))) * error
        found.append(Interval(root, root * math.exp(-half), root * math.exp(half), level))
    return SensitivityIntervals(*found)
