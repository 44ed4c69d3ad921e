"""What came out of a study: results in memory, their report, and the tables that keep them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iclperm.errors import IclpermError, RunError
from iclperm.store import OK, STATES, RunFolder, writable
from iclperm.study import Study
from iclperm.work import Setting, Work

if TYPE_CHECKING:
    from iclperm.stats import Curve
    from iclperm.studies.sensitivity import SensitivitySummary

_PENDING = 255


@dataclass(frozen=True)
class RunReport:
    """What a run cost and met; ``tokens_forwarded`` sums all sessions, ``seconds`` is this call's.

    Where a session was killed or its record is damaged, ``is_token_count_complete`` is False: at least
    ``tokens_forwarded`` were forwarded. Of the ``num_duplicates`` rows of the data that repeat another,
    ``num_conflicting`` have another label than the one that was kept.
    """

    tokens_naive: int
    tokens_unique: int
    tokens_forwarded: int
    num_parts: int
    num_parts_resumed: int
    num_quarantined: int
    num_general_cells: int
    num_excluded: int
    seconds: float
    num_duplicates: int = 0
    num_conflicting: int = 0
    is_token_count_complete: bool = True


@dataclass(frozen=True)
class Run:
    """A finished run. Distinct contexts are stored once; the properties spread them over all cells.

    ``shots`` are the K axis, ``labels`` the words of the L axis, ``gold`` int64 [Q] the right labels. ``context_of``
    int64 [S, P, K] tells each cell's distinct context; ``context_logprob`` float32 [C, Q, L] (nats) and
    ``context_state`` uint8 [C, Q] (0 ok, 1 invalid, 2 overlong) are the results by context.
    """

    study: Study
    task: str
    labels: tuple[str, ...]
    shots: tuple[int, ...]
    gold: NDArray[np.int64]
    context_of: NDArray[np.int64]
    context_logprob: NDArray[np.float32]
    context_state: NDArray[np.uint8]
    report: RunReport
    folder: Path | None

    @cached_property
    def correct(self) -> NDArray[np.uint8]:
        """1 where the most likely label is the right one (ties: the lowest label index), uint8 [S, P, K, Q]."""
        right = (np.argmax(self.context_logprob, axis=-1) == self.gold) & (self.context_state == OK)
        return np.asarray(right[self.context_of], dtype=np.uint8)

    @cached_property
    def state(self) -> NDArray[np.uint8]:
        """0 ok, 1 invalid, 2 overlong; uint8 [S, P, K, Q]."""
        return self.context_state[self.context_of]

    @cached_property
    def label_logprob(self) -> NDArray[np.float32]:
        """Summed log-likelihood of each label in nats, NaN where the state is not ok; float32 [S, P, K, Q, L]."""
        return self.context_logprob[self.context_of]

    def summary(self) -> SensitivitySummary:
        """Order and selection sensitivity and what else is said about the largest number of shots."""
        from iclperm.studies.sensitivity import sensitivity_summary

        return sensitivity_summary(
            self.correct[:, :, -1],
            self.label_logprob[:, :, -1],
            self.gold,
            self.state[:, :, -1],
            tokens=self.report,
            seed=self.study.seed,
        )

    def curve(self) -> Curve | None:
        """Accuracy over the numbers of shots; None where only one was run."""
        from iclperm.stats import curve

        return curve(self.correct, self.state) if len(self.shots) > 1 else None

    def write_report(self, folder: str | Path | None = None) -> list[Path]:
        """Writes figures and report.json into ``folder``, by default the run's own; returns their paths."""
        from iclperm.report import write_report

        target = folder or self.folder
        if target is None:
            raise RunError("this run is in memory only; name a folder for its report")
        with writable(Path(target)):
            Path(target).mkdir(parents=True, exist_ok=True)
            return write_report(
                target,
                self.summary(),
                curve=self.curve(),
                shots=self.shots,
                title=f"{self.task}, {Path(self.study.model).name}",
                chance=1 / len(self.labels),
            )


