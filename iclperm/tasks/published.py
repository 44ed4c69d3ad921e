"""The built-in tasks' data as their authors publish them: rows with the columns of the data sets that the tasks name.

What is read of either form is the same, so that a run of one is a run of the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from iclperm.base.files import Folder
from iclperm.errors import DataError
from iclperm.tasks.loaders import Row, checked, first_record, given_bytes, json_row, table_records, text_in

Split: TypeAlias = Literal["train", "test", "dev"]
Files: TypeAlias = dict[Split, list[Path]]

_LETTERS = "ABCD"
_MMLU_FILE = re.compile(r"(.+)_(dev|val|test)\.csv")
_MMLU_SPLITS: Mapping[Split, tuple[str, ...]] = {"train": ("dev", "val"), "test": ("test",)}
_X_CLASS = ("dataset.txt", "labels.txt", "classes.txt")


@dataclass(frozen=True)
class PublishedForm:
    """How a data set's authors lay it out: ``looked_for`` in words, ``find`` the files of each split that lie in a
    folder, and ``read`` the rows of one file. ``is_one`` is whether a single file is one of them."""

    looked_for: str
    find: Callable[[Path], Files]
    read: Callable[[Path], Iterator[Row]]
    is_one: Callable[[Path], bool]

    def rows(self, path: Path) -> list[Row]:
        """All rows of a file; raises `DataError` naming file and line of what does not fit."""
        return checked(str(path), self.read(path))


def _class_csv(num_classes: int, columns: tuple[str, ...], text: Callable[[str, str], dict[str, str]]) -> PublishedForm:
    """Zhang, Zhao and LeCun's: no line of names; the class from 1 on, a title, a text."""

    def is_one(path: Path) -> bool:
        return path.suffix == ".csv" and path.is_file() and _class_of(_first(path), num_classes) is not None

    def find(folder: Path) -> Files:
        return {split: [path] for split in ("train", "test") if is_one(path := folder / f"{split}.csv")}

    def read(path: Path) -> Iterator[Row]:
        for place, values in _records(path):
            number = _class_of(values, num_classes)
            if number is None:
                raise DataError(
                    f"{place}: {columns[0]} 1 to {num_classes}, {' and '.join(columns[1:])} are needed, not "
                    f"{len(values)} values that begin with {(values[0] if values else '')[:40]!r}; repair the row"
                )
            yield place, {"label": number - 1, **text(*values[1:])}

    looked_for = f"train.csv and test.csv without a line of names ({columns[0]} 1 to {num_classes}, {columns[1]}, "
    return PublishedForm(f"{looked_for}{columns[2]})", find, read, is_one)


def _class_of(values: list[str], num_classes: int) -> int | None:
    is_row = len(values) == 3 and values[0].isdecimal() and values[0].isascii()
    return int(values[0]) if is_row and 1 <= int(values[0][:9]) <= num_classes else None


def _first(path: Path) -> list[str]:
    """The cells of the first line of a table; of a long file only its beginning is read."""
    with path.open("rb") as file:
        raw = file.read(1 << 16)
    return first_record(raw.decode("utf-8", "replace").removeprefix("\ufeff"), ",")


def _records(path: Path) -> list[tuple[str, list[str]]]:
    return table_records(path, text_in(path, given_bytes(path), None), ",")


def _is_mmlu(path: Path) -> bool:
    return _MMLU_FILE.fullmatch(path.name) is not None and path.is_file() and _is_question(_first(path))


def _is_question(values: list[str]) -> bool:
    return len(values) == 6 and values[-1] in _LETTERS and len(values[-1]) == 1


def _find_mmlu(folder: Path) -> Files:
    found: Files = {}
    for split, names in _MMLU_SPLITS.items():
        paths = [path for name in names for path in _inside(folder / name, f"_{name}.csv") if _is_mmlu(path)]
        if paths:
            found[split] = paths
    return found


