"""Kind `selection` (arXiv 2503.22002, section 5.2): does choosing demonstrations for robustness cost accuracy?

Two runs: a curve over sets of K demonstrations scores each of them on dev queries; n of each set are chosen by several
strategies, and a second curve runs them on the test queries, under all its orderings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from scipy import special

from iclperm import stats
from iclperm.errors import DataError, RequestError
from iclperm.stats.demonstrations import (
    STRATEGIES,
    Difference,
    Positions,
    Reliability,
    Score,
    demonstration_scores,
    select,
    similarity,
    split_half,
)
from iclperm.stats.features import Correlation, _jackknife_error, rank_correlation
from iclperm.stats.paired import holm
from iclperm.stats.sensitivity import FloatArray, query_weights, usable_queries
from iclperm.studies.findings import Plot, Table, number, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from iclperm.results import Run

BASELINE = "random"
_LEVEL = 0.95
_RELIABLE = 0.5
_LEAST_PERMUTATIONS = 3  # without one of them there must still be a spread
_TAIL = 0.05
_ROUNDING = 1e-12  # a standard error below it is none
_FEWER_LABELS = 0.5  # mean difference a set from which on a warning says so
_LOOKS = {
    "random": ("black", "o"),
    "top": ("#0072B2", "^"),
    "bottom": ("#D55E00", "v"),
    "shapley": ("#56B4E9", "D"),
    "stable": ("#009E73", "s"),
    "blend": ("#E69F00", "P"),
    "single": ("#CC79A7", "X"),
    "diverse": ("#5F5F5F", "*"),
}


@dataclass(frozen=True)
class Chosen:
    """Demonstrations that were chosen out of the sets of a run."""

    strategies: tuple[str, ...]
    """[T] names out of `STRATEGIES`."""
    positions: Mapping[str, Positions]
    """By strategy int64 [S, n]: positions in the sets in default order, ascending."""
    rows: Positions
    """int64 [T·S, n] train rows, strategy by strategy: the sets of the second run."""
    num_labels: FloatArray
    """[T, S] different labels among the chosen; NaN where any answer may be given."""
    score: str
    """What top, bottom and blend went by."""
    scores: Mapping[str, Score]
    """Every score of the demonstrations of the sets, [S, K]."""
    split: str
    """The queries that the scores come from."""
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What the demonstrations of one strategy do, in units of accuracy, at the largest number of shots."""

    accuracy: Difference
    """Mean over sets, orderings and queries, all three drawn at random (`stats.mean_error`)."""
    difference: Difference
    """Accuracy minus that of random, paired by set, index permutation and query; all NaN for random itself."""
    p_accuracy: float
    """Of no difference in accuracy, Holm over the strategies."""
    spread: float
    """Standard deviation over orderings (ddof 1), mean over sets; item noise included."""
    spread_free: float
    """The same free of item noise: root of the mean order variance, 0 where that is negative."""
    spread_difference: Difference
    """Spread minus that of random, paired by set and index permutation; jackknifed over both, the queries held. NaN
    bounds for one set, and for two permutations."""
    p_spread: float
    """Of no difference in spread, Holm over the strategies."""
    free_difference: Difference
    """Order variance free of item noise minus that of random, in squared units of accuracy; bounded as the spread."""
    lowest: float
    """Accuracy of the worst ordering, mean over sets."""
    low_tail: float
    """Accuracy at the 5 % quantile of the orderings, mean over sets."""
    curve: FloatArray
    """[N] accuracy at every number of shots."""
    num_labels: float
    """Different labels among the chosen, mean over sets; NaN where labels are not known."""

    @property
    def is_steadier(self) -> bool:
        """Whether the spread is told to be below that of random, with item noise and without it."""
        free = self.free_difference.high
        return bool(self.p_spread < 1 - _LEVEL and self.spread_difference.estimate < 0 and free < 0)

    @property
    def accuracy_side(self) -> int:
        """1 or -1 where accuracy is told to be above or below that of random, else 0."""
        return int(np.sign(self.difference.estimate)) if self.p_accuracy < 1 - _LEVEL else 0


