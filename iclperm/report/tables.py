"""The results as rich tables; `SensitivitySummary.to_dict` holds the same numbers as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from rich import box
from rich.table import Table

from iclperm.errors import RequestError
from iclperm.stats import Calibration, Curve, Interval, VarianceComponents, explain_components
from iclperm.studies.sensitivity import Ordering, SensitivitySummary, Tokens

_MAX_MEANS = 20


def sensitivity_tables(summary: SensitivitySummary) -> list[Table]:
    """Everything worth reading of a sensitivity study, most important first; parts without data are left out."""
    tables = [_accuracy_table(summary), _spread_table(summary)]
    if summary.components is not None:
        tables.append(_component_table(summary.components))
    if max(summary.accuracy.shape) <= _MAX_MEANS:
        tables.append(_means_table(summary))
    if summary.calibration is not None:
        tables.append(_calibration_table(summary.calibration))
    if summary.tokens is not None:
        tables.append(_token_table(summary.tokens))
    return tables


def curve_table(curve: Curve, shots: Sequence[int]) -> Table:
    """Accuracy and both spreads, one row a number of shots; raises RequestError if shots and curve differ in length."""
    if len(shots) != len(curve.mean):
        raise RequestError(f"shots has {len(shots)} entries, the curve {len(curve.mean)}")
    table = _table("Accuracy against shots", "shots", "accuracy", "std over permutations", "std over sets")
    for shot, *values in zip(shots, curve.mean, curve.std_permutations, curve.std_sets, strict=True):
        table.add_row(str(shot), *(_number(value) for value in values))
    return table


def _accuracy_table(summary: SensitivitySummary) -> Table:
    sets, permutations = summary.accuracy.shape
    table = _table(
        f"Accuracy, {sets} sets x {permutations} permutations, {summary.num_queries} queries", "", "value", ""
    )
    table.add_row("mean", _number(summary.mean), f"standard error {_number(summary.mean_se)}, clustered by query")
    table.add_row("best ordering", *_ordering(summary.best))
    table.add_row("5 % ordering", *_ordering(summary.low_tail))
    table.add_row("worst ordering", *_ordering(summary.worst))
    table.add_row("queries left out", f"{summary.dropped:.1%}", "not ok in some cell")
    missing = ", ".join(f"{name} {share:.2%}" for name, share in summary.missing.items() if share) or "none"
    table.add_row("answers missing", f"{sum(summary.missing.values()):.1%}", missing)
    if summary.near_ties is not None:
        table.add_row("near-ties", f"{summary.near_ties:.2%}", "two best labels within 1e-4 nats")
    return table


def _spread_table(summary: SensitivitySummary) -> Table:
    table = _table(
        "Order against selection", "", "mean of std", "RMS", "95 % interval", "without item noise", "95 % interval"
    )
    names = {"order": "order sensitivity", "selection": "selection sensitivity", "ratio": "r = selection / order"}
    for field, name in names.items():
        printed, rms = (getattr(summary.spreads[estimator], field) for estimator in ("mean_std", "rms"))
        raw = None if summary.intervals is None else getattr(summary.intervals, field)
        pure = None if summary.effects is None else getattr(summary.effects, field)
        estimate = "-" if pure is None else _number(pure.estimate)
        table.add_row(name, _number(printed), _number(rms), _range(raw), estimate, _range(pure))
    table.add_row("r, jackknife", "", "", _range(summary.jackknife), "", "")
    return table


def _component_table(components: VarianceComponents) -> Table:
    table = _table("Where the variance of single answers comes from", "component", "variance", "share", "meaning")
    shares = components.shares._asdict()
    for (effect, value), words in zip(components.sigma2._asdict().items(), explain_components(components), strict=True):
        table.add_row(effect, f"{value:+.6f}", f"{shares[effect]:.1%}", words.split(": ", 1)[1])
    return table


def _means_table(summary: SensitivitySummary) -> Table:
    table = _table("Mean accuracy", "index", "set", "permutation")
    by_set, by_permutation = summary.set_means, summary.permutation_means
    for index in range(max(summary.accuracy.shape)):
        cells = (_number(means[index]) if index < len(means) else "" for means in (by_set, by_permutation))
        table.add_row(str(index), *cells)
    return table


def _calibration_table(calibration: Calibration) -> Table:
    table = _table("Beyond accuracy", "", "mean", "best ordering", "worst ordering")
    names = {"nll": "negative log-likelihood (nats)", "brier": "Brier score", "ece": "expected calibration error"}
    for field, name in names.items():
        values = getattr(calibration, field)
        table.add_row(name, _number(float(np.mean(values))), _number(values.min()), _number(values.max()))
    return table


def _token_table(tokens: Tokens) -> Table:
    table = _table("Tokens", "", "tokens", "")
    table.add_row("prompt by prompt", f"{tokens.naive:,}", "")
    table.add_row("distinct", f"{tokens.unique:,}", "shared prefixes counted once")
    table.add_row("forwarded", f"{tokens.forwarded:,}", f"{tokens.saving:.1f} times fewer than prompt by prompt")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        numeric = index > 0 and column not in ("", "meaning")
        table.add_column(column, justify="right" if numeric else "left", no_wrap=numeric)
    return table


def _ordering(ordering: Ordering) -> tuple[str, str]:
    return _number(ordering.accuracy), f"set {ordering.set}, permutation {ordering.permutation}"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"


def _range(interval: Interval | None) -> str:
    if interval is None or math.isnan(interval.low):
        return "-"
    return f"{interval.low:.4f} to {interval.high:.4f}"
