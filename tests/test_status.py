"""How far a run is: told by the names of its files and by its records, whatever is in its answers."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from behaviour.folders import FOLDERS, STUDIES

import iclperm
from iclperm.runs.folder import RunFolder
from iclperm.runs.presence import at_work
from iclperm.runs.progress import LOADING

WATCHED = """
import sys

def note(event, arguments):
    name = str(arguments[0]).split("/")[-1] if event == "open" else ""
    if name[:6].isdecimal() and name.endswith(".parquet"):
        print("opened items/" + name, file=sys.stderr)

sys.addaudithook(note)
from iclperm.cli.main import main
main(sys.argv[1:])
"""


def call(*arguments):
    """Exit code, what is printed, and the answers that Python opened; what Arrow opens would meet the garbage."""
    command = [sys.executable, "-P", "-c", WATCHED, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def spoil(folder):
    """Every answer becomes garbage of the same size."""
    files = list(folder.rglob("items/*.parquet"))
    for path in files:
        path.write_bytes(b"?" * path.stat().st_size)
    assert files


@pytest.mark.parametrize("name", ["grown", "convergence", "transfer", "selection", "asked_in_part"])
def test_status_opens_no_answers(tmp_path, name):
    folder = shutil.copytree(FOLDERS / name, tmp_path / name)
    whole = iclperm.status(folder)
    before = {name: one.to_dict() for name, one in (whole if isinstance(whole, dict) else {"": whole}).items()}
    if name != "asked_in_part":  # it has no answers yet, only replies
        spoil(folder)
    code, printed, complaint = call("status", folder, "--json")
    assert complaint == ""
    found = json.loads(printed)
    assert (found if isinstance(found, list) else [found]) == [json.loads(json.dumps(one)) for one in before.values()]
    assert code == (3 if name == "asked_in_part" else 0)
    assert list(before) == {"transfer": ["demo", "other"], "selection": ["source", "chosen"]}.get(name, [""])


def test_the_choice_of_a_selection_is_read_where_it_is_kept(tmp_path):
    """Of two runs that were chosen, the one that the folder says was."""
    folder = tmp_path / "run"
    iclperm.run(iclperm.Study(**STUDIES["selection"]), folder)
    assert (folder / "choices.json").is_file()
    (chosen,) = folder.glob("chosen-*")
    shutil.copytree(chosen, folder / "chosen-00000000")
    spoil(folder)
    code, printed, complaint = call("status", folder, "--json")
    assert (code, complaint) == (0, "")
    assert [found["folder"] for found in json.loads(printed)] == [str(folder / "source"), str(chosen)]


def test_where_names_do_not_tell_what_was_chosen_that_is_said(tmp_path):
    folder = shutil.copytree(FOLDERS / "selection", tmp_path / "run")
    (chosen,) = folder.glob("chosen-*")
    shutil.copytree(chosen, folder / "chosen-00000000")
    spoil(folder)
    code, printed, complaint = call("status", folder, "--json")
    said = "not begun: what it chooses; unless it is at work, run the study again to continue\n"
    assert (code, complaint) == (3, said)
    assert json.loads(printed)["folder"] == str(folder / "source")


def test_a_part_that_is_gone_is_missed(tmp_path):
    folder = shutil.copytree(FOLDERS / "grown", tmp_path / "run")
    parts = RunFolder.open(folder).parts.finished()
    parts[max(parts)].unlink()
    found = iclperm.status(folder)
    assert (found.num_parts_done, found.is_finished) == (len(parts) - 1, False)


def test_answers_that_are_opened_are_seen(tmp_path):
    """`verify` reads them all: what the tests above look for would be there."""
    code, _, complaint = call("verify", FOLDERS / "grown")
    assert code == 0
    files = [line.split("/")[-1] for line in complaint.splitlines() if line.startswith("opened ")]
    assert set(files) == {path.name for path in (FOLDERS / "grown/items").iterdir()}


class Looker:
    """Looks at a run from another process while it computes."""

    interval = 1.0

    def __init__(self, folder):
        self.folder, self.told = folder, {}

    def show(self, advance):
        if advance.stage == LOADING and not self.told:
            code, printed, _ = call("status", self.folder)
            self.told[LOADING] = code, printed, iclperm.status(self.folder).num_at_work


def test_a_run_that_is_at_work_is_said_to_be(tmp_path):
    """From before its model is loaded; who looks on is not told to run it again."""
    folder, looker = tmp_path / "run", Looker(tmp_path / "run")
    iclperm.run(iclperm.Study(sets=2, permutations=2, shots=[2], queries=4), folder, progress=looker)
    code, printed, count = looker.told[LOADING]
    assert (code, count) == (3, 1)
    assert "at work: 1 process" in printed
    assert "run the same study" not in printed
    assert iclperm.status(folder).num_at_work == 0
    assert list((folder / "tmp").iterdir()) == []


def test_a_killed_run_is_not_at_work(tmp_path):
    folder = shutil.copytree(FOLDERS / "grown", tmp_path / "run")
    parts = RunFolder.open(folder).parts.finished()
    parts[max(parts)].unlink()
    (folder / "tmp").mkdir(exist_ok=True)
    with at_work(folder), at_work(folder):
        assert iclperm.status(folder).num_at_work == 2
    assert not list((folder / "tmp").glob("*.work"))
    killed = "from iclperm.runs.presence import at_work as a; import os, pathlib as p, sys; "
    killed += "b = a(p.Path(sys.argv[1])); b.__enter__(); os._exit(9)"
    subprocess.run([sys.executable, "-P", "-c", killed, folder], check=False)
    assert len(list((folder / "tmp").glob("*.work"))) == 1
    assert iclperm.status(folder).num_at_work == 0
    code, printed, _ = call("status", folder)
    assert code == 3
    assert "not finished: run the same study into it to continue" in printed


def test_what_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "tmp").mkdir()
    with at_work(tmp_path) as is_seen:
        assert not is_seen
        assert list((tmp_path / "tmp").iterdir()) == []


def test_a_finished_run_that_is_run_again_is_not_written_to(tmp_path):
    """Its folder may be of somebody else, or lie behind a link."""
    folder = tmp_path / "run"
    study = iclperm.Study(sets=2, permutations=2, shots=[2], queries=4)
    iclperm.run(study, folder)
    os.utime(folder / "tmp", ns=(0, 0))
    assert iclperm.run(study, folder).report.num_parts_resumed == 1
    assert (folder / "tmp").stat().st_mtime_ns == 0
