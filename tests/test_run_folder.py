"""Run folders: they grow without changing, survive any kill, tell every damage, and may be shared by processes.

More than 600 lines because the one folder that they copy, kill, grow and damage is made once for all of them.
"""

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from tiny import byte_level_tokenizer, make_model, make_rows, make_task, write_rows

import iclperm
from iclperm import Study, errors
from iclperm.base import files as files_room
from iclperm.base.files import Folder
from iclperm.base.sealed import canonical, sealed, unsealed
from iclperm.cli import main as cli
from iclperm.errors import RunError, RunStopped
from iclperm.runs import answering, audit, execute, layout, setting, tables, work
from iclperm.runs.folder import RunFolder
from iclperm.runs.limits import WorkLimits
from iclperm.runs.plan import plan_one


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), byte_level_tokenizer())


@pytest.fixture
def study(tmp_path, model):
    data = {"train": "train.jsonl", "test": "test.jsonl", "dev": 0.3}
    task = str(make_task(tmp_path, data=data))
    return Study(model=str(model), task=task, sets=2, permutations=2, shots=[0, 3], queries=4)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small only lose by more
    yield
    torch.set_num_threads(threads)


MANY_PARTS = WorkLimits(unit_tokens=(60, 60))
run_in_parts = partial(iclperm.run, limits=MANY_PARTS)


def grown(study, **sizes):
    return study.model_copy(update=sizes)


_MADE_ANEW = ("study.yaml", "texts.parquet", "texts.parquet.sha256")  # where a run grows


def files(folder, pattern="**/*"):
    """Content by name, of all that may never change once it is there."""
    found = {path.relative_to(folder): path for path in folder.glob(pattern) if path.is_file()}
    return {
        name: path.read_bytes()
        for name, path in found.items()
        if not {"environment", "tmp"} & set(name.parts) and name.name not in _MADE_ANEW
    }


def damage(path, place=None):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2 if place is None else place] ^= 1
    path.write_bytes(raw)
    return bytes(raw)


GROWTH = [{"sets": 4}, {"permutations": 5}, {"queries": 9}, {"dev_queries": 3}, {"sets": 3, "queries": 6}]


@pytest.mark.parametrize("sizes", GROWTH, ids=str)
def test_a_run_grows_to_what_a_larger_one_is(tmp_path, study, sizes):
    small = run_in_parts(study, tmp_path / "run")
    before = files(tmp_path / "run")
    large = grown(study, **sizes)
    extended = run_in_parts(large, tmp_path / "run", extend=True)
    assert before.items() <= files(tmp_path / "run").items()
    whole = run_in_parts(large, tmp_path / "whole")
    assert extended.digest == whole.digest != small.digest
    assert extended.report.num_parts_resumed == small.report.num_parts < extended.report.num_parts
    for name in ("tokens_naive", "tokens_unique", "num_duplicates", "num_excluded", "num_general_cells"):
        assert getattr(extended.report, name) == getattr(whole.report, name), name
    assert audit.verify(tmp_path / "run").digest == whole.digest
    # The same command again, now without a word about growth, finds nothing to do.
    again = run_in_parts(large, tmp_path / "run")
    assert again.digest == whole.digest
    assert again.report.num_parts_resumed == again.report.num_parts
    reopened = iclperm.open_run(tmp_path / "run")
    assert reopened.digest == whole.digest
    assert reopened.study.extent == large.extent


def test_a_folder_from_before_the_key_balance_goes_on_unchanged(tmp_path, study):
    """The default is in no plan, digest or study.yaml: they are those of a version that did not know the key."""
    run = run_in_parts(study, tmp_path / "run")
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    assert "balance" not in plan["study"]
    assert "balance" not in (tmp_path / "run/study.yaml").read_text()
    before = files(tmp_path / "run")
    assert run_in_parts(grown(study, balance="classes"), tmp_path / "run").digest == run.digest
    assert files(tmp_path / "run") == before
    assert iclperm.open_run(tmp_path / "run").study.balance == "classes"
    with pytest.raises(RunError, match=r'study\.balance is "classes" there and "natural" here'):
        run_in_parts(grown(study, balance="natural"), tmp_path / "run")
    # Nor can the key be written into a folder that was run without.
    path = tmp_path / "run/study.yaml"
    path.write_text(path.read_text() + "balance: natural\n")
    with pytest.raises(RunError, match="it is not the plan's study"):
        iclperm.open_run(tmp_path / "run")


def test_a_natural_run_grows_and_weighs_every_query_once(tmp_path, study):
    natural = grown(study, balance="natural")
    small = run_in_parts(natural, tmp_path / "run")
    large = grown(natural, queries=9, dev_queries=3)
    extended = run_in_parts(large, tmp_path / "run", extend=True)
    assert extended.digest == run_in_parts(large, tmp_path / "whole").digest != small.digest
    reopened = iclperm.open_run(tmp_path / "run")
    assert reopened.study.balance == "natural"
    assert reopened.weights.tolist() == [1] * 9
    assert reopened.splits["dev"].weights.tolist() == [1] * 3
    assert "balance: natural" in (tmp_path / "run/study.yaml").read_text()
    assert "always naming" in reopened.classes.conclusion()[0]
    with pytest.raises(RunError, match=r'study\.balance is "natural" there and "classes" here'):
        run_in_parts(grown(large, balance="classes"), tmp_path / "run")


