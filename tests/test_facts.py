"""What a model is, in numbers: equal to the model built with weights, and known of every configuration served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import byte_level_tokenizer, make_task
from zoo import ZOO

from iclperm import Study, demo
from iclperm.cli import main as cli
from iclperm.engine.facts import ModelFacts
from iclperm.engine.model import TreeModel
from iclperm.engine.plain_model import read_facts
from iclperm.errors import ModelError
from iclperm.models.papers import paper_models
from iclperm.runs.limits import WorkLimits
from iclperm.runs.setting import ResolvedStudy

UNBOUNDED = 2**31 - 1
# As published: sizes that Gemma 3 leaves to its architecture are not in it.
GEMMA_3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
LLAMA = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 99}
QWEN_3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
# Layers, hidden size, heads for keys and values, head size, token ids, tokens of context, window, bytes a token.
DEFAULTS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "gemma-3-4b": (GEMMA_3_4B, (34, 2560, 4, 256, 262_208, 131_072, 1024, 278_528)),
    "qwen3": (QWEN_3, (32, 4096, 32, 128, 151_936, 32_768, 0, 1_048_576)),
    "gpt2": ({"model_type": "gpt2"}, (12, 768, 12, 64, 50_257, 1024, 0, 73_728)),
    "llama": ({"model_type": "llama"}, (32, 4096, 32, 128, 32_000, 2048, 0, 1_048_576)),
}


def write_config(folder: Path, config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def flattened(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**config, **config.get("text_config", {})}.items() if value is not None}


def former_parameters(config: dict[str, Any]) -> int:
    """What the sizes of units in run folders followed from, by what config.json says."""
    width = config.get("hidden_size") or config["n_embd"]
    layers = config.get("num_hidden_layers") or config["n_layer"]
    return int(12 * layers * width**2 + config["vocab_size"] * width)


def former_kv_bytes(config: dict[str, Any]) -> int:
    """Bytes of a token's keys and values in float32, from what config.json says."""
    layers = config.get("num_hidden_layers") or config["n_layer"]
    heads = config.get("num_attention_heads") or config["n_head"]
    size = config.get("head_dim") or (config.get("hidden_size") or config["n_embd"]) // heads
    return int(2 * layers * (config.get("num_key_value_heads") or heads) * size * 4)


@pytest.mark.parametrize("name", ZOO)
def test_facts_without_weights_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    model = ZOO[name].build()
    model.config.save_pretrained(tmp_path)
    facts, served = read_facts(tmp_path), TreeModel(model).facts
    assert facts == ModelFacts(**{**vars(served), "bos_ids": facts.bos_ids})
    assert facts.num_parameters == sum(weight.numel() for weight in model.parameters())
    assert facts.body_parameters + facts.head_parameters <= facts.num_parameters + facts.head_parameters * facts.is_tied
    told = flattened(json.loads((tmp_path / "config.json").read_text()))
    assert facts.kv_token_bytes == former_kv_bytes(told)
    assert facts.decoder_parameters == former_parameters(told)


@pytest.mark.parametrize("model", paper_models(), ids=lambda model: model.name)
def test_the_papers_models_keep_their_units_and_their_keys_and_values(model: Any, tmp_path: Path) -> None:
    facts, told = read_facts(write_config(tmp_path, model.config)), flattened(model.config)
    told.setdefault("vocab_size", facts.vocab_size)  # Gemma 3 leaves it to its architecture
    assert facts.decoder_parameters == former_parameters(told)
    assert facts.kv_token_bytes == former_kv_bytes(told)


