"""How often the 95 % intervals of the studies hold the truth, and how often their tests cry wolf.

    python benchmarks/study_coverage.py [--repeats 600] [--json benchmarks/results/study_coverage.json]

Single answers are drawn from chances that add up the effects of sets, permutations, both, queries, and of queries with
either, of one shape each (those of interval_coverage.py). ``mean, new queries`` and ``mean, same queries`` are µ_k of a
curve (S = 5, P = 20, Q = 256), ``larger`` the same of S = 10, P = 50. ``average`` to ``gap_closed`` are those of a
search (S = 10, P = 16, 150 test and 300 dev queries), whose truth is the mean over many further designs.
``correlation`` is the share of studies (S = 6, P = 40) in which a feature of the permutation without any effect is
called correlated with accuracy, ``by set alone`` the same with intervals that forget that permutations are shared.
``differs`` and ``flat`` are the shares of single trajectories without any change that are called different, and of
those that change by just the margin that are called flat. The last rows are selections among equal strategies (half as
many repeats), for effects of orders that sets share or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from _machine import options, publish
from interval_coverage import SHAPES, key

from iclperm import stats
from iclperm.stats import plateau as plateaus
from iclperm.stats.search import search
from iclperm.studies.selection import selection

Array = npt.NDArray[np.float64]
MEAN, MARGIN = 0.6, 0.02
SPREADS = {"s": 0.02, "p": 0.03, "sp": 0.02, "q": 0.12, "sq": 0.03, "pq": 0.05}
SELECTIONS = ((0.0, 0.07), (0.05, 0.05), (0.07, 0.03))
"""Standard deviations of a permutation's effect in all sets, and in one."""
CURVES = {"": (5, 20, 256), "larger, ": (10, 50, 256)}
"""S, P and Q by what stands before the names."""
SEARCH, NUM_DEV, FURTHER, HALVES = (10, 16, 150), 300, 400, 20
SEARCHED = ("average", "highest_dev", "honest", "gain", "share", "gap_closed")


def chances(generator: np.random.Generator, shape: str, size: tuple[int, int, int]) -> tuple[Array, Array]:
    """Chance of a right answer [S, P, Q], and the part of it that belongs to the queries alone, [Q]."""
    lengths = dict(zip("spq", size, strict=True))

    def effect(axes: str) -> Array:
        return SPREADS[axes] * SHAPES[shape](generator, tuple(lengths[axis] if axis in axes else 1 for axis in "spq"))

    queries = effect("q")
    return MEAN + queries + sum(effect(axes) for axes in SPREADS if axes != "q"), MEAN + queries.ravel()


def answers(generator: np.random.Generator, chance: Array) -> npt.NDArray[np.uint8]:
    """Drawn from chances, which leave 0..1 in a few cells where effects have long tails."""
    return (generator.random(chance.shape) < chance).astype(np.uint8)


def of_means(shape: str, repeats: int) -> dict[str, Any]:
    told = {}
    for place, (name, size) in enumerate(CURVES.items()):
        new, same = [], []
        for repeat in range(repeats):
            generator = key(shape, *(1 + 10 * place, repeat))
            chance, by_query = chances(generator, shape, size)
            found = stats.mean_error(answers(generator, chance))
            new.append(holds(found.interval(), MEAN))
            same.append(holds(found.interval(held=True), float(by_query.mean())))
        told |= {f"{name}mean, new queries": share(new), f"{name}mean, same queries": share(same)}
    return told


def of_searches(shape: str, repeats: int) -> dict[str, Any]:
    def study(number: int) -> Any:
        generator = key(shape, 2, number)
        sets, permutations, num_test = SEARCH
        chance, _ = chances(generator, shape, (sets, permutations, num_test + NUM_DEV))
        drawn = answers(generator, chance)
        return search(drawn[..., num_test:].mean(axis=2), drawn[..., :num_test], halves=HALVES)

    further = [study(10**6 + number) for number in range(FURTHER)]
    truth = {name: np.mean([getattr(one, name).estimate for one in further]) for name in SEARCHED}
    found = [study(number) for number in range(repeats)]
    return {name: share(holds(getattr(one, name), value) for one in found) for name, value in truth.items()}


