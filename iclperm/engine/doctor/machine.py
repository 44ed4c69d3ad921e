"""The machine: its devices and what can be allocated on them, versions, flags that change bits, and the environment.

Nothing here says who uses the machine: names of variables and what they hold come from a list, paths are cut.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from iclperm import _core
from iclperm.base.environment import VARIABLES, cores, processor
from iclperm.engine.device import cublas_version, driver_version
from iclperm.engine.doctor.privacy import first_line, without_names
from iclperm.engine.memory import free_bytes
from iclperm.errors import is_out_of_memory

ENVIRONMENT = (
    "CC", "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES", "DNNL_MAX_CPU_ISA", "GLIBC_TUNABLES", "HF_HUB_OFFLINE", "ICLPERM_ISA", "LD_PRELOAD",
    "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS",
    "OMP_PLACES", "OMP_PROC_BIND", "OMP_WAIT_POLICY", "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT", "TRITON_ALWAYS_COMPILE", "TRITON_CACHE_DIR",
    "TRITON_DISABLE_LINE_INFO", "TRITON_INTERPRET", "TRITON_PTXAS_PATH", "XDG_CACHE_HOME",
)  # fmt: skip
"""Variables that decide what runs, with which bits, or where it is kept; no other is looked at."""
_PATHS = frozenset({"CC", "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH", "XDG_CACHE_HOME"})
"""Of these, that they are set is all that is told."""
_PACKAGES = ("iclperm", "torch", "triton", "transformers", "numpy", "safetensors", "tokenizers", "accelerate")
_SMALLEST_BLOCK = 32 << 20
_MOST_BLOCKS = 4096
_SECONDS = 20


@dataclass(frozen=True)
class DeviceFacts:
    """A device; bytes unless said. ``allocatable`` in blocks, the largest of which is ``largest_block``, was found by
    allocating, on a GPU; of the host what the system says is free stands for both."""

    name: str
    device: str
    capability: str | None
    multiprocessors: int | None
    shared_memory: int | None
    """Most that a block of threads may have."""
    total: int
    free: int
    allocatable: int
    largest_block: int
    reason: str = ""
    """Why something of it could not be found out."""


@dataclass(frozen=True)
class MachineFacts:
    """What is not of a model, by name; None where there is none."""

    devices: list[DeviceFacts]
    no_gpu: str
    """Why no GPU is used; empty where one is."""
    versions: dict[str, str | None]
    system: dict[str, str | int | None]
    flags: dict[str, str]
    environment: dict[str, str]


def look() -> MachineFacts:
    """The machine as it is now. Cost: a second; all memory of a GPU is taken and given back."""
    return MachineFacts(list(_devices()), _why_no_gpu(), _versions(), _system(), _flags(), _environment())


def _devices() -> Iterator[DeviceFacts]:
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            yield _gpu(torch.device("cuda", number))
    host = torch.device("cpu")
    total, free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), free_bytes(host)
    yield DeviceFacts(processor(), "cpu", None, None, None, total, free, free, free)


def _why_no_gpu() -> str:
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch was built without CUDA"
    try:
        torch.empty(1, device="cuda")
    except Exception as error:
        return first_line(error)
    return "torch says that there is none"


def _gpu(device: torch.device) -> DeviceFacts:
    about: Any = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    reason = ""
    try:
        largest, allocatable = allocated(lambda size: torch.empty(size, dtype=torch.uint8, device=device), free)
    except Exception as error:  # a driver's; the rest is still worth telling
        largest, allocatable, reason = 0, 0, first_line(error)
    finally:
        torch.cuda.empty_cache()
    return DeviceFacts(
        name=str(about.name),
        device=str(device),
        capability=f"{about.major}.{about.minor}",
        multiprocessors=int(about.multi_processor_count),
        shared_memory=getattr(about, "shared_memory_per_block_optin", None),
        total=int(total),
        free=int(free),
        allocatable=allocatable,
        largest_block=largest,
        reason=reason,
    )


def allocated(allocate: Callable[[int], object], free: int) -> tuple[int, int]:
    """The largest block and the sum of all that ``allocate`` gives at once, in bytes, of ``free`` at most.

    Blocks are the largest that are to be had, one after the other, down to 32 MiB; all are given back. Raises what
    ``allocate`` raises but for want of memory.
    """
    blocks: list[object] = []
    sizes: list[int] = []

    def fits(size: int) -> bool:
        try:
            block = allocate(size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        del block
        return True

    left = free
    while left >= _SMALLEST_BLOCK and len(sizes) < _MOST_BLOCKS:
        size = _largest(fits, left)
        if size < _SMALLEST_BLOCK:
            break
        try:
            blocks.append(allocate(size))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            left = size - _SMALLEST_BLOCK  # another process has taken some of it meanwhile
            continue
        sizes.append(size)
        left = min(size, free - sum(sizes))
    return max(sizes, default=0), sum(sizes)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest size up to ``most`` that fits, to within half of the smallest block."""
    if fits(most):
        return most
    low, high = 0, most
    while high - low > _SMALLEST_BLOCK // 2:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _versions() -> dict[str, str | None]:
    found = {name: _version(name) for name in _PACKAGES}
    backends: Any = torch.backends
    cudnn = backends.cudnn.version() if torch.cuda.is_available() else None
    return found | {
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "driver": driver_version(),
        "cublas": cublas_version(),
        "cudnn": None if cudnn is None else str(cudnn),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _system() -> dict[str, str | int | None]:
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "processor": processor(),
        "cores": len(cores()),
        "threads": torch.get_num_threads(),
        "isa": f"{_core.isa()} of {', '.join(_core.available_isas())}",
        "compiler": _compiler(),
    }


