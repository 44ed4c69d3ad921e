"""Figures for a paper, as PNG, SVG and PDF: the heat map of accuracies, the curve, and what all figures share.

Matplotlib's object interface is used throughout: no backend is chosen, and the caller's settings are restored. The
files depend on the numbers and the Matplotlib version only: default settings, no dates, a fixed salt for SVG ids.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from iclperm.base.files import write_whole
from iclperm.errors import RequestError, printable
from iclperm.report.parts import Plot, evenly
from iclperm.stats import Curve, Interval, order_sensitivity, selection_sensitivity, sensitivity_ratio
from iclperm.stats.sensitivity import FloatArray, accuracy_matrix

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

_MAX_PRINTED_CELLS = 200
_MAX_TICKS = 20
_LEAST_LETTERS = 6.5  # size, in points, of letters that are still read
_MAX_COUNTED_LABELS = 14
_MOST_LABEL_INCHES = 48  # that all labels take together: a larger picture is a gigabyte before it is a file
_MOST_LETTERS, _MOST_LETTERS_OF_HEAD = 60, 300
_COLOURS = None  # those of the settings: one figure may have others (`settings`)
BLUE, ORANGE, GREEN, GREY = "C0", "C1", "C2", "#5F5F5F"  # the first three of the settings
_MAP = "viridis"  # perceptually uniform, and ordered under every kind of colour blindness
_LINES = ("#0072B2", "#D55E00", "#009E73")  # Okabe-Ito
_TITLE = "title"
_STYLE: Any = {
    "font.family": "DejaVu Sans",  # ships with Matplotlib: the same letters everywhere
    "font.size": 8.5,
    "axes.linewidth": 0.8,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "iclperm",
    "pdf.fonttype": 42,  # whole letters, as publishers ask
    "figure.dpi": 100,
}
_FORMS: dict[str, dict[str, Any]] = {
    "png": {"dpi": 200, "metadata": {"Software": None}},
    "svg": {"metadata": {"Date": None}},
    "pdf": {"metadata": {"CreationDate": None}},
}
_LETTER = 0.066  # inches of one, about
_NARROW = 4.6  # inches below which the colours of a heat map are explained under it
_LEAST_CELL = 0.33  # inches that three decimals take
_LEAST_COUNTED = 0.25  # and those of a confusion, which are smaller
_MOST_INCHES = 40.0
_ROW = 5.6  # inches of width that panels take side by side
_LEFT_OF_ROW, _GAP, _UNDER_ROW = 0.68, 0.1, 0.5
_TIGHT: Any = {"handlelength": 1.8, "handletextpad": 0.6, "columnspacing": 1.2, "borderpad": 0.1}  # of a legend


def heat_map(
    accuracy: npt.ArrayLike,
    *,
    title: str = "",
    ratio: Interval | None = None,
    scale: tuple[float, float] | None = None,
) -> Plot:
    """Accuracy [S, P] with the means of sets and permutations at the margins.

    Sets are rows and permutations columns; every cell's value is printed while S·P <= 200. The title carries order and
    selection sensitivity and r as printed in arXiv 2511.09700; `ratio` is that r with the interval that belongs to it
    (`jackknife_ratio_interval`), left out where there is none. The colours span `scale`, by default that of the cells.
    Raises RequestError on another shape or a NaN.
    """
    matrix = accuracy_matrix(accuracy)

    low, high = float(matrix.min()), float(matrix.max())
    has_bar = scale is not None or low < high  # colours of one number would show a range that is not there
    colours = scale_of(low, high) if scale is None else scale
    natural_width, natural_height = _heat_map_size(*matrix.shape)

    def draw(figure: Figure) -> None:
        cells, by_set, by_permutation, bar = _heat_map_axes(figure, natural_height)
        room = cells.get_position().width * figure.get_figwidth() / matrix.shape[1]
        printed = matrix.size <= _MAX_PRINTED_CELLS and room > _LEAST_CELL
        image = draw_cells(cells, matrix, colours, printed)
        draw_cells(by_set, matrix.mean(axis=1, keepdims=True), colours, printed)
        draw_cells(by_permutation, matrix.mean(axis=0, keepdims=True), colours, printed)
        _label_heat_map(cells, by_set, by_permutation, matrix.shape)
        if has_bar:
            side: Any = {"orientation": "horizontal"} if figure.get_figwidth() < _NARROW else {}
            figure.colorbar(image, cax=bar, label="accuracy", **side).outline.set_visible(False)
        else:
            bar.set_axis_off()
        line = f"every ordering has {cell_words(low)}" if low == high else _sensitivity_line(matrix, ratio)
        head(figure, title or "Accuracy by set and permutation", line)

    def tall(width: float) -> float:
        return natural_height + (0.55 if width < _NARROW and has_bar else 0.0)

    caption = "Accuracy of every set of demonstrations in every order"
    return Plot((natural_width, tall(natural_width)), draw, tall=tall, least=2.6, caption=caption)


def curve_plot(
    curve: Curve,
    shots: Sequence[int],
    *,
    title: str = "",
    chance: float | None = None,
    bounds: tuple[FloatArray, FloatArray] | None = None,
) -> Plot:
    """Accuracy against the number of shots, with the spread over permutations and over sets as two bands.

    Each band is the mean plus and minus one standard deviation; a band that is undefined (P = 1 or S = 1) is left out.
    `chance` draws a level to compare with, `bounds` [K] those of a 95 % interval of the mean. Raises RequestError if
    shots and curve differ in length. After arXiv 2503.22002, Figure 1.
    """
    if len(shots) != len(curve.mean):
        raise RequestError(f"shots has {len(shots)} entries, the curve {len(curve.mean)}")

    words = ["mean", "spread over permutations", "spread over sets", "95 % of the mean", "chance"]

    def below(width: float) -> float:
        return 0.5 + 0.19 * legend_rows(words, width)

    def tall(width: float) -> float:
        return min(0.55 * width, 2.3) + below(width) + 0.7

    def draw(figure: Figure) -> None:
        width, height = figure.get_size_inches()
        foot = below(width)
        axes = placed(figure, 0.62, foot, width - 0.77, height - foot - 0.7)
        draw_bands(axes, curve, shots)
        if bounds is not None:
            reach = np.abs(np.asarray(bounds) - curve.mean)
            axes.errorbar(
                shots,
                curve.mean,
                reach,
                fmt="none",
                color=_band_colours()[0],
                elinewidth=0.9,
                capsize=2,
                label=words[3],
            )
        if chance is not None:
            chance_line(axes, chance)
        axes.set(xlabel="number of demonstrations k", ylabel="accuracy", xticks=shot_ticks(shots))
        plain_frame(axes)
        legend_below(figure, axes)
        line = "bands: mean ± one standard deviation"
        line += "" if bounds is None else "; whiskers: 95 % of the mean, for other queries too"
        head(figure, title or "Accuracy against the number of demonstrations", line)

    caption = "Mean accuracy over the number of demonstrations, and its spread"
    return Plot((4.8, tall(4.8)), draw, tall=tall, least=2.8, caption=caption)


def confusion_plot(
    counts: npt.ArrayLike, unnamed: npt.ArrayLike, labels: Sequence[str], *, title: str = "", line: str = ""
) -> Plot:
    """Right labels (rows) by answered labels (columns) of counts [L, L], coloured by the share of a row.

    `unnamed` [L] are answers that name none of the labels; they have a column of their own where there are any. The
    row of a label that no query asks for is blank. Share and count are printed while L <= 14. Raises RequestError on
    shapes that do not fit.
    """
    table, rest, words = np.asarray(counts, dtype=np.float64), np.asarray(unnamed, dtype=np.float64), list(labels)
    if table.shape != (len(words), len(words)) or rest.shape != (len(words),):
        raise RequestError(f"a confusion of {len(words)} labels needs [L, L] and [L], got {table.shape}, {rest.shape}")
    columns = [*words, "no label"] if rest.any() else words
    cells = np.column_stack([table, rest])[:, : len(columns)]
    total = cells.sum(axis=1, keepdims=True)
    shares = np.divide(cells, total, out=np.full(cells.shape, np.nan), where=total > 0)
    columns, words = figure_words(columns), figure_words(words)
    letters = 0.075 * max(map(len, columns))
    cell = 0.62 if len(words) <= _MAX_COUNTED_LABELS else min(0.3, _MOST_LABEL_INCHES / len(columns))
    natural, height = cell * len(columns), 0.8 * cell * len(words)
    around = letters + 1.4  # words to the left, colours to the right
    with_colours = around + min(cell, _LEAST_COUNTED) * len(columns)
    least = with_colours - 0.8 if len(words) <= _MAX_COUNTED_LABELS else with_colours  # printed shares tell enough

    def draw(figure: Figure) -> None:
        full_width, _ = figure.get_size_inches()
        has_colours = full_width >= with_colours
        width = min(full_width - (around if has_colours else around - 0.8), natural)
        left, bottom = letters + 0.45, letters + 0.55
        axes = placed(figure, left, bottom, width, height)
        image = axes.imshow(shares, cmap=_COLOURS, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        if len(words) <= _MAX_COUNTED_LABELS:
            for (row, column), share in np.ndenumerate(shares):
                if math.isnan(share):
                    continue
                colour = letter_colour(image.cmap(image.norm(share)))
                text = f"{cell_words(share)}\n{cells[row, column]:.1f}"
                axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=6.5)
        axes.set_xticks(range(len(columns)), columns, rotation=90)
        axes.set_yticks(range(len(words)), words)
        for row in np.flatnonzero(total[:, 0] == 0).tolist():
            axes.text((len(columns) - 1) / 2, row, "no query", ha="center", va="center", color=GREY, fontsize=6.5)
        axes.set(xlabel="answered", ylabel="right label")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        if has_colours:
            bar = placed(figure, left + width + 0.15, bottom, 0.12, height)
            figure.colorbar(image, cax=bar, label="share of the row").outline.set_visible(False)
        head(figure, title or "Right and answered labels", line)

    def tall(_: float) -> float:
        return letters + height + 1.25

    size = (max(around + natural, 5.2), tall(0.0))
    return Plot(size, draw, tall=tall, least=max(least, 2.6), caption="Right labels by the labels that were answered")


def figure_words(words: Sequence[str]) -> list[str]:
    """Words of data for a figure: of a length that it has room for, and with neither formulas nor control signs."""
    return [no_formula(_cut(word, _MOST_LETTERS)) for word in words]


def no_formula(words: str) -> str:
    """Words without control signs, in which Matplotlib reads no formula."""
    return printable(words).replace("$", r"\$")


def _cut(words: str, most: int) -> str:
    return words if len(words) <= most else f"{words[: most - 1]}…"


def save(plot: Plot, stem: str | Path) -> list[Path]:
    """Draws a figure into `stem`.png and `stem`.svg; returns both paths."""
    paths = []
    with _figure(plot.size) as figure:
        plot.draw(figure)
        for form in ("png", "svg"):
            paths.append(Path(stem).with_name(f"{Path(stem).name}.{form}"))
            write_whole(paths[-1], _saved(figure, form), durable=False)
    return paths


def drawn(plot: Plot, form: Literal["png", "svg", "pdf"], *, is_text: bool = False) -> bytes:
    """A figure as the content of a file; the words of SVG are shapes, alike everywhere, unless it ``is_text``."""
    with _figure(plot.size) as figure:
        plot.draw(figure)
        return _saved(figure, form, is_text)


def at_width(plot: Plot, width: float) -> Plot:
    """The same figure laid out for a width in inches; raises `RequestError` where its letters would not be read."""
    least = plot.least if plot.tall is not None else plot.size[0]
    if not least <= width <= _MOST_INCHES:
        raise RequestError(f"this figure can be {least:.1f}in to {_MOST_INCHES:.0f}in wide, not {width:.2f}in")
    height = plot.size[1] if plot.tall is None else plot.tall(width)
    return plot._replace(size=(width, height))


@contextmanager
def settings(colours: str | Sequence[str] | None = None) -> Iterator[None]:
    """Within: Matplotlib's settings are those of our figures, whatever the caller's are.

    `colours` are other ones: the name of a colour map for what a colour measures, or colours of lines and areas, which
    recur where there are fewer than a figure has. Raises RequestError for what Matplotlib does not know.
    """
    from matplotlib import rc_context, rcdefaults, rcParams

    with rc_context():  # restores the caller's settings, which must not colour our files
        rcdefaults()
        rcParams.update(_STYLE)
        rcParams.update(_palette(colours))
        yield


def _palette(colours: str | Sequence[str] | None) -> Any:
    from cycler import cycler
    from matplotlib import colormaps
    from matplotlib.colors import is_color_like

    map_name = colours if isinstance(colours, str) else _MAP
    lines = _LINES if colours is None or isinstance(colours, str) else list(colours)
    if map_name not in colormaps:
        if is_color_like(map_name):
            raise RequestError(
                f"{map_name!r} is one colour; give a list, colours=[{map_name!r}], or a colour map such as 'cividis'"
            )
        raise RequestError(f"Matplotlib has no colour map {map_name!r}; give one of its names, such as 'cividis'")
    if not lines or not all(map(is_color_like, lines)):
        raise RequestError(f"colours are a colour map or colours such as '#0072B2'; got {colours!r}")
    return {"image.cmap": map_name, "axes.prop_cycle": cycler(color=lines)}


@contextmanager
def _figure(size: tuple[float, float]) -> Iterator[Figure]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with settings():
        figure = Figure(figsize=size)
        FigureCanvasAgg(figure)
        yield figure


def _saved(figure: Figure, form: str, is_text: bool = True) -> bytes:
    from matplotlib import rcParams

    rcParams["svg.fonttype"] = "none" if is_text else "path"
    found = io.BytesIO()
    figure.savefig(found, format=form, **_FORMS[form])
    return found.getvalue()


def head(figure: Figure, title: str, line: str) -> None:
    """Title and a line under it, at fixed distances from the top whatever the height, within the figure's width; the
    line is broken in two where it would be too small to read."""
    inch = 1 / figure.get_figheight()
    title, line = (printable(_cut(words, _MOST_LETTERS_OF_HEAD)) for words in (title, line))
    left: Any = {"va": "top", "ha": "left", "parse_math": False}  # data may hold dollars
    _fit(figure.text(0.02, 1 - 0.12 * inch, title, fontsize=10.5, fontweight="bold", label=_TITLE, **left))
    line = line.replace(" %", "\N{NO-BREAK SPACE}%")
    words = textwrap.wrap(line, max(int(figure.get_figwidth() / 0.061), 20)) or [""]
    if len(words) > 1:  # as even as can be
        half = textwrap.wrap(line, max(len(line) // 2 + 8, max(map(len, line.split()))))
        words = half if len(half) <= 2 else words
    parts = [words[0], " ".join(words[1:])] if len(words) > 1 else words
    lines = [
        figure.text(0.02, 1 - (0.36 + 0.14 * place) * inch, part, color=GREY, **left)
        for place, part in enumerate(parts)
    ]
    for each in lines:
        _fit(each)
    smallest = min(each.get_fontsize() for each in lines)
    for each in lines:
        each.set_fontsize(smallest)


def chance_line(axes: Axes, chance: float, label: str = "chance") -> None:
    """A dotted line at what guessing a label gives."""
    axes.axhline(chance, color=GREY, linewidth=0.9, linestyle=(0, (1, 2)), label=label)


def legend_rows(words: Sequence[str], width: float) -> int:
    """How many rows `legend_below` takes in a figure of so many inches."""
    return math.ceil(len(words) / legend_columns(words, width))


def legend_columns(words: Sequence[str], width: float) -> int:
    """Of a legend of these words in a figure of so many inches."""
    most = max(int((width - 0.1) / (0.42 + _LETTER * max(map(len, words)))), 1)
    return math.ceil(len(words) / math.ceil(len(words) / most))


def legend_below(figure: Figure, axes: Axes) -> None:
    """The legend of axes at the foot of their figure, where it hides nothing, in as many columns as there is room."""
    handles, words = axes.get_legend_handles_labels()
    if words:
        below: Any = {"loc": "lower center", "bbox_to_anchor": (0.5, 0.04 / figure.get_figheight())}
        columns = legend_columns(words, figure.get_figwidth())
        figure.legend(handles, words, frameon=False, ncols=columns, **_TIGHT, **below)


def retitle(figure: Figure, title: str) -> None:
    """Puts other words in the place of the title that `head` wrote."""
    for text in figure.texts:
        if text.get_label() == _TITLE:
            text.set(text=title, fontsize=10.5)
            _fit(text)


def _fit(text: Text) -> None:
    """Smaller letters where a text is wider than its figure; where that would be too small to read, its end is cut."""
    figure = text.get_figure(root=True)
    assert figure is not None
    room = 0.98 * figure.bbox.width - text.get_window_extent().x0
    width = max(text.get_window_extent().width, 1e-9)
    size = float(text.get_fontsize())
    while width > room and size > _LEAST_LETTERS:  # letters do not shrink quite in proportion
        size = max(0.98 * min(room / width, 1) * size, _LEAST_LETTERS)
        text.set_fontsize(size)
        width = text.get_window_extent().width
    words = text.get_text()
    while text.get_window_extent().width > room and len(words) > 1:
        words = words[:-1]
        text.set_text(f"{words.rstrip()}…")


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
    width = min(max(0.44 * num_permutations, 3.1), 9.0)
    height = min(max(0.28 * num_sets, 1.4), 7.0)
    return width + 2.2, height + 1.62


def _heat_map_axes(figure: Figure, natural_height: float) -> tuple[Axes, Axes, Axes, Axes]:
    """Cells, the column of set means, the row of permutation means and the colour bar, placed in inches; the bar stands
    under the rest where that is narrow."""
    full_width, full_height = figure.get_size_inches()
    is_narrow = full_width < _NARROW
    below = full_height - natural_height
    width, height = full_width - (1.27 if is_narrow else 2.2), natural_height - 1.62
    left, bottom, gap, strip = 0.62, 0.88 + below, 0.07, 0.46

    def place(x: float, y: float, w: float, h: float) -> Any:
        return figure.add_axes((x / full_width, y / full_height, w / full_width, h / full_height))

    return (
        place(left, bottom, width, height),
        place(left + width + gap, bottom, strip, height),
        place(left, bottom - gap - 0.28, width, 0.28),
        place(left, 0.48, width, 0.1) if is_narrow else place(left + width + gap + strip + 0.2, bottom, 0.12, height),
    )


def scale_of(low: float, high: float) -> tuple[float, float]:
    """Range of the colours: that of the cells, widened where all are equal."""
    return (low, high) if low < high else (low - 0.05, high + 0.05)


def draw_cells(axes: Axes, values: FloatArray, scale: tuple[float, float], printed: bool, size: float = 7.5) -> Any:
    """Values [rows, columns] as colours of a scale, and as numbers of a size of letters where they are ``printed``."""
    low, high = scale
    image = axes.imshow(values, cmap=_COLOURS, vmin=low, vmax=high, aspect="auto", interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    if printed:
        _print_cells(axes, values, image, size)
    return image


def _print_cells(axes: Axes, values: FloatArray, image: Any, size: float) -> None:
    for boundary in range(1, values.shape[0]):
        axes.axhline(boundary - 0.5, color="white", linewidth=0.6)
    for boundary in range(1, values.shape[1]):
        axes.axvline(boundary - 0.5, color="white", linewidth=0.6)
    for (row, column), value in np.ndenumerate(values):
        colour = letter_colour(image.cmap(image.norm(value)))
        axes.text(column, row, cell_words(value), ha="center", va="center", color=colour, fontsize=size)


def cell_words(value: float) -> str:
    """Three decimals without the leading zero, as tables in papers print them."""
    return f"{value:.3f}".removeprefix("0")


def _label_heat_map(cells: Axes, by_set: Axes, by_permutation: Axes, shape: tuple[int, ...]) -> None:
    num_sets, num_permutations = shape
    cells.set(yticks=level_ticks(num_sets), ylabel="set")
    by_permutation.set(xticks=level_ticks(num_permutations), xlabel="permutation", yticks=[0], yticklabels=["mean"])
    by_set.set(xticks=[0], xticklabels=["mean"])
    for axes in (cells, by_set, by_permutation):
        axes.tick_params(length=0)


def level_ticks(count: int) -> list[int]:
    """Of so many sets or permutations those that are numbered: all, or some at equal distances."""
    steps = (digit * 10**power for power in range(9) for digit in (1, 2, 5))
    return list(range(0, count, next(step for step in steps if count <= step * _MAX_TICKS)))


def draw_bands(axes: Axes, curve: Curve, shots: Sequence[int], size: float = 4, name: str | None = None) -> None:
    """The mean over the shots with points of a size, and its spread over permutations and over sets, in the first three
    colours of the settings where the caller gave any. In a legend a ``name`` stands for them all."""
    mean, fill, hatch = _band_colours()
    axes.plot(shots, curve.mean, color=mean, linewidth=1.6, marker="o", markersize=size, label=name or "mean", zorder=3)
    # one band filled, one hatched: both stay visible where they overlap, in print too
    filled: dict[str, Any] = {"facecolor": (fill, 0.22), "edgecolor": (fill, 0.8)}
    hatched: dict[str, Any] = {"facecolor": "none", "edgecolor": (hatch, 0.75), "hatch": "//////"}
    bands = (("permutations", curve.std_permutations, filled), ("sets", curve.std_sets, hatched))
    for over, spread, style in bands:
        if np.isfinite(spread).all():
            low, high = curve.mean - spread, curve.mean + spread
            label = f"spread over {over}" if name is None else None
            axes.fill_between(shots, low, high, label=label, linewidth=0.8, **style)


def _band_colours() -> tuple[Any, ...]:
    """Of the mean, and of its spread over permutations and over sets: the caller's, else our own."""
    from matplotlib import rcParams
    from matplotlib.colors import to_rgb

    given = rcParams["axes.prop_cycle"].by_key()["color"]
    return ("black", BLUE, ORANGE) if tuple(given) == _LINES else tuple(map(to_rgb, islice(cycle(given), 3)))


