"""Kind `convergence` (the checks that arXiv 2503.22002 asks for next): how large must the design be?

Of any finished run, without a model call: the same numbers from fewer permutations, sets and queries, and the sizes
that would be needed for a wanted precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from scipy import special

from iclperm.base.help import fields_in_help
from iclperm.errors import RequestError
from iclperm.report import figures
from iclperm.report.notebook import ShownFindings
from iclperm.report.parts import Plot, Table, evenly, listed, number, percent, plain
from iclperm.runs.identity import index_orders
from iclperm.stats.components import Effects
from iclperm.stats.convergence import (
    AxisConvergence,
    MeanError,
    NeededSizes,
    Resampled,
    convergence_over_permutations,
    convergence_over_queries,
    convergence_over_sets,
    mean_error,
    mean_variance,
    needed_sizes,
    query_blocks,
)
from iclperm.stats.incomplete import filled
from iclperm.stats.sensitivity import FloatArray, query_weights
from iclperm.stats.settling import BlockSums, blocks_of, settling
from iclperm.stats.tensor import segment_sums
from iclperm.studies.bearing import Bearing, Reason, of_run
from iclperm.studies.missing import filled_words
from iclperm.studies.settling import SettlingFindings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from iclperm.runs.run import FinishedRun

HALF_WIDTH = 0.01
"""Default of the wanted precision of a mean accuracy: ± one point."""

_LEVEL = 0.95
_LEAST_QUERIES = 64
_MAX_BRIEF_ROWS = 8
_FEW_SETS = 10
_ROUNDING = 1e-9  # errors below it are none
_WIDEST = 0.5  # half of all that an accuracy can be
_LETTERS = {"permutations": "P", "sets": "S", "queries": "Q"}
_STATISTICS = {
    "accuracy": "mean accuracy",
    "order": "order sensitivity",
    "selection": "selection sensitivity",
}
_LINES = (*_STATISTICS.values(), "mean, all axes drawn", "1/√n")
_CAPTION = "Standard errors against the number of permutations, sets and queries"


@fields_in_help
@dataclass(frozen=True, repr=False)
class ConvergenceFindings(ShownFindings):
    """What a convergence study says."""

    shots: tuple[int, ...]
    """[K] numbers of demonstrations, ascending."""
    shape: tuple[int, int, int]
    """Sets, permutations and distinct usable queries of the run."""
    effective_queries: float
    """Equally weighted queries that would be worth as much, (Σw)²/Σw²; what the errors are computed with."""
    errors: tuple[MeanError, ...]
    """[K] of µ_k, the mean accuracy at each k."""
    half_width: float
    """Wanted of µ_k; units of accuracy."""
    level: float
    """Of the intervals: 0.95."""
    needed: tuple[NeededSizes, ...]
    """[K] sizes that give it for fresh queries, too."""
    needed_held: tuple[NeededSizes, ...]
    """[K] sizes that give it on these very queries: what sets and permutations alone must do."""
    permutations: AxisConvergence
    """How r and accuracy settle over the number of permutations."""
    sets: AxisConvergence
    """The same over the number of sets."""
    queries: AxisConvergence
    """`sizes` count distinct queries."""
    axis_se: FloatArray
    """[3, K] standard error of µ_k, order and selection sensitivity at full size, the three axes added up as variances.
    Interactions count on each of their axes, so it is rather too large than too small."""
    title: str
    """Task and model, for figures."""
    warnings: tuple[str, ...]
    """What should be known before the numbers are believed."""
    settling: SettlingFindings | None = None
    """How curves, scores of demonstrations and plateau verdicts settle; None where there is one context only."""
    bearing: Bearing = field(default_factory=Bearing)
    """What the answers can bear."""

    @property
    def half_widths(self) -> FloatArray:
        """[K] of the 95 % interval of µ_k in this run, for fresh queries too; NaN for one query, and never above ½, as
        ± 50 points hold all that an accuracy can be."""
        return self._half_widths(held=False)

    @property
    def half_widths_held(self) -> FloatArray:
        """[K] on these very queries."""
        return self._half_widths(held=True)

    def _half_widths(self, held: bool) -> FloatArray:
        intervals = [error.interval(self.level, held=held) for error in self.errors]
        return np.minimum([(interval.high - interval.low) / 2 for interval in intervals], _WIDEST)

    def total_se(self, axis: AxisConvergence, place: int) -> FloatArray:
        """[N] standard error of µ_k at one place on the K axis for fresh draws of all axes, by variance components."""
        which = ("sets", "permutations", "queries").index(axis.axis)
        clipped = Effects(*(max(value, 0.0) for value in self.errors[place].sigma2))
        num_s, num_p, num_q = self.shape
        worth = self.effective_queries / num_q
        variances = []
        for size in axis.sizes:
            s, p, q = (size if place == which else whole for place, whole in enumerate((num_s, num_p, num_q)))
            variances.append(mean_variance(clipped, s, p, q * worth))
        return np.sqrt(variances)

    def conclusion(self) -> list[str]:
        """The result in plain sentences; where the answers do not bear one, why, and what would suffice."""
        return self.bearing.told(self._sentences())

    def _sentences(self) -> list[str]:
        num_s, num_p, num_q = self.shape
        half = self.half_widths[-1]
        run = f"{num_s} sets x {num_p} permutations x {num_q:,} queries"
        if math.isnan(half):
            return [f"With {run} nothing can be said of how sure the mean accuracy is."]
        contexts = [axis for axis in self.errors[-1].covers if axis != "queries"]
        held = f"± {100 * self.half_widths_held[-1]:.1f} points for new {listed(contexts)}, " if contexts else ""
        if not self._varies(-1):
            held = ""  # equal answers bound queries only
        sentences = [
            f"With {run} the mean accuracy at k = {self.shots[-1]} is {percent(self.errors[-1].mean)} "
            f"{held}± {100 * half:.1f} for new queries too ({self.level:.0%}); {self._largest_source()}"
        ]
        if not self._varies(-1):
            return [*sentences, "From answers that are all equal nothing can be told of the sizes that are needed."]
        if contexts and self.shots[-1]:
            sentences.append(self._about_needed())
        settled = [] if self.settling is None else self.settling.conclusion()
        return [*sentences, *self._about_sensitivities(), *settled]

    def tables(self, full: bool) -> list[Table]:
        """Most important first; without ``full`` some k only, and the parts of the largest k in brief."""
        found = [self._needed_table(full)]
        if full:
            found += [self._axis_table(axis) for axis in (self.permutations, self.sets, self.queries)]
        else:
            found.append(self._brief_table())
        return found if self.settling is None else [*found, *self.settling.tables(full)]

    def plots(self) -> dict[str, Plot]:
        """Standard errors against the number of permutations, sets and queries, and what settles how fast."""
        settled = {} if self.settling is None else self.settling.plots()

        def tall(width: float) -> float:
            return figures.height_of_row(width, 3, 3.6, 0.19 * figures.legend_rows(_LINES, width))

        whole = Plot((7.4, 3.6), self._draw, tall=tall, least=2.8, caption=_CAPTION)
        return {"convergence": whole, **settled}

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-safe lists, dictionaries and numbers; NaN and infinity become None."""
        names = (
            "shots",
            "shape",
            "effective_queries",
            "half_width",
            "level",
            "needed",
            "needed_held",
            "permutations",
            "sets",
            "queries",
            "axis_se",
        )
        content = {name: plain(getattr(self, name)) for name in names}
        content["errors"] = [plain(error) for error in self.errors]
        content["half_widths"], content["half_widths_held"] = plain(self.half_widths), plain(self.half_widths_held)
        if self.settling is not None:
            content["settling"] = self.settling.to_dict()
        content |= {"conclusion": self.conclusion(), "bearing": self.bearing.to_dict()}
        return content | {"convergence_warnings": list(self.warnings)}

    def _varies(self, place: int) -> bool:
        """Whether the answers at one place on the K axis are not all equal."""
        return sum(self.errors[place].parts) > 0

    def _largest_source(self) -> str:
        parts = self.errors[-1].parts
        sources = {
            "sets": parts.S,
            "permutations": parts.P + parts.SP,
            "queries": parts.I + parts.SI + parts.PI + parts.SPI,
        }
        total = sum(sources.values())
        if total <= 0:
            return "all answers are equal."
        name = max(sources, key=lambda source: sources[source])
        return f"{sources[name] / total:.0%} of that variance comes from the {name}."

    def _about_needed(self) -> str:
        held, fresh = self.needed_held[-1], self.needed[-1]
        wanted = f"± {100 * self.half_width:g} point{'' if self.half_width == 0.01 else 's'}"
        if self.half_widths_held[-1] <= self.half_width:
            sentence = f"On these queries that is within {wanted} already"
        else:
            names = (("sets", held.sets), ("permutations", held.permutations))
            ways = [f"{size:,} {axis} alone" for axis, size in names if size is not None]
            if held.together is not None and min(held.together[:2]) > 1:
                ways.append("{:,} sets x {:,} permutations".format(*held.together))
            sentence = f"{wanted} on these queries takes about {', or '.join(ways) or 'more than 100,000'}"
        if self.half_widths[-1] <= self.half_width:
            return f"{sentence}, and for new queries as well."
        if fresh.queries is not None:
            return f"{sentence}; for new queries too, {fresh.queries:,} queries."
        if fresh.together is None:
            return f"{sentence}; for new queries too it is out of reach."
        return "{}; for new queries too, {:,} sets x {:,} permutations x {:,} queries.".format(
            sentence, *fresh.together
        )

    def _about_sensitivities(self) -> list[str]:
        if not self.shots[-1]:
            return []
        sizes = []
        for place, name in ((1, "order"), (2, "selection")):
            statistic: Resampled = getattr(self.permutations, name)
            value, se = statistic.mean[-1, -1], self.axis_se[place, -1]
            if not math.isnan(value + se):
                sizes.append(f"{name} sensitivity {100 * value:.2f} ± {100 * se:.2f} points")
        return [f"At k = {self.shots[-1]}: {', '.join(sizes)} (one standard error)."] if sizes else []

    def _needed_table(self, full: bool) -> Table:
        rows = []
        for place in evenly(len(self.shots), None if full else _MAX_BRIEF_ROWS):
            held, fresh = self.needed_held[place], self.needed[place]
            half, half_held = self.half_widths[place], self.half_widths_held[place]
            has_contexts, varies = self.shots[place] > 0 and self._varies(place), self._varies(place)
            together = held.together if has_contexts else None
            rows.append(
                (
                    str(self.shots[place]),
                    number(self.errors[place].mean),
                    f"±{half_held:.4f}" if has_contexts and not math.isnan(half_held) else "-",
                    _size(held.sets) if has_contexts else "-",
                    _size(held.permutations) if has_contexts else "-",
                    "-" if together is None else _product(together[:2]),
                    "-" if math.isnan(half) else f"±{half:.4f}",
                    _size(fresh.queries) if varies else "-",
                    "-" if fresh.together is None or not has_contexts else _product(fresh.together),
                )
            )
        names = ("S alone", "P alone", "SxP", "new queries too", "Q alone", "SxPxQ")
        caption = (
            f"±: {self.level:.0%} of the mean accuracy, for new sets and permutations. Sizes: what "
            f"±{self.half_width:g} takes, by variance components (docs/studies/convergence.md); '-': not within "
            "100,000, as the rest adds more, or not known."
        )
        header = ("k", "accuracy", "same queries", *names)
        return Table("Precision, and the sizes that are needed", header, rows, caption=caption)

    def _axis_table(self, axis: AxisConvergence) -> Table:
        rows = []
        total = self.total_se(axis, -1)
        for place, size in enumerate(axis.sizes):
            cells = [
                number(value[place, -1])
                for name in _STATISTICS
                for statistic in (getattr(axis, name),)
                for value in ((statistic.sd, statistic.se) if name == "accuracy" else (statistic.mean, statistic.se))
            ]
            rows.append(
                (f"{size:,}", number(axis.accuracy.mean[place, -1]), *cells[:2], number(total[place]), *cells[2:])
            )
        header = ("size", "accuracy", "std", "error", "error, all", "order", "error", "selection", "error")
        caption = (
            f"k = {self.shots[-1]}. std: over random parts of the run. error: for a fresh sample of the size, these "
            f"{axis.axis} alone being drawn; 'all': the others too."
        )
        return Table(f"Fewer {axis.axis}", header, rows, caption=caption)

    def _brief_table(self) -> Table:
        rows = []
        for axis in (self.permutations, self.sets, self.queries):
            for place in evenly(len(axis.sizes), 4):
                values = (axis.accuracy.se, axis.order.mean, axis.order.se, axis.selection.mean, axis.selection.se)
                name = f"{_LETTERS[axis.axis]}' = {axis.sizes[place]:,}"
                rows.append((name, *(number(value[place, -1]) for value in values)))
        header = ("", "error of accuracy", "order", "error", "selection", "error")
        caption = (
            f"k = {self.shots[-1]}; P permutations, S sets, Q queries. error: standard error for a fresh sample of "
            "this size on this axis alone."
        )
        return Table("Smaller designs", header, rows, caption=caption)

    def _draw(self, figure: Figure) -> None:
        panels = figures.in_a_row(figure, 3, 0.19 * figures.legend_rows(_LINES, figure.get_figwidth()))
        colours = ("black", figures.BLUE, figures.ORANGE)
        for axes, axis in zip(panels, (self.permutations, self.sets, self.queries), strict=True):
            self._draw_axis(axes, axis, colours, figures.GREY)
            figures.plain_frame(axes)
        low, high = panels[0].get_ylim()
        if low <= 0:  # no line was drawn, and the axis has no scale
            low, high = 1e-3, 1e-1
            panels[1].text(0.5, 0.5, "all answers are equal", ha="center", va="center", transform=panels[1].transAxes)
        ticks = [tick for power in range(-7, 1) for tick in (10**power, 2 * 10**power, 5 * 10**power)]
        panels[0].set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        panels[0].set(ylim=(low, high), ylabel="standard error")
        figures.legend_below(figure, panels[0])
        head = self.title or "Standard errors against the size of the design"
        line = f"of accuracy at k = {self.shots[-1]}, of a fresh sample of the size, other axes as in the run"
        figures.head(figure, head, line)

    def _draw_axis(self, axes: Axes, axis: AxisConvergence, colours: Sequence[str], grey: str) -> None:
        sizes = np.array(axis.sizes, dtype=np.float64)
        for name, words, colour, marker in zip(*zip(*_STATISTICS.items(), strict=True), colours, "os^", strict=True):
            se = getattr(axis, name).se[:, -1]
            drawn = se > _ROUNDING
            axes.plot(sizes[drawn], se[drawn], color=colour, marker=marker, markersize=3.5, linewidth=1.1, label=words)
        total = self.total_se(axis, -1)
        if (total > _ROUNDING).all():
            axes.plot(sizes, total, color=grey, linewidth=1.1, linestyle=(0, (4, 2)), label=_LINES[-2])
        last = axis.accuracy.se[-1, -1]
        if last > _ROUNDING:
            reference = last * np.sqrt(sizes[-1] / sizes)
            axes.plot(sizes, reference, color=grey, linewidth=0.9, linestyle=(0, (1, 2)), label=_LINES[-1])
        axes.set(xscale="log", yscale="log", xlabel=f"{axis.axis} {_LETTERS[axis.axis]}'")
        ticks = [axis.sizes[place] for place in evenly(len(axis.sizes), 5)]
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()


