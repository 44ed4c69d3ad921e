"""The ledger of an API run: every paid reply is on disk before it is used, so that nothing is paid for twice, and
every request before it is sent, so that nothing is spent beside the books.

run/
  api/<session>.jsonl      one line an entry: {"crc32": "...", "entry": {...}}; append-only, one writer a session
  quarantine/              what a killed writer left after the last whole line

A checksum is over the bytes of its entry. Neither keys nor headers nor prompts are ever in it: an entry holds the
digest of its request, the name of the model, the tokens paid for, and the reply. An ``intent`` is an entry that has
paid for nothing yet: it says the ``most`` that a request can cost, before that is sent. The entry that ``settles`` it
says what became of it; where a kill left none, the most counts as spent, and as lost. Earlier versions wrote no
intents, and take them for entries that cost nothing.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import secrets
import shutil
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from iclperm.base.files import Folder, writable, write_all
from iclperm.base.sealed import parsed
from iclperm.endpoint.decode import decoded
from iclperm.endpoint.replies import checked_reply
from iclperm.errors import RunStopped
from iclperm.study.endpoint import Spent

LEAST_FREE_BYTES = 16 << 20
"""While the disk has less free space than this, no request is sent."""
_MOST_COUNT = 10**15  # of tokens, as the salvage below reads them
_HEAD = b'{"crc32":"%08x","entry":'
_HEAD_BYTES = len(_HEAD % 0)
_TAIL = b"}\n"
_MOST_OF_LINE = 64 << 20  # of a reply, which the endpoint limits to less
_FOUR = rb'":\[(\d{1,15}),(\d{1,15}),(\d{1,15}),(\d{1,15})\]'
_SPENT, _MOST = re.compile(rb'"spent' + _FOUR), re.compile(rb'"most' + _FOUR)
_INTENT, _SETTLES = re.compile(rb'"intent":"([0-9a-f]{16})"'), re.compile(rb'"settles":"([0-9a-f]{16})"')


class _Place(NamedTuple):
    path: Path
    begin: int
    end: int


@dataclass
class Books:
    """What entries say was spent. ``lost`` is what of it brought no reply: at most so much, as far as that is known."""

    settled: Spent = field(default_factory=Spent)
    settled_lost: Spent = field(default_factory=Spent)
    open: dict[str, Spent] = field(default_factory=dict)  # intents that nothing has settled yet: the most they can cost
    _early: set[str] = field(default_factory=set)  # settled in a file that was read before the intent's

    @property
    def spent(self) -> Spent:
        """All of it, open intents among it."""
        return sum(self.open.values(), self.settled)

    @property
    def lost(self) -> Spent:
        """What of it has no reply."""
        return sum(self.open.values(), self.settled_lost)

    def note(self, entry: Mapping[str, Any]) -> None:
        """Takes in one more entry."""
        spent = Spent(*entry["spent"])
        self.settled += spent
        if entry["reply"] is None:
            self.settled_lost += spent
        self._pair(entry.get("intent"), Spent(*entry.get("most", ())), entry.get("settles"))

    def salvage(self, raw: bytes) -> None:
        """Takes in what damaged lines say of their cost; one request where they say nothing."""
        found = [Spent(*map(int, numbers)) for numbers in _SPENT.findall(raw)]
        lost = sum(found, Spent()) if found else Spent(requests=1)
        self.settled += lost
        self.settled_lost += lost
        most = [Spent(*map(int, numbers)) for numbers in _MOST.findall(raw)]
        intents = [name.decode() for name in _INTENT.findall(raw)]
        for intent, each in zip(intents, most, strict=False):
            self._pair(intent, each, None)
        for settles in _SETTLES.findall(raw):
            self._pair(None, Spent(), settles.decode())

    def _pair(self, intent: str | None, most: Spent, settles: str | None) -> None:
        if intent is not None and intent not in self._early:
            self.open[intent] = most
        self._early.discard(intent or "")
        if settles is not None and self.open.pop(settles, None) is None:
            self._early.add(settles)


class Ledger:
    """The paid replies of one run folder, of all its sessions; this session appends to a file of its own.

    Opening it reads every session once (an index is kept, not the replies) and cuts what a killed writer left after
    the last line break; the cut goes to ``quarantine``. A damaged line stays where it is, unused and counted in
    ``num_damaged``; what it cost, as far as that can be read, stays in ``spent``. ``beside`` tells run folders of the
    same budget, or is asked for them each time: what they have spent, and have on its way, counts too. Raises
    `RunStopped` where the folder cannot be written.
    """

    def __init__(self, folder: str | Path, beside: Iterable[Path] | Callable[[], Iterable[Path]] = ()) -> None:
        self.folder = Path(folder)
        self._files = Folder(self.folder)
        self._books = Books()
        self._beside = beside if callable(beside) else partial(iter, list(beside))
        self._others: dict[Path, Ledger] = {}
        self._spent_beside = Spent()
        self._own: dict[str, Spent] = {}  # intents of this session that are not settled
        self.num_damaged = 0
        self.names: dict[str, dict[str, None]] = {}  # asked model: those that its replies here bear, whoever wrote them
        self._places: dict[str, _Place] = {}
        self._read_to: dict[Path, int] = {}
        self._file: io.FileIO | None = None
        with writable(self.folder):
            for path in _sessions(self._files):
                self._mend(path)
            for raw in _torn(self._files):
                self._books.salvage(raw)
        self._catch_up()
        self._look_beside()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._places)

    @property
    def spent(self) -> Spent:
        """By all sessions, with what they lost and what others have on its way; this session's own intents count once
        they are settled: until then, who sends them reserves their cost."""
        return self._books.spent + self._spent_beside - sum(self._own.values(), Spent())

    @property
    def served(self) -> dict[str, str]:
        """The name that the first reply here bears, by the model that was asked."""
        return {model: next(iter(names)) for model, names in self.names.items()}

    def spent_at_most(self) -> Spent:
        """By all sessions, all that is on its way included, as the files have it now, those of folders beside too."""
        self._catch_up()
        self._look_beside()
        return self._books.spent + self._spent_beside

    def lookup(self, key: str) -> dict[str, Any] | None:
        """The reply that was paid for under a key, also by a process that still runs; None where there is none."""
        if key not in self._places:
            self._catch_up()
        if (place := self._places.get(key)) is None:
            return None
        line = _bytes_at(self._files, place)
        with suppress(ValueError):
            if _entry(line) is not None:
                return checked_reply(decoded(_raw(line))["reply"])
        self.num_damaged += 1  # damaged since it was read, gone, or no reply that any version kept
        del self._places[key]
        return None

    def intend(self, requests: Sequence[tuple[str, Spent]], *, model: str) -> list[str]:
        """Puts on disk that requests are about to be sent, each with its key and the most that it can cost: they are
        synced when this returns, all at once. Returns what `append` settles each by; raises `RunStopped` as it does."""
        names = [secrets.token_hex(8) for _ in requests]
        self._put(
            {
                "key": key,
                "model": model,
                "time": _now(),
                "spent": list(astuple(Spent())),
                "intent": name,
                "most": list(astuple(most)),
                "reply": None,
            }
            for name, (key, most) in zip(names, requests, strict=True)
        )
        self._own |= {name: most for name, (_, most) in zip(names, requests, strict=True)}
        return names

    def append(
        self, key: str, *, model: str, spent: Spent, reply: Mapping[str, Any] | None, settles: str | None = None
    ) -> None:
        """Puts one paid reply on disk: it is synced when this returns. ``reply`` is None for one that may have been
        paid for but did not arrive whole. ``settles`` is the intent that it ends. Raises `RunStopped` where it cannot
        be written: the intent then stays open, and counts."""
        settled = {} if settles is None else {"settles": settles}
        entry = {"key": key, "model": model, "time": _now(), "spent": list(astuple(spent)), **settled, "reply": reply}
        self._own.pop(settles or "", None)
        self._put([entry])

    def _put(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Writes entries one after the other, and syncs them; takes all back where one cannot be written."""
        lines = [(entry, _line(entry)) for entry in entries]
        with writable(self.folder):
            file = self._file or self._begin_session()
            path, begin = self._path, file.tell()
            try:
                write_all(file, b"".join(line for _, line in lines))
                os.fsync(file.fileno())
            except BaseException:
                self._end_session(begin)
                raise
        for entry, line in lines:
            self._note(entry, _Place(path, begin, begin + len(line)))
            begin += len(line)
        self._read_to[path] = begin

    def refuse_full_disk(self) -> None:
        """Raises `RunStopped` where a reply could not be kept, before it is paid for."""
        with writable(self.folder):
            free = shutil.disk_usage(_nearest_folder(self.folder)).free
        if free < LEAST_FREE_BYTES:
            raise RunStopped(
                f"{self.folder} has {free >> 20} MiB left for replies; make room, then run the same command to continue"
            )

    def close(self) -> None:
        """Ends this session's file; what is appended later begins another."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin_session(self) -> io.FileIO:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files.make(self.folder / "api")
        self._path = self.folder / "api" / f"{_session()}.jsonl"
        file = self._files.begun(self._path)
        with suppress(OSError):  # a file system without locks: then nobody cuts it, either
            fcntl.flock(file, fcntl.LOCK_EX)  # waits for who may be looking whether it has a writer
        weakref.finalize(self, file.close)
        self._file = file
        return file

    def _end_session(self, begin: int) -> None:
        """Takes back a line that could not be written whole."""
        if self._file is not None:
            with suppress(OSError):
                self._file.truncate(begin)
        self.close()

    def _mend(self, path: Path) -> None:
        """Cuts a session after its last line break, unless its writer still lives."""
        with self._files.opened(path, "r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return
            end = max((place.end for place, _ in _lines(self._files, path)), default=0)
            file.seek(end)
            if torn := file.read():
                quarantine = self.folder / "quarantine"
                self._files.make(quarantine)
                self._files.write_whole(quarantine / f"api-{path.stem}.{end}.torn", torn)
                if os.fstat(file.fileno()).st_nlink > 1:  # a copy by hard links keeps its tail
                    file.seek(0)
                    self._files.write_whole(path, file.read(end))
                    return
                file.truncate(end)
                os.fsync(file.fileno())

    def _look_beside(self) -> None:
        """Adds up what folders of the same budget have spent by now, also those that were begun meanwhile."""
        for folder in self._beside():
            if folder not in self._others:
                self._others[folder] = Ledger(folder)
        self._spent_beside = sum((other.spent_at_most() for other in self._others.values()), Spent())

    def _catch_up(self) -> None:
        """Reads what sessions have grown by."""
        for path in _sessions(self._files):
            with suppress(FileNotFoundError):
                for place, entry in _lines(self._files, path, self._read_to.get(path, 0)):
                    if entry is None:
                        self.num_damaged += 1
                        self._books.salvage(_bytes_at(self._files, place))
                    else:
                        self._note(entry, place)
                    self._read_to[path] = place.end

    def _note(self, entry: Mapping[str, Any], place: _Place) -> None:
        self._books.note(entry)
        if entry["reply"] is not None:
            self._places[entry["key"]] = place
            self.names.setdefault(entry["model"], {})[entry["reply"].get("model", entry["model"])] = None


def paid(folder: Path) -> Books:
    """What a run folder's replies have cost, those of killed sessions and of a run at work among them; changes nothing.
    O(size of the replies)."""
    books, files = Books(), Folder(folder)
    for raw in _torn(files):
        books.salvage(raw)
    for path in _sessions(files):
        for place, entry in _lines(files, path):
            if entry is None:
                books.salvage(_bytes_at(files, place))
            else:
                books.note(entry)
    return books


def damage(folder: Path) -> list[str]:
    """A line for each reply of a run folder that is not whole; changes nothing. O(size of the replies)."""
    found: list[str] = []
    files = Folder(folder)
    for path in _sessions(files):
        end = 0
        for number, (place, entry) in enumerate(_lines(files, path), start=1):
            end = place.end
            if entry is None:
                found.append(f"{path} is damaged in line {number}: its reply is paid for again where it is needed yet")
        about = files.about(path)
        if about is not None and about.st_size > end and not _has_writer(files, path):
            found.append(f"{path} ends in half a line, as a kill leaves it; run the study again")
    return found


def _sessions(files: Folder) -> list[Path]:
    place = files.path / "api"
    return [place / name for name in files.names(place) if name.endswith(".jsonl")]


def _torn(files: Folder) -> Iterator[bytes]:
    """The tails that were cut from sessions, which may hold what was paid for."""
    place = files.path / "quarantine"
    for name in files.names(place):
        if name.startswith("api-") and name.endswith(".torn"):
            yield files.read(place / name)


def _has_writer(files: Folder, path: Path) -> bool:
    """Whether a session may still be at work; True where the file system has no locks."""
    with files.opened(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _lines(files: Folder, path: Path, begin: int = 0) -> Iterator[tuple[_Place, dict[str, Any] | None]]:
    """Every line from ``begin`` on that ends in a line break, with its entry; None for a damaged one, and for each
    piece of what is longer than any line can be."""
    with files.opened(path) as file:
        if os.fstat(file.fileno()).st_size <= begin:
            return
        file.seek(begin)
        lines = io.BufferedReader(file)
        while line := lines.readline(_MOST_OF_LINE):
            if not line.endswith(b"\n") and len(line) < _MOST_OF_LINE:
                return
            yield _Place(path, begin, begin + len(line)), _entry(line)
            begin += len(line)


def _line(entry: Mapping[str, Any]) -> bytes:
    """One line of ASCII; raises ValueError for what JSON has no number for."""
    raw = json.dumps(entry, allow_nan=False, separators=(",", ":")).encode("ascii")
    return _HEAD % zlib.crc32(raw) + raw + _TAIL


def _entry(line: bytes) -> dict[str, Any] | None:
    """The entry of a line; None where the line is not what its checksum says, or no entry that any version wrote."""
    raw = _raw(line)
    if not line.endswith(_TAIL) or line[:_HEAD_BYTES] != _HEAD % zlib.crc32(raw):
        return None
    try:
        entry = parsed(raw)
    except ValueError:  # of somebody who can reckon a checksum, as below
        return None
    return entry if isinstance(entry, dict) and _is_entry(entry) else None


def _is_entry(entry: Mapping[str, Any]) -> bool:
    reply = entry.get("reply", 0)
    is_reply = reply is None or (isinstance(reply, dict) and isinstance(reply.get("model", ""), str))
    names = [entry.get("key"), entry.get("model"), entry.get("intent", ""), entry.get("settles", "")]
    costs = [entry.get("spent"), entry.get("most", [0] * 4)]
    return (
        is_reply
        and all(isinstance(name, str) for name in names)
        and all(isinstance(cost, list) and len(cost) == 4 and all(map(_is_count, cost)) for cost in costs)
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST_COUNT


def _raw(line: bytes) -> bytes:
    """The entry in a line as it was written."""
    return line[_HEAD_BYTES : -len(_TAIL)]


def _bytes_at(files: Folder, place: _Place) -> bytes:
    """Empty where the file is gone."""
    with suppress(FileNotFoundError), files.opened(place.path) as file:
        file.seek(place.begin)
        return file.read(place.end - place.begin)
    return b""


def _nearest_folder(path: Path) -> Path:
    return path if path.is_dir() else _nearest_folder(path.absolute().parent)


def _session() -> str:
    """A name that sorts after those of earlier sessions, also within a second: of two replies to a request the later
    counts."""
    seconds, rest = divmod(time.time_ns(), 10**9)
    return f"{time.strftime('%Y-%m-%dT%H%M%SZ', time.gmtime(seconds))}-{rest:09d}{secrets.token_hex(2)}"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
