"""A finished run as data: its answers, its canonical table, and what it cost and met."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iclperm.base.remote import Remote, is_url
from iclperm.errors import ConfigError, DataError
from iclperm.runs.answers import Items, cell_table, digest_of, write_tables
from iclperm.runs.demonstrations import Demonstrations
from iclperm.runs.folder import RunFolder
from iclperm.runs.labelled import dataset_of
from iclperm.runs.limits import DEFAULT, WorkLimits
from iclperm.study.endpoint import Spent
from iclperm.study.metrics import Metric
from iclperm.study.study import Study

if TYPE_CHECKING:
    import polars
    import xarray

_PAID = (
    "num_requests",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_reply_tokens",
    "num_lost_requests",
    "num_lost_tokens",
)
_READ_LATER = ("splits", "report", "content_free", "numerics", "decisions", "looks")
REPLIES = ("num_listed", "num_bounds", "num_drawn", "num_damaged_replies", *_PAID)
"""The counts of an API's replies that a session's record holds; fields of `RunReport`."""


@dataclass(frozen=True)
class RunReport:
    """What a run cost and met. ``tokens_forwarded`` and counts of requests are those of all sessions, ``seconds`` are
    those of this call.

    Where a session was killed, or its record is damaged, ``is_token_count_complete`` is False: ``tokens_forwarded`` are
    then the fewest that there can have been. Of the data, ``num_duplicates`` rows repeat another and were left out,
    ``num_conflicting`` of them under another label; ``num_excluded`` queries repeat a demonstration, or in dev a test
    row. ``num_near`` queries nearly repeat a demonstration, ``num_near_dev`` of test a query of dev (four words in
    five are the same; 0 where it is not known). ``num_oversampled`` queries repeat another, as their class is
    short. ``num_general_cells`` are outside the products. ``num_parts_resumed`` parts were found finished,
    ``num_quarantined`` damaged files were set aside. More than one of ``num_numerics`` means that parts come from
    machines or versions whose last bits may differ. ``is_growing`` means that the run was extended and that is not
    finished: these are the results before.

    Of an API: ``num_listed`` log-likelihoods are of labels' first tokens alone, ``num_bounds`` of them upper bounds;
    ``num_drawn`` texts were not asked for at temperature 0; ``num_damaged_replies`` were paid for and could not be read
    back; ``num_requests`` were paid for, with their tokens, of which ``num_cached_tokens`` prompt tokens were in the
    provider's cache. ``num_lost_requests`` of them, with ``num_lost_tokens`` at most, brought no reply: they were on
    their way when a process was killed, or what came was none.
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
    num_lost_requests: int = 0
    num_lost_tokens: int = 0
    num_near: int = 0
    num_near_dev: int = 0


def near_notes(num_near: int, num_near_dev: int) -> list[str]:
    """Which accuracies repeated texts may flatter; the numbers are those of `RunReport`."""
    notes = []
    for number, whose, what, why in (
        (num_near, "queries", "a demonstration", "their answers may be copied from it"),
        (num_near_dev, "test queries", "one of dev", "what was chosen there is flattered"),
    ):
        if number:
            notes.append(
                f"{whose} that nearly repeat {what} (four words in five are the same): {number:,}; {why}, so keep one "
                "of each in the data"
            )
    return notes


