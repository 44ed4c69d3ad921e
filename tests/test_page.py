"""The page of a report: what it holds, that data stays text in it, and that it works in a browser, by keyboard too."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import LABELS, byte_level_tokenizer, make_model, make_rows, make_task, write_rows

import iclperm
from iclperm import stats
from iclperm.cli import main as cli
from iclperm.report import bundle
from iclperm.report import page as pages
from iclperm.report.page import Explorer, Page, as_json, page_html
from iclperm.report.parts import Plot, Table
from iclperm.runs.run_texts import kept_prompts
from iclperm.studies import page as study_pages
from iclperm.studies.prompts import shown_prompts
from iclperm.study import kinds

CHROMIUM = shutil.which("chromium")
HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "{{7*7}}{% raw %}",
    "line\u2028separator\u2029here",
    "Donaudampfschifffahrtsgesellschaft" * 12,
    "\u202eright to left\u202c \u05d0\u05d1",
    "<!--<script>'\"&amp;",
)
MODEL = "m<b onmouseover=alert(1)>"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a hostile name and a task with hostile texts."""
    folder = tmp_path_factory.mktemp("page")
    make_model(folder / MODEL, byte_level_tokenizer(), window=4096)
    make_task(folder, data={"train": "train.jsonl", "test": "test.jsonl", "dev": "dev.jsonl"})
    for split, number in (("train", 1), ("test", 2), ("dev", 3)):
        rows = make_rows(number, 60)
        rows = [{**row, "text": f"{row['text']} {HOSTILE[place % len(HOSTILE)]}"} for place, row in enumerate(rows)]
        write_rows(folder / f"{split}.jsonl", rows)
    return folder


@pytest.fixture(scope="module")
def run(place: Path) -> iclperm.Run:
    """Three sets in four orders, four numbers of shots, in a folder."""
    study = iclperm.Study(
        model=str(place / MODEL), task=str(place / "colours.yaml"), sets=3, permutations=4, shots=[0, 1, 3], queries=20
    )
    found = iclperm.run(study, place / "run")
    assert isinstance(found, iclperm.Run)
    return found


@pytest.fixture(scope="module")
def file(run: iclperm.Run) -> Path:
    return iclperm.write_page(run)


