"""Racing for the best ordering, replayed on stored searches: what it loses, and what it costs.

    OMP_NUM_THREADS=1 python benchmarks/racing.py [--searches 2000] [--only bundled] [--seed 0] [--json FILE]
    OMP_NUM_THREADS=1 python benchmarks/racing.py --certified --searches 20 [--only bundled] [--json FILE]

Each simulated search asks the dev queries in another random order, classes in turn as a study does, and chooses one
ordering of every set. Populations are whole searches (benchmarks/populations.py) and simulated ones that are hard,
drawn anew for every search: half of the orderings alike at the top, one needle, effects too small to matter. *Regret*
is the dev (test) accuracy of the ordering that asking everything chooses, less that of the one chosen, in points;
*kept* the share of races that chose within the tolerance, *broken* the others, *stated* the mean chance of that by the
race itself, which should be neither below *broken* nor far above; *tokens* those of the race over those of asking
everything, contexts asked anew in every wave. Bars: kept in 95 % of the races, at no more than the tokens named with
each population; never above 1.05; less regret than uniform subsampling and than successive halving of as many tokens.

The second command races by the certified rule alone, to tolerances of .5, 1, 2 and 5 points; *kept* is then by each of
these. With ``--json`` the figures of what is not run stay in the file, so that each can have as many searches as it has
time for.

The rule's constants were chosen on ``--seed 1``; figures that are told are of ``--seed 0``, whose orders of queries and
whose hard populations are others. The stored populations are the same, but for the bundled one, of a later model.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from _machine import options, publish
from populations import FOLDER, load

from iclperm.stats.racing import Race, RaceRule, Wave, halving, replay

BARS = {"bundled": 0.10, "gemma_4x32x240": 0.35, "gemma_5x64x600": 0.20}
HARD = ("flat top", "one needle", "tiny effects")
TOLERANCE = 0.01


class Searched(NamedTuple):
    """A population as races see it."""

    name: str
    dev: npt.NDArray[np.float64]
    test: npt.NDArray[np.float64]
    gold: npt.NDArray[np.int64]
    context: npt.NDArray[np.float64]
    query: npt.NDArray[np.float64]


def stored(name: str) -> Searched:
    found = load(name)
    return Searched(
        name,
        found.dev.astype(np.float64),
        found.test.astype(np.float64),
        found.gold_dev,
        found.context_tokens.astype(np.float64),
        found.dev_tokens.astype(np.float64),
    )


def hard(name: str, seed: int, search: int) -> Searched:
    """4 sets x 64 orderings x 600 dev and 600 test queries whose answers are drawn from a logistic model."""
    rng = np.random.default_rng([zlib.crc32(name.encode()), seed, search])
    shape = (4, 64)
    effect = {
        "flat top": np.where(np.arange(64) < 32, 0.0, -rng.exponential(1.0, shape)),
        "one needle": np.where(np.arange(64) == 17, 0.6, 0.0) + np.zeros(shape),
        "tiny effects": rng.normal(0, 0.02, shape),
    }[name]
    answers = []
    for _ in ("dev", "test"):
        difficulty, mixed = rng.normal(1.0, 1.5, (4, 1, 600)), rng.normal(0, 0.7, (*shape, 600))
        answers.append((rng.random((*shape, 600)) < 1 / (1 + np.exp(-effect[..., None] - difficulty - mixed))) * 1.0)
    gold = np.arange(600) % 4
    return Searched(name, answers[0], answers[1], gold, np.full(shape, 144.0), np.full(600, 18.0))


def _same(of: Searched, _: int) -> Searched:
    return of


def orders(gold: npt.NDArray[np.int64], rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """A random order of the queries, classes in turn."""
    turn, place = np.empty(len(gold)), np.empty(len(gold))
    for number, label in enumerate(rng.permutation(np.unique(gold))):
        members = np.flatnonzero(gold == label)
        place[members], turn[members] = rng.permutation(len(members)), number
    return np.lexsort((turn, place))


def uniform(values: npt.NDArray[np.float64], context: float, query: float, budget: float) -> Race:
    """Every ordering asked as many queries as the budget gives."""
    size = int(np.clip((budget / len(values) - context) / query, 1, values.shape[1]))
    asked = np.full(len(values), size)
    return Race(int(values[:, :size].mean(axis=1).argmax()), np.nan, asked, (Wave(np.arange(len(values)), size),))


def halved(values: npt.NDArray[np.float64], context: float, query: float, budget: float) -> Race:
    """Successive halving: of those that are left the better half by all answers so far goes on."""
    first = halving(*values.shape, context, query, budget) or 2
    alive, size, waves = np.arange(len(values)), first, []
    asked = np.zeros(len(values), np.int64)
    while True:
        asked[alive] = size
        waves.append(Wave(alive, size))
        ranked = alive[np.argsort(-values[alive, :size].mean(axis=1), kind="stable")]
        if len(alive) == 1 or size == values.shape[1]:
            return Race(int(ranked[0]), np.nan, asked, tuple(waves))
        alive, size = np.sort(ranked[: -(-len(alive) // 2)]), min(2 * size, values.shape[1])
        if len(alive) == 1:
            return Race(int(alive[0]), np.nan, asked, tuple(waves))


def searches(
    population: Callable[[int], Searched], count: int, race: Callable[..., Race], seed: int
) -> Iterator[dict[str, Any]]:
    """The races of some simulated searches, a row for each."""
    for search in range(count):
        of = population(search)
        per_set = of.context.sum(axis=1) + len(of.query) * of.query.mean() * of.context.shape[1]
        on_dev, on_test = of.dev.mean(axis=2), of.test.mean(axis=2)
        rng = np.random.default_rng([seed, search])
        order = orders(of.gold, rng)
        regrets, losses, stated, tokens = [], [], [], 0.0
        for index, answers in enumerate(of.dev):
            found = race(answers[:, order], of.gold[order], of.context[index].mean(), of.query.mean(), per_set[index])
            best = int(on_dev[index].round(12).argmax())
            regrets.append(on_dev[index, best] - on_dev[index, found.chosen])
            losses.append(on_test[index, best] - on_test[index, found.chosen])
            stated.append(found.failure)
            tokens += found.cost(of.context[index], of.query[order])
        yield {"regrets": regrets, "losses": losses, "stated": stated, "tokens": tokens / per_set.sum()}


def summary(name: str, way: str, rows: list[dict[str, Any]], tolerance: float = TOLERANCE) -> dict[str, Any]:
    """One line of the table."""
    regrets, losses = (np.array([row[name] for row in rows]) for name in ("regrets", "losses"))
    tokens = np.array([row["tokens"] for row in rows])
    return {
        "population": name,
        "way": way,
        "searches": len(rows),
        "tokens": round(float(tokens.mean()), 4),
        "most tokens": round(float(tokens.max()), 4),
        "regret on dev, points": round(100 * float(regrets.mean()), 3),
        "95 % of the searches": round(100 * float(np.quantile(regrets.mean(axis=1), 0.95)), 3),
        "95 % of the races": round(100 * float(np.quantile(regrets, 0.95)), 3),
        "kept": round(float((regrets <= tolerance + 1e-9).mean()), 4),
        "broken": round(float((regrets > tolerance + 1e-9).mean()), 4),
        "stated": round(float(np.mean([row["stated"] for row in rows])), 4) if way.startswith("race") else None,
        "regret on test, points": round(100 * float(losses.mean()), 3),
    }


def ways(name: str, of: Callable[[int], Searched], count: int, seed: int) -> Iterator[dict[str, Any]]:
    """By the calibrated rule, and by each rival for as many tokens."""
    rule = RaceRule(tolerance=TOLERANCE)

    def calibrated(values: Any, classes: Any, *_: float) -> Race:
        return replay(values, rule, classes=classes)

    rows = list(searches(of, count, calibrated, seed))
    yield summary(name, "race, calibrated", rows)
    share = float(np.mean([row["tokens"] for row in rows]))
    for rival, way in (("uniform", uniform), ("halving", halved)):

        def equal(values: Any, _: Any, context: float, query: float, whole: float, way: Any = way) -> Race:
            return way(values, context, query, share * whole)

        yield summary(name, f"{rival}, as many tokens", list(searches(of, count, equal, seed)))


def certified(name: str, of: Callable[[int], Searched], count: int, seed: int) -> Iterator[dict[str, Any]]:
    """By the certified rule, to each tolerance."""
    for tolerance in (0.005, 0.01, 0.02, 0.05):
        rule = RaceRule("certified", tolerance)

        def sure(values: Any, *_: Any, rule: RaceRule = rule) -> Race:
            return replay(values, rule)

        rows = list(searches(of, count, sure, seed))
        yield summary(name, f"race, certified to {100 * tolerance:g} points", rows, tolerance)


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--searches", type=int, default=2000)
    parser.add_argument("--only", nargs="*", help="populations by name")
    parser.add_argument("--seed", type=int, default=0, help="of the orders of queries and of the hard populations")
    parser.add_argument("--certified", action="store_true", help="the certified rule instead, to four tolerances")
    asked = parser.parse_args()
    there = [name for name in BARS if (FOLDER / f"{name}.npz").is_file()]
    figures = []
    for name in asked.only or (*there, *HARD):
        of = partial(hard, name, asked.seed) if name in HARD else partial(_same, stored(name))
        for line in (certified if asked.certified else ways)(name, of, asked.searches, asked.seed):
            figures.append(line | {"bar": None if asked.certified else BARS.get(name)})
            print(line, flush=True)
    earlier = json.loads(asked.json.read_text())["figures"] if asked.json and asked.json.is_file() else []
    again = {(line["population"], line["way"]) for line in figures}
    kept = [line for line in earlier if (line["population"], line["way"]) not in again]
    publish("racing", [*kept, *figures], asked.json)


if __name__ == "__main__":
    main()
