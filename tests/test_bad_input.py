"""Bad input, through the command line: one line that names value and remedy, a code, and nothing that is there lost."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.numpy import load_file, save_file
from tiny import LABELS, byte_level_tokenizer, dummy_prefix_tokenizer, make_model, make_rows, make_task, write_rows
from tokenizers import processors

from iclperm.cli import main as cli

Fragments = Sequence[str]
GROWTH = ("--sets", 3, "--extend")


class Said(NamedTuple):
    code: int
    out: str
    err: str


class Place:
    """A study with its task, data and model in one folder, beside a finished run of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"

    def study(self, changes: dict[Any, Any]) -> None:
        self._change("study.yaml", changes)

    def task(self, changes: dict[Any, Any]) -> None:
        self._change("colours.yaml", changes)

    def config(self, **changes: Any) -> None:
        path = self.folder / "model/config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def write(self, name: str, content: bytes) -> None:
        (self.folder / name).write_bytes(content)

    def _change(self, name: str, changes: dict[Any, Any]) -> None:
        path = self.folder / name
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes, sort_keys=False))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    make_task(folder)
    make_model(folder / "model", byte_level_tokenizer())
    study = {"model": "model", "task": "colours.yaml", "sets": 2, "permutations": 2, "shots": [0, 3], "queries": 6}
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    with pytest.raises(SystemExit) as exit_:
        cli.main(["run", str(folder / "study.yaml"), "--out", str(folder / "run"), "--json"])
    assert exit_.value.code == 0
    return folder


@pytest.fixture
def place(tmp_path, finished) -> Place:
    return Place(shutil.copytree(finished, tmp_path / "place"))


@pytest.fixture
def call(capsys) -> Callable[..., Said]:
    def run(*arguments: Any) -> Said:
        with pytest.raises(SystemExit) as exit_:
            cli.main([str(argument) for argument in arguments])
        return Said(exit_.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def rerun(call, place) -> Callable[..., Said]:
    """Runs the study of the place into the run that is there."""
    return lambda *arguments: call("run", place.folder / "study.yaml", "--out", place.run, "--json", *arguments)


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def assert_refused(said: Said, code: int, fragments: Fragments) -> None:
    assert said.code == code, said.err
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert "error: unexpected" not in said.err
    for fragment in fragments:
        assert fragment in said.err


def refused_and_harmless(
    rerun: Callable[..., Said], place: Place, code: int, fragments: Fragments, *arguments: str
) -> None:
    """The run that is there stays as it is; a study that is another one is given a folder of its own."""
    before = contents(place.run)
    assert_refused(rerun(*arguments), code, fragments)
    assert contents(place.run) == before
    assert not (place.folder / "new").exists()


def test_the_study_of_these_tests_is_sound(rerun, place):
    before = contents(place.run)
    said = rerun()
    assert (said.code, said.err) == (0, "")
    assert json.loads(said.out)["run"]["num_parts_resumed"] > 0
    assert {name: digest for name, digest in contents(place.run).items() if name in before} == before


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"permutatoins": 3}, ["study.yaml: a study has no key 'permutatoins'; did you mean 'permutations'?"]),
        ({"self": 3}, ["study.yaml: a study has no key 'self'; did you mean 'select'?"]),
        ({"zzz": 3}, ["study.yaml: a study has no key 'zzz'; valid keys: kind, model"]),
        ({None: 3}, ["study.yaml: the key None is not text; write a name in its place"]),
        ({True: 3}, ["study.yaml: the key True is not text", "YAML reads yes, no, on and off as booleans"]),
        ({"task": "colors"}, ["there is no task 'colors'; built in: ag_news, dbpedia, ", "or give a task file's path"]),
        ({"task": False}, ["a study's key 'task' is False", "put it in quotes"]),
        ({"kind": "sensitvity"}, ["a study's key 'kind' is 'sensitvity': input should be 'sensitivity'"]),
        ({"shots": "some"}, ["a study's key 'shots' is 'some': input should be a valid integer or a valid list or"]),
        ({"shots": 0}, ["sets is 2, but no demonstrations make only one set; set 'sets' to 1"]),
        ({"shots": 2, "permutations": 3}, ["permutations is 3, but 2 demonstrations have only 2 orders; lower"]),
        ({"dev_queries": 4}, ["task 'colours' has no 'dev' data; name a file, or a share of train, under 'data'"]),
        ({"revision": "main"}, ["revision is 'main', but the model", "is a folder", "leave it out"]),
    ],
)
def test_a_wrong_choice(rerun, place, changes, fragments):
    place.study(changes)
    refused_and_harmless(rerun, place, 2, fragments, "--out", str(place.folder / "new"))


