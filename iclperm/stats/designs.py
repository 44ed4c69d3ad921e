"""Order and selection effects where permutations were not drawn one by one: Latin squares, pairs, groups, all orders.

A design deals permutations in blocks that are drawn at random from a partition of all orders; those of one block depend
on each other. Two permutations of different blocks are as good as two independent ones, but for that they differ: what
order does is told by pairs of different blocks, and how sure that is by whole blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from iclperm.errors import RequestError
from iclperm.stats.components import variance_components
from iclperm.stats.convergence import MeanError, mean_error
from iclperm.stats.incomplete import strata_of
from iclperm.stats.intervals import (
    Interval,
    SensitivityIntervals,
    jackknife_error,
    quantile_interval,
    upper_tail,
)
from iclperm.stats.sensitivity import FloatArray, accuracy, graded_items, query_weights, sensitivity_ratio
from iclperm.study.orderings import block_size


class PermutationBlocks(NamedTuple):
    """Which permutations were dealt together."""

    labels: npt.NDArray[np.int64]
    """[P] the block of each permutation, numbered from 0."""
    size: int
    """Permutations in a whole block; the last one can have fewer."""
    num_orders: float
    """Orders that there are in all; infinite where that does not matter."""
    is_complete: bool
    """Whether all orders are there, so that no others could have been drawn."""

    @property
    def num_blocks(self) -> int:
        """Blocks, a part of one counted."""
        return int(self.labels[-1]) + 1


def permutation_blocks(design: str, num_permutations: int, size: int) -> PermutationBlocks:
    """The blocks of a study's design: permutations of ``size`` positions, as `draw_permutations` deals them."""
    each = block_size(design, size)
    num_orders = float(math.factorial(size)) if size <= 20 else math.inf
    is_complete = design == "exhaustive" or num_permutations >= num_orders
    labels = np.arange(num_permutations) // (1 if is_complete else each)
    return PermutationBlocks(labels, 1 if is_complete else each, num_orders, is_complete)


@dataclass(frozen=True)
class DesignedEffects:
    """Order and selection effects free of item noise, of permutations that came in blocks."""

    num_permutations: int
    num_blocks: int
    """Blocks of permutations, a part of one counted; those that come by themselves are one each."""
    order2: float
    """Variance of accuracy over orders, of one set; unbiased, so it can be negative."""
    selection2: float
    """Variance of accuracy over sets, of one order; likewise."""
    gain: float
    """How many independent orders one of these stands for in the mean accuracy over orders: above 1 where what one
    order of a block gains another loses. NaN where that cannot be told."""
    intervals: SensitivityIntervals
    """Of both effects and their ratio, free of item noise; NaN where the design has too few blocks or sets."""
    with_noise: SensitivityIntervals
    """Of both sensitivities (RMS) and r as they were measured, item noise included."""
    method: Literal["jackknife", "generalised"]
    """How these intervals were made."""
    jackknife: Interval
    """Of the printed r, by leaving out one set, and one block, at a time; NaN below three of either."""

    @property
    def order_effect(self) -> float:
        """Standard deviation of accuracy over orders, 0 where the estimate of its square is negative."""
        return math.sqrt(max(self.order2, 0.0))

    @property
    def selection_effect(self) -> float:
        """The same over sets."""
        return math.sqrt(max(self.selection2, 0.0))

    @property
    def ratio(self) -> float:
        """r = selection effect / order effect; NaN where the order effect is 0."""
        return self.selection_effect / self.order_effect if self.order_effect > 0 else math.nan


