"""Whole prompts on first use: in half precision a right engine passes by a wide margin, and a broken one does not."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from zoo import ZOO

from iclperm.demo import model_path
from iclperm.engine import Engine, agreement, selfcheck
from iclperm.engine.agreement import MOST_TIMES, DrawnPrompts, HalfErrors
from iclperm.engine.footprint import Sizes
from iclperm.engine.layers import FusedLayer
from iclperm.engine.model import TreeModel
from iclperm.engine.plain_model import PlainModel
from iclperm.errors import ModelError, SelfCheckError
from iclperm.reference import precision, scoring
from iclperm.reference.precision import in_float32

DEFECTS = ("a layer left out", "the prefix lost between packs", "positions one on after a branch")
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
REQUESTS = [([1, 2, 3, 4, 5, 6, 7], [8, 9]), ([3], [4])]


@pytest.fixture
def defects(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Ways in which an engine is broken (benchmarks/bfloat16_check.py)."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bfloat16_check

    found: dict[str, Any] = bfloat16_check.DEFECTS
    return found


def bundled(dtype: str) -> TreeModel:
    model = Engine.from_pretrained(model_path(), dtype=dtype)._model
    assert isinstance(model, TreeModel)
    return model


def logprobs(model: tf.PreTrainedModel) -> list[float]:
    return [score.logprob for score in scoring.loglikelihood(model, REQUESTS)]


@pytest.mark.parametrize("name", ZOO)
def test_half_precision_in_float32_is_the_model_made_float32(name: str) -> None:
    model = ZOO[name].build().bfloat16()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before = {key: (tensor, tensor.clone()) for key, tensor in tensors.items()}
    plain = logprobs(model)
    with in_float32():
        exact = logprobs(model)
    assert exact == pytest.approx(logprobs(copy.deepcopy(model).float()), abs=1e-5)
    assert exact != pytest.approx(plain, abs=1e-4)
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert all(after[key] is tensor and torch.equal(tensor, bits) for key, (tensor, bits) in before.items())
    assert not any("forward" in vars(module) or module._forward_pre_hooks for module in model.modules())
    assert logprobs(model) == plain


def test_what_float32_takes_is_the_weights_of_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bundled("bfloat16").model
    with in_float32():
        whole = logprobs(model)
    largest, wide = 0, precision._wide

    def counted(given: Any) -> Any:
        nonlocal largest
        if isinstance(given, torch.Tensor) and given.dtype == torch.bfloat16:
            largest = max(largest, given.numel())
        return wide(given)

    monkeypatch.setattr(precision, "_wide", counted)
    monkeypatch.setattr(precision, "MOST_NUMBERS", 1 << 14)
    with in_float32():
        in_pieces = logprobs(model)
    assert in_pieces == pytest.approx(whole, abs=1e-5)
    assert largest <= 1 << 14 < model.get_output_embeddings().weight.numel()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2-moe"])
def test_a_right_engine_passes_in_half_precision(name: str, dtype: str) -> None:
    model = TreeModel(ZOO[name].build().to(dtype=HALF[dtype]))
    for seed in range(3):
        selfcheck.check_agreement(model)
        prompts = DrawnPrompts.of(model, seed)
        plain, exact = agreement.plain_logprobs(model, prompts), agreement.exact_logprobs(model, prompts)
        assert HalfErrors.of(agreement.tree_logprobs(model, prompts, 0.25), plain, exact).times < 0.8 * MOST_TIMES
        exact_tree = agreement.exact_tree_logprobs(model, prompts, 0.25)
        assert np.abs(exact_tree - exact).max() < 0.1 * agreement.TOLERANCE


def test_the_bundled_model_passes_in_bfloat16() -> None:
    model = bundled("bfloat16")
    assert model.layers == "fused"
    assert selfcheck.check_agreement(model)
    assert (model.layers, model.attention) == ("fused", "native")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "defect", ["a layer left out", "the prefix lost between packs", "positions one on after a branch"]
)
def test_a_broken_engine_does_not(defect: str, dtype: str, defects: dict[str, Any]) -> None:
    model = bundled(dtype)
    broken: AbstractContextManager[None] = defects[defect]()
    said = (
        "^'qwen2': the tree (gives .* nats where plain scoring gives|is .* nats from float32 where plain bfloat16 is) "
    )
    with broken, pytest.raises(SelfCheckError, match=said):
        selfcheck.check_agreement(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("change", [{"window": 7}, {"window": 0}, {"scaling": 0.36}, {"softcap": 0.0}])
def test_a_rule_of_attention_that_is_not_the_models_is_seen_in_every_precision(
    change: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half precision hides in a short prompt what a window or a scale does to a long one."""
    model = ZOO["gemma2"].build()
    model = TreeModel(model.bfloat16() if dtype == "bfloat16" else model)
    assert selfcheck.layers_agree(model)
    rule = FusedLayer._rule
    monkeypatch.setattr(FusedLayer, "_rule", lambda self, tree: dataclasses.replace(rule(self, tree), **change))
    assert not selfcheck.layers_agree(TreeModel(model.model))  # whose layers are looked up anew


