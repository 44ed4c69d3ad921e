"""Variance components of correct[S, P, Q]: the set, the order, their interplay, and item noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.errors import RequestError
from iclperm.stats import incomplete
from iclperm.stats.incomplete import Stratum
from iclperm.stats.limits import LIMITS, ComputeLimits
from iclperm.stats.sensitivity import binary_items, plain_array, query_weights

_ROUNDING = 1e-12  # of all variance


class Effects(NamedTuple):
    """One number per effect of the crossed design: sets S, permutations P, items (queries) I and their interactions."""

    S: float
    P: float
    I: float  # noqa: E741
    SP: float
    SI: float
    PI: float
    SPI: float


@dataclass(frozen=True)
class VarianceComponents:
    """Crossed random-effects analysis of scores [S, P, Q] with one observation a cell, or none."""

    num_sets: int
    num_permutations: int
    num_queries: int
    """Distinct queries that were used: those with an answer in some cell."""
    degrees: Effects
    """Degrees of freedom of each mean square."""
    mean_squares: Effects
    """Of the answers; with `strata` those of the weighted accuracies [S, P], and NaN for I, SI, PI and SPI."""
    sigma2: Effects
    """Unbiased estimates of the components, in squared units of the score; they can be negative. With `strata` those of
    S, P and SP are of the weighted accuracy, the others means over the classes."""
    strata: tuple[Stratum, ...] = ()
    """The classes of queries, where there are several, answers are missing or queries weigh differently; else empty."""

    effect_loads: tuple[tuple[float, ...], ...] = ()
    """[3, 3] with `strata`: how much of σ²_S, σ²_P, σ²_SP (columns) is in the mean squares of S, P and SP (rows)."""

    @property
    def shares(self) -> Effects:
        """Each component, clipped at 0, as a share of their sum; all 0 where nothing varies."""
        clipped = [max(value, 0.0) for value in self.sigma2]
        total = sum(clipped)
        return Effects(*(value / total if total > 0 else 0.0 for value in clipped))

    @property
    def order_effect(self) -> float:
        """√(σ²_P + σ²_SP): the order sensitivity free of item noise, 0 where the estimate is negative."""
        return _effect(self.sigma2.P + self.sigma2.SP, self.sigma2)

    @property
    def selection_effect(self) -> float:
        """√(σ²_S + σ²_SP): the selection sensitivity free of item noise, 0 where the estimate is negative."""
        return _effect(self.sigma2.S + self.sigma2.SP, self.sigma2)

    @property
    def ratio(self) -> float:
        """De-noised r = selection effect / order effect; NaN where the order effect is 0."""
        return self.selection_effect / self.order_effect if self.order_effect > 0 else math.nan


def _effect(variance: float, among: Effects) -> float:
    """Its root; 0 for a variance that is negative, or nothing but rounding among the others: a ratio to that would be
    anything."""
    return math.sqrt(variance) if variance > _ROUNDING * np.nansum(np.abs(among)) else 0.0


def variance_components(
    scores: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    *,
    weights: npt.ArrayLike | None = None,
    classes: npt.ArrayLike | None = None,
    limits: ComputeLimits = LIMITS,
) -> VarianceComponents:
    """Variance components of sets by permutations by queries, all three random and crossed, from every answer there is.

    Args:
        scores: [S, P, Q] 0 or 1 (bool or integer), or floating-point scores such as log-likelihoods or partial credit.
        state: [S, P, Q] integers, 0 = ok; an answer that is not ok is missing.
        weights: [Q] how often each query counts in the accuracy whose components are wanted; all 1 by default.
        classes: [Q] the class of each query, where every class has as many queries as it was meant to have; leave it
            out for queries that are a sample of a mixture. Without it the queries of one weight are taken for a class.
        limits: sizes from which it is computed in another way.

    σ²_S, σ²_P, σ²_SP are of the *weighted* accuracy on other queries of the same classes. With classes, what an order
    does to one and undoes in another is no item noise: it does not enter that accuracy, and is not subtracted from it.
    Complete answers of equal weight go through mean squares, summed in integers where scores are binary, so that they
    are exact but for their last divisions (Searle, Casella & McCulloch 1992, balanced crossed model). Otherwise moments
    of the answers that are there are set equal to their expectations, class by class: unbiased where what is missing
    does not depend on the answer, whatever it has to do with the query; classes of equal weight of which one is too
    incomplete for that are taken together. Permutations must be shared across the sets; if every set draws
    its own, σ²_P cannot be separated from σ²_SP, and only their sum (`order_effect`) has a meaning.

    Raises RequestError unless S, P and the queries with an answer are at least 2 each, in every class; where an
    ordering has no answer; and on a NaN that is not missing. Cost: O(S·P·Q), one pass over a large binary tensor and no
    float copy of it; three passes in blocks where answers are missing or weights differ.
    """
    items, present = _checked(scores, state, limits)
    weight = query_weights(weights, items.shape[2])
    counted = weight > 0
    is_equal = bool(np.ptp(weight[counted]) == 0)
    if present is None and is_equal:
        items = items if counted.all() else items[:, :, counted]
        _refuse_small(items.shape)
        strata = incomplete.strata_of(weight, classes)[counted]
        return _of_complete(items, limits) if not strata.any() else _of_classes(items, strata, limits)
    if present is None:
        present = np.ones(items.shape, np.bool_)
    weight = np.where(present.any(axis=(0, 1)), weight, 0.0)
    answered = int(np.count_nonzero(weight))
    _refuse_small((*items.shape[:2], answered))
    strata = incomplete.strata_of(weight, classes)
    try:
        return _of_moments(incomplete.solved(items, present, weight, strata, limits), items.shape, answered)
    except RequestError:
        if not is_equal or strata.max() == 0:
            raise
    strata = np.minimum(strata, 0)
    return _of_moments(incomplete.solved(items, present, weight, strata, limits), items.shape, answered)


def _of_complete(items: npt.NDArray[Any], limits: ComputeLimits) -> VarianceComponents:
    """Of complete answers [S, P, Q] of equal weight and one class."""
    if np.issubdtype(items.dtype, np.floating):
        return _components(items.shape, *_centred_sums(items, limits))
    sp, si, pi = _crossed_sums(items, limits)
    return _components(items.shape, sp, si, _square(pi), items.sum(dtype=np.int64).item())  # Σ x² is Σ x for 0 and 1


def _of_classes(items: npt.NDArray[Any], strata: npt.NDArray[np.int64], limits: ComputeLimits) -> VarianceComponents:
    """Of complete answers of equal weight, of which class `strata` [Q] numbers."""
    classes = [items[:, :, strata == name] for name in range(int(strata.max()) + 1)]
    table = items.sum(axis=2, dtype=np.float64) / items.shape[2]
    return _combined(table, [_of_complete(members, limits) for members in classes])


def _combined(table: npt.NDArray[np.float64], classes: Sequence[VarianceComponents]) -> VarianceComponents:
    """Of accuracies [S, P] over all classes, from the components of each; every query counts alike."""
    num_sets, num_permutations = table.shape
    num_queries = sum(one.num_queries for one in classes)
    effects = np.array([[num_permutations, 0, 1], [0, num_sets, 1], [0, 0, 1]])
    squares, noise, inside, found = incomplete.mean_squares(table), np.zeros(3), np.zeros(7), []
    for one in classes:
        share, sigma2 = one.num_queries / num_queries, np.array(one.sigma2)
        loads = share**2 / one.num_queries * effects
        noise += loads @ sigma2[4:]
        inside += share * sigma2
        kept = tuple(tuple(row) for row in loads.tolist())
        found.append(Stratum(share, one.num_queries, tuple(sigma2.tolist()), kept))
    s, p, sp = np.linalg.solve(effects, squares - noise)
    solved = np.array([s, p, inside[2], sp, *inside[4:]]), squares, effects, tuple(found)
    return _of_moments(solved, (num_sets, num_permutations), num_queries)


def _of_moments(
    solved: tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], tuple[Stratum, ...]],
    shape: tuple[int, ...],
    answered: int,
) -> VarianceComponents:
    """What `incomplete.solved` found, of `answered` queries."""
    sigma2, squares, effects, found = solved
    s, p, q = shape[0] - 1, shape[1] - 1, answered - len(found)
    sets, permutations, residual = squares.tolist()
    nan = math.nan
    return VarianceComponents(
        s + 1,
        p + 1,
        answered,
        Effects(s, p, q, s * p, s * q, p * q, s * p * q),
        Effects(sets, permutations, nan, residual, nan, nan, nan),
        Effects(*sigma2.tolist()),
        found,
        tuple(tuple(row) for row in effects.tolist()),
    )


def components_from_sums(sp: npt.NDArray[Any], si: npt.NDArray[Any], pi_square: Any) -> VarianceComponents:
    """`variance_components` of 0 or 1 from sums of integers: sp [S, P] over queries, si [S, Q] over permutations, and
    the sum of the squares of those [P, Q] over sets. Raises RequestError unless S, P and Q are at least 2 each.
    """
    shape = (*sp.shape, si.shape[1])
    _refuse_small(shape)
    sp, si = sp.astype(np.int64), si.astype(np.int64)
    return _components(shape, sp, si, int(pi_square), sp.sum().item())  # Σ x² is Σ x for 0 and 1


def components_from_class_sums(
    sums: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any], Any]],
) -> VarianceComponents:
    """The same of classes of queries of equal weight, from the three sums of each (`components_from_sums`)."""
    num_queries = sum(si.shape[1] for _, si, _ in sums)
    table = np.sum([sp for sp, _, _ in sums], axis=0) / num_queries
    return _combined(table, [components_from_sums(*one) for one in sums])


def _components(
    shape: tuple[int, ...], sp: npt.NDArray[Any], si: npt.NDArray[Any], pi_square: Any, square: Any
) -> VarianceComponents:
    num_s, num_p, num_q = shape
    s, p, q = num_s - 1, num_p - 1, num_q - 1
    degrees = Effects(s, p, q, s * p, s * q, p * q, s * p * q)
    squares = _sums_of_squares(shape, sp, si, pi_square, square)
    mean_squares = Effects(*(total / df for total, df in zip(squares, degrees, strict=True)))
    return VarianceComponents(
        num_s, num_p, num_q, degrees, mean_squares, solve_components(mean_squares, num_s, num_p, num_q)
    )


@dataclass(frozen=True)
class NestedComponents:
    """Random-effects analysis where every set has permutations of its own: P lies within S, queries cross both.

    σ²_P merges with σ²_SP, and σ²_PI with σ²_SPI: no design of this kind tells them apart.
    """

    num_sets: int
    num_permutations: int
    """Of each set."""
    num_queries: int
    S: float
    """σ²_S, unbiased, as all of these; they can be negative."""
    P: float
    """σ²_P + σ²_SP: order within a set."""
    I: float  # noqa: E741
    """σ²_I"""
    SI: float
    """σ²_SI"""
    PI: float
    """σ²_PI + σ²_SPI: what is left, chance included."""

    @property
    def order_effect(self) -> float:
        """The order sensitivity free of item noise, 0 where the estimate is negative; as in the crossed analysis."""
        return math.sqrt(max(self.P, 0.0))

    @property
    def selection_effect(self) -> float:
        """√σ²_S, the standard deviation of the sets' means over all orderings, 0 where the estimate is negative.

        The crossed √(σ²_S + σ²_SP) is that of one ordering each, which has no meaning here.
        """
        return math.sqrt(max(self.S, 0.0))


def nested_components(
    scores: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    *,
    weights: npt.ArrayLike | None = None,
    classes: npt.ArrayLike | None = None,
) -> NestedComponents:
    """Variance components of scores [S, P, Q] where permutation p of one set has nothing to do with p of another.

    MS_P(S) = (SS_P + SS_SP) / (S·(P - 1)) and MS_PI(S) = (SS_PI + SS_SPI) / (S·(P - 1)·(Q - 1)) pool the crossed sums
    of squares; then PI = MS_PI(S), P = (MS_P(S) - MS_PI(S))/Q, SI = (MS_SI - MS_PI(S))/P, I = (MS_I - MS_SI)/(S·P) and
    S = (MS_S - MS_P(S) - MS_SI + MS_PI(S))/(P·Q). The numbering of the permutations within a set does not matter. Where
    answers are missing or weights differ the same sums are taken of the crossed components.

    Takes, costs and raises what `variance_components` does. Searle, Casella & McCulloch (1992), balanced nested model.
    """
    crossed = variance_components(scores, state, weights=weights, classes=classes)
    num_s, num_p, num_q = crossed.num_sets, crossed.num_permutations, crossed.num_queries
    sigma2 = crossed.sigma2
    if crossed.strata:
        return NestedComponents(
            num_sets=num_s,
            num_permutations=num_p,
            num_queries=num_q,
            S=sigma2.S - sigma2.P / num_p,
            P=sigma2.P + sigma2.SP,
            I=sigma2.I + sigma2.PI / num_p,
            SI=sigma2.SI - sigma2.PI / num_p,
            PI=sigma2.PI + sigma2.SPI,
        )
    ms, df = crossed.mean_squares, crossed.degrees
    p = (ms.P * df.P + ms.SP * df.SP) / (df.P + df.SP)
    pi = (ms.PI * df.PI + ms.SPI * df.SPI) / (df.PI + df.SPI)
    return NestedComponents(
        num_sets=num_s,
        num_permutations=num_p,
        num_queries=num_q,
        S=(ms.S - p - ms.SI + pi) / (num_p * num_q),
        P=(p - pi) / num_q,
        I=(ms.I - ms.SI) / (num_s * num_p),
        SI=(ms.SI - pi) / num_p,
        PI=pi,
    )


def explain_components(
    components: VarianceComponents, shared_permutations: bool = True, same_label_sequence: bool = False
) -> list[str]:
    """One plain line on what each component means and how large it is, as a standard deviation in points of accuracy.

    `shared_permutations` says that one list of index permutations was applied to every set's default order;
    `same_label_sequence` that each of them then puts the labels of every set in one sequence, as it does where the
    default order is by label and k is a multiple of the number of classes.
    """
    meanings = dict(_MEANINGS)
    if not shared_permutations:
        meanings |= _OWN_PERMUTATIONS
    elif same_label_sequence:
        meanings |= _SAME_LABEL_SEQUENCE
    return [_EXPLAIN_TEMPLATE.format(**line) for line in _component_lines(components, meanings)]


_EXPLAIN_TEMPLATE = "{name} {size}, {share:.0%} of the variance: {meaning}"
_MEANINGS = {
    "S": "some sets of demonstrations are better than others, in whatever order they come",
    "P": "some permutations are better than others, whatever the set",
    "I": "some queries are easier than others",
    "SP": "the best order differs from set to set",
    "SI": "some queries gain from one set and lose from another",
    "PI": "some queries gain from one permutation and lose from another",
    "SPI": "answers flip with set, order and query together; with one answer a cell nothing separates this from chance",
}
_SAME_LABEL_SEQUENCE = {
    "P": "some permutations are better than others, whatever the set: the default order is sorted by label and every "
    "set holds each class equally often, so a shared index permutation fixes the sequence of labels, and this is the "
    "effect of that label sequence",
    "SP": "the best order differs from set to set: the order of these very demonstrations, beyond their label sequence",
}
_OWN_PERMUTATIONS = {
    "P": "every set has its own permutations, so this stands for the effect of order only together with sigma_SP"
}


def _component_lines(components: VarianceComponents, meanings: Mapping[str, str]) -> list[dict[str, Any]]:
    shares = components.shares._asdict()
    return [
        {"name": f"sigma_{effect}", "size": _size_in_words(value), "share": shares[effect], "meaning": meanings[effect]}
        for effect, value in components.sigma2._asdict().items()
    ]


def _size_in_words(variance: float) -> str:
    return f"{100 * math.sqrt(variance):.2f} points" if variance >= 0 else "0 (estimate below 0)"


def _checked(
    scores: npt.ArrayLike, state: npt.ArrayLike | None, limits: ComputeLimits
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None]:
    """Scores as uint8 0 and 1 or floats, and which of them are there; None where all are."""
    values = plain_array(scores)
    if values.ndim != 3:
        raise RequestError(f"variance components need scores of shape [S, P, Q], got {list(values.shape)}")
    if values.size and not np.issubdtype(values.dtype, np.floating):
        values = binary_items(values, limits)
    if state is None:
        _refuse_infinite(values, None)
        return values, None
    states = np.asarray(state)
    if states.shape != values.shape:
        raise RequestError(f"state must have the shape of correct {list(values.shape)}, got {list(states.shape)}")
    present = None if not states.any() else states == 0
    _refuse_infinite(values, present)
    return values, present


def _refuse_small(shape: tuple[int, ...]) -> None:
    if min(shape) < 2:
        sizes = ", ".join(f"{name} = {size}" for name, size in zip("SPQ", shape, strict=True))
        raise RequestError(f"variance components need at least 2 sets, permutations and usable queries, got {sizes}")


def _refuse_infinite(scores: npt.NDArray[Any], present: npt.NDArray[np.bool_] | None) -> None:
    """Raises RequestError, naming the place, for a score that is there and not finite."""
    if not np.issubdtype(scores.dtype, np.floating):
        return
    wrong = ~np.isfinite(scores) if present is None else ~np.isfinite(scores) & present
    if wrong.any():
        s, p, q = np.argwhere(wrong)[0]
        raise RequestError(f"scores[{s}, {p}, {q}] is {scores[s, p, q]}; mark it in state or leave it out")


def _centred_sums(
    scores: npt.NDArray[Any], limits: ComputeLimits
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], float, float]:
    """Of floats [S, P, Q] less their mean: sums [S, P], sums [S, Q], the sum of the squares of those [P, Q], and of all
    squares; in blocks of queries, so that no float64 copy of all is made."""
    num_sets, num_permutations, num_queries = scores.shape
    step = max(limits.block_bytes // (8 * num_sets * num_permutations), 1)
    places = [slice(low, low + step) for low in range(0, num_queries, step)]

    def shifted(some: slice) -> npt.NDArray[np.float64]:
        block = scores[..., some].astype(np.float64)
        block -= float(scores[0, 0, 0])  # equal scores become exact zeros
        return block

    mean = sum(float(shifted(some).sum()) for some in places) / scores.size
    sp, si = np.zeros((num_sets, num_permutations)), np.empty((num_sets, num_queries))
    pi_square = square = 0.0
    for some in places:
        block = shifted(some)
        block -= mean
        sp += block.sum(axis=2)
        si[:, some] = block.sum(axis=1)
        pi_square += _square(block.sum(axis=0))
        square += _square(block)
    return sp, si, pi_square, square


def _crossed_sums(
    items: npt.NDArray[Any], limits: ComputeLimits
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Sums of 0 and 1 over one axis each: [S, P], [S, Q], [P, Q] int64."""
    if items.size >= limits.numba_from:
        from iclperm.stats import _kernels

        sp, si, pi = _kernels.crossed_sums(items)
        return sp, si.astype(np.int64), pi.astype(np.int64)
    return items.sum(axis=2, dtype=np.int64), items.sum(axis=1, dtype=np.int64), items.sum(axis=0, dtype=np.int64)


