"""The data of tasks: every format read alike, damage named by its place, shares, data sets and folders instead."""

import csv
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tiny import make_rows, make_task, write_csv, write_rows

from iclperm import Task
from iclperm.errors import ConfigError, DataError
from iclperm.tasks.loaders import read_rows
from iclperm.tasks.task import BUILTIN

AG_NEWS = Path(__file__).parent / "data" / "ag_news"
COLUMNS = ("text", "label")


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


WRITERS = {".jsonl": write_rows, ".csv": write_csv, ".tsv": write_csv, ".parquet": write_parquet}


@pytest.mark.parametrize("suffix", WRITERS)
def test_the_same_data_is_the_same_in_every_format(tmp_path, suffix):
    rows = [*make_rows(1, 9), {"text": 'a "quoted", long\nline\ttab é', "label": "Red"}]
    write_rows(tmp_path / "expected.jsonl", rows)
    WRITERS[suffix](tmp_path / f"rows{suffix}", rows)
    task = Task.load(make_task(tmp_path, data={"train": "expected.jsonl", "test": f"rows{suffix}"}))
    expected, found = task.examples("train"), task.examples("test")
    assert found.fields == [{"text": row["text"]} for row in rows]
    assert (found.fields, found.hashes, found.digest) == (expected.fields, expected.hashes, expected.digest)
    assert found.labels.tolist() == expected.labels.tolist()


def test_the_digest_follows_fields_labels_and_order(tmp_path):
    path = make_task(tmp_path)

    def digest(rows: list[dict[str, Any]]) -> str:
        write_rows(tmp_path / "train.jsonl", rows)
        return Task.load(path).examples("train").digest

    rows = make_rows(1, 5)
    original = digest(rows)
    assert digest([row | {"more": 1} for row in rows]) == original
    assert digest(rows[::-1]) != original
    assert digest([rows[0] | {"label": "Blue"}, *rows[1:]]) != original
    assert digest([rows[0] | {"text": rows[0]["text"].upper()}, *rows[1:]]) != original


def test_the_place_of_a_row_is_where_it_begins(tmp_path):
    raw = b'\xef\xbb\xbftext,label\n"two\nlines",Red\n\nplain,Green\r\n"x",Blue\n'
    (tmp_path / "a.csv").write_bytes(raw)
    assert read_rows(tmp_path / "a.csv", COLUMNS) == [
        (f"{tmp_path / 'a.csv'}:2", {"text": "two\nlines", "label": "Red"}),
        (f"{tmp_path / 'a.csv'}:5", {"text": "plain", "label": "Green"}),
        (f"{tmp_path / 'a.csv'}:6", {"text": "x", "label": "Blue"}),
    ]
    write_parquet(tmp_path / "a.parquet", [{"text": "x", "label": 3, "other": "not read"}])
    assert read_rows(tmp_path / "a.parquet", COLUMNS) == [
        (f"{tmp_path / 'a.parquet'}:row 1", {"text": "x", "label": 3})
    ]


