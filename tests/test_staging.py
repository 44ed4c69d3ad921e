"""A device of its own is kept busy: one upload a pack, nothing waited for, results read one pack late.

The device is the CPU's memory, reached through a link that says it goes on by itself and records what goes over it;
kernels run in Triton's interpreter. What would make a GPU and its host wait for each other is caught as torch sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import triton_interpreter
from devices import DEVICE
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor
from zoo import ZOO

from iclperm.engine import Engine, executor, plan_product
from iclperm.engine.kernels import linear, rowwise
from iclperm.engine.kernels.packed_weights import PackedWeights
from iclperm.engine.link import Array, DeviceLink
from iclperm.engine.model import TreeModel

triton_interpreter.repair()

CPU = torch.device("cpu")
# Operations after which a host knows a number that a device has made.
_WAITING = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::is_nonzero",
    "aten::equal",
    "aten::repeat_interleave.Tensor",
    "aten::repeat_interleave.self_Tensor",
}
# Calls that move numbers between host and device, which the link alone may make.
_MOVING = {
    "cpu",
    "numpy",
    "tolist",
    "item",
    "from_numpy",
    "tensor",
    "cuda",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
}


class RecordedLink(DeviceLink):
    """Says that its device goes on by itself; ``log`` has what went over it, in order."""

    def __init__(self) -> None:
        super().__init__([CPU])
        self.is_asynchronous = True
        self.log: list[str] = []

    def upload(self, arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
        with unwatched():
            if arrays:
                self.log.append("upload")
            return [torch.from_numpy(array.copy()) for array in arrays]

    def download(self, tensors: Sequence[torch.Tensor], finish: Callable[..., Any]) -> Callable[[], Any]:
        self.log.append("launch")

        def result() -> Any:
            self.log.append("read")
            with unwatched():
                return finish(*(tensor.numpy() for tensor in tensors))

        return result

    def mark(self) -> float:
        return 0.0

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


_watched = [True]


@contextmanager
def unwatched() -> Iterator[None]:
    """Within, numbers go over the link, or a kernel runs."""
    before, _watched[0] = _watched[0], False
    try:
        yield
    finally:
        _watched[0] = before


class Waits(TorchDispatchMode):
    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        whole = func.name()
        name = whole.split(".")[0]
        by_mask = name in ("aten::index", "aten::index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if _watched[0] and (not _WAITING.isdisjoint((name, whole)) or by_mask):
            self.said.append(name)
        return func(*args, **(kwargs or {}))


class Moves(TorchFunctionMode):
    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        places = [*args[1:], (kwargs or {}).get("device")]
        is_to_host = name == "to" and "cpu" in places  # by name: where a tensor lies has no name
        if _watched[0] and (name in _MOVING or is_to_host):
            self.said.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What would wait for a device while packs are scored."""
    said = watch(monkeypatch, "stage", "run", "read")
    monkeypatch.setattr(executor, "_run_packs", watching(executor._run_packs, said))
    return said


