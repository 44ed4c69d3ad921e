"""Tasks of functions, rendered by lm-evaluation-harness: the folder has the harness' own prompts, here and there."""

import csv
import hashlib
import json
import re
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import iclperm
from iclperm import Task
from iclperm.cli import main as cli
from iclperm.errors import ConfigError
from iclperm.tasks.harness import HarnessTask

SPEC = find_spec("lm_eval")
THEIRS = Path(str(SPEC and SPEC.origin)).parent / "tasks"
pytestmark = pytest.mark.skipif(SPEC is None, reason="lm_eval is not installed")
UTILS = """
def rows(dataset):
    return dataset.map(lambda row: {"asked": row["q"].upper()})

def text(doc):
    return f"Q: {doc['asked']}\\nA:"

def choices(doc):
    return [doc["right"], *doc["wrong"]]

def judged(doc, results):
    return {"mine": 1.0}

def mine(items):
    return 1.0

def answer(doc):
    return 7 if "22" in doc["q"] else 0

def broken(doc):
    return doc["nothing"] if "22" in doc["q"] else "x"
"""
OWN = {
    "dataset_path": "json",
    "process_docs": "!function utils.rows",
    "doc_to_text": "!function utils.text",
    "test_split": "test",
    "fewshot_split": "train",
}
CHOSEN = {
    **OWN,
    "task": "own_choice",
    "output_type": "multiple_choice",
    "doc_to_choice": "!function utils.choices",
    "doc_to_target": 0,
    "target_delimiter": "",
    "metric_list": [
        {"metric": "acc"},
        {"metric": "!function utils.mine", "aggregation": "mean", "higher_is_better": True},
    ],
}
WRITTEN = {
    **OWN,
    "task": "own_text",
    "output_type": "generate_until",
    "doc_to_target": "{{right}}",
    "generation_kwargs": {"until": ["\n"]},
    "metric_list": [{"metric": "exact_match"}],
}


@pytest.fixture(autouse=True)
def own_alone(monkeypatch, request):
    """The harness looks for tasks in the folder that is given alone, which saves seconds."""
    if SPEC is not None and "own" in request.fixturenames:
        from lm_eval.tasks import TaskManager

        from iclperm.integrations import rendered

        monkeypatch.setattr(rendered, "TaskManager", partial(TaskManager, include_defaults=False))


