"""What a plan says where the way of running is chosen: what it costs, what is not known, and what can never run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton_interpreter
from cards import A100, plug_in
from tiny import byte_level_tokenizer, dummy_prefix_tokenizer, make_model, make_task

import iclperm
from iclperm import Study
from iclperm.cli import main as cli
from iclperm.cli import terminal
from iclperm.engine import Engine, plan_product
from iclperm.engine import estimate as module
from iclperm.engine.estimate import estimate, refuse_ways
from iclperm.errors import ConfigError, ModelError
from iclperm.runs import execute, layout, setting
from iclperm.runs import plan as planning
from iclperm.runs.folder import RunFolder
from iclperm.runs.limits import WorkLimits
from iclperm.study.sizes import SearchBudget

triton_interpreter.repair()
Call = Callable[..., tuple[int, str]]


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """Labels of several tokens each."""
    model, task = make_model(tmp_path / "model", byte_level_tokenizer()), make_task(tmp_path)
    return Study(model=str(model), task=str(task), sets=2, permutations=2, shots=[0, 2], queries=5)


@pytest.fixture
def call(study: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """Plans it with other flags; gives code and output."""
    path = tmp_path / "study.yaml"
    keys = ("model", "task", "sets", "permutations", "shots", "queries")
    path.write_text(json.dumps({key: getattr(study, key) for key in keys}))

    def run(*flags: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as done:
            cli.main(["plan", str(path), *flags])
        printed = capsys.readouterr()
        return int(done.value.code or 0), printed.out + printed.err

    return run


def test_packs_that_layers_do_not_take_are_told_in_one_line(study: Study, tmp_path: Path) -> None:
    """In a process of its own: pytest takes warnings before they are printed."""
    path = tmp_path / "study.yaml"
    keys = ("model", "task", "sets", "permutations", "shots", "queries")
    path.write_text(json.dumps({key: getattr(study, key) for key in keys}))

    def said(folder: str, *flags: str) -> list[str]:
        command = [sys.executable, "-m", "iclperm", "run", str(path), "--out", str(tmp_path / folder), *flags]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
        return [line for line in done.stderr.splitlines() if "arn" in line]

    assert said("capped", "--layers", "transformers", "--pack-tokens", "2048") == [
        "warning: pack_tokens is 2,048, but transformers' layers take 1,024 at most on a CPU: packs have 1,024"
    ]
    assert not said("usual", "--layers", "transformers")
    assert not said("ours", "--pack-tokens", "2048")


@pytest.mark.parametrize("make_tokenizer", [byte_level_tokenizer, dummy_prefix_tokenizer])
def test_prompt_by_prompt_a_plan_counts_what_is_forwarded(
    study: Study, make_tokenizer: Callable[[], Any], tmp_path: Path
) -> None:
    """A prompt is forwarded whole, and once more before every further token of a label; some are outside products."""
    model = make_model(tmp_path / "another", make_tokenizer())
    plain = study.model_copy(update={"plain": True, "model": str(model)})
    planned, run = iclperm.plan(plain), iclperm.run(plain)
    assert planned.plain_tokens == run.report.tokens_forwarded
    if make_tokenizer is dummy_prefix_tokenizer:
        assert max(planned.label_tokens) > 1
        assert run.report.tokens_forwarded > planned.tokens_naive
    assert (planned.saving, planned.kv_peak_tokens, planned.kv_peak_bytes) == (1.0, 0, 0)
    content = json.loads(json.dumps(planned.to_dict()))
    assert (content["saving"], content["plain_tokens"]) == (1.0, planned.plain_tokens)
    tree = iclperm.plan(study)
    assert (tree.plain_tokens, tree.untimed) == (None, "")


def test_generated_prompts_are_forwarded_once(tmp_path: Path) -> None:
    answer, fields = {"field": "label", "check": "exact"}, {"text": "text", "label": "label"}
    task = make_task(tmp_path, labels=None, fields=fields, answer=answer, stop=["\n"], max_new_tokens=1)
    model = make_model(tmp_path / "model", byte_level_tokenizer())
    study = Study(model=str(model), task=str(task), sets=2, permutations=2, shots=[0, 2], queries=5, plain=True)
    planned, run = iclperm.plan(study), iclperm.run(study)
    assert planned.plain_tokens == run.report.tokens_forwarded == planned.tokens_naive


def test_a_plain_run_says_how_far_it_is_by_what_it_forwards(study: Study) -> None:
    plain = study.model_copy(update={"plain": True})
    work = layout.lay_out(setting.ResolvedStudy.of(plain))
    assert execute._tokens_wanted(work, range(len(work.parts))) == iclperm.plan(plain).plain_tokens
    tree = layout.lay_out(setting.ResolvedStudy.of(study))
    assert execute._tokens_wanted(tree, range(len(tree.parts))) == iclperm.plan(study).tokens_unique


def test_the_status_of_a_plain_run_tells_no_share_of_distinct_tokens(
    study: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It forwards more than there are, and its parts alone tell how much is left."""
    folder = tmp_path / "run"
    run = iclperm.run(study.model_copy(update={"plain": True}), folder, limits=WorkLimits(unit_tokens=(8, 64)))
    status = iclperm.status(folder)
    assert status.is_plain
    assert run.report.tokens_forwarded > status.tokens_unique
    RunFolder.open(folder).parts.finished()[0].unlink()
    left = iclperm.status(folder)
    assert left.num_parts == status.num_parts > left.num_parts_done > 0
    assert left.seconds_left == pytest.approx(status.sessions[0].seconds / status.num_parts)
    with pytest.raises(SystemExit):
        cli.main(["status", str(folder)])
    said = " ".join(capsys.readouterr().out.split()), terminal._status_line(left)
    assert f"{run.report.tokens_forwarded:,}, prompt by prompt" in said[0]
    assert f", {run.report.tokens_forwarded:,} tokens" in said[1]
    assert not [line for line in said if " distinct" in line or f"of {status.tokens_unique:,}" in line]


