"""Tables of numbers as Markdown for GitHub, as LaTeX with booktabs, and as CSV; every text from data is escaped.

Markdown and LaTeX hold the digits that a terminal shows, and an en dash where there is no number; CSV holds all digits,
the ends of intervals in columns of their own, and nothing where there is no number.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

from iclperm.errors import printable
from iclperm.report.parts import Bounded, Table, interval_words, number, p_value, signed

NOTHING = "\u2013"  # an en dash
Value = float | Bounded | str
"""A cell: a number, NaN where there is none; one with bounds; or words."""


class Column(NamedTuple):
    """A column of numbers or of words."""

    name: str
    group: str = ""
    """What stands above columns side by side; empty for none."""
    form: Literal["number", "signed", "p", "words"] = "number"
    digits: int = 4
    is_bounded: bool = False
    """Whether its numbers have bounds (`Bounded`)."""


@dataclass(frozen=True)
class Sheet:
    """A table of numbers that can be taken away: into a paper, a message or a program."""

    name: str
    """Of its file, and of its LaTeX label."""
    title: str
    caption: str
    columns: tuple[Column, ...]
    """Those that name the rows first."""
    rows: tuple[tuple[Value, ...], ...]
    num_names: int = 1
    """How many of the first columns name the rows; where LaTeX has no room for all columns side by side, each part of
    them begins with these."""
    notes: tuple[str, ...] = ()
    """What should be known before the numbers are believed; stands below in Markdown and LaTeX."""

    def table(self) -> Table:
        """As a terminal and a page show it."""
        header = [" ".join(part for part in (column.group, column.name) if part) for column in self.columns]
        rows = [[_cell(value, column, "-") for value, column in self._pairs(row)] for row in self.rows]
        texts = [place for place, column in enumerate(self.columns) if place and column.form == "words"]
        return Table(self.title, header, rows, texts=texts, caption=self.caption)

    def written(self, form: str) -> str:
        """As the content of a file; ``form`` is one of `FORMS`."""
        return FORMS[form](self)

    def _pairs(self, row: Sequence[Value]) -> list[tuple[Value, Column]]:
        return list(zip(row, self.columns, strict=True))

    def _markdown(self) -> str:
        names = [" ".join(part for part in (column.group, column.name) if part) for column in self.columns]
        lines = [names, ["---" if column.form == "words" else "---:" for column in self.columns]]
        lines[0] = list(map(markdown_text, lines[0]))
        lines += [
            [markdown_text(_cell(value, column, NOTHING)) for value, column in self._pairs(row)] for row in self.rows
        ]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        notes = "".join(f"\n- {markdown_text(note)}" for note in self.notes)
        return f"**{markdown_text(self.title)}**\n\n{body}\n\n{markdown_text(self.caption)}\n" + (
            notes and f"{notes}\n"
        )

    def _latex(self) -> str:
        lines = [
            r"% needs \usepackage{booktabs}",
            r"\begin{table}[t]",
            r"\centering\footnotesize\setlength{\tabcolsep}{3pt}",
            rf"\caption{{{latex_text(f'{self.title}. {self.caption}'.strip())}}}",
            rf"\label{{tab:{re.sub(r'[^A-Za-z0-9-]', '-', self.name)}}}",
        ]
        for places in self._blocks():
            lines += [r"\par\medskip"] if lines[-1] == r"\end{tabular}" else []
            lines += self._tabular(places)
        notes = [rf"\par\smallskip\raggedright\scriptsize {latex_text(note)}" for note in self.notes]
        return "\n".join([*lines, *notes, r"\end{table}"]) + "\n"

    def _tabular(self, places: Sequence[int]) -> list[str]:
        """Some of the columns."""
        columns = [self.columns[place] for place in places]
        rows = [[_latex_cell(row[place], self.columns[place]) for place in places] for row in self.rows]
        return [
            rf"\begin{{tabular}}{{@{{}}{''.join('l' if each.form == 'words' else 'r' for each in columns)}@{{}}}}",
            r"\toprule",
            *_groups(columns),
            f"{' & '.join(latex_text(column.name) for column in columns)} \\\\",
            r"\midrule",
            *(f"{' & '.join(row)} \\\\" for row in rows),
            r"\bottomrule",
            r"\end{tabular}",
        ]

    def _blocks(self) -> list[list[int]]:
        """The columns in blocks as wide as a column of a paper, each with the names of the rows; a group that has room
        in one stays whole."""
        names = list(range(self.num_names))
        room = _COLUMN_POINTS - sum(map(self._points, names))
        blocks, left = [names.copy()], room
        for group, members in groupby(range(len(names), len(self.columns)), lambda place: self.columns[place].group):
            whole = list(members)
            fits = group and sum(map(self._points, whole)) <= room
            for part in [whole] if fits else [[place] for place in whole]:
                wide = sum(map(self._points, part))
                if wide > left and blocks[-1] != names:
                    blocks.append(names.copy())
                    left = room
                blocks[-1] += part
                left -= wide
        return blocks

    def _points(self, place: int) -> float:
        """About how wide a column is in LaTeX, with its distance to the next."""
        column = self.columns[place]
        cells = [_cell(row[place], column, NOTHING) for row in self.rows]
        parts = [cell.partition(" [")[::2] if column.is_bounded else (cell, "") for cell in cells]
        widths = [max(_LETTER_POINTS * len(above), _SMALL_POINTS * len(below)) for above, below in parts]
        return max([_LETTER_POINTS * len(column.name), *widths]) + _GAP_POINTS

    def _csv(self) -> str:
        found = io.StringIO()
        writer = csv.writer(found, lineterminator="\n")
        ends = ("", " low", " high")
        writer.writerow(
            [
                _csv_text(": ".join(part for part in (column.group, column.name) if part) + end)
                for column in self.columns
                for end in (ends if column.is_bounded else ends[:1])
            ]
        )
        writer.writerows([text for pair in self._pairs(row) for text in _csv_cells(*pair)] for row in self.rows)
        return found.getvalue()


FORMS: Mapping[str, Callable[[Sheet], str]] = {"md": Sheet._markdown, "tex": Sheet._latex, "csv": Sheet._csv}
"""What writes a table, by the ending of the file."""

_COLUMN_POINTS = 238.0  # 3.3 inches
_LETTER_POINTS, _SMALL_POINTS, _GAP_POINTS = 4.25, 4.0, 6.0
"""Of a digit of Computer Modern at footnotesize and at scriptsize, and between columns."""
_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "[": "{[}",  # behind a line's end it would be an option
    "]": "{]}",
    "*": "{*}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    '"': r"\char34{}",
    NOTHING: "--",
    "²": r"\textsuperscript{2}",
    "\u03c3": r"\ensuremath{\sigma}",
    "√": r"\ensuremath{\surd}",
    "±": r"\ensuremath{\pm}",
}
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|&~$#])")


def latex_text(text: str) -> str:
    """A text that LaTeX sets as it is: no sign of it is a command, ends a cell or begins an option."""
    line = _line(text)
    return "".join(
        "-{}" if line[place : place + 2] == "--" else _LATEX.get(sign, sign)  # two hyphens would be a dash
        for place, sign in enumerate(line)
    )


def markdown_text(text: str) -> str:
    """A text that Markdown shows as it is: no sign of it is markup, ends a cell or makes a link."""
    found = _MARKDOWN.sub(r"\\\1", _line(text))
    return re.sub(r"(?i)(www)\.", r"\1\\.", found.replace("://", r"\://"))


def _line(text: str) -> str:
    """Without line breaks, and with what does not print spelled out."""
    return printable(" ".join(text.split()))


def _cell(value: Value, column: Column, nothing: str) -> str:
    """A cell with the digits of a terminal; ``nothing`` where there is no number."""
    if isinstance(value, str):
        return value or nothing
    estimate = value if isinstance(value, int | float) else value.estimate
    if math.isnan(estimate):
        return nothing
    if column.form == "p":
        return p_value(estimate)
    is_signed = column.form == "signed"
    found = signed(estimate, column.digits) if is_signed else number(estimate, column.digits)
    if not isinstance(value, int | float) and not math.isnan(value.low):
        found += f" [{interval_words(value, column.digits, '+' if is_signed else '')}]"
    return found


def _groups(columns: Sequence[Column]) -> list[str]:
    """The line above the names of the columns, with rules under it; none where no column has a group."""
    if not any(column.group for column in columns):
        return []
    cells, rules, begin = [], [], 1
    for group, members in groupby(columns, key=lambda column: column.group):
        width = len(list(members))
        cells.append(rf"\multicolumn{{{width}}}{{c}}{{{latex_text(group)}}}" if group else " & " * (width - 1))
        rules += [rf"\cmidrule(lr){{{begin}-{begin + width - 1}}}"] if group else []
        begin += width
    return [f"{' & '.join(cells)} \\\\", " ".join(rules)]


def _latex_cell(value: Value, column: Column) -> str:
    """The minus of a number is a minus, not a hyphen; bounds stand under their number."""
    found = latex_text(_cell(value, column, NOTHING))
    if isinstance(value, str):
        return found
    above, bracket, below = re.sub(r"-(?=[\d.])", "$-$", found).partition(" {[}")
    return rf"\shortstack[r]{{{above}\\{{\scriptsize{bracket}{below}}}}}" if bracket else found


def _csv_cells(value: Value, column: Column) -> list[str]:
    """All digits of a number, and of its bounds; nothing for one that is not there."""
    if isinstance(value, str):
        return [_csv_text(value) if column.form == "words" else _line(value)]
    numbers = [value] if isinstance(value, int | float) else [value.estimate, value.low, value.high]
    numbers += [math.nan] * (3 - len(numbers)) if column.is_bounded else []
    return [(repr(float(each)) if column.digits else f"{each:.0f}") if math.isfinite(each) else "" for each in numbers]


def _csv_text(text: str) -> str:
    """Words that no spreadsheet takes for a formula."""
    found = _line(text)
    return f"'{found}" if found[:1] in ("=", "+", "-", "@") else found
