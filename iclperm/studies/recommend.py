"""What a recommendation says: which prompt to take, what it is worth on untouched test queries, and what others are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from iclperm.base.help import fields_in_help
from iclperm.report.by_shots import ByShots
from iclperm.report.notebook import ShownFindings
from iclperm.report.parts import (
    Plot,
    Table,
    interval_words,
    listed,
    number,
    percent,
    percent_with_bounds,
    plain,
    points_with_bounds,
    signed,
)
from iclperm.stats.intervals import Interval, side_of, wilson_interval
from iclperm.stats.sensitivity import FloatArray
from iclperm.stats.shortest import AgainstRandom, accuracy_of, against_random, difference
from iclperm.studies import race
from iclperm.studies.bearing import Bearing, of_run
from iclperm.studies.race import RaceFindings, Winner
from iclperm.studies.recommending import RACE, RANDOM
from iclperm.studies.report import Run
from iclperm.studies.taking import RecommendedCell
from iclperm.studies.tokens import beside_everything
from iclperm.study.states import OK

_FEW = 10  # test queries of a label, of whose recall next to nothing is known


class TestedPrompt(NamedTuple):
    """The winner at one number of shots on the test queries."""

    shots: int
    accuracy: Interval
    """Over queries as they come."""
    difference: Interval
    """Less that of the recommended prompt, paired by query; 0 of that itself."""


class Recall(NamedTuple):
    """How the recommended prompt answers the test queries of one label."""

    label: str
    num_queries: int
    recall: Interval
    """NaN where no query has the label."""


@fields_in_help
@dataclass(frozen=True, repr=False)
class Recommendation(ShownFindings):
    """How many demonstrations, which, and in what order; and what that is worth."""

    place: int
    """Of the recommended prompt among those that were tested."""
    tested: tuple[TestedPrompt, ...]
    """The winner at every number of shots, ascending."""
    num_queries: int
    """Test queries, which had no say in any choice."""
    recalls: tuple[Recall, ...]
    """Label by label; none of a task without labels."""
    commonest: tuple[str, float] | None
    """The label that most test queries have, and the accuracy of naming it always."""
    random: AgainstRandom | None
    """Of as many demonstrations, drawn and ordered at random; None at k = 0."""
    num_random: int
    """Random prompts that were asked."""
    raced: RaceFindings
    """How the choice was made, on dev queries."""
    budget: str
    """As the study has it."""
    tokens_choosing: int
    """Forwarded by all sessions of the race."""
    tokens_testing: int
    """Forwarded by those of the runs on test."""
    tokens_exhaustive: int
    """Distinct tokens of asking every prompt every dev query."""
    is_generated: bool
    """Whether answers were generated; tokens forwarded are then also theirs."""
    recommended: RecommendedCell
    """The prompt."""
    bearing: Bearing = field(default_factory=Bearing)
    """What the answers can bear."""
    title: str = ""
    """Task and model, for the head of the figure."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What should be known before the numbers are believed."""
        scarce = [f"{one.label!r} ({one.num_queries})" for one in self.recalls if one.num_queries < _FEW]
        few = [f"few test queries of {listed(scarce)}: their recall is hardly known"] if scarce else []
        return (*self.raced.warnings, *few, *self._longer_on_test())

    def conclusion(self) -> list[str]:
        """The result in plain sentences; where the answers do not bear one, why, and what would suffice."""
        told = [*self._short(), self._take(), self._random(), *self._shorter(), *self.raced.reasons()]
        return self.bearing.told([*told, self._luck(), self._cost()])

    def tables(self, full: bool) -> list[Table]:
        """The prompts on test, and recall label by label; in full how the choice was made."""
        found = [self._prompts_table()]
        if self.recalls:
            found.append(self._recall_table())
        return [*found, *self.raced.tables(full=True)] if full else found

    def plots(self) -> dict[str, Plot]:
        """Accuracy on test over the number of demonstrations."""
        figure = ByShots(
            [one.shots for one in self.tested],
            [one.accuracy for one in self.tested],
            self.place,
            "test",
            f"What to take{f': {self.title}' if self.title else ''}",
            [] if self.random is None else [(self.place, self.random.random.estimate)],
            "random prompts of that length",
        )
        return {"recommendation": figure.plot("Accuracy on test of the best prompt of each length, and 95 % intervals")}

    def to_dict(self) -> dict[str, Any]:
        """Every number that is shown, JSON-safe."""
        content: dict[str, Any] = plain(self)
        del content["title"]  # which the report names
        return content | {
            "raced": self.raced.to_dict(),
            "conclusion": self.conclusion(),
            "bearing": self.bearing.to_dict(),
            "does_any_choice_matter": self.does_any_choice_matter,
        }

    @property
    def asides_of(self) -> tuple[str, ...]:
        """The runs of which more is told: that of the prompt to take."""
        return (self.recommended.run or "",)

    @property
    def does_any_choice_matter(self) -> bool:
        """Whether a longer prompt than the shortest is shown to be better, on test or on dev queries that had no say in
        the races, or this one than a random one."""
        return self.place > 0 or self._is_better_than_random or bool(self._longer_on_test())

    @property
    def _is_better_than_random(self) -> bool:
        return self.random is not None and side_of(self.random.gain, 0) > 0

    @property
    def _chosen(self) -> TestedPrompt:
        return self.tested[self.place]

    @property
    def _winner(self) -> Winner:
        return self.raced.winners[self.place]

    def _longer_on_test(self) -> list[str]:
        return [
            f"on test k = {one.shots} is better than the prompt to take ({points_with_bounds(one.difference)}), which "
            "the dev queries did not show: with more of them the choice may be another"
            for one in self.tested[self.place + 1 :]
            if one.difference.low > 0
        ]

    def _short(self) -> list[str]:
        if self.does_any_choice_matter:
            return []
        return [f"No choice is shown to matter: take the shortest, k = {self._chosen.shots}."]

    def _take(self) -> str:
        one = self._winner
        which = "no demonstrations" if not one.shots else f"set {one.set} in order {one.permutation}"
        told = (
            f"Take k = {one.shots}, {which}: {percent_with_bounds(self._chosen.accuracy)} accuracy on "
            f"{self.num_queries:,} test queries as they come, which had no say in the choice"
        )
        if self.commonest is None:
            return f"{told}."
        return f"{told}; always naming {self.commonest[0]!r} has {percent(self.commonest[1])}."

    def _random(self) -> str:
        k = self._chosen.shots
        if self.random is None:
            return "Without demonstrations there is no set and no order to choose."
        told = (
            f"On {self.random.num_queries:,} of them a random prompt of {k} has "
            f"{percent_with_bounds(self.random.random)} and this one {percent(self.random.chosen)}: choosing gains "
            f"{points_with_bounds(self.random.gain)}"
        )
        if self._is_better_than_random:
            return f"{told}."
        return f"{told}, so which demonstrations, and in what order, is not shown to matter at k = {k}."

    def _shorter(self) -> list[str]:
        told = [f"k = {one.shots} {points_with_bounds(one.difference)}" for one in self.tested[: self.place]]
        return [f"Shorter prompts, the best of each length, beside it on test: {'; '.join(told)}."] if told else []

    def _luck(self) -> str:
        one, after = self._winner, self.raced.accuracy[self.place].estimate
        if one.num_prompts == 1:
            return (
                f"Quote the accuracy on test: on dev it had {percent(one.dev)} on {one.num_dev:,} queries and "
                f"{percent(after)} on {self.raced.num_after:,} others."
            )
        return (
            f"Quote the accuracy on test: on dev it had {percent(one.dev)} on the {one.num_dev:,} queries that chose "
            f"it out of {one.num_prompts:,} prompts, which is partly luck, and {percent(after)} on "
            f"{self.raced.num_after:,} others."
        )

    def _cost(self) -> str:
        beside = beside_everything(
            self.tokens_choosing,
            self.tokens_exhaustive,
            "asking every prompt every dev query",
            is_generated=self.is_generated,
        )
        return (
            f"Choosing asked {self.raced.num_asked:,} of {self.raced.num_cells:,} answers on dev and {beside}; the "
            f"test took {self.tokens_testing:,} more."
        )

    def _prompts_table(self) -> Table:
        rows = [
            (
                f"{one.shots}{' (take)' if place == self.place else ''}",
                number(one.accuracy.estimate),
                interval_words(one.accuracy),
                *(
                    ("", "")
                    if place == self.place
                    else (signed(one.difference.estimate), interval_words(one.difference, sign="+"))
                ),
            )
            for place, one in enumerate(self.tested)
        ]
        if self.random is not None:
            gain = self.random.gain
            less = Interval(-gain.estimate, -gain.high, -gain.low, gain.level)
            rows.append(
                (
                    f"{self._chosen.shots}, random",
                    number(self.random.random.estimate),
                    interval_words(self.random.random),
                    signed(less.estimate),
                    interval_words(less, sign="+"),
                )
            )
        caption = f"On {self.num_queries:,} test queries as they come, each once; none had a say in any choice."
        if self.random is not None:
            caption += (
                f" Random: mean of {self.num_random} prompts on {self.random.num_queries:,} of them, on which the one "
                f"to take has {number(self.random.chosen)}, with intervals for other prompts and queries."
            )
        header = ("k", "accuracy", "95 %", "less the one to take", "95 %")
        return Table("The best prompt of each length on test", header, rows, caption=caption)

    def _recall_table(self) -> Table:
        rows = [
            (
                one.label,
                f"{one.num_queries:,}",
                number(one.recall.estimate),
                interval_words(one.recall),
            )
            for one in self.recalls
        ]
        return Table(
            f"Right by label, of the prompt to take (k = {self._chosen.shots})",
            ("label", "test queries", "recall", "95 %"),
            rows,
            caption="Wilson's intervals.",
        )


