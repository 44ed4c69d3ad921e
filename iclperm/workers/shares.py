"""Which part each worker is given next. Numbers alone: no processes, no clocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence

_DEAR = 2.0  # times the mean


class Shares:
    """The parts of a run, dealt out to workers one at a time.

    ``costs`` are what parts are predicted to take, in any one unit: all the same unless given. Those that are more than
    twice the mean go first, the dearest before all, so that none of them is begun when the others end.

    Other parts that follow each other share the beginnings of prompts, so each worker has a stretch of its own and
    takes it from the front. Whoever has none left takes over the stretch of a worker that was lost, else the rear half,
    by cost, of what will take longest. When no part is waiting, one that is being answered is given to a second worker,
    and the first answer counts. What was given to a worker that is lost comes back.
    """

    def __init__(self, parts: Sequence[int], costs: Mapping[int, float] | None = None) -> None:
        self._costs = costs or dict.fromkeys(parts, 1.0)
        limit = _DEAR * sum(self._costs[part] for part in parts) / max(1, len(parts))
        dear = (part for part in parts if self._costs[part] > limit)
        self._dear = deque(sorted(dear, key=self._costs.__getitem__, reverse=True))
        self._stretches: dict[Hashable, deque[int]] = {}  # none is empty; that of None is nobody's
        self._keep(None, deque(part for part in parts if self._costs[part] <= limit))
        self._given: dict[int, set[Hashable]] = {}
        self._uncopied: dict[int, None] = {}  # those of the given that one worker has, in the order of giving

    @property
    def is_done(self) -> bool:
        """Whether every part was answered or dropped."""
        return not (self._given or self._dear or self._stretches)

    def next(self, worker: Hashable) -> int | None:
        """The part that a worker without one is to answer; None where there is nothing for it now."""
        if self._dear:
            return self._give(self._dear.popleft(), worker)
        if self._stretches:
            stretch = self._stretches.pop(worker, None) or self._stretches.pop(None, None) or self._rear_half()
            part = stretch.popleft()
            self._keep(worker, stretch)
            return self._give(part, worker)
        for part in self._uncopied:
            if worker not in self._given[part]:
                self._given[part].add(worker)
                del self._uncopied[part]
                return part
        return None

    def drop(self, part: int) -> None:
        """Forgets a part that was just given out, because another process answers it."""
        self.answered(part)

    def answered(self, part: int) -> bool:
        """Whether this is the first answer of a part that is wanted; forgets the part."""
        self._uncopied.pop(part, None)
        return self._given.pop(part, None) is not None

    def lost(self, worker: Hashable) -> list[int]:
        """Takes back what a worker had; returns the parts of these that nobody answers now."""
        back = [part for part, workers in self._given.items() if workers == {worker}]
        for part in back:
            self.answered(part)
        for part, workers in self._given.items():
            if worker in workers:
                workers.remove(worker)
                self._uncopied[part] = None
        self._keep(None, deque([*back, *self._stretches.pop(worker, ()), *self._stretches.pop(None, ())]))
        return back

    def _give(self, part: int, worker: Hashable) -> int:
        self._given[part] = {worker}
        self._uncopied[part] = None
        return part

    def _keep(self, worker: Hashable, stretch: deque[int]) -> None:
        if stretch:
            self._stretches[worker] = stretch

    def _rear_half(self) -> deque[int]:
        """Cut off from what will take longest; O(parts that wait)."""

        def cost(worker: Hashable) -> float:
            return sum(self._costs[part] for part in self._stretches[worker])

        owner = max(self._stretches, key=cost)
        left, whole, rear = cost(owner) / 2, self._stretches.pop(owner), deque[int]()
        while whole and left > 0:
            rear.appendleft(whole.pop())
            left -= self._costs[rear[0]]
        self._keep(owner, whole)
        return rear
