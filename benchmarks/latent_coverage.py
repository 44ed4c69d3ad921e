"""Bias and coverage of the effects on the logit, near floor and ceiling, beside those of the analysis of accuracies.

    python benchmarks/latent_coverage.py [--repeats 400] [--quick] [--json benchmarks/results/latent_coverage.json]
    python benchmarks/latent_coverage.py --statsmodels 20 [--json benchmarks/results/latent_statsmodels.json]

Answers of 10 sets x 10 permutations x 400 queries are drawn from the model of `iclperm.stats.latent`: standard
deviations on the logit of .4 (sets), .5 (permutations), .3 (both), 1.5 (queries), .5 and .5 (queries with either), so
that the order effect is .583, the selection effect .5 and r .857 at every accuracy. Effects of sets and orders are of
one shape each (those of interval_coverage.py); ``two kinds of queries`` lie 1.5 above or below the mean and are not
Gaussian. ``bias`` is that of the mean estimate over the truth; coverage that of the nominal .95 intervals, ``Gaussian``
the generalised ones, ``quoted`` all that either holds (for r the jackknife's). The truth of the linear columns is that
of the accuracies of a large population under the same effects: it differs from accuracy to accuracy, as the column
``order in points`` shows. Every study is drawn from a key of its own.

With ``--statsmodels`` the order effect of studies of 10 x 10 x 60, beside that of statsmodels' BinomialBayesMixedGLM
(variational Bayes) with effects S, P, SP and I: its interval is that of its Gaussian posterior of the logarithms of the
standard deviations.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from _machine import options, publish
from interval_coverage import SHAPES, coverage, key

from iclperm import stats
from iclperm.errors import DataError
from iclperm.stats.latent import LatentComponents, latent_components
from iclperm.stats.logistic_normal import marginal

Array = npt.NDArray[np.float64]

SPREADS = {"s": 0.4, "p": 0.5, "sp": 0.3, "q": 1.5, "sq": 0.5, "pq": 0.5}
ORDER, SELECTION = math.hypot(SPREADS["p"], SPREADS["sp"]), math.hypot(SPREADS["s"], SPREADS["sp"])
QUERIES = sum(SPREADS[axes] ** 2 for axes in ("q", "sq", "pq"))
POPULATION = 2_000
DRAWS = 2_000


class Case(NamedTuple):
    """One row of the table."""

    shape: str
    accuracy: float
    size: tuple[int, int, int] = (10, 10, 400)
    queries: str = "Gaussian"
    missing: float = 0.0


CASES = (
    *(Case(shape, accuracy) for shape in ("Gaussian", "t4", "one in ten collapses") for accuracy in (0.5, 0.8, 0.95)),
    *(Case("Gaussian", accuracy, queries="two kinds") for accuracy in (0.5, 0.95)),
    Case("Gaussian", 0.8, missing=0.1),
    Case("Gaussian", 0.8, size=(3, 4, 40)),
    Case("Gaussian", 0.8, size=(5, 5, 200)),
    Case("Gaussian", 0.8, size=(20, 20, 400)),
    Case("t4", 0.8, size=(20, 20, 400)),
)


def contexts(generator: np.random.Generator, shape: str, num_sets: int, num_permutations: int) -> Array:
    """[S, P] logits of the orderings, mean 0."""
    sizes = {"s": (num_sets, 1), "p": (1, num_permutations), "sp": (num_sets, num_permutations)}
    return np.asarray(sum(SPREADS[axes] * SHAPES[shape](generator, size) for axes, size in sizes.items()))


def chance(case: Case, logit: Array) -> Array:
    """Accuracy over queries at logits."""
    if case.queries == "two kinds":
        rest = QUERIES - SPREADS["q"] ** 2
        return (marginal(logit - SPREADS["q"], rest) + marginal(logit + SPREADS["q"], rest)) / 2
    return marginal(logit, QUERIES)


def middle(case: Case) -> float:
    """Logit of the average set and order, at which accuracy is that of the case."""
    places = np.linspace(-8, 8, 4_001)
    return float(np.interp(case.accuracy, chance(case, places), places))


def answers(generator: np.random.Generator, case: Case) -> npt.NDArray[np.uint8]:
    """Answers [S, P, Q] of one study."""
    num_sets, num_permutations, num_queries = case.size
    logit = middle(case) + contexts(generator, case.shape, *case.size[:2])[..., None]
    ease = generator.standard_normal(num_queries)
    if case.queries == "two kinds":
        ease = np.sign(ease)
    logit = logit + SPREADS["q"] * ease
    logit = logit + SPREADS["sq"] * generator.standard_normal((num_sets, 1, num_queries))
    logit = logit + SPREADS["pq"] * generator.standard_normal((1, num_permutations, num_queries))
    return (generator.random(case.size) < 1 / (1 + np.exp(-logit))).astype(np.uint8)


def population(case: Case) -> dict[str, float]:
    """On the scale of accuracies: order and selection effect, r, and the 5 % ordering, of very many orderings."""
    generator = key(f"population {case.shape}", case.accuracy)
    logit = middle(case) + contexts(generator, case.shape, POPULATION, POPULATION)
    places = np.linspace(logit.min(), logit.max(), 2_000)
    table = np.interp(logit, places, chance(case, places))
    order, selection = math.sqrt(table.var(axis=1).mean()), math.sqrt(table.var(axis=0).mean())
    return {
        "order": order,
        "selection": selection,
        "ratio": selection / order,
        "tail": float(np.quantile(table, 0.05)),
    }


def studied(case: Case, repeat: int) -> tuple[LatentComponents, stats.SensitivityIntervals] | None:
    """The two analyses of one study; None where the answers cannot be fitted."""
    generator = key(f"latent {case.shape} {case.queries}", case.accuracy, *case.size, case.missing, repeat)
    items = answers(generator, case)
    state = (generator.random(items.shape) < case.missing).astype(np.uint8) if case.missing else None
    try:
        latent = latent_components(items, state, draws=DRAWS, seed=repeat)
    except DataError:
        return None
    return latent, stats.effect_interval(stats.variance_components(items), draws=DRAWS, seed=repeat)


def row(case: Case, repeats: int) -> dict[str, Any]:
    found = [study for repeat in range(repeats) if (study := studied(case, repeat)) is not None]
    latent, linear = [one for one, _ in found], [one for _, one in found]
    truth = population(case)
    of_logit = {"order": ORDER, "selection": SELECTION, "ratio": SELECTION / ORDER}
    figures: dict[str, Any] = {
        "effects": case.shape if case.queries == "Gaussian" else f"{case.shape}, {case.queries} of queries",
        "accuracy": case.accuracy,
        "S x P x Q": " x ".join(map(str, case.size)) + (f", {case.missing:.0%} missing" if case.missing else ""),
        "not fitted": repeats - len(found),
        "bias order": mean([one.order_effect.estimate for one in latent]) / ORDER - 1,
        "bias selection": mean([one.selection_effect.estimate for one in latent]) / SELECTION - 1,
        "bias order variance": mean([one.sigma2.P + one.sigma2.SP for one in latent]) / ORDER**2 - 1,
    }
    for name, true in of_logit.items():
        figures |= {
            f"{name} quoted": coverage([getattr(one, QUOTED[name]) for one in latent], true),
            f"{name} Gaussian": coverage([getattr(one.gaussian, name) for one in latent], true),
            f"{name} jackknife": coverage([getattr(one.jackknife or one.gaussian, name) for one in latent], true),
            f"{name} linear": coverage([getattr(one, name) for one in linear], truth[name]),
        }
    tails = [one.tail_risk() for one in latent]
    return figures | {
        "5 % ordering": truth["tail"],
        "5 % ordering bias": mean([tail.accuracy.estimate for tail in tails]) - truth["tail"],
        "empirical bias": mean([tail.empirical for tail in tails]) - truth["tail"],
        "5 % ordering covered": coverage([tail.accuracy for tail in tails], truth["tail"]),
        "order width quoted": width([one.order_effect for one in latent]),
        "order width Gaussian": width([one.gaussian.order for one in latent]),
        "order in points": 100 * truth["order"],
        "linear bias order": mean([one.order.estimate for one in linear]) / truth["order"] - 1,
        "r false alarm": mean([one.ratio.low > 1 for one in latent]),
    }


def of_statsmodels(case: Case, repeats: int) -> list[dict[str, Any]]:
    """The order effect of both, on the same answers."""
    import pandas
    from statsmodels.genmod.bayes_mixed_glm import BinomialBayesMixedGLM

    _, num_permutations, _ = case.size
    s, p, q = (index.ravel() for index in np.indices(case.size))
    columns = {"s": s, "p": p, "sp": num_permutations * s + p, "q": q}
    found: dict[str, list[tuple[float, bool, float]]] = {"latent_components": [], "statsmodels fit_vb": []}
    for repeat in range(repeats):
        generator = key(f"latent statsmodels {case.shape}", case.accuracy, *case.size, repeat)
        items = answers(generator, case)
        started = time.perf_counter()
        ours = latent_components(items, draws=DRAWS, seed=repeat).order_effect
        seconds = time.perf_counter() - started
        found["latent_components"].append((ours.estimate, ours.low <= ORDER <= ours.high, seconds))
        frame = pandas.DataFrame({"y": items.ravel(), **columns})
        effects = {name: f"0 + C({name})" for name in columns}
        started = time.perf_counter()
        fitted = BinomialBayesMixedGLM.from_formula("y ~ 1", effects, frame).fit_vb()
        seconds = time.perf_counter() - started
        logs = fitted.vcp_mean + fitted.vcp_sd * generator.standard_normal((DRAWS, len(effects)))
        low, high = np.quantile(np.hypot(*np.exp(logs[:, 1:3]).T), (0.025, 0.975))
        estimate = float(np.hypot(*np.exp(fitted.vcp_mean[1:3])))
        found["statsmodels fit_vb"].append((estimate, bool(low <= ORDER <= high), seconds))
    return [
        {
            "by": name,
            "S x P x Q": " x ".join(map(str, case.size)),
            "accuracy": case.accuracy,
            "bias order": mean([estimate for estimate, _, _ in each]) / ORDER - 1,
            "order covered": mean([covered for _, covered, _ in each]),
            "seconds a study": float(np.median([seconds for _, _, seconds in each])),
        }
        for name, each in found.items()
    ]


QUOTED = {"order": "order_effect", "selection": "selection_effect", "ratio": "ratio"}


def mean(values: list[Any]) -> float:
    return float(np.mean(values))


def width(intervals: list[stats.Interval]) -> float:
    """Median of upper over lower end."""
    return float(np.median([interval.high / interval.low if interval.low > 0 else math.inf for interval in intervals]))


def main() -> None:
    """Simulates and prints."""
    parser = options(__doc__ or "")
    parser.set_defaults(repeats=400)
    parser.add_argument("--quick", action="store_true", help="20 repeats")
    parser.add_argument(
        "--statsmodels", type=int, default=0, metavar="N", help="only N studies that statsmodels fits, too"
    )
    given = parser.parse_args()
    if given.statsmodels:
        figures = of_statsmodels(Case("Gaussian", 0.8, (10, 10, 60)), given.statsmodels)
        publish(f"order effect on the logit beside statsmodels, {given.statsmodels} studies", figures, given.json)
        return
    repeats = 20 if given.quick else given.repeats
    publish(f"effects on the logit, {repeats} studies a row", [row(case, repeats) for case in CASES], given.json)


if __name__ == "__main__":
    main()