@dataclass(frozen=True)
class Selection:
    """Findings of a selection study."""

    shots: tuple[int, ...]
    """[N] of the second run; the last is the number of demonstrations chosen."""
    num_sets: int
    num_permutations: int
    num_queries: int
    """Distinct test queries that were used."""
    dropped: float
    """Share of the queries (by weight) that some cell could not answer."""
    outcomes: Mapping[str, Outcome]
    score: str = "marginal"
    reliability: Mapping[str, Reliability] = field(default_factory=dict)
    correlations: Mapping[tuple[str, str], Correlation] = field(default_factory=dict)
    """Spearman's correlation of every two scores within sets."""
    warnings: tuple[str, ...] = ()

    def conclusion(self) -> list[str]:
        """The result in plain sentences: random, then whether a steadier choice costs accuracy, then the scores."""
        told = [self._about_random(), *self._about_robustness()]
        told += [self._about(name) for name in ("top", "stable") if name in self.outcomes]
        if self.score in self.reliability:
            told.append(_about_reliability(self.score, self.reliability[self.score]))
        return told

    def tables(self, full: bool) -> list[Table]:
        """Accuracy and spread by strategy and the reliability of the scores; `full` adds correlations and curves."""
        tables = [self._accuracy_table(), self._spread_table()]
        if self.reliability:
            tables.append(self._reliability_table())
        if full:
            tables += [self._correlation_table()] if self.correlations else []
            tables += [self._curve_table(), self._strategy_table()]
        return tables

    def plots(self) -> dict[str, Plot]:
        """Accuracy against spread, and the curve of each strategy."""
        return {
            "selection_pareto": Plot((6.2, 4.0), self._draw_pareto),
            "selection_curves": Plot((6.2, 3.6), self._draw_curves),
        }

    def to_dict(self) -> dict[str, Any]:
        """Every number that is shown, JSON-safe."""
        correlations = [{"scores": list(pair), **plain(found)} for pair, found in self.correlations.items()]
        content: dict[str, Any] = {
            name: plain(getattr(self, name))
            for name in ("shots", "num_sets", "num_permutations", "num_queries", "dropped", "score", "reliability")
        }
        content["strategies"] = {
            name: {**plain(outcome), "is_steadier": outcome.is_steadier, "in_words": STRATEGIES.get(name, name)}
            for name, outcome in self.outcomes.items()
        }
        return content | {
            "correlations": correlations,
            "conclusion": self.conclusion(),
            "selection_warnings": list(self.warnings),
        }

    @property
    def _num(self) -> int:
        return self.shots[-1]

    @property
    def _others(self) -> dict[str, Outcome]:
        return {name: outcome for name, outcome in self.outcomes.items() if name != BASELINE}

    def _about_random(self) -> str:
        base = self.outcomes[BASELINE]
        return (
            f"At k = {self._num}, demonstrations drawn at random reach {100 * base.accuracy.estimate:.1f} % "
            f"{_points_range(base.accuracy, signed=False)}; another order moves that by ±{100 * base.spread:.1f} "
            f"points (one standard deviation), ±{100 * base.spread_free:.1f} without item noise."
        )

    def _about_robustness(self) -> list[str]:
        steadier = {name: outcome for name, outcome in self._others.items() if outcome.is_steadier}
        if self.num_sets < 2:
            return ["With one set nothing bounds a difference in spread: whether robustness costs accuracy stays open."]
        if self.num_permutations < _LEAST_PERMUTATIONS:
            return [
                "With two permutations nothing bounds a difference in spread: whether robustness costs accuracy stays "
                "open."
            ]
        if not steadier:
            return [
                f"None of {len(self._others)} strategies is told to be steadier over orderings than random (Holm, "
                f"{self.num_sets} sets x {self.num_permutations} orderings): whether robustness costs accuracy stays "
                "open here."
            ]
        told = []
        for name, outcome in steadier.items():
            words = {
                -1: "and less accurate: here robustness costs accuracy",
                0: "and its accuracy cannot be told from random's: a cost is neither shown nor excluded beyond the "
                "interval",
                1: "and more accurate: here robustness does not cost accuracy",
            }[outcome.accuracy_side]
            told.append(
                f"{name!r} is steadier than random (spread {_points_range(outcome.spread_difference)}) {words} "
                f"(accuracy {_points_range(outcome.difference)})."
            )
        return told

    def _about(self, name: str) -> str:
        outcome = self.outcomes[name]
        return (
            f"{name!r} ({_in_words(name, self.score)}) against random: accuracy {_points_range(outcome.difference)}, "
            f"spread {_points_range(outcome.spread_difference)}."
        )

    def _accuracy_table(self) -> Table:
        rows = [
            [
                name,
                number(outcome.accuracy.estimate),
                number(outcome.accuracy.se),
                _signed(outcome.difference.estimate),
                _bounds(outcome.difference),
                _p(outcome.p_accuracy),
                number(outcome.lowest),
                number(outcome.low_tail),
                *([] if math.isnan(outcome.num_labels) else [f"{outcome.num_labels:.1f}"]),
            ]
            for name, outcome in self.outcomes.items()
        ]
        header = ["chosen", "accuracy", "se", "minus random", "95 %", "p (Holm)", "worst", "5 % order", "labels"]
        return Table(
            title=f"Accuracy at k = {self._num} by how the demonstrations were chosen",
            header=header[: len(rows[0])],
            rows=rows,
            caption=f"Mean over {self.num_sets} sets, {self.num_permutations} orderings and {self.num_queries:,} test "
            "queries; errors for other sets, orderings and queries. Worst and 5 % ordering of a set, mean over sets.",
        )

    def _spread_table(self) -> Table:
        rows = [
            [
                name,
                number(outcome.spread),
                number(outcome.spread_free),
                _signed(outcome.spread_difference.estimate),
                _bounds(outcome.spread_difference),
                _p(outcome.p_spread),
            ]
            for name, outcome in self.outcomes.items()
        ]
        return Table(
            title=f"Spread over orderings at k = {self._num}",
            header=["chosen", "spread", "noise out", "minus random", "95 %", "p (Holm)"],
            rows=rows,
            caption="Standard deviation of accuracy over orderings, mean over sets; 'noise out' is free of item noise. "
            f"Intervals for other sets and orderings (jackknife over {self.num_sets} and {self.num_permutations}), the "
            "queries held fixed.",
        )

    def _reliability_table(self) -> Table:
        return Table(
            title="Split-half reliability of the scores",
            header=["score", "permutations", "queries", "both"],
            rows=[[name, *map(_two_decimals, found)] for name, found in self.reliability.items()],
            caption="How well a score of a second run would agree with this one, 1 at best: over other permutations, "
            "other queries, or both.",
        )

    def _correlation_table(self) -> Table:
        names = list(self.reliability) or sorted({name for pair in self.correlations for name in pair})
        rows = [[first, *(_two_decimals(self._correlation(first, second)) for second in names)] for first in names]
        return Table(
            title="Spearman's correlation between scores, within sets",
            header=["score", *names],
            rows=rows,
            caption="All scores come from the same answers and share their noise.",
        )

    def _correlation(self, first: str, second: str) -> float:
        if first == second:
            return 1.0
        found = self.correlations.get((first, second)) or self.correlations.get((second, first))
        return math.nan if found is None else found.estimate

    def _curve_table(self) -> Table:
        return Table(
            title="Accuracy over k by how the demonstrations were chosen",
            header=["chosen", *(f"k = {k}" for k in self.shots)],
            rows=[[name, *map(number, outcome.curve)] for name, outcome in self.outcomes.items()],
        )

    def _strategy_table(self) -> Table:
        return Table(
            title="How the demonstrations were chosen",
            header=["chosen", "by"],
            rows=[[name, _in_words(name, self.score)] for name in self.outcomes],
            texts=(1,),
        )

    def _draw_pareto(self, figure: Figure) -> None:
        from iclperm.report import figures

        axes = figure.add_axes((0.115, 0.125, 0.62, 0.70))
        base = self.outcomes[BASELINE]
        axes.axvline(100 * base.spread, color=figures.GREY, linewidth=0.8, linestyle=(0, (4, 2)))
        axes.axhline(100 * base.accuracy.estimate, color=figures.GREY, linewidth=0.8, linestyle=(0, (4, 2)))
        for name, outcome in self.outcomes.items():
            colour, marker = _LOOKS.get(name, (figures.GREY, "o"))
            axes.errorbar(
                100 * outcome.spread,
                100 * outcome.accuracy.estimate,
                xerr=_half(outcome.spread_difference),
                yerr=_half(outcome.difference),
                color=colour,
                marker=marker,
                markersize=6.5,
                linestyle="none",
                elinewidth=0.9,
                label=name,
            )
        axes.set(xlabel="spread over orderings, points (standard deviation)", ylabel=f"accuracy at k = {self._num}, %")
        axes.set_xlim(left=max(axes.get_xlim()[0], 0))
        figures.plain_frame(axes)
        handles, names = axes.get_legend_handles_labels()
        figure.legend(handles, names, frameon=False, loc="upper left", bbox_to_anchor=(0.75, 0.83), title="chosen by")
        figures.head(figure, "Accuracy against spread", "bars: 95 % interval of the difference to random (dashed)")

    def _draw_curves(self, figure: Figure) -> None:
        from iclperm.report import figures

        axes = figure.add_axes((0.115, 0.135, 0.62, 0.68))
        for name, outcome in self.outcomes.items():
            colour, marker = _LOOKS.get(name, (figures.GREY, "o"))
            width = 2.2 if name == BASELINE else 1.2
            axes.plot(
                self.shots, 100 * outcome.curve, color=colour, marker=marker, markersize=5, linewidth=width, label=name
            )
        axes.set(xlabel="number of demonstrations k", ylabel="accuracy, %", xticks=figures.shot_ticks(self.shots))
        figures.plain_frame(axes)
        handles, names = axes.get_legend_handles_labels()
        figure.legend(handles, names, frameon=False, loc="upper left", bbox_to_anchor=(0.75, 0.83), title="chosen by")
        line = f"mean over {self.num_sets} sets and {self.num_permutations} orderings"
        figures.head(figure, "Accuracy over k of the chosen demonstrations", line)