@pytest.mark.parametrize(
    ("keep", "shots", "fragments"),
    [
        ({}, 70, ["task 'colours': class 'Red' has 20 train examples, but k = 70 needs 23 of it; lower the shots"]),
        (
            {"Blue": 0},
            3,
            ["task 'colours': class 'Blue' has 0 train examples, but k = 3 needs 1 of it", "add examples"],
        ),
        (
            {"Blue": 1, "Red": 1, "Green": 1},
            3,
            ["2 sets were asked for, but there are only 1 different", "lower 'sets'"],
        ),
    ],
)
def test_too_few_demonstrations(rerun, place, keep, shots, fragments):
    rows = make_rows(1, 60)
    left = dict.fromkeys(LABELS, 20) | keep
    kept = []
    for row in rows:
        if left[row["label"]]:
            left[row["label"]] -= 1
            kept.append(row)
    write_rows(place.folder / "train.jsonl", kept)
    place.study({"shots": shots})
    refused_and_harmless(rerun, place, 1, fragments, "--out", str(place.folder / "new"))


def test_an_absent_class_of_queries(rerun, place):
    write_rows(place.folder / "test.jsonl", [row for row in make_rows(2, 30) if row["label"] != "Green"])
    fragments = ["task 'colours': class 'Green' has no usable test examples, but 6 queries need 2 of it; add examples"]
    refused_and_harmless(rerun, place, 1, fragments)


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"labels": ["Red", "", "Blue"]}, ["'labels.1' is ''", "at least 1 character"]),
        ({"labels": ["Red", " ", "Blue"]}, ["a label word is blank; give every label a word"]),
        ({"labels": ["Red", "Green", "Red "]}, ["the label word 'Red' occurs twice; give every label its own word"]),
        ({"labels": ["Red"]}, ["'labels' is ['Red']", "at least 2 items"]),
        ({"labels": {"Red": "R", "Green": "G", "Blue": "R"}}, ["the label word 'R' occurs twice"]),
        ({"labels": {0: "R", "0": "G", "Blue": "B"}}, ["occurs twice"]),
        (
            {"labels": [True, False]},
            ["'labels.0' is True", "YAML reads yes, no, on and off as booleans: put it in quotes"],
        ),
        ({"labels": {False: "Red", True: "Blue"}}, ["YAML reads yes, no, on and off as booleans: put it in quotes"]),
        ({"labels": ["Red", 2]}, ["'labels.1' is 2: input should be a valid string; put it in quotes"]),
        (
            {"continuation": "{{ label[9:] }}"},
            ["the template 'continuation' makes the label 'Red' blank; show {{ label"],
        ),
        ({"continuation": " {{ label[9:] }}x"}, ["makes ' x' of both 'Red' and 'Green'; let it tell them apart"]),
        ({"labels": ["Red", "RED"], "continuation": " {{ label | lower }}"}, ["makes ' red' of both 'Red' and 'RED'"]),
    ],
)
def test_wrong_labels(rerun, place, changes, fragments):
    place.task(changes)
    refused_and_harmless(rerun, place, 2, ["colours.yaml: ", *fragments])


def test_a_blank_label_in_the_data(rerun, place):
    write_rows(place.folder / "train.jsonl", [*make_rows(1, 9), {"text": "x", "label": " "}])
    refused_and_harmless(rerun, place, 1, ["train.jsonl:10: 'label' is blank; the labels are Red, Green, Blue"])


def long_queries(place: Place) -> None:
    rows = make_rows(2, 6)
    rows[4]["text"] += " and more of it" * 20
    write_rows(place.folder / "test.jsonl", rows)
    place.config(max_position_embeddings=120)