def designed_effects(
    scores: npt.ArrayLike,
    blocks: PermutationBlocks,
    state: npt.ArrayLike | None = None,
    *,
    weights: npt.ArrayLike | None = None,
    classes: npt.ArrayLike | None = None,
    level: float = 0.95,
    draws: int = 20_000,
    seed: int = 0,
) -> DesignedEffects:
    """Effects of order and choice from answers [S, P, Q] whose permutations are of a design.

    Takes scores, state, weights and classes as `variance_components` does. The variance over orders is that of a random
    pair: of the N orders a random one shares its block of b with b - 1, so it is ((b - 1)·W + (N - b)·B)/(N - 1), where
    W and B are half the mean squared difference of two permutations of one block, and of different blocks, free of item
    noise (that of products over different queries). Unbiased for the variance over all orders, N - 1 in its
    denominator, whatever depends on what within a block; with blocks of one it is that of `variance_components`. The
    variance over sets needs pairs of sets under one permutation alone.

    Intervals are those of the jackknife on the log scale that leaves out one set, and one block, at a time, its two
    variances added: what permutations of one block have in common is in it, whatever that is. Of all orders no others
    could have been drawn, and sets alone are left out. Below three sets or blocks, where an effect is 0 without one of
    them, and for blocks of one they are generalised: sums of squares between and within blocks, of permutations and of
    their interaction with sets, are drawn as SS / χ²(df) each, with blocks - 1 and P - blocks degrees of freedom.
    benchmarks/designs_coverage.py has their simulated coverage.

    Raises RequestError where all permutations are of one block, unless they are all orders, and what
    `variance_components` does. Cost: O(S·P·Q), and O(S·P²·Q) where answers are missing.
    """
    items = graded_items(scores)
    if items.ndim != 3:
        raise RequestError(f"the effects of a design need scores of shape [S, P, Q], got {list(items.shape)}")
    _refuse_one_block(blocks, items.shape[1])
    components = variance_components(items, state, weights=weights, classes=classes)
    selection2 = components.sigma2.S + components.sigma2.SP
    by_set = order_variances(items, blocks, state, weights=weights, classes=classes)
    order2 = float(by_set.mean())
    matrix = accuracy(items, state, weights).values
    raw = _raw(matrix, blocks)
    noise = raw.order - order2, raw.selection - selection2
    degrees = (items.shape[1] - 1.0) * (components.num_queries - 1.0)
    drawn = _drawn_raw(matrix, blocks, raw, draws, seed)
    chi = np.random.default_rng([seed, *b"design.noise"]).chisquare(degrees, size=(2, draws)) / degrees
    free = tuple(values - part / chance for values, part, chance in zip(drawn, noise, chi, strict=True))
    found = _roots((order2, selection2), free, level)
    measured = _roots((raw.order, raw.selection), drawn, level)
    left_out = _without_each(matrix, blocks)
    has_jackknife = bool(left_out) and (blocks.size > 1 or blocks.is_complete)
    if has_jackknife:
        found = _jackknifed(found, [values - noise for values in left_out], level)
        measured = _jackknifed(measured, left_out, level)
    return DesignedEffects(
        num_permutations=items.shape[1],
        num_blocks=blocks.num_blocks,
        order2=order2,
        selection2=selection2,
        gain=_gain(matrix, blocks, raw),
        intervals=found,
        with_noise=measured,
        method="jackknife" if has_jackknife else "generalised",
        jackknife=block_jackknife(matrix, blocks, level),
    )


def order_variances(
    scores: npt.ArrayLike,
    blocks: PermutationBlocks,
    state: npt.ArrayLike | None = None,
    *,
    weights: npt.ArrayLike | None = None,
    classes: npt.ArrayLike | None = None,
) -> FloatArray:
    """[S] variance of accuracy over all orders of each set, free of item noise; unbiased (`designed_effects`)."""
    items = graded_items(scores)
    _refuse_one_block(blocks, items.shape[1])
    weight = query_weights(weights, items.shape[2])
    present = None if state is None or not np.any(state) else np.asarray(state) == 0
    strata = strata_of(weight, classes)
    if present is None:
        pairs = np.array([_of_complete_set(of_set, blocks, weight, strata) for of_set in items])
    else:
        pairs = np.array(
            [_of_set(one, there, blocks, weight, strata) for one, there in zip(items, present, strict=True)]
        )
    return _over_all_orders(pairs[:, 0], pairs[:, 1], blocks)


def designed_mean(
    scores: npt.ArrayLike,
    blocks: PermutationBlocks,
    weights: npt.ArrayLike | None = None,
    *,
    classes: npt.ArrayLike | None = None,
) -> MeanError:
    """`mean_error` of scores [S, P, Q] without missing answers, where whole blocks of permutations are the draws.

    The mean is that over all P permutations. A part of a block counts by its size, which makes the interval a little
    too wide. With all orders nothing was drawn: the error is that of other sets and queries. Raises what it does.
    """
    values = np.asarray(scores, dtype=np.float64)
    by_order = values.mean(axis=1, keepdims=True)
    if blocks.is_complete:
        return mean_error(by_order, weights, classes=classes)
    counts = np.bincount(blocks.labels).astype(np.float64)
    starts = np.searchsorted(blocks.labels, np.arange(len(counts)))
    means = np.add.reduceat(values, starts, axis=1) / counts[:, None]
    scale = (len(counts) * counts / len(blocks.labels))[:, None]
    return mean_error(by_order + scale * (means - by_order), weights, classes=classes)


