"""The results as tables; `SensitivitySummary.to_dict` holds the same numbers as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from iclperm.errors import RequestError
from iclperm.stats import Calibration, Curve, Interval, VarianceComponents, explain_components
from iclperm.studies.findings import Table, interval_words, number
from iclperm.studies.sensitivity import Ordering, SensitivityOverShots, SensitivitySummary, Tokens, over_orderings

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
    if max(summary.accuracy.shape) <= _MAX_MEANS:
        tables.append(_means_table(summary, shots))
    if summary.calibration is not None:
        tables.append(_calibration_table(summary.calibration, shots))
    if summary.tokens is not None:
        tables.append(_token_table(summary.tokens))
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


def over_shots_table(over_shots: SensitivityOverShots) -> Table:
    """Order against selection at every k >= 1, as printed and free of item noise, each with its interval of r.

    A star marks the k at which order is not order alone; the caption says why.
    """
    rows: list[Sequence[str]] = []
    printed = (over_shots.order, over_shots.selection, over_shots.ratio.estimate)
    effects = [
        part.estimate for part in (over_shots.order_effect, over_shots.selection_effect, over_shots.ratio_effect)
    ]
    for place, (k, alone) in enumerate(zip(over_shots.shots, over_shots.is_order_alone, strict=True)):
        if k == 0:
            continue
        for name, kind, values, r in (
            (f"{k}{'' if alone else '*'}", "as printed", printed, over_shots.ratio),
            ("", "noise-free", effects, over_shots.ratio_effect),
        ):
            interval = Interval(r.estimate[place], r.low[place], r.high[place], r.level)
            rows.append((name, kind, *(number(value[place]) for value in values), interval_words(interval)))
    header = ("k", "", "to order", "to selection", "r", "95 % of r")
    caption = "" if over_shots.caution is None else f"* {over_shots.caution}"
    return Table("Order against selection over k", header, rows, texts=(1,), caption=caption)


def token_line(tokens: Tokens) -> str:
    """What shared prefixes saved, in one line."""
    line = f"tokens: {tokens.naive:,} prompt by prompt, {tokens.unique:,} distinct: {tokens.saving:.1f} times fewer"
    forwarded = _forwarded(tokens)
    return line if forwarded == f"{tokens.unique:,}" else f"{line} ({forwarded} forwarded)"


def _accuracy_table(summary: SensitivitySummary, shots: int | None, full: bool) -> Table:
    sets, permutations = summary.accuracy.shape
    rows: list[Sequence[str]] = [
        ("mean", number(summary.mean), f"standard error {number(summary.mean_se)}, clustered by query"),
        ("best ordering", *_ordering(summary.best)),
        ("5 % ordering", number(summary.low_tail.accuracy), "one ordering in 20 is no better than this"),
        ("worst ordering", *_ordering(summary.worst)),
    ]
    missing = ", ".join(f"{name} {share:.2%}" for name, share in summary.missing.items() if share) or "none"
    if full or summary.dropped or missing != "none":
        rows.append(("queries left out", f"{summary.dropped:.1%}", "not ok in some cell"))
        rows.append(("answers missing", f"{summary.missing_total:.1%}", missing))
    if full and summary.near_ties is not None:
        rows.append(("near-ties", f"{summary.near_ties:.2%}", "two best labels within 1e-4 nats"))
    title = f"Accuracy{_at(shots)}: {sets} sets x {permutations} permutations, {summary.num_queries} queries"
    return Table(title, ("", "", ""), rows, texts=(2,))


def _spread_table(summary: SensitivitySummary, shots: int | None, full: bool) -> Table:
    """Every estimate with the interval that belongs to it on the line below."""
    rows: list[Sequence[str]] = []
    estimators = {"mean_std": "mean of std (as printed)", "rms": "root mean square (RMS)"}
    if not full and summary.jackknife is not None and summary.effects is not None:
        del estimators["rms"]
    for estimator, name in estimators.items():
        spread = summary.spreads[estimator]
        rows.append((name, number(spread.order), number(spread.selection), number(spread.ratio)))
        if estimator == "mean_std" and summary.jackknife is not None:
            rows.append(("  95 %, jackknife", "", "", interval_words(summary.jackknife)))
        if estimator == "rms" and summary.intervals is not None:
            rows.append(("  95 %, generalised", *(interval_words(interval) for interval in summary.intervals)))
    if summary.effects is not None:
        rows.append(("RMS without item noise", *(number(effect.estimate) for effect in summary.effects)))
        rows.append(("  95 %, generalised", *(interval_words(effect) for effect in summary.effects)))
    header = ("sensitivity of accuracy", "to order", "to selection", "r = sel. / order")
    return Table(f"Order against selection{_at(shots)}", header, rows)


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


def _token_table(tokens: Tokens) -> Table:
    rows = [
        ("prompt by prompt", f"{tokens.naive:,}", ""),
        ("distinct", f"{tokens.unique:,}", f"{tokens.saving:.1f} times fewer: shared prefixes counted once"),
        ("forwarded", _forwarded(tokens), "sent through the model, in all sessions"),
    ]
    return Table("Tokens, for all k", ("", "", ""), rows, texts=(2,))


def _forwarded(tokens: Tokens) -> str:
    return f"{tokens.forwarded:,}" if tokens.complete else f"at least {tokens.forwarded:,}"


def _at(shots: int | None) -> str:
    return "" if shots is None else f" at k = {shots}"


def _ordering(ordering: Ordering) -> tuple[str, str]:
    return number(ordering.accuracy), f"set {ordering.set}, permutation {ordering.permutation}"
