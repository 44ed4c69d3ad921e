"""What a page's prompt viewer shows: the prompts of a run as they were scored, and what each query was answered with.

What does not fit a page is left out, and said: queries are taken at equal distances, log-likelihoods are rounded.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from string import ascii_letters, digits
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iclperm.errors import ConfigError, IclpermError
from iclperm.prompts.encode import EncodedText
from iclperm.report.parts import evenly
from iclperm.runs.answers import Items
from iclperm.runs.run_texts import RunPrompts, kept_prompts, run_prompts
from iclperm.runs.texts import PromptTexts
from iclperm.studies.report import Run
from iclperm.studies.several import StudyRuns
from iclperm.study.metrics import Metric
from iclperm.study.states import OK
from iclperm.tasks.task import Task

ALPHABET = digits + ascii_letters
"""Signs for labels, one a label; any other sign is no answer."""
_MISSING = "."
_MOST_VALUES = 800_000
"""Log-likelihoods in a page, of two bytes each."""
_MOST_LETTERS = 600_000
_MOST_QUERIES = 1_000
_MOST_OWN_ENDS = 150_000
_NO_SCORE = 65_535
NEAR_TIE_NATS = 0.1
"""Margins below this are near-ties in the viewer, unless its reader sets another."""


def restricted_tasks(run: Run | StudyRuns) -> list[str]:
    """The tasks of runs of which the data may not be handed on, by their task files or by what their folders keep."""
    runs = [run] if isinstance(run, Run) else [*run.runs.values()]
    return list(dict.fromkeys(one.task for one in runs if _is_restricted(one)))


def restricted_words(names: Sequence[str]) -> str:
    """What is said of such tasks."""
    return f"the data of {', '.join(names)} may not be handed on, so texts are left out"


def _is_restricted(run: Run) -> bool:
    try:
        return Task.load(run.study.task, run.study.data).restricted
    except ConfigError:  # the task file is elsewhere
        pass
    try:
        kept = kept_prompts(run)
    except IclpermError:
        return False
    return kept is not None and kept.texts.is_restricted


def viewer_of(run: Run, shown: NDArray[np.int64], share: float = 1.0) -> tuple[dict[str, Any] | None, list[str]]:
    """What `viewer.js` reads: prompts of all sets and the ``shown`` permutations; and what is said of them.

    They take a ``share`` of the room of a page. None, with the reason, where the prompts cannot be told, or do not fit.
    """
    try:
        prompts, notes = run_prompts(run)
    except IclpermError as error:
        return None, [f"The prompts cannot be shown: {error}"]
    if prompts.own is not None:
        return None, ["Each query has demonstrations of its own; iclperm prompt prints the prompt of any."]
    sets = range(run.correct.shape[0])
    if not prompts.are_those_of((index_set, int(place)) for index_set in sets for place in shown):
        return None, ["The prompts cannot be shown: their tokens are not those that were scored."]
    data, others = shown_prompts(run, shown, prompts, share)
    return data, [*notes, *others]


def shown_prompts(
    run: Run, shown: NDArray[np.int64], prompts: RunPrompts, share: float = 1.0
) -> tuple[dict[str, Any] | None, list[str]]:
    """The same of ``prompts`` that are known to be those of the run."""
    notes: list[str] = []
    texts, items = prompts.texts, run.splits["test"]
    used = np.unique(np.concatenate([group.rows[:, shown].ravel() for group in prompts.groups]))
    demonstrations = [texts.demonstrations[int(row)] for row in used]
    letters = sum(len(piece.text) for piece in demonstrations)
    room = int(share * _MOST_LETTERS) - letters, int(share * _MOST_VALUES)
    numbers = _chosen_queries(run, texts.queries["test"], len(shown), *room)
    if not len(numbers):
        return None, ["The prompts are too long for a page; iclperm prompt prints any of them."]
    if len(numbers) < len(items.gold):
        notes.append(
            f"The prompt viewer has {len(numbers):,} of the {len(items.gold):,} queries, at equal distances; iclperm "
            "prompt prints the prompt of any."
        )
    if (scored := _answers(run, shown, numbers))["scores"]:
        notes.append(f"The prompt viewer rounds log-likelihoods to {scored['scores']['step']:.1g} nats.")
    queries = [texts.queries["test"][number] for number in numbers.tolist()]
    has_tokens = texts.has_tokens
    data: dict[str, Any] = {
        "start": list(texts.start.turns),
        "opening": _piece(texts.opening.text, texts.opening.tokens),
        "demonstrations": [_piece(piece.text, piece.tokens) for piece in demonstrations],
        "first": {
            str(place): _steps(texts.demonstrations[int(row)].text, texts.first[int(row)])
            for place, row in enumerate(used.tolist())
            if row in texts.first
        },
        "groups": [_group(group.shots, group.rows[:, shown], used) for group in prompts.groups],
        "queries": [_piece(piece.text, piece.tokens) for piece in queries],
        "numbers": numbers.tolist(),
        "continuations": list(texts.labels),
        **_choices(items, texts, numbers),
        "has_tokens": has_tokens,
        "own": _own_tokens(prompts, shown, run.shots, numbers.tolist()) if has_tokens else None,
        "is_likeness": prompts.is_of_api and texts.chat is not None,
        "near": NEAR_TIE_NATS,
        "right": [items.right_answers[number] or "" for number in numbers.tolist()],
        **scored,
    }
    return data, notes


def _choices(items: Items, texts: PromptTexts, numbers: NDArray[np.int64]) -> dict[str, Any]:
    """What follows each of some queries that have choices of their own, and which of them are right."""
    if items.choices is None:
        return {}
    own = zip(numbers.tolist(), items.choices.right[numbers], strict=True)
    found = [{"after": list(texts.after(("test", n))), "right": np.flatnonzero(right).tolist()} for n, right in own]
    return {"choices": found}


def _chosen_queries(
    run: Run, pieces: Sequence[Any], num_shown: int, most_letters: int, most_values: int
) -> NDArray[np.int64]:
    """The numbers of as many test queries as there is room for, at equal distances."""
    items = run.splits["test"]
    total = len(items.gold)
    a_query = len(run.correct) * num_shown * len(run.shots) * max(len(run.labels), 1)
    letters = sum(len(piece.text) for piece in pieces[:total])
    room = int(total * max(most_letters, 0) / max(letters, 1))
    most = min(most_values // a_query, _MOST_QUERIES, room)
    return np.array(evenly(total, most) if most else [], dtype=np.int64)


def _piece(text: str, tokens: EncodedText) -> list[Any]:
    return [text, _steps(text, tokens)]


def _steps(text: str, tokens: EncodedText) -> list[int]:
    """How far each token reaches beyond the one before it, in the units of JavaScript's strings."""
    ends = tokens.ends.clip(0, len(text))
    if not text.isascii():
        widths = np.array([1 + (ord(sign) > 0xFFFF) for sign in text])
        ends = np.concatenate([[0], np.cumsum(widths)])[ends]
    steps: list[int] = np.diff(ends, prepend=0).tolist()
    return steps


