"""Kind `transfer` (arXiv 2511.09700): does the best order of one task serve another one, or another model?

Index permutations depend on the seed and the size of the sets only. So runs that share both have the same permutations,
and everything here is arithmetic on their stored answers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from scipy import special

from iclperm import stats
from iclperm.base.help import fields_in_help
from iclperm.errors import ConfigError, DataError, RequestError
from iclperm.report import charts, figures
from iclperm.report.notebook import ShownFindings
from iclperm.report.parts import Plot, Table, interval_words, number, percent, percent_with_bounds, plain, signed
from iclperm.stats import Interval
from iclperm.stats.intervals import bounded, jackknife_interval
from iclperm.stats.paired import holm
from iclperm.stats.search import choose
from iclperm.stats.sensitivity import accuracy_matrix
from iclperm.studies.bearing import LEAST_LEVELS, Bearing, by_query, of_run, too_few
from iclperm.studies.search import dev_scores
from iclperm.studies.stages import Stage
from iclperm.study import kinds
from iclperm.study.study import Study
from iclperm.tasks.task import Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from iclperm.runs.run import FinishedRun

FloatArray = npt.NDArray[np.float64]

_SAME = ("permutations", "seed", "resample", "design", "criterion")
"""Keys of the study that must be equal, or the permutations and what chooses among them are not the same."""


_PAIRS_IN_WORDS = 3
_LEAST_CELL, _ROOMY_CELL = 0.36, 0.6  # inches that a ratio takes, and one with its interval
_ALPHA = 0.05
_ROUNDING = 1e-12  # a standard error below it is none


@dataclass(frozen=True)
class Transfer:
    """The best permutations of N sources on N targets: tasks, or models; every matrix has sources as rows."""

    names: tuple[str, ...]
    """[N] of the sources and targets, in the order of every matrix."""
    chosen: tuple[npt.NDArray[np.int64], ...]
    """[1] for each source, or [S] where every set chooses its own."""
    accuracy: FloatArray
    """[N, N] of the target on test under the source's best permutation, mean over the target's sets."""
    ratio: tuple[tuple[Interval, ...], ...]
    """accuracy / that under the target's own best permutation; 1 on the diagonal."""
    gain: tuple[tuple[Interval, ...], ...]
    """accuracy - `average` of the target: what the source's permutation gains over a random one."""
    p_gain: FloatArray
    """[N, N] p-value of no gain (two-sided, Student's t with S - 1 degrees of freedom), Holm over all N² of them; NaN
    below three sets of the target, and where all sets gain alike."""
    average: FloatArray
    """[N] of each target over all orderings."""
    maximum: FloatArray
    """[N] of each target, highest mean accuracy of one permutation (of each set, where sets choose) on test."""
    agreement: FloatArray
    """[N, N] correlation over permutations of mean test accuracy, of two tasks; NaN where one is constant."""
    by_set: bool
    """Whether every set chooses a permutation of its own."""

    @property
    def kept(self) -> FloatArray:
        """[N, N] gain / the gain of the target's own best permutation; NaN where that gains nothing."""
        gains = np.array([[interval.estimate for interval in row] for row in self.gain])
        own = np.diag(gains)
        return np.where(own > 0, gains / np.where(own > 0, own, 1.0), np.nan)

    @property
    def random_ratio(self) -> FloatArray:
        """[N] average / accuracy under the target's own best permutation: the ratio of no transfer at all."""
        own = np.diag(self.accuracy)
        return np.where(own > 0, self.average / np.where(own > 0, own, 1.0), np.nan)

    @property
    def is_gain(self) -> npt.NDArray[np.bool_]:
        """[N, N] whether the source's permutation beats a random one beyond the spread of the target's sets."""
        gains = np.array([[interval.estimate for interval in row] for row in self.gain])
        return np.asarray((self.p_gain < _ALPHA) & (gains > 0))

    def rate(self, one: str, other: str) -> float:
        """½·(ratio one → other + ratio other → one), the transfer rate of arXiv 2511.09700. Raises RequestError for
        another name."""
        a, b = (self._place(name) for name in (one, other))
        return (self.ratio[a][b].estimate + self.ratio[b][a].estimate) / 2

    def _place(self, name: str) -> int:
        if name not in self.names:
            raise RequestError(f"no source is called {name!r}; choose one of {', '.join(self.names)}")
        return self.names.index(name)


