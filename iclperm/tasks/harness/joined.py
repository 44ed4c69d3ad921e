"""A task of lm-evaluation-harness as the keys of a task of ours, and its rows in the columns that these name.

`HarnessTask` renders each row; what it makes becomes the columns ``query`` and ``before`` (a demonstration up to its
answer), or ``query``, ``shown`` (a demonstration) and ``answers`` where answers are generated. What cannot
be had is refused in one line, with the remedy.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from iclperm.errors import ConfigError, DataError
from iclperm.tasks.examples import ReadRow
from iclperm.tasks.filters import FiltersChoices, golds_text
from iclperm.tasks.harness.files import files_of, members, read_harness
from iclperm.tasks.harness.rows import HarnessTask, RenderedRow
from iclperm.tasks.harness.settings import RENDERED
from iclperm.tasks.harness.wordings import choices_of
from iclperm.tasks.loaders import Row
from iclperm.tasks.row_choices import MOST_CHOICES, OwnChoices

_SHOTS = 4  # where a file names no num_fewshot, which the harness reads as 0: a study of demonstrations has some
_MAX_NAME = 64  # characters of a task's name
_FILES = frozenset({"json", "csv", "parquet"})  # data sets that are files of the user's own
_OF_ROWS = ("doc_to_text", "doc_to_target", "doc_to_choice", "gen_prefix", "target_delimiter")
_OF_CHOICES = frozenset({"acc", "acc_norm", "acc_bytes", "acc_mutual_info"})
HALF = 0.5
"""The share of the queries, where a file takes demonstrations from the same split."""


class HarnessRows:
    """A task file: the ``keys`` of a `Task`, and `rows` in its columns.

    ``content`` are the keys of the file at ``path``, with what it includes; ``part`` names one of its filter pipelines,
    or, of a group, one of its tasks, and its pipeline after a colon. ``digest`` is the SHA-256 of what makes a row's
    text. Raises `ConfigError` naming the key.
    """

    def __init__(self, content: Mapping[str, Any], path: Path, part: str = "") -> None:
        content, name, part = _of_group(content, path, part)
        self._task = task = HarnessTask.from_keys(content, name)
        self._refuse_the_unlike()
        pipeline = _pipeline(task, part)
        self._labels = self._fixed_labels()
        named = f"{task.name}-{part}" if part else task.name
        self.keys = {
            "name": _short(named),
            "source": f"task file of lm-evaluation-harness, {path.name}",
            "data": self._data(),
            "instruction": self._description(),
            "instruction_end": "",
            "query": "{{ query }}",
            "separator": task.delimiters[1],
            "shots": self._shots(),
            **(self._chosen() if pipeline is None else self._generated(pipeline)),
        }

    @property
    def digest(self) -> str:
        """SHA-256 of the keys that make texts of a row."""
        settings, shots = self._task.settings, self._task.settings.fewshot_config
        kept = settings.model_dump(mode="json", include=set(_OF_ROWS))
        kept["fewshot_config"] = shots.model_dump(mode="json", include=set(_OF_ROWS), exclude_none=True)
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()

    def columns(self, is_shown: bool) -> tuple[frozenset[str], frozenset[str]]:
        """The columns that a row needs, and those that it may have; ``is_shown`` where it may be a demonstration."""
        columns, optional = self._task.columns_of(is_shown)
        return columns - optional, optional

    def rows(self, found: Sequence[Row], is_shown: bool) -> list[ReadRow]:
        """The rows as the task has them; raises `DataError` naming the row's place, and `ConfigError` where choices
        are put before what is scored."""
        places, docs = [place for place, _ in found], [row for _, row in found]
        rendered = self._task.render_all(docs, places)
        for place, row in zip(places, rendered, strict=True):
            if len(row.queries) > 1:
                raise ConfigError(
                    f"{place}: 'doc_to_text' gives the position of a choice, so that contexts differ by choice and one "
                    "text is scored after them all, as in WinoGrande; here all choices of a query share its context"
                )
        shown = self._task.shown_rows(docs, places) if is_shown else [("", "")] * len(docs)
        return [
            self._row(place, row, before, answer)
            for place, row, (before, answer) in zip(places, rendered, shown, strict=True)
        ]

    def _row(self, place: str, row: RenderedRow, before: str, answer: str) -> ReadRow:
        if row.choices is None:
            return ReadRow(place, {"query": row.query, "shown": before + answer}, 0, golds_text(row.answers))
        fields = {"query": row.query, "before": before}
        golds = tuple(sorted(set(row.golds)))
        if not golds:
            raise DataError(
                f"{place}: the key 'doc_to_target' gives none of the {len(row.choices)} choices as right; repair the "
                "row, or name a split that has right answers"
            )
        if self._labels is None:
            if not 2 <= len(row.choices) <= MOST_CHOICES or not all(map(str.strip, row.choices)):
                raise DataError(
                    f"{place}: the key 'doc_to_choice' gives {len(row.choices)} choices, and a row needs 2 to "
                    f"{MOST_CHOICES}, none of them blank; repair the row"
                )
            own = OwnChoices(row.choices, golds)
            return ReadRow(place, fields, 0, answer or row.choices[golds[0]], own)
        if len(golds) > 1:
            raise DataError(
                f"{place}: the key 'doc_to_target' gives {len(golds)} right choices, and labels that are the same for "
                "all rows have one; write a task with the keys 'choices' and 'gold'"
            )
        return ReadRow(place, fields, golds[0], self._labels[golds[0]])

    def _refuse_the_unlike(self) -> None:
        """Raises `ConfigError` for what a study of demonstrations cannot ask, or judges otherwise."""
        task, settings = self._task, self._task.settings
        if task.output.startswith("loglikelihood"):
            raise ConfigError(
                f"the key 'output_type' is {task.output!r}, one text without choices; only multiple_choice and "
                "generate_until are studied here"
            )
        if not task.wording("description").is_fixed:
            raise ConfigError(
                "the key 'description' reads a column, so that prompts of different queries open differently; write "
                "the column into 'doc_to_text', or leave it out"
            )
        if task.output == "multiple_choice":
            return
        if task.generation.is_sampled:
            raise ConfigError("the key 'generation_kwargs' samples; set do_sample: false")
        if settings.repeats > 1:
            raise ConfigError(f"the key 'repeats' is {settings.repeats}; one text a prompt is written: set it to 1")
        metrics = [metric.metric for metric in task.metrics]
        if "exact_match" not in metrics:
            raise ConfigError(
                f"the key 'metric_list' asks for {', '.join(metrics)}; of generated texts exact_match is computed: "
                "add {metric: exact_match}, or judge an export with the harness (iclperm export --format lm-eval)"
            )

    def _fixed_labels(self) -> tuple[str, ...] | None:
        """The choices, where every row has the same ones."""
        shots = self._task.settings.fewshot_config
        wording = self._task.wording("doc_to_choice")
        is_one = shots.doc_to_choice is None and shots.doc_to_target is None
        if self._task.output != "multiple_choice" or not wording.is_fixed or not is_one:
            return None
        (value,) = wording.values([{}], ["the key 'doc_to_choice'"])
        return choices_of(value)

    def notes(self, *, is_halved: bool) -> list[str]:
        """What is otherwise than in the harness, in a line each; ``is_halved`` where one split is both."""
        task = self._task
        metrics = {metric.metric for metric in task.metrics}
        others = sorted({*task.left_out, *(metrics - (_OF_CHOICES | {"exact_match"}))})
        said = [f"of the task file's metrics {', '.join(others)} is not computed here"] if others else []
        splits = task.splits
        if is_halved and splits.samples is None and splits.demonstrations == splits.queries:
            said.append(
                f"the file takes demonstrations and queries from one split, {splits.queries}: one half of its rows "
                "by content is demonstrations, the other queries"
            )
        return said

    def _data(self) -> dict[str, Any]:
        task, splits = self._task, self._task.splits
        if splits.queries is None:
            raise ConfigError("the file names no test data; give it the key 'test_split' or 'validation_split'")
        train: Any = splits.demonstrations if splits.samples is None else [dict(row) for row in splits.samples]
        found: dict[str, Any] = {"train": train, "test": HALF if train == splits.queries else splits.queries}
        if splits.validation not in (None, train, splits.queries):
            found["dev"] = splits.validation
        loading = task.settings.dataset_kwargs
        path = task.settings.dataset_path or task.name
        if path in _FILES and loading.data_files is not None:
            return {split: self._file(named) for split, named in found.items()}
        if loading.revision and (loading.data_files or loading.data_dir or loading.split or loading.field):
            raise ConfigError(
                "the key 'dataset_kwargs' names files of the data set, which are not read from the hub; leave out its "
                "'revision' and give their folder with --data"
            )
        dataset: dict[str, Any] = {"dataset": path, "config": task.settings.dataset_name, "revision": loading.revision}
        return {key: value for key, value in dataset.items() if value is not None} | found

    def _file(self, named: Any) -> Any:
        """The files of a split; rows that the task file holds, and shares, as they are."""
        if not isinstance(named, str):
            return named
        files = self._task.settings.dataset_kwargs.data_files
        files = files if isinstance(files, dict) else {"train": files or []}
        if named not in files:
            raise ConfigError(f"the key 'data_files' names no file for the split {named!r}; add it")
        return files[named]

    def _description(self) -> str:
        (text,) = self._task.wording("description").values([{}], ["the key 'description'"])
        return text or ""

    def _shots(self) -> int:
        samples, named = self._task.splits.samples, self._task.settings.num_fewshot
        return min(_SHOTS, _SHOTS if samples is None else len(samples)) if named is None else named

    def _chosen(self) -> dict[str, Any]:
        """What multiple choice has of its own."""
        between = self._task.settings.target_delimiter
        own = {"choices": "choices", "gold": "gold"}
        return {
            "fields": {"query": "query", "before": "before"},
            "demonstration": "{{ before }}{{ label }}",
            "continuation": f"{{{{ {json.dumps(between)} }}}}{{{{ label }}}}",
            **(own if self._labels is None else {"label_field": "gold", "labels": list(self._labels)}),
        }

    def _generated(self, pipeline: FiltersChoices) -> dict[str, Any]:
        """What generation has of its own."""
        task = self._task
        metric = next(metric for metric in task.metrics if metric.metric == "exact_match")
        judged = metric.model_dump(
            include={"ignore_case", "ignore_punctuation", "ignore_numbers"}, exclude_defaults=True
        )
        return {
            "fields": {"query": "query", "shown": "shown"},
            "demonstration": "{{ shown }}",
            "answer": {
                "field": "answers",
                "check": "exact_match",
                "filters": pipeline.model_dump(mode="json", exclude_defaults=True),
                "ignore": metric.regexes_to_ignore or [],
                **metric.model_dump(include=judged, exclude_defaults=True),
            },
            "stop": [stop for stop in task.stop if stop],
            "max_new_tokens": task.generation.most_tokens,
        }


def _short(name: str) -> str:
    """A name that a task can have; what is cut off is told by the start of the name's SHA-256."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
    if len(plain) <= _MAX_NAME:
        return plain
    return f"{plain[: _MAX_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _of_group(content: Mapping[str, Any], path: Path, part: str) -> tuple[Mapping[str, Any], str, str]:
    """The keys of the task that is meant, its name, and what of ``part`` is left; those of a group's task have what
    the group changes of it."""
    if "group" not in content and not isinstance(content.get("task"), list):
        return content, path.stem, part
    name, _, rest = part.partition(":")
    listed = members(content)
    changes = next((member.changes for member in listed if member.name == name), None)
    if changes is None:
        named = ", ".join(member.name for member in listed[:20]) + (", …" if len(listed) > 20 else "")
        said = f"{name!r} is none of its tasks" if name else "the file is a group of tasks"
        raise ConfigError(f"{said}; name one, {path.name}:TASK: {named}")
    files = files_of(name, path.resolve().parent)
    if len(files) != 1:
        found = ", ".join(file.stem for file in files[:20]) or "none"
        raise ConfigError(f"the files below {path.parent} that are called {name!r}: {found}; name a task's own file")
    return {**read_harness(files[0]), **changes}, files[0].stem, rest


def _pipeline(task: HarnessTask, part: str) -> FiltersChoices | None:
    """The pipeline that is meant; None of a multiple choice, where there is nothing to read."""
    named = {pipeline.name: pipeline for pipeline in task.pipelines}
    if part and (len(named) < 2 or part not in named):
        said = f"they are {', '.join(named)}" if len(named) > 1 else "leave out what follows the colon"
        raise ConfigError(f"there is no filter pipeline {part!r} to choose; {said}")
    if not named:
        return None
    if len(named) > 1 and not part:
        raise ConfigError(
            f"the key 'filter_list' has {len(named)} pipelines, each of which is a metric of its own: "
            f"{', '.join(named)}; name one after the file: FILE.yaml:{next(iter(named))}"
        )
    pipeline = named[part] if part else next(iter(named.values()))
    if pipeline.reads_choices:
        raise ConfigError(
            f"the pipeline {pipeline.name!r} reads with multi_choice_regex, which looks at each row's choices; use "
            f"another pipeline, or {RENDERED}"
        )
    if pipeline.num_texts > 1:
        raise ConfigError(
            f"the pipeline {pipeline.name!r} takes {pipeline.num_texts} texts a query; one is written here"
        )
    return pipeline
