"""How scores of demonstrations, the curve over k and plateau verdicts settle with permutations, sets and queries.

The checks that arXiv 2503.22002 asks for: the same numbers from many random parts of the stored answers. Parts are of
sums over blocks of queries, so the answers themselves are read once. What a part of a whole says agrees with the whole
the better the larger it is, for that reason alone; beside it stands what two *disjoint* parts say of each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.errors import RequestError
from iclperm.stats.convergence import Axis, mean_error
from iclperm.stats.correlation import pooled_rank_correlation
from iclperm.stats.demonstrations import SCORES, Score, demonstration_scores
from iclperm.stats.intervals import unseen_error
from iclperm.stats.paired import holm
from iclperm.stats.plateau import overall_of
from iclperm.stats.sensitivity import FloatArray, finite_items, query_weights, std_along
from iclperm.stats.verdicts import MARGIN, STATES, State, paired_from_sums, paired_tests, states_of

QUANTILES = (0.05, 0.5, 0.95)
"""Of every band: 90 % of the parts lie within, half of them below the middle."""
SCORE_NAMES = ("marginal", "prefix", "member", "stability")
"""The scores of arXiv 2503.22002, as far as it fixes them (`SCORES`)."""
_WORK = 1e8  # numbers that the parts of one axis may take for each of three jobs; larger designs are drawn less often
_LEAST_PARTS = 20
Places = npt.NDArray[np.int64]


class ScoreSettling(NamedTuple):
    """One score from parts of N sizes; Spearman's correlation within sets, pooled; [N, 3] quantiles over the parts."""

    with_whole: FloatArray
    """With the scores from everything; 1 at full size by construction."""
    with_other: FloatArray
    """With those of a disjoint part of the same size: what another run of this size would agree. Beyond half of the
    axis no part has such a partner: there it is that of the part's own halves, stepped up (Spearman-Brown)."""


class VerdictSettling(NamedTuple):
    """The verdict between two numbers of demonstrations, from parts of N sizes."""

    first: int
    last: int
    whole: State
    """Of the averaged curve, from everything."""
    states: FloatArray
    """[N, 3] share of the parts with each of `STATES`."""
    same: FloatArray
    """[N] share of the parts whose verdict is that of the whole; 1 at full size by construction."""
    same_other: FloatArray
    """[N] share of the parts whose verdict is that of a disjoint part; NaN beyond half of the axis."""
    same_single: FloatArray
    """[N] mean share of the single trajectories whose verdict is that of the whole; NaN where it is not of queries, as
    other orders do not change what one order's queries say."""


@dataclass(frozen=True)
class AxisSettling:
    """What N smaller sizes of one axis would have shown."""

    axis: Axis
    sizes: tuple[int, ...]
    """[N] levels in a part, ascending; the last is the whole axis."""
    num_parts: tuple[int, ...]
    """[N] random parts of each size; 1 at full size."""
    curve: FloatArray
    """[N, K, 3] quantiles of µ_k over the parts, drawn away from the middle by 1/√(1 - n'/n), as for fresh samples, and
    cut to 0..1; at full size only the middle is known."""
    spread: FloatArray
    """[N, K] mean over the parts of the standard deviation over orders, the papers' band around µ_k; NaN for one."""
    scores: Mapping[str, ScoreSettling]
    """By name; empty for sets, which have demonstrations of their own, and where their orders are not known."""
    verdicts: tuple[VerdictSettling, ...]


class Differences(NamedTuple):
    """Answers at the last number of demonstrations less those at an earlier one, in sums over blocks of queries."""

    first: int
    last: int
    once: FloatArray
    """[S, P, B] Σ w·d"""
    twice: FloatArray
    """[S, P, B] Σ w²·d"""
    square: FloatArray
    """[S, P, B] Σ w²·d²"""


