"""The README's Python runs as it stands, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiny import byte_level_tokenizer, make_model, make_rows

from iclperm.cli import main as cli

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("python")
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert (tmp_path / "runs/mine/FORMAT").is_file()
    assert names["scores"].shape == (3, 2, 4)  # type: ignore[attr-defined]


def test_the_commands_of_the_readme_exist() -> None:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    commands = [line.partition("#")[0].split() for line in lines if line.startswith("iclperm ")]
    assert len(commands) >= 4
    for command in commands:
        names = [word for word in command[1:3] if word.isalpha() and word not in ("demo",)]
        shown = CliRunner().invoke(cli.cli, [*names[: 2 if names[:1] == ["tasks"] else 1], "--help"])
        assert shown.exit_code == 0, command
        for flag in (word for word in command if word.startswith("--")):
            assert flag in shown.output, (command, flag)


def test_own_data_and_own_model_take_the_commands_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "path/to/model", byte_level_tokenizer())
    words = ("negative", "positive")
    rows = [f'"{row["text"]}, again",{words[number % 2]}' for number, row in enumerate(make_rows(1, 60))]
    (tmp_path / "train.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    block = next(block for block in blocks("sh") if "tasks new" in block)
    commands = [line.partition("#")[0].split()[1:] for line in block.splitlines()]
    assert [command[0] for command in commands] == ["tasks", "tasks", "plan", "run", "report"]
    for command in commands:
        with pytest.raises(SystemExit) as done:
            cli.main(command)
        printed = capsys.readouterr()
        assert done.value.code == 0, (command, printed.err)
    assert "Mean accuracy at k = 4" in printed.out
    assert (tmp_path / "runs/reviews/heatmap.svg").is_file()


def test_the_two_set_up_commands_stand_in_the_readme() -> None:
    assert "pip install . && iclperm demo\n" in README
    assert "pip install '.[test]' && pytest\n" in README
