"""What every kind of study makes of a run: sentences, tables, figures and JSON, before anything renders them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    import rich.table
    from matplotlib.figure import Figure

    from iclperm.stats import Interval


class Table(NamedTuple):
    """A table as plain data; a terminal shows it by rich."""

    title: str
    header: Sequence[str]
    """Names of the columns, the first that of the rows; all empty hides the line."""
    rows: Sequence[Sequence[str]]
    texts: Sequence[int] = ()
    """Columns that hold words, not numbers."""
    caption: str = ""

    def __rich__(self) -> rich.table.Table:
        """Wraps where it is narrow and cuts nothing: names keep their line, values break at spaces only."""
        from rich import box
        from rich.table import Table as Rendered
        from rich.text import Text

        rendered = Rendered(title=Text(self.title), title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
        rendered.title_style, rendered.padding, rendered.show_header = "bold", (0, 1, 0, 0), any(self.header)
        rendered.caption, rendered.caption_justify = Text(self.caption) if self.caption else None, "left"
        rendered.add_column(self.header[0], no_wrap=True, min_width=max((len(row[0]) for row in self.rows), default=0))
        for column, name in enumerate(self.header[1:], start=1):
            words = (word for cell in [name, *(row[column] for row in self.rows)] for word in cell.split(" "))
            justify: Literal["left", "right"] = "left" if column in self.texts else "right"
            rendered.add_column(name, justify=justify, overflow="fold", min_width=max(map(len, words)))
        for row in self.rows:
            rendered.add_row(*map(Text, row))  # Text, or rich would take brackets for its markup
        return rendered


class Plot(NamedTuple):
    """A figure that is yet to be drawn."""

    size: tuple[float, float]
    """Inches."""
    draw: Callable[[Figure], None]


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


def number(value: float) -> str:
    """Four decimals, or a dash where there is no number."""
    return "-" if math.isnan(value) else f"{value:.4f}"


def interval_words(interval: Interval) -> str:
    """The two ends of an interval, or a dash where nothing is bounded."""
    return "-" if math.isnan(interval.low) else f"{interval.low:.4f} to {interval.high:.4f}"
