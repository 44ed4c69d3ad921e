"""Estimates from a configuration alone: the work is exact, the time follows from it as documented."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from cards import A100, V100, Card, plug_in
from safetensors import safe_open
from zoo import ZOO

from iclperm.cli.plans import _estimated
from iclperm.demo import model_path
from iclperm.engine import Engine, plain_model, plan_product, plan_requests
from iclperm.engine import estimate as module
from iclperm.engine.estimate import estimate
from iclperm.engine.facts import PassCosts
from iclperm.engine.tree import Rows
from iclperm.errors import ModelError

RATE = 1e9
CONTEXTS, QUERIES, LABELS = [[1, 2, 3, 4], [5] * 20, [1, 2, 6]], [[7, 8], [9], [7, 8, 10]], [[11], [12, 13]]


@pytest.fixture(autouse=True)
def known_rate(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The machine does 1 GFLOP/s; returns what was asked of it."""
    asked: list[tuple[Any, ...]] = []

    def rate(*arguments: Any) -> float:
        asked.append(arguments)
        return RATE

    monkeypatch.setattr(module, "gemm_rate", rate)
    return asked


def save_config(name: str, folder: Path) -> Path:
    """A folder with a configuration and nothing else."""
    ZOO[name].build().config.save_pretrained(folder)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    return folder


@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "gpt2", "opt", "qwen2-moe", "qwen3", "cohere", "starcoder2-window"]
)
def test_the_work_foretold_is_the_work_done(name: str, tmp_path: Path) -> None:
    folder = save_config(name, tmp_path)
    plan = plan_product(CONTEXTS, QUERIES, LABELS, pack_tokens=16, unit_tokens=30)
    engine = Engine(ZOO[name].build(), self_check=False)
    list(engine.execute(plan))
    foretold = estimate(folder, [plan])
    assert foretold.flops == engine.report.flops > 0
    assert foretold.kv_token_bytes == engine._model.facts.kv_token_bytes
    assert foretold.weight_bytes == sum(p.numel() * p.itemsize for p in engine.model.parameters())


def test_seconds_follow_from_the_work_the_rate_and_the_packs(tmp_path: Path, known_rate: list[tuple[Any, ...]]) -> None:
    folder = save_config("llama", tmp_path)
    plan = plan_product(CONTEXTS, QUERIES, LABELS, pack_tokens=8)
    rows = Rows.of([[1, 2, 3]])
    other = plan_requests(rows, np.array([2]), pack_tokens=64)
    one, both = estimate(folder, [plan]), estimate(folder, iter([plan, other]))
    of_full = [asked for asked in known_rate if asked[2] == torch.float32]
    assert of_full == [(size, 32, torch.float32, torch.device("cpu")) for size in (8, 64)]
    layers = 3
    reached = 32 / (32 + 100)
    assert one.flops_per_second == RATE
    assert one.seconds == pytest.approx(one.flops / RATE / reached + plan.num_packs * layers * 0.0008)
    assert one.is_measured
    assert one.utilisation == pytest.approx(one.flops / RATE / one.seconds)
    assert both.flops == one.flops + estimate(folder, [other]).flops
    assert both.seconds == pytest.approx(one.seconds + estimate(folder, [other]).seconds)
    assert plan.num_packs > 3
    assert estimate(folder, []).seconds == 0


