"""Answers and accuracies in tables: CSV, Parquet and exported rows, long or a plain matrix."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from iclperm.base import parquet
from iclperm.base.files import read_given
from iclperm.errors import DataError, RequestError, is_out_of_memory, printable
from iclperm.external.columns import distinct_values, is_not_ok, is_word, levels, numbers
from iclperm.external.delimited import look_at, read_cells
from iclperm.external.jsonl import json_rows
from iclperm.external.matrices import matrix_of_columns, matrix_of_csv
from iclperm.external.tensor import (
    AXES,
    MISSING,
    Array,
    Tensor,
    as_answers,
    as_shares,
    in_order,
    missing_note,
    one_line,
    plain_weights,
    refuse_bytes,
    title_of,
)
from iclperm.study.states import STATES

_MOST_NAMED = 12
_CELLS = ("split", "set", "permutation", "shots", "context", "query", "weight", "correct", "state", "accuracy")
_CLASSES = ("class", "gold", "label", "target")  # the first that a table has is a query's class


def read_csv(path: Path, axes: str | None, most_bytes: int) -> Tensor:
    """A table, or a matrix with or without a header; raises what its kind does, and DataError for other files."""
    import pyarrow as pa

    try:
        given = look_at(path)
        columns = _long_columns(given.first, path)
        if columns is None:
            return matrix_of_csv(given, axes, most_bytes)
        table = read_cells(given, list(columns.values()))
    except (OSError, UnicodeError, pa.ArrowException, csv.Error) as error:
        if is_out_of_memory(error):
            raise
        raise DataError(f"{path} is not a .csv file that can be read: {_csv_remedy(error)}") from None
    return _of_long(table, columns, given.first, axes, path, most_bytes)


def _csv_remedy(error: Exception) -> str:
    """What is wrong with a file of separated values, and what to write instead."""
    if isinstance(error, UnicodeError):
        return 'it is not UTF-8; save it as UTF-8 (in R write.csv(…, fileEncoding = "UTF-8"))'
    if counted := re.search(r"Expected (\d+) columns, got (\d+)", str(error)):
        expected, got = map(int, counted.groups())
        if got == expected + 1:
            return (
                f"its first line has {expected} names, a row {got} cells; write a name for each column (in R "
                "write.csv(…, row.names = FALSE)) and no comma behind a row"
            )
        return f"its first line has {expected} cells, a row {got}; delete lines that are no rows, and name every column"
    return f"{one_line(error)}; save it anew"


def read_parquet(path: Path, axes: str | None, most_bytes: int) -> Tensor:
    """A table or a matrix; raises what its kind does, and DataError for other files."""
    import pyarrow as pa

    try:
        raw = read_given(path, most_bytes)
        schema = parquet.schema_of(raw)
        counted = _counted_index(schema)
        names = [*schema.names, *counted]
        columns = _long_columns(names, path)
        stored = None if columns is None else [name for name in columns.values() if name not in counted]
        table = parquet.read_table(raw, stored, most_bytes=most_bytes)
        for name, numbers_of in counted.items():
            if len(numbers_of) != table.num_rows:
                raise DataError(
                    f"{path} has {table.num_rows:,} rows and an index {printable(name)!r} of {len(numbers_of):,}; "
                    "write it as a column"
                )
            table = table.append_column(name, pa.array(numbers_of))
    except parquet.Unpacks as error:
        raise DataError(f"{path} {error}; give a smaller file, or split it") from None
    except (OSError, ValueError, pa.ArrowException) as error:
        if is_out_of_memory(error):
            raise
        raise DataError(f"{path} is not a .parquet file that can be read: {one_line(error)}; save it anew") from None
    if columns is not None:
        return _of_long(table, columns, names, axes, path, most_bytes)
    if axes is None and not names:
        raise DataError(f"{path} has no columns; give a table with some")
    stored_index = [name for name in (schema.pandas_metadata or {}).get("index_columns", ()) if isinstance(name, str)]
    index = [*counted, *(name for name in stored_index if name in names)]
    ordered = [*index, *(name for name in names if name not in index)]  # pandas writes its index last
    if len(set(names)) < len(names):
        ordered = names
    place = {name: number for number, name in reversed(list(enumerate(names)))}
    return matrix_of_columns(ordered, [table.column(place[name]) for name in ordered], axes, path, most_bytes)


def _counted_index(schema: Any) -> dict[str, range]:
    """The named indices 0, 1, 2, … of a table: pandas writes those into the file's metadata alone."""
    found = {}
    for index in (schema.pandas_metadata or {}).get("index_columns", ()):
        if isinstance(index, dict) and index.get("name") and index["name"] not in schema.names:
            found[str(index["name"])] = range(*(int(index[key]) for key in ("start", "stop", "step")))
    return found


