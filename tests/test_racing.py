"""Races: what is asked next, what is chosen, and what that promises, against slow oracles and populations."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iclperm.errors import RequestError
from iclperm.reference import racing as oracle
from iclperm.stats import racing
from iclperm.stats.racing import RaceRule, RaceStep, gain_on_test, halving, leads, log_capital, next_step, replay

RULE = RaceRule()


def population(seed: int, spread: float, orderings: int = 24, queries: int = 240) -> np.ndarray:
    """Answers of orderings whose logits differ by ``spread``."""
    rng = np.random.default_rng(seed)
    effect, difficulty = rng.normal(0, spread, (orderings, 1)), rng.normal(1, 1.5, queries)
    mixed = rng.normal(0, 0.7, (orderings, queries))
    return (rng.random((orderings, queries)) < 1 / (1 + np.exp(-effect - difficulty - mixed))).astype(float)


@given(
    st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=1, max_size=30),
    st.integers(0, 40),
    st.sampled_from([0.0, 0.005, 0.02, 0.1]),
)
def test_the_capital_is_the_gamblers(differences: list[float], more: int, tolerance: float) -> None:
    total = len(differences) + more
    expected = oracle.capital(differences, total, tolerance)
    found = log_capital(differences, total, tolerance)
    assert math.isinf(found) == math.isinf(expected)
    if not math.isinf(found):
        assert math.exp(found) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("tolerance", [0.0, 0.01, 0.29])
def test_a_tie_that_everything_was_asked_about_is_proved(tolerance: float) -> None:
    rng = np.random.default_rng(0)
    table = np.array([rng.permutation(np.r_[np.ones(71), np.zeros(29)]) for _ in range(6)])  # alike, on other queries
    assert replay(table, RaceRule("certified", tolerance)).failure <= 0.05
    assert log_capital(table[1] - table[0], 100, tolerance) == math.inf
    one_ahead = [1.0] + 98 * [0.0]
    assert log_capital(one_ahead, 100, 0.0) < math.inf  # one query more decides
    assert log_capital([*one_ahead, -1.0], 100, 0.0) == math.inf


@pytest.mark.parametrize(
    ("queries", "sizes"), [(200, [24, 48, 96, 200]), (240, [24, 48, 96, 192, 240]), (50, [24, 50])]
)
def test_a_rest_of_a_tenth_has_no_wave_of_its_own(queries: int, sizes: list[int]) -> None:
    alike = np.tile(np.arange(queries) % 2.0, (4, 1))
    alike[::2] = 1 - alike[::2]
    assert [wave.num_queries for wave in replay(alike, RaceRule("certified", 0.0)).waves] == sizes


@pytest.mark.parametrize(
    ("answers", "tolerance"),
    [((1, 0, 0, 0, 0, 0, 0), 0.0), ((1, 1, 0, 0, -1, 0, 0), 0.0), ((1, 1, 1, -1, 0, 0, 0), 0.1)],
)
def test_what_is_true_is_seldom_refuted(answers: tuple[int, ...], tolerance: float) -> None:
    assert sum(answers) / len(answers) > tolerance  # the statement that is bet against holds
    for error in (0.05, 0.2, 0.5):
        assert oracle.chance_of_refuting(answers, 1, tolerance, error) <= error
    assert oracle.chance_of_refuting(tuple(-x for x in answers), 1, tolerance, 0.5) > 0  # and what is false, often


@pytest.mark.parametrize("budget", [100.0, 3_000.0, 20_000.0, 1e6])
def test_halving_begins_with_the_most_that_a_budget_lets_it(budget: float) -> None:
    sizes = 33, 200, 20.0, 7.0
    first = halving(*sizes, budget)
    if first is None:
        assert oracle.halving_cost(*sizes, 2) > budget
    else:
        assert oracle.halving_cost(*sizes, first) <= budget
        assert first == 200 or oracle.halving_cost(*sizes, first + 1) > budget


@given(st.integers(0, 1000), st.integers(1, 3), st.integers(2, 5))
def test_a_gain_is_the_oracles(seed: int, sets: int, orderings: int) -> None:
    rng = np.random.default_rng(seed)
    correct, state = rng.integers(0, 2, (sets, orderings, 12)), rng.integers(0, 2, (sets, orderings, 12))
    chosen = rng.integers(0, orderings, sets)
    state[:, :, :2] = 0
    found = gain_on_test(correct, state, chosen)
    average, own = oracle.gain_on_test(correct, state, chosen)
    assert found.average.estimate == pytest.approx(average)
    assert found.chosen.estimate == pytest.approx(own)
    assert found.gain.estimate == pytest.approx(own - average)
    assert found.by_set.mean(axis=1) == pytest.approx([average, own])


def test_a_gain_has_an_interval_that_holds_it() -> None:
    """Of 200 simulated searches with a known gain, by 5 sets and by one."""
    for sets, least in ((5, 0.9), (1, 0.9)):
        held = []
        for seed in range(200):
            rng = np.random.default_rng(seed)
            chance = np.clip(0.6 + rng.normal(0, 0.1, (sets, 20, 1)), 0.05, 0.95)
            correct = (rng.random((sets, 20, 200)) < chance).astype(int)
            state = np.ones_like(correct)
            for place in range(20):  # 4 orderings answer a query
                state[:, place, (np.arange(place * 40, place * 40 + 40)) % 200] = 0
            state[:, 3] = 0
            gain = float((chance[:, 3] - chance.mean(axis=1)).mean())
            found = gain_on_test(correct, state, [3] * sets).gain
            held.append(found.low <= gain <= found.high)
        assert np.mean(held) >= least


def test_leads_are_the_oracles() -> None:
    table, asked = population(0, 0.5)[:6, :40], np.array([40, 8, 40, 20, 8, 40])
    assert leads(table, asked, np.ones(40)) == pytest.approx(oracle.leads(table, asked))


@pytest.mark.parametrize(("seed", "spread", "size"), [(0, 0.5, 28), (1, 0.05, 40), (2, 1.0, 12)])
@pytest.mark.parametrize("num_classes", [1, 4, 9])
def test_what_is_known_of_the_orderings_is_the_oracles(seed: int, spread: float, size: int, num_classes: int) -> None:
    """Nine classes have one query each among the first twelve: then they say nothing of the noise."""
    table, classes = population(seed, spread, orderings=8, queries=80), np.arange(80) % num_classes
    asked = np.array([size, size, size // 2, size, size, size, size // 2, size])
    queries = racing._Queries(np.ones(80), classes)
    known = racing._posterior(racing._filled(table, asked), asked, queries, 0.01)
    expected = oracle.mixtures(table, asked.tolist(), classes.tolist())
    assert known.ranked.tolist() == list(expected)
    of = list(expected.values())
    for kept in (1, 2, 4):
        lost = known.lost(kept)
        assert lost.sum() == pytest.approx(1)
        assert lost[-1] == pytest.approx(oracle.chance_of_loss(of[:kept], of[kept:], 0.01), abs=2e-3)
        adds = ((1 - known.below[kept]) * known.first[kept - 1]).sum() * known.width
        assert adds == pytest.approx(oracle.added(of[:kept], of[kept]), abs=1e-4)


def test_what_an_ordering_has_for_a_class_is_no_noise_where_classes_take_turns() -> None:
    """Orderings that each lean to one of two classes: whoever knows the classes asks less, and chooses as well."""
    asked, kept = [], []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        classes, lean = np.arange(240) % 2, rng.normal(0, 0.25, (24, 1))
        chance = rng.normal(0.6, 0.05, (24, 1)) + np.where(classes == 0, lean, -lean)
        table = (rng.random((24, 240)) < chance).astype(float)
        races = [replay(table, RULE, classes=given) for given in (classes, None)]
        asked.append([race.num_asked.sum() for race in races])
        kept.append([table.mean(axis=1).max() - table[race.chosen].mean() <= RULE.tolerance + 1e-9 for race in races])
    with_classes, without = np.sum(asked, axis=0)
    assert with_classes < 0.95 * without
    assert np.mean(kept, axis=0)[0] >= 0.9


def test_a_quarter_goes_on_however_sure_the_first_answers_look() -> None:
    """One that is right on two queries that all others miss, and wrong on many to come."""
    table = np.ones((40, 400))
    table[1:, [3, 11]] = 0
    table[0, 60::2] = 0
    step = next_step(table, np.full(40, 24), RULE)
    assert (step.leader, step.num_left, len(step.candidates)) == (0, 10, 10)
    assert replay(table, RULE).chosen != 0


def test_what_two_waves_lose_adds_up() -> None:
    """Each nothing or half of the tolerance or more than it: only the latter, or twice more than half, breaks it."""
    parts = racing._PARTS
    half = np.zeros(parts + 2)
    half[[0, parts // 2, parts // 2 + 1, -1]] = 0.4, 0.3, 0.2, 0.1
    both = racing._added(half, half)
    assert both.sum() == pytest.approx(1)
    assert racing._chance(both) == pytest.approx(1 - 0.9**2 + 2 * 0.3 * 0.2 + 0.2**2)


def test_a_race_is_its_steps_and_each_a_function_of_what_was_asked() -> None:
    """Whoever forgets all but the committed answers decides as who remembers, whatever is to come."""
    for seed, spread in enumerate((0.05, 0.3, 1.0)):
        table = population(seed, spread)
        race, asked = replay(table, RULE), np.zeros(24, int)
        for wave in race.waves:
            step = next_step(np.where(np.arange(240) < asked[:, None], table, np.nan), asked, RULE)
            assert (step.candidates.tolist(), step.num_queries) == (wave.candidates.tolist(), wave.num_queries)
            asked[step.candidates] = step.num_queries
        last = next_step(np.where(np.arange(240) < asked[:, None], table, 1 - table), asked, RULE)
        assert last.is_decided
        assert last.leader == race.chosen
        assert last.failure == pytest.approx(race.failure)


@pytest.mark.parametrize("name", ["calibrated", "certified"])
def test_a_race_ends_with_a_choice_and_never_costs_much_more_than_everything(name: str) -> None:
    for seed, spread in enumerate((0.0, 0.05, 0.3, 1.0)):
        table = population(seed, spread)
        found = replay(table, RaceRule(name, 0.02))
        everything = 100.0 * len(table) + 20.0 * table.size
        assert found.cost(np.full(len(table), 100.0), np.full(table.shape[1], 20.0)) <= 1.05 * everything
        assert found.num_asked.max() <= table.shape[1]
        assert all(np.diff([wave.num_queries for wave in found.waves]) > 0) or name == "certified"


def test_what_is_chosen_is_within_the_tolerance_as_often_as_is_promised() -> None:
    kept, asked = [], []
    for seed in range(100):
        table = population(seed, (0.1, 0.3, 0.6)[seed % 3])
        found = replay(table, RULE)
        kept.append(table.mean(axis=1).max() - table[found.chosen].mean() <= RULE.tolerance + 1e-12)
        asked.append(found.num_asked.sum() / table.size)
    assert np.mean(kept) >= 0.93  # of 100, promised .95
    assert np.mean(asked) < 0.6


def test_what_a_race_states_is_about_how_often_it_is_broken() -> None:
    """By the rule's own stopping, on populations where a promise can be broken."""
    for spread in (0.05, 0.3):
        broken, stated = [], []
        for seed in range(150):
            table = population(1000 + seed, spread, orderings=32, queries=300)
            race, means = replay(table, RULE), table.mean(axis=1)
            broken.append(means.max() - means[race.chosen] > RULE.tolerance + 1e-12)
            stated.append(race.failure)
        noise = 2 * math.sqrt(0.03 / 150)
        assert np.mean(stated) > np.mean(broken) - noise
        assert np.mean(stated) < 2 * np.mean(broken) + 0.02 + noise


