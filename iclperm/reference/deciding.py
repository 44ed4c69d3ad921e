"""Slow oracle of verdicts that stop by themselves: one trajectory, one look and one query at a time."""

from __future__ import annotations

from collections.abc import Sequence

from iclperm.reference.curves import equivalence

Answer = float | None


def holm(values: Sequence[float]) -> list[float]:
    """Adjusted p-values by stepping down: the smallest times all, the next times all but one, never falling."""
    adjusted, highest = [1.0] * len(values), 0.0
    for step, place in enumerate(sorted(range(len(values)), key=lambda place: values[place])):
        highest = max(highest, (len(values) - step) * values[place])
        adjusted[place] = min(highest, 1.0)
    return adjusted


def decided(
    first: Sequence[Sequence[Answer]],
    last: Sequence[Sequence[Answer]],
    looks: Sequence[int],
    margin: float,
    level: float,
) -> list[tuple[str, int, float, float]]:
    """Of each trajectory its verdict, the answered queries that this rests on, and both adjusted p-values.

    ``first`` and ``last`` are each trajectory's answers at two numbers of demonstrations, None where there is none.
    """
    least = [[1.0, 1.0] for _ in first]
    asked = [0] * len(first)
    verdicts = ["undecided"] * len(first)
    flat, changes = [1.0] * len(first), [1.0] * len(first)
    for size in looks:
        for place, pair in enumerate(zip(first, last, strict=True)):
            if verdicts[place] != "undecided":
                continue
            both = [(a, b) for a, b in zip(pair[0][:size], pair[1][:size], strict=True) if a is not None is not b]
            asked[place] = len(both)
            if len(both) < 2:
                continue
            before, after = ([one[side] for one in both] for side in (0, 1))
            found = equivalence(before, after, [1.0] * len(both), margin)
            share = size / sum(looks)
            least[place] = [min(old, new / share) for old, new in zip(least[place], found, strict=True)]
        flat, changes = holm([one for one, _ in least]), holm([other for _, other in least])
        for place in range(len(first)):
            verdicts[place] = (
                "equivalent" if flat[place] <= level else "different" if changes[place] <= level else "undecided"
            )
    return list(zip(verdicts, asked, flat, changes, strict=True))
