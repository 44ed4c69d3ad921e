"""The attention contract: what a layer attends with, by which rule, and what answers for one pack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from iclperm.engine.tree import IntArray


@dataclass(frozen=True)
class AttentionRule:
    """How one layer attends: scores are scaled, soft-capped (0: not), and limited to a window (0: not) by position."""

    scaling: float
    softcap: float
    window: int


@dataclass(frozen=True)
class LayerStates:
    """What one layer attends with: q [M, Hq, d], k and v [M, Hkv, d] of a pack's rows, all of one dtype.

    ``k_pool`` and ``v_pool`` [slots, Hkv, d] hold those of the open path. With ``query_rows`` [R], ascending, q is
    [>= R, Hq, d] and holds those rows of the pack alone. ``sinks`` float32 [Hq] are one score more a head in the
    softmax, neither scaled nor capped and of no value (gpt-oss); -inf is as none.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    query_rows: IntArray | None = None
    sinks: torch.Tensor | None = None


class PackAttention(Protocol):
    """Attention prepared for one pack, called once a layer."""

    def __call__(self, states: LayerStates, rule: AttentionRule) -> torch.Tensor:
        """What each row of q attends to, in its shape and dtype; zero for rows that no visit owns (padding)."""
        ...
