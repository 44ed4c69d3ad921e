"""A run that grows until something is known: what it asks, whoever is interrupted; what it says; and its plan."""

import json
from dataclasses import replace

import numpy as np
import pytest

import iclperm
from iclperm import Study
from iclperm.cli import main as cli
from iclperm.errors import ConfigError, DataError, IclpermError, RequestError, RunError, RunInterrupted
from iclperm.runs.limits import WorkLimits
from iclperm.stats.components import Effects
from iclperm.studies.planning import parse_components
from iclperm.study.states import OK

SIZES = {"sets": 10, "permutations": 24, "shots": 4, "queries": 120, "seed": 3}
OTHER = {"model": "elsewhere"}
WANTED = {"precision": "order_effect +- 0.0055"}
LIMITS = WorkLimits(unit_tokens=(4000, 4000), general_cells=40)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A run that grew twice and was not interrupted."""
    path = tmp_path_factory.mktemp("growing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        return path, iclperm.run(Study(**SIZES, **WANTED), path / "run", limits=LIMITS)


def command(*arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main([*map(str, arguments)])
    return ended.value.code


def test_it_stops_by_itself_and_is_the_run_of_the_sizes_where_it_did(found, tmp_path):
    _, run = found
    about = run.asides["precision"]
    assert about.is_reached
    assert len(about.waves) >= 2
    assert about.waves[-1].half_width <= 0.0055 < about.waves[-2].half_width
    sizes = {name: getattr(run.study, name) for name in ("sets", "permutations", "queries")}
    assert tuple(sizes.values()) == tuple(about.waves[-1][:3])
    assert about.tokens == run.report.tokens_unique < about.tokens_of_most
    assert (run.state == OK).all()
    fixed = iclperm.run(Study(**{**SIZES, **sizes}), tmp_path / "fixed")
    assert fixed.digest == run.digest
    assert fixed.report.tokens_unique == run.report.tokens_unique
    assert fixed.summary().effects == run.summary().effects
    assert run.report.tokens_forwarded <= 1.2 * fixed.report.tokens_forwarded


def test_it_is_opened_checked_and_reported_as_any_run(found):
    path, run = found
    again = iclperm.open_run(path / "run")
    assert again.digest == run.digest
    assert again.looks == run.looks
    assert iclperm.verify(path / "run").damage == []
    status = iclperm.status(path / "run")
    assert status.is_finished
    assert status.num_waves == len(run.looks) - 1
    assert run.prompt(index_set=0, permutation=0).text
    content = json.loads(json.dumps(again.report_content()))["precision"]
    assert content["is_reached"] is True
    assert "Asked for order effect" in content["conclusion"][0]
    assert command("report", path / "run") == 0
    assert iclperm.run(Study(**SIZES, **WANTED), path / "run", limits=LIMITS).report.num_parts_resumed > 0


@pytest.mark.parametrize("stop", [2])
def test_interrupted_anywhere_it_makes_the_same_decisions(found, stop, tmp_path):
    _, run = found
    calls = iter(range(1000))

    def progress(done, total):
        if next(calls) == stop:
            raise KeyboardInterrupt

    study = Study(**SIZES, **WANTED)
    with pytest.raises(RunInterrupted):
        iclperm.run(study, tmp_path / "run", progress=progress, limits=LIMITS)
    with pytest.raises(IclpermError, match=r"not finished|only begun"):
        iclperm.open_run(tmp_path / "run")
    again = iclperm.run(study, tmp_path / "run", limits=LIMITS)
    assert again.looks == run.looks
    assert again.digest == run.digest
    assert iclperm.verify(tmp_path / "run").damage == []


def test_a_lost_decision_is_made_again_and_memory_decides_the_same(found, tmp_path):
    path, run = found
    in_memory = iclperm.run(Study(**SIZES, **WANTED), limits=LIMITS)
    assert in_memory.digest == run.digest
    assert [each["extent"] for each in in_memory.looks] == [each["extent"] for each in run.looks]
    last = sorted((path / "run").glob("plan-*.json"))[-1]
    last.unlink()
    with pytest.raises(RunError, match="the next not yet asked"):
        iclperm.open_run(path / "run")
    assert iclperm.run(Study(**SIZES, **WANTED), path / "run", limits=LIMITS).looks == run.looks


def test_other_sizes_at_most_are_another_run(found):
    path, _ = found
    with pytest.raises(RunError, match=r"most.sets is 10 there and 12 here"):
        iclperm.run(Study(**{**SIZES, "sets": 12}, **WANTED), path / "run", extend=True)


def test_it_ends_at_the_most_there_may_be_and_says_so():
    small = {**SIZES, "sets": 3, "permutations": 4, "queries": 24}
    run = iclperm.run(Study(**small, precision="r +- 0.001"))
    about = run.asides["precision"]
    assert not about.is_reached
    assert run.correct.shape == (3, 4, 1, 24)
    assert "not reached with 3 sets x 4 permutations x 24 queries" in about.conclusion()[0]
    assert any("fixed beforehand" in line for line in run.asides["precision"].warnings)


@pytest.mark.parametrize("precision", ["accuracy at 2 +- 0.1", "difference of 0 and 4 +- 0.1"])
def test_a_mean_at_some_k_and_a_difference_of_two(precision):
    small = {**SIZES, "permutations": 6, "shots": [0, 2, 4], "kind": "curve", "sets": 4, "queries": 60}
    run = iclperm.run(Study(**small, precision=precision))
    about = run.asides["precision"]
    expected = run.correct[:, :, 1].mean() if "at 2" in precision else np.diff(run.correct.mean((0, 1, 3))[[0, 2]])[0]
    assert about.waves[-1].interval.estimate == pytest.approx(float(expected))
    assert run.findings().conclusion()


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"precision": "entropy +- 0.1"}, "is no quantity"),
        ({"precision": "rank of shapley +- 1"}, "no run can stop by itself"),
        ({"precision": "r +- 0.1", "design": "latin"}, "set it to random"),
        ({"precision": "r +- 0.1", "sets": 1}, "2 sets"),
        ({"precision": "accuracy at 8 +- 0.1", "shots": [2, 4]}, "'shots' lack 8"),
        ({"precision": "accuracy at 8 +- 0.1"}, "has no k = 8"),
        ({"precision": "r +- 0.1", "shots": 0}, "set 'sets' to 1"),
        ({"precision": "r +- 0.1", "kind": "search", "dev_queries": 9}, "is for the kind sensitivity"),
    ],
)
def test_what_cannot_be_is_refused(choices, said):
    with pytest.raises(ConfigError, match=said):
        iclperm.run(Study(**{**SIZES, **choices}))


def test_a_plan_sizes_a_study_from_a_pilot_and_from_components(found, capsys):
    path, run = found
    code = command("plan", "--pilot", path / "run", "--precision", "accuracy ± 0.04")
    shown = capsys.readouterr().out
    assert code == 0
    assert "Sizes for accuracy" in shown
    planned = iclperm.plan_sizes(Study(**SIZES), "accuracy +- 0.04", pilot=run)
    assert [one.tokens for one in planned.sizes] == sorted(one.tokens for one in planned.sizes)
    first = planned.sizes[0]
    sized = Study(**{**SIZES, "sets": first.sets, "permutations": first.permutations, "queries": first.queries})
    assert iclperm.plan(sized).tokens_unique == first.tokens
    assert command("plan", "--precision", "accuracy ± 0.04", "--sets", "3", "--queries", "20") == 0
    assert "these sizes are the most that a run asks" in " ".join(capsys.readouterr().out.split())
    given = iclperm.plan_sizes(Study(**SIZES), "order_effect +- 0.03", components="order=.05,selection=.03,accuracy=.7")
    assert given.sizes[-1].half_width <= 0.03


def test_a_plan_is_of_numbers_of_demonstrations_that_the_study_has():
    with pytest.raises(ConfigError, match="the study has no k = 7; add it to 'shots'"):
        iclperm.plan_sizes(Study(**SIZES), "accuracy at 7 +- 0.05", components="order=.05,accuracy=.7")


def test_a_rank_takes_permutations_of_a_curve():
    curve = iclperm.run(Study(kind="curve", sets=3, permutations=12, shots=4, queries=24))
    planned = iclperm.plan_sizes(curve.study, "rank of shapley +- 2", pilot=curve)
    (one,) = planned.sizes
    assert (one.sets, one.queries, one.chance) == (3, 24, None)
    assert one.half_width <= 2


@pytest.mark.parametrize(
    ("precision", "others", "error", "said"),
    [
        (None, {"components": "SPI=.4"}, ConfigError, "no precision to be sized"),
        ("r +- 0.1", {}, ConfigError, "a pilot or components"),
        ("order +- 0.1", {"components": "SPI=.4"}, ConfigError, "is no quantity"),
        ("r +- 0.1", {"components": "SPI=.4"}, RequestError, "shows no variance"),
        ("r +- 0.1", {"components": "luck=.4"}, ConfigError, "give order=.05"),
        ("r +- 0.1", {"components": "order=.4"}, ConfigError, "give accuracy=.7"),
        ("order_effect +- 1e-5", {"components": "order=.1,accuracy=.5"}, ConfigError, "is not reached by"),
        ("rank of shapley +- 1", {"components": "SPI=.4"}, ConfigError, "give --pilot RUN of the kind curve"),
        ("accuracy at 2 +- 0.1", {"pilot": "here"}, DataError, "but not k = 2"),
        ("rank of shapley +- 1", {"pilot": "here"}, RequestError, "Shapley values of 4 .* got .4."),
    ],
)
def test_what_cannot_be_sized_is_refused(found, precision, others, error, said):
    path, _ = found
    given = {key: path / "run" if value == "here" else value for key, value in others.items()}
    with pytest.raises(error, match=said):
        iclperm.plan_sizes(Study(**SIZES), precision, **given)


def test_a_pilot_of_another_kind_is_refused(found):
    _, run = found
    with pytest.raises(DataError, match="give a pilot of the same task and model"):
        iclperm.plan_sizes(Study(**SIZES), "r +- 0.1", pilot=replace(run, study=run.study.model_copy(update=OTHER)))


def test_components_in_words():
    found = parse_components("order=.05,selection=.03,accuracy=.7")
    assert pytest.approx(0.0025) == found.P + found.SP
    assert pytest.approx(0.0009) == found.S + found.SP
    assert sum(found) == pytest.approx(0.21)
    assert parse_components("S=.1,SPI=.3") == Effects(0.1**2, 0, 0, 0, 0, 0, 0.3**2)
