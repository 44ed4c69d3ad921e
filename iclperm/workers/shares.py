"""Which part each worker is given next. Numbers alone: no processes, no clocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable

_MOST_COPIES = 2


class Shares:
    """The parts of a run, dealt out to workers one at a time.

    Parts that follow each other share the beginnings of prompts, so each worker has a stretch of its own and takes it
    from the front. Whoever has none left takes over the stretch of a worker that was lost, else the rear half of the
    longest. When no part is waiting, one that is being answered is given to a second worker, and the first answer
    counts. What was given to a worker that is lost comes back.
    """

    def __init__(self, parts: Iterable[int]) -> None:
        self._stretches: dict[Hashable, deque[int]] = {None: deque(parts)}
        self._given: dict[int, list[Hashable]] = {}

    @property
    def is_done(self) -> bool:
        """Whether every part was answered or dropped."""
        return not self._given and not any(self._stretches.values())

    def next(self, worker: Hashable) -> int | None:
        """The part that a worker without one is to answer; None where there is nothing for it now."""
        if not self._stretches.get(worker):
            self._take_over(worker)
        if stretch := self._stretches.get(worker):
            part = stretch.popleft()
            self._given[part] = [worker]
            return part
        for part, workers in self._given.items():  # the one that was given out first
            if worker not in workers and len(workers) < _MOST_COPIES:
                workers.append(worker)
                return part
        return None

    def drop(self, part: int) -> None:
        """Forgets a part that was just given out, because another process answers it."""
        self._given.pop(part, None)

    def answered(self, part: int) -> bool:
        """Whether this is the first answer of a part that is wanted; forgets the part."""
        return self._given.pop(part, None) is not None

    def lost(self, worker: Hashable) -> list[int]:
        """Takes back what a worker had; returns the parts of these that nobody answers now."""
        back = [part for part, workers in self._given.items() if workers == [worker]]
        for part in back:
            del self._given[part]
        for workers in self._given.values():
            if worker in workers:
                workers.remove(worker)
        stretch = self._stretches.pop(worker, deque())
        stretch.extendleft(reversed(back))
        orphaned = self._stretches.setdefault(None, deque())
        orphaned.extendleft(reversed(stretch))
        return back

    def _take_over(self, worker: Hashable) -> None:
        if orphaned := self._stretches.get(None):
            self._stretches[worker], self._stretches[None] = orphaned, deque()
            return
        longest = max(self._stretches.values(), key=len, default=deque[int]())
        rear = deque(longest.pop() for _ in range((len(longest) + 1) // 2))
        rear.reverse()
        self._stretches[worker] = rear
