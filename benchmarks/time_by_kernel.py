"""Where the engine's time goes, kernel by kernel, and at which rate: CPU time of one thread.

    python benchmarks/time_by_kernel.py [--repeats 2] [--dtype float32] [--json benchmarks/results/time_by_kernel.json]

The Monte Carlo case with k = 0, 4, .. 16 on the 25 M Qwen2 shape, float32 and bfloat16 unless one is chosen. Matrix
products are told by their shape [outputs, inputs]; their operations are those of all their rows, padding among them,
and the attention's are those of visible (row, key) pairs alone. ``rest`` is everything that no kernel does: planning,
gathers, torch's own overhead.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from _machine import options, publish
from token_efficiency import Case, model

from iclperm import _core
from iclperm.engine import Engine, layers
from iclperm.engine import model as engine_model
from iclperm.engine.kernels import rowwise

CASE = Case("Monte Carlo", 16, 1, (0, 4, 8, 12, 16), 64)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Spent:
    """What a kernel took in all its calls."""

    seconds: float = 0.0
    operations: float = 0.0  # floating-point ones; 0 where they are not counted


def product_operations(module: torch.nn.Linear, x: torch.Tensor, outputs: slice = slice(None), **_: Any) -> float:
    return 2.0 * x.numel() * len(range(module.out_features)[outputs])


def attention_operations(q: np.ndarray, *arguments: Any, query_rows: np.ndarray | None = None, **_: Any) -> float:
    """Two products of head_dim for each head and each key that a row sees (no window in this model)."""
    first_rows, first_positions = arguments[5], arguments[6]
    rows = np.arange(first_rows[0], first_rows[-1]) if query_rows is None else query_rows
    visit = np.searchsorted(first_rows, rows, side="right") - 1
    return 4.0 * q.shape[1] * q.shape[2] * float(np.sum(first_positions[visit] + rows - first_rows[visit] + 1))


def no_operations(*_: Any, **__: Any) -> float:
    return 0.0


@contextmanager
def clocked(spent: defaultdict[str, Spent]) -> Iterator[None]:
    """Within: the CPU time and the operations of every kernel add up in ``spent``."""

    def timed(name: str, call: Callable[..., Any], operations: Callable[..., float] = no_operations) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            started = time.thread_time()
            result = call(*arguments, **options)
            seconds = time.thread_time() - started
            told = name if operations is not product_operations else f"{name} {list(arguments[0].weight.shape)}"
            spent[told].seconds += seconds
            spent[told].operations += operations(*arguments, **options)
            return result

        return run

    with ExitStack() as undo:

        def patch(owner: Any, name: str, told: str, operations: Callable[..., float] = no_operations) -> None:
            undo.enter_context(mock.patch.object(owner, name, timed(told, getattr(owner, name), operations)))

        for name in ("rms_norm", "rotate", "head_rows"):
            patch(_core, name, name)
        patch(_core, "tree_attention", "tree_attention", attention_operations)
        activations = {kind: timed("activation", kernel) for kind, kernel in rowwise._KERNELS.items()}
        undo.enter_context(mock.patch.dict(rowwise._KERNELS, activations))
        patch(layers, "linear", "product", product_operations)
        multiply = engine_model.TreeModel.multiply_head
        head = timed("head", lambda _, rows, of: multiply(of, rows), product_operations)
        undo.enter_context(
            mock.patch.object(engine_model.TreeModel, "multiply_head", lambda of, rows: head(of._head, rows, of=of))
        )
        yield


def measure(dtype: torch.dtype, repeats: int) -> list[dict[str, Any]]:
    """CPU seconds of the fastest of ``repeats`` calls, by kernel."""
    engine = Engine(model().to(dtype))
    engine.loglikelihood([([1], [2])])
    assert engine.layers == "fused"
    best: tuple[float, defaultdict[str, Spent]] | None = None
    for _ in range(repeats):
        spent: defaultdict[str, Spent] = defaultdict(Spent)
        with clocked(spent):
            started = time.thread_time()
            engine.score(*CASE.build())
            total = time.thread_time() - started
        best = min(best or (total, spent), (total, spent), key=lambda found: found[0])
    assert best is not None
    total, by_kernel = best
    by_kernel["rest"].seconds = total - sum(kernel.seconds for kernel in by_kernel.values())
    tokens = engine.report.tokens_forwarded
    rows = [("all", Spent(total)), *sorted(by_kernel.items(), key=lambda entry: -entry[1].seconds)]
    return [
        {
            "dtype": str(dtype).removeprefix("torch."),
            "kernel": name,
            "seconds": kernel.seconds,
            "share": kernel.seconds / total,
            "us a token": 1e6 * kernel.seconds / tokens,
            "GFLOP/s": kernel.operations / kernel.seconds / 1e9 if kernel.operations else None,
        }
        for name, kernel in rows
    ]


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="may be given again; both by default")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dtypes = [DTYPES[name] for name in arguments.dtype or DTYPES]
    rows = [row for dtype in dtypes for row in measure(dtype, arguments.repeats)]
    publish("time by kernel", rows, arguments.json)


if __name__ == "__main__":
    main()
