"""What decoder layers of our own gain over transformers', architecture by architecture.

    python benchmarks/layers.py [--families llama granite] [--dtype bfloat16] [--json FILE]

Each architecture has random weights, hidden states of 512, 8 layers of 8 heads (2 of keys and values), gates of 1,408
(2,048 where nothing is gated) and 32,000 token ids: some 39 M parameters, 16 M of them embeddings. One call scores 32
queries under 8 orderings of 8 demonstrations, 4 labels each. Both engines run in turns in this one process on one
thread (``--repeats`` times each, medians of the processor's seconds, which others on the machine do not change much);
their scores must agree.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch
from _machine import options, publish
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from iclperm.engine import ContextPaths, Engine
from iclperm.engine.tree import Rows

VOCAB, LAYERS = 32_000, 8
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": LAYERS,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
    "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PLAIN_MLP: dict[str, Any] = {"intermediate_size": 2048}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "granite": {"residual_multiplier": 0.22, "embedding_multiplier": 12.0, "attention_multiplier": 1 / 64},
    "smollm3": {},
    "olmo3": {"sliding_window": 256},
    "glm": {},
    "glm4": {},
    "cohere": {},
    "cohere2": {"sliding_window": 256},
    "starcoder2": PLAIN_MLP,
    "phi": PLAIN_MLP,
}
TOLERANCE = {"float32": 1e-4, "bfloat16": 1.0}


def build(family: str, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family]})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval().to(dtype)
    return model


def case() -> tuple[ContextPaths, list[np.ndarray], list[list[int]]]:
    rng = np.random.default_rng(0)
    demonstrations = [rng.integers(3, VOCAB, rng.integers(32, 49)) for _ in range(8)]
    rows = [np.concatenate([[1], *(demonstrations[i] for i in rng.permutation(8))]) for _ in range(8)]
    queries = [rng.integers(3, VOCAB, rng.integers(32, 49)) for _ in range(32)]
    return ContextPaths(Rows.of(rows), Rows.of([[row.size] for row in rows])), queries, [[i] for i in (11, 12, 13, 14)]


def measure(family: str, dtype: str, repeats: int) -> dict[str, Any]:
    model, given = build(family, getattr(torch, dtype)), case()
    engines = [Engine(model), Engine(model, layers="transformers")]
    seconds: list[list[float]] = [[], []]
    for engine in engines:
        engine.loglikelihood([([1], [2])])  # the first-use check is no part of the figures
    for _ in range(repeats):
        scores = []
        for engine, of_engine in zip(engines, seconds, strict=True):
            started = time.process_time()
            scores.append(engine.score(*given))
            of_engine.append(time.process_time() - started)
    ours, theirs = map(statistics.median, seconds)
    worst = float(np.abs(scores[0] - scores[1]).max())
    assert worst <= TOLERANCE[dtype], f"{family}: scores differ by {worst} nats"
    return {
        "family": family, "dtype": dtype, "layers": engines[0].layers, "row invariant": engines[0].row_invariant,
        "tokens": engines[0].report.tokens_forwarded, "seconds": ours, "with transformers' layers": theirs,
        "times as fast": theirs / ours, "largest difference": worst,
    }  # fmt: skip


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--dtype", choices=TOLERANCE, default="float32")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = [measure(family, arguments.dtype, arguments.repeats) for family in arguments.families]
    publish("layers of our own", figures, arguments.json)


if __name__ == "__main__":
    main()
