"""What is fixed for the time of a call, and what a fingerprint says of a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM
from zoo import ZOO

from iclperm.engine import Engine, device, plain_model, plan_product, selfcheck
from iclperm.engine.device import fixed_precision, gpu_versions
from iclperm.engine.footprint import Sizes, _DenseAttention
from iclperm.engine.model import TreeModel
from iclperm.engine.plain_model import PlainModel
from iclperm.engine.shapes import pack_sizes, padded_rows, whole_rows
from iclperm.runs.answering import Answering, ModelUse

GPU, CPU = torch.device("cuda"), torch.device("cpu")
LOOSE = {
    "cuda.allow_bf16_reduced_precision_reduction": (True, True),
    "cuda.allow_fp16_reduced_precision_reduction": (True, True),
    "cuda.allow_fp16_accumulation": True,
    "cuda.fp32_precision": "tf32",
    "cudnn.conv.fp32_precision": "tf32",
    "cudnn.rnn.fp32_precision": "tf32",
    "mkldnn.fp32_precision": "bf16",
    "mkldnn.conv.fp32_precision": "bf16",
    "mkldnn.rnn.fp32_precision": "bf16",
}


@pytest.fixture
def loose() -> Iterator[None]:
    """Every switch as somebody in a hurry sets it."""
    before = device._switches()
    device._set(LOOSE)
    yield
    device._set(before)


@pytest.mark.usefixtures("loose")
def test_precision_is_fixed_within_and_as_before_after() -> None:
    assert device._switches() == LOOSE
    with fixed_precision():
        assert device._switches() == device._FIXED
        with fixed_precision():
            pass
        assert device._switches() == device._FIXED
    assert device._switches() == LOOSE
    with pytest.raises(KeyError), fixed_precision():
        raise KeyError
    assert device._switches() == LOOSE


def _older() -> tuple[Any, ...]:
    matmul = torch.backends.cuda.matmul
    return matmul.allow_tf32, torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("given", ["highest", "high", "medium"])
def test_torch_s_older_switches_can_be_read_within_and_are_as_before_after(given: str) -> None:
    """A hook of somebody's may look at them, whichever were set."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision(given)
        for is_allowed in (True, False):
            torch.backends.cudnn.allow_tf32 = is_allowed
            outside = _older(), device._switches()
            with fixed_precision():
                assert _older() == (False, "highest", False)
                assert device._switches() == device._FIXED
            assert (_older(), device._switches()) == outside
            assert outside[0] == (given != "highest", given, is_allowed)
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def test_convolutions_and_recurrences_are_in_float32_too() -> None:
    cudnn = torch.backends.cudnn
    assert (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision) == ("tf32", "tf32"), "as torch has them"
    with fixed_precision():
        assert (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision) == ("ieee", "ieee")
        assert torch.backends.mkldnn.conv.fp32_precision == "ieee"
    assert (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision) == ("tf32", "tf32")


@pytest.mark.parametrize("first", ["none", "tf32", "ieee"])
def test_a_wider_switch_decides_after_a_call_as_before(first: str) -> None:
    """As torch has it: a narrower one that nobody set follows it, and goes on doing so."""
    wider, cudnn = cast("Any", torch.backends), torch.backends.cudnn
    before = device._switches()
    narrower: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, cudnn.conv, cudnn.rnn]
    try:
        wider.fp32_precision = first
        for each in narrower:
            each.fp32_precision = "none"
        with fixed_precision():
            assert {each.fp32_precision for each in narrower} == {"ieee"}
        for said in (first, "ieee", "tf32", "ieee"):
            wider.fp32_precision = said
            assert [each.fp32_precision for each in narrower] == [said] * len(narrower)
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        with fixed_precision():
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert (wider.fp32_precision, torch.backends.cuda.matmul.fp32_precision) == ("ieee", "tf32")
    finally:
        wider.fp32_precision = "none"
        device._set(before)


@pytest.mark.usefixtures("loose")
def test_calls_of_several_threads_end_in_any_order() -> None:
    inside, leave = threading.Event(), threading.Event()
    found: list[Any] = []

    def other() -> None:
        with fixed_precision():
            inside.set()
            leave.wait(10)
            found.append(device._switches())

    thread = threading.Thread(target=other)
    with fixed_precision():
        thread.start()
        assert inside.wait(10)
    assert device._switches() == device._FIXED, "a call that goes on has lost its switches"
    leave.set()
    thread.join()
    assert found == [device._FIXED]
    assert device._switches() == LOOSE


