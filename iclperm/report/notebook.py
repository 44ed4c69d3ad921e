"""What a notebook shows of a run: its tables and sentences as HTML of their own, in which data is text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from iclperm.report.parts import Table


def summary_html(head: Sequence[str], tables: Iterable[Table], conclusion: Sequence[str], notes: Sequence[str]) -> str:
    """The first line in bold, the others under it; then tables, the conclusion, and what should be known before it."""
    title, *others = head
    parts = [f"<p><strong>{escape(title)}</strong>{''.join(f'<br>{escape(line)}' for line in others)}</p>"]
    parts += map(_table_html, tables)
    parts += [f"<p>{escape(line)}</p>" for line in conclusion]
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
