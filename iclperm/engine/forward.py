"""One pack on its way through a model's layers, and the keys and values that it leaves for later packs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from iclperm import _core
from iclperm.engine.kernels.attention import NativeAttention, as_numpy
from iclperm.engine.kernels.live import LiveSlots
from iclperm.engine.kernels.packed_weights import PackedWeights
from iclperm.engine.kernels.rule import AttentionRule, LayerStates, PackAttention
from iclperm.engine.link import Array
from iclperm.engine.plan import Pack
from iclperm.engine.shapes import padded_rows, whole_rows
from iclperm.engine.tables import EachRow, PackTables, ScoredRows
from iclperm.engine.token_rows import TokenPlaces, TokenRows
from iclperm.engine.tree import IntArray
from iclperm.errors import PLAINLY, ModelError

_LOGITS_IN_HEAP = 16 << 20
"""Of more the system gives new pages each time, a quarter of the head's time (`iclperm.base.environment`)."""
_FEWEST_LOGIT_ROWS = 128  # of fewer a product is slower than new pages make it
_MOST_RUNS = 8  # of rows that are copied by themselves; more go in one indexed copy


@dataclass(frozen=True)
class PassLimits:
    """What forward passes hold at once at most, whatever the size of their packs.

    ``token_rows_bytes`` are of rows that the first layer keeps by token id, ``logit_bytes`` of logits in float32;
    ``dense_rows`` rows are scored at a time where torch's operations attend.
    """

    token_rows_bytes: int = 64 << 20
    logit_bytes: int = 64 << 20
    dense_rows: int = 1024

    def logit_rows(self, vocab_size: int, device: torch.device) -> int:
        """Rows of logits that exist at a time; on a CPU no more than its heap keeps, or `_FEWEST_LOGIT_ROWS`."""
        most = padded_rows(self.logit_bytes // (vocab_size * 4), device)
        if device.type != "cpu":
            return most
        return min(most, whole_rows(max(_FEWEST_LOGIT_ROWS, _LOGITS_IN_HEAP // (vocab_size * 4)), device))

    def probed_rows(self, vocab_size: int, device: torch.device) -> int:
        """Rows of logits that the first-use check tries the head with: all that exist at a time, on a host, where they
        take memory that a run may not need, an eighth of them, but 64."""
        most = self.logit_rows(vocab_size, device)
        return padded_rows(max(64, most // 8), device) if device.type == "cpu" else most


class KvPool:
    """Keys and values of the open path: one pair of tensors [slots, Hkv, d] a layer, slots as the plan numbers them.

    What else a pack leaves to later ones is here too: the first layer's rows by token, and the slots of live rows.
    """

    def __init__(self, num_slots: int, limits: PassLimits) -> None:
        self._token_rows_bytes = limits.token_rows_bytes
        self.token_rows = TokenRows(self._token_rows_bytes)
        self.live_slots = LiveSlots()
        self._num_slots = max(1, num_slots)
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forget_token_rows(self) -> None:
        """What the first layer made of token ids is another's, or was never finished: each is computed again."""
        self.token_rows = TokenRows(self._token_rows_bytes)

    def start(self, pack: Pack) -> None:
        """A pack comes, which goes through all layers, or through all that are left of them."""

    def layer(self, number: int, k: torch.Tensor, v: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The pool of a layer, made at its first use in the shape of its k and v [M, Hkv, d].

        The layer sees keys less than ``window`` positions back (0: all).
        """
        if number == len(self._layers):
            self._layers.append((_slots_like(k, self._num_slots), _slots_like(v, self._num_slots)))
        return self._layers[number]

    def leave(self, number: int) -> None:
        """What later packs need of a layer is in its pool now."""


def _slots_like(states: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Room for keys or values of ``num_slots`` tokens, as states [M, Hkv, d].

    On a CPU a head's lie next to each other: a key-value head is walked at a time, and memory gives neighbours sooner.
    """
    _, num_heads, head_dim = states.shape
    if states.device.type == "cpu":
        return states.new_empty(num_heads, num_slots, head_dim).transpose(0, 1)
    return states.new_empty(num_slots, num_heads, head_dim)


class OneLayerPool(KvPool):
    """Keys and values of the open path in one layer, for packs that go through the layers side by side."""

    def layer(self, number: int, k: torch.Tensor, v: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The one there is; what it holds of another layer is written over before it is read."""
        return self._shared(k, v)

    def _shared(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shapes = [(self._num_slots, *states.shape[1:]) for states in (k, v)]
        if not self._layers or [pool.shape for pool in self._layers[0]] != shapes:
            self._layers = [(k.new_zeros(shapes[0]), v.new_zeros(shapes[1]))]  # zeros: numbers, wherever they are read
        return self._layers[0]


@dataclass(frozen=True)
class RetainedRows:
    """Rows of a pack that go to pool slots, and these, int64 [r] each: run after run."""

    def arrays(self, tables: PackTables) -> tuple[Array, ...]:
        pack = tables.pack
        rows = [np.arange(*run) for run in zip(pack.retain_begin, pack.retain_end, strict=True)]
        slots = [np.arange(slot, slot + run.size) for run, slot in zip(rows, pack.retain_slot, strict=True)]
        return (np.concatenate(rows), np.concatenate(slots)) if rows else (np.empty(0, np.int64),) * 2


@dataclass
class TreeForward:
    """One pack on its way through the layers; the attention function finds it in its keyword ``tree``."""

    tables: PackTables
    pool: KvPool
    attend: PackAttention
    config: Any
    copied: PackedWeights
    num_layers: int = 0
    num_tokens: int = 0  # rows of the pack that the first layer saw, padding not counted
    is_narrowed: bool = False  # the last layer went on with the scored rows alone
    hidden: torch.Tensor | None = None  # [M, H] before the next layer, where layers run one at a time
    rule: AttentionRule | None = None  # of the layer that attended last
    num_looked_up: int = 0  # tokens whose first q, k, v were computed for an earlier one of the same id
    _rotations: dict[tuple[int, torch.device], tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = field(
        default_factory=dict
    )

    @property
    def pack(self) -> Pack:
        return self.tables.pack

    @property
    def num_rows(self) -> int:
        """Of the pack with its padding."""
        return self.tables.num_rows

    @property
    def num_scored(self) -> int:
        """Rows of the pack that logits are read of."""
        return int(self.pack.scored_rows.size)

    def narrowed(self, device: torch.device) -> tuple[IntArray, torch.Tensor]:
        """The scored rows [R], and the same as an index on a device, padded as matrix products need it: for the last
        layer."""
        self.is_narrowed = True
        (index,) = self.tables.of(ScoredRows(is_padded=True), device)
        return self.pack.scored_rows.astype(np.int64), index

    def rotations(
        self, tables: tuple[torch.Tensor, ...], device: torch.device, *, of_neighbours: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """A layer's cosines and sines [1, M, r] as [M, r] on its device, on a CPU in float32: once for all layers there
        that share them. Of a pair's two numbers the second is r / 2 columns after the first, also where the layer's
        tables have them as neighbours."""
        key = id(tables[0]), device
        if key not in self._rotations:
            rows = tuple(table[0].to(device) for table in tables)
            if of_neighbours:
                rows = tuple(torch.cat([row[:, 0::2], row[:, 1::2]], dim=1) for row in rows)
            rows = tuple(map(torch.Tensor.float, rows)) if device.type == "cpu" else rows
            self._rotations[key] = tables, rows  # those given too, so that nothing else gets their id
        return self._rotations[key][1]

    def forget_rotations(self) -> None:
        """Layers that run one at a time are given tables of their own each."""
        self._rotations.clear()

    def by_token(
        self, compute: Callable[[torch.Tensor], torch.Tensor], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A table and each row's place in it [M], of what ``compute`` gives for an index of rows; once a token id, all
        on the first layer's device.

        Of live rows, whose ids the device alone may know, once a row.
        """
        if self.pack.is_live:
            (rows,) = self.tables.of(EachRow(), device)
            return compute(rows), rows
        places, new = self.tables.of(TokenPlaces(), device)
        if new.numel():
            self.pool.token_rows.fill(compute(new))
        self.num_looked_up = len(self.pack) - self.tables.num_new_ids
        return self.pool.token_rows.table, places

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rule: AttentionRule,
        query_rows: IntArray | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend q [M, Hq, d] over the tree, then keep what later packs need of k and v [M, Hkv, d].

        With ``query_rows`` [R], q [>= R, Hq, d] holds those rows alone; ``sinks`` as of `LayerStates`.
        """
        if self.num_layers == 0:
            self.num_tokens = k.shape[0] - (self.num_rows - len(self.pack))
        if v.shape[-1] != q.shape[-1]:
            raise ModelError(
                f"{self.config.model_type!r} has values of {v.shape[-1]} and keys of {q.shape[-1]} dimensions a head, "
                f"which the tree cannot serve; {PLAINLY}"
            )
        self.rule = rule
        k_pool, v_pool = self.pool.layer(self.num_layers, k, v, rule.window)
        out = self.attend(LayerStates(q, k, v, k_pool, v_pool, query_rows, sinks), rule)
        self._keep(k, k_pool)
        self._keep(v, v_pool)
        self.pool.leave(self.num_layers)
        self.num_layers += 1
        return out

    def _keep(self, new: torch.Tensor, pool: torch.Tensor) -> None:
        """Copy what later packs need of ``new`` [M, Hkv, d] into ``pool`` [slots, Hkv, d]."""
        if isinstance(self.attend, NativeAttention):
            _core.retain_rows(as_numpy(new), as_numpy(pool), *self._retained_runs, num_threads=torch.get_num_threads())
            return
        if self.pack.retain_slot.size > _MOST_RUNS:  # where rows decode, many of one row each
            rows, slots = self.tables.of(RetainedRows(), new.device)
            pool.index_copy_(0, slots, new[: len(rows)] if self._retains_first else new[rows])
            return
        for begin, end, slot in zip(*(each.tolist() for each in self._retained_runs), strict=True):
            pool[slot : slot + end - begin] = new[begin:end]

    @cached_property
    def _retained_runs(self) -> tuple[IntArray, ...]:
        """Half-open runs of rows that later packs need, and the slots that they go to from: int64 [n] each."""
        pack = self.pack
        return tuple(each.astype(np.int64) for each in (pack.retain_begin, pack.retain_end, pack.retain_slot))

    @cached_property
    def _retains_first(self) -> bool:
        """Whether the rows that are kept are the first ones of the pack, in their order: nothing is gathered then."""
        begin, end = self.pack.retain_begin, self.pack.retain_end
        return bool(begin[0] == 0 and (begin[1:] == end[:-1]).all())

    def refuse_mask(self, module: nn.Module, mask: torch.Tensor | None) -> None:
        """Raise ModelError if a layer brings a mask of its own, which says more than the tree does."""
        if mask is not None:
            raise ModelError(
                f"{type(module).__name__} gives its attention a mask of its own, which the tree cannot serve; {PLAINLY}"
            )

    def window(self, module: nn.Module, arguments: dict[str, Any]) -> int:
        """The sliding window of a layer, 0 for none; some architectures give it to their mask alone.

        Raises ModelError if the layer's type, by which transformers makes masks, says another thing than the layer.
        """
        kinds = getattr(self.config, "layer_types", None)
        kind = kinds[getattr(module, "layer_idx", self.num_layers)] if kinds else "sliding_attention"
        by_kind = int(getattr(self.config, "sliding_window", None) or 0) if kind == "sliding_attention" else 0
        if "sliding_window" not in arguments:
            return by_kind
        window = int(arguments["sliding_window"] or 0)
        if kinds and kind in ("sliding_attention", "full_attention") and (window > 0) != (by_kind > 0):
            raise ModelError(
                f"{type(module).__name__} attends {f'within {window} tokens' if window else 'to all tokens'} in a "
                f"layer that layer_types of its configuration calls {kind!r}, so that it depends on how transformers "
                f"attends which holds; set use_sliding_window or layer_types as the model was trained, or {PLAINLY}"
            )
        return window
