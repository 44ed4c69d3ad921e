"""Each kernel by itself on first use: the check sees every loop that is broken, and torch's way takes its place.

Without a CUDA device the mutants (`kernel_mutants`) run in Triton's interpreter.
"""

from __future__ import annotations

import ast
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton_interpreter
from devices import DEVICE
from kernel_mutants import MUTANTS, OPTIONS, PLAIN, SHAPES, SHIPPED, in_turn
from rowwise_mutants import WIDTHS
from triton.runtime.errors import OutOfResources
from zoo import ZOO

from iclperm import _core
from iclperm.engine import decodecases, kernelcases
from iclperm.engine.engine import Engine
from iclperm.engine.kernelcheck import KERNELS, kernel_checks
from iclperm.engine.kernels import launching, triton_attention, triton_rowwise
from iclperm.engine.kernels.attention import prepare
from iclperm.engine.kernels.launching import DECODE_ATTENTION
from iclperm.engine.kernels.rule import AttentionRule, LayerStates, PackAttention
from iclperm.engine.model import TreeModel
from iclperm.errors import OutOfMemory

triton_interpreter.repair()

# What NumPy says in the interpreter of numbers that a broken kernel makes, and a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_every_kernel_has_mutants() -> None:
    assert list(MUTANTS) == list(SHIPPED) == [kernel.name for kernel in KERNELS]


@pytest.mark.parametrize("kernel", MUTANTS)
def test_every_mutant_breaks_one_place_of_what_is_shipped(kernel: str, tmp_path: Path) -> None:
    """Those that a run of all leaves out, too, which nothing else would notice when a kernel changes."""
    for mutant in MUTANTS[kernel]:
        mutant.build(tmp_path)


