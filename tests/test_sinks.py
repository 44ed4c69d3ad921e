"""Attention sinks: models whose heads have a learned score in the softmax that is no key's (gpt-oss and others).

The kernels' own property tests have sinks among their cases, and the zoo has such models.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton_interpreter
from devices import DEVICE, quick_check
from safetensors.torch import load_file, save_file
from test_engine import SMALL_PACKS, Request, assert_agrees, assert_close, branching_requests
from test_generate import EOS, branching_prompts, count_ties, plain_texts
from tiny import byte_level_tokenizer
from transformers import PreTrainedModel
from zoo import _BOTH, _GROUPED, _LAYERS, _SLIDING, ZOO, Entry

from iclperm import _core
from iclperm.engine import Engine
from iclperm.engine.doctor.kernels import shapes_of
from iclperm.engine.kernelcheck import kernel_checks
from iclperm.engine.kernels import attention as attention_module
from iclperm.engine.kernels import triton_attention, triton_decode
from iclperm.engine.kernels.triton_attention import TritonAttention
from iclperm.engine.kernels.triton_decode import DecodeAttention
from iclperm.engine.model import TreeModel
from iclperm.errors import ModelError, SelfCheckError

triton_interpreter.repair()

WITH_SINKS = ["gpt-oss", "granite-swa"]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
OTHERS = {
    "flint": Entry(
        "FlintForCausalLM",
        "FlintConfig",
        {**_GROUPED, **_LAYERS, **_SLIDING, **_EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 24},
        _BOTH,
    ),
    "granite-moe-swa": Entry(
        "GraniteMoeSWAForCausalLM",
        "GraniteMoeSWAConfig",
        {**_GROUPED, **_LAYERS, **_SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
        _BOTH,
    ),
}
_SPREAD = {"v_head_dim": 16, "head_dim": 16, "swa_num_key_value_heads": 4, "swa_head_dim": 16, "swa_v_head_dim": 16}
MIXED = Entry(
    "MiMoV2FlashForCausalLM",
    "MiMoV2FlashConfig",
    {
        **_GROUPED,
        **_LAYERS,
        **_SLIDING,
        **_SPREAD,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    _BOTH,
)


@pytest.fixture
def sinks_seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each call of the CPU's kernel was given."""
    seen: list[Any] = []
    attend = _core.tree_attention

    def watched(*given: Any, sinks: Any, **options: Any) -> None:
        seen.append(None if sinks is None else sinks.copy())
        attend(*given, sinks=sinks, **options)

    monkeypatch.setattr(attention_module, "_core", SimpleNamespace(tree_attention=watched))
    return seen


@pytest.mark.parametrize("name", WITH_SINKS)
def test_each_layer_attends_natively_with_its_own_sinks(name: str, sinks_seen: list[Any]) -> None:
    model, requests = ZOO[name].build(), branching_requests()
    engine = Engine(model, **SMALL_PACKS)
    assert engine.attention == "native"
    assert_agrees(engine.loglikelihood(requests), model, requests)
    layers = [layer.self_attn.sinks.detach().numpy() for layer in model.model.layers]
    assert len(sinks_seen) == engine.report.num_packs * len(layers)
    for number, sinks in enumerate(sinks_seen):
        np.testing.assert_array_equal(sinks, layers[number % len(layers)])


def test_a_model_without_sinks_has_none_in_the_kernel(sinks_seen: list[Any]) -> None:
    Engine(ZOO["llama"].build(), **SMALL_PACKS).loglikelihood(branching_requests())
    assert sinks_seen
    assert all(sinks is None for sinks in sinks_seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WITH_SINKS)
def test_they_pass_the_first_use_check(name: str, dtype: torch.dtype) -> None:
    model, requests = ZOO[name].build().to(dtype), branching_requests()
    engine = Engine(model)
    assert engine.numerics["attention"] == "native"
    assert "given_up" not in engine.numerics
    assert engine.row_invariant is (name == "granite-swa")  # gpt-oss has a mixture of experts
    if dtype == torch.float32:
        assert_close(engine.loglikelihood(requests), model, requests)


