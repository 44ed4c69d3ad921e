"""The sensitivity summary, its JSON twin, the tables and the figures.

More than 600 lines because numbers, JSON, tables and figures are held against each other on the same summaries.
"""

from __future__ import annotations

import dataclasses
import html
import io
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from rich.console import Console

from iclperm import stats
from iclperm.errors import DataError, RequestError
from iclperm.reference import stats as reference
from iclperm.report import figures, parts, write_report
from iclperm.report.figures import curve_plot, heat_map, save
from iclperm.report.parts import Table, plain
from iclperm.stats.incomplete import filled
from iclperm.studies.sensitivity import Sensitivity, curve_table, sensitivity_tables
from iclperm.studies.sensitivity_conclusion import conclusion
from iclperm.studies.sensitivity_over_shots import (
    SensitivityOverShots,
    over_shots_table,
    ratio_plot,
    sensitivity_over_shots,
)
from iclperm.studies.sensitivity_summary import SensitivitySummary, sensitivity_summary
from iclperm.studies.tokens import token_line

Array = npt.NDArray[Any]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Counts:
    """Token counts as the engine reports them."""

    tokens_naive: int = 7_000_000
    tokens_unique: int = 1_000_000
    tokens_forwarded: int = 1_000_000


def answers(shape: tuple[int, ...], seed: int = 0) -> Array:
    """Random answers with an effect of the first two axes, sets and permutations."""
    generator = np.random.default_rng(seed)
    chance = 0.6 + 0.1 * generator.standard_normal((shape[0], 1)) + 0.1 * generator.standard_normal((1, shape[1]))
    levels = chance.reshape(chance.shape + (1,) * (len(shape) - 2))
    return np.asarray(generator.random(shape) < levels, dtype=np.uint8)


def full_summary() -> SensitivitySummary:
    generator = np.random.default_rng(1)
    logprob = generator.normal(-2, 1, (5, 4, 60, 3)).astype(np.float32)
    return sensitivity_summary(answers((5, 4, 60)), logprob, generator.integers(0, 3, 60), tokens=Counts())


def written(folder: Path, found: Sensitivity) -> list[Path]:
    return write_report(folder, found, {"kind": "sensitivity", **found.to_dict()})


def rendered(summary: SensitivitySummary) -> str:
    return "".join(printed(table) for table in sensitivity_tables(summary))


def printed(table: Table, width: int = 160) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as capture:
        console.print(table)
    return capture.get()


