"""Places that a URL names, by fsspec: what is read is fetched into a local folder, what is written is sent from one.

All promises about files hold for the local folder; an object is sent whole. Keys come from where fsspec looks for them
(the environment, the cloud's own files); a URL that holds some is never shown with them.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from iclperm.errors import ConfigError, RunError, RunStopped, is_out_of_memory, printable

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://.*", re.DOTALL)
_MOST_FILES = 20_000
_SHORTEST_TOKEN = 6  # letters; what is shorter is part of many words
_HERE = ("file", "local")
_copies: list[tempfile.TemporaryDirectory[str]] = []  # of what was fetched; they go when the interpreter ends


def is_url(place: str | Path) -> bool:
    """Whether a place is a URL and no path."""
    return isinstance(place, str) and _URL.fullmatch(place) is not None


def shown(url: str) -> str:
    """A URL as it may be printed: without user and password, and without what may hold a token."""
    parts = urlsplit(url)
    login, has_login, host = parts.netloc.rpartition("@")
    secret = "***@" if has_login and login else ""
    return printable(f"{parts.scheme}://{secret}{host}{parts.path}{'?***' if parts.query or parts.fragment else ''}")


def refuse_url(place: str | Path | None, remedy: str) -> None:
    """Raises `ConfigError` with a remedy where a place is a URL."""
    if place is not None and is_url(place):
        raise ConfigError(f"{shown(str(place))} is a URL; {remedy}")


@dataclass
class Remote:
    """A place that a URL names. Raises `ConfigError` for a URL of what lies on this machine, or that names one system
    in another."""

    url: str

    def __post_init__(self) -> None:
        if "::" in self.url or urlsplit(self.url).scheme.lower() in _HERE:
            raise ConfigError(f"{shown(self.url)} is no URL that is read or written; give a path, or one like s3://b/x")

    @property
    def name(self) -> str:
        """As it may be printed."""
        return shown(self.url)

    @cached_property
    def _found(self) -> tuple[Any, str]:
        """The file system, and the path there."""
        try:
            from fsspec.core import url_to_fs
            from fsspec.implementations.local import LocalFileSystem
        except ImportError:
            raise ConfigError(f"{self.name} needs fsspec; run pip install 'iclperm[s3]'") from None
        try:
            system, path = url_to_fs(self.url)
        except ImportError as error:
            reason = self._reason(error)
            raise ConfigError(f"{self.name} needs more ({reason}); for s3 run pip install 'iclperm[s3]'") from None
        except Exception as error:
            raise ConfigError(f"{self.name} is no URL that is known: {self._reason(error)}; correct it") from None
        if isinstance(system, LocalFileSystem):
            raise ConfigError(f"{self.name} lies on this machine; give its path")
        return system, str(path)

    def fetched(self, most_bytes: int | None = None) -> Path:
        """A local copy, of a file or of a folder with all that is below it; it stays until the interpreter ends.

        Raises `RunError` where it cannot be read, has more than ``most_bytes`` or more than the disk has room for, and
        for names that lead out of a folder.
        """
        with self._named("read"):
            system, path = self._found
            system.invalidate_cache()
            if system.isfile(path):
                sizes = {PurePosixPath(path).name: (path, int(system.size(path) or 0))}
            else:
                about = system.find(path, detail=True)
                sizes = {_below(path, name): (name, int(each["size"] or 0)) for name, each in about.items()}
        if not sizes:
            raise RunError(f"{self.name} is not there; correct the URL")
        copy = tempfile.TemporaryDirectory(prefix="iclperm-")
        self._refuse_much([size for _, size in sizes.values()], most_bytes, Path(copy.name))
        _copies.append(copy)
        root = Path(copy.name) / (PurePosixPath(path).name or "run")
        is_file = list(sizes) == [root.name]
        for name, (place, _) in sizes.items():
            target = root if is_file else root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with self._named("read"):
                system.get_file(place, str(target))
        return root

    @contextmanager
    def written(self, *, is_folder: bool) -> Iterator[Path]:
        """A local file, or folder, to write; where nothing was raised all of it is sent, in the order in which it was
        written. Raises `RunStopped` where it cannot be sent."""
        system, path = self._found
        with tempfile.TemporaryDirectory(prefix="iclperm-") as temporary:
            root = Path(temporary) / (PurePosixPath(path).name or "report")
            yield root
            files = [each for each in (root.rglob("*") if is_folder else [root]) if each.is_file()]
            for file in sorted(files, key=lambda each: (each.stat().st_mtime_ns, each)):
                below = file.relative_to(root).as_posix()
                with self._named("written"):
                    system.put_file(str(file), path if below == "." else f"{path.rstrip('/')}/{below}")

    @contextmanager
    def _named(self, done: str) -> Iterator[None]:
        """What a file system raises, of whatever kind, becomes one line without secrets."""
        try:
            yield
        except (ConfigError, RunError):
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            kind: type[RunError] | type[RunStopped] = RunStopped if done == "written" else RunError
            raise kind(
                f"{self.name} cannot be {done}: {self._reason(error)}; see that it is there, and that the environment "
                "has the keys for it"
            ) from None

    def _reason(self, error: Exception) -> str:
        words = " ".join(str(error).split()) or type(error).__name__
        parts = urlsplit(self.url)
        login = parts.netloc.rpartition("@")[0]
        given = [value for _, value in parse_qsl(parts.query) if len(value) >= _SHORTEST_TOKEN]
        for secret in (self.url, login, *login.split(":"), parts.query, *given):
            words = words.replace(secret, "***") if secret else words
        return printable(words[:200])

    def _refuse_much(self, sizes: Sequence[int], most_bytes: int | None, folder: Path) -> None:
        room = shutil.disk_usage(folder).free if most_bytes is None else most_bytes
        if len(sizes) > _MOST_FILES or sum(sizes) > room:
            raise RunError(
                f"{self.name} has {len(sizes):,} files and {sum(sizes):,} bytes; {_MOST_FILES:,} files and {room:,} "
                "bytes can be fetched: mount it and give the folder"
            )


def _below(folder: str, name: str) -> str:
    """A file's name within a folder; raises `RunError` where it leads out of that."""
    below = PurePosixPath(name).relative_to(folder)
    if not below.parts or below.is_absolute() or ".." in below.parts or "\\" in str(below) or "\0" in str(below):
        raise RunError(f"{printable(name)} is no name of a file in a folder; rename it")
    return str(below)


def local(place: str | Path, most_bytes: int | None = None) -> Path:
    """A path to read a place at: of a URL that of a copy."""
    return Remote(str(place)).fetched(most_bytes) if is_url(place) else Path(place)


@contextmanager
def written(place: str | Path | None) -> Iterator[tuple[Path | None, Callable[[Path], str]]]:
    """A folder to write in the place of one that may be a URL, and what its files will be called there."""
    if place is None or not is_url(place):
        yield None if place is None else Path(place), str
        return
    there = Remote(str(place))
    with there.written(is_folder=True) as folder:
        yield folder, lambda file: f"{there.name.rstrip('/')}/{file.relative_to(folder).as_posix()}"
