"""What requests will cost, forecast before any is sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from iclperm.base.tokenizer_file import check_tokenizer_file, told_where_it_gives_up
from iclperm.errors import ModelError, printable
from iclperm.study.endpoint import EndpointChoices, Spent

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Prompt = str | Sequence[Mapping[str, str]]
"""A text, or the messages of a chat: ``{"role": ..., "content": ...}``."""

LEAST_CACHED_TOKENS, CACHE_STEP = 1024, 128
"""Providers cache prefixes of at least so many tokens, in steps of so many."""
_CHARACTERS_PER_TOKEN = 4  # of English, where no tokenizer is given; for estimates only
_TOKENS_PER_MESSAGE = 8  # what a chat template adds, at most


class Bill(NamedTuple):
    """What requests will cost: with the most new tokens, and the cached ones that a provider's cache should have."""

    spent: Spent
    cost: float | None  # None without prices
    is_estimate: bool  # tokens estimated from characters, for want of a tokenizer


def estimate_bill(
    choices: EndpointChoices, groups: Iterable[Sequence[Prompt]], *, max_new_tokens: int, times: int | None = None
) -> Bill:
    """What groups of prompts will cost: all tokens, those of them that the provider's cache should hold, and the most
    new tokens.

    Each prompt is sent ``times`` (its draws unless given; for log-likelihoods the number of labels). Within a group
    what a prompt shares with the first is cached once that is 1,024 tokens, in steps of 128; what groups share with
    each other is not counted. Sends nothing. O(characters), and tokens of what differs.
    """
    counter = TokenCounter(choices.tokenizer)
    times = choices.draws if times is None else times
    most_new = times * (max_new_tokens + choices.reasoning_tokens)
    spent = Spent()
    for group in groups:
        first = ""
        for prompt in group:
            text = _flat(prompt)
            cut = _last_blank(text, _common(first, text))
            first = first or text
            shared = counter.estimate(text[:cut])
            length = shared + counter.estimate(text[cut:]) + _around(choices, prompt)
            spent += Spent(times, times * length, _cached(shared) + (times - 1) * _cached(length), most_new)
    return Bill(spent, None if choices.prices is None else choices.prices.cost(spent), choices.tokenizer is None)


def product_bill(
    choices: EndpointChoices,
    products: Iterable[tuple[Sequence[str], Sequence[str]]],
    *,
    max_new_tokens: int,
    times: int | None = None,
) -> Bill:
    """As `estimate_bill`, of contexts times queries given as text, each context a group: O(contexts + queries)."""
    counter = TokenCounter(choices.tokenizer)
    times = choices.draws if times is None else times
    spent = Spent()
    for contexts, queries in products:
        before, after = (np.array(list(map(counter.estimate, part)), dtype=np.int64) for part in (contexts, queries))
        num, lengths = before.size * after.size, np.add.outer(before, after)
        cached = (times - 1) * int(_cached(lengths).sum()) + (after.size - 1) * int(_cached(before).sum())
        most = num * times * (max_new_tokens + choices.reasoning_tokens)
        spent += Spent(num * times, times * int(lengths.sum()), cached, most)
    return Bill(spent, None if choices.prices is None else choices.prices.cost(spent), choices.tokenizer is None)


class TokenCounter:
    """Counts tokens with a tokenizer (folder or hub id), else bounds them by bytes and estimates from characters."""

    def __init__(self, name: str | None) -> None:
        self._tokenizer = None if name is None else _tokenizer(name)
        self._counts: dict[str, int] = {}

    def estimate(self, text: str) -> int:
        """Tokens of a part of a prompt; at its seams a token may be cut."""
        if self._tokenizer is None:
            return -(-len(text) // _CHARACTERS_PER_TOKEN)
        if text not in self._counts:  # demonstrations and queries come again and again
            self._counts[text] = len(self._ids(text, add_special_tokens=False))
        return self._counts[text]

    def bound(self, prompt: Prompt) -> int:
        """No fewer tokens than the server will count."""
        messages = 1 if isinstance(prompt, str) else len(prompt)
        text = _flat(prompt)
        tokens = len(text.encode()) if self._tokenizer is None else len(self._ids(text))
        return tokens + _TOKENS_PER_MESSAGE * (messages + 1)

    def first(self, text: str) -> str:
        """The first token of a text, as text; needs a tokenizer."""
        assert self._tokenizer is not None
        ids = self._ids(text, add_special_tokens=False)
        return str(self._tokenizer.decode(ids[:1], skip_special_tokens=False))

    def _ids(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert self._tokenizer is not None
        with told_where_it_gives_up():
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


def _tokenizer(name: str) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        if Path(name).is_dir():
            check_tokenizer_file(Path(name) / "tokenizer.json")
            tokenizer = Tokenizer.from_file(str(Path(name) / "tokenizer.json"))
        else:
            tokenizer = Tokenizer.from_pretrained(name)
        tokenizer.no_truncation()  # which a file may ask for; what is sent is whole
        tokenizer.no_padding()
        return tokenizer
    except ModelError:
        raise
    except Exception as error:  # the library raises nothing narrower
        reason = printable(" ".join(str(error).split()))
        raise ModelError(
            f"the tokenizer {name!r} cannot be read ({reason}); give a folder with tokenizer.json or a hub id"
        ) from None


def _flat(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


def _common(one: str, other: str) -> int:
    """Length of the common prefix, by halving: comparing slices is quick."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _last_blank(text: str, end: int) -> int:
    """Where the last blank before ``end`` begins, where tokens seldom span; 0 without one."""
    return max(text.rfind(" ", 0, end), text.rfind("\n", 0, end), 0)


def _around(choices: EndpointChoices, prompt: Prompt) -> int:
    """Tokens that are not in the text: a BOS, or what OpenAI's chats put around messages."""
    messages = 1 if isinstance(prompt, str) else len(prompt)
    return 1 if choices.api == "completions" else 4 * messages + 3


def _cached(tokens: Any) -> Any:
    """What of so many tokens, a number or an array of them, a provider's cache holds."""
    return tokens // CACHE_STEP * CACHE_STEP * (tokens >= LEAST_CACHED_TOKENS)
