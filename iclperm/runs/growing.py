"""A run that grows in sets, permutations and queries until something is known to a wanted precision.

Each wave is a growth to larger sizes, as ``--extend`` makes one, so that at its end the run is one of these sizes; how
large follows from the answers before it (`iclperm.stats.sizing.StoppingRule`) and stands in its plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from iclperm.errors import ConfigError
from iclperm.prompts.design import CONTENT_FREE
from iclperm.runs.setting import ResolvedStudy
from iclperm.runs.waves import Decision
from iclperm.stats.sizing import Look, StoppingRule, StudySizes, TokenCosts, cheapest, look_at
from iclperm.study.precision import Precision

if TYPE_CHECKING:
    from iclperm.runs.read import ContextAnswers
    from iclperm.runs.work import Work

_LEAST_OF_CLASS = 4  # queries that the first wave has of each class
_SIZES = ("sets", "permutations", "queries")


@dataclass(frozen=True)
class Growing:
    """The waves of a study with the key ``precision``."""

    setting: ResolvedStudy
    wanted: Precision
    places: tuple[int, ...]
    """Where the numbers of shots that it speaks of are on the K axis."""
    costs: TokenCosts
    tokens_of_all: int
    """Distinct tokens of the study at the most sizes it may have."""

    @classmethod
    def of(cls, work: Work) -> Growing:
        """That of a study laid out at its most sizes; raises `ConfigError` for a number of shots that it lacks."""
        setting, wanted = work.setting, work.setting.study.wanted
        assert wanted is not None
        shots = setting.design.shots
        if missing := [k for k in wanted.shots if k not in shots]:
            raise ConfigError(
                f"precision is {setting.study.precision!r}, but the study has no k = {missing[0]}; add it to 'shots'"
            )
        places = tuple(map(shots.index, wanted.shots or (shots[-1],)))
        return cls(setting, wanted, places, _costs(work), work.tokens.unique)

    @property
    def most(self) -> StudySizes:
        """The most sets, permutations and queries there may be."""
        return _sizes(self.setting.study.extent)

    @property
    def rule(self) -> StoppingRule:
        """When it stops."""
        return StoppingRule(self.wanted.quantity, self.wanted.half_width)

    def first(self) -> Decision:
        """The first wave, whose sizes follow from no answer."""
        return Decision((), {}, extent=self._extent(self.rule.first(self.most, _LEAST_OF_CLASS * self._num_classes)))

    def next(self, answers: ContextAnswers, before: Sequence[Decision], basis: str | None = None) -> Decision:
        """See `iclperm.runs.waves.Waves`."""
        extent = before[-1].extent
        assert extent is not None
        found, sizes = self._look(answers), _sizes(extent)
        following = self.rule.next(found, sizes, self.most, self.costs)
        known: dict[str, Any] = {"basis": basis, "look": _told(found), "level": self.rule.level}
        if following is not None:
            return Decision((), known, extent=self._extent(following))
        fixed = cheapest(self.wanted.quantity, found.sigma2, self.wanted.half_width, self.costs, self.most)
        known |= {
            "reached": self.rule.is_reached(found),
            "most": {"sizes": list(self.most), "tokens": self.tokens_of_all},
            "fixed": None
            if fixed is None
            else {"sizes": list(fixed), "share": float(self.costs.of(*fixed) / self.costs.of(*sizes))},
        }
        return Decision((), known, is_last=True, extent=extent)

    @property
    def _num_classes(self) -> int:
        return len(self.setting.task.words) if self._is_by_class else 0

    @property
    def _is_by_class(self) -> bool:
        return bool(self.setting.task.words) and self.setting.study.balance == "classes"

    def _extent(self, sizes: StudySizes) -> dict[str, int]:
        return {**self.setting.study.extent, **sizes._asdict()}

    def _look(self, answers: ContextAnswers) -> Look:
        test = answers.items()["test"]
        scores, state = (
            np.stack([values[:, :, place] for place in self.places]) for values in (test.correct, test.state)
        )
        is_pair = self.wanted.quantity == "difference"
        return look_at(
            self.wanted.quantity,
            scores if is_pair else scores[0],
            state if is_pair else state[0],
            weights=test.weights,
            classes=test.gold if self._is_by_class else None,
            level=self.rule.level,
            seed=self.setting.study.seed,
        )


def _sizes(extent: dict[str, int]) -> StudySizes:
    return StudySizes(*(extent[name] for name in _SIZES))


def _told(look: Look) -> dict[str, Any]:
    """JSON-safe; null for what is not known."""
    ends = {"estimate": look.interval.estimate, "low": look.interval.low, "high": look.interval.high}
    return {name: float(end) if math.isfinite(end) else None for name, end in ends.items()}


def _costs(work: Work) -> TokenCosts:
    """What one more ordering, and one more query, take of the tokens of all."""
    setting, prompts = work.setting, work.prompts
    orderings = setting.design.num_sets * setting.design.num_permutations
    number = sum(len(queries.rows) for queries in setting.design.queries if queries.split != CONTENT_FREE)
    query = len(prompts.contexts) / orderings * float(np.mean([len(ids) for ids in prompts.queries[:number]]))
    return TokenCosts(max(work.tokens.unique / orderings - query * number, 1.0), query)
