"""The generator of answers with known effects, and the pipeline held against it."""

import math

import numpy as np
import pytest

from iclperm import stats
from iclperm.errors import RequestError
from iclperm.reference.synthetic import KnownEffects, answers, expected_ratio

REPEATS = 150


@pytest.mark.parametrize(
    "effects", [KnownEffects(0.04, 0.02, 0.015), KnownEffects(0.0, 0.0, 0.0), KnownEffects(0.015, 0.045, 0.0)]
)
def test_known_components_are_found_without_bias(effects):
    generator = np.random.default_rng(3)
    found = []
    for _ in range(REPEATS):
        sigma2 = stats.variance_components(answers(effects, (8, 9, 80), generator)).sigma2
        found.append((sigma2.S, sigma2.P, sigma2.SP))
    error = np.std(found, axis=0, ddof=1) / math.sqrt(REPEATS)
    true = np.square((effects.sets, effects.permutations, effects.interaction))
    assert (np.abs(np.mean(found, axis=0) - true) < 4 * error).all()
    assert (error > 0).all()


def test_the_printed_r_is_pulled_towards_1_as_far_as_the_formula_says():
    effects, generator = KnownEffects(0.045, 0.015, 0.012), np.random.default_rng(4)
    for num_queries in (40, 400):
        variances = []
        for _ in range(REPEATS):
            matrix = answers(effects, (10, 10, num_queries), generator).mean(axis=2)
            variances.append((matrix.var(axis=0, ddof=1).mean(), matrix.var(axis=1, ddof=1).mean()))
        selection, order = np.mean(variances, axis=0)
        assert math.sqrt(selection / order) == pytest.approx(expected_ratio(effects, num_queries), rel=0.06)
    assert 1 < expected_ratio(effects, 40) < 0.8 * expected_ratio(effects, 400) < effects.ratio


def test_probabilities_are_what_was_asked_for():
    correct = answers(KnownEffects(0.0, 0.0, 0.0), (20, 20, 500), np.random.default_rng(5))
    assert correct.dtype == np.uint8
    assert correct.mean() == pytest.approx(0.6, abs=0.02)
    with pytest.raises(RequestError, match=r"could make a probability leave 0\.\.1"):
        answers(KnownEffects(0.1, 0.1, 0.1), (2, 2, 2), np.random.default_rng(0))
