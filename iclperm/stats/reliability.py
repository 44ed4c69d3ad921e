"""How far a score of demonstrations agrees with itself: split halves of permutations and of queries."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.errors import RequestError
from iclperm.stats.correlation import correlation
from iclperm.stats.demonstrations import Positions, allowed_scores, demonstration_scores, prefixes_of
from iclperm.stats.incomplete import filled
from iclperm.stats.sensitivity import FloatArray, graded_items

_BYTES_AT_ONCE = 1 << 26
_QUERY_HALVES = 1  # purposes of random numbers; 3 is that of `choosing.at_random`
_PERMUTATION_HALVES = 2


class Reliability(NamedTuple):
    """Correlation of a score with itself from the other half of the data, stepped up to the whole (Spearman-Brown)."""

    permutations: float
    """Halves of the permutations, all queries. NaN where there are fewer than four, or the score has no use for
    them."""
    queries: float
    """Halves of the distinct queries, all permutations. NaN below two."""
    both: float
    """Halves of both at once: the one to quote, and if anything too low."""


def split_half(
    correct: npt.ArrayLike,
    orders: npt.ArrayLike,
    shots: Sequence[int] | None = None,
    state: npt.ArrayLike | None = None,
    weights: npt.ArrayLike | None = None,
    *,
    names: Sequence[str] | None = None,
    num_halves: int = 10,
    seed: int = 0,
) -> dict[str, Reliability]:
    """Split-half reliability of the scores `names`, or of all that the shots allow.

    Args:
        correct: [S, P, N, Q] 0 or 1, or grades in 0..1.
        orders: as in `demonstration_scores`.
        shots: as in `demonstration_scores`.
        names: as in `demonstration_scores`.
        state: [S, P, N, Q] integers, 0 = ok; a query that is not ok in some cell is left out.
        weights: [Q] how often each query counts in an accuracy; halves are of distinct queries.
        num_halves: random divisions into halves; correlations are averaged over them, then stepped up.
        seed: of the divisions.

    The correlation r of the two halves' scores is taken within sets (`correlation`); 2r/(1 + |r|) steps it up. Halves
    of the queries share their permutations, and halves of the permutations their queries, so each shows the noise of
    its own axis alone. Raises RequestError on shapes that do not fit. Cost: two passes over the tensor, and
    6·num_halves times the scores. Spearman (1910), Brown (1910).
    """
    items = graded_items(correct)
    if items.ndim != 4 or num_halves < 1:
        raise RequestError(f"split halves need correct [S, P, N, Q] and num_halves >= 1, got {list(items.shape)}")
    table = filled(items, state, weights)
    whole, order = table.accuracy.values, np.asarray(orders)
    cells = prefixes_of(whole, order, shots)
    wanted = allowed_scores(cells) if names is None else list(names)
    by_queries = _query_halves(table.items, table.weights, num_halves, seed)
    num_permutations = whole.shape[1]
    everything = np.arange(num_permutations)

    def correlations(values: Iterable[FloatArray], kept: Iterable[Positions]) -> dict[str, float]:
        left, right = (
            demonstration_scores(value[:, keep], order[..., keep, :], shots, wanted)
            for value, keep in zip(values, kept, strict=True)
        )
        return {name: correlation(left[name].values, right[name].values).estimate for name in wanted}

    found = np.full((3, num_halves, len(wanted)), np.nan)
    for half in range(num_halves):
        permuted = np.random.default_rng([seed, _PERMUTATION_HALVES, half]).permutation(num_permutations)
        halves = np.sort(permuted[: num_permutations // 2]), np.sort(permuted[num_permutations // 2 :])
        if num_permutations >= 4:
            found[0, half] = list(correlations((whole, whole), halves).values())
        if by_queries is not None:
            found[1, half] = list(correlations(by_queries[:, half], (everything, everything)).values())
        if num_permutations >= 4 and by_queries is not None:
            found[2, half] = list(correlations(by_queries[:, half], halves).values())
    # every permutation that begins with a demonstration shows it alone in the same prompts
    found[::2, :, [name == "single" for name in wanted]] = np.nan
    stepped = [[_stepped_up(values) for values in kind.T] for kind in found]
    return {name: Reliability(*values) for name, *values in zip(wanted, *stepped, strict=True)}


def _query_halves(
    items: npt.NDArray[Any],
    weight: FloatArray,
    num_halves: int,
    seed: int,
) -> FloatArray | None:
    """Accuracies [2, num_halves, S, P, N] over random halves of the usable distinct queries; None below two of them.

    One pass over the tensor, in blocks, for all halves together.
    """
    queries = np.arange(items.shape[-1])
    if len(queries) < 2:
        return None
    masks = np.zeros((items.shape[-1], 2, num_halves))
    for half in range(num_halves):
        order = np.random.default_rng([seed, _QUERY_HALVES, half]).permutation(queries)
        for side, kept in enumerate(np.array_split(order, 2)):
            masks[kept, side, half] = weight[kept]
    shares = masks.reshape(len(masks), -1)
    rows = items.reshape(-1, items.shape[-1])
    step = max(1, _BYTES_AT_ONCE // (8 * rows.shape[1]))
    sums = np.concatenate(
        [rows[begin : begin + step].astype(np.float64) @ shares for begin in range(0, len(rows), step)]
    )
    return np.ascontiguousarray((sums / shares.sum(axis=0)).T).reshape(2, num_halves, *items.shape[:3])


def _stepped_up(correlations: FloatArray) -> float:
    """Mean correlation of halves, as a reliability of the whole (Spearman-Brown); NaN where none is known."""
    known = correlations[np.isfinite(correlations)]
    if not len(known):
        return math.nan
    mean = float(known.mean())
    return 2 * mean / (1 + abs(mean))
