"""Kind `features`: which demonstrations help? The first open question of arXiv 2503.22002, from any curve run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from iclperm import stats
from iclperm.base.help import fields_in_help
from iclperm.errors import DataError, RequestError
from iclperm.report import figures
from iclperm.report.notebook import ShownFindings
from iclperm.report.parts import Plot, Table, interval_words, number, p_value, plain, with_bounds
from iclperm.stats.correlation import Correlation, rank_correlation
from iclperm.stats.demonstrations import demonstration_scores, single
from iclperm.stats.paired import holm
from iclperm.stats.reliability import Reliability, split_half
from iclperm.stats.sensitivity import FloatArray
from iclperm.stats.texts import diversity, lexical_similarity, similarity, words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from iclperm.runs.run import FinishedRun

GAIN = "one-shot gain"
SHAPLEY = "Shapley value"
POSITION = "position, first to last"
_ALPHA = 0.05
_UNITS = {GAIN: "accuracy with it alone minus zero-shot", SHAPLEY: "mean gain where it joins, over orderings"}


@dataclass(frozen=True)
class Feature:
    """How one feature of the demonstrations goes with one measure of their worth."""

    feature: str
    """What is looked at, such as a demonstration's length."""
    value: str
    """The measure of worth that it is compared with, such as the one-shot gain."""
    correlation: Correlation
    """Spearman's, within sets, with an interval clustered by set and by place in the set, as orders are shared."""
    p_holm: float
    """Of no correlation, Holm over all features and values of the report."""


