"""docs/extending.md is a package that works: it runs, is killed, continues, reports; what is refused of others."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from tiny import make_model, make_task

import iclperm
from iclperm.cli import main as cli
from iclperm.cli.failures import exit_code
from iclperm.errors import ConfigError, IclpermError, RunError
from iclperm.study import kinds
from iclperm.study.study import Study

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
# A killed process is one that ends by SIGKILL right after it has committed its part number argv[1].
RUN = """
import os, signal, sys
from iclperm.cli.main import main
from iclperm.runs.parts import PartFiles

written, write = 0, PartFiles.write

def write_and_die(*arguments):
    global written
    found, written = write(*arguments), written + 1
    if written == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    return found

PartFiles.write = write_and_die
main(sys.argv[2:])
"""


def install(place, modules, entries, name="more-kinds"):
    """A package as pip would lay it out in a folder: its modules, and what its entry points are called."""
    for path, text in modules.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text)
    about = place / f"{name.replace('-', '_')}-0.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    lines = [f"{key} = {value}" for key, value in entries.items()]
    (about / "entry_points.txt").write_text("\n".join(["[iclperm.kinds]", *lines, ""]))
    return place


def forget():
    """What was found of entry points, and loaded of them: as in a new process."""
    kinds._declared.cache_clear()
    kinds._theirs.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "more_kinds"]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def packages(monkeypatch, machine):
    """Says which packages are beside iclperm in this process; the folder to work in is the machine's."""
    monkeypatch.chdir(machine)
    plain = list(sys.path)

    def are(*sites):
        sys.path[:] = [*map(str, sites), *plain]
        forget()

    are()
    yield are
    are()


def call(*arguments, code=0):
    """The command line in this process: what it prints, or the error that it ends in."""
    done = CliRunner().invoke(cli.cli, [*map(str, arguments)], standalone_mode=False)
    if isinstance(done.exception, IclpermError):
        assert exit_code(done.exception) == code
        assert "\n" not in str(done.exception)
        return str(done.exception)
    assert (done.exception, done.return_value or 0) == (None, code)
    return done.stdout


def run_in_a_process(site, *arguments, kill_after=0):
    """The command line in a process of its own, which may be killed after so many parts."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", RUN, str(kill_after), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == (-signal.SIGKILL if kill_after else 0), done.stderr
    return done.stdout


def num_items(run):
    return len(list(Path(run).rglob("items/*.parquet")))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The package of the page, installed."""
    files = dict(re.findall(r"```(?:toml|python)\n# (\S+)\n(.*?)```", PAGE, flags=re.DOTALL))
    assert set(files) == {"pyproject.toml"} | {f"more_kinds/{name}.py" for name in ("__init__", "extremes", "rematch")}
    project = tomllib.loads(files.pop("pyproject.toml"))["project"]
    entries = project["entry-points"]["iclperm.kinds"]
    return install(tmp_path_factory.mktemp("site"), files, entries, project["name"])


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """A folder with a tiny model, a task and a study of each kind of the page."""
    folder = tmp_path_factory.mktemp("machine")
    make_model(folder / "model")
    make_task(folder, data={"train": "train.jsonl", "test": "test.jsonl", "dev": 0.3})
    # Sizes that make three parts of a run.
    choices = {"model": "model", "task": "colours.yaml", "permutations": 40, "shots": 5, "queries": 30, "seed": 3}
    for kind, more in (("extremes", {"sets": 12, "options": {"share": 0.25}}), ("rematch", {"sets": 10})):
        dev = {"dev_queries": 15} if kind == "rematch" else {}
        (folder / f"{kind}.yaml").write_text(yaml.safe_dump({"kind": kind, **choices, **more, **dev}))
    return folder


