"""Tables, figures and files that show a study's results. Matplotlib and rich are loaded where they are used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from iclperm.base.files import write_whole
from iclperm.base.outputs import report_folder
from iclperm.report.figures import save
from iclperm.report.parts import Findings, Plot

__all__ = ["write_report"]


def write_report(
    folder: str | Path,
    findings: Findings,
    content: Mapping[str, Any],
    beside: Mapping[str, Plot] | None = None,
    own: Path | None = None,
) -> list[Path]:
    """Writes every figure (PNG and SVG) and ``content`` as report.json into ``folder``; returns their paths.

    ``beside`` are figures that are none of the findings, by the stem of their files; ``own`` is the folder of the run
    that is reported. Raises `ConfigError` for the folder of another run.

    report.json comes last: where it stands the figures stand too. Files of the same names are replaced, each whole,
    so that several processes may report into one folder: everything here can be made again from the stored items.
    """
    folder = report_folder(folder, own)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [
        path for stem, plot in {**findings.plots(), **(beside or {})}.items() for path in save(plot, folder / stem)
    ]
    report = folder / "report.json"
    write_whole(report, f"{json.dumps(content, indent=1, allow_nan=False)}\n".encode(), durable=False)
    return [*paths, report]
