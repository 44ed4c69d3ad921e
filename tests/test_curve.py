"""The curve over the number of demonstrations: tests of plateaus against oracles and known truth, and the study."""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import t as student

from iclperm import stats
from iclperm.errors import ConfigError, DataError, RequestError
from iclperm.reference import curves as reference
from iclperm.stats import plateau as module
from iclperm.stats.incomplete import filled
from iclperm.studies.curve import CurveFindings, average_states, curve_findings, findings

Array = npt.NDArray[Any]

bits = st.integers(0, 1)
pairs = st.integers(2, 12).flatmap(lambda size: hnp.arrays(np.uint8, (2, 3, size), elements=bits))
tensors = st.tuples(st.integers(2, 3), st.integers(2, 4), st.integers(3, 8)).flatmap(
    lambda shape: hnp.arrays(np.uint8, (*shape[:2], 4, shape[2]), elements=bits)
)
seeds = st.integers(0, 2**32 - 1)
SHOTS = (0, 1, 2, 4)


def walk(
    generator: np.random.Generator, shape: tuple[int, int, int], change: Array | float, moved: float = 0.1
) -> tuple[Array, Array]:
    """Answers [S, P, Q] at two k: a share `moved` of the queries changes, on average by `change` of all queries."""
    first = (generator.random(shape) < 0.6).astype(np.uint8)
    chance = generator.random(shape)
    rises, falls = (moved + np.asarray(change)) / 2, (moved - np.asarray(change)) / 2
    second = first.copy()
    second[(first == 0) & (chance < rises / 0.4)] = 1
    second[(first == 1) & (chance < falls / 0.6)] = 0
    return first, second


def at_two(first: Array, second: Array, **kwargs: Any) -> module.Plateau:
    return module.plateau(np.stack([first, second], axis=2), shots=(4, 20), first=4, **kwargs)


class TestPairedDifference:
    @given(pairs, seeds)
    def test_agrees_with_the_oracle(self, answers: Array, seed: int) -> None:
        weights = np.random.default_rng(seed).integers(1, 5, answers.shape[-1])
        found = module.paired_difference(answers[0], answers[1], weights)
        for cell in range(3):
            expected = reference.paired(answers[0, cell].tolist(), answers[1, cell].tolist(), weights.tolist())
            got = found.difference[cell], found.centre[cell], found.se[cell]
            assert got == pytest.approx(expected, abs=1e-12)

    def test_it_is_the_formula_of_agresti_and_min(self) -> None:
        first, second = np.zeros(100, np.uint8), np.zeros(100, np.uint8)
        second[:12], first[12:17] = 1, 1  # b = 12, c = 5
        found = module.paired_difference(first, second)
        assert float(found.difference) == pytest.approx(0.07)
        assert float(found.centre) == pytest.approx(7 / 102)
        assert float(found.se) == pytest.approx(math.sqrt(18 - 49 / 102) / 102)

    @given(pairs, seeds)
    def test_the_order_of_the_queries_is_irrelevant(self, answers: Array, seed: int) -> None:
        generator = np.random.default_rng(seed)
        weights = generator.integers(1, 4, answers.shape[-1])
        order = generator.permutation(answers.shape[-1])
        found = module.paired_difference(*answers, weights)
        again = module.paired_difference(*answers[..., order], weights[order])
        for got, want in zip(found, again, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-12)

    def test_the_same_answers_are_not_beyond_doubt(self) -> None:
        few = module.paired_difference(np.ones(5, np.uint8), np.ones(5, np.uint8))
        many = module.paired_difference(np.ones(500, np.uint8), np.ones(500, np.uint8))
        assert (float(few.difference), float(few.se)) == (0, pytest.approx(1 / 7))
        assert float(many.se) == pytest.approx(1 / 502)

    def test_one_query_has_no_error(self) -> None:
        assert math.isnan(float(module.paired_difference([1], [0]).se))

    def test_other_queries_are_refused(self) -> None:
        with pytest.raises(RequestError, match=r"the same queries, got \[2\] and \[3\]"):
            module.paired_difference([1, 0], [1, 0, 1])


