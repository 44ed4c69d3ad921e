"""The run folder: what is finished is on disk, whole, named by its content, and never written twice.

run/
  FORMAT                                "iclperm-run 1"
  study.yaml                            the study, canonical
  plan.json                             what identifies the run, with hashes of both tables; the run id is its hash
  demonstrations.parquet                a row per (set, permutation): ordered examples, the context at each shots
  queries.parquet                       a row per query: split, example, right label, weight, state
  *.parquet.sha256                      of both tables, as sha256sum writes and checks it
  environment/<session>.json            versions, parts and token counts of each session
  items/<part>-<sha256[:16]>.parquet    finished units: a row per (context, query); its footer tells run, part, numerics
  tmp/  quarantine/                     files not yet finished, locks; damaged files

A run that was extended has plan-001.json, demonstrations-001.parquet and queries-001.parquet too, and so on: the plan
adds parts, the tables hold all rows of the larger extent. Nothing that was there is changed, but study.yaml.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from iclperm.errors import ConfigError, RunError
from iclperm.study import STATISTICS, Study

FORMAT = "iclperm-run 1"
MAX_PARTS = 4_000
STATES = ("ok", "invalid", "overlong", "unparsed", "api_missing")
"""What an item can be; an error is a row, never absent and never zero."""
OK, INVALID, OVERLONG, UNPARSED, API_MISSING = range(len(STATES))
# Threads that still read when the interpreter ends can abort the process.
_IN_THIS_THREAD: dict[str, bool] = {"use_threads": False, "pre_buffer": False}
_ITEM = re.compile(r"(\d{6})-([0-9a-f]{16})\.parquet")
_CONSEQUENCES = ("tokens.", "work.", "tables.", "run ")
_FOLDERS_CANNOT_BE_SYNCED = (errno.EINVAL, errno.ENOTSUP)  # said by some mounted file systems
_STALE_SECONDS = 3_600  # a commit takes seconds; a file of tmp this old was left by a killed process


class RunStopped(RunError):
    """The run cannot go on now; what is finished is kept, and the same command continues."""


class DamagedItem(RunError):
    """A file of items is not what its name says."""


class RunFolder:
    """One run's files. Processes with the same plan may write into one folder; another plan is refused.

    A part is a fixed group of consecutive units; its file is its commit: written in ``tmp``, read back, synced,
    renamed without replacing, the folder synced. What is done is read back from the files. ``plans`` are those of the
    extents that the run has grown to, each with its own digest.
    """

    def __init__(self, path: Path, plans: Sequence[Mapping[str, Any]]) -> None:
        self.path = path
        self.plans = plans
        self._locks: dict[int, FileLock] = {}
        self._about: dict[Path, Mapping[bytes, bytes]] = {}
        self._files: dict[int, Path] = {}

    @classmethod
    def create(
        cls,
        path: str | Path,
        plans: Sequence[Mapping[str, Any]],
        study: Study,
        tables: Sequence[Mapping[str, pa.Table]],
    ) -> RunFolder:
        """Opens the folder of these plans, or makes it; both sequences are by stage.

        Raises `RunError` where the folder holds other files or another plan (naming the differences), and `RunStopped`
        where it cannot be written.
        """
        folder = cls(Path(path), _signed(plans, tables))
        with writable(folder.path):
            folder._claim_folder()
            folder._remove_stale()
            for number, plan in enumerate(folder.plans):
                folder._write_plan(number, plan)
            folder._write_study(study)
            for number, by_name in enumerate(tables):
                for name, table in by_name.items():
                    folder._write_table(number, name, table)
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run; raises `RunError` where there is none."""
        path = Path(path)
        if not (path / "FORMAT").is_file() or not (path / "plan.json").is_file():
            raise RunError(f"{path} is not a run folder; give the folder that a run was written to")
        _check_format(path)
        return cls(path, [_read_plan(file) for file in _plan_files(path)])

    def plan_path(self, number: int) -> Path:
        """The plan of a stage."""
        return self.path / _of_stage("plan.json", number)

    @property
    def plan(self) -> Mapping[str, Any]:
        """What identifies the run."""
        return self.plans[0]

    @property
    def extents(self) -> list[dict[str, int]]:
        """How far the run went, stage by stage."""
        return list(self.plans[-1]["extents"])

    def at_finished_extent(self) -> RunFolder:
        """This run at the last extent whose parts are all there; as it is where not even the first is finished."""
        there = set(self.parts())
        earlier = (RunFolder(self.path, self.plans[:number]) for number in range(len(self.plans), 0, -1))
        return next((folder for folder in earlier if there.issuperset(range(folder.num_parts))), self)

    def at_extent(self, extent: Mapping[str, int]) -> RunFolder | None:
        """This run as far as ``extent``; None where it never had that."""
        plans = (self.plans[: number + 1] for number in range(len(self.plans)))
        return next((RunFolder(self.path, there) for there in plans if there[-1]["extents"][-1] == extent), None)

    @property
    def num_parts(self) -> int:
        """Files of items of the finished run."""
        return sum(int(plan["work"]["parts"]) for plan in self.plans)

    @property
    def run_id(self) -> str:
        """SHA-256 of the plan."""
        return str(self.plan["digest"])

    def study(self) -> Study:
        """The study; raises `DamagedItem` where the file is not the plan's."""
        path = self.path / "study.yaml"
        study = _read_study(path)
        if study is None or not (_agrees(study, self.plan["study"]) and _agrees(study, self.extents[-1])):
            raise DamagedItem(f"{path} is damaged: it is not the plan's study; run the study again")
        return study

    def table(self, name: str, number: int = -1) -> pa.Table:
        """``demonstrations`` or ``queries`` of a stage, by default the last; raises `DamagedItem` for another content
        than the plan says."""
        path = self.path / _of_stage(f"{name}.parquet", number % len(self.plans))
        try:
            raw = path.read_bytes()
            # Only whole files are parsed: a reader of Parquet may crash on others.
            is_whole = _checksum_path(path).read_bytes() == _checksum(path.name, raw)
            table = pq.read_table(pa.BufferReader(raw), **_IN_THIS_THREAD) if is_whole else None
            is_whole = is_whole and _content_digest(table) == self.plans[number]["tables"][name]
        except (OSError, pa.ArrowException, ValueError, KeyError):
            is_whole = False
        if not is_whole:
            raise DamagedItem(f"{path} is damaged: its content is not what the plan says; run the study again")
        return table

    def parts(self) -> dict[int, Path]:
        """The finished parts; raises `DamagedItem` for a file whose name is none of ours or whose part occurs twice."""
        found: dict[int, Path] = {}
        has_grown = self._has_grown()
        for path in sorted((self.path / "items").glob("[!.]*")):
            match = _ITEM.fullmatch(path.name)
            if match is None:
                raise DamagedItem(f"{path} is no file of a run; move it elsewhere")
            if (part := int(match[1])) in found:
                raise DamagedItem(f"{path} and {found[part].name} both claim part {part}; move the wrong one elsewhere")
            if part < self.num_parts:
                found[part] = path
            elif not has_grown:
                raise DamagedItem(
                    f"{path} is beyond the {self.num_parts} parts of the plan; if the plan of a growth was lost, let "
                    "the run grow to that again with --extend, else move the file elsewhere"
                )
        return found

    def numerics(self) -> list[dict[str, Any]]:
        """What decided about the last bits of the finished parts, each different one once; read from their footers."""
        found = {self._about_item(path).get(b"numerics", b"") for path in self.parts().values()} - {b""}
        return [json.loads(raw) for raw in sorted(found)]

    def has(self, part: int) -> bool:
        """Whether a part is finished, by whomever."""
        return any((self.path / "items").glob(f"{part:06d}-*.parquet"))

    def claim(self, part: int) -> bool:
        """Takes a part for this process; False while another process works at it. A killed process loses its claims.

        Only saves work: without claims, as on a file system that has no locks, a part is computed twice.
        """
        lock = FileLock(self.path / "tmp" / f"{part:06d}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return False
        except (OSError, NotImplementedError):
            return True
        self._locks[part] = lock
        return True

    def release(self, part: int) -> None:
        """Gives a claim back."""
        if (lock := self._locks.pop(part, None)) is not None:
            Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()

    def read(self, path: Path, columns: Sequence[str] | None = None) -> pa.Table:
        """One part's rows; raises `DamagedItem` naming the file where bytes and name, part or run disagree, `RunError`
        where the system refuses to read it."""
        table = pq.read_table(_whole_item(path), columns=columns, **_IN_THIS_THREAD)
        metadata = self._about[path] = table.schema.metadata or {}
        part = int(path.name.split("-")[0])
        if metadata.get(b"run") != self.run_id.encode():
            raise DamagedItem(f"{path} belongs to another run; move it elsewhere")
        if metadata.get(b"part") != str(part).encode():
            raise DamagedItem(f"{path} is another part than its name says; run the study again")
        self._files[part] = path
        return table

    def part(self, part: int, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of a part that was read or written before, from its file; raises as `read` does."""
        return self.read(self._files[part], columns)

    def _about_item(self, path: Path) -> Mapping[bytes, bytes]:
        """What a file of items says about itself; empty where it is damaged."""
        if path not in self._about:
            try:
                self._about[path] = pq.read_schema(_whole_item(path)).metadata or {}
            except RunError:
                return {}
        return self._about[path]

    def write(self, part: int, table: pa.Table, numerics: Mapping[str, Any]) -> pa.Table:
        """Commits one part, computed with ``numerics``; returns its rows, those of another process if it was faster.

        Raises `RunStopped` where it cannot be written and `RunError` where the same part came out different.
        """
        about = {"run": self.run_id, "part": str(part), "numerics": json.dumps(numerics, sort_keys=True)}
        raw = _parquet_bytes(table.replace_schema_metadata(about))
        name = f"items/{part:06d}-{_digest(raw)}.parquet"
        with writable(self.path):
            for other in (self.path / "items").glob(f"{part:06d}-*.parquet"):
                there = self.read(other)
                if there.schema.metadata.get(b"numerics") == about["numerics"].encode() and not there.equals(table):
                    raise RunError(f"part {part} came out different from {other}; this machine does not repeat itself")
                return there
            self._files[part] = self._commit(raw, name)
        return table

    def set_aside(self, path: Path) -> Path:
        """Moves a damaged file to ``quarantine``; its part will be computed anew."""
        with writable(self.path):
            target = self.path / "quarantine" / path.name
            for number in range(1, 1_000_000):
                if not target.exists():
                    break
                target = target.with_name(f"{path.name}.{number}")
            with suppress(FileNotFoundError):  # another process that met the damage was faster
                path.rename(target)
        return target

    def write_session(self, session: str, content: Mapping[str, Any], *, durable: bool = True) -> None:
        """Writes or replaces the record of one session; one that is not ``durable`` survives a kill, no power loss."""
        target = self.path / "environment" / f"{session}.json"
        with writable(self.path):
            with self._unfinished(_canonical(_sealed(content)), target.name, durable=durable) as unfinished:
                os.replace(unfinished, target)
            if durable:
                sync_folder(target.parent)

    def sessions(self) -> list[dict[str, Any]]:
        """The records of all sessions, oldest first; empty for those that cannot be read or were set aside."""
        records = [_read_session(path) for path in self._session_files()]
        return records + [{} for _ in (self.path / "quarantine").glob("*.json*")]

    def unreadable_sessions(self) -> list[Path]:
        """Records that cannot be read: what those sessions cost is unknown."""
        return [path for path in self._session_files() if not _read_session(path)]

    def _session_files(self) -> list[Path]:
        return sorted((self.path / "environment").glob("*.json"))

    def _write_plan(self, number: int, plan: Mapping[str, Any]) -> None:
        path = self.plan_path(number)
        if path.exists():
            try:
                there = _read_plan(path)
            except DamagedItem:
                self._refuse_foreign_items(path)
                self.set_aside(path)
            else:
                self._refuse_another(there, plan)
        elif number == 0:
            self._refuse_foreign_items(path)
        self._commit(_canonical(plan), path.name)
        self._refuse_another(_read_plan(path), plan)  # another process may have been faster

    def _refuse_foreign_items(self, path: Path) -> None:
        """A plan that is damaged or gone is written anew only where the items say that it was this one."""
        items = sorted((self.path / "items").glob("*.parquet"))
        if items and not any(self._about_item(item).get(b"run") == self.run_id.encode() for item in items):
            state = "damaged" if path.exists() else "gone"
            raise RunError(f"{path} is {state}, and the results beside it are not this study's; give another folder")

    def _write_study(self, study: Study) -> None:
        path = self.path / "study.yaml"
        there = _read_study(path)
        if there is not None and _agrees(there, self.plan["study"]):
            if _agrees(there, self.extents[-1]) or self._has_grown():
                self.record_statistics(study)
                return
        elif path.exists():
            self.set_aside(path)
        with self._unfinished(study.to_yaml().encode(), path.name) as unfinished:
            os.replace(unfinished, path)
        sync_folder(self.path)

    def record_statistics(self, study: Study) -> None:
        """Lets study.yaml say what was last asked for where that changes no answer; a folder that cannot be written
        keeps what it says."""
        there = _read_study(self.path / "study.yaml")  # of a larger extent where another process has let the run grow
        asked = {key: getattr(study, key) for key in STATISTICS}
        if there is not None and any(getattr(there, key) != value for key, value in asked.items()):
            with suppress(OSError):
                write_whole(self.path / "study.yaml", there.model_copy(update=asked).to_yaml().encode())

    def _has_grown(self) -> bool:
        """Whether another process has let the run grow beyond what this one knows."""
        return len(_plan_files(self.path)) > len(self.plans)

    def _write_table(self, number: int, name: str, table: pa.Table) -> None:
        path = self.path / _of_stage(f"{name}.parquet", number)
        if path.exists():
            try:
                self.table(name, number)
                return
            except DamagedItem:
                self.set_aside(path)
        raw, checksum = _parquet_bytes(table), _checksum_path(path)
        if checksum.exists() and checksum.read_bytes() != _checksum(path.name, raw):
            self.set_aside(checksum)  # damaged, or that of a file which another version wrote
        self._commit(_checksum(path.name, raw), checksum.name)
        self._commit(raw, path.name)

    def _remove_stale(self) -> None:
        """Removes what killed sessions left; should one still be at work, it stops and can be continued."""
        for path in (self.path / "tmp").iterdir():
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink()

    def _claim_folder(self) -> None:
        """Makes the folder ours, or sees that it is."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not (self.path / "FORMAT").exists():
            others = {entry.name for entry in self.path.iterdir()} - {"tmp"}
            if others and not (self.path / "FORMAT").exists():  # unless another process has just made the folder
                raise RunError(f"{self.path} holds other files; give a new or empty folder")
            (self.path / "tmp").mkdir(exist_ok=True)
            self._commit(f"{FORMAT}\n".encode(), "FORMAT")
        _check_format(self.path)
        for name in ("items", "environment", "tmp", "quarantine"):
            (self.path / name).mkdir(exist_ok=True)

    def _refuse_another(self, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
        differences = list(_differences(there, here))
        # What follows from another choice is no news beside it.
        differences = [line for line in differences if not line.startswith(_CONSEQUENCES)] or differences
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
        sync_folder(target.parent)
        return target

    @contextmanager
    def _unfinished(self, raw: bytes, name: str, *, durable: bool = True) -> Iterator[Path]:
        """A synced (``durable``) file in ``tmp`` that holds ``raw``, gone at the end unless it was moved."""
        # Process numbers repeat between containers that share a folder; a random name is nobody else's.
        path = self.path / "tmp" / f"{name}.{secrets.token_hex(8)}"
        try:
            with path.open("xb") as file:
                file.write(raw)
                file.flush()
                if durable:
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


def write_whole(path: Path, raw: bytes) -> None:
    """Writes or replaces a file that is whole whenever it is there, and survives a power loss."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with unfinished.open("xb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_folder(path.parent)


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


def _whole_item(path: Path) -> pa.BufferReader:
    """A file of items, seen to be what its name says: a reader of Parquet may crash on any other."""
    raw, match = _bytes_of(path), _ITEM.fullmatch(path.name)
    if match is None or _digest(raw) != match[2]:
        raise DamagedItem(f"{path} is damaged: its content is not what its name says; run the study again")
    return pa.BufferReader(raw)


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DamagedItem(f"{path} is gone; run the study again") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise RunError(f"{path} cannot be read: {reason}; make it readable, or move it elsewhere") from None


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
        if found.startswith("iclperm-runs"):
            raise RunError(f"{path} holds a study of several runs; give one of its folders, or another folder")
        raise RunError(f"{path} has the format {found[:40]!r}; this version reads {FORMAT!r}")


def recorded_extents(path: str | Path, identity: Mapping[str, Any]) -> list[dict[str, int]]:
    """How far the run in a folder went, stage by stage, as far as its plans can be read; empty without a run, and for
    one of another identity."""
    extents: list[dict[str, int]] = []
    for file in _plan_files(Path(path)):
        with suppress(DamagedItem):
            plan = _read_plan(file)
            if file.name == "plan.json" and any(plan.get(key) != value for key, value in identity.items()):
                return []
            extents = list(plan["extents"])
    return extents


def _plan_files(path: Path) -> list[Path]:
    return [file for file in (path / "plan.json", *sorted(path.glob("plan-[0-9][0-9][0-9].json"))) if file.exists()]


def _of_stage(name: str, number: int) -> str:
    stem, suffix = name.split(".")
    return f"{stem}-{number:03d}.{suffix}" if number else name


def _signed(plans: Sequence[Mapping[str, Any]], tables: Sequence[Mapping[str, pa.Table]]) -> list[dict[str, Any]]:
    """Plans as they are written: with the digests of their tables, the run's id, and their own digest."""
    signed: list[dict[str, Any]] = []
    for plan, by_name in zip(plans, tables, strict=True):
        run = {"run": signed[0]["digest"]} if signed else {}
        digests = {name: _content_digest(table) for name, table in by_name.items()}
        signed.append(_sealed({**plan, **run, "tables": digests}))
    return signed


def _sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Content with its own digest."""
    whole: dict[str, Any] = json.loads(_canonical(content))
    return {**whole, "digest": hashlib.sha256(_canonical(whole)).hexdigest()}


def _unsealed(raw: bytes) -> dict[str, Any] | None:
    """What was sealed; None where that is not what its digest says."""
    try:
        content: dict[str, Any] = json.loads(raw)
        rest = {key: value for key, value in content.items() if key != "digest"}
        return content if content == _sealed(rest) else None
    except (ValueError, AttributeError):
        return None


def _read_plan(path: Path) -> dict[str, Any]:
    """Raises `DamagedItem` where a plan is not what its digest says."""
    plan = _unsealed(_bytes_of(path))
    if plan is None:
        raise DamagedItem(f"{path} is damaged: its content is not what its digest says; run the study again")
    return plan


def _agrees(study: Study, choices: Mapping[str, Any]) -> bool:
    """Whether a study makes these choices, the dtype apart, which depends on the machine."""
    return all(getattr(study, key) == value for key, value in choices.items() if key != "dtype")


def _read_study(path: Path) -> Study | None:
    """The study in a file; None where there is none."""
    try:
        return Study.from_file(path)
    except ConfigError:
        return None


def _read_session(path: Path) -> dict[str, Any]:
    """A session's record; empty where it cannot be read."""
    try:
        record = _unsealed(path.read_bytes())
    except OSError:
        return {}
    return {} if record is None else {**record, "name": path.stem}


def _canonical(plan: Mapping[str, Any]) -> bytes:
    return json.dumps(plan, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def _differences(there: Any, here: Any, key: str = "") -> Iterator[str]:
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for name in sorted({*there, *here}):
            yield from _differences(there.get(name), here.get(name), f"{key}.{name}" if key else name)
    elif there != here and key != "digest":
        shown = _shown(there), _shown(here)
        yield f"{key} differs" if shown[0] == shown[1] else f"{key} is {shown[0]} there and {shown[1]} here"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    if len(text) <= 40:
        return text
    if isinstance(value, (list, Mapping)):
        return f"{len(value):,} {'values' if isinstance(value, list) else 'keys'}"
    return f"{text[:20]}...{text[-10:]}"


def _parquet_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return bytes(sink.getvalue().to_pybytes())


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:16]


def _checksum_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _checksum(name: str, raw: bytes) -> bytes:
    """As sha256sum writes it."""
    return f"{hashlib.sha256(raw).hexdigest()}  {name}\n".encode()


def _content_digest(table: pa.Table) -> str:
    """SHA-256 of a table's values: other versions of the library write other bytes for them."""
    return hashlib.sha256(_canonical(table.to_pydict())).hexdigest()
