"""Kind `sensitivity` (arXiv 2511.09700): does the choice of the demonstrations matter more, or their order?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from iclperm import stats
from iclperm.errors import DataError, RequestError
from iclperm.stats import Calibration, Curve, Interval, NeededDesign, SensitivityIntervals, VarianceComponents
from iclperm.stats.sensitivity import query_weights
from iclperm.store import STATES
from iclperm.studies.findings import Plot, Table, plain

if TYPE_CHECKING:
    from iclperm.results import Run

FloatArray = npt.NDArray[np.float64]

_ESTIMATORS: tuple[stats.Estimator, ...] = ("mean_std", "rms", "c4")


class TokenReport(Protocol):
    """What the engine counts: see `Engine.report`."""

    @property
    def tokens_naive(self) -> int: ...
    @property
    def tokens_unique(self) -> int: ...
    @property
    def tokens_forwarded(self) -> int: ...


class Tokens(NamedTuple):
    """Tokens of a study: asked for prompt by prompt, distinct, and really sent through the model."""

    naive: int
    unique: int
    forwarded: int
    complete: bool = True
    """False where a session ended without a record of its tokens: `forwarded` is then the least it can be."""

    @classmethod
    def of(cls, report: TokenReport) -> Tokens:
        """What an engine or a run counted; an engine always knows what it forwarded."""
        complete = getattr(report, "is_token_count_complete", True)
        return cls(report.tokens_naive, report.tokens_unique, report.tokens_forwarded, complete)

    @property
    def saving(self) -> float:
        """How many times fewer the distinct tokens are than those of plain prompting; NaN where there are none."""
        return self.naive / self.unique if self.unique else math.nan


class Ordering(NamedTuple):
    """One set under one permutation, with its accuracy."""

    set: int
    permutation: int
    accuracy: float


class Spread(NamedTuple):
    """Both sensitivities under one estimator."""

    order: float
    selection: float
    ratio: float


class IntervalsOverShots(NamedTuple):
    """One estimate with its interval at every number of shots; NaN where undefined, `high` can be infinite."""

    estimate: FloatArray
    """[K]"""
    low: FloatArray
    """[K]"""
    high: FloatArray
    """[K]"""
    level: float


@dataclass(frozen=True)
class SensitivityOverShots:
    """Order against selection at every number of shots that was run, in units of accuracy.

    At k = 0 there is nothing to order or to choose: every entry there is NaN.
    """

    shots: tuple[int, ...]
    """[K] numbers of demonstrations, ascending; the last is the size of the sets."""
    resampled: bool
    """Whether every k had sets and permutations of its own; else its contexts are prefixes of the longest ones."""
    order: FloatArray
    """[K] order sensitivity as printed; NaN for P = 1. See `is_order_alone`."""
    selection: FloatArray
    """[K] selection sensitivity as printed; NaN for S = 1."""
    ratio: IntervalsOverShots
    """r as printed, with the jackknife interval; without one below three sets or permutations."""
    order_effect: IntervalsOverShots
    """Order effect free of item noise, with the generalised interval; NaN for S = 1, P = 1 or one query."""
    selection_effect: IntervalsOverShots
    ratio_effect: IntervalsOverShots
    """r free of item noise."""
    dropped: float
    """Share of the queries (by weight) that some cell at some k could not answer."""
    num_queries: int
    """Distinct queries that were used, the same at every k."""

    @property
    def is_order_alone(self) -> npt.NDArray[np.bool_]:
        """[K] whether a permutation only orders; elsewhere it also chooses which demonstrations of the set are seen."""
        return np.array([self.resampled or k == self.shots[-1] for k in self.shots])

    @property
    def caution(self) -> str | None:
        """What order means where it is not order alone, and the remedy; None where it is everywhere."""
        if not any(k and not alone for k, alone in zip(self.shots, self.is_order_alone, strict=True)):
            return None
        return _PREFIX_CAUTION.format(shots=self.shots[-1])

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-safe lists, dictionaries and numbers; NaN and infinity become None."""
        return {**plain(self), "is_order_alone": plain(self.is_order_alone), "caution": self.caution}


