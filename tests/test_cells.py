"""Orderings with queries of their own (`cells: blocks`, `random`): what is dealt, run, told, and refused."""

import csv
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import iclperm
from iclperm import Study, stats
from iclperm.errors import ConfigError, DataError, IclpermError, RequestError, RunError, RunInterrupted
from iclperm.prompts.design import deal_queries
from iclperm.runs.limits import WorkLimits
from iclperm.runs.plan import plan_one
from iclperm.stats.block_curves import block_curve
from iclperm.studies.sensitivity_blocks import block_summary
from iclperm.study.states import NOT_ASKED, OK

SIZES = {"sets": 3, "permutations": 6, "queries": 48, "seed": 3}
BLOCKS = {"cells": "blocks", "queries_per_ordering": 10, **SIZES}
LIMITS = WorkLimits(general_cells=40)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A study over several k by blocks, in a folder, and the same with crossed cells."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        shots = {"shots": [0, 2, 4]}
        path = tmp_path_factory.mktemp("cells") / "run"
        return iclperm.run(Study(**BLOCKS, **shots), path, limits=LIMITS), iclperm.run(Study(**SIZES, **shots))


@given(
    seed=st.integers(0, 2**63 - 1),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 6)),
    sizes=st.lists(st.integers(3, 7), min_size=1, max_size=3),
    is_even=st.booleans(),
    data=st.data(),
)
@settings(max_examples=50, deadline=None)
def test_each_ordering_has_as_many_of_each_class(seed, shape, sizes, is_even, data):
    count = data.draw(st.integers(1, min(sizes) * len(sizes)))
    ends = np.cumsum([0, *sizes])
    classes = [np.arange(begin, end) for begin, end in pairwise(ends)]
    dealt = deal_queries(seed, count, shape, classes, is_even=is_even)
    assert dealt.shape == (*shape, count)
    assert (np.diff(dealt, axis=-1) > 0).all()
    by_class = np.stack([np.isin(dealt, members).sum(axis=-1) for members in classes], axis=-1)
    assert np.ptp(by_class, axis=-1).max() <= 1
    if is_even:
        asked = np.bincount(dealt.ravel(), minlength=ends[-1])
        assert all(np.ptp(asked[members]) <= 1 for members in classes)
        assert np.ptp(by_class.sum(axis=(0, 1))) <= 1
    else:
        fewer = deal_queries(seed, count, (shape[0], 1), classes, is_even=False)
        np.testing.assert_array_equal(fewer, dealt[:, :1])


def test_dealt_queries_are_pinned():
    """The same seed must mean the same study in every version: these values may never change."""
    classes = [np.arange(0, 4), np.arange(4, 8)]
    assert deal_queries(0, 3, (2, 2), classes, is_even=True).tolist() == [
        [[0, 1, 7], [3, 4, 5]],
        [[2, 4, 7], [1, 2, 6]],
    ]
    assert deal_queries(0, 3, (2, 1), classes, is_even=False).tolist() == [[[2, 4, 7]], [[0, 1, 5]]]


def test_no_two_orderings_of_a_set_share_more_queries_than_others():
    """Dealt set by set, those of a set would share none, and their noise could not be told."""
    classes, within, across = [np.arange(40)], 0, 0
    for seed in range(60):
        dealt = deal_queries(seed, 4, (5, 10), classes, is_even=True)
        has = (dealt[..., None] == np.arange(40)).any(axis=2).astype(int)
        shared = np.einsum("spq,trq->sptr", has, has)
        of_set = sum(shared[s, :, s].sum() - 40 for s in range(5))
        within, across = within + of_set / 450, across + (shared.sum() - of_set - 200) / 2000
    assert within == pytest.approx(across, rel=0.1)


def test_only_its_cells_are_answered_and_as_if_all_were(runs):
    run, whole = runs
    there = run.splits["test"].state == OK
    assert set(np.unique(run.splits["test"].state)) == {OK, NOT_ASKED}
    assert (there[:, :, -1].sum(axis=-1) == 10).all()
    assert there[:, :, 0].all()  # without demonstrations all orderings are one context, asked every block
    for name in ("correct", "label_logprob"):
        ours, theirs = (getattr(each.splits["test"], name)[there] for each in runs)
        np.testing.assert_array_equal(ours, theirs)
    assert run.report.tokens_forwarded == run.report.tokens_unique < 0.5 * whole.report.tokens_unique


def test_the_plan_tells_its_tokens_and_those_of_all_cells(runs):
    run, whole = runs
    study = Study(**BLOCKS, shots=[0, 2, 4])
    assert plan_one(study, LIMITS).tokens_unique == run.report.tokens_unique
    plan = iclperm.plan(study)
    assert plan.tokens_unique < run.report.tokens_unique  # in files of 40 answers some contexts are begun again
    assert plan.crossed_tokens == whole.report.tokens_unique
    contexts = len(np.unique(run.splits["test"].context_of))
    assert plan.num_prompts < contexts * 48
    assert plan.estimate is not None


