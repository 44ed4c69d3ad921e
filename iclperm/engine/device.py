"""What the bits of a device's products depend on: what is fixed for the time of a call, and what can only be told."""

from __future__ import annotations

import importlib.metadata
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_DRIVER = Path("/proc/driver/nvidia/version")
_LOCK = threading.Lock()
_users = 0  # calls that run with fixed precision now, in whatever thread
_before: dict[str, Any] = {}


@contextmanager
def fixed_precision() -> Iterator[None]:
    """Within: float32 is multiplied as float32 (no TF32, no bfloat16 in its place), half precision summed in float32.

    These are switches of the whole process: other threads multiply so, too, as long as any call runs. After: as before.
    """
    global _users  # of the process, as the switches are
    with _LOCK:
        if not _users:
            _before.update(_switches())
            _set(_FIXED)
        _users += 1
    try:
        yield
    finally:
        with _LOCK:
            _users -= 1
            if not _users:
                _set(_before)


# Sums of half precision: in it, and split along the inner axis. On a CPU float32 may be multiplied in bfloat16.
_FIXED: dict[str, Any] = {
    "cuda.allow_bf16_reduced_precision_reduction": (False, True),
    "cuda.allow_fp16_reduced_precision_reduction": (False, True),
    "cuda.allow_fp16_accumulation": False,
    "cuda.fp32_precision": "ieee",
    "mkldnn.fp32_precision": "ieee",
}


def _matmul(name: str) -> tuple[Any, str]:
    owner, _, switch = name.partition(".")
    return (torch.backends.mkldnn if owner == "mkldnn" else torch.backends.cuda).matmul, switch


def _switches() -> dict[str, Any]:
    found = {name: getattr(*_matmul(name)) for name in _FIXED}
    splits = {name: getattr(*_matmul(f"{name}_split_k")) for name, fixed in _FIXED.items() if isinstance(fixed, tuple)}
    return found | {name: (found[name], split) for name, split in splits.items()}


def _set(switches: dict[str, Any]) -> None:
    for name, value in switches.items():
        setattr(*_matmul(name), value)


def gpu_versions(device: torch.device) -> dict[str, Any]:
    """What besides its name the bits of a CUDA device may depend on: its driver, CUDA, cuBLAS, and the switches as
    `fixed_precision` sets them; JSON-safe, each named gpu_..."""
    major, minor = torch.cuda.get_device_capability(device)
    told = {
        "capability": f"{major}.{minor}",
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "cublas": cublas_version(),
        "blas": str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2],
        **{name.removeprefix("cuda."): value for name, value in _FIXED.items() if name.startswith("cuda.")},
    }
    return {f"gpu_{name}": list(value) if isinstance(value, tuple) else value for name, value in told.items()}


def driver_version() -> str | None:
    """Of the NVIDIA kernel module; None where the system does not say."""
    said = _DRIVER.read_text(encoding="utf-8", errors="replace") if _DRIVER.exists() else ""
    found = re.search(r"Kernel Module.*?(\d+(?:\.\d+)+)", said)
    return found[1] if found else None


def cublas_version() -> str | None:
    """Where it came as a package of its own, whatever CUDA's number in its name; None for torch's own."""
    names = (name for dist in importlib.metadata.distributions() if (name := dist.metadata["Name"]))
    found = sorted(name for name in names if name.startswith("nvidia-cublas"))
    return importlib.metadata.version(found[0]) if found else None
