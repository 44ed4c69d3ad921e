"""Confusion, recall, precision and F1: against a slow loop, hand-worked values, and answers that are all one label."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iclperm.errors import RequestError
from iclperm.reference import classes as slow
from iclperm.report.figures import save
from iclperm.stats.classes import Confusion, answered_shares, class_scores, confusion, effective_items
from iclperm.studies.classes import AnswersByLabel, answers_by_label


@st.composite
def answers(draw: st.DrawFn) -> tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    labels, sets, queries = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 8))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    weights = generator.integers(0, 4, queries)
    weights[0] += 1
    return (
        labels,
        generator.integers(-1, labels, (sets, 2, queries)),
        generator.integers(0, labels, queries),
        (generator.random((sets, 2, queries)) < 0.2).astype(np.uint8),
        weights,
    )


@given(answers())
def test_every_cell_is_what_a_slow_loop_counts(
    case: tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> None:
    num_labels, predictions, gold, state, weights = case
    found = confusion(predictions, gold, num_labels, state, weights)
    scores = class_scores(found)
    for cell in np.ndindex(predictions.shape[:-1]):
        counts, unnamed = slow.confusion(predictions[cell], gold, num_labels, state[cell], weights)
        assert found.counts[cell].tolist() == counts
        assert found.unnamed[cell].tolist() == unnamed
        by_hand = slow.scores(counts, unnamed)
        for name in ("recall", "precision", "f1"):
            assert np.allclose(getattr(scores, name)[cell], by_hand[name], atol=1e-12, rtol=0, equal_nan=True)
        macro = slow.mean_known(by_hand["f1"]), slow.mean_known(by_hand["recall"])
        got = scores.macro_f1[cell], scores.balanced_accuracy[cell]
        assert np.allclose(got, macro, atol=1e-12, rtol=0, equal_nan=True)
    items = effective_items(gold, num_labels, weights)
    assert math.isclose(items.total, slow.effective_items(weights), abs_tol=1e-9)
    for label in range(num_labels):
        assert math.isclose(items.by_label[label], slow.effective_items(weights[gold == label]), abs_tol=1e-9)
    assert items.distinct.tolist() == [int(np.sum((gold == label) & (weights > 0))) for label in range(num_labels)]


def test_a_table_worked_by_hand() -> None:
    # Gold a: 3 right, 1 as b. Gold b: 1 as a, 2 right, 1 unnamed. Gold c: 2 as a. c is never answered.
    predictions = [0, 0, 0, 1, 0, 1, 1, -1, 0, 0]
    gold = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    found = confusion(predictions, gold, 3)
    assert found.counts.tolist() == [[3, 1, 0], [1, 2, 0], [2, 0, 0]]
    assert found.unnamed.tolist() == [0, 1, 0]
    scores = class_scores(found)
    assert scores.recall == pytest.approx([3 / 4, 2 / 4, 0])
    assert scores.precision[:2] == pytest.approx([3 / 6, 2 / 3])
    assert math.isnan(scores.precision[2])
    assert scores.f1 == pytest.approx([6 / 10, 4 / 7, 0])
    assert float(scores.macro_f1) == pytest.approx((6 / 10 + 4 / 7) / 3)
    assert float(scores.balanced_accuracy) == pytest.approx(5 / 12)
    assert answered_shares(found) == pytest.approx([6 / 10, 3 / 10, 0])


def test_the_macro_f1_of_a_textbook() -> None:
    """Manning, Raghavan & Schütze (2008), section 13.6: pooled and averaged effectiveness of two classes, there by
    precision: class 1 has 10 true positives, 10 false positives and 10 false negatives, class 2 has 90, 10 and 10."""
    counts = np.array([[10.0, 0, 10], [0, 90, 10], [10, 10, 860]])
    scores = class_scores(Confusion(counts, np.zeros(3)))
    assert scores.precision[:2] == pytest.approx([0.5, 0.9])
    assert float(scores.precision[:2].mean()) == pytest.approx(0.7)  # macroaveraged precision, as printed there
    pooled = counts[[0, 1], [0, 1]].sum() / counts[:, :2].sum()
    assert pooled == pytest.approx(0.83, abs=0.005)  # microaveraged, as printed there


@pytest.mark.parametrize("num_labels", [2, 4, 7])
def test_one_label_always_has_balanced_accuracy_of_one_in_so_many(num_labels: int) -> None:
    gold = np.repeat(np.arange(num_labels), np.arange(1, num_labels + 1))
    found = confusion(np.full((3, len(gold)), 1), gold, num_labels)
    scores = class_scores(found)
    assert scores.balanced_accuracy == pytest.approx(1 / num_labels)
    assert answered_shares(found)[0].tolist() == [float(label == 1) for label in range(num_labels)]


def test_generated_text_that_cannot_be_read_names_no_label() -> None:
    """It has the number after the last label (`iclperm.runs.generated`)."""
    one, other = (confusion([0, none, 1], [0, 1, 1], 2) for none in (-1, 2))
    assert one.counts.tolist() == other.counts.tolist() == [[1, 0], [0, 1]]
    assert one.unnamed.tolist() == other.unnamed.tolist() == [0, 1]


def test_weights_are_queries_written_out() -> None:
    generator = np.random.default_rng(4)
    predictions, gold = generator.integers(-1, 3, (2, 20)), generator.integers(0, 3, 20)
    weights = generator.integers(1, 5, 20)
    weighted = confusion(predictions, gold, 3, weights=weights)
    written = confusion(np.repeat(predictions, weights, axis=1), np.repeat(gold, weights), 3)
    assert (weighted.counts == written.counts).all()
    assert (weighted.unnamed == written.unnamed).all()


def test_a_query_that_counts_63_times_is_one_item() -> None:
    items = effective_items([0, 1, 1, 1], 2, [63, 21, 21, 21])
    assert items.by_label == pytest.approx([1.0, 3.0])
    assert items.total == pytest.approx(126**2 / (63**2 + 3 * 21**2))
    assert items.share == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(
    ("predictions", "gold", "says"),
    [
        ([0, 3], [0, 1], "from -1 to 2, got 0 to 3"),
        ([0, 1], [0, 2], "lie in 0..1, got 0 to 2"),
        ([0, 1, 1], [0, 1], "gold of 2 queries"),
        ([0.5, 1.0], [0, 1], "whole numbers"),
        ([], [], "gold must be whole numbers"),
    ],
)
def test_what_does_not_fit_is_named(predictions: list[int], gold: list[int], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        confusion(predictions, gold, 2)
    with pytest.raises(RequestError, match="shape of predictions"):
        confusion([0, 1], [0, 1], 2, state=[0])


class TestTheReport:
    """`iclperm.studies.classes`, of two orderings at two numbers of shots."""

    GOLD = np.array([0, 0, 1, 1])
    ANSWERS = np.array([[[[0, 0, 1, 1], [0, 0, 1, 0]], [[0, 1, 1, 1], [1, 1, 1, 1]]]])  # [1, 2, 2, 4]

    def made(self, **changes: Any) -> AnswersByLabel:
        weights = changes.pop("weights", None)
        found = confusion(self.ANSWERS, self.GOLD, 2, weights=weights)
        return answers_by_label(found, ("yes", "no"), (0, 4), self.GOLD, weights, **changes)

    def test_means_over_orderings_and_the_scores_of_each(self) -> None:
        content = self.made().to_dict()
        assert json.loads(json.dumps(content, allow_nan=False)) == content
        first, last = content["by_shots"]
        assert (first["shots"], last["shots"]) == (0, 4)
        assert last["confusion"] == [[1.0, 1.0], [0.5, 1.5]]  # of [[2, 0], [1, 1]] and [[0, 2], [0, 2]]
        assert last["recall"] == [0.5, 0.75]
        assert content["by_ordering"]["recall"] == [[[1.0, 0.5], [0.0, 1.0]]]
        assert content["by_ordering"]["confusion"] == [[[[2, 0], [1, 1]], [[0, 2], [0, 2]]]]
        assert last["balanced_accuracy"] == {"mean": 0.625, "lowest": 0.5, "highest": 0.75}
        f1 = [(4 / 5 + 2 / 3) / 2, (0 + 4 / 6) / 2]
        assert last["macro_f1"]["mean"] == pytest.approx(np.mean(f1))

    def test_a_heavy_query_is_a_warning_with_what_the_queries_are_worth(self) -> None:
        assert self.made().warnings == ()
        (told,) = self.made(weights=np.array([1, 1, 1, 63])).warnings
        assert "'no' counts 63 times" in told
        assert "its 2 queries are worth 1.0 that count alike, all 4 are worth 1" in told

    def test_natural_queries_are_compared_with_the_commonest_label(self) -> None:
        assert self.made().conclusion() == []
        (told,) = self.made(balance="natural").conclusion()
        assert "always naming 'yes' would be right in 50.0 %" in told
        assert "balanced accuracy is 62.5 %" in told

    def test_tables_and_figure_show_what_the_json_has(self, tmp_path: Path) -> None:
        made = self.made(title="a task")
        labels, table, over = made.tables(full=True)
        assert [row[:4] for row in labels.rows] == [("yes", "2", "2.0", "37.5 %"), ("no", "2", "2.0", "62.5 %")]
        assert [list(row) for row in table.rows] == [["yes", "1.0", "1.0"], ["no", "0.5", "1.5"]]
        assert [row[0] for row in over.rows] == ["0", "4"]
        assert made.tables(full=False) == []
        (png, svg) = save(made.plots()["confusion"], tmp_path / "confusion")
        drawn = svg.read_text()
        assert png.stat().st_size > 5_000
        for word in ("a task", "yes", "no", ".250", "1.5", "right label"):
            assert f">{word}</text>" in drawn, word

    def test_answers_without_a_label_have_a_column(self) -> None:
        found = confusion(np.array([[[[0, -1, 1, 1]]]]), self.GOLD, 2)
        made = answers_by_label(found, ("yes", "no"), (4,), self.GOLD)
        assert made.tables(full=True)[1].header[-1] == "no label"
        assert made.to_dict()["by_shots"][0]["recall"] == [0.5, 1.0]

    def test_a_label_that_no_query_asks_for_is_a_warning_and_not_in_the_means(self) -> None:
        found = confusion(self.ANSWERS, self.GOLD, 3)
        made = answers_by_label(found, ("yes", "no", "rare"), (0, 4), self.GOLD, balance="natural")
        (told,) = made.warnings
        assert "no test query has the label 'rare'" in told
        assert "balanced accuracy is that of the other 2" in told
        (line,) = made.conclusion()
        assert "62.5 % over the 2 labels that are asked for and macro-F1 " in line
        assert "recall is lowest for 'yes', 50.0 % of 2 queries" in line
        (whole,) = self.made(balance="natural").conclusion()
        assert "asked for" not in whole
        assert "recall is lowest for 'yes', 50.0 % of 2 queries" in whole