@dataclass(frozen=True)
class BlockSums:
    """A run in sums over blocks of queries: all that settling is computed from."""

    right: FloatArray
    """[S, P, K, B] right answers, by weight."""
    weight: FloatArray
    """[B] Σ w"""
    squares: FloatArray
    """[B] Σ w²"""
    counts: FloatArray
    """[B] queries"""
    shots: tuple[int, ...]
    """[K]"""
    differences: tuple[Differences, ...]

    @cached_property
    def accuracy(self) -> FloatArray:
        """[S, P, K]"""
        return np.asarray(self.right.sum(axis=-1) / self.weight.sum())


def blocks_of(
    correct: npt.ArrayLike,
    edges: npt.ArrayLike,
    weights: npt.ArrayLike | None = None,
    *,
    shots: Sequence[int],
    right: npt.ArrayLike,
    firsts: Sequence[int] = (4, 8),
) -> BlockSums:
    """The sums of correct [S, P, K, Q] (usable queries only) between `edges` [B + 1] of blocks of queries.

    `right` [S, P, K, B] are the right answers by block and weight (`tensor.segment_sums`); `firsts` the numbers of
    demonstrations from which on a plateau is asked for, those of them that were run and are not the last. Raises
    RequestError on shapes that do not fit. Cost: a pass over the answers at each of these numbers.
    """
    items, at = finite_items(correct), np.asarray(edges, dtype=np.int64)
    sums = np.asarray(right, dtype=np.float64)
    if items.ndim != 4 or items.shape[2] != len(shots) or sums.shape != (*items.shape[:3], len(at) - 1):
        raise RequestError(
            f"need correct [S, P, {len(shots)}, Q] and right answers by block, got {list(items.shape)} and "
            f"{list(sums.shape)}"
        )
    weight = query_weights(weights, items.shape[3])

    def by_block(values: FloatArray) -> FloatArray:
        return np.asarray(np.add.reduceat(values, at[:-1], axis=-1), dtype=np.float64)

    found = []
    for first in firsts:
        if first in shots[:-1]:
            before, after = items[:, :, list(shots).index(first)], items[:, :, -1]
            parts = np.empty((3, *sums.shape[:2], sums.shape[3]))
            for s in range(len(items)):  # one set at a time: no signed copy of everything
                signed = after[s].astype(np.float64) - before[s]
                parts[0, s], parts[1, s] = by_block(signed * weight), by_block(signed * weight**2)
                parts[2, s] = by_block(signed**2 * weight**2)
            found.append(Differences(first, shots[-1], *parts))
    ones = np.ones(len(weight))
    return BlockSums(sums, by_block(weight), by_block(weight**2), by_block(ones), tuple(shots), tuple(found))


