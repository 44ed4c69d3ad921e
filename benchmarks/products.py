"""Which matrix product is faster on this processor: torch's own, oneDNN's called by name, or ours: for few rows, and in
tiles (AMX) for any.

    python benchmarks/products.py [--threads 1] [--json benchmarks/results/products.json]

As many rows as a pack of prompts has (1,024), as go on together in generation (256, 128, 64), as a query has (40) and
fewer (16, 8); the shapes of the layers of Qwen2 at 25 M and 0.5 B and of the bundled model, and the heads of the first
and of Gemma 3 270M; the best of the repeats, in GFLOP/s, of CPU time with one thread and of wall time with several.
``iclperm/engine/kernels/linear.py`` chooses by it. Packed weights (oneDNN's blocked layout, made once, as vLLM does)
are measured beside. Ours, of at most 256 rows, is in torch's order of sums, and is left out where it is not the one
that torch has; in tiles it has an order of its own.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _machine import options, publish

from iclperm import _core
from iclperm.engine.kernels.linear import MatrixProduct

SHAPES = (
    (128, 128),
    (512, 512),
    (512, 1408),
    (1408, 512),
    (896, 896),
    (896, 4864),
    (4864, 896),
    (512, 16384),
    (640, 262144),
)
ROWS = (1024, 256, 128, 64, 40, 16, 8)
MOST_LOGITS = 1 << 26
MOST_OURS = 256
FLOPS = 1e10  # of a repeat, about


def rate(product: Callable[[], torch.Tensor], flops: int, repeats: int, clock: Callable[[], float]) -> float:
    """GFLOP/s of the fastest repeat."""
    calls = max(1, round(FLOPS / flops))
    product()
    seconds = []
    for _ in range(repeats):
        started = clock()
        for _ in range(calls):
            product()
        seconds.append((clock() - started) / calls)
    return flops / min(seconds) / 1e9


def main() -> None:
    """Measures and prints."""
    parser = options(__doc__ or "")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    clock = time.thread_time if given.threads == 1 else time.perf_counter
    figures: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16):
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            continue
        for (inputs, outputs), rows in itertools.product(SHAPES, ROWS):
            if rows * outputs > MOST_LOGITS:
                continue
            x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
            products: dict[str, Callable[[], torch.Tensor]] = {
                "torch": partial(torch.nn.functional.linear, x, weight),
                "onednn": partial(torch.ops.mkldnn._linear_pointwise, x, weight, None, "none", [], ""),
                "onednn, packed": partial(torch.ops.mkldnn._linear_pointwise, x, packed, None, "none", [], ""),
            }
            ours = MatrixProduct(weight, None, is_onednn=False)
            if ours.is_tiled:
                products["ours, in tiles"] = partial(ours.by_library, x)
                products["ours, laid out"] = partial(ours.by_library, x, ours.packed())
            elif rows <= MOST_OURS and (order := ours.order) is not None:
                products["ours"] = partial(ours.in_order, x, order)
            flops = 2 * rows * inputs * outputs
            rates = {name: rate(product, flops, given.repeats, clock) for name, product in products.items()}
            about = {"product": f"{str(dtype).removeprefix('torch.')} {inputs} -> {outputs}", "rows": rows}
            ratios = {f"{name} / torch": rates[name] / rates["torch"] for name in products if name != "torch"}
            figures.append(about | rates | ratios)
    publish(f"matrix products, {given.threads} threads, {', '.join(_core.available_isas())}", figures, given.json)


if __name__ == "__main__":
    main()