class TestPlateau:
    @given(tensors, st.floats(0.01, 0.4))
    @settings(deadline=None)
    def test_every_trajectory_agrees_with_the_oracle(self, correct: Array, margin: float) -> None:
        found = module.plateau(correct, shots=SHOTS, first=1, margin=margin)
        assert (found.first, found.last) == (1, 4)
        ones = [1.0] * correct.shape[-1]
        flat, changes = np.empty(correct.shape[:2]), np.empty(correct.shape[:2])
        for cell in np.ndindex(correct.shape[:2]):
            one, other = correct[cell][1].tolist(), correct[cell][3].tolist()
            difference, _, se = reference.paired(one, other, ones)
            assert (found.difference[cell], found.se[cell]) == pytest.approx((difference, se))
            flat[cell], changes[cell] = reference.equivalence(one, other, ones, margin)
        np.testing.assert_allclose(found.p_equivalent, module.holm(flat), atol=1e-9)
        np.testing.assert_allclose(found.p_different, module.holm(changes), atol=1e-9)
        assert found.shares.sum() == pytest.approx(1)

    def test_equal_answers_are_equivalent_where_the_queries_suffice(self) -> None:
        many, few = (np.ones((3, 4, size), np.uint8) for size in (500, 20))
        found = at_two(many, many)
        assert (found.state == 1).all()
        assert found.overall.state == "equivalent"
        assert found.true_std == 0
        assert found.true_within == 1
        found = at_two(few, few)
        assert (found.state == 0).all()
        assert found.overall.state == "undecided"

    def test_a_large_change_is_different_and_no_plateau(self) -> None:
        found = at_two(*walk(np.random.default_rng(0), (3, 4, 400), 0.3, moved=0.35))
        assert (found.state == 2).all()
        assert found.overall.state == "different"
        assert (found.p_equivalent == 1).all()

    def test_a_shown_difference_within_the_margin_is_a_plateau(self) -> None:
        found = at_two(*walk(np.random.default_rng(1), (2, 2, 40_000), 0.008, moved=0.05))
        assert (found.p_different <= 0.05).all()
        assert (found.state == 1).all()

    def test_the_interval_within_the_margin_is_equivalence(self) -> None:
        for seed in range(40):
            found = at_two(*walk(np.random.default_rng(seed), (4, 5, 200), 0.005, moved=0.08))
            _, low, high, level = found.overall.interval
            assert level == pytest.approx(0.9)
            within = low > -0.02 and high < 0.02
            assert within == (found.overall.p_equivalent < 0.05)

    @pytest.mark.parametrize("margin", [0.02, 0.05])
    def test_a_difference_as_large_as_the_margin_is_seldom_called_equivalent(self, margin: float) -> None:
        """The error rate of the two one-sided tests at its worst case, one trajectory at a time."""
        paired = module.paired_difference(*walk(np.random.default_rng(2), (20, 200, 400), margin, moved=0.15))
        equivalent, _ = module.paired_tests(paired, margin)
        assert np.mean(equivalent <= 0.05) <= 0.06

    def test_without_a_difference_few_are_called_different(self) -> None:
        first, second = walk(np.random.default_rng(3), (20, 200, 256), 0.0, moved=0.1)
        paired = module.paired_difference(first, second)
        _, different = module.paired_tests(paired, 0.02)
        assert 0.03 <= np.mean(different <= 0.05) <= 0.06
        families = [at_two(first[[s]], second[[s]]) for s in range(20)]
        assert np.mean([(family.p_different <= 0.05).any() for family in families]) <= 0.2

    def test_the_average_keeps_its_error_rates_over_new_sets(self) -> None:
        """No change on average, but sets that differ: single trajectories change, the average must not."""
        generator, calls, repeats = np.random.default_rng(4), 0, 250
        for _ in range(repeats):
            change = 0.05 * generator.standard_normal((5, 1, 1))
            calls += at_two(*walk(generator, (5, 6, 100), change, moved=0.3)).overall.p_different <= 0.05
        assert calls / repeats <= 0.08

    def test_the_spread_of_the_changes_is_recovered_without_item_noise(self) -> None:
        generator, found = np.random.default_rng(5), []
        for _ in range(60):
            change = 0.04 * generator.standard_normal((5, 8, 1))
            found.append(at_two(*walk(generator, (5, 8, 200), change, moved=0.25)))
        assert np.sqrt(np.mean([pair.true_std**2 for pair in found])) == pytest.approx(0.04, rel=0.1)
        observed = np.sqrt(np.mean([pair.difference.var(ddof=1) for pair in found]))
        assert observed > 0.048  # with the noise in it
        assert np.mean([pair.true_within for pair in found]) == pytest.approx(math.erf(0.5 / math.sqrt(2)), abs=0.05)

    def test_what_is_resolvable_is_resolved_four_times_in_five(self) -> None:
        first, second = walk(np.random.default_rng(6), (20, 100, 500), 0.0, moved=0.1)
        margin = at_two(first, second).resolvable
        paired = module.paired_difference(first, second)
        equivalent, _ = module.paired_tests(paired, margin)
        assert np.mean(equivalent <= 0.05) == pytest.approx(0.8, abs=0.03)
        again = at_two(first, second, margin=margin / 2)
        assert again.num_queries_needed == pytest.approx(4)

    @given(tensors, seeds)
    @settings(deadline=None)
    def test_the_order_of_weighted_queries_is_irrelevant(self, correct: Array, seed: int) -> None:
        generator = np.random.default_rng(seed)
        weights = generator.integers(1, 4, correct.shape[-1])
        order = generator.permutation(correct.shape[-1])
        found = module.plateau(correct, weights, shots=SHOTS, first=0)
        again = module.plateau(correct[..., order], weights[order], shots=SHOTS, first=0)
        np.testing.assert_allclose(found.p_equivalent, again.p_equivalent, atol=1e-9)
        assert found.overall.p_different == pytest.approx(again.overall.p_different, abs=1e-9)

    def test_one_query_decides_nothing(self) -> None:
        found = at_two(np.zeros((2, 3, 1), np.uint8), np.ones((2, 3, 1), np.uint8))
        assert (found.state == 0).all()
        assert found.overall.state == "undecided"
        assert math.isnan(found.true_std)

    def test_one_trajectory_is_tested_alone(self) -> None:
        found = at_two(*walk(np.random.default_rng(7), (1, 1, 300), 0.2, moved=0.3))
        assert found.overall.error.covers == ("queries",)
        assert found.state.tolist() == [[2]]
        assert math.isnan(found.true_std)

    def test_shares_over_all_k_are_those_of_each(self) -> None:
        correct = np.random.default_rng(8).integers(0, 2, (3, 4, 4, 60), dtype=np.uint8)
        shares = module.plateau_shares(correct, shots=SHOTS, margin=0.1)
        for place, k in enumerate(SHOTS[:-1]):
            one = module.plateau(correct, shots=SHOTS, first=k, margin=0.1)
            np.testing.assert_array_equal(shares[place], one.shares)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"first": 3}, "k = 3 was not run; choose from 0, 1, 2, 4"),
            ({"first": 4}, "ascending order, got 4 and 4"),
            ({"first": 1, "margin": 0.0}, r"margin must be above 0, got 0\.0"),
            ({"first": 1, "shots": (0, 2, 1, 4)}, "ascending shots"),
        ],
    )
    def test_impossible_requests_are_refused(self, wrong: dict[str, Any], message: str) -> None:
        with pytest.raises(RequestError, match=message):
            module.plateau(np.ones((2, 2, 4, 5), np.uint8), **({"shots": SHOTS} | wrong))


