"""What a compiled Triton kernel takes: registers, shared memory, spills, and seconds to compile; no GPU is needed.

The assembler that comes with Triton says it of one kernel in one launch configuration, for any compute capability.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass

import torch
import triton
import triton.testing
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from iclperm.engine.kernels.triton_compilation import Compilation

_MATRIX_UNITS = {"tcgen05": "tcgen05.mma", "wgmma": "wgmma.mma_async", "mma": "mma.sync"}
_USAGE = re.compile(
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True)
class Resources:
    """Registers and spilled bytes of a thread, shared memory in bytes of a block, and what compiling took.

    ``matrix_unit`` names the matrix instructions, None for a kernel without a product.
    """

    registers: int
    shared: int
    spills: int
    matrix_unit: str | None
    seconds: float


def resources(case: Compilation, arch: int) -> Resources:
    """Compiles one configuration for a compute capability times ten; raises what the compiler raises."""
    order = list(case.signature)
    aligned = [name for name, kind in case.signature.items() if kind.startswith("*") or name in case.multiples_of_16]
    source = ASTSource(
        case.kernel,
        dict(case.signature),
        constexprs=dict(case.constexprs),
        attrs={(order.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    launch = {"num_warps": case.num_warps, "num_stages": case.num_stages, **case.options}
    started = time.perf_counter()
    with _assembler_report() as report:
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch)
    seconds = time.perf_counter() - started
    used = _USAGE.search(report.getvalue())
    if used is None:
        raise RuntimeError(f"the assembler's report on {case.name} for sm_{arch} is not understood")
    return Resources(
        registers=int(used["registers"]),
        shared=int(compiled.metadata.shared),
        spills=int(used["stores"]) + int(used["loads"]),
        matrix_unit=_matrix_unit(compiled.asm["ptx"]),
        seconds=seconds,
    )


def launch_seconds(launch: Callable[[], object], device: torch.device) -> float:
    """The median of the seconds that a GPU needs for what is launched, its caches cold. Cost: an eighth of a second."""
    with torch.cuda.device(device):
        return float(triton.testing.do_bench(launch, return_mode="median")) / 1e3


def _matrix_unit(ptx: str) -> str | None:
    return next((name for name, instruction in _MATRIX_UNITS.items() if instruction in ptx), None)


@contextmanager
def _assembler_report() -> Iterator[io.StringIO]:
    """What the assembler says about the kernels that are compiled within."""
    with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope(), redirect_stdout(io.StringIO()) as report:
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.compilation.always_compile = True  # a kernel from the cache says nothing
        yield report
