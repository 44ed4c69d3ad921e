"""What a run's sets, permutations and queries are, by names that another run has too where they are the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from iclperm.prompts.design import draw
from iclperm.runs.folder import RunFolder
from iclperm.runs.run import FinishedRun
from iclperm.runs.setting import study_examples
from iclperm.tasks.task import Task


@dataclass(frozen=True)
class Identities:
    """A name for every level of three axes; two runs have one in common exactly where its name is the same."""

    sets: tuple[str, ...]
    """[S] of the contents of the demonstrations, whatever their order."""
    permutations: tuple[str, ...]
    """[P] of what fixes an index permutation: seed, design, numbers of shots, and its place."""
    queries: tuple[str, ...]
    """[Q] of the contents of the test queries."""


def identities(run: FinishedRun) -> Identities:
    """The names of a run's sets, permutations and queries.

    Of a run in a folder from the tables in it, as far as the run had grown; of one in memory from its data, read again.
    Raises `DamagedItem` for a table that is not what the plan says, and what reading data raises. O(S·K + P + Q).
    """
    num_sets, num_permutations, num_queries = run.correct.shape[0], run.correct.shape[1], run.correct.shape[3]
    contents, queries = _of_data(run) if run.folder is None else _of_folder(run, RunFolder.open(run.folder))
    drawn_by = [run.study.seed, run.study.design, run.study.resample, run.shots[-1]]
    if run.study.is_per_query:
        drawn_by.append(str(run.study.order))
    if run.study.resample != "none":
        drawn_by.append(list(run.shots))
    return Identities(
        tuple(_digest(sorted(contents[index])) for index in range(num_sets)),
        tuple(_digest([*drawn_by, place]) for place in range(num_permutations)),
        tuple(queries[:num_queries]),
    )


def index_orders(run: FinishedRun) -> NDArray[np.int64] | None:
    """Which demonstration of its set stands at each position, int64 [S, P, K]; numbered within each set, by its rows.

    From the table in the folder, or of a run in memory from its data, read again. None where every number of shots has
    demonstrations of its own (``resample: per_k``), and at k = 0. Raises what `identities` does.
    """
    if run.study.resample != "none" or run.study.is_per_query or not run.shots[-1]:
        return None
    if run.folder is None:
        rows = run.demonstrations.rows
    else:
        whole = RunFolder.open(run.folder)
        table = (whole.at_extent(run.study.extent) or whole).table("demonstrations")
        cells = table.select(["set", "permutation", "examples"]).to_pylist()
        rows = np.empty((*run.correct.shape[:2], run.shots[-1]), dtype=np.int64)
        for cell in cells:
            rows[cell["set"], cell["permutation"]] = cell["examples"]
    return np.stack([np.unique(of_set, return_inverse=True)[1].reshape(of_set.shape) for of_set in rows])


def _of_folder(run: FinishedRun, whole: RunFolder) -> tuple[Mapping[int, list[str]], Sequence[str]]:
    """Hashes of the demonstrations by set, and of the test queries."""
    folder = whole.at_extent(run.study.extent) or whole
    cells = folder.table("demonstrations")
    firsts = cells.filter(pc.equal(cells["permutation"], 0)).select(["set", "content_hashes"]).to_pylist()
    contents: dict[int, list[str]] = {}
    for cell in firsts:  # with resample: per_k a set has demonstrations for every k
        contents.setdefault(cell["set"], []).extend(cell["content_hashes"])
    queries = folder.table("queries").select(["split", "content_hash"]).to_pylist()
    return contents, [query["content_hash"] for query in queries if query["split"] == "test"]


def _of_data(run: FinishedRun) -> tuple[Mapping[int, list[str]], Sequence[str]]:
    task = Task.load(run.study.task, run.study.data)
    examples = study_examples(run.study, task)
    design, train = draw(run.study, task, examples), examples["train"]
    contents = {
        index: [
            train.hashes[row] if design.neighbours is None else design.neighbours.rank_hash(index, int(row))
            for group in design.orderings
            for row in group.sets[index]
        ]
        for index in range(design.num_sets)
    }
    return contents, [examples["test"].hashes[row] for row in design.queries[0].rows]


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
