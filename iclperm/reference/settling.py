"""Slow oracles of what parts of a run say: answers sliced, ranks by counting, the error of a mean by its components."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from iclperm.reference import curves

FloatArray = npt.NDArray[np.float64]


def pooled_rank_correlation(x: FloatArray, y: FloatArray) -> float:
    """Of x and y [S, N]: mean ranks within each set by counting, products summed over the sets in which both vary."""
    product = square_x = square_y = 0.0
    for row_x, row_y in zip(x, y, strict=True):
        kept = np.isfinite(row_x) & np.isfinite(row_y)
        one, other = (_ranks(row[kept]) for row in (row_x, row_y))
        if len(one) and one.std() > 0 and other.std() > 0:
            a, b = one - one.mean(), other - other.mean()
            product, square_x, square_y = product + float(a @ b), square_x + float(a @ a), square_y + float(b @ b)
    return product / math.sqrt(square_x * square_y) if square_x > 0 and square_y > 0 else math.nan


def _ranks(values: FloatArray) -> FloatArray:
    return np.array([np.sum(values < value) + (np.sum(values == value) + 1) / 2 for value in values.tolist()])


def mean_difference(before: FloatArray, after: FloatArray) -> tuple[float, float]:
    """Mean of after - before [S, P, Q] and its standard error, at least `curves.unseen_error`."""
    difference = after - before
    return float(difference.mean()), max(curves.mean_error(difference), curves.unseen_error(difference.shape[2]))
