"""The sample logs of lm-evaluation-harness: answers of contexts, matched by document."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.errors import DataError, printable
from iclperm.external.columns import is_nothing, number_of
from iclperm.external.jsonl import json_rows
from iclperm.external.log_labels import MOST_LABELS, Labelled, Said, labelled, said
from iclperm.external.tensor import MISSING, Array, ByLabel, Tensor, as_answers, title_of

_METRICS = ("acc", "exact_match", "em", "acc_norm", "f1", "grade")  # the first that a log has says what is right
_TASK = ("task_name", "task")
_QUESTION = ("question", "query", "text", "input", "prompt")
_FILE = re.compile(r"samples_(.+?)(_\d{4}-\d{2}-\d{2}T.*)?\.jsonl", re.IGNORECASE)


@dataclass(frozen=True)
class SampleLog(Tensor):
    """What one filter of a sample log says: answers [1, Q] to Q documents, and which documents those are."""

    documents: tuple[Any, ...] = ()
    """[Q] the documents' numbers or names, `doc_id`."""
    folder: str = ""
    """Name of the folder that the file lies in, which tells files of one name apart."""
    metric: str = ""
    """The metric that its answers are."""
    task: str = ""
    """What the rows, or else the file's name, call the task; empty where neither does."""
    contents: tuple[Mapping[str, str], ...] = ()
    """[Q] what tells documents of one number apart: `doc_hash`, and hashes of document, question and target."""


class LoggedRow(NamedTuple):
    """What one row says."""

    value: float
    """Its metric; NaN where the row says none, as for a request that failed."""
    content: Mapping[str, str]
    """See `SampleLog.contents`."""
    labels: Said | str
    """See `iclperm.external.log_labels`."""


def read_log(path: Path) -> list[SampleLog]:
    """The filters of one sample log, each a context.

    A metric that is null, or NaN, is no answer. Raises DataError, naming the line, for a row without a metric or whose
    answer is outside 0..1, and where one filter has a document twice.
    """
    by_filter: dict[str, dict[Any, LoggedRow]] = {}
    metrics: dict[str, str] = {}
    tasks: set[str] = set()
    for number, row in enumerate(json_rows(path), start=1):
        name = str(row.get("filter", "none"))
        metric = metrics.setdefault(name, next((key for key in _METRICS if key in row), ""))
        if not metric:
            raise DataError(
                f"{path}, line {number} has none of the metrics {', '.join(_METRICS)}; add one, or leave out a log "
                "without right answers, as of perplexities"
            )
        tasks.update(str(row[key]) for key in _TASK if key in row)
        value, document = row.get(metric), row.get("doc_id")
        is_share = isinstance(value, bool | int | float) and 0 <= value <= 1
        if isinstance(document, int | str) and (is_share or is_nothing(value)):
            answers = by_filter.setdefault(name, {})
            if document in answers:
                raise DataError(
                    f"{path} has two rows for doc_id {printable(str(document))} under filter {name!r}; keep one"
                )
            answers[document] = LoggedRow(number_of(value), _content(row), said(row))
        else:
            raise DataError(
                f"{path}, line {number} has {metric} = {printable(str(value))[:40]} for doc_id "
                f"{printable(str(document))[:40]}; it must be 0 or 1, or a grade between, for a number or a name"
            )
    if len(tasks) > 1:
        raise DataError(f"{path} holds the tasks {printable(', '.join(sorted(tasks)))[:80]}; give one task a file")
    many = len(by_filter) > 1
    logs = []
    for name, answers in by_filter.items():
        called = title_of(path) + (f" ({printable(name)})" if many else "")
        values, state, notes = as_answers(np.array([[answer.value for answer in answers.values()]]), title_of(path))
        found: Labelled | str = f"some rows have no {metrics[name]}"
        if state is None:
            found = labelled(
                tuple(answers),
                [answer.labels for answer in answers.values()],
                [answer.value for answer in answers.values()],
                metrics[name],
            )
        lines = [f"{called}: {line}"] if (line := _about_labels(found)) else []
        logs.append(
            SampleLog(
                values,
                "CQ",
                state,
                names=(called,),
                title=title_of(path),
                notes=(f"{called}: answers are its metric {metrics[name]}", *notes, *lines),
                documents=tuple(answers),
                folder=printable(path.resolve().parent.name),
                metric=metrics[name],
                task=_task_of(path, tasks),
                contents=tuple(answer.content for answer in answers.values()),
                by_label=None if isinstance(found, str) else ByLabel(found.labels, found.gold, found.answered[None]),
            )
        )
    return logs


def _about_labels(found: Labelled | str) -> str:
    return found.note if isinstance(found, Labelled) else f"no report by class: {found}"


