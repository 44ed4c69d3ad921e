"""What the bits of a device's products depend on: what is fixed for the time of a call, and what can only be told."""

from __future__ import annotations

import importlib.metadata
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from iclperm import _core
from iclperm.errors import ConfigError, RequestError

_DRIVER = Path("/proc/driver/nvidia/version")
_LOCK = threading.Lock()
_users: set[object] = set()  # marks of calls that run with fixed precision now, in whatever thread
_before: dict[str, Any] = {}
_older_before: dict[str, Any] = {}


@contextmanager
def fixed_precision() -> Iterator[None]:
    """Within: float32 is multiplied as float32 (no TF32, no bfloat16 in its place), half precision summed in float32.

    These are switches of the whole process: other threads multiply so, too, as long as any call runs. After: as before;
    but TF32 in convolutions, where nobody had said anything, stands as said from then on, whatever a wider switch says.
    """
    mark = object()  # by which an interrupt between any two steps leaves nobody counted
    try:
        with _LOCK:
            if not _users:
                _before.update(_switches())
                _older_before.update(_older_switches())
                _set_older({name: _STRICT[name] for name in _older_before})
                _set(_FIXED)
            _users.add(mark)
        yield
    finally:
        with _LOCK:
            _users.discard(mark)
            if not _users:
                _set_older(_older_before)
                _older_before.clear()
                _set(_before)
                _before.clear()


# Sums of half precision: in it, and split along the inner axis. On a CPU float32 may be multiplied in bfloat16.
_FIXED: dict[str, Any] = {
    "cuda.allow_bf16_reduced_precision_reduction": (False, True),
    "cuda.allow_fp16_reduced_precision_reduction": (False, True),
    "cuda.allow_fp16_accumulation": False,
    "cuda.fp32_precision": "ieee",
    "cudnn.conv.fp32_precision": "ieee",
    "cudnn.rnn.fp32_precision": "ieee",
    "mkldnn.fp32_precision": "ieee",
    "mkldnn.conv.fp32_precision": "ieee",
    "mkldnn.rnn.fp32_precision": "ieee",
}
# torch's older names for some of these. Where they say other than the newer ones, reading them is an error, so that
# somebody's hook that looks at them would fail within a call.
_STRICT: dict[str, Any] = {"matmul": "highest", "cudnn": False}


def _place(name: str) -> tuple[Any, str]:
    owner, *part, switch = name.split(".")
    return getattr(getattr(torch.backends, owner), part[0] if part else "matmul"), switch


def _switches() -> dict[str, Any]:
    found = {name: getattr(*_place(name)) for name in _FIXED}
    splits = {name: getattr(*_place(f"{name}_split_k")) for name, fixed in _FIXED.items() if isinstance(fixed, tuple)}
    return found | {name: (found[name], split) for name, split in splits.items()}


def _set(switches: dict[str, Any]) -> None:
    """What follows a wider switch (`torch.backends.fp32_precision`), and is as wanted, goes on following it."""
    for name, value in switches.items():
        where = _place(name)
        if name.endswith("fp32_precision") and value != "ieee":
            setattr(*where, "none")  # as the wider one says
        if getattr(*where) != value:
            setattr(*where, value)


def _older_switches() -> dict[str, Any]:
    """Those of `_STRICT` that say otherwise now; one that the newer switches contradict is nobody's word."""
    readers: dict[str, Callable[[], Any]] = {
        "matmul": torch.get_float32_matmul_precision,
        "cudnn": lambda: torch.backends.cudnn.allow_tf32,
    }
    found: dict[str, Any] = {}
    for name, read in readers.items():
        with suppress(RuntimeError):
            found[name] = read()
    return {name: value for name, value in found.items() if value != _STRICT[name]}


def _set_older(switches: dict[str, Any]) -> None:
    if "matmul" in switches:
        torch.set_float32_matmul_precision(switches["matmul"])
    if "cudnn" in switches:
        torch.backends.cudnn.allow_tf32 = switches["cudnn"]


def refuse_unknown_isa() -> None:
    """Raises ConfigError where ICLPERM_ISA names instructions that our core, or this processor, has not."""
    try:
        _core.isa()
    except RequestError as error:
        raise ConfigError(f"{error}; name another, or leave the variable unset") from None


def gpu_versions(device: torch.device) -> dict[str, Any]:
    """What besides its name the bits of a CUDA device may depend on: its driver, CUDA, cuBLAS with the workspace that
    it is given, and the switches as `fixed_precision` sets them; JSON-safe, each named gpu_..."""
    major, minor = torch.cuda.get_device_capability(device)
    told = {
        "capability": f"{major}.{minor}",
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "cublas": cublas_version(),
        "blas": str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2],
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        **{name.removeprefix("cuda.").replace(".", "_"): _FIXED[name] for name in _FIXED if name.startswith("cud")},
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
