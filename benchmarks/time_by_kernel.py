"""Where the engine's time goes, kernel by kernel: CPU time of one thread.

    python benchmarks/time_by_kernel.py [--repeats 2] [--json benchmarks/results/time_by_kernel.json]

The Monte Carlo case with k = 0, 4, .. 16 on the 25 M Qwen2 shape, float32 and bfloat16. Matrix products are told by
their shape [outputs, inputs]; ``rest`` is everything that no kernel does: planning, gathers, torch's own overhead.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from _machine import options, publish
from token_efficiency import Case, model

from iclperm import _core
from iclperm.engine import Engine, layers
from iclperm.engine.kernels import rowwise

CASE = Case("Monte Carlo", 16, 1, (0, 4, 8, 12, 16), 64)


@contextmanager
def clocked(seconds: defaultdict[str, float]) -> Iterator[None]:
    """Within: the CPU time of every kernel adds up in ``seconds``."""

    def timed(name: str | None, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            started = time.thread_time()
            result = call(*arguments, **options)
            told = name or f"product {list(arguments[0].weight.shape)}"
            seconds[told] += time.thread_time() - started
            return result

        return run

    with ExitStack() as undo:
        for name in ("tree_attention", "rms_norm", "rotate", "head_rows"):
            undo.enter_context(mock.patch.object(_core, name, timed(name, getattr(_core, name))))
        activations = {kind: timed("activation", kernel) for kind, kernel in rowwise._KERNELS.items()}
        undo.enter_context(mock.patch.dict(rowwise._KERNELS, activations))
        undo.enter_context(mock.patch.object(layers, "linear", timed(None, layers.linear)))
        undo.enter_context(mock.patch.object(torch.nn.Linear, "forward", timed(None, torch.nn.Linear.forward)))
        yield


def measure(dtype: torch.dtype, repeats: int) -> list[dict[str, Any]]:
    """CPU seconds of the fastest of ``repeats`` calls, by kernel."""
    engine = Engine(model().to(dtype))
    engine.loglikelihood([([1], [2])])
    assert engine.layers == "fused"
    best: tuple[float, defaultdict[str, float]] | None = None
    for _ in range(repeats):
        seconds: defaultdict[str, float] = defaultdict(float)
        with clocked(seconds):
            started = time.thread_time()
            engine.score(*CASE.build())
            total = time.thread_time() - started
        best = min(best or (total, seconds), (total, seconds), key=lambda found: found[0])
    assert best is not None
    total, by_kernel = best
    by_kernel["rest"] = total - sum(by_kernel.values())
    tokens = engine.report.tokens_forwarded
    rows = [("all", total), *sorted(by_kernel.items(), key=lambda entry: -entry[1])]
    return [
        {
            "dtype": str(dtype),
            "kernel": name,
            "seconds": value,
            "share": value / total,
            "us a token": 1e6 * value / tokens,
        }
        for name, value in rows
    ]


def main() -> None:
    arguments = options(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    rows = [row for dtype in (torch.float32, torch.bfloat16) for row in measure(dtype, arguments.repeats)]
    publish("time by kernel", rows, arguments.json)


if __name__ == "__main__":
    main()
