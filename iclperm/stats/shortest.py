"""The shortest prompt that a longer one is not shown to beat, and what it is worth on queries that had no say in it."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.errors import RequestError
from iclperm.stats.grades import graded_mean, paired_grades
from iclperm.stats.intervals import Interval, bounded, jackknife_interval, wilson_interval
from iclperm.stats.paired import paired_interval
from iclperm.stats.sensitivity import FloatArray


class Longer(NamedTuple):
    """The reference against a shorter prompt."""

    shorter: int
    """Its place."""
    difference: Interval
    """Accuracy of the reference less that of the shorter one, paired by query."""

    @property
    def is_better(self) -> bool:
        """Whether the reference is shown to be better."""
        return self.difference.low > 0


class Shortest(NamedTuple):
    """Which of several prompts of growing length to take."""

    place: int
    """Of the shortest that the reference is not shown to beat."""
    reference: int
    against: tuple[Longer, ...]
    """The reference against every shorter one, ascending."""


def shortest(correct: npt.ArrayLike, reference: int) -> Shortest:
    """The shortest of K prompts that a longer one, the ``reference``, is not shown to beat.

    Args:
        correct: [K, N] 0 or 1, or grades, of prompts in the order of their lengths, to queries that had no say in which
            K these are; NaN is an answer that there is none of.
        reference: the place of the one that other queries have as the best; none that is longer is taken.

    From the shortest up each is compared with the reference, and the first that this is not shown to beat is taken:
    where the 95 % interval of the difference (Tango's; grades: `paired_grades`) does not lie above 0. Hypotheses in a
    fixed order need no correction (Maurer, Hothorn & Lehmacher 1995): the chance that a shorter one is passed over
    though it is as good is 2.5 %. Raises `RequestError` on shapes that do not fit. O(K·N).
    """
    items = np.asarray(correct, dtype=np.float64)
    if items.ndim != 2 or not 0 <= reference < len(items):
        raise RequestError(
            f"correct needs the shape [K, N] and a reference below K, got {list(items.shape)} and {reference}"
        )
    against = tuple(Longer(place, difference(items[reference], items[place])) for place in range(reference))
    return Shortest(next((one.shorter for one in against if not one.is_better), reference), reference, against)


def difference(first: npt.ArrayLike, second: npt.ArrayLike) -> Interval:
    """Accuracy of ``first`` [N] less that of ``second``, paired by query; NaN without a query that both answered."""
    one, two = (np.asarray(each, dtype=np.float64) for each in (first, second))
    both = ~np.isnan(one) & ~np.isnan(two)
    one, two = one[both], two[both]
    if not len(one):
        return Interval(math.nan, math.nan, math.nan, 0.95)
    if _is_binary(one) and _is_binary(two):
        return paired_interval(one, two)
    found = paired_grades(one, two)
    return Interval(found.difference, found.low, found.high, 0.95)


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
