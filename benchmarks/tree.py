"""How fast trees and plans are built: tokens a second on one core, and the plan of 64 million prompts.

python benchmarks/tree.py [--json benchmarks/results/tree.json]
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import numpy as np
from _machine import options, publish, timed

from iclperm.engine.plan import ContextPaths, plan_product
from iclperm.engine.tree import Rows, build_requests, build_tree

VOCAB = 50_000


def paths(rng: np.random.Generator, permutations: int, shots: int, length: int) -> list[np.ndarray]:
    """Orderings of ``shots`` demonstrations of ``length`` tokens each."""
    demonstrations = rng.integers(0, VOCAB, (shots, length), dtype=np.int32)
    return [demonstrations[rng.permutation(shots)].reshape(-1) for _ in range(permutations)]


def tree_cases(repeats: int) -> list[dict]:
    rng = np.random.default_rng(0)
    orderings = paths(rng, 1000, 64, 60)
    every_prefix = [row[: 40 * k] for row in paths(rng, 500, 32, 40) for k in range(33)]
    queries = [rng.integers(0, VOCAB, 40, dtype=np.int32) for _ in range(20_000)]
    labelled = [np.append(query, np.int32(label)) for query in queries for label in range(4)]
    short = [rng.integers(0, 8, 12, dtype=np.int32) for _ in range(300_000)]
    cases = {
        "1000 orderings of 64 demonstrations": Rows.of(orderings),
        "all k-shot prompts, 500 orderings of 32": Rows.of(every_prefix),
        "300,000 rows that branch everywhere": Rows.of(short),
    }
    figures = [
        figure(name, rows, lambda rows=rows: build_tree(rows)[0].num_tokens, repeats) for name, rows in cases.items()
    ]
    rows = Rows.of(labelled)
    begins = rows.lengths - 1
    figures.append(
        figure(
            "20,000 queries x 4 labels, with targets", rows, lambda: build_requests(rows, begins).num_tokens, repeats
        )
    )
    return figures


def figure(name: str, rows: Rows, build, repeats: int) -> dict:
    seconds = timed(build, repeats)
    return {
        "case": name,
        "rows": len(rows),
        "tokens": int(rows.tokens.size),
        "distinct": build(),
        "seconds (median)": seconds["median"],
        "Mtokens/s (median)": rows.tokens.size / seconds["median"] / 1e6,
        "Mtokens/s (slowest)": rows.tokens.size / seconds["max"] / 1e6,
    }


def large_plan() -> dict:
    """P = 1000 orderings of K = 64 demonstrations, every k, Q = 1000 queries of 40 tokens, 4 labels."""
    rng = np.random.default_rng(0)
    rows = Rows.of(paths(rng, 1000, 64, 60))
    marks = Rows.of([list(range(0, 64 * 60 + 1, 60))] * 1000)
    queries = [rng.integers(0, VOCAB, 40, dtype=np.int32) for _ in range(1000)]
    started = time.perf_counter()
    plan = plan_product(ContextPaths(rows, marks), queries, [[1], [2], [3], [4]])
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "case": "plan P=1000 K=64 Q=1000",
        "prompts": len(marks.tokens) * len(queries),
        "units": plan.num_units,
        "packs": plan.num_packs,
        "naive tokens": plan.tokens_naive,
        "distinct tokens": plan.tokens_unique,
        "planned tokens": plan.tokens,
        "kv peak tokens": plan.kv_peak_tokens,
        "seconds": seconds,
        "process peak MB": peak / 1024,
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--plan-only", action="store_true", help="only the large plan, in this process")
    arguments = parser.parse_args()
    if arguments.plan_only:
        publish("plan", [large_plan()], arguments.json)
        return
    publish("tree build, one core", tree_cases(arguments.repeats), arguments.json)
    # A fresh process, so that the peak is the plan's own.
    json = ["--json", str(arguments.json.with_name("plan.json"))] if arguments.json else []
    subprocess.run([sys.executable, __file__, "--plan-only", *json], check=True)


if __name__ == "__main__":
    main()