def transfer(
    sources: Mapping[str, tuple[npt.ArrayLike, npt.ArrayLike]], *, by_set: bool = False, level: float = 0.95
) -> Transfer:
    """What the best permutation of each source does for every other: no model is called.

    Args:
        sources: by name the criterion on dev and the accuracy on test, [S, P] each; the same P index permutations in
            the same order. S may differ, unless `by_set`.
        by_set: every set chooses its own best permutation, which then meets the target's set of the same number.
            Otherwise a source has one: that of the highest mean over its sets, ties to the lowest.
        level: of the intervals.

    Intervals leave out one of the target's sets at a time, with the choices held: they speak of other sets of the
    target, not of other permutations that could have been chosen. NaN for one set. Raises RequestError for fewer than
    two sources, shapes that do not fit, and another P, naming the source. Cost: O(N²·S + N·S·P).
    """
    if len(sources) < 2:
        raise RequestError(f"a transfer needs at least 2 tasks or models, got {len(sources)}")
    names = tuple(sources)
    dev, test = ([accuracy_matrix(pair[place]) for pair in sources.values()] for place in (0, 1))
    _refuse_other_shapes(names, dev, test, by_set)
    chosen = tuple(choose(scores if by_set else scores.mean(axis=0, keepdims=True)) for scores in dev)
    found = [[_at(target, permutations) for target in test] for permutations in chosen]  # each [S]
    means = [target.mean(axis=1) for target in test]
    pairs = range(len(names))
    leads = [[found[a][b] - means[b] for b in pairs] for a in pairs]
    p_values = holm([_p_of_no_gain(lead) for row in leads for lead in row])
    return Transfer(
        names=names,
        chosen=chosen,
        accuracy=np.array([[values.mean() for values in row] for row in found]),
        ratio=tuple(tuple(_ratio(found[a][b], found[b][b], level) for b in pairs) for a in pairs),
        gain=tuple(tuple(_gain(lead, level) for lead in row) for row in leads),
        p_gain=np.asarray(p_values).reshape(len(names), -1),
        average=np.array([mean.mean() for mean in means]),
        maximum=np.array([t.max(axis=1).mean() if by_set else t.mean(axis=0).max() for t in test]),
        agreement=_agreement([target.mean(axis=0) for target in test]),
        by_set=by_set,
    )


