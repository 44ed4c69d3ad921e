"""What a terminal shows of plans, prompts, runs and folders; every number is in the objects' ``to_dict`` too."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self, cast

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from iclperm.cli.options import is_quiet
from iclperm.errors import printable
from iclperm.progress import duration
from iclperm.prompts.encode import PromptTokens
from iclperm.prompts.render import PromptText
from iclperm.report.parts import Table as FoundTable
from iclperm.runs.audit import RunSession, RunStatus, Verification
from iclperm.runs.lengths import PromptLengths
from iclperm.studies.report import Run
from iclperm.studies.several import StudyRuns
from iclperm.studies.tokens import TokenSavings, token_line
from iclperm.studies.told import bill_words, told
from iclperm.tasks.proposal import Proposal
from iclperm.tasks.task import Task

_MAX_SHOWN_PIECES = 12
_TRAILING = re.compile(" +$", re.MULTILINE)
_QUERIES = 500  # of a study that names none


class _SafeConsole(Console):
    """A console whose terminal no text of data can steer: its control characters are shown as escapes."""

    def print(self, *objects: Any, **how: Any) -> None:
        super().print(*(printable(each) if isinstance(each, str) else each for each in objects), **how)


class _Trimmed(io.TextIOBase):
    """Standard output without the spaces that fill lines up to the width."""

    def write(self, text: str, /) -> int:
        return sys.stdout.write(_TRAILING.sub("", text))

    def flush(self) -> None:
        sys.stdout.flush()


def stdout() -> Console:
    """The console for results. A file or a pipe has no width of its own, so tables get the room that they need, and
    its lines end where their words do. After ``--quiet`` it shows nothing."""
    console = _SafeConsole(highlight=False, quiet=is_quiet())
    if console.is_terminal:
        return console
    width = None if "COLUMNS" in os.environ else 120
    return _SafeConsole(highlight=False, width=width, quiet=is_quiet(), file=cast("IO[str]", _Trimmed()))


def print_run(console: Console, run: Run | StudyRuns, *, full: bool, kind: str | None = None) -> None:
    """What a run found, in brief or in full, ending in plain words; ``kind`` as `Run.findings` takes it."""
    found = told(run, kind, full=full)
    head = [*found.alerts, printable("\n".join(found.head)), *([] if full else [_cost(run)])]
    console.print(*head, sep="\n", markup=False, soft_wrap=True)
    print_tables(console, found.tables)
    if found.paid is not None:
        console.print("", found.paid, sep="\n", markup=False)
    elif not full:
        console.print("", token_line(TokenSavings.of(run.report)), sep="\n", markup=False)
    print_conclusion(console, found.conclusion)
    print_notes(console, found.notes)


def print_tables(console: Console, tables: Sequence[FoundTable]) -> None:
    """One after the other, an empty line before each."""
    for table in tables:
        console.print("", table, sep="\n")


def print_conclusion(console: Console, sentences: Sequence[str]) -> None:
    """The result in plain words."""
    console.print("", "[bold]Conclusion[/bold]", sep="\n")
    console.print(*sentences, sep="\n", markup=False)


def print_prompt(console: Console, prompt: PromptText, shots: int) -> None:
    """One whole prompt, with its right label."""
    text = Text()
    text.append(printable(prompt.context), style="dim")
    text.append(printable(prompt.query))
    text.append(printable(prompt.continuations[prompt.gold]), style="bold green")
    title = f"one prompt at k = {shots}"
    if prompt.is_generated:
        console.print(Panel(text, title=title, title_align="left"))
        console.print("the model writes on", "", sep="\n", markup=False)
        return
    labels = ", ".join(printable(repr(continuation)) for continuation in prompt.continuations)
    console.print(Panel(text, title=f"{title}, and its right label", title_align="left"))
    which = "this" if prompt.has_own_choices else "every"
    console.print(f"{which} prompt is scored with {labels}", "", sep="\n", markup=False)


def print_answering(console: Console, task: Task, right: str) -> None:
    """How the text that a model writes after a prompt is ended, read and compared."""
    answer = task.answer
    assert answer is not None
    named = [rule.name or rule.pattern for rule in answer.rules] or ([answer.filters.name] if answer.filters else [])
    rules = ", ".join(map(repr, named)) or "those of the check"
    rows = {
        "right answer": printable(right),
        "compared as": answer.check,
        "read by the rules": printable(rules),
        "text ends at": ", ".join(map(repr, task.stop)) or "the model's own end",
        "or after": f"{task.max_new_tokens:,} tokens",
    }
    console.print(facts_table("Answer", rows), "")


def print_tokens(console: Console, prompt: PromptText, tokens: PromptTokens) -> None:
    """How a model reads that prompt: what it opens with, tokens by part, and where each label stands."""
    opening, length = len(tokens.opening), len(tokens.pieces)
    rows = {
        "opens with": in_one_line(tokens.opening) or "no special token (this tokenizer adds none)",
        "tokens of the demonstrations": f"{tokens.num_context - opening:,}",
        "tokens of the query": f"{length - tokens.num_context:,}",
        "tokens of the prompt": f"{length:,}",
        "the prompt ends in": in_one_line(tokens.pieces[-_MAX_SHOWN_PIECES:]),
    }
    console.print(facts_table("Tokens", rows))
    if prompt.is_generated:
        return
    labels = [
        (printable(repr(continuation)), f"{length}:{length + len(label)}", in_one_line(label))
        for continuation, label in zip(prompt.continuations, tokens.labels, strict=True)
    ]
    console.print(_table("Labels", ("label", "span", "tokens"), labels))
    if tokens.is_resplit:
        print_notes(console, ["the query's last token merges with a label; it is scored with every label"])


class Shown:
    """How far runs are, one state in the place of the one before it on a terminal; elsewhere a line when it changes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._last: list[str] = []

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def replace(self, found: Sequence[RunStatus]) -> None:
        """Shows what was found now."""
        if self._live is not None:
            self._live.update(Group(*(table for status in found for table in _status_tables(status))), refresh=True)
            return
        lines = [_status_line(status) for status in found]
        for line in lines:
            if line not in self._last:
                self._console.print(line, markup=False, soft_wrap=True)
        self._last = lines


