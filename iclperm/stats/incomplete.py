"""Variance components where answers are missing or queries are of classes, from moments of the answers there are.

What varies is the weighted accuracy of an ordering, Σ_c share_c · accuracy_c over classes of queries. A query stands
for its class: other queries of the same class are what an interval speaks of. Missing answers are left out one by one,
and every remaining one is used. Complete answers of equal weight have mean squares (`components`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.errors import RequestError
from iclperm.stats.additive import additive_fit
from iclperm.stats.limits import LIMITS, ComputeLimits
from iclperm.stats.sensitivity import (
    Accuracy,
    FloatArray,
    accuracy,
    accuracy_of_fit,
    graded_items,
    query_weights,
)

_MOST_STRATA = 64  # distinct weights that are taken for classes where those are not known
_MOST_ORDERINGS = 2048  # whose unit effects are followed one by one
_NOISES = 3  # SI, PI, SPI: the interactions with queries


class Moments(NamedTuple):
    """What the class of some queries says about sets and orderings, before it is solved for components."""

    deviations: FloatArray
    """[S, P] accuracy of each ordering less that of all, over the class, query by query."""
    loads: FloatArray
    """[3, 3] how much of σ²_SI, σ²_PI, σ²_SPI (columns) is in the mean squares of sets, permutations and residual
    (rows) of `deviations`."""
    responses: tuple[FloatArray, ...]
    """[S, P, levels] what `deviations` make of an effect of 1 of each set, of each permutation and, unless there are
    more than 2,048, of each ordering."""
    noises: FloatArray
    """[3] σ²_SI, σ²_PI and σ²_SPI: what answers to one query share beyond their set and permutation."""
    between: FloatArray
    """[4] variance of the queries' means over orderings, and how much of σ²_SI, σ²_PI, σ²_SPI is in it."""
    num_queries: int


@dataclass(frozen=True)
class Stratum:
    """A class of queries in a weighted accuracy."""

    share: float
    """Of the weighted accuracy; the shares of all classes sum to 1."""
    num_queries: int
    """Distinct queries."""
    sigma2: tuple[float, ...]
    """Components of the accuracy of this class alone, in the order of `Effects`; unbiased, they can be negative."""
    loads: tuple[tuple[float, ...], ...]
    """[3, 3] as `Moments.loads`, of the weighted accuracy."""


def strata_of(weights: FloatArray, classes: npt.ArrayLike | None) -> npt.NDArray[np.int64]:
    """[Q] the stratum of each query, numbered from 0; -1 for one of weight 0.

    Strata are the `classes` [Q], of which each has as many queries as a study meant it to have. Without them queries of
    equal weight are one stratum, a sample of whatever mixture they come in, and others those of one weight: an
    oversampled class is the queries of one weight. More than 64 different weights without classes, or one that a single
    query has, are one stratum; so are equal weights with a class of one query.
    """
    counted = weights > 0
    found = np.full(len(weights), -1, np.int64)
    is_equal = bool(np.ptp(weights[counted]) == 0)
    if is_equal and classes is None:
        found[counted] = 0
        return found
    values = weights if classes is None else np.asarray(classes)
    if values.shape != weights.shape:
        raise RequestError(f"classes must have shape [{len(weights)}], got {list(values.shape)}")
    different, numbers, sizes = np.unique(values[counted], return_inverse=True, return_counts=True)
    is_one = (classes is None and len(different) > _MOST_STRATA) or ((classes is None or is_equal) and sizes.min() < 2)
    found[counted] = 0 if is_one else numbers
    return found


