"""An OpenAI-compatible server of one model: completions with log-probabilities of prompts, ``n`` texts, and chats."""

from __future__ import annotations

import hmac
import json
import math
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from iclperm.engine import Engine
from iclperm.engine.texts import DEFAULT_MAX_NEW_TOKENS, EOS, STOP
from iclperm.errors import ConfigError, IclpermError, RequestError
from iclperm.integrations.completions import Completer, Completion, CompletionRequest, TokenNumbers, Waiting
from iclperm.study.sizes import Budget

_MOST_BYTES = 1 << 24
_PART_OF_A_LETTER = "\ufffd"
_MOST_TEXTS = 1024  # of one request
_MOST_LISTED = 20

_PROMPTS = "give text, a list of texts, token ids or lists of token ids"
_WORDS = {"extra_forbidden": "not served; leave it out", "json_invalid": "not JSON"}  # in place of pydantic's

_Stop = Annotated[str, Field(min_length=1)]
_Id = Annotated[int, Field(ge=0)]


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class _Choices(BaseModel):
    """What both kinds of request have in common. What is not served is taken where it changes nothing."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    n: int = Field(1, ge=1, le=128)
    stop: _Stop | list[_Stop] | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stream: bool = False
    stream_options: _StreamOptions | None = None
    presence_penalty: Literal[0, None] = None
    frequency_penalty: Literal[0, None] = None
    logit_bias: dict[str, float] | None = Field(None, max_length=0)
    user: str | None = None

    def asked(
        self, prompts: Sequence[Any], texts: list[str], max_tokens: int, top: int | None, *, is_echo: bool
    ) -> CompletionRequest:
        """The same for the engine; without a seed texts are others each time."""
        stop = self.stop or ()
        return CompletionRequest(
            list(prompts),
            texts,
            max_tokens,
            (stop,) if isinstance(stop, str) else tuple(stop),
            self.temperature,
            self.top_p,
            secrets.randbits(62) if self.seed is None else self.seed,
            self.n,
            is_echo,
            top,
        )


class _CompletionBody(_Choices):
    prompt: str | list[str] | list[_Id] | list[list[_Id]]
    max_tokens: int = Field(16, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=_MOST_LISTED)
    best_of: Literal[1, None] = None
    suffix: None = None

    @property
    def prompts(self) -> list[Any]:
        """One or several, as text or as token ids."""
        given = self.prompt
        return [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else [*given]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: str
    content: str


class _ChatBody(_Choices):
    messages: list[_Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=_MOST_LISTED)


_Given = TypeVar("_Given", bound=_Choices)


class _Refused(Exception):
    """A request that is not answered: status, what is wrong, and the field."""

    def __init__(self, status: int, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.field, self.code = status, field, code


class _Api:
    """The routes of one model."""

    def __init__(self, engine: Engine, name: str, key: str | None, memory_budget: Budget | None) -> None:
        self._completer, self._name, self._key = Completer(engine, memory_budget), name, key
        self._waiting = Waiting(self._completer.answers)
        self._since = int(time.time())

    def application(self) -> Starlette:
        posted = {"completions": self._complete} | (
            {"chat/completions": self._chat if self._completer.has_chat else self._no_chat}
        )
        routes = [Route("/v1/models", self._answering(self._models))]
        routes += [Route(f"/v1/{path}", self._answering(answer), methods=["POST"]) for path, answer in posted.items()]
        return Starlette(routes=routes, exception_handlers={HTTPException: _http_error, Exception: _failed})

    def _answering(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """The route of an answer, or of the refusal in OpenAI's words."""

        async def route(request: Request) -> Response:
            try:
                self._refuse_strangers(request)
                return await answer(request)
            except _Refused as refused:
                return _error(refused.status, str(refused), refused.field, refused.code)
            except RequestError as error:
                return _error(400, str(error))
            except IclpermError as error:
                return _error(500, str(error))

        return route

    def _refuse_strangers(self, request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._key is not None and not hmac.compare_digest(given.encode(), self._key.encode()):
            raise _Refused(
                401, "the key is missing or is another; send it as Authorization: Bearer KEY", code="invalid_api_key"
            )

    async def _models(self, request: Request) -> Response:
        about = {"id": self._name, "object": "model", "created": self._since, "owned_by": "iclperm"}
        return JSONResponse({"object": "list", "data": [about]})

    async def _complete(self, request: Request) -> Response:
        given = await self._read(request, _CompletionBody)
        try:
            prompts = self._completer.encoded(given.prompts)
        except RequestError as error:
            raise _Refused(400, str(error), "prompt") from None
        self._refuse_long(prompts, given.max_tokens, "prompt", given.n)
        texts = [each if isinstance(each, str) else self._completer.read(each) for each in given.prompts]
        found = await self._waiting.answer(
            given.asked(prompts, texts, given.max_tokens, given.logprobs, is_echo=given.echo)
        )
        begins = [0 if given.echo else len(text) for text in texts for _ in range(given.n)]
        choices = [
            {
                "index": place,
                "text": each.text,
                "logprobs": _of_completion(each.numbers, each.text, begins[place]),
                "finish_reason": _finish(each),
            }
            for place, each in enumerate(found)
        ]
        return self._reply(given, "text_completion", "cmpl", choices, sum(map(len, prompts)), found)

    async def _chat(self, request: Request) -> Response:
        given = await self._read(request, _ChatBody)
        try:
            prompt = self._completer.conversation([message.model_dump() for message in given.messages])
        except RequestError as error:
            raise _Refused(400, str(error), "messages") from None
        room = max(1, self._completer.max_tokens + 1 - prompt.size)
        most = given.max_completion_tokens or given.max_tokens or min(DEFAULT_MAX_NEW_TOKENS, room)
        self._refuse_long([prompt], most, "messages", given.n)
        top = (given.top_logprobs or 0) if given.logprobs else None
        found = await self._waiting.answer(given.asked([prompt], [""], most, top, is_echo=False))
        choices = [
            {
                "index": place,
                "message": {"role": "assistant", "content": each.text},
                "logprobs": _of_chat(each.numbers),
                "finish_reason": _finish(each),
            }
            for place, each in enumerate(found)
        ]
        return self._reply(given, "chat.completion", "chatcmpl", choices, prompt.size, found)

    async def _no_chat(self, request: Request) -> Response:
        raise _Refused(404, f"the tokenizer of {self._name} has no chat template; ask /v1/completions")

    async def _read(self, request: Request, kind: type[_Given]) -> _Given:
        """The request, checked; raises `_Refused` naming the field."""
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise _Refused(415, "send JSON, as content-type: application/json")  # no page of another site can
        raw = bytearray()
        async for piece in request.stream():
            raw += piece
            if len(raw) > _MOST_BYTES:
                raise _Refused(413, f"the request has more than {_MOST_BYTES:,} bytes; send fewer prompts at once")
        try:
            given = kind.model_validate_json(bytes(raw))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            field = str(first["loc"][0]) if first["loc"] else None
            why = _PROMPTS if field == "prompt" else _WORDS.get(first["type"], first["msg"])
            raise _Refused(400, f"{field or 'the body'}: {why}", field) from None
        if given.model != self._name:
            raise _Refused(
                404, f"the model {given.model!r} is not served here; it is {self._name!r}", "model", "model_not_found"
            )
        return given

    def _refuse_long(self, prompts: Sequence[Any], most: int, field: str, n: int) -> None:
        if not prompts or len(prompts) * n > _MOST_TEXTS:
            raise _Refused(400, f"{len(prompts)} prompts with n = {n} are none or over {_MOST_TEXTS} texts", field)
        longest = max(map(len, prompts))
        if longest + max(most, 1) - 1 > self._completer.max_tokens:
            raise _Refused(
                400,
                f"a prompt of {longest} tokens with {most} new ones is over the context window of "
                f"{self._completer.max_tokens}",
                field,
                "context_length_exceeded",
            )

    def _reply(
        self,
        given: _Choices,
        kind: str,
        prefix: str,
        choices: list[dict[str, Any]],
        num_prompt: int,
        found: Sequence[Completion],
    ) -> Response:
        new = sum(each.num_tokens for each in found)
        usage = {"prompt_tokens": int(num_prompt), "completion_tokens": new, "total_tokens": int(num_prompt) + new}
        about = {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time())}
        about["model"] = self._name
        if not given.stream:
            return JSONResponse({**about, "choices": choices, "usage": usage})
        # A batch is answered as a whole: each text is one event.
        events: list[dict[str, Any]] = [{**about, "choices": [choice]} for choice in choices]
        if given.stream_options is not None and given.stream_options.include_usage:
            events = [*({**event, "usage": None} for event in events), {**about, "choices": [], "usage": usage}]
        if kind == "chat.completion":
            for event in events:
                event["object"] = f"{kind}.chunk"
            for choice in choices:
                choice["delta"] = choice.pop("message")
        lines = [f"data: {line}\n\n" for line in (*map(json.dumps, events), "[DONE]")]
        return Response("".join(lines), media_type="text/event-stream")


