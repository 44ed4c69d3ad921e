"""Paths whose keys and values are over the memory budget: the way that is chosen, that it ran, and its bits."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from zoo import VOCAB, ZOO

from iclperm.engine import Engine, Plan, layerwise, offload, plan_product
from iclperm.engine import executor as executor_module
from iclperm.engine.estimate import estimate, refuse_small_budget
from iclperm.engine.long_paths import Rates, fitted
from iclperm.engine.model import TreeModel
from iclperm.engine.offload import FileStore, HostStore, OffloadedPool, joined, scratch_folder, store_rate
from iclperm.engine.plan import OFFLOAD, RECOMPUTE, LongPath, Pack, plan_requests
from iclperm.engine.shapes import padded_rows
from iclperm.engine.tree import Rows
from iclperm.errors import RequestError

CPU = torch.device("cpu")
HOST = torch.device("cpu")
READS_ARE_FREE, RECOMPUTING_IS_FREE = Rates(flops=1.0, store=1e30), Rates(flops=1e30, store=1.0)


def ids(seed: int, length: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, VOCAB, length)]


TRUNK = ids(0, 150)
CONTEXTS = [TRUNK[:10], TRUNK[:70], TRUNK, TRUNK[:100] + ids(1, 60), ids(2, 90)]
QUERIES = [ids(3 + number, length) for number, length in enumerate((9, 12, 30, 5, 7))]
QUERIES.append(QUERIES[2][:20] + ids(9, 5))
LABELS = [[7], [8, 9], [8, 10]]
LIMITS: list[dict[str, Any]] = [
    {"pack_tokens": 16, "unit_tokens": 100, "repeated_share": 1.0},  # packs end within queries; units share paths
    {"pack_tokens": 64},  # one unit of several paths
]


@cache
def engine_of(name: str, dtype: torch.dtype = torch.float32) -> Engine:
    engine = Engine(ZOO[name].build().to(dtype))
    assert engine.numerics
    return engine


def run(engine: Engine, plan: Plan, way: LongPath | None, monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Log-likelihoods of all units, a long path run so."""
    monkeypatch.setattr(engine, "fitted", lambda plan: replace(plan, long_path=way))
    return [result.logprob for result in engine.execute(plan)]


def over(plan: Plan, engine: Engine) -> int:
    """A budget that the keys and values of the plan's longest path are over, beside packs of any size."""
    footprints, path = engine._sizes.footprints(plan), plan.core.pool_slots * engine._sizes.kv
    return min(footprints(size, None).peak for size in engine._sizes.pack_sizes(plan)) - path // 8


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch) -> list[layerwise.Group]:
    """The groups that went through the layers side by side."""
    found: list[layerwise.Group] = []
    groups: Callable[..., Iterator[layerwise.Group]] = layerwise.groups

    def watched(*given: Any) -> Iterator[layerwise.Group]:
        for group in groups(*given):
            found.append(group)
            yield group

    monkeypatch.setattr(layerwise, "groups", watched)
    return found


@pytest.mark.parametrize(
    ("name", "dtype", "limits"),
    [
        ("llama", torch.float32, LIMITS[0]), ("gemma3", torch.float32, LIMITS[0]),
        ("gemma3", torch.bfloat16, LIMITS[1]), ("gemma2", torch.float32, LIMITS[1]),
        ("phi3-window", torch.float32, LIMITS[1]), ("olmo2", torch.float32, LIMITS[1]),
        ("granite", torch.float32, LIMITS[1]), ("cohere2-window", torch.float32, LIMITS[1]),
    ],
)  # fmt: skip
def test_computing_a_path_again_changes_no_bit(
    name: str, dtype: torch.dtype, limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch, swept: list[layerwise.Group]
) -> None:
    engine, plan = engine_of(name, dtype), plan_product(CONTEXTS, QUERIES, LABELS, **limits)
    assert engine.layers == "fused"
    expected = run(engine, plan, None, monkeypatch)
    assert not swept
    assert engine.report.recomputed_tokens == 0
    for rows in (300, 190):
        swept.clear()
        for got, wanted in zip(run(engine, plan, LongPath(RECOMPUTE, rows), monkeypatch), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)
        assert sum(len(pack) for group in swept for pack in group.again) == engine.report.recomputed_tokens
    assert engine.report.recomputed_tokens > 0
    assert len(swept) > plan.num_units
    anew = sum(plan.core.predict(unit, 0)[0] for unit in range(plan.num_units))
    assert engine.report.tokens_forwarded == anew + engine.report.recomputed_tokens


