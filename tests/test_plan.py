"""Plans, replayed with an integer stack: every packed token sees exactly its prefix, and costs are as predicted."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import filled_rows, requests, rows

from iclperm.engine.plan import ContextPaths, Pack, Plan, plan_product, plan_requests
from iclperm.engine.tree import Rows, build_requests
from iclperm.errors import RequestError
from iclperm.reference.trie import distinct_prefixes, fed_prefixes

continuations = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=3)
pack_sizes = st.integers(8, 40)
unit_sizes = st.integers(1, 200)
kv_slack = st.one_of(st.none(), st.integers(8, 30))

EMPTY_SLOT = -1


class Replay:
    """Executes packs on integers: a key is the token id it was written from, the pool a plain stack of them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.pool = np.full(plan.core.pool_slots, EMPTY_SLOT)
        self.prompts: Counter[tuple[int, ...]] = Counter()
        self.values: dict[int, list[tuple[tuple[int, ...], int] | None]] = {}
        self.tokens = 0
        self.kv_peak = 0

    def run(self, unit: int, held: int) -> tuple[int, int, int]:
        tokens = packs = kv_peak = 0
        self.values[unit] = [None] * int(self.plan.core.unit_num_values[unit])
        for pack in self.plan.packs(unit, held):
            self._pack(pack, self.values[unit])
            tokens, packs, kv_peak = tokens + len(pack), packs + 1, max(kv_peak, pack.held_tokens + len(pack))
        return tokens, packs, kv_peak

    def _pack(self, pack: Pack, values: list[tuple[tuple[int, ...], int] | None]) -> None:
        seen = [self._visible(pack, row) for row in range(len(pack))]
        for row, prefix in enumerate(seen):
            assert len(prefix) == pack.positions[row] + 1, "position is not the number of ancestors"
            assert EMPTY_SLOT not in prefix, "reads a pool slot that nothing has written"
            self.prompts[prefix] += 1
        for row, wanted, out in zip(pack.scored_rows[pack.pair_row], pack.pair_id, pack.pair_out, strict=True):
            assert values[out] is None, "a value is written twice"
            values[out] = (seen[row], int(wanted))
        kept = [
            (slot, pack.token_ids[begin:end].copy())
            for begin, end, slot in zip(pack.retain_begin, pack.retain_end, pack.retain_slot, strict=True)
        ]
        for slot, ids in kept:
            self.pool[slot : slot + ids.size] = ids

    def _visible(self, pack: Pack, row: int) -> tuple[int, ...]:
        visit = int(np.searchsorted(pack.visit_row_offsets, row, side="right")) - 1
        keys: list[int] = []
        for span in range(pack.span_offsets[visit], pack.span_offsets[visit + 1]):
            source = self.pool if pack.span_source[span] == 0 else pack.token_ids
            keys += source[pack.span_begin[span] : pack.span_end[span]].tolist()
        return (*keys, *pack.token_ids[pack.visit_row_offsets[visit] : row + 1].tolist())


def replay_all(plan: Plan) -> Replay:
    replay, held = Replay(plan), 0
    for unit in range(plan.num_units):
        measured = replay.run(unit, held)
        predicted = (plan.core.unit_tokens[unit], plan.core.unit_packs[unit], plan.core.unit_kv_peak[unit])
        assert measured == tuple(map(int, predicted)) == plan.core.predict(unit, held)
        held = plan.core.held_after(unit)
    return replay


def live_slots(packs: list[Pack]) -> list[int]:
    """Pool slots that a pack or a later one reads before they are written again, by going backwards."""
    live: set[int] = set()
    counts = []
    for pack in reversed(packs):
        for begin, end, slot in zip(pack.retain_begin, pack.retain_end, pack.retain_slot, strict=True):
            live -= set(range(slot, slot + end - begin))
        for source, begin, end in zip(pack.span_source, pack.span_begin, pack.span_end, strict=True):
            if source == 0:
                live |= set(range(begin, end))
        counts.append(len(live))
    return counts[::-1]


@given(rows, filled_rows, continuations, pack_sizes, unit_sizes)
def test_what_is_held_covers_what_is_alive_and_no_more_than_the_open_paths(
    contexts: list[list[int]], queries: list[list[int]], labels: list[list[int]], pack: int, unit: int
) -> None:
    plan = plan_product(contexts, queries, labels, pack_tokens=pack, unit_tokens=unit, repeated_share=np.inf)
    packs, held = [], 0
    for number in range(plan.num_units):
        packs += list(plan.packs(number, held))
        held = plan.core.held_after(number)
    for one, alive in zip(packs, live_slots(packs), strict=True):
        assert alive <= one.held_tokens <= max(map(len, contexts)) + max(map(len, queries)) + max(map(len, labels))