class TestSteps:
    @given(tensors)
    def test_agrees_with_the_oracle(self, correct: Array) -> None:
        found = module.steps(correct)
        accuracy = stats.accuracy(correct).values
        for cell in np.ndindex(correct.shape[:2]):
            assert (found.up[cell], found.down[cell]) == pytest.approx(reference.steps(accuracy[cell]))
        assert found.never_down == pytest.approx(np.mean(found.down == 0))

    def test_noise_alone_makes_few_steps_beyond_it(self) -> None:
        correct = (np.random.default_rng(9).random((5, 20, 21, 256)) < 0.7).astype(np.uint8)
        found = module.steps(correct)
        assert found.down.mean() > 0.4
        assert 0.01 < found.down_beyond_noise.mean() < 0.035
        assert 0.01 < found.up_beyond_noise.mean() < 0.035

    def test_a_staircase_goes_up(self) -> None:
        correct = np.tril(np.ones((6, 6), np.uint8), -1).repeat(50, axis=1)[None, None]  # [1, 1, 6, 300]
        found = module.steps(correct)
        assert (found.up.item(), found.up_beyond_noise.item(), found.down.item()) == (1, 1, 0)
        assert (found.never_down, found.never_down_beyond_noise) == (1, 1)
        back = module.steps(correct[:, :, ::-1])
        assert (back.down_beyond_noise.item(), back.never_down_beyond_noise) == (1, 0)