def block_jackknife(matrix: FloatArray, blocks: PermutationBlocks, level: float = 0.95) -> Interval:
    """`jackknife_ratio_interval` of accuracy [S, P] that leaves out whole blocks of permutations.

    With all orders sets alone are left out. NaN below three sets or blocks, and where a ratio is 0 or undefined.
    """
    ratio = sensitivity_ratio(matrix)
    sets = [sensitivity_ratio(np.delete(matrix, s, 0)) for s in range(len(matrix))]
    units = [
        sensitivity_ratio(matrix[:, blocks.labels != block])
        for block in range(0 if blocks.is_complete else blocks.num_blocks)
        if np.count_nonzero(blocks.labels != block) > 1
    ]
    least = min(len(sets), len(sets) if blocks.is_complete else blocks.num_blocks)
    left_out = [sets] if blocks.is_complete else [sets, units]
    if least < 3 or not all(value > 0 for value in (ratio, *sets, *units)):
        return Interval(ratio, math.nan, math.nan, level)
    error, _ = jackknife_error([np.log(values) for values in left_out])
    half = float(special.stdtrit(least - 1, upper_tail(level))) * error
    return Interval(ratio, ratio * math.exp(-half), ratio * math.exp(half), level)


class _RawSquares(NamedTuple):
    """Sums of squares of accuracies [S, P], and both variances with item noise in them."""

    sets: float
    between: FloatArray
    """[2] of permutations between blocks, and of their interaction with sets."""
    within: FloatArray
    """[2] likewise, within blocks."""
    order: float
    selection: float


def _raw(matrix: FloatArray, blocks: PermutationBlocks) -> _RawSquares:
    num_s, num_p = matrix.shape
    centred = matrix - matrix.mean()
    rows, columns = centred.mean(axis=1), centred.mean(axis=0)
    residual = centred - rows[:, None] - columns
    parts = [(num_s, columns[None]), (1, residual)]
    between, within = [], []
    for scale, table in parts:
        inside = table - _block_means(table, blocks)
        within.append(scale * float(np.sum(inside**2)))
        between.append(scale * float(np.sum((table - table.mean(axis=1, keepdims=True)) ** 2)) - within[-1])
    pairs = np.array([_pair_squares(row, blocks) for row in matrix])
    order = float(_over_all_orders(pairs[:, 0], pairs[:, 1], blocks).mean())
    selection = float(matrix.var(axis=0, ddof=1).mean()) if num_s > 1 else math.nan
    return _RawSquares(num_p * float(rows @ rows), np.array(between), np.array(within), order, selection)


def _drawn_raw(
    matrix: FloatArray, blocks: PermutationBlocks, raw: _RawSquares, draws: int, seed: int
) -> tuple[FloatArray, FloatArray]:
    """Draws of both variances, item noise in them: linear in the sums of squares, each times df / χ²(df)."""
    (num_s, num_p), num_g = matrix.shape, blocks.num_blocks

    def factor(purpose: str, degrees: int) -> FloatArray:
        generator = np.random.default_rng([seed, *f"design.{purpose}".encode()])
        return np.asarray(degrees / generator.chisquare(degrees, size=draws)) if degrees > 0 else np.ones(draws)

    degrees = {"between": num_g - 1, "within": num_p - num_g}
    drawn = {}
    for name, squares in (("between", raw.between), ("within", raw.within)):
        main = squares[0] * factor(f"{name}.P", degrees[name])
        drawn[name] = main, squares[1] * factor(f"{name}.SP", (num_s - 1) * degrees[name])
    # How much of each sum of squares is in the order variance: as observed, which parts of blocks leave unequal.
    total = {name: float(squares.sum()) for name, squares in (("between", raw.between), ("within", raw.within))}
    share = _shares(blocks, num_p, num_s)
    rest = raw.order - sum(share[name] * total[name] for name in total)  # 0 but for parts of blocks
    order = sum(share[name] * (drawn[name][0] + drawn[name][1]) for name in total) + rest
    interaction = drawn["between"][1] + drawn["within"][1]
    set_squares = raw.sets * factor("S", num_s - 1)
    selection = (set_squares + interaction) / ((num_s - 1) * num_p)
    return np.asarray(order), np.asarray(selection)


