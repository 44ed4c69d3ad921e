"""The driver's side of workers: it starts them, deals out parts, gathers answers, and replaces those that are lost."""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any, Protocol

import pyarrow as pa

from iclperm import errors
from iclperm.errors import RunError, RunStopped
from iclperm.runs.answering import Asked, ModelUse
from iclperm.runs.scorers import Answered, Claims, enough_memory, libraries_of, rows_of
from iclperm.runs.work import Work
from iclperm.tasks.answers import Checker
from iclperm.workers.messages import packed, part_message, plan_message, unpacked
from iclperm.workers.shares import Shares

_MOST_LOSSES = 3  # for each worker, with no part finished between
_SECONDS_TO_START = 900.0


class Link(Protocol):
    """A worker as its driver reaches it; `send` and `receive` are called by a thread each."""

    def send(self, message: bytes) -> None:
        """Raises where the worker is gone."""
        ...

    def receive(self) -> bytes | None:
        """The next message; None where the worker is gone."""
        ...

    def why(self) -> str:
        """Why a worker that is gone has ended."""
        ...

    def close(self) -> None:
        """Ends the worker at once."""
        ...


@dataclass(eq=False)
class _Member:
    """A worker: ``number`` is its place in the pool, which the one that replaces it has, too."""

    number: int
    outbox: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)
    link: Link | None = None
    trouble: str = ""
    host: str = ""
    pid: int = 0
    numerics: dict[str, Any] | None = None
    """None before it is ready."""
    began: float = field(default_factory=time.monotonic)
    num_parts: int = 0
    tokens: int = 0
    is_lost: bool = False

    @property
    def name(self) -> str:
        where = f" ({self.host}, process {self.pid})" if self.host else ""
        return f"worker {self.number}{where}"


