"""The figures of a report as Matplotlib figures, for a notebook or a paper: `heat_map(run)` and its like.

Each function takes a finished run (`iclperm.open_run`), draws what `iclperm report` writes under the same name, and
returns a `matplotlib.figure.Figure`, which a notebook shows and ``savefig`` writes. Of a run of another kind the figure
is made of the same answers, as ``iclperm report --kind`` does. `Style` says how it looks. No figure is known to pyplot,
so none needs to be closed, and the caller's settings neither change nor are changed.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from iclperm.errors import ConfigError, RequestError
from iclperm.report import figures as drawing
from iclperm.report.parts import Findings, Plot, in_one_line
from iclperm.report.wording import reworded_plot
from iclperm.studies.comparing_findings import Comparing
from iclperm.studies.report import Run
from iclperm.studies.several import StudyRuns
from iclperm.study import kinds

__all__ = [
    "Style",
    "all_figures",
    "confusion",
    "convergence",
    "convergence_curves",
    "convergence_plateaus",
    "convergence_scores",
    "curve",
    "curve_plateaus",
    "curve_trajectories",
    "features",
    "forest",
    "heat_map",
    "r_over_k",
    "search",
    "search_orderings",
    "selection_curves",
    "selection_pareto",
    "transfer",
]


_MEANT = {
    "ax": "heat_map and curve alone are drawn into axes of yours",
    "color": "say colours",
    "colors": "say colours",
    "cmap": "say colours",
    "label": "curve alone has one, in axes of yours",
    "vmin": "say scale=(vmin, vmax), which heat_map has",
    "vmax": "say scale=(vmin, vmax), which heat_map has",
    "figsize": "say width and height, in inches",
    "xlabel": "name the axes of the figure that is returned, or draw into axes of yours with ax",
    "ylabel": "name the axes of the figure that is returned, or draw into axes of yours with ax",
}
"""Words of Matplotlib that are not those of `Style`."""


class Style(TypedDict, total=False):
    """How a figure looks; every key may be left out.

    - ``width``: inches, for which the figure is laid out; its own by default.
    - ``height``: inches; by default what the width needs. With both, the figure has these whatever its letters need.
    - ``title``: instead of task and model; empty for none.
    - ``colours``: the name of a colour map of Matplotlib (``"cividis"``) for what a colour measures, or a list of up to
      three colours of lines and areas (``["black", "#cc0000"]``); of a curve those of the mean, of its spread over
      permutations and of that over sets. Fewer recur.
    """

    width: float
    height: float
    title: str
    colours: str | Sequence[str]


class _StyledFigure(Figure):
    """A figure that looks the same whatever Matplotlib's settings are when it is shown or saved."""

    def __init__(self, size: tuple[float, float], colours: str | Sequence[str] | None) -> None:
        super().__init__(figsize=size)
        self._colours = colours

    def draw(self, renderer: Any) -> None:
        """As Matplotlib draws any figure, under the settings of ours."""
        with drawing.settings(self._colours):
            super().draw(renderer)

    def _repr_png_(self) -> bytes:
        """What a notebook shows where pyplot is not loaded."""
        raw = io.BytesIO()
        self.savefig(raw, format="png", dpi=150)
        return raw.getvalue()


def heat_map(
    run: Run, *, ax: Axes | None = None, scale: tuple[float, float] | None = None, **style: Unpack[Style]
) -> Figure:
    """Accuracy of every set (rows) in every permutation (columns) at the most demonstrations, with their means.

    The colours go from the lowest to the highest accuracy of the run, so one colour means different accuracies in the
    maps of two runs; ``scale`` gives the accuracies at both ends instead, as (0, 1). With ``ax`` the cells alone are
    drawn, into these axes; their figure is returned.
    """
    if scale is not None and not (len(scale) == 2 and -math.inf < scale[0] < scale[1] < math.inf):
        raise RequestError(f"scale is {scale!r}; give the lowest and the highest accuracy of the colours, as (0, 1)")
    if ax is None and scale is None:
        return _figure(run, "heatmap", kinds.SENSITIVITY.name, style)
    summary = _a_run(run).summary()
    if ax is None:
        title = f"{run.title}, k = {run.shots[-1]}"
        plot = drawing.heat_map(summary.accuracy, title=title, ratio=summary.jackknife, scale=scale)
        return _styled(reworded_plot(plot, run.said), style)
    accuracy = summary.accuracy
    with _into(ax, style, run.title):
        colours = scale or drawing.scale_of(float(accuracy.min()), float(accuracy.max()))
        drawing.draw_cells(ax, accuracy, colours, accuracy.size <= 200)
        sets, permutations = map(drawing.level_ticks, accuracy.shape)
        ax.set(xlabel="permutation", ylabel="set", xticks=permutations, yticks=sets)
        ax.tick_params(length=0)
    return _root(ax)


