"""What memory is foretold and allowed; where it runs out, packs are halved or one line says what to do."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from zoo import VOCAB, ZOO

from iclperm import Study
from iclperm.demo import model_path
from iclperm.engine import Engine, Plan, footprint, plan_product
from iclperm.engine import executor as executor_module
from iclperm.engine.estimate import estimate
from iclperm.engine.forward import TreeForward
from iclperm.engine.memory import free_bytes, resolve_budget
from iclperm.engine.model import TreeModel
from iclperm.engine.plan import DEFAULT_PACK_TOKENS, Pack
from iclperm.errors import ConfigError, OutOfMemory, PlanError, RequestError, is_out_of_memory
from iclperm.reference import scoring
from iclperm.study.sizes import parse_budget

HOST = "[enforce fail at alloc_cpu.cpp:130] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
ERRORS = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError(HOST),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return ZOO["llama"].build()


def ids(seed: int, length: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, length)]


CONTEXTS = [ids(0, 40), ids(1, 25), ids(0, 40)[:20] + ids(2, 30)]
QUERIES = [ids(3 + number, 9) for number in range(6)]
LABELS = [[7], [8, 9], [8, 10]]


def several_units(**limits: Any) -> Plan:
    plan = plan_product(CONTEXTS, QUERIES, LABELS, unit_tokens=40, repeated_share=1.0, **limits)
    assert plan.num_units > 3
    return plan


def ready(model: PreTrainedModel, **options: Any) -> Engine:
    """An engine whose first-use check is done."""
    engine = Engine(model, **options)
    assert engine.numerics["pack_tokens"] is None
    assert engine.row_invariant
    return engine


def replace_forward(monkeypatch: pytest.MonkeyPatch, fails: Callable[[Pack], BaseException | None]) -> list[int]:
    """Packs for which ``fails`` gives an error raise it; returns the sizes tried."""
    tried: list[int] = []
    run: Run = TreeModel.run

    def scarce(self: TreeModel, tree: TreeForward) -> Any:
        tried.append(len(tree.pack))
        if (error := fails(tree.pack)) is not None:
            raise error
        return run(self, tree)

    monkeypatch.setattr(TreeModel, "run", scarce)
    return tried


def no_room_over(monkeypatch: pytest.MonkeyPatch, rows: int, error: BaseException | None = None) -> list[int]:
    return replace_forward(monkeypatch, lambda pack: (error or MemoryError()) if len(pack) > rows else None)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_packs_are_halved_until_they_fit_and_no_bit_changes(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    engine = ready(llama)
    expected = engine.score(CONTEXTS, QUERIES, LABELS)
    undisturbed = engine.report
    assert (undisturbed.num_splits, undisturbed.num_packs, engine.pack_tokens) == (0, 1, DEFAULT_PACK_TOKENS)
    tried = no_room_over(monkeypatch, 50, error)
    np.testing.assert_array_equal(engine.score(CONTEXTS, QUERIES, LABELS), expected)
    total = undisturbed.tokens_forwarded
    assert tried[0] == total > 200
    assert engine.report.num_splits == sum(size > 50 for size in tried) > 1
    assert engine.report.tokens_forwarded == engine.report.tokens_unique == total, "no pack was done before it failed"
    assert 25 <= engine.pack_tokens <= 50
    assert engine.totals.num_splits == engine.report.num_splits


def test_the_smaller_size_is_remembered_by_every_kind_of_call(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [(ids(20, 30), ids(21 + number, 12)) for number in range(12)]
    plan = several_units()
    engine = ready(llama)
    scores, logprob = engine.score(CONTEXTS, QUERIES, LABELS), engine.loglikelihood(requests).logprob
    units, numerics = [result.logprob for result in engine.execute(plan)], engine.numerics
    tried = no_room_over(monkeypatch, 30)
    np.testing.assert_array_equal(engine.loglikelihood(requests).logprob, logprob)
    assert engine.report.num_splits > 0
    size = engine.pack_tokens
    assert size <= 30
    tried.clear()
    np.testing.assert_array_equal(engine.score(CONTEXTS, QUERIES, LABELS), scores)
    for result, expected in zip(engine.execute(plan), units, strict=True):
        np.testing.assert_array_equal(result.logprob, expected)
    np.testing.assert_array_equal(engine.loglikelihood(requests).logprob, logprob)
    assert max(tried) == size == engine.pack_tokens
    assert engine.report.num_splits == 0
    assert engine.numerics == numerics, "the size of packs is no part of what results depend on"


def test_a_unit_that_fails_midway_starts_again_with_its_path(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = several_units(pack_tokens=32)
    engine = ready(llama, pack_tokens=32)
    expected = {result.unit: result.logprob for result in engine.execute(plan)}
    path_tokens = [plan.core.predict(u, 0)[0] - int(plan.core.unit_tokens[u]) for u in range(plan.num_units)]
    unit = next(u for u in range(plan.num_units) if path_tokens[u] > 0 and plan.core.unit_packs[u] > 1)
    first, second = list(plan.packs(unit, plan.core.held_after(unit - 1)))[:2]
    before = int(plan.core.unit_packs[:unit].sum())
    calls = itertools.count()
    tried = replace_forward(monkeypatch, lambda _: MemoryError() if next(calls) == before + 1 else None)
    for result in engine.execute(plan):
        np.testing.assert_array_equal(result.logprob, expected[result.unit])
    assert tried[before : before + 2] == [len(first), len(second)]
    assert engine.report.num_splits == 1
    assert engine.pack_tokens == 16
    assert engine.report.tokens_forwarded == plan.tokens + len(first) + path_tokens[unit]


def test_the_failed_pack_is_gone_before_the_next_try(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ready(llama)
    activations: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []
    run: Run = TreeModel.run

    def scarce(self: TreeModel, tree: TreeForward) -> Any:
        alive.extend(reference() is not None for reference in activations)
        if len(tree.pack) > 100:
            hidden = torch.zeros(8)
            activations.append(weakref.ref(hidden))
            raise MemoryError
        return run(self, tree)

    monkeypatch.setattr(TreeModel, "run", scarce)
    engine.score(CONTEXTS, QUERIES, LABELS)
    assert activations
    assert alive
    assert not any(alive)


def test_where_packs_may_change_bits_the_size_to_use_is_named(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = several_units()
    mixed = Engine(ZOO["qwen2-moe"].build())
    assert mixed.numerics["pack_tokens"] == 1024
    assert mixed.row_invariant is False
    no_room_over(monkeypatch, 50)
    unchecked = Engine(llama, self_check=False)
    for engine, most in ((mixed, 1024), (unchecked, DEFAULT_PACK_TOKENS)):
        with pytest.raises(
            OutOfMemory,
            match=r"^unit 0 does not fit in memory in packs of \d+ tokens, .* start anew with pack_tokens=\d+, "
            r"a memory_budget of at most \d+ bytes, fewer shots or a smaller model$",
        ) as raised:
            list(engine.execute(plan))
        assert "\n" not in str(raised.value)
        assert isinstance(raised.value.__context__, MemoryError)
        assert engine.pack_tokens == most
        assert engine.report.num_splits == 0
        size, budget = map(int, re.findall(r"pack_tokens=(\d+).* at most (\d+) bytes", str(raised.value))[0])
        assert size < DEFAULT_PACK_TOKENS
        assert budget == engine.footprint(plan.repacked(size)).peak


def test_the_size_named_is_a_size_that_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ZOO["qwen2-moe"].build()
    expected = Engine(model).score(CONTEXTS, QUERIES, LABELS)
    tried = no_room_over(monkeypatch, 60)
    size: int | None = None
    while True:
        engine = Engine(model, pack_tokens=size, self_check=False)
        try:
            scores = engine.score(CONTEXTS, QUERIES, LABELS)
        except OutOfMemory as error:
            size = int(re.findall(r"pack_tokens=(\d+)", str(error))[0])
        else:
            break
    np.testing.assert_allclose(scores, expected, atol=1e-4)
    assert size is not None
    assert max(tried) > 60 >= size


def test_a_check_that_has_no_room_names_no_size_of_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the check's own do not follow."""
    no_room_over(monkeypatch, 60)
    with pytest.raises(OutOfMemory, match=r"^memory has no room for the first-use check beside the model; "):
        Engine(ZOO["qwen2-moe"].build(), pack_tokens=32).score(CONTEXTS, QUERIES, LABELS)


