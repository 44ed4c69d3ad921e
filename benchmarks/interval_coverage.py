"""How often the 95 % intervals of r hold the truth, and how wide they are, under effects of several shapes.

    python benchmarks/interval_coverage.py [--repeats 2000] [--json benchmarks/results/interval_coverage.json]

Accuracies [S, P] = set effect + permutation effect + residual, all of one shape, with standard deviations s, 1 and 0.7
such that the true r is 1 or 1.58. ``generalised`` covers the RMS ratio, ``jackknife`` the printed mean of standard
deviations; as S and P grow both tend to the same r. ``warned`` is the share of tables that `skewness_warnings` names.
Cases with queries draw single answers instead, of queries that differ in difficulty; there the intervals are those free
of item noise, of the order effect, of the selection effect and of r. Every table is drawn from a key of its own, so the
figures depend on ``--repeats`` alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from _machine import options, publish

from iclperm import stats

Array = npt.NDArray[np.float64]

DRAWS = 2_000
RESIDUAL = 0.7
SIZES, RATIOS = (5, 10, 20), (1.0, 1.58)
NUM_QUERIES = (100, 500)
ORDER_POINTS = 0.04  # standard deviation of the permutation effect on the chance to be right

SHAPES: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Array]] = {
    "Gaussian": lambda generator, size: generator.standard_normal(size),
    "t4": lambda generator, size: generator.standard_t(4, size) / math.sqrt(2),
    "one-sided exponential": lambda generator, size: 1 - generator.exponential(size=size),
    "one in ten collapses": lambda generator, size: np.where(generator.random(size) < 0.1, -3, 1 / 3),
}
"""Mean 0 and variance 1 each."""


def effects(generator: np.random.Generator, shape: str, size: int, ratio: float) -> Array:
    """[S, P] sum of the effects, in units of the permutation effect's standard deviation."""
    draw = SHAPES[shape]
    sets = math.sqrt(ratio**2 * (1 + RESIDUAL**2) - RESIDUAL**2)
    return sets * draw(generator, (size, 1)) + draw(generator, (1, size)) + RESIDUAL * draw(generator, (size, size))


def answers(generator: np.random.Generator, shape: str, size: int, ratio: float, num_queries: int) -> Array:
    """[S, P, Q] 0 or 1: effects and difficulties add up to the chance to be right."""
    difficulty = generator.uniform(-0.2, 0.2, num_queries)
    chance = 0.6 + ORDER_POINTS * effects(generator, shape, size, ratio)[..., None] + difficulty
    return (generator.random(chance.shape) < chance).astype(np.uint8)


def of_accuracies(shape: str, size: int, ratio: float, repeats: int) -> dict[str, Any]:
    tables = [effects(key(shape, size, ratio, repeat), shape, size, ratio) for repeat in range(repeats)]
    generalised = [stats.generalized_interval(table, draws=DRAWS, seed=i).ratio for i, table in enumerate(tables)]
    jackknife = [stats.jackknife_ratio_interval(table) for table in tables]
    return {
        "effects": shape, "S = P": size, "r": ratio,
        "generalised": coverage(generalised, ratio), "generalised width": median_width(generalised),
        "jackknife": coverage(jackknife, ratio), "jackknife width": median_width(jackknife),
        "warned": float(np.mean([bool(stats.skewness_warnings(table)) for table in tables])),
    }  # fmt: skip


def of_answers(shape: str, ratio: float, num_queries: int, repeats: int) -> dict[str, Any]:
    size = 10
    found = []
    for repeat in range(repeats):
        items = answers(key(shape, num_queries, ratio, repeat), shape, size, ratio, num_queries)
        found.append(stats.effect_interval(stats.variance_components(items), draws=DRAWS, seed=repeat))
    order = ORDER_POINTS * math.hypot(1, RESIDUAL)
    return {
        "effects": shape, "S = P": size, "r": ratio, "queries": num_queries,
        "order, no noise": coverage([one.order for one in found], order),
        "selection, no noise": coverage([one.selection for one in found], ratio * order),
        "r, no noise": coverage([one.ratio for one in found], ratio),
        "width of that": median_width(one.ratio for one in found),
    }  # fmt: skip


def key(shape: str, *numbers: float) -> np.random.Generator:
    """A generator for one table, whatever was drawn before it."""
    return np.random.default_rng([*shape.encode(), *(round(100 * number) for number in numbers)])


def coverage(intervals: Iterable[stats.Interval], truth: float) -> float:
    """Share of the intervals that hold the truth; one that is undefined does not."""
    return float(np.mean([interval.low <= truth <= interval.high for interval in intervals]))


def median_width(intervals: Iterable[stats.Interval]) -> float:
    return float(np.nanmedian([interval.high - interval.low for interval in intervals]))


def cases(repeats: int) -> Iterator[dict[str, Any]]:
    for shape in SHAPES:
        for size in SIZES:
            for ratio in RATIOS:
                yield of_accuracies(shape, size, ratio, repeats)
    for shape in SHAPES:
        for num_queries in NUM_QUERIES:
            yield of_answers(shape, RATIOS[0], num_queries, repeats)


def main() -> None:
    parser = options(__doc__)
    parser.set_defaults(repeats=2000)
    arguments = parser.parse_args()
    publish(f"interval coverage, {arguments.repeats} repeats", list(cases(arguments.repeats)), arguments.json)


if __name__ == "__main__":
    main()
