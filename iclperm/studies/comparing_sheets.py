"""The tables of compared studies, to be taken away: models by tasks as arXiv 2511.09700 prints them, studies, tests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from iclperm.report.markup import Column, Sheet, Value
from iclperm.stats import Interval
from iclperm.studies.studied import Pair, Studied, matched_interval

_NOTHING = Interval(math.nan, math.nan, math.nan, 0.95)
_INTERVALS = (
    "In brackets 95 % intervals: of accuracy for other sets, permutations and queries; of the effects and of r "
    "free of item noise, generalised; of r as printed in arXiv 2511.09700, jackknife over sets and permutations."
)


def sheets(studies: Sequence[Studied], pairs: Sequence[Pair], warnings: Sequence[str] = ()) -> dict[str, Sheet]:
    """By name, the one for a paper first; that of models by tasks only where both are known of every study. All but
    that of tests carry the ``warnings``."""
    grid = [_by_task(studies)] if all(study.task and study.model for study in studies) else []
    warned = (replace(sheet, notes=tuple(warnings)) for sheet in (*grid, _of_studies(studies)))
    return {sheet.name: sheet for sheet in (*warned, _of_tests(studies, pairs))}


class _ModelRow(NamedTuple):
    """A row of the table of models by tasks; of two studies of one model and task the second has a row of its own."""

    model: str
    number: int


def _by_task(studies: Sequence[Studied]) -> Sheet:
    """Order and selection sensitivity and r of every model on every task."""
    tasks = list(dict.fromkeys(study.task for study in studies))
    rows: dict[_ModelRow, dict[str, Studied]] = {}
    for study in studies:
        number = 1
        while study.task in rows.get(_ModelRow(study.model, number), {}):
            number += 1
        rows.setdefault(_ModelRow(study.model, number), {})[study.task] = study
    is_mean = len(tasks) > 1 and any(len(found) == len(tasks) for found in rows.values())
    groups = [*tasks, *(["mean"] if is_mean else [])]
    columns = [Column("model", form="words")]
    for group in groups:
        columns += [Column("order", group), Column("selection", group), Column("r", group, digits=2)]
    shown: list[tuple[Value, ...]] = []
    for place in sorted(rows, key=lambda place: ([study.model for study in studies].index(place.model), place.number)):
        found = rows[place]
        values = [value for task in tasks for value in _printed(found.get(task))]
        if is_mean:
            values += _mean([found.get(task) for task in tasks])
        shown.append((f"{place.model} ({place.number})" if place.number > 1 else place.model, *values))
    shots = sorted({study.shots for study in studies if study.shots is not None})
    of_k = {k: ", ".join(study.name for study in studies if study.shots == k) for k in shots}
    told = ", ".join(f"{k} ({names})" if len(of_k) > 1 else str(k) for k, names in of_k.items()) or "not known"
    caption = (
        "Standard deviations of accuracy over permutations (order) and over sets (selection), and r = selection / "
        f"order, as printed in arXiv 2511.09700, item noise included; k = {told}, the largest of each study. A dash: "
        "no such study, or too few sets or permutations."
    )
    caption += " Mean: over all tasks, where they have one k; its r of the mean sensitivities." if is_mean else ""
    if any(place.number > 1 for place in rows):
        caption += " A number behind a model: a second study of the same model and task."
    return Sheet("sensitivity", "Order and selection sensitivity", caption, tuple(columns), tuple(shown))


def _printed(study: Studied | None) -> tuple[float, float, float]:
    if study is None:
        return math.nan, math.nan, math.nan
    return study.order, study.selection, study.ratio.estimate


def _mean(found: Sequence[Studied | None]) -> tuple[float, float, float]:
    """NaN unless every task has a study, all with one number of shots: means over other tasks, or over other numbers of
    demonstrations, are no numbers to compare."""
    known = [study for study in found if study is not None]
    if len(known) < len(found) or len({study.shots for study in known}) > 1:
        return math.nan, math.nan, math.nan
    order = sum(study.order for study in known) / len(known)
    selection = sum(study.selection for study in known) / len(known)
    return order, selection, selection / order if order > 0 else math.nan


def _of_studies(studies: Sequence[Studied]) -> Sheet:
    columns = (
        Column("study", form="words"),
        Column("task", form="words"),
        Column("model", form="words"),
        Column("S x P x Q", form="words"),
        Column("k", digits=0),
        Column("accuracy", is_bounded=True),
        Column("order", "sensitivity"),
        Column("selection", "sensitivity"),
        Column("order", "effect", is_bounded=True),
        Column("selection", "effect", is_bounded=True),
        Column("r", digits=2, is_bounded=True),
        Column("r, no noise", digits=2, is_bounded=True),
    )
    rows = tuple(
        (
            study.name,
            study.task,
            study.model,
            " x ".join(f"{size:,}" for size in study.shape if size),
            math.nan if study.shots is None else float(study.shots),
            study.mean,
            study.order,
            study.selection,
            study.order_effect,
            study.selection_effect,
            study.ratio,
            study.ratio_effect,
        )
        for study in studies
    )
    return Sheet("studies", "The studies side by side", _INTERVALS, columns, rows)


def _of_tests(studies: Sequence[Studied], pairs: Sequence[Pair]) -> Sheet:
    """Every test of every two, as `stats.compare` makes them."""
    columns = (
        Column("one", form="words"),
        Column("other", form="words"),
        Column("of", form="words"),
        Column("ratio", digits=2, is_bounded=True),
        Column("difference", form="signed", is_bounded=True),
        Column("p", form="p"),
        Column("Holm", form="p"),
    )
    caption = (
        "r: the ratio of one to the other; else one less the other. In brackets 95 % intervals (jackknife over "
        "sets and permutations, of accuracy over queries too). Effects are free of item noise. "
    )
    if any(test is not None for pair in pairs for test in pair.comparison.mcnemar):
        caption += (
            "These orderings: for other queries only, McNemar over orderings. Holm: over all tests of all pairs, "
            "McNemar's apart."
        )
    else:
        caption += "Holm: over all tests of all pairs."
    rows = tuple(row for pair in pairs for row in _tests(studies, pair))
    return Sheet("tests", "Differences between the studies", caption, columns, rows, num_names=3)


def _tests(studies: Sequence[Studied], pair: Pair) -> Iterator[tuple[Value, ...]]:
    names = studies[pair.first].name, studies[pair.second].name
    tested = {"r": pair.comparison.ratio, "r, no noise": pair.comparison.ratio_free}
    others = {name: test for name, test in pair.comparison.tests().items() if name != "ratio"}
    for name, test in (tested | others).items():
        words = f"{name} effect" if name in ("order", "selection") else name
        if studies[pair.first].shots is None and words.startswith("accuracy"):
            words = "accuracy"
        found = Interval(test.estimate, test.low, test.high, test.level)
        is_ratio = name in ("r", "r, no noise")
        yield (*names, words, *((found, _NOTHING) if is_ratio else (_NOTHING, found)), test.p_value, test.p_holm)
    for k, matched in zip(pair.comparison.shots, pair.comparison.mcnemar, strict=True):
        if matched is not None:
            words = f"accuracy at k = {k}, these orderings"
            yield (*names, words, _NOTHING, matched_interval(matched), matched.p_value, matched.p_holm)
