"""Slow oracles of races: one bet, one ordering, one draw at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import permutations

import numpy as np


def capital(differences: Sequence[float], total: int, tolerance: float) -> float:
    """The most that a gambler ever had who began with 1 and bet, query after query, that the mean difference over all
    ``total`` queries is no more than ``tolerance``; inf where what was seen proves it."""
    owned = most = 1.0
    needed = tolerance * total
    seen: list[float] = []
    for value in differences:
        mean_left = (needed - sum(seen)) / (total - len(seen))
        if mean_left >= 1:
            return math.inf
        guess = sum(seen) / (len(seen) + 2)
        variance = (sum(x * x for x in seen) + 2) / (len(seen) + 2) - guess * guess
        gap = mean_left - guess
        stake = min(max(gap / (variance + gap * gap), 0.0), 0.999 / (1 - mean_left))
        owned *= 1 - stake * (value - mean_left)
        most = max(most, owned)
        seen.append(value)
    return math.inf if needed - sum(seen) > total - len(seen) else most


def chance_of_refuting(answers: Sequence[int], total_rivals: int, tolerance: float, error: float) -> Fraction:
    """Exact chance, over all orders in which ``answers`` (differences of all queries) can be asked, that the capital
    ever reaches ``total_rivals``/``error``; goes through every order, so for a few queries only."""
    orders = list(permutations(answers))
    reached = sum(capital(order, len(order), tolerance) >= total_rivals / error for order in orders)
    return Fraction(reached, len(orders))


def halving_cost(num: int, queries: int, context: float, query: float, first: int) -> float:
    """Tokens of successive halving that begins with ``first`` queries, wave by wave."""
    total, asked, size = 0.0, 0, first
    while num > 1 and asked < queries:
        total += num * context + num * (size - asked) * query
        asked, size, num = size, min(2 * size, queries), math.ceil(num / 2)
    return total


def gain_on_test(correct: np.ndarray, state: np.ndarray, chosen: Sequence[int]) -> tuple[float, float]:
    """Mean over sets of a random ordering's accuracy and of the chosen one's, over the queries that both answered."""
    averages, choices = [], []
    for index, place in enumerate(chosen):
        random, mine = [], []
        for query in range(correct.shape[2]):
            others = [
                float(correct[index, p, query])
                for p in range(correct.shape[1])
                if p != place and state[index, p, query] == 0
            ]
            if state[index, place, query] or not others:
                continue
            own = float(correct[index, place, query])
            share = 1 / correct.shape[1]
            random.append((1 - share) * sum(others) / len(others) + share * own)
            mine.append(own)
        averages.append(sum(random) / len(random))
        choices.append(sum(mine) / len(mine))
    return sum(averages) / len(averages), sum(choices) / len(choices)


def leads(table: np.ndarray, asked: Sequence[int]) -> list[float]:
    """Each ordering's mean lead over those that answered most, on the queries that it answered."""
    most = max(asked)
    alive = [p for p, size in enumerate(asked) if size == most]
    found = []
    for p, size in enumerate(asked):
        rest = [table[p, q] - sum(table[r, q] for r in alive) / len(alive) for q in range(size)]
        found.append(sum(rest) / size)
    return found
