"""Of each study that is compared its numbers, and of every two how they differ: what tables, figures and JSON show."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from iclperm.base.help import fields_in_help
from iclperm.stats import Comparison, Curve, Interval
from iclperm.stats.intervals import bounded
from iclperm.stats.paired import StratifiedMcNemar

_NORMAL = 1.959964


@fields_in_help
class Studied(NamedTuple):
    """One of the studies, at its largest number of shots."""

    name: str
    shape: tuple[int, int, int]
    """Sets, permutations, and distinct queries that were used (0: accuracies only)."""
    shots: int | None
    accuracy: float
    order: float
    """Sensitivity as printed in arXiv 2511.09700."""
    selection: float
    ratio: Interval
    """r as printed with its jackknife interval, as in its own report; NaN bounds below three sets or permutations."""
    ratio_free: float
    """r free of item noise; NaN where that is not known."""
    mean: Interval
    """`accuracy` with its 95 % interval for other sets, permutations and queries; NaN bounds where not known."""
    order_effect: Interval
    """√(σ²_P + σ²_SP) free of item noise with its generalised 95 % interval; NaN where not known."""
    selection_effect: Interval
    """√(σ²_S + σ²_SP), likewise."""
    ratio_effect: Interval
    """`ratio_free` with its generalised interval."""
    over_shots: tuple[int, ...]
    """[K] the numbers of shots of `curve`; empty where not known."""
    curve: Curve
    """[K] mean accuracy, and its spread over permutations and over sets."""
    task: str = ""
    """Empty of answers from elsewhere, as is the model."""
    model: str = ""
    chance: float | None = None
    """Accuracy of guessing a label; None where any answer may be given, or that is not known."""

    @property
    def title(self) -> str:
        """Task and model, for the head of a panel; the name where these are not known."""
        return ", ".join(part for part in (self.task, self.model) if part) or self.name


@fields_in_help
@dataclass(frozen=True)
class Pair:
    """The comparison of two of the studies; p-values are adjusted over all pairs."""

    first: int
    second: int
    comparison: Comparison


def matched_interval(test: StratifiedMcNemar) -> Interval:
    """The 95 % interval of a difference over the same orderings, for other queries.

    As Agresti & Min (2005) have it for one ordering: two queries more, of which half each has the difference 1 and -1.
    So it has a width where no query, or few, are answered otherwise. NaN below two queries.
    """
    num, mean = test.num_queries, test.difference
    if num < 2:
        return Interval(mean, math.nan, math.nan, 0.95)
    square = (num - 1) * num * test.se**2 + num * mean**2
    centre = num * mean / (num + 2)
    half = _NORMAL * math.sqrt(square + 1 - (num * mean) ** 2 / (num + 2)) / (num + 2)
    return bounded(Interval(mean, centre - half, centre + half, 0.95), "difference")
