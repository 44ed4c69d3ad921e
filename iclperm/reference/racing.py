"""Slow oracles of races: one bet, one ordering, one draw at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import permutations
from typing import NamedTuple

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
    return math.inf if needed - sum(seen) >= total - len(seen) - 1e-9 else most


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
        asked, size, num = size, (2 * size if queries - 2 * size > queries / 10 else queries), math.ceil(num / 2)
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


class Mixture(NamedTuple):
    """How an ordering's mean over all queries is distributed: Gaussians of one spread."""

    shares: list[float]
    centres: list[float]
    spread: float

    def below(self, value: float) -> float:
        """Chance that the mean is no more than that."""
        gaps = [(value - centre) / self.spread / math.sqrt(2) for centre in self.centres]
        return sum(share * (1 + math.erf(gap)) / 2 for share, gap in zip(self.shares, gaps, strict=True))


def noise_of(rows: Sequence[Sequence[float]], classes: Sequence[int]) -> float:
    """Variance of an answer beyond what its query and its ordering in the query's class have, one class at a time."""
    if min(classes.count(one) for one in classes) < 2:
        classes = [0] * len(classes)
    squares = 0.0
    for one in set(classes):
        those = [q for q, own in enumerate(classes) if own == one]
        by_query = {q: sum(row[q] for row in rows) / len(rows) for q in those}
        for row in rows:
            rest = [row[q] - by_query[q] for q in those]
            squares += sum((x - sum(rest) / len(rest)) ** 2 for x in rest)
    return (squares + 1) / ((len(rows) - 1) * (len(classes) - len(set(classes))) + 1)


def mixtures(
    table: np.ndarray,
    asked: Sequence[int],
    classes: Sequence[int] | None = None,
    tolerance: float = 0.01,
    sweeps: int = 60,
    points: int = 64,
) -> dict[int, Mixture]:
    """The posterior of each ordering that answered most, by empirical Bayes on a grid, one ordering at a time."""
    number, total = max(asked), table.shape[1]
    lead = leads(table, asked)
    alive = sorted((p for p, size in enumerate(asked) if size == number), key=lambda p: -round(lead[p], 12))
    half = [[float(table[p, q]) for q in range(number)] for p in alive[: max(2, math.ceil(len(alive) / 2))]]
    noise = noise_of(half, [0] * number if classes is None else list(classes[:number]))
    noise *= 1 + 1.5 / math.sqrt(number)
    lowest = max(min(lead), max(lead) - 8 * (math.sqrt(noise / number) + tolerance))
    width = (max(lead) - lowest) / (points - 1)
    grid = [lowest + width * place for place in range(points)]

    def likelihoods(p: int) -> list[float]:
        variance = noise / asked[p] + width**2 / 12
        return [math.exp(-((max(lead[p], lowest) - true) ** 2) / 2 / variance) for true in grid]

    def weighed(p: int, shares: list[float]) -> list[float]:
        found = [likely * share for likely, share in zip(likelihoods(p), shares, strict=True)]
        return [each / sum(found) for each in found]

    shares = [1 / points] * points
    for _ in range(sweeps):
        every = [weighed(p, shares) for p in range(len(asked))]
        shares = [sum(column) / len(asked) for column in zip(*every, strict=True)]
    seen = number / total
    spread = (1 - seen) * math.sqrt(noise / (total - number) + width**2 / 12)
    return {
        p: Mixture(weighed(p, shares), [seen * lead[p] + (1 - seen) * true for true in grid], spread) for p in alive
    }


def chance_of_loss(kept: Sequence[Mixture], out: Sequence[Mixture], tolerance: float, points: int = 1500) -> float:
    """That the best of those left out is more than the tolerance above the best of those kept."""
    ends = [*(centre for each in (*kept, *out) for centre in each.centres)]
    margin = 5 * max(each.spread for each in (*kept, *out))
    width = (max(ends) - min(ends) + 2 * margin) / points
    found, before = 0.0, 0.0
    for place in range(points):
        value = min(ends) - margin + width * place
        reached = math.prod(each.below(value + width) for each in kept)
        found += (reached - before) * (1 - math.prod(each.below(value + width / 2 + tolerance) for each in out))
        before = reached
    return found


def added(before: Sequence[Mixture], one: Mixture, points: int = 1500) -> float:
    """What one more ordering adds to the expected mean of the best."""
    ends = [*(centre for each in (*before, one) for centre in each.centres)]
    margin = 5 * one.spread
    width = (max(ends) - min(ends) + 2 * margin) / points
    places = [min(ends) - margin + width * (place + 0.5) for place in range(points)]
    return width * sum((1 - one.below(x)) * math.prod(each.below(x) for each in before) for x in places)