def choose(
    source: Run,
    n: int | None = None,
    *,
    score: str = "marginal",
    strategies: Sequence[str] | None = None,
    seed: int | None = None,
) -> Chosen:
    """Chooses n demonstrations of each set of a curve run, by every strategy.

    Args:
        source: a run with several numbers of shots, best all of 0..K, and dev queries.
        n: how many; the study's `select` by default.
        score: what top, bottom and blend go by, a name in `stats.demonstrations.SCORES`.
        strategies: names out of `STRATEGIES`; all whose scores the shots allow by default.
        seed: of the random choice; the study's by default.

    Scores come from dev, so that no strategy is judged on the queries that it was chosen by; from test, with a
    warning, where there is no dev split. Raises RequestError for an n, score or strategy that cannot be, DataError for
    a run with `resample: per_k`. Cost: no model call.
    """
    demonstrations = source.demonstrations
    split = "dev" if "dev" in source.splits else "test"
    items = source.splits[split]
    cells = stats.accuracy(items.correct, items.state, items.weights)
    if cells.num_queries == 0:
        raise DataError(f"no {split} query is ok in every cell; see the states of the run")
    scores = demonstration_scores(cells.values, demonstrations.permutations, source.shots)
    texts = [[demonstrations.texts[row] for row in rows] for rows in demonstrations.sets.tolist()]
    positions = select(
        {name: found.values for name, found in scores.items()},
        source.study.select if n is None else n,
        score=score,
        strategies=strategies,
        similarities=np.stack([similarity(of_set) for of_set in texts]),
        seed=source.study.seed if seed is None else seed,
    )
    label_of = dict(zip(demonstrations.rows.ravel().tolist(), demonstrations.labels.ravel().tolist(), strict=True))
    rows = {name: np.take_along_axis(demonstrations.sets, chosen, axis=1) for name, chosen in positions.items()}
    return Chosen(
        strategies=tuple(positions),
        positions=positions,
        rows=np.concatenate(list(rows.values())),
        num_labels=np.array(
            [
                [len({label_of[row] for row in of_set}) if source.labels else math.nan for of_set in found.tolist()]
                for found in rows.values()
            ],
            dtype=np.float64,
        ),
        score=score,
        scores=scores,
        split=split,
        warnings=tuple(_choice_warnings(split, scores, positions)),
    )


