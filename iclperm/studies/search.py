"""Kind `search` (arXiv 2511.09700): can a dev split find a good ordering, and how much of the gain is luck?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm import stats
from iclperm.errors import ConfigError, DataError, RequestError
from iclperm.report.parts import percent
from iclperm.runs.generated import dense
from iclperm.stats.correlation import rank_correlation
from iclperm.stats.criteria import COUNT_LABELS, criteria_scores, majority_agreement
from iclperm.stats.features import ordering_features, recency_bias
from iclperm.stats.paired import holm
from iclperm.stats.search import TIE_DECIMALS, OpenChoice, Search, choices, open_choice, search
from iclperm.stats.search_curves import search_over_dev_queries, search_over_permutations
from iclperm.stats.texts import lexical_similarity
from iclperm.stats.winners_curse import noise_within_sets, winners_curse
from iclperm.studies import adaptive
from iclperm.studies.adaptive import AdaptiveFindings
from iclperm.studies.bearing import Bearing, Reason, by_query, covers_everything, of_run
from iclperm.studies.classes import classes_by_design
from iclperm.studies.missing import filled_words
from iclperm.studies.search_findings import CriterionResult, FeatureResult, SearchFindings

if TYPE_CHECKING:
    from iclperm.runs.answers import Items
    from iclperm.runs.run import FinishedRun

FloatArray = npt.NDArray[np.float64]


class Answers(NamedTuple):
    """The answers to one split at one number of shots."""

    correct: npt.NDArray[np.uint8] | npt.NDArray[np.float32]
    """[S, P, Q] 0 or 1."""
    state: npt.NDArray[np.uint8] | None = None
    """[S, P, Q], 0 = ok."""
    weights: npt.NDArray[Any] | None = None
    """[Q] how often each query counts."""
    gold: npt.NDArray[np.int64] | None = None
    """[Q] index of the right label."""
    predictions: npt.NDArray[Any] | None = None
    """[S, P, Q] index of the answered label; on dev, all criteria but `dev_accuracy` need it."""
    label_scores: Iterator[npt.NDArray[Any]] | None = None
    """The log-likelihoods [Q, L] of every set and permutation in turn, read once; for three of the criteria."""
    is_open: bool = False
    """Whether any answer may be given: then a prediction's number means something within its query only."""
    classes: npt.NDArray[Any] | None = None
    """[Q] of queries that were drawn class by class; None where they are a sample."""


