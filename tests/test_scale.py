"""Plans at scale, at a ten-thousandth of the whole (benchmarks/scale.py): the same stages, and what bounds them."""

import importlib
import json
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import iclperm
import iclperm.api
from iclperm import Study
from iclperm.errors import DamagedItem
from iclperm.prompts.contexts import RowBeginnings, context_id
from iclperm.runs.execute import run_one
from iclperm.runs.finish import open_one
from iclperm.runs.folder import RunFolder
from iclperm.runs.layout import lay_out
from iclperm.runs.limits import DEFAULT, WorkLimits
from iclperm.runs.parts import PartFiles
from iclperm.runs.read import predictions
from iclperm.runs.setting import ResolvedStudy
from iclperm.studies.report import Run

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SIZES = {"sets": 2, "permutations": 6, "shots": 8, "queries": 40}
MOST_PARTS = 4


@pytest.fixture(scope="module")
def scale():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("scale")


@pytest.fixture(scope="module")
def folder(scale, tmp_path_factory):
    """A study that was planned, told to a worker, run, and resumed after a part was removed."""
    folder = tmp_path_factory.mktemp("scale")
    scale.write_study(folder, SIZES)
    planned = scale.plan(folder)
    assert planned["prompts"] == (1 + 2 * 8 * 6 - num_shared(folder)) * 40
    assert scale.worker(folder)["units"] >= planned["parts"]
    assert scale.fill(folder) == {"parts": planned["parts"], "parts resumed": 0}
    assert scale.resumed(folder)["parts resumed"] == planned["parts"] - -(-planned["parts"] // scale.REMOVED)
    return folder


def num_shared(folder):
    """Cells whose context another one has, too, those of k = 0 left out."""
    contexts = lay_out(ResolvedStudy.of(Study.from_file(folder / "study.yaml"), weights=False)).prompts.context_of
    return contexts[:, :, 1:].size - len(np.unique(contexts[:, :, 1:]))


def test_a_fraction_has_the_shape_of_the_whole(scale):
    assert scale.sizes_of(1) == scale.WHOLE
    assert scale.sizes_of(0.1) == {**scale.WHOLE, "permutations": 100}
    assert scale.sizes_of(1e-3) == {**scale.WHOLE, "permutations": 10, "queries": 100}


def test_bars_that_are_missed_are_named(scale):
    row = {"stage": "opened", "seconds": 6.0, "peak MB": 5_000, "most files": 10_000}
    assert scale.misses([row]) == [
        "opened: 6.0 s, the bar is 5",
        "opened: 5,000 MB, the bar is 4,000",
        "opened: 10,000 files in a folder, the bar is 9,000",
    ]
    assert scale.misses([{**row, "seconds": 4.0, "peak MB": 100, "most files": 10}]) == []


def test_parts_grow_with_the_run_so_that_files_stay_few(scale, folder, tmp_path):
    study = Study.from_file(folder / "study.yaml")
    limits = WorkLimits(parts=MOST_PARTS, unit_tokens=(64, 64))
    work = lay_out(ResolvedStudy.of(study, weights=False, limits=limits))
    assert sum(growth.num_units for growth in work.growths) > 2 * MOST_PARTS
    assert len(work.parts) <= MOST_PARTS + len(work.products)
    run = run_one(study, tmp_path / "run", False, False, None, limits=limits, local=scale.ScoresOfUnits)
    assert len(list((tmp_path / "run/items").iterdir())) == len(work.parts) == run.report.num_parts
    assert run.correct.shape == (2, 6, 9, 40)


def test_a_large_run_is_read_where_its_answers_are_first_asked_for(folder, monkeypatch):
    whole = open_one(folder / "run")
    read, files = PartFiles.read, []
    monkeypatch.setattr(PartFiles, "read", lambda *given: files.append(given[1]) or read(*given))
    monkeypatch.setattr(iclperm.api, "open_one", lambda path, **given: open_one(path, **given, limits=few))
    few = replace(DEFAULT, cells_at_opening=1_000)
    run = iclperm.open_run(folder / "run")
    assert run.study == whole.study
    assert (run.task, run.labels, run.shots, run.folder) == (whole.task, whole.labels, whole.shots, whole.folder)
    assert files == []
    np.testing.assert_array_equal(run.correct, whole.correct)
    assert len(files) == whole.report.num_parts
    assert run.report.num_parts == whole.report.num_parts
    assert len(files) == whole.report.num_parts
    assert run.quick_digest is None
    assert Run.of(whole).quick_digest == run.digest == whole.digest
    with pytest.raises(AttributeError, match="has no 'nothing'"):
        _ = run.nothing


def test_many_files_are_read_by_several_threads(folder, monkeypatch):
    by, read = set(), PartFiles.read
    monkeypatch.setattr(PartFiles, "read", lambda *given: by.add(threading.current_thread().name) or read(*given))
    alone = open_one(folder / "run")
    assert by == {"MainThread"}
    monkeypatch.setattr("iclperm.runs.parts._MANY_FILES", 1)
    monkeypatch.setattr("iclperm.runs.parts.cores", lambda: [0, 1, 2])
    by.clear()
    several = open_one(folder / "run")
    assert several.digest == alone.digest
    assert by
    assert "MainThread" not in by
    run = RunFolder.open(folder / "run")
    parts = run.parts.read_each(run.parts.finished().values())
    next(parts)
    parts.close()  # ends the readers
    assert not [each for each in threading.enumerate() if each.name.startswith("reader")]


def test_damage_to_a_large_run_is_told_where_it_is_read(folder):
    item = min((folder / "run/items").iterdir())
    raw = item.read_bytes()
    item.write_bytes(raw[:-1])
    try:
        run = Run.of(open_one(folder / "run", limits=replace(DEFAULT, cells_at_opening=0), may_wait=True))
        with pytest.raises(DamagedItem, match=f"{item.name} is damaged"):
            _ = run.splits
        with pytest.raises(DamagedItem, match=f"{item.name} is damaged"):
            open_one(folder / "run", limits=replace(DEFAULT, cells_at_opening=0))
    finally:
        item.write_bytes(raw)
    assert run.splits["test"].gold.shape == (40,)


def test_reports_are_those_of_a_run_that_was_read_at_once(folder):
    at_once = Run.of(open_one(folder / "run"))
    later = Run.of(open_one(folder / "run", limits=WorkLimits(bytes_at_once=1_000, cells_at_opening=0), may_wait=True))
    for kind in ("curve", "sensitivity"):
        assert json.dumps(later.report_content(kind)) == json.dumps(at_once.report_content(kind))


def test_files_are_read_a_bounded_number_of_times(folder, monkeypatch):
    run = open_one(folder / "run", limits=WorkLimits(bytes_at_once=1))
    read, parts = PartFiles.read_again, []
    monkeypatch.setattr(PartFiles, "read_again", lambda *given: parts.extend(given[1]) or read(*given))
    assert run.digest == open_one(folder / "run").digest
    assert max(parts.count(part) for part in parts) <= 16 + 1  # and once by the second run


@pytest.mark.parametrize("num_labels", [1, 4, 16, 17])
def test_the_likeliest_label_is_that_of_argmax(num_labels):
    generator = np.random.default_rng(num_labels)
    logprob = generator.integers(0, 4, (500, num_labels)).astype(np.float32)  # many are equal
    scale = generator.integers(1, 3, num_labels).astype(np.float64)
    for scales in (np.ones(num_labels), scale):
        np.testing.assert_array_equal(predictions(logprob, scales), np.argmax(logprob / scales, axis=-1))
    logprob[3, -1] = np.nan
    np.testing.assert_array_equal(predictions(logprob, np.ones(num_labels)), np.argmax(logprob, axis=-1))


def test_beginnings_of_rows_are_what_slices_are():
    rows = [np.arange(5, dtype=np.int32), np.arange(10, 13, dtype=np.int32)]
    found = RowBeginnings(rows, [0, 1, 0], [2, 3, 0])
    assert len(found) == 3
    assert [each.tolist() for each in found] == [[0, 1], [10, 11, 12], []]
    assert found[1].tolist() == [10, 11, 12]


def test_contexts_are_named_by_their_content(folder):
    prompts = lay_out(ResolvedStudy.of(Study.from_file(folder / "study.yaml"), weights=False)).prompts
    assert prompts.context_ids.tolist() == [context_id(ids) for ids in prompts.contexts]
    assert len(set(prompts.context_ids.tolist())) == len(prompts.contexts)
    for cell in np.ndindex(prompts.context_of.shape[:2]):
        lengths = [len(prompts.contexts[number]) for number in prompts.context_of[cell]]
        assert lengths == sorted(set(lengths))


def test_log_likelihoods_of_some_queries_are_read_in_one_pass(folder, monkeypatch):
    run = open_one(folder / "run")
    stored = run.splits["test"].context_logprob
    contexts, queries = np.arange(stored.shape[0])[::-3], np.array([7, 0, 3])
    expected = stored[contexts][:, queries]
    read, files = PartFiles.read, []
    monkeypatch.setattr(PartFiles, "read", lambda *given: files.append(given[1]) or read(*given))
    np.testing.assert_array_equal(stored[np.ix_(contexts, queries)], expected)
    assert len(files) == len(set(files)) <= run.report.num_parts
