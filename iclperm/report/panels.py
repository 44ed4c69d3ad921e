"""Figures that show several studies at once, panel by panel or over one another, at any width that letters allow.

Everything is placed in inches and follows from the width, so that a figure for one column of a paper (3.3 in) is laid
out for it, not made smaller. What is compared has one scale.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from iclperm.report import charts
from iclperm.report.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    cell_words,
    chance_line,
    draw_bands,
    draw_cells,
    head,
    legend_below,
    legend_rows,
    no_formula,
    placed,
    plain_frame,
    scale_of,
    shot_ticks,
)
from iclperm.report.markup import NOTHING
from iclperm.report.parts import Plot, evenly, plain
from iclperm.stats import Curve, Interval
from iclperm.stats.sensitivity import FloatArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS = (
    (BLUE, "o"),
    (ORANGE, "s"),
    (GREEN, "^"),
    ("#CC79A7", "D"),
    ("#E69F00", "v"),
    ("#56B4E9", "P"),
    (GREY, "X"),
)
"""Okabe & Ito's colours, each with a marker of its own; used again, with another dash, beyond their number."""
_DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (4, 1.5, 1, 1.5)))
_HEAD = 0.72  # inches over the panels, for a title and two lines
_BAR = 0.54  # for a bar of colours
_TITLES = 0.22  # inches under that, for the titles of panels
_WIDEST_R = 16.0
_MOST_POINTS = 2_000  # on a page
_LETTER = 0.068  # inches of one, about


class Curved(NamedTuple):
    """Accuracy over k of one study."""

    name: str
    title: str
    shots: tuple[int, ...]
    curve: Curve
    cells: FloatArray
    """[S, P, K]"""
    chance: float | None


class Estimates(NamedTuple):
    """What one study says in numbers: each estimate with its interval, and what is printed beside it, NaN for none."""

    name: str
    values: tuple[Interval, ...]
    printed: tuple[float, ...]


def effects_plot(studies: Sequence[Estimates], names: Sequence[str], *, title: str, line: str) -> Plot:
    """A row for each study and a panel for each of its numbers; those called "... effect" have one scale, r a
    logarithmic one."""
    left = 0.15 + _LETTER * max(len(part) for study in studies for part in wrapped(study.name))

    def layout(width: float) -> tuple[int, float]:
        """How many panels stand side by side, and the height of one."""
        side_by_side = next((n for n in (4, 2) if n <= len(names) and (width - left) / n > 1.25), 1)
        return side_by_side, 0.1 + max(0.23, 0.13 * max(len(wrapped(each.name)) for each in studies)) * len(studies)

    def tall(width: float) -> float:
        columns, height = layout(width)
        return _HEAD + math.ceil(len(names) / columns) * (height + 0.62)

    def draw(figure: Figure) -> None:
        columns, height = layout(figure.get_figwidth())
        spread = [place for place, name in enumerate(names) if "effect" in name]
        reach = [end for place in spread for study in studies for end in _ends(study, place)]
        for place, name in enumerate(names):
            axes = _panel(figure, place, columns, left, height, gap=0.26, under=0.62)
            _draw_effects(axes, studies, place, name == "r")
            axes.locator_params(axis="x", nbins=4)
            axes.set_xlabel(name)
            if name == "r":
                _as_ratio(axes, [end for study in studies for end in _ends(study, place)])
            elif place in spread and reach:
                axes.set_xlim(0, max(1.08 * max(reach), 0.01))
            axes.set_ylim(len(studies) - 0.5, -0.5)
            labels = ["\n".join(map(no_formula, wrapped(study.name))) for study in studies]
            axes.set_yticks(range(len(studies)), labels if place % columns == 0 else [])
            axes.tick_params(axis="y", length=0)
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.grid(axis="x", color="#E4E4E4", linewidth=0.7)
            axes.set_axisbelow(True)
        head(figure, title, line)

    caption = "Every number of every study with its 95 % interval"
    return Plot((7.4, tall(7.4)), draw, tall=tall, least=2.8, caption=caption)


