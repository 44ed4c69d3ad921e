"""Statistics of answers of which some are missing, or whose queries weigh differently."""

import itertools
import textwrap
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.formula.api import mixedlm
from tolerances import TOLERANCES

from iclperm import stats
from iclperm.errors import DataError, RequestError
from iclperm.external import describe
from iclperm.external.tensor import of_array
from iclperm.reference import incomplete as oracle
from iclperm.reference import stats as complete
from iclperm.stats import incomplete
from iclperm.stats.additive import additive_fit
from iclperm.stats.incomplete import filled
from iclperm.stats.limits import ComputeLimits
from iclperm.stats.search import search
from iclperm.studies.missing import MANY, missing_of, overturned
from iclperm.studies.sensitivity_summary import sensitivity_summary

CLOSE = {"rtol": 0, "atol": TOLERANCES["incomplete answers"]["float64"]}


@st.composite
def studies(draw, most_missing=0.3):
    """correct [S, P, Q], present, weights [Q] and classes [Q], with every ordering and query answered several times."""
    shape = tuple(draw(st.integers(low, high)) for low, high in ((2, 4), (2, 4), (5, 8)))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    correct = (generator.random(shape) < generator.uniform(0.3, 0.9, shape[2])).astype(np.uint8)
    present = generator.random(shape) >= draw(st.floats(0, most_missing))
    present[:, :, :4] = True  # two queries of each class
    classes = np.arange(shape[2]) % 2
    weights = np.where(classes == 0, 1.0, draw(st.sampled_from((1.0, 2.0, 9.0))))
    return correct, present, weights, classes