class TestSummary:
    def test_holds_what_the_estimators_say(self) -> None:
        correct = answers((5, 4, 60))
        summary = sensitivity_summary(correct, seed=3)
        matrix = correct.mean(axis=2)
        np.testing.assert_allclose(summary.accuracy, matrix)
        assert summary.printed.order == stats.order_sensitivity(matrix)
        assert summary.printed.selection == stats.selection_sensitivity(matrix)
        assert summary.printed.ratio == stats.sensitivity_ratio(matrix)
        assert summary.intervals == stats.generalized_interval(matrix, seed=3)
        assert summary.components == stats.variance_components(correct)
        assert summary.effects == stats.effect_interval(stats.variance_components(correct), seed=3)
        assert summary.mean_se == stats.clustered_se(correct)
        assert (summary.calibration, summary.near_ties, summary.tokens) == (None, None, None)

    def test_names_best_worst_and_low_tail(self) -> None:
        correct = np.zeros((5, 8, 100), np.uint8)
        for rank, cell in enumerate(np.ndindex(5, 8)):
            correct[(*cell, slice(20 + rank))] = 1
        summary = sensitivity_summary(correct)
        assert summary.worst == (0, 0, 0.20)
        assert summary.low_tail == (0, 1, 0.21)
        assert summary.best == (4, 7, 0.59)
        np.testing.assert_allclose(summary.set_means, summary.accuracy.mean(axis=1))
        np.testing.assert_allclose(summary.permutation_means, summary.accuracy.mean(axis=0))

    def test_scores_stand_beside_what_is_missing(self) -> None:
        correct = answers((4, 4, 50))
        state = np.zeros(correct.shape, np.uint8)
        state[0, 1, 7], state[2, 2, 7], state[3, 3, 9] = 1, 1, 2
        summary = sensitivity_summary(correct, state=state)
        assert (summary.num_queries, summary.dropped, summary.incomplete) == (50, 0, pytest.approx(2 / 50))
        assert summary.missing == {"invalid": 2 / 800, "overlong": 1 / 800, "unparsed": 0, "api_missing": 0}
        assert summary.components == stats.variance_components(correct, state)
        whole = filled(correct, state)
        assert summary.mean_se == stats.clustered_se(whole.items)
        assert summary.mean_interval == stats.mean_error(whole.items).interval()
        assert "invalid 0.25%, overlong 0.12%" in rendered(summary)

    def test_a_context_that_failed_everywhere_is_named(self) -> None:
        state = np.zeros((3, 4, 20), np.uint8)
        state[1, 2] = 2
        with pytest.raises(DataError, match="set 1 under permutation 2 has no answer to any query"):
            sensitivity_summary(answers((3, 4, 20)), state=state)

    @pytest.mark.parametrize("shape", [(1, 5, 30), (5, 1, 30), (1, 1, 30), (5, 5, 1), (2, 2, 2)])
    def test_small_designs_leave_out_what_they_cannot_say(self, shape: tuple[int, int, int], tmp_path: Path) -> None:
        summary = sensitivity_summary(answers(shape))
        assert (summary.components is None) == (min(shape) < 2)
        assert (summary.intervals is None) == (min(shape[:2]) < 2)
        assert math.isnan(summary.printed.order) == (shape[1] < 2)
        assert "Order against selection" in rendered(summary)
        assert "as there is only one" in conclusion(summary)[0] or min(shape[:2]) >= 2
        written(tmp_path, Sensitivity(summary))
        assert json.loads((tmp_path / "report.json").read_text())["sensitivity"]["num_queries"] == shape[2]

    def test_says_what_a_small_design_cannot_tell(self) -> None:
        generator = np.random.default_rng(5)
        summary = sensitivity_summary(answers((10, 10, 200)))
        assert summary.needed is not None
        said = " ".join(conclusion(summary, 8))
        assert re.search(rf"cannot be told from 1: .* about {summary.needed.num_sets:,} sets", said)
        absurd = dataclasses.replace(summary, needed=summary.needed._replace(num_sets=32_151, num_permutations=32_151))
        assert "no practical design would settle it at this estimate" in " ".join(conclusion(absurd, 8))
        sets_only = (generator.random((10, 1, 300)) < np.linspace(0.1, 0.9, 10)[:, None, None]) & np.ones(
            (1, 10, 1), bool
        )
        noise = generator.random(sets_only.shape) < 0.02
        said = " ".join(conclusion(sensitivity_summary(sets_only ^ noise)))
        assert "can be told from 1: the choice matters more than the order" in said
        orders_only = np.swapaxes(sets_only ^ noise, 0, 1)
        assert "the order matters more than the choice" in " ".join(conclusion(sensitivity_summary(orders_only)))

    def test_the_conclusion_names_k_and_both_movements(self) -> None:
        summary = full_summary()
        assert summary.effects is not None
        first, told, quote = conclusion(summary, 8)
        order, selection = summary.effects.order, summary.effects.selection
        assert first.startswith("At k = 8, another order of the same demonstrations moves accuracy by about ±")
        for effect in (order, selection):
            low, high = 100 * effect.low, 100 * effect.high
            assert f"±{100 * effect.estimate:.1f} points [{low:.1f} to {high:.1f}]" in first
        assert summary.jackknife is not None
        assert summary.jackknife.estimate == summary.printed.ratio
        quoted = f"{summary.printed.ratio:.2f} [{summary.jackknife.low:.2f} to {summary.jackknife.high:.2f}]"
        assert f"r = choice / order = {quoted}" in told
        assert quote.startswith("This is the r to quote (as printed in arXiv 2511.09700, jackknife interval)")
        assert quote.endswith(f"{summary.effects.ratio.high:.2f}].")
        assert Sensitivity(summary, (8,)).to_dict()["sensitivity"]["conclusion"] == [first, told, quote]

    def test_an_r_that_only_item_noise_holds_off_1_is_left_open(self) -> None:
        summary = full_summary()
        assert summary.effects is not None
        narrow = dataclasses.replace(summary, jackknife=stats.Interval(0.5, 0.4, 0.9, 0.95))
        assert summary.effects.ratio.low <= 1 <= summary.effects.ratio.high
        unknown = summary.effects._replace(ratio=stats.Interval(math.nan, math.nan, math.nan, 0.95))
        for case in (narrow, dataclasses.replace(narrow, effects=unknown)):
            assert "excludes 1, but without item noise r cannot be told from 1" in conclusion(case)[1]

    def test_an_r_without_a_value_is_not_said(self) -> None:
        summary = full_summary()
        assert summary.effects is not None
        unknown = summary.effects._replace(ratio=stats.Interval(math.nan, 0.59, math.inf, 0.95))
        said = conclusion(dataclasses.replace(summary, effects=unknown))
        assert not any("nan" in line for line in said)
        assert said[-1].endswith("jackknife interval).")

    def test_without_a_jackknife_the_rms_is_quoted(self) -> None:
        summary = sensitivity_summary(answers((2, 2, 60)))
        assert summary.intervals is not None
        assert summary.quoted == summary.intervals.ratio
        assert "root mean square, generalised interval" in conclusion(summary)[-1]

    def test_no_demonstrations_are_neither_ordered_nor_chosen(self) -> None:
        correct = np.repeat(answers((1, 1, 40)), 3, axis=0)
        assert conclusion(sensitivity_summary(correct), 0) == [
            f"At k = 0 there are no demonstrations to order or to choose; accuracy is {100 * correct.mean():.1f} %."
        ]

    def test_a_label_sequence_is_named_only_where_it_is_fixed(self) -> None:
        summary = full_summary()
        assert summary.num_labels == 3
        for shots, fixed in ((6, True), (8, False), (None, False)):
            text = "".join(printed(table) for table in sensitivity_tables(summary, shots))
            lines = summary.to_dict(shots)["components"]["in_words"]
            assert ("sequence of labels" in " ".join(text.split())) == ("sequence of labels" in lines[1]) == fixed

    def test_near_ties_and_scores_beyond_accuracy(self) -> None:
        logprob = np.full((3, 3, 4, 2), [-1.0, -2.0], np.float32)
        logprob[..., 0, 1] = -1.0
        summary = sensitivity_summary(answers((3, 3, 4)), logprob, [0, 0, 1, 1])
        assert summary.near_ties == 0.25
        expected = stats.calibration(logprob, [0, 0, 1, 1])
        assert summary.calibration is not None
        for got, want in zip(summary.calibration, expected, strict=True):
            np.testing.assert_array_equal(got, want)

    def test_a_weight_counts_like_a_repeated_query(self) -> None:
        generator = np.random.default_rng(6)
        correct, weights = answers((4, 3, 20)), generator.integers(1, 4, 20).tolist()
        logprob = np.round(generator.normal(-2, 1, (4, 3, 20, 3)), 1).astype(np.float32)
        targets, state = generator.integers(0, 3, 20), np.zeros(correct.shape, np.uint8)
        state[0, 1, 7], state[2, 2, 9] = 1, 2
        weighted = sensitivity_summary(correct, logprob, targets, state, weights=weights)
        written_out = sensitivity_summary(
            *(reference.repeated(array, weights, axis) for array, axis in ((correct, 2), (logprob, 2), (targets, 0))),
            reference.repeated(state, weights, 2),
        )
        for field in ("accuracy", "dropped", "missing", "mean", "near_ties"):
            assert getattr(weighted, field) == pytest.approx(getattr(written_out, field)), field
        assert weighted.near_ties
        assert weighted.calibration is not None
        assert written_out.calibration is not None
        np.testing.assert_allclose(weighted.calibration, written_out.calibration)
        assert weighted.printed == pytest.approx(written_out.printed)
        assert (weighted.num_queries, written_out.num_queries) == (20, sum(weights))
        assert weighted.components == stats.variance_components(correct, state, weights=weights, classes=targets)

    def test_shapes_that_do_not_fit_are_named(self) -> None:
        with pytest.raises(RequestError, match=r"\[S, P, Q\], got \[2, 3\]"):
            sensitivity_summary(np.ones((2, 3), int))
        with pytest.raises(RequestError, match=r"shape \[2, 3, 4, 'L'\] to fit correct, got \[2, 3, 5, 2\]"):
            sensitivity_summary(np.ones((2, 3, 4), int), np.zeros((2, 3, 5, 2)))


