"""Tasks of lm-evaluation-harness rendered by the harness itself: its rows as texts, in a folder that runs no function.

What a task file computes by `!function` (its rows, contexts, choices, answers) is Python of that file, which reading it
never runs. Here the harness that the user installed runs it, once, and what comes out is written as a task file of the
harness, which needs nothing but its rows beside it: it is read here as any other, and by the harness.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

from iclperm.errors import ConfigError
from iclperm.tasks.harness import read_harness

_KINDS = ("multiple_choice", "generate_until")
_KINDS_OF_ROWS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
"""What the harness' data library calls the files that it reads, by their ending."""
_ASKED = ("validation_split", "test_split")
_SPLITS = ("training_split", "fewshot_split", *_ASKED)
_KEPT = ("num_fewshot", "target_delimiter", "fewshot_delimiter", "generation_kwargs")


@dataclass(frozen=True)
class RenderedTask:
    """What the harness made of a task: file names and their contents, and what could not be carried over."""

    name: str
    files: Mapping[str, bytes]
    """Data by name, and last the task file."""
    num_rows: Mapping[str, int]
    """By split: `train` holds the demonstrations, `test` the queries, `validation` the queries to choose by."""
    left_out: tuple[str, ...]
    """Metrics and pipelines of functions, in words."""
    gaps: tuple[str, ...] = ()
    """Where rows of the user's own lack what others have, in words."""


def rendered(
    name: str, include_path: Path | None = None, limit: int | None = None, data: Path | None = None
) -> RenderedTask:
    """A task of the harness, rendered row by row; runs the functions that its file names.

    Args:
        name: of a task as `lm_eval --tasks` takes it, no group and no tag.
        include_path: a folder with task files of the user's, beside those of the harness.
        limit: rows of each split at most, the first ones; None for all.
        data: a folder with rows in the task's columns, to be taken instead of its data set: a file a split, called like
            it (``validation.jsonl``, or .json, .csv, .parquet). The harness needs no hub then.

    Raises `ConfigError` for what is no single task, and for a task that has no way here: contexts that differ by
    choice, log-likelihoods of whole texts, answers judged by a function.
    """
    if data is None:
        return _rendered(name, _loaded(name, _manager(name, include_path)), limit)
    with TemporaryDirectory() as place:  # of a file that names the rows, and of what the harness makes of them
        manager, given = _on_rows(name, _manager(name, include_path), data, Path(place))
        try:
            return _rendered(name, _loaded(name, manager), limit, given)
        except ConfigError as error:
            raise ConfigError("; ".join((str(error), *given.gaps[:1]))) from error


def _rendered(name: str, task: ConfigurableTask, limit: int | None, given: OwnRows | None = None) -> RenderedTask:
    """What is written of a task; ``given`` are the rows that were taken in the place of its data set."""
    config, shots = task.config, task.fewshot_cfg
    if task.OUTPUT_TYPE not in _KINDS:
        raise ConfigError(f"{name} has the output type {task.OUTPUT_TYPE}; tasks of {' and '.join(_KINDS)} are studied")
    if task.OUTPUT_TYPE == "generate_until" and callable(config.process_results):
        raise ConfigError(f"{name} judges its answers by a function, process_results; write a task with an answer rule")
    if config.gen_prefix or shots.gen_prefix:
        raise ConfigError(f"{name} begins its answers by gen_prefix, which is not rendered here; write a task")
    queries = task.test_docs() if task.has_test_docs() else task.validation_docs()  # the harness wants one of them
    own = config.test_split if task.has_test_docs() else config.validation_split
    of_shots = (shots.doc_to_text, shots.doc_to_choice, shots.doc_to_target)
    splits: dict[str, Iterator[dict[str, Any]]] = {"test": _rows(task, queries, limit)}
    of_demonstrations = _split_of_demonstrations(task)
    if task.has_test_docs() and task.has_validation_docs() and config.validation_split != of_demonstrations:
        splits["validation"] = _rows(task, task.validation_docs(), limit)
    has_own_shots = of_demonstrations != own
    if has_own_shots:
        splits["train"] = _rows(task, task.fewshot_docs() or (), limit, *of_shots)
    rows = {split: list(made) for split, made in splits.items()}
    files = {f"{split}.jsonl": _lines(made) for split, made in rows.items() if made}
    keys, left_out = _measures(config)
    content = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {file.removesuffix(".jsonl"): file for file in files}},
        "test_split": "test",
        **({"validation_split": "validation"} if "validation" in rows else {}),
        "fewshot_split": "train" if has_own_shots else "test",
        "output_type": task.OUTPUT_TYPE,
        "doc_to_text": "context",
        **({"doc_to_choice": "choices"} if task.OUTPUT_TYPE == "multiple_choice" else {}),
        "doc_to_target": "gold",
        **{key: value for key in _KEPT if (value := getattr(config, key)) is not None},
        **({"description": config.description} if config.description else {}),
        **_delimiters(shots, config),
        **keys,
        "metadata": _origin(task, files, given),
    }
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)
    files[f"{name}.yaml"] = text.encode()
    num_rows = {split: len(made) for split, made in rows.items()}
    return RenderedTask(name, files, num_rows, tuple(left_out), () if given is None else given.gaps)


