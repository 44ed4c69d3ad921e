"""Every command and every piece of Python in README, docs and CONTRIBUTING is run, or read against what there is.

A page in `RUN` is followed as a user would, in a folder of its own, with fewer sets, orders and queries (`MOST`). What
needs a hub, a server, a GPU, a compiler, another's package or hours is in `READ`, with the reason: its commands are
parsed as the command line does, and its studies are checked. What is in neither place fails.
"""

from __future__ import annotations

import ast
import csv
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from tiny import byte_level_tokenizer, make_model, make_rows

import iclperm
from iclperm import demo
from iclperm.cli import main as cli
from iclperm.cli.arguments import study_of
from iclperm.cli.options import STUDY_KEYS
from iclperm.errors import IclpermError
from iclperm.study.study import Study

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"sh", "python", "yaml", "toml", "text"}
INSTALLS = "installs; .ci/run does"

READ = {
    ("README.md", "pip install . && iclperm demo"): INSTALLS,
    ("README.md", "pip install '.[test]' && pytest"): INSTALLS,
    ("README.md", "pip install '.[hf]'"): "needs the hub",
    ("README.md", "pip install '.[gguf]'"): "installs; tests/test_gguf.py has a file, tests/test_published.py the data",
    ("README.md", "iclperm run --task gsm8k"): "needs the hub and a server",
    ("CONTRIBUTING.md", "python -m venv"): INSTALLS,
    ("CONTRIBUTING.md", "pip install --no-deps"): "compiles, for hours of tests",
    ("docs/start.md", "python -m venv"): INSTALLS,
    ("docs/how/in-a-notebook.md", "pip install"): INSTALLS,
    ("docs/how/through-an-api.md", "pip install '.[api]'"): "needs a server",
    ("docs/how/through-an-api.md", "iclperm run --task mini_news --model gpt"): "needs a server that wants money",
    ("docs/benchmarks.md", "iclperm bench --list"): "minutes to hours; tests/test_bench.py runs the quick one",
    ("docs/performance.md", "iclperm bench"): "hours, and peers in environments of their own",
    ("docs/performance.md", "python benchmarks/generation.py"): "minutes to hours, and peers",
    ("docs/benchmarks.md", "iclperm bench --device cuda"): "asks for a GPU, and builds of peers for it",
    ("docs/gpu.md", "pip install '.[test]' && iclperm doctor"): "installs, and asks for a GPU",
    ("docs/chat.md", "iclperm run --task gsm8k"): "needs the hub and a chat model",
    ("docs/chat.md", "from iclperm.prompts"): "names a task and a tokenizer of the reader's",
    ("docs/comparing.md", "iclperm compare RUN RUN...  "): "runs of the reader's; how/least-sensitive.md compares two",
    ("docs/comparing.md", "iclperm compare RUN RUN... --page"): "likewise",
    ("docs/comparing.md", "iclperm compare RUN RUN --shared"): "likewise; test_comparing.py compares two wordings",
    ("docs/installing.md", "pip install .\n"): INSTALLS,
    ("docs/installing.md", "uv tool install"): INSTALLS,
    ("docs/lm-eval.md", "pip install"): INSTALLS,
    ("docs/comparing.md", 'found = iclperm.compare(["small"'): "runs of the reader's; how/least-sensitive.md has it",
    ("docs/doctor.md", "iclperm doctor"): "tests/test_doctor.py runs it, in small packs",
    ("docs/endpoints.md", "from iclperm.endpoint"): "needs a server",
    ("docs/precision.md", "iclperm run --sets 6"): "tests/test_growing.py plans from a pilot and from components",
    ("docs/scaling.md", "pip install"): "needs a cluster; tests/test_ray_workers.py starts one",
    ("docs/scaling.md", "#!/bin/bash\n#SBATCH"): "needs SLURM",
    ("docs/scaling.md", "kubectl"): "needs Kubernetes; tests/test_kuberay.py reads the manifest",
    ("docs/scaling.md", "git clone"): "needs a network; tests/test_kuberay.py runs the check on a small schema",
    ("docs/scaling.md", "nice python benchmarks/balance.py"): "many minutes; tests/test_balance.py has its parts",
    ("docs/scaling.md", "python benchmarks/workers.py"): "minutes; its figure wants quiet cores",
    ("docs/scaling.md", "nice python benchmarks/scale.py"): "minutes to hours; tests/test_scale.py runs its stages",
    ("docs/scaling.md", "iclperm export runs/reviews"): "needs a bucket; tests/test_remote.py has one",
    ("docs/scaling.md", "python benchmarks/long_paths.py"): "many minutes, beside a model",
    ("docs/extending.md", "# more_kinds/__init__.py"): "a package: tests/test_extending.py installs and runs it",
    ("docs/extending.md", "# more_kinds/extremes.py"): "likewise",
    ("docs/extending.md", "# more_kinds/rematch.py"): "likewise",
    ("docs/extending.md", "iclperm run --kind extremes"): "likewise",
    ("docs/models.md", "MODEL=Qwen"): "needs the hub, a GPU and hours",
    ("docs/models.md", "iclperm run --kind curve"): "needs the hub, a GPU and hours",
    ("docs/reliability.md", "python benchmarks/faults.py"): "minutes to hours; tests/test_faults.py runs its parts",
    ("docs/serve.md", "pip install"): "waits for requests; tests/test_server.py runs a study through it",
    ("docs/statistics.md", "iclperm stats answers.npy"): "a file of the reader's; tests/test_stats_files.py reads such",
    ("docs/studies.md", "iclperm run --task gsm8k"): "needs the hub",
    ("docs/studies.md", "iclperm prompt RUN"): "runs of the reader's; how/best-prompt.md prints some",
    ("docs/studies/calibration.md", "run = iclperm.run"): "tests/test_study_pages.py runs it",
    ("docs/studies/convergence.md", "found = run.findings"): "tests/test_study_pages.py runs it",
    ("docs/studies/curve.md", "run = iclperm.run"): "tests/test_study_pages.py runs it",
    ("docs/studies/features.md", "from iclperm.studies"): "tests/test_study_pages.py runs it",
    ("docs/studies/features.md", "iclperm report runs/curve"): "a run of another page",
    ("docs/studies/search.md", "run = iclperm.run"): "tests/test_study_pages.py runs it",
    ("docs/studies/selection.md", "from iclperm.studies"): "arrays and runs of the reader's",
    ("docs/studies/transfer.md", "from iclperm.studies"): "arrays and runs of the reader's",
    ("docs/tasks.md", "iclperm tasks"): "needs the hub; start.md makes a task, tests/test_cli.py a commented one",
    ("docs/tasks.md", "hf download"): "needs the hub",
    ("docs/tasks.md", "# arXiv 2511.09700"): "needs the hub, a GPU and hours",
}  # fmt: skip
"""Blocks that are read and not run, by page and beginning, and why."""

