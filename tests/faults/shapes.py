"""Replies that no server should send: what each does to a whole one, and whether the answer in it is still the same."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from faults.world import SENTINEL

Content = dict[str, Any]
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
ESCAPES = "\x1b[2J\x1b]0;owned\x07\u202e"


@dataclass(frozen=True)
class Shape:
    """``make`` gives the bytes of a whole HTTP response, piece by piece, from the body of a whole reply; with None in
    between the server waits. ``is_same``: once the same command has been repeated, the answers are the honest ones.
    ``is_charged``: a provider may ask money for it."""

    make: Callable[[bytes], Iterator[bytes | None]]
    is_same: bool = True
    is_charged: bool = True


def _sent(body: bytes, head: bytes = OK, length: int | None = None) -> Iterator[bytes | None]:
    yield head + f"Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


def _http(change: Callable[[bytes], Iterator[bytes | None]]) -> Shape:
    return Shape(change)


def _pieces(*pieces: bytes | None) -> Shape:
    return Shape(lambda raw: iter(pieces))


def _body(change: Callable[[bytes], bytes], *, is_same: bool = True) -> Shape:
    return Shape(lambda raw: _sent(change(raw)), is_same)


def _json(change: Callable[[Content], Any], *, is_same: bool = True) -> Shape:
    return _body(lambda raw: json.dumps(change(json.loads(raw))).encode(), is_same=is_same)


def _with(**values: Any) -> Shape:
    return _json(lambda content: {**content, **values})


def _usage(**values: Any) -> Shape:
    return _json(lambda content: {**content, "usage": {**content["usage"], **values}})


def _choice(*, is_same: bool = True, **values: Any) -> Shape:
    return _json(lambda content: {**content, "choices": [{**content["choices"][0], **values}]}, is_same=is_same)


def _text(value: Any) -> Shape:
    def change(content: Content) -> Content:
        choice = dict(content["choices"][0])
        if "message" in choice:
            choice["message"] = {"role": "assistant", "content": value}
        else:
            choice["text"] = value
        return {**content, "choices": [choice]}

    return _json(change, is_same=isinstance(value, int))  # which is no text, unlike a list of parts or null


def _logprobs(change: Callable[[Content], Any]) -> Shape:
    def changed(content: Content) -> Content:
        choice = dict(content["choices"][0])
        choice["logprobs"] = change(dict(choice.get("logprobs") or {}))
        return {**content, "choices": [choice]}

    return _json(changed, is_same=False)


def _numbers(value: float) -> Shape:
    return _logprobs(lambda found: {**found, "token_logprobs": [value] * len(found.get("tokens") or [])})


def _status(code: int, body: Any = None, head: str = "") -> Shape:
    raw = json.dumps({"error": {"message": f"refused with {code}"}} if body is None else body).encode()
    first = f"HTTP/1.1 {code} So\r\nContent-Type: application/json\r\n{head}".encode()
    return Shape(lambda _: _sent(raw, first), is_charged=False)


def _dripped(raw: bytes) -> Iterator[bytes | None]:
    yield OK + f"Content-Length: {len(raw)}\r\n\r\n".encode()
    for at in range(len(raw)):
        yield None
        yield raw[at : at + 1]


def _endless(raw: bytes) -> Iterator[bytes | None]:
    yield OK + b"Transfer-Encoding: chunked\r\n\r\n"
    for _ in range(20_000):
        yield b"10000\r\n" + b" " * 65536 + b"\r\n"


def _chunked(raw: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return OK + b"Transfer-Encoding: chunked\r\n\r\n" + f"{len(raw):x}\r\n".encode() + raw + b"\r\n" + end


_ENCODED = OK + b"Content-Encoding: %s\r\n"
_BOMB = gzip.compress(gzip.compress(b" " * (1 << 28)))

_STATUSES = (204, 400, 401, 402, 403, 404, 408, 409, 413, 418, 422, 429, 500, 502, 503, 504, 529, 599)
SHAPES: dict[str, Shape] = {
    # the connection
    "nothing at all": _pieces(),
    "silence": _pieces(*[None] * 200),
    "half a head": _pieces(b"HTTP/1.1 200 OK\r\nContent-Le"),
    "half a body": _http(lambda raw: _sent(raw[: len(raw) // 2], length=len(raw))),
    "a body that is longer than said": _http(lambda raw: _sent(raw, length=len(raw) // 2)),
    "a body of unknown length": _http(lambda raw: iter([OK + b"Connection: close\r\n\r\n" + raw])),
    "chunks": _http(lambda raw: iter([_chunked(raw)])),
    "chunks without an end": _http(lambda raw: iter([_chunked(raw, b"")])),
    "a chunk of a wrong size": _http(lambda raw: iter([OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + raw])),
    "two lengths": _http(lambda raw: _sent(raw, OK + b"Content-Length: 7\r\n")),
    "a negative length": _http(lambda raw: _sent(raw, length=-1)),
    "dripping": _http(_dripped),
    "endless": _http(_endless),
    "no HTTP": _pieces(b"220 mail.example.com ESMTP\r\n"),
    "a status that is no number": _pieces(b"HTTP/1.1 abc OK\r\n\r\n"),
    "HTTP/1.0": _http(lambda raw: _sent(raw, OK.replace(b"1.1", b"1.0"))),
    "a continue first": _http(lambda raw: iter([b"HTTP/1.1 100 Continue\r\n\r\n", *_sent(raw)])),
    "a huge header": _http(lambda raw: _sent(raw, OK + b"X: " + b"x" * (1 << 20) + b"\r\n")),
    "many headers": _http(lambda raw: _sent(raw, OK + b"X: y\r\n" * 20_000)),
    "gzip": _http(lambda raw: _sent(gzip.compress(raw), _ENCODED % b"gzip")),
    "gzip that is none": _http(lambda raw: _sent(raw, _ENCODED % b"gzip")),
    "an unknown encoding": _http(lambda raw: _sent(raw, _ENCODED % b"brrr")),
    "a bomb": _http(lambda raw: _sent(_BOMB, _ENCODED % b"gzip, gzip")),
    # statuses
    **{f"status {code}": _status(code) for code in _STATUSES},
    "429 that waits for ever": _status(429, head="Retry-After: 1e308\r\n"),
    "429 that waits for no number": _status(429, head="Retry-After: nan\r\n"),
    "429 from a date": _status(429, head="Retry-After: Fri, 31 Dec 9999 23:59:59 GMT\r\n"),
    "an error that says the key": _status(400, {"error": {"message": f"bad key {SENTINEL} {ESCAPES}"}}),
    "an error that is a list": _status(500, [1, [2]]),
    "an error that is text": _status(400, "no"),
    "an unsupported everything": _status(400, {"error": {"message": "max_tokens, stop, temperature are unsupported"}}),
    # bodies
    "an empty body": _body(lambda raw: b""),
    "HTML": _body(lambda raw: b"<html>busy</html>"),
    "a stream": _body(lambda raw: b"data: " + raw + b"\n\ndata: [DONE]\n\n"),
    "half a JSON": _body(lambda raw: raw[: len(raw) // 2]),
    "two JSONs": _body(lambda raw: raw + raw),
    "a byte order mark": _body(lambda raw: b"\xef\xbb\xbf" + raw),
    "UTF-16": _body(lambda raw: raw.decode().encode("utf-16")),
    "no UTF-8": _body(lambda raw: raw.replace(b'"id"', b'"\xff\xfe"')),
    "nested too deeply": _body(lambda raw: b"[" * 200_000),
    "deep inside": _body(lambda raw: raw[:-1] + b',"x":' + b"[" * 900 + b"]" * 900 + b"}"),
    "a huge number": _body(lambda raw: raw[:-1] + b',"x":1' + b"0" * 10_000 + b"}"),
    "a key twice": _body(lambda raw: raw[:-1] + b',"choices":[]}'),
    "null": _json(lambda content: None),
    "a list": _json(lambda content: [content]),
    "an error at 200": _json(lambda content: {"error": {"message": ESCAPES}}),
    # their parts
    "no choices": _with(choices=[]),
    "choices of null": _with(choices=None),
    "choices in an object": _with(choices={"0": {}}),
    "two choices": _json(lambda content: {**content, "choices": content["choices"] * 2}),
    "a choice of null": _with(choices=[None]),
    "a message of null": _choice(message=None, text=None),
    "no text": _text(None),
    "a number for text": _text(7),
    "parts for text": _text([{"type": "text", "text": "Red"}]),
    "an empty text": _text(""),
    "a lone surrogate": _text("\ud800"),
    "a NUL": _text("Red\0Green"),
    "escapes": _text(ESCAPES),
    "the key as text": _text(f"you sent {SENTINEL}"),
    "the key in pieces": _text(f"{SENTINEL[:9]}\u200b{SENTINEL[9:]}"),
    "a long text": _text("Red " * 500_000),
    "a finish of null": _choice(finish_reason=None),
    "a finish of its own": _choice(finish_reason=ESCAPES, is_same=False),
    "a finish that is a number": _choice(finish_reason=3),
    "a filter": _choice(finish_reason="content_filter", is_same=False),
    "no model": _with(model=None),
    "another model": _with(model="another-model"),
    "a model of escapes": _with(model=f"{ESCAPES}\n{SENTINEL}"),
    "a long model": _with(model="m" * 1_000_000),
    "an id that is the key": _with(id=SENTINEL),
    "a fingerprint of escapes": _with(system_fingerprint=ESCAPES + SENTINEL),
    "no usage": _with(usage=None),
    "usage in a list": _with(usage=[1, 2]),
    "negative usage": _usage(prompt_tokens=-5, completion_tokens=-5),
    "endless usage": _usage(prompt_tokens=10**30),
    "usage of floats": _usage(prompt_tokens=1.5, completion_tokens=1e300),
    "usage of words": _usage(prompt_tokens="7", completion_tokens=True),
    "more cached than sent": _usage(prompt_tokens_details={"cached_tokens": 10**9}),
    "cached words": _usage(prompt_tokens_details="none"),
    # log-probabilities
    "log-probabilities of null": _logprobs(lambda found: None),
    "log-probabilities in a list": _logprobs(lambda found: [1, 2]),
    "no log-probabilities": _logprobs(lambda found: {**found, "token_logprobs": []}),
    "one too few": _logprobs(lambda found: {**found, "token_logprobs": (found.get("token_logprobs") or [])[:-1]}),
    "one too many": _logprobs(lambda found: {**found, "token_logprobs": [*(found.get("token_logprobs") or []), -1.0]}),
    "words for numbers": _logprobs(lambda found: {**found, "token_logprobs": ["x"] * 50}),
    "above one": _numbers(5.0),
    "endless numbers": _numbers(-1e308),
    "not a number": _numbers(float("nan")),
    "without tokens": _logprobs(lambda found: {**found, "tokens": None}),
    "other tokens": _logprobs(lambda found: {**found, "tokens": ["x"] * len(found.get("tokens") or [])}),
    "offsets backwards": _logprobs(lambda found: {**found, "text_offset": (found.get("text_offset") or [])[::-1]}),
    "offsets outside": _logprobs(lambda found: {**found, "text_offset": [-(10**9)] * 99}),
}  # fmt: skip
REDIRECTS = {f"redirect {code}": code for code in (301, 302, 303, 307, 308)}
"""Filled in by the server, which alone knows where to: to another port, which counts who comes with the key."""