def curves_plot(studies: Sequence[Curved], *, title: str, line: str) -> Plot:
    """Mean accuracy over k of all studies over one another, with whiskers of one standard deviation over orderings."""

    def parts(width: float) -> tuple[float, float]:
        words = [study.name for study in studies] + ["chance"] * _has_chance(studies)
        return min(max(0.55 * width, 1.7), 3.2), 0.52 + 0.19 * legend_rows(words, width)

    def tall(width: float) -> float:
        height, below = parts(width)
        return _HEAD + height + below

    def draw(figure: Figure) -> None:
        width = figure.get_figwidth()
        height, below = parts(width)
        axes = placed(figure, 0.62, below, width - 0.72, height)
        shots = sorted({k for study in studies for k in study.shots})
        step = min(np.diff(shots)) if len(shots) > 1 else 1.0
        for place, study in enumerate(studies):
            (colour, marker), dash = LOOKS[place % len(LOOKS)], _DASHES[place // len(LOOKS) % len(_DASHES)]
            aside = 0.3 * step * (place - (len(studies) - 1) / 2) / len(studies)
            spread = np.nan_to_num(study.curve.std_permutations)
            axes.errorbar(
                np.asarray(study.shots) + aside,
                study.curve.mean,
                spread if spread.any() else None,
                color=colour,
                marker=marker,
                linestyle=dash,
                markersize=4.5,
                linewidth=1.4,
                elinewidth=0.8,
                capsize=1.6,
                label=no_formula(study.name),
            )
        for number, level in enumerate(sorted({s.chance for s in studies if s.chance is not None})):
            chance_line(axes, level, label="chance" if number == 0 else "_")
        axes.set(xlabel="number of demonstrations k", ylabel="accuracy", xticks=_few(shots, width))
        plain_frame(axes)
        legend_below(figure, axes)
        head(figure, title, line)

    def specifications() -> list[charts.Specification]:
        rows = [
            plain({"x": k, "y": value, "name": study.name})
            for study in studies
            for k, value in zip(study.shots, study.curve.mean, strict=True)
        ]
        colours = {study.name: LOOKS[place % len(LOOKS)][0] for place, study in enumerate(studies)}
        colours = {name: charts.GREY if colour == GREY else colour for name, colour in colours.items()}
        levels = {study.chance for study in studies}
        chance = levels.pop() if len(levels) == 1 else None  # which of several would not be told
        across = "number of demonstrations k"
        return [charts.line_chart(rows, x=across, y="accuracy", colours=colours, chance=chance)]

    caption = "Mean accuracy over k, all studies over one another"
    return Plot((5.6, tall(5.6)), draw, specifications, tall=tall, least=2.8, caption=caption)


def orderings_plot(
    scores: FloatArray, accuracy: FloatArray, chosen: Sequence[int], *, shots: int | None, x: str, title: str
) -> Plot:
    """Every ordering by what it is chosen by and by its accuracy on test, both [S, P]; the ``chosen`` [S] stand out.

    On a page each point is a prompt of so many ``shots``. There about 2,000 are shown, at equal distances.
    """
    names = {"an ordering": BLUE, "the chosen one of a set": ORANGE}
    is_chosen = np.zeros(accuracy.shape, dtype=np.bool_)
    is_chosen[np.arange(len(accuracy)), list(chosen)] = True

    def below(width: float) -> float:
        return 0.5 + 0.19 * legend_rows([*names], width)

    def tall(width: float) -> float:
        return min(0.75 * width, 3.0) + below(width) + 0.7

    def draw(figure: Figure) -> None:
        width, height = figure.get_size_inches()
        axes = placed(figure, 0.62, below(width), width - 0.77, height - below(width) - 0.7)
        for (name, colour), which, size in zip(names.items(), (~is_chosen, is_chosen), (14, 34), strict=True):
            looks: Any = {"color": colour, "marker": "D" if which is is_chosen else "o", "linewidths": 0.5}
            axes.scatter(scores[which], accuracy[which], size, label=name, alpha=0.75, edgecolors="white", **looks)
        axes.set(xlabel=x, ylabel="accuracy on test")
        axes.locator_params(axis="x", nbins=6)
        plain_frame(axes)
        legend_below(figure, axes)
        head(figure, title, "a point an ordering of a set; those that dev chooses lead by luck, too")

    def specifications() -> list[charts.Specification]:
        num_sets, num_permutations = accuracy.shape
        even = set(evenly(num_permutations, max(_MOST_POINTS // num_sets, 1)))
        rows = [
            plain({"x": scores[s, p], "y": accuracy[s, p], "name": [*names][int(is_chosen[s, p])]})
            | charts.prompt_at(s, p, shots, f"{scores[s, p]:.4f} on dev, {accuracy[s, p]:.4f} on test")
            for s, p in np.ndindex(accuracy.shape)
            if p in even or is_chosen[s, p]
        ]
        rows.sort(key=lambda row: row["name"] != "an ordering")  # the chosen are drawn over the others
        return [charts.scatter_chart(rows, x=x, y="accuracy on test", colours=names)]

    caption = "Every ordering of every set, by what it is chosen by on dev and by its accuracy on test"
    return Plot((4.8, tall(4.8)), draw, specifications, tall=tall, least=2.8, caption=caption)


def bands_plot(studies: Sequence[Curved], *, title: str) -> Plot:
    """A panel a study: the mean over k, filled its spread over permutations, hatched that over sets. After arXiv
    2503.22002, Figure 1."""

    def draw_one(axes: Axes, study: Curved) -> None:
        draw_bands(axes, study.curve, study.shots, size=2.5)

    line = "bands: mean ± one standard deviation, filled over permutations, hatched over sets"
    return _over_shots(studies, draw_one, title=title, line=line)


def trajectories_plot(studies: Sequence[Curved], *, title: str) -> Plot:
    """A panel a study: the accuracy of every ordering over k, and their mean. After arXiv 2503.22002, Figure 2."""

    def draw_one(axes: Axes, study: Curved) -> None:
        lines = study.cells.reshape(-1, len(study.shots))
        axes.plot(study.shots, lines.T, color=BLUE, linewidth=0.5, alpha=max(0.12, min(0.6, 12 / len(lines))))
        axes.plot(study.shots, study.curve.mean, color="black", linewidth=1.6, marker="o", markersize=2.5)

    return _over_shots(studies, draw_one, title=title, line="thin: every ordering of every set; black: their mean")


def heat_maps_plot(studies: Sequence[tuple[str, FloatArray]], *, title: str) -> Plot:
    """Accuracy [S, P] of each study by set and permutation, in the same colours for all."""
    low, high = (float(bound([bound(cells) for _, cells in studies])) for bound in (np.min, np.max))
    is_flat = low == high
    scale = scale_of(low, high)

    def layout(width: float) -> tuple[int, float, float]:
        columns = _evened(len(studies), int((width - 0.1) // 1.9))
        wide = (width - 0.62 - 0.1) / columns - 0.24
        cells_high = max(cells.shape[0] for _, cells in studies)
        return columns, wide, min(max(0.2 * cells_high, 0.9), 2.2)

    def tall(width: float) -> float:
        columns, _, height = layout(width)
        return _HEAD + _TITLES + math.ceil(len(studies) / columns) * (height + 0.62) + (0.05 if is_flat else _BAR)

    def draw(figure: Figure) -> None:
        width = figure.get_figwidth()
        columns, _, height = layout(width)
        foot = 0.05 if is_flat else _BAR
        image: Any = None
        for place, (name, cells) in enumerate(studies):
            axes = _panel(figure, place, columns, 0.5, height, gap=0.24, under=0.62, top=_HEAD + _TITLES)
            printed = cells.size <= 36 and axes.get_position().width * width / cells.shape[1] > 0.3
            image = draw_cells(axes, cells, scale, printed, size=6.0)
            _title(axes, name)
            axes.set(xlabel="permutation", ylabel="set" if place % columns == 0 else "")
            axes.set_xticks([0, cells.shape[1] - 1] if cells.shape[1] > 1 else [0])
            axes.set_yticks([0, cells.shape[0] - 1] if cells.shape[0] > 1 else [0])
            axes.tick_params(length=0)
        line = f"every ordering has {cell_words(low)}" if is_flat else "the same colours for all"
        if not is_flat:  # colours of one number would show a range that is not there
            bar = placed(figure, 0.5, foot - 0.1, min(width - 0.62, 3.2), 0.1)
            figure.colorbar(image, cax=bar, orientation="horizontal", label="accuracy").outline.set_visible(False)
        head(figure, title, line)

    return Plot(
        (7.0, tall(7.0)), draw, tall=tall, least=2.4, caption="Accuracy by set and permutation, in the same colours"
    )


def _over_shots(studies: Sequence[Curved], draw_one: Any, *, title: str, line: str) -> Plot:
    """A panel a study, with one scale of accuracy for all and the line of chance."""

    def layout(width: float) -> tuple[int, float]:
        columns = _evened(len(studies), min(int((width - 0.5) // 1.35), 4))
        return columns, min(max(0.75 * (width - 0.6) / columns, 1.15), 2.4)

    def tall(width: float) -> float:
        columns, height = layout(width)
        return _HEAD + _TITLES + math.ceil(len(studies) / columns) * (height + 0.46) + 0.16

    def draw(figure: Figure) -> None:
        width = figure.get_figwidth()
        columns, height = layout(width)
        panels = []
        for place, study in enumerate(studies):
            axes = _panel(figure, place, columns, 0.6, height, gap=0.14, under=0.46, top=_HEAD + _TITLES)
            draw_one(axes, study)
            if study.chance is not None:
                chance_line(axes, study.chance, label="chance")
            _title(axes, study.title)
            axes.set_xticks(_few(sorted({k for each in studies for k in each.shots}), width / columns))
            axes.set_ylabel("accuracy" if place % columns == 0 else "")
            axes.tick_params(axis="y", labelleft=place % columns == 0)
            if place + columns >= len(studies):
                axes.set_xlabel("demonstrations k")
            plain_frame(axes)
            panels.append(axes)
        limits = np.array([axes.get_ylim() for axes in panels])
        across = np.array([axes.get_xlim() for axes in panels])
        for axes in panels:
            axes.set_xlim(across[:, 0].min(), across[:, 1].max())
            axes.set_ylim(max(limits[:, 0].min(), -0.02), min(limits[:, 1].max(), 1.02))
        dotted = "; dotted: chance" if _has_chance(studies) else ""
        head(figure, title, line + dotted)

    columns = _evened(len(studies), 4)
    width = 1.1 + 1.6 * max(columns, 2)
    return Plot((width, tall(width)), draw, tall=tall, least=2.4, caption=f"{title}; {line}")


def _draw_effects(axes: Axes, studies: Sequence[Estimates], place: int, is_ratio: bool) -> None:
    for row, study in enumerate(studies):
        value, (colour, marker) = study.values[place], LOOKS[row % len(LOOKS)]
        if not math.isnan(study.printed[place]):
            hollow: Any = {"marker": marker, "markersize": 6.5, "markerfacecolor": "none"}
            axes.plot([study.printed[place]], [row], color=colour, **hollow)
        if math.isnan(value.estimate):
            if math.isnan(study.printed[place]):
                axes.annotate(NOTHING, (0.03, row), xycoords=("axes fraction", "data"), color=GREY, va="center")
            continue
        if not math.isnan(value.low):
            reach = np.clip([value.low, value.high], *((1e-6, 1e6) if is_ratio else (0, 1)))  # r may have no bound
            axes.plot(reach, [row, row], color=colour, linewidth=1.3)
        axes.plot([value.estimate], [row], marker=marker, markersize=4.5, color=colour)


def _ends(study: Estimates, place: int) -> list[float]:
    value = study.values[place]
    found = (value.estimate, value.low, value.high, study.printed[place])
    return [end for end in found if math.isfinite(end)]


def _as_ratio(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis with a line at 1 and a few round numbers, no wider than an interval that says something."""
    axes.axvline(1.0, color=GREY, linewidth=0.9, linestyle=(0, (4, 2)), zorder=0)
    clipped = np.clip([1.0, *values], 1 / _WIDEST_R, _WIDEST_R)
    limits = float(clipped.min()) / 1.15, float(clipped.max()) * 1.15
    steps = [step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10) if limits[0] <= step <= limits[1]]
    axes.set(xscale="log", xlim=limits)
    axes.minorticks_off()
    axes.set_xticks(steps, [f"{step:g}" for step in steps])


def _panel(
    figure: Figure,
    place: int,
    columns: int,
    left: float,
    height: float,
    *,
    gap: float,
    under: float,
    top: float = _HEAD,
) -> Axes:
    """One of several panels, row by row from the top left; ``under`` and ``gap`` are the inches between them."""
    width = (figure.get_figwidth() - left - 0.1) / columns - gap * (columns - 1) / columns
    row, column = divmod(place, columns)
    bottom = figure.get_figheight() - top - row * (height + under) - height
    return placed(figure, left + column * (width + gap), bottom, width, height)


def _title(axes: Axes, words: str) -> None:
    """Over a panel, on as many lines as its width takes, the first two of them."""
    width = axes.get_position().width * axes.get_figure(root=True).get_figwidth()  # type: ignore[union-attr]
    lines = textwrap.wrap(words, max(int(width / 0.062), 8), break_on_hyphens=False)
    text = "\n".join([*lines[:1], f"{lines[1]}…"] if len(lines) > 2 else lines)
    axes.set_title(text, fontsize=7.5, pad=3, parse_math=False)


def wrapped(name: str) -> list[str]:
    """A name beside a row: two lines at most, cut where it is longer."""
    lines = textwrap.wrap(name, 18, break_on_hyphens=False) or [""]
    return lines if len(lines) <= 2 else [lines[0], f"{lines[1][:17]}…"]


def _evened(count: int, most: int) -> int:
    """Columns of at most so many panels side by side, so that rows are as full as can be."""
    return math.ceil(count / math.ceil(count / max(min(count, most), 1)))


def _few(shots: Sequence[int], width: float) -> list[int]:
    """As many of the k as have room under a panel of so many inches, whatever their distances."""
    span, room = max(max(shots) - min(shots), 1), 0.24 / max(width - 0.7, 0.5)
    kept = [min(shots), max(shots)]
    for k in reversed(shot_ticks(shots)):
        if all(abs(k - other) / span >= room for other in kept):
            kept.append(k)
    return sorted(set(kept))


def _has_chance(studies: Sequence[Curved]) -> bool:
    return any(study.chance is not None for study in studies)
