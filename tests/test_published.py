"""The built-in tasks' data as their authors publish them, read as the data sets that the tasks name."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import make_rows, make_task, write_csv, write_rows

from iclperm import Study, plan
from iclperm.errors import DataError
from iclperm.tasks import Task

WORDS = [f"story {number} of the {thing}" for number in range(12) for thing in ("river", "town", "sea", "hill")]


def write_raw(path: Path, rows: Sequence[Sequence[Any]]) -> Path:
    """A CSV file without a line of names, every value quoted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
    return path


def news(split: str, count: int, classes: int = 4) -> list[tuple[int, str, str]]:
    return [
        (1 + number % classes, f"Title {number}, {split}", f'{WORDS[number % 48]} "{split}" {number}, \\a')
        for number in range(count)
    ]


def digests(task: Task) -> list[str]:
    return [task.examples(split).digest for split in ("train", "test", "dev")]


def test_ag_news_reads_as_on_the_hub(tmp_path: Path) -> None:
    for split, count in (("train", 80), ("test", 20)):
        rows = news(split, count)
        write_raw(tmp_path / "raw" / f"{split}.csv", rows)
        (tmp_path / "hub").mkdir(exist_ok=True)
        hub = [{"text": f"{title} {text}", "label": number - 1} for number, title, text in rows]
        write_rows(tmp_path / "hub" / f"{split}.jsonl", hub)
    raw, hub = (Task.load("ag_news", tmp_path / name) for name in ("raw", "hub"))
    assert digests(raw) == digests(hub)
    assert raw.wording_hash() == hub.wording_hash()
    assert raw.data.notes == hub.data.notes == []


def test_dbpedia_shows_its_abstracts(tmp_path: Path) -> None:
    for split, count in (("train", 400), ("test", 28)):
        write_raw(tmp_path / f"{split}.csv", news(split, count, 14))
    task = Task.load("dbpedia", tmp_path)
    test = task.examples("test")
    assert test.answers[:2] == ["Company", "School"]
    assert test.fields[0] == {"content": 'story 0 of the river "test" 0, \\a'}


def test_mmlu_takes_subjects_from_the_files_names(tmp_path: Path) -> None:
    for split, count in (("dev", 5), ("val", 8), ("test", 30)):
        for subject in ("anatomy", "world_religions"):
            rows = [
                (f"{subject} {split} {number}?", "1", "2,0", "3", "4", "ABCD"[number % 4]) for number in range(count)
            ]
            write_raw(tmp_path / "data" / split / f"{subject}_{split}.csv", rows)
    task = Task.load("mmlu", tmp_path)
    assert [len(task.examples("train")), len(task.examples("test")) + len(task.examples("dev"))] == [26, 60]
    part = Task.load("mmlu:anatomy", tmp_path).examples("train")
    assert len(part) == 13
    assert part.fields[1] == {"question": "anatomy dev 1?", "choices": ["1", "2,0", "3", "4"]}
    assert part.answers[1] == "B"
    alone = Task.load("mmlu", tmp_path / "data" / "test" / "anatomy_test.csv")
    assert sum(len(alone.examples(split)) for split in ("train", "test", "dev")) == 30


def test_math_is_read_from_its_folders(tmp_path: Path) -> None:
    for split, count in (("train", 30), ("test", 4)):
        for subject in ("algebra", "geometry"):
            folder = tmp_path / "MATH" / split / subject
            folder.mkdir(parents=True)
            for number in range(count):
                problem = {"problem": f"{subject} {split} {number}", "level": "Level 1", "type": subject.title()}
                (folder / f"{number}.json").write_text(json.dumps(problem | {"solution": r"\boxed{1}"}, indent=1))
    task = Task.load("math", tmp_path)
    assert len(task.examples("test")) == 8
    assert len(task.examples("train")) + len(task.examples("dev")) == 60
    assert len(Task.load("math:Geometry", tmp_path).examples("test")) == 4
    (tmp_path / "MATH" / "test" / "algebra" / "0.json").write_text("{")
    with pytest.raises(DataError, match=r"algebra/0\.json:1: not one JSON object"):
        Task.load("math", tmp_path).examples("test")


