"""Order against selection over the number of shots: numbers, table and figure."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm import stats
from iclperm.errors import RequestError
from iclperm.report.figures import BLUE, GREY, ORANGE, head, placed, plain_frame, shot_ticks
from iclperm.report.parts import Plot, Table, interval_words, number, plain
from iclperm.stats import Interval
from iclperm.stats.intervals import possible
from iclperm.stats.sensitivity import FloatArray
from iclperm.studies.sensitivity_summary import components_or_why, spread_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_WIDEST_R = 16.0  # intervals of r beyond 1/16 and 16 leave the frame
_CAPTION_LETTERS = 84
_WIDTH = 4.8  # inches
_PREFIX_CAUTION = (
    "At k < {shots} the context is the first k of one ordering of {shots} demonstrations: a permutation also chooses "
    "which of them are seen, so order holds selection within the set there, and r comes out too low. Only at k = "
    "{shots} is it order alone; the study key `resample: per_k` makes it so at every k."
)


class IntervalsOverShots(NamedTuple):
    """One estimate with its interval at every number of shots; NaN where undefined, `high` can be infinite."""

    estimate: FloatArray
    """[K]"""
    low: FloatArray
    """[K]"""
    high: FloatArray
    """[K]"""
    level: float
    """Of the intervals: 0.95."""


@dataclass(frozen=True)
class SensitivityOverShots:
    """Order against selection at every number of shots that was run, in units of accuracy.

    At k = 0 there is nothing to order or to choose: every entry there is NaN.
    """

    shots: tuple[int, ...]
    """[K] numbers of demonstrations, ascending; the last is the size of the sets."""
    resampled: bool
    """Whether every k had sets and permutations of its own; else its contexts are prefixes of the longest ones."""
    order: FloatArray
    """[K] order sensitivity as printed; NaN for P = 1. See `is_order_alone`."""
    selection: FloatArray
    """[K] selection sensitivity as printed; NaN for S = 1."""
    ratio: IntervalsOverShots
    """r as printed, with the jackknife interval; without one below three sets or permutations."""
    order_effect: IntervalsOverShots
    """Order effect free of item noise, with the generalised interval; NaN for S = 1, P = 1 or one query."""
    selection_effect: IntervalsOverShots
    """The same for selection."""
    ratio_effect: IntervalsOverShots
    """r free of item noise."""
    dropped: float
    """Share of the queries (by weight) without an answer in any cell."""
    num_queries: int
    """Distinct queries that were used."""

    @property
    def is_order_alone(self) -> npt.NDArray[np.bool_]:
        """[K] whether a permutation only orders; elsewhere it also chooses which demonstrations of the set are seen."""
        return np.array([self.resampled or k == self.shots[-1] for k in self.shots])

    @property
    def caution(self) -> str | None:
        """What order means where it is not order alone, and the remedy; None where it is everywhere."""
        if not any(k and not alone for k, alone in zip(self.shots, self.is_order_alone, strict=True)):
            return None
        return _PREFIX_CAUTION.format(shots=self.shots[-1])

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-safe lists, dictionaries and numbers; NaN and infinity become None."""
        return {**plain(self), "is_order_alone": plain(self.is_order_alone), "caution": self.caution}


def sensitivity_over_shots(
    correct: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    *,
    shots: Sequence[int],
    weights: npt.ArrayLike | None = None,
    classes: npt.ArrayLike | None = None,
    seed: int = 0,
    resampled: bool = False,
) -> SensitivityOverShots:
    """Order against selection at every number of shots, from every answer there is.

    Args:
        correct: [S, P, K, Q] 0 or 1.
        state: [S, P, K, Q] integers, 0 = ok.
        shots: [K] numbers of demonstrations, ascending.
        weights: [Q] how often each query counts in the accuracy that is spoken of.
        classes: [Q] what the weights stand for (`stats.variance_components`).
        seed: of the interval draws.
        resampled: every k has sets and permutations of its own (`resample: per_k`). Otherwise contexts are prefixes of
            one ordering of the largest k, and below it order holds selection within the set (`is_order_alone`).

    NaN at a k where some ordering has no answer. Raises RequestError on shapes that do not fit. Cost: O(K·S·P·(Q + S +
    P)). arXiv 2511.09700, at more than its one k.
    """
    items, counts = np.asarray(correct), tuple(int(k) for k in shots)
    if items.ndim != 4:
        raise RequestError(f"sensitivity over shots needs correct of shape [S, P, K, Q], got {list(items.shape)}")
    if len(counts) != items.shape[2] or list(counts) != sorted(set(counts)):
        raise RequestError(f"shots must be {items.shape[2]} ascending numbers, one for each k, got {list(counts)}")
    cells = stats.accuracy(items, state, weights)
    states = None if state is None else np.asarray(state)
    at_k = [
        _at_one_k(
            cells.values[:, :, place],
            _effects(items[:, :, place], None if states is None else states[:, :, place], weights, classes, seed),
        )
        if k and not np.isnan(cells.values[:, :, place]).any()
        else _UNDEFINED_AT_K
        for place, k in enumerate(counts)
    ]
    order, selection, ratio, order_effect, selection_effect, ratio_effect = zip(*at_k, strict=True)
    return SensitivityOverShots(
        shots=counts,
        resampled=resampled,
        order=np.array(order),
        selection=np.array(selection),
        ratio=_over_shots(ratio),
        order_effect=_over_shots(order_effect),
        selection_effect=_over_shots(selection_effect),
        ratio_effect=_over_shots(ratio_effect),
        dropped=cells.dropped,
        num_queries=cells.num_queries,
    )


