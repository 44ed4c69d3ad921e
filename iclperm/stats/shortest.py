"""The shortest prompt that no longer one is shown to beat, and what it is worth on queries that had no say in it."""

from __future__ import annotations

import math
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.errors import RequestError
from iclperm.stats.grades import graded_mean, paired_grades
from iclperm.stats.intervals import Interval, bounded, jackknife_interval, wilson_interval
from iclperm.stats.paired import holm, mcnemar, paired_interval
from iclperm.stats.sensitivity import FloatArray

ERROR = 0.05
"""Chance, at most, that some longer prompt is called better though it is not."""


class Longer(NamedTuple):
    """A longer prompt against a shorter one, by their places."""

    shorter: int
    longer: int
    difference: Interval
    """Accuracy of the longer less that of the shorter, paired by query."""
    p_value: float
    """Of no difference, Holm over all pairs; NaN where no query was answered by both."""

    @property
    def is_better(self) -> bool:
        """Whether the longer one is shown to be better."""
        return self.p_value <= ERROR and self.difference.estimate > 0


class Shortest(NamedTuple):
    """Which of several prompts of growing length to take."""

    place: int
    """Of the shortest that no longer one is shown to beat."""
    pairs: tuple[Longer, ...]
    """Every two."""

    @property
    def longer(self) -> list[Longer]:
        """The chosen one against all that are longer."""
        return [pair for pair in self.pairs if pair.shorter == self.place]

    @property
    def shorter(self) -> list[Longer]:
        """All that are shorter against the chosen one."""
        return [pair for pair in self.pairs if pair.longer == self.place]


def shortest(correct: npt.ArrayLike) -> Shortest:
    """The shortest of K prompts that no longer one is shown to beat.

    Args:
        correct: [K, N] 0 or 1, or grades, of prompts in the order of their lengths, to queries that had no say in which
            K these are; NaN is an answer that there is none of.

    Every two are compared by McNemar's exact test (grades: `paired_grades`), with Holm's correction: the chance that
    some longer one is called better though it is not is at most `ERROR`. Intervals are Tango's. Raises `RequestError`
    on another shape. O(K²·N).
    """
    items = np.asarray(correct, dtype=np.float64)
    if items.ndim != 2 or not len(items):
        raise RequestError(f"correct needs the shape [K, N] with K >= 1, got {list(items.shape)}")
    found = [(one, two, *difference(items[two], items[one])) for one, two in combinations(range(len(items)), 2)]
    adjusted = holm([p_value for *_, p_value in found])
    pairs = tuple(
        Longer(one, two, interval, float(p_value))
        for (one, two, interval, _), p_value in zip(found, adjusted, strict=True)
    )
    beaten = {pair.shorter for pair in pairs if pair.is_better}
    return Shortest(next(place for place in range(len(items)) if place not in beaten), pairs)


def difference(first: npt.ArrayLike, second: npt.ArrayLike) -> tuple[Interval, float]:
    """Accuracy of ``first`` [N] less that of ``second``, paired by query, and its p-value; NaN without a query that
    both answered."""
    one, two = (np.asarray(each, dtype=np.float64) for each in (first, second))
    both = ~np.isnan(one) & ~np.isnan(two)
    one, two = one[both], two[both]
    if not len(one):
        return Interval(math.nan, math.nan, math.nan, 0.95), math.nan
    if _is_binary(one) and _is_binary(two):
        return paired_interval(one, two), mcnemar(one, two).p_exact
    found = paired_grades(one, two)
    return Interval(found.difference, found.low, found.high, 0.95), found.p_value


def accuracy_of(correct: npt.ArrayLike) -> Interval:
    """Mean of the answers [N] that are there, 0 or 1 (Wilson's interval) or grades (Student's); NaN without any."""
    values = np.asarray(correct, dtype=np.float64)
    values = values[~np.isnan(values)]
    if not len(values):
        return Interval(math.nan, math.nan, math.nan, 0.95)
    return wilson_interval(int(values.sum()), len(values)) if _is_binary(values) else graded_mean(values)


class AgainstRandom(NamedTuple):
    """What a prompt has beside random ones of its length; shares of 1."""

    random: Interval
    """Accuracy of a random prompt: for other prompts and queries."""
    chosen: float
    """That of the chosen one on the same queries."""
    gain: Interval
    """The second less the first, paired by query."""
    num_queries: int
    """That all of them answered."""


def against_random(chosen: npt.ArrayLike, drawn: npt.ArrayLike) -> AgainstRandom:
    """A prompt's answers [N] beside those of R prompts drawn at random, [R, N]; NaN is an answer that there is none of.

    Only queries that all answered count. Intervals leave out one random prompt and one query at a time
    (`jackknife_interval`), with the chosen one held. Raises `RequestError` on shapes that do not fit. O(R·N).
    """
    one, others = np.asarray(chosen, dtype=np.float64), np.asarray(drawn, dtype=np.float64)
    if others.ndim != 2 or one.shape != others.shape[1:]:
        raise RequestError(f"chosen [N] and drawn [R, N] do not fit: {list(one.shape)} and {list(others.shape)}")
    known = ~np.isnan(one) & ~np.isnan(others).any(axis=0)
    one, others = one[known], others[:, known]
    if not len(one):
        nothing = Interval(math.nan, math.nan, math.nan, 0.95)
        return AgainstRandom(nothing, math.nan, nothing, 0)
    random, gain = bounded(_jackknifed(others), "accuracy"), bounded(_jackknifed(one - others), "difference")
    return AgainstRandom(random, float(one.mean()), gain, len(one))


def _jackknifed(values: FloatArray) -> Interval:
    """The mean of values [R, N] with an interval for other rows and columns."""
    total = values.mean(axis=1).sum(), values.mean(axis=0).sum()
    num_rows, num_columns = values.shape
    left_out = [
        (whole - each) / max(count - 1, 1)
        for whole, each, count in (
            (total[0], values.mean(axis=1), num_rows),
            (total[1], values.mean(axis=0), num_columns),
        )
    ]
    return jackknife_interval(float(values.mean()), *left_out)


def _is_binary(values: FloatArray) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())
