"""Studies whose answers are generated: exact, resumable, and read without hiding what could not be read."""

import json
import re
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from tiny import byte_level_tokenizer, make_rows, make_task, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import iclperm
from iclperm import Study
from iclperm.cli import main as cli
from iclperm.errors import ConfigError, DataError, RequestError
from iclperm.reference.generation import greedy_one
from iclperm.runs import audit, preview
from iclperm.runs.generated import FINISHES, NO_ANSWER, GeneratedAnswers, dense
from iclperm.runs.limits import WorkLimits
from iclperm.studies.generation import generation
from iclperm.studies.rereading import findings
from iclperm.study.states import OK, STATES, UNPARSED
from iclperm.tasks.task import Task, builtin_tasks

FIXTURES = Path(__file__).parent / "fixtures"
TASK = """
name: letters
data: {train: train.jsonl, test: test.jsonl, dev: dev.jsonl}
fields: {text: text, letter: letter}
answer: {field: letter, check: exact, rules: [{name: a letter, pattern: "[a-zA-Z]"}, {name: a digit, pattern: "[0-9]"}]}
demonstration: "Text: {{ text }}\\nAnswer: {{ letter }}"
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
        rows = [{**row, "letter": "mTuJab"[place % 6]} for place, row in enumerate(make_rows(number, 24))]
        write_rows(tmp_path / f"{split}.jsonl", rows)
    path = tmp_path / "letters.yaml"
    path.write_text(TASK)
    return Study(model=str(model), task=str(path), sets=2, permutations=3, shots=[0, 1, 3], queries=6, seed=1)


run_in_parts = partial(iclperm.run, limits=WorkLimits(unit_tokens=(60, 60)))
"""Cuts the work of the tiny study into many units, each its own file."""


def generated_plainly(study, cell):
    """The oracle: the text of one prompt through the plain model, a whole forward pass for every new token."""
    net = AutoModelForCausalLM.from_pretrained(study.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(study.model)
    index_set, permutation, place, query = cell
    shots = study.shot_list(0)[place]
    text = preview.sample_prompt(study, index_set=index_set, permutation=permutation, shots=shots, query=query)
    prompt = tokenizer(text.context + text.query)["input_ids"]
    task = Task.load(study.task)
    steps = greedy_one(
        net, prompt, task.max_new_tokens, stops=lambda ids: any(stop in tokenizer.decode(ids) for stop in task.stop)
    )
    written = tokenizer.decode([step.token for step in steps], skip_special_tokens=True)
    cut = min((written.index(stop) for stop in task.stop if stop in written), default=len(written))
    return written[:cut], sum(step.logprob for step in steps), text.answer


def rows_of(run, split="test"):
    rows = run.to_arrow().to_pylist()
    return {
        (row["set"], row["permutation"], run.shots.index(row["shots"]), row["query"]): row
        for row in rows
        if row["split"] == split
    }


def test_texts_and_verdicts_are_those_of_plain_greedy_decoding(study, tmp_path):
    run = iclperm.run(study, tmp_path / "run")
    assert run.study.scoring == "generate"
    assert (run.labels, run.chance) == ((), None)
    assert run.label_logprob.shape == (2, 3, 3, 6, 0)
    rows = rows_of(run)
    for cell in [(0, 0, 0, 0), (1, 2, 0, 5), (0, 1, 1, 2), (1, 0, 2, 3), (1, 2, 2, 5)]:
        text, logprob, right = generated_plainly(study, cell)
        row = rows[cell]
        assert row["text"] == text
        assert row["gold"] == right
        assert row["logprob"] == pytest.approx(logprob, abs=1e-3)
        letters = [character for character in text if character.isascii() and character.isalpha()]
        digits = [character for character in text if character.isascii() and character.isdigit()]
        answer = (letters or digits or [None])[0]
        assert row["prediction"] == answer
        assert run.correct[cell] == (answer == right)
        assert row["state"] == ("ok" if answer else "unparsed")
    assert {row["finish"] for row in rows.values()} <= {"stop", "eos", "length"}
    assert run.report.tokens_forwarded > run.report.tokens_unique


def test_texts_read_by_another_task_are_those_of_a_run_of_it(study, tmp_path, capsys):
    run = iclperm.run(study, tmp_path / "run")
    other = tmp_path / "digits.yaml"
    of_digits = TASK.replace("name: letters", "name: digits").replace('{name: a letter, pattern: "[a-zA-Z]"}, ', "")
    other.write_text(of_digits.replace("check: exact,", "check: exact, ignore_case: true,"))
    found = iclperm.open_run(tmp_path / "run").read_by(other)
    own, by_digits = found.readings
    assert own.accuracy == pytest.approx([at.unparsed_wrong for at in run.generation.by_shots])
    assert own.unparsed == pytest.approx([at.unparsed for at in run.generation.by_shots])
    assert (own.task, own.gained, own.lost) == ("letters", 0, 0)
    there = iclperm.run(study.model_copy(update={"task": str(other)}))
    assert there.to_arrow()["text"].equals(run.to_arrow()["text"])
    assert by_digits.accuracy == pytest.approx([at.unparsed_wrong for at in there.generation.by_shots])
    assert by_digits.unparsed == pytest.approx([at.unparsed for at in there.generation.by_shots])
    assert by_digits.unparsed != own.unparsed
    first = np.array([row["text"][:1] == row["gold"] for row in rows_of(run).values()])
    loose = tmp_path / "loose.yaml"
    loose.write_text(TASK.replace("name: letters", "name: first").replace("[a-zA-Z]", "^."))
    (_, by_first) = run.read_by(loose).readings
    weights = np.tile(run.weights, 2 * 3 * 3)
    correct = run.correct.reshape(-1).astype(bool)
    assert by_first.gained == pytest.approx(np.average(first & ~correct, weights=weights))
    assert by_first.lost == pytest.approx(np.average(correct & ~first, weights=weights))
    assert run.report_content()["rereading"]["readings"][1]["task"] == "first"
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", str(tmp_path / "run"), "--read-by", str(other), "--read-by", str(loose), "--json"])
    assert ended.value.code == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["task"] for each in told["rereading"]["readings"]] == ["letters", "digits", "first"]
    assert "rereading" not in iclperm.open_run(tmp_path / "run").report_content()
    assert (tmp_path / "run" / "report-read-by" / "report.json").is_file()


def test_strict_and_flexible_match_of_the_harness_stand_side_by_side():
    texts = ["3 + 2 is 5\n#### 5", "The answer is 5.", "#### 5 of the 9", "I cannot say"]
    state = np.array([[OK, OK, OK, UNPARSED]], np.uint8)
    written = replace(
        GeneratedAnswers.empty(state, 1, 1 << 20),
        correct=np.array([[True, True, True, False]]),
        table=lambda contexts: pa.table({"text": texts * len(contexts)}),
    )
    items = SimpleNamespace(
        generated=written,
        context_of=np.zeros((1, 1, 1), np.int64),
        right_answers=("5",) * 4,
        weights=np.ones(4),
        metric=None,
    )
    study = SimpleNamespace(think="keep")
    run = SimpleNamespace(splits={"test": items}, study=study, task="gsm8k", shots=(8,), metric=None)
    file = Path(str(find_spec("lm_eval").origin)).parent / "tasks/gsm8k/gsm8k.yaml"
    named = [Task.load(f"{file}:{name}") for name in ("strict-match", "flexible-extract")]
    own, strict, flexible = findings(run, named).readings
    assert (own.accuracy, strict.accuracy, flexible.accuracy) == ((0.75,), (0.5,), (0.5,))
    assert (own.unparsed, strict.unparsed, flexible.unparsed) == ((0.25,), (0.5,), (0.25,))
    assert (strict.gained, strict.lost, flexible.gained, flexible.lost) == (0.0, 0.25, 0.0, 0.25)


def test_what_cannot_be_read_again_is_told_in_a_line(study, tmp_path):
    run = iclperm.run(study.model_copy(update={"sets": 1, "permutations": 1, "shots": [1]}))
    with pytest.raises(ConfigError, match=r"^mini_news has labels and no rules to read a text by; name a task whose"):
        run.read_by("mini_news")
    with pytest.raises(ConfigError, match=r"^no task is named by whose rules to read; give one$"):
        run.read_by()
    with pytest.raises(DataError, match=r"^the right answer '[mTuJab]' is not a number, .*; repair the row"):
        run.read_by("gsm8k")
    chosen = iclperm.run(Study(sets=1, permutations=1, shots=[1], queries=2))
    with pytest.raises(DataError, match=r"^this run's answers are not generated, so there are no texts to read again$"):
        chosen.read_by("gsm8k")


def test_a_stopped_run_continues_to_the_same_answers(study, tmp_path):
    whole = run_in_parts(study)

    class Stop(Exception):
        pass

    def stop_early(done, _total):
        if done == 2:
            raise Stop

    with pytest.raises(Stop):
        run_in_parts(study, tmp_path / "run", progress=stop_early)
    again = run_in_parts(study, tmp_path / "run")
    assert 2 <= again.report.num_parts_resumed < again.report.num_parts
    assert again.digest == whole.digest
    opened = iclperm.open_run(tmp_path / "run")
    assert opened.to_arrow().equals(whole.to_arrow())
    checked = audit.verify(tmp_path / "run")
    assert (checked.damage, checked.digest) == ([], whole.digest)


def test_a_run_grows_without_generating_anything_twice(study, tmp_path):
    larger = study.model_copy(update={"sets": 3, "queries": 9})
    run_in_parts(study, tmp_path / "run")
    before = {path.name for path in (tmp_path / "run" / "items").iterdir()}
    grown = run_in_parts(larger, tmp_path / "run", extend=True)
    assert before < {path.name for path in (tmp_path / "run" / "items").iterdir()}
    assert grown.digest == run_in_parts(larger).digest


def test_unparsed_answers_are_wrong_or_drop_their_query_and_never_hidden(study, tmp_path):
    wrong = iclperm.run(study, tmp_path / "run")
    dropped = iclperm.open_run(tmp_path / "run", unparsed="drop")
    with pytest.raises(ConfigError, match="normalize is 'mean', but generated answers have no label scores"):
        iclperm.open_run(tmp_path / "run", normalize="mean")
    is_unparsed = dropped.state == UNPARSED
    assert is_unparsed.any()
    assert not is_unparsed.all()
    assert (wrong.state == OK).all()
    assert (wrong.correct[is_unparsed] == 0).all()
    assert wrong.digest == dropped.digest
    assert wrong.generation.by_shots[-1].unparsed == pytest.approx(is_unparsed[:, :, -1].mean())
    assert dropped.generation.dropped == pytest.approx(is_unparsed.any(axis=(0, 1, 2)).mean())
    assert {rule.rule for rule in wrong.generation.rules} <= {"a letter", "a digit"}
    assert sum(rule.share for rule in wrong.generation.rules) == pytest.approx(1 - is_unparsed.mean())
    codes = wrong.splits["test"].context_prediction[wrong.splits["test"].context_of]
    assert ((codes == NO_ANSWER) == is_unparsed).all()


def test_a_finished_run_is_read_as_it_is_asked_for_now(study, tmp_path):
    wrong = iclperm.run(study, tmp_path / "run")
    dropped = iclperm.run(study.model_copy(update={"unparsed": "drop"}), tmp_path / "run")
    assert dropped.report.num_parts_resumed == dropped.report.num_parts
    assert (wrong.state == OK).all()
    assert (dropped.state == UNPARSED).any()
    assert dropped.study.unparsed == "drop"


def test_sums_over_a_run_count_what_the_run_counts(study, tmp_path):
    run = iclperm.run(study, tmp_path / "run")
    assert run.correct.any()
    sums = iclperm.stats.tensor_sums(run.splits["test"])
    np.testing.assert_allclose(sums.accuracy.values, run.correct.mean(axis=-1))


@pytest.mark.parametrize("queries", [range(6, 24, 3)])
def test_a_run_grows_whatever_the_length_of_what_is_added(study, tmp_path, queries):
    """Units are cut by the queries that they hold, not by those that come later."""
    long = study.model_copy(update={"max_new_tokens": 40})
    for count in queries:
        grown = iclperm.run(long.model_copy(update={"queries": count}), tmp_path / "run", extend=True)
    assert grown.digest == iclperm.run(long.model_copy(update={"queries": queries[-1]})).digest


def test_what_ends_a_text_is_part_of_the_run(study, model, tmp_path):
    import shutil

    folder = shutil.copytree(model, tmp_path / "model")
    own = study.model_copy(update={"model": str(folder)})
    iclperm.run(own, tmp_path / "run")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    with pytest.raises(iclperm.errors.RunError, match=r"generation\.ends"):
        iclperm.run(own, tmp_path / "run")


def test_reports_of_every_kind_are_made_of_generated_answers(study, tmp_path):
    asked = study.model_copy(update={"dev_queries": 6, "shots": [0, 1, 2, 3]})
    run = iclperm.run(asked, tmp_path / "run")
    for kind in ("sensitivity", "search", "curve", "convergence", "features", "generation"):
        content = json.loads(json.dumps(run.report_content(kind), allow_nan=False))
        assert content["generation"]["by_shots"][0]["shots"] == 0
        assert run.write_report(tmp_path / kind, kind)
        assert run.findings(kind).conclusion()
    criteria = run.report_content("search")["criteria"]
    assert [criterion["name"] for criterion in criteria] == ["dev_accuracy", "majority_agreement"]
    with pytest.raises(DataError, match="content-free"):
        run.findings("calibration")


def test_labels_can_be_written_and_must_be_named_alone(tmp_path, model):
    task = make_task(tmp_path)
    study = Study(model=str(model), task=str(task), sets=2, permutations=2, shots=[2], queries=4, scoring="generate")
    run = iclperm.run(study.model_copy(update={"max_new_tokens": 3}))
    words = {word.casefold() for word in run.labels}
    assert len(words) > 1
    for row in rows_of(run).values():
        first_line = next((line for line in row["text"].splitlines() if line.strip()), "")
        is_word = first_line.strip(" .,:;!?'\"").casefold() in words
        named = words & set(re.findall(r"\w+", first_line.casefold()))
        assert (row["state"] == "ok") == (is_word or len(named) == 1)
        assert row["correct"] is (row["prediction"] == row["gold"])


def test_the_first_token_alone_can_be_scored(tmp_path, model):
    study = Study(model=str(model), task=str(make_task(tmp_path)), sets=2, permutations=2, shots=[2], queries=4)
    whole = iclperm.run(study)
    first = iclperm.run(study.model_copy(update={"scoring": "first_token"}))
    assert set(first.label_tokens) == {1}
    assert (first.label_logprob >= whole.label_logprob - 1e-4).all()


def test_what_does_not_go_together_is_refused_by_name(study, tmp_path, model):
    for changes, words in (
        ({"scoring": "loglikelihood"}, "has no labels to score"),
        ({"calibration": "contextual"}, "no label scores"),
        ({"normalize": "mean"}, "no label scores"),
    ):
        with pytest.raises(ConfigError, match=words):
            iclperm.plan(study.model_copy(update=changes))
    with pytest.raises(DataError, match="'max_new_tokens'"):
        iclperm.plan(study.model_copy(update={"max_new_tokens": 100_000}))
    labelled = Study(model=str(model), task=str(make_task(tmp_path)), shots=2, max_new_tokens=3)
    with pytest.raises(ConfigError, match="max_new_tokens is for generated answers"):
        iclperm.plan(labelled)


def test_the_plan_bounds_what_is_generated(study):
    planned = iclperm.plan(study)
    assert planned.max_new_tokens == 5
    run = iclperm.run(study)
    most = planned.tokens_unique + planned.num_prompts * (planned.max_new_tokens - 1)
    assert planned.tokens_unique <= run.report.tokens_forwarded <= most


@pytest.mark.parametrize("name", sorted({*builtin_tasks()} - {"mini_news"}))
def test_every_built_in_task_runs_from_files_as_they_are_published(name, tmp_path):
    task = Task.load(name, FIXTURES)
    sizes = {"sets": 2, "permutations": 2, "queries": 4}
    study = Study(task=name, data=str(FIXTURES), shots=2, **sizes)
    if task.is_generated:
        study = study.model_copy(update={"max_new_tokens": 8})
    run = iclperm.run(study, tmp_path / "run")
    assert run.study.scoring == ("generate" if task.is_generated else "loglikelihood")
    assert run.correct.shape == (2, 2, 1, 4)
    assert run.report.tokens_forwarded >= run.report.tokens_unique > 0
    assert run.write_report()
    if not task.is_generated:
        written = iclperm.run(study.model_copy(update={"scoring": "generate", "max_new_tokens": 8}))
        assert written.correct.shape == run.correct.shape
        assert written.generation is not None


def test_codes_tell_answers_apart_within_each_query():
    codes = np.array([[[7, 900], [7, 3], [2, 3]]])
    assert dense(codes).tolist() == [[[1, 1], [1, 0], [0, 0]]]


def test_shares_of_generated_answers_weigh_queries():
    state = np.array([OK, UNPARSED, OK, STATES.index("api_missing")]).reshape(1, 1, 1, 4)
    correct = np.array([True, False, False, False]).reshape(1, 1, 1, 4)
    rule = np.array([0, -1, 1, -1]).reshape(1, 1, 1, 4)
    finish = np.array([0, 2, 2, -1]).reshape(1, 1, 1, 4)
    tokens = np.array([4, 10, 6, 0]).reshape(1, 1, 1, 4)
    found = generation(state, correct, rule, finish, tokens, shots=[8], rules=["first", "second"], weights=[2, 1, 1, 4])
    (at,) = found.by_shots
    assert at.unparsed == pytest.approx(1 / 4)
    assert at.missing == pytest.approx(4 / 8)
    assert at.cut_off == pytest.approx(2 / 4)
    assert at.num_tokens == pytest.approx((2 * 4 + 10 + 6) / 4)
    assert at.answered == pytest.approx(2 / 3)
    assert at.unparsed_wrong == pytest.approx(2 / 4)
    assert {use.rule: (use.share, use.accuracy, use.right) for use in found.rules} == {
        "first": (0.5, 1.0, 0.5),
        "second": (0.25, 0.0, 0.0),
    }
    with pytest.raises(RequestError, match="must be"):
        generation(state, correct, rule, finish, tokens[..., :2], shots=[8], rules=[])


@pytest.mark.parametrize(
    ("is_open", "num_unparsed", "warning"),
    [
        (
            False,
            1,
            "25% of the texts at k = 8 go on after a label until their tokens are used up; give the task a 'stop'",
        ),
        (False, 0, ""),  # a label was read all the same
        (True, 1, "25% of the texts at k = 8 end because their tokens were used up; raise 'max_new_tokens'"),
        (True, 0, "25% of the texts at k = 8 end because their tokens were used up; raise 'max_new_tokens'"),
    ],
)
def test_texts_that_are_cut_off_are_warned_of(is_open, num_unparsed, warning):
    state = np.array([OK, OK, OK, UNPARSED if num_unparsed else OK]).reshape(1, 1, 1, 4)
    finish = np.array([0, 0, 0, FINISHES.index("length")]).reshape(1, 1, 1, 4)
    rule = np.zeros_like(state) - (state == UNPARSED)
    found = generation(state, state == OK, rule, finish, finish + 1, shots=[8], rules=["any"], is_open=is_open)
    assert len(found.warnings) == (warning != "")
    assert all(each.startswith(warning) for each in found.warnings)