def findings(runs: Mapping[str, Run], choices: Mapping[str, Any]) -> Recommendation:
    """The recommendation of the finished runs of a study, and of what its race chose."""
    choice, raced = choices[RACE], race.findings(runs[RACE])
    names = [prompt["run"] for prompt in choice["prompts"]]
    place = choice["place"]
    answers = [_answers(runs[name])[0] for name in names]
    chosen, run = answers[place], runs[names[place]]
    drawn = _answers(runs[RANDOM]) if RANDOM in runs else None
    one = raced.winners[place]
    note = (
        f"chosen of {sum(winner.num_prompts for winner in raced.winners):,} prompts of "
        f"{listed([str(winner.shots) for winner in raced.winners])} demonstrations on dev queries: set {one.set}, "
        f"order {one.permutation} of the race"
    )
    gold = run.gold
    counts = np.bincount(gold, minlength=len(run.labels)) if run.shared_labels else None
    return Recommendation(
        place=place,
        tested=tuple(
            TestedPrompt(
                winner.shots,
                accuracy_of(right),
                Interval(0.0, 0.0, 0.0, 0.95) if right is chosen else difference(right, chosen),
            )
            for winner, right in zip(raced.winners, answers, strict=True)
        ),
        num_queries=int(np.isfinite(chosen).sum()),
        recalls=tuple(
            Recall(label, int((gold == number).sum()), _recall(chosen[gold == number]))
            for number, label in enumerate(run.shared_labels)
        ),
        commonest=None
        if counts is None
        else (run.labels[int(counts.argmax())], float(counts.max() / max(counts.sum(), 1))),
        random=None if drawn is None else against_random(chosen[: drawn.shape[1]], drawn),
        num_random=0 if drawn is None else len(drawn),
        raced=raced,
        budget=runs[RACE].study.budget,
        tokens_choosing=runs[RACE].report.tokens_forwarded,
        tokens_testing=sum(one.report.tokens_forwarded for name, one in runs.items() if name != RACE),
        tokens_exhaustive=runs[RACE].report.tokens_unique,
        is_generated=runs[RACE].splits["dev"].generated is not None,
        recommended=RecommendedCell(names[place], 0, 0, is_held_out=True, notes=(note,)),
        bearing=of_run(run, permutations=1),
        title=runs[RACE].title,
    )


def _answers(run: Run) -> FloatArray:
    """[S, N] answers of the only order of each set of a run to its test queries; NaN where there is none."""
    test = run.splits["test"]
    return np.where(test.state[:, 0, 0] == OK, test.correct[:, 0, 0], np.nan).astype(np.float64)


def _recall(right: FloatArray) -> Interval:
    known = right[np.isfinite(right)]
    if not len(known):
        return Interval(math.nan, math.nan, math.nan, 0.95)
    return wilson_interval(int(known.sum()), len(known))
