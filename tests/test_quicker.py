"""The quicker one of two ways is taken once both were tried, and what they give is given either way."""

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


def test_calls_that_are_held_up_do_not_choose(monkeypatch) -> None:
    clock, ways = Clock(monkeypatch), Quicker()
    pair = clock.way("a", [90.0, 80.0, 70.0, 1.0]), clock.way("b", [1.1])
    assert [ways.run("key", *pair) for _ in range(2 * TRIES + 1)][-1] == "a"


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