@fields_in_help
@dataclass(frozen=True, repr=False)
class TransferFindings(ShownFindings):
    """What a transfer study says: one permutation for each source, and beside it one for each set."""

    transfer: Transfer
    """One permutation for each source."""
    by_set: Transfer | None
    """None where the sources have different numbers of sets."""
    shots: int | None
    """The number of demonstrations; None where it is not known."""
    warnings: tuple[str, ...]
    """What should be known before the numbers are believed."""
    bearing: Bearing = field(default_factory=Bearing)
    """What the answers can bear."""
    title: str = ""
    """Tasks and models, for the head of the figure."""

    def conclusion(self) -> list[str]:
        """The result in plain sentences; where the answers do not bear one, why, and what would suffice."""
        return self.bearing.told(self._sentences())

    def _sentences(self) -> list[str]:
        names = self.transfer.names
        pairs = [(names[a], names[b]) for a, b in zip(*np.triu_indices(len(names), 1), strict=True)]
        if len(pairs) <= _PAIRS_IN_WORDS:
            return [*(self._pair(*pair) for pair in pairs), self._gains()]
        (low, least), (high, most) = self._extremes(pairs)
        return [
            f"{self._start} transfer rate of {len(pairs)} pairs goes from {low:.3f} ({' and '.join(least)}) to "
            f"{high:.3f} ({' and '.join(most)}).",
            self._gains(),
        ]

    def tables(self, full: bool) -> list[Table]:
        """A row for each pair; in full the choice by set and the agreement between sources too."""
        t = self.transfer
        found = [_pairs_table(t, "Transfer of the best permutation"), _targets_table(t)]
        if full and self.by_set is not None:
            found.append(_pairs_table(self.by_set, "Transfer, every set with a best permutation of its own"))
        if full:
            rows = [(name, *(signed(value, 2) for value in t.agreement[place])) for place, name in enumerate(t.names)]
            found.append(
                Table(
                    "Do the same permutations serve both?",
                    ("", *t.names),
                    rows,
                    caption="Correlation over permutations of mean test accuracy; noise of few queries and sets pulls "
                    "it towards 0.",
                )
            )
        return found

    def plots(self) -> dict[str, Plot]:
        """A heat map of the ratios."""
        number, label = len(self.transfer.names), 0.075 * max(map(len, self.transfer.names))

        def tall(width: float) -> float:
            return min(0.9 * number, width - label - 1.35) + label + 1.35

        width = max(0.9 * number + label + 1.7, 4.6)
        least = label + 1.4 + _LEAST_CELL * number
        return {"transfer": Plot((width, tall(width)), self._draw, self._charts, tall=tall, least=least)}

    def to_dict(self) -> dict[str, Any]:
        """Every number that is shown, JSON-safe."""
        content: dict[str, Any] = plain(self)
        for name, found in (("transfer", self.transfer), ("by_set", self.by_set)):
            if found is not None:
                content[name]["kept"] = plain(found.kept)
                content[name]["random_ratio"] = plain(found.random_ratio)
                content[name]["rates"] = [
                    {"one": one, "other": other, "rate": plain(found.rate(one, other))}
                    for place, one in enumerate(found.names)
                    for other in found.names[place + 1 :]
                ]
        del content["title"]  # which the report names
        return content | {"conclusion": self.conclusion(), "bearing": self.bearing.to_dict()}

    @property
    def _start(self) -> str:
        return "The" if self.shots is None else f"At k = {self.shots}, the"

    def _pair(self, one: str, other: str) -> str:
        t = self.transfer
        a, b = t.names.index(one), t.names.index(other)
        if math.isnan(t.ratio[a][b].estimate) or math.isnan(t.ratio[b][a].estimate):
            return (
                f"{self._start} best permutations of {one} and {other} cannot be compared: one answers nothing rightly "
                "on its own task."
            )
        there, back = (percent_with_bounds(ratio) for ratio in (t.ratio[a][b], t.ratio[b][a]))
        return (
            f"{self._start} best permutation of {one} has on {other} {there} of the accuracy of the best one there (a "
            f"random one: {percent(t.random_ratio[b])}); the other way round it is {back} (random: "
            f"{percent(t.random_ratio[a])}). Transfer rate: "
            f"{t.rate(one, other):.3f}."
        )

    def _extremes(self, pairs: list[tuple[str, str]]) -> list[tuple[float, tuple[str, str]]]:
        rates = [(self.transfer.rate(*pair), pair) for pair in pairs]
        return [min(rates), max(rates)]

    def _gains(self) -> str:
        t = self.transfer
        others = [(a, b) for a in range(len(t.names)) for b in range(len(t.names)) if a != b]
        better = sum(bool(t.is_gain[pair]) for pair in others)
        told = (
            f"A permutation from elsewhere beats a random one, beyond the spread of the sets, in {better} of "
            f"{len(others)} transfers"
        )
        own = int(np.count_nonzero(np.diag(t.is_gain)))
        return f"{told}; a target's own best permutation does in {own} of {len(t.names)} (Holm, 5 %)."

    def _charts(self) -> list[charts.Specification]:
        rows = [
            plain({"y": one, "x": other, "value": self.transfer.ratio[a][b].estimate})
            for a, one in enumerate(self.transfer.names)
            for b, other in enumerate(self.transfer.names)
        ]
        words = {"x": "on this target", "y": "best permutation of", "value": "accuracy / that of the target's own best"}
        return [charts.matrix_chart(rows, **words)]

    def _draw(self, figure: Figure) -> None:
        t = self.transfer
        ratios = np.array([[interval.estimate for interval in row] for row in t.ratio])
        width, height = figure.get_size_inches()
        label = 0.075 * max(map(len, t.names))
        side = min(0.9 * len(t.names), width - label - 1.35)
        is_roomy = side / len(t.names) >= _ROOMY_CELL
        size = 7.5 if side / len(t.names) >= 0.85 else 6.0
        axes = figure.add_axes(((label + 0.45) / width, (label + 0.5) / height, side / width, side / height))
        reach = float(np.nanmax(np.abs(ratios - 1), initial=0.01))
        image = axes.imshow(ratios, cmap="PuOr", vmin=1 - reach, vmax=1 + reach, interpolation="nearest")
        for (a, b), value in np.ndenumerate(ratios):
            colour = figures.letter_colour(image.cmap(image.norm(value)))
            interval = t.ratio[a][b]
            text = f"{value:.3f}"
            if a != b and not math.isnan(interval.low) and is_roomy:
                text += f"\n{interval.low:.2f} to {interval.high:.2f}"
            axes.text(b, a, text, ha="center", va="center", fontsize=size, color=colour)
        places = range(len(t.names))
        axes.set(xticks=places, yticks=places, xlabel="on this target", ylabel="best permutation of")
        turned = 0.07 * max(map(len, t.names)) > side / len(t.names)
        axes.set_xticklabels(t.names, rotation=90 if turned else 0)
        axes.set_yticklabels(t.names)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        found = ratios[~np.isnan(ratios)]
        if found.size and found.max() > found.min():  # colours of one number would show a range that is not there
            bar = figures.placed(figure, label + 0.6 + side, label + 0.5, 0.12, side)
            figure.colorbar(image, cax=bar).outline.set_visible(False)
        title = "Transfer of the best permutation"
        figures.head(
            figure,
            f"{title}: {self.title}" if self.title else title,
            f"accuracy / that of the target's own best{'; 95 % interval' if is_roomy else ''}",
        )


