"""How often the 95 % intervals of a comparison hold the truth, and how often its tests cry where there is nothing.

    python benchmarks/compare_coverage.py [--repeats 2000] [--json benchmarks/results/compare_coverage.json]

Two studies of 10 sets x 10 permutations x 300 queries. The chance of a right answer is a base, plus effects of set,
permutation and both with standard deviations s, 1 and 0.7 times `ORDER_POINTS`, such that r is as given, plus the
difficulty of the query. ``paired``: both saw the same sets, permutations and queries; effects correlate 0.5, and
difficulty is the same. ``unpaired``: nothing in common. Columns are the coverage of r_A/r_B as printed (item noise
included in the truth), of the same free of it (where it is defined), of the differences of order effect, selection
effect and accuracy; then the shares of p-values of at most .05: the ``size`` of the tests where nothing differs, their
``power`` where r is 1.58 and 1; `family` is that of comparisons in which any p-value after Holm is. ``weak`` has
effects a tenth of the item noise.

McNemar: one answer table of 100 contexts, the same chance for both models but for a query's own liking of one of them;
and 25 contexts in which few queries are answered otherwise, with the coverage of the interval of the difference.

Pooled: 6 models, log r normal around log 1.5 with standard deviation tau; 10 x 10 accuracies that share sets and
permutations (effects correlate 0.5), pooled with the jackknife's covariance and, ``errors alone``, without what they
share. Slope: the same six, the order sensitivity multiplied by 0.8 for ten times the parameters. Every row is drawn
from a key of its own, so the figures depend on ``--repeats`` alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from _machine import options, publish
from interval_coverage import SHAPES

from iclperm import stats
from iclperm.studies.studied import matched_interval

Array = npt.NDArray[np.float64]

SIZE, NUM_QUERIES = 10, 300
ORDER_POINTS, WEAK_POINTS = 0.04, 0.003
RESIDUAL = 0.7
BASE, GAP = 0.6, 0.05
EASE = 0.2
RHO = 0.5
MODELS = 6
SIZES = np.array([0.5e9, 1.5e9, 3e9, 7e9, 14e9, 72e9])
PER_TENFOLD = 0.8


def common(
    generator: np.random.Generator, shape: str, size: tuple[int, ...], rho: float, count: int = 2
) -> list[Array]:
    """Effects of unit variance of `count` studies, correlated rho."""
    draw = SHAPES[shape]
    shared = draw(generator, size) if rho else 0.0
    return [math.sqrt(rho) * shared + math.sqrt(1 - rho) * draw(generator, size) for _ in range(count)]


def accuracies(generator: np.random.Generator, shape: str, ratios: Any, points: Any, rho: float) -> list[Array]:
    """[S, P] effects of each study."""
    count = len(ratios)
    sets, permutations, both = (
        common(generator, shape, size, rho, count) for size in ((SIZE, 1), (1, SIZE), (SIZE, SIZE))
    )
    scale = [math.sqrt(max(ratio**2 * (1 + RESIDUAL**2) - RESIDUAL**2, 0)) for ratio in ratios]
    return [points[i] * (scale[i] * sets[i] + permutations[i] + RESIDUAL * both[i]) for i in range(count)]


def two_studies(
    generator: np.random.Generator,
    shape: str,
    ratios: tuple[float, float],
    points: tuple[float, float],
    gap: float,
    paired: bool,
) -> list[npt.NDArray[np.uint8]]:
    """[S, P, Q] answers of both."""
    effects = accuracies(generator, shape, ratios, points, RHO if paired else 0.0)
    ease = [generator.uniform(-EASE, EASE, NUM_QUERIES)]
    ease.append(ease[0] if paired else generator.uniform(-EASE, EASE, NUM_QUERIES))
    found = []
    for base, effect, easy in zip((BASE + gap, BASE), effects, ease, strict=True):
        chance = base + effect[..., None] + easy
        found.append((generator.random(chance.shape) < chance).astype(np.uint8))
    return found


def printed_ratio(ratio: float, points: float, base: float) -> float:
    """r with the noise of 300 queries in both sensitivities."""
    order = points**2 * (1 + RESIDUAL**2)
    spread = points**2 * (ratio**2 * (1 + RESIDUAL**2) + 1)
    noise = (base * (1 - base) - EASE**2 / 3 - spread) / NUM_QUERIES
    return math.sqrt((ratio**2 * order + noise) / (order + noise))


def holds(contrast: stats.Contrast, truth: float) -> float:
    """Whether an interval holds the truth; NaN where there is none."""
    return math.nan if math.isnan(contrast.low) else float(contrast.low <= truth <= contrast.high)


def known(values: list[float]) -> float | None:
    """Mean of those that are not NaN; None where all are."""
    defined = [value for value in values if not math.isnan(value)]
    return float(np.mean(defined)) if defined else None


def of_comparison(shape: str, paired: bool, case: str, repeats: int) -> dict[str, Any]:
    different = case == "different"
    ratios = (1.58, 1.0) if different else (1.0, 1.0)
    points = (
        (ORDER_POINTS, 0.75 * ORDER_POINTS) if different else (WEAK_POINTS if case == "weak" else ORDER_POINTS,) * 2
    )
    gap = GAP if different else 0.0
    effect = [point * math.hypot(1, RESIDUAL) for point in points]
    truths = {
        "r": printed_ratio(ratios[0], points[0], BASE + gap) / printed_ratio(ratios[1], points[1], BASE),
        "r free": ratios[0] / ratios[1],
        "order": effect[0] - effect[1],
        "selection": ratios[0] * effect[0] - ratios[1] * effect[1],
        "accuracy": gap,
    }
    covered: dict[str, list[float]] = {name: [] for name in truths}
    rejected: dict[str, list[bool]] = {name: [] for name in (*truths, "family")}
    for repeat in range(repeats):
        generator = np.random.default_rng([*f"{shape} {paired} {case}".encode(), repeat])
        answers = two_studies(generator, shape, ratios, points, gap, paired)
        found = stats.compare(*answers, shared=("sets", "permutations", "queries") if paired else "")
        contrasts = (found.ratio, found.ratio_free, found.order, found.selection, found.accuracy[0])
        for (name, truth), contrast in zip(truths.items(), contrasts, strict=True):
            covered[name].append(holds(contrast, truth))
            rejected[name].append(contrast.p_value <= 0.05)
        rejected["family"].append(any(test.p_holm <= 0.05 for test in found.tests().values()))
    row: dict[str, Any] = {"effects": shape, "studies": "paired" if paired else "unpaired", "case": case}
    row |= {name: known(values) for name, values in covered.items()}
    row |= {f"{name} defined": float(np.mean(~np.isnan(covered[name]))) for name in ("r free", "order")}
    share = "power" if different else "size"
    return row | {f"{share} {name}": float(np.mean(values)) for name, values in rejected.items()}


def of_mcnemar(repeats: int) -> dict[str, Any]:
    """Shares of p-values of at most .05: clustered by query, and as if all answers were independent draws."""
    generator = np.random.default_rng([*b"McNemar"])
    clustered, plain = [], []
    for _ in range(repeats):
        liking = generator.uniform(-0.15, 0.15, NUM_QUERIES)
        chance = 0.5 + generator.uniform(-EASE, EASE, NUM_QUERIES)
        one, two = (generator.random((100, NUM_QUERIES)) < chance + sign * liking for sign in (1, -1))
        found = stats.stratified_mcnemar(one, two)
        clustered.append(found.p_value <= 0.05)
        discordant = found.only_first + found.only_second
        plain.append((found.only_first - found.only_second) ** 2 / discordant > 3.8415)
    return {
        "case": "McNemar over contexts", "size clustered": float(np.mean(clustered)),
        "size not clustered": float(np.mean(plain)),
    }  # fmt: skip


def of_few(num_queries: int, share: float, repeats: int) -> dict[str, Any]:
    """The same over 25 contexts where only a `share` of the queries is answered otherwise, each in some contexts: size,
    coverage of the interval there, and where four of five such queries are the first study's."""
    generator = np.random.default_rng([*b"few", num_queries, round(100 * share)])
    row: dict[str, Any] = {"case": f"McNemar, {num_queries} queries, {share:.0%} differ"}
    for gains, name in ((0.5, "same"), (0.8, "different")):
        rejected, covered = [], []
        for _ in range(repeats):
            differs, is_first = generator.random(num_queries) < share, generator.random(num_queries) < gains
            one, two = (generator.random((25, num_queries)) < 0.6 * (differs & side) for side in (is_first, ~is_first))
            found = stats.stratified_mcnemar(one, two)
            rejected.append(found.p_value <= 0.05)
            interval = matched_interval(found)
            covered.append(interval.low <= 0.6 * share * (2 * gains - 1) <= interval.high)
        row |= {f"interval, {name}": float(np.mean(covered)), f"rejected, {name}": float(np.mean(rejected))}
    return row


