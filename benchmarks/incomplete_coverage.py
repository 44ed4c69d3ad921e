"""Components, effects and their 95 % intervals where answers are missing or queries weigh differently.

    python benchmarks/incomplete_coverage.py [--repeats 2000] [--json benchmarks/results/incomplete_coverage.json]

Single answers of 10 sets x 10 permutations. *Missing*: effects of several shapes, queries that differ in difficulty and
interact with sets and permutations, a share of the answers missing at random; beside each interval its median
half-width. *Weighted*: two to four classes of different sizes, each weighing the same in the accuracy, as oversampling
makes them: order acts on the smallest class alone, or with opposite signs on two halves of the classes, or on all
alike. *Labels*: four classes of equally many queries and equal weight, of a model that favours other labels in every
ordering, so that the recall of a class moves by more than the accuracy; ``as one`` is what comes of taking the queries
for one mixture. ``bias`` is that of the unclipped variance of order, as a share of the truth; where nothing is bounded,
nothing false is said, and that counts as covered. Every study is drawn from a key of its own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from _machine import options, publish
from interval_coverage import SHAPES, key

from iclperm import stats

Array = npt.NDArray[np.float64]

DRAWS = 2_000
SIZE, NUM_QUERIES = 10, 300
MISSING = (0.0, 0.001, 0.01, 0.05, 0.2)
ORDER, SELECTION, INTERACTION, WITH_QUERY = 0.04, 0.04, 0.028, 0.03
CLASSES = {"equal weights": (250, 250), "200/20": (200, 20), "450/50": (450, 50), "83/22/6/2": (83, 22, 6, 2)}
ACTING = ("all alike", "smallest only", "opposite signs")
EACH, FAVOURED = (12, 64, 125), (0.1, 0.25)
_WORDS = {"order": 0, "selection": 1, "r": 2}


def with_queries(generator: np.random.Generator, num_queries: int) -> Array:
    """[S, P, Q] what a query adds to the chance: its difficulty and what it gains from a set or a permutation."""
    difficulty = generator.uniform(-0.15, 0.15, num_queries)
    with_set = WITH_QUERY * generator.standard_normal((SIZE, 1, num_queries))
    return difficulty + with_set + WITH_QUERY * generator.standard_normal((1, SIZE, num_queries))


def effects(generator: np.random.Generator, shape: str) -> tuple[Array, Array, Array]:
    """Of sets [S, 1], permutations [1, P] and both [S, P], with the standard deviations above."""
    draw = SHAPES[shape]
    return (
        SELECTION * draw(generator, (SIZE, 1)),
        ORDER * draw(generator, (1, SIZE)),
        INTERACTION * draw(generator, (SIZE, SIZE)),
    )


def drawn(generator: np.random.Generator, chance: Array) -> npt.NDArray[np.uint8]:
    """0 or 1 of each chance."""
    return (generator.random(chance.shape) < chance).astype(np.uint8)


def summed(row: dict[str, Any], found: list[stats.SensitivityIntervals], true: tuple[float, float]) -> dict[str, Any]:
    """Coverage and median half-width of the three intervals."""
    truths = (*true, true[1] / true[0] if true[0] else math.nan)
    for name, place in _WORDS.items():
        if math.isnan(truths[place]):
            continue
        intervals = [each[place] for each in found]
        misses = sum(each.low > truths[place] or each.high < truths[place] for each in intervals)
        row[f"{name} covered"] = 1 - misses / len(intervals)
        half = float(np.median(np.nan_to_num([(each.high - each.low) / 2 for each in intervals], nan=math.inf)))
        row[f"{name} ±"] = half if name == "r" else 100 * half
    return row


def missing(shape: str, share: float, repeats: int) -> dict[str, Any]:
    """Studies of which `share` of the answers is missing at random."""
    true = math.hypot(ORDER, INTERACTION), math.hypot(SELECTION, INTERACTION)
    found, squares = [], []
    for repeat in range(repeats):
        generator = key(f"missing {shape}", repeat)
        sets, permutations, both = effects(generator, shape)
        correct = drawn(generator, 0.6 + (sets + permutations + both)[..., None] + with_queries(generator, NUM_QUERIES))
        state = (generator.random(correct.shape) < share).astype(np.uint8)
        components = stats.variance_components(correct, state)
        squares.append(components.sigma2.P + components.sigma2.SP)
        found.append(stats.effect_interval(components, draws=DRAWS, seed=repeat))
    row = {"effects": shape, "missing": share, "bias": float(np.mean(squares)) / true[0] ** 2 - 1}
    return summed(row, found, true)


def weighted(sizes: str, acting: str, repeats: int) -> dict[str, Any]:
    """Studies of classes of different sizes, each with the same weight in the accuracy; `acting` says on which order
    acts. Sets act on all alike."""
    numbers = np.array(CLASSES[sizes])
    gold = np.repeat(np.arange(len(numbers)), numbers)
    weights = (numbers.max() / numbers)[gold]
    slope = {
        "all alike": np.ones(len(numbers)),
        "smallest only": np.arange(len(numbers)) == len(numbers) - 1,
        "opposite signs": np.where(np.arange(len(numbers)) % 2, -1.0, 1.0),
    }[acting].astype(np.float64)
    by_class = 2 * slope
    acts = float(by_class.mean())
    true = math.hypot(acts * ORDER, INTERACTION), math.hypot(SELECTION, INTERACTION)
    found, squares, covered = [], [], 0
    for repeat in range(repeats):
        generator = key(f"{sizes} {acting}", repeat)
        sets, permutations, both = effects(generator, "Gaussian")
        of_class = (sets + both)[..., None] + permutations[..., None] * by_class
        correct = drawn(generator, 0.6 + of_class[..., gold] + with_queries(generator, len(gold)))
        mean = stats.mean_error(correct, weights, classes=gold).interval()
        covered += mean.low <= 0.6 <= mean.high
        components = stats.variance_components(correct, weights=weights, classes=gold)
        squares.append(components.sigma2.P + components.sigma2.SP)
        found.append(stats.effect_interval(components, draws=DRAWS, seed=repeat))
    row = {"classes": sizes, "order acts on": acting, "true order": 100 * true[0]}
    row |= {"bias": float(np.mean(squares)) / true[0] ** 2 - 1}
    return summed(row, found, true) | {"mean covered": covered / repeats}


def labels(each: int, favoured: float, repeats: int) -> dict[str, Any]:
    """Studies of four classes of `each` queries, whose recalls move by `favoured` with every ordering, in sum by 0."""
    gold = np.repeat(np.arange(4), each)
    components, mixed, tables = [], [], []
    for repeat in range(repeats):
        generator = key(f"labels {each} {favoured}", repeat)
        moved = favoured * generator.standard_normal((SIZE, SIZE, 4))
        moved -= moved.mean(axis=2, keepdims=True)
        recall = np.clip(0.5 + sum(effects(generator, "Gaussian"))[..., None] + moved, 0.01, 0.99)
        tables.append(recall.mean(axis=2))
        correct = drawn(generator, recall[..., gold] + with_queries(generator, len(gold)))
        components.append(stats.variance_components(correct, classes=gold))
        mixed.append(stats.variance_components(correct).sigma2)
    true = [float(np.sqrt(np.var(tables, axis=axis, ddof=1).mean())) for axis in (2, 1)]
    found = [stats.effect_interval(one, draws=DRAWS, seed=repeat) for repeat, one in enumerate(components)]
    biases = {
        name: float(np.mean([one.P + one.SP for one in sigma2])) / true[0] ** 2 - 1
        for name, sigma2 in (("bias", [one.sigma2 for one in components]), ("bias as one", mixed))
    }
    row = {"classes": f"4 x {each}", "recall moves by": 100 * favoured, "true order": 100 * true[0]} | biases
    return summed(row, found, (true[0], true[1]))


def main() -> None:
    """Simulates and prints; half-widths of order and selection in points of accuracy."""
    parser = options(__doc__ or "")
    parser.set_defaults(repeats=2_000)
    parser.add_argument("--only", choices=("missing", "weighted", "labels"))
    given = parser.parse_args()
    rows = []
    if given.only in (None, "missing"):
        rows += [missing(shape, share, given.repeats) for shape in list(SHAPES)[:3] for share in MISSING]
    if given.only in (None, "weighted"):
        rows += [weighted(sizes, acting, given.repeats) for sizes in CLASSES for acting in ACTING]
    if given.only in (None, "labels"):
        rows += [labels(each, favoured, given.repeats) for each in EACH for favoured in FAVOURED]
    publish(f"incomplete and weighted answers, {given.repeats} repeats", rows, given.json)


if __name__ == "__main__":
    main()