def findings(source: Run, chosen: Run, choice: Chosen | None = None) -> Selection:
    """What the second run says of the strategies, and the first of the scores.

    `choice` is what `choose` gave; by default it is made again. Raises DataError where the sets of `chosen` are not
    those of the choice. Cost: no model call.
    """
    choice = choose(source, chosen.shots[-1]) if choice is None else choice
    sets = chosen.demonstrations.sets
    if sets.shape != choice.rows.shape or (np.sort(sets, axis=1) != np.sort(choice.rows, axis=1)).any():
        raise DataError(
            f"the second run has {len(sets)} sets that are not the {len(choice.rows)} chosen from the first; run it "
            "with 'demonstrations' set to what choose() gives, and pass the choice"
        )
    scored, test = source.splits[choice.split], chosen.splits["test"]
    return selection(
        test.correct.reshape(len(choice.strategies), -1, *test.correct.shape[1:]),
        test.state.reshape(len(choice.strategies), -1, *test.state.shape[1:]),
        strategies=choice.strategies,
        shots=chosen.shots,
        weights=test.weights,
        num_labels=choice.num_labels,
        score=choice.score,
        scores={name: found.values for name, found in choice.scores.items()},
        reliability=split_half(
            scored.correct,
            source.demonstrations.permutations,
            source.shots,
            scored.state,
            scored.weights,
            names=tuple(choice.scores),
            seed=source.study.seed,
        ),
        warnings=choice.warnings,
    )


