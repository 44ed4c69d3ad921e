"""Passes over correct[10, 1000, 65, 1000] (650 MB) against the speed of memory and against NumPy.

    python benchmarks/stats.py [--repeats 7] [--permutations 1000] [--json benchmarks/results/stats.json]

The bars, of every pass: at least half the memory bandwidth measured beside it, at most 5 % of the tensor of further
memory, 5 times as fast as NumPy; and every score of every demonstration in 10 s. Bandwidth is the fastest of several
plain sums of all words, on all cores, taken before every run of a pass; shares are medians over the runs. NumPy is the
plain expression, and beside it the fastest one we know, which adds in the shortest type that holds the sums.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _machine import options, publish
from numba import njit

from iclperm import stats
from iclperm.stats import _kernels, demonstrations, sensitivity, tensor

BANDWIDTH, MEMORY, SPEEDUP, SCORES = 0.5, 0.05, 5.0, 10.0
SHAPE = (10, 1000, 65, 1000)


class Pass(NamedTuple):
    """One pass over the tensor, and the same in NumPy."""

    name: str
    ours: Callable[[], Any]
    numpy: Callable[[], Any]
    shortest: Callable[[], Any]
    """NumPy with the shortest types."""
    agree: Callable[[Any, Any], bool]


@njit(nogil=True)
def _add(words):
    total = np.uint64(0)
    for word in words:
        total += word
    return total


def bandwidth(correct: np.ndarray) -> float:
    """Bytes a second of a plain sum of words on all cores, the faster of two."""
    words = correct.reshape(-1).view(np.uint64)
    edges = np.linspace(0, len(words), 8 * _kernels.num_threads() + 1).astype(int)
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        with ThreadPoolExecutor(_kernels.num_threads()) as pool:
            list(pool.map(lambda low, high: _add(words[low:high]), edges[:-1], edges[1:]))
        seconds.append(time.perf_counter() - started)
    return correct.nbytes / min(seconds)


def passes(correct: np.ndarray, state: np.ndarray) -> list[Pass]:
    num_queries = correct.shape[-1]
    weights = np.random.default_rng(1).integers(1, 4, num_queries)
    usable = np.ones(num_queries, np.bool_)
    edges = np.arange(0, num_queries + 1, max(1, num_queries // 16))
    edges[-1] = num_queries
    return [
        Pass(
            "accuracy [S,P,K], with the check for 0 and 1",
            lambda: stats.accuracy(correct).values,
            lambda: correct.sum(axis=-1) / num_queries,
            lambda: correct.sum(axis=-1, dtype=np.uint16) / num_queries,
            np.array_equal,
        ),
        Pass(
            "accuracy, weights 1 to 3",
            lambda: stats.accuracy(correct, weights=weights).values,
            lambda: np.einsum("spkq,q->spk", correct, weights.astype(float)) / weights.sum(),
            lambda: np.einsum("spkq,q->spk", correct, weights.astype(np.uint16)) / weights.sum(),
            np.array_equal,
        ),
        Pass(
            "crossed sums [S,K,Q], [P,K] of squares",
            lambda: _kernels.crossed_planes(correct, usable)[:2],
            lambda: (correct.sum(axis=1), (correct.sum(axis=0) ** 2).sum(axis=-1)),
            lambda: (
                correct.sum(axis=1, dtype=np.uint16),
                (correct.sum(axis=0, dtype=np.uint8) ** 2).sum(axis=-1, dtype=np.uint32),
            ),
            lambda ours, theirs: all(map(np.array_equal, ours, theirs)),
        ),
        Pass(
            "sums over 16 segments of queries",
            lambda: tensor.segment_sums(correct, edges),
            lambda: np.stack([correct[..., low:high].sum(axis=-1) for low, high in pairwise(edges)], axis=-1),
            lambda: np.add.reduceat(correct, edges[:-1], axis=-1, dtype=np.uint8),
            np.array_equal,
        ),
        Pass(
            "usable queries [Q] of state",
            lambda: sensitivity.usable_queries(state.shape, state),
            lambda: ~state.any(axis=(0, 1, 2)),
            lambda: np.bitwise_or.reduce(state, axis=(0, 1, 2)) == 0,
            np.array_equal,
        ),
    ]


def measured(one: Pass, correct: np.ndarray, repeats: int) -> dict[str, Any]:
    ours = one.ours()  # compiled, and every page of the tensor touched
    tracemalloc.start()
    result = one.ours()
    further = tracemalloc.get_traced_memory()[1] - size_of(result)
    tracemalloc.stop()
    speeds, shares = [], []
    for _ in range(repeats):
        memory = bandwidth(correct)
        started = time.perf_counter()
        one.ours()
        speed = correct.nbytes / (time.perf_counter() - started)
        speeds.append(speed)
        shares.append(speed / memory)
    seconds = {}
    for name, work in (("numpy", one.numpy), ("shortest", one.shortest)):
        started = time.perf_counter()
        theirs = work()
        seconds[name] = time.perf_counter() - started
        assert one.agree(ours, theirs), (one.name, name)
        del theirs
    median = correct.nbytes / statistics.median(speeds)
    share, memory = statistics.median(shares), further / correct.nbytes
    held = share >= BANDWIDTH and memory <= MEMORY and seconds["numpy"] / median >= SPEEDUP
    return {
        "pass": one.name,
        "seconds": median,
        "GB/s": statistics.median(speeds) / 1e9,
        "of bandwidth": share,
        "lowest": min(shares),
        "further memory": memory,
        "numpy s": seconds["numpy"],
        "faster": seconds["numpy"] / median,
        "numpy, shortest types, s": seconds["shortest"],
        "faster than that": seconds["shortest"] / median,
        "bars": "held" if held else "MISSED",
    }


def size_of(result: Any) -> int:
    return sum(map(size_of, result)) if isinstance(result, tuple) else result.nbytes


def scores(correct: np.ndarray) -> dict[str, Any]:
    """Every score of every demonstration, from the tensor."""
    generator = np.random.default_rng(2)
    num_sets, num_permutations, num_shots, _ = correct.shape
    orders = generator.permuted(np.tile(np.arange(num_shots - 1), (num_sets, num_permutations, 1)), axis=2)
    started = time.perf_counter()
    accuracy = stats.accuracy(correct).values
    found = [
        score(accuracy, orders).values
        for score in (demonstrations.shapley, demonstrations.marginal, demonstrations.prefix, demonstrations.member)
    ]
    found.append(demonstrations.stability(accuracy, orders).values)
    seconds = time.perf_counter() - started
    assert all(values.shape == (num_sets, num_shots - 1) for values in found)
    assert math.isclose(found[0].sum(), (accuracy[:, :, -1] - accuracy[:, :, 0]).mean(axis=1).sum(), abs_tol=1e-9)
    return {
        "pass": "Shapley, marginal, prefix, member, stability",
        "seconds": seconds,
        "bars": "held" if seconds <= SCORES else "MISSED",
    }


STREAM = """
    import json, sys, time, tracemalloc
    import numpy as np
    from iclperm.stats import tensor
    tensor.tensor_sums(np.ones((2, 2, 2, 8), np.uint8))
    started = time.perf_counter()
    sums = tensor.tensor_sums(sys.argv[1])
    seconds = time.perf_counter() - started
    tracemalloc.start()
    sums = tensor.tensor_sums(sys.argv[1])
    results, peak = tracemalloc.get_traced_memory()
    print(json.dumps([seconds, peak - results, int(sums.right.sum()), int(sums.squares.sum())]))