def findings(runs: Mapping[str, FinishedRun], _: Mapping[str, Any] | None = None) -> TransferFindings:
    """The findings of several search runs, by the name of their task or model, at their largest number of shots.

    A transfer chooses nothing between runs: what stages chose, which any such kind is given, is not looked at.
    Raises ConfigError where the runs differ in k, P, seed or what else fixes the permutations, and DataError where one
    has no dev split, naming it.
    """
    if len(runs) < 2:
        raise ConfigError(f"a transfer needs at least 2 runs, got {len(runs)}; name more with 'tasks' or 'models'")
    first, *others = runs
    for name in others:
        _refuse_other_permutations(first, runs[first], name, runs[name])
    sources = {name: _dev_and_test(name, run) for name, run in runs.items()}
    same_sets = len({np.shape(dev)[0] for dev, _ in sources.values()}) == 1
    found = transfer(sources)
    return TransferFindings(
        found,
        transfer(sources, by_set=True) if same_sets else None,
        runs[first].shots[-1],
        tuple(_warnings(found)),
        _bearing(runs, found),
        "; ".join(dict.fromkeys(run.title for run in runs.values())),
    )


def _bearing(runs: Mapping[str, FinishedRun], found: Transfer) -> Bearing:
    """What the answers of all runs can bear: a target is judged by a random permutation, and by its own best."""
    reasons, cautions = [], []
    for place, (name, run) in enumerate(runs.items()):
        test = run.splits["test"]
        correct, state = test.correct[:, :, -1], test.state[:, :, -1]
        own = int(found.chosen[place][0])
        right = [by_query(correct, state), by_query(correct[:, own], state[:, own])]
        bears = of_run(run, right, permutations=1)
        few = too_few("sets", 1) if len(correct) == 1 else []  # of which nothing else is said
        reasons += [reason._replace(words=f"on {name}, {reason.words}") for reason in (*few, *bears.reasons)]
        cautions += [f"On {name}: {caution}" for caution in bears.cautions]
    return Bearing(tuple(reasons), tuple(cautions))