def _status_line(status: RunStatus) -> str:
    left = "" if status.seconds_left is None or status.is_finished else f", about {duration(status.seconds_left)} left"
    parts = f"{status.num_parts_done:,} of {status.num_parts:,} parts"
    of = "" if status.is_plain else f" of {status.tokens_unique:,}"
    tokens = f"{status.tokens_forwarded:,}{of} tokens"
    return printable(f"{status.model} on {status.task}: {parts}, {tokens}{left}").replace("\n", "\\n")


def print_status(console: Console, status: RunStatus) -> None:
    """How far a run is, and what each session did."""
    console.print(*_status_tables(status), sep="\n")


def _state(status: RunStatus) -> str:
    if status.is_finished:
        return "finished"
    if count := status.num_at_work:
        return f"at work: {count} process{'' if count == 1 else 'es'}"
    return "not finished: run the same study into it to continue"


def _waves(status: RunStatus) -> str:
    return f"{status.num_waves:,}{', more to come' if status.is_open else ''}"


def _status_tables(status: RunStatus) -> list[Table]:
    extent, left = status.extents[-1], status.seconds_left
    forwarded = f"{'' if status.is_token_count_complete else 'at least '}{status.tokens_forwarded:,}"
    rows = {
        "state": _state(status),
        "model": printable(status.model),
        "shots": listed(status.shots),
        **{name.replace("_", " "): f"{size:,}" for name, size in extent.items()},
        "grown from": "; ".join(_sizes(before) for before in status.extents[:-1]) or "-",
        **({"waves": _waves(status)} if status.num_waves else {}),
        "parts": f"{status.num_parts_done:,} of {status.num_parts:,}",
        "tokens forwarded": f"{forwarded}, prompt by prompt"
        if status.is_plain
        else f"{forwarded} of {status.tokens_unique:,} distinct",
        "time left": "-" if left is None or status.is_finished else f"about {duration(left)}",
        "disk space": f"{status.disk_bytes / 1e6:.1f} MB",
        "files in quarantine": f"{status.num_quarantined:,}",
    }
    if status.spent is not None and status.lost is not None:
        rows["paid for"] = bill_words(status.spent, status.lost.requests, status.lost.tokens)
    sessions = [
        (
            printable(session.name),
            f"{session.seconds:,.0f}",
            f"{session.num_parts:,}",
            f"{session.tokens_forwarded:,}",
            "yes" if session.is_closed else "no: at work, or killed",
        )
        for session in status.sessions
    ]
    return [
        facts_table(printable(f"{status.task} in {status.folder}"), rows),
        _table("Sessions", ("session", "seconds", "parts", "tokens", "ended"), sessions),
        *([_workers(status.sessions[-1])] if status.sessions and status.sessions[-1].workers else []),
    ]