@pytest.fixture
def own(tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    return folder


def made(folder: Path, *tasks: dict) -> Path:
    """A folder of tasks with their functions and rows."""
    (folder / "utils.py").write_text(UTILS)
    files = {}
    for split, first in (("train", 0), ("test", 20)):
        rows = [
            {"q": f"what is {n} and {n}?", "right": f" {2 * n}", "wrong": [f" {n}", f" {n + 1}x"]}
            for n in range(first, first + 8)
        ]
        files[split] = str(folder / f"{split}.jsonl")
        Path(files[split]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for task in tasks:
        text = yaml.safe_dump({**task, "dataset_kwargs": {"data_files": files}}, sort_keys=False)
        (folder / f"{task['task']}.yaml").write_text(re.sub(r"'(!function [\w.]+)'", r"\1", text))
    return folder


def render(name: str, folder: Path, out: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """Through the command; what it says."""
    with pytest.raises(SystemExit) as left:
        cli.main(["tasks", "from-harness", name, "--include-path", str(folder), "--out", str(out), *more])
    said = capsys.readouterr()
    assert not left.value.code, said.err
    return said.out + said.err


def theirs(name: str, *folders: Path):
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=False, include_path=[str(folder) for folder in folders]).load([name])["tasks"][
        name
    ]


@pytest.mark.parametrize("config", [CHOSEN, WRITTEN], ids=lambda config: config["output_type"])
def test_prompts_are_those_of_the_functions(config, own, tmp_path, capsys):
    name, out = config["task"], tmp_path / "out"
    folder = made(own, config)
    said = render(name, folder, out, capsys)
    assert f"{out / name}.yaml: 8 rows of test, 8 rows of train" in said
    assert ("left out: metric_list: mine, a function" in said) == (config is CHOSEN)
    original = theirs(name, folder)
    task = Task.load(out / f"{name}.yaml")
    shown, asked = task.examples("train"), task.examples("test")
    assert len(shown) == len(asked) == 8
    texts = {task.render_query(fields) for fields in asked.fields}
    assert texts == {original.doc_to_text(doc) for doc in original.test_docs()}
    rendered = HarnessTask.from_yaml(out / f"{name}.yaml")
    rows = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    assert set(rendered.demonstrations(rows)) == {demonstration_of(original, doc) for doc in original.fewshot_docs()}


def demonstration_of(task, doc) -> str:
    """As the harness writes it before a query."""
    choices = task.doc_to_choice(doc) if task.OUTPUT_TYPE == "multiple_choice" else None
    turns = task.build_qa_turn(
        q=task.doc_to_text(doc), c=choices, a=task.doc_to_target(doc), tgt_delim=task.config.target_delimiter
    )
    return "".join(turn.to_text() if hasattr(turn, "to_text") else turn.content for turn in turns)


def test_the_harness_reads_it_too(own, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    render("own_choice", made(own, CHOSEN), out, capsys)
    monkeypatch.chdir(out)  # its files are found beside it
    monkeypatch.delitem(sys.modules, "utils", raising=False)
    original, rendered = theirs("own_choice", own), theirs("own_choice", out)
    for one, other in zip(original.test_docs(), rendered.test_docs(), strict=True):
        assert original.doc_to_text(one) == rendered.doc_to_text(other)
        assert original.doc_to_choice(one) == rendered.doc_to_choice(other)
        assert original.doc_to_target(one) == rendered.doc_to_target(other) == 0
    made_by = yaml.safe_load((out / "own_choice.yaml").read_text())["metadata"]
    assert made_by["lm_eval"]
    assert len(made_by["config_sha256"]) == 64
    again = tmp_path / "again"
    render("own_choice", own, again, capsys)
    assert (again / "own_choice.yaml").read_bytes() == (out / "own_choice.yaml").read_bytes()
    utils = own / "utils.py"
    utils.write_text(utils.read_text().replace("Q: {doc", "Ask: {doc"))
    render("own_choice", own, tmp_path / "changed", capsys)
    changed = yaml.safe_load((tmp_path / "changed" / "own_choice.yaml").read_text())["metadata"]
    assert changed["config_sha256"] != made_by["config_sha256"]


def test_hellaswag_s_own_file_on_made_up_rows(own, tmp_path, capsys):
    """Its rows are made by a function."""
    row = {
        "activity_label": "Washing",
        "ctx_b": "he",
        "endings": ["runs.", "[title] sings.", "eats."],
        "source_id": "x",
    }
    files = {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "validation")}
    for number, file in enumerate(files.values()):
        rows = [
            {**row, "ctx_a": f"A man {n} [step] stands.", "label": str(n % 3)}
            for n in range(9 * number, 9 * number + 9)
        ]
        Path(file).write_text("".join(json.dumps(each) + "\n" for each in rows))
    keys = {"include": str(THEIRS / "hellaswag" / "hellaswag.yaml"), "task": "my_hellaswag", "dataset_path": "json"}
    (own / "x.yaml").write_text(yaml.safe_dump({**keys, "dataset_kwargs": {"data_files": files}}))
    render("my_hellaswag", own, tmp_path / "out", capsys, "--limit", "6")
    task = Task.load(tmp_path / "out" / "my_hellaswag.yaml")
    asked = task.examples("test")
    assert len(asked) == 6
    assert task.render_query(asked.fields[0]).startswith("Washing: A man ")
    (row, *_) = map(json.loads, (tmp_path / "out" / "test.jsonl").read_text().splitlines())
    assert row == {"context": "Washing: A man 9 stands. He", "choices": ["runs.", " sings.", "eats."], "gold": 0}


HELLASWAG = {"activity_label": "Washing", "ctx_b": "he", "endings": ["runs.", "[title] sings.", "eats.", "naps."]}


def hellaswag_rows(folder, **splits):
    """Made-up rows in HellaSwag's columns, a file a split."""
    folder.mkdir()
    for split, numbers in splits.items():
        rows = [{**HELLASWAG, "ctx_a": f"{n} men [step] stand by {n * n}.", "label": str(n % 4)} for n in numbers]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def test_hellaswag_on_rows_of_ones_own_in_two_commands(own, tmp_path, capsys):
    """As the documentation has it: no hub, and no task file to write; the harness looks in one folder, to save time."""
    rows, out = hellaswag_rows(tmp_path / "rows", train=range(12), validation=range(12, 20)), tmp_path / "hellaswag"
    command = ["tasks", "from-harness", "hellaswag", "--data", rows, "--include-path", THEIRS / "hellaswag", "--out"]
    said = called(capsys, *command, out)
    assert "8 rows of test, 12 rows of train; " in said
    sizes = ["--sets", "2", "--permutations", "2", "--shots", "2", "--queries", "8"]
    assert "accuracy" in called(capsys, "run", "--task", out / "hellaswag.yaml", *sizes, "--out", tmp_path / "run")
    found = iclperm.open_run(tmp_path / "run")
    assert (found.correct.shape, found.chance) == ((2, 2, 1, 8), 0.25)
    prompt = found.prompt(index_set=0, permutation=0, shots=2, query=0)
    assert re.fullmatch(r"(Washing: \d+ men stand by \d+\. He +\w+\.\n\n){2}Washing: .* He", prompt.text)
    made_by = yaml.safe_load((out / "hellaswag.yaml").read_text())["metadata"]
    assert made_by["dataset_path"] == "Rowan/hellaswag"
    assert made_by["instead_of_it"] == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(rows.iterdir())
    }
    again = tmp_path / "again"
    called(capsys, *command, again)
    assert [(again / file.name).read_bytes() for file in out.iterdir()] == [file.read_bytes() for file in out.iterdir()]


def called(capsys, *words):
    """What a command prints."""
    with pytest.raises(SystemExit) as left:
        cli.main([*map(str, words)])
    said = capsys.readouterr()
    assert not left.value.code, said.err
    return said.out


def test_rows_of_ones_own_may_lack_a_split(own, tmp_path, capsys, monkeypatch):
    """Without train rows the harness takes demonstrations from those that are asked; here half of them are."""
    folder = made(own, {**CHOSEN, "training_split": "train", "fewshot_split": None, "dataset_path": "far/away"})
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "test.jsonl").write_bytes((own / "test.jsonl").read_bytes())
    said = render("own_choice", folder, tmp_path / "out", capsys, "--data", str(rows))
    assert "8 rows of test; " in said
    task = Task.load(tmp_path / "out" / "own_choice.yaml")
    assert len(task.examples("train")) + len(task.examples("test")) == 8


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([], "rows has no rows; put a file a split there, train.jsonl or test.jsonl (or .json, .csv, .parquet)"),
        (["train.jsonl"], "rows has no rows that own_choice asks; put a file there, test.jsonl (or"),
        (["train.jsonl", "test.csv"], "has files of several kinds"),
        (["test.json", "test.jsonl"], "has test.json and test.jsonl for one split; leave one of them"),
    ],
)
def test_what_rows_of_ones_own_lack_is_named(files, said, own, tmp_path):
    from iclperm.integrations.rendered import rendered

    (tmp_path / "rows").mkdir()
    for name in files:
        (tmp_path / "rows" / name).write_bytes(b"{}\n")
    with pytest.raises(ConfigError) as raised:
        rendered("own_choice", made(own, CHOSEN), data=tmp_path / "rows")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("written", [json.dumps, str, lambda listed: str(listed).replace(",", "\n")])
