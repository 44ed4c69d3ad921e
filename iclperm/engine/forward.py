"""One pack on its way through a model's layers, and the keys and values that it leaves for later packs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from iclperm.engine.kernels.attention import AttentionRule, PackAttention
from iclperm.engine.plan import Pack
from iclperm.engine.tree import IntArray
from iclperm.errors import ModelError

# A matrix product splits its rows among the threads; a share of fewer than 4 rows, or no multiple of 4, takes another
# code path and other bits (measured: MKL, fp32, 2 threads: 9, 10 and 11 rows differ from all of 12 to 2048).
_ROW_MULTIPLE = 8


def padded_rows(num_rows: int) -> int:
    """Rows to run a matrix product with, so that each row's bits do not depend on how many there are."""
    least = max(num_rows, _ROW_MULTIPLE * torch.get_num_threads())
    return -(-least // _ROW_MULTIPLE) * _ROW_MULTIPLE


class KvPool:
    """Keys and values of the open path: one pair of tensors [slots, Hkv, d] a layer, slots as the plan numbers them."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = max(1, num_slots)
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def layer(self, number: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The pool of a layer, made at its first use in the shape of its k and v [M, Hkv, d]."""
        if number == len(self._layers):
            self._layers.append(
                (k.new_zeros(self._num_slots, *k.shape[1:]), v.new_zeros(self._num_slots, *v.shape[1:]))
            )
        return self._layers[number]


@dataclass
class TreeForward:
    """One pack on its way through the layers; the attention function finds it in its keyword ``tree``."""

    pack: Pack
    num_rows: int  # of the pack with its padding
    pool: KvPool
    attend: PackAttention
    config: Any
    num_layers: int = 0
    num_tokens: int = 0  # rows of the pack that the first layer saw, padding not counted
    is_narrowed: bool = False  # the last layer went on with the scored rows alone

    @property
    def num_scored(self) -> int:
        """Rows of the pack that logits are read of."""
        return int(self.pack.scored_rows.size)

    def narrowed(self) -> tuple[IntArray, torch.Tensor]:
        """The scored rows [R], and the same as an index padded as matrix products need it: for the last layer."""
        self.is_narrowed = True
        rows = self.pack.scored_rows.astype(np.int64)
        index = torch.zeros(padded_rows(rows.size) if rows.size else 0, dtype=torch.int64)
        index[: rows.size] = torch.from_numpy(rows)
        return rows, index

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rule: AttentionRule,
        query_rows: IntArray | None = None,
    ) -> torch.Tensor:
        """Attend q [M, Hq, d] over the tree, then keep what later packs need of k and v [M, Hkv, d].

        With ``query_rows`` [R], q [>= R, Hq, d] holds those rows alone.
        """
        if self.num_layers == 0:
            self.num_tokens = k.shape[0] - (self.num_rows - len(self.pack))
        if v.shape[-1] != q.shape[-1]:
            raise ModelError(
                f"{self.config.model_type!r} has values of {v.shape[-1]} and keys of {q.shape[-1]} dimensions a head, "
                "which the tree cannot serve; run it with plain=True (--plain)"
            )
        k_pool, v_pool = self.pool.layer(self.num_layers, k, v)
        self.num_layers += 1
        out = self.attend(q, k, v, k_pool, v_pool, rule, query_rows)
        for begin, end, slot in zip(self.pack.retain_begin, self.pack.retain_end, self.pack.retain_slot, strict=True):
            k_pool[slot : slot + end - begin] = k[begin:end]
            v_pool[slot : slot + end - begin] = v[begin:end]
        return out

    def refuse_mask(self, module: nn.Module, mask: torch.Tensor | None) -> None:
        """Raise ModelError if a layer brings a mask of its own, which says more than the tree does."""
        if mask is not None:
            raise ModelError(
                f"{type(module).__name__} gives its attention a mask of its own, which the tree cannot serve; "
                "run it with plain=True (--plain)"
            )

    def window(self, module: nn.Module, arguments: dict[str, Any]) -> int:
        """The sliding window of a layer, 0 for none; some architectures tell it to their mask alone."""
        if "sliding_window" in arguments:
            return int(arguments["sliding_window"] or 0)
        kinds = getattr(self.config, "layer_types", None)
        if kinds and kinds[getattr(module, "layer_idx", self.num_layers)] != "sliding_attention":
            return 0
        return int(getattr(self.config, "sliding_window", None) or 0)
