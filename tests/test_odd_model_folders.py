"""Odd and hostile model folders: what is not fetched, not used, not there or not readable gets one line by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from test_model_folders import REQUESTS, SMALL, built, edit_json, edit_weights, refused, shards
from tiny import make_model

from iclperm.engine import Engine
from iclperm.engine.load import load, load_config
from iclperm.engine.tokenizer import load_tokenizer
from iclperm.errors import ModelError

POINTERS = [
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", "git lfs pull"),
    (b"/annex/objects/MD5E-s3--0.safetensors\n", "git annex get"),
]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize(("pointer", "command"), POINTERS, ids=[command for _, command in POINTERS])
def test_a_file_that_was_not_fetched_is_named_with_what_fetches_it(
    tmp_path: Path, name: str, pointer: bytes, command: str
) -> None:
    folder = make_model(tmp_path)
    (folder / name).write_bytes(pointer)
    message = f"^'{folder / name}' is not here, only a pointer to it; run: {command}$"
    refused(folder, message)
    with pytest.raises(ModelError, match=message):  # a plan hashes the weights
        load_config(folder)
    with pytest.raises(ModelError, match=message):
        load_tokenizer(folder)


def test_links_and_records_that_lead_nowhere_are_named_with_what_fetches_them(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.unlink()
    record = folder / "model.safetensors.dvc"
    record.write_text("outs: []\n")
    refused(folder, f"^'{weights}' is not here, only a pointer to it; run: dvc pull$")
    record.unlink()
    weights.symlink_to("../.git/annex/objects/aa/bb/MD5E-s3--0/MD5E-s3--0")
    refused(folder, f"^'{weights}' is not here, only a pointer to it; run: git annex get$")
    (tmp_path / "other.dvc").write_text("outs: []\n")
    refused(tmp_path / "other", "^the model folder '.*other' is not here, only a pointer to it; run: dvc pull$")


def test_pointers_to_what_no_model_is_made_of_are_nobodys_business(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    for name in ("pytorch_model.bin", "README.md"):
        (folder / name).write_bytes(POINTERS[0][0])
    (folder / "flax_model.msgpack").symlink_to(".git/annex/objects/x")
    (folder / "model.safetensors.dvc").write_text("outs: []\n")  # and the file is there
    assert np.isfinite(Engine.from_pretrained(folder).loglikelihood(REQUESTS).logprob).all()


UNUSED = ["lm_head.bias", "model.extra_norm.weight", "model.layers.0.self_attn.q_proj.bias", "score.weight"]


@pytest.mark.parametrize("key", UNUSED)
def test_a_weight_that_would_be_left_out_is_refused_by_name(tmp_path: Path, key: str) -> None:
    edit_weights(make_model(tmp_path), **{key: torch.ones(3)})
    unused = re.escape(f"do not fit its configuration: keys that its architecture does not use, ['{key}']")
    refused(tmp_path, unused)


@pytest.mark.parametrize("key", ["model.layers.1.self_attn.q_proj.bias", "lm_head.weight", "model.norm.weight"])
def test_a_weight_that_would_be_random_is_refused_by_name(tmp_path: Path, key: str) -> None:
    folder = built(tmp_path, tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL, attention_bias=True)))
    weights = load_file(folder / "model.safetensors")
    del weights[key]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    refused(folder, re.escape(f"missing keys, ['{key}']"))


def test_tied_weights_may_be_stored_once_or_twice(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    expected = Engine.from_pretrained(folder).loglikelihood(REQUESTS).logprob
    weights = load_file(folder / "model.safetensors")
    embedding = weights.pop("model.embed_tokens.weight")
    for form in ({"lm_head.weight": embedding}, {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding}):
        once = {key: value.clone() for key, value in form.items()}
        save_file({**weights, **once}, folder / "model.safetensors", metadata={"format": "pt"})
        np.testing.assert_array_equal(Engine.from_pretrained(folder).loglikelihood(REQUESTS).logprob, expected)


def test_what_old_releases_stored_beside_the_weights_is_left_alone(tmp_path: Path) -> None:
    table = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in (0, 1)}
    edit_weights(make_model(tmp_path / "llama"), **table, **{"model.embeddings.position_ids": torch.ones(1, 9)})
    mask, masked = torch.ones(1, 1, 8, 8), torch.tensor(-1e4)
    gpt2 = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=96, n_embd=16, n_layer=1, n_head=2, n_positions=64))
    edit_weights(
        built(tmp_path / "gpt2", gpt2),
        **{"transformer.h.0.attn.bias": mask, "transformer.h.0.attn.masked_bias": masked},
    )
    gptj = tf.GPTJForCausalLM(
        tf.GPTJConfig(vocab_size=96, n_embd=16, n_layer=1, n_head=2, n_positions=64, rotary_dim=4)
    )
    edit_weights(
        built(tmp_path / "gptj", gptj),
        **{"transformer.h.0.attn.bias": mask, "transformer.h.0.attn.masked_bias": masked},
    )
    for kind in ("llama", "gpt2", "gptj"):
        load(tmp_path / kind)
    edit_weights(tmp_path / "gptj", **{"transformer.h.0.attn.bias": torch.ones(16)})  # no mask looks like this
    refused(tmp_path / "gptj", "does not use|lacks")


@pytest.mark.parametrize("key", ["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_context_window_of_nothing_is_refused(tmp_path: Path, key: str, value: int) -> None:
    edit_json(make_model(tmp_path) / "config.json", **{key: value})
    refused(tmp_path, f"{key} is {value}; give a whole number from 1 on")


def test_more_weights_than_any_model_has_are_not_gone_through(tmp_path: Path) -> None:
    folder = make_model(tmp_path)

    def header_of(name: str, count: int) -> None:
        """What begins as a header of so many weights; whoever parses it finds that it is none."""
        (folder / name).write_bytes((count + 8).to_bytes(8, "little") + b"{" * (count + 8))

    header_of("model.safetensors", 500_000)
    refused(folder, r"are more than 500,000 \(model.safetensors alone has about 500,008\), which no model needs")
    (folder / "model.safetensors").unlink()
    save_file({f"k{number}": torch.zeros(1) for number in range(20)}, folder / "a.safetensors")
    header_of("b.safetensors", 499_984)
    shards(folder, k0="a.safetensors", k1="b.safetensors")
    refused(folder, r"are more than 500,000 \(b.safetensors alone has about 499,992\)")
    header_of("b.safetensors", 100)
    refused(folder, "cannot load the weights of .*: b.safetensors: ")  # few enough to be looked at


def test_a_weight_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for name in ("a.safetensors", "b.safetensors"):
        save_file(weights, folder / name, metadata={"format": "pt"})
    shards(folder, **{**dict.fromkeys(weights, "a.safetensors"), "model.norm.weight": "b.safetensors"})
    refused(folder, r"hold '.*' twice, in a.safetensors and in b.safetensors; save or fetch the folder again")


def test_what_lies_in_a_files_place_is_refused(tmp_path: Path) -> None:
    for name in ("tokenizer_config.json", "chat_template.jinja", "tokenizer.json"):
        folder = make_model(tmp_path / name)
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()
        refused(folder, f"^'{folder / name}' is no file, or a link that leads nowhere; fetch it again, or take it out$")
        (folder / name).rmdir()
        (folder / name).symlink_to(name)  # to itself
        refused(folder, "is no file, or a link that leads nowhere")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{nonsense", "is not valid JSON"),
        ("[1, 2]", "a JSON object is needed"),
        ('{"eos_token_id": "x"}', "has eos_token_id 'x'; a token id, or a list of them, is needed"),
        ('{"eos_token_id": [[1]]}', r"has eos_token_id \[\[1\]\]"),
    ],
)
def test_how_texts_end_must_be_readable(tmp_path: Path, content: str, message: str) -> None:
    (make_model(tmp_path) / "generation_config.json").write_text(content)
    refused(tmp_path, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0; give a whole number from 1 on"),
        ({"head_dim": 0}, "head_dim is 0; give a whole number from 1 on"),
        ({"dtype": "float7"}, "dtype is 'float7'; give one of float32, bfloat16, float16, float64"),
        ({"torch_dtype": "int8"}, "dtype is 'int8'; give one of"),
        ({"dtype": "save"}, "dtype is 'save'"),
        ({"hidden_act": "wobble"}, "there is no 'wobble'"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "there is no 'spiral'"),
        ({"intermediate_size": 10**8}, "makes a model of 9,600,00.,... numbers, but its weights hold"),
        ({"head_dim": 10**8}, "makes a model of .* numbers, but its weights hold"),
    ],
    ids=str,
)
def test_a_configuration_that_fits_no_weights_is_refused_before_they_are_read(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    edit_json(make_model(tmp_path) / "config.json", **changes)
    refused(tmp_path, message)
