"""Sizes in words: what a budget of memory or of a search may be, and bytes as people read them."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, TypeAlias

Budget: TypeAlias = int | float | str
"""Bytes (an int, or text such as "4GiB" and "500MB"), or a share of what is free (0.5, "50%")."""
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[kmgt]i?b|b)?", re.IGNORECASE)
_POWERS = "bkmgt"
_AMOUNT = r"(\d+(?:\.\d+)?)"
_OF_SEARCH = (
    (re.compile(rf"{_AMOUNT}\s*%"), "share", {"": 0.01}),
    (re.compile(rf"{_AMOUNT}\s*([kmg]?)\s*(?:tokens?)"), "tokens", {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}),
    (re.compile(rf"{_AMOUNT}\s*(s|min|h)"), "seconds", {"s": 1.0, "min": 60.0, "h": 3600.0}),
    (re.compile(rf"\$\s*{_AMOUNT}"), "cost", {"": 1.0}),
)


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


class SearchBudget(NamedTuple):
    """What a search may take: a share of what asking everything takes, tokens, seconds, or US dollars."""

    unit: Literal["share", "tokens", "seconds", "cost"]
    amount: float


def parse_search_budget(given: str) -> SearchBudget | None:
    """The budget of a search in numbers; None for ``exhaustive`` and ``adaptive``, which have none. Raises ValueError
    for anything else than these, "5 %", "2M tokens", "10 min" and "$5"."""
    text = given.strip().lower()
    if text in ("exhaustive", "adaptive"):
        return None
    for form, unit, factors in _OF_SEARCH:
        if found := form.fullmatch(text):
            amount = float(found[1]) * factors[found[2] if len(found.groups()) > 1 else ""]
            if amount > 0 and (unit != "share" or amount < 1):
                return SearchBudget(unit, amount)  # type: ignore[arg-type]  # one of the four
            if unit == "share":
                raise ValueError("give a share above 0 % and below 100 %, or exhaustive")
            raise ValueError("give more than 0")
    raise ValueError('give exhaustive, adaptive, or a budget such as "5 %", "2M tokens", "10 min" or "$5"')
