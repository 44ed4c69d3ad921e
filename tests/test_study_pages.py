"""What the pages on statistics and kinds of study show: their Python runs as it stands, and what they name is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import iclperm
from iclperm.studies.search import Answers

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "docs/statistics.md", *sorted((ROOT / "docs/studies").glob("*.md"))]
SMALL: dict[str, dict[str, Any]] = {
    "search": {"sets": 2, "permutations": 3, "shots": 3, "queries": 12, "dev_queries": 8},
    "curve": {"sets": 2, "permutations": 3, "shots": 3, "queries": 12},
    "sensitivity": {"sets": 2, "permutations": 2, "shots": [0, 4], "queries": 8},
}
"""Sizes of the runs that the pages make, in place of those of the paper."""


def blocks(page: str) -> Iterator[str]:
    text = (ROOT / f"docs/studies/{page}.md").read_text(encoding="utf-8")
    yield from re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def small_study(**choices: Any) -> iclperm.Study:
    return iclperm.Study(**choices, **SMALL[choices.get("kind", "sensitivity")])


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """The names that the Python of each page leaves behind, by page."""
    found: dict[str, dict[str, Any]] = {}
    small = SimpleNamespace(run=iclperm.run, Study=small_study)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("pages"))
        for page in ("search", "curve", "calibration", "convergence", "features"):
            worth = np.random.default_rng(0).normal(size=(2, 4, 6))
            names = {"iclperm": small, "value": worth[0], "feature": worth[1]}
            if page in ("convergence", "features"):  # of any run: that of the curve
                names["run"] = found["curve"]["run"]
            for block in blocks(page):
                exec(compile(block, f"{page}.md", "exec"), names)
            found[page] = names
        yield found  # the folders of the runs are relative


@pytest.mark.parametrize(
    ("page", "kind"),
    [
        ("search", "SearchFindings"),
        ("curve", "CurveFindings"),
        ("convergence", "ConvergenceFindings"),
        ("features", "Features"),
    ],
)
def test_the_python_of_the_pages_makes_findings(shown: dict[str, dict[str, Any]], page: str, kind: str) -> None:
    found = shown[page]["found"]
    assert type(found).__name__ == kind
    assert found.conclusion()


def test_the_page_on_calibration_shows_both_answers(shown: dict[str, dict[str, Any]]) -> None:
    run = shown["calibration"]["run"]
    assert run.content_free.label_logprob.shape == (2, 2, 2, 3, 4)
    assert run.uncalibrated.findings().conclusion()
    assert run.splits["test"].prior.shape[1] == 4


def test_what_the_pages_call_with_arrays_runs() -> None:
    generator = np.random.default_rng(0)
    correct = generator.integers(0, 2, (3, 4, 21, 12), dtype=np.uint8)
    split = Answers(correct[:, :, 0], predictions=correct[:, :, 0])
    names = {
        "curve": {"correct": correct, "first": np.arange(12).reshape(3, 4)},
        "convergence": {"correct": correct},
        "search": {"correct": correct[:, :, 0], "dev_scores": generator.random((3, 4)), "test": split, "dev": split},
    }
    called = []
    for page, arrays in names.items():
        text = (ROOT / f"docs/studies/{page}.md").read_text(encoding="utf-8")
        (paragraph,) = re.findall(r"^From arrays: (.*?)\n\n", text, flags=re.DOTALL | re.MULTILINE)
        for call in re.findall(r"`(iclperm\.[^`]+)`", paragraph):
            words, _, arguments = call.partition("(")
            function = _found(words.split(".")[1:])
            called.append(eval(f"function({arguments}", {"function": function, "range": range, **arrays}))
    assert [type(found).__name__ for found in called] == [
        "CurveFindings",
        "ConvergenceFindings",
        "Search",
        "SearchFindings",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_what_the_pages_name_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in sorted(set(re.findall(r"\b(?:iclperm\.)?((?:stats|studies|external|reference)(?:\.\w+)+)", text))):
        words = name.removesuffix(".py").split(".")
        if words[-1] == "md":
            continue
        assert _found(words) is not None, f"{page.name} names iclperm.{name}"


def _found(words: list[str]) -> Any:
    """The module of iclperm, or the name in one, that is called so; None where there is none."""
    for size in range(len(words), 0, -1):
        try:
            thing: Any = import_module(".".join(["iclperm", *words[:size]]))
        except ModuleNotFoundError:
            continue
        for word in words[size:]:
            thing = getattr(thing, word, None)
        return thing
    return None
