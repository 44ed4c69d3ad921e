"""Checkpoints in fp8 with a scale a block: multiplied out on loading, whatever the device; other kinds are told."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_model, make_task

from iclperm import Study, plan
from iclperm.engine.engine import Engine
from iclperm.errors import ConfigError, ModelError

REQUESTS = [([1, 2, 3], [4, 5]), ([1, 2, 3, 6], [7])]
BLOCK = 8
LARGEST = torch.finfo(torch.float8_e4m3fn).max


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A folder in fp8 by blocks, and one in float32 whose numbers are those that its codes and scales make."""
    whole, few = make_model(tmp_path / "whole"), make_model(tmp_path / "few")
    weights = load_file(whole / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if "proj" not in name or weight.ndim != 2:
            weights[name] = weight.bfloat16().float()
            stored[name] = weight.bfloat16()
            continue
        rows, columns = (size // BLOCK for size in weight.shape)
        blocks = weight.float().reshape(rows, BLOCK, columns, BLOCK)
        scales = blocks.abs().amax((1, 3)) / LARGEST
        codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        stored[name], stored[f"{name}_scale_inv"] = codes.reshape(weight.shape), scales
        weights[name] = (codes.float() * scales[:, None, :, None]).reshape(weight.shape)
    assert len(stored) > len(weights)
    save_file(stored, few / "model.safetensors", {"format": "pt"})
    save_file(weights, whole / "model.safetensors", {"format": "pt"})
    config = json.loads((few / "config.json").read_text())
    told: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    (few / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", "quantization_config": told}))
    return few, whole


def test_its_numbers_are_codes_times_scales(pair: tuple[Path, Path]) -> None:
    few, whole = (Engine.from_pretrained(folder, device="cpu") for folder in pair)
    assert few.layers == whole.layers == "fused"
    np.testing.assert_array_equal(few.loglikelihood(REQUESTS).logprob, whole.loglikelihood(REQUESTS).logprob)
    assert {weight.dtype for weight in few.model.parameters()} == {torch.float32}
    assert few.numerics["stored_as"] == "fp8 weights, dequantised to float32"
    assert "stored_as" not in whole.numerics
    assert getattr(few.model.config, "quantization_config", None) is None


def test_in_half_precision_no_weight_is_wider(pair: tuple[Path, Path]) -> None:
    engine = Engine.from_pretrained(pair[0], device="cpu", dtype="bfloat16")
    assert {weight.dtype for weight in engine.model.parameters()} == {torch.bfloat16}
    expected = Engine.from_pretrained(pair[1], device="cpu", dtype="bfloat16").loglikelihood(REQUESTS).logprob
    np.testing.assert_array_equal(engine.loglikelihood(REQUESTS).logprob, expected)


def test_in_half_precision_angles_are_as_wide_as_elsewhere(pair: tuple[Path, Path]) -> None:
    """Rounded ones turn the keys of long prompts by the wrong angles, in the check's own reference too."""
    few, whole = (Engine.from_pretrained(folder, device="cpu", dtype="bfloat16") for folder in pair)
    tables = {name: table for name, table in few.model.named_buffers() if "inv_freq" in name}
    assert tables
    assert {table.dtype for table in tables.values()} == {torch.float32}
    length = few.model.config.max_position_embeddings - 2
    prompt = np.random.default_rng(0).integers(1, 20, length).tolist()
    np.testing.assert_array_equal(*(each.loglikelihood([(prompt, [4, 5])]).logprob for each in (few, whole)))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], **told: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(told)
    (folder / "config.json").write_text(json.dumps(config))


def under_another_name(weights: dict[str, torch.Tensor]) -> None:
    for key in [key for key in weights if key.endswith("_scale_inv")]:
        weights[key.removesuffix("_inv")] = weights.pop(key)


def of_fewer_blocks(weights: dict[str, torch.Tensor]) -> None:
    """As many as are cut where the size of a block does not divide a weight's: the last one smaller."""
    key = next(key for key in weights if key.endswith("up_proj.weight_scale_inv"))
    weights[key] = weights[key][::2].contiguous()


def lie_otherwise(weights: dict[str, torch.Tensor]) -> None:
    key = next(key for key in weights if key.endswith("up_proj.weight_scale_inv"))
    assert weights[key].shape[0] != weights[key].shape[1]
    weights[key] = weights[key].T.contiguous()


def one_a_row(weights: dict[str, torch.Tensor]) -> None:
    for key in [key for key in weights if key.endswith("_scale_inv")]:
        weights[key] = weights[key].amax(1, keepdim=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (under_another_name, r"has no scale \S+weight_scale_inv; \S+weight_scale is not read by transformers"),
        (of_fewer_blocks, r"up_proj.weight of \d+ x \d+ numbers has scales of .* not those of equal blocks of 8 x 8"),
        (lie_otherwise, r"up_proj.weight of \d+ x \d+ numbers has scales of .* not those of equal blocks of 8 x 8"),
        (one_a_row, "are not those of equal blocks of 8 x 8"),
    ],
)
def test_scales_that_would_be_taken_for_others_are_refused(
    pair: tuple[Path, Path], change: Callable[[dict[str, torch.Tensor]], None], words: str
) -> None:
    rewrite(pair[0], change)
    with pytest.raises(ModelError, match=words):
        Engine.from_pretrained(pair[0], device="cpu")


def test_blocks_that_leave_a_smaller_one_are_refused(pair: tuple[Path, Path]) -> None:
    """transformers would cut equal ones of another size, where their number divides the weight's."""
    size = load_file(pair[0] / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].shape
    block = next(each for each in range(9, size[0]) if size[0] % each and size[0] % -(-size[0] // each) == 0)

    def cut(weights: dict[str, torch.Tensor]) -> None:
        for key in [key for key in weights if key.endswith("_scale_inv")]:
            rows, columns = weights[key.removesuffix("_scale_inv")].shape
            weights[key] = torch.ones(-(-rows // block), -(-columns // block))

    rewrite(pair[0], cut, weight_block_size=[block, block])
    with pytest.raises(ModelError, match=f"not those of equal blocks of {block} x {block}"):
        Engine.from_pretrained(pair[0], device="cpu")


def test_a_plan_says_it(pair: tuple[Path, Path], tmp_path: Path) -> None:
    study = Study(task=str(make_task(tmp_path)), model=str(pair[0]), sets=2, permutations=2, queries=4, shots=2)
    assert plan(study).notes == ("the model has fp8 weights, dequantised to float32",)


def test_without_accelerate_the_remedy_is_named(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "accelerate" else found(name))
    with pytest.raises(ConfigError, match=r"pip install 'iclperm\[accelerate\]'"):
        Engine.from_pretrained(pair[0], device="cpu")