def solved(
    scores: npt.NDArray[Any],
    present: npt.NDArray[np.bool_],
    weights: FloatArray,
    strata: npt.NDArray[np.int64],
    limits: ComputeLimits,
) -> tuple[FloatArray, FloatArray, FloatArray, tuple[Stratum, ...]]:
    """σ² in the order S, P, I, SP, SI, PI, SPI, the mean squares [3] of sets, permutations and residual, how much of
    σ²_S, σ²_P, σ²_SP is in them [3, 3], and the strata.

    Args:
        scores: [S, P, Q] answers; what is not `present` does not matter.
        present: [S, P, Q] which answers are there.
        weights: [Q] how much each query counts.
        strata: [Q] from `strata_of`.
        limits: of it `block_bytes`.

    σ²_S, σ²_P and σ²_SP are those of the weighted accuracy; σ²_I and the interactions with queries are means over the
    strata, weighted by their shares: what varies within a class. Raises RequestError where an ordering has no answer in
    some stratum, or a stratum has fewer than two queries that several orderings answered. Cost: O(S·P·Q), three
    readings.
    """
    num_sets, num_permutations, _ = scores.shape
    total = float(weights[strata >= 0].sum())
    names = range(int(strata.max()) + 1)
    weighted = np.zeros((num_sets, num_permutations))
    found, noise = [], np.zeros(_NOISES)
    inside = np.zeros(7)
    responses: list[FloatArray] = []
    for name in names:
        members = np.flatnonzero(strata == name)
        share = float(weights[members].sum()) / total
        moments = _moments(scores, present, weights, members, limits)
        sigma2 = _solve(moments)
        weighted += share * moments.deviations
        noise += share**2 * moments.loads @ sigma2[4:]
        inside += share * sigma2
        loads = tuple(tuple(row) for row in (share**2 * moments.loads).tolist())
        found.append(Stratum(share, moments.num_queries, tuple(sigma2.tolist()), loads))
        ours = [share * part for part in moments.responses]
        responses = [one + other for one, other in zip(responses, ours, strict=True)] if responses else ours
    squares, effects = mean_squares(weighted), effect_loads(tuple(responses))
    s, p, sp = np.linalg.solve(effects, squares - noise)
    return np.array([s, p, inside[2], sp, *inside[4:]]), squares, effects, tuple(found)


def effect_loads(responses: tuple[FloatArray, ...]) -> FloatArray:
    """[3, 3] how much of σ²_S, σ²_P, σ²_SP (columns) is in the mean squares of sets, permutations and residual (rows).

    Mean squares are sums of squares of linear functions of the effects: those of unit effects add up. [[P, 0, 1],
    [0, S, 1], [0, 0, 1]] where no answer is missing; without responses of single orderings the last column is this.
    """
    loads = np.ones((3, 3))
    for column, part in enumerate(responses):
        loads[:, column] = _summed_squares(part)
    return loads


def _summed_squares(tables: FloatArray) -> FloatArray:
    """[3] mean squares of tables [S, P, N], summed over N."""
    num_sets, num_permutations, _ = tables.shape
    centred = tables - tables.mean(axis=(0, 1))
    rows, columns = centred.mean(axis=1), centred.mean(axis=0)
    residual = centred - rows[:, None] - columns[None]
    s, p = num_sets - 1, num_permutations - 1
    sums = num_permutations * np.sum(rows**2), num_sets * np.sum(columns**2), np.sum(residual**2)
    return np.asarray(np.array(sums) / [s, p, s * p])


def mean_squares(matrix: FloatArray) -> FloatArray:
    """[3] mean squares of sets, permutations and residual of accuracies [S, P], with S, P >= 2."""
    num_sets, num_permutations = matrix.shape
    centred = matrix - matrix[0, 0]
    centred = centred - centred.mean()
    rows, columns = centred.mean(axis=1), centred.mean(axis=0)
    residual = centred - rows[:, None] - columns
    squares = np.array([num_permutations * (rows @ rows), num_sets * (columns @ columns), np.sum(residual**2)])
    return np.asarray(squares / [num_sets - 1, num_permutations - 1, (num_sets - 1) * (num_permutations - 1)])


def _solve(moments: Moments) -> FloatArray:
    """[7] components of one stratum: every mean square less the noise in it set equal to its expectation."""
    squares = mean_squares(moments.deviations) - moments.loads @ moments.noises
    of_set, of_permutation, both = np.linalg.solve(effect_loads(moments.responses), squares)
    item = moments.between[0] - moments.between[1:] @ moments.noises
    return np.array([of_set, of_permutation, item, both, *moments.noises])