class TestAccuracy:
    @given(studies())
    def test_agrees_with_the_oracle(self, study):
        correct, present, weights, _ = study
        found = stats.accuracy(correct, ~present, weights, limits=ComputeLimits(block_bytes=64))
        cells = correct.reshape(-1, correct.shape[-1]), present.reshape(-1, correct.shape[-1])
        np.testing.assert_allclose(found.values.ravel(), oracle.accuracy(*cells, weights), **CLOSE)

    @given(studies())
    def test_lies_between_all_wrong_and_all_right(self, study):
        correct, present, weights, _ = study
        values, bounds = (
            stats.accuracy(correct, ~present, weights).values,
            stats.accuracy_bounds(correct, ~present, weights),
        )
        for value, bound in ((0, bounds.lowest), (1, bounds.highest)):
            table = np.where(present, correct, value).astype(np.uint8)
            np.testing.assert_allclose(bound, stats.accuracy(table, None, weights).values, **CLOSE)
        assert (bounds.lowest <= values + 1e-12).all()
        assert (values <= bounds.highest + 1e-12).all()

    def test_the_recipe_of_the_docs_gives_the_same(self):
        """docs/statistics.md shows how to recompute an accuracy from an exported table in a few lines of pandas."""
        text = (Path(__file__).parents[1] / "docs/statistics.md").read_text(encoding="utf-8")
        recipe = text[text.index('    ok = one[one.state == "ok"]') : text.index("(with unequal weights, ``counts``")]
        *lines, last = textwrap.dedent(recipe).strip().splitlines()
        generator = np.random.default_rng(0)
        correct = (generator.random((3, 4, 20)) < 0.6).astype(np.uint8)
        state = generator.random(correct.shape) < 0.2
        places = np.indices(correct.shape).reshape(3, -1).T
        table = pd.DataFrame(places, columns=["set", "permutation", "query"])
        table = table.assign(correct=correct.ravel().astype(float), state=np.where(state.ravel(), "overlong", "ok"))
        names = {"one": table}
        exec("\n".join([*lines, f"found = {last}"]), names)
        found = names["found"].to_numpy().reshape(3, 4)
        np.testing.assert_allclose(found, stats.accuracy(correct, state).values, **CLOSE)

    @given(studies())
    def test_is_that_of_the_filled_table(self, study):
        correct, present, weights, _ = study
        table = filled(correct, ~present, weights)
        found = stats.accuracy(correct, ~present, weights)
        np.testing.assert_allclose(table.accuracy.values, found.values, **CLOSE)
        missing = stats.accuracy_bounds(correct, ~present, weights).missing
        assert table.share == pytest.approx(np.mean(missing), abs=1e-12)
        there = present[..., table.usable]
        assert (table.items[there] == correct[..., table.usable][there]).all()

    def test_an_ordering_that_met_the_easier_queries_gains_nothing(self):
        correct = np.zeros((1, 3, 20), np.uint8)
        correct[..., :10] = 1  # every ordering answers the first half alone
        state = np.zeros(correct.shape, np.uint8)
        state[0, 2, 10:] = 1
        found = stats.accuracy(correct, state)
        np.testing.assert_allclose(found.values, [[0.5, 0.5, 0.5]])
        bounds = stats.accuracy_bounds(correct, state)
        np.testing.assert_allclose(bounds.missing, [[0, 0, 0.5]])
        np.testing.assert_allclose(bounds.lowest, [[0.5, 0.5, 0.5]])
        np.testing.assert_allclose(bounds.highest, [[0.5, 0.5, 1.0]])

    @pytest.mark.parametrize("share", [0.3, 0.6])
    def test_a_lead_that_hard_queries_alone_show_is_kept_where_they_are_missing(self, share):
        """Half of the queries everyone has right; on the others order decides, and of those answers are missing."""
        generator = np.random.default_rng(9)
        lead = np.linspace(-0.4, 0.4, 12)[None, :, None]
        hard = (generator.random((6, 12, 400)) < 0.5 + lead).astype(np.uint8)
        correct = np.concatenate([np.ones((6, 12, 400), np.uint8), hard], axis=2)
        state = np.concatenate([np.zeros(hard.shape, bool), generator.random(hard.shape) < share], axis=2)
        whole, found = stats.accuracy(correct).values.mean(axis=0), stats.accuracy(correct, state).values.mean(axis=0)
        np.testing.assert_allclose(found, whole, atol=0.02)
        slope = np.polyfit(whole, found, 1)[0]
        assert slope == pytest.approx(1, abs=0.04)
        effects = [stats.variance_components(correct, given).order_effect for given in (None, state)]
        assert effects[1] == pytest.approx(effects[0], rel=0.05)

    def test_a_set_that_lacks_half_of_the_queries_keeps_its_accuracy(self):
        correct = np.stack([np.full((2, 100), 0.3), np.full((2, 100), 0.7)])
        state = np.zeros(correct.shape, np.uint8)
        state[0, :, 50:] = 1
        np.testing.assert_allclose(stats.accuracy(correct, state).values, [[0.3] * 2, [0.7] * 2], **CLOSE)
        graded = 0.5 + 0.1 * np.random.default_rng(2).standard_normal((6, 1, 1)).repeat(4, 1).repeat(60, 2)
        state = np.zeros(graded.shape, np.uint8)
        state[:3, :, 40:], state[3:, :, :20] = 1, 1
        found = stats.variance_components(graded, state).sigma2.S
        assert found == pytest.approx(stats.variance_components(graded).sigma2.S, rel=0.35)

    def test_an_honest_oracle_owes_nothing_to_what_was_filled_in(self):
        """No order has an effect: what is best on one half is average on the other, however many answers are
        missing."""
        generator = np.random.default_rng(4)
        leads = []
        for _ in range(30):
            correct = (generator.random((4, 16, 60)) < 0.7).astype(np.uint8)
            state = (generator.random(correct.shape) < 0.4).astype(np.uint8)
            found = search(np.zeros((4, 16)), correct, state, halves=20)
            leads.append(found.honest.estimate - found.average.estimate)
        assert abs(np.mean(leads)) < 0.02

    def test_queries_without_any_answer_are_left_out(self):
        correct, state = np.ones((2, 2, 4), np.uint8), np.zeros((2, 2, 4), np.uint8)
        state[..., 3] = 1
        found = stats.accuracy(correct, state, [1, 1, 1, 2])
        assert found.num_queries == 3
        assert found.dropped == pytest.approx(0.4)
        assert (found.values == 1).all()

    def test_a_cell_without_answers_is_nan(self):
        state = np.zeros((2, 2, 3), np.uint8)
        state[1, 0] = 1
        assert np.isnan(stats.accuracy(np.ones((2, 2, 3), np.uint8), state).values).tolist() == [
            [False] * 2,
            [True, False],
        ]
        with pytest.raises(RequestError, match=r"the cell \[1, 0\] has no answer at all"):
            filled(np.ones((2, 2, 3), np.uint8), state)

    def test_partial_credit_counts_in_part(self):
        graded = np.array([[[0.25, 1.0], [0.5, np.nan]]])
        state = np.isnan(graded)
        assert stats.accuracy(graded, state).values[0, 0] == pytest.approx(0.625)
        with pytest.raises(RequestError, match=r"correct\[0, 1, 1\] is NaN and its state is ok; mark it in state"):
            stats.accuracy(graded, np.zeros(graded.shape, np.uint8))
        with pytest.raises(RequestError, match=r"numbers from 0 to 1, found 1\.5"):
            stats.accuracy(np.array([1.5, 0.0]))


