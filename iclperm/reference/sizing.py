"""The sizes that a wanted precision takes, the slow way: every size by itself, one number at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import product

from scipy.stats import chi2


def expected_squares(components: Mapping[str, float], shape: tuple[int, int, int]) -> dict[str, float]:
    """E[MS] of each effect of a crossed design: its own component and those of all effects that contain it, each times
    the levels that its index does not run over."""
    size = dict(zip("SPI", shape, strict=True))
    return {
        effect: sum(
            math.prod(size[axis] for axis in "SPI" if axis not in other) * components[other]
            for other in components
            if set(effect) <= set(other)
        )
        for effect in components
    }


def half_width_of_order_effect(components: Mapping[str, float], shape: tuple[int, int, int], level: float) -> float:
    """Half the length of the modified large sample interval of √(σ²_P + σ²_SP), at the expected mean squares."""
    squares = expected_squares(components, shape)
    num_s, _, num_q = shape
    whole = num_s * num_q
    terms = {"P": 1 / whole, "SP": (num_s - 1) / whole, "PI": -1 / whole, "SPI": -(num_s - 1) / whole}
    estimate = up = down = 0.0
    for effect, slope in terms.items():
        degrees = math.prod(dict(zip("SPI", shape, strict=True))[axis] - 1 for axis in effect)
        below = 1 - degrees / chi2.ppf((1 + level) / 2, degrees)
        above = degrees / chi2.ppf((1 - level) / 2, degrees) - 1
        term = slope * squares[effect]
        estimate += term
        up += (term * (above if term > 0 else below)) ** 2
        down += (term * (below if term > 0 else above)) ** 2
    return (math.sqrt(estimate + math.sqrt(up)) - math.sqrt(max(estimate - math.sqrt(down), 0.0))) / 2


def cheapest(
    half_width: Callable[[tuple[int, int, int]], float],
    cost: Callable[[tuple[int, int, int]], float],
    axes: tuple[Iterable[int], Iterable[int], Iterable[int]],
    wanted: float,
) -> tuple[int, int, int] | None:
    """The first of the cheapest shapes whose half-width is short enough; None where none is."""
    enough = [shape for shape in product(*axes) if half_width(shape) <= wanted]
    return min(enough, key=cost) if enough else None
