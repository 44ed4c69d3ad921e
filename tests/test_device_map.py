"""Models spread by accelerate: over devices in layers of ours, with parts on the host or the disk in transformers' own.

The numbers are the same.
"""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module
from cards import H100, V100, Card, plug_in
from tiny import make_model
from tolerances import TOLERANCES
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel
from zoo import VOCAB, ZOO

from iclperm.engine import Engine, plan_product
from iclperm.engine.kernels import triton_launch
from iclperm.engine.kernels.rule import AttentionRule
from iclperm.engine.layers import FusedLayer
from iclperm.engine.link import DeviceLink
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


def hooked(model: PreTrainedModel) -> PreTrainedModel:
    """The model with accelerate's hooks, as it has where all weights lie on devices: here all on one."""
    return dispatch_model(model, ELSEWHERE, force_hooks=True)  # type: ignore[no-any-return]


def test_our_layers_run_over_hooks_that_only_bring_what_is_given(saved: tuple[PreTrainedModel, Path]) -> None:
    model, _ = saved
    expected = Engine(model, pack_tokens=24).loglikelihood(REQUESTS)
    plain = [each.logprob for each in scoring.loglikelihood(model, REQUESTS)]
    forwards = {name: vars(module).get("forward") for name, module in hooked(model).named_modules()}
    assert sum(forward is not None for forward in forwards.values()) > 20
    engine = Engine(model, pack_tokens=24)
    out = engine.loglikelihood(REQUESTS)
    np.testing.assert_allclose(out.logprob, expected.logprob, rtol=0, atol=PER_TOKEN)
    assert (engine.layers, engine.attention) == ("fused", "native")
    assert "given_up" not in engine.numerics
    assert {name: vars(module).get("forward") for name, module in model.named_modules()} == forwards
    assert [each.logprob for each in scoring.loglikelihood(model, REQUESTS)] == plain


def test_hooks_that_do_more_are_respected() -> None:
    model = hooked(ZOO["llama"].build())
    assert TreeModel(model).layers == "fused"
    layer = model.model.layers[1]
    brings = layer.mlp.forward
    layer.mlp.forward = lambda x: 2 * brings(x)
    assert TreeModel(model).layers == "transformers"
    layer.mlp.forward = brings
    assert TreeModel(model).layers == "fused"
    add_hook_to_module(layer, ModelHook(), append=True)
    assert TreeModel(model).layers == "transformers"


FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class Borders(TorchFunctionMode):
    """Two cards that are the CPU's memory; ``crossed`` is what each went to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.crossed: list[torch.device] = []
        self._lies: dict[int, tuple[torch.device, torch.Tensor]] = {}  # by storages, which are kept: none is used anew

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.to or args[1] not in (FIRST, SECOND):
            return func(*args, **(kwargs or {}))
        moved, to = args
        if self._lies.get(moved.untyped_storage().data_ptr(), (FIRST,))[0] == to:
            return moved
        self.crossed.append(to)
        return self.made(moved.clone(), to)

    def made(self, tensor: torch.Tensor, on: torch.device) -> torch.Tensor:
        self._lies[tensor.untyped_storage().data_ptr()] = on, tensor
        return tensor


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_what_layers_need_goes_over_a_border_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states once a pack, cosines and sines once a device; tables of indices go where they are asked for."""
    borders, uploads, call = Borders(), set[torch.device](), FusedLayer.__call__

    def upload(self: DeviceLink, arrays: Any, device: torch.device) -> list[torch.Tensor]:
        uploads.add(device)
        return [torch.from_numpy(array) for array in arrays]

    def lies(layer: FusedLayer) -> torch.device:
        return SECOND if layer._attention.layer_idx else FIRST

    model = ZOO[name].build()
    engine = Engine(model, self_check=False, pack_tokens=24)
    expected = engine.loglikelihood(REQUESTS).logprob
    monkeypatch.setattr(FusedLayer, "_device", property(lies))
    decoder = engine._model.fused_decoder()
    assert decoder is not None
    for layer in decoder.layers:
        layer.forget()

    def called(self: FusedLayer, *args: Any, **given: Any) -> torch.Tensor:
        return borders.made(call(self, *args, **given), lies(self))

    monkeypatch.setattr(FusedLayer, "__call__", called)
    monkeypatch.setattr(DeviceLink, "upload", upload)
    with borders:
        found = engine.loglikelihood(REQUESTS).logprob
    np.testing.assert_array_equal(found, expected)
    num_rotaries = len(set((model.config.layer_types or ["full"])[1:])) if name == "gemma3" else 1
    assert borders.crossed == [SECOND] * (engine.report.num_packs * (1 + 2 * num_rotaries))
    assert uploads == {torch.device("cpu"), SECOND}


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


@pytest.mark.parametrize(("second", "attention"), [(H100, "triton"), (V100, "torch")])
def test_what_is_ours_runs_where_every_card_can_run_it(
    second: Card, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ZOO["llama"].build()
    model.hf_device_map = {"model": 0, "lm_head": 1}
    plug_in(H100, monkeypatch, count=2)
    cards = {FIRST: H100, SECOND: second}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: cards[device].capability)
    triton_launch._say_once.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        served = TreeModel(model)
    assert ["do not run on cuda:1" in str(line.message) for line in said] == [True] * (attention == "torch")
    assert (served.attention, served._may_fuse, served._may_fuse_head) == (attention, *[attention == "triton"] * 2)
    assert served.attends_live_rows == (attention == "triton")
    assert not served.link.is_asynchronous


def test_a_budget_is_for_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ZOO["llama"].build()
    devices = property(lambda self: (torch.device("cpu"), torch.device("cpu", 1)), lambda self, value: None)
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
