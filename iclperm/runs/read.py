"""The tables that a run folder keeps: written from a part's answers, and read back into arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray

from iclperm.designs import CONTENT_FREE, Asked
from iclperm.errors import ConfigError, RunError
from iclperm.generated import KEPT, READ_BACK, Generated, Text, codes, item_columns, wrong_where_unparsed
from iclperm.held import held
from iclperm.items import Items
from iclperm.store import OK, STATES, RunFolder
from iclperm.study import Study
from iclperm.tasks.answers import Judgement
from iclperm.work import Part, Work

if TYPE_CHECKING:
    pass

_PENDING = 255
_READ_BACK = ["context", "split", "query", "state", "label_logprob"]
_TEXTS = ("text", "logprob")  # of generated answers, beside `iclperm.generated.READ_BACK`
_KEPT_KINDS = dict(
    zip(KEPT, (pa.string(), pa.string(), pa.string(), pa.string(), pa.int32(), pa.float32()), strict=True)
)


def tables(work: Work, number: int) -> dict[str, pa.Table]:
    """What third parties need to read the items of a stage: the demonstrations of each context, and the queries."""
    setting, prompts, extent = work.setting, work.prompts, work.stages[number].extent
    train = setting.examples["train"]
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
        "queries": pa.concat_tables(_query_table(work, asked, extent) for asked in setting.design.asked),
    }


def _list_of(kind: pa.DataType) -> pa.DataType:
    """As Parquet names the elements of a list: a table read back is then written as the same bytes."""
    return pa.list_(pa.field("element", kind))


def _query_table(work: Work, asked: Asked, extent: Mapping[str, int]) -> pa.Table:
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
        "label": pa.array([None] * number if is_free else work.right_answers[begin : begin + number], pa.string()),
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
            **_cell_columns(work, part, contexts, queries),
            "prediction": pa.array(predictions, pa.int16(), mask=is_missing),
            "label_logprob": lists,
            "state": _states(state),
        }
    )


def generated_rows(
    work: Work,
    part: Part,
    contexts: NDArray[np.int64],
    queries: NDArray[np.int64],
    draws: Sequence[Sequence[Text]],
    judged: Sequence[Sequence[Judgement]],
) -> pa.Table:
    """Generated items as a table, one row for each context [N], query [N], text and what was read from it, with the
    same of further ``draws`` of the same prompts."""
    found = item_columns(draws, judged, work.setting.task.words)
    return pa.table({**_cell_columns(work, part, contexts, queries), **found, "state": _states(found["state"])})


def _cell_columns(
    work: Work, part: Part, contexts: NDArray[np.int64], queries: NDArray[np.int64]
) -> dict[str, pa.Array]:
    """What tells to which cell an item belongs."""
    index_set, permutation, place = work.stages[part.stage].first_cells[contexts].T
    splits, begins = list(work.begins), np.array(list(work.begins.values()))
    split = np.searchsorted(begins, queries, side="right") - 1
    return {
        "context": pa.array(work.prompts.context_ids[contexts], pa.int64()),
        "set": pa.array(index_set, pa.int32()),
        "permutation": pa.array(permutation, pa.int32()),
        "shots": pa.array(np.array(work.setting.design.shots)[place], pa.int32()),
        "split": pa.DictionaryArray.from_arrays(pa.array(split, pa.int32()), splits),
        "query": pa.array(queries - begins[split], pa.int32()),
        "gold": _gold(work.prompts.gold[queries] if work.setting.task.words else np.full(len(queries), -1)),
    }


def _states(state: NDArray[np.uint8]) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(state, pa.int32()), list(STATES))


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
        lengths = plan["label_lengths"]
        if len(lengths[study.normalize]) < len(lengths["sum"]):
            raise ConfigError(
                f"normalize is {study.normalize!r}, but how many tokens an API makes of a label is not known; give "
                "'sum' or 'bytes'"
            )
        if study.normalize == "mean" and self.num_odd_labels:
            raise ConfigError(
                f"normalize is 'mean', but in {self.num_odd_labels} cells the labels have other numbers of tokens; "
                "give 'sum' or 'bytes'"
            )
        return np.array(lengths[study.normalize], dtype=np.float64)


def reading_of(plan: Mapping[str, Any], study: Study | None = None) -> dict[str, Any]:
    """How answers are read, for `Scores`."""
    is_generated = plan["study"]["scoring"] == "generate"
    return {
        "num_generated_labels": len(plan["labels"]) if is_generated else None,
        "num_draws": plan["generation"]["draws"] if is_generated else 1,
        "unparsed": "drop" if study is None else study.unparsed,
    }


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

    Answers that were generated have ``num_generated_labels``, 0 where any may be given, ``num_draws`` each, and no
    log-likelihoods;
    ``unparsed`` ones are missing (drop) or wrong.
    """

    def __init__(
        self,
        layout: Layout,
        scale: NDArray[np.float64],
        folder: RunFolder | None = None,
        *,
        num_generated_labels: int | None = None,
        num_draws: int = 1,
        unparsed: str = "drop",
    ) -> None:
        states = np.array([STATES.index(state) for state in layout.queries["state"].to_pylist()], dtype=np.uint8)
        shape = (len(layout.context_ids), len(states))
        pending = np.where(states == OK, _PENDING, states).astype(np.uint8)
        self.scale = scale
        self.state: NDArray[np.uint8] = held(shape, np.uint8)
        self.state[:] = pending
        kind = np.min_scalar_type(-len(scale)) if num_generated_labels is None else np.int32
        self.prediction: NDArray[np.signedinteger[Any]] = held(shape, kind)
        self.prediction[:] = -1
        self._generated = None if num_generated_labels is None else Generated.empty(self.state, num_draws)
        self._num_labels = num_generated_labels or 0
        draws = ["draw_correct"] if num_draws > 1 else []
        self._read_back = _READ_BACK if num_generated_labels is None else [*READ_BACK, *_TEXTS, *draws]
        self._unparsed = unparsed
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
        if self._generated is None:
            found: NDArray[np.signedinteger[Any]] = predictions(rows.logprob, self.scale)
        else:
            self._generated = self._generated.filled(rows.contexts, rows.queries, table)
            found = codes(table, self._num_labels)[is_ok]
        self.prediction[rows.contexts[is_ok], rows.queries[is_ok]] = found
        if self._is_calibrated:
            contexts, places = rows.contexts[is_ok], rows.queries[is_ok] - self._num_asked
            is_free = places >= 0
            self._content_free[contexts[is_free], places[is_free]] = rows.logprob[is_free]
        self._contexts[part] = np.unique(rows.contexts)
        if self._folder is None:
            self._tables[part] = table.select(self._read_back)

    def logprob(self, contexts: NDArray[np.int64], queries: slice) -> NDArray[np.float32]:
        """Log-likelihoods of distinct contexts, float32 [N, Q, L] (nats), NaN where there are none.

        Reads the parts that hold one of them; raises `RunError` where that has become impossible.
        """
        begin, end, _ = queries.indices(self.state.shape[1])
        places = np.full(len(self.state), -1, dtype=np.int64)
        places[contexts] = np.arange(len(contexts))
        values = np.full((len(contexts), end - begin, len(self.scale)), np.nan, dtype=np.float32)
        if self._generated is not None:
            return values  # of no labels
        for part in [part for part, inside in self._contexts.items() if (places[inside] >= 0).any()]:
            rows = self._read_again(part)
            is_ok = rows.state == OK
            place, query = places[rows.contexts[is_ok]], rows.queries[is_ok] - begin
            wanted = (place >= 0) & (query >= 0) & (query < end - begin)
            values[place[wanted], query[wanted]] = rows.logprob[wanted]
        return values

    def texts(self, contexts: NDArray[np.int64], queries: slice) -> pa.Table:
        """The columns `KEPT` of generated answers, a row for each context [N] and query, null where there is none;
        reads as `logprob`."""
        begin, end, _ = queries.indices(self.state.shape[1])
        places = np.full(len(self.state), -1, dtype=np.int64)
        distinct, inverse = np.unique(contexts, return_inverse=True)
        places[distinct] = np.arange(len(distinct))
        index = np.full((len(distinct), end - begin), -1, dtype=np.int64)
        tables, num_rows = [pa.table({name: pa.array([], kind) for name, kind in _KEPT_KINDS.items()})], 0
        for part in [part for part, inside in self._contexts.items() if (places[inside] >= 0).any()]:
            table = self._table(part)
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

    def _read_again(self, part: int) -> _Rows:
        return self._rows(part, self._table(part))

    def _table(self, part: int) -> pa.Table:
        return self._tables[part] if self._folder is None else self._folder.part(part, self._read_back)

    def _rows(self, part: int, table: pa.Table) -> _Rows:
        ids = table["context"].to_numpy()
        contexts = np.searchsorted(self._ids, ids)
        queries = table["query"].to_numpy() + _decoded(table["split"], self._begins)
        is_known = np.array_equal(self._ids.take(contexts, mode="clip"), ids)
        if not is_known or queries.max(initial=-1) >= self.state.shape[1]:
            raise RunError(f"part {part} holds answers that the plan does not have; run the study into another folder")
        state = _decoded(table["state"], {name: code for code, name in enumerate(STATES)}).astype(np.uint8)
        if self._generated is not None:
            return _Rows(contexts, queries, state, np.empty((0, 0), dtype=np.float32))
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
        state = self.state
        if self._generated is not None and self._unparsed == "wrong":
            state, prediction = wrong_where_unparsed(state, prediction, self._num_labels)
        found = {}
        for (name, begin), end in zip(self._begins.items(), ends, strict=True):
            here = slice(begin, end)  # a view: the results of a large run are held once
            is_plain = prior is None or name == CONTENT_FREE
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
                scale=self.scale,
                prior=None if is_plain else prior,
                uncalibrated_prediction=None if is_plain else self.prediction[:, here],
                generated=None if self._generated is None else self._generated.of_queries(here, texts),
                right_answers=tuple(queries["label"].slice(begin, end - begin).to_pylist()),
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
        prediction = held(self.prediction.shape, self.prediction.dtype)
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


def predictions(logprob: NDArray[np.float32], scale: NDArray[np.float64]) -> NDArray[np.int64]:
    """The most likely of the labels [..., L], compared as ``scale`` [L] says; ties go to the lowest index."""
    return np.asarray(np.argmax(logprob if (scale == 1).all() else logprob / scale, axis=-1))


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
