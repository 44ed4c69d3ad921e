"""Rows of a data file, strictly: what is damaged is named by file and line, never skipped."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from iclperm.errors import DataError

MAX_ROW_BYTES = 1 << 20
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # of JSON: an escape, not an escaped backslash before "u0000"


def read_rows(path: Path) -> tuple[list[tuple[str, dict[str, Any]]], str]:
    """All rows of a JSON Lines file, each with its place ("file:line"), and the SHA-256 of the file's bytes.

    Blank lines are passed over. Raises `DataError` naming file and line for a row that is not one JSON object in
    UTF-8 free of NUL and lone surrogates, or that exceeds 1 MiB. Reads the file once; O(bytes).
    """
    if path.suffix != ".jsonl":
        raise DataError(f"{path}: cannot be read as data; give a .jsonl file")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    return list(_jsonl(path, raw)), hashlib.sha256(raw).hexdigest()


def _jsonl(path: Path, raw: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if line.strip():
            place = f"{path}:{number}"
            yield place, _row(place, line)


def _row(place: str, line: bytes) -> dict[str, Any]:
    if len(line) > MAX_ROW_BYTES:
        raise DataError(f"{place}: the row has {len(line)} bytes; at most {MAX_ROW_BYTES} are read")
    try:
        row = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
        # Escapes can smuggle in what the file's bytes cannot hold.
        canonical = json.dumps(row, ensure_ascii=False)
        canonical.encode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 (byte {error.start} of the line); save the file as UTF-8") from None
    except UnicodeEncodeError:
        raise DataError(f"{place}: holds a lone surrogate; repair the text") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not one JSON object a line: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: a JSON object is needed, not {type(row).__name__}")
    if _NUL.search(canonical):
        raise DataError(f"{place}: holds a NUL character; remove it")
    return row


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
