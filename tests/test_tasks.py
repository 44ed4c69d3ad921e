"""Tasks: data read strictly, templates that can do no harm, wording exactly as written."""

import json

import numpy as np
import pytest
from tiny import LABELS, make_rows, make_task, write_rows

from iclperm import Task
from iclperm.errors import ConfigError, DataError


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
    with pytest.raises(ConfigError, match=r"there is no task 'mini_nwes'; built in: .*mini_news"):
        Task.load("mini_nwes")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a", "label": "Red"', "not one JSON object a line"),
        (b'["a"]', "a JSON object is needed, not list"),
        (b'{"text": "a", "label": "Purple"}', "'label' is 'Purple'; the labels are Red, Green, Blue"),
        (b'{"label": "Red"}', "the column 'text' is missing"),
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
    with pytest.raises(DataError, match=r"test\.xlsx: cannot be read as data; give a \.jsonl file"):
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
        ({"labels": "Red"}, "a task's key 'labels' is 'Red': input should be a valid list or a valid dict"),
        ({"data": {"train": "a"}}, "needs the key 'test'"),
        ({"data": {"train": "a", "tset": "b"}}, "has no key 'tset'; did you mean 'test'?"),
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


def test_the_wording_hash_follows_the_wording_alone(tmp_path):
    original = Task.load(make_task(tmp_path)).wording_hash()
    assert Task.load(make_task(tmp_path, description="another", shots=6)).wording_hash() == original
    assert Task.load(make_task(tmp_path, separator="\n")).wording_hash() != original
    assert Task.load(make_task(tmp_path, labels=list(reversed(LABELS)))).wording_hash() != original


def test_labels_are_positions_on_the_label_axis(tmp_path):
    train = Task.load(make_task(tmp_path)).examples("train")
    assert train.labels.dtype == np.int64
    assert [LABELS[label] for label in train.labels] == [row["label"] for row in make_rows(1, 60)]