@fields_in_help
@dataclass(frozen=True, repr=False)
class Features(ShownFindings):
    """Findings on the features of demonstrations."""

    found: tuple[Feature, ...]
    """Every feature with every measure."""
    num_sets: int
    """Sets that were used."""
    num_known: Mapping[str, int]
    """How many demonstrations have each value."""
    below_zero_shot: float
    """Share of the demonstrations with a one-shot gain below 0, item noise included; NaN where none is known."""
    spread: Mapping[str, float]
    """Standard deviation of each value over the demonstrations of a set, mean over sets; item noise included."""
    reliability: Mapping[str, float]
    """Split-half reliability of each value; NaN where unknown."""
    warnings: tuple[str, ...]
    """What should be known before the numbers are believed."""

    @property
    def significant(self) -> tuple[Feature, ...]:
        """The features whose correlation differs from 0, at 5 % for all of them together (Holm)."""
        return tuple(feature for feature in self.found if feature.p_holm < _ALPHA)

    def conclusion(self) -> list[str]:
        """The result in plain sentences."""
        lines = []
        if not math.isnan(self.below_zero_shot):
            lines.append(
                f"Alone, {self.below_zero_shot:.0%} of {self.num_known[GAIN]} demonstrations score below zero-shot; "
                f"the gain varies by ±{100 * self.spread[GAIN]:.1f} points within a set (one standard deviation, item "
                "noise included)."
            )
        lines += [
            f"{feature.value} {'rises' if feature.correlation.estimate > 0 else 'falls'} with {feature.feature!r}: "
            f"Spearman's correlation {with_bounds(feature.correlation, sign='+')}."
            for feature in self.significant
        ]
        if not self.significant:
            lines.append(
                f"None of {len(self.found)} correlations between features and worth can be told from 0 (Holm, "
                f"{self.num_sets} sets)."
            )
        return lines

    def tables(self, full: bool) -> list[Table]:
        """All correlations; `full` adds how well the values are known."""
        rows = [
            [
                feature.feature,
                feature.value,
                number(feature.correlation.estimate, 2),
                interval_words(feature.correlation, 2, "+"),
                p_value(feature.p_holm, least=0.0),
                str(feature.correlation.num_pairs),
            ]
            for feature in self.found
        ]
        tables = [
            Table(
                title="Features of demonstrations and what these are worth",
                header=["feature", "worth", "correlation", "95 %", "p (Holm)", "pairs"],
                rows=rows,
                texts=(1,),
                caption=f"Spearman's correlation within sets; intervals over {self.num_sets} sets and places in a set. "
                "Correlation is no cause: features go with each other.",
            )
        ]
        if full:
            tables.append(
                Table(
                    title="How well the worth of a demonstration is known",
                    header=["worth", "known", "spread", "reliability", "is"],
                    rows=[
                        [
                            value,
                            str(num),
                            number(self.spread[value]),
                            number(self.reliability.get(value, math.nan), 2),
                            _UNITS.get(value, value),
                        ]
                        for value, num in self.num_known.items()
                    ],
                    texts=(4,),
                    caption="No feature can correlate with it by more than about the root of its reliability.",
                )
            )
        return tables

    def plots(self) -> dict[str, Plot]:
        """A forest of all correlations that have an interval or a value."""
        rows = list(dict.fromkeys(feature.feature for feature in self.found))
        values = list(dict.fromkeys(feature.value for feature in self.found))

        def tall(width: float) -> float:
            return 1.28 + 0.17 * figures.legend_rows(values, width) + 0.30 * len(rows)

        return {"features": Plot((6.4, tall(6.4)), self._draw, tall=tall, least=3.0)}

    def to_dict(self) -> dict[str, Any]:
        """Every number that is shown, JSON-safe."""
        content: dict[str, Any] = {
            name: plain(getattr(self, name))
            for name in ("found", "num_sets", "num_known", "below_zero_shot", "spread", "reliability")
        }
        return content | {"conclusion": self.conclusion(), "features_warnings": list(self.warnings)}

    def _draw(self, figure: Figure) -> None:
        rows = list(dict.fromkeys(feature.feature for feature in self.found))
        values = list(dict.fromkeys(feature.value for feature in self.found))
        width, height = figure.get_size_inches()
        left = 0.15 + 0.061 * max(map(len, rows))
        columns, above = figures.legend_columns(values, width), 0.72 + 0.17 * figures.legend_rows(values, width)
        axes = figures.placed(figure, left, 0.5, width - left - 0.2, height - 0.5 - above)
        axes.axvline(0, color=figures.GREY, linewidth=0.9, linestyle=(0, (4, 2)))
        looks = ((figures.BLUE, "o"), (figures.ORANGE, "s"), (figures.GREEN, "^"))
        for value, (colour, marker) in zip(values, looks, strict=False):
            shown = [feature for feature in self.found if feature.value == value]
            places = [rows.index(feature.feature) + self._offset(feature) for feature in shown]
            found = [feature.correlation for feature in shown]
            axes.hlines(places, [r.low for r in found], [r.high for r in found], color=colour, linewidth=1.2)
            estimates = [r.estimate for r in found]
            axes.plot(estimates, places, linestyle="none", marker=marker, markersize=4.5, color=colour, label=value)
        axes.set(
            xlim=(-1.02, 1.02),
            ylim=(len(rows) - 0.5, -0.5),
            yticks=range(len(rows)),
            yticklabels=rows,
            xlabel="Spearman's correlation within sets",
        )
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="#E4E4E4", linewidth=0.7)
        axes.set_axisbelow(True)
        handles, names = axes.get_legend_handles_labels()
        anchor = (0.0, 1 - 0.6 / height)
        figure.legend(handles, names, frameon=False, loc="upper left", bbox_to_anchor=anchor, ncols=columns)
        line = f"95 % intervals over {self.num_sets} sets and places in a set, not adjusted for their number"
        figures.head(figure, "Which demonstrations help?", line)

    def _offset(self, feature: Feature) -> float:
        """How far a value's interval is drawn from the middle of its feature's row."""
        beside = [other.value for other in self.found if other.feature == feature.feature]
        return 0.22 * (beside.index(feature.value) - (len(beside) - 1) / 2)


