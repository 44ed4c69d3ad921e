"""Whether a process is at work in a run folder: each that is holds the lock of a file of its own; a kill frees it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from iclperm.base.files import Folder
from iclperm.errors import IclpermError

_ENDING = ".work"


@contextmanager
def at_work(path: Path) -> Iterator[bool]:
    """Within, `num_at_work` counts this process; False where there is no run yet, or no locks are."""
    folder, place = Folder(path), path / "tmp" / f"{secrets.token_hex(8)}{_ENDING}"
    handle = None
    with suppress(OSError, IclpermError):  # only told to those who look on: no reason not to run
        handle = folder.locked(place) if folder.has(path / "FORMAT") else None
    try:
        yield handle is not None
    finally:
        if handle is not None:
            with suppress(OSError, IclpermError):
                folder.remove(place)
            os.close(handle)


def num_at_work(folder: Folder) -> int:
    """How many processes are at work in a folder, as far as locks tell: of another machine they often do not."""
    place = folder.path / "tmp"
    return sum(is_at_work(folder, place / name) for name in folder.names(place))


def is_at_work(folder: Folder, path: Path) -> bool:
    """Whether a file of ``tmp`` is that of a process which is at work now."""
    return path.name.endswith(_ENDING) and folder.is_locked(path)
