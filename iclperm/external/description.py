"""Answers and accuracies from elsewhere: read from files, and described by what their axes allow.

Arrays (.npy, .npz), tables (.csv, .parquet, .jsonl as `iclperm export` writes them, or a plain matrix) and the sample
logs of lm-evaluation-harness. Nothing is unpickled, and what would not fit in memory is refused.
"""

from __future__ import annotations

import csv
import json
import math
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from iclperm.errors import DataError, RequestError, printable
from iclperm.stats.components import NestedComponents, VarianceComponents, nested_components
from iclperm.stats.intervals import (
    Interval,
    SensitivityIntervals,
    generalized_interval,
    jackknife_ratio_interval,
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
from iclperm.stats.tensor import mapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from iclperm.studies.findings import Findings, Plot, Table

MOST_BYTES = 4 << 30
"""Of a file, and of an array made of one."""
_MOST_FILES = 10_000
_MOST_PAIRED = 60  # contexts that are tested pair by pair
_MOST_DRAWN = 40  # contexts in one figure
_MOST_ROWS = 20  # of pairs in a table
_NAME_LETTERS = 36
_LETTERS = {"S": "set", "P": "permutation", "K": "shots", "Q": "query", "C": "context"}
_METRICS = ("acc", "exact_match", "em", "acc_norm")  # of a sample log, the first that it has
_ESTIMATORS: tuple[Estimator, ...] = ("mean_std", "rms", "c4")
_MISSING = 1  # the state of an answer that is not there

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Tensor:
    """An array whose axes have names."""

    values: Array
    """uint8 0 or 1 where the axes end in Q, else float64 accuracies in 0..1."""
    axes: str
    """SP or SPK (accuracies), SPQ or SPKQ (answers), CQ (answers of C contexts); each letter is an axis."""
    state: npt.NDArray[np.uint8] | None = None
    """Of answers, 0 = there; None where all are."""
    weights: npt.NDArray[np.int64] | None = None
    """[Q] how often each query counts; None for once."""
    shots: tuple[int, ...] = ()
    """[K] numbers of demonstrations; empty where not known."""
    names: tuple[str, ...] = ()
    """[C] names of the contexts."""
    title: str = ""
    notes: tuple[str, ...] = ()
    """What should be known of how it was read."""


def load(paths: str | Path | Sequence[str | Path], axes: str | None = None) -> Tensor:
    """Reads answers or accuracies; what the axes of an array mean follows from its shape unless `axes` says it.

    Args:
        paths: a .npy, .npz, .csv, .parquet or .jsonl file. Several files, or a folder, of sample logs
            (`samples_*.jsonl`) of one task are contexts that answered the same documents; so are several files of one
            row of answers each.
        axes: a letter for each axis of an array or matrix, of S sets, P permutations, K shots, Q queries, C contexts,
            such as SPQ. By default one axis is Q, two are SP, or CQ where all is 0 or 1, three SPQ, four SPKQ. Tables
            with the columns query and correct, and any of set, permutation, shots, context, split, state and weight,
            name their own.

    Of several splits `test` is read. Raises DataError for what cannot be read, holds other values than 0 and 1 (or
    accuracies outside 0..1), or is larger than `MOST_BYTES`; RequestError for `axes` that do not fit.
    """
    files = _files([paths] if isinstance(paths, str | Path) else paths)
    tensors = [tensor for file in files for tensor in _read(file, axes)] if len(files) == 1 else None
    if tensors is not None and len(tensors) == 1:
        return tensors[0]
    parts = tensors or [tensor for file in files for tensor in _read(file, axes)]
    wrong = next((part for part in parts if part.axes != "CQ"), None)
    if wrong is not None:
        raise DataError(
            f"{wrong.title} has the axes {wrong.axes}: only contexts, CQ, can be put together; give one file"
        )
    return _together(parts)


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
    """What a file says (see `iclperm.studies.findings.Findings`)."""

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
            f"{size:,} {_LETTERS[axis]}{'' if size == 1 or axis == 'K' else 's'}".replace("querys", "queries")
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

    def conclusion(self) -> list[str]:
        """See `Findings`."""
        order, selection, _ = self.spreads["mean_std"]
        lines = [
            f"Another order of the same demonstrations moves accuracy by {_points(order)}, another choice of "
            f"demonstrations by {_points(selection)} (one standard deviation, item noise included: without the answers "
            "it cannot be told apart)."
        ]
        quoted = self.jackknife if self.jackknife is not None else self.intervals and self.intervals.ratio
        if quoted is not None and not math.isnan(quoted.low):
            name = "jackknife" if quoted is self.jackknife else "generalised"
            side = "can be told from 1" if quoted.low > 1 or quoted.high < 1 else "cannot be told from 1"
            lines.append(
                f"r = choice / order = {quoted.estimate:.2f} [{quoted.low:.2f} to {quoted.high:.2f}] ({name}) {side}; "
                "item noise pulls it towards 1."
            )
        return lines

    def tables(self, full: bool) -> list[Table]:
        """See `Findings`."""
        from iclperm.studies.findings import Table, interval_words, number

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
        from iclperm.report.figures import heat_map

        return {"heatmap": heat_map(self.accuracy, ratio=self.jackknife)}

    def to_dict(self) -> dict[str, Any]:
        """See `Findings`."""
        from iclperm.studies.findings import plain

        spreads = {
            name: dict(zip(("order", "selection", "ratio"), values, strict=True))
            for name, values in self.spreads.items()
        }
        return {
            "accuracy": plain(self.accuracy),
            "spreads": plain(spreads),
            "intervals": plain(self.intervals),
            "jackknife": plain(self.jackknife),
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
                f"Accuracy is {100 * share.estimate:.1f} % [{100 * share.low:.1f} to {100 * share.high:.1f}] over "
                f"{self.num_queries:,} queries (95 % Wilson interval)."
            ]
        best, worst = (pick(range(len(self.names)), key=self._estimate) for pick in (max, min))
        differ = self.cochran.p_value < 0.05
        lines = [
            f"Accuracy runs from {100 * self._estimate(worst):.1f} % ({self.names[worst]}) to "
            f"{100 * self._estimate(best):.1f} % ({self.names[best]}) over {self.num_queries:,} queries.",
            f"Cochran's Q = {self.cochran.statistic:.1f} on {self.cochran.degrees} degrees of freedom, "
            f"{_p_words(self.cochran.p_value)}: the contexts "
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
        from iclperm.studies.findings import Table, interval_words, number

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
        from iclperm.studies.findings import Table, number

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
        from iclperm.studies.findings import Plot

        if not 2 <= len(self.names) <= _MOST_DRAWN:
            return {}
        return {"contexts": Plot((6.4, 1.3 + 0.22 * len(self.names)), self._draw)}

    def _draw(self, figure: Figure) -> None:
        from iclperm.report import figures

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
        from iclperm.studies.findings import plain

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
        from iclperm.studies.findings import Table, number

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
        from iclperm.studies.findings import plain

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
            f"Mean accuracy goes from {100 * mean[0]:.1f} % at k = {self.shots[0]} to {100 * mean[-1]:.1f} % at "
            f"k = {self.shots[-1]}; it is highest at k = {self.shots[best]}, {100 * mean[best]:.1f} %."
        ]

    def tables(self, full: bool) -> list[Table]:
        """See `Findings`."""
        from iclperm.report.tables import curve_table

        return [curve_table(curve_from_accuracy(Accuracy(self.values, 0.0, 0)), self.shots)]

    def plots(self) -> dict[str, Plot]:
        """See `Findings`."""
        from iclperm.report.figures import curve_plot

        return {"curve": curve_plot(curve_from_accuracy(Accuracy(self.values, 0.0, 0)), self.shots)}

    def to_dict(self) -> dict[str, Any]:
        """See `Findings`."""
        from iclperm.studies.findings import plain

        found = curve_from_accuracy(Accuracy(self.values, 0.0, 0))
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
    from iclperm.studies.sensitivity import Sensitivity, sensitivity_over_shots, sensitivity_summary

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
    parts: list[Findings] = [Sensitivity(summary, shots, along, over_shots, title=tensor.title)]
    if summary.components is not None:
        parts.append(Correlations.of(correct, state, summary.components))
    return parts


def _points(size: float) -> str:
    return "an unknown amount, as there is only one" if math.isnan(size) else f"about ±{100 * size:.1f} points"


def _p_words(p_value: float) -> str:
    return "p < 0.0001" if p_value < 0.0001 else f"p = {p_value:.4f}"


def _pair_words(names: Sequence[str], pair: McNemar) -> str:
    half = 1.96 * pair.se
    low, high = (100 * (pair.difference + sign * half) for sign in (-1, 1))
    verdict = "the two differ" if pair.p_mid < 0.05 else "they cannot be told apart, which does not prove them equal"
    return (
        f"{names[0]} against {names[1]}: {100 * pair.difference:+.1f} points of accuracy [{low:+.1f} to {high:+.1f}], "
        f"{pair.only_first:,} queries against {pair.only_second:,} of {pair.num_queries:,} (McNemar mid-p, "
        f"{_p_words(pair.p_mid)}): {verdict}."
    )


def _mcnemar_table(names: Sequence[str], pair: McNemar) -> Table:
    from iclperm.studies.findings import Table, number

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
    """The end of a long name, which tells files apart, for a figure."""
    short = name if len(name) <= _NAME_LETTERS else "…" + name[1 - _NAME_LETTERS :]
    return short.replace("$", r"\$")  # no mathematics


def _files(paths: Sequence[str | Path]) -> list[Path]:
    """The files themselves and, of folders, their sample logs; the size of each is checked."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            if (path / "FORMAT").is_file():
                raise DataError(
                    f"{path} is a run; iclperm report shows its statistics, iclperm export writes its answers"
                )
            logs = sorted(path.rglob("samples_*.jsonl"))
            if not logs:
                raise DataError(f"{path} holds no samples_*.jsonl; name a file, or a folder of sample logs")
            found += logs
        else:
            found.append(path)
    if not found:
        raise RequestError("name at least one file")
    if len(found) > _MOST_FILES:
        raise DataError(f"{len(found):,} files are too many (the most is {_MOST_FILES:,}); name fewer")
    for path in found:
        try:
            size = path.stat().st_size
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
        _refuse_bytes(size, str(path))
    return found


def _refuse_bytes(size: int, name: str) -> None:
    if size > MOST_BYTES:
        raise DataError(
            f"{name} takes {size / 2**30:.1f} GB, the most is {MOST_BYTES / 2**30:.0f} GB; "
            "iclperm.stats.tensor.tensor_sums reads .npy files of any size"
        )


def _read(path: Path, axes: str | None) -> list[Tensor]:
    """One tensor; of a sample log one for each of its filters."""
    readers = {".npy": _read_npy, ".npz": _read_npz, ".csv": _read_csv, ".parquet": _read_parquet}
    if path.suffix == ".jsonl":
        return _read_jsonl(path, axes)
    if path.suffix not in readers:
        raise DataError(f"{path} ends in {path.suffix!r}; give .npy, .npz, .csv, .parquet or .jsonl")
    return [readers[path.suffix](path, axes)]


def _title(path: Path) -> str:
    return printable(path.name)


def _read_npy(path: Path, axes: str | None) -> Tensor:
    return _of_array(np.array(mapped(path)), axes, _title(path))


def _read_npz(path: Path, axes: str | None) -> Tensor:
    try:
        with zipfile.ZipFile(path) as archive:
            _refuse_bytes(sum(entry.file_size for entry in archive.infolist()), f"{path}, unpacked,")
        with np.load(path, allow_pickle=False) as arrays:
            names = list(arrays.files)
            name = "correct" if "correct" in names else names[0] if len(names) == 1 else None
            if name is None:
                raise DataError(
                    f"{path} holds {', '.join(names) or 'nothing'}; it needs one array, or one named correct"
                )
            values = arrays[name]
            beside = {key: arrays[key] for key in ("state", "weights", "shots") if key in names}
    except (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is not a .npz file that can be read: {_one_line(error)}") from None
    return _with_beside(_of_array(values, axes, _title(path)), beside, values.shape, axes, path)


def _with_beside(
    tensor: Tensor, beside: Mapping[str, Array], shape: tuple[int, ...], axes: str | None, path: Path
) -> Tensor:
    """The tensor with state, weights and shots that lay in the same archive."""
    if "state" in beside and tensor.axes[-1] == "Q":
        if beside["state"].shape != shape:
            raise DataError(
                f"{path} holds state {list(beside['state'].shape)} beside answers {list(shape)}; make them alike"
            )
        given = beside["state"] != 0
        state = _arranged(given, _axes_of(shape, axes, True))[0].reshape(tensor.values.shape).astype(np.uint8)
        tensor = replace(tensor, state=state if tensor.state is None else tensor.state | state)
    if "weights" in beside and tensor.axes[-1] == "Q":
        weights = beside["weights"]
        if weights.shape != tensor.values.shape[-1:] or not np.issubdtype(weights.dtype, np.integer):
            raise DataError(f"{path} holds weights {weights.dtype} {list(weights.shape)}; give one integer a query")
        tensor = replace(tensor, weights=weights.astype(np.int64))
    if "shots" in beside and "K" in tensor.axes:
        shots = tuple(int(k) for k in np.ravel(beside["shots"]))
        if len(shots) != tensor.values.shape[2] or list(shots) != sorted(set(shots)):
            raise DataError(f"{path} holds shots {list(shots)}; give {tensor.values.shape[2]} ascending numbers")
        tensor = replace(tensor, shots=shots)
    return tensor


def _of_array(values: Array, axes: str | None, title: str) -> Tensor:
    """A plain array as a tensor."""
    if values.dtype.kind not in "biuf" or not values.size:
        raise DataError(f"{title} must hold numbers, got {values.dtype} {list(values.shape)}")
    letters = _axes_of(values.shape, axes, bool(np.isin(values, (0, 1)).all()) if values.ndim == 2 else False)
    arranged, named = _arranged(values, letters)
    if "Q" not in letters:
        return Tensor(_shares(arranged, title), named, title=title)
    answers, state, notes = _answers(arranged, title)
    names: tuple[str, ...] = ()
    if named == "CQ":
        names = (title,) if len(answers) == 1 else tuple(f"context {i}" for i in range(len(answers)))
    return Tensor(answers, named, state, names=names, title=title, notes=notes)


def _axes_of(shape: tuple[int, ...], axes: str | None, is_binary: bool) -> str:
    """A letter for each axis."""
    if axes is None:
        default = {1: "Q", 2: "CQ" if is_binary else "SP", 3: "SPQ", 4: "SPKQ"}.get(len(shape))
        if default is None:
            raise RequestError(f"an array with {len(shape)} axes needs a letter for each, such as SPKQ")
        return default
    letters = axes.upper()
    if set(letters) - set(_LETTERS) or len(set(letters)) != len(letters):
        raise RequestError(f"axes must be distinct letters of S, P, K, Q and C, got {axes!r}")
    if len(letters) != len(shape):
        raise RequestError(f"axes {axes!r} names {len(letters)} axes, the array has {len(shape)}: {list(shape)}")
    if "C" in letters and set(letters) != {"C", "Q"}:
        raise RequestError(f"contexts C go with queries Q alone, got {axes!r}; number sets S and permutations P")
    if "Q" not in letters and not {"S", "P"} <= set(letters):
        raise RequestError(f"accuracies need the axes S and P, got {axes!r}")
    return letters


def _arranged(values: Array, letters: str) -> tuple[Array, str]:
    """The axes in the order S P K Q, or C Q, with one set or permutation where none is named; and their letters."""
    if letters == "Q":
        return values[None], "CQ"
    wanted = "CQ" if "C" in letters else "".join(axis for axis in "SPKQ" if axis in letters or axis in "SP")
    for axis in wanted:
        if axis not in letters:
            values, letters = values[None], axis + letters
    return np.ascontiguousarray(values.transpose([letters.index(axis) for axis in wanted])), wanted


def _shares(values: Array, title: str) -> FloatArray:
    shares = values.astype(np.float64)
    wrong = shares[~((shares >= 0) & (shares <= 1))]
    if wrong.size:
        raise DataError(
            f"{title} must hold accuracies in 0..1, found {wrong[0]:g}; percentages are to be divided by 100"
        )
    return shares


def _answers(values: Array, title: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8] | None, tuple[str, ...]]:
    """0 or 1, and a state where some are NaN."""
    if values.dtype.kind != "f":
        if values.dtype != np.bool_ and (values.min() < 0 or values.max() > 1):
            wrong = values.min() if values.min() < 0 else values.max()
            raise DataError(f"{title} must hold answers 0 and 1, found {wrong}")
        return values.astype(np.uint8), None, ()
    missing = np.isnan(values)
    other = values[~missing & (values != 0) & (values != 1)]
    if other.size:
        raise DataError(
            f"{title} must hold answers 0 and 1 along Q, found {other[0]:g}; for accuracies name the axes SP or SPK"
        )
    answers = np.where(missing, 0, values).astype(np.uint8)
    return answers, missing.astype(np.uint8) * _MISSING if missing.any() else None, _missing_note(missing)


def _missing_note(missing: npt.NDArray[np.bool_]) -> tuple[str, ...]:
    num = int(np.count_nonzero(missing))
    if not num:
        return ()
    return (f"{num:,} of {missing.size:,} answers are missing: only queries that every cell answered count",)


def _one_line(error: Exception) -> str:
    return printable(str(error).split("\n")[0])[:200]


def _read_csv(path: Path, axes: str | None) -> Tensor:
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    try:
        with path.open(encoding="utf-8", newline="") as file:
            header = next(csv.reader([file.readline(1 << 20)]), [])
        is_matrix = all(_is_number(name) for name in header)
        wanted = None if is_matrix else _wanted(header)
        table = arrow_csv.read_csv(
            path,
            read_options=arrow_csv.ReadOptions(autogenerate_column_names=is_matrix),
            convert_options=arrow_csv.ConvertOptions(include_columns=wanted),
        )
    except (OSError, UnicodeDecodeError, pa.ArrowException, csv.Error) as error:
        raise DataError(f"{path} is not a .csv file that can be read: {_one_line(error)}") from None
    return _of_table(table, axes, path)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return not text.strip()
    return True


def _read_parquet(path: Path, axes: str | None) -> Tensor:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names, metadata = file.schema_arrow.names, file.metadata
            sizes = (metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
            _refuse_bytes(sum(sizes), f"{path}, unpacked,")
            _refuse_bytes(8 * metadata.num_rows, f"a column of {path}")
            table = file.read(columns=_wanted(names))
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} is not a .parquet file that can be read: {_one_line(error)}") from None
    return _of_table(table, axes, path)


_COLUMNS = ("split", "set", "permutation", "shots", "context", "query", "weight", "correct", "state", "accuracy")


_NAMES_SOMETHING = re.compile(r"[^\W\d_]{2,}")
"""A column that is called by a word says what it holds; f0 or 1 does not."""


def _wanted(names: Sequence[str]) -> list[str] | None:
    """The columns of a long table that are read; all of a plain matrix."""
    if "correct" in names or "accuracy" in names:
        return [name for name in _COLUMNS if name in names]
    return None


def _of_table(table: Any, axes: str | None, path: Path) -> Tensor:
    """An Arrow table: long, or a plain matrix of numbers."""
    names = table.column_names
    if _wanted(names) is None:
        matrix, told = _matrix(table, path), printable(", ".join(names))[:80]
        if axes is None and any(_NAMES_SOMETHING.search(name) for name in names):
            raise RequestError(
                f"{path} has the columns {told!r}; call them query and correct (with context, or set, permutation and "
                "shots), or say what rows and columns are: --axes QC where a row is a query, CQ where it is a context, "
                "SP for accuracies"
            )
        return _of_array(matrix, axes, _title(path))
    if axes is not None:
        raise RequestError(f"{path} names its own axes by its columns; leave axes {axes!r} out")
    return _of_columns({name: table.column(name) for name in _wanted(names) or ()}, path)


def _matrix(table: Any, path: Path) -> FloatArray:
    import pyarrow as pa

    def is_numeric(kind: Any) -> bool:
        return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))

    wrong = next((name for name in table.column_names if not is_numeric(table.schema.field(name).type)), None)
    if wrong is not None or not table.num_rows:
        raise DataError(
            f"{path} is neither a matrix of numbers (column {printable(str(wrong))!r}) nor a table with the columns "
            "query and correct; see docs/statistics.md"
        )
    _refuse_bytes(8 * table.num_rows * table.num_columns, f"the matrix in {path}")
    columns = [column.cast(pa.float64()).to_numpy(zero_copy_only=False) for column in table.columns]
    return np.stack(columns, axis=1)


def _of_columns(columns: dict[str, Any], path: Path) -> Tensor:
    """A long table: one row a cell of the tensor."""
    import pyarrow.compute as pc

    notes: list[str] = []
    if "split" in columns:
        splits = sorted(map(str, pc.unique(columns["split"]).to_pylist()))
        split = "test" if "test" in splits else splits[0]
        if len(splits) > 1 and split != "test":
            raise DataError(f"{path} holds the splits {', '.join(map(printable, splits))}; keep one, or name one test")
        if len(splits) > 1:
            notes.append("only the split test is described")
        keep = pc.equal(columns["split"], split)
        columns = {name: column.filter(keep) for name, column in columns.items()}
    has_answers = "correct" in columns
    if has_answers and "query" not in columns:
        raise DataError(f"{path} has a column correct but none named query; add it")
    letters = {name: axis for axis, name in _LETTERS.items()}
    order = ["set", "permutation", "shots"] if "context" not in columns else ["context"]
    if "context" in columns and {"set", "permutation", "shots"} & set(columns):
        raise DataError(f"{path} has both context and set, permutation or shots; keep one way to name a cell")
    named = [name for name in [*order, *(["query"] if has_answers else [])] if name in columns]
    if not named or not (has_answers or {"set", "permutation"} <= set(named)):
        raise DataError(f"{path} has accuracies but no columns set and permutation; add them")
    levels, places = zip(*(_levels(columns[name], name, path) for name in named), strict=True)
    shape = tuple(len(level) for level in levels)
    if not math.prod(shape):
        raise DataError(f"{path} has no rows")
    _refuse_bytes(math.prod(shape) * (1 if has_answers else 8), f"the tensor {list(shape)} of {path}")
    cells: npt.NDArray[np.int64] = np.asarray(np.ravel_multi_index(places, shape), dtype=np.int64)
    _refuse_twice(cells, shape, named, levels, path)
    values, state = _spread_out(columns, cells, shape, has_answers, path)
    arranged, axes = _arranged(values, "".join(letters[name] for name in named))
    if not has_answers:
        if state.any():
            raise DataError(
                f"{path} lacks {np.count_nonzero(state):,} of {state.size:,} cells; give an accuracy for each"
            )
        return Tensor(_shares(arranged, _title(path)), axes, shots=_shots(named, levels, path), title=_title(path))
    missing = state != 0
    notes += _missing_note(missing)
    return Tensor(
        arranged,
        axes,
        state=_arranged(state, "".join(letters[name] for name in named))[0] if missing.any() else None,
        weights=_weights(columns, places[-1], shape[-1], path),
        shots=_shots(named, levels, path),
        names=_context_names(named, levels, path) if axes == "CQ" else (),
        title=_title(path),
        notes=tuple(notes),
    )


def _levels(column: Any, name: str, path: Path) -> tuple[list[Any], npt.NDArray[np.int64]]:
    """The distinct values of a column in ascending order, and each row's place among them."""
    if column.null_count:
        raise DataError(f"{path} has {column.null_count:,} rows without a value of {name!r}; fill them in")
    encoded = column.combine_chunks().dictionary_encode()
    values = encoded.dictionary.to_pylist()
    try:
        order = sorted(range(len(values)), key=values.__getitem__)
    except TypeError:
        raise DataError(f"{path} mixes kinds of values in the column {name!r}; use one") from None
    rank = np.empty(len(values), np.int64)
    rank[order] = np.arange(len(values))
    return [values[i] for i in order], rank[encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)]


