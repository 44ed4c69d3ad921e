"""The runs of the kind `recommend`, and what is chosen between them.

The first run is a race on dev queries for the best prompt at every number of demonstrations. Its winners, and prompts
drawn at random of the length that is chosen, then answer the test queries, each in a run that can grow by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from iclperm.errors import ConfigError
from iclperm.prompts.design import draw, draw_permutations, draw_sets, num_different_sets
from iclperm.report.parts import plain
from iclperm.runs.demonstrations import Demonstrations
from iclperm.runs.layout import lay_out
from iclperm.runs.plan import tokens_within
from iclperm.runs.raced_shots import RacedShots
from iclperm.runs.setting import ResolvedStudy, resolved, study_examples
from iclperm.studies.race import choice_of, winners
from iclperm.studies.report import Run
from iclperm.studies.stages import Stage
from iclperm.study import kinds
from iclperm.study.sizes import parse_search_budget
from iclperm.study.study import Study
from iclperm.tasks.task import Task

RACE, RANDOM = kinds.RACE.name, "random"
"""The names of the first run, and of that of random prompts."""
NUM_RANDOM, RANDOM_QUERIES = 40, 100
"""Random prompts, and the test queries that each of them answers, at most: many prompts with few queries each tell more
of an uneven distribution over prompts than the reverse (benchmarks/recommending.py)."""
_OWN = " of random prompts"
LEAST_MOST = 8
"""Demonstrations that are tried where neither the study nor the task names more."""


def run_of(shots: int) -> str:
    """The name of the run of the prompt with so many demonstrations."""
    return f"k{shots}"


def ladder(shots: int | Sequence[int] | None, most: int) -> list[int]:
    """The numbers of demonstrations that are tried: those of a list, else 0, the powers of two below the largest, and
    that: ``shots``, or ``most``."""
    if isinstance(shots, Sequence):
        return sorted(shots)
    largest = most if shots is None else shots
    return [0, *(1 << power for power in range(max(largest - 1, 0).bit_length())), largest]


def _race(study: Study, _: Mapping[str, Any]) -> dict[str, Study]:
    if study.shots == "all":
        raise ConfigError("a recommendation's key 'shots' is 'all'; give the largest number, or those to be tried")
    shots = ladder(study.shots, max(LEAST_MOST, Task.load(study.task, study.data).shots))
    if not shots[-1]:
        raise ConfigError("a recommendation without demonstrations has nothing to choose; give 'shots' of 1 or more")
    orders = math.factorial(min(shots[-1], 20))
    return {RACE: study.of_kind(kinds.RACE.name, shots=shots, permutations=min(study.permutations, orders), queries=1)}


def _choose(study: Study, runs: Mapping[str, Run]) -> dict[str, Any]:
    """The winner at every number of shots, and which of them is taken (`choice_of`)."""
    run = runs[RACE]
    found = winners(run)
    rows = run.demonstrations.rows
    prompts = [
        {**plain(one), "rows": rows[one.set, one.permutation, : one.shots].tolist(), "run": run_of(one.shots)}
        for one in found
    ]
    place = choice_of(run, found).place
    return {"prompts": prompts, "place": place, "random": _random(study, prompts[place]["shots"])}


def _random(study: Study, shots: int) -> list[list[int]]:
    """Train rows of random prompts of so many demonstrations, as they stand in them: every set in an order of its own.

    At most as many as there are different sets; what raced has no say in them.
    """
    if not shots:
        return []
    task = Task.load(study.task, study.data)
    train = task.examples("train")
    count = min(NUM_RANDOM, num_different_sets(shots, task, train))
    sets = draw_sets(study.seed, count, shots, task, train, _OWN)
    orders = draw_permutations(study.seed, min(count, math.factorial(min(shots, 20))), shots, _OWN)
    return [rows[orders[place % len(orders)]].tolist() for place, rows in enumerate(sets)]


def _tests(study: Study, choices: Mapping[str, Any]) -> dict[str, Study]:
    """A run on test queries for each winner, and one for random prompts of the chosen number of shots."""
    choice = choices[RACE]
    common: dict[str, Any] = {"permutations": 1, "dev_queries": 0, "design": "random"}
    parts = {}
    wanted = {prompt["run"]: [prompt["rows"]] for prompt in choice["prompts"]}
    for name, prompts in {**wanted, **({RANDOM: choice["random"]} if choice["random"] else {})}.items():
        rows = np.array(prompts, dtype=np.int64)
        shots = rows.shape[1]
        order = np.argsort(draw_permutations(study.seed, 1, shots)[0])  # the only order puts them as they were
        given = {"demonstrations": rows[:, order].tolist()} if shots else {}
        queries = min(study.queries, RANDOM_QUERIES) if name == RANDOM else study.queries
        parts[name] = study.of_kind(
            kinds.SENSITIVITY.name, sets=len(rows), shots=shots, queries=queries, **common, **given
        )
    return parts


def _stand_in(study: Study) -> dict[str, Any]:
    """The first prompt of every number of shots, and random ones of the largest."""
    (race,) = _race(study, {}).values()
    rows = Demonstrations.of(race).rows[0, 0]
    shots = race.shots if isinstance(race.shots, list) else []
    prompts = [{"shots": k, "rows": rows[:k].tolist(), "run": run_of(k)} for k in shots]
    return {"prompts": prompts, "place": len(prompts) - 1, "random": _random(study, shots[-1])}


def _check(study: Study) -> None:
    """Raises `ConfigError` or `DataError` for queries that there are not, before the race is run."""
    parts = [*_race(study, {}).values(), *_tests(study, {RACE: _stand_in(study)}).values()]
    for part in parts[:2]:
        task = Task.load(part.task, part.data)
        draw(resolved(part, task), task, study_examples(part, task))
    if parse_search_budget(study.budget) is not None:  # before there is a folder that has this budget
        work = lay_out(ResolvedStudy.of(parts[0], weights=False))
        RacedShots.of(work.setting, work.prompts, partial(tokens_within, work), [])


STAGES = {RACE: Stage(_race, choose=_choose, stand_in=_stand_in, check=_check), "test": Stage(_tests)}
