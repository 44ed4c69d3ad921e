"""Sets and permutations of which some ordering has no answer at all: left out, and named, so that the rest is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from iclperm.errors import printable
from iclperm.external.tensor import Tensor

_LEAST = 2  # sets and permutations below which nothing is left to say


def without_unanswered(tensor: Tensor) -> Tensor:
    """Answers SPQ or SPKQ without as few sets and permutations as possible, so that every ordering has an answer.

    Whichever lacks the larger share of its orderings goes first, a set before a permutation where there are more of
    them. A note names each. As it is where every ordering has an answer, and where too little would be left: what lacks
    is then refused where it is needed.
    """
    if tensor.state is None or tensor.axes not in ("SPQ", "SPKQ"):
        return tensor
    empty = (np.asarray(tensor.state) != 0).all(axis=-1)
    if empty.ndim == 3:
        empty = empty[:, :, ~empty.all(axis=(0, 1))].any(axis=2)
    kept = [np.arange(size) for size in empty.shape]
    notes = []
    while empty.any():
        shares = [empty.mean(axis=1 - axis) for axis in (0, 1)]
        axis = max((0, 1), key=lambda axis: (shares[axis].max(), empty.shape[axis]))
        place = int(shares[axis].argmax())
        notes.append(_note(tensor, axis, int(kept[axis][place]), float(shares[axis][place])))
        kept[axis], empty = np.delete(kept[axis], place), np.delete(empty, place, axis)
        if min(empty.shape) < _LEAST:
            return tensor
    if not notes:
        return tensor
    return replace(
        tensor,
        values=tensor.values[np.ix_(*kept)],
        state=np.asarray(tensor.state)[np.ix_(*kept)],
        sets=_those(tensor.sets, kept[0]),
        permutations=_those(tensor.permutations, kept[1]),
        notes=(*tensor.notes, *notes),
    )


def _note(tensor: Tensor, axis: int, level: int, share: float) -> str:
    names = (tensor.sets, tensor.permutations)[axis]
    called = printable(str(names[level] if names else level))
    what, other = ("set", "permutations") if axis == 0 else ("permutation", "sets")
    where = "" if share == 1 else f" under some {other}" if axis == 0 else f" of some {other}"
    return f"{what} {called} has no answer{where}: it is left out"


def _those(names: Sequence[Any], kept: Any) -> tuple[Any, ...]:
    return tuple(names[place] for place in kept) if names else ()
