"""Tokens forwarded against distinct and naive tokens, and the time that saves against plain transformers.

    python benchmarks/token_efficiency.py [--json benchmarks/results/token_efficiency.json]

Every case runs on the 25 M-parameter Qwen2 shape (hidden 512, 8 layers, random weights) in float32. Plain scoring
forwards each prompt once, unpadded, reading all labels from it, on an even sample of the prompts; both are timed in
turns in this one process, and the scores of the sample must agree to 1e-4 nats a token. The tree is timed in turns with
our decoder layers and with transformers' (``--repeats`` times each, medians).
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch
from _machine import options, publish
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from iclperm.engine import ContextPaths, Engine
from iclperm.engine.tree import Rows
from iclperm.reference.scoring import next_token_logprobs

VOCAB = 16_384
SAMPLE = 24


@dataclass(frozen=True)
class Case:
    """P orderings of K demonstrations, read after the numbers of shots in ``shots``, before Q queries and 4 labels."""

    name: str
    num_shots: int
    permutations: int
    shots: tuple[int, ...]
    queries: int
    shared: bool = True

    def build(self) -> tuple[ContextPaths, list[np.ndarray], list[list[int]]]:
        rng = np.random.default_rng(0)
        demonstrations = [rng.integers(0, VOCAB, rng.integers(32, 49)) for _ in range(self.num_shots)]
        rows, marks = [], []
        for _ in range(self.permutations):
            if not self.shared:
                demonstrations = [rng.integers(0, VOCAB, part.size) for part in demonstrations]
            ordering = [demonstrations[i] for i in rng.permutation(self.num_shots)]
            ends = 1 + np.cumsum([0, *(part.size for part in ordering)])
            rows.append(np.concatenate([[1], *ordering]))
            marks.append(ends[list(self.shots)])
        queries = [rng.integers(0, VOCAB, rng.integers(32, 49)) for _ in range(self.queries)]
        return ContextPaths(Rows.of(rows), Rows.of(marks)), queries, [[i] for i in (11, 12, 13, 14)]


CASES = [
    Case("curve: K=16, P=1, every k, Q=64", 16, 1, tuple(range(17)), 64),
    Case("order search: K=8, P=8, Q=64", 8, 8, (8,), 64),
    Case("long: K=64, P=1, k=0,8..64, Q=8", 64, 1, tuple(range(0, 65, 8)), 8),
    Case("nothing shared: 8 contexts, Q=1", 8, 8, (8,), 1, shared=False),
]


def model() -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=VOCAB, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
    )).eval()  # fmt: skip


def measure(case: Case, served: PreTrainedModel, engine: Engine, other: Engine, repeats: int) -> dict:
    contexts, queries, labels = case.build()
    runs = [[scored(each, contexts, queries, labels) for each in (engine, other)] for _ in range(repeats)]
    seconds, other_seconds = (statistics.median(run[place][0] for run in runs) for place in (0, 1))
    scores, other_scores = (runs[-1][place][1] for place in (0, 1))
    assert (engine.layers, other.layers) == ("fused", "transformers")
    assert np.abs(scores - other_scores).max() <= 1e-4
    report = engine.report
    assert report.tokens_forwarded <= 1.01 * report.tokens_unique
    plain_seconds, worst = plain_sample(case, served, contexts, queries, labels, scores)
    return {
        "case": case.name, "prompts": scores.shape[0] * scores.shape[1], "naive": report.tokens_naive,
        "distinct": report.tokens_unique, "forwarded": report.tokens_forwarded,
        "forwarded/distinct": report.tokens_forwarded / report.tokens_unique,
        "naive/forwarded": report.tokens_naive / report.tokens_forwarded, "seconds": seconds,
        "with transformers' layers": other_seconds, "layers' speed-up": other_seconds / seconds,
        "plain seconds": plain_seconds, "speed-up": plain_seconds / seconds, "utilisation": report.utilisation,
        "largest difference": worst,
    }  # fmt: skip


def scored(engine: Engine, contexts, queries, labels) -> tuple[float, np.ndarray]:
    """Seconds and scores of one call."""
    started = time.perf_counter()
    scores = engine.score(contexts, queries, labels)
    return time.perf_counter() - started, scores


def plain_sample(case, served, contexts, queries, labels, scores) -> tuple[float, float]:
    """Seconds that all prompts would take plainly, from an even sample, and the largest difference in nats."""
    cells = [
        (row, mark, query)
        for row in range(case.permutations)
        for mark in range(len(case.shots))
        for query in range(case.queries)
    ]
    chosen = [cells[i] for i in np.linspace(0, len(cells) - 1, min(SAMPLE, len(cells))).astype(int)]
    next_token_logprobs(served, queries[0])
    seconds = tokens = worst = 0.0
    for row, mark, query in chosen:
        context = contexts.rows[row][: contexts.marks[row][mark]]
        prompt = [*context.tolist(), *queries[query].tolist()]
        started = time.perf_counter()
        logprobs = next_token_logprobs(served, prompt)
        seconds += time.perf_counter() - started
        tokens += len(prompt)
        fast = scores[row * len(case.shots) + mark, query]
        worst = max(worst, float(np.abs(fast - logprobs[[label[0] for label in labels]]).max()))
    assert worst <= 1e-4, f"{case.name}: scores differ by {worst} nats"
    total = sum(int(contexts.marks[r][m]) + len(queries[q]) for r, m, q in cells)
    return seconds / tokens * total, worst


def main() -> None:
    arguments = options(__doc__).parse_args()
    served = model()
    engines = [Engine(served), Engine(served, layers="transformers")]
    for engine in engines:
        engine.loglikelihood([([1], [2])])  # the self-check is no part of the figures
    figures = [measure(case, served, *engines, arguments.repeats) for case in CASES]
    publish("token efficiency", figures, arguments.json)


if __name__ == "__main__":
    main()
