"""What a run folder says of itself, without model or data: how far the run is, and whether every file is whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from iclperm.base.help import fields_in_help
from iclperm.endpoint.ledger import damage as damage_to_replies
from iclperm.endpoint.ledger import paid
from iclperm.errors import DamagedItem, IclpermError, RunError, UnknownKind, is_out_of_memory
from iclperm.report.notebook import ShownFields
from iclperm.runs.answers import digest_of
from iclperm.runs.finish import forwarded_tokens
from iclperm.runs.folder import TABLES, RunFolder, has_only_begun
from iclperm.runs.limits import DEFAULT, WorkLimits
from iclperm.runs.presence import num_at_work
from iclperm.runs.read import ContextAnswers, Layout, reading_of
from iclperm.runs.run_texts import damage_to_texts
from iclperm.runs.waves import basis_of
from iclperm.study.endpoint import Spent


@dataclass(frozen=True)
class WorkerRecord:
    """A process that answered parts for a session: ``num_parts`` in ``seconds`` since it was ready."""

    name: str
    host: str
    pid: int
    num_parts: int
    seconds: float
    is_lost: bool


@dataclass(frozen=True)
class RunSession:
    """One call of `iclperm.run` on a folder; ``is_closed`` is False where it was killed, or is still at work.
    ``workers`` are those that were ready in it."""

    name: str
    seconds: float
    num_parts: int
    tokens_forwarded: int
    is_closed: bool
    numerics: dict[str, Any]
    workers: list[WorkerRecord] = field(default_factory=list)


@fields_in_help
@dataclass(frozen=True)
class RunStatus(ShownFields):
    """How far a run is. ``seconds_left`` is what the missing parts take at the mean speed of all sessions; None where
    that is not known. ``spent`` was paid to an API, ``lost`` of it at most without a reply: on its way now, or when a
    process was killed, or none came; both None without an API. ``num_at_work`` processes run it now, as far as locks
    tell: those of another machine are often not seen."""

    folder: Path
    task: str
    model: str
    extents: list[dict[str, int]]
    shots: list[int]
    num_parts_done: int
    num_parts: int
    tokens_unique: int
    tokens_forwarded: int
    is_token_count_complete: bool
    num_quarantined: int
    disk_bytes: int
    seconds_left: float | None
    sessions: list[RunSession]
    spent: Spent | None = None
    lost: Spent | None = None
    num_at_work: int = 0
    num_waves: int = 0
    """Of an adaptive run, so far; its parts are those of these waves."""
    is_open: bool = False
    """Whether an adaptive run has not yet decided what it chooses."""

    @property
    def is_finished(self) -> bool:
        """Whether every part is there."""
        return self.num_parts_done == self.num_parts and not self.is_open

    @property
    def is_plain(self) -> bool:
        """Whether prompts were run one by one, so that tokens forwarded are no share of the distinct ones."""
        return any(session.numerics.get("attention") == "plain" for session in self.sessions)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {**asdict(self), "folder": str(self.folder), "is_finished": self.is_finished}


@dataclass(frozen=True)
class Verification:
    """What a check of every byte found: a line for each damage, and the digest of the results where the run is finished
    and nothing is damaged but, perhaps, replies of an API or texts, which results do not rest on."""

    folder: Path
    damage: list[str]
    num_parts_done: int
    num_parts: int
    digest: str | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {**asdict(self), "folder": str(self.folder)}


def status(path: str | Path) -> RunStatus:
    """How far a run is. Reads names of files and records, no answers. Raises `RunError` for a folder that is no run."""
    folder = RunFolder.open(path)
    plan, sessions = folder.plan, [_session(record) for record in folder.sessions() if record]
    forwarded, is_complete = forwarded_tokens(folder)
    done, unique = len(folder.parts.finished()), int(folder.plans[-1]["tokens"]["unique"])
    seconds = sum(session.seconds for session in sessions if session.num_parts)
    books = paid(folder.path) if (folder.path / "api").is_dir() else None
    found = RunStatus(
        folder=folder.path,
        task=plan["task"],
        model=folder.study().model,
        extents=folder.extents[-1:] if folder.decisions else folder.extents,
        shots=plan["study"]["shots"],
        num_parts_done=done,
        num_parts=folder.num_parts,
        tokens_unique=unique,
        tokens_forwarded=forwarded,
        is_token_count_complete=is_complete,
        num_quarantined=len(folder.files.names(folder.path / "quarantine")),
        disk_bytes=folder.files.num_bytes(),
        seconds_left=None,
        sessions=sessions,
        spent=None if books is None else books.spent,
        lost=None if books is None else books.lost,
        num_at_work=num_at_work(folder.files),
        num_waves=sum(not decision["is_last"] for decision in folder.decisions),
        is_open=folder.is_open,
    )
    known = sum(session.num_parts for session in sessions)  # of a plain run the parts tell how much is left
    wanted, had = (folder.num_parts, known) if found.is_plain else (unique, forwarded)
    if not (had and seconds) or folder.is_adaptive:
        return found
    return replace(found, seconds_left=(1 - done / max(folder.num_parts, 1)) * wanted * seconds / had)


def verify(path: str | Path, limits: WorkLimits = DEFAULT) -> Verification:
    """Checks every byte of a run folder; changes nothing. Raises `RunError` for a folder that is no run at all.

    Damage is listed, not raised; the next ``run`` sets it aside and computes it anew. What a process that was killed
    had not yet written is none: the run is not finished. O(size of the folder).
    """
    if has_only_begun(Path(path)):
        return Verification(Path(path), [], 0, 0, None)
    try:
        folder = RunFolder.open(path)
    except DamagedItem as error:
        return Verification(Path(path), [str(error)], 0, 0, None)
    damage: list[str] = []

    def checked(read: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return read(*arguments)
        except UnknownKind:
            raise
        except (IclpermError, OSError) as error:
            if is_out_of_memory(error):
                raise
            damage.append(str(error))
            return None

    unwritten = folder.unwritten()
    if folder.path / "study.yaml" not in unwritten:
        checked(folder.study)
    checked(_refuse_other_chain, folder)
    for number in range(len(folder.plans)):
        for name in TABLES:
            if folder.table_path(name, number) not in unwritten:
                checked(folder.table, name, number)
    damage += [f"{file} cannot be read; what its session cost is unknown" for file in folder.unreadable_sessions()]
    files = checked(folder.parts.finished) or {}
    damage += _other_grounds(folder, files)
    is_known = len(files) == folder.num_parts or folder.num_cells <= limits.cells_unfinished
    scores = checked(_scores, folder, limits) if is_known and not (damage or unwritten) else None
    num_rows = sum(checked(_num_rows, folder, part, file, scores) or 0 for part, file in files.items())
    is_whole = not (damage or unwritten) and len(files) == folder.num_parts and not folder.is_open
    digest = checked(_digest, folder, scores, num_rows) if is_whole else None
    damage += checked(damage_to_replies, folder.path) or []
    damage += (checked(damage_to_texts, folder) or []) if is_whole else []
    return Verification(folder.path, damage, len(files), folder.num_parts, digest)


def _scores(folder: RunFolder, limits: WorkLimits) -> ContextAnswers:
    """Answers yet to be filled in from the folder's parts, without normalisation: labels are not compared here."""
    reading = reading_of(folder.plan)
    scale = np.ones(len(folder.plan["label_lengths"]["sum"]))
    return ContextAnswers(Layout.of_folder(folder), scale, folder.parts, limits=limits, **reading)


