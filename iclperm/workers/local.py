"""Workers on this machine: a process a GPU, or a group of cores each."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from iclperm.base.environment import cores
from iclperm.errors import ConfigError
from iclperm.study.sizes import parse_budget
from iclperm.study.study import Study
from iclperm.workers.driver import PoolOf
from iclperm.workers.environment import worker_environment
from iclperm.workers.messages import Pipe
from iclperm.workers.pool import Pool

_LAST_WORDS = 4096
_SECONDS_TO_END = 10.0


@dataclass(frozen=True)
class Place:
    """Where a worker runs: the cores it keeps to (any where there are none), and what its environment says."""

    cores: Sequence[int] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def local_workers(count: int, *, is_mixed: bool) -> PoolOf[list[Place]]:
    """Makes so many workers on this machine for the runs of studies; raises as `places` does."""

    def pool(found: list[Place]) -> Pool:
        return Pool(len(found), lambda number: MemberProcess(found[number]))

    return PoolOf(lambda work: places(count, work.setting.study), pool, is_mixed=is_mixed)


class MemberProcess:
    """A worker's process and the pipe to it."""

    def __init__(self, place: Place) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (its last line says why the process ended)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "iclperm.workers.member", str(theirs.fileno()),
                 ",".join(map(str, place.cores))],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
                process_group=0,
                env=worker_environment(place.variables),
            )  # fmt: skip
        self._pipe = Pipe(ours)

    def send(self, message: bytes) -> None:
        """Raises `OSError` where the process is gone."""
        self._pipe.send(message)

    def receive(self) -> bytes | None:
        """The next message; None where the process is gone."""
        return self._pipe.receive()

    def why(self) -> str:
        """Why a process that is gone has ended."""
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_SECONDS_TO_END)
            if code < 0:
                name = signal.Signals(-code).name
                return f"killed by {name}" + (" (memory may have run out)" if name == "SIGKILL" else "")
            self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _LAST_WORDS))
            lines = self._errors.read().decode(errors="replace").split("\n")
            return next((line.strip() for line in reversed(lines) if line.strip()), f"it ended with code {code}")
        return "it closed its pipe"

    def close(self) -> None:
        """Ends the process at once."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()
        self._errors.close()


def places(count: int, study: Study) -> list[Place]:
    """Where so many workers for the model of a study run on this machine.

    With GPUs each has one of its own; else the cores that this process may use are dealt out in equal groups. Threads
    are OMP_NUM_THREADS where that is set, else as many as there are cores for each. Raises `ConfigError` for a count
    under 1 or over the number of GPUs, a device that names one GPU or all, and a memory budget that is a share.
    """
    from iclperm.engine.load import gpus

    if count < 1:
        raise ConfigError(f"workers is {count}; give a whole number from 1 on")
    refuse_devices(study)
    own = cores()
    groups = core_groups(own, count, os.environ.get("OMP_NUM_THREADS"))
    devices = [] if study.device == "cpu" else gpus()
    if not devices:
        refuse_shares(study)
        if count > len(own):
            warnings.warn(
                f"{count} workers share {len(own)} cores, each with a model of its own in memory; {len(own)} are "
                "as fast",
                stacklevel=2,
            )
        return groups
    if count > len(devices):
        raise ConfigError(f"workers is {count}, but there are {len(devices)} GPUs; give one a GPU at most")
    return [
        Place(place.cores, {**place.variables, "CUDA_VISIBLE_DEVICES": device})
        for place, device in zip(groups, devices, strict=False)
    ]


def core_groups(own: Sequence[int], count: int, threads: str | None) -> list[Place]:
    """Cores in ``count`` groups of one size, as far as they suffice; ``threads`` are those of each, where given."""
    share = max(1, len(own) // count)
    number = number_of(threads) or share
    fits = number <= share and count * share <= len(own) and hasattr(os, "sched_setaffinity")
    return [
        Place(own[worker * share : (worker + 1) * share] if fits else (), thread_variables(number))
        for worker in range(count)
    ]


def number_of(threads: str | None) -> int:
    """The threads that a value of OMP_NUM_THREADS asks for; 0 where it asks for none."""
    given = (threads or "").split(",")[0].strip()
    return int(given) if given.isdigit() else 0


def thread_variables(number: int) -> dict[str, str]:
    """What has libraries use so many threads, once they are loaded."""
    return {"OMP_NUM_THREADS": str(number), "MKL_NUM_THREADS": str(number), "OPENBLAS_NUM_THREADS": str(number)}


def refuse_devices(study: Study) -> None:
    """Raises `ConfigError` for a device that is not one for each worker."""
    if study.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device is {study.device!r}, and workers have a device each; give auto, cpu or cuda")


def refuse_shares(study: Study) -> None:
    """Raises `ConfigError` for a memory budget that is a share of what is free, which workers take from each other."""
    budget = study.memory_budget
    if budget is not None and isinstance(parse_budget(budget), float):
        raise ConfigError(
            f"memory_budget is {budget!r}, a share of what is free, and workers would take it from each other; give "
            "the bytes of one worker, as 4GiB"
        )
