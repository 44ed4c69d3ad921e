"""How often studies of nothing conclude something: simulated answers in which what a kind claims is not there.

    OPENBLAS_NUM_THREADS=1 python benchmarks/null_studies.py [--repeats 2000] [--jobs 2] [--kinds NAMES] [--json FILE]

A study has S sets x 10 permutations (a search 16) and Q queries (a search and a transfer as many dev queries). In
``noise`` there is nothing but queries of different difficulty and single answers; in ``alike`` there are effects, such
as different sets, that are as large for everything that a kind compares. Claims are those of the conclusion:

- order or choice matters more (alike: both have effects of one size);
- a permutation beats a random one in some transfer (alike: sets differ);
- one of 7 strategies is steadier than random, or has another accuracy (alike: every strategy has sets of its own; sets
  and orders differ, strategies do not);
- the average of a curve changes (alike: every set, and every order of it, has changes of its own from k to k, of mean
  0), and one demonstration helps or hurts (noise alone);
- the average is flat within the margin, where it truly changes by just the margin;
- choosing an order gains (alike: sets differ, and queries have favourite orders; orders do not differ).

``before the gate`` is the share of studies in which the test behind a claim finds it, ``open`` that of studies in which
`iclperm.studies.bearing` says that nothing can be concluded, ``false claims`` what is left. Where that is settled by
the number of queries there are a tenth of the repeats. A row is simulated in one process, whatever the jobs.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
from _machine import options, publish
from interval_coverage import key

from iclperm.stats.intervals import side_of
from iclperm.stats.plateau import one_shot, plateau
from iclperm.stats.search import search
from iclperm.studies.bearing import LEAST_QUERIES, Bearing, by_query, of_answers
from iclperm.studies.curve import average_states
from iclperm.studies.selection import selection
from iclperm.studies.sensitivity_conclusion import conclusion, interval_reasons
from iclperm.studies.sensitivity_summary import sensitivity_summary
from iclperm.studies.transfer import transfer

SETS, QUERIES, PERMUTATIONS, ORDERS_SEARCHED = (2, 3, 5), (8, 50, 250), 10, 16
MARGIN = 0.02
STRATEGIES = ("random", "top", "bottom", "shapley", "stable", "blend", "single", "diverse")
Claims = tuple[dict[str, bool], Bearing]
"""What the tests of one study find, by the claim that would be made of it, and what its answers can bear."""


def answers(
    generator: np.random.Generator,
    shape: tuple[int, ...],
    effects: list[tuple[float, tuple[int, ...]]],
    change: Any = 0,
) -> npt.NDArray[np.uint8]:
    """0 or 1 of a shape whose last axis are queries; effects are standard deviations with the axes they vary over."""
    chance = np.broadcast_to(0.6 + generator.uniform(-0.25, 0.25, shape[-1]) + change, shape)
    for size, axes in effects:
        chance = chance + size * generator.standard_normal(axes)
    return (generator.random(shape) < np.clip(chance, 0.02, 0.98)).astype(np.uint8)


def of_sensitivity(generator: np.random.Generator, sets: int, queries: int, alike: bool) -> Claims:
    effects = [(0.05, (sets, 1, 1)), (0.05, (1, PERMUTATIONS, 1)), (0.03, (sets, PERMUTATIONS, 1))]
    correct = answers(generator, (sets, PERMUTATIONS, queries), effects if alike else [])
    summary = sensitivity_summary(correct)
    bears = of_answers(by_query(correct), sets=sets, permutations=PERMUTATIONS)
    told = " ".join(conclusion(summary))
    return {"order or choice matters more": "matters more than" in told}, bears.with_reasons(interval_reasons(summary))


def of_transfer(generator: np.random.Generator, sets: int, queries: int, alike: bool) -> Claims:
    sources, reasons = {}, []
    for name in ("one", "other"):
        shape = (sets, PERMUTATIONS, 2 * queries)
        correct = answers(generator, shape, [(0.08, (sets, 1, 1))] if alike else [])
        dev, test = correct[..., :queries], correct[..., queries:]
        sources[name] = dev.mean(axis=2), test.mean(axis=2)
        reasons += of_answers(by_query(test), sets=sets).reasons
    return {"a permutation beats a random one": bool(transfer(sources).is_gain.any())}, Bearing(tuple(reasons))


def of_selection(generator: np.random.Generator, sets: int, queries: int, alike: bool) -> Claims:
    num = len(STRATEGIES)
    own = [(0.08, (num, sets, 1, 1, 1)), (0.05, (num, sets, PERMUTATIONS, 1, 1))]
    effects = [*own, (0.03, (num, 1, PERMUTATIONS, 1, 1))]
    correct = answers(generator, (num, sets, PERMUTATIONS, 1, queries), effects if alike else [])
    found = selection(correct, strategies=STRATEGIES, shots=(6,)).outcomes.values()
    return {
        "a strategy is steadier": any(outcome.is_steadier for outcome in found),
        "a strategy has another accuracy": any(outcome.accuracy_side for outcome in found),
    }, of_answers([by_query(one) for one in correct], sets=sets)


def of_curve(generator: np.random.Generator, sets: int, queries: int, alike: bool) -> Claims:
    shots = (0, 1, 4, 8, 16)
    effects = [(0.04, (sets, 1, len(shots), 1)), (0.04, (sets, PERMUTATIONS, len(shots), 1))]
    correct = answers(generator, (sets, PERMUTATIONS, len(shots), queries), effects if alike else [])
    correct[:, :, 0] = correct[0, 0, 0]
    pairs = tuple(plateau(correct, shots=shots, first=first) for first in (4, 8))
    claims = {"the average changes": "different" in average_states(pairs, 0.05)}
    if not alike:
        rows = np.arange(sets * PERMUTATIONS).reshape(sets, PERMUTATIONS)
        single = one_shot(correct[0, 0, 0], correct[:, :, 1], rows)
        claims["one demonstration helps or hurts"] = single.num_better + single.num_worse > 0
    right = [by_query(correct[:, :, place]) for place in range(len(shots))]
    return claims, of_answers(right, sets=sets, permutations=PERMUTATIONS)


def of_plateau(generator: np.random.Generator, sets: int, queries: int, alike: bool) -> Claims:
    shape, change = (sets, PERMUTATIONS, 2, queries), np.array([0.0, MARGIN])[:, None]
    effects = [(0.01, (sets, 1, 2, 1)), (0.02, (sets, PERMUTATIONS, 2, 1))]
    correct = answers(generator, shape, effects if alike else [], change)
    states = average_states((plateau(correct, shots=(4, 8), first=4, margin=MARGIN),), 0.05)
    right = [by_query(correct[:, :, place]) for place in range(2)]
    return {"the average is flat": states == ("equivalent",)}, of_answers(right, sets=sets, permutations=PERMUTATIONS)


def of_search(generator: np.random.Generator, sets: int, queries: int, alike: bool) -> Claims:
    shape = (sets, ORDERS_SEARCHED, 2 * queries)
    effects = [(0.08, (sets, 1, 1)), (0.08, (1, ORDERS_SEARCHED, 2 * queries))]
    correct = answers(generator, shape, effects if alike else [])
    dev, test = correct[..., :queries], correct[..., queries:]
    gain = search(dev.mean(axis=2), test, halves=0).gain
    return {"choosing an order gains": side_of(gain, 0) != 0}, of_answers(by_query(test), sets=sets)


KINDS: dict[str, Callable[[np.random.Generator, int, int, bool], Claims]] = {
    "sensitivity": of_sensitivity,
    "transfer": of_transfer,
    "selection": of_selection,
    "curve": of_curve,
    "plateau": of_plateau,
    "search": of_search,
}
"""What simulates one study of a kind."""


def rows(kind: str, sets: int, queries: int, alike: bool, repeats: int) -> list[dict[str, Any]]:
    count = max(repeats // (10 if queries < LEAST_QUERIES else 1), 1)
    found = [KINDS[kind](key(kind, sets, queries, int(alike), repeat), sets, queries, alike) for repeat in range(count)]
    is_open: npt.NDArray[np.bool_] = np.array([not bears.can_conclude for _, bears in found])
    null = {"null": "alike" if alike else "noise", "sets": sets, "queries": queries}
    made = {name: np.array([claims[name] for claims, _ in found]) for name in found[0][0]}
    return [
        {
            "kind": kind, "claim": name, **null, "false claims": float((claimed & ~is_open).mean()),
            "before the gate": float(claimed.mean()), "open": float(is_open.mean()), "repeats": count,
        }
        for name, claimed in made.items()
    ]  # fmt: skip


def main() -> None:
    """Simulates and prints."""
    parser = options(__doc__ or "")
    parser.add_argument("--kinds", default=",".join(KINDS), help="those to simulate, with commas between")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.set_defaults(repeats=2_000)
    given = parser.parse_args()
    kinds = given.kinds.split(",")
    figures: list[dict[str, Any]] = []
    if given.json is not None and given.json.exists():  # of the kinds that are not simulated now
        figures = [one for one in json.loads(given.json.read_text())["figures"] if one["kind"] not in kinds]
    nulls = itertools.product(kinds, (False, True), SETS, QUERIES)
    with ProcessPoolExecutor(given.jobs) as pool:
        made = [pool.submit(rows, kind, sets, queries, alike, given.repeats) for kind, alike, sets, queries in nulls]
        figures += [row for one in made for row in one.result()]
    publish(f"false claims of studies of nothing, {given.repeats} repeats", figures, given.json)


if __name__ == "__main__":
    main()
