"""The figure of one block of the benchmark: seconds, tokens and memory of each contender."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from iclperm.bench.rows import Row
from iclperm.bench.table import compared, where, why_not_quoted
from iclperm.report import figures
from iclperm.report.parts import Plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OURS = "iclperm"
_PANELS: tuple[tuple[str, Callable[[Row], float], str], ...] = (
    ("seconds", lambda row: statistics.median(row.whole_seconds), "{:.3g}"),
    ("{unit} tokens forwarded", lambda row: row.tokens_forwarded, "{:.3g}"),
    ("GB of memory at most", lambda row: (row.gpu_memory_bytes or row.memory_bytes or 0) / 1e9, "{:.2g}"),
)


def block_plot(rows: Sequence[Row]) -> Plot | None:
    """Of the rows of one block; None where iclperm or all others have no figure to show."""
    told = [row for row in rows if row.seconds and row.agrees and row.failure is None]
    if len(told) < 2 or all(row.contender != _OURS for row in told):
        return None
    told.sort(key=lambda row: (row.contender != _OURS, statistics.median(row.whole_seconds)))
    return Plot((7.2, 1.3 + 0.3 * len(told)), partial(_draw, told), caption="Seconds, tokens and memory of each.")


def _draw(rows: Sequence[Row], figure: Figure) -> None:
    width, height = figure.get_size_inches()
    names, places = [row.contender for row in rows], list(range(len(rows), 0, -1))
    wide = (width - 1.25) / len(_PANELS) - 0.3
    for number, (what, value, form) in enumerate(_PANELS):
        axes = figures.placed(figure, 1.05 + number * (wide + 0.3), 0.4, wide, height - 1.05)
        values = [value(row) for row in rows]
        if "{unit}" in what:
            unit, size = ("thousand", 1e3) if max(values) < 1e6 else ("million", 1e6)
            what, values = what.format(unit=unit), [each / size for each in values]
        colours = [figures.ORANGE if row.contender == _OURS else figures.GREY for row in rows]
        axes.barh(places, values, height=0.62, color=colours)
        for place, each in zip(places, values, strict=True):
            axes.text(each + 0.02 * max(values), place, form.format(each) if each else "?", va="center", fontsize=7.5)
        axes.set_xlim(0, 1.28 * max([*values, 1e-9]))
        axes.set_yticks(places, figures.figure_words(names) if number == 0 else [""] * len(rows))
        axes.set_xlabel(what)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    first = rows[0]
    line = f"{first.prompts:,} prompts, {first.model}, {first.dtype}, {where(first)}; medians of {len(first.seconds)}"
    doubt = ", which are not to be quoted: see the table" if compared(rows) and why_not_quoted(rows) else ""
    figures.head(figure, f"{first.case}: the same answers by each", line + doubt)