def selection(
    correct: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    *,
    strategies: Sequence[str],
    shots: Sequence[int],
    weights: npt.ArrayLike | None = None,
    num_labels: npt.ArrayLike | None = None,
    score: str = "marginal",
    scores: Mapping[str, npt.ArrayLike] | None = None,
    reliability: Mapping[str, Reliability] | None = None,
    warnings: Sequence[str] = (),
) -> Selection:
    """Strategies compared at the largest number of shots.

    Args:
        correct: [T, S, P, N, Q] 0 or 1: strategies, source sets, orderings, shots, queries.
        state: [T, S, P, N, Q] integers, 0 = ok; a query that is not ok somewhere is left out everywhere.
        strategies: [T] names, one of them `random`.
        shots: [N] ascending.
        weights: [Q] how often each query counts in an accuracy; distinct queries count once in the order variance.
        num_labels: [T, S] different labels among the chosen.
        score: the one that top, bottom and blend went by.
        scores: [S, K] by name, for the correlations between them.
        reliability: by name of score.
        warnings: what should be known before.

    Index permutations must be shared by all sets and strategies, as those of one run are: errors count their effects as
    shared. Raises RequestError on shapes that do not fit, without `random`, or below two orderings; DataError where no
    query is ok in every cell. Cost: O(size of correct), and O(T·S·P²) for the jackknife.
    """
    items = np.asarray(correct)
    if items.ndim != 5 or len(strategies) != len(items) or len(shots) != items.shape[3]:
        raise RequestError(
            f"a selection needs correct [T, S, P, N, Q] of {len(strategies)} strategies and {len(shots)} shots, got "
            f"{list(items.shape)}"
        )
    if BASELINE not in strategies:
        raise RequestError(f"the strategies are compared with {BASELINE!r}, got {', '.join(strategies)}")
    if items.shape[2] < 2:
        raise RequestError("a spread over orderings needs at least 2 permutations, got 1")
    cells = stats.accuracy(items, state, weights)
    if cells.num_queries == 0:
        raise DataError("no query is ok in every cell of the second run; see its states")
    usable = usable_queries(items.shape, state)
    weight = query_weights(weights, items.shape[-1])[usable]
    held = np.full(items.shape[:2], np.nan) if num_labels is None else np.asarray(num_labels, dtype=np.float64)
    names, base = list(strategies), list(strategies).index(BASELINE)
    last, answers = cells.values[..., -1], items[:, :, :, -1][..., usable]
    spread = np.array([[stats.order_sensitivity(of_set[None]) for of_set in of_strategy] for of_strategy in last])
    spread_without = np.stack([_without_permutation(of_strategy) for of_strategy in last])
    variances = [_order_variance(of_strategy) for of_strategy in answers]
    differences = [_of_mean(of_strategy - answers[base].astype(np.float64), weight) for of_strategy in answers]
    spreads = [
        _jackknifed(spread[t] - spread[base], spread_without[t] - spread_without[base]) for t in range(len(names))
    ]
    free = [
        _jackknifed(*(ours - random for ours, random in zip(found, variances[base], strict=True)))
        for found in variances
    ]
    p_accuracy, p_spread = (_holm_of_others(found, base) for found in (differences, spreads))
    outcomes = {
        name: Outcome(
            accuracy=_within_bounds(_of_mean(answers[t], weight)),
            difference=_NOTHING if t == base else differences[t],
            p_accuracy=p_accuracy[t],
            spread=float(spread[t].mean()),
            spread_free=math.sqrt(max(float(variances[t][0].mean()), 0.0)),
            spread_difference=_NOTHING if t == base else spreads[t],
            p_spread=p_spread[t],
            free_difference=_NOTHING if t == base else free[t],
            lowest=float(last[t].min(axis=1).mean()),
            low_tail=float(np.quantile(last[t], _TAIL, axis=1, method="inverted_cdf").mean()),
            curve=cells.values[t].mean(axis=(0, 1)),
            num_labels=float(held[t].mean()),
        )
        for t, name in enumerate(names)
    }
    tables = {name: np.asarray(values, dtype=np.float64) for name, values in (scores or {}).items()}
    return Selection(
        shots=tuple(shots),
        num_sets=items.shape[1],
        num_permutations=items.shape[2],
        num_queries=cells.num_queries,
        dropped=cells.dropped,
        outcomes=outcomes,
        score=score,
        reliability=dict(reliability or {}),
        correlations={
            (first, second): rank_correlation(tables[first], tables[second])
            for place, first in enumerate(tables)
            for second in list(tables)[place + 1 :]
        },
        warnings=(*warnings, *_design_warnings(items.shape[1], items.shape[2], outcomes)),
    )


