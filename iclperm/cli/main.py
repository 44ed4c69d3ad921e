"""The command line: what commands are called, take and say of themselves. ``--help`` loads nothing heavy."""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from iclperm import cli as rooms
from iclperm.base.environment import settle
from iclperm.base.outputs import output
from iclperm.cli.failures import (
    FAILED,
    STOPPED,
    exit_code,
    one_line,
    termination_as_interrupt,
    usage,
    warnings_in_a_line,
)
from iclperm.cli.options import (
    CHOICES,
    RECOMMEND_KEYS,
    STUDY_KEYS,
    SectionedCommand,
    place,
    suggested,
    with_debug,
    with_figures,
    with_folder,
    with_json,
    with_keys,
    with_place,
    with_quiet,
    with_study,
    with_tables,
    with_text,
    with_workers,
)
from iclperm.cli.output import Output, after_output
from iclperm.integrations import harness_main, serve_model
from iclperm.study import kinds

if TYPE_CHECKING:
    from iclperm.runs.limits import WorkLimits


def main(args: Sequence[str] | None = None, *, limits: WorkLimits | None = None) -> None:
    """Entry point; exits with 0 done, 1 failed, 2 usage, 3 stopped and resumable.

    ``limits`` are those of `iclperm.api.run`.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    settle()
    outputs = [Output.instead_of("stdout"), Output.instead_of("stderr")]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # data may hold what a terminal's encoding lacks
    with termination_as_interrupt(), warnings_in_a_line():
        code = _run_command(arguments, limits)
    sys.exit(after_output(code, outputs[0]))


def _run_command(arguments: list[str], limits: WorkLimits | None) -> int:
    try:
        return int(cli.main(arguments, prog_name="iclperm", standalone_mode=False, obj=limits) or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        click.echo(f"error: {usage(error)}", err=True)
        return error.exit_code
    except (click.exceptions.Abort, KeyboardInterrupt):
        click.echo("stopped; what is finished is kept, the same command continues", err=True)
        return STOPPED
    except Exception as error:
        if "--debug" in arguments:
            traceback.print_exc()
        click.echo(f"error: {one_line(error)}", err=True)
        return exit_code(error)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="iclperm")
@with_debug
def cli() -> None:
    """What the choice, the number and the order of in-context demonstrations do to a language model."""


@cli.command()
@with_quiet
@click.option("--out", default="iclperm-demo", show_default=True, type=click.Path(path_type=Path), help="Run folder.")
@with_json
@with_debug
def demo(out: Path, as_json: bool) -> int:
    """A small study on the bundled model: order against choice of the demonstrations, in under a minute."""
    return rooms.commands.demo(out, as_json=as_json)


@cli.command("run", cls=SectionedCommand)
@with_quiet
@with_study
@click.option("--extend", is_flag=True, help="Let the run in the folder grow in sets, permutations or queries.")
@click.option("--mixed", is_flag=True, help="Accept results of other machines or versions beside these.")
@with_workers
@with_text("the run folder")
@with_json
@with_debug
@click.pass_obj
def run_command(
    limits: WorkLimits | None,
    /,
    study: Path | None,
    extend: bool,
    mixed: bool,
    workers: int | None,
    ray: str | None,
    send_keys: tuple[str, ...],
    with_text: bool | None,
    as_json: bool,
    **flags: str | None,
) -> int:
    """Run a study into a folder, or continue it."""
    return rooms.commands.run(
        study,
        flags,
        extend=extend,
        mixed=mixed,
        workers=workers,
        ray=ray,
        send_keys=send_keys,
        as_json=as_json,
        limits=limits,
        with_text=with_text,
    )


@cli.command(cls=SectionedCommand)
@with_quiet
@click.argument("data", metavar="DATA")
@click.option("--label", help="The column of the labels, of a data file.")
@click.option("--text", "texts", multiple=True, help="A column of text, likewise. Repeatable.")
@with_keys(*RECOMMEND_KEYS)
@click.option("--plan", "only_plan", is_flag=True, help="Show what it would take at most, and stop.")
@click.option("--extend", is_flag=True, help="Let the test grow in queries.")
@click.option("--workers", metavar="N", type=int, help="Processes that run the model.")
@with_text("the folder")
@with_json
@with_debug
def recommend(
    data: str,
    label: str | None,
    texts: tuple[str, ...],
    extend: bool,
    workers: int | None,
    with_text: bool | None,
    as_json: bool,
    only_plan: bool,
    **flags: str | None,
) -> int:
    """Find the prompt to take: how many demonstrations, which, in what order; and what it is worth.

    DATA is a data file with texts and labels, a task file, or a built-in task. Sizes that are not named follow from it:
    0, 1, 2, 4 and up to 8 demonstrations, of 6 sets in 8 orders, by up to 400 dev queries, and 500 of test to say what
    that is worth; --plan shows them.
    """
    return rooms.recommending.recommend(
        data,
        flags,
        label=label,
        texts=texts,
        extend=extend,
        workers=workers,
        with_text=with_text,
        as_json=as_json,
        only_plan=only_plan,
    )


@cli.command("grid")
@with_quiet
@click.argument("grid", metavar="GRID")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the grid, instead of its own.")
@click.option("--plan", "only_plan", is_flag=True, help="Show what it costs, and run nothing.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="TFLOP/s that the hours of a GPU are told for.")
@click.option("--extend", is_flag=True, help="Let cells grow in sets, permutations or queries.")
@click.option("--mixed", is_flag=True, help="Accept results of other machines or versions beside these.")
@with_workers
@with_text("each run folder")
@with_json
@with_debug
@click.pass_obj
def grid_command(
    limits: WorkLimits | None,
    /,
    grid: str,
    out: Path | None,
    send_keys: tuple[str, ...],
    only_plan: bool,
    rate: float | None,
    as_json: bool,
    **choices: Any,
) -> int:
    """Run the studies of a grid of models, tasks, kinds and seeds, or continue it; then compare them.

    GRID is a YAML file, or the name of one that comes with iclperm: order_matters or monte_carlo, those of the papers.
    """
    choices["limits"] = limits
    return rooms.commands.grid(grid, out, send_keys, only_plan=only_plan, rate=rate, as_json=as_json, **choices)


@cli.command(cls=SectionedCommand)
@with_study
@click.option("--pilot", type=click.Path(path_type=Path), help="Size --precision from this run.")
@click.option("--components", help="Size it from these: order=.05,selection=.03,accuracy=.7.")
@with_json
@with_debug
def plan(study: Path | None, pilot: Path | None, components: str | None, as_json: bool, **flags: str | None) -> None:
    """What a study would compute, and how long it would take; loads no weights."""
    if pilot is None and components is None:
        rooms.plans.plan(study, flags, as_json=as_json)
    else:
        rooms.plans.plan_sizes(study, flags, pilot, components, as_json=as_json)


@cli.command()
@with_folder
@click.option("--watch", is_flag=True, help="Show it until the run is finished, or Ctrl-C; changes nothing.")
@with_json
@with_debug
def status(folder: Path, watch: bool, as_json: bool) -> int:
    """How far a run is, and what its sessions did; exit code 3 while it is not finished."""
    if watch and as_json:
        raise click.UsageError("--watch shows a run to people; leave out --json, or ask again and again")
    return rooms.commands.watch(folder) if watch else rooms.commands.status(folder, as_json=as_json)


@cli.command()
@with_folder
@with_json
@with_debug
def verify(folder: Path, as_json: bool) -> int:
    """Check every byte of a run and print the digest of its results; exit code 1 on damage, 3 if not finished."""
    return rooms.commands.verify(folder, as_json=as_json)


@cli.command()
@with_quiet
@with_place
@click.option(
    "--out",
    type=place,
    help="Where figures, report.json and report.html go, a folder or a URL; the run folder by default.",
)
@click.option(
    "--normalize", type=click.Choice(CHOICES["normalize"]), help="Instead of the study's; into FOLDER/report-..."
)
@click.option(
    "--kind",
    help=f"Another report of the same answers: {kinds.in_words(kinds.OF_ONE_RUN)}.",
    shell_complete=suggested(kinds.OF_ONE_RUN),
)
@click.option(
    "--criterion",
    type=click.Choice(CHOICES["criterion"]),
    help="What a search or a transfer chooses an order by, instead of the study's.",
)
@click.option("--unparsed", type=click.Choice(CHOICES["unparsed"]), help="Instead of the study's.")
@click.option("--read-by", metavar="TASK", multiple=True, help="Generated texts by this task's rules, too; may repeat.")
@with_text("report.html")
@with_tables("of the report, called like their titles: order-against-selection-at-k-8")
@with_figures
@with_json
@with_debug
def report(folder: Path | str, out: Path | str | None, kind: str | None, as_json: bool, **given: Any) -> int:
    """All tables of a finished run, its figures, and report.html: a page of both to read, print and share."""
    return rooms.commands.report(folder, out, kind, as_json=as_json, **given)


@cli.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--shared", help="What files of answers have in common: sets,permutations,queries. Of runs it is found.")
@click.option("--sizes", help="Parameters of the models, with commas between: 0.5e9,7e9. For a slope on size.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder for all of it: compare.html, figures, tables and report.json; none by default.",
)
@click.option("--page", type=click.Path(path_type=Path), help="The page of both tables and figures, a .html file.")
@with_tables("sensitivity (models by tasks), studies, tests")
@with_figures
@with_json
@with_debug
def compare(
    runs: tuple[Path, ...],
    shared: str | None,
    sizes: str | None,
    figures: tuple[str, ...],
    width: str | None,
    as_json: bool,
    **files: Any,
) -> None:
    """Finished runs side by side: is r, the effect of order or of choice, or accuracy different between them?"""
    wanted = rooms.commands.Wanted.of(figures=figures, width=width, **files)
    rooms.commands.compare(runs, shared, sizes, wanted, as_json=as_json)


@cli.command()
@with_folder
@click.option(
    "--best", is_flag=True, help="The most accurate prompt: on dev queries where there are some, else on test."
)
@click.option("--set", "index_set", type=click.IntRange(0), help="The prompt of this set, counted from 0.")
@click.option("--permutation", type=click.IntRange(0), help="And of this permutation of it, counted from 0.")
@click.option("--shots", type=click.IntRange(0), help="And with so many demonstrations; the most by default.")
@click.option("--query", type=click.IntRange(0), help="With this test query in it, counted from 0; else a placeholder.")
@click.option("--run", "name", help="Which run of a study of several.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "chat", "python", "json"]),
    help="Text, chat messages as JSON (of a chat the default), a Python literal, or JSON of all that is known.",
)
@click.option("--out", type=click.Path(path_type=Path), help="A file for the prompt, instead of standard output.")
@with_debug
def prompt(folder: Path, name: str | None, form: Any, out: Path | None, **cell: Any) -> None:
    """Print one prompt of a finished run, as it was scored: of a search or a selection what it chose.

    Standard output is the prompt alone; where it is from, how accurate it was and how to use it is told on stderr.
    """
    rooms.commands.prompt(folder, name, form, out, **cell)


@cli.command()
@with_place
@click.option(
    "--out", required=True, type=place, help="A .csv, .jsonl or .parquet file, or its URL; of lm-eval a folder."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "lm-eval"]),
    default="table",
    metavar="NAME",
    help="table, or lm-eval: sample logs of it.",
)
@click.option("--with-text", is_flag=True, help="Sample logs of a restricted task too.")
@with_debug
def export(folder: Path | str, out: Path | str, form: Any, with_text: bool) -> None:
    """Write every answer of a finished run into one file: a row per split, set, permutation, shots and query."""
    rooms.commands.export(folder, out, form, with_text=with_text)


@cli.command()
@click.argument("files", nargs=-1, required=True, type=place)
@click.option("--axes", help="What the axes of an array are, a letter each of S, P, K, Q, C: SPQ; QC is a row a query.")
@click.option("--out", type=place, help="Folder or URL for figures and report.json; none by default.")
@with_json
@with_debug
def stats(files: tuple[Path | str, ...], axes: str | None, out: Path | str | None, as_json: bool) -> None:
    """Statistics of answers from elsewhere: .npy, .npz, .csv, .parquet, or sample logs of lm-evaluation-harness."""
    rooms.commands.stats(files, axes, out, as_json=as_json)


@cli.command()
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="TFLOP/s that the hours are told for.")
@with_json
@with_debug
def models(rate: float | None, as_json: bool) -> None:
    """The models of both papers: their architecture, what they take of memory, and what each study costs on them."""
    from iclperm.models import markdown, table

    rows = table() if rate is None else table(rate=rate)
    click.echo(json.dumps([asdict(row) for row in rows], indent=1) if as_json else markdown(rows))


@cli.group(invoke_without_command=True)
@with_debug
@click.pass_context
def tasks(context: click.Context) -> None:
    """List the built-in tasks, show one, or start one of your own."""
    if context.invoked_subcommand is None:
        rooms.commands.list_tasks()


@tasks.command()
@click.argument("task")
@click.option("--data", help=STUDY_KEYS["data"])
@click.option(
    "--model", default="demo", show_default=True, help="Whose tokens are shown: demo, a folder, a file or a hub id."
)
@click.option("--shots", type=click.IntRange(0), help="Number of demonstrations; the task's own by default.")
@click.option("--query", type=click.IntRange(0), default=0, help="Which test query.")
@click.option("--chat", type=click.Choice(CHOICES["chat"]), default="none", help=STUDY_KEYS["chat"])
@with_debug
def show(task: str, data: str | None, model: str, shots: int | None, query: int, chat: str) -> None:
    """Print one whole prompt of a task as the model sees it, with its tokens and labels."""
    rooms.commands.show_task(task, data, model, shots, query, chat)


@tasks.command()
@click.argument("name", required=False)
@click.option("--out", type=click.Path(path_type=Path), help="The file to write; NAME.yaml by default.")
@click.option("--generated", is_flag=True, help="A task whose answers are generated, not chosen among labels.")
@click.option(
    "--from", "data", type=click.Path(path_type=Path), help="Look at this data file and propose a task for it."
)
@click.option("--name", "named", help="With --from, the task's name; that of the file by default.")
@click.option("--label", help="With --from, the column of the labels.")
@click.option("--text", "texts", multiple=True, help="With --from, a column of text. Repeatable.")
@click.option("--model", default="demo", show_default=True, help="With --from, whose context window must suffice.")
@with_debug
def new(
    name: str | None, named: str | None, out: Path | None, generated: bool, data: Path | None, **looked: Any
) -> None:
    """Write a commented task file to start from; a file that is there is never replaced."""
    if data is not None:
        if generated:
            raise click.UsageError("--from proposes tasks with labels; start one with --generated from its NAME alone")
        rooms.commands.propose_task(data, name or named, out, **looked)
    elif name or named:
        rooms.commands.new_task(str(name or named), out, generated=generated)
    else:
        raise click.UsageError("missing argument 'NAME', or --from with a data file")


@tasks.command("from-harness")
@click.argument("name")
@click.option("--out", type=click.Path(path_type=Path), help="The folder to write; NAME by default.")
@click.option("--include-path", type=click.Path(path_type=Path), help="A folder with task files of your own.")
@click.option("--limit", type=click.IntRange(1), help="Rows of each split at most.")
@click.option("--data", type=click.Path(path_type=Path), help="A folder of rows to take instead, a file a split.")
@with_debug
def from_harness(name: str, out: Path | None, **given: Any) -> None:
    """Have lm-evaluation-harness render a task's rows into a folder, running the functions that its file names."""
    rooms.commands.render_task(name, out, **given)


