"""What came out of a study: results in memory, their report, and the tables that keep them."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from iclperm.designs import CONTENT_FREE, Asked
from iclperm.errors import ConfigError, DataError, IclpermError, RunError
from iclperm.store import OK, STATES, RunFolder, writable
from iclperm.studies import findings_of
from iclperm.study import Study
from iclperm.work import Demonstrations, Part, Setting, Work, uneven_labels

if TYPE_CHECKING:
    from iclperm.stats import Curve
    from iclperm.studies.calibration import ContextualCalibration
    from iclperm.studies.findings import Findings
    from iclperm.studies.sensitivity import SensitivityOverShots, SensitivitySummary

_PENDING = 255
_HEAVY_WEIGHT = 5  # from here on single queries decide about a class
_ROWS_PER_TABLE = 1 << 18  # of the canonical table, some 50 MB; one context's rows at least
_READ_BACK = ["context", "split", "query", "state", "label_logprob"]
_MOST_HELD = 1 << 31  # of one array; a study of a thousand million answers still fits into a small machine
_BYTES_AT_ONCE = 1 << 27  # of log-likelihoods read back; what needs more reads the files once for every so many


@dataclass(frozen=True)
class RunReport:
    """What a run cost and met; ``tokens_forwarded`` sums all sessions, ``seconds`` is this call's.

    Where a session was killed or its record is damaged, ``is_token_count_complete`` is False: at least
    ``tokens_forwarded`` were forwarded. Of the ``num_duplicates`` rows of the data that repeat another,
    ``num_conflicting`` have another label than the one that was kept. ``num_oversampled`` queries asked for repeat
    another, as their class is short. More than one of ``num_numerics`` means that parts come from machines or versions
    whose last bits may differ. ``is_growing`` tells that the run was extended and that is not finished: these are the
    results before.
    """

    tokens_naive: int
    tokens_unique: int
    tokens_forwarded: int
    num_parts: int
    num_parts_resumed: int
    num_quarantined: int
    num_general_cells: int
    num_excluded: int
    num_duplicates: int
    num_conflicting: int
    num_oversampled: int
    num_numerics: int
    is_token_count_complete: bool
    seconds: float
    is_growing: bool


class LogLikelihoods(Protocol):
    """Those of all labels by distinct context, [C, Q, L] in nats, wherever they are; NaN where there is no answer.

    ``[contexts]``, int64 [N] and distinct, gives float32 [N, Q, L]: of a run in a folder it reads the files that hold
    them, and raises `RunError` where those are damaged or gone by now. An array is one, too.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, contexts: NDArray[np.int64], /) -> NDArray[np.float32]: ...


