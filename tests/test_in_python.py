"""A run in Python: what it shows of itself, other libraries' tables and arrays of it, and its figures as functions."""

import ast
import inspect
import io
import math
import pydoc
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib import rc_context, rcParams
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.image import imread

import iclperm
from iclperm import Study, plot
from iclperm.base.help import fields_in_help
from iclperm.errors import ConfigError, DataError, RequestError
from iclperm.report.figures import drawn
from iclperm.studies.comparing_findings import Comparing
from iclperm.study import kinds
from iclperm.study.states import INVALID

HOSTILE = "<script>alert(1)</script>\x1b[2J\n&amp;"


@pytest.fixture(scope="module")
def run():
    return iclperm.run(Study(sets=3, permutations=4, shots=[0, 1, 2, 4], queries=12, dev_queries=8))


@pytest.fixture(scope="module")
def gappy(run):
    """The same without the answers of the last context to the first query, and of the first to the second."""
    items = run.splits["test"]
    state, prediction = items.context_state.copy(), items.context_prediction.copy()
    for cell in ((-1, 0), (0, 1)):
        state[cell], prediction[cell] = INVALID, -1
    return replace(
        run, splits={**run.splits, "test": replace(items, context_state=state, context_prediction=prediction)}
    )


@pytest.mark.parametrize("split", ["test", "dev"])
def test_xarray_has_the_canonical_tables_answers_by_name(gappy, split):
    pytest.importorskip("xarray")
    found = gappy.to_xarray(split, scores=True)
    assert found["correct"].dims == ("set", "permutation", "shots", "query")
    assert found["shots"].values.tolist() == [0, 1, 2, 4]
    rows = [row for row in gappy.to_arrow().to_pylist() if row["split"] == split]
    assert found["correct"].size == len(rows)
    missing = 0
    for row in rows:
        cell = found.sel({axis: row[axis] for axis in ("set", "permutation", "shots", "query")})
        assert (cell["gold"].item(), cell["weight"].item()) == (row["gold"], row["weight"])
        assert cell["example"].item() == row["example"]
        assert cell["state"].attrs["flag_meanings"].split()[cell["state"].item()] == row["state"]
        if row["correct"] is None:
            missing += 1
            assert math.isnan(cell["correct"].item())
            assert math.isnan(cell["prediction"].item())
        else:
            assert bool(cell["correct"].item()) == row["correct"]
            assert found["label"].values[int(cell["prediction"].item())] == row["prediction"]
        scores = [row[f"logprob_{label}"] for label in gappy.labels]
        np.testing.assert_array_equal(cell["log_likelihood"].values, np.array(scores, dtype=np.float32))
    assert (missing > 0) == (split == "test")
    with pytest.raises(ConfigError, match="no split 'train' in this run; it has test, dev"):
        gappy.to_xarray("train")


def test_polars_sees_the_canonical_table(gappy):
    polars = pytest.importorskip("polars")
    frame = gappy.to_polars()
    assert isinstance(frame, polars.DataFrame)
    assert frame.to_dicts() == gappy.to_arrow().to_pylist()
    assert frame["correct"].null_count() == gappy.to_arrow()["correct"].null_count > 0


@pytest.mark.parametrize("library", ["pandas", "polars", "xarray"])
def test_a_library_that_is_not_there_is_named_with_its_extra(run, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf"{library} is not installed; run pip install 'iclperm\[{library}\]'"):
        getattr(run, f"to_{library}")()


def test_a_run_is_three_lines(run, gappy):
    first, second, third = repr(run).splitlines()
    assert first == "Run of mini_news on demo: 3 sets x 4 permutations, k = 0, 1, 2, 4, 12 queries, 8 dev queries"
    assert second == f"accuracy {run.summary().mean:.3f} at k = 4 (chance 0.250)"
    assert third.startswith("in memory only; ")
    there = gappy.state[:, :, -1] == 0
    assert f"accuracy {gappy.correct[:, :, -1][there].mean():.3f} at k = 4" in repr(gappy)
    assert repr(gappy).splitlines()[1].endswith("of all answers are missing")
    assert len(repr(replace(run, task=HOSTILE)).splitlines()) == 3
    assert "\x1b" not in repr(replace(run, task=HOSTILE))


