"""Tables that are plain matrices: names told from numbers, an index left out, and axes named by the first column."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from iclperm.errors import DataError, RequestError, printable
from iclperm.external.columns import distinct_values, first_repeated, is_value, number_of, numbers
from iclperm.external.delimited import Delimited, counts_rows, has_header, read_cells
from iclperm.external.tensor import AXES, Tensor, of_array, refuse_bytes, title_of
from iclperm.stats.sensitivity import FloatArray

_TWO_BY_TWO = [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
_IS_A_WORD = re.compile(r"[^\W\d_]{2,}")  # a column called so says what it holds; f0 or 1 does not
_INDEX = re.compile(r"(|#|id|idx|index|row|level_0|__index_level_\d+__|unnamed: \d+)(_duplicated_\d+)?")
_COLUMN_AXES = {"query": "C", "context": "Q", "set": "P", "permutation": "S"}
"""What the columns are where the first one names the rows, unless `axes` say it."""
_LINES = {
    2: "query,correct",
    3: "context,query,correct",
    4: "set,permutation,query,correct",
    5: "set,permutation,shots,query,correct",
    6: "set,permutation,shots,query,class,correct",
}
"""What the first line of a row an answer may be, by its number of columns."""
_SUMMARIES = frozenset(("all", "average", "avg", "count", "max", "mean", "median", "min", "std", "sum", "total"))
_CELLS = frozenset((*_COLUMN_AXES, "split", "shots", "weight", "state", "class", "gold", "label", "target"))


def matrix_of_csv(given: Delimited, axes: str | None, most_bytes: int) -> Tensor:
    """A matrix with or without a header and an index; raises what `matrix_of_columns` does, and pyarrow's errors."""
    columns = list(read_cells(given, None).columns)
    num_rows = len(columns[0]) if columns else 0

    def cells_of(number: int, begin: int = 1) -> list[str]:
        values, codes = distinct_values(columns[number], str(number), given.path)
        return [values[code] for code in codes[begin:]]

    is_small = len(columns) <= len(_TWO_BY_TWO) + 1
    top = [tuple(cells_of(number, begin=0)[:2]) for number in range(len(columns))] if is_small else []
    if top and top in (_TWO_BY_TWO, [top[0], *_TWO_BY_TWO]):
        raise DataError(
            f"{given.path} begins with 0,0,1,1 above 0,1,0,1, which may be names of columns on two levels or data; "
            "name the columns by words in one line, such as c0,c1,c2,c3"
        )
    is_named = has_header(given.first, cells_of, num_rows, given.path)
    if axes is None and len(columns) <= max(_LINES):
        _refuse_unnamed(given, [[cell.strip() for cell in cells_of(n, begin=0)] for n in range(len(columns))])
    if is_named:
        return matrix_of_columns(
            list(given.first), [column.slice(1) for column in columns], axes, given.path, most_bytes
        )
    if num_rows > 1 and len(columns) > 1 and [cell.strip() for cell in cells_of(0, begin=0)] == ["0", "1"]:
        raise DataError(
            f"{given.path} has two rows that begin with 0 and 1, which may be an index or data; name the columns "
            "in a first line"
        )
    counted = [f"f{i}" for i in range(len(columns))]
    tensor = matrix_of_columns(counted, columns, axes, given.path, most_bytes, is_named=False)
    if num_rows == 1 and len(columns) > 1 and given.first[0].strip() == "0":
        return replace(tensor, notes=("its first value, 0, is taken for an answer and not for an index", *tensor.notes))
    return tensor


def matrix_of_columns(
    names: Sequence[str],
    columns: Sequence[Any],
    axes: str | None,
    path: Path,
    most_bytes: int,
    *,
    is_named: bool = True,
) -> Tensor:
    """The tensor of Arrow columns of numbers, [rows, columns], one of which may name the rows.

    `is_named` says whether the file has `names`, or they are only counted.

    A first column that is called query, context, set or permutation says what the rows are. One without a name, or
    called index, numbers them and is left out; so is one of different whole numbers beside others in 0..1. Raises
    DataError for what is no number, for two columns of one name and for rows or columns without any value; RequestError
    where neither names nor `axes` say what rows and columns are.
    """
    rows, labels, notes, names = "", [], [], [name.strip() for name in names]
    if columns and len(columns) > 1:
        first = names[0].lower()
        is_index = _INDEX.fullmatch(first) or (not is_value(first) and _counts(columns, path))
        if first in _COLUMN_AXES or is_index:
            rows = first if first in _COLUMN_AXES else ""
            labels = [printable(label) for label in _labels(columns[0], names[0], path)]
            if first and not rows:
                notes.append(f"the first column, {printable(names[0])!r}, is taken for an index and left out")
            names, columns = names[1:], columns[1:]
    _refuse_names(names, axes, rows, path)
    summary = next((word for word in (*labels, *names) if word.lower() in _SUMMARIES), None)
    if summary is not None:
        raise DataError(f"{path} has a row or column called {printable(summary)}, a summary of others; delete it")
    twice = first_repeated(labels) if rows else None
    if twice is not None:
        raise DataError(f"{path} has two rows for {rows} {twice}; keep one")
    matrix = _matrix(names, columns, path, most_bytes)
    letters = _letters(matrix, None if axes is None else axes.upper(), rows, path)
    contexts: Sequence[str] = ()
    if letters == "CQ" and labels and (rows == "context" or not counts_rows(labels)):
        contexts = labels
    elif letters == "QC" and is_named:
        contexts = [printable(name) for name in names]
    tensor = of_array(matrix, letters, title_of(path))
    if tensor.axes == "CQ" and len(contexts) == len(tensor.values):
        tensor = replace(tensor, names=tuple(contexts))
    return replace(tensor, notes=(*notes, *tensor.notes))


