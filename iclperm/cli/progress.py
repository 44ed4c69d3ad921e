"""How far a run is, while it computes: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import Progress as Bar

from iclperm.runs.execute import Progress

_SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def shown_progress(*, quiet: bool) -> Iterator[Progress | None]:
    """What a run calls with its finished parts and all of them; it writes to stderr, and nothing where ``quiet``."""
    console = Console(stderr=True)
    if quiet:
        yield None
    elif console.is_terminal:
        with Bar(console=console, transient=True) as bar:
            task = bar.add_task("scoring", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        yield line_printer()


def line_printer() -> Progress:
    """Writes the first call, the last, and one every few seconds, as lines on stderr."""
    last = -_SECONDS_BETWEEN_LINES

    def show(done: int, total: int) -> None:
        nonlocal last
        if done == total or time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            click.echo(f"scored {done} of {total} parts", err=True)

    return show
