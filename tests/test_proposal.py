"""From a messy file to a task: what the file looks like, what is left out of it, and errors that say all at once."""

import csv
import io
import json
import os
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner
from tiny import make_rows, make_task, write_csv

import iclperm
from iclperm import Study
from iclperm.cli import main as cli
from iclperm.errors import ConfigError, DataError
from iclperm.tasks.proposal import propose
from iclperm.tasks.task import Task

CLASSES = {"Billing": 280, "Technical": 80, "Account": 32, "Legal": 8}
WORDS = [
    a + b for a in ("in", "ro", "pa", "mo", "ta", "le", "su", "gi") for b in ("voice", "uter", "ssage", "dem", "riff")
]


@pytest.fixture
def call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        done = CliRunner().invoke(cli.cli, [str(argument) for argument in arguments], standalone_mode=False)
        if done.exception is not None:
            raise done.exception
        return done.stdout

    return run


def ticket_rows():
    """Number, text and label of 400 tickets: variants of labels, 10 blank texts, 6 blank labels, 3 repeated texts."""
    stream, rows = random.Random(0), []
    for label, count in CLASSES.items():
        for number in range(count):
            text = " ".join(stream.sample(WORDS, 9))
            text = text.replace(" ", "\n", 1) if number % 9 == 0 else text
            text = f'he said "now; or never" {text}' if number % 11 == 0 else text
            spelt = {0: label.lower(), 1: f"{label.lower()} ", 2: label.upper()}.get(number % 10, label)
            rows.append([text, spelt])
    for place in range(20, 30):
        rows[place][0] = " "
    for place in range(30, 36):
        rows[place][1] = ""
    for place in range(41, 44):
        rows[place] = [rows[40][0].upper(), rows[40][1]]
    return [[str(1000 + number), *row] for number, row in enumerate(rows)]


def tickets(path, *, encoding="utf-8-sig", delimiter=";", header=("Ticket No", "Ticket Text", "Queue"), rows=None):
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter)
    writer.writerows([*([header] if header else []), *(ticket_rows() if rows is None else rows)])
    path.write_bytes(text.getvalue().encode(encoding))
    return path


@pytest.mark.parametrize(
    ("form", "keys"),
    [
        ({}, {"delimiter": ";"}),
        ({"encoding": "utf-16"}, {"delimiter": ";"}),
        ({"delimiter": ",", "encoding": "utf-8"}, {}),
        ({"delimiter": "\t"}, {"delimiter": "\t"}),
        ({"header": None}, {"delimiter": ";", "columns": ["column1", "column2", "column3"]}),
    ],
    ids=["semicolons and a mark", "utf-16", "plain", "tabs", "no header"],
)
def test_every_form_is_read_as_the_same_rows(tmp_path, form, keys):
    found = propose(tickets(tmp_path / "tickets.csv", **form), tmp_path)
    data = yaml.safe_load(found.text)["data"]
    assert {key: value for key, value in data.items() if key in ("delimiter", "encoding", "columns")} == keys
    assert found.task.words == ("Account", "Billing", "Legal", "Technical")
    assert list(found.task.fields.values()) == ["column2" if not form.get("header", True) else "Ticket Text"]
    assert found.left_out == {"blank": 16, "repeats another row of its split": 3}
    by_label = {word: sum(splits.values()) for word, splits in found.counts.items()}
    assert by_label == {"Account": 32, "Billing": 280 - 19, "Legal": 8, "Technical": 80}
    assert all(min(splits.values()) >= 1 for splits in found.counts.values())
    assert found.variants["Billing"].keys() == {"Billing", "billing", "billing ", "BILLING"}


def test_cp1252_is_found_and_named(tmp_path):
    rows = [[n, text + " für Café", label] for n, text, label in ticket_rows()]
    found = propose(tickets(tmp_path / "tickets.csv", encoding="cp1252", rows=rows), tmp_path)
    assert found.task.data.encoding == "cp1252"
    assert all(fields["ticket_text"].endswith("für Café") for fields in found.task.examples("test").fields)


