"""How right each cell would be on every query, from the answers there are: an additive fit of cells and queries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.stats.limits import LIMITS, ComputeLimits

FloatArray = npt.NDArray[np.float64]
Blocks = Callable[[], Iterable[tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]]]
"""Answers [C, Q] in blocks of cells, each with which of them are there; from the beginning whenever it is called."""

_SWEEPS = 200
_SWEPT = 1e-11


class AdditiveFit(NamedTuple):
    """answer ≈ query + cell, fitted to the answers that are there."""

    cells: FloatArray
    """[C] lead of each cell over the mean of all; NaN where it has no answer."""
    queries: FloatArray
    """[U] how often each query is answered rightly, by the mean cell."""
    usable: npt.NDArray[np.bool_]
    """[Q] which queries these U are: those with an answer in some cell."""
    right: FloatArray
    """[C] weight of the right answers."""
    there: FloatArray
    """[C] weight of the answers that are there."""


def additive_fit(blocks: Blocks, weight: FloatArray, limits: ComputeLimits = LIMITS) -> AdditiveFit:
    """Least squares of cells and queries by turns, queries that few cells answered counting as much as the others.

    weight [Q]: how often each query counts. The lead of a cell is its mean difference from the queries' own level, over
    the queries that it answered, each divided by the share of the cells that answered it (Horvitz & Thompson 1952): so
    a lead that only hard queries show is not lost where these are missing more often. Cells that share no query with
    the others keep their own mean. Cost: two readings, and two of
    the mask each turn: a few turns where little is missing; beside a block some of `ComputeLimits.block_bytes`.
    """
    num_queries = len(weight)
    sums, num, num_cells = np.zeros(num_queries), np.zeros(num_queries), 0
    for cells, ok in blocks():
        for some in _pieces(num_queries, len(ok), limits):
            sums[some] += np.where(ok[:, some], cells[:, some], 0).sum(axis=0, dtype=np.float64)
        num += np.count_nonzero(ok, axis=0)
        num_cells += int(ok.any(axis=1).sum())
    usable = num > 0
    used = np.flatnonzero(usable)
    sums, num, weight = sums[usable], num[usable], weight[usable]
    balance = num_cells / num
    counts = weight * balance
    right, there, lead, total = ([] for _ in range(4))
    for cells, ok in blocks():
        for some in _pieces(len(ok), len(used), limits):
            values, has = cells[some][:, used].astype(np.float64), ok[some][:, used]
            values[~has] = 0
            right.append(values @ weight)
            there.append(has @ weight)
            lead.append(values @ counts)
            total.append(has @ counts)
    by_cell, of_cell = np.concatenate(lead), np.concatenate(total)
    known = of_cell > 0
    found = np.zeros(len(of_cell))
    found[known] = by_cell[known] / of_cell[known]
    found[known] -= found[known].mean() if known.any() else 0.0
    level = np.zeros(len(num))
    for _ in range(_SWEEPS):
        taken, begin = np.zeros(len(num)), 0
        for _, ok in blocks():
            for some in _pieces(len(used), len(ok), limits):
                taken[some] += found[begin : begin + len(ok)] @ ok[:, used[some]]
            begin += len(ok)
        level = (sums - taken) / num
        met = np.concatenate(
            [ok[some][:, used] @ (counts * level) for _, ok in blocks() for some in _pieces(len(ok), len(used), limits)]
        )
        before, found = found, np.zeros(len(of_cell))
        found[known] = (by_cell[known] - met[known]) / of_cell[known]
        found[known] -= found[known].mean() if known.any() else 0.0
        if np.abs(found - before).max(initial=0.0) < _SWEPT:
            break
    found[~known] = np.nan
    return AdditiveFit(found, level, usable, np.concatenate(right), np.concatenate(there))


def _pieces(size: int, across: int, limits: ComputeLimits) -> Iterator[slice]:
    """Slices of so many rows, or columns, with ``across`` numbers each: at 8 bytes a block of them, 64 at least.

    Of a multiple of 64: a product of a matrix and a vector is then added up as it is in one piece, to the last bit.
    """
    step = max(limits.block_bytes // (8 * max(across, 1)) // 64, 1) * 64
    return (slice(low, low + step) for low in range(0, size, step))
