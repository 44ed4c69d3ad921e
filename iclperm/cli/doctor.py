"""What `iclperm doctor` does: one call, and each part is printed as soon as it is found. Loaded when it is run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

import click
from rich.console import Console
from rich.progress import Progress as Bar

from iclperm.base.files import write_whole
from iclperm.base.outputs import output
from iclperm.cli.failures import FAILED, STOPPED
from iclperm.engine import doctor as clinic
from iclperm.engine.doctor.diagnosis import HEAD, PARTS, Diagnosis, foot
from iclperm.errors import ConfigError, RunStopped
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
    """Prints what is found, and writes the same into ``out``; failed where a check is, stopped after Ctrl-C.

    Raises `ConfigError` where ``out`` cannot be written, before anything is looked at.
    """
    path = None if out is None else _place(out)
    with _shown(as_json) as shown:
        found = clinic.doctor(
            model, device=device, dtype=dtype, revision=revision, architectures=architectures, onlooker=shown
        )
    report = json.dumps(found.to_dict(), indent=1, allow_nan=False) + "\n" if as_json else found.report()
    click.echo(report if as_json else "\n".join(foot(found)), nl=not as_json)
    if path is not None:
        try:
            write_whole(path, report.encode())
        except OSError as error:
            raise RunStopped(f"cannot write to {path}: {_reason(error)}; the report is what is printed") from None
        click.echo(path, err=True)
    if found.stopped:
        click.echo("stopped; what is known so far is told", err=True)
        return STOPPED
    return 0 if found.passed else FAILED


def _place(out: Path) -> Path:
    """A file that can be written, as far as is known before the work; raises `ConfigError`."""
    path = output(out)
    reason = "it is a folder" if path.is_dir() else ""
    try:
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        reason = _reason(error)
    if reason:
        raise ConfigError(f"{path} cannot be written: {reason}; name another file with --out")
    return path


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


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
