"""Demonstrations chosen out of sets: by their scores, by their texts, or at random."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from iclperm.errors import RequestError
from iclperm.stats.demonstrations import CONSTANT, Positions
from iclperm.stats.sensitivity import FloatArray
from iclperm.stats.texts import checked_similarities

_RANDOM_CHOICE = 3  # purpose of random numbers; 1 and 2 are those of `reliability.split_half`


def highest(scores: npt.ArrayLike, num: int) -> Positions:
    """Positions of the `num` highest of scores [S, K] in each set, ascending; int64 [S, num].

    Ties go to the lowest position; a demonstration without a score (NaN) comes last. Raises RequestError unless
    1 <= num <= K.
    """
    table = np.asarray(scores, dtype=np.float64)
    _refuse_size(num, table.shape)
    order = np.argsort(np.where(np.isnan(table), np.inf, -table), axis=1, kind="stable")
    return np.sort(order[:, :num], axis=1).astype(np.int64)


def most_diverse(similarities: npt.ArrayLike, num: int) -> Positions:
    """Positions of `num` demonstrations with little pairwise similarity [S, K, K], ascending; int64 [S, num].

    Greedy, from the least similar pair, then single exchanges while one lowers the sum of pairwise similarities: a
    local optimum. Ties go to the lowest positions. Raises RequestError unless 1 <= num <= K.
    """
    table = checked_similarities(similarities)
    _refuse_size(num, table.shape[:2])
    return np.array([sorted(_spread_out(one_set, num)) for one_set in table], dtype=np.int64)


def at_random(num_sets: int, num_demonstrations: int, num: int, seed: int = 0) -> Positions:
    """Positions of `num` demonstrations of each set, keyed by (seed, set), ascending; int64 [S, num].

    Raises RequestError unless 1 <= num <= K.
    """
    _refuse_size(num, (num_sets, num_demonstrations))
    drawn = [
        np.random.default_rng([seed, _RANDOM_CHOICE, s]).permutation(num_demonstrations)[:num] for s in range(num_sets)
    ]
    return np.sort(np.array(drawn, dtype=np.int64), axis=1)


def blend(score: npt.ArrayLike, steadiness: npt.ArrayLike, share: float = 0.5) -> FloatArray:
    """[S, K] mean of a score and a steadiness, each standardised within its set; `share` is the score's.

    A standardised score is 0 where a set's values are equal. Raises RequestError unless 0 <= share <= 1.
    """
    if not 0 <= share <= 1:
        raise RequestError(f"share must lie in 0..1, got {share}")
    ours, theirs = (_standardised_rows(np.asarray(values, dtype=np.float64)) for values in (score, steadiness))
    return np.asarray(share * ours + (1 - share) * theirs)


STRATEGIES: Mapping[str, str] = {
    "random": "drawn at random from the set",
    "top": "highest score",
    "bottom": "lowest score",
    "shapley": "highest Shapley value",
    "stable": "highest stability: mean of z over its standard deviation",
    "blend": "score and stability, half each, standardised within the set",
    "single": "highest accuracy alone, at k = 1",
    "diverse": "least pairwise similarity of texts",
}
"""Ways to choose n demonstrations of a set, and what each is in words."""


def select(
    scores: Mapping[str, npt.ArrayLike],
    num: int = 6,
    *,
    score: str = "marginal",
    strategies: Sequence[str] | None = None,
    similarities: npt.ArrayLike | None = None,
    seed: int = 0,
) -> dict[str, Positions]:
    """Chosen positions of each set under every strategy, int64 [S, num], ascending.

    Args:
        scores: [S, K] by name, as from `demonstration_scores`.
        num: how many to choose of each set (6 in arXiv 2503.22002).
        score: the one that top, bottom and blend go by.
        strategies: names out of `STRATEGIES`; all whose scores are there by default.
        similarities: [S, K, K] of texts, for `diverse`.
        seed: of `random`.

    Raises RequestError for a strategy that there is not, or one that lacks its score.
    """
    tables = {name: np.asarray(values, dtype=np.float64) for name, values in scores.items()}
    if score not in tables:
        raise RequestError(f"the score {score!r} is not among {', '.join(tables) or 'none'}")
    rankings: dict[str, Callable[[], Positions]] = {
        "random": lambda: at_random(len(tables[score]), tables[score].shape[1], num, seed),
        "top": lambda: highest(tables[score], num),
        "bottom": lambda: highest(-tables[score], num),
    }
    if "stability" in tables:
        rankings["blend"] = lambda: highest(blend(tables[score], tables["stability"]), num)
    if similarities is not None:
        rankings["diverse"] = lambda: most_diverse(similarities, num)
    for strategy, name in (("shapley", "shapley"), ("stable", "stability"), ("single", "single")):
        if name in tables:
            rankings[strategy] = lambda name=name: highest(tables[name], num)  # type: ignore[misc]
    wanted = [name for name in STRATEGIES if name in rankings] if strategies is None else list(strategies)
    if missing := [name for name in wanted if name not in rankings]:
        known = "its score or the texts are missing" if missing[0] in STRATEGIES else "there is no such strategy"
        raise RequestError(f"cannot choose by {missing[0]!r}: {known}; choose from {', '.join(rankings)}")
    return {name: rankings[name]() for name in wanted}


def _standardised_rows(values: FloatArray) -> FloatArray:
    """z over the known values of each row: 0 where these are equal; what is not known stays NaN."""
    z = np.full_like(values, np.nan)
    for row, out in zip(values, z, strict=True):
        known = np.isfinite(row)
        spread = row[known].std(ddof=1) if known.sum() > 1 else 0.0
        out[known] = (row[known] - row[known].mean()) / spread if spread > CONSTANT else 0.0
    return z


def _spread_out(table: FloatArray, num: int) -> list[int]:
    """Positions of `num` rows of a similarity table [K, K]."""
    size = len(table)
    off_diagonal = table - np.diag(np.diag(table))
    if num == 1:
        return [int(off_diagonal.sum(axis=1).argmin())]
    first, second = np.triu_indices(size, 1)
    closest = int(table[first, second].argmin())
    chosen = [int(first[closest]), int(second[closest])]
    while len(chosen) < num:
        rest = [e for e in range(size) if e not in chosen]
        chosen.append(min(rest, key=lambda e: (off_diagonal[e, chosen].sum(), e)))
    while num < size:
        rest = [e for e in range(size) if e not in chosen]
        cost = off_diagonal[:, chosen].sum(axis=1)
        gains = cost[chosen][:, None] - (cost[rest][None, :] - off_diagonal[np.ix_(chosen, rest)])
        out, into = np.unravel_index(int(gains.argmax()), gains.shape)
        if gains[out, into] <= CONSTANT:
            break
        chosen[out] = rest[into]
    return chosen


def _refuse_size(num: int, shape: tuple[int, ...]) -> None:
    """Raises RequestError unless `num` of K demonstrations can be chosen, `shape` being (S, K)."""
    if len(shape) != 2 or not 1 <= num <= shape[1]:
        raise RequestError(f"cannot choose {num} demonstrations out of scores of shape {list(shape)} [S, K]")