class TestComponents:
    def test_a_query_that_nobody_answered_has_no_part_in_the_weight_of_its_class(self):
        generator = np.random.default_rng(0)
        correct, present = generator.integers(0, 2, (3, 4, 9)).astype(np.uint8), np.ones((3, 4, 9), bool)
        present[:, :, 8], present[0, 1, 5] = False, False
        weights, classes = np.ones(9), np.arange(9) % 2
        found = stats.variance_components(correct, ~present, weights=weights, classes=classes).sigma2
        without = stats.variance_components(
            correct[..., :8], ~present[..., :8], weights=weights[:8], classes=classes[:8]
        ).sigma2
        np.testing.assert_allclose(found, without, **CLOSE)
        expected = oracle.weighted_components(correct.astype(float), present, weights, classes)
        np.testing.assert_allclose((found.S, found.P, found.SP), expected, **CLOSE)

    @settings(max_examples=30)
    @given(studies())
    def test_agree_with_the_oracle(self, study):
        correct, present, weights, classes = study
        found = stats.variance_components(correct, ~present, weights=weights, classes=classes)
        expected = oracle.weighted_components(correct.astype(float), present, weights, classes)
        np.testing.assert_allclose((found.sigma2.S, found.sigma2.P, found.sigma2.SP), expected, **CLOSE)
        assert len(found.strata) == len(np.unique(classes))

    @settings(max_examples=15)
    @given(studies())
    def test_each_class_agrees_with_the_oracle(self, study):
        correct, present, _, classes = study
        weights = np.where(classes == 0, 1.0, 3.0)
        found = stats.variance_components(correct, ~present, weights=weights, classes=classes)
        for name, stratum in enumerate(found.strata):
            members = classes == name
            part = correct[:, :, members].astype(float), present[:, :, members], weights[members]
            sigma2 = dict(zip(("S", "P", "I", "SP", "SI", "PI", "SPI"), stratum.sigma2, strict=True))
            for effect, value in oracle.components(*part).items():
                assert sigma2[effect] == pytest.approx(value, rel=1e-9, abs=1e-11)

    @given(studies(most_missing=0))
    def test_of_complete_answers_are_those_of_mean_squares(self, study):
        correct, present, _, _ = study
        every = np.ones(correct.shape[2])
        sigma2, _, _, _ = incomplete.solved(correct, present, every, np.zeros(len(every), int), ComputeLimits())
        _, expected = complete.variance_components(correct)
        np.testing.assert_allclose(sigma2, list(expected.values()), **CLOSE)

    def test_blocks_change_nothing(self):
        generator = np.random.default_rng(3)
        correct = (generator.random((3, 4, 50)) < 0.6).astype(np.uint8)
        state = (generator.random(correct.shape) < 0.1).astype(np.uint8)
        small, whole = (
            stats.variance_components(correct, state, limits=ComputeLimits(block_bytes=size)) for size in (1, 1 << 24)
        )
        np.testing.assert_allclose(small.sigma2, whole.sigma2, **CLOSE)

    def test_one_missing_answer_in_two_hundred_changes_little(self):
        """10 x 128 x 500 independent answers: no order effect; from the one query that every cell answered it was said
        to be 47 points."""
        generator = np.random.default_rng(0)
        correct = (generator.random((10, 128, 500)) < 0.7).astype(np.uint8)
        state = (generator.random(correct.shape) < 0.005).astype(np.uint8)
        found = stats.variance_components(correct, state)
        whole = stats.variance_components(correct)
        assert found.num_queries == 500
        for ours, theirs in zip(found.sigma2, whole.sigma2, strict=True):
            assert ours == pytest.approx(theirs, abs=2e-4)
        effects = stats.effect_interval(found)
        assert effects.order.low == 0
        assert effects.order.high < 0.01

    def test_order_that_acts_on_the_minority_is_seen_as_the_weights_see_it(self):
        """450 queries of one class, 50 of another that counts nine times each: order moves the second alone, by a
        standard deviation of .115, so the weighted accuracy by half of that. Without classes the weights tell them."""
        generator = np.random.default_rng(1)
        classes = np.repeat([0, 1], [450, 50])
        found, unweighted = [], []
        for _ in range(40):
            order = 0.115 * generator.standard_normal((1, 10, 1)) * (classes == 1)
            correct = (generator.random((10, 10, 500)) < 0.6 + order).astype(np.uint8)
            weights = np.where(classes == 1, 9, 1)
            components = stats.variance_components(correct, weights=weights, classes=classes)
            assert components.sigma2 == stats.variance_components(correct, weights=weights).sigma2
            found.append(components.sigma2.P + components.sigma2.SP)
            unweighted.append(stats.variance_components(correct).order_effect)
        assert np.sqrt(np.mean(found)) == pytest.approx(0.0575, abs=0.007)
        assert np.mean(unweighted) == pytest.approx(0.0115, abs=0.004)

    def test_queries_of_weight_zero_do_not_count(self):
        generator = np.random.default_rng(2)
        correct = (generator.random((3, 3, 30)) < 0.6).astype(np.uint8)
        weights = np.r_[np.ones(20), np.zeros(10)]
        kept = stats.variance_components(correct[..., :20])
        assert stats.variance_components(correct, weights=weights).sigma2 == pytest.approx(kept.sigma2)

    @pytest.mark.parametrize(("share", "error"), [(0.0, 0.002), (0.03, 0.12)])
    def test_agree_with_reml(self, share, error):
        """statsmodels' restricted maximum likelihood, all seven components: the same where nothing is missing and no
        component is at 0, near where a few answers are."""
        generator = np.random.default_rng(11)
        scores = 1.0 * generator.standard_normal((5, 1, 1)) + 0.8 * generator.standard_normal((1, 5, 1))
        scores = scores + 0.7 * generator.standard_normal(14) + 0.5 * generator.standard_normal((5, 5, 14))
        scores += 0.6 * generator.standard_normal((5, 5, 1)) + 0.4 * generator.standard_normal((5, 1, 14))
        scores += 0.4 * generator.standard_normal((1, 5, 14))
        state = generator.random(scores.shape) < share
        rows = [(*place, scores[place]) for place in itertools.product(*map(range, scores.shape)) if not state[place]]
        table = pd.DataFrame(rows, columns=["s", "p", "q", "y"]).assign(one=1)
        names = {"S": "C(s)", "P": "C(p)", "I": "C(q)", "SP": "C(s):C(p)", "SI": "C(s):C(q)", "PI": "C(p):C(q)"}
        formula = {name: f"0 + {name}" for name in names.values()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit = mixedlm("y ~ 1", table, groups="one", vc_formula=formula).fit(reml=True)
        reml = dict(zip(fit.model.exog_vc.names, fit.vcomp, strict=True))
        found = stats.variance_components(scores, state).sigma2
        for effect, name in names.items():
            assert getattr(found, effect) == pytest.approx(reml[name], rel=error, abs=0.005)
        assert abs(found.SPI / fit.scale - 1) < error

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda state: state[0, 1].fill(1), "set 0 under permutation 1 has no answer to"),
            (lambda state: state[..., 1:].fill(1), "at least 2 sets, permutations and usable queries"),
        ],
    )
    def test_what_cannot_be_told_is_refused(self, change, message):
        state = np.zeros((3, 3, 5), np.uint8)
        change(state)
        with pytest.raises(RequestError, match=message):
            stats.variance_components(np.ones((3, 3, 5), np.uint8), state)

    def test_a_class_of_one_query_is_refused_and_said(self):
        correct = (np.random.default_rng(0).random((3, 3, 9)) < 0.5).astype(np.uint8)
        weights, classes = np.r_[np.ones(8), 8], np.r_[np.zeros(8, int), 1]
        with pytest.raises(RequestError, match="one query cannot tell its own noise"):
            stats.variance_components(correct, weights=weights, classes=classes)
        summary = sensitivity_summary(correct, weights=weights, classes=classes)
        assert summary.components is None
        assert any("effects are not freed of item noise" in warning for warning in summary.warnings)


