"""Parquet that somebody else may have written: what it unpacks to is reckoned before any of it is decoded.

A few bytes can stand for a thousand million values (run lengths, one long text in a dictionary), and the footer may say
less than the pages hold. So the header of every page is looked at first, in the places where the format has them:
https://parquet.apache.org/docs/file-format/
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

LEAST_ALLOWED = 256 << 20
"""Bytes that any file may unpack to; a larger one to `MOST_RATIO` times its own size beyond."""
MOST_RATIO = 1_000
MOST_FOOTER = 64 << 20
MOST_LEVELS = 16
"""Of columns in each other."""
_VALUE_BYTES = 8
# Threads that still read when the interpreter ends can abort the process.
_IN_THIS_THREAD: dict[str, bool] = {"pre_buffer": False}


class Unpacks(ValueError):
    """A file that would unpack to more than is read."""


def read_table(
    raw: bytes, columns: Sequence[str] | None = None, *, most_rows: int | None = None, most_bytes: int | None = None
) -> pa.Table:
    """The table in the bytes of a Parquet file, or some of its columns.

    Raises `Unpacks` where it has more than ``most_rows``, or would take more than ``most_bytes`` or than any file of
    its size honestly does; and what pyarrow raises, or ValueError, for other damage.
    """
    try:
        return _read_table(raw, columns, most_rows, most_bytes)
    except (IndexError, struct.error, OverflowError):
        raise ValueError("ends before its headers do") from None


def _read_table(raw: bytes, columns: Sequence[str] | None, most_rows: int | None, most_bytes: int | None) -> pa.Table:
    import pyarrow.parquet as pq

    allowed = LEAST_ALLOWED + MOST_RATIO * len(raw)
    allowed = allowed if most_bytes is None else min(allowed, most_bytes)
    file = _opened(raw)
    if most_rows is not None and file.metadata.num_rows > most_rows:
        raise Unpacks(f"has {file.metadata.num_rows:,} rows; at most {most_rows:,} can be")
    least, most = _unpacked_bytes(raw, file)
    _refuse(least, allowed)
    if most <= allowed:
        return file.read(columns=None if columns is None else list(columns), use_threads=False)
    # The longest text of a dictionary may stand in every row, or in one: read as it is stored, that can be counted.
    import pyarrow as pa

    texts = [
        name for name, kind in zip(file.schema_arrow.names, file.schema_arrow.types, strict=True) if _is_text(kind)
    ]
    stored = pq.ParquetFile(pa.BufferReader(raw), read_dictionary=texts, **_IN_THIS_THREAD)
    table = stored.read(columns=None if columns is None else list(columns), use_threads=False)
    _refuse(least + sum(_text_bytes(chunk) for column in table.columns for chunk in column.chunks), allowed)
    kinds = pa.schema([file.schema_arrow.field(name) for name in table.column_names], file.schema_arrow.metadata)
    return table.cast(kinds)


def metadata_of(raw: bytes) -> dict[bytes, bytes]:
    """What the footer of such a file says beside the schema."""
    try:
        return dict(_opened(raw).schema_arrow.metadata or {})
    except (IndexError, struct.error, OverflowError):
        raise ValueError("ends before its headers do") from None


def _opened(raw: bytes) -> pq.ParquetFile:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if len(raw) < 12 or raw[-4:] != b"PAR1":
        raise ValueError("is not Parquet")
    size = int.from_bytes(raw[-8:-4], "little")
    if size > min(MOST_FOOTER, len(raw) - 8):
        raise Unpacks(f"has a footer of {size:,} bytes")
    _refuse_deep(raw, len(raw) - 8 - size)
    return pq.ParquetFile(pa.BufferReader(raw), **_IN_THIS_THREAD)


def _is_text(kind: pa.DataType) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind))


def _refuse(size: int, allowed: int) -> None:
    if size > allowed:
        raise Unpacks(f"would unpack to {size / 2**30:.1f} GB or more; at most {allowed / 2**30:.1f} GB are read of it")


def _text_bytes(array: pa.Array) -> int:
    """The bytes of text in an array that was read as a dictionary, once each row has its own."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not (isinstance(array, pa.DictionaryArray) and _is_text(array.dictionary.type)):
        return 0
    lengths = pc.binary_length(array.dictionary).cast(pa.int64())
    return int(pc.sum(lengths.take(array.indices)).as_py() or 0)


def _unpacked_bytes(raw: bytes, file: pq.ParquetFile) -> tuple[int, int]:
    """What all columns take in memory at least, plain texts in dictionaries counted once, and at most."""
    least = most = 0
    metadata = file.metadata
    for number in range(metadata.num_columns):
        column = file.schema.column(number)
        width = max(_VALUE_BYTES, column.length or 0)
        is_plain_text = column.physical_type == "BYTE_ARRAY" and column.max_repetition_level == 0
        levels = 4 if column.max_definition_level or column.max_repetition_level else 0
        for group in range(metadata.num_row_groups):
            chunk = metadata.row_group(group).column(number)
            values, packed, longest = _pages(raw, chunk)
            texts = values * longest if column.physical_type == "BYTE_ARRAY" else 0
            size = max(values * (width + levels), packed)
            least += size if is_plain_text and "." not in column.path else size + texts
            most += size + texts
    return least, most


