"""Verdicts of single trajectories of a curve: their figure, and what they took where each was asked until decided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from iclperm.report import charts, figures
from iclperm.report.parts import Plot, Table, percent, plain, points
from iclperm.stats.sensitivity import FloatArray
from iclperm.stats.verdicts import STATES, State, Verdicts, sequential_verdicts, shares_of
from iclperm.studies.tokens import beside_everything
from iclperm.study.states import NOT_ASKED, OK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from iclperm.runs.run import FinishedRun

VERDICTS: dict[State, str] = {"equivalent": "flat", "different": "changes", "undecided": "undecided"}
COLUMNS = (1, 2, 0)
"""Of shares by `STATES`, as they are shown: flat, changes, undecided."""


@dataclass(frozen=True)
class AskedVerdicts:
    """The verdicts of a run that asked each trajectory until it had one, and what they took."""

    claims: tuple[int, ...]
    """The numbers of demonstrations from which plateaus were looked for."""
    margin: float
    """Changes up to this are flat; units of accuracy."""
    looks: tuple[int, ...]
    """After how many queries trajectories were looked at; before the first look all were asked at every k."""
    undecided: tuple[tuple[int, ...], ...]
    """For each look that there was, the trajectories that it left undecided, claim by claim."""
    verdicts: tuple[Verdicts, ...]
    """From each of the claims to the largest number of demonstrations."""
    num_asked: int
    """Answers that were asked."""
    num_cells: int
    """Answers of a study that asks everything."""
    tokens_forwarded: int
    """Of all sessions."""
    tokens_exhaustive: int
    """Distinct tokens of a study that asks everything."""
    is_generated: bool
    """Whether answers were generated; tokens forwarded are then also theirs."""

    @classmethod
    def of(cls, run: FinishedRun) -> AskedVerdicts | None:
        """Those of a run; None of one that asked all trajectories the same."""
        wanted = run.study.wanted
        if wanted is None or not wanted.is_of_verdicts:
            return None
        known, test = run.decisions[0]["known"], run.splits["test"]
        looks, claims = tuple(known["looks"]), tuple(known["claims"])
        undecided = tuple(tuple(decision["known"]["undecided"]) for decision in run.decisions[1:])

        def right(place: int) -> FloatArray:
            correct, state = test.correct[:, :, place], test.state[:, :, place]
            return np.where(state == OK, correct, np.nan)

        return cls(
            claims=claims,
            margin=wanted.half_width,
            looks=looks,
            undecided=undecided,
            verdicts=tuple(
                sequential_verdicts(
                    right(run.shots.index(k)),
                    right(-1),
                    looks,
                    num_looks=len(undecided),
                    margin=wanted.half_width,
                )
                for k in claims
            ),
            num_asked=int((test.context_state != NOT_ASKED).sum()),
            num_cells=test.context_state.size,
            tokens_forwarded=run.report.tokens_forwarded,
            tokens_exhaustive=run.report.tokens_unique,
            is_generated=test.generated is not None,
        )

    @property
    def warnings(self) -> list[str]:
        """What stayed undecided, and that the rest of the report is from the first queries."""
        num = self.verdicts[0].state.size
        left = [
            f"from k = {k}: {count:,} of {num:,} trajectories stay undecided after all {self.looks[-1]:,} queries; "
            f"more queries, or a wider margin than ±{self.margin:g}, would decide more"
            for k, count in zip(self.claims, self.undecided[-1], strict=True)
            if count
        ]
        return [
            *left,
            f"verdicts of single trajectories from {self.where} are from all that each was asked; everything else here "
            f"is from the first {self.looks[0]:,} queries, which all answered",
        ]

    @property
    def where(self) -> str:
        """The numbers of demonstrations from which plateaus were looked for, in words."""
        return f"k = {' and '.join(map(str, self.claims))}"

    def judged(self) -> str:
        """What a reason against a conclusion is judged by, and how more is."""
        return (
            f"This is judged by the first {self.looks[0]:,} queries, which all trajectories answered; a run without "
            "'precision' is judged by all of its."
        )

    def told(self, last: int) -> list[str]:
        """The verdicts, which speak of these very orderings, up to ``last`` demonstrations."""
        sentences = []
        for k, found in zip(self.claims, self.verdicts, strict=True):
            undecided, flat, changes = shares_of(found.state)
            sentences.append(
                f"From k = {k} to {last}, of {found.state.size} single trajectories {flat:.0%} are shown to be flat "
                f"within ± {points(self.margin)}, {changes:.0%} to change, {undecided:.0%} stay undecided."
            )
        return sentences

    def conclusion(self) -> list[str]:
        """What the verdicts took."""
        numbers = [int(found.num_queries.mean().round()) for found in self.verdicts]
        means = ", ".join(f"{number:,} from k = {k}" for k, number in zip(self.claims, numbers, strict=True))
        beside = beside_everything(
            self.tokens_forwarded,
            self.tokens_exhaustive,
            "a study that asks everything",
            is_generated=self.is_generated,
        )
        return [
            f"Each trajectory was asked until it was decided, or all {self.looks[-1]:,} queries: {means} on average.",
            f"It asked {self.num_asked:,} of {self.num_cells:,} answers and {beside}.",
        ]

    def table(self) -> Table:
        """How many trajectories have each verdict, and the queries that it took."""
        rows = []
        for k, found in zip(self.claims, self.verdicts, strict=True):
            for code in COLUMNS:
                queries = found.num_queries[found.state == code]
                places = np.quantile(queries, (0, 0.5, 1)) if len(queries) else ()
                spread = [f"{int(value):,}" for value in places] or ["-"] * 3
                claim, verdict = str(k) if code == COLUMNS[0] else "", VERDICTS[STATES[code]]
                rows.append((claim, verdict, f"{len(queries):,}", *spread))
        caption = (
            f"Looked at after {', '.join(f'{size:,}' for size in self.looks)} queries. A look spends as much of the "
            "5 % as its queries are of those of all looks, and Holm's adjustment is over the trajectories: so verdicts "
            "keep their error although each stops by it."
        )
        return Table(
            "Queries that verdicts took",
            ("from k", "verdict", "trajectories", "fewest", "median", "most"),
            rows,
            texts=(1,),
            caption=caption,
        )

    def plot(self) -> Plot:
        """Trajectories that were still undecided over the queries that each had answered."""
        caption = "Trajectories still undecided, over the queries that each had answered"
        return Plot((5.2, 3.4), self._draw, self._charts, caption=caption)

    def to_dict(self) -> dict[str, Any]:
        """Every number that is shown, JSON-safe."""
        return {name: plain(value) for name, value in vars(self).items()}

    @property
    def _course(self) -> list[tuple[str, list[tuple[int, float]]]]:
        """By claim the queries answered, and % of the trajectories undecided after them."""
        num, been = self.verdicts[0].state.size, (0, *self.looks[: len(self.undecided)])
        return [
            (f"from k = {k}", [*zip(been, [100.0, *(100 * left[place] / num for left in self.undecided)], strict=True)])
            for place, k in enumerate(self.claims)
        ]

    def _draw(self, figure: Figure) -> None:
        width, height = figure.get_size_inches()
        axes = figures.placed(figure, 0.7, 0.75, width - 0.9, height - 1.5)
        for place, (name, course) in enumerate(self._course):
            queries, left = zip(*course, strict=True)
            axes.step(
                queries, left, where="post", color=f"C{place}", marker="o", markersize=3.5, linewidth=1.3, label=name
            )
        axes.set_ylim(0, 102)
        axes.set_xlabel("queries that each had answered")
        axes.set_ylabel("% undecided")
        figures.plain_frame(axes)
        if len(self.claims) > 1:
            axes.legend(frameon=False, fontsize=8)
        share = self.num_asked / self.num_cells
        figures.head(
            figure,
            "Trajectories asked until each is decided",
            f"{percent(share)} of the answers of a study that asks everything",
        )

    def _charts(self) -> list[charts.Specification]:
        rows = [
            {"x": size, "at": size, "y": left, "name": name} for name, course in self._course for size, left in course
        ]
        colours = {name: f"C{place}" for place, (name, _) in enumerate(self._course)}
        return [charts.line_chart(rows, x="queries answered", y="% undecided", colours=colours)]


def shares_plot(shots: Sequence[int], shares: FloatArray, title: str, line: str) -> Plot:
    """Stacked shares [K, 3] of the trajectories that are flat, change or stay undecided, from each of ``shots`` on."""
    return Plot(
        (5.2, _shares_tall(5.2)),
        partial(_draw_shares, shots, shares, title, line),
        tall=_shares_tall,
        least=2.6,
        caption="From every k on: which orderings are shown to stay as accurate, and which to change",
    )


def _draw_shares(shots: Sequence[int], shares: FloatArray, title: str, line: str, figure: Figure) -> None:
    width, height = figure.get_size_inches()
    foot = _shares_foot(width)
    axes: Axes = figures.placed(figure, 0.62, foot, width - 0.77, height - foot - 0.7)
    bottom, bars = np.zeros(len(shares)), np.arange(len(shares))
    looks = ((figures.BLUE, ""), (figures.ORANGE, "////"), ("#D9D9D9", ""))
    for column, (colour, hatch) in zip(COLUMNS, looks, strict=True):
        share, name = 100 * shares[:, column], VERDICTS[STATES[column]]
        axes.bar(bars, share, 0.85, bottom, label=name, color=colour, hatch=hatch, edgecolor="white", linewidth=0.4)
        bottom = bottom + share
    step = math.ceil(len(bars) / max(int((width - 0.77) / 0.3), 1))
    axes.set_xticks(bars[::step], [str(k) for k in shots[::step]])
    axes.set(xlabel="number of demonstrations k", ylabel="% of the trajectories", ylim=(0, 100))
    figures.plain_frame(axes)
    figures.legend_below(figure, axes)
    figures.head(figure, title or "Which trajectories are flat from k on", line)


def _shares_foot(width: float) -> float:
    """Inches below the bars: ticks, their name, and the legend."""
    return 0.5 + 0.19 * figures.legend_rows([*VERDICTS.values()], width)


def _shares_tall(width: float) -> float:
    return min(0.5 * width, 2.0) + _shares_foot(width) + 0.7
