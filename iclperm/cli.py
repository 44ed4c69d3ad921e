"""The command line: parse, one call of the API, print. Nothing heavy is imported for ``--help``."""

from __future__ import annotations

import json
import os
import signal
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

    from iclperm.prompts import PromptText
    from iclperm.runner import Progress, Run, RunReport, StudyPlan
    from iclperm.store import RunStopped
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
    with _termination_as_interrupt():
        code = _run_command(arguments)
    sys.exit(code)


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """A scheduler's SIGTERM ends a run as Ctrl-C does: what is finished is kept and recorded."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run_command(arguments: list[str]) -> int:
    try:
        return int(cli.main(arguments, prog_name="iclperm", standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.exceptions.Abort, KeyboardInterrupt):
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
    if _is_out_of_memory(error):
        return printable(
            "out of memory; what is finished is kept: free some and repeat the command, or start in another folder "
            f"with a smaller --memory-budget ({type(error).__name__}: {error})"
        ).replace("\n", " ")
    return printable(f"unexpected {type(error).__name__}: {error}; --debug shows where").replace("\n", " ")


def _exit_code(error: Exception) -> int:
    from iclperm.store import RunStopped

    if isinstance(error, ConfigError):
        return USAGE
    return STOPPED if isinstance(error, RunStopped) or _is_out_of_memory(error) else FAILED


def _is_out_of_memory(error: Exception) -> bool:
    """Python's, NumPy's or torch's; torch is told by the name and words of its errors, as it is not imported here."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


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
def demo(out: Path, as_json: bool) -> int:
    """A small study on the bundled model: order against choice of the demonstrations, in under a minute."""
    from iclperm.runner import run, sample_prompt
    from iclperm.study import Study

    study = Study(**DEMO_SETTING)
    console = _console()
    if not as_json:
        console.print(f"The study runs k = {_listed(DEMO_SETTING['shots'])} demonstrations. One of its prompts:")
        _print_prompt(console, sample_prompt(study, shots=2), shots=2)
    with _progress(as_json) as progress:
        finished = run(study, out, progress=progress)
    code = _show_new(console, finished, as_json)
    if not as_json:
        _print_next_steps(console, out)
    return code


@cli.command("run")
@_with_study
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Run folder; an unfinished run continues.")
@_with_json
@_with_debug
def run_command(study_file: Path | None, out: Path, as_json: bool, **flags: str | None) -> int:
    """Run a study into a folder, or continue it."""
    from iclperm.runner import run

    with _progress(as_json) as progress:
        finished = run(_study(study_file, flags), out, progress=progress)
    return _show_new(_console(), finished, as_json)


@cli.command()
@_with_study
@_with_json
@_with_debug
def plan(study_file: Path | None, as_json: bool, **flags: str | None) -> None:
    """What a study would compute; loads no weights."""
    from iclperm.runner import plan as plan_study

    study = _study(study_file, flags)
    planned = plan_study(study)
    if as_json:
        click.echo(json.dumps(planned.to_dict(), indent=1))
    else:
        console = _console()
        console.print(_plan_table(planned))
        _print_notes(console, _foreign_task(study, planned.task))


@cli.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), help="Where figures and report.json go; the run folder by default."
)
@_with_json
@_with_debug
def report(folder: Path, out: Path | None, as_json: bool) -> int:
    """All tables of a finished run, and its figures."""
    from iclperm.runner import open_run

    refused = _show(_console(), open_run(folder), as_json, out=out, full=True)
    if refused is None:
        return 0
    reason = _one_line(refused).split(";")[0]
    click.echo(f"{'error' if out else 'note'}: no figures: {reason}; --out names a folder for them", err=True)
    return STOPPED if out else 0


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
    from iclperm.tasks import Task

    shown = Task.load(task).shots if shots is None else shots
    study = Study(task=task, sets=1, permutations=1, shots=shown, queries=query + 1)
    _print_prompt(_console(), sample_prompt(study, query=query), shown)


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
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=120)


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress | None]:
    """On stderr: a bar on a terminal, a line every few seconds elsewhere, nothing beside JSON."""
    from rich.console import Console

    console = Console(stderr=True)
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
            click.echo(f"scored {done} of {total} parts", err=True)

    return tell


def _show_new(console: Console, finished: Run, as_json: bool) -> int:
    """What a run found, in brief; the exit code."""
    refused = _show(console, finished, as_json)
    if refused is None:
        return 0
    click.echo(f"error: {_one_line(refused)}", err=True)
    return STOPPED


def _show(
    console: Console, finished: Run, as_json: bool, *, out: Path | None = None, full: bool = False
) -> RunStopped | None:
    """Prints a run, then writes its figures; a folder that refuses them hides no result, its error is returned."""
    if not as_json:
        _print_run(console, finished, full)
    files, refused = _write_report(finished, out)
    if as_json:
        click.echo(json.dumps(_as_json(finished, files), indent=1, allow_nan=False))
    elif files:
        names = ", ".join(file.name for file in files)
        items = f"  {finished.folder}: items/*.parquet, study.yaml"
        lines = ("", "files:", f"  {files[0].parent}: {names}", items)
        console.print(*lines, sep="\n", markup=False, soft_wrap=True)
    return refused


