"""Tasks: data read strictly, templates that can do no harm, wording exactly as written."""

import csv
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tiny import LABELS, make_rows, make_task, write_rows

from iclperm import Task
from iclperm.errors import ConfigError, DataError
from iclperm.tasks import BUILTIN, template_text
from iclperm.tasks.loaders import read_rows

AG_NEWS = Path(__file__).parent / "data" / "ag_news"
COLUMNS = ("text", "label")


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


WRITERS = {".jsonl": write_rows, ".csv": write_csv, ".tsv": write_csv, ".parquet": write_parquet}


def test_mini_news_is_worded_exactly():
    task = Task.load("mini_news")
    train = task.examples("train")
    fields, label = train.fields[0], int(train.labels[0])
    assert task.render_demonstration(fields, label) == f"Article: {fields['text']}\nAnswer: {task.words[label]}"
    assert task.render_query(fields) == f"Article: {fields['text']}\nAnswer:"
    assert task.continuations() == [" World", " Sports", " Business", " Technology"]
    assert (task.separator, task.shots, task.opening()) == ("\n\n", 8, "")


def test_an_instruction_opens_the_prompt(tmp_path):
    task = Task.load(make_task(tmp_path, instruction="Name the colour."))
    assert task.opening() == "Name the colour.\n\n"


def test_labels_may_map_data_values_to_words(tmp_path):
    path = make_task(tmp_path, labels={0: "Red", 1: "Green"})
    write_rows(tmp_path / "train.jsonl", [{"text": "a", "label": 1}, {"text": "b", "label": 0}])
    task = Task.load(path)
    assert task.words == ("Red", "Green")
    assert task.examples("train").labels.tolist() == [1, 0]


def test_a_value_of_the_data_has_one_word(tmp_path):
    content = yaml.safe_load(make_task(tmp_path).read_text()) | {"labels": {0: "Red", "0": "Green"}}
    with pytest.raises(ConfigError, match="the data's label '0' is blank or occurs twice"):
        Task(**content)


def test_duplicate_content_is_read_once_and_counted(tmp_path):
    path = make_task(tmp_path)
    rows = [{"text": "One  Thing", "label": "Red"}, {"text": "one\nthing ", "label": "Blue"}]
    write_rows(tmp_path / "train.jsonl", [*rows, {"text": "another", "label": "Green"}])
    train = Task.load(path).examples("train")
    assert [fields["text"] for fields in train.fields] == ["One  Thing", "another"]
    assert (train.num_duplicates, train.num_conflicting, train.labels.tolist()) == (1, 1, [0, 1])


def test_duplicates_that_agree_do_not_conflict(tmp_path):
    path = make_task(tmp_path)
    write_rows(tmp_path / "train.jsonl", [{"text": text, "label": "Red"} for text in ("one", "ONE", "two")])
    train = Task.load(path).examples("train")
    assert (train.num_duplicates, train.num_conflicting) == (1, 0)


def test_rows_whose_query_reads_alike_are_one(tmp_path):
    path = make_task(tmp_path, query="Thing: {{ text.split('.')[0] }}\nColour:")
    rows = [{"text": f"Same. But not {n}", "label": "Red"} for n in range(3)]
    write_rows(tmp_path / "train.jsonl", rows)
    train = Task.load(path).examples("train")
    assert (len(train), train.num_duplicates) == (1, 2)


def test_a_row_that_cannot_be_rendered_is_named_by_file_and_line(tmp_path):
    path = make_task(tmp_path, query="{{ text.upper() }}")
    write_rows(tmp_path / "train.jsonl", [{"text": "a", "label": "Red"}, {"text": 5, "label": "Red"}])
    with pytest.raises(DataError, match=r"train\.jsonl:2: the template 'query' cannot be rendered"):
        Task.load(path).examples("train")


@pytest.mark.parametrize(("escaped", "is_nul"), [(r"\\u0000", False), (r"\u0000", True), (r"\\\u0000", True)])
def test_only_a_real_nul_is_refused(tmp_path, escaped, is_nul):
    path = make_task(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"text": "write ' + escaped + ' here", "label": "Red"}\n')
    if is_nul:
        with pytest.raises(DataError, match="NUL"):
            Task.load(path).examples("train")
    else:
        assert Task.load(path).examples("train").fields == [{"text": "write \\u0000 here"}]


def test_only_what_the_query_shows_counts_as_content(tmp_path):
    path = make_task(tmp_path, fields={"text": "text", "source": "source"})
    write_rows(tmp_path / "train.jsonl", [{"text": "a", "source": source, "label": "Red"} for source in "xy"])
    assert len(Task.load(path).examples("train")) == 1