def _group(shots: Sequence[int], rows: NDArray[np.int64], used: NDArray[np.int64]) -> dict[str, Any]:
    """Orderings as places in ``used``: those of each set at its first permutation, and how others rearrange them."""
    places = np.searchsorted(used, rows)
    sorter = np.argsort(places[0, 0])
    orders = sorter[np.searchsorted(places[0, 0], places[0], sorter=sorter)]
    return {"shots": list(shots), "sets": places[:, 0].tolist(), "orders": orders.tolist()}


def _own_tokens(
    prompts: RunPrompts, shown: NDArray[np.int64], shots: Sequence[int], numbers: Sequence[int]
) -> dict[str, Any] | None:
    """Tokens of prompts that are not their pieces joined; None where all are, or there are too many for a page."""
    texts = prompts.texts
    if not texts.contexts and not texts.cells:
        return {}
    names = np.array(
        [
            [[prompts.context(index_set, int(place), k) for k in shots] for place in shown]
            for index_set in range(prompts.groups[0].rows.shape[0])
        ]
    )
    distinct, places = np.unique(names, return_inverse=True)
    number_of = {int(name): place for place, name in enumerate(distinct)}
    contexts: dict[int, list[int]] = {}
    cells: dict[str, list[int]] = {}
    num_before = len(texts.start.turns)  # which the page shows apart
    cell_of = {int(name): np.unravel_index(int(np.argmax(names == name)), names.shape) for name in distinct}
    for name, (index_set, place, k) in cell_of.items():
        cell = int(index_set), int(shown[place]), shots[int(k)]
        if name in texts.contexts:
            contexts[number_of[name]] = _steps(prompts.text(*cell), texts.contexts[name])[num_before:]
        for query, number in enumerate(numbers):
            if (name, "test", number) in texts.cells and (found := prompts.tokens(*cell, ("test", number))):
                steps = _steps(prompts.text(*cell, ("test", number)), found)
                cells[f"{number_of[name]},{query}"] = steps[num_before:]
        if sum(map(len, [*contexts.values(), *cells.values()])) > _MOST_OWN_ENDS:
            return None
    return {"context_of": places.reshape(names.shape).tolist(), "contexts": contexts, "cells": cells}


