"""Answers and accuracies from elsewhere, described by what their axes allow: sentences, tables, figures, JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from iclperm.errors import DataError, RequestError
from iclperm.external.tensor import AXES, Array, Tensor
from iclperm.report import figures
from iclperm.report.figures import curve_plot, heat_map
from iclperm.report.parts import (
    Findings,
    Plot,
    Table,
    interval_words,
    number,
    p_words,
    percent,
    percent_with_bounds,
    plain,
    points_with_bounds,
    spread_in_points,
    with_bounds,
)
from iclperm.stats.components import NestedComponents, VarianceComponents, nested_components
from iclperm.stats.intervals import (
    Interval,
    SensitivityIntervals,
    bounded,
    generalized_interval,
    jackknife_ratio_interval,
    possible,
    side_of,
    skewness_warnings,
    wilson_interval,
)
from iclperm.stats.paired import (
    CochranQ,
    IntraclassCorrelations,
    McNemar,
    PairwiseTests,
    cochran_q,
    intraclass_correlations,
    mcnemar,
    pairwise_mcnemar,
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
    usable_queries,
)
from iclperm.studies.bearing import Bearing, by_query, of_answers
from iclperm.studies.sensitivity import Sensitivity, curve_table
from iclperm.studies.sensitivity_conclusion import interval_reasons
from iclperm.studies.sensitivity_over_shots import sensitivity_over_shots
from iclperm.studies.sensitivity_summary import sensitivity_summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_PAIRED = 60  # contexts that are tested pair by pair
_MOST_DRAWN = 40  # contexts in one figure
_MOST_ROWS = 20  # of pairs in a table
_NAME_LETTERS = 36
_ESTIMATORS: tuple[Estimator, ...] = ("mean_std", "rms", "c4")


def describe(tensor: Tensor) -> Description:
    """Every estimator that the axes of `tensor` allow, as findings: sentences, tables, figures, JSON.

    SP: order and selection sensitivity, r and its intervals; SPQ: also variance components, effects free of item noise
    and intraclass correlations; SPKQ: also the curve and r over k; CQ: Wilson intervals, McNemar's test of two contexts
    or Cochran's Q and all pairs (Holm). Raises RequestError for other axes, DataError where no query is left.
    """
    notes = list(tensor.notes)
    if "K" in tensor.axes and not tensor.shots:
        notes.append(f"the numbers of shots are not known: taken as 0 to {tensor.values.shape[2] - 1}")
    if tensor.axes == "CQ":
        parts: list[Findings] = [contexts(tensor.values, tensor.state, tensor.names)]
        if tensor.weights is not None:
            notes.append("weights are left out here: tests of contexts count every distinct query once")
    elif tensor.axes in ("SP", "SPK"):
        parts = _of_accuracies(tensor)
    elif tensor.axes in ("SPQ", "SPKQ"):
        parts = _of_answers(tensor)
    else:
        raise RequestError(f"axes must be SP, SPK, SPQ, SPKQ or CQ, got {tensor.axes!r}")
    return Description(tensor.title, tensor.axes, tensor.values.shape, tuple(parts), tuple(notes))


@dataclass(frozen=True)
class Description:
    """What a file says (see `iclperm.report.parts.Findings`)."""

    title: str
    axes: str
    shape: tuple[int, ...]
    parts: tuple[Findings, ...]
    notes: tuple[str, ...] = ()

    @property
    def warnings(self) -> Sequence[str]:
        """What should be known before the numbers are believed."""
        return [*self.notes, *(line for part in self.parts for line in part.warnings)]

    def conclusion(self) -> list[str]:
        """The result in plain sentences, after what was read."""
        sizes = " x ".join(
            f"{size:,} {AXES[axis]}{'' if size == 1 or axis == 'K' else 's'}".replace("querys", "queries")
            for axis, size in zip(self.axes, self.shape, strict=True)
        )
        return [f"{self.title}: {sizes}.", *(line for part in self.parts for line in part.conclusion())]

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
            content |= part.to_dict()
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
class Contexts:
    """C contexts that answered the same queries."""

    names: tuple[str, ...]
    accuracy: tuple[Interval, ...]
    """With Wilson's interval, over the queries that every context answered, each once."""
    num_queries: int
    dropped: float
    """Share of the queries that some context did not answer."""
    pair: McNemar | None
    """Of two contexts."""
    cochran: CochranQ | None
    """Of three or more."""
    pairs: PairwiseTests | None
    """Of 3 to 60."""

    @property
    def warnings(self) -> Sequence[str]:
        """See `Findings`."""
        lines = []
        if self.dropped:
            lines.append(f"{self.dropped:.1%} of the queries are left out: some context has no answer to them")
        if self.cochran is not None and 0 < len(self.names) * self.cochran.num_informative < 24:
            lines.append(
                f"only {self.cochran.num_informative} queries tell the contexts apart: Cochran's p-value is rough"
            )
        if len(self.names) > _MOST_PAIRED:
            lines.append(f"{len(self.names):,} contexts are too many to test pair by pair (the most is {_MOST_PAIRED})")
        return lines

    def conclusion(self) -> list[str]:
        """See `Findings`."""
        if self.pair is not None:
            return [_pair_words(self.names, self.pair)]
        if self.cochran is None:
            share = self.accuracy[0]
            return [
                f"Accuracy is {percent_with_bounds(share)} over {self.num_queries:,} queries (95 % Wilson interval)."
            ]
        best, worst = (pick(range(len(self.names)), key=self._estimate) for pick in (max, min))
        differ = self.cochran.p_value < 0.05
        lines = [
            f"Accuracy runs from {percent(self._estimate(worst))} ({self.names[worst]}) to "
            f"{percent(self._estimate(best))} ({self.names[best]}) over {self.num_queries:,} queries.",
            f"Cochran's Q = {self.cochran.statistic:.1f} on {self.cochran.degrees} degrees of freedom, "
            f"{p_words(self.cochran.p_value)}: the contexts "
            + ("differ." if differ else "cannot be told apart, which does not prove them equal."),
        ]
        if self.pairs is not None:
            num = int(np.count_nonzero(self.pairs.adjusted < 0.05))
            lines.append(
                f"Of {len(self.pairs.adjusted):,} pairs {num:,} differ at 5 % for all of them together (McNemar mid-p, "
                "Holm)."
            )
        return lines

    def tables(self, full: bool) -> list[Table]:
        """See `Findings`."""
        order = sorted(range(len(self.names)), key=self._estimate, reverse=True)
        shown = order if full else order[:_MOST_ROWS]
        rows = [(self.names[i], number(self._estimate(i)), interval_words(self.accuracy[i])) for i in shown]
        caption = "" if len(shown) == len(order) else f"The best {len(shown)} of {len(order):,}."
        tables = [Table("Accuracy by context", ("context", "accuracy", "95 % Wilson interval"), rows, caption=caption)]
        if self.pairs is not None:
            tables.append(self._pair_table(self.pairs))
        if self.pair is not None:
            tables.append(_mcnemar_table(self.names, self.pair))
        return tables

    def _pair_table(self, pairs: PairwiseTests) -> Table:
        order = np.argsort(pairs.p_mid, kind="stable")[:_MOST_ROWS]
        rows = [
            (
                f"{self.names[pairs.first[i]]} - {self.names[pairs.second[i]]}",
                f"{pairs.difference[i]:+.4f}",
                *map(number, (pairs.se[i], pairs.p_mid[i], pairs.adjusted[i])),
            )
            for i in order
        ]
        caption = f"The {len(order)} pairs with the lowest p of {len(pairs.p_mid):,}; Holm adjusts for all of them."
        return Table("Differences", ("pair", "difference", "se", "mid-p", "Holm"), rows, caption=caption)

    def plots(self) -> dict[str, Plot]:
        """Accuracy of every context with its interval; none for one or for more than 40."""
        if not 2 <= len(self.names) <= _MOST_DRAWN:
            return {}
        return {"contexts": Plot((6.4, 1.3 + 0.22 * len(self.names)), self._draw)}

    def _draw(self, figure: Figure) -> None:
        order = sorted(range(len(self.names)), key=self._estimate)
        height = figure.get_figheight()
        axes = figure.add_axes((0.4, 0.5 / height, 0.57, 1 - 1.1 / height))
        values = np.array([self.accuracy[i][:3] for i in order])
        places = np.arange(len(order))
        axes.hlines(places, values[:, 1], values[:, 2], color=figures.GREY, linewidth=1.2)
        axes.plot(values[:, 0], places, "o", color=figures.BLUE, markersize=4)
        axes.set_yticks(places, [_short(self.names[i]) for i in order])
        axes.set(xlabel="accuracy", ylim=(-0.6, len(order) - 0.4))
        figures.plain_frame(axes)
        figures.head(figure, "Accuracy by context", f"{self.num_queries:,} queries; bars: 95 % Wilson intervals")

    def to_dict(self) -> dict[str, Any]:
        """See `Findings`."""
        return {
            "contexts": [
                {"name": name, "accuracy": plain(share)} for name, share in zip(self.names, self.accuracy, strict=True)
            ],
            "num_queries": self.num_queries,
            "dropped": self.dropped,
            "mcnemar": plain(self.pair),
            "cochran_q": plain(self.cochran),
            "pairs": plain(self.pairs),
        }

    def _estimate(self, index: int) -> float:
        return self.accuracy[index].estimate


