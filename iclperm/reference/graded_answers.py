"""Grades of written answers, slowly and plainly: the token F1 of SQuAD's published script, and absolute errors."""

from __future__ import annotations

from fractions import Fraction

PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_ARTICLES = ("a", "an", "the")


def squad_words(text: str) -> list[str]:
    """The words that SQuAD compares: lower case, ASCII punctuation gone, articles that stand alone gone; in order."""
    kept = "".join(letter for letter in text.lower() if letter not in PUNCTUATION)
    pieces, piece = [], ""
    for letter in kept + " ":  # an article ends where no letter, digit or underscore goes on, not only at a space
        if letter.isalnum() or letter == "_":
            piece += letter
            continue
        pieces += [" " if piece in _ARTICLES else piece, letter]
        piece = ""
    return "".join(pieces).split()


def squad_f1(answer: str, golds: list[str]) -> float:
    """The best F1 of an answer's words with those of one right answer, each word as often as both have it."""
    return max(_f1(squad_words(answer), squad_words(gold)) for gold in golds)


def _f1(given: list[str], right: list[str]) -> float:
    left, shared = list(right), 0
    for word in given:
        if word in left:
            left.remove(word)
            shared += 1
    if not shared:
        return 0.0
    precision, recall = Fraction(shared, len(given)), Fraction(shared, len(right))
    return float(2 * precision * recall / (precision + recall))


def closeness(answer: str, gold: str, scale: str) -> tuple[float, float]:
    """The absolute error of a number, and its grade: 1 for none, 0 from ``scale`` on, straight between."""
    error = abs(Fraction(answer) - Fraction(gold))
    return float(error), float(max(Fraction(0), 1 - error / Fraction(scale)))
