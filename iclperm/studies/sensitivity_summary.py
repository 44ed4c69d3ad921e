"""What a sensitivity study says at one number of shots: its numbers; the sentences are `sensitivity_conclusion`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm import stats
from iclperm.base.help import fields_in_help
from iclperm.errors import DataError, RequestError
from iclperm.report.parts import plain
from iclperm.stats import Calibration, Interval, NeededDesign, SensitivityIntervals, VarianceComponents
from iclperm.stats.incomplete import filled
from iclperm.stats.intervals import bounded
from iclperm.stats.sensitivity import FloatArray, query_weights
from iclperm.studies.tokens import TokenReport, TokenSavings
from iclperm.study.states import STATES, name_of

_ESTIMATORS: tuple[stats.Estimator, ...] = ("mean_std", "rms", "c4")


class Ordering(NamedTuple):
    """One set under one permutation, with its accuracy."""

    set: int
    """Its number, from 0 on."""
    permutation: int
    """Its number, from 0 on."""
    accuracy: float
    """Share of right answers, 0 to 1."""


class Spread(NamedTuple):
    """Both sensitivities under one estimator."""

    order: float
    """Standard deviation of accuracy over permutations, in units of accuracy."""
    selection: float
    """The same over sets."""
    ratio: float
    """r = selection / order; NaN where order is 0."""


class Extreme(NamedTuple):
    """What a study would say if every missing answer were wrong, or if every one were right."""

    accuracy: FloatArray
    """[S, P]"""
    order: Interval
    """Order effect free of item noise; as measured where the design does not allow that."""
    selection: Interval
    """Selection effect, likewise."""
    ratio: Interval
    """The r to quote."""
    free: Interval | None
    """r free of item noise."""


@fields_in_help
@dataclass(frozen=True, repr=False)
class SensitivitySummary:
    """The numbers of a sensitivity study at one number of shots."""

    accuracy: FloatArray
    """[S, P], of each ordering over the answers that it has."""
    num_queries: int
    """Distinct queries that were used."""
    num_labels: int | None
    """Number of classes; None without log-likelihoods of the labels."""
    dropped: float
    """Share of the queries (by weight) without an answer in any cell."""
    incomplete: float
    """Share of the queries (by weight) that lack an answer in some cell."""
    missing: Mapping[str, float]
    """Share of all answers (by weight) in each state but ok."""
    if_wrong: Extreme | None
    """If every missing answer were wrong; None where none is missing, or fewer than two sets or permutations were
    run."""
    if_right: Extreme | None
    """If every missing answer were right; None where `if_wrong` is."""
    bounds: stats.AccuracyBounds | None
    """[S, P] accuracy of each ordering if all that it lacks were wrong, or right, and how much it lacks; None where
    nothing is missing."""
    mean: float
    """Mean accuracy over sets and permutations, 0 to 1."""
    mean_interval: Interval
    """95 % interval of the mean accuracy for other sets, permutations and queries (`stats.mean_error`)."""
    mean_se: float
    """Standard error of the mean accuracy for other queries alone, clustered by query."""
    spreads: Mapping[str, Spread]
    """Order and selection sensitivity and r under each estimator; `mean_std` is what the paper prints."""
    intervals: SensitivityIntervals | None
    """Generalised intervals (RMS); None for S = 1 or P = 1."""
    jackknife: Interval | None
    """Jackknife interval of the printed r; None below three sets or permutations."""
    components: VarianceComponents | None
    """Of the weighted accuracy. None for S = 1, P = 1 or one query (of a class, where weights differ)."""
    effects: SensitivityIntervals | None
    """Order effect, selection effect and r free of item noise."""
    needed: NeededDesign | None
    """The smallest design that would tell r from 1; None where none of practical size would."""
    best: Ordering
    """The ordering with the highest accuracy."""
    worst: Ordering
    """The one with the lowest."""
    low_tail: Ordering
    """The ordering at the 5 % quantile of accuracy: one ordering in 20 is no better."""
    calibration: Calibration | None
    """How far stated probabilities are from shares of right answers; None without log-likelihoods."""
    near_ties: float | None
    """Share of ok answers (by weight) that rounding could turn."""
    tokens: TokenSavings | None
    """What the prefix tree saved; None where that is not known."""
    warnings: tuple[str, ...]
    """What should be known before the numbers are believed."""
    design: str | None = None
    """How the permutations were dealt, in words; None where each was drawn by itself."""
    designed: stats.DesignedEffects | None = None
    """Effects and intervals that take blocks of permutations for what was drawn, of a `design`; None where there is
    none, or it has one block only."""
    cells: str | None = None
    """How many queries each ordering was asked, in words; None where all were asked the same."""
    blocks: stats.BlockEffects | None = None
    """Effects of orderings with queries of their own, which `effects` are then from; None where there are none."""

    def __repr__(self) -> str:
        sets, permutations = self.accuracy.shape
        order, selection, ratio = self.printed
        return (
            f"SensitivitySummary: {sets} sets x {permutations} permutations, {self.num_queries:,} queries; mean "
            f"accuracy {self.mean:.4f}, order sensitivity {order:.4f}, selection sensitivity {selection:.4f}, "
            f"r {ratio:.2f}; "
            f"fields: {', '.join(field.name for field in fields(self))}"
        )

    @property
    def printed(self) -> Spread:
        """Order and selection sensitivity and r as arXiv 2511.09700 prints them."""
        return self.spreads["mean_std"]

    @property
    def quoted(self) -> Interval | None:
        """The r to quote, with the interval that belongs to it; None where nothing bounds it.

        As the paper prints it, with the jackknife interval, which skewed effects hurt least; without one (two sets or
        permutations) the RMS ratio with its generalised interval. Of orderings with queries of their own the one free
        of item noise.
        """
        if self.blocks is not None:
            return None if self.effects is None or math.isnan(self.effects.ratio.low) else self.effects.ratio
        return _quoted(self.jackknife, self.intervals)

    @property
    def interval_method(self) -> str:
        """How the intervals of root mean squares, and those free of item noise, were made."""
        return "generalised" if self.designed is None else self.designed.method

    @property
    def set_means(self) -> FloatArray:
        """[S] mean accuracy of each set."""
        return np.asarray(self.accuracy.mean(axis=1))

    @property
    def permutation_means(self) -> FloatArray:
        """[P] mean accuracy of each permutation."""
        return np.asarray(self.accuracy.mean(axis=0))

    @property
    def missing_total(self) -> float:
        """Share of all answers (by weight) that are not ok."""
        return sum(self.missing.values())

    def same_label_sequence(self, shots: int | None) -> bool:
        """Whether a permutation of `shots` demonstrations in label order fixes their labels, whatever the set."""
        return bool(shots and self.num_labels and shots % self.num_labels == 0)

    def to_dict(self, shots: int | None = None) -> dict[str, Any]:
        """Everything as JSON-safe lists, dictionaries and numbers; NaN and infinity become None.

        `shots` is the number of demonstrations that the summary is about; what the components mean depends on it.
        """
        content: dict[str, Any] = plain(self)
        for name, is_there in (("design", "designed"), ("cells", "blocks")):
            if content[name] is None:
                del content[name], content[is_there]
        content["shots"], (content["num_sets"], content["num_permutations"]) = shots, self.accuracy.shape
        content["set_means"], content["permutation_means"] = plain(self.set_means), plain(self.permutation_means)
        content["missing_total"] = self.missing_total
        if self.calibration is not None:
            content["calibration_over_orderings"] = plain(over_orderings(self.calibration))
        if self.components is not None:
            content["components"] |= _component_summary(self.components, self.same_label_sequence(shots))
        if self.tokens is not None:
            content["tokens"]["saving"] = plain(self.tokens.saving)
        content["quoted"] = plain(self.quoted)
        return content


def sensitivity_summary(
    correct: npt.ArrayLike,
    label_logprob: npt.ArrayLike | Iterator[npt.NDArray[Any]] | None = None,
    targets: npt.ArrayLike | None = None,
    state: npt.ArrayLike | None = None,
    *,
    weights: npt.ArrayLike | None = None,
    classes: npt.ArrayLike | None = None,
    tokens: TokenReport | None = None,
    seed: int = 0,
    design: tuple[str, stats.PermutationBlocks] | None = None,
) -> SensitivitySummary:
    """Everything that is said about sets and orders at one number of shots.

    Args:
        correct: [S, P, Q] 0 or 1, or partial credit in 0..1.
        label_logprob: [S, P, Q, L] log-likelihood of each label in nats, for near-ties and, with targets, calibration;
            or an iterator over the [Q, L] of each set and permutation, held one by one.
        targets: [Q] index of the right label.
        state: [S, P, Q] integers, 0 = ok; what is not ok is missing in its cell alone.
        weights: [Q] how often each query counts in every mean and share: accuracy and all that is computed of it,
            variance components, calibration, near-ties, what is missing. A query is still one draw: what measures noise
            counts it once.
        classes: [Q] of queries that were drawn class by class (`stats.variance_components`); where weights differ the
            targets, where there are any.
        tokens: the engine's token counts for the study.
        seed: of the interval draws.
        design: how permutations were dealt, in words and blocks, where each is no draw of its own: intervals, and what
            order does, are then of `stats.designed_effects`.

    Raises RequestError on shapes that do not fit and DataError where some ordering has no answer. Cost: O(S·P·Q·L).
    """
    items = np.asarray(correct)
    if items.ndim != 3:
        raise RequestError(f"a sensitivity summary needs correct of shape [S, P, Q], got {list(items.shape)}")
    cells = stats.accuracy(items, state, weights)
    if np.isnan(cells.values).any():
        raise DataError(_no_answer(np.asarray(state)))
    matrix = cells.values
    labels = None if label_logprob is None else _about_labels(label_logprob, items.shape, targets, state, weights)
    if classes is None and weights is not None and np.ptp(np.asarray(weights)):
        classes = targets
    blocks = None if design is None else design[1]
    mean_interval, mean_se = _of_mean(items, state, weights, blocks)
    components, why_none = components_or_why(items, state, weights, classes)
    intervals, jackknife, needed = _intervals_of(matrix, seed)
    effects = None if components is None else stats.effect_interval(components, seed=seed)
    spreads: dict[str, Spread] = {estimator: spread_of(matrix, estimator) for estimator in _ESTIMATORS}
    designed = None
    if blocks is not None:
        designed, reason = _designed_or_why(items, state, weights, classes, blocks, seed)
        effects, intervals, jackknife, why_none = None, None, None, (*why_none, *reason)
    if designed is not None:
        effects, intervals, jackknife = designed.intervals, designed.with_noise, designed.jackknife
        spreads["rms"] = Spread(*(each.estimate for each in intervals))
    is_whole = state is None or not np.any(state)
    if_wrong, if_right = (
        (None, None)
        if is_whole or min(matrix.shape) < 2
        else tuple(_extreme(items, state, value, weights, classes, seed, blocks) for value in (0, 1))
    )
    return SensitivitySummary(
        accuracy=matrix,
        num_queries=cells.num_queries,
        num_labels=None if labels is None else labels.num_labels,
        dropped=cells.dropped,
        incomplete=0.0 if is_whole else stats.common_accuracy(items, state, weights).dropped,
        missing=_missing(state, weights),
        if_wrong=if_wrong,
        if_right=if_right,
        bounds=None if is_whole else stats.accuracy_bounds(items, state, weights),
        mean=float(matrix.mean()),
        mean_interval=mean_interval,
        mean_se=mean_se,
        spreads=spreads,
        intervals=intervals,
        jackknife=jackknife,
        components=components,
        effects=effects,
        needed=needed,
        best=ranked(matrix, 1.0),
        worst=ranked(matrix, 0.0),
        low_tail=ranked(matrix, 0.05),
        calibration=None if labels is None else labels.calibration,
        near_ties=None if labels is None else labels.near_ties,
        tokens=None if tokens is None else TokenSavings.of(tokens),
        warnings=(*_warnings(matrix, jackknife, components), *why_none),
        design=None if design is None else design[0],
        designed=designed,
    )


def _of_mean(
    items: npt.NDArray[Any],
    state: npt.ArrayLike | None,
    weights: npt.ArrayLike | None,
    blocks: stats.PermutationBlocks | None,
) -> tuple[Interval, float]:
    """The mean's interval, and its standard error clustered by query; the table filled for them is gone afterwards."""
    whole = filled(items, state, weights)
    if blocks is None:
        error = stats.mean_error(whole.items, whole.weights)
    else:
        error = stats.designed_mean(whole.items, blocks, whole.weights)
    return bounded(error.interval(), "accuracy"), stats.clustered_se(whole.items, whole.weights)