def over_shots(resampled: bool = False, seed: int = 0) -> SensitivityOverShots:
    correct = np.stack([answers((5, 4, 60), seed + k) for k in range(4)], axis=2)
    return sensitivity_over_shots(correct, shots=[0, 1, 4, 8], resampled=resampled)


class TestOverShots:
    def test_every_k_says_what_its_summary_says(self) -> None:
        correct = np.stack([answers((5, 4, 60), k) for k in range(3)], axis=2)
        found = sensitivity_over_shots(correct, shots=[1, 4, 8], seed=3)
        for place in range(3):
            summary = sensitivity_summary(correct[:, :, place], seed=3)
            assert (found.order[place], found.selection[place]) == summary.printed[:2]
            pairs = (
                (found.ratio, summary.jackknife),
                *zip(
                    (found.order_effect, found.selection_effect, found.ratio_effect), summary.effects or (), strict=True
                ),
            )
            for over, interval in pairs:
                got = over.estimate[place], over.low[place], over.high[place], over.level
                np.testing.assert_array_equal(got, np.array(interval))

    def test_every_answer_counts(self) -> None:
        generator = np.random.default_rng(7)
        correct = generator.integers(0, 2, (4, 3, 2, 30), dtype=np.uint8)
        state = np.zeros(correct.shape, np.uint8)
        state[0, 1, 0, 5], state[3, 2, 1, 6] = 2, 1
        weights = generator.integers(1, 4, 30).astype(np.float64)
        found = sensitivity_over_shots(correct, state, shots=[2, 4], weights=weights)
        assert (found.num_queries, found.dropped) == (30, 0)
        everywhere = stats.accuracy(correct, state, weights).values
        for place in range(2):
            matrix = everywhere[:, :, place]
            assert found.order[place] == pytest.approx(reference.order_sensitivity(matrix, "mean_std"))
            assert found.selection[place] == pytest.approx(reference.selection_sensitivity(matrix, "mean_std"))
            at_k = correct[:, :, place], state[:, :, place]
            components = stats.variance_components(*at_k, weights=weights)
            assert found.order_effect.estimate[place] == components.order_effect

    def test_a_weight_counts_like_a_repeated_query_and_as_a_class_in_the_effects(self) -> None:
        correct, weights = answers((4, 3, 2, 20)), [1, 3] * 10
        weighted = sensitivity_over_shots(correct, shots=[2, 4], weights=weights)
        written_out = sensitivity_over_shots(reference.repeated(correct, weights), shots=[2, 4])
        np.testing.assert_allclose(weighted.order, written_out.order)
        np.testing.assert_allclose(weighted.selection, written_out.selection)
        np.testing.assert_allclose(np.array(weighted.ratio[:3]), np.array(written_out.ratio[:3]))
        by_class = sensitivity_over_shots(correct, shots=[2, 4], weights=weights, classes=[0, 1] * 10)
        np.testing.assert_array_equal(np.array(weighted.ratio_effect[:3]), np.array(by_class.ratio_effect[:3]))
        for place in range(2):
            components = stats.variance_components(correct[:, :, place], weights=weights)
            assert weighted.order_effect.estimate[place] == components.order_effect

    @pytest.mark.parametrize("shape", [(1, 5, 3, 30), (5, 1, 3, 30), (2, 2, 3, 30), (4, 4, 3, 1), (1, 1, 3, 1)])
    def test_what_is_undefined_is_nan_and_can_be_shown(self, shape: tuple[int, int, int, int], tmp_path: Path) -> None:
        found = sensitivity_over_shots(answers(shape), shots=[0, 2, 4])
        num_sets, num_permutations, _, num_queries = shape
        undefined = {
            "order": num_permutations < 2,
            "selection": num_sets < 2,
            "ratio.low": min(num_sets, num_permutations) < 3,
            "ratio_effect.high": min(num_sets, num_permutations) < 3 or num_queries < 2,  # of two: from 0 to infinity
        }
        for name, absent in undefined.items():
            field, _, part = name.partition(".")
            values = getattr(getattr(found, field), part) if part else getattr(found, field)
            assert np.isnan(values[0])
            assert np.isnan(values[1:]).all() == absent or num_queries == 1, name
        assert "-" in printed(over_shots_table(found))
        assert len(save(ratio_plot(found), tmp_path / "r")) == 2
        assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["order"][0] is None

    def test_where_an_ordering_has_no_answer_nothing_is_said_of_that_k(self) -> None:
        state = np.zeros((3, 3, 2, 4), np.uint8)
        state[0, 0, 1] = 2
        found = sensitivity_over_shots(answers(state.shape), state, shots=[2, 4])
        assert np.isnan(found.order).tolist() == [False, True]
        assert (found.num_queries, found.dropped) == (4, 0)

    def test_prefixes_hold_selection_within_the_set(self) -> None:
        """A model that cares for the demonstrations and not at all for their order."""
        generator = np.random.default_rng(8)
        quality = 0.05 * generator.standard_normal((6, 8))
        permutations = np.array([generator.permutation(8) for _ in range(6)])
        chance = np.stack([0.6 + quality[:, permutations[:, :k]].mean(axis=2) for k in (2, 4, 8)], axis=2)
        correct = np.linspace(0, 1, 400, endpoint=False) < np.round(chance, 9)[..., None]
        found = sensitivity_over_shots(correct, shots=[2, 4, 8])
        assert found.order[0] > found.order[1] > found.order[2] == 0
        assert found.is_order_alone.tolist() == [False, False, True]

    def test_the_caution_stands_where_order_is_not_order_alone(self, tmp_path: Path) -> None:
        prefixes, clean = over_shots(), over_shots(resampled=True)
        assert prefixes.caution is not None
        assert "At k < 8" in prefixes.caution
        assert "`resample: per_k`" in prefixes.caution
        assert prefixes.to_dict()["caution"] == prefixes.caution
        assert prefixes.to_dict()["is_order_alone"] == [False, False, False, True]
        for width in (60, 80, 160):
            shown = " ".join(printed(over_shots_table(prefixes), width).split())
            assert f"* {prefixes.caution}" in shown
        assert re.findall(r"(\d\*?) as printed", shown) == ["1*", "4*", "8"]
        drawn = " ".join(printed_text(save(ratio_plot(prefixes), tmp_path / "a")[1]))
        assert prefixes.caution in drawn
        assert clean.caution is None
        assert clean.is_order_alone.all()
        assert "*" not in printed(over_shots_table(clean))
        assert "resample" not in " ".join(printed_text(save(ratio_plot(clean), tmp_path / "b")[1]))
        only_longest = sensitivity_over_shots(answers((3, 3, 2, 9)), shots=[0, 8])
        assert only_longest.caution is None

    def test_the_table_shows_every_interval_beside_its_r(self) -> None:
        found = over_shots()
        lines = printed(over_shots_table(found), 80).splitlines()
        for place, start in ((1, 3), (2, 5), (3, 7)):
            for line, values, r in (
                (lines[start], (found.order, found.selection, found.ratio.estimate), found.ratio),
                (lines[start + 1], (found.order_effect.estimate,), found.ratio_effect),
            ):
                assert all(f"{value[place]:.4f}" in line for value in values)
                assert line.rstrip().endswith(f"{r.low[place]:.4f} to {r.high[place]:.4f}")

    def test_points_are_hollow_where_order_is_not_order_alone(self) -> None:
        from matplotlib.figure import Figure

        plot, figure = ratio_plot(over_shots()), Figure()
        plot.draw(figure)
        for axes in figure.axes:
            hollow = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
            assert hollow
            assert all(np.array_equal(line.get_xdata(), [1, 4]) for line in hollow)
        ratio = next(line for axes in figure.axes for line in axes.lines if line.get_color() == "black")
        np.testing.assert_array_equal(ratio.get_ydata(), over_shots().ratio.estimate[1:])

    def test_shots_that_do_not_fit_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(RequestError, match=r"\[S, P, K, Q\], got \[2, 3, 4\]"):
            sensitivity_over_shots(np.ones((2, 3, 4), int), shots=[1])
        for shots in ([1], [4, 1], [2, 2]):
            with pytest.raises(
                RequestError, match=rf"2 ascending numbers, one for each k, got {re.escape(str(shots))}"
            ):
                sensitivity_over_shots(np.ones((2, 3, 2, 4), int), shots=shots)
        nothing = sensitivity_over_shots(np.ones((2, 3, 1, 4), int), shots=[0])
        with pytest.raises(RequestError, match="at least one k >= 1"):
            save(ratio_plot(nothing), tmp_path / "r")


