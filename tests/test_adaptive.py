"""An adaptive search: what it asks follows from answers, whoever is interrupted; what it says, what is refused."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from scoring_server import scoring_server
from test_endpoint_studies import behind, weights  # noqa: F401 - a fixture
from tiny import byte_level_tokenizer, greedy_tokenizer, make_model, make_rows, make_task, write_rows

import iclperm
from iclperm import Study
from iclperm.base.sealed import canonical, sealed
from iclperm.cli import main as cli
from iclperm.errors import ConfigError, DamagedItem, DataError, IclpermError, RunError, RunInterrupted
from iclperm.progress import words
from iclperm.runs.audit import _other_grounds
from iclperm.runs.folder import RunFolder
from iclperm.runs.limits import WorkLimits
from iclperm.runs.waves import Ask, Decision, _told_once, refuse_other_rule
from iclperm.stats.racing import RULE_VERSION
from iclperm.studies.bearing import Bearing, Reason
from iclperm.study.sizes import parse_search_budget
from iclperm.study.states import NOT_ASKED, OK

SIZES = {"kind": "search", "sets": 3, "permutations": 12, "shots": 4, "queries": 24, "dev_queries": 96, "seed": 3}
LIMITS = WorkLimits(unit_tokens=(300, 300), general_cells=40)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A run that was not interrupted, and the same search asking everything."""
    path = tmp_path_factory.mktemp("adaptive")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        run = iclperm.run(Study(budget="adaptive", **SIZES), path / "run", limits=LIMITS)
        return path, run, iclperm.run(Study(**SIZES), path / "whole")


