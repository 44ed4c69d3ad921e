"""What text costs beside token ids: the same product scored both ways, and how much of the call is planning.

    OMP_NUM_THREADS=1 python benchmarks/text_or_ids.py [--model FOLDER] [--repeats 5] [--json FILE]

8 orderings of 32 demonstrations at every number of them, 16 queries and 4 labels: 4,096 prompts of the bundled
headlines, on a Qwen2 shape of 25 M parameters with random weights and the bundled tokenizer, or on a model given; then
an eighth of the same prompts one by one (`loglikelihood`). Both ways run in turns and give the same bits. Bars: text
takes at most 1.10 of ids, planning at most 0.10 of the call.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _machine import options, publish
from token_efficiency import model as qwen2_25m
from transformers import AutoTokenizer

from iclperm.demo import data_path, model_path
from iclperm.engine import Engine

ORDERINGS, DEMONSTRATIONS, QUERIES = 8, 32, 16
LABELS = [" World", " Sports", " Business", " Technology"]


def texts() -> tuple[list[str], list[str]]:
    """Contexts and queries."""
    rows = [json.loads(line) for line in (data_path() / "train.jsonl").read_text().splitlines()]
    rng = np.random.default_rng(0)
    contexts = [""]
    for _ in range(ORDERINGS):
        context = ""
        for number in rng.permutation(len(rows))[:DEMONSTRATIONS]:
            context += f"Article: {rows[number]['text']}\nAnswer: {rows[number]['label']}\n\n"
            contexts.append(context)
    asked = [json.loads(line)["text"] for line in (data_path() / "test.jsonl").read_text().splitlines()[:QUERIES]]
    return contexts[1:], [f"Article: {text}\nAnswer:" for text in asked]


def in_turns(engine: Engine, ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, Any]:
    """Median seconds of each way and of its planning; asserts that their results are equal."""
    seconds, planning = ({name: list[float]() for name in ways} for _ in range(2))
    for _ in range(repeats):
        answers = []
        for name, way in ways.items():
            started = time.perf_counter()
            answers.append(way())
            seconds[name].append(time.perf_counter() - started)
            planning[name].append(engine.report.seconds["plan"])
        assert all(np.array_equal(answers[0], other) for other in answers[1:])
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        "text, s": medians["text"],
        "ids, s": medians["ids"],
        "text / ids": medians["text"] / medians["ids"],
        "planning of text, s": statistics.median(planning["text"]),
        "planning / call": statistics.median(planning["text"]) / medians["text"],
    }


def main() -> None:
    """Measures and prints."""
    parser = options(__doc__ or "")
    parser.add_argument("--model", type=Path, help="a folder; a shape of 25 M parameters by default")
    given = parser.parse_args()
    if given.model is None:
        engine = Engine(qwen2_25m(), AutoTokenizer.from_pretrained(model_path()))
    else:
        engine = Engine.from_pretrained(given.model)
    contexts, queries = texts()
    assert engine.numerics  # the first-use check is over
    found = engine._encoder.product(contexts, queries, [LABELS] * len(queries))
    assert found.holds.all()
    labels = found.labels[0]
    rows = [
        {"verb": "score", "prompts": len(contexts) * len(queries)}
        | in_turns(
            engine,
            {
                "text": lambda: engine.score(contexts, queries, LABELS),
                "ids": lambda: engine.score(found.contexts, found.queries, labels),
            },
            given.repeats,
        )
    ]
    pairs = [(context + query, label) for context in contexts[::8] for query in queries for label in LABELS]
    encoded, begins = engine._encoder.requests(pairs)
    as_ids = [(encoded[n][: begins[n]], encoded[n][begins[n] :]) for n in range(len(pairs))]
    rows.append(
        {"verb": "loglikelihood", "prompts": len(pairs)}
        | in_turns(
            engine,
            {
                "text": lambda: engine.loglikelihood(pairs).logprob,
                "ids": lambda: engine.loglikelihood(as_ids).logprob,
            },
            given.repeats,
        )
    )
    publish(f"text and ids, {engine.model.config.model_type}", rows, given.json)


if __name__ == "__main__":
    main()
