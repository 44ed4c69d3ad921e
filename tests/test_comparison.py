"""Comparisons of studies and pooling against their oracles, statsmodels, textbook values, and known truth."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import special
from statsmodels.stats import contingency_tables, meta_analysis

from iclperm import stats
from iclperm.errors import DataError, RequestError
from iclperm.reference import comparison as reference
from iclperm.reference import curves
from iclperm.stats.comparison import AXES, Contrast

Array = npt.NDArray[Any]

sizes = st.integers(3, 5)
pairs = st.tuples(sizes, sizes, sizes).flatmap(
    lambda shape: hnp.arrays(np.uint8, (2, *shape), elements=st.integers(0, 1))
)
sharing = st.sets(st.sampled_from(AXES))
estimates = st.integers(3, 7).flatmap(
    lambda num: st.tuples(
        hnp.arrays(np.float64, num, elements=st.floats(-3, 3)), hnp.arrays(np.float64, num, elements=st.floats(0.1, 2))
    )
)

# Colditz et al. (1994), trials of the BCG vaccine: cases and others of the vaccinated, of the controls, latitude.
BCG = np.array(
    [
        (4, 119, 11, 128, 44), (6, 300, 29, 274, 55), (3, 228, 11, 209, 42), (62, 13536, 248, 12619, 52),
        (33, 5036, 47, 5761, 13), (180, 1361, 372, 1079, 44), (8, 2537, 10, 619, 19), (505, 87886, 499, 87892, 13),
        (29, 7470, 45, 7232, 27), (17, 1699, 65, 1600, 42), (186, 50448, 141, 27197, 18), (5, 2493, 3, 2338, 33),
        (27, 16886, 29, 17825, 33),
    ]
)  # fmt: skip
BCG_LOG_RISK = np.log(BCG[:, 0] / BCG[:, :2].sum(axis=1)) - np.log(BCG[:, 2] / BCG[:, 2:4].sum(axis=1))
BCG_SE = np.sqrt(1 / BCG[:, 0] - 1 / BCG[:, :2].sum(axis=1) + 1 / BCG[:, 2] - 1 / BCG[:, 2:4].sum(axis=1))
# Rubin (1981), coaching in eight schools.
SCHOOLS = np.array([28.0, 8, -3, 7, -1, 1, 18, 12]), np.array([15.0, 10, 16, 11, 9, 11, 10, 18])


def answers(seed: int, shape: tuple[int, ...] = (6, 5, 80), spread: float = 0.1) -> Array:
    generator = np.random.default_rng(seed)
    chance = 0.6 + spread * (generator.standard_normal((shape[0], 1, 1)) + generator.standard_normal((shape[1], 1)))
    chance = chance + generator.uniform(-0.2, 0.2, shape[-1])
    return (generator.random(shape) < chance).astype(np.uint8)


def squared(contrast: Contrast) -> float:
    return contrast.se**2


class TestCompare:
    @given(pairs, sharing)
    @settings(max_examples=30)
    def test_errors_are_those_of_leaving_out_one_by_one(self, pair: Array, shared: set[str]) -> None:
        first, second = pair
        found = stats.compare(first, second, shared=shared)
        together = [axis in shared for axis in AXES]
        one, two = pair.astype(np.float64)
        mean, variance = reference.joint_jackknife(lambda part: float(part.mean()), one, two, together)
        assert found.accuracy[0].estimate == pytest.approx(mean, abs=1e-12)
        assert squared(found.accuracy[0]) == pytest.approx(max(variance, curves.unseen_error(first.shape[2]) ** 2))
        for name, main in (("order", "P"), ("selection", "S")):
            contrast: Contrast = getattr(found, name)
            expected, variance = reference.joint_jackknife(
                functools.partial(reference.effect, main=main), one, two, together[:2]
            )
            # in floats a component that is exactly 0 comes out as its rounding, whose root is 1e-8
            assert contrast.estimate == pytest.approx(expected, abs=1e-6)
            assert math.isnan(contrast.se) or squared(contrast) == pytest.approx(variance, abs=1e-6)

    @pytest.mark.parametrize("shared", ["", "permutations", "sets permutations", "sets permutations queries"])
    def test_the_ratio_of_r_by_the_joint_jackknife(self, shared: str) -> None:
        first, second = answers(1), answers(2)
        found = stats.compare(first, second, shared=shared)
        together = [axis in shared for axis in AXES[:2]]
        expected, variance = reference.joint_jackknife(
            reference.log_ratio, first.astype(np.float64), second.astype(np.float64), together
        )
        assert found.ratio.estimate == pytest.approx(math.exp(expected))
        assert squared(found.ratio) == pytest.approx(variance)
        half = special.stdtrit(found.ratio.degrees, 0.975) * found.ratio.se
        assert (found.ratio.low, found.ratio.high) == pytest.approx(
            (math.exp(expected - half), math.exp(expected + half))
        )
        assert found.ratio.p_value == pytest.approx(
            2 * special.stdtr(found.ratio.degrees, -abs(expected) / found.ratio.se)
        )

    def test_the_ratio_free_of_noise_is_that_of_the_components(self) -> None:
        first, second = answers(3, spread=0.2), answers(4, spread=0.2)
        found = stats.compare(first, second)
        one, two = (stats.variance_components(items) for items in (first, second))
        assert found.ratio_free.estimate == pytest.approx(one.ratio / two.ratio)
        assert found.order.estimate == pytest.approx(one.order_effect - two.order_effect)
        assert found.selection.estimate == pytest.approx(one.selection_effect - two.selection_effect)
        # noise pulls both r towards 1
        printed = [stats.sensitivity_ratio(stats.accuracy(items).values) for items in (first, second)]
        assert found.ratio.estimate == pytest.approx(printed[0] / printed[1])

    def test_what_is_shared_cancels(self) -> None:
        first = answers(5, (8, 8, 200))
        flipped = np.random.default_rng(6).random(first.shape) < 0.1
        second = np.where(flipped, 1 - first, first)
        paired, apart = stats.compare(first, second), stats.compare(first, second, shared="")
        for name in ("ratio", "order", "selection"):
            assert getattr(paired, name).se < 0.7 * getattr(apart, name).se
        assert paired.accuracy[0].se < 0.5 * apart.accuracy[0].se

    def test_exchanged_studies_turn_every_sign(self) -> None:
        first, second = answers(7), answers(8)
        one, other = stats.compare(first, second), stats.compare(second, first)
        assert one.ratio.estimate == pytest.approx(1 / other.ratio.estimate)
        assert one.ratio.low == pytest.approx(1 / other.ratio.high)
        assert one.accuracy[0].low == pytest.approx(-other.accuracy[0].high)
        assert one.order.p_value == pytest.approx(other.order.p_value)

    def test_a_study_with_itself_differs_in_nothing(self) -> None:
        found = stats.compare(answers(9), answers(9))
        assert (found.ratio.estimate, found.order.estimate, found.accuracy[0].estimate) == (1, 0, 0)
        assert math.isnan(found.ratio.p_value)
        assert found.mcnemar[0] is not None
        assert found.accuracy[0].p_value == found.mcnemar[0].p_value == 1

    def test_every_k_and_the_largest_one(self) -> None:
        first, second = (
            np.stack([np.broadcast_to(answers(seed)[:1, :1], (6, 5, 80)), *(answers(seed + k) for k in (1, 2))], axis=2)
            for seed in (10, 20)
        )
        found = stats.compare(first, second, shots=((0, 4, 8), (0, 4, 8)))
        assert found.shots == (0, 4, 8)
        last = stats.compare(first[:, :, 2], second[:, :, 2])
        assert found.ratio[:-1] == last.ratio[:-1]
        assert found.accuracy[2][:-1] == last.accuracy[0][:-1]
        none = stats.compare(first[:1, :1, 0], second[:1, :1, 0])
        assert found.accuracy[0].se == pytest.approx(none.accuracy[0].se)  # one context: only queries are draws

    def test_other_numbers_of_shots_are_compared_where_both_have_them(self) -> None:
        first, second = answers(11, (4, 4, 60))[:, :, None].repeat(3, 2), answers(12, (5, 4, 90))[:, :, None]
        found = stats.compare(first, second, shared="permutations", shots=((0, 4, 8), (4,)))
        assert found.shots == (4,)
        assert len(found.accuracy) == len(found.mcnemar) == 1
        assert found.mcnemar == (None,)

    def test_holm_over_the_family(self) -> None:
        found = stats.compare(answers(13), answers(14))
        tests = found.tests()
        assert list(tests) == ["ratio", "order", "selection", "accuracy at k = 0"]
        np.testing.assert_allclose(
            [test.p_holm for test in tests.values()], stats.holm([t.p_value for t in tests.values()])
        )

    def test_too_few_sets_bound_accuracy_alone(self) -> None:
        found = stats.compare(answers(15, (2, 5, 60)), answers(16, (2, 5, 60)))
        for contrast in (found.ratio, found.ratio_free, found.order, found.selection):
            assert math.isnan(contrast.estimate)
            assert math.isnan(contrast.p_holm)
        assert found.accuracy[0].low < found.accuracy[0].estimate < found.accuracy[0].high
        single = stats.compare(answers(15, (1, 5, 60)), answers(16, (1, 5, 60)))
        assert single.covers == ("permutations", "queries")

    def test_queries_without_any_answer_are_left_out_of_both(self) -> None:
        first, second = answers(17), answers(18)
        state = np.zeros(first.shape, np.uint8)
        state[..., :8] = 3
        found = stats.compare(first, second, states=(None, state))
        assert found.num_queries == (72, 72)
        assert found.dropped == pytest.approx((0.1, 0.1))
        expected = stats.compare(first[..., 8:], second[..., 8:])
        assert (found.ratio, found.accuracy, found.mcnemar) == (expected.ratio, expected.accuracy, expected.mcnemar)
        apart = stats.compare(first, second, states=(None, state), shared="sets permutations")
        assert apart.num_queries == (80, 72)
        with pytest.raises(DataError, match="no query has an answer in both studies"):
            stats.compare(first, second, states=(None, np.ones(first.shape, np.uint8)))

    def test_grades_are_answers_and_answers_no_accuracies(self) -> None:
        first, second = answers(17), answers(18)
        found = stats.compare(first[:, :, None].astype(float), second[:, :, None].astype(float))
        assert found.ratio.estimate == pytest.approx(stats.compare(first, second).ratio.estimate)
        with pytest.raises(RequestError, match="all 0 or 1: give answers"):
            stats.compare(first.astype(float), second.astype(float))

    def test_floats_that_are_all_0_or_1_are_answers(self) -> None:
        first, second = (answers(seed)[:, :, None] for seed in (17, 18))
        np.testing.assert_equal(stats.compare(first.astype(float), second.astype(float)), stats.compare(first, second))

    def test_one_missing_answer_in_two_hundred_changes_little(self) -> None:
        first, second = answers(17), answers(18)
        states = tuple((np.random.default_rng(seed).random(first.shape) < 0.005).astype(np.uint8) for seed in (1, 2))
        found, whole = stats.compare(first, second, states=states), stats.compare(first, second)
        assert found.num_queries == whole.num_queries
        assert found.ratio.estimate == pytest.approx(whole.ratio.estimate, abs=0.2 * whole.ratio.se)
        assert found.accuracy[0].estimate == pytest.approx(whole.accuracy[0].estimate, abs=0.2 * whole.accuracy[0].se)
        assert found.mcnemar[0] is not None

    def test_a_weighted_query_counts_as_if_written_out_in_accuracy_and_as_one_draw_in_its_error(self) -> None:
        first, second = answers(19), answers(20)
        weights = np.random.default_rng(21).integers(1, 4, 80)
        found = stats.compare(first, second, weights=(weights, weights))
        written = stats.compare(first.repeat(weights, axis=2), second.repeat(weights, axis=2))
        assert found.ratio[:-1] == pytest.approx(written.ratio[:-1])
        assert found.accuracy[0].estimate == pytest.approx(written.accuracy[0].estimate)
        assert found.accuracy[0].se > written.accuracy[0].se

    def test_accuracies_alone(self) -> None:
        first, second = (stats.accuracy(answers(seed)).values for seed in (22, 23))
        found = stats.compare(first, second, shared="sets permutations")
        whole = stats.compare(answers(22), answers(23), shared="sets permutations")
        assert found.ratio[:-1] == pytest.approx(whole.ratio[:-1])
        assert math.isnan(found.order.estimate)
        assert found.covers == ("sets", "permutations")
        assert found.num_queries == (0, 0)
        assert found.accuracy[0].se < whole.accuracy[0].se  # queries are no draws here
        pair = first[..., None].repeat(2, 2), second[..., None].repeat(2, 2)
        assert stats.compare(*pair, shots=((1, 4), (1, 4))).shots == (1, 4)
        with pytest.raises(RequestError, match=r"can be grades \[S, P, Q\] or accuracies .*with 'shots'$"):
            stats.compare(*pair)

    @pytest.mark.parametrize(
        ("second", "shared", "shots", "words"),
        [
            ((5, 5, 80), "sets", None, "shared sets must be equally many, got 6 and 5"),
            ((6, 4, 80), "permutations", None, "shared permutations must be equally many, got 5 and 4"),
            ((6, 5, 70), "queries", None, "shared queries must be equally many, got 80 and 70"),
            ((6, 5, 80), "demonstrations", None, "got 'demonstrations'"),
            ((6, 5, 80), "", ((1, 2), (1,)), r"shots must be 1 ascending numbers, got \[1, 2\]"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, second: Any, shared: str, shots: Any, words: str) -> None:
        with pytest.raises(RequestError, match=words):
            stats.compare(answers(1), answers(2, second), shared=shared, shots=shots)

    def test_answers_and_accuracies_are_refused_together(self) -> None:
        with pytest.raises(RequestError, match="answers cannot be compared with accuracies"):
            stats.compare(answers(1), np.ones((6, 5)))
        with pytest.raises(RequestError, match="there are 1 and 2 numbers of shots"):
            stats.compare(answers(1), answers(2)[:, :, None].repeat(2, 2))
        with pytest.raises(RequestError, match="accuracies must be finite"):
            stats.compare(np.full((3, 3), math.nan), np.ones((3, 3)))


class TestMcNemar:
    @given(pairs)
    def test_agrees_with_counting(self, pair: Array) -> None:
        first, second = pair.reshape(2, -1, pair.shape[-1])
        found = stats.stratified_mcnemar(*pair)
        statistic, odds = reference.stratified_mcnemar(first, second)
        assert found.statistic == pytest.approx(statistic)
        assert found.odds_ratio == pytest.approx(odds, nan_ok=True)
        assert found.difference == pytest.approx(first.mean() - second.mean())
        by_query = (first.astype(float) - second).mean(axis=0)
        assert found.se == pytest.approx(by_query.std(ddof=1) / math.sqrt(len(by_query)))

    def test_one_context_is_mantel_and_haenszel_over_matched_pairs(self) -> None:
        first, second = np.random.default_rng(1).integers(0, 2, (2, 40))
        found = stats.stratified_mcnemar(first, second)
        # a stratum a query: rows are the two models, columns right and wrong
        tables = [np.array([[a, 1 - a], [b, 1 - b]]) for a, b in zip(first, second, strict=True)]
        expected = contingency_tables.StratifiedTable(tables)
        assert found.odds_ratio == pytest.approx(expected.oddsratio_pooled)
        assert found.statistic == pytest.approx(expected.test_null_odds().statistic)
        assert found.p_value == pytest.approx(expected.test_null_odds().pvalue)

    def test_a_context_seen_twice_says_nothing_new(self) -> None:
        first, second = np.random.default_rng(2).integers(0, 2, (2, 1, 40))
        once = stats.stratified_mcnemar(first, second)
        twice = stats.stratified_mcnemar(first.repeat(2, 0), second.repeat(2, 0))
        assert (twice.statistic, twice.se) == pytest.approx((once.statistic, once.se))
        assert twice.only_first == 2 * once.only_first


class TestPool:
    def test_textbook_values_of_the_vaccine_trials(self) -> None:
        """metafor's worked example (Viechtbauer 2010): REML τ² .3132, mean -.7145, Knapp & Hartung's error .1808."""
        found = stats.pool(BCG_LOG_RISK, BCG_SE)
        assert found.tau**2 == pytest.approx(0.3132, abs=1e-4)
        assert found.mean.estimate == pytest.approx(-0.7145, abs=1e-4)
        assert found.se == pytest.approx(0.1808, abs=1e-4)
        assert (found.mean.low, found.mean.high) == pytest.approx((-1.1084, -0.3206), abs=2e-4)
        assert found.q == pytest.approx(152.2330, abs=1e-3)
        moments = stats.pool(BCG_LOG_RISK, BCG_SE, method="dl")
        assert (moments.tau**2, moments.mean.estimate) == pytest.approx((0.3088, -0.7141), abs=1e-4)

    @given(estimates)
    def test_agrees_with_statsmodels(self, given_estimates: tuple[Array, Array]) -> None:
        values, errors = given_estimates
        found = stats.pool(values, errors, method="dl")
        with np.errstate(all="ignore"):  # it does not clip τ², nor mind equal estimates
            expected = meta_analysis.combine_effects(values, errors**2, method_re="dl", use_t=True)
        assert found.tau**2 == pytest.approx(max(expected.tau2, 0), abs=1e-9)
        assert found.q == pytest.approx(expected.q, abs=1e-9)
        if expected.tau2 > 0:
            assert found.mean.estimate == pytest.approx(expected.mean_effect_re, abs=1e-9)
            assert found.se == pytest.approx(max(expected.sd_eff_w_re_hksj, expected.sd_eff_w_re), rel=1e-6)

    @given(estimates, st.floats(0, 0.8))
    @settings(max_examples=25)
    def test_reml_is_the_largest_restricted_likelihood(self, given_estimates: tuple[Array, Array], rho: float) -> None:
        values, errors = given_estimates
        covariance = np.outer(errors, errors) * (rho + (1 - rho) * np.eye(len(errors)))
        found, ones = stats.pool(values, covariance), np.ones((len(values), 1))
        expected = reference.reml(values, covariance, ones, 40.0)
        best, here = (
            reference.restricted_log_likelihood(values, covariance, ones, t) for t in (expected, found.tau**2)
        )
        assert here == pytest.approx(best, abs=1e-6)

    @given(estimates, st.floats(0, 0.8))
    @settings(max_examples=15)
    def test_shrunken_estimates_agree_with_the_sum_over_tau(
        self, given_estimates: tuple[Array, Array], rho: float
    ) -> None:
        values, errors = given_estimates
        covariance = np.outer(errors, errors) * (rho + (1 - rho) * np.eye(len(errors)))
        found = stats.pool(values, covariance)
        widest = 10 * max(values.std(ddof=1), math.sqrt(np.trace(covariance) / len(values)))
        centre, spread = reference.shrunken(values, covariance, np.linspace(0, widest, 4000))
        np.testing.assert_allclose(found.shrunken, centre, atol=0.02 * widest)
        np.testing.assert_allclose(found.shrunken_se, spread, rtol=0.05)
        for end, wanted in ((found.prediction.low, 0.025), (found.prediction.high, 0.975)):
            below = reference.one_more(values, covariance, np.linspace(0, widest, 4000), end)
            assert below == pytest.approx(wanted, abs=0.01)

    def test_the_eight_schools(self) -> None:
        """Posterior means and deviations under flat priors, as Bayesian Data Analysis (section 5.5) has them."""
        found = stats.pool(*SCHOOLS)
        np.testing.assert_allclose(found.shrunken, [11.4, 7.9, 6.2, 7.6, 5.1, 6.2, 10.6, 8.4], atol=0.15)
        np.testing.assert_allclose(found.shrunken_se, [8.3, 6.3, 7.8, 6.5, 6.4, 6.7, 6.8, 7.9], atol=0.15)

    def test_what_is_shared_makes_the_mean_less_sure(self) -> None:
        errors = np.full(5, 0.3)
        values = np.array([0.1, 0.2, 0.0, 0.15, 0.05])
        alone = stats.pool(values, errors)
        together = stats.pool(values, 0.09 * (0.8 + 0.2 * np.eye(5)))
        assert together.se > 2 * alone.se
        # five correlated 0.8 are worth 1.19 independent ones
        assert together.se == pytest.approx(0.3 / math.sqrt(5 / (1 + 4 * 0.8)), rel=1e-6)

    def test_two_estimates(self) -> None:
        found = stats.pool([0.0, 1.0], [0.1, 0.1])
        assert found.mean.high - found.mean.low > 10
        assert math.isinf(found.prediction.high)
        assert found.shrunken[0] < found.shrunken[1]

    def test_the_interval_of_a_shrunken_estimate(self) -> None:
        found = stats.pool(*SCHOOLS)
        interval = found.shrunken_interval(0)
        half = special.stdtrit(7, 0.975) * found.shrunken_se[0]
        assert interval == pytest.approx((found.shrunken[0], found.shrunken[0] - half, found.shrunken[0] + half, 0.95))

    def test_what_is_no_estimate_is_refused(self) -> None:
        for values, errors, words in (
            ([1.0], [1.0], "at least 2"),
            ([1.0, math.nan], [1.0, 1.0], "finite"),
            ([1.0, 2.0], [1.0, 0.0], "above 0, found 0.0"),
            ([1.0, 2.0], [1.0], r"\[2\] or \[2, 2\]"),
            ([1.0, 2.0], [[1.0, 2.0], [2.0, 1.0]], "positive definite"),
        ):
            with pytest.raises(RequestError, match=words):
                stats.pool(values, errors)
        with pytest.raises(RequestError, match="'reml' or 'dl', got 'ml'"):
            stats.pool([1.0, 2.0], [1.0, 1.0], method="ml")  # type: ignore[arg-type]


class TestSlope:
    def test_textbook_values_of_the_vaccine_trials(self) -> None:
        """metafor's meta-regression on latitude, slope -.0291, τ² .0764; log10 of the size is the latitude here."""
        found = stats.slope(np.exp(BCG_LOG_RISK), 10.0 ** BCG[:, 4].astype(float), BCG_SE)
        assert found.slope == pytest.approx(-0.0291, abs=1e-4)
        assert found.intercept == pytest.approx(0.2515, abs=1e-3)
        assert found.tau**2 == pytest.approx(0.0764, abs=1e-4)
        assert found.factor.estimate == pytest.approx(math.exp(found.slope))
        half = special.stdtrit(11, 0.975) * found.se
        assert math.log(found.factor.high) == pytest.approx(found.slope + half)

    @given(estimates, st.integers(0, 1000))
    @settings(max_examples=20)
    def test_is_the_largest_restricted_likelihood(self, given_estimates: tuple[Array, Array], seed: int) -> None:
        values, errors = given_estimates
        sizes_of = 10 ** np.random.default_rng(seed).uniform(8, 11, len(values))
        found = stats.slope(np.exp(values), sizes_of, errors)
        design = np.stack([np.ones(len(values)), np.log10(sizes_of)], axis=1)
        design[:, 1] -= design[:, 1].mean()
        likelihood = [
            reference.restricted_log_likelihood(values, np.diag(errors**2), design, tau2)
            for tau2 in (found.tau**2, reference.reml(values, np.diag(errors**2), design, 40.0))
        ]
        assert likelihood[0] == pytest.approx(likelihood[1], abs=1e-6)
        weighted = design.T / (errors**2 + found.tau**2)
        assert found.slope == pytest.approx(np.linalg.solve(weighted @ design, weighted @ values)[1], abs=1e-8)

    def test_models_of_one_size_say_nothing(self) -> None:
        for values, sizes_of, words in (
            ([1.0, 2.0, 3.0], [7.0, 7.0, 7.0], "not all equal"),
            ([1.0, 2.0], [1.0, 2.0], "at least 3"),
            ([1.0, 0.0, 2.0], [1.0, 2.0, 3.0], "sensitivities must be"),
            ([1.0, 1.0, 2.0], [1.0, -2.0, 3.0], "sizes must be"),
        ):
            with pytest.raises(RequestError, match=words):
                stats.slope(values, sizes_of, [0.1] * len(values))


class TestCovariance:
    def test_a_pair_from_it_is_the_comparison(self) -> None:
        tensors = [answers(seed) for seed in (31, 32, 33)]
        logs = [stats.log_sensitivity(stats.accuracy(items).values) for items in tensors]
        shared = [[("sets", "permutations")] * 3] * 3
        covariance = stats.jackknife_covariance(logs, shared)
        for i, j in ((0, 1), (0, 2), (1, 2)):
            expected = stats.compare(tensors[i], tensors[j]).ratio.se ** 2
            assert covariance[i, i] + covariance[j, j] - 2 * covariance[i, j] == pytest.approx(expected)
        apart = stats.jackknife_covariance(logs, [[()] * 3] * 3)
        np.testing.assert_allclose(apart, np.diag(np.diag(covariance)))

    def test_other_sizes_are_refused(self) -> None:
        logs = [stats.log_sensitivity(stats.accuracy(answers(31, (size, 5, 40))).values) for size in (4, 6)]
        with pytest.raises(RequestError, match="cannot share 4 and 6 sets"):
            stats.jackknife_covariance(logs, [[("sets",)] * 2] * 2)
