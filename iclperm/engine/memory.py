"""When memory runs out: packs are halved, the unit runs again, and the smaller size is remembered."""

from __future__ import annotations

from collections.abc import Callable

import torch

from iclperm.engine.forward import padded_rows
from iclperm.engine.plan import Plan
from iclperm.errors import OutOfMemory

# What torch's allocators say in a plain RuntimeError: of the host, of CUDA, of cuBLAS.
_ALLOCATORS_SAY = ("can't allocate memory", "not enough memory", "out of memory", "alloc_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on the host or on a device."""
    if isinstance(error, MemoryError | OutOfMemory | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in _ALLOCATORS_SAY)


class PackLimit:
    """The largest packs that memory is known to hold; one for the life of an engine.

    ``pack_tokens`` is None until memory first runs out. ``may_shrink`` says that the size of a pack changes no bit;
    ``peak`` foretells the bytes that a plan takes in packs of a size.
    """

    def __init__(self, peak: Callable[[Plan, int], int]) -> None:
        self._peak = peak
        self.pack_tokens: int | None = None
        self.may_shrink = False

    def fit(self, plan: Plan) -> Plan:
        """The plan in packs within the limit: itself if they are."""
        if self.pack_tokens is None or plan.pack_tokens <= self.pack_tokens:
            return plan
        return plan.repacked(self.pack_tokens)

    def shrink(self, plan: Plan, unit: int, tried: int) -> None:
        """Halve the packs of a unit that was tried in packs of up to ``tried`` tokens.

        Raises OutOfMemory if a matrix product would get no smaller, or if smaller packs might change results.
        """
        halved = padded_rows(tried // 2)
        if halved >= padded_rows(tried):
            raise OutOfMemory(
                f"unit {unit} does not fit in memory even in packs of {tried} tokens, the smallest there are "
                f"({self._peak(plan, halved)} bytes are foretold, the model's weights among them); "
                "use fewer shots, a smaller model or dtype, or a machine with more memory"
            )
        if not self.may_shrink:
            budget = self._peak(plan, halved)
            raise OutOfMemory(
                f"unit {unit} does not fit in memory in packs of {tried} tokens, and smaller ones are not known to "
                f"give the same bits; start anew with pack_tokens={halved}, a memory_budget of at most {budget} bytes, "
                "fewer shots or a smaller model"
            )
        self.pack_tokens = halved
