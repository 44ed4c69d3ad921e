"""Slow oracle of what order does in a design of permutations: every pair of permutations, every pair of queries."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def difference_squared(one: FloatArray, other: FloatArray, weights: FloatArray) -> float:
    """Mean product of the differences on two different queries, by the product of their weights: the squared mean
    difference, free of item noise. Of answers [Q]; NaN marks one that is missing."""
    there = [q for q in range(len(one)) if not (np.isnan(one[q]) or np.isnan(other[q]))]
    top = bottom = 0.0
    for q in there:
        for r in there:
            if q != r:
                top += weights[q] * weights[r] * (one[q] - other[q]) * (one[r] - other[r])
                bottom += weights[q] * weights[r]
    return top / bottom


def class_difference_squared(
    one: FloatArray, other: FloatArray, weights: FloatArray, classes: npt.NDArray[np.int64]
) -> float:
    """The same of a weighted accuracy over classes: products of two classes are free of item noise as they are."""
    names = np.unique(classes)
    found = 0.0
    for first in names:
        for second in names:
            shares = [weights[classes == name].sum() / weights.sum() for name in (first, second)]
            if first == second:
                members = classes == first
                value = difference_squared(one[members], other[members], weights[members])
            else:
                value = 1.0
                for name in (first, second):
                    members = (classes == name) & ~np.isnan(one) & ~np.isnan(other)
                    value *= float(weights[members] @ (one - other)[members]) / float(weights[members].sum())
            found += shares[0] * shares[1] * value
    return found


def order_variance(
    items: FloatArray,
    labels: npt.NDArray[np.int64],
    block: int,
    num_orders: float,
    weights: FloatArray,
    classes: npt.NDArray[np.int64],
) -> float:
    """Variance of accuracy over all orders from items [P, Q] of one set: half the mean squared difference of pairs of
    one block, and of different ones, in the shares that they have among all pairs of orders."""
    inside: list[float] = []
    between: list[float] = []
    for p, r in combinations(range(len(items)), 2):
        half = class_difference_squared(items[p], items[r], weights, classes) / 2
        (inside if labels[p] == labels[r] else between).append(half)
    if not np.isfinite(num_orders):
        return float(np.mean(between))
    within = float(np.mean(inside)) if inside else 0.0
    return ((block - 1) * within + (num_orders - block) * float(np.mean(between))) / (num_orders - 1)
