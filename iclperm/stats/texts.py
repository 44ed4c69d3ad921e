"""How alike texts are, by the words that they share."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from iclperm.errors import RequestError
from iclperm.stats.sensitivity import FloatArray

_NEAR = 0.8  # share of words that near-duplicates have in common
_MOST_NEAR = 20_000  # texts
_MOST_COMPARED = 20_000_000  # words: seconds


def similarity(texts: Sequence[str], others: Sequence[str] | None = None) -> FloatArray:
    """[N, M] share of words that two texts have in common (Jaccard; case and repetition do not count; 1 for none)."""
    ours = [words(text) for text in texts]
    theirs = ours if others is None else [words(text) for text in others]
    return np.array([[_jaccard(a, b) for b in theirs] for a in ours]).reshape(len(ours), len(theirs))


def words(text: str) -> frozenset[str]:
    """The different words of a text, in lower case."""
    return frozenset(re.findall(r"\w+", text.lower()))


def near_duplicates(texts: Sequence[str], others: Sequence[str]) -> list[tuple[int, int]] | None:
    """Pairs (place in ``texts``, place in ``others``), the first for each of ``others`` that shares four words in five
    with one of ``texts``; all numbers are one word.

    None where it would take too long to look for them. Cost: O(texts that share a rare word).
    """
    if len(texts) + len(others) > _MOST_NEAR:
        return None
    bags = [_words_without_numbers(text) for text in texts]
    frequency = Counter(word for bag in bags for word in bag)
    holders: dict[str, list[int]] = defaultdict(list)
    for number, bag in enumerate(bags):
        for word in bag:
            holders[word].append(number)
    near, left = [], _MOST_COMPARED
    for place, text in enumerate(others):
        bag = _words_without_numbers(text)
        rare = sorted((word for word in bag if word in frequency), key=lambda word: (frequency[word], word))
        rare = rare[: len(bag) - int(_NEAR * len(bag)) + 1]  # one of these is in every text that shares enough
        left -= sum(len(holders[word]) for word in rare)
        for number in dict.fromkeys(number for word in rare for number in holders[word]):
            left -= len(bag)
            if left < 0:
                return None
            if len(bag & bags[number]) >= _NEAR * len(bag | bags[number]):
                near.append((number, place))
                break
    return near


def _words_without_numbers(text: str) -> frozenset[str]:
    return words(re.sub(r"\d+", "0", text))


def diversity(similarities: npt.ArrayLike) -> FloatArray:
    """[S, K] one minus the mean similarity to the rest of the set, from similarities [S, K, K]; NaN for K = 1."""
    table = checked_similarities(similarities)
    num = table.shape[1]
    if num < 2:
        return np.full(table.shape[:2], np.nan)
    own = np.diagonal(table, axis1=1, axis2=2)
    return np.asarray(1 - (table.sum(axis=2) - own) / (num - 1))


def _jaccard(ours: frozenset[str], theirs: frozenset[str]) -> float:
    either = len(ours | theirs)
    return len(ours & theirs) / either if either else 1.0


def checked_similarities(similarities: npt.ArrayLike) -> FloatArray:
    """Pairwise similarities as float64 [S, K, K]; raises RequestError on another shape or what is not finite."""
    table = np.asarray(similarities, dtype=np.float64)
    if table.ndim != 3 or table.shape[1] != table.shape[2] or table.size == 0 or not np.isfinite(table).all():
        raise RequestError(f"similarities must be finite [S, K, K], got shape {list(table.shape)}")
    return table


def lexical_similarity(texts: Sequence[str], queries: Sequence[str]) -> FloatArray:
    """Mean tf-idf cosine of each text with all queries, [N], 0 to 1: the words they share, rare ones counting more.

    Words are runs of letters and digits in lower case; a word in d of D documents (texts and queries) weighs
    log((1 + D)/(1 + d)) + 1. A text without words scores 0. Cost: O(words). Salton & Buckley (1988).
    """
    if not texts or not queries:
        raise RequestError(f"similarity needs at least one text and one query, got {len(texts)} and {len(queries)}")
    documents = [Counter(re.findall(r"\w+", text.lower())) for text in (*texts, *queries)]
    frequency = Counter(word for document in documents for word in document)
    weight = {word: math.log((1 + len(documents)) / (1 + count)) + 1 for word, count in frequency.items()}
    vectors = [_unit({word: count * weight[word] for word, count in document.items()}) for document in documents]
    centre: Counter[str] = Counter()
    for vector in vectors[len(texts) :]:
        centre.update(vector)
    return np.array(
        [sum(size * centre[word] for word, size in vector.items()) / len(queries) for vector in vectors[: len(texts)]]
    )


def _unit(vector: Mapping[str, float]) -> dict[str, float]:
    """A vector of words scaled to length 1; empty where it has no length."""
    length = math.sqrt(sum(size * size for size in vector.values()))
    return {word: size / length for word, size in vector.items()} if length else {}
