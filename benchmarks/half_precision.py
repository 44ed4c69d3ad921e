"""How often bfloat16 changes a prediction, against float32 through the same tree, and how close the labels were there.

    python benchmarks/half_precision.py [--json benchmarks/results/half_precision.json]

The study of ``iclperm demo`` on the trained model that is bundled, and the Monte Carlo case on the 25 M Qwen2 shape at
random weights. The margin of a prompt is the float32 difference of its two best labels, in nats.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from _machine import options, publish
from token_efficiency import CASES, model

import iclperm
from iclperm.cli.commands import DEMO_STUDY
from iclperm.engine import Engine
from iclperm.study.study import Study

NEAR_TIES = (1e-4, 0.01, 0.1)  # nats


def demo(dtype: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Log-likelihoods [prompts, labels] of the demo study, and whether each prompt was answered correctly."""
    with tempfile.TemporaryDirectory() as folder:
        run = iclperm.run(Study(**DEMO_STUDY, dtype=dtype), Path(folder) / "run")
        return run.label_logprob.reshape(-1, run.label_logprob.shape[-1]), run.correct.reshape(-1)


def monte_carlo(dtype: str) -> npt.NDArray[Any]:
    """As ``demo``, of the first benchmark case."""
    contexts, queries, labels = CASES[0].build()
    scores = Engine(model().to(getattr(torch, dtype))).score(contexts, queries, labels)
    return scores.reshape(-1, scores.shape[-1])


def compared(name: str, full: npt.NDArray[Any], half: npt.NDArray[Any], accuracy: tuple[float, ...]) -> dict[str, Any]:
    """Rates of flips and of near-ties."""
    flipped = full.argmax(axis=1) != half.argmax(axis=1)
    ordered = np.sort(full, axis=1)
    margin = ordered[:, -1] - ordered[:, -2]
    row: dict[str, Any] = {"case": name, "prompts": len(full), "flipped": float(flipped.mean())}
    for nats in NEAR_TIES:
        row[f"within {nats:g} nats"] = float((margin <= nats).mean())
    row["largest margin flipped"] = float(margin[flipped].max(initial=0.0))
    row["mean difference"] = float(np.abs(full - half).mean())
    row["largest difference"] = float(np.abs(full - half).max())
    if accuracy:
        row["accuracy float32"], row["accuracy bfloat16"] = accuracy
    return row


def main() -> None:
    arguments = options(__doc__ or "").parse_args()
    (full, right), (half, still_right) = demo("float32"), demo("bfloat16")
    accuracy = float(right.mean()), float(still_right.mean())
    rows = [compared("demo study, bundled model", full, half, accuracy)]
    rows.append(compared("Monte Carlo, 25 M random", monte_carlo("float32"), monte_carlo("bfloat16"), ()))
    publish("bfloat16 against float32", rows, arguments.json)


if __name__ == "__main__":
    main()
