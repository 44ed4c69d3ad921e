"""What each command does: one call of the API, then what it found is printed. Loaded when a command is run.

Functions that can fail in more than one way return the exit code; all raise what the API raises.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import click
from rich.console import Console

from iclperm import api
from iclperm.base.files import writable, write_once, write_whole
from iclperm.base.outputs import output
from iclperm.base.remote import is_url, local, written
from iclperm.base.remote import shown as shown_url
from iclperm.cli import terminal
from iclperm.cli.arguments import study_of
from iclperm.cli.cells import print_cells, print_grid_plan
from iclperm.cli.failures import FAILED, STOPPED, one_line
from iclperm.cli.options import is_quiet
from iclperm.endpoint.keys import named_by_flags
from iclperm.errors import ConfigError, DamagedItem, KeyNotNamed, RunStopped, printable
from iclperm.external import Description, describe, load
from iclperm.grids.grid import Grid, cells
from iclperm.grids.running import GridRuns
from iclperm.integrations import render_harness_task
from iclperm.progress import shown_progress
from iclperm.report import write_report
from iclperm.report.bundle import problem
from iclperm.report.figure_files import FigureFile, figure_files
from iclperm.report.parts import Findings, plain
from iclperm.report.table_files import TableFile, sheets_of
from iclperm.runs.finish import open_one
from iclperm.runs.formats import is_grid, is_several
from iclperm.runs.lengths import prompt_lengths
from iclperm.runs.limits import WorkLimits
from iclperm.runs.preview import sample_answer, sample_prompt, sample_tokens
from iclperm.runs.progress import Watcher
from iclperm.runs.prompt import Format
from iclperm.runs.run import RunReport
from iclperm.studies import several
from iclperm.studies.comparing_findings import Comparing
from iclperm.studies.comparing_page import NAME, write_tables
from iclperm.studies.prompts import restricted_tasks, restricted_words
from iclperm.studies.report import Run
from iclperm.studies.several import StudyRuns
from iclperm.studies.told import foreign_task, growth_note, told
from iclperm.study.study import Study
from iclperm.tasks.proposal import propose
from iclperm.tasks.task import Task, builtin_tasks, template_text

Found = TypeVar("Found")
DEMO_STUDY: Mapping[str, Any] = {"sets": 10, "permutations": 10, "shots": [0, 1, 2, 4, 8], "queries": 120}
"""The choices of the demo; all others are the defaults."""


def named_study(source: Path) -> dict[str, Any]:
    """For the benchmark: the study in a file or a run's folder, and what to call it."""
    return {"study": study_of(source, {}), "name": source.resolve().stem}


def demo(out: Path, *, as_json: bool, choices: Mapping[str, Any] = DEMO_STUDY) -> int:
    """Runs a study of these choices on the bundled model into ``out``, shows one of its prompts and what to do next."""
    study = Study(**choices)
    console = terminal.stdout()
    if not as_json:
        console.print(f"The study runs k = {terminal.listed(study.shot_list(0))} demonstrations. One of its prompts:")
        terminal.print_prompt(console, sample_prompt(study, shots=2), shots=2)
    with progress_of(as_json) as progress:
        finished = api.run(study, out, progress=progress)
    code = _show_new(console, finished, as_json=as_json)
    if not as_json:
        terminal.print_next_steps(console, out, most_shots=study.shot_list(0)[-1])
    return code


