"""The radix tree against a dictionary trie."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import requests, rows

from iclperm import _core
from iclperm.engine.tree import Rows, build_requests, build_tree, path_to_token, path_tokens
from iclperm.errors import RequestError
from iclperm.reference.trie import distinct_prefixes, fed_prefixes


def end_depth(tree: _core.PrefixTree, node: int) -> int:
    return int(tree.depth[node] + tree.token_offsets[node + 1] - tree.token_offsets[node])


@given(rows)
def test_every_row_is_recovered_and_every_prefix_stored_once(given_rows: list[list[int]]) -> None:
    tree, ends = build_tree(Rows.of(given_rows))
    tree.check()
    assert [path_tokens(tree, int(node)).tolist() for node in ends] == given_rows
    assert tree.num_tokens == len(distinct_prefixes(given_rows))
    paths = {tuple(path_to_token(tree, token)) for token in range(tree.num_tokens)}
    assert paths == distinct_prefixes(given_rows)


@given(rows, st.randoms(use_true_random=False))
def test_order_of_rows_is_irrelevant(given_rows: list[list[int]], random: object) -> None:
    shuffled = list(range(len(given_rows)))
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    tree, ends = build_tree(Rows.of(given_rows))
    other, other_ends = build_tree(Rows.of([given_rows[r] for r in shuffled]))
    for name in ("tokens", "token_offsets", "parent", "depth", "subtree_end"):
        np.testing.assert_array_equal(getattr(tree, name), getattr(other, name))
    np.testing.assert_array_equal(ends[shuffled], other_ends)


@given(rows, st.data())
def test_marks_end_at_nodes_and_nodes_are_needed(given_rows: list[list[int]], data: st.DataObject) -> None:
    marks = [data.draw(st.lists(st.integers(0, len(row)), max_size=4)) for row in given_rows]
    tree, nodes = build_tree(Rows.of(given_rows), Rows.of(marks))
    tree.check()
    marked = [row[:mark] for row, depths in zip(given_rows, marks, strict=True) for mark in depths]
    assert [path_tokens(tree, int(node)).tolist() for node in nodes] == marked
    assert tree.num_tokens == len(distinct_prefixes(marked))
    children = np.bincount(tree.parent[1:], minlength=tree.num_nodes)
    for node in range(1, tree.num_nodes):
        assert node in nodes or children[node] >= 2, "a node that neither branches nor is marked splits an edge"


@given(requests)
def test_targets_are_the_continuation_tokens(pairs: list[tuple[list[int], list[int]]]) -> None:
    tree = build_requests(Rows.of([c + t for c, t in pairs]), np.array([len(c) for c, _ in pairs]))
    tree.check()
    assert tree.num_tokens == len(fed_prefixes(pairs))
    distinct = set(zip(tree.target_token.tolist(), tree.target_id.tolist(), strict=True))
    assert len(distinct) == tree.target_id.size, "a target is stored twice"
    assert (np.diff(tree.target_token) >= 0).all()
    for row, (context, continuation) in enumerate(pairs):
        items = tree.row_items[tree.row_offsets[row] : tree.row_offsets[row + 1]]
        assert tree.target_id[items].tolist() == continuation
        for place, item in enumerate(items):
            assert path_to_token(tree, int(tree.target_token[item])).tolist() == context + continuation[:place]


@given(rows)
def test_intervals_are_the_ancestor_relation(given_rows: list[list[int]]) -> None:
    tree, _ = build_tree(Rows.of(given_rows))
    # token a is on the path of token b iff a <= b < the end of the subtree of a's node
    ends = tree.token_offsets[tree.subtree_end[np.repeat(np.arange(tree.num_nodes), np.diff(tree.token_offsets))]]
    paths = [path_to_token(tree, token).tolist() for token in range(tree.num_tokens)]
    for key, query in itertools.product(range(tree.num_tokens), repeat=2):
        is_prefix = paths[query][: len(paths[key])] == paths[key]
        assert is_prefix == bool(key <= query < ends[key])


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6])
def test_all_orderings_of_k_demonstrations_have_floor_e_factorial_context_ends(k: int) -> None:
    demonstrations = [[10 * i, 10 * i + 1, 7] for i in range(k)]
    orderings = [[t for i in order for t in demonstrations[i]] for order in itertools.permutations(range(k))]
    marks = [[3 * shots for shots in range(k + 1)]] * len(orderings)
    tree, ends = build_tree(Rows.of(orderings), Rows.of(marks))
    assert np.unique(ends).size == tree.num_nodes == math.floor(math.e * math.factorial(k))


@pytest.mark.parametrize("row", [[1.5], [[1]], ["a"], [-1], [2**31]])
def test_rows_that_are_no_token_ids_are_named(row: list[object]) -> None:
    with pytest.raises(RequestError, match="query 1 "):
        Rows.of([[1], row], "query")  # type: ignore[list-item]


def test_the_arrays_of_a_tree_are_frozen() -> None:
    tree, _ = build_tree(Rows.of([[1, 2]]))
    with pytest.raises(ValueError, match="read-only"):
        tree.tokens[0] = 5
