"""Figures for a paper: the accuracy heat map, the curve and r over shots, as PNG and SVG.

Matplotlib's object interface is used throughout: no backend is chosen, and the caller's settings are restored. The
files depend on the numbers and the Matplotlib version only: default settings, no dates, a fixed salt for SVG ids.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from iclperm.errors import RequestError
from iclperm.stats import Curve, Interval, order_sensitivity, selection_sensitivity, sensitivity_ratio
from iclperm.stats.sensitivity import FloatArray, accuracy_matrix
from iclperm.studies.findings import Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from iclperm.studies.sensitivity import SensitivityOverShots

_MAX_PRINTED_CELLS = 200
_MAX_TICKS = 20
_WIDEST_R = 16.0  # intervals of r beyond 1/16 and 16 leave the frame
_CAPTION_LETTERS = 84
_COLOURS = "viridis"  # perceptually uniform, and ordered under every kind of colour blindness
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#5F5F5F"  # Okabe-Ito
_STYLE: Any = {
    "font.family": "DejaVu Sans",  # ships with Matplotlib: the same letters everywhere
    "font.size": 8.5,
    "axes.linewidth": 0.8,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "iclperm",
    "figure.dpi": 100,
}


def heat_map(accuracy: npt.ArrayLike, *, title: str = "", ratio: Interval | None = None) -> Plot:
    """Accuracy [S, P] with the means of sets and permutations at the margins.

    Sets are rows and permutations columns; every cell's value is printed while S·P <= 200. The title carries order and
    selection sensitivity and r as printed in arXiv 2511.09700; `ratio` is that r with the interval that belongs to it
    (`jackknife_ratio_interval`), left out where there is none. Raises RequestError on another shape or a NaN.
    """
    matrix = accuracy_matrix(accuracy)

    def draw(figure: Figure) -> None:
        cells, by_set, by_permutation, bar = _heat_map_axes(figure, *matrix.shape)
        scale, printed = _scale(matrix), matrix.size <= _MAX_PRINTED_CELLS
        image = _draw_cells(cells, matrix, scale, printed)
        _draw_cells(by_set, matrix.mean(axis=1, keepdims=True), scale, printed)
        _draw_cells(by_permutation, matrix.mean(axis=0, keepdims=True), scale, printed)
        _label_heat_map(cells, by_set, by_permutation, matrix.shape)
        figure.colorbar(image, cax=bar, label="accuracy").outline.set_visible(False)
        head(figure, title or "Accuracy by set and permutation", _sensitivity_line(matrix, ratio))

    return Plot(_heat_map_size(*matrix.shape), draw)


def curve_plot(curve: Curve, shots: Sequence[int], *, title: str = "", chance: float | None = None) -> Plot:
    """Accuracy against the number of shots, with the spread over permutations and over sets as two bands.

    Each band is the mean plus and minus one standard deviation; a band that is undefined (P = 1 or S = 1) is left out.
    `chance` draws a level to compare with. Raises RequestError if shots and curve differ in length. After arXiv
    2503.22002, Figure 1.
    """
    if len(shots) != len(curve.mean):
        raise RequestError(f"shots has {len(shots)} entries, the curve {len(curve.mean)}")

    def draw(figure: Figure) -> None:
        axes = figure.add_axes((0.13, 0.14, 0.84, 0.69))
        _draw_curve(axes, curve, shots)
        if chance is not None:
            axes.axhline(chance, color=GREY, linewidth=0.9, linestyle=(0, (1, 2)), label="chance")
        axes.set(xlabel="number of demonstrations k", ylabel="accuracy", xticks=shot_ticks(shots))
        plain_frame(axes)
        axes.legend(frameon=False, loc="best", handlelength=1.8)
        head(figure, title or "Accuracy against the number of demonstrations", "bands: mean ± one standard deviation")

    return Plot((4.8, 3.4), draw)


def ratio_plot(over_shots: SensitivityOverShots, *, title: str = "") -> Plot:
    """r as printed with its jackknife interval, and both sensitivities under it, against k >= 1.

    Points are hollow where order is not order alone, and a caption says why. r has a logarithmic axis with a line at 1.
    Raises RequestError where no k >= 1 was run.
    """
    drawn = np.array(over_shots.shots) >= 1
    if not drawn.any():
        raise RequestError("r over k needs a run with at least one k >= 1, this one has k = 0 only")
    caption = textwrap.wrap(f"Hollow points: {over_shots.caution}", _CAPTION_LETTERS) if over_shots.caution else []
    foot = 0.14 * len(caption)

    def draw(figure: Figure) -> None:
        upper, lower = _ratio_axes(figure, foot)
        _draw_ratio(upper, over_shots, drawn)
        for name, values, style in (
            ("order", over_shots.order, {"color": BLUE, "marker": "o"}),
            ("selection", over_shots.selection, {"color": ORANGE, "marker": "s"}),
        ):
            _draw_points(lower, over_shots, drawn, values, {"label": f"to {name}", **style})
        lower.set(xlabel="number of demonstrations k", ylabel="sensitivity of accuracy")
        lower.set_ylim(bottom=0)
        lower.legend(frameon=False, loc="best", handlelength=1.8)
        for axes in (upper, lower):
            plain_frame(axes)
        head(
            figure, title or "Order against selection over k", "r = selection / order, as printed, with 95 % jackknife"
        )
        figure.text(0.02, 0.08 / figure.get_figheight(), "\n".join(caption), va="bottom", fontsize=7.5, color=GREY)

    return Plot((4.8, 4.7 + foot), draw)


def save(plot: Plot, stem: str | Path) -> list[Path]:
    """Draws a figure into `stem`.png and `stem`.svg; returns both paths."""
    with _figure(plot.size) as figure:
        plot.draw(figure)
        return _save(figure, Path(stem))


@contextmanager
def _figure(size: tuple[float, float]) -> Iterator[Figure]:
    from matplotlib import rc_context, rcdefaults, rcParams
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context():  # restores the caller's settings, which must not colour our files
        rcdefaults()
        rcParams.update(_STYLE)
        figure = Figure(figsize=size)
        FigureCanvasAgg(figure)
        yield figure


def _save(figure: Figure, stem: Path) -> list[Path]:
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in ("png", "svg")]
    figure.savefig(paths[0], dpi=200, metadata={"Software": None})
    figure.savefig(paths[1], metadata={"Date": None})
    return paths


def head(figure: Figure, title: str, line: str) -> None:
    """Title and one line under it, at fixed distances from the top whatever the height."""
    inch = 1 / figure.get_figheight()
    figure.text(0.02, 1 - 0.12 * inch, title, va="top", ha="left", fontsize=10.5, fontweight="bold")
    figure.text(0.02, 1 - 0.36 * inch, line, va="top", ha="left", color=GREY)


def _sensitivity_line(matrix: FloatArray, interval: Interval | None) -> str:
    r = sensitivity_ratio(matrix) if interval is None else interval.estimate
    values = (order_sensitivity(matrix), selection_sensitivity(matrix), r)
    order, selection, ratio = (
        "undefined" if math.isnan(value) else f"{value:.{digits}f}"
        for value, digits in zip(values, (4, 4, 2), strict=True)
    )
    line = f"order sensitivity {order}   selection sensitivity {selection}   r {ratio}"
    if interval is None or math.isnan(interval.low):
        return line
    return f"{line}  [{interval.low:.2f}, {interval.high:.2f}]"


def _heat_map_size(num_sets: int, num_permutations: int) -> tuple[float, float]:
    """Inches: cells of about 0.45 x 0.3, within a page."""
    width = min(max(0.44 * num_permutations, 2.4), 9.0)
    height = min(max(0.28 * num_sets, 1.4), 7.0)
    return width + 2.2, height + 1.62


def _heat_map_axes(figure: Figure, num_sets: int, num_permutations: int) -> tuple[Axes, Axes, Axes, Axes]:
    """Cells, the column of set means, the row of permutation means and the colour bar, placed in inches."""
    full_width, full_height = figure.get_size_inches()
    width, height = full_width - 2.2, full_height - 1.62
    left, bottom, gap, strip = 0.62, 0.88, 0.07, 0.46

    def place(x: float, y: float, w: float, h: float) -> Any:
        return figure.add_axes((x / full_width, y / full_height, w / full_width, h / full_height))

    return (
        place(left, bottom, width, height),
        place(left + width + gap, bottom, strip, height),
        place(left, bottom - gap - 0.28, width, 0.28),
        place(left + width + gap + strip + 0.2, bottom, 0.12, height),
    )


def _scale(matrix: FloatArray) -> tuple[float, float]:
    """Range of the colours: that of the cells, widened where all are equal."""
    low, high = float(matrix.min()), float(matrix.max())
    return (low, high) if low < high else (low - 0.05, high + 0.05)


def _draw_cells(axes: Axes, values: FloatArray, scale: tuple[float, float], printed: bool) -> Any:
    low, high = scale
    image = axes.imshow(values, cmap=_COLOURS, vmin=low, vmax=high, aspect="auto", interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    if printed:
        _print_cells(axes, values, image)
    return image


def _print_cells(axes: Axes, values: FloatArray, image: Any) -> None:
    for boundary in range(1, values.shape[0]):
        axes.axhline(boundary - 0.5, color="white", linewidth=0.6)
    for boundary in range(1, values.shape[1]):
        axes.axvline(boundary - 0.5, color="white", linewidth=0.6)
    for (row, column), value in np.ndenumerate(values):
        red, green, blue, _ = image.cmap(image.norm(value))
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.42  # luma at which white and black contrast alike
        colour = "white" if dark else "black"
        axes.text(column, row, _cell(value), ha="center", va="center", color=colour, fontsize=7.5)


def _cell(value: float) -> str:
    """Three decimals without the leading zero, as tables in papers print them."""
    return f"{value:.3f}".removeprefix("0")


def _label_heat_map(cells: Axes, by_set: Axes, by_permutation: Axes, shape: tuple[int, ...]) -> None:
    num_sets, num_permutations = shape
    cells.set(yticks=_ticks(num_sets), ylabel="set")
    by_permutation.set(xticks=_ticks(num_permutations), xlabel="permutation", yticks=[0], yticklabels=["mean"])
    by_set.set(xticks=[0], xticklabels=["mean"])
    for axes in (cells, by_set, by_permutation):
        axes.tick_params(length=0)


def _ticks(count: int) -> list[int]:
    steps = (digit * 10**power for power in range(9) for digit in (1, 2, 5))
    return list(range(0, count, next(step for step in steps if count <= step * _MAX_TICKS)))


def _draw_curve(axes: Axes, curve: Curve, shots: Sequence[int]) -> None:
    axes.plot(shots, curve.mean, color="black", linewidth=1.6, marker="o", markersize=4, label="mean", zorder=3)
    # one band filled, one hatched: both stay visible where they overlap, in print too
    filled: dict[str, Any] = {"facecolor": (BLUE, 0.22), "edgecolor": (BLUE, 0.8)}
    hatched: dict[str, Any] = {"facecolor": "none", "edgecolor": (ORANGE, 0.75), "hatch": "//////"}
    bands = (("permutations", curve.std_permutations, filled), ("sets", curve.std_sets, hatched))
    for name, spread, style in bands:
        if np.isfinite(spread).all():
            low, high = curve.mean - spread, curve.mean + spread
            axes.fill_between(shots, low, high, label=f"spread over {name}", linewidth=0.8, **style)


def plain_frame(axes: Axes) -> None:
    """Two axes and light horizontal lines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.7)
    axes.set_axisbelow(True)