def test_a_run_grows_again_and_again_and_through_interruptions(tmp_path, study):
    sizes = [{}, {"sets": 3}, {"sets": 3, "permutations": 4}, {"sets": 3, "permutations": 4, "queries": 7}]
    for step in sizes:
        interrupted_once = []

        def interrupt(done, total, seen=interrupted_once):
            if done < total and not seen and done:
                seen.append(done)
                raise KeyboardInterrupt

        try:
            run_in_parts(grown(study, **step), tmp_path / "run", extend=True, progress=interrupt)
        except KeyboardInterrupt:
            run_in_parts(grown(study, **step), tmp_path / "run", extend=True)
    run = iclperm.open_run(tmp_path / "run")
    assert run.digest == run_in_parts(grown(study, **sizes[-1])).digest
    assert [extent["sets"] for extent in audit.status(tmp_path / "run").extents] == [2, 3, 3, 3]
    assert not audit.verify(tmp_path / "run").damage


def test_a_growing_run_still_has_the_results_before(tmp_path, study):
    small = run_in_parts(study, tmp_path / "run")
    large = grown(study, sets=3, queries=6)

    def interrupt(done, _total):
        if done > small.report.num_parts:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_parts(large, tmp_path / "run", extend=True, progress=interrupt)
    before = iclperm.open_run(tmp_path / "run")
    assert before.report.is_growing
    assert before.digest == small.digest
    assert before.study.extent == study.extent
    for command, choices in (("report", ["--json"]), ("export", ["--out", str(tmp_path / "all.csv")])):
        told = CliRunner().invoke(cli.cli, [command, str(tmp_path / "run"), *choices], standalone_mode=False).stderr
        assert told.startswith("note: the run is growing, which is not finished")
    run_in_parts(study.model_copy(update={"seed": 5}), tmp_path / "other")
    assert "is growing, which" in " ".join(iclperm.compare([tmp_path / "run", tmp_path / "other"]).warnings)
    for name in ("tokens_naive", "tokens_unique", "num_parts"):
        assert getattr(before.report, name) == getattr(small.report, name)
    status = audit.status(tmp_path / "run")
    assert (status.is_finished, status.num_parts_done) == (False, small.report.num_parts + 1)
    assert audit.verify(tmp_path / "run").digest is None
    whole = run_in_parts(large, tmp_path / "run")  # the same command, with or without a word about growth
    assert not whole.report.is_growing
    assert whole.digest == run_in_parts(large).digest == iclperm.open_run(tmp_path / "run").digest


def test_an_unfinished_run_may_grow(tmp_path, study):
    def interrupt(done, _total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_parts(study, tmp_path / "run", progress=interrupt)
    large = grown(study, sets=3, queries=6)
    assert run_in_parts(large, tmp_path / "run", extend=True).digest == run_in_parts(large).digest


def test_growth_is_asked_for_and_never_shrinks(tmp_path, study):
    run_in_parts(study, tmp_path / "run")
    before = files(tmp_path / "run")
    with pytest.raises(RunError, match="holds a smaller run: sets is 2 there and 3 here; add --extend to let it grow"):
        run_in_parts(grown(study, sets=3), tmp_path / "run")
    with pytest.raises(RunError, match=r"holds a larger run: .*queries is 4 there and 3 here; ask for at least"):
        run_in_parts(grown(study, sets=3, queries=3), tmp_path / "run", extend=True)
    with pytest.raises(RunError, match=r"holds another run: .*study\.seed is 0 there and 1 here"):
        run_in_parts(grown(study, sets=3, seed=1), tmp_path / "run", extend=True)
    assert files(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sets": 3}, "holds a smaller run: sets is 2 there and 3 here; add --extend"),
        ({"seed": 1}, r"holds another run: study\.seed is 0 there and 1 here; give another folder"),
        ({"shots": [2]}, r"holds another run: study\.shots is .* there and \[2\] here"),
        ({"task": "ag_news"}, 'holds another run: task is "colours" there and "ag_news" here'),
    ],
)
def test_another_size_or_choice_is_refused_before_any_data_is_read(tmp_path, study, monkeypatch, change, words):
    run_in_parts(study, tmp_path / "run")
    monkeypatch.setattr(setting.ResolvedStudy, "of", lambda *_, **__: pytest.fail("data was read"))
    with pytest.raises(RunError, match=words):
        iclperm.run(grown(study, **change), tmp_path / "run")