@dataclass(frozen=True)
class OwnRows:
    """Rows that are taken instead of a data set: its name, the SHA-256 of each file, and where rows lack a value, in
    words."""

    dataset: str
    sha256: Mapping[str, str]
    gaps: tuple[str, ...]


def _on_rows(name: str, manager: TaskManager, data: Path, place: Path) -> tuple[TaskManager, OwnRows]:
    """The task on the rows of a folder: a task file in ``place`` includes its own; it has the splits that are there."""
    path = manager.task_index[name].yaml_path
    if path is None:
        raise ConfigError(f"{name} is a class of Python, not a file; it cannot be rendered")
    keys = read_harness(path)
    named = {key: keys[key] for key in _SPLITS if keys.get(key)}
    kinds = {kind for kind in _KINDS_OF_ROWS.values() if _files_of(data, kind)}
    if len(kinds) != 1:
        said = "files of several kinds" if kinds else "no rows"
        raise ConfigError(f"{data} has {said}; put a file a split there, {_wanted(named)}, all of one kind")
    (kind,) = kinds
    files = _files_of(data, kind)
    used = {split: files[split] for split in dict.fromkeys(map(str, named.values())) if split in files}
    if not {str(named.get(key)) for key in _ASKED} & used.keys():
        asked = {key: split for key, split in named.items() if key in _ASKED}
        raise ConfigError(f"{data} has no rows that {name} asks; put a file there, {_wanted(asked)}")
    content = {
        "include": str(path),
        "task": name,
        "dataset_path": kind,
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {split: str(file.resolve()) for split, file in used.items()},
            "cache_dir": str(place / "cache"),
        },
        "custom_dataset": None,
        **{key: None for key, split in named.items() if str(split) not in used},
    }
    (place / "task").mkdir()
    (place / "task" / "rows.yaml").write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in used.values()}
    gaps = [gap for file in used.values() for gap in _gaps(file, kind, place / "cache")]
    own = OwnRows(str(keys.get("dataset_path") or ""), digests, tuple(gaps))
    return TaskManager(include_path=str(place / "task"), include_defaults=False), own


def _files_of(data: Path, kind: str) -> dict[str, Path]:
    """The files of a folder that the harness' data library reads as this kind, by split."""
    found: dict[str, Path] = {}
    for path in sorted(data.iterdir()):
        if _KINDS_OF_ROWS.get(path.suffix) == kind and found.setdefault(path.stem, path) != path:
            raise ConfigError(f"{data} has {found[path.stem].name} and {path.name} for one split; leave one of them")
    return found


