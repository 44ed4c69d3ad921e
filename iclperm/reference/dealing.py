"""A driver, its workers and the parts of a run, second by second: what a simulation of them must agree with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_MOST_COPIES = 2
_DEAR = 2


def finished_at(
    seconds: Sequence[int],
    jumps: Sequence[int],
    costs: Sequence[int],
    *,
    workers: int,
    start: int,
    deal: int,
    commit: int,
) -> int:
    """The second at which the driver has committed the last part; all are whole numbers.

    Workers come up at ``start``. Part i takes one ``seconds[i]`` >= 1, and ``jumps[i]`` more where its part before was
    not i - 1. The driver needs ``deal`` seconds to give a part out, and ``commit`` for the first answer of a part, and
    does one thing at a time: it hears workers in the order in which they spoke, and deals to all idle ones before it
    commits. O(seconds x workers x parts).
    """
    dear = [part for part in range(len(costs)) if costs[part] * len(costs) > _DEAR * sum(costs)]
    dear.sort(key=lambda part: -costs[part])
    nobody = -1
    stretches = {nobody: others} if (others := [part for part in range(len(costs)) if part not in dear]) else {}
    given: list[tuple[int, int]] = []  # parts that are not answered, and their workers, in the order of dealing
    until = dict.fromkeys(range(workers), start)  # when workers will speak
    part_of: dict[int, int] = {}
    heard: list[int] = []
    idle: list[int] = []
    now = 0

    def choose(worker: int) -> int | None:
        if dear:
            return dear.pop(0)
        own = stretches.pop(worker, None) or stretches.pop(nobody, [])
        if not own and stretches:  # of some that cost the same it is that which was cut, or taken from, longest ago
            cost = {owner: sum(costs[part] for part in stretch) for owner, stretch in stretches.items()}
            owner = max(cost, key=lambda owner: cost[owner])
            longest = stretches.pop(owner)
            while 2 * sum(costs[part] for part in own) < cost[owner]:
                own.insert(0, longest.pop())
            if longest:
                stretches[owner] = longest
        if own:
            if own[1:]:
                stretches[worker] = own[1:]
            return own[0]
        for part, _ in given:
            there = [each for other, each in given if other == part]
            if worker not in there and len(there) < _MOST_COPIES:
                return part
        return None

    def deal_out() -> Iterator[None]:
        for worker in list(idle):
            part = choose(worker)
            if part is not None:
                idle.remove(worker)
                given.append((part, worker))
                yield from [None] * deal
                follows = part_of.get(worker) == part - 1
                until[worker] = now + seconds[part] + (0 if follows else jumps[part])
                part_of[worker] = part

    def driver() -> Iterator[None]:
        """Goes on by a second whenever it yields."""
        while True:
            yield from deal_out()
            if not (dear or given or stretches):
                return
            while not heard:
                yield
            worker = heard.pop(0)
            idle.append(worker)
            answered = [pair for pair in given if pair[0] == part_of.get(worker)]
            if answered:
                given[:] = [pair for pair in given if pair not in answered]
                yield from deal_out()
                yield from [None] * commit

    def speak() -> None:
        for worker in [worker for worker, moment in until.items() if moment <= now]:
            del until[worker]
            heard.append(worker)

    speak()
    for _ in driver():
        now += 1
        speak()
    return now
