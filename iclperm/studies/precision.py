"""What a run that grew until something was known says of that: asked for, reached or not, spent, and what fixed sizes
would have taken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from iclperm.base.help import fields_in_help
from iclperm.report.notebook import ShownFindings
from iclperm.report.parts import Plot, Table, interval_words, number, percent, plain
from iclperm.stats.intervals import Interval
from iclperm.stats.sizing import LEVEL

if TYPE_CHECKING:
    from iclperm.runs.run import FinishedRun

ASIDE = "precision"
"""Its key in report.json."""


class LookedAt(NamedTuple):
    """What was known after a wave."""

    sets: int
    """S after the wave."""
    permutations: int
    """P after it."""
    queries: int
    """Test queries after it."""
    interval: Interval
    """Of the quantity; holds the truth at its level although the run stopped by it."""

    @property
    def half_width(self) -> float:
        """Of the interval; NaN where nothing bounds it."""
        return (self.interval.high - self.interval.low) / 2


@fields_in_help
@dataclass(frozen=True, repr=False)
class ReachedPrecision(ShownFindings):
    """How a run came to stop."""

    quantity: str
    """What was to be known."""
    wanted: float
    """The half-width that was asked for."""
    waves: tuple[LookedAt, ...]
    """What was known after each."""
    is_reached: bool
    """Whether the last interval is short enough; else the run is as large as it may be."""
    computed_level: float
    """Level of the intervals as they are computed, so that they hold at 95 % although the run stops by them."""
    tokens: int
    """Distinct tokens of the run."""
    most: tuple[int, int, int]
    """The most sets, permutations and queries that the study allows."""
    tokens_of_most: int
    """Distinct tokens of these, which a study without the key asks."""
    fixed: tuple[int, int, int] | None
    """The cheapest sizes that would do with 80 % chance, had the components of this run been known beforehand; None
    where even the most would not."""
    tokens_of_fixed: int | None
    """About their distinct tokens."""

    @property
    def warnings(self) -> Sequence[str]:
        """That other intervals take the sizes as fixed."""
        return [
            f"the run stopped by its interval of {self.quantity}, which allows for that; every other interval here "
            "takes the sizes as fixed beforehand"
        ]

    def conclusion(self) -> list[str]:
        """See `Findings`."""
        last = self.waves[-1]
        waves = "1 wave" if len(self.waves) == 1 else f"{len(self.waves)} waves"
        asked = f"{self.quantity} \N{PLUS-MINUS SIGN} {self.wanted:g}"
        sizes = f"{last.sets} sets x {last.permutations} permutations x {last.queries:,} queries"
        half = "is not bounded"
        if not math.isnan(last.half_width):
            half = f"is known to \N{PLUS-MINUS SIGN} {last.half_width:.3g}"
        if self.is_reached:
            told = f"Asked for {asked}: reached after {waves}, with {sizes}; it {half}."
        else:
            told = f"Asked for {asked}: not reached with {sizes}, the most this study allows; it {half}. Allow more."
        return [told, self._cost()]

    def tables(self, full: bool) -> list[Table]:
        """The waves."""
        del full
        rows = [
            (
                str(place),
                *(f"{size:,}" for size in wave[:3]),
                number(wave.interval.estimate),
                interval_words(wave.interval),
                number(wave.half_width),
            )
            for place, wave in enumerate(self.waves, start=1)
        ]
        header = ("wave", "sets", "permutations", "queries", self.quantity, f"{LEVEL:.0%} interval", "half-width")
        caption = (
            f"Asked for is a half-width of {self.wanted:g}. Intervals are computed at {100 * self.computed_level:g} %, "
            f"so that the last holds at {LEVEL:.0%} although the run stops where it is short."
        )
        title = f"Waves, until {self.quantity} is known to \N{PLUS-MINUS SIGN} {self.wanted:g}"
        return [Table(title, header, rows, caption=caption)]

    def plots(self) -> dict[str, Plot]:
        """None."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        content: dict[str, Any] = plain(self)
        return content | {"conclusion": self.conclusion()}

    def _cost(self) -> str:
        share = percent(self.tokens / self.tokens_of_most)
        most = " x ".join(f"{size:,}" for size in self.most)
        told = f"It asked {self.tokens:,} distinct tokens, {share} of the {self.tokens_of_most:,} of all {most}"
        if self.fixed is None or self.tokens_of_fixed is None:
            return f"{told}; by the components found, no size within these would do."
        sizes = " x ".join(f"{size:,}" for size in self.fixed)
        return (
            f"{told}; the cheapest sizes fixed beforehand by somebody who knew the components, {sizes}, have about "
            f"{self.tokens_of_fixed:,}."
        )


def findings(run: FinishedRun) -> ReachedPrecision:
    """The findings of a run that grew until something was known."""
    wanted = run.study.wanted
    assert wanted is not None
    known = run.looks[-1]["known"]
    seen = [
        LookedAt(before["sets"], before["permutations"], before["queries"], _interval(after["known"]))
        for before, after in zip([look["extent"] for look in run.looks], run.looks[1:], strict=False)
    ]
    tokens, fixed = run.report.tokens_unique, known["fixed"]
    return ReachedPrecision(
        quantity=wanted.words,
        wanted=wanted.half_width,
        waves=tuple(seen),
        is_reached=bool(known["reached"]),
        computed_level=float(known["level"]),
        tokens=tokens,
        most=tuple(known["most"]["sizes"]),
        tokens_of_most=int(known["most"]["tokens"]),
        fixed=None if fixed is None else tuple(fixed["sizes"]),
        tokens_of_fixed=None if fixed is None else round(fixed["share"] * tokens),
    )


def _interval(known: dict[str, Any]) -> Interval:
    ends = {name: math.nan if end is None else float(end) for name, end in known["look"].items()}
    return Interval(**ends, level=LEVEL)