def findings(run: FinishedRun, perplexity: npt.ArrayLike | None = None) -> Features:
    """Which features of the demonstrations of a curve run go with their worth, judged on its test queries.

    Args:
        run: with k = 0 and 1 for the one-shot gain, and all of 0..K for Shapley values; at least one of both.
        perplexity: [S, K] of each demonstration under the model, in the default order of the sets; NaN where unknown.

    Raises DataError where the shots allow neither value, or for `resample: per_k`; RequestError on another shape. Cost:
    no model call.
    """
    demonstrations, test = run.demonstrations, run.splits["test"]
    cells = stats.accuracy(test.correct, test.state, test.weights)
    if cells.num_queries == 0:
        raise DataError("no test query is ok in every cell; see the states of the run")
    sets, orders = demonstrations.sets, demonstrations.permutations
    is_full = len(run.shots) == sets.shape[1] + 1
    values: dict[str, FloatArray] = {}
    if {0, 1} <= set(run.shots):
        values[GAIN] = one_shot_gain(cells.values, orders, run.shots)
    if is_full and len(run.shots) > 1:
        found = demonstration_scores(cells.values, orders, run.shots, ["shapley"])
        values[SHAPLEY] = found["shapley"].values
    if not values:
        raise DataError(
            f"the run has k = {', '.join(map(str, run.shots))}; the worth of single demonstrations needs k = 0 and 1, "
            "run it with shots: all"
        )
    names = [name for value, name in ((GAIN, "single"), (SHAPLEY, "shapley")) if value in values]
    known = split_half(test.correct, orders, run.shots, test.state, test.weights, names=names, seed=run.study.seed)
    return features(
        values,
        text_features(
            [[demonstrations.texts[row] for row in rows] for rows in sets.tolist()],
            demonstrations.query_texts("test"),
            labels=_labels_of_sets(run) if not run.has_row_choices else None,
            label_names=run.shared_labels,
            perplexity=perplexity,
        ),
        position_gain=np.diff(cells.values, axis=2).mean(axis=1) if is_full else None,
        reliability={value: _quoted(known[name]) for value, name in zip(values, names, strict=True)},
    )


def one_shot_gain(accuracy: npt.ArrayLike, orders: npt.ArrayLike, shots: Sequence[int]) -> FloatArray:
    """[S, K] accuracy with a demonstration alone minus that without any; NaN for one that never stands first.

    Takes what `stats.demonstrations.single` does, with 0 and 1 among the shots; else raises RequestError.
    """
    if 0 not in shots:
        raise RequestError(f"a one-shot gain needs k = 0, got shots {list(shots)}")
    values = np.asarray(accuracy, dtype=np.float64)
    zero_shot = values[:, :, list(shots).index(0)].mean(axis=1)
    return np.asarray(single(values, orders, shots).values - zero_shot[:, None])


def text_features(
    texts: Sequence[Sequence[str]],
    queries: Sequence[str],
    *,
    labels: npt.ArrayLike | None = None,
    label_names: Sequence[str] = (),
    perplexity: npt.ArrayLike | None = None,
) -> dict[str, FloatArray]:
    """Features of the demonstrations of every set by name, each [S, K].

    Args:
        texts: [S][K] the demonstrations' texts.
        queries: the texts of the queries, for the similarity to them (tf-idf cosine, `stats.features`).
        labels: [S, K] label of each demonstration, and `label_names` [L]: one indicator a label, one in all for two.
        perplexity: [S, K]; NaN where unknown.

    Raises RequestError on shapes that do not fit.
    """
    shape = (len(texts), len(texts[0]) if texts else 0)
    if not all(shape) or any(len(of_set) != shape[1] for of_set in texts):
        raise RequestError(f"texts must be of S sets with K demonstrations each, got {[len(one) for one in texts]}")
    flat = [text for of_set in texts for text in of_set]
    features = {
        "length in characters": np.array([len(text) for text in flat], dtype=np.float64).reshape(shape),
        "different words": np.array([len(words(text)) for text in flat], dtype=np.float64).reshape(shape),
        "similarity to the queries": lexical_similarity(flat, queries).reshape(shape),
        "similarity to its set": 1 - diversity(np.stack([similarity(of_set) for of_set in texts])),
    }
    if perplexity is not None:
        features["perplexity"] = _of_shape(perplexity, shape, "perplexity")
    if labels is not None:
        held = _of_shape(labels, shape, "labels")
        shown = list(enumerate(label_names))[: 1 if len(label_names) == 2 else None]
        features |= {f"label is {name}": (held == label).astype(np.float64) for label, name in shown}
    return features