def command(*arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main([*map(str, arguments)])
    return ended.value.code


def asked(run, split):
    return run.splits[split].state[:, :, -1] != NOT_ASKED


def test_it_asks_a_part_and_what_it_asks_has_the_answers_of_asking_everything(found):
    _, run, whole = found
    for split in ("dev", "test"):
        there = asked(run, split)
        assert 0 < there.mean() < 1
        for name in ("correct", "label_logprob"):
            values, expected = (getattr(each.splits[split], name)[:, :, -1] for each in (run, whole))
            np.testing.assert_array_equal(values[there], expected[there])
    assert run.report.tokens_unique == whole.report.tokens_unique
    assert run.report.tokens_forwarded < whole.report.tokens_forwarded


def test_what_a_race_promises_and_cost_is_told_whatever_the_test_bears(found):
    told = found[1].findings()
    whole = told.conclusion()
    assert told.bearing.can_conclude
    for about in ("sets", "queries"):
        unsure = replace(told, bearing=Bearing((Reason(about, "too few", "more"),))).conclusion()
        assert unsure[:2] == ["Nothing can be concluded from these answers: too few.", "What would suffice: more."]
        assert unsure[2:-1] == (whole[1:-1] if about == "sets" else whole[1:-2])
        assert unsure[-1] == whole[-1]
        assert "tokens" in unsure[-1]
    one = replace(told, sets=told.sets[:1], best_set=0).conclusion()
    assert one[1].startswith("The chosen ordering is within 1 point of the best of its set")


def test_every_race_keeps_what_it_promises_here(found):
    _, run, whole = found
    on_dev = whole.splits["dev"].correct[:, :, -1].mean(axis=2)
    for index, one in enumerate(run.findings().sets):
        assert on_dev[index].max() - on_dev[index, one.permutation] <= 0.01 + 1e-9
        assert one.failure <= 0.05
        assert one.num_dev == asked(run, "dev")[index, one.permutation].sum()


def test_orderings_of_a_set_are_asked_the_same_first_queries(found):
    _, run, _ = found
    there = asked(run, "dev")
    counts = there.sum(axis=2)
    assert (there == (np.arange(96) < counts[..., None])).all()
    on_test = asked(run, "test")
    chosen = [one.permutation for one in run.findings().sets]
    assert on_test[range(3), chosen].all()
    assert (np.delete(on_test[0], chosen[0], axis=0).sum(axis=0) >= 3).all()  # for the accuracy of a random one


@pytest.mark.parametrize("stop", [0, 1, 2, 4, 7, 11])
def test_interrupted_anywhere_it_makes_the_same_decisions(found, stop, tmp_path):
    _, run, _ = found
    calls = iter(range(1000))

    def progress(done, total):
        if next(calls) == stop:
            raise KeyboardInterrupt

    study = Study(budget="adaptive", **SIZES)
    with pytest.raises(RunInterrupted):
        iclperm.run(study, tmp_path / "run", progress=progress, limits=LIMITS)
    with pytest.raises(IclpermError, match=r"not finished|only begun"):
        iclperm.open_run(tmp_path / "run")
    assert not iclperm.status(tmp_path / "run").is_finished
    again = iclperm.run(study, tmp_path / "run", limits=LIMITS)
    assert again.decisions == run.decisions
    assert again.digest == run.digest
    assert sorted(p.name for p in (tmp_path / "run" / "items").iterdir()) == sorted(
        p.name for p in (run.folder / "items").iterdir()
    )
    assert iclperm.verify(tmp_path / "run").damage == []


def test_workers_and_memory_make_the_same_decisions(found, tmp_path):
    _, run, _ = found
    study = Study(budget="adaptive", **SIZES)
    by_workers = iclperm.run(study, tmp_path / "workers", workers=2, limits=LIMITS)
    assert by_workers.decisions == run.decisions
    assert by_workers.digest == run.digest
    in_memory = iclperm.run(study, limits=LIMITS)
    without = [{**each, "known": {**each["known"], "basis": None}} for each in run.decisions]
    assert [{**each, "known": {"basis": None, **each["known"]}} for each in in_memory.decisions] == [
        {**each, "known": {"basis": None, **each["known"]}} for each in without
    ]
    assert in_memory.digest == run.digest


def test_a_finished_one_is_opened_by_its_folder_alone(found):
    path, run, _ = found
    opened = iclperm.open_run(path / "run")
    assert opened.digest == run.digest == iclperm.verify(path / "run").digest
    assert opened.decisions == run.decisions
    assert opened.findings().to_dict() == run.findings().to_dict()
    before = {file: file.read_bytes() for file in (path / "run" / "items").iterdir()}
    assert iclperm.run(Study(budget="adaptive", **SIZES), path / "run", limits=LIMITS).digest == run.digest
    assert before == {file: file.read_bytes() for file in (path / "run" / "items").iterdir()}
    status = iclperm.status(path / "run")
    assert (status.is_finished, status.num_waves) == (True, sum(bool(each["asks"]) for each in run.decisions))


def test_what_it_says(found, capfd):
    path, run, _ = found
    findings = run.findings()
    text = " ".join(findings.conclusion())
    share = f"{100 * run.report.tokens_forwarded / run.report.tokens_unique:.1f} %"
    assert "within 1 point of the best of its set on all 96 dev queries" in text
    assert share in text
    content = json.loads(json.dumps(findings.to_dict()))
    assert content["tokens_exhaustive"] == run.report.tokens_unique
    assert sum(wave["dev"] for wave in content["waves"]) == asked(run, "dev").sum()
    assert command("report", path / "run", "--out", path / "report") == 0
    assert (path / "report" / "race.png").stat().st_size > 5_000
    assert "What each wave asked" in capfd.readouterr().out
    prompt = run.prompt()
    best = findings.sets[findings.best_set]
    assert (prompt.set, prompt.permutation) == (findings.best_set, best.permutation)
    assert prompt.num_queries == 24
    assert command("status", path / "run") == 0
    assert "waves" in capfd.readouterr().out


def test_other_reports_and_growth_are_refused(found, tmp_path):
    path, run, _ = found
    with pytest.raises(DataError, match="a report of the kind 'sensitivity' needs every answer"):
        run.findings("sensitivity")
    with pytest.raises(ConfigError, match="each ordering other queries"):
        run.prompt(best=True)
    with pytest.raises(ConfigError, match=r"criterion is 'local_entropy', .* decided by 'dev_accuracy'"):
        iclperm.open_run(path / "run", criterion="local_entropy")
    with pytest.raises(ConfigError, match=r"normalize is 'mean', .* decided by 'sum'"):
        iclperm.open_run(path / "run", normalize="mean")
    assert iclperm.open_run(path / "run", normalize="sum").digest == run.digest
    with pytest.raises(RunError, match="normalize"):  # no wave may be decided by another statistic than those before
        iclperm.run(Study(budget="adaptive", normalize="mean", **SIZES), path / "run", limits=LIMITS)
    with pytest.raises(RunError, match="cannot grow"):
        iclperm.run(Study(budget="adaptive", **{**SIZES, "sets": 4}), path / "run", extend=True, limits=LIMITS)
    with pytest.raises(RunError, match="budget"):
        iclperm.run(Study(**SIZES), path / "run")


def test_a_table_has_what_was_not_asked_as_such(found, tmp_path):
    _, run, _ = found
    table = run.to_arrow()
    states = np.array(table["state"].to_pylist())
    num_asked = sum(int(asked(run, split).sum()) for split in ("dev", "test"))
    assert (states == "ok").sum() == num_asked
    assert set(states) == {"ok", "not_asked"}
    assert table["correct"].null_count == len(table) - num_asked
    assert run.missing.answers == 0


def test_a_race_that_is_decided_stays_as_sure_as_it_was(found):
    """Whatever its winner is asked later, in the race between the sets."""
    first, then = Decision((), {"sets": [{"decided": True, "failure": 0.3}, {"decided": False, "failure": 0.9}]}), []
    then = [{"decided": True, "failure": 0.0}, {"decided": True, "failure": 0.1}]
    assert _told_once([first], then) == [first.known["sets"][0], then[1]]
    assert _told_once([Decision((), {})], then) == then
    decided = {}
    for each in found[1].decisions[1:]:
        for index, one in enumerate(each["known"]["sets"]):
            assert decided.setdefault(index, one) == one if one["decided"] else index not in decided


def test_a_race_that_a_budget_ended_promises_nothing(found):
    findings = found[1].findings()
    of_budget = replace(findings, budget="5 %", sets=tuple(one._replace(failure=0.4) for one in findings.sets))
    assert "such races" not in " ".join(of_budget._promise())
    assert "In 3 of 3 sets the budget '5 %' ended the race before its rule did" in of_budget._promise()[0]
    by_rule = replace(of_budget, budget="adaptive")
    assert "such races" in by_rule._promise()[0]
    assert len(by_rule._promise()) == 1


@pytest.mark.parametrize(("budget", "least"), [("60 %", 0.05), ("40000 tokens", 0.05)])
def test_a_budget_is_kept(budget, least):
    run = iclperm.run(Study(budget=budget, **SIZES))
    parsed = parse_search_budget(budget)
    most = parsed.amount * (run.report.tokens_unique if parsed.unit == "share" else 1)
    assert least * most < run.report.tokens_forwarded <= 1.02 * most
    assert run.decisions[0]["known"]["halved"]


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"budget": "0.1 %"}, "the budget '0.1 %' is too small for this search; give at least"),
        ({"budget": "$5"}, "no price is known"),
        ({"budget": "soon"}, "give exhaustive, adaptive, or a budget such as"),
        ({"budget": "0 %"}, "give a share above 0 % and below 100 %, or exhaustive"),
        ({"budget": "101 %"}, "give a share above 0 % and below 100 %, or exhaustive"),
        ({"budget": "0 tokens"}, "give more than 0"),
        ({"budget": "adaptive", "criterion": "global_entropy"}, "is no mean over dev queries"),
        ({"budget": "adaptive", "calibration": "contextual"}, "set it to none"),
        ({"budget": "adaptive", "shots": [2, 4]}, "a single number of 'shots'"),
        ({"rule": "certified"}, "'rule' is for an adaptive search"),
        ({"tolerance": 0.02}, "'tolerance' is for an adaptive search"),
        ({"budget": "adaptive", "rule": "certified", "criterion": "local_entropy"}, "set criterion to dev_accuracy"),
        ({"budget": "adaptive", "tolerance": 1.5}, "'tolerance' is 1.5"),
        ({"budget": "5 %", "rule": "certified"}, "set budget to adaptive, or rule to calibrated"),
    ],
)
def test_what_cannot_be_is_refused(choices, said):
    with pytest.raises(ConfigError, match=said):
        iclperm.run(Study(**{**SIZES, **choices}))
    with pytest.raises(ConfigError, match=said):
        iclperm.plan(Study(**{**SIZES, **choices}))