def test_an_unknown_task_names_those_there_are():
    with pytest.raises(ConfigError, match=r"there is no task 'mini_nwes'; did you mean 'mini_news'\? built in: "):
        Task.load("mini_nwes")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a", "label": "Red"', "not one JSON object a line"),
        (b'["a"]', "a JSON object is needed, not list"),
        (b'{"text": "a", "label": "Purple"}', "'label' is 'Purple'; the labels are Red, Green, Blue"),
        (b'{"label": "Red"}', "the column 'text' is missing; the columns are 'label': name one of them"),
        (b'{"text": "a"}', "the column 'label' is missing; the columns are 'text'"),
        (b'{"text": null, "label": "Red"}', "the column 'text' holds no value"),
        (b'{"text": "a", "label": null}', "the column 'label' holds no value"),
        (b'{"text": "a", "label": " "}', "'label' is blank; the labels are Red, Green, Blue"),
        (b'{"text": "caf\xe9", "label": "Red"}', "not UTF-8 (byte 13 of the line)"),
        (b'{"text": "a\\ud800", "label": "Red"}', "lone surrogate"),
        (b'{"text": "a\\u0000", "label": "Red"}', "NUL"),
        (b'{"text": NaN, "label": "Red"}', "NaN is not JSON"),
        (b'{"text": "' + b"a" * (1 << 20) + b'", "label": "Red"}', "at most 1048576 are read"),
        (b"[" * 100_000, "not one JSON object a line"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path, line, message):
    path = make_task(tmp_path)
    (tmp_path / "train.jsonl").write_bytes(json.dumps(make_rows(1, 1)[0]).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(DataError) as error:
        Task.load(path).examples("train")
    assert str(error.value).startswith(f"{tmp_path / 'train.jsonl'}:3: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_data_that_is_missing_or_of_another_kind_is_named(tmp_path):
    path = make_task(tmp_path, data={"train": "absent.jsonl", "test": "test.xlsx"})
    task = Task.load(path)
    with pytest.raises(DataError, match=r"absent\.jsonl: cannot be read"):
        task.examples("train")
    with pytest.raises(DataError, match=r"test\.xlsx: cannot be read as data; give a \.jsonl, \.csv, \.tsv, \.parquet"):
        task.examples("test")
    with pytest.raises(ConfigError, match="task 'colours' has no 'dev' data"):
        task.examples("dev")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": ["Red", " "]}, "a label word is blank"),
        ({"labels": ["Red", "Red "]}, "the label word 'Red' occurs twice"),
        ({"labels": ["Red"]}, "'labels"),
        ({"labels": [True, False]}, "'labels"),
        ({"name": "../up"}, "'name' is '../up'"),
        ({"quary": "x"}, "a task has no key 'quary'; did you mean 'query'?"),
        ({"query": None}, "a task needs the key 'query'"),
        ({"labels": ["Red", 3]}, "a task's key 'labels.1' is 3: input should be a valid string"),
        ({"fields": {"text": "text", "label": "label"}}, "the name 'label' stands for the label's word"),
        ({"labels": "Red"}, "a task's key 'labels' is 'Red': input should be a valid list or a valid dict"),
        ({"data": {"train": "a"}}, "needs the key 'test'"),
        ({"data": {"train": "a", "tset": "b"}}, "has no key 'tset'; did you mean 'test'?"),
        (
            {"data": {"train": "a", "test": 1.0}},
            "a dataset's key 'test' is 1.0: give a share of train above 0 and below 1",
        ),
        ({"data": {"train": "a", "test": 0}}, "a dataset's key 'test' is 0: give a share of train above 0"),
        ({"data": {"train": "a", "test": True}}, "a dataset's key 'test' is True"),
        ({"data": {"train": 0.5, "test": "b"}}, "a dataset's key 'train' is 0.5"),
        ({"data": {"train": "a", "test": 0.5, "dev": 0.5}}, "test 0.5 and dev 0.5 leave nothing of train"),
        ({"data": {"train": "a", "test": "b", "config": "c"}}, "'revision' and 'config' belong to a 'dataset'"),
        ({"data": {"dataset": "o/n", "train": ["a"], "test": "b"}}, "name one split each; give no lists"),
        ({"data": {"dataset": "o/n", "revision": "main", "train": "a", "test": "b"}}, "a branch or a tag may point"),
        ({"data": {"dataset": "../n", "revision": "a" * 40, "train": "a", "test": "b"}}, "must be a hub name"),
        ({"data": {"train": "a", "test": 0.5, "dev": "0.5 of test"}}, "make dev a share of train"),
        ({"data": {"train": "a", "test": "b", "dev": "1.5 of test"}}, "give a share of train above 0 and below 1"),
        ({"data": {"train": "a", "test": "b", "keep": ["x"]}}, "name the column with the key 'choose'"),
        ({"data": {"train": "a", "test": "b", "choose": "c", "keep": []}}, "'keep' is []"),
        ({"data": {"dataset": "o/n", "config": [], "train": "a", "test": "b"}}, "'config' is []"),
        ({"labels": {0: "Red", " ": "Green"}}, "the data's label ' ' is blank"),
        ({"query": "{{ text }} {{ label }}"}, "the template 'query' uses 'label'; it may use text"),
        ({"query": "{{ txet }}"}, "the template 'query' uses 'txet'; it may use text"),
        ({"demonstration": "{{ text }}"}, "the template 'demonstration' does not show the label"),
        ({"continuation": "yes"}, "the template 'continuation' does not show the label"),
        ({"query": "{{ text"}, "the template 'query' is not valid"),
    ],
)
def test_a_wrong_task_file_is_one_line_naming_key_and_value(tmp_path, changes, message):
    path = make_task(tmp_path, **changes)
    with pytest.raises(ConfigError) as error:
        Task.load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in text %}{% for b in text %}{% for c in text %}x{% endfor %}{% endfor %}{% endfor %}",
        "{% set x = text ~ text %}{{ x }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% include 'x' %}",
        "{% for a in text recursive %}{{ loop(a) }}{% endfor %}",
        "{{ text * 1000000000 }}",
        "{{ 9 ** 9 ** 9 ** 9 }}",
        "{{ '%99999999d' | format(1) }}",
        "{{ text | center(1000000000) }}",
    ],
)
def test_a_template_that_could_grow_or_loop_is_refused(tmp_path, template):
    with pytest.raises(ConfigError, match="the template 'query'"):
        Task.load(make_task(tmp_path, query=template))


