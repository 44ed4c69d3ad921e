"""The models of the two papers: what sets them apart, what they weigh, and what each study costs on them.

``configs/`` holds the config.json of every open one with where its values are from; weights, keys and values are
counted on it by the code that plans a run.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from iclperm.engine.plan import ContextPaths, Plan, plan_product
from iclperm.engine.tree import Rows
from iclperm.errors import RequestError

if TYPE_CHECKING:
    from iclperm.engine.model import PlainModel

DEFAULT_RATE = 495.0
"""TFLOP/s: half of what the data sheet of an H200 gives for dense bfloat16 products (989)."""

_CONFIGS = Path(__file__).parent / "configs"
_ORDER = (
    "qwen2.5-0.5b",
    "qwen2.5-1.5b",
    "qwen2.5-3b",
    "qwen2.5-7b",
    "gemma-2b",
    "gemma-7b",
    "gemma-2-2b",
    "gemma-2-9b",
    "gemma-3-27b",
    "llama-3.2-1b",
    "llama-3.2-3b",
    "llama-3.1-8b",
    "deepseek-r1-distill-qwen-1.5b",
    "deepseek-r1-distill-qwen-7b",
)
_NUM_IDS = 30_000


@dataclass(frozen=True)
class PaperModel:
    """An open model of the papers: its config.json, where its values are from, and what was published of its size."""

    name: str
    hub_id: str
    is_gated: bool
    published_parameters: int
    published_in: str
    sources: tuple[str, ...]
    config: Mapping[str, Any] = field(repr=False)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Within: a folder with the model's config.json and nothing else."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
            yield Path(folder)


def paper_models() -> tuple[PaperModel, ...]:
    """The 14 open models of the papers, by family and size."""
    texts = [(_CONFIGS / f"{slug}.json").read_text(encoding="utf-8") for slug in _ORDER]
    return tuple(PaperModel(**{**fields, "sources": tuple(fields["sources"])}) for fields in map(json.loads, texts))


class Workload(NamedTuple):
    """A task by its lengths in tokens; ``new_tokens`` are generated for each query, 0 where labels are scored."""

    name: str
    opening: int
    demonstration: int
    query: int
    labels: int
    new_tokens: int


class Design(NamedTuple):
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
DESIGNS = (
    Design("sensitivity", sets=10, permutations=10, shots=8, every_k=False, queries=500, times=1),
    Design("search", sets=10, permutations=128, shots=8, every_k=False, queries=1000 + 500, times=1),
    Design("curve", sets=5, permutations=20, shots=20, every_k=True, queries=256, times=1),
    Design("transfer", sets=10, permutations=128, shots=8, every_k=False, queries=1000 + 500, times=2),
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


@dataclass(frozen=True)
class Row:
    """One model: its architecture, its memory in bytes, its costs. ``window`` 0 and ``softcaps`` () mean none.

    ``num_window_layers`` of ``num_layers`` attend within ``window``; ``softcaps`` are of attention and of logits.
    ``kv_token_bytes`` are of one token in bfloat16, over all layers.
    """

    name: str
    hub_id: str
    is_gated: bool
    parameters: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_tokens: int
    window: int
    num_window_layers: int
    softcaps: tuple[float, ...]
    is_tied: bool
    rope: str
    weights_bfloat16: int
    weights_float32: int
    kv_token_bytes: int
    costs: tuple[Cost, ...]


def table(rate: float = DEFAULT_RATE) -> list[Row]:
    """A row for each model of the papers; ``rate`` is in TFLOP/s. No weights are needed. Cost: some seconds.

    Raises RequestError for a rate that is not positive.
    """
    if not 0 < rate < float("inf"):
        raise RequestError(f"a rate of {rate} TFLOP/s cannot be; give a positive number, such as {DEFAULT_RATE:.0f}")
    plans = [(design, workload, _plan(design, workload)) for design in DESIGNS for workload in WORKLOADS]
    return [_row(model, plans, rate) for model in paper_models()]


def markdown(rows: Sequence[Row]) -> str:
    """The rows as three tables: architectures and memory, what the studies ask, and what that costs each model."""
    return "\n".join([*_architectures(rows), "", *_studies(rows[0].costs), "", *_costs(rows)]) + "\n"


def _plan(design: Design, workload: Workload) -> Plan:
    """The study as the engine would run it, with random tokens: one task's part of it."""
    rng = np.random.default_rng(0)

    def tokens(*shape: int) -> np.ndarray:
        return rng.integers(0, _NUM_IDS, shape).astype(np.int32)

    opening, sets = tokens(workload.opening), tokens(design.sets, design.shots, workload.demonstration)
    orders = [rng.permutation(design.shots) for _ in range(design.permutations)]
    rows = Rows.of([np.concatenate([opening, *chosen[order]]) for chosen in sets for order in orders])
    shots = range(design.shots + 1) if design.every_k else [design.shots]
    marks = Rows.of([[workload.opening + k * workload.demonstration for k in shots]] * len(rows))
    queries = tokens(design.queries, workload.query)
    # A placeholder that is never fed makes the last token of a query the one that is read.
    continuations = [[label] for label in range(max(1, workload.labels))]
    return plan_product(ContextPaths(rows, marks), list(queries), continuations)


