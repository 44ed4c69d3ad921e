"""What answers can bear, asked before any conclusion is worded: reasons why nothing follows from them, and remedies.

Every kind of study asks the same of its answers: is accuracy told from chance and from always naming the commonest
label; are there labels that are hardly ever answered; are there enough sets, permutations and queries. What a kind
knows beside that, such as an interval that covers all that is possible, it adds (`Bearing.with_reasons`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from iclperm.errors import RequestError
from iclperm.report.parts import listed, percent, plain
from iclperm.stats.classes import Confusion, answered_shares, confusion, effective_items
from iclperm.stats.intervals import POSSIBLE, Interval, bounded, unseen_error, unseen_half, upper_tail
from iclperm.stats.sensitivity import FloatArray, query_weights

if TYPE_CHECKING:
    from iclperm.runs.run import FinishedRun

LEAST_LEVELS = 3
"""Sets, and permutations, from which on something is said of others; two bound nothing (benchmarks/null_studies.py)."""
LEAST_QUERIES = 20
"""Queries of equal weight from which on something is said of others; 20 know an accuracy to ± 22 points at most."""
RARELY = 0.1
"""A label is hardly ever answered where its share of the answers is below this part of its share of the queries."""
_SILENT = 0.5  # of the queries asks for labels that are hardly ever answered: then the rest is no task any more
_LEVEL, _POWER = 0.95, 0.8
_SHOWN_LABELS = 4
_MOST_NEEDED = 10_000
_ROUNDING = 1e-9

About = Literal["accuracy", "labels", "sets", "permutations", "queries", "interval"]


class Reason(NamedTuple):
    """Why nothing can be concluded, and what would suffice."""

    about: About
    words: str
    remedy: str


class ToldFrom(NamedTuple):
    """Whether an accuracy is told from what needs no model."""

    accuracy: Interval
    """Over queries, clustered by query and weighted; the highest of the places that a conclusion speaks of."""
    reference: float
    """Chance, or what always naming the commonest label would have right, whichever is larger."""
    label: str | None
    """That label, where naming it beats chance."""
    is_told: bool
    needed: int | None
    """Distinct queries that would tell an accuracy so high from the reference with 80 % power; None where none would,
    or more than 10,000."""


@dataclass(frozen=True)
class Bearing:
    """What a study's answers can bear: everything, where there is no reason against it."""

    reasons: tuple[Reason, ...] = ()
    cautions: tuple[str, ...] = ()
    """Sentences that belong beside a conclusion that can be drawn."""
    told_from: ToldFrom | None = None
    """None where no chance and no labels are known."""

    @property
    def can_conclude(self) -> bool:
        """Whether there is no reason against it."""
        return not self.reasons

    def told(self, conclusion: Sequence[str]) -> list[str]:
        """A conclusion with what belongs beside it; or that there is none, and what would suffice."""
        if not self.reasons:
            return [*conclusion, *self.cautions]
        remedies = dict.fromkeys(reason.remedy for reason in self.reasons)
        return [
            f"Nothing can be concluded from these answers: {'; '.join(reason.words for reason in self.reasons)}.",
            f"What would suffice: {'; '.join(remedies)}.",
        ]

    def with_reasons(self, reasons: Iterable[Reason]) -> Bearing:
        """With further reasons."""
        return replace(self, reasons=(*self.reasons, *reasons))

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {"can_conclude": self.can_conclude, **plain(self)}


