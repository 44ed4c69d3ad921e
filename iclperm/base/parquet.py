"""Parquet that somebody else may have written: what it unpacks to is reckoned before any of it is decoded.

A few bytes can stand for a thousand million values (run lengths, one long text in a dictionary), and the footer may say
less than the pages hold. So the header of every page is looked at first, in the places where the format has them:
https://parquet.apache.org/docs/file-format/
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

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

    Raises `Unpacks` where it has more than ``most_rows``, or they would take more than ``most_bytes``, by default than
    those of any honest file of its size do; and what pyarrow raises, or ValueError, for other damage.
    """
    try:
        return _read_table(raw, columns, most_rows, most_bytes)
    except (IndexError, TypeError, struct.error, OverflowError):
        raise ValueError("ends before its headers do") from None


def _read_table(raw: bytes, columns: Sequence[str] | None, most_rows: int | None, most_bytes: int | None) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    allowed = LEAST_ALLOWED + MOST_RATIO * len(raw) if most_bytes is None else most_bytes
    num_rows, chunks = _chunks(raw)
    if most_rows is not None and num_rows > most_rows:
        raise Unpacks(f"has {num_rows:,} rows; at most {most_rows:,} can be")
    sizes = [_Size.of(raw, chunk) for chunk in chunks if columns is None or chunk.is_in(columns)]
    _refuse(sum(size.least for size in sizes), allowed)
    file = pq.ParquetFile(pa.BufferReader(raw), **_IN_THIS_THREAD)
    if sum(size.most for size in sizes) <= allowed:
        return file.read(columns=None if columns is None else list(columns), use_threads=False)
    # The longest text of a dictionary may stand in every row, or in one: read as it is stored, that can be counted.
    kinds_by_name = zip(file.schema_arrow.names, file.schema_arrow.types, strict=True)
    texts = [name for name, kind in kinds_by_name if _is_text(kind)]
    least = sum(size.least if size.column in texts else size.most for size in sizes)
    _refuse(least, allowed)
    stored = pq.ParquetFile(pa.BufferReader(raw), read_dictionary=texts, **_IN_THIS_THREAD)
    table = stored.read(columns=None if columns is None else list(columns), use_threads=False)
    _refuse(least + sum(_text_bytes(chunk) for column in table.columns for chunk in column.chunks), allowed)
    kinds = pa.schema([file.schema_arrow.field(name) for name in table.column_names], file.schema_arrow.metadata)
    return table.cast(kinds)


def schema_of(raw: bytes) -> pa.Schema:
    """The columns of such a file, and what its footer says beside them; raises as `read_table`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        _chunks(raw)
        return pq.read_schema(pa.BufferReader(raw))
    except (IndexError, TypeError, struct.error, OverflowError):
        raise ValueError("ends before its headers do") from None


class _Chunk(NamedTuple):
    """One column of one group of rows, as the footer has it."""

    column: str
    """Its name, or that of the column that it is in."""
    kind: int
    """Of its values: `_BYTE_ARRAY` and so on."""
    width: int
    """Bytes of a value, if they are of one length."""
    is_plain: bool
    """Whether the column is in no other, and no list."""
    has_levels: bool
    codec: int
    num_values: int
    begin: int
    size: int

    def is_in(self, columns: Sequence[str]) -> bool:
        """Whether it is read where these columns are: a reader takes "a.b" for a column b in a, too."""
        return any(name == self.column or name.startswith(f"{self.column}.") for name in columns)


def _chunks(raw: bytes) -> tuple[int, list[_Chunk]]:
    """The number of rows and all chunks, by the footer; not by Arrow, whose reader may end the process over it."""
    if len(raw) < 12 or raw[-4:] != b"PAR1":
        raise ValueError("is not Parquet")
    size = int.from_bytes(raw[-8:-4], "little")
    if size > min(MOST_FOOTER, len(raw) - 8):
        raise Unpacks(f"has a footer of {size:,} bytes")
    footer, _ = _struct(raw, len(raw) - 8 - size, len(raw) - 8)
    leaves = list(_leaves(_list_in(footer, 2)))
    chunks = []
    for group in _list_in(footer, 4):
        columns = _list_in(group, 1)
        if len(columns) != len(leaves):
            raise ValueError("has columns that are not those of its schema")
        for leaf, column in zip(leaves, columns, strict=True):
            about = column.get(3) if isinstance(column, dict) else None
            if not isinstance(about, dict) or about.get(1) != leaf[1]:
                raise ValueError("has a column that its schema does not")
            begins = [about[field] for field in (9, 11) if field in about]
            codec, num_values, size = (about.get(field, -1) for field in (4, 5, 7))
            if not begins or not all(isinstance(it, int) and it >= 0 for it in (*begins, codec, num_values, size)):
                raise ValueError("has a column without its place")
            chunks.append(_Chunk(*leaf, codec, num_values, min(begins), size))
    rows = footer.get(3)
    if not isinstance(rows, int) or rows < 0:
        raise ValueError("has no number of rows")
    return rows, chunks


def _leaves(schema: list[Any]) -> Iterator[tuple[str, int, int, bool, bool]]:
    """Of each column that holds values: its name, their kind and width, whether it is plain, and has levels.

    Raises `Unpacks` for columns in each other, deeper than a reader's stack may hold.
    """
    open_groups: list[int] = []  # of each the children to come
    name = ""
    for place, element in enumerate(schema):
        if not isinstance(element, dict):
            raise ValueError("has a schema of another kind")
        while open_groups and open_groups[-1] == 0:
            open_groups.pop()
        if not open_groups and place:
            raise ValueError("has a schema with two roots")
        if open_groups:
            open_groups[-1] -= 1
            name = element.get(4, b"").decode() if len(open_groups) == 1 else name
        children, repetition = element.get(5, 0), element.get(3, 0)
        if place == 0 or children:
            open_groups.append(int(children))
            if len(open_groups) > MOST_LEVELS:
                raise Unpacks(f"has columns nested deeper than {MOST_LEVELS} levels")
        else:
            is_plain = len(open_groups) == 1 and repetition != _REPEATED
            yield name, int(element.get(1, -1)), int(element.get(2, 0)), is_plain, not is_plain or repetition != 0


def _list_in(struct: Any, field: int) -> list[Any]:
    found = struct.get(field, []) if isinstance(struct, dict) else []
    return found if isinstance(found, list) else []


def _refuse(size: int, allowed: int) -> None:
    if size > allowed:
        raise Unpacks(f"would unpack to {size / 2**30:.1f} GB or more; at most {allowed / 2**30:.1f} GB are read of it")


def _is_text(kind: pa.DataType) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind))


def _text_bytes(array: pa.Array) -> int:
    """The bytes of text in an array that was read as a dictionary, once each row has its own."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not (isinstance(array, pa.DictionaryArray) and _is_text(array.dictionary.type)):
        return 0
    lengths = pc.binary_length(array.dictionary).cast(pa.int64())
    return int(pc.sum(lengths.take(array.indices)).as_py() or 0)


