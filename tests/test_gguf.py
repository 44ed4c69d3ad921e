"""A GGUF file as a model: the numbers of the same weights in a folder, and one line for what is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file
from tiny import byte_level_tokenizer, make_model, make_task

from iclperm import Study, plan
from iclperm.bench.models import find_model
from iclperm.cli.main import cli
from iclperm.engine import Engine
from iclperm.engine import gguf_file as files
from iclperm.engine.folder import model_folder
from iclperm.errors import ConfigError, ModelError
from iclperm.runs.setting import model_digest, tokenizer_hash

REQUESTS = [([5, 6, 7, 8], [9, 10]), ([5, 6, 7, 8], [11]), ([5, 6, 3], [4, 4, 4])]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def interleaved(weight: Any, heads: int) -> Any:
    """Rows of queries or keys as llama.cpp's rotary embedding wants them."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(folder: Path, path: Path, *, quantized: bool = False, split: str = "gpt-2", **more: Any) -> Path:
    """A Llama's folder as a GGUF file; with ``quantized`` the MLP's second product is stored in 8 bits, and the
    folder's own weights become what these say. ``more`` are keys to add: floating-point numbers, numbers, texts."""
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads, layers = (
        config[f"num_{what}"] for what in ("attention_heads", "key_value_heads", "hidden_layers")
    )
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(7 if quantized else 0)
    for key, value in more.items():
        {float: writer.add_float32, int: writer.add_uint16, str: writer.add_string}[type(value)](
            key.replace("__", "."), value
        )
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_add_bos_token(True)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in ("<s>", "</s>", "<unk>") else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        target = names.get_name(name, try_suffixes=(".weight",))
        if "q_proj" in name or "k_proj" in name:
            weight = interleaved(weight, heads if "q_proj" in name else kv_heads)
        if quantized and "down_proj" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            stored = gguf.quants.quantize(weight, kind)
            weights[name] = gguf.quants.dequantize(stored, kind)
            writer.add_tensor(target, stored, raw_dtype=kind)
        else:
            writer.add_tensor(target, np.ascontiguousarray(weight, np.float32))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    folder = make_model(tmp_path / "model", byte_level_tokenizer())
    return folder, write_gguf(folder, tmp_path / "tiny.gguf", quantized=True)


def test_a_file_has_the_numbers_and_the_tokens_of_its_folder(pair: tuple[Path, Path]) -> None:
    folder, file = pair
    engine, other = Engine.from_pretrained(file, device="cpu"), Engine.from_pretrained(folder, device="cpu")
    assert engine.layers == other.layers == "fused"  # through the tree, not beside it
    expected = other.loglikelihood(REQUESTS).logprob
    np.testing.assert_array_equal(engine.loglikelihood(REQUESTS).logprob, expected)
    text = "Thing: apple in town\nColour: Red"
    assert engine.tokenizer.encode(text) == other.tokenizer.encode(text)
    assert engine.numerics["stored_as"] == "GGUF (Q8_0), dequantised to float32"
    assert "stored_as" not in other.numerics
    assert not hasattr(engine.model.config, "quantization_config")
    half = Engine.from_pretrained(file, device="cpu", dtype="bfloat16")
    assert half.numerics["stored_as"].endswith("to bfloat16")
    np.testing.assert_allclose(half.loglikelihood(REQUESTS).logprob, expected, atol=0.1)


def test_a_files_hash_stands_for_model_and_tokenizer_wherever_it_lies(pair: tuple[Path, Path], cache: Path) -> None:
    _, file = pair
    folder = model_folder(file)
    made = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert model_digest(folder) == tokenizer_hash(folder) == files.file_digest(file)
    assert str(folder).startswith(str(cache))
    moved = file.rename(file.with_name("sha256-without-a-suffix"))
    assert model_folder(moved) == folder  # made once
    assert files.file_of(folder) == moved
    assert made == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} | {
        "model.gguf": made["model.gguf"]
    }
    moved.write_bytes(moved.read_bytes() + b"\0")
    assert model_folder(moved) != folder


