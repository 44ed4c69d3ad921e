"""Models spread by accelerate over devices, the host and the disk: the same numbers, in transformers' own layers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import make_model
from tolerances import TOLERANCES
from transformers import AutoModelForCausalLM, PreTrainedModel
from zoo import VOCAB, ZOO

from iclperm.engine import Engine, plan_product
from iclperm.engine.kernels.rule import AttentionRule
from iclperm.engine.load import load_shapes
from iclperm.engine.model import TreeModel
from iclperm.engine.plain_model import PlainModel, read_facts
from iclperm.errors import ConfigError, RequestError
from iclperm.reference import scoring

PER_TOKEN = TOLERANCES["loglikelihood per token"]["float32"]
RNG = np.random.default_rng(0)
STEM = [int(i) for i in RNG.integers(3, VOCAB, 40)]
REQUESTS = [(STEM[:n], STEM[n : n + k]) for n in (1, 9, 20, 30) for k in (1, 3)] + [
    (STEM[:20], [5, 6]),
    (STEM[:9], [7]),
]
MAPS = {
    "a layer on the disk": {"model.layers.1": "disk"},
    "all but a layer on the disk": {
        "model.embed_tokens": "disk",
        "model.layers.0": "disk",
        "model.layers.2": "disk",
        "model.norm": "disk",
        "lm_head": "disk",
    },
}
ELSEWHERE = {
    part: "cpu"
    for part in (
        "model.embed_tokens",
        "model.rotary_emb",
        "model.norm",
        "lm_head",
        *(f"model.layers.{n}" for n in range(3)),
    )
}


@pytest.fixture(params=["llama", "gemma2", "gemma3"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    model = ZOO[request.param].build()
    model.save_pretrained(tmp_path / "model")
    return model, tmp_path / "model"


def spread(folder: Path, device_map: dict[str, str]) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, device_map={**ELSEWHERE, **device_map}, offload_folder=folder.parent / "offload", dtype=torch.float32
    )
    on_meta = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    assert on_meta, "nothing was offloaded"
    return model


@pytest.mark.parametrize("device_map", MAPS.values(), ids=MAPS)
def test_offloaded_parts_change_nothing(saved: tuple[PreTrainedModel, Path], device_map: dict[str, str]) -> None:
    model, folder = saved
    expected = Engine(model, layers="transformers", self_check=False, pack_tokens=24).loglikelihood(REQUESTS)
    engine = Engine(spread(folder, device_map), pack_tokens=24)
    out = engine.loglikelihood(REQUESTS)
    np.testing.assert_allclose(out.logprob, expected.logprob, rtol=0, atol=PER_TOKEN)
    for fast, plain in zip(out.logprob, scoring.loglikelihood(model, REQUESTS), strict=True):
        assert abs(fast - plain.logprob) <= PER_TOKEN * plain.num_tokens
    assert (engine.layers, engine.attention) == ("transformers", "native"), "our layers ran over accelerate's hooks"
    assert engine.report.num_packs > 1, "keys never crossed a pack border"
    assert engine.report.tokens_forwarded == engine.report.tokens_unique
    assert engine.numerics["device"] == "cpu"
    assert engine.totals.seconds["self_check"] > 0
    assert engine.row_invariant is False, "transformers' rotary embedding runs behind accelerate's hook"


def test_offloaded_models_say_the_same(saved: tuple[PreTrainedModel, Path]) -> None:
    model, folder = saved
    contexts = [STEM[:5], STEM[:5] + STEM[30:34], STEM[:1]]
    engine = Engine(spread(folder, MAPS["all but a layer on the disk"]), self_check=False)
    said, expected = (each.generate(contexts, max_new_tokens=6) for each in (engine, Engine(model, self_check=False)))
    assert [ids.tolist() for ids in said.token_ids] == [ids.tolist() for ids in expected.token_ids]
    np.testing.assert_allclose(said.logprob, expected.logprob, rtol=0, atol=6 * PER_TOKEN)
    assert engine.layers == "transformers"


def test_prompts_go_through_offloaded_models_one_by_one_too(saved: tuple[PreTrainedModel, Path]) -> None:
    model, folder = saved
    engine = Engine(spread(folder, MAPS["all but a layer on the disk"]), plain=True)
    out = engine.loglikelihood(REQUESTS[:3])
    for fast, plain in zip(out.logprob, scoring.loglikelihood(model, REQUESTS[:3]), strict=True):
        assert abs(fast - plain.logprob) <= PER_TOKEN * plain.num_tokens


def test_a_model_that_one_device_holds_is_not_spread(saved: tuple[PreTrainedModel, Path]) -> None:
    model, folder = saved
    engine = Engine.from_pretrained(folder, device="balanced")
    assert engine.layers == "fused"
    assert engine.numerics["dtype"] == "float32"
    assert engine.numerics == Engine(model).numerics
    np.testing.assert_array_equal(engine.loglikelihood(REQUESTS).logprob, Engine(model).loglikelihood(REQUESTS).logprob)


def test_balanced_needs_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "accelerate" else find(name, *rest)
    )
    with pytest.raises(
        ConfigError, match=r"device 'balanced' needs accelerate, .* pip install 'iclperm\[accelerate\]'"
    ):
        Engine.from_pretrained(make_model(tmp_path), device="balanced")


def test_shapes_and_dtype_of_balanced_are_those_of_the_first_device(tmp_path: Path) -> None:
    config = make_model(tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"}))
    _, place = load_shapes(tmp_path, device="balanced")
    assert place.type == "cpu"
    assert read_facts(tmp_path, device="balanced").dtype == "float32"


@pytest.mark.parametrize(
    ("device_map", "devices"),
    [
        ({"model.embed_tokens": 1, "model.layers.0": 0, "lm_head": 1}, ["cuda:1", "cuda:0"]),
        ({"model.embed_tokens": "cpu", "model.layers.0": "cuda:3", "lm_head": "disk"}, ["cuda:3"]),
        ({"model.embed_tokens": "disk", "lm_head": "cpu"}, ["cpu"]),
        ({"": 0}, ["cuda:0"]),
        (None, ["cpu"]),
    ],
)
def test_a_model_computes_on_its_accelerators(device_map: Any, devices: list[str]) -> None:
    model = ZOO["llama"].build()
    if device_map is not None:
        model.hf_device_map = device_map
    placed = PlainModel(model)
    assert list(map(str, placed.devices)) == devices
    assert placed.device == placed.devices[0]


def test_a_budget_is_for_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ZOO["llama"].build()
    devices = property(lambda self: (torch.device("cpu"), torch.device("meta")), lambda self, value: None)
    monkeypatch.setattr(PlainModel, "devices", devices, raising=False)
    monkeypatch.setattr(PlainModel, "device", torch.device("cpu"), raising=False)
    with pytest.raises(RequestError, match="memory_budget bounds what one device holds, and the model lies on several"):
        Engine(model, memory_budget=1 << 30)


def test_keys_values_and_masks_follow_each_layer_to_its_device() -> None:
    model = TreeModel(ZOO["qwen2-window"].build(), attention="torch")
    plan = plan_product([STEM[:12], STEM[:12] + STEM[30:35]], [STEM[12:20]], [[3], [4]], pack_tokens=24)
    packs, pool = list(plan.packs(0)), model.pool(plan.core.pool_slots)
    assert len(packs) > 1
    assert packs[0].retain_slot.size, "nothing is kept for the next pack"
    rule = AttentionRule(scaling=0.3, softcap=5.0, window=7)
    for pack in packs:
        tree = model.start(pack, pool)
        for device in ("cpu", "meta", "cpu"):
            q, k, v = (torch.ones(tree.num_rows, heads, 8, device=device) for heads in (4, 2, 2))
            out = tree.attention(q, k, v, rule)
            assert (out.device.type, out.shape) == (device, q.shape)
    assert [kept[0].device.type for kept in pool._layers] == ["cpu", "meta", "cpu"]
