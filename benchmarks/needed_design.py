"""Whether the design that `needed_design` names tells r from 1 as often as it says: four times in five.

    python benchmarks/needed_design.py [--repeats 2000] [--json benchmarks/results/needed_design.json]
    python benchmarks/needed_design.py --calibrate

Accuracies [n, n] = set effect + permutation effect + residual, with standard deviations s, 1 and 0.7 such that the true
r is as given; the last rows add item noise as large as the residual, as single answers have it. A study tells r from 1
where the jackknife interval of the printed r lies above 1 and the interval free of item noise does (without answers:
the generalised one), as reports decide. ``n before`` is the smallest n by the delta method and normal quantiles alone,
``n`` that of `needed_design`. The effects of the pilot are taken as known.

``--calibrate`` finds the n with power .8 by simulation for many r and residuals, prints what each wants beside the
delta method, and fits the constant of `needed_design` by least squares.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from _machine import options, publish
from interval_coverage import SHAPES
from scipy import special

from iclperm import stats
from iclperm.stats import intervals

Array = npt.NDArray[np.float64]
RESIDUAL, RATIOS, POWER, TAIL = 0.7, (1.14, 1.3, 1.58, 2.0), 0.8, 0.975
NUM_QUERIES = 500
DRAWS, CELLS = 1000, 4_000_000
GRID = [(residual, ratio) for residual in (0.0, 0.5, 1.0, 2.0, 4.0) for ratio in (1.3, 1.58, 2.0, 3.0)]


def variances_of(ratio: float, residual: float) -> dict[str, float]:
    """Of sets, permutations and residual, in squared standard deviations of the permutation effect."""
    return {"S": ratio**2 * (1 + residual**2) - residual**2, "P": 1.0, "E": residual**2}


def delta_size(ratio: float, residual: float) -> int:
    """The smallest n by the delta method and normal quantiles."""
    wanted = float(special.ndtri(TAIL) + special.ndtri(POWER))
    return next(n for n in range(2, 10**5) if math.log(ratio) >= wanted * standard_error(ratio, residual, n))


def standard_error(ratio: float, residual: float, size: int) -> float:
    of = variances_of(ratio, residual)
    return intervals._log_ratio_se(of, of["P"] + of["E"], of["S"] + of["E"], size)


def calibrated_size(ratio: float, residual: float) -> int:
    """The n that `needed_design` names for these variances."""
    of = variances_of(ratio, residual)
    found = intervals._smallest_size(of, of["P"] + of["E"], of["S"] + of["E"], math.log(ratio), TAIL, POWER)
    assert found is not None
    return found


def jackknife_sides(tables: Array) -> Array:
    """1 where the jackknife interval of the printed r of a table [T, n, n] lies above 1, -1 below, else 0."""
    size = tables.shape[1]
    turned = tables.transpose(0, 2, 1)
    estimate = np.log(tables.std(axis=1, ddof=1).mean(1) / tables.std(axis=2, ddof=1).mean(1))
    variance = sum((size - 1) * left_out(side).var(1) for side in (tables, turned))
    half = special.stdtrit(size - 1, TAIL) * np.sqrt(variance)
    return np.asarray((estimate - half > 0).astype(int) - (estimate + half < 0))


def left_out(tables: Array) -> Array:
    """log of the ratio of mean standard deviations, along columns over along rows, without one row at a time [T, n]."""
    size = tables.shape[1]
    rows = tables.std(axis=2, ddof=1)
    others = (rows.sum(1, keepdims=True) - rows) / (size - 1)
    squares = (tables - tables.mean(axis=1, keepdims=True)) ** 2
    rest = squares.sum(1, keepdims=True) - squares * size / (size - 1)
    return np.asarray(np.log(np.sqrt(np.maximum(rest, 0.0) / (size - 2)).mean(axis=2) / others))


def free_sides(generator: np.random.Generator, tables: Array, noise: float) -> Array:
    """The same of the interval free of item noise: `effect_interval` of answers whose noise has this variance.

    Mean squares of sets, permutations and both are those of the tables; the others are drawn, as in the balanced
    Gaussian analysis they are independent of them. Noise 0: `generalized_interval`.
    """
    num, size = tables.shape[:2]
    centred = tables - tables.mean(axis=(1, 2), keepdims=True)
    rows, columns = centred.mean(2), centred.mean(1)
    of_sets, of_orders = size * (rows**2).sum(1), size * (columns**2).sum(1)
    residual = ((centred - rows[:, :, None] - columns[:, None, :]) ** 2).sum((1, 2))
    degrees = (size - 1) ** 2
    drawn = {
        name: squares[:, None] / generator.chisquare(df, (num, DRAWS))
        for name, squares, df in (("S", of_sets, size - 1), ("P", of_orders, size - 1), ("SP", residual, degrees))
    }
    free = 0.0
    if noise:  # of SI, PI and SPI only their common part counts: item noise of each cell
        df = degrees * (NUM_QUERIES - 1)
        seen = noise * generator.chisquare(df, num) / df
        free = (seen * df)[:, None] / generator.chisquare(df, (num, DRAWS))
    order = np.maximum(drawn["P"] + (size - 1) * drawn["SP"] - size * free, 0.0)
    selection = np.maximum(drawn["S"] + (size - 1) * drawn["SP"] - size * free, 0.0)
    above = (selection > order).mean(1)
    below = (selection < order).mean(1)
    return np.asarray((above > TAIL).astype(int) - (below > TAIL))


def power_at(shape: str, ratio: float, residual: float, size: int, repeats: int, noise: float = 0.0) -> float:
    """Share of simulated studies that find r above 1; `noise` is the variance of item noise within the residual."""
    of, draw, found = variances_of(ratio, residual), SHAPES[shape], 0
    generator = np.random.default_rng([*shape.encode(), size, round(100 * ratio), round(100 * residual), repeats])
    step = max(1, CELLS // size**2)
    for begin in range(0, repeats, step):
        num = min(step, repeats - begin)
        tables = math.sqrt(of["S"]) * draw(generator, (num, size, 1)) + draw(generator, (num, 1, size))
        tables += math.sqrt(of["E"] - noise) * draw(generator, (num, size, size))
        if noise:
            tables += math.sqrt(noise) * generator.standard_normal(tables.shape)
        if not begin and size < 60:
            first = stats.jackknife_ratio_interval(tables[0])
            assert jackknife_sides(tables[:1])[0] == int(first.low > 1) - int(first.high < 1)
        found += int(((jackknife_sides(tables) == 1) & (free_sides(generator, tables, noise) == 1)).sum())
    return found / repeats


def cases(repeats: int) -> Iterator[dict[str, Any]]:
    for shape in ("Gaussian", "t4"):
        for ratio in RATIOS:
            sizes = delta_size(ratio, RESIDUAL), calibrated_size(ratio, RESIDUAL)
            before, after = (power_at(shape, ratio, RESIDUAL, size, repeats) for size in sizes)
            small = power_at(shape, ratio, RESIDUAL, 10, repeats)
            yield row(shape, ratio, sizes, before, after) | {"power at n = 10": small}
    residual = RESIDUAL * math.sqrt(2)  # half of its variance is item noise
    for ratio in RATIOS:
        sizes = delta_size(ratio, residual), calibrated_size(ratio, residual)
        powers = [power_at("Gaussian", ratio, residual, size, repeats, RESIDUAL**2) for size in sizes]
        yield row(f"Gaussian, item noise of {NUM_QUERIES} queries", ratio, sizes, *powers)


def row(effects: str, ratio: float, sizes: tuple[int, int], before: float, after: float) -> dict[str, Any]:
    return {"effects": effects, "r": ratio, "n before": sizes[0], "power before": before, "n": sizes[1], "power": after}


def calibrate(repeats: int) -> list[dict[str, Any]]:
    """What the n of power .8 wants beyond the delta method with the t quantile, and the constant fitted to it."""
    figures, weights, wants = [], [], []
    for residual, ratio in GRID:
        start = delta_size(ratio, residual)
        sizes = np.unique([max(4, round(start * factor) + 2) for factor in (1.04, 1.12, 1.25)])
        scaled = special.ndtri([power_at("Gaussian", ratio, residual, int(n), repeats) for n in sizes])
        slope, level = np.polyfit(np.sqrt(sizes), scaled, 1)
        size = float(((special.ndtri(POWER) - level) / slope) ** 2)
        quantiles = float(special.stdtrit(size - 1, TAIL) + special.ndtri(POWER))
        excess = math.log(ratio) / (standard_error(ratio, residual, size) * quantiles) - 1  # type: ignore[arg-type]
        of = variances_of(ratio, residual)
        own = 1 - of["E"] / math.sqrt((of["P"] + of["E"]) * (of["S"] + of["E"]))
        weights.append(own / size)
        wants.append(excess)
        figures.append({"residual": residual, "r": ratio, "n before": start, "n of power .8": size, "excess": excess})
    constant = float(np.dot(weights, wants) / np.dot(weights, weights))
    worst = float(np.abs(np.subtract(wants, constant * np.array(weights))).max())
    return [*figures, {"constant": constant, "largest miss of the excess": worst}]


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--calibrate", action="store_true", help="fit the constant of needed_design")
    parser.set_defaults(repeats=2000)
    given = parser.parse_args()
    figures = calibrate(given.repeats) if given.calibrate else list(cases(given.repeats))
    name = "calibration of the needed design" if given.calibrate else "power of the needed design"
    publish(f"{name}, {given.repeats} repeats", figures, given.json)


if __name__ == "__main__":
    main()
