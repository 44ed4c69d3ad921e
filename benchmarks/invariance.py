"""What it costs that a row's bits do not depend on the rows beside it.

    python benchmarks/invariance.py [--json benchmarks/results/invariance.json]

The check at start-up (layers compared, prompts scored three ways, every shape of matrix product probed) in seconds, and
the padding that keeps products on one path: rows added, and the time that products of padded rows take beside that of
bare ones, in turns, over the packs of a short study.
"""

from __future__ import annotations

import statistics
import time

import torch
from _machine import options, publish
from token_efficiency import CASES, model

from iclperm.demo import model_path
from iclperm.engine import Engine
from iclperm.engine.kernels.linear import linear
from iclperm.engine.shapes import padded_rows


def start_up(engine: Engine) -> float:
    """Seconds of the first-use check."""
    engine.loglikelihood([([1], [2])])
    assert engine.row_invariant
    return float(engine.totals.seconds["self_check"])


@torch.inference_mode()
def products(sizes: list[int], dtype: torch.dtype, repeats: int) -> float:
    """Time of products of padded rows as a share of that of bare ones."""
    module = torch.nn.Linear(512, 1408, bias=False).to(dtype)
    padded = [torch.randn(padded_rows(rows, torch.device("cpu")), 512).to(dtype) for rows in sizes]
    bare = [x[:rows] for x, rows in zip(padded, sizes, strict=True)]
    ratios = []
    for _ in range(repeats):
        seconds = []
        for inputs in (padded, bare):
            started = time.perf_counter()
            for x in inputs:
                linear(module, x)
            seconds.append(time.perf_counter() - started)
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios)


def main() -> None:
    arguments = options(__doc__ or "").parse_args()
    rows = []
    for name, load in (
        ("bundled", lambda: Engine.from_pretrained(model_path())),
        ("25 M Qwen2", lambda: Engine(model())),
    ):
        engine = load()
        seconds = start_up(engine)
        contexts, queries, labels = CASES[1].build()
        contexts.rows.tokens[:] %= engine.model.config.vocab_size
        engine.score(contexts, [query % engine.model.config.vocab_size for query in queries[:16]], labels)
        report = engine.report
        rows.append({
            "model": name, "check s": seconds, "packs": report.num_packs, "tokens": report.tokens_forwarded,
            "padding": report.padding_rows / report.tokens_forwarded,
        })  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        for sizes in ([1017] * 8, [21] * 64):
            ratio = products(sizes, dtype, 4 * arguments.repeats)
            rows.append({"model": f"products of {sizes[0]} rows, {dtype}", "padded/bare": ratio})
    publish("row invariance", rows, arguments.json)


if __name__ == "__main__":
    main()
