"""A task proposed for a data file: its form, its columns of texts and labels, and what is odd in it."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from iclperm.errors import ConfigError, DataError
from iclperm.stats.texts import near_duplicates
from iclperm.tasks.examples import folded
from iclperm.tasks.loaders import (
    DELIMITERS,
    SUFFIXES,
    first_record,
    given_bytes,
    missing_column,
    parquet_columns,
    read_rows,
    table_records,
    text_in,
)
from iclperm.tasks.task import Task

_LABEL_NAMES = {
    "label",
    "labels",
    "class",
    "category",
    "topic",
    "queue",
    "target",
    "intent",
    "sentiment",
    "type",
    "tag",
}
_MOST_CLASSES, _LONGEST_LABEL, _LONG_TEXT = 50, 60, 15
_SHARES = (0.3, 0.25, 0.35, 0.2, 0.4)
_DEV_FROM = 100  # rows from which on a dev share is set aside
_FEW, _ENOUGH = 10, 30  # test rows of a label: an interval of its recall can be over 50 points wide, 35
_MOST_NAMED = 10
_MOST_SHOWN = 60  # letters of a text in a note
_MOST_OF_LABEL, _MOST_OF_LABELS = 1_000, 50_000  # letters of one, as YAML can have for a key, and of all
_RESERVED = frozenset(
    [
        "label",
        "and",
        "else",
        "false",
        "if",
        "in",
        "is",
        "n",
        "no",
        "none",
        "not",
        "null",
        "off",
        "on",
        "or",
        "self",
        "true",
        "y",
        "yes",
    ]
)  # to Jinja or YAML, or to the templates


@dataclass(frozen=True)
class Proposal:
    """A task for a data file, and what was found while looking at it."""

    name: str
    text: str
    """The task file, commented."""
    facts: dict[str, str]
    """How the file is written and read."""
    variants: dict[str, dict[str, int]]
    """Rows of each value of the label column, by the label that it is taken for."""
    left_out: dict[str, int]
    """Rows that no split holds, by why."""
    counts: dict[str, dict[str, int]]
    """Rows by label and split."""
    near: list[tuple[str, str, str]] = field(default_factory=list)
    """Rows of train and of another split that are nearly the same: the two texts, and the split."""
    task: Task | None = None
    notes: tuple[str, ...] = ()


def propose(
    path: Path, folder: Path, *, name: str | None = None, label: str | None = None, texts: Sequence[str] = ()
) -> Proposal:
    """Looks at a data file and proposes a task that reads it from ``folder``, where the task file is to lie.

    ``label`` and ``texts`` are columns, guessed where they are not given. Raises `DataError` for a file that cannot be
    read, `ConfigError` for a column that it does not have and where no column looks like labels. O(bytes), and for
    near-duplicates O(rows · rows that share a rare word).
    """
    keys, columns, rows = _read(path)
    facts = {"file": str(path), "rows": f"{len(rows):,}", "columns": ", ".join(columns), **_in_words(keys)}
    likely = [_named(label, columns, path)] if label else _label_columns(columns, rows, path)
    label_column = likely[0]
    text_columns = [_named(text, columns, path) for text in texts] or _text_columns(columns, rows, label_column, path)
    facts |= {"label": label_column, "texts": ", ".join(text_columns)}
    used = [*text_columns, label_column]
    if others := [column for column in columns if column not in used]:
        facts["not used"] = f"{', '.join(others)} (--text adds a column)"
    for number, row in enumerate(rows, start=1):
        if missing := [column for column in used if column not in row]:
            raise missing_column(f"{path}:row {number}", missing[0], row)
    whole = [row for row in rows if all(_written(row[column]) for column in used)]
    variants = _variants([str(row[label_column]) for row in whole])
    contents: dict[str, set[str]] = defaultdict(set)
    label_of = {value: word for word, values in variants.items() for value in values}
    for row in whole:
        contents[label_of[str(row[label_column])]].add(folded(" ".join(str(row[column]) for column in text_columns)))
    few = [word for word in variants if len(contents[word]) < 3]
    kept = {word: values for word, values in variants.items() if word not in few}
    if len(kept) < 2:
        raise ConfigError(
            f"{path}: the column {label_column!r} has {len(kept)} labels with three different texts or more, and a "
            "task needs two; name another with --label"
        )
    shown = [len(_quoted(word)) for word in kept]
    if max(shown) > _MOST_OF_LABEL or sum(shown) > _MOST_OF_LABELS:
        raise ConfigError(
            f"{path}: the column {label_column!r} has {len(kept):,} labels, the longest of {max(shown):,} letters, all "
            f"of {sum(shown):,}; at most {_MOST_OF_LABEL:,} and {_MOST_OF_LABELS:,} can be: name another with --label"
        )
    left_out = {"blank": len(rows) - len(whole)} | {
        f"label {word!r}, which has fewer than three different texts": sum(variants[word].values()) for word in few
    }
    made = name or re.sub(r"[^A-Za-z0-9_.-]+", "-", path.stem).strip("-._") or "my-task"
    best: tuple[Any, ...] = ()
    for share in _SHARES:
        text = _task_text(made, path, folder, keys, text_columns, label_column, kept, bool(few), share, len(whole))
        task = _task_of(text, folder)
        splits = ["train", "test", *(["dev"] if task.data.dev else [])]
        examples = {split: task.examples(split) for split in splits}  # type: ignore[arg-type]
        least = min(int(np.bincount(found.labels, minlength=len(kept)).min()) for found in examples.values())
        if not best or least > best[0]:
            best = least, text, task, examples
        if least >= 2:
            break
    text, task, examples = best[1:]
    left_out["repeats another row of its split"] = sum(found.num_duplicates for found in examples.values())
    counts = {
        word: {split: int((found.labels == place).sum()) for split, found in examples.items()}
        for place, word in enumerate(task.words)
    }
    unnamed = [f"the columns have no names: say in the templates what {', '.join(text_columns)} mean"]
    numbered = [
        "the labels are numbers, and a model reads words better: name them under label_values, such as "
        f'"World": ["{next(iter(kept))}"], and in the instruction'
    ]
    conflicting = sum(found.num_conflicting for found in examples.values())
    notes = (
        [f"{conflicting:,} of the repeated rows have another label than the row that is kept: look at them"]
        if conflicting
        else []
    )
    rivals = [] if folded(label_column) in _LABEL_NAMES else [name for name in likely[1:] if name not in text_columns]
    if rivals:
        notes.append(f"{', '.join(rivals)} may be the labels as well as {label_column}: name the right one by --label")
    notes += numbered if all(re.fullmatch(r"[-+]?[\d.,]+", word) for word in kept) else []
    notes += unnamed if "columns" in keys else []
    notes += _short_forms(list(kept))
    if len(kept) > _MOST_CLASSES:
        notes.append(f"{len(kept)} different labels: is this the column of the labels? Every prompt names them all")
    scarce = {
        word: ", ".join(f"{split} {row[split]}" for split in ("test", "dev") if split in row)
        for word, row in counts.items()
        if 0 < row["test"] < _FEW
    }
    if scarce:
        notes.append(
            f"few rows of {'; '.join(f'{word!r} ({rows})' for word, rows in [*scarce.items()][:_MOST_NAMED])}"
            + (f" and {len(scarce) - _MOST_NAMED} more labels" if len(scarce) > _MOST_NAMED else "")
            + f": how well these are answered will hardly be known; add rows, {_ENOUGH} or so of each in test"
        )
    for split in examples:
        if short := [word for word in counts if not counts[word][split]]:
            notes.append(f"no {split} rows of {', '.join(map(repr, short))}: add rows, or leave these labels out")
    contents_of = {split: found.texts(range(len(found))) for split, found in examples.items()}
    train, *others = contents_of
    found_near = {split: near_duplicates(contents_of[train], contents_of[split]) for split in others}
    near = [
        (contents_of[train][first], contents_of[split][second], split)
        for split, pairs in found_near.items()
        for first, second in pairs or ()
    ]
    if None in found_near.values():
        notes.append("near-duplicates were not all looked for: the rows are too many, or too much alike")
    if flattered := near_duplicates(contents_of.get("dev", []), contents_of["test"]):
        ours, theirs = (contents_of[split][row] for split, row in zip(("dev", "test"), flattered[0], strict=True))
        notes.append(
            f"{len(flattered):,} test rows nearly repeat one of dev, and what a search chooses there is flattered; "
            f"keep one of each, such as: {ours[:_MOST_SHOWN]!r} (dev), {theirs[:_MOST_SHOWN]!r} (test)"
        )
    return Proposal(
        made, text, facts, variants, {why: number for why, number in left_out.items() if number}, counts,
        near, task, tuple(notes),
    )  # fmt: skip


def _short_forms(names: Sequence[str]) -> list[str]:
    """A note where labels look like short forms, or slips of the pen, of others."""
    found = []
    for short in names if len(names) <= _MOST_CLASSES else ():
        others = [long for long in names if _may_mean(folded(short), folded(long))]
        if others:
            found.append(f"{short!r} may mean {max(others, key=len)!r}")
    if not found:
        return []
    return [
        f"{', '.join(found)}: to join labels, move the spellings of one into the other's list under label_values, take "
        "it out there and in instruction, and lower shots to the number of labels that is left"
    ]


def _may_mean(short: str, long: str) -> bool:
    """Whether one label is another one cut short, or without some letters (Acct.), or all but the same."""
    bare = short.rstrip(".")
    if len(bare) < 3 or len(bare) >= len(long) or not bare.replace(" ", "").isalpha():
        return False
    if long.startswith(bare) and " " not in long[len(bare) :]:
        return True
    letters = iter(long)
    is_within = long[0] == bare[0] and all(letter in letters for letter in bare)
    return is_within and (short.endswith(".") or len(long) - len(bare) == 1)


def _read(path: Path) -> tuple[dict[str, Any], list[str], list[dict[str, Any]]]:
    """What a task's ``data`` must say of a file's form, its columns and its rows."""
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path}: cannot be looked at; give a {', '.join(SUFFIXES)} file")
    if path.suffix not in (".csv", ".tsv"):
        names = parquet_columns(path) if path.suffix == ".parquet" else []
        found = read_rows(path, names)
        names = names or list(found[0][1])
        _refuse_unnamed(f"{path}:row 1", names)
        return {}, names, [row for _, row in found]
    raw = given_bytes(path)
    keys: dict[str, Any] = {}
    try:
        text = text_in(path, raw, None)
    except DataError:
        keys["encoding"] = "utf-16" if b"\0" in raw[:200] else "cp1252"
        text = text_in(path, raw, keys["encoding"])
    delimiter = _delimiter(path, text)
    if delimiter != ("\t" if path.suffix == ".tsv" else ","):
        keys["delimiter"] = delimiter
    records = table_records(path, text, delimiter)
    if not records:
        raise DataError(f"{path}: holds no rows; give data with at least one")
    names, width = records[0][1], Counter(len(record) for _, record in records).most_common(1)[0][0]
    odd = [(place, len(record)) for place, record in records if len(record) != width]
    if odd:
        shown = ", ".join(f"line {place.rpartition(':')[2]} has {count}" for place, count in odd[:10])
        raise DataError(
            f"{path}: {len(odd):,} of {len(records):,} rows do not have the {width} values of the others: {shown}; "
            "repair them (quote a value that holds the delimiter, a quote or a line break)"
        )
    if _is_header(names, [record for _, record in records[1:]]):
        records = records[1:]
        _refuse_unnamed(f"{path}:1", names)
    else:
        names = [f"column{number}" for number in range(1, width + 1)]
        keys["columns"] = names
    return keys, names, [dict(zip(names, record, strict=True)) for _, record in records]


def _refuse_unnamed(place: str, names: Sequence[str]) -> None:
    if blank := [number for number, name in enumerate(names, 1) if not name.strip()]:
        raise DataError(f"{place}: column {blank[0]} has no name; give every column its own")


def _written(value: Any) -> str:
    """A value as text, "" of none; 0 and False are values."""
    return "" if value is None else str(value).strip()


def _delimiter(path: Path, text: str) -> str:
    """The sign by which most rows have the same number of values, more than one."""
    found: list[tuple[float, int, str]] = []
    for sign in DELIMITERS:
        if len(first_record(text, sign)) < 2:
            continue
        try:
            widths = Counter(len(record) for _, record in table_records(path, text, sign))
        except DataError:
            continue
        width, count = widths.most_common(1)[0]
        if width > 1:
            found.append((count / sum(widths.values()), -len(found), sign))
    if not found:
        table_records(path, text, ",")  # which says what is wrong with its quotes
        raise DataError(
            f"{path}: one column only, with each of {', '.join(map(repr, DELIMITERS))}; give texts and labels"
        )
    return max(found)[2]


def _is_header(names: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Names are different, short and no numbers, and none of them stands below itself."""
    if len(set(names)) < len(names) or any(len(name) > _LONGEST_LABEL or "\n" in name for name in names):
        return False
    if any(re.fullmatch(r"[-+]?[\d.,]+", name.strip()) for name in names):
        return False
    return not any(
        folded(row[place]) == folded(name) for row in rows for place, name in enumerate(names) if name.strip()
    )