def _refuse_unnamed(given: Delimited, columns: Sequence[Sequence[str]]) -> None:
    """Raises DataError for a row an answer without a line of names: columns of answers beside columns of names, words
    or whole numbers, of which some occur again."""
    answers = [number for number, cells in enumerate(columns) if all(map(_is_share, cells))]
    rest = [cells for number, cells in enumerate(columns) if number not in answers]
    are_names = all(cell and (cell.isdecimal() or not is_value(cell)) for cells in rest for cell in cells)
    if answers and are_names and any(cells[0] in cells[1:] for cells in rest):
        raise DataError(
            f"{given.path} begins with {printable(','.join(given.first))[:60]}, which names no column; write a first "
            f"line that does, such as {_LINES.get(len(columns), _LINES[4])}"
        )


def _is_share(cell: str) -> bool:
    return is_value(cell) and not (number_of(cell) < 0 or number_of(cell) > 1)


def _counts(columns: Sequence[Any], path: Path) -> bool:
    """Whether the first column is of different whole numbers, and all others within 0..1: an index with a name."""
    if not counts_rows(_labels(columns[0], "the first column", path)):
        return False
    others = (value for column in columns[1:] for value in distinct_values(column, "a column", path)[0])
    return all(is_value(value) and not (number_of(value) < 0 or number_of(value) > 1) for value in others)


def _labels(column: Any, name: str, path: Path) -> list[str]:
    """The cells of a column as text; a whole number without a point."""
    values, codes = distinct_values(column, name, path)
    words = [str(int(v)) if isinstance(v, float) and v.is_integer() else str(v).strip() for v in values]
    return [words[code] if code >= 0 else "" for code in codes]


def _refuse_names(names: Sequence[str], axes: str | None, rows: str, path: Path) -> None:
    """Raises DataError for a name twice, RequestError for words that leave open what rows and columns are."""
    called = printable(", ".join(names))[:80]
    words = [name.strip().lower() for name in names if not is_value(name)]
    other = next((name for name in words if name in _CELLS), None)
    if other is not None:
        raise DataError(
            f"{path} has a column {other!r} but none called correct or accuracy; write a row an answer, with the "
            "columns query and correct, or leave the column out"
        )
    twice = first_repeated(words)
    if twice is not None:
        raise DataError(f"{path} has two columns named {printable(twice)!r}; keep one")
    if axes is None and not rows and any(_IS_A_WORD.search(name) for name in names if not is_value(name)):
        raise RequestError(
            f"{path} has the columns {called!r}; call them query and correct (with context, or set, permutation "
            "and shots), or say what rows and columns are: --axes QC where a row is a query, CQ where it is a "
            "context, SP for accuracies"
        )


def _matrix(names: Sequence[str], columns: Sequence[Any], path: Path, most_bytes: int) -> FloatArray:
    """The numbers of all columns, float64 [rows, columns]; NaN where a cell says nothing."""
    num_rows = len(columns[0]) if columns else 0
    if not num_rows:
        raise DataError(f"{path} has no rows; give a matrix with some")
    refuse_bytes(8 * num_rows * len(columns), f"the matrix in {path}", most_bytes)
    found = []
    for name, column in zip(names, columns, strict=True):
        try:
            found.append(numbers(column, f"the column {printable(name)!r}", path))
        except DataError as error:
            raise DataError(
                f"{path} is neither a matrix of numbers (column {printable(name)!r}) nor a table with the columns "
                f"query and correct: {str(error).removeprefix(f'{path} ')}"
            ) from None
    matrix = np.stack(found, axis=1)
    there = ~np.isnan(matrix)
    for axis, what in ((0, "column"), (1, "row")):
        empty = np.flatnonzero(~there.any(axis=axis))
        if len(empty) and there.any():
            raise DataError(f"{path} has no value in {what} {empty[0] + 1} of its numbers; delete what is empty")
    return matrix


def _letters(matrix: FloatArray, axes: str | None, rows: str, path: Path) -> str | None:
    """What rows and columns are: `axes`, or what the name of the first column tells; None where nothing does."""
    if not rows:
        return axes
    letter = {name: axis for axis, name in AXES.items()}[rows]
    if axes is not None:
        if len(axes) != 2 or axes[0] != letter:
            raise RequestError(f"{path} names its rows {rows}: axes {axes!r} must be two and begin with {letter}")
        return axes
    is_binary = bool(((matrix == 0) | (matrix == 1) | np.isnan(matrix)).all())
    if letter in "SP" and is_binary:
        raise RequestError(
            f"{path} names its rows {rows} and holds only 0 and 1: write --axes {letter}Q where a column is a query, "
            f"{letter}{_COLUMN_AXES[rows]} for accuracies"
        )
    return letter + _COLUMN_AXES[rows]
