"""The command line: parse, one call of the API, print. Nothing heavy is imported for ``--help``."""

from __future__ import annotations

import io
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

from iclperm.errors import ConfigError, IclpermError, RunError, printable
from iclperm.process import settle

if TYPE_CHECKING:
    from rich.console import Console

    from iclperm.runner import Progress, Run, StudyRuns
    from iclperm.store import RunStopped
    from iclperm.study import Study

FAILED, USAGE, STOPPED = 1, 2, 3
DEMO_SETTING: dict[str, Any] = {"sets": 10, "permutations": 10, "shots": [0, 1, 2, 4, 8], "queries": 120}
STUDY_KEYS = {
    "kind": "What is studied: sensitivity, search, curve, convergence, transfer or selection.",
    "model": "demo, a model folder or a hub id.",
    "revision": "Revision of a hub id.",
    "task": "Built-in task or path of a task file.",
    "tasks": "Those of a transfer, with commas between.",
    "models": "Those of a transfer, likewise.",
    "data": "Folder with the task's data, where they are not where the task says.",
    "sets": "Number of demonstration sets.",
    "permutations": "Number of orders, shared by all sets.",
    "demonstrations": "Sets of train rows to use instead of drawn ones: 4,17,9;3,2,11.",
    "shots": "Number of demonstrations, several (0,1,2,4,8), or all.",
    "resample": "none: several shots are prefixes of one order; per_k: each has sets and orders of its own.",
    "queries": "Number of test queries.",
    "dev_queries": "Number of dev queries, scored beside them.",
    "seed": "Seed of every random choice.",
    "design": "How sets and orders are drawn: random.",
    "scoring": "How answers are found: loglikelihood (of every label), first_token (of theirs), or generate.",
    "normalize": "Labels are compared by the sum of log-likelihoods, their mean over tokens, or over bytes.",
    "calibration": "none, or contextual: labels freed of what each context prefers by itself.",
    "criterion": "What a search chooses an order by: dev_accuracy, majority_agreement, global_entropy, ...",
    "select": "How many demonstrations a selection keeps.",
    "on_overlong": "error, or drop the queries that do not fit the context window.",
    "chat": "The model's chat template: none, single (one user message), or multiturn (a turn a demonstration).",
    "max_new_tokens": "Most tokens of a generated answer; the task's own by default.",
    "think": "keep, or strip blocks of reasoning from generated text before it is read.",
    "unparsed": "Text that no answer can be read from counts as wrong, or drops its query (drop).",
    "endpoint": "API that serves --model: its URL, or base_url=URL,api_key_env=NAME,max_cost=2 and so on.",
    "dtype": "auto, float32, bfloat16 or float16.",
    "device": "auto, cpu, cuda, ..., or balanced: a model over several devices.",
    "memory_budget": "Memory for weights, keys and values, activations and logits: 4GiB, or 50% of what is free.",
    "out": "Run folder; an unfinished run continues.",
}
_NUMBERS = frozenset({"sets", "permutations", "shots", "queries", "dev_queries", "seed", "select", "max_new_tokens"})
_LISTS = frozenset({"tasks", "models"})
_SECONDS_BETWEEN_LINES = 5.0

Command = TypeVar("Command", bound=Callable[..., Any])


def main(args: Sequence[str] | None = None) -> None:
    """Entry point; exits with 0 done, 1 failed, 2 usage, 3 stopped and resumable."""
    arguments = list(sys.argv[1:] if args is None else args)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    settle()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # data may hold what a terminal's encoding lacks
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
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        click.echo(f"error: {printable(_usage(error))}", err=True)
        return error.exit_code
    except (click.exceptions.Abort, KeyboardInterrupt):
        click.echo("stopped; what is finished is kept, the same command continues", err=True)
        return STOPPED
    except Exception as error:
        if "--debug" in arguments:
            traceback.print_exc()
        click.echo(f"error: {_one_line(error)}", err=True)
        return _exit_code(error)


def _usage(error: click.ClickException) -> str:
    """What is wrong with a command as one line, with the command that helps."""
    words = error.format_message().replace("\n", " ").rstrip(".")
    command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "iclperm"
    return f"{words[:1].lower()}{words[1:]}; {command} --help tells more"


def _one_line(error: Exception) -> str:
    return printable(_words(error)).replace("\n", " ")


