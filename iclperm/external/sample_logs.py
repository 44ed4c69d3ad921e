"""The sample logs of lm-evaluation-harness: answers of contexts, matched by document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from iclperm.errors import DataError, printable
from iclperm.external.jsonl import json_rows
from iclperm.external.tensor import MISSING, Tensor, title_of

_METRICS = ("acc", "exact_match", "em", "acc_norm")  # the first that a log has says what is right


@dataclass(frozen=True)
class SampleLog(Tensor):
    """What one filter of a sample log says: answers [1, Q] to Q documents, and which documents those are."""

    documents: tuple[Any, ...] = ()
    """[Q] the documents' numbers or names, `doc_id`."""
    folder: str = ""
    """Name of the folder that the file lies in, which tells files of one name apart."""
    hashes: tuple[Any, ...] = ()
    """[Q] `doc_hash`, which differs between documents of the same number; None where the log has none."""


def read_log(path: Path) -> list[SampleLog]:
    """The filters of one sample log, each a context.

    Raises DataError, naming the line, for a row without a metric or whose answer is not 0 or 1, and where one filter
    has a document twice.
    """
    by_filter: dict[str, dict[Any, tuple[int, Any]]] = {}
    metrics: dict[str, str] = {}
    for number, row in enumerate(json_rows(path), start=1):
        name = str(row.get("filter", "none"))
        metric = metrics.setdefault(name, next((key for key in _METRICS if key in row), ""))
        if not metric:
            raise DataError(f"{path}, line {number} has none of the metrics {', '.join(_METRICS)}")
        value, document = row.get(metric), row.get("doc_id")
        if isinstance(value, bool | int | float) and value in (0, 1) and isinstance(document, int | str):
            answers = by_filter.setdefault(name, {})
            if document in answers:
                raise DataError(
                    f"{path} has two rows for doc_id {printable(str(document))} under filter {name!r}; keep one"
                )
            answers[document] = (int(value), row.get("doc_hash"))
        else:
            raise DataError(
                f"{path}, line {number} has {metric} = {printable(str(value))[:40]} for doc_id "
                f"{printable(str(document))[:40]}; it must be 0 or 1 for a number or a name"
            )
    many = len(by_filter) > 1
    logs = []
    for name, answers in by_filter.items():
        called = title_of(path) + (f" ({printable(name)})" if many else "")
        logs.append(
            SampleLog(
                np.array([[value for value, _ in answers.values()]], np.uint8),
                "CQ",
                names=(called,),
                title=title_of(path),
                notes=(f"{called}: answers are its metric {metrics[name]}",),
                documents=tuple(answers),
                folder=printable(path.resolve().parent.name),
                hashes=tuple(content for _, content in answers.values()),
            )
        )
    return logs


def matched(logs: Sequence[SampleLog]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Answers and states uint8 [C, Q] of C logs over the Q documents that any of them has.

    Raises DataError where a number stands for different documents in two logs.
    """
    place: dict[Any, int] = {}
    content: dict[Any, tuple[Any, str]] = {}
    for log in logs:
        for document, found in zip(log.documents, log.hashes, strict=True):
            place.setdefault(document, len(place))
            known, first = content.setdefault(document, (found, log.names[0]))
            if None not in (known, found) and known != found:
                raise DataError(
                    f"doc_id {printable(str(document))} is another document in {log.names[0]} than in {first}: these "
                    "are different tasks; describe each apart"
                )
    values = np.zeros((len(logs), len(place)), np.uint8)
    state = np.full(values.shape, MISSING, np.uint8)
    for number, log in enumerate(logs):
        at = [place[document] for document in log.documents]
        values[number, at], state[number, at] = log.values[0], 0
    return values, state


def distinct(names: Sequence[str]) -> tuple[str, ...]:
    """The names, with a number behind each that occurs more than once."""
    seen: dict[str, int] = {}
    numbered = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        numbered.append(name if names.count(name) == 1 else f"{name} #{seen[name]}")
    return tuple(numbered)
