"""The figures of compared studies, made of their numbers: effects side by side, curves over one another, orderings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from iclperm.report import panels
from iclperm.report.panels import Curved, Estimates
from iclperm.report.parts import Plot
from iclperm.stats.sensitivity import FloatArray
from iclperm.studies.studied import Studied


def plots(studies: Sequence[Studied], cells: Sequence[FloatArray]) -> dict[str, Plot]:
    """By the stem of the file, the most important first; ``cells`` are accuracies [S, P, K]."""
    about, titles = common_title(studies), [study.title for study in studies]
    titles = [
        title if titles.count(title) == 1 else f"{title} ({study.name})"
        for title, study in zip(titles, studies, strict=True)
    ]
    found = {
        "effects": panels.effects_plot(
            list(map(_effects, studies)), _NAMES, title=f"Side by side: {about}", line=_EFFECTS
        )
    }
    curved = [
        Curved(study.name, title, study.over_shots, study.curve, accuracy, study.chance)
        for study, title, accuracy in zip(studies, titles, cells, strict=True)
        if len(study.over_shots) > 1 and np.isfinite(study.curve.mean).all()
    ]
    if curved:
        line = "whiskers: one standard deviation over orderings of a set"
        found["curves"] = panels.curves_plot(curved, title=f"Accuracy over k: {about}", line=line)
        found["bands"] = panels.bands_plot(curved, title="Accuracy over k")
        found["trajectories"] = panels.trajectories_plot(curved, title="Accuracy along every ordering")
    maps = [
        (f"{title}, k = {study.shots}" if study.shots is not None else title, accuracy[:, :, -1])
        for study, title, accuracy in zip(studies, titles, cells, strict=True)
    ]
    found["heatmaps"] = panels.heat_maps_plot(maps, title="Accuracy by set and permutation")
    return found


def common_title(studies: Sequence[Studied]) -> str:
    """Tasks and models of all studies, each once; their number where not all are known."""
    tasks, models = (list(dict.fromkeys(getattr(study, of) for study in studies)) for of in ("task", "model"))
    if "" in (*tasks, *models) or len(tasks) + len(models) > _MOST_NAMED:
        return f"{len(studies)} studies side by side"
    return f"{', '.join(tasks)}; {', '.join(models)}"


_MOST_NAMED = 6
_NAMES = ("accuracy", "order effect", "selection effect", "r")
_EFFECTS = "bars: 95 %, item noise taken out; hollow: as printed in arXiv 2511.09700, item noise included"


def _effects(study: Studied) -> Estimates:
    values = (study.mean, study.order_effect, study.selection_effect, study.ratio_effect)
    return Estimates(study.name, values, (math.nan, study.order, study.selection, study.ratio.estimate))
