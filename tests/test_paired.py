"""Paired comparisons, correlations and the product bootstrap against their oracles, statsmodels, and known truth."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats as distributions
from statsmodels.stats import contingency_tables, multitest

from iclperm import stats
from iclperm.errors import RequestError
from iclperm.reference import paired as reference
from iclperm.reference.stats import repeated
from iclperm.stats import components, paired
from iclperm.stats import grades as grades_module
from iclperm.stats.limits import ComputeLimits

Array = npt.NDArray[Any]

binary = st.integers(0, 1)
answers = st.integers(1, 12).flatmap(lambda num: hnp.arrays(np.uint8, (2, num), elements=binary))
contexts = st.tuples(st.integers(2, 5), st.integers(1, 12)).flatmap(
    lambda shape: hnp.arrays(np.uint8, shape, elements=binary)
)
sizes = st.integers(2, 5)
tensors = st.tuples(sizes, sizes, sizes).flatmap(lambda shape: hnp.arrays(np.uint8, shape, elements=binary))
scores = st.tuples(sizes, sizes, sizes).flatmap(
    lambda shape: hnp.arrays(np.float64, shape, elements=st.floats(-2, 2, allow_subnormal=False))
)
seeds = st.integers(0, 2**32 - 1)


class TestHolm:
    @given(st.lists(st.floats(0, 1), min_size=1, max_size=5))
    def test_agrees_with_its_definition(self, p_values: list[float]) -> None:
        np.testing.assert_array_equal(paired.holm(p_values), reference.holm(p_values))

    def test_agrees_with_statsmodels(self) -> None:
        p_values = np.random.default_rng(15).random(40) ** 4  # one call: it collects garbage
        expected = multitest.multipletests(p_values, method="holm")[1]
        np.testing.assert_allclose(paired.holm(p_values), expected, atol=1e-12)

    def test_a_test_that_could_not_be_made_is_not_counted(self) -> None:
        found = paired.holm([[0.01, math.nan], [0.04, 0.03]])
        np.testing.assert_allclose(found, [[0.03, math.nan], [0.06, 0.06]])
        assert np.isnan(paired.holm([math.nan])).all()
        assert paired.holm([]).size == 0

    @pytest.mark.parametrize("wrong", [-0.1, 1.5])
    def test_refuses_what_is_no_probability(self, wrong: float) -> None:
        with pytest.raises(RequestError, match=f"p-values must lie in 0..1, found {wrong}"):
            paired.holm([0.5, wrong])


class TestMcNemar:
    @given(answers)
    def test_agrees_with_the_oracle_and_with_statsmodels(self, pair: Array) -> None:
        found = paired.mcnemar(*pair)
        b, c = reference.discordant(*pair.tolist())
        assert (found.only_first, found.only_second, found.num_queries) == (b, c, pair.shape[1])
        assert (found.p_exact, found.p_mid) == pytest.approx(reference.mcnemar(b, c))
        assert found.p_exact == pytest.approx(contingency_tables.mcnemar([[0, b], [c, 0]], exact=True).pvalue)
        assert found.difference == pytest.approx(pair[0].mean() - pair[1].mean())
        assert found.se == pytest.approx(reference.paired_se(*pair.tolist()), abs=1e-12)
        assert found.se == pytest.approx(float(paired.paired_se(*pair)), abs=1e-15)

    @given(answers, seeds)
    def test_the_order_of_queries_is_irrelevant_and_exchange_turns_the_sign(self, pair: Array, seed: int) -> None:
        found = paired.mcnemar(*pair)
        assert paired.mcnemar(*pair[:, np.random.default_rng(seed).permutation(pair.shape[1])]) == found
        turned = paired.mcnemar(*pair[::-1])
        assert (turned.difference, turned.p_mid) == (-found.difference, found.p_mid)

    def test_equal_answers_show_no_difference(self) -> None:
        found = paired.mcnemar([1, 0, 1], [1, 0, 1])
        assert (found.difference, found.se, found.p_exact, found.p_mid) == (0, 0, 1, 1)

    def test_a_query_without_an_answer_is_left_out(self) -> None:
        found = paired.mcnemar([1, 1, 0], [0, 1, 0], [[0, 0, 0], [1, 0, 0]])
        assert (found.only_first, found.num_queries, found.p_exact) == (0, 2, 1)
        nothing = paired.mcnemar([1], [0], [[2], [0]])
        assert math.isnan(nothing.difference)
        assert math.isnan(nothing.se)

    def test_keeps_its_level_and_finds_a_difference(self) -> None:
        generator = np.random.default_rng(0)
        alike = [paired.mcnemar(*(generator.random((2, 200)) < 0.7)) for _ in range(1000)]
        assert 0.035 <= np.mean([test.p_mid <= 0.05 for test in alike]) <= 0.065
        assert np.mean([test.p_exact <= 0.05 for test in alike]) <= 0.055
        apart = [paired.mcnemar(generator.random(500) < 0.8, generator.random(500) < 0.65) for _ in range(50)]
        assert np.mean([test.p_mid <= 0.05 for test in apart]) > 0.9

    def test_refuses_what_does_not_fit(self) -> None:
        with pytest.raises(RequestError, match=r"one shape, got \[2\] and \[3\]"):
            paired.mcnemar([0, 1], [0, 1, 1])
        with pytest.raises(RequestError, match="only 0 and 1, found 2"):
            paired.mcnemar([0, 2], [0, 1])


class TestPairedErrors:
    def test_cell_by_cell(self) -> None:
        first, second = np.random.default_rng(1).integers(0, 2, (2, 3, 4, 9), dtype=np.uint8)
        found = paired.paired_se(first, second)
        for cell in np.ndindex(3, 4):
            assert found[cell] == pytest.approx(reference.paired_se(first[cell].tolist(), second[cell].tolist()))

    @given(scores, seeds, st.sampled_from([(0,), (1,), (-1,), (0, -1), (0, 1)]))
    def test_clustered_agrees_with_the_sandwich(self, first: Array, seed: int, axes: tuple[int, ...]) -> None:
        second = np.random.default_rng(seed).integers(0, 2, first.shape)
        found = paired.clustered_paired_se(first, second, axes)
        expected = reference.clustered_paired_se(first, second.astype(float), [axis % 3 for axis in axes])
        assert found == pytest.approx(expected, abs=1e-9)

    def test_one_cluster_a_query_is_the_paired_error_with_one_degree_less(self) -> None:
        first, second = np.random.default_rng(2).integers(0, 2, (2, 30), dtype=np.uint8)
        clustered = paired.clustered_paired_se(first, second)
        assert clustered == pytest.approx(float(paired.paired_se(first, second)) * math.sqrt(30 / 29))

    def test_covers_the_spread_over_new_sets(self) -> None:
        generator = np.random.default_rng(3)
        shape, means, errors = (8, 5, 20), [], []
        for _ in range(400):
            by_set = 0.1 * generator.standard_normal((8, 1, 1))
            difference = by_set + 0.3 * generator.standard_normal(shape)
            means.append(difference.mean())
            errors.append(paired.clustered_paired_se(difference, np.zeros(shape)))
        assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(np.std(means), rel=0.1)

    def test_one_level_has_no_error(self) -> None:
        assert math.isnan(paired.clustered_paired_se(np.ones((1, 4)), np.zeros((1, 4))))
        assert math.isnan(paired.clustered_paired_se(np.ones((3, 1)), np.zeros((3, 1)), (0, 1)))
        assert paired.clustered_paired_se(np.full((3, 4), 0.1), np.full((3, 4), 0.3), (0, 1)) == 0

    @pytest.mark.parametrize("axes", [(), (0, 0), (0, 1, 2), (3,), (0, -3)])
    def test_refuses_axes(self, axes: tuple[int, ...]) -> None:
        with pytest.raises(RequestError, match="axes must"):
            paired.clustered_paired_se(np.ones((2, 2, 2)), np.ones((2, 2, 2)), axes)


class TestPairedInterval:
    @given(answers)
    @settings(max_examples=15)
    def test_agrees_with_the_oracle(self, pair: Array) -> None:
        found = stats.paired_interval(*pair)
        expected = reference.paired_interval(*reference.discordant(*pair.tolist()), pair.shape[1])
        assert (found.low, found.high) == pytest.approx(expected, abs=1e-5)
        assert found.estimate == pytest.approx(paired.mcnemar(*pair).difference)

    def test_textbook(self) -> None:
        """Airway hyper-responsiveness before and after a transplant: Fagerland, Lydersen & Laake (2014), table 4."""
        before, after = [1] * 2 + [0] * 19, [1] + [0] + [1] * 7 + [0] * 12
        found = stats.paired_interval(before, after)
        assert [round(value, 3) for value in found[:3]] == [-0.286, -0.517, -0.026]

    @given(answers)
    @settings(max_examples=40)
    def test_has_width_stays_within_its_range_and_turns_with_the_contexts(self, pair: Array) -> None:
        found, turned = stats.paired_interval(*pair), stats.paired_interval(*pair[::-1])
        assert -1 <= found.low < found.high <= 1
        assert found.low <= found.estimate <= found.high
        assert (turned.low, turned.high) == pytest.approx((-found.high, -found.low), abs=1e-12)
        assert stats.paired_interval(*pair, level=0.99).high >= found.high

    @given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 30))
    def test_excludes_0_where_mcnemars_chi_square_does(self, b: int, c: int, rest: int) -> None:
        if b + c + rest == 0:
            return
        first, second = [1] * b + [0] * c + [1] * rest, [0] * b + [1] * c + [1] * rest
        low, high = stats.paired_interval(first, second)[1:3]
        assert (low > 0 or high < 0) == ((b - c) ** 2 > 1.959963984540054**2 * (b + c))

    @given(contexts)
    @settings(max_examples=15)
    def test_every_pair_has_its_own(self, correct: Array) -> None:
        found = paired.pairwise_mcnemar(correct)
        for place, (one, two) in enumerate(reference.pairs(len(correct))):
            expected = stats.paired_interval(correct[one], correct[two])
            assert (found.low[place], found.high[place]) == pytest.approx(expected[1:3])

    def test_takes_floats_that_are_all_0_or_1_and_tells_what_a_gap_needs(self) -> None:
        first, second = np.array([1.0, 0, 1, 1]), np.array([0.0, 0, 1, 0])
        whole = [each.astype(int) for each in (first, second)]
        for call in (stats.paired_interval, paired.mcnemar, paired.paired_se, paired.stratified_mcnemar):
            np.testing.assert_equal(call(first, second), call(*whole))
        gappy = np.array([1, np.nan, 1, 1])
        with pytest.raises(RequestError, match=r"got a NaN; give numpy\.nan_to_num\(x\), and state=numpy\.isnan\(x\)"):
            paired.mcnemar(gappy, second)
        given = np.nan_to_num(gappy), second
        found = paired.mcnemar(*given, state=np.isnan(np.stack([gappy, second])))
        assert found == paired.mcnemar(gappy[[0, 2, 3]], second[[0, 2, 3]])

    def test_heeds_the_state_and_refuses_grades(self) -> None:
        first, second = [1, 0, 1, 1], [0, 0, 1, 1]
        assert stats.paired_interval(first, second, [[1, 0, 0, 0], [0, 0, 0, 0]]) == stats.paired_interval(
            first[1:], second[1:]
        )
        assert math.isnan(stats.paired_interval(first, second, np.ones((2, 4))).low)
        for call, name in (
            (stats.paired_interval, "Tango's interval"),
            (paired.mcnemar, "McNemar's test"),
            (paired.paired_se, "the paired standard error"),
        ):
            with pytest.raises(RequestError, match=f"{name} needs answers 0 and 1, got others of float64"):
                call([0.5, 1.0], [0.0, 1.0])
        for call, name in ((paired.cochran_q, "Cochran's Q"), (paired.pairwise_mcnemar, "McNemar's test")):
            with pytest.raises(RequestError, match=f"{name} needs answers 0 and 1"):
                call(np.full((3, 4), 0.5))
        with pytest.raises(RequestError, match=r"answers \[Q\] of each, got \[1, 2, 2\]"):
            stats.paired_interval(np.eye(2, dtype=int)[None], np.eye(2, dtype=int)[None])


class TestGrades:
    @given(hnp.arrays(np.float64, st.tuples(st.integers(2, 4), st.integers(2, 9)), elements=st.floats(0, 1, width=16)))
    def test_agree_with_the_oracle_and_with_themselves(self, grades: Array) -> None:
        num = grades.shape[1]
        found = stats.paired_grades(grades[0], grades[1])
        quantile = float(distributions.t.ppf(0.975, num - 1))
        expected = reference.paired_grades(grades[0].tolist(), grades[1].tolist(), quantile)
        assert (found.se, found.low, found.high) == pytest.approx(expected, abs=1e-12)
        assert -1 <= found.low < found.high <= 1
        assert found.difference == pytest.approx(grades[0].mean() - grades[1].mean(), abs=1e-12)
        if found.low > -1 and found.high < 1:
            assert (found.p_value < 0.05) == (not found.low <= 0 <= found.high)
        pairs = grades_module.pairwise_grades(grades)
        assert (pairs.se[0], pairs.p_value[0], pairs.low[0]) == pytest.approx((found.se, found.p_value, found.low))
        np.testing.assert_allclose(pairs.adjusted, paired.holm(pairs.p_value))

    def test_the_mean_of_grades_has_students_interval(self) -> None:
        grades = np.random.default_rng(20).beta(3, 2, 40)
        found = grades_module.graded_mean(grades)
        low, high = distributions.t.interval(0.95, 39, grades.mean(), grades.std(ddof=1) / math.sqrt(40))
        assert found[:3] == pytest.approx((grades.mean(), low, high))
        equal = grades_module.graded_mean(np.full(8, 1.0))
        assert (equal.high, equal.low) == (1.0, pytest.approx(stats.wilson_interval(8, 8).low))
        assert math.isnan(grades_module.graded_mean([0.5]).low)

    def test_accuracy_and_its_error_take_grades(self) -> None:
        grades = np.random.default_rng(21).random((3, 4, 7))
        weights = np.arange(1.0, 8) / 3
        found = stats.accuracy(grades, None, weights)
        np.testing.assert_allclose(found.values, np.average(grades, axis=-1, weights=weights))
        np.testing.assert_allclose(stats.curve(grades[:, :, None]).mean, [grades.mean()])
        binary_grades = (grades > 0.5).astype(float)
        np.testing.assert_array_equal(
            stats.accuracy(binary_grades).values, stats.accuracy(binary_grades.astype(int)).values
        )
        assert stats.clustered_se(grades) == pytest.approx(grades.mean((0, 1)).std(ddof=1) / math.sqrt(7))
        for call in (
            lambda: stats.paired_grades([0.5, 0], [1, math.nan]),
            lambda: grades_module.graded_mean([0.5, math.nan]),
        ):
            with pytest.raises(RequestError, match="a grade is NaN and its state is ok; mark it in state"):
                call()


class TestCochranQ:
    @given(contexts)
    def test_agrees_with_the_oracle_and_with_statsmodels(self, correct: Array) -> None:
        found = paired.cochran_q(correct)
        assert found.statistic == pytest.approx(reference.cochran_q(correct), abs=1e-9)
        if found.num_informative:
            expected = contingency_tables.cochrans_q(correct.T)
            assert (found.statistic, found.p_value) == pytest.approx((expected.statistic, expected.pvalue), abs=1e-9)
        else:
            assert (found.statistic, found.p_value) == (0, 1)

    def test_leaves_out_what_one_context_could_not_answer(self) -> None:
        correct = np.random.default_rng(4).integers(0, 2, (4, 10))
        state = np.zeros(correct.shape, np.uint8)
        state[2, 3] = 1
        assert paired.cochran_q(correct, state) == paired.cochran_q(np.delete(correct, 3, axis=1))

    def test_keeps_its_level(self) -> None:
        generator = np.random.default_rng(5)
        difficulty = generator.random(150)
        rejected = [paired.cochran_q(generator.random((6, 150)) < difficulty).p_value <= 0.05 for _ in range(1000)]
        assert 0.03 <= np.mean(rejected) <= 0.07

    @given(contexts)
    @settings(max_examples=40)
    def test_every_pair_is_a_mcnemar_test(self, correct: Array) -> None:
        found = paired.pairwise_mcnemar(correct)
        assert list(zip(found.first, found.second, strict=True)) == reference.pairs(len(correct))
        tests = [paired.mcnemar(correct[i], correct[j]) for i, j in reference.pairs(len(correct))]
        np.testing.assert_allclose(found.p_mid, [test.p_mid for test in tests], atol=1e-12)
        np.testing.assert_allclose(found.difference, [test.difference for test in tests], atol=1e-12)
        np.testing.assert_allclose(found.se, [test.se for test in tests], atol=1e-12)
        np.testing.assert_array_equal(found.adjusted, paired.holm(found.p_mid))

    @pytest.mark.parametrize("test", [paired.cochran_q, paired.pairwise_mcnemar])
    def test_refuses_one_context(self, test: Any) -> None:
        with pytest.raises(RequestError, match="C >= 2"):
            test([[0, 1]])


class TestIntraclassCorrelation:
    @given(hnp.arrays(np.float64, (4, 3), elements=st.floats(0, 1, allow_subnormal=False)))
    def test_agrees_with_the_oracle(self, values: Array) -> None:
        if np.ptp(values) > 1e-3:
            found = paired.intraclass_correlation(values)
            assert found == pytest.approx(reference.intraclass_correlation(values), abs=1e-6)

    def test_constant_scores_have_none(self) -> None:
        assert math.isnan(paired.intraclass_correlation(np.full((3, 4), 0.1)))
        constant = stats.variance_components(np.ones((3, 4, 5), np.uint8))
        assert np.isnan(paired.intraclass_correlations(constant)).all()

    def test_recovers_what_was_put_in(self) -> None:
        generator = np.random.default_rng(6)
        groups = generator.standard_normal((4000, 1)) + 2 * generator.standard_normal((4000, 5))
        assert paired.intraclass_correlation(groups) == pytest.approx(0.2, abs=0.02)
        sigma2 = stats.Effects(S=0.1, P=0.2, I=1.0, SP=0.3, SI=0.4, PI=-0.5, SPI=1.0)
        exact = stats.VarianceComponents(2, 2, 2, sigma2, sigma2, sigma2)
        found = paired.intraclass_correlations(exact)
        assert found == pytest.approx(np.array([0.1, 0.2, 0.6, 1.0, 1.5, 1.2]) / 3)

    @pytest.mark.parametrize("shape", [(1, 3), (3, 1), (2, 2, 2)])
    def test_refuses_fewer_than_two(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(RequestError, match="at least 2 groups of 2"):
            paired.intraclass_correlation(np.zeros(shape))


class TestNestedComponents:
    @given(scores)
    def test_agree_with_the_oracle(self, values: Array) -> None:
        found = components.nested_components(values)
        expected = reference.nested_components(values)
        assert [getattr(found, name) for name in expected] == pytest.approx(list(expected.values()), abs=1e-8)

    @given(tensors, seeds)
    def test_the_numbering_within_a_set_is_irrelevant(self, correct: Array, seed: int) -> None:
        generator = np.random.default_rng(seed)
        shuffled = np.stack([one[generator.permutation(len(one))] for one in correct])
        found, again = components.nested_components(correct), components.nested_components(shuffled)
        for name in ("S", "P", "I", "SI", "PI"):
            assert getattr(again, name) == pytest.approx(getattr(found, name), abs=1e-12)
        assert found.order_effect**2 == pytest.approx(max(found.P, 0), abs=1e-15)

    def test_known_components_are_recovered_without_bias(self) -> None:
        generator = np.random.default_rng(7)
        sigma = {"S": 0.5, "P": 0.4, "I": 1.0, "SI": 0.6, "PI": 0.8}
        shapes = {"S": (6, 1, 1), "P": (6, 5, 1), "I": (1, 1, 8), "SI": (6, 1, 8), "PI": (6, 5, 8)}
        runs = []
        for _ in range(600):
            values = sum(sigma[name] * generator.standard_normal(shapes[name]) for name in sigma)
            found = components.nested_components(values)
            runs.append([getattr(found, name) for name in sigma])
        error = np.mean(runs, axis=0) - np.square(list(sigma.values()))
        assert (np.abs(error) < 4 * np.std(runs, axis=0) / math.sqrt(len(runs))).all()


def mean(accuracy: Array, *weights: Array) -> Array:
    """Mean over sets and permutations, weighted where weights are given."""
    if not weights:
        return accuracy.mean(axis=(0, 1))
    return np.asarray(np.average(np.average(accuracy, axis=1, weights=weights[1]), axis=0, weights=weights[0]))


class TestProductBootstrap:
    @pytest.mark.parametrize("kind", ["poisson", "bayesian"])
    def test_error_of_a_mean_is_that_of_new_sets_permutations_and_queries(self, kind: Any) -> None:
        generator = np.random.default_rng(8)
        means, errors = [], []
        for _ in range(60):
            ease = (
                generator.standard_normal((9, 1, 1))
                + 0.7 * generator.standard_normal((1, 9, 1))
                + 2 * generator.standard_normal(60)
            )
            correct = generator.random((9, 9, 60)) < 1 / (1 + np.exp(-ease))
            means.append(correct.mean())
            errors.append(float(paired.product_bootstrap(correct, mean, kind=kind, draws=150).se))
        assert 0.85 < np.mean(errors) / np.std(means) < 1.35

    def test_over_queries_alone_it_is_the_clustered_error(self) -> None:
        correct = np.random.default_rng(9).random((3, 4, 80)) < 0.6
        weights = np.random.default_rng(10).integers(1, 4, 80)
        found = paired.product_bootstrap(correct, mean, weights=weights, resample="Q", draws=3000)
        assert float(found.se) == pytest.approx(stats.clustered_se(correct, weights), rel=0.08)
        assert float(found.estimate) == pytest.approx(stats.accuracy(correct, weights=weights).values.mean())
        assert found.low < found.estimate < found.high

    def test_a_weight_of_two_is_a_level_written_twice(self) -> None:
        correct = np.random.default_rng(11).integers(0, 2, (3, 3, 7), dtype=np.uint8)
        found = paired.product_bootstrap(correct, stats.order_sensitivity, draws=50, seed=4)
        drawn = {
            axis: np.random.default_rng([4, *f"bootstrap {axis}".encode()]).poisson(1.0, (50, size))
            for axis, size in zip("SPQ", correct.shape, strict=True)
        }
        for i in range(50):
            if all(drawn[axis][i].any() for axis in "SPQ") and drawn["P"][i].sum() > 1:
                items = correct
                for axis, name in enumerate("SPQ"):
                    items = repeated(items, drawn[name][i].tolist(), axis)
                assert found.draws[i] == pytest.approx(stats.order_sensitivity(stats.accuracy(items).values), abs=1e-12)
            else:
                assert math.isnan(found.draws[i])
        assert found.num_undefined == np.isnan(found.draws).sum() > 0

    def test_queries_that_failed_are_left_out_and_shots_kept_apart(self) -> None:
        correct = np.random.default_rng(12).integers(0, 2, (3, 4, 2, 9), dtype=np.uint8)
        state = np.zeros(correct.shape, np.uint8)
        state[1, 1, 1, 5] = 1
        found = paired.product_bootstrap(correct, mean, state, draws=20)
        without = paired.product_bootstrap(np.delete(correct, 5, axis=-1), mean, draws=20)
        np.testing.assert_array_equal(found.draws, without.draws)
        assert found.draws.shape == (20, 2)
        assert found.estimate.shape == found.se.shape == (2,)

    def test_blocks_change_nothing(self) -> None:
        correct = np.random.default_rng(13).integers(0, 2, (4, 5, 9), dtype=np.uint8)
        whole = paired.product_bootstrap(correct, mean, draws=30)
        in_blocks = paired.product_bootstrap(correct, mean, draws=30, limits=ComputeLimits(sums_at_once=50))
        np.testing.assert_array_equal(in_blocks.draws, whole.draws)

    def test_constant_scores_have_no_spread(self) -> None:
        found = paired.product_bootstrap(np.ones((3, 4, 5), bool), mean, draws=20)
        assert (float(found.se), float(found.low), float(found.high)) == (0, 1, 1)

    def test_refuses_what_does_not_fit(self) -> None:
        ones = np.ones((2, 2, 3), np.uint8)
        for options in ({"resample": "SX"}, {"kind": "jackknife"}, {"draws": 1}, {"level": 1.0}):
            with pytest.raises(RequestError):
                paired.product_bootstrap(ones, mean, **options)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="no query is ok"):
            paired.product_bootstrap(ones, mean, ones)
        with pytest.raises(RequestError, match=r"\[2, 3\]"):
            paired.product_bootstrap(ones[0], mean)


def test_adjusted_values_ascend_with_the_raw_ones() -> None:
    p_values = np.sort(np.random.default_rng(14).random(20))
    assert all(low <= high for low, high in pairwise(paired.holm(p_values)))