def test_packs_are_never_split_below_eight_rows_a_thread(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ready(llama)
    tried = no_room_over(monkeypatch, 0)
    with pytest.raises(
        OutOfMemory,
        match=r"unit 0 does not fit in memory even in packs of 8 tokens, .* use fewer shots, a smaller model",
    ):
        engine.score(CONTEXTS, QUERIES, LABELS)
    assert tried[-1] == 8
    assert tried == sorted(set(tried), reverse=True)


def test_the_prediction_is_checked_in_smaller_packs_too(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ready(llama)
    no_room_over(monkeypatch, 50)
    packs = Plan.packs
    monkeypatch.setattr(
        Plan, "packs", lambda self, unit, held=0: [*packs(self, unit, held)] * (1 if self.pack_tokens > 50 else 2)
    )
    with pytest.raises(PlanError, match=r"unit 0 forwarded .* where the plan says"):
        engine.score(CONTEXTS, QUERIES, LABELS)
    assert engine.report.num_splits > 0


def test_the_first_use_check_may_run_out_of_memory(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(llama)
    no_room_over(monkeypatch, 8)
    with pytest.raises(OutOfMemory, match="memory has no room for the first-use check beside the model; use a smaller"):
        engine.score(CONTEXTS, QUERIES, LABELS)
    monkeypatch.undo()
    assert np.isfinite(engine.score(CONTEXTS, QUERIES, LABELS)).all()
    assert engine.row_invariant, "the check that failed counts as done"


def test_plain_scoring_names_the_remedy(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError(HOST)

    monkeypatch.setattr(executor_module, "next_token_logprobs", fails)
    with pytest.raises(
        OutOfMemory, match=r"a prompt of unit 0 does not fit in memory \(of up to 60 tokens\); use fewer"
    ):
        Engine(llama, plain=True).score(CONTEXTS, QUERIES, LABELS)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_allocators_errors_are_known(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("shape mismatch"), ValueError("not enough memory"), OSError(errno.EIO, "x")]
)
def test_other_errors_pass_unchanged(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    assert not is_out_of_memory(error)
    engine = ready(llama)
    no_room_over(monkeypatch, 50, error)
    with pytest.raises(type(error)) as raised:
        engine.score(CONTEXTS, QUERIES, LABELS)
    assert raised.value is error
    assert engine.pack_tokens == DEFAULT_PACK_TOKENS


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (1, 1), ("1000", 1000), ("2GB", 2_000_000_000), ("2 GiB", 2 << 30), ("1.5kib", 1536), ("7B", 7),
        (0.5, 0.5), ("50%", 0.5), ("0.25", 0.25), (1.0, 1.0), ("100 %", 1.0),
    ],
)  # fmt: skip
def test_budgets_are_bytes_or_shares(given: Any, expected: float) -> None:
    parsed = parse_budget(given)
    assert (parsed, type(parsed)) == (expected, type(expected))
    assert Study(memory_budget=given).memory_budget == expected


@pytest.mark.parametrize("given", [0, -1, 1.5, 0.0, True, "", "much", "0", "120%", "-5MB", "4G", "nan", float("nan")])
def test_what_is_no_budget_is_refused(llama: PreTrainedModel, given: Any) -> None:
    with pytest.raises(ValueError, match='give bytes, as 2000000000 or "2GB" or "2GiB", or a share'):
        parse_budget(given)
    with pytest.raises(RequestError, match=r"memory_budget is .*; give bytes"):
        Engine(llama, memory_budget=given)
    with pytest.raises(ConfigError, match="key 'memory_budget'"):
        Study(memory_budget=given)


def test_a_share_is_one_of_what_system_and_group_leave(tmp_path: Path) -> None:
    host = torch.device("cpu")
    free = free_bytes(host, tmp_path)
    assert 0 < free < 1 << 50
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    assert free_bytes(host, tmp_path) > 1 << 20
    (tmp_path / "memory.max").write_text("1000\n")
    assert free_bytes(host, tmp_path) == 300
    assert resolve_budget("50%", host, held=100, control_group=tmp_path) == 200
    assert resolve_budget(77, host) == 77
    assert free_bytes(host) > 1 << 20


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "gemma3", "phi3", "gpt2", "opt", "qwen2-moe", "glm4", "starcoder2-window", "phi"]
)
def test_the_shapes_alone_foretell_what_the_model_does(name: str, tmp_path: Path) -> None:
    model = ZOO[name].build()
    model.config.save_pretrained(tmp_path)
    plan, engine = several_units(), Engine(model)
    foretold = estimate(tmp_path, [plan]).memory
    assert foretold == engine.footprint(plan)
    assert foretold is not None
    assert foretold.weights == sum(p.nbytes for p in model.parameters())
    assert foretold.kv == plan.core.pool_slots * engine._model.facts.kv_token_bytes
    assert foretold.peak == sum(vars(foretold).values())
    bfloat = estimate(tmp_path, [plan], dtype="bfloat16").memory
    assert bfloat is not None
    assert 2 * bfloat.weights == foretold.weights
    assert f"weights {foretold.weights / 2**20:.1f} MiB + keys and values " in str(foretold)


