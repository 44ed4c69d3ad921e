"""What is read off the logits: log-probabilities of wanted ids over the full vocabulary, and greedy or not.

``read_hidden`` reads it without the logits ever being stored, in Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

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
