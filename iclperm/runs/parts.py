"""The parts of a run: one file each, whole, named by its content, and written once by whoever is first."""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from iclperm.base.environment import cores
from iclperm.base.files import Folder, writable
from iclperm.base.sealed import parsed
from iclperm.errors import DamagedItem, RunError
from iclperm.runs.stored import bytes_of, metadata_of, short_digest, table_bytes, table_of

NAMED_LATER = frozenset({
    "probe", "gpu_cublas_workspace", "gpu_cudnn_conv_fp32_precision", "gpu_cudnn_rnn_fp32_precision"
})  # fmt: skip
"""Numerics that parts of older versions do not name; what they were is not known."""
_TOLD = "given_up"  # why the ways that run are those; which they are has names of its own
_MANY_FILES, _MOST_READERS = 16, 4
_ITEM = re.compile(r"(\d{6})-([0-9a-f]{16})\.parquet")


class PartFiles:
    """The finished parts in a run folder: ``items/<part>-<sha256[:16]>.parquet``, a row for each context and query.

    A part is a fixed group of consecutive units, and its file is its commit: written in ``tmp``, synced, read back,
    renamed without replacing, the folder synced. Which parts are finished is read from the names; each file says in its
    footer to which run and part it belongs, and by which numerics it was computed.

    ``num_parts`` are those that this process knows of; ``may_have_more`` says whether another process has let the run
    grow meanwhile. No part has more than ``most_rows``.
    """

    def __init__(
        self, folder: Folder, run_id: str, num_parts: int, most_rows: int, may_have_more: Callable[[], bool]
    ) -> None:
        self._folder = folder
        self._items = folder.path / "items"
        self._staging = folder.path / "tmp"
        self._run_id = run_id
        self._num_parts = num_parts
        self._most_rows = most_rows
        self._may_have_more = may_have_more
        self._locks: dict[int, int] = {}
        self._about: dict[Path, Mapping[bytes, bytes]] = {}
        self._files: dict[int, Path] = {}

    def finished(self) -> dict[int, Path]:
        """The file of each finished part; raises `DamagedItem` for a file whose name is none of ours or whose part
        occurs twice."""
        found: dict[int, Path] = {}
        may_have_more = self._may_have_more()
        self._folder.refuse_unfetched(self._items)
        for path in self._paths():
            match = _ITEM.fullmatch(path.name)
            if match is None:
                raise DamagedItem(f"{path} is no file of a run; move it elsewhere")
            if (part := int(match[1])) in found:
                raise DamagedItem(f"{path} and {found[part].name} both claim part {part}; move the wrong one elsewhere")
            if part < self._num_parts:
                found[part] = path
            elif not may_have_more:
                raise DamagedItem(
                    f"{path} is beyond the {self._num_parts} parts of the plan; if the plan of a growth was lost, let "
                    "the run grow to that again with --extend, else move the file elsewhere"
                )
        return found

    def know(self, others: PartFiles) -> None:
        """Takes over which files were read or written before the run grew."""
        self._files.update(others._files)

    def are_there(self) -> bool:
        """Whether all of them are finished."""
        return set(self.finished()).issuperset(range(self._num_parts))

    def has(self, part: int) -> bool:
        """Whether a part is finished, by whomever."""
        return bool(self._paths(f"{part:06d}-"))

    def numerics(self) -> list[dict[str, Any]]:
        """What decided about the last bits of the finished parts, each different one once; read from their footers."""
        found = {path: self._about_file(path).get(b"numerics", b"") for path in self.finished().values()}
        path_of = {raw: path for path, raw in sorted(found.items()) if raw}
        return [_numerics(path_of[raw], raw) for raw in sorted(path_of)]

    def are_ours(self) -> bool:
        """Whether some file is this run's, or there is none at all."""
        files = self._paths()
        return not files or any(self._about_file(file).get(b"run") == self._run_id.encode() for file in files)

    def claim(self, part: int) -> bool:
        """Takes a part for this process; False while another process works at it. A killed process loses its claims.

        Only saves work: without claims, as on a file system that has no locks, a part is computed twice.
        """
        try:
            handle = self._folder.locked(self._lock_path(part))
        except OSError:
            return True
        if handle is not None:
            self._locks[part] = handle
        return handle is not None

    def release(self, part: int) -> None:
        """Gives a claim back."""
        if (handle := self._locks.pop(part, None)) is not None:
            with suppress(OSError):  # it may stay: whether a part is claimed is the lock, not the file
                self._folder.remove(self._lock_path(part))
            os.close(handle)

    def read(self, path: Path, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows in a part's file; raises `DamagedItem` naming the file where bytes and name, part or run disagree,
        `RunError` where the system refuses to read it."""
        table = table_of(path, self._whole(path), self._most_rows, columns)
        about = self._about[path] = table.schema.metadata or {}
        part = int(path.name.split("-")[0])
        if about.get(b"run") != self._run_id.encode():
            raise DamagedItem(f"{path} belongs to another run; move it elsewhere")
        if about.get(b"part") != str(part).encode():
            raise DamagedItem(f"{path} is another part than its name says; run the study again")
        _numerics(path, about.get(b"numerics", b"{}"))
        self._files[part] = path
        return table

    def read_each(self, paths: Iterable[Path], columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """As `read`, one file after the other; of many files the next ones are read meanwhile, by a few threads."""
        paths = [*paths]
        num_threads = min(_MOST_READERS, len(cores()))
        if len(paths) < _MANY_FILES or num_threads == 1:
            yield from (self.read(path, columns) for path in paths)
            return
        ahead: deque[Future[pa.Table]] = deque()
        with ThreadPoolExecutor(num_threads, "reader") as readers:
            try:
                for path in paths:
                    ahead.append(readers.submit(self.read, path, columns))
                    if len(ahead) > num_threads:
                        yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()
            finally:
                for each in ahead:
                    each.cancel()

    def read_again(self, parts: Iterable[int], columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """The rows of parts that were read or written before, from their files, as `read_each`."""
        return self.read_each((self._files[part] for part in parts), columns)

    def write(self, part: int, table: pa.Table, numerics: Mapping[str, Any]) -> pa.Table:
        """Commits one part, computed with ``numerics``; returns its rows, those of another process if it was faster.

        Raises `RunStopped` where it cannot be written and `RunError` where the same part came out different.
        """
        about = {"run": self._run_id, "part": str(part), "numerics": json.dumps(numerics, sort_keys=True)}
        raw = table_bytes(table.replace_schema_metadata(about))
        path = self._items / f"{part:06d}-{short_digest(raw)}.parquet"
        with writable(self._folder.path):
            for other in self._paths(f"{part:06d}-"):
                there = self.read(other)
                if there.schema.metadata.get(b"numerics") == about["numerics"].encode() and not there.equals(table):
                    raise RunError(f"part {part} came out different from {other}; this machine does not repeat itself")
                return there
            self._folder.write_once(path, raw, staging=self._staging)
            self._files[part] = path
        return table

    def _about_file(self, path: Path) -> Mapping[bytes, bytes]:
        """What a file says about itself; empty where it is damaged."""
        if path not in self._about:
            try:
                self._about[path] = metadata_of(path, self._whole(path))
            except RunError:
                return {}
        return self._about[path]

    def _paths(self, opening: str = "") -> list[Path]:
        """The files whose names begin like this, but hidden ones and what DVC puts beside them."""
        names = [name for name in self._folder.names(self._items) if name.startswith(opening)]
        return [self._items / name for name in names if not (name.startswith(".") or name.endswith(".dvc"))]

    def _lock_path(self, part: int) -> Path:
        return self._staging / f"{part:06d}.lock"

    def _whole(self, path: Path) -> bytes:
        """A file's bytes, seen to be what its name says: a reader of Parquet may crash on any other."""
        raw, match = bytes_of(self._folder, path), _ITEM.fullmatch(path.name)
        if match is None or short_digest(raw) != match[2]:
            raise DamagedItem(f"{path} is damaged: its content is not what its name says; run the study again")
        return raw


def other_numerics(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """The first name under which two records of numerics differ; None where they hold the same. What older versions
    did not name (`NAMED_LATER`) is passed over where one of the two lacks it, and so are reasons."""
    differ = (name for name in dict.fromkeys([*here, *recorded]) if recorded.get(name) != here.get(name))
    names = (name for name in differ if name != _TOLD)
    return next((name for name in names if name not in NAMED_LATER or (name in recorded and name in here)), None)


def _numerics(path: Path, raw: bytes) -> dict[str, Any]:
    """What the footer of a part's file says of its numerics; raises `DamagedItem` where no run has written that."""
    try:
        found = parsed(raw)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise DamagedItem(f"{path} does not say how it was computed; run the study again")
    return found
