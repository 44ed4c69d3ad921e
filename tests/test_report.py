"""The sensitivity summary, its JSON twin, the tables and the figures."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from rich.console import Console
from rich.table import Table

from iclperm import stats
from iclperm.errors import DataError, RequestError
from iclperm.report import write_report
from iclperm.report.figures import curve_plot, heat_map
from iclperm.report.tables import curve_table, sensitivity_tables
from iclperm.studies.sensitivity import SensitivitySummary, plain, report_content, sensitivity_summary

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


def rendered(summary: SensitivitySummary) -> str:
    return "".join(printed(table) for table in sensitivity_tables(summary))


def printed(table: Table) -> str:
    console = Console(width=160, file=io.StringIO())
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
        assert (summary.num_queries, summary.dropped) == (48, pytest.approx(2 / 50))
        assert summary.missing == {"invalid": 2 / 800, "overlong": 1 / 800, "unparsed": 0, "api_missing": 0}
        kept = np.delete(correct, [7, 9], axis=2)
        assert summary.components == stats.variance_components(kept)
        assert summary.mean_se == stats.clustered_se(kept)
        assert "invalid 0.25%, overlong 0.12%" in rendered(summary)

    def test_a_context_that_failed_everywhere_is_named(self) -> None:
        state = np.zeros((3, 4, 20), np.uint8)
        state[1, 2] = 2
        with pytest.raises(DataError, match="set 1 under permutation 2 lacks most, 100% of its queries"):
            sensitivity_summary(answers((3, 4, 20)), state=state)

    @pytest.mark.parametrize("shape", [(1, 5, 30), (5, 1, 30), (1, 1, 30), (5, 5, 1), (2, 2, 2)])
    def test_small_designs_leave_out_what_they_cannot_say(self, shape: tuple[int, int, int], tmp_path: Path) -> None:
        summary = sensitivity_summary(answers(shape))
        assert (summary.components is None) == (min(shape) < 2)
        assert (summary.intervals is None) == (min(shape[:2]) < 2)
        assert math.isnan(summary.printed.order) == (shape[1] < 2)
        assert "order sensitivity" in rendered(summary)
        write_report(tmp_path, summary)
        assert json.loads((tmp_path / "report.json").read_text())["sensitivity"]["num_queries"] == shape[2]

    def test_says_what_a_small_design_cannot_tell(self) -> None:
        generator = np.random.default_rng(5)
        summary = sensitivity_summary(answers((10, 10, 200)))
        assert summary.needed is not None
        assert re.search(rf"cannot tell r from 1 .* {summary.needed.num_sets:,} sets", summary.warnings[-1])
        sets_only = (generator.random((10, 1, 300)) < np.linspace(0.1, 0.9, 10)[:, None, None]) & np.ones(
            (1, 10, 1), bool
        )
        noise = generator.random(sets_only.shape) < 0.02
        assert not any("cannot tell" in line for line in sensitivity_summary(sets_only ^ noise).warnings)

    def test_near_ties_and_scores_beyond_accuracy(self) -> None:
        logprob = np.full((3, 3, 4, 2), [-1.0, -2.0], np.float32)
        logprob[..., 0, 1] = -1.0
        summary = sensitivity_summary(answers((3, 3, 4)), logprob, [0, 0, 1, 1])
        assert summary.near_ties == 0.25
        expected = stats.calibration(logprob, [0, 0, 1, 1])
        assert summary.calibration is not None
        for got, want in zip(summary.calibration, expected, strict=True):
            np.testing.assert_array_equal(got, want)

    def test_shapes_that_do_not_fit_are_named(self) -> None:
        with pytest.raises(RequestError, match=r"\[S, P, Q\], got \[2, 3\]"):
            sensitivity_summary(np.ones((2, 3), int))
        with pytest.raises(RequestError, match=r"shape \[2, 3, 4, 'L'\] to fit correct, got \[2, 3, 5, 2\]"):
            sensitivity_summary(np.ones((2, 3, 4), int), np.zeros((2, 3, 5, 2)))


class TestJson:
    def test_round_trips_with_null_for_what_is_not_finite(self) -> None:
        content = report_content(sensitivity_summary(np.ones((3, 3, 5), int)))
        read = json.loads(json.dumps(content, allow_nan=False))
        assert read == content
        assert read["sensitivity"]["spreads"]["mean_std"] == {"order": 0, "selection": 0, "ratio": None}

    def test_holds_every_part(self) -> None:
        summary = full_summary()
        content = summary.to_dict()
        assert content["accuracy"] == summary.accuracy.tolist()
        assert content["set_means"] == summary.set_means.tolist()
        assert content["tokens"] == {"naive": 7_000_000, "unique": 1_000_000, "forwarded": 1_000_000, "saving": 7.0}
        assert summary.components is not None
        assert content["components"]["sigma2"] == summary.components.sigma2._asdict()
        assert content["components"]["order_effect"] == summary.components.order_effect
        assert len(content["components"]["in_words"]) == 7
        assert np.shape(content["calibration"]["nll"]) == (5, 4)

    def test_a_curve_stands_beside_its_shots(self) -> None:
        curve = stats.curve(answers((3, 3, 2, 20)))
        content = report_content(sensitivity_summary(answers((3, 3, 20))), curve, [0, 4])
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

    def test_curve(self) -> None:
        curve = stats.curve(answers((3, 3, 2, 20)))
        text = printed(curve_table(curve, [0, 4]))
        assert all(f"{value:.4f}" in text for value in (*curve.mean, *curve.std_permutations, *curve.std_sets))
        with pytest.raises(RequestError, match="shots has 1 entries, the curve 2"):
            curve_table(curve, [4])


def printed_text(svg: Path) -> list[str]:
    """Matplotlib draws letters as paths and keeps the text as a comment."""
    return [text.strip() for text in re.findall(r"<!-- (.*?) -->", svg.read_text(encoding="utf-8"))]


class TestFigures:
    def test_the_heat_map_prints_cells_means_and_sensitivities(self, tmp_path: Path) -> None:
        matrix = np.random.default_rng(2).random((3, 4))
        png, svg = heat_map(matrix, tmp_path / "map", title="a title", ratio=stats.Interval(1.0, 0.5, 2.25, 0.95))
        assert png.read_bytes().startswith(PNG_SIGNATURE)
        text = printed_text(svg)
        for value in (*matrix.ravel(), *matrix.mean(axis=0), *matrix.mean(axis=1)):
            assert f"{value:.3f}".removeprefix("0") in text
        assert "a title" in text
        line = next(entry for entry in text if entry.startswith("order sensitivity"))
        assert f"{stats.order_sensitivity(matrix):.4f}" in line
        assert line.endswith(f"r {stats.sensitivity_ratio(matrix):.2f}  [0.50, 2.25]")

    def test_a_large_heat_map_prints_no_cells(self, tmp_path: Path) -> None:
        matrix = np.random.default_rng(3).random((10, 21))
        text = printed_text(heat_map(matrix, tmp_path / "map")[1])
        assert f"{matrix[0, 0]:.3f}".removeprefix("0") not in text
        assert {"20", "permutation", "set"} <= set(text)

    @pytest.mark.parametrize("shape", [(1, 1), (1, 7), (6, 1), (40, 300)])
    def test_every_shape_can_be_drawn(self, shape: tuple[int, int], tmp_path: Path) -> None:
        assert all(path.stat().st_size > 1000 for path in heat_map(np.full(shape, 0.25), tmp_path / "map"))

    def test_files_are_the_same_twice_whatever_the_settings(self, tmp_path: Path) -> None:
        import matplotlib

        matrix, curve = np.random.default_rng(4).random((4, 4)), stats.curve(answers((3, 3, 3, 20)))
        first = [*heat_map(matrix, tmp_path / "a"), *curve_plot(curve, [0, 1, 4], tmp_path / "b")]
        with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "none", "savefig.transparent": True}):
            second = [*heat_map(matrix, tmp_path / "c"), *curve_plot(curve, [0, 1, 4], tmp_path / "d")]
            assert matplotlib.rcParams["font.size"] == 30
        for one, other in zip(first, second, strict=True):
            assert one.read_bytes() == other.read_bytes()
        assert b"<dc:date>" not in first[1].read_bytes()

    def test_the_curve_names_both_bands(self, tmp_path: Path) -> None:
        curve = stats.curve(answers((3, 3, 3, 20)))
        png, svg = curve_plot(curve, [0, 1, 4], tmp_path / "curve", chance=0.25)
        assert png.read_bytes().startswith(PNG_SIGNATURE)
        assert {"mean", "spread over permutations", "spread over sets", "chance"} <= set(printed_text(svg))

    def test_a_band_that_is_undefined_is_left_out(self, tmp_path: Path) -> None:
        _, svg = curve_plot(stats.curve(answers((1, 3, 3, 20))), [0, 1, 4], tmp_path / "curve")
        text = printed_text(svg)
        assert "spread over permutations" in text
        assert "spread over sets" not in text

    def test_shots_must_fit_the_curve(self, tmp_path: Path) -> None:
        with pytest.raises(RequestError, match="shots has 2 entries, the curve 3"):
            curve_plot(stats.curve(answers((2, 2, 3, 5))), [0, 1], tmp_path / "curve")


def test_the_report_is_written_whole_and_replaced(tmp_path: Path) -> None:
    curve = stats.curve(answers((3, 3, 2, 20)))
    first = write_report(tmp_path, sensitivity_summary(answers((3, 3, 20))), curve=curve, shots=[0, 4], title="one")
    assert [path.name for path in first] == ["heatmap.png", "heatmap.svg", "curve.png", "curve.svg", "report.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in first)
    assert "one, k = 4" in printed_text(tmp_path / "heatmap.svg")
    assert "one" in printed_text(tmp_path / "curve.svg")
    write_report(tmp_path, full_summary())
    read = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert read["sensitivity"]["accuracy"] == full_summary().accuracy.tolist()
    assert "curve" not in read