def read_rows(path: Path, axes: str | None, most_bytes: int) -> Tensor:
    """A .jsonl file whose rows have keys as the columns of a table: of all rows, whichever has it first.

    Raises what a table does, and DataError for mixed values.
    """
    import pyarrow as pa

    found: dict[str, list[Any]] = {}
    others: dict[str, None] = {}
    num_rows = 0
    for row in json_rows(path):
        for name, value in row.items():
            if _called(name) in (*_CELLS, *_CLASSES, "grade"):
                cells = found.setdefault(name, [])
                cells += [None] * (num_rows - len(cells))  # rows above that lack it
                cells.append(value)
            else:
                others[name] = None
        num_rows += 1
    columns = _long_columns([*found, *others], path)
    if columns is None:
        raise DataError(f"{path} has neither doc_id (a sample log) nor query and correct (iclperm export); add them")
    try:
        table = pa.table({name: pa.array(cells + [None] * (num_rows - len(cells))) for name, cells in found.items()})
    except pa.ArrowException as error:
        if is_out_of_memory(error):
            raise
        raise DataError(f"{path} mixes kinds of values in a column: {one_line(error)}") from None
    return _of_long(table, columns, [*found, *others], axes, path, most_bytes)


def _called(name: str) -> str:
    called = name.strip().lower()
    return "weight" if called == "weights" else called


