"""The run folder: what is finished is on disk, whole, named by its content, and never written twice.

run/
  FORMAT                                "iclperm-run 1"
  study.yaml                            the study, canonical
  plan.json                             what identifies the run, with hashes of both tables; the run id is its hash
  demonstrations.parquet                a row per (set, permutation): ordered examples, the context at each shots
  queries.parquet                       a row per query: split, example, right label, weight, state
  texts.parquet                         the texts of prompts, outside what identifies the run (`iclperm.runs.texts`)
  *.parquet.sha256                      of these tables, as sha256sum writes and checks it
  environment/<session>.json            versions, parts and token counts of each session
  items/<part>-<sha256[:16]>.parquet    finished units: a row per (context, query); its footer has run, part, numerics
  tmp/  quarantine/                     files not yet finished, locks, who is at work; damaged files

A run that was extended has plan-001.json, demonstrations-001.parquet and queries-001.parquet too, and so on: the plan
adds parts, the tables hold all rows of the larger extent. Nothing that was there is changed, but study.yaml.
"""

from __future__ import annotations

import json
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from iclperm.base.files import Folder, writable
from iclperm.base.outputs import output
from iclperm.base.sealed import canonical, sealed, unsealed
from iclperm.errors import ConfigError, DamagedItem, RunError, UnknownKind, is_out_of_memory
from iclperm.runs.formats import FORMAT, SEVERAL_FORMAT, VERSION, check_format, format_of
from iclperm.runs.parts import PartFiles
from iclperm.runs.presence import is_at_work
from iclperm.runs.records import is_plan, is_session
from iclperm.runs.stored import (
    MOST_OF_TABLE,
    bytes_of,
    checksum_line,
    content_digest,
    short_digest,
    table_bytes,
    table_of,
)
from iclperm.study import kinds
from iclperm.study.choices import MAX_YAML_BYTES
from iclperm.study.study import PMI, STATISTICS, Study

_CONSEQUENCES = ("tokens.", "work.", "tables.", "run ")
_SPLIT_KEYS = {"train": "hashes.train", "test": "hashes.test", "dev": "dev"}
_DIGESTS = {
    "hashes.wording": "the wording of the task",
    "hashes.model": "the model",
    "hashes.tokenizer": "the tokenizer",
    "hashes.adapter": "the adapter",
}
_SIDED = {  # in words, where one plan alone has it: here, there
    PMI: ("normalize is pmi here alone", "normalize is pmi there alone (report --normalize sum reads it as sums)"),
    "hashes.adapter": ("an adapter is given here alone", "an adapter was given there alone"),
}
_STALE_SECONDS = 3_600  # a commit takes seconds; a file of tmp this old was left by a killed process
_MOST_CONTENT_FREE = 1_000  # queries that a calibrated study has beside those that it asks for
_PLAN_BYTES = 64 << 20  # a study file has 1 MiB at most
_RECORD_BYTES = 1 << 20
_FORMAT_RAW = f"{FORMAT}\n".encode()
TABLES = ("demonstrations", "queries")
_LATER_PLAN = re.compile(r"plan-[0-9]{3}\.json")


class CutOtherwise(RunError):
    """A folder's results are another run's, or those of this run cut for another device (`WorkLimits.is_told`)."""


