"""How the permutations of a study are drawn: the names of the designs, and the blocks that a design deals them in."""

from __future__ import annotations

import math

ORDER_DESIGNS = ("random", "latin", "antithetic", "prefix_coupled", "exhaustive")
MOVED = 3
"""The last positions that differ within a group of prefix-coupled permutations."""
MOST_EXHAUSTIVE = 9
"""Demonstrations of which all orders can be run: 9! = 362,880."""


def block_size(design: str, size: int) -> int:
    """Permutations of ``size`` positions that are dealt together, dependent on each other; blocks are drawn at random.

    1 where each permutation is a draw of its own (random) or all are there (exhaustive); k of a Latin square; 2 of an
    antithetic pair; 3! of a group that shares all but its last three positions.
    """
    if design == "latin":
        return max(size, 1)
    if design == "antithetic":
        return 2 if size > 1 else 1
    return math.factorial(min(MOVED, size)) if design == "prefix_coupled" else 1


def design_words(design: str, count: int, size: int) -> str:
    """A design of ``count`` permutations of ``size`` positions, such as "2 Latin squares of 8 orders and a part of
    4"."""
    each = block_size(design, size)
    if design == "exhaustive":
        return f"all {count:,} orders"
    if design not in ("latin", "antithetic", "prefix_coupled") or each == 1:
        return f"{count:,} orders drawn at random"
    whole, rest = divmod(count, each)
    one, many = {
        "latin": ("Latin square", "Latin squares"),
        "antithetic": ("pair", "pairs"),
        "prefix_coupled": ("group", "groups"),
    }[design]
    what = {
        "latin": f"of {each} orders",
        "antithetic": "of an order and its reversal",
        "prefix_coupled": f"of {each} orders that share all but the last {min(MOVED, size)} positions",
    }[design]
    words = f"{whole:,} {one if whole == 1 else many} {what}"
    return words if not rest else f"{words} and {rest} of another" if whole else f"{rest} of one {one} {what}"
