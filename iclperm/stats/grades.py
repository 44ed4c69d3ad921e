"""Comparisons of contexts whose answers to the same queries have grades in 0..1, such as F1 or partial credit."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from iclperm.errors import RequestError
from iclperm.stats.intervals import Interval, unseen_half, upper_tail
from iclperm.stats.paired import holm
from iclperm.stats.sensitivity import FloatArray, graded_items, std_along, usable_queries

_LEVEL = 0.95


class PairedGrades(NamedTuple):
    """Two contexts whose answers to the same queries have grades in 0..1, each distinct query once."""

    difference: float
    """Mean grade of the first less that of the second; NaN without a query."""
    se: float
    """Standard error over queries, with the pseudo-queries of `paired_grades`; NaN for one query."""
    p_value: float
    """Two-sided, Student's t with n - 1 degrees of freedom."""
    low: float
    high: float
    """95 % interval, within -1..1; it holds 0 where `p_value` is above .05."""
    num_queries: int


class PairwiseGrades(NamedTuple):
    """`paired_grades` of every pair of contexts, each [pairs]."""

    first: npt.NDArray[np.int64]
    second: npt.NDArray[np.int64]
    difference: FloatArray
    se: FloatArray
    p_value: FloatArray
    adjusted: FloatArray
    """`p_value` adjusted for the number of pairs (Holm)."""
    low: FloatArray
    high: FloatArray


def paired_grades(first: npt.ArrayLike, second: npt.ArrayLike, state: npt.ArrayLike | None = None) -> PairedGrades:
    """Two contexts whose answers [Q] are grades in 0..1, such as F1: difference of their means, interval and test.

    Student's t of the differences d by query, to which two pseudo-queries are added, half a one each at +m and -m and
    one at 0, m the largest |d| (1 where none differs), as Agresti & Min (2005) do for 0 and 1. Without them a few equal
    differences would make an interval of no width. State [2, Q] as for `mcnemar`. Raises RequestError on shapes that do
    not fit and grades outside 0..1. Cost: O(Q).
    """
    one, two = graded_items(first), graded_items(second)
    if one.shape != two.shape or one.ndim != 1:
        raise RequestError(f"first and second need one shape [Q], got {list(one.shape)} and {list(two.shape)}")
    usable = usable_queries((2, *one.shape), state)
    found = _graded_tests(_known(one[usable]) - _known(two[usable])[None])
    difference, se, p_value, low, high = (float(part[0]) for part in found)
    return PairedGrades(difference, se, p_value, low, high, int(np.count_nonzero(usable)))


def pairwise_grades(scores: npt.ArrayLike, state: npt.ArrayLike | None = None) -> PairwiseGrades:
    """`paired_grades` of every two contexts of scores [C, Q] in 0..1, p-values adjusted by Holm for all pairs.

    State [C, Q], 0 = ok; only queries ok in every context count. Raises RequestError unless C >= 2. Cost: O(C²·Q).
    """
    items = graded_items(scores)
    if items.ndim != 2 or len(items) < 2:
        raise RequestError(f"pairs need scores of shape [C, Q] with C >= 2, got {list(items.shape)}")
    kept = _known(items[:, usable_queries(items.shape, state)])
    first, second = np.array(list(combinations(range(len(kept)), 2)), dtype=np.int64).T
    parts = [_graded_tests(kept[one] - kept[one + 1 :]) for one in range(len(kept) - 1)]  # never all pairs at once
    difference, se, p_value, low, high = (np.concatenate(part) for part in zip(*parts, strict=True))
    return PairwiseGrades(first, second, difference, se, p_value, holm(p_value), low, high)


def graded_mean(scores: npt.ArrayLike, level: float = _LEVEL) -> Interval:
    """Mean of the grades [Q] in 0..1 of one context, with Student's interval over queries, within 0..1.

    Where all grades are equal it is as wide as Wilson's of a share that was never seen (`unseen_half`). NaN bounds for
    one query. Raises RequestError on another shape and grades outside 0..1.
    """
    values = _known(graded_items(scores))
    if values.ndim != 1:
        raise RequestError(f"the mean of grades needs scores of shape [Q], got {list(values.shape)}")
    num, mean = len(values), float(values.mean())
    if num < 2:
        return Interval(mean, math.nan, math.nan, level)
    se = float(std_along(values, 0)) / math.sqrt(num)
    half = float(special.stdtrit(num - 1, upper_tail(level))) * se or unseen_half(num, level)
    return Interval(mean, max(mean - half, 0.0), min(mean + half, 1.0), level)


def _known(grades: npt.NDArray[Any]) -> FloatArray:
    """Grades as float64; raises RequestError for a NaN."""
    if np.isnan(grades).any():
        raise RequestError("a grade is NaN and its state is ok; mark it in state")
    return grades.astype(np.float64)


def _graded_tests(differences: FloatArray) -> tuple[FloatArray, ...]:
    """Mean, standard error, p-value and bounds [pairs] of differences [pairs, Q] (`paired_grades`)."""
    num_pairs, num = differences.shape
    if num == 0:
        return (np.full(num_pairs, math.nan),) * 5
    largest = np.abs(differences).max(axis=1)
    largest[largest == 0] = 1.0
    centre = differences.sum(axis=1) / (num + 2)
    squares = (differences**2).sum(axis=1) + largest**2
    se = np.sqrt(np.maximum(squares / (num + 2) - centre**2, 0.0) / (num + 2))
    if num < 2:
        se = np.full(num_pairs, math.nan)
    half = special.stdtrit(max(num - 1, 1), upper_tail(_LEVEL)) * se
    p_value = 2 * special.stdtr(max(num - 1, 1), -np.abs(centre) / se)
    return differences.mean(axis=1), se, p_value, np.maximum(centre - half, -1.0), np.minimum(centre + half, 1.0)