def of_correlations(shape: str, repeats: int) -> dict[str, Any]:
    crossed, by_set = [], []
    for repeat in range(repeats):
        generator = key(shape, 3, repeat)
        chance, _ = chances(generator, shape, (6, 40, 100))
        accuracy = answers(generator, chance).mean(axis=2)
        feature = np.broadcast_to(generator.random(40), accuracy.shape)
        for found, is_crossed in ((crossed, True), (by_set, False)):
            found.append(not holds(stats.rank_correlation(feature, accuracy, crossed=is_crossed).interval, 0.0))
    return {"correlation": share(crossed), "by set alone": share(by_set)}


def of_plateaus(shape: str, repeats: int) -> dict[str, Any]:
    different, flat = [], []
    for repeat in range(repeats):
        generator = key(shape, 4, repeat)
        chance, _ = chances(generator, shape, (2, 5, 256))
        before = answers(generator, chance)
        for found, change, state in ((different, 0.0, "different"), (flat, MARGIN, "equivalent")):
            after = answers(generator, chance + change)
            pair = np.stack([before, after], axis=2)
            tested = plateaus.plateau(pair, shots=(4, 8), first=4, margin=MARGIN)
            found.append(tested.single_shares[plateaus.STATES.index(state)])
    return {"differs": float(np.mean(different)), "flat": float(np.mean(flat))}


def of_selections(permutation: float, single: float, repeats: int) -> dict[str, Any]:
    """Eight strategies that do not differ (S = 5, P = 20, Q = 256), in studies with these effects of permutations."""
    rows = []
    for repeat in range(repeats):
        generator = key("selection", 5, permutation, single, repeat)
        shape = (8, 5, 20, 1, 256)
        chance = MEAN + 0.1 * generator.standard_normal(shape[-1])
        for size, axes in ((0.03, (8, 5, 1, 1, 1)), (permutation, (8, 1, 20, 1, 1)), (single, (8, 5, 20, 1, 1))):
            chance = chance + size * generator.standard_normal(axes)
        found = selection(answers(generator, chance), strategies=("random", *"abcdefg"), shots=(6,))
        others = [outcome for name, outcome in found.outcomes.items() if name != "random"]
        rows.append(
            (
                np.mean([holds(one.difference, 0.0) for one in others]),
                np.mean([holds(one.spread_difference, 0.0) for one in others]),
                any(one.is_steadier for one in others),
                any(one.accuracy_side for one in others),
            )
        )
    names = ("minus random", "spread minus random", "some steadier", "some more or less accurate")
    told = dict(zip(names, map(float, np.mean(rows, axis=0)), strict=True))
    return {"effects": f"orders, all sets {permutation:.2f}, one set {single:.2f}", **told}


def holds(interval: stats.Interval, truth: float) -> bool:
    return bool(interval.low <= truth <= interval.high)


def share(found: Iterable[bool]) -> float:
    return float(np.mean(list(found)))


def main() -> None:
    """Simulates and prints."""
    parser = options(__doc__ or "")
    parser.set_defaults(repeats=600)
    given = parser.parse_args()
    kinds = (of_means, of_searches, of_correlations, of_plateaus)
    figures = []
    for shape in SHAPES:
        row: dict[str, Any] = {"effects": shape}
        for kind in kinds:
            row |= kind(shape, given.repeats)
        figures.append(row)
    figures += [of_selections(*effects, max(given.repeats // 2, 1)) for effects in SELECTIONS]
    publish(f"coverage of the studies' intervals, {given.repeats} repeats", figures, given.json)


if __name__ == "__main__":
    main()