def findings(run: FinishedRun) -> ConvergenceFindings:
    """The convergence of any run of sets, permutations and shots, from its stored answers."""
    found = convergence_findings(
        run.correct,
        run.state,
        shots=run.shots,
        weights=run.weights,
        orders=index_orders(run),
        seed=run.study.seed,
        title=run.title,
    )
    bearing = of_run(run)
    if found.half_widths[-1] >= _WIDEST:
        words = "the mean accuracy is known to ± 50 points, all that it can be"
        bearing = bearing.with_reasons([Reason("interval", words, "more sets, permutations and queries")])
    return replace(found, bearing=bearing)


def convergence_findings(
    correct: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    *,
    shots: Sequence[int],
    weights: npt.ArrayLike | None = None,
    orders: npt.ArrayLike | None = None,
    half_width: float = HALF_WIDTH,
    resamples: int = 400,
    seed: int = 0,
    title: str = "",
) -> ConvergenceFindings:
    """How sure µ_k and both sensitivities are, what fewer sets, permutations and queries give, and what is needed.

    Args:
        correct: [S, P, K, Q] 0 or 1.
        state: [S, P, K, Q] integers, 0 = ok; what is missing is filled in (`stats.incomplete.filled`).
        shots: [K] numbers of demonstrations, ascending.
        weights: [Q] whole numbers, how often each query counts in an accuracy.
        orders: [P, K] or [S, P, K], which demonstration stands at each position, for their scores; None leaves these
            out.
        half_width: wanted of the 95 % interval of µ_k.
        resamples: random parts of each size; a tenth of them (20 at least) for curves, scores and verdicts.
        seed: of the parts.

    Raises RequestError on shapes that do not fit, and DataError where no query is ok in every cell. Cost: four
    passes over the tensor, then O(resamples · S·P·K · 64).
    """
    items, counts = np.asarray(correct), tuple(int(k) for k in shots)
    if items.ndim != 4 or items.shape[2] != len(counts):
        raise RequestError(
            f"convergence needs correct of shape [S, P, K, Q] and K shots, got {list(items.shape)} and {list(counts)}"
        )
    whole = filled(items, state, weights)
    items, weight = whole.items, None if weights is None else whole.weights
    num_s, num_p, _, num_q = items.shape
    edges = query_blocks(num_q)
    sums = _segment_sums(items, edges, weight)
    per_block = np.add.reduceat(query_weights(weight, num_q), edges[:-1])
    accuracy = sums.sum(axis=-1, dtype=np.float64) / per_block.sum()
    errors = tuple(
        mean_error(items[:1, :1, place] if k == 0 else items[:, :, place], weight) for place, k in enumerate(counts)
    )
    shape = num_s, num_p, num_q
    over_permutations = convergence_over_permutations(accuracy, resamples=resamples, seed=seed)
    over_sets = convergence_over_sets(accuracy, resamples=resamples, seed=seed)
    over_queries = _over_queries(sums, per_block, edges, resamples, seed)
    weight_of = query_weights(weight, num_q)
    effective = float(weight_of.sum() ** 2 / np.sum(weight_of**2))
    return ConvergenceFindings(
        shots=counts,
        shape=shape,
        effective_queries=effective,
        errors=errors,
        half_width=half_width,
        level=_LEVEL,
        needed=tuple(_needed(error, shape, effective, half_width, held=False) for error in errors),
        needed_held=tuple(_needed(error, shape, effective, half_width, held=True) for error in errors),
        permutations=over_permutations,
        sets=over_sets,
        queries=over_queries,
        axis_se=_axis_se((over_permutations, over_sets, over_queries)),
        title=title,
        warnings=(*([filled_words(whole.share)] if whole.share else []), *_warnings(shape)),
        settling=_settling(
            blocks_of(items, edges, weight, shots=counts, right=sums),
            (over_permutations, over_sets, over_queries),
            orders,
            edges,
            resamples=max(20, resamples // 10),
            seed=seed,
            title=title,
        ),
    )


def _segment_sums(
    items: npt.NDArray[Any], edges: npt.NDArray[np.int64], weight: npt.NDArray[Any] | None
) -> npt.NDArray[Any]:
    """`segment_sums`, also of what was filled in."""
    if items.dtype == np.uint8:
        return segment_sums(items, edges, weight)
    return np.asarray(np.add.reduceat(items * query_weights(weight, items.shape[-1]), edges[:-1], axis=-1))


def _settling(
    blocks: BlockSums,
    over: Sequence[AxisConvergence],
    orders: npt.ArrayLike | None,
    edges: npt.NDArray[np.int64],
    *,
    resamples: int,
    seed: int,
    title: str,
) -> SettlingFindings | None:
    """At the sizes of the standard errors; None where there is one context, or one query."""
    if blocks.right[:, :, -1, 0].size == 1 or blocks.counts.sum() < 2 or blocks.shots[-1] == 0:
        return None
    block, last = int(edges[1]), int(edges[-1])
    found = []
    for each in over:
        sizes = [math.ceil(size / block) for size in each.sizes] if each.axis == "queries" else each.sizes
        one = settling(blocks, each.axis, sizes, orders, resamples=resamples, seed=seed)
        if each.axis == "queries":
            one = replace(one, sizes=tuple(min(size * block, last) for size in one.sizes))
        found.append(one)
    return SettlingFindings(blocks.shots, tuple(found), title)


def _over_queries(
    sums: npt.NDArray[Any], per_block: FloatArray, edges: npt.NDArray[np.int64], resamples: int, seed: int
) -> AxisConvergence:
    """`convergence_over_queries` with sizes that count queries, not blocks: from 64 on, or from a quarter of few."""
    found = convergence_over_queries(sums, per_block, resamples=resamples, seed=seed)
    block = int(edges[1])
    return found._replace(sizes=tuple(min(size * block, int(edges[-1])) for size in found.sizes))


def _needed(
    error: MeanError, shape: tuple[int, int, int], effective: float, half_width: float, *, held: bool
) -> NeededSizes:
    """`needed_sizes` with sizes in distinct queries, whose weights are distributed as those of the run."""
    num_s, num_p, num_q = shape
    found = needed_sizes(error.sigma2, (num_s, num_p, effective), half_width, _LEVEL, held=held)

    def distinct(size: int) -> int:
        return num_q if held else math.ceil(size * num_q / effective - 1e-9)

    return found._replace(
        queries=None if found.queries is None else distinct(found.queries),
        together=None if found.together is None else (*found.together[:2], distinct(found.together[2])),
    )


def _axis_se(axes: Sequence[AxisConvergence]) -> FloatArray:
    """[3, K] errors at full size, added up as variances over the axes for which they are known; NaN where for none."""
    parts = np.array([[part.se[-1] for part in (axis.accuracy, axis.order, axis.selection)] for axis in axes])
    return np.where(np.isnan(parts).all(axis=0), np.nan, np.sqrt(np.nansum(parts**2, axis=0)))


def _warnings(shape: tuple[int, int, int]) -> list[str]:
    num_sets, num_permutations, _ = shape
    warnings = [
        f"one {name} only: nothing is known of others, and errors and sizes leave them out; raise '{name}s'"
        for name, size in (("set", num_sets), ("permutation", num_permutations))
        if size == 1
    ]
    if num_sets == 1 or num_sets > _FEW_SETS:
        return warnings
    df = num_sets - 1
    low, high = (math.sqrt(df / float(special.chdtri(df, tail))) for tail in (0.025, 0.975))
    return [
        *warnings,
        f"{num_sets} sets: the spread between sets is known to a factor of {low:.1f} to {high:.1f} only (95 %, if "
        "Gaussian), and the sizes that are needed move with its square",
    ]


def _product(sizes: Sequence[int]) -> str:
    return "x".join(f"{size:,}" for size in sizes)


def _size(size: int | None) -> str:
    return "-" if size is None else f"{size:,}"
