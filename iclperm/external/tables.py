"""Answers and accuracies in tables: CSV, Parquet and exported rows, long or a plain matrix."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from iclperm.errors import DataError, RequestError, is_out_of_memory, printable
from iclperm.external.jsonl import json_rows
from iclperm.external.tensor import (
    AXES,
    MISSING,
    Array,
    Tensor,
    as_answers,
    as_shares,
    in_order,
    missing_note,
    of_array,
    one_line,
    refuse_bytes,
    title_of,
)
from iclperm.stats.sensitivity import FloatArray

_COLUMNS = ("split", "set", "permutation", "shots", "context", "query", "weight", "correct", "state", "accuracy")
_IS_A_WORD = re.compile(r"[^\W\d_]{2,}")  # a column called so says what it holds; f0 or 1 does not


def read_csv(path: Path, axes: str | None, most_bytes: int) -> Tensor:
    """A table, or a matrix with or without a header; raises what `_of_table` does, and DataError for other files."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    try:
        with path.open(encoding="utf-8", newline="") as file:
            header = next(csv.reader([file.readline(1 << 20)]), [])
        is_matrix = all(_is_number(name) for name in header)
        wanted = None if is_matrix else _long_columns(header)
        table = arrow_csv.read_csv(
            path,
            read_options=arrow_csv.ReadOptions(autogenerate_column_names=is_matrix),
            convert_options=arrow_csv.ConvertOptions(include_columns=wanted),
        )
    except (OSError, UnicodeDecodeError, pa.ArrowException, csv.Error) as error:
        if is_out_of_memory(error):
            raise
        raise DataError(f"{path} is not a .csv file that can be read: {one_line(error)}") from None
    return _of_table(table, axes, path, most_bytes)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return not text.strip()
    return True