"""


def streamed(correct: np.ndarray) -> dict[str, Any]:
    """The same sums from a file, in a process of its own: compiled already, the file in the system's cache."""
    whole = tensor.tensor_sums(correct)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "correct.npy"
        np.save(path, correct)
        command = [sys.executable, "-c", textwrap.dedent(STREAM), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, held, *sums = json.loads(done.stdout)
    assert sums == [int(whole.right.sum()), int(whole.squares.sum())]
    return {
        "pass": "accuracy and crossed sums of a .npy file, in blocks",
        "seconds": seconds,
        "GB/s": correct.nbytes / seconds / 1e9,
        "further memory": held / correct.nbytes,
    }


COMPILE = """
    import time
    started = time.perf_counter()
    import numpy as np
    from iclperm.stats import limits, tensor
    imported = time.perf_counter()
    from iclperm.stats import _kernels
    small = limits.ComputeLimits(numba_from=1)
    tensor.tensor_sums(np.ones((2, 2, 2, 8), np.uint8), np.zeros((2, 2, 2, 8), np.uint8), limits=small)
    print(time.perf_counter() - imported)
"""


def compiled() -> list[dict[str, Any]]:
    """Import of Numba and the loops behind `tensor_sums`: with an empty cache, then with a full one."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
        command = [sys.executable, "-c", textwrap.dedent(COMPILE)]
        seconds = [
            float(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)
            for _ in range(2)
        ]
    return [
        {"pass": "import and compile the loops", "seconds": seconds[0]},
        {"pass": "import the loops, compiled before", "seconds": seconds[1]},
    ]


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--permutations", type=int, default=SHAPE[1], help="of the tensor; 1000 makes 650 MB")
    arguments = parser.parse_args()
    generator = np.random.default_rng(0)
    shape = (SHAPE[0], arguments.permutations, *SHAPE[2:])
    correct = generator.integers(0, 256, shape, dtype=np.uint8)
    np.less(correct, 180, out=correct.view(np.bool_))
    state = np.zeros_like(correct)
    state[...] = 0  # or every page would be the same one
    rows = [measured(one, correct, arguments.repeats) for one in passes(correct, state)]
    del state
    rows += [scores(correct), streamed(correct), *compiled()]
    load = os.getloadavg()[0]
    threads, memory = _kernels.num_threads(), max(bandwidth(correct) for _ in range(5))
    publish(
        f"passes over correct{list(shape)}, {correct.nbytes / 1e6:.0f} MB, {threads} threads, "
        f"memory {memory / 1e9:.1f} GB/s, load average {load:.1f}",
        rows,
        arguments.json,
    )
    missed = [row["pass"] for row in rows if row.get("bars") == "MISSED"]
    print(f"bars: {'all held' if not missed else 'MISSED by ' + ', '.join(missed)}")


if __name__ == "__main__":
    main()