def _intervals_of(
    matrix: FloatArray, seed: int
) -> tuple[SensitivityIntervals | None, Interval | None, NeededDesign | None]:
    """Generalised intervals, the jackknife's of r, and the needed design, as far as accuracy [S, P] allows."""
    if min(matrix.shape) < 2:
        return None, None, None
    jackknife = stats.jackknife_ratio_interval(matrix) if min(matrix.shape) >= 3 else None
    return stats.generalized_interval(matrix, seed=seed), jackknife, stats.needed_design(matrix)


def _designed_or_why(
    items: npt.NDArray[Any],
    state: npt.ArrayLike | None,
    weights: npt.ArrayLike | None,
    classes: npt.ArrayLike | None,
    blocks: stats.PermutationBlocks,
    seed: int,
) -> tuple[stats.DesignedEffects | None, tuple[str, ...]]:
    """The effects of a design of permutations, or none and why: one square cannot tell how others differ."""
    if min(items.shape) < 2:
        return None, ()
    try:
        return stats.designed_effects(items, blocks, state, weights=weights, classes=classes, seed=seed), ()
    except RequestError as error:
        return None, (f"what order does has no interval: {error}",)


def components_or_why(
    items: npt.NDArray[Any],
    state: npt.ArrayLike | None,
    weights: npt.ArrayLike | None,
    classes: npt.ArrayLike | None,
) -> tuple[VarianceComponents | None, tuple[str, ...]]:
    """The components, or none and why: a class of one query cannot tell its noise."""
    if min(items.shape) < 2:
        return None, ()
    try:
        return stats.variance_components(items, state, weights=weights, classes=classes), ()
    except RequestError as error:
        return None, (f"effects are not freed of item noise: {error}",)


