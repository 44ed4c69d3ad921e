"""Queries that were drawn class by class: what an order does to one class and undoes in another is no item noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import TOLERANCES

import iclperm
from iclperm import stats
from iclperm.external import describe, load
from iclperm.reference import stats as slow
from iclperm.runs.identity import Identities
from iclperm.stats.plateau import plateau
from iclperm.stats.settling import blocks_of, settling
from iclperm.stats.winners_curse import noise_within_sets, order_noise
from iclperm.studies import sensitivity
from iclperm.studies.classes import are_by_design
from iclperm.studies.compared import Compared, of_array, of_run
from iclperm.studies.comparing import comparing
from iclperm.studies.outcomes import outcomes_of
from iclperm.studies.studied import matched_interval

CLOSE = TOLERANCES["incomplete answers"]["float64"]
Array = npt.NDArray[Any]


def favoured(
    generator: np.random.Generator, count: int, order: float = 0.05, by_label: float = 0.3, size: int = 6
) -> tuple[Array, Array]:
    """Answers [S, P, 4·count] of a model that favours other labels in every ordering, and the classes of its queries.

    Recall of each class moves by `by_label`, in sum by nothing; accuracy moves by `order` with the permutation.
    """
    moved = generator.normal(0, by_label, (4, size, size))
    moved -= moved.mean(axis=0)
    recall = np.clip(0.5 + order * generator.standard_normal(size) + moved, 0.01, 0.99)
    correct = generator.random((4, size, size, count)) < recall[..., None]
    return np.moveaxis(correct, 0, 2).reshape(size, size, -1).astype(np.uint8), np.repeat(np.arange(4), count)


def by_class(correct: Array, classes: Array, weights: Array) -> tuple[float, float, float]:
    """σ²_S, σ²_P and σ²_SP of the weighted accuracy: its mean squares less what each class's queries add to them."""
    num_sets, num_permutations, _ = correct.shape
    table = correct @ weights / weights.sum()
    grand, rows, columns = table.mean(), table.mean(axis=1), table.mean(axis=0)
    s, p = num_sets - 1, num_permutations - 1
    squares = [
        num_permutations * sum((row - grand) ** 2 for row in rows) / s,
        num_sets * sum((column - grand) ** 2 for column in columns) / p,
        sum((table[i, j] - rows[i] - columns[j] + grand) ** 2 for i, j in np.ndindex(*table.shape)) / (s * p),
    ]
    for name in set(classes.tolist()):
        members = classes == name
        _, sigma2 = slow.variance_components(correct[:, :, members].astype(float))
        factor = float(weights[members] @ weights[members]) / weights.sum() ** 2
        squares[0] -= factor * (num_permutations * sigma2["SI"] + sigma2["SPI"])
        squares[1] -= factor * (num_sets * sigma2["PI"] + sigma2["SPI"])
        squares[2] -= factor * sigma2["SPI"]
    return (squares[0] - squares[2]) / num_permutations, (squares[1] - squares[2]) / num_sets, squares[2]


