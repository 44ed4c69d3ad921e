"""Designs of permutations: what each deals together, and effects of such permutations against their oracle."""

import math
from collections import Counter
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import iclperm
from iclperm import Study, stats
from iclperm.errors import ConfigError, RequestError
from iclperm.prompts.design import draw_permutations
from iclperm.reference import designs as oracle
from iclperm.stats import designs
from iclperm.studies.sensitivity_conclusion import conclusion
from iclperm.studies.sensitivity_summary import sensitivity_summary
from iclperm.study.orderings import MOVED, ORDER_DESIGNS, block_size, design_words

IN_BLOCKS = ("latin", "antithetic", "prefix_coupled")


@given(seed=st.integers(0, 2**63 - 1), size=st.integers(0, 5), design=st.sampled_from(IN_BLOCKS), data=st.data())
@settings(max_examples=60, deadline=None)
def test_orders_are_distinct_and_stay_when_there_are_more(seed, size, design, data):
    total = math.factorial(size)
    few = data.draw(st.integers(1, total))
    orders = draw_permutations(seed, total, size, design=design)
    assert len({tuple(row) for row in orders}) == total
    assert all(sorted(row) == list(range(size)) for row in orders)
    np.testing.assert_array_equal(draw_permutations(seed, few, size, design=design), orders[:few])


@pytest.mark.parametrize("design", ORDER_DESIGNS)
def test_every_order_is_as_likely_in_every_place(design):
    counts = Counter()
    for seed in range(1_200):
        counts.update((place, tuple(row)) for place, row in enumerate(draw_permutations(seed, 6, 3, design=design)))
    # Each of 36 cells is binomial(1200, 1/6): sd 12.9; 6 sd never happens by chance.
    assert len(counts) == 36
    assert max(abs(count - 200) for count in counts.values()) < 6 * 12.9


@pytest.mark.parametrize("size", [2, 4, 5, 8, 9])
def test_a_latin_block_has_every_demonstration_at_every_position(size):
    for block in draw_permutations(7, 2 * size if size > 2 else 2, size, design="latin").reshape(-1, size, size):
        assert all(sorted(column) == list(range(size)) for column in block.T)
        neighbours = Counter(pair for row in block.tolist() for pair in pairwise(row))
        if size % 2 == 0:  # Williams: each comes directly after every other once
            assert set(neighbours.values()) == {1}
            assert len(neighbours) == size * (size - 1)


def test_antithetic_orders_come_with_their_reversals():
    orders = draw_permutations(3, 20, 6, design="antithetic")
    np.testing.assert_array_equal(orders[::2, ::-1], orders[1::2])


def test_coupled_orders_share_all_but_the_last_positions():
    orders = draw_permutations(3, 18, 7, design="prefix_coupled").reshape(3, 6, 7)
    kept = 7 - MOVED
    for group in orders:
        assert (group[:, :kept] == group[0, :kept]).all()
        assert len({tuple(row) for row in group[:, kept:].tolist()}) == 6
    assert len({tuple(group[0, :kept]) for group in orders}) == 3


def test_all_orders_are_all_orders_or_refused():
    orders = draw_permutations(1, 24, 4, design="exhaustive")
    assert {tuple(row) for row in orders.tolist()} == set(permutations(range(4)))
    assert orders.tolist() != sorted(orders.tolist())
    for count in (10, 25):
        message = (
            rf"permutations is {count}, but design 'exhaustive' .* all 24 orders and cannot be smaller or grow; set"
        )
        with pytest.raises(ConfigError, match=message):
            draw_permutations(1, count, 4, design="exhaustive")
    with pytest.raises(ConfigError, match="10 demonstrations have more than 362,880 orders; lower 'shots' to 9"):
        draw_permutations(1, 10, 10, design="exhaustive")
    with pytest.raises(ConfigError, match="permutations is 25, but 4 demonstrations have only 24 orders"):
        draw_permutations(1, 25, 4, design="latin")


def test_the_draws_of_designs_are_pinned():
    """The same seed must mean the same study in every version: these values may never change."""
    assert draw_permutations(0, 4, 4, design="latin").tolist() == [
        [1, 2, 3, 0],
        [2, 0, 1, 3],
        [3, 1, 0, 2],
        [0, 3, 2, 1],
    ]
    assert draw_permutations(0, 3, 4, design="antithetic").tolist() == [[1, 3, 0, 2], [2, 0, 3, 1], [0, 2, 3, 1]]
    assert draw_permutations(0, 3, 4, design="prefix_coupled").tolist() == [[3, 2, 1, 0], [3, 1, 0, 2], [3, 1, 2, 0]]
    default = draw_permutations(5, 9, 4)
    np.testing.assert_array_equal(draw_permutations(5, 9, 4, design="random"), default)
    assert Study().design == "random"


