"""What a model cannot take is refused before any forward pass, in one line that names it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from iclperm.engine.plan import Plan
from iclperm.engine.tree import Rows
from iclperm.errors import RequestError


@dataclass(frozen=True)
class Admission:
    """To a model of ``vocab_size`` token ids and a context window of ``max_tokens``; all raise RequestError."""

    vocab_size: int
    max_tokens: int

    def prompts(self, rows: Rows, max_new_tokens: int) -> None:
        """As ``plan``, naming the request."""
        self.ids(rows)
        long = np.flatnonzero(rows.lengths + max_new_tokens - 1 > self.max_tokens)
        if long.size:
            raise RequestError(
                f"request {long[0]} has {rows.lengths[long[0]]} tokens, which with {max_new_tokens} new ones are over "
                f"the model's context window of {self.max_tokens}; shorten it or lower max_new_tokens"
            )

    def plan(self, plan: Plan, num_more: int = 0) -> None:
        """Refuse what the model cannot take with ``num_more`` tokens fed after a prompt, before any forward pass."""
        if plan.max_id >= self.vocab_size:
            raise RequestError(
                f"token id {plan.max_id} is out of range: the model has {self.vocab_size} token ids; "
                "is this the model's own tokenizer?"
            )
        if plan.max_tokens + num_more > self.max_tokens:
            raise RequestError(
                f"the longest prompt feeds {plan.max_tokens + num_more} tokens, over the model's context window of "
                f"{self.max_tokens}; shorten it or use fewer demonstrations{' or new tokens' if num_more else ''}"
            )

    def ids(self, rows: Rows) -> None:
        beyond = np.flatnonzero(rows.tokens >= self.vocab_size)
        if beyond.size:
            number = int(np.searchsorted(rows.offsets, beyond[0], side="right")) - 1
            raise RequestError(
                f"request {number} holds token id {rows.tokens[beyond[0]]}, out of range: the model has "
                f"{self.vocab_size} token ids; is this the model's own tokenizer?"
            )

    def requests(self, rows: Rows) -> None:
        """As ``plan``, naming the request."""
        self.ids(rows)
        long = np.flatnonzero(rows.lengths - 1 > self.max_tokens)
        if long.size:
            raise RequestError(
                f"request {long[0]} feeds {rows.lengths[long[0]] - 1} tokens, over the model's context "
                f"window of {self.max_tokens}; shorten it or use fewer demonstrations"
            )
