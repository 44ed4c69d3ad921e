"""What an answer can be besides given: the one list of states, and their codes."""

from __future__ import annotations

STATES = ("ok", "invalid", "overlong", "unparsed", "api_missing")
"""What an item can be; an error is a row, never absent and never zero."""
OK, INVALID, OVERLONG, UNPARSED, API_MISSING = range(len(STATES))
