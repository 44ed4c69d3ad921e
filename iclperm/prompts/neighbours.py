"""Each query's own demonstrations, as somebody's retriever found them: a file of train rows, read and checked."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iclperm.base.parquet import read_table
from iclperm.errors import ConfigError, DataError
from iclperm.study.study import Study
from iclperm.tasks.loaders import given_bytes
from iclperm.tasks.task import Examples, Task


@dataclass(frozen=True)
class Neighbours:
    """The train rows that retrievers found for every row of test, best first: int64 [S, test rows, N]."""

    rows: NDArray[np.int64]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of shape and rows."""
        return hashlib.sha256(f"{self.rows.shape}".encode() + self.rows.astype("<i8").tobytes()).hexdigest()

    def rank_hash(self, index_set: int, rank: int) -> str:
        """A name of what one retriever has at a rank, over all rows of test."""
        return hashlib.sha256(self.rows[index_set, :, rank].astype("<i8").tobytes()).hexdigest()


def own_neighbours(study: Study, size: int, task: Task, train: Examples, test: Examples) -> Neighbours:
    """The neighbours that a study names, of which it shows at most ``size``; see `read_neighbours` for the file.

    Row i is about row i of test, as `Task.examples` numbers them (repeats left out), so that it does not depend on
    which queries are drawn. Raises `DataError` for another number of rows, fewer neighbours than ``size``, one that is
    no row of train, or the same twice for a query, and `ConfigError` for another number of retrievers than ``sets``.
    """
    assert study.neighbours is not None
    path, rows = study.neighbours, read_neighbours(study.neighbours)
    num_sets, num_rows, number = rows.shape
    if num_rows != len(test):
        raise DataError(
            f"'{path}' has neighbours for {num_rows:,} queries, but task {task.name!r} has {len(test):,} test rows "
            "(repeats left out); give a row for each, as Task.examples('test') numbers them"
        )
    if num_sets != study.sets:
        raise ConfigError(
            f"'{path}' holds neighbours of {num_sets} {'retriever' if num_sets == 1 else 'retrievers'}, but 'sets' is "
            f"{study.sets}; set it to {num_sets}"
        )
    if number < size:
        raise DataError(
            f"'{path}' has {number} neighbours a query, but the largest of 'shots' is {size}; lower 'shots'"
        )
    if (wrong := (rows < 0) | (rows >= len(train))).any():
        raise _at(path, rows, wrong, f"is no row of train, which are 0 to {len(train) - 1} (repeats left out)")
    ordered = np.sort(rows, axis=2)
    if (twice := ordered[..., 1:] == ordered[..., :-1]).any():
        raise _at(path, ordered[..., 1:], twice, "comes twice for this query; give every neighbour once")
    return Neighbours(rows)


def _at(path: str, rows: NDArray[np.int64], wrong: NDArray[np.bool_], what: str) -> DataError:
    """Of the first of some values that are wrong."""
    index_set, query, place = (int(at[0]) for at in np.nonzero(wrong))
    whose = f" of retriever {index_set}" if len(rows) > 1 else ""
    return DataError(f"'{path}', query {query}{whose}: {rows[index_set, query, place]} {what}")


def read_neighbours(path: str | Path) -> NDArray[np.int64]:
    """The rows in a file, best first, int64 [S, Q, N]: of one retriever [Q, N], or of several [S, Q, N].

    A ``.npy`` array of whole numbers; a line a query of a ``.csv`` without header (one retriever) or of a ``.jsonl``
    ([4, 17], or of several retrievers [[4, 17], [4, 3]]); or a ``.parquet`` table of one column of such lists. Nothing
    in the file is run. Raises `DataError`.
    """
    ending = Path(path).suffix.lower()
    if ending not in _READERS:
        raise DataError(f"'{path}' holds no neighbours that can be read; give one of {', '.join(_READERS)}")
    raw = given_bytes(Path(path))
    try:
        found = _READERS[ending](raw)
    except (ValueError, TypeError, EOFError, RecursionError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"'{path}' holds no neighbours ({reason}); give whole numbers, as many a query") from None
    if found.dtype.kind not in "iu" or found.ndim not in (2, 3) or not found.size:
        raise DataError(
            f"'{path}' holds {found.dtype} of shape {list(found.shape)}; give whole numbers [queries, neighbours], "
            "or [retrievers, queries, neighbours]"
        )
    return found.reshape(-1, *found.shape[-2:]).astype(np.int64)


def _of_npy(raw: bytes) -> NDArray[Any]:
    array: NDArray[Any] = np.load(io.BytesIO(raw), allow_pickle=False)
    return array


def _of_csv(raw: bytes) -> NDArray[Any]:
    return np.array([[int(cell) for cell in line.split(",")] for line in raw.decode("utf-8-sig").splitlines() if line])


def _of_jsonl(raw: bytes) -> NDArray[Any]:
    return _of_lists([json.loads(line) for line in raw.decode("utf-8-sig").splitlines() if line.strip()])


def _of_parquet(raw: bytes) -> NDArray[Any]:
    table = read_table(raw)
    if table.num_columns != 1:
        raise ValueError(f"it has {table.num_columns} columns, not one of lists")
    return _of_lists(table.column(0).to_pylist())


def _of_lists(lists: Sequence[Any]) -> NDArray[Any]:
    """Of a list a query, of several retrievers of a list each."""
    array = np.array(lists)
    return array if array.ndim < 3 else np.moveaxis(array, 1, 0)


_READERS = {".npy": _of_npy, ".csv": _of_csv, ".jsonl": _of_jsonl, ".parquet": _of_parquet}
