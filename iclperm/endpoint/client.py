"""The engine's verbs over an OpenAI-compatible API, as far as such a server can."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.endpoint.bill import Prompt, TokenCounter
from iclperm.endpoint.gate import Pace
from iclperm.endpoint.keys import KeyHosts
from iclperm.endpoint.ledger import Ledger
from iclperm.endpoint.replies import Reply, RequestResult, Scored, State, as_echoed, as_listed, as_reply, top_logprobs
from iclperm.endpoint.transport import Request, Transport, Usage
from iclperm.errors import ConfigError, RequestError, RunStopped
from iclperm.study.endpoint import EndpointChoices, Spent

_MOST_STOPS = 4  # that a request may carry; all are applied to the reply in any case
_MOST_LISTED = (20, 5)  # alternatives of a token that chats and older completions give at most
_TEXTS = ("best_of", "num_beams")  # of a request, as servers call how many are generated for one reply
_PROBE = ("One two three", " four")


@dataclass(frozen=True)
class Likelihoods:
    """One entry a request, in the order given: ``logprob`` float32 in nats, NaN where ``state`` is not ok, of a
    continuation of ``num_tokens`` int32 tokens."""

    logprob: npt.NDArray[np.float32]
    num_tokens: npt.NDArray[np.int32]
    state: list[State]


class Capabilities(NamedTuple):
    """What a server gives beyond text."""

    prompt_logprobs: bool  # of an echoed prompt's tokens
    top_logprobs: int  # alternatives of a generated token; 0 for none


class Endpoint:
    """A model served over an OpenAI-compatible API, asked as `EndpointChoices` say.

    With a ``ledger`` every paid reply is on disk before it is used, and none is paid for twice; without one, replies
    are remembered as long as the endpoint. Where the run as a whole cannot go on (key refused, budget spent, wrong
    model, no answers, full disk) verbs raise `RunStopped` once what is in flight is on disk: the same command
    continues. A key that the caller names here goes to ``base_url``; that of a study's choices (`of`) needs to be
    allowed. A single request without an answer by its deadline has the state ``api_missing`` and is not in the ledger.
    Raises `ConfigError` for choices that do not fit, a key that is not there, and packages that are missing.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key_env: str | None = None,
        *,
        ledger: Ledger | None = None,
        pace: Pace | None = None,
        **choices: Any,
    ) -> None:
        self.choices = EndpointChoices(base_url=base_url, model=model, api_key_env=api_key_env, **choices)
        self._transport = Transport(self.choices, ledger, pace or Pace())
        self._where = self._transport.where

    @classmethod
    def of(cls, choices: EndpointChoices, ledger: Ledger | None = None, keys: KeyHosts | None = None) -> Endpoint:
        """The endpoint of a study's choices; raises `KeyNotNamed` where ``keys`` do not let its key go to its host."""
        (keys or KeyHosts()).refuse_unnamed(choices)
        given = {name: getattr(choices, name) for name in type(choices).model_fields}
        return cls(**given, ledger=ledger)

    def __repr__(self) -> str:
        return f"Endpoint({self.choices.base_url!r}, {self.choices.model!r})"

    @property
    def report(self) -> Usage:
        """What the last call cost."""
        return self._transport.report

    @property
    def totals(self) -> Usage:
        """What all calls cost."""
        return self._transport.totals

    @property
    def served_as(self) -> str | None:
        """The name that replies bear, such as a dated version; None before the first."""
        return self._transport.served

    @property
    def takes_temperature(self) -> bool:
        """Whether a temperature is sent; False once the model has turned out to take none, also in an earlier session:
        its replies are draws."""
        return self.choices.temperature is not None and self._transport.sends("temperature")

    @property
    def spent(self) -> Spent:
        """What of the budget has been spent so far: by all sessions of the ledger, or by this endpoint without one."""
        return self._transport.spent

    @property
    def paid(self) -> Spent:
        """What this endpoint itself has spent so far, also of a call that is still open."""
        return self._transport.paid

    @property
    def lost(self) -> Spent:
        """What of `paid` brought no reply, at most."""
        return self._transport.lost

    def generate(self, prompts: Sequence[Prompt], max_new_tokens: int = 256, stop: Sequence[str] = ()) -> list[Reply]:
        """Replies to prompts that share a context: prompt by prompt, all draws of each."""
        (replies,) = self.generate_groups([prompts], max_new_tokens=max_new_tokens, stop=stop)
        return replies

    def generate_groups(
        self, groups: Iterable[Sequence[Prompt]], *, max_new_tokens: int = 256, stop: Sequence[str] = ()
    ) -> Iterator[list[Reply]]:
        """The replies of each group, in order, prompt by prompt, all draws of each.

        ``groups`` may be lazy: one more is taken ahead than requests may be out at once.
        """
        if max_new_tokens < 1 or "" in stop:
            raise RequestError(f"max_new_tokens is {max_new_tokens}, stop {list(stop)}; give 1 or more, no empty stop")
        draws = self.choices.draws
        requests = (
            [self._generation(prompt, max_new_tokens, stop, draw) for prompt in group for draw in range(draws)]
            for group in groups
        )
        for results in self._transport.results(requests):
            yield [as_reply(result, number % draws, stop) for number, result in enumerate(results)]

    def score_groups(
        self, groups: Iterable[Sequence[Prompt]], labels: Sequence[str], *, first_token_only: bool = False
    ) -> Iterator[list[Scored]]:
        """Log-probabilities of each label after each prompt of a group, in order.

        Of whole labels where the server gives the log-probabilities of a prompt; else of their first tokens, out of
        those that it lists for the first generated token. A label that is not listed is less likely than the last that
        is (``is_bound``); where none is listed the prompt is ``unparsed``. Raises `ConfigError` where the server gives
        neither, where it only lists and there is no ``tokenizer``, or where labels share a first token.
        """
        return self._scores(([(prompt, labels) for prompt in group] for group in groups), first_token_only)

    def loglikelihood(self, requests: Sequence[tuple[str, str]]) -> Likelihoods:
        """Log-likelihood of each (context, continuation), as `score_groups` has them.

        Requests of one context belong side by side: then they find it in the provider's cache.
        """
        runs = groupby(requests, key=lambda request: request[0])
        groups = ([(context, [continuation for _, continuation in run])] for context, run in runs)
        scores = [scored for group in self._scores(groups, first_token_only=False) for scored in group]
        return Likelihoods(
            np.array([value for scored in scores for value in scored.logprob], np.float32),
            np.array([count for scored in scores for count in scored.num_tokens], np.int32),
            [scored.state for scored in scores for _ in scored.logprob],
        )

    @cached_property
    def capabilities(self) -> Capabilities:
        """What the server gives, found out by one to three small requests, which are paid for like others."""
        if self.choices.api == "completions" and self._grants(self._echo(*_PROBE), _echoes):
            return Capabilities(prompt_logprobs=True, top_logprobs=0)
        for most in _MOST_LISTED:
            if num := self._grants(self._first(_PROBE[0], most), _num_listed):
                return Capabilities(prompt_logprobs=False, top_logprobs=min(most, num))
        return Capabilities(prompt_logprobs=False, top_logprobs=0)

    def _grants(self, request: Request, granted: Callable[[RequestResult], int]) -> int:
        """What a small request shows that the server gives; a kept result that shows nothing is asked for again."""
        ((result,),) = self._transport.results([[replace(request, grants=granted)]])
        if result.state == "api_missing":
            raise RunStopped(f"{self._where} gave no answer ({result.problem}); run the same command to continue")
        return granted(result)

    def _scores(
        self, groups: Iterable[Sequence[tuple[Prompt, Sequence[str]]]], first_token_only: bool
    ) -> Iterator[list[Scored]]:
        """`score_groups` of prompts with the labels of each."""
        can = self.capabilities
        if not can.prompt_logprobs and not can.top_logprobs:
            raise ConfigError(f"{self._where} gives no log-likelihoods: use scoring: generate")
        taken: deque[Sequence[tuple[Prompt, Sequence[str]]]] = deque()

        def requests() -> Iterator[list[Request]]:
            for group in groups:
                taken.append(group)
                yield [request for prompt, labels in group for request in self._scoring(can, prompt, labels)]

        for found in self._transport.results(requests()):
            results = iter(found)
            yield [
                as_echoed([next(results) for _ in labels], labels, first_token_only)
                if can.prompt_logprobs
                else as_listed(next(results), self._first_tokens(labels))
                for _, labels in taken.popleft()
            ]

    def _scoring(self, can: Capabilities, prompt: Prompt, labels: Sequence[str]) -> list[Request]:
        if not labels or not all(label.strip() for label in labels):
            raise RequestError(f"labels are {list(labels)}; give at least one, and none that is blank")
        if can.prompt_logprobs:
            return [self._echo(_text(prompt), label) for label in labels]
        self._first_tokens(labels)  # may refuse, before anything is paid for
        return [self._first(prompt, can.top_logprobs)]

    def _generation(self, prompt: Prompt, max_new_tokens: int, stop: Sequence[str], draw: int) -> Request:
        body: dict[str, Any] = {"max_tokens": max_new_tokens + self.choices.reasoning_tokens}
        if stop:
            body["stop"] = list(stop[:_MOST_STOPS])
        return self._request(prompt, body, draw)

    def _first(self, prompt: Prompt, most: int) -> Request:
        asked = {"logprobs": True, "top_logprobs": most} if self.choices.api == "chat" else {"logprobs": most}
        return self._request(prompt, {"max_tokens": 1, **asked})

    def _echo(self, text: str, continuation: str) -> Request:
        """One token is generated, since servers refuse to generate none."""
        asked = {"max_tokens": 1, "logprobs": 1, "echo": True}
        return replace(self._request(text + continuation, asked), echoed=continuation)

    def _request(self, prompt: Prompt, asked: Mapping[str, Any], draw: int = 0) -> Request:
        choices = self.choices
        body = {"model": choices.model, **choices.extra, **asked}
        if choices.api == "completions":
            body["prompt"] = _text(prompt)
        else:
            body["messages"] = _messages(prompt)
        if choices.temperature is not None:
            body["temperature"] = choices.temperature
        raw = json.dumps({"api": choices.api, "body": body, "draw": draw}, sort_keys=True, separators=(",", ":"))
        return Request(hashlib.sha256(raw.encode()).hexdigest(), body, self._bound(prompt, int(asked["max_tokens"])))

    def _bound(self, prompt: Prompt, new: int) -> Spent:
        """The most that a request can cost: what ``extra`` says may be read as a prompt, such as tools, and it may ask
        for several texts, the best of which comes back."""
        extra = self.choices.extra
        beside = len(json.dumps(extra, ensure_ascii=False).encode()) if extra else 0
        texts = [each for name in _TEXTS if type(each := extra.get(name)) is int]
        return Spent(1, self._tokens.bound(prompt) + beside, 0, new * max([1, *texts]))

    @cached_property
    def _tokens(self) -> TokenCounter:
        return TokenCounter(self.choices.tokenizer)

    def _first_tokens(self, labels: Sequence[str]) -> list[str]:
        """What each label's first token looks like."""
        if self.choices.tokenizer is None:
            raise ConfigError(
                f"{self._where} gives the log-likelihoods of first tokens only: name its tokenizer (folder or hub id) "
                "with the endpoint's key 'tokenizer', or use scoring: generate"
            )
        starts = [self._tokens.first(label.lstrip() if self.choices.api == "chat" else label) for label in labels]
        for number, start in enumerate(starts):
            if start in starts[:number]:
                other = labels[starts.index(start)]
                raise ConfigError(
                    f"the labels {other!r} and {labels[number]!r} begin with the same token {start!r}: use scoring: "
                    "generate"
                )
        return starts


def _echoes(result: RequestResult) -> int:
    return as_echoed([result], _PROBE[1:]).state == "ok"


def _num_listed(result: RequestResult) -> int:
    """How many alternatives of the first token come with a log-probability."""
    listed = {} if result.reply is None or result.state != "ok" else top_logprobs(result.reply)
    return sum(value is not None for value in listed.values())


def _text(prompt: Prompt) -> str:
    if not isinstance(prompt, str):
        raise RequestError("messages were given to an endpoint with api: completions; give text, or set api: chat")
    return prompt


def _messages(prompt: Prompt) -> list[dict[str, str]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [{"role": message["role"], "content": message["content"]} for message in prompt]
