"""What is generated: when a text ends, how it reads, and what of it is returned; no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.engine.tree import IntArray, TokenArray
from iclperm.errors import RequestError

DEFAULT_MAX_NEW_TOKENS = 256
STOP, EOS, LENGTH, INVALID = "stop", "eos", "length", "invalid"
# Tokens before a stop string that are decoded with it, so that no character and no leading space is cut.
_MARGIN_TOKENS = 8


@dataclass(frozen=True)
class Generations:
    """One entry a request, in the order given.

    ``token_ids`` int32 are the tokens generated, without the EOS that ended them, with those that completed a stop
    string. ``text`` is decoded from them without special tokens, the stop string and what follows it cut off; None
    without a tokenizer. ``finish`` is ``stop``, ``eos``, ``length``, or ``invalid`` where logits were not finite.
    ``num_tokens`` counts what was generated, the ending EOS included; ``logprob`` sums over the same tokens, in nats,
    NaN where invalid. ``state``: 0 ok, 1 invalid.
    """

    token_ids: list[TokenArray]
    text: list[str] | None
    finish: list[str]
    logprob: npt.NDArray[np.float32]
    num_tokens: npt.NDArray[np.int32]
    state: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.finish)

    @classmethod
    def of(cls, texts: Sequence[Generated], *, has_text: bool) -> Generations:
        """The arrays of single texts."""
        return cls(
            token_ids=[text.token_ids for text in texts],
            text=[str(text.text) for text in texts] if has_text else None,
            finish=[text.finish for text in texts],
            logprob=np.array([text.logprob for text in texts], np.float32),
            num_tokens=np.array([text.num_tokens for text in texts], np.int32),
            state=np.array([text.finish == INVALID for text in texts], np.uint8),
        )


@dataclass(frozen=True)
class GeneratedUnit:
    """A finished unit of a product: c distinct contexts x q queries, ``outputs`` of c * q entries, context-major."""

    unit: int
    contexts: IntArray  # [c] distinct-context numbers
    queries: IntArray  # [q]
    outputs: Generations


class Generated(NamedTuple):
    """One text, as in `Generations`."""

    token_ids: TokenArray
    text: str | None
    finish: str
    logprob: float
    num_tokens: int


class Ending:
    """When a text ends, and how it reads.

    A stop string may begin and end within tokens: it is looked for in the text after every token. Raises RequestError
    for ``max_new_tokens`` under 1, an empty stop string, or stop strings without a tokenizer.
    """

    def __init__(self, max_new_tokens: int, stop: str | Sequence[str], eos_ids: Iterable[int], tokenizer: Any) -> None:
        self.max_new_tokens = max_new_tokens
        if not isinstance(stop, str | Iterable | None):
            raise RequestError(f"stop is {stop!r}; give a text, or a list of texts")
        self.stop = (stop,) if isinstance(stop, str) else tuple(stop or ())
        self.eos_ids = frozenset(eos_ids)
        self._tokenizer = tokenizer
        if not isinstance(max_new_tokens, int | np.integer) or max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {max_new_tokens}; give a whole number from 1 on")
        for each in self.stop:
            if not isinstance(each, str):
                raise RequestError(f"a stop string is {each!r}; give text")
            if not each:
                raise RequestError("a stop string is empty; leave it out")
        if self.stop and tokenizer is None:
            raise RequestError(
                f"the engine has no tokenizer, so it cannot find the stop string {self.stop[0]!r} in token ids; "
                "pass Engine(model, tokenizer)"
            )
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = {token for token, about in added.items() if about.special}
        self._special |= set(getattr(tokenizer, "all_special_ids", ()))
        # No token that is not special stands for less than a byte.
        self._window = _MARGIN_TOKENS + max((len(text.encode()) for text in self.stop), default=0)

    @property
    def has_text(self) -> bool:
        return self._tokenizer is not None

    def after(self, ids: list[int], token: int) -> str | None:
        """How a text ends that ``token`` is to be added to; adds it, but for an EOS. None: it goes on."""
        if token in self.eos_ids:
            return EOS
        ids.append(token)
        if self.stops(ids):
            return STOP
        return LENGTH if len(ids) >= self.max_new_tokens else None

    def stops(self, ids: list[int]) -> bool:
        """Whether the text of ``ids`` holds a stop string, which that of all but the last does not."""
        if not self.stop:
            return False
        return self._holds_stop(self._recent(ids)) and self._holds_stop(ids)

    def text(self, ids: Sequence[int]) -> str | None:
        """The text of ``ids`` up to the first stop string; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        text = self._decoded(ids)
        return text[: min((text.find(stop) for stop in self.stop if stop in text), default=len(text))]

    def result(self, ids: list[int], finish: str, logprob: float, num_tokens: int) -> Generated:
        """A text that has ended."""
        value = math.nan if finish == INVALID else logprob
        return Generated(np.array(ids, np.int32), self.text(ids), finish, value, num_tokens)

    def _recent(self, ids: Sequence[int]) -> str:
        """The text of the last tokens, from a whole character on: half of one may garble what follows it."""
        size = self._window
        while True:
            recent = list(islice((token for token in reversed(ids) if token not in self._special), size))
            text = self._decoded(recent[::-1])
            if len(recent) < size or not text.startswith("\ufffd"):
                return text
            size *= 2

    def _holds_stop(self, text_or_ids: str | Sequence[int]) -> bool:
        text = text_or_ids if isinstance(text_or_ids, str) else self._decoded(text_or_ids)
        return any(stop in text for stop in self.stop)

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def eos_ids(model: Any, config: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end a text: those of the model's generation configuration, else of ``config``, else of the tokenizer."""
    for source in (getattr(model, "generation_config", None), config, tokenizer):
        given = getattr(source, "eos_token_id", None)
        if given is not None and given != []:
            return frozenset(given if isinstance(given, list | tuple) else [given])
    return frozenset()
