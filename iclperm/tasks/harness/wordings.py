"""``doc_to_text`` and its like: a column, a template, or the value itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from iclperm.errors import DataError
from iclperm.tasks.harness.settings import Wanted
from iclperm.tasks.templates import Template

Doc = Mapping[str, Any]
_NAME = re.compile(r"[^\W\d]\w*")


class Wording:
    """What a key of a task file makes of a row; raises `ConfigError` for a template that may not be.

    Text is a column's name where the row has such a column, else a template. A bare word that is no column is refused
    unless ``may_be_text``: the harness would show the word itself, for every row the same. ``columns`` are those that
    it reads, ``optional`` those of them that a row may lack.
    """

    def __init__(self, key: str, given: Wanted | None, *, may_be_text: bool = False) -> None:
        self.key = key
        self.given = given
        self._template = Template(key, given) if isinstance(given, str) else None
        self._names_a_column = isinstance(given, str) and not may_be_text and _NAME.fullmatch(given) is not None
        read = {given} if self._names_a_column else self._template.variables if self._template else ()
        self.columns = frozenset(map(str, read))
        self.optional = self._template.optional if self._template else frozenset[str]()

    @property
    def is_fixed(self) -> bool:
        """Whether it is the same for every row."""
        return not self.columns

    def values(self, docs: Sequence[Doc], places: Sequence[str]) -> list[Any]:
        """The value for each row, [N]: a column's as it is, a template's as text, and any other as it stands in the
        file. Raises `DataError` naming the row's place."""
        if self._template is None:
            return [self.given] * len(docs)
        key = str(self.given)
        found: list[Any] = [doc.get(key) for doc in docs]
        written = [number for number, doc in enumerate(docs) if key not in doc]
        if written and self._names_a_column:
            first = written[0]
            raise DataError(
                f"{places[first]}: the key {self.key!r} names the column {key!r}, and the row has "
                f"{', '.join(map(repr, docs[first])) or 'none'}; name one of them, or repair the row"
            )
        texts = self._template.render_all([docs[number] for number in written], [places[number] for number in written])
        for number, text in zip(written, texts, strict=True):
            found[number] = _TemplateText(text)
        return found


class _TemplateText(str):
    """What a template wrote, as against a column's own text: the harness reads a number or a list out of it."""

    __slots__ = ()


def text_of(value: Any, has_choices: bool) -> Any:
    """A text, as the harness reads what ``doc_to_text`` gives: digits that a template wrote are a position."""
    return _digits(value) if has_choices and isinstance(value, _TemplateText) else value


def target_of(value: Any, has_choices: bool) -> Any:
    """A target, likewise: digits that a template wrote are a position where there are choices, a list is a list."""
    if not isinstance(value, _TemplateText):
        return value
    if has_choices and value.isdigit():
        return _digits(value)
    if len(value) >= 2 and value[0] == "[" and value[-1] == "]":
        return _literal(value, str(value))
    return str(value)


def choices_of(value: Any) -> tuple[str, ...] | None:
    """The choices in what ``doc_to_choice`` gives: a list, the values of a mapping, or a list that a template wrote.
    None where it gives no list of texts."""
    if isinstance(value, _TemplateText):
        value = _literal(value, None)
    elif isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple) or not all(isinstance(choice, str) for choice in value):
        return None
    return tuple(value)


def _digits(text: str) -> int | str:
    number = _literal(text, None) if text.isdigit() else None
    return number if isinstance(number, int) else str(text)


def _literal(text: str, otherwise: Any) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # MemoryError: nested too deeply to be parsed
        return otherwise