@pytest.mark.parametrize(
    ("name", "store", "limits"),
    [
        ("llama", FileStore, LIMITS[0]), ("gemma3", FileStore, LIMITS[1]), ("gemma3", HostStore, LIMITS[0]),
        ("mistral-window", HostStore, LIMITS[1]), ("gpt2", FileStore, LIMITS[1]), ("qwen2-moe", FileStore, LIMITS[1]),
    ],
)  # fmt: skip
def test_reading_a_path_back_changes_no_bit(
    name: str, store: type, limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine, plan = engine_of(name), plan_product(CONTEXTS, QUERIES, LABELS, **limits)
    expected = run(engine, plan, None, monkeypatch)
    reads: list[int] = []
    monkeypatch.setattr(executor_module, "open_store", lambda _: store(tmp_path if store is FileStore else HOST))
    read = store.read  # type: ignore[attr-defined]

    def watched(self: Any, place: tuple[int, int], slot: int, rows: torch.Tensor) -> None:
        reads.append(len(rows))
        read(self, place, slot, rows)

    monkeypatch.setattr(store, "read", watched)
    for got, wanted in zip(run(engine, plan, LongPath(OFFLOAD), monkeypatch), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert sum(reads) > plan.core.pool_slots
    assert engine.report.tokens_forwarded == plan.tokens
    assert not list(tmp_path.iterdir()), "the file has no name"


def test_torchs_attention_reads_a_path_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, plan = (
        Engine(ZOO["gemma3"].build(), attention="torch"),
        plan_product(CONTEXTS, QUERIES, LABELS, **LIMITS[0]),
    )
    expected = run(engine, plan, None, monkeypatch)
    for got, wanted in zip(run(engine, plan, LongPath(OFFLOAD), monkeypatch), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("name", "rates", "way"),
    [
        ("llama", READS_ARE_FREE, OFFLOAD), ("gemma3", READS_ARE_FREE, OFFLOAD),
        ("gemma3", RECOMPUTING_IS_FREE, RECOMPUTE),
    ],
)  # fmt: skip
def test_a_path_over_the_budget_is_served(name: str, rates: Rates, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, whole = plan_product(CONTEXTS, QUERIES, LABELS), engine_of(name)
    monkeypatch.undo()
    budget = over(plan, whole)
    with pytest.raises(RequestError, match=r"even in packs of \d+ tokens"):
        whole._sizes.fitted(plan, budget)
    engine = Engine(whole.model, memory_budget=budget)
    monkeypatch.setattr(engine, "_rates", lambda _: rates)
    expected = whole.score(CONTEXTS, QUERIES, LABELS)
    np.testing.assert_array_equal(engine.score(CONTEXTS, QUERIES, LABELS), expected)
    chosen = engine.fitted(plan).long_path
    assert chosen is not None
    assert chosen.way == way
    assert engine.footprint(plan).peak <= budget
    requests = [(context, [*query, 7]) for context in CONTEXTS for query in QUERIES]
    np.testing.assert_array_equal(
        engine.loglikelihood(requests).logprob, whole.loglikelihood(requests).logprob, strict=True
    )


def test_the_cheaper_way_that_is_open_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, engine = plan_product(CONTEXTS, QUERIES, LABELS), engine_of("gemma3")
    sizes, facts, budget = engine._sizes, engine._model.facts, over(plan_product(CONTEXTS, QUERIES, LABELS), engine)

    def chosen(rates: Rates, *, may_recompute: bool = True) -> LongPath:
        found = fitted(sizes, facts, plan, budget, may_recompute=may_recompute, rates=lambda _: rates).long_path
        assert found is not None
        return found

    assert chosen(READS_ARE_FREE).way == OFFLOAD
    assert chosen(RECOMPUTING_IS_FREE).way == RECOMPUTE
    assert chosen(RECOMPUTING_IS_FREE, may_recompute=False).way == OFFLOAD
    assert chosen(RECOMPUTING_IS_FREE, may_recompute=False).other_seconds is None
    dear, cheap = chosen(Rates(1e9, 1e3)), chosen(Rates(1e9, 1e9))
    assert {dear.way, cheap.way} == {RECOMPUTE, OFFLOAD}
    assert dear.other_seconds == pytest.approx(1e6 * cheap.seconds, rel=0.9)
    monkeypatch.setattr("iclperm.engine.long_paths.room_in_store", lambda _: 0)
    assert chosen(READS_ARE_FREE).way == RECOMPUTE
    with pytest.raises(RequestError, match=r"even in packs of \d+ tokens \d+ are needed .* use fewer shots"):
        chosen(READS_ARE_FREE, may_recompute=False)


def test_what_fits_is_not_looked_at_twice() -> None:
    plan, engine = plan_product(CONTEXTS, QUERIES, LABELS), engine_of("llama")

    def never(_: Plan) -> Rates:
        raise AssertionError("rates are measured where everything fits")

    for budget in (None, 1 << 40):
        assert fitted(engine._sizes, engine._model.facts, plan, budget, may_recompute=True, rates=never) is plan


def test_tiny_packs_give_way_where_another_way_is_much_faster() -> None:
    plan, engine = plan_product(CONTEXTS, [ids(50 + n, 30) for n in range(60)], LABELS), engine_of("gemma3")
    # what a library keeps of each product is most of the memory here, on some processors
    sizes, facts = replace(engine._sizes, num_products=0, num_first=0, num_last=0), engine._model.facts
    budget = sizes.peak(plan, 8)
    small = sizes.fitted(plan, budget).pack_tokens
    found = {
        rate: fitted(sizes, facts, plan, budget, may_recompute=False, rates=lambda _, rate=rate: Rates(1e15, rate))
        for rate in (1e30, 1e3)
    }
    assert found[1e3].long_path is None
    assert found[1e3].pack_tokens == small
    assert found[1e30].long_path == LongPath(OFFLOAD, seconds=pytest.approx(0.0))
    assert found[1e30].pack_tokens > 2 * small


@pytest.mark.parametrize("most_rows", [1, 120, 200, 260, 1000])
def test_groups_hold_what_they_need_and_no_more_rows_than_they_may(most_rows: int) -> None:
    plan = plan_product(CONTEXTS, QUERIES, LABELS, pack_tokens=24)
    packs = list(plan.packs(0))
    most_held = max(pack.held_tokens for pack in packs)
    found = list(layerwise.groups(packs, most_rows, CPU))
    assert [id(pack) for group in found for pack in group.packs] == [id(pack) for pack in packs]
    for group in found:
        rows = sum(padded_rows(len(pack), CPU) for pack in (*group.again, *group.packs))
        assert rows <= most_rows or len(group.packs) == 1
        assert sum(map(len, group.again)) <= most_held
        known: dict[int, tuple[int, int]] = {}  # slot -> position and token
        for pack in (*group.again, *group.packs):
            for span in np.flatnonzero(pack.span_source == 0):
                assert all(slot in known for slot in range(pack.span_begin[span], pack.span_end[span]))
            for begin, end, slot in zip(pack.retain_begin, pack.retain_end, pack.retain_slot, strict=True):
                for row in range(begin, end):
                    known[slot + row - begin] = int(pack.positions[row]), int(pack.token_ids[row])
    assert (len(found) == 1) == (most_rows == 1000)


def test_layers_with_a_window_read_no_more_than_it_shows(tmp_path: Path) -> None:
    store = HostStore(HOST)
    pool = OffloadedPool(700, TreeModel(ZOO["llama"].build()).limits, store)
    k = torch.arange(700.0).reshape(700, 1, 1)
    first = Pack.of(
        token_ids=np.zeros(600), positions=np.arange(600), visit_row_offsets=[0, 600], visit_pos=[0],
        span_offsets=[0, 0], retain_begin=[0], retain_end=[600], retain_slot=[0], held_tokens=0,
    )  # fmt: skip
    pool.start(first)
    for pools in (pool.layer(0, k, k, 0),):
        for each in pools:
            each[:600] = k[:600]
    pool.leave(0)
    second = Pack.of(
        token_ids=[5], positions=[600], visit_row_offsets=[0, 1], visit_pos=[600], span_offsets=[0, 1],
        span_source=[0], span_begin=[0], span_end=[600], held_tokens=600,
    )  # fmt: skip
    for window, expected in ((0, 0), (10, 512), (400, 0), (89, 512), (90, 256)):
        pool.start(second)
        pool._layers[0][0].zero_()
        states = pool.layer(0, k, k, window)[0][:600, 0, 0]
        assert int(np.argmax(states.numpy() > 0)) == max(1, expected)
        np.testing.assert_array_equal(states[expected:], k[expected:600, 0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [FileStore, HostStore])
def test_stores_give_back_what_they_are_given(kind: type, dtype: torch.dtype, tmp_path: Path) -> None:
    store = kind(tmp_path if kind is FileStore else HOST)
    kept = {(layer, part): torch.randn(30, 2, 3 + layer).to(dtype) for layer in range(3) for part in range(2)}
    for place, rows in kept.items():
        store.write(place, 40, 0, rows[:20])
        store.write(place, 40, 20, rows[20:])
        store.write(place, 40, 5, rows[5:7] + 1)
        rows[5:7] += 1
    for place, rows in kept.items():
        for begin, end in ((0, 30), (4, 9), (29, 30)):
            out = torch.empty_like(rows[begin:end])
            store.read(place, begin, out)
            assert torch.equal(out, rows[begin:end])


def test_a_disk_without_room_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(RequestError, match=r"has no room for 0.0 MiB of keys and values .*; set TMPDIR to a folder"):
        FileStore(tmp_path).write((0, 0), 10, 0, torch.zeros(3, 1, 2))
    monkeypatch.undo()
    store = FileStore(tmp_path)
    store.write((0, 0), 10, 0, torch.ones(3, 1, 2))
    store._file.truncate(4)
    with pytest.raises(OSError, match="ends early; it was cut short"):
        store.read((0, 0), 0, torch.zeros(3, 1, 2))


def test_files_lie_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert scratch_folder() == tmp_path
    assert offload.room_in_store(HOST) > 0
    monkeypatch.delenv("TMPDIR")
    assert scratch_folder().is_dir()
    for num_bytes in (1, 1 << 60):  # from memory, and from the disk
        assert store_rate(HOST, num_bytes) > 1e6


def test_ranges_are_joined() -> None:
    def of(*pairs: tuple[int, int]) -> list[tuple[int, int]]:
        begins, ends = np.array(pairs, np.int32).reshape(-1, 2).T
        return joined(begins, ends)

    assert of() == []
    assert of((3, 5), (0, 2), (2, 3), (9, 9)) == [(0, 5)]
    assert of((0, 10), (2, 4), (12, 13)) == [(0, 10), (12, 13)]


def test_the_estimate_says_which_way(tmp_path: Path) -> None:
    engine = engine_of("llama")
    engine.model.config.save_pretrained(tmp_path)
    plan = plan_product(CONTEXTS, QUERIES, LABELS)
    budget = over(plan, engine)
    refuse_small_budget(tmp_path, [plan], budget)
    found = estimate(tmp_path, [plan], memory_budget=budget, device="cpu")
    assert found.long_path is not None
    assert found.memory is not None
    assert found.memory.peak <= budget
    assert found.memory.kv * engine._model.facts.num_layers == plan.core.pool_slots * engine._sizes.kv
    assert estimate(tmp_path, [plan], device="cpu").long_path is None
    with pytest.raises(RequestError, match=r"even in packs of \d+ tokens"):
        refuse_small_budget(tmp_path, [plan], found.memory.weights + 1)


def test_memory_that_runs_out_midway_halves_the_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, plan = Engine(ZOO["gemma3"].build()), plan_product(CONTEXTS, QUERIES, LABELS)
    expected = run(engine, plan, None, monkeypatch)
    forward: Callable[..., torch.Tensor] = TreeModel.forward_layer

    def scarce(self: TreeModel, tree: Any) -> torch.Tensor:
        if len(tree.pack) > 100 and tree.num_layers == 1:
            raise MemoryError
        return forward(self, tree)

    monkeypatch.setattr(TreeModel, "forward_layer", scarce)
    for got, wanted in zip(run(engine, plan, LongPath(RECOMPUTE, 400), monkeypatch), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert engine.report.num_splits > 0
    assert 50 <= engine.pack_tokens <= 100


def test_a_failure_between_layers_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, plan = Engine(ZOO["llama"].build()), plan_product(CONTEXTS, QUERIES, LABELS)
    before = engine.model(torch.tensor([TRUNK])).logits

    def broken(self: TreeModel, tree: Any) -> torch.Tensor:
        raise ValueError("broken")

    run(engine, plan, None, monkeypatch)
    monkeypatch.setattr(TreeModel, "forward_layer", broken)
    with pytest.raises(ValueError, match="broken"):
        run(engine, plan, LongPath(RECOMPUTE, 400), monkeypatch)
    assert not any("forward" in vars(module) for module in engine.model.modules())
    assert torch.equal(engine.model(torch.tensor([TRUNK])).logits, before)


def test_generation_is_refused_with_what_to_do() -> None:
    whole = engine_of("llama")
    least = whole._sizes.generation(8, 1, 0, 160).peak
    engine = Engine(whole.model, memory_budget=least + 100)
    with pytest.raises(RequestError, match=r"keys and values of a text of \d+ tokens .*; raise it, or use fewer shots"):
        engine.generate([TRUNK], max_new_tokens=10)


def test_requests_have_paths_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[*context, *query, 7] for context in CONTEXTS for query in QUERIES]
    begins = np.array([len(row) - 1 for row in rows])
    plan = plan_requests(Rows.of(rows), begins, pack_tokens=32)
    engine = engine_of("gemma3")
    expected = [values.logprob for values in engine._run(plan, range(plan.num_units), engine.report)]
    for way in (LongPath(OFFLOAD), LongPath(RECOMPUTE, 250)):
        monkeypatch.setattr(engine, "fitted", lambda plan, way=way: replace(plan, long_path=way))
        for values, wanted in zip(engine._run(plan, range(plan.num_units), engine.report), expected, strict=True):
            np.testing.assert_array_equal(values.logprob, wanted)
