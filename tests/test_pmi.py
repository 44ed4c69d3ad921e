"""``normalize: pmi``: labels and choices less what they have without a context, asked once, kept, told."""

import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from test_row_choices import WORDING, arc_rows
from tolerances import TOLERANCES

import iclperm
from iclperm import Study, Task, demo
from iclperm.cli import main as cli
from iclperm.errors import ConfigError, RunError
from iclperm.reference.mutual_information import information, most_informed
from iclperm.runs.alone import Alone
from iclperm.runs.harness_logs import write_logs
from iclperm.runs.query_choices import ALONE, AloneScores
from iclperm.runs.setting import model_tokenizer
from iclperm.study.states import OK, STATES

PER_TOKEN = TOLERANCES["loglikelihood per token"]["float32"]
SIZES = {"sets": 2, "permutations": 2, "shots": [0, 2], "queries": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pmi")
    for name, split, count, begin in (("train", "train", 12, 0), ("test", "test", 16, 0), ("dev", "test", 8, 20)):
        rows = arc_rows(split, count, begin)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "arc.yaml").write_text(yaml.safe_dump(WORDING))
    return folder


def study_of(name, folder, **changes):
    tasks = {"labels": "mini_news", "choices": str(folder / "arc.yaml")}
    return Study(task=tasks[name], normalize="pmi", **{**SIZES, **changes})


@pytest.fixture(scope="module", params=["labels", "choices"])
def ran(request, folder):
    study = study_of(request.param, folder)
    return SimpleNamespace(
        name=request.param, study=study, run=iclperm.run(study, folder / request.param), path=folder / request.param
    )


def test_every_answer_is_that_of_plain_transformers(ran):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo.model_path(), dtype="float32").eval()
    tokenizer, run = model_tokenizer(demo.model_path()), ran.run
    items = run.splits["test"]
    assert run.report.tokens_forwarded == run.report.tokens_unique
    nothing = tokenizer("")["input_ids"] or [tokenizer.bos_token_id or tokenizer.eos_token_id]
    num_changed = 0
    for cell in [(0, 0, 0), (1, 1, 1)]:
        for query in range(len(items.examples)):
            where = {"index_set": cell[0], "permutation": cell[1], "shots": run.shots[cell[2]], "query": query}
            prompt = iclperm.sample_prompt(ran.study, **where)
            before = tokenizer(prompt.text)["input_ids"]
            choices = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompt.continuations]
            values = information(model, before, nothing, choices)
            alone = items.alone[query if ran.name == "choices" else 0]
            found = (run.label_logprob[(*cell, query)] - alone)[: len(choices)]
            assert np.abs((found - values) / [len(ids) for ids in choices]).max() < 2 * PER_TOKEN
            best = most_informed(values)
            assert items.context_prediction[items.context_of[cell], query] == best
            right = Task.load(ran.study.task).examples("test")
            gold = [items.gold[query]] if right.chosen is None else right.chosen[items.examples[query]].gold
            assert run.correct[(*cell, query)] == (best in gold)
            num_changed += best != int(np.nanargmax(run.label_logprob[(*cell, query)]))
    assert ran.name == "labels" or num_changed  # by what is taken off


