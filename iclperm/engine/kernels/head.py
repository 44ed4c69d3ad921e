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
from iclperm.engine.tables import PackTables

NATIVE = (torch.float32, torch.bfloat16)
"""What the C++ core reads, on a CPU."""


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
    if logits.device.type == "cpu" and logits.dtype in NATIVE:
        _, argmax, finite, logprob = _core.head_rows(
            as_numpy(logits), pair_row, pair_id, softcap=softcap, num_threads=torch.get_num_threads()
        )
        return reading_of_rows(pair_row, pair_id, argmax, finite, logprob)
    places = (torch.from_numpy(given.astype(np.int64)).to(logits.device) for given in (pair_row, pair_id))
    found = read_torch(logits, softcap, *places)
    return reading_of_rows(pair_row, pair_id, *(each.cpu().numpy() for each in found))


def read_torch(
    logits: torch.Tensor, softcap: float, rows: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of logits [R, V] each row's argmax [R] and whether it is finite [R], and the log-probability of each pair [X].

    ``rows`` and ``ids`` int64 [X], as all else on the device of the logits.
    """
    capped = logits.float()
    if softcap:
        capped = softcap * torch.tanh(capped / softcap)
    logprob = capped[rows, ids] - torch.logsumexp(capped, dim=-1)[rows]
    return capped.argmax(dim=-1).int(), torch.isfinite(logits).all(dim=-1), logprob


def reading_of_rows(
    pair_row: npt.NDArray[np.int32],
    pair_id: npt.NDArray[np.int32],
    argmax: npt.NDArray[np.int32],
    finite: npt.NDArray[np.bool_],
    logprob: npt.NDArray[np.float32],
) -> Reading:
    """What rows [R] and the log-probabilities of pairs [X] say of the pairs."""
    return Reading(
        np.where(finite[pair_row], logprob, np.nan).astype(np.float32),
        (argmax[pair_row] == pair_id) & finite[pair_row],
        finite[pair_row],
    )


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

    found = triton_head.read_rows(hidden, *_weights(head), pair_row, pair_id, scale=scale, softcap=softcap)
    return reading_of_rows(pair_row, pair_id, *found)


def find_wanted(
    hidden: torch.Tensor, head: nn.Linear, scale: float, softcap: float, tables: PackTables
) -> tuple[torch.Tensor, ...]:
    """As ``read_hidden``, of a pack's wanted pairs and left on the device, for ``reading_of_found``."""
    from iclperm.engine.kernels import triton_head

    weight, bias = _weights(head)
    wanted = tables.of(triton_head.WantedIds.of(weight), hidden.device)
    return triton_head.found_in(hidden, weight, bias, wanted, scale, softcap)


def reading_of_found(
    pair_row: npt.NDArray[np.int32],
    pair_id: npt.NDArray[np.int32],
    *found: npt.NDArray[np.float32],
) -> Reading:
    """What ``find_wanted`` has found, as arrays, says of the pairs."""
    from iclperm.engine.kernels import triton_head

    return reading_of_rows(pair_row, pair_id, *triton_head.logprobs_of(pair_row, *found))


def _weights(head: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    return head.weight.detach(), None if head.bias is None else head.bias.detach()


def choose_logits(logits: torch.Tensor, softcap: float) -> LikeliestIds:
    """The likeliest id of each row of ``logits`` [R, V], soft-capped first if ``softcap`` > 0."""
    if logits.device.type == "cpu" and logits.dtype in NATIVE:
        none = np.empty(0, np.int32)
        logsumexp, token, is_finite, _ = _core.head_rows(
            as_numpy(logits), none, none, softcap=softcap, num_threads=torch.get_num_threads()
        )
        rows, columns = (torch.from_numpy(each) for each in (np.arange(len(token)), np.maximum(token, 0)))
        best = logits[rows, columns.long()].double().tolist()
        # One by one, so that a row's bits do not depend on how many there are.
        capped = [softcap * math.tanh(x / softcap) for x in best] if softcap else best
        return LikeliestIds(token, (np.array(capped) - logsumexp).astype(np.float32), is_finite)
    return likeliest_ids(*(each.cpu().numpy() for each in choose_torch(logits, softcap)))


def choose_torch(logits: torch.Tensor, softcap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``choose_logits``, left on the device: ids [R], -1 where not all logits are finite, and log-probabilities."""
    capped = logits.float()
    if softcap:
        capped = softcap * torch.tanh(capped / softcap)
    top, ids = capped.max(dim=-1)
    ids = ids.int().masked_fill_(~torch.isfinite(logits).all(dim=-1), -1)
    return ids, top - torch.logsumexp(capped, dim=-1)


def distributions(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    """Log-probabilities float32 [R, V] in nats of ``logits`` [R, V], soft-capped first if ``softcap`` > 0; all NaN in a
    row whose logits are not all finite.

    Not by ``log_softmax``, whose float32 sum over a large vocabulary loses its unlikely ids.
    """
    wide = logits.float()
    capped = softcap * torch.tanh(wide / softcap) if softcap else wide
    if wide.device.type == "cpu":
        none = np.empty(0, np.int32)
        found = _core.head_rows(as_numpy(wide), none, none, softcap=softcap, num_threads=torch.get_num_threads())
        total = torch.from_numpy(found[0])
    else:
        total = torch.logsumexp(capped, dim=-1).masked_fill_(~torch.isfinite(wide).all(dim=-1), torch.nan)
    return capped - total[:, None]


def choose_hidden(hidden: torch.Tensor, head: nn.Linear, scale: float, softcap: float) -> LikeliestIds:
    """As ``choose_logits`` of the logits scale * head(hidden) of rows ``hidden`` [R, H], left in float32."""
    from iclperm.engine.kernels import triton_head

    return LikeliestIds(*triton_head.choose_rows(hidden, *_weights(head), scale=scale, softcap=softcap))


def find_likeliest(
    hidden: torch.Tensor, head: nn.Linear, scale: float, softcap: float, tables: PackTables
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``choose_hidden`` of the scored rows of a pack without wanted pairs, left there as ``choose_torch`` does."""
    ids, _, log_sum, _ = find_wanted(hidden, head, scale, softcap, tables)
    return ids, -log_sum


def likeliest_ids(ids: npt.NDArray[np.int32], logprob: npt.NDArray[np.float32]) -> LikeliestIds:
    """What was chosen on the device, as arrays."""
    return LikeliestIds(ids, logprob, ids >= 0)