def features(
    values: Mapping[str, npt.ArrayLike],
    features: Mapping[str, npt.ArrayLike],
    *,
    position_gain: npt.ArrayLike | None = None,
    reliability: Mapping[str, float] | None = None,
) -> Features:
    """Rank correlations of every feature with every value, both by name [S, K], with Holm over all of them.

    `position_gain` [S, K] is the mean gain of accuracy at every position, correlated with the position itself;
    `reliability` of each value is only passed on. NaN intervals below three sets. Raises RequestError on shapes that do
    not fit. Cost: O(features·values·S·K·log K).
    """
    tables = {name: np.asarray(table, dtype=np.float64) for name, table in values.items()}
    pairs = [
        (feature, value, rank_correlation(table, worth, crossed=True))
        for feature, table in features.items()
        for value, worth in tables.items()
    ]
    if position_gain is not None:
        gains = np.asarray(position_gain, dtype=np.float64)
        position = np.broadcast_to(np.arange(gains.shape[-1], dtype=np.float64), gains.shape)
        pairs.append((POSITION, "gain at that position", rank_correlation(position, gains, crossed=True)))
    adjusted = holm([correlation.p_value for *_, correlation in pairs])
    gain = tables.get(GAIN)
    known = np.array([]) if gain is None else gain[np.isfinite(gain)]
    num_sets = len(next(iter(tables.values())))
    return Features(
        found=tuple(Feature(*pair, float(p)) for pair, p in zip(pairs, adjusted, strict=True)),
        num_sets=num_sets,
        num_known={name: int(np.isfinite(table).sum()) for name, table in tables.items()},
        below_zero_shot=float((known < 0).mean()) if known.size else math.nan,
        spread={name: _spread(table) for name, table in tables.items()},
        reliability=dict(reliability or {}),
        warnings=tuple(_warnings(tables, num_sets, reliability or {})),
    )


def _labels_of_sets(run: FinishedRun) -> npt.NDArray[np.int64]:
    """[S, K] labels in the default order of the sets, from those in the order of the prompts."""
    demonstrations = run.demonstrations
    first = demonstrations.permutations[0]
    labels = np.empty_like(demonstrations.sets)
    labels[:, first] = demonstrations.labels[:, 0]
    return labels


def _quoted(found: Reliability) -> float:
    return found.queries if math.isnan(found.both) else found.both


def _of_shape(values: npt.ArrayLike, shape: tuple[int, int], name: str) -> FloatArray:
    table = np.asarray(values, dtype=np.float64)
    if table.shape != shape:
        raise RequestError(f"{name} must have shape {list(shape)}, got {list(table.shape)}")
    return table


def _spread(table: FloatArray) -> float:
    spreads = [row[np.isfinite(row)].std(ddof=1) for row in table if np.isfinite(row).sum() > 1]
    return float(np.mean(spreads)) if spreads else math.nan


def _warnings(tables: Mapping[str, FloatArray], num_sets: int, reliability: Mapping[str, float]) -> list[str]:
    warnings = []
    if num_sets < 5:
        warnings.append(f"{num_sets} sets bound a correlation badly or not at all; raise 'sets'")
    for name, table in tables.items():
        if unknown := int((~np.isfinite(table)).sum()):
            warnings.append(
                f"{name}: {unknown} of {table.size} demonstrations never stand first and are left out; raise "
                "'permutations'"
            )
        if reliability.get(name, 1.0) < 0.5:
            warnings.append(
                f"{name} has a reliability of {reliability[name]:.2f}: noise hides most of what a feature may do"
            )
    return warnings
