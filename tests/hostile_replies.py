"""Replies that no honest server sends, as the bytes of whole HTTP answers: what `test_hostile_replies` goes through."""

import gzip
import itertools
import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

Pieces = Iterator[bytes]
PAID_MODEL = "faulty-1"


def good(**changes: Any) -> dict[str, Any]:
    """What an honest server says to a chat, but for ``changes``."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "fine"}}
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    return {"id": "reply", "created": 1, "model": PAID_MODEL, "choices": [choice], "usage": usage} | changes


def said(**message: Any) -> dict[str, Any]:
    """A whole reply whose message is ``message``."""
    return good(choices=[{"index": 0, "finish_reason": "stop", "message": message}])


def http(
    body: bytes, status: str = "200 OK", headers: Mapping[str, str] | None = None, length: int | None = None
) -> bytes:
    """One HTTP answer, the last of its connection, and it says so: a request that meets a connection which the server
    has meanwhile closed may have been paid for, and counts."""
    lines = {"Content-Type": "application/json", "Content-Length": str(len(body) if length is None else length)}
    lines["Connection"] = "close"
    head = "".join(f"{name}: {value}\r\n" for name, value in {**lines, **(headers or {})}.items())
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode("latin-1") + body


def whole(content: Any, **about: Any) -> Callable[[], Pieces]:
    """A reply of this JSON, or of these bytes."""
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda: iter([http(raw, **about)])


def with_number(text: str, place: str = "created") -> bytes:
    """A good reply with a number that JSON has, or has not, in place of another."""
    return json.dumps(good(**{place: "NUMBER"})).replace('"NUMBER"', text).encode()


def usage(**counts: Any) -> Callable[[], Pieces]:
    return whole(good(usage=counts))


def forever(begin: bytes, piece: bytes, pause: float = 0.0) -> Callable[[], Pieces]:
    """A reply that does not end; stops by itself after ten seconds, so that no test hangs with it."""

    def pieces() -> Pieces:
        yield begin
        ends = time.monotonic() + 10
        while time.monotonic() < ends:
            time.sleep(pause)
            yield piece

    return pieces


def chunk(piece: bytes) -> bytes:
    return f"{len(piece):x}\r\n".encode() + piece + b"\r\n"


GOOD = json.dumps(good()).encode()
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


@lru_cache
def bomb() -> bytes:
    """A megabyte and a half that becomes some 1.5 GB."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    piece = bytes(1 << 20)
    return b"".join([*(packer.compress(piece) for _ in range(1500)), packer.flush()])


def bombed() -> Pieces:
    return iter([http(bomb(), headers={"Content-Encoding": "gzip"})])


def sent_on(to: str, status: str = "302 Found") -> Callable[[], Pieces]:
    return whole(b"", status=status, headers={"Location": to})