def run(
    source: Path | None,
    flags: Mapping[str, str | None],
    *,
    extend: bool,
    mixed: bool,
    as_json: bool,
    send_keys: Sequence[str] = (),
    limits: WorkLimits | None = None,
    with_text: bool | None = None,
    workers: int | None = None,
    ray: str | None = None,
) -> int:
    """Runs the study that `study_of` finds, and shows it in brief. ``send_keys`` are flags (`named_by_flags`); who sits
    at a terminal is asked for one that is missing."""
    study = study_of(source, flags)
    if study.out is None:
        raise ConfigError("there is no run folder; name one with --out, or with the study's key 'out'")

    def once(named: Mapping[str, Sequence[str]]) -> Run | StudyRuns:
        with progress_of(as_json) as progress:
            return api.run(
                study,
                extend=extend,
                mixed=mixed,
                progress=progress,
                limits=limits,
                send_keys=named,
                with_text=with_text,
                workers=workers,
                ray=ray,
            )

    named = named_by_flags(send_keys)
    if flags.get("endpoint") is not None and study.endpoint is not None and study.endpoint.api_key_env is not None:
        # The flag replaces the study's block as a whole: variable and host are the user's words.
        named.setdefault(study.endpoint.api_key_env, []).append(str(study.endpoint.address))
    try:
        finished = once(named)
    except KeyNotNamed as error:
        question = f"Send the key in {error.variable} to {error.host}?"
        if not (sys.stdin.isatty() and sys.stderr.isatty() and click.confirm(question, err=True)):
            raise
        finished = once({**named, error.variable: [*named.get(error.variable, []), error.host]})
    _note_restricted(finished, with_text)
    return _show_new(terminal.stdout(), finished, as_json=as_json)


def grid(
    source: str,
    out: Path | None,
    send_keys: Sequence[str],
    *,
    only_plan: bool,
    rate: float | None,
    as_json: bool,
    **choices: Any,
) -> int:
    """Shows what a grid costs, runs its cells unless ``only_plan``, and writes the comparison of each kind; failed
    where a cell did."""
    wanted = Grid.from_file(source)
    console, place = terminal.stdout(), out or (wanted.out and Path(wanted.out)) or None
    if place is None and not only_plan:
        raise ConfigError("there is no folder for the grid; name one with --out, or with its key 'out'")
    named = list(cells(wanted))
    quiet = as_json or is_quiet()

    def planning(name: str) -> None:
        if not quiet:
            click.echo(f"plan {named.index(name) + 1} of {len(named)}: {name}", err=True)

    costs = api.plan_grid(wanted, place, told=planning)
    if only_plan and as_json:
        _print_json([{**asdict(cell)} for cell in costs.cells])
    elif not as_json:
        print_grid_plan(console, costs, rate)
    if only_plan:
        return 0
    turn = iter(range(1, len(costs.cells) + 1))

    def running(name: str, failure: str | None) -> None:
        if failure is not None:
            click.echo(f"failed: {name}: {printable(failure)}", err=True)
        elif not quiet:
            click.echo(f"cell {next(turn)} of {len(costs.cells)}: {name}", err=True)

    with progress_of(as_json) as progress:
        ran = api.run_grid(
            wanted, place, costs=costs, told=running, progress=progress, send_keys=named_by_flags(send_keys), **choices
        )
    return _show_grid(console, ran, as_json=as_json)


def _show_grid(console: Console, ran: GridRuns, *, as_json: bool) -> int:
    """The cells, and the comparison of those of each kind that has several; failed where a cell did."""
    compared: dict[str, list[Path]] = {}
    for kind, names in ran.by_kind().items():
        found = None
        while found is None and len(names) > 1:
            titles = [(ran.cells[name].task, ran.cells[name].model) for name in names]
            try:
                found = api.compare([ran.place(name) for name in names], titles=titles)
            except DamagedItem as error:
                damaged = next((name for name in names if str(ran.place(name)) in str(error)), None)
                if damaged is None:
                    raise
                ran = ran.without(damaged, str(error))
                names = [name for name in names if name != damaged]
                click.echo(f"failed: {damaged}: {printable(str(error))}", err=True)
        if found is not None:
            target = ran.folder / "compare" / kind
            compared[kind] = Wanted(target, None, (), ()).written(found)
            if not as_json and not is_quiet():
                console.print("", f"[bold]{kind}: {len(names)} cells[/bold]", sep="\n")
                terminal.print_tables(console, found.tables(full=False))
                console.print(
                    "", f"what differs between them: {compared[kind][-1]}", sep="\n", markup=False, soft_wrap=True
                )
    if as_json:
        about = {"folder": str(ran.folder), "finished": ran.finished, "failed": ran.failed, "missing": ran.missing}
        _print_json([{**about, "compared": {kind: list(map(str, paths)) for kind, paths in compared.items()}}])
    else:
        print_cells(console, ran)
    return FAILED if ran.failed else STOPPED if ran.missing else 0


