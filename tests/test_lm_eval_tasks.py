"""Task files of lm-evaluation-harness: the prompts that it builds, and a refusal for all that cannot be had."""

import ast
import json
import re
from pathlib import Path

import pytest
import yaml
from jinja2 import Environment, StrictUndefined

from iclperm import Task
from iclperm.errors import ConfigError, DataError
from iclperm.tasks.answers import Judgement, open_checker
from iclperm.tasks.lm_eval import from_lm_eval, is_lm_eval

FILES = Path(__file__).parent / "fixtures" / "lm_eval"
DATA = Path(__file__).parent

NEWS = [
    {"text": "  Ministers meet in the capital. ", "label": 0},
    {"text": "The team wins again.", "label": 1},
    {"text": "Shares fall on weak profits.", "label": 2},
    {"text": "A new chip is half as large.", "label": 3},
]
SUMS = [
    {"question": "What are 2 and 3?", "answer": "It is 2+3=5.\n#### 5"},
    {"question": "What are 600 and 634?", "answer": "600+634=1234\n#### 1,234"},
]
YES_NO = [json.loads(line) for line in (FILES / "boolq_train.jsonl").read_text().splitlines()]
ROWS = {"ag_news_like": NEWS, "gsm8k_like": SUMS, "boolq_like": YES_NO}


def raw(name):
    return yaml.safe_load((FILES / f"{name}.yaml").read_text())


def harness_prompt(config, demonstrations, query):
    """What the harness hands to a model: the context, and the continuations of multiple choice. Written from its
    documentation: a column's name alone is its value, other texts are templates, nothing is put between their parts."""
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)

    def apply(key, row):
        return row[config[key]] if config[key] in row else environment.from_string(config[key]).render(**row)

    def choices(row):
        listed = config["doc_to_choice"]
        return listed if isinstance(listed, list) else ast.literal_eval(environment.from_string(listed).render(**row))

    def target(row):
        value = apply("doc_to_target", row)
        return choices(row)[int(value)] if "doc_to_choice" in config else value

    between = config.get("target_delimiter", " ")
    context = config.get("description", "")
    for row in demonstrations:
        context += apply("doc_to_text", row) + between + target(row) + config.get("fewshot_delimiter", "\n\n")
    context += apply("doc_to_text", query)
    return context, [between + choice for choice in choices(query)] if "doc_to_choice" in config else [""]


def our_prompt(task, demonstrations, query):
    def position(row):
        return 0 if task.is_generated else list(task.labels).index(row[task.label_field])

    context = task.opening()
    for row in demonstrations:
        context += task.render_demonstration(row, position(row)) + task.separator
    return context + task.render_query(query), task.continuations()


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_prompts_are_those_of_the_harness(name, count):
    task = Task.from_file(FILES / f"{name}.yaml")
    rows = ROWS[name]
    for query in rows:
        shown = [row for row in rows if row is not query][:count]
        assert our_prompt(task, shown, query) == harness_prompt(raw(name), shown, query)
    assert task.name == raw(name).get("task", name)
    assert task.shots == raw(name).get("num_fewshot", 4)


def test_a_prompt_in_full():
    task = Task.from_file(FILES / "ag_news_like.yaml")
    assert our_prompt(task, NEWS[:1], NEWS[1]) == (
        "Classify the news.\n###\n"
        "News: Ministers meet in the capital.\nTopic: World\n###\n"
        "News: The team wins again.\n",
        ["Topic: World", "Topic: Sports", "Topic: Business", "Topic: Sci/Tech"],
    )


def test_files_of_ones_own_are_read_beside_the_task():
    task = Task.from_file(FILES / "boolq_like.yaml")
    assert (task.words, len(task.examples("train")), len(task.examples("test"))) == (("no", "yes"), 4, 2)
    assert task.examples("test").labels.tolist() == [1, 0]
    assert task.data.dev is None


def test_a_data_set_of_the_hub_is_read_from_a_folder_too():
    task = Task.load(FILES / "gsm8k_like.yaml", DATA / "fixtures" / "gsm8k")
    examples = task.examples("test")
    with open_checker(task.answer) as checker:
        for gold in examples.answers:
            number = gold.rpartition("#### ")[2]
            judged = checker.judge([f"so\n#### {number}", f"it is ${number}.", "none"], [gold] * 3)
            plain = number.replace(",", "")
            assert judged[0] == Judgement(plain, "strict-match", True)
            assert judged[1] == Judgement(plain, "flexible-extract", True)
            assert judged[2] == Judgement(None, None, False)
    assert len(examples) > 1
    assert (task.stop, task.max_new_tokens) == (["Question:", "</s>"], 256)
    with pytest.raises(ConfigError, match="needs the key 'revision'"):
        Task.from_file(FILES / "gsm8k_like.yaml").examples("test")


