"""How often the interval of a run that stops by itself holds the truth, beside that of a design fixed beforehand.

    python benchmarks/precision_coverage.py [--repeats 2000] [--json benchmarks/results/precision_coverage.json]

Single answers [S, P, Q] are drawn as in interval_coverage.py: effects of sets, permutations and both together, of one
shape, added to how hard a query is and to what a query makes of a set, and of a permutation. Each simulated run grows
wave by wave as a study with ``precision`` does (`iclperm.stats.sizing.StoppingRule`), on answers that no wave has
seen before, to at most 16 x 64 x 400. ``fixed`` is the cheapest design for the same half-width, its components known
beforehand, analysed at 95 %. ``tokens`` are those of 200-token orderings and 40-token queries. ``reached`` is the share
that did not end at the most there may be. Every run is drawn from a key of its own: figures depend on ``--repeats``
alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from _machine import options, publish
from interval_coverage import SHAPES

from iclperm.stats.components import Effects
from iclperm.stats.sizing import LEVEL, LOOK_LEVEL, Look, StoppingRule, StudySizes, TokenCosts, cheapest, look_at
from iclperm.study.precision import Quantity

MOST = StudySizes(16, 64, 400)
COSTS = TokenCosts(200, 40)
SETS, ORDERS, BOTH = 0.04, 0.025, 0.03
EASE, EASE_OF_SET, EASE_OF_ORDER, LEVEL_OF_ALL = 0.2, 0.06, 0.03, 0.6
WANTED: dict[Quantity, tuple[float, ...]] = {
    "order_effect": (0.008, 0.015),
    "selection_effect": (0.02,),
    "r": (0.4,),
    "accuracy": (0.03,),
}


class Simulated(NamedTuple):
    """One run, and one design of fixed size."""

    holds: bool
    half_width: float
    tokens: float
    waves: int
    is_reached: bool
    fixed_holds: bool
    fixed_half_width: float


def sigma2() -> Effects:
    """Components of the answers, but for what chances are cut to 0 and 1 by."""
    items = LEVEL_OF_ALL * (1 - LEVEL_OF_ALL)
    ease = EASE**2 / 3
    apart = (SETS**2, ORDERS**2, ease, BOTH**2, EASE_OF_SET**2, EASE_OF_ORDER**2)
    return Effects(*apart, items - sum(apart))


def truth(quantity: Quantity) -> float:
    of = sigma2()
    order, selection = math.sqrt(of.P + of.SP), math.sqrt(of.S + of.SP)
    values = {"order_effect": order, "selection_effect": selection, "r": selection / order, "accuracy": LEVEL_OF_ALL}
    return values[quantity]


def answers(generator: np.random.Generator, shape: str, sizes: StudySizes) -> npt.NDArray[np.uint8]:
    """[S, P, Q] 0 or 1."""
    draw, (s, p, q) = SHAPES[shape], sizes
    moved = SETS * draw(generator, (s, 1)) + ORDERS * draw(generator, (1, p)) + BOTH * draw(generator, (s, p))
    ease = generator.uniform(-EASE, EASE, q)
    of_set, of_order = generator.standard_normal((s, 1, q)), generator.standard_normal((1, p, q))
    apart = (EASE_OF_SET * of_set + EASE_OF_ORDER * of_order).astype(np.float32)
    chance = (LEVEL_OF_ALL + moved[..., None] + ease).astype(np.float32) + apart
    return (generator.random(sizes, np.float32) < chance).view(np.uint8)


def run(quantity: Quantity, shape: str, wanted: float, repeat: int) -> Simulated:
    generator = np.random.default_rng([*quantity.encode(), *shape.encode(), round(1e4 * wanted), repeat])
    rule, whole = StoppingRule(quantity, wanted), answers(generator, shape, MOST)
    sizes, waves, tokens = rule.first(MOST), 0, 0.0
    while True:
        found = look_at(quantity, _part(whole, sizes), level=rule.level, seed=repeat)
        waves, tokens = waves + 1, COSTS.of(*sizes)
        following = rule.next(found, sizes, MOST, COSTS)
        if following is None:
            break
        sizes = following
    fixed = cheapest(quantity, sigma2(), wanted, COSTS, MOST) or MOST
    other = look_at(quantity, answers(generator, shape, fixed), level=LEVEL, seed=repeat)
    value = truth(quantity)
    return Simulated(
        _holds(found, value), found.half_width, tokens, waves, rule.is_reached(found), _holds(other, value),
        other.half_width,
    )  # fmt: skip


def _part(whole: npt.NDArray[np.uint8], sizes: StudySizes) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(whole[: sizes.sets, : sizes.permutations, : sizes.queries])


def _holds(look: Look, value: float) -> bool:
    return bool(look.interval.low <= value <= look.interval.high)


def cases(repeats: int, workers: int) -> Iterator[dict[str, Any]]:
    with get_context("fork").Pool(workers) as pool:
        for quantity, halves in WANTED.items():
            for wanted in halves:
                fixed = cheapest(quantity, sigma2(), wanted, COSTS, MOST) or MOST
                for shape in SHAPES:
                    runs = [(quantity, shape, wanted, repeat) for repeat in range(repeats)]
                    done = [Simulated(*each) for each in pool.starmap(run, runs, chunksize=20)]
                    of = {name: np.array([getattr(one, name) for one in done]) for name in Simulated._fields}
                    yield {
                        "asked for": f"{quantity} +- {wanted:g}", "effects": shape,
                        "holds the truth": float(of["holds"].mean()),
                        "half-width": float(np.nanmedian(of["half_width"])),
                        "reached": float(of["is_reached"].mean()), "waves": float(of["waves"].mean()),
                        "tokens": float(np.median(of["tokens"])),
                        "fixed holds": float(of["fixed_holds"].mean()),
                        "fixed half-width": float(np.nanmedian(of["fixed_half_width"])),
                        "fixed tokens": float(COSTS.of(*fixed)), "fixed sizes": " x ".join(map(str, fixed)),
                    }  # fmt: skip


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.set_defaults(repeats=2000)
    given = parser.parse_args()
    figures = list(cases(given.repeats, given.workers))
    publish(f"precision coverage, looks at {LOOK_LEVEL:g}, {given.repeats} repeats", figures, given.json)


if __name__ == "__main__":
    main()