def test_a_prompt_over_the_context_window(rerun, place):
    long_queries(place)
    fragments = [
        "1 of 6 queries make prompts longer than the context window of 120 tokens",
        "lower 'shots' or set on_overlong: drop",
    ]
    refused_and_harmless(rerun, place, 1, fragments)


def test_a_query_over_the_context_window_is_dropped_on_demand(call, rerun, place):
    long_queries(place)
    place.study({"on_overlong": "drop"})
    refused_and_harmless(rerun, place, 1, ['study.on_overlong is "error" there and "drop" here; give another folder'])
    planned = json.loads(call("plan", place.folder / "study.yaml", "--json").out)
    assert (planned["num_overlong"], planned["num_queries"]) == (1, 6)
    said = call("run", place.folder / "study.yaml", "--out", place.folder / "another", "--json")
    assert (said.code, said.err) == (0, "")
    assert json.loads(said.out)["sensitivity"]["num_queries"] == 5


def test_every_prompt_over_the_context_window(rerun, place):
    place.config(max_position_embeddings=10)
    place.study({"on_overlong": "drop"})
    fragments = ["queries makes some prompt that is longer than the context window of 10 tokens", "lower 'shots'"]
    refused_and_harmless(rerun, place, 1, fragments, "--out", str(place.folder / "new"))


GOOD = "".join(json.dumps(row) + "\n" for row in make_rows(1, 2)).encode()


@pytest.mark.parametrize(
    ("name", "content", "fragments"),
    [
        (
            "a.jsonl",
            GOOD + b'{"text": "caf\xe9", "label": "Red"}\n',
            ["a.jsonl:3: not UTF-8", "save the file as UTF-8"],
        ),
        ("a.jsonl", GOOD + b'{"text": "a", \n', ["a.jsonl:3: not one JSON object a line", "repair the row"]),
        (
            "a.jsonl",
            GOOD + b'["a", "Red"]\n',
            ["a.jsonl:3: a JSON object is needed, not list; write one object a line"],
        ),
        ("a.jsonl", GOOD + b'{"text": "a", "text": "b", "label": "Red"}\n', ["a.jsonl:3: ", "'text' occurs twice"]),
        ("a.jsonl", GOOD + b'{"label": "Red"}\n', ["a.jsonl:3: the column 'text' is missing", "repair the row"]),
        ("a.jsonl", GOOD + b'{"text": "a\\u0000", "label": "Red"}\n', ["a.jsonl:3: holds a NUL character; remove it"]),
        ("a.jsonl", GOOD + b'{"text": "\\ud800", "label": "Red"}\n', ["a.jsonl:3: holds a lone surrogate; repair the"]),
        (
            "a.jsonl",
            GOOD + b'{"text": "' + b"a" * (1 << 20) + b'"}\n',
            ["a.jsonl:3: the row has 10485", "at most 1048576"],
        ),
        ("a.jsonl", GOOD + b'{"text": "a", "label": "Pink"}\n', ["a.jsonl:3: 'label' is 'Pink'; the labels are Red,"]),
        ("a.jsonl", b"", ["a.jsonl: holds no rows; give data with at least one"]),
        ("a.csv", b"text,label\nx,Red\ncaf\xe9,Red\n", ["a.csv:3: not UTF-8", "save the file as UTF-8"]),
        ("a.csv", b"\xff\xfet\x00\xd8", ["a.csv:1: not utf-16", "name its encoding"]),
        (
            "a.csv",
            b"text,label\r\nx,Red\r\ny\r\n",
            ["a.csv:3: values in the row: 1, columns in the header: 2; repair the"],
        ),
        ("a.csv", b'text,label\nx,Red\n"y,Red\n', ["a.csv:3: not valid CSV", "check its quotes"]),
        ("a.csv", b"text;label\nx;Red\n", ["a.csv:1: ';' stands between its columns", "add delimiter: ';'"]),
        ("a.csv", b"text,label,text\nx,Red,y\n", ["a.csv:1: the column name 'text' is blank or occurs twice; give"]),
        ("a.csv", b"text,label\n", ["a.csv: holds no rows; give data with at least one"]),
        ("a.csv", b"," * 400_000, ["a.csv:1: the column name '' is blank or occurs twice"]),
        ("a.parquet", b"PAR1 and no more", ["a.parquet: is damaged or not Parquet", "make or download it anew"]),
        ("a.xlsx", b"x", ["a.xlsx: cannot be read as data; give a .jsonl, .csv, .tsv, .parquet file"]),
    ],
)
def test_a_damaged_data_file(rerun, place, name, content, fragments):
    place.write(name, content)
    place.task({"data": {"train": name, "test": "test.jsonl"}})
    refused_and_harmless(rerun, place, 1, [str(place.folder), *fragments])


