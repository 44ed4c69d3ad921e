"""The page of compared studies, and the files of their tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from iclperm.base.files import writable, write_whole
from iclperm.base.outputs import output, report_folder
from iclperm.errors import ConfigError, printable
from iclperm.report import page
from iclperm.report.page import Page
from iclperm.report.parts import Table
from iclperm.studies.comparing_figures import common_title
from iclperm.studies.comparing_findings import Comparing
from iclperm.studies.page import facts
from iclperm.studies.report import Run
from iclperm.studies.studied import Studied

NAME = "compare.html"
TABLES = "tables.md"
_QUESTION = "Is r, the effect of order or of choice, or accuracy different between these studies?"


def write_comparison(found: Comparing, path: str | Path = NAME) -> Path:
    """Writes the page of compared studies (`iclperm.compare`) into a file, or as compare.html into a folder; returns
    its path.

    It is one file that asks nothing of any network, and holds no text of the data. Its figures can be pointed at where
    the libraries of the extra ``page`` are installed, else they are pictures.
    """
    target = Path(path)
    if target.suffix.lower() not in (".html", ".htm"):
        if target.suffix and not target.is_dir():
            raise ConfigError(f"{target} is no page; give a file that ends in .html, or a folder")
        target = report_folder(target) / NAME
    target = output(target)
    with writable(target.parent):
        return page.write_page(target.parent, page_of(found), is_interactive=page.can_draw(), name=target.name)


def write_tables(found: Comparing, folder: str | Path) -> list[Path]:
    """Writes every table into a folder, all of them as Markdown in one file, each as CSV and LaTeX; returns the
    paths."""
    place = report_folder(folder)
    place.mkdir(parents=True, exist_ok=True)
    sheets = found.sheets().values()
    texts = {TABLES: "\n".join(sheet.written("md") for sheet in sheets)}
    texts |= {f"{sheet.name}.{form}": sheet.written(form) for sheet in sheets for form in ("csv", "tex")}
    for name, text in texts.items():
        write_whole(place / name, text.encode(), durable=False)
    return [place / name for name in texts]


def page_of(found: Comparing) -> Page:
    """What the page shows; see `write_comparison`."""
    runs = [(study.name, run) for study, run in zip(found.studies, found.runs, strict=False) if isinstance(run, Run)]
    outside = [study for study, run in zip(found.studies, found.runs, strict=False) if run is None]
    alerts = [f"{name}: {line}" for name, run in runs if (line := run.missing.first_line())]
    sheets = found.sheets()
    own = {"studies": sheets["studies"].table(), "tests": sheets["tests"].table()}
    tables = [table for table in found.tables(full=False) if table.title != "Studies"]
    return Page(
        title=printable(common_title(found.studies)),
        question=_QUESTION,
        alerts=alerts,
        answer=[*found.headline(), *found.conclusion()],
        warnings=found.warnings,
        plots=found.plots(),
        tables=list(map(_unbroken, [own["studies"], *tables, own["tests"]])),
        facts=[*(facts(runs) if runs else []), *([_of_outside(outside)] if outside else [])],
        kicker="iclperm compare",
    )


def _unbroken(table: Table) -> Table:
    """Numbers and their bounds on one line."""
    words = {0, *table.texts}
    rows = [
        [c if place in words else c.replace(" ", "\N{NO-BREAK SPACE}") for place, c in enumerate(row)]
        for row in table.rows
    ]
    return table._replace(rows=rows)


def _of_outside(studies: Sequence[Studied]) -> Table:
    """What is known of answers from elsewhere."""
    rows = [(study.name, " x ".join(f"{size:,}" for size in study.shape if size)) for study in studies]
    return Table("Answers from elsewhere", ("", "sets x permutations x queries"), rows, texts=(1,))
