"""Runs in waves: what each wave asks follows from the answers so far, and is written down before it is asked.

A wave is a growth of the run (`iclperm.runs.work`): its decision stands in its plan, under the plan's digest, so that
a run which was killed goes on by what was decided, and anyone can decide it again from the answers. The last decision
asks nothing: it says that the run is over, and what it found. Here is an adaptive search; what grows until something
is known is in `iclperm.runs.growing`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from iclperm.errors import ConfigError, RunError
from iclperm.prompts.design import keyed_permutation
from iclperm.runs.setting import ResolvedStudy
from iclperm.stats.racing import RULE_VERSION, RaceRule, RaceStep, halving, next_step
from iclperm.study.sizes import SearchBudget, parse_search_budget

if TYPE_CHECKING:
    from iclperm.prompts.tokenise import Prompts
    from iclperm.runs.read import ContextAnswers

TEST_ANSWERS = 4
"""Orderings of each set that answer a test query so that a random one's accuracy is known, drawn by the first wave."""
LARGEST = (-1,)
"""The place of the largest number of shots."""


class Ask(NamedTuple):
    """Orderings of some sets, each on the same queries of a split."""

    split: str
    queries: tuple[int, ...]
    """Numbers within the split."""
    orderings: tuple[tuple[int, int], ...]
    """Set and permutation of each."""
    places: tuple[int, ...] = LARGEST
    """On the K axis: each ordering at these numbers of shots."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe, orderings by set and queries that follow each other by their ends."""
        by_set: dict[int, list[int]] = {}
        for index_set, permutation in self.orderings:
            by_set.setdefault(index_set, []).append(permutation)
        return {
            "split": self.split,
            "queries": _ranges(self.queries),
            "orderings": [[s, *p] for s, p in by_set.items()],
            **({} if self.places == LARGEST else {"places": list(self.places)}),
        }

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Ask:
        """What `to_dict` gave."""
        queries = tuple(query for begin, end in told["queries"] for query in range(begin, end))
        orderings = tuple((s, p) for s, *permutations in told["orderings"] for p in permutations)
        return cls(told["split"], queries, orderings, tuple(told.get("places", LARGEST)))

    def contexts(self, context_of: NDArray[np.int64]) -> NDArray[np.int64]:
        """The distinct contexts that it asks, of ``context_of`` [S, P, K]; ascending."""
        sets, permutations = np.array(self.orderings, dtype=np.int64).reshape(-1, 2).T
        return np.unique(context_of[sets, permutations][:, list(self.places)])


@dataclass(frozen=True)
class Decision:
    """What one wave asks, and what was known when that was decided."""

    asks: tuple[Ask, ...]
    known: dict[str, Any]
    """By ``sets`` a list of each set's ``leader``, ``failure`` and ``left``, under ``final`` those of the race between
    the sets' winners (the leader's set), and the ``first`` block, ``halved`` and the version of the
    ``rule`` of the whole race (`RULE_VERSION`; none is 1). JSON-safe."""
    is_last: bool = False
    extent: dict[str, int] | None = None
    """The sizes to which the wave lets the run grow, in place of ``asks``: then every ordering answers every query."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe; `from_dict` makes it again."""
        told = {"asks": [ask.to_dict() for ask in self.asks], "known": self.known, "is_last": self.is_last}
        return told if self.extent is None else {**told, "extent": self.extent}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Decision:
        """What `to_dict` gave."""
        asks = tuple(map(Ask.from_dict, told["asks"]))
        return cls(asks, dict(told["known"]), bool(told["is_last"]), told.get("extent"))


class Waves(Protocol):
    """What decides about the waves of a run, from nothing but committed answers."""

    def first(self) -> Decision:
        """What the first wave asks."""

    def next(self, answers: ContextAnswers, before: Sequence[Decision], basis: str | None = None) -> Decision:
        """The wave after those ``before``, all of whose answers are there; ``basis`` is a digest of the answers' files
        (`basis_of`), None in memory."""


