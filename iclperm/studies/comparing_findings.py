"""What a comparison of finished studies says: sentences, tables, the forest plot and JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from iclperm.base.help import fields_in_help
from iclperm.report import figures
from iclperm.report.markup import Sheet
from iclperm.report.notebook import ShownFindings
from iclperm.report.panels import wrapped
from iclperm.report.parts import (
    Plot,
    Table,
    interval_words,
    listed,
    number,
    p_value,
    p_words,
    percent,
    plain,
    signed,
    with_bounds,
)
from iclperm.report.wording import Said, reworded_plot, reworded_sheet, reworded_table
from iclperm.stats import Contrast, Interval, PooledEstimate, SizeSlope
from iclperm.stats.comparison import LEAST, Of
from iclperm.stats.intervals import side_of
from iclperm.stats.paired import holm
from iclperm.stats.sensitivity import FloatArray
from iclperm.studies import comparing_figures, comparing_sheets
from iclperm.studies.studied import Pair, Studied, matched_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from iclperm.runs.run import FinishedRun

_LEVEL = 0.05
_MOST_DETAILED = 6  # pairs that have a table of their own
_WIDEST_R = 16.0
_FOREST = "r = selection / order as printed, with 95 % jackknife intervals; hollow: partially pooled"
_SENSITIVITIES = {"order": "order effect", "selection": "selection effect"}


@fields_in_help
@dataclass(frozen=True, repr=False)
class Comparing(ShownFindings):
    """What a comparison says."""

    studies: tuple[Studied, ...]
    pairs: tuple[Pair, ...]
    pooled: PooledEstimate | None
    """log r of all studies that have one, under a random-effects model; None below three."""
    pooled_names: tuple[str, ...]
    slopes: Mapping[Of, SizeSlope]
    """On model size, of r, order and selection; empty where no sizes were given."""
    slopes_are_free: bool
    """Whether the slopes are of effects free of item noise; else of sensitivities as printed."""
    warnings: tuple[str, ...]
    cells: tuple[FloatArray, ...] = ()
    """Of each study its accuracies [S, P, K], which figures show."""
    runs: tuple[FinishedRun | None, ...] = ()
    """The runs behind the studies, for the page; None for answers from elsewhere."""

    def conclusion(self) -> list[str]:
        """See `Findings`. Nothing is said that a study with too few sets or permutations cannot bear."""
        small = [study for study in self.studies if min(study.shape[:2]) < LEAST]
        too_few = [
            f"{study.name} has {study.shape[0]} sets x {study.shape[1]} permutations: too few to compare r or the "
            f"effects of order and selection, which takes {LEAST} of each at least."
            for study in small
        ]
        lines: list[str] = []
        for pair in self.pairs if len(self.pairs) <= _MOST_DETAILED else ():
            ratio, rest = self._about_ratio(pair), [*self._about_effects(pair), *self._about_accuracy(pair)]
            # the first line is the answer: what is known, before that something is not
            lines += [*rest, *ratio] if math.isnan(pair.comparison.ratio.p_holm) else [*ratio, *rest]
        lines += too_few
        lines += [self._shared_words(pair) for pair in self.pairs] if len(self.pairs) == 1 else []
        if len(self.pairs) > _MOST_DETAILED:
            lines.append(self._about_all_pairs())
        return [*lines, *self._about_pool(), *self._about_slopes()]

    def headline(self) -> list[str]:
        """What comes before the conclusion where that goes through several pairs one by one."""
        return [self._about_all_pairs()] if 1 < len(self.pairs) <= _MOST_DETAILED else []

    def tables(self, full: bool) -> list[Table]:
        """See `Findings`."""
        sheets = self.sheets()
        grid = [sheets["sensitivity"].table()] if "sensitivity" in sheets else []
        found = [self._study_table(), *grid, self._ratio_table()]
        if full or len(self.pairs) == 1:
            found += [self._pair_table(pair) for pair in self.pairs]
        if self.pooled is not None:
            found.append(self._pool_table(self.pooled))
        return [*found, *([self._slope_table()] if self.slopes else [])]

    def plots(self) -> dict[str, Plot]:
        """What the studies say in numbers, their curves where they have any, every ordering, and a forest plot of r
        where an r has an interval."""
        found = comparing_figures.plots(self.studies, self.cells)
        if any(not math.isnan(study.ratio.low) for study in self.studies):
            height = 1.5 + 0.3 * (len(self.studies) + 2)
            found["forest"] = Plot((5.6, height), self._draw, tall=lambda _: height, least=2.8, caption=_FOREST)
        return found

    def sheets(self) -> dict[str, Sheet]:
        """Tables that can be taken away, by name: models by tasks, the studies, and the tests of every two."""
        return comparing_sheets.sheets(self.studies, self.pairs, self.warnings)

    def to_dict(self) -> dict[str, Any]:
        """See `Findings`; p-values and intervals of everything, and what each pair shares."""
        pairs = [
            {
                "first": self.studies[pair.first].name,
                "second": self.studies[pair.second].name,
                **{key: value for key, value in plain(pair.comparison).items()},
            }
            for pair in self.pairs
        ]
        return {
            "studies": plain(self.studies),
            "pairs": pairs,
            "pooled_log_ratio": plain(self.pooled),
            "pooled_studies": list(self.pooled_names),
            "slopes": plain(self.slopes),
            "slopes_are_free_of_item_noise": self.slopes_are_free,
            "warnings": list(self.warnings),
            "conclusion": self.conclusion(),
        }

    def _slopes_holm(self) -> dict[Of, float]:
        """p-values of the slopes, adjusted over these."""
        adjusted = holm([found.p_value for found in self.slopes.values()]).tolist()
        return dict(zip(self.slopes, adjusted, strict=True))

    def _names(self, pair: Pair) -> tuple[str, str]:
        return self.studies[pair.first].name, self.studies[pair.second].name

    def _shared_words(self, pair: Pair) -> str:
        one, two = self._names(pair)
        shared = pair.comparison.shared
        if not shared:
            return f"{one} and {two} are taken to have nothing in common: each is a sample of its own."
        sizes = dict(zip(("sets", "permutations", "queries"), self.studies[pair.first].shape, strict=True))
        told = listed([f"{sizes[axis]:,} {axis}" for axis in shared])
        return f"{one} and {two} have the same {told}: what these do to both cancels in the differences."

    def _about_ratio(self, pair: Pair) -> list[str]:
        contrast, free = pair.comparison.ratio, pair.comparison.ratio_free
        one, two = self._names(pair)
        if math.isnan(contrast.p_holm):
            is_small = min(min(self.studies[place].shape[:2]) for place in (pair.first, pair.second)) < LEAST
            return [] if is_small else [f"r of {one} and of {two} cannot be compared: one of them is 0 or undefined."]
        said = f"r of {one} is {with_bounds(contrast)} times that of {two} ({_tested(contrast)})"
        if contrast.p_holm > _LEVEL:
            return [f"{said}: whether r differs between them stays open."]
        if _is_confirmed(contrast, free):
            return [f"{said}, and {with_bounds(free)} times without item noise: r differs."]
        beside = "it is not known" if math.isnan(free.low) else f"the ratio is {with_bounds(free)}"
        return [
            f"{said}, but without item noise, which pulls every r towards 1, {beside}: whether r differs stays open."
        ]

    def _about_effects(self, pair: Pair) -> list[str]:
        one, two = self._names(pair)
        lines = []
        for key, words in _SENSITIVITIES.items():
            contrast: Contrast = getattr(pair.comparison, key)
            if not math.isnan(contrast.p_holm) and contrast.p_holm <= _LEVEL:
                more, less = (one, two) if contrast.estimate > 0 else (two, one)
                low, high = sorted((abs(contrast.low), abs(contrast.high)))
                lines.append(
                    f"The {words} of {more} is larger than that of {less} by {100 * abs(contrast.estimate):.1f} points "
                    f"[{100 * low:.1f} to {100 * high:.1f}] of accuracy, item noise taken out ({_tested(contrast)})."
                )
        return lines

    def _about_accuracy(self, pair: Pair) -> list[str]:
        found = pair.comparison
        if not found.accuracy:
            return []
        one, two = self._names(pair)
        contrast = found.accuracy[-1]
        at = f" at k = {found.shots[-1]}" if self.studies[pair.first].shots is not None else ""
        if math.isnan(contrast.low):
            return [f"How far the accuracies of {one} and {two} differ{at} is not known: there is one ordering only."]
        said = (
            f"Accuracy{at}: {one} less {two} is {100 * contrast.estimate:+.1f} points "
            f"[{100 * contrast.low:+.1f} to {100 * contrast.high:+.1f}], for other {listed(found.covers)}"
        )
        verdict = "it differs" if contrast.p_holm <= _LEVEL else "no difference shows"
        line = f"{said} ({_tested(contrast)}): {verdict}."
        test = found.mcnemar[-1]
        if test is not None and contrast.p_holm > _LEVEL >= test.p_holm:
            line += (
                f" On these very sets and orders it does differ ({p_words(test.p_holm)}, McNemar over orderings, Holm)."
            )
        return [line]

    def _about_all_pairs(self) -> str:
        tested = [pair for pair in self.pairs if not math.isnan(pair.comparison.ratio.p_holm)]
        apart = [pair for pair in tested if self._is_apart(pair)]
        others = len(self.pairs) - len(tested)
        if not tested:
            return f"In none of {others} pairs can r be compared: one of each is 0, undefined or without an interval."
        rest = (
            f" In {others} others r cannot be compared: one is 0, undefined or without an interval." if others else ""
        )
        if not apart:
            return f"In none of {len(tested)} pairs can r be told apart (Holm over all tests of all pairs).{rest}"
        told = "; ".join(" and ".join(self._names(pair)) for pair in apart[:3]) + ("; …" if len(apart) > 3 else "")
        return f"r differs in {len(apart)} of {len(tested)} pairs (Holm over all tests of all pairs): {told}.{rest}"

    def _is_apart(self, pair: Pair) -> bool:
        contrast = pair.comparison.ratio
        return contrast.p_holm <= _LEVEL and _is_confirmed(contrast, pair.comparison.ratio_free)

    def _about_pool(self) -> list[str]:
        found = self.pooled
        if found is None:
            return []
        said = (
            f"Over {len(self.pooled_names)} studies r is {with_bounds(_exponential(found.mean))} on average (random "
            "effects)"
        )
        if found.tau <= 1e-6:
            return [f"{said}; that they differ beyond their errors does not show."]
        one_more = interval_words(_exponential(found.prediction), 2)
        return [f"{said}; one more study of the kind would have {one_more} (95 %)."]

    def _about_slopes(self) -> list[str]:
        lines = []
        for name, found in self.slopes.items():
            words = "r" if name == "ratio" else f"the {_SENSITIVITIES[name]}"
            p = self._slopes_holm()[name]
            verdict = "changes with size" if p <= _LEVEL else "no change with size shows"
            lines.append(
                f"At ten times the parameters {words} is {with_bounds(found.factor)} times as large "
                f"({p_words(p)}, Holm): {verdict}."
            )
        return lines

    def _study_table(self) -> Table:
        rows = []
        for study in self.studies:
            queries = f" x {study.shape[2]:,}" if study.shape[2] else ""
            rows.append(
                (
                    study.name,
                    f"{study.shape[0]} x {study.shape[1]}{queries}",
                    "-" if study.shots is None else str(study.shots),
                    *(number(value) for value in (study.accuracy, study.order, study.selection)),
                    number(study.ratio.estimate, 2),
                    interval_words(study.ratio, 2),
                    number(study.ratio_free, 2),
                )
            )
        header = ("", "S x P x Q", "k", "accuracy", "order", "selection", "r", "95 %, jackknife", "r, no noise")
        caption = "Sensitivities and r as printed in arXiv 2511.09700; 'no noise': from variance components."
        return Table("Studies", header, rows, caption=caption)

    def _ratio_table(self) -> Table:
        rows = []
        for pair in self.pairs:
            ratio, free = pair.comparison.ratio, pair.comparison.ratio_free
            rows.append(
                (
                    " / ".join(self._names(pair)),
                    ", ".join(pair.comparison.shared) or "nothing",
                    number(ratio.estimate, 2),
                    interval_words(ratio, 2),
                    p_value(ratio.p_value),
                    p_value(ratio.p_holm),
                    number(free.estimate, 2),
                    interval_words(free, 2),
                )
            )
        header = ("r of one / r of the other", "shared", "ratio", "95 %", "p", "Holm", "no noise", "95 %")
        caption = "Holm: over all tests of all pairs (r, order, selection, accuracy at each k)."
        return Table("Is r different?", header, rows, texts=(1,), caption=caption)

    def _pair_table(self, pair: Pair) -> Table:
        one, two = self._names(pair)
        found, rows = pair.comparison, []
        for name, contrast in found.tests().items():
            if name == "ratio":
                continue
            words = _SENSITIVITIES.get(name, name if self.studies[pair.first].shots is not None else "accuracy")
            rows.append(
                (
                    words,
                    signed(contrast.estimate),
                    interval_words(contrast, sign="+"),
                    p_value(contrast.p_value),
                    p_value(contrast.p_holm),
                )
            )
        for k, test in zip(found.shots, found.mcnemar, strict=True):
            if test is not None:
                interval = matched_interval(test)
                rows.append(
                    (
                        f"  these orderings, k = {k}",
                        signed(test.difference),
                        interval_words(interval, sign="+"),
                        p_value(test.p_value),
                        p_value(test.p_holm),
                    )
                )
        caption = (
            f"Effects free of item noise. Accuracy: for other {listed(found.covers) if found.covers else 'nothing'}"
            + (
                "; these orderings: for other queries only, McNemar over orderings, Holm over those of all pairs."
                if any(test is not None for test in found.mcnemar)
                else "."
            )
        )
        return Table(f"{one} less {two}", ("", "difference", "95 %", "p", "Holm"), rows, caption=caption)

    def _pool_table(self, found: PooledEstimate) -> Table:
        by_name = {study.name: study.ratio for study in self.studies}
        rows = []
        for place, name in enumerate(self.pooled_names):
            drawn = _exponential(found.shrunken_interval(place))
            rows.append((name, number(by_name[name].estimate, 2), number(drawn.estimate, 2), interval_words(drawn, 2)))
        mean, one_more = _exponential(found.mean), _exponential(found.prediction)
        rows.append(("mean of all", "", number(mean.estimate, 2), interval_words(mean, 2)))
        rows.append(("one more study", "", "", interval_words(one_more, 2)))
        caption = (
            f"Random effects on log r (REML, Knapp & Hartung), true spread {found.tau:.2f}, I² "
            f"{percent(found.i_squared)}; what studies share is counted. Each r is drawn to the mean as far as its "
            "error says."
        )
        return Table("r over all studies, partially pooled", ("", "r", "pooled", "95 %"), rows, caption=caption)

    def _slope_table(self) -> Table:
        rows = [
            (
                "r" if name == "ratio" else _SENSITIVITIES[name],
                number(found.factor.estimate, 2),
                interval_words(found.factor, 2),
                p_value(found.p_value),
                p_value(self._slopes_holm()[name]),
            )
            for name, found in self.slopes.items()
        ]
        kind = "free of item noise" if self.slopes_are_free else "as printed, item noise included"
        return Table(
            "Sensitivity against model size",
            ("", "at 10 times the size", "95 %", "p", "Holm"),
            rows,
            caption=f"Weighted regression of the log on log10 of the parameters; {kind}.",
        )

    def _study_names(self) -> list[str]:
        return [study.name for study in self.studies]

    def _draw(self, figure: Figure) -> None:
        height, width = figure.get_figheight(), figure.get_figwidth()
        longest = max(len(part) for name in ("mean of all", *self._study_names()) for part in wrapped(name))
        left = min(0.35 + 0.065 * longest, 0.5 * width) / width
        axes = figure.add_axes((left, 0.5 / height, 0.97 - left, 1 - 1.15 / height))
        self._draw_rows(axes)
        figures.plain_frame(axes)
        axes.grid(visible=False, axis="y")
        line = "as printed, 95 % jackknife; hollow: partially pooled; diamond: mean"
        figures.head(figure, "r = selection / order", line)

    def _draw_rows(self, axes: Axes) -> None:
        places = {study.name: -float(place) for place, study in enumerate(self.studies)}
        values = [1.0]
        for study in self.studies:
            r, y = study.ratio, places[study.name]
            if math.isnan(r.estimate):
                continue
            if not math.isnan(r.low):
                axes.plot([r.low, r.high], [y, y], color="black", linewidth=1.1)
                values += [r.low, r.high]
            axes.plot([r.estimate], [y], color="black", marker="s", markersize=4.5)
            values.append(r.estimate)
        labels: dict[str, float] = dict(places)
        if self.pooled is not None:
            for place, name in enumerate(self.pooled_names):
                shrunken, y = math.exp(float(self.pooled.shrunken[place])), places[name] - 0.25
                axes.plot([shrunken], [y], color=figures.BLUE, marker="o", markersize=4, markerfacecolor="white")
            centre, low, high, _ = _exponential(self.pooled.mean)
            bottom = -len(self.studies) - 0.2
            axes.fill([low, centre, high, centre], [bottom, bottom + 0.25, bottom, bottom - 0.25], color=figures.BLUE)
            labels["mean of all"] = bottom
            values += [low, high]
        axes.axvline(1.0, color=figures.GREY, linewidth=0.9, linestyle=(0, (4, 2)))
        clipped = np.clip(values, 1 / _WIDEST_R, _WIDEST_R)
        limits = float(clipped.min()) / 1.15, float(clipped.max()) * 1.15
        steps = (digit * 10.0**power for power in range(-2, 3) for digit in (1, 2, 5))
        ticks = [step for step in steps if limits[0] <= step <= limits[1]]
        axes.set(xscale="log", xlim=limits, ylim=(min(labels.values()) - 0.6, 0.6), xlabel="r")
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        words = ["\n".join(map(figures.no_formula, wrapped(name))) for name in labels]
        axes.set_yticks(list(labels.values()), words)
        axes.minorticks_off()
        axes.tick_params(axis="y", length=0)


def _tested(contrast: Contrast) -> str:
    """The p-value that holds for the whole family, and a word where the interval, which does not, leaves out no
    difference all the same."""
    said = f"{p_words(contrast.p_holm)}, Holm over all tests"
    return f"{said}; the interval is for this one alone" if contrast.p_holm > _LEVEL >= contrast.p_value else said


def _is_confirmed(contrast: Contrast, free: Contrast) -> bool:
    """Whether a ratio lies on one side of 1, and does so without item noise too."""
    side = _side(contrast)
    return side != 0 and _side(free) == side


def _side(ratio: Contrast) -> int:
    return side_of(Interval(ratio.estimate, ratio.low, ratio.high, ratio.level), 1)


def _exponential(interval: Interval) -> Interval:
    """Of the logarithms, that of r."""
    estimate, low, high = (math.exp(end) for end in (interval.estimate, interval.low, interval.high))
    return Interval(estimate, low, high, interval.level)


@dataclass(frozen=True, repr=False)
class GradedComparing(Comparing):
    """A comparison of runs whose answers have grades, in words that fit these."""

    said: Said = str
    """What says accuracy in other words."""

    @classmethod
    def of(cls, found: Comparing, said: Said) -> GradedComparing:
        """The same comparison in other words."""
        known = {each.name: getattr(found, each.name) for each in fields(Comparing)}
        return cls(**known | {"warnings": tuple(map(said, found.warnings))}, said=said)

    def conclusion(self) -> list[str]:
        """See `Findings`."""
        return [*map(self.said, super().conclusion())]

    def headline(self) -> list[str]:
        """See `Comparing`."""
        return [*map(self.said, super().headline())]

    def tables(self, full: bool) -> list[Table]:
        """See `Findings`."""
        return [reworded_table(table, self.said) for table in super().tables(full)]

    def plots(self) -> dict[str, Plot]:
        """See `Comparing`."""
        return {stem: reworded_plot(plot, self.said) for stem, plot in super().plots().items()}

    def sheets(self) -> dict[str, Sheet]:
        """See `Comparing`."""
        return {name: reworded_sheet(sheet, self.said) for name, sheet in super().sheets().items()}
