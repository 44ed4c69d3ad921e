"""Drawing the next token by chance, so that a text is the same in any company: what chance is asked is keyed.

Token n of a text is drawn with a number that seed, prompt, draw and n decide, and nothing else: not what is generated
beside it, nor in which order, nor on which device.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from iclperm.engine.tree import IntArray, TokenArray
from iclperm.errors import RequestError

_SEEDS = 1 << 63


@dataclass(frozen=True)
class Sampling:
    """How next tokens are chosen: at ``temperature`` 0 the likeliest always (greedy), else by chance.

    Probabilities are the softmax of logits over ``temperature``; of them the ``top_k`` likeliest (0: all), then the
    fewest likeliest that together reach ``top_p`` of what is left, share all, as in transformers' ``generate``. Of
    equal ones the lower id counts as likelier. ``num_samples`` texts are drawn of a prompt, each by itself. Raises
    RequestError for values out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    num_samples: int = 1

    def __post_init__(self) -> None:
        for name, given, low, high, range_ in (
            ("temperature", self.temperature, 0, np.finfo(np.float64).max, "from 0 on"),
            ("top_p", self.top_p, np.nextafter(0, 1), 1, "over 0, up to 1"),
        ):
            if not _is_number(given, float) or not low <= given <= high:
                raise RequestError(f"{name} is {given!r}; give a number {range_}")
        for name, given, low, range_ in (
            ("top_k", self.top_k, 0, "from 0 (all) on"),
            ("seed", self.seed, -_SEEDS, "of 64 bits"),
            ("num_samples", self.num_samples, 1, "from 1 on"),
        ):
            if not _is_number(given) or not low <= given < _SEEDS:
                raise RequestError(f"{name} is {given!r}; give a whole number {range_}")
        if self.is_greedy and (self.num_samples > 1 or self.top_p < 1 or self.top_k):
            raise RequestError(
                "num_samples, top_p and top_k are of texts by chance; give a temperature over 0 with them"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is left to chance."""
        return self.temperature == 0

    def uniforms(self, prompt: TokenArray, draw: int, count: int) -> npt.NDArray[np.float64]:
        """In [0, 1), one for each of the first ``count`` tokens of a prompt's text number ``draw``.

        Philox, keyed by the BLAKE2b of seed, draw and the prompt's ids (little-endian).
        """
        digest = hashlib.blake2b(prompt.astype("<i4").tobytes(), digest_size=16, key=_bytes(self.seed) + _bytes(draw))
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest.digest(), "little")))
        return generator.random(count)

    def drawn(self, logprobs: torch.Tensor, rows: IntArray, chances: npt.NDArray[np.float64]) -> torch.Tensor:
        """Ids int64 [X] by the log-probabilities [R, V] of row ``rows[x]``, rising, and the number ``chances[x]``; any
        where the row is not finite.

        Row by row, so that no row's bits follow from how many there are. Cost: float64 [V] some times over a row,
        sorted where ``top_k`` or ``top_p`` are.
        """
        found = torch.empty(rows.size, dtype=torch.int64, device=logprobs.device)
        numbers = torch.from_numpy(chances).to(logprobs.device)
        for row in np.unique(rows).tolist():
            some = slice(*np.searchsorted(rows, [row, row + 1]))
            found[some] = self._drawn(logprobs[row].double(), numbers[some])
        return found

    def _drawn(self, logprobs: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
        ids = None
        if self.top_k or self.top_p < 1:
            logprobs, ids = logprobs.sort(descending=True, stable=True)
        if self.top_k:
            logprobs = logprobs[: self.top_k]
        weights = torch.softmax(logprobs / self.temperature, dim=-1)
        if self.top_p < 1:
            before = weights.cumsum(dim=-1) - weights
            weights = weights.masked_fill(before >= self.top_p, 0.0)
        sums = weights.cumsum(dim=-1)
        place = torch.searchsorted(sums, chances * sums[-1], right=True)
        # A product may round up to the sum itself: the last that has a share.
        place = torch.minimum(place, (weights > 0).long().cumsum(dim=-1).argmax())
        return place if ids is None else ids[place]


def _is_number(given: object, *more: type) -> bool:
    return isinstance(given, (int, np.integer, *more)) and not isinstance(given, bool)


def _bytes(number: int) -> bytes:
    return int(number).to_bytes(8, "little", signed=True)
