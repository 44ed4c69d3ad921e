"""A task made of a table in memory: its rows and a proposed task file, written side by side."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

from iclperm.base.files import read_given, write_whole
from iclperm.base.outputs import output
from iclperm.errors import ConfigError, printable
from iclperm.tasks.proposal import Proposal, propose
from iclperm.tasks.task import Task


@dataclass(frozen=True, repr=False)
class NewTask:
    """A task file that was made of a table: a path, which a study takes as its ``task``; its repr says what became of
    the rows."""

    path: Path
    proposal: Proposal

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        counts, left_out = self.proposal.counts, self.proposal.left_out
        splits = next(iter(counts.values()))
        sizes = ", ".join(f"{sum(row[split] for row in counts.values()):,} {split}" for split in splits)
        lines = [f"task {self.path}: {sizes} rows"]
        lines += [
            f"{word}: {', '.join(f'{count:,} {split}' for split, count in row.items())}" for word, row in counts.items()
        ]
        lines += [f"rows left out, {why}: {count:,}" for why, count in left_out.items()]
        lines += [f"note: {note}" for note in self.proposal.notes]
        if all(word.isdigit() for word in counts):
            lines.append("note: the labels are numbers, and a model reads names better; replace them in the table")
        if near := self.proposal.near:
            lines.append(f"note: {len(near):,} rows outside train nearly repeat one of it and flatter accuracies")
        return "\n".join(printable(line) for line in lines)


def new_task(
    table: Any,
    path: str | Path,
    *,
    label: str | None = None,
    text: str | Sequence[str] = (),
    replace: bool = False,
    **wording: Any,
) -> NewTask:
    """Makes a task of a table in memory: ``path`` (``.yaml``) and, beside it, its rows (``.jsonl``).

    ``table`` is a DataFrame of pandas or polars, a table of pyarrow, a mapping of columns, or rows as mappings, as a
    `datasets.Dataset` has them; an index is no column. ``label`` and ``text`` name its columns, guessed where they are
    not given; ``wording`` are keys of a task (`Task`) instead of the proposed ones: ``instruction``, ``demonstration``,
    ``query``, ``shots``. What becomes of the rows is in the repr of what is returned.

    The same call again changes nothing. Files that are there with anything else are replaced with ``replace`` alone,
    as finished runs are held against what they were made with; a ``.jsonl`` that no such task has as its data is yours
    and never replaced. Raises `ConfigError` for that, for a table, column or key that is none, and `DataError` for rows
    of which no task can be made.
    """
    path = output(path)
    path = path if path.suffix in (".yaml", ".yml") else path.with_name(f"{path.name}.yaml")
    rows = _lines(table)
    with TemporaryDirectory() as folder:
        staged = Path(folder, f"{path.stem}.jsonl")
        staged.write_bytes(rows)
        try:
            found = propose(staged, Path(folder), label=label, texts=[text] if isinstance(text, str) else text)
        except ConfigError as error:
            what = str(error).replace(f"{staged}: ", "the table ", 1).replace("--label", "label=")
            raise ConfigError(what) from None
    content = found.text
    if wording:
        keys = yaml.safe_load(content)
        if "labels" in wording:
            del keys["label_values"]
        keys |= wording
        Task(**keys)
        content = yaml.safe_dump(keys, sort_keys=False, allow_unicode=True, width=1000)
    files = {path.with_suffix(".jsonl"): rows, path: content.encode()}
    others = [file for file, raw in files.items() if file.exists() and read_given(file) != raw]
    if (data := path.with_suffix(".jsonl")) in others and not _is_data_of(data, path):
        raise ConfigError(f"{data} is there and is not the data of a task {path}; give the task another name")
    if others and not replace:
        raise ConfigError(
            f"{' and '.join(map(str, others))} is there and holds something else; use {path} as it is "
            f"(Study(task={str(path)!r})), give another name, or replace=True to write it anew"
        )
    for file, raw in files.items():
        if not file.exists() or file in others:
            write_whole(file, raw)
    return NewTask(path, found)


def _is_data_of(data: Path, task: Path) -> bool:
    """Whether a task file is there that names ``data`` beside it; else ``data`` is the caller's own."""
    if not task.exists():
        return False
    try:
        return bool(yaml.safe_load(read_given(task))["data"]["train"] == data.name)  # as `propose` writes it
    except (yaml.YAMLError, KeyError, TypeError):
        return False


def _lines(table: Any) -> bytes:
    """The rows of a table as JSON, one a line; what is no number is null."""
    if isinstance(table, str | Path):
        raise ConfigError(
            f"a task is made of a table, and {str(table)!r} is a path; iclperm tasks new --from makes one of a file"
        )
    if callable(getattr(table, "reset_index", None)):
        table = table.reset_index(drop=True)
    try:
        if hasattr(table, "__arrow_c_stream__"):
            found = pa.table(table)
            if twice := [name for name in found.column_names if found.column_names.count(name) > 1]:
                raise ConfigError(f"the table has two columns {twice[0]!r}; rename one")
            rows = found.to_pylist()
        elif isinstance(table, Mapping):
            rows = [dict(zip(table, cells, strict=True)) for cells in zip(*table.values(), strict=True)]
        else:
            rows = [dict(row) for row in table]
    except (pa.ArrowException, TypeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"a {type(table).__name__} cannot be read as a table: {why}; give a DataFrame") from None
    return "".join(json.dumps(_plain(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows).encode()


def _plain(value: Any) -> Any:
    """A value as JSON has it: without NaN, and dates and the like as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(entry) for entry in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)