def _named(column: str, columns: Sequence[str], path: Path) -> str:
    if column not in columns:
        raise ConfigError(f"{path}: has no column {column!r}; its columns are {', '.join(columns)}")
    return column


def _label_columns(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], path: Path) -> list[str]:
    """The columns of short values that repeat: first those with a label's name, then those with the fewest values."""
    found: list[tuple[bool, bool, int, str]] = []
    for column in columns:
        values = [folded(text) for row in rows if (text := _written(row.get(column)))]
        if not values or len(columns) < 2:
            continue
        different, longest = len(set(values)), max(map(len, values))
        is_like = 2 <= different <= min(_MOST_CLASSES, len(values) / 2) and longest <= _LONGEST_LABEL
        if is_like:
            found.append(
                (
                    folded(column) not in _LABEL_NAMES,
                    all(v.replace(".", "").isdigit() for v in values),
                    different,
                    column,
                )
            )
    if not found:
        raise ConfigError(
            f"{path}: no column looks like labels (2 to {_MOST_CLASSES} short values that repeat); name it with "
            f"--label: {', '.join(columns)}"
        )
    return [column for _, _, _, column in sorted(found)]


def _text_columns(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], label: str, path: Path) -> list[str]:
    """The columns of words: those with long values, else the longest."""
    length = {
        column: sum(len(_written(row.get(column))) for row in rows) / len(rows) for column in columns if column != label
    }
    if not length:
        raise ConfigError(f"{path}: has no column beside the label {label!r}; a task needs texts")
    spaced = {c: sum(" " in _written(row.get(c)) for row in rows) / len(rows) for c in length}
    long = [column for column in length if length[column] >= _LONG_TEXT and spaced[column] > 0.5]
    return long or [max(length, key=length.__getitem__)]