def _workers(session: RunSession) -> Table:
    """The workers of a session."""
    rows = [
        (
            printable(worker.name),
            printable(worker.host),
            str(worker.pid),
            f"{worker.num_parts:,}",
            f"{60 * worker.num_parts / worker.seconds:,.1f}" if worker.seconds else "-",
            "lost" if worker.is_lost else "ended" if session.is_closed else "at work",
        )
        for worker in session.workers
    ]
    return _table("Workers of the last session", ("worker", "host", "process", "parts", "a minute", "state"), rows)


def print_verification(console: Console, verification: Verification, *, named: bool = False) -> None:
    """What a check found, under the folder's name where it is one of several (``named``)."""
    if named:
        console.print(printable(str(verification.folder)), markup=False, soft_wrap=True)
    for damage in verification.damage:
        console.print(f"damaged: {printable(damage)}", markup=False, soft_wrap=True)
    done = f"{verification.num_parts_done:,} of {verification.num_parts:,} parts"
    if verification.damage:
        console.print(
            "the next run sets this aside in quarantine/ and computes it anew; damaged replies of an API stay",
            soft_wrap=True,
        )
    elif verification.digest is None:
        console.print(f"whole so far, {done}: run the same study to continue", soft_wrap=True)
    else:
        console.print(f"whole, {done}", f"digest  {verification.digest}", sep="\n", soft_wrap=True)


def print_tasks(console: Console, tasks: Sequence[Task]) -> None:
    """The built-in tasks."""
    rows = []
    for task in tasks:
        about = "; ".join(text for text in (task.description, task.source, task.licence) if text)
        answers = task.answer.check if task.answer else f"{len(task.words)} labels"
        rows.append((task.name, answers, str(task.shots), printable(about)))
    console.print(_table("Built-in tasks", ("name", "answer", "k", "about"), rows))
    console.print(
        "iclperm tasks show NAME prints a prompt, iclperm tasks new NAME starts one of your own", soft_wrap=True
    )


def print_proposal(console: Console, found: Proposal, lengths: PromptLengths, model: str, path: Path) -> None:
    """What was found in a data file, and what to do with the task that it was made into."""
    console.print(facts_table("The file", {key: printable(value) for key, value in found.facts.items()}), "")
    splits = list(next(iter(found.counts.values())))
    total = sum(sum(row.values()) for row in found.counts.values())
    rows = [
        (
            printable(word),
            f"{sum(row.values()) / total:.1%}",
            *(f"{row[split]:,}" for split in splits),
            printable(", ".join(f"{value!r} {count:,}" for value, count in found.variants[word].items())),
        )
        for word, row in found.counts.items()
    ]
    console.print(_table("Labels", ("label", "share", *splits, "spelt in the file, with rows"), rows), "")
    if found.left_out:
        console.print(facts_table("Rows left out", {printable(why): f"{n:,}" for why, n in found.left_out.items()}), "")
    facts = {
        "window": f"{lengths.window:,}",
        "longest row": f"{lengths.longest:,}",
        "median row": f"{lengths.median:,}",
        "longest prompt": f"at most {lengths.whole:,}",
    }
    console.print(facts_table(printable(f"Tokens of {model}"), facts), "")
    notes = [*found.notes]
    if lengths.num_too_long:
        rows_are = "1 row is" if lengths.num_too_long == 1 else f"{lengths.num_too_long:,} rows are"
        notes.append(
            f"{rows_are} too long for the window beside the others: lower shots, cut the texts "
            "in the templates, or run with --on-overlong drop"
        )
    elif lengths.whole > lengths.window:
        notes.append("the longest rows together do not fit the window: --on-overlong drop leaves such queries out")
    if found.near:
        train, other, split = (printable(each).replace("\n", " ")[:60] for each in found.near[0])
        notes.append(
            f"{len(found.near):,} row{'s' if len(found.near) > 1 else ''} outside train nearly repeat one of it and "
            "flatter accuracies; keep one of each, "
            f"such as: {train!r} (train), {other!r} ({split})"
        )
    shares = [sum(row.values()) / total for row in found.counts.values()]
    test = sum(row["test"] for row in found.counts.values())
    dev = min(sum(row.get("dev", 0) for row in found.counts.values()), _QUERIES)
    is_uneven = max(shares) > 3 * min(shares)
    if is_uneven:
        notes.append(
            f"labels are uneven: always answering the most frequent one is right in {max(shares):.0%}; by default "
            "every label has as many queries, with --balance natural they come as they are"
        )
    print_notes(console, [printable(note) for note in notes])
    natural = f" --balance natural --queries {test}" if is_uneven or test < _QUERIES else ""
    lines = (
        f"iclperm tasks show {path} --model {model}",
        f"iclperm plan --task {path} --model {model}{natural}",
        f"iclperm run --task {path} --model {model}{natural} --out runs/{found.name}",
        f"iclperm report runs/{found.name}",
    )
    console.print("", f"{path} is written; next:", *lines, sep="\n  ", markup=False, soft_wrap=True)
    if dev:
        asked = f"{natural or f' --queries {_QUERIES}'} --dev-queries {dev} --sets 4 --permutations 16"
        search = (
            f"iclperm run --kind search --task {path} --model {model}{asked} --out runs/{found.name}-search",
            f"iclperm prompt runs/{found.name}-search",
        )
        console.print("or, for the best prompt to take away:", *search, sep="\n  ", markup=False, soft_wrap=True)


