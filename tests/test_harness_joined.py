"""Files of lm-evaluation-harness as tasks: prompts, continuations, golds and stops of a `Task` are the harness' own."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from iclperm import Study, Task, plan, run
from iclperm.errors import ConfigError, DataError
from iclperm.study.choices import file_and_part
from iclperm.tasks.answers import Judgement, open_checker
from iclperm.tasks.filters import golds_of
from iclperm.tasks.harness import is_harness

SPEC = find_spec("lm_eval")
THEIRS = Path(str(SPEC and SPEC.origin)).parent / "tasks"
FILES = Path(__file__).parent / "fixtures" / "lm_eval"
FAMILIES = [
    "arc/arc_challenge",
    "anli/anli_r1",
    "belebele/belebele_acm_Arab",
    "blimp/adjunct_island",
    "commonsense_qa/default",
    "mmlu/continuation/mmlu_abstract_algebra",
    "nq_open/nq_open",
    "openbookqa/openbookqa",
    "piqa/piqa",
    "sciq/sciq",
    "super_glue/boolq/seq2seq",
    "triviaqa/default",
    "gsm8k/gsm8k.yaml:strict-match",
    "gsm8k/gsm8k.yaml:flexible-extract",
]  # fmt: skip
CHOICE = {
    "task": "x",
    "dataset_path": "x",
    "training_split": "train",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "Q: {{q}}\nA:",
    "doc_to_target": "{{gold}}",
    "doc_to_choice": "{{[a, b]}}",
}
WRITTEN = {
    **{key: CHOICE[key] for key in ("task", "dataset_path", "training_split", "test_split", "doc_to_text")},
    "output_type": "generate_until",
    "doc_to_target": "{{answers}}",
}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a/gsm8k.yaml:strict-match", ("a/gsm8k.yaml", "strict-match")),
        ("gsm8k.yml:strict-match", ("gsm8k.yml", "strict-match")),
        ("g.yaml:a.yml:b", ("g.yaml", "a.yml:b")),
        ("gsm8k.yml", ("gsm8k.yml", "")),
        ("mini_news", ("mini_news", "")),
    ],
)
def test_a_part_is_named_after_its_file(name, parts):
    assert file_and_part(name) == parts


def written(folder, keys, train=(), test=()):
    """A task file and a folder of its data; returns both paths."""
    path = folder / "x.yaml"
    path.write_text(yaml.safe_dump(keys), encoding="utf-8")
    data = folder / "rows"
    data.mkdir(exist_ok=True)
    for split, rows in (("train", train), ("test", test)):
        if rows:
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (data / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return path, data


@pytest.mark.skipif(SPEC is None, reason="lm_eval is not installed")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_task_makes_the_harness_own_prompts(name, tmp_path):
    from harness_oracle import Splits, _Drawn, _runnable, made_up
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    file, _, part = name.partition(".yaml:")
    config = load_yaml(THEIRS / f"{file}.yaml", resolve_func=False)
    rows = made_up(config, 4)
    assert len(Splits(rows)["any"]) == 4
    _, data = written(tmp_path, {}, rows, rows)
    task = Task.load(f"{THEIRS / file}.yaml" + (f":{part}" if part else ""), data)
    theirs = ConfigurableTask(config=_runnable(config, rows))
    shown, asked = task.examples("train"), task.examples("test")
    assert len(shown) == len(asked) == 4
    theirs.sampler = _Drawn(rows[2:])
    demonstrations = task.render_demonstrations(shown.fields[2:], shown.answers[2:])
    opening = task.opening() + "".join(text + task.separator for text in demonstrations)
    for at, (doc, query) in enumerate(zip(rows, task.render_queries(asked.fields), strict=True)):
        context = theirs.fewshot_context(doc, 2, gen_prefix=theirs.doc_to_prefix(doc))
        assert opening + query == context
        made = theirs.construct_requests(doc, context, metadata=("x", at, 1))
        if task.is_generated:
            assert task.stop == list(made.args[1]["until"])
            target = theirs.doc_to_target(doc)
            choices = theirs.doc_to_choice(doc) if config.get("doc_to_choice") else None
            target = choices[target] if choices else target
            assert golds_of(asked.answers[at]) == (target if isinstance(target, list) else [str(target)])
        else:
            texts = asked.chosen[at].texts if asked.chosen else task.words
            assert task.continued(texts) == [each.args[1] for each in made[: len(texts)]]
            gold = theirs.doc_to_target(doc)
            right = [texts.index(one) if isinstance(one, str) else one for one in [gold]]
            assert [*(asked.chosen[at].gold if asked.chosen else [asked.labels[at]])] == right


def test_pipelines_are_tasks_of_their_own(tmp_path):
    number = {"function": "regex", "regex_pattern": "(-?[0-9]+)", "group_select": -1}
    filters = [
        {"name": "strict", "filter": [{"function": "regex"}, {"function": "take_first"}]},
        {"name": "last", "filter": [number, {"function": "take_first"}]},
    ]
    path, _ = written(tmp_path, {**WRITTEN, "filter_list": filters})
    with pytest.raises(ConfigError, match=r"2 pipelines, .*: strict, last; name one after the file: FILE\.yaml:strict"):
        Task.load(path)
    judged = {}
    for name in ("strict", "last"):
        task = Task.load(f"{path}:{name}")
        assert task.name == f"x-{name}"
        with open_checker(task.answer) as checker:
            judged[name] = checker.judge(["The answer is 5.", "#### 5"], ['["4", "5"]'] * 2)
    assert judged == {
        "strict": [Judgement(None, None, False), Judgement("5", "strict", True)],
        "last": [Judgement("5", "last", True), Judgement("5", "last", True)],
    }
    with pytest.raises(ConfigError, match="no filter pipeline 'other' to choose; they are strict, last"):
        Task.load(f"{path}:other")


def test_a_long_name_is_cut_and_stays_its_own(tmp_path):
    names = {Task.load(written(tmp_path, {**CHOICE, "task": "x" * 80 + end})[0]).name for end in "ab"}
    assert {len(name) for name in names} == {64}
    assert len(names) == 2


def test_one_split_is_halved_and_said(tmp_path):
    rows = [
        {"q": f"question {number}", "gold": number % 2, "a": "left", "b": f"right {number}"} for number in range(40)
    ]
    keys = {key: value for key, value in CHOICE.items() if key != "training_split"}
    path, data = written(tmp_path, keys, test=rows)
    task = Task.load(path, data)
    train, test = task.examples("train"), task.examples("test")
    assert len(train) + len(test) == 40
    assert not set(train.hashes) & set(test.hashes)
    study = Study(model="demo", task=str(path), data=str(data), sets=1, permutations=2, shots=2, queries=4)
    assert any("one half of its rows" in note for note in plan(study).notes)
    found = run(study)
    assert len(found.splits["test"].examples) == 4
    assert {*found.splits["test"].examples.tolist()} <= {*range(len(test))}


def test_samples_of_the_file_are_the_demonstrations(tmp_path):
    samples = [{"q": f"s{number}", "answers": ["yes", "no"]} for number in range(3)]
    keys = {**WRITTEN, "description": "Answer.\n", "fewshot_config": {"sampler": "first_n", "samples": samples}}
    path, data = written(tmp_path, keys, test=[{"q": "x", "answers": ["1", "2"]}])
    task = Task.load(path, data)
    assert (task.shots, len(task.examples("train")), task.examples("test").answers) == (3, 3, ['["1", "2"]'])
    train = task.examples("train")
    shown = task.render_demonstrations(train.fields, train.answers)
    assert task.opening() + shown[0] == "Answer.\nQ: s0\nA: yes"


def test_what_makes_a_text_is_in_the_hash_of_the_wording(tmp_path):
    hashes = set()
    for change in ({}, {"doc_to_text": "{{q}}"}, {"gen_prefix": "So"}, {"target_delimiter": ""}, {"num_fewshot": 1}):
        path, _ = written(tmp_path, {**CHOICE, **change})
        hashes.add(Task.load(path).wording_hash())
    assert len(hashes) == 4


@pytest.mark.parametrize(
    ("keys", "change", "said"),
    [
        (CHOICE, {"output_type": "loglikelihood"}, "only multiple_choice and generate_until"),
        (CHOICE, {"description": "About {{q}}."}, "'description' reads a column"),
        (WRITTEN, {"generation_kwargs": {"do_sample": True}}, "set do_sample: false"),
        (WRITTEN, {"repeats": 64}, "'repeats' is 64"),
        (WRITTEN, {"metric_list": [{"metric": "bleu"}]}, "asks for bleu"),
        (CHOICE, {"test_split": None}, "names no test data"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_remedy(keys, change, said, tmp_path):
    path, _ = written(tmp_path, {**keys, **change})
    with pytest.raises(ConfigError, match=said) as caught:
        Task.load(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("tag", ["!function utils.process", "!!python/object/apply:os.system ['false']"])
def test_nothing_is_run(tag, tmp_path):
    (tmp_path / "utils.py").write_text("raise SystemExit('was run')")
    path, _ = written(tmp_path, CHOICE)
    path.write_text(path.read_text() + f"process_docs: {tag}\n")
    with pytest.raises(ConfigError) as caught:
        Task.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "row", "error", "said"),
    [
        ({"doc_to_text": "gold"}, {"gold": 0, "a": "x", "b": "y"}, ConfigError, "as in WinoGrande"),
        ({}, {"q": "x", "gold": 7, "a": "x", "b": "y"}, DataError, "the right choice is number 7"),
        ({}, {"q": "x", "gold": 0, "a": " ", "b": "y"}, DataError, "none of them blank"),
    ],
)
def test_a_row_that_cannot_be_asked_is_named(change, row, error, said, tmp_path):
    path, data = written(tmp_path, {**CHOICE, **change}, test=[row])
    with pytest.raises(error, match=said) as caught:
        Task.load(path, data / "test.jsonl").examples("test")
    assert "test.jsonl:1: " in str(caught.value)


def test_a_task_of_a_group_is_named_after_the_file(tmp_path):
    written(tmp_path, CHOICE)
    group = tmp_path / "g.yaml"
    group.write_text("group: g\ntask:\n- {task: x, num_fewshot: 2}\n")
    assert Task.load(f"{group}:x").shots == 2
    with pytest.raises(ConfigError, match=r"the file is a group of tasks; name one, g\.yaml:TASK: x"):
        Task.load(group)
    with pytest.raises(ConfigError, match="what follows the colon, 'x', is for a file of lm-evaluation-harness"):
        Task.load(f"{Path(__file__).parents[1] / 'iclperm' / 'tasks' / 'builtin' / 'gsm8k.yaml'}:x")


def test_files_of_ones_own_are_read_beside_the_task():
    task = Task.from_file(FILES / "boolq_like.yaml")
    assert (task.words, len(task.examples("train")), len(task.examples("test"))) == (("no", "yes"), 4, 2)
    assert task.examples("test").labels.tolist() == [1, 0]


def test_files_are_told_apart_by_their_keys():
    assert is_harness({"include": "base.yaml"})
    for path in (Path(__file__).parents[1] / "iclperm" / "tasks").rglob("*.yaml"):
        assert not is_harness(yaml.safe_load(path.read_text(encoding="utf-8"))), path
