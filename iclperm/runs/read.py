"""Rows in: the tables of a run folder, read back into arrays by distinct context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iclperm.base.arrays import large_array
from iclperm.errors import ConfigError, DamagedItem, RunError, is_out_of_memory
from iclperm.prompts.design import CONTENT_FREE
from iclperm.runs.answers import Items
from iclperm.runs.folder import RunFolder
from iclperm.runs.generated import KEPT, READ_BACK, GeneratedAnswers, codes, verdict_names, wrong_where_unparsed
from iclperm.runs.limits import DEFAULT, WorkLimits
from iclperm.runs.parts import PartFiles
from iclperm.runs.query_choices import ALONE, PENDING, AloneScores, QueryChoices
from iclperm.stats.calibration import content_free_prior
from iclperm.stats.criteria import by_query_criterion
from iclperm.study.metrics import Metric
from iclperm.study.states import NOT_ASKED, OK, STATES
from iclperm.study.study import PMI, Study

_ANSWERS_OF_ANY, _ANSWERS_A_BYTE = 1 << 28, 100
_READ_BACK = ["context", "split", "query", "state", "label_logprob"]
_TEXTS = ("text", "logprob")  # of generated answers, beside `iclperm.runs.generated.READ_BACK`
_FEW_LABELS = 16
_KEPT_KINDS = dict(
    zip(KEPT, (pa.string(), pa.string(), pa.string(), pa.string(), pa.int32(), pa.float32()), strict=True)
)


@dataclass(frozen=True)
class Layout:
    """Which contexts and queries a run has, from the tables of its folder.

    ``context_ids`` int64 [C] name the distinct contexts in the files, ascending, and ``context_of`` int64 [S, P, K]
    indexes them. ``queries`` is the table of all queries, split by split; ``counts`` are fields of `RunReport`. In
    ``num_odd_labels`` cells the labels have other numbers of tokens than everywhere else.
    """

    context_ids: NDArray[np.int64]
    context_of: NDArray[np.int64]
    queries: pa.Table
    counts: dict[str, int]
    num_odd_labels: int
    choices: QueryChoices | None = None
    """Those that each query has of its own."""
    has_alone: bool = False
    """Whether labels were asked without a context, too."""

    @classmethod
    def of_folder(cls, folder: RunFolder) -> Layout:
        """That of the extent at which a folder is looked at; raises `DamagedItem` where its tables are damaged, or tell
        of more answers than its files can hold, whose arrays would fill memory and disk."""
        tables = folder.table("demonstrations"), folder.table("queries")
        with _strangers_damage(f"the tables of {folder.path}"):
            layout = cls.of_tables(*tables, folder.plans)
            _refuse_other_queries(layout.queries, folder.plan)
        num_answers = len(layout.context_ids) * len(layout.queries)
        num_bytes = folder.files.num_bytes(folder.path / "items")
        if num_answers > _ANSWERS_OF_ANY + _ANSWERS_A_BYTE * num_bytes:
            raise DamagedItem(
                f"{folder.path} tells of {num_answers:,} answers, but its items have {num_bytes:,} bytes; run the "
                "study again, or give another folder"
            )
        return layout

    @classmethod
    def of_tables(cls, cells: pa.Table, queries: pa.Table, plans: Sequence[Mapping[str, Any]]) -> Layout:
        """From the tables of demonstrations and queries of the last of the run's plans."""
        extent, last = plans[-1]["extents"][-1], plans[-1]
        shape = (extent["sets"], extent["permutations"])
        groups: dict[tuple[int, ...], list[list[int]]] = {}
        for shots, contexts in zip(cells["shots"].to_pylist(), cells["contexts"].to_pylist(), strict=True):
            groups.setdefault(tuple(shots), []).append(contexts)
        names = [np.array(contexts, dtype=np.int64).reshape(*shape, -1) for contexts in groups.values()]
        context_ids, context_of = np.unique(np.concatenate(names, axis=2), return_inverse=True)
        choices = QueryChoices.of_table(queries, len(plans[0]["labels"])) if plans[0].get("row_choices") else None
        counts = {
            **last["counts"],
            "tokens_naive": last["tokens"]["naive"],
            "tokens_unique": last["tokens"]["unique"],
            "num_general_cells": sum(plan["work"]["general_cells"] for plan in plans),
            "num_oversampled": int(np.sum(np.maximum(queries["weight"].to_numpy() - 1, 0))),
        }
        is_dealt = "crossed" in last.get("decision", {}).get("known", {})  # whose plan counts prompts alone, as for all
        if choices is not None and not is_dealt and "endpoint" not in plans[0]["hashes"]:
            # They are fed after each prompt, and are most of its tokens at times; of a search with what it was spared.
            asked = np.array(queries["state"].to_pylist()) == STATES[OK]
            is_whole = "decision" in last
            cells = len(context_ids) * asked.sum() if is_whole else sum(plan["work"]["cells"] for plan in plans)
            counts["tokens_naive"] += round(cells * choices.tokens_after(asked))
        return cls(
            context_ids,
            context_of.reshape(*shape, -1),
            queries,
            counts,
            sum(plan["work"]["odd_labels"] for plan in plans),
            choices,
            bool(plans[0].get(PMI)),
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
        """What log-likelihoods are divided by before labels are compared, float64 [L]; [Q, L] where each query has
        choices of its own.

        Raises `ConfigError` where that is not known, or not the same in all cells.
        """
        if study.normalize == PMI and not self.has_alone:
            raise ConfigError(
                "normalize is 'pmi', but this run has not asked for labels without a context; run the study with "
                "normalize: pmi into another folder"
            )
        lengths = {
            **plan["label_lengths"],
            PMI: [1] * len(plan["label_lengths"]["sum"]),
            "characters": list(map(len, plan["labels"])),
        }
        if self.choices is None and len(lengths[study.normalize]) < len(lengths["sum"]):
            raise ConfigError(
                f"normalize is {study.normalize!r}, but how many tokens an API makes of a label is not known; give "
                "'sum' or 'bytes'"
            )
        if study.normalize == "mean" and self.num_odd_labels:
            raise ConfigError(
                f"normalize is 'mean', but in {self.num_odd_labels} cells the labels have other numbers of tokens; "
                "give 'sum' or 'bytes'"
            )
        if self.choices is not None:
            return self.choices.scale(study.normalize)
        return np.array(lengths[study.normalize], dtype=np.float64)


def reading_of(plan: Mapping[str, Any], study: Study | None = None) -> dict[str, Any]:
    """How the answers of a run are read, as arguments of `ContextAnswers`; without a study unparsed ones are
    missing."""
    is_generated = plan["study"]["scoring"] == "generate"
    return {
        "num_generated_labels": len(plan["labels"]) if is_generated else None,
        "num_draws": plan["generation"]["draws"] if is_generated else 1,
        "metric": Metric.of_plan(plan),
        "unparsed": "drop" if study is None else study.unparsed,
        "is_pmi": study is not None and study.normalize == PMI,
    }


@dataclass(frozen=True)
class _PartRows:
    """The rows of a part: context, query and state [N] of each, and the log-likelihoods [M, L] of those that are ok.

    ``distinct`` are the contexts, ascending."""

    distinct: NDArray[np.int64]
    contexts: NDArray[np.int64]
    queries: NDArray[np.int64]
    state: NDArray[np.uint8]
    logprob: NDArray[np.float32]


class ContextAnswers:
    """Results by distinct context, filled from tables of items.

    ``state`` uint8 [C, Q] and ``prediction`` [C, Q] are large arrays (`iclperm.base.arrays`). Log-likelihoods, many
    times as large, stay in the ``files`` of the parts and are read again where they are used; without files the tables
    are kept in memory. Those of content-free queries are kept in any case: they are few, and what all others are
    calibrated by. ``scale`` float64 [L] is what log-likelihoods are divided by before labels are compared, [Q, L] where
    each query has choices of its own.

    Answers that were generated have no log-likelihoods; ``num_generated_labels`` is then the number of labels, 0 where
    any answer may be given, and ``num_draws`` that of the texts for each prompt, graded by a ``metric`` if by
    any. ``unparsed`` answers are missing (drop) or wrong. With ``is_pmi`` what labels have without a context is
    taken off.
    """

    def __init__(
        self,
        layout: Layout,
        scale: NDArray[np.float64],
        files: PartFiles | None = None,
        *,
        limits: WorkLimits = DEFAULT,
        num_generated_labels: int | None = None,
        num_draws: int = 1,
        metric: Metric | None = None,
        unparsed: str = "drop",
        is_pmi: bool = False,
    ) -> None:
        states = np.array([STATES.index(state) for state in layout.queries["state"].to_pylist()], dtype=np.uint8)
        shape = (len(layout.context_ids), len(states))
        pending = np.where(states == OK, PENDING, states).astype(np.uint8)
        self.scale = scale
        self.state: NDArray[np.uint8] = large_array(shape, np.uint8, most_held=limits.bytes_in_memory)
        self.state[:] = pending
        num_labels = scale.shape[-1]
        by_query = layout.choices is not None
        alone = AloneScores.empty(num_labels, states, is_by_query=by_query) if layout.has_alone else None
        self._alone, self._is_pmi = alone, is_pmi
        kind = np.min_scalar_type(-num_labels) if num_generated_labels is None else np.int32
        self.prediction: NDArray[np.signedinteger[Any]] = large_array(shape, kind, most_held=limits.bytes_in_memory)
        self.prediction[:] = -1
        self._generated = (
            None
            if num_generated_labels is None
            else GeneratedAnswers.empty(self.state, num_draws, limits.bytes_in_memory, metric)
        )
        self._num_labels = num_generated_labels or 0
        self._num_draws = num_draws
        self._metric = metric
        verdicts = verdict_names(metric, num_draws)
        scored = _READ_BACK if alone is None else [*_READ_BACK, ALONE]
        self._read_back = scored if num_generated_labels is None else [*READ_BACK, *_TEXTS, *verdicts]
        self._unparsed = unparsed
        self._layout = layout
        self._ids = layout.context_ids  # ascending
        self._begins = layout.begins
        begin = self._begins.get(CONTENT_FREE)
        self._num_asked = len(states) if begin is None else begin
        free_shape = (shape[0], len(states) - self._num_asked, num_labels)
        self._content_free = np.full(free_shape, np.nan, dtype=np.float32)
        self._contexts: dict[int, NDArray[np.int64]] = {}
        self._tables: dict[int, pa.Table] = {}
        self._files = files
        self._limits = limits

    @property
    def columns(self) -> Sequence[str]:
        """Those of a part's table that answers are filled from."""
        return self._read_back

    @property
    def parts(self) -> Set[int]:
        """The parts that were filled in."""
        return self._contexts.keys()

    def fill(self, part: int, table: pa.Table) -> None:
        """Adds the answers in the table of a part; raises `RunError` where the plan has no such cells, `DamagedItem`
        where it is no such table."""
        with _strangers_damage(f"part {part}"):
            if self._alone is None or ALONE not in table.column_names:
                self._fill(part, table)
            else:
                self._alone.fill(table, self._begins)
                self._keep(part, table, np.empty(0, np.int64))

    def _fill(self, part: int, table: pa.Table) -> None:
        rows = self._rows(part, table)
        is_ok = rows.state == OK
        cells = rows.contexts * self.state.shape[1] + rows.queries
        self.state.reshape(-1)[cells] = rows.state
        if self._generated is None:
            found = self._predictions(rows.logprob, rows.queries[is_ok])
        else:
            self._generated = self._generated.filled(rows.contexts, rows.queries, table)
            found = codes(table, self._num_labels)[is_ok]
        self.prediction.reshape(-1)[cells if is_ok.all() else cells[is_ok]] = found
        if self._is_calibrated:
            contexts, places = rows.contexts[is_ok], rows.queries[is_ok] - self._num_asked
            is_free = places >= 0
            self._content_free[contexts[is_free], places[is_free]] = rows.logprob[is_free]
        self._keep(part, table, rows.distinct)

    def _keep(self, part: int, table: pa.Table, contexts: NDArray[np.int64]) -> None:
        """Notes that a part is filled in, and which ``contexts`` have answers in it."""
        self._contexts[part] = contexts
        if self._files is None:
            self._tables[part] = table.select([name for name in self._read_back if name in table.column_names])

    def _predictions(self, logprob: NDArray[np.float32], queries: NDArray[np.int64]) -> NDArray[np.signedinteger[Any]]:
        """The most likely labels, or the most likely of their own choices, of answers [N, L] to ``queries`` [N]."""
        scale = self.scale if self.scale.ndim == 1 else self.scale[queries]
        if (choices := self._layout.choices) is not None:
            return np.asarray(np.argmax(choices.comparable(logprob / scale, queries), axis=-1))
        return predictions(logprob, scale)

    def logprob(self, contexts: NDArray[np.int64], queries: NDArray[np.int64]) -> NDArray[np.float32]:
        """Log-likelihoods of contexts, int64 [N], and queries [Q], both without repeats, float32 [N, Q, L] in nats; NaN
        where there are none.

        Reads the files of all parts that hold one of the contexts; raises `RunError` where one is damaged or gone.
        """
        places, columns = (np.full(size, -1, dtype=np.int64) for size in self.state.shape)
        places[contexts], columns[queries] = np.arange(len(contexts)), np.arange(len(queries))
        values = np.full((len(contexts), len(queries), self.scale.shape[-1]), np.nan, dtype=np.float32)
        if self._generated is not None:
            return values  # of no labels
        for rows in self._read_again([part for part, inside in self._contexts.items() if (places[inside] >= 0).any()]):
            is_ok = rows.state == OK
            place, query = places[rows.contexts[is_ok]], columns[rows.queries[is_ok]]
            wanted = (place >= 0) & (query >= 0)
            values[place[wanted], query[wanted]] = rows.logprob[wanted]
        return values

    def texts(self, contexts: NDArray[np.int64], queries: slice) -> pa.Table:
        """The columns `KEPT` of generated answers, a row for each context [N] and query, null where there is none.

        Reads as `logprob` does.
        """
        begin, end, _ = queries.indices(self.state.shape[1])
        places = np.full(len(self.state), -1, dtype=np.int64)
        distinct, inverse = np.unique(contexts, return_inverse=True)
        places[distinct] = np.arange(len(distinct))
        index = np.full((len(distinct), end - begin), -1, dtype=np.int64)
        tables, num_rows = [pa.table({name: pa.array([], kind) for name, kind in _KEPT_KINDS.items()})], 0
        wanted_parts = [part for part, inside in self._contexts.items() if (places[inside] >= 0).any()]
        for part, table in zip(wanted_parts, self._stored(wanted_parts), strict=True):
            rows = self._rows(part, table)
            place, query = places[rows.contexts], rows.queries - begin
            wanted = (place >= 0) & (query >= 0) & (query < end - begin)
            index[place[wanted], query[wanted]] = num_rows + np.flatnonzero(wanted)
            tables.append(pa.table({name: table[name].cast(kind) for name, kind in _KEPT_KINDS.items()}))
            num_rows += len(table)
        rows_of = index[inverse].ravel()
        return pa.concat_tables(tables).take(pa.array(rows_of, mask=rows_of < 0))

    @property
    def _is_calibrated(self) -> bool:
        return self._content_free.shape[1] > 0

    def _read_again(self, parts: Sequence[int]) -> Iterator[_PartRows]:
        return (self._rows(part, table) for part, table in zip(parts, self._stored(parts), strict=True))

    def _stored(self, parts: Sequence[int]) -> Iterator[pa.Table]:
        if self._files is None:
            return (self._tables[part] for part in parts)
        return self._files.read_again(parts, self._read_back)

    def _rows(self, part: int, table: pa.Table) -> _PartRows:
        ids = table["context"].to_numpy()
        begins = np.flatnonzero(np.append(True, ids[1:] != ids[:-1])[: len(ids)])  # answers to one context follow on
        found = np.searchsorted(self._ids, ids[begins])
        contexts = np.repeat(found, np.diff(begins, append=len(ids)))
        queries = table["query"].to_numpy() + _decoded(table["split"], self._begins)
        is_known = np.array_equal(self._ids.take(found, mode="clip"), ids[begins])
        if not is_known or queries.max(initial=-1) >= self.state.shape[1]:
            raise RunError(f"part {part} holds answers that the plan does not have; run the study into another folder")
        state = _decoded(table["state"], {name: code for code, name in enumerate(STATES)}).astype(np.uint8)
        if self._generated is not None:
            return _PartRows(np.unique(found), contexts, queries, state, np.empty((0, 0), dtype=np.float32))
        values = table["label_logprob"].combine_chunks().flatten().to_numpy().reshape(-1, self.scale.shape[-1])
        return _PartRows(np.unique(found), contexts, queries, state, values)

    def items(self, *, predicted: bool = True) -> dict[str, Items]:
        """The answers by split, once all parts are filled in.

        A study that is calibrated, or takes off what labels have without a context, reads all files once more for its
        predictions; without ``predicted`` it has none.
        """
        queries = self._layout.queries
        columns = {name: _integers(queries[name]) for name in ("example", "weight", "gold")}
        prior = self._prior() if self._is_calibrated else None
        if self._is_pmi:
            self._give_up_without_alone()
        is_plain = prior is None and not self._is_pmi
        prediction = self.prediction if is_plain else self._later_predictions(prior, predicted)
        ends = [*self._begins.values(), len(queries)][1:]
        state = self.state
        if self._generated is not None and self._unparsed == "wrong":
            state, prediction = wrong_where_unparsed(state, prediction, self._num_labels, self._limits.bytes_in_memory)
        found = {}
        for (name, begin), end in zip(self._begins.items(), ends, strict=True):
            here = slice(begin, end)  # a view: the answers of a large run are in memory once
            is_free = prior is None or name == CONTENT_FREE
            texts = partial(self.texts, queries=here)
            found[name] = Items(
                split=name,
                examples=columns["example"][here],
                weights=columns["weight"][here],
                gold=columns["gold"][here],
                context_of=self._layout.context_of,
                context_state=state[:, here],
                context_prediction=(self.prediction if name == CONTENT_FREE else prediction)[:, here],
                context_logprob=_Stored(self, here),
                scale=self.scale if self.scale.ndim == 1 else self.scale[here],
                choices=None if self._layout.choices is None else self._layout.choices.of_queries(here),
                prior=None if is_free else prior,
                uncalibrated_prediction=None if is_free else self.prediction[:, here],
                alone=None if self._alone is None else self._alone.of(here),
                is_pmi=self._is_pmi,
                generated=None if self._generated is None else self._generated.of_queries(here, texts),
                right_answers=tuple(queries["label"].slice(begin, end - begin).to_pylist()),
                limits=self._limits,
            )
        return found

    def _prior(self) -> NDArray[np.float64]:
        """The log-probabilities of the labels after content-free queries, float64 [C, L] in nats.

        NaN for a context that lacks one of these answers; its other answers are given up, as they cannot be calibrated.
        """
        worst = self.state[:, self._num_asked :].max(axis=1)
        for context in np.flatnonzero(worst != OK):
            answers = self.state[context, : self._num_asked]
            np.maximum(answers, worst[context], out=answers)
            self.prediction[context, : self._num_asked] = -1
        return content_free_prior(self._content_free, self.scale)

    def _give_up_without_alone(self) -> None:
        """Queries whose labels have no log-likelihoods without a context have no answers: nothing compares them."""
        assert self._alone is not None
        state = self._alone.state
        for row in np.flatnonzero((state != OK) & (state != PENDING)):
            there = slice(None) if len(state) == 1 else slice(row, row + 1)
            np.maximum(self.state[:, there], state[row], out=self.state[:, there])

    def _later_predictions(self, prior: NDArray[np.float64] | None, predicted: bool) -> NDArray[np.signedinteger[Any]]:
        """Those that need more than a part at hand: what each context prefers by itself, or labels without one."""
        prediction = large_array(self.prediction.shape, self.prediction.dtype, most_held=self._limits.bytes_in_memory)
        prediction[:] = -1
        for rows in self._read_again([part for part, inside in self._contexts.items() if predicted and len(inside)]):
            contexts, queries = (numbers[rows.state == OK] for numbers in (rows.contexts, rows.queries))
            scores = rows.logprob / (self.scale if self.scale.ndim == 1 else self.scale[queries])
            if prior is not None:
                scores -= prior[contexts]
            if self._alone is not None and self._is_pmi:
                scores -= self._alone.of(queries)
            if (choices := self._layout.choices) is not None:
                scores = choices.comparable(scores, queries)
            is_known = self.state[contexts, queries] == OK
            prediction[contexts, queries] = np.where(is_known, np.argmax(scores, axis=-1), -1)
        return prediction

    def criterion(self, name: str, queries: NDArray[np.int64], gold: NDArray[np.int64]) -> NDArray[np.float64]:
        """What a criterion of a search that is a mean over queries gives each context for some ``queries`` [N] with the
        right labels ``gold`` [N]: float64 [C, N], NaN where there is no answer."""
        is_there = self.state[:, queries] == OK
        if name == "dev_accuracy":
            generated = self._generated
            right = generated.correct[:, queries] if generated else self._is_right(queries, gold)
            return np.where(is_there, right, np.nan).astype(np.float64)
        asked = np.flatnonzero(is_there.any(axis=1))
        found = np.full(is_there.shape, np.nan)
        scores = self.logprob(asked, queries).astype(np.float64) / (
            self.scale if self.scale.ndim == 1 else self.scale[queries]
        )
        if (choices := self._layout.choices) is not None:
            scores = choices.comparable(scores, queries)
        found[asked] = by_query_criterion(name, scores, gold)
        return np.where(is_there, found, np.nan)

    def _is_right(self, queries: NDArray[np.int64], gold: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the predictions for some queries [N] are their right labels ``gold`` [N], or a right choice."""
        given, choices = self.prediction[:, queries], self._layout.choices
        return given == gold if choices is None else choices.is_right(given, queries)

    def give_up_unasked(self) -> None:
        """What no part holds was not asked, and never will be: see `iclperm.study.states.NOT_ASKED`."""
        self.state[self.state == PENDING] = NOT_ASKED

    def keep_in(self, files: PartFiles) -> None:
        """Where log-likelihoods are read again from now on: the files of the same run, grown."""
        if self._files is not None:
            files.know(self._files)
        self._files = files

    def relaid(self, layout: Layout, scale: NDArray[np.float64]) -> ContextAnswers:
        """The same answers in the larger ``layout`` of a run that has grown, with its scale; reads those that are in
        files."""
        grown = ContextAnswers(
            layout,
            scale,
            self._files,
            limits=self._limits,
            num_generated_labels=None if self._generated is None else self._num_labels,
            num_draws=self._num_draws,
            metric=self._metric,
            unparsed=self._unparsed,
            is_pmi=self._is_pmi,
        )
        for part, table in zip(self._contexts, self._stored([*self._contexts]), strict=True):
            grown.fill(part, table)
        return grown

    @property
    def context_of(self) -> NDArray[np.int64]:
        """The number of each context, int64 [S, P, K]."""
        return self._layout.context_of

    @property
    def begins(self) -> dict[str, int]:
        """Where each split begins among all queries."""
        return self._begins

    def refuse_gaps(self) -> None:
        """Raises `RunError` where an answer is in none of the parts."""
        missing = int(np.count_nonzero(self.state == PENDING))
        if missing := missing + (0 if self._alone is None else self._alone.num_missing):
            raise RunError(f"{missing} answers are in none of the run's files; run the study into another folder")


def _refuse_other_queries(queries: pa.Table, plan: Mapping[str, Any]) -> None:
    """Raises ValueError for right labels, weights and examples that no run's queries have."""
    for name in ("example", "weight", "gold"):
        if not pa.types.is_integer(queries[name].type):
            raise ValueError(f"{name} is {queries[name].type}")
    if (_integers(queries["weight"]) < 0).any():
        raise ValueError("a weight is below 0")
    gold, is_free = _integers(queries["gold"]), np.array(queries["split"].to_pylist()) == CONTENT_FREE
    is_scored = plan["study"]["scoring"] != "generate"
    if is_scored and not (is_free | ((gold >= 0) & (gold < len(plan["labels"])))).all():
        raise ValueError(f"a right label is none of the {len(plan['labels'])}")


@contextmanager
def _strangers_damage(name: str) -> Iterator[None]:
    """What is whole by its digest, but of other columns or values than any run's, is a `DamagedItem`."""
    try:
        yield
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, pa.ArrowException) as error:
        if is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        raise DamagedItem(f"{name} cannot be those of a run ({reason}); run the study into another folder") from error


@dataclass(frozen=True)
class _Stored:
    """The log-likelihoods of some queries, read at each use: see `LogLikelihoods`."""

    answers: ContextAnswers
    queries: slice

    @property
    def shape(self) -> tuple[int, ...]:
        num_contexts, num_queries = self.answers.state[:, self.queries].shape
        return num_contexts, num_queries, self.answers.scale.shape[-1]

    def __getitem__(self, index: NDArray[np.int64] | tuple[NDArray[np.int64], ...], /) -> NDArray[np.float32]:
        queries = np.arange(self.answers.state.shape[1])[self.queries]
        if isinstance(index, tuple):
            contexts, some = index
            return self.answers.logprob(contexts.ravel(), queries[some.ravel()])
        return self.answers.logprob(index, queries)


def predictions(logprob: NDArray[np.float32], scale: NDArray[np.float64]) -> NDArray[np.signedinteger[Any]]:
    """The most likely labels, from log-likelihoods [..., L] divided by ``scale`` [L]; of equal ones the lowest."""
    values: NDArray[np.floating[Any]] = logprob if (scale == 1).all() else logprob / scale
    if values.shape[-1] > _FEW_LABELS or np.isnan(values).any():
        return np.asarray(np.argmax(values, axis=-1))
    best, found = values[..., 0].copy(), np.zeros(values.shape[:-1], np.int8)  # a tenth of the time of argmax
    for label in range(1, values.shape[-1]):
        is_better = values[..., label] > best
        found[is_better] = label
        np.maximum(best, values[..., label], out=best)
    return found


def _integers(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """A column's numbers, int64 [N]; -1 for null."""
    return np.asarray(column.fill_null(-1).to_numpy().astype(np.int64))


def _decoded(column: pa.ChunkedArray, codes: Mapping[str, int]) -> NDArray[np.int64]:
    """A column of names as their numbers, int64 [N]."""
    decoded = [
        np.array([codes[name] for name in chunk.dictionary.to_pylist()], dtype=np.int64)[chunk.indices.to_numpy()]
        for chunk in column.chunks
    ]
    return np.concatenate([*decoded, np.empty(0, np.int64)])