def _gaps(file: Path, kind: str, cache: Path) -> list[str]:
    """Where a row lacks what others of its file have, one line a column, as the harness' data library reads it.

    Templates make the text None of it, unless they ask. Raises `ConfigError` for a file that cannot be read, and for a
    .csv file that writes lists: they are read as text there, of which every letter would be a choice.
    """
    from datasets import load_dataset

    try:
        table = load_dataset(kind, data_files=str(file.resolve()), cache_dir=str(cache), split="train").data
    except Exception as error:  # whatever the library finds wrong
        raise ConfigError(f"{file} cannot be read: {_said(error.__cause__ or error)}") from error
    said = []
    for column in table.column_names:
        values = table[column]
        if 0 < values.null_count < len(values):
            first = values.is_null().to_pylist().index(True) + 1
            more = f" and {values.null_count - 1} more" if values.null_count > 1 else ""
            said.append(f"{file.name}: row {first}{more} of {len(values)} has nothing in the column {column!r}")
        texts = [value.strip() for value in values.to_pylist() if isinstance(value, str)] if kind == "csv" else []
        if 2 * sum(text[:1] + text[-1:] in ("[]", "{}") for text in texts) > len(texts):
            raise ConfigError(f"{file.name}: {column!r} holds lists, which .csv has as text; give .jsonl or .parquet")
    return said


def _wanted(named: Mapping[str, Any]) -> str:
    splits = [f"{split}.jsonl" for split in dict.fromkeys(named.values())]
    return f"{' or '.join(splits) or 'test.jsonl'} (or .json, .csv, .parquet)"


def _manager(name: str, include_path: Path | None) -> TaskManager:
    """What knows the harness' tasks; raises `ConfigError` where this is none of them."""
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    if name not in manager.all_subtasks:
        kind = "a group" if name in manager.all_groups else "a tag" if name in manager.all_tags else ""
        remedy = "name one of its tasks" if kind else _why_unknown(name, include_path)
        raise ConfigError(
            f"lm-evaluation-harness knows no task {name!r}{f', which is {kind}' if kind else ''}; {remedy}"
        )
    return manager


def _why_unknown(name: str, include_path: Path | None) -> str:
    """What to do about a name that the harness does not know: it leaves out the files that it cannot read."""
    listed = "iclperm lm-eval ls tasks lists what it knows"
    if include_path is None:
        return f"{listed}; --include-path adds a folder"
    for file in sorted(include_path.rglob("*.yaml")):
        text = file.read_text(encoding="utf-8", errors="replace")
        if re.search(rf"^task:\s*['\"]?{re.escape(name)}['\"]?\s*$", text, re.MULTILINE):
            return f"{file} is named so, but the harness cannot read it: iclperm tasks show {file} says why"
    return f"no file in {include_path} is named so; {listed}"


def _loaded(name: str, manager: TaskManager) -> ConfigurableTask:
    try:
        (task,) = manager.load([name])["tasks"].values()
    except Exception as error:  # a download's, a function's, the harness' own: whatever it is, the task is not there
        raise ConfigError(f"lm-evaluation-harness cannot load {name}: {_said(error)}") from error
    if not isinstance(task, ConfigurableTask):
        raise ConfigError(f"{name} is a class of Python, not a file; it cannot be rendered")
    return task


def _split_of_demonstrations(task: ConfigurableTask) -> str | None:
    """The split that the harness takes demonstrations from; None where the file has samples of its own."""
    config, shots = task.config, task.fewshot_cfg
    is_named = shots.split is not None or shots.samples is not None
    drawn = config.training_split or config.validation_split or config.test_split
    split: str | None = shots.split if is_named else drawn
    return split


def _rows(
    task: ConfigurableTask,
    docs: Any,
    limit: int | None,
    to_text: Any = None,
    to_choice: Any = None,
    to_target: Any = None,
) -> Iterator[dict[str, Any]]:
    """A row for each of the harness' documents: `context`, `gold`, and where there are some `choices`."""
    chooses = task.OUTPUT_TYPE == "multiple_choice"
    for number, doc in enumerate(islice(docs, limit)):
        try:
            context, gold = task.doc_to_text(doc, to_text), task.doc_to_target(doc, to_target)
            choices = task.doc_to_choice(doc, to_choice) if chooses else None
        except Exception as error:  # a function of the file's
            raise ConfigError(
                f"{task.config.task} cannot be rendered: its row {number} ends with {_said(error)}"
            ) from error
        if not isinstance(context, str):
            raise ConfigError(
                f"{task.config.task} has contexts that differ by choice (its doc_to_text gives {context!r}), as "
                "WinoGrande's partial scoring; a prompt here ends before the choice, the same for all"
            )
        if choices is None:
            yield {"context": context, "gold": _answers(gold)}
            continue
        texts = [str(choice) for choice in choices]
        yield {"context": context, "choices": texts, "gold": _places(gold, texts, number, str(task.config.task))}


