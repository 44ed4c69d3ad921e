"""What an adaptive search says: what it chose, how sure that is, what it asked, and what asking everything would have
taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from iclperm.base.help import fields_in_help
from iclperm.errors import DataError
from iclperm.report import charts, figures
from iclperm.report.notebook import ShownFindings
from iclperm.report.parts import Plot, Table, interval_words, number, percent, plain, points_with_bounds
from iclperm.stats.intervals import side_of
from iclperm.stats.racing import RaceRule, TestedChoice, gain_on_test
from iclperm.studies.bearing import Bearing, by_query, of_run
from iclperm.studies.taking import RecommendedCell
from iclperm.studies.tokens import beside_everything
from iclperm.study import kinds
from iclperm.study.states import NOT_ASKED, OK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from iclperm.runs.run import FinishedRun

_BY = {"dev_accuracy": "accuracy", "local_entropy": "local entropy", "dev_log_likelihood": "log-likelihood"}


class RacedSet(NamedTuple):
    """How the race between the orderings of one set ended."""

    permutation: int
    """The chosen one."""
    num_dev: int
    """Distinct dev queries that it answered."""
    dev: float
    """Its mean accuracy on them."""
    failure: float
    """Chance that it is more than the tolerance below the best of its set on all dev queries, as the rule has it."""
    average: float
    """Accuracy on test of a random ordering of the set."""
    chosen: float
    """Accuracy on test of the chosen one."""


class AskedWave(NamedTuple):
    """What one wave asked."""

    orderings: int
    """Orderings that were still in a race."""
    queries: int
    """Dev queries that each of them had answered after it, at most."""
    dev: int
    """Answers on dev that the wave asked."""
    test: int
    """Answers on test."""


@fields_in_help
@dataclass(frozen=True, repr=False)
class AdaptiveFindings(ShownFindings):
    """What an adaptive search says, at its number of shots."""

    criterion: str
    """What it chooses an ordering by."""
    rule: str
    """calibrated or certified."""
    budget: str
    """As the study has it."""
    tolerance: float
    """How far below the best of its set a chosen ordering may be."""
    error: float
    """Share of the races in which it may be further below."""
    shots: int
    """The number of demonstrations."""
    num_permutations: int
    """P."""
    num_dev_queries: int
    """Distinct ones that there are."""
    sets: tuple[RacedSet, ...]
    """How each set's race ended."""
    result: TestedChoice
    """What choosing gains on test."""
    best_set: int
    """The set whose chosen ordering is the best on dev; it is recommended."""
    best_failure: float
    """Chance that another set's chosen one is better by more than the tolerance."""
    waves: tuple[AskedWave, ...]
    """What was asked, wave by wave."""
    num_asked: int
    """Answers that were asked, on dev and test."""
    num_cells: int
    """Answers of a search that asks everything."""
    tokens_forwarded: int
    """Of all sessions."""
    tokens_exhaustive: int
    """Distinct tokens of a search that asks everything."""
    missing: float
    """Share of the answers asked that there are none of."""
    is_generated: bool = False
    """Whether answers were generated; tokens forwarded are then also theirs."""
    bearing: Bearing = field(default_factory=Bearing)
    """What the answers can bear."""
    title: str = ""
    """Task, model and k, for the head of the figure."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What should be known before the numbers are believed."""
        found = []
        if self.missing:
            found.append(
                f"{percent(self.missing)} of the answers asked are missing; in a race the others' mean stands for one"
            )
        if len(self.sets) == 1:
            found.append("there is one set only: nothing bounds what other sets would give")
        return tuple(found)

    @property
    def recommended(self) -> RecommendedCell:
        """The best of the chosen orderings."""
        best = self.sets[self.best_set]
        note = (
            f"chosen of {len(self.sets) * self.num_permutations:,} orderings by {_BY[self.criterion]} on up to "
            f"{best.num_dev:,} of {self.num_dev_queries:,} dev queries ({self.rule} race)"
        )
        return RecommendedCell(None, self.best_set, best.permutation, is_held_out=True, notes=(note,))

    def conclusion(self) -> list[str]:
        """The result in plain sentences; where the answers bear none, why, and what would suffice, beside what is known
        of the race itself, whatever other sets and test queries would say."""
        if self.bearing.can_conclude:
            return self.bearing.told([self._gain(), *self._promise(), self._best(), self._cost()])
        is_of_others = all(reason.about == "sets" for reason in self.bearing.reasons)
        best = [self._best()] if is_of_others else []
        return [*self.bearing.told([]), *self._promise(), *best, self._cost()]

    def tables(self, full: bool) -> list[Table]:
        """What was chosen and gained, and what was asked."""
        brief = [self._main_table(), self._sets_table()]
        return [*brief, self._waves_table()] if full else brief

    def plots(self) -> dict[str, Plot]:
        """The orderings that were still in a race over the dev queries that they had answered."""
        caption = "Orderings still in the race, over the dev queries that each had answered"
        return {"race": Plot((5.6, 3.6), self._draw, self._charts, caption=caption)}

    def to_dict(self) -> dict[str, Any]:
        """Every number that is shown, JSON-safe."""
        content: dict[str, Any] = plain(self)
        content["conclusion"], content["bearing"] = self.conclusion(), self.bearing.to_dict()
        del content["title"]  # which the report names
        return content

    @property
    def _is_kept(self) -> list[bool]:
        """Whether each race was ended by its rule, or is as sure although the budget ended it."""
        return [self.budget == "adaptive" or one.failure <= self.error for one in self.sets]

    def _gain(self) -> str:
        r = self.result
        sentence = (
            f"At k = {self.shots}, the ordering that a race by {_BY[self.criterion]} on dev chooses out of "
            f"{self.num_permutations} has {percent(r.chosen.estimate)} accuracy on test, a random one "
            f"{percent(r.average.estimate)}: {points_with_bounds(r.gain)}"
        )
        if np.isnan(r.gain.low):
            return f"{sentence}, without an interval."
        return f"{sentence}." if side_of(r.gain, 0) else f"{sentence}, which cannot be told from 0."

    def _promise(self) -> list[str]:
        kept, within = sum(self._is_kept), self._within()
        how = "bounds whose error is proved" if self.rule == "certified" else "a rule whose errors were measured"
        told = []
        if kept:
            every = "Each chosen ordering" if len(self.sets) > 1 else "The chosen ordering"
            which = every if kept == len(self.sets) else f"In {kept} of {len(self.sets)} sets it"
            told.append(
                f"{which} is within {within} of the best of its set on all {self.num_dev_queries:,} dev queries, but "
                f"for {100 * self.error:g} % of such races ({how})."
            )
        if kept < len(self.sets):
            worst = max(one.failure for one in self.sets)
            where = f"In {len(self.sets) - kept} of {len(self.sets)} sets the" if len(self.sets) > 1 else "The"
            told.append(
                f"{where} budget {self.budget!r} ended the race before "
                f"its rule did: the chance that another ordering is better by more than {within} is up to "
                f"{percent(worst)}."
            )
        return told

    def _best(self) -> str:
        best = self.sets[self.best_set]
        open_ = (
            ""
            if self.best_failure <= self.error
            else (f"; another set's may be better by more than {self._within()} (chance {percent(self.best_failure)})")
        )
        return (
            f"Recommended is set {self.best_set}, permutation {best.permutation}, with {percent(best.chosen)} on test"
            f"{open_}: iclperm prompt prints it."
        )

    def _cost(self) -> str:
        beside = beside_everything(
            self.tokens_forwarded,
            self.tokens_exhaustive,
            "a search that asks everything",
            is_generated=self.is_generated,
        )
        return f"It asked {self.num_asked:,} of {self.num_cells:,} answers and {beside}."

    def _within(self) -> str:
        if self.criterion != "dev_accuracy":
            return f"{self.tolerance:g} nats"
        points = 100 * self.tolerance
        return f"{points:g} point{'' if points == 1 else 's'}"

    def _main_table(self) -> Table:
        r = self.result
        rows = {"Average": r.average, "chosen": r.chosen, "gain = chosen - Average": r.gain}
        return Table(
            f"Adaptive search over {self.num_permutations} permutations by {self.criterion}",
            ("test accuracy", "value", "95 % interval"),
            [(name, number(value.estimate), interval_words(value)) for name, value in rows.items()],
            caption=f"Means over sets, on {r.num_queries:,} test queries. Average: each query answered by a few "
            "orderings drawn at random. Intervals: jackknife over sets (of one set: orderings) and test "
            "queries, choices held.",
        )

    def _sets_table(self) -> Table:
        rows = [
            (
                str(index),
                str(one.permutation),
                f"{one.num_dev:,}",
                number(one.dev),
                percent(one.failure),
                number(one.average),
                number(one.chosen),
            )
            for index, one in enumerate(self.sets)
        ]
        return Table(
            "By set",
            ("set", "chosen", "dev queries", "dev accuracy", "may be wrong", "Average", "chosen on test"),
            rows,
            caption=f"May be wrong: chance that another ordering is better by more than {self._within()} on all dev "
            f"queries, by the {self.rule} rule.",
        )

    def _waves_table(self) -> Table:
        rows = [
            (str(place), f"{wave.orderings:,}", f"{wave.queries:,}", f"{wave.dev:,}", f"{wave.test:,}")
            for place, wave in enumerate(self.waves, start=1)
        ]
        return Table(
            "What each wave asked", ("wave", "orderings", "dev queries each", "answers on dev", "answers on test"), rows
        )

    @property
    def _course(self) -> list[tuple[int, int]]:
        """Dev queries answered, and orderings in the race that had answered as many."""
        return [(wave.queries, wave.orderings) for wave in self.waves if wave.queries]

    def _draw(self, figure: Figure) -> None:
        width, height = figure.get_size_inches()
        axes = figures.placed(figure, 0.75, 0.6, width - 0.95, height - 1.45)
        queries, left = zip(*self._course, strict=True)
        axes.step(queries, left, where="post", color=figures.BLUE, marker="o", markersize=4, linewidth=1.3)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(queries, [f"{size:,}" for size in queries])
        axes.set_yticks(left, [f"{size:,}" for size in left])
        axes.minorticks_off()
        axes.set_xlabel("dev queries that each had answered")
        axes.set_ylabel("orderings asked")
        figures.plain_frame(axes)
        share = self.num_asked / self.num_cells
        figures.head(
            figure,
            f"A race for the best ordering{f': {self.title}' if self.title else ''}",
            f"{self.rule} rule, {percent(share)} of the answers of a search that asks everything",
        )

    def _charts(self) -> list[charts.Specification]:
        rows = [{"x": size, "at": size, "y": left, "name": "orderings asked"} for size, left in self._course]
        colours = {"orderings asked": figures.BLUE}
        return [charts.line_chart(rows, x="dev queries answered", y="orderings", colours=colours, is_log=True)]


