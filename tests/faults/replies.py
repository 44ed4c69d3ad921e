"""A server that answers as none should, with a kill in between: nothing uncounted, nothing wrong, no key anywhere."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import yaml
from faulty_server import FaultyServer, _Handler, prompt_of

import iclperm
from faults.child import KILL_AFTER, NONE, Fault, run
from faults.judge import FaultClass, Verdict, judged, keys_in
from faults.shapes import REDIRECTS, SHAPES, Shape, _sent
from faults.world import KEY_VARIABLE, SENTINEL, SIZES, Work, World, command_line, run_alone

MODEL = "hostile-1"
CONCURRENCY = 4
LIMIT_S = 60.0
_LABELS = ("Red", "Green", "Blue")
APIS: dict[str, dict[str, Any]] = {
    "generated": {"scoring": "generate", "max_new_tokens": 3},
    "scored": {"scoring": "loglikelihood"},
}
AT = {"the first": lambda number: number == 0, "the fifth": lambda number: number == 4, "all": lambda number: True}


class Hostility(NamedTuple):
    api: str
    shape: str
    at: str
    kill: bool


def steps(_world: World) -> Sequence[Hostility]:
    """Every shape at the first reply, at a later one and at all of them; at the later one also with a kill after it."""
    return [
        Hostility(api, shape, at, kill)
        for shape in (*SHAPES, *REDIRECTS)
        for api in APIS
        for at, kill in (("the first", False), ("the fifth", False), ("the fifth", True), ("all", False))
    ]


def endpoint(url: str, api: str) -> dict[str, Any]:
    """The choices of a study's endpoint."""
    return {
        "base_url": url, "model": MODEL, "api": "chat" if api == "generated" else "completions",
        "api_key_env": KEY_VARIABLE, "concurrency": CONCURRENCY, "timeout_s": 2.0, "deadline_s": 4.0,
    }  # fmt: skip


def may_have_the_key(url: str) -> dict[str, Any]:
    """What `iclperm.run` is told so that the key may go to this server, where it wants to be told: nowhere else."""
    if "send_keys" not in inspect.signature(iclperm.run).parameters:
        return {}
    return {"send_keys": {KEY_VARIABLE: urlsplit(url).netloc}}


def counted(folder: Path) -> int:
    """The requests that a run folder counts: those that were answered, and those that may have been paid for."""
    from iclperm.endpoint import Ledger

    with Ledger(folder) as ledger:
        return ledger.spent.requests


def check(world: World, step: Hostility, random: Random) -> Verdict:
    """A run against the hostile server, then the same command against an honest one."""
    verdict, place = Verdict(), world.place()
    folder = place / "run"
    with _Server(place / "seen", step) as server:
        fault = Fault(at=random.randrange(150, 260), how=KILL_AFTER) if step.kill else NONE
        hostile = run(_work(place, server.url, step.api), folder, world.scratch, fault, limit_s=LIMIT_S)
        verdict.add("hostile", judged(hostile))
        seen = server.seen()
    _compare(verdict, "hostile", folder, seen)
    with _Server(place / "seen", None) as server:
        for _ in range(3):  # on a busy machine an honest answer may be late too, and the command says: again
            honest = run(_work(place, server.url, step.api), folder, world.scratch, limit_s=LIMIT_S)
            if "no answer in time" not in honest.err:
                break
        seen += server.seen()
    verdict.add("honest", judged(honest, may_say=(0,)))
    _compare(verdict, "honest", folder, seen)
    if honest.code == 0:
        _check_report(world, step, folder, verdict)
    if seen["leaked"]:
        verdict.findings.append("the key went to another server, by a redirect")
    verdict.findings += [*keys_in(folder), *keys_in(world.home / "state")]
    verdict.ended = f"exit code {hostile.code}, then finished"
    return verdict


def _compare(verdict: Verdict, about: str, folder: Path, seen: Counter[str]) -> None:
    """Every request that may have cost something is counted, and nothing that never was sent, but for what was on its
    way."""
    there = run(lambda: print(counted(folder)), folder, folder.parent) if folder.exists() else None
    if there is not None and there.code != 0:
        verdict.add(f"{about}: the bill", judged(there, may_say=(0,)))
        return
    number = 0 if there is None else int(there.out)
    # A request that never came, as its connection had just been closed, cannot be told from one that did.
    most = seen["charged"] + seen["refused"] + seen["closed"] + CONCURRENCY
    if number < seen["charged"]:
        verdict.findings.append(f"{about}: the server counts {seen['charged']} requests, the run folder {number}")
    if number > most:
        verdict.findings.append(f"{about}: the run folder counts {number} requests, the server {most} at most")


def _check_report(world: World, step: Hostility, folder: Path, verdict: Verdict) -> None:
    plain = run(lambda: command_line(["status", str(folder)]), folder, world.scratch)
    verdict.add("status", judged(plain, is_check=True))
    wanted = world.kept(f"honest {step.api}", lambda: honest_digest(world, step.api))
    is_same = step.shape in REDIRECTS or SHAPES[step.shape].is_same
    if is_same and world.found_digest(folder) != wanted:
        verdict.findings.append("the answers are not those of an honest server")
    done = run(world.look("report", folder), folder, world.scratch)
    is_without_answers = step.at == "all" and not is_same  # then it says so in a line: there is nothing to report
    verdict.add("report", judged(done, may_say=(0, 1) if is_without_answers else (0,)))
    if done.code == 0:
        told = json.loads(done.out)["requests"]
        number = int(run(lambda: print(counted(folder)), folder, world.scratch).out)
        if told != number:
            verdict.findings.append(f"the report counts {told} requests, the run folder {number}")