def kv_budget(slack: int | None, deepest: int) -> int | None:
    return None if slack is None else deepest + slack


@given(requests, pack_sizes, unit_sizes, kv_slack)
def test_requests_forward_every_distinct_prefix_once(
    pairs: list[tuple[list[int], list[int]]], pack: int, unit: int, slack: int | None
) -> None:
    kv = kv_budget(slack, max(len(c) + len(t) for c, t in pairs))
    data, begins = Rows.of([c + t for c, t in pairs]), np.array([len(c) for c, _ in pairs])
    plan = plan_requests(data, begins, pack_tokens=pack, unit_tokens=unit, kv_tokens=kv)
    replay = replay_all(plan)
    assert set(replay.prompts) == fed_prefixes(pairs)
    assert set(replay.prompts.values()) <= {1}
    assert plan.tokens == plan.tokens_unique == len(fed_prefixes(pairs))
    assert plan.prompt_tokens == sum(len(c) for c in {tuple(c) for c, _ in pairs})
    assert plan.tokens_naive == plan.prompt_tokens + sum(
        len(t) - 1 for _, t in {(tuple(c), tuple(t)) for c, t in pairs}
    )
    assert kv is None or plan.kv_peak_tokens <= kv
    assert all(len(p) <= pack for u in range(plan.num_units) for p in plan.packs(u, 0))
    values = list(itertools.chain.from_iterable(replay.values[u] for u in range(plan.num_units)))
    tree = plan.contexts
    for row, (context, continuation) in enumerate(pairs):
        items = tree.row_items[tree.row_offsets[row] : tree.row_offsets[row + 1]]
        expected = [(tuple(context + continuation[:i]), continuation[i]) for i in range(len(continuation))]
        assert [values[i] for i in items] == expected


def check_product(
    plan: Plan, replay: Replay, contexts: list[list[int]], queries: list[list[int]], labels: list[list[list[int]]]
) -> None:
    """Every (context, query, label) is scored at the right prefixes."""
    seen = set()
    for unit in range(plan.num_units):
        block = plan.blocks[plan.core.unit_block[unit]]
        numbers = plan.unit_contexts(unit)
        values = np.empty(len(replay.values[unit]), object)
        values[:] = replay.values[unit]
        values = values.reshape(len(numbers), -1)
        for place, context in enumerate(numbers):
            ids = next(c for c, number in zip(contexts, plan.context_index, strict=True) if number == context)
            for q, query in enumerate(plan.unit_queries(unit)):
                for label, continuation in enumerate(labels[query]):
                    row = q * plan.num_labels + label
                    items = block.row_items[block.row_offsets[row] : block.row_offsets[row + 1]]
                    prompt = ids + queries[query]
                    assert [values[place, i] for i in items] == [
                        (tuple(prompt + continuation[:i]), continuation[i]) for i in range(len(continuation))
                    ]
                    seen.add((int(context), int(query), label))
    assert len(seen) == plan.num_rows


@given(rows, filled_rows, continuations, pack_sizes, unit_sizes, kv_slack)
def test_product_scores_every_prompt(
    contexts: list[list[int]],
    queries: list[list[int]],
    labels: list[list[int]],
    pack: int,
    unit: int,
    slack: int | None,
) -> None:
    deepest = max(map(len, contexts)) + max(map(len, queries)) + max(map(len, labels))
    kv = kv_budget(slack, deepest)
    plan = plan_product(
        contexts, queries, labels, pack_tokens=pack, unit_tokens=unit, kv_tokens=kv, repeated_share=np.inf
    )
    replay = replay_all(plan)
    check_product(plan, replay, contexts, queries, [labels] * len(queries))
    assert kv is None or plan.kv_peak_tokens <= kv

    context_tokens = len(distinct_prefixes(contexts))
    query_tokens = len(fed_prefixes((q, label) for q in queries for label in labels))
    distinct = {tuple(c) for c in contexts}
    assert plan.num_contexts == len(distinct)
    assert plan.tokens_unique == context_tokens + len(distinct) * query_tokens
    assert plan.prompt_tokens == sum(len(c) + len(q) for c in distinct for q in {tuple(q) for q in queries})
    continued = sum(len(t) - 1 for _, t in {(tuple(q), tuple(t)) for q in queries for t in labels})
    assert plan.tokens_naive == plan.prompt_tokens + len(distinct) * continued
    assert plan.share([*range(plan.num_units)]) == (plan.tokens_naive, plan.tokens_unique)
    assert sum(plan.share([unit])[0] for unit in range(plan.num_units)) == plan.tokens_naive or plan.num_units == 1
    if len(plan.blocks) == 1:
        assert plan.tokens == plan.tokens_unique


