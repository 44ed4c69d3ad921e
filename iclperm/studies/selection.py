"""Kind `selection` (arXiv 2503.22002, section 5.2): does choosing demonstrations for robustness cost accuracy?

Two runs: a curve over sets of K demonstrations scores each of them on dev queries; n of each set are chosen by several
strategies, and a second curve runs them on the test queries, under all its orderings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from iclperm.base.help import fields_in_help
from iclperm.errors import DataError, RequestError, printable
from iclperm.report import charts, figures
from iclperm.report.notebook import ShownFindings
from iclperm.report.parts import (
    Plot,
    Table,
    interval_words,
    number,
    p_value,
    percent_with_bounds,
    plain,
    points,
    points_with_bounds,
    signed,
)
from iclperm.stats.choosing import STRATEGIES
from iclperm.stats.correlation import Correlation, rank_correlation
from iclperm.stats.demonstrations import Difference
from iclperm.stats.incomplete import filled
from iclperm.stats.reliability import Reliability, split_half
from iclperm.stats.search import TIE_DECIMALS
from iclperm.studies.bearing import Bearing, by_query, of_run
from iclperm.studies.choosing import CHOSEN, SOURCE, Chosen, choose
from iclperm.studies.classes import classes_by_design
from iclperm.studies.missing import filled_words
from iclperm.studies.outcomes import BASELINE, LEAST_PERMUTATIONS, Outcome, design_warnings, outcomes_of
from iclperm.studies.taking import RecommendedCell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from iclperm.runs.run import FinishedRun

_RELIABLE = 0.5
_BY_SCORE = "top"
_LOOKS = {
    "random": ("black", "o"),
    "top": ("#0072B2", "^"),
    "bottom": ("#D55E00", "v"),
    "shapley": ("#56B4E9", "D"),
    "stable": ("#009E73", "s"),
    "blend": ("#E69F00", "P"),
    "single": ("#CC79A7", "X"),
    "diverse": ("#5F5F5F", "*"),
}


_PARETO = "Accuracy of the chosen demonstrations against their spread over orderings; small: single sets of them"
_CURVES = "Mean accuracy over k of the chosen demonstrations, beside random ones"
_BESIDE = 5.0  # inches of width from which a legend stands beside the axes


@fields_in_help
@dataclass(frozen=True, repr=False)
class Selection(ShownFindings):
    """Findings of a selection study."""

    shots: tuple[int, ...]
    """[N] of the second run; the last is the number of demonstrations chosen."""
    num_sets: int
    """S of the second run."""
    num_permutations: int
    """P of the second run."""
    num_queries: int
    """Distinct test queries that were used."""
    dropped: float
    """Share of the queries (by weight) that some cell could not answer."""
    outcomes: Mapping[str, Outcome]
    """By strategy: accuracy on test of what it chose (0 to 1), its spread over orders, and the gain over random."""
    score: str = "marginal"
    """What single demonstrations were scored by."""
    reliability: Mapping[str, Reliability] = field(default_factory=dict)
    """Split-half reliability of each score, -1 to 1."""
    correlations: Mapping[tuple[str, str], Correlation] = field(default_factory=dict)
    """Spearman's correlation of every two scores within sets."""
    warnings: tuple[str, ...] = ()
    """What should be known before the numbers are believed."""
    bearing: Bearing = field(default_factory=Bearing)
    """What the answers can bear."""
    recommended: RecommendedCell | None = None
    """The demonstrations that the score chose, of the set that did best on the queries that choose."""
    title: str = ""
    """Task and model, for the head of figures."""
    chosen: tuple[tuple[str, int, str, str], ...] = ()
    """Strategy, set, label ("" where any answer may be given) and text of every demonstration that was chosen."""

    def conclusion(self) -> list[str]:
        """The result in plain sentences: random, then whether a steadier choice costs accuracy, then the scores.

        Where the answers do not bear one, why, and what would suffice.
        """
        told = [self._about_random(), *self._about_robustness()]
        told += [self._about(name) for name in ("top", "stable") if name in self.outcomes]
        if self.score in self.reliability:
            told.append(_about_reliability(self.score, self.reliability[self.score]))
        return self.bearing.told(told)

    def tables(self, full: bool) -> list[Table]:
        """Accuracy and spread by strategy and the reliability of the scores; `full` adds correlations and curves."""
        tables = [self._accuracy_table(), self._spread_table()]
        if self.reliability:
            tables.append(self._reliability_table())
        if full:
            tables += [self._correlation_table()] if self.correlations else []
            tables += [self._curve_table(), self._strategy_table()]
            tables += [self._chosen_table()] if self.chosen else []
        return tables

    def plots(self) -> dict[str, Plot]:
        """Accuracy against spread, and the curve of each strategy."""
        looks: Any = {"tall": _tall, "least": 2.9}
        return {
            "selection_pareto": Plot((6.2, 4.0), self._draw_pareto, self._pareto_charts, caption=_PARETO, **looks),
            "selection_curves": Plot((6.2, 3.6), self._draw_curves, self._curve_charts, caption=_CURVES, **looks),
        }

    def to_dict(self) -> dict[str, Any]:
        """Every number that is shown, JSON-safe."""
        correlations = [{"scores": list(pair), **plain(found)} for pair, found in self.correlations.items()]
        content: dict[str, Any] = {
            name: plain(getattr(self, name))
            for name in ("shots", "num_sets", "num_permutations", "num_queries", "dropped", "score", "reliability")
        }
        content["strategies"] = {
            name: {**plain(outcome), "is_steadier": outcome.is_steadier, "in_words": STRATEGIES.get(name, name)}
            for name, outcome in self.outcomes.items()
        }
        return content | {
            "correlations": correlations,
            "conclusion": self.conclusion(),
            "bearing": self.bearing.to_dict(),
            "selection_warnings": list(self.warnings),
            "recommended": plain(self.recommended),
            "chosen": [dict(zip(("strategy", "set", "label", "text"), each, strict=True)) for each in self.chosen],
        }

    @property
    def _num(self) -> int:
        return self.shots[-1]

    @property
    def _others(self) -> dict[str, Outcome]:
        return {name: outcome for name, outcome in self.outcomes.items() if name != BASELINE}

    def _about_random(self) -> str:
        base = self.outcomes[BASELINE]
        return (
            f"At k = {self._num}, demonstrations drawn at random reach {percent_with_bounds(base.accuracy)}; "
            f"another order moves that by ±{points(base.spread)} (one standard deviation), "
            f"±{100 * base.spread_free:.1f} without item noise."
        )

    def _about_robustness(self) -> list[str]:
        steadier = {name: outcome for name, outcome in self._others.items() if outcome.is_steadier}
        if self.num_sets < 2:
            return ["With one set nothing bounds a difference in spread: whether robustness costs accuracy stays open."]
        if self.num_permutations < LEAST_PERMUTATIONS:
            return [
                "With two permutations nothing bounds a difference in spread: whether robustness costs accuracy stays "
                "open."
            ]
        if not steadier:
            return [
                f"None of {len(self._others)} strategies is told to be steadier over orderings than random (Holm, "
                f"{self.num_sets} sets x {self.num_permutations} orderings): whether robustness costs accuracy stays "
                "open here."
            ]
        told = []
        for name, outcome in steadier.items():
            words = {
                -1: "and less accurate: here robustness costs accuracy",
                0: "and its accuracy cannot be told from random's: a cost is neither shown nor excluded beyond the "
                "interval",
                1: "and more accurate: here robustness does not cost accuracy",
            }[outcome.accuracy_side]
            told.append(
                f"{name!r} is steadier than random (spread {points_with_bounds(outcome.spread_difference)}) {words} "
                f"(accuracy {points_with_bounds(outcome.difference)})."
            )
        return told

    def _about(self, name: str) -> str:
        outcome = self.outcomes[name]
        return (
            f"{name!r} ({_in_words(name, self.score)}) against random: accuracy "
            f"{points_with_bounds(outcome.difference)}, spread {points_with_bounds(outcome.spread_difference)}."
        )

    def _accuracy_table(self) -> Table:
        rows = [
            [
                name,
                number(outcome.accuracy.estimate),
                number(outcome.accuracy.se),
                signed(outcome.difference.estimate),
                interval_words(outcome.difference, sign="+"),
                p_value(outcome.p_accuracy, least=0.0005),
                number(outcome.lowest),
                number(outcome.low_tail),
                *([] if math.isnan(outcome.num_labels) else [f"{outcome.num_labels:.1f}"]),
            ]
            for name, outcome in self.outcomes.items()
        ]
        header = ["chosen", "accuracy", "se", "minus random", "95 %", "p (Holm)", "worst", "5 % order", "labels"]
        return Table(
            title=f"Accuracy at k = {self._num} by how the demonstrations were chosen",
            header=header[: len(rows[0])],
            rows=rows,
            caption=f"Mean over {self.num_sets} sets, {self.num_permutations} orderings and {self.num_queries:,} test "
            "queries; errors for other sets, orderings and queries. Worst and 5 % ordering of a set, mean over sets.",
        )

    def _spread_table(self) -> Table:
        rows = [
            [
                name,
                number(outcome.spread),
                number(outcome.spread_free),
                signed(outcome.spread_difference.estimate),
                interval_words(outcome.spread_difference, sign="+"),
                p_value(outcome.p_spread, least=0.0005),
            ]
            for name, outcome in self.outcomes.items()
        ]
        return Table(
            title=f"Spread over orderings at k = {self._num}",
            header=["chosen", "spread", "noise out", "minus random", "95 %", "p (Holm)"],
            rows=rows,
            caption="Standard deviation of accuracy over orderings, mean over sets; 'noise out' is free of item noise. "
            f"Intervals for other sets and orderings (jackknife over {self.num_sets} and {self.num_permutations}), the "
            "queries held fixed.",
        )

    def _reliability_table(self) -> Table:
        return Table(
            title="Split-half reliability of the scores",
            header=["score", "permutations", "queries", "both"],
            rows=[[name, *(number(value, 2) for value in found)] for name, found in self.reliability.items()],
            caption="How well a score of a second run would agree with this one, 1 at best: over other permutations, "
            "other queries, or both.",
        )

    def _correlation_table(self) -> Table:
        names = list(self.reliability) or sorted({name for pair in self.correlations for name in pair})
        rows = [[first, *(number(self._correlation(first, second), 2) for second in names)] for first in names]
        return Table(
            title="Spearman's correlation between scores, within sets",
            header=["score", *names],
            rows=rows,
            caption="All scores come from the same answers and share their noise.",
        )

    def _correlation(self, first: str, second: str) -> float:
        if first == second:
            return 1.0
        found = self.correlations.get((first, second)) or self.correlations.get((second, first))
        return math.nan if found is None else found.estimate

    def _curve_table(self) -> Table:
        return Table(
            title="Accuracy over k by how the demonstrations were chosen",
            header=["chosen", *(f"k = {k}" for k in self.shots)],
            rows=[[name, *map(number, outcome.curve)] for name, outcome in self.outcomes.items()],
        )

    def _strategy_table(self) -> Table:
        return Table(
            title="How the demonstrations were chosen",
            header=["chosen", "by"],
            rows=[[name, _in_words(name, self.score)] for name in self.outcomes],
            texts=(1,),
        )

    def _chosen_table(self) -> Table:
        at = self.recommended
        where = "" if at is None else f" iclperm prompt prints those of set {at.set % self.num_sets} by {_BY_SCORE!r}."
        return Table(
            title=f"The demonstrations chosen by {_BY_SCORE!r}",
            header=["set", "label", "text"],
            rows=[
                [str(place), printable(label).replace("\n", "\\n"), printable(text).replace("\n", "\\n")]
                for name, place, label, text in self.chosen
                if name == _BY_SCORE
            ],
            texts=(1, 2),
            data_texts=(2,),
            caption=f"In default order; report.json has those of every strategy.{where}",
        )

    def _draw_pareto(self, figure: Figure) -> None:
        axes = _beside_a_legend(figure)
        base = self.outcomes[BASELINE]
        axes.axvline(100 * base.spread, color=figures.GREY, linewidth=0.8, linestyle=(0, (4, 2)))
        axes.axhline(100 * base.accuracy.estimate, color=figures.GREY, linewidth=0.8, linestyle=(0, (4, 2)))
        for name, outcome in self.outcomes.items():
            colour, marker = _LOOKS.get(name, (figures.GREY, "o"))
            sets: Any = {"color": colour, "alpha": 0.4, "linewidths": 0, "zorder": 1}
            axes.scatter(100 * outcome.spread_by_set, 100 * outcome.accuracy_by_set, 8, **sets)
            axes.errorbar(
                100 * outcome.spread,
                100 * outcome.accuracy.estimate,
                xerr=_half(outcome.spread_difference),
                yerr=_half(outcome.difference),
                color=colour,
                marker=marker,
                markersize=6.5,
                linestyle="none",
                elinewidth=0.9,
                ecolor=(colour, 0.45),  # the points stand out where bars cross
                capsize=2,
                markeredgecolor="white",
                markeredgewidth=0.6,
                label=name,
            )
        axes.set(xlabel="spread over orderings, points (one sd)", ylabel=f"accuracy at k = {self._num}, %")
        low, high = axes.get_xlim()
        axes.set_xlim(left=max(low, -0.03 * high))
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -1), min(high, 101))
        figures.plain_frame(axes)
        _legend(figure, axes)
        figures.head(
            figure,
            self._headed("Accuracy against spread"),
            "bars: 95 % interval of the difference to random (dashed); small: single sets",
        )

    def _headed(self, words: str) -> str:
        return f"{words}: {self.title}" if self.title else words

    def _pareto_charts(self) -> list[charts.Specification]:
        rows = []
        for name, outcome in self.outcomes.items():
            row: dict[str, Any] = {"name": name, "x": 100 * outcome.spread, "y": 100 * outcome.accuracy.estimate}
            for at, found in (("x", outcome.spread_difference), ("y", outcome.difference)):
                half = _half(found)
                row |= {} if half is None else {f"{at}_low": row[at] - half, f"{at}_high": row[at] + half}
            rows.append(plain(row))
        x, y = "spread over orderings, points", f"accuracy at k = {self._num}, %"
        looks: Any = {"colours": self._colours, "baseline": BASELINE, "name": "chosen by"}
        return [charts.point_chart(rows, x=x, y=y, others=self._sets_as_points(), **looks)]

    def _sets_as_points(self) -> list[dict[str, Any]]:
        """Every chosen set as a row of a chart, which opens the prompt of its first ordering."""
        return [
            plain({"x": 100 * spread, "y": 100 * accuracy, "name": name})
            | charts.prompt_at(
                place * self.num_sets + number,
                0,
                self._num,
                f"{name}, {accuracy:.1%} over orderings, spread {100 * spread:.1f} points",
                run=CHOSEN,
            )
            for place, (name, outcome) in enumerate(self.outcomes.items())
            for number, (spread, accuracy) in enumerate(
                zip(outcome.spread_by_set, outcome.accuracy_by_set, strict=True)
            )
        ]

    def _curve_charts(self) -> list[charts.Specification]:
        rows = [
            plain({"x": k, "y": 100 * value, "name": name})
            for name, outcome in self.outcomes.items()
            for k, value in zip(self.shots, outcome.curve, strict=True)
        ]
        x, y = "number of demonstrations k", "accuracy, %"
        return [charts.line_chart(rows, x=x, y=y, colours=self._colours, name="chosen by")]

    @property
    def _colours(self) -> dict[str, str]:
        """Those of a page, which may be dark: black is grey."""
        looks = {name: _LOOKS.get(name, (figures.GREY, "o"))[0] for name in self.outcomes}
        return {name: charts.GREY if colour == "black" else colour for name, colour in looks.items()}

    def _draw_curves(self, figure: Figure) -> None:
        axes = _beside_a_legend(figure)
        for name, outcome in self.outcomes.items():
            colour, marker = _LOOKS.get(name, (figures.GREY, "o"))
            width = 2.2 if name == BASELINE else 1.2
            axes.plot(
                self.shots, 100 * outcome.curve, color=colour, marker=marker, markersize=5, linewidth=width, label=name
            )
        axes.set(xlabel="number of demonstrations k", ylabel="accuracy, %", xticks=figures.shot_ticks(self.shots))
        figures.plain_frame(axes)
        _legend(figure, axes)
        line = f"mean over {self.num_sets} sets and {self.num_permutations} orderings"
        figures.head(figure, self._headed("Accuracy over k of the chosen demonstrations"), line)