class Workers:
    """Answers a study by ``count`` workers; ``start`` makes the link to the one of a number, and may take long.

    ``wants_digest`` has each worker say what its model's files are, as those of other machines may be others. The first
    worker that is ready says by which numerics the run is computed; one that differs is refused, unless ``is_mixed``.
    """

    def __init__(
        self, work: Work, count: int, start: Callable[[int], Link], *, is_mixed: bool, wants_digest: bool = False
    ) -> None:
        self.libraries = libraries_of(work)
        self.replies: dict[str, int] = {}
        self._work = work
        self._count = count
        self._start = start
        self._is_mixed = is_mixed
        self._wants_digest = wants_digest
        self._inbox: queue.SimpleQueue[tuple[_Member, bytes | None]] = queue.SimpleQueue()
        self._members: list[_Member] = []
        self._all: list[_Member] = []
        self._idle: list[_Member] = []
        self._shares = Shares(())
        self._numerics: dict[str, Any] | None = None
        self._num_losses = 0
        self._setup: list[bytes] = []
        self._closing = threading.Lock()
        self._is_closed = False

    @property
    def numerics(self) -> dict[str, Any]:
        """Those of the first worker that is ready; starts them and waits for it."""
        self._begin()
        while self._numerics is None:
            self._next_answer()
        return self._numerics

    @property
    def tokens(self) -> int:
        """Forwarded by all workers, as they said with their last parts."""
        return sum(member.tokens for member in self._all)

    @property
    def workers(self) -> list[dict[str, Any]]:
        """See `iclperm.runs.scorers.Scorer`."""
        now = time.monotonic()
        return [
            {
                "name": f"worker {member.number}",
                "host": member.host,
                "pid": member.pid,
                "parts": member.num_parts,
                "seconds": round(now - member.began, 3),
                "lost": member.is_lost,
            }
            for member in self._all
            if member.host
        ]

    def tables(self, parts: Sequence[int], claims: Claims, checker: Checker | None) -> Generator[Answered]:
        """See `iclperm.runs.scorers.Scorer`. Parts come in the order in which they are answered."""
        self._begin()
        self._shares = Shares(parts)
        taken: set[int] = set()
        try:
            while True:
                self._deal(claims, taken)
                if self._shares.is_done:
                    return
                if (answer := self._next_answer()) is None:
                    continue
                member, part, said = answer
                if self._shares.answered(part):
                    self._num_losses = 0
                    member.num_parts += 1
                    self._deal(claims, taken)  # before the rows are made and written: nobody is to wait for that
                    assert member.numerics is not None
                    yield Answered(part, rows_of(self._work, part, said, checker), member.numerics)
                    taken.discard(part)
                    claims.release(part)
        finally:
            for part in taken:
                claims.release(part)

    def close(self) -> None:
        """Ends all workers at once."""
        with self._closing:
            self._is_closed = True
        members, self._members = self._members, []
        for member in members:
            self._end(member)

    def _begin(self) -> None:
        if not self._members:
            use = {"use": asdict(ModelUse.of(self._work.setting)), "wants_digest": self._wants_digest}
            products = self._work.products
            self._setup = [packed({"is": "load", **use, "num_plans": len(products)})]
            self._setup += [plan_message(self._work, product) for product in products]
            for number in range(self._count):
                self._members.append(self._launched(number))

    def _launched(self, number: int) -> _Member:
        member = _Member(number)
        self._all.append(member)
        threading.Thread(target=self._speak, args=(member,), daemon=True).start()
        return member

    def _speak(self, member: _Member) -> None:
        """Starts a worker and sends what is for it: in a thread, as either may take long."""
        try:
            link = self._start(member.number)
        except Exception as error:
            member.trouble = f"it cannot be started: {' '.join(str(error).split())}"
            self._inbox.put((member, None))
            return
        with self._closing:
            member.link = link
            is_late = self._is_closed
        if is_late:
            link.close()
            return
        threading.Thread(target=self._hear, args=(member, link), daemon=True).start()
        with suppress(Exception):  # that it is gone is heard
            for message in self._setup:
                link.send(message)
            while (given := member.outbox.get()) is not None:
                link.send(given)

    def _hear(self, member: _Member, link: Link) -> None:
        try:
            while (message := link.receive()) is not None:
                self._inbox.put((member, message))
        finally:
            self._inbox.put((member, None))

    def _end(self, member: _Member) -> None:
        member.outbox.put(None)
        if member.link is not None:
            member.link.close()

    def _deal(self, claims: Claims, taken: set[int]) -> None:
        """Gives each idle worker a part, as long as there are some."""
        waiting, self._idle = self._idle, []
        for member in waiting:
            while (part := self._shares.next(member)) is not None:
                if part in taken or claims.take(part):
                    taken.add(part)
                    member.outbox.put(part_message(Asked.of(self._work, part)))
                    break
                self._shares.drop(part)
            else:
                self._idle.append(member)

    def _next_answer(self) -> tuple[_Member, int, pa.Table] | None:
        """Waits for the next message of a worker; None where it is no answer.

        Raises what the worker raised, and `RunStopped` where workers are lost again and again, or none comes up.
        """
        is_none_up = not any(member.numerics for member in self._members)
        try:
            member, message = self._inbox.get(timeout=_SECONDS_TO_START if is_none_up else None)
        except queue.Empty:
            raise RunStopped(
                f"no worker came up within {_SECONDS_TO_START:.0f} seconds; see that there is room for one, then run "
                "the same command to continue"
            ) from None
        if member.is_lost:
            return None
        if message is None:
            self._replace(member)
            return None
        head, table = unpacked(message)
        if head["is"] == "failed":
            self._raise(member, head)
        if head["is"] == "ready":
            self._admit(member, head)
            return None
        assert table is not None
        member.tokens = head["tokens"]
        self._idle.append(member)
        return member, head["part"], table

    def _admit(self, member: _Member, head: dict[str, Any]) -> None:
        """Has a worker that is ready take part, unless its answers could be others."""
        member.host, member.pid, member.began = head["host"], head["pid"], time.monotonic()
        if problem := self._difference(head):
            self._members.remove(member)
            member.is_lost = True
            self._end(member)
            words = f"{member.name} is refused: {problem}"
            if not self._members:
                raise RunError(words)
            warnings.warn(words, stacklevel=2)
            return
        member.numerics = head["numerics"]
        if self._numerics is None:
            self._numerics = head["numerics"]
        self._idle.append(member)

    def _difference(self, head: dict[str, Any]) -> str:
        """Why a worker's answers could be others than those of this run; empty where they are the same."""
        if head["version"] != (ours := version("iclperm")):
            return f"it has iclperm {head['version']}, and this is {ours}; install the same there"
        if head["digest"] is not None and head["digest"] != self._work.setting.identity["hashes"]["model"]:
            return "the files of the model are others there; copy the same to all machines"
        for key, there in head["numerics"].items():
            here = there if self._numerics is None or self._is_mixed else self._numerics.get(key)
            if there != here:
                return (
                    f"its {key} is {there}, that of the first worker {here}, and results could differ in the last "
                    "bits; accept that with --mixed, or make them equal"
                )
        return ""

    def _raise(self, member: _Member, head: dict[str, Any]) -> None:
        """Raises the error that ended a worker."""
        with enough_memory(self._work):
            if head["error"] == "MemoryError":
                raise MemoryError(head["words"])
            kind = getattr(errors, head["error"], RunError)
            raise (kind if kind.__init__ is errors.IclpermError.__init__ else RunError)(
                f"{member.name}: {head['words']}"
            )

    def _replace(self, member: _Member) -> None:
        """Has another worker stand in for one that is lost; its part is done again."""
        why = member.trouble or (member.link.why() if member.link else "")
        member.is_lost = True
        self._end(member)
        self._shares.lost(member)
        if member in self._idle:
            self._idle.remove(member)
        self._num_losses += 1
        if self._num_losses > _MOST_LOSSES * self._count:
            raise RunStopped(
                f"{self._num_losses} workers were lost with no part finished between, the last of them {member.name}: "
                f"{why}; run the same command to continue"
            )
        self._members[self._members.index(member)] = self._launched(member.number)
