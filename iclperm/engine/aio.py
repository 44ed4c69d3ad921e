"""An engine for asyncio: its verbs run in a worker thread, and the event loop goes on."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from iclperm.engine.executor import Progress
from iclperm.engine.plan import ContextPaths
from iclperm.engine.scores import ScoreBlock, Scores
from iclperm.engine.texts import Generations
from iclperm.engine.tree import Ids
from iclperm.errors import RequestError

_T = TypeVar("_T")


class _Verbs(Protocol):
    """What an engine does."""

    @property
    def loglikelihood(self) -> Callable[..., Scores]: ...
    @property
    def score(self) -> Callable[..., npt.NDArray[np.float32]]: ...
    @property
    def generate(self) -> Callable[..., Generations]: ...
    @property
    def stream(self) -> Callable[..., Generator[ScoreBlock]]: ...


class AsyncEngine:
    """The verbs of an engine as coroutines: ``await engine.aio.score(...)``; arguments and results are theirs.

    One runs at a time, in one thread, in the order in which they were awaited. Where the task that awaits is cancelled,
    its call ends after the forward pass that runs now (the first-use check is not cut short), and is waited for.
    ``progress`` is called in the worker's thread.
    """

    def __init__(self, engine: _Verbs) -> None:
        self._engine = engine
        self._worker = ThreadPoolExecutor(1, "iclperm-engine")

    async def loglikelihood(
        self, requests: Sequence[tuple[str | Ids, str | Ids]], *, progress: Progress | None = None
    ) -> Scores:
        """As `Engine.loglikelihood`."""
        return await self.run(self._engine.loglikelihood, requests, progress=progress)

    async def score(
        self,
        contexts: Sequence[str | Ids] | ContextPaths,
        queries: Sequence[str | Ids],
        continuations: Sequence[Any],
        *,
        progress: Progress | None = None,
    ) -> npt.NDArray[np.float32]:
        """As `Engine.score`."""
        return await self.run(self._engine.score, contexts, queries, continuations, progress=progress)

    async def generate(
        self, contexts: Sequence[str | Ids], *args: Any, progress: Progress | None = None, **options: Any
    ) -> Generations:
        """As `Engine.generate`."""
        return await self.run(self._engine.generate, contexts, *args, progress=progress, **options)

    async def stream(
        self,
        contexts: Sequence[str | Ids] | ContextPaths,
        queries: Sequence[str | Ids],
        continuations: Sequence[Any],
        *,
        progress: Progress | None = None,
    ) -> AsyncIterator[ScoreBlock]:
        """As `Engine.stream`, for ``async for``; between blocks other verbs may run."""
        told = _Cancellable(progress)
        blocks = self._engine.stream(contexts, queries, continuations, progress=told)
        try:
            while (block := await self._done(partial(next, blocks, None), told)) is not None:
                yield block
        finally:
            await self._done(blocks.close, told)

    async def run(self, verb: Callable[..., _T], *args: Any, progress: Progress | None = None, **options: Any) -> _T:
        """Any verb that takes ``progress``, those of the engine's sessions too: ``run(session.score, ...)``."""
        told = _Cancellable(progress)
        return await self._done(partial(verb, *args, progress=told, **options), told)

    def close(self) -> None:
        """End the worker, when what it runs is done."""
        self._worker.shutdown()

    async def _done(self, call: Callable[[], _T], told: _Cancellable) -> _T:
        try:
            job = self._worker.submit(contextvars.copy_context().run, call)
        except RuntimeError:
            raise RequestError("the engine is closed; make another") from None
        done = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            told.is_cancelled = True
            done.add_done_callback(lambda each: each.cancelled() or each.exception())  # which is nobody's any more
            if not job.cancel():
                await asyncio.wait([done])
            raise


class _CancelledCall(Exception):
    """Ends a call that nobody awaits any more."""


class _Cancellable:
    """A call's progress, which ends it once it is cancelled."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self.is_cancelled = False

    def __call__(self, done: int, total: int) -> None:
        if self.is_cancelled:
            raise _CancelledCall
        if self._progress is not None:
            self._progress(done, total)