def test_a_folder_continues_opens_and_is_verified(runs, tmp_path):
    run, _ = runs
    study, calls = Study(**BLOCKS, shots=[0, 2, 4]), iter(range(100))

    def progress(done, total):
        if next(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(RunInterrupted):
        iclperm.run(study, tmp_path / "run", progress=progress, limits=LIMITS)
    with pytest.raises(IclpermError, match=r"not finished"):
        iclperm.open_run(tmp_path / "run")
    assert iclperm.run(study, tmp_path / "run", limits=LIMITS).digest == run.digest
    assert iclperm.open_run(tmp_path / "run").digest == run.digest
    verified = iclperm.verify(tmp_path / "run")
    assert (verified.damage, verified.digest) == ([], run.digest)
    status = iclperm.status(tmp_path / "run")
    assert (status.is_finished, status.num_waves) == (True, 0)
    assert iclperm.run(study, tmp_path / "run").report.num_parts_resumed == status.num_parts
    with pytest.raises(RunError, match="dealt for its size, so it cannot grow; give another folder"):
        iclperm.run(study.model_copy(update={"sets": 4}), tmp_path / "run", extend=True)
    other = study.model_copy(update={"queries_per_ordering": 12})
    with pytest.raises(RunError, match="queries_per_ordering is 10 there and 12 here"):
        iclperm.run(other, tmp_path / "run")


def test_an_export_names_what_was_not_asked(runs, tmp_path):
    run, _ = runs
    with run.export(tmp_path / "answers.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["shots"] == "4"]
    states = [row["state"] for row in rows]
    assert states.count("ok") == 3 * 6 * 10
    assert states.count("not_asked") == len(rows) - states.count("ok")
    assert {row["correct"] for row in rows if row["state"] == "not_asked"} == {""}


def test_a_calibrated_study_asks_every_context_its_content_free_queries():
    run = iclperm.run(Study(**BLOCKS, shots=4, calibration="contextual"))
    state = run.splits["test"].state[:, :, -1]
    assert ((state == OK).sum(axis=-1) == 10).all()
    assert (run.content_free.context_state == OK).all()


def test_the_report_is_of_block_effects(runs):
    run, _ = runs
    found, summary, test = run.findings(), run.summary(), run.splits["test"]
    effects = stats.block_effects(test.correct[:, :, -1], test.state[:, :, -1], classes=test.gold, seed=3)
    assert summary.blocks == effects
    assert summary.effects == effects.generalised
    assert summary.accuracy.mean() == pytest.approx(summary.mean)
    assert summary.missing_total == 0 == run.missing.answers
    told = "\n".join(" ".join(row) for table in found.tables(full=True) for row in table.rows)
    assert "10 of its own for each ordering (blocks)" in told
    assert "best ordering" not in told
    assert "10 queries of its own" in found.warnings[0]
    curve = run.curve()
    assert curve.mean[0] == pytest.approx(np.average(test.correct[0, 0, 0], weights=test.weights))
    assert curve.std_permutations[0] == 0
    assert {"cells", "blocks"} <= run.report_content()["sensitivity"].keys()


def test_what_needs_every_answer_refuses_in_a_line(runs):
    run, _ = runs
    for kind in ("convergence", "features", "calibration"):
        with pytest.raises(DataError, match=rf"kind '{kind}' compares answers to the same; run the study with cells"):
            run.findings(kind)
    with pytest.raises(ConfigError, match="too few to tell which is the best; name one"):
        run.prompt(best=True)
    assert run.prompt(index_set=1, permutation=2).num_queries == 10
    with pytest.raises(DataError, match="single answers cannot be compared; run it with all cells"):
        iclperm.compare([run, run])


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"queries_per_ordering": 5}, "'queries_per_ordering' is 5, but its cells are crossed"),
        ({"cells": "blocks"}, "'cells' is 'blocks'; say how many queries each ordering is asked"),
        ({**BLOCKS, "queries_per_ordering": 48}, "'queries_per_ordering' is 48, and 'queries' 48; ask for fewer"),
        ({**BLOCKS, "sets": 1}, "'sets' is 1, which cannot tell its effect from that of queries; give 2"),
        ({**BLOCKS, "design": "latin"}, "'design' is 'latin', whose estimates .* set it to random, or 'cells' to cr"),
        ({**BLOCKS, "dev_queries": 9}, "'dev_queries' is 9, whose estimates .* set it to 0"),
        ({**BLOCKS, "kind": "search"}, "'cells' is for the kind sensitivity, not search"),
    ],
)
def test_choices_that_do_not_go_together(choices, message):
    with pytest.raises(ConfigError, match=message):
        Study(**choices)


