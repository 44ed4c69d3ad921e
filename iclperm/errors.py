"""The errors iclperm raises: one small tree, every message one line naming the wrong value and the remedy."""

from __future__ import annotations

import errno
import traceback


def in_a_notebook(error: BaseException) -> list[str]:
    """What IPython shows of an error whose message says it all: the caller's own lines and the message, without the
    frames in iclperm and below. ``%debug`` has them all."""
    lines = []
    for frame, number in traceback.walk_tb(error.__traceback__):
        room = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if room == "iclperm":
            break
        if room not in ("IPython", "ipykernel"):
            (called,) = traceback.StackSummary.extract([(frame, number)])
            place = "" if "ipykernel" in called.filename else f"{called.filename}, "
            lines.append(f"{place}line {number}: {called.line}")
    return [*lines, printable(f"{type(error).__name__}: {error}")]


PLAINLY = "run it with plain=True (iclperm run --plain)"
"""The remedy for a model that the prefix tree cannot serve."""


class IclpermError(Exception):
    """Base of every error that iclperm raises on purpose."""

    _render_traceback_ = in_a_notebook


class RunInterrupted(KeyboardInterrupt):
    """Ctrl-C, or a notebook's interrupt, stopped a run: what is kept of it, and how it goes on."""

    _render_traceback_ = in_a_notebook


class ConfigError(IclpermError):
    """A study's configuration is invalid or contradicts itself."""


class UnknownKind(ConfigError):
    """A study, or a folder, is of a kind that no installed package declares."""


class KeyNotNamed(ConfigError):
    """A study asks to send the key in ``variable`` to a ``host`` that the user has not named for it."""

    def __init__(self, variable: str, host: str) -> None:
        super().__init__(
            f"the study asks to send the key in {variable} to {host}, which nobody named for it here; if it may go "
            f"there, add --send-key {variable}={host} (in Python send_keys={{{variable!r}: {host!r}}})"
        )
        self.variable = variable
        self.host = host


class DataError(IclpermError):
    """A dataset, a score table or another input array is missing, malformed or does not fit."""


class ModelError(IclpermError):
    """A model cannot be loaded or its architecture is not supported."""


class NoNumbers(ModelError):
    """A model gives NaN or infinity whatever it reads."""


class TokenizationError(IclpermError):
    """A prompt or a label does not tokenise the way the scorer needs."""


class RequestError(IclpermError, ValueError):
    """A call passed an argument of the wrong shape, type or range."""


class PlanError(IclpermError):
    """A study's work cannot be laid out within the limits given."""


class OutOfMemory(IclpermError):
    """Memory ran out, and smaller packs are not possible or might change results."""


class SelfCheckError(IclpermError):
    """The fast path disagrees with the reference beyond the tolerance."""


class KernelError(IclpermError):
    """A kernel of ours, named by ``kernel``, or the device itself failed while a model ran."""

    kernel: str = ""


class RunError(IclpermError):
    """A run directory is locked, incomplete or belongs to another study."""


def printable(text: str) -> str:
    """Text that cannot steer a terminal: control characters other than line breaks and tabs are escaped."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else repr(sign)[1:-1] for sign in text)


def said_by(error: BaseException) -> str:
    """An error of somebody else's in one short line; of a `KernelError` what it came of."""
    if isinstance(error, KernelError) and error.__cause__ is not None:
        error = error.__cause__
    said = (str(error).strip() or "no reason given").splitlines()[0]
    return f"{type(error).__name__}: {printable(said)[:_MOST_LETTERS]}"


_MOST_LETTERS = 200


class RunStopped(RunError):
    """The run cannot go on now; what is finished is kept, and the same command continues."""


class DamagedItem(RunError):
    """A file of items is not what its name says."""


# What PyTorch's allocators say in a plain RuntimeError: the host's, CUDA's, cuBLAS's.
_ALLOCATORS_SAY = ("can't allocate memory", "not enough memory", "out of memory", "alloc_failed")


# What CUDA, cuBLAS and Triton's driver say in a plain RuntimeError.
_DEVICES_SAY = ("cuda error", "cublas_status", "cudnn_status", "triton error")


def is_of_a_device(error: BaseException) -> bool:
    """Whether an error is a GPU's own or its libraries', known by name and words as in `is_out_of_memory`."""
    if any(kind.__name__ == "AcceleratorError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _DEVICES_SAY)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on the host or on a device.

    So are `OutOfMemory`, Python's MemoryError (NumPy's and Arrow's are derived from it), an OSError of that number, and
    PyTorch's errors, known by their name and words: torch is not imported.
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError | OutOfMemory) or any(
        kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__
    ):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _ALLOCATORS_SAY)
