"""Registers, shared memory and spills of every Triton kernel at its shipped launch configurations; no GPU is needed.

Each kernel module lists its ``resource_cases()``; they are compiled for sm_75 to sm_120 with the assembler that comes
with Triton, whose report is read. All of them take the better part of an hour on two cores; a file that is given keeps
its rows of what is shipped and was not compiled now, so that it can be done an architecture at a time.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any, NamedTuple

import triton
from _machine import publish

from iclperm.engine.kernels.triton_compilation import Compilation
from iclperm.engine.kernels.triton_launch import is_interpreted
from iclperm.engine.kernels.triton_resources import resources

MODULES = ("triton_attention", "triton_decode", "triton_head", "triton_rowwise", "triton_layer_norm")
# Bytes of shared memory that one block may have, by architecture.
SHARED_LIMIT = {
    75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10,
}  # fmt: skip
REGISTER_FILE = 65536  # registers of one multiprocessor, on all
_SIZES = ("LINES", "TILE", "ROWS", "IDS", "INNER", "BLOCK")


def main(arguments: list[str]) -> int:
    """Print the table; 1 if a kernel spills or asks for more shared memory than there is."""
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--match", default="", help="only configurations whose name matches this regular expression")
    parser.add_argument("--arch", type=int, choices=SHARED_LIMIT, help="only this compute capability")
    parser.add_argument("--every", type=int, default=1, help="only one in so many of the configurations")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    if is_interpreted():
        parser.error("TRITON_INTERPRET is set, so there is nothing to compile; unset it")
    shipped = configurations()
    chosen = [
        (case, arch) for case, arch in shipped if re.search(options.match, case.name) and options.arch in (None, arch)
    ][:: options.every]
    rows = {about(case, arch): figures_of(case, arch) for case, arch in chosen}
    figures = [*rows.values()]
    before = {tuple(row[name] for name in About._fields): row for row in recorded(options.json)}
    rows = {key: rows.get(key) or before[key] for key in (about(*each) for each in shipped) if key in {*rows, *before}}
    publish(f"Triton {triton.__version__} kernels at their launch configurations", [*rows.values()], options.json)
    return int(any(is_bad(row) for row in figures))


class About(NamedTuple):
    """What of a configuration is chosen."""

    kernel: str
    arch: str
    block: str
    warps: int
    stages: int


def about(case: Compilation, arch: int) -> About:
    """What of a configuration is chosen, by which rows are told apart."""
    block = " x ".join(str(case.constexprs[name]) for name in _SIZES if name in case.constexprs)
    return About(case.name, f"sm_{arch}", block, case.num_warps, case.num_stages)


def recorded(path: Path | None) -> list[dict[str, Any]]:
    """The rows that a file holds."""
    return list(json.loads(path.read_text(encoding="utf-8"))["figures"]) if path and path.exists() else []


def configurations() -> list[tuple[Compilation, int]]:
    """The shipped configurations of all kernel modules that are there, each with an architecture that it is for."""
    names = [f"iclperm.engine.kernels.{name}" for name in MODULES]
    modules = [importlib.import_module(name) for name in names if importlib.util.find_spec(name)]
    cases = [case for module in modules for case in module.resource_cases()]
    return sorted(((case, arch) for case in cases for arch in case.architectures), key=lambda pair: pair[1])


def figures_of(case: Compilation, arch: int) -> dict[str, Any]:
    """What one configuration uses on one architecture: bytes per block, registers and spilled bytes per thread."""
    used = resources(case, arch)
    by_registers = REGISTER_FILE // (used.registers * 32 * case.num_warps)
    return {
        **about(case, arch)._asdict(),
        "registers": used.registers,
        "shared": used.shared,
        "shared_limit": SHARED_LIMIT[arch],
        "spills": used.spills,
        "blocks_per_multiprocessor": min(by_registers, (SHARED_LIMIT[arch] + 1024) // (used.shared + 1024)),
        "matrix_unit": used.matrix_unit,
    }


def is_bad(row: dict[str, Any]) -> bool:
    """Whether a configuration must not ship."""
    return bool(row["spills"] or row["shared"] > row["shared_limit"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