def test_the_command_shows_it_and_the_task_goes_on_to_a_report(tmp_path, call):
    tickets(tmp_path / "tickets.csv")
    shown = call("tasks", "new", "--from", "tickets.csv")
    for words in (
        "'billing ' 2",
        "blank",
        "16",
        "repeats another row of its split",
        "window",
        "1,024",
        "--balance natural",
    ):
        assert words in shown
    assert "65." in shown or "68." in shown  # the share of Billing
    task = Task.load(tmp_path / "tickets.yaml")
    command = next(line for line in shown.splitlines() if line.strip().startswith("iclperm plan")).split()[1:]
    assert "distinct prompts" in call(*command)
    words = [*command[1:], "--out", "run", "--sets", "2", "--permutations", "2"]
    words[words.index("--queries") + 1] = "12"
    call("run", *words)
    assert "accuracy" in call("report", "run")
    run = iclperm.open_run(tmp_path / "run")
    assert run.labels == task.words
    assert run.prompt(best=True).placeholders == {"ticket_text": "<<ticket_text>>"}
    with pytest.raises(ConfigError, match=r"tickets\.yaml cannot be written: file exists"):
        call("tasks", "new", "--from", "tickets.csv")
    call("tasks", "new", "--from", "tickets.csv", "--name", "mine")
    assert Task.load(tmp_path / "mine.yaml").name == "mine"


def test_other_columns_that_may_be_the_labels_are_named(tmp_path):
    rows = [[text, label, "ab"[place % 2]] for place, (_, text, label) in enumerate(ticket_rows())]
    path = tickets(tmp_path / "a.csv", header=("Text", "Team", "Agent"), rows=rows)
    found = propose(path, tmp_path)
    assert found.facts["label"] == "Agent"
    assert "Team may be the labels as well as Agent: name the right one by --label" in found.notes
    assert not any("may be the labels" in note for note in propose(path, tmp_path, label="Team").notes)
    assert not any("may be the labels" in note for note in propose(tickets(tmp_path / "b.csv"), tmp_path).notes)


def test_columns_that_no_prompt_shows_are_named(tmp_path):
    assert propose(tickets(tmp_path / "a.csv"), tmp_path).facts["not used"] == "Ticket No (--text adds a column)"


def test_near_duplicates_across_splits_are_counted(tmp_path):
    rows = [[n, text, label] for n, text, label in ticket_rows()]
    assert len(propose(tickets(tmp_path / "a.csv", rows=rows), tmp_path).near) == 0
    twins = [[n + "0", f"{text} again {n}", label] for n, text, label in rows if text.strip() and label]
    found = propose(tickets(tmp_path / "b.csv", rows=rows + twins), tmp_path)
    assert len(found.near) > 50
    assert {split for _, _, split in found.near} == {"test", "dev"}
    assert any("test rows nearly repeat one of dev" in note for note in found.notes)


def test_a_label_with_too_few_rows_is_left_out_and_told(tmp_path):
    rows = [*ticket_rows(), ["1", "one of a kind", "Other"], ["2", "two of a kind", "other "]]
    found = propose(tickets(tmp_path / "tickets.csv", rows=rows), tmp_path)
    assert "Other" not in found.task.words
    assert [number for why, number in found.left_out.items() if "'Other'" in why] == [2]


def test_labels_that_are_numbers_and_columns_without_names_are_told(tmp_path):
    """As AG News is published: class, title and description, and no line of names."""
    rows = [
        [str(number % 3 + 1), f"a title {number}", f"{text} and {number}"] for number, text in enumerate("abc" * 12)
    ]
    found = propose(tickets(tmp_path / "test.csv", delimiter=",", encoding="utf-8", header=None, rows=rows), tmp_path)
    assert list(found.task.words) == ["1", "2", "3"]
    (numbers,) = [note for note in found.notes if "labels are numbers" in note]
    assert numbers.endswith('name them under label_values, such as "World": ["1"], and in the instruction')
    assert any(note.startswith("the columns have no names: say in the templates what column") for note in found.notes)
    named = propose(tickets(tmp_path / "tickets.csv"), tmp_path)
    assert not any("numbers" in note or "no names" in note for note in named.notes)


def test_columns_can_be_named(tmp_path):
    path = write_csv(
        tmp_path / "a.csv", [row | {"note": f"a note of many words {n}"} for n, row in enumerate(make_rows(1, 60))]
    )
    assert list(propose(path, tmp_path).task.fields.values()) == ["text", "note"]
    assert list(propose(path, tmp_path, texts=["note"], label="label").task.fields.values()) == ["note"]
    with pytest.raises(ConfigError, match="has no column 'nots'; its columns are text, label, note"):
        propose(path, tmp_path, texts=["nots"])


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"text;label\na b;c;d\na b;c\na b;c\n", "1 of 4 rows do not have the 2 values of the others: line 2 has 3"),
        (b"text\na\nb\n", "one column only"),
        (b"text,number\na,1\nb,2\nc,3\n", "no column looks like labels"),
        (b'text,label\n"a,1\n', "check its quotes"),
        (b"", "one column only"),
    ],
)
def test_what_cannot_be_a_task_is_one_line(tmp_path, raw, words):
    (tmp_path / "a.csv").write_bytes(raw)
    with pytest.raises((DataError, ConfigError), match=words) as error:
        propose(tmp_path / "a.csv", tmp_path)
    assert "\n" not in str(error.value)


