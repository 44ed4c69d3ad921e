"""Features of orderings and rank correlations within sets, against plain loops and simulations with known truth."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from iclperm.errors import RequestError
from iclperm.reference import search as reference
from iclperm.report.parts import plain
from iclperm.stats.correlation import correlation, rank_correlation
from iclperm.stats.features import ordering_features, recency_bias
from iclperm.stats.intervals import jackknife_interval
from iclperm.stats.texts import lexical_similarity

Array = npt.NDArray[Any]
seeds = st.integers(0, 2**32 - 1)


class TestRankCorrelation:
    @given(seeds, st.booleans(), st.booleans(), st.booleans())
    @settings(max_examples=40)
    def test_agrees_with_the_oracle(self, seed: int, crossed: bool, ties: bool, ranked: bool) -> None:
        generator = np.random.default_rng(seed)
        feature, value = generator.normal(size=(2, 5, 9))
        value += 0.5 * feature
        if ties:
            feature = np.round(feature)
        feature[generator.random(feature.shape) < 0.05] = np.nan
        found = (rank_correlation if ranked else correlation)(feature, value, crossed=crossed)
        want = reference.rank_correlation(feature, value, crossed, 0.95, ranked)
        assert found[:3] == pytest.approx(want, abs=1e-9)
        assert found.num_pairs == np.isfinite(feature).sum()

    def test_each_set_is_spearmans(self) -> None:
        x, y = np.random.default_rng(1).integers(0, 6, (2, 4, 30))
        want = [scipy_stats.spearmanr(a, b).statistic for a, b in zip(x, y, strict=True)]
        assert rank_correlation(x, y).by_set == pytest.approx(want)

    @given(seeds)
    def test_only_the_ranks_within_a_set_count(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        x, y = generator.normal(size=(2, 4, 8))
        moved = np.exp(x) + 100 * generator.normal(size=(4, 1))
        order = generator.permutation(8)
        found = rank_correlation(x, y, crossed=True)
        assert rank_correlation(moved, y, crossed=True)[:5] == pytest.approx(found[:5], nan_ok=True)
        assert rank_correlation(x[:, order], y[:, order], crossed=True)[:5] == pytest.approx(found[:5], nan_ok=True)

    def test_a_difference_between_sets_is_no_correlation(self) -> None:
        level = np.arange(6.0)[:, None] * 10
        noise = np.random.default_rng(2).normal(size=(2, 6, 40))
        found = rank_correlation(level + noise[0], level + noise[1])
        assert found.low < 0 < found.high

    def test_a_planted_effect_is_found_and_chance_is_not(self) -> None:
        generator = np.random.default_rng(3)
        found = {True: 0, False: 0}
        for _ in range(60):
            x, noise = generator.normal(size=(2, 8, 30))
            found[True] += rank_correlation(x, 0.5 * x + noise).p_value < 0.05
            found[False] += rank_correlation(x, noise).p_value < 0.05
        assert found[True] >= 55
        assert found[False] <= 9

    def test_columns_that_the_sets_share_are_no_new_draws(self) -> None:
        """A label at the end is the same in all sets: clustering by set alone would call chance an effect."""
        generator = np.random.default_rng(4)
        wrong = {True: 0, False: 0}
        for _ in range(60):
            feature = np.broadcast_to(generator.integers(0, 2, 40), (6, 40))
            accuracy = generator.normal(size=(1, 40)) + generator.normal(size=(6, 40))
            for crossed in wrong:
                wrong[crossed] += rank_correlation(feature, accuracy, crossed=crossed).p_value < 0.05
        assert wrong[True] <= 5
        assert wrong[False] >= 12

    @pytest.mark.parametrize("crossed", [False, True])
    def test_what_cannot_be_known_is_nan(self, crossed: bool) -> None:
        x = np.random.default_rng(5).normal(size=(4, 6))
        assert math.isnan(rank_correlation(np.ones((4, 6)), x, crossed=crossed).estimate)
        assert math.isnan(rank_correlation(np.full((4, 6), np.nan), x, crossed=crossed).estimate)
        assert math.isnan(rank_correlation(x[:, :1], x[:, :1], crossed=crossed).estimate)
        assert math.isnan(rank_correlation(x[:2], x[:2] ** 2, crossed=crossed).low)
        same = rank_correlation(x, x, crossed=crossed)
        assert same.estimate == pytest.approx(1)
        assert math.isnan(same.low)
        assert math.isnan(same.p_value)

    def test_a_set_that_does_not_vary_is_left_out(self) -> None:
        x, y = np.random.default_rng(6).normal(size=(2, 5, 9))
        whole = rank_correlation(x, y)
        more = rank_correlation(np.vstack([x, np.ones(9)]), np.vstack([y, y[:1]]))
        assert more[:5] == pytest.approx(whole[:5])
        assert math.isnan(more.by_set[-1])

    def test_a_tiny_spread_is_a_spread(self) -> None:
        x, y = np.random.default_rng(7).normal(size=(2, 5, 9))
        assert correlation(1e-9 * x + 0.5, y).estimate == pytest.approx(correlation(x, y).estimate, abs=1e-5)


class TestJackknife:
    def test_of_a_mean_is_students(self) -> None:
        values = np.random.default_rng(8).normal(size=12)
        left_out = [np.delete(values, i).mean() for i in range(12)]
        found = jackknife_interval(values.mean(), left_out)
        want = scipy_stats.t.interval(0.95, 11, values.mean(), scipy_stats.sem(values))
        assert (found.low, found.high) == pytest.approx(want)

    def test_is_nan_without_two_units(self) -> None:
        assert math.isnan(jackknife_interval(0.5, [0.5]).low)
        assert math.isnan(jackknife_interval(0.5, [0.5, 0.6], [math.nan, 0.1]).low)
        assert math.isnan(jackknife_interval(math.nan, [0.5, 0.6]).low)


class TestOrderingFeatures:
    @given(seeds, st.integers(2, 4), st.integers(2, 7))
    @settings(max_examples=40)
    def test_agree_with_plain_loops(self, seed: int, num_labels: int, num_shots: int) -> None:
        generator = np.random.default_rng(seed)
        labels = generator.integers(0, num_labels, (2, 3, num_shots))
        lengths = generator.integers(1, 5, labels.shape).astype(float)
        names = [f"label {label}" for label in range(num_labels)]
        found = ordering_features(labels, names, lengths=lengths, similarity=lengths)
        last = min(num_labels, num_shots)
        for s, p in np.ndindex(2, 3):
            shown = labels[s, p].tolist()
            assert [found[f"last label is {name}"][s, p] for name in names] == [
                float(shown[-1] == label) for label in range(num_labels)
            ]
            assert found["longest run of one label"][s, p] == reference.longest_run(shown)
            assert found[f"distinct labels among the last {last}"][s, p] == len(set(shown[-last:]))
            middle = (num_shots - 1) / 2
            uneven = [
                abs(np.mean([place for place, label in enumerate(shown) if label == one]) - middle) / middle
                for one in set(shown)
            ]
            if num_shots > 2:
                assert found["uneven label positions"][s, p] == pytest.approx(np.mean(uneven))
            if np.ptp(lengths[s, p]) > 0:
                want = scipy_stats.spearmanr(lengths[s, p], range(num_shots)).statistic
                assert found["longer ones last"][s, p] == pytest.approx(want)
            else:
                assert found["longer ones last"][s, p] == 0
            assert found["similarity of the last to the queries"][s, p] == lengths[s, p, -1]
            mean = found[f"similarity of the last {last} to the queries"][s, p]
            assert mean == pytest.approx(lengths[s, p, -last:].mean())

    def test_sorted_labels_are_as_uneven_as_can_be(self) -> None:
        found = ordering_features([[[0, 0, 1, 1], [0, 1, 1, 0]]], ["a", "b"])
        assert found["uneven label positions"].tolist() == [[pytest.approx(2 / 3), 0.0]]
        assert found["longest run of one label"].tolist() == [[2.0, 2.0]]

    def test_one_demonstration_has_only_a_label(self) -> None:
        found = ordering_features([[[0], [1]]], ["a", "b"])
        assert found["uneven label positions"].tolist() == [[0.0, 0.0]]
        assert not [name for name in found if "among the last" in name]


class TestRecencyBias:
    @given(seeds)
    @settings(max_examples=30)
    def test_agrees_with_plain_loops(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        predictions, last = generator.integers(0, 3, (2, 4, 6)), generator.integers(0, 3, (2, 4))
        weights = generator.integers(1, 4, 6)
        written_out = np.repeat(predictions, weights, axis=2)
        want = [
            (written_out[s, p] == last[s, p]).mean() - (written_out[s] == last[s, p]).mean()
            for s, p in np.ndindex(2, 4)
        ]
        found = recency_bias(predictions, last, weights=weights)
        assert found.estimate == pytest.approx(np.mean(want))
        table = np.reshape(want, (2, 4))
        left_out = [np.delete(table, s, 0).mean() for s in range(2)], [np.delete(table, p, 1).mean() for p in range(4)]
        wide = jackknife_interval(np.mean(want), *left_out)
        assert found[1:3] == pytest.approx((max(wide.low, -1), min(wide.high, 1)))  # a difference of shares
        assert plain(found).get("bounded", False) == (wide.low < -1 or wide.high > 1)

    def test_a_planted_bias_is_found_and_a_preferred_label_is_none(self) -> None:
        generator = np.random.default_rng(9)
        last = generator.integers(0, 4, (8, 30))
        answers = generator.choice(4, size=(8, 30, 100), p=[0.7, 0.1, 0.1, 0.1])
        none = recency_bias(answers, last)
        assert none.low < 0 < none.high
        assert abs(none.estimate) < 0.01
        follows = generator.random(answers.shape) < 0.2
        found = recency_bias(np.where(follows, last[..., None], answers), last)
        assert found.low > 0.1
        assert 0.12 < found.estimate < 0.2

    def test_one_set_or_one_permutation(self) -> None:
        answers = np.random.default_rng(10).integers(0, 2, (3, 4, 9))
        assert math.isnan(recency_bias(answers[:1], [[0, 1, 0, 1]]).low)
        single = recency_bias(answers[:, :1], [[0], [1], [0]])
        assert single.estimate == 0
        assert math.isnan(single.low)


class TestLexicalSimilarity:
    @given(st.lists(st.lists(st.sampled_from(["oil", "cup", "war", "Oil"]), max_size=5), min_size=2, max_size=6))
    def test_agrees_with_the_oracle(self, words: list[list[str]]) -> None:
        texts, queries = words[:1], words[1:]
        found = lexical_similarity([" ".join(text) for text in texts], [", ".join(query) for query in queries])
        lowered = [[word.lower() for word in document] for document in words]
        assert found == pytest.approx(reference.tf_idf_similarity(lowered[:1], lowered[1:]), abs=1e-12)

    def test_the_same_words_are_nearest(self) -> None:
        found = lexical_similarity(["oil price falls", "cup final tonight", "?!"], ["Oil price falls!"])
        assert found == pytest.approx([1, 0, 0])


BAD_CALLS = [
    (lambda: rank_correlation([[1, 2]], [1, 2]), "both have shape [S, N], got [1, 2] and [2]"),
    (lambda: rank_correlation(np.ones((2, 0)), np.ones((2, 0))), "got [2, 0] and [2, 0]"),
    (lambda: rank_correlation(np.eye(4), np.eye(4) + 0.1 * np.arange(4), level=2), "level must lie between 0 and 1"),
    (lambda: ordering_features([[0, 1]], ["a", "b"]), "labels must be integers of shape [S, P, K]"),
    (lambda: ordering_features([[[0, 2]]], ["a", "b"]), "labels must lie in 0..1, found 2"),
    (lambda: ordering_features([[[0, 1]]], ["a", "b"], lengths=[[1.0]]), "lengths must have the shape of labels"),
    (lambda: recency_bias(np.ones((2, 3, 4)), [0, 1]), "last_labels [S, P], got [2, 3, 4] and [2]"),
    (lambda: lexical_similarity(["a"], []), "at least one text and one query, got 1 and 0"),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS)
def test_bad_input_is_named(call: Any, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as error:
        call()
    assert "\n" not in str(error.value)