def print_files(console: Console, files: Sequence[str], folder: Path | None) -> None:
    """Where figures and results are; files are of one folder, or at one URL."""
    place = os.path.split(files[0])[0]
    names = ", ".join(os.path.split(file)[1] for file in files)
    runs = [] if folder is None else sorted(path.parent.name for path in folder.glob("*/items"))
    items = printable(f"  {folder}: {', '.join(f'{name}/' for name in runs) or 'items/*.parquet'}, study.yaml")
    lines = ("", "files:", printable(f"  {place}: {names}"), items)
    console.print(*lines, sep="\n", markup=False, soft_wrap=True)


def print_next_steps(console: Console, out: Path, *, most_shots: int) -> None:
    """Commands to go on with after the demo in ``out``; ``most_shots`` are those of its longest prompts."""
    steps = {
        "all tables": f"iclperm report {out}",
        "a prompt": f"iclperm tasks show mini_news --shots {most_shots}",
        "all answers": f"iclperm export {out} --out demo.csv",
        "larger study": f"iclperm run {out} --sets 12 --permutations 12 --extend",
        "your model": f"iclperm run {out}/study.yaml --model PATH --out my-run",
        "your task": "iclperm tasks new --from data.csv",
    }
    lines = (f"  {words:<12}  {step}" for words, step in steps.items())
    console.print("", "next:", *lines, sep="\n", markup=False, soft_wrap=True)


def print_notes(console: Console, notes: Sequence[str]) -> None:
    """Lines that should not be missed."""
    for note in notes:
        console.print(f"note: {note}", markup=False)


def listed(numbers: Sequence[int]) -> str:
    """Numbers with commas between."""
    return ", ".join(map(str, numbers))


def _cost(run: Run | StudyRuns) -> str:
    cost = run.report
    if cost.num_parts_resumed == cost.num_parts:
        mended = f"; damaged files set aside and written anew: {cost.num_quarantined}" if cost.num_quarantined else ""
        return printable(f"nothing to compute: all {cost.num_parts} parts were found in {run.folder}{mended}")
    resumed = (
        f", {cost.num_parts_resumed} of {cost.num_parts} parts found already done" if cost.num_parts_resumed else ""
    )
    damaged = f", {cost.num_quarantined} damaged files set aside and computed anew" if cost.num_quarantined else ""
    return f"computed in {cost.seconds:.0f} s{resumed}{damaged}"


def _sizes(extent: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {size:,}" for name, size in extent.items())


def in_one_line(pieces: Sequence[str]) -> str:
    """Tokens as one line."""
    return " ".join(printable(piece).replace("\n", "\\n").replace("\t", "\\t") for piece in pieces)


def facts_table(title: str, rows: Mapping[str, str]) -> Table:
    """Rows of two columns."""
    return _table(title, ("", ""), list(rows.items()))


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    # Text, or rich would take brackets in paths, labels and tokens for its markup.
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title_justify="left")
    table.title = Text(printable(title))
    table.title_style, table.show_header = "bold", any(header)
    for name in header:
        table.add_column(Text(printable(name)), overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table
