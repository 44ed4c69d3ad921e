"""Results as they come, progress, cancelling, asyncio, calls within calls; what is ended early leaves all usable."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import pytest
from test_engine import SMALL_PACKS, branching_requests, random_ids
from test_session import CONTEXTS, LABELS, QUERIES, slots
from zoo import ZOO

from iclperm.demo import model_path
from iclperm.engine import Engine, ScoreBlock, Session, plan_product
from iclperm.engine.packer import Packer
from iclperm.errors import RequestError

SMALL_UNITS: dict[str, Any] = {**SMALL_PACKS, "unit_tokens": 30}
RNG = np.random.default_rng(4)
STEM = random_ids(RNG, 20)
PARTS = (
    [STEM[: 2 * number] + random_ids(RNG, 6) for number in range(6)] + [STEM[:4], STEM[:4]],
    [[5, *random_ids(RNG, n)] for n in (0, 3, 8, 8)],
    [[7], [8, 9], [8, 10], [11]],
)


class Stopped(Exception):
    """What a callback raises to end a call."""


class Told:
    """A progress callback that keeps what it was told, and ends the call when it was told ``last`` times."""

    def __init__(self, last: int | None = None, error: type[BaseException] = Stopped) -> None:
        self.said: list[tuple[int, int]] = []
        self._last, self._error = last, error

    def __call__(self, done: int, total: int) -> None:
        self.said.append((done, total))
        if len(self.said) == self._last:
            raise self._error

    def assert_whole(self, tokens: int, *, is_bound: bool = False, may_rise: bool = False) -> None:
        """Every forward pass was told of, tokens rising to all there are; the total is known, or falls, or rises."""
        done, total = zip(*self.said, strict=True)
        assert len(done) > 2
        assert list(done) == sorted(done)
        assert done[-1] == total[-1] == tokens
        assert is_bound or max(total) <= tokens
        assert may_rise or min(total) >= tokens
        assert all(np.less_equal(done, total))


def whole_of(blocks: Iterator[ScoreBlock] | list[ScoreBlock], shape: tuple[int, ...]) -> Any:
    """Blocks put together; each pair in one of them."""
    found, count = np.full(shape, np.nan, np.float32), np.zeros(shape[:2], int)
    for block in blocks:
        assert block.logprob.shape == (len(block.contexts), len(block.queries), shape[2])
        found[np.ix_(block.contexts, block.queries)] = block.logprob
        count[np.ix_(block.contexts, block.queries)] += 1
    return found, count


@pytest.mark.parametrize("plain", [False, True])
def test_blocks_make_up_what_score_gives(plain: bool) -> None:
    engine = Engine(ZOO["llama"].build(), plain=plain, **SMALL_UNITS)
    expected = engine.score(*PARTS)
    report = engine.report
    blocks = list(engine.stream(*PARTS))
    assert len(blocks) > 3
    found, count = whole_of(blocks, expected.shape)
    np.testing.assert_array_equal(found, expected)
    assert (count == 1).all()
    assert engine.report.tokens_forwarded == report.tokens_forwarded
    assert list(engine.stream([], *PARTS[1:])) == list(engine.stream(PARTS[0], [], PARTS[2])) == []


def test_what_cannot_be_a_product_comes_last() -> None:
    engine = Engine.from_pretrained(model_path())
    contexts, labels = ["Article: a\nAnswer:", "Article: b\nAnswer: Wor", "Article: a\nAnswer:"], [" World", " Sports"]
    queries = [" x", "ld"]
    expected = engine.score(contexts, queries, labels)
    told = Told()
    blocks = list(engine.stream(contexts, queries, labels, progress=told))
    found, count = whole_of(blocks, expected.shape)
    np.testing.assert_array_equal(found, expected)
    assert (count == 1).all()
    assert told.said[0][1] == told.said[-1][1] == engine.report.tokens_forwarded


def test_a_stream_that_is_closed_has_run_no_more_than_was_taken() -> None:
    engine = Engine(ZOO["llama"].build(), **SMALL_UNITS)
    expected = engine.score(*PARTS)
    whole, before = engine.report.tokens_forwarded, engine.totals.tokens_forwarded
    blocks = engine.stream(*PARTS)
    next(blocks)
    first = next(blocks)
    blocks.close()
    assert 0 < engine.report.tokens_forwarded < whole
    assert engine.totals.tokens_forwarded == before + engine.report.tokens_forwarded
    np.testing.assert_array_equal(first.logprob, expected[np.ix_(first.contexts, first.queries)])
    np.testing.assert_array_equal(engine.score(*PARTS), expected)


def test_what_was_streamed_outlives_an_interrupt() -> None:
    engine = Engine(ZOO["llama"].build(), **SMALL_UNITS)
    expected = engine.score(*PARTS)
    found = np.full(expected.shape, np.nan, np.float32)

    def fill() -> None:
        for block in engine.stream(*PARTS, progress=Told(4, KeyboardInterrupt)):
            found[np.ix_(block.contexts, block.queries)] = block.logprob

    with pytest.raises(KeyboardInterrupt):
        fill()
    is_there = ~np.isnan(found)
    assert 0 < is_there.sum() < found.size
    np.testing.assert_array_equal(found[is_there], expected[is_there])
    np.testing.assert_array_equal(engine.score(*PARTS), expected)


REQUESTS = branching_requests()
VERBS: dict[str, Callable[[Engine, Any], Any]] = {
    "score": lambda engine, progress: engine.score(*PARTS, progress=progress),
    "stream": lambda engine, progress: whole_of(engine.stream(*PARTS, progress=progress), (8, 4, 4))[0],
    "loglikelihood": lambda engine, progress: engine.loglikelihood(REQUESTS, progress=progress).logprob,
    "generate": lambda engine, progress: (
        engine.generate([context for context, _ in REQUESTS], max_new_tokens=5, progress=progress).logprob
    ),
}


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("verb", VERBS)
def test_verbs_tell_how_far_they_are_and_end_when_told_to(verb: str, plain: bool) -> None:
    model = ZOO["qwen2"].build()
    engine = Engine(model, plain=plain, **SMALL_UNITS)
    attributes = [sorted(vars(module)) for module in model.modules()]
    expected, told = VERBS[verb](engine, None), Told()
    np.testing.assert_array_equal(VERBS[verb](engine, told), expected)
    told.assert_whole(engine.report.tokens_forwarded, is_bound=verb == "generate")
    for error in (Stopped, KeyboardInterrupt):
        ended = Told(2, error)
        with pytest.raises(error):
            VERBS[verb](engine, ended)
        assert engine.report.tokens_forwarded == ended.said[-1][0] < told.said[-1][0]
        assert engine.report.progress is None
    np.testing.assert_array_equal(VERBS[verb](engine, None), expected)
    assert [sorted(vars(module)) for module in model.modules()] == attributes


SESSION_VERBS: dict[str, Callable[[Session, Any, Any], Any]] = {
    "loglikelihood": lambda session, nodes, progress: (
        session.loglikelihood([(node, [3, 4]) for node in nodes], progress=progress).logprob
    ),
    "loglikelihood_rolling": lambda session, nodes, progress: (
        session.loglikelihood_rolling(nodes, progress=progress).logprob
    ),
    "next_token": lambda session, nodes, progress: session.next_token(nodes, progress=progress).logprob,
    "next_token_logprobs": lambda session, nodes, progress: session.next_token_logprobs(nodes, progress=progress),
    "hidden_states": lambda session, nodes, progress: session.hidden_states(nodes, progress=progress),
    "generate": lambda session, nodes, progress: session.generate(nodes, 5, progress=progress).logprob,
    "by chance": lambda session, nodes, progress: (
        session.generate(nodes, 5, temperature=1.0, num_samples=2, progress=progress).logprob
    ),
}


@pytest.mark.parametrize("verb", SESSION_VERBS)
def test_verbs_of_sessions_tell_how_far_they_are_and_end_when_told_to(verb: str) -> None:
    engine = Engine(ZOO["llama"].build(), self_check=False)
    outs = []
    for ended in (None, Told(2)):
        with engine.session() as session:
            session._pack_tokens = 24
            nodes = [session.extend(None, context) for context in CONTEXTS]
            if ended is not None:
                with pytest.raises(Stopped):
                    SESSION_VERBS[verb](session, nodes, ended)
            told = Told()
            outs.append(np.asarray(SESSION_VERBS[verb](session, nodes, told)))
            if ended is None:
                told.assert_whole(engine.report.tokens_forwarded, is_bound=True, may_rise=True)
    np.testing.assert_array_equal(*outs)


def asked(session: Session, progress: Any = None) -> Any:
    nodes = [session.extend(None, context) for context in CONTEXTS]
    return session.score(nodes, QUERIES, LABELS, progress=progress)


@pytest.mark.parametrize("error", [Stopped, KeyboardInterrupt])
@pytest.mark.parametrize("room", [60, 1000])
def test_a_session_that_is_ended_early_stays_right(error: type[BaseException], room: int) -> None:
    engine = Engine(ZOO["llama"].build())
    expected = engine.score(CONTEXTS, QUERIES, LABELS)
    for last in (1, 3):
        with engine.session(memory_budget=slots(engine, room)) as session:
            session._pack_tokens = 16
            ended = Told(last, error)
            with pytest.raises(error):
                asked(session, ended)
            computed = ended.said[-1][0]
            assert session.num_resident == (0 if error is KeyboardInterrupt else min(computed, session.num_resident))
            told = Told()
            np.testing.assert_array_equal(asked(session, told), expected)
            if room == 1000:
                told.assert_whole(engine.report.tokens_forwarded, may_rise=True)
                assert session.num_resident == session.num_tokens
            if room == 1000 and error is Stopped:
                kept = session.num_tokens - engine.report.tokens_forwarded
                assert 0 <= kept <= computed, "what was computed is kept"


def fails(*_: Any) -> None:
    raise Stopped


def interrupts(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("how", [fails, interrupts])
def test_a_session_does_not_believe_in_a_pack_that_failed(how: Callable[..., None]) -> None:
    model = ZOO["llama"].build()
    engine = Engine(model)
    expected = engine.score(CONTEXTS, QUERIES, LABELS)
    with engine.session() as session:
        handle = model.model.layers[2].register_forward_hook(how)
        with pytest.raises((Stopped, KeyboardInterrupt)):
            asked(session)
        handle.remove()
        assert session.num_resident == 0
        np.testing.assert_array_equal(asked(session), expected)


def test_a_session_does_not_believe_in_a_pack_that_was_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(ZOO["llama"].build())
    expected = engine.score(CONTEXTS, QUERIES, LABELS)
    for how in (fails, interrupts):
        with engine.session() as session, monkeypatch.context() as patched:
            patched.setattr(Packer, "pack", how)  # after slots were given
            with pytest.raises((Stopped, KeyboardInterrupt)):
                asked(session)
            patched.undo()
            assert session.num_resident == 0
            np.testing.assert_array_equal(asked(session), expected)


def test_a_session_counts_what_prompting_would_take() -> None:
    engine = Engine(ZOO["llama"].build())
    engine.score(CONTEXTS, QUERIES, LABELS)
    naive = engine.report.tokens_naive
    with engine.session() as session:
        asked(session)
        assert engine.report.tokens_naive == naive
        node = session.extend(None, CONTEXTS[0])
        session.loglikelihood([(node, [3, 4, 5]), (node, [3, 4, 5]), (node, [6])])
        assert engine.report.tokens_naive == len(CONTEXTS[0]) + 2
        session.next_token([node, node])
        assert engine.report.tokens_naive == len(CONTEXTS[0])


def test_calls_within_calls_have_reports_of_their_own() -> None:
    model = ZOO["llama"].build()
    engine = Engine(model, **SMALL_PACKS)
    plan = plan_product(*PARTS, unit_tokens=30)
    seen: list[int] = []

    def nested(*_: Any) -> None:
        handle.remove()
        engine.loglikelihood([([1, 2, 3], [4, 5])])
        seen.append(engine.report.tokens_forwarded)

    results = engine.execute(plan)
    next(results)
    handle = model.lm_head.register_forward_hook(nested)
    next(results)
    assert seen == [4]
    assert engine.report.tokens_forwarded == 4, "that of the call that ended last"
    engine.loglikelihood([([1], [2])])
    assert engine.report.tokens_forwarded == 1
    list(results)
    assert engine.report.tokens_forwarded == engine.report.tokens_unique == plan.tokens
    assert engine.totals.tokens_forwarded == plan.tokens + 5
    held = engine.execute(plan)
    next(held)
    own = engine.report
    engine.loglikelihood([([1], [2])])
    held.close()  # type: ignore[attr-defined]
    assert engine.report is own
    assert engine.totals.tokens_forwarded == plan.tokens + 6 + own.tokens_forwarded


def test_a_closed_engine_frees_its_own_and_answers_no_more() -> None:
    with Engine.from_pretrained(model_path(), **SMALL_PACKS) as engine:
        held, session = weakref.ref(engine.model), engine.session()
        node = session.extend(None, "Article:")
        assert np.isfinite(session.score([node], [" a"], [" World"])).all()
        blocks = engine.stream(["Article:"], [" a", " b"], [" World"])
        next(blocks)
    blocks.close()
    with pytest.raises(RequestError, match="the engine is closed; make another"):
        engine.loglikelihood([("a", " b")])
    with pytest.raises(RequestError, match="the session, or its engine, is closed; open another"):
        session.score([node], [" a"], [" World"])
    assert engine.totals.tokens_forwarded > 0
    engine.close()
    del session, blocks
    assert held() is None, "the model that the engine loaded is gone with it, at once"


class Waiting:
    """A progress callback in whose call number ``at`` its thread waits until the event loop has gone on."""

    def __init__(self, at: int) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._at, self.num_told = at, 0

    def __call__(self, done: int, total: int) -> None:
        self.num_told += 1
        if self.num_told == self._at:
            self.reached.set()
            assert self.go_on.wait(60.0)

    async def until_reached(self) -> None:
        while not self.reached.is_set():
            await asyncio.sleep(0)


@contextmanager
def asynchronous() -> Iterator[tuple[Engine, Any]]:
    with Engine(ZOO["llama"].build(), **SMALL_UNITS) as engine:
        yield engine, engine.score(*PARTS)


def test_the_event_loop_goes_on_while_a_verb_runs() -> None:
    async def main() -> None:
        waiting, ticks = Waiting(3), 0
        task = asyncio.create_task(engine.aio.score(*PARTS, progress=waiting))
        while not waiting.reached.is_set():
            await asyncio.sleep(0)
        for _ in range(100):  # the worker is in the call, and stays in it
            await asyncio.sleep(0)
            ticks += 1
            assert not task.done()
        waiting.go_on.set()
        np.testing.assert_array_equal(await task, expected)
        assert ticks == 100

    with asynchronous() as (engine, expected):
        asyncio.run(main())


def test_verbs_are_awaited_in_turn_and_give_what_they_give() -> None:
    async def main() -> None:
        aio = engine.aio
        node = session.extend(None, CONTEXTS[0])
        both, some, likelihoods, texts, kept = await asyncio.gather(
            aio.score(*PARTS),
            aio.score(*PARTS),
            aio.loglikelihood(REQUESTS),
            aio.generate([[1, 2]], max_new_tokens=3),
            aio.run(session.score, [node], QUERIES, LABELS),
        )
        np.testing.assert_array_equal(both, expected)
        np.testing.assert_array_equal(some, expected)
        np.testing.assert_array_equal(likelihoods.logprob, engine.loglikelihood(REQUESTS).logprob)
        np.testing.assert_array_equal(texts.logprob, engine.generate([[1, 2]], 3).logprob)
        np.testing.assert_array_equal(kept, session.score([node], QUERIES, LABELS))
        blocks = [block async for block in aio.stream(*PARTS)]
        np.testing.assert_array_equal(whole_of(blocks, expected.shape)[0], expected)
        with pytest.raises(RequestError, match="out of range"):
            await aio.score([[1]], [[2]], [[100_000]])
        engine.close()
        with pytest.raises(RequestError, match="the engine is closed; make another"):
            await aio.run(session.score, [node], QUERIES, LABELS)

    with asynchronous() as (engine, expected), engine.session() as session:
        asyncio.run(main())


def test_a_task_that_is_cancelled_ends_its_call_and_leaves_the_engine_usable() -> None:
    async def main() -> None:
        waiting = Waiting(2)
        task = asyncio.create_task(engine.aio.score(*PARTS, progress=waiting))
        queued = asyncio.create_task(engine.aio.score(*PARTS, progress=lambda *_: pytest.fail("it was cancelled")))
        await waiting.until_reached()
        task.cancel()
        queued.cancel()
        await asyncio.sleep(0)
        waiting.go_on.set()
        for each in (task, queued):
            with pytest.raises(asyncio.CancelledError):
                await each
        assert waiting.num_told == 2, "it went on"
        np.testing.assert_array_equal(await engine.aio.score(*PARTS), expected)
        taken = 0
        blocks = cast(AsyncGenerator[ScoreBlock], engine.aio.stream(*PARTS))
        async for _ in blocks:
            taken += 1
            if taken == 2:
                break
        await blocks.aclose()
        assert 0 < engine.report.tokens_forwarded < whole
        np.testing.assert_array_equal(await engine.aio.score(*PARTS), expected)

    with asynchronous() as (engine, expected):
        whole = engine.report.tokens_forwarded
        asyncio.run(main())
