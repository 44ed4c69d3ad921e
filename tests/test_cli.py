"""The command line: one call of the API, one line for an error, four exit codes.

More than 600 lines because every command is called through the same fixtures: one model, one task, one console.
"""

import csv
import errno
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tiny import LABELS, byte_level_tokenizer, make_model, make_rows, make_task, write_rows

from iclperm import Study, api
from iclperm.base.files import writable
from iclperm.cli import arguments, commands, options, terminal
from iclperm.cli import main as cli
from iclperm.engine import Engine
from iclperm.errors import ConfigError, OutOfMemory
from iclperm.runs import answering
from iclperm.runs.limits import WorkLimits
from iclperm.studies.report import Run
from iclperm.tasks.task import Task, builtin_tasks

COMMANDS = (
    "bench",
    "compare",
    "demo",
    "doctor",
    "export",
    "grid",
    "lm-eval",
    "models",
    "plan",
    "prompt",
    "recommend",
    "report",
    "run",
    "serve",
    "stats",
    "status",
    "tasks",
    "verify",
)


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

    def run(*arguments, limits=None):
        with pytest.raises(SystemExit) as exit_:
            cli.main([str(argument) for argument in arguments], limits=limits)
        printed = capsys.readouterr()
        return exit_.value.code, printed.out, printed.err

    return run


@pytest.fixture
def demo(capsys):
    """The demo of other sizes; gives what `call` gives."""

    def run(out, *, as_json=False, **sizes):
        code = commands.demo(out, as_json=as_json, choices=sizes)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_a_study_file_to_a_report(call, study_file, tmp_path):
    out = tmp_path / "run"
    code, printed, _ = call("run", study_file, "--out", out)
    assert code == 0
    assert "computed in" in printed
    assert "Order against selection" in printed
    assert "Accuracy against k" in printed
    figures = "heatmap.png, heatmap.svg, curve.png, curve.svg, confusion.png, confusion.svg"
    assert f"  {out}: {figures}, report.json\n" in printed
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


def test_a_plan_tells_the_memory_by_part(call, study_file):
    code, printed, _ = call("plan", study_file, "--memory-budget", "50%", "--json")
    assert code == 0
    estimate = json.loads(printed)["estimate"]
    parts = estimate["memory"]
    assert sum(parts.values()) < estimate["memory_budget"]
    assert parts["weights"] == estimate["weight_bytes"]
    code, printed, _ = call("plan", study_file, "--memory-budget", "4GiB")
    assert code == 0
    assert "in packs of 4096 tokens (budget 4.00 GiB)" in " ".join(printed.split())
    code, _, said = call("plan", study_file, "--memory-budget", "4 barrels")
    assert code == 2
    assert "'memory_budget' is '4 barrels': give bytes, as" in said


def test_every_key_of_a_study_is_a_flag():
    assert set(options.STUDY_KEYS) == set(Study.model_fields)
    numbers = {key for key, field in Study.model_fields.items() if "int" in str(field.annotation)}
    assert numbers - {"memory_budget", "demonstrations", "endpoint"} == options.NUMBERS


def test_a_tolerance_is_a_flag():
    given = arguments.value_of("tolerance", "0.05")
    assert Study(kind="search", budget="adaptive", dev_queries=9, tolerance=given).tolerance == 0.05
    with pytest.raises(ConfigError, match="--tolerance is '5 points'; give a number"):
        arguments.value_of("tolerance", "5 points")


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("http://localhost:8000/v1", {"base_url": "http://localhost:8000/v1"}),
        (
            "base_url=http://localhost/v1,max_cost=2.5,prices.input=0.1,prices.output=1,temperature=null",
            {
                "base_url": "http://localhost/v1",
                "max_cost": 2.5,
                "prices": {"input": 0.1, "output": 1},
                "temperature": None,
            },
        ),
    ],
)
def test_an_endpoint_is_a_flag(text, endpoint):
    assert arguments.value_of("endpoint", text) == endpoint
    assert Study(model="m", endpoint=endpoint).endpoint.model == "m"