@pytest.mark.parametrize("name", WITH_SINKS)
def test_texts_are_those_of_plain_decoding(name: str) -> None:
    prompts = branching_prompts()
    engine = Engine(ZOO[name].build(), **SMALL_PACKS)
    out = engine.generate(prompts, max_new_tokens=6)
    assert engine.attention == "native"
    assert count_ties(out, plain_texts(name, prompts, 6, EOS)) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", WITH_SINKS)
def test_an_engine_on_triton_agrees_and_decodes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[type, set[bool]] = {TritonAttention: set(), DecodeAttention: set()}
    for kind, seen in given.items():

        def watched(self: Any, states: Any, rule: Any, attend: Any = kind.__call__, seen: set[bool] = seen) -> Any:
            seen.add(states.sinks is not None)
            return attend(self, states, rule)

        monkeypatch.setattr(kind, "__call__", watched)
    model, requests, prompts = ZOO[name].build().to(DEVICE), branching_requests()[:6], branching_prompts()[:4]
    engine = Engine(model, attention="triton", **SMALL_PACKS)
    assert_close(engine.loglikelihood(requests), model, requests)
    assert count_ties(engine.generate(prompts, max_new_tokens=3), plain_texts(name, prompts, 3, EOS)) == 0
    assert given == {TritonAttention: {True}, DecodeAttention: {True}}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_that_pass_sinks_are_exact(name: str, sinks_seen: list[Any]) -> None:
    model, requests = OTHERS[name].build(), branching_requests()
    engine = Engine(model)
    assert_close(engine.loglikelihood(requests), model, requests)
    assert engine.numerics["attention"] == "native"
    assert sinks_seen
    assert all(sinks is not None for sinks in sinks_seen)


def test_layers_with_sinks_and_without_are_both_checked_and_exact(sinks_seen: list[Any]) -> None:
    model, requests = MIXED.build(), branching_requests()
    tree = TreeModel(model)
    assert tree.facts.sink_choices == shapes_of(tree).sinks == (False, True)
    (attention, *_) = kernel_checks(tree, 100)
    assert attention.is_right
    assert {sinks is None for sinks in sinks_seen} == {False, True}
    assert_close(Engine(model, self_check=False).loglikelihood(requests), model, requests)


