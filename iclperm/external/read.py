"""Files of answers that others made, read by what they are."""

from __future__ import annotations

import fnmatch
import os
import stat
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from iclperm.base.files import MOST_VISITED, what_fetches
from iclperm.base.remote import local
from iclperm.errors import DataError, RequestError, printable
from iclperm.external.jsonl import json_rows
from iclperm.external.sample_logs import SampleLog, distinct, matched, read_log
from iclperm.external.tables import read_csv, read_parquet, read_rows
from iclperm.external.tensor import (
    MISSING,
    MISSING_WORDS,
    MOST_BYTES,
    Array,
    Tensor,
    missing_note,
    plain_weights,
    read_npy,
    read_npz,
    refuse_bytes,
)

_MOST_FILES = 10_000


def load(paths: str | Path | Sequence[str | Path], axes: str | None = None, *, most_bytes: int = MOST_BYTES) -> Tensor:
    """Answers or accuracies from files; what the axes of an array are follows from its shape unless `axes` says it.

    Args:
        paths: a .npy, .npz, .csv, .parquet or .jsonl file, or its URL. Several files, or a folder, of sample logs
            (`samples_*.jsonl`) of one task are contexts that answered the same documents; so are several files that
            each hold the answers of one context.
        axes: a letter for each axis of an array or matrix, of S sets, P permutations, K shots, Q queries, C contexts,
            such as SPQ. By default one axis is Q, two are SP, or CQ where all is 0 or 1, three SPQ, four SPKQ. Tables
            with the columns query and correct, and any of set, permutation, shots, context, split, state and weight,
            name their own.
        most_bytes: the largest file that is read, and the largest array that is made of one.

    Where a table has several splits, `test` is read. Raises DataError for what cannot be read, holds other values than
    0 and 1 (or accuracies outside 0..1), or is larger than `most_bytes`; RequestError for `axes` that do not fit.
    """
    files = _files([paths] if isinstance(paths, str | Path) else paths, most_bytes)
    parts = [tensor for file in files for tensor in _read(file, axes, most_bytes)]
    if len(parts) == 1:
        return parts[0]
    wrong = next((part for part in parts if part.axes != "CQ"), None)
    if wrong is not None:
        raise DataError(
            f"{wrong.title} has the axes {wrong.axes}: only contexts, CQ, can be put together; give one file"
        )
    return _together(parts)


def _files(paths: Sequence[str | Path], most_bytes: int) -> list[Path]:
    """The files named, and of folders named their sample logs; raises DataError for one too large or not there."""
    found: list[Path] = []
    for path in [local(path, most_bytes) for path in paths]:
        if path.is_dir():
            if (path / "FORMAT").is_file():
                raise DataError(
                    f"{path} is a run; iclperm report shows its statistics, iclperm export writes its answers"
                )
            logs = _logs(path)
            if not logs:
                raise DataError(f"{path} holds no samples_*.jsonl; name a file, or a folder of sample logs")
            found += logs
        else:
            found.append(path)
    if not found:
        raise RequestError("name at least one file")
    if len(found) > _MOST_FILES:
        raise DataError(f"{len(found):,} files are too many (the most is {_MOST_FILES:,}); name fewer")
    for path in found:
        try:
            about = path.stat()
        except OSError as error:
            if command := what_fetches(path):
                raise DataError(f"{path} is not here, only a pointer to it; run: {command}") from None
            raise DataError(f"{path} cannot be read: {error.strerror or error}; give a file that is there") from None
        if not stat.S_ISREG(about.st_mode):
            raise DataError(f"{path} is no regular file; give a file of answers")
        with path.open("rb") as file:
            if command := what_fetches(path, file.read(64)):
                raise DataError(f"{path} is not here, only a pointer to it; run: {command}")
        refuse_bytes(about.st_size, str(path), most_bytes)
    return found


def _logs(folder: Path) -> list[Path]:
    """The sample logs anywhere below a folder, sorted."""
    logs, left = [], MOST_VISITED
    for place, folders, names in os.walk(folder):
        left -= len(folders) + len(names)
        if left < 0:
            raise DataError(f"{folder} holds more than {MOST_VISITED:,} files; name the folder of the sample logs")
        logs += [Path(place) / name for name in fnmatch.filter(names, "samples_*.jsonl")]
    return sorted(logs)


def _read(path: Path, axes: str | None, most_bytes: int) -> list[Tensor]:
    """What one file holds: one tensor, or one for each filter of a sample log."""
    kind = path.suffix.lower()
    if kind == ".npy":
        return [read_npy(path, axes)]
    if kind == ".npz":
        return [read_npz(path, axes, most_bytes)]
    if kind == ".csv":
        return [read_csv(path, axes, most_bytes)]
    if kind == ".parquet":
        return [read_parquet(path, axes, most_bytes)]
    if kind == ".jsonl":
        return _read_jsonl(path, axes, most_bytes)
    raise DataError(f"{path} ends in {path.suffix!r}; give .npy, .npz, .csv, .parquet or .jsonl")


