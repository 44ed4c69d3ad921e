"""The study of a recommendation from a data file or a task: the task that is proposed, and sizes that its data has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from iclperm.base.files import write_once
from iclperm.base.outputs import output
from iclperm.errors import ConfigError, DataError
from iclperm.prompts.design import num_different_sets
from iclperm.runs.lengths import prompt_lengths
from iclperm.studies.recommending import LEAST_MOST
from iclperm.study import kinds
from iclperm.study.study import Study
from iclperm.tasks.loaders import SUFFIXES
from iclperm.tasks.proposal import propose
from iclperm.tasks.published import Split
from iclperm.tasks.task import Task

MOST_QUERIES: Mapping[str, int] = {"queries": 500, "dev_queries": 400}
"""What is asked of larger splits by default."""


def recommended_study(
    data: str | Path,
    out: str | Path | None,
    choices: Mapping[str, Any],
    *,
    label: str | None = None,
    texts: Sequence[str] = (),
) -> Study:
    """The study that recommends a prompt for ``data``: a data file, a task file, or the name of a built-in task.

    For a data file a task is proposed and written beside ``out``, as OUT-task.yaml, unless it is there already: that is
    then used as it is. ``choices`` are keys of the study; where they name no sizes, these follow from the data: up to
    500 test and 400 dev queries, and the largest k of 8 (or the task's own) of which there are enough different sets
    and which fits the model's window. Raises `ConfigError` or `DataError` for data without labels or too few rows.
    """
    is_file = Path(data).suffix in SUFFIXES
    if not is_file and (label is not None or texts):
        raise ConfigError(f"{data} is a task, which names its columns itself; leave out label and text")
    given = {key: value for key, value in choices.items() if value is not None}
    path = _task_file(Path(data), out) if is_file else Path(data)
    proposed = None
    if is_file and not path.is_file():
        proposed = propose(Path(data), path.parent, label=label, texts=texts)
    task = (proposed and proposed.task) or Task.load(path, given.get("data"))
    if is_file and (path.parent / str(task.data.train)).resolve() != Path(data).resolve():
        raise ConfigError(f"{path} is there, for other data than {data}; name another folder with out, or remove it")
    for key, count in _usable(task).items():
        if count < kinds.LEAST_QUERIES:
            split = "test" if key == "queries" else "dev"
            raise DataError(
                f"task {task.name!r} has {count} usable {split} rows, and a recommendation needs {kinds.LEAST_QUERIES} "
                f"at least; add rows, or enlarge the share of {split}"
            )
        given.setdefault(key, min(MOST_QUERIES[key], count))
    study = Study(kind=kinds.RECOMMEND.name, task=str(path), **given)
    if study.shots is None:
        study = study.model_copy(update={"shots": _largest(study, task)})
    if proposed is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_once(path, proposed.text.encode())
    return study


def _task_file(data: Path, out: str | Path | None) -> Path:
    """Where the task for a data file is, or is to be."""
    if out is None:
        raise ConfigError(f"{data} is a data file, whose task is written beside the run folder; name one with out")
    return output(Path(out).parent / f"{Path(out).name}-task.yaml")


def _usable(task: Task) -> dict[str, int]:
    """Rows of test and of dev that repeat no row of train, nor those of dev one of test."""
    if task.data.dev is None:
        raise ConfigError(
            f"task {task.name!r} has no dev rows to choose by; name a file or a share under its key 'data' (a data "
            "file of 100 rows or more is given one)"
        )
    known, counts = set(task.examples("train").hashes), {}
    splits: dict[str, Split] = {"queries": "test", "dev_queries": "dev"}
    for key, split in splits.items():
        hashes = task.examples(split).hashes
        counts[key] = sum(content not in known for content in hashes)
        known |= set(hashes)
    return counts


def _largest(study: Study, task: Task) -> int:
    """The largest number of demonstrations to try: that of the task or 8, halved until there are enough sets and a
    prompt of the longest ones fits."""
    train, most = task.examples("train"), max(LEAST_MOST, task.shots)
    if study.endpoint is None:
        lengths = prompt_lengths(task, study.model)
        most = min(most, max(lengths.window // lengths.longest - 2, 1))
    while most > 1 and num_different_sets(most, task, train) < study.sets:
        most //= 2
    return most