def status(folder: Path, *, as_json: bool) -> int:
    """Shows how far a run is, or each of those of a study; stopped where something is missing."""
    if is_grid(folder) and not as_json:
        ran = api.open_grid(folder)
        print_cells(terminal.stdout(), ran)
        return FAILED if ran.failed else STOPPED if ran.missing else 0
    missing, found = _missing(folder, may_read=False), _each(api.status(folder))
    if as_json:
        _print_json([status.to_dict() for status in found])
    else:
        for status in found:
            terminal.print_status(terminal.stdout(), status)
    return 0 if not missing and all(status.is_finished for status in found) else STOPPED


def watch(folder: Path, *, seconds: float = 2.0) -> int:
    """Shows how far a run is again and again, until it is finished or the user has seen enough."""
    console = terminal.stdout()
    try:
        with terminal.Shown(console) as shown:
            while True:
                found = _each(api.status(folder))
                shown.replace(found)
                if all(status.is_finished for status in found) and not (is_several(folder) and _not_begun(folder)):
                    return 0
                time.sleep(seconds)
    except KeyboardInterrupt:
        return 0


def _not_begun(folder: Path) -> list[str]:
    """The runs of a study of several that have not begun."""
    return several.begun(folder, may_read=False)[1]


def verify(folder: Path, *, as_json: bool) -> int:
    """Shows what a check of every byte found; failed where there is damage, stopped where something is missing."""
    missing, found = _missing(folder, may_read=True), _each(api.verify(folder))
    if as_json:
        _print_json([verified.to_dict() for verified in found])
    else:
        for verified in found:
            terminal.print_verification(terminal.stdout(), verified, named=len(found) > 1)
    if any(verified.damage for verified in found):
        return FAILED
    return 0 if not missing and all(verified.digest is not None for verified in found) else STOPPED


def report(
    folder: Path | str,
    out: Path | str | None,
    kind: str | None,
    *,
    with_text: bool | None,
    tables: Sequence[str] = (),
    figures: Sequence[str] = (),
    width: str | None = None,
    read_by: Sequence[str] = (),
    as_json: bool,
    **statistics: str | None,
) -> int:
    """Shows all that a finished run says, and writes its page beside the figures; ``with_text`` puts the texts of the
    data into it, None those that may be handed on. A report of other ``statistics`` or another ``kind`` has a folder of
    its own. Texts are also read ``read_by`` the rules of other tasks.

    Stopped where its files cannot be written into the ``out`` that was asked for. What is read or written at a URL
    needs an ``out``.
    """
    if isinstance(folder, Path) and is_grid(folder):
        others = (out, kind, with_text, tables, figures, width, read_by, *statistics.values())
        return _report_grid(folder, others, as_json=as_json)
    if is_url(folder) and out is None:
        raise ConfigError(f"{shown_url(str(folder))} is a URL; say where its report goes with --out")
    files, wanted = figure_files(figures, width), list(map(TableFile.of, tables))
    folder = local(folder)
    found = api.open_run(folder, **statistics)
    if read_by:
        if not isinstance(found, Run):
            raise ConfigError(f"{folder} holds several runs; give the folder of one of them with --read-by")
        found.read_by(*read_by)
    taken: list[Path] = []
    if files or wanted:
        said = told(found, kind)
        keeps_texts = not restricted_tasks(found) if with_text is None else with_text
        sheets = sheets_of([table if keeps_texts else table.without_texts() for table in said.tables], said.notes)
        taken = [*(each.written(said.plots) for each in files), *(each.written(sheets) for each in wanted)]
    changed = [part for part in (kind, *statistics.values(), "read-by" if read_by else None) if part]
    if changed and out is None:
        out = folder / "-".join(("report", *changed))  # beside the study's own report, not over it
    with written(out) as (place, name_of):
        refused = show(
            terminal.stdout(),
            found,
            as_json=as_json,
            out=place,
            full=True,
            kind=kind,
            page=partial(api.write_page, with_text=with_text),
            name_of=name_of,
        )
    if as_json:
        _note_growth(found.report)
    for path in taken:
        click.echo(path, err=as_json)
    if refused is None:
        _note_restricted(found, with_text)
        _note_pictures()
        return 0
    reason = one_line(refused).split(";")[0]
    click.echo(f"{'error' if out else 'note'}: no figures: {reason}; --out names a folder for them", err=True)
    return STOPPED if out else 0