def _words(error: Exception) -> str:
    if isinstance(error, IclpermError):
        return str(error)
    if _is_out_of_memory(error):
        return (
            "out of memory; what is finished is kept: free some and repeat the command, or repeat it with a smaller "
            f"--memory-budget ({type(error).__name__}: {error})"
        )
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {(error.strerror or str(error)).lower()}; repair it, or give another path"
    return f"unexpected {type(error).__name__}: {error}; --debug shows where"


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
    """A study file, or the folder of a run, and a flag for each of its keys; the flags win."""
    for key, words in reversed(STUDY_KEYS.items()):
        metavar = "N" if key in _NUMBERS else "TEXT"
        command = click.option(f"--{key.replace('_', '-')}", key, metavar=metavar, help=words)(command)
    return click.argument("study", required=False, type=click.Path(path_type=Path))(command)


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
    from iclperm.report import terminal
    from iclperm.runner import run, sample_prompt
    from iclperm.study import Study

    study = Study(**DEMO_SETTING)
    console = terminal.stdout()
    if not as_json:
        console.print(f"The study runs k = {terminal.listed(study.shot_list(0))} demonstrations. One of its prompts:")
        terminal.print_prompt(console, sample_prompt(study, shots=2), shots=2)
    with _progress(as_json) as progress:
        finished = run(study, out, progress=progress)
    code = _show_new(console, finished, as_json)
    if not as_json:
        _print_next_steps(console, out)
    return code


@cli.command("run")
@_with_study
@click.option("--extend", is_flag=True, help="Let the run in the folder grow in sets, permutations or queries.")
@click.option("--mixed", is_flag=True, help="Accept results of other machines or versions beside these.")
@_with_json
@_with_debug
def run_command(study: Path | None, extend: bool, mixed: bool, as_json: bool, **flags: str | None) -> int:
    """Run a study into a folder, or continue it."""
    from iclperm.report import terminal
    from iclperm.runner import run

    chosen = _study(study, flags)
    if chosen.out is None:
        raise ConfigError("there is no run folder; name one with --out, or with the study's key 'out'")
    with _progress(as_json) as progress:
        finished = run(chosen, extend=extend, mixed=mixed, progress=progress)
    return _show_new(terminal.stdout(), finished, as_json)


@cli.command()
@_with_study
@_with_json
@_with_debug
def plan(study: Path | None, as_json: bool, **flags: str | None) -> None:
    """What a study would compute, and how long it would take; loads no weights."""
    from iclperm.report import terminal
    from iclperm.runner import plan as plan_study

    chosen = _study(study, flags)
    planned = plan_study(chosen)
    if isinstance(planned, dict):
        if as_json:
            click.echo(json.dumps({name: part.to_dict() for name, part in planned.items()}, indent=1))
        else:
            terminal.print_plans(terminal.stdout(), planned, chosen)
    elif as_json:
        click.echo(json.dumps(planned.to_dict(), indent=1))
    else:
        terminal.print_plan(terminal.stdout(), planned, chosen)


@cli.command()
@click.argument("folder", type=click.Path(path_type=Path))
@_with_json
@_with_debug
def status(folder: Path, as_json: bool) -> int:
    """How far a run is, and what its sessions did; exit code 3 while it is not finished."""
    from iclperm import audit
    from iclperm.report import terminal

    begun, missing = _begun(folder)
    found = [audit.status(path) for path in begun]
    if as_json:
        _print_json([status.to_dict() for status in found])
    else:
        for status in found:
            terminal.print_status(terminal.stdout(), status)
    return 0 if not missing and all(status.is_finished for status in found) else STOPPED


@cli.command()
@click.argument("folder", type=click.Path(path_type=Path))
@_with_json
@_with_debug
def verify(folder: Path, as_json: bool) -> int:
    """Check every byte of a run and print the digest of its results; exit code 1 on damage, 3 if not finished."""
    from iclperm import audit
    from iclperm.report import terminal

    begun, missing = _begun(folder)
    found = [audit.verify(path) for path in begun]
    if as_json:
        _print_json([verified.to_dict() for verified in found])
    else:
        for verified in found:
            terminal.print_verification(terminal.stdout(), verified, named=len(found) > 1)
    if any(verified.damage for verified in found):
        return FAILED
    return STOPPED if missing or any(verified.digest is None for verified in found) else 0