def test_what_was_asked_is_kept_beside_the_answers(ran, tmp_path):
    """A file of its own; another normalisation needs no model, and what was stored is what is compared."""
    run, path = ran.run, ran.path
    tables = [pq.read_table(file) for file in sorted((path / "items").iterdir())]
    (own,) = [table for table in tables if ALONE in table.column_names]
    assert len(own) == (8 if ran.name == "choices" else 1)
    assert iclperm.verify(path).digest == run.digest
    found = {name: iclperm.open_run(path, normalize=name) for name in ("pmi", "sum", "bytes")}
    assert {each.digest for each in found.values()} == {run.digest}
    assert np.array_equal(found["pmi"].correct, run.correct)
    assert ran.name == "labels" or not np.array_equal(found["sum"].correct, run.correct)
    plain = iclperm.run(ran.study.model_copy(update={"normalize": "sum"}))
    assert np.array_equal(found["sum"].correct, plain.correct)
    assert np.array_equal(found["sum"].label_logprob, plain.label_logprob, equal_nan=True)
    scores = next(iter(run.splits["test"].scores_by_cell()))
    less = run.label_logprob[0, 0, 0] - run.splits["test"].alone
    is_there = np.isfinite(less)
    assert np.allclose(scores[is_there], less[is_there], atol=1e-5)
    assert np.isneginf(scores[~is_there]).all()
    table, label = run.to_pandas(), run.labels[0]
    first = np.broadcast_to(run.splits["test"].alone[:, 0], 8)
    assert np.array_equal(table[f"logprob_alone_{label}"], np.tile(first, len(table) // 8))
    assert f"logprob_alone_{label}" not in plain.to_pandas().columns
    (rows, *_) = sorted(write_logs(run, tmp_path / "logs").glob("*.jsonl"))
    for row in map(json.loads, rows.read_text().splitlines()):
        best = int(np.argmax([float(value) for value, _ in row["filtered_resps"]]))
        if ran.name == "labels":
            assert row["acc"] == (best == int(row["target"]))


def test_a_damaged_or_lost_part_is_asked_again(ran, tmp_path):
    path = tmp_path / "run"
    run = iclperm.run(ran.study, path)
    (own,) = [file for file in (path / "items").iterdir() if ALONE in pq.read_schema(file).names]
    whole = own.read_bytes()
    own.unlink()
    with pytest.raises(RunError):
        iclperm.open_run(path).digest  # noqa: B018
    continued = iclperm.run(ran.study, path)
    assert (continued.digest, own.read_bytes()) == (run.digest, whole)
    assert continued.report.num_parts_resumed == run.report.num_parts - 1
    own.write_bytes(whole[:-1])
    assert iclperm.verify(path).damage
    assert iclperm.run(ran.study, path).report.num_quarantined == 1


def test_a_run_grows_and_workers_share_it(ran, folder, tmp_path):
    larger = study_of(ran.name, folder, queries=16, permutations=2)
    whole = iclperm.run(larger)
    iclperm.run(ran.study, tmp_path / "grown")
    grown = iclperm.run(larger, tmp_path / "grown", extend=True)
    assert grown.digest == whole.digest
    assert np.array_equal(grown.correct, whole.correct)
    assert iclperm.verify(tmp_path / "grown").digest == whole.digest
    shared = iclperm.run(larger, tmp_path / "shared", workers=2)
    assert shared.digest == whole.digest


def test_runs_that_do_not_ask_it_stay_as_they_are(ran, tmp_path):
    plain = ran.study.model_copy(update={"normalize": "sum"})
    iclperm.run(plain, tmp_path / "plain")
    plan = json.loads((tmp_path / "plain" / "plan.json").read_bytes())
    asked = json.loads((ran.path / "plan.json").read_bytes())
    assert "pmi" not in plan
    assert asked["pmi"] is True
    assert asked["work"]["cells"] - plan["work"]["cells"] == (8 if ran.name == "choices" else 1)
    with pytest.raises(ConfigError, match="has not asked for labels without a context; run the study with normalize"):
        iclperm.open_run(tmp_path / "plain", normalize="pmi").correct  # noqa: B018
    with pytest.raises(RunError, match="another run: normalize is pmi here alone; give another folder"):
        iclperm.run(ran.study, tmp_path / "plain")


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_folder_that_has_it_is_left_as_it_is_without(ran, is_finished, tmp_path):
    shutil.copytree(ran.path, run := tmp_path / "run")
    if not is_finished:
        next((run / "items").rglob("*.parquet")).unlink()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    more = {"queries": 12} if ran.name == "labels" else {}
    for changes, extend in (({}, False), (more, True)):
        said = r"normalize is pmi there alone \(report --normalize sum reads it as sums\); give another folder"
        with pytest.raises(RunError, match=said):
            iclperm.run(ran.study.model_copy(update={"normalize": "sum", **changes}), run, extend=extend)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    if is_finished:
        assert iclperm.open_run(run, normalize="sum").digest == ran.run.digest


def test_a_folder_of_several_runs_that_have_it_is_of_no_other_study(folder, tmp_path):
    study = study_of("labels", folder, kind="selection", dev_queries=8, shots=2, select=2)
    iclperm.run(study, tmp_path / "run")
    with pytest.raises(RunError, match="another study: normalize is pmi there and not pmi here"):
        iclperm.run(study.model_copy(update={"normalize": "sum"}), tmp_path / "run")
    assert iclperm.open_run(tmp_path / "run").study.normalize == "pmi"


def test_the_plan_counts_and_shows_it(ran, capsys):
    plain = iclperm.plan(ran.study.model_copy(update={"normalize": "sum"}))
    planned = iclperm.plan(ran.study)
    asked = 8 if ran.name == "choices" else 1
    assert (plain.num_alone, planned.num_alone) == (0, asked)
    assert planned.num_prompts == plain.num_prompts + asked
    assert planned.tokens_unique - plain.tokens_unique == ran.run.report.tokens_forwarded - plain.tokens_unique > 0
    sizes = ["--permutations", "2", "--shots", "2", "--queries", "8"]
    with pytest.raises(SystemExit) as left:
        cli.main(["plan", "--task", ran.study.task, "--normalize", "pmi", *sizes])
    said = capsys.readouterr().out
    assert not left.value.code
    assert re.search(rf"of them without a context +{asked}, the labels after '<\|bos\|>' alone", said), said


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"calibration": "contextual"}, "two priors; leave one out"),
        ({"chat": "single"}, "chat is 'single', which has no empty prompt"),
        ({"scoring": "first_token"}, "first tokens are compared as they are"),
        ({"scoring": "generate"}, "generated answers have no label scores"),
        ({"endpoint": {"base_url": "http://localhost:1/v1", "model": "m"}}, "an API is not asked for labels without"),
        ({"kind": "search", "budget": "adaptive", "dev_queries": 8}, "budget decides from sums as it goes"),
        ({"kind": "race", "dev_queries": 30}, "a race decides from sums as it goes; set it to sum"),
        ({"kind": "recommend", "dev_queries": 30, "queries": 30}, "a race decides from sums as it goes; set it to sum"),
        ({"kind": "curve", "precision": "accuracy +- 0.1"}, "precision decides from sums as it goes"),
    ],
)
def test_what_does_not_go_with_it_is_refused(choices, message):
    with pytest.raises(ConfigError, match=message):
        iclperm.plan(Study(**{"normalize": "pmi", "queries": 8, **choices}))


