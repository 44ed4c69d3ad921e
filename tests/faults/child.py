"""Processes that are forked from one that has everything loaded, and that meet a fault at a place known beforehand."""

from __future__ import annotations

import ctypes
import hashlib
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

SHIM = Path(__file__).with_name("shim.c")
WRITES = {"create": 1, "write": 2, "sync": 4, "move": 8, "remove": 16, "folder": 32, "cut": 64}
READ, LASTING = 128, 1024
ALL_WRITES = sum(WRITES.values())
KILL_BEFORE, KILL_AFTER = -1, -2
MOST_BYTES = 6 << 30  # of address space beyond what was there at the fork
_NOBODYS = ("/dev/", "/proc/")


@dataclass(frozen=True)
class Fault:
    """What happens to a process at its operation ``at`` below the run folder: an error number, or a kill.

    ``calls`` kills it instead when it has called that many Python functions, wherever it is then.
    """

    kinds: int = ALL_WRITES
    at: int = -1
    how: int = 0
    calls: int = 0


NONE = Fault()
_MOST_PATIENCE = 8


@dataclass
class Outcome:
    """How a process ended: its exit code, None where it was killed by us or by ``signal``; what it said and did."""

    code: int | None
    signal: int = 0
    out: str = ""
    err: str = ""
    seconds: float = 0.0
    is_overtime: bool = False
    operations: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    calls: int = 0

    @property
    def was_killed(self) -> bool:
        """Whether the fault was a kill, and came."""
        return self.signal == signal.SIGKILL and not self.is_overtime


def with_shim(arguments: Sequence[str]) -> None:
    """Starts this program anew with the shim between it and the system, unless it is there; needs a C compiler."""
    if os.environ.get("ICLPERM_FAULTS"):
        return
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not sys.platform.startswith("linux"):
        raise SystemExit("the fault machine needs Linux and a C compiler (cc)")
    digest = hashlib.sha256(SHIM.read_bytes()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"iclperm-faults-{os.getuid()}-{digest}.so"
    if not library.exists():
        made = library.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", made, SHIM, "-ldl"], check=True)
        made.replace(library)
    environment = {
        **os.environ,
        "ICLPERM_FAULTS": "1",
        "LD_PRELOAD": " ".join(filter(None, [str(library), os.environ.get("LD_PRELOAD")])),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "MPLBACKEND": "agg",
    }
    os.execve(sys.executable, [sys.executable, *arguments], environment)


def started(
    work: Callable[[], int | None], root: Path, scratch: Path, fault: Fault = NONE, *, name: str = "child"
) -> Child:
    """A process that does this work; the fault counts what happens below ``root``. What it says goes to ``scratch``."""
    assert threading.active_count() == 1, "a process of several threads cannot be forked safely"
    names = {what: scratch / f"{name}.{what}" for what in ("out", "err", "log", "calls")}
    sys.stdout.flush()
    sys.stderr.flush()
    begin = time.monotonic()
    if pid := os.fork():
        return Child(pid, begin, names)
    code = 99
    try:
        os.setpgid(0, 0)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        for descriptor, what in ((1, "out"), (2, "err")):
            os.dup2(os.open(names[what], flags, 0o600), descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        log, calls = os.open(names["log"], flags, 0o600), os.open(names["calls"], flags, 0o600)
        _limit()
        if fault.calls:
            _count_calls(fault.calls, calls)
        ctypes.CDLL(None).faults_arm(os.fsencode(root), fault.kinds, ctypes.c_long(fault.at), fault.how, log)
        code = int(work() or 0)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 98
    finally:
        sys.setprofile(None)
        ctypes.CDLL(None).faults_arm(b"/nowhere", 0, ctypes.c_long(-1), 0, -1)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@dataclass
class Child:
    """A process that was `started`."""

    pid: int
    begin: float
    names: dict[str, Path]

    def outcome(self, limit_s: float) -> Outcome:
        """Waits for its end, which comes by SIGKILL after ``limit_s`` seconds since its start.

        On a machine that gives it no processor it has more time, up to eight times as much: a program that is at work
        must have used so many processor seconds before it is said to hang.
        """
        handle = os.pidfd_open(self.pid)
        has_ended = False
        for share in range(1, _MOST_PATIENCE + 1):
            left = max(0.0, self.begin + share * limit_s - time.monotonic())
            has_ended = bool(select.select([handle], [], [], left)[0])
            if has_ended or _processor_seconds(self.pid) >= limit_s:
                break
        os.close(handle)
        self.end()
        _, status = os.waitpid(self.pid, 0)
        is_exit = os.WIFEXITED(status)
        lines = self._read("log").splitlines()
        return Outcome(
            os.WEXITSTATUS(status) if is_exit else None,
            0 if is_exit else os.WTERMSIG(status),
            self._read("out"),
            self._read("err"),
            time.monotonic() - self.begin,
            not has_ended,
            [line.partition(" ")[2] for line in lines if line.startswith("op ")],
            sorted({line.split(" ", 3)[3] for line in lines if line.startswith("outside ")}),
            int(self._read("calls") or 0),
        )

    def end(self) -> None:
        """Kills it and what it started."""
        with suppress(ProcessLookupError):  # it has ended, or has not begun yet
            os.killpg(self.pid, signal.SIGKILL)

    def _read(self, what: str) -> str:
        path = self.names[what]
        return path.read_text(errors="replace") if path.exists() else ""


def _processor_seconds(pid: int) -> float:
    """What a process that has not been waited for has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def run(
    work: Callable[[], int | None], root: Path, scratch: Path, fault: Fault = NONE, *, limit_s: float = 60.0
) -> Outcome:
    """As `started`, to its end."""
    outcome = started(work, root, scratch, fault).outcome(limit_s)
    besides = map(os.environ.get, ("XDG_STATE_HOME", "XDG_CACHE_HOME"))  # what users keep beside any run
    allowed = (*_NOBODYS, *filter(None, besides))
    outcome.outside = [path for path in outcome.outside if not path.startswith(allowed)]
    return outcome


def _limit() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _count_calls(most: int, to: int) -> None:
    """Ends this process at its call of number ``most`` of a Python function; only counts where that is negative."""
    count = 0

    def called(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        if event == "call":
            count += 1
            if count == most:
                os.kill(os.getpid(), signal.SIGKILL)
        elif event == "c_call" and most < 0 and getattr(_argument, "__name__", "") == "setprofile":
            os.write(to, str(count).encode())

    sys.setprofile(called)