@cli.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), help="Where figures and report.json go; the run folder by default."
)
@click.option(
    "--normalize", type=click.Choice(["sum", "mean", "bytes"]), help="Instead of the study's; into FOLDER/report-..."
)
@click.option(
    "--kind",
    help="Another report of the same answers: sensitivity, search, curve, convergence, features, calibration or "
    "generation.",
)
@click.option("--criterion", help="What a search or a transfer chooses an order by, instead of the study's.")
@click.option("--unparsed", type=click.Choice(["drop", "wrong"]), help="Instead of the study's.")
@_with_json
@_with_debug
def report(folder: Path, out: Path | None, kind: str | None, as_json: bool, **statistics: str | None) -> int:
    """All tables of a finished run, and its figures."""
    from iclperm.report import terminal
    from iclperm.runner import open_run

    found = open_run(folder, **statistics)
    if any(others := [part for part in (kind, *statistics.values()) if part]) and out is None:
        out = folder / "-".join(("report", *others))  # beside the study's own report, not over it
    refused = _show(terminal.stdout(), found, as_json, out=out, full=True, kind=kind)
    if refused is None:
        return 0
    reason = _one_line(refused).split(";")[0]
    click.echo(f"{'error' if out else 'note'}: no figures: {reason}; --out names a folder for them", err=True)
    return STOPPED if out else 0


@cli.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="A .csv, .jsonl or .parquet file.")
@_with_debug
def export(folder: Path, out: Path) -> None:
    """Write every answer of a finished run into one file: a row per split, set, permutation, shots and query."""
    from iclperm.results import open_run

    folders = _run_folders(folder)
    if len(folders) > 1:
        names = ", ".join(str(path) for path in folders)
        raise ConfigError(f"{folder} holds several runs; export them one by one: {names}")
    click.echo(open_run(folder).export(out))


@cli.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--axes", help="What the axes of an array are, a letter each of S, P, K, Q: SPQ.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for figures and report.json; none by default.")
@_with_json
@_with_debug
def stats(files: tuple[Path, ...], axes: str | None, out: Path | None, as_json: bool) -> None:
    """Statistics of answers from elsewhere: .npy, .npz, .csv, .parquet, or sample logs of lm-evaluation-harness."""
    from iclperm.report import terminal, write_report
    from iclperm.stats.files import describe, load

    found = describe(load(list(files), axes=axes))
    paths = [] if out is None else write_report(_made(out), found, {"kind": "stats", **found.to_dict()})
    if as_json:
        _print_json([found.to_dict()])
        return
    console = terminal.stdout()
    terminal.print_tables(console, found.tables(full=True))
    terminal.print_conclusion(console, found.conclusion())
    terminal.print_notes(console, found.warnings)
    if paths:
        console.print("", *map(str, paths), sep="\n", markup=False, soft_wrap=True)


@cli.command()
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="TFLOP/s that the hours are told for.")
@_with_json
@_with_debug
def models(rate: float | None, as_json: bool) -> None:
    """The models of both papers: their architecture, what they take of memory, and what each study costs on them."""
    from dataclasses import asdict

    from iclperm.models import markdown, table

    rows = table() if rate is None else table(rate=rate)
    click.echo(json.dumps([asdict(row) for row in rows], indent=1) if as_json else markdown(rows))


@cli.group(invoke_without_command=True)
@_with_debug
@click.pass_context
def tasks(context: click.Context) -> None:
    """List the built-in tasks, show one, or start one of your own."""
    if context.invoked_subcommand is None:
        from iclperm.report import terminal
        from iclperm.tasks import Task, builtin_tasks

        terminal.print_tasks(terminal.stdout(), [Task.load(name) for name in builtin_tasks()])


@tasks.command()
@click.argument("task")
@click.option("--data", help=STUDY_KEYS["data"])
@click.option("--model", default="demo", show_default=True, help="Whose tokens are shown: demo, a folder or a hub id.")
@click.option("--shots", type=click.IntRange(0), help="Number of demonstrations; the task's own by default.")
@click.option("--query", type=click.IntRange(0), default=0, help="Which test query.")
@click.option("--chat", type=click.Choice(["none", "single", "multiturn"]), default="none", help=STUDY_KEYS["chat"])
@_with_debug
def show(task: str, data: str | None, model: str, shots: int | None, query: int, chat: str) -> None:
    """Print one whole prompt of a task as the model sees it, with its tokens and labels."""
    from iclperm.report import terminal
    from iclperm.runner import sample_answer, sample_prompt, sample_tokens
    from iclperm.study import Study
    from iclperm.tasks import Task

    loaded = Task.load(task, data)
    shown = loaded.shots if shots is None else shots
    study = Study(task=task, data=data, model=model, sets=1, permutations=1, shots=shown, queries=query + 1, chat=chat)
    prompt, console = sample_prompt(study, query=query), terminal.stdout()
    terminal.print_prompt(console, prompt, shown)
    if loaded.answer is not None:
        terminal.print_answering(console, loaded, sample_answer(study, prompt))
    terminal.print_tokens(console, prompt, sample_tokens(study, prompt))


