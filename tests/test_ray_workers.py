"""Workers of a Ray cluster: a real one of two nodes on this machine, killed in parts."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayActorError
from test_grids import digests, world  # noqa: F401  (the latter is a fixture)
from test_killable import is_running
from test_workers import files, made_folder, one_thread, pids, study_in  # noqa: F401  (two are fixtures)

import iclperm
from iclperm import Study
from iclperm.errors import ConfigError
from iclperm.workers import cluster as clusters
from iclperm.workers.cluster import actors

CLUSTER = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
node = cluster.add_node(num_cpus=2)
print(cluster.address, flush=True)
for line in sys.stdin:
    if line == "kill\\n":
        cluster.remove_node(node, allow_graceful=False)
    else:
        node = cluster.add_node(num_cpus=2)
    print("done", flush=True)
cluster.shutdown()
"""
DRIVER = """
import sys
from pathlib import Path
import iclperm
from test_grids import digests, world  # noqa: F401  (the latter is a fixture)
from test_killable import is_running
from test_workers import LIMITS, study_in

def progress(done, _total):
    if done == pause:
        print("paused", flush=True)
        sys.stdin.readline()

folder, run, address, count, pause = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
iclperm.run(study_in(folder), run, limits=LIMITS, workers=count, ray=address, progress=progress)
"""
QUIET = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore"}


class Cluster:
    """Two nodes in processes of their own: the head, which has no cores, and one of two cores."""

    def __init__(self, process):
        self._process = process
        self.address = process.stdout.readline().strip()

    def order(self, what):
        """``kill`` the second node, or ``add`` another."""
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"


@contextmanager
def talking(script, *arguments):
    """A process of Python that is spoken with in lines, within; its standard input is closed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
        env={**os.environ, **QUIET, "OMP_NUM_THREADS": "1"},
    )
    with process:
        yield process


@pytest.fixture(scope="module")
def cluster():
    with talking(CLUSTER) as process:
        yield Cluster(process)


def wait_for_the_end_of(processes):
    deadline = time.monotonic() + 120
    while any(map(is_running, processes)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def driver(folder, run, cluster, count=2, pause=-1):
    return talking(DRIVER, folder, run, cluster.address, count, pause)


@pytest.mark.timeout(600)
class TestTwoNodes:
    def test_parts_are_those_of_one_process_byte_for_byte(self, folder, tmp_path, cluster):
        with driver(folder, tmp_path / "run", cluster, 4) as process:  # one and two: in the tests below
            process.communicate()
        assert process.returncode == 0
        assert files(tmp_path / "run") == files(folder / "alone")
        assert pids(tmp_path / "run")

    def test_a_killed_worker_changes_nothing(self, folder, tmp_path, cluster):
        with driver(folder, tmp_path / "run", cluster, pause=3) as process:
            assert process.stdout.readline() == "paused\n"
            for pid in pids(tmp_path / "run"):
                os.kill(pid, signal.SIGKILL)
            process.communicate("\n")
        assert process.returncode == 0
        assert files(tmp_path / "run") == files(folder / "alone")

    def test_a_killed_driver_is_continued_by_another(self, folder, tmp_path, cluster):
        with driver(folder, tmp_path / "run", cluster, pause=3) as process:
            assert process.stdout.readline() == "paused\n"
            process.kill()
        wait_for_the_end_of(pids(tmp_path / "run"))
        assert len(files(tmp_path / "run")) == 3
        with driver(folder, tmp_path / "run", cluster) as process:
            process.communicate()
        assert files(tmp_path / "run") == files(folder / "alone")

    def test_a_killed_node_is_replaced_by_one_that_joins_late(self, folder, tmp_path, cluster):
        with driver(folder, tmp_path / "run", cluster, 1, pause=3) as process:  # with two the other could do the rest
            assert process.stdout.readline() == "paused\n"
            before = pids(tmp_path / "run")
            cluster.order("kill")
            wait_for_the_end_of(before)  # a worker outlives its raylet for a moment, and could finish the run in it
            process.stdin.write("\n")
            process.stdin.flush()
            cluster.order("add")
            process.communicate()
        assert process.returncode == 0
        assert files(tmp_path / "run") == files(folder / "alone")
        assert pids(tmp_path / "run") - before


GRID_DRIVER = """
import sys
import iclperm

