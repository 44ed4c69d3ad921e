"""What shared prefixes saved: tokens asked for, distinct, and forwarded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from iclperm.report.parts import Table, percent


class TokenReport(Protocol):
    """What an engine (`Engine.report`) and a run count."""

    @property
    def tokens_naive(self) -> int: ...
    @property
    def tokens_unique(self) -> int: ...
    @property
    def tokens_forwarded(self) -> int: ...


class TokenSavings(NamedTuple):
    """Tokens of a study: asked for prompt by prompt, distinct, and really sent through the model."""

    naive: int
    unique: int
    forwarded: int
    complete: bool = True
    """False where a session ended without a record of its tokens: `forwarded` is then the least it can be."""

    @classmethod
    def of(cls, report: TokenReport) -> TokenSavings:
        """From what an engine or a run counted; a run may lack the record of a session, an engine never does."""
        complete = getattr(report, "is_token_count_complete", True)
        return cls(report.tokens_naive, report.tokens_unique, report.tokens_forwarded, complete)

    @property
    def saving(self) -> float:
        """How many times fewer the distinct tokens are than those of plain prompting; NaN where there are none."""
        return self.naive / self.unique if self.unique else math.nan


def token_line(tokens: TokenSavings) -> str:
    """What shared prefixes saved, in one line."""
    line = f"tokens: {tokens.naive:,} prompt by prompt, {tokens.unique:,} distinct: {tokens.saving:.1f} times fewer"
    forwarded = _forwarded(tokens)
    return line if forwarded == f"{tokens.unique:,}" else f"{line} ({forwarded} forwarded)"


def dealt_words(decisions: Sequence[Mapping[str, Any]], tokens: TokenReport) -> str:
    """What a run took that asked each ordering queries of its own, beside all queries under every ordering: those
    tokens stand in its one decision (`iclperm.runs.layout`)."""
    crossed = decisions[0]["known"]["crossed"]
    return (
        f"it took {tokens.tokens_unique:,} distinct tokens, {tokens.tokens_unique / crossed['unique']:.0%} of the "
        f"{crossed['unique']:,} of all queries under every ordering; prompt by prompt those are {crossed['naive']:,}"
    )


def beside_everything(forwarded: int, exhaustive: int, what: str, *, is_generated: bool) -> str:
    """What was forwarded beside the distinct tokens of ``what``, which asks everything; where answers are generated
    these are of prompts alone, so that the two make no share."""
    if is_generated:
        return (
            f"{forwarded:,} tokens, generated ones among them; the prompts of {what} have {exhaustive:,} distinct ones"
        )
    share = f" ({percent(forwarded / exhaustive)})" if exhaustive else ""
    return f"{forwarded:,} tokens; {what} has {exhaustive:,} distinct ones{share}"


def token_table(tokens: TokenSavings) -> Table:
    """What shared prefixes saved, line by line."""
    rows = [
        ("prompt by prompt", f"{tokens.naive:,}", ""),
        ("distinct", f"{tokens.unique:,}", f"{tokens.saving:.1f} times fewer: shared prefixes counted once"),
        ("forwarded", _forwarded(tokens), "sent through the model, in all sessions"),
    ]
    return Table("Tokens, for all k", ("", "", ""), rows, texts=(2,))


def _forwarded(tokens: TokenSavings) -> str:
    return f"{tokens.forwarded:,}" if tokens.complete else f"at least {tokens.forwarded:,}"