def search_findings(
    test: Answers,
    dev: Answers,
    *,
    criterion: str = "dev_accuracy",
    shots: int | None = None,
    features: Mapping[str, npt.ArrayLike] | None = None,
    last_labels: npt.ArrayLike | None = None,
    seed: int = 0,
    resamples: int = 200,
    title: str = "",
) -> SearchFindings:
    """Everything that is said about a search, from the answers on both splits.

    Args:
        test, dev: the answers; of dev, all criteria but `dev_accuracy` need `predictions`, some `label_scores` and
            `gold`.
        criterion: what an ordering is chosen by (`stats.search.CRITERIA`).
        shots: number of demonstrations, for the words only.
        features: [S, P] each, of the orderings (`stats.features.ordering_features`).
        last_labels: [S, P] label of the demonstration next to the query; with the predictions on test they give the
            recency bias.
        seed, resamples: of halves and curves.
        title: of the figure.

    Permutations must be shared by the sets. Raises RequestError on shapes that do not fit and a criterion that these
    answers do not give. Cost: that of `search_over_permutations` and `search_over_dev_queries`.
    """
    scores = _scores(dev)
    if criterion not in scores:
        why = "" if dev.predictions is not None else "; others need the predictions of the dev answers"
        raise RequestError(f"criterion must be one of {', '.join(scores)}, got {criterion!r}{why}")
    asked = test.correct, test.state, test.weights
    result = search(scores[criterion], *asked, seed=seed)
    results = {name: search(values, *asked, halves=0) for name, values in scores.items()}
    curve_criterion, items = "dev_accuracy", dev.correct
    if criterion == "majority_agreement" and dev.predictions is not None:
        curve_criterion, items = criterion, majority_agreement(dev.predictions, dev.state)
    on_dev = stats.accuracy(dev.correct, dev.state, dev.weights)
    rounded = scores[criterion].round(TIE_DECIMALS)
    found = SearchFindings(
        title=title,
        num_best=int(np.sum(rounded == rounded.max())),
        criterion=criterion,
        scores=np.asarray(scores[criterion]),
        shots=shots,
        num_dev_queries=on_dev.num_queries,
        result=result,
        over_permutations=search_over_permutations(scores[criterion], *asked, seed=seed, resamples=resamples),
        over_dev_queries=search_over_dev_queries(
            items,
            result.accuracy,
            dev.state,
            dev.weights,
            gold=dev.gold,
            honest_by_set=result.honest_by_set,
            seed=seed,
            resamples=resamples,
        ),
        curve_criterion=curve_criterion,
        criteria=tuple(_criterion_result(name, results[name], values) for name, values in scores.items()),
        choices=choices(scores[criterion], *asked),
        curse=winners_curse(scores["dev_accuracy"], result.accuracy),
        noise_dev=noise_within_sets(dev.correct, dev.state, dev.weights, dev.classes),
        noise_test=noise_within_sets(test.correct, test.state, test.weights, test.classes),
        open_choice=_open_choice(criterion, dev, result),
        features=_feature_results(features or {}, _pooled_accuracy(on_dev, stats.accuracy(*asked))),
        recency=None
        if last_labels is None or test.predictions is None
        else recency_bias(test.predictions, last_labels, test.state, test.weights),
        warnings=(),
    )
    return replace(found, warnings=tuple(_warnings(found)))


def findings(run: FinishedRun) -> SearchFindings | AdaptiveFindings:
    """The findings of a run that has a dev split, at its largest number of shots; the study names the criterion.
    Of a run that asked in waves `AdaptiveFindings`.

    Raises DataError without a dev split. Features are left out, with a warning, where the demonstrations' texts cannot
    be had.
    """
    if "dev" not in run.splits:
        raise DataError("this run has no dev queries to choose by; run the study with 'dev_queries', such as 1000")
    if run.decisions:
        return adaptive.findings(run)
    features, last_labels, warning = _features(run)
    found = search_findings(
        _answers(run, "test"),
        _answers(run, "dev"),
        criterion=run.study.criterion,
        shots=run.shots[-1],
        features=features,
        last_labels=last_labels,
        seed=run.study.seed,
        title=f"{run.title}, k = {run.shots[-1]}",
    )
    return replace(found, warnings=(*found.warnings, *warning), bearing=_bearing(run, found))


def _bearing(run: FinishedRun, found: SearchFindings) -> Bearing:
    """What the answers on test, of a random ordering and of the chosen ones, and the number of dev queries can bear."""
    test, sets = run.splits["test"], np.arange(len(found.result.chosen))
    correct, state = test.correct[:, :, -1], test.state[:, :, -1]
    chosen = sets, found.result.chosen
    bears = of_run(run, [by_query(correct, state), by_query(correct[chosen], state[chosen])], permutations=1)
    gain = found.result.gain
    if covers_everything(gain.low, gain.high, "difference"):
        words = "what choosing gains is not bounded"
        bears = bears.with_reasons([Reason("interval", words, "more sets and queries")])
    return bears


def dev_scores(run: FinishedRun) -> dict[str, FloatArray]:
    """Every criterion [S, P] on the dev split of a run, at its largest number of shots."""
    return _scores(_answers(run, "dev"))


def _scores(dev: Answers) -> dict[str, FloatArray]:
    if dev.predictions is None:
        return {"dev_accuracy": stats.accuracy(dev.correct, dev.state, dev.weights).values}
    found = criteria_scores(
        dev.correct, dev.predictions, dev.state, dev.weights, label_scores=dev.label_scores, gold=dev.gold
    )
    return {name: values for name, values in found.items() if not dev.is_open or name not in COUNT_LABELS}


