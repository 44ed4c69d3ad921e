"""A recommendation: what is chosen of k, set and order, whoever is interrupted; what it says; what is refused."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm as normal
from tiny import make_model, make_rows, make_task, write_csv, write_rows

import iclperm
from iclperm import Study
from iclperm.cli import main as cli
from iclperm.errors import ConfigError, DataError, RequestError, RunError, RunInterrupted
from iclperm.runs.limits import WorkLimits
from iclperm.runs.raced_shots import lanes_of, num_racing
from iclperm.stats.intervals import Interval
from iclperm.stats.shortest import accuracy_of, against_random, shortest
from iclperm.studies.recommended_study import recommended_study
from iclperm.studies.recommending import ladder
from iclperm.study.states import NOT_ASKED

SIZES = {"kind": "recommend", "sets": 3, "permutations": 2, "shots": 2, "queries": 24, "dev_queries": 72, "seed": 1}
LIMITS = WorkLimits(unit_tokens=(300, 300), general_cells=40)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A recommendation that was not interrupted."""
    path = tmp_path_factory.mktemp("recommend") / "rec"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        return iclperm.run(Study(**SIZES), path, limits=LIMITS)


def asked_of(run):
    """[S, P, K, N] which dev queries were asked."""
    dev = run.splits["dev"]
    return dev.context_state[dev.context_of] != NOT_ASKED


def test_the_race_asks_a_part_and_no_test_query(found):
    race = found.runs["race"]
    assert race.shots == (0, 1, 2)
    asked = asked_of(race)
    assert 0 < asked.mean() < 1
    assert (race.splits["test"].context_state == NOT_ASKED).all()
    winners, begin = race.findings().winners, num_racing(72)
    for place, one in enumerate(winners):
        mine = asked[one.set, one.permutation, place]
        assert mine[: one.num_dev].all()
        assert not mine[one.num_dev : begin].any()
        assert mine[begin:].all()
        others = asked[:, :, place][race.splits["dev"].context_of[:, :, place] != race.splits["dev"].context_of[
            one.set, one.permutation, place]]  # fmt: skip
        assert not others[:, begin:].any()  # what compares the winners chose none of them
        assert (others.sum(axis=1) <= one.num_dev).all()


def test_its_answers_are_those_of_asking_everything(found):
    race = found.runs["race"]
    whole = iclperm.run(race.study.of_kind("sensitivity", budget="exhaustive", tolerance=0.01))
    there = asked_of(race)
    np.testing.assert_array_equal(race.splits["dev"].label_logprob[there], whole.splits["dev"].label_logprob[there])


def test_the_prompts_on_test_are_the_winners_of_the_race(found):
    race = found.runs["race"]
    for one in race.findings().winners:
        tested = found.runs[f"k{one.shots}"]
        rows = race.demonstrations.rows[one.set, one.permutation, : one.shots]
        if one.shots:
            assert tested.demonstrations.rows[0, 0].tolist() == rows.tolist()
        assert tested.correct.shape == (1, 1, 1, 24)
        assert (tested.weights == 1).all()
        np.testing.assert_array_equal(tested.gold, found.runs["k0"].gold)
    random = found.runs["random"]
    chosen = found.findings()
    assert random.shots == (chosen.tested[chosen.place].shots,)
    assert random.correct.shape == (40, 1, 1, 24)
    np.testing.assert_array_equal(random.gold, found.runs["k0"].gold)
    orders = [np.argsort(rows).tolist() for rows in random.demonstrations.rows[:, 0]]
    assert len({tuple(order) for order in orders}) > 1  # of a single order each prompt would be no random one


