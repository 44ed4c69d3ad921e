"""Studies whose answers have grades: from the task file through the folder to every report, and nowhere an accuracy."""

import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.text import Text
from tiny import byte_level_tokenizer, make_rows, write_rows
from transformers import LlamaConfig, LlamaForCausalLM

import iclperm
from iclperm import Study
from iclperm.errors import ConfigError, DataError
from iclperm.external import describe, load
from iclperm.reference.graded_answers import closeness, squad_f1, squad_words
from iclperm.runs.generated import GeneratedAnswers
from iclperm.runs.limits import WorkLimits
from iclperm.stats.grades import graded_mean
from iclperm.studies.generation import generation
from iclperm.studies.page import write_page
from iclperm.studies.told import told
from iclperm.study.metrics import Metric
from iclperm.study.states import OK
from iclperm.tasks.answer_keys import Answer
from iclperm.tasks.answers import open_checker
from iclperm.tasks.filters import golds_text
from iclperm.tasks.task import Task

TASK = """
name: letters
data: {train: train.jsonl, test: test.jsonl, dev: dev.jsonl}
fields: {text: text, letters: letters}
answer: {field: letters, check: f1, rules: [{name: some, pattern: "[a-zA-Z]+"}, {name: a digit, pattern: "[0-9]"}]}
demonstration: "Text: {{ text }}\\nAnswer: {{ letters[0] }}"
query: "Text: {{ text }}\\nAnswer:"
stop: ["q"]
max_new_tokens: 5
shots: 3
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Weights large enough, and embeddings untied: it does not just repeat the last token."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), byte_level_tokenizer()
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=False, initializer_range=0.5,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def study(tmp_path, model):
    for split, number in (("train", 1), ("test", 2), ("dev", 3)):
        rows = [
            {**row, "letters": [" ".join("mTuJab"[place % 6 :]), "The T"], "size": place - 3}
            for place, row in enumerate(make_rows(number, 24))
        ]
        write_rows(tmp_path / f"{split}.jsonl", rows)
    path = tmp_path / "letters.yaml"
    path.write_text(TASK)
    return Study(model=str(model), task=str(path), sets=2, permutations=3, shots=[0, 1, 3], queries=6, seed=1)


run_in_parts = partial(iclperm.run, limits=WorkLimits(unit_tokens=(60, 60)))


@pytest.mark.parametrize(
    ("answer", "golds", "expected"),
    [
        # what SQuAD's published script (evaluate-v1.1.py, f1_score over metric_max_over_ground_truths) gives
        ("Denver Broncos", ["Denver Broncos", "The Denver Broncos"], 1.0),
        ("the Broncos of Denver!", ["Denver Broncos"], 0.8),
        ("Broncos", ["Carolina Panthers", "Denver Broncos"], 2 / 3),
        ("a cat, a cat and a dog", ["cat dog"], 2 / 3),
        ("U.S.A", ["usa"], 1.0),
        ("Then the another theme", ["an theme then"], 0.8),
        ("forty-two", ["forty two"], 0.0),
        ("an-a", ["ana"], 1.0),
        ("\u00e9 a\u00e9", ["\u00c9 A\u00c9"], 1.0),
    ],
)
def test_f1_is_that_of_squads_script(answer, golds, expected):
    assert squad_f1(answer, golds) == pytest.approx(expected, abs=1e-12)
    with open_checker(Answer(field="answers", check="f1")) as checker:
        (found,) = checker.judge([answer], [golds_text(golds)])
    assert found.grade == pytest.approx(expected, abs=1e-12)


texts = st.lists(
    st.sampled_from(["The", "a", "an", "b", "B", "c_a", "-a-", "é", ".", "'s", " ", "\n", "d", "\u0300", "٣"])
)
numbers = st.decimals(-10_000, 10_000, places=3).map(str)


@given(texts.map("".join), st.lists(texts.map("".join), min_size=1, max_size=3))
def test_f1_agrees_with_the_oracle(answer, golds):
    words = [gold for gold in golds if squad_words(gold)]
    with open_checker(Answer(field="answers", check="f1")) as checker:
        if not words:
            with pytest.raises(DataError, match="one at least with a word that is no article"):
                checker.judge([answer], [golds_text(golds)])
            return
        (found,) = checker.judge([answer], [golds_text(golds)])
    if squad_words(answer):
        assert found.answer == " ".join(squad_words(answer))
        assert found.grade == pytest.approx(squad_f1(answer, words), abs=1e-12)
    else:
        assert found.answer is None


@given(numbers, numbers, st.sampled_from(["0.001", "1", "2.5", "10000"]))
def test_a_distance_agrees_with_the_oracle(answer, gold, scale):
    with open_checker(Answer(field="answer", check="absolute_error", scale=float(scale))) as checker:
        (found,) = checker.judge([f"it is {answer}"], [gold])
    error, grade = closeness(answer, gold, scale)
    assert found.error == pytest.approx(error, abs=1e-9)
    assert found.grade == pytest.approx(grade, abs=1e-9)
    assert 0 <= found.grade <= 1


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"check": "absolute_error"}, "the check 'absolute_error' needs the key 'scale'"),
        ({"check": "f1", "scale": 3}, "no other check has it"),
        ({"check": "f1", "gold": "(.*)"}, "the key 'gold' is not for the check 'f1'"),
        ({"check": "absolute_error", "scale": 0}, "'scale' is 0"),
        ({"check": "f1", "ignore_case": True}, "the keys 'ignore' and 'ignore_case' belong to the check 'exact'"),
    ],
)
def test_keys_that_do_not_fit_are_refused_in_a_line(keys, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        Answer(field="answer", **keys)
    assert "\n" not in str(caught.value)


def rows_of(run, split="test"):
    return [row for row in run.to_arrow().to_pylist() if row["split"] == split]


def golds_by_row(study):
    return [json.loads(line)["letters"] for line in Path(study.task).with_name("test.jsonl").read_text().splitlines()]


def test_grades_go_from_the_task_file_to_the_folder_and_back(study, tmp_path):
    run = iclperm.run(study, tmp_path / "run")
    golds, rows = golds_by_row(study), rows_of(run)
    assert run.metric == Metric("f1")
    assert run.correct.dtype == np.float32
    assert 0 < run.correct.mean() < 1
    for row in rows:
        found = re.search("[a-zA-Z]+", row["text"]) or re.search("[0-9]", row["text"])
        assert "correct" not in row
        if found is None or not squad_words(found[0]):
            assert (row["state"], row["grade"]) == ("unparsed", 0.0)
            continue
        assert row["grade"] == np.float32(squad_f1(found[0], golds[row["example"]]))
    assert np.float32([row["grade"] for row in rows]).tolist() == run.correct.ravel().tolist()
    names = [set(pq.read_schema(path).names) for path in (tmp_path / "run" / "items").glob("*.parquet")]
    assert names
    assert all("grade" in each and not {"correct", "error"} & each for each in names)
    again = iclperm.open_run(tmp_path / "run")
    assert (again.digest, again.metric) == (run.digest, run.metric)
    assert np.array_equal(again.correct, run.correct)
    assert iclperm.verify(tmp_path / "run").digest == run.digest
    in_parts = run_in_parts(study, tmp_path / "parts")
    assert in_parts.digest == run.digest
    assert in_parts.report.num_parts > run.report.num_parts


def test_runs_of_right_and_wrong_have_no_word_of_grades(study, tmp_path):
    task = TASK.replace("check: f1", "check: exact_match").replace(
        ', rules: [{name: some, pattern: "[a-zA-Z]+"}, {name: a digit, pattern: "[0-9]"}]', ""
    )
    (tmp_path / "letters.yaml").write_text(task)
    run = iclperm.run(study, tmp_path / "run")
    assert (run.metric, run.correct.dtype) == (None, np.uint8)
    assert "metric" not in (tmp_path / "run" / "plan.json").read_text()
    assert "metric" not in run.report_content()
    assert {"correct"} == {"correct", "grade", "error"} & {*run.to_arrow().column_names}


def test_a_run_with_grades_grows_and_reads_unparsed_answers_either_way(study, tmp_path):
    small = iclperm.run(study.model_copy(update={"permutations": 2}), tmp_path / "run")
    large = iclperm.run(study, tmp_path / "run", extend=True)
    assert np.array_equal(large.correct[:, :2], small.correct)
    assert iclperm.run(study, tmp_path / "other").digest == large.digest
    dropped = iclperm.open_run(tmp_path / "run", unparsed="drop")
    assert (dropped.state != OK).any()
    assert (large.state == OK).all()


def test_errors_are_stored_and_their_mean_is_told(study, tmp_path):
    path = tmp_path / "letters.yaml"
    answer = "answer: {field: size, check: absolute_error, scale: 10}"
    path.write_text(
        re.sub("answer: .*", answer, TASK).replace("letters: letters}", "size: size}").replace("letters[0]", "size")
    )
    run = iclperm.run(study.model_copy(update={"queries": 20, "unparsed": "wrong"}), tmp_path / "run")
    assert run.metric == Metric("absolute_error", 10.0)
    rows = rows_of(run)
    read = [row for row in rows if row["state"] == "ok"]
    assert 10 < len(read) < len(rows)
    for row in read:
        assert (row["error"], row["grade"]) == pytest.approx(closeness(row["prediction"], row["gold"], "10"), abs=1e-6)
    assert all((row["error"], row["grade"]) == (None, 0.0) for row in rows if row["state"] != "ok")
    for at in run.generation.by_shots:
        there = [row for row in read if row["shots"] == at.shots]
        assert at.error == pytest.approx(np.mean([row["error"] for row in there]))
        assert at.answered == pytest.approx(np.mean([row["grade"] for row in there]), abs=1e-6)
        assert at.full == np.mean([row["grade"] == 1 for row in there])
    told = " ".join(run.generation.conclusion())
    assert f"with a mean absolute error of {run.generation.by_shots[-1].error:.4g}" in told
    assert "1 - min(1, |answer - right answer| / 10)" in " ".join(run.warnings)
    assert run.report_content()["metric"] == {"name": "absolute_error", "scale": 10.0}


LARGE = {"queries": 24, "dev_queries": 12, "permutations": 6, "sets": 3}
"""Enough for every kind to say something."""


def words_of(said):
    tables = [word for each in said.tables for word in (each.title, *each.header, each.caption)]
    tables += [cell for each in said.tables for row in each.rows for cell in row]
    figures = [words for plot in said.plots.values() for words in drawn_words(plot)]
    return [*said.head, *said.conclusion, *said.notes, *tables, *figures]


def drawn_words(plot):
    figure = Figure(figsize=plot.size)
    plot.draw(figure)
    return [text.get_text() for text in figure.findobj(Text)]


@pytest.fixture(scope="module")
def large(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("large")
    for split, number in (("train", 1), ("test", 2), ("dev", 3)):
        write_rows(
            folder / f"{split}.jsonl",
            [{**row, "letters": [" ".join("mTuJab"[i % 6 :]), "J T"]} for i, row in enumerate(make_rows(number, 60))],
        )
    (folder / "letters.yaml").write_text(TASK)
    return Study(model=str(model), task=str(folder / "letters.yaml"), shots=[0, 1, 2, 3], seed=1, **LARGE)


def over_two_tasks(study):
    other = Path(study.task).with_name("again.yaml")
    other.write_text(TASK.replace("name: letters", "name: again").replace("Text: ", "This: "))
    return Study(kind="transfer", model=study.model, tasks=[study.task, str(other)], shots=3, seed=1, **LARGE)


KINDS = ("sensitivity", "search", "curve", "convergence", "selection", "transfer", "race", "recommend")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_speaks_of_the_mean_grade(large, kind, tmp_path):
    keys = {"search": {"shots": 3}, "race": {"shots": 3}, "selection": {"select": 2}}.get(kind, {})
    study = large.of_kind(kind, **keys) if kind != "transfer" else over_two_tasks(large)
    run = iclperm.run(study, tmp_path / "run")
    words = words_of(told(run))
    assert any("mean F1" in each or "Mean F1" in each for each in words)
    assert [each for each in words if re.search(r"\baccura", each, re.IGNORECASE)] == []
    content = run.report_content()
    assert content["metric"] == {"name": "f1"}
    run.write_report(tmp_path / "report")
    page = write_page(run, tmp_path / "report").read_text()
    shown = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    assert not re.search(r"\baccura", shown, re.IGNORECASE)


def test_a_search_that_asks_as_it_goes_and_a_run_that_grows_take_grades(large, tmp_path):
    study = large.of_kind("search", shots=3, budget="adaptive", dev_queries=24)
    run = iclperm.run(study, tmp_path / "search")
    assert run.decisions
    assert run.findings().recommended is not None
    grown = iclperm.run(
        large.of_kind("sensitivity", shots=3, precision="accuracy +- 0.2", queries=24), tmp_path / "grown"
    )
    assert grown.looks
    assert [each for each in words_of(told(grown)) if re.search(r"\baccura", each, re.IGNORECASE)] == []


def test_what_is_exported_is_read_back_with_its_grades(study, tmp_path):
    run = iclperm.run(study, tmp_path / "run")
    for ending in ("csv", "jsonl", "parquet"):
        tensor = load([run.export(tmp_path / f"answers.{ending}")])
        assert tensor.is_graded
        is_there = True if tensor.state is None else tensor.state == OK
        assert np.allclose(tensor.values, np.where(is_there, run.correct, 0))
    logs = Path(run.export(tmp_path / "logs", "lm-eval"))
    file = next(logs.glob("*_k3_set1_perm2_*.jsonl"))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["f1"] for row in rows] == pytest.approx(run.correct[1, 2, 2].tolist())
    assert not any({"acc", "exact_match"} & row.keys() for row in rows)
    described = describe(load([*logs.glob("samples_*_k3_*.jsonl")]))
    (line,) = [line for line in described.warnings if "no report by class" in line]
    assert line.startswith("6 files: no report by class: the metric f1")
    log = load([file])
    assert np.allclose(log.values, run.correct[1, 2, 2])
    frame = run.to_pandas()
    assert frame["grade"].mean() == pytest.approx(run.correct.mean(), abs=1e-6)
    assert {"grade", "state"} == {*run.to_xarray().data_vars}


def test_texts_are_read_again_by_grades_and_into_grades(study, tmp_path):
    run = iclperm.run(study, tmp_path / "run")
    other = tmp_path / "all.yaml"
    other.write_text(re.sub(", rules: .*", "}", TASK).replace("name: letters", "name: all"))
    own, whole = run.read_by(other).readings
    assert own.accuracy == pytest.approx([at.unparsed_wrong for at in run.generation.by_shots], abs=1e-6)
    there = iclperm.run(study.model_copy(update={"task": str(other)}))
    assert whole.accuracy == pytest.approx([at.unparsed_wrong for at in there.generation.by_shots], abs=1e-6)
    lead = there.correct.astype(float) - run.correct
    assert (whole.gained, whole.lost) == pytest.approx(
        (np.maximum(lead, 0).mean(), np.maximum(-lead, 0).mean()), abs=1e-6
    )
    (line,) = run.asides["rereading"].conclusion()
    assert re.search(r": mean F1 \S+ by the run's own rules \(letters\), mean F1 \S+ by those of all\.$", line)
    other.write_text(re.sub("\nanswer: .*", "\nanswer: {field: letters, check: exact_match}", TASK))
    with pytest.raises(DataError, match=r"in the form that F1 compares, .* name a task of the check f1"):
        run.read_by(other)
    exact = iclperm.run(study.model_copy(update={"task": str(other)}), tmp_path / "exact")
    exact.read_by(study.task)
    (line,) = exact.asides["rereading"].conclusion()
    assert re.search(r": accuracy \S+ by the run's own rules \(letters\), mean F1 \S+ by those of letters\.$", line)
    shares, differ = exact.asides["rereading"].tables(full=True)
    assert [*shares.header] == ["k", "letters (accuracy)", "letters (mean F1)"]
    assert [*differ.header[2:]] == ["grade gained", "grade lost"]


def test_runs_with_grades_are_compared_as_such(study, tmp_path):
    one = iclperm.run(study, tmp_path / "one")
    other = iclperm.run(study.model_copy(update={"seed": 2}), tmp_path / "other")
    alike = iclperm.compare([one, other])
    sheets = [sheet.written("md") for sheet in alike.sheets().values()]
    said = [*alike.conclusion(), *alike.warnings, *sheets, *words_of_tables(alike.tables(True))]
    assert any("mean F1" in each for each in said)
    assert not any(re.search(r"\baccura", each, re.IGNORECASE) for each in said)
    assert not any("McNemar" in each for each in said)
    task = tmp_path / "exact.yaml"
    task.write_text(re.sub("\nanswer: .*", "\nanswer: {field: letters, check: exact_match}", TASK))
    mixed = iclperm.compare([one, iclperm.run(study.model_copy(update={"task": str(task)}))])
    assert any("the studies differ in 'metric'" in each for each in mixed.warnings)
    assert any("mean grade" in each for each in words_of_tables(mixed.tables(True)))


def words_of_tables(tables):
    return [words for each in tables for words in (each.title, *each.header, each.caption)]


def test_a_prompt_and_a_figure_are_told_with_the_mean_grade(study, tmp_path):
    run = iclperm.run(study, tmp_path / "run")
    prompt = run.prompt(index_set=1, permutation=2)
    assert any(line.startswith("mean F1 on 6 test queries") for line in prompt.said())
    assert prompt.accuracy == pytest.approx(run.correct[1, 2, 2].mean())
    assert prompt.interval == graded_mean(run.correct[1, 2, 2].astype(float))
    for figure in (iclperm.plot.curve(run), iclperm.plot.heat_map(run), iclperm.plot.heat_map(run, scale=(0, 1))):
        written = [text.get_text() for text in figure.findobj(Text)]
        assert not any(re.search(r"\baccura", each, re.IGNORECASE) for each in written)


def test_draws_of_one_prompt_have_the_variance_of_their_grades():
    draws = np.array([[[[[1.0, 0.5, 0.0]], [[0.25, 0.25, 1.0]]]]]).swapaxes(2, 3)  # [S, P, K, Q, draws]
    shape = draws.shape[:4]
    said = generation(
        np.zeros(shape, int), draws[..., 0], *[np.zeros(shape, int)] * 3, shots=[0], rules=["one"],
        num_right=draws.sum(axis=-1), num_draws=3, num_squares=(draws**2).sum(axis=-1), metric=Metric("f1"),
    )  # fmt: skip
    assert said.by_shots[0].draw_variance == pytest.approx(draws.var(axis=-1, ddof=1).mean())


def test_stored_grades_outside_their_range_are_damage(study):
    answers = GeneratedAnswers.empty(np.zeros((1, 2), np.uint8), 1, 1 << 20, Metric("f1"))
    rows = {"rule": ["one"] * 2, "finish": ["eos"] * 2, "num_tokens": [1, 1]}
    places = np.array([0, 0]), np.array([0, 1])
    filled = answers.filled(*places, pa.table({**rows, "grade": [0.5, None]}))
    assert filled.correct.tolist() == [[0.5, 0]]
    for wrong in (1.5, -0.1, float("nan")):
        with pytest.raises(ValueError, match=r"outside 0\.\.1"):
            answers.filled(*places, pa.table({**rows, "grade": [0.5, wrong]}))


def test_words_of_accuracy_are_said_of_the_grade():
    said = Metric("f1").said
    assert said("An accuracy; mean accuracy; Mean accuracies") == "A mean F1; mean F1; Mean F1s"
    assert said("by dev_accuracy, the most accurate") == "by dev_accuracy, the best"
    assert Metric("absolute_error", 2.0).said("Accuracy of inaccurate words") == "Mean grade of inaccurate words"


def test_squads_own_column_is_read_as_it_is_published(study, tmp_path):
    rows = [json.loads(line) for line in (tmp_path / "test.jsonl").read_text().splitlines()]
    nested = [{**row, "letters": {"text": row["letters"], "answer_start": [0, 3]}} for row in rows]
    for split in ("train", "test", "dev"):
        write_rows(tmp_path / f"{split}.jsonl", nested[:12] if split == "test" else nested[12:])
    (tmp_path / "letters.yaml").write_text(TASK.replace("letters[0]", "letters.text[0]"))
    task = Task.load(study.task)
    assert task.examples("test").answers == [golds_text(row["letters"]) for row in rows[:12]]
    assert "Answer: " + rows[12]["letters"][0] in task.render_demonstration(nested[12], 0)