@dataclass(frozen=True)
class Items:
    """The answers to the queries of one split. Distinct contexts are stored once; the properties spread them over all
    cells.

    ``examples`` int64 [Q] are rows of the split, each query once; ``weights`` int64 [Q] tell how often each counts;
    ``gold`` int64 [Q] is the right label. ``context_of`` int64 [S, P, K] tells each cell's distinct context. By
    context there are ``context_state`` uint8 [C, Q] (see `iclperm.store.STATES`), ``context_prediction`` [C, Q], the
    most likely label (ties: the lowest index) and -1 where the state is not ok, and ``context_logprob`` [C, Q, L], read
    when asked for. ``scale`` float64 [L] is what log-likelihoods were divided by before labels were compared.

    Of a calibrated study (Zhao et al. 2021) ``prior`` float64 [C, L] are the log-probabilities of the labels after
    content-free queries, which predictions and scores are freed of, and ``uncalibrated_prediction`` [C, Q] are the
    predictions without that. Where a content-free answer is missing its context has no answers: the state is the worse
    of the two, and the prior is NaN.
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

    @property
    def uncalibrated(self) -> Items:
        """These answers as they are without calibration, in the same states; themselves where there is none."""
        if self.uncalibrated_prediction is None:
            return self
        return replace(self, context_prediction=self.uncalibrated_prediction, prior=None, uncalibrated_prediction=None)

    @cached_property
    def correct(self) -> NDArray[np.uint8]:
        """1 where the prediction is the right label; uint8 [S, P, K, Q]."""
        correct = _held((*self.context_of.shape, len(self.gold)), np.bool_)
        for cell in np.ndindex(self.context_of.shape[:2]):
            np.equal(self.context_prediction[self.context_of[cell]], self.gold, out=correct[cell])
        return correct.view(np.uint8)

    @cached_property
    def state(self) -> NDArray[np.uint8]:
        """0 ok, 1 invalid, 2 overlong; uint8 [S, P, K, Q]."""
        return self.context_state[self.context_of]

    @cached_property
    def label_logprob(self) -> NDArray[np.float32]:
        """Summed log-likelihood of each label in nats, NaN where there is none; float32 [S, P, K, Q, L].

        As the model gave them, neither normalised nor calibrated. Read when first asked for, and held from then on:
        4·S·P·K·Q·L bytes, a gigabyte for 64 million prompts of four labels. `logprob_by_cell` gives the same cell by
        cell.
        """
        num_queries, num_labels = self.context_logprob.shape[1:]
        tensor = np.empty((*self.context_of.shape, num_queries, num_labels), dtype=np.float32)
        for place, logprob in zip(np.ndindex(self.context_of.shape), self.logprob_by_cell(), strict=True):
            tensor[place] = logprob
        return tensor

    def logprob_by_cell(self, shots: slice = slice(None)) -> Iterator[NDArray[np.float32]]:
        """`label_logprob` [Q, L] of each set, permutation and place on the K axis within ``shots``, in this order.

        Reads every file once for some 128 MB of what it gives, and holds no more of it at once.
        """
        contexts = self.context_of[:, :, shots].ravel()
        step = max(1, _BYTES_AT_ONCE // (4 * max(1, int(np.prod(self.context_logprob.shape[1:])))))
        for begin in range(0, len(contexts), step):
            distinct, places = np.unique(contexts[begin : begin + step], return_inverse=True)
            values = self.context_logprob[distinct]
            yield from (values[place].copy() for place in places)  # or what was given would keep all of it
            del values

    def scores_by_cell(self, shots: slice = slice(None)) -> Iterator[NDArray[np.float32]]:
        """As `logprob_by_cell`, what the labels are compared by: log-likelihoods as the study normalises and calibrates
        them."""
        if self.prior is None:
            return (np.asarray(logprob / self.scale, dtype=np.float32) for logprob in self.logprob_by_cell(shots))
        contexts = self.context_of[:, :, shots].ravel()
        return self._calibrated_by_cell(self.logprob_by_cell(shots), self.prior[contexts])

    def _calibrated_by_cell(
        self, logprobs: Iterator[NDArray[np.float32]], priors: NDArray[np.float64]
    ) -> Iterator[NDArray[np.float32]]:
        from iclperm.stats.calibration import calibrated_scores

        for logprob, prior in zip(logprobs, priors, strict=True):
            yield calibrated_scores(logprob / self.scale, prior).astype(np.float32)


@dataclass(frozen=True)
class Run:
    """A finished run: ``splits`` hold the answers, test first; ``shots`` are the K axis, ``labels`` the L axis.

    ``label_tokens`` are the labels' lengths. What is said of no split in particular is said of test. ``content_free``
    are the answers to the queries that a study was calibrated by: they have no right label and count nowhere.
    """

    study: Study
    task: str
    labels: tuple[str, ...]
    shots: tuple[int, ...]
    splits: dict[str, Items]
    label_tokens: tuple[int, ...]
    report: RunReport
    folder: Path | None
    content_free: Items | None = None

    @property
    def _all_items(self) -> list[Items]:
        return [*self.splits.values(), *([] if self.content_free is None else [self.content_free])]

    @property
    def uncalibrated(self) -> Run:
        """This run as it is without calibration, over the same answers; itself where there is none.

        Only what is said of it differs: its study cannot be run into the folder, and its digest is that of the answers.
        """
        if self.content_free is None:
            return self
        splits = {name: items.uncalibrated for name, items in self.splits.items()}
        return replace(self, study=self.study.model_copy(update={"calibration": "none"}), splits=splits)

    @property
    def correct(self) -> NDArray[np.uint8]:
        """1 where the most likely label is the right one (ties: the lowest label index), uint8 [S, P, K, Q]."""
        return self.splits["test"].correct

    @property
    def state(self) -> NDArray[np.uint8]:
        """0 ok, 1 invalid, 2 overlong; uint8 [S, P, K, Q]."""
        return self.splits["test"].state

    @property
    def label_logprob(self) -> NDArray[np.float32]:
        """Summed log-likelihood of each label in nats, NaN where the state is not ok; float32 [S, P, K, Q, L].

        The one large tensor, read when first asked for: see `Items.label_logprob`.
        """
        return self.splits["test"].label_logprob

    @property
    def gold(self) -> NDArray[np.int64]:
        """The right label of each query, int64 [Q]."""
        return self.splits["test"].gold

    @property
    def weights(self) -> NDArray[np.int64]:
        """How often each query counts, int64 [Q]."""
        return self.splits["test"].weights

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical table: equal for runs with equal results, however they came about.

        Predictions follow from the log-likelihoods and from how they are normalised; they are no part of it.
        """
        return digest_of(self.labels, self.shots, self._all_items)

    def tables(self) -> Iterator[pa.Table]:
        """The canonical table, piece by piece: a row per split, set, permutation, shots and query, in this order.

        ``example`` is the query's row in its split, ``weight`` how often it counts, ``gold`` and ``prediction`` are
        label words, ``logprob_<label>`` summed log-likelihoods in nats; what has no answer is null. The content-free
        queries of a calibrated study come last, as a split whose rows have no right label and no weight.
        """
        for items in self._all_items:
            step, logprobs = max(1, _ROWS_PER_TABLE // len(items.gold)), items.logprob_by_cell()
            for begin in range(0, items.context_of.size, step):
                cells = np.arange(begin, min(begin + step, items.context_of.size))
                yield _cell_table(items, cells, list(islice(logprobs, len(cells))), self.labels, self.shots)

    def to_arrow(self) -> pa.Table:
        """The canonical table (see `tables`) in memory."""
        return pa.concat_tables(self.tables())

    def to_pandas(self) -> Any:
        """The canonical table (see `tables`) as a pandas DataFrame; raises `ConfigError` without pandas."""
        try:
            import pandas  # noqa: F401 - pyarrow needs it, and its own error says less
        except ImportError:
            raise ConfigError("pandas is not installed; run pip install pandas, or use to_arrow()") from None
        return self.to_arrow().to_pandas()

    def export(self, path: str | Path) -> Path:
        """Writes the canonical table (see `tables`) to a .csv, .jsonl or .parquet file; a file there is replaced whole.

        Raises `ConfigError` for another ending and `RunStopped` where the file cannot be written. Streams.
        """
        return write_tables(self.tables(), Path(path))

    def summary(self) -> SensitivitySummary:
        """Order and selection sensitivity and what else is said about the largest number of shots; made once."""
        return self._summary

    @cached_property
    def _summary(self) -> SensitivitySummary:
        from iclperm.studies.sensitivity import sensitivity_summary

        test = self.splits["test"]
        return sensitivity_summary(
            test.correct[:, :, -1],
            test.scores_by_cell(slice(-1, None)),
            test.gold,
            test.state[:, :, -1],
            weights=test.weights,
            tokens=self.report,
            seed=self.study.seed,
        )

    @property
    def warnings(self) -> list[str]:
        """What should be known before the numbers are believed."""
        test = self.splits["test"]
        warnings = uneven_labels(self.label_tokens, self.study.normalize)
        highest = int(test.context_prediction.max(initial=-1))
        if highest >= 0 and all(np.isin(answers, (-1, highest)).all() for answers in test.context_prediction):
            warnings.append(
                f"every answer in every cell is {self.labels[highest]!r}: accuracy is the share of that label, and "
                "nothing else is measured"
            )
        heaviest = int(np.argmax(test.weights))
        if test.weights[heaviest] >= _HEAVY_WEIGHT:
            warnings.append(
                f"a query of the label {self.labels[test.gold[heaviest]]!r} counts {test.weights[heaviest]} times, "
                "because its class is short; lower 'queries' or add examples"
            )
        return warnings

    def curve(self) -> Curve | None:
        """Accuracy over the numbers of shots; None where only one was run."""
        from iclperm.stats import curve

        return curve(self.correct, self.state, self.weights) if len(self.shots) > 1 else None

    def over_shots(self) -> SensitivityOverShots | None:
        """Order and selection sensitivity over the numbers of shots; None where fewer than two have demonstrations."""
        return self._over_shots

    @cached_property
    def _over_shots(self) -> SensitivityOverShots | None:
        from iclperm.studies.sensitivity import sensitivity_over_shots

        if sum(shots > 0 for shots in self.shots) < 2:
            return None
        return sensitivity_over_shots(
            self.correct,
            self.state,
            shots=self.shots,
            weights=self.weights,
            seed=self.study.seed,
            resampled=self.study.resample == "per_k",
        )

    @property
    def title(self) -> str:
        """Task and model, for the head of a figure."""
        return f"{self.task}, {Path(self.study.model).name}"

    @cached_property
    def demonstrations(self) -> Demonstrations:
        """What stood in the contexts, read from the study's data again; raises `DataError` or `ConfigError` where the
        data is not what the run was made with."""
        found = Demonstrations.of(self.study)
        if self.folder is not None:
            table = RunFolder.open(self.folder).table("demonstrations")
            recorded = dict(
                zip(
                    table["examples"].combine_chunks().flatten().to_pylist(),
                    table["content_hashes"].combine_chunks().flatten().to_pylist(),
                    strict=True,
                )
            )
            if any(recorded.get(row) != content for row, content in found.hashes.items()):
                raise DataError(
                    f"the data of {self.study.task!r} is not what {self.folder} was run with; put that back, or name "
                    "its folder with the study's key 'data'"
                )
        return found

    def findings(self, kind: str | None = None) -> Findings:
        """What the study's kind, or another ``kind`` of the same design, makes of the answers; made once.

        Raises `ConfigError` for a kind that there is not, and `DataError` where the run lacks what it needs.
        """
        kind = kind or self.study.kind
        if kind not in self._findings:
            self._findings[kind] = findings_of(self, kind)
        return self._findings[kind]

    @cached_property
    def _findings(self) -> dict[str, Findings]:
        return {}

    def report_content(self, kind: str | None = None) -> dict[str, Any]:
        """What report.json holds, JSON-safe."""
        found = self.findings(kind)
        content = {"kind": kind or self.study.kind, **found.to_dict(), "normalize": self.study.normalize}
        content["calibration"] = self.study.calibration
        if self.calibration is not None:
            content["calibrated"] = self.calibration.to_dict()
        return {**content, "warnings": [*found.warnings, *self.warnings]}

    @cached_property
    def calibration(self) -> ContextualCalibration | None:
        """What calibration changed, k by k; None for a study without."""
        if self.study.calibration == "none":
            return None
        from iclperm.studies.calibration import findings

        return findings(self)

    def write_report(self, folder: str | Path | None = None, kind: str | None = None) -> list[Path]:
        """Writes figures and report.json into ``folder``, by default the run's own; returns their paths."""
        from iclperm.report import write_report

        target = folder or self.folder
        if target is None:
            raise RunError("this run is in memory only; name a folder for its report")
        with writable(Path(target)):
            Path(target).mkdir(parents=True, exist_ok=True)
            return write_report(target, self.findings(kind), self.report_content(kind))


def open_run(
    path: str | Path,
    *,
    normalize: str | None = None,
    criterion: str | None = None,
    extent: Mapping[str, int] | None = None,
) -> Run:
    """A finished run from its folder alone; needs neither model nor data.

    ``normalize`` and ``criterion`` replace the study's; ``extent`` is one that the run had, by default the last that is
    finished.

    A run that is still growing is read as it was before (`RunReport.is_growing`). Raises `RunError` for a folder that
    is no run, is not finished, or is damaged (naming the file). Every file is read; states and predictions are kept, a
    byte or two a distinct prompt, and log-likelihoods stay in the folder until they are asked for.
    """
    started = time.perf_counter()
    whole = RunFolder.open(path)
    folder = whole.at_finished_extent() if extent is None else whole.at_extent(extent)
    if folder is None:
        raise RunError(f"{path} never had the extent {dict(extent or {})}; run the study into it again")
    files = folder.parts()
    if len(files) < folder.num_parts:
        raise RunError(
            f"{path} is not finished ({len(files)} of {folder.num_parts} parts); run the same study into it to continue"
        )
    layout = Layout.of_folder(folder)
    given = {"normalize": normalize, "criterion": criterion}
    changes = folder.extents[-1] | {key: value for key, value in given.items() if value is not None}
    study = Study(**{**whole.study().model_dump(), **changes})
    scores = Scores(layout, layout.scale(folder.plan, study), folder)
    for part, file in files.items():
        scores.fill(part, folder.read(file))
    scores.refuse_gaps()
    counts = {**layout.counts, "num_parts": len(files), "num_parts_resumed": len(files), "num_quarantined": 0}
    is_growing = len(whole.plans) > len(folder.plans)
    return finish(folder.plan, study, scores, counts, folder, started, is_growing=is_growing)


def finish(
    plan: Mapping[str, Any],
    study: Study,
    scores: Scores,
    counts: Mapping[str, int],
    folder: RunFolder | None,
    started: float,
    forwarded: int = 0,
    is_growing: bool = False,
) -> Run:
    """Everything together; without a folder ``forwarded`` tokens are known, with one they are read back."""
    items, is_complete, num_numerics = scores.items(), True, 1
    if folder is not None:
        forwarded, is_complete = forwarded_tokens(folder)
        num_numerics = len(folder.numerics())
    report = RunReport(
        **counts,
        tokens_forwarded=forwarded,
        num_numerics=num_numerics,
        is_token_count_complete=is_complete,
        seconds=time.perf_counter() - started,
        is_growing=is_growing,
    )
    return Run(
        study=study,
        task=plan["task"],
        labels=tuple(plan["labels"]),
        shots=tuple(plan["study"]["shots"]),
        splits={name: found for name, found in items.items() if name != CONTENT_FREE},
        label_tokens=tuple(plan["label_lengths"]["mean"]),
        report=report,
        folder=None if folder is None else folder.path,
        content_free=items.get(CONTENT_FREE),
    )


def forwarded_tokens(folder: RunFolder) -> tuple[int, bool]:
    """The tokens that all sessions are known to have forwarded, and whether none forwarded more."""
    sessions = folder.sessions()
    forwarded = sum(session.get("tokens_forwarded", 0) for session in sessions)
    recorded = sum(session.get("parts", 0) for session in sessions)
    is_complete = all(session.get("closed", False) for session in sessions) and recorded >= len(folder.parts())
    return forwarded, is_complete


def finished(path: Path, setting: Setting) -> Run | None:
    """The run in this folder if it is this setting's and nothing is missing; no tokenizer or model is loaded."""
    try:
        folder = RunFolder.open(path)
        known = {key: folder.plan.get(key) for key in setting.identity}
        if known != setting.identity or folder.extents[-1] != setting.study.extent:
            return None
        run = open_run(path, normalize=setting.study.normalize)
        if run.report.is_growing:
            return None
        folder.record_statistics(setting.study)
        return replace(run, study=setting.study)
    except (IclpermError, OSError):
        return None


def tables(work: Work, number: int) -> dict[str, pa.Table]:
    """What third parties need to read the items of a stage: the demonstrations of each context, and the queries."""
    setting, prompts, extent = work.setting, work.prompts, work.stages[number].extent
    train, words = setting.examples["train"], setting.task.words
    cells = list(np.ndindex(extent["sets"], extent["permutations"]))
    rows, place = [], 0
    for group in setting.design.orderings:
        within = slice(place, place := place + len(group.shots))
        for cell in cells:
            examples = group.rows[cell]
            contexts = prompts.context_ids[prompts.context_of[cell][within]]
            hashes = [train.hashes[row] for row in examples]
            rows.append((*cell, examples.tolist(), hashes, list(group.shots), contexts.tolist()))
    schema = {
        "set": pa.int32(),
        "permutation": pa.int32(),
        "examples": _list_of(pa.int32()),
        "content_hashes": _list_of(pa.string()),
        "shots": _list_of(pa.int32()),
        "contexts": _list_of(pa.int64()),
    }
    demonstrations = {
        name: pa.array(column, kind)
        for (name, kind), column in zip(schema.items(), zip(*rows, strict=True), strict=True)
    }
    return {
        "demonstrations": pa.table(demonstrations),
        "queries": pa.concat_tables(_query_table(work, asked, extent, words) for asked in setting.design.asked),
    }


def _list_of(kind: pa.DataType) -> pa.DataType:
    """As Parquet names the elements of a list: a table read back is then written as the same bytes."""
    return pa.list_(pa.field("element", kind))


def _query_table(work: Work, asked: Asked, extent: Mapping[str, int], words: Sequence[str]) -> pa.Table:
    count = {"test": extent["queries"], "dev": extent["dev_queries"]}.get(asked.split, len(asked.turns))
    turns = asked.turns[:count]
    number, begin = asked.num_distinct(count), work.begins[asked.split]
    examples, rows = work.setting.examples[asked.split], asked.rows[:number]
    gold, is_free = work.prompts.gold[begin : begin + number], asked.split == CONTENT_FREE
    columns = {
        "split": pa.array([asked.split] * number, pa.string()),
        "query": pa.array(range(number), pa.int32()),
        "example": pa.array(rows, pa.int32()),
        "content_hash": pa.array([examples.hashes[row] for row in rows], pa.string()),
        "gold": _gold(gold),
        "label": pa.array([None if is_free else words[label] for label in gold], pa.string()),
        "weight": pa.array(np.bincount(turns, minlength=number) * (not is_free), pa.int32()),
        "state": pa.array([STATES[state] for state in work.query_states[begin : begin + number]], pa.string()),
    }
    return pa.table(columns)


def item_rows(
    work: Work,
    part: Part,
    contexts: NDArray[np.int64],
    queries: NDArray[np.int64],
    logprob: NDArray[np.float32],
    state: NDArray[np.uint8],
) -> pa.Table:
    """Items as a table, one row for each context [N], query [N], label log-likelihoods [N, L] and state [N]."""
    index_set, permutation, place = work.stages[part.stage].first_cells[contexts].T
    is_missing = state != OK
    num_labels = logprob.shape[1]
    predictions = np.where(is_missing, 0, np.argmax(logprob, axis=1))
    lists = pa.ListArray.from_arrays(
        pa.array(np.arange(len(contexts) + 1) * num_labels, pa.int32()),
        pa.array(logprob.ravel(), pa.float32()),
        mask=pa.array(is_missing),
    )
    splits, begins = list(work.begins), np.array(list(work.begins.values()))
    split = np.searchsorted(begins, queries, side="right") - 1
    return pa.table(
        {
            "context": pa.array(work.prompts.context_ids[contexts], pa.int64()),
            "set": pa.array(index_set, pa.int32()),
            "permutation": pa.array(permutation, pa.int32()),
            "shots": pa.array(np.array(work.setting.design.shots)[place], pa.int32()),
            "split": pa.DictionaryArray.from_arrays(pa.array(split, pa.int32()), splits),
            "query": pa.array(queries - begins[split], pa.int32()),
            "gold": _gold(work.prompts.gold[queries]),
            "prediction": pa.array(predictions, pa.int16(), mask=is_missing),
            "label_logprob": lists,
            "state": pa.DictionaryArray.from_arrays(pa.array(state, pa.int32()), list(STATES)),
        }
    )


def _gold(labels: NDArray[np.int64]) -> pa.Array:
    """Right labels; null where there is none."""
    return pa.array(labels, pa.int16(), mask=labels < 0)


@dataclass(frozen=True)
class Layout:
    """Which contexts and queries a run has, read back from its folder or known from its work.

    ``context_ids`` int64 [C] are those on disk; ``context_of`` int64 [S, P, K] index them. ``queries`` is the table of
    all queries, split by split; ``counts`` are fields of `RunReport`.
    """

    context_ids: NDArray[np.int64]
    context_of: NDArray[np.int64]
    queries: pa.Table
    counts: dict[str, int]
    num_odd_labels: int

    @classmethod
    def of_folder(cls, folder: RunFolder) -> Layout:
        return cls.of_tables(folder.table("demonstrations"), folder.table("queries"), folder.plans)

    @classmethod
    def of_tables(cls, cells: pa.Table, queries: pa.Table, plans: Sequence[Mapping[str, Any]]) -> Layout:
        extent, last = plans[-1]["extents"][-1], plans[-1]
        shape = (extent["sets"], extent["permutations"])
        groups: dict[tuple[int, ...], list[list[int]]] = {}
        for shots, contexts in zip(cells["shots"].to_pylist(), cells["contexts"].to_pylist(), strict=True):
            groups.setdefault(tuple(shots), []).append(contexts)
        names = [np.array(contexts, dtype=np.int64).reshape(*shape, -1) for contexts in groups.values()]
        context_ids, context_of = np.unique(np.concatenate(names, axis=2), return_inverse=True)
        counts = {
            **last["counts"],
            "tokens_naive": last["tokens"]["naive"],
            "tokens_unique": last["tokens"]["unique"],
            "num_general_cells": sum(plan["work"]["general_cells"] for plan in plans),
            "num_oversampled": int(np.sum(np.maximum(queries["weight"].to_numpy() - 1, 0))),
        }
        return cls(
            context_ids,
            context_of.reshape(*shape, -1),
            queries,
            counts,
            sum(plan["work"]["odd_labels"] for plan in plans),
        )

    @property
    def splits(self) -> list[str]:
        """The splits, test first."""
        return list(dict.fromkeys(self.queries["split"].to_pylist()))

    @property
    def begins(self) -> dict[str, int]:
        """Where each split begins among all queries."""
        names = self.queries["split"].to_pylist()
        return {split: names.index(split) for split in self.splits}

    def scale(self, plan: Mapping[str, Any], study: Study) -> NDArray[np.float64]:
        """What log-likelihoods are divided by before labels are compared, float64 [L]; raises `ConfigError` where it
        is not the same for all queries."""
        if study.normalize == "mean" and self.num_odd_labels:
            raise ConfigError(
                f"normalize is 'mean', but in {self.num_odd_labels} cells the labels have other numbers of tokens; "
                "give 'sum' or 'bytes'"
            )
        return np.array(plan["label_lengths"][study.normalize], dtype=np.float64)


@dataclass(frozen=True)
class _Rows:
    """The rows of a part: context [N], query [N] and state [N]; log-likelihoods [M, L] of those that are ok."""

    contexts: NDArray[np.int64]
    queries: NDArray[np.int64]
    state: NDArray[np.uint8]
    logprob: NDArray[np.float32]


class Scores:
    """Results by distinct context, filled from tables of items.

    ``state`` uint8 [C, Q] and ``prediction`` [C, Q] are held, in memory or, above `_MOST_HELD` bytes, in a temporary
    file. Log-likelihoods, many times as large, stay in the parts' files and are read again when asked for; without a
    ``folder`` the tables are kept. ``scale`` float64 [L] is what they are divided by before labels are compared. Those
    of content-free queries are held: they are few, and what all others are calibrated by.
    """

    def __init__(self, layout: Layout, scale: NDArray[np.float64], folder: RunFolder | None = None) -> None:
        states = np.array([STATES.index(state) for state in layout.queries["state"].to_pylist()], dtype=np.uint8)
        shape = (len(layout.context_ids), len(states))
        pending = np.where(states == OK, _PENDING, states).astype(np.uint8)
        self.scale = scale
        self.state: NDArray[np.uint8] = _held(shape, np.uint8)
        self.state[:] = pending
        self.prediction: NDArray[np.signedinteger[Any]] = _held(shape, np.min_scalar_type(-len(scale)))
        self.prediction[:] = -1
        self._layout = layout
        self._ids = layout.context_ids  # ascending
        self._begins = layout.begins
        begin = self._begins.get(CONTENT_FREE)
        self._num_asked = len(states) if begin is None else begin
        free_shape = (shape[0], len(states) - self._num_asked, len(scale))
        self._content_free = np.full(free_shape, np.nan, dtype=np.float32)
        self._contexts: dict[int, NDArray[np.int64]] = {}
        self._tables: dict[int, pa.Table] = {}
        self._folder = folder

    @property
    def parts(self) -> Set[int]:
        """The parts that were filled in."""
        return self._contexts.keys()

    def fill(self, part: int, table: pa.Table) -> None:
        """Takes the rows of a part; raises `RunError` where they are none of the plan's."""
        rows = self._rows(part, table)
        is_ok = rows.state == OK
        self.state[rows.contexts, rows.queries] = rows.state
        self.prediction[rows.contexts[is_ok], rows.queries[is_ok]] = predictions(rows.logprob, self.scale)
        if self._is_calibrated:
            contexts, places = rows.contexts[is_ok], rows.queries[is_ok] - self._num_asked
            is_free = places >= 0
            self._content_free[contexts[is_free], places[is_free]] = rows.logprob[is_free]
        self._contexts[part] = np.unique(rows.contexts)
        if self._folder is None:
            self._tables[part] = table.select(_READ_BACK)

    def logprob(self, contexts: NDArray[np.int64], queries: slice) -> NDArray[np.float32]:
        """Log-likelihoods of distinct contexts, float32 [N, Q, L] (nats), NaN where there are none.

        Reads the parts that hold one of them; raises `RunError` where that has become impossible.
        """
        begin, end, _ = queries.indices(self.state.shape[1])
        places = np.full(len(self.state), -1, dtype=np.int64)
        places[contexts] = np.arange(len(contexts))
        values = np.full((len(contexts), end - begin, len(self.scale)), np.nan, dtype=np.float32)
        for part in [part for part, inside in self._contexts.items() if (places[inside] >= 0).any()]:
            rows = self._read_again(part)
            is_ok = rows.state == OK
            place, query = places[rows.contexts[is_ok]], rows.queries[is_ok] - begin
            wanted = (place >= 0) & (query >= 0) & (query < end - begin)
            values[place[wanted], query[wanted]] = rows.logprob[wanted]
        return values

    @property
    def _is_calibrated(self) -> bool:
        return self._content_free.shape[1] > 0

    def _read_again(self, part: int) -> _Rows:
        table = self._tables[part] if self._folder is None else self._folder.part(part, _READ_BACK)
        return self._rows(part, table)

    def _rows(self, part: int, table: pa.Table) -> _Rows:
        ids = table["context"].to_numpy()
        contexts = np.searchsorted(self._ids, ids)
        queries = table["query"].to_numpy() + _decoded(table["split"], self._begins)
        is_known = np.array_equal(self._ids.take(contexts, mode="clip"), ids)
        if not is_known or queries.max(initial=-1) >= self.state.shape[1]:
            raise RunError(f"part {part} holds answers that the plan does not have; run the study into another folder")
        state = _decoded(table["state"], {name: code for code, name in enumerate(STATES)}).astype(np.uint8)
        values = table["label_logprob"].combine_chunks().flatten().to_numpy()
        return _Rows(contexts, queries, state, values.reshape(-1, len(self.scale)))

    def items(self, *, predicted: bool = True) -> dict[str, Items]:
        """The results by split, once all parts are there.

        Predictions of a calibrated study take reading all parts once more; without ``predicted`` it has none.
        """
        queries = self._layout.queries
        columns = {name: _integers(queries[name]) for name in ("example", "weight", "gold")}
        prior = self._prior() if self._is_calibrated else None
        prediction = self.prediction if prior is None else self._calibrated_predictions(prior, predicted)
        ends = [*self._begins.values(), len(queries)][1:]
        found = {}
        for (name, begin), end in zip(self._begins.items(), ends, strict=True):
            here = slice(begin, end)  # a view: the results of a large run are held once
            is_plain = prior is None or name == CONTENT_FREE
            found[name] = Items(
                split=name,
                examples=columns["example"][here],
                weights=columns["weight"][here],
                gold=columns["gold"][here],
                context_of=self._layout.context_of,
                context_state=self.state[:, here],
                context_prediction=(self.prediction if is_plain else prediction)[:, here],
                context_logprob=_Stored(self, here),
                scale=self.scale,
                prior=None if is_plain else prior,
                uncalibrated_prediction=None if is_plain else self.prediction[:, here],
            )
        return found

    def _prior(self) -> NDArray[np.float64]:
        """What each context makes of the labels by itself, [C, L] in nats; takes the answers of those of which that is
        not known."""
        from iclperm.stats.calibration import content_free_prior

        worst = self.state[:, self._num_asked :].max(axis=1)
        for context in np.flatnonzero(worst != OK):
            answers = self.state[context, : self._num_asked]
            np.maximum(answers, worst[context], out=answers)
            self.prediction[context, : self._num_asked] = -1
        return content_free_prior(self._content_free, self.scale)

    def _calibrated_predictions(self, prior: NDArray[np.float64], predicted: bool) -> NDArray[np.signedinteger[Any]]:
        prediction = _held(self.prediction.shape, self.prediction.dtype)
        prediction[:] = -1
        is_known = np.asarray(~np.isnan(prior).any(axis=1))
        for part in self._contexts if predicted else ():
            rows = self._read_again(part)
            contexts, queries = (numbers[rows.state == OK] for numbers in (rows.contexts, rows.queries))
            chosen = np.argmax(rows.logprob / self.scale - prior[contexts], axis=-1)
            prediction[contexts, queries] = np.where(is_known[contexts], chosen, -1)
        return prediction

    def refuse_gaps(self) -> None:
        """Raises `RunError` where all parts together leave answers out."""
        if missing := int(np.count_nonzero(self.state == _PENDING)):
            raise RunError(f"{missing} answers are in none of the run's files; run the study into another folder")


@dataclass(frozen=True)
class _Stored:
    """The log-likelihoods of some queries, read when contexts are asked for."""

    scores: Scores
    queries: slice

    @property
    def shape(self) -> tuple[int, ...]:
        num_contexts, num_queries = self.scores.state[:, self.queries].shape
        return num_contexts, num_queries, len(self.scores.scale)

    def __getitem__(self, contexts: NDArray[np.int64], /) -> NDArray[np.float32]:
        return self.scores.logprob(contexts, self.queries)


def _held(shape: tuple[int, ...], dtype: npt.DTypeLike) -> NDArray[Any]:
    """An array in memory; one of more than `_MOST_HELD` bytes in a temporary file that the system reads in and out.

    What is made of it is the same. The file is gone when the array is.
    """
    if int(np.prod(shape)) * np.dtype(dtype).itemsize <= _MOST_HELD:
        return np.empty(shape, dtype)
    with tempfile.TemporaryFile(prefix="iclperm-") as file:
        return np.memmap(file, dtype=dtype, mode="w+", shape=shape)


def predictions(logprob: NDArray[np.float32], scale: NDArray[np.float64]) -> NDArray[np.int64]:
    """The most likely of the labels [..., L], compared as ``scale`` [L] says; ties go to the lowest index."""
    return np.asarray(np.argmax(logprob if (scale == 1).all() else logprob / scale, axis=-1))


def digest_of(labels: Sequence[str], shots: Sequence[int], splits: Iterable[Items]) -> str:
    """SHA-256 of the canonical table: see `Run.digest`. Reads as `Items.logprob_by_cell` does."""
    digest = hashlib.sha256(json.dumps([labels, shots]).encode())
    for items in splits:
        digest.update(f"{items.split} {items.context_of.shape} {len(items.gold)}".encode())
        digest.update(items.gold.astype("<i2").tobytes() + items.weights.astype("<i4").tobytes())
        logprobs = items.logprob_by_cell()
        for contexts in items.context_of.reshape(-1, len(shots)):
            digest.update(items.context_state[contexts].tobytes())
            for logprob in islice(logprobs, len(shots)):
                # NaN has many bit patterns; any of them means that there is no answer.
                digest.update(np.where(np.isnan(logprob), np.float32(np.nan), logprob).astype("<f4").tobytes())
    return digest.hexdigest()


def write_tables(tables: Iterable[pa.Table], path: Path) -> Path:
    """Writes tables one after the other into a .csv, .jsonl or .parquet file, whole or not at all."""
    if path.suffix not in _WRITERS:
        raise ConfigError(f"{path} has no known ending; give one of {', '.join(_WRITERS)}")
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with writable(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _WRITERS[path.suffix](iter(tables), unfinished)
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
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


def _cell_table(
    items: Items,
    cells: NDArray[np.int64],
    logprobs: Sequence[NDArray[np.float32]],
    labels: Sequence[str],
    shots: Sequence[int],
) -> pa.Table:
    """Rows of the canonical table: cells [N] of the flattened [S, P, K], with the log-likelihoods [Q, L] of each."""
    num_queries = len(items.gold)
    contexts = items.context_of.ravel()[cells]
    axes = np.unravel_index(cells, items.context_of.shape)
    index_set, permutation, place = (axis.repeat(num_queries) for axis in axes)
    logprob = np.concatenate(logprobs)
    state, prediction = items.context_state[contexts].ravel(), items.context_prediction[contexts].ravel()

    def by_query(values: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.tile(values, len(cells))

    query, gold = by_query(np.arange(num_queries)), by_query(items.gold)
    is_missing = state != OK
    words = pa.array(labels, pa.string())
    columns = {
        "split": pa.array([items.split], pa.string()).take(pa.array(np.zeros(len(query), np.int8))),
        "set": pa.array(index_set, pa.int32()),
        "permutation": pa.array(permutation, pa.int32()),
        "shots": pa.array(np.array(shots)[place], pa.int32()),
        "query": pa.array(query, pa.int32()),
        "example": pa.array(by_query(items.examples), pa.int32()),
        "weight": pa.array(by_query(items.weights), pa.int32()),
        "gold": words.take(pa.array(gold, mask=gold < 0)),
        "prediction": words.take(pa.array(prediction, mask=is_missing)),
        "correct": pa.array(prediction == gold, mask=is_missing | (gold < 0)),
        "state": pa.array(STATES, pa.string()).take(pa.array(state)),
    }
    columns |= {
        f"logprob_{label}": pa.array(logprob[:, number], pa.float32(), mask=np.isnan(logprob[:, number]))
        for number, label in enumerate(labels)
    }
    return pa.table(columns)


def _integers(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """A column's numbers, -1 where there is none."""
    return np.asarray(column.fill_null(-1).to_numpy().astype(np.int64))


def _decoded(column: pa.ChunkedArray, codes: Mapping[str, int]) -> NDArray[np.int64]:
    """Names as numbers, int64 [N]; a dictionary's names are looked up once."""
    decoded = [
        np.array([codes[name] for name in chunk.dictionary.to_pylist()], dtype=np.int64)[chunk.indices.to_numpy()]
        for chunk in column.chunks
    ]
    return np.concatenate([*decoded, np.empty(0, np.int64)])
