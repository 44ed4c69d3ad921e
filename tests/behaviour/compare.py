"""Two recordings side by side: every difference is a line."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from typing import Any

LONGEST = 160


def differences(there: Any, here: Any, at: str = "") -> Iterator[str]:
    """Lines that say where two recordings differ; numbers are equal only if they are the same."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in [*there, *(key for key in here if key not in there)]:
            if key not in here:
                yield f"{at}/{key}: gone, was {shown(there[key])}"
            elif key not in there:
                yield f"{at}/{key}: new, is {shown(here[key])}"
            else:
                yield from differences(there[key], here[key], f"{at}/{key}")
    elif is_text(there) and is_text(here):
        yield from (
            f"{at}: {line[:LONGEST]}"
            for line in difflib.unified_diff(there, here, lineterm="", n=0)
            if not line.startswith(("---", "+++", "@@"))
        )
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for number, pair in enumerate(zip(there, here, strict=True)):
            yield from differences(*pair, f"{at}[{number}]")
    elif not is_same(there, here):
        yield f"{at}: {shown(there)} -> {shown(here)}"


def is_text(value: Any) -> bool:
    """Whether this is a text, line by line."""
    return isinstance(value, list) and bool(value) and all(isinstance(line, str) for line in value)


def is_same(there: Any, here: Any) -> bool:
    """Equal, and of one type: 1 is not 1.0, and NaN is NaN."""
    if isinstance(there, float) and isinstance(here, float) and math.isnan(there):
        return math.isnan(here)
    return type(there) is type(here) and bool(there == here)


def shown(value: Any) -> str:
    """A value in one short line."""
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
