"""What a command says and exits with when it fails."""

from __future__ import annotations

import click

from iclperm.errors import ConfigError, IclpermError, RunStopped, is_out_of_memory, printable

FAILED, USAGE, STOPPED = 1, 2, 3
"""Exit codes beside 0; what stopped continues with the same command."""


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
