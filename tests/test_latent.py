"""Effects on the logit against quadrature, loops, maximum likelihood and statsmodels, and against known truth."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from statsmodels.genmod.bayes_mixed_glm import BinomialBayesMixedGLM

from iclperm import stats
from iclperm.errors import DataError, RequestError
from iclperm.reference import latent as reference
from iclperm.stats import LatentComponents, latent, latent_components, latent_fit
from iclperm.stats import logistic_normal as normal
from iclperm.studies.sensitivity import Sensitivity
from iclperm.studies.sensitivity_latent import SensitivityLatent, sensitivity_latent
from iclperm.studies.sensitivity_summary import sensitivity_summary

Array = npt.NDArray[Any]

SPREADS = {"S": 0.4, "P": 0.5, "SP": 0.3, "I": 1.5, "SI": 0.5, "PI": 0.5}
seeds = st.integers(0, 2**32 - 1)


def logits(
    generator: np.random.Generator, shape: tuple[int, int, int], mu: float, spreads: dict[str, float] = SPREADS
) -> Array:
    """[S, P, Q] with one Gaussian effect for every name in `spreads`."""
    found = np.full(shape, mu)
    for effect, scale in spreads.items():
        part = [size if name in effect else 1 for size, name in zip(shape, "SPI", strict=True)]
        found = found + scale * generator.standard_normal(part)
    return found


def answers(
    seed: int, shape: tuple[int, int, int] = (5, 6, 80), mu: float = 0.7, spreads: dict[str, float] = SPREADS
) -> Array:
    generator = np.random.default_rng(seed)
    chance = 1 / (1 + np.exp(-logits(generator, shape, mu, spreads)))
    return (generator.random(shape) < chance).astype(np.uint8)


def numbers(found: LatentComponents) -> list[float]:
    """What is estimated, apart from the cells."""
    jackknife = [] if found.jackknife is None else [end for interval in found.jackknife for end in interval]
    gaussian = [interval.estimate for interval in found.gaussian]
    sigma2 = [getattr(found.sigma2, name) for name in SPREADS]
    return [found.mu, found.accuracy, found.scale_error, *sigma2, *found.mean_squares, *gaussian, *jackknife]


class TestIntegrals:
    @given(st.floats(-6, 6), st.floats(0.01, 16))
    @settings(max_examples=30)
    def test_accuracy_over_queries_agrees_with_quadrature(self, x: float, variance: float) -> None:
        assert normal.marginal(x, variance) == pytest.approx(reference.marginal(x, variance), abs=3e-7)

    @given(st.floats(-8, 8), st.floats(0, 30))
    def test_the_logit_is_found_again(self, x: float, variance: float) -> None:
        accuracy = normal.marginal(x, variance)
        assert normal.marginal_logit(accuracy, variance) == pytest.approx(x, abs=1e-6)

    @given(st.floats(-4, 4), st.floats(0.01, 9))
    def test_slopes_are_differences(self, x: float, variance: float) -> None:
        low, middle, high = normal.marginal(np.array([x - 1e-3, x, x + 1e-3]), variance)
        first, second = normal.marginal_slopes(x, variance)
        assert first == pytest.approx((high - low) / 2e-3, abs=1e-6)
        assert second == pytest.approx((high - 2 * middle + low) / 1e-6, abs=1e-6)

    @pytest.mark.parametrize(("variance", "shared"), [(2.75, 2.25), (1.0, 0.2), (6.0, 3.0)])
    def test_covariances_agree_with_quadrature_over_the_plane(self, variance: float, shared: float) -> None:
        cells = np.array([[-1.0, 0.3], [1.2, 2.5]])
        neither, same_set, same_permutation = normal.marginal_covariances(cells, variance, shared)
        (a, b), (c, d) = cells.tolist()

        def mean_of(*pairs: tuple[float, float]) -> float:
            return sum(reference.covariance(x, y, variance, shared) for x, y in pairs) / len(pairs)

        assert neither == pytest.approx(mean_of((a, d), (b, c)), abs=3e-5)
        assert same_set == pytest.approx(mean_of((a, b), (c, d)), abs=3e-5)
        assert same_permutation == pytest.approx(mean_of((a, c), (b, d)), abs=3e-5)

    @given(st.floats(0.2, 6), st.floats(0, 1), st.floats(0, 1), st.floats(-2.5, 2.5))
    @settings(max_examples=30)
    def test_variances_of_queries_are_found_again(self, item: float, with_set: float, with_p: float, mu: float) -> None:
        cells = mu + np.array([[-0.5, 0.0, 0.4], [0.3, -0.2, 0.6]])
        total = item + with_set + with_p
        common = (item, item + with_set, item + with_p)
        covariances = [normal.marginal_covariances(cells, total, shared)[kind] for kind, shared in enumerate(common)]
        found = normal.query_variances(normal.marginal(cells, total), covariances)
        assert found[:4] == pytest.approx((total, item, with_set, with_p), abs=6e-3 * total)

    def test_the_gradient_is_that_of_the_total(self) -> None:
        cells = np.array([[0.5, 0.1, 0.4], [0.9, 1.2, 0.0]])
        accuracy = normal.marginal(cells, 3.0)
        covariances = np.array(
            [normal.marginal_covariances(cells, 3.0, shared)[kind] for kind, shared in enumerate((2.0, 2.4, 2.6))]
        )
        gradient = normal.query_variances(accuracy, covariances).gradient
        for kind in range(3):
            step = 1e-3 * np.eye(3)[kind]
            ends = [normal.query_variances(accuracy, covariances + sign * step).total for sign in (1, -1)]
            assert gradient[kind] == pytest.approx((ends[0] - ends[1]) / 2e-3, rel=0.02)

    def test_equal_queries_have_no_variance(self) -> None:
        found = normal.query_variances(np.full((2, 2), 0.6), [-0.01, -0.01, -0.01])
        assert found.total == 0.0
        assert found.gradient == (0.0, 0.0, 0.0)


class TestOracles:
    @given(seeds)
    @settings(max_examples=10)
    def test_covariances_of_pairs_agree_with_loops(self, seed: int) -> None:
        correct = answers(seed, (2, 3, 7)).astype(np.float64)
        error = correct - correct.mean(axis=2, keepdims=True)
        found, _ = latent_fit.pair_covariances(error, None)
        np.testing.assert_allclose(found, reference.pair_covariances(correct, np.zeros(correct.shape)), atol=1e-12)

    @given(seeds)
    @settings(max_examples=10)
    def test_covariances_of_pairs_with_missing_answers_agree_with_loops(self, seed: int) -> None:
        correct = answers(seed, (3, 3, 9)).astype(np.float64)
        ok = np.random.default_rng(seed).random(correct.shape) < 0.8
        ok[:, :, 0] = True
        means = np.where(ok, correct, 0).sum(axis=2) / ok.sum(axis=2)
        found, parts = latent_fit.pair_covariances(np.where(ok, correct - means[..., None], 0.0), ok)
        np.testing.assert_allclose(found, reference.pair_covariances(correct, ~ok), atol=1e-12)
        np.testing.assert_allclose(parts.sum(axis=1), 0.0, atol=1e-9)

    def test_cells_and_queries_agree_with_maximum_likelihood(self) -> None:
        correct = answers(11, (2, 3, 800), 1.0, {"S": 0.3, "P": 0.5, "SP": 0.3, "I": 1.4})
        cells, variance = reference.maximum_likelihood(correct)
        found = latent_components(correct)
        np.testing.assert_allclose(found.cells, cells, atol=0.1)
        assert found.query_variance == pytest.approx(variance, rel=0.1)

    def test_the_order_effect_agrees_with_maximum_likelihood(self) -> None:
        correct = answers(12, (2, 60, 60), 1.5, {"P": 0.6})
        variance = reference.order_variance(correct.sum(axis=(0, 2)), 120)
        assert latent_components(correct).order_effect.estimate ** 2 == pytest.approx(variance, rel=0.1)

    def test_queries_agree_with_statsmodels(self) -> None:
        """Variational Bayes, ten fixed cells and random queries: what has no ten-answer effects it gets right."""
        correct = answers(13, (2, 5, 150), 0.5, {"S": 0.4, "P": 0.5, "I": 1.2})
        s, p, q = np.indices(correct.shape)
        frame = pandas.DataFrame({"y": correct.ravel(), "cell": (5 * s + p).ravel(), "query": q.ravel()})
        model = BinomialBayesMixedGLM.from_formula("y ~ 0 + C(cell)", {"query": "0 + C(query)"}, frame, fe_p=10)
        fitted = model.fit_vb()
        found = latent_components(correct)
        assert math.sqrt(found.query_variance) == pytest.approx(math.exp(fitted.vcp_mean[0]), rel=0.1)
        np.testing.assert_allclose(found.cells.ravel(), fitted.fe_mean, atol=0.15)


class TestCells:
    @pytest.mark.parametrize("chance", [0.5, 0.9, 0.95])
    def test_a_cells_logit_has_little_bias_and_its_noise_is_known(self, chance: float) -> None:
        """Over all outcomes of 100 answers, by their binomial probabilities."""
        trials, variance = 100, 2.0
        right = np.arange(trials + 1)
        probability = scipy_stats.binom.pmf(right, trials, chance)
        x, drawn_in, shrink = latent_fit.cell_logits(right / trials, np.full(trials + 1, 100.0), variance)
        noise = drawn_in * (1 - drawn_in) / normal.marginal_slopes(x, variance)[0] ** 2 / (trials + 2 * shrink)
        mean = probability @ x
        assert mean == pytest.approx(float(normal.marginal_logit(chance, variance)), abs=0.012)
        assert probability @ noise == pytest.approx(probability @ (x - mean) ** 2, rel=0.05)

    @given(seeds)
    @settings(max_examples=10)
    def test_components_are_those_of_the_analysis_of_variance_of_linearised_answers(self, seed: int) -> None:
        """With complete answers, but for the noise of a cell, which is binomial instead of counted."""
        correct = answers(seed, (3, 4, 60))
        found = latent_components(correct)
        slope, _ = normal.marginal_slopes(found.cells, found.query_variance)
        mean = correct.mean(axis=2)
        linear = stats.variance_components(found.cells[..., None] + (correct - mean[..., None]) / slope[..., None])
        assert float(found.mean_squares.S) == pytest.approx(linear.mean_squares.S, rel=1e-9)
        assert float(found.mean_squares.SP) == pytest.approx(linear.mean_squares.SP, rel=1e-9)
        with_set = (found.mean_squares.SI - found.mean_squares.SPI) / 4
        assert with_set == pytest.approx(linear.sigma2.SI, rel=1e-6, abs=1e-9)
        assert float(found.mean_squares.SPI) == pytest.approx(linear.mean_squares.SPI, rel=0.1)


class TestSymmetries:
    @given(seeds)
    @settings(max_examples=10)
    def test_names_of_sets_permutations_and_queries_do_not_matter(self, seed: int) -> None:
        correct, generator = answers(seed), np.random.default_rng(seed)
        s, p, q = (generator.permutation(size) for size in correct.shape)
        found = latent_components(correct[s][:, p][:, :, q], draws=50)
        np.testing.assert_allclose(numbers(found), numbers(latent_components(correct, draws=50)), rtol=1e-6, atol=1e-9)

    @given(seeds)
    @settings(max_examples=10)
    def test_right_and_wrong_exchanged_turn_the_logit_round(self, seed: int) -> None:
        correct = answers(seed)
        found, turned = (latent_components(each, draws=50) for each in (correct, 1 - correct))
        assert turned.mu == pytest.approx(-found.mu, abs=1e-7)
        assert turned.accuracy == pytest.approx(1 - found.accuracy)
        np.testing.assert_allclose(turned.cells, -found.cells, atol=1e-6)
        np.testing.assert_allclose(numbers(turned)[2:], numbers(found)[2:], rtol=1e-5, atol=1e-9)

    @given(seeds)
    @settings(max_examples=10)
    def test_sets_and_permutations_exchanged_exchange_their_effects(self, seed: int) -> None:
        correct = answers(seed)
        found, turned = (latent_components(each, draws=50) for each in (correct, correct.transpose(1, 0, 2)))
        assert float(turned.sigma2.P) == pytest.approx(found.sigma2.S, abs=1e-7)
        assert float(turned.sigma2.PI) == pytest.approx(found.sigma2.SI, abs=1e-7)
        assert turned.order_effect.estimate == pytest.approx(found.selection_effect.estimate, abs=1e-7)

    @given(seeds)
    @settings(max_examples=10)
    def test_graded_answers_of_0_and_1_are_binary_ones(self, seed: int) -> None:
        correct = answers(seed)
        found, graded = (latent_components(each, draws=50) for each in (correct, correct.astype(np.float64)))
        assert numbers(graded) == numbers(found)

    @given(seeds)
    @settings(max_examples=5)
    def test_a_query_without_any_answer_is_as_if_it_were_not_there(self, seed: int) -> None:
        correct = answers(seed)
        state = np.zeros(correct.shape, np.uint8)
        state[:, :, 7] = 3
        found = latent_components(correct, state, draws=50)
        without = latent_components(np.delete(correct, 7, axis=2), draws=50)
        assert found.num_queries == 79
        np.testing.assert_allclose(numbers(found), numbers(without), rtol=1e-6, atol=1e-9)

    def test_what_stands_in_a_missing_cell_does_not_matter(self) -> None:
        correct = answers(3).astype(np.float64)
        state = (np.random.default_rng(4).random(correct.shape) < 0.1).astype(np.uint8)
        other = np.where(state, np.nan, correct)
        assert numbers(latent_components(other, state)) == numbers(latent_components(correct, state))

    def test_weights_move_accuracies_and_no_effect(self) -> None:
        correct = answers(5)
        weights = np.where(correct.mean(axis=(0, 1)) > 0.6, 3, 1)
        found, plain = latent_components(correct, weights=weights), latent_components(correct)
        assert found.sigma2[:6] == plain.sigma2[:6]
        assert found.accuracy == pytest.approx(np.average(correct.mean(axis=(0, 1)), weights=weights))
        assert found.offset > 0 == plain.offset
        assert found.tail_risk().accuracy.estimate > plain.tail_risk().accuracy.estimate
        assert numbers(latent_components(correct, weights=np.ones(80))) == numbers(plain)


CONTEXTS = {name: SPREADS[name] for name in ("S", "P", "SP")}  # drawn first, so alone they are drawn alike


def found_and_true(shape: tuple[int, int, int], mu: float, repeats: int, missing: float = 0.0) -> tuple[Array, Array]:
    """Mean variances of order, selection, I, SI and PI over simulated studies, and those that were drawn."""
    found, true = [], []
    for seed in range(repeats):
        correct = answers(seed, shape, mu)
        state = (np.random.default_rng(seed).random(shape) < missing).astype(np.uint8) if missing else None
        sigma2 = latent_components(correct, state, draws=10).sigma2
        found.append((sigma2.P + sigma2.SP, sigma2.S + sigma2.SP, sigma2.I, sigma2.SI, sigma2.PI))
        drawn = logits(np.random.default_rng(seed), (*shape[:2], 1), 0.0, CONTEXTS)[..., 0]
        true.append((drawn.var(axis=1, ddof=1).mean(), drawn.var(axis=0, ddof=1).mean(), 2.25, 0.25, 0.25))
    return np.mean(found, axis=0), np.mean(true, axis=0)


class TestKnownTruth:
    @pytest.mark.parametrize("mu", [0.0, 1.5, 4.0])
    def test_effects_come_back_at_every_accuracy(self, mu: float) -> None:
        """Accuracies of about .5, .8 and .95."""
        found, true = found_and_true((10, 10, 250), mu, 12)
        np.testing.assert_allclose(found[:2], true[:2], rtol=0.12)
        np.testing.assert_allclose(found[2:], true[2:], rtol=0.15)

    def test_the_same_order_effect_is_one_number_where_accuracies_say_two(self) -> None:
        low, high = (answers(9, (12, 12, 1500), mu) for mu in (0.4, 4.0))
        assert low.mean() < 0.6
        assert high.mean() > 0.94
        latent_order = [latent_components(each).order_effect.estimate for each in (low, high)]
        linear_order = [stats.variance_components(each).order_effect for each in (low, high)]
        assert latent_order[1] == pytest.approx(latent_order[0], rel=0.15)
        assert linear_order[0] > 3 * linear_order[1]

    def test_answers_missing_at_random_leave_estimates_as_they_are(self) -> None:
        found, true = found_and_true((8, 8, 200), 1.0, 12, missing=0.3)
        np.testing.assert_allclose(found[:2], true[:2], rtol=0.1)
        np.testing.assert_allclose(found[2:], true[2:], rtol=0.2)

    def test_a_cell_is_not_rewarded_for_the_hard_queries_that_it_lacks(self) -> None:
        correct = answers(21, (6, 8, 400))
        hard = correct.mean(axis=(0, 1)) < np.median(correct.mean(axis=(0, 1)))
        state = np.zeros(correct.shape, np.uint8)
        state[:, 0, hard] = np.random.default_rng(1).random((6, hard.sum())) < 0.6
        whole, part = latent_components(correct), latent_components(correct, state)
        kept = np.where(state[:, 0] == 0, correct[:, 0], np.nan)
        naive = normal.marginal_logit(np.nanmean(kept, axis=1), whole.query_variance)
        own = np.abs(part.cells[:, 0] - whole.cells[:, 0]).mean()
        assert own < 0.3 * np.abs(naive - whole.cells[:, 0]).mean()
        assert part.order_effect.estimate == pytest.approx(whole.order_effect.estimate, rel=0.12)

    def test_means_of_four_answers_have_the_effects_of_one(self) -> None:
        generator, shape = np.random.default_rng(31), (8, 8, 300)
        chance = 1 / (1 + np.exp(-logits(generator, shape, 1.0)))
        one = latent_components((generator.random(shape) < chance).astype(np.uint8))
        four = latent_components(generator.binomial(4, chance) / 4)
        assert four.order_effect.estimate == pytest.approx(one.order_effect.estimate, rel=0.1)
        assert four.query_variance == pytest.approx(one.query_variance, rel=0.1)
        assert four.mean_squares.SPI < 0.5 * one.mean_squares.SPI

    def test_a_wide_design_is_fitted(self) -> None:
        correct = answers(41, (10, 128, 1000), 2.5)
        found = latent_components(correct)
        assert found.order_effect.low < math.hypot(0.5, 0.3) < found.order_effect.high
        assert found.order_effect.estimate == pytest.approx(math.hypot(0.5, 0.3), rel=0.15)

    def test_a_small_design_is_fitted_and_says_how_little_it_knows(self) -> None:
        found = latent_components(answers(42, (3, 4, 40), 1.0))
        assert found.gaussian.order.high / max(found.gaussian.order.low, 1e-9) > 3
        assert found.scale_error > 0.05

    def test_two_sets_have_no_jackknife_and_are_quoted_with_the_gaussian_interval(self) -> None:
        found = latent_components(answers(43, (2, 6, 100)))
        assert found.jackknife is None
        assert found.order_effect == found.gaussian.order

    def test_no_effect_of_order_is_found_none(self) -> None:
        correct = answers(44, (8, 8, 200), 0.5, {"S": 0.8, "I": 1.0})
        found = latent_components(correct)
        assert found.gaussian.order.low == 0.0
        assert found.selection_effect.estimate > 3 * found.gaussian.order.estimate

    def test_what_is_not_identified_is_nan(self) -> None:
        assert math.isnan(latent_components(answers(45)).sigma2.SPI)


class TestTailRisk:
    def test_it_is_the_quantile_of_orderings_on_new_queries(self) -> None:
        found = latent_components(answers(51, (20, 40, 300), 1.5))
        logit = logits(np.random.default_rng(1), (400, 400, 1), 1.5, {"S": 0.4, "P": 0.5, "SP": 0.3})
        truth = float(np.quantile(normal.marginal(logit, 2.75), 0.05))
        tail = found.tail_risk()
        assert tail.accuracy.low < truth < tail.accuracy.high
        assert tail.accuracy.estimate == pytest.approx(truth, abs=0.04)
        assert tail.empirical == pytest.approx(truth, abs=0.05)

    def test_item_noise_is_taken_out(self) -> None:
        correct = answers(52, (6, 8, 50), 1.0, {"S": 0.1, "P": 0.1, "I": 1.0})
        raw = np.sort(correct.mean(axis=2), axis=None)[2]
        tail = latent_components(correct).tail_risk()
        assert raw < min(tail.accuracy.estimate, tail.empirical)

    @given(seeds)
    @settings(max_examples=5)
    def test_smaller_shares_are_worse(self, seed: int) -> None:
        found = latent_components(answers(seed))
        tails = [found.tail_risk(share).accuracy for share in (0.01, 0.05, 0.5)]
        assert [tail.estimate for tail in tails] == sorted(tail.estimate for tail in tails)
        assert tails[2].estimate == pytest.approx(found.accuracy_at())
        assert all(tail.low <= tail.estimate <= tail.high for tail in tails[:2])

    def test_refuses_what_is_no_share(self) -> None:
        with pytest.raises(RequestError, match="share must lie between 0 and 1, got 5"):
            latent_components(answers(1)).tail_risk(5)


class TestPower:
    FOUND = latent_components(answers(61, (6, 6, 120), 1.0))

    def test_large_effects_are_seen_and_small_ones_are_not(self) -> None:
        large = self.FOUND.power(6, 10, 200, order=0.8, ratio=1.0, repeats=20)
        small = self.FOUND.power(6, 10, 200, order=0.01, ratio=1.0, repeats=20)
        assert large.sees_order == 1.0
        assert small.sees_order <= 0.2

    def test_r_is_told_from_1_where_it_is_far_and_the_design_large(self) -> None:
        far = self.FOUND.power(20, 20, 200, order=0.3, ratio=4.0, repeats=10)
        same = self.FOUND.power(20, 20, 200, order=0.3, ratio=1.0, repeats=10)
        assert far.tells_ratio >= 0.9
        assert same.tells_ratio <= 0.2
        assert (far.ratio, far.order) == pytest.approx((4.0, 0.3))

    @pytest.mark.parametrize("ratio", [0.1, 0.7, 3.0])
    def test_effects_are_those_asked_for(self, ratio: float) -> None:
        sigma2 = latent._with_effects(self.FOUND.sigma2, 0.5, ratio)
        assert math.sqrt(sigma2.P + sigma2.SP) == pytest.approx(0.5)
        assert math.sqrt(sigma2.S + sigma2.SP) == pytest.approx(0.5 * ratio)
        assert min(sigma2.S, sigma2.P, sigma2.SP) >= -1e-15

    def test_it_is_the_same_each_time_and_has_the_studys_own_size_by_default(self) -> None:
        first, second = (self.FOUND.power(order=0.4, ratio=2.0, repeats=3, seed=7) for _ in range(2))
        assert first == second
        assert first[:3] == (6, 6, 120)

    def test_refusals(self) -> None:
        with pytest.raises(RequestError, match=r"power needs sizes of at least 2 and a repeat, got \[1, 6, 120\]"):
            self.FOUND.power(1)
        with pytest.raises(RequestError, match="power needs order above 0, got -1"):
            self.FOUND.power(order=-1)


class TestFindings:
    def found(self, mu: float, **options: Any) -> SensitivityLatent:
        found = sensitivity_latent(answers(71, (5, 6, 300), mu), **options)
        assert found is not None
        return found

    def test_it_speaks_near_a_bound_alone(self) -> None:
        middle, ceiling, floor = (self.found(mu) for mu in (0.3, 4.5, -4.5))
        assert (middle.bound, ceiling.bound, floor.bound) == ("", "ceiling", "floor")
        assert middle.conclusion() == []
        (sentence,) = ceiling.conclusion()
        assert ceiling.components is not None
        size = ceiling.components.order_effect
        assert f"of order is {size.estimate:.2f} [{size.low:.2f} to {size.high:.2f}]" in sentence
        assert sentence.startswith("Near the ceiling")

    def test_a_single_cell_near_a_bound_is_enough(self) -> None:
        correct = answers(72, (5, 6, 300), 0.3)
        correct[0, 0, 5:] = 1
        found = sensitivity_latent(correct)
        assert found is not None
        assert found.bound == "ceiling"

    def test_the_table_and_the_json_have_the_same_numbers(self) -> None:
        found = self.found(4.5)
        components, content = found.components, found.to_dict()
        assert components is not None
        rows = {row[0]: row[1] for row in found.table(8).rows}
        assert rows["order effect"] == f"{content['components']['order_effect']['estimate']:.2f}"
        assert rows["5 % ordering"] == f"{content['tail']['accuracy']['estimate']:.4f}"
        assert content["conclusion"] == found.conclusion()
        assert content["components"]["sigma2"]["SPI"] is None
        assert found.table(8).title.endswith("comparable near floor and ceiling at k = 8")

    def test_what_cannot_be_fitted_is_said(self) -> None:
        found = sensitivity_latent(np.ones((3, 3, 9), np.uint8))
        assert found is not None
        assert found.table().rows == [("not fitted", found.refusal)]
        assert found.refusal.startswith("all answers are right")
        assert found.to_dict()["components"] is None
        assert sensitivity_latent(np.ones((1, 3, 9), np.uint8)) is None

    def test_a_sample_of_queries_is_called_one(self) -> None:
        found = self.found(0.3, most_answers=30 * 200)
        assert (found.num_queries, found.of_queries) == (200, 300)
        assert any("a sample of 300" in cell for row in found.table().rows for cell in row)

    def test_a_study_fits_it_once_and_only_when_asked(self) -> None:
        correct, calls = answers(73, (4, 5, 200), 4.5), []

        def fit() -> SensitivityLatent | None:
            calls.append(1)
            return sensitivity_latent(correct)

        study = Sensitivity(sensitivity_summary(correct), (8,), fit_latent=fit)
        assert calls == []
        titles = [table.title for table in study.tables(full=True)]
        assert any(title.startswith("On the logit scale") for title in titles)
        assert study.to_dict()["latent"]["bound"] == "ceiling"
        assert study.conclusion()[-1].startswith("Near the ceiling")
        assert calls == [1]
        assert not any("logit" in table.title for table in study.tables(full=False))
        assert Sensitivity(sensitivity_summary(correct), (0,), fit_latent=fit).latent is None


class TestRefusals:
    @pytest.mark.parametrize(
        ("correct", "words"),
        [
            (np.zeros((3, 4)), r"need correct of shape \[S, P, Q\], got \[3, 4\]"),
            (np.zeros((1, 4, 9)), "at least 2 sets, permutations and queries, got S = 1, P = 4, Q = 9"),
            (np.full((2, 2, 2), 1.5), r"correct\[0, 0, 0\] is 1.5; answers lie within 0..1"),
            (np.full((2, 2, 2), np.nan), r"correct\[0, 0, 0\] is nan"),
            (np.full((2, 2, 2), 2), r"correct\[0, 0, 0\] is 2"),
        ],
    )
    def test_wrong_requests(self, correct: Array, words: str) -> None:
        with pytest.raises(RequestError, match=words):
            latent_components(correct)

    @pytest.mark.parametrize("right", [0, 1])
    def test_all_answers_alike(self, right: int) -> None:
        with pytest.raises(DataError, match=f"all answers are {('wrong', 'right')[right]}: on the logit nothing"):
            latent_components(np.full((3, 3, 5), right))

    def test_queries_answered_alike_everywhere(self) -> None:
        with pytest.raises(DataError, match="every query is answered alike in all cells"):
            latent_components(np.broadcast_to(np.arange(10) % 2, (3, 3, 10)))

    def test_most_cells_saturated(self) -> None:
        correct = np.ones((3, 3, 20), np.uint8)
        correct[0, 0, :5] = 0
        with pytest.raises(DataError, match="8 of 9 cells are all right or all wrong, and have no logit"):
            latent_components(correct)

    def test_answers_that_hang_on_the_query_alone(self) -> None:
        correct = np.broadcast_to(np.arange(200) % 2, (4, 4, 200)).copy()
        correct[0, 0, 0] = 1
        with pytest.raises(DataError, match="answers follow the query and hardly anything else"):
            latent_components(correct)

    def test_state_of_another_shape(self) -> None:
        with pytest.raises(RequestError, match=r"state must have the shape of correct \[5, 6, 80\], got \[5, 6\]"):
            latent_components(answers(1), np.zeros((5, 6)))

    def test_a_cell_without_answers(self) -> None:
        state = np.zeros((5, 6, 80))
        state[2, 3] = 1
        with pytest.raises(DataError, match="set 2 under permutation 3 has no answer at all"):
            latent_components(answers(1), state)

    def test_cells_that_share_no_query(self) -> None:
        state = np.ones((2, 2, 80), np.uint8)
        for number, cell in enumerate(np.ndindex(2, 2)):
            state[*cell, 20 * number : 20 * number + 20] = 0
        with pytest.raises(DataError, match="no query was answered in two cells"):
            latent_components(answers(1, (2, 2, 80)), state)

    def test_weights_of_missing_queries_alone(self) -> None:
        correct, state = answers(1), np.zeros((5, 6, 80))
        state[:, :, 0] = 1
        with pytest.raises(DataError, match="all queries with an answer have weight 0"):
            latent_components(correct, state, weights=np.eye(80)[0])
