"""Scores of demonstrations against their oracles, their exact identities, and planted truths."""

from __future__ import annotations

import math
import time
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iclperm.errors import RequestError
from iclperm.reference import demonstrations as reference
from iclperm.stats import accuracy as accuracy_of
from iclperm.stats import choosing, reliability
from iclperm.stats import demonstrations as scores
from iclperm.stats.texts import diversity, similarity

Array = npt.NDArray[Any]
seeds = st.integers(0, 2**32 - 1)
shapes = st.tuples(st.integers(1, 3), st.integers(2, 5), st.integers(1, 4))
few = settings(max_examples=30, deadline=None)


def orders_of(generator: np.random.Generator, num_permutations: int, num: int) -> Array:
    return np.stack([generator.permutation(num) for _ in range(num_permutations)])


def drawn(seed: int, shape: tuple[int, int, int]) -> tuple[Array, Array]:
    """Accuracy of prefixes [S, P, K + 1] in tenths, so that ties happen, and orders [P, K]."""
    generator = np.random.default_rng(seed)
    num_sets, num_permutations, num = shape
    return generator.integers(0, 11, (num_sets, num_permutations, num + 1)) / 10, orders_of(
        generator, num_permutations, num
    )


def some_shots(seed: int, num: int) -> list[int]:
    """An ascending list of shots that holds 0 < k <= num."""
    generator = np.random.default_rng([seed, 1])
    kept = sorted({int(generator.integers(1, num + 1)), *np.flatnonzero(generator.random(num + 1) < 0.6).tolist()})
    return kept


def additive(orders: Array, worth: Array) -> Array:
    """Accuracy [S, P, K + 1] where every demonstration adds its worth [S, K], wherever it stands."""
    gains = np.take_along_axis(
        np.broadcast_to(worth[:, None], (len(worth), *orders.shape)),
        np.broadcast_to(orders, (len(worth), *orders.shape)),
        2,
    )
    return np.concatenate([np.zeros((*gains.shape[:2], 1)), np.cumsum(gains, axis=2)], axis=2)


def items_of(accuracy: Array, num_queries: int, generator: np.random.Generator) -> Array:
    """Answers [S, P, N, Q], right with the given probability."""
    return (generator.random((*accuracy.shape, num_queries)) < accuracy[..., None]).astype(np.uint8)


class TestAgainstTheOracles:
    @few
    @given(seeds, shapes)
    def test_mean_contributions(self, seed: int, shape: tuple[int, int, int]) -> None:
        accuracy, orders = drawn(seed, shape)
        shots = list(range(shape[2] + 1))
        for name in ("shapley", "marginal", "prefix", "single"):
            found = scores.SCORES[name](accuracy, orders)
            values, se = reference.mean_contribution(accuracy, orders, shots, name)
            np.testing.assert_allclose(found.values, values, atol=1e-9, err_msg=name)
            np.testing.assert_allclose(found.se, se, atol=1e-9, err_msg=name)

    @few
    @given(seeds, shapes)
    def test_with_any_list_of_shots(self, seed: int, shape: tuple[int, int, int]) -> None:
        accuracy, orders = drawn(seed, shape)
        shots = some_shots(seed, shape[2])
        accuracy = accuracy[:, :, shots]
        for name, found in scores.demonstration_scores(accuracy, orders, shots).items():
            if name in ("marginal", "prefix", "single"):
                values, _ = reference.mean_contribution(accuracy, orders, shots, name)
            elif name in ("member", "condacc"):
                values = reference.over_prefixes(accuracy, orders, shots, name == "member")
            elif name == "stability":
                values = reference.stability(accuracy, orders, shots, "marginal")
            elif name == "influence":
                values, se = reference.influence(accuracy, orders, shots)
                np.testing.assert_allclose(found.se, se, atol=1e-7)
            else:
                assert shots == list(range(shape[2] + 1))
                continue
            np.testing.assert_allclose(found.values, values, atol=1e-7, err_msg=name)

    @few
    @given(seeds, shapes, st.sampled_from([0.0, 0.15, 0.35]))
    def test_truncated_shapley(self, seed: int, shape: tuple[int, int, int], tolerance: float) -> None:
        accuracy, orders = drawn(seed, shape)
        accuracy += 1e-3 * np.random.default_rng(seed).random(accuracy.shape)  # no distance is the tolerance itself
        found = scores.truncated_shapley(accuracy, orders, tolerance=tolerance)
        values, truncated = reference.truncated_shapley(accuracy, orders, tolerance)
        np.testing.assert_allclose(found.values, values, atol=1e-9)
        assert found.truncated == pytest.approx(truncated)
        if tolerance == 0:
            np.testing.assert_allclose(found.values, scores.shapley(accuracy, orders).values, atol=1e-12)
            assert found.truncated == 0

    @few
    @given(seeds, shapes, st.sampled_from([0.1, 3.0]))
    def test_datamodel(self, seed: int, shape: tuple[int, int, int], ridge: float) -> None:
        accuracy, orders = drawn(seed, shape)
        shots = list(range(shape[2] + 1))
        found = scores.datamodel(accuracy, orders, ridge=ridge)
        np.testing.assert_allclose(found, reference.datamodel(accuracy, orders, shots, ridge), atol=1e-8)

    def test_stability_of_the_prefix(self) -> None:
        accuracy, orders = drawn(3, (2, 6, 3))
        found = scores.stability(accuracy, orders, of="prefix").values
        np.testing.assert_allclose(found, reference.stability(accuracy, orders, [0, 1, 2, 3], "prefix"), atol=1e-9)

    @few
    @given(seeds, st.integers(1, 3), st.integers(2, 5))
    def test_diversity(self, seed: int, num_sets: int, num: int) -> None:
        generator = np.random.default_rng(seed)
        table = generator.random((num_sets, num, num))
        table = table + table.swapaxes(1, 2)
        np.testing.assert_allclose(diversity(table), reference.diversity(table))


