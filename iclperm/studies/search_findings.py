"""What a search says: sentences, tables and the figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from iclperm.base.help import fields_in_help
from iclperm.report import charts, figures
from iclperm.report.notebook import ShownFindings
from iclperm.report.panels import orderings_plot
from iclperm.report.parts import Plot, Table, interval_words, number, percent, plain, points_with_bounds, signed
from iclperm.stats import Interval
from iclperm.stats.correlation import Correlation
from iclperm.stats.criteria import LABEL_FREE
from iclperm.stats.intervals import side_of
from iclperm.stats.search import Choice, IntArray, OpenChoice, Search, share_of_oracle
from iclperm.stats.search_curves import SearchCurve
from iclperm.stats.sensitivity import FloatArray
from iclperm.stats.winners_curse import WinnersCurse
from iclperm.studies.bearing import Bearing
from iclperm.studies.taking import RecommendedCell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ALPHA = 0.05
_SHOWN_FEATURES = 5
_ROUNDING = 1e-12
_CURVES = "Accuracy on test of the ordering that dev chooses, over how many are tried and by how many dev queries"
_APART = 1.3  # times a size that the next one must be for both to be written below their ticks
_TWO = 5.6  # inches of width that two panels take side by side


class CriterionResult(NamedTuple):
    """What choosing by one criterion gives on the test split."""

    name: str
    """Of the criterion, as the study's key `criterion` has it."""
    highest_dev: Interval
    """Accuracy on test of the ordering with the highest criterion on dev; mean over sets."""
    gain: Interval
    """Over a random ordering."""
    gap_closed: Interval
    """Share of the way from a random ordering to the best one on test; 1 is all of it."""
    correlation: Correlation
    """Spearman's, of the criterion on dev and accuracy on test, within sets."""


class FeatureResult(NamedTuple):
    """How one feature of an ordering goes with its accuracy."""

    name: str
    """Of the feature."""
    correlation: Correlation
    """Spearman's, within sets."""
    adjusted: float
    """Holm's p value over all features; NaN where there is no test."""


