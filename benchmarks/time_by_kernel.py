"""Where the engine's time goes, kernel by kernel, at which rate, and what the fastest products would take.

    python benchmarks/time_by_kernel.py [--repeats 2] [--dtype float32] [--json benchmarks/results/time_by_kernel.json]
    python benchmarks/time_by_kernel.py --threads 2 --study WORK/curve.yaml --scale 0.02
    python benchmarks/time_by_kernel.py --threads 2 --study WORK/generation.yaml --scale 0.25

The Monte Carlo case with k = 0, 4, .. 16 on the 25 M Qwen2 shape, or a share of a study with its model, scored or
generated as it says; float32 and bfloat16 unless one is chosen. CPU time of one thread, wall time of several. Matrix
products are told by their shape [outputs, inputs]; their operations are those of all their rows, padding among them,
and ``fastest`` is what they would take by the fastest product known here (torch's, oneDNN's, oneDNN's on packed
weights, ours) at those numbers of rows; ``laying out`` is what second copies of matrices took. The attention's
operations are those of visible (row, key) pairs alone. ``bound`` is what a call would take
whose attention ran at the rate of the fastest products, and that did nothing else; ``keys from memory`` what reading
once a call of the attention the pool's keys and values that its rows see takes at the rate at which memory is read
here: no attention is faster where they are more than the caches hold. ``rest`` is everything that no
kernel does: planning, gathers, torch's own overhead. Memory is kept as the command line keeps it.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from _machine import options, publish
from _products import Products, clock
from token_efficiency import Case, model

from iclperm import _core
from iclperm.base.environment import settle
from iclperm.bench.studies import StudyCase
from iclperm.engine import ContextPaths, Engine, plan_product
from iclperm.engine.load import load
from iclperm.engine.tree import Rows
from iclperm.study.study import Study

CASE = Case("Monte Carlo", 16, 1, (0, 4, 8, 12, 16), 64)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Spent:
    """What a kernel took in all its calls."""

    seconds: float = 0.0
    operations: float = 0.0  # floating-point ones; 0 where they are not counted
    fastest: float | None = None  # seconds of a product's calls by the fastest known
    kind: str = ""  # and which that is
    pool_bytes: float = 0.0  # of keys and values in the pool that the attention's calls read, in each call once


def attention_operations(
    q: np.ndarray, *arguments: Any, query_rows: np.ndarray | None = None, window: int = 0, **_: Any
) -> float:
    """Two products of head_dim for each head and each key that a row sees."""
    first_rows, first_positions = arguments[5], arguments[6]
    rows = np.arange(first_rows[0], first_rows[-1]) if query_rows is None else query_rows
    visit = np.searchsorted(first_rows, rows, side="right") - 1
    seen = first_positions[visit] + rows - first_rows[visit] + 1
    return 4.0 * q.shape[1] * q.shape[2] * float(np.sum(np.minimum(seen, window) if window else seen))


class PoolBytes:
    """Of keys, and of values as wide, in the pool that rows of a call see, each once, however many rows see it."""

    def __init__(self) -> None:
        self._key: tuple[int, int, int] | None = None  # of the last call, as long as its arrays are held
        self._held: tuple[Any, ...] = ()
        self._num_slots = 0

    def __call__(self, *arguments: Any, query_rows: np.ndarray | None = None, window: int = 0, **_: Any) -> float:
        k_pool, begin = arguments[3], arguments[10]
        key = id(begin), id(query_rows), window
        if key != self._key:
            self._key, self._held = key, (begin, query_rows)
            self._num_slots = num_slots(*arguments[6:12], query_rows, window, k_pool.shape[0])
        return 2.0 * self._num_slots * k_pool.shape[1] * k_pool.shape[2] * k_pool.itemsize


def num_slots(
    first_rows: np.ndarray,
    positions: np.ndarray,
    offsets: np.ndarray,
    source: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
    query_rows: np.ndarray | None,
    window: int,
    size: int,
) -> int:
    """The pool's slots, of ``size``, that any row sees: of a visit the first that is asked for looks back furthest."""
    rows = np.arange(first_rows[0], first_rows[-1]) if query_rows is None else query_rows
    place = np.searchsorted(rows, first_rows)
    is_asked = place[:-1] < place[1:]
    first = np.where(is_asked, rows[np.minimum(place[:-1], rows.size - 1)] - first_rows[:-1], 0) if rows.size else 0
    visit = np.repeat(np.arange(positions.size), np.diff(offsets))
    upto = np.concatenate([[0], np.cumsum(end - begin)])  # keys of all spans before
    position = upto[:-1] - upto[offsets[:-1]][visit]  # of a span's first key
    hidden = (positions + first - window + 1)[visit] - position if window else np.zeros_like(begin)
    begin = np.minimum(begin + np.maximum(hidden, 0), end)
    is_seen = (source == 0) & is_asked[visit]
    edges = np.zeros(size + 1, np.int64)
    np.add.at(edges, begin[is_seen], 1)
    np.add.at(edges, end[is_seen], -1)
    return int(np.count_nonzero(np.cumsum(edges)))


def memory_rate() -> float:
    """Bytes a second at which all threads together read a gibibyte, by the faster of two ways."""
    numbers = torch.ones(1 << 14, 1 << 14)
    ways = (numbers.sum, lambda: _core.checksum(numbers.numpy(), num_threads=torch.get_num_threads()))
    passes = []
    for way in (*ways, *ways, *ways):
        started = clock()
        way()
        passes.append(clock() - started)
    return numbers.nbytes / min(passes)


