"""What `iclperm.run` shows of a run while it computes, where it is asked to (``progress=True``), as the commands do.

A bar on a terminal and in a notebook, with tokens, parts and the time left; lines elsewhere. Anything with an
``interval`` and a ``show(advance)`` can be given as ``progress=`` instead (`Watcher`), or a function of the numbers of
finished parts and of all parts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, TextIO

from iclperm.report.parts import in_one_line
from iclperm.runs.progress import ANSWERING, Advance, Watcher

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import ProgressColumn

__all__ = ["Advance", "ProgressBar", "ProgressLines", "Watcher", "shown_progress"]


@contextmanager
def shown_progress() -> Iterator[Watcher]:
    """Shows a run on stderr: a bar on a terminal, or in a notebook that has ipywidgets, and lines elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    has_bar = (console.is_terminal and not console.is_jupyter) or (console.is_jupyter and find_spec("ipywidgets"))
    if not has_bar:
        yield ProgressLines(sys.stderr)
        return
    shown = None
    try:
        with Progress(*columns(), console=console, transient=True) as bar:
            shown = ProgressBar(bar)
            yield shown
    finally:  # a notebook is read later, and keeps no bar
        if console.is_jupyter and shown is not None and shown.answered is not None:
            console.print(words(shown.answered), markup=False, highlight=False)


def columns() -> tuple[ProgressColumn, ...]:
    """Of a bar: words, which go on in a second line where it is narrow, and the bar itself."""
    from rich.progress import BarColumn, TextColumn
    from rich.table import Column

    return TextColumn("{task.description}", markup=False, table_column=Column()), BarColumn(bar_width=20)


class ProgressBar:
    """A bar of rich, which a thread of its own draws; the words beside it are new every second."""

    interval = 1.0

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None)
        self.answered: Advance | None = None
        """How far answering was when it was last told; None before it began."""

    def show(self, advance: Advance) -> None:
        """See `Watcher`."""
        if advance.stage == ANSWERING:
            self.answered = advance
        total = 1.0 if advance.stage == ANSWERING else None
        self._bar.update(self._task, description=words(advance), completed=advance.share, total=total)


class ProgressLines:
    """Lines: when answering begins and ends, and at least every half a minute."""

    interval = 5.0

    def __init__(self, file: TextIO, seconds: float = 25.0) -> None:
        self._file = file
        self._seconds = seconds
        self._last = time.monotonic()
        self._stage = ""

    def show(self, advance: Advance) -> None:
        """See `Watcher`."""
        is_new, self._stage = advance.stage != self._stage, advance.stage
        is_end = advance.num_parts_done == advance.num_parts
        if time.monotonic() - self._last >= self._seconds or (advance.stage == ANSWERING and (is_new or is_end)):
            self._last = time.monotonic()
            self._file.write(f"{words(advance)}\n")
            self._file.flush()


def words(advance: Advance) -> str:
    """How far a run is, in a line: "demo on mini_news: scoring, 8,296 of 16,000 tokens, 1 of 2 parts, 3 s left"."""
    found = [f"{in_one_line(advance.model)} on {in_one_line(advance.task)}: {advance.stage}"]
    if advance.stage == ANSWERING:
        found[0] += f" wave {advance.wave}" if advance.wave else ""
        wanted = "" if advance.tokens_wanted is None else f" of about {advance.tokens_wanted:,}"
        found.append(f"{advance.tokens:,}{wanted} tokens")
        found.append(f"{advance.num_parts_done:,} of {advance.num_parts:,} parts")
        if advance.num_parts_done < advance.num_parts and advance.seconds_left is not None:
            found.append(f"about {duration(advance.seconds_left)} left{' of it' if advance.wave else ''}")
    elif advance.seconds >= 1:
        found.append(f"for {duration(advance.seconds)}")
    return ", ".join(found)


def duration(seconds: float) -> str:
    """A length of time in the largest unit that suits it."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6_000 else f"{seconds / 3_600:,.1f} h"
