"""Standard output and standard error that may end or be full without ending the work that writes to them."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, Literal

import click

from iclperm.cli.failures import STOPPED

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class Output(io.RawIOBase):
    """A stream of the process that takes what it is given; ``error`` is the first that the system refused."""

    def __init__(self, descriptor: int) -> None:
        self.error: OSError | None = None
        self._descriptor = descriptor

    @classmethod
    def instead_of(cls, name: Literal["stdout", "stderr"]) -> Output | None:
        """Takes the place of one of `sys`, unless the process has none or another has taken it already."""
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper) or stream is not getattr(sys, f"__{name}__"):
            return None
        stream.flush()
        found = cls(stream.fileno())
        text = io.TextIOWrapper(
            io.BufferedWriter(found), stream.encoding, stream.errors, line_buffering=stream.line_buffering
        )
        setattr(sys, name, text)
        return found

    def write(self, raw: ReadableBuffer, /) -> int:
        size = len(memoryview(raw))
        if self.error is not None:
            return size
        try:
            return os.write(self._descriptor, raw)
        except OSError as error:
            self.error = error
            return size

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor


def after_output(code: int, output: Output | None) -> int:
    """The exit code of a command that would have ended with ``code``, once its last words are out.

    Who reads no further, as ``head`` does, has what it wanted. Anything else that refused them is told on stderr.
    """
    if output is None:
        return code
    sys.stdout.flush()
    if output.error is None or output.error.errno == errno.EPIPE:
        return code
    reason = (output.error.strerror or str(output.error)).lower()
    click.echo(
        f"error: standard output cannot be written: {reason}; what was computed is kept, the same command shows it",
        err=True,
    )
    return code or STOPPED
