"""What a caller gives where a list is needed: any iterable in an order is one, a single text is not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from iclperm.engine.plan import ContextPaths
from iclperm.errors import RequestError


def listed(given: Iterable[Any], what: str) -> Sequence[Any]:
    """The ``what`` that were given, all there; raises RequestError for one text and for what is no list of anything."""
    if isinstance(given, Sequence | np.ndarray) and not isinstance(given, str | bytes):
        return given  # type: ignore[return-value]
    if isinstance(given, set | frozenset):
        raise RequestError(f"a list of {what} is needed, and {shortly(given)} has no order; give a list")
    if isinstance(given, bytes):
        raise RequestError(f"a list of {what} is needed, not {shortly(given)}; decode bytes to text")
    if isinstance(given, str | Mapping) or not hasattr(given, "__iter__"):
        raise RequestError(f"a list of {what} is needed, not {shortly(given)}; put it in brackets")
    return list(given)


def pieces(given: Iterable[Any], what: str, which: str) -> Sequence[Any]:
    """As ``listed``, of texts or lists of token ids; raises RequestError that names the first which is neither, as the
    empty cell of a table (None, NaN) is."""
    found = listed(given, what)
    for number, each in enumerate(found):
        if not hasattr(each, "__len__"):
            raise RequestError(f"{which} {number} is {each!r}; give text or a list of token ids, '' for none")
    return found


def refuse_halves(texts: Iterable[str]) -> None:
    """Raises RequestError naming the text that has half a character (a lone surrogate), which no tokenizer reads."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{text[:40]!r} holds half a character at {error.start} (a lone surrogate); repair the text"
            ) from None


def given_contexts(given: Any) -> Any:
    """As ``listed``, the compact form as it is."""
    return given if isinstance(given, ContextPaths) else pieces(given, "contexts", "context")


def shortly(given: object) -> str:
    """What was given, in one line of a message."""
    if isinstance(given, str):
        return f"the text {given[:40]!r}"
    return f"{given!r}"[:60].splitlines()[0]