def _report_grid(folder: Path, others: Sequence[object], *, as_json: bool) -> int:
    if any(others):
        raise ConfigError(f"{folder} is a grid, whose report has no options; give one of its cells for them")
    return _show_grid(terminal.stdout(), api.open_grid(folder), as_json=as_json)


def _note_pictures() -> None:
    if (reason := problem()) is not None:
        click.echo(f"note: the page's figures are pictures; {reason}", err=True)


def export(folder: Path | str, out: Path | str, form: Any = "table", *, with_text: bool = False) -> None:
    """Writes the answers of a finished run into one file, or as sample logs into a folder."""
    folders = [*several.folders(folder).values()] if is_several(folder := local(folder)) else [folder]
    if len(folders) > 1:
        raise ConfigError(f"{folder} holds several runs; export them one by one: {', '.join(map(str, folders))}")
    run = Run.of(open_one(folders[0]))
    click.echo(run.export(out, form, with_text=with_text))
    if form == "lm-eval" and (num_weighted := int((run.weights != 1).sum())):
        click.echo(f"note: {num_weighted:,} queries count more than once, and sample logs have each once", err=True)
    _note_growth(run.report)


def _note_restricted(found: Run | StudyRuns, with_text: bool | None) -> None:
    if with_text is None and (withheld := restricted_tasks(found)):
        click.echo(f"note: {restricted_words(withheld)}; --with-text keeps them", err=True)


def _note_growth(report: RunReport) -> None:
    for note in growth_note(report):
        click.echo(f"note: {note}", err=True)


def prompt(folder: Path, name: str | None, form: Format | None, out: Path | None, **cell: Any) -> None:
    """Prints one prompt of a finished run, or writes it into a file; what is told of it goes to stderr."""
    found = api.open_run(folder)
    given = {key: value for key, value in cell.items() if value is not None and value is not False}
    if isinstance(found, StudyRuns):
        shown = found.prompt(name, **given)
    elif name is not None:
        raise ConfigError(f"{folder} is one run; leave out --run")
    else:
        shown = found.prompt(**given)
    text = shown.formatted(form)
    for line in [*shown.said(), *_foreign(found)]:
        click.echo(printable(line).replace("\n", "\\n"), err=True)
    if out is None and sys.stdout.isatty():
        safe = printable(text)
        if safe != text:
            click.echo(
                "control characters are shown as escapes; --out, or a pipe, gets the prompt to the letter", err=True
            )
        click.echo(safe)
        return
    if out is None:
        click.echo(text, nl=False, color=True)  # else click would take out what it knows for colours
        return
    path = output(out)
    with writable(path):
        write_whole(path, text.encode())
    click.echo(path, err=True)


def _foreign(found: Run | StudyRuns) -> list[str]:
    runs = [found] if isinstance(found, Run) else [*found.runs.values()]
    return list(dict.fromkeys(note for run in runs for note in foreign_task(run.study, run.task)))


@dataclass(frozen=True)
class Wanted:
    """The files that a comparison is asked for."""

    out: Path | None
    page: Path | None
    tables: Sequence[TableFile]
    figures: Sequence[FigureFile]

    @classmethod
    def of(
        cls, out: Path | None, page: Path | None, tables: Sequence[str], figures: Sequence[str], width: str | None
    ) -> Self:
        """From what the flags say; raises `ConfigError` before anything is read."""
        return cls(out, page, list(map(TableFile.of, tables)), figure_files(figures, width))

    def written(self, found: Comparing) -> list[Path]:
        """Writes them; returns their paths."""
        paths = []
        if self.out is not None:
            paths = write_report(self.out, found, {"kind": "compare", **found.to_dict()})
            paths += [*write_tables(found, self.out), api.write_comparison(found, self.out / NAME)]
        if self.page is not None:
            paths.append(api.write_comparison(found, self.page))
        paths += [each.written(found.sheets()) for each in self.tables]
        plots = found.plots() if self.figures else {}
        return paths + [each.written(plots) for each in self.figures]


