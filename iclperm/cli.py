"""The command line: parse, one call of the API, print. Nothing heavy is imported for ``--help``."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from iclperm.errors import ConfigError, IclpermError

if TYPE_CHECKING:
    from rich.console import Console

    from iclperm.runner import Progress, Run, StudyPlan
    from iclperm.study import Study

FAILED, USAGE, STOPPED = 1, 2, 3
DEMO_SETTING: dict[str, Any] = {"sets": 10, "permutations": 10, "shots": [0, 1, 2, 4, 8], "queries": 120}
STUDY_KEYS = {
    "kind": "What is studied: sensitivity.",
    "model": "demo, a model folder or a hub id.",
    "revision": "Revision of a hub id.",
    "task": "Built-in task or path of a task file.",
    "sets": "Number of demonstration sets.",
    "permutations": "Number of orders, shared by all sets.",
    "shots": "Number of demonstrations, or several: 0,1,2,4,8.",
    "queries": "Number of test queries.",
    "seed": "Seed of every random choice.",
    "dtype": "auto, float32, bfloat16 or float16.",
    "device": "auto, cpu, cuda, ...",
    "memory_budget": "Bytes that keys and values may take.",
    "on_overlong": "error, or drop the queries that do not fit the context window.",
}
_NUMBERS = frozenset({"sets", "permutations", "shots", "queries", "seed", "memory_budget"})
_SECONDS_BETWEEN_LINES = 5.0

Command = TypeVar("Command", bound=Callable[..., Any])


def main(args: Sequence[str] | None = None) -> None:
    """Entry point; exits with 0 done, 1 failed, 2 usage, 3 stopped and resumable."""
    arguments = list(sys.argv[1:] if args is None else args)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    sys.exit(_run_command(arguments))


def _run_command(arguments: list[str]) -> int:
    try:
        return int(cli.main(arguments, prog_name="iclperm", standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.exceptions.Abort:
        click.echo("stopped; what is finished is kept, the same command continues", err=True)
        return STOPPED
    except Exception as error:
        if "--debug" in arguments:
            traceback.print_exc()
        click.echo(f"error: {_one_line(error)}", err=True)
        return _exit_code(error)


def _one_line(error: Exception) -> str:
    if isinstance(error, IclpermError):
        return printable(str(error))
    return printable(f"unexpected {type(error).__name__}: {error}; --debug shows where").replace("\n", " ")


def _exit_code(error: Exception) -> int:
    from iclperm.store import RunStopped

    if isinstance(error, ConfigError):
        return USAGE
    return STOPPED if isinstance(error, RunStopped | MemoryError) else FAILED


def _with_debug(command: Command) -> Command:
    return click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")(command)


def _with_json(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")(command)


def _with_study(command: Command) -> Command:
    """A study file and a flag for each of its keys; the flags win."""
    for key, words in reversed(STUDY_KEYS.items()):
        metavar = "N" if key in _NUMBERS else "TEXT"
        command = click.option(f"--{key.replace('_', '-')}", key, metavar=metavar, help=words)(command)
    return click.argument("study_file", required=False, type=click.Path(path_type=Path))(command)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="iclperm")
@_with_debug
def cli() -> None:
    """What the choice, the number and the order of in-context demonstrations do to a language model."""


@cli.command()
@click.option("--out", default="iclperm-demo", show_default=True, type=click.Path(path_type=Path), help="Run folder.")
@_with_json
@_with_debug
def demo(out: Path, as_json: bool) -> None:
    """A small study on the bundled model: order against choice of the demonstrations, in under a minute."""
    from iclperm.runner import run, sample_prompt
    from iclperm.study import Study

    study = Study(**DEMO_SETTING)
    console = _console()
    if not as_json:
        _print_prompt(console, sample_prompt(study, shots=2))
    with _progress(console, as_json) as progress:
        finished = run(study, out, progress=progress)
    files = finished.write_report()
    _print_run(console, finished, files, as_json)
    if not as_json:
        _print_next_steps(console, out)


@cli.command("run")
@_with_study
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Run folder; an unfinished run continues.")
@_with_json
@_with_debug
def run_command(study_file: Path | None, out: Path, as_json: bool, **flags: str | None) -> None:
    """Run a study into a folder, or continue it."""
    from iclperm.runner import run

    console = _console()
    with _progress(console, as_json) as progress:
        finished = run(_study(study_file, flags), out, progress=progress)
    _print_run(console, finished, finished.write_report(), as_json)


@cli.command()
@_with_study
@_with_json
@_with_debug
def plan(study_file: Path | None, as_json: bool, **flags: str | None) -> None:
    """What a study would compute; loads no weights."""
    from iclperm.runner import plan as plan_study

    planned = plan_study(_study(study_file, flags))
    if as_json:
        click.echo(json.dumps(planned.to_dict(), indent=1))
    else:
        _console().print(_plan_table(planned))


@cli.command()
@click.argument("folder", type=click.Path(path_type=Path))
@_with_json
@_with_debug
def report(folder: Path, as_json: bool) -> None:
    """Tables and figures of a finished run."""
    from iclperm.runner import open_run

    finished = open_run(folder)
    _print_run(_console(), finished, finished.write_report(), as_json)


@cli.group(invoke_without_command=True)
@_with_debug
@click.pass_context
def tasks(context: click.Context) -> None:
    """List the built-in tasks, or show one."""
    from iclperm.tasks import Task, builtin_tasks

    if context.invoked_subcommand is None:
        for name in builtin_tasks():
            click.echo(f"{name}  {Task.load(name).description}")


@tasks.command()
@click.argument("task")
@click.option("--shots", type=click.IntRange(0), help="Number of demonstrations; the task's own by default.")
@click.option("--query", type=click.IntRange(0), default=0, help="Which test query.")
@_with_debug
def show(task: str, shots: int | None, query: int) -> None:
    """Print one whole prompt of a task as the model sees it, with its labels."""
    from iclperm.runner import sample_prompt
    from iclperm.study import Study

    study = Study(task=task, sets=1, permutations=1, shots=shots, queries=query + 1)
    _print_prompt(_console(), sample_prompt(study, query=query))


def printable(text: str) -> str:
    """Text that cannot steer a terminal: control characters other than line breaks and tabs are escaped."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else repr(sign)[1:-1] for sign in text)