MOST = {
    "--sets": 2,
    "--permutations": 3,
    "--shots": 4,
    "--queries": 8,
    "--dev-queries": 8,
    "--set": 1,
    "--permutation": 2,
}
"""What a command of the pages may name here; one that lets a run grow may name one more."""
NAMED = ("--sets", "--permutations", "--queries")
"""What every study is given."""
FOREIGN = {"extremes", "rematch"}
"""Kinds of the package that docs/extending.md shows."""


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str

    @property
    def reason(self) -> str | None:
        """Why it is only read; None where it is run."""
        found = [why for (page, start), why in READ.items() if page == self.page and self.text.startswith(start)]
        assert len(found) <= 1, f"{self.page}: {self.text!r} is in READ more than once"
        return found[0] if found else None


def blocks(path: Path) -> Iterator[Block]:
    page = path.relative_to(ROOT).as_posix()
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(encoding="utf-8"), re.DOTALL | re.M):
        yield Block(page, language, text)


BLOCKS = [block for path in PAGES for block in blocks(path)]
COMMANDS = [block for block in BLOCKS if block.language == "sh"]
CODE = [block for block in BLOCKS if block.language == "python"]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command in a piece of shell, comments, assignments and the shell's own words left out."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in (";", "&&", "||", "|"):
                if words and words[0] not in ("for", "done"):
                    yield words
                words = []
            elif word != "do" and (words or not re.match(r"[A-Z_]+=", word)):
                words.append(word)


