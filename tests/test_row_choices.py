"""Tasks whose rows have choices of their own: read, scored as transformers and the harness do, told."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import TOLERANCES

import iclperm
from iclperm import Study, Task, demo
from iclperm.errors import ConfigError, DataError
from iclperm.reference.scoring import score_one
from iclperm.runs.harness_logs import write_logs
from iclperm.runs.layout import lay_out
from iclperm.runs.query_choices import QueryChoices
from iclperm.runs.setting import ResolvedStudy, model_tokenizer
from iclperm.tasks.row_choices import RowChoices
from iclperm.workers.messages import plan_from, plan_message, unpacked

PER_TOKEN = TOLERANCES["loglikelihood per token"]["float32"]
LENGTHS = {"sum": lambda text: 1, "bytes": lambda text: len(text.encode()), "characters": len}
DECOYS = ["Sport", "News from around the wörld", "Business and markets", "a", "Technology"]
WORDING = {
    "name": "arc_like",
    "data": {"train": "train.jsonl", "test": "test.jsonl", "dev": "dev.jsonl"},
    "fields": {"text": "text"},
    "choices": "choices.text",
    "letters": "choices.label",
    "gold": "answerKey",
    "query": "Headline: {{ text }}\nTopic:",
    "demonstration": "Headline: {{ text }}\nTopic: {{ label }}",
    "shots": 2,
}


def arc_rows(split, count, begin=0):
    """Rows as ARC has them, of 2 to 5 choices, whose letters are sometimes numbers."""
    lines = (demo.data_path() / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()[begin : begin + count]
    rows = []
    for number, line in enumerate(lines):
        row, size = json.loads(line), 2 + number % 4
        texts, letters = DECOYS[:size], (list("ABCDE") if number % 3 else list("12345"))[:size]
        texts[number % size] = row["label"]
        rows.append(
            {
                "text": row["text"],
                "choices": {"text": texts, "label": letters},
                "endings": texts,
                "answerKey": letters[number % size],
                "place": number % size,
            }
        )
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("choices")
    for name, split, count, begin in (("train", "train", 12, 0), ("test", "test", 16, 0), ("dev", "test", 8, 20)):
        rows = arc_rows(split, count, begin)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "arc.yaml").write_text(yaml.safe_dump(WORDING))
    return folder


@pytest.fixture(scope="module")
def study(folder):
    return Study(task=str(folder / "arc.yaml"), sets=2, permutations=2, shots=[0, 2], queries=16)


@pytest.fixture(scope="module")
def run(study, folder):
    return iclperm.run(study, out=folder / "run")


def test_choices_count_among_the_tokens_of_prompting_one_by_one(run, study, folder, tmp_path):
    """A prompt once, and of each of its choices all tokens but the last; those of the engine, from the prompts."""
    work = lay_out(ResolvedStudy.of(study))
    (product,) = work.products
    choices, number = work.prompts.choices, work.prompts.num_choices
    expected = 0
    for context in product.contexts:
        for query in product.queries:
            expected += len(work.prompts.contexts[context]) + len(work.prompts.queries[query])
            expected += sum(len(ids) - 1 for ids in choices[query][: number[query]])
    assert work.choice_tokens > 0
    assert run.report.tokens_naive == iclperm.plan(study).tokens_naive == expected
    assert iclperm.open_run(folder / "run").report.tokens_naive == expected
    assert json.loads((folder / "run" / "plan.json").read_text())["tokens"]["naive"] == expected - work.choice_tokens
    # Where orderings are asked queries of their own, all cells are told beside them, by prompts alone.
    dealt = Study(task=study.task, sets=2, permutations=2, shots=2, queries=16, cells="blocks", queries_per_ordering=4)
    found = iclperm.run(dealt, tmp_path / "dealt").report.tokens_naive
    counted = json.loads((tmp_path / "dealt" / "plan.json").read_text())["tokens"]["naive"]
    assert found == iclperm.plan(dealt).tokens_naive == counted
    # Grown in two steps, and searched: of all that a search was spared.
    parts = iclperm.run(study.model_copy(update={"queries": 9}), tmp_path / "parts")
    assert parts.report.tokens_naive < expected
    assert iclperm.run(study, tmp_path / "parts", extend=True).report.tokens_naive == expected
    search = {"kind": "search", "task": study.task, "sets": 1, "permutations": 6, "shots": 3, "dev_queries": 8}
    race = iclperm.run(Study(**search, queries=16, budget="adaptive"), tmp_path / "race")
    everything = iclperm.plan(Study(**search, queries=16))
    assert race.report.tokens_naive == everything.tokens_naive


def reading(choices="c", gold="g", letters=None, **row):
    (found,) = RowChoices(choices, gold, letters).of_rows([row], ["f:1"])
    return found


@pytest.mark.parametrize(
    ("given", "gold"),
    [
        ({"c": ["a", "b"], "g": 1}, (1,)),
        ({"c": ["a", "b"], "g": "1"}, (1,)),
        ({"c": ["a", "b"], "g": "b"}, (1,)),
        ({"c": ["a", "b"], "g": "B"}, (1,)),
        ({"c": ["a", "b", "c"], "g": [2, 0]}, (0, 2)),
        ({"c": ["a", "b", "c"], "g": ["c", "a"]}, (0, 2)),
        ({"c": '["a", "b"]', "g": 1}, (1,)),
        ({"c": "['a', 'b']", "g": 1}, (1,)),
        ({"c": {"text": ["a", "b"], "label": ["1", "2"]}, "g": "2", "choices": "c.text", "letters": "c.label"}, (1,)),
        ({"x": "a", "y": "b", "g": "2", "choices": "{{ [x, y] }}", "gold": "{{ g|int - 1 }}"}, (1,)),
        ({"x": "a", "y": "b", "g": 1, "choices": ["{{ x }}", "{{ y }}"]}, (1,)),
        ({"x": "a", "g": 0, "choices": "{% if x %}['a', 'b']{% endif %}"}, (0,)),
        ({"c": ["3", "1"], "g": "1", "letters": "c"}, (1,)),
    ],
)
def test_choices_and_the_right_ones_are_found(given, gold):
    found = reading(**given)
    assert found.texts[:2] == (("3", "1") if "letters" in given and given["letters"] == "c" else ("a", "b"))
    assert found.gold == gold


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"c": ["a"], "g": 0}, "'choices' gives 1 text, and a row needs 2 to 100"),
        ({"c": ["a", " "], "g": 0}, "choice 1 .from 0 on. is blank"),
        ({"c": ["a", "b"], "g": -1}, "no position, letter or text of its choices"),
        ({"c": ["a", "b"], "g": 2}, "the positions of its 2 choices are 0 to 1"),
        ({"c": ["1", "0"], "g": 0}, "the position of one choice and the text of another"),
        ({"c": ["a", "b"], "g": ""}, "'gold' is blank"),
        ({"c": ["a", "b"], "g": []}, "'gold' names no choice"),
        ({"c": "nothing", "g": 0}, "a list is needed"),
        ({"c": {"text": ["a", "b"]}, "g": 0}, "a list is needed"),
        ({"c": ["a", "b"], "g": "C", "l": ["A"], "letters": "l"}, "1 'letters' for 2 choices"),
        ({"c": ["a", "b"], "g": "C", "l": ["A", "B"], "letters": "l"}, "the row's letters are A, B"),
    ],
)
def test_a_row_that_does_not_say_its_choices_is_named(given, message):
    with pytest.raises(DataError, match=f"f:1: .*{message}"):
        reading(**given)


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=2, max_size=6, unique=True), st.data())
@settings(max_examples=40, deadline=None)
def test_choices_come_back_as_they_are(texts, data):
    texts = [text.replace("\x1e", " ").replace("\x1f", " ") + "." for text in texts]
    gold = data.draw(st.integers(0, len(texts) - 1))
    for column in (texts, json.dumps(texts)):
        found = reading(c=column, g=gold)
        assert list(found.texts) == texts
        assert found.gold == (gold,)


def test_a_task_has_labels_or_choices(folder):
    for changes, message in [
        ({"gold": None}, "'choices' and 'gold' go together"),
        ({"labels": ["a", "b"]}, "the key 'choices' and the key 'labels'"),
        (
            {"fields": {"text": "text", "answerKey": "answerKey"}, "query": "{{ text }}{{ answerKey }}"},
            "tells the right choice",
        ),
        ({"choices": "{{ 1 +"}, "not valid"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Task(**{key: value for key, value in {**WORDING, **changes}.items() if value is not None})


def test_every_answer_is_that_of_plain_transformers(run, study, folder):
    """Each choice's log-likelihood, prompt by prompt, and what is right by each length."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo.model_path(), dtype="float32").eval()
    tokenizer = model_tokenizer(demo.model_path())
    task = Task.load(study.task)
    test, items = task.examples("test"), run.splits["test"]
    assert run.report.tokens_forwarded == run.report.tokens_unique
    expected, num_tokens = np.full(run.label_logprob.shape, np.nan), np.ones(run.label_logprob.shape)
    worst = 0.0
    for cell in [(0, 0, 0), (1, 1, 1)]:
        for query, row in enumerate(items.examples.tolist()):
            chosen = test.chosen[row]
            prompt = iclperm.sample_prompt(
                study, index_set=cell[0], permutation=cell[1], shots=run.shots[cell[2]], query=query
            )
            assert prompt.continuations == [f" {text}" for text in chosen.texts]
            assert prompt.answer == chosen.texts[chosen.gold[0]]
            before = tokenizer(prompt.text)["input_ids"]
            for place, text in enumerate(prompt.continuations):
                whole = tokenizer(prompt.text + text)["input_ids"]
                assert whole[: len(before)] == before
                plain = score_one(model, before, whole[len(before) :])
                expected[(*cell, query, place)], num_tokens[(*cell, query, place)] = plain.logprob, plain.num_tokens
                worst = max(worst, abs(plain.logprob - run.label_logprob[(*cell, query, place)]) / plain.num_tokens)
    assert worst < PER_TOKEN
    for normalize, length in {**LENGTHS, "mean": None}.items():
        found = iclperm.open_run(folder / "run", normalize=normalize)
        assert found.digest == run.digest
        for cell in [(0, 0, 0), (1, 1, 1)]:
            for query, row in enumerate(items.examples.tolist()):
                texts, gold = test.chosen[row]
                lengths = num_tokens[(*cell, query)][: len(texts)] if length is None else list(map(length, texts))
                scores = expected[(*cell, query)][: len(texts)] / lengths
                assert found.correct[(*cell, query)] == (int(np.argmax(scores)) in gold)
    sizes = np.array([len(test.chosen[row].texts) for row in items.examples])
    assert np.array_equal(np.isfinite(run.label_logprob[0, 0, 0]).sum(axis=1), sizes)
    assert run.chance == pytest.approx(np.average(1 / sizes, weights=items.weights))


