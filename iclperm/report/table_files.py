"""Tables in files of their own: what ``--table`` asks for, and the tables of a report as they can be taken away."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from iclperm.base.files import writable, write_whole
from iclperm.base.outputs import output
from iclperm.errors import ConfigError
from iclperm.report.figure_files import named_file
from iclperm.report.markup import FORMS, Column, Sheet
from iclperm.report.parts import Table


class TableFile(NamedTuple):
    """A file for one table."""

    path: Path
    name: str | None
    """Of the table; None for the first."""

    @classmethod
    def of(cls, text: str) -> Self:
        """What "FILE", or "NAME=FILE", stands for; raises `ConfigError`."""
        name, path = named_file(text)
        if _form(path) not in FORMS:
            endings = ", ".join(f".{one}" for one in FORMS)
            raise ConfigError(f"{path} is no table; give a file that ends in {endings}")
        return cls(path, name)

    def written(self, sheets: Mapping[str, Sheet]) -> Path:
        """Writes its table into the file, and returns that; raises `ConfigError` for a table that there is not."""
        name = next(iter(sheets)) if self.name is None else self.name
        if name not in sheets:
            raise ConfigError(f"there is no table {name!r}; there are {', '.join(sheets)}")
        target = output(self.path)
        with writable(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, sheets[name].written(_form(target)).encode())
        return target


def sheets_of(tables: Sequence[Table], notes: Sequence[str] = ()) -> dict[str, Sheet]:
    """The tables of a report by their titles, as far as a colon, in small letters with hyphens; numbers are those that
    are shown, and the first carries the ``notes``."""
    sheets: dict[str, Sheet] = {}
    for table in tables:
        name = re.sub(r"[^a-z0-9]+", "-", table.title.partition(":")[0].lower()).strip("-") or "table"
        words = {0, *table.texts}
        columns = [
            Column(head, form="words" if place in words else "number") for place, head in enumerate(table.header)
        ]
        rows = tuple(tuple(row) for row in table.rows)
        kept = () if sheets else tuple(notes)
        sheets.setdefault(name, Sheet(name, table.title, table.caption, tuple(columns), rows, notes=kept))
    return sheets


def _form(path: Path) -> str:
    return path.suffix.lower().removeprefix(".")