def own_files(folder: Path) -> None:
    """What the README calls path/to/model, and the file of a user: a random model and 60 rows."""
    make_model(folder / "path/to/model", byte_level_tokenizer())
    with (folder / "train.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        rows.writerows([row["text"], ("negative", "positive")[i % 2]] for i, row in enumerate(make_rows(1, 60)))


def two_models(folder: Path) -> None:
    """The bundled model, and a copy of it."""
    for name in ("small", "large"):
        shutil.copytree(demo.model_path(), folder / "path/to" / name)


def a_run(folder: Path) -> None:
    """A finished run, as small as one can be that has a curve and can be searched."""
    study = Study(sets=3, permutations=3, shots=[0, 2, 4], queries=8, dev_queries=8)
    iclperm.run(study, folder / "runs/mine")


def nothing(folder: Path) -> None:
    """A page that starts from an empty folder."""


def a_grid(folder: Path) -> None:
    """The grid file that the page shows."""
    page = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```yaml\n(# grid\.yaml\n.*?)```", page, re.DOTALL)
    (folder / "grid.yaml").write_text(shown, encoding="utf-8")


def a_task_of_the_harness(folder: Path) -> None:
    """The three files that the page shows."""
    page = (ROOT / "docs/lm-eval.md").read_text(encoding="utf-8")
    for name, shown in re.findall(r"`([\w.]+)`:\n\n```\w+\n(.*?)```", page, re.DOTALL):
        (folder / name).write_text(shown, encoding="utf-8")


RUN: dict[str, tuple[Callable[[Path], None], Sequence[str]]] = {
    "README.md": (own_files, ("runs/reviews/heatmap.svg", "runs/reviews/report.html", "runs/mine/FORMAT")),
    "docs/python.md": (a_run, ("heat_map.pdf",)),
    "docs/scaling.md": (
        a_grid,
        ("runs/workers/report.json", "runs/threads/report.json", "runs/grid/compare/curve/compare.html"),
    ),
    "docs/start.md": (nothing, ("headlines.yaml", "shared/report.html", "shared-without-texts/report.html")),
    "docs/how/order-or-choice.md": (nothing, ("runs/first/report.html",)),
    "docs/how/how-many.md": (nothing, ("runs/curve/report.html", "runs/several/report-curve/report.html")),
    "docs/how/best-prompt.md": (nothing, ("prompt.txt", "prompt.py", "runs/rec/prompt.json", "runs/rec/report.html")),
    "docs/how/in-a-notebook.md": (own_files, ("heatmap.pdf", "figure.svg", "runs/notebook/report.html")),
    "docs/embedding.md": (nothing, ()),
    "docs/retrieved.md": (nothing, ("runs/retrieved/report.html",)),
    "docs/lm-eval.md": (a_task_of_the_harness, ()),
    "docs/how/least-sensitive.md": (two_models, ("comparison.html", "sensitivity.tex", "effects.pdf")),
}
"""Pages that are followed: what lies in the folder before, and some files that lie there afterwards."""
BESIDE = re.compile(r"^iclperm lm-eval|^ *(?:from|import) (?:dspy|inspect_ai|lm_eval|optuna)\b", re.MULTILINE)
"""What blocks say that need other packages, whose own warnings are not ours."""


def small(arguments: list[str]) -> list[str]:
    """The command with small numbers in place of its own."""
    grows = "--extend" in arguments
    least = 10 if arguments[0] == "recommend" else 0  # queries, of which it wants some
    made = list(arguments)
    for place, flag in enumerate(arguments):
        if flag in MOST and arguments[place + 1].isdecimal():
            made[place + 1] = str(min(int(arguments[place + 1]), max(MOST[flag] + grows, least)))
    if arguments[0] in ("run", "plan") and not grows:
        made += [word for flag in NAMED if flag not in arguments for word in (flag, str(MOST[flag]))]
    return made


@pytest.mark.parametrize("page", RUN)
def test_a_page_can_be_followed(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    prepare, left = RUN[page]
    prepare(tmp_path)
    names: dict[str, Any] = {}
    followed = [block for block in COMMANDS + CODE if block.page == page and block.reason is None]
    absent = []
    for block in sorted(followed, key=BLOCKS.index):
        with warnings.catch_warnings():
            if found := BESIDE.search(block.text):
                warnings.simplefilter("ignore")
                package = found[0].split()[1].replace("-", "_")
                if importlib.util.find_spec(package) is None:
                    absent.append(package)
                    continue
                if package == "lm_eval":
                    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
            if block.language == "python":
                exec(compile(block.text, page, "exec", dont_inherit=True), names)  # its own future
                continue
            for words in commands(block.text):
                assert words[0] == "iclperm", f"{page}: {words} is run by nobody"
                with pytest.raises(SystemExit) as done:
                    cli.main(small(words[1:]))
                printed = capsys.readouterr()
                assert done.value.code == 0, (words, printed.err)
                assert printed.out or "--out" in words, words
    for name in left:
        assert (tmp_path / name).is_file(), f"{page} leaves no {name}"
    if absent:
        pytest.skip(f"not installed: {', '.join(absent)}; all else of {page} was followed")


def test_every_block_has_its_place() -> None:
    assert len(COMMANDS) > 20
    for block in BLOCKS:
        assert block.language in LANGUAGES, f"{block.page}: {block.text!r} is {block.language or 'nothing'}"
    for block in COMMANDS + CODE:
        assert block.reason or block.page in RUN, f"{block.page}: {block.text!r} is neither run nor in READ"
    used = {key for key in READ for block in COMMANDS + CODE if key[0] == block.page and block.text.startswith(key[1])}
    assert used == set(READ), "READ has what no page has"
    for path in PAGES:
        prose = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
        hidden = re.findall(r"^(?: {4}|\t)\s*(?:\$ )?(?:iclperm|pip|python) .*", prose, re.M)
        assert not hidden, f"{path.name} has commands outside a block of sh: {hidden}"


@pytest.mark.parametrize("page", sorted({block.page for block in COMMANDS}))
def test_the_commands_of_a_page_are_commands(page: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for words in (words for block in COMMANDS if block.page == page for words in commands(block.text)):
        read(words, extras)


def read(words: list[str], extras: dict[str, Any]) -> None:
    """Fails where a command cannot be called so: an option, value, script, file or extra is not there."""
    program, *arguments = words
    if program == "iclperm":
        check_call(arguments)
    elif program == "pip":
        named = re.findall(r"\[([\w,]+)\]", " ".join(arguments))
        assert {name for group in named for name in group.split(",")} <= set(extras), words
    elif program == "python" and arguments[0].endswith(".py"):
        script = with_its_modules(ROOT / arguments[0])
        for flag in (word for word in arguments if word.startswith("--")):
            assert f'"{flag}"' in script, (words, flag)
    elif program in ("pytest", "ruff"):
        for path in (word for word in arguments if "/" in word):
            assert (ROOT / path).exists(), (words, path)


def with_its_modules(path: Path) -> str:
    """The text of a script and of the modules of the repository that it imports."""
    script = path.read_text(encoding="utf-8")
    names = re.findall(r"^ *(?:from|import) ([\w.]+)", script, re.M)
    files = [place / f"{name.replace('.', '/')}.py" for name in names for place in (path.parent, ROOT / "tests")]
    return "".join([script, *(file.read_text(encoding="utf-8") for file in files if file.is_file())])


def check_call(arguments: Sequence[str]) -> None:
    """Parses a call of iclperm and checks the study that it names; raises what the command line would show."""
    command: click.Command = cli.cli
    while isinstance(command, click.Group) and arguments and arguments[0] in command.commands:
        command, arguments = command.commands[arguments[0]], arguments[1:]
    context = command.make_context("iclperm", list(arguments))
    if isinstance(command, click.Group) and arguments:
        command.resolve_command(context, list(arguments))
    given = context.params
    flags = {key: text for key, text in given.items() if key in STUDY_KEYS and text is not None}
    if command.name in ("run", "plan") and flags.get("kind") not in FOREIGN:
        study_of(None, flags)


@pytest.mark.parametrize(
    "wrong",
    ["run --no-such-option 1", "run --scoring sometimes", "run --sets many", "report", "report RUN --normalize loud",
     "runn", "tasks nwe", "run --kind cruve", "run --endpoint base_url=http://localhost,prize=1"],
)  # fmt: skip
def test_a_wrong_command_is_found(wrong: str) -> None:
    with pytest.raises((click.ClickException, IclpermError)):
        check_call(wrong.split())


def test_the_shell_of_the_pages_is_taken_apart() -> None:
    text = (
        "A=1 for x in a b; do\n  iclperm run --out 'a b' \\\n --sets 2  # sets\ndone\npip install . && iclperm demo\n"
    )
    assert [*commands(text)] == [
        ["iclperm", "run", "--out", "a b", "--sets", "2"], ["pip", "install", "."], ["iclperm", "demo"]
    ]  # fmt: skip


@pytest.mark.parametrize("block", CODE, ids=lambda block: f"{block.page}-{block.text[:24]!r}")
def test_the_python_of_the_pages_names_what_there_is(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "iclperm":
            module = import_module(node.module or "")
            for name in node.names:
                assert hasattr(module, name.name) or importlib.util.find_spec(f"{node.module}.{name.name}"), name.name
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "iclperm":
            assert hasattr(import_module("iclperm"), node.attr), f"{block.page}: iclperm.{node.attr}"


def test_the_yaml_of_the_pages_is_yaml_and_its_studies_are_studies() -> None:
    studies = 0
    for block in (block for block in BLOCKS if block.language == "yaml"):
        content = yaml.safe_load(block.text)
        if {"kind", "endpoint"} & set(content):
            studies += bool(Study(**content))
    assert studies >= 5


@pytest.mark.parametrize("page", PAGES[:2], ids=lambda path: path.stem)
def test_the_links_of_what_is_no_page_of_the_site_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    assert len(links) >= 2
    for link in links:
        assert (page.parent / link).exists(), f"{page.name} leads to {link}, which is not there"


def test_a_command_is_made_small() -> None:
    assert small(["run", "--sets", "9", "--shots", "0,8"]) == [
        "run", "--sets", "2", "--shots", "0,8", "--permutations", "3", "--queries", "8"
    ]  # fmt: skip
    assert small(["run", "runs/a", "--sets", "9", "--extend"]) == ["run", "runs/a", "--sets", "3", "--extend"]
    assert small(["prompt", "runs/a", "--set", "7"]) == ["prompt", "runs/a", "--set", "1"]


def test_the_two_set_up_commands_stand_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "pip install . && iclperm demo\n" in readme
    assert "pip install '.[test]' && pytest\n" in readme


def test_the_table_of_extras_has_all_of_them() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    table = re.findall(r"^\| (`.*?`) \|", (ROOT / "docs/installing.md").read_text(encoding="utf-8"), re.M)
    assert sorted(name for cell in table for name in re.findall(r"`([\w-]+)`", cell)) == sorted(extras)


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    for name in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(name)
    command = [sys.executable, "-P", "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    reference = (tmp_path / "site/api/index.html").read_text(encoding="utf-8")
    for name in ("Engine.loglikelihood", "stats.variance_components"):
        assert f'id="iclperm.{name}"' in reference
    assert all(f'id="iclperm.Run.{name}"' in reference for name in ("prompt", "to_pandas", "to_xarray"))
    for name in set(iclperm.__all__) - {"__version__"}:
        assert f'id="iclperm.{name}"' in reference, f"docs/api.md lacks {name}"
    gallery = (tmp_path / "site/gallery/index.html").read_text(encoding="utf-8")
    shown = re.findall(r'<img[^>]* src="([^"]+)"', gallery)
    assert len(shown) >= 6
    assert all((tmp_path / "site/gallery" / name).resolve().is_file() for name in shown)