def numbers(value: Any) -> Iterator[float]:
    """All numbers in JSON content."""
    if isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from numbers(entry)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


class TestJson:
    def test_every_number_of_the_tables_is_in_the_report(self) -> None:
        generator = np.random.default_rng(9)
        state = (generator.random((5, 4, 3, 60)) < 0.002).astype(np.uint8)
        correct = answers(state.shape)
        logprob = np.round(generator.normal(-2, 1, (5, 4, 60, 3)), 1).astype(np.float32)
        targets, weights = generator.integers(0, 3, 60), generator.integers(1, 3, 60)
        summary = sensitivity_summary(
            correct[:, :, 2], logprob, targets, state[:, :, 2], weights=weights, tokens=Counts()
        )
        curve = stats.curve(correct, state, weights)
        over = sensitivity_over_shots(correct, state, shots=[0, 4, 8], weights=weights)
        known = list(numbers(Sensitivity(summary, (0, 4, 8), curve, over).to_dict()))
        tables = [*sensitivity_tables(summary, 8), curve_table(curve, [0, 4, 8]), over_shots_table(over)]
        # a percent sign tells a share; constants of the method and exponents stand in words that are not numbers
        words = re.compile(r"5 % ordering|one ordering in 20|95 %|1e-4")
        for table in tables:
            text = words.sub("", printed(table).replace(",", ""))
            for number, percent in re.findall(r"(?<![\w.])(\d+(?:\.\d+)?)(%?)", text):
                scale, digits = (100 if percent else 1), len(number.partition(".")[2])
                assert any(f"{abs(scale * value):.{digits}f}" == number for value in known), (table.title, number)

    def test_round_trips_with_null_for_what_is_not_finite(self) -> None:
        content = Sensitivity(sensitivity_summary(np.ones((3, 3, 5), int))).to_dict()
        read = json.loads(json.dumps(content, allow_nan=False))
        assert read == content
        assert read["sensitivity"]["spreads"]["mean_std"] == {"order": 0, "selection": 0, "ratio": None}

    def test_holds_every_part(self) -> None:
        summary = full_summary()
        content = summary.to_dict()
        assert content["accuracy"] == summary.accuracy.tolist()
        assert content["set_means"] == summary.set_means.tolist()
        assert content["tokens"] == {
            "naive": 7_000_000,
            "unique": 1_000_000,
            "forwarded": 1_000_000,
            "complete": True,
            "saving": 7.0,
        }
        assert summary.components is not None
        assert content["components"]["sigma2"] == summary.components.sigma2._asdict()
        assert content["components"]["order_effect"] == summary.components.order_effect
        assert len(content["components"]["in_words"]) == 7
        assert np.shape(content["calibration"]["nll"]) == (5, 4)

    def test_a_curve_stands_beside_its_shots(self) -> None:
        curve = stats.curve(answers((3, 3, 2, 20)))
        content = Sensitivity(sensitivity_summary(answers((3, 3, 20))), (0, 4), curve).to_dict()
        assert content["curve"]["shots"] == [0, 4]
        assert content["curve"]["mean"] == curve.mean.tolist()

    def test_plain_values(self) -> None:
        value = {"a": np.float32(0.5), "b": (math.inf, np.array([1, 2])), 3: [math.nan, True, None]}
        assert plain(value) == {"a": 0.5, "b": [None, [1, 2]], "3": [None, True, None]}


