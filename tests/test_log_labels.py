"""Classes from sample logs of lm-evaluation-harness: against plain counts, and refused where a row does not add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from iclperm.cli import main as cli_main
from iclperm.external import describe, load
from iclperm.report import figures

Array = npt.NDArray[Any]
TOPICS = (" World", " Sports", " Business")


def choice_rows(gold: Array, scores: Array, texts: tuple[str, ...] = TOPICS, **more: Any) -> list[dict[str, Any]]:
    """Rows as the harness writes them for a task of choices: numbers as text, requests under gen_args_N."""
    return [
        {
            "doc_id": i,
            "doc": {"text": f"headline {i}", "label": int(right)},
            "target": str(int(right)),
            "arguments": {f"gen_args_{j}": {"arg_0": f"headline {i}", "arg_1": text} for j, text in enumerate(texts)},
            "resps": [[[str(value), "False"]] for value in of_choice],
            "filtered_resps": [[str(value), "False"] for value in of_choice],
            "filter": "none",
            "doc_hash": f"h{i}",
            "acc": float(int(np.argmax(of_choice)) == right),
            **more,
        }
        for i, (right, of_choice) in enumerate(zip(gold, scores, strict=True))
    ]


def text_rows(gold: list[str], answers: list[str]) -> list[dict[str, Any]]:
    return [
        {
            "doc_id": i,
            "target": right,
            "resps": [[f" {answer}\n"]],
            "filtered_resps": [answer],
            "doc_hash": f"h{i}",
            "exact_match": float(right == answer),
        }
        for i, (right, answer) in enumerate(zip(gold, answers, strict=True))
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def made(seed: int = 0, num: int = 60) -> tuple[Array, Array]:
    generator = np.random.default_rng(seed)
    gold = generator.choice(3, num, p=[0.6, 0.3, 0.1])
    return gold, generator.normal(0, 1, (num, 3)) + 1.2 * np.eye(3)[gold] - np.array([0, 0, 0.4])


def by_hand(gold: Array, answered: Array, num_labels: int) -> tuple[list[list[int]], list[float], float, float]:
    """Confusion, recall, macro-F1 and balanced accuracy, counted one by one."""
    table = [[0] * num_labels for _ in range(num_labels)]
    for right, answer in zip(gold, answered, strict=True):
        table[right][answer] += 1
    recall = [table[c][c] / sum(table[c]) for c in range(num_labels)]
    f1 = [2 * table[c][c] / (sum(table[c]) + sum(row[c] for row in table)) for c in range(num_labels)]
    return table, recall, sum(f1) / num_labels, sum(recall) / num_labels


def no_report(found: Any, why: str) -> None:
    described = describe(found)
    assert "classes" not in described.to_dict()
    (line,) = [line for line in described.warnings if "no report by class" in line]
    assert why in line
    assert described.conclusion()


class TestChoices:
    def test_recall_f1_and_confusion_of_one_log(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        gold, scores = made()
        path = write(tmp_path / "samples_topics.jsonl", choice_rows(gold, scores))
        table, recall, macro, balanced = by_hand(gold, scores.argmax(axis=1), 3)
        found = describe(load(path))
        content = json.loads(json.dumps(found.to_dict(), allow_nan=False))["classes"]
        assert content["labels"] == ["World", "Sports", "Business"]
        (one,) = content["by_context"]
        assert one["confusion"] == table
        assert one["recall"] == pytest.approx(recall)
        assert one["macro_f1"] == pytest.approx(macro)
        assert one["balanced_accuracy"] == pytest.approx(balanced)
        assert [p for p in found.plots() if p == "confusion"]
        assert figures.save(found.plots()["confusion"], tmp_path / "confusion")[0].stat().st_size > 5000
        with pytest.raises(SystemExit) as ended:
            cli_main.main(["stats", str(path)])
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert "Answers by label" in shown
        assert f"{recall[2]:.4f}" in shown
        assert "at k" not in shown

    def test_several_logs_are_matched_by_document(self, tmp_path: Path) -> None:
        gold, scores = made()
        other = made(1)[1]
        rows = choice_rows(gold, other)[::-1][5:]  # other order, five documents fewer
        first = write(tmp_path / "a/samples_topics.jsonl", choice_rows(gold, scores))
        second = write(tmp_path / "b/samples_topics.jsonl", rows)
        content = describe(load([first, second])).to_dict()["classes"]
        assert content["by_context"][0]["confusion"] == by_hand(gold, scores.argmax(axis=1), 3)[0]
        assert content["by_context"][1]["confusion"] == by_hand(gold[:55], other.argmax(axis=1)[:55], 3)[0]
        assert [one["context"] for one in content["by_context"]] == ["a/samples_topics.jsonl", "b/samples_topics.jsonl"]

    def test_targets_and_requests_as_other_versions_write_them(self, tmp_path: Path) -> None:
        gold, scores = made()
        rows = choice_rows(gold, scores)
        want = describe(load(write(tmp_path / "samples_a.jsonl", rows))).to_dict()["classes"]["by_context"][0]
        for row in rows:
            row["target"] = TOPICS[int(row["target"])].strip()
            row["arguments"] = [[f"headline {row['doc_id']}", text] for text in TOPICS]
            del row["filtered_resps"]
        found = describe(load(write(tmp_path / "samples_b.jsonl", rows))).to_dict()["classes"]["by_context"][0]
        assert found["confusion"] == want["confusion"]

    def test_choices_in_another_order_from_row_to_row_are_told_by_their_texts(self, tmp_path: Path) -> None:
        gold, scores = made()
        rows = choice_rows(gold, scores)
        for number, row in enumerate(rows):
            order = np.random.default_rng(number).permutation(3)
            row["target"] = int(np.flatnonzero(order == gold[number])[0])
            row["filtered_resps"] = [row["filtered_resps"][i] for i in order]
            row["arguments"] = [["", TOPICS[i]] for i in order]
        found = describe(load(write(tmp_path / "samples_a.jsonl", rows))).to_dict()["classes"]
        place = [("World", "Sports", "Business").index(label) for label in found["labels"]]
        table = np.array(by_hand(gold, scores.argmax(axis=1), 3)[0])[np.ix_(place, place)]
        assert found["by_context"][0]["confusion"] == table.tolist()

    def test_without_the_texts_labels_are_numbers(self, tmp_path: Path) -> None:
        gold, scores = made()
        rows = [{k: v for k, v in row.items() if k != "arguments"} for row in choice_rows(gold, scores)]
        found = describe(load(write(tmp_path / "samples_a.jsonl", rows)))
        assert found.to_dict()["classes"]["labels"] == ["choice 0", "choice 1", "choice 2"]
        assert any("lack the texts of the choices" in line for line in found.warnings)

    def test_the_normalised_metric_chooses_by_length(self, tmp_path: Path) -> None:
        gold, scores = made()
        lengths = np.array([len(text.strip()) for text in TOPICS])
        rows = choice_rows(gold, scores - 5)
        for row, right, of_choice in zip(rows, gold, scores - 5, strict=True):
            del row["acc"]
            row["acc_norm"] = float(np.argmax(of_choice / lengths) == right)
        found = describe(load(write(tmp_path / "samples_a.jsonl", rows))).to_dict()["classes"]["by_context"][0]
        assert found["confusion"] == by_hand(gold, ((scores - 5) / lengths).argmax(axis=1), 3)[0]


class TestTexts:
    def test_a_text_that_is_no_label_has_a_column_of_its_own(self, tmp_path: Path) -> None:
        gold = ["yes", "no"] * 10
        answers = ["yes"] * 12 + ["no"] * 6 + ["maybe"] * 2
        found = describe(load(write(tmp_path / "samples_boolq.jsonl", text_rows(gold, answers))))
        (one,) = found.to_dict()["classes"]["by_context"]
        assert found.to_dict()["classes"]["labels"] == ["no", "yes"]
        assert one["confusion"] == [[3, 6], [3, 6]]
        assert one["unnamed"] == [1, 1]

    def test_free_answers_have_no_classes(self, tmp_path: Path) -> None:
        words = [str(i) for i in range(40)]
        no_report(load(write(tmp_path / "samples_gsm8k.jsonl", text_rows(words, words))), "40 different targets")


class TestRefusals:
    def cases(self) -> list[tuple[dict[str, Any], str]]:
        return [
            ({"target": None}, "of doc_id 7, it has no 'target'"),
            ({"target": "[0, 2]"}, "neither the numbers nor the texts"),
            ({"target": "3"}, "neither the numbers nor the texts"),
            ({"filtered_resps": None, "resps": None}, "of doc_id 7, it has neither 'filtered_resps' nor 'resps'"),
            ({"filtered_resps": [["nan", "False"]] * 3}, "neither one text nor the log-likelihoods"),
            ({"filtered_resps": [["-1", "False"]] * 2}, "2 to 3 choices"),
            ({"filtered_resps": [["x", "False"]] * 3}, "neither one text nor the log-likelihoods"),
            ({"filtered_resps": ["World"]}, "some rows have log-likelihoods of choices, others text"),
            ({"arguments": [["", " a"], ["", " b"], ["", " c"]]}, "other texts from row to row"),
            ({"acc": 0.5}, "acc is graded"),
        ]

    @pytest.mark.parametrize("case", range(10))
    def test_a_row_that_lacks_or_contradicts_leaves_no_report(self, case: int, tmp_path: Path) -> None:
        change, why = self.cases()[case]
        rows = choice_rows(*made())
        rows[7] |= change
        no_report(load(write(tmp_path / "samples_a.jsonl", rows)), why)

    def test_what_does_not_give_the_metric_is_refused(self, tmp_path: Path) -> None:
        rows = choice_rows(*made())
        rows[3]["acc"] = 1 - rows[3]["acc"]
        no_report(load(write(tmp_path / "samples_a.jsonl", rows)), "of doc_id 3, ")

    def test_a_log_without_labels_beside_one_with_them(self, tmp_path: Path) -> None:
        gold, scores = made()
        first = write(tmp_path / "a/samples_t.jsonl", choice_rows(gold, scores))
        bare = [{k: row[k] for k in ("doc_id", "doc_hash", "acc")} for row in choice_rows(gold, scores)]
        second = write(tmp_path / "b/samples_t.jsonl", bare)
        no_report(load([first, second]), "it has no 'target'")

    def test_logs_that_disagree_on_what_is_right(self, tmp_path: Path) -> None:
        gold, scores = made()
        first = write(tmp_path / "a/samples_t.jsonl", choice_rows(gold, scores))
        second = write(tmp_path / "b/samples_t.jsonl", choice_rows((gold + 1) % 3, scores))
        no_report(load([first, second]), "doc_id 0 has another right label")

    def test_numbers_that_may_be_texts_are_refused(self, tmp_path: Path) -> None:
        rows = choice_rows(np.array([0, 1] * 10), np.tile([-1.0, -2.0, 0.0], (20, 1)), (" 1", " 0", " 2"))
        no_report(load(write(tmp_path / "samples_a.jsonl", rows)), "may be the numbers of the choices, or their texts")