def test_a_model_without_a_token_to_begin_with_is_refused():
    class Bare:
        bos_token_id = eos_token_id = eos_token = None

        def __call__(self, texts, **_):
            return {"input_ids": [[ord(letter) for letter in text] for text in texts]}

    texts = SimpleNamespace(after=lambda query: ["a", "b"])
    prompts = SimpleNamespace(pieces=SimpleNamespace(texts=texts), choices=None, queries=[0], after=texts.after)
    with pytest.raises(ConfigError, match="names a BOS or EOS token"):
        Alone.of(SimpleNamespace(facts=None), prompts, Bare())


@given(st.lists(st.integers(-3, 0).map(float), min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_of_equals_the_lowest_is_taken(values):
    assert most_informed(values) == int(np.argmax(values))


@given(st.lists(st.sampled_from([OK, STATES.index("invalid")]), min_size=1, max_size=6), st.booleans())
@settings(max_examples=30, deadline=None)
def test_rows_are_filled_in_where_they_belong(states, is_by_query):
    import pyarrow as pa

    states = states if is_by_query else states[:1]
    values = [[float(-row), -1.0] if state == OK else None for row, state in enumerate(states)]
    nowhere = [None] * len(states)
    table = pa.table(
        {
            "split": pa.array(["test"] * len(states) if is_by_query else nowhere, pa.string()),
            "query": pa.array([*range(len(states))] if is_by_query else nowhere, pa.int32()),
            ALONE: pa.array(values, pa.list_(pa.float32())),
            "state": [STATES[state] for state in states],
        }
    )
    scores = AloneScores.empty(2, np.zeros(len(states), np.uint8), is_by_query=is_by_query)
    assert scores.num_missing == len(states)
    scores.fill(table, {"test": 0})
    assert scores.num_missing == 0
    assert [row.tolist() if state == OK else None for row, state in zip(scores.logprob, states, strict=True)] == values
    assert scores.of(slice(0, 1)).shape == (1, 2)


def test_a_search_and_a_curve_compare_by_it(folder, tmp_path):
    for kind, sizes in (("search", {"dev_queries": 8, "shots": 2}), ("curve", {"shots": 2})):
        study = study_of("choices", folder, **{**SIZES, "kind": kind, **sizes})
        found = iclperm.run(study, tmp_path / kind)
        assert found.findings().to_dict()
        assert len(found.splits["test"].alone) == 8
