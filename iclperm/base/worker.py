"""A process for work that may never end: it is killed at a time limit, and started anew when it is next needed."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from threading import Lock
from typing import IO, Any, Self

from iclperm.errors import IclpermError

START_SECONDS = 120.0
MAX_WAIT = 10  # seconds by the clock for each second of processor time, where the process waits or shares its core
MAX_BYTES = 16 << 20  # of a request or a reply
MAX_MEMORY = 4 << 30  # of address space

# What the process sees of the environment: how to run Python, no keys.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_", "TMPDIR", "LD_", "DYLD_", "VIRTUAL_ENV", "PYTHON")


class Overtime(IclpermError):
    """The process was killed because a call took too long."""


class WorkerError(IclpermError):
    """The process failed: its function raised, it died, or it gave no answer that can be read."""


class StartError(IclpermError):
    """The process cannot be had: it does not start, or lacks a module."""


class Worker:
    """Calls ``target``, "module:function" from one JSON value to another, in a process of its own, one call at a time.

    The process starts at the first call, imports ``modules`` before it takes one, has at most ``memory`` bytes of
    address space where the system can limit it, hashes text alike in every run, ignores Ctrl-C, sees no environment
    variable that may hold a key, and ends with this one. What it prints is lost.
    """

    def __init__(self, target: str, modules: Sequence[str] = (), memory: int = MAX_MEMORY) -> None:
        self.target = target
        self.modules = tuple(modules)
        self.memory = memory
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, payload: Any, seconds: float) -> Any:
        """What the function returns for ``payload``.

        Raises `Overtime` when it takes more than ``seconds`` of processor time, or ten times that by the clock, and
        `WorkerError` when it fails; a new process, which takes some tenths of a second, or `StartError`, is the next
        call's. A function that raises costs no process.
        """
        request = json.dumps({"payload": payload, "seconds": seconds}).encode() + b"\n"
        if len(request) > MAX_BYTES:
            raise WorkerError(f"{self.target}: the request has {len(request)} bytes; at most {MAX_BYTES} are sent")
        with self._lock:
            try:
                reply = self._exchange(self._running(), request, seconds)
            except BaseException:  # an interrupt too: what is left in the pipes belongs to no later call
                self._kill()
                raise
        if "error" in reply:
            raise WorkerError(f"{self.target}: {reply['error']}")
        return reply["result"]

    def close(self) -> None:
        """Ends the process, if there is one."""
        with self._lock:
            self._kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = _started(self.target, str(self.memory), *self.modules)
            ready = _line(self._process, time.monotonic() + START_SECONDS)
            if ready is None:
                raise StartError(f"{self.target}: its process did not start within {START_SECONDS:.0f} seconds")
            if ready != b"{}\n":
                reason = json.loads(ready)["error"] if ready else "it died"
                raise StartError(f"{self.target}: its process did not start: {reason}")
        return self._process

    def _exchange(self, process: subprocess.Popen[bytes], request: bytes, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + MAX_WAIT * seconds
        reply = _line(process, deadline) if _sent(process, request, deadline) else None
        if reply is None:
            raise Overtime(f"{self.target}: took more than {MAX_WAIT * seconds:g} seconds by the clock")
        if reply.endswith(b"\n"):
            said: dict[str, Any] = json.loads(reply)
            return said
        if process.wait() == -signal.SIGPROF:
            raise Overtime(f"{self.target}: took more than {seconds:g} seconds of processor time")
        raise WorkerError(f"{self.target}: the process died with code {process.returncode}")

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: a group of the dead is not permitted
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                _there(pipe).close()


def _started(*arguments: str) -> subprocess.Popen[bytes]:
    kept = {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)}
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-P", __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        process_group=0,
        env={**kept, "PYTHONPATH": paths, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    os.set_blocking(_there(process.stdin).fileno(), False)
    os.set_blocking(_there(process.stdout).fileno(), False)
    return process


def _sent(process: subprocess.Popen[bytes], request: bytes, deadline: float) -> bool:
    """Whether the process took the whole request in time; that it has died shows when its reply is read."""
    pipe, left = _there(process.stdin), memoryview(request)
    while left:
        if not _is_ready(pipe, selectors.EVENT_WRITE, deadline):
            return False
        try:
            left = left[pipe.write(left) or 0 :]
        except BrokenPipeError:
            return True
    return True


def _line(process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
    """The next line of the process: with its line break, without one where it died, None where the time is over.

    Raises `WorkerError` for more than 16 MiB.
    """
    pipe, pieces, size = _there(process.stdout), [], 0
    while _is_ready(pipe, selectors.EVENT_READ, deadline):
        piece = pipe.read(1 << 16)
        pieces.append(piece)
        size += len(piece)
        if not piece or piece.endswith(b"\n"):
            return b"".join(pieces)
        if size > MAX_BYTES:
            raise WorkerError(f"the process says more than {MAX_BYTES} bytes")
    return None


def _is_ready(pipe: IO[bytes], event: int, deadline: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, event)
        return bool(selector.select(max(0.0, deadline - time.monotonic())))


def _there(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _serve(target: str, memory: str, *modules: str) -> None:
    """What the process does: it answers each line of requests with a line, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ValueError, OSError):  # a lower limit is set already, or the system knows none
        resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the function prints must not look like a reply

    def reply(line: str) -> None:
        raw = line.encode() + b"\n"
        replies.write(raw if len(raw) <= MAX_BYTES else b'{"error": "the reply is too long"}\n')
        replies.flush()

    try:
        for module in modules:
            import_module(module)
        module, name = target.split(":")
        function = getattr(import_module(module), name)
    except Exception as error:
        return reply(json.dumps({"error": _shown(error)}))
    reply("{}")
    for sent in sys.stdin.buffer:
        request = json.loads(sent)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])  # its signal ends the process, in C code too
        try:
            line = json.dumps({"result": function(request["payload"])})
        except Exception as error:
            line = json.dumps({"error": _shown(error)})
        signal.setitimer(signal.ITIMER_PROF, 0)
        reply(line)


def _shown(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


if __name__ == "__main__":
    _serve(*sys.argv[1:])