def _refuse_twice(
    cells: npt.NDArray[np.int64], shape: tuple[int, ...], named: list[str], levels: Sequence[list[Any]], path: Path
) -> None:
    seen = np.zeros(math.prod(shape), np.bool_)
    seen[cells] = True
    if np.count_nonzero(seen) == len(cells):
        return
    order = np.sort(cells)
    twice = order[1:][order[1:] == order[:-1]][0]
    where = ", ".join(
        f"{name} {printable(str(level[place]))}"
        for name, level, place in zip(named, levels, np.unravel_index(twice, shape), strict=True)
    )
    raise DataError(f"{path} has two rows for {where}; keep one")


def _spread_out(
    columns: dict[str, Any], cells: npt.NDArray[np.int64], shape: tuple[int, ...], has_answers: bool, path: Path
) -> tuple[Array, npt.NDArray[np.uint8]]:
    """Values and states of all cells; what no row names is missing."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = columns["correct" if has_answers else "accuracy"]
    try:
        numbers = pc.fill_null(column.cast(pa.float64()), math.nan).to_numpy()
    except pa.ArrowException:
        raise DataError(
            f"{path} holds {column.type} in the column of answers; use 0 and 1, or true and false"
        ) from None
    absent = np.isnan(numbers)
    if "state" in columns and has_answers:
        state_column = columns["state"]
        ok = "ok" if pa.types.is_string(state_column.type) or pa.types.is_large_string(state_column.type) else 0
        absent |= ~pc.fill_null(pc.equal(state_column, ok), False).to_numpy()
    state = np.full(math.prod(shape), _MISSING, np.uint8)
    state[cells] = absent
    if has_answers:
        answers, _, _ = _answers(numbers, _title(path))
        values: Array = np.zeros(state.size, np.uint8)
        values[cells] = np.where(absent, 0, answers)
    else:
        values = np.zeros(state.size)
        values[cells] = np.where(absent, 0, numbers)
    return values.reshape(shape), state.reshape(shape)


def _weights(
    columns: dict[str, Any], place: npt.NDArray[np.int64], num_queries: int, path: Path
) -> npt.NDArray[np.int64] | None:
    if "weight" not in columns:
        return None
    given = columns["weight"].to_numpy()
    weights = np.zeros(num_queries, np.int64)
    if given.dtype.kind not in "iu" or (given < 0).any():
        raise DataError(f"{path} must hold whole numbers in the column weight, got {given.dtype}")
    weights[place] = given
    if (weights[place] != given).any():
        raise DataError(f"{path} gives one query two weights; give it the same in every row")
    return None if (weights == 1).all() else weights


def _shots(named: list[str], levels: Sequence[list[Any]], path: Path) -> tuple[int, ...]:
    if "shots" not in named:
        return ()
    shots = levels[named.index("shots")]
    if not all(isinstance(k, int) for k in shots):
        raise DataError(f"{path} must hold whole numbers in the column shots, found {printable(str(shots[0]))}")
    return tuple(shots)


def _context_names(named: list[str], levels: Sequence[list[Any]], path: Path) -> tuple[str, ...]:
    return tuple(printable(str(name)) for name in levels[0]) if named[0] == "context" else (_title(path),)


def _read_jsonl(path: Path, axes: str | None) -> list[Tensor]:
    rows = _json_rows(path)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{path} is empty")
    if "doc_id" in first:
        if axes not in (None, "CQ"):
            raise RequestError(f"sample logs have the axes CQ, got {axes!r}")
        return _of_log(path)
    if "correct" not in first:
        raise DataError(f"{path} has neither doc_id (a sample log) nor query and correct (iclperm export)")
    import pyarrow as pa

    names = _wanted(list(first)) or []
    found = [[row.get(name) for name in names] for row in _json_rows(path)]
    try:
        table = pa.table({name: pa.array(column) for name, column in zip(names, zip(*found, strict=True), strict=True)})
    except pa.ArrowException as error:
        raise DataError(f"{path} mixes kinds of values in a column: {_one_line(error)}") from None
    return [_of_table(table, axes, path)]


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    raise DataError(f"{path}, line {number} is not JSON; write the file again") from None
                if not isinstance(row, dict):
                    raise DataError(f"{path}, line {number} is no object but {type(row).__name__}")
                yield row
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {_one_line(error)}") from None


@dataclass(frozen=True)
class _Log(Tensor):
    """One filter of a sample log: answers [1, documents], with the documents themselves."""

    documents: tuple[Any, ...] = ()
    """[Q] doc_id"""
    folder: str = ""
    """Where the file lies, to tell files of one name apart."""
    hashes: tuple[Any, ...] = ()
    """[Q] what tells one document from another of the same number; None where the log does not say."""


def _of_log(path: Path) -> list[Tensor]:
    """The filters of one sample log, each a context."""
    by_filter: dict[str, dict[Any, tuple[int, Any]]] = {}
    metrics: dict[str, str] = {}
    for number, row in enumerate(_json_rows(path), start=1):
        name = str(row.get("filter", "none"))
        metric = metrics.setdefault(name, next((key for key in _METRICS if key in row), ""))
        if not metric:
            raise DataError(f"{path}, line {number} has none of the metrics {', '.join(_METRICS)}")
        value, document = row.get(metric), row.get("doc_id")
        if isinstance(value, bool | int | float) and value in (0, 1) and isinstance(document, int | str):
            answers = by_filter.setdefault(name, {})
            if document in answers:
                raise DataError(
                    f"{path} has two rows for doc_id {printable(str(document))} under filter {name!r}; keep one"
                )
            answers[document] = (int(value), row.get("doc_hash"))
        else:
            raise DataError(
                f"{path}, line {number} has {metric} = {printable(str(value))[:40]} for doc_id "
                f"{printable(str(document))[:40]}; it must be 0 or 1 for a number or a name"
            )
    many = len(by_filter) > 1
    logs: list[Tensor] = []
    for name, answers in by_filter.items():
        called = _title(path) + (f" ({printable(name)})" if many else "")
        logs.append(
            _Log(
                np.array([[value for value, _ in answers.values()]], np.uint8),
                "CQ",
                names=(called,),
                title=_title(path),
                notes=(f"{called}: answers are its metric {metrics[name]}",),
                documents=tuple(answers),
                folder=printable(path.resolve().parent.name),
                hashes=tuple(content for _, content in answers.values()),
            )
        )
    return logs


def _together(parts: Sequence[Tensor]) -> Tensor:
    """Contexts of several files that answered the same queries; of logs, matched by document."""
    logs = [part for part in parts if isinstance(part, _Log)]
    if not logs:
        sizes = sorted({part.values.shape[1] for part in parts})
        if len(sizes) > 1:
            raise DataError(f"the files have {sizes[0]} and {sizes[1]} queries; give answers to the same ones")
        states = [np.zeros_like(part.values) if part.state is None else part.state for part in parts]
        values, state = np.concatenate([part.values for part in parts]), np.concatenate(states)
    else:
        if len(logs) < len(parts):
            raise DataError("sample logs cannot be put together with other files; describe them apart")
        values, state = _matched(logs)
    names = [name for part in parts for name in part.names]
    if logs and len(set(names)) < len(names):
        names = [f"{log.folder}/{name}" for log in logs for name in log.names]
    notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    if len({note.rsplit(" ", 1)[-1] for note in notes if "its metric" in note}) == 1:
        notes = (f"answers are the metric {notes[0].rsplit(' ', 1)[-1]}",)
    if not logs and len(parts) > 1:
        notes = (*notes, "query by query: the files must hold the same queries in the same order")
    return Tensor(
        values,
        "CQ",
        state if state.any() else None,
        names=_distinct(names),
        title=f"{len(parts)} contexts",
        notes=(*notes, *_missing_note(state != 0)),
    )


def _matched(logs: Sequence[_Log]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Answers and states [C, Q] over all documents of all logs; raises DataError where one number is two documents."""
    place: dict[Any, int] = {}
    content: dict[Any, tuple[Any, str]] = {}
    for log in logs:
        for document, found in zip(log.documents, log.hashes, strict=True):
            place.setdefault(document, len(place))
            known, first = content.setdefault(document, (found, log.names[0]))
            if None not in (known, found) and known != found:
                raise DataError(
                    f"doc_id {printable(str(document))} is another document in {log.names[0]} than in {first}: these "
                    "are different tasks; describe each apart"
                )
    values = np.zeros((len(logs), len(place)), np.uint8)
    state = np.full(values.shape, _MISSING, np.uint8)
    for number, log in enumerate(logs):
        at = [place[document] for document in log.documents]
        values[number, at], state[number, at] = log.values[0], 0
    return values, state


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Names with a number where one occurs twice."""
    seen: dict[str, int] = {}
    distinct = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        distinct.append(name if names.count(name) == 1 else f"{name} #{seen[name]}")
    return tuple(distinct)
