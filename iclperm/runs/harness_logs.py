"""The answers of a run as sample logs of lm-evaluation-harness 0.4.13, which `iclperm.external` and its tools read.

A file is what the harness writes with ``--log_samples`` for one task: here one context, a set, a permutation and a
number of demonstrations. What the harness calls filtered are the numbers that labels were compared by, so that its
metric follows from them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from iclperm.base.files import replacing, writable
from iclperm.base.outputs import report_folder
from iclperm.errors import ConfigError
from iclperm.runs.answers import Items
from iclperm.runs.folder import RunFolder
from iclperm.runs.run import FinishedRun
from iclperm.runs.run_texts import RunPrompts, damaged_texts, recorded_folder, run_prompts
from iclperm.stats.calibration import calibrated_scores
from iclperm.study.states import NOT_ASKED, OK

_MOST_FILES = 10_000
_NO_ANSWER = "[invalid]"  # as the harness's own filters say that there is none
Row = dict[str, Any]


class _Cell(NamedTuple):
    """A file, with the number of its distinct context."""

    index_set: int
    permutation: int
    shots: int
    context: int


def write_logs(run: FinishedRun, folder: Path, *, with_text: bool = False) -> Path:
    """Writes ``samples_TASK_kK_setS_permP_DATE.jsonl`` for every context of a run, with its test queries.

    Without demonstrations there is one context. Queries that were not asked have no row; the metric of one without an
    answer is null. Raises `ConfigError` for a folder that has such files, for over 10,000 of them, and for a task whose
    data may not be handed on unless ``with_text``; `RunStopped` where the folder cannot be written; and what reading
    prompts raises. Cost: the letters of each prompt once a label; in memory some contexts at a time.
    """
    folder, items = report_folder(folder, run.folder), run.splits["test"]
    cells = [
        _Cell(index_set, permutation, run.shots[place], int(context))
        for (index_set, permutation, place), context in np.ndenumerate(items.context_of)
        if run.shots[place] or not (index_set or permutation)
    ]
    if len(cells) > _MOST_FILES:
        raise ConfigError(
            f"the run has {len(cells):,} contexts, a file each, and {_MOST_FILES:,} are written; export a .parquet file"
        )
    if folder.is_dir() and any(folder.glob("samples_*.jsonl")):
        raise ConfigError(f"{folder} has sample logs, which would be read together with these; name another folder")
    prompts, _ = run_prompts(run)
    if prompts.texts.is_restricted and not with_text:
        raise ConfigError(f"the data of {run.task} may not be handed on, and sample logs hold it; give --with-text")
    if run.folder is not None and not prompts.are_those_of({(cell.index_set, cell.permutation) for cell in cells}):
        raise damaged_texts(recorded_folder(run), "its tokens are not those of the run")
    task, date = re.sub(r"[^\w-]", "_", run.task), datetime.now().isoformat().replace(":", "-")
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for cell, rows in _Logs(run, items, prompts).of(cells):
            name = f"samples_{task}_k{cell.shots}_set{cell.index_set}_perm{cell.permutation}_{date}.jsonl"
            with replacing(folder / name) as unfinished, unfinished.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return folder


@dataclass(frozen=True)
class _Logs:
    run: FinishedRun
    items: Items
    prompts: RunPrompts

    def of(self, cells: Sequence[_Cell]) -> Iterator[tuple[_Cell, Iterator[Row]]]:
        """Each cell and its rows; what was answered is read for some cells at once."""
        num_queries = len(self.items.gold)
        step = max(1, self.run.limits.table_rows // num_queries)
        for begin in range(0, len(cells), step):
            some = cells[begin : begin + step]
            contexts = np.array([cell.context for cell in some])
            if self.items.generated is None:
                distinct, places = np.unique(contexts, return_inverse=True)
                logprobs = self.items.context_logprob[distinct]
                for cell, place in zip(some, places, strict=True):
                    yield cell, self._compared(cell, logprobs[place])
            else:
                written = self.items.generated.table(contexts).select(["text", "answer"])
                for number, cell in enumerate(some):
                    yield cell, self._written(cell, written.slice(number * num_queries, num_queries).to_pylist())

    def _compared(self, cell: _Cell, logprob: NDArray[np.float32]) -> Iterator[Row]:
        """Rows of labels compared by their log-likelihoods [Q, L]."""
        items, is_right, compared = self.items, self._is_right(cell), self.items.normalized(logprob)
        if items.prior is not None:
            compared = calibrated_scores(compared, items.prior[cell.context])
        for query, asked in self._asked(cell):
            arguments = [(asked, text) for text in self.prompts.texts.after(("test", query))]
            row = self._row(query, arguments, str(int(items.gold[query])), {"acc": is_right[query]})
            # Whether a label was the likeliest text is not known.
            row["resps"] = [[[str(value), "None"]] for value in logprob[query, : len(arguments)].tolist()]
            row["filtered_resps"] = [[str(value), "None"] for value in compared[query, : len(arguments)].tolist()]
            yield row

    def _written(self, cell: _Cell, written: Sequence[Row]) -> Iterator[Row]:
        """Rows of answers that the model wrote."""
        is_right = self._is_right(cell)
        for query, asked in self._asked(cell):
            text, answer = written[query]["text"], written[query]["answer"]
            right = str(self.items.right_answers[query])
            row = self._row(query, [(asked, self._generation)], right, {self._metric: is_right[query]})
            row["resps"] = [["" if text is None else text]]
            row["filtered_resps"] = [_NO_ANSWER if answer is None else answer]
            yield row

    def _asked(self, cell: _Cell) -> Iterator[tuple[int, str]]:
        """The queries that were asked, each with its prompt: of an API's chat the messages, as the harness has them."""
        place = cell.index_set, cell.permutation, cell.shots
        for query in np.flatnonzero(self.items.context_state[cell.context] != NOT_ASKED).tolist():
            messages = self.prompts.messages(*place, ("test", query)) if self.prompts.is_of_api else []
            yield query, json.dumps(messages) if messages else self.prompts.text(*place, ("test", query))

    @property
    def _metric(self) -> str:
        """What answers that are written are judged by, in the harness's word where it has one."""
        return "exact_match" if self.run.metric is None else "f1" if self.run.metric.name == "f1" else "grade"

    def _is_right(self, cell: _Cell) -> list[float | None]:
        """1 or 0, or the grade, of each query, None where there is no answer."""
        is_right = self.items.verdicts(np.array(cell.context))
        is_there = self.items.context_state[cell.context] == OK
        return [float(right) if there else None for right, there in zip(is_right, is_there, strict=True)]

    def _row(
        self, query: int, arguments: Sequence[tuple[str, Any]], target: str, metrics: Mapping[str, float | None]
    ) -> Row:
        """A row, still without what was answered, in the harness's order; its document is the query as it is worded."""
        doc = {"query": self.prompts.texts.queries["test"][query].text, "target": self.items.right_answers[query]}
        return {
            "doc_id": int(self.items.examples[query]),
            "doc": doc,
            "target": target,
            "arguments": {
                f"gen_args_{number}": {f"arg_{place}": part for place, part in enumerate(parts)}
                for number, parts in enumerate(arguments)
            },
            "resps": [],
            "filtered_resps": [],
            "filter": "none",
            "metrics": [*metrics],
            "doc_hash": _hash(json.dumps(doc, indent=2, ensure_ascii=False)),
            "prompt_hash": _hash(arguments[0][0]),
            "target_hash": _hash(target),
            **metrics,
        }

    @cached_property
    def _generation(self) -> dict[str, Any]:
        """How texts were ended, in the harness's words."""
        known = {"max_new_tokens": self.run.study.max_new_tokens}
        if self.run.folder is not None:
            known = RunFolder.open(self.run.folder).plan["generation"]
        stops = {"until": known["stop"]} if "stop" in known else {}
        return {**stops, "max_gen_toks": known["max_new_tokens"], "do_sample": False, "temperature": 0.0}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