class RunFolder:
    """One run's files. Processes with the same plan may write into one folder; another plan is refused.

    ``plans`` has an entry for each growth of the run, the first for the run itself; each carries its own digest.
    ``parts`` are the files of finished answers.
    """

    def __init__(self, path: Path, plans: Sequence[Mapping[str, Any]]) -> None:
        self.path = path
        self.plans = plans
        self.files = Folder(path)
        self.parts = PartFiles(self.files, self.run_id, self.num_parts, self.num_cells, self._has_grown)

    @classmethod
    def create(
        cls,
        path: str | Path,
        plans: Sequence[Mapping[str, Any]],
        study: Study,
        tables: Sequence[Mapping[str, pa.Table]],
    ) -> RunFolder:
        """Opens the folder of these plans, or makes it; both sequences have an entry for each growth.

        Raises `RunError` where the folder holds other files or another plan (naming the differences), and `RunStopped`
        where it cannot be written.
        """
        folder = cls(output(path, is_folder=True), _signed(plans, tables))
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
        """An existing run; raises `RunError` where there is none, `DamagedItem` where a plan is damaged."""
        path = Path(path)
        files = Folder(path)
        _refuse_unfetched(path)
        has_format, has_plan = (path.is_dir() and files.has(path / name) for name in ("FORMAT", "plan.json"))
        if not (has_format or has_plan):
            raise RunError(f"{path} is not a run folder; give the folder that a run was written to")
        if not has_format:
            raise DamagedItem(f"{path / 'FORMAT'} is gone; run the study again, which mends it, or give another folder")
        check_format(path)
        if has_only_begun(path):
            raise RunError(f"{path} has only begun; run the same study into it to continue")
        if not has_plan:
            raise DamagedItem(f"{path / 'plan.json'} is gone; run the study again, which mends it")
        return cls(path, [read_plan(files, file) for file in plan_files(files)])

    def plan_path(self, number: int) -> Path:
        """The plan of a growth, 0 for that of the run itself."""
        return self.path / of_growth("plan.json", number)

    @property
    def plan(self) -> Mapping[str, Any]:
        """The run's first plan, which identifies it."""
        return self.plans[0]

    @property
    def extents(self) -> list[dict[str, int]]:
        """How far the run went, growth by growth."""
        return list(self.plans[-1]["extents"])

    @property
    def decisions(self) -> list[Mapping[str, Any]]:
        """What each wave of a run asks (`iclperm.runs.waves.Decision`); empty of a run that is asked at once."""
        return [plan["decision"] for plan in self.plans if "decision" in plan]

    @property
    def is_adaptive(self) -> bool:
        """Whether what the run asks follows from its answers, so that nobody knows beforehand how much that is."""
        return any(decision["asks"] for decision in self.decisions)

    @property
    def has_unasked(self) -> bool:
        """Whether it asks a part of its cells by a decision, not all those of a size."""
        return bool(self.decisions) and "extent" not in self.decisions[-1]

    @property
    def is_open(self) -> bool:
        """Whether a run in waves has not yet decided that it is over."""
        return bool(self.decisions) and not self.decisions[-1]["is_last"]

    def at_finished_extent(self) -> RunFolder:
        """This run as it was at the last extent whose parts are all there; itself where not even the first is, and
        where it asks in waves, which are one extent."""
        if self.decisions:
            return self
        earlier = (RunFolder(self.path, self.plans[:number]) for number in range(len(self.plans), 0, -1))
        return next((folder for folder in earlier if folder.parts.are_there()), self)

    def at_extent(self, extent: Mapping[str, int]) -> RunFolder | None:
        """This run as it was at an extent; None where it never had that."""
        plans = (self.plans[:number] for number in range(len(self.plans), 0, -1))
        return next((RunFolder(self.path, there) for there in plans if there[-1]["extents"][-1] == extent), None)

    @property
    def num_parts(self) -> int:
        """Parts of the finished run."""
        return sum(int(plan["work"]["parts"]) for plan in self.plans)

    @property
    def num_cells(self) -> int:
        """Answers of the finished run."""
        return sum(int(plan["work"]["cells"]) for plan in self.plans)

    @property
    def run_id(self) -> str:
        """SHA-256 of the plan."""
        return str(self.plan["digest"])

    def study(self) -> Study:
        """The study; raises `DamagedItem` where the file is not the plan's, `UnknownKind` where no installed package
        declares its kind."""
        if kinds.find(kind := self.plan["study"].get("kind")) is None:
            raise UnknownKind(
                f"{self.path} is of the kind {kind!r}, which no installed package declares; install the one that does"
            )
        path = self.path / "study.yaml"
        study = self._read_study()
        if study is None and not self.files.has(path):
            raise DamagedItem(f"{path} is not there: lost, or not yet written; run the study again")
        # Of a growth the plan is first: who was killed then leaves the study as it was before.
        extents = [self.plan["most"]] if "most" in self.plan else self.extents
        if study is None or not (_is_of(study, self.plan) and any(_agrees(study, each) for each in extents)):
            raise DamagedItem(f"{path} is damaged: it is not the plan's study; run the study again")
        return study.model_copy(update=self.extents[-1])

    def unwritten(self) -> list[Path]:
        """The study and the tables that are not there because who began the run, or let it grow, was killed before.

        They are written before any part is, so where a growth has a finished part, or names leave that open, they are
        lost instead.
        """
        begin, found = 0, []
        try:
            finished = self.parts.finished()
        except (RunError, OSError):
            return []
        for number, plan in enumerate(self.plans):
            parts = range(begin, begin := begin + int(plan["work"]["parts"]))
            places = [self.table_path(name, number) for name in TABLES]
            if not any(part in parts for part in finished):
                places += [] if number else [self.path / "study.yaml"]
                found += [path for path in places if not self.files.has(path)]
        return found

    def table_path(self, name: str, number: int) -> Path:
        """``demonstrations`` or ``queries`` as they were after a growth; waves of one extent have those of the first
        of them."""
        extents = self.extents[: len(self.plans)]
        return self.path / of_growth(f"{name}.parquet", extents.index(extents[number]))

    def table(self, name: str, number: int = -1) -> pa.Table:
        """``demonstrations`` or ``queries`` as they were after a growth, by default the last; raises `DamagedItem` for
        another content than the plan says."""
        path = self.table_path(name, number % len(self.plans))
        extent = self.plans[number]["extents"][-1]
        most_rows = {
            "demonstrations": extent["sets"] * extent["permutations"] * len(self.plan["study"]["shots"]),
            "queries": extent["queries"] + extent["dev_queries"] + _MOST_CONTENT_FREE,
        }[name]
        try:
            raw = self.files.read(path, MOST_OF_TABLE)
            is_whole = self.files.read(_checksum_path(path), _RECORD_BYTES) == checksum_line(path.name, raw)
            table = table_of(path, raw, most_rows) if is_whole else None
            is_whole = is_whole and content_digest(table) == self.plans[number]["tables"][name]
        except (OSError, pa.ArrowException, ValueError, KeyError, RecursionError) as error:
            if is_out_of_memory(error):
                raise
            is_whole = False
        if not is_whole:
            is_lost = not self.files.has(path)
            state = (
                "not there: lost, or not yet written" if is_lost else "damaged: its content is not what the plan says"
            )
            raise DamagedItem(f"{path} is {state}; run the study again")
        return table

    def has_other_damage(self) -> bool:
        """Whether something is damaged that the answers at the last extent are read without: a session's record, or a
        table of an earlier extent."""
        try:
            for number in range(len(self.plans) - 1):
                for name in TABLES:
                    self.table(name, number)
        except DamagedItem:
            return True
        return bool(self.unreadable_sessions())

    def set_aside(self, path: Path) -> Path:
        """Moves a damaged file to ``quarantine``; its part will be computed anew."""
        with writable(self.path):
            return self.files.move(path, self.path / "quarantine")

    def write_session(self, session: str, content: Mapping[str, Any], *, durable: bool = True) -> None:
        """Writes or replaces the record of one session; see `write_whole` for ``durable``."""
        target = self.path / "environment" / f"{session}.json"
        raw = canonical(sealed({"format": FORMAT, **content}))
        with writable(self.path):
            self.files.write_whole(target, raw, durable=durable, staging=self.path / "tmp")

    def sessions(self) -> list[dict[str, Any]]:
        """The records of all sessions, oldest first; an empty one for each that cannot be read or was set aside."""
        records = [_read_session(self.files, path) for path in _session_files(self.files)]
        return records + [{} for name in self.files.names(self.path / "quarantine") if ".json" in name]

    def unreadable_sessions(self) -> list[Path]:
        """The files of records that cannot be read: what those sessions cost is not known."""
        return [path for path in _session_files(self.files) if not _read_session(self.files, path)]

    def _write_plan(self, number: int, plan: Mapping[str, Any]) -> None:
        path = self.plan_path(number)
        if self.files.has(path):
            try:
                there = read_plan(self.files, path)
            except DamagedItem:
                self._refuse_foreign_parts(path)
                self.set_aside(path)
            else:
                _refuse_another(self.path, there, plan)
        elif number == 0:
            self._refuse_foreign_parts(path)
        self._commit(canonical(plan), path.name)
        _refuse_another(self.path, read_plan(self.files, path), plan)  # another process may have been faster

    def _refuse_foreign_parts(self, path: Path) -> None:
        """Raises `RunError` where a plan is damaged or gone and the parts beside it do not say that it was this one."""
        if not self.parts.are_ours():
            state = "damaged" if self.files.has(path) else "gone"
            raise CutOtherwise(
                f"{path} is {state}, and the results beside it are not this study's; give another folder"
            )

    def _write_study(self, study: Study) -> None:
        path = self.path / "study.yaml"
        there = self._read_study()
        if there is not None and _is_of(there, self.plan):
            if _agrees(there, self.plan.get("most", self.extents[-1])) or self._has_grown():
                self.record_statistics(study)
                return
        elif self.files.has(path):
            self.set_aside(path)
        self.files.write_whole(path, study.to_yaml().encode(), staging=self.path / "tmp")

    def record_statistics(self, study: Study) -> None:
        """Puts a study's choices that change no answer (`STATISTICS`) into study.yaml.

        A folder that cannot be written keeps what it has.
        """
        there = self._read_study()  # of a larger extent where another process has let the run grow
        chosen = {key: getattr(study, key) for key in STATISTICS}
        if there is not None and any(getattr(there, key) != value for key, value in chosen.items()):
            with suppress(OSError):
                self.files.write_whole(self.path / "study.yaml", there.model_copy(update=chosen).to_yaml().encode())

    def _read_study(self) -> Study | None:
        """The study in the folder; None where there is none, or it is damaged."""
        path = self.path / "study.yaml"
        try:
            return Study.from_file(path, self.files.read(path, MAX_YAML_BYTES))
        except (ConfigError, OSError):
            return None

    def _has_grown(self) -> bool:
        """Whether another process has let the run grow beyond what this one knows."""
        return len(plan_files(self.files)) > len(self.plans)

    def _write_table(self, number: int, name: str, table: pa.Table) -> None:
        path = self.table_path(name, number)
        if self.files.has(path):
            try:
                self.table(name, number)
                return
            except DamagedItem:
                self.set_aside(path)
        raw, checksum = table_bytes(table), _checksum_path(path)
        line = checksum_line(path.name, raw)
        if self.files.has(checksum) and self.files.read(checksum, _RECORD_BYTES) != line:
            self.set_aside(checksum)  # damaged, or that of a file which another version wrote
        self._commit(line, checksum.name)
        self._commit(raw, path.name)

    def _remove_stale(self) -> None:
        """Removes what killed sessions left; should one still be at work, it stops and can be continued."""
        for name in self.files.names(place := self.path / "tmp"):
            about = self.files.about(place / name)
            is_ours = about is not None and not stat.S_ISDIR(about.st_mode)
            is_old = about is not None and is_ours and time.time() - about.st_mtime > _STALE_SECONDS
            if is_old and not is_at_work(self.files, place / name):
                self.files.remove(place / name)

    def _claim_folder(self) -> None:
        """Makes the folder a run's; raises `RunError` where it holds something else."""
        _refuse_unfetched(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        if not self.files.has(self.path / "FORMAT"):
            others = {*self.files.names()} - {"tmp"}
            if others and not self.files.has(self.path / "FORMAT"):  # unless another process has just made the folder
                raise RunError(f"{self.path} holds other files; give a new or empty folder")
            self.files.make(self.path / "tmp")
            self._commit(_FORMAT_RAW, "FORMAT")
        check_format(self.path)
        for name in ("items", "environment", "tmp", "quarantine"):
            self.files.make(self.path / name)

    def _commit(self, raw: bytes, name: str) -> None:
        """Writes a file that is never replaced, as `write_once`."""
        self.files.write_once(self.path / name, raw, staging=self.path / "tmp")


def refuse_other_choices(path: Path, choices: Mapping[str, Any]) -> None:
    """Raises `RunError` where the run in a folder is not of these ``choices``, some of a plan's keys; nothing where its
    plan is not there or damaged."""
    _refuse_unfetched(path)
    files = Folder(path)
    if not (path.is_dir() and files.has(path / "FORMAT") and files.has(path / "plan.json")):
        return
    with suppress(DamagedItem):
        there = read_plan(files, path / "plan.json")
        known = {**there, "study": {key: value for key, value in there.get("study", {}).items() if key != "dtype"}}
        _refuse_another(path, {key: known.get(key) for key in choices}, choices)


def mend_format(path: Path, identity: Mapping[str, Any]) -> bool:
    """Writes the FORMAT of a run of this ``identity`` (`ResolvedStudy.identity`) anew where it is damaged or gone, and
    moves its damaged bytes to ``quarantine``; returns whether it did. That of another run is left alone.

    Another version's is not damaged. Where its number may itself be the damage, or plan.json is damaged, too, sessions
    say which version wrote them; parts then say whose they are (`RunFolder.create`).
    """
    files = Folder(path)
    is_there = path.is_dir() and files.has(path / "FORMAT")
    found = format_of(path) if is_there else ""
    if not path.is_dir() or found in (FORMAT, SEVERAL_FORMAT):
        return False
    is_version = VERSION.fullmatch(found) is not None
    has_plan = files.has(path / "plan.json")  # asked once: another process may be making this very folder
    try:
        plan = read_plan(files, path / "plan.json") if has_plan else None
    except DamagedItem:
        plan = None
    if plan is not None and any(plan.get(key) != value for key, value in identity.items()):
        if is_there and not is_version:
            raise RunError(f"{path} holds another run, whose FORMAT is damaged; give another folder")
        return False
    if is_version or plan is None:
        written_by = {_read_session(files, file).get("format") for file in _session_files(files)}
        if written_by != {FORMAT} and not is_version and (is_there or has_plan):
            raise RunError(
                f"{path} has lost both FORMAT and plan.json, and no session's record says that it is a run of this "
                "version; give another folder"
            )
        if written_by != {FORMAT}:
            return False
    with writable(path):
        for name in ("quarantine", "tmp"):
            files.make(path / name)
        if is_there:
            damaged = files.read(path / "FORMAT")
            files.write_once(path / "quarantine" / f"FORMAT-{short_digest(damaged)}", damaged, staging=path / "tmp")
        files.write_whole(path / "FORMAT", _FORMAT_RAW, staging=path / "tmp")
    return True


def has_only_begun(path: Path) -> bool:
    """Whether who made a run's folder was killed before its plan was written, which comes before any result."""
    files = Folder(path)
    is_run = path.is_dir() and files.has(path / "FORMAT") and format_of(path) == FORMAT
    return is_run and not plan_files(files) and not files.names(path / "items")


def _refuse_unfetched(path: Path) -> None:
    """Raises `RunError` where the folder, or something in it, is but a pointer of DVC."""
    if path.is_dir():
        Folder(path).refuse_unfetched()
    elif path.parent.is_dir():
        Folder(path.parent).refuse_pointer_to(path)


def _session_files(files: Folder) -> list[Path]:
    place = files.path / "environment"
    return [place / name for name in files.names(place) if name.endswith(".json")]


def plan_files(files: Folder) -> list[Path]:
    """Those of the plans in a folder, in the order of its growths."""
    if not files.path.is_dir():
        return []
    names = files.names()
    first = ["plan.json"] if "plan.json" in names else []
    return [files.path / name for name in (*first, *filter(_LATER_PLAN.fullmatch, names))]


def of_growth(name: str, number: int) -> str:
    """What the file ``name`` is called of a growth, 0 for that of the run itself."""
    stem, suffix = name.split(".")
    return f"{stem}-{number:03d}.{suffix}" if number else name


def _signed(plans: Sequence[Mapping[str, Any]], tables: Sequence[Mapping[str, pa.Table]]) -> list[dict[str, Any]]:
    """Plans as they are written: with the digests of their tables, after the first with the run's id, and sealed."""
    signed: list[dict[str, Any]] = []
    for plan, by_name in zip(plans, tables, strict=True):
        run = {"run": signed[0]["digest"]} if signed else {}
        digests = {name: content_digest(table) for name, table in by_name.items()}
        signed.append(sealed({**plan, **run, "tables": digests}))
    return signed


def read_plan(files: Folder, path: Path) -> dict[str, Any]:
    """A plan; raises `DamagedItem` where it is not what its digest says."""
    plan = unsealed(bytes_of(files, path, _PLAN_BYTES))
    if plan is None or not is_plan(plan):
        raise DamagedItem(f"{path} is damaged: its content is not what its digest says; run the study again")
    return plan


_LATER_KEYS = {"balance": "classes", "budget": "exhaustive", "rule": "calibrated", "tolerance": 0.01, "precision": None}
"""Keys of the study that plans leave out where they have this value, as all of earlier versions do."""


def _is_of(study: Study, plan: Mapping[str, Any]) -> bool:
    """Whether a study makes the choices of a plan."""
    return _agrees(study, _with_later(plan))


def _refuse_another(path: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raises `RunError` where two plans differ, with what is there and here."""
    before, now = ({**plan, "study": _with_later(plan)} for plan in (there, here))
    differences = list(_differences(before, now))
    # What follows from another choice is no news beside it.
    differences = [line for line in differences if not line.startswith(_CONSEQUENCES)] or differences
    if differences:
        differences = _in_words(differences)
        shown = "; ".join(differences[:3]) + (f"; and {len(differences) - 3} more" if differences[3:] else "")
        cuts = [plan.get("work", {}).get("unit_tokens") for plan in (there, here)]
        error = RunError if cuts[0] == cuts[1] else CutOtherwise
        raise error(f"{path} holds another run: {shown}; give another folder, or put that back")


def _with_later(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The choices of a plan, those written out that it leaves out."""
    return {**_LATER_KEYS, **plan["study"]} if "study" in plan else {}


def _agrees(study: Study, choices: Mapping[str, Any]) -> bool:
    """Whether a study makes these choices; the dtype, which may depend on the machine, is not looked at."""
    return all(getattr(study, key) == value for key, value in choices.items() if key != "dtype")


def _read_session(files: Folder, path: Path) -> dict[str, Any]:
    """A session's record; empty where it cannot be read."""
    try:
        record = unsealed(files.read(path, _RECORD_BYTES))
    except OSError:
        return {}
    return {**record, "name": path.stem} if record is not None and is_session(record) else {}


def _differences(there: Any, here: Any, key: str = "") -> Iterator[str]:
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for name in sorted({*there, *here}):
            yield from _differences(there.get(name), here.get(name), f"{key}.{name}" if key else name)
    elif there != here and key != "digest":
        shown = _shown(there), _shown(here)
        yield f"{key} differs" if shown[0] == shown[1] else f"{key} is {shown[0]} there and {shown[1]} here"


def _in_words(differences: Sequence[str]) -> list[str]:
    """The differences, but what is known by a digest alone named by what it is that changed, and first."""
    sided = {line: _SIDED[key] for line in differences if (key := line.split(" ")[0]) in _SIDED and " null " in line}
    told = [words[" is null there " not in line] for line, words in sided.items()]
    differences = [line for line in differences if line not in sided]
    changed = {line.split(" ")[0]: line for line in differences if " is null there " not in line}
    splits = [split for split, key in _SPLIT_KEYS.items() if key in changed and "null here" not in changed[key]]
    told += [f"the data has changed since (its {', '.join(splits)} rows)"] if splits else []
    named = {key: words for key, words in _DIGESTS.items() if key in changed}
    told += [f"{words} has changed since" for words in named.values()]
    done = {*named, *(_SPLIT_KEYS[split] for split in splits)}
    return told + [line for line in differences if line.split(" ")[0] not in done]


def _shown(value: Any) -> str:
    text = json.dumps(value)
    if len(text) <= 40:
        return text
    if isinstance(value, (list, Mapping)):
        return f"{len(value):,} {'values' if isinstance(value, list) else 'keys'}"
    return f"{text[:20]}...{text[-10:]}"


def _checksum_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")