def _refuse_other_chain(folder: RunFolder) -> None:
    """Raises `DamagedItem` where a plan is gone, or does not continue the one before it."""
    for number, plan in enumerate(folder.plans[1:], start=1):
        path = folder.plan_path(number)
        if not folder.files.has(path):
            raise DamagedItem(f"{path} is gone; run the study again")
        if plan.get("run") != folder.run_id or plan["extents"][:-1] != folder.plans[number - 1]["extents"]:
            raise DamagedItem(f"{path} does not continue this run; move it elsewhere")


def _other_grounds(folder: RunFolder, files: Mapping[int, Path]) -> list[str]:
    """A line for each wave that was decided from other answers than are there."""
    found, num_parts = [], 0
    for number, plan in enumerate(folder.plans):
        basis = plan.get("decision", {}).get("known", {}).get("basis")
        before = {part: files[part] for part in range(num_parts) if part in files}
        if basis is not None and len(before) == num_parts and basis_of(before) != basis:
            found.append(
                f"{folder.plan_path(number)} was decided from other answers than are there; run the study into another "
                "folder"
            )
        num_parts += int(plan["work"]["parts"])
    return found


def _num_rows(folder: RunFolder, part: int, file: Path, scores: ContextAnswers | None) -> int:
    """The number of answers in one part; raises where it is damaged, or has answers that the plan does not have."""
    table = folder.parts.read(file)
    if scores is not None:
        scores.fill(part, table)
    return len(table)


def _digest(folder: RunFolder, scores: ContextAnswers, num_rows: int) -> str:
    """The digest of a finished run; raises where its parts do not hold every cell of the plans once."""
    if num_rows != folder.num_cells:
        raise RunError(f"{folder.path / 'items'} hold {num_rows} answers, but the plan has {folder.num_cells} cells")
    if folder.has_unasked:
        scores.give_up_unasked()
    scores.refuse_gaps()
    return digest_of(folder.plan["labels"], folder.plan["study"]["shots"], scores.items(predicted=False).values())


def _session(record: Mapping[str, Any]) -> RunSession:
    return RunSession(
        name=record["name"],
        seconds=float(record.get("seconds", 0.0)),
        num_parts=int(record.get("parts", 0)),
        tokens_forwarded=int(record.get("tokens_forwarded", 0)),
        is_closed=bool(record.get("closed", False)),
        numerics=record["numerics"],
        workers=[
            WorkerRecord(told["name"], told["host"], told["pid"], told["parts"], float(told["seconds"]), told["lost"])
            for told in record.get("workers", ())
        ],
    )
