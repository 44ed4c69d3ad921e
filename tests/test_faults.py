"""The fixed part of the fault machine (`faults`): a few cases of every class; and that the machine itself sees."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CLASSES = ("kills", "system", "folders", "replies", "inputs")
# What the fixed part finds and is not mended yet, by class: patterns of findings. What is mended is taken out of here.
KNOWN: dict[str, tuple[str, ...]] = {}


def machine(*arguments, **environment):
    """The machine's program, in a process of its own, as it forks."""
    return subprocess.run(
        [sys.executable, ROOT / "benchmarks/faults.py", *map(str, arguments)],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """The fixed part of all classes, by class."""
    path = tmp_path_factory.mktemp("faults") / "faults.json"
    done = machine("--json", path)
    assert done.returncode in (0, 1), done.stderr
    return {row["class"]: row for row in json.loads(path.read_text())["classes"]}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CLASSES)
def test_the_fixed_part_finds_nothing_new(figures, name):
    row = figures[name]
    assert row["cases"] > 2
    assert "the machine failed" not in row["ended"]
    known = KNOWN.get(name, ())
    new = [found for found in row["findings"] if not any(re.search(each, found["finding"]) for each in known)]
    assert not new, "\n".join(f"{found['case']}: {found['finding']}\n    {found['repeat']}" for found in new)


@pytest.mark.timeout(900)
def test_faults_come_where_they_are_meant_to(figures):
    """Kills kill, refusals are met, and what is damaged is told or mended: no class is one that does nothing."""
    assert figures["system"]["ended"]["killed, then the same"] >= 4
    assert sum(count for how, count in figures["system"]["ended"].items() if how.startswith("exit code 3")) >= 6
    assert figures["folders"]["ended"]["same digest"] >= 5
    assert sum(count for how, count in figures["inputs"]["ended"].items() if "refused" in how) >= 8


def test_the_table_in_the_docs_is_that_of_the_results():
    results = "benchmarks/results/faults.json"
    assert machine("--table", results).stdout in (ROOT / "docs/reliability.md").read_text()


WORKS = """
import errno, json, os, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from faults.child import ALL_WRITES, KILL_AFTER, LASTING, READ, Fault, run, with_shim
with_shim(sys.argv)
from faults.judge import judged
from faults.world import SENTINEL

home = Path(sys.argv[1])
root, scratch = home / "root", home / "scratch"
root.mkdir(), scratch.mkdir()
(root / "link").symlink_to(home)
(home / "file").write_text("whole")

def write(path, size=1000):
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, b"x" * size)
    os.fsync(descriptor)
    os.close(descriptor)

def says(words, code=0):
    print(words, file=sys.stderr)
    return code

def calls(number):
    return sum((lambda: 1)() for _ in range(number))

FULL = Fault(ALL_WRITES | LASTING, 1, errno.ENOSPC)
tries = {{
    "fine": (lambda: write(root / "a"), Fault()),
    "killed in a write": (lambda: write(root / "b"), Fault(at=1, how=KILL_AFTER)),
    "killed at a call": (lambda: calls(10_000) * 0, Fault(calls=5_000)),
    "full": (lambda: write(root / "c"), FULL),
    "caught": (lambda: [write(root / "d", 0), Path(root / "e").exists()] and 0, Fault(at=2, how=errno.EIO)),
    "unread": (lambda: (root / "a").read_bytes() and 0, Fault(READ, 0, errno.EIO)),
    "outside": (lambda: write(root / "link/file"), Fault()),
    "moved out": (lambda: os.rename(root / "a", home / "a"), Fault()),
    "the key": (lambda: says(SENTINEL), Fault()),
    "no remedy": (lambda: says("error: it is bad", 1), Fault()),
    "a remedy": (lambda: says("error: it is bad; mend it", 1), Fault()),
    "nothing said": (lambda: 3, Fault()),
    "a code": (lambda: says("error: a; b", 7), Fault()),
    "escapes": (lambda: says("\x1b[2J"), Fault()),
    "a hang": (lambda: time.sleep(60), Fault()),
    "a crash": (lambda: os.kill(os.getpid(), 11), Fault()),
}}
for name, (work, fault) in tries.items():
    done = run(work, root, scratch, fault, limit_s=5)
    sizes = {{path.name: path.stat().st_size for path in root.iterdir() if path.is_file()}}
    print(json.dumps([name, done.was_killed, judged(done), [line.split()[1] for line in done.operations], sizes]))
"""


def test_the_machine_sees_what_it_is_meant_to_see(tmp_path):
    script = tmp_path / "works.py"
    script.write_text(WORKS.format(tests=str(ROOT / "tests")))
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    said = {name: rest for name, *rest in map(json.loads, done.stdout.splitlines())}
    found = {name: findings for name, (_, findings, _, _) in said.items()}
    assert said["fine"][2] == ["open", "write", "fsync"]
    assert [name for name, (was_killed, *_) in said.items() if was_killed] == ["killed in a write", "killed at a call"]
    assert said["killed in a write"][3]["b"] == 500  # torn
    assert [name for name in found if not found[name]] == ["fine", "killed in a write", "killed at a call", "a remedy"]
    for name, words in {
        "full": "No space left on device", "caught": "Input/output error", "unread": "Input/output error",
        "outside": "changed outside the folder", "moved out": "changed outside the folder", "the key": "the key was",
        "no remedy": "no remedy", "nothing said": "0 error lines", "a code": "exit code 7", "escapes": "control char",
        "a hang": "hangs", "a crash": "died of signal 11",
    }.items():  # fmt: skip
        assert any(words in line for line in found[name]), (name, found[name])