def _read_jsonl(path: Path, axes: str | None, most_bytes: int) -> list[Tensor]:
    """A sample log, or a table as `iclperm export` writes it: the first row says which."""
    first = next(json_rows(path), None)
    if first is None:
        raise DataError(f"{path} is empty; give a file with answers")
    if "doc_id" in first:
        if axes not in (None, "CQ"):
            raise RequestError(f"sample logs have the axes CQ, got {axes!r}; leave axes out")
        return list(read_log(path))
    return [read_rows(path, axes, most_bytes)]


def _each_once(parts: Sequence[Tensor]) -> tuple[str, ...]:
    """The notes of several files; what is noted of several sample logs, each by its name, in one line."""
    named = [(note, part.names[0] if isinstance(part, SampleLog) else "") for part in parts for note in part.notes]
    words = {note: note.removeprefix(f"{name}: ") for note, name in named if name and "its metric" not in note}
    files = Counter(words[note] for note in dict.fromkeys(note for note, _ in named) if note in words)
    told = {note: f"{files[text]:,} files: {text}" for note, text in words.items() if files[text] > 1}
    return tuple(dict.fromkeys(told.get(note, note) for note, _ in named))


def _together(parts: Sequence[Tensor]) -> Tensor:
    """Contexts [C, Q] of several files that answered the same queries; sample logs are matched by document.

    Raises DataError where the files differ in their number of queries, or logs lie among other files.
    """
    logs = [part for part in parts if isinstance(part, SampleLog)]
    notes = _each_once(parts)
    if 0 < len(logs) < len(parts):
        raise DataError("sample logs cannot be put together with other files; describe them apart")
    by_label = weights = None
    if logs:
        values, state, by_label, told = matched(logs)
        notes = (*notes, *told)
        metrics = {note.rsplit(" ", 1)[-1]: note for note in notes if "its metric" in note}
        if len(metrics) == 1:
            notes = (f"answers are the metric {next(iter(metrics))}", *(n for n in notes if "its metric" not in n))
    elif all(part.queries for part in parts):
        values, state, weights = _by_name(parts)
        notes = (*notes, "queries are matched by name over the files")
    else:
        sizes = sorted({part.values.shape[1] for part in parts})
        if len(sizes) > 1:
            raise DataError(f"the files have {sizes[0]} and {sizes[1]} queries; give answers to the same ones")
        values, state = np.concatenate([part.values for part in parts]), np.concatenate([*map(_state_of, parts)])
        weights = _weights_of(parts, [range(sizes[0])] * len(parts), sizes[0])
        notes = (*notes, "query by query: the files must hold the same queries in the same order")
    names = [name for part in parts for name in part.names]
    if logs and len(set(names)) < len(names):
        names = [f"{log.folder}/{name}" for log in logs for name in log.names]
    return Tensor(
        values,
        "CQ",
        state if state.any() else None,
        names=distinct(names),
        title=f"{len(parts)} contexts" if len(names) == len(parts) else f"{len(names)} contexts of {len(parts)} files",
        notes=(*(note for note in notes if not note.endswith(MISSING_WORDS)), *missing_note(state != 0)),
        weights=weights,
        by_label=by_label,
    )


def _weights_of(parts: Sequence[Tensor], places: Sequence[Sequence[int]], num_queries: int) -> Array | None:
    """[Q] the weights of queries, of which those of a part are at its `places`; None where no file has any.

    A query counts once where only files without weights have it. Raises DataError for one with two weights.
    """
    weights = np.full(num_queries, np.nan)
    for part, place in zip(parts, places, strict=True):
        if part.weights is None:
            continue
        at = np.asarray(place)
        other = np.flatnonzero(~np.isnan(weights[at]) & (weights[at] != part.weights))
        if other.size:
            query = part.queries[other[0]] if part.queries else other[0]
            raise DataError(
                f"{part.title} gives query {printable(str(query))} the weight {part.weights[other[0]]:g}, another file "
                f"{weights[at][other[0]]:g}; give it one"
            )
        weights[at] = part.weights
    return None if np.isnan(weights).all() else plain_weights(np.where(np.isnan(weights), 1.0, weights))


def _state_of(part: Tensor) -> npt.NDArray[np.uint8]:
    return np.zeros(part.values.shape, np.uint8) if part.state is None else part.state


def _by_name(parts: Sequence[Tensor]) -> tuple[Array, npt.NDArray[np.uint8], Array | None]:
    """Answers and states [C, Q] over the queries that any file names, and their weights; what one lacks is missing."""
    place = {name: number for number, name in enumerate(dict.fromkeys(name for part in parts for name in part.queries))}
    num_contexts = sum(len(part.values) for part in parts)
    values = np.zeros((num_contexts, len(place)), np.result_type(*(part.values.dtype for part in parts)))
    state = np.full(values.shape, MISSING, np.uint8)
    places = [[place[name] for name in part.queries] for part in parts]
    begin = 0
    for part, at in zip(parts, places, strict=True):
        rows = slice(begin, begin + len(part.values))
        values[rows, at], state[rows, at] = part.values, _state_of(part)
        begin += len(part.values)
    return values, state, _weights_of(parts, places, len(place))
