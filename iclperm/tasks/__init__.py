"""Tasks: where the examples are, how a demonstration and a query are worded, which labels there are."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PrivateAttr, field_validator

from iclperm.config import Choices, refuse_other_keys
from iclperm.errors import ConfigError, DataError
from iclperm.tasks.loaders import missing_column
from iclperm.tasks.sources import Dataset, Split, Word, found_in
from iclperm.tasks.templates import Template

__all__ = ["BUILTIN", "Dataset", "Examples", "Split", "Task", "builtin_tasks", "template_text"]

BUILTIN = Path(__file__).parent / "builtin"
_STARTER = Path(__file__).parent / "starter.yaml"

Text = Annotated[str, Field(max_length=65_536)]
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
_JSON = json.JSONEncoder(ensure_ascii=False, sort_keys=True)


class _Content(NamedTuple):
    """What one row says: the hash that identifies it, what the templates see, the position of its label."""

    hash: str
    fields: dict[str, Any]
    label: int


@dataclass(frozen=True)
class Examples:
    """One split of a task, each content once (the first occurrence), in file order.

    ``fields`` are the values the templates see, ``labels`` int64 [N] are positions on the L axis, ``hashes`` identify
    the content (the rendered query, case and white space aside). ``num_duplicates`` rows were left out, of which
    ``num_conflicting`` have another label than the row that was kept. ``digest`` is the SHA-256 of the fields and
    labels kept, in order: equal for equal data, whatever kind of file it came from.
    """

    split: str
    fields: list[dict[str, Any]]
    labels: NDArray[np.int64]
    hashes: list[str]
    num_duplicates: int
    num_conflicting: int
    digest: str

    def __len__(self) -> int:
        return len(self.fields)


class Task(Choices):
    """A classification task read from a YAML file; raises `ConfigError` naming the key, the value and the remedy.

    ``fields`` maps the names used in the templates to columns of the data. ``labels`` lists the label words, or maps
    each value of the data's ``label_field`` to its word; their order is the L axis. ``demonstration`` and
    ``continuation`` also see ``label``, the word; ``query`` does not. ``instruction`` opens every prompt and is
    followed by the separator. ``shots`` is the default k. ``description``, ``source`` and ``licence`` inform only.
    """

    name: Annotated[str, Field(pattern=_NAME)]
    description: Text = ""
    source: Text = ""
    licence: Text = ""
    data: Dataset
    fields: Annotated[dict[str, Word], Field(min_length=1)]
    label_field: Word = "label"
    labels: Annotated[list[Word], Field(min_length=2)] | Annotated[dict[str | int, Word], Field(min_length=2)]
    instruction: Text = ""
    demonstration: Text
    query: Text
    continuation: Text = " {{ label }}"
    separator: Text = "\n\n"
    shots: Annotated[int, Field(ge=0, le=100_000)]
    _folder: Path = PrivateAttr(default_factory=Path)
    _templates: dict[str, Template] = PrivateAttr(default_factory=dict)
    _contents: dict[Split, list[_Content]] = PrivateAttr(default_factory=dict)

    @field_validator("data", mode="before")
    @classmethod
    def _keyed_by_text(cls, data: Any) -> Any:
        if isinstance(data, dict):
            refuse_other_keys(data)
        return data

    @field_validator("labels")
    @classmethod
    def _distinct_words(cls, labels: list[str] | dict[str | int, str]) -> list[str] | dict[str | int, str]:
        words = Counter(" ".join(word.split()) for word in (labels.values() if isinstance(labels, dict) else labels))
        for word, count in words.items():
            if not word:
                raise ValueError("a label word is blank; give every label a word")
            if count > 1:
                raise ValueError(f"the label word {word!r} occurs twice; give every label its own word")
        for value, count in Counter(map(str, labels)).items():
            if not value.strip() or count > 1:
                raise ValueError(f"the data's label {value!r} is blank or occurs twice; list every label once")
        return labels

    @field_validator("fields")
    @classmethod
    def _without_the_answer(cls, fields: dict[str, str]) -> dict[str, str]:
        if "label" in fields:
            raise ValueError("the name 'label' stands for the label's word; give the field another name")
        return fields

    def model_post_init(self, context: Any, /) -> None:
        allowed = {
            "demonstration": {*self.fields, "label"},
            "query": set(self.fields),
            "continuation": {"label"},
        }
        for name, known in allowed.items():
            template = self._templates[name] = Template(name, getattr(self, name))
            if unknown := sorted(template.variables - known):
                raise ConfigError(f"the template {name!r} uses {unknown[0]!r}; it may use {', '.join(sorted(known))}")
        for name in ("demonstration", "continuation"):
            if "label" not in self._templates[name].variables:
                raise ConfigError(f"the template {name!r} does not show the label; write {{{{ label }}}} in it")
        if not self._templates["query"].variables:
            raise ConfigError(
                "the template 'query' shows no field, so all queries are the same; write {{ }} around one of "
                f"{', '.join(self.fields)}"
            )
        self._refuse_equal_continuations()

    def _refuse_equal_continuations(self) -> None:
        """Labels that differ as words may still read alike where a template cuts them."""
        try:
            texts = self.continuations()
        except DataError as error:
            raise ConfigError(str(error)) from None
        words: dict[str, str] = {}
        for word, text in zip(self.words, texts, strict=True):
            if not text.strip():
                raise ConfigError(f"the template 'continuation' makes the label {word!r} blank; show {{{{ label }}}}")
            if (other := words.setdefault(text, word)) != word:
                raise ConfigError(
                    f"the template 'continuation' makes {text!r} of both {other!r} and {word!r}; let it tell them apart"
                )

    @classmethod
    def load(cls, name: str | Path, data: str | Path | None = None) -> Self:
        """A built-in task by name, or a task file by path; raises `ConfigError` naming the tasks there are.

        ``data`` is a folder to read instead of what the task names: it holds ``train``, ``test`` and ``dev`` (also
        called ``validation`` or ``valid``) as .jsonl, .csv, .tsv or .parquet, or as ``train-*.parquet``, itself or in
        its sub-folder ``data``. A split that it lacks is the task's share of train where the task declares one, else a
        `DataError` names it.
        """
        path = BUILTIN / f"{name}.yaml" if name in builtin_tasks() else Path(name)
        if not path.is_file():
            raise ConfigError(
                f"there is no task {str(name)!r}; built in: {', '.join(builtin_tasks())}, or give a task file's path"
            )
        task = cls.from_file(path)
        return task if data is None else task.model_copy(update={"data": found_in(Path(data).resolve(), task.data)})

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Reads a task file; its data files are relative to its folder."""
        task = super().from_file(path)
        task._folder = Path(path).resolve().parent
        return task

    @property
    def words(self) -> tuple[str, ...]:
        """The label words, in the order of the L axis."""
        return tuple(self.labels.values() if isinstance(self.labels, dict) else self.labels)

    def examples(self, split: Split) -> Examples:
        """Reads one split; raises `DataError` naming file and line of what does not fit. O(rows).

        A split that is a share of train holds the content whose hash lies in its part of [0, 1): the same whatever the
        order of the rows and the seed of a study, and on one side only, however often a row is repeated.
        """
        if getattr(self.data, split, None) is None:
            raise ConfigError(
                f"task {self.name!r} has no {split!r} data; name a file, or a share of train, under 'data'"
            )
        contents = self._split_contents(split)
        kept: dict[str, _Content] = {}
        num_conflicting = sum(row.label != kept.setdefault(row.hash, row).label for row in contents)
        return Examples(
            split=split,
            fields=[row.fields for row in kept.values()],
            labels=np.array([row.label for row in kept.values()], dtype=np.int64),
            hashes=list(kept),
            num_duplicates=len(contents) - len(kept),
            num_conflicting=num_conflicting,
            digest=_digest(kept.values()),
        )

    def opening(self) -> str:
        """The text before the first demonstration."""
        return self.instruction + self.separator if self.instruction else ""

    def render_demonstration(self, fields: Mapping[str, Any], label: int) -> str:
        """One demonstration's text, without the separator that follows it."""
        return self._templates["demonstration"].render({**fields, "label": self.words[label]})

    def render_query(self, fields: Mapping[str, Any]) -> str:
        """One query's text, up to where the label begins."""
        return self._templates["query"].render(fields)

    def continuations(self) -> list[str]:
        """The text of each label after a query, [L]."""
        return [self._templates["continuation"].render({"label": word}) for word in self.words]

    def wording_hash(self) -> str:
        """SHA-256 of all that turns a row into text."""
        wording = self.model_dump(mode="json", exclude={"name", "description", "source", "licence", "data", "shots"})
        return hashlib.sha256(json.dumps(wording, sort_keys=True).encode()).hexdigest()

    def _split_contents(self, split: Split) -> list[_Content]:
        comes_from_train = split == "train" or self.data.is_share(split)
        contents = self._of_train(*self.data.bounds(split)) if comes_from_train else self._read(split)
        if not contents:
            raise DataError(
                f"task {self.name!r}: its shares leave the split {split!r} no rows; change them under 'data'"
            )
        return contents

    def _of_train(self, start: float, end: float) -> list[_Content]:
        # 52 bits of the hash: every position is exact, and below 1.
        return [row for row in self._read("train") if start <= int(row.hash[:13], 16) / 2**52 < end]

    def _read(self, split: Split) -> list[_Content]:
        if split not in self._contents:
            columns = dict.fromkeys((*self.fields.values(), self.label_field))
            positions = {str(value): position for position, value in enumerate(self.labels)}
            self._contents[split] = [
                self._content(place, row, positions) for place, row in self.data.rows(self._folder, split, columns)
            ]
        return self._contents[split]

    def _content(self, place: str, row: Mapping[str, Any], positions: Mapping[str, int]) -> _Content:
        for column in (*self.fields.values(), self.label_field):
            if column not in row:
                raise missing_column(place, column, row)
            if row[column] is None:
                raise DataError(f"{place}: the column {column!r} holds no value; fill it in or remove the row")
        fields = {name: row[column] for name, column in self.fields.items()}
        value = str(row[self.label_field])
        if value not in positions:
            shown = repr(value) if value.strip() else "blank"
            raise DataError(f"{place}: {self.label_field!r} is {shown}; the labels are {', '.join(positions)}")
        return _Content(self._content_hash(place, fields), fields, positions[value])

    def _content_hash(self, place: str, fields: Mapping[str, Any]) -> str:
        # What the model gets to read counts: fields that differ elsewhere make the same prompt.
        try:
            text = self.render_query(fields)
        except DataError as error:
            raise DataError(f"{place}: {error}") from None
        return hashlib.sha256(_normalised(text).encode()).hexdigest()


def _digest(contents: Iterable[_Content]) -> str:
    digest = hashlib.sha256()
    for row in contents:
        digest.update(f"{_JSON.encode([row.fields, row.label])}\n".encode())
    return digest.hexdigest()


def _normalised(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def builtin_tasks() -> list[str]:
    """The names of the tasks that come with the package."""
    return sorted(path.stem for path in BUILTIN.glob("*.yaml"))


def template_text(name: str) -> str:
    """A commented task file to start from: it works as it stands for a train.csv with columns text and label beside it.

    Raises `ConfigError` for a name that a task cannot have.
    """
    if not re.fullmatch(_NAME, name):
        raise ConfigError(f"the task name {name!r} must be letters, digits, '_', '.' and '-', at most 64")
    return _STARTER.read_text(encoding="utf-8").replace("NAME", name)
