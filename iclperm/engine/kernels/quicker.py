"""Which of two ways to the same bits is the quicker one, found out where it matters: by their first calls in a run.

A kernel's speed depends on processor, library, shape, threads, and on where the numbers lie, which no rule written down
beforehand knows. Since every bit is the same, so is every result, whichever way is taken.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable
from typing import TypeVar

_Result = TypeVar("_Result")
TRIES = 7
"""Calls of each way before one is chosen by its median, as some calls are held up by others."""


class Quicker:
    """The choices made so far, one a key, for the life of a process. Cost: until one is made, calls of slower ways.

    Several threads may ask at once, as engines of one model do.
    """

    def __init__(self) -> None:
        self._seconds: dict[Hashable, tuple[list[float], ...]] = {}  # of either way, until one is chosen
        self._chosen: dict[Hashable, int] = {}
        self._num_tried = 0

    def run(self, key: Hashable, *ways: Callable[[], _Result]) -> _Result:
        """What the ways give, by the quicker one of those of this key: they are tried in turns before it is chosen."""
        if (chosen := self._chosen.get(key)) is not None:
            return ways[chosen]()
        seconds = self._seconds.setdefault(key, tuple([] for _ in ways))
        number = min(range(len(ways)), key=lambda way: len(seconds[way]))
        before, started = self._num_tried, time.perf_counter()
        result = ways[number]()
        taken = time.perf_counter() - started
        if self._num_tried == before:  # else a slower way of something within may have been tried
            seconds[number].append(taken)
        self._num_tried += 1
        if min(map(len, seconds)) >= TRIES:
            self._chosen[key] = min(range(len(ways)), key=lambda way: statistics.median(seconds[way]))
            self._seconds.pop(key, None)
        return result