def test_a_certified_race_asks_until_nothing_better_is_possible() -> None:
    for seed in range(20):
        table = population(seed, 0.8, orderings=6)
        found = replay(table, RaceRule("certified", 0.02))
        assert table.mean(axis=1).max() - table[found.chosen].mean() <= 0.02 + 1e-12
        assert found.failure <= 0.05
        assert found.num_asked.sum() < table.size


def test_a_step_is_a_function_of_the_answers_alone() -> None:
    table, asked = population(1, 0.4), np.full(24, 48)
    asked[5:] = 24
    known = np.where(np.arange(240) < asked[:, None], table, np.nan)
    first, again = (next_step(values, asked, RULE) for values in (table, known))
    assert first.candidates.tolist() == again.candidates.tolist()
    assert first.failure == again.failure
    assert set(first.candidates.tolist()) <= set(range(5))


def test_the_first_step_asks_everybody_and_the_last_one_nobody() -> None:
    table = population(0, 0.5)
    first = next_step(table, np.zeros(24, int), RULE)
    assert first.candidates.tolist() == list(range(24))
    assert (first.num_queries, first.leader, first.is_decided) == (RULE.first, -1, False)
    last = next_step(table, np.full(24, 240), RULE)
    assert last.is_decided
    assert last.leader == int(table.mean(axis=1).round(12).argmax())
    assert last.failure == 0


