"""Slow oracles of `iclperm.stats.classes`: one answer at a time, by the textbook definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence


def confusion(
    predictions: Sequence[int], gold: Sequence[int], num_labels: int, state: Sequence[int], weights: Sequence[float]
) -> tuple[list[list[float]], list[float]]:
    """Gold by answered label, and answers that name none by gold label, of the answers of one cell, [Q] each."""
    counts = [[0.0] * num_labels for _ in range(num_labels)]
    unnamed = [0.0] * num_labels
    for answered, right, missing, weight in zip(predictions, gold, state, weights, strict=True):
        if missing:
            continue
        if answered == -1:
            unnamed[right] += weight
        else:
            counts[right][answered] += weight
    return counts, unnamed


def scores(counts: Sequence[Sequence[float]], unnamed: Sequence[float]) -> dict[str, list[float]]:
    """Recall, precision and F1 of every label; F1 as the harmonic mean of the other two, by another route."""
    found: dict[str, list[float]] = {"recall": [], "precision": [], "f1": []}
    for label, row in enumerate(counts):
        right = row[label]
        asked = math.fsum(row) + unnamed[label]
        answered = math.fsum(other[label] for other in counts)
        recall = right / asked if asked else math.nan
        precision = right / answered if answered else math.nan
        harmonic = 2 / (1 / recall + 1 / precision) if right else 0.0
        f1 = harmonic if asked or answered else math.nan
        for name, value in zip(found, (recall, precision, f1), strict=True):
            found[name].append(value)
    return found


def mean_known(values: Sequence[float]) -> float:
    """Mean of what is not NaN; NaN where all is."""
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


def effective_items(weights: Sequence[float]) -> float:
    """n / (1 + the weights' squared coefficient of variation), which is (Σw)²/Σw² by another route; 0 for none."""
    used = [weight for weight in weights if weight > 0]
    if not used:
        return 0.0
    mean = math.fsum(used) / len(used)
    variance = math.fsum((weight - mean) ** 2 for weight in used) / len(used)
    return len(used) / (1 + variance / mean**2)
