"""Right and answered labels in a sample log of lm-evaluation-harness, where its rows are answers to one set of labels.

A row says what is right (`target`) and what was answered: the log-likelihood of every choice, or a text
(`filtered_resps`, else `resps`). Nothing is taken on trust: what is read must give the metric of every row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.errors import printable

MOST_LABELS = 20
"""More different ones are taken for free answers."""
_METRICS = ("acc", "acc_norm", "exact_match", "em")
_TRUTH = (True, False, None, "True", "False", "None")  # whether it is the likeliest, if that is known


class Said(NamedTuple):
    """What one row says."""

    target: str
    """The right choice, by number or text, or the right text."""
    texts: tuple[str, ...]
    """Of the choices; empty where the row does not say them, or is text."""
    scores: tuple[float, ...]
    """Log-likelihoods of the choices; empty where the answer is text."""
    answer: str
    """What was answered, where it is text."""


class Labelled(NamedTuple):
    """The rows of a log as labels."""

    labels: tuple[str, ...]
    """[L]"""
    gold: npt.NDArray[np.int64]
    """[Q] index of the right label."""
    answered: npt.NDArray[np.int64]
    """[Q] index of the answered label; -1 names none."""
    note: str = ""
    """What should be known of it."""


def said(row: Mapping[str, Any]) -> Said | str:
    """What a row says of its labels, or why nothing can be read from it."""
    target = row.get("target")
    if isinstance(target, bool) or not isinstance(target, int | str) or not str(target).strip():
        return "it has no 'target' that is one number or text"
    given = row.get("filtered_resps")
    is_filtered = given is not None
    answers = given if is_filtered else row.get("resps")
    if not isinstance(answers, Sequence) or isinstance(answers, str) or not answers:
        return "it has neither 'filtered_resps' nor 'resps'"
    if not is_filtered:  # one level more: what was answered each time
        answers = [one[0] if isinstance(one, Sequence) and not isinstance(one, str) and one else one for one in answers]
    if len(answers) == 1 and isinstance(answers[0], str):
        return Said(str(target).strip(), (), (), answers[0].strip())
    scores = tuple(map(_log_likelihood, answers))
    if len(scores) < 2 or any(score is None or math.isnan(score) for score in scores):
        return "its answers are neither one text nor the log-likelihoods of several choices"
    return Said(str(target).strip(), _texts(row.get("arguments"), len(scores)), tuple(map(float, scores)), "")  # type: ignore[arg-type]


def _log_likelihood(answer: Any) -> float | None:
    """Of [log-likelihood, is greedy], numbers or, as the harness writes them, text."""
    if not isinstance(answer, Sequence) or isinstance(answer, str) or len(answer) != 2 or answer[1] not in _TRUTH:
        return None
    try:
        return float(answer[0])
    except (TypeError, ValueError):
        return None


def _texts(arguments: Any, count: int) -> tuple[str, ...]:
    """The continuations of requests, `gen_args_0: {arg_1: ...}` or [[context, continuation], ...]; else nothing."""
    if isinstance(arguments, Mapping):
        arguments = [arguments.get(f"gen_args_{number}") for number in range(len(arguments))]
    if not isinstance(arguments, Sequence) or isinstance(arguments, str) or len(arguments) != count:
        return ()
    parts = [one.get("arg_1") if isinstance(one, Mapping) else one[1:2] for one in arguments if one]
    texts = [part[0] if isinstance(part, list) and part else part for part in parts]
    found = tuple(text.strip() for text in texts if isinstance(text, str) and text.strip())
    return found if len(found) == len(set(found)) == count else ()


def labelled(names: Sequence[Any], rows: Sequence[Said | str], values: Sequence[float], metric: str) -> Labelled | str:
    """The rows as labels, or why they are none.

    `names` are those of the documents; `values`, the metric of each, must follow from what is read.
    """
    if metric not in _METRICS:
        return f"the metric {metric} does not say which label was answered"
    told = [one for one in rows if isinstance(one, Said)]
    if len(told) < len(rows):
        number = next(place for place, one in enumerate(rows) if not isinstance(one, Said))
        return f"of {_named(names[number])}, {rows[number]}"
    if any(value not in (0, 1) for value in values):
        return f"{metric} is graded, not right or wrong"
    is_text = {not one.scores for one in told}
    if len(is_text) > 1:
        return "some rows have log-likelihoods of choices, others text"
    scored = LoggedMetric(names, values, metric)
    return _of_text(told, scored) if is_text.pop() else _of_choices(told, scored)


class LoggedMetric(NamedTuple):
    """The documents of a log, and the metric of each."""

    names: Sequence[Any]
    values: Sequence[float]
    metric: str


def _named(document: Any) -> str:
    return f"doc_id {printable(str(document))[:40]}"


def _of_text(rows: Sequence[Said], scored: LoggedMetric) -> Labelled | str:
    labels = tuple(sorted({one.target for one in rows}))
    if not 1 < len(labels) <= min(MOST_LABELS, len(rows) // 2):
        return f"{len(labels):,} different targets in {len(rows):,} rows are free answers, or one label"
    place = {label: number for number, label in enumerate(labels)}
    gold = np.array([place[one.target] for one in rows])
    answered = np.array([place.get(one.answer, -1) for one in rows])
    return _checked(labels, gold, answered, scored)


def _of_choices(rows: Sequence[Said], scored: LoggedMetric) -> Labelled | str:
    count = {len(one.scores) for one in rows}
    if len(count) > 1:
        return f"its rows have {min(count)} to {max(count)} choices: they are answers, not labels"
    texts = rows[0].texts
    if any(set(one.texts) != set(texts) for one in rows):
        return "the choices have other texts from row to row: they are answers, not labels"
    labels = texts or tuple(f"choice {number}" for number in range(count.pop()))
    if len(labels) > MOST_LABELS:
        return f"{len(labels)} choices are more than {MOST_LABELS} labels"
    if not texts and scored.metric == "acc_norm":
        return "its rows lack the texts of the choices ('arguments'), by whose lengths acc_norm chooses"
    note = "" if texts else "its rows lack the texts of the choices ('arguments'): labels are their numbers"
    orders = [[labels.index(text) for text in one.texts or labels] for one in rows]
    divisors = [
        [float(len(text)) if scored.metric == "acc_norm" else 1.0 for text in one.texts or labels] for one in rows
    ]
    chosen = [int(np.argmax(np.array(one.scores) / by)) for one, by in zip(rows, divisors, strict=True)]
    answered = np.array([order[place] for order, place in zip(orders, chosen, strict=True)])
    readings: list[Callable[[Said, list[int]], int]] = [_by_number, lambda one, _: _by_text(one, labels)]
    found: list[Labelled] = []
    reason = "its targets are neither the numbers nor the texts of the choices"
    for reading in readings:
        gold = np.array([reading(one, order) for one, order in zip(rows, orders, strict=True)])
        if (gold < 0).any():
            continue
        one = _checked(labels, gold, answered, scored, note)
        if isinstance(one, str):
            reason = one
        elif not found or (found[0].gold != one.gold).any():
            found.append(one)
    if len(found) == 1:
        return found[0]
    return "its targets may be the numbers of the choices, or their texts" if found else reason


def _highest(one: Said, metric: str) -> int:
    """The choice of the highest log-likelihood, for acc_norm by the letters of its text."""
    lengths = [len(text) for text in one.texts] if metric == "acc_norm" else 1
    return int(np.argmax(np.array(one.scores) / lengths))


def _by_number(one: Said, order: Sequence[int]) -> int:
    return order[int(one.target)] if one.target.isdecimal() and int(one.target) < len(order) else -1


def _by_text(one: Said, labels: Sequence[str]) -> int:
    return labels.index(one.target) if one.target in labels else -1


def _checked(
    labels: tuple[str, ...],
    gold: npt.NDArray[np.int64],
    answered: npt.NDArray[np.int64],
    scored: LoggedMetric,
    note: str = "",
) -> Labelled | str:
    """The labels, unless the metric of some row does not follow from them."""
    wrong = np.flatnonzero((gold == answered) != (np.asarray(scored.values) == 1))
    if wrong.size:
        row = int(wrong[0])
        answer = labels[answered[row]] if answered[row] >= 0 else "none of the labels"
        return (
            f"of {_named(scored.names[row])}, {printable(labels[gold[row]])[:40]!r} is right and "
            f"{printable(answer)[:40]!r} is answered, yet {scored.metric} is {scored.values[row]:g} "
            f"({wrong.size:,} such rows)"
        )
    if len(set(gold.tolist())) < 2:
        return f"every query asks for {printable(labels[int(gold[0])])[:40]!r}: there is one class"
    return Labelled(tuple(printable(label) for label in labels), gold, answered, note)
