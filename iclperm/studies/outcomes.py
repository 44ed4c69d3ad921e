"""What the demonstrations that each strategy chose do, beside random ones: accuracy, and its spread over orderings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from iclperm import stats
from iclperm.stats.convergence import degrees_for_tests
from iclperm.stats.demonstrations import Difference
from iclperm.stats.intervals import CutToPossible, Scale, jackknife_error, within
from iclperm.stats.paired import holm
from iclperm.stats.sensitivity import FloatArray
from iclperm.stats.winners_curse import order_noise
from iclperm.studies.bearing import LEAST_LEVELS

BASELINE = "random"
LEAST_PERMUTATIONS = 3  # without one of them there must still be a spread
_LEVEL = 0.95
_TAIL = 0.05
_FEWER_LABELS = 0.5  # mean difference a set from which on a warning says so
_ROUNDING = 1e-12  # a standard error below it is none


@dataclass(frozen=True)
class Outcome:
    """What the demonstrations of one strategy do, in units of accuracy, at the largest number of shots."""

    accuracy: Difference
    """Mean over sets, orderings and queries, all three drawn at random (`stats.mean_error`)."""
    difference: Difference
    """Accuracy minus that of random, paired by set, index permutation and query; all NaN for random itself."""
    p_accuracy: float
    """p-value of no difference in accuracy, Holm over the strategies; NaN below three sets."""
    spread: float
    """Standard deviation over orderings (ddof 1), mean over sets; item noise included."""
    spread_free: float
    """The same free of item noise: root of the mean order variance, 0 where that is negative."""
    spread_difference: Difference
    """Spread minus that of random, paired by set and index permutation; jackknifed over both, the queries fixed. NaN
    bounds for one set, and for two permutations."""
    p_spread: float
    """p-value of no difference in spread, Holm over the strategies; NaN below three sets."""
    free_difference: Difference
    """Order variance free of item noise minus that of random, in squared units of accuracy; bounded as the spread."""
    lowest: float
    """Accuracy of the worst ordering, mean over sets."""
    low_tail: float
    """Accuracy at the 5 % quantile of the orderings, mean over sets."""
    curve: FloatArray
    """[N] accuracy at every number of shots."""
    num_labels: float
    """Different labels among the chosen, mean over sets; NaN where labels are not known."""
    accuracy_by_set: FloatArray
    """[S] accuracy of each set, mean over orderings."""
    spread_by_set: FloatArray
    """[S] standard deviation over the orderings of each set (ddof 1)."""

    @property
    def is_steadier(self) -> bool:
        """Whether the spread is significantly below that of random, with item noise and without it."""
        free = self.free_difference.high
        return bool(self.p_spread < 1 - _LEVEL and self.spread_difference.estimate < 0 and free < 0)

    @property
    def accuracy_side(self) -> int:
        """1 or -1 where accuracy is significantly above or below that of random, else 0."""
        return int(np.sign(self.difference.estimate)) if self.p_accuracy < 1 - _LEVEL else 0


def outcomes_of(
    accuracy: FloatArray,
    answers: npt.NDArray[Any],
    weight: FloatArray,
    num_labels: FloatArray,
    strategies: Sequence[str],
    classes: npt.ArrayLike | None = None,
) -> dict[str, Outcome]:
    """The outcome of every strategy, random among them.

    Args:
        accuracy: [T, S, P, N] of every ordering at every number of shots.
        answers: [T, S, P, Q] 0 or 1 at the largest number of shots.
        weight: [Q] of the queries in a mean.
        num_labels: [T, S] different labels among the chosen, NaN where labels are not known.
        strategies: [T] names.
        classes: [Q] of the queries (`stats.variance_components`).

    Cost: O(T·S·P·Q), and O(T·S·P²) for the jackknife.
    """
    base, last = strategies.index(BASELINE), accuracy[..., -1]
    spread = np.array([[stats.order_sensitivity(of_set[None]) for of_set in of_strategy] for of_strategy in last])
    spread_without = np.stack([_without_permutation(of_strategy) for of_strategy in last])
    variances = [_order_variance(of_strategy, weight, classes) for of_strategy in answers]
    differences = [_of_mean(of_strategy - answers[base].astype(np.float64), weight) for of_strategy in answers]
    spreads = [
        _jackknifed(spread[t] - spread[base], spread_without[t] - spread_without[base]) for t in range(len(strategies))
    ]
    free = [
        _jackknifed(*(ours - random for ours, random in zip(found, variances[base], strict=True)))
        for found in variances
    ]
    p_accuracy, p_spread = (
        _holm_of_others(found, base, accuracy.shape[1] >= LEAST_LEVELS) for found in (differences, spreads)
    )
    return {
        name: Outcome(
            accuracy=_cut(_of_mean(answers[t], weight), "accuracy"),
            difference=_NOTHING if t == base else _cut(differences[t], "difference"),
            p_accuracy=p_accuracy[t],
            spread=float(spread[t].mean()),
            spread_free=math.sqrt(max(float(variances[t][0].mean()), 0.0)),
            spread_difference=_NOTHING if t == base else _cut(spreads[t], "spread difference"),
            p_spread=p_spread[t],
            free_difference=_NOTHING if t == base else _cut(free[t], "variance"),
            lowest=float(last[t].min(axis=1).mean()),
            low_tail=float(np.quantile(last[t], _TAIL, axis=1, method="inverted_cdf").mean()),
            curve=accuracy[t].mean(axis=(0, 1)),
            num_labels=float(num_labels[t].mean()),
            accuracy_by_set=last[t].mean(axis=1),
            spread_by_set=spread[t],
        )
        for t, name in enumerate(strategies)
    }


def design_warnings(num_sets: int, num_permutations: int, outcomes: Mapping[str, Outcome]) -> list[str]:
    """What should be known of a design, and of the labels that the strategies hold."""
    warnings = []
    if num_sets < 5:
        warnings.append(f"{num_sets} sets bound a difference between strategies badly; raise 'sets'")
    if num_permutations < LEAST_PERMUTATIONS:
        warnings.append("2 permutations bound no difference in spread; raise 'permutations'")
    held = {name: outcome.num_labels for name, outcome in outcomes.items() if not math.isnan(outcome.num_labels)}
    if held and held[BASELINE] - min(held.values()) >= _FEWER_LABELS:
        worst = min(held, key=held.__getitem__)
        warnings.append(
            f"{worst!r} holds {held[worst]:.1f} different labels a set, random {held[BASELINE]:.1f}: differences "
            "between them are of label balance too"
        )
    return warnings


_NOTHING = Difference(math.nan, math.nan, math.nan, math.nan, math.nan)


class BoundedDifference(CutToPossible, Difference):
    """A difference whose bounds went beyond what is possible."""

    __slots__ = ()


def _cut(found: Difference, scale: Scale) -> Difference:
    """A mean or a difference with its interval cut to what is possible."""
    low, high, is_cut = within(found.estimate, found.low, found.high, scale)
    return BoundedDifference(*found._replace(low=low, high=high)) if is_cut else found


def _of_mean(scores: npt.NDArray[Any], weight: FloatArray) -> Difference:
    """Mean of scores [S, P, Q], with its error over sets, shared permutations and queries."""
    found = stats.mean_error(scores, weight)
    degrees = degrees_for_tests(found, len(scores))
    _, low, high, _ = found._replace(degrees=degrees).interval(_LEVEL)
    return Difference(found.mean, found.se, low, high, _p_of_zero(found.mean, found.se, degrees))


def _jackknifed(by_set: FloatArray, without_permutation: FloatArray) -> Difference:
    """Mean of by_set [S], jackknifed over sets and over permutations: by_set without each of them, [S, P].

    The two variances are added (`iclperm.stats.intervals.jackknife_interval`). Where both are 0, equal values of a
    coarse scale do not say how far others would lie: NaN bounds.
    """
    estimate, num_sets = float(by_set.mean()), len(by_set)
    if num_sets < 2:
        return _NOTHING._replace(estimate=estimate)
    without_set = (by_set.sum() - by_set) / (num_sets - 1)
    se, degrees = jackknife_error((without_set, without_permutation.mean(axis=0)))
    if se <= _ROUNDING:
        return _NOTHING._replace(estimate=estimate, p_value=1.0 if abs(estimate) <= _ROUNDING else math.nan)
    half = float(special.stdtrit(degrees, (1 + _LEVEL) / 2)) * se
    return Difference(estimate, se, estimate - half, estimate + half, _p_of_zero(estimate, se, degrees))


def _p_of_zero(estimate: float, se: float, degrees: float) -> float:
    return float(2 * special.stdtr(degrees, -abs(estimate) / se))


def _without_permutation(accuracy: FloatArray) -> FloatArray:
    """[S, P] spread of each set of accuracy [S, P] without each permutation; NaN for two of them."""
    num = accuracy.shape[1]
    if num < LEAST_PERMUTATIONS:
        return np.full(accuracy.shape, np.nan)
    others = np.nonzero(~np.eye(num, dtype=np.bool_))[1].reshape(num, num - 1)
    kept = accuracy[:, others]  # [S, P, P - 1]
    return np.asarray(np.std(kept - kept[..., :1], axis=2, ddof=1))  # equal accuracies become exact zeros


def _order_variance(
    items: npt.NDArray[Any], weight: FloatArray, classes: npt.ArrayLike | None
) -> tuple[FloatArray, FloatArray]:
    """Unbiased variance of accuracy over orderings free of item noise, from items [S, P, Q]; [S], and [S, P] without
    each permutation.

    Of each set alone, of the weighted accuracy, in squared units of it: the variance over orderings less `order_noise`,
    (MS_P - MS_PQ)/Q where all queries are alike. It can be negative. NaN for one query, and without one permutation of
    two.
    """
    num_sets, num, num_queries = items.shape
    if num_queries < 2:
        return np.full(num_sets, np.nan), np.full((num_sets, num), np.nan)
    accuracy = items @ weight / weight.sum()
    # Both are sums over permutations; without one, the others are centred anew: num / (num - 1).
    parts = (accuracy - accuracy.mean(axis=1, keepdims=True)) ** 2 - order_noise(items, weight, classes)
    total = parts.sum(axis=1)
    if num < LEAST_PERMUTATIONS:
        return total / (num - 1), np.full((num_sets, num), np.nan)
    return total / (num - 1), (total[:, None] - num / (num - 1) * parts) / (num - 2)


def _holm_of_others(found: Sequence[Difference], base: int, is_tested: bool) -> FloatArray:
    """Adjusted p-values, without the comparison of random with itself; NaN where there are too few sets to test."""
    return holm([math.nan if t == base or not is_tested else difference.p_value for t, difference in enumerate(found)])