@pytest.mark.parametrize("kind", ["extremes", "rematch"])
def test_a_kind_of_another_package_runs_is_killed_continues_and_reports(kind, site, packages):
    """Killed within its first run, and again once all parts of that are there: nothing has been chosen from it then."""
    run_in_a_process(site, "run", f"{kind}.yaml", "--out", f"killed-{kind}", kill_after=1)
    assert num_items(f"killed-{kind}") == 1
    run_in_a_process(site, "run", f"killed-{kind}", kill_after=2)
    assert num_items(f"killed-{kind}") == 3
    assert not Path(f"killed-{kind}/choices.json").exists()
    assert "Conclusion" in run_in_a_process(site, "run", f"killed-{kind}")
    packages(site)
    whole = iclperm.run(Study.from_file(f"{kind}.yaml"), f"whole-{kind}")
    assert num_items(f"killed-{kind}") == num_items(f"whole-{kind}") == (3 if kind == "extremes" else 4)
    found = json.loads(call("report", f"killed-{kind}", "--json"))
    assert found["digest"] == whole.digest
    assert found.items() >= whole.report_content().items()
    assert found["kind"] == kind
    assert "digest  " in call("verify", f"killed-{kind}")
    written = Path(f"killed-{kind}/study.yaml").read_text()
    assert ("options:\n  share: 0.25\n" in written) == (kind == "extremes")
    if kind == "rematch":
        kept, others = (json.loads(Path(f"{name}-{kind}/choices.json").read_text()) for name in ("killed", "whole"))
        assert kept == others
        (entry,) = kept["choices"]
        assert (entry["stage"], len(entry["choice"]["rows"])) == ("first", 5)
        assert found["won_with"] == entry["choice"]["accuracy"]
        assert {path.parent.name.split("-")[0] for path in Path(f"killed-{kind}").glob("*/items")} == {"first", "again"}


def test_it_is_planned_and_asked_of_any_run(site, packages):
    packages(site)
    assert set(json.loads(call("plan", "rematch.yaml", "--json"))) == {"first", "again"}
    told = call("plan", "rematch.yaml", "--options", "share=0.2", code=2)
    assert told == "a study's key 'options' is {'share': 0.2}, but the kind rematch has none; leave it out"
    study = ("--model", "model", "--task", "colours.yaml", "--sets", 2, "--permutations", 3, "--queries", 5)
    call("run", *study, "--out", "plain")
    assert "The best 10% of the orders reach" in call("report", "plain", "--kind", "extremes")
    assert "choose one of sensitivity, " in call("report", "plain", "--kind", "rematch", code=2)
    assert call("report", "plain", "--kind", "nothing", code=2).endswith("generation, extremes")
    assert call("plan", "--kind", "nothing", code=2).endswith("'race', 'recommend', 'extremes' or 'rematch'")


def test_options_are_part_of_the_run_and_checked(site, packages):
    packages(site)
    call("run", "extremes.yaml", "--sets", 2, "--queries", 4, "--out", "small")
    assert "study.options.share is 0.25 there and 0.5 here" in call("run", "small", "--options", "share=0.5", code=1)
    assert json.loads(Path("small/plan.json").read_text())["study"]["options"] == {"share": 0.25}
    assert Study(kind="extremes").options == {"share": 0.1}
    assert "the block 'options' has no key 'part'" in call("plan", "extremes.yaml", "--options", "part=1", code=2)
    assert "key 'share' is 'x'" in call("plan", "extremes.yaml", "--options", "share=x", code=2)
    with pytest.raises(ConfigError, match="the key 1 is not text"):
        Study(kind="extremes", options={1: 2})
    with pytest.raises(ConfigError, match="a study's key 'options' is 3: input should be a valid dict"):
        Study(kind="extremes", options=3)


def test_a_folder_whose_package_is_gone_says_so_and_is_not_called_damaged(site, packages):
    packages(site)
    call("run", "extremes.yaml", "--sets", 2, "--queries", 5, "--out", "one")
    call("run", "rematch.yaml", "--sets", 2, "--queries", 5, "--out", "several")
    for folder, kind in (("one", "extremes"), ("several", "rematch")):
        packages()
        for command in ("status", "verify", "report", "run"):
            told = call(command, folder, code=2)
            assert f"{kind!r}" in told
            assert "damaged" not in told
        packages(site)
        assert "damaged" not in call("verify", folder)


