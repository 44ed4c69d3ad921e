"""What is read off the logits: log-probabilities of wanted ids over the full vocabulary, or the likeliest id.

``read_hidden`` and ``choose_hidden`` read it without the logits ever being stored, in Triton.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from iclperm import _core
from iclperm.engine.kernels.attention import as_numpy


@dataclass(frozen=True)
class Reading:
    """Per wanted pair [X]: log-probability in nats (float32), id was the argmax, row had only finite logits."""

    logprob: npt.NDArray[np.float32]
    is_greedy: npt.NDArray[np.bool_]
    is_finite: npt.NDArray[np.bool_]


class LikeliestIds(NamedTuple):
    """Per row [R]: the id of the largest logit (the lowest on ties), its log-probability in nats (float32), and whether
    all logits are finite; where not, the others mean nothing."""

    token: npt.NDArray[np.int32]
    logprob: npt.NDArray[np.float32]
    is_finite: npt.NDArray[np.bool_]


def read_logits(
    logits: torch.Tensor, softcap: float, pair_row: npt.NDArray[np.int32], pair_id: npt.NDArray[np.int32]
) -> Reading:
    """Read ``pair_id`` [X] at rows ``pair_row`` of ``logits`` [R, V], soft-capped first if ``softcap`` > 0."""
    read = _read_native if logits.device.type == "cpu" and logits.dtype in _NATIVE else _read_torch
    return _reading(*read(logits, softcap, pair_row, pair_id), pair_row, pair_id)


def read_hidden(
    hidden: torch.Tensor,
    head: nn.Linear,
    scale: float,
    softcap: float,
    pair_row: npt.NDArray[np.int32],
    pair_id: npt.NDArray[np.int32],
) -> Reading:
    """As ``read_logits`` of the logits scale * head(hidden) of rows ``hidden`` [R, H], left in float32."""
    from iclperm.engine.kernels import triton_head

    bias = None if head.bias is None else head.bias.detach()
    return _reading(
        *triton_head.read_rows(hidden, head.weight.detach(), bias, pair_row, pair_id, scale=scale, softcap=softcap),
        pair_row,
        pair_id,
    )


def choose_logits(logits: torch.Tensor, softcap: float) -> LikeliestIds:
    """The likeliest id of each row of ``logits`` [R, V], soft-capped first if ``softcap`` > 0."""
    if logits.device.type == "cpu" and logits.dtype in _NATIVE:
        none = np.empty(0, np.int32)
        logsumexp, token, is_finite, _ = _core.head_rows(
            as_numpy(logits), none, none, softcap=softcap, num_threads=torch.get_num_threads()
        )
        best = logits[torch.arange(len(token)), torch.from_numpy(np.maximum(token, 0)).long()].double().tolist()
        # One by one, so that a row's bits do not depend on how many there are.
        capped = [softcap * math.tanh(x / softcap) for x in best] if softcap else best
        return LikeliestIds(token, (np.array(capped) - logsumexp).astype(np.float32), is_finite)
    capped_logits = logits.float()
    if softcap:
        capped_logits = softcap * torch.tanh(capped_logits / softcap)
    top, ids = capped_logits.max(dim=-1)
    logprob = top - torch.logsumexp(capped_logits, dim=-1)
    finite = torch.isfinite(logits).all(dim=-1)
    return LikeliestIds(ids.int().cpu().numpy(), logprob.cpu().numpy(), finite.cpu().numpy())


def choose_hidden(hidden: torch.Tensor, head: nn.Linear, scale: float, softcap: float) -> LikeliestIds:
    """As ``choose_logits`` of the logits scale * head(hidden) of rows ``hidden`` [R, H], left in float32."""
    from iclperm.engine.kernels import triton_head

    bias = None if head.bias is None else head.bias.detach()
    return LikeliestIds(*triton_head.choose_rows(hidden, head.weight.detach(), bias, scale=scale, softcap=softcap))


def _reading(
    argmax: npt.NDArray[np.int32],
    finite: npt.NDArray[np.bool_],
    logprob: npt.NDArray[np.float32],
    pair_row: npt.NDArray[np.int32],
    pair_id: npt.NDArray[np.int32],
) -> Reading:
    """What rows [R] and pairs [X] say of the pairs."""
    return Reading(
        np.where(finite[pair_row], logprob, np.nan).astype(np.float32),
        (argmax[pair_row] == pair_id) & finite[pair_row],
        finite[pair_row],
    )


_NATIVE = (torch.float32, torch.bfloat16)


def _read_native(
    logits: torch.Tensor, softcap: float, pair_row: npt.NDArray[np.int32], pair_id: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
    _, argmax, finite, logprob = _core.head_rows(
        as_numpy(logits), pair_row, pair_id, softcap=softcap, num_threads=torch.get_num_threads()
    )
    return argmax, finite, logprob


def _read_torch(
    logits: torch.Tensor, softcap: float, pair_row: npt.NDArray[np.int32], pair_id: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
    capped = logits.float()
    if softcap:
        capped = softcap * torch.tanh(capped / softcap)
    rows = torch.from_numpy(pair_row.astype(np.int64)).to(logits.device)
    ids = torch.from_numpy(pair_id.astype(np.int64)).to(logits.device)
    logprob = capped[rows, ids] - torch.logsumexp(capped, dim=-1)[rows]
    finite = torch.isfinite(logits).all(dim=-1)
    return capped.argmax(dim=-1).int().cpu().numpy(), finite.cpu().numpy(), logprob.cpu().numpy()
