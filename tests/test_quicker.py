"""The quicker one of two ways is taken once both were tried, and what they give is given either way."""

import sys
import threading

import pytest

from iclperm.engine.kernels import quicker
from iclperm.engine.kernels.quicker import TRIES, Quicker


class Clock:
    """Tells a time that goes on by as much as a way takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.calls = 0.0, []
        monkeypatch.setattr(quicker.time, "perf_counter", lambda: self.now)

    def way(self, name: str, seconds: list[float]):
        """Takes each of the seconds, and the last ones for ever."""
        left = list(seconds)

        def run() -> str:
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]
            return name

        return run


@pytest.mark.parametrize(("one", "other"), [(1.0, 2.0), (2.0, 1.0)])
def test_both_are_tried_in_turns_then_the_quicker_is_taken(monkeypatch, one, other) -> None:
    clock, ways = Clock(monkeypatch), Quicker()
    pair = clock.way("a", [one]), clock.way("b", [other])
    given = [ways.run("key", *pair) for _ in range(2 * TRIES + 5)]
    assert given == clock.calls
    assert given[: 2 * TRIES] == ["a", "b"] * TRIES
    assert given[2 * TRIES :] == ["a" if one < other else "b"] * 5
    ways.run("another key", *pair)
    ways.run("another key", *pair)
    assert clock.calls[-2:] == ["a", "b"]


@pytest.mark.parametrize("odd", [[90.0, 80.0, 70.0], [0.1, 0.2, 0.3]])
def test_some_odd_calls_do_not_choose(monkeypatch, odd: list[float]) -> None:
    """Neither such as are held up, nor such as find everything in the caches."""
    clock, ways = Clock(monkeypatch), Quicker()
    usual = 1.0 if odd[0] > 1.0 else 2.0
    pair = clock.way("a", [*odd, usual]), clock.way("b", [1.5])
    assert [ways.run("key", *pair) for _ in range(2 * TRIES + 1)][-1] == ("a" if usual == 1.0 else "b")
    assert not ways._seconds, "what was measured is kept"


def test_a_call_in_which_a_way_is_tried_is_not_counted(monkeypatch) -> None:
    """That takes 1 s by its quicker way, and 9 by its slower one."""
    clock, ways = Clock(monkeypatch), Quicker()
    inner = clock.way("slow", [9.0]), clock.way("fast", [1.0])

    def outer() -> str:
        return ways.run("inner", *inner)

    given = [ways.run("outer", outer, clock.way("other", [2.0])) for _ in range(8 * TRIES)]
    assert given[-1] == "fast"
    assert given.count("other") == TRIES


def test_a_way_that_fails_is_not_counted_and_the_error_is_given(monkeypatch) -> None:
    clock, ways = Clock(monkeypatch), Quicker()
    fails = [True]

    def first() -> str:
        if fails:
            raise MemoryError
        return clock.way("a", [1.0])()

    second = clock.way("b", [2.0])
    with pytest.raises(MemoryError):
        ways.run("key", first, second)
    fails.clear()
    assert [ways.run("key", first, second) for _ in range(2 * TRIES + 1)] == [*["a", "b"] * TRIES, "a"]


def test_threads_may_ask_at_once() -> None:
    """The one that is last to try finds that another has chosen."""
    ways, errors, num_threads = Quicker(), [], 4
    barrier = threading.Barrier(num_threads)

    def ask() -> None:
        try:
            for key in range(40):
                barrier.wait()
                for _ in range(2 * TRIES):
                    assert ways.run(key, lambda: "a", lambda: "a") == "a"
        except Exception as error:
            errors.append(error)
            barrier.abort()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=ask) for _ in range(num_threads)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors
    assert set(ways._chosen) == set(range(40))
    assert not any(min(map(len, seconds)) >= TRIES for seconds in ways._seconds.values())
