"""Second copies of weights, as a library multiplies them soonest: when each is made, and whether it still is one.

What a copy is, `linear` knows; here are the rows that met a matrix, the copies that are there, and their numbers.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol, TypeAlias

import torch

from iclperm.errors import is_out_of_memory

Key: TypeAlias = tuple[Hashable, ...]
PACKED_ROWS = 2048
"""What laying a matrix out takes, a product of 100 to 400 rows does, and what it saves is a twentieth at least."""
CHECKED_ROWS = 256
"""What reading a matrix takes, to tell whether a copy is still one, a product of some dozen rows does."""


class Packable(Protocol):
    """A product whose matrix, or matrices, can be laid out once."""

    @property
    def packed_key(self) -> Key | None:
        """Of the memory that the matrix lies in; None if it is not one to be laid out once."""

    @property
    def keeps_bits_packed(self) -> bool:
        """Whether the product has the same bits with its matrix laid out."""

    def numbers(self) -> Key:
        """What tells a copy of the matrix as it is from others."""

    def packed(self) -> torch.Tensor:
        """The copy."""


class PackedWeights:
    """Second copies of matrices, as oneDNN or our kernel wants them, each made once ``PACKED_ROWS`` rows have met it.

    They are in use while a model is attached: for a unit of work, in which nobody writes to its weights. After it they
    are kept for the next one, which reads every number of a matrix to tell whether it is still the one that was copied,
    once ``CHECKED_ROWS`` rows have met it. ``is_on``: whether any is made.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._rows: dict[Key, int] = {}
        self._copies: dict[Key, torch.Tensor | None] = {}  # in use
        self._kept: dict[Key, tuple[Key, torch.Tensor]] = {}  # with what tells the numbers that were copied
        self._condition: object = None  # of the model whose copies are kept

    def begin(self, condition: object) -> None:
        """A unit of work begins, or goes on: the weights may be others now. Copies of a model in another ``condition``
        are given back."""
        self.end()
        if condition is not self._condition:
            self._kept, self._condition = {}, condition

    def end(self) -> None:
        """The weights may be others from now on."""
        self._rows, self._copies = {}, {}

    def give_up(self) -> bool:
        """Make none any more, as memory ran out; whether that leaves more of it than before."""
        had_any, self.is_on = bool(self._kept), False
        self.end()
        self._kept = {}
        return had_any

    def of(self, product: Packable, num_rows: int) -> torch.Tensor | None:
        """That of a product's matrix, which so many rows meet; None as long as there is none."""
        key, rows, copies = product.packed_key, self._rows, self._copies
        if not self.is_on or key is None:
            return None
        if key not in copies:
            rows[key] = rows.get(key, 0) + num_rows
            if rows[key] >= CHECKED_ROWS and key in self._kept:
                if self._kept[key][0] == product.numbers():
                    copies[key] = self._kept[key][1]
                    return copies[key]
                del self._kept[key]
            if rows[key] < PACKED_ROWS:
                return None
            copies[key] = self._made(key, product)
        return copies[key]

    def _made(self, key: Key, product: Packable) -> torch.Tensor | None:
        """A new copy, which is kept; None where the product has to do without."""
        try:
            if not product.keeps_bits_packed:
                return None
            self._kept[key] = product.numbers(), product.packed()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None
        return self._kept[key][1]
