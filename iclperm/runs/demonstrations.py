"""What stood in a study's contexts and queries: its design drawn again from its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iclperm.errors import DataError
from iclperm.prompts.design import draw
from iclperm.runs.setting import study_examples
from iclperm.study.study import Study
from iclperm.tasks.task import Task


@dataclass(frozen=True)
class Demonstrations:
    """What stood in a study's contexts and queries.

    ``rows`` int64 [S, P, K] are train rows in the order of the prompt, ``labels`` int64 [S, P, K] their labels.
    ``sets`` int64 [S, K] are the rows of each set in its default order, which the ``permutations`` int64 [P, K], shared
    by all sets, rearrange.
    """

    rows: NDArray[np.int64]
    labels: NDArray[np.int64]
    permutations: NDArray[np.int64]
    sets: NDArray[np.int64]
    texts: dict[int, str]
    """The fields of each train row that is used, joined by spaces; without template and label."""
    hashes: dict[int, str]
    """The hash of the content of each of these rows."""
    _queries: dict[str, list[str]]

    @classmethod
    def of(cls, study: Study) -> Demonstrations:
        """Reads the task's data and draws the design again.

        Raises `DataError` for a study with ``resample: per_k``, where every number of shots has demonstrations of its
        own, for one where every query has (`run.prompt` tells those), and what reading data raises.
        """
        task = Task.load(study.task, study.data)
        examples = study_examples(study, task)
        design = draw(study, task, examples)
        if design.neighbours is not None:
            raise DataError("each query has demonstrations of its own; iclperm prompt --query N prints those of one")
        if len(design.orderings) > 1:
            raise DataError("with resample: per_k every k has demonstrations of its own; run with resample: none")
        (group,), train = design.orderings, examples["train"]
        used = np.unique(group.sets).tolist()
        return cls(
            rows=group.rows,
            labels=train.labels[group.rows],
            permutations=group.permutations,
            sets=group.sets,
            texts={row: _joined(train.fields[row]) for row in used},
            hashes={row: train.hashes[row] for row in used},
            _queries={
                queries.split: [_joined(examples[queries.split].fields[row]) for row in queries.rows]
                for queries in design.queries
            },
        )

    def query_texts(self, split: str) -> list[str]:
        """The fields of each distinct query of a split, joined by spaces; [Q]."""
        return self._queries[split]


def _joined(fields: Mapping[str, Any]) -> str:
    return " ".join(map(str, fields.values()))