def test_what_it_says(found):
    findings = found.findings()
    one = findings.tested[findings.place]
    right = found.runs[f"k{one.shots}"].correct[0, 0, 0]
    assert one.accuracy.estimate == right.mean()
    assert one.accuracy == accuracy_of(right)
    assert findings.random.random.estimate == pytest.approx(found.runs["random"].correct.mean())
    assert findings.random.chosen == right.mean()
    assert findings.random.gain.estimate == pytest.approx(right.mean() - found.runs["random"].correct.mean())
    assert sum(each.num_queries for each in findings.recalls) == 24
    prompt = found.prompt()
    assert prompt.shots == one.shots
    assert prompt.is_held_out
    assert prompt.by_label == {
        each.label: (round(each.recall.estimate * each.num_queries), each.num_queries) for each in findings.recalls
    }
    text = " ".join(findings.conclusion())
    assert f"Take k = {one.shots}, set" in text
    assert "24 test queries as they come, which had no say in the choice" in text
    assert f"a random prompt of {one.shots} has" in text
    content = json.loads(json.dumps(found.report_content()))
    assert content["tested"][findings.place]["accuracy"]["estimate"] == one.accuracy.estimate
    assert content["does_any_choice_matter"] == findings.does_any_choice_matter


@pytest.mark.parametrize("stop", [5, 16])
def test_interrupted_anywhere_it_chooses_the_same(found, stop, tmp_path):
    calls = iter(range(1000))

    def progress(done, total):
        if next(calls) == stop:
            raise KeyboardInterrupt

    with pytest.raises(RunInterrupted):
        iclperm.run(Study(**SIZES), tmp_path / "rec", progress=progress, limits=LIMITS)
    with pytest.raises(RunError):
        iclperm.open_run(tmp_path / "rec")
    again = iclperm.run(Study(**SIZES), tmp_path / "rec", limits=LIMITS)
    assert again.choices == found.choices
    assert again.digest == found.digest
    assert again.runs["race"].decisions == found.runs["race"].decisions
    assert all(not one.damage for one in iclperm.verify(tmp_path / "rec").values())


def test_it_grows_in_test_queries_and_keeps_its_choice(found, tmp_path):
    shutil.copytree(found.folder, tmp_path / "rec")
    race = found.runs["race"].report.tokens_forwarded
    larger = iclperm.run(Study(**{**SIZES, "queries": 40}), tmp_path / "rec", extend=True, limits=LIMITS)
    assert larger.choices == found.choices
    assert larger.findings().num_queries == 40
    assert larger.runs["race"].report.tokens_forwarded == race
    kept = larger.runs["k0"].correct[..., :24]
    np.testing.assert_array_equal(kept, found.runs["k0"].correct)
    assert iclperm.open_run(tmp_path / "rec").findings().to_dict() == larger.findings().to_dict()
    with pytest.raises(RunError, match="cannot grow"):
        iclperm.run(Study(**{**SIZES, "queries": 40, "sets": 4}), tmp_path / "rec", extend=True, limits=LIMITS)


def test_a_budget_is_kept_and_a_small_one_refused(found):
    whole = found.runs["race"].report.tokens_unique
    race = {**SIZES, "kind": "race", "shots": [0, 1, 2], "queries": 1}
    run = iclperm.run(Study(**{**race, "budget": "80 %"}))
    assert run.decisions[0]["known"]["halved"]
    assert 0.4 * whole < run.report.tokens_forwarded <= 1.02 * 0.8 * whole
    said = r"budget '1 %' is too small for this choice; give at least [\d,]+ tokens \([\d.]+ times as much\)"
    with pytest.raises(ConfigError, match=said):
        iclperm.run(Study(**{**race, "budget": "1 %"}))


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"queries": 9}, "'queries' is 9; give at least 10"),
        ({"dev_queries": 0}, "'dev_queries' is 0; give at least 10"),
        ({"balance": "classes"}, "'balance' is 'classes', but a recommend needs natural"),
        ({"budget": "exhaustive"}, "asks only what its choice needs"),
        ({"shots": 0}, "give 'shots' of 1 or more"),
        ({"shots": "all"}, "'shots' is 'all'"),
        ({"rule": "certified"}, "'rule' is for the kind search"),
        ({"demonstrations": [[1, 2]]}, "is what a recommend is to choose"),
        ({"task": "colours.yaml"}, "no 'dev' data"),
        ({"queries": 5000}, r"'queries' is 5000 .* lower 'queries' to"),
        ({"dev_queries": 50_000}, r"'dev_queries' is 50000 .* lower 'dev_queries' to"),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_is_computed(choices, said, tmp_path, monkeypatch):
    make_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(iclperm.Engine, "from_pretrained", None)
    with pytest.raises((ConfigError, DataError), match=said) as refused:
        iclperm.run(Study(**{**SIZES, **choices}), tmp_path / "rec")
    assert "\n" not in str(refused.value)


