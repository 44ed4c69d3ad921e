"""Compared studies taken away: tables as Markdown, LaTeX and CSV, figures at a width, and one page of all."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layout_of_figures import figure_of, overlaps
from markdown_it import MarkdownIt
from test_page import Browser, browser

import iclperm
from iclperm import Study, stats
from iclperm.cli.main import main
from iclperm.errors import ConfigError, RequestError
from iclperm.report import charts, figures, panels
from iclperm.report.figure_files import FigureFile, figure_files, inches
from iclperm.report.figures import at_width, drawn, heat_map
from iclperm.report.markup import Column, Sheet, latex_text, markdown_text
from iclperm.report.panels import Curved, heat_maps_plot
from iclperm.report.table_files import TableFile, sheets_of
from iclperm.stats import Interval
from iclperm.studies.compared import Compared
from iclperm.studies.comparing import comparing
from iclperm.studies.comparing_findings import Comparing
from iclperm.studies.comparing_page import NAME, page_of, write_tables
from iclperm.studies.told import told

HOSTILE = r"\input{/etc/passwd} & 50% $x_1^2$ #~`<img src=x onerror=alert(1)>` [a](http://b.c) *--* | \\ www.evil.com"
DASH = "\u2013"
__all__ = ["browser"]  # a fixture


def study(name: str, seed: int, task: str, model: str, shots: tuple[int, ...] = (0, 2, 4), **other: Any) -> Compared:
    """Answers [4, 5, K, 60] with effects of sets and permutations that grow with k."""
    generator = np.random.default_rng(seed)
    effects = 0.1 * generator.standard_normal((4, 1, 1)) + 0.1 * generator.standard_normal((1, 5, 1))
    chance = 0.55 + np.asarray(shots) / max(shots) * effects
    answers = (generator.random((4, 5, len(shots), 60)) < chance[..., None]).astype(np.uint8)
    return Compared(name, answers, None, None, shots, task=task, model=model, chance=0.25, **other)


@pytest.fixture(scope="module")
def found() -> Comparing:
    """Two models on two tasks without one of the four, and one of them twice."""
    studies = [
        study("a", 1, "mini_news", "small"),
        study("b", 2, "mini_news", "large"),
        study("c", 3, "ag_news", "large"),
        study("d", 4, "ag_news", "large", (0, 4)),
    ]
    return comparing(studies)


class TestText:
    def test_latex_sets_hostile_text_as_it_is(self) -> None:
        text = latex_text(HOSTILE)
        assert read_latex(text) == HOSTILE
        assert not re.search(r"\\(input|\\)", text)
        bare = re.sub(r"\\[a-z]+\d*\{\}|\\[{}$&#%_]|\{[][*]\}", "", text)
        assert not set(bare) & set('\\&%$#_^~<>|`[]*"')
        assert bare.count("{") == bare.count("}") == 1  # between the two hyphens
        assert latex_text("a\nb\u202ec") == r"a b\textbackslash{}u202ec"

    def test_markdown_shows_hostile_text_as_it_is(self) -> None:
        shown = (
            MarkdownIt("commonmark", {"html": True}).enable("table").render(f"| {markdown_text(HOSTILE)} |\n|---|\n")
        )
        tags = set(re.findall(r"<(/?\w+)", shown))
        assert tags == {"table", "/table", "thead", "/thead", "tr", "/tr", "th", "/th"}
        assert html_text(shown).strip() == HOSTILE

    def test_a_spreadsheet_finds_no_formula(self) -> None:
        sheet = Sheet("s", "t", "c", (Column("=1+1", form="words"), Column("x")), (("@SUM(A1)", -1.5), ("-2", 2.0)))
        rows = list(csv.reader(io.StringIO(sheet.written("csv"))))
        assert rows == [["'=1+1", "x"], ["'@SUM(A1)", "-1.5"], ["'-2", "2.0"]]


class TestTables:
    def test_models_by_tasks_hold_what_the_json_holds(self, found: Comparing) -> None:
        sheet, told = found.sheets()["sensitivity"], found.to_dict()["studies"]
        names = [(column.group, column.name) for column in sheet.columns]
        assert names[1:] == [(g, n) for g in ("mini_news", "ag_news", "mean") for n in ("order", "selection", "r")]
        a, b, c, d = ([each["order"], each["selection"], each["ratio"]["estimate"]] for each in told)
        mean = [(b[0] + c[0]) / 2, (b[1] + c[1]) / 2]
        nothing = [math.nan] * 3
        expected = {
            "small": [*a, *nothing, *nothing],
            "large": [*b, *c, *mean, mean[1] / mean[0]],
            "large (2)": [*nothing, *d, *nothing],
        }
        assert [row[0] for row in sheet.rows] == list(expected)
        for row in sheet.rows:
            np.testing.assert_allclose(np.array(row[1:], float), expected[str(row[0])], rtol=1e-12)

    @pytest.mark.parametrize("name", ["sensitivity", "studies", "tests"])
    def test_every_form_reads_back(self, found: Comparing, name: str) -> None:
        """CSV to all digits, Markdown and LaTeX to those that the terminal shows; an en dash for nothing."""
        sheet = found.sheets()[name]
        terminal = [list(row) for row in sheet.table().rows]
        dashed = [[DASH if cell == "-" else cell for cell in row] for row in terminal]
        assert from_markdown(sheet.written("md")) == dashed
        assert from_latex(sheet.written("tex"), sheet.num_names) == dashed
        rows = list(csv.reader(io.StringIO(sheet.written("csv"))))
        for row, written in zip(sheet.rows, rows[1:], strict=True):
            assert [cell for value in row for cell in plain_cells(value)] == [
                cell if is_words(cell) else float(cell or "nan") for cell in without_padding(written, sheet)
            ]

    def test_studies_and_tests_are_those_of_the_json(self, found: Comparing) -> None:
        told, sheets = found.to_dict(), found.sheets()
        for row, one in zip(sheets["studies"].rows, told["studies"], strict=True):
            assert row[:3] == (one["name"], one["task"], one["model"])
            assert isinstance(row[5], Interval)
            assert [row[5].estimate, row[6], row[7]] == [one["accuracy"], one["order"], one["selection"]]
            for value, key in zip(
                row[8:12], ("order_effect", "selection_effect", "ratio", "ratio_effect"), strict=True
            ):
                assert isinstance(value, Interval)
                expected = [one[key][end] for end in ("estimate", "low", "high")]
                assert [None if not math.isfinite(end) else end for end in value[:3]] == expected
        rows = list(sheets["tests"].rows)
        for pair in told["pairs"]:
            for name in ("ratio", "order", "selection"):
                words = "r" if name == "ratio" else f"{name} effect"
                (row,) = (row for row in rows if row[:3] == (pair["first"], pair["second"], words))
                value = row[3] if name == "ratio" else row[4]
                assert isinstance(value, Interval)
                assert (*value[:3], *row[5:]) == tuple(
                    pair[name][key] for key in ("estimate", "low", "high", "p_value", "p_holm")
                )
            assert len([row for row in rows if row[:2] == (pair["first"], pair["second"])]) == 4 + len(pair["shots"])

    def test_new_numbers_are_those_of_the_statistics(self, found: Comparing) -> None:
        one = study("a", 1, "mini_news", "small")
        last, described = one.values[:, :, -1], found.studies[0]
        assert described.mean == pytest.approx(stats.mean_error(last).interval(), rel=1e-12)
        effects = stats.effect_interval(stats.variance_components(last))
        assert (described.order_effect, described.selection_effect) == (effects.order, effects.selection)
        curve = stats.curve(one.values)
        for name in ("mean", "std_permutations", "std_sets"):
            np.testing.assert_allclose(getattr(described.curve, name), getattr(curve, name), atol=1e-15)

    def test_latex_is_a_table_of_booktabs(self, found: Comparing) -> None:
        text = found.sheets()["sensitivity"].written("tex")
        for word in (r"\toprule", r"\midrule", r"\bottomrule", r"\cmidrule(lr){2-4}"):
            assert text.count(word) == text.count(r"\begin{tabular}") > 0
        assert text.count(r"\label{tab:sensitivity}") == text.count(r"\begin{table}") == 1
        assert r"\multicolumn{3}{c}{mini\_news}" in text
        caption = found.sheets()["studies"].written("tex").split(r"\caption")[1]
        assert r"95 \% intervals" in caption.split("\n")[0]

    @pytest.mark.parametrize("name", ["sensitivity", "studies"])
    def test_latex_fits_a_column_of_a_paper(self, found: Comparing, name: str) -> None:
        """By the widths of Computer Modern at 8 and 7 points, rounded up; an em of `tabcolsep` is 6 points in all."""
        text = found.sheets()[name].written("tex")
        parts = text.split(r"\begin{tabular}")[1:]
        assert len(parts) > 1
        for part in parts:
            body = part.split("\\midrule\n")[1].split("\\bottomrule")[0]
            head = part.split("\\midrule")[0].splitlines()[-1]
            lines = [re.split(r"(?<!\\) & ", line.removesuffix(" \\\\")) for line in (head, *body.splitlines())]
            wide = sum(max(points_of(cell) for cell in cells) + 6 for cells in zip(*lines, strict=True))
            assert wide < 3.3 * 72.27 + 6
        assert (r"\shortstack" in text) == (name == "studies")

    def test_hostile_names_of_task_and_model_stay_text(self) -> None:
        studies = [study(HOSTILE, 1, HOSTILE, HOSTILE), study("b", 2, HOSTILE, "other")]
        sheets = comparing(studies).sheets()
        for sheet in sheets.values():
            rows = [list(row) for row in sheet.table().rows]
            dashed = [[DASH if cell == "-" else cell for cell in row] for row in rows]
            assert from_markdown(sheet.written("md")) == from_latex(sheet.written("tex"), sheet.num_names) == dashed

    def test_answers_from_elsewhere_have_no_table_by_task(self) -> None:
        unknown = replace(study("a", 1, "", ""), task="")
        assert list(comparing([unknown, study("b", 2, "t", "m")]).sheets()) == ["studies", "tests"]

    def test_a_folder_has_all_of_them(self, found: Comparing, tmp_path: Path) -> None:
        names = [path.name for path in write_tables(found, tmp_path)]
        assert names == ["tables.md", *(f"{n}.{f}" for n in found.sheets() for f in ("csv", "tex"))]
        assert (tmp_path / "tables.md").read_text().count("\n| --- |") == 3


class TestNotes:
    def test_other_tasks_and_chosen_sets_are_said(self) -> None:
        told = comparing([study("a", 1, "x", "m"), study("b", 2, "y", "m", is_drawn=False)]).warnings
        words = "the studies are of 2 tasks (x and y): their accuracies differ for that reason too"
        assert any(line.startswith(f"{words}; where they word the same rows, 'shared' says so (docs/") for line in told)
        said = comparing([study("a", 1, "x", "m"), study("b", 2, "y", "m")], shared=["sets", "permutations", "queries"])
        assert words in said.warnings
        assert any(line.startswith("b: its sets were given or chosen, not drawn") for line in told)

    def test_other_k_of_many_are_one_line(self, found: Comparing) -> None:
        shots = [study(name, seed, "t", "m", (k,)) for name, seed, k in (("a", 1, 2), ("b", 2, 4), ("c", 3, 8))]
        (line,) = (line for line in comparing(shots).warnings if "at its own" in line)
        assert line.startswith("a has k = 2, b k = 4 and c k = 8: ")

    def test_tables_say_what_warnings_say_and_average_one_k_alone(self) -> None:
        same = comparing([study("a", 1, "t", "m", (4,)), study("b", 2, "u", "m", (4,))]).sheets()["sensitivity"]
        assert "k = 4, the largest" in same.caption
        assert not any(math.isnan(value) for value in same.rows[0][-3:])
        found = comparing([study("a", 1, "t", "m", (4,)), study("b", 2, "u", "m", (8,))])
        sheet = found.sheets()["sensitivity"]
        assert "k = 4 (a), 8 (b), the largest" in sheet.caption
        assert all(math.isnan(value) for value in sheet.rows[0][-3:])
        (line,) = (line for line in found.warnings if "at its own" in line)
        assert markdown_text(line) in sheet.written("md")
        assert latex_text(line) in sheet.written("tex")

    def test_an_effect_that_was_not_seen_has_no_ratio(self) -> None:
        one = study("a", 1, "t", "m", (4,))
        alike = replace(one, values=np.repeat(one.values[:1], len(one.values), axis=0))
        other = comparing([alike, one]).studies
        assert other[0].selection_effect.estimate == 0
        assert math.isnan(other[0].ratio_free)
        assert math.isnan(other[0].ratio_effect.estimate)

    def test_the_page_begins_with_what_holds_of_all(self, found: Comparing) -> None:
        assert found.headline() == ["In none of 6 pairs can r be told apart (Holm over all tests of all pairs)."]

    def test_pairs_whose_r_cannot_be_compared_are_counted(self) -> None:
        studies = [study("a", 1, "t", "a"), study("b", 2, "t", "b")]
        few = replace(study("few", 3, "t", "c"), values=study("", 3, "t", "c").values[:2])
        (line,) = comparing([*studies, few]).headline()
        assert line.startswith("In none of 1 pairs can r be told apart")
        assert "In 2 others r cannot be compared" in line
        (line,) = comparing([few, replace(few, name="x"), replace(few, name="y")]).headline()
        assert line.startswith("In none of 3 pairs can r be compared")


class TestFigures:
    def test_there_is_one_of_each(self, found: Comparing) -> None:
        assert list(found.plots()) == ["effects", "curves", "bands", "trajectories", "heatmaps", "forest"]
        single = comparing([study(name, 1, "t", name, (4,)) for name in "ab"])
        assert list(single.plots()) == ["effects", "heatmaps", "forest"]

    @pytest.mark.parametrize("width", [3.3, 7.4])
    def test_no_words_run_into_each_other_or_out(self, width: float) -> None:
        names = ("demo-mini", "demo-mini-1", "a/long-folder, of-a-run-with-words", "gemma-mini", "gemma-ag")
        tasks = ("mini_news", "mini_news", "nyt-locations", "ag_news", "ag_news")
        found = comparing([study(*each, "Qwen2.5-0.5B") for each in zip(names, range(5), tasks, strict=True)])
        for name, plot in found.plots().items():
            plot = at_width(plot, width)
            assert plot.size[0] == width
            assert overlaps(plot) == [], name

    def test_what_is_compared_has_one_scale(self, found: Comparing) -> None:
        plots = found.plots()
        for name in ("bands", "trajectories"):
            axes = figure_of(plots[name]).axes
            assert len({each.get_ylim() for each in axes}) == len({each.get_xlim() for each in axes}) == 1
            titles = [" ".join(each.get_title().split()) for each in axes]
            assert titles[:2] == ["mini_news, small", "mini_news, large"]
            assert all("0.25" in {f"{line.get_ydata()[0]:.2f}" for line in each.lines} for each in axes)  # chance
        maps = [each for each in figure_of(plots["heatmaps"]).axes if each.images]
        assert len({each.images[0].get_clim() for each in maps}) == 1
        _, order, selection, _ = figure_of(plots["effects"]).axes
        assert order.get_xlim() == selection.get_xlim()

    def test_a_single_number_has_no_bar_of_colours(self, found: Comparing) -> None:
        flat, varied = np.full((3, 4), 0.5), np.random.default_rng(1).random((3, 4))
        assert len(figure_of(heat_maps_plot([("a", flat), ("b", flat)], title="t")).axes) == 2
        assert len(figure_of(heat_maps_plot([("a", flat), ("b", varied)], title="t")).axes) == 3
        bars = [axes for axes in figure_of(heat_map(flat)).axes if axes.get_ylabel() == "accuracy"]
        assert not bars
        assert [axes for axes in figure_of(heat_map(varied)).axes if axes.get_ylabel() == "accuracy"]
        assert "every ordering has .500" in drawn(heat_map(flat), "svg", is_text=True).decode()

    def test_formulas_and_markup_in_names_stay_words(self) -> None:
        studies = [study(f"{HOSTILE[:30]}{number}$", number, r"$\frac$ task", f"<b>{number}") for number in (1, 2)]
        for plot in comparing(studies).plots().values():
            raw = drawn(plot, "svg", is_text=True).decode()
            assert "<b>" not in raw

    def test_seven_colours_and_more_studies_differ(self) -> None:
        curve = stats.curve(study("", 1, "t", "m").values)
        curved = [Curved(str(n), str(n), (0, 2, 4), curve, np.zeros((1, 1, 3)), None) for n in range(9)]
        axes = figure_of(panels.curves_plot(curved, title="", line="")).axes[0]
        looks = [(each[0].get_color(), each[0].get_linestyle()) for each in axes.containers]
        assert len(set(looks)) == 9

    def test_the_answer_of_a_page_is_what_was_asked(self) -> None:
        """Not what the two have in common, which belongs behind it."""
        found = comparing([study("a", 1, "t", "m"), study("b", 2, "u", "m")], shared=["permutations"])
        first, *_, last = found.conclusion()
        assert first.startswith("r of a is ")
        assert last == "a and b have the same 5 permutations: what these do to both cancels in the differences."

    def test_lines_and_points_of_a_page_have_colours_that_a_browser_knows(self) -> None:
        """ "C0" is Matplotlib's alone: a line of that colour is not seen."""
        curve = stats.curve(study("", 1, "t", "m").values)
        curved = [Curved(str(n), str(n), (0, 2, 4), curve, np.zeros((1, 1, 3)), None) for n in range(9)]
        specifications = panels.curves_plot(curved, title="", line="").charts
        assert specifications is not None
        colours = {"x": figures.BLUE, "y": figures.ORANGE, "z": figures.GREEN}
        row = {"x": 1, "y": 2, "name": "x"}
        made = [*specifications(), charts.point_chart([row], x="x", y="y", colours=colours, baseline="x")]
        for found in made:
            (used,) = set(re.findall(r'"range": (\[[^]]+\])', json.dumps(found)))
            assert all(re.fullmatch("#[0-9A-Fa-f]{6}", colour) for colour in json.loads(used)), used