def test_a_design_in_words():
    assert design_words("random", 10, 8) == "10 orders drawn at random"
    assert design_words("latin", 20, 8) == "2 Latin squares of 8 orders and 4 of another"
    assert design_words("latin", 4, 8) == "4 of one Latin square of 8 orders"
    assert design_words("antithetic", 2, 8) == "1 pair of an order and its reversal"
    assert design_words("prefix_coupled", 12, 8) == "2 groups of 6 orders that share all but the last 3 positions"
    assert design_words("exhaustive", 24, 4) == "all 24 orders"


@st.composite
def answers(draw):
    """Items [S, P, Q] of a design, with state, weights and classes."""
    design = draw(st.sampled_from(ORDER_DESIGNS[:4]))
    size = draw(st.integers(3, 4))
    most = math.factorial(size)
    num_p = draw(st.integers(min(block_size(design, size) + 1, most), min(most, 9)))
    num_q = draw(st.integers(6, 9))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    items = (generator.random((2, num_p, num_q)) < generator.random((2, num_p, 1))).astype(np.uint8)
    state = np.zeros(items.shape, np.uint8)
    if draw(st.booleans()):
        state[:, generator.integers(num_p), generator.integers(num_q)] = 1
    classes = np.arange(num_q) % 2 if draw(st.booleans()) else np.zeros(num_q, np.int64)
    weights = np.where(classes, 1.0, draw(st.sampled_from([1.0, 2.0])))
    return design, size, items, state, weights, classes


@given(case=answers())
@settings(max_examples=30, deadline=None)
def test_order_variances_agree_with_every_pair(case):
    design, size, items, state, weights, classes = case
    blocks = designs.permutation_blocks(design, items.shape[1], size)
    found = designs.order_variances(items, blocks, state, weights=weights, classes=classes)
    marked = np.where(state, np.nan, items)
    for s, value in enumerate(found):
        wanted = oracle.order_variance(marked[s], blocks.labels, blocks.size, blocks.num_orders, weights, classes)
        assert value == pytest.approx(wanted, abs=1e-12)


def test_blocks_of_one_are_independent_orders():
    items = np.random.default_rng(3).integers(0, 2, (4, 6, 30), np.uint8)
    blocks = designs.permutation_blocks("random", 6, 30)
    found, crossed = designs.designed_effects(items, blocks), stats.variance_components(items)
    assert found.order2 == pytest.approx(crossed.sigma2.P + crossed.sigma2.SP, abs=1e-14)
    assert found.selection2 == pytest.approx(crossed.sigma2.S + crossed.sigma2.SP, abs=1e-14)
    assert found.jackknife == pytest.approx(stats.jackknife_ratio_interval(stats.accuracy(items)))
    mean, plain = designs.designed_mean(items, blocks), stats.mean_error(items)
    assert (mean.mean, mean.se) == pytest.approx((plain.mean, plain.se))
    assert found.with_noise.order.estimate == pytest.approx(stats.order_sensitivity(stats.accuracy(items), "rms"))


def position_effects(size, seed):
    """[size!] accuracy of every order: positions times demonstrations, and neighbours."""
    generator = np.random.default_rng(seed)
    at, after = generator.normal(size=(size, size)), generator.normal(size=(size, size)) / 2
    return {
        order: 0.5 + 0.02 * (at[range(size), order].sum() + sum(after[pair] for pair in pairwise(order)))
        for order in permutations(range(size))
    }


@pytest.mark.parametrize("design", IN_BLOCKS)
@pytest.mark.parametrize("count", [12, 15])
def test_estimates_are_unbiased_over_draws_of_a_design(design, count):
    """Mean over many draws of the design against the variance, and the mean, over all orders."""
    truth = position_effects(4, 1)
    values = np.array(list(truth.values()))
    blocks = designs.permutation_blocks(design, count, 4)
    found, means = [], []
    for seed in range(3_000):
        row = np.array([truth[tuple(order)] for order in draw_permutations(seed, count, 4, design=design).tolist()])
        between, within = designs._pair_squares(row, blocks)
        found.append(float(designs._over_all_orders(np.asarray(between), np.asarray(within), blocks)))
        means.append(row.mean())
    for drawn, wanted in ((found, values.var(ddof=1)), (means, values.mean())):
        assert abs(np.mean(drawn) - wanted) < 5 * np.std(drawn) / math.sqrt(len(drawn)) + 1e-12