class TestIdentities:
    @few
    @given(seeds, shapes)
    def test_shapley_values_of_a_set_sum_to_its_whole_gain(self, seed: int, shape: tuple[int, int, int]) -> None:
        accuracy, orders = drawn(seed, shape)
        gain = (accuracy[:, :, -1] - accuracy[:, :, 0]).mean(axis=1)
        np.testing.assert_allclose(scores.shapley(accuracy, orders).values.sum(axis=1), gain, atol=1e-12)

    def test_all_orders_give_the_shapley_values_of_the_definition(self) -> None:
        orders = np.array(list(permutations(range(4))))
        generator = np.random.default_rng(0)
        game = {frozenset(e for e in range(4) if number >> e & 1): generator.random() for number in range(16)}
        accuracy = np.array([[[game[frozenset(order[:k].tolist())] for k in range(5)] for order in orders]])
        expected = reference.exact_shapley(game.__getitem__, 4)
        np.testing.assert_allclose(scores.shapley(accuracy, orders).values[0], expected, atol=1e-12)

    @few
    @given(seeds, shapes)
    def test_renaming_demonstrations_renames_their_scores(self, seed: int, shape: tuple[int, int, int]) -> None:
        accuracy, orders = drawn(seed, shape)
        names = np.random.default_rng(seed).permutation(shape[2])
        own = np.broadcast_to(orders, (shape[0], *orders.shape))
        for name, found in scores.demonstration_scores(accuracy, orders).items():
            renamed = scores.SCORES[name](accuracy, names[orders]).values
            np.testing.assert_allclose(renamed[:, names], found.values, atol=1e-9, err_msg=name)
            each = scores.SCORES[name](accuracy, own)
            np.testing.assert_allclose(each.values, found.values, atol=1e-12, err_msg=name)
            np.testing.assert_allclose(each.se, found.se, atol=1e-12, err_msg=name)

    @pytest.mark.parametrize("rise", [0.0, 0.1])
    def test_where_orders_do_not_matter_every_score_is_zero_or_the_level(self, rise: float) -> None:
        orders = orders_of(np.random.default_rng(0), 6, 4)
        accuracy = np.broadcast_to(0.3 + rise * np.arange(5), (2, 6, 5))  # 0.1 steps: no exact binary numbers
        found = scores.demonstration_scores(accuracy, orders)
        for name in ("marginal", "prefix", "member", "stability"):
            assert (found[name].values == 0).all(), name
        np.testing.assert_allclose(found["influence"].values, 0, atol=1e-15)
        np.testing.assert_allclose(found["shapley"].values, rise)
        np.testing.assert_allclose(found["condacc"].values, 0.3 + 2.5 * rise)

    def test_additive_worth_is_returned_by_shapley_and_ordered_by_all(self) -> None:
        generator = np.random.default_rng(1)
        orders = orders_of(generator, 400, 6)
        worth = np.array([[0.1, -0.05, 0.02, 0.0, 0.06, -0.1], [0.0, 0.0, 0.0, 0.2, 0.0, 0.0]])
        accuracy = additive(orders, worth)
        np.testing.assert_allclose(scores.shapley(accuracy, orders).values, worth, atol=1e-12)
        np.testing.assert_allclose(scores.shapley(accuracy, orders).se, 0, atol=1e-12)
        for name, found in scores.demonstration_scores(accuracy, orders).items():
            assert found.values[1].argmax() == 3, name
            if name not in ("stability", "truncated"):
                assert (found.values[0].argsort() == worth[0].argsort()).all(), name

    def test_symmetric_demonstrations_score_alike(self) -> None:
        generator = np.random.default_rng(2)
        orders = orders_of(generator, 200, 4)
        both = np.concatenate([orders, np.array([1, 0, 2, 3])[orders]])  # with 0 and 1 exchanged
        accuracy = additive(both, np.array([[0.1, 0.1, 0.3, -0.2]])) ** 2
        for name, found in scores.demonstration_scores(accuracy, both).items():
            assert found.values[0, 0] == pytest.approx(found.values[0, 1]), name

    def test_influence_and_condacc_at_one_k_are_plain_means(self) -> None:
        accuracy, orders = drawn(5, (1, 7, 4))
        values = accuracy[:, :, [2]]
        there = np.array([0 in order[:2] for order in orders])
        found = scores.influence(values, orders, [2]).values[0, 0]
        assert found == pytest.approx(values[0, there, 0].mean() - values[0, ~there, 0].mean())
        assert scores.condacc(values, orders, [2]).values[0, 0] == pytest.approx(values[0, there, 0].mean())

    def test_datamodel_finds_a_demonstration_that_helps_at_the_end_only(self) -> None:
        generator = np.random.default_rng(3)
        orders = orders_of(generator, 300, 3)
        accuracy = np.zeros((1, 300, 4))
        accuracy[0, orders[:, 2] == 1, 3] = 0.3
        effects = scores.datamodel(accuracy, orders, ridge=0.01)
        assert np.unravel_index(effects[0].argmax(), (3, 3)) == (1, 2)

    def test_standard_errors_are_those_of_repeated_sampling(self) -> None:
        generator = np.random.default_rng(4)
        worth = generator.normal(0, 0.1, (1, 5))
        estimates, ses = [], []
        for _ in range(300):
            orders = orders_of(generator, 30, 5)
            found = scores.demonstration_scores(
                np.sqrt(1 + additive(orders, worth) ** 2 + additive(orders, worth)), orders
            )
            estimates.append([found[name].values[0] for name in ("shapley", "influence")])
            ses.append([found[name].se[0] for name in ("shapley", "influence")])
        ratio = np.sqrt(np.mean(np.square(ses), axis=0)) / np.std(estimates, axis=0)
        assert ((ratio > 0.8) & (ratio < 1.25)).all(), ratio