MODULE = """
from iclperm import Kind

def kind(name, **choices):
    return Kind(name=name, question="?", **{"findings": "iclperm.studies.sensitivity:findings", **choices})

SOUND, OTHER, CURVE = kind("sound"), kind("other"), kind("curve")
MUTE = kind("mute", findings="odd_kinds:nothing")
EMPTY = kind("empty", findings="odd_kinds:MODULE")
MODULE = 3
STAGELESS = kind("stageless", stages="odd_kinds:MODULE")
BLIND = kind("blind", stages="odd_blind:STAGES")
"""
BLIND = """
from iclperm import Stage

def studies(study, choices):
    return {"a/b": study.of_kind("sensitivity")}

STAGES = {"one": Stage(studies, choose=lambda study, runs: 1)}
"""


@pytest.fixture
def odd(tmp_path):
    names = ("sound", "mute", "empty", "stageless", "blind", "curve")
    entries = {name: f"odd_kinds:{name.upper()}" for name in names}
    entries |= {"gone": "odd_gone:KIND", "wrong": "odd_kinds:MODULE", "renamed": "odd_kinds:OTHER"}
    files = {"odd_kinds.py": MODULE, "odd_blind.py": BLIND}
    return install(tmp_path, files, entries, "odd-kinds")


def test_what_is_broken_is_said_to_whoever_asks_for_it_and_to_nobody_else(odd, packages):
    packages(odd)
    assert Study(kind="sound").kind == "sound"
    for name, words in (
        ("gone", "(odd-kinds: odd_gone:KIND) cannot be loaded (ModuleNotFoundError: No module named 'odd_gone')"),
        ("wrong", "is a int, not an iclperm.Kind"),
        ("renamed", "calls itself 'other'"),
    ):
        with pytest.raises(ConfigError) as refused:
            Study(kind=name)
        assert words in str(refused.value)
        assert str(refused.value).startswith(f"the kind {name!r} (odd-kinds: odd_")
        assert "\n" not in str(refused.value)
    told = call("plan", "--kind", "nothing", code=2)
    assert "'recommend', 'sound'" in told
    assert all(f"the kind {name!r} (odd-kinds: " in told for name in ("gone", "wrong", "renamed", "curve"))
    assert set(kinds.broken()) == {"gone", "wrong", "renamed", "curve"}
    assert kinds.named("curve") is kinds.CURVE
    assert Study(kind="curve").sets == 5


def test_a_name_of_ours_looks_into_no_package(monkeypatch):
    monkeypatch.setattr("importlib.metadata.entry_points", None)
    assert [kinds.find(name) for name in kinds.OURS] == [*kinds.OURS.values()]
    assert Study(kind="search").permutations == 128
    assert "sensitivity, search, curve" in call("run", "--help")


