"""What came out of a study: a finished run, its report, and how it is opened."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray

from iclperm.designs import CONTENT_FREE
from iclperm.errors import ConfigError, DataError, IclpermError, RunError
from iclperm.items import Items, cell_table, digest_of, write_tables
from iclperm.scores import Layout, Scores, reading_of
from iclperm.store import RunFolder, writable
from iclperm.studies import findings_of
from iclperm.study import Study
from iclperm.work import Demonstrations, Setting, uneven_labels

if TYPE_CHECKING:
    from iclperm.stats import Curve
    from iclperm.studies.calibration import ContextualCalibration
    from iclperm.studies.findings import Findings
    from iclperm.studies.generation import Generation
    from iclperm.studies.sensitivity import SensitivityOverShots, SensitivitySummary

_HEAVY_WEIGHT = 5  # from here on single queries decide about a class
_PAID = ("num_requests", "num_prompt_tokens", "num_cached_tokens", "num_reply_tokens")
REPLIES = ("num_listed", "num_bounds", "num_drawn", "num_damaged_replies", *_PAID)
"""What a session tells of an API's replies."""
_ROWS_PER_TABLE = 1 << 18  # of the canonical table, some 50 MB; one context's rows at least


@dataclass(frozen=True)
class RunReport:
    """What a run cost and met; ``tokens_forwarded`` sums all sessions, ``seconds`` is this call's.

    Where a session was killed or its record is damaged, ``is_token_count_complete`` is False: at least
    ``tokens_forwarded`` were forwarded. Of the ``num_duplicates`` rows of the data that repeat another,
    ``num_conflicting`` have another label than the one that was kept. ``num_oversampled`` queries asked for repeat
    another, as their class is short. More than one of ``num_numerics`` means that parts come from machines or versions
    whose last bits may differ. ``is_growing`` tells that the run was extended and that is not finished: these are the
    results before. Of an API: ``num_listed`` log-likelihoods of labels' first tokens, ``num_bounds`` of them upper
    bounds; ``num_drawn`` texts that were not asked for at temperature 0; ``num_damaged_replies`` that were paid for and
    could not be read back; ``num_requests`` paid for with their tokens, of which ``num_cached_tokens`` are prompt
    tokens that the provider's cache held.
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
    num_listed: int
    num_bounds: int
    num_drawn: int
    num_damaged_replies: int
    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_reply_tokens: int


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
        """0 ok, or what is missing: see `iclperm.store.STATES`; uint8 [S, P, K, Q]."""
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
                yield cell_table(items, cells, list(islice(logprobs, len(cells))), self.labels, self.shots)

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
            test.scores_by_cell(slice(-1, None)) if test.has_scores else None,
            test.gold if test.has_scores else None,
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
        warnings += [warning for about in self.asides.values() for warning in about.warnings]
        warnings += _about_replies(self.report, self.study)
        highest = int(test.context_prediction.max(initial=-1))
        is_label = 0 <= highest < len(self.labels)
        if is_label and all(np.isin(answers, (-1, highest)).all() for answers in test.context_prediction):
            warnings.append(
                f"every answer in every cell is {self.labels[highest]!r}: accuracy is the share of that label, and "
                "nothing else is measured"
            )
        heaviest = int(np.argmax(test.weights))
        if self.labels and test.weights[heaviest] >= _HEAVY_WEIGHT:
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
    def chance(self) -> float | None:
        """Accuracy of guessing a label; None where any answer may be given."""
        return 1 / len(self.labels) if self.labels else None

    @property
    def title(self) -> str:
        """Task and model, for the head of a figure."""
        return f"{self.task}, {Path(self.study.model_name).name}"

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
        content |= {key: about.to_dict() for key, about in self.asides.items()}
        return {**content, "warnings": [*found.warnings, *self.warnings]}

    @cached_property
    def calibration(self) -> ContextualCalibration | None:
        """What calibration changed, k by k; None for a study without."""
        if self.study.calibration == "none":
            return None
        from iclperm.studies.calibration import findings

        return findings(self)

    @cached_property
    def generation(self) -> Generation | None:
        """How generated answers were come by, k by k; None for a study that generates none."""
        if self.splits["test"].generated is None:
            return None
        from iclperm.studies.generation import findings

        return findings(self)

    @property
    def asides(self) -> dict[str, Findings]:
        """What is reported beside any kind, by its key in report.json."""
        found = {"calibrated": self.calibration, "generation": self.generation}
        return {key: about for key, about in found.items() if about is not None}

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
    unparsed: str | None = None,
    extent: Mapping[str, int] | None = None,
) -> Run:
    """A finished run from its folder alone; needs neither model nor data.

    ``normalize``, ``criterion`` and ``unparsed`` replace the study's; ``extent`` is one that the run had, by default
    the last that is finished.

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
    given = {"normalize": normalize, "criterion": criterion, "unparsed": unparsed}
    changes = folder.extents[-1] | {key: value for key, value in given.items() if value is not None}
    study = Study(**{**whole.study().model_dump(), **changes})
    if folder.plan["study"]["scoring"] == "generate" and study.normalize != "sum":
        raise ConfigError(f"normalize is {study.normalize!r}, but generated answers have no label scores; leave it out")
    scores = Scores(layout, layout.scale(folder.plan, study), folder, **reading_of(folder.plan, study))
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
    replies: Mapping[str, int] | None = None,
    is_growing: bool = False,
) -> Run:
    """Everything together; without a folder ``forwarded`` tokens and counts of an API's ``replies`` are known, with one
    they are read back."""
    items, is_complete, num_numerics = scores.items(), True, 1
    if folder is not None:
        forwarded, is_complete = forwarded_tokens(folder)
        num_numerics = len(folder.numerics())
        replies = _replies(folder)
    replies = {name: (replies or {}).get(name, 0) for name in REPLIES}
    if replies["num_listed"]:
        refuse_normalized_lists(study)
    if replies["num_bounds"]:
        items = {name: replace(found, has_bounds=True) for name, found in items.items()}
    report = RunReport(
        **counts,
        tokens_forwarded=forwarded,
        num_numerics=num_numerics,
        is_token_count_complete=is_complete,
        seconds=time.perf_counter() - started,
        is_growing=is_growing,
        **replies,
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


def _replies(folder: RunFolder) -> dict[str, int]:
    """What all sessions tell of an API's replies; each of them meets the same damaged ones."""
    told = [session.get("replies", {}) for session in folder.sessions()]
    counts = {name: [int(each.get(name, 0)) for each in told] for name in REPLIES}
    return {name: max(each, default=0) if name == "num_damaged_replies" else sum(each) for name, each in counts.items()}


def refuse_normalized_lists(study: Study) -> None:
    """Raises `ConfigError` where first tokens would be divided by the lengths of whole labels."""
    if study.normalize != "sum":
        raise ConfigError(
            f"normalize is {study.normalize!r}, but the API lists first tokens only, which are compared as they are; "
            "set it to sum"
        )


def _about_replies(report: RunReport, study: Study) -> Iterator[str]:
    """What an API's replies leave in doubt."""
    if report.num_listed and study.scoring != "first_token":
        yield "labels are compared by their first tokens alone: the API gives no log-likelihoods of whole labels"
    if report.num_bounds:
        yield (
            f"{report.num_bounds / report.num_listed:.1%} of the log-likelihoods of labels are upper bounds, because "
            "the API lists only the likeliest tokens: the answers hold, but what needs every log-likelihood "
            "(calibration error, near-ties, some criteria of a search) is left out"
        )
    if report.num_drawn and study.endpoint is not None and study.endpoint.draws == 1:
        yield (
            f"{report.num_drawn:,} answers are draws, because the model takes no temperature or was not asked at 0: "
            "asked again it may answer otherwise, and that is part of every spread here; set the endpoint's draws to 3"
        )
    if report.num_damaged_replies:
        yield (
            f"{report.num_damaged_replies} kept replies of the API are damaged: what was needed of them was paid for "
            "again; iclperm verify names them"
        )


def finished(path: Path, setting: Setting) -> Run | None:
    """The run in this folder if it is this setting's and nothing is missing; no tokenizer or model is loaded."""
    try:
        folder = RunFolder.open(path)
        known = {key: folder.plan.get(key) for key in setting.identity}
        if known != setting.identity or folder.extents[-1] != setting.study.extent:
            return None
        run = open_run(path, normalize=setting.study.normalize, unparsed=setting.study.unparsed)
        if run.report.is_growing:
            return None
        folder.record_statistics(setting.study)
        return replace(run, study=setting.study)
    except (IclpermError, OSError):
        return None