@pytest.mark.parametrize("card", [A100, V100], ids=lambda card: card.name)
def test_a_gpu_has_constants_of_its_own(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known_rate: list[tuple[Any, ...]]
) -> None:
    """It computes while it is told what comes next: what takes longer of the two is the time.

    A unit's first pack it is told of while nothing runs.
    """
    folder = save_config("llama", tmp_path)
    plan = plan_product(CONTEXTS, QUERIES, LABELS, pack_tokens=8)
    plug_in(card, monkeypatch)
    found = estimate(folder, [plan], pack_tokens=8)
    assert (found.device, known_rate[0][3]) == ("cuda", torch.device("cuda"))
    assert not found.is_measured
    computing, telling = found.flops / RATE / (32 / (32 + 600)), plan.num_packs * 3 * 0.0009
    first = plan.num_units * 3 * 0.0009
    assert 0 < first < telling
    assert found.seconds == pytest.approx(first + computing)
    assert 1000 * telling > computing > telling
    monkeypatch.setattr(module, "gemm_rate", lambda *_: 1000 * RATE)
    assert estimate(folder, [plan], pack_tokens=8).seconds == pytest.approx(telling)
    alone = plan_product(CONTEXTS, QUERIES, LABELS, pack_tokens=8, unit_tokens=1)  # a pack or two each
    assert plan.num_units < alone.num_units < alone.num_packs
    monkeypatch.setattr(module, "gemm_rate", lambda *_: RATE)
    cut = estimate(folder, [alone], pack_tokens=8)
    assert cut.seconds == pytest.approx(alone.num_units * 3 * 0.0009 + cut.flops / RATE / (32 / 632))
    assert PassCosts.on("cuda:1") == PassCosts.on("cuda") != PassCosts.on("cpu")
    assert [PassCosts.on("cuda").reached_share(size) for size in (600, 20_000)] == [0.5, 0.85]


def test_plan_calls_a_time_on_a_gpu_an_estimate() -> None:
    here = estimate(model_path(), [])
    on_gpu, on_cpu = (_estimated(Mock(estimate=replace(here, device=name))) for name in ("cuda:1", "cpu"))
    assert on_gpu.endswith("(cuda:1, float32, 1 GFLOP/s; an estimate from one model on one GPU)")
    assert on_cpu.endswith("(cpu, float32, 1 GFLOP/s)")


def test_experts_that_a_token_does_not_see_cost_nothing() -> None:
    model = ZOO["qwen2-moe"].build()
    engine = Engine(model, self_check=False)
    seen = 0
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and "embed_tokens" not in name and "lm_head" not in name:
            seen += parameter.numel() // (2 if ".experts." in name else 1)  # two experts of four
    assert engine._model.facts.flops(1, 0, 0) == 2 * seen


def test_the_bundled_model_weighs_what_its_file_holds() -> None:
    with safe_open(model_path() / "model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    full = estimate(model_path(), [])
    assert full.weight_bytes == stored
    assert (full.dtype, full.device) == ("float32", "cpu")
    half = estimate(model_path(), [], dtype="bfloat16")
    assert (half.weight_bytes * 2, half.kv_token_bytes * 2) == (full.weight_bytes, full.kv_token_bytes)
    assert half.dtype == estimate(model_path(), [], dtype=torch.bfloat16).dtype == "bfloat16"


def test_a_checkpoint_s_dtype_is_taken_on_an_accelerator_alone(tmp_path: Path) -> None:
    config = ZOO["llama"].build().config
    config.dtype = torch.float16
    config.save_pretrained(tmp_path)
    assert estimate(tmp_path, []).dtype == "float32"
    assert estimate(tmp_path, [], device="meta").dtype == "float16"


def test_what_cannot_be_loaded_cannot_be_estimated(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        estimate(tmp_path, [])
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ModelError, match="is a 'vit' model, which is no causal language model"):
        estimate(tmp_path, [])
    with pytest.raises(ModelError, match="dtype 'int3' is unknown"):
        estimate(model_path(), [], dtype="int3")


def test_the_rate_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert estimate(model_path(), []).flops_per_second > 1e8


def test_bfloat16_is_measured_where_the_processor_multiplies_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known_rate: list[tuple[Any, ...]]
) -> None:
    folder = save_config("llama", tmp_path)
    monkeypatch.setattr(module, "gemm_rate", lambda rows, hidden, dtype, device: 3e9 if dtype.itemsize == 2 else RATE)
    monkeypatch.setattr(module._core, "available_isas", lambda: ["baseline", "avx512_bf16"])
    assert estimate(folder, []).bfloat16_speedup == 3
    assert estimate(folder, [], dtype="bfloat16").bfloat16_speedup is None
    monkeypatch.setattr(module._core, "available_isas", lambda: ["baseline", "avx512"])
    assert estimate(folder, []).bfloat16_speedup is None


def test_a_machine_that_stalls_has_a_rate_all_the_same(monkeypatch):
    monkeypatch.setattr(plain_model, "_RATE_SECONDS", 0.0)
    assert plain_model.gemm_rate(8, 16, torch.float32, torch.device("cpu")) > 0
