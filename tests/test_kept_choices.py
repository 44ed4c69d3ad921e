"""What a stage of a study of several runs chose is kept in its folder: made once, made again where it is lost."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tiny import make_model, make_task

import iclperm
from iclperm.cli import main as cli
from iclperm.errors import DamagedItem
from iclperm.report.parts import plain
from iclperm.runs.parts import PartFiles
from iclperm.studies import choosing, kept
from iclperm.study.study import Study

CHOICES = {"kind": "selection", "sets": 2, "permutations": 3, "shots": 3, "select": 2, "queries": 6, "dev_queries": 6}


@pytest.fixture
def study(tmp_path, monkeypatch):
    make_model(tmp_path / "model")
    make_task(tmp_path, data={"train": "train.jsonl", "test": "test.jsonl", "dev": 0.3})
    monkeypatch.chdir(tmp_path)
    return Study(model="model", task="colours.yaml", **CHOICES)


@pytest.fixture
def run(study):
    return iclperm.run(study, "run")


def call(*arguments):
    done = CliRunner().invoke(cli.cli, [*map(str, arguments)], standalone_mode=False)
    assert done.exception is None
    return done.return_value or 0, done.stdout


def entries():
    return json.loads(Path("run/choices.json").read_text())["choices"]


def refuse(*_, **__):
    raise AssertionError("not to be called")


def test_a_choice_is_kept_as_it_was_made(run, study):
    (entry,) = entries()
    assert entry["stage"] == "source"
    made = choosing.choose(run.runs["source"], study.select)
    assert entry["choice"] == plain(made)
    assert [*entry["choice"]["scores"]] == [*made.scores]  # tables go by this order
    read = choosing.Chosen.of(entry["choice"])
    for there, here in ((made, read), (run.choice, read)):
        assert plain(there) == plain(here)
        np.testing.assert_array_equal(there.rows, here.rows)
        np.testing.assert_array_equal(there.num_labels, here.num_labels)
        for name, score in there.scores.items():
            np.testing.assert_array_equal(score.values, here.scores[name].values)
            np.testing.assert_array_equal(score.se, here.scores[name].se)
    in_memory = iclperm.run(study)
    assert in_memory.report_content() == run.report_content() == iclperm.open_run("run").report_content()
    assert plain(in_memory.choice) == plain(run.choice)


def test_a_choice_is_made_once(run, study, monkeypatch):
    content = run.report_content()
    monkeypatch.setattr(choosing, "choose", refuse)
    assert iclperm.open_run("run").report_content() == content
    assert iclperm.run(study, "run").report_content() == content
    with monkeypatch.context() as patch:
        patch.setattr(PartFiles, "read", refuse)  # neither of them needs an answer
        assert [*iclperm.status("run")] == ["source", "chosen"]
        assert call("status", "run")[0] == 0
    assert [*iclperm.verify("run")] == ["source", "chosen"]


def test_one_that_is_gone_is_made_again(run, study):
    raw, content = Path("run/choices.json").read_bytes(), run.report_content()
    Path("run/choices.json").unlink()  # as in folders of before there were such files
    assert iclperm.open_run("run").report_content() == content
    for command in ("status", "verify", "report"):
        assert call(command, "run")[0] == 0
    assert not Path("run/choices.json").exists()
    assert iclperm.run(study, "run").digest == run.digest
    assert Path("run/choices.json").read_bytes() == raw


def damages(raw):
    place = raw.index(b'"rows"') + 20
    yield "a byte", raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :]
    yield "cut off", raw[: len(raw) // 2]
    yield "empty", b""
    yield "no mapping", b"[]\n"
    yield "no text", b"\xff\xfe"


def test_damage_is_told_and_mended_by_the_next_run(run, study):
    path, content = Path("run/choices.json"), run.report_content()
    raw = path.read_bytes()
    for number, (name, damaged) in enumerate(damages(raw)):
        path.write_bytes(damaged)
        code, printed = call("verify", "run")
        assert (code, "run/choices.json is damaged" in printed) == (1, True), name
        assert printed.count("whole, ") == 2
        (about,) = iclperm.verify("run")["choices.json"].damage
        assert about.startswith("run/choices.json is damaged: its content is not what its digest says")
        assert [found["damage"] for found in json.loads(call("verify", "run", "--json")[1])] == [[], [], [about]]
        assert call("status", "run")[0] == 0
        assert iclperm.open_run("run").report_content() == content
        assert path.read_bytes() == damaged
        assert iclperm.run(study, "run").digest == run.digest
        assert path.read_bytes() == raw
        aside = "choices.json" if number == 0 else f"choices.json.{number}"
        assert Path("run/quarantine", aside).read_bytes() == damaged
        assert call("verify", "run")[0] == 0


def test_a_folder_in_its_place_is_damage_too(run):
    Path("run/choices.json").unlink()
    Path("run/choices.json").mkdir()
    assert kept.damage(Path("run"))
    assert iclperm.open_run("run").digest == run.digest


def test_a_source_that_has_grown_chooses_anew_and_the_folder_knows_both(run, study):
    (before,) = entries()
    grown = iclperm.run(study.model_copy(update={"sets": 4}), "run", extend=True)
    assert [entry["stage"] for entry in entries()] == ["source", "source"]
    assert entries()[0] == before
    assert np.shape(entries()[1]["choice"]["rows"])[0] == 2 * np.shape(before["choice"]["rows"])[0]
    assert len([*Path("run").glob("chosen-*")]) == 2
    assert iclperm.open_run("run").digest == grown.digest


def test_other_statistics_are_another_choice(run, study):
    iclperm.run(study.model_copy(update={"normalize": "mean"}), "run")
    assert len(entries()) == 2
    iclperm.run(study, "run")
    assert len(entries()) == 2


def test_what_a_choice_is_made_from_is_the_answers_and_the_study(run, study):
    source = {"source": (Path("run/source"), study.of_kind("curve"))}
    origin = kept.made_from(study, source)
    assert origin == kept.made_from(study.model_copy(update={"device": "cpu", "out": "x"}), source)
    assert origin != kept.made_from(study.model_copy(update={"select": 3}), source)
    (item,) = Path("run/source/items").iterdir()
    item.rename(item.with_name("000000-0123456789abcdef.parquet"))
    assert origin != kept.made_from(study, source)
    with pytest.raises(DamagedItem):
        iclperm.open_run("run")
