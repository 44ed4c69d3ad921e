"""Grades of written answers: the words that two texts share, as SQuAD counts them, and how near two numbers are."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")


def squad_normal(text: str) -> str:
    """A text as SQuAD's published script compares it: lower case, without ASCII punctuation, articles and needless
    white space. Rajpurkar et al. (2016)."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def best_f1(answer: str, golds: Sequence[str]) -> float:
    """The best token F1 of an answer with one of the right answers, all in the form of `squad_normal`: 2·shared words
    over the words of both, each word as often as both have it."""
    return max(_f1(answer.split(), gold.split()) for gold in golds)


def _f1(given: Sequence[str], right: Sequence[str]) -> float:
    return 2 * (Counter(given) & Counter(right)).total() / (len(given) + len(right))


def absolute_error(answer: str, gold: str) -> float:
    """How far apart two numbers are, given as digits."""
    return float(abs(Fraction(Decimal(answer)) - Fraction(Decimal(gold))))
