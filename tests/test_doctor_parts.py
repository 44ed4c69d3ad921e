"""What a diagnosis is made of, piece by piece: what it cuts from texts, what it sees of a machine, and packs' times."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from zoo import ZOO

from iclperm.engine.doctor import machine, packs, privacy
from iclperm.engine.doctor.diagnosis import Diagnosis, ModelSummary
from iclperm.engine.doctor.machine import allocated
from iclperm.engine.doctor.packs import PackSeconds, enough
from iclperm.engine.doctor.privacy import first_line, without_names
from iclperm.engine.model import TreeModel


@pytest.fixture(autouse=True)
def few_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones."""
    monkeypatch.setattr(packs, "SIZES", (256, 512))
    monkeypatch.setattr(packs, "_FIRST_ON_A_CPU", 64)


class TestPrivacy:
    @pytest.mark.parametrize(
        ("said", "told"),
        [
            ("/home/bob/lib/python3/x.py:12: oops", ".../x.py:12: oops"),
            ("[Errno 2] No such file: '/data/a b/c d.so'", "[Errno 2] No such file: '.../c d.so'"),
            ("C:\\Users\\bob\\x.txt is gone", ".../x.txt is gone"),
            ("at \\\\server\\share\\x", "at .../x"),
            ("~/mine/x, /a/b.so:/home/bob/c.so", ".../x, .../b.so:.../c.so"),
            ("see https://a.b/c/d of Qwen/Qwen2.5-0.5B", "see https://a.b/c/d of Qwen/Qwen2.5-0.5B"),
            ("http://me:word@proxy:80/x", "http://proxy:80/x"),
            ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,1", "GPU-***,1"),
            ("token hf_abcdefghijkl was refused", "token *** was refused"),
            ("50/60 and/or\n\tmore `x`", "50/60 and/or more 'x'"),
            ("\x1b[2J", "\\x1b[2J"),
        ],
    )
    def test_texts_are_cut(self, said: str, told: str) -> None:
        assert without_names(said) == told

    def test_names_are_cut(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("getpass.getuser", lambda: "alice")
        monkeypatch.setattr("platform.node", lambda: "node17.lab.example")
        privacy._names.cache_clear()
        try:
            said = "alice@node17 and Alice's malice on node17.lab.example"
            assert without_names(said) == "USER@HOST and USER's malice on HOST"
        finally:
            privacy._names.cache_clear()

    def test_an_error_is_one_short_line(self) -> None:
        assert first_line(ValueError("a\nb")) == "ValueError: a"
        assert first_line(ValueError()) == "ValueError: no reason given"
        assert len(first_line(ValueError("x" * 5000))) < 300


class TestMachine:
    @pytest.mark.parametrize(
        ("total", "most", "expected"),
        [
            (80 << 30, 80 << 30, [80, 80]),
            (80 << 30, 30 << 30, [30, 80]),
            (64 << 30, 48 << 30, [48, 64]),
            (0, 0, [0, 0]),
        ],
    )
    def test_what_can_be_allocated(self, total: int, most: int, expected: list[int]) -> None:
        """In GiB, to within the smallest block; all is given back."""
        alive: list[int] = []

        class Held:
            def __init__(self, size: int) -> None:
                if size > most or sum(alive) + size > total:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                self.size = size
                alive.append(size)

            def __del__(self) -> None:
                if hasattr(self, "size"):
                    alive.remove(self.size)

        largest, together = allocated(Held, 80 << 30)
        assert largest <= most
        assert together <= total
        assert [round(size / (1 << 30), 1) for size in (largest, together)] == expected
        assert alive == []

    def test_memory_that_another_process_takes_meanwhile_is_left_out(self) -> None:
        """Between finding that a block fits and taking it."""
        asked: list[int] = []

        def shrinking(size: int) -> object:
            asked.append(size)
            if size > (1 << 30) - (len(asked) > 1) * (200 << 20):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return object()

        largest, _ = allocated(shrinking, 1 << 30)
        assert 700 << 20 < largest <= 824 << 20
        assert asked[:2] == [1 << 30, 1 << 30]

    def test_an_allocator_that_is_broken_is_an_error(self) -> None:
        def broken(_: int) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        with pytest.raises(RuntimeError, match="illegal"):
            allocated(broken, 1 << 30)

    def test_a_gpu_whose_driver_fails_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        about = SimpleNamespace(name="Example GPU", major=9, minor=0, multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 << 30, 80 << 30))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        found = machine.look()
        gpu, host = found.devices
        assert (gpu.name, gpu.device, gpu.capability, gpu.multiprocessors) == ("Example GPU", "cuda:0", "9.0", 132)
        assert (gpu.total, gpu.free, gpu.allocatable, gpu.shared_memory) == (80 << 30, 70 << 30, 0, None)
        assert gpu.reason
        assert (host.device, found.no_gpu) == ("cpu", "")
        lines = Diagnosis(found).part("machine")
        assert lines[1] == "  Example GPU (cuda:0), capability 9.0, 132 multiprocessors"
        assert lines[2].startswith("    memory 80.00 GiB, 70.00 GiB free; allocated 0.0 MiB, in one block 0.0 MiB (")

    def test_flags_that_cannot_be_read_are_told(self) -> None:
        def failing() -> object:
            raise RuntimeError("mixed APIs")

        assert machine._read(failing) == "not known: RuntimeError: mixed APIs"
        assert machine._read(lambda: True) == "on"
        assert machine._read(lambda: "high") == "high"