def _searches(study: Study, _: Mapping[str, Any]) -> dict[str, Study]:
    """A search for each task and model; its folder is called by what differs between them."""
    pairs = [(task, model) for task in _tasks(study) for model in _models(study)]
    if len(pairs) < 2:
        raise ConfigError("a transfer needs two tasks or two models at least; name them under 'tasks' or 'models'")
    names = [_name(task, model, len(_tasks(study)), len(_models(study))) for task, model in pairs]
    if len(set(names)) < len(names):
        raise ConfigError(f"two of the tasks or models have one name: {', '.join(names)}; give each once")
    return {
        name: study.of_kind(kinds.SEARCH.name, task=task, model=model)
        for name, (task, model) in zip(names, pairs, strict=True)
    }


def _refuse_other_shots(study: Study) -> None:
    """Raises `ConfigError` where the tasks have different numbers of demonstrations."""
    counts = {name: study.shot_list(Task.load(name, study.data).shots)[-1] for name in _tasks(study)}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ConfigError(f"an order carries over between equal numbers of shots, but there are {told}; set 'shots'")


def _tasks(study: Study) -> list[str]:
    return study.tasks or [study.task]


def _models(study: Study) -> list[str]:
    return study.models or [study.model]


def _name(task: str, model: str, num_tasks: int, num_models: int) -> str:
    parts = ([Path(task).stem] if num_tasks > 1 else []) + ([Path(model).name] if num_models > 1 else [])
    return re.sub(r"[^\w.-]", "_", "-".join(parts))


STAGES = {"searches": Stage(_searches, check=_refuse_other_shots)}


def _dev_and_test(name: str, run: FinishedRun) -> tuple[FloatArray, FloatArray]:
    if "dev" not in run.splits:
        raise DataError(f"the run of {name} has no dev queries to choose by; run it with 'dev_queries', such as 1000")
    test = run.splits["test"]
    on_test = stats.accuracy(test.correct[:, :, -1], test.state[:, :, -1], test.weights).values
    if run.study.criterion == "dev_accuracy":
        dev = run.splits["dev"]
        return stats.accuracy(dev.correct[:, :, -1], dev.state[:, :, -1], dev.weights).values, on_test
    scores, criterion = dev_scores(run), run.study.criterion
    if criterion not in scores:
        raise DataError(f"the run of {name} gives no {criterion!r}; choose by {', '.join(scores)} with --criterion")
    return scores[criterion], on_test


def _refuse_other_permutations(first: str, one: FinishedRun, name: str, other: FinishedRun) -> None:
    """Raises ConfigError where two runs do not have the same index permutations at their largest number of shots."""
    if one.shots[-1] != other.shots[-1]:
        raise ConfigError(
            f"{first} has k = {one.shots[-1]} and {name} k = {other.shots[-1]}: a permutation of one is none of the "
            "other; run both with the same 'shots'"
        )
    for key in _SAME:
        here, there = (getattr(run.study, key) for run in (one, other))
        if here != there:
            raise ConfigError(f"{first} has {key} {here} and {name} {there}; run both with the same {key!r}")


def _refuse_other_shapes(names: tuple[str, ...], dev: list[FloatArray], test: list[FloatArray], by_set: bool) -> None:
    for name, scores, accuracies in zip(names, dev, test, strict=True):
        if scores.shape != accuracies.shape:
            raise RequestError(
                f"{name} has dev {list(scores.shape)} and test {list(accuracies.shape)}; give both [S, P]"
            )
        if scores.shape[1] != dev[0].shape[1]:
            raise RequestError(
                f"{names[0]} has {dev[0].shape[1]} permutations and {name} {scores.shape[1]}; give the same"
            )
        if by_set and len(scores) != len(dev[0]):
            raise RequestError(f"{names[0]} has {len(dev[0])} sets and {name} {len(scores)}; leave out by_set")