def findings(run: FinishedRun) -> AdaptiveFindings:
    """The findings of a run that asked in waves."""
    decisions, study = run.decisions, run.study
    known = decisions[-1]["known"]
    test, dev = run.splits["test"], run.splits["dev"]
    chosen = np.array([one["leader"] for one in known["sets"]])
    sets, cells = np.arange(len(chosen)), test.context_of[:, :, -1]
    correct, state = test.correct[:, :, -1], test.state[:, :, -1]
    result = gain_on_test(correct, state, chosen, test.weights)
    asked_dev = dev.context_state[dev.context_of[:, :, -1][sets, chosen]] != NOT_ASKED
    best = int(known["final"]["leader"])
    dev_means = _dev_means(run, chosen)
    found = AdaptiveFindings(
        criterion=study.criterion,
        rule=study.rule,
        budget=study.budget,
        tolerance=study.tolerance,
        error=RaceRule().error,
        shots=run.shots[-1],
        num_permutations=cells.shape[1],
        num_dev_queries=len(dev.gold),
        sets=tuple(
            RacedSet(
                int(chosen[index]),
                int(asked_dev[index].sum()),
                float(dev_means[index]),
                float(known["sets"][index]["failure"]),
                float(result.by_set[0, index]),
                float(result.by_set[1, index]),
            )
            for index in sets
        ),
        result=result,
        best_set=best,
        best_failure=float(known["final"]["failure"]),
        waves=_waves(decisions),
        num_asked=sum(int((items.context_state != NOT_ASKED).sum()) for items in (test, dev)),
        num_cells=sum(items.context_state.size for items in (test, dev)),
        tokens_forwarded=run.report.tokens_forwarded,
        tokens_exhaustive=run.report.tokens_unique,
        missing=_missing(run),
        is_generated=test.generated is not None,
        title=f"{run.title}, k = {run.shots[-1]}",
    )
    right = by_query(correct[sets, chosen], state[sets, chosen])
    bears = of_run(run, right, permutations=1)
    return AdaptiveFindings(**{**vars(found), "bearing": bears})


