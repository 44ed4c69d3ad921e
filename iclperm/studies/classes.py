"""What a run answers label by label: recall, F1 and confusion, by number of shots and by ordering.

Beside the findings of any kind, for a task that has labels. The table of a confusion says what an accuracy hides: which
labels are taken for which, and which are never answered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from iclperm.errors import DataError
from iclperm.report.figures import confusion_plot
from iclperm.report.parts import Plot, Table, interval_words, number, percent, plain
from iclperm.stats.classes import (
    ClassScores,
    Confusion,
    EffectiveItems,
    answered_shares,
    class_scores,
    confusion,
    effective_items,
)
from iclperm.stats.intervals import wilson_interval
from iclperm.stats.sensitivity import FloatArray

if TYPE_CHECKING:
    from iclperm.runs.run import FinishedRun

ASIDE = "classes"
"""Its key in report.json, where it stands beside another kind's findings."""
HEAVY_WEIGHT = 5
"""From here on single queries decide about a class."""
_MOST_COLUMNS = 10  # labels of a confusion that is printed
_MOST_NUMBERS = 100_000  # of confusions by ordering in report.json


@dataclass(frozen=True)
class AnswersByLabel:
    """The answers to the test queries by right and by answered label, every query counted by its weight.

    Every answer that is ok counts, cell by cell, also to a query that another cell could not answer.
    """

    labels: tuple[str, ...]
    """[L]"""
    shots: tuple[int, ...]
    """[K]; empty for contexts."""
    by_ordering: Confusion
    """[S, P, K, L, L] and [S, P, K, L] of every set, permutation and number of shots; of C contexts [1, C, 1, ...]."""
    items: EffectiveItems
    """What the queries are worth."""
    heaviest: tuple[int, int]
    """The label of the query that counts most often, and how often."""
    is_natural: bool
    """Whether queries were drawn as they come, not balanced over the classes."""
    title: str = ""
    """Task and model, for figures."""
    contexts: tuple[str, ...] = ()
    """[C] names, where it is contexts that answered and not orderings."""

    @property
    def _at(self) -> str:
        return "" if self.contexts else f" at k = {self.shots[-1]}"

    @property
    def _over(self) -> str:
        return "contexts" if self.contexts else "orderings"

    @property
    def scores(self) -> ClassScores:
        """[S, P, K] of every ordering."""
        return class_scores(self.by_ordering)

    @property
    def by_shots(self) -> Confusion:
        """[K, L, L] and [K, L] mean over orderings."""
        return Confusion(*(values.mean(axis=(0, 1)) for values in self.by_ordering))

    @property
    def answered(self) -> FloatArray:
        """[K, L] share of all answers that name each label."""
        return answered_shares(self.by_shots)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Where no query asks for a class, or single ones decide about it."""
        return (*self._unasked_warnings(), *self._heavy_warnings())

    @property
    def _unasked(self) -> list[str]:
        return [label for label, number in zip(self.labels, self.items.distinct, strict=True) if not number]

    def _unasked_warnings(self) -> Iterator[str]:
        if names := self._unasked:
            some = ", ".join(map(repr, names[:_MOST_COLUMNS])) + (
                f" and {len(names) - _MOST_COLUMNS} more" if len(names) > _MOST_COLUMNS else ""
            )
            yield (
                f"no test query has the label {some}: nothing here says how well it is answered, and balanced accuracy "
                f"is that of the other {len(self.labels) - len(names)}; "
                "ask more queries, set 'balance' to classes, or add examples"
            )

    def _heavy_warnings(self) -> tuple[str, ...]:
        label, weight = self.heaviest
        if weight < HEAVY_WEIGHT:
            return ()
        return (
            f"a query of the label {self.labels[label]!r} counts {weight} times, because its class is short: its "
            f"{int(self.items.distinct[label]):,} queries are worth {self.items.by_label[label]:.1f} that count alike, "
            f"all {int(self.items.distinct.sum()):,} are worth {self.items.total:.0f} (Kish); lower 'queries', add "
            "examples, or set 'balance' to natural",
        )

    def conclusion(self) -> list[str]:
        """What always naming the commonest label would have right, where the classes are not alike."""
        if not self.is_natural:
            return []
        common = int(np.argmax(self.items.share))
        scores = self.scores
        recall = _mean(scores.recall[:, :, -1])
        lowest = ""
        if np.isfinite(recall).any():
            least = int(np.nanargmin(recall))
            lowest = (
                f"; recall is lowest for {self.labels[least]!r}, {percent(float(recall[least]))} of "
                f"{int(self.items.distinct[least]):,} queries"
            )
        over = f" over the {len(self.labels) - len(self._unasked)} labels that are asked for" if self._unasked else ""
        return [
            f"Queries are as frequent as in the data: always naming {self.labels[common]!r} would be right in "
            f"{percent(float(self.items.share[common]))}. At k = {self.shots[-1]} balanced accuracy is "
            f"{percent(float(scores.balanced_accuracy[:, :, -1].mean()))}{over} and macro-F1 "
            f"{percent(float(scores.macro_f1[:, :, -1].mean()))}{lowest} (means over orderings)."
        ]

    def tables(self, full: bool) -> list[Table]:
        """Every label and the confusion at the largest number of shots, and macro-F1 over shots; none in brief."""
        if not full:
            return []
        confusions = [self._confusion_table()] if len(self.labels) <= _MOST_COLUMNS else []
        if self.contexts:
            return [self._label_table(), *confusions, *([self._contexts_table()] if len(self.contexts) > 1 else [])]
        return [self._label_table(), *confusions, self._shots_table()]

    def plots(self) -> dict[str, Plot]:
        """The confusion at the largest number of shots."""
        counts = Confusion(*(values[-1] for values in self.by_shots))
        start = f"k = {self.shots[-1]}, " if self.shots else ""
        mean = f"mean over {self._over}: " if len(self.contexts) != 1 else ""
        line = f"{start}{mean}share of a label's queries, and how many"
        return {"confusion": confusion_plot(*counts, self.labels, title=self.title, line=line)}

    def to_dict(self) -> dict[str, Any]:
        """Every number, JSON-safe: over orderings at every k, and by ordering at the largest."""
        scores, mean = self.scores, self.by_shots
        over = ("recall", "precision", "f1")
        if self.contexts:
            found = {name: plain(getattr(scores, name)[0, :, 0]) for name in (*over, "macro_f1", "balanced_accuracy")}
            found |= {name: plain(values[0, :, 0]) for name, values in self.by_ordering._asdict().items()}
            found["confusion"] = found.pop("counts")
            by_context = [
                {"context": name, **{key: values[place] for key, values in found.items()}}
                for place, name in enumerate(self.contexts)
            ]
            return {"labels": list(self.labels), "effective_items": plain(self.items), "by_context": by_context}
        by_shots = [
            {
                "shots": shots,
                "confusion": plain(mean.counts[place]),
                "unnamed": plain(mean.unnamed[place]),
                "answered": plain(self.answered[place]),
                **{name: plain(_mean(getattr(scores, name)[:, :, place])) for name in over},
                **{name: _range(getattr(scores, name)[:, :, place]) for name in ("macro_f1", "balanced_accuracy")},
            }
            for place, shots in enumerate(self.shots)
        ]
        last: dict[str, Any] = {
            name: plain(getattr(scores, name)[:, :, -1]) for name in ("macro_f1", "balanced_accuracy", "recall")
        }
        counts = self.by_ordering.counts[:, :, -1]
        last["confusion"] = plain(counts) if counts.size <= _MOST_NUMBERS else None
        return {
            "labels": list(self.labels),
            "effective_items": plain(self.items),
            "heaviest": {"label": self.labels[self.heaviest[0]], "weight": self.heaviest[1]},
            "by_shots": by_shots,
            "by_ordering": {"shots": self.shots[-1], **last},
        }

    def _label_table(self) -> Table:
        recall, answered = self.scores.recall[:, :, -1], self.answered[-1]
        precision, f1 = (_mean(getattr(self.scores, name)[:, :, -1]) for name in ("precision", "f1"))
        mean = _mean(recall)
        is_one = len(self.contexts) == 1
        counts, unnamed = (values[-1] for values in self.by_shots)
        rows = [
            (
                label,
                f"{int(self.items.distinct[place]):,}",
                f"{self.items.by_label[place]:.1f}",
                f"{100 * answered[place]:.1f} %",
                number(mean[place]),
                _wilson(counts[place], place, unnamed[place]) if is_one else _low_to_high(recall[..., place]),
                number(precision[place]),
                number(f1[place]),
            )
            for place, label in enumerate(self.labels)
        ]
        macro, balanced = self.scores.macro_f1[:, :, -1], self.scores.balanced_accuracy[:, :, -1]
        spread = "" if is_one else f" ({_low_to_high(macro)} over {self._over})"
        return Table(
            f"Answers by label{self._at}",
            (
                "label",
                "queries",
                "worth",
                "answered",
                "recall",
                "95 % Wilson" if is_one else f"over {self._over}",
                "precision",
                "F1",
            ),
            rows,
            caption=f"Macro-F1 {number(float(_mean(macro)))}{spread}, balanced accuracy "
            f"{number(float(_mean(balanced)))}. Worth: equally weighted queries, (Σw)²/Σw²; all together "
            f"{self.items.total:.1f}. Answered: share of all answers."
            + ("" if is_one else f" Means over {self._over}, of precision over those that name the label."),
        )

    def _confusion_table(self) -> Table:
        counts, unnamed = self.by_shots.counts[-1], self.by_shots.unnamed[-1]
        has_unnamed = bool(unnamed.any())
        asked = self.items.distinct > 0
        rows = [
            (
                label,
                *(f"{count:.1f}" if asked[place] else "" for count in counts[place]),
                *([f"{unnamed[place]:.1f}" if asked[place] else ""] if has_unnamed else []),
            )
            for place, label in enumerate(self.labels)
        ]
        header = ("right label", *(f"as {label}" for label in self.labels), *(["no label"] if has_unnamed else []))
        mean = "" if len(self.contexts) == 1 else f", mean over {self._over}"
        caption = f"Queries by right label (row) and answer (column), by weight{mean}."
        if not asked.all():
            names = ", ".join(repr(label) for label, is_asked in zip(self.labels, asked, strict=True) if not is_asked)
            caption += f" No query asks for {names}."
        return Table(f"Confusion{self._at}", header, rows, caption=caption)

    def _contexts_table(self) -> Table:
        scores = self.scores
        rows = [
            (
                name,
                number(float(scores.macro_f1[0, place, 0])),
                number(float(scores.balanced_accuracy[0, place, 0])),
                self._lowest(scores.recall[0, place, 0]),
            )
            for place, name in enumerate(self.contexts)
        ]
        return Table("Over the labels", ("context", "macro-F1", "balanced accuracy", "lowest recall"), rows, texts=(3,))

    def _lowest(self, recall: FloatArray) -> str:
        least = int(np.nanargmin(recall)) if np.isfinite(recall).any() else 0
        return f"{number(float(recall[least]))} ({self.labels[least]})"

    def _shots_table(self) -> Table:
        scores = self.scores
        rows = []
        for place, shots in enumerate(self.shots):
            recall = _mean(scores.recall[:, :, place])
            macro, balanced = (getattr(scores, name)[:, :, place] for name in ("macro_f1", "balanced_accuracy"))
            rows.append(
                (
                    str(shots),
                    number(float(_mean(macro))),
                    _low_to_high(macro),
                    number(float(_mean(balanced))),
                    self._lowest(recall),
                )
            )
        header = ("k", "macro-F1", "over orderings", "balanced accuracy", "lowest recall")
        return Table("Over the labels", header, rows, texts=(4,))


def findings(run: FinishedRun) -> AnswersByLabel:
    """The test answers of a finished run label by label; raises `DataError` for a task without labels.

    Cost: O(contexts · queries), and 8·S·P·K·L·(L + 1) bytes.
    """
    if run.has_row_choices:
        raise DataError(f"each query of the task {run.task!r} has its own choices, so there are no labels to tell by")
    if not run.labels:
        raise DataError(f"the task {run.task!r} has no labels, so there is nothing to tell label by label")
    test = run.splits["test"]
    by_context = confusion(test.context_prediction, test.gold, len(run.labels), test.context_state, test.weights)
    spread = Confusion(*(values[test.context_of] for values in by_context))
    return answers_by_label(spread, run.labels, run.shots, test.gold, test.weights, run.study.balance, run.title)


def classes_by_design(run: FinishedRun, split: str = "test") -> npt.NDArray[np.int64] | None:
    """[Q] the class of each query of a split, where the study gave every class its number of queries: components are
    then solved by class. None where queries are a sample of whatever mixture the data are, and of tasks without labels.
    """
    return run.splits[split].gold if run.shared_labels and run.study.balance == "classes" else None


def are_by_design(classes: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> bool:
    """Whether queries of such `classes` [Q], of which nothing else is known, were chosen class by class: they weigh
    differently, or every class has as many as any other but for one."""
    counts = np.unique(np.asarray(classes), return_counts=True)[1]
    return bool((weights is not None and np.ptp(np.asarray(weights))) or (counts.size and np.ptp(counts) <= 1))


def answers_by_label(
    by_ordering: Confusion,
    labels: Sequence[str],
    shots: Sequence[int],
    gold: npt.ArrayLike,
    weights: npt.ArrayLike | None = None,
    balance: str = "classes",
    title: str = "",
) -> AnswersByLabel:
    """The findings from the confusion of every ordering, [S, P, K, L, L] (`iclperm.stats.confusion`).

    Args:
        by_ordering: of the answers [S, P, K, Q].
        labels: [L] words.
        shots: [K] numbers of demonstrations.
        gold: [Q] index of the right label.
        weights: [Q] how often each query counts.
        balance: the study's key: what the queries stand for.
        title: of the figure.
    """
    right = np.asarray(gold)
    weight = np.ones(len(right)) if weights is None else np.asarray(weights)
    heaviest = int(np.argmax(weight))
    return AnswersByLabel(
        labels=tuple(labels),
        shots=tuple(shots),
        by_ordering=by_ordering,
        items=effective_items(right, len(labels), weights),
        heaviest=(int(right[heaviest]), int(weight[heaviest])),
        is_natural=balance == "natural",
        title=title,
    )


def contexts_by_label(
    labels: Sequence[str],
    gold: npt.ArrayLike,
    answered: npt.ArrayLike,
    *,
    state: npt.ArrayLike | None = None,
    contexts: Sequence[str],
) -> AnswersByLabel:
    """The findings of C contexts from the labels that they answered.

    Args:
        labels: [L] words.
        gold: [Q] index of the right label.
        answered: [C, Q] index of the answered label; -1 names none.
        state: [C, Q] integers, 0 = ok.
        contexts: [C] names.
    """
    found = confusion(answered, gold, len(labels), state)
    by_ordering = Confusion(*(values[None, :, None] for values in found))
    return replace(answers_by_label(by_ordering, labels, (), gold), contexts=tuple(contexts))


def _mean(values: FloatArray) -> FloatArray:
    """[...] mean of [S, P, ...] over the orderings in which there is a value; NaN where there is in none."""
    known = ~np.isnan(values)
    count = known.sum(axis=(0, 1))
    total = np.where(known, values, 0.0).sum(axis=(0, 1))
    return np.asarray(np.divide(total, count, out=np.full(np.shape(total), math.nan), where=count > 0))


def _wilson(row: FloatArray, place: int, unnamed: float) -> str:
    """The interval of one context's recall; queries of a context count once."""
    total = int(row.sum() + unnamed)
    return interval_words(wilson_interval(int(row[place]), total), 2) if total else "-"


def _range(values: FloatArray) -> dict[str, Any]:
    known = values[~np.isnan(values)]
    ends = (known.min(), known.max()) if known.size else (math.nan, math.nan)
    return {"mean": plain(float(_mean(values))), "lowest": plain(float(ends[0])), "highest": plain(float(ends[1]))}


def _low_to_high(values: FloatArray) -> str:
    known = values[~np.isnan(values)]
    return f"{known.min():.2f} to {known.max():.2f}" if known.size else "-"
