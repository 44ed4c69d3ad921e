"""PEFT adapters: merged they answer as they do beside the model, and what does not merge is told in one line."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_model, make_task
from tolerances import TOLERANCES
from transformers import AutoModelForCausalLM

import iclperm
from iclperm.engine import Engine
from iclperm.engine import adapter as adapters
from iclperm.engine.adapter import _next_tokens, check_adapter
from iclperm.errors import ConfigError, IclpermError, ModelError
from iclperm.reference import scoring
from iclperm.study.study import Study

PER_TOKEN = TOLERANCES["loglikelihood per token"]["float32"]
PROMPTS = [[3, 4, 5, 6], [3, 4, 9], [7, 8, 9, 10, 11]]


def peft() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("peft")


def config(kind: str) -> Any:
    layers = ["q_proj", "v_proj", "down_proj"]
    if kind == "ia3":
        return peft().IA3Config(target_modules=layers, feedforward_modules=["down_proj"], init_ia3_weights=False)
    if kind == "embedding":
        layers = ["embed_tokens"]
    return peft().LoraConfig(
        r=4, lora_alpha=8, target_modules=layers, use_dora=kind == "dora", use_rslora=kind == "rslora",
        init_lora_weights=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a trained adapter of some kind, made once; copies for who changes it."""
    made: dict[str, Path] = {}

    def of(kind: str = "lora", copy: Path | None = None) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.manual_seed(1)
                whole = peft().get_peft_model(AutoModelForCausalLM.from_pretrained(model), config(kind))
                whole.save_pretrained(made[kind])
        return made[kind] if copy is None else Path(shutil.copytree(made[kind], copy / kind))

    return of


