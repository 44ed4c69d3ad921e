"""Rows out: the tables that a run folder keeps, of contexts, queries and the answers of a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iclperm.prompts.design import CONTENT_FREE, SplitQueries
from iclperm.runs.generated import Text, item_columns
from iclperm.runs.query_choices import ALONE
from iclperm.runs.work import Part, Work
from iclperm.study.states import OK, STATES
from iclperm.tasks.answers import Judgement


def tables(work: Work, number: int) -> dict[str, pa.Table]:
    """What others need to read the answers of a growth by: ``demonstrations``, a row for each ordering with its
    contexts, and ``queries``, a row each.

    Where each query has demonstrations of its own, ``queries`` hold them, best first and retriever by retriever, and
    ``examples`` are ranks among these."""
    setting, prompts, extent = work.setting, work.prompts, work.growths[number].extent
    train = setting.examples["train"]
    cells = list(np.ndindex(extent["sets"], extent["permutations"]))
    rows, place = [], 0
    for group in setting.design.orderings:
        within = slice(place, place := place + len(group.shots))
        for cell in cells:
            examples = group.rows[cell]
            names = prompts.context_ids[prompts.context_of[cell][within]]
            hashes = (
                [train.hashes[row] for row in examples]
                if (own := setting.design.neighbours) is None
                else [own.rank_hash(cell[0], int(rank)) for rank in examples]
            )
            rows.append((*cell, examples.tolist(), hashes, list(group.shots), names.tolist()))
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
        "queries": pa.concat_tables(_query_table(work, queries, extent) for queries in setting.design.queries),
    }


def _list_of(kind: pa.DataType) -> pa.DataType:
    """As Parquet names the elements of a list: a table read back is then written as the same bytes."""
    return pa.list_(pa.field("element", kind))


def _query_table(work: Work, queries: SplitQueries, extent: Mapping[str, int]) -> pa.Table:
    split = queries.split
    count = {"test": extent["queries"], "dev": extent["dev_queries"]}.get(split, len(queries.draws))
    number, begin = queries.num_distinct(count), work.begins[split]
    examples, rows = work.setting.examples[split], queries.rows[:number]
    gold, is_free = work.prompts.gold[begin : begin + number], split == CONTENT_FREE
    columns = {
        "split": pa.array([split] * number, pa.string()),
        "query": pa.array(range(number), pa.int32()),
        "example": pa.array(rows, pa.int32()),
        "content_hash": pa.array([examples.hashes[row] for row in rows], pa.string()),
        "gold": _gold(gold),
        "label": pa.array([None] * number if is_free else work.right_answers[begin : begin + number], pa.string()),
        "weight": pa.array(np.bincount(queries.draws[:count], minlength=number) * (not is_free), pa.int32()),
        "state": pa.array([STATES[state] for state in work.query_states[begin : begin + number]], pa.string()),
    }
    if work.setting.task.has_row_choices:
        columns |= _choice_columns(work, queries, number, begin)
    if work.setting.design.neighbours is not None:
        own = work.setting.design.own[:, :number].swapaxes(0, 1).tolist()
        columns["demonstrations"] = pa.array(own, _list_of(_list_of(pa.int32())))
    return pa.table(columns)


def _choice_columns(work: Work, queries: SplitQueries, number: int, begin: int) -> dict[str, pa.Array]:
    """Of each query its own choices (null where the data may not be handed on), which of them are right, and what
    log-likelihoods are divided by: their tokens, characters and bytes."""
    chosen = work.setting.examples[queries.split].chosen
    assert chosen is not None
    own = [chosen[row] for row in queries.rows[:number]]
    tokens = [work.prompts.after(begin + query)[: len(one.texts)] for query, one in enumerate(own)]
    is_open = not work.setting.task.restricted
    return {
        "choices": pa.array([list(one.texts) if is_open else None for one in own], _list_of(pa.string())),
        "right": pa.array([list(one.gold) for one in own], _list_of(pa.int32())),
        "choice_tokens": pa.array([list(map(len, ids)) for ids in tokens], _list_of(pa.int32())),
        "choice_characters": pa.array([list(map(len, one.texts)) for one in own], _list_of(pa.int32())),
        "choice_bytes": pa.array([[len(text.encode()) for text in one.texts] for one in own], _list_of(pa.int32())),
    }


def item_rows(
    work: Work,
    part: Part,
    contexts: NDArray[np.int64],
    queries: NDArray[np.int64],
    logprob: NDArray[np.float32],
    state: NDArray[np.uint8],
) -> pa.Table:
    """Scored answers as a table, a row each: contexts and queries int64 [N], log-likelihoods of labels float32 [N, L]
    in nats, and states uint8 [N]. Where queries have choices of their own, those that one lacks are NaN."""
    is_missing = state != OK
    if (num_choices := work.prompts.num_choices) is not None:
        logprob = _lacking_nan(logprob, num_choices[queries])
    predictions = np.where(is_missing, 0, np.argmax(np.nan_to_num(logprob, nan=-np.inf), axis=1))
    return pa.table(
        {
            **_cell_columns(work, part, contexts, queries),
            "prediction": pa.array(predictions, pa.int16(), mask=is_missing),
            "label_logprob": _logprob_lists(logprob, is_missing),
            "state": _states(state),
        }
    )


def alone_rows(work: Work, rows: NDArray[np.int64], logprob: NDArray[np.float32], state: NDArray[np.uint8]) -> pa.Table:
    """Labels, or the choices of queries by their numbers, int64 [N], without a context, as a table: log-likelihoods
    [N, L] in nats in a column of their own. Of labels, which are those of all queries, split and query are null."""
    is_by_query = (number := work.prompts.num_choices) is not None
    begins = np.array([*work.begins.values()] if is_by_query else [0])
    split, nowhere = np.searchsorted(begins, rows, side="right") - 1, np.full(len(rows), not is_by_query)
    return pa.table(
        {
            "split": pa.DictionaryArray.from_arrays(pa.array(split, pa.int32(), mask=nowhere), list(work.begins)),
            "query": pa.array(rows - begins[split], pa.int32(), mask=nowhere),
            ALONE: _logprob_lists(logprob if number is None else _lacking_nan(logprob, number[rows]), state != OK),
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
    """Generated answers as a table, a row each: contexts and queries int64 [N], and by draw the N texts and what was
    read from them; the first draw is the answer, others are kept beside it."""
    found = item_columns(draws, judged, work.setting.task.words, work.setting.metric)
    return pa.table({**_cell_columns(work, part, contexts, queries), **found, "state": _states(found["state"])})


def _cell_columns(
    work: Work, part: Part, contexts: NDArray[np.int64], queries: NDArray[np.int64]
) -> dict[str, pa.Array]:
    """The columns that say which cell a row is the answer of."""
    index_set, permutation, place = work.growths[part.growth].first_cells[contexts].T
    splits, begins = list(work.begins), np.array(list(work.begins.values()))
    split = np.searchsorted(begins, queries, side="right") - 1
    return {
        "context": pa.array(work.prompts.context_ids[contexts], pa.int64()),
        "set": pa.array(index_set, pa.int32()),
        "permutation": pa.array(permutation, pa.int32()),
        "shots": pa.array(np.array(work.setting.design.shots)[place], pa.int32()),
        "split": pa.DictionaryArray.from_arrays(pa.array(split, pa.int32()), splits),
        "query": pa.array(queries - begins[split], pa.int32()),
        "gold": _gold(work.prompts.gold[queries] if work.setting.labels else np.full(len(queries), -1)),
    }


def _lacking_nan(logprob: NDArray[np.float32], num_choices: NDArray[np.int64]) -> NDArray[np.float32]:
    """Log-likelihoods [N, L], NaN beyond the choices that each query has, int64 [N]."""
    return np.where(np.arange(logprob.shape[1]) >= num_choices[:, None], np.float32(np.nan), logprob)


def _logprob_lists(logprob: NDArray[np.float32], is_missing: NDArray[np.bool_]) -> pa.Array:
    """Log-likelihoods [N, L], null where they are missing, bool [N]."""
    offsets = pa.array(np.arange(len(logprob) + 1) * logprob.shape[1], pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(logprob.ravel(), pa.float32()), mask=pa.array(is_missing))


def _states(state: NDArray[np.uint8]) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(state, pa.int32()), list(STATES))


def _gold(labels: NDArray[np.int64]) -> pa.Array:
    """Right labels; null where there is none."""
    return pa.array(labels, pa.int16(), mask=labels < 0)