def curve(run: Run, *, ax: Axes | None = None, label: str | None = None, **style: Unpack[Style]) -> Figure:
    """Mean accuracy over the numbers of demonstrations, with its spread over permutations and over sets.

    With ``ax`` it is drawn into these axes, without a legend; their figure is returned. Of several runs in one axes,
    ``label`` is what a legend (``ax.legend()``) calls this one, and ``colours=["red"]`` draws all of it in one colour.
    """
    found = _a_run(run).curve()
    if found is None:
        raise ConfigError("this run has one number of demonstrations; a curve needs several, as shots: [0, 1, 2, 4]")
    if ax is None and label is not None:
        raise RequestError("label is for a curve in axes of yours, with ax; title names a figure of its own")
    if ax is None:
        return _figure(run, curve.__name__, kinds.SENSITIVITY.name, style)
    with _into(ax, style, run.title):
        drawing.draw_bands(ax, found, run.shots, name=label)
        if run.chance is not None and "chance" not in ax.get_legend_handles_labels()[1]:
            drawing.chance_line(ax, run.chance)
        ax.set(xlabel="number of demonstrations k", ylabel=run.said("accuracy"))
        ax.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    return _root(ax)


def r_over_k(run: Run, **style: Unpack[Style]) -> Figure:
    """Order and selection sensitivity, and their ratio r, over the numbers of demonstrations."""
    if _a_run(run).over_shots() is None:
        raise ConfigError("r over k needs two numbers of demonstrations above 0, as shots: [2, 4]")
    return _figure(run, r_over_k.__name__, kinds.SENSITIVITY.name, style)


def confusion(run: Run, **style: Unpack[Style]) -> Figure:
    """Right labels by answered labels at the most demonstrations: share of a label's queries, and how many."""
    _a_run(run)
    if run.classes is None:
        raise ConfigError("a confusion needs a task with labels; the answers of this one are free")
    return _styled(run.classes.plots()[confusion.__name__], style)


def curve_trajectories(run: Run, **style: Unpack[Style]) -> Figure:
    """Accuracy over k of every ordering by itself, a line each, panel by panel for the sets."""
    return _of_own_kind(run, curve_trajectories.__name__, style)


def curve_plateaus(run: Run, **style: Unpack[Style]) -> Figure:
    """The share of orderings whose accuracy is flat from k on."""
    return _of_own_kind(run, curve_plateaus.__name__, style)


def search(run: Run, **style: Unpack[Style]) -> Figure:
    """What searching for a good order gains over the number of orders tried, on test; needs dev queries."""
    return _of_own_kind(run, search.__name__, style)


def search_orderings(run: Run, **style: Unpack[Style]) -> Figure:
    """Every ordering by what a search chooses by on dev, and by its accuracy on test; needs dev queries."""
    return _of_own_kind(run, search_orderings.__name__, style)


def convergence(run: Run, **style: Unpack[Style]) -> Figure:
    """How r, its interval and accuracy settle with more sets, permutations and queries."""
    return _of_own_kind(run, convergence.__name__, style)


def convergence_curves(run: Run, **style: Unpack[Style]) -> Figure:
    """How the averaged curve over k settles with more sets, permutations and queries."""
    return _of_own_kind(run, convergence_curves.__name__, style)


def convergence_scores(run: Run, **style: Unpack[Style]) -> Figure:
    """How scores of single demonstrations settle with more sets, permutations and queries."""
    return _of_own_kind(run, convergence_scores.__name__, style)


def convergence_plateaus(run: Run, **style: Unpack[Style]) -> Figure:
    """How verdicts on plateaus settle with more sets, permutations and queries."""
    return _of_own_kind(run, convergence_plateaus.__name__, style)