def test_the_bill_of_an_endpoint_is_planned_and_nothing_is_sent(call, study_file):
    where = "base_url=http://127.0.0.1:1/v1,api=completions,prices.input=1000,prices.output=1000"
    keys = ("--endpoint", where, "--model", "some-model")
    code, printed, said = call("plan", "--queries", "8", "--sets", "2", "--permutations", "2", *keys)
    assert (code, said) == (0, "")
    words = " ".join(printed.split())
    assert "requests 128 " in words  # 2 x 2 contexts, 8 queries, 4 labels
    assert "bill at most about " in words
    code, printed, _ = call("plan", "--queries", "8", "--sets", "2", "--permutations", "2", *keys, "--json")
    assert json.loads(printed)["bill"]["requests"] == 128


def test_the_papers_models_are_told(call):
    code, printed, _ = call("models")
    assert code == 0
    assert "`Qwen/Qwen2.5-0.5B`" in printed
    code, printed, _ = call("models", "--json", "--rate", "100")
    assert len(json.loads(printed)) == 14


def test_generated_answers_are_shown_reported_and_exported(call, tmp_path):
    folder = tmp_path / "run"
    keys = ("--task", "gsm8k", "--data", Path(__file__).parent / "fixtures", "--sets", "2", "--permutations", "2")
    code, printed, _ = call("run", *keys, "--shots", "0,2", "--queries", "4", "--max-new-tokens", "6", "--out", folder)
    assert code == 0
    assert "gsm8k on demo" in printed
    assert ", generated" in printed
    assert "Generated answers" in printed
    code, printed, _ = call("report", folder, "--kind", "generation", "--unparsed", "drop")
    assert code == 0
    assert (folder / "report-generation-drop" / "report.json").is_file()
    code, *_ = call("export", folder, "--out", tmp_path / "answers.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert {"text", "rule", "finish", "num_tokens", "logprob", "prediction", "correct"} <= rows[0].keys()
    code, printed, _ = call("tasks", "show", "gsm8k", "--data", keys[3], "--shots", "1")
    assert code == 0
    assert "the model writes on" in printed
    code, *_ = call("tasks", "new", "mine", "--generated", "--out", tmp_path / "mine.yaml")
    assert "answer:" in (tmp_path / "mine.yaml").read_text()


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
        (["plan", "--task", "agnews"], 2, "there is no task 'agnews'; did you mean 'ag_news'? built in: ag_news"),
        (["plan", "--kind", "curves"], 2, "a study's key 'kind' is 'curves': input should be 'sensitivity'"),
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--setz", 3], "no such option '--setz'"),
        (["run"], "there is no run folder; name one with --out, or with the study's key 'out'"),
        (["rnu"], "no such command 'rnu'"),
        (["report"], "missing argument 'FOLDER'; iclperm report --help tells more"),
        (["export", "run"], "missing option '--out'; iclperm export --help tells more"),
        (["tasks", "show", "mini_news", "--query", "-1"], "invalid value for '--query': -1 is not in the range"),
        (["report", "run", "--normalize", "median"], "invalid value for '--normalize': 'median' is not one of 'sum', "),
    ],
)
def test_a_usage_error_is_one_line_and_a_code(call, arguments, message):
    code, printed, complaint = call(*arguments)
    assert (code, printed) == (2, "")
    assert complaint.startswith(f"error: {message}")
    assert complaint.count("\n") == 1


def test_without_a_command_there_is_help(call):
    assert call()[2].startswith("Usage: iclperm")
    code, printed, complaint = call("--help")
    assert (code, complaint) == (0, "")
    assert printed.startswith("Usage: iclperm")


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
        "from iclperm import api\n"
        "from iclperm.cli import main as cli\n"
        "api.run = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)\n"
        "cli.main(['run', '--out', 'nowhere'])\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "the same command continues" in done.stderr