class Texts(HTMLParser):
    """Tags and texts of HTML."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.texts.append(data)


def test_a_notebook_shows_the_summary_and_data_stays_text(run):
    hostile = replace(run, task=HOSTILE, labels=tuple(f"{HOSTILE}{label}" for label in run.labels))
    shown = Texts(hostile._repr_html_())
    assert set(shown.tags) <= {"div", "p", "strong", "br", "table", "caption", "thead", "tbody", "tr", "th", "td",
                               "ul", "li", "small"}  # fmt: skip
    words = "".join(shown.texts)
    assert "<script>alert(1)</script>" in words
    assert all(line in words for line in run.findings().conclusion())
    assert all(table.title in words for table in run.findings().tables(False))


@pytest.fixture(scope="module")
def runs():
    return iclperm.run(Study(kind="selection", sets=8, permutations=2, shots=3, select=2, queries=12, dev_queries=12))


def test_several_runs_are_three_lines_and_their_summary(runs):
    lines = repr(runs).splitlines()
    assert len(lines) == 3
    assert lines[0] == "StudyRuns of the kind selection: mini_news, demo"
    assert all(name in lines[1] for name in runs.runs)
    words = "".join(Texts(runs._repr_html_()).texts)
    assert all(line in words for line in runs.findings().conclusion())


def pixels(figure):
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba()).copy()


OF_ONE_RUN = ("heat_map", "curve", "r_over_k", "confusion", "curve_trajectories", "curve_plateaus", "search",
              "search_orderings", "convergence", "convergence_curves", "convergence_scores", "features")  # fmt: skip


@pytest.mark.parametrize("name", OF_ONE_RUN)
def test_a_figure_is_a_function_of_a_run(run, name):
    figure = getattr(plot, name)(run, width=6.0, height=5.0, title="My $title$ <b>")
    assert isinstance(figure, Figure)
    assert figure.get_size_inches().tolist() == [6.0, 5.0]
    assert [text.get_text() for text in figure.texts].count("My $title$ <b>") == 1


def test_every_function_is_documented_and_every_figure_has_one(run):
    functions = {name: getattr(plot, name) for name in plot.__all__ if inspect.isfunction(getattr(plot, name))}
    assert all(function.__doc__ for function in functions.values())
    drawn_of = [kind for kind in kinds.OF_ONE_RUN if kind not in ("generation", "calibration", "race")]
    with pytest.raises(DataError, match="a report of the kind 'race' is of a race"):
        run.findings("race")
    stems = {stem for kind in drawn_of for stem in plot.all_figures(run, kind)}
    assert {stem.replace("heatmap", "heat_map") for stem in stems} == {*OF_ONE_RUN} <= functions.keys()


@pytest.mark.parametrize("name", ["selection_pareto", "selection_curves"])
def test_a_figure_is_a_function_of_several_runs(runs, name):
    assert getattr(plot, name)(runs, width=7.5).get_size_inches()[0] == 7.5
    assert name in plot.all_figures(runs)


def test_it_is_the_reports_figure_whatever_the_callers_settings_are(run):
    expected = drawn(run.findings().plots()["heatmap"], "png")
    with rc_context({"font.size": 20, "image.cmap": "gray", "axes.prop_cycle": rcParams["axes.prop_cycle"][::-1]}):
        before = dict(rcParams)
        figure = plot.heat_map(run)
        figure.set_dpi(200)
        shown = pixels(figure)
        assert dict(rcParams) == before
    read = imread(io.BytesIO(expected))
    np.testing.assert_array_equal((read * 255).round().astype(np.uint8), shown)
    assert plot.heat_map(run)._repr_png_().startswith(b"\x89PNG")


def test_colours_are_those_that_are_asked_for(run):
    images = [image for axes in plot.heat_map(run, colours="cividis").axes for image in axes.images]
    assert {image.cmap.name for image in images} == {"cividis"}
    figure = plot.r_over_k(run, colours=["red", "lime"])
    shown = pixels(figure)
    for name in ("red", "lime"):
        assert (shown == (np.array(to_rgba(name)) * 255).astype(np.uint8)).all(-1).any(), name
    assert not (pixels(plot.r_over_k(run)) == (255, 0, 0, 255)).all(-1).any()
    with pytest.raises(RequestError, match="no colour map 'cividus'"):
        plot.heat_map(run, colours="cividus")
    with pytest.raises(RequestError, match="colours are a colour map or colours"):
        plot.heat_map(run, colours=["no colour"])


@pytest.mark.parametrize("name", ["heat_map", "curve"])
def test_it_is_drawn_into_given_axes(run, name):
    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert getattr(plot, name)(run, ax=right, title="a $ of <data>", colours=None) is figure
    assert right.get_title() == "a $ of <data>"
    assert right.has_data()
    assert not left.has_data()
    pixels(figure)
    with pytest.raises(RequestError, match="width are those of ax"):
        getattr(plot, name)(run, ax=right, width=3.0)


def test_two_heat_maps_have_the_scale_that_is_asked_for(run):
    ax = Figure().subplots()
    plot.heat_map(run, ax=ax)
    own = ax.images[0].get_clim()
    for figure in (plot.heat_map(run, ax=ax, scale=(0, 1)), plot.heat_map(run, scale=(0, 1))):
        assert {image.get_clim() for axes in figure.axes for image in axes.images} - {own} == {(0, 1)}
    alone = plot.heat_map(run)
    cells = next(axes for axes in alone.axes if axes.get_ylabel() == "set")
    assert list(ax.get_yticks()) == list(cells.get_yticks()) == [0, 1, 2]
    assert list(ax.get_xticks()) == [0, 1, 2, 3]
    title = alone.texts[0].get_text()
    assert plot.heat_map(run, scale=(0, 1)).texts[0].get_text() == title
    for wrong in ((1, 0), (0,), (0, math.nan)):
        with pytest.raises(RequestError, match=r"scale is .*; give the lowest and the highest accuracy"):
            plot.heat_map(run, scale=wrong)


def test_two_curves_in_one_axes_are_told_apart(run):
    ax = Figure().subplots()
    plot.curve(run, ax=ax, colours=["red", "lime", "blue"], label="one")
    plot.curve(run, ax=ax, colours=["black"], label="two")
    handles, words = ax.get_legend_handles_labels()
    assert words == ["one", "chance", "two"]
    assert [to_rgba(handle.get_color())[:3] for handle in handles[::2]] == [(1, 0, 0), (0, 0, 0)]
    edges = [tuple(band.get_edgecolor()[0][:3]) for band in ax.collections]
    assert edges == [(0, 1, 0), (0, 0, 1), (0, 0, 0), (0, 0, 0)]
    assert all(tick == int(tick) for tick in ax.get_xticks())
    shown = pixels(plot.curve(run, colours=["red"]))
    assert (shown == (255, 0, 0, 255)).all(-1).any()
    assert plot.curve(run, ax=Figure().subplots()).axes[0].get_legend_handles_labels()[1][0] == "mean"
    with pytest.raises(RequestError, match="'black' is one colour; give a list, colours="):
        plot.curve(run, colours="black")
    with pytest.raises(RequestError, match="label is for a curve in axes of yours"):
        plot.curve(run, label="mine")


def test_help_on_figures_is_ours_and_says_what_a_style_has():
    assert "_StyledFigure" not in plot.__all__
    text = pydoc.render_doc(plot, renderer=pydoc.plaintext)
    assert text.count("\n") < 500
    assert all(f"``{key}``" in plot.Style.__doc__ for key in plot.Style.__annotations__)


def test_what_cannot_be_drawn_says_why(run):
    one = iclperm.run(Study(sets=3, permutations=3, shots=3, queries=12, seed=1))
    with pytest.raises(ConfigError, match="a curve needs several"):
        plot.curve(one)
    with pytest.raises(ConfigError, match="one number of demonstrations"):
        plot.curve(one, ax=Figure().subplots())
    with pytest.raises(RequestError, match="inches above 0"):
        plot.heat_map(run, width=0)
    with pytest.raises(RequestError, match="figures take width, height, title, colours; got colors"):
        plot.heat_map(run, colors="x")


def test_a_comparison_has_figures_too(tmp_path):
    right = np.random.default_rng(0).random((2, 5, 5, 60)) < np.linspace(0.3, 0.9, 5)[:, None, None]
    for name, answers in zip("ab", right, strict=True):
        np.save(tmp_path / f"{name}.npy", answers.astype(np.uint8))
    comparison = iclperm.compare([tmp_path / "a.npy", tmp_path / "b.npy"])
    assert isinstance(plot.forest(comparison, width=7.0), Figure)
    assert set(plot.all_figures(comparison)) >= {"forest"}


def test_every_field_of_a_finding_says_what_it_is():
    """A docstring under each field of the findings of every kind, and of what they are made of."""
    folder = Path(iclperm.__file__).parent / "studies"
    found = {}
    for path in folder.glob("*.py"):
        for each in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(each, ast.ClassDef) or path.stem in APART:
                continue
            if {"conclusion", "to_dict"} <= {node.name for node in each.body if isinstance(node, ast.FunctionDef)}:
                documented = zip(each.body, [*each.body[1:], None], strict=True)
                found[each.name] = [
                    field.target.id
                    for field, after in documented
                    if isinstance(field, ast.AnnAssign)
                    and not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
                ]
    assert len(found) >= 9
    assert {name: fields for name, fields in found.items() if fields} == {}


def test_help_tells_the_fields_of_results(run):
    for cls, field in (
        (iclperm.stats.Accuracy, "values (FloatArray): [...] share of correct answers; NaN where a cell has none."),
        (iclperm.stats.Contrast, "p_holm (float): Adjusted for all tests that were made together"),
        (iclperm.stats.Comparison, "covers (tuple[str, ...]): Axes with two levels or more in both"),
        (iclperm.stats.VarianceComponents, "sigma2 (Effects): Unbiased estimates of the components, in squared"),
        (iclperm.stats.LatentComponents, "cells (FloatArray): [S, P] logit of every cell"),
        (type(run.summary()), "near_ties (float | None): Share of ok answers"),
        (type(run.findings()), "bearing (Bearing): What the answers can bear."),
        (Comparing, "pooled (PooledEstimate | None): log r of all studies that have one"),
        (type(iclperm.plan(run.study)), "num_parts (int)"),
    ):
        text = inspect.getdoc(cls)
        assert f"\n  {field}" in text
        assert cls.__doc__ == text
    assert iclperm.stats.Accuracy.__doc__.startswith("Accuracy of every cell, with what was left out.\n\nFields:\n")
    made = fields_in_help(type("Made", (), {"__doc__": "Of no file."}))
    assert made.__doc__ == "Of no file."


def test_a_summary_is_some_lines(run):
    shown = repr(run.summary())
    assert len(shown) < 1_000
    assert shown.startswith("SensitivitySummary: 3 sets x 4 permutations, 12 queries; mean accuracy ")
    assert f"r {run.summary().printed.ratio:.2f}; fields: accuracy, num_queries, " in shown


APART = {"comparing_findings"}
"""Findings whose fields are named in the docstring of their class."""