@fields_in_help
@dataclass(frozen=True, repr=False)
class SearchFindings(ShownFindings):
    """What a search study says, at one number of shots."""

    criterion: str
    """What the study chooses an ordering by."""
    scores: FloatArray
    """[S, P] that criterion on dev, of every ordering."""
    shots: int | None
    """The number of demonstrations; None where it is not known."""
    num_dev_queries: int
    """Distinct dev queries that were used."""
    result: Search
    """Accuracy on dev and test of every ordering, and what choosing by the criterion gains; shares of 1."""
    over_permutations: SearchCurve
    """Accuracy on test over how many permutations were tried."""
    over_dev_queries: SearchCurve
    """Accuracy on test over how many dev queries chose."""
    curve_criterion: str
    """The criterion of `over_dev_queries`: `dev_accuracy` where that of the study is no mean over queries of 0 and
    1."""
    criteria: tuple[CriterionResult, ...]
    """What choosing by each criterion gives."""
    choices: tuple[Choice, ...]
    """What was chosen for each set and, last, of all sets."""
    curse: WinnersCurse
    """Of dev accuracy, whatever the criterion."""
    noise_dev: float
    """Variance of a dev accuracy around the true one, from the items; `curse.noise_dev` is the same by another way."""
    noise_test: float
    """The same of a test accuracy."""
    features: tuple[FeatureResult, ...]
    """Empty where nothing is known of the demonstrations."""
    recency: Interval | None
    """How much more often the label of the last demonstration is answered; None where that is not known."""
    warnings: tuple[str, ...]
    """What should be known before the numbers are believed."""
    bearing: Bearing = field(default_factory=Bearing)
    """What the answers can bear."""
    open_choice: OpenChoice | None = None
    """What missing dev answers leave open; None where none is missing. For another criterion than dev accuracy all sets
    are open, without bounds."""
    title: str = ""
    """Task and model, for the head of the figure."""
    num_best: int = 1
    """Orderings of all sets with the highest criterion on dev; the first of them is recommended."""

    @property
    def num_permutations(self) -> int:
        """P."""
        return int(self.result.accuracy.shape[1])

    @property
    def recommended(self) -> RecommendedCell | None:
        """The ordering with the highest criterion on dev, of all sets."""
        choice = self.choices[-1]
        if choice.set is None or choice.permutation is None:
            return None
        of = f"of {self.result.accuracy.size:,} orderings"
        note = f"chosen {of} by {_BY[self.criterion]} on {self.num_dev_queries:,} dev queries"
        if self.num_best > 1:
            note += f", the first of {self.num_best:,} that tie there: more dev queries would tell them apart"
        return RecommendedCell(None, choice.set, choice.permutation, is_held_out=True, notes=(note,))

    def conclusion(self) -> list[str]:
        """The result in plain sentences; where the answers do not bear one, why, and what would suffice."""
        if self.num_permutations < 2:
            return ["There is one permutation only, so there was nothing to choose."]
        if self._is_alike:
            return self.bearing.told([self._nothing_to_choose(), *self._joint()])
        sentences = [
            self._gain(),
            *self._overturned(),
            *self._share(),
            self._luck(),
            *self._joint(),
            *self._best_features(),
        ]
        return self.bearing.told(sentences)

    def tables(self, full: bool) -> list[Table]:
        """The columns of the paper, choices and criteria; in full the curves, luck and all features too."""
        brief = [self._main_table(), self._choices_table(), self._criteria_table()]
        if not full:
            return brief + ([self._features_table(_SHOWN_FEATURES)] if self.features else [])
        curves = [
            _curve_table(self.over_permutations, "permutations", "Over the number of permutations"),
            _curve_table(self.over_dev_queries, "dev queries", f"Over the dev queries, by {self.curve_criterion}"),
        ]
        features = [self._features_table(len(self.features))] if self.features else []
        return [*brief, *curves, self._curse_table(), *features, self._sets_table()]

    def plots(self) -> dict[str, Plot]:
        """The four columns over permutations and over dev queries; and every ordering on dev and on test."""
        every = orderings_plot(
            self.scores,
            self.result.accuracy,
            self.result.chosen.tolist(),
            shots=self.shots,
            x=f"{_BY[self.criterion]} on dev",
            title=f"Every ordering on dev and on test{f': {self.title}' if self.title else ''}",
        )
        return {
            "search": Plot((7.4, 3.9), self._draw, self._charts, tall=_tall, least=3.0, caption=_CURVES),
            "search_orderings": every,
        }

    def to_dict(self) -> dict[str, Any]:
        """Every number that is shown, JSON-safe."""
        content: dict[str, Any] = plain(self)
        content["by_set"], content["conclusion"] = plain(self.result.by_set), self.conclusion()
        content["bearing"] = self.bearing.to_dict()
        del content["title"]  # which the report names
        return content

    @property
    def _is_alike(self) -> bool:
        """Whether every test query has the same answer under all orderings of a set."""
        return bool(np.ptp(self.result.accuracy, axis=1).max() < _ROUNDING and not self.noise_test > _ROUNDING)

    def _nothing_to_choose(self) -> str:
        start = "All" if self.shots is None else f"At k = {self.shots}, all"
        r = self.result
        return (
            f"{start} {self.num_permutations} orderings of a set answer the {r.num_queries:,} test queries alike, "
            f"{percent(r.average.estimate)} right: there was nothing to choose, and how far orderings differ on other "
            "queries is not known."
        )

    def _gain(self) -> str:
        start = "The" if self.shots is None else f"At k = {self.shots}, the"
        r = self.result
        sentence = (
            f"{start} ordering that {_BY[self.criterion]} on {self.num_dev_queries:,} dev queries chooses out of "
            f"{self.num_permutations} has {percent(r.highest_dev.estimate)} accuracy on test, a random one "
            f"{percent(r.average.estimate)}: {_points(r.gain)}"
        )
        if not _is_bounded(r.gain):
            return f"{sentence}, without an interval."
        return f"{sentence}." if side_of(r.gain, 0) else f"{sentence}, which cannot be told from 0."

    def _overturned(self) -> list[str]:
        """What the missing dev answers could have chosen instead."""
        found = self.open_choice
        if found is None or not found.num_open:
            return []
        start = f"The missing dev answers ({percent(found.missing)}) could overturn the choice"
        if math.isnan(found.low):
            return [f"{start}: how far is not known for {self.criterion}."]
        sets = f"in {found.num_open} of {len(self.result.chosen)} sets"
        ends = f"{percent(found.low)} to {percent(found.high)}"
        return [f"{start} {sets}: what they would choose at worst has {ends} on test."]

    def _share(self) -> list[str]:
        r = self.result
        if math.isnan(r.gap_closed.estimate):
            return []
        closed, low, high = (f"{100 * value:.0f}" for value in r.gap_closed[:3])
        bounds = f" [{low} to {high}]" if _is_bounded(r.gap_closed) else ""
        random = 100 * share_of_oracle(r.average.estimate, r.maximum.estimate)
        return [
            f"That is {100 * r.share.estimate:.1f} % of the oracle (Max), but a random ordering has {random:.1f} % of "
            f"it too: the choice closes {closed} %{bounds} of the gap between them."
        ]

    def _luck(self) -> str:
        r = self.result
        sentence = (
            f"Max, {percent(r.maximum.estimate)}, is chosen by the answers to the {r.num_queries:,} test queries that "
            "it is judged by"
        )
        if math.isnan(r.honest.estimate):
            return f"{sentence}."
        return (
            f"{sentence}; chosen on one half of them and judged on the other, the best ordering has "
            f"{percent(r.honest.estimate)}."
        )

    def _joint(self) -> list[str]:
        _, order, best_set, both = self.choices
        if best_set.set is None or len(self.result.accuracy) < 2:
            return []
        return [
            f"Beside a random ordering of a random set, choosing the order of a set gains {_points(order.gain)}, "
            f"choosing the set {_points(best_set.gain)}, both together {_points(both.gain)} "
            f"(by {self.criterion}; these intervals are for other test queries, with these very sets and orderings)."
        ]

    def _best_features(self) -> list[str]:
        found = [feature for feature in self.features if feature.adjusted < _ALPHA]
        if not self.features:
            return []
        if not found:
            return ["No feature of an ordering can be shown to go with accuracy (Holm, 5 %).", *self._recency()]
        names = ", ".join(f"{f.name} ({f.correlation.estimate:+.2f})" for f in self._sorted(found)[:_SHOWN_FEATURES])
        return [f"With accuracy go, by rank correlation within sets (Holm, 5 %): {names}.", *self._recency()]

    def _recency(self) -> list[str]:
        if self.recency is None or not _is_bounded(self.recency):
            return []
        more = "more" if self.recency.estimate >= 0 else "less"
        change = self.recency if self.recency.estimate >= 0 else _turned(self.recency)
        sentence = f"The label of the last demonstration is answered {more} often by {_points(change)}"
        return [f"{sentence}." if side_of(self.recency, 0) else f"{sentence}: no recency bias can be shown."]

    def _sorted(self, features: Sequence[FeatureResult]) -> list[FeatureResult]:
        return sorted(features, key=lambda f: -abs(np.nan_to_num(f.correlation.estimate)))

    def _main_table(self) -> Table:
        r = self.result
        names = {
            "Average": r.average,
            "Highest-Dev": r.highest_dev,
            "honest oracle": r.honest,
            "Max": r.maximum,
            "gain = Highest-Dev - Average": r.gain,
            "share = Highest-Dev / Max": r.share,
            "gap closed = gain / (Max - Average)": r.gap_closed,
        }
        return Table(
            f"Search over {self.num_permutations} permutations by {self.criterion}",
            ("test accuracy", "value", "95 % interval"),
            [(name, number(value.estimate), _bounds_of(value)) for name, value in names.items()],
            caption="Means over sets. Intervals: jackknife over sets and over test queries, choices of ordering held. "
            "Honest oracle: chosen on one half of test, judged on the other. " + _dropped(r.dropped),
        )

    def _choices_table(self) -> Table:
        def where(choice: Choice) -> str:
            names = (("set", choice.set), ("permutation", choice.permutation))
            return ", ".join(f"{name} {value}" for name, value in names if value is not None) or "each set"

        return Table(
            "Choosing set and order",
            ("chosen", "accuracy", "gain", "95 % interval", "oracle", "which"),
            [
                (
                    c.name,
                    number(c.accuracy),
                    number(c.gain.estimate),
                    _bounds_of(c.gain),
                    number(c.oracle),
                    where(c),
                )
                for c in self.choices
            ],
            texts=(5,),
            caption="Gain over a random ordering of a random set. Intervals speak of other test queries, the choice "
            "held. Oracle: the same chosen by test accuracy, luck included.",
        )

    def _criteria_table(self) -> Table:
        rows = [
            (
                f"{c.name} *" if c.name in LABEL_FREE else c.name,
                number(c.highest_dev.estimate),
                number(c.gain.estimate),
                _bounds_of(c.gain),
                number(c.gap_closed.estimate),
                _correlation(c.correlation),
            )
            for c in self.criteria
        ]
        return Table(
            "Criteria side by side",
            ("criterion", "accuracy", "gain", "95 % interval", "gap closed", "rank correlation"),
            rows,
            caption="* needs no dev labels. Rank correlation of the criterion on dev with accuracy on test, within "
            "sets, jackknifed over sets and permutations.",
        )

    def _curse_table(self) -> Table:
        c = self.curse
        rows = [
            (
                "correlation of dev and test accuracy",
                f"{c.correlation.estimate:.3f}",
                interval_words(c.correlation, 3, "+"),
            ),
            ("sd of true accuracy over permutations", _root(c.tau2.estimate), _root_bounds(c.tau2)),
            ("sd of dev noise", _root(c.noise_dev), f"from the items {_root(self.noise_dev)}"),
            ("sd of test noise", _root(c.noise_test), f"from the items {_root(self.noise_test)}"),
            ("gain of Highest-Dev", number(c.observed_gain), f"expected {number(c.expected_gain)}"),
            ("lead on dev that test does not show", number(c.observed_optimism), f"expected {c.expected_optimism:.4f}"),
            ("lead of Max", number(c.observed_oracle_gain), f"truly best {number(c.expected_oracle_gain)}"),
        ]
        return Table(
            "The winner's curse, by dev accuracy",
            ("within sets", "value", "beside it"),
            rows,
            texts=(2,),
            caption="True variance: covariance of dev and test accuracy over permutations (interval over sets). Noise: "
            f"the rest. Expected gains are for Gaussian permutations, with {c.expected_maximum:.2f} the expected "
            "maximum of as many.",
        )

    def _features_table(self, count: int) -> Table:
        features = self._sorted(self.features)[:count]
        return Table(
            "Features of an ordering and accuracy",
            ("feature", "rank correlation", "95 % interval", "p (Holm)"),
            [
                (f.name, signed(f.correlation.estimate, 3), interval_words(f.correlation, 3, "+"), number(f.adjusted))
                for f in features
            ],
            caption=f"The {len(features)} largest of {len(self.features)}. Within sets, dev and test queries together; "
            "jackknifed over sets and permutations."
            + ("" if self.recency is None else f" Recency bias on test: {_points(self.recency)}."),
        )

    def _sets_table(self) -> Table:
        columns = self.result.by_set
        rows = [
            (str(s), *(number(columns[name][s]) for name in columns), str(self.result.chosen[s]))
            for s in range(len(self.result.chosen))
        ]
        return Table("By set", ("set", "Average", "Highest-Dev", "honest oracle", "Max", "chosen permutation"), rows)

    def _draw(self, figure: Figure) -> None:
        width, height = figure.get_size_inches()
        is_wide = width >= _TWO
        panel = (width - 1.15) / 2 if is_wide else width - 0.75
        high = height - 1.77 if is_wide else (height - 2.35) / 2
        left = figures.placed(figure, 0.63, height - 0.84 - high, panel, high)
        right = figures.placed(figure, width - panel - 0.12, 0.93, panel, high)
        right.sharey(left)
        right.tick_params(labelleft=not is_wide)
        for axes, curve, name in (
            (left, self.over_permutations, "number of permutations"),
            (right, self.over_dev_queries, "number of dev queries"),
        ):
            _draw_curve(axes, curve)
            axes.set_xlabel(name)
            figures.plain_frame(axes)
        left.set_ylabel("accuracy on test")
        figures.legend_below(figure, left)
        figures.head(
            figure,
            f"Searching for the best ordering{f': {self.title}' if self.title else ''}",
            f"by {self.criterion}; whiskers: 95 % of resamples of sets and permutations or dev queries, "
            "of the lead over Average",
        )

    def _charts(self) -> list[charts.Specification]:
        over = (self.over_permutations, "number of permutations"), (self.over_dev_queries, "number of dev queries")
        return [
            charts.line_chart(
                _rows(curve),
                x=words,
                y="accuracy on test",
                colours={name: style["color"] for name, _, style in _lines(curve)},
                is_log=True,
            )
            for curve, words in over
        ]