def test_a_termination_of_forked_workers_is_theirs_alone():
    """lm-evaluation-harness bootstraps in a pool of forked processes, and ends it by SIGTERM."""
    script = (
        "import multiprocessing, os, signal, sys, time\n"
        "from iclperm import api\n"
        "from iclperm.cli import main as cli\n"
        "def run(*_, **__):\n"
        "    with multiprocessing.get_context('fork').Pool(2) as pool:\n"
        "        assert pool.map(abs, [-1, -2]) == [1, 2]\n"
        "        workers = list(pool._pool)\n"
        "        pool.apply_async(time.sleep, [60])\n"
        "        time.sleep(0.2)\n"
        "    print(min(worker.exitcode for worker in workers), file=sys.stderr)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "api.run = run\n"
        "cli.main(['run', '--out', 'nowhere'])\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False)
    said = ["-15", "stopped; what is finished is kept, the same command continues"]
    assert (done.returncode, [line for line in done.stderr.splitlines() if line]) == (3, said)


def numpys_error() -> MemoryError:
    with pytest.raises(MemoryError) as raised:
        np.empty(1 << 59)
    return raised.value


MEMORY_ERRORS = {
    "Python": MemoryError(),
    "NumPy": numpys_error(),
    "Arrow": pa.ArrowMemoryError("malloc of size 8 failed"),
    "system": OSError(errno.ENOMEM, "Cannot allocate memory"),
    "torch": type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory.\nTried to allocate 2 GiB"),
    "host": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    "device": RuntimeError("CUDA error: out of memory"),
    "products": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "ours": OutOfMemory("unit 3 does not fit in memory; use fewer shots"),
}


@pytest.mark.parametrize("error", MEMORY_ERRORS.values(), ids=MEMORY_ERRORS)
@pytest.mark.parametrize(
    ("command", "called"),
    [(["run", "--out", "nowhere"], "run"), (["plan"], "plan"), (["report", "nowhere"], "open_run"), (["demo"], "run")],
    ids=lambda given: given[0] if isinstance(given, list) else "",
)
def test_too_little_memory_is_resumable(call, monkeypatch, command, called, error):
    def full(*_, **__):
        raise error

    monkeypatch.setattr(api, called, full)
    code, _, complaint = call(*command)
    assert code == 3
    advice = str(error) if isinstance(error, OutOfMemory) else "out of memory; what is finished is kept"
    assert complaint.startswith(f"error: {advice}")
    assert isinstance(error, OutOfMemory) or "--memory-budget" in complaint
    assert complaint.count("\n") == 1


def test_progress_is_told_beside_the_results(call, study_file, tmp_path):
    _, printed, told = call("run", study_file, "--out", tmp_path / "run")
    first, last = told.splitlines()
    assert re.search(r"^model\d* on colours: scoring, 0 of about [\d,]+ tokens, 0 of 1 parts$", first)
    assert re.search(r": scoring, ([\d,]+) of about \1 tokens, 1 of 1 parts$", last)
    assert "scoring" not in printed


def test_a_folder_that_refuses_figures_hides_no_result(call, study_file, tmp_path, monkeypatch):
    out = tmp_path / "run"
    assert call("run", study_file, "--out", out)[0] == 0
    write_report = Run.write_report

    def refused(run, folder=None, kind=None):
        if folder is None:
            with writable(run.folder):
                raise PermissionError(13, "Permission denied")
        return write_report(run, folder, kind)

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


def test_two_reports_at_once_lose_nothing(call, study_file, tmp_path):
    out = tmp_path / "run"
    assert call("run", study_file, "--out", out)[0] == 0
    names = ("heatmap.png", "heatmap.svg", "curve.png", "curve.svg", "report.json")
    whole = {name: (out / name).read_bytes() for name in names}
    before = sorted(path.name for path in out.iterdir())
    for name in names:
        (out / name).unlink()
    script = "import sys; from iclperm.cli.main import main; main(sys.argv[1:])"
    command = [sys.executable, "-P", "-c", script, "report", str(out)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as first, subprocess.Popen(command, **pipes) as second:
        printed = [process.communicate() for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0)
    assert printed[0] == printed[1]
    assert printed[0][1] == ""
    assert {name: (out / name).read_bytes() for name in names} == whole
    assert sorted(path.name for path in out.iterdir()) == sorted([*before, "report.html"])


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

    monkeypatch.setattr(api, "plan", broken)
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


def test_every_command_is_known_to_these_tests():
    assert tuple(sorted(cli.cli.commands)) == COMMANDS


HELPS = [[], *([name] for name in COMMANDS if name != "lm-eval"), ["tasks", "show"], ["tasks", "new"]]  # its own help


@pytest.mark.parametrize("command", HELPS)
def test_help_loads_nothing_heavy(command):
    script = (
        "import sys; from iclperm.cli import main as cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit as done: assert done.code == 0, done.code\n"
        "heavy = {'torch', 'numba', 'numpy', 'transformers', 'matplotlib', 'scipy', 'pyarrow', 'pydantic', 'rich', "
        "'openai', 'jinja2', 'yaml', 'pandas', 'iclperm.api', 'iclperm.cli.commands'}\n"
        "heavy &= set(sys.modules)\n"
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


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "iclperm", "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: iclperm [OPTIONS] COMMAND")
    done = subprocess.run([sys.executable, "-m", "iclperm", "nonsense"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()) == (
        2,
        ["error: no such command 'nonsense'; iclperm --help tells more"],
    )


def test_the_demo_is_the_study_that_it_says(call, tmp_path, monkeypatch):
    def stopped(study, out, *, progress):
        assert (study, out) == (Study(**commands.DEMO_STUDY), tmp_path / "demo")
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "run", stopped)
    code, printed, _ = call("demo", "--out", tmp_path / "demo")
    assert code == 3
    assert "The study runs k = 0, 1, 2, 4, 8 demonstrations." in printed


def test_the_demo_runs_and_runs_again(demo, tmp_path):
    small = {"sets": 3, "permutations": 3, "shots": [0, 2, 8], "queries": 24}
    code, printed, complaint = demo(tmp_path / "demo", **small)
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
    assert "nothing to compute" in demo(tmp_path / "demo", **small)[1]
    for name in ("heatmap.png", "heatmap.svg", "curve.png", "curve.svg", "report.json"):
        assert (tmp_path / "demo" / name).is_file()
    assert list((tmp_path / "demo/items").glob("*.parquet"))
    code, printed, _ = demo(tmp_path / "demo", as_json=True, **small)
    assert code == 0
    content = json.loads(printed)
    assert content["run"]["num_parts_resumed"] == content["run"]["num_parts"] > 0
    assert content["run"]["tokens_naive"] > content["run"]["tokens_unique"] == content["run"]["tokens_forwarded"]


def test_a_demo_too_small_for_a_conclusion_says_what_would_suffice(demo, tmp_path):
    _, printed, _ = demo(tmp_path / "demo", sets=2, permutations=2, shots=[2, 8], queries=8)
    told = " ".join(printed[printed.index("Conclusion") :].split())
    assert "Nothing can be concluded from these answers: 2 sets say nothing of other sets;" in told
    assert "8 queries say too little of others" in told
    assert "What would suffice: 3 sets at least, better 10; 3 permutations at least, better 10; 20 queries" in told
    assert "r to quote" not in told


def test_the_demo_only_proposes_commands_that_exist(capsys):
    from rich.console import Console

    terminal.print_next_steps(Console(width=200), Path("iclperm-demo"), most_shots=8)
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


def test_what_the_demo_proposes_has_its_settings(call, demo, tmp_path):
    small = {"sets": 3, "permutations": 3, "shots": [0, 2, 8], "queries": 24}
    _, printed, _ = demo(tmp_path / "demo", **small)
    proposed = [line.split("iclperm ")[1].split() for line in printed.splitlines() if "  iclperm run" in line]
    extended, own = proposed
    assert extended.count("12") == 2
    small_growth = [{"12": "3"}.get(word, word) for word in extended]
    assert json.loads(call(*small_growth, "--json")[1])["sensitivity"]["num_sets"] == 3
    planned = json.loads(call("plan", own[1], "--json")[1])
    assert (planned["num_sets"], planned["shots"], planned["num_queries"]) == (3, [0, 2, 8], 24)


def test_the_demo_fits_a_screen_and_a_half(demo, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, printed, _ = demo(tmp_path / "demo", sets=3, permutations=3, shots=[0, 1, 2, 4, 8], queries=8)
    shown = [line for line in printed.splitlines() if str(tmp_path) not in line]
    assert max(map(len, shown)) <= 80
    assert len(printed.splitlines()) <= 75
    assert "…" not in printed


def run_small(call, study_file, out, *arguments, limits=None):
    code, printed, complaint = call("run", study_file, "--out", out, "--json", *arguments, limits=limits)
    assert code == 0, complaint
    return json.loads(printed)


MANY_PARTS = WorkLimits(unit_tokens=(1, 1))


def stop_after_one_part(monkeypatch):
    """A run of many parts is interrupted when the first is done."""

    def interrupted(done, total):
        if 0 < done < total:
            raise KeyboardInterrupt

    monkeypatch.setattr(commands, "shown_progress", lambda: nullcontext(interrupted))


def test_status_and_verify_of_a_finished_run(call, study_file, tmp_path):
    out = tmp_path / "[/red]run"  # what rich would take for its markup
    digest = run_small(call, study_file, out)["digest"]
    code, printed, complaint = call("status", out)
    assert (code, complaint) == (0, "")
    assert str(out) in printed.replace("\n", "")
    assert "finished" in printed
    assert "1 of 1" in printed
    state = json.loads(call("status", out, "--json")[1])
    assert (state["is_finished"], state["num_parts_done"], len(state["sessions"])) == (True, 1, 1)
    code, printed, complaint = call("verify", out)
    assert (code, complaint) == (0, "")
    assert printed == f"whole, 1 of 1 parts\ndigest  {digest}\n"
    assert json.loads(call("verify", out, "--json")[1])["digest"] == digest


def test_an_unfinished_run_has_a_code_and_its_folder_continues_it(call, study_file, tmp_path, monkeypatch):
    out = tmp_path / "run"
    stop_after_one_part(monkeypatch)
    code, _, complaint = call("run", study_file, "--out", out, limits=MANY_PARTS)
    assert code == 3
    assert "the same command continues" in complaint
    monkeypatch.undo()
    for command, words in (("status", "not finished: run the same study into it"), ("verify", "whole so far, 1 of ")):
        code, printed, _ = call(command, out)
        assert code == 3
        assert words in printed
    for command in (("report", out), ("export", out, "--out", tmp_path / "a.csv")):
        code, printed, complaint = call(*command)
        assert (code, printed, complaint[:7]) == (1, "", "error: ")
        assert complaint.count("\n") == 1
    code, printed, _ = call("run", out, limits=MANY_PARTS)
    assert code == 0
    assert ", 1 of " in printed
    assert "parts found already done" in printed
    digest = json.loads(call("verify", out, "--json")[1])["digest"]
    assert digest == run_small(call, study_file, tmp_path / "unbroken", limits=MANY_PARTS)["digest"]


def test_damage_has_a_code_and_the_next_run_mends_it(call, study_file, tmp_path):
    out = tmp_path / "run"
    digest = run_small(call, study_file, out)["digest"]
    (item,) = (out / "items").iterdir()
    raw = bytearray(item.read_bytes())
    raw[len(raw) // 2] ^= 1
    item.write_bytes(raw)
    code, printed, complaint = call("verify", out)
    assert (code, complaint) == (1, "")
    assert printed.startswith(f"damaged: {item} is damaged")
    assert "the next run sets this aside in quarantine/" in printed
    assert json.loads(call("verify", out, "--json")[1])["digest"] is None
    code, printed, _ = call("run", out)
    assert code == 0
    assert "1 damaged files set aside and computed anew" in printed
    assert (out / "quarantine" / item.name).read_bytes() == raw
    assert json.loads(call("verify", out, "--json")[1])["digest"] == digest


def test_a_damaged_plan_is_mended_from_the_folder_alone(call, study_file, tmp_path):
    out = tmp_path / "run"
    digest = run_small(call, study_file, out)["digest"]
    whole = (out / "plan.json").read_bytes()
    (out / "plan.json").write_bytes(whole[: len(whole) // 2])
    assert call("verify", out)[0] == 1
    assert json.loads(call("run", out, "--json")[1])["digest"] == digest
    assert (out / "plan.json").read_bytes() == whole


def test_a_folder_that_is_no_run_is_not_taken_for_one(call, study_file, tmp_path):
    for command in ("run", "plan"):
        code, printed, complaint = call(command, tmp_path)
        assert (code, printed) == (1, "")
        assert complaint.startswith(f"error: {tmp_path} is not a run folder; give a study file, or the folder")


def test_a_damaged_study_of_a_run_is_not_run_as_another(call, study_file, tmp_path):
    out = tmp_path / "run"
    digest = run_small(call, study_file, out)["digest"]
    whole = (out / "study.yaml").read_bytes()
    for damaged in (whole[:20], whole[: whole.index(b"out:")], b"\xff" + whole):
        (out / "study.yaml").write_bytes(damaged)
        code, printed, complaint = call("run", out)
        assert (code, printed) == (1, "")
        remedy = f"run the study from its own file with --out {out}, which mends the run"
        assert complaint == f"error: {out / 'study.yaml'} is damaged; {remedy}\n"
    assert run_small(call, study_file, out)["digest"] == digest
    assert (out / "study.yaml").read_bytes() == whole


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_every_answer_is_exported(call, study_file, tmp_path, ending):
    run_small(call, study_file, tmp_path / "run")
    target = tmp_path / f"answers.{ending}"
    target.write_text("an older one")
    code, printed, complaint = call("export", tmp_path / "run", "--out", target)
    assert (code, printed, complaint) == (0, f"{target}\n", "")
    rows = list(read_exported(target))
    assert len(rows) == 2 * 3 * 2 * 6
    assert {str(row["shots"]) for row in rows} == {"0", "3"}
    assert {row["split"] for row in rows} == {"test"}


def read_exported(path):
    if path.suffix == ".csv":
        return csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    if path.suffix == ".jsonl":
        return map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return pq.read_table(path).to_pylist()


def test_an_export_of_another_ending_is_refused(call, study_file, tmp_path):
    run_small(call, study_file, tmp_path / "run")
    code, printed, complaint = call("export", tmp_path / "run", "--out", tmp_path / "answers.xlsx")
    assert (code, printed) == (2, "")
    assert complaint.startswith("error: ")
    assert complaint.count("\n") == 1
    assert all(word in complaint for word in ("answers.xlsx", ".csv", ".jsonl", ".parquet"))
    assert not (tmp_path / "answers.xlsx").exists()


def test_a_task_of_ones_own_is_started_and_never_replaced(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, printed, _ = call("tasks", "new", "reviews")
    assert code == 0
    assert printed == "reviews.yaml: put your data beside it, then: iclperm tasks show reviews.yaml\n"
    rows = [f"That was fine {number},{('negative', 'positive')[number % 2]}\n" for number in range(40)]
    (tmp_path / "train.csv").write_text("text,label\n" + "".join(rows))
    assert "Text: That was fine" in call("tasks", "show", "reviews.yaml")[1]
    before = (tmp_path / "reviews.yaml").read_bytes()
    code, printed, complaint = call("tasks", "new", "reviews")
    assert (code, printed) == (2, "")
    assert complaint == "error: reviews.yaml cannot be written: file exists; name another file with --out\n"
    assert (tmp_path / "reviews.yaml").read_bytes() == before
    assert call("tasks", "new", "reviews", "--out", "other.yaml")[0] == 0
    assert (tmp_path / "other.yaml").read_bytes() == before
    code, _, complaint = call("tasks", "new", "../up")
    assert (code, complaint.count("\n")) == (2, 1)
    assert complaint.startswith("error: the task name '../up' must be letters")


def test_the_tokens_of_a_prompt_and_its_labels_are_shown(call, study_file, tmp_path, model):
    code, printed, _ = call("tasks", "show", tmp_path / "colours.yaml", "--model", model, "--shots", 2, "--query", 3)
    assert code == 0
    facts = dict(re.findall(r"^(tokens of the \w+|opens with) +(\S+)", printed, flags=re.MULTILINE))
    assert facts["opens with"] == "<s>"
    of = {name: int(facts[f"tokens of the {name}"]) for name in ("demonstrations", "query", "prompt")}
    assert of["prompt"] == 1 + of["demonstrations"] + of["query"]
    spans = re.findall(r"^' (\w+)' +(\d+):(\d+)", printed, flags=re.MULTILINE)
    assert [word for word, *_ in spans] == ["Red", "Green", "Blue"]
    assert {int(begin) for _, begin, _ in spans} == {of["prompt"]}
    code, printed, complaint = call("tasks", "show", tmp_path / "colours.yaml", "--query", 100)
    assert (code, printed) == (2, "")
    assert complaint == "error: there is no query 100: the data have 30 distinct ones here; give a smaller number\n"


def test_labels_that_look_like_markup_are_shown_as_they_are(call, tmp_path, model):
    labels = ["[red]", "[/red]", "[bold]"]
    path = make_task(tmp_path, labels=dict(zip(LABELS, labels, strict=True)))
    code, printed, complaint = call("tasks", "show", path, "--model", model)
    assert (code, complaint) == (0, "")
    table = printed[printed.index("Labels") :]
    assert all(f"' {label}'" in table for label in labels)


def test_a_run_grows_on_demand(call, study_file, tmp_path):
    out = tmp_path / "run"
    run_small(call, study_file, out)
    code, _, complaint = call("run", out, "--sets", 3)
    assert code == 1
    assert "sets is 2 there and 3 here; add --extend to let it grow" in complaint
    grown = json.loads(call("run", out, "--sets", 3, "--queries", 9, "--extend", "--json")[1])
    assert grown["run"]["num_parts_resumed"] == 1
    assert grown["digest"] == run_small(call, study_file, tmp_path / "a", "--sets", 3, "--queries", 9)["digest"]
    assert "sets 2" in call("status", out)[1]
    assert call("run", out)[0] == 0  # its own study has grown with it


def test_results_of_another_machine_are_mixed_on_demand(call, study_file, tmp_path, monkeypatch):
    out = tmp_path / "run"
    run_small(call, study_file, out)
    monkeypatch.setattr(answering, "processor", lambda: "another processor")
    code, _, complaint = call("run", out, "--sets", 3, "--extend")
    assert code == 1
    assert "accept that with --mixed" in complaint
    code, printed, _ = call("run", out, "--sets", 3, "--extend", "--mixed")
    assert code == 0
    assert "parts come from 2 machines or versions" in " ".join(printed.split())


def test_a_plan_estimates_the_time_without_weights(call, study_file, model, tmp_path):
    folder = tmp_path / "weightless"
    folder.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    code, printed, _ = call("plan", study_file, "--model", folder)
    assert code == 0
    assert re.search(r"estimated time +about \d+ s on this machine \(cpu, float32, ", printed)
    planned = json.loads(call("plan", study_file, "--model", folder, "--json")[1])
    assert planned["estimate"]["seconds"] > 0
    assert planned["disk_bytes"] > 0


def test_a_report_compares_labels_in_another_way(call, study_file, tmp_path):
    run_small(call, study_file, tmp_path / "run")
    for normalize in ("sum", "mean", "bytes"):
        code, printed, _ = call("report", tmp_path / "run", "--normalize", normalize, "--out", tmp_path / normalize)
        assert code == 0
        assert "Mean accuracy" in printed
    contents = {name: json.loads((tmp_path / name / "report.json").read_text()) for name in ("sum", "mean", "bytes")}
    scores = {name: content["sensitivity"]["calibration"]["nll"] for name, content in contents.items()}
    assert scores["sum"] != scores["bytes"]


def test_output_survives_a_terminal_that_lacks_its_signs(study_file, tmp_path):
    write_rows(tmp_path / "test.jsonl", [{**row, "text": "東 " + row["text"]} for row in make_rows(2, 30)])
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    script = "import sys; from iclperm.cli import main as cli; cli.main(sys.argv[1:])"
    command = [sys.executable, "-P", "-c", script, "tasks", "show", str(tmp_path / "colours.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "\\u6771 The " in done.stdout


def test_a_plan_for_a_device_that_is_elsewhere_has_no_estimate(call, study_file, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, printed, _ = call("plan", study_file, "--device", "cuda")
    assert code == 0
    assert "estimated time -" in " ".join(printed.split())
    assert json.loads(call("plan", study_file, "--device", "cuda", "--json")[1])["estimate"] is None


def test_a_run_folder_is_found_again_from_anywhere(call, study_file, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert call("run", study_file, "--out", "run")[0] == 0
    monkeypatch.chdir(tmp_path)
    code, printed, _ = call("run", tmp_path / "here/run/study.yaml")
    assert code == 0
    assert "nothing to compute" in printed
    assert not (tmp_path / "run").exists()
