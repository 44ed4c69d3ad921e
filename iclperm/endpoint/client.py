"""The engine's verbs over an OpenAI-compatible API, as far as such a server can.

Requests go out group by group: those of a group share a context, and the first is answered before the others are sent,
so that they find it in the provider's prompt cache. Every paid reply is in the ledger before it is used.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.endpoint.bill import Prompt, Tokens
from iclperm.endpoint.choices import EndpointChoices, Spent, read_key
from iclperm.endpoint.gate import Gate, Pace, Watch, Window, retry_after
from iclperm.endpoint.replies import (
    Answer,
    Reply,
    Scored,
    State,
    as_echoed,
    as_listed,
    as_reply,
    compact,
    is_version_of,
    one_line,
    read_reply,
    refusal,
    spent_on,
    top_logprobs,
    without,
)
from iclperm.errors import ConfigError, RequestError
from iclperm.ledger import Ledger
from iclperm.store import RunStopped

if TYPE_CHECKING:
    from openai import APIStatusError, AsyncOpenAI
    from tenacity import RetryCallState

_MOST_STOPS = 4  # that a request may carry; all are applied to the reply in any case
_MOST_LISTED = (20, 5)  # alternatives of a token that chats and older completions give at most
_ATTEMPTS_TO_REACH = 4  # a server that has answered nothing yet; some seconds
_FAILURES_IN_A_ROW = 5  # requests that end unanswered with no reply in between: then it is the endpoint, not they
_UNSUPPORTED = re.compile(r"unsupported|not support|unexpected|unrecogni[sz]ed|unknown|not permitted|deprecated", re.I)
_OVERLONG = re.compile(r"context.?(length|window|size)|exceeds? .{0,40}context|too many (input )?tokens", re.I)
_FILTERED = re.compile(r"content.?(filter|policy|management)|ResponsibleAI|safety system", re.I)
_BROKE = re.compile(r"insufficient.?(quota|balance|credit|fund)", re.I)  # others speak of quotas a minute, too
_PROBE = ("One two three", " four")


@dataclass(frozen=True)
class Likelihoods:
    """One entry a request, in the order given: ``logprob`` in nats (float32), NaN where ``state`` is not ok."""

    logprob: npt.NDArray[np.float32]
    num_tokens: npt.NDArray[np.int32]
    state: list[State]


class Capabilities(NamedTuple):
    """What a server gives beyond text."""

    prompt_logprobs: bool  # of an echoed prompt's tokens
    top_logprobs: int  # alternatives of a generated token; 0 for none


@dataclass
class Usage:
    """What a call cost; what may have been paid for but did not arrive is in ``spent`` at its upper bound."""

    spent: Spent = field(default_factory=Spent)
    num_reused: int = 0  # replies out of the ledger
    num_retries: int = 0
    num_lost: int = 0  # possibly paid for, not received
    num_refused: int = 0
    num_missing: int = 0
    seconds: float = 0.0
    cost: float | None = None  # None without prices

    def add(self, other: Usage) -> None:
        """Adds what another call cost."""
        for each in fields(self):
            mine, its = getattr(self, each.name), getattr(other, each.name)
            setattr(self, each.name, its if mine is None else mine if its is None else mine + its)


class Endpoint:
    """A model served over an OpenAI-compatible API, asked as `EndpointChoices` say.

    With a ``ledger`` every paid reply is on disk before it is used, and none is paid for twice; without one, replies
    are remembered as long as the endpoint. Where the run as a whole cannot go on (key refused, budget spent, wrong
    model, no answers, full disk) verbs raise `RunStopped` once what is in flight is on disk: the same command
    continues. A single request without an answer by its deadline has the state ``api_missing`` and is not in the
    ledger. Raises `ConfigError` for choices that do not fit, a key that is not there, and packages that are missing.
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
        self.report = Usage()
        self.totals = Usage()
        self._key = read_key(self.choices.api_key_env)
        self._where = f"{self.choices.model} at {self.choices.base_url}"
        self._ledger = ledger
        self._pace = pace or Pace()
        self._spent = Spent()  # by this endpoint
        self._remembered: dict[str, dict[str, Any]] = {}  # without a ledger
        self._served: str | None = None if ledger is None else ledger.served.get(model)
        self._dialect = _Dialect()
        self._window = Window(self.choices.concurrency)
        self._is_busy = False

    @classmethod
    def of(cls, choices: EndpointChoices, ledger: Ledger | None = None) -> Endpoint:
        """The endpoint of a study's choices."""
        given = {name: getattr(choices, name) for name in type(choices).model_fields}
        return cls(**given, ledger=ledger)

    def __repr__(self) -> str:
        return f"Endpoint({self.choices.base_url!r}, {self.choices.model!r})"

    @property
    def served_as(self) -> str | None:
        """The name that replies bear, such as a dated version; None before the first."""
        return self._served

    @property
    def takes_temperature(self) -> bool:
        """Whether a temperature is sent; False once the model has turned out to take none, also in an earlier session:
        its replies are draws."""
        return self.choices.temperature is not None and "temperature" not in self._dialect.dropped

    @property
    def spent(self) -> Spent:
        """What of the budget has been spent so far: by all sessions of the ledger, or by this endpoint without one."""
        return self._spent if self._ledger is None else self._ledger.spent

    @property
    def paid(self) -> Spent:
        """What this endpoint itself has spent so far, also of a call that is still open."""
        return self._spent

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
        for answers in self._answers(requests):
            yield [as_reply(answer, number % draws, stop) for number, answer in enumerate(answers)]

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
        """Log-likelihood of each continuation after its context, as `score_groups`; those of one context belong side
        by side."""
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
        if self.choices.api == "completions":
            answer = self._probe(self._echo(*_PROBE))
            if as_echoed([answer], _PROBE[1:]).state == "ok":
                return Capabilities(prompt_logprobs=True, top_logprobs=0)
        for most in _MOST_LISTED:
            answer = self._probe(self._first(_PROBE[0], most))
            if answer.reply is not None and (listed := top_logprobs(answer.reply)):
                return Capabilities(prompt_logprobs=False, top_logprobs=min(most, len(listed)))
        return Capabilities(prompt_logprobs=False, top_logprobs=0)

    def _probe(self, request: _Request) -> Answer:
        ((answer,),) = self._answers([[replace(request, is_probe=True)]])
        if answer.state == "api_missing":
            raise RunStopped(f"{self._where} gave no answer ({answer.problem}); run the same command to continue")
        return answer

    def _scores(
        self, groups: Iterable[Sequence[tuple[Prompt, Sequence[str]]]], first_token_only: bool
    ) -> Iterator[list[Scored]]:
        """Of prompts with the labels of each."""
        can = self.capabilities
        if not can.prompt_logprobs and not can.top_logprobs:
            raise ConfigError(f"{self._where} gives no log-likelihoods: use scoring: generate")
        taken: deque[Sequence[tuple[Prompt, Sequence[str]]]] = deque()

        def requests() -> Iterator[list[_Request]]:
            for group in groups:
                taken.append(group)
                yield [request for prompt, labels in group for request in self._scoring(can, prompt, labels)]

        for found in self._answers(requests()):
            answers = iter(found)
            yield [
                as_echoed([next(answers) for _ in labels], labels, first_token_only)
                if can.prompt_logprobs
                else as_listed(next(answers), self._first_tokens(labels))
                for _, labels in taken.popleft()
            ]

    def _scoring(self, can: Capabilities, prompt: Prompt, labels: Sequence[str]) -> list[_Request]:
        if not labels or not all(label.strip() for label in labels):
            raise RequestError(f"labels are {list(labels)}; give at least one, and none that is blank")
        if can.prompt_logprobs:
            return [self._echo(_text(prompt), label) for label in labels]
        self._first_tokens(labels)  # may refuse, before anything is paid for
        return [self._first(prompt, can.top_logprobs)]

    def _generation(self, prompt: Prompt, max_new_tokens: int, stop: Sequence[str], draw: int) -> _Request:
        body: dict[str, Any] = {"max_tokens": max_new_tokens + self.choices.reasoning_tokens}
        if stop:
            body["stop"] = list(stop[:_MOST_STOPS])
        return self._request(prompt, body, draw)

    def _first(self, prompt: Prompt, most: int) -> _Request:
        asked = {"logprobs": True, "top_logprobs": most} if self.choices.api == "chat" else {"logprobs": most}
        return self._request(prompt, {"max_tokens": 1, **asked})

    def _echo(self, text: str, continuation: str) -> _Request:
        """One token is generated, since servers refuse to generate none."""
        asked = {"max_tokens": 1, "logprobs": 1, "echo": True}
        return replace(self._request(text + continuation, asked), echoed=continuation)

    def _request(self, prompt: Prompt, asked: Mapping[str, Any], draw: int = 0) -> _Request:
        choices = self.choices
        body = {"model": choices.model, **choices.extra, **asked}
        if choices.api == "completions":
            body["prompt"] = _text(prompt)
        else:
            body["messages"] = _messages(prompt)
        if choices.temperature is not None:
            body["temperature"] = choices.temperature
        raw = json.dumps({"api": choices.api, "body": body, "draw": draw}, sort_keys=True, separators=(",", ":"))
        bound = Spent(1, self._tokens.bound(prompt), 0, int(asked["max_tokens"]))
        return _Request(hashlib.sha256(raw.encode()).hexdigest(), body, bound)

    @cached_property
    def _tokens(self) -> Tokens:
        return Tokens(self.choices.tokenizer)

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

    def _answers(self, groups: Iterable[list[_Request]]) -> Iterator[list[Answer]]:
        """The answers of each group, in order; requests go on while the caller works on what it has."""
        with self._call() as call:
            waiting: deque[futures.Future[list[Answer]]] = deque()
            ahead = enumerate(groups)
            try:
                while True:
                    while len(waiting) <= self.choices.concurrency and (each := next(ahead, None)) is not None:
                        waiting.append(call.submit(self._ask_group(call, *each)))
                    if not waiting:
                        return
                    answers = waiting[0].result()
                    waiting.popleft()
                    yield answers
            finally:
                call.stop()
                futures.wait(waiting)  # what is in flight is paid for: it has to reach the disk

    @contextmanager
    def _call(self) -> Iterator[_Call]:
        if self._is_busy:
            raise RequestError("an endpoint serves one call at a time; finish the other, or make another endpoint")
        started, before = time.perf_counter(), self._spent
        report = self.report = Usage()
        call = _Call(self._client(), Gate(self._window, lambda reserved: self.choices.overspent(self.spent + reserved)))
        self._is_busy = True
        try:
            yield call
        finally:
            call.close()
            self._is_busy = False
            report.seconds = time.perf_counter() - started
            report.spent = self._spent - before
            report.cost = None if self.choices.prices is None else self.choices.prices.cost(report.spent)
            self.totals.add(report)

    def _client(self) -> AsyncOpenAI:
        try:
            import openai
            import tenacity  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"an endpoint needs the package {error.name}: pip install 'iclperm[api]'") from None
        # What nobody named for this server would else come from OPENAI_* variables.
        headers: Any = {name: openai.Omit() for name in ("OpenAI-Organization", "OpenAI-Project")}
        return openai.AsyncOpenAI(
            base_url=self.choices.base_url,
            api_key=self._key or "none",
            default_headers=headers,
            max_retries=0,
            timeout=openai.Timeout(self.choices.timeout_s, connect=min(10.0, self.choices.timeout_s)),
        )

    async def _ask_group(self, call: _Call, rank: int, requests: list[_Request]) -> list[Answer]:
        """The first that has to be paid for goes alone: the others then find its prefix in the provider's cache."""
        known = [self._known(request) for request in requests]
        missing = [request for request, answer in zip(requests, known, strict=True) if answer is None]
        found: list[Answer | BaseException] = [await self._ask(call, rank, missing[0])] if missing else []
        found += await asyncio.gather(
            *(self._ask(call, rank, request) for request in missing[1:]), return_exceptions=True
        )
        rest = iter(found)
        return [_raised(next(rest)) if answer is None else answer for answer in known]

    def _known(self, request: _Request) -> Answer | None:
        reply = self._remembered.get(request.key) if self._ledger is None else self._ledger.lookup(request.key)
        if reply is None:
            return None
        self.report.num_reused += 1
        return self._answer(reply)

    async def _ask(self, call: _Call, rank: int, request: _Request) -> Answer:
        """One request, sent once however often it is asked at the same time."""
        if request.key not in call.asking:
            if (known := self._known(request)) is not None:
                return known
            call.asking[request.key] = asyncio.ensure_future(self._pay(call, rank, request))
            call.asking[request.key].add_done_callback(lambda _: call.asking.pop(request.key))
        return await call.asking[request.key]

    async def _pay(self, call: _Call, rank: int, request: _Request) -> Answer:
        """One request until it is answered, hopeless or over its deadline: the one place where requests are retried."""
        from tenacity import AsyncRetrying, retry_if_exception_type

        watch = Watch(self.choices.deadline_s)

        def wait(state: RetryCallState) -> float:
            problem = None if state.outcome is None else state.outcome.exception()
            asked = problem.wait if isinstance(problem, _Passing) else None
            return self._pace.wait(state.attempt_number) if asked is None else asked

        async def rest(seconds: float) -> None:
            self.report.num_retries += 1
            await call.gate.rest(seconds)

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_Passing),
            wait=wait,
            stop=lambda state: (
                self._was_never_there(state.outcome, state.attempt_number)
                or not watch.has_time_for(state.upcoming_sleep + self.choices.timeout_s)
            ),
            sleep=rest,
            reraise=True,
        )
        try:
            answer: Answer = await retrying(self._attempt, call, rank, request, watch)
        except _Passing as problem:
            return self._missing(call, problem)
        except _Settled as problem:
            self.report.num_refused += problem.state == "refused"
            return Answer(problem.state, None, str(problem))
        call.failures = 0
        return answer

    def _was_never_there(self, outcome: Any, attempts: int) -> bool:
        """Whether a server that has not answered anything yet could not be reached several times."""
        problem = None if outcome is None else outcome.exception()
        return isinstance(problem, _Unreachable) and not self.paid.requests and attempts >= _ATTEMPTS_TO_REACH

    def _missing(self, call: _Call, problem: _Passing) -> Answer:
        """A request without an answer; raises `RunStopped` where others would not get one, either."""
        call.failures += 1
        if isinstance(problem, _Unreachable) and not self.paid.requests:
            error = RunStopped(
                f"{self._where} cannot be reached; look at 'base_url' and whether the server is there, then run the "
                "same command to continue"
            )
        elif isinstance(problem, _Throttled):
            after = "later" if problem.wait is None else f"in {problem.wait:.0f} s"
            error = RunStopped(f"{self._where} takes no more now ({problem}); run the same command {after} to continue")
        elif call.failures >= _FAILURES_IN_A_ROW:
            error = RunStopped(
                f"{self._where} left {call.failures} requests in a row without an answer ({problem}); look after it, "
                "then run the same command to continue"
            )
        else:
            self.report.num_missing += 1
            return Answer("api_missing", None, str(problem))
        call.gate.stop(error)
        raise error

    async def _attempt(self, call: _Call, rank: int, request: _Request, watch: Watch) -> Answer:
        came = time.monotonic()
        ticket = await call.gate.enter(rank, request.bound)
        watch.add(time.monotonic() - came)
        try:
            if self._ledger is not None:
                self._ledger.refuse_full_disk()
            reply = await self._send(call.client, request)
            self._window.grow()
            return self._answer(reply)
        except _Throttled as problem:
            call.gate.throttled(ticket, problem.wait)
            raise
        except (_Passing, _Settled):
            raise
        except Exception as error:
            call.gate.stop(error)
            raise
        finally:
            call.gate.leave(request.bound)

    async def _send(self, client: AsyncOpenAI, request: _Request) -> dict[str, Any]:
        """One reply, on disk; raises `_Passing`, `_Settled` or `RunStopped`."""
        import openai

        said = self._dialect.of(request.body)
        named = {name: said[name] for name in ("model", "messages", "prompt") if name in said}
        rest = {name: value for name, value in said.items() if name not in named}
        verb: Any = client.chat.completions if self.choices.api == "chat" else client.completions
        try:
            async with asyncio.timeout(self.choices.timeout_s):
                raw = await verb.with_raw_response.create(**named, extra_body=rest)
            reply = read_reply(self._scrubbed(raw.http_response.text))
        except (TimeoutError, openai.APIConnectionError) as error:
            if type(error.__cause__).__name__ in ("ConnectError", "ConnectTimeout"):
                raise _Unreachable("it cannot be reached") from None
            is_late = isinstance(error, (TimeoutError, openai.APITimeoutError))
            raise self._lost(request, "no answer in time" if is_late else "the connection broke off") from None
        except openai.APIStatusError as error:
            raise self._judged(error, request, said) from None
        except ValueError as error:
            raise self._lost(request, f"an answer that is none: {one_line(str(error))}") from None
        return self._kept(request, reply)

    def _kept(self, request: _Request, reply: dict[str, Any]) -> dict[str, Any]:
        """The reply once it is on disk; raises `RunStopped` for another model's, which is paid for all the same."""
        wrong = self._wrong_model(reply["model"])
        kept = None if wrong else compact(reply, request.echoed, self._dialect.dropped)
        self._book(request, spent_on(reply, request.bound), kept)
        if kept is None:
            raise RunStopped(wrong)
        self._served = reply["model"]
        return kept

    def _book(self, request: _Request, spent: Spent, reply: dict[str, Any] | None) -> None:
        self._spent += spent
        if self._ledger is not None:
            self._ledger.append(request.key, model=self.choices.model, spent=spent, reply=reply)
        elif reply is not None:
            self._remembered[request.key] = reply

    def _lost(self, request: _Request, problem: str) -> _Passing:
        """A request that may have been paid for: booked at its upper bound."""
        self.report.num_lost += 1
        self._book(request, request.bound, None)
        return _Passing(problem)

    def _wrong_model(self, name: str) -> str:
        """Why replies of this name are not those of the model that was asked; empty where they are."""
        asked = self.choices.served_as or self.choices.model
        if not is_version_of(name, asked):
            return (
                f"{self.choices.base_url} answers as {one_line(name)!r}, not {asked!r}; ask for the right model, or "
                "set 'served_as' to that name if it is the one"
            )
        if self._served is not None and name != self._served:
            return (
                f"{self.choices.base_url} answers as {one_line(name)!r} now, as {self._served!r} before; ask for one "
                "of them by its full name, in a new run"
            )
        return ""

    def _judged(self, error: APIStatusError, request: _Request, said: Mapping[str, Any]) -> Exception:
        """What an HTTP error means: wait, this request's fate, or the end for all."""
        status, message = error.status_code, self._scrubbed(_message(error))
        told, wait = f"HTTP {status}: {message}", retry_after(error.response.headers, time.time())
        described = f"{error.code} {error.type} {message}"
        if status in (402, 403, 429) and _BROKE.search(described):
            return RunStopped(f"{self._where} wants to be paid ({told}); add credit, then run the same command")
        if status in (429, 503):
            return _Throttled(told, wait)
        if status in (408, 409, 425) or status >= 500:
            return _Passing(told, wait)
        if status in (400, 422) and self._dialect.learn(message, error.param, said):
            return _Passing(told, 0.0)
        if status in (400, 413, 422) and _OVERLONG.search(described):
            return _Settled("overlong", message)
        if status in (400, 403) and _FILTERED.search(described):
            return _Settled("refused", message)
        if request.is_probe and (status in (400, 422) or "logprob" in message.lower()):
            return _Settled("invalid", message)
        if status in (401, 403):
            variable = self.choices.api_key_env
            remedy = "set 'api_key_env'" if variable is None else f"look at the key in {variable}"
            return RunStopped(f"{self._where} refuses access ({told}); {remedy}, then run the same command")
        if status == 404:
            return RunStopped(f"{self._where} is not there ({told}); look at 'base_url', 'model' and 'api'")
        return RunStopped(f"{self._where} refuses the request ({told}); correct it, then run the same command")

    def _answer(self, reply: dict[str, Any]) -> Answer:
        refused = refusal(reply)
        self._dialect.dropped.update(without(reply))
        self.report.num_refused += bool(refused)
        return Answer("refused" if refused else "ok", reply, refused)

    def _scrubbed(self, text: str) -> str:
        """Text of the server without the key, should it send it back."""
        return text.replace(self._key, "[key]") if self._key else text