_NOTHING = Difference(math.nan, math.nan, math.nan, math.nan, math.nan)


def _within_bounds(accuracy: Difference) -> Difference:
    """An accuracy whose interval is cut to what an accuracy can be."""
    return accuracy._replace(low=float(np.maximum(accuracy.low, 0.0)), high=float(np.minimum(accuracy.high, 1.0)))


def _of_mean(scores: npt.NDArray[Any], weight: FloatArray) -> Difference:
    """Mean of scores [S, P, Q], with its error over sets, shared permutations and queries."""
    found = stats.mean_error(scores, weight)
    _, low, high, _ = found.interval(_LEVEL)
    return Difference(found.mean, found.se, low, high, _p_of_zero(found.mean, found.se, found.degrees))


def _jackknifed(by_set: FloatArray, without_permutation: FloatArray) -> Difference:
    """Mean of by_set [S], jackknifed over sets and over permutations: by_set without each of them, [S, P].

    The two variances are added (`stats.features.jackknife_interval`). Where both are 0, equal values of a coarse scale
    do not tell how far others would lie: NaN bounds.
    """
    estimate, num_sets = float(by_set.mean()), len(by_set)
    if num_sets < 2:
        return _NOTHING._replace(estimate=estimate)
    without_set = (by_set.sum() - by_set) / (num_sets - 1)
    se, degrees = _jackknife_error((without_set, without_permutation.mean(axis=0)))
    if se <= _ROUNDING:
        return _NOTHING._replace(estimate=estimate, p_value=1.0 if abs(estimate) <= _ROUNDING else math.nan)
    half = float(special.stdtrit(degrees, (1 + _LEVEL) / 2)) * se
    return Difference(estimate, se, estimate - half, estimate + half, _p_of_zero(estimate, se, degrees))


def _p_of_zero(estimate: float, se: float, degrees: float) -> float:
    return float(2 * special.stdtr(degrees, -abs(estimate) / se))


def _without_permutation(accuracy: FloatArray) -> FloatArray:
    """[S, P] spread of each set of accuracy [S, P] without each permutation; NaN for two of them."""
    num = accuracy.shape[1]
    if num < _LEAST_PERMUTATIONS:
        return np.full(accuracy.shape, np.nan)
    others = np.nonzero(~np.eye(num, dtype=np.bool_))[1].reshape(num, num - 1)
    kept = accuracy[:, others]  # [S, P, P - 1]
    return np.asarray(np.std(kept - kept[..., :1], axis=2, ddof=1))  # equal accuracies become exact zeros