@pytest.mark.parametrize(
    "template",
    [
        "{{ text.__class__.__mro__ }}",
        "{{ text.ljust(1000000000) }}",
        "{{ text.format() }}",
        "{{ text.absent }}",
        "{{ ''.join(text) }}",
    ],
)
def test_a_template_reaches_nothing_but_the_row(tmp_path, template):
    task = Task.load(make_task(tmp_path, query=template + "{{ text }}"))
    with pytest.raises(DataError, match="the template 'query' cannot be rendered"):
        task.render_query({"text": "abc"})


def test_a_template_may_choose_loop_and_trim(tmp_path):
    loop = "{% for choice in choices %} {{ loop.index }}.{{ choice }}{% endfor %}"
    query = "{% if text %}{{ text.strip() | upper }}{% endif %}" + loop
    task = Task.load(make_task(tmp_path, query=query, fields={"text": "text", "choices": "choices"}))
    assert task.render_query({"text": " a ", "choices": ["x", "y"]}) == "A 1.x 2.y"


def test_a_huge_rendering_is_refused(tmp_path):
    task = Task.load(make_task(tmp_path, query="{% for a in text %}{{ text }}{% endfor %}"))
    with pytest.raises(DataError, match="renders more than 1048576 characters"):
        task.render_query({"text": "x" * 2_000})


GENERATED = {
    "labels": None,
    "fields": {"text": "text", "colour": "label"},
    "answer": {"field": "label", "check": "exact"},
    "demonstration": "Thing: {{ text }}\nColour: {{ colour }}",
    "stop": ["\n\n", "\nThing:"],
    "max_new_tokens": 5,
}


def test_a_generated_task_has_answers_instead_of_labels(tmp_path):
    task = Task.load(make_task(tmp_path, **GENERATED))
    assert task.is_generated
    assert (task.words, len(task.classes), task.continuations()) == ((), 1, [""])
    assert (task.stop, task.max_new_tokens) == (["\n\n", "\nThing:"], 5)
    train = task.examples("train")
    assert train.answers == [row["label"] for row in make_rows(1, 60)]
    assert train.labels.tolist() == [0] * 60
    fields = train.fields[0]
    assert task.render_query(fields) == f"Thing: {fields['text']}\nColour:"
    assert task.render_demonstration(fields, 0) == f"Thing: {fields['text']}\nColour: {train.answers[0]}"


def test_a_task_with_labels_has_their_words_as_answers(tmp_path):
    task = Task.load(make_task(tmp_path, labels={"Red": "red", "Green": "green", "Blue": "blue"}))
    assert not task.is_generated
    assert task.classes == task.words
    assert task.examples("test").answers[:3] == ["red", "green", "blue"]
    assert (task.stop, task.max_new_tokens) == (["\n"], None)


def test_answers_are_read_as_published_and_numbers_as_text(tmp_path):
    path = make_task(tmp_path, **GENERATED)
    rows = [{"text": "a", "label": 7}, {"text": "b", "label": "x\n#### 8 "}, {"text": "A", "label": 8}]
    write_rows(tmp_path / "train.jsonl", rows)
    train = Task.load(path).examples("train")
    assert train.answers == ["7", "x\n#### 8 "]
    assert (train.num_duplicates, train.num_conflicting) == (1, 1)