def _tall(width: float) -> float:
    return 3.8 if width >= _BESIDE else 2.1 + 0.5 * width


def _beside_a_legend(figure: Figure) -> Axes:
    """Axes with room for a legend, under them where the figure is narrow."""
    width, height = figure.get_size_inches()
    if width >= _BESIDE:
        return figures.placed(figure, 0.71, 0.5, 0.745 * width - 0.85, height - 1.2)
    return figures.placed(figure, 0.62, 1.15, width - 0.75, height - 1.9)


def _legend(figure: Figure, axes: Axes) -> None:
    if figure.get_figwidth() < _BESIDE:
        figures.legend_below(figure, axes)
        return
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, frameon=False, loc="upper left", bbox_to_anchor=(0.75, 0.83), title="chosen by")


def findings_of_runs(runs: Mapping[str, FinishedRun], choices: Mapping[str, Any]) -> Selection:
    """The findings of a selection study, of its runs and of what was chosen between them."""
    content = choices.get(SOURCE)
    return findings(runs[SOURCE], runs[CHOSEN], None if content is None else Chosen.of(content))


def findings(source: FinishedRun, chosen: FinishedRun, choice: Chosen | None = None) -> Selection:
    """What the second run says of the strategies, and the first of the scores.

    `choice` is what `choose` gave; by default it is made again. Raises DataError where the sets of `chosen` are not
    those of the choice. Cost: no model call.
    """
    choice = choose(source, chosen.shots[-1]) if choice is None else choice
    sets = chosen.demonstrations.sets
    if sets.shape != choice.rows.shape or (np.sort(sets, axis=1) != np.sort(choice.rows, axis=1)).any():
        raise DataError(
            f"the second run has {len(sets)} sets that are not the {len(choice.rows)} chosen from the first; run it "
            "with 'demonstrations' set to what choose() gives, and pass the choice"
        )
    scored, test = source.splits[choice.split], chosen.splits["test"]
    found = selection(
        test.correct.reshape(len(choice.strategies), -1, *test.correct.shape[1:]),
        test.state.reshape(len(choice.strategies), -1, *test.state.shape[1:]),
        strategies=choice.strategies,
        shots=chosen.shots,
        weights=test.weights,
        classes=classes_by_design(chosen),
        num_labels=choice.num_labels,
        score=choice.score,
        scores={name: found.values for name, found in choice.scores.items()},
        reliability=split_half(
            scored.correct,
            source.demonstrations.permutations,
            source.shots,
            scored.state,
            scored.weights,
            names=tuple(choice.scores),
            seed=source.study.seed,
        ),
        warnings=choice.warnings,
    )
    shape = (len(choice.strategies), -1, *test.correct.shape[1:])
    strategies = zip(test.correct.reshape(shape), test.state.reshape(shape), strict=True)
    right = [by_query(correct[:, :, -1], state[:, :, -1]) for correct, state in strategies]
    return replace(
        found,
        bearing=of_run(chosen, right, sets=found.num_sets, permutations=1),
        recommended=_recommended(source, chosen, choice),
        chosen=_chosen_texts(source, choice),
        title=chosen.title,
    )