def of_run(
    run: FinishedRun,
    right: npt.ArrayLike | None = None,
    *,
    sets: int | None = None,
    permutations: int | None = None,
    place: int = -1,
    queries: int | None = None,
) -> Bearing:
    """What the test answers of a run can bear.

    Args:
        run: finished.
        right: [N, Q] or [Q] share of right answers to each query, in each of N places that the conclusion speaks of; by
            default over all orderings at one number of shots.
        sets, permutations: of those that the conclusion speaks of others; by default those of the run, and one alone
            is not counted, as nothing is then said of others.
        place: on the K axis, whose answers are looked at.
        queries: how many of the first are looked at, and in ``right``; all unless given.
    """
    test, first = run.splits["test"], slice(queries)
    if right is None:
        right = by_query(test.correct[:, :, place, first], test.state[:, :, place, first])
    gold, answered = None, None
    if run.shared_labels:
        contexts = np.unique(test.context_of[:, :, place], return_counts=True)
        gold, given = test.gold[first], test.context_prediction[:, first]
        split = (given, gold, len(run.labels), test.context_state[:, first], test.weights[first])
        answered = answered_shares(_of_contexts(*split, contexts))
    num_sets, num_permutations = test.context_of.shape[:2]
    found = of_answers(
        right,
        sets=num_sets if sets is None else sets,
        permutations=num_permutations if permutations is None else permutations,
        weights=test.weights[first],
        gold=gold,
        labels=run.shared_labels,
        answered=answered,
        chance=run.chance if run.has_row_choices else None,
    )
    if len(run.shots) == 1:
        return found
    at = f"at k = {run.shots[place]} "  # labels are looked at there alone
    named = (each._replace(words=at + each.words) if each.about == "labels" else each for each in found.reasons)
    return replace(found, reasons=tuple(named))


def of_answers(
    right: npt.ArrayLike | None,
    *,
    sets: int | None = None,
    permutations: int | None = None,
    weights: npt.ArrayLike | None = None,
    gold: npt.ArrayLike | None = None,
    labels: Sequence[str] = (),
    answered: npt.ArrayLike | None = None,
    chance: float | None = None,
) -> Bearing:
    """What answers can bear.

    Args:
        right: [N, Q] or [Q] share of right answers to each query, in each of N places that the conclusion speaks of;
            NaN for a query without an answer. None where only accuracies are known.
        sets, permutations: how many there are, where the conclusion speaks of others; None or 1 where it does not.
        weights: [Q] how often each query counts.
        gold: [Q] index of the right label.
        labels: [L] words, where there are labels.
        answered: [L] share of all answers that name each label.
        chance: accuracy of guessing, where there are no labels that all queries share.

    Raises RequestError on shapes that do not fit. Cost: O(N·Q).
    """
    sizes: dict[Literal["sets", "permutations"], int] = {"sets": sets or 1, "permutations": permutations or 1}
    reasons = [reason for axis, count in sizes.items() if count > 1 for reason in too_few(axis, count)]
    if right is None:
        return Bearing(tuple(reasons))
    places = np.atleast_2d(np.asarray(right, dtype=np.float64))
    weight = query_weights(weights, places.shape[1])
    used = weight * (~np.isnan(places)).any(axis=0)
    effective = float(used.sum() ** 2 / np.sum(used**2)) if used.any() else 0.0
    if effective < LEAST_QUERIES:
        reasons.append(_few_queries(effective, int(np.count_nonzero(used))))
    if chance is not None and used.any():
        found = told_from(places, np.zeros(0), weight, (), chance)
        return Bearing((*reasons, *([] if found.is_told else [_not_told(found)])), told_from=found)
    if not labels or gold is None or not used.any():
        return Bearing(tuple(reasons))
    right_labels = np.asarray(gold)
    if right_labels.shape != weight.shape:
        raise RequestError(f"gold must have shape [{len(weight)}], got {list(right_labels.shape)}")
    share = effective_items(right_labels, len(labels), weight).share
    found, cautions = told_from(places, share, weight, labels, 1 / len(labels)), []
    if not found.is_told:
        caution = _despite_imbalance(places, right_labels, weight, share, found)
        cautions += caution
        if not caution:
            reasons.append(_not_told(found))
    if answered is not None:
        about_labels = _about_labels(np.asarray(answered, dtype=np.float64), share, labels)
        reasons += [line for line in about_labels if isinstance(line, Reason)]
        cautions += [line for line in about_labels if isinstance(line, str)]
    return Bearing(tuple(reasons), tuple(cautions), found)


