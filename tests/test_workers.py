"""Workers: what they answer is what one process answers, byte for byte, whoever is killed on the way."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_killable import is_running
from tiny import byte_level_tokenizer, greedy_tokenizer, make_model, make_task

import iclperm
from iclperm import Study
from iclperm.errors import ConfigError, ModelError, RunError, RunStopped
from iclperm.runs.answering import Answering, Asked, ModelUse
from iclperm.runs.execute import run_one
from iclperm.runs.layout import lay_out
from iclperm.runs.limits import WorkLimits
from iclperm.runs.setting import ResolvedStudy
from iclperm.workers import member as members
from iclperm.workers import messages
from iclperm.workers.driver import PoolOf
from iclperm.workers.environment import worker_environment
from iclperm.workers.local import core_groups, places
from iclperm.workers.messages import Pipe, packed, unpacked
from iclperm.workers.pool import Pool
from iclperm.workers.shares import Shares

LIMITS = WorkLimits(unit_tokens=(60, 60), general_cells=5, generated_cells=2)
"""Cuts the tiny study into many parts."""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module", name="folder")
def made_folder(tmp_path_factory):
    """A tiny model, a task, and the same run by one process."""
    path = tmp_path_factory.mktemp("workers")
    make_model(path / "model", byte_level_tokenizer())
    make_task(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        iclperm.run(study_in(path), path / "alone", limits=LIMITS)
    return path


def study_in(path, **changes):
    choices = {"sets": 2, "permutations": 3, "shots": [0, 1, 3], "queries": 6, "seed": 1} | changes
    return Study(model=str(path / "model"), task=str(path / "colours.yaml"), **choices)


def files(run):
    """The files of all parts: their names hold the digests of their bytes."""
    return sorted(path.name for path in (run / "items").iterdir())


def pids(run):
    """The workers that the records of a run name."""
    records = [json.loads(path.read_text()) for path in (run / "environment").glob("*.json")]
    return {worker["pid"] for record in records for worker in record.get("workers", ())}


class TestShares:
    def test_each_worker_has_a_stretch_of_its_own(self):
        shares = Shares(range(8))
        assert [shares.next("a"), shares.next("b"), shares.next("a"), shares.next("b")] == [0, 4, 1, 5]
        assert shares.next("c") == 3  # the rear half of the longest that waits
        assert not shares.is_done

    def test_what_a_lost_worker_had_is_done_again(self):
        shares = Shares(range(3))
        assert (shares.next("a"), shares.next("b")) == (0, 2)
        assert shares.lost("a") == [0]
        assert [shares.next("b") for _ in range(2)] == [0, 1]

    def test_the_last_parts_are_done_twice_and_the_first_answer_counts(self):
        shares = Shares([0])
        assert (shares.next("slow"), shares.next("fast"), shares.next("third")) == (0, 0, None)
        assert shares.lost("third") == []
        assert shares.answered(0)
        assert not shares.answered(0)
        assert shares.is_done

    def test_a_part_of_another_process_is_dropped(self):
        shares = Shares([0, 1])
        shares.drop(shares.next("a"))
        assert shares.answered(shares.next("a"))
        assert shares.is_done

    @given(st.integers(0, 12), st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
    def test_every_part_is_answered_once_whoever_is_lost(self, count, events):
        shares, busy, answered = Shares(range(count)), {}, []

        def step(worker, is_lost):
            if worker not in busy:
                if (part := shares.next(worker)) is not None:
                    busy[worker] = part
            elif is_lost:
                shares.lost(worker)
                del busy[worker]
            elif shares.answered(part := busy.pop(worker)):
                answered.append(part)

        for event in events:
            step(*event)
        for _ in range(4 * count + 8):
            for worker in "abc":
                step(worker, False)
        assert sorted(answered) == list(range(count))
        assert shares.is_done


class TestMessages:
    def test_a_plan_is_cut_alike_on_the_other_side(self, folder):
        work = lay_out(ResolvedStudy.of(study_in(folder), limits=LIMITS))
        (product,) = work.products
        there = messages.plan_from(*unpacked(messages.plan_message(work, product)))
        assert there.num_units == product.plan.num_units > 5
        for unit in range(there.num_units):
            np.testing.assert_array_equal(there.unit_contexts(unit), product.plan.unit_contexts(unit))
            np.testing.assert_array_equal(there.unit_queries(unit), product.plan.unit_queries(unit))
            for ours, theirs in zip(product.plan.packs(unit), there.packs(unit), strict=True):
                np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)

    def test_prompts_outside_a_plan_cross_as_they_are(self):
        prompts = [np.array(ids, np.int32) for ids in ([1, 2, 3], [4])]
        continuations = [[np.array([5], np.int32), np.array([6, 7], np.int32)], [np.array([8], np.int32)] * 2]
        there = messages.part_from(*unpacked(messages.part_message(Asked(7, None, range(0), prompts, continuations))))
        assert (there.part, there.plan, there.units) == (7, None, range(0))
        assert [ids.tolist() for ids in there.prompts] == [[1, 2, 3], [4]]
        assert [[ids.tolist() for ids in each] for each in there.continuations] == [[[5], [6, 7]], [[8], [8]]]

    def test_a_pipe_that_breaks_within_a_message_says_that_it_is_over(self):
        ours, theirs = socket.socketpair()
        Pipe(theirs).send(b"whole")
        theirs.sendall(b"\0" * 7 + b"\5" + b"cut")
        theirs.close()
        assert Pipe(ours).receive() == b"whole"
        assert Pipe(ours).receive() is None
        ours.close()


def test_a_worker_sees_no_keys(monkeypatch):
    for name in ("OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PYTHON_KEYRING_PASSWORD", "ANYTHING"):
        monkeypatch.setenv(name, "secret")
    seen = worker_environment({"OMP_NUM_THREADS": "3"})
    assert "secret" not in seen.values()
    assert (seen["PATH"], seen["OMP_NUM_THREADS"]) == (os.environ["PATH"], "3")


@pytest.mark.parametrize(
    ("cores", "count", "threads", "groups", "each"),
    [
        (range(8), 2, None, [[0, 1, 2, 3], [4, 5, 6, 7]], "4"),
        (range(8), 3, None, [[0, 1], [2, 3], [4, 5]], "2"),
        (range(8), 4, "1", [[0, 1], [2, 3], [4, 5], [6, 7]], "1"),
        (range(2), 4, None, [[], [], [], []], "1"),
        (range(2), 2, "2", [[], []], "2"),
    ],
)
def test_cores_are_dealt_out_as_far_as_they_suffice(cores, count, threads, groups, each):
    found = core_groups(cores, count, threads)
    assert [list(place.cores) for place in found] == groups
    assert {place.variables["OMP_NUM_THREADS"] for place in found} == {each}


@pytest.mark.parametrize(
    ("count", "changes", "words"),
    [
        (0, {}, "workers is 0; give a whole number from 1 on"),
        (2, {"device": "balanced"}, "device is 'balanced', and workers have a device each; give auto, cpu or cuda"),
        (2, {"memory_budget": "50%"}, "memory_budget is 0.5, a share of what is free"),
    ],
)
def test_what_workers_cannot_have_is_refused(folder, count, changes, words):
    with pytest.raises(ConfigError, match=words):
        places(count, study_in(folder, **changes))


def test_a_gpu_each(folder, monkeypatch):
    monkeypatch.setattr("iclperm.engine.load.gpus", lambda: ["4", "6"])
    found = [place.variables["CUDA_VISIBLE_DEVICES"] for place in places(2, study_in(folder))]
    assert found == ["4", "6"]
    with pytest.raises(ConfigError, match="workers is 3, but there are 2 GPUs; give one a GPU at most"):
        places(3, study_in(folder))


def test_more_workers_than_cores_are_told(folder, monkeypatch):
    monkeypatch.setattr("iclperm.engine.load.gpus", list)
    cores = len(os.sched_getaffinity(0))
    with pytest.warns(UserWarning, match=f"^{cores + 1} workers share {cores} cores, .*; {cores} are as fast"):
        assert len(places(cores + 1, study_in(folder))) == cores + 1


def test_an_api_has_no_workers(folder):
    study = Study(
        endpoint={"base_url": "http://127.0.0.1:9/v1"}, model="m", task=str(folder / "colours.yaml"), scoring="generate"
    )
    with pytest.raises(ConfigError, match="a model behind an API has no workers"):
        iclperm.run(study, workers=2)


class Told:
    """A link to a worker that is a thread here; ``script`` says what it does with a message, by what it returns."""

    def __init__(self, script):
        self._script = script
        self._inbox = queue.SimpleQueue()
        self.parts = []

    def send(self, message):
        for said in self._script(self, *unpacked(message)):
            self._inbox.put(said)

    def receive(self):
        return self._inbox.get()

    def why(self):
        return "it was told to"

    def close(self):
        self._inbox.put(None)


class Recorded:
    """Workers that answer from what the model said before, and differ as each test wants."""

    def __init__(self, folder):
        work = lay_out(ResolvedStudy.of(study_in(folder), limits=LIMITS))
        answering = Answering(ModelUse.of(work.setting), [product.plan for product in work.products])
        self.answers = dict(answering.answers(Asked.of(work, part) for part in range(len(work.parts))))
        self.numerics = answering.numerics

    def __call__(self, *, answers=True, pause=0.0, changes=None, numerics=None, dies_at=None, fails=None):
        def script(link, head, _table):
            if head["is"] == "load":
                link.run = {"run": head["run"]}
                about = {**members.surroundings(), "numerics": {**self.numerics, **(numerics or {})}, "digests": None}
                yield packed({"is": "ready", **link.run, **about, **(changes or {})})
            if head["is"] == "part" and fails:
                yield packed({"is": "failed", **link.run, **fails})
            elif head["is"] == "part":
                link.parts.append(head["part"])
                time.sleep(pause)
                if dies_at is not None and len(link.parts) > dies_at:
                    yield None
                elif answers:
                    about = {"part": head["part"], "tokens": 1}
                    yield packed({"is": "answer", **link.run, **about}, self.answers[head["part"]])

        return Told(script)

    def run(self, folder, out, *links, is_mixed=False):
        """Runs the study by these workers; those that are started later are the last one again, made anew."""
        left = list(links)

        def start(_number):
            return (left.pop(0) if len(left) > 1 else left[0])()

        with closing(PoolOf(lambda _: len(links), lambda count: Pool(count, start), is_mixed=is_mixed)) as local:
            return run_one(study_in(folder), out, False, is_mixed, None, LIMITS, local=local)


@pytest.fixture(scope="module")
def recorded(folder):
    return Recorded(folder)


class TestPool:
    def test_answers_are_committed_as_those_of_one_process(self, folder, recorded, tmp_path):
        recorded.run(folder, tmp_path / "run", recorded, recorded, recorded)
        assert files(tmp_path / "run") == files(folder / "alone")

    def test_a_worker_that_never_answers_holds_nobody(self, folder, recorded, tmp_path):
        recorded.run(folder, tmp_path / "run", lambda: recorded(answers=False), recorded)
        assert files(tmp_path / "run") == files(folder / "alone")

    def test_lost_workers_are_replaced_and_their_parts_done_again(self, folder, recorded, tmp_path):
        recorded.run(folder, tmp_path / "run", lambda: recorded(dies_at=2), lambda: recorded(dies_at=3))
        assert files(tmp_path / "run") == files(folder / "alone")

    def test_workers_that_are_lost_again_and_again_stop_the_run(self, folder, recorded, tmp_path):
        words = r"4 workers were lost with no part finished between, the last of them worker 0.*: it was told to; run"
        with pytest.raises(RunStopped, match=words):
            recorded.run(folder, tmp_path / "run", lambda: recorded(dies_at=0))

    def test_a_worker_that_cannot_be_started_is_named(self, folder, recorded):
        def start():
            raise OSError("no such program")

        with pytest.raises(RunStopped, match="worker 0: it cannot be started: no such program"):
            recorded.run(folder, None, start)

    @pytest.mark.parametrize(
        ("difference", "words"),
        [
            ({"numerics": {"threads": 7}}, r"worker \d \(.*, process \d+\) is refused: its threads is"),
            ({"changes": {"version": "0.0.1"}}, "is refused: it has iclperm 0.0.1, and this is"),
            ({"changes": {"digests": ["other", None]}}, "is refused: the files of the model are others there"),
        ],
    )
    def test_a_worker_that_differs_is_refused_by_name(self, folder, recorded, tmp_path, difference, words):
        def slowly():
            return recorded(pause=0.1)

        def late():
            time.sleep(0.3)  # whoever is first says what is right
            return recorded(**difference)

        with pytest.warns(UserWarning, match=words):
            recorded.run(folder, tmp_path / "run", slowly, late)
        assert files(tmp_path / "run") == files(folder / "alone")

    def test_the_parts_of_a_run_say_which_workers_may_continue_it(self, folder, recorded, tmp_path):
        recorded.run(folder, tmp_path / "run", recorded)
        lost = sorted((tmp_path / "run/items").iterdir())[1]
        lost.unlink()

        def late():
            time.sleep(0.3)
            return recorded()

        with pytest.warns(UserWarning, match=r"worker 0 .* is refused: its threads is 7, that of the run \d"):
            recorded.run(folder, tmp_path / "run", lambda: recorded(numerics={"threads": 7}), late)
        assert lost.exists()
        assert files(tmp_path / "run") == files(folder / "alone")

    def test_what_parts_of_an_older_version_do_not_name_the_first_worker_says(self, folder, recorded, tmp_path):
        older = {key: value for key, value in recorded.numerics.items() if key != "probe"}
        recorded.run(folder, tmp_path / "run", lambda: recorded(changes={"numerics": older}))
        for lost in sorted((tmp_path / "run/items").iterdir())[1:]:
            lost.unlink()

        def late():
            time.sleep(0.3)
            return recorded(numerics={"probe": "others"})

        with pytest.warns(UserWarning, match=r"worker 1 .* is refused: its probe is others, that of the run [0-9a-f]+"):
            recorded.run(folder, tmp_path / "run", lambda: recorded(pause=0.1), late)
        assert iclperm.open_run(tmp_path / "run").report.num_numerics == 2

    def test_a_worker_that_differs_is_welcome_to_a_mixed_run(self, folder, recorded, tmp_path):
        run = recorded.run(folder, tmp_path / "run", recorded, lambda: recorded(numerics={"threads": 7}), is_mixed=True)
        assert run.report.num_parts == len(recorded.answers)

    def test_alone_a_worker_that_differs_ends_the_run(self, folder, recorded):
        with pytest.raises(RunError, match=r"worker 0 .* is refused: it has iclperm 9"):
            recorded.run(folder, None, lambda: recorded(changes={"version": "9"}))

    @pytest.mark.parametrize(
        ("error", "kind", "words"),
        [
            ("ModelError", ModelError, r"worker 0 \(.*\): no weights"),
            ("MemoryError", RunStopped, "out of memory; .* bytes are foretold"),
            ("RuntimeError", RunError, "worker 0 .*: no weights"),
        ],
    )
    def test_what_a_worker_raises_is_raised(self, folder, recorded, error, kind, words):
        with pytest.raises(kind, match=words):
            recorded.run(folder, None, lambda: recorded(fails={"error": error, "words": "no weights"}))

    def test_a_pool_goes_from_run_to_run_past_what_fails(self, folder, recorded, tmp_path):
        made = []

        def start(number):
            made.append(number)
            return recorded(
                fails={"error": "ModelError", "words": "no weights"} if len(made) == 1 else None, pause=0.01
            )

        with closing(PoolOf(lambda _: 2, lambda count: Pool(count, start), is_mixed=False)) as local:
            with pytest.raises(ModelError, match="no weights"):
                run_one(study_in(folder), tmp_path / "failed", False, False, None, LIMITS, local=local)
            for name in ("first", "second"):  # the other worker is in the middle of a part of the run before
                run_one(study_in(folder), tmp_path / name, False, False, None, LIMITS, local=local)
                assert files(tmp_path / name) == files(folder / "alone")
        assert sorted(made) in ([0, 0, 1], [0, 1, 1])

    def test_two_drivers_share_a_folder(self, folder, recorded, tmp_path):
        other = threading.Thread(target=recorded.run, args=(folder, tmp_path / "run", recorded))
        other.start()
        recorded.run(folder, tmp_path / "run", recorded, recorded)
        other.join()
        assert files(tmp_path / "run") == files(folder / "alone")


def test_a_member_answers_in_a_thread_as_in_a_process(folder, recorded):
    work = lay_out(ResolvedStudy.of(study_in(folder), limits=LIMITS))
    ours, theirs = map(Pipe, socket.socketpair())
    inbox = queue.SimpleQueue()
    use = ModelUse.of(work.setting).__dict__
    inbox.put(packed({"is": "load", "run": 1, "use": use, "num_plans": 1, "wants_digest": True}))
    inbox.put(messages.plan_message(work, work.products[0]))
    inbox.put(messages.part_message(Asked.of(work, 2)))
    inbox.put(b"\0" * 8)  # no message at all: ends the thread

    def answer():
        with pytest.raises(json.JSONDecodeError):
            members._answer(theirs, inbox)

    thread = threading.Thread(target=answer)
    thread.start()
    ready, _ = unpacked(ours.receive())
    assert ready["digests"] == [work.setting.identity["hashes"]["model"], None]
    assert ready["numerics"] == recorded.numerics
    answer, table = unpacked(ours.receive())
    assert (answer["is"], answer["part"]) == ("answer", 2)
    assert table.equals(recorded.answers[2])
    thread.join()
    ours.close()
    theirs.close()


class TestProcesses:
    def test_runs_that_follow_each_other_have_the_same_processes(self, tmp_path):
        make_model(tmp_path / "model", byte_level_tokenizer())
        make_task(tmp_path, data={"train": "train.jsonl", "test": "test.jsonl", "dev": 0.3})
        study = study_in(tmp_path, kind="selection", shots=3, select=2, dev_queries=4)
        chosen = iclperm.run(study, tmp_path / "run", limits=LIMITS, workers=1)
        there = [pids(run.folder) for run in chosen.runs.values()]
        assert len(there) > 1
        assert len(set.union(*there)) == 1
        assert iclperm.run(study, tmp_path / "alone", limits=LIMITS).digest == chosen.digest

    @pytest.mark.filterwarnings("ignore:4 workers share")  # there may be fewer cores
    @pytest.mark.parametrize("count", [1, 2, 4])
    def test_parts_are_those_of_one_process_byte_for_byte(self, folder, tmp_path, count):
        run = iclperm.run(study_in(folder), tmp_path / "run", limits=LIMITS, workers=count)
        assert files(tmp_path / "run") == files(folder / "alone")
        (session,) = iclperm.status(tmp_path / "run").sessions
        assert {worker.pid for worker in session.workers} == pids(tmp_path / "run") != set()
        assert sum(worker.num_parts for worker in session.workers) == len(files(tmp_path / "run"))
        assert run.report.tokens_forwarded > 0
        assert not any(map(is_running, pids(tmp_path / "run")))

    def test_prompts_outside_products_and_generated_texts_too(self, tmp_path):
        make_model(tmp_path / "model", greedy_tokenizer())
        make_task(tmp_path, separator="")
        for name, changes in {"scored": {}, "generated": {"scoring": "generate", "max_new_tokens": 4}}.items():
            study = study_in(tmp_path, **changes)
            assert lay_out(ResolvedStudy.of(study, limits=LIMITS)).general_cells.size
            iclperm.run(study, tmp_path / name, limits=LIMITS)
            iclperm.run(study, tmp_path / f"{name} by two", limits=LIMITS, workers=2)
            assert files(tmp_path / f"{name} by two") == files(tmp_path / name)

    def test_killed_workers_change_nothing(self, folder, tmp_path):
        killed = []

        def kill(done, _total):
            if done in (2, 5) and (there := [pid for pid in pids(tmp_path / "run") if is_running(pid)]):
                os.kill(there[0], signal.SIGKILL)
                killed.append(there[0])

        iclperm.run(study_in(folder), tmp_path / "run", limits=LIMITS, workers=2, progress=kill)
        assert killed
        assert files(tmp_path / "run") == files(folder / "alone")

    def test_a_killed_driver_takes_its_workers_along_and_may_be_continued(self, folder, tmp_path):
        run = tmp_path / "run"
        process = subprocess.Popen([sys.executable, "-c", DRIVER, str(folder), str(run)], cwd=Path(__file__).parent)
        assert process.wait(timeout=200) == -signal.SIGKILL
        assert pids(run)
        deadline = time.monotonic() + 60
        while any(map(is_running, pids(run))):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert 0 < len(files(run)) < len(files(folder / "alone"))
        iclperm.run(study_in(folder), run, limits=LIMITS, workers=2)
        assert files(run) == files(folder / "alone")


DRIVER = """
import os, signal, sys
from pathlib import Path
import iclperm
from test_workers import LIMITS, study_in

def kill(done, _total):
    if done >= 3:
        os.kill(os.getpid(), signal.SIGKILL)

iclperm.run(study_in(Path(sys.argv[1])), sys.argv[2], limits=LIMITS, workers=2, progress=kill)
"""