def test_a_pinned_data_set_keeps_its_revision_and_splits():
    data = Task.from_file(FILES / "ag_news_like.yaml").data
    assert data.revision == "eb185aade064a813bc0b7f42de02595523103ca4"
    assert (data.dataset, data.train, data.test, data.dev) == ("fancyzhx/ag_news", "train", "test", None)


def test_splits_are_named_as_in_the_harness():
    splits = {"training_split": "t", "validation_split": "v", "test_split": "s", "fewshot_split": "f"}
    for left_out, expected in {
        (): ("f", "s", "v"),
        ("fewshot_split",): ("t", "s", "v"),
        ("test_split",): ("f", "v", None),
        ("validation_split",): ("f", "s", None),
    }.items():
        config = {**raw("ag_news_like"), **splits}
        data = from_lm_eval({key: value for key, value in config.items() if key not in left_out}, "x.yaml")["data"]
        assert (data["train"], data["test"], data.get("dev")) == expected
    config = {**raw("ag_news_like"), **splits, "fewshot_split": "v"}
    assert "dev" not in from_lm_eval(config, "x.yaml")["data"]


def test_a_task_without_filters_compares_the_whole_text():
    config = {key: value for key, value in raw("gsm8k_like").items() if key not in ("filter_list", "generation_kwargs")}
    config["metric_list"] = [
        {"metric": "exact_match", "ignore_case": True, "ignore_punctuation": True, "ignore_numbers": True}
    ]
    task = Task(**from_lm_eval(config, "x.yaml"))
    assert task.stop == ["\n\n"]
    with open_checker(task.answer) as checker:
        assert checker.judge([' "It\'s [So]!" 12', "So it's"], ["It's so.", "It's so."]) == [
            Judgement("its so", "text", True),
            Judgement("so its", "text", False),
        ]


def test_the_first_pipeline_that_reads_an_answer_decides():
    filters = [
        {"name": "all of it", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]},
        {"name": "never", "filter": [{"function": "regex"}, {"function": "take_first"}]},
    ]
    task = Task(**from_lm_eval({**raw("gsm8k_like"), "filter_list": filters}, "x.yaml"))
    with open_checker(task.answer) as checker:
        assert checker.judge([" 4\n5", "#### 5"], ["5", "#### 5"]) == [
            Judgement("4 5", "all of it", False),
            Judgement("5", "all of it", True),
        ]


def test_a_column_called_label_may_be_the_answer():
    config = {**raw("gsm8k_like"), "doc_to_text": "question", "doc_to_target": "label"}
    task = Task(**from_lm_eval(config, "x.yaml"))
    row = {"question": "2 and 3?", "right_answer": "5"}
    assert (task.render_query(row), task.render_demonstration(row, 0)) == ("2 and 3?", "2 and 3? 5")
    assert task.answer.field == "label"