@pytest.mark.parametrize(
    ("raw", "place", "message"),
    [
        (b"text,label\na,Red\nb\n", ":3", "values in the row: 1, columns in the header: 2"),
        (b'text,label\n"a\nb",Red\nb,c,Red\n', ":4", "values in the row: 3, columns in the header: 2"),
        (b'text,label\na,Red\n"b,Red\nc,Red\n', ":3", "not valid CSV: unexpected end of data"),
        (b'text,label\n"a"b,Red\n', ":2", "not valid CSV: ',' expected after '\"'"),
        (b"text,label,text\na,Red,b\n", ":1", "the column name 'text' is blank or occurs twice"),
        (b"text,\na,Red\n", ":1", "the column name '' is blank or occurs twice"),
        (b"text,label\na,Red\ncaf\xe9,Red\n", ":3", "not UTF-8 (byte 20 of the file)"),
        (b"text,label\na\x00,Red\n", ":2", "holds a NUL character"),
        (b"text,label\n" + b"a" * (1 << 20) + b",Red\n", ":2", "at most 1048576 are read"),
        (b"text,label\n" + b"a" * (1 << 21) + b",Red\n", ":2", "field larger than field limit"),
        (b"text,colour\na,Red\n", ":2", "the column 'label' is missing; the columns are 'text', 'colour'"),
        (b"text,label\na,Red\nb,Purple\n", ":3", "'label' is 'Purple'; the labels are Red, Green, Blue"),
        (b"text,label\na,\n", ":2", "'label' is blank; the labels are Red, Green, Blue"),
        (b"text,label\n", "", "holds no rows"),
        (b"", "", "holds no rows"),
    ],
)
def test_a_damaged_table_is_named_by_file_and_line(tmp_path, raw, place, message):
    (tmp_path / "train.csv").write_bytes(raw)
    limit = csv.field_size_limit()
    with pytest.raises(DataError) as error:
        Task.load(make_task(tmp_path, data={"train": "train.csv", "test": "test.jsonl"})).examples("train")
    assert str(error.value).startswith(f"{tmp_path / 'train.csv'}{place}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert csv.field_size_limit() == limit


def test_rows_without_a_text_are_told(tmp_path):
    (tmp_path / "train.csv").write_bytes(b'text,label\n"",Red\na,Green\n"  ",Blue\nb,Red\n')
    task = Task.load(make_task(tmp_path, data={"train": "train.csv", "test": "test.jsonl"}))
    task.examples("train")
    assert task.notes == [
        "2 rows of train have no text in 'text', and are asked and shown so; take them out, or set drop_blank: "
        "true under 'data', which leaves out each row with a blank column"
    ]
    task = Task.load(make_task(tmp_path, data={"train": "train.csv", "test": "test.jsonl", "drop_blank": True}))
    assert len(task.examples("train")) == 2
    assert task.notes == []
    (tmp_path / "train.jsonl").write_text('{"text": 0, "label": "Red"}\n{"text": false, "label": "Green"}\n')
    task = Task.load(make_task(tmp_path, data={"train": "train.jsonl", "test": "test.jsonl"}))
    task.examples("train")
    assert task.notes == []


@pytest.mark.parametrize(
    ("columns", "place", "message"),
    [
        ({"text": ["a", "b\0"], "label": ["Red", "Red"]}, ":row 2", "holds a NUL character"),
        ({"text": ["a", None], "label": ["Red", "Red"]}, ":row 2", "the column 'text' holds no value"),
        ({"text": [b"a"], "label": ["Red"]}, "", "the column 'text' holds binary"),
        ({"text": [1.0, float("nan")], "label": ["Red", "Red"]}, ":row 2", "holds a value that cannot be read"),
        ({"text": ["a"], "label": [True]}, ":row 1", "'label' is 'True'; the labels are Red, Green, Blue"),
        ({"text": ["a"], "colour": ["Red"]}, ":row 1", "the column 'label' is missing; the columns are 'text', 'col"),
        ({"text": pa.array([], "string"), "label": pa.array([], "string")}, "", "holds no rows"),
    ],
)
def test_a_parquet_file_that_does_not_fit_is_named_by_row(tmp_path, columns, place, message):
    pq.write_table(pa.table(columns), tmp_path / "train.parquet")
    with pytest.raises(DataError) as error:
        Task.load(make_task(tmp_path, data={"train": "train.parquet", "test": "test.jsonl"})).examples("train")
    assert str(error.value).startswith(f"{tmp_path / 'train.parquet'}{place}: ")
    assert message in str(error.value)


def test_a_damaged_parquet_file_is_one_line(tmp_path):
    whole = write_parquet(tmp_path / "train.parquet", make_rows(1, 60)).read_bytes()
    task = make_task(tmp_path, data={"train": "train.parquet", "test": "test.jsonl"})
    not_utf8 = whole.replace(b"The apple", b"The appl\xff")
    assert not_utf8 != whole
    for raw in (b"", b"PAR1", whole[: len(whole) // 2], b"text,label\na,Red\n", not_utf8):
        (tmp_path / "train.parquet").write_bytes(raw)
        with pytest.raises(DataError, match=r"train\.parquet: is damaged") as error:
            Task.load(task).examples("train")
        assert "\n" not in str(error.value)


def test_numbers_are_labels_but_a_decimal_point_is_not_dropped(tmp_path):
    path = make_task(tmp_path, labels={0: "Red", 1: "Green"}, data={"train": "a.csv", "test": "a.parquet"})
    write_parquet(tmp_path / "a.parquet", [{"text": "x", "label": 1}])
    (tmp_path / "a.csv").write_text("text,label\nx,1.0\n")
    assert Task.load(path).examples("test").labels.tolist() == [1]
    with pytest.raises(DataError, match=r"a\.csv:2: 'label' is '1\.0'; the labels are 0, 1"):
        Task.load(path).examples("train")


def test_several_files_are_one_split_in_sorted_order(tmp_path):
    rows = make_rows(1, 9)
    (tmp_path / "data").mkdir()
    for part in (2, 0, 1):
        write_parquet(tmp_path / "data" / f"train-{part}.parquet", rows[3 * part : 3 * part + 3])
    parts = [f"data/train-{part}.parquet" for part in range(3)]
    task = Task.load(make_task(tmp_path, data={"train": "data/train-*.parquet", "test": parts}))
    assert [fields["text"] for fields in task.examples("train").fields] == [row["text"] for row in rows]
    assert task.examples("test").digest == task.examples("train").digest
    task = Task.load(make_task(tmp_path, data={"train": "data/tarin-*.parquet", "test": "test.jsonl"}))
    with pytest.raises(DataError, match=r"tarin-\*\.parquet: no file matches"):
        task.examples("train")


def shared_out(folder: Path, rows: list[dict[str, Any]], **shares: float) -> dict[str, list[str]]:
    """The texts of every split of a task whose test, and perhaps dev, are shares of its train file."""
    path = make_task(folder, data={"train": "all.jsonl", **shares})
    write_rows(folder / "all.jsonl", rows)
    task = Task.load(path)
    return {split: [fields["text"] for fields in task.examples(split).fields] for split in ("train", *shares)}


def test_shares_part_the_content_whatever_its_order(tmp_path):
    rows = make_rows(1, 800)
    splits = shared_out(tmp_path, rows, test=0.3, dev=0.2)
    assert sorted(itertools.chain(*splits.values())) == sorted(row["text"] for row in rows)
    assert all(abs(len(splits[split]) - 800 * share) < 60 for split, share in zip(splits, (0.5, 0.3, 0.2), strict=True))
    again = shared_out(tmp_path, [row | {"text": row["text"].upper()} for row in reversed(rows)], test=0.3, dev=0.2)
    assert {split: sorted(text.upper() for text in texts) for split, texts in splits.items()} == {
        split: sorted(texts) for split, texts in again.items()
    }
    assert shared_out(tmp_path, rows, test=0.3)["test"] == splits["test"]
    assert set(shared_out(tmp_path, rows, test=0.4)["test"]) > set(splits["test"])


def test_duplicates_fall_on_one_side_and_are_counted_there(tmp_path):
    rows = make_rows(1, 60)
    splits = shared_out(tmp_path, rows, test=0.5)
    doubled = [*rows, *(row | {"text": f" {row['text'].upper()}"} for row in rows)]
    assert shared_out(tmp_path, doubled, test=0.5) == splits
    task = Task.load(tmp_path / "colours.yaml")
    for split, texts in splits.items():
        assert task.examples(split).num_duplicates == len(texts)


def test_dev_may_be_a_share_beside_a_test_file(tmp_path):
    task = Task.load(make_task(tmp_path, data={"train": "train.jsonl", "test": "test.jsonl", "dev": 0.25}))
    train, dev, test = (set(task.examples(split).hashes) for split in ("train", "dev", "test"))
    assert (len(train | dev), len(train & dev), len(test)) == (60, 0, 30)
    with pytest.raises(DataError, match="task 'colours': its shares leave the split 'dev' no rows"):
        Task.load(make_task(tmp_path, data={"train": "train.jsonl", "test": "test.jsonl", "dev": 1e-9})).examples("dev")


def test_ag_news_is_worded_as_published():
    task = Task.load("ag_news", data=AG_NEWS / "csv")
    train = task.examples("train")
    opening = "Classify the news articles into the categories of World, Sports, Business, and Technology.\n\n"
    text = train.fields[0]["text"]
    assert (task.opening(), task.shots, task.separator) == (opening, 8, "\n\n")
    assert task.render_demonstration({"text": text}, 3) == f"Article: {text}\nAnswer: Technology"
    assert task.render_query({"text": text}) == f"Article: {text}\nAnswer:"
    assert task.continuations() == [" World", " Sports", " Business", " Technology"]
    assert task.source
    assert task.licence


def test_ag_news_is_read_from_a_folder_as_it_is_on_the_hub():
    splits = ("train", "test", "dev")
    tables, hub = ([Task.load("ag_news", data=AG_NEWS / kind).examples(s) for s in splits] for kind in ("csv", "hub"))
    assert [found.digest for found in tables] == [found.digest for found in hub]
    train, test, dev = map(len, hub)
    assert (train + dev, test) == (64, 32)
    assert dev > 0


@pytest.fixture
def ag_news_from(tmp_path, monkeypatch):
    """Loads the wording of ag_news with other data; the cache of the datasets library is the test's own."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def load(**data: Any) -> Task:
        content = yaml.safe_load((BUILTIN / "ag_news.yaml").read_text(encoding="utf-8"))
        (tmp_path / "task.yaml").write_text(yaml.safe_dump(content | {"data": data}), encoding="utf-8")
        return Task.load(tmp_path / "task.yaml")

    return load


def test_a_dataset_folder_is_read_by_the_datasets_library(ag_news_from, capfd):
    task = ag_news_from(dataset=str(AG_NEWS / "hub"), train="train", test="test", dev=0.05)
    read = {split: task.examples(split) for split in ("train", "test", "dev")}
    assert "Generating" not in capfd.readouterr().err
    expected = Task.load("ag_news", data=AG_NEWS / "hub")
    assert {split: found.digest for split, found in read.items()} == {
        split: expected.examples(split).digest for split in read
    }


def test_a_dataset_without_the_split_or_the_column_says_so(ag_news_from):
    task = ag_news_from(dataset=str(AG_NEWS / "hub"), train="train", test="tset")
    with pytest.raises(DataError, match=r"the split 'tset' of the dataset .* cannot be loaded \(ValueError: .*; check"):
        task.examples("test")
    task = task.model_copy(update={"label_field": "topic"})
    with pytest.raises(DataError, match=r"hub\[train\]:row 1: the column 'topic' is missing; the columns are 'text'"):
        task.examples("train")


@pytest.mark.parametrize("silent_before", [False, True])
def test_a_hub_out_of_reach_is_one_line_and_progress_bars_are_given_back(ag_news_from, monkeypatch, silent_before):
    import datasets
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "get_session", lambda: SimpleNamespace(head=lambda *_, **__: None))
    asked = []

    def load_dataset(*names: Any, **options: Any) -> None:
        asked.append((names, options, datasets.utils.are_progress_bars_disabled()))
        raise ConnectionError("Couldn't reach\nthe Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    if silent_before:
        datasets.utils.disable_progress_bars()
    task = ag_news_from(dataset="owner/name", revision="a" * 40, config="c", train="train", test="test")
    with pytest.raises(DataError, match=r"Couldn't reach the Hub.*give their folder with the study's key 'data'"):
        task.examples("test")
    assert asked == [(("owner/name",), {"name": "c", "split": "test", "revision": "a" * 40}, True)]
    assert datasets.utils.are_progress_bars_disabled() == silent_before
    datasets.utils.enable_progress_bars()


def test_without_a_network_the_cache_alone_is_asked_once(ag_news_from, monkeypatch, capfd):
    import datasets
    import huggingface_hub
    from datasets import config

    waited, asked = [], []

    def head(address, *, timeout):
        waited.append(timeout)
        raise OSError("[Errno -2] Name or service not known\nby anybody")

    load = datasets.load_dataset

    def load_dataset(*names: Any, **options: Any) -> Any:
        asked.append(config.HF_HUB_OFFLINE)
        return load(*names, **options)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # whatever the environment says
    before = config.HF_HUB_OFFLINE
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: SimpleNamespace(head=head))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = ag_news_from(dataset="owner/name", revision="a" * 40, train="train", test="test")
    with pytest.raises(DataError) as raised:
        task.examples("test")
    assert str(raised.value) == (
        "the split 'test' of the dataset 'owner/name' is not in the cache, and the hub is out of reach ([Errno -2] "
        "Name or service not known by anybody); go online, or give the folder of its files with --data (the study's "
        "key 'data')"
    )
    assert (len(waited), asked, config.HF_HUB_OFFLINE) == (1, [True], before)
    assert waited[0] <= 10
    assert capfd.readouterr().err == ""  # no line of a retry


def test_a_hub_name_needs_a_commit_and_the_library(tmp_path, monkeypatch):
    data = {"dataset": "owner/name", "train": "train", "test": "test"}
    with pytest.raises(
        ConfigError, match=r"the dataset 'owner/name' is no folder at .*, and a hub name needs the key 'r"
    ):
        Task.load(make_task(tmp_path, data=data)).examples("train")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'iclperm\[hf\]'"):
        Task.load(make_task(tmp_path, data=data | {"revision": "a" * 40})).examples("train")


def test_dev_may_be_a_share_of_test(tmp_path):
    task = Task.load(make_task(tmp_path, data={"train": "train.jsonl", "test": "test.jsonl", "dev": "0.3 of test"}))
    train, dev, test = (set(task.examples(split).hashes) for split in ("train", "dev", "test"))
    assert (len(train), len(dev | test), len(dev & test)) == (60, 30, 0)
    assert 3 <= len(dev) <= 17


def test_only_the_rows_to_keep_are_read(tmp_path):
    data = {"train": "train.jsonl", "test": "test.jsonl", "dev": 0.3, "choose": "size", "keep": ["1", "3"]}
    path = make_task(tmp_path, data=data)
    rows = [row | {"size": number % 4} for number, row in enumerate(make_rows(1, 60))]
    write_rows(tmp_path / "train.jsonl", rows)
    task = Task.load(path)
    kept = [fields["text"] for split in ("train", "dev") for fields in task.examples(split).fields]
    assert sorted(kept) == sorted(row["text"] for row in rows if row["size"] in (1, 3))
    with pytest.raises(DataError, match=r"test\.jsonl:1: the column 'size' is missing"):
        task.examples("test")
    write_rows(tmp_path / "test.jsonl", [row | {"size": 1} for row in make_rows(2, 6)])
    with pytest.raises(DataError, match=r"the test data hold no size '3'; there are 1$"):
        task.examples("test")


@pytest.mark.parametrize("stem", ["dev", "valid", "validation"])
def test_a_folder_takes_the_place_of_the_task_s_data(tmp_path, stem):
    folder = tmp_path / "mine"
    (folder / "data").mkdir(parents=True)
    write_csv(folder / "train.csv", make_rows(3, 12))
    write_parquet(folder / "data" / "test-00000-of-00002.parquet", make_rows(4, 6))
    write_parquet(folder / "data" / "test-00001-of-00002.parquet", make_rows(5, 6))
    write_rows(folder / f"{stem}.jsonl", make_rows(6, 3))
    task = Task.load(make_task(tmp_path, data={"train": "absent.csv", "test": 0.5}), data=folder)
    texts = {split: [f["text"] for f in task.examples(split).fields] for split in ("train", "test", "dev")}
    assert texts["train"] == [row["text"] for row in make_rows(3, 12)]
    assert texts["test"] == [row["text"] for row in make_rows(4, 6) + make_rows(5, 6)]
    assert texts["dev"] == [row["text"] for row in make_rows(6, 3)]


def test_a_folder_falls_back_to_the_declared_share(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    write_csv(folder / "train.csv", make_rows(3, 60))
    declared = make_task(tmp_path, data={"train": "train.jsonl", "test": 0.5})
    task = Task.load(declared, data=str(folder))
    assert len(task.examples("train")) + len(task.examples("test")) == 60
    with pytest.raises(ConfigError, match="has no 'dev' data; name a file, or a share of train"):
        task.examples("dev")
    with pytest.raises(DataError, match=r"mine: holds no test data; add test\.csv"):
        Task.load(make_task(tmp_path), data=folder)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["train.csv", "train.jsonl"], "both 'train.csv' and 'train.jsonl' may be the train data; keep one"),
        (["train.parquet", "train-0.parquet"], "both 'train-0.parquet' and 'train.parquet' may be the train data"),
        (["train-00000-of-00003.parquet", "train-00002-of-00003.parquet"], "the train data has 2 of its 3 parts"),
        (["training.csv"], "holds no train data; add train.csv, or another of .jsonl, .csv, .tsv, .parquet"),
        (["test.csv"], "; of one file alone make a task: iclperm tasks new --from FILE"),
    ],
)
def test_a_folder_that_is_ambiguous_or_incomplete_is_refused(tmp_path, names, message):
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    with pytest.raises(DataError) as error:
        Task.load(make_task(tmp_path, data={"train": "a", "test": 0.5}), data=folder)
    assert str(error.value).startswith(str(folder))
    assert message in str(error.value)


def test_a_data_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match="absent: is not a folder"):
        Task.load(make_task(tmp_path), data=tmp_path / "absent")


@given(texts=st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1))
def test_any_text_comes_back_from_a_table_as_it_was(tmp_path_factory, texts):
    rows = [{"text": text, "label": str(number)} for number, text in enumerate(texts)]
    folder = tmp_path_factory.mktemp("tables")
    for suffix in (".csv", ".tsv", ".parquet"):
        path = WRITERS[suffix](folder / f"rows{suffix}", rows)
        assert [row for _, row in read_rows(path, COLUMNS)] == rows
