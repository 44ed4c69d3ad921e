"""Selection and demonstration features: planted truths through the whole arithmetic, from fake runs to sentences."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from scipy import special

from iclperm import stats
from iclperm.errors import DataError, RequestError
from iclperm.reference import curves
from iclperm.report.parts import Table
from iclperm.stats.choosing import STRATEGIES
from iclperm.stats.intervals import jackknife_interval
from iclperm.stats.reliability import Reliability
from iclperm.studies import features as features_kind
from iclperm.studies import selection as kind

Array = npt.NDArray[Any]
WORDS = ["tea", "coffee", "water", "milk", "juice", "wine", "beer", "rum", "gin", "soda", "cider", "mate"]


def orderings(generator: np.random.Generator, num_permutations: int, num: int) -> Array:
    return np.stack([generator.permutation(num) for _ in range(num_permutations)])


def fake_run(
    sets: Array,
    worth: Array,
    generator: np.random.Generator,
    *,
    num_permutations: int = 20,
    num_queries: int = 200,
    jitter: Array | float = 0.0,
    splits: tuple[str, ...] = ("test", "dev"),
    level: float = 0.5,
) -> Any:
    """A curve run over `sets` [S, K] of rows, in which row r adds worth[r] to the chance of a right answer.

    `jitter` [rows] is how far a row moves each ordering at random.
    """
    size = sets.shape[1]
    permutations = orderings(generator, num_permutations, size)
    rows = sets[:, permutations]
    noise = np.broadcast_to(jitter, worth.shape)[rows] * generator.standard_normal(rows.shape)
    gains = np.concatenate([np.zeros((*rows.shape[:2], 1)), np.cumsum(worth[rows] + noise, axis=2)], axis=2)
    chance = (level + gains).clip(0.02, 0.98)

    def items() -> Any:
        correct = (generator.random((*chance.shape, num_queries)) < chance[..., None]).astype(np.uint8)
        correct[:, :, 0] = correct[:1, :1, 0]
        gold = np.arange(num_queries) % 2
        return SimpleNamespace(
            correct=correct,
            state=np.zeros_like(correct),
            weights=np.ones(num_queries, np.int64),
            gold=gold,
            context_of=np.arange(math.prod(correct.shape[:3])).reshape(correct.shape[:3]),
            context_state=np.zeros((math.prod(correct.shape[:3]), num_queries), np.uint8),
            context_prediction=np.where(correct, gold, 1 - gold).reshape(-1, num_queries),
        )

    labels = np.arange(len(worth)) % 2
    return SimpleNamespace(
        shots=tuple(range(size + 1)),
        labels=("even", "odd"),
        shared_labels=("even", "odd"),
        has_row_choices=False,
        task="drinks",
        title="drinks, planted",
        study=SimpleNamespace(seed=0, select=3, resample="none", balance="natural"),
        splits={split: items() for split in splits},
        demonstrations=SimpleNamespace(
            rows=rows,
            labels=labels[rows],
            permutations=permutations,
            sets=sets,
            texts={row: " ".join(WORDS[: 1 + row % len(WORDS)]) for row in range(len(worth))},
            query_texts=lambda split: ["tea and coffee"] * num_queries,
        ),
    )


def two_runs(seed: int = 0, *, jitter: bool = False, **options: Any) -> tuple[Any, kind.Chosen, Any, Array]:
    """A run with planted worth, what is chosen from it, the run of the chosen, and the worth [rows]."""
    generator = np.random.default_rng(seed)
    worth = generator.normal(0, 0.03, 48)
    wobble = np.where(np.arange(48) % 3 == 0, 0.06, 0.0) if jitter else 0.0
    source = fake_run(np.arange(48).reshape(6, 8), worth, generator, jitter=wobble, **options)
    choice = kind.choose(source)
    chosen = fake_run(choice.rows, worth, generator, jitter=wobble, splits=("test",))
    return source, choice, chosen, worth


def nested_order_variance(items: Array) -> float:
    """(MS_P - MS_PQ)/Q of one set [P, Q], by its definition."""
    num_permutations, num_queries = items.shape
    rows, columns = items.mean(axis=1, keepdims=True), items.mean(axis=0, keepdims=True)
    residual = np.sum((items - rows - columns + items.mean()) ** 2) / ((num_permutations - 1) * (num_queries - 1))
    return float(rows.var(ddof=1) - residual / num_queries)


def weighted_order_variance(items: Array, weights: Array) -> float:
    """That of the weighted accuracy: its variance less what the queries of each weight add, by their number."""
    found = float((items @ weights / weights.sum()).var(ddof=1))
    for weight in set(weights.tolist()):
        members = items[:, weights == weight]
        noise = float(members.mean(axis=1).var(ddof=1)) - nested_order_variance(members)
        found -= (weight * members.shape[1] / weights.sum()) ** 2 * noise
    return found


def words_of(table: Table) -> list[str]:
    return [table.title, *table.header, *(cell for row in table.rows for cell in row), table.caption]


class TestChoose:
    def test_rows_are_strategy_by_strategy_and_of_their_set(self) -> None:
        source, choice, _, worth = two_runs()
        assert choice.strategies == tuple(STRATEGIES)
        assert choice.rows.shape == (len(STRATEGIES) * 6, 3)
        by_strategy = choice.rows.reshape(len(STRATEGIES), 6, 3)
        assert (by_strategy // 8 == np.arange(6)[None, :, None]).all()
        for place, name in enumerate(choice.strategies):
            assert (
                source.demonstrations.sets[np.arange(6)[:, None], choice.positions[name]] == by_strategy[place]
            ).all()
        means = dict(zip(choice.strategies, worth[by_strategy].mean(axis=(1, 2)), strict=True))
        assert means["top"] > means["random"] > means["bottom"]
        assert choice.num_labels.shape == (len(STRATEGIES), 6)
        assert set(np.unique(choice.num_labels)) <= {1.0, 2.0}

    def test_scores_come_from_dev_and_from_test_only_with_a_warning(self) -> None:
        source, choice, *_ = two_runs()
        assert choice.split == "dev"
        assert not any("test queries" in warning for warning in choice.warnings)
        without = SimpleNamespace(**{**vars(source), "splits": {"test": source.splits["test"]}})
        again = kind.choose(without)
        assert again.split == "test"
        assert any("test queries that judge the choice" in warning for warning in again.warnings)
        swapped = SimpleNamespace(
            **{**vars(source), "splits": {"test": source.splits["dev"], "dev": source.splits["dev"]}}
        )
        assert (kind.choose(swapped).rows == choice.rows).all()  # test answers change nothing

    def test_unknown_demonstrations_are_counted_in_a_warning(self) -> None:
        _, choice, *_ = two_runs(num_permutations=4)
        (warning,) = [warning for warning in choice.warnings if "never stand first" in warning]
        unknown = int(np.isnan(choice.scores["single"].values).sum())
        assert unknown > 0
        assert warning.startswith(f"{unknown} of 48 demonstrations")

    def test_another_number_score_or_list_of_strategies(self) -> None:
        source, *_ = two_runs()
        choice = kind.choose(source, 2, score="member", strategies=["random", "top"], seed=5)
        assert choice.rows.shape == (12, 2)
        assert choice.score == "member"
        with pytest.raises(RequestError, match="cannot choose 9"):
            kind.choose(source, 9)
        with pytest.raises(RequestError, match="'best' is not among"):
            kind.choose(source, score="best")


class TestFindings:
    def test_planted_worth_decides_accuracy(self) -> None:
        source, choice, chosen, _ = two_runs()
        found = kind.findings(source, chosen)
        assert list(found.outcomes) == list(choice.strategies)
        assert found.outcomes["top"].accuracy_side == 1
        assert found.outcomes["bottom"].accuracy_side == -1
        assert found.outcomes["top"].difference.low > 0 > found.outcomes["bottom"].difference.high
        assert found.reliability["shapley"].both > 0.5
        assert found.correlations[("shapley", "marginal")].estimate > 0.8
        assert (found.shots, found.num_sets, found.num_permutations, found.num_queries) == ((0, 1, 2, 3), 6, 20, 200)

    def test_numbers_are_those_of_the_plain_definitions(self) -> None:
        source, _, chosen, _ = two_runs()
        found = kind.findings(source, chosen)
        accuracy = stats.accuracy(chosen.splits["test"].correct).values.reshape(8, 6, 20, 4)
        for place, (name, outcome) in enumerate(found.outcomes.items()):
            values = accuracy[place, :, :, -1]
            assert outcome.accuracy.estimate == pytest.approx(values.mean()), name
            assert outcome.spread == pytest.approx(stats.order_sensitivity(values)), name
            assert outcome.lowest == pytest.approx(values.min(axis=1).mean()), name
            assert outcome.low_tail == pytest.approx(np.sort(values, axis=1)[:, 0].mean()), name  # 1 of 20 orderings
            np.testing.assert_allclose(outcome.curve, accuracy[place].mean(axis=(0, 1)))
            if name != "random":
                assert outcome.difference.estimate == pytest.approx(values.mean() - accuracy[0, :, :, -1].mean())
        assert math.isnan(found.outcomes["random"].difference.estimate)
        assert math.isnan(found.outcomes["random"].p_accuracy)

    def test_equal_choices_differ_by_nothing(self) -> None:
        correct = np.random.default_rng(0).integers(0, 2, (1, 3, 5, 2, 40)).astype(np.uint8)
        found = kind.selection(np.concatenate([correct, correct]), strategies=["random", "top"], shots=[0, 2])
        outcome = found.outcomes["top"]
        half = 4.302653 * curves.unseen_error(40)  # t of 2 degrees
        assert outcome.difference.estimate == 0
        assert (-outcome.difference.low, outcome.difference.high) == pytest.approx((half, half), rel=1e-6)
        assert outcome.spread_difference.estimate == 0
        assert math.isnan(outcome.spread_difference.low)
        assert (outcome.p_accuracy, outcome.p_spread) == (1, 1)
        assert not outcome.is_steadier

    @settings(max_examples=20, deadline=None)
    @given(st.integers(0, 2**32 - 1))
    @example(4012)  # two sets whose order variances differ alike, up to rounding
    def test_queries_come_in_any_order_and_failed_ones_are_left_out(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        correct = generator.integers(0, 2, (3, 2, 3, 2, 9)).astype(np.uint8)
        state, weights = np.zeros_like(correct), generator.integers(1, 4, 9)
        state[..., 4] = 2
        options: dict[str, Any] = {"strategies": ["top", "random", "diverse"], "shots": [1, 2]}
        found = kind.selection(correct, state, weights=weights, **options)
        order = np.append(generator.permutation(4), generator.permutation(np.arange(5, 9)))
        other = kind.selection(correct[..., order], weights=weights[order], **options)
        assert found.num_queries == 8
        assert found.dropped == pytest.approx(weights[4] / weights.sum())
        for name in options["strategies"]:
            ours, theirs = found.outcomes[name], other.outcomes[name]
            if name != "random":
                gap = ours.accuracy.estimate - found.outcomes["random"].accuracy.estimate
                assert ours.difference.estimate == pytest.approx(gap, abs=1e-12)
            for key in ("accuracy", "difference", "spread_difference", "free_difference"):
                assert getattr(ours, key) == pytest.approx(getattr(theirs, key), nan_ok=True, abs=1e-9), key
            assert (ours.spread, ours.lowest) == pytest.approx((theirs.spread, theirs.lowest))
            assert ours.spread_free**2 == pytest.approx(theirs.spread_free**2, abs=1e-9)

    def test_spread_free_of_item_noise_is_recovered(self) -> None:
        generator = np.random.default_rng(1)
        shift = 0.05 * generator.standard_normal((2, 40, 30, 1, 1))
        shift[1] = 0
        correct = (generator.random((2, 40, 30, 1, 150)) < 0.5 + shift).astype(np.uint8)
        found = kind.selection(correct, strategies=["random", "stable"], shots=[2])
        assert found.outcomes["random"].spread_free == pytest.approx(0.05, abs=0.004)
        assert found.outcomes["stable"].spread_free < 0.012
        assert found.outcomes["random"].spread > 0.06  # √(.05² + .25/150)
        assert found.outcomes["stable"].is_steadier

    @pytest.mark.parametrize(("own", "shared"), [(0.05, 0.05), (0.02, 0.07)])
    def test_the_false_alarm_rate_is_bounded(self, own: float, shared: float) -> None:
        """Index permutations move every ordering by itself, and all sets of a strategy together."""
        generator = np.random.default_rng(2)
        steadier = different = 0
        for _ in range(120):
            chance = 0.6 + own * generator.standard_normal((4, 5, 10, 1, 1)) + 0.1 * generator.standard_normal((60,))
            chance += shared * generator.standard_normal((4, 1, 10, 1, 1))
            correct = (generator.random((4, 5, 10, 1, 60)) < chance).astype(np.uint8)
            found = kind.selection(correct, strategies=["random", "top", "bottom", "stable"], shots=[3])
            steadier += any(outcome.is_steadier for outcome in found.outcomes.values())
            different += any(outcome.accuracy_side for outcome in found.outcomes.values())
        assert steadier / 120 <= 0.06
        assert different / 120 <= 0.09

    def test_errors_are_those_of_fresh_sets_and_shared_permutations(self) -> None:
        """Coverage of differences between equal strategies; over sets alone that of the spread is .64 here."""
        generator, held = np.random.default_rng(5), []
        for _ in range(60):
            chance = 0.6 + 0.07 * generator.standard_normal((3, 1, 12, 1, 1))
            chance = chance + 0.03 * generator.standard_normal((3, 5, 12, 1, 1))
            correct = (generator.random((3, 5, 12, 1, 150)) < chance).astype(np.uint8)
            found = kind.selection(correct, strategies=["random", "top", "stable"], shots=[3]).outcomes
            held += [
                [
                    bounds.low <= 0 <= bounds.high
                    for bounds in (one.difference, one.spread_difference, one.free_difference)
                ]
                for one in (found["top"], found["stable"])
            ]
        assert (np.mean(held, axis=0) >= 0.9).all()

    def test_errors_are_those_of_the_statistics(self) -> None:
        correct = np.random.default_rng(6).integers(0, 2, (2, 4, 5, 1, 30)).astype(np.uint8)
        weights = np.arange(30) % 3 + 1
        outcome = kind.selection(correct, strategies=["random", "top"], shots=[2], weights=weights).outcomes["top"]
        ours, base = correct[1, :, :, 0], correct[0, :, :, 0]
        error = stats.mean_error(ours - base.astype(float), weights)
        careful = error._replace(degrees=3)  # of four sets
        assert error.degrees > 3
        assert outcome.difference[:4] == pytest.approx((error.mean, error.se, *careful.interval()[1:3]))
        assert outcome.p_accuracy == pytest.approx(2 * special.stdtr(3, -abs(error.mean) / error.se))
        assert outcome.accuracy.se == pytest.approx(stats.mean_error(ours, weights).se)

        def spread(items: Array) -> float:
            return stats.order_sensitivity(stats.accuracy(items, weights=weights).values)

        def free(items: Array) -> float:
            return float(np.mean([weighted_order_variance(one, weights) for one in items]))

        for statistic, found in ((spread, outcome.spread_difference), (free, outcome.free_difference)):
            without = [
                [
                    statistic(np.delete(ours, unit, axis)) - statistic(np.delete(base, unit, axis))
                    for unit in range(ours.shape[axis])
                ]
                for axis in (0, 1)
            ]
            interval = jackknife_interval(statistic(ours) - statistic(base), *without)
            assert (found.estimate, found.low, found.high) == pytest.approx(interval[:3])

    def test_two_permutations_bound_no_spread(self) -> None:
        correct = np.random.default_rng(0).integers(0, 2, (2, 5, 2, 1, 30)).astype(np.uint8)
        found = kind.selection(correct, strategies=["random", "top"], shots=[2])
        assert math.isnan(found.outcomes["top"].spread_difference.low)
        assert math.isnan(found.outcomes["top"].free_difference.low)
        assert math.isfinite(found.outcomes["top"].difference.low)
        assert any("With two permutations nothing bounds" in line for line in found.conclusion())
        assert any("2 permutations" in warning for warning in found.warnings)

    def test_the_second_run_must_be_of_the_choice(self) -> None:
        source, choice, chosen, _ = two_runs()
        reordered = SimpleNamespace(**vars(chosen))
        reordered.demonstrations = SimpleNamespace(sets=choice.rows[:, ::-1])
        kind.findings(source, reordered, choice)  # the default order of a set may differ
        reordered.demonstrations = SimpleNamespace(sets=choice.rows[::-1])
        with pytest.raises(DataError, match="not the 48 chosen"):
            kind.findings(source, reordered, choice)

    def test_bad_input_is_refused(self) -> None:
        correct = np.ones((2, 2, 3, 2, 4), np.uint8)
        with pytest.raises(RequestError, match=r"needs correct \[T, S, P, N, Q\]"):
            kind.selection(correct[0], strategies=["random", "top"], shots=[1, 2])
        with pytest.raises(RequestError, match="compared with 'random', got top, bottom"):
            kind.selection(correct, strategies=["top", "bottom"], shots=[1, 2])
        with pytest.raises(RequestError, match="at least 2 permutations"):
            kind.selection(correct[:, :, :1], strategies=["random", "top"], shots=[1, 2])
        with pytest.raises(RequestError, match="no query has an answer"):
            kind.selection(correct, np.ones_like(correct), strategies=["random", "top"], shots=[1, 2])

    def test_one_set_bounds_no_spread(self) -> None:
        correct = np.random.default_rng(0).integers(0, 2, (2, 1, 6, 1, 30)).astype(np.uint8)
        found = kind.selection(correct, strategies=["random", "top"], shots=[2])
        assert math.isnan(found.outcomes["top"].spread_difference.low)
        assert math.isfinite(found.outcomes["top"].difference.low)
        assert any("With one set nothing bounds" in line for line in found.conclusion())
        assert any("1 sets" in warning for warning in found.warnings)


class TestWords:
    def base(self) -> kind.Selection:
        correct = np.random.default_rng(3).integers(0, 2, (3, 6, 8, 2, 50)).astype(np.uint8)
        return kind.selection(correct, strategies=["random", "top", "stable"], shots=[0, 6])

    def with_outcome(self, **changes: Any) -> kind.Selection:
        found = self.base()
        return replace(found, outcomes={**found.outcomes, "stable": replace(found.outcomes["stable"], **changes)})

    def test_nothing_told_leaves_the_question_open(self) -> None:
        told = " ".join(self.base().conclusion())
        assert "None of 2 strategies is told to be steadier" in told
        assert "stays open" in told

    @pytest.mark.parametrize(
        ("difference", "p", "words"),
        [
            (-0.05, 0.01, "here robustness costs accuracy"),
            (0.05, 0.01, "does not cost accuracy"),
            (0.01, 0.6, "neither shown"),
        ],
    )
    def test_a_steadier_strategy_is_judged_by_its_accuracy(self, difference: float, p: float, words: str) -> None:
        below = kind.Difference(-0.02, 0.004, -0.03, -0.01, 0.001)
        found = self.with_outcome(
            spread_difference=below,
            free_difference=below,
            p_spread=0.002,
            difference=kind.Difference(difference, 0.01, difference - 0.02, difference + 0.02, p),
            p_accuracy=p,
        )
        (line,) = [line for line in found.conclusion() if "is steadier than random" in line]
        assert words in line
        assert f"{100 * difference:+.1f} points [" in line
        assert "-2.0 points [-3.0 to -1.0]" in line

    def test_less_spread_through_less_item_noise_alone_is_not_steadier(self) -> None:
        below = kind.Difference(-0.02, 0.004, -0.03, -0.01, 0.001)
        either = kind.Difference(-0.0001, 0.001, -0.002, 0.002, 0.9)
        found = self.with_outcome(spread_difference=below, free_difference=either, p_spread=0.002)
        assert not found.outcomes["stable"].is_steadier

    def test_a_noisy_score_is_called_noisy(self) -> None:
        noisy = replace(self.base(), reliability={"marginal": stats_reliability(0.2)})
        assert "most of its differences are noise" in noisy.conclusion()[-1]
        assert "much alike" in replace(noisy, reliability={"marginal": stats_reliability(0.9)}).conclusion()[-1]

    def test_one_label_only_is_warned_of(self) -> None:
        correct = np.random.default_rng(0).integers(0, 2, (2, 6, 8, 1, 50)).astype(np.uint8)
        labels = np.array([[2.0] * 6, [1.0] * 6])
        found = kind.selection(correct, strategies=["random", "top"], shots=[6], num_labels=labels)
        assert any("label balance" in warning for warning in found.warnings)
        assert found.tables(False)[0].header[-1] == "labels"

    def test_tables_json_and_figures_hold_together(self) -> None:
        source, _, chosen, _ = two_runs()
        found = kind.findings(source, chosen)
        content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
        assert content["strategies"]["top"]["difference"]["estimate"] == found.outcomes["top"].difference[0]
        assert content["conclusion"] == found.conclusion()
        assert len(found.tables(True)) > len(found.tables(False))
        for table in found.tables(True):
            assert all(len(row) == len(table.header) for row in table.rows), table.title
            assert not any("nan" in word.split() for word in words_of(table))
        for plot in found.plots().values():
            figure = Figure(figsize=plot.size)
            plot.draw(figure)
            legend = figure.legends[0]
            assert [text.get_text() for text in legend.get_texts()] == list(found.outcomes)


def stats_reliability(value: float) -> Any:
    return Reliability(value, value, value)


class TestFeatures:
    def run(self, num_sets: int = 10, **options: Any) -> Any:
        """Row r has 1 + r % 12 words and is worth the more, the more words it has."""
        generator = np.random.default_rng(0)
        worth = 0.012 * (np.arange(60) % 12) - 0.07
        sets = np.stack([generator.permutation(60)[:6] for _ in range(num_sets)])
        return fake_run(sets, worth, generator, num_queries=400, num_permutations=30, level=0.4, **options)

    def test_a_planted_feature_is_found_and_noise_is_not(self) -> None:
        found = features_kind.findings(self.run())
        told = {(feature.feature, feature.value) for feature in found.significant}
        assert ("different words", "Shapley value") in told
        assert ("length in characters", "Shapley value") in told
        assert not any(name.startswith("label") for name, _ in told)
        by_name = {(feature.feature, feature.value): feature.correlation for feature in found.found}
        assert by_name["different words", "Shapley value"].estimate > 0.8
        assert any("Shapley value rises with 'different words'" in line for line in found.conclusion())
        assert 0 < found.below_zero_shot < 1
        assert found.reliability["Shapley value"] > 0.5

    def test_values_and_features_are_those_of_their_demonstrations(self) -> None:
        run = self.run()
        accuracy = stats.accuracy(run.splits["test"].correct).values
        gain = features_kind.one_shot_gain(accuracy, run.demonstrations.permutations, run.shots)
        first = run.demonstrations.permutations[0, 0]
        assert gain[2, first] == pytest.approx(
            np.mean(
                [
                    accuracy[2, p, 1] - accuracy[2, p, 0]
                    for p in range(30)
                    if run.demonstrations.permutations[p, 0] == first
                ]
            )
        )
        labels = features_kind._labels_of_sets(run)
        assert (labels == run.demonstrations.sets % 2).all()
        found = features_kind.text_features(
            [["a bb", "c c c"], ["", "a"]], ["a"], labels=[[0, 1], [2, 0]], label_names="xyz"
        )
        assert found["length in characters"].tolist() == [[4, 5], [0, 1]]
        assert found["different words"].tolist() == [[2, 1], [0, 1]]
        assert found["label is x"].tolist() == [[1, 0], [0, 1]]
        assert found["similarity to the queries"][0, 0] > found["similarity to the queries"][0, 1] == 0
        assert len(found) == 7

    def test_perplexity_may_be_unknown_for_some(self) -> None:
        run = self.run()
        perplexity = run.demonstrations.sets.astype(float)
        perplexity[:, 0] = np.nan
        found = features_kind.findings(run, perplexity)
        (pairs,) = {
            feature.correlation.num_pairs
            for feature in found.found
            if feature.feature == "perplexity" and feature.value == "Shapley value"
        }
        assert pairs == 50
        with pytest.raises(RequestError, match="perplexity must have shape"):
            features_kind.findings(run, perplexity[:, :2])

    def test_what_the_shots_do_not_allow_is_left_out_or_refused(self) -> None:
        run = self.run()
        for items in run.splits.values():
            items.correct, items.state = items.correct[:, :, :2], items.state[:, :, :2]
        run.shots = (0, 1)
        found = features_kind.findings(run)
        assert {feature.value for feature in found.found} == {"one-shot gain"}
        for items in run.splits.values():
            items.correct, items.state = items.correct[:, :, :1], items.state[:, :, :1]
        run.shots = (0,)
        with pytest.raises(DataError, match=r"the run has k = 0; .*shots: all"):
            features_kind.findings(run)

    def test_too_few_sets_say_nothing(self) -> None:
        found = features_kind.findings(self.run(num_sets=2))
        assert not found.significant
        assert any("2 sets" in warning for warning in found.warnings)
        assert all(math.isnan(feature.p_holm) for feature in found.found)
        assert "None of" in found.conclusion()[-1]

    def test_tables_json_and_figure_hold_together(self) -> None:
        found = features_kind.findings(self.run())
        content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
        assert len(content["found"]) == len(found.found)
        for table in found.tables(True):
            assert all(len(row) == len(table.header) for row in table.rows)
            assert not any("nan" in word.split() for word in words_of(table))
        (plot,) = found.plots().values()
        figure = Figure(figsize=plot.size)
        plot.draw(figure)
        rows = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
        assert rows == list(dict.fromkeys(feature.feature for feature in found.found))