def refuse_other_kinds(run: FinishedRun, kind: str) -> None:
    """Raises `DataError` for a report that the answers of an adaptive search, of orderings with queries of their own,
    or of queries with demonstrations of their own, are not enough for."""
    if run.study.is_per_query and (ours := kinds.OURS.get(kind)) and not (ours.is_report or "neighbours" in ours.keys):
        raise DataError(
            f"each query has demonstrations of its own, and a report of the kind {kind!r} compares sets that all "
            "share; ask for sensitivity or curve"
        )
    if run.study.cells != "crossed":
        if (known := kinds.find(kind)) is not None and "cells" in known.keys:
            return
        raise DataError(
            f"each ordering was asked queries of its own, and a report of the kind {kind!r} compares answers to the "
            "same; run the study with cells: crossed into another folder"
        )
    if run.decisions and kind != run.study.kind:
        what, remedy = ("search asked only what its choice needed", "with budget: exhaustive")
        if run.study.precision is not None:
            what, remedy = ("run asked trajectories only what their verdicts needed", "without precision")
        raise DataError(
            f"this {what}, and a report of the kind {kind!r} needs every answer; run the study {remedy} into another "
            "folder"
        )


def _dev_means(run: FinishedRun, chosen: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[S] mean accuracy on dev of the chosen orderings, over what they answered."""
    dev, sets = run.splits["dev"], np.arange(len(chosen))
    correct, state = dev.correct[:, :, -1][sets, chosen], dev.state[:, :, -1][sets, chosen]
    weight = np.where(state == OK, dev.weights, 0)
    return np.asarray((correct * weight).sum(axis=1) / np.maximum(weight.sum(axis=1), 1))


def _missing(run: FinishedRun) -> float:
    states = np.concatenate([items.context_state.ravel() for items in run.splits.values()])
    asked = states[states != NOT_ASKED]
    return float((asked != OK).mean()) if len(asked) else 0.0


def _waves(decisions: Sequence[Any]) -> tuple[AskedWave, ...]:
    """What each wave asked, from the decisions."""
    answered: dict[tuple[int, int], int] = {}
    waves = []
    for decision in decisions:
        counts, reached, racing = {"dev": 0, "test": 0}, 0, set()
        for ask in decision["asks"]:
            size = sum(end - begin for begin, end in ask["queries"])
            orderings = [(s, p) for s, *permutations in ask["orderings"] for p in permutations]
            counts[ask["split"]] += size * len(orderings)
            if ask["split"] == "dev":
                for ordering in orderings:
                    answered[ordering] = answered.get(ordering, 0) + size
                    reached = max(reached, answered[ordering])
                racing |= set(orderings)
        if decision["asks"]:
            waves.append(AskedWave(len(racing), reached, counts["dev"], counts["test"]))
    return tuple(waves)
