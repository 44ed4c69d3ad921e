"""An engine all of whose kernels are Triton's scores as plain transformers does.

Without a CUDA device they run in Triton's interpreter, on a model in the CPU's memory.
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
from test_engine import assert_agrees, random_ids
from transformers import PreTrainedModel
from zoo import ZOO

from iclperm.engine import Engine
from iclperm.engine.kernels import rowwise, triton_head, triton_launch, triton_rowwise
from iclperm.reference import scoring

triton_interpreter.repair()

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of numbers beyond float32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = [
    (triton_rowwise, "gate"),
    (triton_rowwise, "rms_norm"),
    (triton_rowwise, "rotate"),
    (triton_head, "found_in"),
]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Everything runs in Triton, and is counted."""
    counts: Counter[str] = Counter()

    def counted(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    for module, name in KERNELS:
        counted(module, name)
    monkeypatch.setattr(rowwise, "runs_triton", lambda x: True)
    return counts


def few_requests() -> list[tuple[list[int], list[int]]]:
    """Branches at two depths, longer than the zoo's windows; several continuations of one row, one of two tokens."""
    rng = np.random.default_rng(0)
    stem = random_ids(rng, 9)
    return [(stem, random_ids(rng, 1)), (stem, random_ids(rng, 2)), (stem[:5] + random_ids(rng, 4), random_ids(rng, 1))]


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "qwen3", "gemma2", "gemma3", "olmo2", "phi3"])
def test_all_in_triton_is_exact(name: str, launches: Counter[str]) -> None:
    model, requests = ZOO[name].build().to(DEVICE), few_requests()
    engine = Engine(model, attention="triton", self_check=False)
    assert_agrees(engine.loglikelihood(requests), model, requests)
    assert (engine.layers, engine.attention) == ("fused", "triton")
    layers, packs = model.config.num_hidden_layers, engine.report.num_packs
    norms = {"qwen3": 4, "gemma2": 4, "gemma3": 6, "olmo2": 4}.get(name, 2)
    assert launches == {
        "gate": packs * layers, "rms_norm": packs * (norms * layers + 1), "rotate": 2 * packs * layers,
        "found_in": packs,
    }  # fmt: skip


def test_the_head_alone_serves_layers_that_are_not_ours(launches: Counter[str]) -> None:
    model, requests = ZOO["gpt-neox"].build().to(DEVICE), few_requests()
    engine = Engine(model, attention="triton", self_check=False)
    assert_agrees(engine.loglikelihood(requests), model, requests)
    assert engine.layers == "transformers"
    assert launches == {"found_in": engine.report.num_packs}


def test_bfloat16_is_no_worse_than_plain_bfloat16(launches: Counter[str]) -> None:
    """Against float32 with the same weights; summed over models, since one alone is mostly chance."""
    rng = np.random.default_rng(5)
    requests = [(random_ids(rng, int(length)), random_ids(rng, 2)) for length in rng.integers(4, 10, 12)]
    ours = plain = 0.0
    for name in ("llama", "qwen3", "gemma2", "olmo2"):
        model = ZOO[name].build().bfloat16().to(DEVICE)
        engine = Engine(model, attention="triton", self_check=False)
        fast = engine.loglikelihood(requests).logprob
        assert engine.layers == "fused"
        slow = np.array([p.logprob for p in scoring.loglikelihood(model, requests)])
        exact = np.array([p.logprob for p in scoring.loglikelihood(model.float(), requests)])
        ours += float(np.abs(fast - exact).mean())
        plain += float(np.abs(slow - exact).mean())
    assert ours <= 1.1 * plain
    assert launches["found_in"] == 4


def test_the_first_use_check_passes(launches: Counter[str]) -> None:
    engine = Engine(ZOO["gemma2"].build().to(DEVICE), attention="triton")
    engine.loglikelihood(few_requests()[:1])
    assert engine.layers == "fused"
    assert engine._model.fuses_head


def test_a_head_that_differs_on_first_use_is_given_up(launches: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    read_rows = triton_head.read_rows

    def wrong(*args: Any, **kwargs: Any) -> Any:
        argmax, finite, logprob = read_rows(*args, **kwargs)
        return argmax, finite, logprob - np.float32(0.1)

    monkeypatch.setattr(triton_head, "read_rows", wrong)
    model, requests = ZOO["llama"].build().to(DEVICE), few_requests()
    engine = Engine(model, attention="triton")
    with pytest.warns(UserWarning, match="head kernel cannot be used for 'llama'"):
        assert_agrees(engine.loglikelihood(requests), model, requests)
    assert launches["found_in"] == 3  # those of the check
    assert engine.layers == "fused"
    assert engine.numerics["given_up"] == ["head kernel"]


def hooked(model: PreTrainedModel) -> None:
    model.lm_head.register_forward_hook(lambda module, inputs, output: 2.0 * output)


def replaced(model: PreTrainedModel) -> None:
    model.lm_head.forward = lambda hidden: 2.0 * torch.nn.functional.linear(hidden, model.lm_head.weight)


@pytest.mark.parametrize("change", [hooked, replaced])
def test_what_somebody_changed_in_the_head_is_respected(change: Any, launches: Counter[str]) -> None:
    model, requests = ZOO["llama"].build().to(DEVICE), few_requests()
    change(model)
    engine = Engine(model, attention="triton", self_check=False)
    assert_agrees(engine.loglikelihood(requests), model, requests)
    assert not launches["found_in"]


def test_transformers_layers_come_with_transformers_head(launches: Counter[str]) -> None:
    model, requests = ZOO["llama"].build().to(DEVICE), few_requests()
    engine = Engine(model, attention="torch", layers="transformers", self_check=False)
    assert_agrees(engine.loglikelihood(requests), model, requests)
    assert not launches


def test_why_no_kernel_runs_is_found_on_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device(DEVICE)
    why_no_kernel_runs = triton_launch._why_no_kernel_runs.__wrapped__
    assert not why_no_kernel_runs(device)

    def failing(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify one")

    monkeypatch.setattr(triton_rowwise, "gate", failing)
    assert why_no_kernel_runs(device) == "RuntimeError: Failed to find C compiler."
    monkeypatch.setattr(triton_rowwise, "gate", lambda *_: None)
    assert why_no_kernel_runs(device) == "silu(2) * 2 gave 2", "a kernel that does nothing passed"


def test_an_engine_on_a_cpu_does_not_import_triton() -> None:
    script = "import sys, iclperm.engine; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
