"""Two or more finished studies side by side: is r different between these models, and what else is?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np

from iclperm import stats
from iclperm.errors import ConfigError, DataError
from iclperm.report.parts import listed, percent
from iclperm.stats import Comparison, Curve, Interval, PooledEstimate, SizeSlope
from iclperm.stats.comparison import LEAST, Jackknifed, Of
from iclperm.stats.incomplete import filled
from iclperm.stats.intervals import bounded, jackknife_error, possible
from iclperm.stats.sensitivity import FloatArray
from iclperm.studies.compared import Compared, Together, together
from iclperm.studies.comparing_findings import Comparing
from iclperm.studies.missing import missing_of
from iclperm.studies.studied import Pair, Studied

_MOST_DROPPED = 0.05
_LEAST_EIGENVALUE = 1e-3  # of a matrix of correlations that can be inverted


def comparing(
    studies: Sequence[Compared], *, shared: Sequence[str] | None = None, sizes: Sequence[float] | None = None
) -> Comparing:
    """Every two of the studies compared, all of them pooled and, with `sizes`, r and effects against model size.

    Args:
        studies: two at least (`iclperm.studies.compared`).
        shared: what all have in common, where their levels have no names; see `compared.together`.
        sizes: [N] numbers of parameters of the studies' models.

    p-values are adjusted by Holm over all tests of all pairs. r, effects and slopes are at the largest number of shots
    of each study. Raises ConfigError for fewer than two studies or other than one size each, and what `stats.compare`
    does. Cost: O(N²) comparisons.
    """
    if len(studies) < 2:
        raise ConfigError(f"a comparison needs at least 2 studies, got {len(studies)}; name more")
    if sizes is not None and len(sizes) != len(studies):
        raise ConfigError(f"there are {len(studies)} studies and {len(sizes)} sizes; give one number for each")
    ready = together(_named_once(studies), shared)
    pairs = _pairs(ready)
    matrices = [_last_accuracy(study) for study in ready.studies]
    logs = [stats.log_sensitivity(matrix) for matrix in matrices]
    cells = tuple(map(_accuracies, ready.studies))
    described = tuple(map(_described, ready.studies, matrices, cells))
    known = [place for place, each in enumerate(logs) if not math.isnan(_standard_error(each))]
    slopes: Mapping[Of, SizeSlope] = {}
    is_free = False
    if sizes is not None and len(known) >= LEAST:
        slopes, is_free = _slopes(ready, matrices, known, sizes)
    return Comparing(
        studies=described,
        pairs=pairs,
        pooled=_pooled(ready, logs, known),
        pooled_names=tuple(ready.studies[place].name for place in known) if len(known) >= LEAST else (),
        slopes=slopes,
        slopes_are_free=is_free,
        warnings=tuple(_warnings(ready, pairs, sizes, known)),
        cells=cells,
    )


def _named_once(studies: Sequence[Compared]) -> list[Compared]:
    """With a number behind names that several have."""
    names = [study.name for study in studies]
    return [
        study if names.count(study.name) == 1 else replace(study, name=f"{study.name} ({place + 1})")
        for place, study in enumerate(studies)
    ]


def _pairs(ready: Together) -> tuple[Pair, ...]:
    pairs = [Pair(*places, _compared(ready, *places)) for places in combinations(range(len(ready.studies)), 2)]
    tests = [[test.p_value for test in pair.comparison.tests().values()] for pair in pairs]
    matched = [pair.comparison.matched for pair in pairs]
    adjusted, of_matched = (
        iter(stats.holm([p for each in family for p in each]).tolist()) for family in (tests, matched)
    )
    found = []
    for pair, each, others in zip(pairs, tests, matched, strict=True):
        comparison = pair.comparison.adjusted([next(adjusted) for _ in each])
        found.append(Pair(pair.first, pair.second, comparison.matched_adjusted([next(of_matched) for _ in others])))
    return tuple(found)


def _compared(ready: Together, first: int, second: int) -> Comparison:
    """Two studies by their answers, or by accuracies where one has no more."""
    pair = ready.studies[first], ready.studies[second]
    shots = (pair[0].shots, pair[1].shots) if all(study.shots for study in pair) else None
    is_last = shots is None and len({study.values.shape[2] for study in pair}) > 1  # of each what it has most of
    kept = slice(-1, None) if is_last else slice(None)
    if all(study.has_answers for study in pair):
        return stats.compare(
            pair[0].values[:, :, kept],
            pair[1].values[:, :, kept],
            shared=ready.shared(first, second),
            states=_both(pair, lambda study: None if study.state is None else study.state[:, :, kept]),
            weights=_both(pair, lambda study: study.weights),
            classes=_both(pair, lambda study: study.classes),
            shots=shots,
        )
    one, two = (_accuracies(study)[:, :, kept] for study in pair)
    shared = [axis for axis in ready.shared(first, second) if axis != "queries"]
    if shots is not None:
        return stats.compare(one, two, shared=shared, shots=shots)
    places = range(1, one.shape[2] + 1)  # the numbers are not known
    return replace(stats.compare(one, two, shared=shared, shots=(places, places)), shots=tuple(range(len(places))))


def _both(pair: tuple[Compared, Compared], function: Callable[[Compared], Any]) -> tuple[Any, Any]:
    return function(pair[0]), function(pair[1])


def _accuracies(study: Compared) -> FloatArray:
    """[S, P, K]"""
    if not study.has_answers:
        return np.asarray(study.values, dtype=np.float64)
    return stats.accuracy(study.values, study.state, study.weights).values


def _last_accuracy(study: Compared) -> FloatArray:
    """[S, P] at the largest number of shots; raises DataError where an ordering has no answer there."""
    if not study.has_answers:
        return np.asarray(study.values[:, :, -1], dtype=np.float64)
    state = None if study.state is None else study.state[:, :, -1]
    cells = stats.accuracy(study.values[:, :, -1], state, study.weights)
    if np.isnan(cells.values).any():
        raise DataError(f"{study.name} has an ordering without any answer; leave out the set or k that fails")
    return cells.values


def _standard_error(of: Jackknifed) -> float:
    """NaN where the estimate has none, or none above 0."""
    error = jackknife_error(list(of.left_out.values()))[0]
    return error if math.isfinite(of.estimate) and error > 0 else math.nan


def _described(study: Compared, matrix: FloatArray, cells: FloatArray) -> Studied:
    ratio = Interval(stats.sensitivity_ratio(matrix), math.nan, math.nan, 0.95)
    if min(matrix.shape) >= LEAST:
        ratio = stats.jackknife_ratio_interval(matrix)  # as the study's own report has it
    num_queries, free = 0, math.nan
    mean = order = selection = ratio_effect = Interval(math.nan, math.nan, math.nan, 0.95)
    mean = mean._replace(estimate=float(matrix.mean()))
    if study.has_answers:
        state = None if study.state is None else study.state[:, :, -1]
        num_queries = stats.accuracy(study.values[:, :, -1], state, study.weights).num_queries
        if min(matrix.shape) > 1 and num_queries > 1:
            components = stats.variance_components(
                study.values[:, :, -1], state, weights=study.weights, classes=study.classes
            )
            effects = possible(stats.effect_interval(components))
            order, selection = effects.order, effects.selection
            if components.selection_effect > 0:  # else r is 0 because nothing was seen, not because it is small
                free, ratio_effect = components.ratio, effects.ratio
        if num_queries > 1:
            whole = filled(study.values[:, :, -1], state, study.weights)
            interval = stats.mean_error(whole.items, whole.weights).interval()
            mean = bounded(interval._replace(estimate=mean.estimate), "accuracy")
    return Studied(
        name=study.name,
        shape=(*matrix.shape, num_queries),
        shots=study.shots[-1] if study.shots else None,
        accuracy=float(matrix.mean()),
        order=stats.order_sensitivity(matrix),
        selection=stats.selection_sensitivity(matrix),
        ratio=ratio,
        ratio_free=free,
        mean=mean,
        order_effect=order,
        selection_effect=selection,
        ratio_effect=ratio_effect,
        over_shots=study.shots,
        curve=_curve(cells, num_queries),
        task=study.task,
        model=study.model,
        chance=study.chance,
    )


def _curve(cells: FloatArray, num_queries: int) -> Curve:
    """As `stats.curve` of the answers behind accuracies [S, P, K]; NaN where an ordering has no answer."""
    num_sets, num_permutations, _ = cells.shape
    unknown = np.full(cells.shape[2], math.nan)
    return Curve(
        mean=cells.mean(axis=(0, 1)),
        std_permutations=cells.std(axis=1, ddof=1).mean(axis=0) if num_permutations > 1 else unknown,
        std_sets=cells.mean(axis=1).std(axis=0, ddof=1) if num_sets > 1 else unknown,
        dropped=0.0,
        num_queries=num_queries,
    )


def _covariance(ready: Together, estimates: Sequence[Jackknifed], known: Sequence[int]) -> FloatArray:
    """[N, N] of the estimates of the `known` studies.

    With more studies than the sets they share it has no inverse; its correlations are then drawn halfway to their mean
    (the target of constant correlation of Ledoit & Wolf 2004).
    """
    shared = [[ready.shared(one, other) for other in known] for one in known]
    covariance = stats.jackknife_covariance([estimates[place] for place in known], shared)
    errors = np.sqrt(np.diag(covariance))
    correlation = covariance / np.outer(errors, errors)
    if np.linalg.eigvalsh(correlation)[0] < _LEAST_EIGENVALUE:
        others = ~np.eye(len(errors), dtype=bool)
        mean = float(np.clip(correlation[others].mean(), 0.0, 1 - 4 * _LEAST_EIGENVALUE))
        correlation = (correlation + np.where(others, mean, 1.0)) / 2
    return np.asarray(correlation * np.outer(errors, errors))


def _pooled(ready: Together, logs: Sequence[Jackknifed], known: Sequence[int]) -> PooledEstimate | None:
    if len(known) < LEAST:
        return None
    return stats.pool([logs[place].estimate for place in known], _covariance(ready, logs, known))


def _slopes(
    ready: Together, matrices: Sequence[FloatArray], known: Sequence[int], sizes: Sequence[float]
) -> tuple[dict[Of, SizeSlope], bool]:
    """Slopes of r, order and selection: of effects free of item noise where every study has them, else as printed."""
    of_each = [_free_effects(study) for study in ready.studies]
    is_free = all(not math.isnan(_standard_error(each)) for place in known for each in of_each[place].values())
    found = {}
    for of in of_each[0]:
        printed = [stats.log_sensitivity(matrix, of) for matrix in matrices]
        logs = [each[of] for each in of_each] if is_free else printed
        values = [math.exp(logs[place].estimate) for place in known]
        found[of] = stats.slope(values, [sizes[place] for place in known], _covariance(ready, logs, known))
    return found, is_free


def _free_effects(study: Compared) -> dict[Of, Jackknifed]:
    """Logarithms of r, order and selection effect, free of item noise; NaN where they are not above it."""
    if not study.has_answers:
        nothing = Jackknifed(math.nan, {})
        return {"ratio": nothing, "order": nothing, "selection": nothing}
    items, state = study.values[:, :, -1], None if study.state is None else study.state[:, :, -1]
    found = stats.jackknifed_effects(items, state, study.weights, study.classes)
    return {of: each if of == "ratio" else _log(each) for of, each in found.items()}


def _log(of: Jackknifed) -> Jackknifed:
    with np.errstate(divide="ignore"):
        left_out = {axis: np.where(values > 0, np.log(values), np.nan) for axis, values in of.left_out.items()}
    return Jackknifed(math.log(of.estimate) if of.estimate > 0 else math.nan, left_out)


def _other_sizes(ready: Together, pairs: Sequence[Pair]) -> Iterator[str]:
    """That studies have other largest k, or other numbers of queries: once for all of them."""
    shots = {study.name: study.shots[-1] for study in ready.studies if study.shots}
    if len(set(shots.values())) > 1:
        names = list(shots)
        told = f"{names[0]} has k = {shots[names[0]]}", *(f"{name} k = {shots[name]}" for name in names[1:])
        yield (f"{listed(told)}: r and effects are those of each at its own, and may differ for that reason alone")
    used = {ready.studies[at].name: n for pair in pairs for at, n in _queries_of(pair) if n}
    if used and max(used.values()) > 1.5 * min(used.values()):
        names = list(used)
        told = f"{names[0]} has {used[names[0]]:,} queries", *(f"{name} {used[name]:,}" for name in names[1:])
        yield (
            f"{listed(told)}: item noise pulls r as printed towards 1, the fewer queries the more; the ratio without "
            "it is the one to go by"
        )


def _queries_of(pair: Pair) -> Iterator[tuple[int, int]]:
    return zip((pair.first, pair.second), pair.comparison.num_queries, strict=True)


def _warnings(
    ready: Together, pairs: Sequence[Pair], sizes: Sequence[float] | None, known: Sequence[int]
) -> Iterator[str]:
    yield from ready.notes
    for study in ready.studies:
        if study.has_answers and (line := missing_of(study.state, study.weights).first_line()):
            yield f"{study.name}: {line}"
        yield from (f"{study.name} by itself bears no conclusion: {words}" for words in study.unborne)
    yield from _other_sizes(ready, pairs)
    for pair in pairs:
        one, two = ready.studies[pair.first], ready.studies[pair.second]
        if not pair.comparison.shots:
            yield f"{one.name} and {two.name} have no number of shots in common: accuracy is not compared"
        if max(pair.comparison.dropped) > _MOST_DROPPED:
            yield (
                f"{one.name} and {two.name}: {percent(pair.comparison.dropped[0])} and "
                f"{percent(pair.comparison.dropped[1])} of the queries are left out, as no ordering of one of them has "
                "an answer"
            )
    if sizes is not None and len(known) < LEAST:
        yield f"a slope on model size takes {LEAST} studies with an r; there are {len(known)}"