@pytest.mark.parametrize(("answer", "shown"), [(" ", "blank"), (["a"], "\"['a']\""), ({"a": 1}, "\"{'a': 1}\"")])
def test_an_answer_that_is_no_text_is_named_by_file_and_line(tmp_path, answer, shown):
    path = make_task(tmp_path, **GENERATED)
    write_rows(tmp_path / "train.jsonl", [{"text": "a", "label": "b"}, {"text": "b", "label": answer}])
    with pytest.raises(DataError) as error:
        Task.load(path).examples("train")
    assert str(error.value).endswith(f"train.jsonl:2: the answer 'label' is {shown}; give a text or a number")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": list(LABELS)}, "a task has the key 'answer' and the key 'labels', which is for tasks with labels"),
        ({"label_field": "label"}, "a task has the key 'answer' and the key 'label_field'"),
        ({"continuation": " {{ label }}"}, "a task has the key 'answer' and the key 'continuation'"),
        ({"max_new_tokens": None}, "a task with the key 'answer' needs the key 'max_new_tokens'"),
        ({"answer": None}, "a task needs the key 'labels', or the key 'answer' where the model writes its answer"),
        ({"answer": {"field": "label"}}, "needs the key 'check'"),
        ({"answer": {"field": "label", "check": "guess"}}, "'check' is 'guess'"),
        ({"answer": {"feild": "label"}}, "has no key 'feild'; did you mean 'field'?"),
        ({"query": "{{ text }} {{ colour }}"}, "the template 'query' shows 'colour', the column of the answer"),
        ({"demonstration": "{{ text }}"}, "the template 'demonstration' shows no more than 'query'"),
        ({"demonstration": "{{ text }} {{ label }}"}, "the template 'demonstration' uses 'label'; it may use colour"),
        ({"stop": []}, "'stop' is []"),
        ({"stop": [""]}, "'stop.0' is ''"),
        ({"max_new_tokens": 0}, "'max_new_tokens' is 0"),
    ],
)
def test_a_wrong_generated_task_is_one_line_naming_key_and_value(tmp_path, changes, message):
    path = make_task(tmp_path, **GENERATED | changes)
    with pytest.raises(ConfigError) as error:
        Task.load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_digest_follows_answers_that_no_template_shows(tmp_path):
    path = make_task(
        tmp_path, **GENERATED | {"fields": {"text": "text", "why": "why"}, "demonstration": "{{ text }} {{ why }}"}
    )

    def digest(answer: str) -> str:
        write_rows(tmp_path / "train.jsonl", [{"text": "a", "why": "b", "label": answer}])
        return Task.load(path).examples("train").digest

    assert digest("x") == digest("x") != digest("y")


def test_the_wording_hash_follows_how_answers_are_read(tmp_path):
    def hashed(**changes: Any) -> str:
        return Task.load(make_task(tmp_path, **GENERATED | changes)).wording_hash()

    original = hashed()
    assert hashed(description="another", shots=6) == original
    different = [
        hashed(
            answer={"field": "text", "check": "exact"},
            query="Thing:{{ colour }}",
            demonstration="{{ text }} {{ colour }}",
        ),
        hashed(answer={"field": "label", "check": "number"}),
        hashed(stop=["\n"]),
        hashed(max_new_tokens=6),
    ]
    assert len({original, *different}) == 5


def test_the_wording_hashes_of_tasks_with_labels_are_pinned():
    """Run folders of every version hold them: they may never change."""
    assert Task.load("ag_news").wording_hash().startswith("560938f24d46b086")
    assert Task.load("mini_news").wording_hash().startswith("8ccaaf24bc6c2395")
    assert Task.load("mini_news").examples("train").digest.startswith("b616e2e3c4d3d19d")


def test_where_generation_of_a_label_ends_is_wording_once_it_is_said(tmp_path):
    original = Task.load(make_task(tmp_path)).wording_hash()
    assert Task.load(make_task(tmp_path, max_new_tokens=4)).wording_hash() != original
    assert Task.load(make_task(tmp_path, stop=["."])).wording_hash() != original


def test_the_wording_hash_follows_the_wording_alone(tmp_path):
    original = Task.load(make_task(tmp_path)).wording_hash()
    informed = make_task(tmp_path, description="another", source="here", licence="none", shots=6)
    assert Task.load(informed).wording_hash() == original
    assert Task.load(make_task(tmp_path, separator="\n")).wording_hash() != original
    assert Task.load(make_task(tmp_path, labels=list(reversed(LABELS)))).wording_hash() != original


def test_labels_are_positions_on_the_label_axis(tmp_path):
    train = Task.load(make_task(tmp_path)).examples("train")
    assert train.labels.dtype == np.int64
    assert [LABELS[label] for label in train.labels] == [row["label"] for row in make_rows(1, 60)]


@pytest.mark.parametrize("suffix", WRITERS)
def test_the_same_data_is_the_same_in_every_format(tmp_path, suffix):
    rows = [*make_rows(1, 9), {"text": 'a "quoted", long\nline\ttab é', "label": "Red"}]
    write_rows(tmp_path / "expected.jsonl", rows)
    WRITERS[suffix](tmp_path / f"rows{suffix}", rows)
    task = Task.load(make_task(tmp_path, data={"train": "expected.jsonl", "test": f"rows{suffix}"}))
    expected, found = task.examples("train"), task.examples("test")
    assert found.fields == [{"text": row["text"]} for row in rows]
    assert (found.fields, found.hashes, found.digest) == (expected.fields, expected.hashes, expected.digest)
    assert found.labels.tolist() == expected.labels.tolist()


def test_the_digest_follows_fields_labels_and_order(tmp_path):
    path = make_task(tmp_path)

    def digest(rows: list[dict[str, Any]]) -> str:
        write_rows(tmp_path / "train.jsonl", rows)
        return Task.load(path).examples("train").digest

    rows = make_rows(1, 5)
    original = digest(rows)
    assert digest([row | {"more": 1} for row in rows]) == original
    assert digest(rows[::-1]) != original
    assert digest([rows[0] | {"label": "Blue"}, *rows[1:]]) != original
    assert digest([rows[0] | {"text": rows[0]["text"].upper()}, *rows[1:]]) != original


