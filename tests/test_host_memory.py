"""A study's host memory: log-likelihoods are read part by part, and nothing but who asks for the tensor holds it."""

import importlib
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import iclperm
from iclperm import Study
from iclperm.errors import DamagedItem, RunError
from iclperm.runs import audit
from iclperm.runs.finish import open_one
from iclperm.runs.limits import WorkLimits
from iclperm.runs.parts import PartFiles
from iclperm.studies.report import Run

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SIZES = {"sets": 60, "permutations": 2, "shots": 2, "queries": 1000}
LABELS = [f"{word} {thing}" for word in ("deep", "low", "near", "old") for thing in ("art", "law", "sea", "sky", "war")]
SHAPE = (60, 2, 2, 1000, len(LABELS))
TENSOR_BYTES = 4 * int(np.prod(SHAPE))
MOST = TENSOR_BYTES * 2 // 5  # the last number of shots alone is half of the tensor


@pytest.fixture(scope="module")
def benchmark():
    """The benchmark's study and its engine that answers at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        module = importlib.import_module("host_memory")
        patch.setattr(iclperm.Engine, "from_pretrained", lambda *_, **__: module.KeyedAnswers())
        yield module


@pytest.fixture(scope="module")
def imported(benchmark, tmp_path_factory):
    """What is imported and cached on first use is there."""
    folder = tmp_path_factory.mktemp("small")
    sizes = {"sets": 2, "permutations": 2, "shots": 2, "queries": 20}
    run = iclperm.run(Study.from_file(benchmark.make_study(folder, sizes)), folder / "run")
    assert audit.verify(folder / "run").digest == run.digest
    run.report_content()
    run.export(folder / "all.parquet")


@pytest.fixture(scope="module")
def study(benchmark, tmp_path_factory):
    """A study of which the tensor of log-likelihoods is 19 MB, in some 60 parts."""
    return Study.from_file(benchmark.make_study(tmp_path_factory.mktemp("study"), SIZES, LABELS))


@pytest.fixture(scope="module")
def finished(study, tmp_path_factory):
    run = iclperm.run(study, tmp_path_factory.mktemp("finished") / "run")
    assert run.report.num_parts > 30
    return run


SMALL_PIECES = WorkLimits(bytes_at_once=TENSOR_BYTES // 16, table_rows=4096)
"""What is read at once is as small beside this tensor as it is beside a large one."""


def opened(folder, limits=SMALL_PIECES):
    return Run.of(open_one(folder, limits=limits))


class Peak:
    """The most bytes that Python, NumPy and Arrow hold within the context, beyond what they held where it began, at
    once or where ``begin`` is called."""

    def __init__(self, *, at_once=True):
        self._at_once = at_once

    def __enter__(self):
        self._before = pa.default_memory_pool()
        self._arrow = pa.system_memory_pool()  # used nowhere else; its own peak is that of all contexts so far
        pa.set_memory_pool(self._arrow)
        if self._at_once:
            self.begin()
        return self

    def begin(self):
        tracemalloc.start()

    def __exit__(self, *_):
        self.num_bytes = tracemalloc.get_traced_memory()[1] + self._arrow.max_memory()
        tracemalloc.stop()
        pa.set_memory_pool(self._before)


def is_small(measured):
    """Whether a phase holds little. It may repeat itself once: the interpreter's own tables grow at some moment."""
    return any(measured() < MOST for _ in range(2))


def peak_of_computing(study, folder):
    """That of a run from the moment where it is planned."""
    with Peak(at_once=False) as peak:
        told = []

        def progress(done, _total):
            if not told:  # the plan is made, no part is computed yet
                peak.begin()
            told.append(done)

        run = iclperm.run(study, folder, progress=progress, limits=SMALL_PIECES)
    assert told == list(range(run.report.num_parts + 1))
    assert run.report.num_parts_resumed == 0
    return peak.num_bytes


@pytest.mark.usefixtures("imported")
def test_a_run_holds_no_log_likelihoods_while_it_computes(study, tmp_path):
    folders = iter([tmp_path / "first", tmp_path / "second"])
    assert is_small(lambda: peak_of_computing(study, next(folders)))


PHASES = {
    "open": lambda folder, _out: opened(folder),
    "verify": lambda folder, _out: audit.verify(folder, SMALL_PIECES).digest,
    "report": lambda folder, _out: opened(folder).report_content(),
    "export": lambda folder, out: opened(folder).export(out),
}


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("phase", PHASES)
def test_no_phase_holds_the_tensor(finished, tmp_path, phase):
    def measured():
        with Peak() as peak:
            result = PHASES[phase](finished.folder, tmp_path / "all.parquet")
        assert result is not None
        return peak.num_bytes

    assert is_small(measured)


def test_who_asks_for_the_tensor_gets_it_whole(benchmark, study, finished):
    with Peak() as peak:
        tensor = finished.label_logprob
    assert tensor.shape == SHAPE
    assert peak.num_bytes > TENSOR_BYTES  # which also shows that this measure sees it
    assert not np.isnan(tensor).any()
    in_memory = iclperm.run(study)
    np.testing.assert_array_equal(tensor, in_memory.label_logprob)
    np.testing.assert_array_equal(finished.correct, tensor.argmax(axis=-1) == finished.gold)
    assert finished.digest == in_memory.digest


def test_results_do_not_depend_on_how_much_is_read_at_once(finished):
    whole = iclperm.open_run(finished.folder)
    content, table = whole.report_content(), whole.to_arrow()
    for num_bytes in (200_000, 1 << 40):
        again = opened(finished.folder, WorkLimits(bytes_at_once=num_bytes))
        assert again.digest == whole.digest
        assert again.report_content() == content
        assert again.to_arrow().equals(table)


def test_what_fits_at_once_is_read_once(finished, monkeypatch):
    digest = finished.digest  # which reads, too
    read, parts = PartFiles.read_again, []
    monkeypatch.setattr(
        PartFiles, "read_again", lambda files, some, columns: parts.extend(some) or read(files, some, columns)
    )
    run = iclperm.open_run(finished.folder)
    assert parts == []
    assert run.digest == digest
    assert sorted(parts) == list(range(run.report.num_parts))
    run.summary()
    run.report_content()  # takes the summary that is there
    assert len(parts) <= 2 * run.report.num_parts


def test_files_that_are_damaged_or_gone_after_opening_are_told(finished, tmp_path):
    folder = shutil.copytree(finished.folder, tmp_path / "run")
    run = iclperm.open_run(folder)
    victim = sorted((folder / "items").iterdir())[3]
    raw = victim.read_bytes()
    victim.write_bytes(raw[:-1])
    with pytest.raises(DamagedItem, match=rf"{victim.name} is damaged"):
        _ = run.digest
    victim.unlink()
    with pytest.raises(RunError, match=rf"{victim.name} is gone; run the study again"):
        _ = run.label_logprob
    victim.write_bytes(raw)
    assert run.digest == finished.digest
