"""What an answer can be besides given: the one list of states, and their codes."""

from __future__ import annotations

STATES = ("ok", "invalid", "overlong", "unparsed", "api_missing")
"""What an item can be; an error is a row, never absent and never zero."""
NO_ANSWER = 255
"""The code of an answer from elsewhere that is not there, whatever the reason."""
OK, INVALID, OVERLONG, UNPARSED, API_MISSING = range(len(STATES))


def name_of(code: int) -> str:
    """The name of a state by its code."""
    return "no answer" if code == NO_ANSWER else STATES[code] if code < len(STATES) else f"state {code}"
