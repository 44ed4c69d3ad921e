"""Files as they were stored: their bytes or why there are none, and tables as Parquet bytes and back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from iclperm.base import parquet
from iclperm.base.files import Folder
from iclperm.base.sealed import canonical
from iclperm.errors import DamagedItem, RunError, is_out_of_memory

MOST_OF_TABLE = 1 << 30
"""Bytes of one file of answers, contexts or queries; a unit of work, some seconds, writes far less."""


def bytes_of(folder: Folder, path: Path, most: int = MOST_OF_TABLE) -> bytes:
    """The content of a file in a folder; raises `DamagedItem` where it is gone, `RunError` where the system or
    `Folder.read` refuses to read it."""
    try:
        return folder.read(path, most)
    except FileNotFoundError:
        raise DamagedItem(f"{path} is gone; run the study again") from None
    except OSError as error:
        if is_out_of_memory(error):
            raise
        reason = (error.strerror or str(error)).lower()
        raise RunError(f"{path} cannot be read: {reason}; make it readable, or move it elsewhere") from None


def table_bytes(table: pa.Table) -> bytes:
    """A table as a Parquet file."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return bytes(sink.getvalue().to_pybytes())


def table_of(path: Path, raw: bytes, most_rows: int, columns: Sequence[str] | None = None) -> pa.Table:
    """The table in the bytes of the Parquet file at a path, or some of its columns; raises `DamagedItem` where it is
    none, has more rows, or unpacks to what no run writes.

    The bytes must be known to be whole: a reader of Parquet may crash on any other.
    """
    with _damage_named(path):
        return parquet.read_table(raw, columns, most_rows=most_rows)


def metadata_of(path: Path, raw: bytes) -> Mapping[bytes, bytes]:
    """What the footer of such a file says beside the schema."""
    with _damage_named(path):
        return dict(parquet.schema_of(raw).metadata or {})


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, pa.ArrowException) as error:
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise DamagedItem(
            f"{path} is no table of a run: it {reason}; move it elsewhere, or run the study again"
        ) from None


def content_digest(table: pa.Table) -> str:
    """SHA-256 of a table's values: other versions of Arrow write other bytes for them."""
    return hashlib.sha256(canonical(table.to_pydict())).hexdigest()


def short_digest(raw: bytes) -> str:
    """The first 16 digits of the SHA-256 of some bytes, as the name of a part's file has them."""
    return hashlib.sha256(raw).hexdigest()[:16]


def checksum_line(name: str, raw: bytes) -> bytes:
    """The SHA-256 of a file's content as sha256sum writes it."""
    return f"{hashlib.sha256(raw).hexdigest()}  {name}\n".encode()
