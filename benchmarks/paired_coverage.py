"""How often the 95 % intervals of two contexts' difference in accuracy hold the truth, and how wide they are.

    python benchmarks/paired_coverage.py [--repeats 4000] [--json benchmarks/results/paired_coverage.json]

Of n queries a share is answered rightly by one of the two contexts alone; of these the first has the more, by the
difference in accuracy; a row has the lowest and the mean coverage, and the mean width, over twenty such cases. ``Wald``
is the difference ± 1.96 `paired_se`, ``Agresti-Min`` what `paired_difference` makes
its tests of, ``Tango`` is `paired_interval`. Their coverage is exact: the chances of all tables are added. ``Wald of no
width`` is the chance that no answer differs, which makes Wald's interval a point. The last rows are grades (beta
distributed about the queries' difficulty, or 0, 1/2 and 1 that seldom differ), drawn ``--repeats`` times:
``paired grades`` is `paired_grades` beside the plain paired t.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
from _machine import options, publish
from scipy import special
from scipy import stats as distributions

from iclperm import stats
from iclperm.stats import paired

Array = npt.NDArray[np.float64]
Bounds = tuple[Array, Array]

SIZES, DISCORDANT, TILTS = (10, 20, 50, 100, 256, 500), (0.02, 0.05, 0.1, 0.2, 0.4), (0.0, 0.25, 0.5, 0.9)
"""Queries; the share that one context alone answers rightly; the difference in accuracy over that share."""
Z = float(special.ndtri(0.975))
LEAST = 1e-12  # chance of a table that is left out


def wald(b: Array, c: Array, num: int) -> Bounds:
    se = np.sqrt((b + c) - (b - c) ** 2 / num) / num
    return (b - c) / num - Z * se, (b - c) / num + Z * se


def agresti_min(b: Array, c: Array, num: int) -> Bounds:
    centre = (b - c) / (num + 2)
    se = np.sqrt((b + c + 1) - (b - c) ** 2 / (num + 2)) / (num + 2)
    return np.maximum(centre - Z * se, -1), np.minimum(centre + Z * se, 1)


def tango(b: Array, c: Array, num: int) -> Bounds:
    return paired._score_bounds(b, c, num, 0.95)


METHODS: dict[str, Callable[[Array, Array, int], Bounds]] = {"Wald": wald, "Agresti-Min": agresti_min, "Tango": tango}


def tables(num: int, first: float, second: float) -> tuple[Array, Array, Array]:
    """b, c and the chance of every table [T] of `num` queries whose chances are those of b and of c."""
    b, c = (part.ravel().astype(float) for part in np.indices((num + 1, num + 1)))
    both = b + c <= num
    b, c = b[both], c[both]
    chance = distributions.binom.pmf(b, num, first) * distributions.binom.pmf(c, num - b, second / (1 - first))
    kept = chance > LEAST
    return b[kept], c[kept], chance[kept]


def of_answers(num: int) -> dict[str, Any]:
    """Coverage and width of every method with `num` queries."""
    covered: dict[str, list[float]] = {name: [] for name in METHODS}
    widths: dict[str, list[float]] = {name: [] for name in METHODS}
    for discordant, tilt in product(DISCORDANT, TILTS):
        first, second = discordant * (1 + tilt) / 2, discordant * (1 - tilt) / 2
        b, c, chance = tables(num, first, second)
        for name, method in METHODS.items():
            low, high = method(b, c, num)
            holds = (low <= first - second + 1e-12) & (first - second - 1e-12 <= high)
            covered[name].append(float(chance @ holds / chance.sum()))
            widths[name].append(float(chance @ (high - low) / chance.sum()))
        check(b[0], c[0], num)
    row: dict[str, Any] = {"queries": num}
    for name in METHODS:
        row |= {f"{name} lowest": min(covered[name]), f"{name} mean": float(np.mean(covered[name]))}
        row[f"{name} width"] = float(np.mean(widths[name]))
    return {**row, "Wald of no width": float(np.mean([(1 - share) ** num for share in DISCORDANT]))}


def check(b: float, c: float, num: int) -> None:
    """That the counts stand for answers: `paired_interval` of the answers themselves."""
    rest = num - int(b) - int(c)
    one, two = ([1] * int(b) + [0] * int(c) + [1] * rest, [0] * int(b) + [1] * int(c) + [1] * rest)
    low, high = tango(np.array([b]), np.array([c]), num)
    assert np.allclose(stats.paired_interval(one, two)[1:3], (low[0], high[0]))


def beta_grades(generator: np.random.Generator, num: int) -> tuple[Array, Array]:
    """Grades of two contexts about the queries' ease, the first the better by .05."""
    ease = generator.uniform(0.1, 0.9, num)
    return tuple(generator.beta(4 * mean, 4 * (1 - mean)) for mean in (ease + 0.05, ease))  # type: ignore[return-value]


def halves(generator: np.random.Generator, num: int) -> tuple[Array, Array]:
    """Grades 0, 1/2 and 1 of which one in twenty differs, by a half, twice as often for the better."""
    second = generator.choice([0.0, 0.5, 1.0], num)
    middle, move = second == 0.5, generator.random(num)
    first = second + middle * (0.5 * (move < 0.1) - 0.5 * (move > 0.95))
    return first, second


GRADES = {"beta": (beta_grades, 0.05), "seldom differing": (halves, 0.5 * (0.1 - 0.05) / 3)}
"""How they are drawn, and the true difference."""


def of_grades(kind: str, num: int, repeats: int) -> dict[str, Any]:
    draw, truth = GRADES[kind]
    holds: dict[str, list[bool]] = {"paired grades": [], "plain t": []}
    points = 0
    for repeat in range(repeats):
        first, second = draw(np.random.default_rng([num, repeat, len(kind)]), num)
        found = stats.paired_grades(first, second)
        holds["paired grades"].append(found.low <= truth <= found.high)
        change = first - second
        half = float(special.stdtrit(num - 1, 0.975)) * float(change.std(ddof=1)) / math.sqrt(num)
        holds["plain t"].append(abs(float(change.mean()) - truth) <= half)
        points += half == 0
    told = {name: float(np.mean(values)) for name, values in holds.items()}
    return {"grades": kind, "queries": num, "difference": truth, **told, "plain t of no width": points / repeats}


def cases(repeats: int) -> Iterator[dict[str, Any]]:
    for num in SIZES:
        yield of_answers(num)
    for kind in GRADES:
        for num in (20, 100):
            yield of_grades(kind, num, repeats)


def main() -> None:
    parser = options(__doc__ or "")
    parser.set_defaults(repeats=4000)
    given = parser.parse_args()
    publish(f"coverage of two contexts' difference, {given.repeats} repeats", list(cases(given.repeats)), given.json)


if __name__ == "__main__":
    main()