def _answers(run: Run, shown: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, Any]:
    """What was answered to some queries, by number of shots, set and permutation: a sign a query, and the scores."""
    items = run.splits["test"]
    num_labels = len(run.labels)
    contexts = items.context_of[:, shown].transpose(2, 0, 1)  # [K, S, P]
    signs = np.frombuffer(ALPHABET.encode(), dtype=np.uint8)
    state = items.context_state[contexts][..., numbers]
    if num_labels:
        given = items.context_prediction[contexts][..., numbers].astype(np.int64)
        code = np.where((given >= 0) & (given < num_labels), given, num_labels)
    else:
        code = verdict_codes(run.correct[:, shown].transpose(2, 0, 1, 3)[..., numbers])
    is_known = (state == OK) & (code < len(signs))
    written = np.where(is_known, signs[code.clip(0, len(signs) - 1)], ord(_MISSING)).astype(np.uint8)
    found: dict[str, Any] = {
        "labels": list(run.labels),
        "codes": [*run.labels, "no label"] if num_labels else verdict_names(run.metric),
        "alphabet": ALPHABET,
        "answers": [[[one.tobytes().decode() for one in row] for row in of_k] for of_k in written],
        "gold": items.gold[numbers].tolist() if num_labels else [],
        "scores": None,
    }
    if items.generated is None and num_labels:
        found["scores"] = _scores(items, contexts, numbers, run.limits.bytes_at_once)
        found["has_margins"] = items.has_scores
        found["unit"] = _unit(run)
    return found


def verdict_names(metric: Metric | None) -> list[str]:
    """What an answer without labels can be, the best first: right or wrong, or its grade, cut to tenths."""
    return ["right", "wrong"] if metric is None else [f"{metric.grade} {tenths / 10}" for tenths in range(10, -1, -1)]


def verdict_codes(correct: NDArray[Any]) -> NDArray[np.int64]:
    """The place of each answer, right or wrong or a grade, among `verdict_names`."""
    if correct.dtype.kind != "f":
        return np.asarray(1 - correct.astype(np.int64))
    return np.asarray(np.ceil((1 - correct) * 10 - 1e-5).astype(np.int64))


def _unit(run: Run) -> str:
    """What labels are compared by, where that is not the log-likelihood itself."""
    parts = {
        "sum": "",
        "mean": "mean over tokens",
        "bytes": "mean over bytes",
        "characters": "mean over characters",
        "pmi": "less that without a context",
    }
    words = [parts[run.study.normalize], "calibrated" if run.study.calibration != "none" else ""]
    return ", ".join(filter(None, words))


def _scores(
    items: Items, contexts: NDArray[np.int64], numbers: NDArray[np.int64], bytes_at_once: int
) -> Mapping[str, Any]:
    """Log-likelihoods of labels in steps of two bytes, [K, S, P, Q, L]; and what they are compared by."""
    distinct, places = np.unique(contexts, return_inverse=True)
    num_labels = items.context_logprob.shape[2]
    values = np.empty((len(distinct), len(numbers), num_labels), dtype=np.float32)
    at_once = max(1, bytes_at_once // (4 * len(numbers) * num_labels))
    for begin in range(0, len(distinct), at_once):
        within = slice(begin, begin + at_once)
        values[within] = items.context_logprob[np.ix_(distinct[within], numbers)]
    is_known = np.isfinite(values)
    lowest = float(values[is_known].min(initial=-1.0))
    step = -lowest / (_NO_SCORE - 1)
    codes = np.where(is_known, np.rint(np.where(is_known, values, 0) / -step), _NO_SCORE).clip(0, _NO_SCORE)
    raw = codes.astype("<u2")[places.reshape(contexts.shape)].tobytes()
    prior = None if items.prior is None else items.prior[contexts].round(5)
    return {
        "step": step,
        "codes": base64.b64encode(raw).decode(),
        "scale": (items.scale if items.scale.ndim == 1 else items.scale[numbers]).tolist(),
        "prior": None if prior is None else np.where(np.isfinite(prior), prior, 0.0).tolist(),
        **_alone(items, numbers),
    }


def _alone(items: Items, numbers: NDArray[np.int64]) -> dict[str, Any]:
    """What is taken off log-likelihoods, where something is: of each query, or of all; 0 for choices that one lacks."""
    if (taken := items.taken_off) is None:
        return {}
    values = taken[0] if items.choices is None else taken[numbers]
    return {"alone": np.where(np.isfinite(values), values, 0.0).astype(np.float64).round(5).tolist()}
