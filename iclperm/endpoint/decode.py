"""JSON of a stranger, read strictly: small, shallow, of numbers that there are, and without the key."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable
from typing import Any

MOST_LEVELS = 32
_MOST_DIGITS = 18  # of a whole number; what is larger counts nothing here
_CODINGS = {"": None, "gzip": 31, "x-gzip": 31, "deflate": 47}
_NO_CODINGS = ("", "identity", "none", "utf-8")  # as servers say it


def decoded(raw: bytes | str, cut: Callable[[str], str] = str) -> Any:
    """What UTF-8 JSON says, each text as ``cut`` leaves it; raises ValueError for what is no such JSON.

    Numbers that are not finite or have more than 18 digits are read as null, halves of characters as question marks.
    """
    try:
        text = raw.decode("utf-8-sig") if isinstance(raw, bytes) else raw
        return _plain(json.loads(text, **_STRICT), cut, MOST_LEVELS)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON ({error.msg} at {error.pos})") from None


class Inflated:
    """The bytes of a body that arrives piece by piece, never more than ``most``, before and after decompression.

    Raises ValueError for a coding that nobody asked for, for more bytes, and for what is not of that coding.
    """

    def __init__(self, coding: str, most: int) -> None:
        named = [each for each in map(str.strip, coding.lower().split(",")) if each not in _NO_CODINGS]
        coding = ", ".join(named)
        if coding not in _CODINGS:
            raise ValueError(f"it is coded as {coding[:40]!r}, which was not asked for")
        self._most = most
        self._room = most  # for what arrives
        self._body = bytearray()
        bits = _CODINGS[coding]
        self._inflate = None if bits is None else zlib.decompressobj(bits)

    def add(self, piece: bytes) -> None:
        """One more piece."""
        self._room -= len(piece)
        if self._room >= 0 and self._inflate is not None:
            try:
                piece = self._inflate.decompress(piece, self._most + 1 - len(self._body))
            except zlib.error:
                raise ValueError("it cannot be decompressed") from None
        if self._room < 0 or len(self._body) + len(piece) > self._most:
            raise ValueError(f"it has more than {self._most:,} bytes")
        self._body += piece

    def whole(self) -> bytes:
        """All of it; raises ValueError where the end is missing."""
        if self._inflate is not None and not self._inflate.eof:
            raise ValueError("it cannot be decompressed")
        return bytes(self._body)


def _plain(value: Any, cut: Callable[[str], str], levels: int) -> Any:
    if isinstance(value, str):
        return cut(value.encode("utf-8", "replace").decode())
    if not isinstance(value, (list, dict)):
        return value
    if not levels:
        raise ValueError("it is nested too deeply")
    if isinstance(value, list):
        return [_plain(each, cut, levels - 1) for each in value]
    return {_plain(key, cut, 0): _plain(each, cut, levels - 1) for key, each in value.items()}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice in it")
    return found


def _finite(text: str) -> float | None:
    return value if math.isfinite(value := float(text)) else None


def _small(text: str) -> int | None:
    return int(text) if len(text) <= _MOST_DIGITS else None


_STRICT: dict[str, Any] = {
    "object_pairs_hook": _once,
    "parse_float": _finite,
    "parse_int": _small,
    "parse_constant": lambda _: None,
}
