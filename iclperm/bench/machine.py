"""The machine of a measurement, and who else keeps it busy."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from iclperm.base.environment import processor
from iclperm.bench import cards


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine(device: str = "cpu") -> dict[str, Any]:
    """Processor, the vector instructions that matter, cores, memory and system, and the card that runs it."""
    info = Path("/proc/cpuinfo")
    told = _told(info.read_text(encoding="utf-8") if info.exists() else "")
    return {
        "processor": _with_generation(processor(), told),
        "simd": sorted({"avx2", "avx512f", "avx512_bf16", "amx_tile"} & set(told.get("flags", "").split())),
        "cores": available_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **cards.about(device),
    }


def _told(cpuinfo: str) -> dict[str, str]:
    """What the system says of the first processor."""
    lines = [line.partition(":") for line in cpuinfo.splitlines()]
    return {key.strip(): value.strip() for key, _, value in reversed(lines)}


def _with_generation(name: str, told: Mapping[str, str]) -> str:
    """An x86 processor's name with its family and model: of several generations the name alone may be the same."""
    family, model = told.get("cpu family", ""), told.get("model", "")
    return f"{name} (family {family}, model {model})" if family.isdigit() and model.isdigit() else name


def busy_processors(seconds: float = 0.5) -> list[float]:
    """How many processors all programs together keep busy meanwhile; nothing where the system does not tell (Linux)."""
    file = Path("/proc/stat")
    if not file.exists():
        return []

    def ticks() -> npt.NDArray[np.int64]:
        return np.array(file.read_text(encoding="ascii").split("\n", 1)[0].split()[1:9], np.int64)

    before = ticks()
    time.sleep(seconds)
    spent = ticks() - before  # user, nice, system, idle, waiting for a disk, interrupts, soft ones, stolen
    return [round(float((spent.sum() - spent[3:5].sum()) / max(spent.sum(), 1) * (os.cpu_count() or 1)), 2)]
