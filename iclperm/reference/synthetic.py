"""Answers with known effects, to hold estimators against."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from iclperm.errors import RequestError

_EASE = (0.35, 0.85)  # of a query, before any effect; uniform in between


@dataclass(frozen=True)
class KnownEffects:
    """Standard deviations of the effects of sets, permutations and both on the chance of a right answer."""

    sets: float
    permutations: float
    interaction: float

    @property
    def order(self) -> float:
        """√(σ²_P + σ²_SP)."""
        return math.hypot(self.permutations, self.interaction)

    @property
    def selection(self) -> float:
        """√(σ²_S + σ²_SP)."""
        return math.hypot(self.sets, self.interaction)

    @property
    def ratio(self) -> float:
        """r = selection / order without item noise."""
        return self.selection / self.order if self.order else math.nan


def answers(
    effects: KnownEffects, shape: tuple[int, int, int], generator: np.random.Generator
) -> npt.NDArray[np.uint8]:
    """Independent answers of known probabilities, uint8 [S, P, Q].

    P(right) = ease of the query + effect of set, of permutation and of both; ease is uniform, effects are uniform with
    the given standard deviations, so that no probability leaves [0, 1] and nothing is clipped: components hold exactly
    on the scale of accuracies. There are no interactions with queries. Raises RequestError where a probability could
    leave [0, 1].
    """
    sizes = (effects.sets, effects.permutations, effects.interaction)
    reach = math.sqrt(3) * sum(sizes)
    if reach > min(_EASE[0], 1 - _EASE[1]):
        raise RequestError(f"effects of {sizes} could make a probability leave 0..1; give smaller ones")

    def uniform(sd: float, *size: int) -> npt.NDArray[np.float64]:
        return generator.uniform(-math.sqrt(3) * sd, math.sqrt(3) * sd, size)

    num_sets, num_permutations, num_queries = shape
    chance = uniform(effects.sets, num_sets, 1) + uniform(effects.permutations, 1, num_permutations)
    chance = chance + uniform(effects.interaction, num_sets, num_permutations)
    ease = generator.uniform(*_EASE, num_queries)
    return (generator.random(shape) < chance[:, :, None] + ease).astype(np.uint8)


def expected_ratio(effects: KnownEffects, num_queries: int) -> float:
    """What r = selection / order (RMS) is on average drawn towards, item noise in both: arXiv 2511.09700's r.

    √((σ²_S + σ²_SP + e) / (σ²_P + σ²_SP + e)) with e = E[p(1 - p)] / Q, the noise of one cell.
    """
    low, high = _EASE
    mean, second = (low + high) / 2, (high**3 - low**3) / (3 * (high - low))
    effect = effects.sets**2 + effects.permutations**2 + effects.interaction**2
    noise = (mean - second - effect) / num_queries
    return math.sqrt((effects.selection**2 + noise) / (effects.order**2 + noise))