def _compiler() -> str | None:
    """The C compiler that Triton would take, with its version; it makes what launches a kernel."""
    named = os.environ.get("CC")
    program = shutil.which(named) if named else shutil.which("gcc") or shutil.which("clang")
    if program is None:
        return None
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=False)
        line = (said.stdout.strip() or "of unknown version").splitlines()[0]
    except (OSError, subprocess.TimeoutExpired) as error:
        line = f"does not say its version: {first_line(error)}"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    lacks = "" if header.exists() else "; Python.h is not there, and Triton needs it"
    return without_names(f"{Path(program).name}: {line}{lacks}")


def _flags() -> dict[str, str]:
    """Switches of torch that change the last bits of products."""
    backends: Any = torch.backends
    matmul = backends.cuda.matmul
    readers: dict[str, Callable[[], object]] = {
        "TF32 in products": lambda: matmul.allow_tf32,
        "TF32 in cuDNN": lambda: backends.cudnn.allow_tf32,
        "reduced precision of float16 products": lambda: matmul.allow_fp16_reduced_precision_reduction,
        "reduced precision of bfloat16 products": lambda: matmul.allow_bf16_reduced_precision_reduction,
        "float16 accumulation": lambda: matmul.allow_fp16_accumulation,
        "float32 matmul precision": torch.get_float32_matmul_precision,
        "oneDNN float32 precision": lambda: backends.mkldnn.matmul.fp32_precision,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
        "preferred BLAS": lambda: str(backends.cuda.preferred_blas_library()).rpartition(".")[2],
        "oneDNN": backends.mkldnn.is_available,
    }
    return {name: _read(reader) for name, reader in readers.items()}


def _read(reader: Callable[[], object]) -> str:
    try:
        value = reader()
    except Exception as error:  # another version of torch, or flags set in two ways
        return f"not known: {first_line(error)}"
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _environment() -> dict[str, str]:
    given = {name: os.environ[name] for name in sorted({*ENVIRONMENT, *VARIABLES}) if name in os.environ}
    given = {name: value for name, value in given.items() if value != VARIABLES.get(name)}  # not ours by default
    return {name: "(set)" if name in _PATHS else without_names(value) for name, value in given.items()}
