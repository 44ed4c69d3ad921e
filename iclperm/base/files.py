"""The one way to files: written whole or not at all, and reached inside a folder from its handle, past no link.

Whoever gave a folder may have put a link, a pipe or a file of any size in the place of any file in it. So `Folder`
opens its path, which may itself be a link that its user typed, and from there every name by its parent's handle,
follows no link, and reads regular files up to a size. Who may write into the folder while it is read has the rights
of its user, and is not guarded against.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from fnmatch import translate
from glob import has_magic
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from iclperm.errors import RunError, RunStopped

MOST_BYTES = 1 << 32
"""Of one file that is read at once, unless its reader says less."""
MOST_ENTRIES = 1_000_000
"""Of names in one folder."""
MOST_VISITED = 100_000
"""Of names that a pattern may lead to."""
_FOLDERS_CANNOT_BE_SYNCED = (errno.EINVAL, errno.ENOTSUP)  # said by some mounted file systems
_MET_NO_FOLDER = (errno.ELOOP, errno.EMLINK, errno.ENOTDIR)  # a link, by the words of three systems
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_POINTERS = {b"version https://git-lfs.github.com/": "git lfs pull", b"/annex/objects/": "git annex get"}
"""How the text begins that stands for a file which was not fetched, and what fetches it."""


class _Slot(NamedTuple):
    """A name in a folder that is open; ``path`` is the whole of it, for errors."""

    handle: int
    name: str
    path: Path


class Folder:
    """A folder and what is below it, each reached from the folder's handle; a link on the way is a `RunError`.

    Methods take whole paths, of which the folder's own is the beginning. They raise `OSError` as the system does, and
    `RunError` in one line for what is no regular file, is too large, or is but a pointer to a file that version control
    has not fetched.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def read(self, path: Path, most: int = MOST_BYTES) -> bytes:
        """A file of at most ``most`` bytes."""
        try:
            with self.opened(path) as file:
                size = os.fstat(file.fileno()).st_size
                if size > most:
                    raise RunError(f"{path} has {size:,} bytes; at most {most:,} are read there: move it elsewhere")
                raw = file.read()
        except FileNotFoundError:
            self.refuse_pointer_to(path)
            raise
        if command := what_fetches(path, raw):
            raise RunError(f"{path} is not here, only a pointer to it; run: {command}")
        return raw

    @contextmanager
    def opened(self, path: Path, mode: Literal["rb", "r+b"] = "rb") -> Iterator[io.FileIO]:
        """A regular file, open."""
        flags = os.O_RDONLY if mode == "rb" else os.O_RDWR
        with self._at(path) as place, io.FileIO(_handle(place, flags), mode) as file:
            yield file

    def begun(self, path: Path) -> io.FileIO:
        """A new file to append to; its folder is synced. Raises `FileExistsError` where there is one."""
        with self._at(path) as place:
            file = io.FileIO(_handle(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")
            _sync(place.handle)
        return file

    def names(self, path: Path | None = None) -> list[str]:
        """What a folder holds, sorted; nothing where it is not there."""
        with suppress(FileNotFoundError), self._inside(path or self.path) as handle, os.scandir(handle) as entries:
            found = [entry.name for entry in islice(entries, MOST_ENTRIES + 1)]
            if len(found) > MOST_ENTRIES:
                raise RunError(f"{path or self.path} holds more than {MOST_ENTRIES:,} files; name another folder")
            return sorted(found)
        return []

    def has(self, path: Path) -> bool:
        """Whether anything is there."""
        return self.about(path) is not None

    def about(self, path: Path) -> os.stat_result | None:
        """Size, time and kind of what is there, be it a link; None where there is nothing."""
        with suppress(FileNotFoundError), self._at(path) as place:
            return os.stat(place.name, dir_fd=place.handle, follow_symlinks=False)
        return None

    def num_bytes(self, path: Path | None = None) -> int:
        """The size of all regular files below a folder; what is gone by now, as others may be at work, is none."""
        total, num_left, waiting = 0, MOST_ENTRIES, [path or self.path]
        while waiting:
            place = waiting.pop()
            for name in self.names(place):
                num_left -= 1
                if num_left < 0:
                    raise RunError(f"{self.path} holds more than {MOST_ENTRIES:,} files; name another folder")
                found = self.about(place / name)
                if found is not None and stat.S_ISDIR(found.st_mode):
                    waiting.append(place / name)
                elif found is not None and stat.S_ISREG(found.st_mode):
                    total += found.st_size
        return total

    def make(self, path: Path) -> None:
        """Makes a folder in this one unless it is there; what it is made in is synced."""
        with self._at(path) as place:
            with suppress(FileExistsError):
                os.mkdir(place.name, dir_fd=place.handle)
                _sync(place.handle)
            os.close(_descended(place))

    def write_whole(self, path: Path, raw: bytes, *, durable: bool = True, staging: Path | None = None) -> None:
        """Writes or replaces a file: who opens it sees all that was there or all of ``raw``, never a part.

        A ``durable`` file survives a power loss once this returns, at the cost of two syncs; any survives a kill. It is
        made ready in the folder ``staging`` of the same file system, by default hidden beside its place. Raises
        `RunStopped` where the file does not read back as written.
        """
        with self._at(path) as place:
            with self._unfinished(place, staging) as unfinished:
                _write_through(unfinished, raw, durable=durable)
                os.replace(unfinished.name, place.name, src_dir_fd=unfinished.handle, dst_dir_fd=place.handle)
            if durable:
                _sync(place.handle)

    def write_once(self, path: Path, raw: bytes, *, staging: Path | None = None) -> bool:
        """As a durable `write_whole`, unless a file is there, which is never replaced; whether ``raw`` was written."""
        with self._at(path) as place:
            if _is_there(place):
                return False
            with self._unfinished(place, staging) as unfinished:
                _write_through(unfinished, raw, durable=True)
                is_written = _moved_without_replacing(unfinished, place)
            _sync(place.handle)
        return is_written

    def remove(self, path: Path) -> None:
        """Removes a file; that it is gone already is no error."""
        with suppress(FileNotFoundError), self._at(path) as place:
            os.unlink(place.name, dir_fd=place.handle)

    def move(self, path: Path, folder: Path) -> Path:
        """Moves a file into a folder of this one, under a name that is free there; where it is, though another
        process may have been faster and taken it there."""
        self.make(folder)
        taken = {*self.names(folder)}
        free = (path.name if number == 0 else f"{path.name}.{number}" for number in range(len(taken) + 1))
        target = folder / next(name for name in free if name not in taken)
        with suppress(FileNotFoundError), self._at(path) as source, self._at(target) as place:
            os.rename(source.name, place.name, src_dir_fd=source.handle, dst_dir_fd=place.handle)
        return target

    def locked(self, path: Path) -> int | None:
        """The handle of a lock file, made where it is not there: its lock is held until the handle is closed; None
        while another process holds it. A file that has a name elsewhere, too, is left to that, and a new one made.
        Raises `OSError` where the file system has no locks."""
        with self._at(path) as place:
            handle = _handle(place, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (num_names := os.fstat(handle).st_nlink) > 1:
                self.remove(path)
        except BlockingIOError:
            num_names = 0
        except OSError:
            os.close(handle)
            raise
        if num_names == 1:
            return handle
        os.close(handle)
        return self.locked(path) if num_names else None  # held, or removed by who held it

    def is_locked(self, path: Path) -> bool:
        """Whether a process holds the lock of a file that `locked` made; False where that cannot be told."""
        with suppress(OSError, RunError), self._at(path) as place:
            handle = _handle(place, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            finally:
                os.close(handle)
        return False

    def refuse_unfetched(self, path: Path | None = None) -> None:
        """Raises `RunError` where something that belongs into a folder is but a pointer of DVC."""
        for name in self.names(path):
            if name.endswith(".dvc"):
                self.refuse_pointer_to((path or self.path) / name.removesuffix(".dvc"))

    def refuse_pointer_to(self, path: Path) -> None:
        """Raises `RunError` where a file or folder is not there, but DVC's pointer to it is."""
        pointer = path.with_name(f"{path.name}.dvc")
        if not self.has(path) and self.has(pointer):
            raise RunError(f"{path} is not here, only DVC's pointer to it; run: dvc pull {pointer}")

    @contextmanager
    def _inside(self, path: Path) -> Iterator[int]:
        """The handle of this folder, or of one below it."""
        handle = os.open(self.path, _FOLDER)
        try:
            place = self.path
            for name in path.relative_to(self.path).parts:
                place /= name
                above, handle = handle, -1
                try:
                    handle = _descended(_Slot(above, name, place))
                finally:
                    os.close(above)
            yield handle
        finally:
            if handle >= 0:
                os.close(handle)

    @contextmanager
    def _at(self, path: Path) -> Iterator[_Slot]:
        with self._inside(path.parent) as handle:
            yield _Slot(handle, path.name, path)

    @contextmanager
    def _unfinished(self, place: _Slot, staging: Path | None) -> Iterator[_Slot]:
        """An empty file of a name of its own, for what is to be at a place; gone at the end unless it was moved."""
        # Process numbers repeat between containers that share a folder; a random name is nobody else's.
        name = f"{place.name}.{secrets.token_hex(8)}"
        beside = place.path.with_name(f".{name}")
        with nullcontext(_Slot(place.handle, beside.name, beside)) if not staging else self._at(staging / name) as made:
            os.close(os.open(made.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o666, dir_fd=made.handle))
            try:
                yield made
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(made.name, dir_fd=made.handle)


def write_whole(path: Path, raw: bytes, *, durable: bool = True) -> None:
    """`Folder.write_whole` in the folder that a path names."""
    Folder(path.parent).write_whole(path, raw, durable=durable)


def write_once(path: Path, raw: bytes) -> bool:
    """`Folder.write_once` in the folder that a path names."""
    return Folder(path.parent).write_once(path, raw)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty file to write into, which takes the place of ``path`` at the end; after an error nothing is changed.

    For what is too large to be in memory: it survives a kill, as a `write_whole` that is not durable.
    """
    folder = Folder(path.parent)
    with folder._at(path) as place, folder._unfinished(place, None) as unfinished:
        yield unfinished.path
        os.replace(unfinished.name, place.name, src_dir_fd=unfinished.handle, dst_dir_fd=place.handle)


def read_given(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """A file that a user named, by a link if they like: a regular one of at most ``most`` bytes, or their shell's pipe.

    Raises `OSError` as the system does, also for other pipes and for devices, which may never end, and for more bytes.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if _is_of_shell(path) else os.O_NONBLOCK))
    with io.FileIO(handle) as file:
        about = os.fstat(handle)
        if stat.S_ISDIR(about.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not (stat.S_ISREG(about.st_mode) or _is_of_shell(path)):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if stat.S_ISREG(about.st_mode) and about.st_size <= most:
            return file.readall()
        raw = bytearray()
        while about.st_size <= most and len(raw) <= most:
            if not (piece := file.read(1 << 16)):
                return bytes(raw)
            raw += piece
    raise OSError(errno.EFBIG, f"it is larger than {most:,} bytes", str(path))


def what_fetches(path: Path, raw: bytes | None = None) -> str | None:
    """The command that fetches what a path stands for, where the content is but a pointer of Git LFS or git-annex, or
    without content where its link of git-annex or its file's pointer of DVC leads nowhere; None for anything else."""
    if raw is not None:
        return next((command for opening, command in _POINTERS.items() if raw.startswith(opening)), None)
    if path.is_symlink() and "annex/objects/" in os.readlink(path):
        return "git annex get"
    return "dvc pull" if path.with_name(f"{path.name}.dvc").is_file() else None


def matches(folder: Path, pattern: str, most: int = MOST_VISITED) -> list[Path]:
    """The files and folders whose paths fit a pattern as the shell's, relative to a folder or absolute, sorted.

    Raises `RunError` where more than ``most`` names had to be looked at.
    """
    first, *parts = (folder / pattern).parts if Path(pattern).is_absolute() else (str(folder), *Path(pattern).parts)
    found, left = [Path(first)], most
    for part in parts:
        if not has_magic(part):
            found = [place / part for place in found if os.path.lexists(place / part)]
            continue
        fits, above, found = re.compile(translate(part)).match, found, []
        for place in above:
            with suppress(OSError), os.scandir(place) as entries:
                for entry in entries:
                    left -= 1
                    if left < 0:
                        raise RunError(
                            f"{folder / pattern}: more than {most:,} names were looked at; give a pattern with fewer * "
                            "in the names of folders"
                        )
                    if fits(entry.name) and (part[0] == "." or entry.name[0] != "."):
                        found.append(place / entry.name)
    return sorted(found)


def _is_of_shell(path: str | Path) -> bool:
    return str(path).startswith(("/dev/fd/", "/dev/stdin", "/proc/self/fd/"))


def _descended(place: _Slot) -> int:
    """The handle of the folder at a place."""
    try:
        return os.open(place.name, _FOLDER | os.O_NOFOLLOW, dir_fd=place.handle)
    except OSError as error:
        if error.errno in _MET_NO_FOLDER:
            _refuse_other(place, stat.S_IFDIR)
        raise _named(error, place) from None


def _handle(place: _Slot, flags: int) -> int:
    """The handle of the regular file at a place."""
    if not flags & os.O_EXCL:
        _refuse_other(place, stat.S_IFREG)  # before it is opened: a device may act on that
    try:
        handle = os.open(place.name, flags | _FILE, 0o666, dir_fd=place.handle)
    except OSError as error:
        raise _named(error, place) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise RunError(f"{place.path} was exchanged while it was opened; run the same command again")
    return handle


def _named(error: OSError, place: _Slot) -> OSError:
    return OSError(error.errno, error.strerror, str(place.path))


def _refuse_other(place: _Slot, kind: int) -> None:
    """Raises `RunError` where something of another kind is at a place: a link, a pipe, a file for a folder."""
    try:
        there = stat.S_IFMT(os.stat(place.name, dir_fd=place.handle, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return
    if there == stat.S_IFLNK:
        to = os.readlink(place.name, dir_fd=place.handle)
        if "annex/objects/" in to:
            raise RunError(
                f"{place.path} is a link of git-annex, and none is followed in a run folder; run: git annex get and "
                "git annex unlock"
            )
        if ".dvc/" in to or "/files/md5/" in to:
            raise RunError(
                f"{place.path} is a link of DVC, and none is followed in a run folder; run: dvc pull, dvc unprotect"
            )
        raise RunError(
            f"{place.path} is a symbolic link, and none is followed in a run folder; put what it points to in its place"
        )
    if there != kind:
        wanted = "folder" if kind == stat.S_IFDIR else "regular file"
        raise RunError(f"{place.path} is no {wanted}; move it elsewhere")


def _is_there(place: _Slot) -> bool:
    with suppress(FileNotFoundError):
        os.stat(place.name, dir_fd=place.handle, follow_symlinks=False)
        return True
    return False


def _write_through(place: _Slot, raw: bytes, *, durable: bool) -> None:
    with io.FileIO(_handle(place, os.O_RDWR), "r+b") as file:
        write_all(file, raw)
        if durable:
            os.fsync(file.fileno())
        file.seek(0)
        if file.read() != raw:
            raise RunStopped(f"{place.path} does not read back as written; check the disk, then run again")


def write_all(file: io.FileIO, raw: bytes) -> None:
    """Writes all of some bytes, however few the system takes at once."""
    view = memoryview(raw)
    while view:
        view = view[file.write(view) or 0 :]


def _moved_without_replacing(source: _Slot, target: _Slot) -> bool:
    """Whether ``source`` was moved: not where another process was faster."""
    try:
        os.link(source.name, target.name, src_dir_fd=source.handle, dst_dir_fd=target.handle)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        if _is_there(target):
            return False
        os.rename(source.name, target.name, src_dir_fd=source.handle, dst_dir_fd=target.handle)
    return True


def _sync(handle: int) -> None:
    """Makes what was created or renamed in a folder survive a power loss."""
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _FOLDERS_CANNOT_BE_SYNCED:
            raise


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """What the system refuses inside becomes a `RunStopped` naming ``path``, the reason and the remedy."""
    try:
        yield
    except OSError as error:
        raise RunStopped(
            f"cannot write to {path}: {(error.strerror or str(error)).lower()}; {_remedy(path, error)} or give another "
            "folder, then run the same command to continue"
        ) from None


def _remedy(path: Path, error: OSError) -> str:
    """What lets ``path`` be written to where the system said ``error``."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "make room"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "make it writable"
    if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
        above = (each for each in (path, *path.parents) if os.path.lexists(each) and not each.is_dir())
        return f"move {next(above, error.filename or 'what is in its place')} elsewhere"
    return "see to the disk"