def test_accuracies_are_those_of_the_harness(folder, tmp_path):
    pytest.importorskip("lm_eval")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    metrics = [{"metric": name} for name in ("acc", "acc_norm", "acc_bytes")]
    files = {"test": str(folder / "test.jsonl")}
    theirs = {
        "arc": {"doc_to_choice": "{{choices.text}}", "doc_to_target": "{{choices.label.index(answerKey)}}"},
        "hellaswag": {"doc_to_choice": "endings", "doc_to_target": "place"},
    }
    ours = {"arc": {}, "hellaswag": {"choices": "endings", "gold": "place", "letters": None}}
    for name, keys in theirs.items():
        task = {
            "task": f"local_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": files, "cache_dir": str(tmp_path / "cache")},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "Headline: {{text}}\nTopic:",
            "metric_list": metrics,
            **keys,
        }
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(task))
    evaluated = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(demo.model_path()), "device": "cpu", "dtype": "float32", "logits_cache": False},
        tasks=[f"local_{name}" for name in theirs],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    measured = {"acc": "sum", "acc_norm": "characters", "acc_bytes": "bytes"}
    for name, changes in ours.items():
        wording = {key: value for key, value in {**WORDING, **changes}.items() if value is not None}
        (folder / f"{name}_ours.yaml").write_text(yaml.safe_dump(wording))
        iclperm.run(
            Study(task=str(folder / f"{name}_ours.yaml"), sets=1, permutations=1, shots=0, queries=16),
            out=tmp_path / name,
        )
        samples = {sample["doc_id"]: sample for sample in evaluated["samples"][f"local_{name}"]}
        accuracies = set()
        for metric, normalize in measured.items():
            found = iclperm.open_run(tmp_path / name, normalize=normalize)
            for query, row in enumerate(found.splits["test"].examples.tolist()):
                assert found.correct[0, 0, 0, query] == samples[row][metric]
                scores = [float(answer[0][0]) for answer in samples[row]["resps"]]
                own = found.label_logprob[0, 0, 0, query, : len(scores)]
                assert np.allclose(own, scores, atol=1e-2)
                assert np.argmax(own) == np.argmax(scores)
            accuracy = evaluated["results"][f"local_{name}"][f"{metric},none"]
            assert found.correct.mean() == pytest.approx(accuracy)
            accuracies.add(accuracy)
        assert len(accuracies) > 1  # the lengths tell