def test_progress_tells_the_wave_and_about_its_own_tokens():
    told = []

    class Shown:
        interval = 1e9
        show = staticmethod(told.append)

    run = iclperm.run(Study(budget="adaptive", **SIZES), progress=Shown())
    ends = {advance.wave: advance for advance in told if advance.stage == "scoring"}
    assert list(ends) == list(range(1, len(run.decisions)))  # the last decision asks nothing
    assert all(0.5 < advance.tokens / advance.tokens_wanted < 2 for advance in ends.values())
    assert "scoring wave 1, " in words(ends[1])


@pytest.mark.parametrize("criterion", ["dev_log_likelihood", "local_entropy"])
def test_other_criteria_race_where_they_are_means_over_queries(criterion):
    run = iclperm.run(Study(budget="adaptive", criterion=criterion, **SIZES))
    assert run.findings().criterion == criterion
    assert 0 < asked(run, "dev").mean() < 1


def test_a_certified_race_asks_in_a_random_order_and_proves(found):
    _, _, whole = found
    run = iclperm.run(Study(budget="adaptive", rule="certified", tolerance=0.1, **SIZES))
    on_dev = whole.splits["dev"].correct[:, :, -1].mean(axis=2)
    for index, one in enumerate(run.findings().sets):
        assert on_dev[index].max() - on_dev[index, one.permutation] <= 0.1 + 1e-9
    first = np.flatnonzero(asked(run, "dev")[0].all(axis=0))
    assert len(first) >= 28
    assert not np.array_equal(first[:28], np.arange(28))


