"""Kind `sensitivity` (arXiv 2511.09700): does the choice of the demonstrations matter more, or their order?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from iclperm import stats
from iclperm.errors import DataError, RequestError
from iclperm.stats import Calibration, Curve, Interval, NeededDesign, SensitivityIntervals, VarianceComponents
from iclperm.store import STATES

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

    @property
    def saving(self) -> float:
        """How many times fewer tokens than plain prompting; NaN where nothing was forwarded."""
        return self.naive / self.forwarded if self.forwarded else math.nan


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


@dataclass(frozen=True)
class SensitivitySummary:
    """The numbers of a sensitivity study at one number of shots."""

    accuracy: FloatArray
    """[S, P], over the queries that are ok in every cell."""
    num_queries: int
    """Distinct queries that were used."""
    dropped: float
    """Share of the queries that some cell could not answer."""
    missing: Mapping[str, float]
    """Share of all answers in each state but ok."""
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
    """The ordering at the 5 % quantile of accuracy."""
    calibration: Calibration | None
    near_ties: float | None
    """Share of ok answers that rounding could turn."""
    tokens: Tokens | None
    warnings: tuple[str, ...]

    @property
    def printed(self) -> Spread:
        """Order and selection sensitivity and r as arXiv 2511.09700 prints them."""
        return self.spreads["mean_std"]

    @property
    def set_means(self) -> FloatArray:
        """[S] mean accuracy of each set."""
        return np.asarray(self.accuracy.mean(axis=1))

    @property
    def permutation_means(self) -> FloatArray:
        """[P] mean accuracy of each permutation."""
        return np.asarray(self.accuracy.mean(axis=0))

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-safe lists, dictionaries and numbers; NaN and infinity become None."""
        content: dict[str, Any] = plain(self)
        content["set_means"], content["permutation_means"] = plain(self.set_means), plain(self.permutation_means)
        if self.components is not None:
            content["components"] |= _component_summary(self.components)
        if self.tokens is not None:
            content["tokens"]["saving"] = plain(self.tokens.saving)
        return content


def sensitivity_summary(
    correct: npt.ArrayLike,
    label_logprob: npt.ArrayLike | None = None,
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
        label_logprob: [S, P, Q, L] log-likelihood of each label in nats, for near-ties and, with targets, calibration.
        targets: [Q] index of the right label.
        state: [S, P, Q] integers, 0 = ok.
        weights: [Q] how often each query counts in an accuracy; components and intervals count distinct queries.
        tokens: the engine's token counts for the study.
        seed: of the interval draws.

    Raises RequestError on shapes that do not fit and DataError where no query is ok in every cell. Cost: O(S·P·Q·L).
    """
    items = np.asarray(correct)
    if items.ndim != 3:
        raise RequestError(f"a sensitivity summary needs correct of shape [S, P, Q], got {list(items.shape)}")
    _check_label_logprob(label_logprob, items.shape)
    cells = stats.accuracy(items, state, weights)
    if cells.num_queries == 0:
        raise DataError(_no_common_query(np.asarray(state)))
    matrix = cells.values
    crossed = min(matrix.shape) >= 2
    components = stats.variance_components(items, state) if crossed and cells.num_queries >= 2 else None
    intervals = stats.generalized_interval(matrix, seed=seed) if crossed else None
    jackknife = stats.jackknife_ratio_interval(matrix) if min(matrix.shape) >= 3 else None
    needed = stats.needed_design(matrix) if crossed else None
    return SensitivitySummary(
        accuracy=matrix,
        num_queries=cells.num_queries,
        dropped=cells.dropped,
        missing=_missing(state),
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
        calibration=_calibration(label_logprob, targets, state),
        near_ties=None if label_logprob is None else stats.near_tie_rate(label_logprob, state),
        tokens=None if tokens is None else Tokens(tokens.tokens_naive, tokens.tokens_unique, tokens.tokens_forwarded),
        warnings=(*stats.skewness_warnings(matrix), *_power_warning(intervals, needed)),
    )


def report_content(
    summary: SensitivitySummary, curve: Curve | None = None, shots: Sequence[int] | None = None
) -> dict[str, Any]:
    """The content of `report.json`: the summary and, where it was run, the curve over shots. JSON-safe."""
    content: dict[str, Any] = {"kind": "sensitivity", "sensitivity": summary.to_dict()}
    if curve is not None:
        content["curve"] = {"shots": plain(shots), **plain(curve)}
    return content


def plain(value: Any) -> Any:
    """`value` as lists, dictionaries, strings, booleans and finite numbers; NaN and infinity become None."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _component_summary(components: VarianceComponents) -> dict[str, Any]:
    return {
        "shares": plain(components.shares),
        "order_effect": components.order_effect,
        "selection_effect": components.selection_effect,
        "ratio": plain(components.ratio),
        "in_words": stats.explain_components(components),
    }


def _check_label_logprob(label_logprob: npt.ArrayLike | None, shape: tuple[int, ...]) -> None:
    if label_logprob is not None and np.shape(label_logprob)[:-1] != shape:
        wanted, got = [*shape, "L"], list(np.shape(label_logprob))
        raise RequestError(f"label_logprob must have shape {wanted} to fit correct, got {got}")


def _no_common_query(state: npt.NDArray[Any]) -> str:
    failures = (state != 0).mean(axis=2)
    s, p = np.unravel_index(int(failures.argmax()), failures.shape)
    return (
        f"no query is ok in every cell; set {s} under permutation {p} lacks most, {failures[s, p]:.0%} of its queries: "
        "leave it out or see its states"
    )


def _missing(state: npt.ArrayLike | None) -> dict[str, float]:
    """Share of all answers in each state but ok; a state without a name is called by its number."""
    if state is None:
        return dict.fromkeys(STATES[1:], 0.0)
    codes, counts = np.unique(np.asarray(state), return_counts=True)
    shares = dict(zip(codes.tolist(), (counts / counts.sum()).tolist(), strict=True))
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


def _calibration(
    label_logprob: npt.ArrayLike | None, targets: npt.ArrayLike | None, state: npt.ArrayLike | None
) -> Calibration | None:
    if label_logprob is None or targets is None:
        return None
    return stats.calibration(label_logprob, targets, state)


def _power_warning(intervals: SensitivityIntervals | None, needed: NeededDesign | None) -> list[str]:
    """Say so where the design cannot tell r from 1, and what would."""
    if intervals is None or not intervals.ratio.low <= 1 <= intervals.ratio.high:
        return []
    low, high = intervals.ratio.low, intervals.ratio.high
    remedy = (
        f"r = {needed.ratio:.2f} would need about {needed.num_sets:,} sets x {needed.num_permutations:,} permutations"
        if needed is not None
        else "no practical design would at this estimate"
    )
    return [f"this design cannot tell r from 1 (interval {low:.2f} to {high:.2f}): {remedy}"]
