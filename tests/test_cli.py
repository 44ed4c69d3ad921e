"""The command line: one call of the API, one line for an error, four exit codes."""

import json
import os
import subprocess
import sys

import click
import pytest
from tiny import byte_level_tokenizer, make_model, make_rows, make_task, write_rows

from iclperm import Study, cli, runner
from iclperm.engine import Engine
from iclperm.runner import Run
from iclperm.store import writable
from iclperm.tasks import Task, builtin_tasks

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
    assert "Accuracy against k" in printed
    assert f"  {out}: heatmap.png, heatmap.svg, curve.png, curve.svg, report.json\n" in printed
    assert (out / "report.json").is_file()
    code, printed, _ = call("run", study_file, "--out", out)
    assert code == 0
    assert f"nothing to compute: all 1 parts were found in {out}" in printed
    code, printed, _ = call("report", out)
    assert code == 0
    assert "comput" not in printed.split("Accuracy")[0]
    assert "Mean accuracy at k = 3" in printed
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
    assert {key for key, field in Study.model_fields.items() if "int" in str(field.annotation)} == cli._NUMBERS


def test_tasks_are_listed_and_shown(call, study_file, tmp_path):
    code, printed, _ = call("tasks")
    assert code == 0
    assert all(f"{name} " in printed for name in builtin_tasks())
    code, printed, _ = call("tasks", "show", tmp_path / "colours.yaml", "--shots", 2)
    assert code == 0
    assert printed.count("Thing: ") == 3
    assert "' Red', ' Green', ' Blue'" in printed
    assert "one prompt at k = 2, and its right label" in printed
    code, printed, _ = call("tasks", "show", tmp_path / "colours.yaml")
    task = Task.load(tmp_path / "colours.yaml")
    assert f"one prompt at k = {task.shots}, and its right label" in printed


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["plan", "--sets", "many"], 2, "--sets is 'many'; give a whole number"),
        (["plan", "--task", "agnews"], 2, "there is no task 'agnews'; built in: ag_news, mini_news"),
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
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "from_pretrained", interrupted)
    code, _, complaint = call("run", study_file, "--out", tmp_path / "run")
    assert code == 3
    assert "the same command continues" in complaint
    monkeypatch.undo()
    assert call("run", study_file, "--out", tmp_path / "run")[0] == 0