def open_run(path: str | Path) -> Run:
    """A finished run from its folder alone; needs neither model nor data.

    Raises `RunError` for a folder that is no run, is not finished, or is damaged (naming the file).
    """
    started = time.perf_counter()
    folder = RunFolder.open(path)
    recorded = folder.plan
    cells, queries = folder.table("demonstrations"), folder.table("queries")
    names = np.array(cells["contexts"].to_pylist(), dtype=np.int64)
    context_ids, context_of = np.unique(names, return_inverse=True)
    states = np.array([STATES.index(state) for state in queries["state"].to_pylist()], dtype=np.uint8)
    scores = Scores.empty(context_ids, states, len(recorded["labels"]))
    for part, file in folder.parts().items():
        scores.fill(part, folder.read(file))
    forwarded, is_complete = forwarded_tokens(folder)
    if len(scores.parts) < recorded["work"]["parts"]:
        done, total = len(scores.parts), recorded["work"]["parts"]
        raise RunError(f"{path} is not finished ({done} of {total} parts); run the same study into it to continue")
    report = RunReport(
        tokens_naive=recorded["tokens"]["naive"],
        tokens_unique=recorded["tokens"]["unique"],
        tokens_forwarded=forwarded,
        num_parts=len(scores.parts),
        num_parts_resumed=len(scores.parts),
        num_quarantined=0,
        num_general_cells=recorded["work"]["general_cells"],
        num_excluded=recorded["work"]["excluded"],
        num_duplicates=recorded["work"]["duplicates"],
        num_conflicting=recorded["work"]["conflicting"],
        is_token_count_complete=is_complete,
        seconds=time.perf_counter() - started,
    )
    scores.refuse_gaps()
    return Run(
        study=Study.from_file(folder.path / "study.yaml"),
        task=recorded["task"],
        labels=tuple(recorded["labels"]),
        shots=tuple(recorded["study"]["shots"]),
        gold=queries["gold"].to_numpy().astype(np.int64),
        context_of=context_of.reshape(recorded["study"]["sets"], recorded["study"]["permutations"], -1),
        context_logprob=scores.logprob,
        context_state=scores.state,
        report=report,
        folder=folder.path,
    )


def forwarded_tokens(folder: RunFolder) -> tuple[int, bool]:
    """The tokens that all sessions are known to have forwarded, and whether none forwarded more."""
    sessions = folder.sessions()
    forwarded = sum(session.get("tokens_forwarded", 0) for session in sessions)
    return forwarded, all(session.get("closed", False) for session in sessions)


def finished(path: Path, setting: Setting) -> Run | None:
    """The run in this folder if it is this setting's and nothing is missing; no tokenizer or model is loaded."""
    try:
        folder = RunFolder.open(path)
        if any(folder.plan.get(key) != value for key, value in setting.identity.items()):
            return None
        return open_run(path)
    except IclpermError:
        return None


def tables(work: Work) -> dict[str, pa.Table]:
    """What third parties need to read the items: the demonstrations of each context, and the queries."""
    setting, design = work.setting, work.setting.design
    cells = list(np.ndindex(*work.prompts.context_of.shape[:2]))
    orderings = design.orderings
    hashes, words = setting.train.hashes, setting.task.words
    demonstrations = {
        "set": pa.array([index_set for index_set, _ in cells], pa.int32()),
        "permutation": pa.array([permutation for _, permutation in cells], pa.int32()),
        "examples": pa.array([orderings[cell].tolist() for cell in cells], pa.list_(pa.int32())),
        "content_hashes": pa.array([[hashes[row] for row in orderings[cell]] for cell in cells]),
        "shots": pa.array([list(design.shots)] * len(cells), pa.list_(pa.int32())),
        "contexts": pa.array(
            [work.prompts.context_ids[work.prompts.context_of[cell]].tolist() for cell in cells],
            pa.list_(pa.int64()),
        ),
    }
    queries = {
        "query": pa.array(range(len(design.queries)), pa.int32()),
        "example": pa.array(design.queries, pa.int32()),
        "content_hash": pa.array([setting.test.hashes[row] for row in design.queries]),
        "gold": pa.array(work.prompts.gold, pa.int16()),
        "label": pa.array([words[label] for label in work.prompts.gold]),
        "state": pa.array([STATES[state] for state in work.query_states]),
    }
    return {"demonstrations": pa.table(demonstrations), "queries": pa.table(queries)}


