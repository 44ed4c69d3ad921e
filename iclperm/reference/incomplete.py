"""Slow oracles of the estimators for missing and weighted answers: loops over answers, and unit effects one by one."""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Array = npt.NDArray[np.generic]
Mask = npt.NDArray[np.bool_]

NOISES = ("SI", "PI", "SPI")
AXES = "SPI"


def accuracy(correct: Array, present: Mask, weights: FloatArray) -> FloatArray:
    """[C] accuracy of each cell of correct [C, Q]: least squares of cells and queries, solved as one linear system.

    Each answer weighs weight / number of answers of its query in the equation of its cell, and 1 in that of its query.
    """
    num_cells, num_queries = correct.shape
    used = [q for q in range(num_queries) if present[:, q].any()]
    size = num_cells + len(used)
    left, right = np.zeros((size + 1, size)), np.zeros(size + 1)
    for place, q in enumerate(used):
        answers = [c for c in range(num_cells) if present[c, q]]
        for c in answers:
            share = weights[q] / len(answers)
            left[c, c] += share
            left[c, num_cells + place] += share
            right[c] += share * float(correct[c, q])
            left[num_cells + place, c] += 1
            left[num_cells + place, num_cells + place] += 1
            right[num_cells + place] += float(correct[c, q])
    left[size, :num_cells] = 1
    found = np.linalg.lstsq(left, right, rcond=None)[0]
    total = sum(weights[q] for q in used)
    level = sum(weights[q] * found[num_cells + place] for place, q in enumerate(used)) / total
    values = np.empty(num_cells)
    for c in range(num_cells):
        lowest = sum(weights[q] * float(correct[c, q]) for q in used if present[c, q]) / total
        highest = lowest + sum(weights[q] for q in used if not present[c, q]) / total
        values[c] = min(max(level + found[c], lowest), highest)
    return values


def deviations(scores: FloatArray, present: Mask, weights: FloatArray) -> FloatArray:
    """[S, P] accuracy of each ordering of scores [S, P, Q] less that of all, query by query, each answer by one over
    the number of answers of its query; the shrinkage by each answer's part in its query's mean is taken out."""
    num_sets, num_permutations, num_queries = scores.shape
    cells = list(product(range(num_sets), range(num_permutations)))
    size = len(cells)
    found = np.zeros((num_sets, num_permutations))
    for s, p in cells:
        top, bottom = 0.0, 0.0
        for q in range(num_queries):
            if not present[s, p, q]:
                continue
            answers = [scores[i, j, q] for i, j in cells if present[i, j, q]]
            num = len(answers)
            top += weights[q] / num * (scores[s, p, q] - sum(answers) / num)
            bottom += weights[q] / num * (1 - 1 / num)
        found[s, p] = top / (bottom * size / (size - 1))
    return found


def mean_squares(matrix: FloatArray) -> FloatArray:
    """[3] of sets, permutations and residual of [S, P]: projections written out."""
    num_sets, num_permutations = matrix.shape
    grand = matrix.mean()
    rows, columns = matrix.mean(axis=1), matrix.mean(axis=0)
    sets = sum(num_permutations * (row - grand) ** 2 for row in rows)
    permutations = sum(num_sets * (column - grand) ** 2 for column in columns)
    cells = product(range(num_sets), range(num_permutations))
    residual = sum((matrix[s, p] - rows[s] - columns[p] + grand) ** 2 for s, p in cells)
    s, p = num_sets - 1, num_permutations - 1
    return np.array([sets / s, permutations / p, residual / (s * p)])


def expected_mean_squares(present: Mask, weights: FloatArray, effect: str) -> FloatArray:
    """[3] how much of the variance of an effect (a part of "SPI") is in the mean squares of `deviations`.

    The effect of each of its levels is set to 1 in turn: mean squares are sums of squares of linear functions, so that
    the expectation for independent levels of variance 1 is the sum over levels.
    """
    sizes = dict(zip(AXES, present.shape, strict=True))
    total = np.zeros(3)
    for level in product(*(range(sizes[axis]) for axis in effect)):
        unit = np.zeros(present.shape)
        places = dict(zip(effect, level, strict=True))
        unit[tuple(places.get(axis, slice(None)) for axis in AXES)] = 1.0
        total += mean_squares(deviations(unit, present, weights))
    return total


