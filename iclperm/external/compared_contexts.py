"""Contexts that answered the same queries: their accuracies, and whether they differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from iclperm.errors import DataError, RequestError
from iclperm.report import figures
from iclperm.report.parts import (
    Plot,
    Table,
    interval_words,
    listed,
    number,
    p_words,
    percent,
    percent_with_bounds,
    plain,
)
from iclperm.stats.grades import PairedGrades, PairwiseGrades, graded_mean, paired_grades, pairwise_grades
from iclperm.stats.intervals import Interval, side_of, wilson_interval
from iclperm.stats.paired import (
    CochranQ,
    McNemar,
    PairwiseTests,
    cochran_q,
    mcnemar,
    paired_interval,
    pairwise_mcnemar,
)
from iclperm.stats.sensitivity import AccuracyBounds, accuracy_bounds, graded_items, query_weights, usable_queries

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_PAIRED = 60  # contexts that are tested pair by pair
_MOST_DRAWN = 40  # contexts in one figure
_MOST_ROWS = 20  # of pairs in a table
_MOST_TOLD = 4  # contexts whose weighted accuracy is said one by one
_NAME_LETTERS = 36
_NOT_EQUAL = "cannot be told apart, which does not prove them equal"


@dataclass(frozen=True)
class Contexts:
    """C contexts that answered the same queries."""

    names: tuple[str, ...]
    accuracy: tuple[Interval, ...]
    """With Wilson's interval, of grades Student's, over the queries that every context answered, each once."""
    num_queries: int
    dropped: float
    """Share of the queries that some context did not answer."""
    pair: McNemar | PairedGrades | None
    """Of two contexts."""
    difference: Interval | None
    """Of their accuracies, the first less the second: Tango's score interval, of grades Student's."""
    cochran: CochranQ | None
    """Of three or more; None for grades."""
    pairs: PairwiseTests | PairwiseGrades | None
    """Of 3 to 60."""
    is_graded: bool = False
    weighted: tuple[float, ...] = ()
    """[C] accuracy over the same queries by their weights; empty where each counts once."""
    bounds: AccuracyBounds | None = None
    """[C] over all queries, if what each context lacks were wrong, or right; None where nothing is missing."""

    @property
    def warnings(self) -> Sequence[str]:
        """See `Findings`."""
        lines = []
        if self.dropped:
            lines.append(f"{self.dropped:.1%} of the queries are left out: some context has no answer to them")
        if self.cochran is not None and 0 < len(self.names) * self.cochran.num_informative < 24:
            lines.append(
                f"only {self.cochran.num_informative} queries tell the contexts apart: Cochran's p-value is rough"
            )
        if len(self.names) > _MOST_PAIRED:
            lines.append(f"{len(self.names):,} contexts are too many to test pair by pair (the most is {_MOST_PAIRED})")
        return lines

    def conclusion(self) -> list[str]:
        """See `Findings`."""
        return [*self._unweighted(), *([self._by_weight()] if self.weighted else [])]

    def _by_weight(self) -> str:
        told = [f"{percent(share)} ({name})" for name, share in zip(self.names, self.weighted, strict=True)]
        named = listed(told) if 1 < len(told) <= _MOST_TOLD else percent(self.weighted[0])
        if len(told) > _MOST_TOLD:
            named = f"{percent(min(self.weighted))} to {percent(max(self.weighted))}"
        return (
            f"Every query counts once in this; by the weights of the queries it is {named}, of which nothing is tested."
        )

    def _unweighted(self) -> list[str]:
        if self.pair is not None and self.difference is not None:
            return [_pair_words(self.names, self.pair, self.difference)]
        if len(self.names) == 1:
            kind = "Student's" if self.is_graded else "Wilson"
            return [
                f"{_measured(self.is_graded)} is {percent_with_bounds(self.accuracy[0])} over {self.num_queries:,} "
                f"queries (95 % {kind} interval)."
            ]
        best, worst = (pick(range(len(self.names)), key=self._estimate) for pick in (max, min))
        lines = [
            f"{_measured(self.is_graded)} runs from {percent(self._estimate(worst))} ({self.names[worst]}) to "
            f"{percent(self._estimate(best))} ({self.names[best]}) over {self.num_queries:,} queries.",
        ]
        if self.cochran is not None:
            lines.append(
                f"Cochran's Q = {self.cochran.statistic:.1f} on {self.cochran.degrees} degrees of freedom, "
                f"{p_words(self.cochran.p_value)}: the contexts "
                + (
                    "differ."
                    if self.cochran.p_value < 0.05
                    else "cannot be told apart, which does not prove them equal."
                )
            )
        if self.pairs is not None:
            num = int(np.count_nonzero(self.pairs.adjusted < 0.05))
            lines.append(
                f"Of {len(self.pairs.adjusted):,} pairs {num:,} differ at 5 % for all of them together ("
                + ("paired t" if self.is_graded else "McNemar mid-p")
                + ", Holm)."
            )
        return lines

    def tables(self, full: bool) -> list[Table]:
        """See `Findings`."""
        order = sorted(range(len(self.names)), key=self._estimate, reverse=True)
        shown = order if full else order[:_MOST_ROWS]
        rows: list[tuple[str, ...]] = [
            (self.names[i], number(self._estimate(i)), interval_words(self.accuracy[i])) for i in shown
        ]
        caption = "" if len(shown) == len(order) else f"The best {len(shown)} of {len(order):,}."
        bounds = "95 % t interval" if self.is_graded else "95 % Wilson interval"
        title = f"{_measured(self.is_graded)} by context"
        header: tuple[str, ...] = ("context", _measured(self.is_graded).lower(), bounds)
        if self.weighted:
            header = (*header, "by weight")
            rows = [(*row, number(self.weighted[i])) for row, i in zip(rows, shown, strict=True)]
        if self.bounds is not None:
            header = (*header, "missing", "all wrong", "all right")
            lacks = zip(*(values.tolist() for values in self.bounds), strict=True)
            ends = [(f"{missing:.1%}", number(low), number(high)) for low, high, missing in lacks]
            rows = [(*row, *ends[i]) for row, i in zip(rows, shown, strict=True)]
            caption += (
                " Accuracy: over the queries that all answered. All wrong, all right: over all queries, if every "
                "missing answer were so."
            )
        tables = [Table(title, header, rows, caption=caption.strip())]
        if self.pairs is not None:
            tables.append(self._all_pairs(self.pairs))
        if self.pair is not None and self.difference is not None:
            tables.append(_pair_table(self.names, self.pair, self.difference))
        return tables

    def _all_pairs(self, pairs: PairwiseTests | PairwiseGrades) -> Table:
        p_values = pairs.p_mid if isinstance(pairs, PairwiseTests) else pairs.p_value
        order = np.argsort(p_values, kind="stable")[:_MOST_ROWS]
        rows = [
            (
                f"{self.names[pairs.first[i]]} - {self.names[pairs.second[i]]}",
                f"{pairs.difference[i]:+.4f}",
                f"[{pairs.low[i]:+.4f}, {pairs.high[i]:+.4f}]",
                *map(number, (p_values[i], pairs.adjusted[i])),
            )
            for i in order
        ]
        p_name, interval = ("p", "t") if self.is_graded else ("mid-p", "Tango")
        caption = (
            f"The {len(order)} pairs with the lowest p of {len(p_values):,}; Holm adjusts for all of them, the "
            "intervals are those of each pair alone."
        )
        header = ("pair", "difference", f"95 % {interval}", p_name, "Holm")
        return Table("Differences", header, rows, caption=caption)

    def plots(self) -> dict[str, Plot]:
        """Accuracy of every context with its interval; none for one or for more than 40."""
        if not 2 <= len(self.names) <= _MOST_DRAWN:
            return {}
        return {"contexts": Plot((6.4, 1.3 + 0.22 * len(self.names)), self._draw)}

    def _draw(self, figure: Figure) -> None:
        order = sorted(range(len(self.names)), key=self._estimate)
        height = figure.get_figheight()
        axes = figure.add_axes((0.4, 0.5 / height, 0.57, 1 - 1.1 / height))
        values = np.array([self.accuracy[i][:3] for i in order])
        places = np.arange(len(order))
        axes.hlines(places, values[:, 1], values[:, 2], color=figures.GREY, linewidth=1.2)
        axes.plot(values[:, 0], places, "o", color=figures.BLUE, markersize=4)
        axes.set_yticks(places, [_short(self.names[i]) for i in order])
        axes.set(xlabel=_measured(self.is_graded).lower(), ylim=(-0.6, len(order) - 0.4))
        figures.plain_frame(axes)
        bars = "95 % t intervals" if self.is_graded else "95 % Wilson intervals"
        title = f"{_measured(self.is_graded)} by context"
        figures.head(figure, title, f"{self.num_queries:,} queries; bars: {bars}")

    def to_dict(self) -> dict[str, Any]:
        """See `Findings`."""
        bounds: Iterable[Any] = [None] * len(self.names) if self.bounds is None else zip(*self.bounds[:2], strict=True)
        told = zip(self.names, self.accuracy, bounds, strict=True)
        return {
            "contexts": [
                {"name": name, "accuracy": plain(share), "bounds": None if ends is None else [*map(float, ends)]}
                for name, share, ends in told
            ],
            "by_weight": list(self.weighted) or None,
            "num_queries": self.num_queries,
            "dropped": self.dropped,
            "graded": self.is_graded,
            "mcnemar": plain(None if self.is_graded else self.pair),
            "paired_t": plain(self.pair if self.is_graded else None),
            "difference": plain(self.difference),
            "cochran_q": plain(self.cochran),
            "pairs": plain(self.pairs),
        }

    def _estimate(self, index: int) -> float:
        return self.accuracy[index].estimate


def contexts(
    correct: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    names: Sequence[str] = (),
    weights: npt.ArrayLike | None = None,
) -> Contexts:
    """What can be said of answers [C, Q] of contexts, 0 and 1 or grades in 0..1.

    `weights` [Q] count in a mean that stands beside; every test and interval counts a query once. Raises RequestError
    on another shape or other values, DataError where no query was answered by all.
    """
    items = graded_items(correct)
    if items.ndim != 2 or not items.size:
        raise RequestError(f"contexts need correct of shape [C, Q], got {list(items.shape)}")
    usable = usable_queries(items.shape, state)
    num, num_queries = len(items), int(np.count_nonzero(usable))
    if not num_queries:
        raise DataError("no query was answered in every context; give fewer contexts")
    kept = items[:, usable]
    is_graded = kept.dtype.kind == "f"
    several = 3 <= num <= _MOST_PAIRED
    return Contexts(
        names=tuple(names) or tuple(f"context {i}" for i in range(num)),
        accuracy=tuple(map(graded_mean if is_graded else _share, kept)),
        num_queries=num_queries,
        dropped=1 - num_queries / items.shape[1],
        pair=(paired_grades(*kept) if is_graded else mcnemar(*kept)) if num == 2 else None,
        difference=_difference(kept) if num == 2 else None,
        cochran=cochran_q(kept) if num >= 3 and not is_graded else None,
        pairs=(pairwise_grades(kept) if is_graded else pairwise_mcnemar(kept)) if several else None,
        is_graded=is_graded,
        weighted=_weighted(kept, None if weights is None else query_weights(weights, items.shape[1])[usable]),
        bounds=None if state is None or not np.any(state) else accuracy_bounds(items, state),
    )


def _weighted(kept: npt.NDArray[Any], weights: npt.NDArray[Any] | None) -> tuple[float, ...]:
    """[C]; empty where all count alike, or what is left counts nothing."""
    if weights is None or np.ptp(weights) == 0 or not weights.any():
        return ()
    return tuple(np.average(kept, axis=1, weights=weights).tolist())


def _share(answers: npt.NDArray[Any]) -> Interval:
    return wilson_interval(int(np.count_nonzero(answers)), len(answers))


def _difference(kept: npt.NDArray[Any]) -> Interval:
    """Of two contexts [2, Q]."""
    if kept.dtype.kind != "f":
        return paired_interval(*kept)
    found = paired_grades(*kept)
    return Interval(found.difference, found.low, found.high, 0.95)


def _measured(is_graded: bool) -> str:
    return "Mean grade" if is_graded else "Accuracy"


def _pair_words(names: Sequence[str], pair: McNemar | PairedGrades, difference: Interval) -> str:
    estimate, low, high = (100 * value for value in difference[:3])
    start = f"{names[0]} against {names[1]}: {estimate:+.1f} points"
    if isinstance(pair, McNemar):
        p_value, what = pair.p_mid, "of accuracy"
        test = f"{pair.only_first:,} queries against {pair.only_second:,} of {pair.num_queries:,} (McNemar mid-p"
    else:
        p_value, what = pair.p_value, "of the mean grade"
        test = f"over {pair.num_queries:,} queries (paired t"
    if p_value < 0.05:
        verdict = "the two differ"
    else:
        verdict = f"they {_NOT_EQUAL}"
        if side_of(difference, 0):
            verdict += "; the interval excludes 0 by a hair, the test does not"
    return f"{start} {what} [{low:+.1f} to {high:+.1f}], {test}, {p_words(p_value)}): {verdict}."


def _pair_table(names: Sequence[str], pair: McNemar | PairedGrades, difference: Interval) -> Table:
    rows = [(f"difference in {'accuracy' if isinstance(pair, McNemar) else 'mean grade'}", f"{pair.difference:+.4f}")]
    bounds = f"[{difference.low:+.4f}, {difference.high:+.4f}]"
    if isinstance(pair, McNemar):
        rows = [
            ("only the first is right", f"{pair.only_first:,}"),
            ("only the second is right", f"{pair.only_second:,}"),
            *rows,
            ("95 % interval (Tango)", bounds),
            ("McNemar, exact p", number(pair.p_exact)),
            ("McNemar, mid-p", number(pair.p_mid)),
        ]
    else:
        rows += [
            ("95 % interval (t)", bounds),
            ("standard error", number(pair.se)),
            ("paired t, p", number(pair.p_value)),
        ]
    return Table(f"{names[0]} against {names[1]}", ("", ""), rows)


def _short(name: str) -> str:
    """The end of a long name, by which files differ, for a figure."""
    short = name if len(name) <= _NAME_LETTERS else "…" + name[1 - _NAME_LETTERS :]
    return short.replace("$", r"\$")  # no mathematics