def item_rows(
    work: Work,
    contexts: NDArray[np.int64],
    queries: NDArray[np.int64],
    logprob: NDArray[np.float32],
    state: NDArray[np.uint8],
) -> pa.Table:
    """Items as a table, one row for each context [N], query [N], label log-likelihoods [N, L] and state [N]."""
    index_set, permutation, place = work.first_cells[contexts].T
    is_missing = state != OK
    num_labels = logprob.shape[1]
    predictions = np.where(is_missing, 0, np.argmax(logprob, axis=1))
    lists = pa.ListArray.from_arrays(
        pa.array(np.arange(len(contexts) + 1) * num_labels, pa.int32()),
        pa.array(logprob.ravel(), pa.float32()),
        mask=pa.array(is_missing),
    )
    return pa.table(
        {
            "context": pa.array(work.prompts.context_ids[contexts], pa.int64()),
            "set": pa.array(index_set, pa.int32()),
            "permutation": pa.array(permutation, pa.int32()),
            "shots": pa.array(np.array(work.setting.design.shots)[place], pa.int32()),
            "query": pa.array(queries, pa.int32()),
            "gold": pa.array(work.prompts.gold[queries], pa.int16()),
            "prediction": pa.array(predictions, pa.int16(), mask=is_missing),
            "label_logprob": lists,
            "state": pa.array([STATES[code] for code in state]).dictionary_encode(),
        }
    )


class Scores:
    """Results by distinct context, filled from tables of items; ``parts`` are those filled in."""

    def __init__(self, context_ids: NDArray[np.int64], logprob: NDArray[np.float32], state: NDArray[np.uint8]) -> None:
        self._order = np.argsort(context_ids)
        self._sorted_ids = context_ids[self._order]
        self.logprob = logprob
        self.state = state
        self.parts: set[int] = set()

    @classmethod
    def empty(cls, context_ids: NDArray[np.int64], query_states: NDArray[np.uint8], num_labels: int) -> Scores:
        shape = (len(context_ids), len(query_states))
        state = np.broadcast_to(np.where(query_states == OK, _PENDING, query_states).astype(np.uint8), shape).copy()
        return cls(context_ids, np.full((*shape, num_labels), np.nan, dtype=np.float32), state)

    @classmethod
    def of(cls, work: Work) -> Scores:
        """No results yet."""
        return cls.empty(work.prompts.context_ids, work.query_states, len(work.setting.task.words))

    def fill(self, part: int, table: pa.Table) -> None:
        contexts = self._order[np.searchsorted(self._sorted_ids, table["context"].to_numpy())]
        queries = table["query"].to_numpy()
        state = np.array([STATES.index(name) for name in table["state"].to_pylist()], dtype=np.uint8)
        values = table["label_logprob"].combine_chunks().flatten().to_numpy()
        is_ok = state == OK
        self.state[contexts, queries] = state
        self.logprob[contexts[is_ok], queries[is_ok]] = values.reshape(-1, self.logprob.shape[2])
        self.parts.add(part)

    def refuse_gaps(self) -> None:
        """Raises `RunError` where all parts together leave answers out."""
        if missing := int(np.sum(self.state == _PENDING)):
            raise RunError(f"{missing} answers are in none of the run's files; run the study into another folder")