class TestArrival:
    @given(hnp.arrays(np.int64, (2, 3, 4), elements=st.integers(0, 50)), st.sampled_from([0.02, 0.1]))
    def test_agrees_with_the_oracle(self, hits: Array, margin: float) -> None:
        accuracy = hits / 50
        found = module.arrival(accuracy, SHOTS, margin)
        for cell in np.ndindex(2, 3):
            assert (found.first[cell], found.stays[cell]) == reference.arrival(accuracy[cell], SHOTS, margin)

    def test_a_visit_is_no_stay(self) -> None:
        found = module.arrival(np.array([[[0.5, 0.7, 0.6, 0.7]]]), SHOTS)
        assert (found.first.item(), found.stays.item()) == (1, 4)


class TestOneShot:
    def test_every_first_demonstration_is_compared_once(self) -> None:
        generator = np.random.default_rng(10)
        zero = generator.integers(0, 2, 80, dtype=np.uint8)
        of_row = {row: generator.integers(0, 2, 80, dtype=np.uint8) for row in (3, 7, 11)}
        rows = np.array([[3, 7, 3], [11, 11, 7]])
        one = np.array([[of_row[row] for row in line] for line in rows.tolist()])
        found = module.one_shot(zero, one, rows)
        assert found.rows.tolist() == [3, 7, 11]
        for place, row in enumerate(found.rows.tolist()):
            difference, centre, se = reference.paired(zero.tolist(), of_row[row].tolist(), [1.0] * 80)
            assert (found.gain[place], found.se[place]) == pytest.approx((difference, se))
            assert found.p[place] == pytest.approx(2 * student.sf(abs(centre) / se, 79))
        np.testing.assert_allclose(found.p_holm, module.holm(found.p))

    def test_known_effects_are_found(self) -> None:
        generator = np.random.default_rng(11)
        zero = (generator.random(400) < 0.5).astype(np.uint8)
        share = np.array([0.8, 0.5, 0.5, 0.2])
        change = generator.random((1, 4, 400))
        one = np.where(change < 0.5, zero, generator.random((1, 4, 400)) < share[:, None]).astype(np.uint8)
        found = module.one_shot(zero, one, np.arange(4)[None])
        assert (found.num_better, found.num_worse) == (1, 1)
        assert found.true_std == pytest.approx(np.std([0.15, 0, 0, -0.15], ddof=1), rel=0.3)

    def test_no_demonstration_that_changes_anything_has_no_spread(self) -> None:
        zero = np.random.default_rng(12).integers(0, 2, 50, dtype=np.uint8)
        found = module.one_shot(zero, np.broadcast_to(zero, (2, 3, 50)), np.arange(6).reshape(2, 3))
        assert (found.gain == 0).all()
        assert (found.p == 1).all()
        assert found.true_std == 0

    def test_shapes_must_fit(self) -> None:
        with pytest.raises(RequestError, match=r"zero \[Q\], one \[S, P, Q\] and rows \[S, P\]"):
            module.one_shot([1, 0], np.ones((2, 2, 2), np.uint8), [1, 2])