@dataclass(frozen=True)
class Racing:
    """The races of a study: one of each set's orderings, then one between their winners."""

    setting: ResolvedStudy
    rule: RaceRule
    num_dev: int
    """Distinct dev queries; as a study asks them, or for the certified rule in a random order."""
    num_test: int
    order: NDArray[np.int64]
    """[N] numbers of dev queries in the order in which they are asked."""
    weights: NDArray[np.int64]
    """[N] how often each counts, in that order."""
    is_halved: bool

    @classmethod
    def of(
        cls,
        setting: ResolvedStudy,
        prompts: Prompts,
        tokens_of: Callable[[SearchBudget], float],
        before: Sequence[Decision],
    ) -> Racing:
        """The races of a study; ``tokens_of`` is what a budget buys, asked where no wave was decided ``before``.

        Raises `ConfigError` for a budget that does not reach, naming the least that would, and `RunError` for a race
        that another version of the rule began and did not end.
        """
        study, splits = setting.study, {queries.split: queries for queries in setting.design.queries}
        dev, num_test = splits["dev"], len(splits["test"].rows)
        order = np.arange(len(dev.rows))
        if study.rule == "certified":
            order = keyed_permutation(len(dev.rows), study.seed, "order of a certified race")
        rule = RaceRule(study.rule, study.tolerance)
        budget = parse_search_budget(study.budget)
        is_halved = budget is not None
        if before:
            refuse_other_rule(study.rule, before)
            rule = replace(rule, first=before[0].known["first"])
        elif budget is not None:
            rule = replace(rule, first=_first_block(setting, prompts, tokens_of(budget), num_test, study.budget))
        return cls(setting, rule, len(dev.rows), num_test, order, dev.weights[order], is_halved)

    @property
    def shape(self) -> tuple[int, int]:
        """S and P."""
        return self.setting.design.num_sets, self.setting.design.num_permutations

    def first(self) -> Decision:
        """The first wave: every ordering on the first dev queries, and on test queries of its own."""
        orderings = tuple(np.ndindex(*self.shape))
        dev = Ask("dev", self._queries(0, min(self.rule.first, self.num_dev)), orderings)
        block = min(self.num_test, math.ceil(TEST_ANSWERS * self.num_test / self.shape[1]))
        own = [
            Ask("test", tuple(sorted(np.arange(number * block, (number + 1) * block) % self.num_test)), (ordering,))
            for number, ordering in enumerate(orderings)
        ]
        whole = [Ask("test", tuple(range(self.num_test)), orderings)] if block == self.num_test else own
        return Decision((dev, *_plain(whole)), begun(self.rule, self.is_halved))

    def next(self, answers: ContextAnswers, before: Sequence[Decision], basis: str | None = None) -> Decision:
        """See `Waves`."""
        asked = self._asked(before)
        values = self._values(answers, answers.context_of[:, :, -1])
        steps = [self._step(values[index], asked[index], self._most(before)) for index in range(len(asked))]
        known: dict[str, Any] = {"basis": basis, "sets": _told_once(before, [told_step(step) for step in steps])}
        wanted = [
            (step.num_queries, (index, int(permutation)))
            for index, step in enumerate(steps)
            for permutation in step.candidates
        ]
        if not wanted:
            winners = np.array([step.leader for step in steps])
            places = np.arange(len(steps)), winners
            most = int(asked[places].max())
            behind = np.flatnonzero(asked[places] < most)
            wanted = [(most, (int(index), int(winners[index]))) for index in behind]
            if not wanted:
                final = self._step(values[places], asked[places])
                known["final"] = told_step(final)
                wanted = [(final.num_queries, (int(index), int(winners[index]))) for index in final.candidates]
        test = self._test_of_winners(before, steps)
        asks = [*self._dev(wanted, asked), *test]
        return Decision(tuple(asks), known, is_last=not asks)

    def _most(self, before: Sequence[Decision]) -> int | None:
        """How many orderings a budget lets go on."""
        return -(-self.shape[1] // 2 ** len(before)) if self.is_halved else None

    def _step(self, values: NDArray[np.float64], asked: NDArray[np.int64], most: int | None = None) -> RaceStep:
        return next_step(values, asked, self.rule, weights=self.weights, most=most, classes=self._classes)

    def _dev(self, wanted: Sequence[tuple[int, tuple[int, int]]], asked: NDArray[np.int64]) -> list[Ask]:
        """Orderings that are asked the same queries, together."""
        groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for end, ordering in wanted:
            groups.setdefault((int(asked[ordering]), end), []).append(ordering)
        return [Ask("dev", self._queries(*ends), tuple(orderings)) for ends, orderings in groups.items()]

    def _test_of_winners(self, before: Sequence[Decision], steps: Sequence[RaceStep]) -> list[Ask]:
        """The chosen ordering of every set that is decided on all test queries, unless it was asked them."""
        every = tuple(range(self.num_test))
        done = {
            ordering
            for each in before
            for ask in each.asks
            if ask.queries == every and ask.split == "test"
            for ordering in ask.orderings
        }
        decided = ((index, step.leader) for index, step in enumerate(steps) if step.is_decided)
        missing = tuple(ordering for ordering in decided if ordering not in done)
        return [Ask("test", every, missing)] if missing else []

    def _queries(self, begin: int, end: int) -> tuple[int, ...]:
        return tuple(self.order[begin:end].tolist())

    def _asked(self, before: Sequence[Decision]) -> NDArray[np.int64]:
        """[S, P] dev queries that each ordering was asked, the first of the order."""
        asked = np.zeros(self.shape, np.int64)
        for ask in (ask for decision in before for ask in decision.asks if ask.split == "dev"):
            for ordering in ask.orderings:
                asked[ordering] += len(ask.queries)
        return asked

    def _values(self, answers: ContextAnswers, context_of: NDArray[np.int64]) -> NDArray[np.float64]:
        """[S, P, N] what each ordering gets for each dev query, in the order of the race; NaN where there is none."""
        begin = answers.begins["dev"]
        queries = begin + self.order
        values = answers.criterion(self.setting.study.criterion, queries, self._golds)
        return np.asarray(values[context_of])

    @property
    def _golds(self) -> NDArray[np.int64]:
        return np.asarray(self.setting.examples["dev"].gold[self._rows])

    @property
    def _classes(self) -> NDArray[np.int64] | None:
        """[N] the class of each dev query, in the order of the race; None where they do not take turns to the end."""
        is_in_turn = self.setting.study.balance == "classes" and np.ptp(self.weights) == 0
        return np.asarray(self.setting.examples["dev"].labels[self._rows]) if is_in_turn else None

    @property
    def _rows(self) -> NDArray[np.int64]:
        """[N] rows of the dev split, in the order of the race."""
        dev = next(queries for queries in self.setting.design.queries if queries.split == "dev")
        return np.asarray(dev.rows[self.order])


def basis_of(files: Mapping[int, Path]) -> str:
    """A digest of the files of some parts, whose names are digests of their content."""
    return hashlib.sha256("\n".join(files[part].name for part in sorted(files)).encode()).hexdigest()


def begun(rule: RaceRule, is_halved: bool) -> dict[str, Any]:
    """What the first decision keeps of a race, JSON-safe."""
    return {"first": rule.first, "halved": is_halved, "rule": RULE_VERSION}


def refuse_other_rule(rule: str, before: Sequence[Decision]) -> None:
    """Raises `RunError` for a race under way that began under another version of its rule."""
    version = before[0].known.get("rule", 1)
    if version != RULE_VERSION and not before[-1].is_last:
        raise RunError(
            f"this race began under version {version} of the {rule} rule, and this iclperm decides by version "
            f"{RULE_VERSION}; finish it with the iclperm that began it, or run the study into another folder"
        )


def told_step(step: RaceStep) -> dict[str, Any]:
    """What a decision keeps of a step, JSON-safe."""
    failure = None if math.isnan(step.failure) else round(step.failure, 6)
    return {"leader": step.leader, "failure": failure, "left": step.num_left, "decided": step.is_decided}


def _told_once(before: Sequence[Decision], now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each set's step as it was when its race was decided: what its winner is asked later, in the race between the
    sets, says nothing of its rivals."""
    earlier = before[-1].known.get("sets", now)
    return [one if one["decided"] else step for one, step in zip(earlier, now, strict=True)]


def times(least: float, tokens: float) -> str:
    """The least that a budget has to be, beside the tokens that it is."""
    return f"{math.ceil(least):,} tokens ({math.ceil(10 * least / tokens) / 10:,.1f} times as much)"


def _plain(asks: Sequence[Ask]) -> list[Ask]:
    return [ask._replace(queries=tuple(map(int, ask.queries))) for ask in asks]


def _ranges(numbers: Sequence[int]) -> list[list[int]]:
    """Numbers as half-open ranges of those that follow each other."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1][1] += 1
        else:
            found.append([number, number + 1])
    return found


def _first_block(setting: ResolvedStudy, prompts: Prompts, tokens: float, num_test: int, budget: str) -> int:
    """The first block of a race within a budget of tokens for all sets; `ConfigError` where it does not reach."""
    begins = np.cumsum([0, *(len(queries.rows) for queries in setting.design.queries)])
    lengths = np.array([len(ids) for ids in prompts.queries])
    names = [queries.split for queries in setting.design.queries]
    per_split = {
        name: float(lengths[begin:end].mean()) for name, begin, end in zip(names, begins[:-1], begins[1:], strict=True)
    }
    context = float(np.mean([len(prompts.contexts[index]) for index in np.unique(prompts.context_of[:, :, -1])]))
    num_sets, num_permutations = setting.design.num_sets, setting.design.num_permutations
    on_test = (num_permutations * math.ceil(TEST_ANSWERS * num_test / num_permutations) + num_test) * per_split["test"]
    sizes = (
        num_permutations,
        int(begins[names.index("dev") + 1] - begins[names.index("dev")]),
        context,
        per_split["dev"],
    )
    at_end = context + sizes[1] * per_split["dev"]  # the race between the winners may ask one more all there is
    first = halving(*sizes, tokens / num_sets - on_test - at_end)
    if first is None:
        least = num_sets * (on_test + at_end + 2 * num_permutations * (context + 2 * per_split["dev"]))
        raise ConfigError(
            f"the budget {budget!r} is too small for this search; give at least {times(least, tokens)}, or fewer test "
            "queries"
        )
    return first
