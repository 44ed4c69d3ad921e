"""The keys of a task's ``answer``: how the answer of a generated text is read, and how it is checked."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from iclperm.study.choices import Choices
from iclperm.study.metrics import Metric
from iclperm.tasks.filters import FiltersChoices
from iclperm.tasks.sources import Word

Regex = Annotated[str, Field(min_length=1, max_length=500)]


def _compilable(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is no regular expression of Python ({error}); repair it") from None
    return pattern


class Rule(Choices):
    """One way to read the answer: the first match of ``pattern``, or the ``last``; its first group that holds text,
    else all of it. ``name`` is what the results call it."""

    name: Word | None = None
    pattern: Regex
    last: bool = False

    _valid = field_validator("pattern")(_compilable)


class Answer(Choices):
    """How the answer of a generated text is checked against the column ``field``, which holds the right one.

    ``check`` is what answers are: a number, the letter of an option, mathematics, exactly that text, or, as the
    `exact_match` of lm-evaluation-harness, one of the texts in the column, which ``filters`` read (its pipeline).
    ``rules`` read the answer from the model's text, tried in order; without them the check has its own. ``gold`` is a
    pattern whose group is the right answer within the column. ``letters`` is the number of options. ``ignore_case`` and
    ``ignore``, patterns that are removed from both sides, belong to ``exact`` and ``exact_match``,
    ``ignore_punctuation`` and ``ignore_numbers`` to the latter.

    Two checks give a grade in 0..1, and not right or wrong: ``f1``, the words that the text shares with the nearest of
    the texts in the column, as SQuAD counts them, and ``absolute_error``, 1 - min(1, error / ``scale``) of a number.
    """

    field: Word
    check: Literal["number", "letter", "math", "exact", "exact_match", "f1", "absolute_error"]
    scale: Annotated[float, Field(gt=0, le=1e50)] | None = None
    rules: list[Rule] = Field(default_factory=list)
    gold: Regex | None = None
    letters: Annotated[int, Field(ge=2, le=26)] | None = None
    ignore_case: bool = False
    ignore: list[Regex] = Field(default_factory=list)
    filters: FiltersChoices | None = None
    ignore_punctuation: bool = False
    ignore_numbers: bool = False

    @field_validator("gold")
    @classmethod
    def _valid_gold(cls, gold: str | None) -> str | None:
        return gold and _compilable(gold)

    @field_validator("ignore")
    @classmethod
    def _valid_ignore(cls, ignore: list[str]) -> list[str]:
        return [_compilable(pattern) for pattern in ignore]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.letters is not None and self.check != "letter":
            raise ValueError("the key 'letters' belongs to the check 'letter'; leave it out")
        if (self.ignore or self.ignore_case) and self.check not in ("exact", "exact_match"):
            raise ValueError("the keys 'ignore' and 'ignore_case' belong to the check 'exact'; leave them out")
        is_filtered = self.filters is not None or self.ignore_punctuation or self.ignore_numbers
        if is_filtered and self.check != "exact_match":
            raise ValueError(
                "the keys 'filters', 'ignore_punctuation' and 'ignore_numbers' belong to the check 'exact_match'; "
                "leave them out"
            )
        if (self.rules or self.gold) and self.check == "exact_match":
            raise ValueError("the keys 'rules' and 'gold' are not for the check 'exact_match'; give 'filters'")
        if self.gold and self.check == "f1":
            raise ValueError(
                "the key 'gold' is not for the check 'f1', whose right answers are whole texts; leave it out"
            )
        if (self.scale is None) == (self.check == "absolute_error"):
            raise ValueError(
                "the check 'absolute_error' needs the key 'scale', the error from which on a grade is 0, such as 10; "
                "no other check has it"
            )
        return self

    @property
    def has_several_golds(self) -> bool:
        """Whether the column may hold several right answers, any of which counts."""
        return self.check in ("exact_match", "f1")

    @property
    def metric(self) -> Metric | None:
        """What answers are graded by; None where they are right or wrong."""
        return Metric(self.check, self.scale) if self.check in ("f1", "absolute_error") else None
