"""Models behind an OpenAI-compatible API.

Names are loaded on first use: a study knows its endpoint's choices without what asks it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iclperm.endpoint.bill import Bill, Prompt, estimate_bill
    from iclperm.endpoint.choices import EndpointChoices, Prices, Spent
    from iclperm.endpoint.client import Capabilities, Endpoint, Likelihoods, Usage
    from iclperm.endpoint.gate import Pace
    from iclperm.endpoint.replies import Reply, Scored

__all__ = [
    "Bill",
    "Capabilities",
    "Endpoint",
    "EndpointChoices",
    "Likelihoods",
    "Pace",
    "Prices",
    "Prompt",
    "Reply",
    "Scored",
    "Spent",
    "Usage",
    "estimate_bill",
]

_HOMES = {
    "bill": ("Bill", "Prompt", "estimate_bill"),
    "choices": ("EndpointChoices", "Prices", "Spent"),
    "client": ("Capabilities", "Endpoint", "Likelihoods", "Usage"),
    "gate": ("Pace",),
    "replies": ("Reply", "Scored"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"iclperm.endpoint.{home}"), name)
    raise AttributeError(f"module 'iclperm.endpoint' has no attribute {name!r}")
