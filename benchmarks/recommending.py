"""The winner's curse on simulated recommendations: what is the interval worth that a recommendation states?

    OMP_NUM_THREADS=1 python benchmarks/recommending.py [--recommendations 200] [--json FILE]

Each recommendation races 48 prompts at each of four lengths, with the rules and sizes that `iclperm recommend` has by
default, takes the shortest that the best of the races is not shown to beat, and states its accuracy on test queries
that had no say.
*Stored* populations give whole searches (benchmarks/populations.py): the prompts of a length are orderings drawn from
them, all lengths alike, and test queries are drawn with replacement, so that the accuracy over all of them is the
truth. The *logistic* ones draw abilities of prompts and difficulties of queries anew each time: ``flat`` has no
difference at all, ``steep`` gains with every length. Printed for each: how often the stated interval holds the truth
(the bar: 93 %), how far the accuracy on the dev queries that chose is above it, in points, how often *its* interval
holds it, how often that of the gain over random prompts does, and how often a shorter prompt that is as good was passed
over.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from _machine import options, publish
from populations import load
from scipy import special

from iclperm.runs.raced_shots import num_racing
from iclperm.stats.racing import RaceRule, replay
from iclperm.stats.shortest import accuracy_of, against_random, shortest
from iclperm.studies.recommending import NUM_RANDOM, RANDOM_QUERIES

FloatArray = npt.NDArray[np.float64]
BAR = 0.93
LENGTHS, PROMPTS = 4, 48
RULE = RaceRule(tolerance=0.02)


class Drawn(NamedTuple):
    """What one recommendation sees, and the truth."""

    dev: FloatArray
    """[K, A, N] answers."""
    test: FloatArray
    """[K, A, Q]."""
    truth: FloatArray
    """[K, A] accuracy."""
    random: Callable[[int], FloatArray]
    """Of a length [R, Q], answers of prompts drawn at random to the test queries."""
    mean: FloatArray
    """[K] accuracy of a random prompt."""


def stored(name: str, num_dev: int, num_test: int) -> Callable[[np.random.Generator], Drawn]:
    """Recommendations from the orderings of a stored search; all lengths are alike."""
    found = load(name)
    orderings = found.dev.shape[0] * found.dev.shape[1]
    dev, test = (each.reshape(orderings, -1).astype(np.float64) for each in (found.dev, found.test))

    def draw(rng: np.random.Generator) -> Drawn:
        raced = np.stack([rng.permutation(orderings)[:PROMPTS] for _ in range(LENGTHS)])
        queries = rng.integers(0, test.shape[1], num_test)
        order = rng.permutation(dev.shape[1])[:num_dev]

        def random(_: int) -> FloatArray:
            return np.asarray(test[rng.integers(0, orderings, NUM_RANDOM)][:, queries[:RANDOM_QUERIES]])

        mean = np.full(LENGTHS, test.mean())
        return Drawn(dev[raced][:, :, order], test[raced][:, :, queries], test.mean(axis=1)[raced], random, mean)

    return draw


def logistic(gains: tuple[float, ...], spread: float, num_dev: int, num_test: int) -> Callable[..., Drawn]:
    """Recommendations whose answers follow abilities and difficulties; ``gains`` [K] are those of the lengths."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(61)
    difficulty = 1.5

    def accuracy(ability: FloatArray) -> FloatArray:
        chance = special.expit(np.asarray(ability)[..., None] + difficulty * nodes)
        return np.asarray(chance @ weights / weights.sum())

    def draw(rng: np.random.Generator) -> Drawn:
        ability = np.array(gains)[:, None] + spread * rng.standard_normal((LENGTHS, PROMPTS))
        dev, test = (difficulty * rng.standard_normal(size) for size in (num_dev, num_test))

        def answers(of: FloatArray, hardness: FloatArray) -> FloatArray:
            chance = special.expit(of[..., None] + hardness)
            return (rng.random(chance.shape) < chance).astype(np.float64)

        def random(length: int) -> FloatArray:
            return answers(gains[length] + spread * rng.standard_normal(NUM_RANDOM), test[:RANDOM_QUERIES])

        mean = accuracy(np.array(gains)[:, None] + spread * nodes) @ weights / weights.sum()
        return Drawn(answers(ability, dev), answers(ability, test), accuracy(ability), random, mean)

    return draw


class Simulated(NamedTuple):
    """What one recommendation stated, against the truth."""

    is_held: bool
    is_held_by_dev: bool
    luck: float
    """Accuracy on the dev queries that chose, less the truth."""
    is_gain_held: bool
    place: int
    is_wrong: bool
    """Whether a shorter prompt was passed over that is as good."""
    width: float


def recommend(drawn: Drawn) -> Simulated:
    """One recommendation."""
    racing = num_racing(drawn.dev.shape[2])
    races = [replay(table[:, :racing], RULE) for table in drawn.dev]
    chosen = np.array([race.chosen for race in races])
    lengths = np.arange(LENGTHS)
    after = drawn.dev[lengths, chosen, racing:]
    on_race = [
        table[race.chosen, : race.num_asked[race.chosen]].mean() for table, race in zip(drawn.dev, races, strict=True)
    ]
    found = shortest(after, int(np.argmax(on_race)))
    k, arm = found.place, chosen[found.place]
    truth, truths = drawn.truth[k, arm], drawn.truth[lengths, chosen]
    stated = accuracy_of(drawn.test[k, arm])
    on_dev = accuracy_of(drawn.dev[k, arm, : races[k].num_asked[arm]])
    gain = against_random(drawn.test[k, arm, :RANDOM_QUERIES], drawn.random(k)).gain
    wrong = any(truths[shorter] >= truths[found.reference] for shorter in range(found.place))
    return Simulated(
        stated.low <= truth <= stated.high,
        on_dev.low <= truth <= on_dev.high,
        on_dev.estimate - truth,
        gain.low <= truth - drawn.mean[k] <= gain.high,
        k,
        wrong,
        (stated.high - stated.low) / 2,
    )


POPULATIONS: dict[str, Callable[[np.random.Generator], Drawn]] = {
    "bundled": stored("bundled", 400, 500),
    "gemma_4x32x240": stored("gemma_4x32x240", 240, 240),
    "logistic, flat": logistic((0.5, 0.5, 0.5, 0.5), 0.0, 400, 500),
    "logistic, spread": logistic((0.5, 0.5, 0.5, 0.5), 0.3, 400, 500),
    "logistic, steep": logistic((-0.5, 0.0, 0.4, 0.6), 0.3, 400, 500),
}


def main() -> None:
    parser = options(__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--recommendations", type=int, default=200)
    asked = parser.parse_args()
    figures: list[dict[str, Any]] = []
    for name, draw in POPULATIONS.items():
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        all_of = [recommend(draw(rng)) for _ in range(asked.recommendations)]
        held = float(np.mean([one.is_held for one in all_of]))
        figures.append(
            {
                "population": name,
                "recommendations": len(all_of),
                "stated holds": held,
                "half-width": 100 * float(np.mean([one.width for one in all_of])),
                "luck on dev": 100 * float(np.mean([one.luck for one in all_of])),
                "dev's holds": float(np.mean([one.is_held_by_dev for one in all_of])),
                "gain holds": float(np.mean([one.is_gain_held for one in all_of])),
                "wrong": float(np.mean([one.is_wrong for one in all_of])),
                "shortest": float(np.mean([one.place == 0 for one in all_of])),
                "bar": "kept" if held >= BAR else "missed",
            }
        )
    publish("recommending", figures, asked.json)


if __name__ == "__main__":
    main()