class TestFigureFiles:
    def test_widths(self) -> None:
        assert inches("3.3in") == 3.3
        assert inches(" 8.382 cm") == pytest.approx(3.3)
        assert inches("84mm") == pytest.approx(8.4 / 2.54)
        assert inches("238.49pt") == pytest.approx(3.3, abs=1e-4)
        for text in ("3.3", "in", "-1in", "3,3in", "1e9in", "3.3 feet"):
            with pytest.raises(ConfigError, match=r"a width is a number and a unit, such as 3\.3in"):
                inches(text)

    def test_forms_and_sizes(self, found: Comparing, tmp_path: Path) -> None:
        plots = found.plots()
        for form in ("pdf", "svg", "png"):
            path = FigureFile.of(f"curves={tmp_path / f'of/x.{form}'}", "3.3in").written(plots)
            raw = path.read_bytes()
            if form == "pdf":
                assert raw.startswith(b"%PDF")
                (box,) = re.findall(rb"/MediaBox \[ 0 0 ([\d.]+) ", raw)
                assert float(box) == pytest.approx(3.3 * 72)
            elif form == "svg":
                assert b'width="237.6pt"' in raw
                assert b">number of demonstrations k</text>" in raw  # text as text
            else:
                assert int.from_bytes(raw[16:20], "big") == 660
        first = FigureFile.of(str(tmp_path / "first.svg")).written(plots)
        assert b">selection effect</text>" in first.read_bytes()

    def test_a_file_called_like_a_figure_is_that_figure(self, found: Comparing, tmp_path: Path) -> None:
        """`report` names its own files so: who asks for curves.svg wants no other."""
        plots = found.plots()
        assert list(plots).index("curves") > 0
        called = FigureFile.of(str(tmp_path / "curves.svg")).written(plots)
        assert b">number of demonstrations k</text>" in called.read_bytes()
        other = FigureFile.of(f"effects={tmp_path / 'bands.svg'}").written(plots)
        assert b">selection effect</text>" in other.read_bytes()

    def test_what_cannot_be_drawn_is_refused_in_a_line(self, found: Comparing, tmp_path: Path) -> None:
        plots = found.plots()
        with pytest.raises(ConfigError, match=r"x.gif is no figure; give a file that ends in .pdf, .svg, .png"):
            FigureFile.of("x.gif")
        with pytest.raises(ConfigError, match=r"no figure 'heat'; there are effects, curves, bands"):
            FigureFile.of(f"heat={tmp_path}/x.pdf").written(plots)
        with pytest.raises(ConfigError, match=r"effects: this figure can be 2.8in to 40in wide, not 1.00in; give"):
            FigureFile.of(f"{tmp_path}/x.pdf", "1in").written(plots)
        with pytest.raises(ConfigError, match="name one with --figure"):
            figure_files([], "3in")
        with pytest.raises(RequestError, match="wide"):
            at_width(plots["effects"], 100)

    def test_tables_are_refused_in_a_line(self, found: Comparing, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"x.txt is no table; give a file that ends in .md, .tex, .csv"):
            TableFile.of("x.txt")
        with pytest.raises(ConfigError, match="no table 'r'; there are sensitivity, studies, tests"):
            TableFile.of(f"r={tmp_path}/x.md").written(found.sheets())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    small: dict[str, Any] = {"sets": 3, "permutations": 3, "shots": [0, 3], "queries": 8}
    for seed in (0, 1):
        iclperm.run(Study(**small, seed=seed, out=str(folder / f"seed-{seed}")))
    return [folder / "seed-0", folder / "seed-1"]


