"""Kind `curve` (arXiv 2503.22002): accuracy over the number of demonstrations, on average and along every ordering."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from iclperm import stats
from iclperm.base.help import fields_in_help
from iclperm.errors import ConfigError, DataError, RequestError
from iclperm.report import figures
from iclperm.report.notebook import ShownFindings
from iclperm.report.parts import Plot, Table, evenly, interval_words, listed, number, p_value, percent, plain, points
from iclperm.stats import Curve
from iclperm.stats.incomplete import filled
from iclperm.stats.intervals import within
from iclperm.stats.paired import holm
from iclperm.stats.plateau import (
    Arrival,
    CurveError,
    OneShot,
    Overall,
    Plateau,
    Steps,
    arrival,
    averages_to_last,
    curve_error,
    one_shot,
    plateau,
    plateau_shares,
    steps,
)
from iclperm.stats.sensitivity import FloatArray
from iclperm.stats.verdicts import LEVEL, MARGIN, STATES, State, claims_of
from iclperm.studies.bearing import Bearing, by_query, of_run
from iclperm.studies.classes import classes_by_design
from iclperm.studies.curve_blocks import BlockCurveFindings, findings_of_blocks
from iclperm.studies.curve_verdicts import COLUMNS, VERDICTS, AskedVerdicts, shares_plot
from iclperm.studies.how_many import how_many
from iclperm.studies.missing import filled_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from iclperm.runs.run import FinishedRun

_MAX_BRIEF_ROWS = 12
_MOST_NAMED = 5  # numbers of demonstrations whose means a sentence has room for
_MAX_PANELS = 6
_EXTREMES = 5
_TEXT_LETTERS = 60
_PREFIXES = (
    "At k < {shots} another order also shows other demonstrations of the set first, so the spread over orders holds "
    "that choice too."
)
_ONE_SET = "one set only: errors and tests say nothing about other demonstrations; raise 'sets'"
_NO_TRAJECTORIES = (
    "With `resample: per_k` every k has sets and orders of its own, so no ordering has a trajectory over k: single "
    "trajectories, their plateaus and steps, and one demonstration against none are left out."
)


@fields_in_help
@dataclass(frozen=True, repr=False)
class CurveFindings(ShownFindings):
    """What a curve study says; everything about single trajectories is None for `resample: per_k`."""

    shots: tuple[int, ...]
    """[K] numbers of demonstrations, ascending."""
    resampled: bool
    """Whether every k had sets and permutations of its own."""
    margin: float
    """Differences up to this are none that matter; units of accuracy."""
    level: float
    """Of each test, and over each family of tests by Holm's adjustment."""
    accuracy: FloatArray
    """[S, P, K], over the queries that are ok in every cell."""
    curve: Curve
    """Mean accuracy at each k, and its spread over permutations and over sets, [K] each; shares of 1."""
    error: CurveError
    """[K] intervals of the mean accuracy at each k."""
    plateaus: tuple[Plateau, ...]
    """From each k that was asked for to the largest."""
    averages: tuple[State, ...]
    """What each of them says of the average, Holm-adjusted over them."""
    to_last: tuple[Overall, ...]
    """[K - 1] change of the average from every k to the largest."""
    shares: FloatArray | None
    """[K - 1, 3] of the trajectories in each of `STATES`, from every k to the largest."""
    steps: Steps | None
    """In which share of the K - 1 steps each trajectory rises or falls."""
    arrival: Arrival | None
    """From which k on single trajectories stay where they end."""
    one_shot: OneShot | None
    """None also where k = 0 or k = 1 was not run, or nobody knows which demonstration stands where."""
    texts: Mapping[int, str] = field(repr=False)
    """Of demonstrations, by row; may be empty."""
    chance: float | None
    """Accuracy of guessing a label; None where any answer may be given."""
    title: str
    """Task and model, for figures."""
    warnings: tuple[str, ...]
    """What should be known before the numbers are believed."""
    bearing: Bearing = field(default_factory=Bearing)
    """What the answers can bear."""
    is_per_query: bool = False
    """Whether each query has its own demonstrations, at every k the nearest."""
    asked: AskedVerdicts | None = None
    """What verdicts took, where every trajectory was asked until it had one; they are then those of `plateaus`."""

    def conclusion(self) -> list[str]:
        """The result in plain sentences; where the answers do not bear one, why, and what would suffice."""
        sentences = [self._about_the_average()]
        if len(self.shots) > 2:
            sentences.append(how_many(self.shots, self.curve.mean, self.to_last, self.level))
        if self.one_shot is not None:
            sentences.append(_about_one_shot(self.one_shot))
        for found, state in zip(self.plateaus, self.averages, strict=True):
            sentences.append(self._about_plateau(found, state))
        if self.steps is not None:
            sentences.append(_about_steps(self.steps))
        if self.asked is None:
            return self.bearing.told(sentences)
        if self.bearing.can_conclude:
            return self.bearing.told([*sentences, *self.asked.conclusion()])
        about = {reason.about for reason in self.bearing.reasons}
        told = [] if about <= {"sets", "permutations"} else [self.asked.judged()]
        told += [] if "labels" in about else self.asked.told(self.shots[-1])
        return [*self.bearing.told([]), *told, *self.asked.conclusion()]

    def tables(self, full: bool) -> list[Table]:
        """Most important first; without ``full`` some k only, and no single demonstrations."""
        found = [self._curve_table(full)]
        if self.plateaus:
            found.append(self._plateau_table())
        if self.asked is not None:
            found.append(self.asked.table())
        if self.steps is not None and self.arrival is not None:
            found.append(self._trajectory_table(self.steps, self.arrival))
        if full and self.shares is not None:
            found.append(self._shares_table(self.shares))
        if full and self.one_shot is not None:
            found.append(self._one_shot_table(self.one_shot))
        return found

    def plots(self) -> dict[str, Plot]:
        """The averaged curve; every trajectory over it; how many trajectories are flat from each k."""
        found = {"curve": self._curve_plot()}
        if self.shares is not None:
            width = 6.6 if self._is_by_set else 5.2
            found["curve_trajectories"] = Plot(
                (width, self._tall(width)),
                self._draw_trajectories,
                tall=self._tall,
                least=2.6,
                caption="Accuracy of every ordering over the number of demonstrations",
            )
            line = f"from k to {self.shots[-1]}; flat: within ±{self.margin:g}, Holm over {self.accuracy[..., 0].size}"
            line += "" if self.asked is None else f"; {self.asked.where}: until decided"
            found["curve_plateaus"] = shares_plot(self.shots[:-1], self.shares, self.title, line)
        if self.asked is not None:
            found["curve_verdicts"] = self.asked.plot()
        return found

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-safe lists, dictionaries and numbers; NaN and infinity become None."""
        content: dict[str, Any] = {
            name: plain(getattr(self, name))
            for name in ("shots", "resampled", "margin", "level", "accuracy", "curve", "error")
        }
        content["error"] |= plain({"low": np.maximum(self.error.low, 0), "high": np.minimum(self.error.high, 1)})
        content["error"]["bounded"] = plain((self.error.low < 0) | (self.error.high > 1))
        content["plateaus"] = [
            self._plateau_content(found, state) for found, state in zip(self.plateaus, self.averages, strict=True)
        ]
        content["states"] = list(STATES)
        content["to_last"] = plain(self.to_last)
        for name in ("shares", "steps", "arrival", "one_shot"):
            content[name] = plain(getattr(self, name))
        if self.asked is not None:
            content["asked"] = self.asked.to_dict()
        if self.one_shot is not None:
            content["one_shot"] |= {"num_better": self.one_shot.num_better, "num_worse": self.one_shot.num_worse}
        content |= {"conclusion": self.conclusion(), "bearing": self.bearing.to_dict()}
        return content | {"curve_warnings": list(self.warnings)}

    def _plateau_content(self, found: Plateau, state: State) -> dict[str, Any]:
        content: dict[str, Any] = plain(found)
        if self.resampled:
            content = {name: content[name] for name in ("first", "last", "margin", "level", "overall")}
        return content | {"average": state}

    def _about_the_average(self) -> str:
        k, mean = self.shots, self.curve.mean
        few = len(k) <= _MOST_NAMED
        where = range(len(k)) if few else sorted({0, len(k) // 2, int(np.argmax(mean)), len(k) - 1})
        places = ", ".join(f"{percent(mean[place])} at k = {k[place]}" for place in where)
        half = (self.error.high[-1] - self.error.low[-1]) / 2
        if math.isnan(half):
            return f"Mean accuracy is {places}; one query cannot tell how sure that is."
        low, high, is_cut = within(mean[-1], self.error.low[-1], self.error.high[-1], "accuracy")
        sure = f"{100 * low:.1f} to {100 * high:.1f} % (bounded)" if is_cut else f"± {100 * half:.1f} points"
        fresh = listed(self.error.covers[-1] or ("draws",))
        return f"Mean accuracy is {places} (the last {sure}, {self.error.level:.0%}, for new {fresh})."

    def _about_plateau(self, found: Plateau, state: State) -> str:
        average = {
            "equivalent": f"is flat within ± {points(found.margin)}",
            "different": "is not flat: it changes",
            "undecided": f"is neither shown to be flat within ± {points(found.margin)} nor to change",
        }[state]
        mean, (_, low, high, level) = found.overall.error.mean, found.overall.interval
        sentence = (
            f"From k = {found.first} to {found.last} the average {average} ({100 * mean:+.1f} points"
            f"{'' if math.isnan(low) else f', {level:.0%} interval {100 * low:+.1f} to {100 * high:+.1f}'})"
        )
        if self.resampled:
            return f"{sentence}."
        undecided, flat, changes = found.shares
        sentence += (
            f"; of {found.state.size} single trajectories {flat:.0%} are shown to be flat, {changes:.0%} to change, "
            f"{undecided:.0%} stay undecided."
        )
        if math.isnan(found.true_std):
            return sentence
        return sentence + (
            f" Without item noise the change differs between trajectories by ± {points(found.true_std)} (one standard "
            f"deviation); if these changes are Gaussian, about {found.true_within:.0%} of them lie within the margin."
        )

    def _curve_table(self, full: bool) -> Table:
        rows = []
        for place in evenly(len(self.shots), None if full else _MAX_BRIEF_ROWS):
            k = self.shots[place]
            spreads = (self.curve.std_permutations, self.error.order_noise, self.curve.std_sets)
            rows.append(
                (
                    str(k),
                    number(self.curve.mean[place]),
                    number(self.error.se_held[place]) if k else "-",
                    number(self.error.se[place]),
                    *(number(spread[place]) if k else "-" for spread in spreads),
                )
            )
        new = [axis for axis in self.error.covers[-1] if axis != "queries"]
        caption = (
            f"error: of the mean, for new {listed(new)} on the same queries, and for new queries too." if new else ""
        )
        if not (self.resampled or self.is_per_query):
            caption += " " + _PREFIXES.format(shots=self.shots[-1])
        errors = ("error, same queries", "error, new queries")
        header = ("k", "accuracy", *errors, "std over orders", "item noise in it", "std of set means")
        return Table("Accuracy against the number of demonstrations", header, rows, caption=caption)

    def _plateau_table(self) -> Table:
        rows: list[Sequence[str]] = []
        for found, state in zip(self.plateaus, self.averages, strict=True):
            rows.append(
                (
                    f"{found.first} to {found.last}",
                    "average",
                    interval_words(found.overall.interval, sign="+"),
                    VERDICTS[state],
                    "",
                    "",
                    "",
                )
            )
            if not self.resampled:
                spread = "" if math.isnan(found.true_std) else f"±{found.true_std:.4f}"
                shares = [f"{found.shares[column]:.0%}" for column in COLUMNS]
                rows.append(("", "trajectories", spread, "", *shares))
        header = ("k", "", "change", "verdict", "flat", "changes", "undecided")
        caption = (
            f"flat: two one-sided tests reject any change beyond ±{self.margin:g} (Holm, {self.level:.0%}). changes: "
            "some change is shown. undecided: neither. Average: the 90 % interval of the change."
        )
        if not self.resampled:
            caption += " Trajectories: standard deviation of the change over them, free of item noise."
        return Table("Plateaus", header, rows, texts=(1, 3), caption=caption)

    def _trajectory_table(self, found: Steps, arrived: Arrival) -> Table:
        rows = [
            ("steps up", f"{found.up.mean():.0%}", f"{found.up_beyond_noise.mean():.1%}"),
            ("steps down", f"{found.down.mean():.0%}", f"{found.down_beyond_noise.mean():.1%}"),
            ("never down", f"{found.never_down:.0%}", f"{found.never_down_beyond_noise:.1%}"),
            (f"first within ±{self.margin:g} of the end", f"k = {_middle(arrived.first)}", ""),
            ("there for good", f"k = {_middle(arrived.stays)}", ""),
        ]
        caption = (
            "Chance alone takes up to 2.5 % of the steps up, and as many down, beyond noise. k: median (quartiles)."
        )
        return Table("Single trajectories", ("", "", "beyond noise"), rows, caption=caption)

    def _shares_table(self, shares: FloatArray) -> Table:
        rows = [
            (str(k), *(f"{row[column]:.0%}" for column in COLUMNS))
            for k, row in zip(self.shots[:-1], shares, strict=True)
        ]
        title = f"Trajectories from k to {self.shots[-1]}, within ±{self.margin:g}"
        caption = "" if self.asked is None else self.asked.warnings[-1].capitalize() + "."
        return Table(title, ("k", "flat", "changes", "undecided"), rows, caption=caption)

    def _one_shot_table(self, found: OneShot) -> Table:
        order = np.argsort(-found.gain, kind="stable")
        if len(order) > 2 * _EXTREMES:
            order = np.concatenate([order[:_EXTREMES], order[-_EXTREMES:]])
        rows = [
            (
                str(found.rows[place]),
                f"{found.gain[place]:+.4f}",
                number(found.se[place]),
                p_value(found.p_holm[place]),
                _shortened(self.texts.get(int(found.rows[place]), "")),
            )
            for place in order
        ]
        caption = (
            f"{len(found.rows)} demonstrations, the best and the worst shown; p after Holm over all of them. Accuracy "
            f"with none is {number(found.zero_shot)}."
        )
        header = ("row", "gain", "error", "p", "demonstration")
        return Table("One demonstration against none", header, rows, texts=(4,), caption=caption, data_texts=(4,))

    def _curve_plot(self) -> Plot:
        bounds = np.clip(self.error.low, 0, 1), np.clip(self.error.high, 0, 1)
        is_known = all(np.isfinite(bound).all() for bound in bounds)
        return figures.curve_plot(
            self.curve, self.shots, title=self.title, chance=self.chance, bounds=bounds if is_known else None
        )

    @property
    def _is_by_set(self) -> bool:
        return 1 < len(self.accuracy) <= _MAX_PANELS

    def _grid(self, width: float) -> tuple[int, int]:
        """Rows and columns of the panels in a figure of so many inches."""
        num_sets = len(self.accuracy) if self._is_by_set else 1
        columns = min(num_sets, 3 if width >= 4.6 else 2)
        return math.ceil(num_sets / columns), columns

    def _tall(self, width: float) -> float:
        rows, _ = self._grid(width)
        return 0.95 + 1.85 * rows if self._is_by_set else min(3.6, 0.5 * width + 1.3)

    def _draw_trajectories(self, figure: Figure) -> None:
        """A panel a set while there are few, else one; thin lines, the average over them."""
        num_sets, by_set, (width, height) = len(self.accuracy), self._is_by_set, figure.get_size_inches()
        rows, columns = self._grid(width)
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
        figure.subplots_adjust(
            left=0.64 / width,
            right=1 - 0.13 / width,
            bottom=0.45 / height,
            top=1 - (0.9 if by_set else 0.66) / height,
            hspace=0.32,
            wspace=0.08,
        )
        thin = {"color": figures.BLUE, "linewidth": 0.5, "alpha": max(0.1, min(0.6, 12 / self.accuracy.shape[1]))}
        for place, axes in enumerate(panels):
            if by_set and place >= num_sets:
                axes.set_visible(False)
                panels[place - columns].tick_params(labelbottom=True)
                continue
            lines = self.accuracy[place] if by_set else self.accuracy.reshape(-1, len(self.shots))
            axes.plot(self.shots, lines.T, **thin)
            if by_set:
                axes.plot(self.shots, lines.mean(axis=0), color=figures.ORANGE, linewidth=1.4)
                axes.set_title(f"set {place}", fontsize=8.5, pad=3)
            axes.plot(self.shots, self.curve.mean, color="black", linewidth=1.4)
            axes.set_xticks(figures.shot_ticks(self.shots, most=6) if by_set else figures.shot_ticks(self.shots))
            figures.plain_frame(axes)
        figure.supxlabel("number of demonstrations k", fontsize=8.5, y=0.06 / height, va="bottom")
        figure.supylabel("accuracy", fontsize=8.5, x=0.012)
        legend = "blue: single orderings, " + ("orange: mean of the set, " if by_set else "") + "black: mean of all"
        figures.head(figure, self.title or "Accuracy along every ordering", legend)


def findings(run: FinishedRun) -> CurveFindings | BlockCurveFindings:
    """The curve of a run over its numbers of shots; raises DataError for a run with one only.

    Which demonstration stands where is read from the study's data; where that is gone or is another, one demonstration
    against none is left out, with a warning.
    """
    if run.study.cells != "crossed":
        return findings_of_blocks(run)
    resampled = run.study.resample == "per_k"
    rows, texts, lacking = None, None, []
    if not resampled and not run.study.is_per_query and {0, 1} <= set(run.shots):
        try:
            rows, texts = run.demonstrations.rows[:, :, 0], run.demonstrations.texts
        except (ConfigError, DataError) as error:
            lacking = [f"one demonstration against none is left out: {error}"]
    asked, classes = AskedVerdicts.of(run), classes_by_design(run)
    num = None if asked is None else asked.looks[0]
    correct, state = run.correct[..., :num], run.state[..., :num]
    found = curve_findings(
        correct,
        state,
        shots=run.shots,
        weights=run.weights[:num],
        classes=None if classes is None else classes[:num],
        rows=rows,
        texts=texts,
        resampled=resampled,
        chance=run.chance,
        title=run.title,
        asked=asked,
    )
    right = [by_query(correct[:, :, k], state[:, :, k]) for k in range(len(run.shots))]
    notes = [one for one in found.warnings if not (run.study.is_per_query and one == _ONE_SET)]
    bearing = of_run(run, right, queries=num)
    return replace(found, warnings=(*notes, *lacking), bearing=bearing, is_per_query=run.study.is_per_query)


def curve_findings(
    correct: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    *,
    shots: Sequence[int],
    weights: npt.ArrayLike | None = None,
    classes: npt.ArrayLike | None = None,
    rows: npt.ArrayLike | None = None,
    texts: Mapping[int, str] | None = None,
    resampled: bool = False,
    claims: Sequence[int] | None = None,
    margin: float = MARGIN,
    level: float = LEVEL,
    chance: float | None = None,
    title: str = "",
    asked: AskedVerdicts | None = None,
) -> CurveFindings:
    """Everything about accuracy over the number of demonstrations, from every answer there is.

    Args:
        correct: [S, P, K, Q] 0 or 1.
        state: [S, P, K, Q] integers, 0 = ok; for errors and tests what is missing is filled in
            (`stats.incomplete.filled`).
        shots: [K] numbers of demonstrations, ascending.
        weights: [Q] how often each query counts in an accuracy; errors and tests count a query once.
        classes: [Q] of queries that were drawn class by class (`stats.variance_components`).
        rows: [S, P] which demonstration stands first; needed for one demonstration against none.
        texts: of demonstrations, by row.
        resampled: every k has sets and permutations of its own (`resample: per_k`).
        claims: from which k a plateau is looked for, by default 4 and 8 as far as they were run, else the middle k.
        margin, level: of the tests (see `stats.plateau`).
        chance: a level to compare with in the figure.
        asked: verdicts of single trajectories from more queries than these, in place of the claims' and the margin.

    Raises RequestError on shapes that do not fit, a k that was not run, or a cell without an answer, and DataError for
    a single k. Cost: O(S·P·K·Q). arXiv 2503.22002.
    """
    items, counts = np.asarray(correct), tuple(int(k) for k in shots)
    if items.ndim != 4:
        raise RequestError(f"a curve needs correct of shape [S, P, K, Q], got {list(items.shape)}")
    if len(counts) < 2:
        raise DataError("a curve needs at least two numbers of shots, this run has one; run it with 'shots: all'")
    if asked is not None:
        claims, margin = asked.claims, asked.margin
    curve = stats.curve(items, state, weights)
    whole = filled(items, state, weights)
    items, accuracy = whole.items, whole.accuracy.values
    weight = None if weights is None else whole.weights
    of_each = None if classes is None else np.asarray(classes)[whole.usable]
    pairs = tuple(
        plateau(items, weight, shots=counts, first=k, margin=margin, level=level, classes=of_each)
        for k in (claims_of(counts) if claims is None else claims)
    )
    shares = None if resampled else plateau_shares(items, weight, shots=counts, margin=margin, level=level)
    if asked is not None and shares is not None:
        pairs = tuple(pair.decided(found) for pair, found in zip(pairs, asked.verdicts, strict=True))
        shares[[counts.index(pair.first) for pair in pairs]] = [pair.shares for pair in pairs]
    error = curve_error(items, weight, shots=counts, classes=of_each)
    single = None
    if rows is not None and not resampled and {0, 1} <= set(counts):
        zero, one = counts.index(0), counts.index(1)
        single = one_shot(items[0, 0, zero], items[:, :, one], rows, weight)
    return CurveFindings(
        shots=counts,
        resampled=resampled,
        margin=margin,
        level=level,
        accuracy=accuracy,
        curve=curve,
        error=error,
        plateaus=pairs,
        averages=average_states(pairs, level),
        to_last=averages_to_last(items, weight, shots=counts, margin=margin, level=level),
        shares=shares,
        steps=None if resampled else steps(items, weight),
        arrival=None if resampled else arrival(accuracy, counts, margin),
        one_shot=single,
        texts=texts or {},
        chance=chance,
        title=title,
        warnings=tuple(_warnings(items.shape, pairs, resampled, whole.share, asked)),
        asked=asked,
    )


def average_states(pairs: tuple[Plateau, ...], level: float) -> tuple[State, ...]:
    equivalent = holm([pair.overall.p_equivalent for pair in pairs])
    different = holm([pair.overall.p_different for pair in pairs])
    return tuple(
        "equivalent" if flat <= level else "different" if changes <= level else "undecided"
        for flat, changes in zip(equivalent, different, strict=True)
    )


def _warnings(
    shape: tuple[int, ...],
    pairs: tuple[Plateau, ...],
    resampled: bool,
    filled_in: float,
    asked: AskedVerdicts | None,
) -> list[str]:
    num_sets, _, _, num_queries = shape
    warnings = []
    if resampled:
        warnings.append(_NO_TRAJECTORIES)
    if num_sets == 1:
        warnings.append(_ONE_SET)
    if filled_in:
        warnings.append(filled_words(filled_in))
    if asked is not None:
        return warnings + asked.warnings
    for pair in () if resampled else pairs:
        if pair.resolvable > pair.margin:
            needed = math.ceil(num_queries * pair.num_queries_needed / 100) * 100
            warnings.append(
                f"from k = {pair.first}: with {num_queries:,} queries a truly flat trajectory is mostly not shown to "
                f"be so within ±{pair.margin:g}, only within ±{pair.resolvable:.2f}; ±{pair.margin:g} takes about "
                f"{needed:,} queries, more with Holm's adjustment"
            )
    return warnings


def _about_one_shot(found: OneShot) -> str:
    low, high = 100 * found.gain.min(), 100 * found.gain.max()
    sentence = (
        f"One demonstration against none: of {len(found.rows)} demonstrations {found.num_better} help and "
        f"{found.num_worse} hurt beyond noise (Holm, {LEVEL:.0%}); observed gains go from {low:+.1f} to {high:+.1f} "
        "points"
    )
    if math.isnan(found.true_std):
        return f"{sentence}."
    return f"{sentence}, and differ by ± {points(found.true_std)} (one standard deviation, item noise taken out)."


def _about_steps(found: Steps) -> str:
    sentence = f"From one k to the next accuracy falls in {found.down.mean():.0%} of the steps of a trajectory"
    if math.isnan(found.never_down_beyond_noise):
        return f"{sentence}; {found.never_down:.0%} of the trajectories never fall."
    return (
        f"{sentence}, in {found.down_beyond_noise.mean():.1%} beyond noise (by chance alone up to 2.5 %); "
        f"{found.never_down:.0%} of the trajectories never fall, {found.never_down_beyond_noise:.0%} never beyond "
        "noise."
    )


def _middle(values: npt.NDArray[np.int64]) -> str:
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75), method="inverted_cdf")
    return f"{middle} ({low} to {high})"


def _shortened(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _TEXT_LETTERS else flat[: _TEXT_LETTERS - 1].rstrip() + "…"
