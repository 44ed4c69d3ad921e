"""What `iclperm doctor` does: one call, and each part is printed as soon as it is found. Loaded when it is run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress as Bar

from iclperm.base.files import writable, write_whole
from iclperm.base.outputs import output
from iclperm.cli.failures import FAILED, STOPPED
from iclperm.engine import doctor as clinic
from iclperm.engine.doctor.diagnosis import HEAD, PARTS, Diagnosis, foot
from iclperm.progress import columns

_SECONDS = 25.0  # between lines, where there is no bar


def doctor(
    model: str,
    device: str,
    dtype: str,
    revision: str | None,
    architectures: Sequence[int],
    out: Path | None,
    *,
    as_json: bool,
) -> int:
    """Prints what is found, and writes the same into ``out``; failed where a check is, stopped after Ctrl-C."""
    path = None if out is None else output(out)
    with _shown(as_json) as shown:
        found = clinic.doctor(
            model, device=device, dtype=dtype, revision=revision, architectures=architectures, onlooker=shown
        )
    report = json.dumps(found.to_dict(), indent=1, allow_nan=False) + "\n" if as_json else found.report()
    click.echo(report if as_json else "\n".join(foot(found)), nl=not as_json)
    if path is not None:
        with writable(path):
            write_whole(path, report.encode())
        click.echo(path, err=True)
    if found.stopped:
        click.echo("stopped; what is known so far is told", err=True)
        return STOPPED
    return 0 if found.passed else FAILED


@contextmanager
def _shown(as_json: bool) -> Iterator[_Shown]:
    console = Console(stderr=True)
    if as_json or not console.is_terminal:
        yield _Shown(None, is_quiet=as_json)
        return
    with Bar(*columns(), console=console, transient=True, redirect_stdout=False) as bar:
        yield _Shown(bar)


class _Shown:
    """Prints the parts, with a bar below them on a terminal, and elsewhere a line on stderr from time to time."""

    def __init__(self, bar: Bar | None, *, is_quiet: bool = False) -> None:
        self._bar, self._is_quiet = bar, is_quiet
        self._task = None if bar is None else bar.add_task("", total=None)
        self._said = time.monotonic()

    def step(self, words: str) -> None:
        """See `iclperm.engine.doctor.Onlooker`."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=words)
        elif not self._is_quiet and time.monotonic() - self._said >= _SECONDS:
            self._said = time.monotonic()
            click.echo(words, err=True)

    def part(self, found: Diagnosis, name: str) -> None:
        """See `iclperm.engine.doctor.Onlooker`."""
        if self._is_quiet:
            return
        lines = [*(HEAD if name == PARTS[0] else ()), *found.part(name)]
        if self._bar is not None:
            self._bar.stop()
        if lines:
            click.echo("\n".join(lines))
        if self._bar is not None:
            self._bar.start()