def test_growth_that_changes_earlier_prompts_is_refused(tmp_path, study, monkeypatch):
    run_in_parts(study, tmp_path / "run")
    before = files(tmp_path / "run")
    cut = work._cut_hash
    monkeypatch.setattr(work, "_cut_hash", lambda *work: cut(*work)[::-1])
    with pytest.raises(RunError, match=r"holds another run: work\.cut is"):
        run_in_parts(grown(study, sets=3), tmp_path / "run", extend=True)
    assert files(tmp_path / "run") == before


@pytest.mark.parametrize("victim", ["plan.json", "study.yaml", "queries.parquet", "demonstrations.parquet", "items"])
def test_every_damage_is_told_and_mended_and_the_damaged_bytes_are_kept(tmp_path, study, victim):
    folder = tmp_path / "run"
    whole = run_in_parts(study, folder)
    kept = files(folder)
    path = sorted((folder / "items").iterdir())[1] if victim == "items" else folder / victim
    place = path.read_bytes().index(b"random") if victim == "study.yaml" else None
    wrong = damage(path, place)
    found = audit.verify(folder)
    assert len(found.damage) == 1
    assert path.name in found.damage[0]
    assert found.digest is None
    assert path.read_bytes() == wrong  # a check changes nothing
    mended = run_in_parts(study, folder)
    assert mended.digest == whole.digest
    assert mended.report.num_quarantined == (victim == "items")
    assert mended.report.num_parts_resumed == mended.report.num_parts - (victim == "items")
    assert [kept.read_bytes() for kept in (folder / "quarantine").iterdir()] == [wrong]
    assert kept.items() <= files(folder).items()
    assert not audit.verify(folder).damage


def test_a_damaged_later_plan_is_mended_by_growing_again(tmp_path, study):
    folder, large = tmp_path / "run", grown(study, sets=3)
    run_in_parts(study, folder)
    whole = run_in_parts(large, folder, extend=True)
    damage(folder / "plan-001.json")
    assert "plan-001.json is damaged" in audit.verify(folder).damage[0]
    assert run_in_parts(large, folder, extend=True).digest == whole.digest
    assert not audit.verify(folder).damage
    assert [path.name for path in (folder / "quarantine").iterdir()] == ["plan-001.json"]


def test_a_lost_later_plan_is_told_and_mended_by_growing_again(tmp_path, study):
    folder, large = tmp_path / "run", grown(study, sets=3)
    run_in_parts(study, folder)
    whole = run_in_parts(large, folder, extend=True)
    kept = files(folder)
    (folder / "plan-001.json").unlink()
    assert "if the plan of a growth was lost, let the run grow to that again" in audit.verify(folder).damage[-1]
    with pytest.raises(RunError, match=r"is beyond the .* parts of the plan; if the plan of a growth was lost"):
        run_in_parts(study, folder)
    assert run_in_parts(large, folder, extend=True).digest == whole.digest
    assert files(folder) == kept


def test_a_lost_plan_between_others_is_told_and_mended(tmp_path, study):
    folder = tmp_path / "run"
    run_in_parts(study, folder)
    run_in_parts(grown(study, sets=3), folder, extend=True)
    whole = run_in_parts(grown(study, sets=3, queries=6), folder, extend=True)
    kept = files(folder)
    (folder / "plan-001.json").unlink()
    assert "plan-001.json is gone; run the study again" in audit.verify(folder).damage[0]
    assert run_in_parts(grown(study, sets=3, queries=6), folder).digest == whole.digest
    # Beside it a table may have been set aside, which could not be told from a damaged one; it is written anew.
    assert kept.items() <= files(folder).items()
    assert not audit.verify(folder).damage