@cli.command()
@click.argument("study", required=False, type=click.Path(path_type=Path))
@click.option(
    "--case", "cases", metavar="NAMES", help="Commas between, or all; also YAML files.  [default: monte_carlo]"
)
@click.option(
    "--model", "models", metavar="NAMES", help="Likewise, or folders or hub ids.  [default: the study's; qwen2-25m]"
)
@click.option("--dtype", "dtypes", metavar="NAMES", help="Likewise.  [default: the study's; float32,bfloat16]")
@click.option("--peer", "peers", metavar="NAMES", help="Whom to compare with; all that can run here by default.")
@click.option("--repeats", type=click.IntRange(1), help="Rounds, whose medians are shown; 3 by default.")
@click.option("--threads", type=click.IntRange(1), help="Threads of each contender; all cores by default.")
@click.option("--device", default="cpu", show_default=True, help="cpu, or cuda where there is one.")
@click.option("--scale", type=float, help="Share to measure, up to 1; by default what takes minutes.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the token ids.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="JSON lines, a row for each contender; continued if there. Table and figure go beside it.",
)
@click.option("--quick", is_flag=True, help="The bundled model, 5 % of the case, once, unless told: do all agree?")
@click.option("--whole", is_flag=True, help="No samples: slow contenders score every prompt too (hours).")
@click.option("--prepare", metavar="NAMES", help="Make the environments of these peers, or of all, and stop.")
@click.option("--list", "is_list", is_flag=True, help="Cases, models and peers, and which of them can run here.")
@click.option("--table", type=click.Path(path_type=Path), help="Show the table of an earlier --out, and stop.")
@with_json
@with_debug
def bench(
    study: Path | None,
    prepare: str | None,
    table: Path | None,
    out: Path | None,
    is_list: bool,
    as_json: bool,
    **given: Any,
) -> int | None:
    """Measure iclperm against the tools in use, on this machine: agreement first, then speed.

    STUDY is a study file or a run's folder, whose prompts are measured; without one, synthetic cases are.
    """
    from iclperm import bench as benchmark

    def say(words: str) -> None:
        click.echo(words, err=True)

    if is_list:
        click.echo(benchmark.listing(given["device"]))
    elif prepare is not None:
        return 0 if benchmark.prepare(prepare, say, given["device"]) else FAILED
    else:
        rows = benchmark.read_rows(table) if table else _measured(study, out, given, say)
        click.echo("\n".join(row.to_json() for row in rows) if as_json else benchmark.render(rows), nl=as_json)
    return None