@dataclass(frozen=True)
class Correlations:
    """How alike two answers are that share something, and the components where every set has its own permutations."""

    correlations: IntraclassCorrelations
    nested: NestedComponents
    warnings: Sequence[str] = ()

    @classmethod
    def of(cls, correct: Array, state: Array | None, components: VarianceComponents) -> Correlations:
        """Of correct [S, P, Q] with its state."""
        return cls(intraclass_correlations(components), nested_components(correct, state))

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


def contexts(correct: npt.ArrayLike, state: npt.ArrayLike | None = None, names: Sequence[str] = ()) -> Contexts:
    """What can be said of answers [C, Q] of contexts; raises RequestError on another shape, DataError where no query
    was answered by all."""
    items = np.asarray(correct)
    if items.ndim != 2 or not items.size:
        raise RequestError(f"contexts need correct of shape [C, Q], got {list(items.shape)}")
    usable = usable_queries(items.shape, state)
    num_queries = int(np.count_nonzero(usable))
    if not num_queries:
        raise DataError("no query was answered in every context; give fewer contexts")
    right = np.count_nonzero(items[:, usable], axis=1)
    num = len(items)
    kept = items[:, usable]
    return Contexts(
        names=tuple(names) or tuple(f"context {i}" for i in range(num)),
        accuracy=tuple(wilson_interval(int(count), num_queries) for count in right),
        num_queries=num_queries,
        dropped=1 - num_queries / items.shape[1],
        pair=mcnemar(*kept) if num == 2 else None,
        cochran=cochran_q(kept) if num >= 3 else None,
        pairs=pairwise_mcnemar(kept) if 3 <= num <= _MOST_PAIRED else None,
    )


