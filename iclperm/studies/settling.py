"""The part of a convergence study that draws how scores, curves and plateau verdicts settle with P, S and Q."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from iclperm.report import figures
from iclperm.report.parts import Plot, Table, evenly, listed, number, plain
from iclperm.stats.sensitivity import FloatArray
from iclperm.stats.settling import AxisSettling, ScoreSettling
from iclperm.stats.verdicts import MARGIN, STATES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LETTERS = {"permutations": "P", "sets": "S", "queries": "Q"}
_MOST_CURVES = 4
_GOOD = 0.8  # agreement with another run of the size that is called good
_LINE: dict[str, Any] = {"marker": "o", "markersize": 3, "linewidth": 1.1}
_DASHED: dict[str, Any] = {"color": figures.ORANGE, "linewidth": 0.9, "linestyle": (0, (4, 2))}
_MIDDLE = 1  # place of the median among the quantiles


@dataclass(frozen=True)
class SettlingFindings:
    """How the papers' curves, scores and verdicts settle."""

    shots: tuple[int, ...]
    """[K] numbers of demonstrations."""
    axes: tuple[AxisSettling, ...]
    """Permutations, sets, queries; sizes of the last count queries."""
    title: str = ""
    """Task and model, for figures."""

    def conclusion(self) -> list[str]:
        """What of the papers' open questions the run answers."""
        return [*self._about_scores(), *self._about_verdicts()]

    def tables(self, full: bool) -> list[Table]:
        """Scores, verdicts and (in full) the curve at each size; those without data are left out."""
        found = [self._score_table(axis, full) for axis in self.axes if axis.scores]
        if any(axis.verdicts for axis in self.axes):
            found.append(self._verdict_table())
        if full and len(self.shots) > 1:
            found += [self._curve_table(axis) for axis in self.axes]
        return found

    def plots(self) -> dict[str, Plot]:
        """The papers' curves with their bands by size, and what settles how fast; those without data are left out."""
        found = {}

        def plot(draw: Any, height: float, count: int, caption: str) -> Plot:
            def tall(width: float) -> float:
                return figures.height_of_row(width, count, height, 0.0)

            return Plot((7.4, height), draw, tall=tall, least=2.8, caption=caption)

        all_axes, scored = len(self.axes), sum(bool(axis.scores) for axis in self.axes)
        if len(self.shots) > 1:
            found["convergence_curves"] = plot(self._draw_curves, 3.6, all_axes, "The averaged curve, by size")
        if scored:
            words = "Agreement of the scores of demonstrations, by size"
            found["convergence_scores"] = plot(self._draw_scores, 3.4, scored, words)
        if any(axis.verdicts for axis in self.axes):
            words = "Share of plateau verdicts that stay the same, by size"
            found["convergence_plateaus"] = plot(self._draw_verdicts, 3.4, all_axes, words)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Every number that is shown, JSON-safe."""
        return {axis.axis: plain(axis) for axis in self.axes}

    def _about_scores(self) -> Iterator[str]:
        for axis in self.axes:
            if not axis.scores:
                continue
            best = {
                name: float(score.with_other[-1, _MIDDLE])
                for name, score in axis.scores.items()
                if not math.isnan(score.with_other[-1, _MIDDLE])
            }
            if not best:
                continue
            size = f"{axis.sizes[-1]:,} {axis.axis}"
            told = ", ".join(f"{name} {value:.2f}" for name, value in best.items())
            good = [name for name, value in best.items() if value >= _GOOD]
            verdict = "all of them have settled"
            if len(good) < len(best):
                have = "has" if len(good) == 1 else "have"
                verdict = f"only {listed(good)} {have} settled" if good else "none of them has settled"
            yield (
                f"The scores of demonstrations would correlate with those of another run of {size} by {told}: "
                f"{verdict} ({_GOOD} and more)."
            )

    def _about_verdicts(self) -> Iterator[str]:
        for place, verdict in enumerate(self.axes[0].verdicts if self.axes else ()):
            unsettled = []
            for axis in self.axes:
                same = axis.verdicts[place].same_other
                known = [n for n in range(len(same)) if not math.isnan(same[n])]
                if known and same[known[-1]] < _GOOD:
                    size = axis.sizes[known[-1]]
                    unsettled.append(f"{100 * same[known[-1]]:.0f} % of pairs of {size:,} {axis.axis}")
            said = f"The averaged curve from k = {verdict.first} to {verdict.last} is {_word(verdict.whole)}"
            if unsettled:
                yield f"{said}; that has not settled: only {listed(unsettled)} agree on a verdict."
            else:
                yield f"{said}; at least {100 * _GOOD:.0f} % of pairs of disjoint parts agree on a verdict."

    def _score_table(self, axis: AxisSettling, full: bool) -> Table:
        rows = []
        for name, score in axis.scores.items():
            for place in evenly(len(axis.sizes), None if full else 4):
                rows.append(
                    (
                        f"{name}, {LETTERS[axis.axis]}' = {axis.sizes[place]:,}",
                        number(score.with_other[place, _MIDDLE], 2),
                        _band(score.with_other[place]),
                        number(score.with_whole[place, _MIDDLE], 2),
                        _band(score.with_whole[place]),
                    )
                )
        caption = (
            "Spearman's correlation of scores within sets, median and 90 % of the parts. Another part: disjoint, of "
            "the same size; beyond half, from halves (Spearman-Brown). All: 1 at full size by construction."
        )
        header = ("", "with another part", "90 %", "with all", "90 %")
        return Table(f"Scores of demonstrations from fewer {axis.axis}", header, rows, caption=caption)

    def _verdict_table(self) -> Table:
        rows = []
        for axis in self.axes:
            for verdict in axis.verdicts:
                for place in evenly(len(axis.sizes), 5):
                    rows.append(
                        (
                            f"k = {verdict.first}, {LETTERS[axis.axis]}' = {axis.sizes[place]:,}",
                            *(f"{100 * share:.0f} %" for share in verdict.states[place]),
                            _share(verdict.same[place]),
                            _share(verdict.same_other[place]),
                            _share(verdict.same_single[place]),
                        )
                    )
        caption = (
            f"From k to {self.shots[-1]}, margin {MARGIN:g}: share of the parts with each verdict of the averaged "
            "curve, as all of the run, as a disjoint part; single: trajectories judged as by all queries."
        )
        header = ("", *STATES, "as all", "as another", "single, as all")
        return Table("Plateau verdicts from smaller designs", header, rows, caption=caption)

    def _curve_table(self, axis: AxisSettling) -> Table:
        rows = []
        for k_place in evenly(len(self.shots), 8):
            cells = []
            for place in evenly(len(axis.sizes), _MOST_CURVES):
                low, middle, high = axis.curve[place, k_place]
                cells.append(number(middle) if math.isnan(low) else f"{middle:.4f} ({low:.3f} to {high:.3f})")
            rows.append((str(self.shots[k_place]), *cells))
        sizes = [f"{LETTERS[axis.axis]}' = {axis.sizes[place]:,}" for place in evenly(len(axis.sizes), _MOST_CURVES)]
        caption = (
            f"Median and 90 % of µ_k over fresh samples of that many {axis.axis}, the rest as in the run; cut to 0..1."
        )
        return Table(f"The averaged curve from fewer {axis.axis}", ("k", *sizes), rows, caption=caption)

    def _draw_curves(self, figure: Figure) -> None:
        for axes, axis in self._panels(figure):
            places = evenly(len(axis.sizes), _MOST_CURVES)
            for shade, place in zip(np.linspace(0.12, 0.4, len(places)), places, strict=True):
                low, middle, high = axis.curve[place].T
                label = f"{LETTERS[axis.axis]}' = {axis.sizes[place]:,}"
                if np.isfinite(low).all():
                    shaded: dict[str, Any] = {"color": figures.BLUE, "alpha": float(shade), "linewidth": 0}
                    axes.fill_between(self.shots, low, high, **shaded, label=label)
                else:
                    axes.plot(self.shots, middle, color="black", linewidth=1.3, label=f"{label}, all")
                    spread = axis.spread[place]
                    if np.isfinite(spread).all():
                        for side in (-1, 1):
                            words = "± std over orders" if side == 1 else None
                            axes.plot(self.shots, middle + side * spread, **_DASHED, label=words)
            axes.set(xlabel="number of demonstrations k", xticks=figures.shot_ticks(self.shots, 6))
            axes.legend(frameon=False, fontsize=6.5, loc="best", handlelength=1.4)
        figure.axes[0].set_ylabel("accuracy")
        line = "bands: 90 % of fresh samples of the size, the other axes as in the run"
        figures.head(figure, self.title or "The averaged curve", line)

    def _draw_scores(self, figure: Figure) -> None:
        colours = ("black", figures.BLUE, figures.ORANGE, figures.GREEN)
        for axes, axis in self._panels(figure, [axis for axis in self.axes if axis.scores]):
            for (name, score), colour in zip(axis.scores.items(), colours, strict=False):
                _draw_agreement(axes, axis, score, colour, name)
            axes.set(ylim=(min(0.0, axes.get_ylim()[0]), 1.03))
        figure.axes[0].set_ylabel("rank correlation")
        figure.axes[0].legend(frameon=False, fontsize=7, loc="best", handlelength=1.6)
        line = "solid: with a disjoint part of the size, band 90 %; dotted: with all"
        figures.head(figure, self.title or "Scores of demonstrations", line)

    def _draw_verdicts(self, figure: Figure) -> None:
        for axes, axis in self._panels(figure):
            for verdict, colour in zip(axis.verdicts, (figures.BLUE, figures.ORANGE), strict=False):
                for values, style, words in (
                    (verdict.same_other, "solid", "as a disjoint part"),
                    (verdict.same, "dotted", "as all"),
                    (verdict.same_single, "dashed", "single, as all"),
                ):
                    drawn = np.isfinite(values)
                    if drawn.any():
                        sizes = np.array(axis.sizes)[drawn]
                        words = f"k = {verdict.first}, {words}"
                        axes.plot(sizes, values[drawn], **_LINE, color=colour, linestyle=style, label=words)
            axes.set(ylim=(-0.03, 1.03))
        figure.axes[-1].legend(frameon=False, fontsize=6.5, loc="lower right", handlelength=2.2)
        figure.axes[0].set_ylabel("share with the same verdict")
        figures.head(figure, self.title or "Plateau verdicts", f"from k to {self.shots[-1]}; margin {MARGIN:g}")

    def _panels(self, figure: Figure, shown: list[AxisSettling] | None = None) -> Iterator[tuple[Axes, AxisSettling]]:
        """A panel an axis, each with its sizes below."""
        axes_of = list(self.axes) if shown is None else shown
        panels = figures.in_a_row(figure, len(axes_of), 0.0)
        for panel, axis in zip(panels, axes_of, strict=True):
            panel.set_xlabel(f"{axis.axis} {LETTERS[axis.axis]}'")
            panel.set_xticks([axis.sizes[place] for place in evenly(len(axis.sizes), 5)])
            figures.plain_frame(panel)
            yield panel, axis


def _draw_agreement(axes: Axes, axis: AxisSettling, score: ScoreSettling, colour: str, name: str) -> None:
    sizes = np.array(axis.sizes)
    known = np.isfinite(score.with_other[:, _MIDDLE])
    axes.plot(sizes[known], score.with_other[known, _MIDDLE], **_LINE, color=colour, label=name)
    low, _, high = score.with_other[known].T
    axes.fill_between(sizes[known], low, high, color=colour, alpha=0.1, linewidth=0)
    also = np.isfinite(score.with_whole[:, _MIDDLE])
    axes.plot(sizes[also], score.with_whole[also, _MIDDLE], color=colour, linewidth=1.0, linestyle="dotted")


def _band(quantiles: FloatArray) -> str:
    return "-" if math.isnan(quantiles[0]) else f"{quantiles[0]:.2f} to {quantiles[2]:.2f}"


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.0f} %"


def _word(state: str) -> str:
    words: Mapping[str, str] = {
        "equivalent": f"flat (within {MARGIN:g})",
        "different": "not flat",
        "undecided": "undecided",
    }
    return words[state]
