"""What a terminal of any width, a pipe and a shell get of the command line."""

import os
import re
import subprocess
import sys
from typing import get_args

import pytest
from rich.cells import cell_len

import iclperm
from iclperm import Study
from iclperm.cli import main as cli
from iclperm.cli import options
from iclperm.study.orderings import ORDER_DESIGNS


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("terminal") / "run"
    iclperm.run(Study(sets=3, permutations=3, shots=[0, 2, 4], queries=24, dev_queries=8), folder)
    return folder


@pytest.fixture
def call(capsys, monkeypatch):
    """Runs the command line in this process, in a pipe of a width; gives exit code, output and complaints."""

    def run(*arguments, columns=None):
        if columns is not None:
            monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as done:
            cli.main([str(argument) for argument in arguments])
        return done.value.code, *capsys.readouterr()

    return run


COMMANDS = (["report", "{}"], ["plan", "{}"], ["status", "{}"], ["verify", "{}"],
            ["tasks"], ["tasks", "show", "mini_news", "--shots", "2"])  # fmt: skip


@pytest.mark.parametrize("columns", [60, 80, 200])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_everything_fits_the_width_and_nothing_is_cut_or_padded(call, finished, command, columns):
    code, printed, _ = call(*(word.format(finished) for word in command), columns=columns)
    assert code == 0
    lines = [line for line in printed.splitlines() if not line.startswith(("  /", "mini_news on demo: ", "digest "))]
    lines = [line for line in lines if str(finished) not in line and not line.startswith("iclperm tasks show NAME")]
    assert len(lines) >= (1 if command[0] == "verify" else 5)
    assert [line for line in lines if cell_len(line) > columns] == []
    assert [line for line in printed.splitlines() if line != line.rstrip()] == []
    assert "…" not in printed


def test_no_color_is_no_colour(call, monkeypatch):
    coloured = "\x1b[1;32m"  # the right label
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert coloured in call("tasks", "show", "mini_news", columns=80)[1]
    monkeypatch.setenv("NO_COLOR", "1")
    shown = call("tasks", "show", "mini_news", columns=80)[1]
    assert not re.search(r"\x1b\[[\d;]*3\d", shown)
    assert "\x1b[1m" in shown


def test_quiet_is_silence_but_for_errors(call, tmp_path):
    sizes = ("--sets", "2", "--permutations", "2", "--shots", "2", "--queries", "8")
    assert call("run", *sizes, "--out", tmp_path / "run", "--quiet") == (0, "", "")
    assert (tmp_path / "run" / "report.json").is_file()
    assert call("report", tmp_path / "run", "-q")[:2] == (0, "")
    assert "Order against selection" in call("report", tmp_path / "run")[1]
    code, printed, complaint = call("run", "--sets", "1", *sizes[2:], "--out", tmp_path / "run", "--quiet")
    assert (code, printed) == (1, "")
    assert complaint.startswith("error: ")


def test_choices_are_those_of_the_study():
    fixed = {}
    for key, field in Study.model_fields.items():
        found = [part for part in (field.annotation, *get_args(field.annotation)) if "Literal" in str(part)[:16]]
        if found and key not in ("shots", "demonstrations"):  # which take lists, too
            fixed[key] = tuple(value for value in get_args(found[-1]) if isinstance(value, str))
    fixed["balance"] = get_args(Study.model_fields["balance"].annotation)
    fixed["design"] = ORDER_DESIGNS  # checked by the study itself
    assert set(fixed) == set(options.CHOICES)
    assert {key: set(words) for key, words in fixed.items()} == {k: set(v) for k, v in options.CHOICES.items()}


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["run", "--scoring", ""], {"loglikelihood", "first_token", "generate"}),
        (["run", "--kind", "se"], {"search", "selection", "sensitivity"}),
        (["report", "x", "--criterion", "dev"], {"dev_accuracy", "dev_log_likelihood"}),
        (["report", "x", "--kind", "conv"], {"convergence"}),
        (["ver"], {"verify"}),
    ],
)
def test_a_shell_completes(words, completed):
    environment = {**os.environ, "_ICLPERM_COMPLETE": "bash_complete", "COMP_CWORD": str(len(words))}
    environment["COMP_WORDS"] = " ".join(["iclperm", *words])
    done = subprocess.run(
        [sys.executable, "-P", "-m", "iclperm"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert {line.partition(",")[2] for line in done.stdout.splitlines()} == completed


@pytest.mark.parametrize("command", ["run", "plan"])
def test_help_is_in_groups(call, command):
    _, printed, _ = call(command, "--help", columns=80)
    headings = [line for line in printed.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Study options:", "Model options:", "Answer options:", "Resource options:", "Options:"]
    for heading, *flags in (
        ("Study options:", "--kind", "--sets", "--shots"),
        ("Model options:", "--model", "--chat"),
        ("Answer options:", "--scoring [loglikelihood|first_token|generate]", "--normalize"),
        ("Resource options:", "--dtype", "--device", "--out"),
        ("Options:", "--json", "--debug", "--help"),
    ):
        section = printed.split(f"\n{heading}\n")[1].split("\n\n")[0]
        assert all(f"  {flag}" in section or f", {flag}" in section for flag in flags), heading
    assert sum(printed.count(f"\n  --{key.replace('_', '-')} ") for key in options.STUDY_KEYS) == len(
        options.STUDY_KEYS
    )