def nothing(*_: Any, **__: Any) -> float:
    return 0.0


Count = Callable[..., float]
"""Of the arguments of a kernel's call."""


@contextmanager
def clocked(spent: defaultdict[str, Spent], products: Products) -> Iterator[None]:
    """Within: the time and the operations of every kernel add up in ``spent``, products in ``products``."""

    def timed(name: str, call: Callable[..., Any], operations: Count, pool_bytes: Count) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            started = clock()
            result = call(*arguments, **options)
            spent[name].seconds += clock() - started
            spent[name].operations += operations(*arguments, **options)
            spent[name].pool_bytes += pool_bytes(*arguments, **options)
            return result

        return run

    with ExitStack() as undo:

        def patch(name: str, operations: Count = nothing, pool_bytes: Count = nothing) -> None:
            undo.enter_context(
                mock.patch.object(_core, name, timed(name, getattr(_core, name), operations, pool_bytes))
            )

        for name in ("rms_norm", "layer_norm", "rotate", "activate", "head_rows"):
            patch(name)
        patch("tree_attention", attention_operations, PoolBytes())
        undo.enter_context(products.recorded())
        yield


Asked = Callable[[Engine], object]
"""A call that is timed."""


def scoring(paths: ContextPaths, queries: list[np.ndarray], labels: list[list[int]]) -> Asked:
    return lambda engine: engine.score(paths, queries, labels)


def generating(paths: ContextPaths, queries: list[np.ndarray], num_new: int) -> Asked:
    """Every text to its ``num_new``-th token, as `iclperm bench` has them."""
    plan = plan_product(paths, queries, [[0]])
    return lambda engine: list(engine.generate_units(plan, max_new_tokens=num_new))


def measure(served: Any, asked: Asked, repeats: int) -> list[dict[str, Any]]:
    """Seconds of the fastest of ``repeats`` calls, by kernel."""
    engine = Engine(served)
    engine.loglikelihood([([1], [2])])
    assert engine.layers == "fused"
    best: tuple[float, defaultdict[str, Spent], Products] | None = None
    for _ in range(repeats):
        spent: defaultdict[str, Spent] = defaultdict(Spent)
        products = Products()
        with clocked(spent, products):
            started = clock()
            asked(engine)
            total = clock() - started
        best = min(best or (total, spent, products), (total, spent, products), key=lambda found: found[0])
    assert best is not None
    total, by_kernel, products = best
    fastest = products.fastest()
    by_product = {
        f"product {list(shape)}": Spent(products.seconds[shape], products.operations(shape), *fastest[shape])
        for shape in products.calls
    }
    of_products = Spent(
        sum(products.seconds.values()),
        sum(map(products.operations, products.calls)),
        sum(seconds for seconds, _ in fastest.values()),
    )
    attended, from_pool = by_kernel["tree_attention"].operations, by_kernel["tree_attention"].pool_bytes
    assert of_products.fastest is not None
    bound = of_products.fastest * (1 + attended / of_products.operations)
    by_kernel["laying out"].seconds = products.laying_out
    by_kernel["rest"].seconds = total - sum(kernel.seconds for kernel in by_kernel.values()) - of_products.seconds
    by_kernel.update(by_product)
    tokens = engine.report.tokens_forwarded
    rows = [
        ("all", Spent(total, fastest=of_products.fastest)),
        ("products", of_products),
        ("bound", Spent(bound, of_products.operations + attended, of_products.fastest)),
        ("keys from memory", Spent(from_pool / memory_rate())),
        *sorted(by_kernel.items(), key=lambda entry: -entry[1].seconds),
    ]
    return [
        {
            "dtype": str(served.dtype).removeprefix("torch."),
            "kernel": name,
            "seconds": kernel.seconds,
            "share": kernel.seconds / total,
            "us a token": 1e6 * kernel.seconds / tokens,
            "GFLOP/s": kernel.operations / kernel.seconds / 1e9 if kernel.operations else None,
            "fastest": kernel.fastest,
            "of the fastest": kernel.seconds / kernel.fastest if kernel.fastest else None,
            "which": kernel.kind,
        }
        for name, kernel in rows
    ]


def of_study(file: Path, scale: float) -> tuple[Path, Asked]:
    """What a share of a study asks its model, and where that lies."""
    study = Study.from_file(file)
    case = StudyCase.of(study, file.stem).scaled(scale)
    work = case.build(0)
    paths = ContextPaths(Rows.of(work.paths), Rows.of(work.marks))
    queries = list(work.queries)
    if case.new_tokens:
        return case.model, generating(paths, queries, case.new_tokens)
    return case.model, scoring(paths, queries, [label.tolist() for label in work.labels])


def main() -> None:
    settle()
    parser = options(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="may be given again; both by default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--study", type=Path, help="a study's file, whose prompts and model are taken")
    parser.add_argument("--scale", type=float, default=0.02, help="the share of a study's orderings and queries")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    for name in arguments.dtype or DTYPES:
        if arguments.study is None:
            served, asked = model().to(DTYPES[name]), scoring(*CASE.build())
        else:
            folder, asked = of_study(arguments.study, arguments.scale)
            served = load(folder, device="cpu", dtype=name)[0]
            served.generation_config.eos_token_id = served.config.eos_token_id = None  # texts end with their last token
        rows += measure(served, asked, arguments.repeats)
    publish(f"time by kernel, {arguments.threads} threads", rows, arguments.json)


if __name__ == "__main__":
    main()
