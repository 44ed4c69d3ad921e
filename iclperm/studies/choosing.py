"""The runs of the kind `selection`, and what is chosen between them.

The first run is a curve over sets of K demonstrations and scores each of them; n of each set are chosen by several
strategies, and the second run is a curve over these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from iclperm import stats
from iclperm.errors import ConfigError, DataError
from iclperm.report.parts import plain
from iclperm.runs.demonstrations import Demonstrations
from iclperm.runs.run import FinishedRun
from iclperm.stats.choosing import STRATEGIES, select
from iclperm.stats.demonstrations import Positions, Score, demonstration_scores
from iclperm.stats.sensitivity import FloatArray
from iclperm.stats.texts import similarity
from iclperm.studies.report import Run
from iclperm.studies.stages import Stage
from iclperm.study import kinds
from iclperm.study.study import Study
from iclperm.tasks.task import Task

SOURCE, CHOSEN = "source", "chosen"
"""The two runs, and the stages that they are."""


@dataclass(frozen=True)
class Chosen:
    """Demonstrations that were chosen out of the sets of a run."""

    strategies: tuple[str, ...]
    """[T] names out of `STRATEGIES`."""
    positions: Mapping[str, Positions]
    """By strategy int64 [S, n]: positions in the sets in default order, ascending."""
    rows: Positions
    """int64 [T·S, n] train rows, strategy by strategy: the sets of the second run."""
    num_labels: FloatArray
    """[T, S] different labels among the chosen; NaN where any answer may be given."""
    score: str
    """What top, bottom and blend went by."""
    scores: Mapping[str, Score]
    """Every score of the demonstrations of the sets, [S, K]."""
    split: str
    """The queries that the scores come from."""
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """What was written as JSON by `report.parts.plain`."""
        return cls(
            strategies=tuple(content["strategies"]),
            positions={name: np.array(places, dtype=np.int64) for name, places in content["positions"].items()},
            rows=np.array(content["rows"], dtype=np.int64),
            num_labels=np.array(content["num_labels"], dtype=np.float64),  # null becomes NaN
            score=content["score"],
            scores={
                name: Score(*(np.array(found[field], dtype=np.float64) for field in Score._fields))
                for name, found in content["scores"].items()
            },
            split=content["split"],
            warnings=tuple(content["warnings"]),
        )


def choose(
    source: FinishedRun,
    n: int | None = None,
    *,
    score: str = "marginal",
    strategies: Sequence[str] | None = None,
    seed: int | None = None,
) -> Chosen:
    """Chooses n demonstrations of each set of a curve run, by every strategy.

    Args:
        source: a run with several numbers of shots, best all of 0..K, and dev queries.
        n: how many; the study's `select` by default.
        score: what top, bottom and blend go by, a name in `stats.demonstrations.SCORES`.
        strategies: names out of `STRATEGIES`; all whose scores the shots allow by default.
        seed: of the random choice; the study's by default.

    Scores come from dev, so that no strategy is judged on the queries that it was chosen by; from test, with a
    warning, where there is no dev split. Raises RequestError for an n, score or strategy that cannot be, DataError for
    a run with `resample: per_k`. Cost: no model call.
    """
    demonstrations = source.demonstrations
    split = "dev" if "dev" in source.splits else "test"
    items = source.splits[split]
    cells = stats.accuracy(items.correct, items.state, items.weights)
    if cells.num_queries == 0:
        raise DataError(f"no {split} query is ok in every cell; see the states of the run")
    scores = demonstration_scores(cells.values, demonstrations.permutations, source.shots)
    texts = [[demonstrations.texts[row] for row in rows] for rows in demonstrations.sets.tolist()]
    positions = select(
        {name: found.values for name, found in scores.items()},
        source.study.select if n is None else n,
        score=score,
        strategies=strategies,
        similarities=np.stack([similarity(of_set) for of_set in texts]),
        seed=source.study.seed if seed is None else seed,
    )
    label_of = dict(zip(demonstrations.rows.ravel().tolist(), demonstrations.labels.ravel().tolist(), strict=True))
    has_labels = bool(source.shared_labels)
    rows = {name: np.take_along_axis(demonstrations.sets, chosen, axis=1) for name, chosen in positions.items()}
    return Chosen(
        strategies=tuple(positions),
        positions=positions,
        rows=np.concatenate(list(rows.values())),
        num_labels=np.array(
            [
                [len({label_of[row] for row in of_set}) if has_labels else math.nan for of_set in found.tolist()]
                for found in rows.values()
            ],
            dtype=np.float64,
        ),
        score=score,
        scores=scores,
        split=split,
        warnings=tuple(_choice_warnings(split, scores, positions)),
    )


def _source(study: Study, _: Mapping[str, Any]) -> dict[str, Study]:
    return {SOURCE: study.of_kind(kinds.CURVE.name)}


def _choose(study: Study, runs: Mapping[str, Run]) -> Any:
    return plain(choose(runs[SOURCE], study.select))


def _chosen(study: Study, choices: Mapping[str, Any]) -> dict[str, Study]:
    """A curve over the demonstrations that were chosen, in random orders, on test queries."""
    rows = choices[SOURCE]["rows"]
    return {
        CHOSEN: study.of_kind(
            kinds.CURVE.name,
            sets=len(rows),
            permutations=min(study.permutations, math.factorial(min(len(rows[0]), 20))),
            demonstrations=rows,
            shots=len(rows[0]),
            dev_queries=0,
        )
    }


def _stand_in(study: Study) -> dict[str, Any]:
    """As many sets as there are strategies for each set of the source, of demonstrations that stand in it."""
    sets = Demonstrations.of(_source(study, {})[SOURCE]).sets
    rows = [np.roll(sets, turn, axis=1)[:, : study.select] for turn in range(len(STRATEGIES))]
    return {"rows": np.concatenate(rows).tolist()}


def _check(study: Study) -> None:
    """Raises `ConfigError` for a source whose demonstrations could not be scored, or not be chosen from."""
    shots = study.shot_list(Task.load(study.task, study.data).shots)
    if study.resample != "none":
        raise ConfigError(f"a selection's key 'resample' is {study.resample!r}; its scores need 'none'")
    if shots != tuple(range(len(shots))):
        raise ConfigError("a selection scores demonstrations by every k from 0 on; give 'shots' as one number")
    if not 2 <= study.select <= shots[-1]:
        raise ConfigError(f"a study's key 'select' is {study.select}; give 2 to {shots[-1]}, which is its 'shots'")
    if study.permutations < 2:
        raise ConfigError(f"a study's key 'permutations' is {study.permutations}, but a selection compares orders")


def _choice_warnings(split: str, scores: Mapping[str, Score], positions: Mapping[str, Positions]) -> list[str]:
    warnings = []
    if split == "test":
        warnings.append(
            "the scores come from the test queries that judge the choice, which flatters it; set 'dev_queries'"
        )
    if "single" in scores and "single" in positions:
        unknown = int(np.isnan(scores["single"].values).sum())
        if unknown:
            warnings.append(
                f"{unknown} of {scores['single'].values.size} demonstrations never stand first, so 'single' does not "
                "know them; raise 'permutations'"
            )
    return warnings


STAGES = {
    SOURCE: Stage(_source, choose=_choose, stand_in=_stand_in, check=_check, read=Chosen.of),
    CHOSEN: Stage(_chosen),
}