def _order_variance(items: npt.NDArray[Any]) -> tuple[FloatArray, FloatArray]:
    """Unbiased variance of accuracy over orderings free of item noise, from items [S, P, Q]; [S], and [S, P] without
    each permutation.

    (MS_P - MS_PQ)/Q of each set alone, in squared units of accuracy; it can be negative. NaN for one query, and without
    one permutation of two.
    """
    num_sets, num, num_queries = items.shape
    if num_queries < 2:
        return np.full(num_sets, np.nan), np.full((num_sets, num), np.nan)
    centred = items - items.mean(axis=1, keepdims=True)
    # Both mean squares are sums over permutations; without one, the others are centred anew: num / (num - 1).
    parts = (num_queries * centred.mean(axis=2) ** 2 - np.mean(centred**2, axis=2)) / (num_queries - 1)
    total = parts.sum(axis=1)
    if num < _LEAST_PERMUTATIONS:
        return total / (num - 1), np.full((num_sets, num), np.nan)
    return total / (num - 1), (total[:, None] - num / (num - 1) * parts) / (num - 2)


def _holm_of_others(found: Sequence[Difference], base: int) -> FloatArray:
    """Adjusted p-values, without the comparison of random with itself."""
    return holm([math.nan if t == base else difference.p_value for t, difference in enumerate(found)])


def _choice_warnings(split: str, scores: Mapping[str, Score], positions: Mapping[str, Positions]) -> list[str]:
    warnings = []
    if split == "test":
        warnings.append(
            "the scores come from the test queries that judge the choice, which flatters it; set 'dev_queries'"
        )
    if "single" in scores and "single" in positions:
        unknown = int(np.isnan(scores["single"].values).sum())
        if unknown:
            warnings.append(
                f"{unknown} of {scores['single'].values.size} demonstrations never stand first, so 'single' does not "
                "know them; raise 'permutations'"
            )
    return warnings


def _design_warnings(num_sets: int, num_permutations: int, outcomes: Mapping[str, Outcome]) -> list[str]:
    warnings = []
    if num_sets < 5:
        warnings.append(f"{num_sets} sets bound a difference between strategies badly; raise 'sets'")
    if num_permutations < _LEAST_PERMUTATIONS:
        warnings.append("2 permutations bound no difference in spread; raise 'permutations'")
    held = {name: outcome.num_labels for name, outcome in outcomes.items() if not math.isnan(outcome.num_labels)}
    if held and held[BASELINE] - min(held.values()) >= _FEWER_LABELS:
        worst = min(held, key=held.__getitem__)
        warnings.append(
            f"{worst!r} holds {held[worst]:.1f} different labels a set, random {held[BASELINE]:.1f}: differences "
            "between them are of label balance too"
        )
    return warnings


def _about_reliability(score: str, found: Reliability) -> str:
    value = next((value for value in (found.both, found.queries) if not math.isnan(value)), math.nan)
    if math.isnan(value):
        return f"The reliability of the score {score!r} is not known: too few permutations or queries to halve."
    told = f"The score {score!r} has a split-half reliability of {value:.2f}"
    if value < _RELIABLE:
        return f"{told}: most of its differences are noise, and a second run would choose other demonstrations."
    return f"{told}: a second run would rank the demonstrations much alike." if value >= 0.8 else f"{told}."


def _in_words(name: str, score: str) -> str:
    return STRATEGIES.get(name, name).replace("score", f"score {score!r}")


def _points_range(found: Difference, signed: bool = True) -> str:
    sign = "+" if signed else ""
    bounds = f"[{100 * found.low:{sign}.1f} to {100 * found.high:{sign}.1f}]"
    if not signed:
        return "" if math.isnan(found.low) else bounds
    size = f"{100 * found.estimate:+.1f} points"
    return size if math.isnan(found.low) else f"{size} {bounds}"


def _signed(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:+.4f}"


def _bounds(found: Difference) -> str:
    return "-" if math.isnan(found.low) else f"{found.low:+.4f} to {found.high:+.4f}"


def _p(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.3f}" if value >= 0.0005 else "<0.001"


def _two_decimals(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _half(found: Difference) -> float | None:
    """Half the width of an interval in points; None where there is none."""
    return None if math.isnan(found.low) else 100 * (found.high - found.estimate)
