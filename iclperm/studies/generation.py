"""How generated answers were read: what gave no answer, what was cut off, and which rule read the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.errors import DataError, RequestError
from iclperm.report.parts import Plot, Table, number, plain
from iclperm.runs.generated import FINISHES
from iclperm.study.metrics import Metric
from iclperm.study.states import OK, UNPARSED
from iclperm.tasks.answers import GIVEN_UP

if TYPE_CHECKING:
    from iclperm.runs.answers import Items
    from iclperm.runs.generated import GeneratedAnswers
    from iclperm.runs.run import FinishedRun

ASIDE = "generation"
"""Its key in report.json, where it stands beside another kind's findings."""
_MANY = 0.05
_GRADES = {"full": "full grade", "error": "mean error"}
"""Columns of graded answers alone."""
_LENGTH, _REFUSED = FINISHES.index("length"), FINISHES.index("refused")


class RuleUse(NamedTuple):
    """One rule that reads answers, or one reason why none could be read."""

    rule: str
    """Name or pattern of the rule."""
    share: float
    """Of all texts that were generated."""
    accuracy: float
    """Of the answers that it read; NaN where it reads none."""
    right: float
    """Share of all texts that it alone reads rightly (of `####` on GSM8K: strict match)."""


class AtShots(NamedTuple):
    """The texts generated at one number of shots; every query of every set and permutation counts by its weight."""

    shots: int
    """The number of demonstrations."""
    unparsed: float
    """Share in which no answer could be read."""
    missing: float
    """Share without a text: invalid, too long, or not to be had from the API."""
    cut_off: float
    """Share that ended because the tokens were used up."""
    refused: float
    """Share that the API refused to write."""
    num_tokens: float
    """Mean number of new tokens."""
    answered: float
    """Accuracy of the answers that could be read."""
    unparsed_wrong: float
    """Accuracy if what could not be read counts as wrong: exact match as the papers report it."""
    draw_variance: float
    """Variance of the correctness of one prompt's texts, mean over prompts (unbiased; unparsed is wrong); NaN of one
    text a prompt. It is part of the variance component SPI, and of the item noise."""
    full: float = math.nan
    """Of graded answers that could be read the share with the full grade; NaN where answers are right or wrong."""
    error: float = math.nan
    """Mean absolute error of the answers that could be read; NaN of a metric that has no errors."""