def _recommended(source: FinishedRun, chosen: FinishedRun, choice: Chosen) -> RecommendedCell | None:
    """What the score chose out of the set that did best on the queries that choose, in its first order."""
    if _BY_SCORE not in choice.strategies:
        return None
    scored = source.splits[choice.split]
    by_set = filled(scored.correct, scored.state, scored.weights).accuracy.values[:, :, -1].mean(axis=1)
    num_sets, best = len(by_set), int(by_set.round(TIE_DECIMALS).argmax())
    place = choice.strategies.index(_BY_SCORE) * num_sets + best
    test = chosen.splits["test"]
    orders = filled(test.correct, test.state, test.weights).accuracy.values[place, :, -1]
    notes = (
        f"demonstrations chosen by the score {choice.score!r} on the {choice.split} queries, out of set {best} of "
        f"{num_sets}, the most accurate there",
        f"no order was chosen: this is the first of {len(orders)} random ones, over which test accuracy has the mean "
        f"{orders.mean():.1%} and goes from {orders.min():.1%} to {orders.max():.1%}",
    )
    return RecommendedCell(CHOSEN, place, 0, choice.split != "test", notes)


def _chosen_texts(source: FinishedRun, choice: Chosen) -> tuple[tuple[str, int, str, str], ...]:
    shown = source.demonstrations
    label_of = dict(zip(shown.rows.ravel().tolist(), shown.labels.ravel().tolist(), strict=True))
    rows = choice.rows.reshape(len(choice.strategies), -1, choice.rows.shape[1]).tolist()
    return tuple(
        (name, place, source.shared_labels[label_of[row]] if source.shared_labels else "", shown.texts[row])
        for name, of_strategy in zip(choice.strategies, rows, strict=True)
        for place, of_set in enumerate(of_strategy)
        for row in of_set
    )


