"""What missing answers leave open: said first where there are many, and where they could overturn a conclusion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.report.parts import percent, spread_in_points, with_bounds
from iclperm.stats.intervals import Interval, side_of
from iclperm.stats.sensitivity import query_weights
from iclperm.studies.sensitivity_summary import Extreme, SensitivitySummary
from iclperm.study.states import NOT_ASKED, OK, name_of

MANY = 0.02
"""Share of queries left out, or of answers missing, from which a report begins with them."""


class Missing(NamedTuple):
    """How many answers of a table are not there; shares are by weight."""

    answers: float
    """Share of all answers."""
    left_out: float
    """Share of the queries without an answer in any cell: nothing is said about them."""
    incomplete: float
    """Share of the queries that lack an answer in some cell."""
    by_state: Mapping[str, float]
    """Share of all answers in each state but ok."""

    def first_line(self) -> str | None:
        """What a report begins with; None where little is missing."""
        if max(self.answers, self.left_out) <= MANY:
            return None
        states = ", ".join(f"{name} {percent(share)}" for name, share in self.by_state.items() if share)
        out = (
            f", and {percent(self.left_out)} of the queries have none at all and are left out" if self.left_out else ""
        )
        return (
            f"{percent(self.answers)} of the answers are missing ({states}){out}: if what is missing has to do with "
            "whether it would have been right, every number here is off by that."
        )


def missing_of(state: npt.ArrayLike | None, weights: npt.ArrayLike | None = None) -> Missing:
    """Of states [..., Q], 0 = ok, with weights [Q]."""
    states = np.asarray([[0]] if state is None else state)
    if not states.any():
        return Missing(0.0, 0.0, 0.0, {})
    weight = query_weights(weights, states.shape[-1])
    share = weight / weight.sum()
    cells = states.reshape(-1, states.shape[-1])
    lacks = np.zeros(cells.shape[1], np.int64)
    by_code: dict[int, float] = {}
    for code in (int(code) for code in np.unique(cells) if code):
        of_query = np.count_nonzero(cells == code, axis=0)
        lacks += of_query
        by_code[code] = float(share @ of_query) / len(cells)
    named = {name_of(code): value for code, value in by_code.items()}
    return Missing(sum(by_code.values()), float(share[lacks == len(cells)].sum()), float(share[lacks > 0].sum()), named)


def missing_of_asked(state: npt.NDArray[np.uint8], weights: npt.ArrayLike) -> Missing:
    """The same of states [..., Q] in which some cells were never asked; these are not missing, and no query is left
    out for them."""
    share = np.asarray(weights, dtype=np.float64) * (state != NOT_ASKED)
    total = float(share.sum()) or 1.0
    codes = [int(code) for code in np.unique(state) if code not in (OK, NOT_ASKED)]
    named = {name_of(code): float(share[state == code].sum()) / total for code in codes}
    return Missing(sum(named.values()), 0.0, 0.0, named)


def filled_words(share: float) -> str:
    """What is to be known of a table in which `share` of the answers was filled in (`stats.incomplete.filled`)."""
    return (
        f"{share:.1%} of the answers are missing and were taken as their query and ordering lead to expect: errors and "
        "tests are too sure by about that share"
    )


def overturned(summary: SensitivitySummary) -> list[str]:
    """A sentence where the missing answers, all wrong or all right, would change what is concluded of order and choice;
    nothing where they would not.

    Missing at random is an assumption that no data can prove; these two are what it could hide at worst, as far as one
    rule for all missing answers goes.
    """
    if summary.if_wrong is None or summary.if_right is None or summary.quoted is None:
        return []
    measured = _verdict(summary.quoted, None if summary.effects is None else summary.effects.ratio)
    lines = []
    for word, extreme in (("wrong", summary.if_wrong), ("right", summary.if_right)):
        if _verdict(extreme.ratio, extreme.free) != measured or _is_outside(summary, extreme):
            order, choice = (spread_in_points(effect.estimate) for effect in (extreme.order, extreme.selection))
            lines.append(
                f"if every missing answer were {word}, order would move accuracy by {order}, choice by {choice}, and r "
                f"would be {with_bounds(extreme.ratio)}"
            )
    if not lines:
        return []
    return [f"The missing answers ({percent(summary.missing_total)}) could overturn this: {'; '.join(lines)}."]


def _verdict(quoted: Interval, free: Interval | None) -> int:
    """Which of order and choice matters more: -1, 1, or 0 where that stays open."""
    side = side_of(quoted, 1)
    return side if free is None or side_of(free, 1) == side else 0


def _is_outside(summary: SensitivitySummary, extreme: Extreme) -> bool:
    """Whether an effect at an extreme lies outside its measured interval."""
    measured: Any = summary.effects if summary.effects is not None else summary.intervals
    pairs = ((measured.order, extreme.order), (measured.selection, extreme.selection))
    return any(not found.low <= at.estimate <= found.high for found, at in pairs)
