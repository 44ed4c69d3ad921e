"""Workers on the machines of a Ray cluster: an actor each, behind it the same process as on one machine.

The actor only passes messages on, so that what crosses the cluster is bytes of ours, and the worker's environment is
`iclperm.workers.environment`'s: Ray's own variables, and any key of the machine, stay with the actor.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from iclperm.errors import ConfigError, printable
from iclperm.runs.work import Work
from iclperm.workers.driver import PoolOf
from iclperm.workers.local import MemberProcess, Place, number_of, refuse_devices, refuse_shares, thread_variables
from iclperm.workers.pool import Pool

_RAY: Any = ray  # whose types know no options of an actor, and leave out what lists nodes
_SECONDS_TO_CONNECT = 10.0
_AT_ONCE = 4  # calls of an actor: one speaks, one listens, one asks why it ended


class Relay:
    """The actor: a worker's process on the machine where Ray has put it, and messages to and from it."""

    def __init__(self, threads: int) -> None:
        self._process = MemberProcess(Place((), thread_variables(threads)))

    def send(self, message: bytes) -> None:
        """See `iclperm.workers.pool.Link`."""
        self._process.send(message)

    def receive(self) -> bytes | None:
        """See `iclperm.workers.pool.Link`."""
        return self._process.receive()

    def why(self) -> str:
        """See `iclperm.workers.pool.Link`."""
        return self._process.why()


class RayLink:
    """A worker behind an actor; it comes up as soon as the cluster has room for it."""

    def __init__(self, threads: int, num_gpus: int) -> None:
        options = {"num_cpus": threads, "num_gpus": num_gpus, "max_concurrency": _AT_ONCE, "max_restarts": 0}
        self._actor = _RAY.remote(**options)(Relay).remote(threads)
        self._trouble = ""

    def send(self, message: bytes) -> None:
        """Raises `RayError` where the worker or its machine is gone."""
        ray.get(self._actor.send.remote(message))

    def receive(self) -> bytes | None:
        """The next message; None where the worker or its machine is gone."""
        try:
            message: bytes | None = ray.get(self._actor.receive.remote())
        except RayError as error:
            said = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = f": {printable(said[-1])[:300]}" if said else ""
            self._trouble = (
                f"its actor is gone ({type(error).__name__}{reason}); iclperm, of one version, must be installed on "
                "every node"
            )
            return None
        return message

    def why(self) -> str:
        """Why a worker that is gone has ended."""
        with suppress(RayError):
            return self._trouble or str(ray.get(self._actor.why.remote()))
        return "its actor is gone"

    def close(self) -> None:
        """Ends the actor, and with it the worker's process."""
        with suppress(RayError):
            ray.kill(self._actor)


@dataclass(frozen=True)
class Room:
    """How many workers a cluster has room for, and what each takes."""

    count: int
    threads: int
    num_gpus: int


class RayPools(PoolOf[Room]):
    """Makes workers in the cluster at an address; the connection to it ends with them, if it was made for them."""

    def __init__(self, count: int | None, address: str, *, is_mixed: bool) -> None:
        super().__init__(self._room, _pool, is_mixed=is_mixed, wants_digest=True)
        self._count = count
        self._address = address
        self._is_connected = False

    def close(self) -> None:
        """Ends all workers at once; may be called again."""
        super().close()
        if self._is_connected:
            ray.shutdown()
            self._is_connected = False

    def _room(self, work: Work) -> Room:
        study = work.setting.study
        refuse_devices(study)
        if not self._is_connected:
            self._is_connected = connect(self._address)
        wants = {"cpu": False, "cuda": True}  # auto: what the cluster has now; nodes with GPUs may join later
        has_gpus = wants.get(study.device, bool(_RAY.cluster_resources().get("GPU")))
        if not has_gpus:
            refuse_shares(study)
        count, threads = actors(_RAY.nodes(), self._count, os.environ.get("OMP_NUM_THREADS"), has_gpus=has_gpus)
        return Room(count, threads, int(has_gpus))


def _pool(room: Room) -> Pool:
    return Pool(room.count, lambda _: RayLink(room.threads, room.num_gpus))


def connect(address: str) -> bool:
    """Connects this process to a cluster; False where it is connected already, and stays so afterwards.

    Raises `ConfigError` where there is none.
    """
    if ray.is_initialized():
        return False
    _refuse_unreachable(address)
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"there is no Ray cluster at {address!r} ({str(error).splitlines()[0]}); start one with `ray "
            "start --head`, or give its address"
        ) from None
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)  # Ray's own would end a run without a word
    return True


def _refuse_unreachable(address: str) -> None:
    """Raises `ConfigError` where nobody listens at a host and port; Ray itself would try for minutes without a word."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _SECONDS_TO_CONNECT).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(
            f"nobody answers at {address!r} ({error}); give the address that `ray start --head` has printed there"
        ) from None


def actors(nodes: list[dict[str, Any]], count: int | None, threads: str | None, *, has_gpus: bool) -> tuple[int, int]:
    """How many workers, and with how many threads each, on nodes as Ray lists them.

    Unless told a worker a GPU, else a node; ``threads`` as in `iclperm.workers.local.core_groups`, else as many as let
    all workers find room at once. Raises `ConfigError` for a count under 1.
    """
    if count is not None and count < 1:
        raise ConfigError(f"workers is {count}; give a whole number from 1 on")
    there = [node["Resources"] for node in nodes if node["Alive"]]
    cores = [int(node.get("CPU", 0)) for node in there]
    gpus = sum(int(node.get("GPU", 0)) for node in there)
    wanted = count or (gpus if has_gpus else sum(map(bool, cores))) or 1
    if given := number_of(threads):
        return wanted, given
    most = max(cores, default=1)
    fitting = (each for each in range(most, 0, -1) if sum(there // each for there in cores) >= wanted)
    return wanted, next(fitting, 1)
