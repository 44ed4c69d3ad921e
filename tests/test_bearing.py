"""What answers can bear: collapses, chance, too little of anything, and what keeps its conclusion."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iclperm.errors import RequestError
from iclperm.report.parts import interval_words, plain, points_with_bounds, spread_with_bounds, with_bounds
from iclperm.stats.classes import answered_shares, confusion
from iclperm.stats.intervals import POSSIBLE, Interval, bounded, possible
from iclperm.studies.bearing import LEAST_QUERIES, Bearing, Reason, by_query, of_answers
from iclperm.studies.curve import curve_findings
from iclperm.studies.selection import selection
from iclperm.studies.sensitivity import Sensitivity
from iclperm.studies.sensitivity_conclusion import interval_reasons
from iclperm.studies.sensitivity_summary import sensitivity_summary
from iclperm.studies.transfer import transfer

LABELS = ("World", "Sports", "Business", "Technology")
Array = npt.NDArray[Any]


def judged(predictions: Array, gold: Array, weights: Array | None = None) -> Bearing:
    """What predictions [S, P, Q] bear."""
    sets, permutations, _ = predictions.shape
    return of_answers(
        by_query(predictions == gold),
        sets=sets,
        permutations=permutations,
        weights=weights,
        gold=gold,
        labels=LABELS,
        answered=answered_shares(confusion(predictions.reshape(-1), np.tile(gold, sets * permutations), 4)),
    )


def good(generator: np.random.Generator, gold: Array, right: float = 0.7, shape: tuple[int, int] = (5, 5)) -> Array:
    """Right in so many of the answers, else any label."""
    size = (*shape, len(gold))
    return np.where(generator.random(size) < right, gold, generator.integers(0, 4, size))


@pytest.fixture
def generator() -> np.random.Generator:
    return np.random.default_rng(0)


GOLD = np.arange(200) % 4


def test_partial_credit_is_no_full_credit() -> None:
    grades = np.array([[0.5, 0.25, 1.0], [0.5, 0.75, 0.0]])
    state = np.array([[0, 0, 0], [0, 0, 3]])
    assert by_query(grades, state).tolist() == [*by_query(grades)[:2].tolist(), 1.0] == [0.5, 0.5, 1.0]


def about(found: Bearing) -> list[str]:
    return [reason.about for reason in found.reasons]


class TestCollapse:
    def test_two_of_four_labels_whatever_the_order(self, generator: np.random.Generator) -> None:
        """As a real model of 270 M did at k = 8: accuracy at chance, and yet an r was quoted."""
        predictions = generator.integers(0, 2, (10, 10, 200))
        correct = (predictions == GOLD).astype(np.uint8)
        summary = sensitivity_summary(correct)
        alone = Sensitivity(summary, (8,)).conclusion()
        assert any("This is the r to quote" in line for line in alone)
        found = judged(predictions, GOLD)
        assert about(found) == ["accuracy", "labels"]
        first, second = replace(Sensitivity(summary, (8,)), bearing=found).conclusion()
        assert first.startswith("Nothing can be concluded from these answers: accuracy, 2")
        assert " for other queries], cannot be told from chance, 25.0 %" in first
        assert "'Business' and 'Technology' are never answered (0.0 % of the answers, 50.0 % of the queries)" in first
        assert second.startswith("What would suffice: ")
        assert "r to quote" not in first + second

    def test_two_labels_answered_rightly_are_half_a_task(self) -> None:
        predictions = np.broadcast_to(np.where(GOLD < 2, GOLD, 0), (5, 5, 200))
        found = judged(predictions, GOLD)
        assert found.told_from is not None
        assert found.told_from.is_told
        assert about(found) == ["labels"]

    def test_one_label_that_is_hardly_ever_answered_is_a_caution(self, generator: np.random.Generator) -> None:
        predictions = good(generator, GOLD)
        predictions[predictions == 3] = np.where(generator.random(np.sum(predictions == 3)) < 0.03, 3, 0)
        found = judged(predictions, GOLD)
        assert found.can_conclude
        (caution,) = found.cautions
        assert caution.startswith("'Technology' is hardly ever answered (0.")
        assert found.told(["something"]) == ["something", caution]

    @pytest.mark.parametrize("label", range(4))
    def test_one_label_always(self, label: int) -> None:
        found = judged(np.full((3, 3, 200), label), GOLD)
        assert about(found) == ["accuracy", "labels"]

    def test_a_good_model_keeps_its_conclusion(self, generator: np.random.Generator) -> None:
        found = judged(good(generator, GOLD), GOLD)
        assert found == Bearing(told_from=found.told_from)
        assert found.told(["a", "b"]) == ["a", "b"]


class TestChance:
    def test_guessing_is_told_from_chance_as_rarely_as_the_level_says(self, generator: np.random.Generator) -> None:
        told = []
        for _ in range(1_000):
            ease = generator.uniform(0.05, 0.45, 200)  # some queries by far easier, in every context alike
            right = generator.random((4, 4, 200)) < ease
            found = of_answers(by_query(right), gold=GOLD, labels=LABELS).told_from
            assert found is not None
            told.append(found.is_told)
        # One side of a two-sided 95 %: 2.5 %, here 25 of 1,000 with sd 5; 5 sd never happens by chance.
        assert sum(told) <= 50

    def test_what_is_needed_would_tell_it(self, generator: np.random.Generator) -> None:
        right = generator.random((1, 100)) < 0.33
        found = of_answers(right[0].astype(float), gold=GOLD[:100], labels=LABELS).told_from
        assert found is not None
        assert found.needed is not None
        lead = found.accuracy.estimate - 0.25
        p = found.accuracy.estimate
        assert found.needed == pytest.approx((1.96 + 0.8416) ** 2 * p * (1 - p) / lead**2, rel=0.03)

    def test_the_commonest_label_is_the_reference_where_classes_are_not_alike(self) -> None:
        gold = np.array([0] * 180 + [1] * 20)
        always = of_answers(by_query(np.zeros((3, 200), int) == gold), gold=gold, labels=("yes", "no"))
        assert about(always) == ["accuracy"]
        assert "cannot be told from always naming 'yes', 90.0 %" in always.told([])[0]
        # 19 of 20 of the rare ones are found, for 30 of the others: fewer are right, yet answers depend on the query.
        careful = np.where(np.arange(200) < 150, 0, 1)
        found = of_answers(by_query((careful == gold)[None]), gold=gold, labels=("yes", "no"))
        assert found.can_conclude
        assert (
            "The answers do depend on the query: with every label counting alike 91.7 % are right" in found.cautions[0]
        )

    def test_below_chance_is_said(self, generator: np.random.Generator) -> None:
        found = of_answers(by_query(generator.random((4, 200)) < 0.1), gold=GOLD, labels=LABELS)
        assert "lies below chance" in found.told([])[0]

    def test_the_best_of_several_places_counts_and_shares_its_level(self, generator: np.random.Generator) -> None:
        right = np.stack([generator.random(200) < 0.25, generator.random(200) < 0.6]).astype(float)
        assert of_answers(right, gold=GOLD, labels=LABELS).can_conclude
        assert not of_answers(right[:1], gold=GOLD, labels=LABELS).can_conclude
        one = of_answers(right[1], gold=GOLD, labels=LABELS).told_from
        many = of_answers(np.repeat(right[1:], 20, axis=0), gold=GOLD, labels=LABELS).told_from
        assert one is not None
        assert many is not None
        assert many.accuracy.low < one.accuracy.low

    def test_weights_count_and_lower_what_queries_are_worth(self) -> None:
        weights = np.ones(60)
        weights[:2] = 100
        found = of_answers(np.ones(60), weights=weights)
        assert about(found) == ["queries"]
        assert "60 queries say too little of others (worth 3." in found.told([])[0]


class TestTooFew:
    @pytest.mark.parametrize(("sets", "permutations", "says"), [(2, 9, ["sets"]), (9, 2, ["permutations"]), (1, 1, [])])
    def test_sets_and_permutations(self, sets: int, permutations: int, says: list[str]) -> None:
        found = of_answers(np.ones(50), sets=sets, permutations=permutations)
        assert about(found) == says
        if says:
            assert f"3 {says[0]} at least" in found.told([])[1]
        assert about(of_answers(None, sets=sets, permutations=permutations)) == says

    def test_queries(self) -> None:
        right = np.ones(LEAST_QUERIES)
        assert of_answers(right).can_conclude
        assert about(of_answers(right[1:])) == ["queries"]
        right[0] = math.nan
        assert about(of_answers(right)) == ["queries"]

    def test_two_sets_of_eight_queries_transfer_nothing(self, generator: np.random.Generator) -> None:
        for _ in range(50):
            sources = {name: tuple(generator.random((2, 2, 6, 8)).round().mean(axis=3)) for name in "ab"}
            assert not transfer(sources).is_gain.any()  # type: ignore[arg-type]

    def test_sets_that_gain_alike_by_few_queries_are_no_gain(self) -> None:
        test = np.tile([0.5, 0.75], (4, 1))
        found = transfer({"a": (test, test), "b": (test, test)})
        assert (found.gain[0][0].low, found.gain[0][0].estimate) == (0.125, 0.125)
        assert np.isnan(found.p_gain).all()
        assert not found.is_gain.any()

    def test_two_sets_tell_no_strategies_apart(self, generator: np.random.Generator) -> None:
        correct = generator.random((2, 2, 4, 1, 200)) < np.array([0.3, 0.9])[:, None, None, None, None]
        found = selection(correct, strategies=("random", "top"), shots=(3,)).outcomes["top"]
        assert math.isnan(found.p_accuracy)
        assert (found.accuracy_side, found.is_steadier) == (0, False)

    def test_shapes_that_do_not_fit(self) -> None:
        with pytest.raises(RequestError, match=r"gold must have shape \[30\], got \[29\]"):
            of_answers(np.ones(30), gold=np.zeros(29, int), labels=LABELS)


class TestIntervals:
    @given(st.sampled_from(sorted(POSSIBLE)), st.floats(-3, 3), st.floats(0, 3), st.floats(0, 3))
    def test_nothing_beyond_what_is_possible(self, scale: Any, estimate: float, below: float, above: float) -> None:
        least, most = POSSIBLE[scale]
        estimate = min(max(estimate, least), most)
        wide = Interval(estimate, estimate - below, estimate + above, 0.95)
        cut = bounded(wide, scale)
        assert least <= cut.low <= cut.estimate <= cut.high <= most
        assert (cut.low, cut.high) == (max(wide.low, least), min(wide.high, most))
        assert plain(cut).get("bounded", False) == (wide.low < least or wide.high > most)
        assert ("bounded" in interval_words(cut)) == ("bounded" in plain(cut))

    def test_marked_in_words_and_json(self) -> None:
        wide = possible(sensitivity_summary(ANSWERS).effects or pytest.fail("no effects"))
        assert plain(wide)["order"]["high"] <= 0.5
        cut = bounded(Interval(0.1, 0.0, 7.03, 0.95), "spread")
        assert spread_with_bounds(cut) == "about ±10.0 points [0.0 to 50.0 (bounded)]"
        assert with_bounds(bounded(Interval(0.7, 0.363, 1.137, 0.95), "accuracy"), 4) == (
            "0.7000 [0.3630 to 1.0000 (bounded)]"
        )
        assert points_with_bounds(bounded(Interval(0.5, -0.2, 1.2, 0.95), "difference")).endswith(
            "[-20.0 to +100.0 (bounded)]"
        )
        unknown = bounded(Interval(math.nan, math.nan, math.nan, 0.95), "accuracy")
        assert "bounded" not in plain(unknown)

    def test_an_estimate_stays_within(self) -> None:
        """A standard deviation of two accuracies, 0 and 1, is .71 with ddof 1."""
        assert bounded(Interval(0.71, 0.2, 9.0, 0.95), "spread")[:3] == (0.71, 0.2, 0.71)

    def test_an_interval_of_all_that_is_possible_bears_nothing(self) -> None:
        summary = sensitivity_summary(np.random.default_rng(1).integers(0, 2, (2, 2, 6)))
        assert summary.effects is not None
        everything = Interval(0.1, 0.0, 7.0, 0.95)
        open_ended = replace(summary, effects=summary.effects._replace(order=everything))
        (reason,) = [one for one in interval_reasons(open_ended) if "order" in one.words]
        found = Sensitivity(open_ended, (4,), bearing=Bearing().with_reasons([reason]))
        assert "accuracy is not bounded" in " ".join(found.conclusion())
        content = found.to_dict()["sensitivity"]
        assert content["effects"]["order"] == {
            "estimate": 0.1, "low": 0.0, "high": 0.5, "level": 0.95, "bounded": True,
        }  # fmt: skip
        assert content["bearing"]["can_conclude"] is False
        assert json.loads(json.dumps(content, allow_nan=False)) == content

    def test_the_interval_of_a_curve_ends_at_one(self) -> None:
        correct = np.random.default_rng(2).random((3, 4, 2, 8)) < 0.93
        found = curve_findings(correct, shots=(1, 2))
        assert found.error.high.max() > 1
        error = found.to_dict()["error"]
        assert max(error["high"]) == 1
        assert error["bounded"] == (found.error.high > 1).tolist()
        assert "% (bounded), 95%, for new" in found.conclusion()[0]


ANSWERS = np.random.default_rng(3).integers(0, 2, (3, 3, 40))


def test_reasons_say_each_remedy_once() -> None:
    found = Bearing((Reason("sets", "a", "more"), Reason("queries", "b", "more"), Reason("labels", "c", "other")))
    assert found.told(["never said"]) == [
        "Nothing can be concluded from these answers: a; b; c.",
        "What would suffice: more; other.",
    ]
