"""The sizes that a precision takes, and the rule by which a run stops: against the slow way, and against answers."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iclperm import stats
from iclperm.errors import RequestError
from iclperm.reference import sizing as slow
from iclperm.stats import sizing
from iclperm.stats.components import Effects, solve_components
from iclperm.stats.sizing import LEAST, Look, StoppingRule, StudySizes, TokenCosts
from iclperm.study.precision import Precision, parse_precision

SIGMA2 = Effects(S=9e-4, P=4e-4, I=0.08, SP=9e-4, SI=0.01, PI=0.005, SPI=0.1)
COSTS = TokenCosts(200, 40)
MOST = StudySizes(16, 64, 400)
components = st.builds(Effects, *(st.sampled_from([0.0, 1e-4, 1e-3, 0.02]) for _ in range(6)), st.just(0.1))
shapes = st.tuples(st.integers(2, 9), st.integers(2, 9), st.integers(2, 200))


@given(components, shapes)
@settings(max_examples=30, deadline=None)
def test_expected_squares_and_half_widths_are_those_of_the_slow_way(sigma2, shape):
    squares = sizing.expected_squares(sigma2, *shape)
    expected = slow.expected_squares(sigma2._asdict(), shape)
    np.testing.assert_allclose(squares, [expected[name] for name in Effects._fields], rtol=1e-12)
    np.testing.assert_allclose(solve_components(squares, *shape), sigma2, atol=1e-12)
    found = float(sizing.half_width("order_effect", sigma2, *shape))
    assert found == pytest.approx(slow.half_width_of_order_effect(sigma2._asdict(), shape, 0.95), rel=2e-3)
    turned = Effects(sigma2.P, sigma2.S, sigma2.I, sigma2.SP, sigma2.PI, sigma2.SI, sigma2.SPI)
    other = sizing.half_width("selection_effect", turned, shape[1], shape[0], shape[2])
    assert found == pytest.approx(float(other), rel=1e-9)


@pytest.mark.parametrize("quantity", ["order_effect", "selection_effect", "r", "accuracy"])
@pytest.mark.parametrize("sizes", [StudySizes(10, 10, 500), StudySizes(12, 40, 60)])
def test_the_closed_form_is_near_the_intervals_it_stands_for(quantity, sizes):
    widths = sizing.simulated_half_widths(quantity, SIGMA2, sizes)
    assert float(sizing.half_width(quantity, SIGMA2, *sizes)) == pytest.approx(np.median(widths), rel=0.15)
    usual = float(sizing.half_width(quantity, SIGMA2, *sizes, chance=0.8))
    assert usual == pytest.approx(np.quantile(widths, 0.8), rel=0.2)


@pytest.mark.parametrize("quantity", ["order_effect", "r", "accuracy"])
def test_simulated_half_widths_are_those_of_answers(quantity):
    """Gaussian scores with these components, analysed as a run is."""
    sizes, generator = StudySizes(8, 10, 80), np.random.default_rng(1)
    sigma2 = Effects(*(0.1 * value for value in SIGMA2))
    found = []
    for seed in range(40):
        axes = [tuple(sizes[place] if place in places else 1 for place in range(3)) for places in _AXES]
        drawn = [v**0.5 * generator.standard_normal(axis) for v, axis in zip(sigma2, axes, strict=True)]
        found.append(sizing.look_at(quantity, np.clip(0.5 + sum(drawn), 0, 1), level=0.95, seed=seed).half_width)
    expected = np.median(sizing.simulated_half_widths(quantity, sigma2, sizes))
    assert np.median(np.nan_to_num(found, nan=np.inf)) == pytest.approx(expected, rel=0.2)


_AXES = [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]


def test_the_cheapest_is_that_of_a_search_of_everything():
    most = StudySizes(8, 24, 100)
    found = sizing.cheapest("order_effect", SIGMA2, 0.018, COSTS, most, chance=0.5)
    axes = [np.unique(axis).astype(int).tolist() for axis in sizing._grid(LEAST, most)]
    wanted = slow.cheapest(
        lambda shape: slow.half_width_of_order_effect(SIGMA2._asdict(), shape, 0.95),
        lambda shape: COSTS.of(*shape),
        axes,
        0.018,
    )
    assert COSTS.of(*found) == pytest.approx(COSTS.of(*wanted), rel=0.03)
    assert sizing.cheapest("order_effect", SIGMA2, 1e-4, COSTS, MOST) is None
    with pytest.raises(RequestError, match="above 0"):
        sizing.cheapest("order_effect", SIGMA2, 0, COSTS, MOST)


def test_choices_are_ordered_none_is_worse_in_everything_and_they_reach_what_they_say():
    choices = sizing.size_choices("order_effect", SIGMA2, 0.012, COSTS, MOST)
    tokens = [COSTS.of(*choice.sizes) for choice in choices]
    assert 2 <= len(choices) <= 5
    assert tokens == sorted(tokens)
    assert all(choice.chance >= 0.48 for choice in choices)
    assert max(choice.chance for choice in choices) >= 0.93
    assert sizing._undominated(choices, COSTS) == choices
    assert sizing.size_choices("order_effect", SIGMA2, 1e-4, COSTS, MOST) == []


@pytest.mark.parametrize(
    ("quantity", "sigma2", "said"),
    [
        ("order_effect", SIGMA2._replace(P=0.0, SP=-1e-4), "order shows no variance"),
        ("r", SIGMA2._replace(S=0.0, SP=0.0), "order and choice shows no variance"),
        ("accuracy", Effects(*[0.0] * 7), "nothing varies"),
    ],
)
def test_where_there_is_nothing_to_measure_it_says_so(quantity, sigma2, said):
    with pytest.raises(RequestError, match=said):
        sizing.size_choices(quantity, sigma2, 0.01, COSTS, MOST)


def look(half, sigma2=SIGMA2):
    return Look(stats.Interval(0.04, 0.04 - half, 0.04 + half, 0.965), sigma2)


@given(
    components, st.tuples(st.integers(2, 8), st.integers(2, 16), st.integers(8, 100)), st.sampled_from([0.003, 0.02])
)
@settings(max_examples=30, deadline=None)
def test_a_wave_grows_within_its_bounds_until_it_is_reached_or_at_most(sigma2, now, wanted):
    rule = StoppingRule("order_effect", wanted)
    assert rule.next(look(0.99 * wanted), StudySizes(*now), MOST, COSTS) is None
    assert rule.next(look(2 * wanted), MOST, MOST, COSTS) is None
    for half in (2 * wanted, math.nan):
        found = rule.next(look(half, sigma2), StudySizes(*now), MOST, COSTS)
        assert found == rule.next(look(half, sigma2), StudySizes(*now), MOST, COSTS)
        assert all(before <= size <= end for before, size, end in zip(now, found, MOST, strict=True))
        growth = COSTS.of(*found) / COSTS.of(*now)
        assert growth <= 6 + 1e-9
        assert growth >= 1.2 or found == MOST


def test_a_run_that_grows_by_it_arrives():
    rule, now, looks = StoppingRule("order_effect", 0.012), StudySizes(4, 8, 64), 0
    while now is not None:
        last, looks = now, looks + 1
        half = float(np.median(sizing.simulated_half_widths("order_effect", SIGMA2, now, level=rule.level)))
        now = rule.next(look(half), now, MOST, COSTS)
    assert half <= 0.012
    assert looks <= 4
    assert COSTS.of(*last) <= 2 * COSTS.of(*sizing.cheapest("order_effect", SIGMA2, 0.012, COSTS, MOST))


def test_a_look_at_a_difference_takes_the_first_from_the_second():
    generator = np.random.default_rng(0)
    one, other = (generator.random((4, 5, 60)) < p for p in (0.5, 0.7))
    found = sizing.look_at("difference", (one, other))
    assert found.interval.estimate == pytest.approx(other.mean() - one.mean())
    assert found.interval.low < 0.2 < found.interval.high
    state = np.zeros(one.shape, np.uint8)
    state[0, 0, :5] = 1
    less = sizing.look_at("difference", (one, other), (state, 0 * state))
    assert 0 < abs(less.interval.estimate - found.interval.estimate) < 0.02


def test_ranks_take_more_permutations_the_closer_they_are_to_be_known():
    needed = [sizing.permutations_for_rank(0.02, 0.1, 8, wanted, 4096) for wanted in (3.0, 2.0, 1.0)]
    assert needed == sorted(needed)
    assert needed[0] < needed[2]
    assert sizing.rank_half_width(0.02, 0.1 / math.sqrt(needed[1]), 8) <= 2.0
    assert sizing.permutations_for_rank(0.02, 0.1, 8, 0.01, 64) is None
    with pytest.raises(RequestError, match="have no ranks"):
        sizing.permutations_for_rank(0.0, 0.1, 8, 1.0, 64)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("order_effect ± 0.01", Precision("order_effect", 0.01)),
        ("Selection effect +- .02", Precision("selection_effect", 0.02)),
        ("r +/- 0.3", Precision("r", 0.3)),
        ("accuracy±0.02", Precision("accuracy", 0.02)),
        ("accuracy at k = 4 +- 0.02", Precision("accuracy", 0.02, (4,))),
        ("difference of 0 and 4 +- 2e-2", Precision("difference", 0.02, (0, 4))),
        ("rank of shapley ± 2", Precision("rank", 2.0, (), "shapley")),
    ],
)
def test_precisions_are_read(text, wanted):
    assert parse_precision(text) == wanted


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("order_effect", "order_effect .- 0.01"),
        ("entropy +- 0.1", "'entropy' is no quantity"),
        ("accuracy +- 2", "a point is 0.01"),
        ("r +- 0", "not between 0 and inf"),
        ("r +- little", "is no number"),
        ("difference of 4 and 4 +- 0.1", "give two"),
        ("rank of luck +- 1", "no score"),
    ],
)
def test_what_is_no_precision_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        parse_precision(text)