def _extreme(
    items: npt.NDArray[Any],
    state: npt.ArrayLike | None,
    value: int,
    weights: npt.ArrayLike | None,
    classes: npt.ArrayLike | None,
    seed: int,
    blocks: stats.PermutationBlocks | None,
) -> Extreme:
    """What is said with every missing answer taken as `value`, those of queries that no ordering answered, too."""
    table = np.where(np.asarray(state) != 0, np.asarray(value, items.dtype), items)
    matrix = stats.accuracy(table, None, weights).values
    components, _ = components_or_why(table, None, weights, classes)
    intervals, jackknife, _ = _intervals_of(matrix, seed)
    assert intervals is not None
    effects = intervals if components is None else stats.effect_interval(components, seed=seed)
    if blocks is not None:
        designed, _ = _designed_or_why(table, None, weights, classes, blocks, seed)
        if designed is not None:
            intervals, jackknife, effects = designed.with_noise, designed.jackknife, designed.intervals
    quoted = _quoted(jackknife, intervals) or intervals.ratio
    return Extreme(matrix, effects.order, effects.selection, quoted, None if components is None else effects.ratio)


def over_orderings(calibration: Calibration) -> dict[str, dict[str, float]]:
    """Mean, lowest and highest of every score beyond accuracy, over all orderings."""
    return {
        score: {"mean": float(values.mean()), "lowest": float(values.min()), "highest": float(values.max())}
        for score, values in calibration._asdict().items()
    }