class TestComponents:
    @settings(max_examples=20)
    @given(st.integers(0, 2**32), st.sampled_from([1.0, 3.0]), st.booleans())
    def test_agree_with_loops_over_the_classes(self, seed: int, heavy: float, graded: bool) -> None:
        generator = np.random.default_rng(seed)
        classes = generator.permutation(np.repeat([0, 1, 2], [3, 4, 6]))
        weights = np.where(classes == 0, heavy, 1.0)
        correct: Array = (generator.random((3, 4, 13)) < 0.6).astype(np.uint8)
        if graded:
            correct = generator.random(correct.shape)
        found = stats.variance_components(correct, weights=weights, classes=classes)
        ours = (found.sigma2.S, found.sigma2.P, found.sigma2.SP)
        np.testing.assert_allclose(ours, by_class(correct, classes, weights), rtol=0, atol=CLOSE)
        assert [stratum.num_queries for stratum in found.strata] == [3, 4, 6]
        again = stats.variance_components(correct, np.zeros(correct.shape, np.uint8), weights=weights, classes=classes)
        assert again.sigma2 == found.sigma2

    def test_a_label_that_every_order_favours_anew_takes_nothing_from_the_order_effect(self) -> None:
        """48 queries: as one mixture the order effect of 3 points is lost."""
        generator = np.random.default_rng(5)
        found, mixed = [], []
        for _ in range(80):
            correct, classes = favoured(generator, 12, order=0.03, by_label=0.25)
            ours = stats.variance_components(correct, classes=classes).sigma2
            theirs = stats.variance_components(correct).sigma2
            found.append((ours.P, ours.SP))
            mixed.append(theirs.P + theirs.SP)
        order, both = np.mean(found, axis=0)
        error = np.std(np.array(found).sum(axis=1)) / np.sqrt(len(found))
        assert order == pytest.approx(0.03**2, abs=3 * error)
        assert both == pytest.approx(0, abs=3 * error)
        assert np.mean(mixed) < 0.03**2 / 2

    def test_an_interval_covers(self) -> None:
        generator = np.random.default_rng(6)
        covered = []
        for _ in range(60):
            correct, classes = favoured(generator, 25, by_label=0.15)
            order = stats.effect_interval(stats.variance_components(correct, classes=classes), draws=500).order
            covered.append(order.low <= 0.05 <= order.high)
        assert np.mean(covered) >= 0.9

    def test_a_class_of_one_query_is_taken_with_the_others(self) -> None:
        correct = (np.random.default_rng(0).random((3, 3, 9)) < 0.6).astype(np.uint8)
        classes = np.r_[np.zeros(8, int), 1]
        found = stats.variance_components(correct, classes=classes)
        assert found.sigma2 == stats.variance_components(correct).sigma2
        assert found.strata == ()

    def test_a_class_that_an_ordering_did_not_answer_is_taken_with_the_others(self) -> None:
        correct = (np.random.default_rng(0).random((3, 3, 12)) < 0.6).astype(np.uint8)
        state, classes = np.zeros(correct.shape, np.uint8), np.repeat([0, 1], 6)
        state[0, 0, :6] = 1
        found = stats.variance_components(correct, state, classes=classes)
        assert found.sigma2 == stats.variance_components(correct, state).sigma2


