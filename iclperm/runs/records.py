"""What plans and records of sessions must hold before they are reckoned with: anyone can reckon a digest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

_MOST_OF_ANYTHING = 1 << 50
_Count = Annotated[int, Field(ge=0, le=_MOST_OF_ANYTHING)]
_Number = Annotated[float, Field(ge=0, le=_MOST_OF_ANYTHING)]


class _Written(BaseModel):
    """A part of what is written, of which more may be there than is looked at."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Extent(_Written):
    sets: _Count
    permutations: _Count
    queries: _Count
    dev_queries: _Count


class _Work(_Written):
    cells: _Count
    parts: _Count
    general_cells: _Count
    odd_labels: _Count


class _Tokens(_Written):
    naive: _Count
    unique: _Count


class _Counts(_Written):
    model_config = ConfigDict(extra="forbid", strict=True)

    num_excluded: _Count
    num_duplicates: _Count
    num_conflicting: _Count


class _Growth(_Written):
    """The plan of a growth, which leaves out what identifies the run."""

    extents: Annotated[list[_Extent], Field(min_length=1)]
    work: _Work
    tokens: _Tokens
    tables: dict[str, str]
    counts: _Counts


class _Choices(_Written):
    scoring: str
    shots: list[_Count]
    kind: str | None = None


class _Lengths(_Written):
    sum: list[_Number]
    mean: list[_Number]
    bytes: list[_Number]


class _Generation(_Written):
    draws: Annotated[int, Field(ge=1, le=_MOST_OF_ANYTHING)]


class _Plan(_Growth):
    study: _Choices
    labels: list[str]
    label_lengths: _Lengths
    task: str
    generation: _Generation | None = None

    @model_validator(mode="after")
    def _can_be_read(self) -> Self:
        if self.study.scoring == "generate":
            if self.generation is None:
                raise ValueError("it does not say how answers were generated")
        elif len(self.label_lengths.sum) != len(self.labels):
            raise ValueError("its labels and their lengths do not fit")
        return self


class _Session(_Written):
    numerics: dict[str, JsonValue]
    seconds: _Number = 0.0
    parts: _Count = 0
    tokens_forwarded: _Count = 0
    closed: bool = False
    replies: dict[str, _Count] = Field(default_factory=dict)


def is_plan(content: Mapping[str, Any]) -> bool:
    """Whether what was sealed has what is read of a plan, be it of a run or of its growth."""
    return _is_written(_Growth if "run" in content else _Plan, content)


def is_session(content: Mapping[str, Any]) -> bool:
    """Whether what was sealed has what is read of the record of a session."""
    return _is_written(_Session, content)


def _is_written(kind: type[_Written], content: Mapping[str, Any]) -> bool:
    try:
        json.dumps(content, allow_nan=False)  # Python's JSON has Infinity, which no report can show
        kind.model_validate(content)
    except (ValidationError, ValueError):
        return False
    return True
