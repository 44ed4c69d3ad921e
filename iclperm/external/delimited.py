"""CSV files as Excel, pandas, polars and NumPy write them: encoding, separator, decimal sign, header or none."""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iclperm.errors import DataError, printable
from iclperm.external.columns import is_nothing, is_value, number_of

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_SEPARATORS = ";\t|,"
_LONGEST_LINE = 1 << 24


@dataclass(frozen=True)
class Delimited:
    """How a file of separated values is written, and its first record."""

    path: Path
    encoding: str
    separator: str
    first: tuple[str, ...]
    """Cells of the first record as they are written: names, or data."""


def encoding_of(path: Path) -> str:
    """The encoding that a text file's first bytes tell: a byte-order mark, else UTF-8.

    Raises DataError for UTF-16 without a mark and for what is packed; OSError where it cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(64)
    for mark, encoding in _MARKS:
        if start.startswith(mark):
            return encoding
    if start.startswith(b"\x1f\x8b"):
        raise DataError(f"{path} is packed by gzip; unpack it first (gunzip)")
    if b"\0" in start:
        raise DataError(f"{path} holds zero bytes, as UTF-16 does without a byte-order mark; save it as UTF-8")
    return "utf-8"


def look_at(path: Path) -> Delimited:
    """How a file is written; raises DataError where its first line can be read in two ways, or is longer than 16 MB.

    Raises OSError, UnicodeDecodeError and csv.Error as reading does.
    """
    encoding = encoding_of(path)
    with path.open(encoding=encoding, newline="") as file:
        line = file.readline(_LONGEST_LINE)
        if len(line) == _LONGEST_LINE:
            raise DataError(f"{path} has a first line of more than {_LONGEST_LINE:,} letters; write a row a line")
        if line.lower().startswith("sep="):
            raise DataError(f"{path} begins with {printable(line.strip())}; delete this line")
        separator = _separator(line.strip("\r\n"), path)
        file.seek(0)
        first = next(csv.reader(file, delimiter=separator), [])
    return Delimited(path, encoding, separator, tuple(first))


def _separator(line: str, path: Path) -> str:
    """The sign between the cells of a line: ; before tab, | and comma, as commas stand in numbers too."""
    bare = re.sub(r'"[^"]*"', '""', line)
    sign = next((sign for sign in _SEPARATORS if sign in bare), ",")
    if sign != "," and "," in bare and not all(is_value(cell) for cell in bare.split(sign)):
        raise DataError(f"{path} has both {sign!r} and ',' in its first line; separate its columns by one of them")
    return sign


def read_cells(given: Delimited, columns: Sequence[str] | None) -> Any:
    """An Arrow table of text, all cells as they are written.

    `columns` are names of the first record: they are read below it. None reads everything, the first record too, and
    numbers the columns. Raises pyarrow's errors.
    """
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    names = [f"f{number}" for number in range(len(given.first))] if columns is None else list(columns)
    return arrow_csv.read_csv(
        given.path,
        read_options=arrow_csv.ReadOptions(
            autogenerate_column_names=columns is None, encoding=given.encoding.removesuffix("-sig")
        ),
        parse_options=arrow_csv.ParseOptions(
            delimiter=given.separator, newlines_in_values=True, ignore_empty_lines=len(given.first) > 1
        ),
        convert_options=arrow_csv.ConvertOptions(
            include_columns=columns,
            column_types=dict.fromkeys(names, pa.dictionary(pa.int32(), pa.string())),
            strings_can_be_null=False,
        ),
    )


def has_header(first: Sequence[str], cells_of: Callable[[int], Sequence[str]], num_rows: int, path: Path) -> bool:
    """Whether the first of the `num_rows` records of a matrix are names; `cells_of` gives a column's cells below it.

    Words are names. So are distinct numbers of which some cannot be an answer or an accuracy (0, 1, 2, …), behind an
    empty first cell too. Raises DataError where 0, or 0 and 1, may be both.
    """
    first = [cell.strip() for cell in first]
    rest = first[1:] if len(first) > 1 and is_nothing(first[0]) else first
    if not all(is_value(cell) for cell in rest):
        return True
    found = [number_of(cell) for cell in rest]
    if any(number < 0 or number > 1 for number in found) and len(set(found)) == len(found):  # NaN is neither
        return True
    if num_rows < 2 or rest != ["0", "1"][: len(rest)]:
        return False
    if len(rest) < len(first):
        labels = [cell.strip() for cell in cells_of(0)]
        if counts_rows(labels) or not all(is_value(label) for label in labels):
            return True
        if len(set(labels)) < len(labels):
            return False
    shown = printable(",".join(first))
    raise DataError(
        f"{path} begins with the line {shown}, which may be names or data; name the columns by words, such as "
        f"{','.join(f'c{number}' for number in range(len(first)))}"
    )


def counts_rows(cells: Sequence[str]) -> bool:
    """Whether cells are different whole numbers that cannot all be answers, such as 0, 1, 2, …: an index."""
    if not all(cell.strip().isdecimal() for cell in cells):
        return False
    found = {int(cell) for cell in cells}
    return len(found) == len(cells) and not found <= {0, 1}