def _tall(width: float) -> float:
    return 3.9 if width >= _TWO else 2.35 + 1.1 * width


def _lines(curve: SearchCurve) -> list[tuple[str, Any, dict[str, Any]]]:
    """What is drawn of a curve, as far as it is known: its name, its band and its looks."""
    lines: list[tuple[str, Any, dict[str, Any]]] = [
        ("Max (test labels)", curve.maximum, {"color": figures.GREY, "marker": "^", "linestyle": (0, (4, 2))}),
        ("honest oracle", curve.honest, {"color": figures.GREEN, "marker": "s"}),
        ("Highest-Dev", curve.highest_dev, {"color": figures.BLUE, "marker": "o"}),
        ("Average", curve.average, {"color": figures.ORANGE, "marker": "D"}),
    ]
    return [line for line in lines if np.isfinite(line[1].estimate).all()]


def _asides(curve: SearchCurve) -> list[FloatArray]:
    """Where the points of each line stand: a little beside the sizes, so that no whisker hides another."""
    number, sizes = len(_lines(curve)), np.asarray(curve.sizes, dtype=np.float64)
    step = min(0.11, 0.2 * float(np.diff(np.log2(sizes)).min(initial=1.0)))
    return [sizes * 2 ** (step * (place - (number - 1) / 2)) for place in range(number)]