def test_x_class_folders_name_their_classes(tmp_path: Path) -> None:
    folder = tmp_path / "NYT-Topics"
    folder.mkdir()
    names = ["sports", "arts"]
    (folder / "classes.txt").write_text("\n".join(names) + "\n")
    (folder / "dataset.txt").write_text("".join(f"{word}.\u2028 Then more.\n" for word in WORDS), encoding="utf-8")
    (folder / "labels.txt").write_text("".join(f"{number % 2}\n" for number in range(48)))
    task = Task.load("nyt_topics", tmp_path)
    train, test, dev = (task.examples(split) for split in ("train", "test", "dev"))
    assert len(train) + len(test) + len(dev) == 48
    numbers = [next(row for row, word in enumerate(WORDS) if text["text"].startswith(word)) for text in train.fields]
    assert train.answers == [names[number % 2] for number in numbers]
    assert task.data.notes == []  # the shares are the task's own
    (folder / "labels.txt").write_text("0\n" * 47 + "2\n")
    with pytest.raises(
        DataError, match=r"labels.txt:48: '2' is no number of one of the 2 lines of classes.txt, from 0 on"
    ):
        Task.load("nyt_topics", folder).examples("train")
    (folder / "labels.txt").write_text("0\n")
    with pytest.raises(DataError, match=r"dataset.txt: has 48 lines, but labels.txt 1; fetch the folder again"):
        Task.load("nyt_topics", folder).examples("train")


def ag_news_file(folder: Path) -> tuple[str, Path]:
    (folder / "readme.txt").write_text("terms")
    write_raw(folder / "test.csv", news("test", 200))
    return "ag_news", folder


def gsm8k_file(folder: Path) -> tuple[str, Path]:
    rows = [{"question": f"{word}?", "answer": f"{number} #### {number}"} for number, word in enumerate(WORDS)]
    return "gsm8k", write_rows(folder / "test.jsonl", rows)


def own_file(folder: Path) -> tuple[str, Path]:
    return str(make_task(folder)), write_csv(folder / "mine.csv", make_rows(3, 90))


@pytest.mark.parametrize("make", [ag_news_file, gsm8k_file, own_file])
def test_one_file_is_split_by_content_and_the_plan_says_so(
    tmp_path: Path, make: Callable[[Path], tuple[str, Path]]
) -> None:
    name, data = make(tmp_path)
    task = Task.load(name, data)
    splits = [set(task.examples(split).hashes) for split in ("train", "test", "dev")]
    assert len(set.union(*splits)) == sum(map(len, splits))
    assert all(splits)
    file = "test.csv" if name == "ag_news" else data.name
    said = (
        f"the data are one file, {file}: its rows are split by their content into train (50%), test (30%) and dev (20%)"
    )
    assert task.data.notes == [f"{said}, the same for every seed"]
    planned = plan(Study(task=name, data=str(data), model="demo", sets=2, permutations=2, queries=8, shots=4))
    assert planned.notes == tuple(task.data.notes)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [(1, "a", "b"), (5, "a", "b")],
            r"test.csv:2: class 1 to 4, title and description are needed, not 3 values that",
        ),
        ([(1, "a", "b"), (2, "a")], r"test.csv:2: .* not 2 values that begin with '2'; repair the row"),
    ],
)
def test_a_damaged_row_is_named(tmp_path: Path, rows: list[Any], message: str) -> None:
    write_raw(tmp_path / "test.csv", rows)
    with pytest.raises(DataError, match=message):
        Task.load("ag_news", tmp_path).examples("train")


@pytest.mark.parametrize("content", ["", "9,A title,A text\n", ",A title,A text\n", "class,title,text\n1,A,B\n"])
def test_a_file_that_does_not_begin_as_published_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "test.csv").write_text(content)
    with pytest.raises(DataError, match=r"description\), as which test.csv here does not begin; of one file"):
        Task.load("ag_news", tmp_path)


def test_what_was_looked_for_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    theirs = r"train.csv and test.csv without a line of names \(class 1 to 4, title, description\)"
    with pytest.raises(DataError, match=f"holds no train data; .*, or what its authors publish, {theirs}; of one"):
        Task.load("ag_news", tmp_path)
    with pytest.raises(
        DataError, match=r"notes.txt: cannot be read as data; give a .jsonl, .* file, or the folder of "
    ):
        Task.load("nyt_topics", tmp_path / "notes.txt")
    for number in range(2):
        write_raw(tmp_path / "test" / f"s{number}_test.csv", [("q?", "1", "2", "3", "4", "A")])
    with pytest.raises(DataError, match=r"holds the test data alone of dev/, val/ and test/ with SUBJECT_dev.csv"):
        Task.load("mmlu", tmp_path)


@given(st.lists(st.tuples(st.integers(1, 4), st.text(max_size=9), st.text(max_size=9)), min_size=1, max_size=9))
def test_any_text_comes_through(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, str, str]]) -> None:
    kept = [row for row in rows if all(text.isprintable() for text in row[1:])]
    folder = tmp_path_factory.mktemp("any")
    write_raw(folder / "test.csv", [*kept, (1, "the", "last")])
    task = Task.load("ag_news", folder)
    read = [row for _, row in task.data.rows(folder, "train", ["text", "label"])]
    assert read == [{"label": n - 1, "text": f"{a} {b}"} for n, a, b in [*kept, (1, "the", "last")]]