_PREFIX_CAUTION = (
    "At k < {shots} the context is the first k of one ordering of {shots} demonstrations: a permutation also chooses "
    "which of them are seen, so order holds selection within the set there, and r comes out too low. Only at k = "
    "{shots} is it order alone; the study key `resample: per_k` makes it so at every k."
)


@dataclass(frozen=True)
class SensitivitySummary:
    """The numbers of a sensitivity study at one number of shots."""

    accuracy: FloatArray
    """[S, P], over the queries that are ok in every cell."""
    num_queries: int
    """Distinct queries that were used."""
    num_labels: int | None
    """Number of classes; None without log-likelihoods of the labels."""
    dropped: float
    """Share of the queries (by weight) that some cell could not answer."""
    missing: Mapping[str, float]
    """Share of all answers (by weight) in each state but ok."""
    mean: float
    mean_se: float
    """Standard error of the mean accuracy, clustered by query."""
    spreads: Mapping[str, Spread]
    """Order and selection sensitivity and r under each estimator; `mean_std` is what the paper prints."""
    intervals: SensitivityIntervals | None
    """Generalised intervals (RMS); None for S = 1 or P = 1."""
    jackknife: Interval | None
    """Jackknife interval of the printed r; None below three sets or permutations."""
    components: VarianceComponents | None
    """None for S = 1, P = 1 or one query."""
    effects: SensitivityIntervals | None
    """Order effect, selection effect and r free of item noise."""
    needed: NeededDesign | None
    """The design that would tell r from 1; None where there is none."""
    best: Ordering
    worst: Ordering
    low_tail: Ordering
    """The ordering at the 5 % quantile of accuracy: one ordering in 20 is no better."""
    calibration: Calibration | None
    near_ties: float | None
    """Share of ok answers (by weight) that rounding could turn."""
    tokens: Tokens | None
    warnings: tuple[str, ...]

    @property
    def printed(self) -> Spread:
        """Order and selection sensitivity and r as arXiv 2511.09700 prints them."""
        return self.spreads["mean_std"]

    @property
    def quoted(self) -> Interval | None:
        """The r to quote, with the interval that belongs to it; None where nothing bounds it.

        As the paper prints it, with the jackknife interval, which skewed effects hurt least; without one (two sets or
        permutations) the RMS ratio with its generalised interval.
        """
        candidates = (self.jackknife, None if self.intervals is None else self.intervals.ratio)
        return next((r for r in candidates if r is not None and not math.isnan(r.estimate + r.low)), None)

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
        content["shots"], (content["num_sets"], content["num_permutations"]) = shots, self.accuracy.shape
        content["set_means"], content["permutation_means"] = plain(self.set_means), plain(self.permutation_means)
        content["missing_total"] = self.missing_total
        if self.calibration is not None:
            content["calibration_over_orderings"] = plain(over_orderings(self.calibration))
        if self.components is not None:
            content["components"] |= _component_summary(self.components, self.same_label_sequence(shots))
        if self.tokens is not None:
            content["tokens"]["saving"] = plain(self.tokens.saving)
        content["quoted"], content["conclusion"] = plain(self.quoted), conclusion(self, shots)
        return content