class Elements(HTMLParser):
    """What a parser makes of a page: tags with their attributes, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.raw: list[tuple[str, dict[str, str | None], str]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.lasttag in ("script", "style") and self.cdata_elem:
            self.raw.append((self.lasttag, self.tags[-1][1], data))
        else:
            self.words += data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def policy_of(elements: Elements) -> dict[str, list[str]]:
    (policy,) = (meta["content"] for meta in elements.of("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    return {name: sources for name, *sources in (part.split() for part in policy.split(";"))}


def test_the_policy_names_the_hashes_of_what_the_page_runs_and_no_other_source(file: Path) -> None:
    elements = Elements(file.read_text(encoding="utf-8"))
    policy = policy_of(elements)
    assert policy.keys() == {"default-src", "script-src", "style-src", "img-src", "base-uri", "form-action"}
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == ["'none'"]
    assert policy["img-src"] == ["data:"]

    def sources(tag: str) -> list[str]:
        texts = [text for name, found, text in elements.raw if name == tag and found.get("type") is None]
        assert texts
        return [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts]

    assert policy["script-src"] == sources("script")
    assert policy["style-src"] == sources("style")
    assert len(policy["script-src"]) == 2  # Vega's and ours


def test_a_page_is_in_order_and_named_for_those_who_cannot_see_it(file: Path, run: iclperm.Run) -> None:
    text = file.read_text(encoding="utf-8")
    elements = Elements(text)
    sections = re.findall(r'<section id="(\w+)"', text)
    assert sections == [part for part in pages_order(run) if part in sections]
    assert {"answer", "orderings", "tables", "method"} <= set(sections)
    assert run.findings().conclusion()[0] in elements.words
    assert elements.of("html") == [{"lang": "en"}]
    assert len(elements.of("h1")) == len(elements.of("main")) == len(elements.of("header")) == 1
    assert elements.of("a")[0] == {"class": "skip", "href": "#answer"}
    assert all(image["alt"] for image in elements.of("img"))
    assert all(image["src"].startswith("data:image/") for image in elements.of("img") if image["src"])
    assert len(elements.of("caption")) == len(elements.of("table")) > 8
    assert all(head["scope"] in ("col", "row") for head in elements.of("th"))
    for table in run.findings().tables(full=True):
        assert table.title in elements.words
    for value in (run.digest, "seed", "tokens forwarded", "near-ties", "answers missing", "wording"):
        assert value in elements.words
    assert not elements.of("link")
    assert file.stat().st_size < 3_000_000


def pages_order(run: iclperm.Run) -> list[str]:
    return ["answer", "warnings", "conclusion", "orderings", "figures", "tables", "method"]


def test_data_stays_text(file: Path, run: iclperm.Run) -> None:
    text = file.read_text(encoding="utf-8")
    elements = Elements(text)
    assert "onerror" not in {name for _, attributes in elements.tags for name in attributes}
    assert "onmouseover" not in {name for _, attributes in elements.tags for name in attributes}
    assert MODEL in elements.words
    assert "<img src=x" not in text
    assert "\u2028" not in text
    assert elements.of("b") == []
    (data,) = (json.loads(raw) for _, found, raw in elements.raw if found.get("class") == "data")
    assert set(data["texts"]) == {text[:800] + (" …" if len(text) > 800 else "") for text in worded(run).values()}
    for hostile in HOSTILE:
        assert any(hostile in text for text in data["queries"])


def test_what_is_json_ends_no_element_and_reads_back() -> None:
    value = {"a": [*HOSTILE, "\ud800", None, 1.5, True]}
    found = as_json(value)
    assert not set("<>&\u2028\u2029") & set(found)
    assert json.loads(found) == value
    with pytest.raises(ValueError, match="JSON"):
        as_json(float("nan"))


def test_every_text_of_a_page_is_escaped(tmp_path: Path) -> None:
    bad = "\n".join([*HOSTILE, "lone \ud800"])
    table = Table(bad, (bad, bad), [(bad, bad)], texts=(1,), caption=bad)
    plot = Plot((1, 1), lambda figure: None)
    data = {"sets": 1, "permutations": [0], "shots": [0], "chance": None, "texts": [bad]}
    explorer = Explorer(bad, plot, data, [bad])
    page = Page(bad, bad, [bad], [bad, bad], [bad], {bad: plot}, [table], [table], [explorer], [bad])
    elements = Elements(page_html(page, is_interactive=False))
    assert not {"b", "i"} & {tag for tag, _ in elements.tags}
    assert {image["src"].split(",")[0] for image in elements.of("img") if image["src"]} == {"data:image/svg+xml;base64"}
    assert elements.words.count("{{7*7}}") >= 12
    path = pages.write_page(tmp_path, page, is_interactive=False)
    assert "lone \\ud800" in path.read_text(encoding="utf-8")


def test_the_data_of_the_orderings_are_those_of_the_run(file: Path, run: iclperm.Run) -> None:
    elements = Elements(file.read_text(encoding="utf-8"))
    (data,) = (json.loads(raw) for _, found, raw in elements.raw if found.get("class") == "data")
    shown = run.demonstrations
    for s, p, k in np.ndindex(run.correct.shape[:3]):
        assert data["accuracy"][s][p][k] == round(1e4 * run.correct[s, p, k].mean())
        codes = [data["alphabet"].index(sign) for sign in data["answers"][k][s][p]]
        assert [code == gold for code, gold in zip(codes, data["gold"], strict=True)] == run.correct[s, p, k].tolist()
        rows = [data["rows"][s][place] for place in data["orders"][p]]
        assert [data["row_numbers"][row] for row in rows] == shown.rows[s, p].tolist()
        assert [data["row_labels"][row] for row in rows] == shown.labels[s, p].tolist()
    assert data["labels"] == list(LABELS)


def test_texts_are_left_out_on_request(run: iclperm.Run, tmp_path: Path) -> None:
    parts = [text for text in run.demonstrations.texts.values()] + run.demonstrations.query_texts("test")
    texts = [" ".join(text.split()[:7]) for text in parts]
    with_text = iclperm.write_page(run, tmp_path / "with", "curve").read_text(encoding="utf-8")
    without = iclperm.write_page(run, tmp_path / "without", "curve", with_text=False).read_text(encoding="utf-8")
    assert all(text in with_text for text in texts)
    assert not [text for text in texts if text in without]
    assert "One demonstration against none" in without
    assert "Texts were left out of this page" in without


def test_a_table_can_leave_its_texts_out() -> None:
    table = Table("t", ("a", "text", "b"), [("1", "words", "2")], texts=(1, 2), data_texts=(1,))
    assert table.without_texts() == Table("t", ["a", "b"], [["1", "2"]], texts=[1])
    assert Table("t", ("a",), [("1",)]).without_texts() == Table("t", ["a"], [["1"]], texts=[])


def many(run: iclperm.Run, sets: int, permutations: int, queries: int) -> iclperm.Run:
    """The same run with so many of everything, its contexts and queries said again."""
    test, shown = run.splits["test"], run.demonstrations
    generator = np.random.default_rng(0)
    again = np.arange(queries) % len(test.gold)
    items = replace(
        test,
        examples=np.arange(queries),
        weights=np.ones(queries, dtype=np.int64),
        gold=test.gold[again],
        context_of=generator.integers(0, len(test.context_state), size=(sets, permutations, 1)),
        context_state=test.context_state[:, again],
        context_prediction=test.context_prediction[:, again],
        context_logprob=-generator.random((len(test.context_state), queries, len(LABELS))).astype(np.float32),
        right_answers=tuple(test.right_answers[place] for place in again),
    )
    gone = run.study.model_copy(update={"task": "gone"})  # there is no folder of it, and no data
    large = replace(run, splits={"test": items}, shots=run.shots[-1:], study=gone, folder=None)
    rows = np.resize(shown.rows, (sets, permutations, 3))
    large.__dict__["demonstrations"] = replace(  # what it would be read to be
        shown,
        rows=rows,
        labels=np.zeros_like(rows),
        permutations=np.resize(shown.permutations, (permutations, 3)),
        sets=np.resize(shown.sets, (sets, 3)),
        _queries={"test": [f"{'words ' * 40}{number}" for number in range(queries)]},
    )
    return large


@pytest.mark.parametrize(("permutations", "queries", "shown"), [(10, 500, 10), (1000, 200, 200)])
def test_what_does_not_fit_is_sampled_and_the_page_says_so(
    run: iclperm.Run, permutations: int, queries: int, shown: int
) -> None:
    large = many(run, 10, permutations, queries)
    kept = kept_prompts(run)
    assert kept is not None
    again = [kept.texts.queries["test"][number % 20] for number in range(queries)]
    group = kept.groups[0]
    rows = group.rows[np.arange(10) % 3][:, np.arange(permutations) % 4]
    grown = replace(group, shots=large.shots, rows=rows, contexts=np.zeros((10, permutations, 1), dtype=np.int64))
    grown_texts = replace(kept.texts, queries={"test": again}, contexts={}, cells={}, has_tokens=True)
    large_prompts = replace(kept, texts=grown_texts, groups=(grown,))
    found = study_pages.page_of(large)
    (explorer,) = found.explorers
    data, notes = shown_prompts(large, np.array(explorer.data["permutations"]), large_prompts)
    assert data is not None
    found = replace(found, explorers=[replace(explorer, prompts=data, notes=[*explorer.notes, *notes])])
    assert len(data["numbers"]) == queries if permutations == 10 else 0 < len(data["numbers"]) < queries
    assert any("rounds log-likelihoods to 2e-05 nats" in note for note in notes)
    assert any("of the 200 queries, at equal distances" in note for note in notes) == (permutations == 1000)
    assert shown <= len(explorer.data["permutations"]) <= shown + 2
    text = page_html(found, is_interactive=True)
    assert len(text.encode()) < 5_000_000
    assert ("of the 1,000 permutations are in this page" in text) == (permutations == 1000)
    matrix = stats.accuracy(large.correct[:, :, 0]).values
    inside = np.asarray(explorer.data["accuracy"])[:, :, 0]
    assert inside.max() == round(1e4 * matrix.max())
    assert inside.min() == round(1e4 * matrix.min())


SMALL: dict[str, dict[str, Any]] = {
    "sensitivity": {"shots": 3},
    "search": {"shots": 3, "dev_queries": 12},
    "curve": {"shots": 3},
    "convergence": {"shots": 3},
    "transfer": {"shots": 3, "dev_queries": 12, "tasks": True},
    "selection": {"shots": 4, "select": 2, "dev_queries": 12},
    "race": {"shots": 3, "dev_queries": 12},
    "recommend": {"shots": 3, "dev_queries": 12},
}


@pytest.fixture(scope="module", params=SMALL)
def of_a_kind(request: pytest.FixtureRequest, place: Path) -> tuple[str, Path]:
    """The page of every kind of study, by its name."""
    kind, choices = request.param, {**SMALL[request.param]}
    if choices.pop("tasks", False):
        other = (place / "colours.yaml").read_text(encoding="utf-8").replace("name: colours", "name: colours_too")
        (place / "colours_too.yaml").write_text(other, encoding="utf-8")
        choices["tasks"] = [str(place / "colours.yaml"), str(place / "colours_too.yaml")]
    else:
        choices["task"] = str(place / "colours.yaml")
    study = iclperm.Study(kind=kind, model=str(place / MODEL), sets=2, permutations=3, queries=12, **choices)
    return kind, iclperm.write_page(iclperm.run(study, place / f"of-{kind}"))


def test_every_kind_of_study_has_its_page_here() -> None:
    assert set(SMALL) == set(kinds.STUDIES)


def test_a_kind_of_study_has_a_page(of_a_kind: tuple[str, Path], place: Path) -> None:
    kind, path = of_a_kind
    found = iclperm.open_run(path.parent)
    elements = Elements(path.read_text(encoding="utf-8"))
    assert found.findings().conclusion()[0] in elements.words
    for table in found.findings().tables(full=True):
        assert table.title in elements.words
    assert (path.name, path.parent) == ("report.html", place / f"of-{kind}")


def test_the_command_writes_it_beside_the_report(
    run: iclperm.Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def call(*arguments: object) -> str:
        with pytest.raises(SystemExit) as done:
            cli.main(["report", str(run.folder), *map(str, arguments)])
        assert done.value.code == 0
        return capsys.readouterr().out

    printed = call("--out", tmp_path / "out")
    assert "report.json, report.html" in printed
    assert HOSTILE[1] in (tmp_path / "out/report.html").read_text(encoding="utf-8")
    files = json.loads(call("--out", tmp_path / "bare", "--without-text", "--kind", "features", "--json"))["files"]
    assert files[-1] == str(tmp_path / "bare/report.html")
    bare = (tmp_path / "bare/report.html").read_text(encoding="utf-8")
    assert HOSTILE[1] not in bare
    assert "Which demonstrations help" in bare


def forget_bundle() -> None:
    bundle.problem.cache_clear()
    bundle.bundle.cache_clear()


def test_without_the_libraries_the_page_has_pictures_and_says_so(
    run: iclperm.Run, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)  # as if it were not installed
    forget_bundle()  # which a page before this one has found
    with pytest.raises(SystemExit) as done:
        cli.main(["report", str(run.folder), "--out", str(tmp_path)])
    forget_bundle()
    assert done.value.code == 0
    assert capsys.readouterr().err.splitlines() == [
        "note: the page's figures are pictures; pip install 'iclperm[page]' lets you point at them"
    ]
    elements = Elements((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert len(policy_of(elements)["script-src"]) == 1
    assert len(elements.of("img")) >= 3


class Browser:
    """Opens files in headless Chromium; ``said`` is what consoles told, ``asked`` what pages wanted of a network."""

    def __init__(self, chromium: Any) -> None:
        self.chromium = chromium
        self.said: list[str] = []
        self.asked: list[str] = []

    def open(self, path: Path, scheme: str = "light", width: int = 1100, bypass_csp: bool = False) -> Any:
        context = self.chromium.new_context(
            color_scheme=scheme, viewport={"width": width, "height": 900}, bypass_csp=bypass_csp, offline=True
        )
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("dialog", lambda dialog: self.said.append(f"dialog {dialog.message}"))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_function(
            "() => [...document.querySelectorAll('.chart')].every("
            "(chart) => chart.querySelector('svg') && chart.parentElement.classList.contains('has-chart'))"
        )
        return page


@pytest.fixture
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium on the path")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--headless", "--no-sandbox", "--disable-gpu"]
        )
        opened = Browser(chromium)
        yield opened
        chromium.close()
    assert opened.said == []
    assert [url for url in opened.asked if not url.startswith(("file:", "data:"))] == []


def worded(run: iclperm.Run) -> dict[int, str]:
    """The demonstrations by row of train as the model read them, whatever other fields their rows have."""
    kept = kept_prompts(run)
    assert kept is not None
    used = set(run.demonstrations.rows.ravel().tolist())
    return {row: piece.worded for row, piece in kept.texts.demonstrations.items() if row in used}


def picked(page: Any) -> str:
    return str(page.locator(".picked").first.inner_text())


def test_pointing_picking_and_the_keyboard_work_in_a_browser(browser: Browser, file: Path, run: iclperm.Run) -> None:
    page = browser.open(file)
    matrix = run.correct[:, :, -1].mean(axis=-1)
    assert picked(page).startswith(f"{100 * matrix.max():.1f} % right")
    page.get_by_role("button", name="Worst").click()
    assert picked(page).startswith(f"{100 * matrix.min():.1f} % right")
    cells = page.locator(".heat .mark-rect.role-mark path")
    cells.nth(7).hover(force=True)  # the number in the cell takes it
    page.wait_for_selector("#vg-tooltip-element.visible")
    told = page.locator("#vg-tooltip-element").inner_text()
    assert f"{matrix.ravel()[7]:.4f}" in told
    cells.nth(7).click(force=True)
    s, p = divmod(7, matrix.shape[1])
    assert picked(page) == f"{100 * matrix[s, p]:.1f} % right: set {s}, permutation {p}, k = 3"
    shown = run.demonstrations
    assert page.locator(".demonstrations li").all_inner_texts() == [
        " ".join(f"{LABELS[label]} {worded(run)[row]}".split())
        for row, label in zip(shown.rows[s, p].tolist(), shown.labels[s, p].tolist(), strict=True)
    ]
    for key in ("Set", "Permutation", "k"):
        chosen = page.get_by_role("combobox", name=key, exact=True)
        chosen.focus()
        before = picked(page)
        for _ in range(3):
            page.keyboard.press("ArrowUp")
        assert chosen.evaluate("(found) => found.selectedIndex") == 0
        assert chosen.evaluate("(found) => getComputedStyle(found).outlineStyle") == "solid"
        assert picked(page) != before
    assert picked(page).endswith("set 0, permutation 0, k = 0")
    assert page.locator(".demonstrations li").count() == 0


def test_the_first_stop_of_the_keyboard_leads_to_the_answer(browser: Browser, file: Path) -> None:
    page = browser.open(file, width=400)
    page.keyboard.press("Tab")
    skip = page.locator(":focus")
    assert skip.inner_text() == "Skip to the answer"
    assert skip.bounding_box()["x"] >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash") == "#answer"
    assert page.evaluate("document.documentElement.scrollWidth") == 400  # nothing runs out of a narrow window


def test_wrong_answers_can_be_looked_at_alone(browser: Browser, file: Path, run: iclperm.Run) -> None:
    page = browser.open(file)
    s, p = np.unravel_index(run.correct[:, :, -1].mean(axis=-1).argmin(), run.correct.shape[:2])
    page.get_by_role("button", name="Worst").click()
    page.locator("summary").click()
    queries = page.locator(".queries li")
    assert queries.count() == 20
    page.get_by_label("wrong answers only").check()
    wrong = int((run.correct[s, p, -1] == 0).sum())
    assert 0 < wrong < 20
    assert queries.count() == wrong
    counted = [int(cell) for cell in page.locator(".confusion td").all_inner_texts() if cell]
    assert sum(counted) == 20


def test_hostile_texts_are_words_in_a_browser(browser: Browser, file: Path, run: iclperm.Run) -> None:
    page = browser.open(file)
    page.locator("summary").click()
    words = page.locator(".queries").inner_text()
    for hostile in HOSTILE:
        assert " ".join(hostile.split()) in " ".join(words.split())
    assert page.locator("img:not([src^='data:'])").count() == 0
    assert page.title() == f"{run.title} - iclperm"


def opened_viewer(page: Any) -> Any:
    page.get_by_role("button", name="Read the prompts").click()
    viewer = page.get_by_role("dialog")
    assert viewer.is_visible()
    return viewer


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser: Browser, file: Path, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = browser.open(file, scheme=scheme, bypass_csp=True)  # for axe's own script
    page.locator("summary").click()
    for prepare in (lambda: None, lambda: opened_viewer(page).get_by_label("token boundaries").check()):
        prepare()
        found = axe.Axe().run(page)
        assert found.response["violations"] == []
        assert any(rule["id"] == "color-contrast" for rule in found.response["passes"])


def test_dark_is_dark_and_paper_is_white(browser: Browser, file: Path) -> None:
    def ground(page: Any) -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    assert ground(browser.open(file)) == "rgb(251, 251, 250)"
    page = browser.open(file, scheme="dark")
    assert ground(page) == "rgb(22, 24, 27)"
    page.emulate_media(media="print", color_scheme="dark")
    assert ground(page) == "rgb(255, 255, 255)"
    assert page.locator(".heat").is_hidden()
    assert page.locator(".explorer .still").is_visible()


def test_a_page_of_any_kind_opens_without_a_word_of_the_console(browser: Browser, of_a_kind: tuple[str, Path]) -> None:
    page = browser.open(of_a_kind[1])
    assert page.locator(".chart svg").count() > 0