def _measured(study: Path | None, out: Path | None, given: dict[str, Any], say: Callable[[str], None]) -> Any:
    from iclperm import bench as benchmark

    if out is not None and out.exists():
        benchmark.read_rows(output(out, is_folder=True))  # before anything is loaded
    read: dict[str, Any] = {} if study is None else rooms.commands.named_study(study)
    if given["models"] and read and read["study"].adapter is not None:
        say(f"note: {given['models']} is measured without the study's adapter ({read['study'].adapter})")
    try:
        rows = benchmark.run(benchmark.options(**read, **given), say, out)
    except KeyboardInterrupt:
        kept = 0 if out is None or not out.is_file() else len(benchmark.read_rows(out))
        where = "nothing is kept without --out" if out is None else f"{out} has {kept} rows"
        say(f"stopped; {where}: rounds that were not finished are run anew")
        raise click.exceptions.Exit(STOPPED) from None
    if out is not None:
        say(f"wrote {', '.join(map(str, [out, *benchmark.write_beside(rows, out)]))}")
    return rows


@cli.command(
    "lm-eval", context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def lm_eval(arguments: tuple[str, ...]) -> None:
    """lm-evaluation-harness with iclperm as its model: its own command line.

    Needs pip install 'iclperm[lm-eval]'.
    """
    harness_main(arguments)


@cli.command()
@click.argument("model", default="demo", required=False)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at; this machine alone.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0: one that is free.")
@click.option("--device", help=STUDY_KEYS["device"])
@click.option("--dtype", type=click.Choice(CHOICES["dtype"]), help=STUDY_KEYS["dtype"])
@click.option("--revision", help=STUDY_KEYS["revision"])
@click.option("--memory-budget", metavar="SIZE", help="Of keys and values kept: 4GiB, or 50% of what is free.")
@click.option("--api-key-env", metavar="NAME", help="Variable of a key to ask for.")
@with_debug
def serve(model: str, host: str, port: int, api_key_env: str | None, **options: str | None) -> None:
    """An OpenAI-compatible server of a model: demo, a folder, a GGUF file or a hub id.

    Needs pip install 'iclperm[serve]'.
    """
    serve_model(model, host, port, api_key_env, click.echo, **options)


@cli.command()
@click.argument("model", default="demo", required=False)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:0, mps, or balanced.")
@click.option(
    "--dtype", default="auto", show_default=True, type=click.Choice(CHOICES["dtype"]), help=STUDY_KEYS["dtype"]
)
@click.option("--revision", help=STUDY_KEYS["revision"])
@click.option(
    "--arch", "architectures", metavar="NAMES", help="Compile for these GPUs, which need not be here: 80,90 and so on."
)
@click.option("--out", type=click.Path(path_type=Path), help="A file for the report, beside what is printed.")
@with_json
@with_debug
def doctor(
    model: str,
    device: str,
    dtype: str,
    revision: str | None,
    architectures: str | None,
    out: Path | None,
    as_json: bool,
) -> int:
    """What this machine does with a model: what runs on which device, whether it is right, and how fast.

    MODEL is demo, a folder, a GGUF file or a hub id. What is printed names no person, folder or key: paste it into an
    issue.
    """
    try:
        wanted = [] if architectures is None else [int(word) for word in architectures.split(",")]
    except ValueError:
        raise click.UsageError(f"--arch is {architectures!r}; give numbers with commas between: 80,90") from None
    return rooms.doctor.doctor(model, device, dtype, revision, wanted, out, as_json=as_json)