@pytest.mark.parametrize("way", [{"plain": True}, {"attention": "torch"}, {"layers": "transformers"}])
def test_a_budget_in_time_is_refused_where_the_way_has_none(study: Study, way: dict[str, Any]) -> None:
    work = layout.lay_out(setting.ResolvedStudy.of(study.model_copy(update={"device": "cpu", **way})))
    assert planning.tokens_within(work, SearchBudget("share", 0.5)) == work.tokens.unique / 2
    with pytest.raises(ConfigError, match="how long this way takes is not known; give tokens"):
        planning.tokens_within(work, SearchBudget("seconds", 600.0))


def test_a_budget_in_time_is_of_the_packs_that_are_asked_for(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gemm_rate", lambda *_: 1e9)
    bought = [
        planning.tokens_within(layout.lay_out(setting.ResolvedStudy.of(each)), SearchBudget("seconds", 600.0))
        for each in (study, study.model_copy(update={"pack_tokens": 8}))
    ]
    assert bought[1] < bought[0], "small packs take longer"


def test_nothing_of_a_tree_is_told_where_there_is_none(call: Call) -> None:
    code, printed = call("--plain")
    assert code == 0
    assert not [name for name in ("saving", "distinct  ", "peak", "memory", "pack") if name in printed]
    assert "all of them forwarded" in printed
    assert "estimated time                - (what prompts run one by one take is not known)" in printed
    code, printed = call("--plain", "--kind", "curve", "--sets", "1")
    assert code == 0
    assert "saving" not in printed


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        (["--attention", "torch"], {"attention": "torch"}),
        (["--layers", "transformers"], {"layers": "transformers"}),
        (["--attention", "torch", "--layers", "transformers"], {"attention": "torch", "layers": "transformers"}),
    ],
    ids=lambda given: "",
)
def test_a_slower_way_has_its_memory_and_no_time(
    call: Call, study: Study, flags: list[str], chosen: dict[str, str]
) -> None:
    """What is foretold is what an engine foretells that runs so."""
    code, printed = call(*flags, "--device", "cpu")
    assert code == 0
    ways = " and ".join(" ".join(pair) for pair in chosen.items())
    assert f"- (how fast {ways} runs is not known)" in " ".join(printed.split())
    assert "memory                        weights" in printed
    plan = plan_product([[1, 2, 3] * 20, [4] * 30], [[5, 6], [7]], [[8], [9]], pack_tokens=64)
    found = estimate(study.model, [plan], device="cpu", **chosen)
    assert (found.seconds, found.utilisation) == (None, None)
    engine = Engine.from_pretrained(study.model, device="cpu", **chosen)
    assert found.memory == engine.footprint(plan)
    assert found.memory != estimate(study.model, [plan], device="cpu").memory
    assert found.flops == estimate(study.model, [plan], device="cpu").flops or "layers" in chosen


def test_the_way_that_is_taken_anyhow_has_a_time(study: Study) -> None:
    planned = iclperm.plan(study.model_copy(update={"attention": "native", "device": "cpu"}))
    assert planned.untimed == ""
    assert planned.estimate is not None
    assert planned.estimate.seconds is not None


def test_dense_attention_is_foretold_on_a_gpu(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(A100, monkeypatch)
    monkeypatch.setattr(module, "gemm_rate", lambda *_: 1e12)
    plan = plan_product([[1, 2, 3] * 20, [4] * 30], [[5, 6], [7]], [[8], [9]], pack_tokens=64)
    usual, dense = (
        estimate(study.model, [plan], device="cuda", pack_tokens=64, attention=attention)
        for attention in ("auto", "torch")
    )
    assert usual.memory is not None
    assert dense.memory is not None
    assert dense.memory.activations > usual.memory.activations
    assert usual.seconds is not None
    assert dense.seconds is None


def test_a_device_that_is_not_here_is_the_reason(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, printed = call("--device", "cuda")
    assert code == 0
    assert "- (this machine has no cuda)" in printed


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--attention", "triton", "--device", "cpu"], "triton attention runs"),
        (["--attention", "native", "--dtype", "float16"], "native attention runs float32 and bfloat16 on a CPU, not"),
        (["--attention", "native", "--device", "cuda"], "native attention runs float32 and bfloat16 on a CPU, not"),
    ],
)
def test_what_can_never_run_is_refused_as_run_does(
    call: Call, study: Study, flags: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code, printed = call(*flags)
    assert code == 1
    assert printed.startswith(f"error: {said}")
    assert printed.count("\n") == 1
    if "cuda" not in flags:
        keys = dict(zip([flag.removeprefix("--") for flag in flags[::2]], flags[1::2], strict=True))
        with pytest.raises(ModelError) as loading:
            Engine.from_pretrained(study.model, **keys)
        assert printed == f"error: {loading.value}\n"


def test_what_may_run_elsewhere_is_planned(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refuse_ways(study.model, "triton", device="cuda")
    assert iclperm.plan(study.model_copy(update={"attention": "triton", "device": "cuda"})).estimate is None
