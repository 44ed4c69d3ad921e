"""Each kernel by itself on first use: the check sees every loop that is broken, and torch's way takes its place.

Mutants are the shipped kernel with one line changed, at every shipped size of tiles; without a CUDA device they run in
Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton_interpreter
from triton.runtime.errors import OutOfResources
from zoo import ZOO

from iclperm.engine import kernelcases
from iclperm.engine.engine import Engine
from iclperm.engine.kernelcases import AttentionCase
from iclperm.engine.kernelcheck import KERNELS, kernel_checks
from iclperm.engine.kernels import triton_attention
from iclperm.engine.kernels.rule import AttentionRule
from iclperm.engine.model import TreeModel
from iclperm.engine.plan import Pack
from iclperm.errors import OutOfMemory

triton_interpreter.repair()

Shape = tuple[int, torch.dtype, int, int]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Compute capability, dtype, head dimension and heads of a group: together every size of tiles that is shipped.
SHAPES = [
    (80, torch.bfloat16, 64, 4),
    (80, torch.bfloat16, 128, 7),
    (80, torch.bfloat16, 256, 1),
    (80, torch.bfloat16, 192, 3),
    (90, torch.bfloat16, 64, 2),
    (90, torch.bfloat16, 256, 2),
    (80, torch.float32, 64, 1),
    (80, torch.float32, 128, 2),
    (80, torch.float32, 256, 2),
    (80, torch.float32, 192, 1),
]
PLAIN, SHORT, OPTIONS = (AttentionRule(0.1, *rest) for rest in ((0.0, 0), (30.0, 70), (30.0, 200)))
_LOOP = "acc, top, total, b_q, limit, row, entries, {}, {}, keys, k, v, k_pool, v_pool,"
# What is changed, into what, and the rule under which it must be seen.
MUTANTS: dict[str, tuple[str, str, AttentionRule]] = {
    "whole tiles left out": (_LOOP.format("full_begin", "full_end"), _LOOP.format("full_end", "full_end"), PLAIN),
    "last whole tile left out": (
        _LOOP.format("full_begin", "full_end"),
        _LOOP.format("full_begin", "tl.maximum(full_end - 1, full_begin)"), PLAIN,
    ),
    "whole tiles twice": (_LOOP.format("full_end", "last"), _LOOP.format("full_begin", "last"), PLAIN),
    "tiles at the end left out": (_LOOP.format("full_end", "last"), _LOOP.format("last", "last"), PLAIN),
    "tiles at a window's border left out": (
        _LOOP.format("first", "full_begin"), _LOOP.format("full_begin", "full_begin"), OPTIONS,
    ),
    "first tile of each loop left out": (
        "tl.range(entry_begin, entry_end)", "tl.range(entry_begin + 1, entry_end)", PLAIN,
    ),
    "a tile read again": (
        "entries + 4 * (i_entry + 2), mask=i_entry + 2", "entries + 4 * (i_entry + 1), mask=i_entry + 1", PLAIN,
    ),
    "whole tiles do not raise the total": (
        "total = total * scale + tl.sum(b_p, axis=1)",
        "total = total * scale + (tl.sum(b_p, axis=1) if IS_MASKED else 0.0)", PLAIN,
    ),
    "whole tiles are not rescaled": (
        "b_v, acc * scale[:, None]", "b_v, acc * scale[:, None] if IS_MASKED else acc", PLAIN,
    ),
    "the total is not rescaled": ("total = total * scale +", "total = total +", PLAIN),
    "the softmax's top stays behind": (
        "        top = new_top\n", "        top = origin if IS_MASKED else top\n", PLAIN,
    ),
    "keys of the pack are the pool's": ("in_pack = b_key >= 0", "in_pack = b_key >= 1 << 20", PLAIN),
    "values of the pool one slot on": ("v_pool + (~b_key)", "v_pool + (~b_key + 1)", PLAIN),
    "a row sees what follows it": ("pos[None, :] <= last[:, None]", "pos[None, :] <= last[:, None] + 1", PLAIN),
    "rows see other branches": ("(row >= row_begin) & (row < row_end)", "row >= 0", PLAIN),
    "a window one longer": ("last[:, None] - pos[None, :] < window", "last[:, None] - pos[None, :] <= window", OPTIONS),
    "no soft-cap": ("score = hyperbolic_tangent(score * to_unit)", "score = score * to_unit", OPTIONS),
    "what is not finite spreads": ("b_v = tl.where(is_broken[:, None], 0.0, b_v).to(b_v.dtype)", "b_v = b_v", PLAIN),
}  # fmt: skip


def mutated(old: str, new: str, folder: Path) -> ModuleType:
    """The module of the kernel with every ``old`` a ``new``."""
    source = Path(triton_attention.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1, old
    path = folder / "mutant.py"
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"mutant_{abs(hash((old, new)))}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def verdict(module: Any, shape: Shape, rule: AttentionRule, monkeypatch: pytest.MonkeyPatch) -> bool:
    """What the check says of a module's kernel in the tiles of a shape; asserts that this kernel ran."""
    arch, dtype, head_size, group = shape
    launched: list[int] = []

    def prepare(pack: Pack, *_: object) -> Any:
        attention = module.TritonAttention(pack, arch)
        launched.append(arch)
        return attention

    monkeypatch.setattr(kernelcases, "prepare", prepare)
    error = AttentionCase.of(300, group, 1, head_size, dtype).error(rule, "triton", DEVICE)
    assert launched == [arch]
    return error <= KERNELS[0].tolerance[dtype]


