"""Designs of orderings: bias, coverage of their 95 % intervals, and variance per distinct token against random orders.

    python benchmarks/designs_coverage.py [--repeats 1000] [--json benchmarks/results/designs_coverage.json]

10 sets of 8 demonstrations (all orders: of 4), 100 queries, accuracy .6. An order moves accuracy by .05, in all cases
alike; half of its variance is shared by the sets, half is a set's own. *Gaussian*, *t4*: what an order does has nothing
to do with what another one does. *positions*: the sum over positions of what a position counts (rising to the last)
times the quality of the demonstration there; *last*: only the last position counts; *both ends*: the first counts as
the last, so that an order is as good as its reversal; *half positions*: half the variance is of positions, half
Gaussian. ``bias`` is that of the unclipped variance over orders; ``mean`` is for other sets and orders on the same
queries. ``var/token`` are the variance of the estimated variance over orders, and of the mean over orders for the sets
at hand, each times the distinct tokens, by the same of as many random orders: demonstrations of 40 tokens, shared where
orders begin alike, and queries of 42 under every order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from _machine import options, publish

from iclperm.prompts.design import draw_permutations
from iclperm.stats import designs

Array = npt.NDArray[np.float64]

SETS, SHOTS, QUERIES, DRAWS = 10, 8, 100, 2_000
FEW_SHOTS = 4  # of all orders
MEAN, ORDER, SELECTION = 0.6, 0.05, 0.03
SHARED = 0.5
DEMONSTRATION_TOKENS, QUERY_TOKENS = 40, 42
COUNTS: dict[str, tuple[int, ...]] = {
    "random": (16, 32),
    "latin": (16, 32),
    "antithetic": (16, 32),
    "prefix_coupled": (18, 36),
    "exhaustive": (24,),
}
POSITIONS: dict[str, tuple[float, Callable[[Array], Array]]] = {
    "Gaussian": (0.0, lambda place: place),
    "t4": (0.0, lambda place: place),
    "positions": (1.0, lambda place: place),
    "last": (1.0, lambda place: (place == place.max()).astype(np.float64)),
    "both ends": (1.0, lambda place: (place - place.mean()) ** 2),
    "half positions": (0.5, lambda place: place),
}
"""Share of the order variance that positions have, and how much each counts, of their numbers from 0."""


def accuracies(
    generator: np.random.Generator, shape: str, permutations: npt.NDArray[np.int64], *, is_complete: bool = False
) -> tuple[Array, float]:
    """[S, P] of sets that are drawn anew, and their mean over all orders; what they share is always the same: of
    positions, and of white effects where permutations are all orders."""
    share, weigh = POSITIONS[shape]
    (num_p, size) = permutations.shape
    counts = weigh(np.arange(size, dtype=np.float64))
    counts = (counts - counts.mean()) / np.linalg.norm(counts - counts.mean())
    common = np.random.default_rng(11).standard_normal(size)
    common = (common - common.mean()) / common.std(ddof=1)
    quality = math.sqrt(SHARED) * common + math.sqrt(1 - SHARED) * generator.standard_normal((SETS, size))
    of_positions = quality[:, permutations] @ counts

    def white(source: np.random.Generator, rows: int) -> Array:
        if shape == "t4":
            return np.asarray(source.standard_t(4, (rows, num_p)) / math.sqrt(2))
        return source.standard_normal((rows, num_p))

    if is_complete:
        shared = white(np.random.default_rng(12), 1)
        shared = (shared - shared.mean()) / shared.std(ddof=1)
        of_positions *= math.sqrt((num_p - 1) / num_p)  # whose variance over all orders has their number below it
    else:
        shared = white(generator, 1)
    others = math.sqrt(SHARED) * shared + math.sqrt(1 - SHARED) * white(generator, SETS)
    moved = ORDER * (math.sqrt(share) * of_positions + math.sqrt(1 - share) * others)
    of_sets = MEAN + SELECTION * generator.standard_normal((SETS, 1))
    table = of_sets + moved
    return table, float((table if is_complete else of_sets).mean())


def distinct_tokens(permutations: npt.NDArray[np.int64]) -> float:
    """Of one set: each beginning of an order once, and the queries under every order."""
    beginnings = {tuple(row[:length]) for row in permutations.tolist() for length in range(1, len(row) + 1)}
    return DEMONSTRATION_TOKENS * len(beginnings) + QUERY_TOKENS * QUERIES * len(permutations)


def of_design(shape: str, design: str, count: int, repeats: int) -> dict[str, Any]:
    """Studies of one shape and design."""
    shots = FEW_SHOTS if design == "exhaustive" else SHOTS
    blocks = designs.permutation_blocks(design, count, shots)
    truth = ORDER, math.hypot(SELECTION, ORDER * math.sqrt(1 - SHARED))
    truths = (*truth, truth[1] / truth[0])
    covered, halves = np.zeros(4), []
    squares, means, tokens = [], [], 0.0
    for repeat in range(repeats):
        permutations = draw_permutations(repeat, count, shots, design=design)
        tokens += distinct_tokens(permutations) / repeats
        generator = np.random.default_rng([*f"{shape} {design} {count}".encode(), repeat])
        table, over_all = accuracies(generator, shape, permutations, is_complete=blocks.is_complete)
        difficulty = generator.uniform(-0.2, 0.2, QUERIES)
        chance = table[..., None] + difficulty
        items = (generator.random(chance.shape) < chance).astype(np.uint8)
        found = designs.designed_effects(items, blocks, draws=DRAWS, seed=repeat)
        mean = designs.designed_mean(items, blocks).interval(held=True)
        covered += [
            *(one.low <= value <= one.high for one, value in zip(found.intervals, truths, strict=True)),
            mean.low <= MEAN + difficulty.mean() <= mean.high,
        ]
        halves.append([(one.high - one.low) / 2 for one in (*found.intervals, mean)])
        squares.append(found.order2)
        means.append(float(table.mean()) - over_all)
    order, selection, r, of_mean = covered / repeats
    half = np.median(np.nan_to_num(halves, nan=math.inf), axis=0)
    return {
        "effects": shape, "design": design, "P": count, "bias": float(np.mean(squares)) / ORDER**2 - 1,
        "order": order, "±": 100 * half[0], "selection": selection, "r": r, "r ±": half[2],
        "mean": of_mean, "mean ±": 100 * half[3], "tokens": tokens,
        "_order": float(np.var(squares)), "_mean": float(np.mean(np.square(means))),
    }  # fmt: skip


def main() -> None:
    """Simulates and prints; half-widths of order and mean in points of accuracy."""
    parser = options(__doc__ or "")
    parser.set_defaults(repeats=1_000)
    given = parser.parse_args()
    rows = []
    for shape in POSITIONS:
        found = [
            of_design(shape, design, count, given.repeats) for design, counts in COUNTS.items() for count in counts
        ]
        for row in found:
            if row["design"] == "exhaustive":  # other studies, of fewer demonstrations
                continue
            base = found[0 if row["P"] < 25 else 1]
            for name in ("_order", "_mean"):
                value = row[name] * row["tokens"] / (base[name] * base["tokens"])
                row[f"{name[1:]} var/token"] = value
        rows += [{key: value for key, value in row.items() if not key.startswith("_")} for row in found]
    publish(f"designs of orderings, {given.repeats} repeats", rows, given.json)


if __name__ == "__main__":
    main()
