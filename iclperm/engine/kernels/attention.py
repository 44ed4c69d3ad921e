"""Attention of one pack over its tree: the C++ kernel on a CPU, Triton's on a GPU, torch operations elsewhere.

All read the ancestors' keys and values where they lie, in the pool of the open path or in the pack itself; `rule` says
what they are asked and what they give.
"""

from __future__ import annotations

import numpy as np
import torch

from iclperm import _core
from iclperm.engine.kernels.live import LiveSlots
from iclperm.engine.kernels.rule import AttentionRule, LayerStates, PackAttention
from iclperm.engine.plan import Pack
from iclperm.engine.tables import PackTables


def prepare(
    pack: Pack,
    num_rows: int,
    backend: str,
    dense_rows: int,
    tables: PackTables | None = None,
    live_slots: LiveSlots | None = None,
) -> PackAttention:
    """The attention of ``pack`` run as ``num_rows`` rows; ``backend`` is ``native`` (CPU), ``triton`` or ``torch``.

    torch's holds the scores of ``dense_rows`` rows at once. Triton's lists are among the pack's ``tables``, or its own;
    it alone attends for live rows, whose keys lie in ``live_slots``.
    """
    if backend == "native":
        return NativeAttention(pack)
    if backend == "triton":
        from iclperm.engine.kernels.triton_attention import TritonAttention  # Triton is slow to import

        rest = TritonAttention(pack, tables=tables)
        if pack.live is None:
            return rest
        from iclperm.engine.kernels.triton_decode import DecodeAttention

        assert tables is not None
        assert live_slots is not None
        return DecodeAttention(tables, live_slots, None if pack.is_live else rest)
    return TorchAttention(pack, num_rows, dense_rows)


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor's memory as an array; bfloat16, which NumPy lacks, as uint16."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


class NativeAttention:
    """The C++ kernel: fp32 and bf16, every key in path order, so that a row's bits depend on its path alone."""

    def __init__(self, pack: Pack) -> None:
        self._visits = tuple(
            getattr(pack, name).astype(np.int64)
            for name in ("visit_row_offsets", "visit_pos", "span_offsets", "span_source", "span_begin", "span_end")
        )

    def __call__(self, states: LayerStates, rule: AttentionRule) -> torch.Tensor:
        out = torch.empty(states.q.shape, dtype=states.q.dtype, device=states.q.device)
        _core.tree_attention(
            as_numpy(states.q),
            as_numpy(states.k),
            as_numpy(states.v),
            as_numpy(states.k_pool),
            as_numpy(states.v_pool),
            as_numpy(out),
            *self._visits,
            query_rows=states.query_rows,
            scaling=rule.scaling,
            softcap=rule.softcap,
            window=rule.window,
            sinks=None if states.sinks is None else as_numpy(states.sinks),
            num_threads=torch.get_num_threads(),
        )
        return out


