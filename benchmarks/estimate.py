"""The time that ``iclperm.engine.estimate`` foretells against the time that scoring then takes.

    python benchmarks/estimate.py [--repeats 3] [--json benchmarks/results/estimate.json]

On the bundled model and on the 25 M-parameter Qwen2 shape of ``token_efficiency.py`` (random weights), both in float32.
The estimate sees a folder with a configuration alone. Seconds are the median of the repeats, the first-use check and
loading not counted.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _machine import options, publish
from token_efficiency import Case, model
from transformers import AutoModelForCausalLM, PreTrainedModel

from iclperm.demo import model_path
from iclperm.engine import Engine, plan_product
from iclperm.engine.estimate import estimate

CASES = [
    Case("curve: K=16, P=1, k=0,4..16, Q=32", 16, 1, tuple(range(0, 17, 4)), 32),
    Case("order search: K=8, P=4, Q=32", 8, 4, (8,), 32),
    Case("small packs: K=1, P=2, Q=2", 1, 2, (1,), 2),
]


def measure(name: str, served: PreTrainedModel, case: Case, repeats: int) -> dict[str, Any]:
    vocabulary = served.config.vocab_size
    contexts, queries, labels = case.build()
    contexts.rows.tokens[:] %= vocabulary
    plan = plan_product(contexts, [query % vocabulary for query in queries], labels)
    with tempfile.TemporaryDirectory() as folder:
        served.config.save_pretrained(folder)
        foretold = estimate(Path(folder), [plan])
    engine = Engine(served)
    engine.loglikelihood([([1], [2])])  # the self-check is no part of the figures
    seconds = [_seconds(engine, plan) for _ in range(repeats)]
    report = engine.report
    assert foretold.flops == report.flops, "the estimate counts other work than is done"
    measured = statistics.median(seconds)
    return {
        "model": name, "case": case.name, "threads": torch.get_num_threads(), "tokens": report.tokens_forwarded,
        "packs": report.num_packs, "GFLOP": report.flops / 1e9, "GFLOP/s": foretold.flops_per_second / 1e9,
        "foretold s": foretold.seconds, "measured s": measured, "fastest s": min(seconds),
        "measured/foretold": measured / foretold.seconds,
        "utilisation foretold": foretold.utilisation, "utilisation": report.utilisation,
    }  # fmt: skip


def _seconds(engine: Engine, plan: Any) -> float:
    for _ in engine.execute(plan):
        pass
    return float(engine.report.seconds["total"])


def main(arguments: Sequence[str] | None = None) -> None:
    given = options(__doc__).parse_args(arguments)
    demo = AutoModelForCausalLM.from_pretrained(model_path(), dtype="float32").eval()
    models = {"bundled": demo, "25 M": model()}
    figures = [measure(name, served, case, given.repeats) for name, served in models.items() for case in CASES]
    publish("estimated time", figures, given.json)


if __name__ == "__main__":
    main()
