"""Generated answers read once more, from the texts that a run keeps, by the rules of other tasks; no model is asked.

A right answer is a matter of how a text is read: GSM8K's `strict-match` and `flexible-extract` of
lm-evaluation-harness differ by many points on the same texts. Each is a metric of its own, and they stand side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.errors import ConfigError, DataError
from iclperm.report.parts import Plot, Table, number, percent, plain
from iclperm.study.metrics import Metric
from iclperm.study.states import OK, UNPARSED
from iclperm.tasks.answers import Checker, open_checker
from iclperm.tasks.filters import golds_of, golds_text
from iclperm.tasks.task import Task

if TYPE_CHECKING:
    from iclperm.runs.answers import Items
    from iclperm.runs.run import FinishedRun

ASIDE = "rereading"
"""Its key in report.json, where it stands beside another kind's findings."""
_TEXTS = 50_000  # read at once
_UNFINISHED = "unfinished thinking"


class TextsRead(NamedTuple):
    """What one task's rules make of the texts of a run; every cell and query counts by its weight. Of a task that
    grades answers an accuracy is the mean grade."""

    task: str
    """Whose rules: its name."""
    accuracy: tuple[float, ...]
    """[K] share of the texts that are right; what cannot be read is wrong. NaN where there is no text."""
    unparsed: tuple[float, ...]
    """[K] share of the texts in which no answer can be read."""
    gained: float
    """Share of all texts that are right by this reading and wrong by the run's own."""
    lost: float
    """Share of all texts that are wrong by this reading and right by the run's own."""
    metric: Metric | None = None
    """What this reading grades answers by; what is gained and lost are then differences of grades, mean over texts."""

    @property
    def measure(self) -> str:
        """What its ``accuracy`` is."""
        return "accuracy" if self.metric is None else self.metric.mean


@dataclass(frozen=True)
class Rereading:
    """The findings: two tables, no figure. The run's own reading comes first."""

    shots: tuple[int, ...]
    """[K] numbers of demonstrations, rising; the axis of every reading's figures."""
    readings: tuple[TextsRead, ...]
    """The run's own rules first, then each other task's in the order asked for."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """None of its own."""
        return ()

    @property
    def is_graded(self) -> bool:
        """Whether one reading grades answers, so that none is spoken of as right or wrong alone."""
        return any(reading.metric is not None for reading in self.readings)

    def conclusion(self) -> list[str]:
        """What each reading gives at the largest number of shots."""
        own, *others = self.readings
        begin = f"Of the same texts at k = {self.shots[-1]}"
        if self.is_graded:
            here, *there = (f"{one.measure} {number(one.accuracy[-1])}" for one in self.readings)
            said = [f"{words} by those of {other.task}" for words, other in zip(there, others, strict=True)]
            return [f"{begin}: {here} by the run's own rules ({own.task}), {', '.join(said)}."]
        said = [f"{percent(other.accuracy[-1])} by those of {other.task}" for other in others]
        here = percent(own.accuracy[-1])
        return [f"{begin} {here} are right by the run's own rules ({own.task}), {', '.join(said)}."]

    def tables(self, full: bool) -> list[Table]:
        """Accuracy by number of shots, without ``full`` at the largest alone; and where the readings differ."""
        places = range(len(self.shots)) if full else [len(self.shots) - 1]
        names = [f"{one.task} ({one.measure})" if self.is_graded else one.task for one in self.readings]
        rows = [(str(self.shots[at]), *(number(one.accuracy[at]) for one in self.readings)) for at in places]
        caption = "Each reads the same texts, the first as the run did; what cannot be read is wrong."
        share = number if self.is_graded else percent
        differ = [(one.task, percent(one.unparsed[-1]), share(one.gained), share(one.lost)) for one in self.readings]
        header, told = (
            ("right here alone", "right by the run's alone"),
            "Shares of all texts, beside the run's reading.",
        )
        if self.is_graded:
            header = ("grade gained", "grade lost")
            told = "Means over all texts, beside the run's reading; right is a grade of 1, wrong of 0."
        return [
            Table("The same texts by other rules", ("k", *names), rows, caption=caption),
            Table(
                "Where readings differ",
                ("reading", f"no answer at k = {self.shots[-1]}", *header),
                differ,
                caption=told,
            ),
        ]

    def plots(self) -> dict[str, Plot]:
        """None."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Every number, JSON-safe."""
        found: dict[str, Any] = plain(self)
        for reading in found["readings"]:
            if reading["metric"] is None:
                del reading["metric"]
        return found


