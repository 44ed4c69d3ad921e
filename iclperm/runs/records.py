"""What plans and records of sessions must hold before they are reckoned with: anyone can reckon a digest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

_MOST_OF_ANYTHING = 1 << 50
_MOST_LETTERS = 1 << 16  # of a label, as of any text of a task
_Count = Annotated[int, Field(ge=0, le=_MOST_OF_ANYTHING)]
_Number = Annotated[float, Field(ge=0, le=_MOST_OF_ANYTHING)]
_Length = Annotated[float, Field(gt=0, le=_MOST_OF_ANYTHING)]


class _Written(BaseModel):
    """A part of what is written, of which more may be there than is looked at."""

    model_config = ConfigDict(extra="allow", strict=True)


class _WrittenExtent(_Written):
    sets: _Count
    permutations: _Count
    queries: _Count
    dev_queries: _Count


class _WrittenWork(_Written):
    cells: _Count
    parts: _Count
    general_cells: _Count
    odd_labels: _Count
    unit_tokens: Annotated[int, Field(ge=1, le=_MOST_OF_ANYTHING)] | None = None


class _WrittenTokens(_Written):
    naive: _Count
    unique: _Count


class _WrittenCounts(_Written):
    model_config = ConfigDict(extra="forbid", strict=True)

    num_excluded: _Count
    num_duplicates: _Count
    num_conflicting: _Count


class _WrittenAsk(_Written):
    split: str
    queries: list[Annotated[list[_Count], Field(min_length=2, max_length=2)]]
    orderings: list[list[_Count]]
    places: list[_Count] | None = None


class _WrittenDecision(_Written):
    asks: list[_WrittenAsk]
    known: dict[str, JsonValue]
    is_last: bool
    extent: _WrittenExtent | None = None


class _WrittenGrowth(_Written):
    """The plan of a growth, which leaves out what identifies the run."""

    extents: Annotated[list[_WrittenExtent], Field(min_length=1)]
    work: _WrittenWork
    tokens: _WrittenTokens
    tables: dict[str, str]
    counts: _WrittenCounts
    decision: _WrittenDecision | None = None


class _WrittenChoices(_Written):
    scoring: str
    shots: list[_Count]
    kind: str | None = None


class _WrittenLengths(_Written):
    sum: list[_Length]
    mean: list[_Length]
    bytes: list[_Length]


class _WrittenGeneration(_Written):
    draws: Annotated[int, Field(ge=1, le=_MOST_OF_ANYTHING)]


class _WrittenPlan(_WrittenGrowth):
    study: _WrittenChoices
    labels: list[Annotated[str, Field(max_length=_MOST_LETTERS)]]
    label_lengths: _WrittenLengths
    hashes: dict[str, JsonValue]
    task: Annotated[str, Field(max_length=_MOST_LETTERS)]
    generation: _WrittenGeneration | None = None

    @model_validator(mode="after")
    def _can_be_read(self) -> Self:
        if self.study.scoring == "generate":
            if self.generation is None:
                raise ValueError("it does not say how answers were generated")
        elif not self.labels or len(self.label_lengths.sum) != len(self.labels):
            raise ValueError("its labels and their lengths do not fit")
        return self


class _WrittenWorker(_Written):
    name: str
    host: str
    pid: _Count
    parts: _Count
    seconds: _Number
    lost: bool


class _WrittenNear(_Written):
    model_config = ConfigDict(extra="forbid", strict=True)

    num_near: _Count = 0
    num_near_dev: _Count = 0


class _WrittenSession(_Written):
    numerics: dict[str, JsonValue]
    seconds: _Number = 0.0
    parts: _Count = 0
    tokens_forwarded: _Count = 0
    closed: bool = False
    replies: dict[str, _Count] = Field(default_factory=dict)
    workers: list[_WrittenWorker] = Field(default_factory=list)
    near: _WrittenNear = Field(default_factory=_WrittenNear)


def is_plan(content: Mapping[str, Any]) -> bool:
    """Whether what was sealed has what is read of a plan, be it of a run or of its growth."""
    return _is_written(_WrittenGrowth if "run" in content else _WrittenPlan, content)


def is_session(content: Mapping[str, Any]) -> bool:
    """Whether what was sealed has what is read of the record of a session."""
    return _is_written(_WrittenSession, content)


def _is_written(kind: type[_Written], content: Mapping[str, Any]) -> bool:
    try:
        json.dumps(content, allow_nan=False)  # Python's JSON has Infinity, which no report can show
        kind.model_validate(content)
    except (ValidationError, ValueError):
        return False
    return True
