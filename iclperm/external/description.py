"""Answers and accuracies from elsewhere, described by what their axes allow: sentences, tables, figures, JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from iclperm.errors import RequestError
from iclperm.external.compared_contexts import contexts
from iclperm.external.tensor import AXES, Tensor
from iclperm.external.unanswered import without_unanswered
from iclperm.report.figures import curve_plot, heat_map
from iclperm.report.parts import (
    Findings,
    Plot,
    Table,
    interval_words,
    number,
    percent,
    plain,
    spread_in_points,
    with_bounds,
)
from iclperm.stats.components import NestedComponents, VarianceComponents, nested_components
from iclperm.stats.intervals import (
    Interval,
    SensitivityIntervals,
    generalized_interval,
    jackknife_ratio_interval,
    possible,
    side_of,
    skewness_warnings,
)
from iclperm.stats.paired import (
    IntraclassCorrelations,
    intraclass_correlations,
)
from iclperm.stats.sensitivity import (
    Accuracy,
    Curve,
    Estimator,
    FloatArray,
    accuracy_matrix,
    curve,
    curve_from_accuracy,
    order_sensitivity,
    selection_sensitivity,
    sensitivity_ratio,
)
from iclperm.studies.bearing import Bearing, by_query, of_answers
from iclperm.studies.classes import ASIDE as CLASSES
from iclperm.studies.classes import AnswersByLabel, are_by_design, contexts_by_label
from iclperm.studies.missing import Missing, missing_of
from iclperm.studies.sensitivity import Sensitivity, curve_table
from iclperm.studies.sensitivity_conclusion import interval_reasons
from iclperm.studies.sensitivity_latent import sensitivity_latent
from iclperm.studies.sensitivity_over_shots import sensitivity_over_shots
from iclperm.studies.sensitivity_summary import sensitivity_summary

_ESTIMATORS: tuple[Estimator, ...] = ("mean_std", "rms", "c4")
_MOST_CLASSES = 20


def describe(tensor: Tensor) -> Description:
    """Every estimator that the axes of `tensor` allow, as findings: sentences, tables, figures, JSON.

    SP: order and selection sensitivity, r and its intervals; SPQ: also variance components, effects free of item noise
    and intraclass correlations; SPKQ: also the curve and r over k; CQ: Wilson intervals, McNemar's test of two contexts
    or Cochran's Q and all pairs (Holm), and recall, F1 and confusion where a sample log says which label was answered.
    A set or permutation of which an ordering has no answer is left out, with a note. Raises RequestError for other
    axes, DataError where no query is left.
    """
    tensor = without_unanswered(tensor)
    notes = list(tensor.notes)
    if "K" in tensor.axes and not tensor.shots:
        notes.append(f"the numbers of shots are not known: taken as 0 to {tensor.values.shape[2] - 1}")
    if tensor.axes == "CQ":
        parts: list[Findings] = [contexts(tensor.values, tensor.state, tensor.names, tensor.weights)]
    elif tensor.axes in ("SP", "SPK"):
        parts = _of_accuracies(tensor)
    elif tensor.axes in ("SPQ", "SPKQ"):
        parts = _of_answers(tensor)
    else:
        raise RequestError(f"axes must be SP, SPK, SPQ, SPKQ or CQ, got {tensor.axes!r}")
    if tensor.by_label is not None:
        parts.append(contexts_by_label(*tensor.by_label, state=tensor.state, contexts=tensor.names))
    missing = missing_of(tensor.state, tensor.weights)
    return Description(tensor.title, tensor.axes, tensor.values.shape, tuple(parts), tuple(notes), missing)


@dataclass(frozen=True)
class Description:
    """What a file says (see `iclperm.report.parts.Findings`)."""

    title: str
    axes: str
    shape: tuple[int, ...]
    parts: tuple[Findings, ...]
    notes: tuple[str, ...] = ()
    missing: Missing = field(default_factory=partial(missing_of, None))

    @property
    def warnings(self) -> Sequence[str]:
        """What should be known before the numbers are believed."""
        return [*self.notes, *(line for part in self.parts for line in part.warnings)]

    def conclusion(self) -> list[str]:
        """The result in plain sentences, after what was read; where many answers are missing, that comes first."""
        first = self.missing.first_line()
        sizes = " x ".join(
            f"{size:,} {AXES[axis]}{'' if size == 1 or axis == 'K' else 's'}".replace("querys", "queries")
            for axis, size in zip(self.axes, self.shape, strict=True)
        )
        found = (line for part in self.parts for line in part.conclusion())
        return [*([first] if first else []), f"{self.title}: {sizes}.", *found]

    def tables(self, full: bool) -> list[Table]:
        """Most important first."""
        return [table for part in self.parts for table in part.tables(full)]

    def plots(self) -> dict[str, Plot]:
        """By the stem of the file."""
        return {stem: plot for part in self.parts for stem, plot in part.plots().items()}

    def to_dict(self) -> dict[str, Any]:
        """Every number that is shown, JSON-safe."""
        content: dict[str, Any] = {"title": self.title, "axes": self.axes, "shape": list(self.shape)}
        for part in self.parts:
            content |= {CLASSES: part.to_dict()} if isinstance(part, AnswersByLabel) else part.to_dict()
        content["missing"] = plain(self.missing)
        return {**content, "warnings": list(self.warnings), "conclusion": self.conclusion()}


@dataclass(frozen=True)
class AccuracyMatrix:
    """Order and selection sensitivity of accuracies [S, P] without their answers: item noise stays in all of them."""

    accuracy: FloatArray
    """[S, P]"""
    spreads: Mapping[str, tuple[float, float, float]]
    """Order, selection and r under each estimator; NaN where undefined."""
    intervals: SensitivityIntervals | None
    """Generalised (RMS); None for S = 1 or P = 1."""
    jackknife: Interval | None
    """Of r as printed; None below three sets or permutations."""
    warnings: tuple[str, ...]

    @property
    def bearing(self) -> Bearing:
        """What the accuracies can bear."""
        return of_answers(None, sets=len(self.accuracy), permutations=self.accuracy.shape[1])

    def conclusion(self) -> list[str]:
        """See `Findings`."""
        order, selection, _ = self.spreads["mean_std"]
        lines = [
            f"Another order of the same demonstrations moves accuracy by {spread_in_points(order)}, another choice of "
            f"demonstrations by {spread_in_points(selection)} (one standard deviation, item noise included: without "
            "the answers it cannot be told apart)."
        ]
        quoted = self.jackknife if self.jackknife is not None else self.intervals and self.intervals.ratio
        if quoted is not None and not math.isnan(quoted.low):
            name = "jackknife" if quoted is self.jackknife else "generalised"
            side = "can be told from 1" if side_of(quoted, 1) else "cannot be told from 1"
            lines.append(f"r = choice / order = {with_bounds(quoted)} ({name}) {side}; item noise pulls it towards 1.")
        return self.bearing.told(lines)

    def tables(self, full: bool) -> list[Table]:
        """See `Findings`."""
        ends = {"mean_std": self.jackknife, "rms": self.intervals and self.intervals.ratio}
        rows = [
            (name, *map(number, values), "-" if (end := ends.get(name)) is None else interval_words(end))
            for name, values in self.spreads.items()
        ]
        mean = Table(
            "Accuracy",
            ("", ""),
            [
                ("mean", number(float(self.accuracy.mean()))),
                ("lowest cell", number(float(self.accuracy.min()))),
                ("highest cell", number(float(self.accuracy.max()))),
            ],
        )
        caption = "mean_std as printed in arXiv 2511.09700, with the jackknife interval; rms with the generalised one."
        header = ("estimator", "order", "selection", "r", "95 % interval of r")
        return [Table("Order against selection", header, rows, caption=caption), mean]

    def plots(self) -> dict[str, Plot]:
        """See `Findings`."""
        return {"heatmap": heat_map(self.accuracy, ratio=self.jackknife)}

    def to_dict(self) -> dict[str, Any]:
        """See `Findings`."""
        spreads = {
            name: dict(zip(("order", "selection", "ratio"), values, strict=True))
            for name, values in self.spreads.items()
        }
        return {
            "accuracy": plain(self.accuracy),
            "spreads": plain(spreads),
            "intervals": None if self.intervals is None else plain(possible(self.intervals)),
            "jackknife": plain(self.jackknife),
            "bearing": self.bearing.to_dict(),
        }


@dataclass(frozen=True)
class Correlations:
    """How alike two answers are that share something, and the components where every set has its own permutations."""

    correlations: IntraclassCorrelations
    nested: NestedComponents
    warnings: Sequence[str] = ()

    @classmethod
    def of(cls, components: VarianceComponents, nested: NestedComponents) -> Correlations:
        """Of the crossed and the nested components of the same answers."""
        return cls(intraclass_correlations(components), nested)

    def conclusion(self) -> list[str]:
        """Nothing: they stand beside the result."""
        return []

    def tables(self, full: bool) -> list[Table]:
        """See `Findings`."""
        if not full:
            return []
        rows = [(name.replace("_", " "), number(value)) for name, value in self.correlations._asdict().items()]
        alone = (
            f"If every set drew its own permutations: order {100 * self.nested.order_effect:.2f} points, sets "
            f"{100 * self.nested.selection_effect:.2f} points, free of item noise; sigma_P and sigma_SP cannot be told "
            "apart then."
        )
        return [Table("Correlation of two answers that share", ("", "correlation"), rows, caption=alone)]

    def plots(self) -> dict[str, Plot]:
        """None."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        """See `Findings`."""
        effects = {"order_effect": self.nested.order_effect, "selection_effect": self.nested.selection_effect}
        return {"intraclass_correlations": plain(self.correlations), "nested": {**plain(self.nested), **effects}}


@dataclass(frozen=True)
class CurveOfAccuracies:
    """The curve of accuracies [S, P, K] without their answers."""

    values: FloatArray
    shots: tuple[int, ...]
    warnings: Sequence[str] = ()

    def conclusion(self) -> list[str]:
        """See `Findings`."""
        mean = self.values.mean(axis=(0, 1))
        best = int(mean.argmax())
        return [
            f"Mean accuracy goes from {percent(mean[0])} at k = {self.shots[0]} to {percent(mean[-1])} at "
            f"k = {self.shots[-1]}; it is highest at k = {self.shots[best]}, {percent(mean[best])}."
        ]

    def tables(self, full: bool) -> list[Table]:
        """See `Findings`."""
        return [curve_table(self._curve, self.shots)]

    def plots(self) -> dict[str, Plot]:
        """See `Findings`."""
        return {"curve": curve_plot(self._curve, self.shots)}

    @property
    def _curve(self) -> Curve:
        return curve_from_accuracy(Accuracy(self.values, 0.0, 0))

    def to_dict(self) -> dict[str, Any]:
        """See `Findings`."""
        found = self._curve
        return {
            "curve": {"shots": list(self.shots), **{name: plain(getattr(found, name)) for name in found._fields[:3]}}
        }


def accuracy_findings(accuracy: npt.ArrayLike) -> AccuracyMatrix:
    """What can be said of accuracies [S, P] alone; raises RequestError on another shape or a NaN."""
    matrix = accuracy_matrix(accuracy)
    return AccuracyMatrix(
        accuracy=matrix,
        spreads={
            name: (
                order_sensitivity(matrix, name),
                selection_sensitivity(matrix, name),
                sensitivity_ratio(matrix, name),
            )
            for name in _ESTIMATORS
        },
        intervals=generalized_interval(matrix) if min(matrix.shape) >= 2 else None,
        jackknife=jackknife_ratio_interval(matrix) if min(matrix.shape) >= 3 else None,
        warnings=tuple(skewness_warnings(matrix)),
    )


def _of_accuracies(tensor: Tensor) -> list[Findings]:
    if tensor.axes == "SP":
        return [accuracy_findings(tensor.values)]
    shots = tensor.shots or tuple(range(tensor.values.shape[2]))
    return [accuracy_findings(tensor.values[..., -1]), CurveOfAccuracies(tensor.values, shots)]


def _of_answers(tensor: Tensor) -> list[Findings]:
    correct, state, weights = tensor.values, tensor.state, tensor.weights
    labels, gold = _labels(() if tensor.is_graded else tensor.classes)
    classes = tensor.classes if labels and are_by_design(tensor.classes, weights) else None
    over_shots = along = None
    shots = tensor.shots
    if tensor.axes == "SPKQ":
        shots = shots or tuple(range(correct.shape[2]))
        if len(shots) > 1:
            along = curve(correct, state, weights)
        if sum(k > 0 for k in shots) > 1 and along is not None and along.num_queries:
            over_shots = sensitivity_over_shots(correct, state, shots=shots, weights=weights, classes=classes)
        correct, state = correct[:, :, -1], None if state is None else state[:, :, -1]
    summary = sensitivity_summary(correct, state=state, weights=weights, classes=classes)
    sizes = {"sets": correct.shape[0], "permutations": correct.shape[1]}
    bearing = of_answers(by_query(correct, state), **sizes, weights=weights, gold=gold, labels=labels)
    bearing = bearing.with_reasons(interval_reasons(summary))
    latent = partial(sensitivity_latent, correct, state, weights=weights)
    parts: list[Findings] = [
        Sensitivity(summary, shots, along, over_shots, title=tensor.title, fit_latent=latent, bearing=bearing)
    ]
    if summary.components is not None:
        nested = nested_components(correct, state, weights=weights, classes=classes)
        parts.append(Correlations.of(summary.components, nested))
    return parts


def _labels(classes: tuple[str, ...]) -> tuple[tuple[str, ...], npt.NDArray[np.int64] | None]:
    """Labels, and [Q] that of each query; none where so many differ that they are free answers."""
    names, gold = np.unique(np.array(classes, dtype=np.str_), return_inverse=True)
    if not 1 < len(names) <= min(_MOST_CLASSES, len(classes) // 2):
        return (), None
    return tuple(map(str, names)), gold.astype(np.int64)