def test_the_shapes_are_all_that_is_shipped() -> None:
    def tiles(launch: triton_attention.Launch) -> tuple[int, int]:
        return launch.lines, launch.keys

    tables = (triton_attention._LAUNCHES, triton_attention._MASKED_LAUNCHES)
    shipped = {tiles(launch) for table in tables for row in table.values() for launch in row.values()}
    assert {tiles(triton_attention._launch(size, dtype, arch)) for arch, dtype, size, _ in SHAPES} == shipped


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_shipped_kernel_passes(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict(triton_attention, shape, PLAIN, monkeypatch)
    assert verdict(triton_attention, shape, SHORT, monkeypatch)
    assert verdict(triton_attention, shape, OPTIONS, monkeypatch)


# What NumPy says in the interpreter of numbers that a broken kernel makes, and a GPU does not.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_kernel_is_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At one size of tiles each, in turn.

    ``TRITON_INTERPRET=1 python tests/test_kernelcheck.py`` runs every mutant at every size.
    """
    old, new, rule = MUTANTS[name]
    shape = SHAPES[list(MUTANTS).index(name) % len(SHAPES)]
    assert not verdict(mutated(old, new, tmp_path), shape, rule, monkeypatch), shape


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_of_a_cpu_pass(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    attend = kernelcases.prepare
    monkeypatch.setattr(kernelcases, "prepare", lambda *given: ran.append(given[2]) or attend(*given))
    checks = list(kernel_checks(TreeModel(ZOO[name].build().to(dtype))))
    assert [check.name for check in checks] == [kernel.name for kernel in KERNELS]
    assert all(check.is_right and not check.reason and 0 <= check.error <= check.tolerance for check in checks), checks
    assert set(ran) == {"native"}


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


def main() -> None:
    """Every mutant at every size of tiles; what is not seen is named."""
    seen, missed = 0, []
    for name, (old, new, rule) in MUTANTS.items():
        for shape in SHAPES:
            with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
                if verdict(mutated(old, new, Path(folder)), shape, rule, patch):
                    missed.append(f"{name} at {shape}")
                else:
                    seen += 1
    print(f"{seen} of {seen + len(missed)} seen ({len(MUTANTS)} mutants, {len(SHAPES)} shapes)", *missed, sep="\n")


if __name__ == "__main__":
    main()