choices = {"workers": 2, "ray": sys.argv[3]} if len(sys.argv) > 3 else {}
iclperm.run_grid(iclperm.Grid.from_file(sys.argv[1]), sys.argv[2], **choices)
"""


@pytest.mark.timeout(900)
def test_a_grid_that_is_killed_is_that_of_one_process(world, tmp_path, cluster):  # noqa: F811
    grid, run, random = world / "grid.yaml", tmp_path / "run", Random(time.time_ns())
    with talking(GRID_DRIVER, grid, tmp_path / "alone") as process:
        process.communicate()
    begun = random.randrange(6)  # cells that have a part when it is killed
    with talking(GRID_DRIVER, grid, run, cluster.address) as process:
        while len([*run.glob("cells/*/items/*.parquet")]) <= begun:
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    with talking(GRID_DRIVER, grid, run, cluster.address) as process:
        process.communicate()
    assert process.returncode == 0
    assert len(digests(run)) == 8
    assert digests(run) == digests(tmp_path / "alone")
    records = [json.loads(path.read_text()) for path in run.glob("cells/*/environment/*.json")]
    named = {worker["name"] for record in records for worker in record.get("workers", ())}
    assert named
    assert named <= {"worker 0", "worker 1"}  # one may have done all that was left


def node(cpus, gpus=0, alive=True):
    return {"Alive": alive, "Resources": {"CPU": cpus, **({"GPU": gpus} if gpus else {})}}


@pytest.mark.parametrize(
    ("nodes", "count", "threads", "has_gpus", "wanted"),
    [
        ([node(8), node(8)], None, None, False, (2, 8)),
        ([node(8), node(8), node(8, alive=False)], 4, None, False, (4, 4)),
        ([node(8), node(4)], 3, None, False, (3, 4)),
        ([node(1)], 4, None, False, (4, 1)),
        ([node(8)], 2, "3", False, (2, 3)),
        ([node(0), node(16, 4), node(16, 4)], None, None, True, (8, 4)),
    ],
)
def test_actors_fill_the_cluster(nodes, count, threads, has_gpus, wanted):
    assert actors(nodes, count, threads, has_gpus=has_gpus) == wanted


def test_actors_are_one_at_least():
    with pytest.raises(ConfigError, match="workers is 0; give a whole number from 1 on"):
        actors([node(1)], 0, None, has_gpus=False)


def test_a_link_whose_machine_is_gone_says_so(monkeypatch):
    class Gone:
        def __getattr__(self, name):
            return self

        def remote(self, *_):
            raise RayActorError(error_msg="it died\n\nModuleNotFoundError: No module named 'iclperm'\n")

    monkeypatch.setattr(ray, "remote", lambda **_: lambda _: type("", (), {"remote": lambda *_: Gone()}))
    link = clusters.RayLink(1, 0)
    assert link.receive() is None
    assert link.why() == (
        "its actor is gone (RayActorError: ModuleNotFoundError: No module named 'iclperm'); iclperm, of one version, "
        "must be installed on every node"
    )
    monkeypatch.setattr(ray, "kill", Gone().remote)
    link.close()


def test_where_nobody_listens_it_is_said_at_once(folder):
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"nobody answers at '127.0.0.1:9' .*; give the address that `ray start"):
        iclperm.run(study_in(folder), ray="127.0.0.1:9")
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("device", "resources", "num_gpus"),
    [("auto", {}, 0), ("auto", {"GPU": 1}, 1), ("cuda", {}, 1), ("cpu", {"GPU": 1}, 0)],
)
def test_a_gpu_is_asked_for_where_one_is_or_is_wanted(monkeypatch, device, resources, num_gpus):
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: resources)
    monkeypatch.setattr(ray, "nodes", list)
    work = SimpleNamespace(setting=SimpleNamespace(study=Study(model="m", task="t", device=device)))
    assert clusters.RayPools(3, "auto", is_mixed=False)._room(work).num_gpus == num_gpus


def test_without_a_cluster_a_run_is_refused(folder, monkeypatch):
    def init(*_, **__):
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConfigError, match="there is no Ray cluster at 'auto'"):
        iclperm.run(study_in(folder), ray=True)