@pytest.mark.parametrize(
    ("columns", "fragments"),
    [
        ({"text": ["a", "b\0"], "label": ["Red", "Red"]}, ["a.parquet:row 2: holds a NUL character; remove it"]),
        (
            {"text": ["a", None], "label": ["Red", "Red"]},
            ["a.parquet:row 2: the column 'text' holds no value; fill it"],
        ),
        ({"text": ["a", "b"], "label": ["Red", "Pink"]}, ["a.parquet:row 2: 'label' is 'Pink'; the labels are Red"]),
        ({"text": [b"\xff"], "label": ["Red"]}, ["a.parquet: the column 'text' holds binary", "convert it"]),
        ({"text": ["a"], "colour": ["Red"]}, ["a.parquet:row 1: the column 'label' is missing", "repair the row"]),
    ],
)
def test_a_parquet_file_that_does_not_fit(rerun, place, columns, fragments):
    pq.write_table(pa.table(columns), place.folder / "a.parquet")
    place.task({"data": {"train": "a.parquet", "test": "test.jsonl"}})
    refused_and_harmless(rerun, place, 1, fragments)


def test_a_parquet_file_with_a_column_twice(rerun, place):
    pq.write_table(pa.table([["a"], ["Red"], ["Red"]], names=["text", "label", "label"]), place.folder / "a.parquet")
    place.task({"data": {"train": "a.parquet", "test": "test.jsonl"}})
    refused_and_harmless(
        rerun, place, 1, ["a.parquet: the column 'label' occurs twice; give every column its own name"]
    )


def test_text_of_a_parquet_file_that_is_not_utf8(rerun, place):
    pq.write_table(pa.Table.from_pylist(make_rows(1, 60)), place.folder / "a.parquet", use_dictionary=False)
    raw = (place.folder / "a.parquet").read_bytes()
    place.write("a.parquet", raw.replace(b"The apple", b"The appl\xff"))
    place.task({"data": {"train": "a.parquet", "test": "test.jsonl"}})
    refused_and_harmless(rerun, place, 1, ["a.parquet: is damaged", "make or download it anew"])


def test_data_that_is_not_there(rerun, place):
    place.study({"data": "nowhere"})
    refused_and_harmless(rerun, place, 1, ["nowhere: is not a folder; give the folder that holds train.csv, test.csv"])