def test_seams_and_generated_answers(tmp_path):
    """Labels that merge with the query's end leave the product; texts are generated and read."""
    write_rows(tmp_path / "dev.jsonl", make_rows(3, 30))
    make_task(tmp_path, data={split: f"{split}.jsonl" for split in ("train", "dev", "test")})
    sizes = {**SIZES, "permutations": 4, "shots": 3, "queries": 4, "dev_queries": 4}
    for name, tokenizer in (("greedy", greedy_tokenizer()), ("bytes", byte_level_tokenizer())):
        make_model(tmp_path / name, tokenizer)
        study = Study(model=str(tmp_path / name), task=str(tmp_path / "colours.yaml"), budget="adaptive", **sizes)
        whole = iclperm.run(study.model_copy(update={"budget": "exhaustive"}))
        run = iclperm.run(study, tmp_path / f"{name} run")
        for split in ("dev", "test"):
            there = asked(run, split)
            np.testing.assert_array_equal(
                run.splits[split].label_logprob[:, :, -1][there], whole.splits[split].label_logprob[:, :, -1][there]
            )
        assert iclperm.verify(tmp_path / f"{name} run").damage == []
        written = study.model_copy(update={"scoring": "generate", "max_new_tokens": 2})
        run = iclperm.run(written, tmp_path / f"{name} written")
        assert iclperm.verify(tmp_path / f"{name} written").digest == run.digest
        assert run.findings().num_asked == sum(asked(run, split).sum() for split in ("dev", "test"))


def test_through_an_api(weights, tmp_path):  # noqa: F811 - a fixture
    sizes = {**SIZES, "sets": 1, "permutations": 4, "queries": 4, "dev_queries": 32}
    through_engine = iclperm.run(Study(budget="adaptive", **sizes))
    with scoring_server(*weights) as server:
        study = Study(budget="adaptive", endpoint=behind(server), **sizes)
        through_api = iclperm.run(study, tmp_path / "run")
        num_asked = len(server.seen)
        assert iclperm.run(study, tmp_path / "run").digest == through_api.digest
        assert len(server.seen) == num_asked
    assert [each["asks"] for each in through_api.decisions] == [each["asks"] for each in through_engine.decisions]
    assert through_api.report.num_requests > 0
    assert len(through_api.decisions) > 1


