"""Parquet from somebody else: what it unpacks to is known before it is decoded, whatever it says of itself."""

import hashlib
import os
import shutil
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from behaviour.folders import FOLDERS

import iclperm
from iclperm.base import parquet
from iclperm.errors import DamagedItem, DataError
from iclperm.external import load
from iclperm.runs import audit
from iclperm.tasks.loaders import read_rows


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(FOLDERS / "grown", tmp_path / "run")


def first_item(folder):
    return sorted((folder / "items").glob("*.parquet"))[0]


def refused(message, use, *arguments, error=DataError):
    with pytest.raises(error, match=message) as found:
        use(*arguments)
    assert "\n" not in str(found.value)


def written(table, **choices):
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", **choices)
    return sink.getvalue().to_pybytes()


def dictionary_bomb(rows=18_000, size=1_000_000):
    """Some hundred bytes for 18 GB: one text in a dictionary, which every row has."""
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array(["a" * size]))
    return pa.table({"query": pa.array(np.zeros(rows, np.int64)), "text": texts})


def list_bomb():
    lists = pa.ListArray.from_arrays(pa.array([0, 40_000_000], pa.int32()), pa.array(np.zeros(40_000_000, np.float32)))
    return pa.table({"query": pa.array([0]), "label_logprob": lists})