def selection(
    correct: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    *,
    strategies: Sequence[str],
    shots: Sequence[int],
    weights: npt.ArrayLike | None = None,
    classes: npt.ArrayLike | None = None,
    num_labels: npt.ArrayLike | None = None,
    score: str = "marginal",
    scores: Mapping[str, npt.ArrayLike] | None = None,
    reliability: Mapping[str, Reliability] | None = None,
    warnings: Sequence[str] = (),
) -> Selection:
    """Strategies compared at the largest number of shots.

    Args:
        correct: [T, S, P, N, Q] 0 or 1: strategies, source sets, orderings, shots, queries.
        state: [T, S, P, N, Q] integers, 0 = ok; a query that is not ok somewhere is left out everywhere.
        strategies: [T] names, one of them `random`.
        shots: [N] ascending.
        weights, classes: [Q] how often each query counts, and its class (`stats.variance_components`).
        num_labels: [T, S] different labels among the chosen.
        score: the one that top, bottom and blend went by.
        scores: [S, K] by name, for the correlations between them.
        reliability: by name of score.
        warnings: what should be known before.

    Index permutations must be shared by all sets and strategies, as those of one run are: errors count their effects as
    shared. Raises RequestError on shapes that do not fit, without `random`, or below two orderings; DataError where no
    query is ok in every cell. Cost: O(size of correct), and O(T·S·P²) for the jackknife.
    """
    items = np.asarray(correct)
    if items.ndim != 5 or len(strategies) != len(items) or len(shots) != items.shape[3]:
        raise RequestError(
            f"a selection needs correct [T, S, P, N, Q] of {len(strategies)} strategies and {len(shots)} shots, got "
            f"{list(items.shape)}"
        )
    if BASELINE not in strategies:
        raise RequestError(f"the strategies are compared with {BASELINE!r}, got {', '.join(strategies)}")
    if items.shape[2] < 2:
        raise RequestError("a spread over orderings needs at least 2 permutations, got 1")
    whole = filled(items, state, weights)
    cells, weight = whole.accuracy, whole.weights
    labels = np.full(items.shape[:2], np.nan) if num_labels is None else np.asarray(num_labels, dtype=np.float64)
    of_each = None if classes is None else np.asarray(classes)[whole.usable]
    outcomes = outcomes_of(cells.values, whole.items[:, :, :, -1], weight, labels, list(strategies), of_each)
    tables = {name: np.asarray(values, dtype=np.float64) for name, values in (scores or {}).items()}
    return Selection(
        shots=tuple(shots),
        num_sets=items.shape[1],
        num_permutations=items.shape[2],
        num_queries=cells.num_queries,
        dropped=cells.dropped,
        outcomes=outcomes,
        score=score,
        reliability=dict(reliability or {}),
        correlations={
            (first, second): rank_correlation(tables[first], tables[second])
            for place, first in enumerate(tables)
            for second in list(tables)[place + 1 :]
        },
        warnings=(
            *([filled_words(whole.share)] if whole.share else []),
            *warnings,
            *design_warnings(items.shape[1], items.shape[2], outcomes),
        ),
    )


def _about_reliability(score: str, found: Reliability) -> str:
    value = next((value for value in (found.both, found.queries) if not math.isnan(value)), math.nan)
    if math.isnan(value):
        return f"The reliability of the score {score!r} is not known: too few permutations or queries to halve."
    told = f"The score {score!r} has a split-half reliability of {value:.2f}"
    if value < _RELIABLE:
        return f"{told}: most of its differences are noise, and a second run would choose other demonstrations."
    return f"{told}: a second run would rank the demonstrations much alike." if value >= 0.8 else f"{told}."


def _in_words(name: str, score: str) -> str:
    return STRATEGIES.get(name, name).replace("score", f"score {score!r}")


def _half(found: Difference) -> float | None:
    """Half the width of an interval in points; None where there is none."""
    return None if math.isnan(found.low) else 100 * (found.high - found.estimate)
