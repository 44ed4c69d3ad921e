"""Registers, shared memory and spills of every Triton kernel at its shipped launch configurations; no GPU is needed.

Each kernel module lists its ``resource_cases()``; they are compiled for sm_80 and sm_90 with the assembler that comes
with Triton, whose report is read.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import re
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import triton
from _machine import publish
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from iclperm.engine.kernels.triton_compilation import Compilation
from iclperm.engine.kernels.triton_launch import is_interpreted

MODULES = ("triton_attention", "triton_head", "triton_rowwise")
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10}  # bytes one block may have
REGISTER_FILE = 65536  # registers of one multiprocessor, on both
_USAGE = re.compile(
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


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
        resources(case, arch)
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


def resources(case: Compilation, arch: int) -> dict[str, Any]:
    """What one configuration uses on one architecture: bytes per block, registers and spilled bytes per thread."""
    order = list(case.signature)
    aligned = [name for name, kind in case.signature.items() if kind.startswith("*") or name in case.multiples_of_16]
    source = ASTSource(
        case.kernel,
        dict(case.signature),
        constexprs=dict(case.constexprs),
        attrs={(order.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    launch = {"num_warps": case.num_warps, "num_stages": case.num_stages, **case.options}
    with assembler_report() as report:
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch)
    used = _USAGE.search(report.getvalue())
    if used is None:
        raise RuntimeError(f"the assembler's report on {case.name} for sm_{arch} is not understood")
    registers = int(used["registers"])
    shared = int(compiled.metadata.shared)
    by_registers = REGISTER_FILE // (registers * 32 * case.num_warps)
    return {
        "kernel": case.name,
        "arch": f"sm_{arch}",
        "warps": case.num_warps,
        "stages": case.num_stages,
        "registers": registers,
        "shared": shared,
        "shared_limit": SHARED_LIMIT[arch],
        "spills": int(used["stores"]) + int(used["loads"]),
        "blocks_per_multiprocessor": min(by_registers, (SHARED_LIMIT[arch] + 1024) // (shared + 1024)),
        "matrix_unit": matrix_unit(compiled.asm["ptx"]),
    }


def matrix_unit(ptx: str) -> str | None:
    """Which matrix instructions a kernel uses."""
    return next((name for name in ("wgmma", "mma") if f"{name}.sync" in ptx or f"{name}.mma_async" in ptx), None)


@contextmanager
def assembler_report() -> Iterator[io.StringIO]:
    """What the assembler says about the kernels that are compiled within."""
    with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope(), redirect_stdout(io.StringIO()) as report:
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.compilation.always_compile = True  # a kernel from the cache says nothing
        yield report


def is_bad(row: dict[str, Any]) -> bool:
    """Whether a configuration must not ship."""
    return bool(row["spills"] or row["shared"] > row["shared_limit"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