def beginnings_bomb():
    """Each text is the one before: of the encoding that stores what is new, which is nothing."""
    sink = pa.BufferOutputStream()
    table = pa.table({"text": pa.array(["a" * 1_000_000] * 400)})
    pq.write_table(table, sink, compression="zstd", use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"})
    return sink.getvalue().to_pybytes()


def large_bomb():
    """Texts of a kind that is not read as a dictionary."""
    return pa.table({"text": pa.array([b"a" * 1_000_000] * 400, pa.large_binary())})


BOMBS = {
    "beginnings of texts": beginnings_bomb,
    "texts of another kind": large_bomb,
    "a text in a dictionary": dictionary_bomb,
    "such texts in lists": lambda: pa.table({"a": pa.array([["a" * 1_000_000] * 400])}),
    "runs of one number": lambda: pa.table({"query": pa.array(np.zeros(40_000_000, np.int64))}),
    "a long list": list_bomb,
}


def peak_of(script, *arguments):
    """What a process of its own printed, and the most memory that it took, in bytes."""
    tail = "\nprint(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    command = [sys.executable, "-P", "-c", script + tail, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    *words, peak = done.stdout.splitlines()
    return "\n".join(words), int(peak) << 10


@pytest.mark.parametrize("bomb", BOMBS)
def test_parquet_that_unpacks_to_gigabytes_is_refused_before_it_is_decoded(tmp_path, bomb):
    table = BOMBS[bomb]()
    raw = table if isinstance(table, bytes) else written(table)
    assert len(raw) < 1_000_000
    (tmp_path / "a.parquet").write_bytes(raw)
    script = (
        "import sys; from pathlib import Path; from iclperm.base import parquet\n"
        "try:\n    parquet.read_table(Path(sys.argv[1]).read_bytes())\n"
        "except parquet.Unpacks as error:\n    print(error)"
    )
    words, peak = peak_of(script, tmp_path / "a.parquet")
    assert "would unpack to" in words
    assert peak < 600 << 20


def test_the_bomb_is_refused_wherever_it_lies(folder, tmp_path):
    raw = written(dictionary_bomb())
    (tmp_path / "a.parquet").write_bytes(raw)
    refused("would unpack to 16.8 GB", lambda: read_rows(tmp_path / "a.parquet", ["text"]), error=DataError)
    answers_of = written(dictionary_bomb().rename_columns(["query", "correct"]))
    (tmp_path / "b.parquet").write_bytes(answers_of)
    refused("would unpack to", lambda: load(tmp_path / "b.parquet"), error=DataError)
    number = first_item(folder).name[:6]
    first_item(folder).unlink()
    (folder / f"items/{number}-{hashlib.sha256(raw).hexdigest()[:16]}.parquet").write_bytes(raw)
    refused("is no table of a run: it ", iclperm.open_run, folder, error=DamagedItem)
    assert any("is no table of a run" in line for line in audit.verify(folder).damage)


def test_more_rows_than_the_plan_has_are_refused(folder):
    table = pq.read_table(first_item(folder))
    raw = written(pa.concat_tables([table] * 1000))
    number = first_item(folder).name[:6]
    first_item(folder).unlink()
    (folder / f"items/{number}-{hashlib.sha256(raw).hexdigest()[:16]}.parquet").write_bytes(raw)
    refused(r"it has [\d,]+ rows; at most [\d,]+ can be", iclperm.open_run, folder, error=DamagedItem)


def test_a_footer_that_says_less_than_its_pages_is_refused():
    raw = written(pa.table({"n": pa.array(np.zeros(1_000_000, np.int64))}), use_dictionary=False)
    file = pq.ParquetFile(pa.BufferReader(raw))
    chunk = file.metadata.row_group(0).column(0)
    said = chunk.num_values
    size = int.from_bytes(raw[-8:-4], "little")

    def varint(number):
        pieces = []
        number <<= 1
        while number > 127:
            pieces.append(number & 127 | 128)
            number >>= 7
        return bytes([*pieces, number])

    footer = raw[-8 - size : -8]
    assert varint(said) in footer
    lying = footer.replace(varint(said), varint(65_536))  # of as many bytes
    assert len(lying) == len(footer)
    with pytest.raises(ValueError, match=r"has pages that are not what its footer says"):
        parquet.read_table(raw[: -8 - size] + lying + raw[-8:])
    assert len(parquet.read_table(raw)) == 1_000_000


def test_columns_in_each_other_are_refused_before_a_reader_follows_them():
    kind = pa.int64()
    for _ in range(40):
        kind = pa.struct([pa.field("a", kind)])
    raw = written(pa.table({"a": pa.array([None], kind)}))
    with pytest.raises(parquet.Unpacks, match="nested deeper than 16 levels"):
        parquet.read_table(raw)


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"data_page_version": "2.0"},
        {"use_dictionary": False},
        {"row_group_size": 99},
        {"write_page_checksum": True},
    ],
    ids=str,
)
def test_what_is_no_bomb_is_read_as_ever(monkeypatch, choices):
    table = pa.table(
        {
            "number": pa.array(np.arange(1000) % 7),
            "name": pa.array(["x", None] * 500).dictionary_encode(),
            "lists": pa.array([[1.5, 2.0], None] * 500, pa.list_(pa.field("element", pa.float32()))),
            "hashes": pa.array([[f"{i:064d}" for i in range(n % 5)] for n in range(1000)]),
            "text": pa.array(["abc" * (n % 7) for n in range(999)] + ["long" * 1000]),
        }
    ).replace_schema_metadata({"run": "1"})
    raw = written(table, **choices)
    whole = pq.read_table(pa.BufferReader(raw))
    assert parquet.read_table(raw).equals(whole, check_metadata=True)
    assert parquet.read_table(raw, ["text", "number"]).equals(whole.select(["text", "number"]), check_metadata=True)
    assert parquet.schema_of(raw).equals(whole.schema, check_metadata=True)
    sizes = [parquet._Size.of(raw, chunk) for chunk in parquet._chunks(raw)[1]]
    least, most = sum(size.least for size in sizes), sum(size.most for size in sizes)
    seen = []
    monkeypatch.setattr(parquet, "_text_bytes", lambda array, count=parquet._text_bytes: seen.append(1) or count(array))
    assert parquet.read_table(raw, most_bytes=(least + most) // 2).equals(whole, check_metadata=True)
    assert seen or least == most  # texts were counted as they are stored, then made


@pytest.mark.parametrize("cut", [1, 13, 100, 0.5, 0.9])
def test_half_a_file_is_no_crash(cut):
    raw = written(dictionary_bomb(10, 10))
    half = raw[: int(cut * len(raw)) if cut < 1 else cut]
    for broken in (half, half + raw[-12:], raw[:50] + os.urandom(20) + raw[70:]):
        with suppress(ValueError, pa.ArrowException, OSError):  # some bytes may be changed without harm
            assert len(parquet.read_table(broken)) == 10


def test_tables_that_tell_of_more_answers_than_there_are_bytes_are_refused(folder, monkeypatch):
    from iclperm.runs import read

    monkeypatch.setattr(read, "_ANSWERS_OF_ANY", 0)
    monkeypatch.setattr(read, "_ANSWERS_A_BYTE", 1e-6)
    refused(r"tells of \d+ answers, but its items have [\d,]+ bytes", iclperm.open_run, folder, error=DamagedItem)
