"""Verdicts of single trajectories, flat or not: all asked everything, or each until it is decided.

    python benchmarks/verdicts.py [--repeats 200] [--json benchmarks/results/verdicts.json]

100 trajectories (5 sets x 20 permutations) between two numbers of demonstrations, margin .02. Their true changes are
Gaussian around 0 with the ``spread`` of a row, or all just the margin (``worst``: a flat verdict is an error) or all 0
(``none``: a change is), and a share of the queries ``moves``: is answered otherwise. ``most`` queries there may be.

``fixed`` asks a curve of every k from 0 to 20 and tests once, after all queries; ``until decided`` is a run with
``precision: plateaus from 4 +- 0.02`` (`iclperm.stats.verdicts.sequential_verdicts`), which asks the first 256 queries
so, and more of undecided trajectories at k = 4 and 20 alone. ``decided`` is the share of trajectories with a verdict,
``queries`` their mean number by the most, ``tokens`` the distinct tokens by those of the fixed one, with 45 tokens a
demonstration and 50 a query, contexts once in every wave that they are in, and ``error`` the share of studies with a
wrong verdict: a flat one where the true change is the margin or more, a change where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from _machine import options, publish
from designs import DEMONSTRATION, QUERY

from iclperm.stats.verdicts import looks_until, sequential_verdicts

Array = npt.NDArray[Any]

MARGIN, SHAPE, SHOTS, NUM_SHOTS = 0.02, (5, 20), (4, 20), 21
ROWS: tuple[tuple[str | float, float, int], ...] = (
    (0.01, 0.05, 4200),
    (0.01, 0.15, 4200),
    (0.04, 0.15, 4200),
    (0.01, 0.15, 10_000),
    (0.04, 0.15, 10_000),
    (0.10, 0.30, 4200),
    ("worst", 0.02, 2000),
    ("worst", 0.15, 4200),
    ("none", 0.05, 2000),
)


def drawn(generator: np.random.Generator, changes: Array, moves: float, num: int) -> tuple[Array, Array]:
    """Answers [S, P, Q] before and after; of each trajectory a share ``moves`` of the queries, or its change."""
    gained, lost = (
        (np.maximum(moves, np.abs(changes)) + changes) / 2,
        (np.maximum(moves, np.abs(changes)) - changes) / 2,
    )
    chance = generator.random((*SHAPE, num), dtype=np.float32)
    is_gained, is_lost = chance < gained[..., None], chance > 1 - lost[..., None]
    before = (generator.random((*SHAPE, num), dtype=np.float32) < 0.7) & ~is_gained | is_lost
    return before.astype(np.float64), (before & ~is_lost | is_gained).astype(np.float64)


def tokens(asked: Array, looks: tuple[int, ...]) -> float:
    """Distinct tokens of trajectories that were asked so many queries each: up to the first look at every k, then at
    both, their demonstrations anew in every wave."""
    waves = sum(int((asked >= size).sum()) for size in looks)
    first = looks[0] * NUM_SHOTS * asked.size + len(SHOTS) * float((asked - looks[0]).sum())
    return waves * SHOTS[-1] * DEMONSTRATION + QUERY * first


def of_row(spread: str | float, moves: float, most: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Both designs on the same answers."""
    generator = np.random.default_rng(0)
    looks = looks_until(most)
    found: dict[str, list[tuple[float, ...]]] = {"fixed": [], "until decided": []}
    for _ in range(repeats):
        changes = np.zeros(SHAPE)
        if spread == "worst":
            changes = np.full(SHAPE, MARGIN)
        elif spread != "none":
            changes = float(spread) * generator.standard_normal(SHAPE)
        answers = drawn(generator, changes, moves, most)
        for name, sizes in (("fixed", (most,)), ("until decided", looks)):
            verdict = sequential_verdicts(*answers, sizes, margin=MARGIN)
            wrong = (verdict.state == 1) & (np.abs(changes) >= MARGIN) | (verdict.state == 2) & (changes == 0)
            share = tokens(verdict.num_queries, sizes) / tokens(np.full(SHAPE, most), (most,))
            found[name].append(
                ((verdict.state > 0).mean(), verdict.num_queries.mean() / most, share, float(wrong.any()))
            )
    for name, values in found.items():
        decided, queries, share, error = np.mean(values, axis=0)
        yield {
            "spread": spread if isinstance(spread, str) else f"{100 * spread:g} points", "moves": moves, "most": most,
            "design": name, "decided": decided, "queries": queries, "tokens": share, "error": error,
        }  # fmt: skip


def main() -> None:
    """Draws and prints."""
    parser = options(__doc__ or "")
    parser.set_defaults(repeats=200)
    given = parser.parse_args()
    rows = [row for case in ROWS for row in of_row(*case, given.repeats)]
    publish(f"verdicts of single trajectories, {given.repeats} repeats", rows, given.json)


if __name__ == "__main__":
    main()