def read_parquet(path: Path, axes: str | None, most_bytes: int) -> Tensor:
    """A table or a matrix; raises what `_of_table` does, and DataError for other files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names, metadata = file.schema_arrow.names, file.metadata
            sizes = (metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
            refuse_bytes(sum(sizes), f"{path}, unpacked,", most_bytes)
            refuse_bytes(8 * metadata.num_rows, f"a column of {path}", most_bytes)
            table = file.read(columns=_long_columns(names))
    except (OSError, pa.ArrowException) as error:
        if is_out_of_memory(error):
            raise
        raise DataError(f"{path} is not a .parquet file that can be read: {one_line(error)}") from None
    return _of_table(table, axes, path, most_bytes)


def read_rows(path: Path, names: Sequence[str], axes: str | None, most_bytes: int) -> Tensor:
    """A .jsonl file whose rows have the keys `names`; raises what `_of_table` does, and DataError for mixed values."""
    import pyarrow as pa

    wanted = _long_columns(names) or []
    found = [[row.get(name) for name in wanted] for row in json_rows(path)]
    try:
        table = pa.table(
            {name: pa.array(column) for name, column in zip(wanted, zip(*found, strict=True), strict=True)}
        )
    except pa.ArrowException as error:
        if is_out_of_memory(error):
            raise
        raise DataError(f"{path} mixes kinds of values in a column: {one_line(error)}") from None
    return _of_table(table, axes, path, most_bytes)


def _long_columns(names: Sequence[str]) -> list[str] | None:
    """The columns that are read of a long table, a row an answer or an accuracy; None for a plain matrix."""
    if "correct" in names or "accuracy" in names:
        return [name for name in _COLUMNS if name in names]
    return None


def _of_table(table: Any, axes: str | None, path: Path, most_bytes: int) -> Tensor:
    """An Arrow table as a tensor: a long one, which names its axes by its columns, or a plain matrix of numbers.

    Raises DataError for values, columns or rows that make no tensor, or one of more than `most_bytes`; RequestError
    where the columns name the axes and `axes` are given too, or do not and `axes` are needed.
    """
    names = table.column_names
    if _long_columns(names) is None:
        matrix, called = _matrix(table, path, most_bytes), printable(", ".join(names))[:80]
        if axes is None and any(_IS_A_WORD.search(name) for name in names):
            raise RequestError(
                f"{path} has the columns {called!r}; call them query and correct (with context, or set, permutation "
                "and shots), or say what rows and columns are: --axes QC where a row is a query, CQ where it is a "
                "context, SP for accuracies"
            )
        return of_array(matrix, axes, title_of(path))
    if axes is not None:
        raise RequestError(f"{path} names its own axes by its columns; leave axes {axes!r} out")
    return _of_columns({name: table.column(name) for name in _long_columns(names) or ()}, path, most_bytes)


def _matrix(table: Any, path: Path, most_bytes: int) -> FloatArray:
    """The numbers of all columns, float64 [rows, columns]."""
    import pyarrow as pa

    def is_numeric(kind: Any) -> bool:
        return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))

    wrong = next((name for name in table.column_names if not is_numeric(table.schema.field(name).type)), None)
    if wrong is not None or not table.num_rows:
        raise DataError(
            f"{path} is neither a matrix of numbers (column {printable(str(wrong))!r}) nor a table with the columns "
            "query and correct; see docs/statistics.md"
        )
    refuse_bytes(8 * table.num_rows * table.num_columns, f"the matrix in {path}", most_bytes)
    columns = [column.cast(pa.float64()).to_numpy(zero_copy_only=False) for column in table.columns]
    return np.stack(columns, axis=1)


def _of_columns(columns: dict[str, Any], path: Path, most_bytes: int) -> Tensor:
    """The columns of a long table, each row of which is a cell of the tensor."""
    import pyarrow.compute as pc

    notes: list[str] = []
    if "split" in columns:
        splits = sorted(map(str, pc.unique(columns["split"]).to_pylist()))
        split = "test" if "test" in splits else splits[0]
        if len(splits) > 1 and split != "test":
            raise DataError(f"{path} holds the splits {', '.join(map(printable, splits))}; keep one, or name one test")
        if len(splits) > 1:
            notes.append("only the split test is described")
        keep = pc.equal(columns["split"], split)
        columns = {name: column.filter(keep) for name, column in columns.items()}
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
    levels, places = zip(*(_levels(columns[name], name, path) for name in named), strict=True)
    shape = tuple(len(level) for level in levels)
    if not math.prod(shape):
        raise DataError(f"{path} has no rows")
    refuse_bytes(math.prod(shape) * (1 if has_answers else 8), f"the tensor {list(shape)} of {path}", most_bytes)
    cells: npt.NDArray[np.int64] = np.asarray(np.ravel_multi_index(places, shape), dtype=np.int64)
    _refuse_twice(cells, shape, named, levels, path)
    values, state = _spread_out(columns, cells, shape, has_answers, path)
    arranged, axes = in_order(values, "".join(letters[name] for name in named))
    if not has_answers:
        if state.any():
            raise DataError(
                f"{path} lacks {np.count_nonzero(state):,} of {state.size:,} cells; give an accuracy for each"
            )
        return Tensor(
            as_shares(arranged, title_of(path)), axes, shots=_shots(named, levels, path), title=title_of(path)
        )
    missing = state != 0
    notes += missing_note(missing)
    return Tensor(
        arranged,
        axes,
        state=in_order(state, "".join(letters[name] for name in named))[0] if missing.any() else None,
        weights=_weights(columns, places[-1], shape[-1], path),
        shots=_shots(named, levels, path),
        names=_context_names(named, levels, path) if axes == "CQ" else (),
        title=title_of(path),
        notes=tuple(notes),
    )


def _levels(column: Any, name: str, path: Path) -> tuple[list[Any], npt.NDArray[np.int64]]:
    """The distinct values of a column in ascending order, and each row's place among them, int64 [rows]."""
    if column.null_count:
        raise DataError(f"{path} has {column.null_count:,} rows without a value of {name!r}; fill them in")
    encoded = column.combine_chunks().dictionary_encode()
    values = encoded.dictionary.to_pylist()
    try:
        order = sorted(range(len(values)), key=values.__getitem__)
    except TypeError:
        raise DataError(f"{path} mixes kinds of values in the column {name!r}; use one") from None
    rank = np.empty(len(values), np.int64)
    rank[order] = np.arange(len(values))
    return [values[i] for i in order], rank[encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)]


