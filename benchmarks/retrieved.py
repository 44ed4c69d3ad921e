"""Every query with demonstrations of its own: tokens prompt by prompt, distinct and forwarded; seconds beside batches.

    python benchmarks/retrieved.py [--queries 100] [--shots 0,1,2,4,8] [--json benchmarks/results/retrieved.json]
    python benchmarks/retrieved.py --model FOLDER --ag-news test.csv --queries 12 --shots 0,1,2,4

Neighbours are the rows of train with the most similar words (cosine, rare words weighing more; of ``--pool`` rows at
most), each query's own, in three orders: the most similar last, first, and four random orders. ``distinct`` counts a
token of all prompts once, had they been one tree; ``forwarded`` is what passed through the model, part by part.
Plain transformers takes the same token ids in batches of like lengths, of the fastest of a few sizes, and has to agree
(``nats``: the largest difference of a log-likelihood). Both in float32, in turns; medians of ``--repeats`` after one
pass that does not count.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from _machine import options, publish
from populations import ag_news_task

BATCH_SIZES = (1, 4, 16)
ORDERS = {"similar_last": 1, "similar_first": 1, "permuted": 4}
BUCKETS = 4096


def word_vectors(texts: Sequence[str], document_share: npt.NDArray[np.float64] | None = None) -> Any:
    """Unit vectors of words, hashed [N, BUCKETS]; rare words weigh more by ``document_share``, theirs where None."""
    import zlib

    counts = np.zeros((len(texts), BUCKETS), np.float32)
    for row, text in enumerate(texts):
        for word in text.lower().split():
            counts[row, zlib.crc32(word.encode()) % BUCKETS] += 1
    share = (counts > 0).mean(axis=0) if document_share is None else document_share
    weighted = counts * -np.log(share + 1 / len(texts))
    return weighted / np.maximum(np.linalg.norm(weighted, axis=1, keepdims=True), 1e-9), share


def neighbours(task: Any, number: int, pool: int) -> npt.NDArray[np.int64]:
    """Train rows for every row of test, best first [rows, number]."""
    train, test = (
        [" ".join(map(str, fields.values())) for fields in task.examples(split).fields] for split in ("train", "test")
    )
    known, share = word_vectors(train[:pool])
    asked, _ = word_vectors(test, share)
    return np.argsort(-(asked @ known.T), axis=1, kind="stable")[:, :number]


def plain(model: Any, requests: list[tuple[list[int], list[int]]], size: int) -> npt.NDArray[np.float64]:
    """Log-likelihoods of (prompt, continuation) by batches of like lengths; equal rows are fed once."""
    import torch

    fed: dict[tuple[int, ...], list[int]] = {}
    for number, (prompt, label) in enumerate(requests):
        fed.setdefault((*prompt, *label[:-1]), []).append(number)
    rows, found = sorted(fed, key=len), np.empty(len(requests))
    for begin in range(0, len(rows), size):
        batch = rows[begin : begin + size]
        ids = torch.zeros(len(batch), len(batch[-1]), dtype=torch.int64)
        for place, row in enumerate(batch):
            ids[place, : len(row)] = torch.tensor(row)
        with torch.inference_mode():
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            for place, row in enumerate(batch):
                most = max(len(requests[number][1]) for number in fed[row])
                logprobs = model.lm_head(hidden[place, len(row) - most : len(row)]).float().log_softmax(-1)
                for number in fed[row]:
                    label = requests[number][1]
                    scored = logprobs[most - len(label) :]
                    found[number] = float(scored[torch.arange(len(label)), torch.tensor(label)].sum())
    return found


def measure(arguments: Any, order: str, folder: Path) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    from iclperm import Study
    from iclperm.engine import Engine
    from iclperm.engine.plan import plan_requests
    from iclperm.engine.tree import Rows
    from iclperm.runs.layout import lay_out
    from iclperm.runs.setting import ResolvedStudy

    study = Study(
        model=arguments.model, task=arguments.task, dtype="float32",
        demonstrations="per query", neighbours=str(folder / "neighbours.npy"), order=order,
        permutations=ORDERS[order], shots=arguments.shots, queries=arguments.queries,
    )  # fmt: skip
    setting = ResolvedStudy.of(study)
    began = time.perf_counter()
    work = lay_out(setting)
    planned = time.perf_counter() - began
    parts = [[(cell.prompt, ids) for cell in part.cells for ids in cell.continuations] for part in work.parts]
    every = [request for part in parts for request in part]
    whole = plan_requests(Rows.of([np.concatenate(one) for one in every]), np.array([len(one[0]) for one in every]))
    engine = Engine.from_pretrained(setting.model, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(setting.model, dtype=torch.float32).eval()
    asked = [(prompt.tolist(), ids.tolist()) for prompt, ids in every]
    sample = asked[:: max(1, len(asked) // 64)]

    def ours() -> npt.NDArray[np.float64]:
        return np.concatenate([engine.loglikelihood(part).logprob for part in parts])

    def seconds(run: Any) -> tuple[float, Any]:
        started = time.perf_counter()
        found = run()
        return time.perf_counter() - started, found

    size = min(BATCH_SIZES, key=lambda each: seconds(lambda: plain(model, sample, each))[0])
    taken: dict[str, list[float]] = {"ours": [], "plain": []}
    ours()
    for _ in range(arguments.repeats):
        before = engine.totals.tokens_forwarded
        ours_seconds, scores = seconds(ours)
        forwarded = engine.totals.tokens_forwarded - before
        plain_seconds, expected = seconds(lambda: plain(model, asked, size))
        taken["ours"].append(ours_seconds)
        taken["plain"].append(plain_seconds)
    medians = {name: statistics.median(each) for name, each in taken.items()}
    return {
        "model": Path(study.model_name).name, "task": setting.task.name, "order": order,
        "k": ",".join(map(str, study.shots)), "queries": study.queries, "orders": study.permutations,
        "prompts": len(work.growths[0].general), "parts": len(parts),
        "by prompt": whole.tokens_naive, "distinct": whole.tokens_unique, "planned": work.tokens.unique,
        "forwarded": forwarded, "saving": whole.tokens_naive / forwarded, "plan seconds": planned,
        "seconds": medians["ours"], "plain": medians["plain"], "batch": size,
        "faster": medians["plain"] / medians["ours"], "nats": float(np.abs(scores - expected).max()),
    }  # fmt: skip


def main() -> None:
    from iclperm import Task

    parser = options(__doc__)
    parser.set_defaults(repeats=3)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--task", default="mini_news")
    parser.add_argument("--ag-news", type=Path, help="the published test split: its titles in place of a task")
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--pool", type=int, default=4_000)
    parser.add_argument("--shots", default="0,1,2,4,8")
    parser.add_argument("--orders", nargs="+", default=list(ORDERS))
    arguments = parser.parse_args()
    arguments.shots = [int(k) for k in arguments.shots.split(",")]
    with tempfile.TemporaryDirectory() as name:
        if arguments.ag_news is not None:
            arguments.task = str(ag_news_task(arguments.ag_news, Path(name) / "ag_news"))
        found = neighbours(Task.load(arguments.task), max(arguments.shots), arguments.pool)
        np.save(Path(name) / "neighbours.npy", found)
        figures = [measure(arguments, order, Path(name)) for order in arguments.orders]
    publish("retrieved", figures, arguments.json)


if __name__ == "__main__":
    main()
