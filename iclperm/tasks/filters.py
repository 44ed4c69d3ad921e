"""How lm-evaluation-harness reads an answer from generated text: pipelines of filters, and its exact match.

Pure functions with the harness's own semantics, its oddities included. Patterns of a file may take for ever: a study
has them run in the process that is killed at the limit (`iclperm.tasks.answers`).
"""

from __future__ import annotations

import json
import re
import string
import sys
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from iclperm.errors import DataError
from iclperm.study.choices import Choices
from iclperm.tasks.sources import Word

UNREAD = "[invalid]"
"""What the harness takes for the answer in a text where a pattern finds none."""
_NUMBER_PATTERN = r"#### (\-?[0-9\.\,]+)"  # what the harness takes where a regex filter names none
_OPTIONS = {
    "regex": {"regex_pattern", "group_select", "fallback"},
    "multi_choice_regex": {
        "regex_pattern", "group_select", "fallback", "ignore_case", "ignore_punctuation", "regexes_to_ignore",
    },
    "map": {"mapping_dict", "default_value"},
    "take_first_k": {"k"},
}  # fmt: skip

Pattern = Annotated[str, Field(max_length=65_536)]


class StepChoices(Choices):
    """One step of a pipeline."""

    function: Literal[
        "regex", "multi_choice_regex", "remove_whitespace", "lowercase", "uppercase", "map", "take_first",
        "take_first_k", "majority_vote",
    ]  # fmt: skip
    regex_pattern: Pattern = _NUMBER_PATTERN
    group_select: int = 0
    fallback: str = UNREAD
    ignore_case: bool = False
    ignore_punctuation: bool = False
    regexes_to_ignore: list[Pattern] | None = None
    mapping_dict: dict[Any, Any] = Field(default_factory=dict)
    default_value: Any = None
    k: Annotated[int, Field(ge=1)] = 1

    @field_validator("regex_pattern")
    @classmethod
    def _compilable(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"is no regular expression of Python ({error}); repair it") from None
        return pattern

    @model_validator(mode="after")
    def _own_options(self) -> StepChoices:
        for key in sorted(self.model_fields_set - {"function"} - _OPTIONS.get(self.function, set())):
            raise ValueError(f"the filter {self.function!r} has no key {key!r}; leave it out")
        return self


class FiltersChoices(Choices):
    """A name, and the filters that make an answer of a text, one after the other."""

    name: Word
    filter: Annotated[list[StepChoices], Field(min_length=1)]

    @model_validator(mode="after")
    def _one_answer(self) -> FiltersChoices:
        if self.filter[-1].function != "take_first":
            raise ValueError(f"the pipeline {self.name!r} ends in {self.filter[-1].function!r}; end it in 'take_first'")
        return self

    @property
    def reads_choices(self) -> bool:
        """Whether a filter looks at the row's column ``choices``."""
        return any(step.function == "multi_choice_regex" for step in self.filter)

    @property
    def num_texts(self) -> int:
        """Texts a query that it needs."""
        return max((step.k for step in self.filter if step.function == "take_first_k"), default=1)

    def read(self, texts: Sequence[str], choices: Sequence[str] = ()) -> Any:
        """The answer in the texts that were written for one query: text, or what a `map` makes of it.

        ``choices`` is the row's column of that name, for `multi_choice_regex`. Raises `DataError` where there are fewer
        texts than a filter takes.
        """
        found: Any = list(texts)
        for step in self.filter:
            found = _STEPS[step.function](step, found, choices)
        return found


def _regex(step: StepChoices, texts: Any, choices: Sequence[str]) -> list[str]:
    return [_matched(step, text) for text in texts]


def _matched(step: StepChoices, text: Any) -> str:
    found = _selected(re.compile(step.regex_pattern), text, step.group_select)
    return step.fallback if found is None else found.strip()


def _selected(pattern: re.Pattern[str], text: Any, which: int) -> str | None:
    """The match of that number: its group, the first of its groups that holds text, or all of it; None without one."""
    matches = pattern.findall(text if isinstance(text, str) else "")
    if not -len(matches) <= which < len(matches):
        return None
    match = matches[which]
    return next(filter(None, match), None) if isinstance(match, tuple) else str(match)


