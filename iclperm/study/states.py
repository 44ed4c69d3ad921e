"""What an answer can be besides given: the one list of states, and their codes."""

from __future__ import annotations

STATES = ("ok", "invalid", "overlong", "unparsed", "api_missing")
"""What an item can be; an error is a row, never absent and never zero."""
NO_ANSWER = 255
"""The code of an answer from elsewhere that is not there, whatever the reason."""
OK, INVALID, OVERLONG, UNPARSED, API_MISSING = range(len(STATES))
NOT_ASKED = len(STATES)
"""The code of an answer that an adaptive run had no need of; no file holds one."""
NAMES = (*STATES, "not_asked")
"""The names of all codes that a run's answers can have."""


def name_of(code: int) -> str:
    """The name of a state by its code."""
    return "no answer" if code == NO_ANSWER else NAMES[code] if code < len(NAMES) else f"state {code}"
