"""The metrics whose answers have grades in 0..1, by name, and the words for a mean of their grades."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Metric:
    """How the answers of a run are graded; one whose answers are right or wrong has no such metric."""

    name: str
    """What a task file calls it: its ``check``."""
    scale: float | None = None
    """Of ``absolute_error`` the error from which on a grade is 0."""

    @classmethod
    def of_plan(cls, plan: Mapping[str, Any]) -> Metric | None:
        """That of a run's plan; None where answers are right or wrong."""
        found = plan.get("generation", {}).get("metric")
        return None if found is None else cls(**found)

    def to_dict(self) -> dict[str, Any]:
        """As a plan has it."""
        return {"name": self.name, **({} if self.scale is None else {"scale": self.scale})}

    @property
    def words(self) -> str:
        """The metric in a sentence."""
        return "F1" if self.name == "f1" else f"absolute error on a scale of {self.scale:g}"

    @property
    def mean(self) -> str:
        """What stands for the word accuracy."""
        return {"f1": "mean F1"}.get(self.name, "mean grade")

    @property
    def grade(self) -> str:
        """What one answer has."""
        return {"f1": "F1"}.get(self.name, "grade")

    @property
    def has_errors(self) -> bool:
        """Whether an answer also has an error in the units of its data."""
        return self.scale is not None

    @property
    def about(self) -> str:
        """What a grade is, in a sentence."""
        if self.name == "f1":
            formula = "token F1 as SQuAD counts it, the best of all right answers"
        else:
            formula = f"1 - min(1, |answer - right answer| / {self.scale:g})"
        return f"answers have grades: {formula}; what is said of right or wrong ones is of the grades 1 and 0"

    def said(self, text: str) -> str:
        """A text about accuracy as one about the mean grade."""
        return _ACCURACY.sub(self._word, text)

    def _word(self, found: re.Match[str]) -> str:
        if (comparison := found["how"]) is not None:
            return _COMPARED[comparison]
        article = "" if found["article"] is None else "a "
        word = f"{article}{self.mean}{'s' if found['many'] else ''}"
        return word[0].upper() + word[1:] if found[0][0].isupper() else word


def common_metric(metrics: Sequence[Metric | None]) -> Metric | None:
    """That of runs side by side: of different ones no more than a grade; None where all answers are right or wrong."""
    first = next((metric for metric in metrics if metric is not None), None)
    return first if first is None or all(metric == first for metric in metrics) else Metric("grade")


_COMPARED = {"most": "best", "more": "better", "less": "worse", "as": "as good"}
_ACCURACY = re.compile(
    r"\b(?:(?P<article>[Aa]n )?(?:[Mm]ean )?[Aa]ccurac(?:y|(?P<many>ies))|(?P<how>most|more|less|as) accurate)\b"
)
