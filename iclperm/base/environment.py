"""Threads and memory of a process: the environment variables that its libraries read when they are loaded."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_OWN_PAGES, _KEPT = 17 << 20, 256 << 20

VARIABLES: Mapping[str, str] = {
    # Threads that spin at barriers make a run several times slower where anything else wants a core.
    "GOMP_SPINCOUNT": "1000",
    # oneDNN and torch keep the code of every product's shape, half a megabyte each, 1024 by default.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "128",
    # glibc hands a layer's memory back and fetches it anew, page by page, for the next: 3-15 % of the time. Kept are
    # tensors up to 16 MiB; larger ones, of changing sizes, would cut up the heap (logits of many ids).
    "MALLOC_MMAP_THRESHOLD_": str(_OWN_PAGES),
    "MALLOC_TRIM_THRESHOLD_": str(_KEPT),
}


def cache_folder() -> Path:
    """Where things are kept that can be made again; raises `RuntimeError` for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "iclperm"


def cores() -> list[int]:
    """The processor cores that this process may use, ascending."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def processor() -> str:
    """The processor's name, as far as the system tells it."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def hand_back() -> None:
    """Has glibc give the system what is free in its heap; of use after what made many small objects and freed them."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def settle() -> None:
    """Puts `VARIABLES` into force, except where the user has set them; to be called before torch is imported."""
    has_own_heap = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    for name, value in VARIABLES.items():
        if not (has_own_heap and name.startswith("MALLOC_")):
            os.environ.setdefault(name, value)
    if not has_own_heap and platform.libc_ver()[0] == "glibc":
        # This process' glibc has read its variables already; those are for processes that it starts.
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _OWN_PAGES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)