def _read_mmlu(path: Path) -> Iterator[Row]:
    named = _MMLU_FILE.fullmatch(path.name)
    subject = named[1] if named else path.stem
    for place, values in _records(path):
        if not _is_question(values):
            raise DataError(
                f"{place}: a question, four choices and the letter of one are needed, not {len(values)} values that "
                f"end in {(values[-1] if values else '')[:40]!r}; repair the row"
            )
        question, *choices, letter = values
        yield place, {"subject": subject, "question": question, "choices": choices, "answer": _LETTERS.index(letter)}


def _find_math(folder: Path) -> Files:
    found: Files = {}
    for split in ("train", "test"):
        subjects = (
            [folder / split / name for name in Folder(folder / split).names()] if _is_folder(folder, split) else []
        )
        if paths := [path for subject in subjects if subject.is_dir() for path in _inside(subject, ".json")]:
            found[split] = paths
    return found


def _read_math(path: Path) -> Iterator[Row]:
    yield f"{path}:1", json_row(f"{path}:1", given_bytes(path))


def _find_x_class(folder: Path) -> Files:
    return {"train": [folder / _X_CLASS[0]]} if all((folder / name).is_file() for name in _X_CLASS) else {}


def _read_x_class(path: Path) -> Iterator[Row]:
    files = [text_in(file, given_bytes(file), None).replace("\r\n", "\n") for file in map(path.with_name, _X_CLASS)]
    texts, numbers, words = (file.rstrip("\n").split("\n") for file in files)
    if len(texts) != len(numbers):
        raise DataError(f"{path}: has {len(texts):,} lines, but {_X_CLASS[1]} {len(numbers):,}; fetch the folder again")
    for line, (text, number) in enumerate(zip(texts, numbers, strict=True), start=1):
        given = number.strip()
        if not (given.isascii() and given.isdecimal() and int(given[:9]) < len(words)):
            raise DataError(
                f"{path.with_name(_X_CLASS[1])}:{line}: {given[:40]!r} is no number of one of the {len(words)} lines "
                f"of {_X_CLASS[2]}, from 0 on; repair the row"
            )
        yield f"{path}:{line}", {"text": text, "label": words[int(given)].strip()}


def _is_folder(folder: Path, name: str) -> bool:
    return (folder / name).is_dir()


def _inside(folder: Path, end: str) -> list[Path]:
    names = sorted(Folder(folder).names()) if folder.is_dir() else []
    return [folder / name for name in names if name.endswith(end)]


def _is_none(_: Path) -> bool:
    return False


def _x_class(name: str) -> PublishedForm:
    return PublishedForm(f"{name}'s {', '.join(_X_CLASS)}", _find_x_class, _read_x_class, _is_none)


FORMS: Mapping[str, PublishedForm] = {
    "ag_news": _class_csv(
        4, ("class", "title", "description"), lambda title, description: {"text": f"{title} {description}"}
    ),
    "dbpedia": _class_csv(
        14, ("class", "title", "abstract"), lambda title, content: {"title": title, "content": content}
    ),
    "mmlu": PublishedForm("dev/, val/ and test/ with SUBJECT_dev.csv and the like", _find_mmlu, _read_mmlu, _is_mmlu),
    "math": PublishedForm("train/SUBJECT/1.json and test/SUBJECT/1.json", _find_math, _read_math, _is_none),
    "nyt_topics": _x_class("NYT-Topics"),
    "nyt_locations": _x_class("NYT-Locations"),
}
"""By task. GSM8K's .jsonl and MMLU-Pro's .parquet files are of the ordinary kind."""
_INNER = {"nyt_topics": "NYT-Topics", "nyt_locations": "NYT-Locations", "math": "MATH"}


def places_of(task: str, folder: Path) -> list[Path]:
    """Where in a folder its authors' files of a task may lie: itself, ``data``, or what they call the data set."""
    return [folder, folder / "data", *([folder / _INNER[task]] if task in _INNER else [])]
