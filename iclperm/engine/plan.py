"""What will be forwarded, in which order: the frozen plan of a product or of arbitrary requests; no torch.

A plan holds the two factors, the tree of contexts and the trees of query blocks, never their product; its packs are
written unit by unit when they run. 64 million prompts plan in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from iclperm import _core
from iclperm.engine.tree import Ids, IntArray, PrefixTree, Rows, TokenArray, build_requests, build_tree
from iclperm.errors import PlanError, RequestError

DEFAULT_PACK_TOKENS = 4096
DEFAULT_UNIT_TOKENS = 1 << 18


@dataclass(frozen=True)
class ContextPaths:
    """Contexts as marked prefixes of a few long rows: context j of row r is its first ``marks[r][j]`` tokens.

    The compact form for k-shot sweeps: P orderings of K demonstrations are P rows with K + 1 marks each, not P(K + 1)
    rows. Contexts are numbered row by row, mark by mark.
    """

    rows: Rows
    marks: Rows

    def __len__(self) -> int:
        return int(self.marks.offsets[-1])


_PACK_DTYPES: dict[str, npt.DTypeLike] = {"span_source": np.uint8, "pair_out": np.int64}  # int32 otherwise


@dataclass(frozen=True)
class LiveRows:
    """Where the keys of R rows lie that are the newest tokens of paths of their own: all in the pool, theirs too.

    A table [``num_lanes``, ``width``] gives the slot of each position of a path in its lane, ``lanes`` [R];
    ``changed_place`` int64 (lane x width + position) and ``changed_slot`` are what is new in it. ``lengths`` [R] are
    positions that have a slot, used or not, and ``shared`` [R] leading positions in common with the row before.
    """

    num_lanes: int
    width: int
    lanes: TokenArray
    lengths: TokenArray
    shared: TokenArray
    changed_place: IntArray
    changed_slot: TokenArray

    def __len__(self) -> int:
        return self.lanes.size


@dataclass(frozen=True)
class Pack:
    """One forward pass: M tokens at their positions, what each sees, and what is read off it.

    ``visit_row_offsets`` int32 [V + 1] cuts the rows into *visits*: consecutive positions of one tree edge, the first
    at ``visit_pos``. A row sees the rows of its visit up to itself, and the visit's ancestors, which
    ``span_offsets`` [V + 1] lists as half-open spans in position order: of pool slots (``span_source`` 0) or of rows of
    this pack (1). After each layer rows ``retain_begin:retain_end`` go to pool slots from ``retain_slot`` on.
    Log-probabilities are wanted of ``pair_id`` at row ``scored_rows[pair_row]``; they belong at ``pair_out`` of the
    unit's values. The first rows may be ``live``: the newest tokens of paths of their own, in no visit; a token id of
    -1 is known to the device alone.
    """

    token_ids: TokenArray
    positions: TokenArray
    visit_row_offsets: TokenArray
    visit_pos: TokenArray
    span_offsets: TokenArray
    span_source: npt.NDArray[np.uint8]
    span_begin: TokenArray
    span_end: TokenArray
    retain_begin: TokenArray
    retain_end: TokenArray
    retain_slot: TokenArray
    scored_rows: TokenArray
    pair_row: TokenArray
    pair_id: TokenArray
    pair_out: IntArray
    held_tokens: int
    live: LiveRows | None = None

    @classmethod
    def of(cls, *, held_tokens: int, live: LiveRows | None = None, **given: Any) -> Pack:
        """A pack of sequences of integers, by the names of its arrays; those that are not given are empty."""
        names = (field.name for field in fields(cls) if field.name not in ("held_tokens", "live"))
        arrays = {name: np.array(given.pop(name, ()), _PACK_DTYPES.get(name, np.int32)) for name in names}
        return cls(**arrays, held_tokens=held_tokens, live=live, **given)  # what is left over is no array of a pack

    def __len__(self) -> int:
        return self.token_ids.size

    @property
    def is_live(self) -> bool:
        """Whether there are live rows and no others."""
        return self.live is not None and len(self.live) == len(self)

    def next_step(self) -> Pack:
        """The pack after one of live rows alone, each a token further."""
        return replace(
            self,
            token_ids=np.full_like(self.token_ids, -1),
            positions=self.positions + np.int32(1),
            held_tokens=self.held_tokens + len(self),
        )


@dataclass(frozen=True)
class LongPath:
    """How a plan runs where the keys and values of its longest path do not fit beside the rest.

    Either way only one layer's lie where they are computed with. ``offload``: all layers' lie in a store (a file on a
    host, the host's memory beside a GPU), and each pack reads its path's. ``recompute``: packs go through the layers
    side by side, up to ``rows`` rows at a time, whose hidden states are held; each such group computes its path anew.
    ``seconds`` is what that is expected to add to the run, ``other_seconds`` what the other way would (None: it is not
    open).
    """

    way: str
    rows: int = 0
    seconds: float = 0.0
    other_seconds: float | None = None

    @property
    def recomputes(self) -> bool:
        return self.way == RECOMPUTE


OFFLOAD, RECOMPUTE = "offload", "recompute"


@dataclass(frozen=True)
class Plan:
    """Units of work over the product contexts x queries x continuations, or over single requests.

    ``context_index`` int64 [C] maps the contexts given to distinct contexts (numbered in tree order), ``num_labels`` L.
    For requests there are no blocks, and ``num_rows`` requests are scored on the context tree itself.
    """

    core: _core.Plan
    contexts: PrefixTree
    blocks: tuple[PrefixTree, ...]
    block_offsets: IntArray  # [B + 1] places in query_order of each block
    query_order: IntArray  # [Q] query numbers, so sorted that a block's queries share what they can
    context_lengths: IntArray  # [C distinct] tokens
    query_lengths: IntArray  # [Q] tokens, 0 for a query equal to an earlier one
    context_index: IntArray
    context_nodes: TokenArray  # [C distinct] nodes of the context tree at which the contexts end
    num_labels: int
    tokens_naive: int  # of distinct prompts one by one, and of each continuation those before its last
    tokens_unique: int
    max_tokens: int  # longest fed path: context + query + continuation but its last token
    max_id: int
    pack_tokens: int
    kv_tokens: int  # most tokens whose keys and values may be alive at once
    unit_tokens: int  # wanted size of a unit
    long_path: LongPath | None = None  # None: the keys and values of a path fit, in all layers
    prompt_tokens: int = 0  # of the naive ones, those of prompts
    label_tokens: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    """[Q] tokens of a query's continuations but their last, equal ones of equal queries once."""

    @property
    def num_units(self) -> int:
        return self.core.num_units

    @property
    def num_contexts(self) -> int:
        """Distinct contexts of a product."""
        return self.context_nodes.size

    @property
    def num_packs(self) -> int:
        return int(self.core.unit_packs.sum())

    @property
    def num_queries(self) -> int:
        return int(self.block_offsets[-1])

    @property
    def num_rows(self) -> int:
        """Scored rows: C_distinct x Q x L of a product, R of requests."""
        if self.blocks:
            return self.num_contexts * self.num_queries * self.num_labels
        return self.contexts.row_offsets.size - 1

    @property
    def tokens(self) -> int:
        """Predicted tokens of an unbroken run of all units."""
        return int(self.core.unit_tokens.sum())

    @property
    def kv_peak_tokens(self) -> int:
        """Predicted most tokens whose keys and values are alive at once."""
        return int(self.core.unit_kv_peak.max(initial=0))

    @property
    def scored_rows(self) -> int:
        """Positions whose logits a run of all units reads; one position serves all labels that are wanted there."""
        if not self.blocks:
            return _distinct_targets(self.contexts)
        return self.num_contexts * sum(map(_distinct_targets, self.blocks))

    @property
    def num_ids(self) -> int:
        """Distinct token ids in a run of all units. O(nodes)."""
        seen = np.zeros(self.max_id + 1, bool)
        for tree in (self.contexts, *self.blocks):
            seen[tree.tokens] = True
        return int(seen.sum())

    @property
    def attention_pairs(self) -> int:
        """Query-key pairs of one head and layer in an unbroken run of all units, sliding windows aside. O(nodes)."""
        # A query token at depth d beneath a context of c tokens sees c + d + 1 keys.
        beneath = self.num_contexts * sum(map(_path_pairs, self.blocks))
        beneath += int(self.context_lengths.sum()) * sum(block.num_tokens for block in self.blocks)
        return _path_pairs(self.contexts) + beneath

    @property
    def scored_pairs(self) -> int:
        """Those of ``attention_pairs`` whose query is a scored row. O(targets)."""
        if not self.blocks:
            return _target_pairs(self.contexts)
        beneath = self.num_contexts * sum(map(_target_pairs, self.blocks))
        return beneath + int(self.context_lengths.sum()) * sum(map(_distinct_targets, self.blocks))

    @property
    def plain_tokens(self) -> int:
        """Tokens that are forwarded prompt by prompt, without a tree: for each scored row all before it, and itself."""
        return self.scored_pairs

    def unit_pairs(self) -> tuple[IntArray, npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Of a product what each unit adds, [U] each: scored rows, ``attention_pairs``, and ``scored_pairs`` of these.

        The context tokens of a unit count as lying at the mean length of its contexts. O(nodes of the blocks + U).
        """
        core, block = self.core, self.core.unit_block
        ends = np.append(0, np.cumsum(self.context_lengths))
        contexts = (core.unit_context_end - core.unit_context_begin).astype(np.int64)
        prefix = ends[core.unit_context_end] - ends[core.unit_context_begin]
        tokens, within, rows, rows_within = (
            np.array([count(tree) for tree in self.blocks], np.int64)[block]
            for count in (lambda tree: tree.num_tokens, _path_pairs, _distinct_targets, _target_pairs)
        )
        own = core.unit_tokens - contexts * tokens
        pairs = contexts * within + prefix * tokens + own * prefix / np.maximum(contexts, 1)
        return contexts * rows, pairs, (contexts * rows_within + prefix * rows).astype(np.float64)

    def repacked(self, pack_tokens: int) -> Plan:
        """The same units in packs of at most ``pack_tokens`` (at least 8); what they give differs in rounding at most.

        Cost O(packs), as for a new plan of the same factors.
        """
        core = _core.Plan(
            self.contexts,
            self.context_nodes.tolist(),
            list(self.blocks),
            pack_tokens=pack_tokens,
            kv_tokens=self.kv_tokens,
            unit_tokens=self.unit_tokens,
        )
        if not all(np.array_equal(getattr(core, name), getattr(self.core, name)) for name in _UNIT_BORDERS):
            raise PlanError(
                f"units in packs of {pack_tokens} tokens have other borders than in packs of {self.pack_tokens}; "
                "this is a defect of iclperm, please report it"
            )
        return replace(self, core=core, pack_tokens=pack_tokens)

    def unit_contexts(self, unit: int) -> IntArray:
        """Distinct-context numbers scored by a unit, int64 [c]."""
        self._check(unit)
        return np.arange(self.core.unit_context_begin[unit], self.core.unit_context_end[unit], dtype=np.int64)

    def unit_queries(self, unit: int) -> IntArray:
        """Query numbers of a unit's block, int64 [q]."""
        self._check(unit)
        block = int(self.core.unit_block[unit])
        return self.query_order[self.block_offsets[block] : self.block_offsets[block + 1]]

    def given_contexts(self, contexts: IntArray) -> IntArray:
        """Places among the contexts given, rising, of distinct contexts that follow each other."""
        order = self._context_order
        borders = np.searchsorted(self.context_index[order], [contexts[0], contexts[-1] + 1])
        return np.sort(order[slice(*borders)])

    @cached_property
    def _context_order(self) -> IntArray:
        return np.argsort(self.context_index, kind="stable")

    def share(self, units: Sequence[int]) -> tuple[int, int]:
        """Naive and distinct tokens of some units, each counted as if the unit before it had just run."""
        if not units:
            return 0, 0
        if not self.blocks or (len(units) == self.num_units and len(set(units)) == self.num_units):
            return self.tokens_naive, self.tokens_unique
        naive = 0
        for unit in units:
            contexts, queries = self.unit_contexts(unit), self.unit_queries(unit)
            lengths = self.query_lengths[queries]
            naive += int(self.context_lengths[contexts].sum()) * int((lengths > 0).sum())
            naive += contexts.size * int(lengths.sum() + self.label_tokens[queries].sum())
        return naive, int(self.core.unit_tokens[list(units)].sum())

    def packs(self, unit: int, held: int = 0) -> Iterator[Pack]:
        """The packs of a unit when the path to context node ``held`` is in the pool."""
        self._check(unit)
        return (Pack(**arrays) for arrays in self.core.packs(unit, held))

    def _check(self, unit: int) -> None:
        if not 0 <= unit < self.num_units:
            raise RequestError(f"unit {unit} is not among the plan's {self.num_units} units")


def plan_product(
    contexts: Sequence[Ids] | ContextPaths,
    queries: Sequence[Ids],
    continuations: Sequence[Ids] | Sequence[Sequence[Ids]],
    *,
    pack_tokens: int = DEFAULT_PACK_TOKENS,
    kv_tokens: int | None = None,
    unit_tokens: int = DEFAULT_UNIT_TOKENS,
    repeated_share: float = 0.005,
) -> Plan:
    """Plan every context before every query with every continuation, each distinct token once.

    ``continuations`` is one list of L token rows for all queries, or one such list a query. Contexts may be empty if
    queries are not. Large query sets are cut into blocks, so that a unit is about ``unit_tokens``; blocks grow until
    the tokens that open the queries of several blocks add at most ``repeated_share``. Raises RequestError for an empty
    query or continuation, naming it. Cost O(tokens of the factors + packs); the product is never built.
    """
    paths = contexts if isinstance(contexts, ContextPaths) else _whole_rows(contexts)
    query_rows = Rows.of(queries, "query")
    labels = _labels_by_query(continuations, len(query_rows))
    num_labels = len(labels[0]) if labels else 0
    _refuse_empty(query_rows, labels)

    tree, context_nodes = build_tree(paths.rows, paths.marks)
    ends, context_index = np.unique(context_nodes, return_inverse=True)
    context_lengths = (tree.depth[ends] + np.diff(tree.token_offsets)[ends]).astype(np.int64)
    order, query_lengths = _sorted_queries(query_rows)
    rows, begins = _labelled(query_rows, labels, order)
    whole = build_requests(rows, begins)
    size = _block_size(tree, ends, whole.num_tokens, len(query_rows), unit_tokens)
    while True:
        block_offsets = np.append(np.arange(0, max(1, len(query_rows)), size, dtype=np.int64), len(query_rows))
        if block_offsets.size == 2:
            blocks: tuple[PrefixTree, ...] = (whole,)
            break
        borders = pairwise((block_offsets * num_labels).tolist())
        blocks = tuple(build_requests(rows.part(*border), begins[slice(*border)]) for border in borders)
        if sum(block.num_tokens for block in blocks) <= (1 + repeated_share) * whole.num_tokens:
            break
        size *= 2
    label_tokens = np.zeros(len(query_rows), np.int64)
    label_tokens[order] = _continuation_tokens(whole, rows, begins).reshape(len(query_rows), num_labels).sum(axis=1)
    prompt_tokens = int(context_lengths.sum()) * int((query_lengths > 0).sum())
    prompt_tokens += int(ends.size) * int(query_lengths.sum())
    kv_limit = _UNBOUNDED if kv_tokens is None else kv_tokens
    core = _core.Plan(
        tree,
        ends.tolist(),
        list(blocks),
        pack_tokens=pack_tokens,
        kv_tokens=kv_limit,
        unit_tokens=unit_tokens,
    )
    return Plan(
        core=core,
        contexts=tree,
        blocks=blocks,
        block_offsets=block_offsets,
        query_order=order,
        context_lengths=context_lengths,
        query_lengths=query_lengths,
        label_tokens=label_tokens,
        context_index=context_index.astype(np.int64),
        context_nodes=ends,
        num_labels=num_labels,
        prompt_tokens=prompt_tokens,
        tokens_naive=prompt_tokens + int(ends.size) * int(label_tokens.sum()),
        tokens_unique=tree.num_tokens + int(ends.size) * whole.num_tokens,
        max_tokens=tree.max_depth + whole.max_depth,
        max_id=max(_max_id(tree), _max_id(whole)),
        pack_tokens=pack_tokens,
        kv_tokens=kv_limit,
        unit_tokens=unit_tokens,
    )


def plan_requests(
    rows: Rows,
    score_begin: IntArray,
    *,
    pack_tokens: int = DEFAULT_PACK_TOKENS,
    kv_tokens: int | None = None,
    unit_tokens: int = DEFAULT_UNIT_TOKENS,
) -> Plan:
    """Plan arbitrary requests: row r is context and continuation, the latter from ``score_begin[r]`` >= 1 on."""
    tree = build_requests(rows, score_begin)
    kv_limit = _UNBOUNDED if kv_tokens is None else kv_tokens
    core = _core.Plan(
        tree,
        [],
        [],
        pack_tokens=pack_tokens,
        kv_tokens=kv_limit,
        unit_tokens=unit_tokens,
    )
    _, first = np.unique(tree.target_token[tree.row_items[tree.row_offsets[:-1]]], return_index=True)
    prompt_tokens = int(np.asarray(score_begin)[first].sum())  # a prompt is known by its last token in the tree
    return Plan(
        core=core,
        contexts=tree,
        blocks=(),
        block_offsets=np.zeros(1, np.int64),
        query_order=np.empty(0, np.int64),
        context_lengths=np.empty(0, np.int64),
        query_lengths=np.empty(0, np.int64),
        context_index=np.empty(0, np.int64),
        context_nodes=np.empty(0, np.int32),
        num_labels=0,
        prompt_tokens=prompt_tokens,
        tokens_naive=prompt_tokens + int(_continuation_tokens(tree, rows, score_begin).sum()),
        tokens_unique=tree.num_tokens,
        max_tokens=tree.max_depth,
        max_id=_max_id(tree),
        pack_tokens=pack_tokens,
        kv_tokens=kv_limit,
        unit_tokens=unit_tokens,
    )


_UNBOUNDED = int(np.iinfo(np.int64).max)
_UNIT_BORDERS = ("unit_leaf_begin", "unit_leaf_end", "unit_block", "unit_context_begin", "unit_context_end",
                 "unit_value_begin", "unit_num_values")  # fmt: skip


def _distinct_targets(tree: PrefixTree) -> int:
    """Tokens of a tree whose logits are read; targets are sorted by token."""
    return int(np.count_nonzero(np.diff(tree.target_token, prepend=-1)))


def _path_pairs(tree: PrefixTree) -> int:
    """Pairs of a tree's tokens with the tokens on their path, themselves included."""
    length = np.diff(tree.token_offsets)
    return int((length * tree.depth + length * (length + 1) // 2).sum())


def _target_pairs(tree: PrefixTree) -> int:
    """Pairs of the tokens whose logits are read with the tokens on their path, themselves included."""
    tokens = np.unique(tree.target_token)
    nodes = np.searchsorted(tree.token_offsets, tokens, side="right") - 1
    return int((tree.depth[nodes] + tokens - tree.token_offsets[nodes] + 1).sum())


def _whole_rows(contexts: Sequence[Ids]) -> ContextPaths:
    rows = Rows.of(contexts, "context")
    return ContextPaths(rows, Rows(rows.lengths.astype(np.int32), np.arange(len(rows) + 1, dtype=np.int64)))


def _labels_by_query(continuations: Sequence[Any], num_queries: int) -> list[list[TokenArray]]:
    """Continuation rows of every query; one shared list is the same list object for all queries."""
    first: Any = continuations[0] if len(continuations) else ()
    nested = isinstance(first, Sequence | np.ndarray) and len(first) > 0 and np.ndim(first[0]) == 1
    if not nested:
        shared = Rows.of(continuations, "continuation")
        return [[shared[label] for label in range(len(shared))]] * num_queries
    if len(continuations) != num_queries:
        raise RequestError(f"continuations are given for {len(continuations)} queries, but there are {num_queries}")
    by_query = []
    for query, labels in enumerate(continuations):
        rows = Rows.of(labels, f"query {query} continuation")
        if len(rows) != len(continuations[0]):
            raise RequestError(f"query {query} has {len(rows)} continuations, query 0 has {len(continuations[0])}")
        by_query.append([rows[label] for label in range(len(rows))])
    return by_query


def _refuse_empty(queries: Rows, labels: list[list[TokenArray]]) -> None:
    empty = np.flatnonzero(queries.lengths == 0)
    if empty.size:
        raise RequestError(f"query {empty[0]} is empty; a product needs at least one token a query")
    for query, row in enumerate(labels):
        if query and row is labels[0]:
            continue
        for label, ids in enumerate(row):
            if not ids.size:
                raise RequestError(f"continuation {label} of query {query} is empty; give at least one token to score")


def _sorted_queries(queries: Rows) -> tuple[IntArray, IntArray]:
    """Query numbers in lexicographic order of their ids, and each query's length, 0 where it repeats another."""
    _, nodes = build_tree(queries)
    lengths = np.zeros(len(queries), np.int64)
    _, first = np.unique(nodes, return_index=True)
    lengths[first] = queries.lengths[first]
    return np.argsort(nodes, kind="stable").astype(np.int64), lengths


def _labelled(queries: Rows, labels: list[list[TokenArray]], order: IntArray) -> tuple[Rows, IntArray]:
    """Rows query + continuation, label by label, of the queries in the order given; where each continuation begins."""
    parts = [part for q in order.tolist() for label in labels[q] for part in (queries[q], label)]
    lengths = np.array([part.size for part in parts], np.int64).reshape(-1, 2)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths.sum(axis=1), out=offsets[1:])
    tokens = np.concatenate(parts) if parts else np.empty(0, np.int32)
    return Rows(tokens, offsets), lengths[:, 0].copy()


def _continuation_tokens(tree: PrefixTree, rows: Rows, begins: IntArray) -> IntArray:
    """Of each row's continuation the tokens but the last [R], 0 where an earlier row has the same after the same."""
    last = tree.row_items[tree.row_offsets[1:] - 1]
    keys = np.stack([np.asarray(begins, np.int64), tree.target_id[last], tree.target_token[last]])  # tell the whole row
    order = np.lexsort(keys)
    is_first = np.append(True, (np.diff(keys[:, order]) != 0).any(axis=0))[: len(rows)]
    tokens = np.zeros(len(rows), np.int64)
    tokens[order[is_first]] = (rows.lengths - begins - 1)[order[is_first]]
    return tokens


def _block_size(tree: PrefixTree, ends: TokenArray, query_tokens: int, num_queries: int, unit_tokens: int) -> int:
    """Queries a block, so that one leaf path with one block is about ``unit_tokens``."""
    leaves = np.flatnonzero(tree.subtree_end == np.arange(1, tree.num_nodes + 1))
    owned = np.diff(np.searchsorted(ends, leaves, side="right"), prepend=0).max(initial=1)
    per_query = max(1.0, float(owned) * query_tokens / max(1, num_queries))
    return int(np.clip(unit_tokens // per_query, 1, max(1, num_queries)))


def _max_id(tree: PrefixTree) -> int:
    return max(int(tree.tokens.max(initial=0)), int(tree.target_id.max(initial=0)))