def noises(scores: FloatArray, present: Mask, weights: FloatArray) -> FloatArray:
    """[3] of SI, PI and SPI: mean products of pairs of answers to one query that share the set alone, the permutation
    alone, or are one and the same, each less that of two that share neither; means over the queries that have all kinds
    of pairs. Answers are taken less the lead of their ordering, then less the mean of their query; what the leads, made
    of the same answers, take away of each kind is put back."""
    num_sets, num_permutations, num_queries = scores.shape
    cells = list(product(range(num_sets), range(num_permutations)))
    lead = deviations(scores, present, weights)
    parts = lead_parts(present, weights)
    nums = np.maximum(present.sum(axis=(0, 1)), 1)
    found, kept = [], []
    for q in range(num_queries):
        there = [cell for cell in cells if present[(*cell, q)]]
        if not there:
            continue
        rest = {cell: scores[(*cell, q)] - lead[cell] for cell in there}
        mean = sum(rest.values()) / len(rest)
        kinds: dict[tuple[bool, bool], list[tuple[float, float]]] = {}
        for one, other in product(there, there):
            value = (rest[one] - mean) * (rest[other] - mean)
            left = 1 - parts[(*one, q)] - parts[(*other, q)] + float(parts[one] @ parts[other])
            if one == other:
                left -= float(parts[one] @ (parts[one] / nums))
            kinds.setdefault((one[0] == other[0], one[1] == other[1]), []).append((value, left))
        if len(kinds) < 4:
            continue
        mean_of = {kind: np.mean(values, axis=0) for kind, values in kinds.items()}
        own, by_set, by_permutation, other_kind = (
            mean_of[kind] for kind in ((True, True), (True, False), (False, True), (False, False))
        )
        found.append([each[0] - other_kind[0] for each in (by_set, by_permutation, own)])
        same_set = [float(parts[a] @ (parts[b] / nums)) for a, b in product(there, there) if a != b and a[0] == b[0]]
        kept.append([by_set[1], by_permutation[1], own[1] + np.mean(same_set)])
    of_set, of_permutation, whole = np.mean(found, axis=0) / np.mean(kept, axis=0)
    return np.array([of_set, of_permutation, whole - of_set - of_permutation])


def lead_parts(present: Mask, weights: FloatArray) -> FloatArray:
    """[S, P, Q] how much of each answer is in its ordering's `deviations`."""
    size = present.shape[0] * present.shape[1]
    found = np.zeros(present.shape)
    for cell in product(range(present.shape[0]), range(present.shape[1])):
        answered = [q for q in range(present.shape[2]) if present[(*cell, q)]]
        nums = {q: int(present[:, :, q].sum()) for q in answered}
        bottom = sum(weights[q] / nums[q] * (1 - 1 / nums[q]) for q in answered)
        for q in answered:
            found[(*cell, q)] = weights[q] / nums[q] / (bottom * size / (size - 1))
    return found


def components(scores: FloatArray, present: Mask, weights: FloatArray) -> dict[str, float]:
    """σ² of S, P, SP, SI, PI and SPI from scores [S, P, Q] of one class: moments set equal to their expectations."""
    found = dict(zip(NOISES, noises(scores, present, weights).tolist(), strict=True))
    squares = mean_squares(deviations(scores, present, weights))
    for effect in NOISES:
        squares = squares - found[effect] * expected_mean_squares(present, weights, effect)
    table = np.array([expected_mean_squares(present, weights, effect) for effect in ("S", "P", "SP")]).T
    return {**dict(zip(("S", "P", "SP"), np.linalg.solve(table, squares).tolist(), strict=True)), **found}


def weighted_components(
    scores: FloatArray, present: Mask, weights: FloatArray, classes: Array
) -> tuple[float, float, float]:
    """σ²_S, σ²_P and σ²_SP of the weighted accuracy, class by class; a query that nobody answered is none."""
    answered = present.any(axis=(0, 1))
    scores, present = scores[:, :, answered], present[:, :, answered]
    weights, classes = weights[answered], classes[answered]
    num_sets, num_permutations, _ = scores.shape
    matrix, noise, table = np.zeros((num_sets, num_permutations)), np.zeros(3), np.zeros((3, 3))
    parts = []
    for name in np.unique(classes):
        members = classes == name
        part = scores[:, :, members], present[:, :, members], weights[members]
        parts.append((weights[members].sum() / weights.sum(), members))
        matrix += parts[-1][0] * deviations(*part)
        found = components(*part)
        for effect in NOISES:
            noise += parts[-1][0] ** 2 * found[effect] * expected_mean_squares(part[1], part[2], effect)
    sizes = dict(zip(AXES, scores.shape, strict=True))
    for column, effect in enumerate(("S", "P", "SP")):
        for level in product(*(range(sizes[axis]) for axis in effect)):
            unit = np.zeros(scores.shape)
            places = dict(zip(effect, level, strict=True))
            unit[tuple(places.get(axis, slice(None)) for axis in AXES)] = 1.0
            of_classes = (
                share * deviations(unit[:, :, members], present[:, :, members], weights[members])
                for share, members in parts
            )
            table[:, column] += mean_squares(sum(of_classes, np.zeros_like(matrix)))
    s, p, sp = np.linalg.solve(table, mean_squares(matrix) - noise)
    return s, p, sp