@pytest.mark.parametrize(
    ("template", "code", "fragments"),
    [
        ("{{ text.__class__.__mro__ }}", 1, ["train.jsonl:1: ", "access to attribute '__class__'"]),
        ("{{ text.format.__globals__ }}", 1, ["train.jsonl:1: ", "access to attribute '__globals__'"]),
        ("{{ cycler.__init__ }}{{ text }}", 2, ["the template 'query' uses 'cycler'; it may use text"]),
        ("{% include '/etc/passwd' %}{{ text }}", 2, ["the template 'query' uses 'Include', which is not allowed"]),
        ("{% set x = text * 9 %}{{ x }}", 2, ["the template 'query' uses 'Mul', which is not allowed"]),
        (
            "{% set x = text %}" + "{% set x = x ~ x %}" * 40 + "{{ x }}",
            2,
            ["puts texts together in a 'set', which could grow"],
        ),
        ("{{ text * 1000000000 }}", 2, ["the template 'query' uses 'Mul', which is not allowed"]),
        ("{{ text" + "|list|string" * 9 + " }}", 1, ["train.jsonl:1: ", "it holds more than 1048576 characters"]),
        ("{{ text" + "|join(text)" * 5 + " }}", 1, ["train.jsonl:1: ", "it joins more than 1048576 characters"]),
        ("{{ " + "(" * 9_000 + "text" + ")" * 9_000 + " }}", 2, ["'query' is not valid: it is nested too deeply; rep"]),
        ("{{ text | nosuch }}", 2, ["'query' is not valid: No filter named 'nosuch'", "repair it"]),
        ("{{ text | truncate(1) }}", 1, ["train.jsonl:1: the template 'query' cannot be rendered: expected length"]),
        ("{{ 4 is divisibleby 0 }}{{ text }}", 1, ["train.jsonl:1: the template 'query' cannot be rendered"]),
        ("{{ txet }}", 2, ["the template 'query' uses 'txet'; it may use text"]),
        ("{{ text }} is {{ label }}", 2, ["the template 'query' uses 'label'; it may use text"]),
        ("Answer:", 2, ["the template 'query' shows no field, so all queries are the same; write {{ }} around"]),
        ("{% if text", 2, ["the template 'query' is not valid", "repair it"]),
    ],
)
def test_a_hostile_or_broken_template(rerun, place, template, code, fragments):
    place.task({"query": template})
    refused_and_harmless(rerun, place, code, fragments)


@pytest.mark.parametrize("sign", ["~", "+"])
def test_a_template_that_adds_up_without_bound(rerun, place, sign):
    place.task({"query": "{{ (" + sign.join(["text"] * 90) + ") | length }}{{ text }}"})
    rows = make_rows(1, 60)
    write_rows(place.folder / "train.jsonl", [*rows, {**rows[0], "text": "a" * 100_000}])
    fragments = ["train.jsonl:61: the template 'query' cannot be rendered: it ", " more than 1048576 characters"]
    refused_and_harmless(rerun, place, 1, fragments)


def test_a_memory_budget_that_no_prompt_fits(call, place):
    place.study({"memory_budget": 1_000})
    fragments = ["memory_budget is 1000 bytes (0.0 MiB), but ", "raise it, or use fewer shots, a smaller model"]
    for out in ((), ("--out", place.folder / "new")):
        command = "run" if out else "plan"
        assert_refused(call(command, place.folder / "study.yaml", *out, "--json"), 2, fragments)


def test_a_template_without_end(rerun, place):
    place.task({"query": "{{ 1.5 | round(400000000, 'ceil') }}{{ text }}"})  # one number, and hours for it
    fragment = "train.jsonl:1: the template 'query' cannot be rendered: it takes more than 5 seconds"
    refused_and_harmless(rerun, place, 1, [fragment])


@pytest.mark.parametrize("name", ["study.yaml", "colours.yaml"])
@pytest.mark.parametrize(
    ("content", "fragments"),
    [
        (b"name: !!python/object/apply:os.system ['true']\n", ["is not valid YAML", "python/object/apply"]),
        (b"name: &a x\ntask: *a\n", ["is not valid YAML: aliases are not allowed; write the value out"]),
        (b"name: x\nname: y\n", ["is not valid YAML: the key 'name' occurs twice (line 1)"]),
        (b"name: " + b"[" * 50 + b"]" * 50 + b"\n", ["nested deeper than 20 levels"]),
        (b"#" * ((1 << 20) + 1), ["cannot be read: it is larger than 1,048,576 bytes"]),
        (b"name: caf\xe9\n", ["is not UTF-8 (byte 9); save it as UTF-8"]),
        (b'name: "a\\0"\n', ["is not valid YAML: a NUL character (line 1); remove it"]),
        (b"name: [\n", ["is not valid YAML"]),
        (b"- name\n", ["must be a mapping of keys to values; write lines such as 'seed: 1'"]),
        (b"", ["must be a mapping of keys to values; write lines such as 'seed: 1'"]),
    ],
)
def test_hostile_or_broken_yaml(rerun, place, name, content, fragments):
    place.write(name, content)
    refused_and_harmless(rerun, place, 2, [f"{name}: ", *fragments])


