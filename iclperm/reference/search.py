"""Slow oracles of the search: plain loops, enumeration and textbook definitions."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt
from scipy import integrate, special
from scipy import stats as scipy_stats

FloatArray = npt.NDArray[np.float64]
Array = npt.NDArray[np.generic]


def share_correct(answers: Sequence[float], weights: Sequence[float]) -> float:
    """Weighted mean of the answers to one prompt list."""
    return sum(a * w for a, w in zip(answers, weights, strict=True)) / sum(weights)


def columns(scores: FloatArray, correct: Array, weights: Sequence[float]) -> dict[str, list[float]]:
    """Average, Highest-Dev and Max of each set, from scores [S, P] and correct [S, P, Q]."""
    found: dict[str, list[float]] = {"average": [], "highest_dev": [], "maximum": []}
    for row, one_set in zip(scores.tolist(), correct.tolist(), strict=True):
        accuracies = [share_correct(answers, weights) for answers in one_set]
        found["average"].append(statistics.fmean(accuracies))
        found["highest_dev"].append(accuracies[row.index(max(row))])
        found["maximum"].append(max(accuracies))
    return found


def honest(correct: Array, weights: Sequence[float], halves: Sequence[Sequence[bool]]) -> list[float]:
    """Per set: every query answered by the ordering that is best on the half without it, mean over halvings."""
    found = []
    for one_set in correct.tolist():
        by_halving = []
        for half in halves:
            total = 0.0
            for chosen_on in (True, False):
                chooses = [weight if side == chosen_on else 0.0 for side, weight in zip(half, weights, strict=True)]
                judges = [weight if side != chosen_on else 0.0 for side, weight in zip(half, weights, strict=True)]
                accuracies = [share_correct(answers, chooses) for answers in one_set]
                best = accuracies.index(max(accuracies))
                total += sum(a * w for a, w in zip(one_set[best], judges, strict=True))
            by_halving.append(total / sum(weights))
        found.append(statistics.fmean(by_halving))
    return found


def gap_interval(scores: FloatArray, correct: Array, weights: Sequence[float], level: float) -> tuple[float, float]:
    """Interval of the gap closed: pseudo-values over sets, and over queries with the choices held."""
    num_sets, _, num_queries = correct.shape
    accuracies = [[share_correct(answers, weights) for answers in one_set] for one_set in correct.tolist()]
    chosen = [row.index(max(row)) for row in scores.tolist()]
    best = [row.index(max(row)) for row in accuracies]

    def closed(sets: Sequence[int], queries: Sequence[int]) -> float:
        kept = [weights[q] for q in queries]
        average, dev, top = [], [], []
        for s in sets:
            cells = [share_correct([one[q] for q in queries], kept) for one in correct[s].tolist()]
            average.append(statistics.fmean(cells))
            dev.append(cells[chosen[s]])
            top.append(cells[best[s]])
        low = statistics.fmean(average)
        return (statistics.fmean(dev) - low) / (statistics.fmean(top) - low)

    sets, queries = list(range(num_sets)), list(range(num_queries))
    return _two_jackknives(
        closed(sets, queries),
        [closed([t for t in sets if t != s], queries) for s in sets],
        [closed(sets, [r for r in queries if r != q]) for q in queries],
        level,
    )


def criteria(
    correct: Array, predictions: Array, label_logprob: FloatArray, gold: Sequence[int], weights: Sequence[int]
) -> dict[str, FloatArray]:
    """Every criterion [S, P], with query q written out weights[q] times; label_logprob [S, P, Q, L]."""
    shape, queries = correct.shape[:2], [q for q, weight in enumerate(weights) for _ in range(weight)]
    found = {name: np.empty(shape) for name in _CRITERIA}
    for s, p in np.ndindex(*shape):
        answers = [int(predictions[s, p, q]) for q in queries]
        majority = [_most_common([int(label) for label in predictions[s, :, q]]) for q in queries]
        shares = [_softmax(label_logprob[s, p, q].tolist()) for q in queries]
        mean = [statistics.fmean(column) for column in zip(*shares, strict=True)]
        local = statistics.fmean(_entropy(row) for row in shares)
        found["dev_accuracy"][s, p] = statistics.fmean(int(correct[s, p, q]) for q in queries)
        found["majority_agreement"][s, p] = statistics.fmean(a == b for a, b in zip(answers, majority, strict=True))
        found["global_entropy"][s, p] = _entropy([count / len(answers) for count in Counter(answers).values()])
        found["local_entropy"][s, p] = local
        found["mutual_information"][s, p] = _entropy(mean) - local
        found["dev_log_likelihood"][s, p] = statistics.fmean(
            math.log(row[gold[q]]) for row, q in zip(shares, queries, strict=True)
        )
    return found


def over_permutations(scores: FloatArray, accuracy: FloatArray, size: int) -> tuple[float, float, float]:
    """Expected Average, Highest-Dev and Max of `size` permutations of all, by every subset; both [S, P]."""
    lines = []
    for kept in combinations(range(accuracy.shape[1]), size):
        some, of_test = scores[:, kept], accuracy[:, kept]
        chosen = [row.index(max(row)) for row in some.tolist()]
        lines.append(
            (
                float(of_test.mean()),
                statistics.fmean(float(of_test[s, p]) for s, p in enumerate(chosen)),
                statistics.fmean(max(row) for row in of_test.tolist()),
            )
        )
    average, highest_dev, maximum = (statistics.fmean(column) for column in zip(*lines, strict=True))
    return average, highest_dev, maximum


def asked_in_turn(pools: Sequence[Sequence[int]], count: int) -> Counter[int]:
    """How often each query comes among the first `count` when pools take turns and begin again at their end."""
    asked: Counter[int] = Counter()
    for number in range(count):
        pool = pools[number % len(pools)]
        asked[pool[number // len(pools) % len(pool)]] += 1
    return asked


def expected_maximum(num: int) -> float:
    """Expected maximum of standard Gaussians: ∫ (1 - Φ(x)^n) over x > 0 minus ∫ Φ(x)^n over x < 0."""
    above = integrate.quad(lambda x: 1 - special.ndtr(x) ** num, 0, 12, limit=200)[0]
    below = integrate.quad(lambda x: special.ndtr(x) ** num, -12, 0, limit=200)[0]
    return float(above - below)


def covariance(dev: FloatArray, test: FloatArray) -> float:
    """Mean over sets of the covariance over permutations."""
    return statistics.fmean(statistics.covariance(d, t) for d, t in zip(dev.tolist(), test.tolist(), strict=True))


def noise_within_sets(correct: Array) -> float:
    """Mean over sets of the interaction mean square of permutations and queries, over Q."""
    squares = []
    for one in correct.astype(np.float64):
        num_p, num_q = one.shape
        total = 0.0
        for p in range(num_p):
            for q in range(num_q):
                total += (one[p, q] - one[p].mean() - one[:, q].mean() + one.mean()) ** 2
        squares.append(total / ((num_p - 1) * (num_q - 1) * num_q))
    return statistics.fmean(squares)


def rank_correlation(
    feature: FloatArray, value: FloatArray, crossed: bool, level: float, ranked: bool = True
) -> tuple[float, float, float]:
    """Pooled within-set correlation of ranks (or values) [S, N] with its interval, ranked anew without each column."""

    def pooled(rows: Sequence[int], columns: Sequence[int]) -> float:
        products = squares_x = squares_y = 0.0
        for row in rows:
            x, y = feature[row, columns], value[row, columns]
            both = np.isfinite(x) & np.isfinite(y)
            a, b = (scipy_stats.rankdata(v[both]) if ranked else v[both] for v in (x, y))
            if min(np.ptp(a), np.ptp(b)) == 0:
                continue
            products += float(((a - a.mean()) * (b - b.mean())).sum())
            squares_x += float(((a - a.mean()) ** 2).sum())
            squares_y += float(((b - b.mean()) ** 2).sum())
        return products / math.sqrt(squares_x * squares_y)

    rows, columns = (list(range(size)) for size in feature.shape)
    varying = [
        s
        for s in rows
        if all(np.ptp(v[s, np.isfinite(feature[s]) & np.isfinite(value[s])]) > 0 for v in (feature, value))
    ]
    whole = pooled(rows, columns)
    kinds = [[math.atanh(pooled([r for r in varying if r != s], columns)) for s in varying]]
    if crossed:
        kinds.append([math.atanh(pooled(rows, [c for c in columns if c != p])) for p in columns])
    low, high = _jackknives(math.atanh(whole), kinds, level)
    return whole, math.tanh(low), math.tanh(high)


def longest_run(labels: Sequence[int]) -> int:
    """Length of the longest run of one label."""
    return max(
        end - begin
        for begin in range(len(labels))
        for end in range(begin + 1, len(labels) + 1)
        if len(set(labels[begin:end])) == 1
    )


def tf_idf_similarity(texts: Sequence[Sequence[str]], queries: Sequence[Sequence[str]]) -> list[float]:
    """Mean cosine of each text (a list of words) with all queries, by dense vectors."""
    documents = [*texts, *queries]
    words = sorted({word for document in documents for word in document})
    holding = [sum(word in document for document in documents) for word in words]
    weights = np.array([math.log((1 + len(documents)) / (1 + count)) + 1 for count in holding])
    vectors = np.array([[list(document).count(word) for word in words] for document in documents]) * weights
    lengths = np.sqrt((vectors**2).sum(axis=1))
    unit = vectors / np.where(lengths > 0, lengths, 1.0)[:, None]
    return (unit[: len(texts)] @ unit[len(texts) :].T).mean(axis=1).tolist()  # type: ignore[no-any-return]


_CRITERIA = (
    "dev_accuracy",
    "majority_agreement",
    "global_entropy",
    "local_entropy",
    "mutual_information",
    "dev_log_likelihood",
)


def _most_common(labels: Sequence[int]) -> int:
    counts = Counter(labels)
    return min(label for label in counts if counts[label] == max(counts.values()))


def _softmax(row: Sequence[float]) -> list[float]:
    total = math.fsum(math.exp(value) for value in row)
    return [math.exp(value) / total for value in row]


def _entropy(shares: Sequence[float]) -> float:
    return -math.fsum(share * math.log(share) for share in shares if share > 0)


def _two_jackknives(
    whole: float, over_sets: Sequence[float], over_queries: Sequence[float], level: float
) -> tuple[float, float]:
    return _jackknives(whole, [over_sets, over_queries], level)


def _jackknives(whole: float, kinds: Sequence[Sequence[float]], level: float) -> tuple[float, float]:
    """Interval from the variances of pseudo-values, with Satterthwaite's degrees of freedom."""
    variances = [_pseudo_variance(whole, left_out) for left_out in kinds]
    degrees = sum(variances) ** 2 / sum(v**2 / (len(k) - 1) for v, k in zip(variances, kinds, strict=True))
    half = float(scipy_stats.t.ppf((1 + level) / 2, degrees)) * math.sqrt(sum(variances))
    return whole - half, whole + half


def _pseudo_variance(whole: float, left_out: Sequence[float]) -> float:
    num = len(left_out)
    return statistics.variance(num * whole - (num - 1) * value for value in left_out) / num
