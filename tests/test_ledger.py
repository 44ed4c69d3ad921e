"""The ledger: what was appended is there, whatever happened to the files; what is damaged is never used."""

import errno
import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iclperm.endpoint import Spent
from iclperm.endpoint import ledger as ledgers
from iclperm.endpoint.ledger import Ledger, damage
from iclperm.errors import RunError, RunStopped

PAID = Spent(1, 10, 4, 2)


def reply(number: int) -> dict:
    return {"model": "m-2025-01-01", "choices": [{"text": f"Größe {number}\n\u2028\x00"}]}


def fill(folder: Path, count: int, begin: int = 0) -> Path:
    """Appends replies under the keys "0", "1", ... in one session; its file."""
    with Ledger(folder) as ledger:
        for number in range(begin, begin + count):
            ledger.append(str(number), model="m", spent=PAID, reply=reply(number))
    return max((folder / "api").glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)


def test_what_is_appended_is_found_by_this_and_later_sessions(tmp_path):
    with Ledger(tmp_path) as ledger:
        assert ledger.lookup("0") is None
        assert not (tmp_path / "api").exists()  # a session that pays for nothing leaves nothing
        ledger.append("0", model="m", spent=PAID, reply=reply(0))
        assert ledger.lookup("0") == reply(0)
    fill(tmp_path, 3, begin=1)
    with Ledger(tmp_path) as ledger:
        assert [ledger.lookup(str(number)) for number in range(5)] == [*(reply(number) for number in range(4)), None]
        assert len(ledger) == 4
        assert ledger.spent == Spent(4, 40, 16, 8)
        assert ledger.served == {"m": "m-2025-01-01"}
        assert ledger.num_damaged == 0
    assert len(list((tmp_path / "api").glob("*.jsonl"))) == 2


def test_every_line_is_json_with_its_checksum_and_holds_no_prompt(tmp_path):
    lines = fill(tmp_path, 3).read_text("ascii").splitlines()
    entries = [json.loads(line) for line in lines]
    assert [entry["entry"]["key"] for entry in entries] == ["0", "1", "2"]
    assert all(len(entry["crc32"]) == 8 for entry in entries)
    assert {*entries[0]["entry"]} == {"key", "model", "time", "spent", "reply"}


def test_a_lost_reply_is_counted_and_not_found(tmp_path):
    with Ledger(tmp_path) as ledger:
        ledger.append("0", model="m", spent=PAID, reply=None)
        assert ledger.lookup("0") is None
    with Ledger(tmp_path) as ledger:
        assert ledger.lookup("0") is None
        assert (len(ledger), ledger.spent) == (0, PAID)