def _choice_regex(step: StepChoices, texts: Any, choices: Sequence[str]) -> list[str]:
    letters = [chr(ord("A") + number) for number in range(len(choices))]
    plain = [_without(choice.strip(), step) for choice in choices]
    of_text = {text: f"({letter})" for text, letter in zip(plain, letters, strict=True)}
    any_choice = re.compile("|".join(sorted(map(re.escape, plain), key=len, reverse=True)))
    any_letter = re.compile(rf":[\s]*({'|'.join(letters)})")
    of_letter = {letter: f"({letter})" for letter in letters}
    tries: list[tuple[re.Pattern[str], bool, dict[str, str]]] = [
        (re.compile(step.regex_pattern), False, {}),
        (any_choice, True, of_text),
        (any_letter, False, of_letter),
    ]
    return [_first_found(step, text, tries) for text in texts]


def _first_found(step: StepChoices, text: str, tries: Sequence[tuple[re.Pattern[str], bool, dict[str, str]]]) -> str:
    for pattern, is_plain, meant in tries:
        found = _selected(pattern, _without(text, step) if is_plain else text, step.group_select)
        found = (found or "").strip()
        if found:
            return meant.get(found, found)
    return step.fallback


def _without(text: str, step: StepChoices) -> str:
    for pattern in step.regexes_to_ignore or ():
        text = re.sub(pattern, "", text)
    if step.ignore_case:
        text = text.lower()
    return text.translate(_punctuation()) if step.ignore_punctuation else text


@cache
def _punctuation() -> dict[int, None]:
    return dict.fromkeys(code for code in range(sys.maxunicode) if unicodedata.category(chr(code)).startswith("P"))


def _first_texts(step: StepChoices, texts: Any, choices: Sequence[str]) -> Any:
    if len(texts) < step.k:
        raise DataError(f"the filter 'take_first_k' takes {step.k} texts a query, of {len(texts)}; write more texts")
    return texts[: step.k]


_STEPS: Mapping[str, Any] = {
    "regex": _regex,
    "multi_choice_regex": _choice_regex,
    "remove_whitespace": lambda step, texts, choices: [text.strip() for text in texts],
    "lowercase": lambda step, texts, choices: [text.lower() for text in texts],
    "uppercase": lambda step, texts, choices: [text.upper() for text in texts],
    "map": lambda step, texts, choices: [step.mapping_dict.get(text, step.default_value) for text in texts],
    "take_first": lambda step, texts, choices: texts[0],
    "take_first_k": _first_texts,
    "majority_vote": lambda step, texts, choices: [Counter(texts).most_common(1)[0][0]],
}


@dataclass(frozen=True)
class ExactMatch:
    """The harness's `exact_match`: equal without what is ignored on both sides, in this order."""

    regexes_to_ignore: tuple[str, ...] = ()
    ignore_case: bool = False
    ignore_punctuation: bool = False
    ignore_numbers: bool = False

    def plain(self, text: str) -> str:
        """What of a text is compared."""
        for pattern in self.regexes_to_ignore:
            text = re.sub(pattern, "", text)
        if self.ignore_case:
            text = text.lower()
        for characters in (self.ignore_punctuation * string.punctuation, self.ignore_numbers * string.digits):
            text = text.translate(str.maketrans("", "", characters))
        return text

    def is_right(self, answer: Any, golds: Sequence[str]) -> bool:
        """Whether an answer is one of the right ones; nothing that is no text is."""
        return isinstance(answer, str) and self.plain(answer) in map(self.plain, golds)


def golds_text(golds: Sequence[str]) -> str:
    """Several right answers as one text, a JSON list."""
    return json.dumps(list(golds), ensure_ascii=False)


def golds_of(text: str) -> list[str] | None:
    """The right answers that `golds_text` wrote; None of other text."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, list) and found and all(isinstance(one, str) for one in found) else None