def _shares(blocks: PermutationBlocks, num_p: int, num_s: int) -> dict[str, float]:
    """What a unit of the sum of squares between, and within, blocks gives to the order variance, mean over sets."""
    counts = np.bincount(blocks.labels).astype(np.float64)
    pairs = num_p**2 - float(np.sum(counts**2))
    same = float(np.sum(counts * (counts - 1)))
    each = float(np.sum(counts * (counts - 1))) / max(
        num_p - len(counts), 1
    )  # size of the block of a degree of freedom
    b, n = blocks.size, blocks.num_orders
    weight = 1.0 if math.isinf(n) else (n - b) / (n - 1)
    inside = 0.0 if math.isinf(n) or not same else (b - 1) / (n - 1) * each / same
    return {"between": weight * num_p / pairs / num_s, "within": (weight * (num_p - each) / pairs + inside) / num_s}


def _gain(matrix: FloatArray, blocks: PermutationBlocks, raw: _RawSquares) -> float:
    """Variance over orders by that of the mean of a block, times its size; both with item noise in them."""
    counts = np.bincount(blocks.labels)
    if blocks.is_complete or blocks.size == 1 or np.count_nonzero(counts == blocks.size) < 2:
        return math.nan
    whole = matrix[:, np.isin(blocks.labels, np.flatnonzero(counts == blocks.size))]
    means = whole.reshape(len(matrix), -1, blocks.size).mean(axis=2)
    variance = float(means.var(axis=1, ddof=1).mean()) * blocks.size
    return raw.order / variance if variance > 0 and raw.order > 0 else math.nan


def _roots(estimates: tuple[float, float], variances: tuple[FloatArray, ...], level: float) -> SensitivityIntervals:
    order, selection = (np.sqrt(np.maximum(values, 0.0)) for values in variances)
    roots = [math.sqrt(max(value, 0.0)) for value in estimates]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = selection / order
    of_ratio = roots[1] / roots[0] if roots[0] > 0 else math.nan
    return SensitivityIntervals(
        quantile_interval(roots[0], order, level),
        quantile_interval(roots[1], selection, level),
        quantile_interval(of_ratio, ratio, level),
    )


def _without_each(matrix: FloatArray, blocks: PermutationBlocks) -> list[FloatArray]:
    """[units, 2] variance over orders and over sets, item noise in them, without one set, and without one block, at a
    time; empty below three of either. With all orders there are no blocks to leave out."""
    units = len(matrix) if blocks.is_complete else blocks.num_blocks
    if min(len(matrix), units) < 3:
        return []

    def variances(rows: FloatArray, kept: PermutationBlocks) -> tuple[float, float]:
        between, within = _pair_squares(rows, kept)
        order = float(_over_all_orders(between, within, kept).mean())
        return order, float(rows.var(axis=0, ddof=1).mean())

    found = [np.array([variances(np.delete(matrix, s, 0), blocks) for s in range(len(matrix))])]
    if not blocks.is_complete:
        without = []
        for block in range(blocks.num_blocks):
            kept = blocks.labels != block
            labels = blocks.labels[kept] - (blocks.labels[kept] > block)
            without.append(variances(matrix[:, kept], blocks._replace(labels=labels)))
        found.append(np.array(without))
    return found


def _jackknifed(intervals: SensitivityIntervals, left_out: list[FloatArray], level: float) -> SensitivityIntervals:
    """Intervals of the jackknife around the estimates of these, from squares [units, 2] without one unit of each kind;
    those given where some square is 0 or below."""
    found = []
    for place, given in enumerate(intervals):
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = [np.log(np.maximum(values, 0.0)) / 2 for values in left_out]
            values = [log[:, 1] - log[:, 0] if place == 2 else log[:, place] for log in logs]
        if not (given.estimate > 0 and all(np.isfinite(value).all() for value in values)):
            found.append(given)
            continue
        error, degrees = jackknife_error(values)
        half = float(special.stdtrit(degrees, upper_tail(level))) * error
        found.append(Interval(given.estimate, given.estimate * math.exp(-half), given.estimate * math.exp(half), level))
    return SensitivityIntervals(*found)


def _refuse_one_block(blocks: PermutationBlocks, num_permutations: int) -> None:
    if len(blocks.labels) != num_permutations:
        raise RequestError(f"the blocks are of {len(blocks.labels)} permutations, the scores of {num_permutations}")
    if num_permutations < 2:
        raise RequestError("what order does takes two permutations at least, got 1")
    if blocks.num_blocks < 2 and not blocks.is_complete:
        raise RequestError(
            f"all {num_permutations} permutations are of one block of {blocks.size}, which cannot tell how much others "
            f"differ; run {2 * blocks.size} permutations or more"
        )