@pytest.mark.parametrize(("name", "options"), [("opt", {}), ("llama", {"layers": "transformers"}), ("llama", {})])
def test_transformers_layers_take_no_larger_packs(
    name: str, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ZOO[name].build()
    engine = Engine(model, **options)
    most = DEFAULT_PACK_TOKENS if engine.layers == "fused" else 1024
    assert (engine.layers == "fused") == (name == "llama" and not options)
    assert engine.pack_tokens == most
    assert engine.numerics["pack_tokens"] is None
    contexts = [ids(seed, 30) for seed in range(60)]
    plan = plan_product(contexts, QUERIES, LABELS)
    assert plan.pack_tokens == DEFAULT_PACK_TOKENS
    assert plan.tokens > DEFAULT_PACK_TOKENS
    sizes: list[int] = []
    run = TreeModel.run

    def watched(model: TreeModel, tree: TreeForward) -> Any:
        sizes.append(len(tree.pack))
        return run(model, tree)

    monkeypatch.setattr(TreeModel, "run", watched)
    by_unit = list(engine.execute(plan))
    assert most // 2 < max(sizes) <= most
    assert engine.footprint(plan) == engine.footprint(plan.repacked(most))
    if not options:
        model.save_pretrained(tmp_path)
        foretold = estimate(tmp_path, [plan], device="cpu")
        assert foretold.pack_tokens == most
        assert foretold.memory == engine.footprint(plan)
    small = Engine(model, **options).execute(plan.repacked(64))
    assert all(np.array_equal(a.logprob, b.logprob) for a, b in zip(by_unit, small, strict=True))


def test_a_budget_makes_packs_as_small_as_it_takes(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = several_units()
    whole = ready(llama)
    expected = [result.logprob for result in whole.execute(plan)]
    budget = whole._sizes.peak(plan, 32)
    engine = Engine(llama, memory_budget=budget)
    assert engine.footprint(plan).peak <= budget < whole.footprint(plan).peak
    size = engine.fitted(plan).pack_tokens
    assert 32 <= size < 64
    assert engine._sizes.peak(plan, size + 8) > budget, "the packs are the largest that fit"
    assert engine.row_invariant is None
    engine.loglikelihood([([1], [2])])
    tried = replace_forward(monkeypatch, lambda _: None)
    for result, logprob in zip(engine.execute(plan), expected, strict=True):
        np.testing.assert_array_equal(result.logprob, logprob)
    assert max(tried) == size


def test_a_budget_that_nothing_fits_is_refused_with_the_numbers(llama: PreTrainedModel) -> None:
    plan, weights = several_units(), sum(p.nbytes for p in llama.parameters())
    with pytest.raises(
        RequestError, match=rf"memory_budget is {weights - 1} bytes .*, but the weights alone take {weights}"
    ):
        Engine(llama, memory_budget=weights - 1)
    engine = Engine(llama, memory_budget=weights + 1)
    with pytest.raises(
        RequestError, match=r"but even in packs of 8 tokens (\d+) are needed \(weights .*\); raise it"
    ) as raised:
        list(engine.execute(plan))
    needed = int(re.findall(r"tokens (\d+) are", str(raised.value))[0])
    assert Engine(llama, memory_budget=needed).footprint(plan).peak == needed
    with pytest.raises(
        RequestError, match="memory_budget bounds the packs of a tree, and plain=True has none; leave it"
    ):
        Engine(llama, plain=True, memory_budget=needed)


def test_more_of_anything_takes_more_memory(llama: PreTrainedModel) -> None:
    sizes = Engine(llama)._sizes
    activations = [sizes.footprint(several_units(), size).activations for size in range(8, 80, 8)]
    assert activations == sorted(set(activations))
    longer = plan_product([ids(9, 150)], QUERIES, LABELS)
    assert sizes.footprint(longer).kv > sizes.footprint(several_units()).kv


def test_code_that_is_kept_of_products_is_bounded(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "uses_onednn", lambda *_, **__: True)  # whatever this processor's are
    plan, sizes = several_units(), Engine(llama)._sizes
    assert sizes.num_products > 0
    before = sizes.footprint(plan).working
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "2")
    assert sizes.footprint(plan).working == before, "the other cache still keeps them"
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "2")
    assert sizes.footprint(plan).working < before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is measured on Linux")
