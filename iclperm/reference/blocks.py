"""Slow oracle of effects from blocks of queries: answer by answer, and pairs of orderings written out."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def accuracy_and_noise(
    answers: list[float], weights: list[float], classes: list[int], shares: dict[int, float], sizes: dict[int, int]
) -> tuple[float, float]:
    """Accuracy of one ordering over its answers, and the variance that its choice of queries gives it.

    ``shares`` are the weight of each class in the whole, ``sizes`` how many queries of it there are to draw from; 0
    stands for endlessly many.
    """
    accuracy = noise = 0.0
    for name, share in shares.items():
        own = [(x, w) for x, w, c in zip(answers, weights, classes, strict=True) if c == name]
        total = sum(w for _, w in own)
        mean = sum(w * x for x, w in own) / total
        num = len(own)
        spread = num / (num - 1) * sum((w / total) ** 2 * (x - mean) ** 2 for x, w in own)
        accuracy += share * mean
        noise += share**2 * spread * (1 - num / sizes[name] if sizes[name] else 1)
    return accuracy, noise


def variances(accuracy: FloatArray, noise: FloatArray) -> tuple[float, float]:
    """Variance over orders of one set, and over sets of one order, less the noise of two blocks: half the mean squared
    difference of all pairs."""
    num_sets, num_permutations = accuracy.shape
    order = [
        (accuracy[s, p] - accuracy[s, r]) ** 2 / 2
        for s in range(num_sets)
        for p, r in combinations(range(num_permutations), 2)
    ]
    selection = [
        (accuracy[s, p] - accuracy[t, p]) ** 2 / 2
        for p in range(num_permutations)
        for s, t in combinations(range(num_sets), 2)
    ]
    return float(np.mean(order) - noise.mean()), float(np.mean(selection) - noise.mean())