def _finish(text: Completion) -> str:
    return "stop" if text.finish in (STOP, EOS) else "length"


def _of_completion(numbers: TokenNumbers | None, text: str, begin: int) -> dict[str, Any] | None:
    """Tokens, and where each begins in the prompt and the text after it, of which ``text`` is the part from letter
    ``begin`` on."""
    if numbers is None:
        return None
    offsets = [begin + at for at in letters(numbers.tokens, text)]
    values = [None if math.isnan(value) else value for value in numbers.logprobs.tolist()]
    top = [_by_text(each) or None for each in numbers.top]
    return {"tokens": numbers.tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


def letters(tokens: Sequence[str], text: str) -> list[int]:
    """The letter of ``text`` at which each of its tokens begins, as they read.

    A special token, which the text leaves out, has no letter of its own, nor have the bytes of a letter that several
    tokens make up (each reads as U+FFFD): both are at that of what follows.
    """
    at, pending, found = 0, 0, []
    for token in tokens:
        if _PART_OF_A_LETTER in token:
            pending += len(token)
            found.append(at)
            continue
        place = text.find(token, at, at + pending + len(token))
        if place >= 0:
            at, pending = place, 0
        found.append(at)
        at += len(token) if place >= 0 else 0
    return found


def _by_text(listed: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Of tokens that read alike the likeliest, which comes first."""
    found: dict[str, float] = {}
    for token, value in listed:
        found.setdefault(token, value)
    return found


def _of_chat(numbers: TokenNumbers | None) -> dict[str, Any] | None:
    if numbers is None:
        return None

    def entry(token: str, logprob: float) -> dict[str, Any]:
        return {"token": token, "logprob": logprob, "bytes": list(token.encode())}

    entries = zip(numbers.tokens, numbers.logprobs.tolist(), numbers.top, strict=True)
    return {
        "content": [
            {**entry(token, value), "top_logprobs": [entry(*each) for each in top]} for token, value, top in entries
        ]
    }


def _error(status: int, message: str, field: str | None = None, code: str | None = None) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": field, "code": code}}, status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, f"{request.method} {request.url.path}: {error.detail}")


async def _failed(request: Request, error: Exception) -> Response:
    return _error(500, f"{type(error).__name__}; the server's own output has more")


def application(engine: Engine, name: str, key: str | None = None, memory_budget: Budget | None = None) -> Starlette:
    """The server of an engine, as an ASGI application: the model is called ``name``, and a ``key`` is asked for.

    ``memory_budget`` is that of `Engine.session`.
    """
    return _Api(engine, name, key, memory_budget).application()


def serve(
    model: str,
    host: str,
    port: int,
    key: str | None,
    said: Callable[[str], None],
    memory_budget: str | None = None,
    **options: str | None,
) -> None:
    """Serves ``model`` (`demo`, a folder, a GGUF file or a hub id) until Ctrl-C; ``said`` is told where, once it is
    loaded.

    ``memory_budget`` is that of `Engine.session`, ``options`` are those of `Engine.from_pretrained`. Raises
    `ConfigError` for an address that cannot be had, and what loading a model raises.
    """
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(f"{host}:{port} cannot be served: {error.strerror or error}; give another --port") from None
    with listening:
        given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        name = Path(model).name if Path(model).exists() else model
        with Engine.from_pretrained(model, **given) as engine:
            server = uvicorn.Server(
                uvicorn.Config(application(engine, name, key, memory_budget), log_level="warning", lifespan="off")
            )
            shown = f"[{host}]" if ":" in host else host
            said(f"http://{shown}:{listening.getsockname()[1]}/v1 serves {name}; Ctrl-C ends it")
            with suppress(KeyboardInterrupt):  # which the server passes on when it has ended
                server.run(sockets=[listening])
