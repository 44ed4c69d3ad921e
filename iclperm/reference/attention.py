"""Plain attention, one path at a time: what the packed-tree kernels must compute."""

from collections.abc import Sequence

import torch
from torch import Tensor


def path_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scaling: float,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of a path's last rows over the whole path.

    q: [R, Hq, d], the queries at positions T - R .. T - 1; k: [T, Hkv, d], v: [T, Hkv, e], Hq a multiple of
    Hkv. ``softcap`` and ``window`` are off at 0; a row sees the keys less than ``window`` positions before it.
    ``sinks`` [Hq] are one score more a head, which is neither scaled nor capped and has no value. Computes in float64
    and returns float64 [R, Hq, e]. Cost O(R T Hq (d + e)), with the scores of all pairs in memory.
    """
    num_rows, num_keys = q.shape[0], k.shape[0]
    group_size = q.shape[1] // k.shape[1]
    keys = k.double().repeat_interleave(group_size, dim=1)
    values = v.double().repeat_interleave(group_size, dim=1)
    scores = scaling * torch.einsum("rhd,thd->hrt", q.double(), keys)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(num_keys - num_rows, num_keys)[:, None] - torch.arange(num_keys)[None, :]
    visible = distance >= 0
    if window > 0:
        visible &= distance < window
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, num_rows, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :num_keys]
    return torch.einsum("hrt,the->rhe", weights, values)


def tree_attention(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    visits: Sequence[tuple[int, int, Sequence[tuple[int, int, int]]]],
    *,
    scaling: float,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a packed tree, each visit's path put together and attended to by itself.

    q: [M, Hq, d]; k_new: [M, Hkv, d], v_new: [M, Hkv, e]; k_pool: [slots, Hkv, d], v_pool: [slots, Hkv, e]. A visit is
    (first row, one past its last row, spans of its ancestors' keys in the order of positions); a span is (0 for the
    pool or 1 for the pack, begin, end). Returns float64 [M, Hq, e], zero in rows without a visit.
    """
    out = torch.zeros((*q.shape[:2], v_new.shape[2]), dtype=torch.float64)
    for begin, end, spans in visits:
        path = [*spans, (1, begin, end)]
        keys = torch.cat([(k_pool, k_new)[source][first:last] for source, first, last in path])
        values = torch.cat([(v_pool, v_new)[source][first:last] for source, first, last in path])
        out[begin:end] = path_attention(
            q[begin:end], keys, values, scaling=scaling, softcap=softcap, window=window, sinks=sinks
        )
    return out
