"""Files are whole or not there, whoever else writes them at the same moment, and whatever fails."""

import errno
import io
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from iclperm.base import files
from iclperm.base.files import Folder, replacing, writable, write_once, write_whole
from iclperm.errors import RunStopped

NUM_WRITES = 1_000
SIZE = 100_000  # more than the system writes at once
WRITER = """
import sys
from pathlib import Path
from iclperm.base.files import write_whole

paths, sign = [Path(path) for path in sys.argv[2:]], sys.argv[1].encode()
print("ready", flush=True)
sys.stdin.readline()
for number in range({num_writes}):
    for path in paths:
        write_whole(path, sign * ({size} + number), durable=False)
"""


def start_writer(sign, *paths):
    script = WRITER.format(num_writes=NUM_WRITES, size=SIZE)
    arguments = [sys.executable, "-P", "-c", script, sign, *map(str, paths)]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_that_write_one_file_lose_nothing(tmp_path):
    """Each writes 1,000 times; who reads meanwhile finds a whole file of one of them, every time."""
    paths = [tmp_path / "report.json", tmp_path / "heatmap.png"]
    for path in paths:
        write_whole(path, b"a" * SIZE)
    seen = set()
    with start_writer("a", *paths) as first, start_writer("b", *paths) as second:
        for writer in (first, second):
            assert writer.stdout.readline() == "ready\n"
        for writer in (first, second):
            writer.stdin.write("go\n")
            writer.stdin.flush()
        while first.poll() is None or second.poll() is None:
            for path in paths:
                raw = path.read_bytes()
                assert SIZE <= len(raw) < SIZE + NUM_WRITES
                assert raw == raw[:1] * len(raw), "a torn file was read"
                seen.add(raw[:1])
        assert [writer.communicate()[1] for writer in (first, second)] == ["", ""]
    assert (first.returncode, second.returncode) == (0, 0)
    assert seen == {b"a", b"b"}  # both wrote while this process read
    assert sorted(tmp_path.iterdir()) == sorted(paths)


ONCE = """
import sys
from pathlib import Path
from iclperm.base.files import write_once

print("ready", flush=True)
sys.stdin.readline()
print(*[int(write_once(Path(sys.argv[2]) / str(number), sys.argv[1].encode())) for number in range(100)], flush=True)
"""


def test_of_two_processes_that_write_once_one_does(tmp_path):
    arguments = [[sys.executable, "-P", "-c", ONCE, sign, str(tmp_path)] for sign in "ab"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(arguments[0], **pipes) as first, subprocess.Popen(arguments[1], **pipes) as second:
        for process in (first, second):
            assert process.stdout.readline() == "ready\n"
        wrote = [list(map(int, process.communicate("go\n")[0].split())) for process in (first, second)]
    assert [sum(both) for both in zip(*wrote, strict=True)] == [1] * 100
    for number in range(100):
        assert (tmp_path / str(number)).read_bytes() == (b"a" if wrote[0][number] else b"b")
    assert len(list(tmp_path.iterdir())) == 100


def test_what_is_there_is_replaced_or_kept(tmp_path):
    path = tmp_path / "file"
    assert write_once(path, b"first")
    assert not write_once(path, b"second")
    assert path.read_bytes() == b"first"
    write_whole(path, b"third")
    assert path.read_bytes() == b"third"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("code", "remedy"), [(errno.ENOSPC, "make room"), (errno.EIO, "see to the disk")])
@pytest.mark.parametrize("write", [write_whole, write_once])
def test_what_cannot_be_synced_is_not_there(tmp_path, monkeypatch, write, code, remedy):
    def failing(_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files.os, "fsync", failing)
    with pytest.raises(RunStopped, match=rf"cannot write to .*; {remedy} or give another folder"), writable(tmp_path):
        write(tmp_path / "file", b"new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("target", "write", "why", "named"),
    [
        ("folder", lambda path: os.open(path, os.O_WRONLY), "is a directory", "folder"),
        ("file/run", lambda path: path.mkdir(parents=True), "not a directory", "file"),
        ("gone/run", lambda path: path.mkdir(parents=True), "file exists", "gone"),
        ("run", lambda path: os.listdir(path / "items"), "not a directory", "run/items"),
    ],
    ids=["folder for a file", "file for a folder", "dangling link", "within the folder"],
)
def test_what_is_in_the_way_is_named(tmp_path, target, write, why, named):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/items").write_text("x")
    rest = "elsewhere or give another folder, then run the same command to continue"
    told = f"cannot write to {tmp_path / target}: {why}; move {tmp_path / named} {rest}"
    with pytest.raises(RunStopped, match=f"^{re.escape(told)}$"), writable(tmp_path / target):
        write(tmp_path / target)


