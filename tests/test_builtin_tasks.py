"""The built-in tasks on small data with the columns, types and file names that are published."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner
from tiny import write_rows

from iclperm import Study, Task
from iclperm.cli import main as cli
from iclperm.errors import ConfigError, DataError
from iclperm.prompts.design import draw
from iclperm.prompts.render import prompt_text
from iclperm.tasks.answers import open_checker
from iclperm.tasks.task import BUILTIN, builtin_tasks

FIXTURES = Path(__file__).parent / "fixtures"
HUB = ("dbpedia", "mmlu", "gsm8k", "mmlu_pro", "math")
MADE = ("nyt_topics", "nyt_locations", *HUB)

# Name: train rows (dev taken out), test rows, dev rows, classes, k.
SIZES = {
    "nyt_topics": (45, 18, 18, 9, 18),
    "nyt_locations": (50, 20, 20, 10, 20),
    "dbpedia": (83, 28, 1, 14, 28),
    "mmlu": (60, 38, 10, 4, 8),
    "gsm8k": (18, 12, 2, 1, 8),
    "mmlu_pro": (12, 23, 1, 1, 8),
    "math": (19, 7, 2, 1, 8),
}

# Name: what opens a prompt, a query, what a demonstration adds to it. Of the fields (f) and the right answer (a).
WORDED: dict[str, tuple[str, Callable[[Any], str], Callable[[Any, str], str]]] = {
    "nyt_topics": (
        "Classify the text into one of the following categories: business, politics, sports, health, education, "
        "estate, arts, science, technology.",
        lambda f: f"Text: {f['text'].removesuffix(' The report ends here.')}\nCategory:",
        lambda f, a: f" {a}",
    ),
    "nyt_locations": (
        "Classify the text into one of the following categories: america, iraq, japan, china, britain, russia, "
        "germany, canada, france, italy.",
        lambda f: f"Text: {f['text'].removesuffix(' The report ends here.')}\nCategory:",
        lambda f, a: f" {a}",
    ),
    "dbpedia": (
        "Classify the documents based on whether they are about a Company, School, Artist, Athlete, Politician, "
        "Transportation, Building, Nature, Village, Animal, Plant, Album, Film, or Book.",
        lambda f: f"Article: {f['content'][1:]}\nCategory:",
        lambda f, a: f" {a}",
    ),
    "mmlu": (
        "The following are multiple choice questions (with answers).",
        lambda f: "{}\nA. {}\nB. {}\nC. {}\nD. {}\nAnswer:".format(f["question"], *f["choices"]),
        lambda f, a: f" {a}",
    ),
    "gsm8k": (
        "As an expert problem solver solve step by step the following mathematical questions.",
        lambda f: f"Q: {f['question']}\nA:",
        lambda f, a: f" {a}",
    ),
    "mmlu_pro": (
        "The following are multiple choice questions (with answers). Think step by step and then finish your answer "
        'with "the answer is (X)" where X is the correct letter choice.',
        lambda f: "\n".join(
            [
                f"Question:\n{f['question']}\nOptions:",
                *(f"{letter}. {option}" for letter, option in zip("ABCDEFGHIJ", f["options"], strict=False)),
                "A: Let's think step by step.",
            ]
        ),
        lambda f, a: f["thoughts"].removeprefix("A: Let's think step by step."),
    ),
    "math": (
        "Solve the following mathematics problems step by step. Put the final answer in \\boxed{}.",
        lambda f: f"Problem: {f['problem']}\nSolution:",
        lambda f, a: f" {a}",
    ),
}


def read(task: Task) -> dict[str, Any]:
    return {split: task.examples(split) for split in ("train", "test", "dev")}


def test_all_tasks_of_the_papers_are_built_in():
    assert builtin_tasks() == sorted(["ag_news", "mini_news", *MADE])


@pytest.mark.parametrize("name", ["ag_news", *MADE])
def test_a_built_in_task_says_where_its_data_are(name):
    task = Task.load(name)
    assert task.description
    assert task.source
    assert task.licence
    assert bool(task.data.revision) == (task.data.obtain is None)
    assert task.data.dev is not None
    assert task.shots == (8 if task.is_generated else 2 * len(task.words))


@pytest.mark.parametrize("name", MADE)
def test_a_task_reads_a_folder_as_published(name):
    task = Task.load(name, data=FIXTURES / name)
    splits = read(task)
    assert (*map(len, splits.values()), len(task.classes), task.shots) == SIZES[name]
    assert all(found.num_duplicates == 0 for found in splits.values())
    known = [content for found in splits.values() for content in found.hashes]
    assert len(set(known)) == len(known)


def test_one_folder_serves_all_tasks():
    for name in MADE:
        assert Task.load(name, data=FIXTURES).examples("test").digest == (
            Task.load(name, data=FIXTURES / name).examples("test").digest
        )
    assert len(Task.load("mmlu:virology", data=FIXTURES).examples("train")) == 20


@pytest.mark.parametrize("name", HUB)
def test_the_datasets_library_reads_the_same(name, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    content = yaml.safe_load((BUILTIN / f"{name}.yaml").read_text(encoding="utf-8"))
    content["data"] |= {"dataset": str(FIXTURES / name), "revision": None}
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    splits = ("train", "test", "dev") if name in ("mmlu", "math") else ("train", "test")
    through_library, of_folder = Task.load(tmp_path / "task.yaml"), Task.load(name, data=FIXTURES / name)
    assert [through_library.examples(split).digest for split in splits] == [
        of_folder.examples(split).digest for split in splits
    ]


@pytest.mark.parametrize("name", MADE)
def test_a_prompt_is_worded_exactly(name):
    task = Task.load(name, data=FIXTURES / name)
    examples = read(task)
    design = draw(Study(sets=1, permutations=1, shots=1, queries=4), task, examples)
    opening, query, rest = WORDED[name]
    train, test = examples["train"], examples["test"]
    (shown,), asked = design.demonstrations(0, 0, 0), design.queries[0].rows[2]
    text = prompt_text(design, task, examples, cell=(0, 0, 0, 2))
    fields, answer = train.fields[shown], train.answers[shown]
    assert text.context == f"{opening}\n\n{query(fields)}{rest(fields, answer)}\n\n"
    assert text.query == query(test.fields[asked])
    assert text.continuations == ([f" {word}" for word in task.words] or [""])


@pytest.mark.parametrize("name", MADE)
def test_a_set_of_the_default_size_is_balanced_and_in_default_order(name):
    task = Task.load(name, data=FIXTURES / name)
    examples = read(task)
    queries = {"queries": 2 * len(task.classes), **({} if name == "dbpedia" else {"dev_queries": len(task.words) or 1})}
    design = draw(Study(sets=3, permutations=3, **queries), task, examples)
    train = examples["train"]
    assert design.orderings[0].sets.shape == (3, task.shots)
    for rows in design.orderings[0].sets:
        assert len(set(np.bincount(train.labels[rows], minlength=len(task.classes)))) == 1
        shown = [
            (
                train.answers[row] if task.words else "",
                task.render_demonstration(train.fields[row], int(train.labels[row])),
            )
            for row in rows
        ]
        assert shown == sorted(shown)


@pytest.mark.parametrize(
    ("name", "right", "wrong", "unreadable"),
    [
        ("gsm8k", "Ada has 2 + 3 = 5 pens.\n#### {}", "#### 1000", "I do not know."),
        ("mmlu_pro", " 1 plus 2 is 3. The answer is ({}).", "The answer is (J).", "None of these."),
        ("math", "It is $1/2$, so the answer is $\\boxed{{{}}}$.", "$\\boxed{1000}$", "I do not know."),
    ],
)
def test_answers_are_read_as_the_task_says(name, right, wrong, unreadable):
    if name == "math":
        pytest.importorskip("math_verify")
    task = Task.load(name, data=FIXTURES / name)
    golds = sorted(set(task.examples("train").answers + task.examples("test").answers))[:4]
    assert task.answer is not None
    with open_checker(task.answer) as checker:
        for gold in golds:
            texts = [right.format(checker.canonical_gold(gold)), gold, wrong, unreadable]
            judged = checker.judge(texts, [gold] * len(texts))
            assert [judgement.is_correct for judgement in judged] == [True, True, False, False], judged
            assert [judgement.answer is None for judgement in judged] == [False, False, False, True], judged


def test_a_question_of_ten_options_has_ten_letters():
    task = Task.load("mmlu_pro", data=FIXTURES / "mmlu_pro")
    widest = max(task.examples("train").fields, key=lambda fields: len(fields["options"]))
    assert len(widest["options"]) == 10
    assert f"\nJ. {widest['options'][9]}\nA: Let's" in task.render_query(widest)


def test_a_question_without_published_thoughts_is_shown_with_its_letter():
    task = Task.load("mmlu_pro", data=FIXTURES / "mmlu_pro")
    fields = task.examples("test").fields[0]
    assert fields["thoughts"] == ""
    assert task.render_demonstration(fields, 0) == (f"{task.render_query(fields)} The answer is ({fields['answer']}).")


def test_news_is_cut_to_one_sentence_of_fifty_words():
    task = Task.load("nyt_topics")
    assert task.render_query({"text": " Ab, cd. De e. F g.\n"}) == "Text: Ab, cd.\nCategory:"
    text = "Mr. Smith of Acme Inc. left the U.S. Open at 5 p.m. on Monday. He lost."
    assert task.render_query({"text": text}) == f"Text: {text.removesuffix(' He lost.')}\nCategory:"
    assert task.render_query({"text": "w " * 60}) == f"Text: {' '.join(['w'] * 50)}\nCategory:"


@pytest.mark.parametrize("name", ["nyt_topics", "nyt_locations"])
def test_a_task_whose_data_cannot_come_with_it_says_how_to_get_them(name):
    with pytest.raises(DataError, match=r"there is no 'train\.jsonl' in .*; .*docs/tasks\.md.* with the key 'data'$"):
        Task.load(name).examples("train")


@pytest.mark.parametrize(
    ("name", "column", "values", "own_name"),
    [
        ("mmlu:anatomy", "subject", {"anatomy"}, "mmlu-anatomy"),
        ("mmlu:anatomy, virology", "subject", {"anatomy", "virology"}, "mmlu-anatomy-virology"),
        ("mmlu_pro:math", "category", {"math"}, "mmlu_pro-math"),
        ("math:Counting & Probability", "type", {"Counting & Probability"}, "math-Counting_Probability"),
    ],
)
def test_a_part_of_a_task_is_chosen_by_name(name, column, values, own_name):
    whole, _, _ = name.partition(":")
    folder = FIXTURES / whole
    task = Task.load(name, data=folder)
    assert task.name == own_name
    wanted = {
        row["question" if whole != "math" else "problem"]
        for path in folder.rglob("test-*.parquet")
        for row in pq.read_table(path).to_pylist()
        if row[column] in values
    }
    parts = [task.examples("test"), *([task.examples("dev")] if whole == "mmlu" else [])]
    found = {fields.get("question", fields.get("problem")) for part in parts for fields in part.fields}
    assert found == wanted if whole != "mmlu_pro" else found <= wanted
    assert task.examples("train").digest != Task.load(whole, data=folder).examples("train").digest
    assert task.wording_hash() == Task.load(whole).wording_hash()


def test_long_choices_have_names_of_their_own():
    names = [Task.load(f"mmlu:{','.join(['abstract_algebra'] * count)}").name for count in (3, 4, 5)]
    assert len(set(names)) == 3
    assert max(map(len, names)) == 64


def test_a_part_that_is_not_there_is_refused_by_name():
    with pytest.raises(DataError, match="the test data hold no subject 'anatmy'; there are anatomy, astronomy, vir"):
        Task.load("mmlu:anatmy", data=FIXTURES / "mmlu").examples("test")
    with pytest.raises(ConfigError, match="followed by ':' and a blank subject; name one"):
        Task.load("mmlu:")
    with pytest.raises(ConfigError, match="task 'gsm8k' has no parts to choose from; give its name alone"):
        Task.load("gsm8k:main")


def test_a_folder_with_files_of_one_s_own_serves_as_well(tmp_path):
    write_rows(tmp_path / "train.jsonl", [{"question": f"{n}?", "answer": f"#### {n}"} for n in range(9)])
    write_rows(tmp_path / "test.jsonl", [{"question": "10?", "answer": "#### 10"}])
    write_rows(tmp_path / "dev.jsonl", [{"question": "11?", "answer": "#### 11"}])
    task = Task.load("gsm8k", data=tmp_path)
    assert [len(task.examples(split)) for split in ("train", "test", "dev")] == [9, 1, 1]
    shutil.copytree(FIXTURES / "mmlu" / "all", tmp_path / "flat")
    flat, published = (Task.load("mmlu", data=path) for path in (tmp_path / "flat", FIXTURES / "mmlu"))
    assert flat.examples("dev").digest == published.examples("dev").digest


def test_files_of_one_s_own_come_before_those_named_as_published(tmp_path):
    shutil.copytree(FIXTURES / "mmlu_pro", tmp_path, dirs_exist_ok=True)
    whole = Task.load("mmlu_pro", data=tmp_path).examples("train")
    shutil.move(tmp_path / "data" / "validation-00000-of-00001.parquet", tmp_path / "train.parquet")
    rows = pq.read_table(tmp_path / "train.parquet").slice(0, 3)
    pq.write_table(rows, tmp_path / "data" / "validation-00000-of-00001.parquet")
    task = Task.load("mmlu_pro", data=tmp_path)
    assert task.examples("train").digest == whole.digest
    assert len(task.examples("dev")) == 3


def test_an_incomplete_folder_names_the_data_set(tmp_path):
    shutil.copytree(FIXTURES / "math", tmp_path / "math")
    (tmp_path / "math" / "geometry" / "test-00000-of-00001.parquet").unlink()
    with pytest.raises(DataError, match=r"holds no train data; .* or the files of EleutherAI/hendrycks_math as they"):
        Task.load("math", data=tmp_path / "math")


@pytest.mark.parametrize(
    ("name", "split", "column", "value", "message"),
    [
        ("mmlu", "test", "answer", 4, ":row 3: 'answer' is '4'; the labels are 0, 1, 2, 3"),
        ("gsm8k", "train", "answer", "", ":row 3: the answer 'answer' is blank; give a text or a number"),
        ("gsm8k", "train", "answer", None, ":row 3: the column 'answer' holds no value"),
        ("dbpedia", "train", "label", 14, ":row 3: 'label' is '14'; the labels are 0, 1, 2"),
        ("mmlu_pro", "test", "question", None, ":row 3: the column 'question' holds no value"),
    ],
)
def test_a_row_that_does_not_fit_is_named_by_file_and_row(tmp_path, name, split, column, value, message):
    folder = Path(shutil.copytree(FIXTURES / name, tmp_path / name))
    (path,) = folder.rglob(f"{split}-*.parquet")
    table = pq.read_table(path)
    rows = table.to_pylist()
    rows[2][column] = value
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    task = Task.load(name, data=folder)
    with pytest.raises(DataError) as error:
        task.examples(split)
    assert str(error.value).startswith(f"{path}{message}")


@pytest.mark.parametrize("name", HUB)
def test_a_column_that_is_missing_is_named(tmp_path, name):
    folder = Path(shutil.copytree(FIXTURES / name, tmp_path / name))
    path = sorted(folder.rglob("test-*.parquet"))[0]
    table = pq.read_table(path)
    task = Task.load(name, data=folder)
    column = task.answer.field if task.answer else task.label_field
    pq.write_table(table.drop_columns([column]), path)
    with pytest.raises(DataError, match=rf"{path.name}:row 1: the column '{column}' is missing; the columns are "):
        task.examples("test")


DOCS = (Path(__file__).resolve().parents[1] / "docs" / "tasks.md").read_text(encoding="utf-8")


def test_the_page_lists_every_task_as_it_is():
    rows = {
        row[0].strip(" `"): row
        for row in (line.strip("|").split("|") for line in DOCS.splitlines() if "| `" in f"|{line[1:]}")
    }
    for name in builtin_tasks():
        task = Task.load(name)
        assert name in rows, name
        assert rows[name][-2].strip() == str(task.shots)
        assert rows[name][-3].strip() == (f"{len(task.words)} labels" if task.words else task.answer.check)
        if task.data.dataset:
            assert task.data.dataset in DOCS
            assert str(task.data.revision) in DOCS


def test_the_commands_of_the_page_exist():
    lines = [line.split("#")[0].split() for line in DOCS.splitlines() if line.strip().startswith("iclperm ")]
    runs = [line for line in lines if line[1] == "run"]
    named = {line[line.index("--task") + 1] for line in runs if "--task" in line and "--kind" not in line}
    assert {name for name in named if not name.endswith(".yaml")} == {"ag_news", *MADE}
    shown = CliRunner().invoke(cli.cli, ["run", "--help"]).output
    for line in runs:
        choices = {
            word.removeprefix("--").replace("-", "_"): line[place + 1]
            for place, word in enumerate(line)
            if word.startswith("--")
        }
        assert all(f"--{key.replace('_', '-')} " in shown for key in choices), line
        choices["tasks"] = choices["tasks"].split(",") if "tasks" in choices else None
        assert (
            Study(**{key: value for key, value in choices.items() if value is not None}).kind in line
            or "--kind" not in line
        )