class TestTables:
    def test_show_the_numbers(self) -> None:
        summary = full_summary()
        text = rendered(summary)
        assert summary.components is not None
        assert summary.calibration is not None
        shown = [summary.mean, summary.printed.order, summary.printed.selection, summary.printed.ratio]
        shown += [summary.components.order_effect, summary.calibration.brier.mean(), *summary.set_means]
        for value in shown:
            assert f"{value:.4f}" in text
        assert "7,000,000" in text
        assert "7.0 times fewer" in text

    def test_every_interval_stands_under_the_estimate_it_belongs_to(self) -> None:
        summary = full_summary()
        assert summary.jackknife is not None
        assert summary.intervals is not None
        assert summary.effects is not None
        lines = printed(sensitivity_tables(summary)[1]).splitlines()
        place = {line.split("  ")[0]: index for index, line in enumerate(lines)}
        below = {
            "mean of std (as printed)": [summary.jackknife],
            "root mean square (RMS)": summary.intervals,
            "RMS without item noise": summary.effects,
        }
        for name, intervals in below.items():
            for r in intervals:
                assert f"{r.estimate:.4f}" in lines[place[name]]
                assert f"{r.low:.4f} to {r.high:.4f}" in lines[place[name] + 1]

    @pytest.mark.parametrize("width", [60, 80])
    def test_a_narrow_screen_cuts_nothing(self, width: int) -> None:
        summary = full_summary()
        curve = stats.curve(answers((3, 3, 2, 20)))
        tables = [*sensitivity_tables(summary, 8), *sensitivity_tables(summary, 8, full=False)]
        for table in [*tables, curve_table(curve, [0, 4]), over_shots_table(over_shots(resampled=True))]:
            narrow, wide = printed(table, width), printed(table)
            assert "…" not in narrow
            assert max(map(len, narrow.splitlines())) <= width
            assert sorted(re.findall(r"\d[\d.,]*", narrow)) == sorted(re.findall(r"\d[\d.,]*", wide))
            names = [line.split("  ")[0].rstrip() for line in wide.splitlines()[1:] if line[0] not in " ─"]
            assert all(any(line.startswith(name) for line in narrow.splitlines()) for name in names)

    def test_tables_name_their_k(self) -> None:
        titles = [str(table.title) for table in sensitivity_tables(full_summary(), 8)]
        assert all("at k = 8" in title for title in titles if not title.startswith("Tokens"))
        assert titles[-1] == "Tokens, for all k"

    def test_lowest_and_highest_are_called_so(self) -> None:
        summary = full_summary()
        table = next(table for table in sensitivity_tables(summary) if str(table.title).startswith("Beyond"))
        assert list(table.header) == ["", "mean", "lowest", "highest"]
        assert summary.calibration is not None
        assert f"{summary.calibration.ece.min():.4f}" in printed(table)

    def test_in_brief_there_are_three_and_nothing_missing_is_hidden(self) -> None:
        correct = answers((4, 4, 50))
        state = np.zeros(correct.shape, np.uint8)
        assert len(sensitivity_tables(sensitivity_summary(correct), full=False)) == 3
        assert "answers missing" not in printed(sensitivity_tables(sensitivity_summary(correct), full=False)[0])
        state[0, 1, 7] = 1
        summary = sensitivity_summary(correct, state=state)
        assert "invalid 0.12%" in printed(sensitivity_tables(summary, full=False)[0])

    def test_tokens_of_a_killed_session_make_the_count_a_least(self) -> None:
        class Killed(Counts):
            is_token_count_complete = False

        summary = sensitivity_summary(answers((3, 3, 20)), tokens=Killed(tokens_forwarded=400_000))
        assert summary.tokens is not None
        assert summary.tokens.saving == 7.0
        assert "at least 400,000" in printed(sensitivity_tables(summary)[-1])
        assert token_line(summary.tokens).endswith("7.0 times fewer (at least 400,000 forwarded)")
        assert token_line(summary.tokens._replace(forwarded=1_000_000, complete=True)).endswith("7.0 times fewer")

    def test_curve(self) -> None:
        curve = stats.curve(answers((3, 3, 2, 20)))
        text = printed(curve_table(curve, [0, 4]))
        assert all(f"{value:.4f}" in text for value in (*curve.mean, *curve.std_permutations, *curve.std_sets))
        with pytest.raises(RequestError, match="shots has 1 entries, the curve 2"):
            curve_table(curve, [4])


