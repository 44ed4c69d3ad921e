"""JSON that carries its own digest, so that damage to it is seen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def canonical(content: Mapping[str, Any]) -> bytes:
    """The one way in which a mapping is written: keys sorted, a value a line."""
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Content with its own digest, under the key ``digest``."""
    whole: dict[str, Any] = json.loads(canonical(content))
    return {**whole, "digest": hashlib.sha256(canonical(whole)).hexdigest()}


def unsealed(raw: bytes) -> dict[str, Any] | None:
    """What was sealed, with its digest; None where the bytes are not what their digest says."""
    try:
        content: dict[str, Any] = json.loads(raw)
        rest = {key: value for key, value in content.items() if key != "digest"}
        return content if content == sealed(rest) else None
    except (ValueError, AttributeError):
        return None
