"""Every kind of study end to end on the bundled model, in small: run, resumed, reported, read back from its folder."""

import ast
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner

import iclperm
from iclperm.cli import main as cli
from iclperm.errors import ConfigError, DataError, RunError
from iclperm.runs import formats
from iclperm.runs.folder import RunFolder
from iclperm.studies import several
from iclperm.studies.stages import load, stages_of
from iclperm.study import kinds
from iclperm.study.study import Study
from iclperm.tasks.task import BUILTIN

TINY = {"task": "mini_news", "sets": 3, "permutations": 4, "queries": 12, "seed": 2}
STUDIES = {
    "sensitivity": {**TINY, "shots": [0, 4]},
    "search": {**TINY, "permutations": 16, "shots": 4, "dev_queries": 60},
    "curve": {**TINY, "shots": 6},
    "convergence": {**TINY, "permutations": 6, "shots": 4},
    "selection": {**TINY, "shots": 4, "select": 2, "dev_queries": 12},
    "transfer": {**TINY, "permutations": 16, "shots": 4, "dev_queries": 40},
    "race": {**TINY, "permutations": 2, "shots": [0, 2], "dev_queries": 64},
    "recommend": {**TINY, "permutations": 2, "shots": 2, "dev_queries": 64},
}
FIGURES = {
    "sensitivity": {"heatmap", "curve"},
    "search": {"search"},
    "curve": {"curve", "curve_trajectories", "curve_plateaus"},
    "convergence": {"convergence", "convergence_curves", "convergence_scores"},
    "features": {"features"},
    "calibration": set(),
    "generation": set(),
    "selection": {"selection_pareto", "selection_curves"},
    "transfer": {"transfer"},
    "race": set(),
    "recommend": {"recommendation"},
}


