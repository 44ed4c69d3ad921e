"""Sizes at which the statistics compute in another way. What comes out has the same bits on either side of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ComputeLimits:
    """Defaults as measured (benchmarks/stats.py); tests give smaller ones, so that small tensors take every way."""

    numba_from: int = 1 << 26
    """Bytes of a tensor from which the Numba loops run: NumPy takes 0.1 s there, the loops a tenth of it, after half a
    second to import them and 2 s, once, to compile them."""
    block_bytes: int = 1 << 24
    """Bytes of a tensor read in blocks that are held at once; one permutation of all sets at least."""
    sums_at_once: int = 1 << 22
    """Sums of a bootstrap that are held at once, 8 bytes each."""
    short_segment: int = 200
    """Mean number of queries of a segment below which counting word by word is faster than masking whole segments."""
    tile_bytes: int = 1 << 16
    """Bytes of one context's row that stay in cache while all sets and permutations pass by."""
    task_permutations: int = 32
    """Permutations of one thread's task at least: its sums then take one byte where these took 32."""
    threads: int | None = None
    """Threads of the Numba loops; None for one a core that this process may use, or NUMBA_NUM_THREADS."""


LIMITS = ComputeLimits()
"""What every statistic goes by unless it is given others."""
