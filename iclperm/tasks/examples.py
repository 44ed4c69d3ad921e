"""The rows of a task: as they are read, and as the examples of a split, each content once."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from iclperm.tasks.row_choices import OwnChoices

_JSON = json.JSONEncoder(ensure_ascii=False, sort_keys=True)


class ReadRow(NamedTuple):
    """One row as it was read: where it stands, what the templates see, the position of its class, the right answer, and
    choices of its own."""

    place: str
    fields: dict[str, Any]
    label: int
    answer: str
    chosen: OwnChoices | None = None


class Content(NamedTuple):
    """What one row says: the hash that identifies it, what the templates see, the position of its class, the right
    answer, and choices of its own."""

    hash: str
    fields: dict[str, Any]
    label: int
    answer: str
    chosen: OwnChoices | None = None

    @property
    def told(self) -> list[Any]:
        """What decides about answers, of a row with labels or choices."""
        return [self.fields, self.label] if self.chosen is None else [self.fields, *self.chosen]


@dataclass(frozen=True)
class Examples:
    """One split of a task, each content once (the first occurrence), in file order.

    ``fields`` are the values the templates see, ``labels`` int64 [N] are positions in the task's classes (the L axis; 0
    for a task without labels), ``answers`` the right answers: the label's word, the right choice's text, or what the
    data holds where answers are generated. ``chosen`` [N] are the choices of rows that have some of their own.
    ``hashes`` identify the content (the rendered query, and a row's own choices, case and white space aside).
    ``num_duplicates`` rows were left out, of which ``num_conflicting`` have another answer than the row that was kept.
    ``digest`` is the SHA-256 of the fields and labels (or answers) kept, in order: equal for equal data, whatever kind
    of file it came from.
    """

    split: str
    fields: list[dict[str, Any]]
    labels: NDArray[np.int64]
    answers: list[str]
    hashes: list[str]
    num_duplicates: int
    num_conflicting: int
    digest: str
    chosen: list[OwnChoices] | None = None

    def __len__(self) -> int:
        return len(self.fields)

    @property
    def gold(self) -> NDArray[np.int64]:
        """The position of the right label, or of the first right choice among the row's own, int64 [N]."""
        if self.chosen is None:
            return self.labels
        return np.array([chosen.gold[0] for chosen in self.chosen], dtype=np.int64)

    @property
    def most_choices(self) -> int:
        """The most choices that a row has of its own; 0 where the task has labels, or answers are generated."""
        return max((len(chosen.texts) for chosen in self.chosen or ()), default=0)

    def texts(self, rows: Iterable[int]) -> list[str]:
        """The values of all fields of some rows, as one text each."""
        return [" ".join(map(str, self.fields[row].values())) for row in rows]


def most_choices(examples: Mapping[str, Examples]) -> int:
    """The most choices that a row of some splits has of its own, those of demonstrations aside; 0 where none has."""
    return max((found.most_choices for split, found in examples.items() if split != "train"), default=0)


def compared_text(query: str, choices: Sequence[str]) -> str:
    """What two rows have in common that are one content: the query as it is worded, and what choices of its own append
    to it."""
    return "\n".join(map(folded, (query, *choices)))


def fractions(rows: Sequence[Content]) -> dict[str, float]:
    """Where each content stands in [0, 1): 52 bits of its hash, so that every position is exact, and below 1."""
    return {row.hash: int(row.hash[:13], 16) / 2**52 for row in rows}


def ranks(rows: Sequence[Content]) -> dict[str, float]:
    """The same by the rank of its hash among those of its label; of repeated rows under several labels, the first."""
    label_of: dict[str, int] = {}
    for row in rows:
        label_of[row.hash] = min(row.label, label_of.get(row.hash, row.label))
    of_label: dict[int, list[str]] = {}
    for content in sorted(label_of):
        of_label.setdefault(label_of[content], []).append(content)
    return {
        content: (rank + 0.5) / len(contents) for contents in of_label.values() for rank, content in enumerate(contents)
    }


def digest_of_rows(rows: Iterable[list[Any]]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(f"{_JSON.encode(row)}\n".encode())
    return digest.hexdigest()


def folded(text: str) -> str:
    """Text without regard to case, white space and the form of its letters."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
