"""How long plans will take, and what a model weighs, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from iclperm import _core
from iclperm.engine.budget import Budget, resolve_budget
from iclperm.engine.footprint import Footprint, Sizes
from iclperm.engine.layers import may_fuse
from iclperm.engine.model import PlainModel, gemm_rate, load_shapes
from iclperm.engine.plan import DEFAULT_PACK_TOKENS, Plan

# The share of the matrix-product rate that forward passes reach grows with the hidden size, as the work between the
# products shrinks beside them. Measured in float32 on a CPU: 0.4-0.6 at 128 (benchmarks/estimate.py), 0.70-0.85 at 512
# (benchmarks/results/token_efficiency.json); hidden / (hidden + 100) follows that.
_HALF_RATE_HIDDEN = 100
_MOST_UTILISATION = 0.85
# What a layer costs a pack however few its tokens: 0.7-1.2 ms, measured with packs of 44 tokens.
_LAYER_SECONDS = 0.0008


@dataclass(frozen=True)
class Estimate:
    """What plans would cost a model on this machine, unbroken and after loading.

    ``flops`` are those of the matrix products and the attention, ``flops_per_second`` is the machine's measured rate of
    matrix products, and ``utilisation`` the share of it that is expected: ``seconds`` is their quotient.
    ``memory`` is the largest footprint of the plans, in packs of at most ``pack_tokens``; ``memory_budget`` is what was
    given, in bytes. ``weight_bytes`` counts tied weights once, ``kv_token_bytes`` is what one token's keys and values
    take. ``bfloat16_speedup`` is how much faster bfloat16's matrix products were measured to be; None but in float32 on
    a processor that multiplies bfloat16.
    """

    seconds: float
    flops: float
    flops_per_second: float
    utilisation: float
    device: str
    dtype: str
    weight_bytes: int
    kv_token_bytes: int
    memory: Footprint | None
    pack_tokens: int
    memory_budget: int | None
    bfloat16_speedup: float | None


def estimate(
    name: str | Path,
    plans: Iterable[Plan],
    *,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    memory_budget: Budget | None = None,
) -> Estimate:
    """Estimate the time of an unbroken run of all units of ``plans`` by the model in a folder or of a hub id.

    Reads the configuration alone; device and dtype are resolved as on loading, but that a configuration which names no
    dtype counts as float32. On the CPU where it was measured the time is within a factor of 1.5
    (``benchmarks/estimate.py``); elsewhere, and beside other work, take it for an order of magnitude. Sliding windows
    are not taken off. Cost: half a second of matrix products. Raises ModelError as loading does, RequestError
    if a plan does not fit into ``memory_budget`` (as the engine's).
    """
    shapes, place = load_shapes(name, device=device, dtype=dtype, revision=revision)
    model = PlainModel(shapes)
    sizes = Sizes.of(model, place)
    budget = None if memory_budget is None else resolve_budget(memory_budget, place)
    plans = [plan if budget is None else sizes.fitted(plan, budget) for plan in plans]
    footprints = [sizes.footprint(plan) for plan in plans]
    hidden, num_layers = int(model.config.hidden_size), int(model.config.num_hidden_layers)
    pack_tokens = max((plan.pack_tokens for plan in plans), default=DEFAULT_PACK_TOKENS)
    rate = gemm_rate(pack_tokens, hidden, model.dtype, place)
    is_fused = may_fuse(place, model.dtype) and model.known_decoder is not None
    flops = sum(_flops(model, plan, is_fused=is_fused) for plan in plans)
    reached = min(_MOST_UTILISATION, hidden / (hidden + _HALF_RATE_HIDDEN))
    seconds = flops / (rate * reached) + _LAYER_SECONDS * num_layers * sum(plan.num_packs for plan in plans)
    return Estimate(
        seconds=seconds,
        flops=flops,
        flops_per_second=rate,
        utilisation=flops / (rate * seconds) if seconds else reached,
        device=str(place),
        dtype=str(model.dtype).removeprefix("torch."),
        weight_bytes=sizes.weights,
        kv_token_bytes=model.kv_bytes_per_token,
        memory=max(footprints, key=lambda footprint: footprint.peak, default=None),
        pack_tokens=pack_tokens,
        memory_budget=budget,
        bfloat16_speedup=_bfloat16_rate(model, pack_tokens, place) / rate if _could_be_bfloat16(model, place) else None,
    )


def _could_be_bfloat16(model: PlainModel, place: torch.device) -> bool:
    return place.type == "cpu" and model.dtype == torch.float32 and "avx512_bf16" in _core.available_isas()


def _bfloat16_rate(model: PlainModel, pack_tokens: int, place: torch.device) -> float:
    return gemm_rate(pack_tokens, int(model.config.hidden_size), torch.bfloat16, place)


def _flops(model: PlainModel, plan: Plan, *, is_fused: bool) -> float:
    if not is_fused:
        return model.flops(plan.tokens, plan.scored_rows, plan.attention_pairs)
    skipped = (plan.tokens - plan.scored_rows, plan.attention_pairs - plan.scored_pairs)
    return model.flops(plan.tokens, plan.scored_rows, plan.attention_pairs, *skipped, plan.tokens - plan.num_ids)
