"""Effects of orderings that answered blocks of queries of their own, against oracles and every possible block."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iclperm import stats
from iclperm.errors import RequestError
from iclperm.reference import blocks as oracle
from iclperm.stats.blocks import block_effects, own_block_components


def blocks_of(generator, shape, num_queries, size, classes=None):
    """State [S, P, Q] of a random block of `size` of each class for every ordering; 4 is what was not asked."""
    state = np.full((*shape, num_queries), 4, np.uint8)
    names = np.zeros(num_queries, np.int64) if classes is None else classes
    for cell in np.ndindex(shape):
        for name in np.unique(names):
            state[(*cell, generator.permutation(np.flatnonzero(names == name))[:size])] = 0
    return state


@given(
    seed=st.integers(0, 2**32),
    num_classes=st.integers(1, 2),
    is_weighted=st.booleans(),
    size=st.integers(2, 4),
)
@settings(max_examples=30, deadline=None)
def test_agrees_answer_by_answer(seed, num_classes, is_weighted, size):
    generator = np.random.default_rng(seed)
    items = generator.integers(0, 2, (3, 4, 12), np.uint8)
    classes = np.arange(12) % num_classes
    weights = generator.integers(1, 3, 12).astype(float) if is_weighted else np.ones(12)
    state = blocks_of(generator, (3, 4), 12, size, classes)
    found = own_block_components(items, state, weights=weights, classes=classes, target="these")
    shares = {name: weights[classes == name].sum() / weights.sum() for name in range(num_classes)}
    sizes = {name: int(np.count_nonzero(classes == name)) for name in range(num_classes)}
    for cell in np.ndindex(3, 4):
        there = state[cell] == 0
        own = items[cell][there].tolist(), weights[there].tolist(), classes[there].tolist()
        wanted = oracle.accuracy_and_noise(*own, shares, sizes)
        assert (found.accuracy[cell], found.noise[cell]) == pytest.approx(wanted, abs=1e-12)
    wanted = oracle.variances(found.accuracy, found.noise)
    assert (found.order2, found.selection2) == pytest.approx(wanted, abs=1e-12)


def test_blocks_without_common_queries_need_no_pool():
    items = np.random.default_rng(2).integers(0, 2, (3, 4, 6), np.uint8)
    found = own_block_components(items)
    spread = items.var(axis=2, ddof=1) / 6
    np.testing.assert_allclose(found.noise, spread)
    assert found.pool == (0, 0, 0)
    apart = np.zeros((3, 4, 72), np.uint8)
    state = np.full(apart.shape, 4, np.uint8)
    for number, cell in enumerate(np.ndindex(3, 4)):
        state[(*cell, slice(6 * number, 6 * number + 6))] = 0
        apart[(*cell, slice(6 * number, 6 * number + 6))] = items[cell]
    same = own_block_components(apart, state)
    np.testing.assert_allclose(same.accuracy, found.accuracy)
    assert pytest.approx((found.S, found.P, found.SP)) == (same.S, same.P, same.SP)


def test_unbiased_over_every_possible_block():
    """All choices of 2 of 4 queries by 4 orderings: the mean estimate is the variance of the accuracies on the pool."""
    items = np.array([[[0, 1, 1, 1], [0, 0, 1, 0]], [[1, 1, 1, 1], [0, 1, 0, 1]]], np.uint8)
    table = items.mean(axis=2)
    wanted = table.var(axis=1, ddof=1).mean(), table.var(axis=0, ddof=1).mean()
    found = []
    for chosen in product(combinations(range(4), 2), repeat=4):
        state = np.ones(items.shape, np.uint8)
        for cell, block in zip(np.ndindex(2, 2), chosen, strict=True):
            state[(*cell, list(block))] = 0
        one = own_block_components(items, state, target="these")
        found.append((one.order2, one.selection2, one.mean.estimate))
    assert np.mean(found, axis=0) == pytest.approx((*wanted, table.mean()), abs=1e-12)


def test_a_whole_pool_is_the_crossed_design():
    items = np.random.default_rng(5).integers(0, 2, (3, 5, 20), np.uint8)
    state = np.zeros(items.shape, np.uint8)
    these = own_block_components(items, state, target="these")
    assert np.all(these.noise == 0)
    assert these.order2 == pytest.approx(items.mean(axis=2).var(axis=1, ddof=1).mean())
    others, crossed = own_block_components(items, state), stats.variance_components(items).sigma2
    assert pytest.approx((crossed.S, crossed.P, crossed.SP)) == (others.S, others.P, others.SP)


def drawn(generator, shape, num_queries, order=0.12, selection=0.06):
    """Answers [S, P, Q] with effects of sets, of permutations and of both; queries of different difficulty."""
    both = order / np.sqrt(2)
    chance = 0.6 + selection * generator.standard_normal((shape[0], 1, 1))
    chance = chance + both * (generator.standard_normal((1, shape[1], 1)) + generator.standard_normal((*shape, 1)))
    chance = chance + generator.uniform(-0.25, 0.25, num_queries)
    return (generator.random((*shape, num_queries)) < chance).astype(np.uint8)


@pytest.mark.parametrize("method", ["own", "adjusted"])
@pytest.mark.parametrize("num_classes", [1, 2])
def test_both_methods_are_unbiased_for_other_queries(method, num_classes):
    found = []
    for repeat in range(400):
        generator = np.random.default_rng([repeat, num_classes])
        items = drawn(generator, (5, 12), 60, order=0.08, selection=0.04)
        classes = np.arange(60) % num_classes
        state = blocks_of(generator, (5, 12), 60, 12 // num_classes, classes)
        if method == "own":
            one = own_block_components(items, state, classes=classes)
            found.append((one.order2, one.selection2))
        else:
            sigma2 = stats.variance_components(items, state, classes=classes).sigma2
            found.append((sigma2.P + sigma2.SP, sigma2.S + sigma2.SP))
    error = np.std(found, axis=0) / np.sqrt(len(found))
    assert (np.abs(np.mean(found, axis=0) - [0.08**2, 0.04**2 + 0.08**2 / 2]) < 4 * error).all()


def test_effects_have_intervals_by_both_methods():
    generator = np.random.default_rng(3)
    items = drawn(generator, (6, 20), 100)
    state = blocks_of(generator, (6, 20), 100, 25)
    assert block_effects(items, state).method == "adjusted"
    assert block_effects(items[..., :25]).method == "own"
    for method in ("own", "adjusted"):
        found = block_effects(items, state, method=method, draws=4_000)
        for intervals in (found.generalised, found.jackknife):
            assert intervals.order.low < 0.12 < intervals.order.high
            assert 0 < intervals.order.low < intervals.order.estimate < intervals.order.high < 0.3
            assert intervals.ratio.low < intervals.ratio.estimate < intervals.ratio.high
        assert found.order2 == pytest.approx(found.generalised.order.estimate**2)
    few = block_effects(items[:2], state[:2])
    assert np.isnan(few.jackknife.order.low)
    assert few.generalised.order.low < few.generalised.order.high


def test_bad_blocks_are_named():
    items = np.random.default_rng(3).integers(0, 2, (3, 4, 12), np.uint8)
    state = blocks_of(np.random.default_rng(3), (3, 4), 12, 3)
    state[1, 2] = 4
    with pytest.raises(RequestError, match="set 1 under permutation 2 has no answer"):
        own_block_components(items, state)
    with pytest.raises(RequestError, match="no ordering has 2 answers"):
        own_block_components(items[..., :1])
    with pytest.raises(RequestError, match=r"2 sets and 2 permutations, got \[1, 4, 12\]"):
        own_block_components(items[:1])
    with pytest.raises(RequestError, match="leave out the weights"):
        own_block_components(items, weights=np.ones(12))
    with pytest.raises(RequestError, match=r"state must have the shape of scores \[3, 4, 12\]"):
        own_block_components(items, state[:2])