class TorchAttention:
    """Dense masked attention with torch operations, on any device.

    At once it holds min(M, dense_rows) x (slots + M) scores a head.
    """

    def __init__(self, pack: Pack, num_rows: int, dense_rows: int) -> None:
        self._dense_rows = dense_rows
        pooled = _pool_slots(pack)
        slots = np.flatnonzero(pooled >= 0)
        visible = np.zeros((num_rows, slots.size + num_rows), bool)
        place = np.full(pooled.size, -1)
        place[slots] = np.arange(slots.size)
        for visit in range(pack.visit_pos.size):
            begin, end = pack.visit_row_offsets[visit], pack.visit_row_offsets[visit + 1]
            for span in range(pack.span_offsets[visit], pack.span_offsets[visit + 1]):
                a, b = int(pack.span_begin[span]), int(pack.span_end[span])
                columns = place[a:b] if pack.span_source[span] == 0 else slots.size + np.arange(a, b)
                visible[begin:end, columns] = True
            own = slots.size + begin
            visible[begin:end, own : own + end - begin] = np.tri(end - begin, dtype=bool)
        positions = np.zeros(num_rows, np.int64)
        positions[: len(pack)] = pack.positions
        key_positions = np.concatenate([pooled[slots], positions])
        self._tables = tuple(map(torch.from_numpy, (slots, visible, positions, key_positions)))
        self._by_device: dict[torch.device, tuple[torch.Tensor, ...]] = {}  # layers may lie on several
        self._num_owned = len(pack)

    def __call__(self, states: LayerStates, rule: AttentionRule) -> torch.Tensor:
        q, query_rows, num_owned = states.q, states.query_rows, self._num_owned
        slots, visible, row_pos, key_pos = self._on(states.k.device)
        keys = torch.cat([states.k_pool[slots], states.k]).transpose(0, 1)
        values = torch.cat([states.v_pool[slots], states.v]).transpose(0, 1)
        if query_rows is not None:
            rows = torch.zeros(q.shape[0], dtype=torch.int64, device="cpu")
            rows[: query_rows.size] = torch.from_numpy(query_rows)
            visible, row_pos, num_owned = visible[rows], row_pos[rows], query_rows.size
        # A weight of zero times NaN is NaN: rows that see no such key must not be touched by it.
        broken = ~(torch.isfinite(keys).all(dim=-1) & torch.isfinite(values).all(dim=-1)).all(dim=0)
        keys = keys.float()
        values = values.float().masked_fill_(broken[:, None], 0.0)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for begin in range(0, q.shape[0], self._dense_rows):
            some = slice(begin, begin + self._dense_rows)
            seen = visible[some]
            if rule.window:
                seen = seen & (row_pos[some, None] - key_pos[None, :] < rule.window)
            part = _attended(q[some], keys, values, seen, rule, states.sinks)
            out[some] = part.masked_fill_((seen & broken).any(dim=-1)[:, None, None], torch.nan)
        out[num_owned:] = 0
        return out

    def _on(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        if device not in self._by_device:
            self._by_device[device] = tuple(table.to(device) for table in self._tables)
        return self._by_device[device]


def _attended(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    rule: AttentionRule,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of q [m, Hq, d] over keys and values [Hkv, k, d], all of it at once, where ``visible`` [m, k]."""
    num_kv, num_heads = keys.shape[0], q.shape[1]
    grouped = q.transpose(0, 1).reshape(num_kv, num_heads // num_kv, *q.shape[::2]).float()
    # In place: two copies of the scores are what `footprint` counts on.
    scores = torch.einsum("hgmd,hkd->hgmk", grouped, keys).mul_(rule.scaling)
    if rule.softcap:
        scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    scores.masked_fill_(~visible, -torch.inf)
    weights = scores.softmax(dim=-1) if sinks is None else _softmax_beside(scores, sinks)
    del scores
    out = torch.einsum("hgmk,hkd->hgmd", weights, values)
    return out.reshape(num_heads, *q.shape[::2]).transpose(0, 1).to(q.dtype)


def _softmax_beside(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The softmax of scores [Hkv, G, m, k] and of one more a head, in the place of the scores."""
    sink = sinks.view(*scores.shape[:2], 1, 1)
    top = torch.maximum(scores.amax(dim=-1, keepdim=True), sink)
    scores.sub_(top).exp_()
    return scores.div_(scores.sum(dim=-1, keepdim=True).add_((sink - top).exp_()))


def _pool_slots(pack: Pack) -> np.ndarray:
    """Position of the key in each pool slot that the pack reads, -1 for the others."""
    size = int(pack.span_end[pack.span_source == 0].max(initial=0))
    positions = np.full(size, -1, np.int64)
    for visit in range(pack.visit_pos.size):
        pos = 0
        for span in range(pack.span_offsets[visit], pack.span_offsets[visit + 1]):
            begin, end = int(pack.span_begin[span]), int(pack.span_end[span])
            if pack.span_source[span] == 0:
                positions[begin:end] = np.arange(pos, pos + end - begin)
            pos += end - begin
    return positions