class TestSummary:
    def test_says_what_missing_answers_could_overturn(self):
        generator = np.random.default_rng(5)
        chance = 0.6 + 0.1 * generator.standard_normal((8, 1, 1)) + 0.01 * generator.standard_normal((1, 8, 1))
        correct = (generator.random((8, 8, 200)) < chance).astype(np.uint8)
        state = np.zeros(correct.shape, np.uint8)
        assert overturned(sensitivity_summary(correct, state=state)) == []
        few = state.copy()
        few[generator.random(state.shape) < 0.001] = 1
        assert overturned(sensitivity_summary(correct, state=few)) == []
        state[:, :4] = generator.random(state[:, :4].shape) < 0.4  # half of the orderings lack many
        (line,) = overturned(sensitivity_summary(correct, state=state))
        assert line.startswith("The missing answers (20.1 %) could overturn this: if every missing answer were wrong")

    def test_every_ordering_that_lacks_answers_shows_what_they_could_make_of_it(self):
        generator = np.random.default_rng(6)
        correct = (generator.random((3, 4, 50)) < 0.6).astype(float)
        whole = describe(of_array(correct, "SPQ", "a.npy"))
        assert not any("missing answers" in table.title for table in whole.tables(full=True))
        assert whole.to_dict()["sensitivity"]["bounds"] is None
        correct[1, 2] = [*[np.nan] * 5, *[1.0] * 36, *[0.0] * 9]
        correct[0, 3, 7] = np.nan
        correct[2, 0] = [1.0] * 40 + [0.0] * 10
        found = describe(of_array(correct, "SPQ", "a.npy"))
        (table,) = [table for table in found.tables(full=True) if table.title == "Orderings with missing answers"]
        assert [row[:2] for row in table.rows] == [("1", "2"), ("0", "3")]
        right = np.nansum(correct, axis=2)
        assert table.rows[0][3:] == ("10.0%", f"{right[1, 2] / 50:.4f}", f"{(right[1, 2] + 5) / 50:.4f}")
        assert table.rows[1][3:] == ("2.0%", f"{right[0, 3] / 50:.4f}", f"{(right[0, 3] + 1) / 50:.4f}")
        at_best = right / 50 + np.isnan(correct).sum(axis=2) / 50
        assert "2 of 12 orderings could be the best" in table.caption
        bounds = found.to_dict()["sensitivity"]["bounds"]
        np.testing.assert_allclose(bounds["lowest"], right / 50)
        np.testing.assert_allclose(bounds["highest"], at_best)
        assert all(len(row) == 6 for row in table.rows)

    def test_the_worst_ordering_says_what_it_lacks_and_only_20_are_listed(self):
        correct = (np.random.default_rng(7).random((1, 30, 40)) < 0.7).astype(float)
        correct[0, :, 0] = np.nan
        correct[0, ::2, 0] = 1
        correct[0, 5] = 0
        correct[0, 5, 1:4] = np.nan
        found = describe(of_array(correct, "SPQ", "a.npy"))  # one set: no Extreme, bounds all the same
        accuracy, *_ = found.tables(full=True)
        (worst,) = [row for row in accuracy.rows if row[0] == "worst ordering"]
        assert worst[2] == "set 0, permutation 5; 0.0000 to 0.0750 with what it lacks wrong, or right"
        (best,) = [row for row in accuracy.rows if row[0] == "best ordering"]
        (table,) = [table for table in found.tables(full=True) if table.title == "Orderings with missing answers"]
        assert len(table.rows) == min(20, int(np.isnan(correct[0]).any(axis=1).sum())) == 15
        assert "lacks" not in best[2] or int(best[2].split()[3].strip(";")) % 2

    def test_contexts_show_it_too(self):
        answers = (np.random.default_rng(8).random((3, 40)) < 0.7).astype(float)
        answers[1, :4] = np.nan
        found = describe(of_array(answers, "CQ", "a.npy"))
        table = found.tables(full=True)[0]
        (row,) = [row for row in table.rows if row[0] == "context 1"]
        right = np.nansum(answers[1])
        assert row[3:] == ("10.0%", f"{right / 40:.4f}", f"{(right + 4) / 40:.4f}")
        assert found.to_dict()["contexts"][1]["bounds"] == pytest.approx([right / 40, (right + 4) / 40])

    def test_an_ordering_without_answers_is_named(self):
        state = np.zeros((3, 3, 5), np.uint8)
        state[2, 1] = 1
        with pytest.raises(DataError, match="set 2 under permutation 1 has no answer to any query"):
            sensitivity_summary(np.ones((3, 3, 5), np.uint8), state=state)
        with pytest.raises(DataError, match="no answer to speak of: all 45 are invalid; see the states"):
            sensitivity_summary(np.ones((3, 3, 5), np.uint8), state=np.ones((3, 3, 5), np.uint8))


