"""A process that may not end: killed in time, started anew, and never left behind."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from iclperm.base import worker as killable
from iclperm.base.worker import MAX_BYTES, Overtime, StartError, Worker, WorkerError

TARGETS = "killable_targets"


@pytest.fixture
def worker():
    with Worker(f"{TARGETS}:misbehave") as worker:
        yield worker


def pid_of(worker):
    return worker._process.pid if worker._process else None


def is_running(pid):
    """Whether a process is there and more than a name that waits to be forgotten."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("value", [None, 1.5, "é\n\U0001f600\ud800", [1, {"a": [True]}], "x" * 3_000_000])
def test_json_values_go_there_and_back(value):
    with Worker(f"{TARGETS}:double") as worker:
        if value is None:
            with pytest.raises(WorkerError, match="TypeError: unsupported operand"):
                worker.call(value, 5)
        elif isinstance(value, list | str | float):
            assert worker.call(value, 5) == value * 2


def test_one_process_serves_many_calls():
    with Worker("math:factorial") as worker:
        assert pid_of(worker) is None
        assert [worker.call(number, 5) for number in range(20)] == [math.factorial(number) for number in range(20)]
        pid = pid_of(worker)
        with pytest.raises(WorkerError, match="math:factorial: TypeError"):
            worker.call("x", 5)
        assert pid_of(worker) == pid
    assert pid_of(worker) is None
    assert not is_running(pid)


@pytest.mark.parametrize("how", ["spin", "spin in C"])
def test_what_burns_time_is_killed_and_the_next_call_served(worker, how):
    begin = time.monotonic()
    with pytest.raises(Overtime, match=r"misbehave: took more than 0\.3 seconds of processor time"):
        worker.call(how, 0.3)
    assert time.monotonic() - begin < 60
    assert pid_of(worker) is None
    with pytest.raises(WorkerError, match="no such thing: nothing"):
        worker.call("nothing", 5)
    assert pid_of(worker) is not None


@pytest.mark.parametrize("how", ["sleep", "fork"])
def test_what_only_waits_is_killed_by_the_clock(worker, how, tmp_path):
    with pytest.raises(WorkerError):
        worker.call("start", 5)
    pid = pid_of(worker)
    with pytest.raises(Overtime, match=r"took more than 1 seconds by the clock"):
        worker.call(f"{how} {tmp_path / 'child'}", 0.1)
    assert not is_running(pid)
    if how == "fork":
        child, until = int((tmp_path / "child").read_text()), time.monotonic() + 20
        while is_running(child):  # killed with its group; that it is gone takes a moment more
            assert time.monotonic() < until
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("die", "the process died with code 7"),
        ("exit", "the process died with code 3"),
        ("hoard", "MemoryError"),
        ("set", "TypeError: Object of type set is not JSON serializable"),
        ("much", "the reply is too long"),
        ("other", "ValueError: no such thing: other"),
    ],
)
def test_failures_are_named_in_one_line_and_do_not_stay(worker, how, said):
    for _ in range(2):
        with pytest.raises(WorkerError, match=said) as caught:
            worker.call(how, 20)
        assert "\n" not in str(caught.value)


def test_a_request_that_is_too_long_is_not_sent(worker):
    with pytest.raises(WorkerError, match=f"at most {MAX_BYTES} are sent"):
        worker.call("x" * MAX_BYTES, 5)
    assert pid_of(worker) is None


@pytest.mark.parametrize(
    ("target", "modules", "said"),
    [
        ("no_such_module:f", (), "No module named 'no_such_module'"),
        ("math:no_such_name", (), "has no attribute 'no_such_name'"),
        ("math", (), "not enough values"),
        ("math:sqrt", ("no_such_library",), "No module named 'no_such_library'"),
    ],
)
def test_a_process_that_cannot_be_had_is_no_failed_call(target, modules, said):
    for _ in range(2):
        with Worker(target, modules) as worker, pytest.raises(StartError, match=said):
            worker.call(1, 5)


def test_the_process_sees_no_key_loads_no_torch_and_is_of_its_own_group(monkeypatch):
    monkeypatch.setenv("SENTINEL_API_KEY", "secret")
    with Worker(f"{TARGETS}:surroundings") as worker:
        seen = worker.call(None, 5)
    assert "SENTINEL_API_KEY" not in seen["keys"]
    assert "PATH" in seen["keys"]
    assert "torch" not in seen["modules"]
    assert seen["group"] == seen["pid"] != os.getpgid(0)


def test_what_it_prints_is_no_reply():
    with Worker(f"{TARGETS}:print_much") as worker:
        assert [worker.call(None, 5) for _ in range(3)] == ["true"] * 3


def test_an_interrupt_leaves_no_late_reply(worker, monkeypatch):
    with pytest.raises(WorkerError):
        worker.call("start", 5)
    monkeypatch.setattr(killable, "_line", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        worker.call("late", 5)
    monkeypatch.undo()
    with pytest.raises(WorkerError, match="no such thing: now"):
        worker.call("now", 5)


PARENT = """
import os, sys
{first}
from iclperm.base.worker import Worker
worker = Worker("killable_targets:surroundings")
print(worker.call(None, 5)["pid"], flush=True)
{then}
"""


def run_parent(then, *, first="", end=None):
    """A script that starts a process and then does this; its return code, and whether the process outlives it."""
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", PARENT.format(first=first, then=then)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    pid = int(parent.stdout.readline())
    if end is not None:
        assert is_running(pid)
        parent.send_signal(end)
    parent.wait(60)
    parent.stdout.close()
    for _ in range(300):
        if not is_running(pid):
            return parent.returncode
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the process outlives its parent")


@pytest.mark.parametrize("then", ["", "os._exit(5)", "raise SystemExit(5)"])
def test_it_ends_with_its_parent(then):
    assert run_parent(then) == (5 if "5" in then else 0)


def test_it_ends_with_a_parent_that_is_killed():
    assert run_parent("import time; time.sleep(1000)", end=signal.SIGKILL) == -signal.SIGKILL


def test_ctrl_c_is_for_the_parent():
    with Worker(f"{TARGETS}:surroundings") as worker:
        pid = worker.call(None, 5)["pid"]
        os.kill(pid, signal.SIGINT)
        assert worker.call(None, 5)["pid"] == pid


def test_it_works_without_standard_input():
    assert run_parent("", first="os.close(0)") == 0


def test_the_module_is_plain_json_over_pipes():
    source = Path(sys.modules["iclperm.base.worker"].__file__)
    script = "import os, sys; os.execv(sys.executable, [sys.executable, '-P', sys.argv[1], 'math:sqrt', str(1 << 30)])"
    done = subprocess.run(
        [sys.executable, "-c", script, str(source)],
        input=b'{"payload": 4, "seconds": 5}\n', capture_output=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{}, {"result": 2.0}]
