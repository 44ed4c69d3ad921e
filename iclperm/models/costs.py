"""What the papers' studies ask, and what one costs a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from iclperm.engine.facts import ModelFacts, plan_flops
from iclperm.engine.plan import DEFAULT_UNIT_TOKENS, ContextPaths, Plan, plan_product
from iclperm.engine.tree import Rows
from iclperm.study import kinds

_NUM_IDS = 30_000


class Workload(NamedTuple):
    """A task by its lengths in tokens; ``new_tokens`` are generated for each query, 0 where labels are scored."""

    name: str
    opening: int
    demonstration: int
    query: int
    labels: int
    new_tokens: int


class PaperStudy(NamedTuple):
    """A study of the papers: every k up to ``shots`` if ``every_k``, ``times`` over for several tasks."""

    name: str
    sets: int
    permutations: int
    shots: int
    every_k: bool
    queries: int
    times: int


WORKLOADS = (
    Workload("classification", opening=20, demonstration=60, query=58, labels=4, new_tokens=0),
    Workload("generation", opening=20, demonstration=180, query=75, labels=0, new_tokens=256),
)
STUDIES = (
    PaperStudy(kinds.SENSITIVITY.name, sets=10, permutations=10, shots=8, every_k=False, queries=500, times=1),
    PaperStudy(kinds.SEARCH.name, sets=10, permutations=128, shots=8, every_k=False, queries=1000 + 500, times=1),
    PaperStudy(kinds.CURVE.name, sets=5, permutations=20, shots=20, every_k=True, queries=256, times=1),
    PaperStudy(kinds.TRANSFER.name, sets=10, permutations=128, shots=8, every_k=False, queries=1000 + 500, times=2),
)


@dataclass(frozen=True)
class Cost:
    """What one study costs one model; ``tokens`` are distinct and forwarded once, those generated among them.

    ``tokens_naive`` are those of prompting one by one; ``hours`` follow from ``flops`` at a stated rate.
    """

    study: str
    task: str
    contexts: int
    prompts: int
    tokens_naive: int
    tokens: int
    flops: float
    hours: float


def study_plan(study: PaperStudy, workload: Workload, unit_tokens: int = DEFAULT_UNIT_TOKENS) -> Plan:
    """The study as the engine would run it, with random tokens: one task's part of it."""
    rng = np.random.default_rng(0)

    def tokens(*shape: int) -> np.ndarray:
        return rng.integers(0, _NUM_IDS, shape).astype(np.int32)

    opening, sets = tokens(workload.opening), tokens(study.sets, study.shots, workload.demonstration)
    orders = [rng.permutation(study.shots) for _ in range(study.permutations)]
    rows = Rows.of([np.concatenate([opening, *chosen[order]]) for chosen in sets for order in orders])
    shots = range(study.shots + 1) if study.every_k else [study.shots]
    marks = Rows.of([[workload.opening + k * workload.demonstration for k in shots]] * len(rows))
    queries = tokens(study.queries, workload.query)
    # A placeholder that is never fed makes the last token of a query the one that is read.
    continuations = [[label] for label in range(max(1, workload.labels))]
    return plan_product(ContextPaths(rows, marks), list(queries), continuations, unit_tokens=unit_tokens)


def study_cost(facts: ModelFacts, study: PaperStudy, workload: Workload, plan: Plan, rate: float) -> Cost:
    """What a study of ``study_plan`` costs a model at ``rate`` TFLOP/s."""
    num_rows = plan.num_contexts * study.queries
    steps = max(0, workload.new_tokens - 1)  # the last token generated is never fed
    prompts = plan.context_lengths.sum() * study.queries + num_rows * workload.query
    # A token generated in step t sees its prompt, t - 1 tokens before it, and itself.
    pairs = int(prompts) * steps + num_rows * steps * (steps + 1) // 2
    flops = plan_flops(facts, plan, is_fused=True) + facts.flops(num_rows * steps, num_rows * steps, pairs)
    return Cost(
        study=study.name,
        task=workload.name,
        contexts=study.times * plan.num_contexts,
        prompts=study.times * num_rows,
        tokens_naive=study.times * (plan.tokens_naive + num_rows * steps),
        tokens=study.times * (plan.tokens + num_rows * steps),
        flops=study.times * flops,
        hours=study.times * flops / (rate * 1e12) / 3600,
    )
