"""The page of a search opens on what the search recommends, not on the luckiest cell."""

import numpy as np
import pytest
from test_page import browser, picked

import iclperm
from iclperm import Study
from iclperm.studies.page import page_of

__all__ = ["browser"]  # a fixture


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    sizes = {"sets": 2, "permutations": 6, "queries": 24, "dev_queries": 4, "shots": [0, 4], "seed": 10}
    return iclperm.run(Study(kind="search", **sizes), tmp_path_factory.mktemp("page") / "run")


def test_the_page_knows_what_is_recommended(run):
    (explorer,) = page_of(run).explorers
    prompt = run.prompt()
    chosen = explorer.data["chosen"]
    assert (chosen["set"], explorer.data["permutations"][chosen["place"]]) == (prompt.set, prompt.permutation)
    assert "dev queries" in chosen["words"]
    assert chosen["is_held_out"]
    told = "; ".join(prompt.said())
    for words in chosen["words"].split("; "):
        assert words in told
    assert "test queries, which had no say in the choice: " in chosen["words"]
    assert "right by label: " in chosen["words"]
    (plain,) = page_of(run, "sensitivity").explorers
    assert plain.data["chosen"] is None


def test_it_opens_there_and_says_of_the_best_cell_what_it_is(browser, run, tmp_path):
    prompt, accuracy = run.prompt(), run.correct[:, :, -1] @ run.weights / run.weights.sum()
    assert accuracy[prompt.set, prompt.permutation] < accuracy.max(), "the best by test must be another one"
    page = browser.open(iclperm.write_page(run, tmp_path / "page.html"))
    name = f"set {prompt.set}, permutation {prompt.permutation}, k = 4"
    assert picked(page).endswith(name)
    recommended = "Recommended: chosen of 12 orderings by accuracy on 4 dev queries, the first of 11 that tie there"
    assert recommended in page.locator(".rank").inner_text()
    page.get_by_role("button", name="Best").click()
    s, p = np.unravel_index(accuracy.argmax(), accuracy.shape)
    assert picked(page).endswith(f"set {s}, permutation {p}, k = 4")
    assert "part of its lead is luck" in page.locator(".rank").inner_text()
    page.get_by_role("button", name="Recommended").click()
    assert picked(page).endswith(name)


def test_orderings_that_tie_on_dev_are_told(run):
    dev = run.splits["dev"]
    accuracy = (dev.correct[:, :, -1] @ dev.weights / dev.weights.sum()).round(9)
    number = int((accuracy == accuracy.max()).sum())
    assert number > 1, "the run must have ties"
    assert f"the first of {number} that tie there" in " ".join(run.prompt().notes)
    assert run.report_content()["num_best"] == number
