"""Tasks: where the examples are, how a demonstration and a query are worded, which labels there are."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PrivateAttr, field_validator

from iclperm.config import Choices
from iclperm.errors import ConfigError, DataError
from iclperm.tasks.loaders import read_rows
from iclperm.tasks.templates import Template

BUILTIN = Path(__file__).parent / "builtin"

Text = Annotated[str, Field(max_length=65_536)]
Word = Annotated[str, Field(min_length=1, max_length=1_000)]


class DataFiles(Choices):
    """One file per split, relative to the task file."""

    train: Word
    test: Word
    dev: Word | None = None


@dataclass(frozen=True)
class Examples:
    """One split of a task, each content once (the first occurrence), in file order.

    ``fields`` are the values the templates see, ``labels`` int64 [N] are positions on the L axis, ``hashes`` identify
    the content (the rendered query, case and white space aside). ``num_duplicates`` rows were left out, of which
    ``num_conflicting`` have another label than the row that was kept. ``digest`` is the SHA-256 of the file.
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
    followed by the separator. ``shots`` is the default k.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)]
    description: Text = ""
    data: DataFiles
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

    @field_validator("labels")
    @classmethod
    def _distinct_words(cls, labels: list[str] | dict[str | int, str]) -> list[str] | dict[str | int, str]:
        words = [" ".join(word.split()) for word in (labels.values() if isinstance(labels, dict) else labels)]
        for word in words:
            if not word:
                raise ValueError("a label word is blank; give every label a word")
            if words.count(word) > 1:
                raise ValueError(f"the label word {word!r} occurs twice; give every label its own word")
        return labels

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

    @classmethod
    def load(cls, name: str | Path) -> Self:
        """A built-in task by name, or a task file by path; raises `ConfigError` naming the tasks there are."""
        path = BUILTIN / f"{name}.yaml" if name in builtin_tasks() else Path(name)
        if not path.is_file():
            raise ConfigError(
                f"there is no task {str(name)!r}; built in: {', '.join(builtin_tasks())}, or give a task file's path"
            )
        return cls.from_file(path)

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

    def examples(self, split: str) -> Examples:
        """Reads one split; raises `DataError` naming file and line of what does not fit. O(rows)."""
        name = getattr(self.data, split, None)
        if name is None:
            raise ConfigError(f"task {self.name!r} has no {split!r} data; name a file under 'data'")
        rows, digest = read_rows(self._folder / name)
        seen: dict[str, tuple[dict[str, Any], int]] = {}
        num_conflicting = 0
        for place, row in rows:
            fields, label = self._fields(place, row), self._label(place, row)
            _, kept_label = seen.setdefault(self._content_hash(place, fields), (fields, label))
            num_conflicting += label != kept_label
        return Examples(
            split=split,
            fields=[fields for fields, _ in seen.values()],
            labels=np.array([label for _, label in seen.values()], dtype=np.int64),
            hashes=list(seen),
            num_duplicates=len(rows) - len(seen),
            num_conflicting=num_conflicting,
            digest=digest,
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
        wording = self.model_dump(mode="json", exclude={"name", "description", "data", "shots"})
        return hashlib.sha256(json.dumps(wording, sort_keys=True).encode()).hexdigest()

    def _fields(self, place: str, row: Mapping[str, Any]) -> dict[str, Any]:
        for column in self.fields.values():
            if row.get(column) is None:
                raise DataError(f"{place}: the column {column!r} is missing; map it under 'fields' or repair the row")
        return {name: row[column] for name, column in self.fields.items()}

    def _label(self, place: str, row: Mapping[str, Any]) -> int:
        values = [str(value) for value in self.labels]
        value = str(row.get(self.label_field))
        if value not in values:
            raise DataError(f"{place}: {self.label_field!r} is {value!r}; the labels are {', '.join(values)}")
        return values.index(value)

    def _content_hash(self, place: str, fields: Mapping[str, Any]) -> str:
        # What the model gets to read counts: fields that differ elsewhere make the same prompt.
        try:
            text = self.render_query(fields)
        except DataError as error:
            raise DataError(f"{place}: {error}") from None
        return hashlib.sha256(_normalised(text).encode()).hexdigest()


def _normalised(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def builtin_tasks() -> list[str]:
    """The names of the tasks that come with the package."""
    return sorted(path.stem for path in BUILTIN.glob("*.yaml"))