def test_a_termination_is_an_interrupt():
    script = (
        "import os, signal, sys\n"
        "from iclperm import cli, runner\n"
        "runner.run = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)\n"
        "cli.main(['run', '--out', 'nowhere'])\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "the same command continues" in done.stderr


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory.\nTried to allocate 2 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_too_little_memory_is_resumable(call, monkeypatch, error):
    def full(*_, **__):
        raise error

    monkeypatch.setattr(runner, "run", full)
    code, _, complaint = call("run", "--out", "nowhere")
    assert code == 3
    assert complaint.startswith("error: out of memory; what is finished is kept")
    assert "--memory-budget" in complaint
    assert complaint.count("\n") == 1


def test_progress_is_told_beside_the_results(call, study_file, tmp_path):
    _, printed, told = call("run", study_file, "--out", tmp_path / "run")
    assert "scored 1 of 1 parts" in told
    assert "scored" not in printed.replace("is scored with", "")


def test_a_folder_that_refuses_figures_hides_no_result(call, study_file, tmp_path, monkeypatch):
    out = tmp_path / "run"
    assert call("run", study_file, "--out", out)[0] == 0
    write_report = Run.write_report

    def refused(run, folder=None):
        if folder is None:
            with writable(run.folder):
                raise PermissionError(13, "Permission denied")
        return write_report(run, folder)

    monkeypatch.setattr(Run, "write_report", refused)
    code, printed, complaint = call("report", out)
    assert code == 0
    assert "Order against selection" in printed
    refusal = f"note: no figures: cannot write to {out}: permission denied; --out names a folder for them\n"
    assert complaint == refusal
    code, printed, complaint = call("report", out, "--json")
    assert (code, json.loads(printed)["files"]) == (0, [])
    code, printed, complaint = call("report", out, "--out", tmp_path / "elsewhere")
    assert (code, complaint) == (0, "")
    assert (tmp_path / "elsewhere/report.json").is_file()
    assert f"  {tmp_path / 'elsewhere'}: heatmap.png" in printed
    code, printed, complaint = call("run", study_file, "--out", out)
    assert code == 3
    assert "Order against selection" in printed
    assert complaint.startswith("error: cannot write to")


def test_a_report_folder_asked_for_must_be_writable(call, study_file, tmp_path):
    assert call("run", study_file, "--out", tmp_path / "run")[0] == 0
    (tmp_path / "file").write_text("x")
    code, _, complaint = call("report", tmp_path / "run", "--out", tmp_path / "file")
    assert (code, complaint[:6]) == (3, "error:")


def test_the_bundled_model_is_not_trusted_with_another_task(call, study_file, tmp_path):
    foreign = "the bundled model only knows its own headlines (mini_news); what it answers on colours says little"
    assert foreign not in call("plan", study_file)[1]
    assert foreign in call("plan", study_file, "--model", "demo")[1]
    assert foreign in call("run", study_file, "--model", "demo", "--out", tmp_path / "run")[1]
    assert "bundled" not in call("plan", "--sets", 2, "--permutations", 2, "--queries", 8)[1]


def test_repeated_rows_are_told(call, study_file, tmp_path):
    train, test = make_rows(1, 60), make_rows(2, 30)
    write_rows(tmp_path / "train.jsonl", [*train, train[0], {**train[1], "label": train[2]["label"]}])
    write_rows(tmp_path / "test.jsonl", [*test, train[3]])
    code, printed, _ = call("run", study_file, "--out", tmp_path / "run")
    assert code == 0
    assert "note: 2 rows of the data repeat another row and were left out, 1 of them under another label" in printed
    assert "note: 1 query rows repeat a training row (or a test row) and were left out" in printed
    planned = call("plan", study_file)[1]
    assert "note: 2 rows of the data repeat another row and were left out, 1 of them under another label" in planned
    assert "note: 1 query rows repeat a training row (or a test row) and were left out" in planned


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
    for expected in (
        "The study runs k = 0, 2, 8 demonstrations.",
        "one prompt at k = 2, and its right label",
        "Accuracy at k = 8",
        "Order against selection at k = 8",
        "times fewer",
        "Conclusion",
        "At k = 8, another order of the same demonstrations moves accuracy by",
        "next:",
    ):
        assert expected in printed
    assert printed.index("Conclusion") < printed.index("files:") < printed.index("next:")
    assert "Mean accuracy" not in printed
    assert "nothing to compute" in call("demo", "--out", tmp_path / "demo")[1]
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
    proposed = [
        line[line.index("iclperm ") :].split() for line in capsys.readouterr().out.splitlines() if "  iclperm " in line
    ]
    assert len(proposed) >= 3
    for words in proposed:
        command = cli.cli.commands[words[1]]
        if isinstance(command, click.Group):
            command = command.commands[words[2]]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options


def test_what_the_demo_proposes_has_its_settings(call, tmp_path, monkeypatch):
    small = {"sets": 2, "permutations": 2, "shots": [0, 2, 8], "queries": 8}
    monkeypatch.setattr(cli, "DEMO_SETTING", small)
    _, printed, _ = call("demo", "--out", tmp_path / "demo")
    proposed = [line.split("iclperm ")[1].split() for line in printed.splitlines() if "  iclperm run" in line]
    extended, own = proposed
    assert extended.count("12") == 2
    small_growth = [{"12": "3"}.get(word, word) for word in extended]
    assert json.loads(call(*small_growth, "--json")[1])["sensitivity"]["num_sets"] == 3
    planned = json.loads(call("plan", own[1], "--json")[1])
    assert (planned["num_sets"], planned["shots"], planned["num_queries"]) == (3, [0, 2, 8], 8)


def test_the_demo_fits_a_screen_and_a_half(call, tmp_path, monkeypatch):
    small = {"sets": 3, "permutations": 3, "shots": [0, 1, 2, 4, 8], "queries": 8}
    monkeypatch.setattr(cli, "DEMO_SETTING", small)
    monkeypatch.setenv("COLUMNS", "80")
    _, printed, _ = call("demo", "--out", tmp_path / "demo")
    shown = [line for line in printed.splitlines() if str(tmp_path) not in line]
    assert max(map(len, shown)) <= 80
    assert len(printed.splitlines()) <= 75
    assert "…" not in printed
