"""A race for the best prompt at every number of demonstrations, in waves (`iclperm.runs.waves`).

What competes at a number of shots are its distinct contexts, whatever their set and order. The first dev queries decide
the races; the winners then answer the others, which had no say in who won, so that they can be compared. No test query
is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from iclperm.errors import ConfigError
from iclperm.runs.setting import ResolvedStudy
from iclperm.runs.waves import Ask, Decision, begun, refuse_other_rule, times, told_step
from iclperm.stats.racing import RaceRule, RaceStep, halving_cost, next_step
from iclperm.study.sizes import SearchBudget, parse_search_budget

if TYPE_CHECKING:
    from iclperm.prompts.tokenise import Prompts
    from iclperm.runs.read import ContextAnswers

_LEAST_BLOCK = 2


def num_racing(num_dev: int) -> int:
    """How many of the dev queries decide the races; the others compare the winners."""
    return math.ceil(num_dev / 2)


class Lane(NamedTuple):
    """What competes at one number of shots: A distinct contexts, in the order in which sets and permutations come."""

    contexts: NDArray[np.int64]
    """[A] numbers."""
    orderings: tuple[tuple[int, int], ...]
    """[A] the first set and permutation of each."""


def lanes_of(context_of: NDArray[np.int64]) -> list[Lane]:
    """The lanes of contexts [S, P, K], one for each number of shots."""
    lanes = []
    for place in range(context_of.shape[2]):
        numbers, first = np.unique(context_of[:, :, place], return_index=True)
        order = np.argsort(first)
        sets, permutations = np.unravel_index(first[order], context_of.shape[:2])
        lanes.append(Lane(numbers[order], tuple(zip(sets.tolist(), permutations.tolist(), strict=True))))
    return lanes


@dataclass(frozen=True)
class RacedShots:
    """The races of a study, one for each number of shots, and the comparison of their winners."""

    setting: ResolvedStudy
    rule: RaceRule
    num_dev: int
    """Distinct dev queries; the first `num_racing` of them race."""
    is_halved: bool

    @classmethod
    def of(
        cls,
        setting: ResolvedStudy,
        prompts: Prompts,
        tokens_of: Callable[[SearchBudget], float],
        before: Sequence[Decision],
    ) -> RacedShots:
        """The races of a study; args and errors as `iclperm.runs.waves.Racing.of`."""
        study = setting.study
        num_dev = len(_dev(setting).rows)
        rule = RaceRule(tolerance=study.tolerance)
        budget = parse_search_budget(study.budget)
        if before:
            refuse_other_rule(rule.name, before)
            rule = replace(rule, first=before[0].known["first"])
        elif budget is not None:
            rule = replace(rule, first=_first_block(setting, prompts, tokens_of(budget), num_dev))
        return cls(setting, rule, num_dev, budget is not None)

    def first(self) -> Decision:
        """The first wave: every prompt on the first dev queries."""
        design = self.setting.design
        orderings = tuple(np.ndindex(design.num_sets, design.num_permutations))
        size = min(self.rule.first, num_racing(self.num_dev))
        ask = Ask("dev", tuple(range(size)), orderings, tuple(range(len(design.shots))))
        return Decision((ask,), begun(self.rule, self.is_halved))

    def next(self, answers: ContextAnswers, before: Sequence[Decision], basis: str | None = None) -> Decision:
        """See `iclperm.runs.waves.Waves`. The last one names the winners."""
        num_racing_, context_of = num_racing(self.num_dev), answers.context_of
        values, asked = self._values(answers), self._asked(before, context_of, len(answers.state))
        lanes = lanes_of(context_of)
        steps = [self._step(values[lane.contexts], asked[lane.contexts], len(before)) for lane in lanes]
        leaders = [lane.orderings[step.leader] for lane, step in zip(lanes, steps, strict=True)]
        told = [{**told_step(step), "leader": list(leader)} for step, leader in zip(steps, leaders, strict=True)]
        asks = [
            Ask("dev", tuple(range(begin, step.num_queries)), tuple(lane.orderings[arm] for arm in arms), (place,))
            for place, (lane, step) in enumerate(zip(lanes, steps, strict=True))
            for begin, arms in _by_number(step.candidates, asked[lane.contexts])
        ]
        if not asks and before[-1].asks[0].queries[0] < num_racing_ < self.num_dev:
            others = tuple(range(num_racing_, self.num_dev))
            asks = [Ask("dev", others, (leader,), (place,)) for place, leader in enumerate(leaders)]
        return Decision(tuple(asks), {"basis": basis, "shots": told}, is_last=not asks)

    def _step(self, values: NDArray[np.float64], asked: NDArray[np.int64], num_waves: int) -> RaceStep:
        most = -(-len(asked) // 2**num_waves) if self.is_halved else None
        return next_step(values, asked, self.rule, most=most)

    def _asked(self, before: Sequence[Decision], context_of: NDArray[np.int64], num_contexts: int) -> NDArray[np.int64]:
        """[C] queries of the races that each context was asked, the first of them."""
        asked = np.zeros(num_contexts, np.int64)
        for ask in (ask for decision in before for ask in decision.asks):
            if ask.queries[0] < num_racing(self.num_dev):
                asked[ask.contexts(context_of)] += len(ask.queries)
        return asked

    def _values(self, answers: ContextAnswers) -> NDArray[np.float64]:
        """[C, N] what each context gets for each query of the races; NaN where there is no answer."""
        rows = _dev(self.setting).rows[: num_racing(self.num_dev)]
        queries = answers.begins["dev"] + np.arange(len(rows))
        return answers.criterion("dev_accuracy", queries, self.setting.examples["dev"].gold[rows])


def _dev(setting: ResolvedStudy) -> Any:
    return next(queries for queries in setting.design.queries if queries.split == "dev")


def _by_number(arms: NDArray[np.int64], asked: NDArray[np.int64]) -> list[tuple[int, list[int]]]:
    """Arms that were asked as many queries, together, with that number."""
    groups: dict[int, list[int]] = {}
    for arm in arms.tolist():
        groups.setdefault(int(asked[arm]), []).append(arm)
    return [*groups.items()]


def _first_block(setting: ResolvedStudy, prompts: Prompts, tokens: float, num_dev: int) -> int:
    """The largest first block whose races stay within a budget; `ConfigError` where not even blocks of two do."""
    offsets, names = setting.design.query_offsets, [queries.split for queries in setting.design.queries]
    begin = int(offsets[names.index("dev")])
    query = float(np.mean([len(ids) for ids in prompts.queries[begin : begin + num_dev]]))
    racing, lanes = num_racing(num_dev), lanes_of(prompts.context_of)
    lengths = [float(np.mean([len(prompts.contexts[context]) for context in lane.contexts])) for lane in lanes]

    def cost(first: int) -> float:
        races = [
            max(halving_cost(len(lane.contexts), racing, length, query, first), length + query * first)
            for lane, length in zip(lanes, lengths, strict=True)
        ]
        return sum(races) + sum(lengths) + len(lanes) * query * (num_dev - racing)

    if (least := cost(_LEAST_BLOCK)) > tokens:
        raise ConfigError(
            f"the budget {setting.study.budget!r} is too small for this choice; give at least {times(least, tokens)}, "
            "or fewer sets, permutations, shots or dev queries"
        )
    blocks = range(_LEAST_BLOCK, racing + 1)
    return max(first for first in blocks if cost(first) <= tokens)
