"""What the head of ours is checked with, on a model's own vocabulary, and how far it is from float64 there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from iclperm.engine.kernelcases import Drawing, most_rows
from iclperm.engine.kernels.head import (
    LikeliestIds,
    Reading,
    choose_hidden,
    choose_logits,
    read_hidden,
    read_logits,
)
from iclperm.engine.model import TreeModel
from iclperm.engine.tree import IntArray
from iclperm.reference import rowwise as exact

Int32s = npt.NDArray[np.int32]

_HEAD_ROWS = 131  # more than a block of them
_ID_STEP = 32  # an id of every tile of the vocabulary is asked for
_SPREAD, _AT_LARGE = 25.0, 40.0  # of logits; of some so many times as large, where any soft-cap is flat
_LEAST_TILE, _MOST_TILES = 64, 16
"""Ids of the smallest tile that is shipped; of how many of these each end is the likeliest id of a row."""
_CHUNK_NUMBERS = 8 << 20  # of the vocabulary's weights that are float64 at once
_CHUNK, _MOST_LOGITS = 2048, 4096
"""Logits that a CPU reads at once; what a row has there at most, and the rest of the last chunk."""
_LOGIT_ROWS_BYTES = 64 << 20  # read at once on a CPU, at most


def head_errors(model: TreeModel, pack_tokens: int) -> Iterator[float]:
    """Log-probabilities and likeliest ids off the model's own head, or on a CPU off logits in chunks as it has them."""
    facts = model.facts
    if model.fuses_head:
        head = model.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        rows = max(_HEAD_ROWS, most_rows(pack_tokens))
        yield from fused_head_errors(head, model.logit_scale, facts.logit_softcap, rows)
    elif model.device.type == "cpu" and model.dtype in (torch.float32, torch.bfloat16):
        draw = Drawing(model.dtype, model.device, pack_tokens)
        yield logits_error(min(facts.vocab_size, _MOST_LOGITS + facts.vocab_size % _CHUNK), facts.logit_softcap, draw)


def fused_head_errors(head: nn.Linear, scale: float, softcap: float, num_rows: int) -> Iterator[float]:
    """One row, and rows of more than one block: some likely to have their maximum at either end of a tile, of the
    vocabulary's first and last among them, one with equal logits, four that are not finite, of which two are so for a
    single id."""
    kinds = _hidden_rows(head.weight.detach(), scale)
    logits = _Logits.of(*_exact_logits(kinds, head, scale, softcap))
    generator = np.random.default_rng(0)
    each, one = np.arange(len(kinds)), np.array([5])
    for which in (one, np.append(each, generator.integers(0, len(kinds), num_rows))):
        hidden = kinds[torch.from_numpy(which).to(kinds.device)]
        yield logits.reading_error(which, partial(read_hidden, hidden, head, scale, softcap))
    yield logits.choice_error(each, choose_hidden(kinds, head, scale, softcap))


