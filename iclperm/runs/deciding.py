"""A run that asks each trajectory of a curve until it is shown to be flat or to change, wave by wave.

The first wave is the curve: every trajectory at every number of demonstrations, on the first queries. Later waves ask
only what is undecided, at the two numbers of demonstrations that the verdict compares
(`iclperm.stats.verdicts.sequential_verdicts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from iclperm.errors import ConfigError, RunError
from iclperm.runs.setting import ResolvedStudy
from iclperm.runs.waves import Ask, Decision
from iclperm.stats.verdicts import RULE_VERSION, Verdicts, claims_of, looks_until, sequential_verdicts

if TYPE_CHECKING:
    from iclperm.runs.read import ContextAnswers
    from iclperm.runs.work import Work


@dataclass(frozen=True)
class Deciding:
    """The waves of a study whose ``precision`` is that of its plateaus."""

    setting: ResolvedStudy
    margin: float
    claims: tuple[int, ...]
    """The numbers of demonstrations from which a plateau is looked for, each to the largest."""
    looks: tuple[int, ...]
    """After how many queries trajectories are looked at."""

    @classmethod
    def of(cls, work: Work, before: Sequence[Decision]) -> Deciding:
        """That of a study laid out at its most queries; raises `ConfigError` for a number of demonstrations that it
        lacks, and where a class is so short that queries would be asked twice, and `RunError` for a run under way that
        another version of the rule began."""
        setting, wanted = work.setting, work.setting.study.wanted
        assert wanted is not None
        shots, test = setting.design.shots, setting.design.queries[0]
        if len(shots) < 2:
            raise ConfigError(
                f"precision is {setting.study.precision!r}, but the study has k = {shots[0]} alone; give two shots"
            )
        claims = claims_of(shots, wanted.shots)
        if missing := [k for k in claims if k not in shots[:-1]]:
            raise ConfigError(
                f"precision is {setting.study.precision!r}, but the study has no k = {missing[0]} below its largest, "
                f"{shots[-1]}; add it to 'shots'"
            )
        if (test.weights != 1).any():
            most = next(size for size in range(len(test.draws), 0, -1) if test.num_distinct(size) == size)
            are_there = len(setting.examples["test"]) >= setting.study.queries
            raise ConfigError(
                f"precision is {setting.study.precision!r}, but the shortest class has too few of the "
                f"{setting.study.queries:,} queries, so that some would count twice; ask for {most:,} at most"
                + (", or set balance to natural" if are_there else "")
            )
        if before and not before[-1].is_last and (version := before[0].known.get("rule")) != RULE_VERSION:
            raise RunError(
                f"this run began under version {version} of the rule by which trajectories are asked, and this iclperm "
                f"asks by version {RULE_VERSION}; finish it with the iclperm that began it, or run the study into "
                "another folder"
            )
        return cls(setting, wanted.half_width, claims, looks_until(len(test.rows)))

    def first(self) -> Decision:
        """The first wave: the curve on the first queries."""
        design = self.setting.design
        orderings, places = tuple(np.ndindex(design.num_sets, design.num_permutations)), range(len(design.shots))
        ask = Ask("test", tuple(range(self.looks[0])), orderings, tuple(places))
        return Decision((ask,), {"looks": list(self.looks), "claims": list(self.claims), "rule": RULE_VERSION})

    def next(self, answers: ContextAnswers, before: Sequence[Decision], basis: str | None = None) -> Decision:
        """See `iclperm.runs.waves.Waves`."""
        num_looks = len(before)
        found = [self._verdicts(answers, first, num_looks) for first in self.claims]
        known = {"basis": basis, "undecided": [int(np.count_nonzero(each.state == 0)) for each in found]}
        if num_looks == len(self.looks):
            return Decision((), known, is_last=True)
        asks = self._asks([each.state == 0 for each in found], range(*self.looks[num_looks - 1 : num_looks + 1]))
        return Decision(tuple(asks), known, is_last=not asks)

    def _verdicts(self, answers: ContextAnswers, first: int, num_looks: int) -> Verdicts:
        shots = self.setting.design.shots
        begin, end = answers.begins["test"], self.looks[num_looks - 1]
        golds = self.setting.examples["test"].gold[self.setting.design.queries[0].rows[:end]]
        values = answers.criterion("dev_accuracy", begin + np.arange(end), golds)
        one, other = (values[answers.context_of[:, :, shots.index(k)]] for k in (first, shots[-1]))
        return sequential_verdicts(one, other, self.looks, num_looks=num_looks, margin=self.margin)

    def _asks(self, undecided: Sequence[NDArray[np.bool_]], queries: range) -> list[Ask]:
        """Trajectories that are undecided from the same numbers of demonstrations, together."""
        shots = self.setting.design.shots
        groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for ordering in np.ndindex(undecided[0].shape):
            claims = (k for k, is_open in zip(self.claims, undecided, strict=True) if is_open[ordering])
            groups.setdefault(tuple(map(shots.index, claims)), []).append((int(ordering[0]), int(ordering[1])))
        return [
            Ask("test", tuple(queries), tuple(orderings), (*places, len(shots) - 1))
            for places, orderings in groups.items()
            if places
        ]