def test_the_place_of_a_row_is_where_it_begins(tmp_path):
    raw = b'\xef\xbb\xbftext,label\n"two\nlines",Red\n\nplain,Green\r\n"x",Blue\n'
    (tmp_path / "a.csv").write_bytes(raw)
    assert read_rows(tmp_path / "a.csv", COLUMNS) == [
        (f"{tmp_path / 'a.csv'}:2", {"text": "two\nlines", "label": "Red"}),
        (f"{tmp_path / 'a.csv'}:5", {"text": "plain", "label": "Green"}),
        (f"{tmp_path / 'a.csv'}:6", {"text": "x", "label": "Blue"}),
    ]
    write_parquet(tmp_path / "a.parquet", [{"text": "x", "label": 3, "other": "not read"}])
    assert read_rows(tmp_path / "a.parquet", COLUMNS) == [
        (f"{tmp_path / 'a.parquet'}:row 1", {"text": "x", "label": 3})
    ]


@pytest.mark.parametrize(
    ("raw", "place", "message"),
    [
        (b"text,label\na,Red\nb\n", ":3", "values in the row: 1, columns in the header: 2"),
        (b'text,label\n"a\nb",Red\nb,c,Red\n', ":4", "values in the row: 3, columns in the header: 2"),
        (b'text,label\na,Red\n"b,Red\nc,Red\n', ":3", "not valid CSV: unexpected end of data"),
        (b'text,label\n"a"b,Red\n', ":2", "not valid CSV: ',' expected after '\"'"),
        (b"text,label,text\na,Red,b\n", ":1", "the column name 'text' is blank or occurs twice"),
        (b"text,\na,Red\n", ":1", "the column name '' is blank or occurs twice"),
        (b"text,label\na,Red\ncaf\xe9,Red\n", ":3", "not UTF-8 (byte 20 of the file)"),
        (b"text,label\na\x00,Red\n", ":2", "holds a NUL character"),
        (b"text,label\n" + b"a" * (1 << 20) + b",Red\n", ":2", "at most 1048576 are read"),
        (b"text,label\n" + b"a" * (1 << 21) + b",Red\n", ":2", "field larger than field limit"),
        (b"text,colour\na,Red\n", ":2", "the column 'label' is missing; the columns are 'text', 'colour'"),
        (b"text,label\na,Red\nb,Purple\n", ":3", "'label' is 'Purple'; the labels are Red, Green, Blue"),
        (b"text,label\na,\n", ":2", "'label' is blank; the labels are Red, Green, Blue"),
        (b"text,label\n", "", "holds no rows"),
        (b"", "", "holds no rows"),
    ],
)
def test_a_damaged_table_is_named_by_file_and_line(tmp_path, raw, place, message):
    (tmp_path / "train.csv").write_bytes(raw)
    limit = csv.field_size_limit()
    with pytest.raises(DataError) as error:
        Task.load(make_task(tmp_path, data={"train": "train.csv", "test": "test.jsonl"})).examples("train")
    assert str(error.value).startswith(f"{tmp_path / 'train.csv'}{place}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    ("columns", "place", "message"),
    [
        ({"text": ["a", "b\0"], "label": ["Red", "Red"]}, ":row 2", "holds a NUL character"),
        ({"text": ["a", None], "label": ["Red", "Red"]}, ":row 2", "the column 'text' holds no value"),
        ({"text": [b"a"], "label": ["Red"]}, "", "the column 'text' holds binary"),
        ({"text": [1.0, float("nan")], "label": ["Red", "Red"]}, ":row 2", "holds a value that cannot be read"),
        ({"text": ["a"], "label": [True]}, ":row 1", "'label' is 'True'; the labels are Red, Green, Blue"),
        ({"text": ["a"], "colour": ["Red"]}, ":row 1", "the column 'label' is missing; the columns are 'text', 'col"),
        ({"text": pa.array([], "string"), "label": pa.array([], "string")}, "", "holds no rows"),
    ],
)
def test_a_parquet_file_that_does_not_fit_is_named_by_row(tmp_path, columns, place, message):
    pq.write_table(pa.table(columns), tmp_path / "train.parquet")
    with pytest.raises(DataError) as error:
        Task.load(make_task(tmp_path, data={"train": "train.parquet", "test": "test.jsonl"})).examples("train")
    assert str(error.value).startswith(f"{tmp_path / 'train.parquet'}{place}: ")
    assert message in str(error.value)


