"""Rare labels, short forms of labels and blank lines in a file that a task is proposed for."""

import csv
import io
import random

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from tiny import make_rows, make_task, write_rows

from iclperm.cli import main as cli
from iclperm.tasks.proposal import propose
from iclperm.tasks.task import Task

WORDS = [
    "invoice",
    "refund",
    "crash",
    "login",
    "export",
    "server",
    "price",
    "update",
    "screen",
    "order",
    "driver",
    "plan",
    "user",
]


def tickets(path, counts, *, seed=0, tail=""):
    """A file with so many tickets of each label, all of different texts."""
    stream, text = random.Random(seed), io.StringIO(newline="")
    rows = [
        [f"{' '.join(stream.sample(WORDS, 6))} {label} {n}", label]
        for label, count in counts.items()
        for n in range(count)
    ]
    stream.shuffle(rows)
    writer = csv.writer(text, delimiter=";")
    writer.writerows([["Ticket Text", "Queue"], *rows])
    path.write_text(text.getvalue() + tail, encoding="utf-8-sig")
    return path


def split_rows(task):
    return {split: task.examples(split) for split in ("train", "test", "dev")}


class TestShares:
    @pytest.mark.parametrize("seed", range(8))
    @pytest.mark.parametrize("rare", [5, 8, 12])
    def test_every_label_has_its_share_of_every_split(self, tmp_path, seed, rare):
        counts = {"Billing": 280, "Technical": 80, "Account": 32, "Cancel": rare}
        found = propose(tickets(tmp_path / "a.csv", counts, seed=seed), tmp_path)
        data = found.task.data
        for word, number in counts.items():
            for split, share in (("test", data.test), ("dev", data.dev), ("train", 1 - data.test - data.dev)):
                assert abs(found.counts[word][split] - share * number) <= 1, (word, split)
                assert found.counts[word][split] >= 1

    def test_they_are_a_partition_whatever_the_order_of_the_rows(self, tmp_path):
        rows = make_rows(1, 90) + make_rows(1, 4)  # four rows repeated
        parts = []
        for seed in (0, 1):
            folder = tmp_path / str(seed)
            folder.mkdir()
            task = make_task(folder, data={"train": "a.jsonl", "test": 0.3, "dev": 0.2, "stratify": True})
            write_rows(folder / "a.jsonl", random.Random(seed).sample(rows, len(rows)))
            parts.append({split: sorted(found.hashes) for split, found in split_rows(Task.load(task)).items()})
            for found in split_rows(Task.load(task)).values():
                assert np.ptp(np.bincount(found.labels, minlength=3)) == 0
        assert parts[0] == parts[1]
        assert sum(map(len, parts[0].values())) == len({*parts[0]["train"], *parts[0]["test"], *parts[0]["dev"]}) == 90

    def test_a_share_of_test_is_by_label_too(self, tmp_path):
        make_task(tmp_path)
        data = {"train": "train.jsonl", "test": "test.jsonl", "dev": "0.2 of test", "stratify": True}
        found = split_rows(Task.load(make_task(tmp_path, data=data)))
        assert [np.bincount(found[split].labels).tolist() for split in found] == [[20] * 3, [8] * 3, [2] * 3]

    def test_without_the_key_content_alone_decides_as_before(self, tmp_path):
        data = {"train": "train.jsonl", "test": 0.3, "dev": 0.2}
        plain = split_rows(Task.load(make_task(tmp_path, data=data)))
        for found, low, high in ((plain["test"], 0, 0.3), (plain["dev"], 0.3, 0.5), (plain["train"], 0.5, 1)):
            assert all(low <= int(name[:13], 16) / 2**52 < high for name in found.hashes)


class TestNotes:
    def told(self, tmp_path, counts, **form):
        return "\n".join(propose(tickets(tmp_path / "a.csv", counts, **form), tmp_path).notes)

    def test_rare_labels_are_named_with_their_rows(self, tmp_path):
        said = self.told(tmp_path, {"Billing": 200, "Technical": 60, "Cancel": 8})
        assert "few rows of 'Cancel' (test 2, dev 2)" in said or "few rows of 'Cancel' (test 3, dev" in said
        assert "'Billing' (" not in said

    def test_a_column_of_very_many_labels_is_asked_about(self, tmp_path):
        path = tickets(tmp_path / "a.csv", {f"day {number}": 8 for number in range(60)})
        said = "\n".join(propose(path, tmp_path, label="Queue").notes)
        assert "60 different labels: is this the column of the labels?" in said

    def test_labels_with_rows_enough_are_not(self, tmp_path):
        assert "few rows" not in self.told(tmp_path, {"Billing": 200, "Technical": 160})

    @pytest.mark.parametrize(
        ("short", "long"),
        [("Bill.", "Billing"), ("Acct.", "Account"), ("Tech", "Technical"), ("Technicl", "Technical")],
    )
    def test_a_short_form_or_a_slip_is_told(self, tmp_path, short, long):
        said = self.told(tmp_path, {long: 60, "Other": 60, short: 12})
        assert f"{short!r} may mean {long!r}" in said
        assert "label_values" in said
        assert "shots" in said
        assert "'Other' may" not in said

    @pytest.mark.parametrize("names", [("1", "10"), ("pos", "neg"), ("World", "Sports"), ("A", "AB")])
    def test_names_that_are_merely_alike_are_not(self, tmp_path, names):
        assert "may mean" not in self.told(tmp_path, dict.fromkeys(names, 40))


@pytest.mark.parametrize("tail", ["\r\n\r\n", "   \r\n", " \r\n\t\r\n;\r\n", ";;;\r\n"])
def test_blank_lines_at_the_end_are_no_rows(tmp_path, tail):
    counts = {"Billing": 60, "Technical": 60}
    found = propose(tickets(tmp_path / "a.csv", counts, tail=tail), tmp_path)
    assert {word: sum(row.values()) for word, row in found.counts.items()} == counts
    (tmp_path / "a.yaml").write_text(found.text)
    task = Task.load(tmp_path / "a.yaml")
    assert sum(len(found.hashes) for found in split_rows(task).values()) == 120


def test_the_command_says_how_to_come_to_a_prompt_and_frightens_nobody(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    path = tickets(tmp_path / "a.csv", {"Billing": 60, "Technical": 60})
    with path.open("a", encoding="utf-8") as file:
        file.write('"' + "long words " * 3000 + '";Billing\r\n')
    asked = ["tasks", "new", "--from", "a.csv"]
    shown = CliRunner().invoke(cli.cli, asked, standalone_mode=False, catch_exceptions=False)
    assert "1 row is too long for the window" in shown.stdout
    assert "iclperm prompt runs/a-search" in shown.stdout
    assert "--kind search" in shown.stdout
    assert "sequence length" not in shown.stderr
    (search,) = [line for line in shown.stdout.splitlines() if "run --kind search" in line]
    asked = search.split()
    held = yaml.safe_load((tmp_path / "a.yaml").read_text())
    task = Task.load(tmp_path / "a.yaml")
    assert held["data"]["stratify"] is True
    assert int(asked[asked.index("--queries") + 1]) <= len(task.examples("test").hashes)
    assert int(asked[asked.index("--dev-queries") + 1]) <= len(task.examples("dev").hashes)
