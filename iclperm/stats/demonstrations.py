"""What single demonstrations are worth, and how sure that is (arXiv 2503.22002 and relatives).

Every score is a function of the accuracy of all prefixes of all orderings: none of them costs a model call. Axes: S
sets, P permutations, K demonstrations of a set, N numbers of shots that were run, Q queries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.errors import RequestError
from iclperm.stats.sensitivity import FloatArray, std_along

Positions = npt.NDArray[np.int64]
# Differences of equal accuracies differ in their last bits; a cell whose values spread less than this is constant.
CONSTANT = 1e-12
_TOLERANCE = 0.01
_MAX_DESIGN = 1 << 27  # numbers in the design matrix of a ridge regression, a gigabyte


class Score(NamedTuple):
    """One score of every demonstration."""

    values: FloatArray
    """[S, K]; NaN where the runs say nothing about a demonstration."""
    se: FloatArray
    """[S, K] standard error over permutations, the queries held fixed; NaN below two permutations."""


class TruncatedShapley(NamedTuple):
    """Truncated Monte Carlo Shapley values, and what the truncation would have saved."""

    values: FloatArray
    """[S, K] in units of accuracy."""
    se: FloatArray
    """[S, K] standard error over permutations."""
    truncated: float
    """Share of the steps that counted as 0 without being looked at."""


class Difference(NamedTuple):
    """A mean of paired differences with its standard error, its interval and the p-value of no difference."""

    estimate: float
    se: float
    low: float
    high: float
    p_value: float


class Prefixes(NamedTuple):
    """Checked input of the scores: accuracy of every prefix, and the position of each demonstration in every order."""

    accuracy: FloatArray
    """[S, P, N]"""
    places: Positions
    """[S, P, K] position of each demonstration; [1, P, K] where the sets share their permutations."""
    shots: Positions
    """[N] ascending."""


def shapley(accuracy: npt.ArrayLike, orders: npt.ArrayLike, shots: Sequence[int] | None = None) -> Score:
    """Permutation-sampling Shapley value: mean over permutations of what accuracy gains where a demonstration joins.

    Args:
        accuracy: [S, P, K + 1] accuracy of every prefix k = 0..K.
        orders: [P, K], or [S, P, K] where every set has its own; which demonstration stands at each position.
        shots: [K + 1] the numbers 0..K, the default.

    The values of a set sum to its mean of V_K - V_0. `se` is that of permutation sampling. Raises RequestError on
    shapes that do not fit, a NaN, or an incomplete list of shots. Cost: O(S·P·K). Castro et al. (2009).
    """
    cells = prefixes_of(accuracy, orders, shots)
    num_demonstrations = cells.places.shape[2]
    if len(cells.shots) != num_demonstrations + 1:
        raise RequestError(
            f"Shapley values of {num_demonstrations} demonstrations need every number of shots 0..{num_demonstrations},"
            f" got {cells.shots.tolist()}"
        )
    return _over_permutations(_by_demonstration(cells, _steps(cells)))


def marginal(accuracy: npt.ArrayLike, orders: npt.ArrayLike, shots: Sequence[int] | None = None) -> Score:
    """Mean z of V_k - V_(k-1), standardised over the permutations of each (set, k); k is where a demonstration stands.

    Takes what `shapley` does, and any ascending `shots` [N]: positions without both numbers are left out. z is 0 where
    a cell does not vary. Raises RequestError where no two shots are neighbours. arXiv 2503.22002 prints no formula.
    """
    cells = prefixes_of(accuracy, orders, shots)
    return _over_permutations(_by_demonstration(cells, _standardised(_steps(cells))))


def prefix(accuracy: npt.ArrayLike, orders: npt.ArrayLike, shots: Sequence[int] | None = None) -> Score:
    """Mean z of V_k, the accuracy of the prefix that ends with the demonstration, standardised as in `marginal`.

    Positions whose k was not run are left out. Raises RequestError where only k = 0 was run.
    """
    cells = prefixes_of(accuracy, orders, shots)
    return _over_permutations(_by_demonstration(cells, _at_own_position(cells)))


def member(accuracy: npt.ArrayLike, orders: npt.ArrayLike, shots: Sequence[int] | None = None) -> Score:
    """Mean z over all prefixes that hold the demonstration, of all permutations; standardised as in `marginal`.

    `se` is that of a ratio of sums, with the permutation as its unit. Raises RequestError where only k = 0 was run.
    """
    cells = prefixes_of(accuracy, orders, shots)
    return _over_prefixes(cells, _standardised(cells.accuracy))


def stability(
    accuracy: npt.ArrayLike,
    orders: npt.ArrayLike,
    shots: Sequence[int] | None = None,
    of: Literal["marginal", "prefix"] = "marginal",
) -> Score:
    """Mean over standard deviation of a demonstration's z over permutations: good everywhere rather than very good.

    `of` names the z. 0 where all z are 0; NaN where they are equal but not 0. `se` is √((1 + value²/2)/P), the Gaussian
    one of Lo (2002). Raises what `marginal` and `prefix` do.
    """
    if of not in ("marginal", "prefix"):
        raise RequestError(f"stability is of 'marginal' or 'prefix', got {of!r}")
    cells = prefixes_of(accuracy, orders, shots)
    z = _by_demonstration(cells, _standardised(_steps(cells)) if of == "marginal" else _at_own_position(cells))
    mean, se, count = _mean_se_count(z)
    spread = se * np.sqrt(count)
    varies = spread > CONSTANT
    constant = np.where((np.abs(mean) <= CONSTANT) & (count > 1), 0.0, np.nan)
    values = np.where(varies, mean / np.where(varies, spread, 1.0), constant)
    return Score(values, np.sqrt((1 + values**2 / 2) / np.maximum(count, 1)))


def truncated_shapley(
    accuracy: npt.ArrayLike,
    orders: npt.ArrayLike,
    shots: Sequence[int] | None = None,
    tolerance: float = _TOLERANCE,
) -> TruncatedShapley:
    """Shapley values where an ordering is given up once its prefix is within `tolerance` of the whole set's accuracy.

    The whole set's accuracy is its mean over the permutations; every later step counts 0. `truncated` is the share
    of prefixes that need not have been run. With tolerance 0 these are the values of `shapley`. Takes and raises what
    `shapley` does, and RequestError for a negative tolerance. Ghorbani & Zou (2019), algorithm 1.
    """
    if not tolerance >= 0:
        raise RequestError(f"tolerance must be at least 0, got {tolerance}")
    cells = prefixes_of(accuracy, orders, shots)
    shapley(accuracy, orders, shots)  # refuses what it refuses
    whole = cells.accuracy[:, :, -1:].mean(axis=1, keepdims=True)
    given_up = np.logical_or.accumulate(np.abs(whole - cells.accuracy[:, :, :-1]) < tolerance, axis=2)
    steps = np.where(given_up, 0.0, _steps(cells))
    return TruncatedShapley(*_over_permutations(_by_demonstration(cells, steps)), float(given_up.mean()))


def condacc(accuracy: npt.ArrayLike, orders: npt.ArrayLike, shots: Sequence[int] | None = None) -> Score:
    """Mean accuracy of the prompts that hold the demonstration, each k compared with itself.

    The deviation from the mean over permutations at the same k, averaged over all prefixes k >= 1 that hold it, plus
    the mean accuracy over these k; else a demonstration that stood late by chance would gain from the rising curve.
    With one number of shots it is CondAcc of Chang & Jia (2023). `se` as in `member`.
    """
    cells = prefixes_of(accuracy, orders, shots)
    score = _over_prefixes(cells, _centred(cells.accuracy))
    level = cells.accuracy[:, :, cells.shots > 0].mean(axis=(1, 2))
    return Score(score.values + level[:, None], score.se)


def influence(accuracy: npt.ArrayLike, orders: npt.ArrayLike, shots: Sequence[int] | None = None) -> Score:
    """Mean accuracy of the prefixes with a demonstration minus that of those without it, at matched k.

    The difference at each k weighs n_with·n_without/P, as least squares does for an indicator beside one level a k; at
    k = 0 and k = K there is nothing to compare. NaN where a demonstration is always or never there. `se` is clustered
    by permutation. With one number of shots it is the influence of Nguyen & Wong (2023).
    """
    cells = prefixes_of(accuracy, orders, shots)
    num_permutations = cells.accuracy.shape[1]
    values = _centred(cells.accuracy)
    share = np.stack([(cells.places < k).mean(axis=1) for k in cells.shots], axis=-1)  # [S or 1, K, N]
    variation = share * (1 - share)
    scale = num_permutations * variation.sum(axis=-1)  # [S or 1, K]
    known = scale > CONSTANT
    # Σ over k of (indicator - share)·value, for every permutation
    expected = np.einsum("sen,spn->spe", np.broadcast_to(share, (len(values), *share.shape[1:])), values, optimize=True)
    gained = _inside(cells, values) - expected  # [S, P, K]
    estimate = np.where(known, gained.sum(axis=1) / np.where(known, scale, 1.0), np.nan)
    # Σ over k of (indicator - share)²: 1 - 2·share where it is inside, share² everywhere
    start = _first_holding(cells)  # [K] by position
    tails = _tails(1 - 2 * share)  # [S or 1, K, N + 1]
    squares = np.take_along_axis(tails.swapaxes(1, 2), start[cells.places], axis=1) + (share**2).sum(axis=-1)[:, None]
    residual = gained - estimate[:, None] * squares
    if num_permutations < 2:
        return Score(estimate, np.full_like(estimate, np.nan))
    correction = num_permutations / (num_permutations - 1)
    return Score(estimate, np.sqrt(correction * (residual**2).sum(axis=1)) / np.where(known, scale, 1.0))


def datamodel(
    accuracy: npt.ArrayLike, orders: npt.ArrayLike, shots: Sequence[int] | None = None, ridge: float = 1.0
) -> FloatArray:
    """[S, K, K] effect of every demonstration at every position on accuracy: ridge regression over all prefixes.

    Accuracy, centred at each k, on the indicators (demonstration, position), with penalty `ridge` on their squares;
    the mean over positions scores a demonstration. Raises RequestError unless ridge > 0, or where
    P·N·K² exceeds 2^27. Cost: O(S·(P·N·K⁴ + K⁶)), in K² numbers a prefix. After the datamodels of Chang & Jia (2023).
    """
    cells = prefixes_of(accuracy, orders, shots)
    num_demonstrations = cells.places.shape[2]
    num_rows = cells.accuracy.shape[1] * len(cells.shots)
    if num_rows * num_demonstrations**2 > _MAX_DESIGN:
        raise RequestError(
            f"{num_rows} prefixes of {num_demonstrations} demonstrations are too many for a datamodel; give fewer shots"
        )
    if not ridge > 0:
        raise RequestError(f"ridge must be positive, got {ridge}")
    values = _centred(cells.accuracy)
    effects = [
        _ridge_effects(cells.places[s if len(cells.places) > 1 else 0], values[s], cells.shots, ridge)
        for s in range(len(values))
    ]
    return np.stack(effects)


def single(accuracy: npt.ArrayLike, orders: npt.ArrayLike, shots: Sequence[int] | None = None) -> Score:
    """Accuracy with the demonstration alone (k = 1): mean over the permutations that begin with it.

    These all have the same prompts, so `se` is 0 unless the model is not deterministic. NaN for one that never stands
    first: of K demonstrations under P permutations some K·(1 - 1/K)^P. Raises RequestError where k = 1 was not run.
    """
    cells = prefixes_of(accuracy, orders, shots)
    if 1 not in cells.shots:
        raise RequestError(f"accuracy of single demonstrations needs k = 1, got shots {cells.shots.tolist()}")
    alone = np.full((*cells.accuracy.shape[:2], cells.places.shape[2]), np.nan)
    alone[:, :, 0] = cells.accuracy[:, :, int(np.flatnonzero(cells.shots == 1)[0])]
    return _over_permutations(_by_demonstration(cells, alone))


SCORES: Mapping[str, Callable[..., Any]] = {
    "shapley": shapley,
    "marginal": marginal,
    "prefix": prefix,
    "member": member,
    "stability": stability,
    "truncated": truncated_shapley,
    "influence": influence,
    "condacc": condacc,
    "single": single,
}
"""Scores from the accuracy of prefixes, by name; a higher one is better."""


def demonstration_scores(
    accuracy: npt.ArrayLike,
    orders: npt.ArrayLike,
    shots: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
) -> dict[str, Score]:
    """The scores `names` (`SCORES`), or all that these numbers of shots allow, of every demonstration.

    Takes what `shapley` does. Raises RequestError for a name that there is not, one that the shots do not allow, or
    shots that allow none. Cost: O(S·P·K) for each, at S = 10, P = 1,000, K = 64 under a second for all.
    """
    cells = prefixes_of(accuracy, orders, shots)
    wanted = allowed_scores(cells) if names is None else names
    if unknown := [name for name in wanted if name not in SCORES]:
        raise RequestError(f"unknown score {unknown[0]!r}; choose from {', '.join(SCORES)}")
    if not wanted:
        raise RequestError(f"shots {cells.shots.tolist()} say nothing about single demonstrations; run k >= 1")
    return {name: Score(*SCORES[name](cells.accuracy, orders, shots)[:2]) for name in wanted}


def prefixes_of(accuracy: npt.ArrayLike, orders: npt.ArrayLike, shots: Sequence[int] | None) -> Prefixes:
    """The input of every score, checked: args as `shapley`, with any ascending `shots`.

    Raises RequestError on shapes that do not fit, a NaN, and rows of `orders` that are no permutations.
    """
    values, order = np.asarray(accuracy, dtype=np.float64), np.asarray(orders)
    if values.ndim != 3 or values.size == 0:
        raise RequestError(f"accuracy of prefixes must have shape [S, P, N], got {list(values.shape)}")
    if not np.isfinite(values).all():
        raise RequestError("accuracy of prefixes holds a NaN; leave out cells without a usable query")
    if order.ndim not in (2, 3) or not np.issubdtype(order.dtype, np.integer):
        raise RequestError(f"orders must be integers [P, K] or [S, P, K], got {order.dtype} {list(order.shape)}")
    order = order if order.ndim == 3 else order[None]
    num_demonstrations = order.shape[2]
    if order.shape[0] not in (1, len(values)) or order.shape[1] != values.shape[1]:
        raise RequestError(f"orders {list(order.shape)} do not fit accuracy {list(values.shape)}")
    places = np.argsort(order, axis=2, kind="stable")
    if not (np.take_along_axis(order, places, axis=2) == np.arange(num_demonstrations)).all():
        raise RequestError(f"every row of orders must be a permutation of 0..{num_demonstrations - 1}")
    counts = np.arange(num_demonstrations + 1) if shots is None else np.asarray(shots, dtype=np.int64)
    ascending = counts.ndim == 1 and (np.diff(counts) > 0).all()
    if counts.shape != values.shape[2:] or not ascending or counts[0] < 0 or counts[-1] > num_demonstrations:
        raise RequestError(
            f"shots must be {values.shape[2]} ascending numbers in 0..{num_demonstrations}, got {counts.tolist()}"
        )
    return Prefixes(values, places, counts)


def allowed_scores(cells: Prefixes) -> list[str]:
    """Names of the scores that these numbers of shots allow."""
    has_steps, is_full = bool((np.diff(cells.shots) == 1).any()), len(cells.shots) == cells.places.shape[2] + 1
    needs = {"shapley": is_full, "truncated": is_full, "marginal": has_steps, "stability": has_steps}
    needs["single"] = bool(1 in cells.shots)
    return [name for name in SCORES if needs.get(name, cells.shots[-1] > 0)]


def _places(cells: Prefixes) -> Positions:
    return np.broadcast_to(cells.places, (len(cells.accuracy), *cells.places.shape[1:]))


def _by_demonstration(cells: Prefixes, by_position: FloatArray) -> FloatArray:
    """[S, P, K] by position as [S, P, K] by demonstration."""
    return np.take_along_axis(by_position, _places(cells), axis=2)


def _steps(cells: Prefixes) -> FloatArray:
    """V_(i+1) - V_i of every position i, [S, P, K]; NaN where one of them was not run."""
    at = np.full(cells.places.shape[2] + 1, -1)
    at[cells.shots] = np.arange(len(cells.shots))
    begin, end = at[:-1], at[1:]
    known = (begin >= 0) & (end >= 0)
    if not known.any():
        raise RequestError(f"a marginal needs two neighbouring numbers of shots, got {cells.shots.tolist()}")
    return np.where(known, cells.accuracy[:, :, end] - cells.accuracy[:, :, begin], np.nan)


def _at_own_position(cells: Prefixes) -> FloatArray:
    """z of V_(i+1) at every position i, [S, P, K]; NaN where it was not run."""
    ran = cells.shots[cells.shots > 0]
    if not len(ran):
        raise RequestError("a score of prefixes needs k >= 1, got shots [0]")
    by_position = np.full((*cells.accuracy.shape[:2], cells.places.shape[2]), np.nan)
    by_position[:, :, ran - 1] = _standardised(cells.accuracy[:, :, cells.shots > 0])
    return by_position


def _centred(values: FloatArray) -> FloatArray:
    """Values [S, P, N] minus their mean over permutations; exactly 0 where all are equal."""
    from_first = values - values[:, :1]
    return np.asarray(from_first - from_first.mean(axis=1, keepdims=True))


def _standardised(values: FloatArray) -> FloatArray:
    """z over the permutations of [S, P, N]: 0 where they are equal, NaN for P = 1."""
    spread = std_along(values, axis=1)[:, None]
    varies = spread > CONSTANT
    z = _centred(values) / np.where(varies, spread, 1.0)
    return np.where(varies | np.isnan(spread), z if values.shape[1] > 1 else np.nan, 0.0)


def _mean_se_count(values: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Mean, standard error and number of the known values over axis 1 of [S, P, K], each [S, K]."""
    known = ~np.isnan(values)
    count = known.sum(axis=1).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(known, values, 0.0).sum(axis=1) / count
        deviation = np.where(known, values - mean[:, None], 0.0)
        se = np.where(count > 1, np.sqrt((deviation**2).sum(axis=1) / ((count - 1) * count)), np.nan)
    return mean, se, count


