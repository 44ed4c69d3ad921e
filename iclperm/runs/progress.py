"""How far a run is while it computes: told part by part, and by a thread while one thing takes long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

Progress = Callable[[int, int], None]
"""Called with the numbers of finished parts and of all parts: once the model is loaded, and after each part."""
READING, TOKENISING, LOADING, ANSWERING, DECIDING, FINISHING = (
    "reading data",
    "tokenising",
    "loading the model",
    "scoring",
    "deciding what to ask",
    "reading results",
)
"""The stages of a run; texts are generated in the fourth, too. An adaptive one decides and answers by turns."""


@dataclass(frozen=True)
class Advance:
    """How far a run is. Numbers are those of this process, but parts are those that any has finished."""

    model: str
    """The last part of its path or hub id."""
    task: str
    stage: str
    """What is being done: one of `STAGES`."""
    seconds: float
    """Since this stage began."""
    num_parts_done: int = 0
    num_parts: int = 0
    """0 before it is known."""
    tokens: int = 0
    """Forwarded, or paid to an API, so far."""
    tokens_wanted: int | None = None
    """About how many this process is to forward if no other one helps; None where that is not known, as the lengths of
    answers that are generated are not."""
    num_parts_before: int = 0
    """Parts that were there when this process began."""
    wave: int = 0
    """Of a run in waves, the one that is answered, from 1: tokens and time are its own, and how many follow nobody
    knows; 0 of any other run."""

    @property
    def share(self) -> float:
        """How much of this process's work is done, 0 to 1: by parts, or by tokens where these say more."""
        left = self.num_parts - self.num_parts_before
        by_parts = (self.num_parts_done - self.num_parts_before) / left if left > 0 else 0.0
        by_tokens = min(self.tokens / self.tokens_wanted, 0.999) if self.tokens_wanted else 0.0
        return max(by_parts, by_tokens)

    @property
    def seconds_left(self) -> float | None:
        """At the speed so far; None before anything is known of it."""
        return self.seconds * (1 / self.share - 1) if self.share > 0 else None


STAGES = (READING, TOKENISING, LOADING, ANSWERING, DECIDING, FINISHING)


@runtime_checkable
class Watcher(Protocol):
    """What is told how far a run is. It may be called from another thread, but never by two at once."""

    @property
    def interval(self) -> float:
        """Seconds after which it is told even if nothing has changed."""
        ...

    def show(self, advance: Advance) -> None:
        """Called when a stage begins, when a part is finished, and every ``interval``."""
        ...


class RunWatch:
    """What a run tells its watcher, or its function of finished parts; within, a thread tells what takes long.

    Whatever the watcher raises in the thread is raised where the run next tells something, or ends.
    """

    def __init__(self, given: Progress | Watcher | None, model: str, task: str) -> None:
        self._watcher = given if isinstance(given, Watcher) else None
        self._called = None if given is None or isinstance(given, Watcher) else given
        self._advance = Advance(model, task, READING, 0.0)
        self._began = time.monotonic()
        self._tokens: Callable[[], int] | None = None
        self._turn = threading.Lock()
        self._is_over = threading.Event()
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        if self._watcher is not None:
            self._tell()
            self._thread = threading.Thread(target=self._look, args=(self._watcher.interval,), daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        if self._watcher is not None:
            self._thread.join()
        if error is None and self._error is not None:
            raise self._error

    @property
    def parts_told(self) -> tuple[int, int]:
        """Finished parts and all parts, as they were last told; 0 of 0 before answering begins."""
        return self._advance.num_parts_done, self._advance.num_parts

    def begin(self, stage: str) -> None:
        """Says that a stage begins."""
        with self._turn:
            self._began, self._tokens = time.monotonic(), None
            self._advance = replace(self._advance, stage=stage)
        self._tell()

    def answer(self, tokens: Callable[[], int], wanted: int | None, done: int, total: int, wave: int = 0) -> None:
        """Says that answering, or a ``wave`` of it, begins: ``tokens`` counts those so far, and is called from the
        thread, too."""
        before = tokens()
        with self._turn:
            self._began, self._tokens = time.monotonic(), lambda: tokens() - before
            self._advance = replace(
                self._advance, stage=ANSWERING, tokens_wanted=wanted, num_parts=total, num_parts_before=done, wave=wave
            )
        self.parts(done, total)

    def parts(self, done: int, total: int) -> None:
        """Says how many parts are finished."""
        with self._turn:
            self._advance = replace(self._advance, num_parts_done=done, num_parts=total)
        if self._called is not None:
            self._called(done, total)
        self._tell()

    def _tell(self) -> None:
        if self._error is not None:
            raise self._error
        if self._watcher is None:
            return
        with self._turn:
            tokens = self._advance.tokens if self._tokens is None else self._tokens()
            self._advance = replace(self._advance, tokens=tokens, seconds=time.monotonic() - self._began)
            self._watcher.show(self._advance)

    def _look(self, interval: float) -> None:
        while not self._is_over.wait(interval):
            try:
                self._tell()
            except BaseException as error:
                self._error = error
                return