@pytest.fixture(scope="module", autouse=True)
def one_engine():
    """The bundled model is loaded and checked once for all runs."""
    load, loaded = iclperm.Engine.from_pretrained, {}

    def from_pretrained(name, **choices):
        if (key := (str(name), *choices.values())) not in loaded:
            loaded[key] = load(name, **choices)
        return loaded[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(iclperm.Engine, "from_pretrained", from_pretrained)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a study file for each kind, and a second task on the same headlines."""
    place = tmp_path_factory.mktemp("kinds")
    task = yaml.safe_load((BUILTIN / "mini_news.yaml").read_text())
    folder = (BUILTIN / task["data"]["train"]).resolve().parent
    task |= {"name": "topics", "data": {split: str(folder / f"{split}.jsonl") for split in ("train", "dev", "test")}}
    task |= {"demonstration": "Article: {{ text }}\nTopic: {{ label }}", "query": "Article: {{ text }}\nTopic:"}
    (place / "topics.yaml").write_text(yaml.safe_dump(task))
    for kind, choices in STUDIES.items():
        choices = {"kind": kind, **choices}
        if kind == "transfer":
            del choices["task"]
            choices["tasks"] = ["mini_news", "topics.yaml"]
        (place / f"{kind}.yaml").write_text(yaml.safe_dump(choices))
    return place


class Runs(dict):
    """The run of each kind by its study file, made when it is first asked for."""

    def __init__(self, place):
        self.place = place

    def __missing__(self, kind):
        self[kind] = iclperm.run(Study.from_file(self.place / f"{kind}.yaml"), self.place / kind)
        return self[kind]

    def folder(self, kind):
        assert self[kind].digest
        return self.place / kind


@pytest.fixture(scope="module")
def runs(place):
    return Runs(place)


def call(*arguments):
    done = CliRunner().invoke(cli.cli, [str(argument) for argument in arguments], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.return_value, done.stdout


def first_runs(study):
    """The studies of a study of several runs that can begin at once, by name."""
    return next(iter(stages_of(study).values())).parts(study, {})


def numbers(content):
    """Every number in nested JSON."""
    if isinstance(content, dict):
        return [value for entry in content.values() for value in numbers(entry)]
    if isinstance(content, list):
        return [value for entry in content for value in numbers(entry)]
    return [content] if isinstance(content, float) else []


def test_every_kind_is_here():
    assert set(STUDIES) == set(kinds.STUDIES)
    assert set(FIGURES) == set(kinds.OURS)
    assert {name for name, kind in kinds.OURS.items() if kind.defaults} | {"sensitivity"} == set(STUDIES)


PACKAGE = Path(iclperm.__file__).parent
ROOT = Path(__file__).resolve().parents[1]
# Where the word of a kind stands for something else, and what that is; nowhere else may it be written out.
OTHER_MEANINGS = {
    "calibration": (
        "a key of the study",
        ("cli/options", "runs/", "stats/", "studies/compared", "studies/report", "studies/several"),
    ),
    "curve": ("accuracy over the number of shots", ("external/", "stats/", "studies/sensitivity")),
    "generation": (
        "what models do, a block of plan.json, a tag of chat templates",
        ("models/", "runs/", "study/metrics", "tasks/"),
    ),
    "race": ("the figure of an adaptive search", ("studies/adaptive",)),
    "recommend": ("a function of the package", ("__init__", "api")),
    "selection": (
        "sensitivity to it",
        (
            "external/",
            "stats/comparison",
            "studies/comparing",
            "studies/convergence",
            "studies/planning",
            "studies/sensitivity",
            "study/precision",
        ),
    ),
    "sensitivity": ("what order and selection have, a table of it", ("studies/comparing_",)),
}
DRAWN_IN = "plot.py"
"""Whose public functions are the figures of our kinds."""


def test_nothing_but_the_registry_and_its_own_files_knows_a_kind_by_name():
    found = {name: set() for name in kinds.OURS}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and node.value in found:
                found[node.value].add(path.relative_to(PACKAGE).as_posix())
    for name, places in found.items():
        assert "study/kinds.py" in places
        _, elsewhere = OTHER_MEANINGS.get(name, ("", ()))
        allowed = ("study/kinds.py", f"studies/{name}", DRAWN_IN, *elsewhere)
        assert [place for place in places if not place.startswith(allowed)] == [], name
        assert all(any(place.startswith(prefix) for place in places) for prefix in elsewhere), name


def test_the_tables_of_the_docs_are_those_of_the_registry():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    studies = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", readme, flags=re.MULTILINE))
    assert rows == {name: kinds.OURS[name].question for name in kinds.STUDIES}
    for kind in kinds.OURS.values():
        assert (ROOT / kind.page).is_file()
        if not kind.is_report:
            assert re.search(rf"^\| `{kind.name}` .*\]\({kind.page}\) \|$", readme, flags=re.MULTILINE)
            link = kind.page.removeprefix("docs/")
            assert re.search(rf"^\| `{kind.name}` .*\]\({link}\) \|$", studies, flags=re.MULTILINE)


@pytest.mark.parametrize("kind", kinds.OURS)
def test_what_a_declaration_names_is_there(kind):
    declared = kinds.OURS[kind]
    load(declared)
    assert set(declared.keys) | set(declared.defaults) <= set(Study.model_fields)
    if not declared.is_report:
        assert Study(**{"kind": kind, **declared.defaults}).kind == kind


@pytest.mark.parametrize("kind", STUDIES)
def test_a_kind_runs_reports_and_is_read_back(kind, runs, place):
    run = runs[kind]
    files = run.write_report()
    assert {path.stem for path in files if path.suffix == ".png"} >= FIGURES[kind]
    assert all(path.stat().st_size > 1000 for path in files if path.suffix in (".png", ".svg"))
    content = json.loads((place / kind / "report.json").read_text())
    assert content["kind"] == kind
    assert len(numbers(content)) > 10
    again = iclperm.open_run(place / kind)
    assert again.digest == run.digest
    assert again.report_content() == run.report_content()
    assert again.study.kind == kind


@pytest.mark.parametrize("kind", STUDIES)
def test_the_command_line_shows_it(kind, runs, place):
    digest = runs[kind].digest
    code, printed = call("report", place / kind)
    assert code == 0
    assert "Conclusion" in printed
    assert printed.count("\n") > 20
    assert "nan" not in printed.lower().replace("finance", "").replace("dominant", "").split()
    assert call("status", place / kind)[0] == 0
    assert call("verify", place / kind)[0] == 0
    code, printed = call("run", place / f"{kind}.yaml", "--out", place / kind)
    assert (code, "nothing to compute" in printed) == (0, True)
    code, printed = call("report", place / kind, "--json")
    assert json.loads(printed)["digest"] == digest


@pytest.mark.parametrize("kind", STUDIES)
def test_a_plan_says_what_it_costs(kind, place, runs):
    planned = iclperm.plan(Study.from_file(place / f"{kind}.yaml"))
    parts = planned if isinstance(planned, dict) else {"": planned}
    if kind not in ("selection", "recommend"):  # what it chooses decides about the tokens
        assert sum(part.tokens_unique for part in parts.values()) == runs[kind].report.tokens_unique
    assert call("plan", place / f"{kind}.yaml")[0] in (0, None)
    assert json.loads(call("plan", place / f"{kind}.yaml", "--json")[1])


def test_one_run_answers_for_several_kinds(runs, place):
    run = runs["curve"]
    for kind in ("sensitivity", "curve", "convergence", "features"):
        assert call("report", place / "curve", "--kind", kind)[0] == 0
        folder = place / "curve" / f"report-{kind}"
        assert json.loads((folder / "report.json").read_text())["kind"] == kind
        assert FIGURES[kind] <= {path.stem for path in folder.glob("*.png")}
    with pytest.raises(DataError, match="dev"):
        run.findings("search")
    with pytest.raises(ConfigError, match="no report of the kind 'transfers'"):
        run.findings("transfers")
    with pytest.raises(ConfigError, match="ask one of its runs for 'curve'"):
        runs["selection"].findings("curve")


def test_demonstrations_are_those_of_the_prompts(runs):
    run = runs["curve"]
    shown = run.demonstrations
    table = RunFolder.open(run.folder).table("demonstrations")
    assert shown.rows.reshape(-1, 6).tolist() == table["examples"].to_pylist()
    task = iclperm.Task.load("mini_news").examples("train")
    assert shown.texts[int(shown.rows[0, 0, 0])] == task.fields[shown.rows[0, 0, 0]]["text"]
    np.testing.assert_array_equal(shown.labels, task.labels[shown.rows])
    assert len(shown.query_texts("test")) == run.correct.shape[-1]


def test_given_demonstrations_are_used_as_they_are(tmp_path):
    rows = [[5, 3, 8], [1, 2, 900]]
    study = Study(**{**TINY, "sets": 2, "shots": 3, "demonstrations": rows})
    run = iclperm.run(study, tmp_path / "given")
    assert run.demonstrations.sets.tolist() == rows
    assert iclperm.open_run(tmp_path / "given").digest == run.digest
    other = Study(**{**study.model_dump(), "demonstrations": [[5, 3, 8], [1, 2, 901]]})
    with pytest.raises(RunError, match="demonstrations"):
        iclperm.run(other, tmp_path / "given")
    for change, words in (
        ({"demonstrations": [[1, 2], [3]], "sets": 2}, "sets of 1 to 2"),
        ({"demonstrations": [[1, 1]], "sets": 1}, "a row twice"),
        ({"demonstrations": [[1, 2]], "sets": 3}, "'sets' is 3, but 1"),
        ({"demonstrations": [[1, 2]], "sets": 1, "resample": "per_k"}, "leave one out"),
    ):
        with pytest.raises(ConfigError, match=words):
            Study(**{**TINY, **change})
    with pytest.raises(DataError, match="names row 5000"):
        iclperm.run(Study(**{**TINY, "sets": 1, "shots": 1, "permutations": 1, "demonstrations": [[5000]]}))
    with pytest.raises(ConfigError, match="sets of 2; make them equal"):
        iclperm.run(Study(**{**TINY, "sets": 1, "shots": 1, "demonstrations": [[5, 6]]}))


def test_a_killed_study_of_several_runs_continues(place, tmp_path, runs):
    study = Study.from_file(place / "transfer.yaml")
    begun = dict(first_runs(study))
    name = next(iter(begun))
    several._claim(tmp_path / "again", study)
    iclperm.run(begun[name], tmp_path / "again" / name)
    assert call("status", tmp_path / "again" / name)[0] == 0
    assert iclperm.run(study, tmp_path / "again").digest == runs["transfer"].digest
    assert formats.is_several(tmp_path / "again")


def test_what_has_not_begun_is_said(place, tmp_path, runs):
    for kind, missing in (("transfer", "topics"), ("selection", "what it chooses")):
        study = Study.from_file(place / f"{kind}.yaml")
        folder = tmp_path / kind
        several._claim(folder, study)
        name, first = next(iter(first_runs(study).items()))
        if kind == "transfer":
            iclperm.run(first, folder / name)
        done = CliRunner().invoke(cli.cli, ["status", str(folder)], standalone_mode=False)
        assert (done.return_value, done.exception) == (3, None)
        assert f"not begun: {'source, ' if kind == 'selection' else ''}{missing}" in done.stderr
        assert call("verify", folder)[0] == 3
        with pytest.raises(RunError, match="is not finished"):
            iclperm.open_run(folder)


def test_another_study_is_refused(place, tmp_path, runs):
    with pytest.raises(RunError, match="holds another study: seed is 2 there and 3 here"):
        iclperm.run(Study.from_file(place / "transfer.yaml").model_copy(update={"seed": 3}), runs.folder("transfer"))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError, match="holds other files"):
        iclperm.run(Study.from_file(place / "transfer.yaml"), tmp_path)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"kind": "transfer"}, "a transfer needs two tasks or two models"),
        ({"kind": "transfer", "tasks": ["mini_news", "mini_news"]}, "give each once"),
        ({"kind": "sensitivity", "criterion": "global_entropy"}, "'criterion' is for the kind search"),
        ({"kind": "curve", "select": 3}, "'select' is for the kind selection"),
        ({"kind": "search", "tasks": ["mini_news"]}, "'tasks' is for the kind transfer"),
        ({"kind": "selection", "select": 30}, "'select' is 30; give 2 to 20"),
    ],
)
def test_choices_that_do_not_fit_are_one_line(choices, words):
    with pytest.raises(ConfigError, match=words) as refused:
        iclperm.run(Study(**{**TINY, **choices}))
    assert "\n" not in str(refused.value)


def test_a_study_of_several_runs_is_exported_run_by_run(runs, place, tmp_path):
    with pytest.raises(ConfigError, match="export them one by one"):
        call("export", runs.folder("transfer"), "--out", tmp_path / "all.csv")
    folder = Path(several.folders(runs.folder("transfer"))["topics"])
    call("export", folder, "--out", tmp_path / "one.csv")
    assert (tmp_path / "one.csv").stat().st_size > 1000
    assert [name for name, kind in kinds.OURS.items() if kind.stages] == ["transfer", "selection", "recommend"]


def selection_of(place, **changes):
    return Study(**{**STUDIES["selection"], "kind": "selection", **changes})


def test_a_growth_that_is_refused_or_killed_hides_nothing(place, runs, tmp_path):
    small = selection_of(place, sets=2, queries=8)
    first = iclperm.run(small, tmp_path / "grown")
    with pytest.raises(RunError, match="add --extend"):
        iclperm.run(selection_of(place, sets=2, queries=12), tmp_path / "grown")
    assert iclperm.open_run(tmp_path / "grown").digest == first.digest
    source = first_runs(selection_of(place, sets=3, queries=8))["source"]
    iclperm.run(source, tmp_path / "grown" / "source", extend=True)  # and the rest never began
    again = iclperm.open_run(tmp_path / "grown")
    assert (again.digest, again.report.is_growing) == (first.digest, True)
    grown = iclperm.run(selection_of(place, sets=3, queries=8), tmp_path / "grown", extend=True)
    assert grown.digest == iclperm.run(selection_of(place, sets=3, queries=8)).digest
    assert iclperm.open_run(tmp_path / "grown").digest == grown.digest


def test_a_folder_that_says_what_is_now_left_to_the_task_is_continued(place, tmp_path):
    study = selection_of(place, sets=2, queries=6)
    digest = iclperm.run(study, tmp_path / "run").digest
    path = tmp_path / "run" / "study.yaml"
    older = yaml.safe_load(path.read_text())
    assert (older["scoring"], older["chat"]) == (None, None)
    for key in ("max_new_tokens", "think", "unparsed", "endpoint"):
        del older[key]
    path.write_text(yaml.safe_dump({**older, "scoring": "loglikelihood", "chat": "none"}))
    again = iclperm.run(study, tmp_path / "run")
    assert (again.digest, again.report.num_parts_resumed) == (digest, again.report.num_parts)
    path.write_text(yaml.safe_dump({**older, "scoring": "loglikelihood", "chat": "none"}))
    assert iclperm.open_run(tmp_path / "run").digest == digest
    with pytest.raises(RunError, match="holds another study: scoring is loglikelihood there and first_token here"):
        iclperm.run(study.model_copy(update={"scoring": "first_token"}), tmp_path / "run")
    path.write_text(yaml.safe_dump(older))
    with pytest.raises(RunError, match="scoring"):
        iclperm.run(study.model_copy(update={"scoring": "first_token"}), tmp_path / "run")
    endpoint = {"base_url": "http://127.0.0.1:9/v1", "model": "m", "api": "completions"}
    with pytest.raises(RunError, match="holds another study: the endpoint's model is None there and m here"):
        iclperm.run(selection_of(place, sets=2, queries=6, endpoint=endpoint), tmp_path / "run")


def test_another_statistic_is_remembered_and_can_be_asked_for(place, runs, tmp_path):
    study = Study.from_file(place / "search.yaml")
    folder = tmp_path / "search"
    first = iclperm.run(study, folder).report_content()
    other = iclperm.open_run(folder, criterion="local_entropy").report_content()
    assert other != first
    assert iclperm.open_run(folder).report_content() == first
    asked = study.model_copy(update={"criterion": "local_entropy"})
    assert iclperm.run(asked, folder).report_content() == other
    assert iclperm.open_run(folder).report_content() == other
    assert call("report", folder, "--criterion", "dev_accuracy")[0] == 0
    assert (folder / "report-dev_accuracy" / "report.json").is_file()
    transfer = Study.from_file(place / "transfer.yaml").model_copy(update={"criterion": "global_entropy"})
    found = iclperm.run(transfer, runs.folder("transfer")).report_content()
    assert iclperm.open_run(place / "transfer").report_content() == found
    iclperm.run(Study.from_file(place / "transfer.yaml"), place / "transfer")


def test_a_selection_is_read_under_another_normalisation(place, runs):
    found = iclperm.open_run(runs.folder("selection"), normalize="bytes")
    assert found.study.normalize == "bytes"
    assert found.findings().to_dict()


def test_what_lies_about_in_the_folder_is_no_hindrance(place, tmp_path, monkeypatch):
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".FORMAT.0123456789abcdef").write_text("iclp")  # a process was killed here
    study = selection_of(place, sets=2, queries=6)
    digest = iclperm.run(study, "out").digest
    assert "model: demo\n" in (tmp_path / "out" / "study.yaml").read_text()
    (tmp_path / "out" / "study.yaml").write_text("kind: sel")
    with pytest.raises(RunError, match=r"study\.yaml is damaged; run the study from its own file"):
        iclperm.open_run("out")
    assert iclperm.run(study, "out").digest == digest
    assert iclperm.open_run("out").digest == digest


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"kind": "selection", "resample": "per_k"}, "its scores need 'none'"),
        ({"kind": "selection", "shots": [0, 2, 4], "select": 2}, "by every k from 0 on"),
        ({"kind": "selection", "select": 1}, "'select' is 1; give 2 to 20"),
        ({"kind": "selection", "permutations": 1}, "compares orders"),
        ({"kind": "search", "dev_queries": 0}, "'dev_queries' is 0, but a search chooses by them"),
        ({"demonstrations": [[4, 17], [17, 4]], "sets": 2, "shots": 2}, "holds one set twice"),
    ],
)
def test_what_cannot_work_is_refused_before_the_model_runs(choices, words, monkeypatch):
    monkeypatch.setattr(iclperm.Engine, "from_pretrained", None)
    for begin in (iclperm.run, iclperm.plan):
        with pytest.raises(ConfigError, match=words):
            begin(Study(**{**TINY, **choices}))