def test_files_are_made_ready_where_asked_and_synced_where_durable(tmp_path, monkeypatch):
    staging, target = tmp_path / "tmp", tmp_path / "items"
    staging.mkdir()
    target.mkdir()
    sync, synced = os.fsync, []

    def noting(descriptor):
        what = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        synced.append((what, len(list(staging.iterdir())), len(list(target.iterdir()))))
        sync(descriptor)

    monkeypatch.setattr(files.os, "fsync", noting)
    folder = Folder(tmp_path)
    folder.write_once(target / "a", b"a", staging=staging)
    assert synced == [("file", 1, 0), ("folder", 0, 1)]
    synced.clear()
    folder.write_whole(target / "b", b"b", staging=staging)
    assert synced == [("file", 1, 1), ("folder", 0, 2)]
    synced.clear()
    folder.write_whole(target / "c", b"c")
    assert synced == [("file", 0, 3), ("folder", 0, 3)]
    synced.clear()
    folder.write_whole(target / "d", b"d", durable=False, staging=staging)
    assert synced == []
    assert sorted(path.name for path in target.iterdir()) == ["a", "b", "c", "d"]
    assert list(staging.iterdir()) == []


def test_unfinished_files_have_names_of_their_own(tmp_path, monkeypatch):
    """Process numbers repeat between containers: two with the same one may share a folder."""
    staging, link, folder = tmp_path / "tmp", os.link, Folder(tmp_path)
    staging.mkdir()

    def interleaved(source, target, **handles):
        link(source, target, **handles)
        if not (tmp_path / "other").exists():  # the other container's process, in the same moment
            (staging / Path(target).name).write_bytes(b"")
            folder.write_once(tmp_path / "other", b"other", staging=staging)

    monkeypatch.setattr(files.os, "link", interleaved)
    tokens = iter("abcdefgh")
    monkeypatch.setattr(files.secrets, "token_hex", lambda _size: next(tokens))
    assert folder.write_once(tmp_path / "x", b"acknowledged", staging=staging)
    assert (tmp_path / "x").read_bytes() == b"acknowledged"
    assert (tmp_path / "other").read_bytes() == b"other"
    monkeypatch.setattr(files.secrets, "token_hex", lambda _size: "same")
    (staging / "y.same").write_bytes(b"of another process")
    for write in (folder.write_once, folder.write_whole):
        with pytest.raises(FileExistsError):
            write(tmp_path / "y", b"y", staging=staging)
    assert (staging / "y.same").read_bytes() == b"of another process"


@pytest.mark.parametrize("is_there", [False, True])
def test_a_file_system_without_hard_links_will_do(tmp_path, monkeypatch, is_there):
    def refuse(_source, target, **_):
        if is_there:  # written by another process since this one looked
            (tmp_path / target).write_bytes(b"other")
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(files.os, "link", refuse)
    assert write_once(tmp_path / "file", b"mine") is not is_there
    assert (tmp_path / "file").read_bytes() == (b"other" if is_there else b"mine")
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("write", [write_whole, write_once])
def test_what_does_not_read_back_is_not_there(tmp_path, monkeypatch, write):
    class LosesTheLastByte(io.FileIO):
        def read(self, size=-1):
            return super().read(size)[:-1]

    monkeypatch.setattr(files.io, "FileIO", LosesTheLastByte)
    with pytest.raises(RunStopped, match=r"does not read back as written; check the disk, then run again"):
        write(tmp_path / "file", b"mine")
    assert list(tmp_path.iterdir()) == []


def test_a_large_file_takes_its_place_when_it_is_whole(tmp_path):
    path = tmp_path / "all.jsonl"
    path.write_bytes(b"before")

    def fail():
        with replacing(path) as unfinished:
            unfinished.write_bytes(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_bytes() == b"before"
    with replacing(path) as unfinished:
        unfinished.write_bytes(b"whole")
        assert path.read_bytes() == b"before"
    assert path.read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [path]
