"""Sizes of memory in words: what a budget may be, and bytes as people read them."""

from __future__ import annotations

import re
from typing import TypeAlias

Budget: TypeAlias = int | float | str
"""Bytes (an int, or text such as "4GiB" and "500MB"), or a share of what is free (0.5, "50%")."""
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[kmgt]i?b|b)?", re.IGNORECASE)
_POWERS = "bkmgt"


def parse_budget(given: Budget) -> int | float:
    """Bytes as an int >= 1, a share of what is free as a float in (0, 1]; raises ValueError for anything else."""
    value = _number(given) if isinstance(given, str) else given
    is_share = isinstance(value, float) and 0 < value <= 1
    is_size = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value is None or not (is_share or is_size):
        raise ValueError('give bytes, as 2000000000 or "2GB" or "2GiB", or a share of what is free, as 0.5 or "50%"')
    return value


def bytes_in_words(size: int) -> str:
    """A size in MiB, or in GiB from one on."""
    return f"{size / (1 << 30):.2f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"


def _number(text: str) -> int | float | None:
    """The value of a text; None if it has none."""
    if (found := _FORM.fullmatch(text.strip())) is None:
        return None
    number, unit = found[1], (found[2] or "").lower()
    if unit == "%":
        return float(number) / 100
    if not unit:
        return float(number) if "." in number else int(number)
    base = 1024 if "i" in unit else 1000
    return int(float(number) * base ** _POWERS.index(unit[0]))