@tasks.command()
@click.argument("name")
@click.option("--out", type=click.Path(path_type=Path), help="The file to write; NAME.yaml by default.")
@click.option("--generated", is_flag=True, help="A task whose answers are generated, not chosen among labels.")
@_with_debug
def new(name: str, out: Path | None, generated: bool) -> None:
    """Write a commented task file to start from; a file that is there is never replaced."""
    from iclperm.tasks import template_text

    path, text = out or Path(f"{name}.yaml"), template_text(name, generated=generated)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {(error.strerror or str(error)).lower()}; name another file with --out"
        ) from None
    click.echo(f"{path}: put your data beside it, then: iclperm tasks show {path}")


@cli.command()
@click.option(
    "--case", "cases", default="monte_carlo", show_default=True, metavar="NAMES", help="Commas between, or all."
)
@click.option(
    "--model", "models", default="qwen2-25m", show_default=True, metavar="NAMES", help="Likewise; see --list."
)
@click.option("--dtype", "dtypes", default="float32,bfloat16", show_default=True, metavar="NAMES", help="Likewise.")
@click.option("--peer", "peers", metavar="NAMES", help="Whom to compare with; all that can run here by default.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Rounds; medians are shown.")
@click.option("--threads", type=click.IntRange(1), help="Threads of each contender; all cores by default.")
@click.option("--device", default="cpu", show_default=True, help="cpu, or cuda where there is one.")
@click.option("--scale", type=float, help="Share of a case to measure; 1 but for models that would take hours.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the token ids.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="JSON lines, a row for each contender; continued if there."
)
@click.option("--quick", is_flag=True, help="The bundled model, 5 % of the case, once: does it run, do all agree?")
@click.option("--whole", is_flag=True, help="No samples: slow contenders score every prompt too (hours).")
@click.option("--prepare", metavar="NAMES", help="Make the environments of these peers, or of all, and stop.")
@click.option("--list", "is_list", is_flag=True, help="Cases, models and peers, and which of them can run here.")
@click.option("--table", type=click.Path(path_type=Path), help="Show the table of an earlier --out, and stop.")
@_with_json
@_with_debug
def bench(
    prepare: str | None, table: Path | None, out: Path | None, is_list: bool, as_json: bool, **given: Any
) -> int | None:
    """Measure iclperm against the tools in use, on this machine: agreement first, then speed."""
    from iclperm import bench as benchmark

    def say(words: str) -> None:
        click.echo(words, err=True)

    if is_list:
        click.echo(benchmark.listing(given["device"]))
    elif prepare is not None:
        return 0 if benchmark.prepare(prepare, say) else FAILED
    else:
        rows = benchmark.read_rows(table) if table else benchmark.run(benchmark.options(**given), say, out)
        click.echo("\n".join(row.to_json() for row in rows) if as_json else benchmark.render(rows), nl=as_json)
    return None


def _made(folder: Path) -> Path:
    """A folder, made where it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _run_folders(folder: Path) -> list[Path]:
    """The folder of a run, or those of a study of several runs."""
    from iclperm import compound

    return [*compound.folders(folder).values()] if compound.is_compound(folder) else [folder]


def _begun(folder: Path) -> tuple[list[Path], bool]:
    """The runs in a folder that have begun, and whether some of its study have not; these are named on stderr."""
    from iclperm import compound

    if not compound.is_compound(folder):
        return [folder], False
    folders = compound.folders(folder)
    missing = [name for name, path in folders.items() if not compound.has_begun(path)]
    if len(folders) == 1:
        missing.append("what it chooses")
    if missing:
        click.echo(f"not begun: {', '.join(missing)}; run the study again to continue", err=True)
    return [path for path in folders.values() if compound.has_begun(path)], bool(missing)


def _print_json(contents: list[dict[str, Any]]) -> None:
    """One content by itself, others as a list."""
    click.echo(json.dumps(contents[0] if len(contents) == 1 else contents, indent=1, allow_nan=False))


def _study(study: Path | None, flags: dict[str, str | None]) -> Study:
    from iclperm.study import Study

    given: dict[str, Any] = {key: _value(key, text) for key, text in flags.items() if text is not None}
    if study is None:
        return Study(**given)
    if not study.is_dir():
        return Study(**{**Study.from_file(study).model_dump(), **given})
    return Study(**{**_study_of_run(study).model_dump(), "out": str(study), **given})


def _study_of_run(folder: Path) -> Study:
    """The study in a run's folder; of a file that was cut off, the rest would be another study."""
    from iclperm.config import read_yaml
    from iclperm.study import Study

    if not (folder / "FORMAT").is_file():
        raise RunError(f"{folder} is not a run folder; give a study file, or the folder that a run was written to")
    path, (*_, last) = folder / "study.yaml", Study.model_fields
    try:
        study, is_whole = Study.from_file(path), last in read_yaml(path)
    except ConfigError:
        is_whole = False
    if not is_whole:
        raise RunError(f"{path} is damaged; run the study from its own file with --out {folder}, which mends the run")
    return study