def _content(row: Mapping[str, Any]) -> dict[str, str]:
    """What a row says of its document, as short hashes: what is not there is left out."""
    found = {}
    if row.get("doc_hash") is not None:
        found["doc_hash"] = str(row["doc_hash"])
    question = [row[key] for key in _QUESTION if row.get(key) is not None]
    for name, value in (("doc", row.get("doc")), ("question", question or None), ("target", row.get("target"))):
        if value is not None:
            text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)
            found[name] = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    return found


def _task_of(path: Path, tasks: set[str]) -> str:
    """The task that rows name, else the file: samples_TASK_2026-01-31T12-00-00.jsonl."""
    if tasks:
        return next(iter(tasks))
    named = _FILE.fullmatch(path.name)
    return named.group(1) if named else ""


class Matched(NamedTuple):
    """C logs over the Q documents that any of them has."""

    values: Array
    """[C, Q] answers."""
    state: npt.NDArray[np.uint8]
    """[C, Q]"""
    by_label: ByLabel | None
    """None where some log has no labels, or not the same ones."""
    notes: tuple[str, ...]


def matched(logs: Sequence[SampleLog]) -> Matched:
    """The answers of logs, document by document.

    A number is one document in two logs where they agree in `doc_hash`, else in the document's or question's text; else
    where both are logs of one task and agree in the target, if they say it. Raises DataError where a number stands for
    different documents, or where nothing tells that it does not, and for logs of different metrics.
    """
    if other := next((log for log in logs if log.metric != logs[0].metric), None):
        raise DataError(
            f"{logs[0].names[0]} is graded by {logs[0].metric}, and {other.names[0]} by {other.metric}: accuracies of "
            "different metrics are not one study's; describe each apart"
        )
    place: dict[Any, int] = {}
    first: dict[Any, tuple[Mapping[str, str], SampleLog]] = {}
    for log in logs:
        for document, content in zip(log.documents, log.contents, strict=True):
            place.setdefault(document, len(place))
            known, other = first.setdefault(document, (content, log))
            if other is not log:
                _refuse_other(document, content, log, known, other)
    values = np.zeros((len(logs), len(place)), np.result_type(*(log.values.dtype for log in logs)))
    state = np.full(values.shape, MISSING, np.uint8)
    for number, log in enumerate(logs):
        at = [place[document] for document in log.documents]
        values[number, at], state[number, at] = log.values[0], 0 if log.state is None else log.state[0]
    found = _matched_labels(logs, place)
    if isinstance(found, str):
        return Matched(values, state, None, (found,) if found else ())
    return Matched(values, state, found, ())


def _matched_labels(logs: Sequence[SampleLog], place: Mapping[Any, int]) -> ByLabel | str:
    """The labels of all documents `place`, or why they have none in common; empty where a log has said that."""
    parts = [log.by_label for log in logs if log.by_label is not None]
    if len(parts) < len(logs):
        return ""
    labels = tuple(dict.fromkeys(label for part in parts for label in part.labels))
    if len(labels) > MOST_LABELS:
        return f"no report by class: the logs have {len(labels)} labels together, more than {MOST_LABELS}"
    gold, answered = np.full(len(place), -1), np.full((len(logs), len(place)), -1)
    for number, (log, part) in enumerate(zip(logs, parts, strict=True)):
        at = np.array([place[document] for document in log.documents])
        index = np.array([*map(labels.index, part.labels), -1])
        right = index[part.gold]
        other = np.flatnonzero((gold[at] >= 0) & (gold[at] != right))
        if other.size:
            document = printable(str(log.documents[int(other[0])]))[:40]
            return f"no report by class: doc_id {document} has another right label in {log.names[0]} than before"
        gold[at], answered[number, at] = right, index[part.answered[0]]
    return ByLabel(labels, gold, answered)


def _refuse_other(
    document: Any, content: Mapping[str, str], log: SampleLog, known: Mapping[str, str], other: SampleLog
) -> None:
    """Raises DataError unless what two logs say of a number's document shows that it is one."""
    shared = [name for name in ("doc_hash", "doc", "question") if name in content and name in known][:1]
    is_shown = bool(shared) or log.task == other.task != ""
    compared = shared if shared == ["doc_hash"] else [*shared, *({"target"} & content.keys() & known.keys())]
    if any(content[name] != known[name] for name in compared):
        raise DataError(
            f"doc_id {printable(str(document))} is another document in {log.names[0]} than in {other.names[0]}: these "
            "are different tasks; describe each apart"
        )
    if not is_shown:
        raise DataError(
            f"{log.names[0]} and {other.names[0]} have neither doc_hash nor the documents' text, and are named as "
            "different tasks: nothing tells that a doc_id is one document in both; describe each apart, or name both "
            "samples_TASK.jsonl in folders of their own"
        )


def distinct(names: Sequence[str]) -> tuple[str, ...]:
    """The names, with a number behind each that occurs more than once."""
    seen: dict[str, int] = {}
    numbered = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        numbered.append(name if names.count(name) == 1 else f"{name} #{seen[name]}")
    return tuple(numbered)