def test_a_study_takes_it_and_its_plan_says_how_it_is_stored(pair: tuple[Path, Path], tmp_path: Path) -> None:
    _, file = pair
    study = Study(task=str(make_task(tmp_path)), model=str(file), sets=2, permutations=2, queries=4, shots=2)
    assert plan(study).notes == ("the model is a file of GGUF (Q8_0), dequantised to float32",)
    flags = ["--sets", "2", "--permutations", "2", "--queries", "4", "--shots", "2", "--model", str(file)]
    command = ["run", "--task", str(tmp_path / "colours.yaml"), *flags, "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert files.file_digest(file) in json.dumps(record)


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 8.0}, "llama.rope.scaling.type"),
        ({"llama__logit_scale": 0.5}, "llama.logit_scale"),
    ],
)
def test_what_transformers_would_pass_over_is_refused(tmp_path: Path, more: dict[str, Any], name: str) -> None:
    file = write_gguf(make_model(tmp_path / "model", byte_level_tokenizer()), tmp_path / "x.gguf", **more)
    with pytest.raises(ModelError, match=rf"scales what transformers does not .*\({name}\), so its numbers would be"):
        model_folder(file)


def test_text_that_would_be_cut_otherwise_is_refused(tmp_path: Path) -> None:
    file = write_gguf(make_model(tmp_path / "model", byte_level_tokenizer()), tmp_path / "x.gguf", split="smollm")
    with pytest.raises(
        ModelError, match=r"cuts text as transformers does not .*\(tokenizer.ggml.pre is 'smollm'\), so"
    ):
        model_folder(file)


def test_the_benchmark_refuses_it_in_a_line(pair: tuple[Path, Path]) -> None:
    with pytest.raises(ModelError, match=r"tiny.gguf' is a GGUF file, but the benchmark's peers take folders of"):
        find_model(str(pair[1]))


def test_one_of_several_parts_and_a_model_of_another_size_are_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", byte_level_tokenizer())
    with pytest.raises(ModelError, match="is one of 3 parts; join them"):
        model_folder(write_gguf(folder, tmp_path / "x.gguf", split__count=3))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"][:-1]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"holds [\d,]+ numbers, but the 'llama' model that transformers makes of it"):
        Engine.from_pretrained(write_gguf(folder, tmp_path / "y.gguf"))


def test_damaged_and_other_files_get_one_line(pair: tuple[Path, Path], cache: Path) -> None:
    _, file = pair
    whole = file.read_bytes()
    for cut in (3, 20, 200, len(whole) // 2, len(whole) - 64):
        file.write_bytes(whole[:cut])
        said = "'.*' is no GGUF file" if cut == 3 else f"cannot read .*; it has {cut:,} bytes, and may be cut off"
        with pytest.raises(ModelError, match=rf"^{said}[^\n]*; fetch it again"):
            model_folder(file)
    file.write_bytes(whole.replace(b"llama", b"llimo"))
    with pytest.raises(ModelError, match=r"cannot read the GGUF file '.*': GGUF model with architecture llimo is not"):
        model_folder(file)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    with pytest.raises(ModelError, match=r"is not here, only a pointer to it; run: git lfs pull$"):
        model_folder(file)
    assert not list(cache.rglob("config.json"))  # nothing half made is left
    with pytest.raises(ModelError, match=r"there is no model folder 'missing\.gguf'"):
        model_folder("missing.gguf")
    with pytest.raises(ConfigError, match="is a file; a hub id has revisions"):
        model_folder(file, "main")


def test_without_the_package_a_line_says_what_to_install(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"needs the package gguf, which is not installed: pip install 'iclperm\[gguf\]'"
    ):
        model_folder(pair[1])


def test_a_cache_that_cannot_be_written_is_named(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    with pytest.raises(ModelError, match=r"cannot be kept in the cache .* set XDG_CACHE_HOME to a folder that can be"):
        model_folder(pair[1])