def features(run: Run, **style: Unpack[Style]) -> Figure:
    """Which traits of demonstrations go with accuracy, each with its interval."""
    return _of_own_kind(run, features.__name__, style)


def selection_pareto(study: StudyRuns, **style: Unpack[Style]) -> Figure:
    """Accuracy of the chosen demonstrations against their spread over orders, beside random ones."""
    return _of_own_kind(study, selection_pareto.__name__, style)


def selection_curves(study: StudyRuns, **style: Unpack[Style]) -> Figure:
    """Accuracy over k of the chosen demonstrations, beside random ones."""
    return _of_own_kind(study, selection_curves.__name__, style)


def transfer(study: StudyRuns, **style: Unpack[Style]) -> Figure:
    """How much of what an order gains on one task or model is left on another."""
    return _of_own_kind(study, transfer.__name__, style)


def forest(comparison: Comparing, **style: Unpack[Style]) -> Figure:
    """r of every study of a comparison (`iclperm.compare`) with its interval, and that of all together."""
    return _named(comparison.plots(), forest.__name__, style)


def all_figures(
    source: Run | StudyRuns | Comparing | Findings, kind: str | None = None, **style: Unpack[Style]
) -> dict[str, Figure]:
    """Every figure of a run, a study of several, a comparison or findings, by the name of its file.

    ``kind`` is that of `Run.findings`.
    """
    if not isinstance(source, Run | StudyRuns):
        return {stem: _styled(plot, style) for stem, plot in source.plots().items()}
    plots = {**source.findings(kind).plots()}
    if isinstance(source, Run):
        plots |= {stem: plot for about in source.asides.values() for stem, plot in about.plots().items()}
    return {stem: _styled(plot, style) for stem, plot in plots.items()}


def _of_own_kind(run: Run | StudyRuns, stem: str, style: Style) -> Figure:
    """The figure of the kind whose name its own begins with."""
    return _figure(run, stem, stem.partition("_")[0], style)


def _figure(run: Run | StudyRuns, stem: str, kind: str, style: Style) -> Figure:
    return _named(_a_run(run).findings(kind).plots(), stem, style)


def _a_run(given: Any) -> Any:
    """What a figure is drawn of; a path is refused, as reading a run once for every figure would be slow."""
    if isinstance(given, str | Path):
        raise ConfigError(f"a figure is drawn of a run, and {str(given)!r} is a path; open it: iclperm.open_run(path)")
    return given


def _named(plots: Mapping[str, Plot], stem: str, style: Style) -> Figure:
    if stem not in plots:
        there = f"it can have {', '.join(plots)}" if plots else "it has none"
        raise ConfigError(f"these answers do not suffice for the figure {stem}; {there}")
    return _styled(plots[stem], style)


def _styled(plot: Plot, style: Style) -> Figure:
    _refuse_unknown(style)
    size = (style.get("width", plot.size[0]), style.get("height", plot.size[1]))
    if "width" in style and "height" not in style and 0 < size[0] < math.inf:
        size = drawing.at_width(plot, size[0]).size
    if not all(0 < side < math.inf for side in size):
        raise RequestError(f"width and height are inches above 0; got {size[0]!r} and {size[1]!r}")
    colours = style.get("colours")
    with drawing.settings(colours):
        figure = _StyledFigure(size, colours)
        plot.draw(figure)
        if "title" in style:
            drawing.retitle(figure, style["title"])
    return figure


def _into(ax: Axes, style: Style, title: str) -> Any:
    """Names the axes; gives the context to draw into them in."""
    _refuse_unknown(style)
    if sized := [side for side in ("width", "height") if side in style]:
        raise RequestError(f"{' and '.join(sized)} are those of ax; set them where its figure is made")
    ax.set_title(style.get("title", in_one_line(title)), parse_math=False)
    return drawing.settings(style.get("colours"))


def _refuse_unknown(style: Style) -> None:
    if unknown := sorted(style.keys() - Style.__annotations__.keys()):
        meant = "; ".join(_MEANT[key] for key in unknown if key in _MEANT)
        raise RequestError(
            f"figures take {', '.join(Style.__annotations__)}; got {', '.join(unknown)}{meant and ': '}{meant}"
        )


def _root(ax: Axes) -> Figure:
    figure = ax.get_figure(root=True)
    assert figure is not None
    return figure
