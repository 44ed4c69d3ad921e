"""The papers' models side by side: architectures, memory, and what each study costs on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from iclperm.engine.plan import Plan
from iclperm.errors import RequestError
from iclperm.models.costs import STUDIES, WORKLOADS, Cost, PaperStudy, Workload, study_cost, study_plan
from iclperm.models.papers import PaperModel, paper_models

DEFAULT_RATE = 495.0
"""TFLOP/s: half of what the data sheet of an H200 gives for dense bfloat16 products (989)."""


@dataclass(frozen=True)
class ModelRow:
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


def table(rate: float = DEFAULT_RATE, models: Sequence[PaperModel] | None = None) -> list[ModelRow]:
    """A row for each of ``models``, by default all of the papers; ``rate`` is in TFLOP/s.

    Reads configurations, no weights. Cost: some seconds. Raises RequestError for a rate that is not positive.
    """
    if not 0 < rate < float("inf"):
        raise RequestError(f"a rate of {rate} TFLOP/s cannot be; give a positive number, such as {DEFAULT_RATE:.0f}")
    plans = [(study, workload, study_plan(study, workload)) for study in STUDIES for workload in WORKLOADS]
    return [_row(model, plans, rate) for model in (paper_models() if models is None else models)]


def markdown(rows: Sequence[ModelRow]) -> str:
    """The rows as three tables: architectures and memory, what the studies ask, and what that costs each model."""
    return "\n".join([*_architectures(rows), "", *_studies(rows[0].costs), "", *_costs(rows)]) + "\n"


def _row(model: PaperModel, plans: Sequence[tuple[PaperStudy, Workload, Plan]], rate: float) -> ModelRow:
    from iclperm.engine.plain_model import read_facts  # PyTorch, which the types of this table do without

    with model.folder() as folder:
        facts = read_facts(folder, device="cpu", dtype="bfloat16")
    return ModelRow(
        name=model.name,
        hub_id=model.hub_id,
        is_gated=model.is_gated,
        parameters=facts.num_parameters,
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        num_heads=facts.num_heads,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_size,
        vocab_size=facts.vocab_size,
        max_tokens=facts.max_positions,
        window=facts.window,
        num_window_layers=facts.num_window_layers,
        softcaps=tuple(cap for cap in (facts.attention_softcap, facts.logit_softcap) if cap),
        is_tied=facts.is_tied,
        rope=_rope(facts.rope),
        weights_bfloat16=2 * facts.num_parameters,
        weights_float32=4 * facts.num_parameters,
        kv_token_bytes=facts.kv_token_bytes,
        costs=tuple(study_cost(facts, study, workload, plan, rate) for study, workload, plan in plans),
    )


def _rope(settings: Mapping[str, Any]) -> str:
    """The base of the rotary embedding, and what stretches it; of local and global layers apart."""
    if "full_attention" in settings:
        local, whole = (_rope(settings[kind]) for kind in ("sliding_attention", "full_attention"))
        return f"{local} local, {whole} global"
    base = f"{settings['rope_theta']:,.0f}"
    factor = settings.get("factor")
    return base if not factor else f"{base}, {settings['rope_type']} x{factor:.0f}"


def _architectures(rows: Sequence[ModelRow]) -> Iterator[str]:
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


def _costs(rows: Sequence[ModelRow]) -> Iterator[str]:
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
