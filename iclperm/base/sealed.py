"""JSON that carries its own digest, so that damage to it is seen."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

MOST_LEVELS = 50
"""Of brackets in each other: a reader of JSON fails beyond some thousand, and so may whoever looks at what it read."""
_BRACKETS = re.compile(rb'[\[\]{}]|"(?:[^"\\]|\\.)*+"?', re.DOTALL)  # not those inside of strings


def canonical(content: Mapping[str, Any]) -> bytes:
    """The one way in which a mapping is written: keys sorted, a value a line."""
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Content with its own digest, under the key ``digest``."""
    whole: dict[str, Any] = json.loads(canonical(content))
    return {**whole, "digest": hashlib.sha256(canonical(whole)).hexdigest()}


def parsed(raw: bytes) -> Any:
    """What JSON holds; raises ValueError where it is none, or is nested deeper than 50 levels."""
    depth = 0
    for token in _BRACKETS.finditer(raw):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(token[0], 0)
        if depth > MOST_LEVELS:
            raise ValueError(f"nested deeper than {MOST_LEVELS} levels")
    return json.loads(raw)


def unsealed(raw: bytes) -> dict[str, Any] | None:
    """What was sealed, with its digest; None where the bytes are not what their digest says."""
    try:
        content: dict[str, Any] = parsed(raw)
        rest = {key: value for key, value in content.items() if key != "digest"}
        return content if content == sealed(rest) else None
    except (ValueError, AttributeError):
        return None