def as_counts(spent: Spent, lost: Spent) -> dict[str, int]:
    """What an API was paid for, and what of it was lost, as fields of `RunReport`."""
    of_spent = (spent.requests, spent.prompt_tokens, spent.cached_tokens, spent.completion_tokens)
    return dict(zip(_PAID, (*of_spent, lost.requests, lost.tokens), strict=True))


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """A finished run: ``splits`` hold the answers, test first; ``shots`` are the K axis, ``labels`` the L axis.

    ``label_tokens`` are the labels' numbers of tokens. Properties that name no split are those of test.
    ``content_free`` are the answers to the queries that a study was calibrated by: they have no right label and count
    nowhere. ``limits`` are how much is read at once. ``numerics`` are what decided about the last bits of the parts in
    the folder, each different one once. Of a run that was opened without its answers (`later`), splits, report,
    content-free answers and numerics are read at the first use of one of them.
    """

    study: Study
    task: str
    labels: tuple[str, ...]
    """Words; where each query has choices of its own, the names of their positions."""
    shots: tuple[int, ...]
    splits: dict[str, Items]
    label_tokens: tuple[int, ...]
    report: RunReport
    folder: Path | None
    content_free: Items | None = field(default_factory=lambda: None)  # a plain default would be found on the class
    limits: WorkLimits = DEFAULT
    numerics: tuple[Mapping[str, Any], ...] = field(default_factory=tuple)
    decisions: tuple[Mapping[str, Any], ...] = field(default_factory=tuple)
    """Of an adaptive search what each wave asked and why (`iclperm.runs.waves.Decision`); else none."""
    looks: tuple[Mapping[str, Any], ...] = field(default_factory=tuple)
    """Likewise of a run that grew until something was known."""
    has_row_choices: bool = False
    """Whether each query has choices of its own."""
    metric: Metric | None = None
    """What answers are graded by in 0..1; None where they are right or wrong."""

    @classmethod
    def later(cls, read: Callable[[], FinishedRun], **known: Any) -> Self:
        """A run of which all fields are ``known`` but those that ``read`` finds in its files, at their first use."""
        return cls._with({**known, "_read": read})

    @classmethod
    def of(cls, run: FinishedRun) -> Self:
        """The same run, read or not."""
        return cls._with(vars(run))

    @classmethod
    def _with(cls, values: Mapping[str, Any]) -> Self:
        run = object.__new__(cls)
        vars(run).update(values)
        return run

    if not TYPE_CHECKING:  # or every misspelt name would be an attribute of any kind

        def __getattr__(self, name: str) -> Any:
            if name not in _READ_LATER or "_read" not in vars(self):
                raise AttributeError(f"{type(self).__name__} has no {name!r}")
            found = vars(self)["_read"]()
            vars(self).update({each: getattr(found, each) for each in _READ_LATER})
            del vars(self)["_read"]
            return getattr(self, name)

    @property
    def _all_items(self) -> list[Items]:
        return [*self.splits.values(), *([] if self.content_free is None else [self.content_free])]

    @property
    def uncalibrated(self) -> Self:
        """This run without its calibration, over the same answers; itself where there is none.

        Only statistics differ: its digest is the same, and its study is not the one that was run into the folder.
        """
        if self.content_free is None:
            return self
        splits = {name: items.uncalibrated for name, items in self.splits.items()}
        return replace(self, study=self.study.model_copy(update={"calibration": "none"}), splits=splits)

    @property
    def correct(self) -> NDArray[np.uint8] | NDArray[np.float32]:
        """1 where the most likely label (of equal ones the lowest) is the right one, or a generated answer is right,
        uint8 [S, P, K, Q]; grades in 0..1 where there is a ``metric``, float32."""
        return self.splits["test"].correct

    @property
    def state(self) -> NDArray[np.uint8]:
        """0 where there is an answer, else why there is none (`iclperm.study.states.STATES`); uint8 [S, P, K, Q]."""
        return self.splits["test"].state

    @property
    def label_logprob(self) -> NDArray[np.float32]:
        """Summed log-likelihood of each label in nats, NaN where the state is not ok; float32 [S, P, K, Q, L].

        The one large tensor, read at the first use: see `Items.label_logprob`.
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

        Predictions follow from log-likelihoods and from how these are normalised, so they are not in it.
        """
        return digest_of(self.labels, self.shots, self._all_items)

    @property
    def quick_digest(self) -> str | None:
        """The digest where it takes seconds: of more than ``limits.cells_at_opening`` answers every file would be read
        again and again, and it is None."""
        num_answers = sum(items.context_of.size * len(items.gold) for items in self._all_items)
        return self.digest if num_answers <= self.limits.cells_at_opening else None

    def tables(self) -> Iterator[pa.Table]:
        """The canonical table, piece by piece: a row per split, set, permutation, shots and query, in this order.

        ``example`` is the query's row in its split, ``weight`` how often it counts, ``gold`` and ``prediction`` are
        label words, ``logprob_<label>`` summed log-likelihoods in nats; what has no answer is null. The content-free
        queries of a calibrated study come last, as a split whose rows have no right label and no weight.
        """
        for items in self._all_items:
            step, logprobs = max(1, self.limits.table_rows // len(items.gold)), items.logprob_by_cell()
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
            raise ConfigError("pandas is not installed; run pip install 'iclperm[pandas]', or use to_arrow()") from None
        return self.to_arrow().to_pandas()

    def to_polars(self) -> polars.DataFrame:
        """The canonical table (see `tables`) as a polars DataFrame; raises `ConfigError` without polars."""
        try:
            import polars
        except ImportError:
            raise ConfigError("polars is not installed; run pip install 'iclperm[polars]', or use to_arrow()") from None
        return cast("polars.DataFrame", polars.from_arrow(self.to_arrow()))

    def to_xarray(self, split: str = "test", *, scores: bool = False) -> xarray.Dataset:
        """The answers of a ``split`` by the axes set, permutation, shots and query, as an xarray Dataset.

        ``correct`` is 1 or 0, and ``prediction`` the number of a label on the coordinate ``label``; both are NaN where
        there is no answer, and ``state`` says why (its attribute ``flag_meanings`` names the codes). Coordinates are
        the numbers of sets, permutations and queries from 0 on, and k; along the queries also ``example`` (row of the
        split), ``weight`` (how often it counts) and ``gold`` (its right label or answer). ``scores`` adds
        ``log_likelihood`` of each label in nats (see `label_logprob` for its size). Answers that are generated have no
        ``prediction`` unless the task has labels.

        Raises `ConfigError` without xarray, and for a split or scores that the run does not have.
        """
        if split not in self.splits:
            raise ConfigError(f"there is no split {split!r} in this run; it has {', '.join(self.splits)}")
        about = {"task": self.task, "model": self.study.model_name, "split": split}
        return dataset_of(self.splits[split], self.labels, self.shots, about, scores=scores)

    def export(self, path: str | Path) -> Path | str:
        """Writes the canonical table (see `tables`) to a .csv, .jsonl or .parquet file; a file there is replaced whole.

        Of a URL (`iclperm.base.remote`) the file is written here and sent when it is whole; the URL is returned as it
        may be printed. Raises `ConfigError` for another ending and `RunStopped` where the file cannot be written.
        Streams.
        """
        if not is_url(path):
            return write_tables(self.tables(), Path(path))
        there = Remote(str(path))
        with there.written(is_folder=False) as file:
            write_tables(self.tables(), file)
        return there.name

    @property
    def chance(self) -> float | None:
        """Accuracy of guessing a label, or one of a query's own choices; None where any answer may be given."""
        if self.has_row_choices:
            test = self.splits["test"]
            return None if test.choices is None else test.choices.chance(test.weights)
        return 1 / len(self.labels) if self.labels else None

    @property
    def shared_labels(self) -> tuple[str, ...]:
        """The labels that every query may have; none where each has choices of its own, or any answer may be given."""
        return () if self.has_row_choices else self.labels

    @property
    def title(self) -> str:
        """Task and model, for the head of a figure."""
        return f"{self.task}, {Path(self.study.model_name).name}"

    @cached_property
    def demonstrations(self) -> Demonstrations:
        """What stood in the contexts, read from the study's data again.

        Raises `DataError` where the data is not what the run was made with, and what reading data raises.
        """
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