def printed_text(svg: Path) -> list[str]:
    """Text is text in the files."""
    return [html.unescape(text.strip()) for text in re.findall(r"<text[^>]*>(.*?)</text>", svg.read_text("utf-8"))]


class TestFigures:
    def test_the_heat_map_prints_cells_means_and_sensitivities(self, tmp_path: Path) -> None:
        matrix = np.random.default_rng(2).random((3, 4))
        r = stats.jackknife_ratio_interval(matrix)
        png, svg = save(heat_map(matrix, title="a title", ratio=r), tmp_path / "map")
        assert png.read_bytes().startswith(PNG_SIGNATURE)
        text = printed_text(svg)
        for value in (*matrix.ravel(), *matrix.mean(axis=0), *matrix.mean(axis=1)):
            assert f"{value:.3f}".removeprefix("0") in text
        assert "a title" in text
        line = next(entry for entry in text if entry.startswith("order sensitivity"))
        assert f"{stats.order_sensitivity(matrix):.4f}" in line
        assert line.endswith(f"r {stats.sensitivity_ratio(matrix):.2f}  [{r.low:.2f}, {r.high:.2f}]")

    def test_a_large_heat_map_prints_no_cells(self, tmp_path: Path) -> None:
        matrix = np.random.default_rng(3).random((10, 21))
        text = printed_text(save(heat_map(matrix), tmp_path / "map")[1])
        assert f"{matrix[0, 0]:.3f}".removeprefix("0") not in text
        assert {"20", "permutation", "set"} <= set(text)

    @pytest.mark.parametrize("shape", [(1, 1), (1, 7), (6, 1), (40, 300)])
    def test_every_shape_can_be_drawn(self, shape: tuple[int, int], tmp_path: Path) -> None:
        assert all(path.stat().st_size > 1000 for path in save(heat_map(np.full(shape, 0.25)), tmp_path / "map"))

    def test_files_are_the_same_twice_whatever_the_settings(self, tmp_path: Path) -> None:
        import matplotlib

        matrix, curve = np.random.default_rng(4).random((4, 4)), stats.curve(answers((3, 3, 3, 20)))
        first = [*save(heat_map(matrix), tmp_path / "a"), *save(curve_plot(curve, [0, 1, 4]), tmp_path / "b")]
        with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "path", "savefig.transparent": True}):
            second = [*save(heat_map(matrix), tmp_path / "c"), *save(curve_plot(curve, [0, 1, 4]), tmp_path / "d")]
            assert matplotlib.rcParams["font.size"] == 30
        for one, other in zip(first, second, strict=True):
            assert one.read_bytes() == other.read_bytes()
        assert b"<dc:date>" not in first[1].read_bytes()

    def test_the_curve_names_both_bands(self, tmp_path: Path) -> None:
        curve = stats.curve(answers((3, 3, 3, 20)))
        png, svg = save(curve_plot(curve, [0, 1, 4], chance=0.25), tmp_path / "curve")
        assert png.read_bytes().startswith(PNG_SIGNATURE)
        assert {"mean", "spread over permutations", "spread over sets", "chance"} <= set(printed_text(svg))

    def test_a_band_that_is_undefined_is_left_out(self, tmp_path: Path) -> None:
        _, svg = save(curve_plot(stats.curve(answers((1, 3, 3, 20))), [0, 1, 4]), tmp_path / "curve")
        text = printed_text(svg)
        assert "spread over permutations" in text
        assert "spread over sets" not in text

    def test_shots_must_fit_the_curve(self, tmp_path: Path) -> None:
        with pytest.raises(RequestError, match="shots has 2 entries, the curve 3"):
            save(curve_plot(stats.curve(answers((2, 2, 3, 5))), [0, 1]), tmp_path / "curve")