@dataclass(frozen=True)
class Sensitivity:
    """The findings of a sensitivity study: its summary at the largest number of shots, and what changes over shots."""

    summary: SensitivitySummary
    shots: tuple[int, ...] = ()
    """The numbers of demonstrations that were run, the last of them that of the summary; empty where not known."""
    curve: Curve | None = None
    over_shots: SensitivityOverShots | None = None
    title: str = ""
    chance: float | None = None
    """Accuracy of guessing."""

    @property
    def warnings(self) -> Sequence[str]:
        """See `Findings`."""
        return self.summary.warnings

    def conclusion(self) -> list[str]:
        """See `Findings`."""
        return conclusion(self.summary, self._last)

    def tables(self, full: bool) -> list[Table]:
        """See `Findings`."""
        from iclperm.report.tables import curve_table, over_shots_table, sensitivity_tables

        tables = sensitivity_tables(self.summary, self._last, full=full)
        if self.curve is not None:
            tables.append(curve_table(self.curve, self.shots))
        if self.over_shots is not None and full:
            tables.append(over_shots_table(self.over_shots))
        return tables

    def plots(self) -> dict[str, Plot]:
        """The heat map of accuracies, the curve and r over shots, as far as they were run."""
        from iclperm.report.figures import curve_plot, heat_map, ratio_plot

        title = ", ".join(part for part in (self.title, f"k = {self._last}" if self.shots else "") if part)
        plots = {"heatmap": heat_map(self.summary.accuracy, title=title, ratio=self.summary.jackknife)}
        if self.curve is not None:
            plots["curve"] = curve_plot(self.curve, self.shots, title=self.title, chance=self.chance)
        if self.over_shots is not None and sum(k > 0 for k in self.over_shots.shots) >= 2:
            plots["r_over_k"] = ratio_plot(self.over_shots, title=self.title)
        return plots

    def to_dict(self) -> dict[str, Any]:
        """The summary and, where they were run, curve and sensitivity over shots; JSON-safe."""
        content: dict[str, Any] = {"sensitivity": self.summary.to_dict(self._last)}
        if self.curve is not None:
            content["curve"] = {"shots": plain(self.shots), **plain(self.curve)}
        if self.over_shots is not None:
            content["over_shots"] = self.over_shots.to_dict()
        return content

    @property
    def _last(self) -> int | None:
        return self.shots[-1] if self.shots else None


def findings(run: Run) -> Sensitivity:
    """Order against selection in a finished run."""
    return Sensitivity(run.summary(), run.shots, run.curve(), run.over_shots(), title=run.title, chance=run.chance)


def sensitivity_summary(
    correct: npt.ArrayLike,
    label_logprob: npt.ArrayLike | Iterator[npt.NDArray[Any]] | None = None,
    targets: npt.ArrayLike | None = None,
    state: npt.ArrayLike | None = None,
    *,
    weights: npt.ArrayLike | None = None,
    tokens: TokenReport | None = None,
    seed: int = 0,
) -> SensitivitySummary:
    """Everything that is said about sets and orders at one number of shots.

    Args:
        correct: [S, P, Q] 0 or 1.
        label_logprob: [S, P, Q, L] log-likelihood of each label in nats, for near-ties and, with targets, calibration;
            or an iterator over the [Q, L] of each set and permutation, held one by one.
        targets: [Q] index of the right label.
        state: [S, P, Q] integers, 0 = ok.
        weights: [Q] how often each query counts in every mean and share: accuracy and all that is computed of it,
            standard error, calibration, near-ties, what is missing. A query is still one draw: variance components, and
            the effects free of item noise with them, count distinct queries once each.
        tokens: the engine's token counts for the study.
        seed: of the interval draws.

    Raises RequestError on shapes that do not fit and DataError where no query is ok in every cell. Cost: O(S·P·Q·L).
    """
    items = np.asarray(correct)
    if items.ndim != 3:
        raise RequestError(f"a sensitivity summary needs correct of shape [S, P, Q], got {list(items.shape)}")
    cells = stats.accuracy(items, state, weights)
    if cells.num_queries == 0:
        raise DataError(_no_common_query(np.asarray(state)))
    matrix = cells.values
    labels = None if label_logprob is None else _about_labels(label_logprob, items.shape, targets, state, weights)
    crossed = min(matrix.shape) >= 2
    components = stats.variance_components(items, state) if crossed and cells.num_queries >= 2 else None
    intervals = stats.generalized_interval(matrix, seed=seed) if crossed else None
    jackknife = stats.jackknife_ratio_interval(matrix) if min(matrix.shape) >= 3 else None
    needed = stats.needed_design(matrix) if crossed else None
    return SensitivitySummary(
        accuracy=matrix,
        num_queries=cells.num_queries,
        num_labels=None if labels is None else labels.num_labels,
        dropped=cells.dropped,
        missing=_missing(state, weights),
        mean=float(matrix.mean()),
        mean_se=_mean_se(items, state, weights),
        spreads={estimator: _spread(matrix, estimator) for estimator in _ESTIMATORS},
        intervals=intervals,
        jackknife=jackknife,
        components=components,
        effects=None if components is None else stats.effect_interval(components, seed=seed),
        needed=needed,
        best=_ranked(matrix, 1.0),
        worst=_ranked(matrix, 0.0),
        low_tail=_ranked(matrix, 0.05),
        calibration=None if labels is None else labels.calibration,
        near_ties=None if labels is None else labels.near_ties,
        tokens=None if tokens is None else Tokens.of(tokens),
        warnings=tuple(_warnings(matrix, jackknife, components)),
    )


