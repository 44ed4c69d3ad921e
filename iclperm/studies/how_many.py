"""Which number of demonstrations to use, as far as a curve can tell: a sentence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from iclperm.report.parts import listed
from iclperm.stats.paired import holm
from iclperm.stats.plateau import Overall
from iclperm.stats.sensitivity import FloatArray


def how_many(shots: Sequence[int], mean: FloatArray, to_last: Sequence[Overall], level: float) -> str:
    """The number with the highest of the means [K], and which are shown to be worse or better than the largest.

    `to_last` [K - 1] are the changes from every number to the largest (`stats.plateau.averages_to_last`).
    """
    others, last, best = shots[:-1], shots[-1], int(np.argmax(mean))
    is_shown = np.asarray(holm([found.p_different for found in to_last])) <= level
    rises = np.array([found.error.mean > 0 for found in to_last])
    told = {
        "shown to be worse": is_shown & rises,
        "shown to be better": is_shown & ~rises,
        "not told from it": ~is_shown,
    }
    verdicts = ", ".join(f"k = {_runs(others, among)} {words}" for words, among in told.items() if among.any())
    if not is_shown.any():
        verdicts = "none of the others is told from it; more sets, orders and queries would tell"
    lead = "" if best == len(others) else ", which as the best of several looks better than it is"
    return (
        f"How many: the mean is highest at k = {shots[best]}{lead}. Against k = {last}: {verdicts} (Holm, {level:.0%})."
    )


def _runs(shots: Sequence[int], among: npt.NDArray[np.bool_]) -> str:
    """Those of the numbers that are among some; three or more neighbours as "0 to 5"."""
    parts: list[list[int]] = []
    for place in np.flatnonzero(among).tolist():
        if parts and place == parts[-1][-1] + 1:
            parts[-1].append(place)
        else:
            parts.append([place])
    words = []
    for part in parts:
        ends = [str(shots[part[0]]), str(shots[part[-1]])]
        words += [" to ".join(ends)] if len(part) > 2 else list(dict.fromkeys(ends))
    return listed(words)