def test_hostile_values_stay_values(tmp_path):
    rows = [[f"{{{{ 7 * 7 }}}} number {n} of many", f"a]: {{x}} '\"\t{n % 2}"] for n in range(60)]
    path = tickets(tmp_path / "a.csv", header=("te}}xt{{", "lab: el"), rows=rows)
    task = propose(path, tmp_path).task
    fields = task.examples("train").fields[0]
    assert next(iter(fields.values())) in task.render_query(fields)
    assert "{{ 7 * 7 }}" in task.render_query(fields)


class TestLabels:
    def test_values_mean_their_word(self, tmp_path):
        path = make_task(tmp_path, labels=None, label_values={"R": ["Red"], "G": ["Green", "grün "], "B": ["Blue"]})
        task = Task.load(path)
        assert task.words == ("R", "G", "B")
        assert task.examples("train").labels.tolist() == [n % 3 for n in range(60)]

    def test_they_add_to_labels_which_mean_what_they_did(self, tmp_path):
        (tmp_path / "a.csv").write_text("text,label\na,1\nb,one\nc,2\nd,ONE\n")
        changes = {"labels": {1: "yes", 2: "no"}, "data": {"train": "a.csv", "test": "a.csv"}}
        path = make_task(tmp_path, label_values={"yes": ["one"]}, **changes)
        with pytest.raises(DataError, match=r"a\.csv:5: 'label' is 'ONE'; the labels are 1, 2"):
            Task.load(path).examples("train")
        task = Task.load(make_task(tmp_path, label_values={"yes": ["one"]}, label_match="fold", **changes))
        assert task.examples("train").labels.tolist() == [0, 0, 1, 0]

    def test_trimming_and_folding_are_asked_for(self, tmp_path):
        (tmp_path / "a.csv").write_text("text,label\na,Red\nb, Red \nc,Green\n")
        data = {"train": "a.csv", "test": "a.csv"}
        with pytest.raises(DataError, match="' Red '"):
            Task.load(make_task(tmp_path, data=data)).examples("train")
        task = Task.load(make_task(tmp_path, data=data, label_match="trim"))
        assert task.examples("train").labels.tolist() == [0, 0, 1]
        (tmp_path / "a.csv").write_text("text,label\na,Red\nb, RED \nc,Green\n")
        with pytest.raises(DataError, match="' RED '"):
            Task.load(make_task(tmp_path, data=data, label_match="trim")).examples("train")
        assert Task.load(make_task(tmp_path, data=data, label_match="fold")).examples("train").labels.tolist() == [
            0,
            0,
            1,
        ]

    def test_the_wording_is_the_same(self, tmp_path):
        plain = Task.load(make_task(tmp_path)).wording_hash()
        assert Task.load(make_task(tmp_path, label_match="fold", label_values={"Red": ["r"]})).wording_hash() == plain

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"label_values": {"Pink": ["pink"]}}, "'Pink', which is no label"),
            ({"label_values": {"Red": ["Green"]}}, "'Green' would mean both 'Green' and 'Red'"),
            ({"labels": None, "label_values": {"Red": ["a"]}}, "one label"),
            ({"labels": ["a", "A"], "label_match": "fold"}, "would mean both"),
        ],
    )
    def test_what_is_ambiguous_is_refused(self, tmp_path, changes, words):
        with pytest.raises(ConfigError, match=words):
            Task.load(make_task(tmp_path, **changes))

    def test_all_unknown_labels_are_told_at_once(self, tmp_path):
        (tmp_path / "a.csv").write_text("text,label\n" + "a,Red\nb,red\nc,Pink\nd,Pink\ne,Green \n")
        path = make_task(tmp_path, data={"train": "a.csv", "test": "a.csv"})
        with pytest.raises(DataError) as error:
            Task.load(path).examples("train")
        for words in (
            "a.csv:3: 'label' is 'red'; the labels are Red, Green, Blue; in 4 rows there are others",
            "'Pink' (2 rows)",
            "'red' (1 row), which may mean 'Red'",
            "'Green ' (1 row), which may mean 'Green'",
            "label_match: fold",
        ):
            assert words in str(error.value)
        assert "\n" not in str(error.value)