@dataclass(frozen=True)
class _Request:
    """What is asked, before it is put as this server wants it; the key is the digest of that."""

    key: str
    body: dict[str, Any]
    bound: Spent
    echoed: str | None = None  # the end of an echoed prompt whose tokens are wanted
    is_probe: bool = False  # the server may refuse it


class _Passing(Exception):
    """A failure that may pass; ``wait`` is what the server asks for, in seconds."""

    def __init__(self, problem: str, wait: float | None = None) -> None:
        super().__init__(problem)
        self.wait = wait


class _Unreachable(_Passing):
    """Nothing is there to connect to."""


class _Throttled(_Passing):
    """The server has too much to do."""


class _Settled(Exception):
    """A failure of one request that stays."""

    def __init__(self, state: State, problem: str) -> None:
        super().__init__(problem)
        self.state = state


class _Call:
    """What lives as long as one call of a verb: client, gate, and a thread with an event loop, so that verbs work where
    one runs already."""

    def __init__(self, client: AsyncOpenAI, gate: Gate) -> None:
        self.client = client
        self.gate = gate
        self.asking: dict[str, asyncio.Future[Answer]] = {}
        self.failures = 0  # in a row
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="iclperm-endpoint", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, list[Answer]]) -> futures.Future[list[Answer]]:
        """Starts work in the loop, from another thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self) -> None:
        """No further request is sent; called from another thread."""
        stopped = RunStopped("the endpoint was stopped; run the same command to continue")
        self._loop.call_soon_threadsafe(self.gate.stop, stopped)

    def close(self) -> None:
        """Ends client, loop and thread."""
        asyncio.run_coroutine_threadsafe(self.client.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Dialect:
    """What this server calls things, and what it does not take, learnt from its refusals."""

    def __init__(self) -> None:
        self.dropped: set[str] = set()
        self._limit = "max_tokens"

    def of(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A request as this server takes it."""
        said = {name: value for name, value in body.items() if name not in self.dropped}
        said[self._limit] = said.pop("max_tokens")
        return said

    def learn(self, message: str, parameter: str | None, said: Mapping[str, Any]) -> bool:
        """Whether a refusal names something that can be put another way; it is from then on."""
        if not _UNSUPPORTED.search(message):
            return False
        for name in ("max_tokens", "temperature", "stop"):
            if name in said and (parameter == name or re.search(rf"\b{name}\b", message)):
                if name == "max_tokens":
                    self._limit = "max_completion_tokens"
                else:
                    self.dropped.add(name)
                return True
        return False


def _text(prompt: Prompt) -> str:
    if not isinstance(prompt, str):
        raise RequestError("messages were given to an endpoint with api: completions; give text, or set api: chat")
    return prompt


def _messages(prompt: Prompt) -> list[dict[str, str]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [{"role": message["role"], "content": message["content"]} for message in prompt]


def _message(error: APIStatusError) -> str:
    body = error.body if isinstance(error.body, Mapping) else {}
    said = next((body[name] for name in ("message", "detail", "error") if body.get(name)), None)
    return one_line(str(said or error.response.text or error.response.reason_phrase))


def _raised(found: Answer | BaseException) -> Answer:
    if isinstance(found, BaseException):
        raise found
    return found