def beside(model: Path, folder: Path) -> Any:
    """As PEFT runs it, unmerged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft().PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(folder)).eval()


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora", "ia3"])
def test_it_answers_through_the_tree_as_beside_its_model(kind, model, adapter):
    folder = adapter(kind)
    with Engine.from_pretrained(model, adapter=folder) as engine:
        scores = engine.loglikelihood([(prompt[:-1], prompt[-1:]) for prompt in PROMPTS])
        assert type(engine.model).__name__ == type(AutoModelForCausalLM.from_pretrained(model)).__name__
        assert not any("lora" in name or "ia3" in name for name, _ in engine.model.named_modules())
    on_top, without = beside(model, folder), AutoModelForCausalLM.from_pretrained(model).eval()
    expected = [scoring.score_one(on_top, prompt[:-1], prompt[-1:]).logprob for prompt in PROMPTS]
    bare = [scoring.score_one(without, prompt[:-1], prompt[-1:]).logprob for prompt in PROMPTS]
    assert np.abs(scores.logprob - expected).max() <= PER_TOKEN
    assert np.abs(scores.logprob - bare).max() > 100 * PER_TOKEN


def no_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def no_settings(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def prompt_tuning(folder: Path) -> None:
    edit(folder, peft_type="PREFIX_TUNING")


def cut_off(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def pointer(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )


def other_tokens(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))


def a_key_less(folder: Path) -> None:
    weights = load_file(folder / "adapter_model.safetensors")
    save_file(dict(list(weights.items())[1:]), folder / "adapter_model.safetensors")


def a_layer_more(folder: Path) -> None:
    weights = load_file(folder / "adapter_model.safetensors")
    more = {key.replace("layers.0.", "layers.70."): weights[key].clone() for key in weights}
    save_file({**more, **weights}, folder / "adapter_model.safetensors")


def of_a_wider_model(folder: Path) -> None:
    weights = load_file(folder / "adapter_model.safetensors")
    wider = {key: torch.cat([value, value], dim=-1 if "lora_A" in key else 0) for key, value in weights.items()}
    save_file(wider, folder / "adapter_model.safetensors")


def of_other_layers(folder: Path) -> None:
    edit(folder, target_modules=["query_key_value"])


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            no_weights,
            "has no adapter_model.safetensors; save it again .*safe_serialization=True.* a pickle can run code",
        ),
        (no_settings, "has no adapter_config.json; give one that PEFT's save_pretrained wrote"),
        (prompt_tuning, "is of the kind PREFIX_TUNING, which adds to every prompt and cannot be merged"),
        (cut_off, "adapter_model.safetensors' cannot be read: .*; save or fetch it again"),
        (pointer, "adapter_model.safetensors' is not here, only a pointer to it; run: git lfs"),
        (
            other_tokens,
            "has a tokenizer of its own, whose .* is not the model's; give the model that it was trained on",
        ),
        (a_key_less, "does not merge into a '.*' model: Found missing adapter keys .*; give the model that it was"),
        (a_layer_more, r"does not merge into a '.*' model: it has no place for '.*layers\.70\..* and \d+ more"),
        (of_a_wider_model, "does not merge into a '.*' model: .*; give the model that it was trained on"),
        (of_other_layers, "does not merge into a '.*' model: .*; give the model that it was trained on"),
    ],
)
def test_what_does_not_fit_is_one_line(damage, said, model, adapter, tmp_path):
    damage(folder := adapter(copy=tmp_path))
    with pytest.raises(ModelError, match=said) as raised:
        Engine.from_pretrained(model, adapter=folder)
    assert "\n" not in str(raised.value)


def test_a_folder_that_is_none_is_told_before_weights_are_read(model, tmp_path):
    with pytest.raises(ModelError, match=r"there is no adapter folder '.*nowhere'; give the folder that PEFT's"):
        check_adapter(tmp_path / "nowhere", model)
    with pytest.raises(ModelError, match="there is no adapter folder"):
        iclperm.plan(Study(adapter=str(tmp_path / "nowhere")))


def test_a_tokenizer_that_pads_otherwise_is_no_other(model, adapter, tmp_path):
    own = json.loads((model / "tokenizer.json").read_text())
    (folder := adapter(copy=tmp_path)).joinpath("tokenizer.json").write_text(json.dumps({**own, "padding": {"x": 1}}))
    check_adapter(folder, model)


def scaled(folder, by):
    """The adapter with what it adds times ``by``."""
    weights = load_file(folder / "adapter_model.safetensors")
    save_file({k: by * v if "lora_B" in k or "embedding_B" in k else v for k, v in weights.items()},
              folder / "adapter_model.safetensors")  # fmt: skip
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embedding_and_head_that_are_one_are_not_merged_into(model, adapter, dtype):
    with pytest.raises(ModelError, match="answers otherwise when it is merged"):
        Engine.from_pretrained(model, adapter=adapter("embedding"), dtype=dtype)


def test_in_half_precision_not_even_a_weak_one(model, adapter, tmp_path, monkeypatch):
    """Its answers are within what rounding moves, so where it lies decides."""
    weak = scaled(adapter("embedding", copy=tmp_path), 0.01)
    with pytest.raises(ModelError, match="an embedding and a head that are one"):
        Engine.from_pretrained(model, adapter=weak, dtype="bfloat16")
    monkeypatch.setattr(adapters, "_changes_one_of_two", lambda model: False)
    Engine.from_pretrained(model, adapter=weak, dtype="bfloat16")


def test_a_strong_one_is_rounded_more_in_half_precision(model, adapter, tmp_path, monkeypatch):
    """Which is judged by what it does: a fault is as large as that."""
    monkeypatch.setitem(adapters._MOST_NATS, 2, (1e-4, math.inf))  # less than rounding moves so small a model's
    strong = scaled(adapter(copy=tmp_path / "strong"), 300)
    bare, whole = (Engine.from_pretrained(model, dtype="bfloat16", adapter=one).model for one in (None, strong))
    on_top = _next_tokens(beside(model, strong).to(torch.bfloat16))
    rounded, moved = ((_next_tokens(whole) - of).abs().mean() for of in (on_top, _next_tokens(bare)))
    assert 1e-4 < rounded < moved / 16
    faulty = scaled(adapter("embedding", copy=tmp_path / "embedding"), 300)
    with pytest.raises(ModelError, match="answers otherwise when it is merged"):
        Engine.from_pretrained(model, dtype="bfloat16", adapter=faulty)


@pytest.mark.filterwarnings("ignore")  # of PEFT, on the embedding
def test_a_fault_of_one_token_alone_is_seen(model, adapter, tmp_path):
    """The mean over the vocabulary hides it: the embedding of one token that the probe does not hold, and its head."""
    path = adapter("embedding", copy=tmp_path) / "adapter_model.safetensors"
    weights = load_file(path)
    (key,) = (key for key in weights if "lora_embedding_A" in key)
    weights[key] = torch.where(torch.arange(weights[key].shape[1]) == 60, 1e-3 * weights[key], 0)
    save_file(weights, path)
    whole, on_top = (beside(model, path.parent) for _ in range(2))
    moved = (_next_tokens(whole.merge_and_unload()) - _next_tokens(on_top)).abs()
    assert moved.mean() < 1e-3
    assert moved.max() > 1e-2
    with pytest.raises(ModelError, match="answers otherwise when it is merged"):
        Engine.from_pretrained(model, adapter=path.parent)


def test_a_study_has_one_and_its_run_is_of_that_adapter_alone(model, adapter, tmp_path):
    task = make_task(tmp_path)
    sizes = {"sets": 2, "permutations": 2, "shots": [0, 2], "queries": 4, "task": str(task), "model": str(model)}
    study = Study(**sizes, adapter=str(adapter()))
    run = iclperm.run(study, tmp_path / "run")
    bare = iclperm.run(Study(**sizes), tmp_path / "bare")
    ours, bare_ones = (one.splits["test"].context_logprob[np.arange(4)] for one in (run, bare))
    assert np.abs(ours - bare_ones).max() > 100 * PER_TOKEN
    assert run.study.model_name == f"{model} + {adapter().name}"
    assert any("is merged into the model" in note for note in iclperm.plan(study).notes)
    assert not any("was trained on" in note for note in iclperm.plan(study).notes)
    edit(renamed := adapter(copy=tmp_path), base_model_name_or_path="someone/Other-7B")
    notes = iclperm.plan(Study(**sizes, adapter=str(renamed))).notes
    assert f"the adapter was trained on someone/Other-7B, and the model is {model}" in notes
    plan, other = (json.loads((tmp_path / name / "plan.json").read_text()) for name in ("run", "bare"))
    assert plan["hashes"].keys() - other["hashes"].keys() == {"adapter"}
    assert iclperm.run(study, tmp_path / "run").digest == run.digest
    moved = tmp_path / "elsewhere"
    shutil.copytree(adapter(), moved)
    assert iclperm.run(Study(**sizes, adapter=str(moved)), tmp_path / "again").digest == run.digest
    with pytest.raises(IclpermError, match="another run: the adapter has changed since"):
        iclperm.run(Study(**sizes, adapter=str(adapter("rslora"))), tmp_path / "run")
    with pytest.raises(IclpermError, match="another run: an adapter was given there alone"):
        iclperm.run(Study(**sizes), tmp_path / "run")
    with pytest.raises(IclpermError, match="another run: an adapter is given here alone"):
        iclperm.run(study, tmp_path / "bare")


def test_workers_merge_it_too(model, adapter, tmp_path):
    task = make_task(tmp_path)
    study = Study(
        sets=2, permutations=2, shots=[2], queries=4, task=str(task), model=str(model), adapter=str(adapter())
    )
    alone = iclperm.run(study, tmp_path / "alone")
    assert iclperm.run(study, tmp_path / "shared", workers=2).digest == alone.digest


def test_it_is_for_one_model_of_this_machine(adapter):
    with pytest.raises(ConfigError, match="'adapter' is for one model, not for several 'models'"):
        Study(kind="transfer", models=["a", "b"], adapter="x")
    with pytest.raises(ConfigError, match="'adapter' is for a model on this machine, not for an endpoint"):
        Study(adapter="x", endpoint={"base_url": "http://localhost:1", "model": "m"})


@pytest.mark.filterwarnings("ignore")  # the harness's own
def test_the_harness_names_it_as_it_does(model, adapter):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from iclperm.integrations.lm_eval import TreeLM

    lm = TreeLM(str(model), peft=str(adapter()), device="cpu")
    requests = [Instance("loglikelihood", {}, ("red", " blue"), number) for number in range(1)]
    ((logprob, _),) = lm.loglikelihood(requests)
    whole = beside(model, adapter())
    context, continuation = lm._encode_pair("red", " blue")
    expected = scoring.score_one(whole, context, continuation).logprob
    assert abs(logprob - expected) <= PER_TOKEN * len(continuation)