class TestSplitHalf:
    def planted(self, seed: int = 0, num_queries: int = 400) -> tuple[Array, Array]:
        generator = np.random.default_rng(seed)
        orders = orders_of(generator, 24, 5)
        worth = generator.normal(0, 0.06, (3, 5))
        return items_of(0.5 + additive(orders, worth).clip(-0.4, 0.4), num_queries, generator), orders

    def test_real_differences_are_reliable_and_noise_is_not(self) -> None:
        correct, orders = self.planted()
        found = reliability.split_half(correct, orders, names=["shapley", "member", "single"])
        assert found["shapley"].both > 0.8
        assert found["member"].both > 0.8
        assert found["single"].queries > 0.5
        assert math.isnan(found["single"].permutations)
        assert math.isnan(found["single"].both)
        noise = items_of(np.full((40, 24, 6), 0.5), 60, np.random.default_rng(0))
        assert np.abs(reliability.split_half(noise, orders, names=["shapley"])["shapley"]).max() < 0.2

    def test_noise_of_orderings_is_shared_by_the_queries_and_not_by_other_orderings(self) -> None:
        generator = np.random.default_rng(9)
        orders = orders_of(generator, 24, 5)
        chance = 0.5 + 0.15 * generator.standard_normal((30, 24, 6)).clip(-3, 3)
        found = reliability.split_half(items_of(chance, 300, generator), orders, names=["prefix"])["prefix"]
        assert found.queries > 0.9
        assert abs(found.permutations) < 0.2
        assert abs(found.both) < 0.2

    def test_it_predicts_the_correlation_of_two_independent_runs(self) -> None:
        generator = np.random.default_rng(8)
        worth = generator.normal(0, 0.02, (30, 5))
        first, second = (orders_of(generator, 12, 5) for _ in range(2))
        runs = [items_of(0.5 + additive(orders, worth), 60, generator) for orders in (first, second)]
        values = [
            scores.shapley(accuracy_of(run).values, orders).values
            for run, orders in zip(runs, (first, second), strict=True)
        ]
        told = reliability.split_half(runs[0], first, names=["shapley"], num_halves=20)["shapley"]
        assert told.both == pytest.approx(reference.within_sets_correlation(*values), abs=0.15)

    def test_queries_can_come_in_any_order_and_missing_ones_do_not_count(self) -> None:
        correct, orders = self.planted(num_queries=400)
        generator = np.random.default_rng(1)
        weights = generator.integers(1, 4, 400)
        state = np.zeros_like(correct)
        state[..., :40] = 1
        found = reliability.split_half(correct, orders, state=state, weights=weights, names=["shapley"])
        without = reliability.split_half(correct[..., 40:], orders, weights=weights[40:], names=["shapley"])
        order = generator.permutation(400)
        moved = reliability.split_half(
            correct[..., order], orders, state=state[..., order], weights=weights[order], names=["shapley"]
        )
        assert found["shapley"] == pytest.approx(without["shapley"], abs=0.05)
        assert found["shapley"] == pytest.approx(moved["shapley"], abs=0.05)
        assert found["shapley"].permutations == pytest.approx(without["shapley"].permutations)
        assert found == reliability.split_half(correct, orders, state=state, weights=weights, names=["shapley"])

    def test_too_few_permutations_or_queries_tell_nothing(self) -> None:
        correct, orders = self.planted()
        few = reliability.split_half(correct[:, :3], orders[:3], names=["shapley"])["shapley"]
        assert math.isnan(few.permutations)
        assert math.isnan(few.both)
        assert not math.isnan(few.queries)
        one = reliability.split_half(correct[..., :1], orders, names=["shapley"])["shapley"]
        assert math.isnan(one.queries)
        assert math.isnan(one.both)


