"""What a process of ours sets before its libraries load."""

import os
import platform
import subprocess
import sys

import pytest

from iclperm.base.environment import VARIABLES

FAULTS = """
import ctypes, os, resource
{first}
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def touched():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    at = [libc.malloc(12 << 20) for _ in range(8)]
    for place in at:
        ctypes.memset(place, 1, 12 << 20)
    for place in at:
        libc.free(place)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
touched(), touched()
print(touched(), *(os.environ.get(name, "-") for name in {names}))
"""
SETTLED = "from iclperm.base.environment import settle; settle()"


def run(first: str, **variables: str) -> list[str]:
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    code = FAULTS.format(first=first, names=tuple(VARIABLES))
    ran = subprocess.run(
        [sys.executable, "-c", code], env={**kept, **variables}, capture_output=True, text=True, check=True
    )
    return ran.stdout.split()


@pytest.mark.skipif("platform.libc_ver()[0] != 'glibc'", reason="only glibc's heap is told to keep its memory")
def test_freed_memory_is_kept_and_not_fetched_anew() -> None:
    assert platform.libc_ver()[0] == "glibc"
    pages = 8 * (12 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert int(run("pass")[0]) > pages // 8, "glibc keeps it by itself: nothing to show"
    assert int(run(SETTLED)[0]) < pages // 100


def test_what_the_user_has_set_stays() -> None:
    assert run(SETTLED)[1:] == list(VARIABLES.values())
    given = run(SETTLED, GOMP_SPINCOUNT="7", MALLOC_TRIM_THRESHOLD_="1000000")
    told = dict(zip(VARIABLES, given[1:], strict=True))
    assert told["GOMP_SPINCOUNT"] == "7"
    assert (told["MALLOC_TRIM_THRESHOLD_"], told["MALLOC_MMAP_THRESHOLD_"]) == ("1000000", "-")
    assert told["LRU_CACHE_CAPACITY"] == VARIABLES["LRU_CACHE_CAPACITY"]
