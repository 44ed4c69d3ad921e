"""A server on loopback that speaks the OpenAI API and fails as it is told to, and that knows what it was paid for."""

import contextlib
import email.utils
import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "faulty-1"
STALL_S = 5.0  # longer than any test waits

Fault = str | Callable[[dict[str, Any]], str | Iterable[bytes]]
"""What goes wrong, by name; or it is told from the request, also as the very bytes to send."""


def answer_to(prompt: str) -> str:
    """What the server says to a prompt, always."""
    return f"answer {hashlib.sha256(prompt.encode()).hexdigest()[:8]}"


class FaultyServer(ThreadingHTTPServer):
    """Takes the next fault for each request, ``ok`` when there are no more; a fault may depend on the body."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, faults: Iterable[Fault] = (), model: str = MODEL) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model = model
        self.faults = iter(faults)
        self.after_reply: Callable[[int], None] = lambda count: None
        self.seen: list[dict[str, Any]] = []  # bodies, in the order of arrival
        self.headers: list[Mapping[str, str]] = []
        self.paid: Counter[str] = Counter()  # whole replies sent, by prompt
        self.most_at_once = 0
        self.now = 0
        self.lock = threading.Lock()
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def content(self, body: dict[str, Any]) -> dict[str, Any]:
        """A whole reply."""
        text = answer_to(prompt_of(body))
        said = {"message": {"role": "assistant", "content": text}} if "messages" in body else {"text": text}
        return {
            "id": f"reply-{len(self.seen)}",
            "object": "chat.completion" if "messages" in body else "text_completion",
            "created": 1,
            "model": self.model,
            "choices": [{"index": 0, "finish_reason": "stop", **said}],
            "usage": {
                "prompt_tokens": len(prompt_of(body)),
                "completion_tokens": 2,
                "total_tokens": len(prompt_of(body)) + 2,
                "prompt_tokens_details": {"cached_tokens": 1},
            },
        }

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are what this is for."""


def faulty_server(faults: Iterable[Fault] = (), model: str = MODEL) -> contextlib.AbstractContextManager[FaultyServer]:
    """A server that fails so, while it is open."""
    return running(FaultyServer(faults, model))


@contextlib.contextmanager
def running(server: Any) -> Iterator[Any]:
    """Serves in a thread until the end of the block."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: FaultyServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.seen.append(body)
            self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
            self.server.now += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.now)
            fault = next(self.server.faults, "ok")
        try:
            told = fault if isinstance(fault, str) else fault(body)
            if isinstance(told, str):
                self._serve(told, body)
            else:
                self._send_as_is(told)
        finally:
            with self.server.lock:
                self.server.now -= 1

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def _send_as_is(self, pieces: Iterable[bytes]) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):  # the client has heard enough
            for piece in pieces:
                self.wfile.write(piece)
                self.wfile.flush()
                if self.server.closing.is_set():
                    return

    def _serve(self, fault: str, body: dict[str, Any]) -> None:
        name, _, value = fault.partition(" ")
        if name.isdigit():
            self._refuse(int(name), value)
        elif name == "stall":
            self.server.closing.wait(STALL_S)
            self.close_connection = True
        elif name == "close":
            self.close_connection = True
        elif name == "slow":
            time.sleep(float(value))
            self._reply(body)
        elif name == "cut":  # a whole HTTP message with half a JSON text in it
            raw = json.dumps(self.server.content(body)).encode()
            self._send(200, raw[: len(raw) // 2])
        elif name == "break":  # half an HTTP message
            raw = json.dumps(self.server.content(body)).encode()
            self._send(200, raw[: len(raw) // 2], length=len(raw))
            self.close_connection = True
        elif name == "garbage":
            self._send(200, b"<html>busy</html>")
        elif name == "nothing":
            self._send(200, json.dumps({"error": {"message": "upstream failed"}}).encode())
        else:
            self._reply(body, fault)

    def _reply(self, body: dict[str, Any], fault: str = "ok") -> None:
        content = self.server.content(body)
        choice = content["choices"][0]
        name, _, value = fault.partition(" ")
        if name == "model":
            content["model"] = value
        elif name == "refusal":
            choice["message"] = {"role": "assistant", "content": None, "refusal": "I cannot help with that."}
        elif name == "filter":
            choice["finish_reason"] = "content_filter"
        elif name == "echo-key":
            choice["message"]["content"] = f"you sent {self.headers['Authorization']}"
        elif name == "text":
            choice["message"]["content"] = value.encode().decode("unicode_escape")
        elif name == "no-usage":
            del content["usage"]
        elif name != "ok":
            raise ValueError(f"no such fault: {fault}")
        with self.server.lock:
            self.server.paid[prompt_of(body)] += 1
            count = self.server.paid.total()
        self._send(200, json.dumps(content).encode())
        self.server.after_reply(count)

    def _refuse(self, status: int, value: str) -> None:
        """``429``, ``429 after=3``, ``429 date=3`` (seconds from now), ``400 {"message": ...}``."""
        headers = {}
        if value.startswith("after="):
            headers["Retry-After"] = value.removeprefix("after=")
        elif value.startswith("date="):
            seconds = float(value.removeprefix("date="))
            headers["Retry-After"] = email.utils.formatdate(time.time() + seconds, usegmt=True)
        error = json.loads(value) if value.startswith("{") else {"message": f"refused with {status}"}
        self._send(status, json.dumps({"error": error}).encode(), headers=headers)

    def _send(
        self, status: int, raw: bytes, length: int | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw) if length is None else length))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(raw)
        self.wfile.flush()


def prompt_of(body: Mapping[str, Any]) -> str:
    """The text that was asked, whatever it was asked through."""
    return body["messages"][-1]["content"] if "messages" in body else body["prompt"]