def _row(model: PaperModel, plans: Sequence[tuple[Design, Workload, Plan]], rate: float) -> Row:
    from iclperm.engine.footprint import Sizes
    from iclperm.engine.model import PlainModel, load_shapes

    with model.folder() as folder:
        loaded, place = load_shapes(folder, device="cpu", dtype="float32")
    weights_wide = Sizes.of(PlainModel(loaded), place).weights
    shapes = PlainModel(loaded.bfloat16())
    config = shapes.config
    kinds = list(getattr(config, "layer_types", None) or ())
    num_window_layers = kinds.count("sliding_attention")
    softcaps = (getattr(config, "attn_logit_softcapping", None), getattr(config, "final_logit_softcapping", None))
    return Row(
        name=model.name,
        hub_id=model.hub_id,
        is_gated=model.is_gated,
        parameters=weights_wide // 4,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab_size=shapes.vocab_size,
        max_tokens=shapes.max_positions,
        window=config.sliding_window if num_window_layers else 0,
        num_window_layers=num_window_layers,
        softcaps=tuple(float(cap) for cap in softcaps if cap),
        is_tied=bool(config.tie_word_embeddings),
        rope=_rope(config.rope_parameters),
        weights_bfloat16=Sizes.of(shapes, place).weights,
        weights_float32=weights_wide,
        kv_token_bytes=shapes.kv_bytes_per_token,
        costs=tuple(_cost(shapes, design, workload, plan, rate) for design, workload, plan in plans),
    )


def _rope(settings: Mapping[str, Any]) -> str:
    """The base of the rotary embedding, and what stretches it; of local and global layers apart."""
    if "full_attention" in settings:
        local, whole = (_rope(settings[kind]) for kind in ("sliding_attention", "full_attention"))
        return f"{local} local, {whole} global"
    base = f"{settings['rope_theta']:,.0f}"
    factor = settings.get("factor")
    return base if not factor else f"{base}, {settings['rope_type']} x{factor:.0f}"


def _cost(model: PlainModel, design: Design, workload: Workload, plan: Plan, rate: float) -> Cost:
    from iclperm.engine.estimate import plan_flops

    num_rows = plan.num_contexts * design.queries
    steps = max(0, workload.new_tokens - 1)  # the last token generated is never fed
    prompts = plan.context_lengths.sum() * design.queries + num_rows * workload.query
    # A token generated in step t sees its prompt, t - 1 tokens before it, and itself.
    pairs = int(prompts) * steps + num_rows * steps * (steps + 1) // 2
    flops = plan_flops(model, plan, is_fused=True) + model.flops(num_rows * steps, num_rows * steps, pairs)
    return Cost(
        study=design.name,
        task=workload.name,
        contexts=design.times * plan.num_contexts,
        prompts=design.times * num_rows,
        tokens_naive=design.times * (plan.tokens_naive + num_rows * steps),
        tokens=design.times * (plan.tokens + num_rows * steps),
        flops=design.times * flops,
        hours=design.times * flops / (rate * 1e12) / 3600,
    )


def _architectures(rows: Sequence[Row]) -> Iterator[str]:
    yield from _head("model", "parameters", "layers", "hidden", "heads / KV", "head dim", "window", "soft-caps", "head",
                     "RoPE base", "vocabulary", "context", "weights bf16", "fp32", "KV a token")  # fmt: skip
    for row in rows:
        window = f"{row.window:,} in {row.num_window_layers}" if row.window else ""
        yield _line(
            f"{row.name} (`{row.hub_id}`)",
            f"{row.parameters / 1e9:.2f} B",
            row.num_layers,
            f"{row.hidden_size:,}",
            f"{row.num_heads} / {row.num_kv_heads}",
            row.head_dim,
            window,
            ", ".join(f"{cap:g}" for cap in row.softcaps),
            "tied" if row.is_tied else "own",
            row.rope,
            f"{row.vocab_size:,}",
            f"{row.max_tokens:,}",
            f"{row.weights_bfloat16 / 2**30:.1f} GiB",
            f"{row.weights_float32 / 2**30:.1f} GiB",
            f"{row.kv_token_bytes / 2**10:.0f} KiB",
        )


def _studies(costs: Sequence[Cost]) -> Iterator[str]:
    yield from _head("study", "task", "contexts", "prompts", "tokens one by one", "distinct tokens", "saving")
    for cost in costs:
        saving = f"{cost.tokens_naive / cost.tokens:.1f} to 1"
        numbers = (f"{number:,}" for number in (cost.contexts, cost.prompts, cost.tokens_naive, cost.tokens))
        yield _line(cost.study, cost.task, *numbers, saving)


def _costs(rows: Sequence[Row]) -> Iterator[str]:
    yield from _head("model", *(f"{cost.study}, {cost.task}" for cost in rows[0].costs))
    for row in rows:
        yield _line(row.name, *(f"{cost.flops / 1e18:.3g} ({_duration(cost.hours)})" for cost in row.costs))


def _duration(hours: float) -> str:
    if hours < 1 / 60:
        return f"{hours * 3600:.0f} s"
    return f"{hours * 60:.0f} min" if hours < 1 else f"{hours:.1f} h"


def _head(*names: str) -> list[str]:
    return [_line(*names), _line(*("---" for _ in names))]


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"
