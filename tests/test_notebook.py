"""What a notebook does: a DataFrame made into a task, values of NumPy and paths, an interrupted cell, short reprs."""

import copy
import html
import inspect
import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from rich.progress import Progress
from tiny import make_rows

import iclperm
from iclperm import Study, Task, plot
from iclperm.base.imports import import_whole
from iclperm.errors import ConfigError, RequestError, RunError, RunInterrupted
from iclperm.progress import Advance, ProgressBar, words
from iclperm.runs.limits import WorkLimits
from iclperm.runs.progress import ANSWERING, FINISHING, LOADING
from iclperm.studies.comparing_page import page_of

CLASSES = ("World", "Sports", "Business")
ROWS = [{"title": row["text"], "label": CLASSES[number % 3]} for number, row in enumerate(make_rows(5, 90))]
SMALL = {"sets": 3, "permutations": 3, "shots": [0, 4], "queries": 12}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return iclperm.run(Study(**SMALL), tmp_path_factory.mktemp("runs") / "run")


def pandas_frame():
    """With what frames have: an index with a name, a column of categories, one of dates, NaN in a text."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(ROWS, index=pandas.Index(range(500, 590), name="row"))
    frame["label"] = frame["label"].astype("category")
    frame["seen"] = pandas.Timestamp("2024-05-06")
    frame["score"] = np.nan
    frame.loc[507, "title"] = np.nan
    return frame


TABLES = {
    "pandas": pandas_frame,
    "polars": lambda: pytest.importorskip("polars").DataFrame(ROWS),
    "arrow": lambda: pa.Table.from_pylist(ROWS),
    "rows": lambda: ROWS,
    "columns": lambda: {name: np.array([row[name] for row in ROWS]) for name in ("title", "label")},
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_becomes_a_task_with_its_rows(kind):
    made = iclperm.new_task(TABLES[kind](), "news", label="label", text="title")
    assert made.path == Path("news.yaml")
    rows = [json.loads(line) for line in Path("news.jsonl").read_text(encoding="utf-8").splitlines()]
    expected = [{**row, "title": None} if (kind, place) == ("pandas", 7) else row for place, row in enumerate(ROWS)]
    assert [{key: row[key] for key in ("title", "label")} for row in rows] == expected
    assert set(rows[0]) == {"title", "label"} | ({"seen", "score"} if kind == "pandas" else set())  # no index
    task = Task.load(made)
    examples = [task.examples(split) for split in ("train", "test")]
    there = sum(len(found.fields) + found.num_duplicates for found in examples)
    assert there == 90 - (kind == "pandas")
    label_of = {row["title"]: row["label"] for row in ROWS}
    for found in examples:
        assert [task.words[label] for label in found.labels] == [label_of[row["title"]] for row in found.fields]
    assert iclperm.plan(Study(task=made, sets=2, permutations=2, shots=3, queries=6)).num_queries == 6
    first, *others = repr(made).splitlines()
    assert first.startswith("task news.yaml: ")
    assert sorted(line.partition(":")[0] for line in others if not line.startswith(("rows", "note"))) == sorted(CLASSES)
    assert ("rows left out, blank: 1" in others) == (kind == "pandas")


def test_the_same_cell_again_changes_nothing_and_another_asks_first():
    iclperm.new_task(ROWS, "news.yaml", text="title")
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in Path().iterdir()}
    iclperm.new_task(ROWS, Path("news"), text="title")
    for rows, wording, names in (
        (ROWS[:60], {}, "news.jsonl and news.yaml is there|news.jsonl is there"),
        (ROWS, {"shots": 6}, "news.yaml is there and holds something else; use news.yaml as it is .*replace=True"),
    ):
        with pytest.raises(ConfigError, match=names):
            iclperm.new_task(rows, "news", text="title", **wording)
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in Path().iterdir()} == before
    iclperm.new_task(ROWS[:60], "news", text="title", replace=True)
    assert len(Path("news.jsonl").read_text(encoding="utf-8").splitlines()) == 60


@pytest.mark.parametrize("task", [None, "data: {train: other.jsonl}\n", "- no task\n", "data: {train: 3}\n"])
def test_rows_of_the_user_are_never_replaced(task):
    Path("mine.jsonl").write_text('{"title": "kept"}\n')
    if task is not None:
        Path("mine.yaml").write_text(task)
    for replace in (False, True):
        with pytest.raises(
            ConfigError, match=r"^mine\.jsonl is there and is not the data .*; give the task another name$"
        ):
            iclperm.new_task(ROWS, "mine", text="title", replace=replace)
    assert Path("mine.jsonl").read_text() == '{"title": "kept"}\n'
    assert Path("mine.yaml").exists() == (task is not None)


def test_the_wording_is_the_callers():
    wording = {"instruction": "", "demonstration": "H: {{ title }}\nT: {{ label }}", "query": "H: {{ title }}\nT:"}
    made = iclperm.new_task(ROWS, "mine", text="title", **wording)
    prompt = iclperm.sample_prompt(Study(task=made, sets=1, permutations=1, shots=3, queries=1))
    assert prompt.text.startswith("H: ")
    assert prompt.text.endswith("\nT:")
    assert str(prompt) == prompt.text == prompt.context + prompt.query
    numbers = [{**row, "label": CLASSES.index(row["label"])} for row in ROWS]
    assert "labels are numbers" in repr(iclperm.new_task(numbers, "bare", text="title"))
    named = iclperm.new_task(numbers, "named", text="title", labels=dict(enumerate(CLASSES)))
    assert Task.load(named).words == CLASSES
    with pytest.raises(ConfigError, match="a task has no key 'instuction'; did you mean 'instruction'"):
        iclperm.new_task(ROWS, "typo", instuction="")
    assert not Path("typo.yaml").exists()


@pytest.mark.parametrize(
    ("table", "named", "said"),
    [
        (ROWS, {"text": "titel"}, "the table has no column 'titel'; its columns are title, label"),
        (3, {}, "a int cannot be read as a table: .*; give a DataFrame"),
        ("news.csv", {}, "'news.csv' is a path; iclperm tasks new --from makes one of a file"),
        ({"a": [1, 2], "b": [1]}, {}, "a dict cannot be read as a table"),
        (pa.table([pa.array(["x"])] * 2, names=["a", "a"]), {}, "the table has two columns 'a'; rename one"),
    ],
)
def test_what_is_no_table_is_told(table, named, said):
    with pytest.raises(ConfigError, match=said):
        iclperm.new_task(table, "news", **named)
    assert [*Path().iterdir()] == []


def test_a_table_where_a_task_belongs_is_told_what_makes_one_of_it():
    frame = pandas_frame()
    for wrong in (lambda: Study(task=frame), lambda: Task.load(frame), lambda: Task.from_file(frame)):
        with pytest.raises(ConfigError, match=r"a DataFrame.*iclperm\.new_task makes a task of a table") as told:
            wrong()
        assert "\n" not in str(told.value)


def test_a_study_takes_paths_tuples_ranges_and_numbers_of_numpy():
    wanted = Study(model="a/b", task="news.yaml", sets=3, permutations=4, shots=[0, 2, 4])
    for shots in ((0, 2, 4), range(0, 5, 2), np.arange(0, 5, 2)):
        given = Study(
            model=Path("a/b"), task=Path("news.yaml"), sets=np.int64(3), permutations=np.int32(4), shots=shots
        )
        assert given == wanted
        assert given.to_yaml() == wanted.to_yaml()
    for wrong in (np.float64(3.5), np.bool_(True), np.array(["a"])):
        with pytest.raises(ConfigError, match="a study's key 'sets' is"):
            Study(sets=wrong)
    assert repr(wanted) == "Study(model='a/b', task='news.yaml', sets=3, permutations=4, shots=[0, 2, 4])"


def test_a_tooltip_shows_keys_and_defaults():
    shown = str(inspect.signature(Study))
    assert shown.startswith("(*, kind='sensitivity', model='demo', revision=None, adapter=None, task='mini_news',")
    assert list(inspect.signature(Study).parameters) == list(Study.model_fields)
    assert "Annotated" not in shown + str(inspect.signature(Task))


def test_a_wrong_answer_is_read_by_the_row_of_a_frame(run):
    pytest.importorskip("pandas")
    frame = run.to_pandas()
    row = frame[~frame["correct"].astype(bool)].iloc[0]
    assert isinstance(row["query"], np.integer)
    cell = {"index_set": row["set"], "permutation": row["permutation"], "shots": row["shots"]}
    found = run.prompt(**cell, query=row["query"])
    plain = run.prompt(**{key: int(value) for key, value in cell.items()}, query=int(row["query"]))
    assert found == plain
    assert type(found.query) is int
    for wrong in (2.0, "2", True):
        with pytest.raises(ConfigError, match=r"query is .*; give a whole number, or the task's fields"):
            run.prompt(**cell, query=wrong)
    with pytest.raises(ConfigError, match=r"permutation is 1\.5; give a whole number$"):
        run.prompt(index_set=0, permutation=1.5)


def test_two_runs_are_compared_as_they_are_named(run):
    other = iclperm.run(Study(**SMALL, seed=1))
    assert iclperm.compare(run.folder, other).to_dict() == iclperm.compare([run.folder, other]).to_dict()
    for one in (run, str(run.folder), [run]):
        with pytest.raises(ConfigError, match="at least 2 studies, got 1"):
            iclperm.compare(one)


def test_what_is_shared_is_a_text_or_a_list_and_arrays_are_compared_elsewhere(folder):
    arrays = np.random.default_rng(0).integers(0, 2, (2, 4, 4, 30), dtype=np.uint8)
    names = [folder / "a.npy", folder / "b.npy"]
    for name, array in zip(names, arrays, strict=True):
        np.save(name, array)
    for shared in ("sets,queries", "sets, queries", ["sets", "queries"]):
        assert iclperm.compare(names, shared=shared).pairs[0].comparison.shared == ("sets", "queries")
    for given in ((arrays[0], arrays[1]), ([arrays[0], arrays[1]],), (arrays,)):
        with pytest.raises(ConfigError, match=r"one is of ndarray; iclperm\.stats\.compare compares arrays"):
            iclperm.compare(*given)


@pytest.mark.parametrize("has_folder", [True, False])
def test_an_interrupted_cell_says_what_is_kept(has_folder):
    limits = WorkLimits(unit_tokens=(1, 1))
    told = []

    def stop(done, total):
        told.append((done, total))
        if done == 2:
            raise KeyboardInterrupt

    out = "runs/mine" if has_folder else None
    study = Study(sets=2, permutations=2, shots=2, queries=8)
    with pytest.raises(RunInterrupted) as stopped:
        iclperm.run(study, out, progress=stop, limits=limits)
    note = str(stopped.value)
    assert isinstance(stopped.value, KeyboardInterrupt)
    if not has_folder:
        assert "without a run folder nothing is kept" in note
        return
    assert note == (f"stopped, 2 of {told[-1][1]} parts are finished and kept in runs/mine; the same call continues")
    assert iclperm.status(out).num_parts_done == 2
    assert iclperm.run(study, out, limits=limits).report.num_parts_resumed == 2


def test_a_notebook_shows_the_callers_lines_and_the_message():
    cell = compile("def mine():\n    return iclperm.open_run('no\\x1bsuch')\n\nmine()", "cell.py", "exec")
    with pytest.raises(RunError) as failed:
        exec(cell, {"iclperm": iclperm})
    *lines, last = failed.value._render_traceback_()
    assert [line.partition(": ")[0] for line in lines] == [f"{__file__}, line {failed.tb.tb_lineno}", *(
        f"cell.py, line {number}" for number in (4, 2)
    )]  # fmt: skip
    assert last == "RunError: no\\x1bsuch is not a run folder; give the folder that a run was written to"


def test_what_progress_can_be_is_said():
    for wrong in ("yes", 1):
        with pytest.raises(ConfigError, match=f"progress is {wrong!r}; give True, a function of two numbers, or a Wa"):
            iclperm.run(Study(**SMALL), progress=wrong)


def test_a_bar_knows_what_a_notebook_keeps_of_it():
    with Progress(disable=True) as bar:
        shown = ProgressBar(bar)
        shown.show(Advance("m", "t", LOADING, 1.0))
        assert shown.answered is None
        shown.show(Advance("m", "t", ANSWERING, 9.0, 4, 4, 1_000, 1_000))
        shown.show(Advance("m", "t", FINISHING, 1.0, 4, 4))
    assert words(shown.answered) == "m on t: scoring, 1,000 of about 1,000 tokens, 4 of 4 parts"


def test_findings_and_comparisons_are_sentences_and_tables(run):
    comparing = iclperm.compare(run, iclperm.run(Study(**SMALL, seed=1)))
    assert set(page_of(comparing).warnings) == set(comparing.warnings)
    assert {f"{comparing.studies[0].name}: {words}" for words in run.warnings} <= set(comparing.warnings)
    for found in (run.findings(), run.findings("curve"), comparing):
        assert repr(found).splitlines() == [repr(found).splitlines()[0], *found.conclusion(), *found.warnings]
        shown = found._repr_html_()
        assert type(found).__name__ in repr(found).splitlines()[0]
        assert shown.count("<table>") == len(found.tables(False)) > 0


def test_prompts_plans_and_progress_are_shown_and_data_stays_text(run):
    hostile = iclperm.new_task([{**row, "title": f"<script>{row['title']}"} for row in ROWS], "hostile", text="title")
    study = Study(task=hostile, sets=2, permutations=2, shots=3, queries=3)
    prompt = iclperm.sample_prompt(study)
    shown = prompt._repr_html_()
    assert html.escape(prompt.text) in shown
    assert f"right: {prompt.answer}, of " in shown
    assert "<script" not in shown
    best = run.prompt(best=True)
    assert all(html.escape(line) in best._repr_html_() for line in (*best.said(), best.text))
    for facts in (iclperm.plan(study), iclperm.status(run.folder)):
        assert f">{facts.tokens_unique:,}</td>" in facts._repr_html_()
        names = [f.name for f in fields(facts) if getattr(facts, f.name) is not None]
        assert all(f">{name}" in facts._repr_html_() for name in names)
    assert ">estimate.seconds</td>" in iclperm.plan(study)._repr_html_()


def test_a_run_can_be_a_key_and_be_compared_with_its_copy(run):
    other = copy.deepcopy(run)
    assert run != other
    assert run == run
    assert {run: 1}[run] == 1
    assert other.digest == run.digest


def test_words_of_matplotlib_are_told_ours(run):
    for style, meant in (
        ({"figsize": (3, 3)}, "figsize: say width and height, in inches"),
        ({"colors": "magma"}, "colors: say colours"),
        ({"ax": None}, "ax: heat_map and curve alone"),
    ):
        with pytest.raises(RequestError, match=f"figures take width, height, title, colours; got {meant}"):
            plot.confusion(run, **style)
    for draw in (plot.heat_map, plot.curve, plot.r_over_k, plot.confusion):
        with pytest.raises(ConfigError, match=r"'runs/x' is a path; open it: iclperm\.open_run"):
            draw("runs/x")
    flat = iclperm.run(Study(**{**SMALL, "shots": 4}))
    with pytest.raises(ConfigError, match="a curve needs several"):
        plot.curve(flat)
    with pytest.raises(ConfigError, match="needs two numbers of demonstrations"):
        plot.r_over_k(flat)


INTERRUPTED = """
import os, signal, sys, threading, time
import iclperm

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
study = iclperm.Study(sets=2, permutations=2, shots=2, queries=4)
is_over = threading.Event()
try:
    iclperm.plan(iclperm.Study(task="nosuch.yaml"))