def _sums_of_squares(
    shape: tuple[int, ...], sp: npt.NDArray[Any], si: npt.NDArray[Any], pi_square: Any, square: Any
) -> list[float]:
    """Sums of squares in the order of `Effects`, by inclusion and exclusion over the squared marginal sums.

    sp [S, P] and si [S, Q] are sums; of those [P, Q], and of the items, the sum of squares is enough. Everything is
    brought to the common denominator S·P·Q: for binary items all numerators are exact Python integers.
    """
    num_s, num_p, num_q = shape
    size = num_s * num_p * num_q
    total = _square(sp.sum())
    s, p, i = num_s * _square(sp.sum(1)), num_p * _square(sp.sum(0)), num_q * _square(si.sum(0))
    sp, si, pi = num_s * num_p * _square(sp), num_s * num_q * _square(si), num_p * num_q * pi_square
    spi = size * square
    numerators = (
        s - total,
        p - total,
        i - total,
        sp - s - p + total,
        si - s - i + total,
        pi - p - i + total,
        spi - sp - si - pi + s + p + i - total,
    )
    return [max(numerator, 0) / size for numerator in numerators]  # a float sum can miss 0 by one rounding


def _square(sums: npt.NDArray[Any]) -> Any:
    """Sum of squares as a Python number; exact for int64 sums while P·Q is below a billion."""
    flat = np.ravel(sums, order="K")
    return np.dot(flat, flat).item()


def solve_components(ms: Effects, num_s: float, num_p: float, num_q: float) -> Effects:
    """Set every mean square equal to its expectation and solve for the components."""
    return Effects(
        S=(ms.S - ms.SP - ms.SI + ms.SPI) / (num_p * num_q),
        P=(ms.P - ms.SP - ms.PI + ms.SPI) / (num_s * num_q),
        I=(ms.I - ms.SI - ms.PI + ms.SPI) / (num_s * num_p),
        SP=(ms.SP - ms.SPI) / num_q,
        SI=(ms.SI - ms.SPI) / num_p,
        PI=(ms.PI - ms.SPI) / num_s,
        SPI=ms.SPI,
    )
