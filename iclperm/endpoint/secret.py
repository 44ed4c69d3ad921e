"""A key cut out of what a server says, in every form in which servers send back what they were sent."""

from __future__ import annotations

import base64
import html.entities
import re
from collections.abc import Iterator
from functools import cached_property
from itertools import groupby

from iclperm.study.endpoint import LEAST_KEY

CUT = "[key]"
"""What stands where the key was."""
_ESCAPES = "%\\&="  # a sign of each way to escape
_STAND_INS = {"+": "+-", "/": "/_"}  # of base64 in URLs
_ONE_OF_BASE64 = "[A-Za-z0-9+/=_-]"
_MOST_ROUNDS = 6  # of escapes within others that are undone
_ESCAPE = re.compile(
    r"\\u\{?0*(?P<u>[0-9a-f]{2,4})\}?|\\x(?P<x>[0-9a-f]{2})|\\(?P<o>[01]?[0-7]{2})|\\(?P<c>[^ux0-7])"
    r"|%(?:25)*(?P<url>[0-9a-f]{2})|=(?P<mail>[0-9a-f]{2}|\r?\n)|&(?:amp;)*(?P<html>#?[a-z0-9]{1,32};?)",
    re.I | re.A,
)
_BLANKS = {"n": "\n", "r": "\r", "t": "\t"}
_NO_DIGITS = bytes(code for code in range(128) if chr(code) not in "0123456789abcdef")


class KeyCutter:
    """Cuts a key out of text: as it is, in base64 (also that of a header that holds it) and in hexadecimal, each of
    them with any of its characters escaped for JSON, a URL, HTML, mail or a programming language, once or more often.
    A text that holds it in base64 broken into lines, in hexadecimal with signs in between, or in one escape within
    another is cut as a whole. Without a key, text stays as it is."""

    def __init__(self, key: str | None) -> None:
        self._key = key

    def cut(self, text: str) -> str:
        """The text without the key. O(text)."""
        if self._key is None:
            return text
        if any(map(text.__contains__, _ESCAPES)) or any(map(text.__contains__, self._plain)):
            text = self._any_form.sub(CUT, text)
        return CUT if self._is_in(text) else text

    def _is_in(self, text: str) -> bool:
        """Whether a text holds the key once escapes are undone, however often, or signs in between left out."""
        if len(text) < LEAST_KEY or self._key is None:
            return False
        signs = "".join(sign for sign in _ESCAPES if sign in self._key)
        views = [text, *_undone(text, ""), *(_undone(text, signs) if signs else ())]
        return any(
            any(map(view.__contains__, self._plain[1:] if view is text else self._plain))
            or any(map("".join(view.split()).__contains__, self._plain[3:]))
            or self._digits in view.encode("ascii", "ignore").lower().replace(b"0x", b"").translate(None, _NO_DIGITS)
            for view in views
        )

    @cached_property
    def _digits(self) -> bytes:
        assert self._key is not None
        return self._key.encode().hex().encode()

    @cached_property
    def _plain(self) -> list[str]:
        """What occurs in a text that holds a form without escapes."""
        assert self._key is not None
        raw = self._key.encode()
        cores = [_core(raw, before) for before in range(3)]
        in_urls = [core.replace("+", "-").replace("/", "_") for core in cores]
        return [self._key, raw.hex(), raw.hex().upper(), *cores, *in_urls]

    @cached_property
    def _any_form(self) -> re.Pattern[str]:
        assert self._key is not None
        raw = self._key.encode()
        hexadecimal = "".join(f"(?:{_any_way(sign)}|{_any_way(sign.upper())})" for sign in raw.hex())
        encoded = [
            "".join("(?:" + "|".join(map(_any_way, _STAND_INS.get(sign, sign))) + ")" for sign in _core(raw, before))
            for before in range(3)
        ]
        # The signs beside a core hold bits of the key and of its neighbours.
        around = [f"{_ONE_OF_BASE64}{{0,2}}{core}{_ONE_OF_BASE64}{{0,2}}" for core in encoded]
        whole = "".join(
            _backslashes(len(list(run))) if is_backslash else "".join(map(_any_way, run))
            for is_backslash, run in groupby(self._key, key="\\".__eq__)
        )
        # A run of backslashes is looked at from its first alone, or a text of nothing else would take its square.
        return re.compile(rf"(?<!\\)(?:{'|'.join([whole, hexadecimal, *around])})")


def _undone(text: str, kept: str) -> Iterator[str]:
    """A text with its escapes undone once, twice and so on, but those that begin with one of the signs ``kept``."""

    def sign(found: re.Match[str]) -> str:
        kind, digits = str(found.lastgroup), found[str(found.lastgroup)]
        if found[0][0] in kept:
            return found[0]
        if kind == "c":
            return _BLANKS.get(digits, digits)
        if kind == "html":
            return html.unescape(f"&{digits}")
        return "" if digits.isspace() else chr(int(digits, 8 if kind == "o" else 16))

    for _ in range(_MOST_ROUNDS):
        before, text = text, _ESCAPE.sub(sign, text)
        if text == before:
            return
        yield text


def _core(raw: bytes, before: int) -> str:
    """The signs of base64 that hold nothing but ``raw``, where so many bytes are ``before`` it, modulo three."""
    text = base64.b64encode(bytes(before) + raw).decode()
    return text[-(-before * 8 // 6) : (before + len(raw)) * 8 // 6]


def _backslashes(count: int) -> str:
    """A pattern of so many backslashes that follow each other; escaped once more they are twice as many."""
    escaped = "|".join(_escaped("\\"))
    return rf"(?:(?:{escaped}){{{count}}}|\\{{{count},}}+)"


def _any_way(sign: str) -> str:
    """A pattern of every way in which a character of ASCII is written."""
    return "(?:" + "|".join([rf"\\*+{re.escape(sign)}", *_escaped(sign)]) + ")"


def _escaped(sign: str) -> list[str]:
    """Patterns of the ways to write a character that do not show it."""
    code = ord(sign)
    digits = "".join(f"[{digit}{digit.upper()}]" for digit in f"{code:02x}")
    names = [name for name, meant in html.entities.html5.items() if meant == sign and name.endswith(";")]
    entity = "|".join([f"#0*{code};?", f"#[xX]0*{digits};?", *map(re.escape, names)])
    return [
        rf"\\++(?:u\{{?0*{digits}\}}?|x{digits}|0?{code:o})",
        f"%(?:25)*{digits}",
        f"&(?:amp;)*(?:{entity})",
        f"={digits}",
    ]
