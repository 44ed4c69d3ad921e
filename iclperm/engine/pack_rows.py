"""Which rows of the forward pass that runs now are of which request: for hooks on a model's modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

import numpy as np

from iclperm.engine.plan import Pack, Plan
from iclperm.engine.tree import IntArray, PrefixTree, TokenArray
from iclperm.errors import RequestError


@dataclass(frozen=True)
class PackRows:
    """The rows [1, M, H] that modules are given in one forward pass, padding behind them not counted.

    Row m is the token ``token_ids[m]`` (int32 [M]) at position ``positions[m]`` of every prompt that begins so; a token
    of many prompts is one row. What is read: ``rows[x]`` is the row after which token ``tokens[x]`` of the continuation
    of request ``requests[x]`` is predicted (int64 [X]). Requests have the numbers of their results: of ``score`` those
    of [C, Q, L] laid flat (`numpy.unravel_index`), of ``next_token`` and ``hidden_states`` those of the nodes. The
    first-use check, ``Engine.generate`` and packs that run layer by layer have rows of no request. In a session, what
    is read from what an earlier pack left, of the same call or another, has no row here.
    """

    token_ids: TokenArray
    positions: TokenArray
    rows: IntArray
    requests: IntArray
    tokens: IntArray

    @classmethod
    def of(cls, pack: Pack, pairs: IntArray, requests: IntArray, tokens: IntArray) -> PackRows:
        """Of a pack's wanted ``pairs`` [X], which may repeat, each of a request and token."""
        rows = pack.scored_rows.astype(np.int64)[pack.pair_row[pairs]]
        return cls(pack.token_ids, pack.positions, rows, requests, tokens)

    @classmethod
    def of_nobody(cls, pack: Pack | None) -> PackRows:
        """Of a forward pass of which no request is told."""
        ids, none = np.empty(0, np.int32), np.empty(0, np.int64)
        return cls(*((ids, ids) if pack is None else (pack.token_ids, pack.positions)), none, none, none)


Asked = Callable[[Pack], PackRows]
_running: ContextVar[Callable[[], PackRows] | None] = ContextVar("what the rows are that run now", default=None)
_is_checking: ContextVar[bool] = ContextVar("whether it is the first-use check that runs", default=False)


@contextmanager
def running(pack: Pack | None, asked: Asked | None) -> Iterator[None]:
    """Within: ``rows_now`` tells of a pack, and of its requests if ``asked`` does."""
    told = (
        partial(PackRows.of_nobody, pack)
        if pack is None or asked is None or _is_checking.get()
        else partial(asked, pack)
    )
    token = _running.set(told)
    try:
        yield
    finally:
        _running.reset(token)


@contextmanager
def checking() -> Iterator[None]:
    """Within: nobody asked for what is forwarded."""
    token = _is_checking.set(True)
    try:
        with running(None, None):
            yield
    finally:
        _is_checking.reset(token)


def rows_now() -> PackRows:
    """Of the forward pass that runs now, in the thread that asks; raises RequestError where none does."""
    now = _running.get()
    if now is None:
        raise RequestError(
            "no forward pass of this engine runs here now: ask for rows within a hook of the model, in the thread that "
            "called it"
        )
    return now()


@dataclass(frozen=True)
class PlannedRequests:
    """What `PackRows` are of a plan's unit; ``numbers`` are those of its requests [R], of a product [C, Q, L] laid flat
    (None: from 0 on)."""

    plan: Plan
    unit: int
    numbers: IntArray | None = None

    def __call__(self, pack: Pack) -> PackRows:
        plan, unit = self.plan, self.unit
        values = pack.pair_out.astype(np.int64)
        block = int(plan.core.unit_block[unit])
        if block < 0:
            pair, row, token = _rows_of(plan.contexts, values + int(plan.core.unit_value_begin[unit]))
            return self._numbered(pack, pair, row, token)
        tree, contexts = plan.blocks[block], plan.unit_contexts(unit)
        which, item = np.divmod(values, tree.target_token.size)
        pair, row, token = _rows_of(tree, item)
        order = np.argsort(plan.context_index, kind="stable")  # equal contexts were asked for more than once
        again, given = _joined(plan.context_index[order], contexts[which[pair]])
        query, label = np.divmod(row[again], plan.num_labels)
        query = plan.unit_queries(unit)[query]
        number = (order[given] * plan.num_queries + query) * plan.num_labels + label
        return self._numbered(pack, pair[again], number, token[again])

    def _numbered(self, pack: Pack, pairs: IntArray, requests: IntArray, tokens: IntArray) -> PackRows:
        return PackRows.of(pack, pairs, requests if self.numbers is None else self.numbers[requests], tokens)


def _rows_of(tree: PrefixTree, items: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The scored rows that want each of ``items`` [X]: which of these, the row, and which of its tokens that is."""
    offsets = np.asarray(tree.row_offsets)
    row = np.repeat(np.arange(offsets.size - 1), np.diff(offsets))
    order = np.argsort(tree.row_items, kind="stable")
    which, place = _joined(np.asarray(tree.row_items)[order], items)
    found = order[place]
    return which, row[found], found - offsets[row[found]]


def _joined(keys: IntArray, wanted: IntArray) -> tuple[IntArray, IntArray]:
    """For each of ``wanted`` all places in ``keys``, which rise, that are equal: which of these, and the place."""
    begin, end = (np.searchsorted(keys, wanted, side=side) for side in ("left", "right"))
    counts = end - begin
    which = np.repeat(np.arange(wanted.size), counts)
    return which, np.arange(which.size) + np.repeat(begin - (np.cumsum(counts) - counts), counts)