def test_prompts_of_equal_tokens_race_once():
    context_of = np.array([[[0, 1, 2], [0, 3, 4]], [[0, 1, 5], [0, 1, 5]]])
    lanes = lanes_of(context_of)
    assert [lane.contexts.tolist() for lane in lanes] == [[0], [1, 3], [2, 4, 5]]
    assert lanes[1].orderings == ((0, 0), (0, 1))
    assert lanes[2].orderings == ((0, 0), (0, 1), (1, 0))


def test_the_ladder_ends_where_it_is_told():
    assert ladder(None, 8) == [0, 1, 2, 4, 8]
    assert ladder(6, 8) == [0, 1, 2, 4, 6]
    assert ladder(1, 8) == [0, 1]
    assert ladder(2, 8) == [0, 1, 2]
    assert ladder([5, 2], 8) == [2, 5]


ANSWERS = st.integers(1, 4).flatmap(
    lambda k: st.lists(st.lists(st.sampled_from([0.0, 1.0, np.nan]), min_size=30, max_size=30), min_size=k, max_size=k)
)


@settings(max_examples=60, deadline=None)
@given(ANSWERS, st.data())
def test_the_shortest_is_that_of_an_oracle(answers, data):
    """From the shortest up, the first that the reference does not beat by McNemar's test without correction, one-sided
    at 2.5 %, whose chi-square Tango's interval inverts."""
    items = np.array(answers)
    reference = data.draw(st.integers(0, len(items) - 1))
    taken = reference
    for place in reversed(range(reference)):
        gains = int(np.sum((items[reference] == 1) & (items[place] == 0)))
        losses = int(np.sum((items[reference] == 0) & (items[place] == 1)))
        is_beaten = gains > losses and (gains - losses) ** 2 > normal.ppf(0.975) ** 2 * (gains + losses)
        taken = taken if is_beaten else place
    found = shortest(items, reference)
    assert found.place == taken
    assert [one.shorter for one in found.against] == list(range(reference))


def test_grades_and_another_reference_are_refused_or_compared():
    rng = np.random.default_rng(1)
    grades = np.stack([rng.uniform(0, 0.5, 60), rng.uniform(0.4, 1, 60)])
    assert shortest(grades, 1).place == 1
    assert shortest(grades, 0).place == 0
    with pytest.raises(RequestError, match="a reference below K"):
        shortest(grades, 2)


def test_random_prompts_are_compared_by_query():
    rng = np.random.default_rng(0)
    chosen, drawn = rng.integers(0, 2, 50).astype(float), rng.integers(0, 2, (5, 50)).astype(float)
    drawn[2, 7] = np.nan
    found = against_random(chosen, drawn)
    kept = np.delete(np.arange(50), 7)
    assert found.random.estimate == pytest.approx(drawn[:, kept].mean())
    assert found.gain.estimate == pytest.approx(chosen[kept].mean() - drawn[:, kept].mean())
    assert found.gain.low < found.gain.estimate < found.gain.high
    with pytest.raises(RequestError, match="do not fit"):
        against_random(chosen, drawn[:, :9])


def test_no_choice_is_shown_to_matter(tmp_path):
    """Of a model of random weights: the shortest prompt is taken, and nothing is claimed."""
    make_task(tmp_path, data={split: f"{split}.jsonl" for split in ("train", "dev", "test")})
    write_rows(tmp_path / "dev.jsonl", make_rows(3, 40))
    model = make_model(tmp_path / "model")
    choices = {**SIZES, "dev_queries": 40, "model": str(model), "task": str(tmp_path / "colours.yaml")}
    run = iclperm.run(Study(**choices))
    findings = run.findings()
    assert not findings.does_any_choice_matter
    assert findings.place == 0
    assert findings.random is None
    assert "random" not in run.runs
    assert findings._short() == ["No choice is shown to matter: take the shortest, k = 0."]
    assert not findings.bearing.can_conclude