@pytest.mark.usefixtures("loose")
def test_the_rate_of_products_is_that_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """In TF32 it would be several times as high, and so would what a plan foretells."""
    seen: list[Any] = []

    def clock() -> float:
        seen.append(device._switches())
        return 0.1 * len(seen)

    monkeypatch.setattr(plain_model, "time", SimpleNamespace(perf_counter=clock))
    assert plain_model.gemm_rate(8, 8, torch.float32, CPU) > 0
    assert device._FIXED in seen
    assert seen[0] == device._switches() == LOOSE


@pytest.mark.parametrize("options", [{}, {"attention": "torch", "layers": "transformers"}, {"plain": True}])
def test_somebody_s_switches_change_no_answer(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, request = ZOO["llama"].build(), ([1, 2, 3, 4], [5, 6])
    seen: list[Any] = []

    def answers() -> tuple[list[float], list[int]]:
        engine = Engine(model, **options)
        texts = engine.generate([request[0]], max_new_tokens=4)
        return engine.loglikelihood([request]).logprob.tolist(), texts.token_ids[0].tolist()

    if not options:  # where somebody's hook is, our layers are not
        run = TreeModel.run
        monkeypatch.setattr(TreeModel, "run", lambda *given: seen.append(device._switches()) or run(*given))
    else:
        model.model.norm.register_forward_pre_hook(lambda *_: seen.append(device._switches()))
    expected = answers()
    seen.clear()
    before = device._switches()
    device._set(LOOSE)
    try:
        assert answers() == expected
        assert device._switches() == LOOSE
    finally:
        device._set(before)
    assert seen
    assert all(switches == device._FIXED for switches in seen)


def test_a_gpu_s_fingerprint_names_no_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = tmp_path / "version"
    told.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\nGCC version: 13\n")
    monkeypatch.setattr(device, "_DRIVER", told)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 6))
    found = gpu_versions(GPU)
    assert (found["gpu_driver"], found["gpu_capability"], found["gpu_fp32_precision"]) == ("580.65.06", "8.6", "ieee")
    assert found["gpu_allow_bf16_reduced_precision_reduction"] == [False, True]
    assert (found["gpu_cudnn_conv_fp32_precision"], found["gpu_cudnn_rnn_fp32_precision"]) == ("ieee", "ieee")
    assert not any("mkldnn" in key for key in found)
    assert found["gpu_cublas_workspace"] is None
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    found = gpu_versions(GPU)
    assert found["gpu_cublas_workspace"] == ":4096:8", "it decides which of cuBLAS' kernels run"
    engine = Engine(ZOO["llama"].build(), self_check=False)
    assert engine.numerics["threads"] == torch.get_num_threads()
    assert not any(key.startswith("gpu_") for key in engine.numerics)
    monkeypatch.setattr(TreeModel, "device", property(lambda self: GPU, lambda self, value: None), raising=False)
    monkeypatch.setattr(TreeModel, "device_name", "a card")
    monkeypatch.setattr(type(engine), "pack_tokens", 4096)
    told_of = engine.numerics
    assert told_of["threads"] is None
    assert told_of["isa"] is None
    assert {key: told_of[key] for key in found} == found
    told.unlink()
    assert gpu_versions(GPU)["gpu_driver"] is None


def test_shapes_on_a_gpu_do_not_follow_the_threads() -> None:
    threads = torch.get_num_threads()
    found = []
    for count in (1, 3):
        torch.set_num_threads(count)
        found.append([padded_rows(n, GPU) for n in range(0, 40_000, 7)])
        assert padded_rows(1, CPU) == 8 * count
    torch.set_num_threads(threads)
    assert found[0] == found[1]
    assert [padded_rows(n, GPU) for n in (0, 1, 128, 129, 1024, 1025, 2049, 32_768)] == [
        128, 128, 128, 256, 1024, 1152, 2304, 32_768,
    ]  # fmt: skip


@pytest.mark.parametrize("place", [CPU, GPU])
def test_every_shape_is_its_own_and_padding_is_an_eighth_at_most(place: torch.device) -> None:
    for n in range(1, 40_000, 13):
        padded, whole = padded_rows(n, place), whole_rows(n, place)
        assert padded >= n
        assert padded_rows(padded, place) == whole_rows(padded, place) == padded
        assert padded_rows(whole, place) == whole
        assert whole <= max(n, padded_rows(1, place))
        assert n < 1024 or padded - n <= n / 8 + 1
    sizes = pack_sizes(5000, place)
    assert sizes[-1] == 5000
    assert sizes[:-1] == sorted({padded_rows(n, place) for n in range(1, 5000)} - {padded_rows(4999, place)})


