"""How often bfloat16 changes a prediction, against float32 through the same tree, and how close the labels were there.

    python benchmarks/half_precision.py [--json benchmarks/results/half_precision.json]
    python benchmarks/half_precision.py --model FOLDER --task TASK [--json FILE]

The study of ``iclperm demo`` on the trained model that is bundled, and the Monte Carlo case on the 25 M Qwen2 shape at
random weights. With a model and a task, a small study of these (2 sets x 4 orders x 32 queries, k = 4), in bfloat16
once through the tree and once prompt by prompt in transformers' own code: which of the two flips more often. The margin
of a prompt is the float32 difference of its two best labels, in nats.
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


SIZES: dict[str, Any] = {"sets": 2, "permutations": 4, "shots": 4, "queries": 32}  # of a model's own study


def answers(study: Study) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Log-likelihoods [prompts, labels] of a study, and whether each prompt was answered correctly."""
    with tempfile.TemporaryDirectory() as folder:
        run = iclperm.run(study, Path(folder) / "run")
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


def of_a_model(model: str, task: str) -> list[dict[str, Any]]:
    """A row for bfloat16 through the tree, and one for it prompt by prompt."""
    study = Study(model=model, task=task, **SIZES)
    full, right = answers(study.model_copy(update={"dtype": "float32"}))
    rows = []
    for name, plain in (("through the tree", False), ("prompt by prompt", True)):
        half, still_right = answers(study.model_copy(update={"dtype": "bfloat16", "plain": plain}))
        accuracy = float(right.mean()), float(still_right.mean())
        rows.append(compared(f"{Path(task).stem}, {Path(model).name}, {name}", full, half, accuracy))
    return rows


def of_bundled_models() -> list[dict[str, Any]]:
    study = Study(**DEMO_STUDY)
    (full, right), (half, still_right) = (
        answers(study.model_copy(update={"dtype": dtype})) for dtype in ("float32", "bfloat16")
    )
    accuracy = float(right.mean()), float(still_right.mean())
    rows = [compared("demo study, bundled model", full, half, accuracy)]
    rows.append(compared("Monte Carlo, 25 M random", monte_carlo("float32"), monte_carlo("bfloat16"), ()))
    return rows


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--model", help="a model's folder, in place of the bundled ones")
    parser.add_argument("--task", help="a task's file or name, for --model")
    arguments = parser.parse_args()
    if (arguments.model is None) != (arguments.task is None):
        parser.error("give --model and --task, or neither")
    rows = of_a_model(arguments.model, arguments.task) if arguments.model else of_bundled_models()
    publish("bfloat16 against float32", rows, arguments.json)


if __name__ == "__main__":
    main()
