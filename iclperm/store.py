"""The run folder: what is finished is on disk, whole, named by its content, and never written twice.

run/
  FORMAT                                "iclperm-run 1"
  study.yaml                            the study, canonical
  plan.json                             what identifies the run, with hashes of both tables; the run id is its hash
  demonstrations.parquet                a row per (set, permutation): ordered examples, the context at each shots
  queries.parquet                       a row per query: example, right label, state
  environment/<session>.json            versions, parts and token counts of each session
  items/<part>-<sha256[:16]>.parquet    finished units: a row per (context, query)
  tmp/  quarantine/                     files not yet finished; damaged files
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from iclperm.errors import RunError

FORMAT = "iclperm-run 1"
MAX_PARTS = 4_000
STATES = ("ok", "invalid", "overlong", "unparsed", "api_missing")
"""What an item can be; an error is a row, never absent and never zero."""
OK, INVALID, OVERLONG, UNPARSED, API_MISSING = range(len(STATES))
_ITEM = re.compile(r"(\d{6})-([0-9a-f]{16})\.parquet")
_STALE_SECONDS = 3_600  # a commit takes seconds; a file of tmp this old was left by a killed process


class RunStopped(RunError):
    """The run cannot go on now; what is finished is kept, and the same command continues."""


class DamagedItem(RunError):
    """A file of items is not what its name says."""


class RunFolder:
    """One run's files. Two processes with the same plan may write into one folder; another plan is refused.

    A part is a fixed group of consecutive units; its file is its commit: written in ``tmp``, read back, synced,
    renamed without replacing, the folder synced. What is done is read back from the files.
    """

    def __init__(self, path: Path, plan: Mapping[str, Any]) -> None:
        self.path = path
        self.plan = plan

    @classmethod
    def create(cls, path: str | Path, plan: Mapping[str, Any], study: str, tables: Mapping[str, pa.Table]) -> RunFolder:
        """Opens the folder of this plan, or makes it.

        Raises `RunError` where the folder holds other files or another plan (naming the differences), and `RunStopped`
        where it cannot be written.
        """
        whole = {**plan, "tables": {name: _content_digest(table) for name, table in tables.items()}}
        folder = cls(Path(path), json.loads(_canonical(whole)))
        with writable(folder.path):
            folder._claim()
            folder._remove_stale()
            folder._commit(_canonical(whole), "plan.json")
            folder._refuse_another(_read_plan(folder.path))
            folder._commit(study.encode(), "study.yaml")
            for name, table in tables.items():
                folder._write_table(name, table)
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run; raises `RunError` where there is none."""
        path = Path(path)
        if not (path / "FORMAT").is_file() or not (path / "plan.json").is_file():
            raise RunError(f"{path} is not a run folder; give the folder that a run was written to")
        _check_format(path)
        return cls(path, _read_plan(path))

    @property
    def run_id(self) -> str:
        """SHA-256 of the plan."""
        return hashlib.sha256(_canonical(self.plan)).hexdigest()

    def study_text(self) -> str:
        """The study as canonical YAML."""
        return (self.path / "study.yaml").read_text(encoding="utf-8")

    def table(self, name: str) -> pa.Table:
        """``demonstrations`` or ``queries``; raises `DamagedItem` where the content is not what the plan says."""
        path = self.path / f"{name}.parquet"
        try:
            table = pq.read_table(path, page_checksum_verification=True)
            is_whole = _content_digest(table) == self.plan["tables"][name]
        except (OSError, pa.ArrowException, ValueError, KeyError):
            is_whole = False
        if not is_whole:
            raise DamagedItem(f"{path} is damaged: its content is not what the plan says; run the study again")
        return table

    def parts(self) -> dict[int, Path]:
        """The finished parts; raises `DamagedItem` for a file whose name is none of ours or whose part occurs twice."""
        found: dict[int, Path] = {}
        for path in sorted((self.path / "items").glob("*")):
            match = _ITEM.fullmatch(path.name)
            if match is None:
                raise DamagedItem(f"{path} is no file of a run; move it elsewhere")
            if (part := int(match[1])) in found:
                raise DamagedItem(f"{path} and {found[part].name} both claim part {part}; move the wrong one elsewhere")
            found[part] = path
        return found

    def read(self, path: Path) -> pa.Table:
        """One part's rows; raises `DamagedItem` naming the file where bytes and name or run disagree."""
        raw = path.read_bytes()
        match = _ITEM.fullmatch(path.name)
        if match is None or _digest(raw) != match[2]:
            raise DamagedItem(f"{path} is damaged: its content is not what its name says; run the study again")
        table = pq.read_table(pa.BufferReader(raw))
        if (table.schema.metadata or {}).get(b"run") != self.run_id.encode():
            raise DamagedItem(f"{path} belongs to another run; move it elsewhere")
        return table

    def write(self, part: int, table: pa.Table) -> Path:
        """Commits one part; a part that another process has finished meanwhile is kept as it is.

        Raises `RunStopped` where it cannot be written and `RunError` where the same part came out different.
        """
        raw = _parquet_bytes(table.replace_schema_metadata({"run": self.run_id, "part": str(part)}))
        name = f"items/{part:06d}-{_digest(raw)}.parquet"
        with writable(self.path):
            for other in (self.path / "items").glob(f"{part:06d}-*.parquet"):
                if other.name != Path(name).name:
                    raise RunError(f"part {part} came out different from {other}; this machine does not repeat itself")
            return self._commit(raw, name)

    def set_aside(self, path: Path) -> Path:
        """Moves a damaged file to ``quarantine``; its part will be computed anew."""
        with writable(self.path):
            target = self.path / "quarantine" / path.name
            for number in range(1, 1_000_000):
                if not target.exists():
                    break
                target = target.with_name(f"{path.name}.{number}")
            path.rename(target)
        return target

    def write_session(self, session: str, content: Mapping[str, Any]) -> None:
        """Writes or replaces the record of one session, durably."""
        target = self.path / "environment" / f"{session}.json"
        with writable(self.path):
            with self._unfinished(_canonical(content), target.name) as unfinished:
                os.replace(unfinished, target)
            _sync_folder(target.parent)

    def sessions(self) -> list[dict[str, Any]]:
        """The records of all sessions, oldest first; empty for those that cannot be read or were set aside."""
        records = [_read_session(path) for path in self._session_files()]
        return records + [{} for _ in (self.path / "quarantine").glob("*.json*")]

    def set_unreadable_sessions_aside(self) -> None:
        """Moves records that cannot be read to ``quarantine``: what those sessions cost stays unknown."""
        for path in self._session_files():
            if not _read_session(path):
                self.set_aside(path)

    def _session_files(self) -> list[Path]:
        return sorted((self.path / "environment").glob("*.json"))

    def _write_table(self, name: str, table: pa.Table) -> None:
        path = self.path / f"{name}.parquet"
        if path.exists():
            try:
                self.table(name)
            except DamagedItem:
                self.set_aside(path)
        self._commit(_parquet_bytes(table), path.name)

    def _remove_stale(self) -> None:
        """Removes what killed sessions left; should one still be at work, it stops and can be continued."""
        for path in (self.path / "tmp").iterdir():
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink()

    def _claim(self) -> None:
        """Makes the folder ours, or sees that it is."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not (self.path / "FORMAT").exists():
            if any(entry.name != "tmp" for entry in self.path.iterdir()):
                raise RunError(f"{self.path} holds other files; give a new or empty folder")
            (self.path / "tmp").mkdir(exist_ok=True)
            self._commit(f"{FORMAT}\n".encode(), "FORMAT")
        _check_format(self.path)
        for name in ("items", "environment", "tmp", "quarantine"):
            (self.path / name).mkdir(exist_ok=True)

    def _refuse_another(self, there: Mapping[str, Any]) -> None:
        differences = list(_differences(there, self.plan))
        # What follows from another choice is no news beside it.
        differences = [
            line for line in differences if not line.startswith(("tokens.", "work.", "tables."))
        ] or differences
        if differences:
            shown = "; ".join(differences[:3]) + (f"; and {len(differences) - 3} more" if differences[3:] else "")
            raise RunError(f"{self.path} holds another run: {shown}; give another folder")

    def _commit(self, raw: bytes, name: str) -> Path:
        """Makes ``raw`` appear under ``name`` whole and durable, or not at all; an existing file is never replaced."""
        target = self.path / name
        if target.exists():
            return target
        with self._unfinished(raw, target.name) as unfinished:
            _rename_without_replacing(unfinished, target)
        _sync_folder(target.parent)
        return target

    @contextmanager
    def _unfinished(self, raw: bytes, name: str) -> Iterator[Path]:
        """A synced file in ``tmp`` that holds ``raw``, gone at the end unless it was moved."""
        # Process numbers repeat between containers that share a folder; a random name is nobody else's.
        path = self.path / "tmp" / f"{name}.{secrets.token_hex(8)}"
        try:
            with path.open("xb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            if path.read_bytes() != raw:
                raise RunStopped(f"{path} does not read back as written; check the disk, then run again")
            yield path
        finally:
            path.unlink(missing_ok=True)


def _rename_without_replacing(source: Path, target: Path) -> None:
    with suppress(FileExistsError):  # another process with the same plan was faster
        try:
            os.link(source, target)
        except FileExistsError:
            raise
        except OSError:
            if not target.exists():  # a file system without hard links
                os.rename(source, target)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
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


def _check_format(path: Path) -> None:
    found = (path / "FORMAT").read_text(encoding="utf-8", errors="replace").strip()
    if found != FORMAT:
        raise RunError(f"{path} has the format {found[:40]!r}; this version reads {FORMAT!r}")


def _read_plan(path: Path) -> dict[str, Any]:
    try:
        plan: dict[str, Any] = json.loads((path / "plan.json").read_bytes())
    except ValueError:
        raise RunError(f"{path / 'plan.json'} is damaged; give another folder") from None
    return plan


def _read_session(path: Path) -> dict[str, Any]:
    """A session's record; empty where it cannot be read."""
    try:
        record = json.loads(path.read_bytes())
    except ValueError:
        return {}
    return record if isinstance(record, dict) and isinstance(record.get("numerics"), dict) else {}


def _canonical(plan: Mapping[str, Any]) -> bytes:
    return json.dumps(plan, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def _differences(there: Any, here: Any, key: str = "") -> Iterator[str]:
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for name in sorted({*there, *here}):
            yield from _differences(there.get(name), here.get(name), f"{key}.{name}" if key else name)
    elif there != here:
        yield f"{key} is {_shown(there)} there and {_shown(here)} here"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:20]}...{text[-10:]}"


def _parquet_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return bytes(sink.getvalue().to_pybytes())


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:16]


def _content_digest(table: pa.Table) -> str:
    """SHA-256 of a table's values: other versions of the library write other bytes for them."""
    return hashlib.sha256(_canonical(table.to_pydict())).hexdigest()