def test_packs_on_a_gpu_follow_its_memory_and_nothing_else() -> None:
    sizes = Sizes.of(PlainModel(ZOO["llama"].build()), CPU)
    on_gpu = replace(sizes, device=GPU, weights=14 << 30, layer=110_000, dense=None)
    gib = 1 << 30
    assert [on_gpu.usual_pack(size * gib) for size in (0, 16, 20, 24, 40, 80)] == [
        4096,
        4096,
        4096,
        8192,
        32_768,
        32_768,
    ]
    dense = _DenseAttention.of(PlainModel(ZOO["llama"].build()).facts)
    assert replace(on_gpu, dense=dense).usual_pack(80 * gib) == 4096, "masks of torch's attention grow with the square"
    assert sizes.usual_pack(0) == 4096


def test_a_run_is_packed_as_its_engine_would(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_product([[1, 2], [3]], [[4], [5]], [[6], [7]])
    use = ModelUse("", "", None, None, "auto", "auto", None, False, "auto", "auto", None, 0, [])
    engine = SimpleNamespace(pack_tokens=32_768)
    monkeypatch.setattr(Answering, "engine", property(lambda self: engine))
    assert Answering(use, [plan])._plan(0).pack_tokens == 32_768
    engine.pack_tokens = 1024  # a limit of the layers, which the engine keeps to itself
    assert Answering(use, [plan])._plan(0) is plan
    assert Answering(replace(use, pack_tokens=64), [plan])._plan(0).pack_tokens == 64


@pytest.mark.parametrize("broken", [None, 128, 1152, 4096])
@pytest.mark.parametrize("outputs", [4, 64])
def test_on_a_gpu_every_shape_is_probed(broken: int | None, outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of a GPU that is not here: one number of rows gives other bits, as another kernel would."""
    sizes = selfcheck._probed_sizes(8192, GPU)
    assert sizes == pack_sizes(8192, GPU)[:-1]
    monkeypatch.setattr(selfcheck, "_probed_sizes", lambda *_: sizes)
    tried: set[int] = set()

    def product(x: torch.Tensor) -> torch.Tensor:
        tried.add(len(x))
        return x + (1e-6 if len(x) == broken else 0.0)

    model = SimpleNamespace(device=CPU, dtype=torch.float32, vocab_size=10)  # fewer than a layer may have outputs
    found = selfcheck._is_invariant(product, (outputs, 4, "some"), model, 8192, torch.Generator())
    assert found == (broken is None)
    assert broken or tried == {*sizes, 8192}


@pytest.mark.parametrize("at_place", [-1, 0, 63])
def test_a_head_of_one_number_of_rows_is_probed_by_place(at_place: int) -> None:
    """So few rows that all are padded to the same: another result in one place is seen."""

    def product(x: torch.Tensor) -> torch.Tensor:
        assert len(x) == 64
        return x + torch.where(torch.arange(64) == at_place, 1e-3, 0.0)[:, None]

    limits = SimpleNamespace(probed_rows=lambda *_: 64)
    model = SimpleNamespace(device=CPU, dtype=torch.float32, vocab_size=10, limits=limits)
    with mock.patch.object(selfcheck, "_probed_sizes", return_value=[]):
        found = selfcheck._is_invariant(product, (10, 4, "head"), model, 8192, torch.Generator())
    assert found == (at_place < 0)


def test_only_the_head_is_tried_with_few_rows() -> None:
    """Phi 3's gate and up beside each other have more outputs than its vocabulary has ids."""
    config = Phi3Config(
        vocab_size=200,
        hidden_size=32,
        intermediate_size=112,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    model = TreeModel(Phi3ForCausalLM(config).eval())
    names = {outputs: how for outputs, _, how in selfcheck._products(model)}
    assert names == {32: "ours", 8: "ours", 224: "ours", 200: "head"}
    products = selfcheck._products

    def other(run: Any, x: torch.Tensor) -> torch.Tensor:
        return run(x) + (1e-3 if len(x) >= 128 else 0)

    def broken(model: TreeModel) -> dict[Any, Any]:
        return {shape: partial(other, run) if shape[0] == 224 else run for shape, run in products(model).items()}

    assert selfcheck.rows_are_invariant(model, 512)
    with mock.patch.object(selfcheck, "_products", broken):
        assert not selfcheck.rows_are_invariant(model, 512)
