"""Answers of a run by context and query, and the canonical table of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from iclperm.base.arrays import large_array
from iclperm.base.files import replacing, writable
from iclperm.base.outputs import output
from iclperm.errors import ConfigError
from iclperm.runs.generated import KEPT, GeneratedAnswers
from iclperm.runs.limits import DEFAULT, WorkLimits
from iclperm.runs.query_choices import QueryChoices
from iclperm.stats.calibration import calibrated_scores
from iclperm.study.metrics import Metric
from iclperm.study.states import NAMES, OK

_MOST_READINGS = 16  # of all files, however large a run is: its orderings lie scattered over them


class LogLikelihoods(Protocol):
    """Log-likelihoods of labels by distinct context, [C, Q, L] in nats: an array, or what reads them from files.

    ``[contexts]``, int64 [N] without repeats, gives float32 [N, Q, L], NaN where there is no answer, and
    ``[np.ix_(contexts, queries)]`` that of some queries. Of a run in a folder it reads the files that hold these
    contexts, and raises `RunError` where one is damaged or gone by now.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, index: NDArray[np.int64] | tuple[NDArray[np.int64], ...], /) -> NDArray[np.float32]: ...


@dataclass(frozen=True)
class Items:
    """The answers to the queries of one split. Distinct contexts are stored once; the properties spread them over all
    cells.

    ``examples`` int64 [Q] are rows of the split, each query once; ``weights`` int64 [Q] say how often each counts;
    ``gold`` int64 [Q] is the right label. ``context_of`` int64 [S, P, K] is the number of each cell's distinct context.
    By context there are ``context_state`` uint8 [C, Q] (see `STATES`), ``context_prediction`` [C, Q], which is the most
    likely label (of equal ones the lowest), -1 where the state is not ok, and ``context_logprob`` [C, Q, L], which is
    read from the files at each use. ``alone`` float32 [Q, L], or [1, L] of labels that are the same for all, are
    log-likelihoods without a context, of a run that asked for them; with ``is_pmi`` they are taken off before labels
    are compared. ``scale`` float64 [L] is what log-likelihoods were divided by before labels were
    compared, [Q, L] where each query has ``choices`` of its own: labels are then their positions, ``gold`` is the first
    that is right, and log-likelihoods of choices that a query lacks are NaN.

    In a calibrated study (Zhao et al. 2021) ``prior`` float64 [C, L] are the log-probabilities of the labels after
    content-free queries. It is taken off predictions and scores; ``uncalibrated_prediction`` [C, Q] are the predictions
    without that. A context that lacks a content-free answer has no answers at all: the state is the worse of the two,
    and the prior is NaN.

    ``generated`` answers have no log-likelihoods of labels (L is 0). Their predictions are numbers that equal answers
    share: that of the label, or a hash where any answer may be given.
    """

    split: str
    examples: NDArray[np.int64]
    weights: NDArray[np.int64]
    gold: NDArray[np.int64]
    context_of: NDArray[np.int64]
    context_state: NDArray[np.uint8]
    context_prediction: NDArray[np.signedinteger[Any]]
    context_logprob: LogLikelihoods
    scale: NDArray[np.float64]
    prior: NDArray[np.float64] | None = None
    uncalibrated_prediction: NDArray[np.signedinteger[Any]] | None = None
    generated: GeneratedAnswers | None = None
    choices: QueryChoices | None = None
    alone: NDArray[np.float32] | None = None
    is_pmi: bool = False
    right_answers: tuple[str | None, ...] = ()
    """The right label or answer of each query, as text; [Q]."""
    has_bounds: bool = False
    """Whether some log-likelihoods are upper bounds, below all that are none: enough for a prediction."""
    limits: WorkLimits = DEFAULT
    """How much is read or in memory at once."""

    @property
    def uncalibrated(self) -> Items:
        """These answers as they are without calibration, in the same states; themselves where there is none."""
        if self.uncalibrated_prediction is None:
            return self
        return replace(self, context_prediction=self.uncalibrated_prediction, prior=None, uncalibrated_prediction=None)

    @property
    def metric(self) -> Metric | None:
        """What answers are graded by; None where they are right or wrong."""
        return None if self.generated is None else self.generated.metric

    @cached_property
    def correct(self) -> NDArray[np.uint8] | NDArray[np.float32]:
        """1 where the prediction is the right label, or the generated answer is right; uint8 [S, P, K, Q]. Where a
        ``metric`` grades, grades in 0..1, float32."""
        shape = (*self.context_of.shape, len(self.gold))
        kind = np.bool_ if self.metric is None else np.float32
        correct: NDArray[Any] = large_array(shape, kind, most_held=self.limits.bytes_in_memory)
        for cell in np.ndindex(self.context_of.shape[:2]):
            self.is_right(self.context_of[cell], correct[cell])
        return correct.view(np.uint8) if self.metric is None else correct

    def is_right(self, contexts: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Writes into ``out`` [..., Q] whether the answers of ``contexts`` [...] are right, or their
        grades into floating point; missing ones are not."""
        if self.generated is not None:
            out[:] = self.generated.correct[contexts]
        elif self.choices is not None:
            out[:] = self.choices.is_right(self.context_prediction[contexts])
        else:
            np.equal(self.context_prediction[contexts], self.gold, out=out)

    def verdicts(self, contexts: NDArray[np.int64]) -> NDArray[Any]:
        """Whether the answers of ``contexts`` [...] are right, bool [..., Q], or float32 grades of a ``metric``."""
        found = np.empty((*contexts.shape, len(self.gold)), np.bool_ if self.metric is None else np.float32)
        self.is_right(contexts, found)
        return found

    @cached_property
    def state(self) -> NDArray[np.uint8]:
        """0 where there is an answer, else why there is none (`iclperm.study.states.STATES`); uint8 [S, P, K, Q]."""
        return self.context_state[self.context_of]

    @property
    def taken_off(self) -> NDArray[np.float32] | None:
        """What is taken off log-likelihoods before labels are compared, float32 [Q, L] or [1, L]; None for nothing."""
        return self.alone if self.is_pmi else None

    def normalized(self, logprob: NDArray[np.float32]) -> NDArray[np.float64]:
        """Log-likelihoods of all queries [Q, L] as the study compares them, before any calibration."""
        values = logprob if (alone := self.taken_off) is None else logprob - alone.astype(np.float64)
        return np.asarray(values / self.scale)

    @property
    def has_scores(self) -> bool:
        """Whether there are log-likelihoods of labels, and none of them is a bound."""
        return self.generated is None and not self.has_bounds

    @cached_property
    def label_logprob(self) -> NDArray[np.float32]:
        """Summed log-likelihood of each label in nats, NaN where there is none; float32 [S, P, K, Q, L].

        As the model gave them, neither normalised nor calibrated. Read at the first use and kept in memory from then
        on: 4·S·P·K·Q·L bytes, a gigabyte for 64 million prompts of four labels. `logprob_by_cell` gives the same cell
        by cell.
        """
        num_queries, num_labels = self.context_logprob.shape[1:]
        tensor = np.empty((*self.context_of.shape, num_queries, num_labels), dtype=np.float32)
        for place, logprob in zip(np.ndindex(self.context_of.shape), self.logprob_by_cell(), strict=True):
            tensor[place] = logprob
        return tensor

    def logprob_by_cell(self, shots: slice = slice(None)) -> Iterator[NDArray[np.float32]]:
        """`label_logprob` [Q, L] of each set, permutation and place on the K axis within ``shots``, in this order.

        Reads every file once for every ``limits.bytes_at_once`` of what it gives, at most `_MOST_READINGS` times, and
        keeps no more of it than that in memory.
        """
        contexts = self.context_of[:, :, shots].ravel()
        bytes_each = 4 * max(1, int(np.prod(self.context_logprob.shape[1:])))
        step = max(1, self.limits.bytes_at_once // bytes_each, -(-len(contexts) // _MOST_READINGS))
        for begin in range(0, len(contexts), step):
            distinct, places = np.unique(contexts[begin : begin + step], return_inverse=True)
            values = self.context_logprob[distinct]
            yield from (values[place].copy() for place in places)  # or what was given would keep all of it
            del values

    def scores_by_cell(self, shots: slice = slice(None)) -> Iterator[NDArray[np.float32]]:
        """As `logprob_by_cell`, but log-likelihoods normalised and calibrated as the study says: what labels are
        compared by; -inf of a choice that a query lacks."""
        if self.choices is not None:
            scores = (self.normalized(logprob).astype(np.float32) for logprob in self.logprob_by_cell(shots))
            return map(self.choices.comparable, scores)
        if self.prior is None:
            return (self.normalized(logprob).astype(np.float32) for logprob in self.logprob_by_cell(shots))
        contexts = self.context_of[:, :, shots].ravel()
        return self._calibrated_by_cell(self.logprob_by_cell(shots), self.prior[contexts])

    def _calibrated_by_cell(
        self, logprobs: Iterator[NDArray[np.float32]], priors: NDArray[np.float64]
    ) -> Iterator[NDArray[np.float32]]:
        for logprob, prior in zip(logprobs, priors, strict=True):
            yield calibrated_scores(logprob / self.scale, prior).astype(np.float32)


def digest_of(labels: Sequence[str], shots: Sequence[int], splits: Iterable[Items]) -> str:
    """SHA-256 of all answers: of the labels and numbers of shots, and of each split's queries and answers in order.

    Reads as `Items.logprob_by_cell` does.
    """
    digest = hashlib.sha256(json.dumps([labels, shots]).encode())
    for items in splits:
        digest.update(f"{items.split} {items.context_of.shape} {len(items.gold)}".encode())
        digest.update(items.gold.astype("<i2").tobytes() + items.weights.astype("<i4").tobytes())
        if items.alone is not None:
            digest.update(_nan_alike(items.alone))
        if items.generated is not None:
            for contexts in items.context_of.reshape(-1, len(shots)):
                items.generated.update(digest, contexts)
            continue
        logprobs = items.logprob_by_cell()
        for contexts in items.context_of.reshape(-1, len(shots)):
            digest.update(items.context_state[contexts].tobytes())
            for logprob in islice(logprobs, len(shots)):
                digest.update(_nan_alike(logprob))
    return digest.hexdigest()


def _nan_alike(logprob: NDArray[np.float32]) -> bytes:
    """The bytes of log-likelihoods; NaN has many bit patterns, and any of them means that there is no answer."""
    return np.where(np.isnan(logprob), np.float32(np.nan), logprob).astype("<f4").tobytes()


def write_tables(tables: Iterable[pa.Table], path: Path) -> Path:
    """Writes tables one after the other into a .csv, .jsonl or .parquet file, whole or not at all."""
    if (ending := path.suffix.lower()) not in _WRITERS:
        raise ConfigError(f"{path} has no known ending; give one of {', '.join(_WRITERS)}")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file that ends in {ending}, in it or elsewhere")
    with writable(output(path).parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            _WRITERS[ending](iter(tables), unfinished)
    return path


def _write_parquet(tables: Iterator[pa.Table], path: Path) -> None:
    first = next(tables)
    with pq.ParquetWriter(path, first.schema, compression="zstd") as writer:
        writer.write_table(first)
        for table in tables:
            writer.write_table(table)


def _write_csv(tables: Iterator[pa.Table], path: Path) -> None:
    first = next(tables)
    with pa.csv.CSVWriter(path, first.schema) as writer:
        writer.write_table(first)
        for table in tables:
            writer.write_table(table)


def _write_jsonl(tables: Iterator[pa.Table], path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for table in tables:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in table.to_pylist())


_WRITERS = {".csv": _write_csv, ".jsonl": _write_jsonl, ".parquet": _write_parquet}


def cell_table(
    items: Items,
    cells: NDArray[np.int64],
    logprobs: Sequence[NDArray[np.float32]],
    labels: Sequence[str],
    shots: Sequence[int],
) -> pa.Table:
    """Rows of the canonical table for some cells, int64 [N] in the flattened [S, P, K], with the log-likelihoods
    [Q, L] of each."""
    num_queries = len(items.gold)
    contexts = items.context_of.ravel()[cells]
    axes = np.unravel_index(cells, items.context_of.shape)
    index_set, permutation, place = (axis.repeat(num_queries) for axis in axes)
    logprob = np.concatenate(logprobs)
    state, prediction = items.context_state[contexts].ravel(), items.context_prediction[contexts].ravel()
    written = None if items.generated is None else items.generated.table(contexts)

    def by_query(values: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.tile(values, len(cells))

    query, gold = by_query(np.arange(num_queries)), by_query(items.gold)
    is_missing = state != OK
    if items.generated is None or written is None:
        words = pa.array(labels, pa.string())
        right = words.take(pa.array(gold, mask=gold < 0))
        chosen = words.take(pa.array(prediction, mask=is_missing))
        error, is_right = None, items.verdicts(contexts).ravel()
    else:
        right = pa.array(items.right_answers).take(pa.array(query))
        chosen = written["answer"]
        is_right = np.asarray(items.generated.correct[contexts].ravel())
        error = None if items.generated.error is None else items.generated.error[contexts].ravel()
        state = items.generated.state[contexts].ravel()
    columns = {
        "split": pa.array([items.split], pa.string()).take(pa.array(np.zeros(len(query), np.int8))),
        "set": pa.array(index_set, pa.int32()),
        "permutation": pa.array(permutation, pa.int32()),
        "shots": pa.array(np.array(shots)[place], pa.int32()),
        "query": pa.array(query, pa.int32()),
        "example": pa.array(by_query(items.examples), pa.int32()),
        "weight": pa.array(by_query(items.weights), pa.int32()),
        "gold": right,
        "prediction": chosen,
        "correct" if items.metric is None else "grade": pa.array(is_right, mask=is_missing | (gold < 0)),
        **({} if error is None else {"error": pa.array(error, mask=state != OK)}),
        "state": pa.array(NAMES, pa.string()).take(pa.array(state)),
    }
    scored = labels if written is None else ()
    columns |= {
        f"logprob_{label}": pa.array(logprob[:, number], pa.float32(), mask=np.isnan(logprob[:, number]))
        for number, label in enumerate(scored)
    }
    if items.alone is not None:
        alone = np.tile(np.broadcast_to(items.alone, (num_queries, len(labels))), (len(cells), 1))
        columns |= {
            f"logprob_alone_{label}": pa.array(alone[:, number], pa.float32(), mask=np.isnan(alone[:, number]))
            for number, label in enumerate(labels)
        }
    if written is not None:
        columns |= {name: written[name] for name in KEPT if name != "answer"}
    return pa.table(columns)
