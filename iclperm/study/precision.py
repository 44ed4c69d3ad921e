"""Precision in words: what a study is to know, and how well, as in "order_effect ± 0.01"."""

from __future__ import annotations

import math
import re
from typing import Literal, NamedTuple

Quantity = Literal["order_effect", "selection_effect", "r", "accuracy", "difference", "rank", "plateaus"]
RANKED = ("shapley", "marginal", "prefix", "member")
"""Scores of single demonstrations whose ranks can be asked for (`iclperm.stats.demonstrations`)."""
_FORMS = (
    re.compile(r"(order|selection)[ _]effect"),
    re.compile(r"(r)"),
    re.compile(r"(accuracy)(?: at (?:k ?= ?)?(\d+))?"),
    re.compile(r"(difference) (?:of )?(?:k ?= ?)?(\d+)(?: and |, ?| )(\d+)"),
    re.compile(r"(rank) (?:of )?(\w+)"),
    re.compile(r"(plateaus?)(?: from ((?:k ?= ?)?\d+(?:(?:, ?| and | )(?:k ?= ?)?\d+)*))?"),
)
_SIGN = re.compile(r"\s*(?:±|\+/?-)\s*")
_FORM = (
    '"order_effect +- 0.01", or selection_effect, r, accuracy, accuracy at 4, difference of 0 and 4, rank of shapley, '
    "each +- a half-width; plateaus, or plateaus from 4 and 8, +- a margin"
)


class Precision(NamedTuple):
    """A quantity and the half-width that its 95 % interval may have."""

    quantity: Quantity
    half_width: float
    """In units of accuracy 0..1; of ``r`` in units of r, of a rank in places; of plateaus the margin."""
    shots: tuple[int, ...] = ()
    """The numbers of demonstrations that it speaks of: of a difference two, of plateaus those from which they are
    looked for, or none for the usual ones; else one, or none for the largest."""
    score: str | None = None
    """Of a rank: one of `RANKED`."""

    @property
    def words(self) -> str:
        """What it is called in a sentence."""
        named = {"order_effect": "order effect", "selection_effect": "selection effect"}.get(self.quantity)
        if self.quantity == "accuracy":
            return f"accuracy at k = {self.shots[0]}" if self.shots else "accuracy"
        if self.quantity == "difference":
            return f"accuracy at k = {self.shots[1]} minus that at k = {self.shots[0]}"
        if self.quantity == "plateaus":
            return f"plateaus from k = {' and '.join(map(str, self.shots))}" if self.shots else "plateaus"
        return f"rank by {self.score}" if self.quantity == "rank" else named or "r without item noise"

    @property
    def is_of_verdicts(self) -> bool:
        """Whether it is known when every trajectory is shown to be flat or to change: nothing else is then as sure."""
        return self.quantity == "plateaus"

    @property
    def can_stop_a_run(self) -> bool:
        """Whether a run can be stopped by it: of a rank there is no interval that holds under peeking."""
        return self.quantity != "rank"


def parse_precision(given: str) -> Precision:
    """The precision that a text asks for; raises ValueError for a quantity or a half-width that there is not."""
    parts = _SIGN.split(given.strip(), maxsplit=1)
    if len(parts) != 2:
        raise ValueError(f"give {_FORM}")
    name, half = " ".join(parts[0].lower().split()), _number(parts[1])
    found = next((match for form in _FORMS if (match := form.fullmatch(name))), None)
    if found is None:
        raise ValueError(f"{parts[0]!r} is no quantity; give {_FORM}")
    kind, *others = found.groups()
    if kind in ("order", "selection"):
        wanted = Precision("order_effect" if kind == "order" else "selection_effect", half)
    elif kind == "rank":
        if others[0] not in RANKED:
            raise ValueError(f"{others[0]!r} is no score whose rank is known; give one of {', '.join(RANKED)}")
        wanted = Precision("rank", half, score=others[0])
    elif kind in ("plateau", "plateaus"):
        wanted = Precision(
            "plateaus", half, tuple(sorted({int(shots) for shots in re.findall(r"\d+", others[0] or "")}))
        )
    else:
        mean: Quantity = "r" if kind == "r" else "accuracy" if kind == "accuracy" else "difference"
        wanted = Precision(mean, half, tuple(int(shots) for shots in others if shots is not None))
    if wanted.quantity == "difference" and len(set(wanted.shots)) < 2:
        raise ValueError(
            "a difference is one of two numbers of demonstrations; give two, such as difference of 0 and 4"
        )
    most = {"r": math.inf, "rank": math.inf}.get(wanted.quantity, 0.5)
    if not 0 < half < most:
        raise ValueError(
            f"the half-width {parts[1].strip()} is not between 0 and {most:g}"
            + ("; accuracy goes from 0 to 1, so a point is 0.01" if most < 1 else "")
        )
    return wanted


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"the half-width {text.strip()!r} is no number; give one such as 0.02, which is 2 points of accuracy"
        ) from None
