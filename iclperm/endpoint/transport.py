"""Attempts: each request until it is answered, hopeless or over its deadline; the one place where requests are retried.

Requests go out group by group: those of a group share a context, and the first is answered before the others are sent,
so that they find it in the provider's prompt cache. Every paid reply is in the ledger before it is used.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from iclperm.endpoint.dialect import Dialect
from iclperm.endpoint.gate import Gate, Pace, Watch, Window, retry_after
from iclperm.endpoint.ledger import Ledger
from iclperm.endpoint.replies import (
    RequestResult,
    State,
    compact,
    is_version_of,
    one_line,
    read_refusal,
    read_reply,
    refusal,
    refuse_numberless,
    spent_on,
    without,
)
from iclperm.endpoint.secret import KeyCutter
from iclperm.endpoint.wire import LEAST_BODY, LOCATION, MOST_BYTES, client_of, logged_without, proxies
from iclperm.errors import RequestError, RunStopped
from iclperm.study.endpoint import EndpointChoices, Spent, read_key

if TYPE_CHECKING:
    from openai import APIStatusError, AsyncOpenAI

_ATTEMPTS_TO_REACH = 4  # a server that has answered nothing yet; some seconds
_LEAST_WAIT = 1.0  # seconds, whatever a server says
_FAILURES_IN_A_ROW = 5  # requests that end unanswered with no reply in between: then it is the endpoint, not they
_OVERLONG = re.compile(
    r"context.?(length|window|size)|exceeds? .{0,40}context|too many (input )?tokens|prompt is too long|"
    r"input token count .{0,40}exceeds|inputs\W{0,3}tokens \+ .{0,40}must be <=",
    re.I,
)
_FILTERED = re.compile(r"content.?(filter|policy|management)|ResponsibleAI|safety system|input was flagged", re.I)
_BODY_PER_TOKEN, _MOST_BODY = 1 << 10, 1 << 26  # bytes of a reply that are read
_BROKE = re.compile(r"insufficient.?(quota|balance|credit|fund)", re.I)  # others speak of quotas a minute, too


@dataclass(frozen=True)
class Request:
    """One request to be sent: ``key`` is the digest of ``body``, which is put in this server's own terms only later.

    ``bound`` is the most that it can cost. ``echoed`` is the end of an echoed prompt whose tokens are wanted.
    ``grants`` is given for one that asks what the server gives, and tells that of a result; a server may refuse such a
    request without any harm to others.
    """

    key: str
    body: dict[str, Any]
    bound: Spent
    echoed: str | None = None
    grants: Callable[[RequestResult], int] | None = None

    @property
    def is_probe(self) -> bool:
        """Whether it asks what the server gives."""
        return self.grants is not None


@dataclass
class Usage:
    """What a call cost.

    ``spent`` also counts, at its upper bound, what may have been paid for but did not arrive: ``num_lost`` requests.
    ``num_reused`` replies came out of the ledger, ``num_retries`` attempts were repeated, ``num_refused`` prompts the
    model would not answer, and ``num_missing`` requests have no answer. ``seconds`` are of wall time; ``cost`` is None
    without prices.
    """

    spent: Spent = field(default_factory=Spent)
    num_reused: int = 0
    num_retries: int = 0
    num_lost: int = 0
    num_refused: int = 0
    num_missing: int = 0
    seconds: float = 0.0
    cost: float | None = None

    def add(self, other: Usage) -> None:
        """Adds what another call cost."""
        for each in fields(self):
            mine, its = getattr(self, each.name), getattr(other, each.name)
            setattr(self, each.name, its if mine is None else mine if its is None else mine + its)


class Transport:
    """Sends the requests of one endpoint, and knows what they cost; one call at a time.

    ``report`` is the last call's usage (or the open one's, without its sums), ``totals`` that of all. ``paid`` is what
    this object has spent so far, also in a call that is still open; ``lost`` is what of it brought no reply, at most.
    ``served`` is the name that the replies bear that were received or reused here, None before the first. ``where``
    names model and server in messages.
    """

    def __init__(self, choices: EndpointChoices, ledger: Ledger | None, pace: Pace) -> None:
        self.choices = choices
        self.where = f"{choices.model} at {choices.base_url}"
        self.report = Usage()
        self.totals = Usage()
        self.paid = Spent()
        self.lost = Spent()
        self.served: str | None = None
        self._key = read_key(choices.api_key_env)
        self._cut = KeyCutter(self._key).cut
        self._ledger = ledger
        self._pace = pace
        self._remembered: dict[str, dict[str, Any]] = {}  # without a ledger
        self._dialect = Dialect()
        self._window = Window(choices.concurrency)
        self._is_busy = False

    @property
    def spent(self) -> Spent:
        """What of the budget has been spent so far: by all sessions of the ledger, or by this object without one."""
        return self.paid if self._ledger is None else self._ledger.spent

    def sends(self, parameter: str) -> bool:
        """Whether a parameter is sent: not once the server has refused it, also in an earlier session."""
        return parameter not in self._dialect.dropped

    def results(self, groups: Iterable[list[Request]]) -> Iterator[list[RequestResult]]:
        """The results of each group, in order; requests go on while the caller works on what it has.

        ``groups`` may be lazy: one more is taken ahead than requests may be out at once. Raises `RunStopped` where the
        run as a whole cannot go on, once what is in flight is on disk.
        """
        with self._call() as call:
            waiting: deque[futures.Future[list[RequestResult]]] = deque()
            ahead = enumerate(groups)
            try:
                while True:
                    while len(waiting) <= self.choices.concurrency and (each := next(ahead, None)) is not None:
                        waiting.append(call.submit(self._ask_group(call, *each)))
                    if not waiting:
                        return
                    results = waiting[0].result()
                    waiting.popleft()
                    yield results
            finally:
                call.stop()
                futures.wait(waiting)  # what is in flight is paid for: it has to reach the disk

    @contextmanager
    def _call(self) -> Iterator[_Call]:
        if self._is_busy:
            raise RequestError("an endpoint serves one call at a time; finish the other, or make another endpoint")
        started, before = time.perf_counter(), self.paid
        report = self.report = Usage()
        gate = Gate(self._window, lambda reserved: self.choices.overspent(self.spent + reserved))
        call = _Call(client_of(self.choices, self._key, self.where), gate, _Intents(self._ledger, self.choices))
        self._is_busy = True
        try:
            with logged_without(self._cut):
                yield call
        finally:
            call.close()
            self._is_busy = False
            report.seconds = time.perf_counter() - started
            report.spent = self.paid - before
            report.cost = None if self.choices.prices is None else self.choices.prices.cost(report.spent)
            self.totals.add(report)

    async def _ask_group(self, call: _Call, rank: int, requests: list[Request]) -> list[RequestResult]:
        """The first that has to be paid for goes alone: the others then find its prefix in the provider's cache."""
        known = [self._known(request) for request in requests]
        missing = [request for request, result in zip(requests, known, strict=True) if result is None]
        found: list[RequestResult | BaseException] = [await self._ask(call, rank, missing[0])] if missing else []
        found += await asyncio.gather(
            *(self._ask(call, rank, request) for request in missing[1:]), return_exceptions=True
        )
        rest = iter(found)
        return [_raised(next(rest)) if result is None else result for result in known]

    def _known(self, request: Request) -> RequestResult | None:
        reply = self._remembered.get(request.key) if self._ledger is None else self._ledger.lookup(request.key)
        if reply is None or not is_version_of(reply["model"], self._wanted):  # no session here has kept such a one
            return None
        if request.grants is not None and not (refusal(reply) == "" and request.grants(RequestResult("ok", reply, ""))):
            return None  # what a server lacked, once left out or would not answer, it may have now
        if self.served not in (None, reply["model"]):
            raise RunStopped(
                f"replies of {self.where} that are kept in this run are of {one_line(str(self.served))!r} and of "
                f"{one_line(reply['model'])!r}; ask for one of them by its full name, in a new run"
            )
        self.served = reply["model"]
        self.report.num_reused += 1
        return self._result(reply)

    async def _ask(self, call: _Call, rank: int, request: Request) -> RequestResult:
        """One request, sent once however often it is asked at the same time."""
        if request.key not in call.asking:
            if (known := self._known(request)) is not None:
                return known
            call.asking[request.key] = asyncio.ensure_future(self._pay(call, rank, request))
            call.asking[request.key].add_done_callback(lambda _: call.asking.pop(request.key))
        return await call.asking[request.key]

    async def _pay(self, call: _Call, rank: int, request: Request) -> RequestResult:
        """Attempt after attempt, until the request is answered, hopeless or over its deadline."""
        watch, attempts = Watch(self.choices.deadline_s), 0
        while True:
            try:
                result = await self._attempt(call, rank, request, watch)
            except _Settled as problem:
                self.report.num_refused += problem.state == "refused"
                return RequestResult(problem.state, None, str(problem))
            except _Passing as problem:
                attempts += 1
                seconds = self._pace.wait(attempts)
                if problem.wait is not None:  # "at once" would be asked without end
                    seconds = max(problem.wait, min(seconds, _LEAST_WAIT))
                is_hopeless = self._was_never_there(problem) and attempts >= _ATTEMPTS_TO_REACH
                if is_hopeless or not watch.has_time_for(seconds + self.choices.timeout_s):
                    return self._missing(call, problem)
                self.report.num_retries += 1
                await call.gate.rest(seconds)
            else:
                call.failures = 0
                return result

    def _was_never_there(self, problem: _Passing) -> bool:
        """Whether a server that has not answered anything yet cannot be reached."""
        return isinstance(problem, _Unreachable) and not self.paid.requests

    def _missing(self, call: _Call, problem: _Passing) -> RequestResult:
        """A request without an answer; raises `RunStopped` where others would not get one, either."""
        call.failures += 1
        if self._was_never_there(problem):
            proxy = "".join(f", at the proxy that {name} names" for name in proxies(self.choices.base_url))
            error = RunStopped(
                f"{self.where} cannot be reached; look at 'base_url'{proxy} and whether the server is there, then run "
                "the same command to continue"
            )
        elif isinstance(problem, _Throttled):
            after = "later" if problem.wait is None else f"in {problem.wait:.0f} s"
            error = RunStopped(f"{self.where} takes no more now ({problem}); run the same command {after} to continue")
        elif call.failures >= _FAILURES_IN_A_ROW:
            error = RunStopped(
                f"{self.where} left {call.failures} requests in a row without an answer ({problem}); look after it, "
                "then run the same command to continue"
            )
        else:
            self.report.num_missing += 1
            return RequestResult("api_missing", None, str(problem))
        call.gate.stop(error)
        raise error

    async def _attempt(self, call: _Call, rank: int, request: Request, watch: Watch) -> RequestResult:
        came = time.monotonic()
        ticket = await call.gate.enter(rank, request.bound)
        watch.add(time.monotonic() - came)
        try:
            if self._ledger is not None:
                self._ledger.refuse_full_disk()
            booking = _Booking(self, request, await call.intents.put(request))
            try:
                reply = await self._send(call.client, request, booking)
            finally:
                booking.close()
            self._window.grow()
            return self._result(reply)
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

    async def _send(self, client: AsyncOpenAI, request: Request, booking: _Booking) -> dict[str, Any]:
        """One reply, on disk; raises `_Passing`, `_Settled` or `RunStopped`."""
        import openai

        body = self._dialect.of(request.body)
        named = {name: body[name] for name in ("model", "messages", "prompt") if name in body}
        rest = {name: value for name, value in body.items() if name not in named}
        verb: Any = client.chat.completions if self.choices.api == "chat" else client.completions
        try:
            async with asyncio.timeout(self.choices.timeout_s):
                MOST_BYTES.set(_most_bytes(request))
                raw = await verb.with_raw_response.create(**named, extra_body=rest)
            reply = read_reply(raw.http_response.content, self._cut)
            if request.is_probe:
                refuse_numberless(reply)
        except openai.APIStatusError as error:
            failure = self._judged(error, request, body, booking)
        except (TimeoutError, openai.APIConnectionError, ValueError) as error:
            failure = self._lost(error, booking)
        else:
            return self._kept(request, reply, booking)
        raise failure  # only here: what a server said would else stay in its context, the key among it

    def _kept(self, request: Request, reply: dict[str, Any], booking: _Booking) -> dict[str, Any]:
        """The reply once it is on disk; raises `RunStopped` for another model's, which is paid for all the same."""
        wrong = self._wrong_model(reply["model"])
        kept = None if wrong else compact(reply, request.echoed, self._dialect.dropped, request.body.get("prompt", ""))
        booking.settle(spent_on(reply, request.bound), kept)
        if kept is None:
            raise RunStopped(wrong)
        self.served = reply["model"]
        return kept

    def book(self, request: Request, spent: Spent, reply: dict[str, Any] | None, intent: str | None) -> None:
        """Takes down what a request has cost, on disk where there is a ledger, with the reply if there is one."""
        self.paid += spent
        if self._ledger is not None:
            self._ledger.append(request.key, model=self.choices.model, spent=spent, reply=reply, settles=intent)
        elif reply is not None:
            self._remembered[request.key] = reply

    def _lost(self, error: Exception, booking: _Booking) -> Exception:
        """What became of a request without an answer; where it may have been paid for, its booking stays as it is."""
        import openai

        cause = error.__cause__ if isinstance(error, openai.APIConnectionError) else error
        if isinstance(cause, RunStopped):
            return RunStopped(str(cause))
        if type(cause).__name__ in ("ConnectError", "ConnectTimeout"):
            booking.settle(Spent(), None)
            return _Unreachable("it cannot be reached")
        if isinstance(error, (TimeoutError, openai.APITimeoutError)):
            return _Passing("no answer in time")
        if isinstance(cause, ValueError):
            return _Passing(f"an answer that is none: {one_line(self._cut(str(cause)))}")
        return _Passing("the connection broke off")

    def _wrong_model(self, name: str) -> str:
        """Why replies of this name are not those of the model that was asked; empty where they are."""
        if not is_version_of(name, self._wanted):
            return (
                f"{self.choices.base_url} answers as {one_line(name)!r}, not {self._wanted!r}; ask for the right "
                "model, or set 'served_as' to that name if it is the one"
            )
        if other := self._other_name(name):
            return (
                f"{self.choices.base_url} answers as {one_line(name)!r} now, and replies that are kept in this run are "
                f"of {one_line(other)!r}; ask for one of them by its full name, in a new run"
            )
        return ""

    @property
    def _wanted(self) -> str:
        return self.choices.served_as or self.choices.model

    def _other_name(self, name: str) -> str:
        """Another name of the model that replies bear which this run has used or keeps; empty where there is none."""
        kept = {} if self._ledger is None else self._ledger.names.get(self.choices.model, {})
        others = {*kept, self.served or name} - {name}
        return min((other for other in others if is_version_of(other, self._wanted)), default="")

    def _judged(self, error: APIStatusError, request: Request, body: Mapping[str, Any], booking: _Booking) -> Exception:
        """What an HTTP error means: wait, this request's fate, or the end for all. What is refused costs nothing."""
        status, headers = error.status_code, error.response.headers
        if status < 400:
            to = one_line(self._cut(headers.get(LOCATION, "")))
            where = f" on to {to!r}" if to else " away"
            return RunStopped(
                f"{self.where} sends{where} (HTTP {status}), and no request follows; set 'base_url' to the right place"
            )
        booking.settle(Spent(), None)
        message, param, described = read_refusal(error.response.content, "no reason given", self._cut)
        shown, wait = f"HTTP {status}: {message}", retry_after(headers, time.time())
        if status == 402 or (status in (403, 429) and _BROKE.search(described)):
            return RunStopped(f"{self.where} wants to be paid ({shown}); add credit, then run the same command")
        if status in (429, 503):
            return _Throttled(shown, wait)
        if status in (408, 409, 425) or status >= 500:
            return _Passing(shown, wait)
        if status in (400, 422) and self._dialect.learn(message, param, body):
            return _Passing(shown, 0.0)
        if status in (400, 413, 422) and _OVERLONG.search(described):
            return _Settled("overlong", message)
        if status in (400, 403) and _FILTERED.search(described):
            return _Settled("refused", message)
        if request.is_probe and (status in (400, 422) or "logprob" in message.lower()):
            return _Settled("invalid", message)
        if status in (401, 403):
            variable = self.choices.api_key_env
            remedy = "set 'api_key_env'" if variable is None else f"look at the key in {variable}"
            return RunStopped(f"{self.where} refuses access ({shown}); {remedy}, then run the same command")
        if status == 404:
            return RunStopped(f"{self.where} is not there ({shown}); look at 'base_url', 'model' and 'api'")
        return RunStopped(f"{self.where} refuses the request ({shown}); correct it, then run the same command")

    def _result(self, reply: dict[str, Any]) -> RequestResult:
        refused = refusal(reply)
        self._dialect.dropped.update(without(reply))
        self.report.num_refused += bool(refused)
        return RequestResult("refused" if refused else "ok", reply, refused)


