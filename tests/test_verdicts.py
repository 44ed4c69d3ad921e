"""Verdicts of single trajectories: their error rates, looked at once or until decided; and runs that ask until then."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as distributions

import iclperm
from iclperm import Study
from iclperm.cli import main as cli
from iclperm.errors import ConfigError, DataError, RequestError, RunError, RunInterrupted
from iclperm.reference import curves as curve_oracle
from iclperm.reference import deciding as oracle
from iclperm.runs import deciding
from iclperm.runs.limits import WorkLimits
from iclperm.stats import verdicts as module
from iclperm.study.precision import parse_precision
from iclperm.study.states import NOT_ASKED, OK

SIZES = {"kind": "curve", "sets": 3, "permutations": 3, "shots": [1, 4, 6], "queries": 640, "seed": 1}
WANTED = {"precision": "plateaus from 1 and 4 +- 0.03"}
LIMITS = WorkLimits(unit_tokens=(4000, 4000), general_cells=40)
seeds = st.integers(0, 2**32 - 1)


def trajectories(generator, shape, change, moved):
    """Answers [S, P, Q] before and after, of which a share ``moved`` changes, by ``change`` on average."""
    chance = generator.random(shape)
    gained, lost = (moved + change) / 2, (moved - change) / 2
    before = np.where(chance < gained, 0.0, np.where(chance < gained + lost, 1.0, generator.random(shape) < 0.7))
    return before, np.where(chance < gained, 1.0, np.where(chance < gained + lost, 0.0, before))


class TestOneLook:
    @pytest.mark.parametrize(("lost", "num"), [(0.0, 256), (0.005, 256), (0.02, 256), (0.1, 256), (0.0, 1024)])
    @pytest.mark.parametrize("level", [0.05, 0.0005])
    def test_a_change_of_just_the_margin_is_seldom_called_flat_however_few_queries_change(self, lost, num, level):
        """Exactly, over all tables that n queries can give; the worst are those where nothing is lost."""
        margin = 0.02
        gains, losses = (axis.ravel() for axis in np.indices((num // 4, num // 4)))
        kept = num - gains - losses
        chance = distributions.multinomial.pmf(
            np.stack([gains, losses, kept], axis=-1), num, [lost + margin, lost, 1 - 2 * lost - margin]
        )
        once, square = (gains - losses).astype(float), (gains + losses).astype(float)
        paired = module.paired_from_sums(once, once, square, float(num), float(num), num)
        equivalent, _ = module.paired_tests(paired, margin)
        assert chance.sum() == pytest.approx(1, abs=1e-6)
        assert chance[equivalent <= level].sum() <= 1.06 * level

    @pytest.mark.parametrize(("moved", "num"), [(0.5, 40), (0.9, 60), (0.3, 256), (0.02, 256)])
    @pytest.mark.parametrize("level", [0.05, 0.0005])
    def test_no_change_is_seldom_called_one_however_many_queries_move(self, moved, num, level):
        """Exactly, over all tables, of gains and losses that are as likely."""
        gains, losses = (axis.ravel() for axis in np.indices((num + 1, num + 1)))
        kept = num - gains - losses
        gains, losses, kept = gains[kept >= 0], losses[kept >= 0], kept[kept >= 0]
        chance = distributions.multinomial.pmf(
            np.stack([gains, losses, kept], axis=-1), num, [moved / 2, moved / 2, 1 - moved]
        )
        once, square = (gains - losses).astype(float), (gains + losses).astype(float)
        paired = module.paired_from_sums(once, once, square, float(num), float(num), num)
        _, different = module.paired_tests(paired, 0.02)
        assert chance[different <= level].sum() <= 1.25 * level

    def test_grades_that_seldom_rise_are_not_taken_for_a_fall(self):
        """A tenth of the queries loses .3, 3 in 100 gain 1: no change on average, and often no gain among the first."""
        generator, wrong = np.random.default_rng(3), 0
        for _ in range(300):
            chance = generator.random((1, 100, 256))
            change = np.where(chance < 0.1, -0.3, np.where(chance > 0.97, 1.0, 0.0))
            wrong += (module.sequential_verdicts(np.zeros_like(change), change, (256,)).state == 2).any()
        assert wrong / 300 <= 0.1

    @given(seeds, st.booleans(), st.booleans())
    @settings(deadline=None, max_examples=40)
    def test_weighted_and_graded_answers_are_tested_as_written_out(self, seed, is_graded, is_weighted):
        generator = np.random.default_rng(seed)
        first, second = (generator.integers(0, 2, 30).astype(float) for _ in range(2))
        if is_graded:
            first, second = generator.random(30), generator.random(30)
        weights = generator.integers(1, 4, 30) if is_weighted else np.ones(30, np.int64)
        found = module.paired_tests(module.paired_difference(first, second, weights), 0.1)
        expected = curve_oracle.equivalence(first.tolist(), second.tolist(), weights.tolist(), 0.1)
        assert [float(p) for p in found] == pytest.approx(expected, abs=1e-8)


class TestUntilDecided:
    @given(seeds, st.integers(1, 3), st.integers(1, 3), st.sampled_from([0.0, 0.1]))
    @settings(deadline=None, max_examples=30)
    def test_it_decides_as_one_look_one_trajectory_and_one_query_at_a_time(self, seed, num_s, num_p, missing):
        generator = np.random.default_rng(seed)
        change = generator.choice([0.0, 0.02, 0.3], (num_s, num_p, 1))
        first, last = trajectories(generator, (num_s, num_p, 160), change, 0.05 + change)
        first[generator.random(first.shape) < missing] = np.nan
        looks, margin, level = (40, 60, 100, 160), 0.08, 0.05
        found = module.sequential_verdicts(first, last, looks, margin=margin, level=level)
        written = [
            [[None if math.isnan(x) else x for x in row] for row in values.reshape(-1, 160).tolist()]
            for values in (first, last)
        ]
        states, numbers, flat, changes = zip(*oracle.decided(*written, looks, margin, level), strict=True)
        assert [module.STATES[code] for code in found.state.ravel()] == list(states)
        assert found.num_queries.ravel().tolist() == list(numbers)
        np.testing.assert_allclose(found.p_equivalent.ravel(), flat, atol=1e-8)
        np.testing.assert_allclose(found.p_different.ravel(), changes, atol=1e-8)

    @given(seeds)
    @settings(deadline=None, max_examples=30)
    def test_what_comes_after_a_verdict_is_not_looked_at_and_no_verdict_is_taken_back(self, seed):
        generator = np.random.default_rng(seed)
        change = 0.1 * generator.standard_normal((3, 4, 1))
        first, last = trajectories(generator, (3, 4, 300), np.clip(change, -0.3, 0.3), 0.35)
        looks = module.looks_until(300, 60)
        whole = module.sequential_verdicts(first, last, looks, margin=0.1)
        before = np.zeros((3, 4), np.uint8)
        for number in range(1, len(looks) + 1):
            end = looks[number - 1]
            part = module.sequential_verdicts(first[..., :end], last[..., :end], looks, num_looks=number, margin=0.1)
            assert (part.state[before > 0] > 0).all()
            assert (part.num_queries[before > 0] < end).all()
            before = part.state
        np.testing.assert_array_equal(before, whole.state)
        is_asked = np.arange(300) < whole.num_queries[..., None]
        unasked = [np.where(is_asked, values, np.nan) for values in (first, last)]
        again = module.sequential_verdicts(*unasked, looks, margin=0.1)
        for name in whole._fields:
            np.testing.assert_array_equal(getattr(again, name), getattr(whole, name))

    @pytest.mark.parametrize(("change", "moved", "wrong"), [(0.05, 0.05, 1), (0.05, 0.2, 1), (0.0, 0.1, 2)])
    def test_looking_again_and_again_keeps_the_error_over_all_trajectories(self, change, moved, wrong):
        """No trajectory is flat, at its worst case, or none changes: any such verdict in a study is an error."""
        generator, looks, studies = np.random.default_rng(7), module.looks_until(600, 100), 400
        errors = sum(
            (module.sequential_verdicts(
                *trajectories(generator, (2, 5, 600), change, moved), looks, margin=0.05
            ).state == wrong).any()
            for _ in range(studies)
        )  # fmt: skip
        assert errors / studies <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / studies)

    def test_what_is_clear_takes_few_queries_and_what_is_close_all(self):
        generator = np.random.default_rng(0)
        change = np.array([0.0, 0.3, 0.05])[:, None]
        first, last = trajectories(generator, (1, 3, 4000), change, np.array([0.02, 0.35, 0.2])[:, None])
        found = module.sequential_verdicts(first, last, module.looks_until(4000), margin=0.05)
        assert found.state.tolist() == [[1, 2, 2]]
        assert found.num_queries[0, :2].max() < 900 < found.num_queries[0, 2]

    def test_looks_go_from_the_first_to_the_last_evenly(self):
        assert module.looks_until(200) == (200,)
        assert module.looks_until(256) == (256,)
        assert module.looks_until(300) == (256, 300)
        looks = module.looks_until(7600)
        assert (looks[0], looks[-1]) == (256, 7600)
        ratios = np.divide(looks[1:], looks[:-1])
        assert ratios.min() > 1.4
        assert ratios.max() < 1.6

    @pytest.mark.parametrize("looks", [(), (2, 2), (3, 1), (0, 2), (2, 9)])
    def test_looks_that_are_none_are_refused(self, looks):
        with pytest.raises(RequestError, match="looks must ascend"):
            module.sequential_verdicts(np.zeros((1, 1, 4)), np.zeros((1, 1, 4)), looks)

    def test_a_trajectory_without_an_answer_stays_undecided(self):
        found = module.sequential_verdicts(np.full((1, 1, 9), np.nan), np.zeros((1, 1, 9)), (4, 9))
        assert (found.state, found.num_queries) == (0, 0)
        assert np.isnan(found.difference).all()


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A run that was not interrupted, and the one that asks everything."""
    path = tmp_path_factory.mktemp("verdicts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        run = iclperm.run(Study(**SIZES, **WANTED), path / "run", limits=LIMITS)
        return path, run, iclperm.run(Study(**SIZES))


def command(*arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main([*map(str, arguments)])
    return ended.value.code


class TestARun:
    def test_it_asks_only_what_is_undecided_and_answers_as_the_run_that_asks_everything(self, found):
        _, run, whole = found
        asked = run.state != NOT_ASKED
        assert (run.state[asked] == OK).all()
        np.testing.assert_array_equal(run.correct[asked], whole.correct[asked])
        about = run.findings().asked
        assert about.looks == module.looks_until(640) == (256, 405, 640)
        assert asked[..., :256].all()
        assert about.num_asked < about.num_cells
        verdicts = [
            module.sequential_verdicts(whole.correct[:, :, place], whole.correct[:, :, 2], about.looks, margin=0.03)
            for place in (0, 1)
        ]
        for place, expected in enumerate(verdicts):
            for name in expected._fields:
                np.testing.assert_array_equal(getattr(about.verdicts[place], name), getattr(expected, name))
            np.testing.assert_array_equal(asked[:, :, place].sum(-1), expected.num_queries)
        np.testing.assert_array_equal(asked[:, :, 2].sum(-1), np.maximum(*(each.num_queries for each in verdicts)))
        assert len({int(n) for each in verdicts for n in each.num_queries.ravel()}) > 1  # some stop before others
        assert run.report.tokens_forwarded < 0.9 * whole.report.tokens_forwarded

    def test_it_reports_the_curve_of_the_first_queries_and_the_verdicts_of_all(self, found):
        path, run, _ = found
        curve = iclperm.run(Study(**{**SIZES, "queries": 256})).findings()
        about = run.findings()
        np.testing.assert_array_equal(about.curve.mean, curve.curve.mean)
        np.testing.assert_array_equal(about.error.low, curve.error.low)
        assert [pair.overall.error.mean for pair in about.plateaus] == [
            pair.overall.error.mean for pair in iclperm.studies.curve.curve_findings(
                run.correct[..., :256], shots=run.shots, claims=(1, 4), margin=0.03
            ).plateaus
        ]  # fmt: skip
        for pair, verdicts in zip(about.plateaus, about.asked.verdicts, strict=True):
            np.testing.assert_array_equal(pair.state, verdicts.state)
            assert pair.margin == 0.03
        assert about.asked.undecided[-1] == tuple(int((pair.state == 0).sum()) for pair in about.plateaus)
        content = json.loads(json.dumps(iclperm.open_run(path / "run").report_content()))
        assert content["asked"]["num_asked"] == about.asked.num_asked
        assert "asked until it was decided, or all 640 queries" in " ".join(content["conclusion"])
        assert set(about.plots()) >= {"curve", "curve_plateaus", "curve_verdicts"}
        assert command("report", path / "run") == 0
        assert "Queries that verdicts took" in (path / "run/report.html").read_text(encoding="utf-8")

    @pytest.mark.parametrize("stop", [1, 4])
    def test_interrupted_anywhere_it_makes_the_same_decisions(self, found, stop, tmp_path):
        _, run, _ = found
        calls = iter(range(1000))

        def progress(done, total):
            if next(calls) == stop:
                raise KeyboardInterrupt

        study = Study(**SIZES, **WANTED)
        with pytest.raises(RunInterrupted):
            iclperm.run(study, tmp_path / "run", progress=progress, limits=LIMITS)
        again = iclperm.run(study, tmp_path / "run", limits=LIMITS)
        assert again.decisions == run.decisions
        assert again.digest == run.digest
        assert iclperm.verify(tmp_path / "run").damage == []

    def test_a_run_goes_on_under_the_rule_that_began_it(self, tmp_path, monkeypatch):
        study = Study(**SIZES, **WANTED)

        def progress(done, total):
            raise KeyboardInterrupt

        with pytest.raises(RunInterrupted):
            iclperm.run(study, tmp_path / "run", progress=progress, limits=LIMITS)
        monkeypatch.setattr(deciding, "RULE_VERSION", 2)
        with pytest.raises(RunError, match="began under version 1 of the rule by which trajectories are asked"):
            iclperm.run(study, tmp_path / "run", limits=LIMITS)

    def test_memory_decides_the_same_and_a_finished_run_is_opened(self, found):
        path, run, _ = found
        memory = iclperm.run(Study(**SIZES, **WANTED))
        assert memory.digest == run.digest
        assert [decision["asks"] for decision in memory.decisions] == [decision["asks"] for decision in run.decisions]
        assert iclperm.open_run(path / "run").digest == run.digest
        assert iclperm.status(path / "run").num_waves == len(run.decisions) - 1
        again = iclperm.run(Study(**SIZES, **WANTED), path / "run", limits=LIMITS)
        assert again.report.num_parts_resumed == again.report.num_parts

    def test_verdicts_of_these_orderings_are_told_where_nothing_can_be_said_of_other_sets(self):
        run = iclperm.run(Study(**{**SIZES, "sets": 2, "queries": 300}))
        plain = run.findings().conclusion()
        asked = iclperm.run(Study(**{**SIZES, **WANTED, "sets": 2, "queries": 300})).findings().conclusion()
        assert asked[: len(plain)] == plain
        assert len(plain) < 3
        told = " ".join(asked[len(plain) :])
        assert "From k = 4 to 6" in told
        assert "of 6 single trajectories" in told
        assert "300 queries" in told

    def test_it_ends_where_all_are_decided(self):
        small = {**SIZES, "queries": 600, "shots": [0, 6], "precision": "plateaus +- 0.05"}
        run = iclperm.run(Study(**small))
        assert run.findings().asked.undecided == ((0,),)
        assert (run.state[..., 256:] == NOT_ASKED).all()

    def test_what_needs_every_answer_is_refused(self, found):
        path, run, _ = found
        with pytest.raises(DataError, match="run the study without precision"):
            run.findings("sensitivity")
        with pytest.raises(ConfigError, match="no best is known"):
            run.prompt(best=True)
        with pytest.raises(DataError, match="asked its orderings different queries"):
            iclperm.compare([run, run])
        with pytest.raises(RunError, match="precision is"):
            iclperm.run(Study(**SIZES, precision="plateaus +- 0.05"), path / "run")
        with pytest.raises(RunError, match=r"most.queries is 640 there and 700 here\. A run that stops by"):
            iclperm.run(Study(**{**SIZES, "queries": 700}, **WANTED), path / "run", extend=True)


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"kind": "sensitivity", "shots": 4}, "set 'kind' to curve"),
        ({"resample": "per_k"}, "where no ordering has a trajectory"),
        ({"dev_queries": 9}, "which no verdict needs"),
        ({"calibration": "contextual"}, "which asks every context"),
        ({"cells": "blocks", "queries_per_ordering": 64}, "leave 'precision' out"),
        ({"queries": 1200}, "ask for 1,000 at most"),
        ({"shots": [6]}, "the study has k = 6 alone"),
        ({"shots": [4, 6]}, "has no k = 1 below its largest, 6"),
        ({"precision": "plateaus +- 0.7"}, "is not between 0 and 0.5"),
        ({"precision": "plateaus of 4 +- 0.02"}, "is no quantity"),
        ({"precision": "plateaus from +- 0.02"}, "is no quantity"),
        ({"queries": 1}, "'queries' is 1, which decides nothing"),
    ],
)
def test_what_cannot_be_decided_is_refused(choices, said):
    with pytest.raises(ConfigError, match=said):
        iclperm.run(Study(**{**SIZES, **WANTED, **choices}))


@pytest.mark.parametrize(
    ("given", "shots"),
    [
        ("plateaus +- 0.02", ()),
        ("plateau from 4 ± .02", (4,)),
        ("plateaus from 8,4 +- .02", (4, 8)),
        ("plateaus from k = 8 and 4 +/- 0.02", (4, 8)),
        ("Plateaus from 1, 2, 8 +- 0.02", (1, 2, 8)),
    ],
)
def test_plateaus_in_words(given, shots):
    found = parse_precision(given)
    assert (found.quantity, found.half_width, found.shots) == ("plateaus", 0.02, shots)


def test_a_plan_says_that_each_is_asked_until_it_is_decided(capsys):
    sizes = ("--kind", "curve", "--sets", 2, "--permutations", 3, "--shots", "1,6", "--queries", 640)
    assert command("plan", *sizes, "--precision", "plateaus +- 0.05") == 0
    assert "then each trajectory until it is shown to be flat or to change" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ConfigError, match="no sizes are computed for"):
        iclperm.plan_sizes(Study(**SIZES), "plateaus +- 0.05", components="SPI=.4")