def _quoted(jackknife: Interval | None, intervals: SensitivityIntervals | None) -> Interval | None:
    """The first r of these two that something bounds."""
    candidates = (jackknife, None if intervals is None else intervals.ratio)
    return next((r for r in candidates if r is not None and not math.isnan(r.estimate + r.low)), None)


def _component_summary(components: VarianceComponents, same_label_sequence: bool) -> dict[str, Any]:
    return {
        "shares": plain(components.shares),
        "order_effect": components.order_effect,
        "selection_effect": components.selection_effect,
        "ratio": plain(components.ratio),
        "in_words": stats.explain_components(components, same_label_sequence=same_label_sequence),
    }


def _warnings(matrix: FloatArray, jackknife: Interval | None, components: VarianceComponents | None) -> Iterator[str]:
    """What makes r doubtful."""
    has_jackknife = jackknife is not None and not math.isnan(jackknife.low)
    for warning in stats.skewness_warnings(matrix):
        yield (
            warning
            if has_jackknife
            else warning.replace(
                "quote r with the jackknife",
                "and there is no jackknife interval to quote instead: add sets and permutations",
            )
        )
    if components is not None and components.sigma2.SP > 0 >= max(components.sigma2.S, components.sigma2.P):
        yield (
            "neither sets nor permutations show an effect of their own beyond that of single orderings (both are "
            "estimated at 0 or below): how far r without item noise is from 1 is then chance"
        )


class _AboutLabels(NamedTuple):
    """Scores of the log-likelihoods of the labels."""

    num_labels: int
    calibration: Calibration | None
    near_ties: float


