"""Kind `race`: the best prompt at every number of demonstrations on dev, by an adaptive race for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from iclperm.base.help import fields_in_help
from iclperm.errors import DataError
from iclperm.report.by_shots import ByShots
from iclperm.report.notebook import ShownFindings
from iclperm.report.parts import Plot, Table, interval_words, number, percent, plain, points_with_bounds, signed
from iclperm.runs.raced_shots import lanes_of, num_racing
from iclperm.stats.intervals import Interval
from iclperm.stats.sensitivity import FloatArray
from iclperm.stats.shortest import Shortest, accuracy_of, shortest
from iclperm.studies.taking import RecommendedCell
from iclperm.study import kinds
from iclperm.study.states import NOT_ASKED, OK

if TYPE_CHECKING:
    from iclperm.runs.run import FinishedRun


class Winner(NamedTuple):
    """The prompt that won the race at one number of shots."""

    shots: int
    set: int
    permutation: int
    num_prompts: int
    """Different ones that raced."""
    num_dev: int
    """Dev queries that it answered in the race."""
    dev: float
    """Its accuracy on them, which as that of the best of many is partly luck."""
    failure: float
    """Chance that another is better by more than the tolerance on all dev queries of the race."""


def winners(run: FinishedRun) -> list[Winner]:
    """The winner at every number of shots, of a finished race."""
    told, dev = run.decisions[-1]["known"]["shots"], run.splits["dev"]
    num_dev = num_racing(len(dev.gold))
    found = []
    for place, (shots, lane) in enumerate(zip(run.shots, lanes_of(dev.context_of), strict=True)):
        index_set, permutation = told[place]["leader"]
        right = _right(run, (index_set, permutation, place))[:num_dev]
        asked = dev.context_state[dev.context_of[index_set, permutation, place]][:num_dev] != NOT_ASKED
        found.append(
            Winner(
                shots,
                index_set,
                permutation,
                len(lane.contexts),
                int(asked.sum()),
                float(np.nanmean(right)) if np.isfinite(right).any() else math.nan,
                float(told[place]["failure"] or 0.0),
            )
        )
    return found


def afterwards(run: FinishedRun, found: Sequence[Winner]) -> FloatArray:
    """[K, N] answers of the winners to the dev queries that had no say in the race; NaN where there is none."""
    begin = num_racing(len(run.splits["dev"].gold))
    return np.stack([_right(run, (one.set, one.permutation, place))[begin:] for place, one in enumerate(found)])


def _right(run: FinishedRun, cell: tuple[int, int, int]) -> FloatArray:
    dev = run.splits["dev"]
    return np.where(dev.state[cell] == OK, dev.correct[cell], np.nan).astype(np.float64)


@fields_in_help
@dataclass(frozen=True, repr=False)
class RaceFindings(ShownFindings):
    """How the races ended, and which winner is taken."""

    winners: tuple[Winner, ...]
    """By number of shots, ascending."""
    choice: Shortest
    """Of them, by the dev queries that had no say in the races."""
    accuracy: tuple[Interval, ...]
    """[K] of the winners on these, with 95 % intervals."""
    num_after: int
    """How many these are."""
    tolerance: float
    """How far below the best a winner may be, of 1."""
    num_asked: int
    """Answers that were asked."""
    num_cells: int
    """Answers of asking every prompt every dev query."""
    is_within_budget: bool = False
    """Whether a budget could end the races before their rule did."""
    title: str = ""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Where a race was ended by its budget."""
        from_budget = [one for one in self.winners if self.is_within_budget and one.failure > 0.05]
        return tuple(
            f"at k = {one.shots} the race ended early: the chance that another prompt is better by more than "
            f"{100 * self.tolerance:g} points is {percent(one.failure)}"
            for one in from_budget
        )

    @property
    def recommended(self) -> RecommendedCell | None:
        """None: what the winners are worth takes test queries (`recommend`)."""
        return None

    def conclusion(self) -> list[str]:
        """Which number of shots, and what was asked."""
        one = self.winners[self.choice.place]
        return [
            f"The race takes k = {one.shots}, set {one.set}, permutation {one.permutation}: {percent(one.dev)} on the "
            f"{one.num_dev:,} dev queries that chose it.",
            *self.reasons(),
            f"It asked {self.num_asked:,} of {self.num_cells:,} answers.",
        ]

    def reasons(self) -> list[str]:
        """Why this number of shots, in sentences."""
        best, told = self.winners[self.choice.reference], self._against()
        if not self.choice.reference:
            return [f"k = {best.shots} is the shortest, and no longer one did better in the race."]
        if self.choice.place == self.choice.reference:
            return [
                f"k = {best.shots} is the best of the race, and every shorter one is shown to be worse on "
                f"{self.num_after:,} other dev queries: it has {'; '.join(told)}."
            ]
        return [
            f"The best of the race, k = {best.shots}, is not shown to be better on {self.num_after:,} other dev "
            f"queries: it has {told[self.choice.place]}; so the shorter one is taken."
        ]

    def _against(self) -> list[str]:
        """What the reference has more than each shorter one."""
        return [
            f"{points_with_bounds(one.difference)} against k = {self.winners[one.shorter].shots}"
            for one in self.choice.against
        ]

    def tables(self, full: bool) -> list[Table]:
        """The winners; in full each against the best of them."""
        return [self.winners_table(), *([self.against_table()] if full and self.choice.against else [])]

    def winners_table(self) -> Table:
        """A row for each number of shots."""
        rows = [
            (
                str(one.shots),
                f"{one.set}, {one.permutation}",
                f"{one.num_prompts:,}",
                f"{one.num_dev:,}",
                number(one.dev),
                percent(one.failure),
                number(after.estimate),
            )
            for one, after in zip(self.winners, self.accuracy, strict=True)
        ]
        return Table(
            "The winner at every number of demonstrations",
            ("k", "set, order", "of prompts", "dev queries", "accuracy", "may be wrong", "afterwards"),
            rows,
            texts=(1,),
            caption="Accuracy on the dev queries that chose it is flattered by the choice; afterwards: on "
            f"{self.num_after:,} others. May be wrong: chance that another prompt is better by more than "
            f"{100 * self.tolerance:g} points on all dev queries of the race.",
        )

    def against_table(self) -> Table:
        """The best of the race against every shorter winner."""
        best = self.winners[self.choice.reference].shots
        return Table(
            f"Is k = {best}, the best of the race, better than a shorter one?",
            ("k", f"k = {best} less it", "95 %"),
            [
                (
                    str(self.winners[one.shorter].shots),
                    signed(one.difference.estimate),
                    interval_words(one.difference, sign="+"),
                )
                for one in self.choice.against
            ],
            caption=f"On {self.num_after:,} dev queries that had no say in the races (Tango's intervals). From the "
            "shortest up, the first whose interval does not lie above 0 is taken.",
        )

    def plots(self) -> dict[str, Plot]:
        """Accuracy over the number of demonstrations, on the dev queries that had no say in the races."""
        figure = ByShots(
            [one.shots for one in self.winners],
            self.accuracy,
            self.choice.place,
            "other dev queries",
            f"The winner at every k{f': {self.title}' if self.title else ''}",
            [(place, one.dev) for place, one in enumerate(self.winners)],
            "on the dev queries that chose it",
        )
        return {"race": figure.plot(f"Accuracy on {self.num_after:,} other dev queries, with 95 % intervals")}

    def to_dict(self) -> dict[str, Any]:
        """Every number that is shown, JSON-safe."""
        content: dict[str, Any] = plain(self)
        del content["title"]  # which the report names
        return content | {"conclusion": self.conclusion()}


def choice_of(run: FinishedRun, found: Sequence[Winner]) -> Shortest:
    """Which of the winners is taken: the shortest that the best of the race is not shown to beat afterwards."""
    best = int(np.argmax([-1.0 if math.isnan(one.dev) else one.dev for one in found]))
    return shortest(afterwards(run, found), best)


def findings(run: FinishedRun) -> RaceFindings:
    """The findings of a finished race; raises `DataError` for a run that is none."""
    if run.study.kind != kinds.RACE.name:
        raise DataError(
            f"a report of the kind {kinds.RACE.name!r} is of a race, and this run is a {run.study.kind}, which asked "
            f"every prompt; run the study with kind: {kinds.RACE.name} into another folder"
        )
    found = winners(run)
    after = afterwards(run, found)
    states = run.splits["dev"].context_state
    return RaceFindings(
        winners=tuple(found),
        choice=choice_of(run, found),
        accuracy=tuple(accuracy_of(row) for row in after),
        num_after=after.shape[1],
        tolerance=run.study.tolerance,
        num_asked=int((states != NOT_ASKED).sum()),
        num_cells=int(states.size),
        is_within_budget=run.study.budget != "adaptive",
        title=run.title,
    )