def _moments(
    scores: npt.NDArray[Any],
    present: npt.NDArray[np.bool_],
    weights: FloatArray,
    members: npt.NDArray[np.int64],
    limits: ComputeLimits,
) -> Moments:
    """The moments of one stratum, from three readings of its answers in blocks of queries.

    The accuracy of an ordering is taken less that of each query over all orderings, so that an ordering that met the
    easier queries gains nothing by it; an answer counts by one over the answers that its query has, so that what only
    hard queries show is not lost where these are missing more often. What missing answers make of effects (`responses`)
    and of noise (`loads`) is then known exactly, whatever their pattern.
    """
    num_sets, num_permutations, _ = scores.shape
    size = num_sets * num_permutations
    weight_of, kept = _weight_and_shrinkage(scores, present, weights, members, limits)
    _refuse_empty(weight_of, kept)
    scale = kept * (size / (size - 1))
    deviations = np.zeros((num_sets, num_permutations))
    forms = np.zeros((4, _NOISES))  # of all cells, rows, columns and the total
    levels = [num_sets, num_permutations, *([size] if size <= _MOST_ORDERINGS else [])]
    met = [np.zeros((size, level)) for level in levels]
    own = np.zeros((num_sets, num_permutations))
    means: list[FloatArray] = []
    shares: list[FloatArray] = []
    for chosen, y, there in _blocks(scores, present, members, limits):
        num = there.sum(axis=(0, 1))
        mean = (y * there).sum(axis=(0, 1)) / num
        rest = (y - mean) * there
        a = there * (weights[chosen] / num / scale[:, :, None])
        deviations += (a * rest).sum(axis=2)
        own += a.sum(axis=2)
        by_set, by_permutation = there.sum(axis=1) / num, there.sum(axis=0) / num
        forms += _forms(a, num, by_set, by_permutation)
        for found, part in zip(met, (by_set, by_permutation, there.reshape(size, -1) / num), strict=False):
            found += a.reshape(size, -1) @ part.T
        means.append(mean)
        shares.append(np.stack([np.sum(by_set**2, axis=0), np.sum(by_permutation**2, axis=0), 1 / num]))
    cell, (row, column) = np.arange(size), np.indices((num_sets, num_permutations)).reshape(2, -1)
    for found, place in zip(met, (row, column, cell), strict=False):
        np.negative(found, out=found)
        found[cell, place] += own.ravel()
    responses = tuple(found.reshape(num_sets, num_permutations, -1) for found in met)
    cells, rows, columns, total = forms
    rows, columns, total = rows / num_permutations, columns / num_sets, total / size
    s, p = num_sets - 1, num_permutations - 1
    loads = np.array([(rows - total) / s, (columns - total) / p, (cells - rows - columns + total) / (s * p)])
    noises = _noises(scores, present, weights, members, deviations, scale, limits)
    of_query = np.concatenate(means)
    between = np.array([of_query.var(ddof=1), *np.concatenate(shares, axis=1).mean(axis=1)])
    return Moments(deviations, loads, responses, noises, between, len(of_query))


def _noises(
    scores: npt.NDArray[Any],
    present: npt.NDArray[np.bool_],
    weights: FloatArray,
    members: npt.NDArray[np.int64],
    deviations: FloatArray,
    scale: FloatArray,
    limits: ComputeLimits,
) -> FloatArray:
    """`Moments.noises`: mean products of two answers to one query, each less its query's mean and its ordering's lead,
    averaged over the queries. The leads are estimates from the same answers, which takes some of the noise away
    (`_kept`): it is put back."""
    found, asked = [], []
    for chosen, y, there in _blocks(scores, present, members, limits):
        num = there.sum(axis=(0, 1))
        rest = y - deviations[:, :, None]
        rest = (rest - (rest * there).sum(axis=(0, 1)) / num) * there
        found.append(_within(rest, num, there.sum(axis=1), there.sum(axis=0)))
        asked.append(chosen)
    by_query = np.concatenate(found, axis=1)
    told = np.isfinite(by_query).all(axis=0)
    if np.count_nonzero(told) < 2:
        raise RequestError(
            f"the components need 2 queries of every class that several sets and permutations answered, found "
            f"{np.count_nonzero(told)} among {len(members)} queries: one query cannot tell its own noise"
        )
    of_set, of_permutation, own = by_query[:, told].mean(axis=1) / _kept(
        present, weights, members, np.concatenate(asked)[told], scale, limits
    )
    return np.array([of_set, of_permutation, own - of_set - of_permutation])


