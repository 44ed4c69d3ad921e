"""What is written goes where nothing else is: no report over another run's, no table over a folder."""

import json

import numpy as np
import pytest
from tiny import byte_level_tokenizer, make_model, make_task

import iclperm
from iclperm import Study
from iclperm.cli.main import main
from iclperm.errors import ConfigError
from iclperm.external import load


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    model = str(make_model(place / "model", byte_level_tokenizer()))
    study = Study(model=model, task=str(make_task(place)), sets=2, permutations=2, shots=[0, 3], queries=4)
    for seed, name in enumerate(("one", "other")):
        iclperm.run(study.model_copy(update={"seed": seed}), place / name).write_report()
    np.save(place / "answers.npy", np.array([0, 1, 1, 0, 1, 1]))
    return place


@pytest.mark.parametrize("command", ["report", "stats", "compare"])
def test_a_report_never_replaces_that_of_another_run(runs, command, capsys):
    other, one = runs / "other", runs / "one"
    before = (other / "report.json").read_bytes()
    given = {"report": [one], "stats": [runs / "answers.npy"], "compare": [one, other]}[command]
    with pytest.raises(SystemExit) as ended:
        main([command, *map(str, given), "--out", str(other)])
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert f"{other} is the folder of another run" in told
    assert "name another folder" in told
    assert (other / "report.json").read_bytes() == before


def test_a_report_goes_into_its_own_run_and_elsewhere(runs):
    (runs / "linked").symlink_to(runs / "one")
    for folder in (runs / "one", runs / "linked", runs / "one/more", runs / "elsewhere"):
        paths = iclperm.open_run(runs / "one").write_report(folder)
        assert json.loads(paths[-1].read_text())["kind"] == "sensitivity"


def test_an_export_takes_endings_in_any_case_and_names_a_folder(runs, tmp_path):
    run = iclperm.open_run(runs / "one")
    assert run.export(tmp_path / "X.CSV").read_bytes() == run.export(tmp_path / "x.csv").read_bytes()
    (tmp_path / "d.csv").mkdir()
    with pytest.raises(ConfigError, match=r"d\.csv is a folder; name a file that ends in \.csv"):
        run.export(tmp_path / "d.csv")


def table(path, sets):
    rows = [f"{name},{query},{query % 2}" for query in range(4) for name in sets]
    path.write_text("\n".join(["set,query,correct", *rows]) + "\n")
    return path


def test_a_number_spelled_in_two_ways_is_one_name_and_a_padded_one_another(tmp_path):
    mixed = [("1", "1.0")[query % 2] + f",{query},{query % 2}" for query in range(4)]
    mixed += [f"2,{query},1" for query in range(4)]
    (tmp_path / "a.csv").write_text("\n".join(["set,query,correct", *mixed]) + "\n")
    found = load(tmp_path / "a.csv")
    assert (found.values.shape, found.state) == ((2, 1, 4), None)
    assert load(table(tmp_path / "b.csv", ["7", "007"])).values.shape[0] == 2
    close = ["0.123456789012345678901", "0.123456789012345678902"]
    assert load(table(tmp_path / "c.csv", close)).values.shape[0] == 2
