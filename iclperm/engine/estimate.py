"""How long plans will take, and what a model weighs, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

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
    ``weight_bytes`` counts tied weights once, ``kv_token_bytes`` is what one token's keys and values take.
    """

    seconds: float
    flops: float
    flops_per_second: float
    utilisation: float
    device: str
    dtype: str
    weight_bytes: int
    kv_token_bytes: int


def estimate(
    name: str | Path,
    plans: Iterable[Plan],
    *,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
) -> Estimate:
    """Estimate the time of an unbroken run of all units of ``plans`` by the model in a folder or of a hub id.

    Reads the configuration alone; device and dtype are resolved as on loading, but that a configuration which names no
    dtype counts as float32. On the CPU where it was measured the time is within a factor of 1.5
    (``benchmarks/estimate.py``); elsewhere, and beside other work, take it for an order of magnitude. Sliding windows
    are not taken off. Cost: half a second of matrix products. Raises ModelError as loading does.
    """
    plans = list(plans)
    shapes, place = load_shapes(name, device=device, dtype=dtype, revision=revision)
    model = PlainModel(shapes)
    hidden, num_layers = int(model.config.hidden_size), int(model.config.num_hidden_layers)
    pack_tokens = max((plan.pack_tokens for plan in plans), default=DEFAULT_PACK_TOKENS)
    rate = gemm_rate(pack_tokens, hidden, model.dtype, place)
    is_narrowed = may_fuse(place, model.dtype) and model.known_decoder is not None
    flops = sum(_flops(model, plan, is_narrowed=is_narrowed) for plan in plans)
    reached = min(_MOST_UTILISATION, hidden / (hidden + _HALF_RATE_HIDDEN))
    seconds = flops / (rate * reached) + _LAYER_SECONDS * num_layers * sum(plan.num_packs for plan in plans)
    return Estimate(
        seconds=seconds,
        flops=flops,
        flops_per_second=rate,
        utilisation=flops / (rate * seconds) if seconds else reached,
        device=str(place),
        dtype=str(model.dtype).removeprefix("torch."),
        weight_bytes=sum(weight.numel() * weight.itemsize for weight in shapes.parameters()),
        kv_token_bytes=model.kv_bytes_per_token,
    )


def _flops(model: PlainModel, plan: Plan, *, is_narrowed: bool) -> float:
    skipped = (plan.tokens - plan.scored_rows, plan.attention_pairs - plan.scored_pairs) if is_narrowed else (0, 0)
    return model.flops(plan.tokens, plan.scored_rows, plan.attention_pairs, *skipped)
