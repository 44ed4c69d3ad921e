"""What a sensitivity study says at one number of shots: the sentences made of its numbers."""

from __future__ import annotations

import math

import numpy as np

from iclperm.report.parts import percent, spread_in_points, spread_with_bounds, with_bounds
from iclperm.stats.intervals import possible, side_of
from iclperm.studies.bearing import Bearing, Reason, covers_everything
from iclperm.studies.sensitivity_summary import SensitivitySummary

_MOST_PRACTICAL = 1_000  # sets, and permutations, beyond which a number of them is no advice


def conclusion(summary: SensitivitySummary, shots: int | None = None, bearing: Bearing | None = None) -> list[str]:
    """The result in plain sentences: what order and choice of `shots` demonstrations do, and whether r differs from 1.

    The movements are free of item noise where the design allows it; r is the one to quote (`SensitivitySummary.quoted`)
    and is called different from 1 only where taking out the item noise leaves it so. Where `bearing` has a reason
    against it, nothing is concluded.
    """
    found = Bearing() if bearing is None else bearing
    if shots == 0:
        return [f"At k = 0 there are no demonstrations to order or to choose; accuracy is {percent(summary.mean)}."]
    if summary.accuracy.size > 1 and np.ptp(summary.accuracy) == 0:
        if not found.can_conclude:
            return found.told([])
        at = "" if shots is None else f"At k = {shots}, "
        return [
            f"{at}all {summary.accuracy.size} orderings have the accuracy {percent(summary.mean)}: how far order or "
            "choice moves it on other queries is not known."
        ]
    return found.told([_movements(summary, shots), *_verdict(summary), *_dealt(summary)])


def interval_reasons(summary: SensitivitySummary) -> list[Reason]:
    """A reason where an effect free of item noise has an interval that holds all that a spread of accuracies can be."""
    effects = summary.effects
    if effects is None:
        return []
    named = {"order": effects.order, "choice": effects.selection}
    open_ones = [name for name, (_, low, high, _) in named.items() if covers_everything(low, high, "spread")]
    if not open_ones:
        return []
    words = f"how far {' and '.join(open_ones)} {'moves' if len(open_ones) == 1 else 'move'} accuracy is not bounded"
    return [Reason("interval", words, "more sets, permutations and queries")]


def _dealt(summary: SensitivitySummary) -> list[str]:
    """How orders were dealt, where each is no draw of its own."""
    if summary.design is None:
        return []
    if summary.design.startswith("all "):
        return [f"Orders are {summary.design}: intervals are for other sets and queries."]
    return [
        f"Orders are {summary.design}, dealt together: intervals take these, not single orders, for what was drawn."
    ]


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
        return spread_with_bounds(getattr(possible(summary.effects), field))
    return spread_in_points(getattr(summary.printed, field))


def _verdict(summary: SensitivitySummary) -> list[str]:
    """What r says, and which r it is; nothing where nothing bounds it."""
    r, free = summary.quoted, None if summary.effects is None else summary.effects.ratio
    if r is None:
        return []
    if summary.blocks is not None:
        free = None  # it is the quoted one
    name = (
        f"free of the noise of {summary.num_queries:,} queries, {summary.interval_method}"
        if summary.blocks is not None
        else "as printed in arXiv 2511.09700, jackknife"
        if r == summary.jackknife
        else f"root mean square, {summary.interval_method}"
    )
    verdict, side = f"r = choice / order = {with_bounds(r)}", side_of(r, 1)
    if side == 0:
        verdict += f" cannot be told from 1: which of the two matters more stays open; {_remedy(summary)}."
    elif free is not None and side_of(free, 1) != side:
        verdict += (
            " excludes 1, but without item noise r cannot be told from 1: which of the two matters more stays open."
        )
    else:
        larger, smaller = ("order", "choice") if side < 0 else ("choice", "order")
        verdict += f" can be told from 1: the {larger} matters more than the {smaller}."
    quote = f"This is the r to quote ({name} interval)"
    if free is None or math.isnan(free.low) or math.isnan(free.estimate):
        return [verdict, f"{quote}."]
    return [verdict, f"{quote}; beside it, free of the noise of {summary.num_queries:,} queries: {with_bounds(free)}."]


def _remedy(summary: SensitivitySummary) -> str:
    if summary.blocks is not None:
        return "more sets and permutations would narrow it"
    needed = summary.needed
    if summary.effects is not None and math.isnan(summary.effects.ratio.low):
        return (
            f"nor does either stand out from the noise of {summary.num_queries:,} queries: more of these first, before "
            "a number of sets and permutations can be named"
        )
    if needed is None or needed.num_sets > _MOST_PRACTICAL:
        return "no practical design would settle it at this estimate"
    if needed.num_sets <= min(summary.accuracy.shape):
        return "more sets and permutations would narrow it"
    return (
        f"if r (root mean square, of accuracies over as many queries) is {needed.ratio:.2f}, about "
        f"{needed.num_sets:,} sets x {needed.num_permutations:,} permutations would settle it"
    )