class TestCurveError:
    def test_without_demonstrations_there_is_one_context(self) -> None:
        generator = np.random.default_rng(13)
        correct = generator.integers(0, 2, (4, 5, 3, 60), dtype=np.uint8)
        correct[:, :, 0] = correct[0, 0, 0]
        found = module.curve_error(correct, shots=(0, 1, 2))
        assert found.covers == (("queries",), *[("sets", "permutations", "queries")] * 2)
        assert found.se[0] == pytest.approx(stats.clustered_se(correct[0, 0, 0]))
        assert found.se_held[0] == 0
        assert found.order_noise[0] == 0
        assert (found.se_held[1:] <= found.se[1:]).all()
        np.testing.assert_allclose(found.mean, correct.mean(axis=(0, 1, 3)))

    def test_item_noise_is_what_finite_queries_add_to_the_spread(self) -> None:
        correct = (np.random.default_rng(14).random((6, 30, 1, 200)) < 0.7).astype(np.uint8)
        found = module.curve_error(correct, shots=(4,))
        assert found.order_noise[0] == pytest.approx(math.sqrt(0.21 / 200), rel=0.02)
        assert found.order_noise[0] == pytest.approx(stats.curve(correct).std_permutations[0], rel=0.1)


def learner(num_sets: int = 3, num_permutations: int = 6, seed: int = 0) -> tuple[Array, Array]:
    """correct [S, P, 9, 120] of a learner that gains up to k = 4, and the rows [S, P] that stand first."""
    generator = np.random.default_rng(seed)
    quality = 0.55 + 0.25 * (1 - 0.5 ** np.minimum(np.arange(9), 4))
    difficulty = 0.25 * generator.standard_normal(120)
    drift = 0.02 * generator.standard_normal((num_sets, num_permutations, 9, 1)).cumsum(axis=2)
    noise = generator.random((num_sets, num_permutations, 9, 120))
    correct = (noise * 0.3 + 0.35 < quality[:, None] + drift + difficulty).astype(np.uint8)
    correct[:, :, 0] = correct[0, 0, 0]
    rows = generator.permuted(np.tile(np.arange(num_permutations), (num_sets, 1)), axis=1)
    return correct, rows + 100 * np.arange(num_sets)[:, None]


def study(**kwargs: Any) -> CurveFindings:
    correct, rows = learner()
    return curve_findings(correct, **({"shots": range(9), "rows": rows} | kwargs))