class TestNoise:
    @given(st.integers(0, 2**32))
    def test_is_what_loops_find(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        items = generator.random((2, 3, 10))
        classes, weights = np.repeat([0, 1], [4, 6]), np.repeat([3.0, 1.0], [4, 6])
        found = order_noise(items, weights, classes)
        expected = 0.0
        for name in (0, 1):
            members = classes == name
            factor = float(weights[members] @ weights[members]) / weights.sum() ** 2
            for one in items[:, :, members]:
                rest = one - one.mean(axis=0) - one.mean(axis=1, keepdims=True) + one.mean()
                expected += factor * float((rest**2).sum()) / (2 * (members.sum() - 1)) / 2  # over P - 1, then sets
        assert found.sum(axis=1).mean() / 2 == pytest.approx(expected, rel=1e-9)

    def test_of_a_search_is_by_class_and_weighted(self) -> None:
        """Where all that varies is which label is favoured, the accuracy of four equal classes has less noise."""
        correct, classes = favoured(np.random.default_rng(1), 50, order=0.0)
        known, mixed = noise_within_sets(correct, classes=classes), noise_within_sets(correct)
        assert known < 0.85 * mixed
        heavy = np.where(classes == 0, 9, 1)
        assert noise_within_sets(correct, weights=heavy) > 1.5 * mixed

    def test_the_spread_of_a_strategy_is_that_of_the_weighted_accuracy(self) -> None:
        """450 queries of one class and 50 of another that counts nine times: order moves the second alone."""
        generator = np.random.default_rng(2)
        classes = np.repeat([0, 1], [450, 50])
        weights = np.where(classes == 1, 9.0, 1.0)
        order = 0.115 * generator.standard_normal((1, 10, 40, 1)) * (classes == 1)
        answers = (generator.random((1, 10, 40, 500)) < 0.6 + order).astype(np.uint8)
        accuracy = (answers @ weights / weights.sum())[..., None]
        found = outcomes_of(accuracy, answers, weights, np.full((1, 10), np.nan), ["random"], classes)["random"]
        assert found.spread_free == pytest.approx(0.0575, abs=0.006)
        assert found.spread_free < found.spread


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("stratified")
    study = {"sets": 3, "permutations": 3, "shots": 4, "queries": 20}
    return {
        balance: iclperm.run(iclperm.Study(**study, balance=balance), out=folder / balance)
        for balance in ("classes", "natural")
    }


class TestRuns:
    def test_classes_count_where_the_study_gave_each_its_queries(self, runs: dict[str, Any], tmp_path: Path) -> None:
        run = runs["classes"]
        test = run.splits["test"]
        found = sensitivity.findings(run).summary.components
        assert found is not None
        assert [stratum.num_queries for stratum in found.strata] == [5, 5, 5, 5]
        assert found == stats.variance_components(test.correct[:, :, -1], classes=test.gold)
        assert of_run("one", run).classes is not None
        table = tmp_path / "answers.csv"
        run.to_pandas().to_csv(table, index=False)
        parts = describe(load(table)).to_dict()
        for effect, value in found.sigma2._asdict().items():
            assert parts["sensitivity"]["components"]["sigma2"][effect] == pytest.approx(value, abs=1e-12)

    def test_a_sample_of_a_mixture_is_one_class(self, runs: dict[str, Any]) -> None:
        found = sensitivity.findings(runs["natural"]).summary.components
        assert found is not None
        assert found.strata == ()
        assert of_run("one", runs["natural"]).classes is None

    def test_a_table_says_it_by_equal_numbers_or_by_weights(self) -> None:
        assert are_by_design(["a", "b", "a", "b", "a"])
        assert not are_by_design(["a", "b", "a", "a", "a"])
        assert are_by_design(["a", "b", "a", "a"], [1, 3, 1, 1])
        assert of_array("x", np.ones((3, 3, 4), np.uint8), "SPQ", classes=["a", "b", "a", "b"]).classes is not None
        assert of_array("x", np.ones((3, 3, 4), np.uint8), "SPQ", classes=["a", "b", "b", "b"]).classes is None


def test_comparisons_take_the_classes_too() -> None:
    generator = np.random.default_rng(3)
    (one, classes), (other, _) = favoured(generator, 12), favoured(generator, 12)
    found = stats.compare(one, other, shared="queries", classes=(classes, classes))
    effects = [stats.variance_components(each, classes=classes).order_effect for each in (one, other)]
    assert found.order.estimate == pytest.approx(effects[0] - effects[1])
    assert found.order.estimate != pytest.approx(stats.compare(one, other, shared="queries").order.estimate)
    for axis, name in enumerate(("sets", "permutations")):
        left_out = [
            stats.variance_components(np.delete(one, level, axis), classes=classes).order_effect for level in range(6)
        ]
        jackknifed = stats.jackknifed_effects(one, classes=classes)["order"].left_out[name]
        np.testing.assert_allclose(jackknifed, left_out, rtol=0, atol=1e-9)


def test_a_curve_takes_them_too() -> None:
    """All that varies from one number of shots to the next, and over orders, is which label is favoured."""
    generator = np.random.default_rng(8)
    (one, classes), (other, _) = favoured(generator, 60, order=0.0), favoured(generator, 60, order=0.0)
    curve = np.stack([one, other], axis=2)
    known, mixed = (stats.curve_error(curve, shots=[2, 4], classes=each).order_noise for each in (classes, None))
    np.testing.assert_allclose(known**2, [noise_within_sets(each, classes=classes) for each in (one, other)])
    assert (known < 0.95 * mixed).all()
    changes = [plateau(curve, shots=[2, 4], first=2, classes=each).true_std for each in (classes, None)]
    components = stats.variance_components(other.astype(float) - one, classes=classes).sigma2
    assert changes[0] == pytest.approx(np.sqrt(max(components.S + components.P + components.SP, 0)))
    assert changes[0] != changes[1]
    single = np.r_[np.zeros(239, int), 1]
    heavy = np.where(single, 9, 1)
    assert plateau(curve, heavy, shots=[2, 4], first=2, classes=single).true_std >= 0


class TestMatched:
    """Two studies over the same orderings (McNemar over orderings as strata)."""

    def test_its_p_values_are_adjusted_over_all_pairs_and_shots(self) -> None:
        generator = np.random.default_rng(4)
        chance = generator.uniform(0.3, 0.9, 80)
        one, other, third = (
            (generator.random((3, 3, 2, 80)) < chance + add).astype(np.uint8) for add in (0, 0.06, 0.0)
        )
        found = stats.compare(one, other, shots=([2, 4], [2, 4]))
        plain = [stats.stratified_mcnemar(one[:, :, k], other[:, :, k]).p_value for k in (0, 1)]
        assert [test.p_holm for test in found.mcnemar if test is not None] == pytest.approx(stats.holm(plain))
        names = Identities(
            *(tuple(f"{axis}{i}" for i in range(size)) for axis, size in zip("spq", (3, 3, 80), strict=True))
        )
        studies = [Compared(str(i), each, None, None, (2, 4), names) for i, each in enumerate((one, other, third))]
        every = [test for pair in comparing(studies).pairs for test in pair.comparison.mcnemar]
        expected = stats.holm([test.p_value for test in every if test is not None])
        assert [test.p_holm for test in every if test is not None] == pytest.approx(expected)
        assert len(every) == 6

    def test_its_interval_has_a_width_where_nothing_or_little_differs(self) -> None:
        one = np.ones((3, 3, 30), np.uint8)
        low, high = matched_interval(stats.stratified_mcnemar(one, one))[1:3]
        assert low == pytest.approx(-high)
        assert high > 0.03
        low, high = matched_interval(stats.stratified_mcnemar(one, 1 - one))[1:3]
        assert (low < 1, high) == (True, 1)

    @pytest.mark.parametrize("share", [0.05, 0.4])
    def test_its_interval_covers(self, share: float) -> None:
        """30 queries, of which some are answered otherwise in every ordering, or in some."""
        generator = np.random.default_rng(9)
        covered = []
        for _ in range(400):
            differs = generator.random(30) < share
            gains = differs & (generator.random(30) < 0.75)
            one = np.broadcast_to(gains, (9, 30)) & (generator.random((9, 30)) < 0.8)
            other = np.broadcast_to(differs & ~gains, (9, 30)) & (generator.random((9, 30)) < 0.8)
            found = matched_interval(stats.stratified_mcnemar(one.astype(np.uint8), other.astype(np.uint8)))
            covered.append(found.low <= 0.8 * share * 0.5 <= found.high)
        assert np.mean(covered) >= 0.93


def test_bands_of_a_curve_lie_within_what_is_possible() -> None:
    correct = np.ones((2, 2, 1, 40), np.uint8)
    correct[..., 0] = 0
    edges = np.arange(0, 41, 4)
    sums = np.add.reduceat(correct, edges[:-1], axis=-1).astype(float)
    found = settling(blocks_of(correct, edges, shots=[4], right=sums), "queries", [5])
    assert found.curve[0, 0, 2] == 1
    assert 0 < found.curve[0, 0, 0] < 1
