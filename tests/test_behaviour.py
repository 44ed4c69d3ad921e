"""What users see stays as it was: help, public names, studies of every kind, errors, and run folders of earlier days.

Compared with ``fixtures/behaviour/kept.json``. After a change that users are meant to see, record it anew and read
the difference: ``python tests/record_behaviour.py --kept``. The run folders in ``fixtures/behaviour/folders`` are
never made anew; ``python tests/record_behaviour.py --folders`` adds those that are not there yet.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from behaviour import folders, kept, place, recording, surface
from behaviour.compare import differences

import iclperm
from iclperm.errors import RunError

pytestmark = pytest.mark.timeout(900)  # the recording is made once, by whoever asks first

PARTS = ("help", "names", "objects", "cases", "shown", "refusals")
FORMAT_1 = Path(__file__).parent / "data/runs/format-1"
SAID = json.loads(folders.SAID.read_text(encoding="utf-8"))
MAX_BYTES = 430_000


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As the fixture was recorded."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def here(one_thread) -> dict[str, Any]:
    """A recording of this code, through JSON as the fixture went."""
    return json.loads(json.dumps(kept.kept(recording.record(portable=True))))


@pytest.fixture(scope="module")
def call(tmp_path_factory):
    """The command line."""
    return place.Place(tmp_path_factory.mktemp("behaviour")).raw


@pytest.fixture
def copy(tmp_path):
    """A kept folder to write into."""
    return lambda name: shutil.copytree(folders.FOLDERS / name, tmp_path / name)


@pytest.mark.parametrize("part", PARTS)
def test_it_is_as_it_was(part, here):
    there = kept.read()
    found = list(kept.differences(there[part], here[part], part, may_grow=part in kept.GROWING))
    assert not found, "\n".join(found)


def test_every_part_is_kept(here):
    assert [*kept.read()] == [*here] == [*PARTS]


def test_the_fixtures_are_small_and_name_no_machine():
    files = [path for path in kept.FIXTURES.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MAX_BYTES
    for path in files:
        assert not any(words in path.read_bytes() for words in (b"/work/", b"/tmp/", b"/home/", b"/root/")), path


def test_differences_are_seen():
    there = {"a": {"parameters": {"x": "", "y": "=1"}}, "out": ["mean 0.8511 of 3"], "rows": [0.5, None, 1]}
    assert not list(kept.differences(there, json.loads(json.dumps(there))))
    near = {**there, "out": ["mean", "0.8510 of 3"], "rows": [0.50001, None, 1]}
    assert not list(kept.differences(there, near))
    assert len(list(differences(there, near))) == 4  # a line that is gone, two that are new, a number
    for change in (
        {"out": ["mean 0.86 of 3"]},
        {"out": ["mean 0.8511 of 4"]},
        {"out": ["mean 0.8511 of 3", "more"]},
        {"rows": [0.51, None, 1]},
        {"rows": [0.5, None, 2]},
        {"rows": [0.5, None]},
        {"a": {"parameters": {"x": "", "y": "=2"}}},
        {"a": {"parameters": {"y": "=1", "x": ""}}},
        {"a": {"parameters": {"x": ""}}},
        {"a": {"parameters": {"x": "", "y": "=1", "z": ""}}},
    ):
        assert len(list(kept.differences(there, {**there, **change}, may_grow=True))) == 1, change
    more = {**there, "a": {"parameters": {"x": "", "y": "=1", "z": "!=None"}, "members": {}}}
    assert not list(kept.differences(there, more, may_grow=True))
    assert len(list(kept.differences(there, more))) == 2


def test_every_name_in_the_docs_is_there():
    assert [name for name, is_there in surface.documented().items() if not is_there] == []


def test_every_kept_folder_is_looked_at():
    assert {path.name for path in folders.FOLDERS.iterdir()} == set(SAID)


@pytest.mark.parametrize("name", sorted(set(SAID) - {folders.STOPPED}))
def test_a_kept_folder_opens_is_whole_and_reports(name, call, copy, tmp_path):
    folder = copy(name)
    assert folders.said_by(folder) == SAID[name]
    digests = SAID[name]["digests"]
    for at in ("", *(path.parent.name for path in folder.glob("*/plan.json"))):
        code, out, err = call("verify", folder / at)
        assert (code, err) == (0, "")
        assert all(digest in out for run, digest in digests.items() if run == at)
        assert call("status", folder / at)[0] == 0
    code, out, _ = call("report", folder, "--out", tmp_path / "report")
    assert code == 0
    assert "Conclusion" in out
    assert json.loads((tmp_path / "report/report.json").read_text())["kind"] == iclperm.open_run(folder).study.kind


@pytest.mark.parametrize("name", [folders.GROWN, folders.CONVERGENCE])
def test_a_kept_folder_has_nothing_left_to_compute(name, call, copy):
    code, out, _ = call("run", copy(name))
    assert code == 0
    assert "nothing to compute" in out


@pytest.mark.parametrize("name", folders.OF_OTHER_MODELS)
def test_a_kept_folder_of_another_model_is_not_continued_and_stays_as_it_is(name, call, copy):
    folder = copy(name)
    code, out, err = call("run", folder)
    assert (code, out) == (1, "")
    assert "holds another run: the model has changed since; the tokenizer has changed since" in err
    assert folders.said_by(folder) == SAID[name]


def test_a_kept_folder_of_a_study_with_several_runs_holds_runs(call):
    for folder in (folders.FOLDERS / "transfer/demo", folders.FOLDERS / "selection/source"):
        run = iclperm.open_run(folder)
        assert run.study.kind in ("search", "curve")
        assert run.digest in call("verify", folder)[1]
        assert run.findings().conclusion()


def test_a_kept_run_of_an_api_continues_to_the_same_digest_and_pays_for_nothing_twice(call, copy):
    folder = copy("asked_in_part")
    assert call("verify", folder)[0] == 3
    num_paid = sum(len(path.read_bytes().splitlines()) for path in (folder / "api").iterdir())
    num_asked = folders.go_on(folder)
    assert folders.said_by(folder) == SAID["asked_in_part"]
    assert SAID["asked_in_part"]["digests"]["whole"] in call("verify", folder)[1]
    assert num_paid + num_asked == iclperm.open_run(folder).report.num_requests
    assert 0 < num_paid < num_paid + num_asked


@pytest.mark.parametrize("name", ["grown", folders.GROWN])
def test_a_kept_growth_that_lacks_its_last_part_reads_as_before_and_continues(name, call, copy):
    folder = copy(name)
    max((folder / "items").iterdir()).unlink()
    assert call("verify", folder)[0] == call("status", folder)[0] == 3
    before = iclperm.open_run(folder)
    assert (before.report.is_growing, before.correct.shape) == (True, (2, 3, 2, 4))
    if name in folders.OF_OTHER_MODELS:
        with pytest.raises(RunError, match="holds another run: the model has changed since"):
            iclperm.run(folders.grown(), folder, extend=True, mixed=True)
        return
    iclperm.run(folders.grown(), folder, extend=True, mixed=True)  # the folder's last bits are another processor's
    said = folders.said_by(folder)
    assert said["correct"] == SAID[folders.GROWN]["correct"]
    code, out, _ = call("verify", folder)
    assert code == 0
    assert said["digests"]["whole"] in out
    if iclperm.open_run(folder).report.num_numerics == 1:
        assert said["digests"] == SAID[folders.GROWN]["digests"]


def test_the_released_format_opens_verifies_and_reports(call, tmp_path):
    run = iclperm.open_run(FORMAT_1)
    code, out, err = call("verify", FORMAT_1)
    assert (code, err) == (0, "")
    assert f"digest  {run.digest}\n" in out
    code, out, _ = call("report", FORMAT_1, "--out", tmp_path)
    assert code == 0
    assert "Conclusion" in out