_AtOneK = tuple[float, float, Interval, Interval, Interval, Interval]
_NOTHING = Interval(math.nan, math.nan, math.nan, 0.95)
_UNDEFINED_AT_K: _AtOneK = (math.nan, math.nan, _NOTHING, _NOTHING, _NOTHING, _NOTHING)


def _effects(
    items: npt.NDArray[Any],
    state: npt.NDArray[Any] | None,
    weights: npt.ArrayLike | None,
    classes: npt.ArrayLike | None,
    seed: int,
) -> stats.SensitivityIntervals | None:
    """Effects free of item noise of items [S, P, Q]; None where they cannot be told."""
    components, _ = components_or_why(items, state, weights, classes)
    return None if components is None else possible(stats.effect_interval(components, seed=seed))


def _at_one_k(matrix: FloatArray, effects: stats.SensitivityIntervals | None) -> _AtOneK:
    """Order, selection, r with its jackknife interval and the effects, from accuracy [S, P]."""
    printed = spread_of(matrix, "mean_std")
    enough = min(matrix.shape) >= 3
    r = stats.jackknife_ratio_interval(matrix) if enough else _NOTHING._replace(estimate=printed.ratio)
    if effects is None:
        return printed.order, printed.selection, r, _NOTHING, _NOTHING, _NOTHING
    return printed.order, printed.selection, r, *effects


def _over_shots(intervals: Sequence[Interval]) -> IntervalsOverShots:
    estimate, low, high, (level, *_) = zip(*intervals, strict=True)
    return IntervalsOverShots(np.array(estimate), np.array(low), np.array(high), level)


def over_shots_table(over_shots: SensitivityOverShots) -> Table:
    """Order against selection at every k >= 1, as printed and free of item noise, each with its interval of r.

    A star marks the k at which order is not order alone; the caption says why.
    """
    rows: list[Sequence[str]] = []
    printed = (over_shots.order, over_shots.selection, over_shots.ratio.estimate)
    effects = [
        part.estimate for part in (over_shots.order_effect, over_shots.selection_effect, over_shots.ratio_effect)
    ]
    for place, (k, alone) in enumerate(zip(over_shots.shots, over_shots.is_order_alone, strict=True)):
        if k == 0:
            continue
        for name, kind, values, r in (
            (f"{k}{'' if alone else '*'}", "as printed", printed, over_shots.ratio),
            ("", "noise-free", effects, over_shots.ratio_effect),
        ):
            interval = Interval(r.estimate[place], r.low[place], r.high[place], r.level)
            rows.append((name, kind, *(number(value[place]) for value in values), interval_words(interval)))
    header = ("k", "", "to order", "to selection", "r", "95 % of r")
    caption = "" if over_shots.caution is None else f"* {over_shots.caution}"
    return Table("Order against selection over k", header, rows, texts=(1,), caption=caption)


def ratio_plot(over_shots: SensitivityOverShots, *, title: str = "") -> Plot:
    """r as printed with its jackknife interval, and both sensitivities under it, against k >= 1.

    Points are hollow where order is not order alone, and a caption says why. r has a logarithmic axis with a line at 1.
    Raises RequestError where no k >= 1 was run.
    """
    drawn = np.array(over_shots.shots) >= 1
    if not drawn.any():
        raise RequestError("r over k needs a run with at least one k >= 1, this one has k = 0 only")

    def caption_of(width: float) -> list[str]:
        letters = int(_CAPTION_LETTERS * width / _WIDTH)
        return textwrap.wrap(f"Hollow points: {over_shots.caution}", letters) if over_shots.caution else []

    def tall(width: float) -> float:
        return 4.7 + 0.14 * len(caption_of(width))

    def draw(figure: Figure) -> None:
        caption = caption_of(figure.get_figwidth())
        upper, lower = _ratio_axes(figure, 0.14 * len(caption))
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

    return Plot((_WIDTH, tall(_WIDTH)), draw, tall=tall, least=2.8)


def _ratio_axes(figure: Figure, foot: float) -> tuple[Axes, Axes]:
    """Two panels over one axis of k, above `foot` inches of caption."""
    width = figure.get_figwidth() - 0.96
    bottom, panel, gap = foot + 0.5, 1.7, 0.16
    lower = placed(figure, 0.82, bottom, width, panel)
    upper = placed(figure, 0.82, bottom + panel + gap, width, panel)
    upper.sharex(lower)
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
