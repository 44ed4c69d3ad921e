"""What a finished run says: its summary, its warnings, the findings of any kind, and the report that holds them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from iclperm.base import remote
from iclperm.base.files import writable
from iclperm.base.outputs import folder_apart
from iclperm.errors import ConfigError, RunError
from iclperm.report import write_report
from iclperm.report.notebook import summary_html, three_lines
from iclperm.report.parts import Findings, number, percent, plain
from iclperm.report.wording import Reworded
from iclperm.runs.checks import uneven_labels
from iclperm.runs.harness_logs import write_logs
from iclperm.runs.prompt import RunPrompt
from iclperm.runs.run import FinishedRun, RunReport
from iclperm.stats import Curve
from iclperm.studies import calibration, classes, findings_of, generation, precision, rereading
from iclperm.studies.adaptive import refuse_other_kinds
from iclperm.studies.calibration import ContextualCalibration
from iclperm.studies.classes import AnswersByLabel
from iclperm.studies.generation import Generation
from iclperm.studies.missing import Missing, missing_of, missing_of_asked
from iclperm.studies.rereading import Rereading
from iclperm.studies.sensitivity import Sensitivity
from iclperm.studies.sensitivity_over_shots import SensitivityOverShots
from iclperm.studies.sensitivity_summary import SensitivitySummary
from iclperm.studies.taking import WantedPrompt, recommended_by, take
from iclperm.study import kinds
from iclperm.study.states import OK
from iclperm.study.study import Study
from iclperm.tasks.task import Task

COMPARED = {
    "sum": "",
    "mean": ", labels compared by the mean over tokens",
    "bytes": ", labels compared by the mean over bytes",
    "characters": ", labels compared by the mean over characters",
    "pmi": ", labels compared by pointwise mutual information",
}
SCORED = {"loglikelihood": "", "first_token": ", labels compared by their first token", "generate": ", generated"}


_OWN = "each query has demonstrations of its own, and an order is one of their ranks, the same for all queries"
_OWN_OF_ONE = f"{_OWN}; with one retriever sensitivity to selection is not defined"
_OWN_OF_SEVERAL = f"{_OWN}; sets are retrievers, so selection is how far these differ, and says nothing of others"


@dataclass(frozen=True, repr=False, eq=False)
class Run(FinishedRun):
    """A finished run, and what it says: see `FinishedRun` for its answers."""

    @property
    def headline(self) -> str:
        """What was run, in a line: the task, the model, the sizes, and how labels were compared."""
        sets, permutations, _ = self.splits["test"].context_of.shape
        others = "".join(f", {len(items.gold)} {name} queries" for name, items in self.splits.items() if name != "test")
        return (
            f"{self.task} on {self.study.model_name}: {sets} sets x {permutations} permutations, "
            f"k = {', '.join(map(str, self.shots))}, {len(self.gold)} queries{others}{COMPARED[self.study.normalize]}"
            f"{SCORED[self.study.scoring or 'loglikelihood']}"
            f"{'' if self.metric is None else f', graded by {self.metric.words}'}"
            f"{'' if self.study.chat == 'none' else ', as chat'}"
            f"{'' if self.study.calibration == 'none' else ', calibrated by content-free queries'}"
        )

    def __repr__(self) -> str:
        """Three lines: what was run, accuracy on test queries at the most demonstrations, and where it is."""
        chance = "" if self.chance is None else f" (chance {self.chance:.3f})"
        missing = f"; {percent(self.missing.answers)} of all answers are missing" if self.missing.answers else ""
        return three_lines(
            f"Run of {self.headline}",
            f"{self.said('accuracy')} {number(self._mean_accuracy, 3)} at k = {self.shots[-1]}{chance}{missing}",
            self.folder,
            "summary(), findings(), to_pandas(), prompt() and write_report()",
        )

    def _repr_html_(self) -> str:
        """The same with the brief tables and the conclusion, for a notebook."""
        alert = self.missing.first_line()
        return summary_html(
            [*repr(self).split("\n"), *([] if alert is None else [alert])],
            self.findings(),
            self.warnings,
        )

    @cached_property
    def _mean_accuracy(self) -> float:
        """Share of right answers, or mean grade, of those that are there, at the most demonstrations, by weight; NaN
        without any."""
        items = self.splits["test"]
        verdicts = items.verdicts(items.context_of[:, :, -1])
        is_there = items.context_state[items.context_of[:, :, -1]] == OK
        total = float((is_there @ items.weights).sum())
        return float((np.multiply(verdicts, is_there) @ items.weights).sum()) / total if total else math.nan

    def summary(self) -> SensitivitySummary:
        """Order and selection sensitivity and what else is said about the largest number of shots; made once."""
        return self._sensitivity.summary

    @property
    def _sensitivity(self) -> Sensitivity:
        return cast("Sensitivity", self.findings(kinds.SENSITIVITY.name))

    @property
    def warnings(self) -> list[str]:
        """What should be known before the numbers are believed."""
        test = self.splits["test"]
        warnings = uneven_labels(self.label_tokens, self.study.normalize)
        warnings += [warning for about in self.asides.values() for warning in about.warnings]
        warnings += _about_replies(self.report, self.study)
        warnings += [] if self.metric is None else [self.metric.about]
        if self.study.design not in ("random", "exhaustive"):
            warnings.append(
                f"orders are of a {self.study.design.replace('_', '-')} design: order against selection at the most "
                "demonstrations takes that into account, every other interval takes orders for independent draws"
            )
        if self.study.is_per_query:
            warnings.append(_OWN_OF_ONE if self.study.sets == 1 else _OWN_OF_SEVERAL)
        highest = int(test.context_prediction.max(initial=-1))
        is_label = 0 <= highest < len(self.shared_labels)
        if is_label and all(np.isin(answers, (-1, highest)).all() for answers in test.context_prediction):
            warnings.append(
                f"every answer in every cell is {self.labels[highest]!r}: accuracy is the share of that label, and "
                "nothing else is measured"
            )
        return warnings

    @cached_property
    def missing(self) -> Missing:
        """How many answers to test queries are not there, over the distinct contexts."""
        test = self.splits["test"]
        if self.decisions:
            return missing_of_asked(test.context_state, test.weights)
        return missing_of(test.context_state[np.unique(test.context_of)], test.weights)

    def curve(self) -> Curve | None:
        """Accuracy over the numbers of shots; None where only one was run."""
        return self._sensitivity.curve

    def over_shots(self) -> SensitivityOverShots | None:
        """Order and selection sensitivity over the numbers of shots; None where fewer than two have demonstrations."""
        return self._sensitivity.over_shots

    def said(self, text: str) -> str:
        """A text about accuracy, in words that fit what answers are graded by."""
        return text if self.metric is None else self.metric.said(text)

    def _in_words(self, findings: Findings) -> Findings:
        """Findings whose texts say accuracy in words that fit what answers are graded by."""
        return findings if self.metric is None else Reworded(findings, self.metric.said)

    def findings(self, kind: str | None = None) -> Findings:
        """What the study's kind, or another ``kind`` of the same design, makes of the answers; made once.

        Raises `ConfigError` for a kind that there is not, and `DataError` where the run lacks what it needs.
        """
        kind = kind or self.study.kind
        if kind not in self._findings:
            refuse_other_kinds(self, kind)
            self._findings[kind] = findings_of(self, kind)
        return self._in_words(self._findings[kind])

    @cached_property
    def _findings(self) -> dict[str, Findings]:
        return {}

    def prompt(
        self,
        *,
        index_set: int | None = None,
        permutation: int | None = None,
        shots: int | None = None,
        query: int | Mapping[str, Any] | None = None,
        best: bool = False,
    ) -> RunPrompt:
        """One prompt of this run, exactly as it was scored, with its accuracy on test.

        By default the one that the study's findings recommend: of a search the ordering that it chose. ``index_set``,
        ``permutation`` and ``shots`` (by default the most) name another; ``best`` is the most accurate one, on dev
        queries where there are some. ``query`` is the number of a test query, or a mapping of the task's fields to
        those of any other; without it the prompt ends in placeholders (`RunPrompt.placeholders`). Reads the data again.

        Raises `ConfigError` where nothing is recommended, or there is no such prompt; `DataError` where the data is not
        what the run was made with.
        """
        wanted = WantedPrompt(index_set, permutation, shots, query, best)
        if best and self.study.cells != "crossed":
            raise ConfigError(
                "each ordering was asked queries of its own, too few to tell which is the best; name one, or run "
                "cells: crossed"
            )
        if best and self.decisions:
            raise ConfigError(
                "this run asked each ordering other queries, so no best is known but what a search recommends; leave "
                "best out, or name one"
            )
        return take(self, wanted, recommended_by(self.findings()) if wanted.is_open else None)

    def export(
        self, path: str | Path, format: Literal["table", "lm-eval"] = "table", *, with_text: bool = False
    ) -> Path | str:
        """Writes the canonical table to a file (`FinishedRun.export`), or as ``lm-eval`` sample logs into a folder.

        Those are files as lm-evaluation-harness 0.4.13 writes them, one for each set, permutation and number of shots
        (`iclperm.runs.harness_logs.write_logs`); of a task whose data may not be handed on only ``with_text``. Raises
        `ConfigError` for another format, and for the folder of a run.
        """
        if format == "table":
            return super().export(path)
        if format != "lm-eval":
            raise ConfigError(f"there is no format {format!r}; give 'table' or 'lm-eval'")
        if not remote.is_url(path):
            path = folder_apart(path)
        with remote.written(path) as (folder, _):
            assert folder is not None
            write_logs(self, folder, with_text=with_text)
        return remote.shown(str(path)) if remote.is_url(path) else Path(path)

    def report_content(self, kind: str | None = None) -> dict[str, Any]:
        """What report.json holds, JSON-safe."""
        found = self.findings(kind)
        content = {"kind": kind or self.study.kind, **found.to_dict(), "normalize": self.study.normalize}
        if self.metric is not None:
            content["metric"] = self.metric.to_dict()
        content["calibration"] = self.study.calibration
        content["missing"] = plain(self.missing) | {"first_line": self.missing.first_line()}
        content |= {key: about.to_dict() for key, about in self.asides.items()}
        return {**content, "warnings": [*found.warnings, *self.warnings]}

    @cached_property
    def calibration(self) -> ContextualCalibration | None:
        """What calibration changed, k by k; None for a study without, and where orderings were asked other queries."""
        return None if self.study.calibration == "none" or self.decisions else calibration.findings(self)

    @cached_property
    def generation(self) -> Generation | None:
        """How generated answers were come by, k by k; None for a study that generates none, and for
        an adaptive search."""
        return None if self.splits["test"].generated is None or self.decisions else generation.findings(self)

    @cached_property
    def classes(self) -> AnswersByLabel | None:
        """Recall, F1 and confusion label by label, by ordering and k by k; None for a task without labels, and
        where an adaptive search asked each ordering other queries."""
        return classes.findings(self) if self.shared_labels and not self.decisions else None

    def read_by(self, *tasks: str | Path | Task) -> Rereading:
        """The generated texts of test read once more, by the rules of other tasks: names, files, or `Task`s.

        ``FILE.yaml:NAME`` is a filter pipeline of a file of lm-evaluation-harness, so that GSM8K's `strict-match` and
        `flexible-extract` stand side by side. No model is asked. It is an aside of the report from then on. Raises
        `ConfigError` for no task, one with labels, and an adaptive search; `DataError` for a run without such texts.
        """
        if self.decisions or not tasks:
            raise ConfigError(
                "this run asked its orderings different queries; read the texts of one that asked everything"
                if tasks
                else "no task is named by whose rules to read; give one"
            )
        found = rereading.findings(self, [task if isinstance(task, Task) else Task.load(task) for task in tasks])
        vars(self)[rereading.ASIDE] = found
        return found

    @property
    def asides(self) -> dict[str, Findings]:
        """What is reported beside any kind, by its key in report.json."""
        found: dict[str, Findings | None] = {
            classes.ASIDE: self.classes,
            calibration.ASIDE: self.calibration,
            generation.ASIDE: self.generation,
            precision.ASIDE: precision.findings(self) if self.looks else None,
        }
        said = {key: self._in_words(about) for key, about in found.items() if about is not None}
        again: Rereading | None = vars(self).get(rereading.ASIDE)  # in the words of each reading
        if again is not None:
            said[rereading.ASIDE] = again
        return said

    def write_report(self, folder: str | Path | None = None, kind: str | None = None) -> list[Path]:
        """Writes figures and report.json into ``folder``, by default the run's own; returns their paths."""
        target = folder or self.folder
        if target is None:
            raise RunError("this run is in memory only; name a folder for its report")
        with writable(Path(target)):
            beside = {stem: plot for about in self.asides.values() for stem, plot in about.plots().items()}
            return write_report(target, self.findings(kind), self.report_content(kind), beside, self.folder)


def _about_replies(report: RunReport, study: Study) -> Iterator[str]:
    """What an API's replies leave in doubt."""
    if report.num_listed and study.scoring != "first_token":
        yield "labels are compared by their first tokens alone: the API gives no log-likelihoods of whole labels"
    if report.num_bounds:
        yield (
            f"{report.num_bounds / report.num_listed:.1%} of the log-likelihoods of labels are upper bounds, because "
            "the API lists only the likeliest tokens: the answers hold, but what needs every log-likelihood "
            "(calibration error, near-ties, some criteria of a search) is left out"
        )
    if report.num_drawn and study.endpoint is not None and study.endpoint.draws == 1:
        yield (
            f"{report.num_drawn:,} answers are draws, because the model takes no temperature or was not asked at 0: "
            "asked again it may answer otherwise, and that is part of every spread here; set the endpoint's draws to 3"
        )
    if report.num_damaged_replies:
        yield (
            f"{report.num_damaged_replies} kept replies of the API are damaged: what was needed of them was paid for "
            "again; iclperm verify names them"
        )