def test_the_report_is_written_whole_and_replaced(tmp_path: Path) -> None:
    curve = stats.curve(answers((3, 3, 2, 20)))
    first = written(tmp_path, Sensitivity(sensitivity_summary(answers((3, 3, 20))), (0, 4), curve, title="one"))
    assert [path.name for path in first] == ["heatmap.png", "heatmap.svg", "curve.png", "curve.svg", "report.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in first)
    heat_map_text = printed_text(tmp_path / "heatmap.svg")
    assert "one, k = 4" in heat_map_text
    quoted = stats.jackknife_ratio_interval(answers((3, 3, 20)).mean(axis=2))
    interval = f"r {quoted.estimate:.2f}  [{quoted.low:.2f}, {quoted.high:.2f}]"
    assert any(line.endswith(interval) for line in heat_map_text)
    assert "one" in printed_text(tmp_path / "curve.svg")
    both = [*("r_over_k.png", "r_over_k.svg"), "report.json"]
    for shots, files in (([1, 4], both), ([0, 4], both[-1:])):
        over = sensitivity_over_shots(answers((3, 3, 2, 20)), shots=shots)
        paths = written(tmp_path, Sensitivity(full_summary(), tuple(shots), None, over, title="two"))
        assert [path.name for path in paths[2:]] == files
        content = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
        assert content["over_shots"] == json.loads(json.dumps(over.to_dict()))
    assert "two" in printed_text(tmp_path / "r_over_k.svg")
    written(tmp_path, Sensitivity(full_summary()))
    read = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert read["sensitivity"]["accuracy"] == full_summary().accuracy.tolist()
    assert not {"curve", "over_shots"} & set(read)


NAN = math.nan
ROW = stats.Interval(0.12345, -0.01, 0.25678, 0.95)
OPEN = stats.Interval(0.12345, NAN, NAN, 0.95)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (parts.number(0.12345), "0.1235"),
        (parts.number(NAN, 2), "-"),
        (parts.signed(0.12345, 2), "+0.12"),
        (parts.signed(NAN), "-"),
        (parts.interval_words(ROW), "-0.0100 to 0.2568"),
        (parts.interval_words(ROW, 2, "+"), "-0.01 to +0.26"),
        (parts.interval_words(OPEN), "-"),
        (parts.with_bounds(ROW), "0.12 [-0.01 to 0.26]"),
        (parts.with_bounds(ROW, sign="+"), "+0.12 [-0.01 to +0.26]"),
        (parts.percent(0.12345), "12.3 %"),
        (parts.percent_with_bounds(ROW), "12.3 % [-1.0 to 25.7]"),
        (parts.percent_with_bounds(OPEN), "12.3 %"),
        (parts.points(0.12345), "12.3 points"),
        (parts.points_with_bounds(ROW), "+12.3 points [-1.0 to +25.7]"),
        (parts.points_with_bounds(OPEN, unit=""), "+12.3"),
        (parts.points_with_bounds(OPEN._replace(estimate=NAN)), "-"),
        (parts.spread_in_points(0.12345), "about ±12.3 points"),
        (parts.spread_in_points(NAN), "an unknown amount, as there is only one"),
        (parts.p_value(0.0123), "0.012"),
        (parts.p_value(0.0009), "<0.001"),
        (parts.p_value(0.0009, least=0.0005), "0.001"),
        (parts.p_value(NAN), "-"),
        (parts.p_words(0.0123), "p = 0.0123"),
        (parts.p_words(0.00001), "p < 0.0001"),
        (parts.listed(["sets"]), "sets"),
        (parts.listed(["sets", "permutations", "queries"]), "sets, permutations and queries"),
    ],
)
def test_numbers_are_written_in_one_way(text, wanted):
    assert text == wanted