def _study(study_file: Path | None, flags: dict[str, str | None]) -> Study:
    from iclperm.study import Study

    given: dict[str, Any] = {key: _value(key, text) for key, text in flags.items() if text is not None}
    if study_file is None:
        return Study(**given)
    return Study(**{**Study.from_file(study_file).model_dump(), **given})


def _value(key: str, text: str) -> str | int | list[int]:
    """A flag's text as the study wants it; "1,2,4" is a list of shots."""
    if key not in _NUMBERS:
        return text
    try:
        return [int(part) for part in text.split(",")] if key == "shots" and "," in text else int(text)
    except ValueError:
        raise ConfigError(f"--{key.replace('_', '-')} is {text!r}; give a whole number") from None


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    # A file or a pipe has no width of its own: give tables the room that they need.
    return console if console.is_terminal else Console(highlight=False, width=120)


@contextmanager
def _progress(console: Console, quiet: bool) -> Iterator[Progress | None]:
    """A bar on a terminal, a line every few seconds elsewhere, nothing beside JSON."""
    if quiet:
        yield None
    elif console.is_terminal:
        from rich.progress import Progress as Bar

        with Bar(console=console, transient=True) as bar:
            task = bar.add_task("scoring", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        yield _line_printer()


def _line_printer() -> Progress:
    last = -_SECONDS_BETWEEN_LINES

    def tell(done: int, total: int) -> None:
        nonlocal last
        if done == total or time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            click.echo(f"scored {done} of {total} parts")

    return tell


def _print_run(console: Console, finished: Run, files: list[Path], as_json: bool) -> None:
    from iclperm.report.tables import curve_table, sensitivity_tables
    from iclperm.studies.sensitivity import plain, report_content

    summary, curve = finished.summary(), finished.curve()
    if as_json:
        content = report_content(summary, curve, finished.shots)
        content |= {
            "run": plain(finished.report),
            "folder": str(finished.folder),
            "files": [str(file) for file in files],
        }
        click.echo(json.dumps(content, indent=1, allow_nan=False))
        return
    console.print(_cost_line(finished), "", sep="\n", markup=False)
    for table in sensitivity_tables(summary):
        console.print(table)
    if curve is not None:
        console.print(curve_table(curve, finished.shots))
    for warning in summary.warnings:
        console.print(f"note: {warning}", markup=False)
    console.print(
        "", "files:", *(f"  {file}" for file in files), f"  {finished.folder}/items/*.parquet", sep="\n", markup=False
    )


def _cost_line(finished: Run) -> str:
    cost = finished.report
    if cost.num_parts_resumed == cost.num_parts:
        return f"nothing to compute: all {cost.num_parts} parts were found in {finished.folder}"
    resumed = (
        f", {cost.num_parts_resumed} of {cost.num_parts} parts found already done" if cost.num_parts_resumed else ""
    )
    damaged = f", {cost.num_quarantined} damaged files set aside and computed anew" if cost.num_quarantined else ""
    return f"computed in {cost.seconds:.0f} s{resumed}{damaged}"


def _print_prompt(console: Console, prompt: Any) -> None:
    from rich.panel import Panel
    from rich.text import Text

    text = Text()
    text.append(printable(prompt.context), style="dim")
    text.append(printable(prompt.query))
    text.append(printable(prompt.continuations[prompt.gold]), style="bold green")
    labels = ", ".join(printable(repr(continuation)) for continuation in prompt.continuations)
    console.print(Panel(text, title="one prompt and its right label", title_align="left"))
    console.print(f"every prompt is scored with each label: {labels}", "", sep="\n", markup=False)


def _plan_table(planned: StudyPlan) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"Plan for {planned.task}", title_justify="left")
    table.add_column("")
    table.add_column("", justify="right")
    rows = {
        "sets x permutations": f"{planned.num_sets} x {planned.num_permutations}",
        "shots": ", ".join(map(str, planned.shots)),
        "queries": f"{planned.num_queries:,}",
        "distinct contexts": f"{planned.num_contexts:,}",
        "distinct prompts": f"{planned.num_prompts:,}",
        "tokens, prompt by prompt": f"{planned.tokens_naive:,}",
        "tokens, distinct": f"{planned.tokens_unique:,}",
        "saving": f"{planned.saving:.1f} times",
        "peak of keys and values, tokens": f"{planned.kv_peak_tokens:,}",
        "units of work": f"{planned.num_units:,}",
        "files": f"{planned.num_parts:,}",
        "disk space": f"about {planned.disk_bytes / 1e6:.1f} MB",
        "prompts outside the product": f"{planned.prompts.num_general_cells:,}",
        "queries too long": f"{planned.num_overlong:,}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _print_next_steps(console: Console, out: Path) -> None:
    steps = {
        f"iclperm report {out}": "these tables again",
        "iclperm tasks show mini_news": "a whole prompt",
        "iclperm plan --sets 20 --permutations 20": "what a larger study would cost",
        "iclperm run --sets 20 --queries 400 --out my-run": "run it; stop and repeat the command to continue",
        "iclperm run --model path/to/model --out my-model": "the same study on a model of your own",
    }
    width = max(map(len, steps))
    console.print(
        "", "next:", *(f"  {step:<{width}}  {words}" for step, words in steps.items()), sep="\n", markup=False
    )