def findings(run: FinishedRun, tasks: Sequence[Task]) -> Rereading:
    """The test texts of a finished run by its own rules and by those of ``tasks``, whose answers are generated.

    Of several texts a prompt the first is read. Right answers are the run's, in the form in which it compared them.
    Raises `DataError` for a run that generates none, and for a right answer that another task's rules cannot read;
    `ConfigError` for a task with labels. Cost: reading every distinct text once for each task.
    """
    items = run.splits["test"]
    written = items.generated
    if written is None:
        raise DataError("this run's answers are not generated, so there are no texts to read again")
    shape = written.state.shape
    is_text, is_unfinished = np.isin(written.state, (OK, UNPARSED)), np.zeros(shape, np.bool_)
    if _UNFINISHED in written.rules:
        is_unfinished = written.rule == written.rules.index(_UNFINISHED)
    own_right = np.multiply(written.correct, written.state == OK)
    verdicts: list[tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]] = [(own_right, written.state == OK)]
    verdicts += [(np.zeros(shape, np.float64), np.zeros(shape, np.bool_)) for _ in tasks]
    is_thinking = run.study.think == "strip"
    with ExitStack() as open_ones:
        checkers = [_checker(open_ones, task, is_thinking) for task in tasks]
        golds = [_golds(items, task) for task in tasks]
        step = max(1, _TEXTS // max(shape[1], 1))
        contexts = np.unique(items.context_of)
        for begin in range(0, len(contexts), step):
            some = contexts[begin : begin + step]
            texts = np.array(written.table(some)["text"].to_pylist(), dtype=object).reshape(len(some), shape[1])
            for checker, gold, (right, read) in zip(checkers, golds, verdicts[1:], strict=True):
                for context, line in zip(some.tolist(), texts, strict=True):
                    there = np.flatnonzero(is_text[context] & ~is_unfinished[context]).tolist()
                    found = checker.judge([line[query] for query in there], [gold[query] for query in there])
                    read[context, there] = [one.answer is not None for one in found]
                    right[context, there] = [one.grade for one in found]
    weights = np.broadcast_to(items.weights.astype(np.float64), (*items.context_of.shape, shape[1]))
    weights = np.where(is_text[items.context_of], weights, 0.0)
    names = (run.task, *(task.name for task in tasks))
    metrics = (run.metric, *(task.answer.metric if task.answer else None for task in tasks))
    return Rereading(
        run.shots,
        tuple(
            _reading(
                name, right[items.context_of], read[items.context_of], own_right[items.context_of], weights, metric
            )
            for name, (right, read), metric in zip(names, verdicts, metrics, strict=True)
        ),
    )


def _checker(open_ones: ExitStack, task: Task, is_thinking: bool) -> Checker:
    if task.answer is None:
        raise ConfigError(
            f"{task.name} has labels and no rules to read a text by; name a task whose answers are generated"
        )
    own_form = task.answer.model_copy(update={"gold": None})  # right answers come as they were compared
    return open_ones.enter_context(open_checker(own_form, strip_think=is_thinking))


def _golds(items: Items, task: Task) -> list[str]:
    """The right answers as a task's own check has them: a list of texts where it takes several, else one text."""
    assert task.answer is not None
    if items.metric is not None and items.metric.name == "f1" and task.answer.check != "f1":
        raise DataError(
            f"the run keeps its right answers in the form that F1 compares, lower case and without articles, and "
            f"{task.name} has the check {task.answer.check}; name a task of the check f1, or run that task by itself"
        )
    listed = [golds_of(answer or "") or [answer or ""] for answer in items.right_answers]
    if task.answer.has_several_golds:
        return [golds_text(golds) for golds in listed]
    if several := next((golds for golds in listed if len(golds) > 1), None):
        raise DataError(
            f"a query has {len(several)} right answers, and {task.name} compares with one; name a task of the check "
            "exact_match"
        )
    return [golds[0] for golds in listed]


def _reading(
    name: str,
    right: npt.NDArray[Any],
    read: npt.NDArray[np.bool_],
    own: npt.NDArray[Any],
    weights: npt.NDArray[np.float64],
    metric: Metric | None,
) -> TextsRead:
    """Shares from arrays [S, P, K, Q]."""
    lead = np.subtract(right, own, dtype=np.float64)
    by_shots = weights.sum(axis=(0, 1, 3))

    def share(what: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        with np.errstate(invalid="ignore"):
            return np.asarray((weights * what).sum(axis=(0, 1, 3)) / by_shots)

    def of_all(what: npt.NDArray[Any]) -> float:
        return float((weights * what).sum() / max(weights.sum(), 1e-300))

    gained, lost = of_all(np.maximum(lead, 0)), of_all(np.maximum(-lead, 0))
    return TextsRead(name, tuple(share(right).tolist()), tuple(share(~read).tolist()), gained, lost, metric)
