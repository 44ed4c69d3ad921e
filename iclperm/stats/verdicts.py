"""What single trajectories do between two numbers of demonstrations: paired differences and their tests.

That a difference is not significant does not show that there is none. Flat is called only what two one-sided tests
show to lie within a stated margin (Schuirmann 1987); what neither test settles stays undecided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from iclperm.errors import RequestError
from iclperm.stats.paired import holm, score_of_difference
from iclperm.stats.sensitivity import FloatArray, finite_items, query_weights

State = Literal["undecided", "equivalent", "different"]
STATES: tuple[State, ...] = ("undecided", "equivalent", "different")
"""By code: `Plateau.state` holds 0, 1 or 2."""

MARGIN = 0.02
"""Default margin of equivalence in accuracy: what another order of the same demonstrations does on average (one
standard deviation, the order sensitivity .0197 of arXiv 2511.09700). A gain that is smaller is lost in the order."""

LEVEL = 0.05
RULE_VERSION = 1
"""Of `looks_until` and `sequential_verdicts`: a run that asks by them goes on under the version that began it."""
FIRST_LOOK = 256
"""Queries after which trajectories are first looked at, where they are asked until each is decided: those of arXiv
2503.22002, so that the averaged curve is no worse known."""
CLAIMS = (4, 8)
"""The numbers of demonstrations from which arXiv 2503.22002 looks for a plateau."""
GROWTH = 1.5
"""From one look to the next; smaller steps stop sooner and leave the last one less of the error."""


class PairedDifference(NamedTuple):
    """Accuracy in a second context minus that in a first one on the same queries; arrays [...] without the query axis.

    A plain standard error is 0 where no answer changed, however few queries there were. So half a query is added to
    each cell of the 2 x 2 table, as in Agresti & Min (2005); `centre` and `se` make their interval and the test of no
    difference. The test of equivalence needs the changes themselves (`paired_tests`).
    """

    difference: FloatArray
    """As observed."""
    centre: FloatArray
    se: FloatArray
    """Standard error over queries, the contexts being taken as given; NaN for one query."""
    gained: FloatArray
    """Queries that only the second answers rightly, of `num`: where queries weigh or answers have grades, as many as
    have the difference and the mean square that were observed, or the difference alone where that is more."""
    lost: FloatArray
    """Likewise those that only the first does."""
    num: FloatArray
    """Effective number of queries, (Σw)²/Σw² (Kish 1965)."""


def paired_difference(
    first: npt.ArrayLike, second: npt.ArrayLike, weights: npt.ArrayLike | None = None
) -> PairedDifference:
    """Accuracy of second minus first, both [..., Q] of 0 and 1, or in between, on the same usable queries.

    `weights` [Q] says how often each query counts; a query of any weight is one draw. Raises RequestError on shapes
    that do not fit. Cost: O(size). Agresti & Min (2005), Statistics in Medicine 24.
    """
    before, after = finite_items(first), finite_items(second)
    if before.shape != after.shape:
        raise RequestError(f"both contexts need the same queries, got {list(before.shape)} and {list(after.shape)}")
    weight = query_weights(weights, before.shape[-1])
    once, twice, square = (np.empty(before.shape[:-1]) for _ in range(3))
    for cell in np.ndindex(before.shape[:-2]):  # a block at a time: no copy of a large tensor
        signed = _signed(before[cell], after[cell])
        once[cell], twice[cell] = signed @ weight, signed @ weight**2
        square[cell] = signed**2 @ weight**2
    return paired_sums(once, twice, square, weight)


def paired_from_sums(
    once: FloatArray,
    twice: FloatArray,
    square: FloatArray,
    total: FloatArray | float,
    squares: FloatArray | float,
    num_queries: npt.NDArray[np.int64] | int,
) -> PairedDifference:
    """`paired_difference` from Σ w·d, Σ w²·d and Σ w²·d² [...] over queries, Σ w and Σ w² of them, and their number;
    the last three of all alike, or [...].

    With two pseudo-queries: half at +1, half at -1, one at 0.
    """
    pseudo = squares / total  # the weight of a typical draw
    enlarged = total + 2 * pseudo
    centre = once / enlarged
    variance = square + pseudo**2 - 2 * centre * twice + centre**2 * (squares + 2 * pseudo**2)
    se = np.where(np.asarray(num_queries) < 2, np.nan, np.sqrt(np.maximum(variance, 0.0)) / enlarged)
    difference, num = once / total, np.asarray(total**2 / squares)
    changed = np.clip(square / squares, np.abs(difference), 1.0)
    gained, lost = (num * (changed + sign * difference) / 2 for sign in (1, -1))
    return PairedDifference(difference, centre, se, gained, lost, np.broadcast_to(num, difference.shape))


def paired_tests(paired: PairedDifference, margin: float) -> tuple[FloatArray, FloatArray]:
    """p-values of the two one-sided tests of equivalence (the larger), and of no difference.

    Equivalence by Tango's score, whose error is that of the likeliest table that *has* a difference of the margin: by
    the error observed, queries that hardly ever change would be shown to be flat far too soon (at 256 queries, a margin
    of .02 and nothing lost, 11 times in 100 at 5 %, and 6 in 1,000 at any level). Tango (1998), Statistics in Medicine
    17. No difference by the larger of Agresti & Min's error and that of the likeliest table without one (McNemar's):
    the former is too small where few queries move nearly all, or where grades that seldom rise did not do so here.
    """
    below, above = (
        score_of_difference(paired.gained, paired.lost, paired.num, np.asarray(delta)) for delta in (margin, -margin)
    )
    equivalent = np.maximum(special.ndtr(below), special.ndtr(-above))
    none = score_of_difference(paired.gained, paired.lost, paired.num, np.asarray(0.0))
    distance = np.minimum(np.abs(paired.centre) / paired.se, np.abs(none))
    return np.asarray(equivalent), np.asarray(2 * special.ndtr(-distance))


class Verdicts(NamedTuple):
    """What trajectories do between two numbers of demonstrations, each asked until that was shown; arrays [S, P]."""

    num_queries: npt.NDArray[np.int64]
    """Queries that its verdict rests on, or that leave it undecided."""
    difference: FloatArray
    """Accuracy at the larger number minus that at the smaller, on these; NaN without an answer."""
    se: FloatArray
    """Its standard error over queries."""
    p_equivalent: FloatArray
    """Of equivalence, Holm-adjusted over the trajectories; valid although each stops by it."""
    p_different: FloatArray
    """Of no difference, likewise."""
    state: npt.NDArray[np.uint8]
    """See `STATES`."""


def claims_of(shots: Sequence[int], wanted: Sequence[int] = ()) -> tuple[int, ...]:
    """The numbers of demonstrations from which plateaus are looked for: those ``wanted``, else `CLAIMS` as far as they
    are below the largest of ``shots``, else the middle one."""
    usual = tuple(k for k in CLAIMS if k in shots[:-1])
    return tuple(wanted) or usual or (shots[(len(shots) - 1) // 2],)


def looks_until(most: int, first: int = FIRST_LOOK) -> tuple[int, ...]:
    """After how many queries trajectories are looked at, up to ``most`` of them: ``first``, then about `GROWTH` times
    as many each time, evenly. Raises RequestError unless both are above 0."""
    if min(first, most) < 1:
        raise RequestError(f"looks need a first and a last number of queries above 0, got {first} and {most}")
    if most <= first:
        return (most,)
    number = max(round(math.log(most / first) / math.log(GROWTH)), 1)
    return tuple(round(first * (most / first) ** (step / number)) for step in range(number + 1))


def sequential_verdicts(
    first: npt.ArrayLike,
    last: npt.ArrayLike,
    looks: Sequence[int],
    *,
    num_looks: int | None = None,
    margin: float = MARGIN,
    level: float = LEVEL,
) -> Verdicts:
    """Both tests of every trajectory, which is asked no more once one of them has decided.

    Args:
        first: [S, P, Q] answers at the smaller number of demonstrations, queries in the order in which they are asked;
            NaN where there is none, which is left out.
        last: [S, P, Q] those at the larger number.
        looks: [J] after how many queries it is looked, ascending (`looks_until`); known beforehand.
        num_looks: how many of them there have been, and answers up to there; all unless given.
        margin: differences of accuracy up to this are none that matter.
        level: chance of one wrong verdict or more over all S·P trajectories and looks, for each of both tests, where
            answers are 0 or 1; of grades in between about (twice that, where they seldom rise by much and often fall by
            little).

    A look after n_j queries may spend n_j/Σn of the level: the p-value of a trajectory is the least of Σn/n_j times
    those of its looks (Bonferroni over looks), so it only falls, and Holm's adjustment over the trajectories keeps
    every verdict that it once gave. What comes after a trajectory's verdict is not looked at. Raises RequestError on
    shapes that do not fit and on looks that are no ascending numbers up to Q. Cost: O(J·S·P·Q).
    """
    before, after = (np.asarray(values, dtype=np.float64) for values in (first, last))
    if before.ndim != 3 or before.shape != after.shape:
        raise RequestError(f"verdicts need answers [S, P, Q] twice, got {list(before.shape)} and {list(after.shape)}")
    been = looks[:num_looks]
    if list(looks) != sorted(set(looks)) or not been or not 0 < been[0] <= been[-1] <= before.shape[2]:
        raise RequestError(f"looks must ascend from 1 to {before.shape[2]} at most, got {list(been)}")
    change = after - before
    there = ~np.isnan(change)
    change, shape = np.where(there, change, 0.0), before.shape[:2]
    p_values = np.ones((2, *shape))
    state, number = np.zeros(shape, np.uint8), np.zeros(shape, np.int64)
    difference, se = np.full(shape, np.nan), np.full(shape, np.nan)
    for size in been:
        is_open = state == 0
        kept = there[is_open, :size]
        counts = kept.sum(axis=1)
        num = np.maximum(counts, 1)
        signed = change[is_open, :size].sum(axis=1)
        paired = paired_from_sums(signed, signed, (change[is_open, :size] ** 2).sum(axis=1), num, num, counts)
        spent = size / sum(looks)
        for kind, found in enumerate(paired_tests(paired, margin)):
            known = np.where(np.isnan(paired.se), 1.0, found) / spent
            p_values[kind][is_open] = np.minimum(p_values[kind][is_open], known)
        number[is_open], se[is_open] = counts, paired.se
        difference[is_open] = np.where(counts > 0, paired.difference, np.nan)
        state = states_of(holm(p_values[0]), holm(p_values[1]), level)
    return Verdicts(number, difference, se, holm(p_values[0]), holm(p_values[1]), state)


def states_of(equivalent: FloatArray, different: FloatArray, level: float = LEVEL) -> npt.NDArray[np.uint8]:
    """`STATES` by their codes, from both p-values; what is shown to lie within the margin is equivalent."""
    found = np.where(equivalent <= level, 1, np.where(different <= level, 2, 0))
    return found.astype(np.uint8)


def shares_of(state: npt.NDArray[np.uint8]) -> FloatArray:
    """[3] how many are in each of `STATES`, as shares."""
    return np.asarray(np.bincount(state.ravel(), minlength=len(STATES)) / state.size)


def normal(probability: float) -> float:
    """The quantile of a standard Gaussian."""
    return float(special.ndtri(probability))


def _signed(before: npt.NDArray[Any], after: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """after - before; of 0 and 1 in a byte each."""
    kind = np.int8 if before.dtype == after.dtype == np.uint8 else np.float64
    return np.asarray(after.astype(kind) - before.astype(kind))


def paired_sums(once: FloatArray, twice: FloatArray, square: FloatArray, weight: FloatArray) -> PairedDifference:
    """`paired_from_sums` of queries with weights [Q]."""
    total, squares = float(weight.sum()), float(np.sum(weight**2))
    return paired_from_sums(once, twice, square, total, squares, int(np.count_nonzero(weight)))