def _about_labels(
    label_logprob: npt.ArrayLike | Iterator[npt.NDArray[Any]],
    shape: tuple[int, ...],
    targets: npt.ArrayLike | None,
    state: npt.ArrayLike | None,
    weights: npt.ArrayLike | None,
) -> _AboutLabels:
    """Calibration and near-ties of the orderings [S, P], from one after the other, so that the log-likelihoods of one
    alone are in memory."""
    states = np.zeros(shape, np.uint8) if state is None else np.asarray(state)
    # einsum casts in small buffers; a matrix product would make a float copy of the whole tensor
    num_ok = np.einsum("spq,q->sp", (states == 0).view(np.uint8), query_weights(weights, shape[-1]))
    num_near, scores = 0.0, []
    for cell, logprob in zip(np.ndindex(shape[:2]), _by_ordering(label_logprob, shape), strict=True):
        if num_ok[cell]:
            num_near += num_ok[cell] * stats.near_tie_rate(logprob, states[cell], weights=weights)
        if targets is not None:
            scores.append(stats.calibration(logprob, targets, states[cell], weights=weights))
    return _AboutLabels(
        num_labels=logprob.shape[-1],
        calibration=Calibration(*np.array(scores).T.reshape(-1, *shape[:2])) if scores else None,
        near_ties=num_near / float(num_ok.sum()),
    )


def _by_ordering(
    label_logprob: npt.ArrayLike | Iterator[npt.NDArray[Any]], shape: tuple[int, ...]
) -> Iterator[npt.NDArray[Any]]:
    if isinstance(label_logprob, Iterator):
        return label_logprob
    tensor = np.asarray(label_logprob)
    if tensor.shape[:-1] != shape:
        wanted, got = [*shape, "L"], list(tensor.shape)
        raise RequestError(f"label_logprob must have shape {wanted} to fit correct, got {got}")
    return iter(tensor.reshape(-1, *tensor.shape[2:]))


def _no_answer(state: npt.NDArray[Any]) -> str:
    failures = (state != 0).mean(axis=2)
    if (state == STATES.index("unparsed")).any(axis=(0, 1)).all():
        return "every query has a text that no answer could be read from; --unparsed wrong counts such texts as wrong"
    states = "/".join(str(np.asarray(STATES)[code]) for code in np.unique(state[state != 0]) if code < len(STATES))
    if failures.all() and failures.min() == 1:
        return (
            f"there is no answer to speak of: all {state.size:,} are {states or 'missing'}; see the states in an export"
        )
    s, p = np.unravel_index(int(failures.argmax()), failures.shape)
    return (
        f"set {s} under permutation {p} has no answer to any query: leave it out or see its states; of all answers "
        f"{failures.mean():.0%} are missing ({states}). iclperm stats leaves such out of an export where enough remain"
    )


def _missing(state: npt.ArrayLike | None, weights: npt.ArrayLike | None) -> dict[str, float]:
    """Share of all answers (by weight) in each state but ok, by its name, or by its number where it has none."""
    if state is None:
        return dict.fromkeys(STATES[1:], 0.0)
    states, weight = np.asarray(state), None if weights is None else np.asarray(weights, dtype=np.float64)
    shares = {
        int(code): float(np.average((states == code).mean(axis=(0, 1)), weights=weight)) for code in np.unique(states)
    }
    named = {name: shares.pop(code, 0.0) for code, name in enumerate(STATES)}
    return {name: share for name, share in named.items() if name != "ok"} | {
        name_of(code): share for code, share in shares.items()
    }


def spread_of(matrix: FloatArray, estimator: stats.Estimator) -> Spread:
    """Both sensitivities and r of accuracy [S, P]; NaN where undefined."""
    return Spread(
        stats.order_sensitivity(matrix, estimator),
        stats.selection_sensitivity(matrix, estimator),
        stats.sensitivity_ratio(matrix, estimator),
    )


def ranked(matrix: FloatArray, quantile: float) -> Ordering:
    """The ordering at a quantile of accuracy; ties go to the lowest set, then permutation."""
    order = np.argsort(matrix, axis=None, kind="stable")
    value = np.ravel(matrix)[order[max(math.ceil(quantile * matrix.size) - 1, 0)]]
    s, p = np.argwhere(matrix == value)[0]
    return Ordering(int(s), int(p), float(value))