except iclperm.IclpermError as error:
    print("torch" in sys.modules, error)


def interrupt():
    while "torch" not in sys.modules:
        time.sleep(0.001)
    while not is_over.is_set():  # again: one that comes within a finaliser is lost
        os.kill(os.getpid(), signal.SIGINT)
        is_over.wait(2)


threading.Thread(target=interrupt).start()
try:
    iclperm.run(study, "run")
except KeyboardInterrupt as error:
    is_over.set()
    print(hasattr(sys.modules["torch"], "nn"), error)
is_over.set()
print(iclperm.run(study, "run").correct.shape)
"""


def test_torch_is_loaded_late_and_whole_whatever_is_interrupted():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(12):  # where the interrupt was lost within a finaliser, the run ended before the next one came
        done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=True, env=env)
        if done.stdout.count("\n") == 3:
            break
        shutil.rmtree("run")
    missing, stopped, finished = done.stdout.splitlines()
    assert missing.startswith("False there is no task 'nosuch.yaml'")
    assert stopped == "False stopped, before the first part; the same call continues"
    assert finished == "(2, 2, 1, 4)"


def test_what_an_import_raises_is_raised(folder, monkeypatch):
    (folder / "broken_module.py").write_text("raise ValueError('no such library')")
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(ValueError, match="no such library"):
        import_whole("sys", "broken_module")


def test_tab_finds_what_the_docs_name():
    assert {"new_task", "progress", "plot"} <= set(dir(iclperm))