LOST: dict[str, Callable[[], Pieces]] = {
    "empty": whole(b""),
    "blank": whole(b"   \n"),
    "half of it": whole(GOOD[: len(GOOD) // 2]),
    "two of it": whole(GOOD + GOOD),
    "something after it": whole(GOOD + b"x"),
    "HTML": whole(b"<html>busy</html>", headers={"Content-Type": "text/html"}),
    "a stream of events": whole(b"data: " + GOOD + b"\n\n", headers={"Content-Type": "text/event-stream"}),
    "null": whole(None),
    "true": whole(True),
    "a number": whole(7),
    "a text": whole("fine"),
    "a list": whole([good()]),
    "an object of nothing": whole({}),
    "an error with 200": whole({"error": {"message": "upstream failed"}}),
    "no choices": whole(good(choices=[])),
    "choices null": whole(good(choices=None)),
    "choices an object": whole(good(choices={"0": {}})),
    "choices a text": whole(good(choices="x")),
    "two choices": whole(good(choices=good()["choices"] * 2)),
    "a thousand choices": whole(good(choices=good()["choices"] * 1000)),
    "the choice of another prompt": whole(good(choices=[{**good()["choices"][0], "index": 3}])),
    "the choice of a prompt before the first": whole(good(choices=[{**good()["choices"][0], "index": -1}])),
    "a choice null": whole(good(choices=[None])),
    "a choice that is a list": whole(good(choices=[[]])),
    "a choice of nothing": whole(good(choices=[{}])),
    "a message null": whole(good(choices=[{"message": None}])),
    "a message that is a text": whole(good(choices=[{"message": "fine"}])),
    "a message that is a list": whole(good(choices=[{"message": []}])),
    "a content that is a number": whole(said(content=5)),
    "a content that is true": whole(said(content=True)),
    "a content that is an object": whole(said(content={"text": "fine"})),
    "a part whose text is a number": whole(said(content=[{"type": "text", "text": 5}])),
    "a part whose text is missing": whole(said(content=[{"type": "text"}])),
    "a text that is a list": whole(good(choices=[{"text": ["x"]}])),
    "no model": whole({key: value for key, value in good().items() if key != "model"}),
    "a model null": whole(good(model=None)),
    "a model that is a number": whole(good(model=1)),
    "a model of a megabyte": whole(good(model="m" * 900_000)),
    "log-probabilities of numbers for tokens": whole(
        good(choices=[{**good()["choices"][0], "logprobs": {"content": [{"token": 5, "logprob": -1}]}}])
    ),
    "nested 100,000 deep": whole(b"[" * 100_000 + b"]" * 100_000),
    "nested 100,000 deep in an object": whole(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "nested 500 deep beside a good one": whole(
        json.dumps(good(extra="DEEP")).replace('"DEEP"', "[" * 500 + "]" * 500).encode()
    ),
    "a key twice": whole(GOOD[:-1] + b', "model": "faulty-1"}'),
    "a key twice within": whole(GOOD.replace(b'"content": "fine"', b'"content": "fine", "content": "wrong"')),
    "UTF-16": whole(GOOD.decode().encode("utf-16")),
    "UTF-32": whole(GOOD.decode().encode("utf-32")),
    "Latin-1": whole(json.dumps(said(content="Größe"), ensure_ascii=False).encode("latin-1")),
    "a charset that decodes slowly": whole(
        GOOD[:20] + b"-\xff" * 200_000, headers={"Content-Type": "application/json; charset=punycode"}
    ),
    "a NUL in the middle": whole(GOOD[:30] + b"\0" + GOOD[30:]),
    "control characters in a text": whole(GOOD.replace(b"fine", b"fi\x1b[2Jne")),
    "a longer length than it has": whole(GOOD, length=len(GOOD) + 100),
    "a shorter length than it has": whole(GOOD, length=len(GOOD) - 20),
    "a negative length": whole(GOOD, length=-1),
    "a huge length": whole(GOOD, length=10**30),
    "two lengths": whole(GOOD, headers={"content-length": "3"}),
    "no end of a chunk": lambda: iter([CHUNKED, b"ffffff\r\n", GOOD]),
    "a chunk of no number": lambda: iter([CHUNKED, b"zz\r\n", GOOD]),
    "a chunk of a huge number": lambda: iter([CHUNKED, b"f" * 40 + b"\r\n", GOOD]),
    "more bytes than a reply may have": whole(b" " * (2 << 20) + GOOD),
    "chunks without end": forever(CHUNKED, chunk(b" " * 60_000)),
    "a bomb of gzip": bombed,
    "gzip that is none": whole(GOOD, headers={"Content-Encoding": "gzip"}),
    "half of a gzip": whole(gzip.compress(GOOD)[:-12], headers={"Content-Encoding": "gzip"}),
    "gzip in gzip": whole(gzip.compress(gzip.compress(GOOD)), headers={"Content-Encoding": "gzip, gzip"}),
    "Brotli": whole(b"\x0b\x02\x80fine\x03", headers={"Content-Encoding": "br"}),
    "an unheard-of coding": whole(GOOD, headers={"Content-Encoding": "x" * 200}),
    "204": whole(b"", status="204 No Content"),
    "205": whole(b"", status="205 Reset Content"),
    "206 with half of it": whole(GOOD[: len(GOOD) // 2], status="206 Partial Content"),
    "nothing at all": lambda: iter([]),
    "no HTTP": lambda: iter([b"\x00\x01\x02\x03 hello\r\n\r\n"]),
    "HTTP/9": lambda: iter([b"HTTP/9.9 200 OK\r\n\r\n"]),
    "a status of no number": lambda: iter([b"HTTP/1.1 abc OK\r\n\r\n"]),
    "a header of a megabyte": whole(GOOD, headers={"X-Long": "x" * (1 << 20)}),
    "ten thousand headers": whole(GOOD, headers={f"X-{number}": "x" * 50 for number in range(10_000)}),
    "a header with a line break": lambda: iter([b"HTTP/1.1 200 OK\r\nX: a\r\n \x00b\r\nContent-Length: 2\r\n\r\n{}"]),
    "100 without end": forever(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    "other protocols": lambda: iter([b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n"]),
    "103 and then the end": lambda: iter([b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"]),
    "slow drops": forever(CHUNKED, chunk(b" "), pause=0.05),
    "slow drops of a header": forever(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n", pause=0.05),
}
"""Replies that are none: the request is asked again, and counts at what it can have cost."""

ENDLESS = ("100 without end", "slow drops", "slow drops of a header")
"""What of them only the client's patience ends."""

PASSING: dict[str, Callable[[], Pieces]] = {
    "500 of a megabyte": whole(b"x" * 900_000, status="500 Oops"),
    "500 nested deep": whole(b"[" * 100_000, status="500 Oops"),
    "500 with deep JSON": whole(b"[" * 900 + b"]" * 900, status="500 Oops"),
    "500 with an error of another kind": whole({"error": [1, 2, 3]}, status="500 Oops"),
    "500 with a message of another kind": whole(
        {"error": {"message": {"a": 1}, "code": 5, "type": []}}, status="500 O"
    ),
    "599": whole(b"", status="599 What"),
    "999": whole(b"", status="999 What"),
    "503 until the year 9999": whole(b"", status="503 No", headers={"Retry-After": "Fri, 31 Dec 9999 23:59:59 GMT"}),
    "503 beyond the year 9999": whole(b"", status="503 No", headers={"Retry-After": "Fri, 31 Dec 99999 23:59:59 GMT"}),
    "503 after less than nothing": whole(b"", status="503 No", headers={"Retry-After": "-1e9"}),
    "503 after no number": whole(b"", status="503 No", headers={"Retry-After": "nan"}),
    "503 for ever": whole(b"", status="503 No", headers={"Retry-After": "1e999"}),
    "503 for ages": whole(b"", status="503 No", headers={"Retry-After": "1" + "0" * 300}),
    "503 after garbage": whole(b"", status="503 No", headers={"Retry-After": "\xff, 99 Foo 1 99:99:99 +9999999"}),
    "500 after a date in year 0": whole(b"", status="500 No", headers={"Retry-After": "Mon, 00 Jan 0000 00:00:00 GMT"}),
}
"""HTTP errors, however they are put: the request is asked again, and has cost nothing."""

STOPS: dict[str, tuple[Callable[[], Pieces], str]] = {
    "sent on to another host": (sent_on("http://127.0.0.2:1/v1/chat/completions"), "sends on to 'http://127.0.0.2:1"),
    "sent on to itself": (sent_on("/v1/chat/completions", "307 Temporary Redirect"), "sends on to"),
    "sent on for good": (sent_on("https://evil.example/", "308 Permanent Redirect"), "sends on to"),
    "sent on to nowhere": (sent_on("http://[::bad/\x7f", "301 Moved"), "sends on to"),
    "sent on without a place": (whole(b"", status="303 See Other"), "sends away"),
    "not modified": (whole(b"", status="304 Not Modified"), "sends away"),
    "401 in a code of a terminal": (whole({"error": {"message": "\x1b[2Jgone"}}, status="401 No"), "refuses access"),
    "400 of a megabyte": (whole(b"y" * 900_000, status="400 Bad"), "refuses the request"),
    "404 of bytes": (whole(bytes(range(256)), status="404 None"), "is not there"),
}
"""What concerns all requests: the run stops at the first, with one line."""

TAKEN: dict[str, tuple[Callable[[], Pieces], str, tuple[int | None, int | None]]] = {
    "1e999 somewhere": (whole(with_number("1e999")), "fine", (5, 2)),
    "NaN somewhere": (whole(with_number("NaN")), "fine", (5, 2)),
    "-Infinity somewhere": (whole(with_number("-Infinity")), "fine", (5, 2)),
    "a number of 4,000 digits": (whole(with_number("9" * 4_000)), "fine", (5, 2)),
    "a number of 500,000 digits": (whole(with_number("9" * 500_000)), "fine", (5, 2)),
    "a fraction of 500,000 digits": (whole(with_number("0." + "9" * 500_000)), "fine", (5, 2)),
    "usage missing": (whole({key: value for key, value in good().items() if key != "usage"}), "fine", (None, None)),
    "usage null": (whole(good(usage=None)), "fine", (None, None)),
    "usage a list": (whole(good(usage=[1])), "fine", (None, None)),
    "usage negative": (usage(prompt_tokens=-5, completion_tokens=-1), "fine", (None, None)),
    "usage true": (usage(prompt_tokens=True, completion_tokens=True), "fine", (None, None)),
    "usage in words": (usage(prompt_tokens="5", completion_tokens=[2]), "fine", (None, None)),
    "usage in fractions": (usage(prompt_tokens=5.5, completion_tokens=2.0), "fine", (None, 2)),
    "usage in whole fractions": (usage(prompt_tokens=5.0, completion_tokens=2.0), "fine", (5, 2)),
    "usage of nulls": (usage(prompt_tokens=None, completion_tokens=None), "fine", (None, None)),
    "coded as none": (whole(GOOD, headers={"Content-Encoding": "none"}), "fine", (5, 2)),
    "coded as itself": (whole(GOOD, headers={"Content-Encoding": "Identity"}), "fine", (5, 2)),
    "coded as text": (whole(GOOD, headers={"Content-Encoding": "UTF-8"}), "fine", (5, 2)),
    "gzip and then nothing": (
        whole(gzip.compress(GOOD), headers={"Content-Encoding": "gzip, identity"}), "fine", (5, 2)
    ),
    "usage beyond all": (usage(prompt_tokens=10**17, completion_tokens=2), "fine", (None, 2)),
    "usage of details that are none": (
        usage(prompt_tokens=5, completion_tokens=2, prompt_tokens_details="x"), "fine", (5, 2)
    ),
    "more in the cache than there is": (
        usage(prompt_tokens=5, completion_tokens=2, prompt_tokens_details={"cached_tokens": 10**9}), "fine", (5, 2)
    ),
    "content in parts": (
        whole(said(content=[{"type": "text", "text": "fi"}, {"type": "text", "text": "ne"}])), "fine", (5, 2)
    ),
    "content with reasoning": (
        whole(said(content=[{"type": "thinking", "thinking": [1]}, {"type": "text", "text": "fine"}])), "fine", (5, 2)
    ),
    "a choice of no number": (
        whole(good(choices=[{"message": {"content": "fine"}, "index": "x"}])), "fine", (5, 2)
    ),
    "HTTP/1.0": (lambda: iter([b"HTTP/1.0 200 OK\r\n\r\n" + GOOD]), "fine", (5, 2)),
    "blank lines that keep it alive": (whole(b"\n    " * 500 + GOOD), "fine", (5, 2)),
    "content of no parts": (whole(said(content=[])), "", (5, 2)),
    "content null": (whole(said(content=None)), "", (5, 2)),
    "half a character": (whole(said(content="fi\ud83dne")), "fi?ne", (5, 2)),
    "a mark of byte order": (whole(b"\xef\xbb\xbf" + GOOD), "fine", (5, 2)),
    "gzip": (whole(gzip.compress(GOOD), headers={"Content-Encoding": "gzip"}), "fine", (5, 2)),
    "a finish that is a list": (
        whole(good(choices=[{"message": {"content": "fine"}, "finish_reason": [1]}])), "fine", (5, 2)
    ),
    "203": (whole(GOOD, status="203 Changed"), "fine", (5, 2)),
    "cookies": (whole(GOOD, headers={"Set-Cookie": "a=" + "b" * 3000}), "fine", (5, 2)),
    "100 and then the reply": (lambda: iter([b"HTTP/1.1 100 Continue\r\n\r\n", http(GOOD)]), "fine", (5, 2)),
}  # fmt: skip
"""Odd and yet an answer: its text, and prompt tokens and reply tokens as they are booked, None for their bound."""

TABLES = list(itertools.chain(LOST, PASSING, STOPS, TAKEN))
