"""What a notebook shows of runs and findings: their tables and sentences as HTML of their own, in which data is text;
and what Python prints of them, which is short."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from html import escape
from pathlib import Path
from typing import Any

from iclperm.report.parts import Findings, Table, in_one_line


class ShownFindings:
    """Findings that Python prints as their conclusion and a notebook shows as their brief report; a base of dataclasses
    that have no ``repr`` of their own."""

    def __repr__(self: Findings) -> str:
        about = f"{type(self).__name__}; tables(True), plots() and to_dict() have the numbers"
        return "\n".join(map(in_one_line, [about, *self.conclusion(), *self.warnings]))

    def _repr_html_(self: Findings) -> str:
        return summary_html([type(self).__name__], self)


class ShownFields:
    """Facts that a notebook shows as a table of names and values; a base of dataclasses."""

    def _repr_html_(self) -> str:
        table = Table(type(self).__name__, ("", ""), list(_facts(self)), texts=(1,))
        return f'<div class="iclperm">{_table_html(table)}</div>'


def _facts(about: Any, within: str = "") -> Iterator[tuple[str, str]]:
    for field in fields(about):
        value = getattr(about, field.name)
        if is_dataclass(value):
            yield from _facts(value, f"{within}{field.name}.")
        elif value is not None:
            yield f"{within}{field.name}", _words(value)


def _words(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def prompt_html(lines: Sequence[str], text: str) -> str:
    """Lines about a prompt, and its text as it is."""
    head = "<br>".join(map(escape, lines))
    return f'<div class="iclperm"><p>{head}</p><pre style="white-space:pre-wrap">{escape(text)}</pre></div>'


def three_lines(first: str, second: str, folder: Path | None, more: str) -> str:
    """What Python prints of a finished study: two lines about it, and one of where it is and which methods tell
    ``more``."""
    place = "in memory only" if folder is None else f"in {folder}"
    return "\n".join(map(in_one_line, (first, second, f"{place}; {more} tell more")))


def summary_html(head: Sequence[str], found: Findings, notes: Sequence[str] = ()) -> str:
    """The first line in bold, the others under it; then the brief tables, the conclusion, and what should be known
    before it: the findings' warnings and ``notes``."""
    title, *others = head
    notes = [*found.warnings, *notes]
    parts = [f"<p><strong>{escape(title)}</strong>{''.join(f'<br>{escape(line)}' for line in others)}</p>"]
    parts += map(_table_html, found.tables(False))
    parts += [f"<p>{escape(line)}</p>" for line in found.conclusion()]
    if notes:
        parts.append(f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in notes)}</ul>")
    return f'<div class="iclperm">{"".join(parts)}</div>'


def _table_html(table: Table) -> str:
    def cell(words: str, column: int, tag: str = "td") -> str:
        side = "left" if column == 0 or column in table.texts else "right"
        return f'<{tag} style="text-align:{side}">{escape(words)}</{tag}>'

    def line(cells: Sequence[str], tag: str = "td") -> str:
        return f"<tr>{''.join(cell(words, column, tag) for column, words in enumerate(cells))}</tr>"

    head = f"<thead>{line(table.header, 'th')}</thead>" if any(table.header) else ""
    caption = f'<caption style="text-align:left">{escape(table.title)}</caption>'
    foot = f"<p><small>{escape(table.caption)}</small></p>" if table.caption else ""
    return f"<table>{caption}{head}<tbody>{''.join(map(line, table.rows))}</tbody></table>{foot}"
