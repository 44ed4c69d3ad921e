"""Triton's kernels as they ship, compiled for every architecture: nothing spills, and all fits into shared memory."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from iclperm.engine.kernels.triton_attention import _LAUNCHES, _MASKED_LAUNCHES, _launch
from iclperm.engine.kernels.triton_compilation import ARCHITECTURES, architectures_of, multiplies_well

ROOT = Path(__file__).resolve().parents[1]
RECORDED = json.loads((ROOT / "benchmarks" / "results" / "triton_resources.json").read_text(encoding="utf-8"))
EVERY = 197
"""One in so many is compiled here, neighbours of different kernels and architectures; all of them are by hand."""
CHOSEN = ("kernel", "arch", "block", "warps", "stages")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("triton_resources")


def row_of(kernel: str, arch: int) -> dict[str, Any]:
    (row,) = [row for row in RECORDED["figures"] if (row["kernel"], row["arch"]) == (kernel, f"sm_{arch}")]
    return dict(row)


def test_what_is_recorded_ships_and_spills_nothing(benchmark: Any) -> None:
    """Of the largest groups with window and soft-cap, which take the most registers, every size on every architecture.

    ``python benchmarks/triton_resources.py --json benchmarks/results/triton_resources.json`` compiles all that ships.
    """
    shipped = {tuple(benchmark.about(case, arch)) for case, arch in benchmark.configurations()}
    recorded = {tuple(row[name] for name in CHOSEN) for row in RECORDED["figures"]}
    assert recorded <= shipped, f"changed since they were recorded: {sorted(recorded - shipped)}"
    hardest = [row for row in shipped if re.fullmatch(r"(tree_attention|decode) 7 x (64|128|256) .*soft-cap", row[0])]
    assert {row[1] for row in hardest} == {f"sm_{arch}" for arch in ARCHITECTURES}
    assert not [row for row in hardest if row not in recorded]
    assert not [row for row in RECORDED["figures"] if benchmark.is_bad(row)]


def test_some_are_compiled_and_are_as_recorded(tmp_path: Path) -> None:
    """As on a machine with a GPU; the benchmark's own exit code speaks of any spill."""
    found = tmp_path / "resources.json"
    run = subprocess.run(
        [sys.executable, "-P", "benchmarks/triton_resources.py", "--every", str(EVERY), "--json", str(found)],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(ROOT / "benchmarks"), *sys.path[1:]])},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    compiled = json.loads(found.read_text(encoding="utf-8"))
    assert len({row["arch"] for row in compiled["figures"]}) == len(ARCHITECTURES)
    assert all(row["spills"] == 0 and row["shared"] <= row["shared_limit"] for row in compiled["figures"])
    if compiled["benchmark"] == RECORDED["benchmark"]:  # of one Triton
        known = {tuple(row[name] for name in CHOSEN): row for row in RECORDED["figures"]}
        found = {tuple(row[name] for name in CHOSEN): row for row in compiled["figures"]}
        assert all(known[row] == found[row] for row in known.keys() & found.keys())


def test_half_precision_is_multiplied_by_matrix_units_but_on_turing() -> None:
    units = {
        arch: row_of("tree_attention 7 x 128 bf16", arch)["matrix_unit"] for arch in architectures_of(torch.bfloat16)
    }
    assert units == {80: "mma", 86: "mma", 89: "mma", 90: "wgmma", 100: "tcgen05", 120: "mma"}
    assert row_of("tree_attention 7 x 128 fp16", 75)["matrix_unit"] is None
    for arch in ARCHITECTURES:
        assert row_of("head 151936 x 1536 fp32", arch)["matrix_unit"] is None, "float32 is rounded to TF32"
        assert multiplies_well(arch, torch.float32)
        assert multiplies_well(arch, torch.float16) == (arch in units)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("arch", "row"), [(75, 75), (80, 80), (86, 86), (87, 86), (89, 86), (90, 90), (103, 90), (121, 86)]
)
def test_a_card_runs_the_launches_of_the_nearest_that_was_checked(arch: int, row: int, dtype: torch.dtype) -> None:
    for head_dim, table in ((128, _LAUNCHES), (96, _MASKED_LAUNCHES)):
        assert _launch(head_dim, dtype, arch) == table[row, dtype == torch.float32][128]