def test_two_packages_with_one_name_are_refused_by_name(odd, packages, tmp_path_factory):
    other = install(tmp_path_factory.mktemp("other"), {}, {"sound": "odd_kinds:SOUND"}, "other-kinds")
    packages(odd, other)
    with pytest.raises(
        ConfigError, match=r"\(odd-kinds: odd_kinds:SOUND, other-kinds: .*\) is declared more than once"
    ):
        Study(kind="sound")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mute", "names odd_kinds:nothing, which is not to be had (AttributeError: "),
        ("empty", "names odd_kinds:MODULE, which is no function"),
        ("stageless", "names odd_kinds:MODULE, which is no mapping of names to iclperm.Stage"),
        ("blind", "whose stage 'one' chooses but has no 'stand_in' for plans"),
    ],
)
def test_what_cannot_report_is_refused_before_anything_is_computed(name, words, odd, packages, monkeypatch):
    packages(odd)
    monkeypatch.setattr(iclperm.Engine, "from_pretrained", None)
    for command in (("run", "--out", "never"), ("plan",)):
        told = call(*command, "--kind", name, "--sets", 2, "--queries", 4, code=2)
        assert told.startswith(f"the kind {name!r} (odd-kinds: odd_kinds:{name.upper()}) names ")
        assert words in told
    assert not Path("never").exists()


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"name": "Curve!"}, "a kind's name is 'Curve!'"),
        ({"findings": ""}, "the kind 'odd' has the findings ''; give 'module:object'"),
        ({"findings": "module"}, "has the findings 'module'"),
        ({"stages": "module.object"}, "has the stages 'module.object'"),
        ({"options": "x y"}, "has the options 'x y'"),
        ({"check": "module:check"}, "has the check 'module:check'; give a function"),
        ({"is_report": True, "stages": "a:b"}, "is a report of one run, but has stages"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(choices, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        iclperm.Kind(**{"name": "odd", "question": "?", "findings": "a:b", **choices})


def test_names_of_runs_and_choices_that_no_folder_can_have_are_refused(site, packages, monkeypatch):
    packages(site)
    study = Study.from_file("rematch.yaml").model_copy(update={"sets": 2, "permutations": 2, "queries": 3})
    stages = importlib.import_module("more_kinds.rematch").STAGES
    first = stages["first"]
    for change, words in (
        ({"studies": lambda study, _: {"a/b": study.of_kind("curve")}}, "calls a run 'a/b'"),
        ({"studies": lambda study, _: {"a": study}}, "makes 'a' a rematch; its runs must be of kinds of one run"),
        ({"choose": lambda study, runs: {1, 2}}, "chose what JSON cannot hold (Object of type set"),
        ({"choose": lambda study, runs: float("nan")}, "chose what JSON cannot hold (Out of range float"),
    ):
        monkeypatch.setitem(stages, "first", replace(first, **change))
        with pytest.raises(ConfigError, match=re.escape(words)):
            iclperm.run(study)


HALF = """
from iclperm import Kind, Stage, Study

class Findings:
    warnings = ()
    def conclusion(self): return ["so"]
    def tables(self, full): return []
    def plots(self): return {}
    def to_dict(self): return {}

class Lacking:
    warnings = ()
    def conclusion(self): return ["so"]

def of_run(run): return Findings()
def of_runs(runs, choices): return Findings()
def lacking(run): return Lacking()
def fails(*given): raise KeyError("rows")
def first(study, choices): return {"first": study.of_kind("sensitivity")}
def second(study, choices): return {"second": study.of_kind("sensitivity", sets=1)}
def named(name): return Stage(lambda study, choices: {name: study.of_kind("sensitivity")})
def choosing(choice, stand_in=1): return Stage(first, choose=lambda *given: choice, stand_in=lambda study: stand_in)

def kind(name, stages=None, **choices):
    if stages is not None:
        globals()[f"STAGES_{name}"] = stages
        choices = {"findings": "half_kinds:of_runs", "stages": f"half_kinds:STAGES_{name}", **choices}
    globals()[name.upper()] = Kind(name=name, question="?", **{"findings": "half_kinds:of_run", **choices})

kind("whole", {"one": choosing({"x": None}), "two": Stage(second)}, free=("select",), keys={"select": "?"})
kind("asks", findings="half_kinds:of_runs")
kind("gives", {"one": Stage(first)}, findings="half_kinds:of_run")
kind("lacking", findings="half_kinds:lacking")
kind("failing", findings="half_kinds:fails")
kind("checks", check=fails)
kind("keyed", keys={"nokey": "?"})
kind("free", free=("nokey",))
kind("options", options=fails)
for number, name in enumerate((
    "FORMAT", "study.yaml", "choices.json", "quarantine", "report", "report.json", "report-x", "../up", "", "a/b", ".."
)):
    kind(f"name{number}", {"one": choosing(1), "two": named(name)})
kind("number", {"one": choosing(1), "two": named(3)})
kind("twice", {"one": choosing(1), "two": Stage(first)})
kind("late", {"one": choosing(1), "two": Stage(fails)})
kind("unfit", {"one": choosing(1), "two": Stage(lambda study, choices: {"two": study.of_kind("search")})})
kind("listed", {"one": Stage(lambda study, choices: [study])})
kind("texts", {"one": Stage(lambda study, choices: {"first": "study"})})
kind("none", {"one": Stage(lambda study, choices: {})})
kind("unnamed", {1: Stage(first)})
kind("stands", {"one": choosing(1, stand_in={1, 2}), "two": Stage(second)})
kind("standless", {"one": choosing(1, stand_in=None), "two": Stage(second)})
kind("wary", {"one": Stage(first, check=fails)})
kind("nothing", {"one": choosing(None), "two": Stage(second)})
kind("stumbles", {"one": Stage(first, choose=fails, stand_in=lambda study: 1), "two": Stage(second)})
kind("reads", {"one": Stage(first, choose=lambda *given: 1, stand_in=lambda study: 1, read=fails)})
"""
SMALL = {"model": "model", "task": "colours.yaml", "sets": 2, "permutations": 2, "shots": 2, "queries": 4}


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A package of kinds that are not finished: each fails in one place, but for `whole`."""
    names = re.findall(r'^kind\("(\w+)"', HALF, flags=re.MULTILINE) + [f"name{number}" for number in range(11)]
    entries = {name: f"half_kinds:{name.upper()}" for name in names}
    return install(tmp_path_factory.mktemp("half"), {"half_kinds.py": HALF}, entries, "half-kinds")


def refused(call, name, words):
    with pytest.raises(ConfigError) as error:
        call()
    assert str(error.value).startswith(f"the kind {name!r} (half-kinds: half_kinds:{name.upper()}) ")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("asks", "which cannot be called with run (missing a required argument: 'choices')"),
        ("gives", "which cannot be called with runs and choices (too many positional arguments)"),
        ("checks", "fails in its 'check' (KeyError: 'rows')"),
        ("options", "fails in its 'options' (KeyError: 'rows')"),
        ("keyed", "names 'nokey', which is no key of a study"),
        ("free", "names 'nokey', which is no key of a study"),
        *((f"name{number}", "calls a run ") for number in range(11)),
        ("number", "calls a run 3"),
        ("twice", "calls two runs 'first'"),
        ("late", "fails in its 'studies' (KeyError: 'rows')"),
        ("listed", "whose 'studies' are no mapping"),
        ("texts", "makes 'first' a str, not a study"),
        ("none", "makes no runs of this study"),
        ("unnamed", "which is no mapping of names to iclperm.Stage"),
        ("stands", "chose what JSON cannot hold (Object of type set is not JSON serializable); repair its 'stand_in'"),
        ("standless", "chose None, as if nothing were chosen yet; repair its 'stand_in'"),
        ("wary", "fails in its 'check' (KeyError: 'rows')"),
    ],
)
def test_a_half_made_kind_is_refused_before_anything_is_computed(name, words, half, packages, tmp_path):
    packages(half)
    for begin in (iclperm.plan, lambda study: iclperm.run(study, tmp_path / "run")):
        refused(lambda begin=begin: begin(Study(kind=name, **SMALL)), name, words)
    assert not (tmp_path / "run").exists()


def test_a_later_stage_that_does_not_fit_is_refused_before_the_first_runs(half, packages, tmp_path):
    packages(half)
    with pytest.raises(ConfigError, match="'dev_queries' is 0, but a search chooses by them"):
        iclperm.run(Study(kind="unfit", **SMALL), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "chose None, as if nothing were chosen yet; repair its 'choose'"),
        ("stumbles", "fails in its 'choose' (KeyError: 'rows')"),
        ("reads", "fails in its 'read' (KeyError: 'rows')"),
        ("lacking", "of the type Lacking, which lack tables, plots and to_dict"),
        ("failing", "fails in its 'findings' (KeyError: 'rows')"),
    ],
)
def test_what_shows_once_there_are_answers_is_one_line_too(name, words, half, packages, tmp_path):
    packages(half)
    study = Study(kind=name, **SMALL)
    assert iclperm.plan(study)
    refused(lambda: iclperm.run(study, tmp_path / "run").findings(), name, words)
    assert num_items(tmp_path / "run") == 1


def test_a_kind_says_which_of_its_keys_are_free(half, packages, tmp_path):
    packages(half)
    run = iclperm.run(Study(kind="whole", **SMALL), tmp_path / "run")
    assert [*run.runs] == ["first", "second"]
    assert iclperm.run(Study(kind="whole", select=3, **SMALL), tmp_path / "run").report.num_parts_resumed == 2
    assert iclperm.open_run(tmp_path / "run").write_report()
    with pytest.raises(RunError, match="holds another study: seed is 0 there and 1 here"):
        iclperm.run(Study(kind="whole", seed=1, **SMALL), tmp_path / "run")


def test_what_our_own_kinds_raise_is_not_hidden():
    for kind, error in ((kinds.SEARCH, KeyError), (kinds.SEARCH, ConfigError)):
        with pytest.raises(error, match="rows"), kinds.calling(kind, "findings"):
            raise error("rows")