CHOICE, GENERATED = "ag_news_like", "gsm8k_like"


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (CHOICE, {"include": "other.yaml"}, "the lm-evaluation-harness key 'include' cannot be read here"),
        (CHOICE, {"process_docs": "x"}, "key 'process_docs'"),
        (CHOICE, {"process_results": "x"}, "key 'process_results'"),
        (CHOICE, {"use_prompt": "promptsource:x"}, "key 'use_prompt'"),
        (CHOICE, {"output_type": "loglikelihood"}, "key 'output_type' is 'loglikelihood'"),
        (CHOICE, {"repeats": 64}, "key 'repeats' is 64"),
        (CHOICE, {"doc_to_choice": "choices"}, "the key 'doc_to_choice' must be a fixed list"),
        (CHOICE, {"doc_to_choice": "{{[a, b]}}"}, "the key 'doc_to_choice' must be a fixed list"),
        (CHOICE, {"doc_to_choice": "{{[['a'], 'b']}}"}, "the key 'doc_to_choice' must be a fixed list"),
        (CHOICE, {"doc_to_choice": None}, "the key 'doc_to_choice' must be a fixed list"),
        (CHOICE, {"doc_to_choice": [True, False]}, "key 'doc_to_choice"),
        (
            CHOICE,
            {"doc_to_target": "{{choices.index(label)}}"},
            "the key 'doc_to_target' is '{{choices.index(label)}}'",
        ),
        (CHOICE, {"doc_to_target": "{{label}}{{text}}"}, "the key 'doc_to_target' is"),
        (CHOICE, {"doc_to_text": "{{ text|center(9) }}"}, "No filter named 'center'"),
        (
            CHOICE,
            {"doc_to_text": "{{ ''.__class__ }}{% macro a() %}{% endmacro %}"},
            "the template 'doc_to_text' uses 'Macro'",
        ),
        (CHOICE, {"doc_to_text": "{{ text }} {{ label }}"}, "the key 'doc_to_text' shows the column 'label'"),
        (CHOICE, {"doc_to_text": "no column at all"}, "the key 'doc_to_text' shows no column"),
        (CHOICE, {"description": "About {{ subject }}.\n###\n"}, "the key 'description' is a template"),
        (CHOICE, {"description": "Classify: "}, "the key 'description' must end in the fewshot_delimiter"),
        (CHOICE, {"description": "\n###\n"}, "the key 'description' must end in the fewshot_delimiter"),
        (CHOICE, {"target_delimiter": "{{ x }}"}, "the key 'target_delimiter' is a template"),
        (CHOICE, {"metric_list": [{"metric": "f1"}]}, "a metric's key 'metric' is 'f1'"),
        (CHOICE, {"metric_list": [{"metric": "exact_match"}]}, "the key 'metric_list' asks for 'exact_match'"),
        (CHOICE, {"filter_list": []}, "the key 'filter_list' belongs to 'generate_until'"),
        (CHOICE, {"fewshot_config": {"samples": []}}, "has no key 'samples'"),
        (CHOICE, {"fewshot_split": "test"}, "the key 'fewshot_split' is 'test', the split of the queries"),
        (CHOICE, {"training_split": None}, "the file names no train data"),
        (CHOICE, {"test_split": None}, "the file names no test data"),
        (CHOICE, {"dataset_kwargs": {"data_dir": "x"}}, "a dataset has no key 'data_dir'"),
        (CHOICE, {"dataset_kwargs": {"data_files": {}}}, "the key 'data_files' needs a 'dataset_path' of csv"),
        (CHOICE, {"dataset_kwargs": {"revision": "main"}}, "give the 40 hexadecimal digits"),
        (
            CHOICE,
            {"dataset_path": "csv", "dataset_kwargs": {"data_files": {"train": "a.csv"}}},
            "the key 'data_files' names no file for the split 'test'",
        ),
        (GENERATED, {"doc_to_choice": ["a", "b"]}, "the key 'doc_to_choice' belongs to 'multiple_choice'"),
        (GENERATED, {"doc_to_target": "The answer is {{answer}}"}, "the key 'doc_to_target' is"),
        (GENERATED, {"doc_to_text": "{{question}} {{answer}}"}, "shows 'answer', the column of the answer"),
        (GENERATED, {"metric_list": [{"metric": "acc"}]}, "the key 'metric_list' asks for 'acc'"),
        (GENERATED, {"generation_kwargs": {"do_sample": True}}, "a generation's key 'do_sample' is True"),
        (GENERATED, {"generation_kwargs": {"temperature": 0.7}}, "a generation's key 'temperature' is 0.7"),
        (GENERATED, {"generation_kwargs": {"top_p": 0.9}}, "a generation has no key 'top_p'"),
        (GENERATED, {"filter_list": [{"name": "x", "filter": [{"function": "majority_vote"}]}]}, "'majority_vote'"),
        (
            GENERATED,
            {"filter_list": [{"name": "x", "filter": [{"function": "regex"}, {"function": "regex"}]}]},
            "has two regex steps",
        ),
        (
            GENERATED,
            {"filter_list": [{"name": "x", "filter": [{"function": "regex", "group_select": 1}]}]},
            "a filter's key 'group_select' is 1",
        ),
        (
            GENERATED,
            {"filter_list": [{"name": "x", "filter": [{"function": "regex", "regex_pattern": "("}]}]},
            "is no regular expression",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_by_its_key(name, change, said, tmp_path):
    path = tmp_path / "task.yaml"
    path.write_text(json.dumps({**raw(name), **change}))  # YAML, too
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        Task.from_file(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("tag", ["!function utils.process", "!!python/object/apply:os.system ['false']"])
def test_tags_are_refused_and_nothing_is_run(tag, tmp_path):
    (tmp_path / "utils.py").write_text("raise SystemExit('was run')")
    path = tmp_path / "task.yaml"
    path.write_text((FILES / f"{CHOICE}.yaml").read_text() + f"process_docs: {tag}\n")
    with pytest.raises(ConfigError, match=r"it uses the tag .*line \d+") as caught:
        Task.from_file(path)
    assert "\n" not in str(caught.value)


def test_a_label_of_another_kind_is_named_with_its_line(tmp_path):
    path = tmp_path / "task.yaml"
    path.write_text((FILES / "boolq_like.yaml").read_text())
    for split in ("train", "validation"):
        (tmp_path / f"boolq_{split}.jsonl").write_text(json.dumps({**YES_NO[0], "label": "yes"}))
    with pytest.raises(DataError, match=r"boolq_train\.jsonl:1: 'label' is 'yes'; the labels are 0, 1"):
        Task.from_file(path).examples("train")


def test_files_are_told_apart_by_their_keys():
    assert all(is_lm_eval(raw(name)) for name in ROWS)
    assert is_lm_eval({"include": "base.yaml"})
    for path in (DATA.parent / "iclperm" / "tasks").rglob("*.yaml"):
        assert not is_lm_eval(yaml.safe_load(path.read_text())), path