def sensitivity_over_shots(
    correct: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    *,
    shots: Sequence[int],
    weights: npt.ArrayLike | None = None,
    seed: int = 0,
    resampled: bool = False,
) -> SensitivityOverShots:
    """Order against selection at every number of shots, over the queries that are ok in every cell at every k.

    Args:
        correct: [S, P, K, Q] 0 or 1.
        state: [S, P, K, Q] integers, 0 = ok.
        shots: [K] numbers of demonstrations, ascending.
        weights: [Q] how often each query counts in an accuracy; the effects free of item noise count it once.
        seed: of the interval draws.
        resampled: every k has sets and permutations of its own (`resample: per_k`). Otherwise contexts are prefixes of
            one ordering of the largest k, and below it order holds selection within the set (`is_order_alone`).

    What a summary of one k says can differ a little: it leaves out only the queries that fail at that k. Raises
    RequestError on shapes that do not fit. Cost: O(K·S·P·(Q + S + P)). arXiv 2511.09700, at more than its one k.
    """
    items, counts = np.asarray(correct), tuple(int(k) for k in shots)
    if items.ndim != 4:
        raise RequestError(f"sensitivity over shots needs correct of shape [S, P, K, Q], got {list(items.shape)}")
    if len(counts) != items.shape[2] or list(counts) != sorted(set(counts)):
        raise RequestError(f"shots must be {items.shape[2]} ascending numbers, one for each k, got {list(counts)}")
    cells = stats.accuracy(items, state, weights)
    answered = items if state is None else items[..., ~np.asarray(state).any(axis=(0, 1, 2))]
    at_k = [
        _at_one_k(cells.values[:, :, place], answered[:, :, place], seed)
        if k and cells.num_queries
        else _UNDEFINED_AT_K
        for place, k in enumerate(counts)
    ]
    order, selection, ratio, order_effect, selection_effect, ratio_effect = zip(*at_k, strict=True)
    return SensitivityOverShots(
        shots=counts,
        resampled=resampled,
        order=np.array(order),
        selection=np.array(selection),
        ratio=_over_shots(ratio),
        order_effect=_over_shots(order_effect),
        selection_effect=_over_shots(selection_effect),
        ratio_effect=_over_shots(ratio_effect),
        dropped=cells.dropped,
        num_queries=cells.num_queries,
    )


def over_orderings(calibration: Calibration) -> dict[str, dict[str, float]]:
    """Mean, lowest and highest of every score beyond accuracy, over all orderings."""
    return {
        score: {"mean": float(values.mean()), "lowest": float(values.min()), "highest": float(values.max())}
        for score, values in calibration._asdict().items()
    }


