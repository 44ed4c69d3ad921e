"""The averaged curve against distinct tokens: crossed trajectories, blocks of queries, and fewer numbers of shots.

    python benchmarks/curves.py [--repeats 200] [--json benchmarks/results/curves.json]

The shape of the Monte Carlo study (arXiv 2503.22002): 5 sets x 20 permutations of 20 demonstrations, 256 queries, every
k from 0 to 20; 45 tokens a demonstration and 50 a query. Simulated answers: accuracy rises along a bend from .5 to .8,
sets differ by 3 points, orders by as much as the row says, half of it shared by the sets; queries differ in difficulty
and interact with sets and permutations. Designs by their sets, queries a trajectory and numbers of shots: all; six; or
those that `stats.bends` names of a pilot of 8 queries a trajectory at every k, whose tokens are counted, too.

``error`` is the root mean square, over all k and studies, of the averaged curve less the true one, straight lines
between the numbers of shots that were run; ``half`` the median half-width of the 95 % interval at k = 1, 4, 8 and 20
as far as they were run, and ``covered`` how often it held the truth, both for other sets, orders and queries. All in
points, but ``covered``; ``share`` is the distinct tokens by those of the crossed study."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from _machine import options, publish
from designs import DEMONSTRATION, QUERY, dealt

from iclperm import stats
from iclperm.stats.block_curves import bends

Array = npt.NDArray[Any]

SETS, PERMUTATIONS, QUERIES, MOST, PILOT = 5, 20, 256, 20, 8  # of the study that the others are held against
SHOTS = tuple(range(MOST + 1))
SIX = (0, 1, 2, 4, 8, 20)
LOOKED_AT = (1, 4, 8, 20)
ORDERS = (0.02, 0.04, 0.11)
DESIGNS = (
    ("crossed", 5, QUERIES, SHOTS),
    ("crossed", 5, 64, SHOTS),
    ("crossed", 5, QUERIES, SIX),
    ("blocks", 5, 64, SHOTS),
    ("blocks", 5, 32, SHOTS),
    ("blocks", 5, 64, SIX),
    ("blocks", 5, 64, None),
    ("blocks", 6, 64, SIX),
    ("blocks", 6, 64, None),
)


def bend(k: Array) -> Array:
    """The true averaged curve."""
    return np.asarray(0.5 + 0.3 * (1 - np.exp(-k / 3)))


def drawn(generator: np.random.Generator, order: float, sets: int = SETS) -> Array:
    """[S, P, 21, Q] answers; what order does grows to its whole until k = 4, and changes along a trajectory."""
    normal = generator.standard_normal
    grown = np.minimum(np.arange(MOST + 1) / 4, 1)
    part = order / math.sqrt(2)
    level = bend(np.arange(MOST + 1)) + grown * 0.03 * normal((sets, 1, 1))
    for shape in ((1, PERMUTATIONS), (sets, PERMUTATIONS)):
        kept, own = normal((*shape, 1)), normal((*shape, MOST + 1))
        level = level + grown * part * (kept + own) / math.sqrt(2)
    query = generator.uniform(-0.3, 0.3, QUERIES)
    query = query + order * (normal((1, PERMUTATIONS, 1, QUERIES)) + normal((sets, 1, 1, QUERIES))) * grown[:, None]
    items = (generator.random((sets, PERMUTATIONS, MOST + 1, QUERIES)) < level[..., None] + query).astype(np.uint8)
    items[:, :, 0] = items[0, 0, 0]
    return items


@cache
def truth(order: float) -> Array:
    """[21] what is left of the curve where chances end at 0 and 1, from 300 studies."""
    generator = np.random.default_rng(0)
    return np.asarray(np.mean([drawn(generator, order).mean(axis=(0, 1, 3)) for _ in range(300)], axis=0))


def tokens(queries: int, num_shots: int, sets: int = SETS) -> float:
    """Distinct tokens of trajectories with so many queries at so many numbers of shots."""
    return sets * PERMUTATIONS * (MOST * DEMONSTRATION + num_shots * queries * QUERY)


def means(items: Array, state: Array) -> Array:
    """[21] averaged curve of blocks, query by query at k = 0."""
    there = (state == 0)[:, :, None]
    found = (items * there).sum(axis=3) / there.sum(axis=3)
    found[:, :, 0] = items[0, 0, 0, (state == 0).any(axis=(0, 1))].mean()
    return np.asarray(found.mean(axis=(0, 1)))


def of_design(
    kind: str, sets: int, queries: int, shots: tuple[int, ...] | None, order: float, repeats: int
) -> dict[str, Any]:
    """Studies of one design."""
    true, errors, halves, covered, shares, chosen_sizes = truth(order), [], [], [], [], []
    for repeat in range(repeats):
        generator = np.random.default_rng([round(1000 * order), repeat])  # the same answers for every design
        items, chosen, spent = drawn(generator, order, sets), shots, 0.0
        if chosen is None:
            pilot = dealt(generator, (SETS, PERMUTATIONS, QUERIES), PILOT)
            chosen = bends(SHOTS, means(items[:SETS], pilot))
            spent = tokens(PILOT, len(SHOTS))
            items = drawn(
                generator, order, sets
            )  # of other sets, orders and queries, so that the pilot's noise is not kept
        size = (sets, PERMUTATIONS, QUERIES)
        state = np.where(np.arange(QUERIES) < queries, 0, 4) + np.zeros(size, np.int64)
        if kind == "blocks":
            state = dealt(generator, size, queries)
        mean = means(items, state)
        errors.append(np.interp(SHOTS, chosen, mean[list(chosen)]) - true)
        chosen_sizes.append(len(chosen))
        shares.append((spent + tokens(queries, len(chosen), sets)) / tokens(QUERIES, len(SHOTS)))
        for k in set(LOOKED_AT) & set(chosen):
            if kind == "crossed":
                interval = stats.mean_error(items[:, :, k, :queries]).interval()
            else:
                interval = stats.own_block_components(items[:, :, k], state).mean
            halves.append((interval.high - interval.low) / 2)
            covered.append(interval.low <= true[k] <= interval.high)
    which = {SHOTS: "0 to 20", SIX: "six k"}.get(shots or (), "bends of a pilot")
    return {
        "order": f"{100 * order:g} points", "design": f"{kind} {sets} x {PERMUTATIONS} x {queries}, {which}",
        "k": float(np.mean(chosen_sizes)), "share": float(np.mean(shares)),
        "error": 100 * math.sqrt(float(np.mean(np.square(errors)))), "half": 100 * float(np.median(halves)),
        "covered": float(np.mean(covered)),
    }  # fmt: skip


def cases(repeats: int) -> Iterator[dict[str, Any]]:
    """All designs of all sizes of the order effect."""
    for order in ORDERS:
        for kind, sets, queries, shots in DESIGNS:
            yield of_design(kind, sets, queries, shots, order, repeats)


def main() -> None:
    """Draws and prints."""
    parser = options(__doc__ or "")
    parser.set_defaults(repeats=200)
    given = parser.parse_args()
    publish(f"averaged curves, {given.repeats} repeats", list(cases(given.repeats)), given.json)


if __name__ == "__main__":
    main()
