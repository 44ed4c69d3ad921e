"""When requests may go out: how many at once, how long after a failure, and not beyond the budget."""

from __future__ import annotations

import asyncio
import heapq
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from itertools import count

from iclperm.errors import RunStopped
from iclperm.study.endpoint import Spent

_LONGEST_WAIT_S = 86_400.0  # as long as a deadline can be


@dataclass(frozen=True)
class Pace:
    """How long a retry waits where the server does not say: a random share of ``first_s`` seconds, doubled with each
    attempt up to ``most_s``."""

    first_s: float = 1.0
    most_s: float = 30.0
    random: Callable[[], float] = random.random

    def wait(self, attempt: int) -> float:
        """Seconds to wait after an attempt; the first is number 1."""
        return self.random() * min(self.most_s, self.first_s * 2.0 ** min(attempt - 1, 30))


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds that a server's headers ask to wait, given as milliseconds, seconds or a date, a day at most; None where
    they do not, or in no form that there is."""
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * unit
        except ValueError:
            continue
        if math.isfinite(seconds):
            return min(max(0.0, seconds), _LONGEST_WAIT_S)
    try:
        seconds = parsedate_to_datetime(headers.get("retry-after", "")).timestamp() - now
    except (TypeError, ValueError, OverflowError, IndexError, AttributeError):  # what the parser trips over
        return None
    return min(max(0.0, seconds), _LONGEST_WAIT_S)


class Watch:
    """A request's deadline, some seconds from now; time spent waiting for its turn is added to it."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds

    def add(self, seconds: float) -> None:
        """Puts the deadline off."""
        self._ends += seconds

    def has_time_for(self, seconds: float) -> bool:
        """Whether something that takes so many seconds can end before the deadline."""
        return time.monotonic() + seconds <= self._ends


class Window:
    """How many requests may be out at once.

    It begins at one, so that a wrong key or an unknown parameter is found out by a single request, and grows by one
    with each reply, up to ``most``. When the server first says that it has too much to do, the size is halved; from
    then on it grows by one for each window full of replies.
    """

    def __init__(self, most: int) -> None:
        self.size = 1.0
        self._most = most
        self._has_been_refused = False
        self._newest = self._halved_at = -1

    def ticket(self) -> int:
        """The number of a request that is sent now."""
        self._newest += 1
        return self._newest

    def grow(self) -> None:
        """A reply has arrived."""
        self.size = min(self._most, self.size + (1.0 / self.size if self._has_been_refused else 1.0))

    def shrink(self, ticket: int) -> None:
        """The server refused the request with this ticket; counts once for all that were out together."""
        self._has_been_refused = True
        if ticket > self._halved_at:
            self.size = max(1.0, self.size / 2)
            self._halved_at = self._newest


@dataclass(order=True)
class _Waiting:
    rank: int
    number: int
    bound: Spent = field(compare=False)
    admitted: asyncio.Future[int] = field(compare=False)


class Gate:
    """Admits requests in order of rank: as many as the window has room for, none that could exceed the budget.

    ``overspent`` is called with what is reserved, the upper bounds of all admitted requests and the next, and returns
    which budget that would exceed, or None. A gate belongs to one event loop.
    """

    def __init__(self, window: Window, overspent: Callable[[Spent], str | None]) -> None:
        self._window = window
        self._overspent = overspent
        self._queue: list[_Waiting] = []
        self._numbers = count()
        self._in_flight = 0
        self._reserved = Spent()
        self._closed_until = 0.0
        self._stopped: Exception | None = None
        self._is_stopping = asyncio.Event()

    async def enter(self, rank: int, bound: Spent) -> int:
        """Waits for this request's turn and returns its ticket; raises the error that the gate was stopped by."""
        admitted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, _Waiting(rank, next(self._numbers), bound, admitted))
        self._admit()
        return await admitted

    def leave(self, bound: Spent) -> None:
        """Gives back what `enter` reserved; the real cost is among what ``overspent`` adds."""
        self._in_flight -= 1
        self._reserved -= bound
        self._admit()

    def throttled(self, ticket: int, seconds: float | None) -> None:
        """Admits fewer at once from now on, and none for ``seconds`` where the server asks for that."""
        self._window.shrink(ticket)
        if seconds:
            loop = asyncio.get_running_loop()
            self._closed_until = max(self._closed_until, loop.time() + seconds)
            loop.call_later(seconds, self._admit)

    def stop(self, error: Exception) -> None:
        """Nobody enters any more."""
        self._stopped = self._stopped or error
        self._is_stopping.set()
        self._admit()

    async def rest(self, seconds: float) -> None:
        """Sleeps, no longer than until the gate is stopped."""
        try:
            async with asyncio.timeout(seconds):
                await self._is_stopping.wait()
        except TimeoutError:
            return

    def _admit(self) -> None:
        while self._queue:
            if self._stopped is not None:
                heapq.heappop(self._queue).admitted.set_exception(self._stopped)
                continue
            if self._in_flight >= int(self._window.size) or asyncio.get_running_loop().time() < self._closed_until:
                return
            reserved = self._reserved + self._queue[0].bound
            problem = self._overspent(reserved)
            if problem is None:
                self._in_flight += 1
                self._reserved = reserved
                heapq.heappop(self._queue).admitted.set_result(self._window.ticket())
            elif self._in_flight:
                return  # what is in flight may cost less than is reserved for it
            else:
                self._stopped = RunStopped(problem)
                self._is_stopping.set()
