"""The same decision: a search for the best order that asks everything, one that races, and plain prompting.

    OMP_NUM_THREADS=1 python benchmarks/same_decision.py [--sets 1] [--json benchmarks/results/same_decision.json]

The bundled model and task at k = 8: 128 orderings of each set, 1,000 dev queries and 100 of test. *tokens* went through
the model, *seconds* of processor time took the whole run: prompts, model, store and report. Plain prompting forwards
each prompt of the search by itself through transformers; of an even sample of them, scaled by their tokens. *regret* is
the dev accuracy of the ordering that asking everything chooses, less that of the one chosen, in points, the mean over
sets; asking everything knows both.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from _machine import options, publish

SIZES = {"permutations": 128, "shots": 8, "dev_queries": 1000, "queries": 100}
SAMPLE = 200


def searched(folder: Path, sets: int, budget: str) -> tuple[Any, float]:
    """A run of the search, with the seconds of processor time until its report was made."""
    import iclperm

    started = time.process_time()
    run = iclperm.run(iclperm.Study(kind="search", sets=sets, budget=budget, **SIZES), folder)
    run.findings()
    return run, time.process_time() - started


def plainly(study: Any) -> float:
    """Seconds of processor time of every prompt by itself, from an even sample of them."""
    from transformers import AutoModelForCausalLM

    from iclperm import demo
    from iclperm.reference.scoring import next_token_logprobs
    from iclperm.runs.layout import lay_out
    from iclperm.runs.setting import ResolvedStudy

    prompts = lay_out(ResolvedStudy.of(study)).prompts
    model = AutoModelForCausalLM.from_pretrained(demo.model_path()).eval()
    contexts, queries = ([len(ids) for ids in each] for each in (prompts.contexts, prompts.queries))
    total = sum(contexts) * len(queries) + sum(queries) * len(contexts)
    cells = np.linspace(0, len(contexts) * len(queries) - 1, SAMPLE).astype(int).tolist()
    asked = [[*prompts.contexts[cell // len(queries)], *prompts.queries[cell % len(queries)]] for cell in cells]
    next_token_logprobs(model, asked[0])
    started = time.process_time()
    for prompt in asked:
        next_token_logprobs(model, prompt)
    return (time.process_time() - started) / sum(map(len, asked)) * total


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--sets", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        searched(Path(folder, "warm"), 1, "5 %")
        raced, race_seconds = searched(Path(folder, "race"), asked.sets, "adaptive")
        whole, seconds = searched(Path(folder, "whole"), asked.sets, "exhaustive")
    on_dev = whole.splits["dev"].correct[:, :, -1].mean(axis=2)
    chosen = [one.permutation for one in raced.findings().sets]
    regret = float((on_dev.max(axis=1) - on_dev[np.arange(len(on_dev)), chosen]).mean())
    told = (
        ("prompt by prompt", whole.report.tokens_naive, plainly(whole.study), 0.0),
        ("asking everything", whole.report.tokens_forwarded, seconds, 0.0),
        ("budget: adaptive", raced.report.tokens_forwarded, race_seconds, regret),
    )
    figures = [
        {"way": way, "tokens": tokens, "seconds": round(took, 1), "regret, points": round(100 * lost, 3)}
        for way, tokens, took, lost in told
    ]
    publish("same decision", [{**line, "sets": asked.sets, **SIZES} for line in figures], asked.json)


if __name__ == "__main__":
    main()
