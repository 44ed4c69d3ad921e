"""Run folders that somebody forged whole: every digest is right, and what they say is still no run's."""

import json
import shutil
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from behaviour.folders import FOLDERS
from click.testing import CliRunner

import iclperm
from iclperm.base.sealed import canonical, sealed
from iclperm.cli import terminal
from iclperm.cli.main import cli
from iclperm.errors import DamagedItem
from iclperm.report.figures import confusion_plot, save
from iclperm.report.parts import Table
from iclperm.runs import audit
from iclperm.runs.folder import RunFolder
from iclperm.runs.stored import checksum_line, content_digest, short_digest, table_bytes


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(FOLDERS / "transfer/demo", tmp_path / "run")


def refused(message, use, *arguments, error):
    with pytest.raises(error, match=message) as found:
        use(*arguments)
    assert "\n" not in str(found.value)


def forged(folder, *, plan=None, tables=None, footer=None):
    """A run folder with other content, of which every digest is right: anyone can reckon one."""
    content = {**json.loads((folder / "plan.json").read_text()), **(plan or {})}
    del content["digest"]
    for name, change in (tables or {}).items():
        table = change(pq.read_table(folder / f"{name}.parquet"))
        raw = table_bytes(table)
        (folder / f"{name}.parquet").write_bytes(raw)
        (folder / f"{name}.parquet.sha256").write_bytes(checksum_line(f"{name}.parquet", raw))
        content["tables"][name] = content_digest(table)
    whole = sealed(content)
    (folder / "plan.json").write_bytes(canonical(whole))
    for path in sorted((folder / "items").glob("*.parquet")):
        table = pq.read_table(path)
        about = {**table.schema.metadata, b"run": whole["digest"].encode(), **(footer or {})}
        raw = table_bytes(table.replace_schema_metadata(about))
        path.unlink()
        (folder / f"items/{path.name[:6]}-{short_digest(raw)}.parquet").write_bytes(raw)
    return folder


def filled(name, value, kind):
    """What puts one value into every row of a column."""

    def change(table):
        column = pa.array([value] * len(table), kind)
        return table.set_column(table.schema.get_field_index(name), name, column)

    return change


def test_what_is_forged_whole_is_read(folder):
    before = iclperm.open_run(folder).digest
    assert iclperm.open_run(forged(folder)).digest == before


@pytest.mark.parametrize(
    "numerics", [b"[1]", b"1", b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000, b"\xff\xfe nope", b"1" * 5_000]
)
def test_a_footer_that_is_no_record_of_numerics_is_damage(folder, numerics):
    forged(folder, footer={b"numerics": numerics})
    refused("does not say how it was computed", iclperm.open_run, folder, error=DamagedItem)
    refused("does not say how it was computed", RunFolder.open(folder).parts.numerics, error=DamagedItem)
    assert "does not say how it was computed" in audit.verify(folder).damage[0]


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("gold", 99, pa.int16()),
        ("gold", -5, pa.int16()),
        ("gold", None, pa.int16()),
        ("gold", 2**62, pa.int64()),
        ("gold", float("nan"), pa.float64()),
        ("weight", -1, pa.int32()),
        ("weight", 0.5, pa.float64()),
        ("example", "x", pa.string()),
    ],
)
def test_queries_as_no_run_has_them_are_damage(folder, name, value, kind):
    forged(folder, tables={"queries": filled(name, value, kind)})
    refused("cannot be those of a run", iclperm.open_run, folder, error=DamagedItem)
    assert any("cannot be those of a run" in line for line in audit.verify(folder).damage)


@pytest.mark.parametrize(
    "change",
    [
        {"labels": [], "label_lengths": {"sum": [], "mean": [], "bytes": []}},
        {"label_lengths": {"sum": [0] * 4, "mean": [0] * 4, "bytes": [0] * 4}},
        {"labels": ["x" * 100_000, "b", "c", "d"]},
        {"hashes": None},
        {"hashes": 3},
    ],
)
def test_a_plan_as_no_run_has_it_is_damage(folder, change):
    forged(folder, plan=change)
    refused(r"plan\.json is damaged", iclperm.open_run, folder, error=DamagedItem)


HOSTILE = "\x1b[31mred\x1b]0;title\x07\u202e\x9b2J [red]m[/red] $\\frac$ "


def test_labels_steer_no_terminal(folder, tmp_path):
    forged(folder, plan={"labels": [f"{HOSTILE}{number}" for number in range(4)], "task": f"{HOSTILE}$task"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as of letters that a figure's font lacks, which would be printed as they are
        done = CliRunner().invoke(cli, ["report", str(folder), "--out", str(tmp_path / "out")], standalone_mode=False)
    assert done.exception is None
    assert {"confusion.png", "confusion.svg", "report.html"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert not {"\x1b", "\x07", "\u202e", "\x9b"} & {*done.stdout, *done.stderr}
    assert r"\x1b[31mred" in done.stdout
    assert "[red]m[/red]" in done.stdout


def test_names_of_runs_steer_no_terminal(capsys):
    table = Table(HOSTILE, ("", HOSTILE), [(HOSTILE, HOSTILE)], caption=HOSTILE)
    console = terminal.stdout()
    terminal.print_tables(console, [table])
    terminal.print_conclusion(console, [HOSTILE])
    terminal.print_notes(console, [HOSTILE])
    said = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\u202e", "\x9b"} & {*said}
    assert said.count("[red]m[/red]") >= 7


def test_a_figure_has_room_for_any_words(tmp_path):
    words = ["x" * 60_000, *(f"{HOSTILE}{number}" for number in range(3))]
    plot = confusion_plot(np.eye(4), np.zeros(4), words, title="t" * 100_000)
    save(plot, tmp_path / "a")
    assert max(plot.size) < 20
    assert max(confusion_plot(np.eye(3000), np.zeros(3000), ["a"] * 3000).size) < 60
