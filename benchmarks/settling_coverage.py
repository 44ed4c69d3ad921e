"""Whether the bands that `stats.settling` draws hold what fresh data of the same size say, with the truth known.

    python benchmarks/settling_coverage.py [--repeats 40] [--json benchmarks/results/settling_coverage.json]

Studies of 3 sets of 8 demonstrations, 32 orders and 256 queries in blocks of 16, shots 1 to 8, are drawn from a model
on the logit: every demonstration has an effect (mean .05, standard deviation .25), every ordering one at every k
(.3), every query its ease (1.2) and its own reaction to each set (.4). For every study, with its demonstrations held,
two fresh ones have other orders (other queries on the axis of queries, the orders held), and are cut to each size.
``curve`` is how often the 90 % band of the mean at k = 4 holds the fresh mean; ``scores`` how often the 90 % band of
the rank correlation of the marginal scores with a disjoint part holds that of two fresh parts (at full size the
halves' correlation, stepped up, which has no band: only means are shown); ``same verdict`` the mean share of the
pairs of disjoint parts that agree on the verdict from k = 4 to 8, beside that of the fresh pairs.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from _machine import options, publish

from iclperm.stats.correlation import pooled_rank_correlation
from iclperm.stats.demonstrations import demonstration_scores
from iclperm.stats.settling import AxisSettling, BlockSums, blocks_of, settling
from iclperm.stats.tensor import segment_sums

Array = npt.NDArray[Any]
Axis = Literal["permutations", "queries"]

SETS, LENGTH, ORDERS, QUERIES, BLOCK = 3, 8, 32, 256, 16
SHOTS = tuple(range(1, LENGTH + 1))
EDGES = np.arange(0, QUERIES + 1, BLOCK)
MARGIN, AT, SCORE = 0.02, 3, "marginal"
SIZES: dict[Axis, tuple[int, ...]] = {"permutations": (8, 16, 32), "queries": (4, 8, 16)}


class World:
    """Demonstrations, orders and queries of one study, of which an axis can be drawn anew."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        generator = np.random.default_rng([seed, *b"world"])
        self._effect = 0.05 + 0.25 * generator.standard_normal((SETS, LENGTH))

    def study(self, orders: int, queries: int) -> tuple[BlockSums, Array]:
        """Sums over blocks, and orders [P, K]; equal numbers are the same orders, or queries."""
        of_orders, of_queries = (
            np.random.default_rng([self._seed, number, *name])
            for number, name in ((orders, b"orders"), (queries, b"queries"))
        )
        order = np.stack([of_orders.permutation(LENGTH) for _ in range(ORDERS)])
        told = np.cumsum(self._effect[:, order], axis=2)  # [S, P, K]
        lead = told + 0.3 * of_orders.standard_normal(told.shape)
        ease = 1.2 * of_queries.standard_normal(QUERIES) + 0.4 * of_queries.standard_normal((SETS, 1, 1, QUERIES))
        chance = 1 / (1 + np.exp(-(0.3 + lead[..., None] + ease)))
        drawn = np.random.default_rng([self._seed, orders, queries, *b"answers"]).random(chance.shape)
        correct = (drawn < chance).astype(np.uint8)
        right = segment_sums(correct, EDGES)
        return blocks_of(correct, EDGES, shots=SHOTS, right=right, firsts=(4,)), order


def cut(blocks: BlockSums, order: Array, axis: Axis, size: int) -> tuple[BlockSums, Array]:
    """The first levels of an axis."""
    place = 1 if axis == "permutations" else -1
    kept = range(size)
    of = blocks.differences[0]
    parts = {name: np.take(getattr(of, name), kept, place) for name in ("once", "twice", "square")}
    by_block = kept if axis == "queries" else range(len(blocks.weight))
    weight, squares, counts = (np.take(one, by_block) for one in (blocks.weight, blocks.squares, blocks.counts))
    right = np.take(blocks.right, kept, place)
    found = BlockSums(right, weight, squares, counts, blocks.shots, (of._replace(**parts),))
    return found, order[:size] if axis == "permutations" else order


def said(blocks: BlockSums, order: Array, axis: Axis) -> tuple[float, Array, str]:
    """The mean at k = 4, the scores, and the verdict of a whole study."""
    scores = demonstration_scores(blocks.accuracy, order, blocks.shots, [SCORE])[SCORE].values
    whole = settling(blocks, axis, [], None, margin=MARGIN, resamples=2)
    return float(blocks.accuracy[..., AT].mean()), scores, whole.verdicts[0].whole


def rows_of(axis: Axis, repeats: int) -> list[dict[str, Any]]:
    """One row a size."""
    sums: dict[int, list[list[float]]] = {size: [] for size in SIZES[axis]}
    for seed in range(repeats):
        world = World(seed)
        study = world.study(0, 0)
        found: AxisSettling = settling(study[0], axis, SIZES[axis], study[1], margin=MARGIN, seed=seed)
        fresh = [world.study(*((n, 0) if axis == "permutations" else (0, n))) for n in (1, 2)]
        for place, size in enumerate(found.sizes):
            one, other = (said(*cut(*each, axis, size), axis) for each in fresh)
            low, _, high = found.curve[place, AT]
            agreed = pooled_rank_correlation(one[1], other[1])
            least, middle, most = found.scores[SCORE].with_other[place]
            sums[size].append([
                float(low <= one[0] <= high), float(least <= agreed <= most), middle, agreed,
                found.verdicts[0].same_other[place], float(one[2] == other[2]),
            ])  # fmt: skip
    rows = []
    for place, (size, values) in enumerate(sums.items()):
        curve, scores, middle, agreed, same, truly = np.array(values).mean(axis=0).tolist()
        is_whole = place == len(sums) - 1
        rows.append({
            "axis": axis, "size": size * (BLOCK if axis == "queries" else 1), "studies": repeats,
            "curve, 90 %": None if is_whole else curve, "scores, 90 %": None if is_whole else scores,
            "scores, said": middle, "scores, fresh": agreed,
            "same verdict, said": None if is_whole else same, "same verdict, fresh": truly,
        })  # fmt: skip
    return rows


def main() -> None:
    parser = options(__doc__ or "")
    parser.set_defaults(repeats=40)
    given = parser.parse_args()
    figures = [row for axis in SIZES for row in rows_of(axis, given.repeats)]
    publish(f"bands of settling, {given.repeats} studies", figures, given.json)


if __name__ == "__main__":
    main()