class TestForms:
    def test_semicolons_read_with_commas_are_told(self, tmp_path):
        (tmp_path / "a.csv").write_text("text;label\na, b;Red\nc;Green\n")
        with pytest.raises(DataError, match=r"a\.csv:1: ';' stands between its columns.*add delimiter: ';'"):
            Task.load(make_task(tmp_path, data={"train": "a.csv", "test": "a.csv"})).examples("train")
        data = {"train": "a.csv", "test": "a.csv", "delimiter": ";"}
        task = Task.load(make_task(tmp_path, data=data))
        assert [fields["text"] for fields in task.examples("train").fields] == ["a, b", "c"]

    def test_blank_rows_are_left_out_where_asked(self, tmp_path):
        (tmp_path / "a.csv").write_text("text,label\na,Red\n ,Red\nc,\nd,Blue\n")
        data = {"train": "a.csv", "test": "a.csv"}
        with pytest.raises(DataError, match="is blank"):
            Task.load(make_task(tmp_path, data=data)).examples("train")
        task = Task.load(make_task(tmp_path, data=data | {"drop_blank": True}))
        assert [fields["text"] for fields in task.examples("train").fields] == ["a", "d"]
        (tmp_path / "a.csv").write_text("text,label\n ,Red\n")
        with pytest.raises(DataError, match="every row of 'train' is blank"):
            Task.load(make_task(tmp_path, data=data | {"drop_blank": True})).examples("train")

    def test_a_run_reads_such_a_file(self, tmp_path):
        rows = "".join(f"{row['text']};{row['label']}\n" for row in make_rows(1, 90))
        (tmp_path / "a.csv").write_bytes(rows.encode("utf-16"))
        data = {"train": "a.csv", "test": 0.4, "delimiter": ";", "columns": ["text", "label"]}
        path = make_task(tmp_path, data=data)
        planned = iclperm.plan(Study(task=str(path), sets=2, permutations=2, shots=3, queries=9))
        assert planned.num_prompts == 2 * 2 * 9
        labels = Task.load(path).examples("train").labels
        assert np.bincount(labels).min() > 5


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("values", [(0, 1), (False, True), (0.0, 1.0)])
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_label_that_is_nought_is_a_label(tmp_path, values, form):
    rows = [{"text": f"a text of many words {n}", "label": values[n % 2]} for n in range(60)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    if form == "parquet":
        path = tmp_path / "a.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
    found = propose(path, tmp_path)
    assert found.task.words == tuple(sorted(map(str, values)))
    assert "blank" not in found.left_out
    assert sum(sum(each.values()) for each in found.counts.values()) == 60


@pytest.mark.parametrize("column", ["no", "On", "null", "true", "not", "none", "self", "y", "if"])
def test_a_column_named_as_a_word_of_yaml_or_jinja_is_read(tmp_path, column):
    rows = [[f"a text of many words {n}", "ab"[n % 2]] for n in range(60)]
    task = propose(tickets(tmp_path / "a.csv", header=(column, "label"), rows=rows), tmp_path).task
    assert list(task.fields.values()) == [column]
    fields = task.examples("train").fields[0]
    assert next(iter(fields.values())) in task.render_query(fields)


@pytest.mark.parametrize("name", ["a.parquet", "a.csv", "a.jsonl"])
def test_what_is_no_file_is_one_line_at_once(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match="not a regular file"):
        propose(tmp_path / name, tmp_path)


@pytest.mark.parametrize(
    ("name", "raw", "words"),
    [
        ("a.parquet", b"PAR1" + bytes(100) + b"PAR1", "damaged or not Parquet"),
        ("a.parquet", b"", "is not Parquet"),
        ("a.csv", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 4\n", "run: git lfs pull"),
        ("a.jsonl", b'{"text": "a b c d e f g", "label": "x"}\n{"label": "y"}\n' * 9, "'text' is missing"),
        ("a.csv", b"text,label\n" + b"".join(b"%d,%s\n" % (n, b"ab"[n % 2 :][:1] * 2000) for n in range(9)), "letters"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, name, raw, words):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises((DataError, ConfigError), match=words) as error:
        propose(tmp_path / name, tmp_path, label="label" if name == "a.csv" else None)
    assert "\n" not in str(error.value)


def test_a_parquet_column_without_a_name_is_named_by_number(tmp_path):
    columns = [[f"a text of many words {n}" for n in range(60)], ["ab"[n % 2] for n in range(60)]]
    pq.write_table(pa.table(columns, names=["", "label"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="column 1 has no name"):
        propose(tmp_path / "a.parquet", tmp_path)


def test_rows_that_are_all_alike_are_not_compared_for_ever(tmp_path):
    stream = random.Random(0)
    words = [a + b for a in "abcdefghij" for b in "klmnopqrst"]
    rows = [[" ".join(stream.sample(words, 70)), "ab"[n % 2]] for n in range(4_000)]
    path = tickets(tmp_path / "a.csv", header=("text", "label"), rows=rows)
    found = propose(path, tmp_path)
    assert found.near == []
    assert any("near-duplicates were not all looked for" in note for note in found.notes)