def test_yaml_of_very_many_keys_is_read_in_a_moment(rerun, place):
    lines = "".join(f"k{number}: 0\n" for number in range(20_000))
    place.write("study.yaml", lines.encode())
    refused_and_harmless(rerun, place, 2, ["study.yaml: a study has no key 'k0'"])


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"seed": 1}, ["study.seed is 0 there and 1 here"]),
        ({"shots": [0, 3, 4]}, ["study.shots is [0, 3] there and [0, 3, 4] here"]),
        ({"resample": "per_k"}, ['study.resample is "none" there and "per_k" here']),
        ({"dtype": "bfloat16"}, ['study.dtype is "float32" there and "bfloat16" here']),
    ],
)
def test_the_folder_of_another_study(rerun, place, changes, fragments):
    place.study(changes)
    refused_and_harmless(rerun, place, 1, [f"{place.run} holds another run: ", *fragments, "give another folder"])


def test_the_folder_of_other_data(rerun, place):
    rows = make_rows(1, 60)
    write_rows(place.folder / "train.jsonl", [{**rows[0], "label": "Blue"}, *rows[1:]])
    refused_and_harmless(
        rerun, place, 1, ["another run: the data has changed since (its train rows); give another folder"]
    )


def test_the_folder_of_another_wording(rerun, place):
    place.task({"instruction": "Name the colour."})
    refused_and_harmless(
        rerun, place, 1, ["another run: the wording of the task has changed since; give another folder"]
    )


def test_the_folder_of_another_model(rerun, place):
    weights = load_file(place.folder / "model/model.safetensors")
    save_file({name: weight + 1 for name, weight in weights.items()}, place.folder / "model/model.safetensors")
    refused_and_harmless(rerun, place, 1, ["another run: the model has changed since; give another folder"])


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({"sets": 3}, "holds a smaller run: sets is 2 there and 3 here; add --extend to let it grow (in Python"),
        ({"queries": 3}, "holds a larger run: queries is 6 there and 3 here; ask for at least that, or give another f"),
    ],
)
def test_the_folder_of_another_size(rerun, place, size, message):
    place.study(size)
    refused_and_harmless(rerun, place, 1, [message])


def test_a_folder_of_other_files(call, place):
    folder = place.folder / "mine"
    folder.mkdir()
    (folder / "thesis.tex").write_text("all of it")
    before = contents(folder)
    said = call("run", place.folder / "study.yaml", "--out", folder, "--json")
    assert_refused(said, 1, [f"{folder} holds other files; give a new or empty folder"])
    assert contents(folder) == before


def test_a_file_in_the_way_of_the_folder(call, place):
    (place.folder / "file").write_text("mine")
    for out in ("file", "file/run"):
        said = call("run", place.folder / "study.yaml", "--out", place.folder / out, "--json")
        assert_refused(said, 3, [f"write to {place.folder / out}: ", f"; move {place.folder / 'file'} elsewhere"])
    assert (place.folder / "file").read_text() == "mine"


