"""Tables, figures and files that show a study's results. Matplotlib and rich are loaded where they are used."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from iclperm.stats import Curve
from iclperm.studies.sensitivity import SensitivityOverShots, SensitivitySummary, report_content


def write_report(
    folder: str | Path,
    summary: SensitivitySummary,
    *,
    curve: Curve | None = None,
    over_shots: SensitivityOverShots | None = None,
    shots: Sequence[int] | None = None,
    title: str = "",
    chance: float | None = None,
    remarks: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Write the heat map, the curve and r over k where they are (each PNG and SVG) and report.json; return the paths in
    `folder`.

    `shots` are the numbers of demonstrations along the curve, the last of them that of the heat map; `title` names task
    and model; `chance` is the accuracy of guessing; `remarks` are further entries of report.json. That comes last and
    whole, so that where it stands the figures stand too. Files of the same names are replaced: everything here can be
    made again from the stored items.
    """
    from iclperm.report.figures import curve_plot, heat_map, ratio_plot

    folder = Path(folder)
    map_title = ", ".join(part for part in (title, f"k = {shots[-1]}" if shots else "") if part)
    paths = heat_map(summary.accuracy, folder / "heatmap", title=map_title, ratio=summary.jackknife)
    if curve is not None and shots is not None:
        paths += curve_plot(curve, shots, folder / "curve", title=title, chance=chance)
    if over_shots is not None and sum(k > 0 for k in over_shots.shots) >= 2:
        paths += ratio_plot(over_shots, folder / "r_over_k", title=title)
    content = {**report_content(summary, curve, shots, over_shots), **(remarks or {})}
    return [*paths, _write_json(folder / "report.json", content)]


def _write_json(path: Path, content: dict[str, object]) -> Path:
    unfinished = path.with_suffix(".json.tmp")
    unfinished.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
    return path
