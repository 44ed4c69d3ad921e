"""What a command says and exits with when it fails, is ended, or warns."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import click

from iclperm.errors import ConfigError, IclpermError, RunStopped, is_out_of_memory, printable

FAILED, USAGE, STOPPED = 1, 2, 3
"""Exit codes beside 0; what stopped continues with the same command."""


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """A scheduler's SIGTERM ends a run as Ctrl-C does: what is finished is kept and recorded. A process that is forked
    within has nothing to keep, and dies of it."""
    owner = os.getpid()

    def interrupt(number: int, _: object) -> None:
        if os.getpid() == owner:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def warnings_in_a_line() -> Iterator[None]:
    """Without the place in the code, which says nothing to who typed a command."""

    def line(message: Warning | str, *_: object, **__: object) -> str:
        return f"warning: {' '.join(str(message).split())}\n"

    before, warnings.formatwarning = warnings.formatwarning, line
    try:
        yield
    finally:
        warnings.formatwarning = before


def exit_code(error: Exception) -> int:
    """The exit code of a command that ended in this error."""
    if isinstance(error, ConfigError):
        return USAGE
    return STOPPED if isinstance(error, RunStopped) or is_out_of_memory(error) else FAILED


def one_line(error: Exception) -> str:
    """What an error says and what to do about it, as one line that a terminal can show."""
    return printable(_words(error)).replace("\n", " ")


def usage(error: click.ClickException) -> str:
    """What is wrong with a command as one line, with the command that helps."""
    words = error.format_message().replace("\n", " ").rstrip(".")
    command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "iclperm"
    return printable(f"{words[:1].lower()}{words[1:]}; {command} --help tells more")


def _words(error: Exception) -> str:
    if isinstance(error, IclpermError):
        return str(error)
    if is_out_of_memory(error):
        return (
            "out of memory; what is finished is kept: free some and repeat the command, or repeat it with a smaller "
            f"--memory-budget ({type(error).__name__}: {error})"
        )
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {(error.strerror or str(error)).lower()}; repair it, or give another path"
    return f"unexpected {type(error).__name__}: {error}; --debug shows where"