def _answers(gold: Any) -> str | list[str]:
    return [str(each) for each in gold] if isinstance(gold, list) else str(gold)


def _places(gold: Any, choices: Sequence[str], number: int, name: str) -> int | list[int]:
    """Positions of the right choices, which the harness takes by their texts, too."""
    if isinstance(gold, list):
        return [_place(each, choices, number, name) for each in gold]
    return _place(gold, choices, number, name)


def _place(gold: Any, choices: Sequence[str], number: int, name: str) -> int:
    place = choices.index(gold) if isinstance(gold, str) and gold in choices else gold
    if isinstance(place, bool) or not isinstance(place, int) or not 0 <= place < len(choices):
        raise ConfigError(
            f"{name} cannot be rendered: the answer of its row {number} is {gold!r}, none of {len(choices)} choices"
        )
    return place


def _delimiters(shots: Any, config: Any) -> dict[str, Any]:
    """Those of demonstrations, where they are others."""
    keys = ("target_delimiter", "fewshot_delimiter")
    own = {key: value for key in keys if (value := getattr(shots, key)) not in (None, getattr(config, key))}
    return {"fewshot_config": own} if own else {}


def _measures(config: Any) -> tuple[dict[str, Any], list[str]]:
    """The keys of metrics and filters as they can be written, and what cannot."""
    keys: dict[str, Any] = {}
    left_out = ["process_results, a function: right is what acc calls so"] if callable(config.process_results) else []
    for key, part in (("metric_list", "metric"), ("filter_list", "name")):
        entries = [dict(entry) for entry in getattr(config, key) or ()]
        plain = [entry for entry in entries if not _has_function(entry)]
        left_out += [f"{key}: {_named(entry, part)}, a function" for entry in entries if _has_function(entry)]
        if plain:
            keys[key] = plain
    return keys, left_out


def _has_function(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_function(each) for each in value.values())
    if isinstance(value, (list, tuple)):
        return any(_has_function(each) for each in value)
    return callable(value)


def _named(entry: Mapping[str, Any], part: str) -> str:
    name = entry.get(part)
    return str(getattr(name, "__name__", name))


def _origin(task: ConfigurableTask, files: Mapping[str, bytes], given: OwnRows | None) -> dict[str, Any]:
    """What made the rows: versions, the task's configuration with its functions' source, the rows that it was given,
    and those made of them."""
    made = {} if given is None else {"dataset_kwargs": None}  # where they lay for the moment
    metadata = {key: value for key, value in (task.config.metadata or {}).items() if key != "config_source"}  # a path
    settings = {**vars(task.config), "metadata": metadata, **made}
    config = json.dumps(settings, sort_keys=True, default=_source).encode()
    return {
        "rendered_by": f"iclperm {version('iclperm')}",
        "lm_eval": version("lm_eval"),
        "version": metadata.get("version"),
        "dataset_path": str(task.config.dataset_path or "") if given is None else given.dataset,
        **({} if given is None else {"instead_of_it": dict(given.sha256)}),
        "config_sha256": hashlib.sha256(config).hexdigest(),
        "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }


def _source(value: Any) -> Any:
    """What JSON has no word for: a function by its source, an object by what it holds."""
    if callable(value):
        try:
            return inspect.getsource(value)
        except (OSError, TypeError):
            return getattr(value, "__qualname__", type(value).__qualname__)
    return vars(value) if hasattr(value, "__dict__") else str(value)


def _lines(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _said(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