class TestChoices:
    def test_highest_takes_the_highest_lowest_positions_first_and_unknown_ones_last(self) -> None:
        table = [[0.1, 0.3, 0.3, math.nan, 0.2], [math.nan, math.nan, 1.0, math.nan, -1.0]]
        assert choosing.highest(table, 2).tolist() == [[1, 2], [2, 4]]
        assert choosing.highest(table, 3).tolist() == [[1, 2, 4], [0, 2, 4]]

    @few
    @given(seeds, st.integers(2, 6), st.data())
    def test_no_exchange_makes_the_most_diverse_more_diverse(self, seed: int, num: int, data: st.DataObject) -> None:
        wanted = data.draw(st.integers(1, num))
        table = np.random.default_rng(seed).random((1, num, num))
        table = (table + table.swapaxes(1, 2)) / 2
        (chosen,) = choosing.most_diverse(table, wanted).tolist()
        assert len(set(chosen)) == wanted
        now = reference.total_similarity(table[0], chosen)
        for out in chosen:
            for into in set(range(num)) - set(chosen):
                other = reference.total_similarity(table[0], [into, *(e for e in chosen if e != out)])
                assert other >= now - 1e-9

    def test_random_choice_is_keyed_by_seed_and_set(self) -> None:
        first = choosing.at_random(4, 20, 6, seed=1)
        assert (choosing.at_random(9, 20, 6, seed=1)[:4] == first).all()
        assert (choosing.at_random(4, 20, 6, seed=2) != first).any()
        assert all(len(set(row)) == 6 for row in first.tolist())

    def test_blend_weighs_both_alike_whatever_their_units(self) -> None:
        score, steadiness = np.array([[1.0, 2.0, 3.0]]), np.array([[300.0, 200.0, 100.0]])
        np.testing.assert_allclose(choosing.blend(score, steadiness), 0, atol=1e-12)
        np.testing.assert_allclose(choosing.blend(score, steadiness, 1.0), [[-1, 0, 1]], atol=1e-12)
        np.testing.assert_allclose(choosing.blend(np.ones((1, 3)), steadiness), [[0.5, 0, -0.5]], atol=1e-12)

    def test_every_strategy_finds_the_planted_demonstrations(self) -> None:
        generator = np.random.default_rng(6)
        orders = orders_of(generator, 60, 8)
        worth = np.array([[0.08, 0.08, 0, 0, 0, 0, -0.08, -0.08]])
        answers = items_of(0.4 + additive(orders, worth).clip(-0.3, 0.5), 600, generator)
        found = {
            name: score.values
            for name, score in scores.demonstration_scores(accuracy_of(answers).values, orders).items()
        }
        texts = ["a b", "c d", *["x y"] * 6]
        chosen = choosing.select(found, 2, similarities=similarity(texts)[None], seed=3)
        assert list(chosen) == list(choosing.STRATEGIES)
        for strategy in ("top", "shapley", "stable", "blend", "single"):
            assert chosen[strategy].tolist() == [[0, 1]], strategy
        assert chosen["bottom"].tolist() == [[6, 7]]
        assert chosen["diverse"].tolist() == [[0, 1]]
        assert all(rows.dtype == np.int64 for rows in chosen.values())
        assert list(choosing.select({"marginal": found["marginal"]}, 2)) == ["random", "top", "bottom"]

    def test_similarity_is_the_share_of_common_words(self) -> None:
        table = similarity(["Tea for two", "two for tea, TEA!", "coffee for one", ""])
        assert table[0].tolist() == [1, 1, 0.2, 0]
        assert table[3, 3] == 1