@pytest.mark.parametrize(("count", "most", "places"), [(5, None, [0, 1, 2, 3, 4]), (5, 2, [1, 4]), (7, 3, [0, 3, 6])])
def test_rows_that_are_shown_lie_at_equal_distances(count, most, places):
    assert parts.evenly(count, most) == places


def test_letters_can_be_read_on_every_colour():
    assert figures.letter_colour((0.27, 0.0, 0.33, 1.0)) == "white"  # viridis, both ends
    assert figures.letter_colour((0.99, 0.91, 0.14)) == "black"


def drawn_texts(plot: parts.Plot) -> tuple[Any, list[Any]]:
    """A figure, and its title and the line below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=plot.size)
    canvas = FigureCanvasAgg(figure)
    plot.draw(figure)
    canvas.draw()
    return figure, figure.texts


class TestRoom:
    @pytest.mark.parametrize("shape", [(2, 2), (3, 3), (10, 10), (30, 200)])
    def test_title_and_line_lie_within_the_figure(self, shape: tuple[int, int]) -> None:
        matrix = 0.6 + 0.2 * np.random.default_rng(1).random(shape)
        ratio = stats.Interval(1.23, 0.0, 703.0, 0.95)
        figure, texts = drawn_texts(
            heat_map(matrix, title="ag_news, a model with a rather long name, k = 8", ratio=ratio)
        )
        assert len(texts) == 2
        for text in texts:
            assert text.get_window_extent().x1 <= figure.bbox.width
            assert text.get_fontsize() >= 6.5
        assert texts[1].get_text().endswith("[0.00, 703.00]")

    def test_a_title_that_no_size_fits_ends_in_dots(self) -> None:
        figure, (title, _) = drawn_texts(heat_map(0.5 + np.eye(2) / 4, title="a long name " * 30))
        assert title.get_text().endswith("…")
        assert title.get_window_extent().x1 <= figure.bbox.width

    def test_the_legend_of_a_curve_lies_below_its_bands(self) -> None:
        correct = (np.random.default_rng(2).random((4, 5, 6, 40)) < 0.6).astype(np.uint8)
        figure, _ = drawn_texts(curve_plot(stats.curve(correct), range(6), chance=0.25))
        (legend,), (axes,) = figure.legends, figure.axes
        assert legend.get_window_extent().y1 < axes.get_tightbbox().y0
        assert legend.get_window_extent().y0 >= 0
        assert axes.get_legend() is None

    def test_the_row_of_a_label_that_no_query_asks_for_is_blank(self) -> None:
        counts = np.array([[10, 2, 1], [0, 0, 0], [3, 1, 9]])
        figure, _ = drawn_texts(figures.confusion_plot(counts, np.zeros(3), ["World", "Sports", "Business"]))
        words = [text.get_text() for text in figure.axes[0].texts]
        assert words.count("no query") == 1
        assert len(words) == 6 + 1
        assert np.ma.getmaskarray(figure.axes[0].images[0].get_array())[1].all()

    def test_a_caption_keeps_its_words_whatever_the_width_of_the_table(self) -> None:
        caption = "Median and 90 % of accuracy over fresh samples of that many sets, the other axes as in the run."
        narrow = printed(Table("A", ("k", "x"), [("1", "2")], caption=caption))
        assert caption in narrow
        wide = printed(Table("A", ("k", *"abcdefgh"), [("1" * 20, *["123456789"] * 8)], caption=caption), width=70)
        assert caption in " ".join(wide.split())