def test_units_follow_the_size_of_the_model(tmp_path: Path) -> None:
    study = Study(task=str(make_task(tmp_path)), sets=2, permutations=2, shots=2, queries=4)
    limits = WorkLimits(unit_flops=10**10, unit_tokens=(100, 10_000))
    told = flattened(json.loads((demo.model_path() / "config.json").read_text()))
    large = write_config(tmp_path / "large", {**LLAMA, "num_hidden_layers": 24, "hidden_size": 1024})
    small = write_config(tmp_path / "small", LLAMA)
    models = {str(small): 10_000, "demo": 10**10 // (2 * former_parameters(told)), str(large): 100}
    assert 100 < models["demo"] < 10_000
    for model, tokens in models.items():
        assert ResolvedStudy.of(study.model_copy(update={"model": model}), limits=limits).unit_tokens == tokens


@pytest.mark.parametrize("name", DEFAULTS)
def test_what_a_configuration_leaves_out_its_architecture_tells(name: str, tmp_path: Path) -> None:
    config, expected = DEFAULTS[name]
    facts = read_facts(write_config(tmp_path, config))
    assert expected == (
        facts.num_layers, facts.hidden_size, facts.num_kv_heads, facts.head_size, facts.vocab_size, facts.max_tokens,
        facts.window, facts.kv_token_bytes,
    )  # fmt: skip
    assert read_facts(tmp_path, dtype="bfloat16").kv_token_bytes * 2 == facts.kv_token_bytes
    assert facts.bos_ids == ()


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_study_is_planned_on_a_configuration_of_few_keys(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_config(tmp_path / "model", DEFAULTS[name][0])
    byte_level_tokenizer().save_pretrained(folder)
    asked = ["--sets", "2", "--permutations", "2", "--shots", "0,2", "--queries", "4"]
    with pytest.raises(SystemExit) as exit_:
        cli.main(["plan", "--model", str(folder), "--task", str(make_task(tmp_path)), "--json", *asked])
    said = capsys.readouterr()
    assert exit_.value.code == 0, said.err
    planned = json.loads(said.out)
    assert planned["kv_peak_bytes"] == planned["kv_peak_tokens"] * DEFAULTS[name][1][-1]
    assert planned["estimate"]["kv_token_bytes"] == DEFAULTS[name][1][-1]
    assert planned["num_overlong"] == 0


def test_bos_is_what_the_file_says_not_what_the_architecture_assumes(tmp_path: Path) -> None:
    assert read_facts(write_config(tmp_path, {"model_type": "llama"})).bos_ids == ()
    assert read_facts(write_config(tmp_path, {"model_type": "llama", "bos_token_id": 1})).bos_ids == (1,)
    nested = {**GEMMA_3_4B, "text_config": {**GEMMA_3_4B["text_config"], "bos_token_id": 2}}
    assert read_facts(write_config(tmp_path, nested)).bos_ids == (2,)


def test_the_tree_serves_as_far_as_angles_do_not_depend_on_the_length(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = {"model_type": "llama", **small, "max_position_embeddings": 600, "rope_parameters": rope}
    facts = read_facts(write_config(tmp_path, config))
    assert (facts.max_positions, facts.max_tokens) == (600, 600)
    facts = read_facts(
        write_config(tmp_path, config | {"rope_parameters": rope | {"original_max_position_embeddings": 90}})
    )
    assert (facts.max_positions, facts.max_tokens) == (600, 90)
    nowhere = {"model_type": "bloom", "hidden_size": 16, "n_layer": 1, "n_head": 2}
    assert read_facts(write_config(tmp_path, nowhere)).max_tokens == UNBOUNDED


WRONG: dict[str, tuple[Any, str]] = {
    "a word for a size": (LLAMA | {"hidden_size": "wide"}, "hidden_size is 'wide'; give a whole number from 1 on"),
    "half a layer": (LLAMA | {"num_hidden_layers": 0.5}, "num_hidden_layers is 0.5; give a whole number from 1 on"),
    "no heads": (LLAMA | {"num_attention_heads": 0}, "num_attention_heads is 0; give a whole number from 1 on"),
    "fewer than none": (LLAMA | {"vocab_size": -5}, "vocab_size is -5; give a whole number from 1 on"),
    "a word for a window": (LLAMA | {"max_position_embeddings": "x"}, "max_position_embeddings is 'x'; give a whole"),
    "a word for a head": (LLAMA | {"head_dim": "x"}, "Validation error for field 'head_dim': TypeError: "),
    "a word for a sliding window": (LLAMA | {"sliding_window": "x"}, "sliding_window is 'x'; give a whole number"),
    "no dtype": (LLAMA | {"dtype": "float1"}, "dtype is 'float1'; give one of float32, bfloat16"),
    "a list for the text": ({**GEMMA_3_4B, "text_config": [1]}, "text_config is [1]; a JSON object is needed"),
    "a word in the text": ({**GEMMA_3_4B, "text_config": {"n_embd": "x"}}, "n_embd is 'x'; give a whole number from 1"),
    "no type": ({"hidden_size": 16}, "Should have a `model_type` key"),
    "no language model": ({"model_type": "vit"}, "is a 'vit' model, which is no causal language model"),
    "no object": ([], "is no configuration: a JSON object is needed"),
    "code": (LLAMA | {"auto_map": {}, "architectures": ["Own"]}, "brings its own code (auto_map in config.json)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_configurations_get_one_line_that_names_the_folder(name: str, tmp_path: Path) -> None:
    config, message = WRONG[name]
    with pytest.raises(ModelError) as raised:
        read_facts(write_config(tmp_path, config))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert str(tmp_path) in str(raised.value)
