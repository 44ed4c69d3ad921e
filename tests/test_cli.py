"""The command line: one call of the API, one line for an error, four exit codes."""

import json
import os
import subprocess
import sys

import pytest
from tiny import byte_level_tokenizer, make_model, make_rows, make_task, write_rows

from iclperm import Study, cli, runner

COMMANDS = ("demo", "plan", "report", "run", "tasks")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), byte_level_tokenizer())


@pytest.fixture
def study_file(tmp_path, model):
    make_task(tmp_path)
    study = {"model": str(model), "task": "colours.yaml", "sets": 2, "permutations": 3, "shots": [0, 3], "queries": 6}
    path = tmp_path / "study.yaml"
    path.write_text(json.dumps(study))
    return path


@pytest.fixture
def call(capsys, monkeypatch):
    """Runs the command line in this process; gives exit code, what was printed, and what was complained."""
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    def run(*arguments):
        with pytest.raises(SystemExit) as exit_:
            cli.main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return exit_.value.code, printed.out, printed.err

    return run


def test_a_study_file_to_a_report(call, study_file, tmp_path):
    out = tmp_path / "run"
    code, printed, _ = call("run", study_file, "--out", out)
    assert code == 0
    assert "computed in" in printed
    assert "Order against selection" in printed
    assert "Accuracy against shots" in printed
    assert str(out / "heatmap.png") in printed
    assert (out / "report.json").is_file()
    code, printed, _ = call("run", study_file, "--out", out)
    assert code == 0
    assert f"nothing to compute: all 1 parts were found in {out}" in printed
    code, printed, _ = call("report", out, "--json")
    assert code == 0
    content = json.loads(printed)
    assert content["run"]["num_parts_resumed"] == 1
    assert content["curve"]["shots"] == [0, 3]
    assert content["sensitivity"] == json.loads((out / "report.json").read_text())["sensitivity"]


def test_flags_win_over_the_study_file(call, study_file):
    code, printed, _ = call("plan", study_file, "--sets", 3, "--shots", "0,1,3", "--json")
    assert code == 0
    planned = json.loads(printed)
    assert (planned["num_sets"], planned["shots"], planned["num_queries"]) == (3, [0, 1, 3], 6)
    code, printed, _ = call("plan", study_file)
    assert code == 0
    assert f"{planned['num_queries']}" in printed
    assert "tokens, distinct" in printed


def test_every_key_of_a_study_is_a_flag():
    assert set(cli.STUDY_KEYS) == set(Study.model_fields)
    assert {"sets", "permutations", "shots", "queries", "seed", "memory_budget"} == {
        key for key, field in Study.model_fields.items() if "int" in str(field.annotation)
    }


def test_tasks_are_listed_and_shown(call, study_file, tmp_path):
    code, printed, _ = call("tasks")
    assert code == 0
    assert printed.startswith("mini_news  ")
    code, printed, _ = call("tasks", "show", tmp_path / "colours.yaml", "--shots", 2)
    assert code == 0
    assert printed.count("Thing: ") == 3
    assert "' Red', ' Green', ' Blue'" in printed


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["plan", "--sets", "many"], 2, "--sets is 'many'; give a whole number"),
        (["plan", "--task", "agnews"], 2, "there is no task 'agnews'; built in: mini_news"),
        (["plan", "--kind", "curve"], 2, "a study's key 'kind' is 'curve': input should be 'sensitivity'"),
        (["plan", "--shots", "2", "--permutations", "3"], 2, "permutations is 3, but 2 demonstrations have only 2"),
        (["plan", "absent.yaml"], 2, "absent.yaml: cannot be read"),
        (["report", "absent"], 1, "absent is not a run folder"),
        (["plan", "--model", "/absent"], 1, "there is no model folder '/absent'"),
    ],
)
def test_an_error_is_one_line_and_a_code(call, arguments, code, message):
    got, printed, complaint = call(*arguments)
    assert got == code
    assert printed == ""
    assert complaint.startswith(f"error: {message}")
    assert complaint.count("\n") == 1