def test_a_line_is_synced_before_it_is_acknowledged(tmp_path, monkeypatch):
    synced = []
    really = os.fsync

    def note(descriptor):
        synced.append((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))
        really(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    with Ledger(tmp_path / "run") as ledger:
        for number in range(3):
            ledger.append(str(number), model="m", spent=PAID, reply=reply(number))
            (session,) = (tmp_path / "run/api").glob("*.jsonl")
            assert synced[-1] == (session.stat().st_ino, session.stat().st_size)
    assert [inode for inode, _ in synced[:2]] == [
        path.stat().st_ino for path in (tmp_path / "run", tmp_path / "run/api")
    ]


@settings(max_examples=30)
@given(cut=st.integers(1, 400), junk=st.binary(max_size=40))
def test_a_torn_tail_is_cut_kept_and_never_appended_to(tmp_path_factory, cut, junk):
    folder = tmp_path_factory.mktemp("torn")
    path = fill(folder, 4)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    torn = whole[: max(0, len(whole) - cut)] + junk.replace(b"\n", b"")
    path.write_bytes(torn)
    num_whole = next(count for count in range(4, -1, -1) if torn.startswith(b"".join(lines[:count])))
    with Ledger(folder) as ledger:
        assert path.read_bytes() == b"".join(lines[:num_whole])
        kept = [file.read_bytes() for file in (folder / "quarantine").glob("*")] if torn != path.read_bytes() else []
        assert kept == ([torn[len(path.read_bytes()) :]] if torn != path.read_bytes() else [])
        assert [ledger.lookup(str(number)) for number in range(num_whole)] == [reply(n) for n in range(num_whole)]
        assert len(ledger) == num_whole
        ledger.append("again", model="m", spent=PAID, reply=reply(9))
        assert path.read_bytes() == b"".join(lines[:num_whole])  # this session has a file of its own
    with Ledger(folder) as ledger:
        assert ledger.lookup("again") == reply(9)


@settings(max_examples=30)
@given(data=st.data())
def test_a_flipped_bit_costs_its_line_and_no_other(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("flipped")
    path = fill(folder, 3)
    raw = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    line = bytes(raw[:at]).count(b"\n")
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)
    with Ledger(folder) as ledger:
        found = [ledger.lookup(str(number)) for number in range(3)]
        lost = {number for number in range(3) if found[number] is None}
        # A line break that was flipped joins its line to the next.
        assert line in lost
        assert lost <= {line, line + 1}
        assert all(found[number] == reply(number) for number in range(3) if number not in lost)


def test_damage_between_whole_lines_is_left_where_it_is_and_counted(tmp_path):
    path = fill(tmp_path, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = lines[0] + lines[1].replace(b"Gr", b"gR") + lines[2]
    path.write_bytes(damaged)
    with Ledger(tmp_path) as ledger:
        assert (ledger.lookup("0"), ledger.lookup("1"), ledger.lookup("2")) == (reply(0), None, reply(2))
        assert ledger.num_damaged == 1
        assert ledger.spent == Spent(3, 30, 12, 6)  # it was paid for
    assert path.read_bytes() == damaged
    assert not (tmp_path / "quarantine").exists()


def test_a_damaged_last_line_stays_and_its_cost_with_it(tmp_path):
    path = fill(tmp_path, 2)
    damaged = path.read_bytes()[:-5] + b"*" * 4 + b"\n"
    path.write_bytes(damaged)
    for _ in range(2):
        with Ledger(tmp_path) as ledger:
            assert (ledger.lookup("0"), ledger.lookup("1"), ledger.num_damaged) == (reply(0), None, 1)
            assert ledger.spent == Spent(2, 20, 8, 4)
    assert path.read_bytes() == damaged
    path.write_bytes(b"nothing to read\n")
    with Ledger(tmp_path) as ledger:
        assert (ledger.num_damaged, ledger.spent) == (1, Spent(requests=1))


def test_the_cost_of_a_torn_line_is_kept(tmp_path):
    path = fill(tmp_path, 2)
    path.write_bytes(path.read_bytes()[:-10])
    for _ in range(2):
        with Ledger(tmp_path) as ledger:
            assert (len(ledger), ledger.num_damaged, ledger.spent) == (1, 0, Spent(2, 20, 8, 4))


def test_damage_is_told_and_nothing_is_changed(tmp_path):
    assert damage(tmp_path) == []
    path = fill(tmp_path, 3)
    assert damage(tmp_path) == []
    lines = path.read_bytes().splitlines(keepends=True)
    broken = lines[0] + lines[1].replace(b"Gr", b"gR") + lines[2][:-3]
    path.write_bytes(broken)
    in_line, torn = damage(tmp_path)
    assert in_line.startswith(f"{path} is damaged in line 2: ")
    assert torn.startswith(f"{path} ends in half a line")
    assert path.read_bytes() == broken
    with Ledger(tmp_path / "living") as writer:
        writer.append("0", model="m", spent=PAID, reply=reply(0))
        (living,) = (tmp_path / "living/api").glob("*.jsonl")
        with living.open("ab") as half:
            half.write(b"half")
        assert damage(tmp_path / "living") == []


def test_what_is_damaged_or_gone_after_it_was_read_is_not_used(tmp_path):
    path = fill(tmp_path, 2)
    with Ledger(tmp_path) as ledger:
        path.write_bytes(path.read_bytes().replace(b"Gr", b"gR", 1))
        assert (ledger.lookup("0"), ledger.lookup("1")) == (None, reply(1))
        path.unlink()
        assert ledger.lookup("1") is None


def test_a_living_session_is_read_and_left_alone(tmp_path):
    with Ledger(tmp_path) as writer:
        writer.append("0", model="m", spent=PAID, reply=reply(0))
        (path,) = (tmp_path / "api").glob("*.jsonl")
        with path.open("ab") as half:
            half.write(b'{"crc32":"')  # as if in the middle of a write
        before = path.read_bytes()
        with Ledger(tmp_path) as reader:
            assert reader.lookup("0") == reply(0)
            assert path.read_bytes() == before
            path.write_bytes(before[: before.rindex(b"\n") + 1])
            assert reader.lookup("1") is None
            with Ledger(tmp_path) as other:
                other.append("1", model="m", spent=PAID, reply=reply(1))
            assert reader.lookup("1") == reply(1)  # paid for while this one was open
            assert reader.spent == Spent(2, 20, 8, 4)


def _append_many(folder: str, begin: int) -> None:
    with Ledger(folder) as ledger:
        for number in range(begin, begin + 20):
            ledger.append(str(number), model="m", spent=PAID, reply=reply(number))


def test_processes_share_a_folder_without_sharing_a_file(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_append_many, args=(str(tmp_path), begin)) for begin in (0, 20)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    with Ledger(tmp_path) as ledger:
        assert [ledger.lookup(str(number)) for number in range(40)] == [reply(number) for number in range(40)]
        assert ledger.num_damaged == 0


def test_a_torn_tail_that_a_copy_by_hard_links_shares_is_cut_here_only(tmp_path):
    path = fill(tmp_path / "run", 2)
    whole = path.read_bytes()
    path.write_bytes(whole + b"torn")
    shutil.copytree(tmp_path / "run", tmp_path / "copy", copy_function=os.link)  # as cp -al
    with Ledger(tmp_path / "run") as ledger:
        assert ledger.lookup("1") == reply(1)
    assert path.read_bytes() == whole
    assert [file.read_bytes() for file in (tmp_path / "run/quarantine").iterdir()] == [b"torn"]
    assert (tmp_path / "copy/api" / path.name).read_bytes() == whole + b"torn"


class _FullDisk:
    """A file that takes half of what is written to it once, then nothing."""

    def __init__(self, file):
        self._file = file

    def write(self, raw):
        self._file.write(bytes(raw[: len(raw) // 2]))
        raise OSError(errno.ENOSPC, "No space left on device")

    def __getattr__(self, name):
        return getattr(self._file, name)


def test_a_full_disk_stops_the_run_and_harms_nothing(tmp_path, monkeypatch):
    with Ledger(tmp_path) as ledger:
        ledger.append("0", model="m", spent=PAID, reply=reply(0))
        (path,) = (tmp_path / "api").glob("*.jsonl")
        before = path.read_bytes()
        monkeypatch.setattr(ledger, "_file", _FullDisk(ledger._file))
        with pytest.raises(RunStopped, match="no space left on device; make room"):
            ledger.append("1", model="m", spent=PAID, reply=reply(1))
        assert path.read_bytes() == before
        assert (ledger.lookup("1"), ledger.spent) == (None, PAID)
        ledger.append("1", model="m", spent=PAID, reply=reply(1))  # room was made
    with Ledger(tmp_path) as ledger:
        assert (ledger.lookup("0"), ledger.lookup("1")) == (reply(0), reply(1))
    assert not (tmp_path / "quarantine").exists()


def test_nothing_is_paid_for_that_could_not_be_kept(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    with Ledger(tmp_path / "not" / "yet") as ledger:
        ledger.refuse_full_disk()
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=ledgers.LEAST_FREE_BYTES - 1))
        with pytest.raises(RunStopped, match="has 15 MiB left for replies; make room"):
            ledger.refuse_full_disk()


def test_a_folder_that_cannot_be_written_stops_the_run(tmp_path):
    (tmp_path / "api").write_text("a file where the folder should be")
    with pytest.raises(RunError, match="api is no folder; move it elsewhere"):
        Ledger(tmp_path)
    (tmp_path / "api").unlink()
    with Ledger(tmp_path / "run") as ledger:
        (tmp_path / "run").write_text("a file where the folder should be")
        with pytest.raises(RunStopped, match="cannot write to"):
            ledger.append("0", model="m", spent=PAID, reply=reply(0))