def honest_digest(world: World, api: str) -> str:
    """The digest of a run against an honest server alone."""
    place = world.place()
    with _Server(place / "seen", None) as server:
        done = run(_work(place, server.url, api), place / "run", world.scratch)
    if done.code != 0:
        raise RuntimeError(f"the undisturbed run of an endpoint ended with {done.code}: {done.err}")
    return world.found_digest(place / "run")


def _work(place: Path, url: str, api: str) -> Work:
    study = {key: value for key, value in SIZES.items() if key != "model"}
    study |= {"task": str(place.parents[1] / "inputs/colours.yaml"), "shots": [0, 3], **APIS[api]}
    path = place / "study.yaml"
    path.write_text(yaml.safe_dump({**study, "endpoint": endpoint(url, api)}))
    return partial(run_alone, path, place / "run", **may_have_the_key(url))


class _Server:
    """A process with the server in it, and what it saw: a line for each request, written before it is answered."""

    def __init__(self, log: Path, step: Hostility | None) -> None:
        self._log, self._step = log, step

    def __enter__(self) -> _Server:
        self._log.unlink(missing_ok=True)
        read, write = os.pipe()
        if not (pid := os.fork()):
            try:
                os.close(read)
                _serve(write, os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), self._step)
            finally:
                os._exit(1)
        os.close(write)
        with os.fdopen(read) as lines:
            self.url = lines.readline().strip()
        self._pid = pid
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def seen(self) -> Counter[str]:
        """How many requests may have been charged for, were refused, or came elsewhere with the key."""
        return Counter(self._log.read_text().split())


def _serve(to: int, log: int, step: Hostility | None) -> None:
    elsewhere = FaultyServer(model=MODEL)
    elsewhere.RequestHandlerClass = type("Elsewhere", (_Elsewhere,), {"log": log})
    threading.Thread(target=elsewhere.serve_forever, daemon=True).start()
    server = FaultyServer(model=MODEL)
    known = {"log": log, "step": step, "elsewhere": elsewhere.url, "count": iter(range(1 << 40))}
    server.RequestHandlerClass = type("Hostile", (_Hostile,), known)
    os.write(to, f"{server.url}\n".encode())
    os.close(to)
    server.serve_forever(poll_interval=0.05)


class _Elsewhere(_Handler):
    log: int

    def do_POST(self) -> None:
        """Notes who comes with the key."""
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        os.write(self.log, b"leaked\n" if SENTINEL in str(self.headers) else b"elsewhere\n")
        self._send(404, b"{}")

    do_GET = do_POST


class _Hostile(_Handler):
    log: int
    step: Hostility | None
    elsewhere: str
    count: Any

    def do_POST(self) -> None:
        """One request, counted before it is answered."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number, raw = next(self.count), json.dumps(_content(body)).encode()
        shape = Shape(_sent)
        if self.is_hostile(number):
            assert self.step is not None
            shape = SHAPES.get(self.step.shape) or self._redirect(REDIRECTS[self.step.shape])
        os.write(self.log, b"charged\n" if shape.is_charged else b"refused\n")
        with suppress(OSError):
            for piece in shape.make(raw):
                if piece is None:
                    threading.Event().wait(0.02)
                else:
                    self.wfile.write(piece)
                    self.wfile.flush()
        if self.is_hostile(number):
            self.close_connection = True
            os.write(self.log, b"closed\n")

    def is_hostile(self, number: int) -> bool:
        """Whether the request of this number gets no honest reply."""
        return self.step is not None and AT[self.step.at](number)

    def _redirect(self, code: int) -> Shape:
        head = f"HTTP/1.1 {code} Moved\r\nLocation: {self.elsewhere}/chat/completions\r\n".encode()
        return Shape(lambda _: _sent(b"{}", head), is_charged=False)


def _content(body: dict[str, Any]) -> dict[str, Any]:
    """A whole and honest reply: the same for the same prompt, with numbers for each of its words."""
    is_chat, prompt = "messages" in body, prompt_of(body)
    word = _LABELS[_hash(prompt) % 3]
    text = "" if body.get("max_tokens") == 0 else f" {word}"
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "logprobs": None}
    whole = prompt + text if body.get("echo") else text
    if is_chat:
        choice["message"] = {"role": "assistant", "content": text.strip()}
    else:
        choice["text"] = whole
        if "logprobs" in body:
            found = [(match.start(), match[0]) for match in re.finditer(r"\s*\S+|\s+", whole)]
            numbers = [-(1 + _hash(whole[:begin] + token) % 997) / 100 for begin, token in found]
            choice["logprobs"] = {
                "tokens": [token for _, token in found],
                "token_logprobs": [None if body.get("echo") and not at else value for at, value in enumerate(numbers)],
                "top_logprobs": [{token: value} for (_, token), value in zip(found, numbers, strict=True)],
                "text_offset": [begin for begin, _ in found],
            }
    tokens = len(prompt.split())
    usage = {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}
    return {"id": "reply", "created": 1, "object": "reply", "model": MODEL, "choices": [choice], "usage": usage}


def _hash(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)


FIXED = (
    Hostility("generated", "half a body", "the fifth", False),
    Hostility("generated", "redirect 307", "the first", False),
    Hostility("generated", "the key as text", "the fifth", True),
    Hostility("generated", "a model of escapes", "the fifth", False),
    Hostility("scored", "one too few", "the first", False),
)
REPLIES = FaultClass(
    "replies", "replies of a server that no server should send, and a kill in between", steps, check, FIXED
)