def test_debug_shows_the_traceback(call):
    code, _, complaint = call("plan", "--task", "agnews", "--debug")
    assert code == 2
    assert "Traceback" in complaint
    assert complaint.splitlines()[-1].startswith("error: there is no task 'agnews'")


def test_usage_errors_have_their_own_code(call):
    assert call("plan", "--nonsense")[0] == 2
    assert call("run")[0] == 2
    assert call("nonsense")[0] == 2
    assert call("--help")[0] == 0


def test_an_interrupt_leaves_a_resumable_run(call, study_file, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "_tables", interrupted)
    code, _, complaint = call("run", study_file, "--out", tmp_path / "run")
    assert code == 3
    assert "the same command continues" in complaint
    monkeypatch.undo()
    assert call("run", study_file, "--out", tmp_path / "run")[0] == 0


def test_a_target_that_cannot_be_written_is_resumable(call, study_file, tmp_path):
    (tmp_path / "file").write_text("x")
    code, _, complaint = call("run", study_file, "--out", tmp_path / "file/run")
    assert code == 3
    assert complaint.startswith("error: cannot write to ")


def test_a_defect_is_one_line_too(call, study_file, monkeypatch):
    def broken(_):
        raise ZeroDivisionError("x\ny")

    monkeypatch.setattr(runner, "plan", broken)
    code, _, complaint = call("plan", study_file)
    assert (code, complaint) == (1, "error: unexpected ZeroDivisionError: x y; --debug shows where\n")


def test_data_cannot_steer_the_terminal(call, tmp_path):
    path = make_task(tmp_path)
    rows = make_rows(2, 30)
    write_rows(tmp_path / "test.jsonl", [{**row, "text": row["text"] + " \x1b[2J[bold]"} for row in rows])
    code, printed, _ = call("tasks", "show", path)
    assert code == 0
    assert "\x1b[2J" not in printed
    assert "\\x1b[2J[bold]" in printed


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS), ["tasks", "show"]])
def test_help_loads_nothing_heavy(command):
    script = (
        "import sys; from iclperm import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit as done: assert done.code == 0, done.code\n"
        "heavy = {'torch', 'numba', 'transformers', 'matplotlib', 'scipy', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    environment = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, *command, "--help"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: iclperm")
    if not command:
        assert all(f"  {name} " in done.stdout for name in COMMANDS)


def test_the_demo_runs_and_runs_again(call, tmp_path, monkeypatch):
    small = {"sets": 2, "permutations": 2, "shots": [0, 2, 8], "queries": 8}
    monkeypatch.setattr(cli, "DEMO_SETTING", small)
    code, printed, complaint = call("demo", "--out", tmp_path / "demo")
    assert code == 0, complaint
    for expected in ("one prompt and its right label", "Answer:", "Order against selection", "tokens", "next:"):
        assert expected in printed
    for name in ("heatmap.png", "heatmap.svg", "curve.png", "curve.svg", "report.json"):
        assert (tmp_path / "demo" / name).is_file()
    assert list((tmp_path / "demo/items").glob("*.parquet"))
    code, printed, _ = call("demo", "--out", tmp_path / "demo", "--json")
    assert code == 0
    content = json.loads(printed)
    assert content["run"]["num_parts_resumed"] == content["run"]["num_parts"] > 0
    assert content["run"]["tokens_naive"] > content["run"]["tokens_unique"] == content["run"]["tokens_forwarded"]


def test_the_demo_only_proposes_commands_that_exist(capsys):
    from rich.console import Console

    cli._print_next_steps(Console(width=200), "iclperm-demo")
    proposed = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  iclperm ")]
    assert len(proposed) >= 3
    for words in proposed:
        command = cli.cli.commands[words[1]]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options