def test_several_choices_may_be_right(folder):
    rows = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    for row in rows:
        row["right"] = list(range(len(row["endings"]) - 1))
    (folder / "several.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wording = {**WORDING, "data": {"train": "train.jsonl", "test": "several.jsonl"}, "gold": "right"}
    del wording["letters"]
    for row in (lines := [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]):
        row["right"] = [row["place"]]
    (folder / "several_train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    wording["data"]["train"] = "several_train.jsonl"
    (folder / "several.yaml").write_text(yaml.safe_dump(wording))
    run = iclperm.run(Study(task=str(folder / "several.yaml"), sets=1, permutations=1, shots=1, queries=16))
    items = run.splits["test"]
    chosen = items.context_prediction[items.context_of[0, 0, 0]]
    sizes = items.choices.number
    assert np.array_equal(run.correct[0, 0, 0], chosen < sizes - 1)
    assert run.chance == pytest.approx(np.average((sizes - 1) / sizes, weights=items.weights))
    table = run.to_pandas()
    assert np.array_equal(table["correct"], run.correct.ravel().astype(bool))


def test_what_is_kept_is_told(run, folder, tmp_path):
    """The tables of the folder, sample logs, prompts, pages and checks."""
    found = iclperm.open_run(folder / "run")
    queries = pq.read_table(folder / "run" / "queries.parquet").to_pylist()
    test = Task.load(folder / "arc.yaml").examples("test")
    assert [query["choices"] for query in queries] == [list(test.chosen[query["example"]].texts) for query in queries]
    assert [query["right"] for query in queries] == [list(test.chosen[query["example"]].gold) for query in queries]
    logs = write_logs(found, tmp_path / "logs")
    for path in logs.glob("*.jsonl"):
        for row in map(json.loads, path.read_text().splitlines()):
            texts = test.chosen[row["doc_id"]].texts
            assert [request["arg_1"] for request in row["arguments"].values()] == [f" {text}" for text in texts]
            assert row["acc"] == (np.argmax([float(each[0]) for each in row["filtered_resps"]]) == int(row["target"]))
    in_memory = iclperm.run(run.study.model_copy(update={"out": None}))
    assert in_memory.digest == run.digest
    cell = {"index_set": 0, "permutation": 0, "shots": 2, "query": 3}
    kept, reread = (one.prompt(**cell) for one in (found, in_memory))
    assert kept.labels == tuple(f" {text}" for text in queries[3]["choices"])
    assert (kept.text, kept.token_ids) == (reread.text, reread.token_ids)
    assert iclperm.verify(folder / "run").digest == run.digest
    assert found.write_report(tmp_path / "report")


def test_a_run_of_choices_grows_and_its_restricted_texts_stay(folder, tmp_path):
    study = Study(task=str(folder / "arc.yaml"), sets=1, permutations=2, shots=3, queries=8)
    iclperm.run(study, out=tmp_path / "grown")
    grown = iclperm.run(
        study.model_copy(update={"queries": 16, "permutations": 3}), out=tmp_path / "grown", extend=True
    )
    whole = iclperm.run(study.model_copy(update={"queries": 16, "permutations": 3}), out=tmp_path / "whole")
    assert grown.digest == whole.digest
    assert np.array_equal(grown.correct, whole.correct)
    (folder / "restricted.yaml").write_text(yaml.safe_dump({**WORDING, "restricted": True}))
    iclperm.run(study.model_copy(update={"task": str(folder / "restricted.yaml")}), out=tmp_path / "restricted")
    assert pq.read_table(tmp_path / "restricted" / "queries.parquet")["choices"].null_count == 8


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"scoring": "generate"}, "scoring is 'generate', but the choices"),
        ({"scoring": "first_token"}, "scoring is 'first_token', but the choices"),
        ({"calibration": "contextual"}, "calibration is 'contextual', but the choices"),
        ({"endpoint": {"base_url": "http://localhost:1/v1", "model": "m"}}, "which an endpoint is not asked yet"),
        ({"kind": "search", "criterion": "mutual_information"}, "criterion is 'mutual_information', but the choices"),
    ],
)
def test_what_needs_the_same_labels_is_refused(folder, choices, message):
    with pytest.raises(ConfigError, match=message):
        iclperm.plan(Study(task=str(folder / "arc.yaml"), queries=8, **choices))


@pytest.mark.parametrize("criterion", ["dev_accuracy", "majority_agreement", "local_entropy", "dev_log_likelihood"])
def test_a_search_chooses_by_criteria_that_choices_have(folder, tmp_path, criterion):
    study = Study(
        kind="search", task=str(folder / "arc.yaml"), sets=2, permutations=3, queries=8, dev_queries=8, shots=3,
        criterion=criterion,
    )  # fmt: skip
    found = iclperm.run(study, out=tmp_path / "search").findings()
    assert np.isfinite(found.scores).all()


def test_a_table_of_choices_that_do_not_fit_is_refused(run, folder):
    table = pq.read_table(folder / "run" / "queries.parquet")
    found = QueryChoices.of_table(table, len(run.labels))
    assert np.array_equal(found.right[np.arange(len(table)), run.gold], np.ones(len(table), bool))
    with pytest.raises((ValueError, IndexError)):
        QueryChoices.of_table(table, 2)


def test_a_worker_plans_choices_as_its_driver(study):
    work = lay_out(ResolvedStudy.of(study))
    (product,) = work.products
    plan = plan_from(*unpacked(plan_message(work, product)))
    assert (plan.tokens_unique, plan.num_labels) == (product.plan.tokens_unique, len(work.setting.labels))
