"""The runs of the kind `recommend`, and what is chosen between them.

The first run is a race on dev queries for the best prompt at every number of demonstrations. Its winners, and prompts
drawn at random of the length that is chosen, then answer the test queries, each in a run that can grow by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from iclperm.errors import ConfigError
from iclperm.prompts.design import draw, draw_permutations, num_different_sets
from iclperm.report.parts import plain
from iclperm.runs.demonstrations import Demonstrations
from iclperm.runs.setting import resolved, study_examples
from iclperm.stats.shortest import shortest
from iclperm.studies.race import afterwards, winners
from iclperm.studies.report import Run
from iclperm.studies.stages import Stage
from iclperm.study import kinds
from iclperm.study.study import Study
from iclperm.tasks.task import Task

RACE, RANDOM = kinds.RACE.name, "random"
"""The names of the first run, and of that of random prompts."""
NUM_RANDOM = 8
"""Random prompts that answer the test queries."""
_LEAST_MOST = 8  # demonstrations that are tried where neither the study nor the task names more


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
    shots = ladder(study.shots, max(_LEAST_MOST, Task.load(study.task, study.data).shots))
    if not shots[-1]:
        raise ConfigError("a recommendation without demonstrations has nothing to choose; give 'shots' of 1 or more")
    orders = math.factorial(min(shots[-1], 20))
    return {RACE: study.of_kind(kinds.RACE.name, shots=shots, permutations=min(study.permutations, orders), queries=1)}


def _choose(study: Study, runs: Mapping[str, Run]) -> dict[str, Any]:
    """The winner at every number of shots, and which of them is taken: the shortest that no longer one is shown to beat
    on dev queries that had no say in the races."""
    run = runs[RACE]
    found = winners(run)
    rows = run.demonstrations.rows
    prompts = [
        {**plain(one), "rows": rows[one.set, one.permutation, : one.shots].tolist(), "run": run_of(one.shots)}
        for one in found
    ]
    place = shortest(afterwards(run, found)).place
    return {"prompts": prompts, "place": place, "num_random": _num_random(study, prompts[place]["shots"])}


def _num_random(study: Study, shots: int) -> int:
    """Random prompts of so many demonstrations that are asked; as many as there are different sets, at most."""
    if not shots:
        return 0
    task = Task.load(study.task, study.data)
    return min(NUM_RANDOM, num_different_sets(shots, task, task.examples("train")))


def _tests(study: Study, choices: Mapping[str, Any]) -> dict[str, Study]:
    """A run on test queries for each winner, and one for random prompts of the chosen number of shots."""
    choice = choices[RACE]
    common: dict[str, Any] = {"permutations": 1, "dev_queries": 0, "design": "random"}
    parts = {}
    for prompt in choice["prompts"]:
        order = draw_permutations(study.seed, 1, prompt["shots"])[0]
        given = np.array(prompt["rows"], dtype=np.int64)[np.argsort(order)].tolist()  # the order puts them as they were
        drawn = {"demonstrations": [given]} if given else {}
        parts[prompt["run"]] = study.of_kind(kinds.SENSITIVITY.name, sets=1, shots=prompt["shots"], **common, **drawn)
    if choice["num_random"]:
        shots = choice["prompts"][choice["place"]]["shots"]
        parts[RANDOM] = study.of_kind(kinds.SENSITIVITY.name, sets=choice["num_random"], shots=shots, **common)
    return parts


def _stand_in(study: Study) -> dict[str, Any]:
    """The first prompt of every number of shots, and random ones of the largest."""
    (race,) = _race(study, {}).values()
    rows = Demonstrations.of(race).rows[0, 0]
    shots = race.shots if isinstance(race.shots, list) else []
    prompts = [{"shots": k, "rows": rows[:k].tolist(), "run": run_of(k)} for k in shots]
    return {"prompts": prompts, "place": len(prompts) - 1, "num_random": _num_random(study, shots[-1])}


def _check(study: Study) -> None:
    """Raises `ConfigError` or `DataError` for queries that there are not, before the race is run."""
    parts = [*_race(study, {}).values(), *_tests(study, {RACE: _stand_in(study)}).values()]
    for part in (parts[0], parts[-1]):
        task = Task.load(part.task, part.data)
        draw(resolved(part, task), task, study_examples(part, task))


STAGES = {RACE: Stage(_race, choose=_choose, stand_in=_stand_in, check=_check), "test": Stage(_tests)}
