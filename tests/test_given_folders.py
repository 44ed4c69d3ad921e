"""A folder from somebody else: no link in it is followed, nothing in it hangs, fills memory or is written over."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from behaviour.folders import FOLDERS, GROWN, STUDIES
from click.testing import CliRunner

import iclperm
from iclperm.base import files
from iclperm.base.files import Folder, matches
from iclperm.base.outputs import output
from iclperm.base.sealed import parsed, sealed, unsealed
from iclperm.base.worker import Overtime
from iclperm.cli.main import cli, main
from iclperm.errors import ConfigError, DamagedItem, DataError, RunError
from iclperm.external import load
from iclperm.runs import audit
from iclperm.runs.folder import RunFolder, mend_format
from iclperm.study.study import Study
from iclperm.tasks import answers
from iclperm.tasks.answer_keys import Answer
from iclperm.tasks.answers import open_checker
from iclperm.tasks.loaders import read_rows


@pytest.fixture
def folder(tmp_path, request):
    return shutil.copytree(FOLDERS / getattr(request, "param", "grown"), tmp_path / "run")


of_the_bundled_model = pytest.mark.parametrize("folder", [GROWN], indirect=True)
"""A folder that can be run again, unlike that of a model which was bundled before."""


@pytest.fixture
def victim(tmp_path):
    """A folder of the reader's own, whose files are old."""
    place = tmp_path / "victim"
    place.mkdir()
    for name in ("thesis.txt", "000000.lock"):
        (place / name).write_text("mine")
        os.utime(place / name, (1, 1))
    return place


def study_of(folder):
    return RunFolder.open(folder).study().model_copy(update={"out": None})


def run_again(folder):
    return iclperm.run(study_of(folder), folder, mixed=True)


def called(*arguments):
    """Exit code, and the one line that a command says of what it refuses."""
    found = CliRunner().invoke(cli, [*map(str, arguments)], standalone_mode=False)
    return found.exception


def refused(message, use, *arguments, error=RunError):
    with pytest.raises(error, match=message) as found:
        use(*arguments)
    assert "\n" not in str(found.value)


def first_item(folder):
    return sorted((folder / "items").glob("*.parquet"))[0]


def replaced_by_link(path, target):
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    return path


# Links


@pytest.mark.parametrize("name", ["tmp", "quarantine", "environment"])
def test_a_folder_of_the_run_that_is_a_link_is_refused_and_its_target_is_as_it_was(folder, victim, name):
    first_item(folder).write_bytes(b"damaged, so that a file is set aside")
    study = study_of(folder)
    replaced_by_link(folder / name, victim)
    refused(f"{name} is a symbolic link, and none is followed", lambda: iclperm.run(study, folder, mixed=True))
    assert sorted(path.name for path in victim.iterdir()) == ["000000.lock", "thesis.txt"]
    assert all(path.read_text() == "mine" for path in victim.iterdir())


@pytest.mark.parametrize(
    "name", ["plan.json", "demonstrations-001.parquet", "queries-001.parquet.sha256", "FORMAT", "items"]
)
def test_what_is_read_through_a_link_is_refused(folder, tmp_path, name):
    kept = tmp_path / "kept"
    (folder / name).rename(kept)
    (folder / name).symlink_to(kept)
    refused("is a symbolic link, and none is followed in a run folder; put what it points to", iclperm.open_run, folder)