@dataclass(frozen=True)
class Generation:
    """The findings: two tables, no figure."""

    by_shots: tuple[AtShots, ...]
    """[K] one for each number of demonstrations, ascending."""
    rules: tuple[RuleUse, ...]
    """Over all numbers of shots, most used first."""
    unparsed: str
    """What the study does about unparsed answers: drop their queries, or count them as wrong."""
    is_open: bool
    """Whether any answer may be given, not only a label: then a text that was cut off may lack its answer."""
    dropped: float
    """Share of the queries of which some cell has no answer."""
    num_given_up: int = 0
    """Texts whose reading took too long, all draws of different prompts."""
    dev: Generation | None = None
    """The same of the dev queries, by which a search chooses; None where there are none."""
    metric: Metric | None = None
    """What answers are graded by: every accuracy here is then the mean grade. None where they are right or wrong."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Where accuracies rest on a part of the queries, or on texts that were cut off."""
        on_dev = [] if self.dev is None else [f"on dev: {warning}" for warning in self.dev.warnings]
        last, warnings = self.by_shots[-1], []
        if self.num_given_up:
            warnings.append(
                f"the reading of {self.num_given_up:,} texts took too long and was given up, so they gave no answer "
                "(rule 'timeout'); repair the patterns of the task's 'rules' or 'ignore' that try many ways to match"
            )
        if self.unparsed == "drop" and self.dropped > _MANY:
            warnings.append(
                f"{self.dropped:.0%} of the queries lack an answer in some cell, because some text of theirs gave "
                "none, and count in the others only; --unparsed wrong counts such texts as wrong instead"
            )
        if last.cut_off > _MANY and not self.is_open and last.unparsed > _MANY:
            warnings.append(
                f"{last.cut_off:.0%} of the texts at k = {last.shots} go on after a label until their tokens are used "
                "up; give the task a 'stop', or lower 'max_new_tokens' to the length of a label"
            )
        elif last.cut_off > _MANY and self.is_open:
            warnings.append(
                f"{last.cut_off:.0%} of the texts at k = {last.shots} end because their tokens were used up; raise "
                "'max_new_tokens'"
            )
        return (*warnings, *on_dev)

    def conclusion(self) -> list[str]:
        """What could be read at the largest number of shots."""
        last = self.by_shots[-1]
        what = "counts as wrong" if self.unparsed == "wrong" else "drops its query"
        right = f"{last.answered:.1%} are right"
        if self.metric is not None:
            far = "" if math.isnan(last.error) else f", with a mean absolute error of {last.error:.4g}"
            right = f"the {self.metric.mean} is {last.answered:.1%}{far}"
        read = f"; of those read {right}, of all texts {last.unparsed_wrong:.1%}"
        read = "" if math.isnan(last.answered) else read
        dev = "" if self.dev is None else f" (on dev {self.dev.by_shots[-1].unparsed:.1%})"
        if not last.unparsed and (self.dev is None or not self.dev.by_shots[-1].unparsed):
            unfinished = f", {last.cut_off:.1%} of them cut off" if last.cut_off > _MANY else ""
            sentence = f"an answer could be read from every text{unfinished}, and {right}"
            return [f"Answers are generated: at k = {last.shots} {sentence}."]
        return [
            f"Answers are generated: at k = {last.shots} {last.unparsed:.1%} of the texts{dev} have no answer that "
            f"could be read, which {what}{read}."
        ]

    def tables(self, full: bool) -> list[Table]:
        """By number of shots, and by rule; without ``full`` the largest number alone."""
        shown = self.by_shots if full else self.by_shots[-1:]
        right = ("right, of read", "of all") if self.metric is None else (f"{self.metric.mean}, of read", "of all")
        grades = [name for name in ("full", "error") if not math.isnan(getattr(shown[-1], name))]
        header = ("k", "no answer", "no text", "cut off", "new tokens", *right, *(_GRADES[name] for name in grades))
        rows = [
            (
                str(at.shots),
                f"{at.unparsed:.1%}",
                f"{at.missing:.1%}",
                f"{at.cut_off:.1%}",
                f"{at.num_tokens:.1f}",
                *map(number, (at.answered, at.unparsed_wrong, *(getattr(at, name) for name in grades))),
            )
            for at in shown
        ]
        drawn = f" Variance of single answers between draws of one prompt: {number(shown[-1].draw_variance)}."
        tables = [
            Table(
                "Generated answers",
                header,
                rows,
                caption="Means over all sets, orderings and queries. Of all: what could not be read is wrong."
                + ("" if math.isnan(shown[-1].draw_variance) else drawn),
            )
        ]
        if self.rules and (full or len(self.rules) > 1):
            used = [(use.rule, f"{use.share:.1%}", number(use.accuracy), number(use.right)) for use in self.rules]
            caption = "Of all: accuracy if no other rule read answers."
            tables.append(Table("How answers were read", ("rule", "texts", *right), used, caption=caption))
        on_dev = [] if self.dev is None or not full else self.dev.tables(full)
        return [*tables, *(table._replace(title=f"{table.title}, dev queries") for table in on_dev)]

    def plots(self) -> dict[str, Plot]:
        """None."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Every number, JSON-safe; of texts that were given up, and of grades, only where there are some."""
        content: dict[str, Any] = {key: value for key, value in plain(self).items() if key != "num_given_up" or value}
        for split in filter(None, (content, content["dev"])):
            del split["metric"]
            split["by_shots"] = [
                {key: value for key, value in at.items() if key not in _GRADES or value is not None}
                for at in split["by_shots"]
            ]
        return content


def findings(run: FinishedRun) -> Generation:
    """How the generated answers of a finished run were read; raises `DataError` for one that generates none."""
    found = {name: _of_split(run, items, items.generated) for name, items in run.splits.items() if items.generated}
    if "test" not in found:
        raise DataError("this run's answers are not generated; run its study with scoring: generate")
    return replace(found["test"], dev=found.get("dev"))


def _of_split(run: FinishedRun, items: Items, found: GeneratedAnswers) -> Generation:
    spread = items.context_of
    said = generation(
        found.state[spread],
        found.correct[spread],
        found.rule[spread],
        found.finish[spread],
        found.num_tokens[spread],
        shots=run.shots,
        num_right=found.num_right[spread] if found.num_draws > 1 else None,
        num_draws=found.num_draws,
        num_squares=None if found.num_squares is None else found.num_squares[spread],
        error=None if found.error is None else found.error[spread],
        metric=found.metric,
        rules=found.rules,
        weights=items.weights,
        unparsed=run.study.unparsed,
        is_open=not run.labels,
        dropped=float(np.average((items.state != OK).any(axis=(0, 1, 2)), weights=items.weights)),
    )
    contexts = np.unique(spread)  # several cells may share a prompt
    num_given_up = int(found.num_given_up[contexts].sum(dtype=np.int64))
    if GIVEN_UP in found.rules:
        is_given_up = (found.rule[contexts] == found.rules.index(GIVEN_UP)) & (found.state[contexts] == UNPARSED)
        num_given_up += int(np.count_nonzero(is_given_up))
    return replace(said, num_given_up=num_given_up)