def test_lists_in_csv_are_no_choices(written, own, tmp_path):
    """The harness would take each letter of such a text for a choice."""
    from iclperm.integrations.rendered import rendered

    (rows := tmp_path / "rows").mkdir()
    for split in ("train", "test"):
        with (rows / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            lines = csv.DictWriter(file, ["q", "right", "wrong"])
            lines.writeheader()
            lines.writerows({"q": f"[{n}] a", "right": "x", "wrong": written(["no", "yes"])} for n in range(3))
    with pytest.raises(ConfigError, match=r"\.csv: 'wrong' holds lists, which \.csv has as text; give \.jsonl or \.p"):
        rendered("own_choice", made(own, CHOSEN), data=rows)


def test_a_row_that_lacks_a_column_is_named(own, tmp_path, capsys):
    from iclperm.integrations.rendered import rendered

    folder = made(own, CHOSEN)
    lines = [{"q": f"w {n}", "right": "x", "wrong": ["y", "z"], "hint": "a"} for n in range(5)]
    for lacking, is_asked in (("hint", False), ("q", True)):
        (rows := tmp_path / lacking).mkdir()
        for split in ("train", "test"):
            kept = [{key: each[key] for key in each if n != 2 or key != lacking} for n, each in enumerate(lines)]
            (rows / f"{split}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in kept), encoding="utf-8")
        gap = f"row 3 of 5 has nothing in the column '{lacking}'"
        if is_asked:
            with pytest.raises(ConfigError, match=f"cannot load own_choice: .*'upper'; t.*jsonl: {gap}$"):
                rendered("own_choice", folder, data=rows)
        else:
            assert sorted(rendered("own_choice", folder, data=rows).gaps) == [
                f"test.jsonl: {gap}", f"train.jsonl: {gap}"
            ]  # fmt: skip
            command = ["from-harness", "own_choice", "--data", rows, "--include-path", folder]
            with pytest.raises(SystemExit):
                cli.main([*map(str, ("tasks", *command, "--out", tmp_path / "out"))])
            assert f"note: test.jsonl: {gap}, so a template may write None" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"doc_to_text": 1}, "has contexts that differ by choice"),
        ({"doc_to_target": "!function utils.answer"}, "the answer of its row 2 is 7, none of 3 choices"),
        ({"doc_to_choice": "!function utils.nothing"}, "cannot load own_choice: "),
        ({"doc_to_text": "!function utils.broken"}, "its row 2 ends with KeyError: 'nothing'"),
        ({"output_type": "loglikelihood"}, "has the output type loglikelihood"),
        ({"gen_prefix": "So"}, "begins its answers by gen_prefix"),
        ({"test_split": None}, "cannot load own_choice: ValueError: Task dataset"),
    ],
)
def test_what_cannot_be_rendered_is_told_in_a_line(changes, said, own):
    from iclperm.integrations.rendered import rendered

    folder = made(own, {**CHOSEN, **changes})
    with pytest.raises(ConfigError) as raised:
        rendered("own_choice", folder)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_is_no_task_is_told(tmp_path, capsys):
    from iclperm.integrations.rendered import rendered

    for name, said in (
        ("hellaswagg", "knows no task 'hellaswagg'; "),
        ("glue", "which is a tag; name one of its tasks"),
    ):
        with pytest.raises(ConfigError, match=said):
            rendered(name)
    (tmp_path / "mine.yaml").write_text("include: nowhere.yaml\ntask: mine\n")
    with pytest.raises(
        ConfigError, match=r"mine\.yaml is named so, but the harness cannot read it: iclperm tasks show"
    ):
        rendered("mine", tmp_path)
    with pytest.raises(ConfigError, match="is named so; iclperm lm-eval ls tasks lists"):
        rendered("others", tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["tasks", "from-harness", str(tmp_path / "mine.yaml")])
    assert "mine.yaml is a file; give the task's name, and its folder by --include-path" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        cli.main(["tasks", "from-harness", "x", "--out", str(tmp_path.parent)])
    assert left.value.code == 2
    assert "is there already; name another folder with --out" in capsys.readouterr().err
