"""Tasks: data read strictly, templates that can do no harm, wording exactly as written."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tiny import LABELS, make_rows, make_task, write_csv, write_rows

from iclperm import Task
from iclperm.errors import ConfigError, DataError
from iclperm.tasks.task import BUILTIN, template_text

HARNESS = Path(__file__).parent / "fixtures" / "lm_eval"


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
            "a dataset's key 'test' is 1.0: no share; give a share of train above 0 and below 1",
        ),
        ({"data": {"train": "a", "test": 0}}, "a dataset's key 'test' is 0: no share; give a share of train above 0"),
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


OF_LABELS = {"choices", "gold", "letters", "labels", "label_field", "continuation", "label_values", "label_match"}


@pytest.mark.parametrize("generated", [False, True])
def test_the_starters_explain_every_key(generated):
    keys = {line.split(":")[0].strip("# ") for line in template_text("x", generated).splitlines()}
    assert keys >= set(Task.model_fields) - (OF_LABELS if generated else {"answer"})


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
    (gold,) = json.loads(train.answers[0])
    first = json.loads((tmp_path / "train.jsonl").read_text().splitlines()[0])
    assert gold == first["label"]
    assert task.render_demonstration(train.fields[0], 0) == f"Thing: {first['text']}\nColour: {gold}"
    path.write_text(yaml.safe_dump(content | {"process_docs": "f"}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"harness\.yaml: .*'process_docs'"):
        Task.load(path)
    path.write_text("task: x\ndoc_to_text: !function utils.text\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"harness\.yaml: .*!function"):
        Task.load(path)


def test_importing_tasks_loads_no_library_of_data():
    script = "import sys, iclperm.tasks.task; print({'datasets', 'pyarrow', 'pandas', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("file", [BUILTIN / "ag_news.yaml", HARNESS / "ag_news_like.yaml"], ids=["ours", "harness"])
def test_a_task_of_content_that_was_read_is_that_of_its_file(tmp_path, file):
    """The reading of harness files and the folder of its data come with it."""
    path = tmp_path / "task.yaml"
    path.write_bytes(file.read_bytes())
    read = Task.from_file(path)
    path.unlink()
    again = Task.from_file(path, file.read_bytes())
    assert again.to_yaml() == read.to_yaml()
    assert again._folder == read._folder == tmp_path