class TestMissing:
    @pytest.mark.parametrize("share", [0.01, 0.2])
    def test_a_description_begins_with_what_is_missing_where_that_is_much(self, share):
        generator = np.random.default_rng(8)
        correct = (generator.random((4, 4, 60)) < 0.6).astype(float)
        correct[generator.random(correct.shape) < share] = np.nan
        lines = describe(of_array(correct, "SPQ", "answers.npy")).conclusion()
        assert lines[share > MANY].startswith("answers.npy: 4 sets x 4 permutations x 60 queries.")
        assert ("of the answers are missing" in lines[0]) == (share > MANY)

    def test_counts_by_weight_and_state(self):
        state = np.array([[0, 0, 1, 1], [0, 2, 1, 0]])
        found = missing_of(state, [1, 1, 2, 4])
        assert found.answers == pytest.approx((2 + 4 + 1 + 2) / 16)
        assert found.left_out == pytest.approx(2 / 8)
        assert found.incomplete == pytest.approx(7 / 8)
        assert sum(found.by_state.values()) == pytest.approx(found.answers)
        assert found.first_line().startswith("56.2 % of the answers are missing")

    def test_little_is_no_first_line(self):
        state = np.zeros((10, 100), np.uint8)
        state[0, :20] = 1
        assert missing_of(state).answers == MANY
        assert missing_of(state).first_line() is None
        assert missing_of(None).first_line() is None