def _write_report(finished: Run, out: Path | None) -> tuple[list[Path], RunStopped | None]:
    from iclperm.store import RunStopped

    try:
        return finished.write_report(out), None
    except RunStopped as error:
        return [], error


def _as_json(finished: Run, files: Sequence[Path]) -> dict[str, Any]:
    from iclperm.studies.sensitivity import plain, report_content

    return {
        **report_content(finished.summary(), finished.curve(), finished.shots),
        "run": plain(finished.report),
        "folder": str(finished.folder),
        "files": [str(file) for file in files],
    }


def _print_run(console: Console, finished: Run, full: bool) -> None:
    from iclperm.report.tables import curve_table, sensitivity_tables, token_line
    from iclperm.studies.sensitivity import conclusion

    summary, curve, shots = finished.summary(), finished.curve(), finished.shots
    head = [_head(finished)] if full else [_head(finished), _cost(finished)]
    console.print(*head, sep="\n", markup=False, soft_wrap=True)
    tables = sensitivity_tables(summary, shots[-1], full=full)
    for table in tables if curve is None else [*tables, curve_table(curve, shots)]:
        console.print("", table, sep="\n")
    if summary.tokens is not None and not full:
        console.print("", token_line(summary.tokens), sep="\n", markup=False)
    console.print("", "[bold]Conclusion[/bold]", sep="\n")
    console.print(*conclusion(summary, shots[-1]), sep="\n", markup=False)
    notes = (*summary.warnings, *_foreign_task(finished.study, finished.task), *_repeats(finished.report))
    _print_notes(console, notes)


def _print_notes(console: Console, notes: Sequence[str]) -> None:
    for note in notes:
        console.print(f"note: {note}", markup=False)


def _foreign_task(study: Study, task: str) -> list[str]:
    """The bundled model answers any task without complaint; it has learnt one."""
    if study.model != "demo" or task == "mini_news":
        return []
    return [f"the bundled model only knows its own headlines (mini_news); what it answers on {task} says little"]


def _repeats(report: RunReport) -> list[str]:
    """What of the data was left out because it repeats other data."""
    notes = []
    if report.num_duplicates:
        others = f", {report.num_conflicting:,} of them under another label" if report.num_conflicting else ""
        notes.append(f"{report.num_duplicates:,} rows of the data repeat another row and were left out{others}")
    if report.num_excluded:
        notes.append(f"{report.num_excluded:,} test rows repeat a training row and were left out")
    return notes


def _head(finished: Run) -> str:
    sets, permutations, _, queries = finished.correct.shape
    return printable(
        f"{finished.task} on {finished.study.model}: {sets} sets x {permutations} permutations, "
        f"k = {_listed(finished.shots)}, {queries} queries"
    )


def _listed(shots: Sequence[int]) -> str:
    return ", ".join(map(str, shots))


def _cost(finished: Run) -> str:
    cost = finished.report
    if cost.num_parts_resumed == cost.num_parts:
        return f"nothing to compute: all {cost.num_parts} parts were found in {finished.folder}"
    resumed = (
        f", {cost.num_parts_resumed} of {cost.num_parts} parts found already done" if cost.num_parts_resumed else ""
    )
    damaged = f", {cost.num_quarantined} damaged files set aside and computed anew" if cost.num_quarantined else ""
    return f"computed in {cost.seconds:.0f} s{resumed}{damaged}"


def _print_prompt(console: Console, prompt: PromptText, shots: int) -> None:
    from rich.panel import Panel
    from rich.text import Text

    text = Text()
    text.append(printable(prompt.context), style="dim")
    text.append(printable(prompt.query))
    text.append(printable(prompt.continuations[prompt.gold]), style="bold green")
    labels = ", ".join(printable(repr(continuation)) for continuation in prompt.continuations)
    console.print(Panel(text, title=f"one prompt at k = {shots}, and its right label", title_align="left"))
    console.print(f"every prompt is scored with {labels}", "", sep="\n", markup=False)


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
        "repeated rows left out": f"{planned.num_duplicates:,}",
        "of them with another label": f"{planned.num_conflicting:,}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _print_next_steps(console: Console, out: Path) -> None:
    study = f"{out}/study.yaml"
    steps = {
        "all tables": f"iclperm report {out}",
        "a prompt": f"iclperm tasks show mini_news --shots {DEMO_SETTING['shots'][-1]}",
        "larger study": f"iclperm plan {study} --sets 40 --permutations 40",
        "your model": f"iclperm run {study} --model PATH --out my-run",
    }
    lines = (f"  {words:<12}  {step}" for words, step in steps.items())
    console.print("", "next:", *lines, sep="\n", markup=False, soft_wrap=True)