def test_the_peak_foretold_is_the_peak_measured(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "benchmarks" / "memory.py"
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(script), "--model", "10m", "--repeats", "1", "--json", str(figures)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    (case,) = json.loads(figures.read_text())["figures"]
    assert 0.75 < case["measured/foretold"] < 1.25
    assert case["measured MiB"] > case["weights MiB"] + case["kv MiB"]


def test_a_tokenizer_takes_memory_by_its_ids(llama: PreTrainedModel) -> None:
    plan, vocabulary = several_units(), llama.config.vocab_size
    without = Engine(llama).footprint(plan)
    beside = Engine(llama, Engine.from_pretrained(model_path()).tokenizer).footprint(plan)
    assert beside.working - without.working == footprint._TOKENIZER_BYTES_PER_ID * vocabulary > 0
    plan = plan_product([[1, 2, 3]], [[4, 5]], [[6], [7]])
    foretold = estimate(model_path(), [plan], dtype="float32", device="cpu").memory
    assert foretold == Engine.from_pretrained(model_path(), dtype="float32", device="cpu").footprint(plan)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_plain_scoring_holds_the_logits_of_what_it_scores(name: str) -> None:
    model = ZOO[name].build()
    shapes: list[tuple[int, ...]] = []
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda _, given, logits: shapes.append(tuple(logits.shape)))
    (score,) = scoring.loglikelihood(model, [(ids(0, 40), [7, 8, 9])])
    assert shapes == [(1, 3, model.config.vocab_size)]
    with torch.no_grad():
        whole = model(input_ids=torch.tensor([[*ids(0, 40), 7, 8]]), use_cache=False).logits[0, 39:]
    by_hand = float(torch.log_softmax(whole.double(), -1)[[0, 1, 2], [7, 8, 9]].sum())
    assert shapes[1:] == [(1, 42, model.config.vocab_size)]
    assert abs(score.logprob - by_hand) <= 1e-5


def test_a_check_that_cannot_ask_for_the_last_logits_alone_is_foretold_with_all(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(input_ids: torch.Tensor, use_cache: bool) -> Any:
        return type(llama).forward(llama, input_ids=input_ids, use_cache=use_cache)

    requests = [(ids(0, 40), [7, 8, 9])]
    usual, (score,) = Engine(llama)._sizes.num_checked_logits, scoring.loglikelihood(llama, requests)
    monkeypatch.setattr(footprint, "checked_tokens", lambda *_: 10_000)
    assert Engine(llama)._sizes.num_checked_logits == usual
    monkeypatch.setattr(llama, "forward", forward)
    assert not scoring.may_keep_last(llama)
    assert Engine(llama)._sizes.num_checked_logits == 10_000
    (whole,) = scoring.loglikelihood(llama, requests)
    assert abs(whole.logprob - score.logprob) <= 1e-5
    assert whole.is_greedy == score.is_greedy