def compare(runs: Sequence[Path], shared: str | None, sizes: str | None, wanted: Wanted, *, as_json: bool) -> None:
    """Shows finished runs side by side, and writes the files that are wanted of them."""
    try:
        parameters = None if sizes is None else [float(size) for size in sizes.split(",")]
    except ValueError:
        raise ConfigError(f"--sizes must be numbers with commas between, such as 0.5e9,7e9; got {sizes!r}") from None
    found = api.compare(runs, shared=shared, sizes=parameters)
    _show_findings(found, wanted.written(found), as_json=as_json)
    if wanted.out is not None or wanted.page is not None:
        _note_pictures()


def stats(files: Sequence[Path | str], axes: str | None, out: Path | str | None, *, as_json: bool) -> None:
    """Shows the statistics of answers that others made, and writes their report where a folder is named."""
    found = describe(load(list(files), axes=axes))
    content = {"kind": "stats", **found.to_dict()}
    with written(out) as (place, name_of):
        paths = [] if place is None else list(map(name_of, write_report(place, found, content)))
    _show_findings(found, paths, as_json=as_json)


def _show_findings(found: Findings, paths: Sequence[Path | str], *, as_json: bool) -> None:
    """Prints what is no run, and the files that were written of it."""
    if as_json:
        _print_json([found.to_dict()])
        return
    console = terminal.stdout()
    lines = found.conclusion()
    if isinstance(found, Description) and found.missing.first_line():
        console.print(lines.pop(0), markup=False, soft_wrap=True)  # many answers are missing: that comes first
    terminal.print_tables(console, found.tables(full=True))
    terminal.print_conclusion(console, lines)
    terminal.print_notes(console, found.warnings)
    if paths:
        console.print("", *map(str, paths), sep="\n", markup=False, soft_wrap=True)


def list_tasks() -> None:
    """Shows the built-in tasks."""
    terminal.print_tasks(terminal.stdout(), [Task.load(name) for name in builtin_tasks()])


def show_task(name: str, data: str | None, model: str, shots: int | None, query: int, chat: str) -> None:
    """Shows one prompt of a task with its tokens, and how an answer to it is read."""
    task = Task.load(name, data)
    shown = task.shots if shots is None else shots
    study = Study(task=name, data=data, model=model, sets=1, permutations=1, shots=shown, queries=query + 1, chat=chat)
    prompt, console = sample_prompt(study, query=query), terminal.stdout()
    terminal.print_prompt(console, prompt, shown)
    if task.answer is not None:
        terminal.print_answering(console, task, sample_answer(study, prompt))
    terminal.print_tokens(console, prompt, sample_tokens(study, prompt))


def new_task(name: str, out: Path | None, *, generated: bool) -> None:
    """Writes a task file to start from; raises `ConfigError` where that cannot be, or a file is there already."""
    path = output(out or f"{name}.yaml")
    _write_new(path, template_text(name, generated=generated).encode())
    click.echo(f"{path}: put your data beside it, then: iclperm tasks show {path}")


def propose_task(
    data: Path, name: str | None, out: Path | None, *, label: str | None, texts: Sequence[str], model: str
) -> None:
    """Writes the task that a data file looks like, and shows what was found in it."""
    folder = (out.parent if out is not None else Path()).resolve()
    found = propose(data, folder, name=name, label=label, texts=texts)
    path = output(out or f"{found.name}.yaml")
    assert found.task is not None
    lengths = prompt_lengths(found.task, model)
    _write_new(path, found.text.encode())
    terminal.print_proposal(terminal.stdout(), found, lengths, model, path)