def _at(accuracy: FloatArray, permutations: npt.NDArray[np.int64]) -> FloatArray:
    """[S] accuracy [S, P] at one permutation, or at one of each set."""
    places = np.broadcast_to(permutations, len(accuracy))
    return np.asarray(accuracy[np.arange(len(accuracy)), places])


def _ratio(there: FloatArray, own: FloatArray, level: float) -> Interval:
    def ratio(a: Any, b: Any) -> Any:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(np.asarray(b) > 0, np.divide(a, b), np.nan)

    left_out = ratio(*(values.sum() - values for values in (there, own)))
    return bounded(jackknife_interval(float(ratio(there.sum(), own.sum())), left_out, level=level), "ratio")


def _gain(lead: FloatArray, level: float) -> Interval:
    num = len(lead)
    left_out = (lead.sum() - lead) / (num - 1) if num > 1 else [math.nan]
    return bounded(jackknife_interval(float(lead.mean()), left_out, level=level), "difference")


def _p_of_no_gain(lead: FloatArray) -> float:
    """Of a mean lead over sets [S] of 0; equal leads of a few queries do not say how far others would lie: NaN."""
    num = len(lead)
    error = float(lead.std(ddof=1)) / math.sqrt(num) if num > 1 else 0.0
    if num < LEAST_LEVELS or error <= _ROUNDING:
        return math.nan
    return float(2 * special.stdtr(num - 1, -abs(float(lead.mean())) / error))


def _agreement(means: list[FloatArray]) -> FloatArray:
    """[N, N] Pearson's correlation; NaN where one does not vary."""
    centred = [mean - mean.mean() for mean in means]
    sizes = [float(np.sqrt(mean @ mean)) for mean in centred]
    return np.array(
        [
            [float(x @ y) / (m * n) if min(m, n) > 1e-12 else math.nan for y, n in zip(centred, sizes, strict=True)]
            for x, m in zip(centred, sizes, strict=True)
        ]
    )


def _warnings(found: Transfer) -> list[str]:
    lines = []
    if any(math.isnan(row[0].low) for row in found.gain):
        lines.append("a target has one set only: nothing bounds what its other sets would give")
    dead = [name for place, name in enumerate(found.names) if not found.is_gain[place, place]]
    if dead:
        lines.append(
            f"on {', '.join(dead)} the own best permutation cannot be told from a random one over sets: ratios there "
            "say nothing about transfer"
        )
    return lines


def _pairs_table(found: Transfer, title: str) -> Table:
    rows = []
    for a, source in enumerate(found.names):
        for b, target in enumerate(found.names):
            if a != b:
                ratio, gain, own = found.ratio[a][b], found.gain[a][b], found.gain[b][b]
                cells = (number(found.accuracy[a, b]), number(ratio.estimate), interval_words(ratio))
                rows.append(
                    (f"{source} → {target}", *cells, number(gain.estimate), interval_words(gain), number(own.estimate))
                )
    header = ("", "accuracy", "ratio", "95 % interval", "gain", "95 % interval", "own gain")
    return Table(
        title,
        header,
        rows,
        caption="Ratio: to the accuracy of the target's own best, both chosen on dev. Gain: over a random permutation. "
        "Intervals: jackknife over the target's sets, choices held.",
    )


def _targets_table(found: Transfer) -> Table:
    own = np.diag(found.accuracy)
    rows = [
        (
            name,
            *map(number, (found.average[b], own[b], found.random_ratio[b], found.maximum[b])),
            str(found.chosen[b][0]) if len(found.chosen[b]) == 1 else "by set",
        )
        for b, name in enumerate(found.names)
    ]
    return Table(
        "The targets alone",
        ("", "random", "own best (dev)", "random / own best", "Max (test)", "which permutation"),
        rows,
        caption="Max is chosen by the test labels, luck included.",
    )