def settling(
    blocks: BlockSums,
    axis: Axis,
    sizes: Sequence[int],
    orders: npt.ArrayLike | None = None,
    *,
    margin: float = MARGIN,
    resamples: int = 40,
    seed: int = 0,
) -> AxisSettling:
    """The curve, the scores and the verdicts from random parts of one axis.

    Args:
        blocks: of the run (`blocks_of`); a part of the queries is made of whole blocks.
        axis: sets, permutations or queries.
        sizes: levels (blocks of queries) in a part; the whole axis is always the last.
        orders: [P, K] or [S, P, K], which demonstration stands at each position (`demonstration_scores`); None where
            that is not known, or every number of shots has demonstrations of its own: no scores then.
        margin: of equivalence (`plateau.plateau`).
        resamples: random parts of each size, fewer (20 at least) for large designs.
        seed: parts are keyed by it, the axis and the size.

    Scores are standardised anew in every part. The verdict of the averaged curve is `plateau.overall_of` the mean
    difference, its components taken over blocks in the place of queries, which estimates the same error with fewer
    degrees of freedom. Raises RequestError for a size outside 1..n or what `demonstration_scores` does. Cost: resamples
    · sizes · O(S·P·(K + B)).
    """
    total = blocks.right.shape[_PLACE[axis]]
    chosen = sorted({*(int(size) for size in sizes), total})
    if chosen[0] < 1 or chosen[-1] > total or resamples < 2:
        raise RequestError(f"sizes must lie in 1..{total} and resamples be at least 2, got {chosen} and {resamples}")
    limit = int(min(resamples, max(_LEAST_PARTS, _WORK // (blocks.right.size * len(chosen)))))
    names = _names_of(blocks, axis, orders)
    whole_scores = _scores(blocks.accuracy, orders, blocks.shots, names)
    whole = [_verdicts(each, blocks, margin) for each in blocks.differences]
    drawn = {size: _drawn(axis, size, total, limit, seed) for size in chosen}
    curves, spreads = zip(*(_curve_over(blocks, axis, drawn[size], size, total) for size in chosen), strict=True)
    return AxisSettling(
        axis=axis,
        sizes=tuple(chosen),
        num_parts=tuple(1 if size == total else limit for size in chosen),
        curve=np.stack(curves),
        spread=np.stack(spreads),
        scores=_score_settling(blocks, axis, drawn, total, orders, whole_scores),
        verdicts=tuple(
            _verdict_settling(each, one, blocks, axis, drawn, total, margin)
            for each, one in zip(blocks.differences, whole, strict=True)
        ),
    )


_PLACE: Mapping[Axis, int] = {"sets": 0, "permutations": 1, "queries": 3}


def _drawn(axis: Axis, size: int, total: int, limit: int, seed: int) -> Places:
    """[R, total] random orders of the levels: the first `size` of a row are a part, the next `size` its partner."""
    generator = np.random.default_rng([seed, *f"settling {axis}".encode(), size])
    return generator.permuted(np.tile(np.arange(total), (limit, 1)), axis=1)


def _part(blocks: BlockSums, axis: Axis, levels: Places) -> FloatArray:
    """Accuracy [S, P, K] of a part."""
    if axis == "queries":
        return np.asarray(blocks.right[..., levels].sum(axis=-1) / blocks.weight[levels].sum())
    return np.take(blocks.accuracy, levels, _PLACE[axis])


def _curve_over(blocks: BlockSums, axis: Axis, drawn: Places, size: int, total: int) -> tuple[FloatArray, FloatArray]:
    """Quantiles of µ_k [K, 3] over the parts, as for fresh samples, and the mean spread over orders [K]."""
    rows = drawn[:1] if size == total else drawn
    parts = [_part(blocks, axis, np.sort(row[:size])) for row in rows]
    means = np.array([part.mean(axis=(0, 1)) for part in parts])
    spread = np.mean([std_along(part, axis=1).mean(axis=0) for part in parts], axis=0)
    middle = np.quantile(means, 0.5, axis=0)
    if size == total:
        unknown = np.full_like(middle, math.nan)
        return np.stack([unknown, middle, unknown], axis=1), spread
    widened = middle + (np.quantile(means, QUANTILES, axis=0) - middle) / math.sqrt(1 - size / total)
    return np.clip(widened, 0.0, 1.0).T, spread


def _names_of(blocks: BlockSums, axis: Axis, orders: npt.ArrayLike | None) -> list[str]:
    if orders is None or axis == "sets" or blocks.shots[-1] == 0:
        return []
    has_steps = any(b - a == 1 for a, b in zip(blocks.shots, blocks.shots[1:], strict=False))
    return [name for name in SCORE_NAMES if name in SCORES and (has_steps or name in ("prefix", "member"))]


def _scores(accuracy: FloatArray, orders: Any, shots: Sequence[int], names: Sequence[str]) -> Mapping[str, Score]:
    return demonstration_scores(accuracy, orders, shots, names) if names else {}


def _score_settling(
    blocks: BlockSums,
    axis: Axis,
    drawn: Mapping[int, Places],
    total: int,
    orders: npt.ArrayLike | None,
    whole: Mapping[str, Score],
) -> dict[str, ScoreSettling]:
    order = np.asarray(orders)

    def scores(levels: Places) -> Mapping[str, Score]:
        kept = np.sort(levels)
        rows = order[..., kept, :] if axis == "permutations" else order
        return _scores(_part(blocks, axis, kept), rows, blocks.shots, list(whole))

    def agreement(one: Mapping[str, Score], other: Mapping[str, Score]) -> dict[str, float]:
        return {name: pooled_rank_correlation(one[name].values, other[name].values) for name in whole}

    least = 2 if axis == "permutations" else 1  # one permutation has no spread to standardise by
    by_size: dict[str, list[list[FloatArray]]] = {name: [[], []] for name in whole}
    for size, rows in drawn.items() if whole else ():
        found: list[list[dict[str, float]]] = [[], []]
        for row in rows:
            part = scores(row[:size]) if size >= least and (size < total or not found[0]) else None
            if part is not None:
                found[0].append(agreement(part, whole))
            if part is not None and 2 * size <= total:
                found[1].append(agreement(part, scores(row[size : 2 * size])))
            elif size // 2 >= least:
                halves = agreement(scores(row[: size // 2]), scores(row[size // 2 : 2 * (size // 2)]))
                found[1].append({name: 2 * r / (1 + abs(r)) for name, r in halves.items()})
        for name, kinds in by_size.items():
            for kind, values in zip(kinds, found, strict=True):
                kind.append(_quantiles(value[name] for value in values))
    return {name: ScoreSettling(*(np.stack(kind) for kind in kinds)) for name, kinds in by_size.items()}


def _quantiles(values: Iterable[float]) -> FloatArray:
    """[3]; NaN where none is known."""
    known = [value for value in values if math.isfinite(value)]
    return np.quantile(known, QUANTILES) if known else np.full(3, math.nan)


class _Verdicts(NamedTuple):
    overall: State
    single: npt.NDArray[np.uint8]
    """[S, P] of each trajectory, Holm-adjusted over them."""


def _verdicts(
    of: Differences, blocks: BlockSums, margin: float, axis: Axis = "queries", levels: Places | None = None
) -> _Verdicts:
    """The verdict of the averaged curve from a part, and (of queries) of each trajectory."""
    place = {"sets": 0, "permutations": 1, "queries": 2}[axis]
    once, twice, square = (
        values if levels is None else np.take(values, levels, place) for values in (of.once, of.twice, of.square)
    )
    kept = slice(None) if levels is None or axis != "queries" else levels
    weight, squares, num = blocks.weight[kept], float(blocks.squares[kept].sum()), float(blocks.counts[kept].sum())
    total = float(weight.sum())
    same = np.zeros(len(weight))  # blocks are no classes
    error = mean_error(once / weight, weight, classes=same, least=unseen_error(total**2 / squares))
    single = np.zeros(once.shape[:2], np.uint8)
    if axis == "queries":
        signed, twofold, changed = (values.sum(axis=-1) for values in (once, twice, square))
        paired = paired_from_sums(signed, twofold, changed, total, squares, round(num))
        equivalent, different = paired_tests(paired, margin)
        single = states_of(holm(equivalent), holm(different))
    return _Verdicts(overall_of(error, margin).state, single)


def _verdict_settling(
    of: Differences,
    whole: _Verdicts,
    blocks: BlockSums,
    axis: Axis,
    drawn: Mapping[int, Places],
    total: int,
    margin: float,
) -> VerdictSettling:
    def verdict(levels: Places) -> _Verdicts:
        return _verdicts(of, blocks, margin, axis, np.sort(levels))

    states, same_other, single = [], [], []
    for size, rows in drawn.items():
        parts = [verdict(row[:size]) for row in (rows[:1] if size == total else rows)]
        states.append([np.mean([part.overall == state for part in parts]) for state in STATES])
        others = [verdict(row[size : 2 * size]) for row in rows] if 2 * size <= total else []
        pairs = [part.overall == other.overall for part, other in zip(parts, others, strict=bool(others))]
        same_other.append(np.mean(pairs) if others else math.nan)
        agreeing = [np.mean(part.single == whole.single) for part in parts if axis == "queries"]
        single.append(np.mean(agreeing) if agreeing else math.nan)
    shares = np.array(states, dtype=np.float64)
    return VerdictSettling(
        first=of.first,
        last=of.last,
        whole=whole.overall,
        states=shares,
        same=shares[:, STATES.index(whole.overall)],
        same_other=np.array(same_other, dtype=np.float64),
        same_single=np.array(single, dtype=np.float64),
    )