def logits_error(num_ids: int, softcap: float, draw: Drawing) -> float:
    """Of rows of logits as they are: equal, not finite, at large, and with their maximum at either end of a chunk."""
    ends = np.unique([0, *(end - one for end in range(_CHUNK, num_ids, _CHUNK) for one in (0, 1)), num_ids - 1])
    kinds = _SPREAD / 4 * draw(4 + ends.size, num_ids)
    kinds[0] = 0.0
    kinds[1, num_ids // 2], kinds[2, -1] = torch.nan, torch.inf
    kinds[3] *= _AT_LARGE
    kinds[np.arange(4, len(kinds)), ends] = 2 * _SPREAD
    wide = kinds.double()
    logits = _Logits.of(wide, softcap * torch.tanh(wide / softcap) if softcap else wide)
    given = draw.copied(kinds, most_bytes=_LOGIT_ROWS_BYTES)
    which = np.arange(given.shape[0]) % len(kinds)
    return max(
        logits.reading_error(which, partial(read_logits, given, softcap)),
        logits.choice_error(which, choose_logits(given, softcap)),
    )


def _hidden_rows(weight: torch.Tensor, scale: float) -> torch.Tensor:
    """Rows [M, H]: zero, two drawn, some towards ids at the ends of the vocabulary and of tiles, one of them at large,
    four that are not finite: by one number in the row itself; by the logit of the first or last id, no maximum, where
    the dtype can hold such a row."""
    num_ids, width = weight.shape
    towards = weight[torch.from_numpy(_ids_at_tiles(num_ids)).to(weight.device)].float()
    squares = towards.square().sum(dim=1, keepdim=True).clamp(min=1e-6)
    ends = towards[[0, -1]], squares[[0, -1]]
    drawn = torch.randn(4, width, generator=torch.Generator("cpu").manual_seed(0), device="cpu").to(weight.device)
    drawn /= 4 * squares.mean().sqrt()
    rows = torch.cat([torch.zeros_like(drawn[:1]), drawn, towards / squares, _AT_LARGE * ends[0][:1] / ends[1][:1]])
    rows = torch.cat([_SPREAD * rows, 2e38 * (-2 * ends[0] / ends[1])]) / abs(scale)
    most = torch.finfo(weight.dtype).max
    rows = rows.clamp(-most, most).to(weight.dtype)
    rows[3, -1], rows[4, width // 2] = torch.nan, torch.inf
    return rows


def _ids_at_tiles(num_ids: int) -> IntArray:
    """The first and the last id of tiles from one end of a vocabulary to the other, in order: of all, or of some."""
    first = np.arange(0, num_ids, _LEAST_TILE)
    some = first[np.linspace(0, first.size - 1, min(first.size, _MOST_TILES)).astype(np.int64)]
    return np.unique([*some, *np.minimum(some + _LEAST_TILE - 1, num_ids - 1), num_ids // 2])


def _exact_logits(
    hidden: torch.Tensor, head: nn.Linear, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `exact.head_logits`, some ids at a time."""
    weight, bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
    step = max(1, _CHUNK_NUMBERS // weight.shape[1])
    parts = [
        exact.head_logits(
            hidden, weight[begin : begin + step], None if bias is None else bias[begin : begin + step],
            scale=scale, softcap=softcap,
        )
        for begin in range(0, weight.shape[0], step)
    ]  # fmt: skip
    logits, capped = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
    return logits, capped


@dataclass(frozen=True)
class _Logits:
    """What rows of logits [R, V] say: log-probabilities in nats; by row whether all are finite in float32 and the
    largest two equal before the soft-cap, the first of the likeliest ids, how far the next one is behind it, and the
    largest logit (at least 1)."""

    nats: torch.Tensor
    is_finite: npt.NDArray[np.bool_]
    is_tied: npt.NDArray[np.bool_]
    first: IntArray
    margin: npt.NDArray[np.float64]
    scale: npt.NDArray[np.float64]

    @classmethod
    def of(cls, logits: torch.Tensor, capped: torch.Tensor) -> _Logits:
        """Of float64 logits before and after the soft-cap; the first row is of equal ones but for a bias."""
        best, uncapped = (each.topk(2, dim=1).values for each in (capped, logits))
        return cls(
            capped - capped.logsumexp(dim=1, keepdim=True),
            (logits.abs() <= torch.finfo(torch.float32).max).all(dim=1).cpu().numpy(),
            (uncapped[:, 0] == uncapped[:, 1]).cpu().numpy(),
            capped.argmax(dim=1).cpu().numpy(),
            (best[:, 0] - best[:, 1]).cpu().numpy(),
            capped.abs().amax(dim=1).clamp(min=1.0).cpu().numpy(),
        )

    def reading_error(self, which: IntArray, read: Callable[[Int32s, Int32s], Reading]) -> float:
        """How far what is read of rows ``which`` is off, in nats as a share of the row's largest logit."""
        # One row is asked for an id of every tile, and every row for ids at both ends, in no order, some of them twice.
        num_ids = self.nats.shape[1]
        everywhere = np.arange(num_ids - 1, -1, -_ID_STEP)
        ends = np.array([0, num_ids - 1, num_ids // 3, max(0, num_ids - 70), 0])
        asked = which.size - 1 - int(self.is_finite[which][::-1].argmax())
        rows = np.concatenate([np.full(everywhere.size, asked), np.repeat(np.arange(which.size), ends.size)])
        ids = np.concatenate([everywhere, np.tile(ends, which.size)])
        reading = read(rows.astype(np.int32), ids.astype(np.int32))
        rows = which[rows]
        return self._error(
            rows, ids, reading.logprob, reading.is_finite,
            np.where(reading.is_greedy, ids, np.where(self.first[rows] == ids, -1, self.first[rows])),
        )  # fmt: skip

    def choice_error(self, which: IntArray, choice: LikeliestIds) -> float:
        """As ``reading_error``, of the likeliest ids of rows ``which``."""
        return self._error(which, choice.token, choice.logprob, choice.is_finite, choice.token)

    def _error(
        self,
        rows: IntArray,
        ids: npt.NDArray[Any],
        logprob: npt.NDArray[np.float32],
        is_finite: npt.NDArray[np.bool_],
        likeliest: npt.NDArray[Any],
    ) -> float:
        """Of ids with what is said of them and of the rows' likeliest ids, -1 for another than the first.

        Infinite where a row is wrongly finite, or where of equal logits not the first was taken.
        """
        are_equal = self.is_finite[rows] & self.is_tied[rows]
        if not np.array_equal(is_finite, self.is_finite[rows]) or (likeliest != self.first[rows])[are_equal].any():
            return float("inf")
        rows, ids, logprob, likeliest = rows[is_finite], ids[is_finite], logprob[is_finite], likeliest[is_finite]
        if (ids < 0).any() or (ids >= self.nats.shape[1]).any():
            return float("inf")
        nats, best = self._nats(rows, ids), self._nats(rows, self.first[rows])
        behind = np.where(likeliest < 0, self.margin[rows], best - self._nats(rows, np.maximum(likeliest, 0)))
        errors = np.maximum(np.abs(logprob - nats), behind) / self.scale[rows]
        return float(np.nan_to_num(errors, nan=np.inf).max(initial=0.0))

    def _nats(self, rows: IntArray, ids: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        of: npt.NDArray[np.float64] = (
            self.nats[torch.from_numpy(rows), torch.from_numpy(ids.astype(np.int64))].cpu().numpy()
        )
        return of