def _variants(values: Sequence[str]) -> dict[str, dict[str, int]]:
    """The values by what they are without case and white space around them, under the most frequent spelling."""
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    for value in values:
        groups[folded(value)][value] += 1
    named = {}
    for counts in groups.values():
        spelt: Counter[str] = Counter()
        for value, count in counts.items():
            spelt[" ".join(value.split())] += count
        named[spelt.most_common(1)[0][0]] = dict(counts.most_common())
    return dict(sorted(named.items()))


def _in_words(keys: Mapping[str, Any]) -> dict[str, str]:
    return {
        "encoding": keys.get("encoding", "UTF-8, or what its byte order mark says"),
        "between columns": repr(keys["delimiter"]) if "delimiter" in keys else "as usual",
        "line of names": "none: columns are numbered" if "columns" in keys else "yes",
    }


def _quoted(value: Any) -> str:
    return yaml.safe_dump(value, default_style='"', allow_unicode=True, width=10**9).strip()


def _task_text(
    name: str, path: Path, folder: Path, keys: Mapping[str, Any], texts: Sequence[str], label: str,
    kept: Mapping[str, Mapping[str, int]], is_part: bool, share: float, num_rows: int,
) -> str:  # fmt: skip
    given = path.resolve()
    place = os.path.relpath(given, folder.resolve())
    fields = {}
    for column in texts:
        field_name = re.sub(r"\W+", "_", column, flags=re.ASCII).strip("_").lower() or "text"
        field_name = f"text_{field_name}" if field_name[0].isdigit() or field_name in _RESERVED else field_name
        while field_name in fields:
            field_name += "_2"
        fields[field_name] = column
    shown = "\n".join(
        f"{column.replace('{', '(').replace('}', ')')}: {{{{ {key} }}}}" for key, column in fields.items()
    )
    names = ", ".join(kept)
    data = [f"  train: {_quoted(place if not place.startswith('..') else str(given))}"]
    data += [f"  test: {share}"] + ([f"  dev: {0.2 if share <= 0.3 else 0.15}"] if num_rows >= _DEV_FROM else [])
    data += [
        f"  {key}: {_quoted(value) if isinstance(value, str) else [*map(str, value)]}" for key, value in keys.items()
    ]
    data += ["  drop_blank: true", "  stratify: true"]
    if is_part:
        values = [value for of_word in kept.values() for value in of_word]
        data += [f"  choose: {_quoted(label)}", f"  keep: [{', '.join(map(_quoted, values))}]"]
    lines = [
        f"# Proposed by iclperm tasks new --from; look it over, then: iclperm tasks show {name}.yaml",
        f"name: {_quoted(name)}",
        "# test and dev are shares of the rows of every label (stratify); content decides which row goes where, so",
        "# repeated rows stay together.",
        "# drop_blank leaves out rows without a text or a label.",
        "data:",
        *data,
        "# The names that the templates use: the columns of the data.",
        "fields:",
        *(f"  {key}: {_quoted(column)}" for key, column in fields.items()),
        "# The column that holds the label.",
        f"label_field: {_quoted(label)}",
        "# The label words, each with all the spellings in the data that mean it.",
        "label_values:",
        *(f"  {_quoted(word)}: [{', '.join(map(_quoted, values))}]" for word, values in kept.items()),
        '# Opens every prompt; may be "".',
        f"instruction: {_quoted(f'Say which of these it is: {names}.')}",
        "# Jinja templates. A demonstration must begin as the query does, and end in what continuation appends to it.",
        f"demonstration: {_quoted(shown + chr(10) + 'Answer: {{ label }}')}",
        f"query: {_quoted(shown + chr(10) + 'Answer:')}",
        'continuation: " {{ label }}"',
        'separator: "\\n\\n"',
        "# The number of demonstrations where a study names none.",
        f"shots: {len(kept)}",
    ]
    return "\n".join(lines) + "\n"


def _task_of(text: str, folder: Path) -> Task:
    task = Task(**yaml.safe_load(text))
    task._folder = folder.resolve()
    return task
