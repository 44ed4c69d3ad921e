"""What every kind of study makes of a run: sentences, tables, figures and JSON, before anything renders them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

from iclperm.errors import printable
from iclperm.stats.intervals import CutToPossible

if TYPE_CHECKING:
    import rich.console
    from matplotlib.figure import Figure

_LONGEST_NAME = 44  # letters that keep their line
_CAPTION_WIDTH = 100  # letters


class Table(NamedTuple):
    """A table as plain data; a terminal shows it by rich."""

    title: str
    header: Sequence[str]
    """Names of the columns, the first that of the rows; all empty hides the line."""
    rows: Sequence[Sequence[str]]
    texts: Sequence[int] = ()
    """Columns that hold words, not numbers."""
    caption: str = ""
    data_texts: Sequence[int] = ()
    """Columns that hold texts of the data, which may not be handed on with the numbers."""

    def without_texts(self) -> Table:
        """The same table without the columns that hold texts of the data."""
        kept = [column for column in range(len(self.header)) if column not in self.data_texts]
        return self._replace(
            header=[self.header[column] for column in kept],
            rows=[[row[column] for column in kept] for row in self.rows],
            texts=[kept.index(column) for column in self.texts if column in kept],
            data_texts=(),
        )

    def __rich__(self) -> rich.console.Group:
        """Wraps where it is narrow and cuts nothing: names that are not very long keep their line, values break at
        spaces only."""
        from rich import box
        from rich.console import Group
        from rich.constrain import Constrain
        from rich.table import Table as Rendered
        from rich.text import Text

        header = [printable(name) for name in self.header]
        rows = [[printable(cell) for cell in row] for row in self.rows]
        rendered = Rendered(
            title=Text(printable(self.title)), title_justify="left", box=box.SIMPLE_HEAD, show_edge=False
        )
        rendered.title_style, rendered.padding, rendered.show_header = "bold", (0, 1, 0, 0), any(self.header)
        # Text, or rich would take brackets for its markup
        longest = max((len(row[0]) for row in rows), default=0)
        is_long = longest > _LONGEST_NAME
        rendered.add_column(
            Text(header[0]), no_wrap=not is_long, overflow="fold", min_width=min(longest, _LONGEST_NAME)
        )
        for column, name in enumerate(header[1:], start=1):
            words = (word for cell in [name, *(row[column] for row in rows)] for word in cell.split(" "))
            justify: Literal["left", "right"] = "left" if column in self.texts else "right"
            rendered.add_column(Text(name), justify=justify, overflow="fold", min_width=max(map(len, words)))
        for row in rows:
            rendered.add_row(*map(Text, row))
        if not self.caption:
            return Group(rendered)
        # not the table's own caption, which wraps at the width of a table that may be narrow, or wider than the screen
        return Group(rendered, Constrain(Text(printable(self.caption), style="table.caption"), _CAPTION_WIDTH))


class Plot(NamedTuple):
    """A figure that is yet to be drawn."""

    size: tuple[float, float]
    """Inches."""
    draw: Callable[[Figure], None]
    charts: Callable[[], list[dict[str, Any]]] | None = None
    """The same, panel by panel, as Vega-Lite specifications for the page (`iclperm.report.charts`)."""
    tall: Callable[[float], float] | None = None
    """Its height in inches at another width; None where it is not laid out for widths below its own."""
    least: float = 0.0
    """Inches of width below which its letters have no room."""
    caption: str = ""
    """What it shows, for a page; the stem of its file where there is none."""


class Findings(Protocol):
    """A kind's section of the report."""

    @property
    def warnings(self) -> Sequence[str]:
        """What should be known before the numbers are believed."""
        ...

    def conclusion(self) -> list[str]:
        """The result in plain sentences."""
        ...

    def tables(self, full: bool) -> list[Table]:
        """Most important first; without ``full`` the brief ones."""
        ...

    def plots(self) -> dict[str, Plot]:
        """By the stem of the file."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Every number that is shown, JSON-safe."""
        ...


