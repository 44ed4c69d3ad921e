"""Rows of data files, strictly: what is damaged is named by file and line, never skipped."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from iclperm.base import parquet
from iclperm.base.files import read_given, what_fetches
from iclperm.errors import DataError, is_out_of_memory

if TYPE_CHECKING:
    import pyarrow as pa

MAX_ROW_BYTES = 1 << 20
ENCODINGS = ("utf-8", "utf-16", "cp1252", "latin-1")
DELIMITERS = (",", ";", "\t", "|")
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # of JSON: an escape, not an escaped backslash before "u0000"
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False)

Row: TypeAlias = tuple[str, dict[str, Any]]  # its place, "file:line", and its value for each column


@dataclass(frozen=True)
class TextForm:
    """How the text files of a task are written, where that is not UTF-8, commas in .csv and a line of names."""

    encoding: str | None = None
    delimiter: str | None = None
    names: tuple[str, ...] | None = None
    """Of the columns, where the file has none."""


def read_rows(
    path: Path, columns: Collection[str], form: TextForm = TextForm(), optional: Collection[str] = ()
) -> list[Row]:
    """All rows of a .jsonl, .csv, .tsv or .parquet file, each with its place ("file:line"; Parquet: "file:row N").

    ``columns`` are those that the caller needs, ``optional`` others that may be there: Parquet files are read no
    further. A CSV or TSV file opens with its column names, is quoted as RFC 4180 has it, and all its values are text,
    unless ``form`` says otherwise; the place of a row that spans lines is the first. Blank lines are passed over, and a
    byte order mark is obeyed. Raises `DataError` naming file and line for what is damaged, not in its encoding, of the
    wrong shape or over 1 MiB a row, for NUL and lone surrogates, and for a file without rows. Reads the file once;
    O(bytes).
    """
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise DataError(f"{path}: cannot be read as data; give a {', '.join(_READERS)} file")
    if optional and path.suffix == ".parquet":
        columns = [*columns, *(column for column in parquet_columns(path) if column in optional)]
    return checked(str(path), reader(path, given_bytes(path), columns, form))


def given_bytes(path: Path) -> bytes:
    """The bytes of a data file; raises `DataError` where they cannot be read, or are but a pointer to the data."""
    try:
        raw = read_given(path)
    except OSError as error:
        if is_out_of_memory(error):
            raise
        if command := what_fetches(path):
            raise DataError(f"{path}: is not here, only a pointer to it; run: {command}") from None
        raise DataError(f"{path}: cannot be read: {error.strerror}; give the path of a data file") from None
    if command := what_fetches(path, raw):
        raise DataError(f"{path}: is not here, only a pointer to it; run: {command}")
    return raw


def parquet_columns(path: Path) -> list[str]:
    """The names of the columns of a Parquet file; raises as `read_rows`."""
    with _damage_named(path):
        return list(parquet.schema_of(given_bytes(path)).names)


def checked(name: str, rows: Iterable[Row]) -> list[Row]:
    """The rows, none of them oversized, unprintable or holding NUL; raises `DataError` where there are none."""
    kept = [(place, _sound(place, row)) for place, row in rows]
    if not kept:
        raise DataError(f"{name}: holds no rows; give data with at least one")
    return kept


def arrow_rows(name: str, table: pa.Table) -> Iterator[Row]:
    """The rows of an Arrow table of text, numbers, booleans and lists of them; other columns are refused by name."""
    for field in table.schema:
        if not _is_plain(field.type):
            raise DataError(
                f"{name}: the column {field.name!r} holds {field.type}; text, numbers, booleans and lists of them are "
                "read: convert it"
            )
    try:
        rows = table.to_pylist()
    except ValueError as error:  # text that is not UTF-8, or another of pyarrow's complaints
        raise DataError(f"{name}: is damaged: {_one_line(error)}; make or download it anew") from None
    for number, row in enumerate(rows, start=1):
        yield f"{name}:row {number}", row


def missing_column(place: str, column: str, columns: Iterable[str]) -> DataError:
    """The error for a column that the task names and the data lacks."""
    there = ", ".join(map(repr, columns)) or "none"
    return DataError(
        f"{place}: the column {column!r} is missing; the columns are {there}: name one of them under the task's "
        "'fields', 'label_field' or its answer's 'field', or repair the row"
    )


def _jsonl(path: Path, raw: bytes, columns: Collection[str], form: TextForm) -> Iterator[Row]:
    if form.encoding is not None or raw.startswith(_UTF16_MARKS):
        raw = text_in(path, raw, form.encoding).encode("utf-8", "surrogatepass")
    for number, line in enumerate(raw.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if line.strip():
            place = f"{path}:{number}"
            yield place, json_row(place, line)


def json_row(place: str, line: bytes) -> dict[str, Any]:
    """The row that one JSON object is; raises `DataError` for another value, a key that occurs twice, and its size."""
    _refuse_oversize(place, len(line))
    try:
        row = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_once_each)
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 (byte {error.start} of the line); save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not one JSON object a line: {error}; repair the row") from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: a JSON object is needed, not {type(row).__name__}; write one object a line")
    return row


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return row


def _csv(path: Path, raw: bytes, columns: Collection[str], form: TextForm) -> Iterator[Row]:
    return _table_rows(path, raw, columns, form, form.delimiter or ",")


def _tsv(path: Path, raw: bytes, columns: Collection[str], form: TextForm) -> Iterator[Row]:
    return _table_rows(path, raw, columns, form, form.delimiter or "\t")


def _table_rows(path: Path, raw: bytes, columns: Collection[str], form: TextForm, delimiter: str) -> Iterator[Row]:
    text = text_in(path, raw, form.encoding)
    if form.names is None and not _has_all(columns, first := first_record(text, delimiter)):
        for sign in DELIMITERS:
            if _has_all(columns, first_record(text, sign)):
                raise DataError(
                    f"{path}:1: {sign!r} stands between its columns, not {delimiter!r} (read so, the columns are "
                    f"{', '.join(map(repr, first))}); add delimiter: {sign!r} under the task's 'data'"
                )
    records = iter(table_records(path, text, delimiter))
    place, names = next(records, (f"{path}:1", [])) if form.names is None else (f"{path}:1", [*form.names])
    for name, count in Counter(names).items():
        if not name.strip() or count > 1:
            raise DataError(f"{place}: the column name {name!r} is blank or occurs twice; give every column its own")
    for place, values in records:
        if len(values) != len(names):
            raise DataError(
                f"{place}: values in the row: {len(values)}, columns in the header: {len(names)}; repair the row "
                "(quote a value that holds the delimiter, a quote or a line break)"
            )
        yield place, dict(zip(names, values, strict=True))


def _has_all(columns: Collection[str], there: Collection[str]) -> bool:
    return all(column in there for column in columns)


def first_record(text: str, delimiter: str) -> list[str]:
    """The cells of the first line of a table; none where it cannot be read."""
    try:
        with _wide_fields():
            return next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), [])
    except csv.Error:
        return []


def table_records(path: Path, text: str, delimiter: str) -> list[tuple[str, list[str]]]:
    """Every record that is not a blank line, with the line at which it starts; nor are white space and delimiters of
    another number than those of the first record."""
    records: list[tuple[str, list[str]]] = []
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    with _wide_fields():
        while True:
            place = f"{path}:{reader.line_num + 1}"
            try:
                record = next(reader, None)
            except csv.Error as error:
                raise DataError(f"{place}: not valid {path.suffix[1:].upper()}: {error}; check its quotes") from None
            if record is None:
                return records
            if any(map(str.strip, record)) or (record and (not records or len(record) == len(records[0][1]))):
                records.append((place, record))


@contextmanager
def _wide_fields() -> Iterator[None]:
    # The csv module's limit is the process's: lent, and given back.
    limit = csv.field_size_limit(MAX_ROW_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def text_in(path: Path, raw: bytes, encoding: str | None) -> str:
    """The text of a file: as its byte order mark says, else in the encoding that is named, else in UTF-8."""
    if raw.startswith(_UTF16_MARKS):
        encoding = "utf-16"
    try:
        return raw.removeprefix(codecs.BOM_UTF8).decode(encoding or "utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        if encoding:
            remedy = f"name its encoding under the task's 'data' ({', '.join(ENCODINGS)})"
            raise DataError(f"{path}:{line}: not {encoding} (byte {error.start} of the file); {remedy}") from None
        raise DataError(f"{path}:{line}: not UTF-8 (byte {error.start} of the file); save the file as UTF-8") from None


def _parquet(path: Path, raw: bytes, columns: Collection[str], form: TextForm) -> Iterator[Row]:
    with _damage_named(path):
        names = parquet.schema_of(raw).names
        for column in columns:
            if names.count(column) > 1:
                raise DataError(f"{path}: the column {column!r} occurs twice; give every column its own name")
            if column not in names:
                raise missing_column(f"{path}:row 1", column, names)
        table = parquet.read_table(raw, list(columns))
    return arrow_rows(str(path), table)


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except parquet.Unpacks as error:
        raise DataError(f"{path}: {error}; give a smaller file, or split it") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        raise DataError(f"{path}: is damaged or not Parquet: {_one_line(error)}; make or download it anew") from None


def _is_plain(kind: pa.DataType) -> bool:
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_plain(kind.value_type)
    if types.is_dictionary(kind):
        return _is_plain(kind.value_type)
    if types.is_struct(kind):
        return all(_is_plain(kind.field(index).type) for index in range(kind.num_fields))
    is_text = types.is_string(kind) or types.is_large_string(kind)
    is_number = types.is_integer(kind) or types.is_float32(kind) or types.is_float64(kind)
    return bool(is_text or is_number or types.is_boolean(kind) or types.is_null(kind))


def _sound(place: str, row: dict[str, Any]) -> dict[str, Any]:
    # Escapes and Arrow buffers can hold what a text file's bytes cannot, so the values are looked at.
    try:
        canonical = _JSON.encode(row)
        _refuse_oversize(place, len(canonical.encode("utf-8")))
    except UnicodeEncodeError:
        raise DataError(f"{place}: holds a lone surrogate; repair the text") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: holds a value that cannot be read: {error}; repair the row") from None
    if "\\u0000" in canonical and _NUL.search(canonical):  # the pattern alone would be most of the cost
        raise DataError(f"{place}: holds a NUL character; remove it")
    return row


def _refuse_oversize(place: str, num_bytes: int) -> None:
    if num_bytes > MAX_ROW_BYTES:
        raise DataError(f"{place}: the row has {num_bytes} bytes; at most {MAX_ROW_BYTES} are read")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


_READERS: dict[str, Callable[[Path, bytes, Collection[str], TextForm], Iterator[Row]]] = {
    ".jsonl": _jsonl,
    ".csv": _csv,
    ".tsv": _tsv,
    ".parquet": _parquet,
}
SUFFIXES = tuple(_READERS)