def _refuse_twice(
    cells: npt.NDArray[np.int64], shape: tuple[int, ...], named: list[str], levels: Sequence[list[Any]], path: Path
) -> None:
    """Raises DataError, naming the cell, where two rows are of one cell."""
    seen = np.zeros(math.prod(shape), np.bool_)
    seen[cells] = True
    if np.count_nonzero(seen) == len(cells):
        return
    order = np.sort(cells)
    twice = order[1:][order[1:] == order[:-1]][0]
    where = ", ".join(
        f"{name} {printable(str(level[place]))}"
        for name, level, place in zip(named, levels, np.unravel_index(twice, shape), strict=True)
    )
    raise DataError(f"{path} has two rows for {where}; keep one")


def _spread_out(
    columns: dict[str, Any], cells: npt.NDArray[np.int64], shape: tuple[int, ...], has_answers: bool, path: Path
) -> tuple[Array, npt.NDArray[np.uint8]]:
    """Values and states of all cells, both of `shape`, from the rows' `cells`; a cell without a row is missing."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = columns["correct" if has_answers else "accuracy"]
    try:
        numbers = pc.fill_null(column.cast(pa.float64()), math.nan).to_numpy()
    except pa.ArrowException as error:
        if is_out_of_memory(error):
            raise
        raise DataError(
            f"{path} holds {column.type} in the column of answers; use 0 and 1, or true and false"
        ) from None
    absent = np.isnan(numbers)
    if "state" in columns and has_answers:
        state_column = columns["state"]
        ok = "ok" if pa.types.is_string(state_column.type) or pa.types.is_large_string(state_column.type) else 0
        absent |= ~pc.fill_null(pc.equal(state_column, ok), False).to_numpy()
    state = np.full(math.prod(shape), MISSING, np.uint8)
    state[cells] = absent
    if has_answers:
        answers, _, _ = as_answers(numbers, title_of(path))
        values: Array = np.zeros(state.size, np.uint8)
        values[cells] = np.where(absent, 0, answers)
    else:
        values = np.zeros(state.size)
        values[cells] = np.where(absent, 0, numbers)
    return values.reshape(shape), state.reshape(shape)


def _weights(
    columns: dict[str, Any], place: npt.NDArray[np.int64], num_queries: int, path: Path
) -> npt.NDArray[np.int64] | None:
    """[Q] how often each query counts, from the rows and the `place` of each row's query; None where all count once."""
    if "weight" not in columns:
        return None
    given = columns["weight"].to_numpy()
    weights = np.zeros(num_queries, np.int64)
    if given.dtype.kind not in "iu" or (given < 0).any():
        raise DataError(f"{path} must hold whole numbers in the column weight, got {given.dtype}")
    weights[place] = given
    if (weights[place] != given).any():
        raise DataError(f"{path} gives one query two weights; give it the same in every row")
    return None if (weights == 1).all() else weights


def _shots(named: list[str], levels: Sequence[list[Any]], path: Path) -> tuple[int, ...]:
    """[K] numbers of demonstrations; empty where no column says them."""
    if "shots" not in named:
        return ()
    shots = levels[named.index("shots")]
    if not all(isinstance(k, int) for k in shots):
        raise DataError(f"{path} must hold whole numbers in the column shots, found {printable(str(shots[0]))}")
    return tuple(shots)


def _context_names(named: list[str], levels: Sequence[list[Any]], path: Path) -> tuple[str, ...]:
    """[C] what the contexts are called; the file's name where it holds one context."""
    return tuple(printable(str(name)) for name in levels[0]) if named[0] == "context" else (title_of(path),)