def conclusion(summary: SensitivitySummary, shots: int | None = None) -> list[str]:
    """The result in plain sentences: what order and choice of `shots` demonstrations do, and whether r differs from 1.

    The movements are free of item noise where the design allows it; r is the one to quote (`SensitivitySummary.quoted`)
    and is called different from 1 only where taking out the item noise leaves it so.
    """
    if shots == 0:
        return [f"At k = 0 there are no demonstrations to order or to choose; accuracy is {100 * summary.mean:.1f} %."]
    if summary.accuracy.size > 1 and np.ptp(summary.accuracy) == 0:
        at = "" if shots is None else f"At k = {shots}, "
        return [
            f"{at}all {summary.accuracy.size} orderings have the accuracy {100 * summary.mean:.1f} %: how far order or "
            "choice moves it on other queries is not known."
        ]
    return [_movements(summary, shots), *_verdict(summary)]


def _movements(summary: SensitivitySummary, shots: int | None) -> str:
    start = "Another" if shots is None else f"At k = {shots}, another"
    order, selection = (_movement(summary, field) for field in ("order", "selection"))
    noise = "item noise included" if summary.effects is None else "item noise taken out; 95 % intervals"
    return (
        f"{start} order of the same demonstrations moves accuracy by {order}, another choice of demonstrations by "
        f"{selection} (one standard deviation, {noise})."
    )


def _movement(summary: SensitivitySummary, field: str) -> str:
    if summary.effects is not None:
        size, low, high, _ = (100 * value for value in getattr(summary.effects, field))
        return f"about ±{size:.1f} points [{low:.1f} to {high:.1f}]"
    size = 100 * getattr(summary.printed, field)
    return "an unknown amount, as there is only one" if math.isnan(size) else f"about ±{size:.1f} points"


def _verdict(summary: SensitivitySummary) -> list[str]:
    """What r says, and which r it is; nothing where nothing bounds it."""
    r, free = summary.quoted, None if summary.effects is None else summary.effects.ratio
    if r is None:
        return []
    name = "as printed in arXiv 2511.09700, jackknife" if r == summary.jackknife else "root mean square, generalised"
    told = f"r = choice / order = {_with_range(r)}"
    if _side(r) == 0:
        told += f" cannot be told from 1: which of the two matters more stays open; {_remedy(summary)}."
    elif free is not None and _side(free) != _side(r):
        told += " excludes 1, but without item noise r cannot be told from 1: which of the two matters more stays open."
    else:
        larger, smaller = ("order", "choice") if _side(r) < 0 else ("choice", "order")
        told += f" can be told from 1: the {larger} matters more than the {smaller}."
    quote = f"This is the r to quote ({name} interval)"
    if free is None or math.isnan(free.estimate):
        return [told, f"{quote}."]
    return [told, f"{quote}; beside it, free of the noise of {summary.num_queries:,} queries: {_with_range(free)}."]


def _side(interval: Interval) -> int:
    """-1 where the interval lies below 1, 1 where above, 0 where it holds 1 or says nothing."""
    return int(interval.low > 1) - int(interval.high < 1)


def _with_range(interval: Interval) -> str:
    return f"{interval.estimate:.2f} [{interval.low:.2f} to {interval.high:.2f}]"


def _remedy(summary: SensitivitySummary) -> str:
    needed = summary.needed
    if needed is None:
        return "no practical design would settle it at this estimate"
    if needed.num_sets <= min(summary.accuracy.shape):
        return "more sets and permutations would narrow it"
    return (
        f"if r is {needed.ratio:.2f}, about {needed.num_sets:,} sets x {needed.num_permutations:,} permutations would "
        "settle it"
    )


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
            "neither sets nor permutations show an effect of their own beyond that of single orderings: without item "
            "noise order and selection are then equal, and r is 1, by construction"
        )


class _AboutLabels(NamedTuple):
    """What the log-likelihoods of the labels tell."""

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
    """Calibration and near-ties of the orderings [S, P], one after the other: their log-likelihoods are never held
    together."""
    states = np.zeros(shape, np.uint8) if state is None else np.asarray(state)
    unusable = states.any(axis=(0, 1))
    # einsum casts in small buffers; a matrix product would make a float copy of the whole tensor
    num_ok = np.einsum("spq,q->sp", (states == 0).view(np.uint8), query_weights(weights, shape[-1]))
    num_near, scores = 0.0, []
    for cell, logprob in zip(np.ndindex(shape[:2]), _by_ordering(label_logprob, shape), strict=True):
        if num_ok[cell]:
            num_near += num_ok[cell] * stats.near_tie_rate(logprob, states[cell], weights=weights)
        if targets is not None:
            scores.append(stats.calibration(logprob, targets, unusable, weights=weights))
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