BREAKS: dict[str, Callable[[Any], Any]] = {
    "left out": lambda sinks: None,
    "of another head": lambda sinks: np.roll(sinks, 1),
    "of the first head": lambda sinks: np.full_like(sinks, sinks[0]),
    "scaled as scores are": lambda sinks: sinks * np.float32(0.25),
    "one percent more": lambda sinks: sinks * np.float32(1.01),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("broken", BREAKS)
def test_a_kernel_of_the_cpu_that_is_wrong_about_sinks_is_seen(
    broken: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, model = _core.tree_attention, TreeModel(ZOO["gpt-oss"].build().to(dtype))

    def breaking(*given: Any, sinks: Any, **options: Any) -> None:
        attend(*given, sinks=BREAKS[broken](sinks), **options)

    assert next(iter(kernel_checks(model, 100))).is_right
    monkeypatch.setattr(attention_module, "_core", SimpleNamespace(tree_attention=breaking))
    check = next(iter(kernel_checks(model, 100)))
    assert (check.part, check.is_right) == ("attention", False)


def test_the_first_use_check_has_sinks_where_the_model_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels, too."""
    quick_check(monkeypatch)
    launched: dict[str, set[bool]] = {}
    for module, name in ((triton_attention, "_tree_attention_kernel"), (triton_decode, "_merge_chunks_kernel")):
        monkeypatch.setattr(module, name, Watched(getattr(module, name), launched.setdefault(name, set())))
    for entry, expected in ((ZOO["gpt-oss"], {True}), (ZOO["llama"], {False}), (MIXED, {False, True})):
        for seen in launched.values():
            seen.clear()
        for check in kernel_checks(TreeModel(entry.build(), attention="triton"), 24):
            assert check.is_right, check
        assert launched == dict.fromkeys(launched, expected)


class Watched:
    """In place of a kernel: notes whether it is launched with sinks."""

    def __init__(self, kernel: Any, seen: set[bool]) -> None:
        self._kernel, self._seen, self.arg_names = kernel, seen, kernel.arg_names

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*given: Any, **options: Any) -> None:
            self._seen.add(options["HAS_SINKS"])
            self._kernel[grid](*given, **options)

        return launch


def passing(model: PreTrainedModel, sinks: torch.Tensor) -> PreTrainedModel:
    """A model one layer of which passes sinks on to its attention."""
    layer = model.model.layers[0].self_attn
    plain = layer.forward
    layer.forward = lambda *args, **kwargs: plain(*args, s_aux=sinks, **kwargs)
    return model


@pytest.mark.parametrize("shape", [(3,), (4, 1), (1, 4, 1, 1)])
def test_sinks_that_are_not_one_number_a_head_are_refused_by_name(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="LlamaAttention passes 's_aux' to its attention, which the tree cannot serve"):
        Engine(passing(ZOO["llama"].build(), torch.zeros(shape))).loglikelihood([([1], [2])])


def test_sinks_that_the_model_itself_passes_over_are_a_disagreement() -> None:
    """transformers' sdpa takes any argument and does not say so: what it computes has no sinks."""
    with pytest.raises(SelfCheckError, match="'llama': the tree gives"):
        Engine(passing(ZOO["llama"].build(), torch.zeros(4))).loglikelihood([([1], [2])])


def test_a_layer_may_pass_none() -> None:
    requests: list[Request] = [([1, 2, 3], [4, 5])]
    model = ZOO["llama"].build()
    expected = Engine(model, layers="transformers", self_check=False).loglikelihood(requests).logprob
    given = Engine(passing(ZOO["llama"].build(), None), self_check=False).loglikelihood(requests).logprob  # type: ignore[arg-type]
    assert given.tolist() == expected.tolist()


@pytest.mark.parametrize("attention", ["native", "torch"])
def test_a_sink_of_minus_infinity_is_as_none(attention: str) -> None:
    model, requests = ZOO["granite-swa"].build(), branching_requests()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-torch.inf)
    out = Engine(model, attention=attention, **SMALL_PACKS).loglikelihood(requests)
    assert not out.state.any()
    assert_close(out, model, requests)


_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def test_a_folder_of_mxfp4_has_the_numbers_of_the_same_weights(tmp_path: Path) -> None:
    """As gpt-oss is published; without the `kernels` package transformers makes plain numbers of them."""
    entry, tokenizer = ZOO["gpt-oss"], byte_level_tokenizer()
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": len(tokenizer)}
    model = replace(entry, settings={**entry.settings, **sizes}).build()
    plain, stored, generator = tmp_path / "plain", tmp_path / "mxfp4", torch.Generator().manual_seed(0)
    for folder in (plain, stored):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    weights = load_file(plain / "model.safetensors")
    packed = dict(weights)
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = weights[name].shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(123, 126, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        pairs = torch.stack([_FP4[(blocks & 15).long()], _FP4[(blocks >> 4).long()]], dim=-1).flatten(-2)
        numbers = pairs * torch.exp2(scales.float() - 127.0)[..., None]
        weights[name] = numbers.flatten(-2).transpose(1, 2).contiguous()
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(packed, stored / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (stored / "config.json").write_text(json.dumps(config))
    requests = [("The leaf by the road", " is green"), ("A", " brick")]
    engines = [Engine.from_pretrained(folder) for folder in (plain, stored)]
    ours, theirs = (engine.loglikelihood(requests).logprob for engine in engines)
    assert [engine.numerics["attention"] for engine in engines] == ["native", "native"]
    np.testing.assert_array_equal(ours, theirs)
    assert np.ptp(ours) > 1