def _over_all_orders(between: FloatArray, within: FloatArray, blocks: PermutationBlocks) -> FloatArray:
    """Variance over all orders from half the mean squared differences of pairs; those within are 0 of blocks of one."""
    if math.isinf(blocks.num_orders):
        return between
    b, n = blocks.size, blocks.num_orders
    return np.asarray(((b - 1) * within + (n - b) * between) / (n - 1))


def _block_means(table: FloatArray, blocks: PermutationBlocks) -> FloatArray:
    """[..., P] the mean of each permutation's block."""
    starts = np.searchsorted(blocks.labels, np.arange(blocks.num_blocks))
    sums = np.add.reduceat(table, starts, axis=-1)
    return np.asarray((sums / np.bincount(blocks.labels))[..., blocks.labels])


def _pair_squares(values: FloatArray, blocks: PermutationBlocks) -> tuple[Any, Any]:
    """Half the mean squared difference of two of values [..., P] of different blocks, and of one, each [...].

    Σ over pairs of (f - g)² is n·SS of n values: of all less that of each block.
    """
    counts = np.bincount(blocks.labels).astype(np.float64)
    num_p = len(blocks.labels)
    total = np.sum((values - values.mean(axis=-1, keepdims=True)) ** 2, axis=-1)
    inside = (values - _block_means(values, blocks)) ** 2 @ counts[blocks.labels]
    same = float(np.sum(counts * (counts - 1)))
    between = (num_p * total - inside) / (num_p**2 - float(np.sum(counts**2)))
    return between, inside / same if same else np.zeros_like(inside)


def _of_complete_set(
    items: npt.NDArray[Any], blocks: PermutationBlocks, weight: FloatArray, strata: npt.NDArray[np.int64]
) -> FloatArray:
    """[2] `_pair_squares` of the weighted accuracy of items [P, Q] of one set, free of item noise."""
    whole, noise = np.zeros(items.shape[0]), np.zeros(2)
    for name in range(int(strata.max()) + 1):
        members = strata == name
        w = weight[members]
        share, total, square = float(w.sum() / weight[strata >= 0].sum()), float(w.sum()), float(np.sum(w**2))
        _refuse_one_query(len(w))
        values = items[:, members].T.astype(np.float64)  # [queries, P]
        mean = w @ values / total
        whole += share * mean
        own = np.array(_pair_squares(mean, blocks))
        single = np.array([part @ w**2 for part in _pair_squares(values, blocks)])
        noise += share**2 * (own - (total**2 * own - single) / (total**2 - square))
    return np.asarray(np.array(_pair_squares(whole, blocks)) - noise)


def _of_set(
    items: npt.NDArray[Any],
    present: npt.NDArray[np.bool_],
    blocks: PermutationBlocks,
    weight: FloatArray,
    strata: npt.NDArray[np.int64],
) -> FloatArray:
    """[2] the same where answers are missing: every pair of permutations over the queries that both answered."""
    num_p = items.shape[0]
    lead, noise = np.zeros((num_p, num_p)), np.zeros((num_p, num_p))
    for name in range(int(strata.max()) + 1):
        members = strata == name
        w = weight[members]
        share = float(w.sum() / weight[strata >= 0].sum())
        there = present[:, members].astype(np.float64)
        values = np.where(present[:, members], items[:, members], 0).astype(np.float64)
        common, squared = (there * w) @ there.T, (there * w**2) @ there.T
        if ((common**2 - squared) <= 1e-9 * common**2).any():
            p, other = np.argwhere((common**2 - squared) <= 1e-9 * common**2)[0]
            raise RequestError(
                f"permutations {p} and {other} have fewer than 2 queries of some class in common; leave one out"
            )
        sums = (values * w) @ there.T - there @ (values * w).T
        squares = (values**2 * w**2) @ there.T
        squares = squares + squares.T - 2 * (values * w**2) @ values.T
        mean = sums / common
        lead += share * mean
        noise += share**2 * (mean**2 - (sums**2 - squares) / (common**2 - squared))
    halves = (lead**2 - noise) / 2
    is_same = blocks.labels[:, None] == blocks.labels
    inside = is_same & ~np.eye(num_p, dtype=np.bool_)
    return np.array([halves[~is_same].mean(), halves[inside].mean() if inside.any() else 0.0])


def _refuse_one_query(num_queries: int) -> None:
    if num_queries < 2:
        raise RequestError(f"the effects need 2 queries of every class, found {num_queries}")