def plain(value: Any) -> Any:
    """`value` as lists, dictionaries, strings, booleans and finite numbers; NaN and infinity become None."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class Bounded(Protocol):
    """An estimate between bounds, as of an interval or a correlation; the bounds are NaN where nothing bounds it."""

    @property
    def estimate(self) -> float: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


def number(value: float, digits: int = 4) -> str:
    """`digits` decimals, or a dash where there is no number."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def signed(value: float, digits: int = 4) -> str:
    """As `number`, with a plus or a minus in front."""
    return "-" if math.isnan(value) else f"{value:+.{digits}f}"


def interval_words(interval: Bounded, digits: int = 4, sign: Literal["", "+"] = "") -> str:
    """The two ends of an interval, or a dash where nothing is bounded; `sign` writes a plus too."""
    low, high = (f"{end:{sign}.{digits}f}" for end in (interval.low, interval.high))
    return "-" if math.isnan(interval.low) else f"{low} to {high}{_mark(interval)}"


def with_bounds(found: Bounded, digits: int = 2, sign: Literal["", "+"] = "") -> str:
    """An estimate, and its interval in brackets: "0.69 [0.34 to 1.40]"."""
    ends = f"{found.low:{sign}.{digits}f} to {found.high:{sign}.{digits}f}"
    return f"{found.estimate:{sign}.{digits}f} [{ends}{_mark(found)}]"


def spread_with_bounds(found: Bounded) -> str:
    """A standard deviation in a sentence, with its interval where it is bounded: "about ±8.6 points [6.9 to 13.7]"."""
    if math.isnan(found.low):
        return spread_in_points(found.estimate)
    return f"{spread_in_points(found.estimate)} [{100 * found.low:.1f} to {100 * found.high:.1f}{_mark(found)}]"


def _mark(found: object) -> str:
    """What says that an interval was cut to what is possible (`iclperm.stats.intervals.bounded`)."""
    return " (bounded)" if isinstance(found, CutToPossible) else ""


def percent(share: float) -> str:
    """A share of 1 in per cent: "85.1 %"."""
    return f"{100 * share:.1f} %"


def percent_with_bounds(found: Bounded) -> str:
    """A share in per cent, with its interval in brackets where it is bounded."""
    bounds = "" if math.isnan(found.low) else f" [{100 * found.low:.1f} to {100 * found.high:.1f}{_mark(found)}]"
    return percent(found.estimate) + bounds


def points(size: float) -> str:
    """A difference of shares, in points: "8.6 points"."""
    return f"{100 * size:.1f} points"


def points_with_bounds(found: Bounded, unit: str = " points") -> str:
    """A gain in points with its sign, and its interval in brackets where it is bounded; a dash where it is unknown."""
    if math.isnan(found.estimate):
        return "-"
    bounds = "" if math.isnan(found.low) else f" [{100 * found.low:+.1f} to {100 * found.high:+.1f}{_mark(found)}]"
    return f"{100 * found.estimate:+.1f}{unit}{bounds}"


def spread_in_points(spread: float) -> str:
    """A standard deviation over several sets or permutations in a sentence; NaN is one over a single one."""
    return "an unknown amount, as there is only one" if math.isnan(spread) else f"about ±{points(spread)}"


def p_value(p: float, least: float = 0.001) -> str:
    """A p-value in a table, three decimals; below `least` only that it is, and a dash where there was no test."""
    return "-" if math.isnan(p) else "<0.001" if p < least else f"{p:.3f}"


def p_words(p: float) -> str:
    """A p-value in a sentence: "p = 0.0123"."""
    return "p < 0.0001" if p < 0.0001 else f"p = {p:.4f}"


def in_one_line(text: str) -> str:
    """Text of data as one line that cannot steer a terminal."""
    return printable(text).replace("\n", "\\n")


def listed(words: Sequence[str]) -> str:
    """Words as in a sentence: "sets, permutations and queries"."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def evenly(count: int, most: int | None) -> list[int]:
    """Places of about `most` of `count` rows (None: of all), at equal distances, the last always."""
    return list(range(count))[:: -math.ceil(count / (most or count))][::-1]