def test_every_kernel_that_is_launched_is_checked() -> None:
    """By name: what is launched under a name that no check has would run unchecked."""
    launched = set()
    for path in Path(triton_attention.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "launching":
                (name, _) = node.args
                assert isinstance(name, ast.Name)
                launched.add(getattr(launching, name.id))
    assert launched == {kernel.name for kernel in KERNELS}


def test_row_kernels_are_checked_on_every_card() -> None:
    """What a head reads lies on one card; layers, and so norms, rotations and gates, on all."""
    model = TreeModel(ZOO["llama"].build())
    rowwise = {
        kernel.name: kernel for kernel in KERNELS if kernel.name in (launching.NORM, launching.ROTATION, launching.GATE)
    }
    assert len(rowwise) == 3
    of_one = {name: len([*kernel.errors(model, 16)]) for name, kernel in rowwise.items()}
    model.devices = [*model.devices, *model.devices]
    assert {name: len([*kernel.errors(model, 16)]) for name, kernel in rowwise.items()} == {
        name: 2 * number for name, number in of_one.items()
    }


def test_the_shapes_are_all_that_is_shipped() -> None:
    def tiles(launch: triton_attention.Launch) -> tuple[int, int]:
        return launch.lines, launch.keys

    tables = (triton_attention._LAUNCHES, triton_attention._MASKED_LAUNCHES)
    shipped = {tiles(launch) for table in tables for row in table.values() for launch in row.values()}
    assert {tiles(triton_attention._launch(size, dtype, arch)) for arch, dtype, size, _ in SHAPES} == shipped
    blocks = {triton_rowwise._norm_blocks(width)["BLOCK"] for width in WIDTHS}
    assert {32, 64, triton_rowwise._WIDEST_BLOCK} <= blocks


@pytest.mark.parametrize("kernel", SHIPPED)
def test_the_shipped_kernel_passes(kernel: str) -> None:
    """At sites in turn; ``python tests/test_kernelcheck.py`` tries all."""
    for module, site in SHIPPED[kernel][:: 5 if kernel.endswith("attention") else 4]:
        assert site.is_right(module), site.name


def test_copies_of_a_case_are_held_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, whose other cases come once."""
    shape = SHAPES[0]
    case = kernelcases.AttentionCase.of(70, shape[3], 1, shape[2], shape[1], (9, 5))
    tripled = case.copied_to(3 * case.visits[-1][1] + 1)
    assert tripled.copies == 3
    monkeypatch.setattr(kernelcases, "prepare", lambda pack, *_: triton_attention.TritonAttention(pack, shape[0]))
    for rule in (PLAIN, OPTIONS):
        whole, narrow = tripled.attended(rule, "triton", DEVICE)
        assert len(whole) >= 3 * case.visits[-1][1]
        assert len(narrow) >= 2 * case.visits[-1][1]
        assert tripled.error(rule, "triton", DEVICE) == case.error(rule, "triton", DEVICE) <= 8e-3


@pytest.mark.parametrize("num_kv", [2, 1, 3, 8])
def test_of_any_number_of_heads_each_is_compared(num_kv: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's first-use check has two heads of keys and values; a GPU's has as many as the model."""
    broken_head: list[int] = []

    def breaking(attend: PackAttention) -> PackAttention:
        def attended(states: LayerStates, rule: AttentionRule) -> torch.Tensor:
            out = attend(states, rule)
            for head in broken_head:
                out[:, 2 * head] += 1.0
            return out

        return attended

    case = kernelcases.AttentionCase.of(40, 2 * num_kv, num_kv, 16, torch.float32, (9, 5))
    of_tree = case.copied_to(2 * case.visits[-1][1])
    of_steps = decodecases.DecodeCase.of(40, 2 * num_kv, num_kv, 16, torch.float32, 3)
    prepared = decodecases.prepare
    monkeypatch.setattr(
        kernelcases, "prepare", lambda pack, *_: breaking(triton_attention.TritonAttention(pack, SHAPES[0][0]))
    )
    monkeypatch.setattr(decodecases, "prepare", lambda *given: breaking(prepared(*given)))
    errors = [lambda: of_tree.error(PLAIN, "triton", DEVICE), lambda: of_steps.error(PLAIN, DEVICE)]
    assert all(error() <= 1e-4 for error in errors)
    for broken_head[:] in {(0,), (num_kv // 2,), (num_kv - 1,)}:
        assert all(error() > 1e-2 for error in errors)


@pytest.mark.parametrize("num_kv", [1, 2, 5, 8, 40])
def test_heads_come_up_in_turn(num_kv: int) -> None:
    compared = [kernelcases.compared_heads(number, num_kv, 2) for number in range(20)]
    assert set(torch.cat(compared).tolist()) == set(range(num_kv))
    assert all(each.unique().numel() == each.numel() == min(2, num_kv) for each in compared)


@pytest.mark.parametrize(
    ("ours", "theirs", "bound"),
    [
        (1.0, torch.nan, 1.0),
        (torch.nan, 1.0, 1.0),
        (torch.inf, 1.0, 1.0),
        (1.0, torch.inf, torch.inf),
        (-torch.inf, torch.inf, torch.inf),
        (1.0, 2.0, torch.nan),
        (1.0, 2.0, 0.0),
    ],
)
def test_what_is_no_number_is_no_small_error(ours: float, theirs: float, bound: float) -> None:
    def error(*given: float) -> float:
        return kernelcases.largest_error(*(torch.tensor([0.5, each], dtype=torch.float64) for each in given))

    assert error(ours, theirs, bound) == torch.inf
    assert error(theirs, theirs, bound) == 0.0


@pytest.mark.parametrize(
    ("kernel", "number"),
    [(kernel, n) for kernel in MUTANTS for n in range(0, len(MUTANTS[kernel]), 3 if kernel == DECODE_ATTENTION else 1)],
)
def test_a_broken_kernel_is_seen(kernel: str, number: int, tmp_path: Path) -> None:
    """At one launch size each, in turn, of decoding's a third; ``python tests/test_kernelcheck.py`` tries every mutant
    at every size."""
    mutant, site = list(in_turn(kernel))[number]
    assert not site.is_right(mutant.build(tmp_path)), (mutant.name, site.name)


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "glm4", "cohere2-window", "starcoder2-window", "phi"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernels_of_a_cpu_pass(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def counted(*given: Any) -> PackAttention:
        ran.append(given[2])
        return prepare(*given)

    monkeypatch.setattr(kernelcases, "prepare", counted)
    model = ZOO[name].build()
    checks = list(kernel_checks(TreeModel(model if dtype == torch.float32 else model.bfloat16()), 1000))
    is_centred = name in ("cohere2-window", "starcoder2-window", "phi")
    others = {DECODE_ATTENTION, launching.NORM if is_centred else launching.LAYER_NORM}
    assert [check.name for check in checks] == [kernel.name for kernel in KERNELS if kernel.name not in others]
    assert all(check.is_right and not check.reason and 0 <= check.error <= check.tolerance for check in checks), checks
    assert set(ran) == {"native"}


@pytest.mark.parametrize(
    "kernel", ["tree attention", "narrowed", "RMS norm", "layer norm", "rotation", "gated activation", "head"]
)
def test_rows_that_only_a_whole_pack_has_are_looked_at(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong from row 900 on is seen in packs of 2,000 tokens, which no case has by itself."""
    from_row, ran = 900, []

    def broken(out: Any) -> None:
        if len(out) > from_row:
            ran.append(len(out))
            out[from_row:] = 0

    def attends(*given: Any, query_rows: Any, **options: Any) -> None:
        core.tree_attention(*given, query_rows=query_rows, **options)
        if (query_rows is None) == (kernel == "tree attention"):
            broken(given[5])

    def reads(*given: Any, **options: Any) -> Any:
        found = core.head_rows(*given, **options)
        broken(found[1])
        return found

    def in_rows(name: str, place: int) -> Any:
        def call(*given: Any, **options: Any) -> None:
            getattr(core, name)(*given, **options)
            broken(given[place])

        return call

    core = SimpleNamespace(**vars(_core))
    changed = {
        "tree attention": {"tree_attention": attends},
        "narrowed": {"tree_attention": attends},
        "RMS norm": {"rms_norm": in_rows("rms_norm", 2)},
        "layer norm": {"layer_norm": in_rows("layer_norm", 2)},
        "rotation": {"rotate": in_rows("rotate", 0)},
        "gated activation": {"activate": in_rows("activate", 2)},
        "head": {"head_rows": reads},
    }[kernel]
    for name, replacement in changed.items():
        monkeypatch.setattr(_core, name, replacement)
    model = TreeModel(ZOO["phi" if kernel == "layer norm" else "llama"].build())
    name = "tree attention" if kernel == "narrowed" else kernel
    few, many = ({each.name: each.is_right for each in kernel_checks(model, rows)} for rows in (1, 2000))
    assert ran
    assert all(few.values())
    assert many == {**few, name: False}


class Broken:
    """In place of the attention that a check prepares: it fails as a driver, a compiler or a kernel does."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def __call__(self, states: Any, rule: AttentionRule) -> torch.Tensor:
        if self._error is not None:
            raise self._error
        return torch.zeros_like(states.q)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OutOfResources(300_000, 101_376, "shared memory"), "OutOfResources: out of resource: shared memory"),
        (RuntimeError("PTXAS error\x1b[0m\nand more"), "RuntimeError: PTXAS error"),
        (None, "its numbers are not those of the reference"),
    ],
)
def test_another_way_takes_the_place_of_what_fails(
    error: Exception | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernelcases, "prepare", lambda *_: Broken(error))
    model = ZOO["llama"].build()
    expected = Engine(model, attention="torch").loglikelihood([([1, 2, 3], [4, 5])])
    engine = Engine(model)
    with pytest.warns(UserWarning, match="iclperm's tree attention kernel cannot be used for 'llama' on cpu") as warned:
        scores = engine.loglikelihood([([1, 2, 3], [4, 5])])
    assert len(warned) == 1
    (line,) = str(warned[0].message).splitlines()
    assert said in line
    assert "\x1b" not in line
    assert engine.numerics["attention"] == "torch"
    assert engine.numerics["given_up"] == ["tree attention kernel"]
    assert scores.logprob.tolist() == expected.logprob.tolist()


def test_memory_that_runs_out_is_not_a_broken_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernelcases, "prepare", lambda *_: Broken(torch.OutOfMemoryError("CUDA out of memory")))
    engine = Engine(ZOO["llama"].build())
    with pytest.raises(OutOfMemory):
        engine.loglikelihood([([1, 2, 3], [4, 5])])


def main(kernels: list[str]) -> None:
    """Every mutant at every launch size, a line each as it is done; what is not seen is named."""
    for kernel in kernels or list(MUTANTS):
        wrong = [site.name for module, site in SHIPPED[kernel] if not site.is_right(module)]
        print(f"{kernel}: {len(SHIPPED[kernel]) - len(wrong)} of {len(SHIPPED[kernel])} shipped cases pass", *wrong)
        seen = total = 0
        for mutant in MUTANTS[kernel]:
            with tempfile.TemporaryDirectory() as folder:
                broken = mutant.build(Path(folder))
                missed = [site.name for site in mutant.sites if site.is_right(broken)]
            total += len(mutant.sites)
            seen += len(mutant.sites) - len(missed)
            print(
                f"  {mutant.name}: {len(mutant.sites)} sizes,", "not seen at" if missed else "seen", *missed, flush=True
            )
        print(f"{kernel}: {seen} of {total} seen ({len(MUTANTS[kernel])} mutants)")


if __name__ == "__main__":
    main(sys.argv[1:])
