"""Runs: exact, resumable, never lossy, and honest about what is damaged or does not fit.

More than 600 lines because one small study, run once, is what all of its tests look at, stop, damage or repeat.
"""

import dataclasses
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from itertools import product, takewhile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tiny import (
    byte_level_tokenizer,
    dummy_prefix_tokenizer,
    greedy_tokenizer,
    make_model,
    make_rows,
    make_task,
    write_rows,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

import iclperm
from iclperm import Study
from iclperm.engine import engine, footprint, numerics
from iclperm.errors import ConfigError, DataError, ModelError, RunError, RunStopped
from iclperm.prompts.tokenise import Cell
from iclperm.reference.scoring import score_one
from iclperm.runs import answering, layout, preview, read, scorers, setting, tables, work
from iclperm.runs.answers import Items
from iclperm.runs.folder import RunFolder
from iclperm.runs.limits import WorkLimits
from iclperm.runs.parts import PartFiles
from iclperm.studies.told import told
from iclperm.study import states

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), byte_level_tokenizer())


@pytest.fixture
def study(tmp_path, model):
    return Study(
        model=str(model), task=str(make_task(tmp_path)), sets=2, permutations=3, shots=[0, 1, 3], queries=6, seed=1
    )


@pytest.fixture(autouse=True, scope="module")
def engines():
    """One engine a model folder: its check on first use is tested elsewhere and need not be repeated for every run."""
    load = iclperm.Engine.from_pretrained
    loaded = {}

    def from_pretrained(name, **choices):
        key = (str(name), *choices.values())
        if key not in loaded:
            loaded[key] = load(name, **choices)
        return loaded[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(iclperm.Engine, "from_pretrained", from_pretrained)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # models this small only lose by more
        yield
        torch.set_num_threads(threads)


run_in_parts = partial(iclperm.run, limits=WorkLimits(unit_tokens=(60, 60)))
"""Cuts the work of the tiny study into many units, each its own file."""


class Stop(Exception):
    pass


def stop_after(parts):
    def progress(done, _total):
        if done >= parts:
            raise Stop

    return progress


def assert_same_results(a, b):
    np.testing.assert_array_equal(a.label_logprob, b.label_logprob)
    np.testing.assert_array_equal(a.correct, b.correct)
    np.testing.assert_array_equal(a.state, b.state)
    np.testing.assert_array_equal(a.gold, b.gold)
    assert (a.shots, a.labels, a.task) == (b.shots, b.labels, b.task)


def plain_logprobs(study, cell):
    """The oracle: the text of one prompt, tokenised at once, through the plain model; nats, [L]."""
    model = AutoModelForCausalLM.from_pretrained(study.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(study.model)
    index_set, permutation, place, query = cell
    shots = study.shot_list(0)[place]
    text = preview.sample_prompt(study, index_set=index_set, permutation=permutation, shots=shots, query=query)
    prompt = tokenizer(text.context + text.query)["input_ids"]
    wholes = [tokenizer(text.context + text.query + continuation)["input_ids"] for continuation in text.continuations]
    assert all(whole[: len(prompt)] == prompt for whole in wholes)
    return [score_one(model, prompt, whole[len(prompt) :]).logprob for whole in wholes]


@pytest.mark.parametrize("make_tokenizer", [byte_level_tokenizer, dummy_prefix_tokenizer])
def test_every_cell_agrees_with_the_plain_model(tmp_path, study, make_tokenizer):
    study = study.model_copy(update={"model": str(make_model(tmp_path / "model", make_tokenizer()))})
    run = iclperm.run(study)
    assert run.label_logprob.shape == (2, 3, 3, 6, 3)
    assert run.label_logprob.dtype == np.float32
    assert run.correct.dtype == np.uint8
    assert run.report.tokens_forwarded > 0
    assert (run.report.num_general_cells > 0) == (make_tokenizer is dummy_prefix_tokenizer)
    for cell in [(0, 0, 0, 0), (1, 2, 0, 5), (0, 1, 1, 2), (1, 0, 2, 3), (1, 2, 2, 5)]:
        expected = plain_logprobs(study, cell)
        np.testing.assert_allclose(run.label_logprob[cell], expected, atol=TOLERANCE, rtol=0)
        assert run.correct[cell] == (np.argmax(expected) == run.gold[cell[3]])


def test_zero_shots_are_scored_once_and_shared_by_all_orderings(study):
    run = iclperm.run(study)
    zero_shot = run.label_logprob[:, :, 0]
    np.testing.assert_array_equal(zero_shot, np.broadcast_to(zero_shot[0, 0], zero_shot.shape))
    assert len(set(run.splits["test"].context_of[:, :, 0].ravel())) == 1


def test_a_finished_run_is_read_back_whole(tmp_path, study, monkeypatch):
    first = iclperm.run(study, tmp_path / "run")
    assert_same_results(iclperm.run(study), first)
    monkeypatch.setattr(iclperm.engine.Engine, "from_pretrained", None)  # no model may be loaded from here on
    again = iclperm.run(study, tmp_path / "run")
    assert_same_results(again, first)
    assert again.report.num_parts_resumed == again.report.num_parts
    assert again.report.tokens_forwarded == first.report.tokens_forwarded
    opened = iclperm.open_run(tmp_path / "run")
    assert_same_results(opened, first)
    assert opened.study == study.model_copy(
        update={"scoring": "loglikelihood", "chat": "none"}
    )  # as task and model ask


def test_a_stopped_run_continues_where_it_was(tmp_path, study):
    whole = run_in_parts(study)
    assert whole.report.num_parts > 3
    with pytest.raises(Stop):
        run_in_parts(study, tmp_path / "run", progress=stop_after(2))
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run/items").iterdir()}
    assert len(kept) == 2
    with pytest.raises(RunError, match=r"is not finished \(2 of \d+ parts\)"):
        iclperm.open_run(tmp_path / "run")
    continued = run_in_parts(study, tmp_path / "run")
    assert continued.report.num_parts_resumed == 2
    assert_same_results(continued, whole)
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run/items").iterdir()}
    assert kept.items() <= after.items()
    assert not list((tmp_path / "run/tmp").iterdir())
    sessions = [json.loads(path.read_text()) for path in (tmp_path / "run/environment").iterdir()]
    assert continued.report.tokens_forwarded == sum(session["tokens_forwarded"] for session in sessions)
    assert continued.report.tokens_forwarded >= whole.report.tokens_unique


def test_units_that_share_a_file_give_the_same_run(tmp_path, study):
    whole = run_in_parts(study)
    limits = WorkLimits(unit_tokens=(60, 60), parts=3)
    with pytest.raises(Stop):
        iclperm.run(study, tmp_path / "run", progress=stop_after(1), limits=limits)
    grouped = iclperm.run(study, tmp_path / "run", limits=limits)
    assert 1 < grouped.report.num_parts <= 3 < whole.report.num_parts
    assert_same_results(grouped, whole)


def test_a_damaged_file_is_set_aside_and_only_its_part_computed_anew(tmp_path, study):
    whole = run_in_parts(study, tmp_path / "run")
    victim = sorted((tmp_path / "run/items").iterdir())[1]
    raw = bytearray(victim.read_bytes())
    raw[len(raw) // 2] ^= 1
    victim.write_bytes(raw)
    with pytest.raises(RunError, match=rf"{victim.name} is damaged"):
        iclperm.open_run(tmp_path / "run")
    repaired = run_in_parts(study, tmp_path / "run")
    assert repaired.report.num_quarantined == 1
    assert repaired.report.num_parts_resumed == repaired.report.num_parts - 1
    assert_same_results(repaired, whole)
    assert (tmp_path / "run/quarantine" / victim.name).read_bytes() == bytes(raw)
    assert_same_results(iclperm.open_run(tmp_path / "run"), whole)


def test_another_study_is_refused_with_the_difference(tmp_path, study):
    iclperm.run(study, tmp_path / "run")
    other = study.model_copy(update={"seed": 2})
    with pytest.raises(RunError, match=r"holds another run: study\.seed is 1 there and 2 here; give another folder"):
        iclperm.run(other, tmp_path / "run")
    path = Path(study.task)
    path.write_text(path.read_text().replace("Thing:", "Object:"))
    with pytest.raises(RunError, match="the wording of the task has changed since"):
        iclperm.run(study, tmp_path / "run")


def test_the_same_content_elsewhere_is_the_same_run(tmp_path, study, model):
    first = iclperm.run(study, tmp_path / "run")
    copied = study.model_copy(update={"model": str(shutil.copytree(model, tmp_path / "copy"))})
    again = iclperm.run(copied, tmp_path / "run")
    assert again.report.num_parts_resumed == again.report.num_parts
    assert_same_results(again, first)


def test_other_numerics_may_not_continue_a_run(tmp_path, study, monkeypatch):
    with pytest.raises(Stop):
        run_in_parts(study, tmp_path / "run", progress=stop_after(1))
    monkeypatch.setattr(answering, "processor", lambda: "another processor")
    with pytest.raises(RunError, match=r"was computed with processor .*, here it is another processor"):
        run_in_parts(study, tmp_path / "run")


def test_other_bits_of_the_libraries_may_not_continue_a_run(tmp_path, study, monkeypatch):
    """As with ONEDNN_MAX_CPU_ISA, which no version names."""
    with pytest.raises(Stop):
        run_in_parts(study, tmp_path / "run", progress=stop_after(1))
    monkeypatch.setattr(numerics, "probe", lambda _: "other bits")
    with pytest.raises(RunError, match=r"was computed with probe [0-9a-f]{16}, here it is other bits.*ONEDNN_MAX_CPU"):
        run_in_parts(study, tmp_path / "run")


def test_a_run_of_before_there_were_probes_goes_on(tmp_path, study, monkeypatch):
    with monkeypatch.context() as older:
        older.setattr(answering, "processor", lambda: "this one")
        older.setattr(
            engine, "numerics_of", lambda *of: {k: v for k, v in numerics.numerics_of(*of).items() if k != "probe"}
        )
        with pytest.raises(Stop):
            run_in_parts(study, tmp_path / "run", progress=stop_after(1))
    monkeypatch.setattr(answering, "processor", lambda: "another")
    with pytest.raises(RunError, match=r"was computed with processor this one"):
        run_in_parts(study, tmp_path / "run")
    monkeypatch.setattr(answering, "processor", lambda: "this one")
    run = run_in_parts(study, tmp_path / "run")
    assert run.report.num_parts_resumed
    assert run.report.num_numerics == 2, "what the first parts were computed with is known in part alone"
    assert iclperm.open_run(tmp_path / "run").digest == run.digest == run_in_parts(study).digest


def test_the_files_can_be_read_without_us(tmp_path, study):
    run = iclperm.run(study, tmp_path / "run")
    items = pq.ParquetDataset(tmp_path / "run/items").read().to_pylist()
    demonstrations = pq.read_table(tmp_path / "run/demonstrations.parquet").to_pylist()
    queries = pq.read_table(tmp_path / "run/queries.parquet").to_pylist()
    num_cells = 0
    for ordering, item in product(demonstrations, items):
        for shots, context in zip(ordering["shots"], ordering["contexts"], strict=True):
            if context != item["context"]:
                continue
            place = (ordering["set"], ordering["permutation"], run.shots.index(shots), item["query"])
            np.testing.assert_array_equal(np.array(item["label_logprob"], np.float32), run.label_logprob[place])
            assert (item["prediction"] == item["gold"]) == run.correct[place]
            assert item["gold"] == queries[item["query"]]["gold"]
            num_cells += 1
    assert num_cells == run.correct.size
    assert (tmp_path / "run/FORMAT").read_text() == "iclperm-run 1\n"
    assert len(demonstrations[0]["examples"]) == len(demonstrations[0]["content_hashes"]) == 3


def test_prompts_over_the_context_window(tmp_path, study):
    rows = make_rows(2, 30)
    rows[4]["text"] = "very " * 60 + rows[4]["text"]
    write_rows(tmp_path / "test.jsonl", rows)
    narrow = study.model_copy(
        update={"model": str(make_model(tmp_path / "narrow", window=120)), "queries": 30, "shots": [0, 3]}
    )
    with pytest.raises(DataError, match=r"1 of 30 queries make prompts longer than the context window of 120 tokens"):
        iclperm.run(narrow)
    dropping = narrow.model_copy(update={"on_overlong": "drop"})
    assert iclperm.plan(dropping).num_overlong == 1
    run = iclperm.run(dropping, tmp_path / "run")
    overlong = run.state[0, 0, 0] == states.OVERLONG
    assert overlong.sum() == 1
    np.testing.assert_array_equal(run.state, np.broadcast_to(overlong * np.uint8(2), run.state.shape))
    assert np.isnan(run.label_logprob[..., overlong, :]).all()
    assert not np.isnan(run.label_logprob[..., ~overlong, :]).any()
    assert not run.correct[..., overlong].any()
    assert_same_results(iclperm.open_run(tmp_path / "run"), run)
    with pytest.raises(DataError, match="some prompt that is longer than the context window of 20 tokens"):
        iclperm.plan(narrow.model_copy(update={"model": str(make_model(tmp_path / "tiny", window=20))}))


def test_logits_that_are_no_numbers_are_invalid_never_a_prediction(tmp_path, study, model):
    broken = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        broken.model.norm.weight[0] = float("nan")
    broken.save_pretrained(tmp_path / "broken")
    byte_level_tokenizer().save_pretrained(tmp_path / "broken")
    values = {(0, 0, 0): states.INVALID}
    engine = iclperm.Engine(broken, self_check=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(iclperm.engine.Engine, "from_pretrained", lambda *_, **__: engine)
        run = iclperm.run(study.model_copy(update={"model": str(tmp_path / "broken")}), tmp_path / "run")
    assert (run.state == values[0, 0, 0]).all()
    assert not run.correct.any()
    assert np.isnan(run.label_logprob).all()
    items = pq.ParquetDataset(tmp_path / "run/items").read()
    assert items["prediction"].null_count == items["label_logprob"].null_count == items.num_rows
    assert set(items["state"].to_pylist()) == {"invalid"}
    assert_same_results(iclperm.open_run(tmp_path / "run"), run)


def test_the_canonical_table_comes_in_pieces_of_bounded_size(study):
    run = iclperm.run(grown := study.model_copy(update={"permutations": 5}))
    whole = run.to_arrow()
    assert [len(piece) for piece in run.tables()] == [grown.sets * 5 * 3 * 6]
    pieces = list(dataclasses.replace(run, limits=WorkLimits(table_rows=40)).tables())
    assert [len(piece) for piece in pieces] == [36] * 5
    assert pa.concat_tables(pieces).equals(whole)
    columns = [whole[name].to_pylist() for name in ("set", "permutation", "shots", "query")]
    assert list(zip(*columns, strict=True)) == list(product(range(2), range(5), (0, 1, 3), range(6)))


def test_ties_go_to_the_lowest_label():
    logprob = np.array([[[-1.0, -1.0, -2.0], [-3.0, -1.0, -1.0]]], dtype=np.float32)
    items = Items(
        split="test", examples=np.array([0, 1]), weights=np.array([1, 1]), gold=np.array([0, 1]),
        context_of=np.zeros((1, 1, 1), np.int64), context_state=np.zeros((1, 2), np.uint8),
        context_prediction=read.predictions(logprob, np.ones(3)), context_logprob=logprob, scale=np.ones(3),
    )  # fmt: skip
    assert items.correct.tolist() == [[[[1, 1]]]]
    assert read.predictions(logprob, np.array([1.0, 1.0, 4.0])).tolist() == [[2, 2]]


def test_a_plan_tells_what_the_run_will_cost(study):
    planned = iclperm.plan(study)
    run = iclperm.run(study)
    assert planned.tokens_naive == run.report.tokens_naive
    assert planned.tokens_unique == run.report.tokens_unique == run.report.tokens_forwarded
    assert planned.num_contexts == len(np.unique(run.splits["test"].context_of))
    assert planned.kv_peak_bytes == planned.kv_peak_tokens * 128
    assert planned.opening == ("<s>",)
    assert planned.estimate.seconds > 0
    assert (planned.num_asked, planned.num_queries, planned.num_excluded) == (6, 6, 0)
    assert planned.num_prompts == planned.num_contexts * 6
    assert planned.saving > 1
    assert json.loads(json.dumps(planned.to_dict()))["saving"] == planned.saving


def test_a_folder_of_other_files_is_left_alone(tmp_path, study):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("x")
    with pytest.raises(RunError, match="mine holds other files; give a new or empty folder"):
        iclperm.run(study, tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    with pytest.raises(RunError, match="mine is not a run folder"):
        iclperm.open_run(tmp_path / "mine")
    (tmp_path / "mine/FORMAT").write_text("iclperm-run 9\n")
    (tmp_path / "mine/plan.json").write_text("{}")
    with pytest.raises(RunError, match="has the format 'iclperm-run 9', this version reads 'iclperm-run 1'; install"):
        iclperm.open_run(tmp_path / "mine")


@pytest.mark.parametrize(("out", "why"), [("file", "file exists"), ("file/run", "not a directory")])
def test_a_file_in_the_way_of_the_folder_is_told_and_kept(tmp_path, study, out, why):
    (tmp_path / "file").write_text("x")
    told = rf"cannot write to .*{out}: {why}; move {tmp_path / 'file'} elsewhere or give another folder"
    with pytest.raises(RunStopped, match=told):
        iclperm.run(study, tmp_path / out)
    assert (tmp_path / "file").read_text() == "x"
    (tmp_path / "file").unlink()
    assert iclperm.run(study, tmp_path / out).findings(), "moved away, the same command runs"


@pytest.mark.parametrize(
    ("code", "remedy"), [(errno.ENOSPC, "make room"), (errno.EROFS, "make it writable"), (errno.EIO, "see to the disk")]
)
def test_a_full_disk_stops_the_run_and_the_same_call_continues(tmp_path, study, monkeypatch, code, remedy):
    write, calls = os.fsync, []

    def failing(descriptor):
        calls.append(descriptor)
        if len(calls) > 25:
            raise OSError(code, "What the system says")
        write(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(RunStopped, match=rf"cannot write to .*: what the system says; {remedy} or give"):
        run_in_parts(study, tmp_path / "run")
    monkeypatch.undo()
    done = len(list((tmp_path / "run/items").iterdir()))
    continued = run_in_parts(study, tmp_path / "run")
    assert 0 < done == continued.report.num_parts_resumed < continued.report.num_parts
    assert_same_results(continued, run_in_parts(study))


def test_a_model_that_is_nowhere_is_named(study):
    with pytest.raises(
        ModelError, match="there is no model folder '/no/such model'; give 'demo', a folder or a hub id"
    ):
        iclperm.run(study.model_copy(update={"model": "/no/such model"}))


def test_a_model_without_a_tokenizer_is_named(tmp_path, study, model):
    shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ModelError, match=r"bare' has no tokenizer; add its tokenizer\.json"):
        iclperm.plan(study.model_copy(update={"model": str(tmp_path / "bare")}))


def test_a_prompt_that_the_study_does_not_have_is_refused(study):
    with pytest.raises(ConfigError, match="the study does not run 2 shots; it runs 0, 1, 3"):
        preview.sample_prompt(study, shots=2)


def test_a_report_is_written_beside_the_items(tmp_path, study):
    run = iclperm.run(study, tmp_path / "run")
    files = run.write_report()
    figures = {f"{name}.{kind}" for name in ("heatmap", "curve", "r_over_k", "confusion") for kind in ("png", "svg")}
    assert {file.name for file in files} == {*figures, "report.json"}
    content = json.loads((tmp_path / "run/report.json").read_text())
    accuracy = np.array(content["sensitivity"]["accuracy"])
    np.testing.assert_allclose(accuracy, run.correct[:, :, -1].mean(axis=-1))
    np.testing.assert_allclose(content["curve"]["mean"], run.correct.mean(axis=(0, 1, 3)))
    assert_same_results(iclperm.open_run(tmp_path / "run"), run)
    with pytest.raises(RunError, match="in memory only"):
        iclperm.run(study).write_report()


def tighter(study):
    """A study whose memory budget leaves it smaller packs."""
    return study.model_copy(update={"memory_budget": iclperm.plan(study).estimate.memory.peak - 1})


@pytest.fixture
def no_code_is_kept(monkeypatch):
    """What oneDNN keeps of products is far more than a tiny model takes, and no less in smaller packs."""
    monkeypatch.setattr(footprint, "_PRODUCT_BYTES", 0)


@pytest.mark.usefixtures("no_code_is_kept")
def test_a_memory_budget_bounds_the_memory_foretold_and_changes_no_result(study):
    tight = tighter(study)
    whole, planned = iclperm.plan(study).estimate, iclperm.plan(tight).estimate
    assert planned.memory.peak <= tight.memory_budget == planned.memory_budget < whole.memory.peak
    assert planned.pack_tokens < whole.pack_tokens
    assert_same_results(iclperm.run(tight), iclperm.run(study))


def test_the_size_of_passes_changes_no_result(tmp_path, study):
    """--pack-tokens: another cut of the same work, and no part of what a run is."""
    small = study.model_copy(update={"pack_tokens": 16})
    assert iclperm.plan(small).estimate.pack_tokens == 16 < iclperm.plan(study).estimate.pack_tokens
    usual, there = iclperm.run(study, tmp_path / "usual"), iclperm.run(small, tmp_path / "small")
    assert_same_results(there, usual)
    assert there.digest == usual.digest


@pytest.mark.parametrize("chosen", [{"attention": "torch"}, {"layers": "transformers"}])
def test_another_way_of_running_a_model_is_taken_and_named(tmp_path, study, chosen):
    """--attention and --layers: the answers but for rounding, by another way, whose memory is foretold but no time."""
    other = study.model_copy(update=chosen)
    planned = iclperm.plan(other)
    assert planned.estimate.seconds is None
    assert planned.estimate.memory is not None
    assert planned.untimed
    usual, there = iclperm.run(study), iclperm.run(other, tmp_path / "other")
    (name,) = chosen
    assert {each[name] for each in there.numerics} == set(chosen.values())
    assert there.labels == usual.labels
    np.testing.assert_allclose(there.label_logprob, usual.label_logprob, atol=1e-4)


@pytest.mark.parametrize("chosen", [{"attention": "torch"}, {"layers": "transformers"}, {"pack_tokens": 64}])
def test_ways_over_a_tree_are_refused_prompt_by_prompt(study, chosen):
    with pytest.raises(ConfigError, match=f"key '{next(iter(chosen))}' is .* there are none with 'plain'"):
        Study(**study.model_dump() | {"plain": True} | chosen)


def item_files(folder):
    """Names of the result files; a name holds the hash of the content."""
    return sorted(path.name for path in (folder / "items").iterdir())


KILLED = """
import sys, time
import iclperm
from iclperm import Study
from iclperm.runs.folder import RunFolder
from iclperm.runs.limits import WorkLimits

def wait_to_be_killed(done, _):
    if done:
        print(done, flush=True)
        time.sleep(600)

limits = WorkLimits(unit_tokens=(200, 200))
iclperm.run(Study.from_file(sys.argv[1]), sys.argv[2], progress=wait_to_be_killed, limits=limits)
"""


def test_a_killed_process_loses_no_committed_part(tmp_path):
    study = Study(sets=2, permutations=2, shots=[0, 2], queries=24)
    (tmp_path / "study.yaml").write_text(study.to_yaml())
    arguments = [sys.executable, "-P", "-c", KILLED, tmp_path / "study.yaml", tmp_path / "killed"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        assert process.stdout.readline() == b"1\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    kept = {name: (tmp_path / "killed/items" / name).stat().st_mtime_ns for name in item_files(tmp_path / "killed")}
    assert len(kept) == 1

    limits = WorkLimits(unit_tokens=(200, 200))
    whole = iclperm.run(study, tmp_path / "whole", limits=limits)
    continued = iclperm.run(study, tmp_path / "killed", limits=limits)
    assert continued.report.num_parts_resumed == 1 < continued.report.num_parts
    assert_same_results(continued, whole)
    assert item_files(tmp_path / "killed") == item_files(tmp_path / "whole")
    assert (
        kept.items() <= {path.name: path.stat().st_mtime_ns for path in (tmp_path / "killed/items").iterdir()}.items()
    )
    assert (tmp_path / "killed/plan.json").read_bytes() == (tmp_path / "whole/plan.json").read_bytes()
    # The killed session's tokens are counted up to its last part, and the count says that it may be more.
    assert continued.report.tokens_forwarded >= whole.report.tokens_forwarded
    assert not continued.report.is_token_count_complete
    assert not iclperm.open_run(tmp_path / "killed").report.is_token_count_complete
    assert whole.report.is_token_count_complete


@pytest.mark.parametrize("name", ["demonstrations", "queries"])
def test_no_flipped_bit_of_a_table_goes_unnoticed(tmp_path, study, name):
    whole = iclperm.run(study, tmp_path / "run")
    path = tmp_path / f"run/{name}.parquet"
    raw = path.read_bytes()
    rng = np.random.default_rng(0)
    for place in rng.choice(len(raw), 60, replace=False):
        damaged = bytearray(raw)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(RunError, match=rf"{name}\.parquet is damaged"):
            iclperm.open_run(tmp_path / "run")
    path.write_bytes(raw)
    assert_same_results(iclperm.open_run(tmp_path / "run"), whole)


def test_a_table_that_says_something_else_is_set_aside_and_written_anew(tmp_path, study):
    whole = iclperm.run(study, tmp_path / "run")
    path = tmp_path / "run/queries.parquet"
    table = pq.read_table(path)
    turned = (table["gold"].to_numpy() + 1) % 3
    pq.write_table(table.set_column(table.schema.get_field_index("gold"), "gold", [turned]), path)
    wrong = path.read_bytes()
    with pytest.raises(RunError, match=r"queries\.parquet is damaged: .*; run the study again"):
        iclperm.open_run(tmp_path / "run")
    assert_same_results(iclperm.run(study, tmp_path / "run"), whole)
    assert (tmp_path / "run/quarantine/queries.parquet").read_bytes() == wrong
    assert_same_results(iclperm.open_run(tmp_path / "run"), whole)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"numerics": 1}'])
def test_a_session_record_that_cannot_be_read_hides_no_result(tmp_path, study, content):
    with pytest.raises(Stop):
        run_in_parts(study, tmp_path / "run", progress=stop_after(1))
    (record,) = (tmp_path / "run/environment").iterdir()
    record.write_bytes(content)
    continued = run_in_parts(study, tmp_path / "run")
    assert continued.report.num_parts_resumed == 1
    assert not continued.report.is_token_count_complete
    assert (tmp_path / "run/quarantine" / record.name).read_bytes() == content
    opened = iclperm.open_run(tmp_path / "run")
    assert_same_results(opened, continued)
    assert opened.report == dataclasses.replace(
        continued.report, num_parts_resumed=opened.report.num_parts, seconds=opened.report.seconds
    )


def test_a_session_that_wrote_nothing_binds_nobody(tmp_path, study, monkeypatch):
    with pytest.raises(Stop):
        run_in_parts(study, tmp_path / "run", progress=stop_after(0))
    monkeypatch.setattr(answering, "processor", lambda: "another processor")
    with pytest.raises(Stop):
        run_in_parts(study, tmp_path / "run", progress=stop_after(1))
    continued = run_in_parts(study, tmp_path / "run")
    assert continued.report.num_parts_resumed == 1
    assert continued.report.is_token_count_complete


def test_other_threads_may_not_continue_a_run_and_the_remedy_is_named(tmp_path, study):
    with pytest.raises(Stop):
        run_in_parts(study, tmp_path / "run", progress=stop_after(1))
    torch.set_num_threads(2)
    try:
        with pytest.raises(
            RunError, match=r"threads 1, here it is 2, .*; set OMP_NUM_THREADS=1, accept that with --mixed"
        ):
            run_in_parts(study, tmp_path / "run")
    finally:
        torch.set_num_threads(1)


def test_tokens_are_on_record_before_a_part_is(tmp_path, study, monkeypatch):
    """Whatever happens after a part was written, the tokens that it took are known."""
    write, recorded = PartFiles.write, []

    def noting(files, part, table, numerics):
        (session,) = RunFolder.open(tmp_path / "run").sessions()
        recorded.append((session["tokens_forwarded"], session["parts"], session["closed"]))
        return write(files, part, table, numerics)

    monkeypatch.setattr(PartFiles, "write", noting)
    run = run_in_parts(study, tmp_path / "run")
    tokens = [tokens for tokens, _, _ in recorded]
    assert tokens[0] > 0
    assert all(np.diff(tokens) > 0)
    assert tokens[-1] == run.report.tokens_forwarded
    assert [rest for _, *rest in recorded] == [[part, False] for part in range(1, run.report.num_parts + 1)]


def test_files_of_killed_sessions_are_removed_once_they_are_old(tmp_path, study):
    iclperm.run(study.model_copy(update={"sets": 1}), tmp_path / "run")
    for name, age in (("old", 7_200), ("fresh", 0)):
        (tmp_path / "run/tmp" / name).write_bytes(b"half")
        os.utime(tmp_path / "run/tmp" / name, times=(time.time() - age,) * 2)
    victim = next((tmp_path / "run/items").iterdir())
    victim.unlink()
    iclperm.run(study.model_copy(update={"sets": 1}), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run/tmp").iterdir()] == ["fresh"]


@pytest.mark.parametrize(
    ("make_tokenizer", "changes"),
    [
        (byte_level_tokenizer, {}),
        (dummy_prefix_tokenizer, {}),
        (greedy_tokenizer, {"separator": ""}),
    ],
)
def test_a_plan_counts_the_cells_outside_the_product(tmp_path, study, make_tokenizer, changes):
    make_task(tmp_path, **changes)
    study = study.model_copy(update={"model": str(make_model(tmp_path / "model", make_tokenizer()))})
    planned, run = iclperm.plan(study), iclperm.run(study)
    laid_out = layout.lay_out(setting.ResolvedStudy.of(study))
    (growth,) = laid_out.growths
    per_context = Counter(cell.context for cell in growth.general)
    apart = {context for context, count in per_context.items() if count == 6}
    assert not apart & set(growth.products[0].contexts.tolist())
    assert bool(apart) == (make_tokenizer is not byte_level_tokenizer)
    assert planned.tokens_unique == run.report.tokens_unique == run.report.tokens_forwarded
    # Prompt by prompt, each distinct prompt enters the model once.
    tokenizer = AutoTokenizer.from_pretrained(study.model)
    texts = {
        (sample.context + sample.query, tuple(sample.continuations))
        for index_set, permutation, shots, query in product(range(2), range(3), (0, 1, 3), range(6))
        for sample in [
            preview.sample_prompt(study, index_set=index_set, permutation=permutation, shots=shots, query=query)
        ]
    }
    naive = 0
    for prompt, continuations in texts:
        wholes = [tokenizer(prompt + continuation)["input_ids"] for continuation in continuations]
        columns = zip(tokenizer(prompt)["input_ids"], *wholes, strict=False)
        naive += len(list(takewhile(lambda column: len(set(column)) == 1, columns)))
    assert planned.tokens_naive == run.report.tokens_naive == naive


def test_a_cell_both_inside_and_apart_is_prompted_once(study):
    laid_out = layout.lay_out(setting.ResolvedStudy.of(study))
    prompts, product = laid_out.prompts, laid_out.growths[0].products[0]
    (context, *_), (query, *_) = product.contexts, product.queries
    ids = np.concatenate([prompts.contexts[context], prompts.queries[query]])
    cell = Cell(int(context), int(query), ids, prompts.continuations)
    both = layout._product_tokens(laid_out.setting, prompts, product, [cell])
    assert both.naive + layout._general_tokens(laid_out.setting, [cell]).naive == laid_out.tokens.naive


def test_a_plan_of_a_hub_model_fetches_no_weights(tmp_path, study, model, monkeypatch):
    import huggingface_hub

    asked = []
    shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))

    def fake_download(name, *, revision, allow_patterns):
        asked.append(allow_patterns)
        return str(model if "*.safetensors" in allow_patterns else tmp_path / "bare")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake_download)
    elsewhere = study.model_copy(update={"model": "org/large"})
    planned = [dataclasses.replace(iclperm.plan(choice), estimate=None) for choice in (elsewhere, study)]
    assert planned[0] == planned[1]
    assert asked
    assert not any("safetensors" in pattern for pattern in asked[0])
    assert_same_results(iclperm.run(elsewhere), iclperm.run(study))
    assert "*.safetensors" in asked[1]


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory: 9 GB")]
)
@pytest.mark.usefixtures("no_code_is_kept")
def test_memory_that_runs_out_stops_the_run_with_the_size_to_use(tmp_path, study, monkeypatch, error):
    def exhausted(*_):
        raise error
        yield

    whole = iclperm.plan(study).estimate
    advice = rf"out of memory; {whole.memory.peak} bytes are foretold, .*: set memory_budget to (\d+) to continue"
    with monkeypatch.context() as memory:
        memory.setattr(answering.Answering, "_of_units", exhausted)
        with pytest.raises(RunStopped, match=advice) as raised:
            iclperm.run(study, tmp_path / "run")
    budget = int(re.search(advice, str(raised.value))[1])
    advised = study.model_copy(update={"memory_budget": budget})
    assert iclperm.plan(advised).estimate.pack_tokens <= whole.pack_tokens // 2
    assert_same_results(iclperm.run(advised, tmp_path / "run"), iclperm.run(study))


def test_other_errors_of_the_engine_are_not_taken_for_memory(study, monkeypatch):
    def broken(*_):
        raise RuntimeError("shape mismatch")
        yield

    monkeypatch.setattr(answering.Answering, "_of_units", broken)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        iclperm.run(study)


@pytest.mark.usefixtures("no_code_is_kept")
def test_a_smaller_memory_budget_may_continue_a_run(tmp_path, study):
    whole = run_in_parts(study)
    with pytest.raises(Stop):
        run_in_parts(study, tmp_path / "run", progress=stop_after(1))
    tight = run_in_parts(tighter(study), tmp_path / "run")
    assert tight.report.num_parts_resumed == 1
    assert_same_results(tight, whole)


def test_units_cut_in_another_way_are_not_mixed(tmp_path, study, monkeypatch):
    with pytest.raises(Stop):
        run_in_parts(study, tmp_path / "run", progress=stop_after(1))
    monkeypatch.setattr(work, "_cut_hash", lambda *_: "another cut")
    with pytest.raises(RunError, match=r'holds another run: work\.cut is .* there and "another cut" here'):
        run_in_parts(study, tmp_path / "run")


def test_conflicting_and_repeated_rows_are_reported(tmp_path, study):
    rows = make_rows(2, 30)
    write_rows(tmp_path / "test.jsonl", [*rows, rows[0], {**rows[1], "label": "Red"}])
    planned, run = iclperm.plan(study), iclperm.run(study, tmp_path / "run")
    for report in (planned, run.report, iclperm.open_run(tmp_path / "run").report):
        assert (report.num_duplicates, report.num_conflicting) == (2, 1)


def test_queries_that_nearly_repeat_what_is_held_apart_are_told(tmp_path, study):
    """In plan, run, folder, what is told and prompts, whether or not the folder keeps texts."""
    write_rows(tmp_path / "test.jsonl", [{**row, "text": f"{row['text']}77"} for row in make_rows(1, 60)])
    study = Study(**study.model_dump() | {"sets": 4, "queries": 24})
    found = setting.ResolvedStudy.of(study)
    texts = {split: [row["text"] for row in found.examples[split].fields] for split in ("train", "test")}
    used = [texts["train"][row] for row in np.unique(found.design.orderings[0].sets)]
    asked = [texts["test"][row] for row in found.design.queries[0].rows]
    bags = [[set(re.sub(r"\d+", "0", text).lower().split()) for text in each] for each in (used, asked)]
    expected = sum(any(len(a & b) / len(a | b) >= 0.8 for a in bags[0]) for b in bags[1])
    assert 0 < expected < 24
    runs = [iclperm.run(study), iclperm.run(study, tmp_path / "run", with_text=False)]
    runs += [iclperm.open_run(tmp_path / "run")]
    assert [report.num_near for report in (iclperm.plan(study), *(run.report for run in runs))] == [expected] * 4
    words = f"queries that nearly repeat a demonstration (four words in five are the same): {expected};"
    for run in runs:
        assert any(words in note for note in told(run).notes)
    assert any(words in line for line in runs[2].prompt(best=True).said())


def test_answers_that_no_file_holds_are_never_results(study, monkeypatch):
    monkeypatch.setattr(scorers, "item_rows", lambda *arguments: tables.item_rows(*arguments).slice(1))
    with pytest.raises(RunError, match="answers are in none of the run's files"):
        iclperm.run(study)