def test_blocks_that_no_class_has_queries_for():
    with pytest.raises(DataError, match=r"is 7, fewer than 2 of each class, .* give 8 at least"):
        iclperm.plan(Study(**{**BLOCKS, "queries_per_ordering": 7}, shots=4))
    natural = Study(**{**BLOCKS, "queries_per_ordering": 7}, shots=4, balance="natural")
    assert iclperm.plan(natural).tokens_unique > 0


def drawn(seed, shape, num_queries, size):
    """Answers [S, P, K, Q], and states of blocks that each ordering has for all K."""
    generator = np.random.default_rng(seed)
    items = (generator.random((*shape, num_queries)) < 0.7).astype(np.uint8)
    blocks = deal_queries(seed, size, shape[:2], [np.arange(num_queries)], is_even=True)
    asked = (blocks[..., None] == np.arange(num_queries)).any(axis=2)
    state = np.where(asked[:, :, None], 0, NOT_ASKED).astype(np.uint8)
    return items, np.broadcast_to(state, items.shape).copy()


def test_a_curve_of_whole_blocks_is_the_averaged_curve():
    items, state = drawn(1, (3, 4, 3), 30, 10)
    items[:, :, 0] = items[0, 0, 0]
    found = block_curve(items, np.zeros_like(state), shots=(0, 2, 5))
    np.testing.assert_allclose(found.curve.mean, stats.curve(items).mean)
    np.testing.assert_allclose(found.accuracy, items.mean(axis=3))
    assert found.intervals[0] == stats.mean_error(items[:1, :1, 0]).interval()
    change = items[:, :, -1].astype(float) - items[:, :, 1]
    assert found.to_last[1].error.mean == pytest.approx(change.mean())
    with pytest.raises(RequestError, match=r"one shape \[S, P, 2, Q\], got \[3, 4, 3, 30\]"):
        block_curve(items, state, shots=(0, 5))


def test_a_curve_counts_the_block_of_a_trajectory_at_every_k():
    items, state = drawn(2, (3, 4, 3), 40, 10)
    state[:, :, 0] = 0  # one context, asked by all
    shared = state.copy()
    shared[0, :2, 1] = np.minimum(state[0, 0, 1], state[0, 1, 1])  # two orderings with one context
    found, same = (block_curve(items, each, shots=(0, 2, 5)) for each in (state, shared))
    block = state[:, :, -1] == 0
    own = (items[:, :, 1] * block).sum(axis=2) / 10
    np.testing.assert_allclose(found.accuracy[:, :, 1], own)
    np.testing.assert_array_equal(found.accuracy, same.accuracy)
    change = ((items[:, :, 2].astype(int) - items[:, :, 0]) * block).sum(axis=2) / 10
    assert found.to_last[0].error.mean == pytest.approx(change.mean())


@given(
    curve=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6)), min_size=2, max_size=7), tolerance=st.integers(0, 3)
)
@settings(max_examples=60, deadline=None)
def test_bends_are_the_fewest_between_which_lines_are_near(curve, tolerance):
    shots, mean = np.cumsum([step for step, _ in curve]), np.array([value for _, value in curve]) / 50
    found = stats.bends(shots, mean, tolerance / 50 + 1e-9)

    def is_near(chosen):
        return np.abs(np.interp(shots, shots[chosen], mean[chosen]) - mean).max() <= tolerance / 50 + 1e-9

    inner = range(1, len(shots) - 1)
    near = [each for size in range(len(shots)) for each in combinations(inner, size) if is_near([0, *each, -1])]
    assert len(found) == len(near[0]) + 2
    assert is_near(np.searchsorted(shots, found))
    with pytest.raises(RequestError, match="ascending shots"):
        stats.bends(shots[::-1], mean)


def test_a_curve_study_of_blocks_tells_the_average_alone(runs):
    run, _ = runs
    found = run.findings("curve")
    assert [len(found.intervals), len(found.to_last)] == [3, 2]
    assert "18 trajectories of 10 queries each" in found.conclusion()[0]
    assert "take cells: crossed" in found.warnings[0]
    assert list(found.plots()) == ["curve"]
    assert len(found.tables(full=True)[0].rows) == 3
    assert found.to_dict()["bends"] == [0, 2, 4]


def test_the_mean_is_as_sure_as_its_queries():
    items, state = drawn(4, (3, 4, 1), 40, 10)
    items, state = items[:, :, 0], state[:, :, 0]
    whole = stats.own_block_components(items, np.zeros_like(state))
    assert whole.se_queries == pytest.approx(stats.clustered_se(items))
    summary = block_summary(items, state, cells="blocks")
    assert summary.mean_se == stats.own_block_components(items, state).se_queries
    with pytest.raises(DataError, match="set 1 under permutation 2 has no answer"):
        block_summary(items, np.where(np.arange(12).reshape(3, 4)[..., None] == 6, 4, state), cells="blocks")