def _kept(
    present: npt.NDArray[np.bool_],
    weights: FloatArray,
    members: npt.NDArray[np.int64],
    told: npt.NDArray[np.int64],
    scale: FloatArray,
    limits: ComputeLimits,
) -> FloatArray:
    """[3] share of their noise that products of two answers of one set, of one permutation, and of one ordering keep
    when the leads of their orderings are taken from them; means over the `told` queries.

    An ordering's lead has an answer with the part a_q = weight / answers of the query / scale of the ordering, so that
    a product to query q keeps 1 - a_q - b_q + Σ a·b over the queries that both answered: 1 - 2/n + Σw²/(Σw)² on
    average of complete answers, 1 - 1/n of one ordering with n answers of equal weight, less of two with little in
    common. Leads are less the means of queries, which holds an ordering's own noise by one over the answers of the
    query: of products of one ordering, that much of Σ a² is left out, but for what any two share.

    Cost: O(S·P·(S + P)·Q).
    """
    there = present[:, :, members]
    if there.all():
        weight = weights[members]
        return np.full(3, 1 - 2 / len(members) + float(np.sum(weight**2)) / float(weight.sum()) ** 2)
    all_of = np.maximum(there.sum(axis=(0, 1)), 1)
    per_query = weights[members] / all_of
    is_told = np.isin(members, told)
    num = there[:, :, is_told].sum(axis=(0, 1))
    kept, single = [], 0.0
    for axis in (0, 1):  # pairs of one set, of one permutation
        groups, scales = np.moveaxis(there, axis, 0), np.moveaxis(scale, axis, 0)
        counts = groups.sum(axis=1)[:, is_told].astype(np.float64)
        pairs, left = np.sum(counts**2 - counts, axis=0), float(len(told))
        step = max(limits.block_bytes // (32 * groups[0].size), 1)
        for low in range(0, len(groups), step):  # [groups, orderings of each, queries]
            some = slice(low, low + step)
            answered = groups[some].astype(np.float64)
            part = answered * (per_query / scales[some, :, None])
            ours, own = answered[:, :, is_told], part[:, :, is_told]
            common = (ours / pairs) @ ours.transpose(0, 2, 1)
            left += _of_different(part @ part.transpose(0, 2, 1), common)
            left -= 2 * float(np.sum(own.sum(axis=1) * ((counts[some] - 1) / pairs)))
            if axis == 0:
                single += _of_different(part @ (part / all_of).transpose(0, 2, 1), common)
                lead = np.sum(part**2 * (1 - 1 / all_of), axis=2)[:, :, None]
                single += float(np.sum((lead - 2 * per_query[is_told] / scales[some, :, None]) * ours / num))
        kept.append(left / len(told))
    return np.array([*kept, 1 + single / len(told)])


def _of_different(one: FloatArray, other: FloatArray) -> float:
    """Sum of the products of two stacks of matrices [N, M, M], entry by entry, off the diagonals."""
    return float(np.vdot(one, other) - np.einsum("nii,nii->", one, other))


def _blocks(
    scores: npt.NDArray[Any],
    present: npt.NDArray[np.bool_],
    members: npt.NDArray[np.int64],
    limits: ComputeLimits,
) -> Iterator[tuple[npt.NDArray[np.int64], FloatArray, FloatArray]]:
    """Queries that have an answer, their scores and which are there, both float64 [S, P, queries]."""
    step = max(limits.block_bytes // (8 * scores.shape[0] * scores.shape[1]), 1)
    for low in range(0, len(members), step):
        chosen = members[low : low + step]
        there = present[:, :, chosen]
        answered = there.any(axis=(0, 1))
        if not answered.all():
            chosen, there = chosen[answered], there[:, :, answered]
        if len(chosen):
            values = np.where(there, scores[:, :, chosen], 0).astype(np.float64)
            yield chosen, values, there.astype(np.float64)


def _weight_and_shrinkage(
    scores: npt.NDArray[Any],
    present: npt.NDArray[np.bool_],
    weights: FloatArray,
    members: npt.NDArray[np.int64],
    limits: ComputeLimits,
) -> tuple[FloatArray, FloatArray]:
    """[S, P] weight of the answers of each ordering, and the same times (1 - 1/n_q)/n_q for a query's n_q answers."""
    weight_of, kept = np.zeros(scores.shape[:2]), np.zeros(scores.shape[:2])
    for chosen, _, there in _blocks(scores, present, members, limits):
        weight_of += there @ weights[chosen]
        num = there.sum(axis=(0, 1))
        kept += there @ (weights[chosen] / num * (1 - 1 / num))
    return weight_of, kept


def _refuse_empty(weight_of: FloatArray, kept: FloatArray) -> None:
    """Raises RequestError, naming the ordering, where it has no answer that can be compared with another's."""
    if (kept <= 0).any():
        s, p = np.argwhere(kept <= 0)[0]
        what = "no answer to" if weight_of[s, p] <= 0 else "no answer that another ordering gave, too, to"
        raise RequestError(
            f"set {s} under permutation {p} has {what} the queries of some class; leave this set or permutation out"
        )


def _forms(a: FloatArray, num: FloatArray, g: FloatArray, h: FloatArray) -> FloatArray:
    """[4, 3] squared coefficients of the effects SI, PI, SPI of these queries: in the cells of `Moments.deviations`, in
    its rows, its columns and its total.

    Args:
        a: [S, P, queries] what an answer counts in its cell.
        num: [queries] answers of each.
        g: [S, queries] share of a query's answers that are of each set.
        h: [P, queries] the same of each permutation.

    An effect reaches a cell through its own answers, times a, and every cell through the query's mean, times g, h or
    1/num.
    """
    square = a * a
    all_of = square.sum(axis=(0, 1))
    u, v = a.sum(axis=1), a.sum(axis=0)
    t = u.sum(axis=0)
    uu, vv, gg, hh = ((values * values).sum(axis=0) for values in (u, v, g, h))
    of_set = (square.sum(axis=1) * (1 - 2 * g)).sum(axis=0) + all_of * gg
    of_permutation = (square.sum(axis=0) * (1 - 2 * h)).sum(axis=0) + all_of * hh
    met_by_set = 2 * (g * (a * v).sum(axis=1)).sum(axis=0)
    met_by_permutation = 2 * (h * (a * u[:, None]).sum(axis=0)).sum(axis=0)
    return np.array(
        [
            [of_set.sum(), of_permutation.sum(), (all_of * (1 - 1 / num)).sum()],
            [
                ((u * u * (1 - 2 * g)).sum(axis=0) + uu * gg).sum(),
                (all_of - met_by_permutation + uu * hh).sum(),
                (all_of - uu / num).sum(),
            ],
            [
                (all_of - met_by_set + vv * gg).sum(),
                ((v * v * (1 - 2 * h)).sum(axis=0) + vv * hh).sum(),
                (all_of - vv / num).sum(),
            ],
            [((u - t * g) ** 2).sum(), ((v - t * h) ** 2).sum(), (all_of - t * t / num).sum()],
        ]
    )


def _within(rest: FloatArray, num: FloatArray, by_set: FloatArray, by_permutation: FloatArray) -> FloatArray:
    """[3, queries] mean products of two answers to one query: of one set, of one permutation, of one ordering, each
    less that of two that share neither; NaN where a query has no such pair."""
    own = (rest * rest).sum(axis=(0, 1))
    sets = (rest.sum(axis=1) ** 2).sum(axis=0)
    permutations = (rest.sum(axis=0) ** 2).sum(axis=0)
    pairs_set = (by_set**2).sum(axis=0) - num
    pairs_permutation = (by_permutation**2).sum(axis=0) - num
    pairs_other = num**2 - pairs_set - pairs_permutation - num
    with np.errstate(divide="ignore", invalid="ignore"):
        same_set = (sets - own) / np.where(pairs_set > 0.5, pairs_set, np.nan)
        same_permutation = (permutations - own) / np.where(pairs_permutation > 0.5, pairs_permutation, np.nan)
        other = (own - sets - permutations) / np.where(pairs_other > 0.5, pairs_other, np.nan)
    return np.stack([same_set - other, same_permutation - other, own / num - other])


class Filled(NamedTuple):
    """Answers in a full table, with what had to be put into it."""

    items: npt.NDArray[Any]
    """[..., U] the answers to the queries that were used; those that were missing as `filled` expects them, float64, or
    float32 in a table of 17 million answers or more. As they were given where none was missing."""
    usable: npt.NDArray[np.bool_]
    """[Q] which of all queries these U are: those with an answer in some cell and a weight above 0."""
    weights: FloatArray
    """[U] how often each counts."""
    accuracy: Accuracy
    """[...] of `items`."""
    share: float
    """Share of the answers (by weight) that were put in."""
    present: npt.NDArray[np.bool_] | None = None
    """[..., U] which answers were there; None where all were."""
    queries: FloatArray | None = None
    """[U] how often the mean cell answers each query rightly; None where nothing was missing."""


def filled(correct: npt.ArrayLike, state: npt.ArrayLike | None, weights: npt.ArrayLike | None = None) -> Filled:
    """Answers [..., Q] with every missing one replaced by what `accuracy` takes for it.

    That is the level of its query plus a lead of its cell, such that the mean over the cell is its `accuracy`; a single
    one may lie a little outside 0..1. For comparisons of cells, where leaving out every query that some cell lacks
    would leave next to none. A table filled so has less noise than a complete one: standard errors are too small by
    about the share that was put in. Raises RequestError on shapes that do not fit, values outside 0..1, and where a
    cell has no answer. Cost: that of `accuracy`, and a float copy where answers are missing.
    """
    items, weight = graded_items(correct), query_weights(weights, np.shape(correct)[-1])
    counted = weight > 0
    states = None if state is None else np.asarray(state)
    if states is not None and states.shape != items.shape:
        raise RequestError(f"state must have the shape of correct {list(items.shape)}, got {list(states.shape)}")
    if states is None or not states.any():
        cells = accuracy(items, None, weight)
        return Filled(items if counted.all() else items[..., counted], counted, weight[counted], cells, 0.0)
    there = (states == 0).reshape(-1, items.shape[-1])
    usable = counted & there.any(axis=0)
    if not usable.any():
        raise RequestError("no query has an answer; see the states of the answers")
    left_out = 1 - float(weight[usable].sum() / weight.sum())
    if not usable.all():
        there, weight, items = there[:, usable], weight[usable], items[..., usable]
    if there.all():
        return Filled(items, usable, weight, accuracy(items, None, weight)._replace(dropped=left_out), 0.0)
    if not there.any(axis=1).all():
        place = ", ".join(map(str, np.unravel_index(int(np.argmin(there.any(axis=1))), items.shape[:-1])))
        raise RequestError(f"the cell [{place}] has no answer at all; leave this set or permutation out")
    kind = np.float64 if items.size < LIMITS.block_bytes else np.float32  # half the memory of a large tensor
    values = np.zeros_like(there, kind)  # laid out as it is: sums go by that
    np.copyto(values, items.reshape(there.shape), where=there)
    fit = additive_fit(lambda: [(values, there)], weight, LIMITS)
    found = accuracy_of_fit(fit, weight)
    for value, has, mean, right in zip(values, there, found, fit.right, strict=True):
        if not has.all():
            lack = weight * ~has
            lead = (mean * weight.sum() - right - lack @ fit.queries) / lack.sum()
            value[~has] = fit.queries[~has] + lead
    share = 1 - float(fit.there.mean() / weight.sum())
    shape = (*items.shape[:-1], -1)
    cells = Accuracy(found.reshape(items.shape[:-1]), left_out, int(np.count_nonzero(usable)))
    return Filled(values.reshape(shape), usable, weight, cells, share, there.reshape(shape), fit.queries)