def _value(key: str, text: str) -> Any:
    """A flag's text as the study wants it; "1,2,4" is a list of shots, "4,17;3,2" are two sets of demonstrations."""
    if key in _LISTS:
        return text.split(",")
    if key == "demonstrations":
        return _rows(text)
    if key == "endpoint":
        return _endpoint(text)
    if key not in _NUMBERS or (key, text) == ("shots", "all"):
        return text
    try:
        return [int(part) for part in text.split(",")] if key == "shots" and "," in text else int(text)
    except ValueError:
        raise ConfigError(f"--{key.replace('_', '-')} is {text!r}; give a whole number") from None


def _rows(text: str) -> list[list[int]]:
    try:
        return [[int(row) for row in rows.split(",")] for rows in text.split(";")]
    except ValueError:
        raise ConfigError(
            f"--demonstrations is {text!r}; give rows with commas and sets with semicolons between"
        ) from None


def _endpoint(text: str) -> dict[str, Any]:
    """A URL, or "key=value" with commas between; the keys of prices are prices.input and so on."""
    if "=" not in text.split("://")[0]:
        return {"base_url": text}
    from iclperm.config import scalar

    choices: dict[str, Any] = {}
    for entry in text.split(","):
        key, equals, value = entry.partition("=")
        if not equals:
            raise ConfigError(f"--endpoint has {entry!r}; give a URL, or key=value with commas between")
        *groups, name = key.strip().split(".")
        place = choices
        for group in groups:
            place = place.setdefault(group, {})
        place[name] = scalar(value)
    return choices


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


def _show_new(console: Console, finished: Run | StudyRuns, as_json: bool) -> int:
    """What a run found, in brief; the exit code."""
    refused = _show(console, finished, as_json)
    if refused is None:
        return 0
    click.echo(f"error: {_one_line(refused)}", err=True)
    return STOPPED


def _show(
    console: Console,
    finished: Run | StudyRuns,
    as_json: bool,
    *,
    out: Path | None = None,
    full: bool = False,
    kind: str | None = None,
) -> RunStopped | None:
    """Prints a run, then writes its figures; a folder that refuses them hides no result, its error is returned."""
    from iclperm.report import terminal

    if not as_json:
        terminal.print_run(console, finished, full=full, kind=kind)
    files, refused = _write_report(finished, out, kind)
    if as_json:
        _print_json([_as_json(finished, files, kind)])
    elif files:
        terminal.print_files(console, files, finished.folder)
    return refused


def _write_report(
    finished: Run | StudyRuns, out: Path | None, kind: str | None
) -> tuple[list[Path], RunStopped | None]:
    from iclperm.store import RunStopped

    try:
        return finished.write_report(out, kind), None
    except RunStopped as error:
        return [], error


def _as_json(finished: Run | StudyRuns, files: Sequence[Path], kind: str | None) -> dict[str, Any]:
    from iclperm.studies.findings import plain

    return {
        **finished.report_content(kind),
        "run": plain(finished.report),
        "digest": finished.digest,
        "folder": str(finished.folder),
        "files": [str(file) for file in files],
    }


def _print_next_steps(console: Console, out: Path) -> None:
    steps = {
        "all tables": f"iclperm report {out}",
        "a prompt": f"iclperm tasks show mini_news --shots {DEMO_SETTING['shots'][-1]}",
        "all answers": f"iclperm export {out} --out demo.csv",
        "larger study": f"iclperm run {out} --sets 12 --permutations 12 --extend",
        "your model": f"iclperm run {out}/study.yaml --model PATH --out my-run",
        "your task": "iclperm tasks new my-task",
    }
    lines = (f"  {words:<12}  {step}" for words, step in steps.items())
    console.print("", "next:", *lines, sep="\n", markup=False, soft_wrap=True)
