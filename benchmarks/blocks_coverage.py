"""Bias and coverage of effects from blocks of queries, by each ordering's own answers and by common queries.

    python benchmarks/blocks_coverage.py [--repeats 1000] [--json benchmarks/results/blocks_coverage.json]

6 sets x 20 permutations, each of which answers 20 of 200 queries: of one mixture, or 10 of each of two classes that
differ in accuracy by 40 points. Effects of several shapes; queries differ in difficulty and interact with sets and
permutations. *own*, *adjusted*: see `iclperm.stats.blocks`; *disjoint*: own answers to queries that nobody else was
asked. ``bias`` is that of the unclipped variances, as a share of the truth, with its standard error; the truth is what
is left of the effects where chances end at 0 and 1. Where nothing is
bounded, nothing false is said, and that counts as covered; ``±`` is the median half-width for order, in points."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from _machine import options, publish
from designs import dealt
from interval_coverage import SHAPES, Array, key

from iclperm.stats.blocks import block_effects

SETS, PERMUTATIONS, POOL, BLOCK, DRAWS = 6, 20, 200, 20, 1_000
ORDER, SELECTION, SHARED, WITH_QUERY = 0.08, 0.05, 0.5, 0.05
CASES = (("own", 1), ("adjusted", 1), ("own", 2), ("adjusted", 2), ("disjoint", 1))


def levels(generator: np.random.Generator, shape: str) -> Array:
    """[S, P] mean chances to be right."""
    draw = SHAPES[shape]
    level = 0.6 + SELECTION * draw(generator, (SETS, 1))
    level = level + ORDER * math.sqrt(SHARED) * draw(generator, (1, PERMUTATIONS))
    return np.asarray(level + ORDER * math.sqrt(1 - SHARED) * draw(generator, (SETS, PERMUTATIONS)))


def true_effects(shape: str, method: str, num_classes: int) -> tuple[float, float]:
    """Order and selection effect on other queries, of 4,000 studies without item noise."""
    generator = key(f"truth {shape}", 0)
    query = generator.uniform(-0.15, 0.15, 20_000)
    if method != "disjoint":
        query = query + math.sqrt(2) * WITH_QUERY * generator.standard_normal(20_000)
    places = np.linspace(-1, 2.2, 321)
    offsets = (0.0,) if num_classes == 1 else (-0.2, 0.2)
    right = [np.mean([np.clip(place + query + offset, 0, 1).mean() for offset in offsets]) for place in places]
    tables = np.interp([levels(generator, shape) for _ in range(4_000)], places, right)
    order2, selection2 = tables.var(axis=2, ddof=1).mean(), tables.var(axis=1, ddof=1).mean()
    return math.sqrt(order2), math.sqrt(selection2)


def of_case(shape: str, method: str, num_classes: int, repeats: int) -> dict[str, Any]:
    """Studies of one shape and method."""
    truth = true_effects(shape, method, num_classes)
    truths = (*truth, truth[1] / truth[0])
    squares, covered, halves = [], np.zeros((2, 3)), []
    for repeat in range(repeats):
        generator = key(f"blocks {shape} {method} {num_classes}", repeat)
        level = levels(generator, shape)
        classes = np.arange(POOL) % num_classes
        if method == "disjoint":
            chance = level[..., None] + generator.uniform(-0.15, 0.15, (SETS, PERMUTATIONS, BLOCK))
            items, state = (generator.random(chance.shape) < chance).astype(np.uint8), None
        else:
            difficulty = generator.uniform(-0.15, 0.15, POOL) + (0.4 * classes - 0.2 if num_classes > 1 else 0)
            chance = level[..., None] + difficulty
            chance = chance + WITH_QUERY * generator.standard_normal((SETS, 1, POOL))
            chance = chance + WITH_QUERY * generator.standard_normal((1, PERMUTATIONS, POOL))
            items = (generator.random(chance.shape) < chance).astype(np.uint8)
            state = np.empty(items.shape, np.uint8)
            for name in range(num_classes):
                members = np.flatnonzero(classes == name)
                shape_of = (SETS, PERMUTATIONS, len(members))
                state[:, :, members] = dealt(generator, shape_of, BLOCK // num_classes)
        found = block_effects(
            items,
            state,
            classes=classes if num_classes > 1 else None,
            method="adjusted" if method == "adjusted" else "own",
            draws=DRAWS,
            seed=repeat,
        )
        squares.append((found.order2, found.selection2))
        both = (found.generalised, found.jackknife)
        covered += [
            [not (one.low > true or one.high < true) for one, true in zip(each, truths, strict=True)] for each in both
        ]
        halves.append([(each.order.high - each.order.low) / 2 for each in both])
    bias = np.mean(squares, axis=0) / np.square(truth) - 1
    error = np.std(squares, axis=0) / np.square(truth) / math.sqrt(repeats)
    half = 100 * np.median(np.nan_to_num(halves, nan=math.inf), axis=0)
    row: dict[str, Any] = {"effects": shape, "method": method, "classes": num_classes}
    for place, name in enumerate(("order", "selection")):
        row[f"bias {name}"] = f"{bias[place]:+.3f} ± {error[place]:.3f}"
    for place, name in enumerate(("generalised", "jackknife")):
        row |= {
            f"{name} order": covered[place, 0] / repeats, "±" if not place else "± ": half[place],
            f"selection{' ' * place}": covered[place, 1] / repeats, f"r{' ' * place}": covered[place, 2] / repeats,
        }  # fmt: skip
    return row


def cases(repeats: int) -> Iterator[dict[str, Any]]:
    """All shapes and methods."""
    for shape in list(SHAPES)[:3]:
        for method, num_classes in CASES:
            yield of_case(shape, method, num_classes, repeats)


def main() -> None:
    """Simulates and prints."""
    parser = options(__doc__ or "")
    parser.set_defaults(repeats=1_000)
    given = parser.parse_args()
    publish(f"blocks of queries, {given.repeats} repeats", list(cases(given.repeats)), given.json)


if __name__ == "__main__":
    main()