def test_ties_go_to_the_lowest_and_one_ordering_needs_no_race() -> None:
    table = np.repeat(population(0, 0.5)[:1], 4, axis=0)
    assert replay(table, RULE).chosen == 0
    assert replay(table[:1], RULE).num_asked.tolist() == [RULE.first]


def test_missing_answers_neither_win_nor_lose() -> None:
    table = population(2, 0.5)
    holes = table.copy()
    holes[:, ::9] = np.nan
    holes[3, :] = np.nan  # nothing is known of it
    found = replay(holes, RULE)
    assert found.chosen != 3
    assert not math.isnan(found.failure)


def test_weights_count_as_often_as_they_say() -> None:
    table = population(3, 0.5, queries=80)
    doubled = np.repeat(table, 2, axis=1)
    weighted = next_step(table, np.full(24, 80), RULE, weights=np.full(80, 2))
    assert weighted.leader == next_step(doubled, np.full(24, 160), RULE).leader
    with pytest.raises(RequestError, match="certified race needs dev queries that count alike"):
        next_step(table, np.full(24, 8), RaceRule("certified"), weights=np.arange(1, 81))


def test_at_most_half_go_on_where_a_budget_halves() -> None:
    table = population(4, 0.0)
    found = replay(table, RaceRule(first=8), halved=True)
    sizes = [len(wave.candidates) for wave in found.waves]
    assert all(size <= -(-24 // 2**place) for place, size in enumerate(sizes))


def test_a_budget_that_leaves_orderings_out_does_not_make_the_choice_sure() -> None:
    """Those left out are in the chance that the choice is wrong, which is about as often as it is."""
    wrong, said = [], []
    for seed in range(40):
        table = population(seed, 0.4, queries=120)
        race = replay(table, RaceRule(first=6), halved=True)
        means = table.mean(axis=1)
        wrong.append(means.max() - means[race.chosen] > 0.01)
        said.append(race.failure)
    assert np.mean(wrong) > 0.2
    assert 0.7 * np.mean(wrong) < np.mean(said) < 1.6 * np.mean(wrong)


def test_of_one_ordering_there_is_a_gain_of_nothing() -> None:
    found = gain_on_test(np.ones((1, 1, 5)), np.zeros((1, 1, 5)), [0])
    assert found.gain.estimate == 0
    assert math.isnan(found.gain.low)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tolerance": -0.1}, "tolerance must be 0 or more, got -0.1"),
        ({"tolerance": math.nan}, "tolerance must be 0 or more, got nan"),
        ({"error": 0}, "error must lie between 0 and 1, got 0"),
        ({"first": 1}, "first must be at least 2"),
        ({"growth": 1.0}, "growth above 1, got 24 and 1.0"),
    ],
)
def test_bad_rules_are_refused(change: dict, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        RaceRule(**change)


@pytest.mark.parametrize(
    ("values", "asked", "weights", "said"),
    [
        (np.zeros((3, 4)), [1, 1], None, "values must be"),
        (np.zeros(3), [1, 1, 1], None, "values must be"),
        (np.zeros((2, 4)), [5, 1], None, r"num_asked must lie in 0\.\.4, got 1 to 5"),
        (np.zeros((2, 4)), [1, 1], [1, 1], "weights must be 4 numbers above 0"),
        (np.zeros((2, 4)), [1, 1], [1, 1, 0, 1], "weights must be 4 numbers above 0"),
    ],
)
def test_bad_tables_are_refused(values: np.ndarray, asked: list[int], weights: list | None, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        next_step(values, asked, RULE, weights=weights)


def test_classes_are_one_for_each_query() -> None:
    with pytest.raises(RequestError, match="classes must be 4, one for each query"):
        next_step(np.zeros((2, 4)), [1, 1], RULE, classes=[0, 1])


def test_a_step_that_is_decided_asks_nobody() -> None:
    assert RaceStep(np.empty(0, np.int64), 0, 1, 0.0, 1).is_decided
