"""The one way in which files are written: whole or not there, whoever else writes, and whenever the process dies."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from iclperm.errors import RunStopped

_FOLDERS_CANNOT_BE_SYNCED = (errno.EINVAL, errno.ENOTSUP)  # said by some mounted file systems


def write_whole(path: Path, raw: bytes, *, durable: bool = True, staging: Path | None = None) -> None:
    """Writes or replaces a file: who opens it sees all that was there or all of ``raw``, never a part.

    A ``durable`` file survives a power loss once this returns, at the cost of two syncs; any survives a kill. It is
    made ready in the folder ``staging`` of the same file system, by default hidden beside its place. Raises `OSError`
    as the system does, and `RunStopped` where the file does not read back as written.
    """
    with _unfinished(path, staging) as unfinished:
        _write_through(unfinished, raw, durable=durable)
        os.replace(unfinished, path)
    if durable:
        sync_folder(path.parent)


def write_once(path: Path, raw: bytes, *, staging: Path | None = None) -> bool:
    """As a durable `write_whole`, unless a file is there, which is never replaced; whether ``raw`` was written."""
    if path.exists():
        return False
    with _unfinished(path, staging) as unfinished:
        _write_through(unfinished, raw, durable=True)
        is_written = _move_without_replacing(unfinished, path)
    sync_folder(path.parent)
    return is_written


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty file to write into, which takes the place of ``path`` at the end; after an error nothing is changed.

    For what is too large to be in memory: it survives a kill, as a `write_whole` that is not durable.
    """
    with _unfinished(path) as unfinished:
        yield unfinished
        os.replace(unfinished, path)


@contextmanager
def _unfinished(path: Path, staging: Path | None = None) -> Iterator[Path]:
    """An empty file of a name of its own, for what is to become ``path``; gone at the end unless it was moved."""
    # Process numbers repeat between containers that share a folder; a random name is nobody else's.
    name = f"{path.name}.{secrets.token_hex(8)}"
    unfinished = path.with_name(f".{name}") if staging is None else staging / name
    unfinished.touch(exist_ok=False)
    try:
        yield unfinished
    finally:
        unfinished.unlink(missing_ok=True)


def _write_through(path: Path, raw: bytes, *, durable: bool) -> None:
    with path.open("wb") as file:
        file.write(raw)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    if path.read_bytes() != raw:
        raise RunStopped(f"{path} does not read back as written; check the disk, then run again")


def _move_without_replacing(source: Path, target: Path) -> bool:
    """Whether ``source`` was moved: not where another process was faster."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        if target.exists():
            return False
        os.rename(source, target)
    return True


def sync_folder(path: Path) -> None:
    """Makes what was created or renamed in a folder survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _FOLDERS_CANNOT_BE_SYNCED:
            raise
    finally:
        os.close(descriptor)


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """What the system refuses inside becomes a `RunStopped` naming ``path``."""
    try:
        yield
    except OSError as error:
        raise RunStopped(
            f"cannot write to {path}: {(error.strerror or str(error)).lower()}; make room or give another folder, "
            "then run the same command to continue"
        ) from None