class TestPacks:
    def test_sizes_go_on_while_something_is_gained(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(packs, "SIZES", (64, 128, 256, 512, 1024))
        monkeypatch.setattr(packs, "_FIRST_ON_A_CPU", 32)
        monkeypatch.setattr(
            packs, "_timed", lambda _, plan: PackSeconds(plan.pack_tokens, plan.pack_tokens, 1e-6 * plan.pack_tokens)
        )
        found = list(packs.timed_packs(TreeModel(ZOO["llama"].build())))
        assert [each.size for each in found] == [32, 64, 128, 256]
        assert found[-1].reason == "not run: nothing was gained from 32 tokens on"
        assert enough(found) is found[0]

    def test_what_would_take_long_is_not_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(packs, "_timed", lambda _, plan: PackSeconds(plan.pack_tokens, plan.pack_tokens, 30.0))
        found = list(packs.timed_packs(TreeModel(ZOO["llama"].build())))
        assert [each.reason for each in found] == ["", "not run: it would take about 420 s"]
        assert Diagnosis(packs=found).verdict == ""

    def test_what_has_no_room_is_not_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(packs, "free_bytes", lambda _: 1 << 20)
        (found,) = packs.timed_packs(TreeModel(ZOO["llama"].build()))
        assert re.fullmatch(r"no room: [\d.]+ MiB are foretold beside the weights, 1\.0 MiB are free", found.reason)
        assert enough([found]) is None

    def test_memory_that_runs_out_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(packs, "execute", full)
        found = list(packs.timed_packs(TreeModel(ZOO["llama"].build())))
        assert [each.reason for each in found] == ["memory ran out"]

    def test_transformers_layers_have_small_packs_on_a_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(packs, "SIZES", (2048,))
        found = list(packs.timed_packs(TreeModel(ZOO["gpt2"].build())))
        assert found[-1].reason == "packs of these layers have 1,024 tokens at most on this device"

    def test_the_verdict_names_the_size_to_take(self) -> None:
        on_gpu = [
            PackSeconds(4096, 4000, 0.040, 0.039, 0.020, fastest=0.039, slowest=0.041),
            PackSeconds(8192, 8000, 0.050, 0.045, 0.040, fastest=0.049, slowest=0.051),
            PackSeconds(16384, 16000, 0.100, 0.045, 0.090, fastest=0.099, slowest=0.101),
        ]
        found = Diagnosis(model=replace(summary(), pack_tokens=4096), packs=on_gpu)
        assert found.verdict == (
            "Packs of more than 8,000 tokens gain nothing. --pack-tokens 8192 takes 38% less time a token than the "
            "usual 4,096. The host is busy for 90% of a pack's time: the device may wait for it."
        )
        lines = found.part("packs")
        header = ["packs of", "seconds", "of them on the host", "on the device", "microseconds a token"]
        assert re.split("  +", lines[1].strip()) == header
        assert lines[2].split() == ["4,000", "0.0400", "0.0390", "0.0200", "10.00"]

    def test_what_may_be_noise_is_no_advice(self) -> None:
        """The faster pass of the usual size is as fast as the slower one of the other."""
        found = Diagnosis(
            model=replace(summary(), pack_tokens=4096),
            packs=[
                PackSeconds(4096, 4000, 0.040, fastest=0.030, slowest=0.041),
                PackSeconds(8192, 8000, 0.060, fastest=0.055, slowest=0.061),
            ],
        )
        assert found.verdict == ""

    def test_packs_are_timed_some_times(self) -> None:
        model = TreeModel(ZOO["llama"].build())
        timed = packs._timed(model, packs.product_of(model, 64, 1))
        assert timed.seconds is not None
        assert timed.fastest is not None
        assert timed.slowest is not None
        assert 0 < timed.fastest <= timed.seconds <= timed.slowest
        assert timed.fastest < timed.slowest, "one pass alone tells nothing of chance"

    def test_packs_that_hold_no_more_are_not_timed_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A short context window and few token ids: there are no more distinct queries."""
        monkeypatch.setattr(packs, "SIZES", (4096, 8192))
        model = TreeModel(ZOO["llama"].build())
        model.max_positions = 4
        monkeypatch.setattr(TreeModel, "vocab_size", 50)
        found = list(packs.timed_packs(model))
        assert found[-1].reason.startswith("not run: what is asked of this model fills no packs of more than ")
        assert all(each.tokens < 100 for each in found if each.seconds is not None)


def summary() -> ModelSummary:
    return ModelSummary.of(TreeModel(ZOO["llama"].build()), "an example")
