"""Choices that every row of a task has of its own: the texts, and which of them is right."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import nodes

from iclperm.errors import ConfigError, DataError
from iclperm.tasks.templates import Template, parsed_task_template

MOST_CHOICES = 100
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_END = "\x1e"  # after each entry of a list
_IS_TEXT = "\x1f"  # before what was no list
_EXPRESSION = re.compile(r"\s*\{\{(.*)\}\}\s*", re.DOTALL)


class OwnChoices(NamedTuple):
    """The choices of one row, and the positions of those that are right, ascending; any of them counts."""

    texts: tuple[str, ...]
    gold: tuple[int, ...]


class RowChoices:
    """How the choices of a row and the right ones among them are found.

    ``choices`` is a column that holds a list, an expression that gives one (``choices.text``, ``{{ [sol1, sol2] }}``),
    a template that writes one, as JSON or as Python does, or a list of templates, one a choice. ``gold`` is likewise
    one value or several: a number is a position from 0 on, else it is one of the row's ``letters``, one of its choices,
    or A, B, C and so on. With ``letters``, which are given as ``choices`` are, it is one of these. Raises `ConfigError`
    for templates that are not valid.
    """

    def __init__(self, choices: str | Sequence[str], gold: str, letters: str | Sequence[str] | None) -> None:
        self._choices = _Listing("choices", choices)
        self._gold = _Listing("gold", gold)
        self._letters = None if letters is None else _Listing("letters", letters)

    @property
    def variables(self) -> frozenset[str]:
        """The names that they read: fields of the task, or columns."""
        every = [self._choices, self._gold, *([self._letters] if self._letters else [])]
        return frozenset().union(*(listing.variables for listing in every))

    def texts(self, rows: Sequence[Mapping[str, Any]], places: Sequence[str] | None = None) -> list[tuple[str, ...]]:
        """The choices of each row; raises `DataError` for fewer than two, more than 100, and a blank one."""
        found = self._choices.of_rows(rows, places)
        for number, texts in enumerate(found):
            place = f"{places[number]}: " if places else ""
            if not 2 <= len(texts) <= MOST_CHOICES:
                raise DataError(
                    f"{place}'choices' gives {len(texts)} text{'s' if len(texts) != 1 else ''}, and a row needs 2 to "
                    f"{MOST_CHOICES}; correct the key, or remove the row"
                )
            if blank := [position for position, text in enumerate(texts) if not text.strip()]:
                raise DataError(f"{place}choice {blank[0]} (from 0 on) is blank; fill it in or remove the row")
        return [tuple(texts) for texts in found]

    def of_rows(self, rows: Sequence[Mapping[str, Any]], places: Sequence[str]) -> list[OwnChoices]:
        """The choices of each row and the right ones; raises `DataError`, which begins with the row's place."""
        texts = self.texts(rows, places)
        golds = self._gold.of_rows(rows, places)
        letters = [None] * len(rows) if self._letters is None else self._letters.of_rows(rows, places)
        return [
            OwnChoices(own, _positions(place, own, gold, named))
            for place, own, gold, named in zip(places, texts, golds, letters, strict=True)
        ]


class _Listing:
    """A key that gives a list of texts for each row."""

    def __init__(self, name: str, given: str | Sequence[str]) -> None:
        self._name = name
        if not isinstance(given, str):
            parts = [Template(name, each) for each in given]  # each has to be whole by itself
            self._templates, self._is_listed = parts, True
        else:
            self._templates, self._is_listed = [Template(name, _listing(name, given))], False
        self.variables = frozenset().union(*(template.variables for template in self._templates))

    def of_rows(self, rows: Sequence[Mapping[str, Any]], places: Sequence[str] | None) -> list[list[str]]:
        columns = [template.render_all(rows, places) for template in self._templates]
        if self._is_listed:
            return [list(texts) for texts in zip(*columns, strict=True)]
        return [self._read(text, f"{places[number]}: " if places else "") for number, text in enumerate(columns[0])]

    def _read(self, text: str, place: str) -> list[str]:
        """The entries of a list that was written by `_listing`, or by a template itself."""
        if not text.startswith(_IS_TEXT):
            return text.split(_END)[:-1]
        written = text[1:].strip()
        if self._name == "gold" and not written.startswith("["):
            return [written]
        found = _list_in(written)
        if found is None:
            raise DataError(f"{place}{self._name!r} gives {written[:60]!r}, and a list is needed; correct the key")
        return found


def _listing(name: str, given: str) -> str:
    """The template that writes the list which an expression gives, entry by entry; of one value ``_IS_TEXT`` and it."""
    inner = _EXPRESSION.fullmatch(given)
    if inner is None and ("{{" in given or "{%" in given):
        return _IS_TEXT + given
    expression = (inner[1] if inner else given).strip()
    try:
        (output,) = parsed_task_template(f"{{{{ {expression} }}}}").body
        is_one = isinstance(output, nodes.Output) and len(output.nodes) == 1
    except Exception:  # Jinja2's own, or Python's; the template itself says better what is wrong
        is_one = inner is None
    if not is_one:
        return _IS_TEXT + given
    if not expression:
        raise ConfigError(f"the key {name!r} is blank; name a column, or give a template")
    value = f"({expression})"
    scalar = f"{value} is string or {value} is number or {value} is none or {value} is mapping"
    many = f"{{% for one in {value} %}}{{{{ one }}}}{_END}{{% endfor %}}"
    return f"{{% if {scalar} %}}{_IS_TEXT}{{{{ {value} }}}}{{% else %}}{many}{{% endif %}}"


def _list_in(text: str) -> list[str] | None:
    """The list that a text is, as JSON or Python write it; None where it is none."""
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        return [str(entry) for entry in found] if isinstance(found, list | tuple) else None
    return None


def _positions(place: str, texts: Sequence[str], gold: Sequence[str], letters: Sequence[str] | None) -> tuple[int, ...]:
    if letters is not None and len(letters) != len(texts):
        raise DataError(f"{place}: there are {len(letters)} 'letters' for {len(texts)} choices; give each its own")
    if not gold:
        raise DataError(f"{place}: 'gold' names no choice; fill it in or remove the row")
    return tuple(sorted({_position(place, texts, value, letters) for value in gold}))


def _position(place: str, texts: Sequence[str], value: str, letters: Sequence[str] | None) -> int:
    name = value.strip()
    if not name or name == "None":
        raise DataError(f"{place}: 'gold' is blank; fill it in or remove the row")
    if letters is not None:
        stripped = [letter.strip() for letter in letters]
        if name not in stripped:
            raise DataError(f"{place}: 'gold' is {name[:60]!r}, and the row's letters are {', '.join(stripped)[:200]}")
        return stripped.index(name)
    named = texts.index(value) if value in texts else None
    if re.fullmatch(r"\d{1,9}", name):
        number = int(name)
        if number >= len(texts):
            raise DataError(
                f"{place}: 'gold' is {name}, and the positions of its {len(texts)} choices are 0 to {len(texts) - 1}; "
                "give the position from 0 on, or with 'letters' what the row calls its choices"
            )
        if named not in (None, number):
            raise DataError(
                f"{place}: 'gold' is {name}, which is the position of one choice and the text of another; say with "
                "'letters' what the row calls its choices"
            )
        return number
    if named is None and len(name) == 1 and name in _LETTERS[: len(texts)]:
        return _LETTERS.index(name)
    if named is None:
        raise DataError(f"{place}: 'gold' is {name[:60]!r}, which is no position, letter or text of its choices")
    return named