def watch(monkeypatch: pytest.MonkeyPatch, *steps: str) -> list[str]:
    """Everything runs in Triton from now on; what would wait for a device in these methods of the model is listed."""
    said: list[str] = []
    kernel = GridExecutor.__call__

    def unseen(self: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        with unwatched():
            return kernel(self, *args, **kwargs)

    from_numpy = torch.from_numpy

    def heard(array: Any) -> torch.Tensor:
        if _watched[0] and torch.overrides._len_torch_function_stack():
            said.append("from_numpy")
        return from_numpy(array)

    monkeypatch.setattr(torch, "from_numpy", heard)
    monkeypatch.setattr(GridExecutor, "__call__", unseen)
    for step in steps:
        monkeypatch.setattr(TreeModel, step, watching(getattr(TreeModel, step), said))
    monkeypatch.setattr(linear, "FEW_ROWS", 0)  # the library multiplies on a device
    monkeypatch.setattr(TreeModel, "_row_wise_overrides", lambda model: [])  # which stand in on a CPU alone
    monkeypatch.setattr(PackedWeights, "of", lambda *_: None)  # as are these
    monkeypatch.setattr(rowwise, "runs_triton", lambda x: True)
    return said


def watching(do: Callable[..., Any], said: list[str]) -> Callable[..., Any]:
    def watched(*args: Any) -> Any:
        with Waits(said), Moves(said):
            return do(*args)

    return watched


def plan_of_packs() -> Any:
    """A unit of several packs, some without a scored row, with keys and values that cross their borders."""
    rng = np.random.default_rng(0)
    ids = rng.integers(3, 90, 80).tolist()
    contexts = [ids[:7], ids[:19], ids[:19] + ids[40:46]]
    return plan_product(contexts, [ids[50:56], ids[56:61], ids[61:66], ids[66:73]], [[3], [4, 5]], pack_tokens=16)


@pytest.mark.parametrize(
    ("name", "layers"),
    [("llama", "fused"), ("gemma3", "fused"), ("qwen2-window", "fused"), ("gpt-neox", "transformers")],
)
def test_a_pack_is_one_upload_and_is_read_when_the_next_one_runs(name: str, layers: str, waits: list[str]) -> None:
    plan, model = plan_of_packs(), ZOO[name].build()
    engine = Engine(model, attention="triton", self_check=False)
    expected = [result.logprob for result in engine.execute(plan)]
    waits.clear()  # where a device does not go on by itself, waiting costs nothing
    link = engine._model.link = RecordedLink()
    for call in range(2):  # the first shows what packs ask for
        link.log.clear()
        found = [result.logprob for result in engine.execute(plan)]
        assert engine.layers == layers
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
        num_packs = engine.report.num_packs
        assert num_packs > 5
        assert link.log.count("read") == link.log.count("launch") > 3
        assert link.log.count("upload") <= num_packs
        assert call == 0 or link.log.count("upload") == num_packs
    assert not waits
    assert read_late(link.log)
    assert engine.report.seconds["host"] > 0


def _copied(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.to("cpu", copy=True)


def _by_counts(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.repeat_interleave(torch.ones(len(hidden), dtype=torch.int64), dim=0)


@pytest.mark.parametrize(("wait", "name"), [(_copied, "to"), (_by_counts, "aten::repeat_interleave")])
def test_ways_of_waiting_are_seen(wait: Any, name: str, waits: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = TreeModel.run
    monkeypatch.setattr(TreeModel, "run", lambda model, tree: wait(run(model, tree)))  # outside what is watched of it
    engine = Engine(ZOO["llama"].build(), attention="triton", self_check=False)
    engine._model.link = RecordedLink()
    list(engine.execute(plan_of_packs()))
    assert {*waits} == {name}


def test_memory_that_runs_out_behind_an_unread_pack_costs_no_answer(
    waits: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unit starts again in smaller packs while a result of the first try is still on its way."""
    engine = Engine(ZOO["llama"].build(), attention="triton", self_check=False)
    engine.row_invariant = True
    expected = [result.logprob for result in engine.execute(plan_of_packs())]
    link = engine._model.link = RecordedLink()
    run, failed = TreeModel.run, list[int]()

    def scarce(model: TreeModel, tree: Any) -> torch.Tensor:
        if len(tree.pack) == 16 and link.log.count("launch") > link.log.count("read"):
            failed.append(len(tree.pack))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(model, tree)

    monkeypatch.setattr(TreeModel, "run", scarce)
    found = [result.logprob for result in engine.execute(plan_of_packs())]
    assert failed
    assert engine.report.num_splits == len(failed)
    assert all(np.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(found, expected, strict=True))


def test_a_call_that_is_left_early_leaves_nothing_behind(waits: list[str]) -> None:
    engine = Engine(ZOO["llama"].build(), attention="triton", self_check=False)
    engine._model.link = RecordedLink()
    plan = plan_of_packs().repacked(8)
    first = next(iter(engine.execute(plan)))
    again = list(engine.execute(plan))
    assert np.array_equal(first.logprob, again[0].logprob)


def read_late(log: list[str]) -> bool:
    """Whether every result but the last was read after the next pack had been launched."""
    launched = read = 0
    total = log.count("launch")
    for entry in log:
        launched, read = launched + (entry == "launch"), read + (entry == "read")
        if entry == "read" and launched < min(read + 1, total):
            return False
    return True


@pytest.mark.gpu
def test_what_goes_to_a_device_comes_back() -> None:
    link = DeviceLink([DEVICE])
    assert link.is_asynchronous
    sent = [np.arange(5), np.ones((3, 7), np.float32), np.empty((0, 4), np.int32), np.array([True, False])]
    begin = link.mark()
    there = link.upload(sent, DEVICE)
    assert all(tensor.device == DEVICE and tensor.data_ptr() % 16 == 0 for tensor in there)
    wait = link.download([tensor.clone() for tensor in there], lambda *arrays: arrays)
    end = link.mark()
    for tensor in there:  # what is told to a device afterwards comes too late
        tensor.zero_()
    back = wait()
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(sent, back, strict=True))
    assert link.seconds(begin, end) > 0


def test_what_waits_is_seen(waits: list[str]) -> None:
    x = torch.arange(3.0)
    with Waits(waits), Moves(waits):
        assert x.sum().item() == 3.0
        x[x > 1]
        x.tolist()
        x.cpu()
        torch.from_numpy(np.ones(1))
    assert {"item", "aten::index", "tolist", "cpu", "from_numpy"} <= set(waits)
    assert read_late(["launch", "launch", "read", "read"])
    assert not read_late(["launch", "read", "launch", "read"])


class SlowEvent:
    """A point on the slowest device there may be, which goes on only where somebody waits; torch refuses times of
    points that were not passed."""

    passed = -1

    def __init__(self, number: int) -> None:
        self.number = number

    def synchronize(self) -> None:
        SlowEvent.passed = max(SlowEvent.passed, self.number)

    def elapsed_time(self, other: SlowEvent) -> float:
        assert max(self.number, other.number) <= SlowEvent.passed, "both events must be completed"
        return 1.0


@pytest.mark.parametrize("pack_tokens", [16, 64, 4096])
def test_times_are_asked_of_what_was_passed(pack_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of packs that nothing is read of: long prompts, and contexts without a query."""
    SlowEvent.passed, made = -1, []

    def mark(self: Any) -> SlowEvent:
        made.append(SlowEvent(len(made)))
        return made[-1]

    monkeypatch.setattr(RecordedLink, "mark", mark)
    monkeypatch.setattr(RecordedLink, "seconds", DeviceLink.seconds)
    engine = Engine(ZOO["llama"].build(), pack_tokens=pack_tokens, self_check=False)
    engine._model.link = RecordedLink()  # type: ignore[union-attr]
    prompts = [[3 + (7 * n + place) % 60 for place in range(50)] for n in range(3)]
    expected = Engine(ZOO["llama"].build(), self_check=False).generate(prompts, 4)
    texts = engine.generate(prompts, 4)
    assert [ids.tolist() for ids in texts.token_ids] == [ids.tolist() for ids in expected.token_ids]
    engine.loglikelihood([(prompt, [5]) for prompt in prompts])
    assert len(made) > 4
    assert engine.report.seconds["forward"] > 0
