"""What findings say about accuracy, said of a mean grade instead: one place where every word passes that is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from iclperm.report.markup import Sheet
from iclperm.report.notebook import summary_html
from iclperm.report.parts import Findings, Plot, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Said = Callable[[str], str]
_TITLES = ("title", "text", "description")  # of a Vega-Lite specification, where they are words


@dataclass(frozen=True, repr=False)
class Reworded:
    """Findings in other words; their numbers, the keys of their JSON and whatever else they have are the same."""

    findings: Findings
    said: Said

    def __getattr__(self, name: str) -> Any:
        if name in ("findings", "said"):  # of a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self.findings, name)

    def __repr__(self) -> str:
        return self.said(repr(self.findings))

    def _repr_html_(self) -> str:
        return summary_html([type(self.findings).__name__], self)

    @property
    def warnings(self) -> list[str]:
        """See `Findings`."""
        return [*map(self.said, self.findings.warnings)]

    def conclusion(self) -> list[str]:
        """See `Findings`."""
        return [*map(self.said, self.findings.conclusion())]

    def tables(self, full: bool) -> list[Table]:
        """See `Findings`."""
        return [reworded_table(table, self.said) for table in self.findings.tables(full)]

    def plots(self) -> dict[str, Plot]:
        """See `Findings`."""
        return {stem: reworded_plot(plot, self.said) for stem, plot in self.findings.plots().items()}

    def to_dict(self) -> dict[str, Any]:
        """See `Findings`."""
        return {key: _values(value, self.said) for key, value in self.findings.to_dict().items()}


def sort_of(findings: Findings) -> type[Any]:
    """The class of findings, in whatever words they are."""
    return type(findings.findings if isinstance(findings, Reworded) else findings)


def reworded_plot(plot: Plot, said: Said) -> Plot:
    """The same figure in other words."""

    def draw(figure: Figure) -> None:
        from matplotlib.text import Text

        plot.draw(figure)
        for text in figure.findobj(Text):
            assert isinstance(text, Text)
            if (words := said(text.get_text())) != text.get_text():
                text.set_text(words)

    charts = plot.charts
    found = None if charts is None else lambda: [reworded_chart(one, said) for one in charts()]
    return plot._replace(draw=draw, charts=found, caption=said(plot.caption))


def reworded_sheet(sheet: Sheet, said: Said) -> Sheet:
    """The same table that can be taken away in other words."""
    return replace(
        sheet,
        title=said(sheet.title),
        caption=said(sheet.caption),
        columns=tuple(each._replace(name=said(each.name), group=said(each.group)) for each in sheet.columns),
        rows=tuple(tuple(said(cell) if isinstance(cell, str) else cell for cell in row) for row in sheet.rows),
        notes=tuple(map(said, sheet.notes)),
    )


def reworded_table(table: Table, said: Said) -> Table:
    """The same table in other words; texts of the data stay."""
    words = set(range(len(table.header))) - {*table.data_texts}
    rows = [[said(cell) if column in words else cell for column, cell in enumerate(row)] for row in table.rows]
    return table._replace(
        title=said(table.title), header=[*map(said, table.header)], rows=rows, caption=said(table.caption)
    )


def _values(value: Any, said: Said) -> Any:
    """JSON whose sentences are said in other words; a single word is a name that others look up."""
    if isinstance(value, Mapping):
        return {key: _values(entry, said) for key, entry in value.items()}
    if isinstance(value, str):
        return said(value) if " " in value else value
    return [_values(entry, said) for entry in value] if isinstance(value, Sequence) else value


def reworded_chart(value: Any, said: Said) -> Any:
    """A chart whose titles are said in other words, also those that a field gives by its name."""
    if isinstance(value, Mapping):
        found = {
            key: said(entry) if key in _TITLES and isinstance(entry, str) else reworded_chart(entry, said)
            for key, entry in value.items()
        }
        field = value.get("field")
        if isinstance(field, str) and "type" in value and "title" not in value and said(field) != field:
            found["title"] = said(field)
        return found
    return [reworded_chart(entry, said) for entry in value] if isinstance(value, list) else value
