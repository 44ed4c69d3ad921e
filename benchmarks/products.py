"""Which matrix product is faster on this processor: torch's own, or oneDNN's called by name.

    python benchmarks/products.py [--json benchmarks/results/products.json]

One thread, 1,024 rows, the shapes of the layers of Qwen2 at 25 M and 0.5 B and of the bundled model; CPU time, the best
of the repeats, in GFLOP/s. ``iclperm/engine/kernels/linear.py`` chooses by it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from _machine import options, publish

from iclperm import _core

SHAPES = ((128, 128), (512, 512), (512, 1408), (1408, 512), (896, 896), (896, 4864), (4864, 896))
ROWS, CALLS = 1024, 8


def rate(product: Callable[[], torch.Tensor], flops: int, repeats: int) -> float:
    """GFLOP/s of the fastest repeat."""
    product()
    seconds = []
    for _ in range(repeats):
        started = time.thread_time()
        for _ in range(CALLS):
            product()
        seconds.append((time.thread_time() - started) / CALLS)
    return flops / min(seconds) / 1e9


def main() -> None:
    """Measures and prints."""
    given = options(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    figures: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16):
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            continue
        for inputs, outputs in SHAPES:
            x, weight = torch.randn(ROWS, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
            flops = 2 * ROWS * inputs * outputs
            own = rate(lambda x=x, weight=weight: torch.nn.functional.linear(x, weight), flops, given.repeats)
            named = rate(
                lambda x=x, weight=weight: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""),
                flops,
                given.repeats,
            )
            name = f"{str(dtype).removeprefix('torch.')} {inputs} -> {outputs}"
            figures.append({"product": name, "torch": own, "onednn": named, "onednn / torch": named / own})
    publish(f"matrix products, {', '.join(_core.available_isas())}", figures, given.json)


if __name__ == "__main__":
    main()
