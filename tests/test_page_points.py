"""Points of a page's figures that stand for one prompt open it: with the mouse, and from a list by keyboard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_page import Browser, Elements, browser

import iclperm
from iclperm import Study
from iclperm.report import charts
from iclperm.studies.several import StudyRuns

__all__ = ["browser"]  # a fixture


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> iclperm.Run:
    sizes: Any = {"sets": 2, "permutations": 5, "queries": 12, "dev_queries": 9, "shots": [0, 4], "seed": 3}
    found = iclperm.run(Study(kind="search", **sizes), tmp_path_factory.mktemp("search") / "run")
    assert isinstance(found, iclperm.Run)
    return found


@pytest.fixture(scope="module")
def selection(tmp_path_factory: pytest.TempPathFactory) -> StudyRuns:
    sizes: Any = {"sets": 2, "permutations": 3, "queries": 12, "dev_queries": 8, "shots": 4, "select": 2}
    found = iclperm.run(Study(kind="selection", **sizes), tmp_path_factory.mktemp("selection") / "run")
    assert isinstance(found, StudyRuns)
    return found


def points_in(page: Path) -> list[dict[str, Any]]:
    """The rows of a page's free charts that name a prompt."""

    def rows(found: Any) -> list[dict[str, Any]]:
        if isinstance(found, dict):
            return [found] if charts.PROMPT in found else [row for each in found.values() for row in rows(each)]
        return [row for each in found for row in rows(each)] if isinstance(found, list) else []

    scripts = Elements(page.read_text(encoding="utf-8")).raw
    return [row for tag, told, raw in scripts if tag == "script" and told.get("type") for row in rows(json.loads(raw))]


def test_every_ordering_of_a_search_is_a_point_with_its_prompt(search: iclperm.Run) -> None:
    assert search.folder is not None
    points = points_in(iclperm.write_page(search))
    dev, test = (search.splits[split].correct[:, :, -1].mean(axis=-1) for split in ("dev", "test"))
    assert len(points) == test.size
    for point in points:
        at = point[charts.PROMPT]
        where = at["set"], at["permutation"]
        assert (at["run"], at["shots"]) == ("", 4)
        assert (point["x"], point["y"]) == pytest.approx((dev[where], test[where]))
    chosen = {(p["prompt"]["set"], p["prompt"]["permutation"]) for p in points if p["name"] != "an ordering"}
    assert chosen == set(enumerate(dev.argmax(axis=1).tolist()))


def test_every_chosen_set_of_a_selection_is_a_point_with_its_prompt(selection: StudyRuns) -> None:
    points = points_in(iclperm.write_page(selection))
    accuracy = selection.runs["chosen"].correct[:, :, -1].mean(axis=-1)  # [T * S, P]
    assert [point[charts.PROMPT]["set"] for point in points] == list(range(len(accuracy)))
    assert {point[charts.PROMPT]["run"] for point in points} == {"chosen"}
    assert [point["y"] for point in points] == pytest.approx(100 * accuracy.mean(axis=1))
    assert [point["x"] for point in points] == pytest.approx(100 * accuracy.std(axis=1, ddof=1))


def test_what_is_known_of_no_number_of_shots_opens_nothing() -> None:
    assert charts.prompt_at(0, 1, None, "0.5") == {"words": "0.5"}


def test_a_point_opens_its_prompt(browser: Browser, search: iclperm.Run) -> None:
    page = browser.open(iclperm.write_page(search))
    form = page.get_by_role("form", name="Pick a point of: Every ordering")
    figure = page.locator("figure", has=form)
    points = points_in(search.folder / "report.html")  # type: ignore[operator]
    assert form.locator("option").all_inner_texts() == [point["words"] for point in points]
    viewer = page.get_by_role("dialog")
    last = points[-1][charts.PROMPT]  # drawn over all others
    figure.locator(".mark-symbol.role-mark path").nth(len(points) - 1).click()
    name = f"set {last['set']}, permutation {last['permutation']}, k = 4"
    assert viewer.locator(".viewer-title").inner_text().endswith(name)
    page.keyboard.press("Escape")
    assert not viewer.is_visible()
    assert page.locator(".picked").inner_text().endswith(name)


def test_by_keyboard_alone_and_back_again(browser: Browser, selection: StudyRuns) -> None:
    page = browser.open(iclperm.write_page(selection), width=390)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    form = page.get_by_role("form", name="Pick a point of: Accuracy of the chosen demonstrations against")
    form.get_by_role("combobox", name="Point").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    viewer = page.locator("dialog[open]")
    assert viewer.locator(".viewer-title").inner_text().endswith("set 2, permutation 0, k = 2")
    shown = selection.runs["chosen"].demonstrations
    parts = viewer.locator(".part.demonstration .said").all_inner_texts()
    rows = shown.rows[2, 0].tolist()
    assert [shown.texts[row] in part for row, part in zip(rows, parts, strict=True)] == [True] * len(rows)
    page.keyboard.press("Escape")
    assert page.locator(":focus").inner_text() == "Read its prompt"


def test_a_page_without_texts_leads_to_the_ordering(browser: Browser, search: iclperm.Run, tmp_path: Path) -> None:
    page = browser.open(iclperm.write_page(search, tmp_path, with_text=False))
    form = page.get_by_role("form", name="Pick a point of: Every ordering")
    place = int(np.argmin([point["y"] for point in points_in(tmp_path / "report.html")]))
    at = points_in(tmp_path / "report.html")[place][charts.PROMPT]
    form.get_by_role("combobox", name="Point").select_option(index=place)
    form.get_by_role("button").click()
    assert page.get_by_role("dialog").count() == 0
    assert page.locator(":focus").inner_text().endswith(f"set {at['set']}, permutation {at['permutation']}, k = 4")
