"""The papers' models: their real configurations, exact at reduced size, and the table that is made from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from tolerances import TOLERANCES
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from zoo import _roughened

from iclperm import models
from iclperm.engine import Engine
from iclperm.engine.decode import generation_bounds
from iclperm.engine.estimate import estimate
from iclperm.engine.load import load_config, load_shapes
from iclperm.errors import ModelError, RequestError
from iclperm.models import ModelRow, PaperModel, paper_models
from iclperm.models.costs import study_plan
from iclperm.reference import scoring

PER_TOKEN = TOLERANCES["loglikelihood per token"]["float32"]
MODELS = {model.name: model for model in paper_models()}
DOCS = Path(__file__).resolve().parents[1] / "docs" / "models.md"
VOCAB, WINDOW = 128, 7
EXACT_COUNTS = ("Qwen2.5 0.5B", "Gemma-3 27B", "Llama-3.1 8B", "R1-Distill-Qwen 1.5B")


@pytest.fixture(scope="module")
def rows() -> dict[str, ModelRow]:
    return {row.name: row for row in models.table()}


def requests() -> list[tuple[list[int], list[int]]]:
    """Prompts that branch, some beyond three windows."""
    rng = np.random.default_rng(0)
    stem, other = ([int(i) for i in rng.integers(3, VOCAB, 40)] for _ in range(2))
    prompts = [(stem[:n], other[n : n + k]) for n in (1, 5, 24, 39) for k in (1, 2)]
    return [*prompts, (stem[:24], stem[24:27]), (stem[:12] + other[:6], [4, 5]), (stem[:12] + other[:6], [4, 6])]


def assert_exact(engine: Engine, model: PreTrainedModel) -> None:
    asked = requests()
    plain = scoring.loglikelihood(model, asked)
    out = engine.loglikelihood(asked)
    for fast, slow in zip(out.logprob, plain, strict=True):
        assert abs(fast - slow.logprob) <= PER_TOKEN * slow.num_tokens
    assert np.std([slow.logprob / slow.num_tokens for slow in plain]) > 0.3, "the model tells no prompts apart"
    assert engine.report.num_packs > 1, "keys never crossed a pack border"
    assert engine.report.tokens_forwarded == engine.report.tokens_unique


def reduced(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with fewer layers, heads and ids, narrow layers and a short window; the rest as it is."""
    if "text_config" in config:
        small = {"hidden_size": 16, "intermediate_size": 24, "image_size": 28, "num_attention_heads": 2}
        vision = {**config["vision_config"], **small, "num_hidden_layers": 1}
        ids = {"image_token_index": 120, "boi_token_index": 118, "eoi_token_index": 119, "mm_tokens_per_image": 4}
        return {**config, **ids, "text_config": reduced(config["text_config"]), "vision_config": vision}
    kv = min(2, config["num_key_value_heads"])
    heads = kv * config["num_attention_heads"] // config["num_key_value_heads"]
    is_windowed = config["model_type"] in ("gemma2", "gemma3_text")
    return {
        **config,
        "num_hidden_layers": {"gemma2": 4, "gemma3_text": 7}.get(config["model_type"], 2),
        "hidden_size": 8 * heads,
        "intermediate_size": 88,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "vocab_size": VOCAB,
        "sliding_window": WINDOW if is_windowed else config.get("sliding_window"),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def save_config(config: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def small_model(model: PaperModel, folder: Path) -> PreTrainedModel:
    """A model of random weights with the reduced configuration; of text and images, the text part."""
    config = load_config(save_config(reduced(dict(model.config)), folder)).get_text_config(decoder=True)
    return _roughened(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


@pytest.mark.parametrize("name", MODELS)
def test_the_published_number_of_parameters_is_met(name: str, rows: dict[str, ModelRow]) -> None:
    published, counted = MODELS[name].published_parameters, rows[name].parameters
    if name == "Gemma-3 27B":
        assert abs(counted / 27.016e9 - 1) < 0.001
        with MODELS[name].folder() as folder, torch.device("meta"):
            whole = tf.Gemma3ForConditionalGeneration(AutoConfig.from_pretrained(folder))
        counted = sum(parameter.numel() for parameter in whole.parameters())
    if name in EXACT_COUNTS:
        assert counted == published
    elif name.startswith("Gemma"):
        assert published - counted == 128 * rows[name].hidden_size  # rows of embeddings that checkpoints leave out
    else:
        assert abs(counted / published - 1) < 0.005


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_exact_at_reduced_size(name: str, tmp_path: Path, rows: dict[str, ModelRow]) -> None:
    model, row = small_model(MODELS[name], tmp_path), rows[name]
    config = model.config
    engine = Engine(model, pack_tokens=24)
    assert_exact(engine, model)
    assert (engine.layers, engine.attention, engine.row_invariant) == ("fused", "native", True)
    assert config.head_dim == row.head_dim
    assert config.num_attention_heads * row.num_kv_heads == config.num_key_value_heads * row.num_heads
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == row.is_tied


FEATURES: dict[str, Callable[[Any, Any], bool]] = {
    "Qwen2.5": lambda config, layer: layer.self_attn.k_proj.bias is not None and not hasattr(layer.self_attn, "k_norm"),
    "R1-Distill": lambda config, layer: (
        layer.self_attn.k_proj.bias is not None and config.rope_parameters["rope_theta"] == 10_000
    ),
    "Gemma ": lambda config, layer: type(layer.mlp.act_fn).__name__ == "GELUTanh" and config.head_dim == 256,
    "Gemma-2": lambda config, layer: (
        config.layer_types == ["sliding_attention", "full_attention"] * 2
        and (config.attn_logit_softcapping, config.final_logit_softcapping) == (50.0, 30.0)
        and layer.self_attn.scaling == 256**-0.5
    ),
    "Gemma-3": lambda config, layer: (
        config.layer_types == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
        and layer.self_attn.scaling == 168**-0.5
        and config.rope_parameters["full_attention"]
        == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0}
        and config.rope_parameters["sliding_attention"]["rope_theta"] == 10_000.0
    ),
    "Llama-3.2": lambda config, layer: (
        config.rope_parameters["rope_type"] == "llama3" and config.rope_parameters["factor"] == 32.0
    ),
    "Llama-3.1": lambda config, layer: (
        config.rope_parameters["rope_type"] == "llama3" and config.rope_parameters["factor"] == 8.0
    ),
}


@pytest.mark.parametrize("family", FEATURES)
def test_reduced_models_keep_what_sets_their_family_apart(family: str, tmp_path: Path) -> None:
    members = [name for name in MODELS if name.startswith(family)]
    assert members
    for name in members:
        model = small_model(MODELS[name], tmp_path)
        assert FEATURES[family](model.config, model.get_decoder().layers[0]), name


def test_a_loaded_gemma_runs_the_activation_that_its_file_means(tmp_path: Path) -> None:
    small_model(MODELS["Gemma 2B"], tmp_path).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    save_config({**config, "hidden_act": "gelu"}, tmp_path)
    activation = Engine.from_pretrained(tmp_path).model.get_decoder().layers[0].mlp.act_fn
    assert type(activation).__name__ == "GELUTanh"


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    folder = save_config(reduced(dict(MODELS["Gemma-3 27B"].config)), tmp_path_factory.mktemp("gemma") / "model")
    model = _roughened(tf.Gemma3ForConditionalGeneration(AutoConfig.from_pretrained(folder)).eval())
    model.save_pretrained(folder)
    return model, folder


def renamed(folder: Path, target: Path, name: Callable[[str], str | None]) -> Path:
    """A copy of a checkpoint with its keys called otherwise, those of None left out."""
    save_config(json.loads((folder / "config.json").read_text()), target)
    weights = {name(key): weight for key, weight in load_file(folder / "model.safetensors").items()}
    save_file({key: weight for key, weight in weights.items() if key}, target / "model.safetensors", {"format": "pt"})
    return target


def test_of_text_and_images_the_text_part_is_loaded(multimodal: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    whole, folder = multimodal
    keys = set(load_file(folder / "model.safetensors"))
    assert any(key.startswith("vision_tower.") for key in keys)
    assert any(key.startswith("language_model.model.layers.6.") for key in keys), "not the hub's names"
    newer = renamed(folder, tmp_path / "newer", lambda key: key.replace("language_model.model", "model.language_model"))
    for each in (folder, newer):
        engine = Engine.from_pretrained(each, device="cpu", pack_tokens=24)
        assert type(engine.model) is tf.Gemma3ForCausalLM
        assert not [name for name, _ in engine.model.named_parameters() if "vision" in name or "projector" in name]
        assert_exact(engine, whole)
        assert engine.layers == "fused"


def test_a_text_part_must_be_whole(multimodal: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    _, folder = multimodal
    less = renamed(folder, tmp_path / "less", lambda key: None if "layers.5.mlp.down" in key else key)
    with pytest.raises(ModelError, match=r"missing keys, \['model.layers.5.mlp.down_proj.weight'\]"):
        Engine.from_pretrained(less)
    more = renamed(folder, tmp_path / "more", lambda key: key)
    config = json.loads((more / "config.json").read_text())
    text = {**config["text_config"], "num_hidden_layers": 6, "layer_types": None}
    save_config({**config, "text_config": text}, more)
    with pytest.raises(ModelError, match=r"layers that the configuration lacks, \['(\w+\.)+layers\.6\."):
        Engine.from_pretrained(more)


def test_a_text_part_is_estimated_alone(multimodal: tuple[PreTrainedModel, Path]) -> None:
    whole, folder = multimodal
    shapes, _ = load_shapes(folder)
    text = sum(parameter.numel() for parameter in whole.model.language_model.parameters())
    assert sum(parameter.numel() for parameter in shapes.parameters()) == text
    assert estimate(folder, []).weight_bytes == 4 * text


def test_the_table_counts_what_is_there(rows: dict[str, ModelRow]) -> None:
    assert list(rows) == list(MODELS)
    row = rows["Qwen2.5 7B"]
    assert row.weights_float32 == 2 * row.weights_bfloat16 == 4 * row.parameters
    assert row.kv_token_bytes == 2 * 28 * 4 * 128 * 2
    assert rows["Gemma-3 27B"].num_window_layers == 52
    assert rows["Gemma-2 9B"].softcaps == (50.0, 30.0)
    assert rows["Qwen2.5 7B"].window == rows["Llama-3.1 8B"].window == 0


def test_costs_follow_from_contexts_queries_and_lengths(rows: dict[str, ModelRow]) -> None:
    costs = {(cost.study, cost.task): cost for cost in rows["Llama-3.1 8B"].costs}
    asked = costs["sensitivity", "classification"]
    assert (asked.contexts, asked.prompts) == (100, 50_000)
    assert asked.tokens_naive == 50_000 * (20 + 8 * 60 + 58)
    assert 50_000 * 55 < asked.tokens < 100 * 8 * 60 + 50_000 * 58 + 20
    body = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert 0.96 < asked.flops / (2 * body * asked.tokens) < 1.06, "but for the last layer, attention and head"
    generated = costs["sensitivity", "generation"]
    plan = study_plan(models.STUDIES[0], models.WORKLOADS[1])
    assert generated.tokens == generation_bounds(plan, max_new_tokens=256).tokens > 50_000 * 255
    assert costs["transfer", "generation"].flops == 2 * costs["search", "generation"].flops
    assert costs["search", "classification"].prompts == 1280 * 1500
    assert 1900 < costs["curve", "classification"].contexts <= 5 * 20 * 20 + 1
    assert asked.hours == pytest.approx(asked.flops / 495e12 / 3600)


def test_the_document_holds_the_table_of_today(rows: dict[str, ModelRow]) -> None:
    begin, end = "<!-- iclperm models: begin -->\n", "<!-- iclperm models: end -->"
    text = DOCS.read_text(encoding="utf-8")
    assert text.partition(begin)[2].partition(end)[0].strip() == models.markdown(list(rows.values())).strip(), (
        "run python benchmarks/models_table.py"
    )


def test_the_rate_scales_the_hours_alone(rows: dict[str, ModelRow]) -> None:
    (slow,) = models.table(models.DEFAULT_RATE / 10, paper_models()[:1])
    fast = rows[slow.name]
    assert replace(slow, costs=()) == replace(fast, costs=())
    for a, b in zip(slow.costs, fast.costs, strict=True):
        assert a.hours == pytest.approx(10 * b.hours)
        assert replace(a, hours=0.0) == replace(b, hours=0.0)
    for rate in (0, -1, float("nan"), float("inf")):
        with pytest.raises(RequestError, match="give a positive number, such as 495"):
            models.table(rate)