def test_a_damaged_parquet_file_is_one_line(tmp_path):
    whole = write_parquet(tmp_path / "train.parquet", make_rows(1, 60)).read_bytes()
    task = make_task(tmp_path, data={"train": "train.parquet", "test": "test.jsonl"})
    not_utf8 = whole.replace(b"The apple", b"The appl\xff")
    assert not_utf8 != whole
    for raw in (b"", b"PAR1", whole[: len(whole) // 2], b"text,label\na,Red\n", not_utf8):
        (tmp_path / "train.parquet").write_bytes(raw)
        with pytest.raises(DataError, match=r"train\.parquet: is damaged") as error:
            Task.load(task).examples("train")
        assert "\n" not in str(error.value)


def test_numbers_are_labels_but_a_decimal_point_is_not_dropped(tmp_path):
    path = make_task(tmp_path, labels={0: "Red", 1: "Green"}, data={"train": "a.csv", "test": "a.parquet"})
    write_parquet(tmp_path / "a.parquet", [{"text": "x", "label": 1}])
    (tmp_path / "a.csv").write_text("text,label\nx,1.0\n")
    assert Task.load(path).examples("test").labels.tolist() == [1]
    with pytest.raises(DataError, match=r"a\.csv:2: 'label' is '1\.0'; the labels are 0, 1"):
        Task.load(path).examples("train")


def test_several_files_are_one_split_in_sorted_order(tmp_path):
    rows = make_rows(1, 9)
    (tmp_path / "data").mkdir()
    for part in (2, 0, 1):
        write_parquet(tmp_path / "data" / f"train-{part}.parquet", rows[3 * part : 3 * part + 3])
    parts = [f"data/train-{part}.parquet" for part in range(3)]
    task = Task.load(make_task(tmp_path, data={"train": "data/train-*.parquet", "test": parts}))
    assert [fields["text"] for fields in task.examples("train").fields] == [row["text"] for row in rows]
    assert task.examples("test").digest == task.examples("train").digest
    task = Task.load(make_task(tmp_path, data={"train": "data/tarin-*.parquet", "test": "test.jsonl"}))
    with pytest.raises(DataError, match=r"tarin-\*\.parquet: no file matches"):
        task.examples("train")


def shared_out(folder: Path, rows: list[dict[str, Any]], **shares: float) -> dict[str, list[str]]:
    """The texts of every split of a task whose test, and perhaps dev, are shares of its train file."""
    path = make_task(folder, data={"train": "all.jsonl", **shares})
    write_rows(folder / "all.jsonl", rows)
    task = Task.load(path)
    return {split: [fields["text"] for fields in task.examples(split).fields] for split in ("train", *shares)}


def test_shares_part_the_content_whatever_its_order(tmp_path):
    rows = make_rows(1, 800)
    splits = shared_out(tmp_path, rows, test=0.3, dev=0.2)
    assert sorted(itertools.chain(*splits.values())) == sorted(row["text"] for row in rows)
    assert all(abs(len(splits[split]) - 800 * share) < 60 for split, share in zip(splits, (0.5, 0.3, 0.2), strict=True))
    again = shared_out(tmp_path, [row | {"text": row["text"].upper()} for row in reversed(rows)], test=0.3, dev=0.2)
    assert {split: sorted(text.upper() for text in texts) for split, texts in splits.items()} == {
        split: sorted(texts) for split, texts in again.items()
    }
    assert shared_out(tmp_path, rows, test=0.3)["test"] == splits["test"]
    assert set(shared_out(tmp_path, rows, test=0.4)["test"]) > set(splits["test"])


def test_duplicates_fall_on_one_side_and_are_counted_there(tmp_path):
    rows = make_rows(1, 60)
    splits = shared_out(tmp_path, rows, test=0.5)
    doubled = [*rows, *(row | {"text": f" {row['text'].upper()}"} for row in rows)]
    assert shared_out(tmp_path, doubled, test=0.5) == splits
    task = Task.load(tmp_path / "colours.yaml")
    for split, texts in splits.items():
        assert task.examples(split).num_duplicates == len(texts)


def test_dev_may_be_a_share_beside_a_test_file(tmp_path):
    task = Task.load(make_task(tmp_path, data={"train": "train.jsonl", "test": "test.jsonl", "dev": 0.25}))
    train, dev, test = (set(task.examples(split).hashes) for split in ("train", "dev", "test"))
    assert (len(train | dev), len(train & dev), len(test)) == (60, 0, 30)
    with pytest.raises(DataError, match="task 'colours': its shares leave the split 'dev' no rows"):
        Task.load(make_task(tmp_path, data={"train": "train.jsonl", "test": "test.jsonl", "dev": 1e-9})).examples("dev")


def test_ag_news_is_worded_as_published():
    task = Task.load("ag_news", data=AG_NEWS / "csv")
    train = task.examples("train")
    opening = "Classify the news articles into the categories of World, Sports, Business, and Technology.\n\n"
    text = train.fields[0]["text"]
    assert (task.opening(), task.shots, task.separator) == (opening, 8, "\n\n")
    assert task.render_demonstration({"text": text}, 3) == f"Article: {text}\nAnswer: Technology"
    assert task.render_query({"text": text}) == f"Article: {text}\nAnswer:"
    assert task.continuations() == [" World", " Sports", " Business", " Technology"]
    assert task.source
    assert task.licence


def test_ag_news_is_read_from_a_folder_as_it_is_on_the_hub():
    splits = ("train", "test", "dev")
    tables, hub = ([Task.load("ag_news", data=AG_NEWS / kind).examples(s) for s in splits] for kind in ("csv", "hub"))
    assert [found.digest for found in tables] == [found.digest for found in hub]
    train, test, dev = map(len, hub)
    assert (train + dev, test) == (64, 32)
    assert dev > 0


@pytest.fixture
def ag_news_from(tmp_path, monkeypatch):
    """Loads the wording of ag_news with other data; the cache of the datasets library is the test's own."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def load(**data: Any) -> Task:
        content = yaml.safe_load((BUILTIN / "ag_news.yaml").read_text(encoding="utf-8"))
        (tmp_path / "task.yaml").write_text(yaml.safe_dump(content | {"data": data}), encoding="utf-8")
        return Task.load(tmp_path / "task.yaml")

    return load


def test_a_dataset_folder_is_read_by_the_datasets_library(ag_news_from, capfd):
    task = ag_news_from(dataset=str(AG_NEWS / "hub"), train="train", test="test", dev=0.05)
    read = {split: task.examples(split) for split in ("train", "test", "dev")}
    assert "Generating" not in capfd.readouterr().err
    expected = Task.load("ag_news", data=AG_NEWS / "hub")
    assert {split: found.digest for split, found in read.items()} == {
        split: expected.examples(split).digest for split in read
    }


def test_a_dataset_without_the_split_or_the_column_says_so(ag_news_from):
    task = ag_news_from(dataset=str(AG_NEWS / "hub"), train="train", test="tset")
    with pytest.raises(DataError, match=r"the split 'tset' of the dataset .* cannot be loaded \(ValueError: .*; check"):
        task.examples("test")
    task = task.model_copy(update={"label_field": "topic"})
    with pytest.raises(DataError, match=r"hub\[train\]:row 1: the column 'topic' is missing; the columns are 'text'"):
        task.examples("train")


@pytest.mark.parametrize("silent_before", [False, True])
def test_a_hub_out_of_reach_is_one_line_and_progress_bars_are_given_back(ag_news_from, monkeypatch, silent_before):
    import datasets

    asked = []

    def load_dataset(*names: Any, **options: Any) -> None:
        asked.append((names, options, datasets.utils.are_progress_bars_disabled()))
        raise ConnectionError("Couldn't reach\nthe Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    if silent_before:
        datasets.utils.disable_progress_bars()
    task = ag_news_from(dataset="owner/name", revision="a" * 40, config="c", train="train", test="test")
    with pytest.raises(DataError, match=r"Couldn't reach the Hub.*give their folder with the study's key 'data'"):
        task.examples("test")
    assert asked == [(("owner/name",), {"name": "c", "split": "test", "revision": "a" * 40}, True)]
    assert datasets.utils.are_progress_bars_disabled() == silent_before
    datasets.utils.enable_progress_bars()


def test_a_hub_name_needs_a_commit_and_the_library(tmp_path, monkeypatch):
    data = {"dataset": "owner/name", "train": "train", "test": "test"}
    with pytest.raises(
        ConfigError, match=r"the dataset 'owner/name' is no folder at .*, and a hub name needs the key 'r"
    ):
        Task.load(make_task(tmp_path, data=data)).examples("train")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'iclperm\[hf\]'"):
        Task.load(make_task(tmp_path, data=data | {"revision": "a" * 40})).examples("train")


def test_dev_may_be_a_share_of_test(tmp_path):
    task = Task.load(make_task(tmp_path, data={"train": "train.jsonl", "test": "test.jsonl", "dev": "0.3 of test"}))
    train, dev, test = (set(task.examples(split).hashes) for split in ("train", "dev", "test"))
    assert (len(train), len(dev | test), len(dev & test)) == (60, 30, 0)
    assert 3 <= len(dev) <= 17


def test_only_the_rows_to_keep_are_read(tmp_path):
    data = {"train": "train.jsonl", "test": "test.jsonl", "dev": 0.3, "choose": "size", "keep": ["1", "3"]}
    path = make_task(tmp_path, data=data)
    rows = [row | {"size": number % 4} for number, row in enumerate(make_rows(1, 60))]
    write_rows(tmp_path / "train.jsonl", rows)
    task = Task.load(path)
    kept = [fields["text"] for split in ("train", "dev") for fields in task.examples(split).fields]
    assert sorted(kept) == sorted(row["text"] for row in rows if row["size"] in (1, 3))
    with pytest.raises(DataError, match=r"test\.jsonl:1: the column 'size' is missing"):
        task.examples("test")
    write_rows(tmp_path / "test.jsonl", [row | {"size": 1} for row in make_rows(2, 6)])
    with pytest.raises(DataError, match=r"the test data hold no size '3'; there are 1$"):
        task.examples("test")


@pytest.mark.parametrize("stem", ["dev", "valid", "validation"])
def test_a_folder_takes_the_place_of_the_task_s_data(tmp_path, stem):
    folder = tmp_path / "mine"
    (folder / "data").mkdir(parents=True)
    write_csv(folder / "train.csv", make_rows(3, 12))
    write_parquet(folder / "data" / "test-00000-of-00002.parquet", make_rows(4, 6))
    write_parquet(folder / "data" / "test-00001-of-00002.parquet", make_rows(5, 6))
    write_rows(folder / f"{stem}.jsonl", make_rows(6, 3))
    task = Task.load(make_task(tmp_path, data={"train": "absent.csv", "test": 0.5}), data=folder)
    texts = {split: [f["text"] for f in task.examples(split).fields] for split in ("train", "test", "dev")}
    assert texts["train"] == [row["text"] for row in make_rows(3, 12)]
    assert texts["test"] == [row["text"] for row in make_rows(4, 6) + make_rows(5, 6)]
    assert texts["dev"] == [row["text"] for row in make_rows(6, 3)]


def test_a_folder_falls_back_to_the_declared_share(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    write_csv(folder / "train.csv", make_rows(3, 60))
    declared = make_task(tmp_path, data={"train": "train.jsonl", "test": 0.5})
    task = Task.load(declared, data=str(folder))
    assert len(task.examples("train")) + len(task.examples("test")) == 60
    with pytest.raises(ConfigError, match="has no 'dev' data; name a file, or a share of train"):
        task.examples("dev")
    with pytest.raises(DataError, match=r"mine: holds no test data; add test\.csv"):
        Task.load(make_task(tmp_path), data=folder)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["train.csv", "train.jsonl"], "both 'train.csv' and 'train.jsonl' may be the train data; keep one"),
        (["train.parquet", "train-0.parquet"], "both 'train-0.parquet' and 'train.parquet' may be the train data"),
        (["train-00000-of-00003.parquet", "train-00002-of-00003.parquet"], "the train data has 2 of its 3 parts"),
        (["training.csv"], "holds no train data; add train.csv, or another of .jsonl, .csv, .tsv, .parquet"),
    ],
)
def test_a_folder_that_is_ambiguous_or_incomplete_is_refused(tmp_path, names, message):
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    with pytest.raises(DataError) as error:
        Task.load(make_task(tmp_path, data={"train": "a", "test": 0.5}), data=folder)
    assert str(error.value).startswith(str(folder))
    assert message in str(error.value)


def test_a_data_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match="absent: is not a folder"):
        Task.load(make_task(tmp_path), data=tmp_path / "absent")


@pytest.mark.parametrize("name", ["sentiment", "123", "null"])
def test_the_starter_works_as_it_stands(tmp_path, name):
    path = tmp_path / f"{name}.yaml"
    path.write_text(template_text(name), encoding="utf-8")
    rows = [{"text": f"Number {n} was fine", "label": ("negative", "positive")[n % 2]} for n in range(40)]
    write_csv(tmp_path / "train.csv", rows)
    task = Task.load(path)
    assert task.name == name
    train, test = task.examples("train"), task.examples("test")
    assert len(train) + len(test) == 40
    assert task.opening() == "Say whether the text is negative or positive.\n\n"
    text = train.fields[0]["text"]
    assert task.render_query({"text": text}) == f"Text: {text}\nAnswer:"
    assert task.render_demonstration({"text": text}, 1) == task.render_query({"text": text}) + task.continuations()[1]


def test_the_starter_of_a_generated_task_works_as_it_stands(tmp_path):
    path = tmp_path / "sums.yaml"
    path.write_text(template_text("sums", generated=True), encoding="utf-8")
    write_csv(tmp_path / "train.csv", [{"question": f"{n} and 1?", "answer": n + 1} for n in range(40)])
    task = Task.load(path)
    train, test = task.examples("train"), task.examples("test")
    assert len(train) + len(test) == 40
    assert task.is_generated
    assert train.answers[0] == str(train.fields[0]["answer"])
    assert task.render_demonstration(train.fields[0], 0) == (
        f"{task.render_query(train.fields[0])} {train.fields[0]['answer']}"
    )


@pytest.mark.parametrize("generated", [False, True])
def test_the_starters_explain_every_key(generated):
    keys = {line.split(":")[0].strip("# ") for line in template_text("x", generated).splitlines()}
    assert keys >= set(Task.model_fields) - ({"labels", "label_field", "continuation"} if generated else {"answer"})


@pytest.mark.parametrize("name", ["", "../x", "a\n", "a" * 65])
def test_a_name_that_no_task_can_have_starts_none(name):
    with pytest.raises(ConfigError, match="the task name"):
        template_text(name)


def test_a_task_file_of_lm_evaluation_harness_is_a_task(tmp_path):
    files = {"train": "train.jsonl", "test": "test.jsonl"}
    content = {
        "task": "colour_words",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files},
        "fewshot_split": "train",
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "Thing: {{text}}\nColour:",
        "doc_to_target": "{{label}}",
        "generation_kwargs": {"until": ["\n"], "do_sample": False},
    }
    make_task(tmp_path)
    path = tmp_path / "harness.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    task = Task.load(path)
    train = task.examples("train")
    assert (task.name, task.is_generated, task.stop) == ("colour_words", True, ["\n"])
    assert (
        task.render_demonstration(train.fields[0], 0) == f"Thing: {train.fields[0]['text']}\nColour: {train.answers[0]}"
    )
    path.write_text(yaml.safe_dump(content | {"process_docs": "f"}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"harness\.yaml: .*'process_docs'"):
        Task.load(path)
    path.write_text("task: x\ndoc_to_text: !function utils.text\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"harness\.yaml: .*!function"):
        Task.load(path)


def test_importing_tasks_loads_no_library_of_data():
    script = "import sys, iclperm.tasks; print({'datasets', 'pyarrow', 'pandas', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@given(texts=st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1))
def test_any_text_comes_back_from_a_table_as_it_was(tmp_path_factory, texts):
    rows = [{"text": text, "label": str(number)} for number, text in enumerate(texts)]
    folder = tmp_path_factory.mktemp("tables")
    for suffix in (".csv", ".tsv", ".parquet"):
        path = WRITERS[suffix](folder / f"rows{suffix}", rows)
        assert [row for _, row in read_rows(path, COLUMNS)] == rows