def _over_permutations(values: FloatArray) -> Score:
    mean, se, _ = _mean_se_count(values)
    return Score(mean, se)


def _first_holding(cells: Prefixes) -> Positions:
    """[K] the first place on the axis of shots whose prefix holds each position."""
    return np.searchsorted(cells.shots, np.arange(cells.places.shape[2]), side="right")


def _tails(values: FloatArray) -> FloatArray:
    """[..., N + 1] sums over the last axis from every place on."""
    padded = np.concatenate([values, np.zeros((*values.shape[:-1], 1))], axis=-1)
    return np.asarray(np.cumsum(padded[..., ::-1], axis=-1)[..., ::-1])


def _inside(cells: Prefixes, values: FloatArray) -> FloatArray:
    """[S, P, K] sum of values [S, P, N] over the prefixes that hold a demonstration."""
    return _by_demonstration(cells, _tails(values)[:, :, _first_holding(cells)])


def _over_prefixes(cells: Prefixes, values: FloatArray) -> Score:
    """Mean of values [S, P, N] over all prefixes that hold a demonstration; a ratio of sums over permutations."""
    if cells.shots[-1] == 0:
        raise RequestError("a score of prefixes needs k >= 1, got shots [0]")
    num_permutations = values.shape[1]
    sums = _inside(cells, values)
    counts = (len(cells.shots) - _first_holding(cells))[_places(cells)]
    total = counts.sum(axis=1)
    mean = np.where(total > 0, sums.sum(axis=1) / np.maximum(total, 1), np.nan)
    if num_permutations < 2:
        return Score(mean, np.full_like(mean, np.nan))
    residual = sums - mean[:, None] * counts
    correction = num_permutations / (num_permutations - 1)
    return Score(mean, np.sqrt(correction * (residual**2).sum(axis=1)) / np.maximum(total, 1))


def _ridge_effects(places: Positions, values: FloatArray, shots: Positions, ridge: float) -> FloatArray:
    """[K, K] effects (demonstration, position) of one set: places [P, K], centred values [P, N]."""
    num_permutations, num = places.shape
    rows = np.zeros((num_permutations, len(shots), num, num))
    p, e = np.indices(places.shape)
    for place, k in enumerate(shots):
        rows[p, place, e, places] = places < k
    rows -= rows.mean(axis=0)  # one level at each k, taken out of both sides
    design = rows.reshape(-1, num * num)
    solved = np.linalg.solve(design.T @ design + ridge * np.eye(num * num), design.T @ values.ravel())
    return np.asarray(solved.reshape(num, num))