@pytest.fixture(scope="module")
def page(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return iclperm.write_comparison(iclperm.compare(runs), tmp_path_factory.mktemp("page"))


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as done:
        main(list(map(str, arguments)))
    return int(str(done.value.code))


class Attributes(HTMLParser):
    """The names of all attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names |= {name for name, _ in attrs}


class TestPage:
    def test_it_says_what_the_comparison_says(self, page: Path, runs: list[Path]) -> None:
        text = page.read_text(encoding="utf-8")
        found = iclperm.compare(runs)
        words = html_text(text)
        assert page.name == NAME
        for line in [*found.conclusion(), *found.warnings]:
            assert line in words
        for digest in (iclperm.open_run(run).digest for run in runs):
            assert digest in words
        assert text.index('id="warnings"') < text.index('id="conclusion"') < text.index('id="figures"')
        assert text.count('class="still"') == len(found.plots())
        assert "default-src 'none'" in html_text(re.search(r'Policy" content="([^"]*)"', text)[1])  # type: ignore[index]
        assert "unsafe" not in text.split("<style>")[0]
        for table in ("The studies side by side", "Differences between the studies", "Order and selection sensitivity"):
            assert f"<caption>{table}</caption>" in text
        assert page.stat().st_size < 3_000_000

    def test_hostile_names_are_text(self, tmp_path: Path) -> None:
        bad = "<img src=x onerror=alert(1)></script>{{7*7}}"
        found = comparing([study(bad, 1, bad, bad), study("b", 2, bad, "m")])
        text = iclperm.write_comparison(replace(found, runs=(None, None)), tmp_path / "x.html").read_text()
        assert bad in html_text(text)
        assert "<img src=x" not in text
        seen = Attributes()
        seen.feed(text)
        assert seen.names
        assert "onerror" not in seen.names

    def test_answers_from_elsewhere_are_named(self) -> None:
        found = replace(comparing([study("a", 1, "", ""), study("b", 2, "", "")]), runs=(None, None))
        (table,) = page_of(found).facts
        assert [row[1] for row in table.rows] == ["4 x 5 x 60"] * 2

    def test_a_file_that_is_no_page_is_refused(self, found: Comparing, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"x.pdf is no page; give a file that ends in .html, or a folder"):
            iclperm.write_comparison(found, tmp_path / "x.pdf")

    def test_a_run_keeps_its_own(self, found: Comparing, runs: list[Path]) -> None:
        with pytest.raises(ConfigError, match="folder of another run"):
            iclperm.write_comparison(found, runs[0])
        with pytest.raises(ConfigError, match="keeps"):
            FigureFile.of(str(runs[0] / "items/x.pdf")).written(found.plots())


class TestCommands:
    def test_compare_writes_what_it_is_asked_for(self, runs: list[Path], tmp_path: Path, capsys: Any) -> None:
        files = ["--page", tmp_path / "p.html", "--table", tmp_path / "t.tex", "--table", f"tests={tmp_path}/t.csv"]
        files += ["--figure", f"bands={tmp_path}/f.pdf", "--width", "3.3in", "--out", tmp_path / "out"]
        assert call("compare", *runs, *files, "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["f.pdf", "out", "p.html", "t.csv", "t.tex"]
        names = {path.name for path in (tmp_path / "out").iterdir()}
        assert {"compare.html", "report.json", "tables.md", "sensitivity.tex", "curves.png", "curves.svg"} <= names
        assert json.loads((tmp_path / "out/report.json").read_text()) == {"kind": "compare", **told}
        with (tmp_path / "t.csv").open() as file:
            row = next(row for row in csv.DictReader(file) if row["of"] == "accuracy at k = 3")
        assert float(row["difference"]) == told["pairs"][0]["accuracy"][-1]["estimate"]

    def test_wrong_files_are_refused_before_anything_is_read(self, tmp_path: Path, capsys: Any) -> None:
        for flags, words in (
            (["--figure", "x.bmp"], "x.bmp is no figure"),
            (["--table", "x.xls"], "x.xls is no table"),
            (["--width", "3in"], "--width is that of a figure"),
            (["--figure", "x.pdf", "--width", "wide"], "a width is a number and a unit"),
        ):
            assert call("compare", tmp_path / "not", tmp_path / "there", *flags) == 2
            assert words in capsys.readouterr().err

    def test_a_report_has_figures_to_take_away(self, runs: list[Path], tmp_path: Path, capsys: Any) -> None:
        figure = ["--figure", f"{tmp_path}/main.pdf", "--figure", f"curve={tmp_path}/c.svg", "--width", "3.3in"]
        assert call("report", runs[0], "--out", tmp_path / "out", *figure) == 0
        assert str(tmp_path / "main.pdf") in capsys.readouterr().out.replace("\n", "")
        assert b'width="237.6pt"' in (tmp_path / "c.svg").read_bytes()
        assert (tmp_path / "main.pdf").read_bytes().startswith(b"%PDF")
        assert call("report", runs[0], "--out", tmp_path / "out", "--figure", f"nothing={tmp_path}/x.svg") == 2
        assert "there are heatmap, curve" in capsys.readouterr().err

    def test_a_report_has_tables_to_take_away(self, runs: list[Path], tmp_path: Path, capsys: Any) -> None:
        name = "order-against-selection-at-k-3"
        wanted = [f"{tmp_path}/a.md", f"{name}={tmp_path}/b.tex", f"{name}={tmp_path}/b.csv"]
        options = [part for each in wanted for part in ("--table", each)]
        assert call("report", runs[0], "--out", tmp_path / "out", *options) == 0
        assert str(tmp_path / "b.tex") in capsys.readouterr().out.replace("\n", "")
        said = told(iclperm.open_run(runs[0]))
        sheets = sheets_of(said.tables, said.notes)
        assert (tmp_path / "a.md").read_text() == next(iter(sheets.values())).written("md")
        assert all(markdown_text(note) in (tmp_path / "a.md").read_text() for note in said.notes)
        table = next(table for table in said.tables if table.title.startswith("Order against selection at"))
        written = csv.reader((tmp_path / "b.csv").read_text().splitlines())
        assert [*written][1:] == [[cell.strip() for cell in row] for row in table.rows]
        assert r"\toprule" in (tmp_path / "b.tex").read_text()
        assert call("report", runs[0], "--out", tmp_path / "out", "--table", f"none={tmp_path}/x.md") == 2
        assert f"there is no table 'none'; there are accuracy-at-k-3, {name}" in capsys.readouterr().err

    def test_figures_of_a_report_fit_a_column(self, runs: list[Path]) -> None:
        run, fitted = iclperm.open_run(runs[0]), set()
        for kind in ("sensitivity", "curve", "convergence"):
            for name, plot in iclperm.plot.all_figures(run, kind, width=3.3).items():
                assert plot.get_size_inches()[0] == 3.3
                fitted.add(name)
        assert fitted >= {"heatmap", "curve", "confusion", "curve_trajectories", "curve_plateaus"}
        assert fitted >= {"convergence", "convergence_curves"}
        for about in (run.findings(), run.findings("curve"), run.findings("convergence"), run.classes):
            for name, plot in about.plots().items():
                assert overlaps(at_width(plot, 3.3)) == [], name
                assert plot.caption, name

    def test_where_colours_have_no_room_the_numbers_of_a_confusion_stand_alone(self) -> None:
        labels = ["World", "Sports", "Business", "Technology"]
        plot = figures.confusion_plot(np.eye(4), np.ones(4), labels)
        narrow = figure_of(at_width(plot, 3.3))
        assert overlaps(at_width(plot, 3.3)) == []
        assert (len(narrow.axes), len(figure_of(plot).axes)) == (1, 2)
        assert [text.get_text() for text in narrow.axes[0].texts][::5][:2] == [".500\n1.0", ".000\n0.0"]
        many = figures.confusion_plot(np.eye(15), np.zeros(15), [f"label {n}" for n in range(15)])
        with pytest.raises(RequestError, match="wide, not 3"):  # whose cells are colours alone
            at_width(many, 3.3)

    def test_a_width_in_python_lays_the_figure_out_for_it(self, runs: list[Path]) -> None:
        run = iclperm.open_run(runs[0])
        own, narrow = iclperm.plot.curve(run), iclperm.plot.curve(run, width=3.3)
        assert narrow.get_figheight() == at_width(run.findings().plots()["curve"], 3.3).size[1]
        assert narrow.get_figheight() != own.get_figheight()
        assert iclperm.plot.curve(run, width=2.0, height=4.0).get_size_inches().tolist() == [2.0, 4.0]
        with pytest.raises(RequestError, match=r"this figure can be 2.8in to 40in wide, not 2.00in"):
            iclperm.plot.curve(run, width=2.0)


def test_the_page_works_in_a_browser(browser: Browser, page: Path) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    for width, scheme in ((390, "light"), (1400, "dark")):
        opened = browser.open(page, scheme, width, bypass_csp=True)  # for axe's own script
        assert opened.evaluate("document.documentElement.scrollWidth") == width
        assert opened.locator("img.narrow").first.is_visible() == (width == 390)
        assert axe.Axe().run(opened).response["violations"] == []


def html_text(text: str) -> str:
    from html import unescape

    return unescape(re.sub(r"<[^>]*>", "", re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL)))


def read_latex(text: str) -> str:
    """What a cell of ours says, by taking LaTeX's names back one by one; bounds behind their number."""
    text = re.sub(r"\\shortstack\[r\]\{(.*?)\\\\\{\\scriptsize (.*)\}\}$", r"\1 \2", text)
    for name, sign in {
        "textbackslash": "\0",
        "textasciicircum": "^",
        "textasciitilde": "~",
        "textless": "<",
        "textgreater": ">",
        "textbar": "|",
        "textasciigrave": "`",
        "char34": '"',
    }.items():
        text = text.replace(f"\\{name}{{}}", sign)
    text = re.sub(r"\\([{}$&#%_])", lambda found: f"\1{ord(found[1]):02x}", text)
    text = text.replace("$-$", "-").replace("--", DASH).replace("{", "").replace("}", "")
    return re.sub("\1(..)", lambda found: chr(int(found[1], 16)), text).replace("\0", "\\")


def points_of(cell: str) -> float:
    above, _, below = cell.partition(r"\\{\scriptsize ")
    return max(4.25 * len(read_latex(above.removeprefix(r"\shortstack[r]{"))), 3.98 * len(read_latex(below)))


def from_latex(text: str, num_names: int = 1) -> list[list[str]]:
    """The rows of all parts of a table side by side, without the names that they have in common."""
    parts = [part.split("\\bottomrule")[0] for part in text.split("\\midrule\n")[1:]]
    rows = [[line.removesuffix(" \\\\") for line in part.splitlines()] for part in parts]
    cells = [[[read_latex(cell) for cell in re.split(r"(?<!\\) & ", row)] for row in part] for part in rows]
    return [[*row[0], *(cell for part in row[1:] for cell in part[num_names:])] for row in zip(*cells, strict=True)]


def from_markdown(text: str) -> list[list[str]]:
    shown = MarkdownIt("commonmark").enable("table").render(text)
    rows = re.findall(r"<tr>(.*?)</tr>", shown.split("<tbody>")[1], re.DOTALL)
    return [[html_text(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)] for row in rows]


def plain_cells(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [value]
    numbers = list(value[:3]) if isinstance(value, tuple) else [value]
    return [pytest.approx(number if math.isfinite(number) else math.nan, nan_ok=True) for number in numbers]


def without_padding(written: list[str], sheet: Sheet) -> list[str]:
    assert len(written) == sum(3 if column.is_bounded else 1 for column in sheet.columns)
    return written


def is_words(cell: str) -> bool:
    try:
        float(cell or "nan")
    except ValueError:
        return True
    return False
