"""Paths whose keys and values are over the memory budget: predicted and measured peaks, times, and equal bits.

    python benchmarks/long_paths.py [--gemma FOLDER] [--json benchmarks/results/long_paths.json]

One ordering of K demonstrations of about 100 tokens, read after 0, K/2 and K, before 24 queries with four labels. Every
case runs in processes of their own: once without a budget, then within budgets that leave the keys and values of the
path a part of what they take: half, run as chosen, and 12 %, run each way (where the hidden states of a path are over
the budget as well, recomputing becomes offloading: see ``way``). The peak is measured as in ``benchmarks/memory.py``;
``beside weights`` is measured over predicted of what is not weights. ``same bits`` compares a digest of all
log-likelihoods with the run that has no budget. Predicted seconds are what the way adds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import memory
import numpy as np
from _machine import options, publish
from transformers import LlamaConfig, Qwen2Config

from iclperm.base.environment import VARIABLES
from iclperm.engine import ContextPaths, Engine, Plan, plan_product
from iclperm.engine.long_paths import Rates
from iclperm.engine.tree import Rows

MODELS = {
    # Keys and values of a token take 16 times what its hidden states do: recomputing leaves room for many.
    "many heads, 12 layers": LlamaConfig(
        vocab_size=8192, hidden_size=384, intermediate_size=1024, num_hidden_layers=12, num_attention_heads=6,
        num_key_value_heads=6, max_position_embeddings=32_768, tie_word_embeddings=True,
    ),
    "grouped heads, 8 layers": Qwen2Config(
        vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=32_768, tie_word_embeddings=True,
    ),
}  # fmt: skip
GEMMA = "Gemma 3 270M"
SHOTS = (16, 64)
# Of the keys and values of a path, what is left of the budget beside all else of a run in packs of PACK_TOKENS.
BUDGETS = ((0.5, "chosen"), (0.12, "offload"), (0.12, "recompute"))
PACK_TOKENS, QUERIES, LABELS = 128, 24, 4
# Rates that leave no choice.
FORCED = {"offload": Rates(flops=1.0, store=math.inf), "recompute": Rates(flops=math.inf, store=1.0)}


def workload(vocabulary: int, num_shots: int) -> Plan:
    rng = np.random.default_rng(0)
    demonstrations = [rng.integers(3, vocabulary, rng.integers(90, 111)) for _ in range(num_shots)]
    ends = 1 + np.cumsum([0, *(part.size for part in demonstrations)])
    paths = ContextPaths(Rows.of([np.concatenate([[1], *demonstrations])]), Rows.of([ends[[0, num_shots // 2, -1]]]))
    queries = [rng.integers(3, vocabulary, rng.integers(32, 49)) for _ in range(QUERIES)]
    return plan_product(paths, queries, [[11 + label] for label in range(LABELS)], pack_tokens=PACK_TOKENS)


def measure(folder: Path, tiny: Path, num_shots: int, share: float, way: str) -> dict[str, Any]:
    """One run, in a process that has done nothing else; a ``share`` of 1 is no budget."""
    memory.score(Engine.from_pretrained(tiny, dtype="float32", device="cpu"), pack_tokens=64)
    before = memory.settled_bytes("cpu")
    engine = Engine.from_pretrained(folder, dtype="float32", device="cpu", pack_tokens=PACK_TOKENS)
    plan = workload(engine.model.config.vocab_size, num_shots)
    whole = engine.footprint(plan)
    if share < 1:
        engine._memory_budget = int(whole.peak - (1 - share) * whole.kv)
        if way != "chosen":
            engine._rates = lambda _: FORCED[way]  # type: ignore[method-assign]
    memory.reset_peak("cpu")
    assert engine.numerics["pack_tokens"] is None  # the first-use check
    started = time.perf_counter()
    results = [result.logprob for result in engine.execute(plan)]
    seconds = time.perf_counter() - started
    measured = memory.peak_bytes("cpu") - before
    fitted, foretold = engine.fitted(plan), engine.footprint(plan)
    path = fitted.long_path
    return {
        "path tokens": int(plan.context_lengths.max()), "budget MiB": (engine._memory_budget or 0) / 2**20,
        "way": path.way if path else "at hand", "pack": fitted.pack_tokens, "rows": path.rows if path else 0,
        "KV of the path MiB": whole.kv / 2**20,
        "predicted MiB": foretold.peak / 2**20, "measured MiB": measured / 2**20,
        "measured/predicted": measured / foretold.peak,
        "beside weights": (measured - foretold.weights) / (foretold.peak - foretold.weights),
        "recomputed tokens": engine.report.recomputed_tokens, "seconds": seconds,
        "predicted more s": path.seconds if path and way == "chosen" else None,
        "digest": hashlib.sha256(np.concatenate([each.ravel() for each in results]).tobytes()).hexdigest()[:12],
    }  # fmt: skip


def in_process(*case: object) -> dict[str, Any]:
    """``measure`` in a fresh process."""
    words = [sys.executable, __file__, "--case", *map(str, case)]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, env={**VARIABLES, **os.environ})
    if ran.returncode:
        raise RuntimeError(f"{case} failed: {ran.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--gemma", type=Path, help="a folder with Gemma 3 270M, whose layers mostly have windows")
    parser.add_argument("--model", action="append", help="these models alone")
    parser.add_argument("--case", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.case:
        folder, tiny, num_shots, share, way = given.case
        print(json.dumps(measure(Path(folder), Path(tiny), int(num_shots), float(share), way)))
        return
    memory.SHAPES.update(MODELS)
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folders = {name: memory.checkpoint(name, "float32", Path(place)) for name in ("tiny", *MODELS)}
        tiny = folders.pop("tiny")
        if given.gemma:
            folders[GEMMA] = given.gemma
        for name, folder in folders.items():
            if given.model and name not in given.model:
                continue
            for num_shots in SHOTS:
                whole = in_process(folder, tiny, num_shots, 1.0, "chosen")
                runs = [("no budget", whole)]
                runs += [(way, in_process(folder, tiny, num_shots, share, way)) for share, way in BUDGETS]
                for asked, run in runs:
                    same = run["digest"] == whole["digest"]
                    figures.append({"model": name, "K": num_shots, "asked": asked, **run, "same bits": str(same)})
                    assert same, "other bits than without a budget"
                print(json.dumps(figures[-len(runs) :]), file=sys.stderr)
    publish("long_paths", figures, given.json)


if __name__ == "__main__":
    main()
