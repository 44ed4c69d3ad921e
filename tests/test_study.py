"""The study: strict choices, YAML in and out."""

import pytest

from iclperm import IclpermError, Study
from iclperm.errors import ConfigError


def test_yaml_holds_every_choice_and_comes_back_equal(tmp_path):
    study = Study(shots=[0, 4], seed=7, on_overlong="drop")
    path = tmp_path / "study.yaml"
    path.write_text(study.to_yaml())
    assert Study.from_file(path) == study
    keys = {line.split(":")[0] for line in study.to_yaml().splitlines() if line[0].isalpha()}
    # these are written only where they are not the default
    unwritten = {"options", "balance", "plain", "attention", "layers", "pack_tokens", "budget", "rule", "tolerance"}
    unwritten |= {"adapter", "cells", "precision", "queries_per_ordering", "neighbours", "order"}
    assert keys == set(Study.model_fields) - unwritten


def test_shots_are_a_sorted_list_or_the_tasks_own():
    assert Study().shot_list(8) == (8,)
    assert Study(shots=3).shot_list(8) == (3,)
    assert Study(shots=[4, 0, 2]).shot_list(8) == (0, 2, 4)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"permutatoins": 3}, "a study has no key 'permutatoins'; did you mean 'permutations'?"),
        ({"zzz": 3}, "a study has no key 'zzz'; valid keys: kind, model"),
        ({"kind": "curves"}, "a study's key 'kind' is 'curves': input should be 'sensitivity'"),
        ({"sets": "10"}, "a study's key 'sets' is '10': input should be a valid integer"),
        ({"sets": True}, "a study's key 'sets' is True"),
        ({"sets": 0}, "a study's key 'sets' is 0: input should be greater than or equal to 1"),
        ({"shots": [1, 1]}, "a study's key 'shots' is [1, 1]: every number of shots should be listed once"),
        ({"shots": "x"}, "a study's key 'shots' is 'x': input should be a valid integer or a valid list"),
        ({"shots": [1, "x"]}, "a study's key 'shots.1' is 'x': input should be a valid integer"),
        ({"shots": -1}, "a study's key 'shots' is -1: input should be greater than or equal to 0"),
        (
            {"device": "quantum"},
            "a study's key 'device' is 'quantum': give auto, cpu, cuda, cuda:1, mps, xpu or balanced",
        ),
        ({"seed": -1}, "a study's key 'seed' is -1"),
        ({"on_overlong": "truncate"}, "a study's key 'on_overlong' is 'truncate'"),
    ],
)
def test_a_wrong_choice_is_one_line_naming_key_and_value(choices, message):
    with pytest.raises(ConfigError) as error:
        Study(**choices)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert isinstance(error.value, IclpermError)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sets: 3\nsets: 4\n", "the key 'sets' occurs twice"),
        ("shots: &k [1, 2]\nsets: *k\n", "aliases are not allowed"),
        pytest.param(f"seed: 1\nsets: 0x{'F' * 10_000}\n", "more than 64 bits (line 2); name", id="hexadecimal"),
        pytest.param(f"sets: {'9' * 5_000}\n", "more than 64 bits (line 1); name", id="digits"),
        pytest.param(f"sets: {'59:' * 2_000}59\n", "more than 64 bits (line 1); name", id="sexagesimal"),
        ("shots: " + "[" * 40 + "]" * 40, "nested deeper than 20 levels"),
        ("- 1\n", "must be a mapping"),
        ("sets: 2020-13-45\n", "is not valid YAML: month must be in 1..12"),
        ("sets: " + "1" * 5_000, "is not valid YAML"),
        ("sets: [\n", "is not valid YAML"),
        ("model: !!python/object/apply:os.system ['true']\n", "is not valid YAML"),
        ("task: no\n", "a study's key 'task' is False"),
        ("#" * 1_100_000, "larger than 1,048,576 bytes"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, message):
    path = tmp_path / "study.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        Study.from_file(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_missing_or_not_utf8_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        Study.from_file(tmp_path / "absent.yaml")
    (tmp_path / "latin.yaml").write_bytes("task: caf\xe9".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"is not UTF-8 \(byte 9\)"):
        Study.from_file(tmp_path / "latin.yaml")


def test_a_task_file_beside_the_study_file_is_found(tmp_path):
    (tmp_path / "own.yaml").write_text("name: own\n")
    (tmp_path / "study.yaml").write_text("task: own.yaml\n")
    assert Study.from_file(tmp_path / "study.yaml").task == str(tmp_path / "own.yaml")
