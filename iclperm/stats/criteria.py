"""Criteria on a dev split by which an ordering can be chosen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from iclperm.errors import RequestError
from iclperm.stats.incomplete import filled
from iclperm.stats.search import usable_items
from iclperm.stats.sensitivity import FloatArray, accuracy

CRITERIA = (
    "dev_accuracy",
    "majority_agreement",
    "global_entropy",
    "local_entropy",
    "mutual_information",
    "dev_log_likelihood",
)
LABEL_FREE = ("majority_agreement", "global_entropy", "local_entropy", "mutual_information")
"""Criteria that need no right labels."""
COUNT_LABELS = ("global_entropy", "mutual_information")
"""Criteria that need the same labels after every query."""


def criteria_scores(
    correct: npt.ArrayLike,
    predictions: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    weights: npt.ArrayLike | None = None,
    *,
    label_scores: Iterator[npt.NDArray[Any]] | None = None,
    gold: npt.ArrayLike | None = None,
) -> dict[str, FloatArray]:
    """Every criterion by which an ordering can be chosen, [S, P] each, higher is better, on the dev split.

    Args:
        correct: [S, P, Q] 0 or 1.
        predictions: [S, P, Q] index of the label that was answered; anything where the state is not ok.
        state: [S, P, Q] integers, 0 = ok; what is not ok is missing in its cell alone.
        weights: [Q] how often each query counts.
        label_scores: the log-likelihoods [Q, L] (nats) of every set and permutation in turn, held one by one; without
            them there are three criteria fewer, and without `gold` one.
        gold: [Q] index of the right label.

    `dev_accuracy` (arXiv 2511.09700); `majority_agreement`: share of answers equal to those of most permutations of the
    set, ties to the lowest label; `global_entropy`: of the frequencies of the answers, `local_entropy`: mean over
    queries of that of the label probabilities (Lu et al. 2022, there on made-up queries); `mutual_information`:
    H(mean p) - mean H(p) (Sorensen et al. 2022); `dev_log_likelihood`: mean log-probability of the right label, over
    the labels. Entropies in nats. Raises RequestError on shapes that do not fit. Cost: O(S·P·Q·L).
    """
    _, usable, weight, cells, *_ = usable_items(correct, state, weights)
    answers = np.asarray(predictions)
    if answers.shape != np.shape(correct):
        raise RequestError(f"predictions must have shape {list(np.shape(correct))}, got {list(answers.shape)}")
    states = np.zeros(answers.shape, np.uint8) if state is None else np.asarray(state)
    answers, states = answers[..., usable], states[..., usable]
    agreement = filled(majority_agreement(answers, states), states, weight).accuracy.values
    scores = {"dev_accuracy": cells.values, "majority_agreement": agreement}
    scores["global_entropy"] = _frequency_entropy(answers, states, weight)
    if label_scores is None:
        return scores
    truth = None if gold is None else np.asarray(gold)[usable]
    ok = states.reshape(-1, states.shape[-1]) == 0
    cell_scores = [
        _label_criteria(logprob[usable][there], weight[there], None if truth is None else truth[there])
        for logprob, there in zip(label_scores, ok, strict=False)
    ]
    if len(cell_scores) != cells.values.size:
        raise RequestError(f"label_scores must yield {cells.values.size} cells, got {len(cell_scores)}")
    for name, values in zip(CRITERIA[3:], np.array(cell_scores).T, strict=True):
        if name != "dev_log_likelihood" or truth is not None:
            scores[name] = values.reshape(cells.values.shape)
    return scores


def by_query_criterion(name: str, scores: npt.ArrayLike, gold: npt.ArrayLike) -> FloatArray:
    """[..., Q] what each query adds to a criterion that is a mean over queries, from log-likelihoods [..., Q, L] of the
    labels and the right ones [Q]: `dev_log_likelihood` or `local_entropy`, in nats; NaN where there are none."""
    values = np.asarray(scores, dtype=np.float64)
    with np.errstate(invalid="ignore"):  # NaN where there is no answer
        values = values - np.logaddexp.reduce(values, axis=-1, keepdims=True)
    if name == "local_entropy":
        return np.asarray(special.entr(np.exp(values)).sum(axis=-1))
    if name == "dev_log_likelihood":
        return np.asarray(values[..., np.arange(values.shape[-2]), np.asarray(gold)])
    raise RequestError(f"criterion {name!r} is no mean over queries of label scores")


def majority_agreement(predictions: npt.ArrayLike, state: npt.ArrayLike | None = None) -> npt.NDArray[np.uint8]:
    """[S, P, Q] 1 where an answer is that of most permutations of its set; ties to the lowest label.

    predictions: [S, P, Q] labels from 0; state: [S, P, Q], only what is 0 has a vote. No right label is needed. The
    earlier code of arXiv 2511.09700 chose by it."""
    answers = np.asarray(predictions)
    if answers.ndim != 3 or not np.issubdtype(answers.dtype, np.integer):
        raise RequestError(f"predictions must be integers [S, P, Q], got {answers.dtype} {list(answers.shape)}")
    agreement = np.empty(answers.shape, dtype=np.uint8)
    labels = range(int(answers.max(initial=0)) + 1)
    voting = np.ones(answers.shape, np.bool_) if state is None else np.asarray(state) == 0
    for of_set, votes_of_set, agrees in zip(answers, voting, agreement, strict=True):
        votes = np.stack([np.count_nonzero((of_set == label) & votes_of_set, axis=0) for label in labels])
        agrees[:] = of_set == votes.argmax(axis=0)
    return agreement


def _frequency_entropy(answers: npt.NDArray[Any], states: npt.NDArray[Any], weight: FloatArray) -> FloatArray:
    """[S, P] entropy in nats of the weighted frequencies of the answers that are there."""
    entropy = np.zeros(answers.shape[:2])
    for label in range(int(answers.max(initial=0)) + 1):
        entropy += special.entr(accuracy(answers == label, states, weight).values)
    return entropy


def _label_criteria(
    logprob: npt.NDArray[Any], weight: FloatArray, truth: npt.NDArray[Any] | None
) -> tuple[float, float, float]:
    """Local entropy, mutual information and mean log-probability of the right label of one cell [Q, L]."""
    values = logprob.astype(np.float64)
    if np.isnan(values).any():
        raise RequestError("label_scores hold NaN in a query that is ok; mark it in state")
    values -= np.logaddexp.reduce(values, axis=1, keepdims=True)
    probability, share = np.exp(values), weight / weight.sum()
    local = float(share @ special.entr(probability).sum(axis=1))
    overall = float(special.entr(share @ probability).sum())
    right = math.nan if truth is None else float(share @ values[np.arange(len(truth)), truth])
    return local, overall - local, right
