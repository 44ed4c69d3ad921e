"""The order effect against distinct tokens: crossed designs, and blocks of queries that each ordering has for itself.

    python benchmarks/designs.py [--repeats 300] [--json benchmarks/results/designs.json]
    python benchmarks/designs.py --population benchmarks/populations/FILE.npz

For the shapes of both papers: 10 sets x 10 permutations x 500 queries of 8 demonstrations (Order Matters), and 5 x 20 x
256 at every k from 0 to 20 (Monte Carlo), of which one k is looked at and the tokens of all are counted. Simulated
answers of an order effect of 2, 4 and 11 points, or answers stored as an .npz: ``correct`` [S, P, Q] by numpy.packbits
with its ``shape`` beside it, or ``dev`` and ``test`` with ``dev_shape`` and ``test_shape``; where it has
``context_tokens`` and ``dev_tokens``, their means are what contexts and queries cost, else 45 tokens a demonstration
and 50 a query.

``bias`` is that of the unclipped variance over orders, as a share of the truth (of stored answers: the estimate from
all of them). ``spread`` is the standard deviation of the estimated order effect and ``half`` the median half-width of
its 95 % interval, in points; ``covered`` how often that held the truth; ``share`` the distinct tokens by those of the
paper's crossed design. Permutations of a stored population are drawn without replacement, which makes spreads of many
too small: they are divided by √(1 - P/all). The last rows tell the cheapest design of the list whose half-width is not
above the paper's. ``own`` uses each ordering's answers alone, ``adjusted`` compares answers to the same query."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from _machine import options, publish

from iclperm import stats
from iclperm.stats.blocks import block_effects

Items = npt.NDArray[np.uint8]

DRAWS = 2_000
DEMONSTRATION, QUERY = 45, 50
SIMULATED = (0.02, 0.04, 0.11)


class PaperShape(NamedTuple):
    """A design of a paper, and the smaller ones that are held against it."""

    sets: int
    permutations: int
    queries: int
    demonstrations: int
    numbers_of_shots: int
    crossed: tuple[tuple[int, int], ...]
    blocks: tuple[tuple[int, int], ...]


SHAPES = {
    "Order Matters": PaperShape(
        10, 10, 500, 8, 1,
        ((25, 50), (25, 100), (50, 25), (20, 125)),
        ((20, 25), (28, 25), (25, 50), (25, 100), (50, 12), (50, 25), (50, 50), (100, 12), (100, 25)),
    ),
    "Monte Carlo": PaperShape(
        5, 20, 256, 20, 21,
        ((40, 32), (40, 64), (80, 16)),
        ((40, 16), (40, 32), (40, 64), (80, 8), (80, 16), (80, 32)),
    ),
}  # fmt: skip


class Source:
    """Answers to draw studies from, and the truth about them."""

    name: str
    order2: float
    context: float | None = None
    query: float = QUERY

    def drawn(self, generator: np.random.Generator, sets: int, permutations: int, queries: int) -> Items:
        """[S, P, Q] answers."""
        raise NotImplementedError

    def fits(self, sets: int, permutations: int, queries: int) -> bool:
        """Whether there are as many."""
        return True

    def widened(self, permutations: int) -> float:
        """What a spread over drawn permutations is to be multiplied by."""
        return 1.0


class SimulatedAnswers(Source):
    """Gaussian effects on the chance to be right; half of the order variance is shared by the sets."""

    def __init__(self, order: float) -> None:
        self.name, self.order = f"simulated, {100 * order:g} points", order
        # What is left of the effect where chances end at 0 and 1: the mean over queries, by numerical integration.
        generator = np.random.default_rng(0)
        query = generator.uniform(-0.3, 0.3, 100_000) + math.sqrt(2) * order * generator.standard_normal(100_000)
        levels = np.linspace(-0.5, 1.8, 231)
        right = [float(np.clip(level + query, 0, 1).mean()) for level in levels]
        orders = order * generator.standard_normal((2_000, 500))
        right_of = np.interp(0.65 + order * generator.standard_normal((2_000, 1)) + orders, levels, right)
        self.order2 = float(right_of.var(axis=1, ddof=1).mean())

    def drawn(self, generator: np.random.Generator, sets: int, permutations: int, queries: int) -> Items:
        """See `Source`."""
        normal = generator.standard_normal
        both = self.order / math.sqrt(2)
        level = (
            0.65 + self.order * normal((sets, 1)) + both * (normal((1, permutations)) + normal((sets, permutations)))
        )
        chance = level[..., None] + generator.uniform(-0.3, 0.3, queries)
        chance += self.order * normal((1, permutations, queries)) + self.order * normal((sets, 1, queries))
        return (generator.random(chance.shape) < chance).astype(np.uint8)


class StoredAnswers(Source):
    """Answers of a whole search, of which parts are drawn."""

    def __init__(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as stored:
            splits = [
                np.unpackbits(stored[name], count=int(np.prod(stored[shape]))).reshape(tuple(stored[shape].tolist()))
                for name, shape in (("correct", "shape"), ("dev", "dev_shape"), ("test", "test_shape"))
                if name in stored.files
            ]
            if "context_tokens" in stored.files:
                self.context = float(stored["context_tokens"].mean())
            if "dev_tokens" in stored.files:
                self.query = float(stored["dev_tokens"].mean())
        self.items = np.concatenate(splits, axis=2)
        sigma2 = stats.variance_components(self.items).sigma2
        self.name, self.order2 = path.stem, sigma2.P + sigma2.SP

    def drawn(self, generator: np.random.Generator, sets: int, permutations: int, queries: int) -> Items:
        """See `Source`."""
        chosen = [
            generator.permutation(size)[:count]
            for size, count in zip(self.items.shape, (sets, permutations, queries), strict=True)
        ]
        return self.items[np.ix_(*chosen)]

    def fits(self, sets: int, permutations: int, queries: int) -> bool:
        """See `Source`."""
        return all(a <= b for a, b in zip((sets, permutations, queries), self.items.shape, strict=True))

    def widened(self, permutations: int) -> float:
        """See `Source`; NaN of all permutations."""
        left = 1 - permutations / self.items.shape[1]
        return 1 / math.sqrt(left) if left > 0 else math.nan


def dealt(generator: np.random.Generator, shape: tuple[int, int, int], size: int) -> Items:
    """[S, P, Q] states of blocks of `size` queries: decks of all queries, shuffled and dealt one after the other, so
    that every query is asked as often as any other, give or take one; 4 is what was not asked."""
    cells = shape[0] * shape[1]
    state = np.full((cells, shape[2]), 4, np.uint8)
    deck = np.empty(0, np.int64)
    # Dealt cell by cell, a deck would stay within a set, no two orderings of which would then share a query.
    for cell in generator.permutation(cells):
        block, deck = deck[:size], deck[size:]
        if len(block) < size:
            deck = generator.permutation(shape[2])
            fresh = deck[~np.isin(deck, block)][: size - len(block)]
            block, deck = np.concatenate([block, fresh]), deck[~np.isin(deck, fresh)]
        state[cell, block] = 0
    return state.reshape(shape)


def tokens(source: Source, shape: PaperShape, sets: int, permutations: int, queries: int) -> float:
    """Distinct tokens: every context once, and its queries at every number of shots."""
    context = shape.demonstrations * DEMONSTRATION if source.context is None else source.context
    return sets * permutations * (context + shape.numbers_of_shots * queries * source.query)


def measured(
    source: Source, shape: PaperShape, method: str, permutations: int, queries: int, repeats: int
) -> dict[str, Any]:
    """Estimates of one design over many draws."""
    found, intervals = [], []
    for repeat in range(repeats):
        generator = np.random.default_rng([*f"{source.name} {method} {permutations} {queries}".encode(), repeat])
        if method == "crossed":
            whole = stats.variance_components(source.drawn(generator, shape.sets, permutations, queries))
            found.append(whole.sigma2.P + whole.sigma2.SP)
            intervals.append(stats.effect_interval(whole, draws=DRAWS, seed=repeat).order)
            continue
        items = source.drawn(generator, shape.sets, permutations, shape.queries)
        state = dealt(generator, items.shape, queries)
        if method == "own":
            from_blocks = block_effects(items, state, method="own", draws=DRAWS, seed=repeat)
            found.append(from_blocks.order2)
            intervals.append(from_blocks.generalised.order)
        else:
            whole = stats.variance_components(items, state)
            found.append(whole.sigma2.P + whole.sigma2.SP)
            intervals.append(stats.effect_interval(whole, draws=DRAWS, seed=repeat).order)
    truth = math.sqrt(source.order2)
    halves = np.nan_to_num([(one.high - one.low) / 2 for one in intervals], nan=math.inf)
    spread = float(np.std(np.sqrt(np.maximum(found, 0))))
    base = tokens(source, shape, shape.sets, shape.permutations, shape.queries)
    return {
        "answers": source.name, "design": f"{method} {shape.sets} x {permutations} x {queries}",
        "share": tokens(source, shape, shape.sets, permutations, queries) / base,
        "cells": shape.sets * permutations * queries,
        "bias": float(np.mean(found)) / source.order2 - 1, "spread": 100 * spread * source.widened(permutations),
        "half": 100 * float(np.median(halves)),
        "covered": float(np.mean([not (one.low > truth or one.high < truth) for one in intervals])),
    }  # fmt: skip


def of_source(source: Source, name: str, shape: PaperShape, repeats: int) -> Iterator[dict[str, Any]]:
    """All designs of a shape on one population, then the cheapest that is as sure as the paper's."""
    designs = [("crossed", shape.permutations, shape.queries), *(("crossed", *each) for each in shape.crossed)]
    designs += [(method, *each) for each in shape.blocks for method in ("own", "adjusted")]
    rows = [
        {"shape": name} | measured(source, shape, *design, repeats)
        for design in designs
        if source.fits(shape.sets, design[1], shape.queries)
    ]
    yield from rows
    if not rows:
        return
    for kind in ("crossed", "blocks"):
        sure = [
            row
            for row in rows
            if row["half"] <= rows[0]["half"] and str(row["design"]).startswith("crossed") == (kind == "crossed")
        ]
        if sure:
            best = min(sure, key=lambda row: row["share"])
            yield {**best, "design": f"cheapest {kind}: {best['design']}"}
        else:
            yield {"shape": name, "answers": source.name, "design": f"cheapest {kind}: none as sure"}


def fitted(shape: PaperShape, source: Source) -> PaperShape:
    """The shape cut to what a stored population has."""
    if not isinstance(source, StoredAnswers):
        return shape
    sets, _, queries = source.items.shape
    return shape._replace(sets=min(sets, shape.sets), queries=min(queries, shape.queries))


def main() -> None:
    """Draws and prints."""
    parser = options(__doc__ or "")
    parser.set_defaults(repeats=300)
    parser.add_argument("--population", type=Path, action="append", help="stored answers, repeatable")
    parser.add_argument("--shape", choices=tuple(SHAPES))
    given = parser.parse_args()
    sources: list[Source] = [StoredAnswers(path) for path in given.population or ()]
    sources = sources or [SimulatedAnswers(order) for order in SIMULATED]
    rows = [
        row
        for name, shape in SHAPES.items()
        if given.shape in (None, name)
        for source in sources
        for row in of_source(source, name, fitted(shape, source), given.repeats)
    ]
    publish(f"crossed designs and blocks of queries, {given.repeats} repeats", rows, given.json)


if __name__ == "__main__":
    main()