NOWHERE: tuple[str, ...] = ()
EVERYWHERE = ("sets", "permutations")


def of_pool(shape: str, tau: float, paired: bool, alone: bool, repeats: int) -> dict[str, Any]:
    """Coverage of the pooled mean, of one more model, of the shrunken estimates, and of the slope on model size."""
    mean, held, next_held, shrunk, gain = math.log(1.5), [], [], [], []
    slopes, crying = [], []
    for repeat in range(repeats):
        generator = np.random.default_rng([*f"pool {shape} {tau} {paired} {alone}".encode(), repeat])
        truths = mean + tau * generator.standard_normal(MODELS)
        level = PER_TENFOLD ** np.log10(SIZES / SIZES[0]) * np.exp(0.1 * generator.standard_normal(MODELS))
        cells = accuracies(generator, shape, np.exp(truths), level, RHO if paired else 0.0)
        logs = [stats.log_sensitivity(matrix) for matrix in cells]
        shared = [[EVERYWHERE if paired and not alone else NOWHERE] * MODELS] * MODELS
        values = np.array([each.estimate for each in logs])
        found = stats.pool(values, stats.jackknife_covariance(logs, shared))
        held.append(found.mean.low <= mean <= found.mean.high)
        another = mean + tau * generator.standard_normal()
        next_held.append(found.prediction.low <= another <= found.prediction.high)
        intervals = [found.shrunken_interval(place) for place in range(MODELS)]
        shrunk.append(np.mean([one.low <= true <= one.high for one, true in zip(intervals, truths, strict=True)]))
        gain.append(np.mean((found.shrunken - truths) ** 2) / np.mean((values - truths) ** 2))
        orders = [stats.log_sensitivity(matrix, "order") for matrix in cells]
        flat = generator.permutation(SIZES)
        covariance = stats.jackknife_covariance(orders, shared)
        sensitivities = np.exp([each.estimate for each in orders])
        fit = stats.slope(sensitivities, SIZES, covariance)
        slopes.append(fit.factor.low <= PER_TENFOLD <= fit.factor.high)
        level_free = sensitivities / PER_TENFOLD ** np.log10(SIZES / SIZES[0])
        crying.append(stats.slope(level_free, flat, covariance).p_value <= 0.05)
    return {
        "effects": shape, "case": f"pool, tau = {tau}",
        "studies": ("paired" if paired else "unpaired") + (", errors alone" if alone else ""),
        "mean": float(np.mean(held)), "one more": float(np.mean(next_held)), "shrunken": float(np.mean(shrunk)),
        "squared error, shrunken/raw": float(np.median(gain)),
        "slope": float(np.mean(slopes)), "size slope": float(np.mean(crying)),
    }  # fmt: skip


def cases(repeats: int) -> Iterator[dict[str, Any]]:
    for shape in ("Gaussian", "t4"):
        for paired in (True, False):
            for case in ("same", "different"):
                yield of_comparison(shape, paired, case, repeats)
    yield of_comparison("Gaussian", True, "weak", repeats)
    yield of_mcnemar(repeats)
    for num_queries in (24, 48, 100):
        for share in (0.05, 0.2, 0.5):
            yield of_few(num_queries, share, repeats)
    for shape in ("Gaussian", "t4"):
        for tau in (0.0, 0.3):
            yield of_pool(shape, tau, paired=True, alone=False, repeats=repeats)
    yield of_pool("Gaussian", 0.3, paired=True, alone=True, repeats=repeats)
    yield of_pool("Gaussian", 0.3, paired=False, alone=False, repeats=repeats)


def main() -> None:
    parser = options(__doc__)
    parser.set_defaults(repeats=2000)
    arguments = parser.parse_args()
    publish(f"comparison coverage, {arguments.repeats} repeats", list(cases(arguments.repeats)), arguments.json)


if __name__ == "__main__":
    main()