@given(rows, filled_rows, continuations, pack_sizes, unit_sizes, st.data())
def test_units_run_alone_or_in_any_order_score_the_same(
    contexts: list[list[int]],
    queries: list[list[int]],
    labels: list[list[int]],
    pack: int,
    unit: int,
    data: st.DataObject,
) -> None:
    plan = plan_product(contexts, queries, labels, pack_tokens=pack, unit_tokens=unit, repeated_share=np.inf)
    replay, held = Replay(plan), 0
    for number in data.draw(st.permutations(range(plan.num_units))):
        measured = replay.run(number, held)
        assert measured == plan.core.predict(number, held)
        held = plan.core.held_after(number)
    check_product(plan, replay, contexts, queries, [labels] * len(queries))


@given(rows, filled_rows, continuations, pack_sizes, pack_sizes, unit_sizes, kv_slack)
def test_a_plan_in_other_packs_has_the_same_units_and_values(
    contexts: list[list[int]],
    queries: list[list[int]],
    labels: list[list[int]],
    pack: int,
    other: int,
    unit: int,
    slack: int | None,
) -> None:
    kv = kv_budget(slack, max(map(len, contexts)) + max(map(len, queries)) + max(map(len, labels)))
    limits = {"unit_tokens": unit, "kv_tokens": kv, "repeated_share": np.inf}
    plan = plan_product(contexts, queries, labels, pack_tokens=pack, **limits)
    repacked = plan.repacked(other)
    assert repacked.pack_tokens == other
    assert (repacked.num_units, repacked.tokens) == (plan.num_units, plan.tokens)
    for number in range(plan.num_units):
        np.testing.assert_array_equal(repacked.unit_contexts(number), plan.unit_contexts(number))
        np.testing.assert_array_equal(repacked.unit_queries(number), plan.unit_queries(number))
        assert repacked.core.held_after(number) == plan.core.held_after(number)
    assert replay_all(repacked).values == replay_all(plan).values
    np.testing.assert_array_equal(
        repacked.core.unit_packs, plan_product(contexts, queries, labels, pack_tokens=other, **limits).core.unit_packs
    )


def replayed_work(plan: Plan) -> tuple[int, int]:
    """Scored rows and query-key pairs, pack by pack."""
    held = scored = pairs = 0
    for unit in range(plan.num_units):
        for pack in plan.packs(unit, held):
            scored += pack.scored_rows.size
            pairs += int(pack.positions.sum()) + len(pack)
        held = plan.core.held_after(unit)
    return scored, pairs


@given(rows, filled_rows, continuations, pack_sizes, unit_sizes)
def test_the_work_of_a_product_is_known_without_its_packs(
    contexts: list[list[int]], queries: list[list[int]], labels: list[list[int]], pack: int, unit: int
) -> None:
    plan = plan_product(contexts, queries, labels, pack_tokens=pack, unit_tokens=unit, repeated_share=np.inf)
    assert (plan.scored_rows, plan.attention_pairs) == replayed_work(plan)


@given(requests, pack_sizes, unit_sizes)
def test_the_work_of_requests_is_known_without_their_packs(
    pairs: list[tuple[list[int], list[int]]], pack: int, unit: int
) -> None:
    data, begins = Rows.of([c + t for c, t in pairs]), np.array([len(c) for c, _ in pairs])
    plan = plan_requests(data, begins, pack_tokens=pack, unit_tokens=unit)
    assert (plan.scored_rows, plan.attention_pairs) == replayed_work(plan)
    assert plan.scored_rows == len({tuple(c + t[:i]) for c, t in pairs for i in range(len(t))})


def test_long_continuations_count_where_prompts_are_short() -> None:
    long = [[*range(500), 1], [*range(1, 501), 1]]
    data = Rows.of([[7, *each] for each in long])
    plan = plan_requests(data, np.array([1, 1]))
    assert (plan.prompt_tokens, plan.tokens_naive, plan.tokens_unique) == (1, 1001, 1001)
    product = plan_product([[7]], [[8]], long)
    assert (product.prompt_tokens, product.tokens_naive, product.tokens_unique) == (2, 1002, 1002)
    assert plan_requests(Rows.of([]), np.empty(0, np.int64)).tokens_naive == 0