class _Size(NamedTuple):
    """What a chunk takes in memory: texts of a dictionary are counted once in ``least``, where they can be read so."""

    column: str
    least: int
    most: int

    @classmethod
    def of(cls, raw: bytes, chunk: _Chunk) -> _Size:
        """By its pages."""
        values, packed, longest, is_stored_so = _pages(raw, chunk)
        texts = values * longest if chunk.kind == _BYTE_ARRAY else 0
        size = max(values * (max(_VALUE_BYTES, chunk.width) + 4 * chunk.has_levels), packed)
        return cls(chunk.column, size if chunk.is_plain and is_stored_so else size + texts, size + texts)


def _pages(raw: bytes, chunk: _Chunk) -> tuple[int, int, int, bool]:
    """Of the pages of a column: how many values, how many bytes once decompressed, those of the longest text that more
    than one value may have, at most, and whether such texts are in its dictionary alone, not beginnings of others.

    Raises ValueError where they are not what the footer says.
    """
    at = chunk.begin
    end = at + chunk.size
    if end > len(raw):
        raise ValueError("has a column outside of it")
    values = packed = longest = 0
    is_stored_so = True
    while at < end and values < chunk.num_values:
        header, at = _struct(raw, at, end)
        size, stored = header.get(2, -1), header.get(3, -1)
        about = next((header[field] for field in (5, 7, 8) if isinstance(header.get(field), dict)), _NOTHING)
        count = about.get(1, 0)
        if not all(isinstance(number, int) and number >= 0 for number in (size, stored, count)):
            raise ValueError("has a page without its sizes")
        if header.get(1) == _DICTIONARY_PAGE and chunk.kind == _BYTE_ARRAY:
            is_small = size * chunk.num_values <= LEAST_ALLOWED >> 4
            longest = max(longest, size if is_small else _longest(raw[at : at + stored], size, count, chunk.codec))
        at += stored
        packed += size
        if header.get(1) != _DICTIONARY_PAGE:
            values += count
            if _BEGINNINGS in (about.get(2), about.get(4)):
                longest, is_stored_so = max(longest, packed), False
    if values != chunk.num_values or at > end:
        raise ValueError("has pages that are not what its footer says")
    return values, packed, longest, is_stored_so


def _longest(stored: bytes, size: int, count: int, codec: int) -> int:
    """The bytes of the longest text of a dictionary's page; of the whole page where that cannot be told."""
    import pyarrow as pa

    if size > LEAST_ALLOWED:
        return size
    try:
        page = pa.decompress(stored, size, codec=_CODECS[codec], asbytes=True) if codec else stored
        at = longest = 0
        for _ in range(count):
            (length,) = struct.unpack_from("<I", page, at)
            at += 4 + length
            longest = max(longest, length)
    except (pa.ArrowException, KeyError, ValueError, struct.error):  # another codec's framing
        return size
    return min(longest, size)


_DICTIONARY_PAGE = 2
_REPEATED = 2
_BEGINNINGS = 7
"""The encoding of texts that begin as the one before: of each only the rest is stored."""
_NOTHING: dict[int, Any] = {}
_BYTE_ARRAY = 6
_CODECS = {1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}
# Kinds of values of Thrift's compact protocol, in which Parquet writes its headers.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)


def _struct(raw: bytes, at: int, end: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """The fields of a struct by their numbers, and where it ends."""
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
        return raw[at : at + size], at + size
    if kind in (_LIST, _SET):
        inner, found = raw[at] & 15, []
        size, at = _list_head(raw, at)
        for _ in range(size):
            if at >= end:
                raise ValueError("has a list that does not end")
            one, at = (None, at + 1) if inner in (_TRUE, _FALSE) else _value(raw, at, end, inner, depth + 1)
            found.append(one)
        return found, at
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
