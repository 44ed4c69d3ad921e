"""Estimators against their oracles, their exact identities, and simulations with known truth.

More than 600 lines because estimators, identities and simulations share their strategies and bad calls.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from iclperm import stats
from iclperm.errors import RequestError
from iclperm.reference import stats as reference
from iclperm.stats.intervals import Interval, quantile_interval
from iclperm.stats.limits import ComputeLimits

Array = npt.NDArray[Any]

ESTIMATORS: tuple[stats.Estimator, ...] = ("mean_std", "rms", "c4")
sizes = st.integers(2, 6)
tensors = st.tuples(sizes, sizes, sizes).flatmap(lambda shape: hnp.arrays(np.uint8, shape, elements=st.integers(0, 1)))
matrices = st.tuples(sizes, sizes).flatmap(
    lambda shape: hnp.arrays(np.float64, shape, elements=st.floats(0, 1, allow_subnormal=False))
)
seeds = st.integers(0, 2**32 - 1)


def gaussian_table(generator: np.random.Generator, shape: tuple[int, int], sigma: tuple[float, float, float]) -> Array:
    """Accuracy [S, P] with Gaussian effects of sets, permutations and residual."""
    parts = zip(sigma, ((shape[0], 1), (1, shape[1]), shape), strict=True)
    return 0.5 + sum(scale * generator.standard_normal(size) for scale, size in parts)


def gaussian_scores(generator: np.random.Generator, shape: tuple[int, int, int], sigma: dict[str, float]) -> Array:
    """Scores [S, P, Q] with one Gaussian effect for every name in `sigma`."""
    scores = np.zeros(shape)
    for effect, scale in sigma.items():
        part = [size if name in effect else 1 for size, name in zip(shape, "SPI", strict=True)]
        scores += scale * generator.standard_normal(part)
    return scores


def shuffled(array: Array, seed: int) -> Array:
    """The same levels of every axis in another order."""
    generator = np.random.default_rng(seed)
    for axis in range(array.ndim):
        array = np.take(array, generator.permutation(array.shape[axis]), axis=axis)
    return array


class TestAccuracy:
    @given(tensors, seeds)
    def test_agrees_with_the_oracle(self, correct: Array, seed: int) -> None:
        generator = np.random.default_rng(seed)
        state = (generator.random(correct.shape) < 0.05).astype(np.uint8) * 3
        weights = generator.integers(1, 4, correct.shape[-1]).astype(np.float64)
        values, dropped, num_queries = stats.common_accuracy(correct, state, weights)
        np.testing.assert_allclose(values, reference.accuracy(correct, state, weights), atol=1e-12)
        lost = state.any(axis=(0, 1))
        assert dropped == pytest.approx(weights[lost].sum() / weights.sum())
        assert num_queries == np.count_nonzero(~lost)

    def test_a_query_that_failed_once_is_left_out_of_every_cell(self) -> None:
        correct = np.array([[1, 0, 1, 1], [1, 1, 0, 0]])
        state = np.array([[0, 0, 0, 1], [0, 0, 0, 0]])
        values, dropped, num_queries = stats.common_accuracy(correct, state)
        assert values.tolist() == [2 / 3, 2 / 3]
        assert (dropped, num_queries) == (0.25, 3)
        values, dropped, num_queries = stats.accuracy(correct, state)  # the other cell has it wrong
        assert values == pytest.approx([(2 + 0) / 4, 2 / 4])
        assert (dropped, num_queries) == (0.0, 4)

    def test_without_a_usable_query_it_is_undefined(self) -> None:
        values, dropped, num_queries = stats.accuracy(np.ones((2, 2, 3), bool), np.ones((2, 2, 3), np.uint8))
        assert np.isnan(values).all()
        assert (dropped, num_queries) == (1.0, 0)

    def test_a_weight_counts_like_a_repeated_query(self) -> None:
        correct = np.random.default_rng(0).integers(0, 2, (3, 4, 5))
        weights = np.array([1, 3, 0, 2, 1])
        repeated = reference.repeated(correct, weights.tolist())
        np.testing.assert_allclose(stats.accuracy(correct, weights=weights).values, stats.accuracy(repeated).values)


class TestSensitivity:
    @given(matrices, st.sampled_from(ESTIMATORS))
    def test_agrees_with_the_oracle(self, accuracy: Array, estimator: stats.Estimator) -> None:
        order = stats.order_sensitivity(accuracy, estimator)
        selection = stats.selection_sensitivity(accuracy, estimator)
        assert order == pytest.approx(reference.order_sensitivity(accuracy, estimator), rel=1e-8, abs=1e-12)
        assert selection == pytest.approx(reference.selection_sensitivity(accuracy, estimator), rel=1e-8, abs=1e-12)
        if order > 0:
            assert stats.sensitivity_ratio(accuracy, estimator) == selection / order

    @given(matrices, seeds, st.sampled_from(ESTIMATORS))
    def test_the_order_of_sets_and_permutations_is_irrelevant(
        self, accuracy: Array, seed: int, estimator: stats.Estimator
    ) -> None:
        order = stats.order_sensitivity(shuffled(accuracy, seed), estimator)
        assert order == pytest.approx(stats.order_sensitivity(accuracy, estimator), abs=1e-12)

    @given(st.floats(0, 1), st.sampled_from(ESTIMATORS))
    def test_equal_accuracies_have_none(self, value: float, estimator: stats.Estimator) -> None:
        accuracy = np.full((3, 4), value)
        assert stats.order_sensitivity(accuracy, estimator) == 0
        assert stats.selection_sensitivity(accuracy, estimator) == 0
        assert math.isnan(stats.sensitivity_ratio(accuracy, estimator))

    def test_one_level_has_no_spread(self) -> None:
        assert math.isnan(stats.order_sensitivity([[0.5], [0.7]]))
        assert math.isnan(stats.selection_sensitivity([[0.5, 0.7]]))
        assert stats.order_sensitivity([[0.5, 0.7]]) == pytest.approx(0.2 / math.sqrt(2))

    @pytest.mark.parametrize("num", [2, 3, 10, 128])
    def test_c4_is_the_mean_of_a_sample_deviation(self, num: int) -> None:
        assert stats.c4(num) == pytest.approx(reference.c4(num), abs=1e-7)

    def test_c4_of_ten_and_of_128(self) -> None:
        assert (round(stats.c4(10), 4), round(stats.c4(128), 3)) == (0.9727, 0.998)

    def test_c4_takes_the_bias_out(self) -> None:
        generator = np.random.default_rng(1)
        estimates = [stats.order_sensitivity(generator.standard_normal((3, 4)), "c4") for _ in range(2000)]
        assert abs(np.mean(estimates) - 1) < 4 * np.std(estimates) / math.sqrt(len(estimates))


class TestCurve:
    @given(hnp.arrays(np.uint8, (3, 4, 2, 5), elements=st.integers(0, 1)))
    def test_agrees_with_the_oracle(self, correct: Array) -> None:
        found = stats.curve(correct)
        expected = reference.curve(correct)
        for got, want in zip(found[:3], expected, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-12)

    def test_a_weight_counts_like_a_repeated_query(self) -> None:
        correct = np.random.default_rng(22).integers(0, 2, (3, 4, 2, 6), dtype=np.uint8)
        weights = [1, 2, 1, 5, 3, 1]
        for got, want in zip(
            stats.curve(correct, weights=weights)[:3],
            reference.curve(reference.repeated(correct, weights)),
            strict=True,
        ):
            np.testing.assert_allclose(got, want, atol=1e-12)

    def test_one_context_repeated_has_no_spread(self) -> None:
        correct = np.broadcast_to(np.array([1, 0, 1], np.uint8), (4, 5, 1, 3))
        found = stats.curve(correct)
        assert found.mean == pytest.approx(2 / 3)
        assert found.std_permutations.item() == found.std_sets.item() == 0

    def test_a_failed_answer_moves_no_point_of_the_curve(self) -> None:
        """All cells answer one query of four rightly; one of them lacks it at the last k, and the curve stays flat."""
        state = np.zeros((2, 2, 3, 4), np.uint8)
        state[1, 0, 2, 3] = 1
        correct = np.zeros(state.shape, np.uint8)
        correct[..., 3] = 1
        found = stats.curve(correct, state)
        assert found.mean == pytest.approx([0.25, 0.25, 0.25])
        assert (found.dropped, found.num_queries) == (0, 4)

    def test_one_set_or_one_permutation_leaves_its_spread_undefined(self) -> None:
        assert np.isnan(stats.curve(np.ones((1, 3, 2, 4), bool)).std_sets).all()
        assert np.isnan(stats.curve(np.ones((3, 1, 2, 4), bool)).std_permutations).all()


class TestVarianceComponents:
    @given(tensors)
    def test_agree_with_the_oracle(self, correct: Array) -> None:
        found = stats.variance_components(correct)
        mean_squares, sigma2 = reference.variance_components(correct)
        assert found.mean_squares._asdict() == pytest.approx(mean_squares, abs=1e-12)
        assert found.sigma2._asdict() == pytest.approx(sigma2, abs=1e-12)

    @given(tensors)
    def test_binary_and_float_scores_give_the_same(self, correct: Array) -> None:
        exact, rounded = stats.variance_components(correct), stats.variance_components(correct.astype(np.float32))
        assert exact.mean_squares == pytest.approx(rounded.mean_squares, abs=1e-12)

    @given(tensors)
    def test_mean_squares_of_items_are_those_of_accuracies_times_queries(self, correct: Array) -> None:
        """The identities: mean row variance = [MS_B + (S-1)·MS_E]/S, mean column variance = [MS_A + (P-1)·MS_E]/P."""
        num_s, num_p, num_q = correct.shape
        mean_squares = stats.variance_components(correct).mean_squares
        accuracy = stats.accuracy(correct).values
        rows = (mean_squares.P + (num_s - 1) * mean_squares.SP) / (num_s * num_q)
        columns = (mean_squares.S + (num_p - 1) * mean_squares.SP) / (num_p * num_q)
        assert stats.order_sensitivity(accuracy, "rms") ** 2 == pytest.approx(rows, abs=1e-12)
        assert stats.selection_sensitivity(accuracy, "rms") ** 2 == pytest.approx(columns, abs=1e-12)

    @given(tensors)
    def test_raw_sensitivities_are_effects_plus_item_noise(self, correct: Array) -> None:
        """E[order variance] = σ²_P + σ²_SP + (σ²_PI + σ²_SPI)/Q, an identity of the estimates too."""
        sigma2 = stats.variance_components(correct).sigma2
        accuracy = stats.accuracy(correct).values
        order = sigma2.P + sigma2.SP + (sigma2.PI + sigma2.SPI) / correct.shape[2]
        selection = sigma2.S + sigma2.SP + (sigma2.SI + sigma2.SPI) / correct.shape[2]
        assert stats.order_sensitivity(accuracy, "rms") ** 2 == pytest.approx(order, abs=1e-12)
        assert stats.selection_sensitivity(accuracy, "rms") ** 2 == pytest.approx(selection, abs=1e-12)

    @given(tensors, seeds)
    def test_the_order_of_levels_is_irrelevant(self, correct: Array, seed: int) -> None:
        assert stats.variance_components(shuffled(correct, seed)) == stats.variance_components(correct)

    @pytest.mark.parametrize("value", [0, 1, 0.1, -math.pi])
    def test_constant_scores_have_no_variance(self, value: float) -> None:
        found = stats.variance_components(np.full((3, 4, 5), value))
        assert set(found.mean_squares) | set(found.sigma2) | set(found.shares) == {0.0}
        assert found.order_effect == found.selection_effect == 0
        assert math.isnan(found.ratio)

    @given(tensors)
    def test_effects_are_the_clipped_sums_of_their_components(self, correct: Array) -> None:
        found = stats.variance_components(correct)
        order, selection = (max(found.sigma2.SP + main, 0) for main in (found.sigma2.P, found.sigma2.S))
        assert found.order_effect**2 == pytest.approx(order, abs=1e-15)
        assert found.selection_effect**2 == pytest.approx(selection, abs=1e-15)
        if order > 1e-9:  # what rounding leaves of a selection of 0 has no ratio to tell
            assert found.ratio**2 * order == pytest.approx(selection, abs=1e-15)

    @given(tensors)
    def test_shares_are_clipped_and_sum_to_one(self, correct: Array) -> None:
        found = stats.variance_components(correct)
        assert min(found.shares) >= 0
        assert sum(found.shares) == pytest.approx(1) or set(found.shares) == {0.0}
        assert all((share == 0) == (value <= 0) for share, value in zip(found.shares, found.sigma2, strict=True))

    @given(tensors, st.booleans())
    @settings(max_examples=25, deadline=None)  # the first call compiles
    def test_the_numba_loop_counts_like_the_oracle(self, correct: Array, strided: bool) -> None:
        from iclperm.stats import _kernels

        items = np.repeat(correct, 2, axis=2)[:, :, ::2] if strided else correct
        for got, want in zip(_kernels.crossed_sums(items), reference.crossed_sums(items), strict=True):
            np.testing.assert_array_equal(got, want)

    def test_a_large_tensor_takes_the_numba_loop_and_gives_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from iclperm.stats import _kernels

        correct = np.random.default_rng(2).integers(0, 2, (7, 8, 40), dtype=np.uint8)
        by_numpy = stats.variance_components(correct)
        calls: list[tuple[int, ...]] = []
        loop: Callable[[Array], tuple[Array, Array, Array]] = _kernels.crossed_sums
        monkeypatch.setattr(_kernels, "crossed_sums", lambda items: calls.append(items.shape) or loop(items))
        assert stats.variance_components(correct, limits=ComputeLimits(numba_from=correct.size)) == by_numpy
        assert calls == [correct.shape]

    def test_known_components_are_recovered_without_bias(self) -> None:
        sigma = {"S": 0.5, "P": 0.4, "I": 1.0, "SP": 0.3, "SI": 0.6, "PI": 0.2, "SPI": 0.8}
        generator = np.random.default_rng(3)
        runs = np.array(
            [stats.variance_components(gaussian_scores(generator, (6, 5, 8), sigma)).sigma2 for _ in range(600)]
        )
        error = runs.mean(axis=0) - np.square(list(sigma.values()))
        assert (np.abs(error) < 4 * runs.std(axis=0) / math.sqrt(len(runs))).all()

    def test_item_noise_alone_has_a_spread_but_no_order_effect(self) -> None:
        generator = np.random.default_rng(4)
        raw, pure = [], []
        for _ in range(300):
            correct = (generator.random((6, 6, 50)) < generator.random(50)).astype(np.uint8)
            raw.append(stats.order_sensitivity(stats.accuracy(correct).values))
            sigma2 = stats.variance_components(correct).sigma2
            pure.append(sigma2.P + sigma2.SP)
        assert np.mean(raw) > 0.04
        assert abs(np.mean(pure)) < 4 * np.std(pure) / math.sqrt(len(pure))

    def test_queries_that_failed_everywhere_are_left_out(self) -> None:
        correct = np.random.default_rng(5).integers(0, 2, (3, 4, 6))
        state = np.zeros(correct.shape, np.uint8)
        state[..., 4] = 1
        kept, found = (
            stats.variance_components(np.delete(correct, 4, axis=2)),
            stats.variance_components(correct, state),
        )
        assert found.num_queries == kept.num_queries
        np.testing.assert_allclose(found.sigma2, kept.sigma2, atol=1e-12)

    def test_explained_in_words(self) -> None:
        found = stats.variance_components(np.random.default_rng(6).integers(0, 2, (4, 4, 9)))
        lines = stats.explain_components(found)
        assert [line.split()[0] for line in lines] == [f"sigma_{effect}" for effect in stats.Effects._fields]
        assert "label" not in "".join(lines)
        same = stats.explain_components(found, same_label_sequence=True)
        assert "sequence of labels" in same[1]
        assert "beyond their label sequence" in same[3]
        assert "its own permutations" in stats.explain_components(found, shared_permutations=False)[1]


def coverage(intervals: list[Interval], truth: float) -> float:
    return float(np.mean([interval.low <= truth <= interval.high for interval in intervals]))


def shaped_tables(shape: str, repeats: int) -> list[Array]:
    """Accuracies [10, 10] with r = 1 and effects of a given shape, variance 1."""
    generator = np.random.default_rng(14)
    draw: Callable[[tuple[int, int]], Array] = {
        "gaussian": generator.standard_normal,
        "t4": lambda size: generator.standard_t(4, size) / math.sqrt(2),
        "one-sided": lambda size: generator.exponential(size=size) - 1,
    }[shape]
    return [draw((10, 1)) + draw((1, 10)) + 0.7 * draw((10, 10)) for _ in range(repeats)]


class TestGeneralizedInterval:
    def test_covers_the_truth_under_gaussian_effects(self) -> None:
        sigma = (0.02, 0.015, 0.01)
        order, selection = math.hypot(sigma[1], sigma[2]), math.hypot(sigma[0], sigma[2])
        generator = np.random.default_rng(7)
        runs = [
            stats.generalized_interval(gaussian_table(generator, (10, 10), sigma), draws=1000, seed=seed)
            for seed in range(400)
        ]
        truths = (order, selection, selection / order)
        for found, truth in zip(zip(*runs, strict=True), truths, strict=True):
            assert 0.90 <= coverage(list(found), truth) <= 0.99

    def test_effects_free_of_item_noise_are_covered(self) -> None:
        sigma = {"S": 0.3, "P": 0.2, "I": 1.0, "SP": 0.15, "SI": 0.3, "PI": 0.3, "SPI": 1.0}
        order, selection = math.hypot(0.2, 0.15), math.hypot(0.3, 0.15)
        generator = np.random.default_rng(8)
        runs = [
            stats.effect_interval(
                stats.variance_components(gaussian_scores(generator, (8, 8, 40), sigma)), draws=1000, seed=seed
            )
            for seed in range(300)
        ]
        for found, truth in zip(zip(*runs, strict=True), (order, selection, selection / order), strict=True):
            assert 0.90 <= coverage(list(found), truth) <= 0.99

    def test_has_the_quantiles_of_the_oracle(self) -> None:
        accuracy = gaussian_table(np.random.default_rng(9), (6, 9), (0.02, 0.02, 0.02))
        found = stats.generalized_interval(accuracy, seed=1)
        draws = np.array(reference.sensitivity_draws(accuracy, 20_000, seed=2)).T
        for interval, values in zip(found, (*draws, draws[1] / draws[0]), strict=True):
            np.testing.assert_allclose(interval[1:3], np.quantile(values, [0.025, 0.975]), rtol=0.03)

    @given(tensors, seeds)
    @settings(max_examples=30)
    def test_bounds_are_ordered_and_repeatable(self, correct: Array, seed: int) -> None:
        found = stats.effect_interval(stats.variance_components(correct), draws=200, seed=seed)
        assert all(0 <= interval.low <= interval.high for interval in found if not math.isnan(interval.low))
        again = stats.effect_interval(stats.variance_components(correct), draws=200, seed=seed)
        np.testing.assert_array_equal(np.array(found), np.array(again))

    def test_another_seed_draws_anew(self) -> None:
        accuracy = gaussian_table(np.random.default_rng(10), (5, 5), (0.1, 0.1, 0.1))
        assert stats.generalized_interval(accuracy, seed=0) != stats.generalized_interval(accuracy, seed=1)

    def test_a_higher_level_is_wider(self) -> None:
        accuracy = gaussian_table(np.random.default_rng(11), (5, 5), (0.1, 0.1, 0.1))
        narrow, wide = (stats.generalized_interval(accuracy, level=level).ratio for level in (0.5, 0.99))
        assert wide.low < narrow.low < narrow.estimate < narrow.high < wide.high

    def test_no_spread_at_all(self) -> None:
        found = stats.generalized_interval(np.full((4, 4), 0.7))
        assert (
            found.order.estimate == found.selection.estimate == 0
        )  # with no interval: nothing bounds what was not seen
        bounds = [*found.order[1:3], *found.selection[1:3], *found.ratio[:3]]
        assert all(math.isnan(value) for value in bounds)

    def test_an_order_effect_that_may_be_absent_leaves_r_open(self) -> None:
        sigma = {"S": 0.5, "I": 1.0, "SPI": 1.0}
        scores = gaussian_scores(np.random.default_rng(12), (6, 6, 30), sigma)
        found = stats.effect_interval(stats.variance_components(scores))
        assert found.order.low == 0
        assert found.selection.low > 0
        assert found.ratio.low > 0
        assert found.ratio.high == math.inf

    def test_without_an_order_effect_r_is_undefined(self) -> None:
        accuracy = np.repeat(np.linspace(0.3, 0.8, 4)[:, None], 5, axis=1)
        assert all(math.isnan(value) for value in stats.generalized_interval(accuracy).ratio[:3])

    def test_a_ratio_left_open_widens_its_interval_on_both_sides(self) -> None:
        draws = np.repeat([np.nan, 1.0, 2.0, np.inf], [1, 45, 45, 9])
        assert quantile_interval(1.0, draws, 0.95)[1:3] == (1, math.inf)
        assert quantile_interval(1.0, draws, 0.5)[1:3] == (1, 2)

    @pytest.mark.parametrize("draws", [np.repeat([np.nan, 1.0], [10, 90]), np.repeat([0.0, 0.3], [99, 1])])
    def test_an_interval_of_nothing_or_of_everything_is_none(self, draws: Array) -> None:
        """0 to 0 would say that an effect is known to be absent, 0 to infinity says nothing."""
        assert all(math.isnan(bound) for bound in quantile_interval(1.0, draws, 0.95)[1:3])

    def test_effects_below_the_noise_have_no_interval_of_zero_width(self) -> None:
        """A model that names one label whatever the set is right on a quarter of the queries, in every ordering."""
        generator = np.random.default_rng(3)
        correct = np.zeros((4, 4, 40), np.uint8)
        for cell in np.ndindex(4, 4):
            correct[cell][generator.integers(4) * 10 :][:10] = 1
        found = stats.effect_interval(stats.variance_components(correct))
        assert found.selection.estimate == 0
        assert all(math.isnan(bound) for bound in found.selection[1:3])


class TestJackknife:
    def test_agrees_with_the_oracle(self) -> None:
        accuracy = gaussian_table(np.random.default_rng(13), (5, 7), (0.1, 0.2, 0.1))
        found = stats.jackknife_ratio_interval(accuracy, level=0.9)
        assert found[1:3] == pytest.approx(reference.jackknife_ratio(accuracy, 0.9))
        assert found.estimate == stats.sensitivity_ratio(accuracy)

    @pytest.mark.parametrize("shape", ["gaussian", "t4", "one-sided"])
    def test_covers_r_whatever_the_shape_of_the_effects(self, shape: str) -> None:
        tables = shaped_tables(shape, 200)
        assert coverage([stats.jackknife_ratio_interval(table, "rms") for table in tables], 1.0) >= 0.88

    @pytest.mark.parametrize("shape", ["t4", "one-sided"])
    def test_covers_r_where_the_generalised_interval_does_not(self, shape: str) -> None:
        tables = shaped_tables(shape, 200)
        generalised = [stats.generalized_interval(table, draws=1000).ratio for table in tables]
        jackknife = [stats.jackknife_ratio_interval(table, "rms") for table in tables]
        assert coverage(generalised, 1.0) < coverage(jackknife, 1.0) - 0.05

    def test_is_undefined_without_spread(self) -> None:
        found = stats.jackknife_ratio_interval(np.full((4, 4), 0.5))
        assert all(math.isnan(value) for value in found[:3])


class TestStandardErrors:
    @given(st.integers(1, 300).flatmap(lambda num: st.tuples(st.integers(0, num), st.just(num))))
    def test_wilson_agrees_with_the_oracle(self, counts: tuple[int, int]) -> None:
        found = stats.wilson_interval(*counts)
        assert found[1:3] == pytest.approx(reference.wilson(*counts, 0.95), abs=1e-9)
        assert 0 <= found.low <= found.estimate <= found.high <= 1

    @given(tensors, seeds)
    def test_clustered_agrees_with_the_oracle(self, correct: Array, seed: int) -> None:
        alike = [1] * correct.shape[-1]
        assert stats.clustered_se(correct) == pytest.approx(reference.clustered_se(correct, alike), abs=1e-12)
        weights = np.random.default_rng(seed).integers(1, 5, correct.shape[-1]).tolist()
        found = stats.clustered_se(correct, weights)
        assert found == pytest.approx(reference.clustered_se(correct, weights), abs=1e-12)

    def test_a_repeated_query_is_no_second_draw(self) -> None:
        correct = np.random.default_rng(23).integers(0, 2, (3, 30))
        weights = [4] * 15 + [1] * 15
        written_out = stats.clustered_se(reference.repeated(correct, weights))
        assert stats.clustered_se(correct, weights) > 1.3 * written_out

    def test_more_contexts_do_not_count_as_more_queries(self) -> None:
        correct = np.random.default_rng(15).integers(0, 2, (1, 40))
        many = np.repeat(correct, 100, axis=0)
        assert stats.clustered_se(many) == pytest.approx(stats.clustered_se(correct))

    def test_clustered_weights(self) -> None:
        correct = np.random.default_rng(16).integers(0, 2, (3, 20))
        assert stats.clustered_se(correct, np.full(20, 7)) == pytest.approx(stats.clustered_se(correct))
        assert stats.clustered_se(correct, np.arange(20)) != pytest.approx(stats.clustered_se(correct))
        assert math.isnan(stats.clustered_se(correct[:, :1]))


class TestSkewness:
    def test_one_collapsed_permutation_is_named(self) -> None:
        accuracy = gaussian_table(np.random.default_rng(17), (10, 10), (0.01, 0.01, 0.01))
        accuracy[:, 4] -= 0.3
        lines = stats.skewness_warnings(accuracy)
        assert [line.split()[0] for line in lines] == ["permutation"]
        assert "G1 = -" in lines[0]

    def test_symmetric_and_equal_means_are_not_named(self) -> None:
        assert stats.skewness_warnings(np.add.outer(np.linspace(-1, 1, 9), np.linspace(0, 1, 7))) == []
        assert stats.skewness_warnings(np.full((5, 5), 0.1)) == []
        assert stats.skewness_warnings([[0.0, 1.0]]) == []


class TestNeededDesign:
    def test_the_power_promised_is_the_power_found(self) -> None:
        sigma = (0.03, 0.015, 0.01)
        wide = gaussian_table(np.random.default_rng(18), (400, 400), sigma)
        design = stats.needed_design(wide)
        assert design is not None
        assert design.num_sets == design.num_permutations
        assert design.ratio == pytest.approx(math.hypot(0.03, 0.01) / math.hypot(0.015, 0.01), rel=0.1)
        found = reference.power_to_tell_from_one(sigma, design.num_sets, 0.95, 400, seed=19)
        assert 0.7 <= found <= 0.9

    def test_a_report_decides_so_as_often_as_promised(self) -> None:
        sigma = (0.03, 0.012, 0.01)
        design = stats.needed_design(gaussian_table(np.random.default_rng(28), (600, 600), sigma))
        assert design is not None
        generator, told = np.random.default_rng(29), 0
        for number in range(300):
            table = gaussian_table(generator, (design.num_sets, design.num_permutations), sigma)
            free = stats.generalized_interval(table, draws=1000, seed=number).ratio
            told += stats.jackknife_ratio_interval(table).low > 1 and free.low > 1
        assert 0.72 <= told / 300 <= 0.88

    def test_more_power_and_a_higher_level_take_more(self) -> None:
        accuracy = gaussian_table(np.random.default_rng(30), (10, 10), (0.02, 0.02, 0.01))
        plain, sure, strict = (
            stats.needed_design(accuracy, 1.58, **more) for more in ({}, {"power": 0.9}, {"level": 0.99})
        )
        assert plain is not None
        assert sure is not None
        assert strict is not None
        assert plain.num_sets < min(sure.num_sets, strict.num_sets)
        with pytest.raises(RequestError, match="power must lie between 0 and 1, got 1"):
            stats.needed_design(accuracy, 1.58, power=1)

    def test_a_ratio_nearer_to_one_needs_more(self) -> None:
        accuracy = gaussian_table(np.random.default_rng(20), (10, 10), (0.02, 0.02, 0.01))
        designs = [stats.needed_design(accuracy, ratio) for ratio in (1.58, 1.14, 1.01)]
        counts = [design.num_sets for design in designs if design is not None]
        assert counts == sorted(set(counts))
        assert len(counts) == 3
        assert counts[1] > 50

    def test_there_is_none_at_one_or_without_spread(self) -> None:
        accuracy = gaussian_table(np.random.default_rng(21), (6, 6), (0.02, 0.02, 0.01))
        assert stats.needed_design(accuracy, 1.0) is None
        assert stats.needed_design(np.full((4, 4), 0.5)) is None


class TestCalibration:
    @given(seeds, st.integers(1, 5))
    def test_agrees_with_the_oracle(self, seed: int, num_labels: int) -> None:
        generator = np.random.default_rng(seed)
        logprob = generator.normal(0, 2, (2, 3, 12, num_labels)).astype(np.float32)
        targets = generator.integers(0, num_labels, 12)
        found = stats.calibration(logprob, targets, num_bins=5)
        for s, p in np.ndindex(2, 3):
            expected = reference.calibration(logprob[s, p], targets.tolist(), 5)
            assert [score[s, p] for score in found] == pytest.approx(expected, abs=1e-6)

    def test_a_sure_and_right_model_scores_zero(self) -> None:
        logprob = np.where(np.eye(3) > 0, 0.0, -100.0)
        found = stats.calibration(logprob, [0, 1, 2])
        assert [float(score) for score in found] == pytest.approx([0, 0, 0], abs=1e-12)

    def test_failed_queries_may_hold_nan(self) -> None:
        logprob = np.zeros((2, 4, 3))
        logprob[1, 2] = np.nan
        state = np.zeros((2, 4), np.uint8)
        state[1, 2] = 1
        found = stats.calibration(logprob, [0, 1, 2, 0], state)
        np.testing.assert_allclose(found.nll, math.log(3))
        with pytest.raises(RequestError, match="mark it in state"):
            stats.calibration(logprob, [0, 1, 2, 0])
        assert np.isnan(stats.calibration(logprob, [0, 1, 2, 0], np.ones((2, 4))).brier).all()

    @given(hnp.arrays(np.float64, (3, 4, 3), elements=st.sampled_from([-1.0, -1.00005, -1.2, -3.0])))
    def test_near_ties_agree_with_the_oracle(self, logprob: Array) -> None:
        assert stats.near_tie_rate(logprob) == pytest.approx(reference.near_tie_rate(logprob, 1e-4))

    @given(seeds)
    def test_a_weight_counts_like_a_repeated_query(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        logprob = np.round(generator.normal(0, 1, (2, 9, 3)), 1)
        targets, weights = generator.integers(0, 3, 9), generator.integers(1, 4, 9).tolist()
        state = (generator.random((2, 9)) < 0.1).astype(np.uint8)
        found = stats.calibration(logprob, targets, state, weights=weights)
        written_out = [reference.repeated(array, weights, 1) for array in (logprob, state)]
        truth = reference.repeated(targets, weights)
        kept = ~written_out[1].any(axis=0)
        for context in range(2):
            want = (
                reference.calibration(written_out[0][context][kept], truth[kept].tolist(), 10)
                if kept.any()
                else [math.nan] * 3
            )
            assert [score[context] for score in found] == pytest.approx(want, abs=1e-12, nan_ok=True)
        rate = stats.near_tie_rate(logprob, state, weights=weights)
        assert rate == pytest.approx(reference.near_tie_rate(written_out[0][written_out[1] == 0], 1e-4))

    def test_near_ties_of_nothing(self) -> None:
        assert math.isnan(stats.near_tie_rate(np.zeros((2, 3, 1))))
        assert math.isnan(stats.near_tie_rate(np.zeros((2, 3, 2)), np.ones((2, 3))))


BAD_CALLS: list[tuple[Callable[[], object], str]] = [
    (lambda: stats.accuracy([0.5, 1.25]), "correct must hold numbers from 0 to 1, found 1.25"),
    (lambda: stats.accuracy(["a"]), "correct must hold bool or integer 0 and 1, got <U1"),
    (lambda: stats.accuracy([0, 7]), "correct must hold only 0 and 1, found 7"),
    (lambda: stats.accuracy([0, -2]), "correct must hold only 0 and 1, found -2"),
    (lambda: stats.accuracy(np.zeros((3, 0), int)), r"no empty axis, got \[3, 0\]"),
    (lambda: stats.accuracy([0, 1], state=[0, 1, 0]), r"shape of correct \[2\], got \[3\]"),
    (lambda: stats.accuracy([0, 1], weights=[1, 2, 3]), r"weights must have shape \[2\], got \[3\]"),
    (lambda: stats.accuracy([0, 1], weights=[1, -2]), "got -2.0 to 1.0"),
    (lambda: stats.order_sensitivity([0.5, 0.6]), r"shape \[S, P\] with S, P >= 1, got \[2\]"),
    (lambda: stats.order_sensitivity([[0.5, math.nan]]), r"accuracy\[0, 1\] is nan"),
    (lambda: stats.order_sensitivity([[0.5, 0.6]], "median"), "unknown estimator 'median'"),  # type: ignore[arg-type]
    (lambda: stats.c4(1), "at least 2 values, got 1"),
    (lambda: stats.curve(np.ones((2, 2, 2), int)), r"\[S, P, K, Q\], got \[2, 2, 2\]"),
    (lambda: stats.variance_components(np.ones((2, 2), int)), r"\[S, P, Q\], got \[2, 2\]"),
    (lambda: stats.variance_components(np.ones((1, 3, 4), int)), "got S = 1, P = 3, Q = 4"),
    (lambda: stats.variance_components(np.ones((3, 1, 4), int)), "got S = 3, P = 1, Q = 4"),
    (lambda: stats.variance_components(np.ones((3, 3, 1), int)), "got S = 3, P = 3, Q = 1"),
    (lambda: stats.variance_components(np.full((2, 2, 2), np.nan)), r"scores\[0, 0, 0\] is nan"),
    (lambda: stats.generalized_interval([[0.5, 0.6]]), "at least 2 sets and 2 permutations, got 1 x 2"),
    (lambda: stats.generalized_interval(np.eye(3), level=95), "level must lie between 0 and 1, got 95"),
    (lambda: stats.jackknife_ratio_interval(np.eye(2)), "at least 3 sets and 3 permutations, got 2 x 2"),
    (lambda: stats.wilson_interval(5, 4), "got 5 of 4"),
    (lambda: stats.needed_design(np.eye(3), ratio=-1), "ratio must be positive and finite, got -1"),
    (lambda: stats.clustered_se([[0, 1]], [1, 2, 3]), r"weights must have shape \[2\]"),
    (lambda: stats.clustered_se([[0, 1]], [0, 0]), "not all 0, got 0.0 to 0.0"),
    (lambda: stats.calibration([[0.0, 1.0]], [0], weights=[-1]), "got -1.0 to -1.0"),
    (lambda: stats.near_tie_rate([[0.0, 1.0]], weights=[1, 2]), r"weights must have shape \[1\], got \[2\]"),
    (lambda: stats.calibration([[0.0, 1.0]], [2]), r"targets must lie in 0..1, found 2"),
    (lambda: stats.calibration([[0.0, 1.0]], [0, 1]), r"integers of shape \[1\], got int64 \[2\]"),
    (lambda: stats.near_tie_rate([0.0, 1.0]), r"got float64 \[2\]"),
    (lambda: stats.near_tie_rate([[0.0, 1.0]], [0, 0]), r"state must have shape \[1\], got \[2\]"),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS)
def test_bad_input_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_a_gap_is_a_nan_with_a_state_and_a_mask_is_never_lost() -> None:
    answers = np.random.default_rng(3).integers(0, 2, (4, 5, 30)).astype(float)
    answers[1, 2, 3] = np.nan
    whole, gaps = np.nan_to_num(answers).astype(int), np.isnan(answers)
    found = stats.accuracy(whole, state=gaps)
    np.testing.assert_equal(found, stats.accuracy(answers, state=gaps.astype(np.uint8)))
    np.testing.assert_equal(stats.variance_components(whole, gaps), stats.variance_components(whole, gaps.astype(int)))
    with pytest.raises(RequestError, match=r"scores\[1, 2, 3\] is nan; leave out the queries that lack an answer: x\["):
        stats.mean_error(answers)
    assert stats.mean_error(answers[..., np.isfinite(answers).all(axis=(0, 1))]).mean == pytest.approx(
        np.delete(whole, 3, 2).mean()
    )
    masked = np.ma.masked_invalid(answers)
    for call in (
        stats.accuracy,
        stats.accuracy_bounds,
        stats.common_accuracy,
        stats.variance_components,
        stats.mean_error,
        stats.tensor_sums,
        stats.latent_components,
        stats.jackknifed_effects,
        lambda x: stats.curve(x[:, :, None]),
        lambda x: stats.compare(x, x),
        lambda x: stats.mcnemar(x[0, 0], x[1, 2]),
        lambda x: stats.paired_grades(x[0, 0], x[1, 2]),
        lambda x: stats.order_sensitivity(x[1]),
    ):
        with pytest.raises(RequestError, match=r"masked entries; give x\.filled\(0\)"):
            call(masked)
    np.testing.assert_equal(stats.accuracy(masked.filled(0).astype(int), state=np.ma.getmaskarray(masked)), found)


def test_sensitivities_take_the_accuracy_that_was_computed() -> None:
    found = stats.accuracy(np.random.default_rng(3).integers(0, 2, (4, 5, 30)))
    for call in (stats.order_sensitivity, stats.selection_sensitivity, stats.sensitivity_ratio):
        assert call(found) == call(found.values)


def test_importing_statistics_loads_nothing_heavy() -> None:
    code = (
        "import sys, iclperm.stats, iclperm.report; print({'numba', 'torch', 'matplotlib', 'rich'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_an_order_effect_of_rounding_alone_is_none() -> None:
    """Sets differ, orders by nothing: whatever float64 leaves of that, r has no value."""
    by_set = np.linspace(0.3, 0.9, 8)[:, None] * np.ones(6)
    answers = (by_set[..., None] > (np.arange(60) + 0.5) / 60) * 0.1
    found = stats.variance_components(answers)
    assert found.order_effect == 0
    assert found.selection_effect > 0.01
    assert math.isnan(found.ratio)
    assert stats.variance_components(1e-9 * answers).selection_effect == pytest.approx(1e-9 * found.selection_effect)
