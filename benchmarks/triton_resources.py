"""Registers, shared memory and spills of every Triton kernel at its shipped launch configurations; no GPU is needed.

Each kernel module lists its ``resource_cases()``; they are compiled for sm_80 and sm_90 with the assembler that comes
with Triton, whose report is read.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import triton
from _machine import publish

from iclperm.engine.kernels.triton_compilation import Compilation
from iclperm.engine.kernels.triton_launch import is_interpreted
from iclperm.engine.kernels.triton_resources import resources

MODULES = ("triton_attention", "triton_decode", "triton_head", "triton_rowwise")
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10}  # bytes one block may have
REGISTER_FILE = 65536  # registers of one multiprocessor, on both


def main(arguments: list[str]) -> int:
    """Print the table; 1 if a kernel spills or asks for more shared memory than there is."""
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--match", default="", help="only configurations whose name matches this regular expression")
    parser.add_argument("--arch", type=int, choices=SHARED_LIMIT, help="only this compute capability")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    if is_interpreted():
        parser.error("TRITON_INTERPRET is set, so there is nothing to compile; unset it")
    figures = [
        figures_of(case, arch)
        for case in cases()
        for arch in case.architectures
        if re.search(options.match, case.name) and options.arch in (None, arch)
    ]
    publish(f"Triton {triton.__version__} kernels at their launch configurations", figures, options.json)
    return int(any(is_bad(row) for row in figures))


def cases() -> list[Compilation]:
    """The shipped configurations of all kernel modules that are there."""
    names = [f"iclperm.engine.kernels.{name}" for name in MODULES]
    modules = [importlib.import_module(name) for name in names if importlib.util.find_spec(name)]
    return [case for module in modules for case in module.resource_cases()]


def figures_of(case: Compilation, arch: int) -> dict[str, Any]:
    """What one configuration uses on one architecture: bytes per block, registers and spilled bytes per thread."""
    used = resources(case, arch)
    by_registers = REGISTER_FILE // (used.registers * 32 * case.num_warps)
    return {
        "kernel": case.name,
        "arch": f"sm_{arch}",
        "warps": case.num_warps,
        "stages": case.num_stages,
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