def test_a_latin_square_knows_the_mean_of_what_positions_do():
    """Where accuracy is a sum over positions every square has the same mean, and the interval closes on it."""
    at = np.random.default_rng(4).normal(size=(6, 6)) * 0.03
    orders = draw_permutations(0, 18, 6, design="latin")
    accuracies = 0.6 + at[np.arange(6), orders].sum(axis=1)
    by_query = np.full((3, 18, 40), accuracies[None, :, None])
    squares = designs.permutation_blocks("latin", 18, 6)
    found = designs.designed_mean(by_query, squares)
    assert found.mean == pytest.approx(0.6 + at.mean(axis=1).sum())
    assert found.parts.P < 1e-12 < stats.mean_error(by_query).parts.P


def test_one_block_cannot_tell_how_much_others_differ():
    items = np.random.default_rng(3).integers(0, 2, (3, 8, 20), np.uint8)
    with pytest.raises(RequestError, match=r"are of one block of 8, .* run 16 permutations or more"):
        designs.designed_effects(items, designs.permutation_blocks("latin", 8, 8))
    with pytest.raises(RequestError, match="blocks are of 9 permutations, the scores of 8"):
        designs.designed_effects(items, designs.permutation_blocks("antithetic", 9, 8))


def test_of_all_orders_nothing_was_drawn():
    items = np.random.default_rng(3).integers(0, 2, (5, 6, 40), np.uint8)
    blocks = designs.permutation_blocks("exhaustive", 6, 3)
    assert blocks.is_complete
    mean = designs.designed_mean(items, blocks)
    assert mean.covers == ("sets", "queries")
    found = designs.designed_effects(items, blocks)
    by_set = designs.order_variances(items, blocks)
    assert found.order2 == pytest.approx(by_set.mean())
    assert found.with_noise.order.low < found.with_noise.order.estimate < found.with_noise.order.high


def test_a_summary_takes_blocks_for_what_was_drawn():
    generator = np.random.default_rng(8)
    items = (generator.random((4, 12, 50)) < 0.5 + generator.normal(size=(4, 12, 1)) * 0.1).astype(np.uint8)
    blocks = designs.permutation_blocks("latin", 12, 4)
    plain = sensitivity_summary(items)
    found = sensitivity_summary(items, design=("3 Latin squares", blocks))
    alone = designs.designed_effects(items, blocks)
    assert (found.effects, found.intervals, found.jackknife) == (alone.intervals, alone.with_noise, alone.jackknife)
    assert found.effects != plain.effects
    assert found.spreads["rms"].order == alone.with_noise.order.estimate
    assert found.mean == plain.mean
    assert found.mean_interval != plain.mean_interval
    assert "Orders are 3 Latin squares, dealt together" in conclusion(found, 4)[-1]
    assert found.to_dict(4)["designed"]["num_blocks"] == 3
    assert "design" not in plain.to_dict(4)
    square = sensitivity_summary(items[:, :4], design=("1 square", designs.permutation_blocks("latin", 4, 4)))
    assert (square.effects, square.designed) == (None, None)
    assert any(
        "what order does has no interval: all 4 permutations are of one block" in line for line in square.warnings
    )
    state = np.zeros(items.shape, np.uint8)
    state[0, 0, :5] = 1
    gaps = sensitivity_summary(items, state=state, design=("3 Latin squares", blocks))
    assert gaps.if_wrong.order != gaps.if_right.order
    assert gaps.effects.order.low < gaps.effects.order.high


def test_a_run_of_all_orders_says_so_and_does_not_grow(tmp_path):
    study = Study(sets=3, permutations=24, shots=4, queries=40, design="exhaustive", out=str(tmp_path / "all"))
    found = iclperm.run(study)
    assert "Orders are all 24 orders: intervals are for other sets and queries." in found.findings().conclusion()
    assert any(row[0] == "orders" and row[2] == "all 24 orders" for row in found.findings().tables(False)[0].rows)
    more = study.model_copy(update={"permutations": 25})
    with pytest.raises(ConfigError, match="design 'exhaustive' of 4 demonstrations is all 24 orders and cannot be"):
        iclperm.run(more, extend=True)
    assert len(iclperm.run(study.model_copy(update={"queries": 44}), extend=True).gold) == 44


def test_a_run_of_squares_grows_by_squares(tmp_path):
    study = Study(sets=3, permutations=9, shots=4, queries=40, design="latin", out=str(tmp_path / "squares"))
    few = iclperm.run(study)
    assert any(line.startswith("orders are of a latin design") for line in few.warnings)
    more = iclperm.run(study.model_copy(update={"permutations": 12}), extend=True)
    np.testing.assert_array_equal(more.correct[:, :9], few.correct)
    assert any("Orders are 3 Latin squares of 4 orders" in line for line in more.findings().conclusion())


def test_an_unknown_design_is_named():
    message = "a study's key 'design' is 'square': input should be 'random', 'latin', 'antithetic', 'prefix_coupled' or"
    with pytest.raises(ConfigError, match=message):
        Study(design="square")
