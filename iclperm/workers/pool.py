"""Workers that outlive a run: they are started, told of one run after the other, replaced when lost, and ended."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol


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
class Member:
    """A worker: ``number`` is its place in the pool, which the one that replaces it has, too."""

    number: int
    outbox: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)
    link: Link | None = None
    trouble: str = ""
    host: str = ""
    pid: int = 0
    is_lost: bool = False
    numerics: dict[str, Any] | None = None
    """None before it is ready for the run; this and what follows is of one run."""
    is_refused: bool = False
    began: float = field(default_factory=time.monotonic)
    num_parts: int = 0
    tokens: int = 0

    @property
    def name(self) -> str:
        where = f" ({self.host}, process {self.pid})" if self.host else ""
        return f"worker {self.number}{where}"

    def why(self) -> str:
        """Why it is gone."""
        return self.trouble or (self.link.why() if self.link else "")

    def forget_run(self) -> None:
        """As before its first run."""
        self.numerics, self.is_refused, self.num_parts, self.tokens = None, False, 0, 0
        self.began = time.monotonic()


class Pool:
    """``count`` workers; ``start`` makes the link to the one of a number, and may take long.

    They keep the model that they have loaded from one run to the next.
    """

    def __init__(self, count: int, start: Callable[[int], Link]) -> None:
        self.count = count
        self.members: list[Member] = []
        self.run = 0
        self._start = start
        self._setup: Sequence[bytes] = ()
        self._inbox: queue.SimpleQueue[tuple[Member, bytes | None]] = queue.SimpleQueue()
        self._links = threading.Lock()
        self._is_closed = False

    def begin(self, setup: Callable[[int], Sequence[bytes]]) -> None:
        """Has all workers turn to another run, of which the messages tell that are made for its number."""
        self.run += 1
        self._setup = setup(self.run)
        for place, member in enumerate(self.members):
            if member.is_lost:
                self.members[place] = self._launched(member.number)
                continue
            member.forget_run()
            with self._links:
                if member.link is None:  # it has not begun, and need not hear of the run before
                    member.outbox = queue.SimpleQueue()
                for message in self._setup:
                    member.outbox.put(message)
        for number in range(len(self.members), self.count):
            self.members.append(self._launched(number))

    def next(self, timeout: float | None) -> tuple[Member, bytes | None]:
        """The next message of a worker, be it of a run before; None where it is gone. Raises `queue.Empty`."""
        return self._inbox.get(timeout=timeout)

    def end(self, member: Member) -> None:
        """Ends a worker; what it says from now on counts nothing."""
        member.is_lost = True
        member.outbox.put(None)
        if member.link is not None:
            member.link.close()

    def replace(self, member: Member) -> Member:
        """Ends a worker, and starts another in its place for the same run."""
        self.end(member)
        other = self._launched(member.number)
        self.members[self.members.index(member)] = other
        return other

    def close(self) -> None:
        """Ends all workers at once; may be called again."""
        with self._links:
            self._is_closed = True
        members, self.members = self.members, []
        for member in members:
            self.end(member)

    def _launched(self, number: int) -> Member:
        member = Member(number)
        for message in self._setup:
            member.outbox.put(message)
        threading.Thread(target=self._speak, args=(member,), daemon=True).start()
        return member

    def _speak(self, member: Member) -> None:
        """Starts a worker and sends what is for it: in a thread, as either may take long."""
        try:
            link = self._start(member.number)
        except Exception as error:
            member.trouble = f"it cannot be started: {' '.join(str(error).split())}"
            self._inbox.put((member, None))
            return
        with self._links:
            member.link = link
            is_late = self._is_closed or member.is_lost
        if is_late:
            link.close()
            return
        threading.Thread(target=self._hear, args=(member, link), daemon=True).start()
        with suppress(Exception):  # that it is gone is heard
            while (given := member.outbox.get()) is not None:
                link.send(given)

    def _hear(self, member: Member, link: Link) -> None:
        try:
            while (message := link.receive()) is not None:
                self._inbox.put((member, message))
        finally:
            self._inbox.put((member, None))