def colour_code(colour: str) -> str:
    """A colour for what is not Matplotlib, which alone knows `BLUE` and the others by these names."""
    own = {BLUE: _LINES[0], ORANGE: _LINES[1], GREEN: _LINES[2]}
    return own.get(colour, colour)


def letter_colour(background: Iterable[float]) -> Literal["white", "black"]:
    """The colour of letters that are read best on a colour given as red, green and blue in 0..1."""
    red, green, blue, *_ = background
    is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.42  # luma at which white and black contrast alike
    return "white" if is_dark else "black"


def placed(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Axes at a place in inches."""
    wide, high = figure.get_size_inches()
    return figure.add_axes((left / wide, bottom / high, width / wide, height / high))


def in_a_row(figure: Figure, count: int, foot: float) -> list[Axes]:
    """Panels with one scale of heights, side by side, or one under another where the figure is narrow; ``foot`` is the
    inches under the lowest for a legend. `height_of_row` is the height that this takes."""
    width, height = figure.get_size_inches()
    columns = count if width >= _ROW else 1
    wide = (width - _LEFT_OF_ROW - 0.12 - _GAP * (columns - 1)) / columns
    high = (height - 0.72 - foot) / (count // columns) - _UNDER_ROW
    panels: list[Axes] = []
    for place in range(count):
        left = _LEFT_OF_ROW + place % columns * (wide + _GAP)
        bottom = height - 0.72 - (place // columns + 1) * high - place // columns * _UNDER_ROW
        panels.append(placed(figure, left, bottom, wide, high))
        panels[-1].tick_params(labelleft=place % columns == 0)
    for other in panels[1:]:
        other.sharey(panels[0])
    return panels


def height_of_row(width: float, count: int, natural: float, foot: float) -> float:
    """The height of a figure of panels that takes ``natural`` inches where they are side by side."""
    return natural if width >= _ROW or count == 1 else 0.72 + count * (1.5 + _UNDER_ROW) + foot


def plain_frame(axes: Axes) -> None:
    """Two axes and light horizontal lines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.7)
    axes.set_axisbelow(True)


def shot_ticks(shots: Sequence[int], most: int = _MAX_TICKS) -> list[int]:
    """Every k, or some at equal distances where more than `most` would run into each other; the last always."""
    return [shots[place] for place in evenly(len(shots), most)]
