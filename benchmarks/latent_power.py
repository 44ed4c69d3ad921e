"""Whether the power that a fitted latent model foretells (`LatentComponents.power`) is the power that studies have.

    python benchmarks/latent_power.py [--repeats 120] [--pilots 8] [--json benchmarks/results/latent_power.json]

Pilots of 10 sets x 10 permutations x 200 queries are drawn from a model on the logit whose effects are known: standard
deviations of .5 (permutations), .3 (both), 1.5 (queries), .5 and .5 (queries with either), and of sets such that r is
as given, at accuracies of .5, .8 and .95. ``foretold`` is what the pilots say of a study of n x n x 200 with the true
order effect and r given by `order=` and `ratio=`: mean, and 5 % and 95 % quantiles over pilots; ``from the pilot`` the
same with their own estimates. ``power`` is the share of fresh studies of that size, fitted from nothing, that do tell
the order effect from 0, or r from 1 on the right side, with its standard error.
"""

from __future__ import annotations

import math

import numpy as np
from _machine import options, publish
from latent_coverage import SPREADS, Case, key, middle

from iclperm.errors import DataError
from iclperm.stats.intervals import side_of
from iclperm.stats.latent import LatentComponents, latent_components

QUERIES, PILOT, DRAWS = 200, 10, 1_000
ORDER = math.hypot(SPREADS["p"], SPREADS["sp"])
ROWS = ((0.5, 1.8, 15), (0.8, 1.8, 15), (0.95, 1.8, 15))
"""Accuracy, true r, sets and permutations of the study."""


def study(accuracy: float, ratio: float, size: int, what: str, number: int) -> LatentComponents | None:
    """A study of the known model, fitted; None where it cannot be."""
    generator = key(f"latent power {what}", accuracy, ratio, size, number)
    logit = np.full((size, size, QUERIES), middle(Case("Gaussian", accuracy)))
    of_sets = math.sqrt((ratio * ORDER) ** 2 - SPREADS["sp"] ** 2)
    spreads = SPREADS | {"s": of_sets}
    for axes, spread in spreads.items():
        shape = [length if axis in axes else 1 for axis, length in zip("spq", logit.shape, strict=True)]
        logit += spread * generator.standard_normal(shape)
    correct = (generator.random(logit.shape) < 1 / (1 + np.exp(-logit))).astype(np.uint8)
    try:
        return latent_components(correct, draws=DRAWS)
    except DataError:
        return None


def tells(found: LatentComponents | None) -> tuple[bool, bool]:
    """Whether a study tells the order effect from 0, and r from 1, above it."""
    if found is None:
        return False, False
    ratio = (found.jackknife or found.gaussian).ratio
    return found.gaussian.order.low > 0, side_of(ratio, 1) == 1


def foretold(pilots: list[LatentComponents], size: int, repeats: int, **given: float) -> list[tuple[float, float]]:
    """What every pilot says: the power to see an order effect, and to tell r from 1."""
    said = (pilot.power(size, size, QUERIES, repeats=repeats, **given) for pilot in pilots)
    return [(one.sees_order, one.tells_ratio) for one in said]


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--pilots", type=int, default=8)
    parser.set_defaults(repeats=120)
    given = parser.parse_args()
    figures = []
    for accuracy, ratio, size in ROWS:
        fresh = np.mean([tells(study(accuracy, ratio, size, "fresh", i)) for i in range(given.repeats)], axis=0)
        fitted = (study(accuracy, ratio, PILOT, "pilot", i) for i in range(given.pilots))
        pilots = [pilot for pilot in fitted if pilot is not None]
        each = max(given.repeats // len(pilots), 10)
        known = np.array(foretold(pilots, size, each, order=ORDER, ratio=ratio))
        own = np.array(foretold(pilots, size, each))
        low, high = np.quantile(known[:, 1], (0.05, 0.95))
        figures.append({
            "accuracy": accuracy, "true r": ratio, "n": size, "pilots": len(pilots),
            "power, order": float(fresh[0]), "foretold, order": float(known[:, 0].mean()),
            "power, r": float(fresh[1]), "se": float(math.sqrt(fresh[1] * (1 - fresh[1]) / given.repeats)),
            "foretold, r": float(known[:, 1].mean()), "5 %": float(low), "95 %": float(high),
            "from the pilot, r": float(own[:, 1].mean()), "its lowest": float(own[:, 1].min()),
            "its highest": float(own[:, 1].max()),
        })  # fmt: skip
    publish(f"power foretold by a latent model, {given.repeats} fresh studies a row", figures, given.json)


if __name__ == "__main__":
    main()