def refuse_disk(monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(execute.shutil, "disk_usage", lambda _: usage._replace(free=100))


def refuse_machine(monkeypatch):
    monkeypatch.setattr(answering, "processor", lambda: "another processor")


@pytest.mark.parametrize(
    ("refuse", "reason"),
    [(refuse_disk, r"needs about [\d.]+ MB more"), (refuse_machine, "was computed with processor")],
)
def test_a_growth_that_is_refused_leaves_the_run_finished(tmp_path, study, monkeypatch, refuse, reason):
    whole = run_in_parts(study, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    refuse(monkeypatch)
    with pytest.raises(RunError, match=reason):
        run_in_parts(grown(study, sets=4), tmp_path / "run", extend=True)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    assert iclperm.open_run(tmp_path / "run").digest == whole.digest


def test_growth_that_makes_earlier_prompts_too_long_is_refused(tmp_path, study):
    rows = [{**row, "text": "very " * 15 * (number >= 30) + row["text"]} for number, row in enumerate(make_rows(1, 60))]
    write_rows(tmp_path / "train.jsonl", rows)
    rows = [{**row, "text": "big " * number + row["text"]} for number, row in enumerate(make_rows(2, 30))]
    write_rows(tmp_path / "test.jsonl", rows)
    narrow = str(make_model(tmp_path / "narrow", window=200))
    small = grown(study, model=narrow, sets=1, shots=[3], queries=30, on_overlong="drop", seed=1)
    large = grown(small, sets=6)
    added = iclperm.plan(large).num_overlong - iclperm.plan(small).num_overlong
    assert added > 0
    whole = run_in_parts(small, tmp_path / "run")
    before = files(tmp_path / "run")
    with pytest.raises(
        RunError, match=rf"run cannot grow: with the new demonstrations {added} of its queries no longer"
    ):
        run_in_parts(large, tmp_path / "run", extend=True)
    assert files(tmp_path / "run") == before
    assert iclperm.open_run(tmp_path / "run").digest == whole.digest


def test_a_run_may_grow_while_another_process_finishes_the_smaller_one(tmp_path, study):
    folder, large = tmp_path / "run", grown(study, sets=4)
    digests = []

    def grow(done, total):
        if done < total and done == 1 and not digests:
            digests.append(run_in_parts(large, folder, extend=True).digest)

    small = run_in_parts(study, folder, progress=grow)
    assert small.digest == run_in_parts(study).digest
    assert digests == [run_in_parts(large).digest] == [audit.verify(folder).digest]


def test_a_process_that_knows_less_does_not_shrink_the_study(tmp_path, study):
    folder, large = tmp_path / "run", grown(study, sets=4)
    run_in_parts(study, folder)
    laid = layout.lay_out(setting.ResolvedStudy.of(study, limits=MANY_PARTS))  # looked at before the other let it grow
    whole = run_in_parts(large, folder, extend=True)
    RunFolder.create(folder, laid.identities(), study, [tables.tables(laid, 0)])
    assert iclperm.open_run(folder).digest == whole.digest
    assert iclperm.open_run(folder).study.sets == 4


def test_a_folder_that_another_process_makes_meanwhile_is_shared(tmp_path, study, monkeypatch):
    other = run_in_parts(study, tmp_path / "other")
    names = Folder.names

    def made_meanwhile(folder, path=None):
        if not (tmp_path / "run/FORMAT").exists():
            shutil.copytree(tmp_path / "other", tmp_path / "run", dirs_exist_ok=True)
        return names(folder, path)

    monkeypatch.setattr(Folder, "names", made_meanwhile)
    run = run_in_parts(study, tmp_path / "run")
    assert run.digest == other.digest
    assert run.report.num_parts_resumed == run.report.num_parts


def test_results_beside_a_lost_plan_are_left_alone_by_another_study(tmp_path, study):
    folder = tmp_path / "run"
    whole = run_in_parts(study, folder)
    (folder / "plan.json").unlink()
    before = files(folder)
    with pytest.raises(RunError, match=r"plan\.json is gone, and the results beside it are not this study's"):
        run_in_parts(grown(study, seed=3), folder)
    assert files(folder) == before
    mended = run_in_parts(study, folder)
    assert mended.digest == whole.digest
    assert mended.report.num_parts_resumed == mended.report.num_parts


def test_a_file_under_another_parts_name_is_damage(tmp_path, study):
    folder = tmp_path / "run"
    whole = run_in_parts(study, folder)
    first, second = sorted((folder / "items").iterdir())[:2]
    second.unlink()
    wrong = first.with_name(first.name.replace("000000", "000001"))
    shutil.copy(first, wrong)
    assert f"{wrong.name} is another part than its name says" in audit.verify(folder).damage[0]
    mended = run_in_parts(study, folder)
    assert mended.digest == whole.digest
    assert mended.report.num_quarantined == 1


@pytest.mark.parametrize(("name", "there", "wrong"), [
    ("study.yaml", b"- 3", b"- 2"),
    ("environment/*.json", b'"tokens_forwarded": ', b'"tokens_forwarded": 1'),
])  # fmt: skip
def test_a_changed_digit_is_damage(tmp_path, study, name, there, wrong):
    whole = run_in_parts(study, tmp_path / "run")
    (path,) = (tmp_path / "run").glob(name)
    assert there in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(there, wrong))
    assert path.name in audit.verify(tmp_path / "run").damage[0]
    assert run_in_parts(study, tmp_path / "run").digest == whole.digest


def test_a_copy_without_empty_folders_and_with_hidden_files_is_whole(tmp_path, study):
    """As archives and file managers leave it."""
    folder = tmp_path / "run"
    whole = run_in_parts(study, folder)
    for name in ("tmp", "quarantine"):
        (folder / name).rmdir()
    (folder / "items/.DS_Store").write_text("x")
    assert audit.verify(folder).digest == whole.digest
    assert audit.status(folder).num_quarantined == 0
    assert iclperm.open_run(folder).digest == whole.digest


def test_a_file_that_the_system_refuses_is_named_and_left_alone(tmp_path, study):
    folder = tmp_path / "run"
    run_in_parts(study, folder)
    path = next((folder / "items").iterdir())
    path.unlink()
    path.mkdir()
    for use in (iclperm.open_run, lambda folder: run_in_parts(study, folder)):
        with pytest.raises(RunError, match=f"{path.name} is no regular file; move it elsewhere"):
            use(folder)
    assert path.name in audit.verify(folder).damage[0]


def test_damage_that_two_processes_meet_is_set_aside_once(tmp_path, study):
    run_in_parts(study, tmp_path / "run")
    folder = RunFolder.open(tmp_path / "run")
    path = folder.parts.finished()[0]
    for _ in range(2):
        folder.set_aside(path)
    assert [kept.name for kept in (tmp_path / "run/quarantine").iterdir()] == [path.name]
    with pytest.raises(errors.DamagedItem, match=f"{path.name} is gone"):
        folder.parts.read(path)


def test_of_two_results_for_a_part_the_first_stays(tmp_path, study):
    run_in_parts(study, tmp_path / "run")
    folder = RunFolder.open(tmp_path / "run")
    before = files(tmp_path / "run")
    path = folder.parts.finished()[0]
    rows, (numerics,) = folder.parts.read(path), folder.parts.numerics()
    column = rows.schema.get_field_index("prediction")
    other = rows.set_column(column, "prediction", pa.chunked_array([pa.array([7] * len(rows), pa.int16())]))
    # Another machine's, as --mixed allows: never two files, and what is there is what counts.
    assert folder.parts.write(0, other, {**numerics, "processor": "another"}).equals(rows)
    assert folder.parts.write(0, rows, {**numerics, "processor": "another"}).equals(rows)
    with pytest.raises(RunError, match=r"part 0 came out different from .*; this machine does not repeat itself"):
        folder.parts.write(0, other, numerics)
    assert files(tmp_path / "run") == before


def test_numerics_are_known_without_any_record(tmp_path, study, monkeypatch):
    folder = tmp_path / "run"
    run_in_parts(study, folder)
    shutil.rmtree(folder / "environment")
    next((folder / "items").iterdir()).unlink()
    refuse_machine(monkeypatch)
    with pytest.raises(RunError, match=r"was computed with processor .*, here it is another processor"):
        run_in_parts(study, folder)
    mixed = run_in_parts(study, folder, mixed=True)
    assert mixed.report.num_numerics == 2
    assert not mixed.report.is_token_count_complete


@pytest.mark.parametrize(("code", "is_refused"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_file_system_that_cannot_sync_folders_will_do(tmp_path, study, monkeypatch, code, is_refused):
    sync = os.fsync

    def files_only(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    with pytest.raises(RunStopped) if is_refused else nullcontext():
        run_in_parts(study, tmp_path / "run")


def test_a_damaged_plan_beside_foreign_results_is_left_alone(tmp_path, study):
    folder = tmp_path / "run"
    run_in_parts(study, folder)
    damage(folder / "plan.json")
    before = files(folder)
    with pytest.raises(RunError, match=r"plan\.json is damaged, and the results beside it are not this study's"):
        run_in_parts(grown(study, seed=3), folder)
    assert files(folder) == before


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_a_truncated_file_is_damage(tmp_path, study, cut):
    folder = tmp_path / "run"
    whole = run_in_parts(study, folder)
    path = next((folder / "items").iterdir())
    path.write_bytes(path.read_bytes()[:cut])
    assert path.name in audit.verify(folder).damage[0]
    assert run_in_parts(study, folder).digest == whole.digest


def test_verification_finds_what_no_digest_shows(tmp_path, study):
    folder = tmp_path / "run"
    run_in_parts(study, folder)
    first, second = sorted((folder / "items").iterdir())[:2]
    run = RunFolder.open(folder)
    rows = run.parts.read(second)
    second.unlink()
    run.parts.write(1, run.parts.read(first), {})  # well-formed, but the wrong cells
    assert "answers" in audit.verify(folder).damage[0]
    (folder / "items/notes.txt").write_text("x")
    assert "is no file of a run" in audit.verify(folder).damage[0]
    assert rows.num_rows


def test_an_unfinished_run_is_whole_but_has_no_digest(tmp_path, study):
    def interrupt(done, _total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_parts(study, tmp_path / "run", progress=interrupt)
    found = audit.verify(tmp_path / "run")
    assert (found.damage, found.digest, found.num_parts_done) == ([], None, 2)
    status = audit.status(tmp_path / "run")
    assert (status.num_parts_done, status.is_finished, len(status.sessions)) == (2, False, 1)
    assert status.num_parts == found.num_parts > 2
    assert 0 < status.tokens_forwarded < status.tokens_unique
    assert status.seconds_left > 0
    assert status.sessions[0].is_closed
    assert json.loads(json.dumps(status.to_dict()))["sessions"][0]["num_parts"] == 2
    run_in_parts(study, tmp_path / "run")
    assert audit.status(tmp_path / "run").is_finished
    assert len(audit.status(tmp_path / "run").sessions) == 2


WRITTEN = (
    "demonstrations{}.parquet.sha256",
    "demonstrations{}.parquet",
    "queries{}.parquet.sha256",
    "queries{}.parquet",
)


@pytest.mark.parametrize("num_written", range(5))
@pytest.mark.parametrize("grows", [False, True])
def test_what_a_kill_left_unwritten_is_no_damage(tmp_path, study, grows, num_written):
    folder, large = tmp_path / "run", grown(study, sets=3)
    first = run_in_parts(study, folder)
    begun = {path.name for path in (folder / "items").iterdir()} if grows else set()
    recorded = (folder / "study.yaml").read_bytes()
    if grows:
        first = run_in_parts(large, folder, extend=True)
    if num_written == 0 and grows:
        (folder / "study.yaml").write_bytes(recorded)  # the plan of the growth is written before it
    elif num_written == 0:
        (folder / "study.yaml").unlink()
    for path in (folder / "items").iterdir():
        path.name in begun or path.unlink()
    for name in WRITTEN[num_written:]:
        (folder / name.format("-001" if grows else "")).unlink()
    found = audit.verify(folder)
    assert (found.damage, found.digest, found.num_parts_done) == ([], None, len(begun))
    if grows:
        assert iclperm.open_run(folder).report.is_growing
        assert iclperm.open_run(folder).correct.shape[0] == 2
        assert audit.status(folder).extents[-1]["sets"] == 3
    else:
        with pytest.raises(RunError, match=r"is not finished|not yet written"):
            iclperm.open_run(folder)
    assert run_in_parts(large if grows else study, folder, extend=grows).digest == first.digest
    assert audit.verify(folder).digest == first.digest
    assert not [*(folder / "quarantine").iterdir()]


def test_a_folder_without_a_plan_has_only_begun(tmp_path, study):
    (tmp_path / "run/tmp").mkdir(parents=True)
    (tmp_path / "run/FORMAT").write_text("iclperm-run 1\n")
    found = audit.verify(tmp_path / "run")
    assert (found.damage, found.digest) == ([], None)
    for look in (audit.status, iclperm.open_run):
        with pytest.raises(RunError, match="has only begun; run the same study into it"):
            look(tmp_path / "run")
    assert iclperm.run(study, tmp_path / "run").digest == audit.verify(tmp_path / "run").digest


@pytest.mark.parametrize("plan", ["whole", "damaged", "gone"])
@pytest.mark.parametrize("words", [None, "", "iclperm-runs1", "iclperm-run 2", "iclperm-runs 12"])
def test_what_is_wrong_with_format_and_plan_is_told_and_mended_by_the_same_command(tmp_path, study, words, plan):
    folder = tmp_path / "run"
    whole = run_in_parts(study, folder)
    (folder / "FORMAT").unlink() if words is None else (folder / "FORMAT").write_text(words)
    if plan == "gone":
        (folder / "plan.json").unlink()
    elif plan == "damaged":
        damage(folder / "plan.json")
    if (words, plan) != (None, "gone"):
        is_version = words in ("iclperm-run 2", "iclperm-runs 12")
        told = "FORMAT is gone" if words is None else "install a newer iclperm" if is_version else "FORMAT is damaged"
        with pytest.raises(RunError, match=f"{told}.*run the study again, which mends it"):
            iclperm.open_run(folder)
        with pytest.raises(RunError, match=r"give (another|a new or empty) folder|install a newer iclperm"):
            run_in_parts(grown(study, seed=7), folder)
    mended = run_in_parts(study, folder)
    assert mended.digest == whole.digest == audit.verify(folder).digest
    assert (folder / "FORMAT").read_text() == "iclperm-run 1\n"


def test_without_any_record_a_run_of_this_version_is_not_guessed(tmp_path, study):
    run_in_parts(study, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/environment")
    (tmp_path / "run/FORMAT").write_text("iclperm-r")
    damage(tmp_path / "run/plan.json")
    with pytest.raises(RunError, match=r"lost both FORMAT and plan\.json.*; give another folder"):
        run_in_parts(study, tmp_path / "run")


@pytest.mark.parametrize("victim", ["queries.parquet", "demonstrations.parquet", "environment"])
def test_damage_that_no_answer_is_read_through_is_mended_by_the_same_command(tmp_path, study, victim):
    folder, large = tmp_path / "run", grown(study, sets=3)
    run_in_parts(study, folder)
    whole = run_in_parts(large, folder, extend=True)
    path = next((folder / victim).iterdir()) if victim == "environment" else folder / victim
    damage(path)
    assert path.name in audit.verify(folder).damage[0]
    assert run_in_parts(large, folder, extend=True).digest == whole.digest
    assert audit.verify(folder).digest == whole.digest


@pytest.mark.parametrize("name", ["plan.json", "plan-001.json", "environment/*.json"])
def test_a_strangers_record_is_damage_and_nothing_else(tmp_path, study, name):
    folder = tmp_path / "run"
    run_in_parts(study, folder)
    run_in_parts(grown(study, sets=3), folder, extend=True)
    path = next(folder.glob(name))
    content = {key: value for key, value in unsealed(path.read_bytes()).items() if key != "digest"}
    places = [(key,) for key in content] + [
        (key, inner) for key, value in content.items() if isinstance(value, dict) for inner in value
    ]
    for *outer, key in places:
        for value in (..., None, [], {}, -1, 10**30, 10**400, "x", [[[]]], True, float("inf"), -1.5):
            changed = json.loads(json.dumps(content))
            within = changed[outer[0]] if outer else changed
            if value is ...:
                del within[key]
            else:
                within[key] = value
            path.write_bytes(canonical(sealed(changed)))
            for look in (
                lambda: json.dumps(audit.status(folder).to_dict(), allow_nan=False),
                lambda: iclperm.open_run(folder),
            ):
                with suppress(errors.IclpermError):
                    look()


@pytest.mark.parametrize("name", ["demonstrations.parquet", "queries.parquet", "study.yaml"])
def test_what_is_gone_beside_finished_parts_is_damage(tmp_path, study, name):
    whole = run_in_parts(study, tmp_path / "run")
    (tmp_path / "run" / name).unlink()
    (told,) = audit.verify(tmp_path / "run").damage
    assert f"{name} is not there: lost" in told
    assert run_in_parts(study, tmp_path / "run").digest == whole.digest
    assert not audit.verify(tmp_path / "run").damage


def test_parts_of_other_numerics_are_mixed_on_demand_only_and_said_so(tmp_path, study, monkeypatch):
    def interrupt(done, _total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_parts(study, tmp_path / "run", progress=interrupt)
    monkeypatch.setattr(answering, "processor", lambda: "another processor")
    with pytest.raises(RunError, match=r"was computed with processor .*, accept that with --mixed, or give another"):
        run_in_parts(study, tmp_path / "run")
    mixed = run_in_parts(study, tmp_path / "run", mixed=True)
    assert mixed.report.num_numerics == 2
    assert iclperm.open_run(tmp_path / "run").report.num_numerics == 2
    assert run_in_parts(study).report.num_numerics == 1


def test_a_disk_that_is_too_small_is_told_before_the_start(tmp_path, study, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(execute.shutil, "disk_usage", lambda _: usage._replace(free=100))
    monkeypatch.setattr(iclperm.Engine, "from_pretrained", None)
    with pytest.raises(RunStopped, match=r"run needs about [0-9.]+ MB more, but its disk has 0.00 MB free; make room"):
        run_in_parts(study, tmp_path / "run")


def test_the_predicted_disk_space_is_about_what_a_run_takes(tmp_path, study):
    planned = plan_one(study, MANY_PARTS)
    run_in_parts(study, tmp_path / "run")
    taken = sum(path.stat().st_size for path in (tmp_path / "run/items").iterdir())
    assert taken / 2 < planned.disk_bytes < 4 * taken


WORKER = """
import sys
import time
import torch
import iclperm
from iclperm import Study
from iclperm.runs.limits import WorkLimits

torch.set_num_threads(1)
import iclperm.engine
print("ready", flush=True)
sys.stdin.readline()
limits = WorkLimits(unit_tokens=(200, 200))
run = iclperm.run(Study.from_file(sys.argv[1]), sys.argv[2], progress=lambda *_: time.sleep(0.1), limits=limits)
print(run.digest, flush=True)
"""


LARGER_PARTS = WorkLimits(unit_tokens=(200, 200))  # those of the workers


def start(study, tmp_path, out):
    (tmp_path / "study.yaml").write_text(study.to_yaml())
    arguments = [sys.executable, "-P", "-c", WORKER, tmp_path / "study.yaml", out]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def let_run(*processes):
    """All have loaded what they need; now they begin together."""
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()


def num_items(folder):
    return len(list((folder / "items").glob("*.parquet"))) if (folder / "items").exists() else 0


def test_a_run_killed_again_and_again_is_the_unbroken_run(tmp_path):
    """Kills at whatever moment, some before the first part and some in the middle of one."""
    study = Study(sets=3, permutations=4, shots=[0, 2, 4], queries=40)
    folder, waits = tmp_path / "killed", iter([0.3, 0.02, 0.1, 0.05])
    for wait in waits:
        with start(study, tmp_path, folder) as process:
            before = num_items(folder)
            let_run(process)
            while process.poll() is None and num_items(folder) == before:
                time.sleep(0.01)
            time.sleep(wait)
            process.send_signal(signal.SIGKILL)
    killed = num_items(folder)
    continued = iclperm.run(study, folder, limits=LARGER_PARTS)
    assert continued.report.num_parts_resumed == killed >= 4
    whole = iclperm.run(study, tmp_path / "whole", limits=LARGER_PARTS)
    assert continued.digest == whole.digest == audit.verify(folder).digest
    assert files(folder, "items/*") == files(tmp_path / "whole", "items/*")
    assert not continued.report.is_token_count_complete


def test_two_processes_share_the_work_of_one_folder(tmp_path):
    study = Study(sets=3, permutations=4, shots=[0, 2, 4], queries=40)
    folder = tmp_path / "shared"
    with start(study, tmp_path, folder) as first, start(study, tmp_path, folder) as second:
        let_run(first, second)
        digests = {process.communicate()[0].split()[-1] for process in (first, second)}
    assert (first.returncode, second.returncode) == (0, 0)
    whole = iclperm.run(study, tmp_path / "whole", limits=LARGER_PARTS)
    assert digests == {whole.digest} == {audit.verify(folder).digest}
    status = audit.status(folder)
    written = [session.num_parts for session in status.sessions]
    # Each part is computed once: nobody waits for a part that is being computed while others are left.
    assert sum(written) == status.num_parts
    assert len(written) == 2
    assert min(written) > 0


def test_claims_keep_others_away_and_die_with_their_process(tmp_path, study):
    run_in_parts(study, tmp_path / "run")
    mine, others = RunFolder.open(tmp_path / "run"), RunFolder.open(tmp_path / "run")
    assert mine.parts.claim(0)
    assert not others.parts.claim(0)
    assert others.parts.claim(1)
    mine.parts.release(0)
    assert others.parts.claim(0)
    script = (
        "import sys, time; from iclperm.runs.folder import RunFolder\n"
        "folder = RunFolder.open(sys.argv[1]); print(folder.parts.claim(5), flush=True); time.sleep(600)"
    )
    arguments = [sys.executable, "-P", "-c", script, tmp_path / "run"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "True\n"
        is_free = mine.parts.claim(5)
        process.kill()
    assert not is_free
    assert mine.parts.claim(5)


def test_a_claim_is_given_back_where_its_file_cannot_be_removed(tmp_path, study):
    run_in_parts(study, tmp_path / "run")
    mine, others = RunFolder.open(tmp_path / "run"), RunFolder.open(tmp_path / "run")
    assert mine.parts.claim(0)
    lock = tmp_path / "run/tmp/000000.lock"
    lock.unlink()
    lock.mkdir()  # as root may remove any file, but no folder so
    mine.parts.release(0)
    lock.rmdir()
    assert others.parts.claim(0)


def test_a_file_system_without_locks_only_costs_double_work(tmp_path, study, monkeypatch):
    def refuse(*_, **__):
        raise OSError("no locks here")

    monkeypatch.setattr(files_room.fcntl, "flock", refuse)
    assert run_in_parts(study, tmp_path / "run").digest == run_in_parts(study).digest


def test_the_tables_of_every_extent_can_be_read_without_us(tmp_path, study):
    run_in_parts(study, tmp_path / "run")
    run = run_in_parts(grown(study, sets=3, dev_queries=3), tmp_path / "run", extend=True)
    cells = pq.read_table(tmp_path / "run/demonstrations-001.parquet").to_pylist()
    queries = pq.read_table(tmp_path / "run/queries-001.parquet").to_pylist()
    assert [(row["split"], row["query"]) for row in queries] == [
        *(("test", query) for query in range(4)),
        *(("dev", query) for query in range(3)),
    ]
    items = [row for path in (tmp_path / "run/items").glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    found = {(row["context"], row["split"], row["query"]): row for row in items}
    assert len(found) == len(items)
    labels = run.labels
    for row in cells:
        for place, context in enumerate(row["contexts"]):
            for split, split_items in run.splits.items():
                for query in range(len(split_items.gold)):
                    item = found[context, split, query]
                    cell = (row["set"], row["permutation"], place, query)
                    np.testing.assert_array_equal(
                        np.array(item["label_logprob"], np.float32), split_items.label_logprob[cell]
                    )
                    assert (item["prediction"] == item["gold"]) == split_items.correct[cell]
    assert {row["label"] for row in queries} <= set(labels)
    assert Path(tmp_path / "run/FORMAT").read_text() == "iclperm-run 1\n"


# Every released format is read for ever: a small run of each (this one was extended), and the digest that it had.
RELEASED = {"format-1": "3ec211e6298f1d30235324acca5d52c10272fbd91167c705e26d848bb0abd0de"}
RUNS = Path(__file__).parent / "data/runs"


def test_every_released_format_is_kept():
    assert {path.name for path in RUNS.iterdir()} == set(RELEASED)


@pytest.mark.parametrize(("name", "digest"), RELEASED.items())
def test_runs_of_every_released_format_are_read(name, digest):
    run = iclperm.open_run(RUNS / name)
    assert run.digest == digest
    assert run.correct.shape == (3, 2, 2, 4)
    assert run.splits["dev"].correct.shape == (3, 2, 2, 2)
    found = audit.verify(RUNS / name)
    assert (found.damage, found.digest) == ([], digest)
    assert audit.status(RUNS / name).is_finished
    assert run.summary().num_queries == 4


def test_sessions_begun_in_one_second_are_listed_in_the_order_they_began():
    began = [1_700_000_000.0, 1_700_000_000.000_002, 1_700_000_000.5, 1_700_000_000.999_999_9, 1_700_000_001.25]
    names = [execute._session_name(at) for at in began]
    assert names == sorted(names)
    assert len({execute._session_name(began[0]) for _ in range(50)}) == 50
    # 0.9999999 s rounds to the next second, in both halves of the name.
    assert [name[:16] for name in names] == ["20231114T221320Z"] * 3 + ["20231114T221321Z"] * 2