class TestStudy:
    def test_it_says_everything_in_json_and_words(self) -> None:
        found = study(texts={3: "a text\nof two lines " * 9}, chance=0.25, title="task, model")
        content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
        assert content["shots"] == list(range(9))
        assert np.shape(content["accuracy"]) == (3, 6, 9)
        assert [pair["first"] for pair in content["plateaus"]] == [4]
        assert np.shape(content["shares"]) == (8, 3)
        assert len(content["one_shot"]["rows"]) == 18
        text = " ".join(found.conclusion())
        assert "From k = 4 to 8" in text
        assert "of 18 demonstrations" in text
        assert "nan" not in text

    def test_how_many_is_told_for_every_k_that_was_run(self) -> None:
        """0.3 at k = 0, 0.9 at k = 2 and 0.6 beyond: the best is named, and what is better or worse than the last."""
        generator = np.random.default_rng(5)
        level = np.array([0.3, 0.9, 0.6, 0.6])[:, None]
        correct = (generator.random((6, 6, 4, 400)) < level).astype(np.uint8)
        found = curve_findings(correct, shots=(0, 2, 4, 8))
        mean, sentence = found.conclusion()[:2]
        for place, k in enumerate(found.shots):
            assert f"{100 * found.curve.mean[place]:.1f} % at k = {k}" in mean
        assert sentence == (
            "How many: the mean is highest at k = 2, which as the best of several looks better than it is. Against k = "
            "8: k = 0 shown to be worse, k = 2 shown to be better, k = 4 not told from it (Holm, 5%)."
        )
        for place, k in enumerate(found.shots[:-1]):
            assert found.to_last[place] == module.plateau(correct, shots=found.shots, first=k).overall
        longer = curve_findings(np.repeat(correct[:, :, [0, 1, 2]], [4, 1, 3], axis=2), shots=range(8))
        mean, sentence = longer.conclusion()[:2]
        assert re.findall(r"at k = (\d)", mean) == ["0", "4", "7"]
        assert "highest at k = 4" in sentence
        assert "k = 0 to 3 shown to be worse, k = 4 shown to be better, k = 5 and 6 not told from it" in sentence
        few = curve_findings(correct[:2, :2, :, :6], shots=(0, 2, 4, 8)).conclusion()[1]
        assert few.endswith("none of the others is told from it; more sets, orders and queries would tell (Holm, 5%).")
        assert "How many" not in " ".join(curve_findings(correct[:, :, :2], shots=(0, 2)).conclusion())

    def test_accuracies_and_bands_are_those_of_the_statistics(self) -> None:
        correct, _ = learner()
        found = study()
        expected = stats.curve(correct)
        for got, want in zip(found.curve, expected, strict=True):
            np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(found.accuracy, stats.accuracy(correct).values)
        assert found.curve.std_permutations[0] == found.curve.std_sets[0] == 0

    def test_tables_have_a_cell_for_every_column(self) -> None:
        for full in (False, True):
            for table in study().tables(full):
                assert {len(row) for row in table.rows} == {len(table.header)}, table.title
                assert all(isinstance(cell, str) and "nan" not in cell for row in table.rows for cell in row)
        assert len(study().tables(True)) > len(study().tables(False))

    def test_queries_that_fail_everywhere_are_left_out(self) -> None:
        correct, rows = learner()
        state = np.zeros_like(correct)
        state[..., 10:20] = 2
        kept = np.r_[0:10, 20:120]
        found = curve_findings(correct, state, shots=range(9), rows=rows)
        again = curve_findings(correct[..., kept], shots=range(9), rows=rows)
        for name in ("plateaus", "steps", "one_shot", "error"):
            left, right = (json.dumps(run.to_dict()[name]) for run in (found, again))
            assert left == right, name

    def test_an_answer_that_fails_once_is_filled_in_and_said(self) -> None:
        correct, rows = learner()
        state = np.zeros_like(correct)
        state[1, 2, 5:, 10:40] = 2
        found = curve_findings(correct, state, shots=range(9), rows=rows)
        whole = filled(correct, state)
        again = module.curve_error(whole.items, shots=range(9))
        flat = module.plateau(whole.items, shots=range(9), first=4)
        np.testing.assert_array_equal(found.error.se, again.se)
        np.testing.assert_array_equal(found.plateaus[0].difference, flat.difference)
        assert any(warning.startswith(f"{whole.share:.1%} of the answers are missing") for warning in found.warnings)

    def test_with_sets_of_their_own_for_each_k_there_are_no_trajectories(self) -> None:
        found = study(resampled=True)
        assert (found.shares, found.steps, found.arrival, found.one_shot) == (None, None, None, None)
        assert set(found.plots()) == {"curve"}
        assert any("no ordering has a trajectory" in warning for warning in found.warnings)
        (pair,) = found.to_dict()["plateaus"]
        assert set(pair) == {"first", "last", "margin", "level", "overall", "average"}
        assert "trajector" not in " ".join(found.conclusion())
        for table in found.tables(True):
            assert not any("trajectories" in row for row in table.rows)

    @pytest.mark.parametrize(
        ("shots", "claims"), [(range(9), (4,)), (range(4, 13), (4, 8)), ((0, 1), (0,)), ((1, 2, 6), (2,))]
    )
    def test_plateaus_are_sought_where_the_paper_does_or_from_the_middle(self, shots: Any, claims: Any) -> None:
        correct, _ = learner()
        found = curve_findings(correct[:, :, : len(shots)], shots=tuple(shots))
        assert tuple(pair.first for pair in found.plateaus) == claims

    def test_several_claims_share_an_error_rate(self) -> None:
        (pair,) = study().plateaus

        def averages(*p_values: float) -> tuple[str, ...]:
            tested = (pair.overall._replace(p_equivalent=p, p_different=1.0) for p in p_values)
            return average_states(tuple(pair._replace(overall=overall) for overall in tested), 0.05)

        assert averages(0.03) == ("equivalent",)
        assert averages(0.03, 0.04, 0.5) == ("undecided",) * 3
        assert averages(0.01, 0.04, 0.5) == ("equivalent", "undecided", "undecided")

    @pytest.mark.parametrize("shape", [(1, 6), (3, 1), (1, 1)])
    def test_one_set_or_permutation_is_enough(self, shape: tuple[int, int]) -> None:
        correct, rows = learner(*shape)
        found = curve_findings(correct, shots=range(9), rows=rows)
        text = json.dumps(found.to_dict(), allow_nan=False)
        assert "conclusion" in text
        assert any("one set only" in warning for warning in found.warnings) == (shape[0] == 1)
        for table in found.tables(True):
            assert "nan" not in str(table.rows)
        assert "nan" not in " ".join(found.conclusion())
        draw_all(found)

    def test_one_query_tells_nothing_beyond_itself(self) -> None:
        correct, rows = learner()
        found = curve_findings(correct[..., :1], shots=range(9), rows=rows)
        json.dumps(found.to_dict(), allow_nan=False)
        assert found.averages == ("undecided",)
        assert "nan" not in " ".join(found.conclusion())
        draw_all(found)

    def test_what_cannot_be_a_curve_is_refused(self) -> None:
        correct, _ = learner()
        with pytest.raises(DataError, match="at least two numbers of shots"):
            curve_findings(correct[:, :, :1], shots=(4,))
        with pytest.raises(RequestError, match="no query has an answer; see the states"):
            curve_findings(correct, np.ones_like(correct), shots=range(9))
        with pytest.raises(RequestError, match=r"\[S, P, K, Q\], got \[3, 6, 9\]"):
            curve_findings(correct[..., 0], shots=range(9))
        with pytest.raises(RequestError, match="k = 7 was not run"):
            curve_findings(correct[:, :, :4], shots=range(4), claims=(7,))

    @pytest.mark.parametrize("error", [None, DataError("the data is another"), ConfigError("no such folder")])
    def test_a_run_without_its_data_still_has_a_curve(self, error: Exception | None) -> None:
        correct, rows = learner()

        class Answered(SimpleNamespace):
            @property
            def demonstrations(self) -> Any:
                if error is not None:
                    raise error
                return SimpleNamespace(rows=rows[:, :, None], texts={})

        run: Any = Answered(
            correct=correct,
            state=np.zeros_like(correct),
            weights=np.ones(120, np.int64),
            study=SimpleNamespace(resample="none", cells="crossed", is_per_query=False, wanted=None),
            shots=tuple(range(9)),
            labels=(),
            shared_labels=(),
            has_row_choices=False,
            splits={
                "test": SimpleNamespace(weights=np.ones(120, np.int64), context_of=np.zeros(correct.shape[:3], int))
            },
            chance=0.5,
            title="task, model",
        )
        found = findings(run)
        assert (found.one_shot is None) == (error is not None)
        assert any("against none is left out" in warning for warning in found.warnings) == (error is not None)
        assert found.chance == 0.5

    def test_figures_are_drawn(self) -> None:
        for found in (study(), study(resampled=True, title="task, model", chance=0.25)):
            draw_all(found)
        correct, rows = learner(7, 3)
        draw_all(curve_findings(correct, shots=range(9), rows=rows))


def draw_all(found: CurveFindings) -> None:
    from matplotlib.figure import Figure

    for name, plot in found.plots().items():
        figure = Figure(figsize=plot.size)
        plot.draw(figure)
        drawn = [axes for axes in figure.axes if axes.get_visible()]
        assert drawn, name
        assert all(axes.lines or axes.patches for axes in drawn), name