def test_no_units_and_repeated_units_are_no_whole_plan() -> None:
    plan = plan_product([[1, 2], [3]], [[4]], [[5]], unit_tokens=1)
    assert plan.num_units == 2
    assert plan.share([]) == (0, 0)
    assert plan.share([0, 1]) == (plan.tokens_naive, plan.tokens_unique) == (5, 5)
    assert plan.share([0, 0]) == (6, 6)


@given(rows, filled_rows, st.data())
def test_labels_may_differ_by_query(contexts: list[list[int]], queries: list[list[int]], data: st.DataObject) -> None:
    label = st.lists(st.integers(0, 3), min_size=1, max_size=2)
    labels = [data.draw(st.lists(label, min_size=2, max_size=2)) for _ in queries]
    plan = plan_product(contexts, queries, labels, pack_tokens=16, unit_tokens=50, repeated_share=np.inf)
    check_product(plan, replay_all(plan), contexts, queries, labels)
    pairs = {(tuple(q), tuple(t)) for q, row in zip(queries, labels, strict=True) for t in row}
    assert plan.tokens_naive == plan.prompt_tokens + plan.num_contexts * sum(len(t) - 1 for _, t in pairs)


@given(filled_rows, filled_rows, continuations, st.data())
def test_context_paths_are_their_marked_prefixes(
    paths: list[list[int]], queries: list[list[int]], labels: list[list[int]], data: st.DataObject
) -> None:
    marks = [data.draw(st.lists(st.integers(0, len(path)), min_size=1, max_size=3)) for path in paths]
    contexts = [path[:mark] for path, depths in zip(paths, marks, strict=True) for mark in depths]
    compact = plan_product(ContextPaths(Rows.of(paths), Rows.of(marks)), queries, labels)
    listed = plan_product(contexts, queries, labels)
    np.testing.assert_array_equal(compact.context_index, listed.context_index)
    assert (compact.tokens, compact.tokens_naive) == (listed.tokens, listed.tokens_naive)
    check_product(compact, replay_all(compact), contexts, queries, [labels] * len(queries))


def test_path_keys_stay_from_unit_to_unit() -> None:
    contexts = [list(range(20)), list(range(40))]
    queries = [[50 + q, 60 + q] for q in range(8)]
    plan = plan_product(contexts, queries, [[1]], unit_tokens=8)
    assert plan.num_units > 1
    assert plan.core.unit_tokens[1:].max() < 40, "a later block of queries forwards the context again"
    assert plan.core.predict(plan.num_units - 1, 0)[0] == plan.core.unit_tokens[-1] + 40, "alone it must"


@given(st.integers(0, 6), st.integers(1, 60), st.integers(1, 400))
def test_blocks_repeat_few_tokens(head: int, num_queries: int, unit: int) -> None:
    queries = [[*range(head), 100 + q, 200 + q, 300] for q in range(num_queries)]
    plan = plan_product([list(range(20))], queries, [[1], [2]], unit_tokens=unit)
    assert plan.tokens <= 1.01 * plan.tokens_unique
    assert head or len(plan.blocks) == min(num_queries, -(-num_queries // max(1, unit // 3)))


BAD_PRODUCTS = [
    ([[1]], [[]], [[1]], "query 0 is empty"),
    ([[1]], [[1], [2]], [[1], []], "continuation 1 of query 0 is empty"),
    ([[1]], [[1], [2]], [[[1], [2]], [[1]]], "query 1 has 1 continuations, query 0 has 2"),
    ([[1]], [[1], [2]], [[[1], [2]]], "continuations are given for 1 queries, but there are 2"),
]


@pytest.mark.parametrize(("contexts", "queries", "labels", "message"), BAD_PRODUCTS)
def test_bad_products_are_named(contexts: list, queries: list, labels: list, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        plan_product(contexts, queries, labels)


def test_budgets_that_cannot_hold_the_work_are_refused() -> None:
    data, begins = Rows.of([list(range(30))]), np.array([29])
    with pytest.raises(ValueError, match="a KV budget of 30 tokens cannot hold the deepest path; it needs at least 37"):
        plan_requests(data, begins, kv_tokens=30)
    with pytest.raises(ValueError, match="pack_tokens is 7; at least 8 are needed"):
        plan_requests(data, begins, pack_tokens=7)
    plan = plan_requests(data, begins)
    with pytest.raises(RequestError, match="unit 1 is not among the plan's 1 units"):
        plan.packs(1)
    assert build_requests(data, begins).num_tokens == plan.tokens
