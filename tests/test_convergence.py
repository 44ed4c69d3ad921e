"""Standard errors against the size of a design: oracles, exact identities, and simulations with known components."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from iclperm import stats
from iclperm.errors import RequestError
from iclperm.reference import curves as reference
from iclperm.stats import clustered_se, convergence
from iclperm.stats.components import Effects
from iclperm.stats.tensor import segment_sums
from iclperm.studies.convergence import ConvergenceFindings, convergence_findings

Array = npt.NDArray[Any]

sizes = st.integers(2, 5)
tensors = st.tuples(sizes, sizes, sizes).flatmap(lambda shape: hnp.arrays(np.uint8, shape, elements=st.integers(0, 1)))
tables = st.tuples(sizes, sizes).flatmap(
    lambda shape: hnp.arrays(np.float64, shape, elements=st.integers(0, 20).map(lambda value: value / 20))
)
seeds = st.integers(0, 2**32 - 1)
SIGMA = {"S": 0.05, "P": 0.04, "I": 0.3, "SP": 0.03, "SI": 0.1, "PI": 0.1, "SPI": 0.2}


def simulated(generator: np.random.Generator, shape: tuple[int, int, int], sigma: dict[str, float]) -> Array:
    """Scores [S, P, Q] with one Gaussian effect for every name in `sigma`."""
    scores = np.full(shape, 0.6)
    for effect, scale in sigma.items():
        part = [size if name in effect else 1 for size, name in zip(shape, "SPI", strict=True)]
        scores += scale * generator.standard_normal(part)
    return scores


def effects(sigma: dict[str, float]) -> Effects:
    return Effects(*(sigma.get(name, 0.0) ** 2 for name in Effects._fields))


class TestMeanError:
    @given(tensors)
    def test_agrees_with_the_oracle(self, correct: Array) -> None:
        found = convergence.mean_error(correct)
        assert found.mean == pytest.approx(correct.mean())
        expected = max(reference.mean_error(correct.astype(np.float64)), reference.unseen_error(correct.shape[2]))
        assert found.se == pytest.approx(expected, rel=1e-9)
        assert found.degrees >= min(correct.shape) - 1

    @given(tensors, seeds)
    def test_the_order_of_weighted_queries_is_irrelevant(self, correct: Array, seed: int) -> None:
        generator = np.random.default_rng(seed)
        weights = generator.integers(1, 4, correct.shape[2])
        order = generator.permutation(correct.shape[2])
        found = convergence.mean_error(correct, weights)
        again = convergence.mean_error(correct[:, :, order], weights[order])
        assert (found.mean, found.se) == pytest.approx((again.mean, again.se))

    @given(seeds)
    def test_a_weighted_mean_agrees_with_the_oracle(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        scores = generator.integers(0, 2, (*generator.integers(2, 5, 2), 12)).astype(np.float64)
        weights = generator.permutation(np.repeat([1, 3, 9], (5, 4, 3)))
        found = convergence.mean_error(scores, weights)
        expected = reference.weighted_mean_error(scores, weights.tolist())
        assert found.se == pytest.approx(max(expected, reference.unseen_error(weights.sum() ** 2 / np.sum(weights**2))))
        assert found.mean == pytest.approx(np.average(scores.mean(axis=(0, 1)), weights=weights))
        together = convergence.mean_error(scores, weights, classes=weights)
        assert together.se == pytest.approx(found.se)

    def test_a_weighted_mean_is_covered_where_orders_act_on_the_heavy_queries_alone(self) -> None:
        """Components that count all queries alike know a hundredth of the variance of orders."""
        generator = np.random.default_rng(16)
        weights, heavy = np.where(np.arange(100) < 90, 1, 9), np.arange(100) >= 90
        covered = 0
        for _ in range(400):
            lead = 0.2 * generator.standard_normal((8, 1))
            scores = (generator.random((6, 8, 100)) < 0.5 + lead * heavy).astype(np.uint8)
            _, low, high, _ = convergence.mean_error(scores, weights).interval()
            covered += low <= 0.5 <= high
        assert covered > 0.92 * 400

    def test_one_set_or_permutation_has_the_weighted_spread_of_the_other(self) -> None:
        generator = np.random.default_rng(17)
        weights = np.repeat([1, 9], (40, 10))
        scores = (generator.random((1, 12, 50)) < 0.5 + 0.3 * generator.standard_normal((12, 1))).astype(np.uint8)
        lines = np.average(scores[0], axis=1, weights=weights)
        for design in (scores, scores.swapaxes(0, 1)):
            found = convergence.mean_error(design, weights)
            assert found.se_held == pytest.approx(math.sqrt(lines.var(ddof=1) / 12), rel=0.02)

    def test_item_noise_of_a_weighted_curve_is_that_of_the_effective_queries(self) -> None:
        generator = np.random.default_rng(18)
        weights = np.repeat([1, 9], (200, 40))
        correct = (generator.random((8, 8, 1, 240)) < 0.6).astype(np.uint8)
        found = stats.curve_error(correct, weights, shots=[4])
        expected = math.sqrt(0.24 * np.sum(weights**2)) / weights.sum()
        assert found.order_noise[0] == pytest.approx(expected, rel=0.05)

    def test_it_is_never_below_the_error_clustered_by_set(self) -> None:
        """Components count a query once; where the sets differ on the heavy ones, the weighted means differ more."""
        correct = np.random.default_rng(16).integers(0, 2, (4, 3, 30), dtype=np.uint8)
        correct[:, :, :3] = np.array([0, 0, 1, 1])[:, None, None]
        weights = np.r_[np.full(3, 9), np.ones(27, int)]
        means = np.average(correct, axis=-1, weights=weights).mean(axis=1)
        found = convergence.mean_error(correct, weights)
        assert found.se >= found.se_held >= math.sqrt(means.var(ddof=1) / 4) * (1 - 1e-9)

    def test_equal_answers_have_the_error_of_what_the_queries_never_showed(self) -> None:
        for shape in ((3, 4, 30), (1, 1, 30), (3, 1, 30)):
            found = convergence.mean_error(np.ones(shape, np.uint8))
            assert (found.se, found.se_held) == (reference.unseen_error(30), 0)
            assert found.interval().low < 1 - stats.wilson_interval(0, 30).high < 0.89
            assert found.interval(held=True)[:3] == (1, 1, 1)
        weights = np.r_[np.full(10, 5), np.ones(20, int)]
        assert convergence.mean_error(np.ones((3, 4, 30)), weights).se == pytest.approx(
            reference.unseen_error(70**2 / 270)
        )

    def test_one_context_repeated_has_the_error_of_its_queries(self) -> None:
        answers = np.array([1, 0, 1, 1, 0, 1], np.uint8)
        for shape in ((1, 1), (3, 4), (1, 4), (3, 1)):
            found = convergence.mean_error(np.broadcast_to(answers, (*shape, 6)))
            assert found.se == pytest.approx(clustered_se(answers)), shape
        assert convergence.mean_error(answers[None, None]).covers == ("queries",)

    @pytest.mark.parametrize("axis", [0, 1])
    def test_one_level_of_an_axis_leaves_a_design_of_two(self, axis: int) -> None:
        scores = np.random.default_rng(3).standard_normal((4, 1, 6)).swapaxes(axis, 0)
        found = convergence.mean_error(scores)
        flat = scores.reshape(4, 6)
        rows, columns = 6 * flat.mean(axis=1).var(ddof=1), 4 * flat.mean(axis=0).var(ddof=1)
        rest = flat - flat.mean(axis=1, keepdims=True) - flat.mean(axis=0) + flat.mean()
        error = float(np.sum(rest**2)) / 15
        variance = max(rows - error, 0) / 24 + max(columns - error, 0) / 24 + error / 24
        floor = flat.mean(axis=1).var(ddof=1) / 4 if axis == 0 else 0.0
        assert found.se == pytest.approx(math.sqrt(max(variance, floor)))
        assert found.covers == (("sets", "queries") if axis == 0 else ("permutations", "queries"))

    def test_one_query_says_nothing(self) -> None:
        found = convergence.mean_error(np.ones((3, 4, 1), np.uint8))
        assert (found.mean, found.covers) == (1.0, ())
        assert math.isnan(found.se)
        assert math.isnan(found.interval().low)

    def test_other_shapes_are_refused(self) -> None:
        with pytest.raises(RequestError, match=r"scores of shape \[S, P, Q\], got \[3, 4\]"):
            convergence.mean_error(np.ones((3, 4)))

    def test_it_is_that_of_fresh_sets_permutations_and_queries(self) -> None:
        """Mean squared error, and coverage, over whole new designs; clustering by one axis alone falls short."""
        generator, shape, repeats = np.random.default_rng(4), (5, 8, 40), 400
        designs = [simulated(generator, shape, SIGMA) for _ in range(repeats)]
        errors = [convergence.mean_error(scores) for scores in designs]
        true = convergence.mean_variance(effects(SIGMA), *shape)
        assert np.mean([error.se**2 for error in errors]) == pytest.approx(true, rel=0.12)
        assert np.var([error.mean for error in errors]) == pytest.approx(true, rel=0.25)
        covered = np.mean([abs(error.mean - 0.6) <= error.interval().high - error.mean for error in errors])
        assert 0.93 <= covered <= 0.99
        by_set = np.mean([scores.mean(axis=(1, 2)).var(ddof=1) / 5 for scores in designs])
        assert by_set < 0.6 * true

    def test_held_it_is_that_of_fresh_sets_and_permutations_on_the_same_queries(self) -> None:
        generator, shape = np.random.default_rng(15), (5, 8, 40)
        queries = 0.3 * generator.standard_normal(40)
        contexts = {name: scale for name, scale in SIGMA.items() if name != "I"}
        errors = [convergence.mean_error(simulated(generator, shape, contexts) + queries) for _ in range(400)]
        true = convergence.mean_variance(effects(contexts), *shape)
        assert np.mean([error.se_held**2 for error in errors]) == pytest.approx(true, rel=0.12)
        assert np.var([error.mean for error in errors]) == pytest.approx(true, rel=0.25)
        middle = 0.6 + queries.mean()
        low, high = np.array([error.interval(held=True)[1:3] for error in errors]).T
        assert 0.93 <= np.mean((low <= middle) & (middle <= high)) <= 0.99


class TestNeeded:
    @given(st.lists(st.floats(0, 0.1), min_size=7, max_size=7), st.integers(0, 2), st.floats(0.02, 0.2))
    @settings(deadline=None, max_examples=40)
    def test_agrees_with_trying_every_size(self, values: list[float], place: int, half_width: float) -> None:
        sigma2, shape = Effects(*values), (3, 4, 50)
        found = convergence.needed_sizes(sigma2, shape, half_width)[place]
        variance = (half_width / 1.959963984540054) ** 2
        least = math.ceil(reference.Z**2 / half_width - reference.Z**2 - 1e-9)  # queries whose floor is within it
        tried = reference.needed(sigma2._asdict(), shape, place, variance * (1 + 1e-9), 2000)
        if found is None or found > 2000:
            assert tried is None or (place < 2 and shape[2] < least)
        else:
            assert tried is not None
            tried = max(tried, least) if place == 2 else tried
            assert abs(found - tried) <= 1  # where the variance meets the bound, roundings decide

    def test_no_fewer_queries_than_the_floor_of_the_error_takes(self) -> None:
        """One wrong answer in a tensor has next to no variance; 30 queries are not enough for a point for all that."""
        correct = np.ones((5, 20, 30), np.uint8)
        correct[1, 2, 3] = 0
        error = convergence.mean_error(correct)
        found = convergence.needed_sizes(error.sigma2, correct.shape, 0.01)
        assert (found.sets, found.permutations, found.queries) == (None, None, 381)
        assert found.together is not None
        assert found.together[2] == 381
        assert reference.Z * reference.unseen_error(381) <= 0.01 < reference.Z * reference.unseen_error(380)

    def test_all_together_are_enough_and_hardly_more(self) -> None:
        sigma2, shape = effects(SIGMA), (5, 20, 256)
        found = convergence.needed_sizes(sigma2, shape, 0.01).together
        assert found is not None
        wanted = (0.01 / 1.959963984540054) ** 2
        assert convergence.mean_variance(sigma2, *found) <= wanted
        smaller = (size * 0.95 for size in found)
        assert convergence.mean_variance(sigma2, *smaller) > wanted

    def test_what_other_axes_leave_cannot_be_mended(self) -> None:
        found = convergence.needed_sizes(Effects(0.01, 0, 0.2, 0, 0, 0, 0), (5, 20, 256), 0.01)
        assert found[:3] == (None, None, None)
        assert found.together is not None

    def test_held_queries_are_no_error_and_stay_as_many(self) -> None:
        sigma2 = effects(SIGMA)
        found = convergence.needed_sizes(sigma2, (5, 20, 256), 0.03, held=True)
        assert found == convergence.needed_sizes(sigma2._replace(I=9.0), (5, 20, 256), 0.03, held=True)
        free = convergence.needed_sizes(sigma2._replace(I=0.0), (5, 20, 256), 0.03)
        assert (found.sets, found.permutations, found.queries) == (free.sets, free.permutations, None)
        assert found.together is not None
        assert found.together[2] == 256
        wanted = (0.03 / 1.959963984540054) ** 2
        assert convergence.mean_variance(sigma2._replace(I=0.0), *found.together) <= wanted

    def test_of_an_axis_with_one_level_nothing_is_known(self) -> None:
        sigma2 = effects({"P": 0.03, "I": 0.2, "PI": 0.1})
        assert convergence.needed_sizes(sigma2, (1, 20, 256), 0.05).sets is None
        assert convergence.needed_sizes(sigma2, (1, 20, 256), 0.05).permutations is not None

    def test_a_negative_component_counts_as_none(self) -> None:
        clipped = Effects(0, 0.0, 0.1, 0, 0, 0, 0.1)
        raw = clipped._replace(P=-0.5)
        assert convergence.needed_sizes(raw, (5, 20, 256)) == convergence.needed_sizes(clipped, (5, 20, 256))

    def test_a_width_of_nothing_is_refused(self) -> None:
        with pytest.raises(RequestError, match="half_width must be above 0, got 0"):
            convergence.needed_sizes(effects(SIGMA), (5, 20, 256), 0)


class TestBlocks:
    @pytest.mark.parametrize(("num_queries", "size", "count"), [(1, 1, 1), (64, 1, 64), (256, 4, 64), (1000, 16, 63)])
    def test_blocks_are_powers_of_two(self, num_queries: int, size: int, count: int) -> None:
        edges = convergence.query_blocks(num_queries)
        assert (edges[0], edges[-1], len(edges) - 1) == (0, num_queries, count)
        assert (np.diff(edges)[:-1] == size).all()


class TestParts:
    @given(tables, st.data())
    @settings(deadline=None)
    def test_all_parts_agree_with_the_oracle(self, accuracy: Array, data: st.DataObject) -> None:
        axis = data.draw(st.integers(0, 1))
        size = data.draw(st.integers(1, accuracy.shape[axis] - 1))
        over = (convergence.convergence_over_sets, convergence.convergence_over_permutations)[axis]
        found = over(accuracy[:, :, None], [size])
        assert found.sizes == (size, accuracy.shape[axis])
        assert found.num_parts == (math.comb(accuracy.shape[axis], size), 1)
        for statistic, values in zip(found[3:], reference.over_parts(accuracy, axis, size), strict=True):
            spread = np.std(values)
            tolerance = {"abs": 1e-7, "nan_ok": True}
            assert statistic.mean[0, 0] == pytest.approx(np.mean(values), **tolerance)
            assert statistic.sd[0, 0] == pytest.approx(spread, **tolerance)
            assert statistic.se[0, 0] == pytest.approx(spread / math.sqrt(1 - size / accuracy.shape[axis]), **tolerance)

    @given(tables, st.integers(0, 1))
    @settings(deadline=None, max_examples=50)
    def test_the_whole_has_the_jackknife(self, accuracy: Array, axis: int) -> None:
        over = (convergence.convergence_over_sets, convergence.convergence_over_permutations)[axis]
        found = over(accuracy[:, :, None])
        left_out = reference.over_parts(accuracy, axis, accuracy.shape[axis] - 1)
        for statistic, values in zip(found[3:], left_out, strict=True):
            assert statistic.sd[-1, 0] == 0
            assert statistic.se[-1, 0] == pytest.approx(reference.jackknife_se(values), abs=1e-7, nan_ok=True)

    @given(tables)
    @settings(deadline=None)
    def test_of_a_mean_the_corrected_error_is_exact(self, accuracy: Array) -> None:
        """Whatever the size of the parts: the standard deviation of the permutations' means over √P'."""
        found = convergence.convergence_over_permutations(accuracy[:, :, None], range(1, accuracy.shape[1] + 1))
        spread = accuracy.mean(axis=0).std(ddof=1)
        expected = spread / np.sqrt(found.sizes)
        np.testing.assert_allclose(found.accuracy.se[:, 0], expected, atol=1e-12)

    def test_random_parts_find_what_all_parts_have(self) -> None:
        accuracy = np.random.default_rng(5).random((3, 16, 2))
        few = convergence.convergence_over_permutations(accuracy, [4], resamples=1500)
        every = convergence.convergence_over_permutations(accuracy, [4], resamples=2000)
        assert few.num_parts[0] == 1500
        assert every.num_parts[0] == math.comb(16, 4)
        for got, want in zip(few[3:], every[3:], strict=True):
            np.testing.assert_allclose(got.se[0], want.se[0], rtol=0.1)
            np.testing.assert_allclose(got.mean[0], want.mean[0], rtol=0.05)

    def test_parts_depend_on_the_seed_alone(self) -> None:
        accuracy = np.random.default_rng(6).random((3, 30, 1))
        first, again, other = (
            convergence.convergence_over_permutations(accuracy, [7], seed=seed).order.sd[0, 0] for seed in (0, 0, 1)
        )
        assert first == again != other

    def test_without_the_correction_the_error_is_too_small(self) -> None:
        """Known truth: the spread of µ and of the order sensitivity over fresh permutations, sets held."""
        generator, num_permutations, part = np.random.default_rng(7), 24, 12
        sets = 0.6 + 0.05 * generator.standard_normal((4, 1))

        def fresh(count: int) -> Array:
            shared = 0.04 * generator.standard_normal((1, count))
            return np.asarray(sets + shared + 0.03 * generator.standard_normal((4, count)))[:, :, None]

        whole = [
            convergence.convergence_over_permutations(fresh(num_permutations), [part], resamples=60) for _ in range(150)
        ]
        small = [fresh(part)[:, :, 0] for _ in range(3000)]
        true = {
            "accuracy": np.std([table.mean() for table in small]),
            "order": np.std([table.std(axis=1, ddof=1).mean() for table in small]),
        }
        for name, value in true.items():
            se = np.sqrt(np.mean([getattr(run, name).se[0, 0] ** 2 for run in whole]))
            sd = np.sqrt(np.mean([getattr(run, name).sd[0, 0] ** 2 for run in whole]))
            assert se == pytest.approx(value, rel=0.1), name
            assert sd == pytest.approx(value * math.sqrt(0.5), rel=0.1), name

    def test_the_jackknife_of_the_whole_is_the_error_of_fresh_permutations(self) -> None:
        generator = np.random.default_rng(8)
        tables = [0.1 * generator.standard_normal((1, 20, 1)) for _ in range(400)]
        found = [convergence.convergence_over_permutations(table, [20]).order for table in tables]
        true = np.std([order.mean[0, 0] for order in found])
        assert np.sqrt(np.mean([order.se[0, 0] ** 2 for order in found])) == pytest.approx(true, rel=0.1)

    def test_equal_accuracies_never_move(self) -> None:
        for over in (convergence.convergence_over_permutations, convergence.convergence_over_sets):
            found = over(np.full((4, 6, 2), 0.7))
            for statistic in found[3:]:
                assert (np.isnan(statistic.se) | (statistic.se <= 1e-15)).all()

    def test_one_level_tells_no_error(self) -> None:
        found = convergence.convergence_over_sets(np.random.default_rng(0).random((1, 5, 2)))
        assert found.sizes == (1,)
        assert np.isnan(found.accuracy.se).all()
        assert np.isnan(found.selection.mean).all()
        assert np.isfinite(found.order.mean).all()

    def test_impossible_requests_are_refused(self) -> None:
        accuracy = np.full((2, 3, 1), 0.5)
        with pytest.raises(RequestError, match="there are 3 permutations; a part cannot have 4"):
            convergence.convergence_over_permutations(accuracy, [4])
        with pytest.raises(RequestError, match="resamples must be at least 2, got 1"):
            convergence.convergence_over_sets(accuracy, resamples=1)
        with pytest.raises(RequestError, match="accuracy holds a NaN"):
            convergence.convergence_over_sets(np.full((2, 3, 1), np.nan))


class TestQueries:
    def test_all_parts_agree_with_the_definition(self) -> None:
        generator = np.random.default_rng(9)
        correct = generator.integers(0, 2, (3, 4, 2, 10), dtype=np.uint8)
        edges = [0, 3, 6, 10]
        found = convergence.convergence_over_queries(segment_sums(correct, edges), np.diff(edges), [2])
        halves = [np.r_[0:6], np.r_[0:3, 6:10], np.r_[3:10]]
        parts = [correct[..., half].mean(axis=-1) for half in halves]
        np.testing.assert_allclose(found.accuracy.mean[0], np.mean([part.mean(axis=(0, 1)) for part in parts], axis=0))
        orders = [part.std(axis=1, ddof=1).mean(axis=0) for part in parts]
        np.testing.assert_allclose(found.order.mean[0], np.mean(orders, axis=0))
        np.testing.assert_allclose(found.order.se[0], np.std(orders, axis=0) / math.sqrt(1 / 3))
        selections = [part.std(axis=0, ddof=1).mean(axis=0) for part in parts]
        np.testing.assert_allclose(found.selection.sd[0], np.std(selections, axis=0))

    def test_of_single_queries_it_is_the_clustered_error(self) -> None:
        correct = np.random.default_rng(10).integers(0, 2, (3, 4, 1, 30), dtype=np.uint8)
        found = convergence.convergence_over_queries(correct, np.ones(30))
        assert found.accuracy.se[-1, 0] == pytest.approx(clustered_se(correct[:, :, 0]))

    def test_item_noise_shrinks_the_printed_sensitivity(self) -> None:
        correct = np.random.default_rng(11).integers(0, 2, (3, 6, 1, 512), dtype=np.uint8)
        edges = convergence.query_blocks(512)
        found = convergence.convergence_over_queries(segment_sums(correct, edges), np.diff(edges))
        assert found.sizes == (8, 16, 32, 64)
        assert (np.diff(found.order.mean[:, 0]) < 0).all()
        assert found.order.mean[0, 0] == pytest.approx(0.5 / 8, rel=0.2)  # binomial noise of 64 queries

    def test_shapes_must_fit(self) -> None:
        with pytest.raises(RequestError, match=r"sums \[S, P, K, B\] and counts \[B\]"):
            convergence.convergence_over_queries(np.ones((2, 2, 1, 3)), [1, 1])


def answers(num_sets: int = 4, num_permutations: int = 12, num_queries: int = 128) -> Array:
    """correct [S, P, 2, Q] with sets, permutations and queries that differ."""
    generator = np.random.default_rng(12)
    shape = num_sets, num_permutations, num_queries
    chance = simulated(generator, shape, {"S": 0.03, "P": 0.04, "I": 0.2, "SP": 0.02})
    return np.stack([generator.random(shape) < part for part in (chance - 0.1, chance)], axis=2).astype(np.uint8)


class TestStudy:
    def test_it_says_everything_in_json_and_words(self) -> None:
        found = convergence_findings(answers(), shots=(2, 4))
        content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
        assert content["shape"] == [4, 12, 128]
        assert content["permutations"]["sizes"] == [5, 10, 12]
        assert content["sets"]["sizes"] == [1, 2, 3, 4]
        assert content["queries"]["sizes"] == [32, 64, 128]
        assert len(content["needed"]) == len(content["needed_held"]) == 2
        text = " ".join(found.conclusion())
        assert "With 4 sets x 12 permutations x 128 queries" in text
        assert "nan" not in text
        assert "4 sets: the spread between sets" in found.warnings[0]

    def test_numbers_are_those_of_the_statistics(self) -> None:
        correct = answers()
        found = convergence_findings(correct, shots=(2, 4), half_width=0.02)
        for place in range(2):
            error = convergence.mean_error(correct[:, :, place])
            assert found.errors[place] == error
            assert found.needed[place] == convergence.needed_sizes(error.sigma2, (4, 12, 128), 0.02)
            assert found.needed_held[place] == convergence.needed_sizes(error.sigma2, (4, 12, 128), 0.02, held=True)
        accuracy = correct.mean(axis=-1)
        np.testing.assert_allclose(found.permutations.accuracy.mean[-1], accuracy.mean(axis=(0, 1)))
        np.testing.assert_allclose(
            found.axis_se[0] ** 2,
            [
                sum(axis.accuracy.se[-1, k] ** 2 for axis in (found.permutations, found.sets, found.queries))
                for k in (0, 1)
            ],
        )
        assert found.total_se(found.sets, -1)[-1] == pytest.approx(math.sqrt(sum(found.errors[-1].parts)), rel=1e-9)

    def test_a_weight_counts_in_every_accuracy(self) -> None:
        correct = answers()
        weights = np.random.default_rng(13).integers(1, 4, 128)
        found = convergence_findings(correct, shots=(2, 4), weights=weights)
        expected = stats.curve(correct, weights=weights)
        for axis in (found.permutations, found.sets, found.queries):
            np.testing.assert_allclose(axis.accuracy.mean[-1], expected.mean)
            np.testing.assert_allclose(axis.order.mean[-1], expected.std_permutations)
        assert 64 < found.effective_queries < 128
        plain = convergence_findings(correct, shots=(2, 4))
        assert found.half_widths[0] > plain.half_widths[0]

    def test_needed_queries_carry_the_weights_of_the_run(self) -> None:
        correct, weights = answers(), np.r_[np.full(64, 3), np.ones(64, int)]
        found = convergence_findings(correct, shots=(2, 4), weights=weights, half_width=0.07)
        assert found.effective_queries == pytest.approx(256**2 / (64 * 10))
        equal = convergence.needed_sizes(found.errors[1].sigma2, (4, 12, found.effective_queries), 0.07)
        assert equal.queries is not None
        assert found.needed[1].queries == math.ceil(equal.queries * 128 / found.effective_queries)
        assert found.needed_held[1].together is not None
        assert found.needed_held[1].together[2] == 128

    def test_queries_that_fail_everywhere_are_left_out(self) -> None:
        correct = answers()
        state = np.zeros_like(correct)
        state[..., 40:60] = 1
        found = convergence_findings(correct, state, shots=(2, 4))
        again = convergence_findings(correct[..., np.r_[0:40, 60:128]], shots=(2, 4))
        assert json.dumps(found.to_dict()) == json.dumps(again.to_dict())

    def test_tables_have_a_cell_for_every_column(self) -> None:
        found = convergence_findings(answers(), shots=(0, 4))
        for full in (False, True):
            for table in found.tables(full):
                assert {len(row) for row in table.rows} == {len(table.header)}, table.title
                assert all(isinstance(cell, str) and "nan" not in cell for row in table.rows for cell in row)

    @pytest.mark.parametrize("shape", [(1, 8, 100), (4, 1, 100), (1, 1, 100), (3, 4, 1), (2, 2, 2)])
    def test_small_designs_say_what_they_can(self, shape: tuple[int, int, int]) -> None:
        found = convergence_findings(answers(*shape), shots=(2, 4))
        json.dumps(found.to_dict(), allow_nan=False)
        for table in found.tables(True):
            assert "nan" not in str(table.rows)
        assert "nan" not in " ".join(found.conclusion())
        assert any("one set only" in warning for warning in found.warnings) == (shape[0] == 1)
        draw_all(found)

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("shape", [(5, 4, 2, 30), (1, 4, 2, 30), (1, 1, 2, 30)])
    def test_answers_that_are_all_equal_tell_no_sizes(self, shape: tuple[int, ...]) -> None:
        found = convergence_findings(np.ones(shape, np.uint8), shots=(0, 1))
        told = found.conclusion()
        assert "± 0.0" not in told[0]
        assert "all answers are equal." in told[0]
        assert told[1:] == ["From answers that are all equal nothing can be told of the sizes that are needed."]
        for row in found.tables(False)[0].rows:
            assert row[2:6] == ("-",) * 4
            assert row[7:] == ("-", "-")
            assert float(row[6][1:]) > 0.06
        draw_all(found)  # matplotlib warns of a log axis without a scale

    def test_no_demonstrations_alone(self) -> None:
        correct = np.broadcast_to(answers()[:1, :1, :1], (4, 12, 1, 128))
        found = convergence_findings(correct, shots=(0,))
        assert found.half_widths_held.tolist() == [0]
        assert "order sensitivity" not in " ".join(found.conclusion())
        draw_all(found)

    def test_the_needed_design_has_the_wanted_width_in_simulation(self) -> None:
        """Plan with the estimate of one pilot's true components, run it, and look at the spread of the means."""
        sigma = {"S": 0.06, "P": 0.05, "SP": 0.03, "SPI": 0.3}
        planned = convergence.needed_sizes(effects(sigma), (5, 10, 50), 0.03).together
        assert planned is not None
        generator = np.random.default_rng(14)
        means = [simulated(generator, planned, sigma).mean() for _ in range(400)]
        assert 1.96 * np.std(means) == pytest.approx(0.03, rel=0.12)

    def test_bad_shapes_are_refused(self) -> None:
        with pytest.raises(RequestError, match=r"and K shots, got \[4, 12, 2, 128\] and \[4\]"):
            convergence_findings(answers(), shots=(4,))
        with pytest.raises(RequestError, match="no query has an answer"):
            convergence_findings(answers(), np.ones((4, 12, 2, 128), np.uint8), shots=(2, 4))

    def test_figures_are_drawn(self) -> None:
        draw_all(convergence_findings(answers(), shots=(2, 4), title="task, model"))


def draw_all(found: ConvergenceFindings) -> None:
    from matplotlib.figure import Figure

    plots = found.plots()
    assert "convergence" in plots
    for stem, plot in plots.items():
        figure = Figure(figsize=plot.size)
        plot.draw(figure)
        assert len(figure.axes) == 3 or stem == "convergence_scores"
