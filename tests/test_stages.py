"""Stages of kernels: any number gives the same bits, the fastest is kept, and what is kept is read at launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import triton_interpreter
from devices import quick_check
from zoo import ZOO

from iclperm.engine import Engine, decodecases
from iclperm.engine.doctor import choosing, packs
from iclperm.engine.doctor.choosing import Launched, StageChoice, choose
from iclperm.engine.kernels import rowwise, stages, triton_attention, triton_decode, triton_head
from iclperm.engine.model import TreeModel

triton_interpreter.repair()

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stages._kept.cache_clear()
    yield
    stages._kept.cache_clear()


@pytest.fixture
def identities(monkeypatch: pytest.MonkeyPatch) -> dict[torch.device, dict[str, str]]:
    """What two GPUs that are not here are taken for."""
    known = {device: {"device": f"Example {device.index}"} for device in (FIRST, SECOND)}
    monkeypatch.setattr(stages, "identity", known.__getitem__)
    return known


@pytest.fixture
def in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels are Triton's, in its interpreter; packs are small, and the check has few and short paths."""
    monkeypatch.setattr(rowwise, "runs_triton", lambda x: True)
    quick_check(monkeypatch)
    monkeypatch.setattr(choosing, "DEFAULT_PACK_TOKENS", 48)
    monkeypatch.setattr(packs, "_CONTEXT", 70)  # two tiles of keys
    monkeypatch.setattr(packs, "_QUERY", 16)
    monkeypatch.setattr(decodecases, "_PATHS", (33,))
    monkeypatch.setattr(decodecases, "_SHARING", {"cpu": 2})


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_every_candidate_is_launched_and_gives_the_same_bits(
    name: str, in_triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the interpreter stages have no effect: the bits must be equal, and the fastest is the clock's choice."""
    tried, clock = launched_stages(monkeypatch), {1: 4.0, 2: 3.0, 3: 1.0, 4: 2.0}
    assert set(clock) < set(choosing.CANDIDATES) <= set(range(1, stages.MOST_STAGES + 1))
    monkeypatch.setattr(choosing, "CANDIDATES", tuple(clock))
    served = TreeModel(ZOO[name].build(), attention="triton")

    def seconds_of(launch: Launched) -> float:
        if tried[-1] == 4:
            launch()
        return clock[tried[-1]]

    found = list(choosing.chosen_stages(served, seconds_of))
    windows = ["", ", window"] if served.facts.num_window_layers else [""]
    softcap = ", soft-cap" * (served.facts.attention_softcap > 0)
    assert [each.kernel for each in found if each.kernel.startswith("tree")] == [
        f"tree_attention 2 x {served.facts.head_size} fp32{window}{softcap}" for window in windows
    ]
    assert found[-1].kernel.startswith(f"head {served.vocab_size} x ")
    assert set(tried) == set(choosing.CANDIDATES)
    for each in found:
        assert (each.shipped, each.chosen, each.reason) == (2, 3, "")
        assert each.seconds == clock


def test_what_is_hardly_faster_is_not_chosen() -> None:
    assert chosen({2: 1.0, 3: 0.98}) == (2, "")
    assert chosen({2: 1.0, 3: 0.90}) == (3, "")


def test_other_bits_are_never_chosen() -> None:
    assert chosen({2: 1.0, 3: 0.5, 4: 0.7}, outputs={3: -0.0}) == (4, "3 gives other bits")
    assert chosen({2: 1.0, 3: 0.5}, outputs={3: float("nan")}) == (2, "3 gives other bits")


def test_a_candidate_that_does_not_run_is_told() -> None:
    error = RuntimeError("out of resource: shared memory\nand more")
    found, reason = chosen({2: 1.0, 3: 0.5}, errors={3: error})
    assert (found, reason) == (2, "3: RuntimeError: out of resource: shared memory")
    found, reason = chosen({2: 1.0, 3: 0.5}, errors={2: error})
    assert (found, reason) == (2, "RuntimeError: out of resource: shared memory")


def test_a_kernel_that_leaves_nothing_open_has_no_choice() -> None:
    assert choose([lambda: (torch.zeros(1),)], lambda _: 1.0) is None


def test_what_is_kept_is_read_at_launch(identities: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stages.num_stages("a kernel", 2, FIRST) == 2
    assert not choosing.kept([StageChoice("a kernel", 2, 3, {2: 1.0, 3: 0.5})], FIRST)
    assert stages.num_stages("a kernel", 2, FIRST) == 3
    assert stages.num_stages("another kernel", 2, FIRST) == 2
    assert stages.num_stages("a kernel", 2, SECOND) == 2
    assert stages.num_stages("a kernel", 2, CPU) == 2
    stages.keep(SECOND, {"a kernel": 5})
    stages.keep(FIRST, {"another kernel": 4})
    assert [stages.num_stages("a kernel", 2, device) for device in (FIRST, SECOND)] == [3, 5]
    assert stages.num_stages("another kernel", 2, FIRST) == 4
    identities[FIRST] = {"device": "Example 0", "driver": "another"}
    stages._kept.cache_clear()
    assert stages.num_stages("a kernel", 2, FIRST) == 2
    with stages.trying(1) as asked:
        assert stages.num_stages("a kernel", 2, SECOND) == 1
    assert asked == {"a kernel": 2}


class OutOfResources(Exception):
    """As Triton's own, which wants numbers."""


def launching(stages_of: list[int], most: int) -> Any:
    """A launch that fails with more stages than ``most``."""

    def launch(num_stages: int) -> None:
        stages_of.append(num_stages)
        if num_stages > most:
            raise OutOfResources("out of resource: shared memory")

    return launch


def test_a_kept_choice_that_is_not_launched_gives_way_to_the_shipped_one(identities: Any) -> None:
    stages.keep(FIRST, {"a kernel": 8})
    tried: list[int] = []
    with pytest.warns(UserWarning, match="keeps 8 stages for a kernel, which cuda:0 does not launch") as warned:
        stages.launched("a kernel", 2, FIRST, launching(tried, 5))
    assert len(warned) == 1
    assert tried == [8, 2]
    stages.launched("a kernel", 2, FIRST, launching(tried, 5))
    assert tried == [8, 2, 2], "it is tried and told once"
    stages.keep(FIRST, {"a kernel": 3})
    stages.launched("a kernel", 2, FIRST, launching(tried, 5))
    assert tried[3:] == [3]


def test_what_fails_as_shipped_or_for_want_of_memory_fails(identities: Any) -> None:
    stages.keep(FIRST, {"a kernel": 8})
    tried: list[int] = []
    with pytest.raises(OutOfResources):
        stages.launched("a kernel", 2, FIRST, launching(tried, 1))
    with pytest.raises(OutOfResources):
        stages.launched("another kernel", 2, FIRST, launching(tried, 1))
    with pytest.raises(OutOfResources), stages.trying(7):
        stages.launched("a kernel", 2, FIRST, launching(tried, 5))
    assert tried == [8, 2, 2, 7]

    def full(num_stages: int) -> None:
        tried.append(num_stages)
        raise MemoryError

    with pytest.raises(MemoryError):
        stages.launched("a kernel", 2, FIRST, full)
    assert tried[4:] == [8]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of rows that are not finite, which a GPU has not
def test_a_kept_choice_that_is_not_launched_costs_no_kernel_and_is_replaced(
    identities: Any, in_triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's choices, on a CPU: attention of the first-use check runs as shipped, and a new choice is kept."""
    tried = launched_stages(monkeypatch, most=5)
    monkeypatch.setattr(choosing, "CANDIDATES", (3,))
    for module in (triton_attention, triton_decode, triton_head):
        monkeypatch.setattr(
            module, "launched", lambda variant, shipped, _, launch: stages.launched(variant, shipped, FIRST, launch)
        )
    engine = Engine(ZOO["llama"].build(), attention="triton")
    facts = engine._model.facts
    group = facts.num_heads // facts.num_kv_heads
    variant = triton_attention._variant(facts.head_size, group, torch.float32, False, False)
    stages.keep(FIRST, {variant: 8})
    with pytest.warns(UserWarning, match="keeps 8 stages for .*it runs as shipped; iclperm doctor chooses anew"):
        assert "given_up" not in engine.numerics
    assert engine.attention == "triton"
    assert 8 in tried
    assert isinstance(engine._model, TreeModel)
    choices = list(choosing.chosen_stages(engine._model, lambda launch: float(len(launch()))))
    assert variant in [choice.kernel for choice in choices]
    assert not choosing.kept(choices, FIRST)
    assert stages.num_stages(variant, 2, FIRST) <= 5


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x00\x01", "Expecting value|invalid|can't decode"),
        (b"[" * 100_000, "nested too deep"),
        (b"[]", "it is not of format 1"),
        (b'{"format": 2, "devices": []}', "it is not of format 1"),
        (b'{"format": 1, "devices": {}}', "it holds no list of devices with their stages"),
        (b'{"format": 1, "devices": [{"is": {}, "stages": {"a kernel": 900}}]}', "it holds no list of devices"),
        (b'{"format": 1, "devices": [{"is": {}, "stages": {"a kernel": true}}]}', "it holds no list of devices"),
    ],
)
def test_a_file_that_is_none_of_ours_is_passed_over_with_a_line(
    content: bytes, reason: str, identities: Any, tmp_path: Path
) -> None:
    path = tmp_path / "cache/iclperm" / stages.NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.warns(UserWarning, match=reason) as warned:
        assert stages.num_stages("a kernel", 2, FIRST) == 2
    assert len(warned) == 1
    assert "\n" not in str(warned[0].message)
    assert stages.num_stages("a kernel", 2, FIRST) == 2, "it is said once"
    stages.keep(FIRST, {"a kernel": 3})
    assert stages.num_stages("a kernel", 2, FIRST) == 3


def test_without_a_place_to_keep_it_the_choice_is_told(
    identities: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    reason = choosing.kept([StageChoice("a kernel", 2, 3, {2: 1.0, 3: 0.5})], FIRST)
    assert reason.startswith("not kept: ")
    assert stages.num_stages("a kernel", 2, FIRST) == 2


def test_a_choice_holds_for_the_sources_that_it_was_made_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Example GPU")
    found = stages.identity.__wrapped__(FIRST)
    assert found.keys() == {"device", "capability", "driver", "torch", "triton", "kernels"}
    assert (found["device"], found["capability"]) == ("Example GPU", "9.0")
    assert len(found["kernels"]) == 64


def test_a_choice_changes_no_bit_of_a_study(in_triton: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = launched_stages(monkeypatch)
    requests = [([1, 2, 3, 4, 5], [6, 7]), ([1, 2, 3], [9])]

    def scored() -> list[float]:
        engine = Engine(ZOO["gemma2"].build(), attention="triton", self_check=False)
        return [float(logprob) for logprob in engine.loglikelihood(requests).logprob]

    shipped, before = scored(), set(tried)
    tried.clear()
    with stages.trying(4):
        assert scored() == shipped
    assert (before, set(tried)) == ({2}, {4})


def launched_stages(monkeypatch: pytest.MonkeyPatch, most: int = stages.MOST_STAGES) -> list[int]:
    """The stages of every launch from now on of the kernels that leave them open; more than ``most`` fail."""
    found: list[int] = []

    class Counting:
        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            def launch(*given: Any, **named: Any) -> Any:
                launching(found, most)(named["num_stages"])
                return self._kernel[grid](*given, **named)

            return launch

    kernels = (
        (triton_attention, "_tree_attention_kernel"),
        (triton_decode, "_attend_items_kernel"),
        (triton_head, "_read_tiles_kernel"),
    )
    for module, name in kernels:
        monkeypatch.setattr(module, name, Counting(getattr(module, name)))
    return found


def chosen(
    clock: dict[int, float], outputs: dict[int, float] | None = None, errors: dict[int, Exception] | None = None
) -> tuple[int, str]:
    """The choice, and what is told, of a kernel that ships with 2 stages; by default each gives 0.0."""
    now = 0

    def launch() -> Sequence[torch.Tensor]:
        nonlocal now
        now = stages.num_stages("a kernel", 2, CPU)
        if now in (errors or {}):
            raise (errors or {})[now]
        if now not in clock:
            raise RuntimeError("not tried")
        return (torch.tensor([(outputs or {}).get(now, 0.0), torch.nan]),)

    found = choose([launch], lambda _: clock[now])
    assert found is not None
    assert found.shipped == 2
    return found.chosen, "; ".join(part for part in found.reason.split("; ") if "not tried" not in part)
