"""Contextual calibration by plain loops over probabilities (Zhao et al. 2021, section 5)."""

from __future__ import annotations

import math
from collections.abc import Sequence

Row = Sequence[float]


def label_shares(logprob: Row, scale: Row) -> list[float]:
    """Probabilities of the labels, normalised over them, from log-likelihoods [L] that are divided by scale [L]."""
    weights = [math.exp(value / divisor) for value, divisor in zip(logprob, scale, strict=True)]
    return [weight / math.fsum(weights) for weight in weights]


def calibrated_shares(logprob: Row, content_free: Sequence[Row], scale: Row) -> list[float]:
    """Probabilities of the labels after a query [L], divided by their mean after content-free ones [M, L]; they sum
    to 1."""
    after = [label_shares(row, scale) for row in content_free]
    prior = [math.fsum(column) / len(after) for column in zip(*after, strict=True)]
    ratios = [share / mean for share, mean in zip(label_shares(logprob, scale), prior, strict=True)]
    return [ratio / math.fsum(ratios) for ratio in ratios]


def prediction(shares: Row) -> int:
    """The label with the largest probability, the lowest of equals."""
    return max(range(len(shares)), key=lambda label: (shares[label], -label))
