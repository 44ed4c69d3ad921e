"""Which prompt of a finished study is taken away: one that is named, the one that the study recommends, or the best."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from iclperm.errors import ConfigError
from iclperm.runs.prompt import RunPrompt, run_prompt
from iclperm.runs.run import FinishedRun
from iclperm.stats.search import TIE_DECIMALS
from iclperm.study.choices import shown
from iclperm.study.states import OK


@dataclass(frozen=True)
class RecommendedCell:
    """The prompt that a study's findings recommend, at its largest number of shots.

    ``run`` names the one of several runs that it is in, None of a study of one. Where it ``is_held_out``, no test query
    had a say in it.
    """

    run: str | None
    set: int
    permutation: int
    is_held_out: bool
    notes: tuple[str, ...]


def recommended_by(findings: object) -> RecommendedCell | None:
    """The prompt that findings of any kind recommend; None of those that recommend none."""
    found = getattr(findings, "recommended", None)
    return found if isinstance(found, RecommendedCell) else None


@dataclass(frozen=True)
class WantedPrompt:
    """Which prompt of a run is asked for, as in `Run.prompt`; None where it is left open."""

    index_set: int | None = None
    permutation: int | None = None
    shots: int | None = None
    query: int | Mapping[str, Any] | None = None
    best: bool = False

    def __post_init__(self) -> None:
        """Whole numbers of NumPy, as a DataFrame's rows have them, become Python's."""
        for name in ("index_set", "permutation", "shots", "query"):
            value = getattr(self, name)
            if value is None or (name == "query" and isinstance(value, Mapping)):
                continue
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                also = ", or the task's fields by their names" if name == "query" else ""
                raise ConfigError(f"{name} is {shown(value)}; give a whole number{also}")
            object.__setattr__(self, name, operator.index(value))

    @property
    def is_open(self) -> bool:
        """Whether the study is to recommend it."""
        return not self.best and self.index_set is None and self.permutation is None


def take(run: FinishedRun, wanted: WantedPrompt, recommended: RecommendedCell | None) -> RunPrompt:
    """The prompt of the cell that is named, else the recommended one, or the only one there is; or the best, if asked.

    Raises `ConfigError` for a cell that is named by half or twice, and where nothing is recommended.
    """
    index_set, permutation, shots, query = wanted.index_set, wanted.permutation, wanted.shots, wanted.query
    if wanted.best:
        if index_set is not None or permutation is not None:
            raise ConfigError("the best cell has a set and a permutation of its own; name these, or ask for the best")
        cell = _best(run, shots)
        return run_prompt(run, *cell[:3], query, is_held_out=cell[3], notes=cell[4])
    if not wanted.is_open:
        if index_set is None or permutation is None:
            missing = "set" if index_set is None else "permutation"
            raise ConfigError(f"which {missing}? A prompt is one of a set and of a permutation; name both")
        return run_prompt(run, index_set, permutation, run.shots[-1] if shots is None else shots, query)
    if recommended is None:
        sets, permutations, num_shots, _ = run.correct.shape
        if sets * permutations * num_shots == 1 and shots in (None, run.shots[-1]):
            return run_prompt(run, 0, 0, run.shots[-1], query)
        raise ConfigError(
            f"this study recommends none of its {sets * permutations * num_shots:,} prompts; name one with --set, "
            "--permutation and --shots (in Python index_set, permutation and shots), or ask for the most accurate with "
            "--best (best=True)"
        )
    if shots not in (None, run.shots[-1]):
        raise ConfigError(
            f"what the study recommends has {run.shots[-1]} shots, not {shots}; name a set and a permutation too"
        )
    return run_prompt(
        run,
        recommended.set,
        recommended.permutation,
        run.shots[-1],
        query,
        is_held_out=recommended.is_held_out,
        notes=recommended.notes,
    )


def _best(run: FinishedRun, shots: int | None) -> tuple[int, int, int, bool, tuple[str, ...]]:
    """The most accurate cell: on dev where the run has dev queries, else on test; ties go to the lowest."""
    if shots is not None and shots not in run.shots:
        raise ConfigError(f"the run has no prompts of {shots} shots; it has {', '.join(map(str, run.shots))}")
    split = "dev" if "dev" in run.splits else "test"
    items = run.splits[split]
    weight = np.where(items.state == OK, items.weights, 0).astype(np.float64)
    total = weight.sum(axis=-1)
    accuracy = np.where(total > 0, (items.correct * weight).sum(axis=-1) / np.maximum(total, 1), -1.0)
    places = range(len(run.shots)) if shots is None else [run.shots.index(shots)]
    within = accuracy[:, :, list(places)].round(TIE_DECIMALS)
    index_set, permutation, place = (int(index) for index in np.unravel_index(int(within.argmax()), within.shape))
    alike = int(np.sum(within == within.max())) - 1
    chosen = f"the most accurate of {within.size:,} prompts on the {len(items.gold):,} {split} queries"
    ties = f", the first of {alike + 1} that tie" if alike else ""
    notes = [f"{chosen} ({within.max():.1%}){ties}"]
    if split == "test":
        notes.append(
            "the best of many is partly luck (the winner's curse): on other queries expect less than the accuracy "
            "below; --kind search, or dev_queries, chooses on queries of their own"
        )
    else:
        notes.append("its lead on dev is partly luck (the winner's curse); its accuracy on test is free of that")
    return index_set, permutation, run.shots[[*places][place]], split == "dev", tuple(notes)