def shot_ticks(shots: Sequence[int]) -> list[int]:
    """Every k, or evenly many of them where they would run into each other; the last always."""
    step = math.ceil(len(shots) / _MAX_TICKS)
    return list(shots)[::-step][::-1]


def _ratio_axes(figure: Figure, foot: float) -> tuple[Axes, Axes]:
    """Two panels over one axis of k, above `foot` inches of caption."""
    height = figure.get_figheight()
    bottom, panel, gap = foot + 0.5, 1.7, 0.16
    lower = figure.add_axes((0.17, bottom / height, 0.8, panel / height))
    upper = figure.add_axes((0.17, (bottom + panel + gap) / height, 0.8, panel / height), sharex=lower)
    upper.tick_params(labelbottom=False)
    return upper, lower


def _draw_ratio(axes: Axes, over_shots: SensitivityOverShots, drawn: npt.NDArray[np.bool_]) -> None:
    shots, r = np.array(over_shots.shots)[drawn], over_shots.ratio
    axes.axhline(1.0, color=GREY, linewidth=0.9, linestyle=(0, (4, 2)))
    axes.vlines(shots, r.low[drawn], r.high[drawn], color="black", linewidth=1.1)
    _draw_points(axes, over_shots, drawn, r.estimate, {"color": "black", "marker": "o"})
    low, high = _ratio_limits(r.estimate[drawn], r.low[drawn], r.high[drawn])
    steps = [digit * 10.0**power for power in range(-4, 5) for digit in (1, 2, 5)]
    ticks = [step for step in steps if low <= step <= high]
    axes.set(ylabel="r", yscale="log", ylim=(low, high), xticks=shot_ticks(shots.tolist()))
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def _ratio_limits(estimate: FloatArray, low: FloatArray, high: FloatArray) -> tuple[float, float]:
    """Range of the axis of r: 1 and a factor of 2 around it, every estimate, and intervals up to `_WIDEST_R`."""
    bounds = np.clip(np.concatenate([low, high, [0.5, 2.0]]), 1 / _WIDEST_R, _WIDEST_R)
    values = np.concatenate([bounds, estimate[estimate > 0]])
    return float(np.nanmin(values)) / 1.1, float(np.nanmax(values)) * 1.1


def _draw_points(
    axes: Axes,
    over_shots: SensitivityOverShots,
    drawn: npt.NDArray[np.bool_],
    values: FloatArray,
    style: dict[str, Any],
) -> None:
    """A line through the points, hollow where order is not order alone; an undefined value leaves a gap."""
    shots = np.array(over_shots.shots)
    axes.plot(shots[drawn], values[drawn], linewidth=1.2, markersize=4.5, **style)
    hollow = drawn & ~over_shots.is_order_alone
    axes.plot(
        shots[hollow],
        values[hollow],
        **{**style, "label": None},
        linestyle="none",
        markersize=4.5,
        markerfacecolor="white",
    )
