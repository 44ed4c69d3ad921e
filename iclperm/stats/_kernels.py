"""Numba loops over the item tensor. Imported only where a tensor is large enough to repay the compilation."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

Counts = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@njit(nogil=True)
def crossed_sums(correct: npt.NDArray[np.uint8]) -> tuple[Counts, Counts, Counts]:
    """Sums of correct [S, P, Q] over one axis each: [S, P] over Q, [S, Q] over P, [P, Q] over S; one pass, any strides.

    Int32 for the sums that vectorise over queries (at most P and S): half the time of int64. 0.1 ns an item against
    1.3 ns for three NumPy sums.
    """
    num_sets, num_permutations, num_queries = correct.shape
    by_set_permutation = np.zeros((num_sets, num_permutations), dtype=np.int64)
    by_set_query = np.zeros((num_sets, num_queries), dtype=np.int32)
    by_permutation_query = np.zeros((num_permutations, num_queries), dtype=np.int32)
    for s in range(num_sets):
        for p in range(num_permutations):
            answers, of_set, of_permutation = correct[s, p], by_set_query[s], by_permutation_query[p]
            total = 0
            for q in range(num_queries):
                total += answers[q]
                of_set[q] += answers[q]
                of_permutation[q] += answers[q]
            by_set_permutation[s, p] = total
    return by_set_permutation, by_set_query, by_permutation_query
