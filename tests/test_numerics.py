"""What the last bits depend on is told apart by the bits themselves, where no version names it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest
import torch
import triton_interpreter
from zoo import ZOO

from iclperm.engine import Engine, numerics
from iclperm.engine.numerics import probe
from iclperm.runs.parts import NAMED_LATER, other_numerics

triton_interpreter.repair()

WAYS = {"ours": {}, "torch": {"attention": "torch", "layers": "transformers"}, "plain": {"plain": True}}
_PROBES = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
from zoo import ZOO
from iclperm.engine import Engine
WAYS = json.loads(sys.argv[2])
torch.set_num_threads(1)
found = {}
for dtype in ("float32", "bfloat16"):
    model = ZOO["llama"].build().to(getattr(torch, dtype))
    for name, options in WAYS.items():
        found[f"{name} {dtype}"] = Engine(model, self_check=False, **options).numerics["probe"]
found["gpt2 float32"] = Engine(ZOO["gpt2"].build(), self_check=False).numerics["probe"]
print(json.dumps(found))
"""


def probes(**variables: str) -> dict[str, str]:
    """Those of a process of its own, by way and dtype."""
    tests = os.path.dirname(__file__)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ONEDNN_", "DNNL_", "MKL_"))}
    said = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", _PROBES, tests, json.dumps(WAYS)],
        env={**kept, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(said.stdout)


@pytest.fixture(scope="module")
def here() -> dict[str, str]:
    return probes()


def test_a_probe_is_the_same_in_every_process(here: dict[str, str]) -> None:
    assert probes() == here
    assert all(len(each) == 16 for each in here.values())
    assert here["ours float32"] != here["ours bfloat16"]


def test_fewer_instructions_of_onednn_are_seen(here: dict[str, str]) -> None:
    """As the finding was: parts of two such processes differ in their last bits, and nothing else told."""
    there = probes(ONEDNN_MAX_CPU_ISA="SSE41")
    model = Engine(ZOO["llama"].build(), self_check=False)
    if model.numerics["products"] == "onednn":  # there is AVX-512
        assert there["ours float32"] != here["ours float32"]
    other = Engine(ZOO["gpt2"].build(), self_check=False).numerics
    if (other["layers"], other["head"]) == ("transformers", "onednn"):  # of all products the head's alone
        assert there["gpt2 float32"] != here["gpt2 float32"]
    assert there["plain float32"] == here["plain float32"], "where oneDNN does not run it does not matter"


def test_other_functions_of_torch_are_seen_in_every_way(here: dict[str, str]) -> None:
    there = probes(ATEN_CPU_CAPABILITY="default")
    has_others = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    assert [there[way] != here[way] for way in here] == [has_others] * len(here)


def test_it_is_made_once_a_way(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    results = numerics._results
    monkeypatch.setattr(numerics, "_results", lambda *given: made.append(given) or results(*given))
    engine = Engine(ZOO["llama"].build(), self_check=False)
    model = engine._model
    first = engine.numerics["probe"]
    assert engine.numerics["probe"] == probe(model) == first
    assert len(made) == 1
    model.use_torch_attention()
    assert engine.numerics["probe"] != first
    assert len(made) == 2
    monkeypatch.setattr(numerics.torch, "get_num_threads", lambda: 3)
    assert engine.numerics["threads"] == 3
    assert len(made) == 3, "other threads may sum in another order"


def test_kernels_in_the_interpreter_are_of_a_version_of_triton() -> None:
    triton, native = (Engine(ZOO["llama"].build(), attention=way, self_check=False) for way in ("triton", "native"))
    assert triton.numerics["triton"] == importlib.metadata.version("triton")
    assert native.numerics["triton"] is None


def test_what_older_parts_do_not_name_is_passed_over() -> None:
    older, newer = {"threads": 2}, {"threads": 2, "probe": "1", "gpu_cublas_workspace": None}
    assert other_numerics(older, newer) is None
    assert other_numerics(newer, older) is None
    assert other_numerics(newer, {**newer, "probe": "2"}) == "probe"
    assert other_numerics(older, {**newer, "threads": 3}) == "threads"
    given_up = {**older, "head": "torch", "given_up": ["head kernel"]}
    assert other_numerics(given_up, {**older, "head": "triton"}) == "head"
    assert other_numerics(older, {**older, "decoding": "tree"}) == "decoding"
    assert other_numerics(given_up, {**older, "head": "torch"}) is None, "a reason decides about no bit"
    engine = Engine(ZOO["llama"].build(), self_check=False)
    assert NAMED_LATER & engine.numerics.keys() == {"probe"}