def _pages(raw: bytes, chunk: pq.ColumnChunkMetaData) -> tuple[int, int, int]:
    """Of the pages of a column: how many values, how many bytes once decompressed, and those of the longest text in its
    dictionary, at most.

    Raises ValueError where they are not what the footer says.
    """
    begins = [chunk.data_page_offset]
    if chunk.dictionary_page_offset is not None:
        begins.append(chunk.dictionary_page_offset)
    at = min(begins)
    end = at + chunk.total_compressed_size
    if at < 0 or end > len(raw):
        raise ValueError("has a column outside of it")
    values = packed = longest = 0
    while at < end and values < chunk.num_values:
        header, at = _struct(raw, at, end)
        size, stored = header.get(2, -1), header.get(3, -1)
        kind = next((header[field] for field in (5, 7, 8) if isinstance(header.get(field), dict)), {})
        count = kind.get(1, 0)
        if not all(isinstance(number, int) and number >= 0 for number in (size, stored, count)):
            raise ValueError("has a page without its sizes")
        if header.get(1) == _DICTIONARY_PAGE and chunk.physical_type == "BYTE_ARRAY":
            is_small = size * chunk.num_values <= LEAST_ALLOWED >> 4
            longest = max(
                longest, size if is_small else _longest(raw[at : at + stored], size, count, chunk.compression)
            )
        at += stored
        packed += size
        if header.get(1) != _DICTIONARY_PAGE:
            values += count
    if values != chunk.num_values or at > end:
        raise ValueError("has pages that are not what its footer says")
    return values, packed, longest


def _longest(stored: bytes, size: int, count: int, codec: str) -> int:
    """The bytes of the longest text of a dictionary's page; of the whole page where that cannot be told."""
    import pyarrow as pa

    if size > LEAST_ALLOWED:
        return size
    try:
        page = stored if codec == "UNCOMPRESSED" else pa.decompress(stored, size, codec=codec.lower(), asbytes=True)
        at = longest = 0
        for _ in range(count):
            (length,) = struct.unpack_from("<I", page, at)
            at += 4 + length
            longest = max(longest, length)
    except (pa.ArrowException, ValueError, struct.error):  # another codec's framing
        return size
    return min(longest, size)


def _refuse_deep(raw: bytes, at: int) -> None:
    """Raises `Unpacks` for columns in each other, deeper than a reader's stack may hold."""
    end = len(raw) - 8
    fields, at = _until_list(raw, at, end)
    open_groups: list[int] = []
    for _ in range(fields):
        element, at = _struct(raw, at, end)
        while open_groups and open_groups[-1] == 0:
            open_groups.pop()
        if open_groups:
            open_groups[-1] -= 1
        if children := element.get(5, 0):
            open_groups.append(int(children))
        if len(open_groups) > MOST_LEVELS:
            raise Unpacks(f"has columns nested deeper than {MOST_LEVELS} levels")


_DICTIONARY_PAGE = 2
# Kinds of values of Thrift's compact protocol, in which Parquet writes its headers.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)


def _until_list(raw: bytes, at: int, end: int) -> tuple[int, int]:
    """The number of elements of a footer's schema, its second field, and where they begin."""
    number = 0
    while at < end:
        number, kind, at = _field(raw, at, number)
        if number == 2 and kind == _LIST:
            size, at = _list_head(raw, at)
            return size, at
        _, at = _value(raw, at, end, kind, 0)
    raise ValueError("has no schema")


def _struct(raw: bytes, at: int, end: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """The fields of a struct by their numbers, and where it ends; texts and lists are passed over."""
    found: dict[int, Any] = {}
    number = 0
    while at < end:
        if raw[at] == 0:
            return found, at + 1
        number, kind, at = _field(raw, at, number)
        found[number], at = _value(raw, at, end, kind, depth)
    raise ValueError("has a header that does not end")


def _field(raw: bytes, at: int, before: int) -> tuple[int, int, int]:
    head = raw[at]
    if delta := head >> 4:
        return before + delta, head & 15, at + 1
    number, at = _varint(raw, at + 1)
    return (number >> 1) ^ -(number & 1), head & 15, at


def _value(raw: bytes, at: int, end: int, kind: int, depth: int) -> tuple[Any, int]:
    if depth > MOST_LEVELS:
        raise ValueError("has a header that is nested too deep")
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, at
    if kind == _BYTE:
        return raw[at], at + 1
    if kind in (_I16, _I32, _I64):
        number, at = _varint(raw, at)
        return (number >> 1) ^ -(number & 1), at
    if kind == _DOUBLE:
        return None, at + 8
    if kind == _BINARY:
        size, at = _varint(raw, at)
        return None, at + size
    if kind in (_LIST, _SET):
        inner = raw[at] & 15
        size, at = _list_head(raw, at)
        for _ in range(size):
            if at >= end:
                raise ValueError("has a list that does not end")
            at = at + 1 if inner in (_TRUE, _FALSE) else _value(raw, at, end, inner, depth + 1)[1]
        return None, at
    if kind == _STRUCT:
        return _struct(raw, at, end, depth + 1)
    raise ValueError("has a header of an unknown kind")


def _list_head(raw: bytes, at: int) -> tuple[int, int]:
    if (size := raw[at] >> 4) < 15:
        return size, at + 1
    return _varint(raw, at + 1)


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while shift < 70:
        byte = raw[at]
        number |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return number, at
        shift += 7
    raise ValueError("has a number that does not end")
