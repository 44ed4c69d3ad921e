"""Kind `sensitivity` (arXiv 2511.09700): does the choice of the demonstrations matter more, or their order?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from iclperm import stats
from iclperm.base.help import fields_in_help
from iclperm.errors import RequestError
from iclperm.report.figures import curve_plot, heat_map
from iclperm.report.notebook import ShownFindings
from iclperm.report.parts import Plot, Table, interval_words, listed, number, plain
from iclperm.stats import Calibration, Curve, VarianceComponents, explain_components
from iclperm.stats.block_curves import block_curve
from iclperm.stats.intervals import possible
from iclperm.stats.sensitivity import FloatArray
from iclperm.studies.bearing import Bearing, of_run
from iclperm.studies.classes import classes_by_design
from iclperm.studies.missing import overturned
from iclperm.studies.sensitivity_blocks import block_summary
from iclperm.studies.sensitivity_conclusion import conclusion, interval_reasons
from iclperm.studies.sensitivity_latent import SensitivityLatent, sensitivity_latent
from iclperm.studies.sensitivity_over_shots import (
    SensitivityOverShots,
    over_shots_table,
    ratio_plot,
    sensitivity_over_shots,
)
from iclperm.studies.sensitivity_summary import (
    Ordering,
    SensitivitySummary,
    over_orderings,
    sensitivity_summary,
)
from iclperm.studies.tokens import dealt_words, token_table
from iclperm.study.orderings import design_words

if TYPE_CHECKING:
    from iclperm.runs.run import FinishedRun


_MOST_BOUNDED = 20  # orderings in the table of bounds
_MAX_MEANS = 20
_BRIEFLY = {
    "S": "some sets are better, in any order",
    "P": "some orders are better, for any set",
    "I": "some queries are easier",
    "SP": "the best order differs between sets",
    "SI": "some queries gain from one set, lose from another",
    "PI": "some queries gain from one order, lose from another",
    "SPI": "everything else, chance included",
}


@fields_in_help
@dataclass(frozen=True, repr=False)
class Sensitivity(ShownFindings):
    """The findings of a sensitivity study: its summary at the largest number of shots, and what changes over shots."""

    summary: SensitivitySummary
    """All that is said of the largest number of demonstrations."""
    shots: tuple[int, ...] = ()
    """The numbers of demonstrations that were run, the last of them that of the summary; empty where not known."""
    curve: Curve | None = None
    """Mean accuracy over the numbers of demonstrations, with its spreads; None where one was run."""
    over_shots: SensitivityOverShots | None = None
    """Sensitivity over the numbers of demonstrations; None where fewer than two have any."""
    title: str = ""
    """Task and model, for figures."""
    chance: float | None = None
    """Accuracy of guessing."""
    fit_latent: Callable[[], SensitivityLatent | None] | None = None
    """Fits the effects on the logit, on first use; None where the answers are not at hand."""
    bearing: Bearing = field(default_factory=Bearing)
    """What the answers can bear."""

    @cached_property
    def latent(self) -> SensitivityLatent | None:
        """Effects on the logit at the largest number of shots; None where there is nothing to order or to choose."""
        return None if self.fit_latent is None or self._last == 0 else self.fit_latent()

    @property
    def warnings(self) -> Sequence[str]:
        """See `Findings`."""
        return self.summary.warnings

    def conclusion(self) -> list[str]:
        """See `Findings`."""
        found = conclusion(self.summary, self._last, self.bearing)
        if not self.bearing.can_conclude:
            return found
        return [*found, *overturned(self.summary), *([] if self.latent is None else self.latent.conclusion())]

    def tables(self, full: bool) -> list[Table]:
        """See `Findings`."""
        tables = sensitivity_tables(self.summary, self._last, full=full)
        if full and self.latent is not None:
            tables.append(self.latent.table(self._last))
        if self.curve is not None:
            tables.append(curve_table(self.curve, self.shots))
        if self.over_shots is not None and full:
            tables.append(over_shots_table(self.over_shots))
        return tables

    def plots(self) -> dict[str, Plot]:
        """The heat map of accuracies, the curve and r over shots, as far as they were run."""
        title = ", ".join(part for part in (self.title, f"k = {self._last}" if self.shots else "") if part)
        plots = {"heatmap": heat_map(self.summary.accuracy, title=title, ratio=self.summary.jackknife)}
        if self.curve is not None:
            plots["curve"] = curve_plot(self.curve, self.shots, title=self.title, chance=self.chance)
        if self.over_shots is not None and sum(k > 0 for k in self.over_shots.shots) >= 2:
            plots["r_over_k"] = ratio_plot(self.over_shots, title=self.title)
        return plots

    def to_dict(self) -> dict[str, Any]:
        """The summary and, where they were run, curve and sensitivity over shots; JSON-safe."""
        summary = self.summary.to_dict(self._last)
        for name in ("intervals", "effects"):
            if (found := getattr(self.summary, name)) is not None:
                summary[name] = plain(possible(found))
        summary |= {"conclusion": self.conclusion(), "bearing": self.bearing.to_dict()}
        content: dict[str, Any] = {"sensitivity": summary}
        if self.curve is not None:
            content["curve"] = {"shots": plain(self.shots), **plain(self.curve)}
        if self.over_shots is not None:
            content["over_shots"] = self.over_shots.to_dict()
        if self.latent is not None:
            content["latent"] = self.latent.to_dict()
        return content

    @property
    def _last(self) -> int | None:
        return self.shots[-1] if self.shots else None


def findings(run: FinishedRun) -> Sensitivity:
    """Order against selection in a finished run."""
    if run.study.cells != "crossed":
        return _of_blocks(run)
    test, seed = run.splits["test"], run.study.seed
    summary = sensitivity_summary(
        test.correct[:, :, -1],
        test.scores_by_cell(slice(-1, None)) if test.has_scores else None,
        test.gold if test.has_scores else None,
        test.state[:, :, -1],
        weights=test.weights,
        classes=classes_by_design(run),
        tokens=run.report,
        seed=seed,
        design=_design_of(run),
    )
    curve = stats.curve(run.correct, run.state, run.weights) if len(run.shots) > 1 else None
    over_shots = None
    if sum(shots > 0 for shots in run.shots) > 1:
        resampled = run.study.resample == "per_k" or run.study.is_per_query
        over_shots = sensitivity_over_shots(
            run.correct,
            run.state,
            shots=run.shots,
            weights=run.weights,
            classes=classes_by_design(run),
            seed=seed,
            resampled=resampled,
        )
    last, state = test.correct[:, :, -1], test.state[:, :, -1]
    latent = partial(sensitivity_latent, last, state, weights=test.weights, seed=seed)
    bearing = of_run(run).with_reasons(interval_reasons(summary))
    return Sensitivity(summary, run.shots, curve, over_shots, run.title, run.chance, latent, bearing)


def _of_blocks(run: FinishedRun) -> Sensitivity:
    """Order against selection in a run that asked each ordering queries of its own."""
    test, classes = run.splits["test"], classes_by_design(run)
    summary = block_summary(
        test.correct[:, :, -1],
        test.state[:, :, -1],
        cells=run.study.cells,
        weights=test.weights,
        classes=classes,
        tokens=run.report,
        num_labels=len(run.shared_labels) or None,
        seed=run.study.seed,
    )
    summary = replace(summary, warnings=(*summary.warnings, dealt_words(run.decisions, run.report)))
    curve = None
    if len(run.shots) > 1:
        curve = block_curve(run.correct, run.state, shots=run.shots, weights=run.weights, classes=classes).curve
    bearing = of_run(run).with_reasons(interval_reasons(summary))
    return Sensitivity(summary, run.shots, curve, None, run.title, run.chance, None, bearing)


def _design_of(run: FinishedRun) -> tuple[str, stats.PermutationBlocks] | None:
    """How the permutations of a run were dealt, in words and blocks; None where each was drawn by itself."""
    if run.study.design == "random":
        return None
    dealt = run.study.design, run.correct.shape[1], run.shots[-1]
    words = design_words(*dealt)
    return words, stats.permutation_blocks(*dealt)


def sensitivity_tables(summary: SensitivitySummary, shots: int | None = None, *, full: bool = True) -> list[Table]:
    """What is worth reading of a sensitivity study at `shots` demonstrations, most important first.

    Without `full` only accuracy, order against selection, and the components in brief. Parts without data are left out.
    """
    tables = [_accuracy_table(summary, shots, full), _spread_table(summary, shots, full)]
    if summary.components is not None:
        in_words = explain_components(summary.components, same_label_sequence=summary.same_label_sequence(shots))
        tables.append(_component_table(summary.components, shots, in_words if full else None))
    if not full:
        return tables
    if summary.bounds is not None:
        tables.append(_bounds_table(summary.accuracy, summary.bounds, shots))
    if max(summary.accuracy.shape) <= _MAX_MEANS:
        tables.append(_means_table(summary, shots))
    if summary.calibration is not None:
        tables.append(_calibration_table(summary.calibration, shots))
    if summary.tokens is not None:
        tables.append(token_table(summary.tokens))
    return tables


def curve_table(curve: Curve, shots: Sequence[int]) -> Table:
    """Accuracy and both spreads, one row a number of shots; raises RequestError if shots and curve differ in length."""
    if len(shots) != len(curve.mean):
        raise RequestError(f"shots has {len(shots)} entries, the curve {len(curve.mean)}")
    rows = zip(shots, curve.mean, curve.std_permutations, curve.std_sets, strict=True)
    return Table(
        "Accuracy against k, with standard deviations",
        ("k", "accuracy", "std over orders", "std of set means"),
        [(str(shot), *(number(value) for value in values)) for shot, *values in rows],
    )


def _accuracy_table(summary: SensitivitySummary, shots: int | None, full: bool) -> Table:
    sets, permutations = summary.accuracy.shape
    rows: list[Sequence[str]] = [
        ("mean", number(summary.mean), f"{interval_words(summary.mean_interval)} for other {_covered(summary)}")
    ]
    orderings: list[Sequence[str]] = [
        ("best ordering", *_ordering(summary.best, summary.bounds)),
        ("5 % ordering", number(summary.low_tail.accuracy), "one ordering in 20 is no better than this"),
        ("worst ordering", *_ordering(summary.worst, summary.bounds)),
    ]
    rows += [("queries", "", summary.cells)] if summary.cells is not None else orderings
    if summary.design is not None:
        rows.append(("orders", "", summary.design))
    missing = ", ".join(f"{name} {share:.2%}" for name, share in summary.missing.items() if share) or "none"
    if full or missing != "none":
        rows.append(("answers missing", f"{summary.missing_total:.1%}", missing))
        rows.append(("queries in part", f"{summary.incomplete:.1%}", "lack an answer in some cell"))
        rows.append(("queries left out", f"{summary.dropped:.1%}", "have no answer in any cell"))
    if summary.if_wrong is not None and summary.if_right is not None:
        ends = summary.if_wrong, summary.if_right
        bounds = " to ".join(number(float(end.accuracy.mean())) for end in ends)
        rows.append(("mean at worst, at best", bounds, "if every missing answer were wrong, or right"))
    if full and summary.near_ties is not None:
        rows.append(("near-ties", f"{summary.near_ties:.2%}", "two best labels within 1e-4 nats"))
    title = f"Accuracy{_at(shots)}: {sets} sets x {permutations} permutations, {summary.num_queries} queries"
    return Table(title, ("", "", ""), rows, texts=(2,))


def _spread_table(summary: SensitivitySummary, shots: int | None, full: bool) -> Table:
    """Every estimate with the interval that belongs to it on the line below."""
    rows: list[Sequence[str]] = []
    generalised = f"  95 %, {summary.interval_method}"
    estimators = {"mean_std": "mean of std (as printed)", "rms": "root mean square (RMS)"}
    if not full and summary.jackknife is not None and summary.effects is not None:
        del estimators["rms"]
    if summary.blocks is not None:
        estimators = {}
    for estimator, name in estimators.items():
        spread = summary.spreads[estimator]
        rows.append((name, number(spread.order), number(spread.selection), number(spread.ratio)))
        if estimator == "mean_std" and summary.jackknife is not None:
            rows.append(("  95 %, jackknife", "", "", interval_words(summary.jackknife)))
        if estimator == "rms" and summary.intervals is not None:
            rows.append((generalised, *map(interval_words, possible(summary.intervals))))
    if summary.effects is not None:
        rows.append(("RMS without item noise", *(number(effect.estimate) for effect in summary.effects)))
        rows.append((generalised, *map(interval_words, possible(summary.effects))))
    if summary.blocks is not None:
        rows.append(("  95 %, jackknife", *map(interval_words, possible(summary.blocks.jackknife))))
    header = ("sensitivity of accuracy", "to order", "to selection", "r = sel. / order")
    return Table(f"Order against selection{_at(shots)}", header, rows)


def _covered(summary: SensitivitySummary) -> str:
    """What the interval of the mean speaks of: one set, or one permutation, says nothing of others."""
    sizes = dict(zip(("sets", "orders"), summary.accuracy.shape, strict=True))
    return listed([*(name for name, size in sizes.items() if size > 1), "queries"])


def _component_table(components: VarianceComponents, shots: int | None, in_words: Sequence[str] | None) -> Table:
    words = list(_BRIEFLY.values()) if in_words is None else [line.split(": ", 1)[1] for line in in_words]
    effects = zip(components.sigma2._asdict().items(), components.shares, words, strict=True)
    rows = [(effect, f"{value:+.6f}", f"{share:.1%}", because) for (effect, value), share, because in effects]
    title = f"Shares of the variance of single answers{_at(shots)}"
    return Table(title, ("", "variance", "share", "because"), rows, texts=(3,))


def _means_table(summary: SensitivitySummary, shots: int | None) -> Table:
    by_set, by_permutation = summary.set_means, summary.permutation_means
    rows = [
        (str(index), *(number(means[index]) if index < len(means) else "" for means in (by_set, by_permutation)))
        for index in range(max(summary.accuracy.shape))
    ]
    return Table(f"Mean accuracy{_at(shots)}", ("index", "set", "permutation"), rows)


def _calibration_table(calibration: Calibration, shots: int | None) -> Table:
    names = {"nll": "negative log-likelihood (nats)", "brier": "Brier score", "ece": "expected calibration error"}
    scores = over_orderings(calibration)
    rows = [(name, *map(number, scores[field].values())) for field, name in names.items()]
    return Table(f"Beyond accuracy{_at(shots)}, over all orderings", ("", "mean", "lowest", "highest"), rows)


def _at(shots: int | None) -> str:
    return "" if shots is None else f" at k = {shots}"


def _ordering(ordering: Ordering, bounds: stats.AccuracyBounds | None) -> tuple[str, str]:
    words = f"set {ordering.set}, permutation {ordering.permutation}"
    if bounds is not None and bounds.missing[place := (ordering.set, ordering.permutation)] > 0:
        words += (
            f"; {number(bounds.lowest[place])} to {number(bounds.highest[place])} with what it lacks wrong, or right"
        )
    return number(ordering.accuracy), words


def _bounds_table(accuracy: FloatArray, bounds: stats.AccuracyBounds, shots: int | None) -> Table:
    """The orderings that lack the most, with their accuracies at worst and at best."""
    order = np.argsort(-bounds.missing, axis=None, kind="stable")
    lacking = [np.unravel_index(at, accuracy.shape) for at in order if bounds.missing.flat[at] > 0]
    rows = [
        (
            *map(str, place),
            number(float(accuracy[place])),
            f"{bounds.missing[place]:.1%}",
            number(float(bounds.lowest[place])),
            number(float(bounds.highest[place])),
        )
        for place in lacking[:_MOST_BOUNDED]
    ]
    most = f"The {len(rows)} of {len(lacking):,} that lack the most. " if len(rows) < len(lacking) else ""
    could = int(np.count_nonzero(bounds.highest >= bounds.lowest.max()))
    if could > 1:
        most += f"{could:,} of {accuracy.size:,} orderings could be the best. "
    return Table(
        f"Orderings with missing answers{_at(shots)}",
        ("set", "permutation", "accuracy", "missing", "all wrong", "all right"),
        rows,
        caption=f"{most}All wrong, all right: the accuracy if every missing answer of this ordering were so.",
    )
