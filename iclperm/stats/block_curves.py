"""The averaged curve over the number of demonstrations where every trajectory answered a block of queries of its own.

Along a trajectory the block stays, so that a change between two numbers of demonstrations is one of the same queries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.errors import RequestError
from iclperm.stats.blocks import OwnBlockComponents, own_block_components
from iclperm.stats.components import Effects
from iclperm.stats.convergence import MeanError, degrees_for_tests, mean_error
from iclperm.stats.intervals import Interval
from iclperm.stats.plateau import Overall, overall_of
from iclperm.stats.sensitivity import Curve, FloatArray, graded_items, query_weights
from iclperm.stats.verdicts import LEVEL, MARGIN

_UNKNOWN = Effects(*[math.nan] * 7)


class BlockCurve(NamedTuple):
    """The averaged curve of trajectories with blocks of their own."""

    curve: Curve
    """Mean accuracy [K], and its standard deviations over permutations and over sets, free of item noise."""
    accuracy: FloatArray
    """[S, P, K] of each trajectory over its block; all orderings alike at k = 0."""
    intervals: tuple[Interval, ...]
    """[K] of the mean accuracy, for other sets, permutations and queries; at k = 0 for other queries."""
    to_last: tuple[Overall, ...]
    """[K - 1] change of the average from every k to the largest, one test at a time; over the blocks of both."""


def block_curve(
    scores: npt.ArrayLike,
    state: npt.ArrayLike,
    *,
    shots: Sequence[int],
    weights: npt.ArrayLike | None = None,
    classes: npt.ArrayLike | None = None,
    level: float = 0.95,
    margin: float = MARGIN,
) -> BlockCurve:
    """The averaged curve from blocks (`own_block_components` at every k, and of the changes).

    Args:
        scores: [S, P, K, Q] 0 or 1, or partial credit in 0..1.
        state: [S, P, K, Q] integers, 0 = answered. At k = 0 whatever any ordering was asked counts for all of them,
            which are one context there; elsewhere an ordering has the block of its largest k, whoever else was asked
            in the same context, so that no two count one answer as two.
        shots: [K] numbers of demonstrations, ascending.
        weights: [Q] how often each query counts.
        classes: [Q] the class of each query where blocks are drawn class by class.
        level: of the intervals.
        margin: the difference of accuracy that the tests take for none.

    Raises RequestError on shapes that do not fit, and what `own_block_components` does. Cost: O(S·P·K·Q).
    arXiv 2503.22002, Figure 1.
    """
    items, states = graded_items(scores), np.asarray(state)
    if items.ndim != 4 or states.shape != items.shape or items.shape[2] != len(shots):
        raise RequestError(
            f"a curve of blocks needs scores and state of one shape [S, P, {len(shots)}, Q], got {list(items.shape)} "
            f"and {list(states.shape)}"
        )
    weight = query_weights(weights, items.shape[3])
    block = states[:, :, -1] == 0
    present = (states == 0) & block[:, :, None]
    found: list[OwnBlockComponents | MeanError] = []
    for place, k in enumerate(shots):
        if k == 0:
            told = (states[0, 0, place] == 0) & (weight > 0)
            found.append(mean_error(items[:1, :1, place][..., told], weight[told]))
        else:
            found.append(
                own_block_components(
                    items[:, :, place], ~present[:, :, place], weights=weights, classes=classes, level=level
                )
            )
    to_last = []
    for place in range(len(shots) - 1):
        both = present[:, :, place] & present[:, :, -1]
        change = (items[:, :, -1].astype(np.float64) - items[:, :, place] + 1) / 2  # a score, from 0 to 1
        to_last.append(_change(own_block_components(change, ~both, weights=weights, classes=classes), margin))
    accuracy = np.stack(
        [one.accuracy if isinstance(one, OwnBlockComponents) else np.full(items.shape[:2], one.mean) for one in found],
        axis=2,
    )
    spreads = [(one.order2, one.selection2) if isinstance(one, OwnBlockComponents) else (0.0, 0.0) for one in found]
    order, selection = np.sqrt(np.maximum(np.array(spreads).T, 0.0))
    used = (states == 0).any(axis=(0, 1, 2)) & (weight > 0)
    return BlockCurve(
        Curve(accuracy.mean(axis=(0, 1)), order, selection, 0.0, int(np.count_nonzero(used))),
        accuracy,
        tuple(one.mean if isinstance(one, OwnBlockComponents) else one.interval(level) for one in found),
        tuple(to_last),
    )


def bends(shots: Sequence[int], mean: npt.ArrayLike, tolerance: float = MARGIN) -> tuple[int, ...]:
    """The fewest of the numbers of demonstrations between which straight lines stay within `tolerance` of a curve.

    Args:
        shots: [K] numbers of demonstrations, ascending.
        mean: [K] the curve, such as the averaged one of a small study of every k.
        tolerance: in units of the curve; of equally few the ones with the least squared error.

    First and last are among them. Noise bends a curve as well, so a small study names more than are needed, and a true
    bend of less than its noise can stay hidden. Raises RequestError on shapes that do not fit. Cost: O(K³).
    """
    k, values = np.asarray(shots, np.float64), np.asarray(mean, np.float64)
    if k.ndim != 1 or values.shape != k.shape or not len(k) or (np.diff(k) <= 0).any():
        raise RequestError(f"bends need ascending shots [K] and a curve [K], got {list(k.shape)}, {list(values.shape)}")
    best: list[tuple[int, float, tuple[int, ...]]] = [(1, 0.0, (0,))]
    for end in range(1, len(k)):
        reached = []
        for begin, (count, error, chosen) in enumerate(best):
            line = np.interp(k[begin : end + 1], k[[begin, end]], values[[begin, end]])
            off = np.abs(line - values[begin : end + 1])
            if off.max() <= tolerance:
                reached.append((count + 1, error + float(off @ off), (*chosen, end)))
        best.append(min(reached))
    return tuple(int(shots[place]) for place in best[-1][2])


def _change(found: OwnBlockComponents, margin: float) -> Overall:
    """The tests of a change from components of (change + 1)/2."""
    error = MeanError(
        mean=2 * found.mean.estimate - 1,
        se=2 * found.se,
        degrees=found.mean_degrees,
        se_held=math.nan,
        degrees_held=math.nan,
        covers=("sets", "permutations", "queries"),
        sigma2=_UNKNOWN,
        parts=_UNKNOWN,
    )
    return overall_of(error._replace(degrees=degrees_for_tests(error, len(found.accuracy))), margin, LEVEL)
