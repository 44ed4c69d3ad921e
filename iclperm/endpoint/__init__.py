"""Models behind an OpenAI-compatible API: asked in text, within a budget, and never paid for twice.

Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iclperm.base.lazy import loaded_on_use

if TYPE_CHECKING:
    from iclperm.endpoint.bill import Bill, Prompt, estimate_bill
    from iclperm.endpoint.client import Capabilities, Endpoint, Likelihoods
    from iclperm.endpoint.gate import Pace
    from iclperm.endpoint.ledger import Ledger
    from iclperm.endpoint.replies import Reply, Scored
    from iclperm.endpoint.transport import Usage
    from iclperm.study.endpoint import EndpointChoices, Prices, Spent

__all__ = [
    "Bill",
    "Capabilities",
    "Endpoint",
    "EndpointChoices",
    "Ledger",
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

__getattr__, __dir__ = loaded_on_use(
    __name__,
    {
        "iclperm.endpoint.bill": ("Bill", "Prompt", "estimate_bill"),
        "iclperm.endpoint.client": ("Capabilities", "Endpoint", "Likelihoods"),
        "iclperm.endpoint.gate": ("Pace",),
        "iclperm.endpoint.ledger": ("Ledger",),
        "iclperm.endpoint.replies": ("Reply", "Scored"),
        "iclperm.endpoint.transport": ("Usage",),
        "iclperm.study.endpoint": ("EndpointChoices", "Prices", "Spent"),
    },
)