def by_query(correct: npt.ArrayLike, state: npt.ArrayLike | None = None) -> FloatArray:
    """[Q] mean of the ok answers [..., Q], 0 and 1 or grades, to each query; NaN for a query that none answered."""
    items = np.asarray(correct).reshape(-1, np.shape(correct)[-1])
    if state is None:
        return np.asarray(items.mean(axis=0), dtype=np.float64)
    ok = np.asarray(state).reshape(items.shape) == 0
    credit, count = items.sum(axis=0, where=ok, dtype=np.float64), np.count_nonzero(ok, axis=0)
    return np.asarray(np.divide(credit, count, out=np.full(len(count), math.nan), where=count > 0))


def told_from(
    right: FloatArray, share: FloatArray, weight: FloatArray, labels: Sequence[str], chance: float
) -> ToldFrom:
    """Whether the highest accuracy of N places, right [N, Q], is above chance and above always naming one label, where
    there are labels with a share [L] each.

    Student's interval over queries: weighted, one query one draw however many contexts it met, never narrower than
    where n effective queries are all right (`unseen_half`), and the level of the lower bound shared by the places
    (Bonferroni).
    """
    common = int(np.argmax(share)) if labels else None
    reference = chance if common is None else max(chance, float(share[common]))
    found = [_mean_interval(values, weight, len(right)) for values in right]
    best = max(found, key=lambda one: -math.inf if math.isnan(one.interval.low) else one.interval.low)
    lead = best.interval.estimate - reference
    needed = None
    if lead > _ROUNDING and best.num_queries:
        quantiles = float(special.ndtri((1 + _LEVEL) / 2) + special.ndtri(_POWER))
        size = max(math.ceil(best.num_queries * (quantiles * best.se / lead) ** 2), LEAST_QUERIES)
        needed = size if size <= _MOST_NEEDED else None
    label = None if common is None or share[common] <= chance + _ROUNDING else labels[common]
    interval = bounded(best.interval, "accuracy")
    return ToldFrom(interval, reference, label, bool(best.interval.low > reference), needed)


def covers_everything(low: float, high: float, scale: Literal["accuracy", "difference", "spread"]) -> bool:
    """Whether an interval holds all that is possible, and so says nothing."""
    least, most = POSSIBLE[scale]
    return low <= least + _ROUNDING and high >= most - _ROUNDING


class _MeanInterval(NamedTuple):
    interval: Interval
    se: float
    num_queries: int


def _mean_interval(values: FloatArray, weight: FloatArray, places: int) -> _MeanInterval:
    used = ~np.isnan(values) & (weight > 0)
    num = int(np.count_nonzero(used))
    if num < 2:
        mean = float(values[used][0]) if num else math.nan
        return _MeanInterval(Interval(mean, math.nan, math.nan, _LEVEL), math.nan, num)
    value, share = values[used], weight[used] / weight[used].sum()
    mean, effective = float(share @ value), float(1 / np.sum(share**2))
    se = math.sqrt(num / (num - 1) * float(np.sum((share * (value - mean)) ** 2)))
    level = 1 - (1 - _LEVEL) / places
    half = float(special.stdtrit(max(effective - 1, 1.0), upper_tail(level))) * se
    half, se = max(half, unseen_half(effective, level)), max(se, unseen_error(effective))
    return _MeanInterval(Interval(mean, mean - half, mean + half, _LEVEL), se, num)


