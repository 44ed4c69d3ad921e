"""The figure of the best prompt of each length: accuracy over the number of demonstrations, and which one is taken."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from iclperm.report import charts, figures
from iclperm.report.parts import Plot, plain
from iclperm.stats.intervals import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ByShots(NamedTuple):
    """What the figure shows."""

    shots: Sequence[int]
    accuracy: Sequence[Interval]
    """[K], of 1."""
    take: int
    """The place of the one that is taken."""
    split: str
    """What the accuracy is on, in words."""
    title: str
    crosses: Sequence[tuple[int, float]] = ()
    """Places and accuracies of something beside."""
    cross: str = ""
    """What that is, in words."""

    def plot(self, caption: str) -> Plot:
        """For a report's `plots`."""
        return Plot((5.6, 3.6), partial(_draw, self), partial(_charts, self), caption=caption)


def _draw(told: ByShots, figure: Figure) -> None:
    width, height = figure.get_size_inches()
    axes = figures.placed(figure, 0.75, 0.6, width - 0.95, height - 1.45)
    places = np.arange(len(told.shots))
    means = np.array([100 * found.estimate for found in told.accuracy])
    ends = np.array([[100 * found.low, 100 * found.high] for found in told.accuracy]).T
    axes.errorbar(places, means, yerr=np.abs(ends - means), color=figures.BLUE, marker="o", markersize=4, linewidth=1.3)
    axes.plot([told.take], [means[told.take]], "o", markersize=9, mfc="none", mec="black", zorder=3)
    for place, at in told.crosses:
        axes.plot([place], [100 * at], "x", color=figures.GREY, markersize=6)
    axes.set_xticks(places, [str(shots) for shots in told.shots])
    axes.set(xlabel="demonstrations (the best prompt of each number)", ylabel=f"accuracy on {told.split}, %")
    figures.plain_frame(axes)
    cross = f"; cross: {told.cross}" if told.crosses else ""
    figures.head(figure, told.title, f"circle: to take{cross}")


def _charts(told: ByShots) -> list[charts.Specification]:
    name = "the best prompt of each length"
    rows = [
        plain({"x": shots, "y": found.estimate, "low": found.low, "high": found.high, "name": name})
        for shots, found in zip(told.shots, told.accuracy, strict=True)
    ]
    return [charts.line_chart(rows, x="demonstrations", y=f"accuracy on {told.split}", colours={name: figures.BLUE})]