def test_a_longer_prompt_that_is_better_on_test_matters(found):
    """Though the dev queries did not show it: it is not said that no choice matters."""
    findings = found.findings()
    tested = [one._replace(difference=Interval(0.0, 0.0, 0.0, 0.95)) for one in findings.tested]
    alike = replace(findings, place=0, random=None, tested=tuple(tested))
    assert not alike.does_any_choice_matter
    tested[1] = tested[1]._replace(difference=Interval(0.3, 0.2, 0.4, 0.95))
    longer = replace(alike, tested=tuple(tested))
    assert longer.does_any_choice_matter
    assert longer._short() == []


def command(*arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main([*map(str, arguments)])
    return ended.value.code


SMALL = ("--sets", 2, "--permutations", 2, "--shots", 2, "--queries", 16, "--dev-queries", 24)


def test_from_a_data_file_in_one_command(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "things.csv", make_rows(5, 200))
    for out in ((), ("--out", "runs/rec")):
        assert command("recommend", "things.csv", *out, *SMALL, "--plan") == 0
        planned = " ".join(capfd.readouterr().out.split())
        assert "Together" in planned
        assert planned.count("with budget 'adaptive' it asks a part of this") == 1  # of the race alone
        assert not (tmp_path / "runs/rec").exists()
        assert (tmp_path / "runs").exists() == bool(out)  # of a plan alone nothing is left
    assert command("recommend", "things.csv", "--out", "runs/rec", *SMALL) == 0
    printed, told = capfd.readouterr()
    assert told.startswith("the race asks a part of ")
    assert " and its test is " in told.splitlines()[0]
    assert "The best prompt of each length on test" in printed
    assert "runs/rec/prompt.txt" in printed
    told = json.loads((tmp_path / "runs/rec/prompt.json").read_text())
    prompt = iclperm.open_run("runs/rec").prompt()
    assert (tmp_path / "runs/rec/prompt.txt").read_text() == prompt.text == told["text"]
    assert told["accuracy"] == prompt.accuracy
    assert told["k"] == prompt.shots
    assert (tmp_path / "runs/rec/report.html").stat().st_size > 10_000
    assert (tmp_path / "runs/rec-task.yaml").is_file()
    assert command("recommend", "things.csv", "--out", "runs/rec", *SMALL) == 0
    assert "nothing to compute" in capfd.readouterr().out
    assert command("prompt", "runs/rec", "--format", "json") == 0
    assert json.loads(capfd.readouterr().out) == told
    write_csv(tmp_path / "others.csv", make_rows(6, 200))
    assert command("recommend", "others.csv", "--out", "runs/rec", *SMALL) == 2
    assert "for other data than others.csv" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("data", "flags", "said"),
    [
        ("few.csv", (), "no dev rows to choose by"),
        ("bare.csv", (), "no column looks like labels"),
        ("things.csv", ("--budget", "0.1 %"), "too small for this choice; give at least"),
        ("things.csv", ("--label", "colour"), "no column 'colour'"),
        ("mini_news", ("--label", "label"), "is a task, which names its columns itself"),
    ],
)
def test_a_refusal_is_one_line_and_leaves_nothing(data, flags, said, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for name, count in (("things", 200), ("few", 40)):
        write_csv(tmp_path / f"{name}.csv", make_rows(5, count))
    write_csv(tmp_path / "bare.csv", [{"text": row["text"], "id": n} for n, row in enumerate(make_rows(5, 200))])
    assert command("recommend", data, "--out", "runs/rec", *flags) == 2
    told = capfd.readouterr().err.strip().split("\n")
    assert said in told[-1]
    assert len(told) == 1
    assert not (tmp_path / "runs/rec").exists()
    assert (tmp_path / "runs/rec-task.yaml").exists() == ("--budget" in flags)


def test_sizes_follow_from_the_data(tmp_path):
    write_csv(tmp_path / "things.csv", make_rows(5, 200))
    study = recommended_study(tmp_path / "things.csv", tmp_path / "rec", {})
    assert (study.shots, study.balance, study.budget) == (8, "natural", "adaptive")
    assert (study.queries, study.dev_queries) == (60, 39)
    larger = recommended_study("mini_news", None, {"sets": 2, "queries": 30})
    assert (larger.queries, larger.dev_queries, larger.sets) == (30, 400, 2)
    with pytest.raises(ConfigError, match="name one with out"):
        recommended_study(tmp_path / "things.csv", None, {})