def test_a_damaged_part_is_named_and_made_again_and_a_lost_decision_too(found, tmp_path):
    path, run, _ = found
    copy = tmp_path / "run"
    shutil.copytree(path / "run", copy)
    file = sorted((copy / "items").iterdir())[1]
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert any(file.name in line for line in iclperm.verify(copy).damage)
    study = Study(budget="adaptive", **SIZES)
    assert iclperm.run(study, copy, limits=LIMITS).digest == run.digest
    last = sorted(copy.glob("plan-*.json"))[-1]
    last.unlink()
    with pytest.raises(RunError, match="the next not yet asked"):
        iclperm.open_run(copy)
    assert iclperm.run(study, copy, limits=LIMITS).decisions == run.decisions
    last.write_text(last.read_text().replace("true", "false", 1))
    with pytest.raises(DamagedItem, match="damaged"):
        RunFolder.open(copy)
    assert iclperm.run(study, copy, limits=LIMITS).decisions == run.decisions


@pytest.mark.parametrize("version", [2, 1, None])
def test_no_race_goes_on_under_another_rule_than_it_began_with(version, tmp_path):
    """Killed, its stored version edited (an older run has none), continued; what has ended needs no rule."""

    def progress(done, total):
        raise KeyboardInterrupt

    study = Study(budget="adaptive", **SIZES)
    with pytest.raises(RunInterrupted):
        iclperm.run(study, tmp_path / "run", progress=progress, limits=LIMITS)

    file = tmp_path / "run" / "plan.json"
    plan = json.loads(file.read_text())
    assert plan["decision"]["known"].pop("rule") == RULE_VERSION
    if version is not None:
        plan["decision"]["known"]["rule"] = version
    del plan["digest"]
    file.write_bytes(canonical(sealed(plan)))
    before = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*.parquet")}
    refused = (
        rf"began under version {version or 1} .* decides by version {RULE_VERSION}; finish it with the iclperm that"
    )
    with pytest.raises(RunError, match=refused):
        iclperm.run(study, tmp_path / "run", limits=LIMITS)
    assert {file: file.read_bytes() for file in (tmp_path / "run").rglob("*.parquet")} == before
    refuse_other_rule("calibrated", [Decision((), {"first": 28}), Decision((), {}, is_last=True)])
    with pytest.raises(RunError, match="version 1 of the certified rule"):
        refuse_other_rule("certified", [Decision((), {"first": 28})])


def test_a_decision_stands_on_the_answers_that_are_there(found):
    path, _, _ = found
    folder = RunFolder.open(path / "run")
    files = folder.parts.finished()
    assert _other_grounds(folder, files) == []
    other = {**files, 0: files[0].with_name("000000-0123456789abcdef.parquet")}
    lines = _other_grounds(folder, other)
    assert len(lines) == len(folder.plans) - 1
    assert all("decided from other answers than are there" in line for line in lines)


def test_decisions_are_written_and_read_as_they_are():
    ask = Ask("dev", (0, 1, 2, 7, 9, 8), ((0, 3), (0, 5), (2, 1)))
    decision = Decision((ask,), {"sets": []}, is_last=True)
    assert Decision.from_dict(json.loads(json.dumps(decision.to_dict()))) == decision
    assert ask.to_dict()["queries"] == [[0, 3], [7, 8], [9, 10], [8, 9]]


def test_one_set_and_few_queries():
    """One set has no other to be compared with; a dev split that is smaller than the first block is asked whole."""
    run = iclperm.run(Study(budget="adaptive", **{**SIZES, "sets": 1, "dev_queries": 8, "permutations": 3}))
    findings = run.findings()
    assert findings.sets[0].num_dev == 8
    assert findings.sets[0].failure == 0
    assert "one set only" in " ".join(findings.warnings)
    assert run.state[run.state != NOT_ASKED].max() == OK
