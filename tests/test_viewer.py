"""The prompt viewer of the page: the exact prompts of a run with tokens and scores, in a browser, by keyboard too."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_page import HOSTILE, Browser, Elements, browser, file, opened_viewer, place, run
from tiny import LABELS

import iclperm
from iclperm.runs.run_texts import kept_prompts

__all__ = ["browser", "file", "place", "run"]  # fixtures


def prompts_in(file: Path) -> dict[str, Any]:
    elements = Elements(file.read_text(encoding="utf-8"))
    (data,) = (json.loads(raw) for _, found, raw in elements.raw if found.get("class") == "prompts")
    assert isinstance(data, dict)
    return data


def test_the_prompts_of_the_page_are_those_of_the_run_and_their_scores_nearly(file: Path, run: iclperm.Run) -> None:
    data, items = prompts_in(file), run.splits["test"]
    kept = kept_prompts(run)
    assert kept is not None
    assert data["numbers"] == list(range(20))
    (group,) = data["groups"]
    scores = data["scores"]
    codes = np.frombuffer(base64.b64decode(scores["codes"]), dtype="<u2").reshape(3, 3, 4, 20, 3)
    logprob = items.label_logprob.transpose(2, 0, 1, 3, 4)
    assert np.abs(-scores["step"] * codes - logprob).max() <= scores["step"] / 2 + 1e-6 < 1e-3
    for (s, p, k), correct in np.ndenumerate(run.correct[..., 0]):
        shots = run.shots[k]
        places = [group["sets"][s][place] for place in group["orders"][p]][:shots]
        text = data["opening"][0] + "".join(data["demonstrations"][place][0] for place in places)
        assert text + data["queries"][0][0] == kept.text(s, p, shots, ("test", 0))
        codes_of = [data["alphabet"].index(sign) for sign in data["answers"][k][s][p]]
        assert codes_of == items.context_prediction[items.context_of[s, p, k]].tolist()
        assert (codes_of[0] == data["gold"][0]) == bool(correct)
        steps = [*data["opening"][1], *(step for at, place in enumerate(places) for step in first(data, at, place))]
        tokens = kept.tokens(s, p, shots)
        assert tokens is not None
        ends = [len(text[:end].encode("utf-16-le")) // 2 for end in tokens.ends.tolist()]
        assert np.cumsum(steps).tolist() == ends[len(data["start"]) :]


def first(data: dict[str, Any], at: int, place: int) -> list[int]:
    """How far the tokens of a demonstration reach, at the beginning and elsewhere."""
    elsewhere: list[int] = data["demonstrations"][place][1]
    return elsewhere if at else list(data["first"].get(str(place), elsewhere))


def test_of_an_older_run_the_prompts_are_read_from_the_data_and_a_page_without_text_has_none(
    file: Path, run: iclperm.Run, tmp_path: Path
) -> None:
    assert run.folder is not None
    folder = Path(shutil.copytree(run.folder, tmp_path / "run"))
    (folder / "texts.parquet").unlink()
    older = iclperm.open_run(folder)
    assert prompts_in(iclperm.write_page(older, tmp_path / "again")) == prompts_in(file)
    bare = iclperm.write_page(older, tmp_path / "bare", with_text=False).read_text(encoding="utf-8")
    assert "<dialog" not in bare
    assert 'class="prompts"' not in bare


def test_the_viewer_shows_the_exact_prompt_of_the_cell_that_is_picked(
    browser: Browser, file: Path, run: iclperm.Run
) -> None:
    page = browser.open(file)
    page.locator(".heat .mark-rect.role-mark path").nth(7).click(force=True)
    s, p = divmod(7, 4)
    viewer = opened_viewer(page)
    assert viewer.get_by_role("heading").inner_text().endswith(f"set {s}, permutation {p}, k = 3")
    kept = kept_prompts(run)
    assert kept is not None
    labels = iclperm.open_run(run.folder).prompt(index_set=s, permutation=p, query=0).labels
    items = run.splits["test"]
    for number in (0, 13):
        viewer.locator(f"input[value='{number}']").check(force=True)
        answer = int(items.context_prediction[items.context_of[s, p, -1], number])
        text = kept.text(s, p, 3, ("test", number)) + labels[answer]

        def shown() -> str:
            return "".join(viewer.locator(".said").evaluate_all(TEXT_OF_PARTS))

        assert shown() == text
        viewer.get_by_label("token boundaries").check()
        assert shown() == text
        tokens = kept.tokens(s, p, 3, ("test", number))
        assert tokens is not None
        plain = text[: -len(labels[answer])]
        cuts = sorted({*tokens.ends.tolist(), *starts(kept, s, p, number), len(plain)} - {0})
        spans = ["".join(viewer.locator(".token").nth(at).evaluate_all(TEXT_OF_PARTS)) for at in range(3)]
        assert spans == [plain[begin:end] for begin, end in zip([0, *cuts], cuts[:3], strict=False)]
        assert viewer.locator(".token").count() == len(cuts)
        assert f"{len(tokens.ids)} tokens" in viewer.locator(".told").inner_text()
        viewer.get_by_label("token boundaries").uncheck()
        scores = items.label_logprob[s, p, -1, number]
        rows = [row.split("\t") for row in viewer.locator(".scores tbody tr").all_inner_texts()]
        assert [float(row[1]) for row in rows] == pytest.approx(scores.tolist(), abs=1.5e-3)
        verdict = viewer.locator(".verdict").inner_text()
        assert LABELS[answer] in verdict
        assert LABELS[int(items.gold[number])] in verdict
    assert viewer.locator(".command").inner_text().endswith(f"--set {s} --permutation {p} --shots 3 --query 13")
    assert viewer.locator(".part.demonstration .tag").all_inner_texts() == ["1", "2", "3"]


TEXT_OF_PARTS = """(parts) => parts.map((part) => {
  const found = part.cloneNode(true);
  found.querySelectorAll(".special, .mark").forEach((each) => each.remove());
  return found.textContent;
})"""


def starts(kept: Any, s: int, p: int, number: int) -> list[int]:
    """Where the parts of a prompt begin: the page cuts there, too."""
    lengths = [len(kept.texts.opening.text), *(len(kept.texts.demonstrations[row].text) for row in kept.rows(s, p, 3))]
    return np.cumsum(lengths).tolist()


def test_the_viewer_works_by_keyboard_alone(browser: Browser, file: Path) -> None:
    page = browser.open(file)
    page.get_by_role("button", name="Read the prompts").focus()
    page.keyboard.press("Enter")
    viewer = page.get_by_role("dialog")
    chosen = page.locator(":focus")
    assert chosen.get_attribute("type") == "radio"
    assert viewer.locator(".verdict").inner_text().startswith("Query 0.")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert viewer.locator(".verdict").inner_text().startswith("Query 2.")
    assert viewer.locator(".choice:has(:focus)").evaluate("(found) => getComputedStyle(found).outlineStyle") == "solid"
    page.keyboard.press("Escape")
    assert not viewer.is_visible()
    assert page.locator(":focus").inner_text() == "Read the prompts"
    page.get_by_role("combobox", name="k", exact=True).select_option(index=0)  # no demonstrations at all
    opened_viewer(page)
    assert viewer.locator(".part.demonstration").count() == 0
    viewer.get_by_role("button", name="Close").click()
    assert not viewer.is_visible()


def test_wrong_answers_and_near_ties_can_be_looked_at_alone(browser: Browser, file: Path, run: iclperm.Run) -> None:
    page = browser.open(file, width=390)
    viewer = opened_viewer(page)
    s, p = np.unravel_index(run.correct[:, :, -1].mean(axis=-1).argmax(), run.correct.shape[:2])
    wrong = np.flatnonzero(run.correct[s, p, -1] == 0)
    ordered = np.sort(run.label_logprob[s, p, -1], axis=-1)
    margins = ordered[:, -1] - ordered[:, -2]

    def listed() -> list[int]:
        return [int(number) for number in viewer.locator(".choice .number").all_inner_texts()]

    assert listed() == list(range(20))
    viewer.get_by_label("wrong", exact=True).check()
    assert listed() == wrong.tolist()
    assert viewer.locator(".found").inner_text().startswith(f"{len(wrong)} of 20 queries")
    viewer.get_by_label("wrong", exact=True).uncheck()
    viewer.get_by_label("near-ties:").check()
    assert viewer.get_by_label("best two labels less than").input_value() == "0.1"
    assert {*np.flatnonzero(margins < 0.099)} <= {*listed()} <= {*np.flatnonzero(margins < 0.101)}
    gaps = np.sort(margins)
    place = 2 + int(np.argmax(np.diff(gaps)[2:]))  # far from all: scores are rounded
    viewer.get_by_label("best two labels less than").fill(f"{gaps[place : place + 2].mean():.6f}")
    assert listed() == np.flatnonzero(margins <= gaps[place]).tolist()
    assert 2 < len(listed()) < 20
    viewer.get_by_label("best two labels less than").fill("0")
    assert "none of 20 queries" in viewer.locator(".found").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_hostile_texts_are_words_in_the_viewer(browser: Browser, file: Path) -> None:
    page = browser.open(file)
    viewer = opened_viewer(page)
    viewer.get_by_label("token boundaries").check()
    words = "".join(viewer.locator(".choices").all_text_contents())
    for hostile in HOSTILE:
        assert hostile in words
    assert viewer.locator("img, script, b, i").count() == 0