class _Booking:
    """What is to be booked for one request that is sent: its upper bound, unless it turns out what it cost."""

    def __init__(self, transport: Transport, request: Request, intent: str | None) -> None:
        self._transport = transport
        self._request = request
        self._intent = intent
        self._is_open = True

    def settle(self, spent: Spent, reply: dict[str, Any] | None) -> None:
        """Books what the request cost and the reply that it brought; where the disk refuses them the intent counts."""
        self._is_open = False
        self._transport.book(self._request, spent, reply, self._intent)

    def close(self) -> None:
        """Books the bound of a request that may have been paid for and brought nothing; nothing after `settle`."""
        if self._is_open:
            self._transport.report.num_lost += 1
            self._transport.lost += self._request.bound
            self.settle(self._request.bound, None)


class _Intents:
    """Puts on disk which requests are about to be sent; those that are admitted together with one sync."""

    def __init__(self, ledger: Ledger | None, choices: EndpointChoices) -> None:
        self._ledger = ledger
        self._choices = choices
        self._waiting: list[tuple[Request, asyncio.Future[str]]] = []

    async def put(self, request: Request) -> str | None:
        """Returns what settles the intent, once it is on disk; None without a ledger."""
        if self._ledger is None:
            return None
        loop = asyncio.get_running_loop()
        written: asyncio.Future[str] = loop.create_future()
        self._waiting.append((request, written))
        if len(self._waiting) == 1:
            loop.call_soon(self._write, self._ledger)
        return await written

    def _write(self, ledger: Ledger) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            names = ledger.intend([(request.key, request.bound) for request, _ in waiting], model=self._choices.model)
            if problem := self._choices.overspent(ledger.spent_at_most()):  # by what others have on their way by now
                for (request, _), name in zip(waiting, names, strict=True):
                    ledger.append(request.key, model=self._choices.model, spent=Spent(), reply=None, settles=name)
                raise RunStopped(problem)
        except Exception as error:  # of each that waits for it
            for _, written in waiting:
                if not written.done():
                    written.set_exception(error)
            return
        for (_, written), name in zip(waiting, names, strict=True):
            if not written.done():  # cancelled: it is not sent, and counts as what may have been
                written.set_result(name)


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

    def __init__(self, client: AsyncOpenAI, gate: Gate, intents: _Intents) -> None:
        self.client = client
        self.gate = gate
        self.intents = intents
        self.asking: dict[str, asyncio.Future[RequestResult]] = {}
        self.failures = 0  # in a row
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="iclperm-endpoint", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, list[RequestResult]]) -> futures.Future[list[RequestResult]]:
        """Starts work in the loop, from another thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self) -> None:
        """No further request is sent; called from another thread."""
        stopped = RunStopped("the endpoint was stopped; run the same command to continue")
        self._loop.call_soon_threadsafe(self.gate.stop, stopped)

    def close(self) -> None:
        """Ends client, loop and thread, and what who interrupts a second time does not wait for: that is lost."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        await self.client.close()
        unfinished = asyncio.all_tasks() - {asyncio.current_task()}
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)


def _most_bytes(request: Request) -> int:
    """How long a reply may be: what its tokens take with their log-probabilities, those of an echoed prompt too."""
    tokens = request.bound.completion_tokens + (request.bound.prompt_tokens if request.echoed is not None else 0)
    return min(LEAST_BODY + _BODY_PER_TOKEN * tokens, _MOST_BODY)


def _raised(found: RequestResult | BaseException) -> RequestResult:
    if isinstance(found, BaseException):
        raise found
    return found