def _answers(run: FinishedRun, split: str) -> Answers:
    items, num_labels = run.splits[split], len(run.shared_labels)
    return Answers(
        items.correct[:, :, -1],
        items.state[:, :, -1],
        items.weights,
        items.gold,
        _compared(items, num_labels),
        items.scores_by_cell(slice(-1, None)) if items.has_scores else None,
        is_open=not num_labels,
        classes=classes_by_design(run, split),
    )


def _compared(items: Items, num_labels: int) -> npt.NDArray[np.signedinteger[Any]]:
    """A number for each answer [S, P, Q], equal for equal answers; where any may be given, within one query only."""
    answers = items.context_prediction[items.context_of[:, :, -1]]
    return answers if num_labels else dense(answers)


def _features(run: FinishedRun) -> tuple[dict[str, FloatArray], npt.NDArray[np.int64] | None, list[str]]:
    """Features of the orderings, their last labels, and a warning where the data cannot be read again."""
    try:
        shown = run.demonstrations
        texts, rows = shown.texts, np.unique(shown.rows)
        queries = [text for split in run.splits for text in shown.query_texts(split)]
    except (ConfigError, DataError) as error:
        return {}, None, [f"features of orderings are left out: {error}"]
    if shown.rows.shape[2] < 2:
        return {}, None, []
    words = [texts[int(row)] for row in rows]
    place = np.searchsorted(rows, shown.rows)
    lengths = np.array([len(text) for text in words], dtype=np.float64)
    similarity = lexical_similarity(words, queries)
    features = ordering_features(shown.labels, run.shared_labels, lengths=lengths[place], similarity=similarity[place])
    return features, shown.labels[..., -1] if run.shared_labels else None, []


def _pooled_accuracy(dev: stats.Accuracy, test: stats.Accuracy) -> FloatArray:
    """[S, P] over the queries of both splits."""
    total = dev.num_queries + test.num_queries
    return np.asarray((dev.num_queries * dev.values + test.num_queries * test.values) / total)


def _open_choice(criterion: str, dev: Answers, result: Search) -> OpenChoice | None:
    """What missing answers on dev leave open; nothing without any. Of a criterion that is no share of right answers (or
    whose votes they would have) nothing is bounded."""
    if dev.state is None or not np.any(dev.state):
        return None
    found = open_choice(dev.correct, result.chosen, result.accuracy, dev.state, dev.weights)
    if criterion == "dev_accuracy":
        return found
    return OpenChoice(found.missing, len(result.chosen), math.nan, math.nan)


def _criterion_result(name: str, result: Search, scores: FloatArray) -> CriterionResult:
    related = rank_correlation(scores, result.accuracy, crossed=True)
    return CriterionResult(name, result.highest_dev, result.gain, result.gap_closed, related)


def _feature_results(features: Mapping[str, npt.ArrayLike], accuracy: FloatArray) -> tuple[FeatureResult, ...]:
    related = {name: rank_correlation(values, accuracy, crossed=True) for name, values in features.items()}
    adjusted = holm([c.p_value for c in related.values()])
    return tuple(FeatureResult(name, c, float(p)) for (name, c), p in zip(related.items(), adjusted, strict=True))


def _warnings(found: SearchFindings) -> Iterator[str]:
    if found.num_permutations < 2:
        return
    if found.curse.tau2.estimate <= 0:
        yield (
            "dev and test accuracy do not go together over permutations: what was chosen here was chosen by chance, "
            "or orders do not differ"
        )
    if len(found.result.accuracy) == 1:
        yield "there is one set only: nothing bounds what other sets would give"
    if found.result.filled:
        yield filled_words(found.result.filled)
    if found.open_choice is not None and not found.open_choice.num_open:
        yield (
            f"{percent(found.open_choice.missing)} of the dev answers are missing; whatever they would have been, the "
            "same orderings would have been chosen"
        )
    if found.curve_criterion != found.criterion:
        yield f"the curve over dev queries is that of {found.curve_criterion}; {found.criterion} has none"
