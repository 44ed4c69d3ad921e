"""The search for an ordering: against plain loops, enumeration, and simulations with known truth."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import make_model, make_task

import iclperm
from iclperm import stats
from iclperm.errors import DataError, RequestError
from iclperm.reference import search as reference
from iclperm.report import figures
from iclperm.report.parts import plain
from iclperm.stats import search as module
from iclperm.stats import search_curves
from iclperm.stats.criteria import CRITERIA, criteria_scores, majority_agreement
from iclperm.stats.incomplete import filled
from iclperm.stats.search import choices, choose, open_choice, search
from iclperm.stats.search_curves import dev_sizes, permutation_sizes, search_over_dev_queries, search_over_permutations
from iclperm.stats.winners_curse import expected_maximum, noise_within_sets, winners_curse
from iclperm.studies.search import Answers, search_findings
from iclperm.studies.search_findings import SearchFindings

Array = npt.NDArray[Any]
seeds = st.integers(0, 2**32 - 1)
COLUMNS = ("average", "highest_dev", "honest", "maximum")


def simulated(
    seed: int, shape: tuple[int, int] = (6, 24), queries: tuple[int, int] = (300, 200), spread: float = 0.05
) -> tuple[Array, Array, Array]:
    """True accuracy [S, P] with sd `spread` over permutations, and independent answers to dev and test queries."""
    generator = np.random.default_rng(seed)
    truth = 0.7 + spread * generator.normal(size=shape)
    dev, test = ((generator.random((*shape, num)) < truth[..., None]).astype(np.uint8) for num in queries)
    return truth, dev, test


def answers(seed: int, shape: tuple[int, int, int], num_labels: int = 3) -> dict[str, Array]:
    """Random answers with all that goes with them; a few are not ok, and some queries count more than once."""
    generator = np.random.default_rng(seed)
    logprob = generator.normal(0, 2, (*shape, num_labels))
    predictions, gold = logprob.argmax(axis=3), generator.integers(0, num_labels, shape[2])
    state = (generator.random(shape) < 0.01).astype(np.uint8)
    state[..., 0] = 0
    return {
        "correct": (predictions == gold).astype(np.uint8),
        "predictions": np.where(state == 0, predictions, -1),
        "state": state,
        "weights": generator.integers(1, 4, shape[2]),
        "gold": gold,
        "logprob": np.where(state[..., None] == 0, logprob, np.nan),
    }


class TestSearch:
    @given(seeds)
    @settings(max_examples=25)
    def test_agrees_with_the_oracle(self, seed: int) -> None:
        made = answers(seed, (3, 4, 8))
        scores = np.random.default_rng(seed).integers(0, 3, (3, 4)) / 2
        found = search(scores, made["correct"], made["state"], made["weights"], halves=5, seed=7)
        whole = filled(made["correct"], made["state"], made["weights"])
        kept, correct, weights = whole.usable, whole.items, whole.weights.astype(int).tolist()
        want = reference.columns(scores, correct, weights)
        for name, values in want.items():
            assert found.by_set[name] == pytest.approx(values)
            assert getattr(found, name).estimate == pytest.approx(np.mean(values))
        if kept.sum() > 1 and whole.present is None:  # what is filled in rests on both halves
            halves = module.random_halves(int(kept.sum()), 5, 7)
            assert found.honest_by_set == pytest.approx(reference.honest(correct, weights, halves.tolist()))
        assert found.num_queries == kept.sum()
        average, highest, maximum = (float(np.mean(want[name])) for name in ("average", "highest_dev", "maximum"))
        assert found.gain.estimate == pytest.approx(highest - average)
        assert found.share.estimate == pytest.approx(highest / maximum if maximum else math.nan, nan_ok=True)
        if maximum - average > 1e-9:
            assert found.gap_closed.estimate == pytest.approx((highest - average) / (maximum - average))

    def test_the_interval_is_that_of_two_jackknives(self) -> None:
        _, dev, test = simulated(1, (4, 5), (40, 30))
        weights = np.random.default_rng(1).integers(1, 4, 30)
        found = search(dev.mean(axis=2), test, weights=weights).gap_closed
        want = reference.gap_interval(dev.mean(axis=2), test, weights.tolist(), 0.95)
        assert want[1] > 1
        assert (found.low, found.high) == pytest.approx((want[0], 1))  # no choice closes more than the gap
        assert plain(found)["bounded"]

    @given(seeds)
    @example(316)  # Max without one query is Average, but for a rounding
    @settings(max_examples=15)
    def test_the_order_of_queries_and_sets_changes_nothing(self, seed: int) -> None:
        made = answers(seed, (3, 4, 12))
        scores = np.random.default_rng(seed).random((3, 4))
        queries, sets = (np.random.default_rng(seed).permutation(size) for size in (12, 3))
        one = search(scores, made["correct"], made["state"], made["weights"])
        other = search(
            scores[sets],
            made["correct"][sets][..., queries],
            made["state"][sets][..., queries],
            made["weights"][queries],
        )
        for name in ("average", "highest_dev", "maximum", "gain", "share", "gap_closed"):
            assert getattr(other, name) == pytest.approx(getattr(one, name), nan_ok=True)

    def test_equal_orderings_leave_no_gap(self) -> None:
        answer = np.random.default_rng(2).integers(0, 2, (3, 1, 20))
        found = search(np.full((3, 5), 0.5), np.repeat(answer, 5, axis=1))
        assert found.chosen.tolist() == [0, 0, 0]
        assert found.gain.estimate == pytest.approx(0, abs=1e-15)
        assert math.isnan(found.gap_closed.estimate)
        assert found.share.estimate == 1
        assert found.honest.estimate == pytest.approx(found.average.estimate)

    def test_one_permutation_one_set_one_query(self) -> None:
        correct = np.random.default_rng(3).integers(0, 2, (3, 4, 20))
        alone = search(np.zeros((1, 4)), correct[:1])
        assert math.isnan(alone.gain.low)
        assert not math.isnan(alone.gain.estimate)
        single = search(np.zeros((3, 1)), correct[:, :1])
        assert single.average.estimate == single.maximum.estimate
        assert math.isnan(single.gap_closed.estimate)
        query = search(np.zeros((3, 4)), correct[..., :1])
        assert math.isnan(query.honest.estimate)
        assert math.isnan(query.average.low)

    def test_max_is_too_high_and_the_honest_oracle_too_low(self) -> None:
        leads = []
        for seed in range(20):
            truth, dev, test = simulated(seed, (10, 32), (300, 150), spread=0.02)
            found = search(dev.mean(axis=2), test, halves=20)
            best = truth.max(axis=1).mean()
            leads.append((found.maximum.estimate - best, found.honest.estimate - best))
        high, low = np.mean(leads, axis=0)
        assert high > 0.02
        assert -0.03 < low < 0

    def test_intervals_cover_what_other_sets_and_queries_would_give(self) -> None:
        covered = np.zeros(2)
        for seed in range(80):
            generator = np.random.default_rng(seed)
            sets, queries = 0.6 * generator.normal(size=(8, 1, 1)), generator.normal(size=60)
            logit = 0.8 + sets + queries + 0.3 * generator.normal(size=(8, 6, 1))
            test = generator.random((8, 6, 60)) < 1 / (1 + np.exp(-logit))
            found = search(generator.random((8, 6)), test, halves=0)
            draws = np.random.default_rng(0).normal(size=100_000) * math.sqrt(0.6**2 + 1 + 0.3**2)
            truth = float(np.mean(1 / (1 + np.exp(-0.8 - draws))))
            covered += [found.average.low <= truth <= found.average.high, found.gain.low <= 0 <= found.gain.high]
        assert (covered >= 0.88 * 80).all()
        assert covered[0] < 80


class TestCriteria:
    @given(seeds, st.integers(2, 4))
    @settings(max_examples=25)
    def test_agree_with_the_oracle(self, seed: int, num_labels: int) -> None:
        made = answers(seed, (2, 3, 7), num_labels)
        made["state"][:] = made["state"].any(axis=(0, 1))  # a query that fails, fails everywhere
        kept = ~made["state"].any(axis=(0, 1))
        cells = iter(made["logprob"].reshape(-1, *made["logprob"].shape[2:]))
        names = ("correct", "predictions", "state", "weights")
        found = criteria_scores(*(made[name] for name in names), label_scores=cells, gold=made["gold"])
        want = reference.criteria(
            made["correct"][..., kept],
            made["predictions"][..., kept],
            made["logprob"][:, :, kept],
            made["gold"][kept].tolist(),
            made["weights"][kept].tolist(),
        )
        assert tuple(found) == CRITERIA
        for name, values in want.items():
            np.testing.assert_allclose(found[name], values, atol=1e-12, err_msg=name)

    def test_without_label_scores_or_gold_there_are_fewer(self) -> None:
        made = answers(4, (2, 3, 7))
        asked = made["correct"], made["predictions"], made["state"]
        assert tuple(criteria_scores(*asked)) == CRITERIA[:3]
        cells = iter(made["logprob"].reshape(-1, 7, 3))
        assert tuple(criteria_scores(*asked, label_scores=cells)) == CRITERIA[:5]

    def test_ties_of_the_majority_go_to_the_lowest_label(self) -> None:
        assert majority_agreement([[[2, 0], [1, 0]]]).tolist() == [[[0, 1], [1, 1]]]

    def test_higher_is_better(self) -> None:
        """A model that answers one label for everything has the lowest entropies, and no information."""
        sure = np.array([[10.0, -10.0]] * 4)
        even = np.array([[0.1, 0.0], [0.0, 0.1]] * 2)
        apart = np.array([[10.0, -10.0], [-10.0, 10.0]] * 2)
        cells = np.stack([sure, even, apart])
        predictions = cells.argmax(axis=2)[None]
        gold = np.array([0, 1, 0, 1])
        found = criteria_scores(predictions == gold, predictions, label_scores=iter(cells), gold=gold)
        assert found["dev_accuracy"].tolist() == [[0.5, 1, 1]]
        assert found["global_entropy"][0] == pytest.approx([0, math.log(2), math.log(2)])
        assert found["local_entropy"].argmax() == 1
        assert found["mutual_information"].argmax() == 2
        assert found["dev_log_likelihood"].argmax() == 2


class TestCurves:
    def test_fewer_permutations_agree_with_every_subset(self) -> None:
        _, dev, test = simulated(5, (3, 7), (30, 20))
        curve = search_over_permutations(dev.mean(axis=2), test, sizes=[1, 3, 7], resamples=3000)
        for place, size in enumerate([1, 3, 7]):
            want = reference.over_permutations(dev.mean(axis=2), test.mean(axis=2), size)
            found = [getattr(curve, name).estimate[place] for name in ("average", "highest_dev", "maximum")]
            assert found == pytest.approx(want, abs=2e-3 if size < 7 else 1e-12)

    def test_the_last_size_is_the_search_itself(self) -> None:
        _, dev, test = simulated(6)
        weights = np.random.default_rng(6).integers(1, 3, dev.shape[2])
        scores = stats.accuracy(dev, weights=weights).values
        found = search(scores, test)
        over = search_over_permutations(scores, test, resamples=40)
        gold = np.arange(dev.shape[2]) % 3
        dev_curve = search_over_dev_queries(dev, test.mean(axis=2), dev_weights=weights, gold=gold, resamples=20)
        for curve in (over, dev_curve):
            for name in ("average", "highest_dev", "maximum"):
                assert getattr(curve, name).estimate[-1] == pytest.approx(getattr(found, name).estimate)
        assert over.honest.estimate[-1] == pytest.approx(found.honest.estimate, abs=5e-3)
        assert over.sizes.tolist() == [16, 24]
        assert dev_curve.sizes.tolist() == [50, 100, 250, weights.sum()]

    def test_more_permutations_and_more_dev_queries_find_more(self) -> None:
        truth, dev, test = simulated(7, (10, 64), (400, 400), spread=0.08)
        over = search_over_permutations(dev.mean(axis=2), test, resamples=60)
        assert (np.diff(over.highest_dev.estimate) > 0.005).all()
        assert (np.diff(over.maximum.estimate) > 0.005).all()
        assert np.ptp(over.average.estimate) < 0.005
        dev_curve = search_over_dev_queries(dev, test.mean(axis=2), resamples=60)
        assert dev_curve.highest_dev.estimate[0] < dev_curve.highest_dev.estimate[-1] - 0.01
        for curve in (over, dev_curve):
            inside = (curve.highest_dev.low <= curve.highest_dev.estimate) & (
                curve.highest_dev.estimate <= curve.highest_dev.high
            )
            assert inside.all()
        assert truth.std() > 0

    def test_the_honest_oracle_of_the_curve_is_never_above_max(self) -> None:
        """Halves that weigh differently count as they weigh: seven queries, one of which counts nine times."""
        generator = np.random.default_rng(11)
        weights = np.array([9, 1, 1, 1, 1, 1, 1])
        for missing in (0.0, 0.1):
            for seed in range(20):
                correct = generator.integers(0, 2, (2, 4, 7)).astype(np.uint8)
                state = (generator.random(correct.shape) < missing).astype(np.uint8)
                scores = generator.random((2, 4))
                curve = search_over_permutations(scores, correct, state, weights, resamples=20, seed=seed)
                assert (curve.honest.estimate <= curve.maximum.estimate + 1e-9).all()
                found = search(scores, correct, state, weights, halves=20, seed=seed)
                assert (found.honest_by_set <= found.by_set["maximum"] + 1e-9).all()

    def test_the_honest_oracle_of_the_curve_is_that_of_the_search_where_the_halves_are_the_same(self) -> None:
        generator = np.random.default_rng(12)
        correct, weights = generator.integers(0, 2, (3, 4, 9)).astype(np.uint8), generator.integers(1, 5, 9)
        scores = generator.random((3, 4))
        curve = search_over_permutations(scores, correct, None, weights, sizes=[4], resamples=64, seed=5)
        halves = module.random_halves(9, 64, 5).tolist()
        expected = reference.honest(correct, weights.tolist(), halves)
        assert curve.honest.estimate[-1] == pytest.approx(np.mean(expected), abs=1e-9)

    def test_a_curve_is_keyed_by_its_seed(self) -> None:
        _, dev, test = simulated(8)
        one, again, other = (
            search_over_permutations(dev.mean(axis=2), test, seed=seed, resamples=20) for seed in (1, 1, 2)
        )
        assert one.highest_dev.estimate.tolist() == again.highest_dev.estimate.tolist()
        assert one.highest_dev.estimate.tolist() != other.highest_dev.estimate.tolist()

    @given(seeds, st.lists(st.integers(1, 5), min_size=1, max_size=4))
    @settings(max_examples=40)
    def test_dev_queries_are_drawn_as_a_study_asks_them(self, seed: int, sizes: list[int]) -> None:
        edges = np.cumsum([0, *sizes])
        pools = [np.arange(low, high) for low, high in pairwise(edges)]
        draw = search_curves.DevDraw(np.random.default_rng(seed), pools)
        taken = [pool.tolist() for pool in draw._pools]
        assert sorted(map(sorted, taken)) == [pool.tolist() for pool in pools]
        for asked in range(1, 2 * edges[-1]):
            want = reference.asked_in_turn(taken, asked)
            assert draw.counts(asked).tolist() == [want[query] for query in range(edges[-1])]

    def test_sizes(self) -> None:
        assert permutation_sizes(128) == [16, 32, 64, 128]
        assert permutation_sizes(100) == [16, 32, 64, 100]
        assert permutation_sizes(10) == [2, 4, 8, 10]
        assert permutation_sizes(1) == [1]
        assert dev_sizes(1000) == [50, 100, 250, 500, 1000]
        assert dev_sizes(40) == [5, 10, 25, 40]

    def test_one_set_has_no_band(self) -> None:
        _, dev, test = simulated(9, (1, 6), (30, 20))
        curve = search_over_permutations(dev.mean(axis=2), test, resamples=10)
        assert np.isnan(curve.highest_dev.low).all()
        assert np.isfinite(curve.highest_dev.estimate).all()


class TestMissingDevAnswers:
    def test_the_curve_over_dev_queries_chooses_by_the_answers_there_are(self) -> None:
        """Of 20 drawn queries an ordering answered four: it is chosen as four answers can, not as all 400 would."""
        generator = np.random.default_rng(5)
        shape = (4, 2, 400)
        dev = (generator.random(shape) < np.array([0.5, 0.65])[:, None]).astype(np.uint8)
        state = (generator.random(shape) < 0.8).astype(np.uint8)
        found = search_over_dev_queries(dev, [[0.0, 1.0]] * 4, state, sizes=[20], resamples=200, seed=3)
        chosen = []
        for resample in range(200):
            stream = module.random_stream(3, "dev", resample)
            drawn = search_curves.DevDraw(stream, [np.arange(400)]).counts(20) > 0
            with np.errstate(invalid="ignore"):
                there = (state == 0) & drawn
                seen = np.nan_to_num((dev * there).sum(axis=2) / there.sum(axis=2), nan=-1)
            chosen.append(np.where(seen[:, 0] == seen[:, 1], 0.5, seen.argmax(axis=1)).mean())
        assert found.highest_dev.estimate[0] == pytest.approx(np.mean(chosen), abs=0.05)
        assert np.mean(chosen) < 0.75

    def test_an_ordering_that_answered_nothing_that_was_drawn_is_not_chosen(self) -> None:
        dev, state = np.zeros((1, 3, 50), np.uint8), np.zeros((1, 3, 50), np.uint8)
        dev[:, 0], state[:, 0, 1:] = 1, 1  # the best, with one answer
        found = search_over_dev_queries(dev, [[1.0, 0.0, 0.0]], state, sizes=[1], resamples=100)
        assert found.highest_dev.estimate[0] < 0.1

    @given(seeds)
    @settings(max_examples=30)
    def test_the_choices_that_are_open_are_those_of_every_way_to_answer(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        dev, test = generator.integers(0, 2, (2, 3, 5)), generator.random((2, 3))
        state = np.zeros(dev.shape, int)
        for place in generator.integers(0, dev.size, 4):
            state.flat[place] = 1
        chosen = choose(stats.accuracy(dev, state).values)
        found = open_choice(dev, chosen, test, state)
        could: list[set[int]] = [{int(p)} for p in chosen]
        lacking = np.argwhere(state)
        for answered in product((0, 1), repeat=len(lacking)):
            table = dev.copy()
            table[tuple(lacking.T)] = answered
            for s, counts in enumerate(table.sum(axis=2)):
                if counts[chosen[s]] < counts.max():
                    could[s] |= set(np.flatnonzero(counts == counts.max()).tolist())
        assert found.num_open == sum(len(one) > 1 for one in could)
        assert found.low == pytest.approx(np.mean([min(test[s, p] for p in one) for s, one in enumerate(could)]))
        assert found.high == pytest.approx(np.mean([max(test[s, p] for p in one) for s, one in enumerate(could)]))
        assert found.missing == pytest.approx((state != 0).mean())

    def test_a_choice_that_missing_answers_could_overturn_is_said(self) -> None:
        made = answers(16, (3, 6, 40))
        made["state"][np.random.default_rng(1).random((3, 6, 40)) < 0.1] = 1
        data = Answers(*(made[name] for name in _FIELDS))
        found = search_findings(data, data, resamples=5)
        assert found.open_choice is not None
        (told,) = [line for line in found.conclusion() if "could overturn the choice" in line]
        assert f"in {found.open_choice.num_open} of 3 sets" in told
        assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["open_choice"]["num_open"] > 0
        assert any("of the answers are missing" in line for line in found.warnings)
        by_votes = search_findings(data, data, criterion="majority_agreement", resamples=5)
        assert "how far is not known for majority_agreement" in " ".join(by_votes.conclusion())

    def test_a_choice_that_they_could_not_is_said_once(self) -> None:
        made = answers(16, (3, 6, 40))
        made["correct"][:] = 0
        made["correct"][:, 2] = 1
        data = Answers(*(made[name] for name in _FIELDS))
        found = search_findings(data, data, resamples=5)
        assert "could overturn the choice" not in " ".join(found.conclusion())
        assert any("the same orderings would have been chosen" in line for line in found.warnings)
        whole = search_findings(*[data._replace(state=None)] * 2, resamples=5)
        assert whole.open_choice is None
        assert not any("missing" in line for line in whole.warnings)


class TestWinnersCurse:
    @pytest.mark.parametrize("num", [1, 2, 16, 128, 5000])
    def test_expected_maximum_agrees_with_the_oracle(self, num: int) -> None:
        assert expected_maximum(num) == pytest.approx(reference.expected_maximum(num), abs=1e-8)

    def test_expected_maximum_as_tabled(self) -> None:
        assert [round(expected_maximum(num), 2) for num in (16, 32, 64, 128)] == [1.77, 2.07, 2.34, 2.59]

    def test_tau_agrees_with_the_oracle(self) -> None:
        _, dev, test = simulated(10)
        found = winners_curse(dev.mean(axis=2), test.mean(axis=2))
        assert found.tau2.estimate == pytest.approx(reference.covariance(dev.mean(axis=2), test.mean(axis=2)))
        by_set = [np.corrcoef(d, t)[0, 1] for d, t in zip(dev.mean(axis=2), test.mean(axis=2), strict=True)]
        assert found.correlation.by_set == pytest.approx(by_set)

    def test_spread_noise_and_gains_are_recovered(self) -> None:
        found = []
        for seed in range(30):
            truth, dev, test = simulated(seed, (10, 64), (250, 150), spread=0.03)
            curse = winners_curse(dev.mean(axis=2), test.mean(axis=2))
            best = (truth.max(axis=1) - truth.mean(axis=1)).mean()
            found.append([*curse[1:2], *curse[4:6], best, *curse[7:]])
        tau2, noise_dev, noise_test, best, gain, saw, top, saw_top, optimism, foreseen = (
            np.array([row[place] if place else row[0].estimate for row in found]).mean() for place in range(10)
        )
        variance = 0.7 * 0.3 - 0.03**2
        assert tau2 == pytest.approx(0.03**2, rel=0.1)
        assert (noise_dev, noise_test) == pytest.approx((variance / 250, variance / 150), rel=0.1)
        assert (gain, top) == pytest.approx((saw, best), rel=0.1)
        assert optimism == pytest.approx(foreseen, rel=0.1)
        assert saw_top > 1.2 * best

    def test_noise_agrees_with_the_oracle_and_forgets_shared_difficulty(self) -> None:
        _, dev, _ = simulated(11, (3, 5), (12, 2))
        assert noise_within_sets(dev) == pytest.approx(reference.noise_within_sets(dev))
        generator = np.random.default_rng(12)
        hard = (generator.random(400) < 0.7).astype(np.uint8)
        flips = generator.random((4, 20, 400)) < 0.05
        assert noise_within_sets(hard ^ flips) == pytest.approx(0.05 * 0.95 / 400, rel=0.1)
        assert noise_within_sets(np.broadcast_to(hard, (2, 3, 400))) == 0

    def test_degenerate(self) -> None:
        flat = winners_curse(np.full((3, 4), 0.5), np.full((3, 4), 0.5))
        assert (flat.tau2.estimate, flat.expected_gain, flat.observed_gain) == (0, 0, 0)
        assert math.isnan(flat.correlation.estimate)
        single = winners_curse(np.full((3, 1), 0.5), np.full((3, 1), 0.5))
        assert math.isnan(single.tau2.estimate)
        assert math.isnan(winners_curse(np.eye(4)[:1], np.eye(4)[:1]).tau2.low)
        assert math.isnan(noise_within_sets(np.ones((2, 1, 5), int)))


class TestChoices:
    def test_agree_with_plain_indexing(self) -> None:
        _, dev, test = simulated(13)
        weights = np.random.default_rng(13).integers(1, 4, test.shape[2])
        scores, on_test = dev.mean(axis=2), np.average(test, axis=2, weights=weights)
        nothing, order, best_set, both = choices(scores, test, weights=weights)
        assert nothing.accuracy == pytest.approx(on_test.mean())
        assert order.accuracy == pytest.approx(
            np.mean([row[p] for row, p in zip(on_test, choose(scores), strict=True)])
        )
        assert best_set.set == scores.mean(axis=1).argmax()
        assert best_set.accuracy == pytest.approx(on_test[best_set.set].mean())
        assert scores[both.set, both.permutation] == scores.max()
        assert both.accuracy == pytest.approx(on_test[both.set, both.permutation])
        assert [choice.oracle for choice in (nothing, order, best_set, both)] == pytest.approx(
            [on_test.mean(), on_test.max(axis=1).mean(), on_test.mean(axis=1).max(), on_test.max()]
        )
        for choice in (order, best_set, both):
            assert choice.gain.estimate == pytest.approx(choice.accuracy - nothing.accuracy)
            assert choice.gain.low < choice.gain.estimate < choice.gain.high

    def test_ties_go_to_the_lowest_set_and_permutation(self) -> None:
        _, _, best_set, both = choices(np.ones((3, 4)), np.ones((3, 4, 5), int))
        assert (best_set.set, both.set, both.permutation) == (0, 0, 0)


@pytest.fixture(scope="module")
def found() -> SearchFindings:
    """The findings of answers at random."""
    made = [answers(seed, (4, 20, num)) for seed, num in ((14, 60), (15, 90))]
    test, dev = (Answers(*(one[name] for name in _FIELDS)) for one in made)
    dev = dev._replace(label_scores=iter(made[1]["logprob"].reshape(-1, 90, 3)))
    features = {"longest run": np.random.default_rng(14).random((4, 20)), "constant": np.ones((4, 20))}
    return search_findings(
        test, dev, shots=3, features=features, last_labels=features["longest run"] > 0.5, resamples=20
    )


class TestFindings:
    def test_chance_is_called_chance(self, found: SearchFindings) -> None:
        told = " ".join(found.conclusion())
        assert "cannot be told from 0" in told
        assert "No feature of an ordering can be shown to go with accuracy" in told
        assert "At k = 3" in told
        assert "no recency bias can be shown" in told

    def test_tables_json_and_figure(self, found: SearchFindings, tmp_path: Path) -> None:
        brief, full = found.tables(False), found.tables(True)
        assert len(full) > len(brief) >= 3
        for table in full:
            assert all(len(row) == len(table.header) for row in table.rows)
        assert [row[0].removesuffix(" *") for row in brief[2].rows] == list(CRITERIA)
        content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
        assert content["result"]["gap_closed"]["estimate"] == found.result.gap_closed.estimate
        assert content["features"][1]["correlation"]["estimate"] is None
        for stem, plot in found.plots().items():
            assert all(path.stat().st_size > 5000 for path in figures.save(plot, tmp_path / stem))

    def test_where_all_orderings_answer_alike_nothing_is_certain(self) -> None:
        made = answers(18, (3, 1, 30))
        alike = {name: np.repeat(made[name], 6, axis=1) for name in ("correct", "state", "predictions")}
        data = Answers(*({**made, **alike}[name] for name in _FIELDS))
        found = search_findings(data, data, shots=3, resamples=5)
        told = found.conclusion()
        assert told[0].startswith("At k = 3, all 6 orderings of a set answer the ")
        assert "alike" in told[0]
        assert "+0.0 to" not in " ".join(told)
        (gain,) = [row for row in found.tables(True)[0].rows if row[0].startswith("gain")]
        assert gain[2] == "-"
        assert not any("0.0000 to 0.0000" in cell for table in found.tables(True) for row in table.rows for cell in row)

    def test_whom_the_joint_choice_speaks_of_is_said(self, found: SearchFindings) -> None:
        (line,) = [line for line in found.conclusion() if line.startswith("Beside a random ordering of a random set")]
        assert line.endswith("these intervals are for other test queries, with these very sets and orderings).")

    def test_bands_end_where_accuracies_do(self) -> None:
        """Sets at .9 and at .5: the lead of some added to the average of all is above 1."""
        generator = np.random.default_rng(3)
        chance = np.array([0.95, 0.95, 0.5])[:, None, None]
        lead = np.array([0.0, 0.0, 0.45])[:, None, None] * (np.arange(6) == 2)[:, None]
        correct = (generator.random((3, 6, 60)) < chance + lead).astype(np.uint8)
        data = Answers(correct, gold=np.zeros(60, np.int64), predictions=1 - correct.astype(np.int64))
        found = search_findings(data, data, resamples=40)
        for curve in (found.over_permutations, found.over_dev_queries):
            for band in (curve.average, curve.highest_dev, curve.honest, curve.maximum):
                assert np.all((band.low >= 0) & (band.high <= 1))
        assert found.over_permutations.maximum.high[-1] == 1

    def test_a_gain_that_never_varies_has_no_interval(self) -> None:
        correct = np.ones((3, 4, 30), np.uint8)
        correct[:, 1] = 0
        data = Answers(correct, gold=np.zeros(30, np.int64), predictions=1 - correct.astype(np.int64))
        told = search_findings(data, data, resamples=5).conclusion()
        assert told[0].endswith("+25.0 points, without an interval.")

    @pytest.mark.parametrize("criterion", CRITERIA[:3])
    def test_the_criterion_chooses(self, criterion: str) -> None:
        dev = answers(16, (3, 6, 40))
        data = Answers(*(dev[name] for name in _FIELDS))
        found = search_findings(data, data, criterion=criterion, resamples=5)
        scores = criteria_scores(dev["correct"], dev["predictions"], dev["state"], dev["weights"])
        assert found.result.chosen.tolist() == choose(scores[criterion]).tolist()
        assert any("the curve over dev queries" in line for line in found.warnings) == (criterion == "global_entropy")

    def test_one_set_and_one_permutation(self) -> None:
        made = answers(17, (1, 1, 30))
        data = Answers(*(made[name] for name in _FIELDS))
        found = search_findings(data, data, resamples=5)
        assert found.conclusion() == ["There is one permutation only, so there was nothing to choose."]
        json.dumps(found.to_dict(), allow_nan=False)
        assert found.tables(True)

    def test_a_study_from_end_to_end(self, tmp_path: Path) -> None:
        study = {"model": str(make_model(tmp_path / "model")), "task": str(make_task(tmp_path, data=_DATA))}
        study |= {"kind": "search", "sets": 3, "permutations": 4, "queries": 9, "dev_queries": 9}
        run = iclperm.run(iclperm.Study(**study), out=tmp_path / "run")
        found = run.findings()
        assert found.result.accuracy.shape == (3, 4)
        assert found.num_dev_queries == 9
        assert {feature.name for feature in found.features} >= {"last label is Red", "longer ones last"}
        assert len(found.criteria) == len(CRITERIA)
        assert found.recency is not None
        scores = run.splits["dev"].correct[:, :, -1].mean(axis=2)
        assert found.result.chosen.tolist() == choose(scores).tolist()

    def test_a_run_without_dev_queries_is_refused(self, tmp_path: Path) -> None:
        study = {"model": str(make_model(tmp_path / "model")), "task": str(make_task(tmp_path))}
        run = iclperm.run(iclperm.Study(sets=2, permutations=2, queries=4, **study), out=tmp_path / "run")
        with pytest.raises(DataError, match="no dev queries to choose by; run the study with 'dev_queries'"):
            run.findings("search")


_FIELDS = ("correct", "state", "weights", "gold", "predictions")
_DATA = {"train": "train.jsonl", "test": "test.jsonl", "dev": 0.4}
ITEMS = np.ones((2, 3, 4), int)
BAD_CALLS = [
    (lambda: search(np.ones((2, 3)), np.ones((2, 3), int)), "correct of shape [S, P, Q], got [2, 3]"),
    (lambda: search(np.ones((3, 2)), ITEMS), "scores must have shape [2, 3], got [3, 2]"),
    (lambda: search([[math.nan] * 3] * 2, ITEMS), "accuracy[0, 0] is nan"),
    (lambda: search(np.ones((2, 3)), ITEMS, np.ones((2, 3, 4), int)), "no query has an answer; see the states"),
    (lambda: criteria_scores(ITEMS, ITEMS[:1]), "predictions must have shape [2, 3, 4], got [1, 3, 4]"),
    (lambda: criteria_scores(ITEMS, ITEMS, label_scores=iter([np.zeros((4, 2))])), "must yield 6 cells, got 1"),
    (lambda: criteria_scores(ITEMS, ITEMS, label_scores=iter([np.full((4, 2), np.nan)])), "hold NaN in a query"),
    (lambda: majority_agreement([[0.5]]), "predictions must be integers [S, P, Q], got float64 [1, 1]"),
    (lambda: search_over_permutations(np.ones((2, 3)), ITEMS, sizes=[4]), "permutations from 1 to 3, got [4]"),
    (lambda: search_over_permutations(np.ones((2, 3)), ITEMS, level=2), "level must lie between 0 and 1"),
    (lambda: search_over_dev_queries(ITEMS, np.ones((2, 2))), "accuracy_on_test must have shape [2, 3]"),
    (lambda: search_over_dev_queries(ITEMS, np.ones((2, 3)), sizes=[0]), "dev queries from 1 to 4, got [0]"),
    (lambda: winners_curse(np.ones((2, 2)), np.ones((2, 3))), "dev_accuracy must have shape [2, 3], got [2, 2]"),
    (lambda: expected_maximum(0), "at least 1 value, got 0"),
    (
        lambda: search_findings(Answers(ITEMS), Answers(ITEMS), criterion="majority_agreement"),
        "criterion must be one of dev_accuracy, got 'majority_agreement'; others need the predictions",
    ),
    (
        lambda: search_findings(Answers(ITEMS), Answers(ITEMS, predictions=ITEMS), criterion="luck"),
        "criterion must be one of dev_accuracy, majority_agreement, global_entropy, got 'luck'",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS)
def test_bad_input_is_named(call: Any, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as error:
        call()
    assert "\n" not in str(error.value)