class TestBadInput:
    def test_what_does_not_fit_is_refused(self) -> None:
        accuracy, orders = drawn(0, (2, 3, 4))
        for wrong, message in (
            ((accuracy[0], orders), r"must have shape \[S, P, N\]"),
            ((accuracy, orders.astype(float)), "orders must be integers"),
            ((accuracy, orders[:2]), "do not fit accuracy"),
            ((accuracy, orders * 0), r"must be a permutation of 0\.\.3"),
            ((accuracy[:, :, :3], orders), r"shots must be 3 ascending numbers in 0\.\.4"),
            ((accuracy[:, :, :2], orders, [1, 1]), "ascending"),
            ((accuracy[:, :, :2], orders, [1, 5]), "ascending"),
            ((accuracy[:, :, :2], orders, [1, 2]), r"every number of shots 0\.\.4"),
            ((np.where(accuracy >= 0, np.nan, 0), orders), "holds a NaN"),
        ):
            with pytest.raises(RequestError, match=message):
                scores.shapley(*wrong)
        with pytest.raises(RequestError, match="two neighbouring"):
            scores.marginal(accuracy[:, :, [0, 2]], orders, [0, 2])
        with pytest.raises(RequestError, match="needs k = 1"):
            scores.single(accuracy[:, :, [2]], orders, [2])
        with pytest.raises(RequestError, match="say nothing"):
            scores.demonstration_scores(accuracy[:, :, [0]], orders, [0])
        with pytest.raises(RequestError, match="unknown score 'best'"):
            scores.demonstration_scores(accuracy, orders, names=["best"])
        with pytest.raises(RequestError, match="tolerance must be"):
            scores.truncated_shapley(accuracy, orders, tolerance=-1)
        with pytest.raises(RequestError, match="ridge must be"):
            scores.datamodel(accuracy, orders, ridge=0)
        with pytest.raises(RequestError, match="stability is of"):
            scores.stability(accuracy, orders, of="member")  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="cannot choose 5"):
            choosing.highest(accuracy[:, 0, :4], 5)
        with pytest.raises(RequestError, match="no such strategy"):
            choosing.select({"marginal": accuracy[:, 0, :4]}, 2, strategies=["best"])
        with pytest.raises(RequestError, match="texts are missing"):
            choosing.select({"marginal": accuracy[:, 0, :4]}, 2, strategies=["diverse"])

    def test_one_permutation_has_no_z_and_no_standard_error(self) -> None:
        accuracy, orders = drawn(0, (2, 1, 3))
        found = scores.demonstration_scores(accuracy, orders)
        for name in ("marginal", "prefix", "member", "stability"):
            assert np.isnan(found[name].values).all(), name
        np.testing.assert_allclose(
            found["shapley"].values, reference.mean_contribution(accuracy, orders, [0, 1, 2, 3], "shapley")[0]
        )
        assert all(np.isnan(score.se).all() for score in found.values())

    def test_a_demonstration_that_never_stands_first_has_no_accuracy_alone(self) -> None:
        accuracy, _ = drawn(0, (1, 2, 2))
        found = scores.single(accuracy, np.array([[0, 1], [0, 1]]))
        assert np.isnan(found.values[0]).tolist() == [False, True]
        assert np.isnan(scores.influence(accuracy, np.array([[0, 1], [0, 1]])).values).all()


def test_a_large_curve_takes_under_a_second() -> None:
    generator = np.random.default_rng(0)
    accuracy = generator.random((10, 1000, 65))
    orders = orders_of(generator, 1000, 64)
    scores.demonstration_scores(accuracy[:, :10], orders[:10])
    begin = time.process_time()
    found = scores.demonstration_scores(
        accuracy, orders, names=["shapley", "marginal", "prefix", "member", "stability"]
    )
    assert time.process_time() - begin < 2.0  # 0.5 s on a quiet machine
    assert all(score.values.shape == (10, 64) for score in found.values())
