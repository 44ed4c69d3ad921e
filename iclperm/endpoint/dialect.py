"""In which words a server takes a request: what it calls things, and what it does not take."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_UNSUPPORTED = re.compile(r"unsupported|not support|unexpected|unrecogni[sz]ed|unknown|not permitted|deprecated", re.I)


class Dialect:
    """What this server calls things, and what it does not take, learnt from its refusals."""

    def __init__(self) -> None:
        self.dropped: set[str] = set()
        self._limit = "max_tokens"

    def of(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A request as this server takes it."""
        taken = {name: value for name, value in body.items() if name not in self.dropped}
        taken[self._limit] = taken.pop("max_tokens")
        return taken

    def learn(self, message: str, parameter: str, body: Mapping[str, Any]) -> bool:
        """Whether a refusal names something that can be put another way; it is from then on."""
        if not _UNSUPPORTED.search(message):
            return False
        for name in ("max_tokens", "temperature", "stop"):
            if name in body and (parameter == name or re.search(rf"\b{name}\b", message)):
                if name == "max_tokens":
                    self._limit = "max_completion_tokens"
                else:
                    self.dropped.add(name)
                return True
        return False