def _of_accuracies(tensor: Tensor) -> list[Findings]:
    if tensor.axes == "SP":
        return [accuracy_findings(tensor.values)]
    shots = tensor.shots or tuple(range(tensor.values.shape[2]))
    return [accuracy_findings(tensor.values[..., -1]), CurveOfAccuracies(tensor.values, shots)]


def _of_answers(tensor: Tensor) -> list[Findings]:
    correct, state, weights = tensor.values, tensor.state, tensor.weights
    over_shots = along = None
    shots = tensor.shots
    if tensor.axes == "SPKQ":
        shots = shots or tuple(range(correct.shape[2]))
        if len(shots) > 1:
            along = curve(correct, state, weights)
        if sum(k > 0 for k in shots) > 1 and along is not None and along.num_queries:
            over_shots = sensitivity_over_shots(correct, state, shots=shots, weights=weights)
        correct, state = correct[:, :, -1], None if state is None else state[:, :, -1]
    summary = sensitivity_summary(correct, state=state, weights=weights)
    sizes = {"sets": correct.shape[0], "permutations": correct.shape[1]}
    bearing = of_answers(by_query(correct, state), **sizes, weights=weights).with_reasons(interval_reasons(summary))
    parts: list[Findings] = [Sensitivity(summary, shots, along, over_shots, title=tensor.title, bearing=bearing)]
    if summary.components is not None:
        parts.append(Correlations.of(correct, state, summary.components))
    return parts


def _pair_words(names: Sequence[str], pair: McNemar) -> str:
    low, high = (pair.difference + sign * 1.96 * pair.se for sign in (-1, 1))
    found = bounded(Interval(pair.difference, low, high, 0.95), "difference")
    verdict = "the two differ" if pair.p_mid < 0.05 else "they cannot be told apart, which does not prove them equal"
    return (
        f"{names[0]} against {names[1]}: {points_with_bounds(found, unit=' points of accuracy')}, "
        f"{pair.only_first:,} queries against {pair.only_second:,} of {pair.num_queries:,} (McNemar mid-p, "
        f"{p_words(pair.p_mid)}): {verdict}."
    )


def _mcnemar_table(names: Sequence[str], pair: McNemar) -> Table:
    rows = [
        ("only the first is right", f"{pair.only_first:,}"),
        ("only the second is right", f"{pair.only_second:,}"),
        ("difference in accuracy", f"{pair.difference:+.4f}"),
        ("paired standard error", number(pair.se)),
        ("McNemar, exact p", number(pair.p_exact)),
        ("McNemar, mid-p", number(pair.p_mid)),
    ]
    return Table(f"{names[0]} against {names[1]}", ("", ""), rows)


def _short(name: str) -> str:
    """The end of a long name, by which files differ, for a figure."""
    short = name if len(name) <= _NAME_LETTERS else "…" + name[1 - _NAME_LETTERS :]
    return short.replace("$", r"\$")  # no mathematics
