"""A worker's process: it loads the model once, answers the parts that it is given, and ends with its driver.

``python -m iclperm.workers.member HANDLE CORES``: the number of a socket that it inherits, and the cores it keeps to,
with commas between (none: any).
"""

from __future__ import annotations

import os
import platform
import queue
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from iclperm.base.environment import settle
from iclperm.errors import IclpermError, is_out_of_memory
from iclperm.runs.answering import Answering, Asked, Engines, ModelUse
from iclperm.runs.setting import adapter_digest, model_digest
from iclperm.workers.messages import Pipe, packed, part_from, plan_from, unpacked

LOST_DRIVER = 9
"""The exit code of a worker whose driver is gone."""


def serve(pipe: Pipe) -> None:
    """Answers what a driver asks, until it closes the pipe; a failure is told before the process ends by it."""
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    # The thread notes at once, in the middle of a forward pass too, that the driver is gone.
    threading.Thread(target=_listen, args=(pipe, inbox), daemon=True).start()
    _answer(pipe, inbox)


def _listen(pipe: Pipe, inbox: queue.SimpleQueue[bytes]) -> None:
    while (message := pipe.receive()) is not None:
        inbox.put(message)
    os._exit(LOST_DRIVER)


def _answer(pipe: Pipe, inbox: queue.SimpleQueue[bytes]) -> None:
    """Answers the parts of one run after the other; the model of the last is kept."""
    engines = Engines()
    message = inbox.get()
    while True:
        try:
            message = _of_run(pipe, inbox, engines, message)
        except Exception as error:
            pipe.send(packed({"is": "failed", "run": unpacked(message)[0]["run"], **_told(error)}))
            raise


def _of_run(pipe: Pipe, inbox: queue.SimpleQueue[bytes], engines: Engines, begins: bytes) -> bytes:
    """Answers the parts of the run that a message begins; returns the one that begins the next."""
    head, _ = unpacked(begins)
    plans = []
    for _ in range(head["num_plans"]):
        about, table = unpacked(inbox.get())
        plans.append(plan_from(about, table))
    use = ModelUse(**head["use"])
    answering = Answering(use, plans, engines)
    digests = _digests(use) if head["wants_digest"] else None
    of_run = {"run": head["run"]}
    numerics, before = answering.numerics, answering.tokens
    pipe.send(packed({"is": "ready", **of_run, **surroundings(), "numerics": numerics, "digests": digests}))
    following: list[bytes] = []

    def asked() -> Iterator[Asked]:
        while True:
            message = inbox.get()
            head, table = unpacked(message)
            if head["is"] == "load":
                following.append(message)
                return
            yield part_from(head, table)

    for part, rows in answering.answers(asked()):
        pipe.send(packed({"is": "answer", **of_run, "part": part, "tokens": answering.tokens - before}, rows))
    return following[0]


def _digests(use: ModelUse) -> list[str | None]:
    """Of the files here that make the model: its own, and its adapter's."""
    return [model_digest(use.model), None if use.adapter is None else adapter_digest(use.adapter)]


def surroundings() -> dict[str, Any]:
    """Which process on which machine this is, and its version of iclperm."""
    return {"host": platform.node(), "pid": os.getpid(), "version": version("iclperm")}


def _told(error: Exception) -> dict[str, Any]:
    """An error as values; the driver raises one that is made of them."""
    is_ours = isinstance(error, IclpermError)
    words = str(error) if is_ours else f"{type(error).__name__}: {error}"
    kind = type(error).__name__ if is_ours else "MemoryError" if is_out_of_memory(error) else "RuntimeError"
    return {"error": kind, "words": " ".join(words.split())}


def main() -> None:
    """See the module."""
    handle, cores = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    settle()
    serve(Pipe(socket.socket(fileno=int(handle))))


if __name__ == "__main__":
    main()