def test_a_folder_that_may_not_be_written(rerun, place, monkeypatch):
    before = contents(place.run)
    opened = os.open

    def read_only(path, flags, *rest, dir_fd=None):
        whole = Path(path) if dir_fd is None else Path(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
        if place.run in whole.parents and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, flags, *rest, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", read_only)
    fragments = [f"cannot write to {place.run}: permission denied; make it writable or give another", "to continue"]
    assert_refused(rerun(*GROWTH), 3, fragments)
    assert contents(place.run) == before


@pytest.mark.parametrize("num_written", [0, 1, 4, 8])
def test_a_full_disk(call, rerun, place, monkeypatch, num_written):
    before = contents(place.run)
    syncs = iter(range(1_000))
    synced = os.fsync

    def full(descriptor):
        if next(syncs) >= num_written:
            raise OSError(errno.ENOSPC, "No space left on device")
        synced(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    said = rerun(*GROWTH)
    fragments = [f"cannot write to {place.run}: no space left on device; make room", "run the same command to continue"]
    assert_refused(said, 3, fragments)
    monkeypatch.undo()
    after = contents(place.run)
    kept = {name: digest for name, digest in before.items() if name != "study.yaml"}
    assert {name: after[name] for name in kept} == kept
    assert not [name for name in after if name.startswith("tmp/") and not name.endswith(".lock")]
    digest = json.loads(rerun(*GROWTH).out)["digest"]
    unbroken = call("run", place.folder / "study.yaml", "--out", place.folder / "fresh", "--sets", 3, "--json")
    assert json.loads(unbroken.out)["digest"] == digest


def test_a_tokenizer_whose_ids_are_out_of_range(rerun, place):
    place.config(vocab_size=50)
    fragments = ["is out of range: the model has 50 token ids", "is this the own tokenizer of"]
    refused_and_harmless(rerun, place, 1, fragments)


def test_a_tokenizer_with_another_bos(rerun, place):
    place.config(bos_token_id=1)
    fragments = [
        "the tokenizer begins with BOS id 0, but config.json says 1",
        "is this the own tokenizer of",
        "correct",
    ]
    refused_and_harmless(rerun, place, 1, fragments)


def test_a_tokenizer_that_puts_bos_twice(rerun, place):
    tokenizer = byte_level_tokenizer()
    twice = processors.TemplateProcessing(single="<s> <s> $A", special_tokens=[("<s>", 0)])
    tokenizer.backend_tokenizer.post_processor = twice
    tokenizer.save_pretrained(place.folder / "model")
    refused_and_harmless(rerun, place, 1, ["puts BOS (id 0) in front of a prompt twice; repair its settings"])


def test_a_tokenizer_of_another_language(rerun, place):
    dummy_prefix_tokenizer().save_pretrained(place.folder / "model")
    foreign = str.maketrans({chr(sign): chr(0x410 + sign % 32) for sign in range(65, 123)})
    for split in ("train", "test"):
        rows = [json.loads(line) for line in (place.folder / f"{split}.jsonl").read_text().splitlines()]
        write_rows(place.folder / f"{split}.jsonl", [{**row, "text": row["text"].translate(foreign)} for row in rows])
    refused_and_harmless(rerun, place, 1, ["of the queries' tokens are unknown to the tokenizer; is this the own"])


def test_labels_that_the_tokenizer_cannot_tell_apart(rerun, place):
    dummy_prefix_tokenizer().save_pretrained(place.folder / "model")
    place.task({"labels": {"Red": "東", "Green": "西", "Blue": "Blue"}})
    refused_and_harmless(rerun, place, 1, ["the labels ' 東' and ' 西' have the same tokens; change one label's word"])


def test_a_special_token_in_the_data(rerun, place):
    rows = make_rows(2, 30)
    write_rows(place.folder / "test.jsonl", [{**row, "text": f"{row['text']} </s>"} for row in rows])
    refused_and_harmless(rerun, place, 1, ["holds a special token of this tokenizer; remove it from data or template"])


@pytest.mark.parametrize(
    ("file", "content", "fragments"),
    [
        ("config.json", b"[]", ["config.json", "give a model folder"]),
        ("config.json", b"{", ["config.json"]),
        ("tokenizer.json", b"{", ["tokenizer.json' cannot be read", "save or fetch it again"]),
        ("model.safetensors", b"", ["cannot load the weights of"]),
    ],
)
def test_a_damaged_model_folder(call, place, file, content, fragments):
    place.write(f"model/{file}", content)
    said = call("run", place.folder / "study.yaml", "--out", place.folder / "new", "--json")
    assert_refused(said, 1, [*fragments[:1], "model"])


def test_a_model_that_is_nowhere(rerun, place):
    place.study({"model": "no/such/model"})
    refused_and_harmless(
        rerun, place, 1, ["there is no model folder 'no/such/model'; give 'demo', a folder or a hub id"]
    )


def test_a_name_too_long_for_the_file_system(call):
    for key in ("--task", "--data"):
        assert_refused(
            call("plan", key, "a" * 300), 1, ["a" * 300 + ": file name too long; repair it, or give another"]
        )
    assert_refused(call("plan", "--model", "a" * 300), 1, ["file name too long; give 'demo', a folder or a hub id"])