def _despite_imbalance(
    places: FloatArray, gold: npt.NDArray[Any], weight: FloatArray, share: FloatArray, found: ToldFrom
) -> list[str]:
    """A caution where accuracy is not above that of the commonest label, yet answers depend on the query all the same.

    Told by balanced accuracy: every label with the same weight, against 1 in so many.
    """
    num_present = int(np.count_nonzero(share))
    if found.label is None or num_present < 2:
        return []
    balanced = weight / share[gold] / num_present
    best = max((_mean_interval(values, balanced, len(places)).interval for values in places), key=lambda one: one.low)
    if not best.low > 1 / num_present:
        return []
    return [
        f"Accuracy is not above what always naming {found.label!r} would have right, {percent(found.reference)}. The "
        f"answers do depend on the query: with every label counting alike {percent(best.estimate)} are right."
    ]


def _not_told(found: ToldFrom) -> Reason:
    low, high = 100 * found.accuracy.low, 100 * found.accuracy.high
    what = "chance" if found.label is None else f"always naming {found.label!r}"
    bounds = "" if math.isnan(low) else f" [{low:.1f} to {high:.1f} for other queries]"
    where = "lies below" if found.accuracy.high < found.reference else "cannot be told from"
    remedy = "a model, a wording or a number of shots with which the task is answered better than that"
    if found.needed is not None:
        remedy = f"at this accuracy about {found.needed:,} distinct queries like these, or {remedy}"
    return Reason(
        "accuracy",
        f"accuracy, {percent(found.accuracy.estimate)}{bounds}, {where} {what}, {percent(found.reference)}",
        remedy,
    )


def too_few(axis: Literal["sets", "permutations"], count: int) -> list[Reason]:
    """A reason where what so many sets, or permutations, say of others is nothing."""
    if count >= LEAST_LEVELS:
        return []
    what = f"{count} {axis} say" if count > 1 else f"one {axis[:-1]} says"
    return [Reason(axis, f"{what} nothing of other {axis}", f"{LEAST_LEVELS} {axis} at least, better 10")]


def _few_queries(effective: float, distinct: int) -> Reason:
    worth = "" if abs(effective - distinct) < _ROUNDING else f" (worth {effective:.1f} that count alike)"
    noun = "query says" if distinct == 1 else "queries say"
    return Reason(
        "queries",
        f"{distinct:,} {noun} too little of others{worth}",
        f"{LEAST_QUERIES} queries that count alike at least; 100 know an accuracy to ± 10 points",
    )


def _about_labels(answered: FloatArray, share: FloatArray, labels: Sequence[str]) -> list[Reason | str]:
    """What is hardly ever answered: a reason where little of the task is left, else a caution."""
    rare = (share > 0) & ~(answered >= RARELY * share)
    if not rare.any() or np.isnan(answered).all():
        return []
    names = [repr(label) for label, is_rare in zip(labels, rare, strict=True) if is_rare]
    shown = [*names[:_SHOWN_LABELS], *([f"{len(names) - _SHOWN_LABELS} more"] if len(names) > _SHOWN_LABELS else [])]
    often = "never" if not answered[rare].any() else "hardly ever"
    parts = percent(float(answered[rare].sum())), percent(float(share[rare].sum()))
    verb = "is" if len(names) == 1 else "are"
    words = f"{listed(shown)} {verb} {often} answered ({parts[0]} of the answers, {parts[1]} of the queries)"
    if share[rare].sum() < _SILENT - _ROUNDING and np.count_nonzero((share > 0) & ~rare) > 1:
        return [f"{words}: what is said holds for the other labels."]
    remedy = "a model, a wording or a number of shots with which every label is answered, or calibration: contextual"
    return [Reason("labels", words, remedy)]


def _of_contexts(
    predictions: npt.NDArray[Any],
    gold: npt.NDArray[np.int64],
    num_labels: int,
    state: npt.NDArray[Any],
    weights: npt.NDArray[Any],
    contexts: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
) -> Confusion:
    """The confusion of some distinct contexts together, each as often as orderings have it."""
    which, times = contexts
    found = confusion(predictions[which], gold, num_labels, state[which], weights)
    return Confusion(*(np.tensordot(times.astype(np.float64), values, axes=1) for values in found))