def generation(
    state: npt.ArrayLike,
    correct: npt.ArrayLike,
    rule: npt.ArrayLike,
    finish: npt.ArrayLike,
    num_tokens: npt.ArrayLike,
    *,
    shots: Sequence[int],
    rules: Sequence[str],
    num_right: npt.ArrayLike | None = None,
    num_draws: int = 1,
    num_squares: npt.ArrayLike | None = None,
    error: npt.ArrayLike | None = None,
    metric: Metric | None = None,
    weights: npt.ArrayLike | None = None,
    unparsed: str = "wrong",
    dropped: float = 0.0,
    is_open: bool = True,
) -> Generation:
    """The findings from arrays [S, P, K, Q].

    Args:
        state: 0 ok, else what is missing (`iclperm.study.states.STATES`).
        correct: whether the answer is right, or its grade where a ``metric`` grades; False, or 0, where it is missing.
        rule: place in ``rules``, -1 for none.
        finish: place in `iclperm.runs.generated.FINISHES`, -1 for none.
        num_tokens: new tokens.
        shots: [K].
        rules: names.
        num_right: how many of the ``num_draws`` texts of each prompt are right, or the sum of their grades.
        num_squares: the sum of the squares of these grades.
        error: absolute errors, of a metric that has them.
        weights: [Q] how often each query counts.

    Raises RequestError on shapes that do not fit. Cost: O(S·P·K·Q·rules).
    """
    arrays = [np.asarray(each) for each in (state, correct, rule, finish, num_tokens)]
    if arrays[0].ndim != 4 or any(each.shape != arrays[0].shape for each in arrays) or arrays[0].shape[2] != len(shots):
        raise RequestError(f"arrays must be [S, P, {len(shots)}, Q] alike, got {[list(each.shape) for each in arrays]}")
    weight = np.ones(arrays[0].shape[3]) if weights is None else np.asarray(weights, dtype=np.float64)
    full_weight = np.broadcast_to(weight, arrays[0].shape)
    states, right, used, *_ = arrays
    is_written = np.isin(states, (OK, UNPARSED))
    by_shots = tuple(
        _at_shots(
            k,
            [each[:, :, place] for each in arrays],
            full_weight[:, :, place],
            None if num_right is None else np.asarray(num_right)[:, :, place] / num_draws,
            None if num_squares is None else np.asarray(num_squares)[:, :, place] / num_draws,
            num_draws,
            None if error is None else np.asarray(error)[:, :, place],
            metric is not None,
        )
        for place, k in enumerate(shots)
    )
    uses = [
        RuleUse(
            name,
            _share(used == place, is_written, full_weight),
            _mean(right, (used == place) & (states == OK), full_weight),
            _mean(right * ((used == place) & (states == OK)), is_written, full_weight),
        )
        for place, name in enumerate(rules)
    ]
    return Generation(
        by_shots, tuple(sorted(uses, key=lambda use: -use.share)), unparsed, is_open, dropped, metric=metric
    )


def _at_shots(
    shots: int,
    arrays: Sequence[npt.NDArray[Any]],
    weight: npt.NDArray[np.float64],
    right: npt.NDArray[np.float64] | None,
    squares: npt.NDArray[np.float64] | None,
    num_draws: int,
    error: npt.NDArray[np.float64] | None,
    is_graded: bool,
) -> AtShots:
    state, correct, _, finish, num_tokens = arrays
    is_read, is_written = state == OK, np.isin(state, (OK, UNPARSED))
    everything = np.ones(state.shape, dtype=bool)
    mass = weight[is_written].sum()
    return AtShots(
        shots=int(shots),
        unparsed=_share(state == UNPARSED, is_written, weight),
        missing=_share(~is_written, everything, weight),
        cut_off=_share(finish == _LENGTH, is_written, weight),
        refused=_share(finish == _REFUSED, everything, weight),
        num_tokens=float((num_tokens * weight)[is_written].sum() / mass) if mass else float("nan"),
        answered=_mean(correct, is_read, weight),
        unparsed_wrong=_mean(correct * is_read, is_written, weight),
        draw_variance=float("nan")
        if right is None
        else _mean(right * (1 - right) if squares is None else squares - right**2, is_written, weight)
        * num_draws
        / (num_draws - 1),
        full=_share(correct == 1, is_read, weight) if is_graded else math.nan,
        error=math.nan if error is None else _mean(error, is_read, weight),
    )


def _mean(values: npt.NDArray[Any], where: npt.NDArray[Any], weight: npt.NDArray[np.float64]) -> float:
    total = float(weight[where].sum())
    return float((values * weight)[where].sum()) / total if total else float("nan")


def _share(part: npt.NDArray[Any], whole: npt.NDArray[Any], weight: npt.NDArray[np.float64]) -> float:
    """Weight of ``part`` within ``whole`` over that of ``whole``; NaN of nothing."""
    total = float(weight[whole].sum())
    return float(weight[part.astype(bool) & whole].sum()) / total if total else float("nan")