def test_the_defects_are_those_of_the_benchmark(defects: dict[str, Any]) -> None:
    assert set(defects) == set(DEFECTS)


def test_times_are_of_rows_that_plain_scoring_has_numbers_for() -> None:
    exact = np.zeros((4, 3))
    plain = exact + np.array([[0.1], [0.1], [0.2], [np.nan]])
    errors = HalfErrors.of(2 * plain, plain, exact)
    assert errors.times == pytest.approx(2.0)
    assert errors.tree == pytest.approx(2 * errors.plain)
    tree = 2 * plain
    tree[3] = 50.0
    assert HalfErrors.of(tree, plain, exact).times == pytest.approx(2.0)
    tree[:, 0] = np.nan
    assert HalfErrors.of(tree, plain, exact).times == np.inf
    # One row that is far off by chance does not decide.
    tree = plain.copy()
    tree[0] *= 10
    assert HalfErrors.of(tree, plain, exact).times < MOST_TIMES
    assert HalfErrors.of(exact, exact, exact).times == 1.0


class SeesAhead(tf.LlamaForCausalLM):
    """What it predicts depends on the last token."""

    def forward(self, input_ids: Any = None, **given: Any) -> Any:
        out = super().forward(input_ids=input_ids, **given)
        out.logits = out.logits + 0.02 * input_ids[0, -1] * torch.arange(out.logits.shape[-1]) / out.logits.shape[-1]
        return out


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_is_no_reason_to_call_a_model_not_causal(dtype: str) -> None:
    for name in ("llama", "mistral-window", "gpt2"):
        selfcheck.refuse_unless_causal(PlainModel(ZOO[name].build().to(dtype=HALF[dtype])))
    config = tf.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    with pytest.raises(ModelError, match="is no causal language model"):
        selfcheck.refuse_unless_causal(PlainModel(SeesAhead(config).eval().to(dtype=HALF[dtype])))


def test_prompts_branch_within_a_tile_and_at_its_border_and_outgrow_several_where_that_is_cheap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = bundled("float32")
    assert max(map(len, DrawnPrompts.of(model).rows)) > 64
    monkeypatch.setattr(agreement, "checked_tokens", lambda facts, place: _elsewhere(facts))
    rows = DrawnPrompts.of(model).rows
    assert max(map(len, rows)) > 3 * 64
    common = {_shared(a, b) for a in rows for b in rows if a is not b}
    assert any(depth and depth % 64 == 0 for depth in common)
    assert any(depth % 64 for depth in common)
    selfcheck.check_agreement(model)
    windowed = TreeModel(ZOO["gemma3"].build())
    assert max(map(len, DrawnPrompts.of(windowed).rows)) > windowed.facts.window


def _elsewhere(facts: Any) -> int:
    from iclperm.engine.footprint import checked_tokens

    return checked_tokens(facts, torch.device("meta"))


def _shared(a: list[int], b: list[int]) -> int:
    return next((depth for depth, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_what_the_check_holds_in_float32_is_forecast() -> None:
    model = ZOO["llama"].build()
    wide, half = (Sizes.of(TreeModel(each), torch.device("cpu")) for each in (model, copy.deepcopy(model).bfloat16()))
    assert wide.widened == 0
    assert half.widened == 4 * 96 * 32


def test_a_model_is_looked_at_as_it_is_where_it_is_computed_in_float32() -> None:
    """Else its condition would be another one there, and hold all of its weights in float32."""
    model = TreeModel(ZOO["llama"].build().to(torch.bfloat16))
    known = model._known()
    with in_float32():
        assert model._known() is known