def _rows(curve: SearchCurve) -> list[dict[str, Any]]:
    """The points of a curve as `charts.line_chart` takes them."""
    return [
        plain({"x": size, "at": at, "y": y, "low": low, "high": high, "name": name})
        for (name, band, _), aside in zip(_lines(curve), _asides(curve), strict=True)
        for size, at, y, low, high in zip(curve.sizes, aside, band.estimate, band.low, band.high, strict=True)
    ]


def _tick_words(sizes: IntArray) -> list[str]:
    """Every size but those whose number would run into the next one's."""
    return [
        f"{size:,}" if after is None or after >= _APART * size else ""
        for size, after in zip(sizes.tolist(), [*sizes.tolist()[1:], None], strict=True)
    ]


def _draw_curve(axes: Axes, curve: SearchCurve) -> None:
    for (name, band, style), aside in zip(_lines(curve), _asides(curve), strict=True):
        reach = np.maximum([band.estimate - band.low, band.high - band.estimate], 0)
        axes.errorbar(
            aside, band.estimate, reach, label=name, linewidth=1.3, markersize=4, elinewidth=0.9, capsize=1.5, **style
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(curve.sizes, _tick_words(curve.sizes))
    axes.minorticks_off()


def _curve_table(curve: SearchCurve, header: str, title: str) -> Table:
    bands = (curve.average, curve.highest_dev, curve.honest, curve.maximum)
    rows = [
        (f"{size:,}", *(number(band.estimate[place]) for band in bands), _bounds_of(_at(curve.highest_dev, place)))
        for place, size in enumerate(curve.sizes)
    ]
    return Table(
        title,
        (header, "Average", "Highest-Dev", "honest oracle", "Max", "95 % band of Highest-Dev"),
        rows,
        caption=f"Means over {curve.resamples} draws. The band is of the lead over Average, cut to 0..1: it resamples "
        f"sets and {header}, not test queries.",
    )


def _at(band: Any, place: int) -> Interval:
    return Interval(band.estimate[place], band.low[place], band.high[place], 0.95)


_BY = {
    "dev_accuracy": "accuracy",
    "majority_agreement": "agreement with the majority vote",
    "global_entropy": "global entropy",
    "local_entropy": "local entropy",
    "mutual_information": "mutual information",
    "dev_log_likelihood": "log-likelihood",
}


def _if_bounded(interval: Interval) -> Interval:
    """An interval without width comes of answers that do not vary and bounds nothing: it then has no bounds."""
    if interval.high - interval.low > _ROUNDING:
        return interval
    return interval._replace(low=math.nan, high=math.nan)


def _turned(interval: Interval) -> Interval:
    """The same of the opposite difference."""
    return interval._replace(estimate=-interval.estimate, low=-interval.high, high=-interval.low)


def _is_bounded(interval: Interval) -> bool:
    return not math.isnan(_if_bounded(interval).low)


def _bounds_of(interval: Interval) -> str:
    return interval_words(_if_bounded(interval))


def _points(interval: Interval) -> str:
    return points_with_bounds(_if_bounded(interval))


def _correlation(correlation: Correlation) -> str:
    bounds = "" if math.isnan(correlation.low) else f" ({interval_words(correlation, 3, '+')})"
    return signed(correlation.estimate, 3) + bounds


def _root(variance: float) -> str:
    if math.isnan(variance):
        return "-"
    return f"{math.sqrt(variance):.4f}" if variance >= 0 else "0 (estimate below 0)"


def _root_bounds(interval: Interval) -> str:
    if not _is_bounded(interval):
        return "-"
    return f"{math.sqrt(max(interval.low, 0.0)):.4f} to {math.sqrt(max(interval.high, 0.0)):.4f}"


def _dropped(share: float) -> str:
    return f"{share:.1%} of the queries are left out: some cell could not answer them." if share else ""
