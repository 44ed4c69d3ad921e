"""Whether known effects are found again, and how far item noise pulls the printed r towards 1.

    python benchmarks/recovery.py [--repeats 400] [--json benchmarks/results/recovery.json]

Simulated answers (`iclperm.reference.synthetic`) of 10 sets x 10 permutations, with effects of the size that arXiv
2511.09700 prints on average and with larger ones, for several numbers of queries. Components are means over the repeats
with their standard errors; r is the median, as ratios have no mean.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from _machine import options, publish

from iclperm import stats
from iclperm.reference.synthetic import KnownEffects, answers, expected_ratio

CASES = {
    "as printed, order = selection": KnownEffects(0.015, 0.015, 0.012),
    "selection twice the order": KnownEffects(0.04, 0.015, 0.012),
    "order twice the selection": KnownEffects(0.015, 0.04, 0.012),
    "nothing": KnownEffects(0.0, 0.0, 0.0),
}
QUERIES = (60, 250, 500, 2_000)


def case(name: str, effects: KnownEffects, num_queries: int, repeats: int) -> dict[str, Any]:
    """What many simulated studies estimate, beside the truth."""
    generator = np.random.default_rng([len(name), num_queries])
    sigma2, raw, free = [], [], []
    for _ in range(repeats):
        correct = answers(effects, (10, 10, num_queries), generator)
        components = stats.variance_components(correct)
        sigma2.append((components.sigma2.S, components.sigma2.P, components.sigma2.SP))
        raw.append(stats.sensitivity_ratio(correct.mean(axis=2), "rms"))
        free.append(components.ratio)
    found, error = np.mean(sigma2, axis=0), np.std(sigma2, axis=0, ddof=1) / math.sqrt(repeats)
    true = np.square((effects.sets, effects.permutations, effects.interaction))
    named = {
        f"{letter} {what}": float(value)
        for letter, *values in zip(("S", "P", "SP"), true, found, error, strict=True)
        for what, value in zip(("true", "found", "se"), values, strict=True)
    }
    return {
        "effects": name,
        "queries": num_queries,
        **{key: value * 1e4 for key, value in named.items()},
        "true r": effects.ratio,
        "r expected": expected_ratio(effects, num_queries),
        "r as printed": float(np.median(raw)),
        "r noise-free": float(np.nanmedian(free)),
    }


def main() -> None:
    """Simulates and prints; variances in units of 1e-4."""
    parser = options(__doc__ or "")
    parser.set_defaults(repeats=400)
    given = parser.parse_args()
    repeats = max(given.repeats, 2)
    figures = [case(name, effects, queries, repeats) for name, effects in CASES.items() for queries in QUERIES]
    publish(f"recovery of known effects, {repeats} studies each (variances in 1e-4)", figures, given.json)


if __name__ == "__main__":
    main()