def render_task(name: str, out: Path | None, include_path: Path | None, limit: int | None, data: Path | None) -> None:
    """Writes a task of lm-evaluation-harness as the harness renders it; raises `ConfigError` where that cannot be."""
    folder = Path(out or name)
    if Path(name).suffix in (".yaml", ".yml"):
        raise ConfigError(f"{name} is a file; give the task's name, and its folder by --include-path")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already; name another folder with --out")
    for option, given, held in (("--include-path", include_path, "task files"), ("--data", data, "rows")):
        if given is not None and not given.is_dir():
            raise ConfigError(f"{option} {given} is no folder; name one that holds {held}")
    found = render_harness_task(name, include_path, limit, data)
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in found.files.items():
        _write_new(output(folder / file), content)
    for words in found.left_out:
        click.echo(f"left out: {words}", err=True)
    for words in found.gaps:
        click.echo(f"note: {words}, so a template may write None there", err=True)
    rows = ", ".join(f"{number:,} rows of {split}" for split, number in found.num_rows.items())
    click.echo(f"{folder / f'{name}.yaml'}: {rows}; see a prompt: iclperm tasks show {folder / f'{name}.yaml'}")


def _write_new(path: Path, content: bytes) -> None:
    try:
        reason = "" if write_once(path, content) else "file exists"
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
    if reason:
        raise ConfigError(f"{path} cannot be written: {reason}; name another file with --out")


def progress_of(as_json: bool) -> AbstractContextManager[Watcher | None]:
    """Shows progress within, unless JSON or nothing is to be printed."""
    return nullcontext() if as_json or is_quiet() else shown_progress()


def _missing(folder: Path, *, may_read: bool) -> list[str]:
    """What of a study of several runs has not begun (`several.begun`), named on stderr; nothing of one run."""
    missing = several.begun(folder, may_read=may_read)[1] if is_several(folder) else []
    if missing:
        click.echo(f"not begun: {', '.join(missing)}; unless it is at work, run the study again to continue", err=True)
    return missing


def _each(found: Found | dict[str, Found]) -> list[Found]:
    """What was found of one run, or of each of those of a study."""
    return [*found.values()] if isinstance(found, dict) else [found]


def _show_new(console: Console, finished: Run | StudyRuns, *, as_json: bool) -> int:
    """What a run found, in brief; the exit code."""
    refused = show(console, finished, as_json=as_json)
    if refused is None:
        return 0
    click.echo(f"error: {one_line(refused)}", err=True)
    return STOPPED


def show(
    console: Console,
    finished: Run | StudyRuns,
    *,
    as_json: bool,
    out: Path | None = None,
    full: bool = False,
    kind: str | None = None,
    page: Callable[..., Path] | None = None,
    name_of: Callable[[Path], str] = str,
) -> RunStopped | None:
    """Prints a run, then writes its figures, and its ``page`` by what writes one; a folder that refuses them hides no
    result, its error is returned. ``name_of`` says how a file is called where it is read."""
    if not as_json:
        terminal.print_run(console, finished, full=full, kind=kind)
    refused, files = None, []
    try:
        files = finished.write_report(out, kind)
        if page is not None:
            files.append(page(finished, out, kind))
    except RunStopped as error:
        refused = error
    if as_json:
        _print_json([_as_json(finished, list(map(name_of, files)), kind)])
    elif files:
        terminal.print_files(console, list(map(name_of, files)), finished.folder)
    return refused


def _as_json(finished: Run | StudyRuns, files: Sequence[str], kind: str | None) -> dict[str, Any]:
    return {
        **finished.report_content(kind),
        "run": plain(finished.report),
        "digest": finished.quick_digest if isinstance(finished, Run) else finished.digest,
        "folder": str(finished.folder),
        "files": list(files),
    }


def _print_json(contents: list[dict[str, Any]]) -> None:
    """One content by itself, others as a list."""
    click.echo(json.dumps(contents[0] if len(contents) == 1 else contents, indent=1, allow_nan=False))