def test_an_additive_fit_in_pieces_is_that_in_one_and_holds_less() -> None:
    rng = np.random.default_rng(5)
    cells, ok = rng.random((2_000, 1_000)), rng.random((2_000, 1_000)) < 0.98
    weight = rng.integers(1, 4, 1_000).astype(float)
    peaks, fits = [], []
    for block_bytes in (1 << 26, 1 << 17):
        tracemalloc.start()
        try:
            fits.append(additive_fit(lambda: [(cells, ok)], weight, ComputeLimits(block_bytes=block_bytes)))
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    for one, other in zip(*fits, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-13, atol=1e-15)
    assert peaks[1] < cells.nbytes / 4 < cells.nbytes < peaks[0]


def _peak(work):
    """What it gives, and the most bytes that it held."""
    tracemalloc.start()
    try:
        return work(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_floats_are_summed_in_blocks_and_no_copy_of_them_is_held() -> None:
    scores = np.random.default_rng(0).normal(3, 1, (8, 50, 4000)).astype(np.float32)
    whole = stats.variance_components(scores)
    found, held = _peak(lambda: stats.variance_components(scores, limits=ComputeLimits(block_bytes=1 << 18)))
    assert held < scores.nbytes / 2  # in float64 they would take twice as much as they do
    np.testing.assert_allclose(found.mean_squares, whole.mean_squares, rtol=1e-11)


def test_a_large_table_is_filled_in_four_bytes_an_answer(monkeypatch) -> None:
    generator = np.random.default_rng(0)
    correct = generator.integers(0, 2, (10, 40, 3000), np.uint8)
    state = (generator.random(correct.shape) < 0.01).astype(np.uint8)
    whole = filled(correct, state)
    monkeypatch.setattr(incomplete, "LIMITS", ComputeLimits(block_bytes=1 << 17))
    found, held = _peak(lambda: filled(correct, state))
    assert held < 9 * correct.size  # the table in float64 and the mask alone would take as much
    assert (whole.items.dtype, found.items.dtype) == (np.float64, np.float32)
    np.testing.assert_allclose(found.items, whole.items, rtol=0, atol=1e-6)
    assert found.share == pytest.approx(state.mean(), rel=1e-12)