@of_the_bundled_model
def test_the_run_folder_itself_may_be_a_link(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    assert iclperm.open_run(tmp_path / "link").digest == iclperm.open_run(folder).digest
    assert run_again(tmp_path / "link").digest == iclperm.open_run(folder).digest


def test_a_lock_that_is_a_link_truncates_nothing(folder, victim):
    parts = RunFolder.open(folder).parts
    (folder / "tmp").mkdir(exist_ok=True)
    (folder / "tmp/000000.lock").symlink_to(victim / "000000.lock")
    refused("000000.lock is a symbolic link", parts.claim, 0)
    assert (victim / "000000.lock").read_text() == "mine"


def test_a_lock_that_is_a_hard_link_to_a_file_elsewhere_is_replaced_by_one_of_its_own(folder, victim):
    (folder / "tmp").mkdir(exist_ok=True)
    lock = folder / "tmp/000000.lock"
    os.link(victim / "000000.lock", lock)
    outside = (victim / "000000.lock").stat()
    files = Folder(folder)
    handle = files.locked(lock)
    inside = os.fstat(handle)
    assert os.path.samestat(inside, lock.stat())
    assert not os.path.samestat(inside, outside)
    assert files.locked(lock) is None  # it is held
    os.close(handle)
    with (victim / "000000.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody holds a lock out there
        again = files.locked(lock)
        assert again is not None
        os.close(again)
    assert (victim / "000000.lock").stat().st_mtime_ns == outside.st_mtime_ns


def test_figures_and_reports_that_are_links_are_replaced_not_written_through(folder, victim):
    for name in ("heatmap.png", "report.json"):
        replaced_by_link(folder / name, victim / "thesis.txt")
    iclperm.open_run(folder).write_report()
    assert (victim / "thesis.txt").read_text() == "mine"
    assert not (folder / "heatmap.png").is_symlink()
    assert (folder / "heatmap.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_for_reports_that_is_a_link_is_refused(folder, victim):
    (folder / "report-mean").symlink_to(victim)
    error = called("report", folder, "--normalize", "mean")
    assert isinstance(error, ConfigError)
    assert "report-mean, a link inside a run folder; name another place" in str(error)
    assert sorted(path.name for path in victim.iterdir()) == ["000000.lock", "thesis.txt"]


def test_a_run_of_several_that_is_a_link_is_refused(tmp_path, folder):
    several = shutil.copytree(FOLDERS / "transfer", tmp_path / "several")
    (several / "demo").rename(tmp_path / "demo")
    (several / "demo").symlink_to(tmp_path / "demo")
    refused("demo is a symbolic link, and none is followed", iclperm.open_run, several)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("../../.git/annex/objects/Xk/2f/SHA256E-s9--ab.parquet/SHA256E-s9--ab.parquet", "run: git annex get and git"),
        ("../.dvc/cache/files/md5/ab/cdef", r"is a link of DVC, .*; run: dvc pull, dvc unprotect"),
    ],
)
def test_links_of_version_control_are_told_apart(folder, target, message):
    replaced_by_link(first_item(folder), target)
    refused(message, iclperm.open_run, folder)


@of_the_bundled_model
def test_pointers_of_version_control_are_told_apart(folder, tmp_path):
    item, text = first_item(folder), "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    whole = item.read_bytes()
    item.write_text(text)
    for use in (iclperm.open_run, run_again):
        refused(f"{item.name} is not here, only a pointer to it; run: git lfs pull", use, folder)
    assert item.read_text() == text  # not set aside as damage
    item.write_text("/annex/objects/SHA256E-s9--ab.parquet\n")
    refused("run: git annex get", iclperm.open_run, folder)
    item.unlink()
    item.with_name(f"{item.name}.dvc").write_text("outs:")
    refused(rf"run: dvc pull .*{item.name}.dvc", iclperm.open_run, folder)
    item.write_bytes(whole)
    assert iclperm.open_run(folder)  # the file is there, and its pointer beside it
    (folder / "items").rename(tmp_path / "items")
    (folder / "items.dvc").write_text("outs:")
    for use in (iclperm.open_run, lambda path: iclperm.run(Study(task="mini_news"), path, mixed=True)):
        refused(r"items is not here, only DVC's pointer to it; run: dvc pull .*items.dvc", use, folder)
    shutil.rmtree(folder)
    folder.with_name("run.dvc").write_text("outs:")
    refused(r"run is not here, only DVC's pointer to it", iclperm.open_run, folder)
    refused("other is not a run folder", iclperm.open_run, tmp_path / "other")  # whose pointer is none there


def test_data_that_version_control_has_not_fetched_are_told_apart(tmp_path):
    path = tmp_path / "a.csv"
    path.symlink_to(".git/annex/objects/ab")
    for read in (lambda: read_rows(path, ["a"]), lambda: load(path)):
        refused("a.csv:? is not here, only a pointer to it; run: git annex get", read, error=DataError)
    path.unlink()
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    for read in (lambda: read_rows(path, ["a"]), lambda: load(path)):
        refused("a.csv:? is not here, only a pointer to it; run: git lfs pull", read, error=DataError)
    path.rename(tmp_path / "a.csv.dvc")
    for read in (lambda: read_rows(path, ["a"]), lambda: load(path)):
        refused("a.csv:? is not here, only a pointer to it; run: dvc pull", read, error=DataError)


# What is no file, too large, or nested too deep


@pytest.mark.parametrize("name", ["plan.json", "study.yaml", "FORMAT", "queries-001.parquet", "item"])
def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(folder, name):
    path = first_item(folder) if name == "item" else folder / name
    path.unlink()
    os.mkfifo(path)
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import sys, iclperm; iclperm.open_run(sys.argv[1])", folder],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"{path.name} is no regular file; move it elsewhere" in done.stderr.splitlines()[-1]


def test_a_pipe_in_the_place_of_a_users_file_is_refused_at_once(tmp_path):
    path = tmp_path / "data.csv"
    os.mkfifo(path)
    refused("not a regular file", lambda: read_rows(path, ["a"]), error=DataError)
    refused("not a regular file", lambda: Study.from_file(path), error=ConfigError)
    refused("no regular file", lambda: load(path), error=DataError)


def test_the_pipe_of_a_shell_is_read(tmp_path):
    read, write = os.pipe()
    os.write(write, b"seed: 7\n")
    os.close(write)
    assert Study.from_file(f"/dev/fd/{read}").seed == 7
    os.close(read)


@pytest.mark.parametrize("name", ["plan.json", "study.yaml", "FORMAT", "environment"])
def test_a_file_of_any_size_is_refused_before_it_is_read(folder, name):
    path = folder / name
    if name == "environment":
        path = folder / name / "20260101T000000Z-00000000.json"
        path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        file.truncate(1 << 40)  # of which the disk holds nothing
    refused(rf"{path.name} has 1,099,511,627,776 bytes; at most [\d,]+ are read", iclperm.open_run, folder)


def test_a_plan_that_is_nested_deep_is_damage(folder):
    raw = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    (folder / "plan.json").write_bytes(raw)
    refused(r"plan\.json is damaged", iclperm.open_run, folder, error=DamagedItem)
    assert unsealed(raw) is None
    with pytest.raises(ValueError, match="nested deeper than 50 levels"):
        parsed(raw)
    flat = {"text": "[" * 1000 + '"{', "list": [[1]] * 1000}
    assert unsealed(json.dumps(sealed(flat)).encode()) == sealed(flat)


def test_a_session_whose_record_is_of_other_kinds_is_damage(folder):
    (folder / "environment").mkdir(exist_ok=True)
    for record in ({"seconds": "x"}, {"tokens_forwarded": "9"}, {"replies": {"num_requests": [1]}}, {"numerics": 3}):
        (folder / "environment/a.json").write_text(json.dumps(sealed(record)))
        assert "a.json cannot be read" in audit.verify(folder).damage[0]
        assert iclperm.open_run(folder).report.is_token_count_complete is False


def test_what_is_sealed_but_no_plan_is_damage(folder):
    plan = json.loads((folder / "plan.json").read_text())
    del plan["digest"]
    for change in (
        {"work": {"parts": "9"}},
        {"extents": []},
        {"extents": [{"sets": 1e9}]},
        {"study": 3},
        {"labels": None},
    ):
        (folder / "plan.json").write_text(json.dumps(sealed({**plan, **change})))
        refused(r"plan\.json is damaged", iclperm.open_run, folder, error=DamagedItem)


def test_an_old_folder_in_tmp_stops_nothing(folder):
    (folder / "tmp/mine").mkdir(parents=True)
    os.utime(folder / "tmp/mine", (1, 1))
    folder_again = RunFolder.open(folder)
    folder_again._remove_stale()
    assert (folder / "tmp/mine").is_dir()


def test_a_replys_line_of_somebody_who_reckons_checksums_is_damage(folder):
    import zlib

    (folder / "api").mkdir()
    for raw in (b"[" * 5_000 + b"]" * 5_000, b"[]", b"{}", b'{"key": 1, "model": 2, "reply": 3, "spent": [1, "a"]}'):
        line = b'{"crc32":"%08x","entry":' % zlib.crc32(raw) + raw + b"}\n"
        (folder / "api/a.jsonl").write_bytes(line)
        (found,) = audit.verify(folder).damage
        assert "a.jsonl is damaged in line 1" in found


# Outputs


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("form", ["plain", "dots", "link", "relative", "upper"])
@pytest.mark.parametrize("name", ["item", "demonstrations.parquet", "items/new.parquet", "tmp/a.csv", "plan-001.json"])
def test_nothing_is_exported_onto_what_a_run_keeps(folder, tmp_path, monkeypatch, form, name):
    path = first_item(folder) if name == "item" else folder / name
    before = content(folder)
    if form == "dots":
        (folder / "figures").mkdir()
        path = folder / "figures" / ".." / path.relative_to(folder)
    elif form == "link":
        (tmp_path / "link").symlink_to(path.parent)
        path = tmp_path / "link" / path.name
    elif form == "relative":
        monkeypatch.chdir(folder)
        path = path.relative_to(folder)
    elif form == "upper":
        path = folder / str(path.relative_to(folder)).upper()
    refused("is among what the run .* keeps .*; name another place", output, path, error=ConfigError)
    if form != "upper":
        error = called("export", folder, "--out", path)
        assert isinstance(error, ConfigError)
    assert content(folder) == before


def test_dots_behind_a_link_lead_where_the_system_goes(folder, tmp_path):
    before = content(folder)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/link").symlink_to(folder / "items")
    for name in ("queries.parquet", "items/more.parquet", "demonstrations-001.parquet"):
        error = called("export", folder, "--out", tmp_path / "sub/link/.." / name)
        assert "is among what the run" in str(error), name
    assert content(folder) == before


def test_no_command_writes_into_what_a_run_keeps(folder, tmp_path):
    before = content(folder)
    np.save(tmp_path / "a.npy", np.random.default_rng(0).random((3, 3)))
    for arguments in (
        ("report", folder, "--out", folder / "items"),
        ("report", folder, "--out", folder / "environment/figures"),
        ("stats", tmp_path / "a.npy", "--out", folder / "items"),
        ("compare", folder, tmp_path / "a.npy", "--out", folder / "quarantine"),
        ("tasks", "new", "mine", "--out", folder / "items/mine.yaml"),
        ("run", "--out", folder / "items/run", "--sets", "2", "--permutations", "2", "--queries", "2"),
        ("bench", "--out", folder / "study.yaml", "--quick"),
    ):
        error = called(*arguments)
        assert isinstance(error, ConfigError), arguments
        assert "is among what the run" in str(error)
    assert content(folder) == before


def test_beside_what_a_run_keeps_there_is_room(folder):
    before = content(folder)
    assert called("export", folder, "--out", folder / "answers.csv") is None
    assert called("report", folder, "--out", folder / "figures") is None
    assert (folder / "figures/report.json").is_file()
    assert before.items() <= content(folder).items()


# Patterns that walk a disk


def test_a_pattern_that_visits_too_much_is_refused(tmp_path):
    for name in range(30):
        (tmp_path / "a" / str(name)).mkdir(parents=True)
        (tmp_path / "a" / str(name) / "x.csv").write_text("a\n1\n")
    assert [path.name for path in matches(tmp_path, "a/1*/*.csv")] == ["x.csv"] * 11
    with pytest.raises(RunError, match=r"more than 50 names were looked at; give a pattern with fewer \*"):
        matches(tmp_path, "*/*/*.csv", most=50)
    assert matches(tmp_path, str(tmp_path / "a/2/*.csv")) == [tmp_path / "a/2/x.csv"]
    assert matches(tmp_path, "b/*.csv") == []


def test_a_task_whose_pattern_walks_the_disk_is_refused_in_a_moment(tmp_path, monkeypatch):
    from iclperm.tasks.sources import _matches

    for name in range(20):
        (tmp_path / str(name)).mkdir()
    monkeypatch.setattr(files.matches, "__defaults__", (10,))
    refused("more than 10 names were looked at", lambda: _matches(tmp_path, "*/*.csv", None), error=DataError)


# FORMAT


def flips(raw):
    """Every byte lost, and every byte with one bit changed that leaves no other version's number."""
    lost = [raw[:place] + raw[place + 1 :] for place in range(len(raw) - 1)]
    places = [(place, bit) for place in range(len(raw)) for bit in (0, 5)]
    turned = [raw[:place] + bytes([raw[place] ^ (1 << bit)]) + raw[place + 1 :] for place, bit in places]
    return [each for each in (*lost, *turned) if each.strip() != raw.strip()]


@of_the_bundled_model
def test_a_lost_or_flipped_byte_of_format_is_mended_by_the_same_study(folder, capsys):
    raw = (folder / "FORMAT").read_bytes()
    study, digest = study_of(folder), iclperm.open_run(folder).digest
    identity_of = json.loads((folder / "plan.json").read_text())
    damaged = [each for each in flips(raw) if not files.re.fullmatch(rb"iclperm-run [2-9]\n?", each)]
    assert len(damaged) > 35
    for each in damaged:
        (folder / "FORMAT").write_bytes(each)
        assert mend_format(folder, {"study": identity_of["study"]}), each
        assert (folder / "FORMAT").read_bytes() == raw
        assert each in [path.read_bytes() for path in (folder / "quarantine").iterdir()]
    (folder / "FORMAT").write_bytes(raw[1:])
    refused("FORMAT is damaged: .*; run the study again, which mends it", iclperm.open_run, folder, error=DamagedItem)
    assert "FORMAT is damaged" in audit.verify(folder).damage[0]
    found = iclperm.run(study, folder)
    assert (found.digest, found.report.num_quarantined) == (digest, 1)
    assert (folder / "FORMAT").read_bytes() == raw


@of_the_bundled_model
def test_the_mended_format_is_told_in_one_line(folder, capsys):
    (folder / "FORMAT").write_bytes(b"iclperm-rtn 1\n")
    with pytest.raises(SystemExit) as ended:
        main(["run", str(folder), "--mixed"])
    assert ended.value.code == 0
    assert "damaged files set aside and written anew: 1" in capsys.readouterr().out


def test_another_version_or_another_run_is_not_mended(folder):
    plan = json.loads((folder / "plan.json").read_text())
    for found in ("iclperm-run 2\n", "iclperm-run 10\n", "iclperm-runs 1\n"):
        (folder / "FORMAT").write_text(found)
        assert not mend_format(folder, {"study": plan["study"]})
        refused("has the format|study.yaml is damaged", iclperm.open_run, folder)
    (folder / "FORMAT").write_text("damaged")
    with pytest.raises(RunError, match="holds another run, whose FORMAT is damaged; give another folder"):
        mend_format(folder, {"study": {}})
    assert (folder / "FORMAT").read_text() == "damaged"


def test_a_folder_that_another_process_is_just_making_is_not_taken_for_a_damaged_one(tmp_path, monkeypatch):
    """Its plan comes to be there between two looks at it."""
    (tmp_path / "tmp").mkdir()
    looks = []

    def made_meanwhile(files):
        looks.append(files)
        (tmp_path / "plan.json").write_text("{}")
        return iter(())

    monkeypatch.setattr("iclperm.runs.folder._session_files", made_meanwhile)
    assert not mend_format(tmp_path, {"study": {}})
    assert looks


def test_where_the_number_itself_is_damaged_sessions_tell_the_version(folder):
    plan = json.loads((folder / "plan.json").read_text())
    run = RunFolder.open(folder)
    shutil.rmtree(folder / "environment", ignore_errors=True)
    for name in ("environment", "tmp"):
        run.files.make(folder / name)
    run.write_session("one", {"numerics": {}})
    (folder / "FORMAT").write_text("iclperm-run 3\n")  # a bit of its 1
    assert mend_format(folder, {"study": plan["study"]})
    assert (folder / "FORMAT").read_text() == "iclperm-run 1\n"
    (folder / "FORMAT").write_text("iclperm-run 3\n")
    (folder / "environment/two.json").write_text(json.dumps(sealed({"format": "iclperm-run 3"})))
    assert not mend_format(folder, {"study": plan["study"]})


def test_the_format_of_several_runs_is_mended(tmp_path):
    folder = tmp_path / "run"
    iclperm.run(Study(**STUDIES["selection"]), folder)
    study, digest = iclperm.open_run(folder).study, iclperm.open_run(folder).digest
    (folder / "FORMAT").write_bytes(b"iclperm-run 1\n")  # a letter was lost
    found = iclperm.run(study.model_copy(update={"out": None}), folder, mixed=True)
    assert (found.digest, found.report.num_quarantined) == (digest, 1)
    assert iclperm.open_run(folder).digest == digest


# Ends


def command(*arguments):
    return [sys.executable, "-P", "-c", "from iclperm.cli.main import main; main()", *map(str, arguments)]


def test_who_reads_one_line_gets_it_and_the_command_ends_well(folder):
    with subprocess.Popen(command("report", folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
    assert (folder / "report.json").is_file()


def test_a_full_standard_output_is_one_line_and_no_loss(folder):
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command("report", folder), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        "error: standard output cannot be written: no space left on device; what was computed is kept, the same "
        "command shows it"
    ]
    assert (folder / "report.json").is_file()


# Patterns that take for ever


class SlowWorker:
    """Takes four times its limit by the clock, as on a busy machine, and then is killed; honest where it is told."""

    def __init__(self):
        self.now, self.limits, self.takes = 0.0, [], None

    def call(self, _job, limit):
        self.limits.append(limit)
        self.now += 4 * limit if self.takes is None else self.takes
        if self.takes is None:
            raise Overtime("took more")
        return "read"


def test_slow_patterns_have_a_limit_for_the_whole_run():
    worker = SlowWorker()
    patience = answers._Patience(5.0, (60.0, 120.0), lambda: worker.now)
    worker.takes = 0.9  # an honest comparison of mathematics
    assert [patience.call(worker, {}) for _ in range(1_000)] == ["read"] * 1_000
    worker.takes = None
    for _ in range(1_000):
        with pytest.raises(Overtime):
            patience.call(worker, {})
    assert worker.limits == [5.0] * 1_003 + [0.25] * 60
    with pytest.raises(Overtime, match="slow for 120 seconds, and no more are waited for"):
        patience.call(worker, {})
    slow, worker.takes = answers._Patience(5.0, (60.0, 120.0), lambda: worker.now), 4.9  # just within the limit
    for _ in range(16):
        slow.call(worker, {})
    worker.limits.clear()
    slow.call(worker, {})
    assert worker.limits == [0.25]


@pytest.mark.parametrize(("patience", "last"), [((60.0, 120.0), "yes"), ((0.0, 0.0), None)])
def test_what_is_beyond_the_limit_of_a_run_is_given_up(patience, last):
    answer = Answer(field="a", check="exact", rules=[{"pattern": "^(a+)+$|yes"}])
    texts = ["a" * 40 + "!", "a" * 40 + "!", "yes"]
    with open_checker(answer, seconds=0.3, patience=patience) as checker:
        found = checker.judge(texts, ["yes"] * 3)
    assert [each.rule for each in found[:2]] == [answers.GIVEN_UP] * 2
    assert (found[2].answer, found[2].is_correct) == (last, last is not None)


def test_what_was_given_up_is_counted_and_said():
    from iclperm.studies.generation import generation

    empty = np.zeros((2, 2, 1, 3), int)
    found = generation(empty, empty, empty - 1, empty, empty, shots=[1], rules=[])
    assert not found.warnings
    assert "num_given_up" not in found.to_dict()
    told = replace(found, num_given_up=7)
    assert "the reading of 7 texts took too long and was given up" in told.warnings[0]
    assert told.to_dict()["num_given_up"] == 7
