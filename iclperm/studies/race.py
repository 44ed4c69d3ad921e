"""Kind `race`: the best prompt at every number of demonstrations on dev, by an adaptive race for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from iclperm.base.help import fields_in_help
from iclperm.report.notebook import ShownFindings
from iclperm.report.parts import Plot, Table, interval_words, number, p_value, percent, plain, signed
from iclperm.runs.raced_shots import lanes_of, num_racing
from iclperm.stats.sensitivity import FloatArray
from iclperm.stats.shortest import Longer, Shortest, shortest
from iclperm.studies.taking import RecommendedCell
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
    accuracy: tuple[float, ...]
    """[K] of the winners on these."""
    num_after: int
    """How many these are."""
    tolerance: float
    """How far below the best a winner may be, of 1."""
    num_asked: int
    """Answers that were asked."""
    num_cells: int
    """Answers of asking every prompt every dev query."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Where a race was ended by its budget."""
        from_budget = [one for one in self.winners if one.failure > 0.05]
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
        one, longer = self.winners[self.choice.place], self.choice.longer
        last = "" if not longer else f", and no longer prompt is shown to beat it on {self.num_after:,} others"
        return [
            f"The race takes k = {one.shots}, set {one.set}, permutation {one.permutation}: {percent(one.dev)} on the "
            f"{one.num_dev:,} dev queries that chose it{last}.",
            f"It asked {self.num_asked:,} of {self.num_cells:,} answers.",
        ]

    def tables(self, full: bool) -> list[Table]:
        """The winners; in full every two of them compared."""
        return [self.winners_table(), *([self.pairs_table()] if full and self.choice.pairs else [])]

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
                number(after),
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

    def pairs_table(self) -> Table:
        """Every longer winner against every shorter one."""
        shots = [one.shots for one in self.winners]
        return Table(
            "Is a longer prompt better?",
            ("k", "against", "difference", "95 %", "p (Holm)"),
            [pair_row(pair, shots) for pair in self.choice.pairs],
            caption=f"On {self.num_after:,} dev queries that had no say in the races (McNemar's exact test).",
        )

    def plots(self) -> dict[str, Plot]:
        """None."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Every number that is shown, JSON-safe."""
        return {**plain(self), "conclusion": self.conclusion()}


def pair_row(pair: Longer, shots: Sequence[int]) -> tuple[str, ...]:
    """A row of a table of comparisons."""
    return (
        str(shots[pair.longer]),
        str(shots[pair.shorter]),
        signed(pair.difference.estimate),
        interval_words(pair.difference, sign="+"),
        p_value(pair.p_value),
    )


def findings(run: FinishedRun) -> RaceFindings:
    """The findings of a finished race."""
    found = winners(run)
    after = afterwards(run, found)
    states = run.splits["dev"].context_state
    return RaceFindings(
        winners=tuple(found),
        choice=shortest(after),
        accuracy=tuple(float(np.nanmean(row)) if np.isfinite(row).any() else math.nan for row in after),
        num_after=after.shape[1],
        tolerance=run.study.tolerance,
        num_asked=int((states != NOT_ASKED).sum()),
        num_cells=int(states.size),
    )
