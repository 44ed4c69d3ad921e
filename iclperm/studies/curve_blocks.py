"""Kind `curve` where every trajectory was asked queries of its own: the averaged curve, and nothing of single ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from iclperm.base.help import fields_in_help
from iclperm.errors import DataError, RequestError
from iclperm.report.figures import curve_plot
from iclperm.report.notebook import ShownFindings
from iclperm.report.parts import Plot, Table, interval_words, number, percent_with_bounds, plain, points
from iclperm.stats.block_curves import BlockCurve, bends, block_curve
from iclperm.stats.intervals import Interval, bounded
from iclperm.stats.plateau import Overall
from iclperm.stats.sensitivity import Curve
from iclperm.stats.verdicts import LEVEL, MARGIN
from iclperm.studies.bearing import Bearing, by_query, of_run
from iclperm.studies.classes import classes_by_design
from iclperm.studies.how_many import how_many
from iclperm.studies.tokens import dealt_words

if TYPE_CHECKING:
    from iclperm.runs.run import FinishedRun

_NO_TRAJECTORIES = (
    "every trajectory was asked queries of its own, too few for single ones: their plateaus and steps, and one "
    "demonstration against none, take cells: crossed"
)
_MOST_NAMED = 5


@fields_in_help
@dataclass(frozen=True, repr=False)
class BlockCurveFindings(ShownFindings):
    """What a curve study says whose trajectories answered queries of their own."""

    shots: tuple[int, ...]
    """[K] numbers of demonstrations, ascending."""
    margin: float
    """Differences up to this are none that matter; units of accuracy."""
    curve: Curve
    """Mean accuracy at each k, and its standard deviations over permutations and sets, free of item noise."""
    intervals: tuple[Interval, ...]
    """[K] 95 % intervals of the mean for other sets, permutations and queries; at k = 0 for other queries."""
    to_last: tuple[Overall, ...]
    """[K - 1] change of the average from every k to the largest."""
    bends: tuple[int, ...]
    """Fewest numbers of demonstrations between which straight lines stay within `margin` of the averages."""
    num_trajectories: int
    """S x P."""
    queries_each: int
    """How many each was asked."""
    chance: float | None
    """Accuracy of guessing a label; None where any answer may be given."""
    title: str
    """Task and model, for figures."""
    warnings: tuple[str, ...] = (_NO_TRAJECTORIES,)
    """What should be known before the numbers are believed."""
    bearing: Bearing = field(default_factory=Bearing)
    """What the answers can bear."""

    def conclusion(self) -> list[str]:
        """The result in plain sentences; where the answers do not bear one, why, and what would suffice."""
        k, mean = self.shots, self.curve.mean
        few = len(k) <= _MOST_NAMED
        where = range(len(k)) if few else sorted({0, len(k) // 2, int(np.argmax(mean)), len(k) - 1})
        places = ", ".join(f"{percent_with_bounds(self.intervals[place])} at k = {k[place]}" for place in where)
        sentences = [
            f"Mean accuracy is {places} (95 %, for new sets, permutations and queries; {self.num_trajectories:,} "
            f"trajectories of {self.queries_each:,} queries each)."
        ]
        if len(k) > 2:
            sentences.append(how_many(k, mean, self.to_last, LEVEL))
        if len(self.bends) < len(k):
            chosen = ",".join(map(str, self.bends))
            sentences.append(
                f"Straight lines between k = {chosen} stay within {points(self.margin)} of these averages: a larger "
                f"study needs no others (--shots {chosen})."
            )
        return self.bearing.told(sentences)

    def tables(self, full: bool) -> list[Table]:
        """The averaged curve; in full the changes to the largest k too."""
        rows = [
            (str(k), number(self.curve.mean[place]), interval_words(self.intervals[place]), *self._spreads(place))
            for place, k in enumerate(self.shots)
        ]
        found = [
            Table(
                "Accuracy against the number of demonstrations",
                ("k", "accuracy", "95 % interval", "std over orders", "std over sets"),
                rows,
                caption="Standard deviations are free of item noise; - where the variance is estimated at 0 or less.",
            )
        ]
        if full:
            changes = [
                (str(k), f"{100 * one.error.mean:+.1f}", interval_words(one.interval, sign="+"), one.state)
                for k, one in zip(self.shots[:-1], self.to_last, strict=True)
            ]
            header = ("k", "points", f"{1 - 2 * LEVEL:.0%} interval", f"within ±{self.margin:g}")
            found.append(Table(f"Change of the average from k to {self.shots[-1]}", header, changes))
        return found

    def plots(self) -> dict[str, Plot]:
        """The averaged curve."""
        low, high = (np.array([getattr(one, end) for one in self.intervals]) for end in ("low", "high"))
        bounds = (low, high) if np.isfinite(low).all() else None
        return {"curve": curve_plot(self.curve, self.shots, title=self.title, chance=self.chance, bounds=bounds)}

    def to_dict(self) -> dict[str, Any]:
        """Every number that is shown, JSON-safe."""
        names = ("shots", "margin", "curve", "intervals", "to_last", "bends", "num_trajectories", "queries_each")
        content: dict[str, Any] = {name: plain(getattr(self, name)) for name in names}
        return content | {"conclusion": self.conclusion(), "bearing": self.bearing.to_dict()}

    def _spreads(self, place: int) -> list[str]:
        spreads = (self.curve.std_permutations[place], self.curve.std_sets[place])
        return [number(spread) if spread > 0 else "-" for spread in spreads]


def findings_of_blocks(run: FinishedRun) -> BlockCurveFindings:
    """The averaged curve of a run whose trajectories answered queries of their own; raises DataError for one k only,
    and where a trajectory lacks answers to a class."""
    if len(run.shots) < 2:
        raise DataError("a curve needs at least two numbers of shots, this run has one; run it with 'shots: all'")
    correct, state = run.correct, run.state
    try:
        found: BlockCurve = block_curve(
            correct, state, shots=run.shots, weights=run.weights, classes=classes_by_design(run)
        )
    except RequestError as error:
        raise DataError(f"blocks of queries cannot be compared: {error}") from error
    right = [by_query(correct[:, :, place], state[:, :, place]) for place in range(len(run.shots))]
    return BlockCurveFindings(
        shots=run.shots,
        margin=MARGIN,
        curve=found.curve,
        intervals=tuple(bounded(one, "accuracy") for one in found.intervals),
        to_last=found.to_last,
        bends=bends(run.shots, found.curve.mean),
        num_trajectories=correct.shape[0] * correct.shape[1],
        queries_each=run.study.queries_per_ordering or 0,
        chance=run.chance,
        title=run.title,
        bearing=of_run(run, right),
        warnings=(_NO_TRAJECTORIES, dealt_words(run.decisions, run.report)),
    )
