"""Tables, figures and files that show a study's results. Matplotlib and rich are loaded where they are used."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iclperm.studies.findings import Findings


def write_report(folder: str | Path, findings: Findings, content: Mapping[str, Any]) -> list[Path]:
    """Writes every figure (PNG and SVG) and ``content`` as report.json into ``folder``; returns their paths.

    The latter comes last and whole, so that where it stands the figures stand too. Files of the same names are
    replaced: everything here can be made again from the stored items.
    """
    from iclperm.report.figures import save

    folder = Path(folder)
    paths = [path for stem, plot in findings.plots().items() for path in save(plot, folder / stem)]
    return [*paths, _write_json(folder / "report.json", content)]


def _write_json(path: Path, content: Mapping[str, Any]) -> Path:
    unfinished = path.with_suffix(".json.tmp")
    unfinished.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
    return path