def _long_columns(names: Sequence[str], path: Path) -> dict[str, str] | None:
    """What is read of a long table, a row an answer or an accuracy: the names of its columns in the file by our own.

    Case and spaces around a name do not matter. None for a plain matrix; raises DataError for a column twice.
    """
    called = [_called(name) for name in names]
    if not {"correct", "accuracy"} & {*called}:  # what the export of a run with grades has in place of the former
        called = ["correct" if name == "grade" else name for name in called]
    if "correct" not in called and "accuracy" not in called:
        return None
    classes = [name for name in _CLASSES if name in called][:1]
    wanted = [name for name in (*_CELLS, *classes) if name in called]
    if "correct" in wanted and "accuracy" in wanted:
        wanted.remove("accuracy")
    twice = next((name for name in wanted if called.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path} has two columns named {twice!r}; keep one")
    return {name: names[called.index(name)] for name in wanted}


def _of_long(
    table: Any, columns: Mapping[str, str], names: Sequence[str], axes: str | None, path: Path, most_bytes: int
) -> Tensor:
    """An Arrow table, a row a cell, as a tensor whose axes its columns name; what was not read is noted.

    Raises DataError for values, columns or rows that make no tensor, or one of more than `most_bytes`; RequestError
    where `axes` are given too.
    """
    if axes is not None:
        raise RequestError(f"{path} names its own axes by its columns; leave axes {axes!r} out")
    left = [name for name in names if name not in columns.values() and _called(name)]
    cells = _without_blank_rows({name: table.column(called) for name, called in columns.items()}, path)
    tensor = _of_columns(cells, left, path, most_bytes)
    return replace(tensor, notes=(*tensor.notes, *([f"columns not used: {_some(left)}"] if left else [])))


def _some(names: Sequence[str]) -> str:
    """Names for one line, and how many more there are."""
    shown = printable(", ".join(names[:_MOST_NAMED]))
    return shown if len(names) <= _MOST_NAMED else f"{shown} and {len(names) - _MOST_NAMED:,} more"


def _of_columns(columns: dict[str, Any], left: Sequence[str], path: Path, most_bytes: int) -> Tensor:
    """The columns of a long table, each row of which is a cell of the tensor."""
    notes: list[str] = []
    if "split" in columns:
        columns = _test_split(columns, notes, path)
    has_answers = "correct" in columns
    if has_answers and "query" not in columns:
        raise DataError(f"{path} has a column correct but none named query; add it")
    letters = {name: axis for axis, name in AXES.items()}
    order = ["set", "permutation", "shots"] if "context" not in columns else ["context"]
    if "context" in columns and {"set", "permutation", "shots"} & set(columns):
        raise DataError(f"{path} has both context and set, permutation or shots; keep one way to name a cell")
    named = [name for name in [*order, *(["query"] if has_answers else [])] if name in columns]
    if not named or not (has_answers or {"set", "permutation"} <= set(named)):
        raise DataError(f"{path} has accuracies but no columns set and permutation; add them")
    found, places = zip(*(levels(columns[name], name, path) for name in named), strict=True)
    shape = tuple(len(level) for level in found)
    if not math.prod(shape):
        raise DataError(f"{path} has no rows")
    refuse_bytes(math.prod(shape) * (1 if has_answers else 8), f"the tensor {list(shape)} of {path}", most_bytes)
    cells: npt.NDArray[np.int64] = np.asarray(np.ravel_multi_index(places, shape), dtype=np.int64)
    _refuse_twice(cells, shape, named, found, left, path)
    values, state = _spread_out(columns, cells, shape, has_answers, path, notes, most_bytes)
    axes = "".join(letters[name] for name in named)
    arranged, arranged_axes = in_order(values, axes)
    if not has_answers:
        if state.any():
            raise DataError(
                f"{path} lacks {np.count_nonzero(state):,} of {state.size:,} cells; give an accuracy for each"
            )
        return Tensor(
            as_shares(arranged, title_of(path)),
            arranged_axes,
            shots=_shots(named, found, path),
            title=title_of(path),
            sets=_names("set", named, found),
            permutations=_names("permutation", named, found),
        )
    missing = state != 0
    notes += missing_note(missing)
    classes = _classes(columns, places[-1], found[-1], notes, path)
    return Tensor(
        arranged,
        arranged_axes,
        state=in_order(state, axes)[0] if missing.any() else None,
        weights=_weights(columns, places[-1], shape[-1], path),
        shots=_shots(named, found, path),
        names=_context_names(named, found, path) if arranged_axes == "CQ" else (),
        title=title_of(path),
        notes=tuple(notes),
        classes=classes,
        queries=tuple(found[-1]),
        sets=_names("set", named, found),
        permutations=_names("permutation", named, found),
    )


def _without_blank_rows(columns: dict[str, Any], path: Path) -> dict[str, Any]:
    """The rows that say something: below a table Excel leaves some without anything."""
    blank: npt.NDArray[np.bool_] | None = None
    for name, column in columns.items():
        values, codes = distinct_values(column, name, path)
        empty = np.array([*(isinstance(value, str) and not value.strip() for value in values), True])[codes]
        blank = empty if blank is None else blank & empty
        if not blank.any():
            return columns
    assert blank is not None
    return {name: column.filter(~blank) for name, column in columns.items()}


def _test_split(columns: dict[str, Any], notes: list[str], path: Path) -> dict[str, Any]:
    """The rows of the split test, or of the only one."""
    splits, place = levels(columns["split"], "split", path)
    called = list(map(str, splits))
    split = "test" if "test" in called or not called else called[0]
    if len(called) > 1 and split != "test":
        raise DataError(f"{path} holds the splits {', '.join(map(printable, called))}; keep one, or name one test")
    if len(called) <= 1:
        return columns
    notes.append("only the split test is described")
    keep = place == called.index(split)
    return {name: column.filter(keep) for name, column in columns.items()}


def _refuse_twice(
    cells: npt.NDArray[np.int64],
    shape: tuple[int, ...],
    named: list[str],
    found: Sequence[list[Any]],
    left: Sequence[str],
    path: Path,
) -> None:
    """Raises DataError, naming the cell and the columns that were not used, where two rows are of one cell."""
    seen = np.zeros(math.prod(shape), np.bool_)
    seen[cells] = True
    if np.count_nonzero(seen) == len(cells):
        return
    order = np.sort(cells)
    twice = order[1:][order[1:] == order[:-1]][0]
    where = ", ".join(
        f"{name} {printable(str(level[place]))}"
        for name, level, place in zip(named, found, np.unravel_index(twice, shape), strict=True)
    )
    if left:
        raise DataError(
            f"{path} has two rows for {where}; call the column that tells them apart set, permutation, shots or "
            f"context (columns not used: {_some(left)}), or keep one"
        )
    raise DataError(f"{path} has two rows for {where}; keep one")


def _spread_out(
    columns: dict[str, Any],
    cells: npt.NDArray[np.int64],
    shape: tuple[int, ...],
    has_answers: bool,
    path: Path,
    notes: list[str],
    most_bytes: int,
) -> tuple[Array, npt.NDArray[np.uint8]]:
    """Values and states of all cells, both of `shape`, from the rows' `cells`; a cell without a row is missing."""
    name = "correct" if has_answers else "accuracy"
    found = numbers(columns[name], f"the column {name}", path)
    absent = np.isnan(found)
    if "state" in columns and has_answers:
        wrong, num_silent = is_not_ok(columns["state"], path)
        absent |= wrong
        if num_silent:
            notes.append(f"{num_silent:,} rows have no state: taken as ok")
    state = np.full(math.prod(shape), MISSING, np.uint8)
    state[cells] = np.where(absent, MISSING, 0)
    if "state" in columns and has_answers:
        for code, word in enumerate(STATES[1:], 1):
            state[cells[absent & is_word(columns["state"], word, path)]] = code
    kept = np.where(absent, 0.0, found)
    if has_answers:
        answers, _, graded = as_answers(kept, title_of(path))
        refuse_bytes(state.size * answers.itemsize, f"the tensor {list(shape)} of {path}", most_bytes)
        notes += graded
    else:
        answers = kept
    values: Array = np.zeros(state.size, answers.dtype)
    values[cells] = answers
    return values.reshape(shape), state.reshape(shape)


def _weights(
    columns: dict[str, Any], place: npt.NDArray[np.int64], num_queries: int, path: Path
) -> npt.NDArray[Any] | None:
    """[Q] how often each query counts, from the rows and the `place` of each row's query; None where all count once.

    int64 where all are whole, else float64.
    """
    if "weight" not in columns:
        return None
    given = numbers(columns["weight"], "the column weight", path)
    wrong = given[~((given >= 0) & np.isfinite(given))]
    if wrong.size:
        raise DataError(f"{path} must hold numbers of at least 0 in the column weight, found {wrong[0]:g}")
    weights = np.zeros(num_queries)
    weights[place] = given
    if (weights[place] != given).any():
        raise DataError(f"{path} gives one query two weights; give it the same in every row")
    return plain_weights(weights)


def _classes(
    columns: dict[str, Any], place: npt.NDArray[np.int64], queries: list[Any], notes: list[str], path: Path
) -> tuple[str, ...]:
    """[Q] the class of each query as text; empty where the table has none, or not for every query.

    Raises DataError for a query with two.
    """
    name = next((name for name in _CLASSES if name in columns), None)
    if name is None:
        return ()
    values, codes = distinct_values(columns[name], name, path)
    words = ["" if value is None or value != value else str(value).strip() for value in values]  # NaN is not itself
    called = [printable(word) or None for word in words]
    found: list[str | None] = [None] * len(queries)
    pairs = np.unique(np.stack([place, codes]), axis=1)
    for query, code in pairs.T.tolist():
        said = called[code] if code >= 0 else None
        if said is None:
            continue
        if found[query] not in (None, said):
            raise DataError(
                f"{path} gives query {printable(str(queries[query]))} two classes in the column {name}: {found[query]} "
                f"and {said}; give it one, or call the column otherwise where it is no class"
            )
        found[query] = said
    known = tuple(said for said in found if said is not None)
    if 0 < len(known) < len(found):
        notes.append(f"{len(found) - len(known):,} queries have no {name}: classes are left out")
    return known if len(known) == len(found) else ()


def _shots(named: list[str], found: Sequence[list[Any]], path: Path) -> tuple[int, ...]:
    """[K] numbers of demonstrations; empty where no column says them."""
    if "shots" not in named:
        return ()
    shots = found[named.index("shots")]
    if not all(isinstance(k, int) for k in shots):
        raise DataError(f"{path} must hold whole numbers in the column shots, found {printable(str(shots[0]))}")
    return tuple(shots)


def _names(column: str, named: list[str], found: Sequence[list[Any]]) -> tuple[Any, ...]:
    """What the file calls the levels of an axis; empty where it has no such column."""
    return tuple(found[named.index(column)]) if column in named else ()


def _context_names(named: list[str], found: Sequence[list[Any]], path: Path) -> tuple[str, ...]:
    """[C] what the contexts are called; the file's name where it holds one context."""
    return tuple(printable(str(name)) for name in found[0]) if named[0] == "context" else (title_of(path),)