def _no_common_query(state: npt.NDArray[Any]) -> str:
    failures = (state != 0).mean(axis=2)
    if (state == STATES.index("unparsed")).any(axis=(0, 1)).all():
        return "every query has a text that no answer could be read from; --unparsed wrong counts such texts as wrong"
    s, p = np.unravel_index(int(failures.argmax()), failures.shape)
    return (
        f"no query is ok in every cell; set {s} under permutation {p} lacks most, {failures[s, p]:.0%} of its queries: "
        "leave it out or see its states"
    )


def _missing(state: npt.ArrayLike | None, weights: npt.ArrayLike | None) -> dict[str, float]:
    """Share of all answers in each state but ok; a state without a name is called by its number."""
    if state is None:
        return dict.fromkeys(STATES[1:], 0.0)
    states, weight = np.asarray(state), None if weights is None else np.asarray(weights, dtype=np.float64)
    shares = {
        int(code): float(np.average((states == code).mean(axis=(0, 1)), weights=weight)) for code in np.unique(states)
    }
    named = {name: shares.pop(code, 0.0) for code, name in enumerate(STATES)}
    return {name: share for name, share in named.items() if name != "ok"} | {
        f"state {code}": share for code, share in shares.items()
    }


def _mean_se(items: npt.NDArray[Any], state: npt.ArrayLike | None, weights: npt.ArrayLike | None) -> float:
    if state is None:
        return stats.clustered_se(items, weights)
    usable = ~np.asarray(state).any(axis=(0, 1))
    return stats.clustered_se(items[..., usable], None if weights is None else np.asarray(weights)[usable])


def _spread(matrix: FloatArray, estimator: stats.Estimator) -> Spread:
    return Spread(
        stats.order_sensitivity(matrix, estimator),
        stats.selection_sensitivity(matrix, estimator),
        stats.sensitivity_ratio(matrix, estimator),
    )


def _ranked(matrix: FloatArray, quantile: float) -> Ordering:
    """The ordering at a quantile of accuracy; ties go to the lowest set, then permutation."""
    order = np.argsort(matrix, axis=None, kind="stable")
    value = np.ravel(matrix)[order[max(math.ceil(quantile * matrix.size) - 1, 0)]]
    s, p = np.argwhere(matrix == value)[0]
    return Ordering(int(s), int(p), float(value))


_AtOneK = tuple[float, float, Interval, Interval, Interval, Interval]
_NOTHING = Interval(math.nan, math.nan, math.nan, 0.95)
_UNDEFINED_AT_K: _AtOneK = (math.nan, math.nan, _NOTHING, _NOTHING, _NOTHING, _NOTHING)


def _at_one_k(matrix: FloatArray, items: npt.NDArray[Any], seed: int) -> _AtOneK:
    """Order, selection, r with its jackknife interval and the effects, from accuracy [S, P] and items [S, P, Q]."""
    printed = _spread(matrix, "mean_std")
    enough = min(matrix.shape) >= 3
    r = stats.jackknife_ratio_interval(matrix) if enough else _NOTHING._replace(estimate=printed.ratio)
    if min(items.shape) < 2:
        return printed.order, printed.selection, r, _NOTHING, _NOTHING, _NOTHING
    effects = stats.effect_interval(stats.variance_components(items), seed=seed)
    return printed.order, printed.selection, r, *effects


def _over_shots(intervals: Sequence[Interval]) -> IntervalsOverShots:
    estimate, low, high, (level, *_) = zip(*intervals, strict=True)
    return IntervalsOverShots(np.array(estimate), np.array(low), np.array(high), level)
