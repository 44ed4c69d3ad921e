"""An engine all of whose kernels are Triton's scores as plain transformers does.

Tests marked ``gpu`` run on a CUDA device, else in Triton's interpreter (`devices`).
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import triton_interpreter
from devices import DEVICE, interpreted, quick_check
from test_engine import assert_agrees, random_ids
from transformers import PreTrainedModel
from zoo import ZOO

from iclperm.engine import Engine
from iclperm.engine.kernels import triton_head, triton_launch, triton_layer_norm, triton_rowwise
from iclperm.engine.kernels.triton_attention import TritonAttention
from iclperm.reference import scoring

triton_interpreter.repair()

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # NumPy's, of numbers too large
KERNELS = [
    (triton_rowwise, "gate"),
    (triton_rowwise, "rms_norm"),
    (triton_layer_norm, "layer_norm"),
    (triton_rowwise, "rotate"),
    (triton_head, "found_in"),
    (TritonAttention, "__call__"),
]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What Triton's kernels are called, by name; a model that is made may try the smallest of them."""
    counts: Counter[str] = Counter()

    def counted(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    for module, name in KERNELS:
        counted(module, name)
    return counts


def few_requests() -> list[tuple[list[int], list[int]]]:
    """Branches at two depths, longer than the zoo's windows; several continuations of one row, one of two tokens."""
    rng = np.random.default_rng(0)
    stem = random_ids(rng, 9)
    requests = [(stem, random_ids(rng, 1)), (stem, random_ids(rng, 2)), (stem[:5] + random_ids(rng, 4), [7])]
    return [*requests, (stem[:2], stem[2:3]), (stem[:7], [3]), (stem[:7], [60])]


# Architectures whose layers are ours, and their norms a layer.
NORMS = {
    "llama": 2, "llama3-rope-tied": 2, "qwen2": 2, "qwen2-window": 2, "qwen3": 4, "gemma": 2, "gemma2": 4, "gemma3": 6,
    "mistral-window": 2, "phi3": 2, "phi3-window": 2, "olmo2": 4, "olmo3-window": 4, "granite": 2, "smollm3-window": 2,
    "glm": 2, "glm4": 4, "cohere": 2, "cohere2-window": 2, "starcoder2-window": 2, "phi": 2,
}  # fmt: skip


CENTRED = ["cohere", "cohere2-window", "starcoder2-window", "phi"]  # whose norms take the mean off


def turning_layers(model: PreTrainedModel) -> int:
    """Layers that turn queries and keys by their positions."""
    turns_if = {"smollm3": "use_rope", "cohere2": "sliding_window"}.get(model.config.model_type, "is_causal")
    return sum(bool(getattr(layer.self_attn, turns_if)) for layer in model.model.layers)


@pytest.mark.parametrize("name", ZOO)
def test_every_architecture_is_exact(name: str, launches: Counter[str]) -> None:
    model, requests = ZOO[name].build().to(DEVICE), few_requests()
    engine = Engine(model, self_check=False, pack_tokens=8)
    launches.clear()
    assert_agrees(engine.loglikelihood(requests), model, requests)
    assert engine.report.num_packs > 1, "keys never crossed a pack border"
    assert (engine.layers, engine.attention) == ("fused" if name in NORMS else "transformers", "triton")
    layers, packs = model.config.num_hidden_layers, engine.report.num_packs
    norm = "layer_norm" if name in CENTRED else "rms_norm"
    ours = {
        "gate": packs * layers,
        norm: packs * (NORMS.get(name, 0) * layers + 1),
        "rotate": 2 * packs * turning_layers(model),
    }
    expected = {**(ours if name in NORMS else {}), "__call__": packs * layers, "found_in": launches["found_in"]}
    assert launches == expected
    assert 0 < launches["found_in"] <= packs


def test_bfloat16_is_no_worse_than_plain_bfloat16() -> None:
    """Against float32 with the same weights; summed over models, since one alone is mostly chance."""
    rng = np.random.default_rng(5)
    requests = [(random_ids(rng, int(length)), random_ids(rng, 2)) for length in rng.integers(4, 10, 12)]
    ours = plain = 0.0
    for name in ("llama", "gemma2", "olmo2"):
        model = ZOO[name].build().bfloat16().to(DEVICE)
        engine = Engine(model, self_check=False)
        fast = engine.loglikelihood(requests).logprob
        assert (engine.layers, engine.attention) == ("fused", "triton")
        slow = np.array([p.logprob for p in scoring.loglikelihood(model, requests)])
        exact = np.array([p.logprob for p in scoring.loglikelihood(model.float(), requests)])
        ours += float(np.abs(fast - exact).mean())
        plain += float(np.abs(slow - exact).mean())
    assert ours <= 1.25 * plain


def test_the_first_use_check_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_check(monkeypatch)
    engine = Engine(ZOO["llama"].build().to(DEVICE))
    engine.loglikelihood(few_requests()[:1])
    assert (engine.layers, engine.attention) == ("fused", "triton")
    assert engine._model.fuses_head
    assert "given_up" not in engine.numerics


def test_a_head_that_differs_on_first_use_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    read_rows = triton_head.read_rows

    def wrong(*args: Any, **kwargs: Any) -> Any:
        argmax, finite, logprob = read_rows(*args, **kwargs)
        return argmax, finite, logprob - np.float32(0.1)

    monkeypatch.setattr(triton_head, "read_rows", wrong)
    quick_check(monkeypatch)
    model, requests = ZOO["llama"].build().to(DEVICE), few_requests()
    engine = Engine(model)
    with pytest.warns(UserWarning, match="head kernel cannot be used for 'llama'"):
        assert_agrees(engine.loglikelihood(requests), model, requests)
    assert (engine.layers, engine.attention) == ("fused", "triton")
    assert not engine._model.fuses_head
    assert engine.numerics["given_up"] == ["head kernel"]


def hooked(model: PreTrainedModel) -> None:
    model.lm_head.register_forward_hook(lambda module, inputs, output: 2.0 * output)


def replaced(model: PreTrainedModel) -> None:
    model.lm_head.forward = lambda hidden: 2.0 * torch.nn.functional.linear(hidden, model.lm_head.weight)


@pytest.mark.parametrize("change", [hooked, replaced])
def test_what_somebody_changed_in_the_head_is_respected(change: Any, launches: Counter[str]) -> None:
    model, requests = ZOO["llama"].build().to(DEVICE), few_requests()
    change(model)
    engine = Engine(model, self_check=False)
    assert_agrees(engine.loglikelihood(requests), model, requests)
    assert not launches["found_in"]


def test_transformers_layers_come_with_transformers_head(launches: Counter[str]) -> None:
    model, requests = ZOO["llama"].build().to(DEVICE), few_requests()
    engine = Engine(model, attention="torch", layers="transformers", self_check=False)
    launches.clear()
    assert_agrees(engine.loglikelihood(requests), model, requests)
    assert not launches


def test_why_no_kernel_runs_is_found_on_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    why_no_kernel_runs = triton_launch._why_no_kernel_runs.__wrapped__
    assert not why_no_kernel_runs(DEVICE)

    def failing(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify one")

    monkeypatch.setattr(triton_rowwise, "gate", failing)
    assert why_no_kernel_runs(DEVICE) == "RuntimeError: Failed to find C compiler."
    monkeypatch.setattr(triton_rowwise, "gate", lambda *_: None)
    assert why_no_kernel_runs(DEVICE) == "silu(2) * 2 gave 2", "a kernel that does nothing passed"


@interpreted("a CPU's engine is asked")
def test_an_engine_on_a_cpu_does_not_import_triton() -> None:
    script = "import sys, iclperm.engine; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
