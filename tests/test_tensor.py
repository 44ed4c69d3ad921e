"""The one pass over the tensor: against its oracle, in blocks from everywhere, and within its memory."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tolerances import TOLERANCES

from iclperm import stats
from iclperm.errors import DataError, RequestError
from iclperm.reference import paired as reference
from iclperm.stats import _kernels, tensor
from iclperm.stats.limits import LIMITS, ComputeLimits

Array = npt.NDArray[Any]

sizes = st.integers(1, 5)
tensors = st.tuples(sizes, sizes, st.integers(1, 3), st.integers(1, 20)).flatmap(
    lambda shape: hnp.arrays(np.uint8, shape, elements=st.integers(0, 1))
)
seeds = st.integers(0, 2**32 - 1)
NUMBA = ComputeLimits(numba_from=1, tile_bytes=16, task_permutations=1, threads=3)
"""Numba for the smallest tensors, in small tiles, by three threads."""
both_ways = pytest.mark.parametrize("limits", [LIMITS, NUMBA], ids=["numpy", "numba"])
repeated_example = settings(max_examples=40, deadline=None)  # the first call compiles

CLOSE = TOLERANCES["incomplete answers"]["float64"]


def answered(shape: tuple[int, ...], seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 2, shape, dtype=np.uint8)


def drawn_state(shape: tuple[int, ...], seed: int) -> Array:
    return (np.random.default_rng(seed).random(shape) < 0.02).astype(np.uint8) * 2


def same(one: tensor.TensorSums, other: tensor.TensorSums) -> bool:
    """To the last bit."""
    for name in ("usable", "right", "by_set", "squares"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    np.testing.assert_array_equal(one.accuracy.values, other.accuracy.values)
    return one.accuracy[1:] == other.accuracy[1:]


class TestKernels:
    @given(tensors, seeds, st.integers(0, 1000))
    @repeated_example
    def test_segment_sums_count_like_the_oracle(self, correct: Array, seed: int, most: int) -> None:
        generator, num_queries = np.random.default_rng(seed), correct.shape[-1]
        edges = np.unique([0, num_queries, *generator.integers(0, num_queries + 1, 3)])
        weights = generator.integers(0, most + 1, num_queries)
        weights[0] += 1
        expected = reference.segment_sums(correct, edges.tolist(), weights.tolist())
        for short in (0, 200):  # by either loop
            limits = replace(NUMBA, short_segment=short)
            sums, is_binary = _kernels.segment_sums(correct.reshape(-1, num_queries), edges, weights, limits)
            np.testing.assert_array_equal(sums.reshape(expected.shape), expected)
            assert is_binary

    @given(tensors, seeds)
    @repeated_example
    def test_planes_count_like_the_oracle(self, correct: Array, seed: int) -> None:
        usable = np.random.default_rng(seed).random(correct.shape[-1]) < 0.8
        _, by_set, by_permutation, _, squares = reference.tensor_sums(correct, usable.tolist())
        for keep in (False, True):
            found = _kernels.crossed_planes(correct, usable, keep, NUMBA)
            np.testing.assert_array_equal(found[0], by_set)
            np.testing.assert_array_equal(found[1], squares)
        np.testing.assert_array_equal(found[2], by_permutation)

    @given(tensors, seeds)
    @repeated_example
    def test_any_by_query_and_is_binary(self, correct: Array, seed: int) -> None:
        rows = drawn_state(correct.shape, seed).reshape(-1, correct.shape[-1])
        np.testing.assert_array_equal(_kernels.any_by_query(rows, NUMBA), rows.any(axis=0))
        assert _kernels.is_binary(correct, NUMBA)

    @pytest.mark.parametrize("num_queries", [1, 7, 8, 1000, 2041, 5000])
    def test_long_rows_fill_no_lane_beyond_what_it_holds(self, num_queries: int) -> None:
        rows = np.ones((3, num_queries), np.uint8)
        weights = np.full(num_queries, 1000)
        sums, _ = _kernels.segment_sums(rows, np.array([0, num_queries]), weights)
        assert (sums == 1000 * num_queries).all()
        edges = np.unique(np.linspace(0, num_queries, 300).astype(int))
        sums, _ = _kernels.segment_sums(rows, edges, weights)
        assert (sums == 1000 * np.diff(edges)).all()

    def test_many_sets_and_permutations_fill_no_byte_beyond_what_it_holds(self) -> None:
        ones = np.ones((255, 600, 1, 2), np.uint8)
        by_set, squares, by_permutation = _kernels.crossed_planes(ones, np.ones(2, np.bool_), True)
        assert (by_set == 600).all()
        assert (squares == 2 * 255**2).all()
        assert (by_permutation == 255).all()
        with pytest.raises(ValueError, match="at most 255 sets, got 256"):
            _kernels.crossed_planes(np.ones((256, 1, 1, 1), np.uint8), np.ones(1, np.bool_))

    @pytest.mark.parametrize("place", [0, 5, 12, -1])
    def test_a_value_but_0_and_1_is_seen_anywhere(self, place: int) -> None:
        rows = np.zeros((2, 7), np.uint8)
        rows.reshape(-1)[place] = 2
        assert not _kernels.is_binary(rows)
        assert not _kernels.segment_sums(rows, np.array([0, 7]), np.ones(7, np.int64))[1]

    def test_sums_beyond_four_bytes_are_exact(self) -> None:
        weights = np.full(9, (1 << 31) - 1)
        sums, _ = _kernels.segment_sums(np.ones((2, 9), np.uint8), np.array([0, 9]), weights)
        assert sums.dtype == np.int64
        assert (sums == weights.sum()).all()

    def test_compiles_where_nothing_can_be_kept(self, tmp_path: Path) -> None:
        """A package in a folder that cannot be written, without any other cache."""
        source = Path(_kernels.__file__).read_text(encoding="utf-8")
        (tmp_path / "kernels_copy.py").write_text(source, encoding="utf-8")
        script = """
            import sys, numba.core.caching as caching
            def refuse(*_): raise RuntimeError("cannot cache function: no locator available")
            caching.FunctionCache.__init__ = refuse
            sys.path.insert(0, sys.argv[1])
            import numpy, kernels_copy
            print(kernels_copy.is_binary(numpy.ones((4, 8), numpy.uint8)))
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], capture_output=True, text=True, check=True
        )
        assert done.stdout == "True\n"


class TestTensorSums:
    @both_ways
    @given(correct=tensors, seed=seeds)
    @repeated_example
    def test_agree_with_the_oracle(self, limits: ComputeLimits, correct: Array, seed: int) -> None:
        generator = np.random.default_rng(seed)
        state, weights = drawn_state(correct.shape, seed), generator.integers(1, 5, correct.shape[-1])
        usable = ~state.any(axis=(0, 1, 2))
        found = tensor.tensor_sums(correct, state, weights, limits=limits)
        right, by_set, _, by_query, squares = reference.tensor_sums(correct, usable.tolist())
        np.testing.assert_array_equal(found.usable, usable)
        np.testing.assert_array_equal(found.right, right)
        np.testing.assert_array_equal(found.by_set, by_set)
        np.testing.assert_array_equal(found.by_query, by_query)
        np.testing.assert_array_equal(found.squares, squares)
        expected = stats.accuracy(correct, state, weights, limits=limits)
        np.testing.assert_allclose(found.accuracy.values, expected.values, rtol=0, atol=CLOSE)
        assert found.accuracy[1:] == expected[1:]

    @both_ways
    def test_curve_and_components_are_those_of_the_whole_tensor(self, limits: ComputeLimits) -> None:
        correct, state = answered((4, 6, 3, 40)), drawn_state((4, 6, 3, 40), 1)
        weights = np.random.default_rng(2).integers(1, 4, 40)
        expected = stats.curve(correct, state, weights)
        found = tensor.tensor_sums(correct, state, weights, limits=limits)
        for got, want in zip(found.curve(), expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=CLOSE)
        assert found.components() == [
            stats.variance_components(correct[:, :, k], state[:, :, k], weights=weights) for k in range(3)
        ]
        complete = tensor.tensor_sums(correct, None, weights, limits=limits)
        for got, want in zip(complete.curve(), stats.curve(correct, None, weights), strict=True):
            np.testing.assert_array_equal(got, want)
        assert complete.components() == [stats.variance_components(correct[:, :, k]) for k in range(3)]

    def test_large_tensors_take_the_numba_loops(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[str] = []
        for name in ("segment_sums", "crossed_planes", "crossed_sums", "any_by_query", "is_binary"):
            loop = getattr(_kernels, name)

            def counted(*arguments: Any, loop: Any = loop, name: str = name) -> Any:
                calls.append(name)
                return loop(*arguments)

            monkeypatch.setattr(_kernels, name, counted)
        correct = answered((2, 3, 2, 8))
        tensor.tensor_sums(correct, np.zeros_like(correct), limits=NUMBA)
        assert calls == ["any_by_query", "segment_sums", "crossed_planes"]
        calls.clear()
        stats.accuracy(correct, limits=NUMBA)
        assert calls == ["segment_sums"]  # the check for 0 and 1 is no pass of its own
        calls.clear()
        stats.variance_components(correct[:, :, 0].copy(), limits=NUMBA)
        assert calls == ["is_binary", "crossed_sums"]

    @both_ways
    def test_permuting_queries_with_their_weights_changes_nothing(self, limits: ComputeLimits) -> None:
        correct, state = answered((3, 4, 2, 30)), drawn_state((3, 4, 2, 30), 3)
        generator = np.random.default_rng(4)
        weights, order = generator.integers(1, 9, 30), generator.permutation(30)
        for states, moved_states in ((None, None), (state, state[..., order])):
            found = tensor.tensor_sums(correct, states, weights, limits=limits)
            moved = tensor.tensor_sums(correct[..., order], moved_states, weights[order], limits=limits)
            np.testing.assert_array_equal(found.squares, moved.squares)
            np.testing.assert_allclose(found.accuracy.values, moved.accuracy.values, rtol=0, atol=CLOSE)
            for one, other in zip(found.components(), moved.components(), strict=True):
                np.testing.assert_allclose(one.sigma2, other.sigma2, rtol=0, atol=CLOSE)

    @both_ways
    @pytest.mark.parametrize("kind", [np.uint8, np.int64, np.int8])
    def test_names_a_value_that_is_not_binary(self, limits: ComputeLimits, kind: type[np.generic]) -> None:
        correct = answered((2, 3, 2, 9)).astype(kind)
        correct[1, 2, 1, 8] = 7
        segments = partial(tensor.segment_sums, edges=[0, 9])
        for call in (tensor.tensor_sums, tensor.crossed_sums, stats.accuracy, segments):
            with pytest.raises(RequestError, match="correct must hold only 0 and 1, found 7"):
                call(correct, limits=limits)

    def test_more_sets_than_a_byte_counts(self) -> None:
        correct = answered((300, 2, 1, 3))
        usable = np.ones(3, np.bool_)
        found = tensor.tensor_sums(correct, limits=NUMBA)
        np.testing.assert_array_equal(found.squares, (correct.sum(axis=0, dtype=int) ** 2).sum(axis=-1))
        np.testing.assert_array_equal(found.right, correct @ usable.astype(int))
        summed = tensor.crossed_sums(correct, limits=NUMBA)
        np.testing.assert_array_equal(summed.by_permutation, correct.sum(axis=0, dtype=int))

    def test_degenerate_shapes(self) -> None:
        one = tensor.tensor_sums(np.ones((1, 1, 1, 1), np.uint8))
        assert one.accuracy.values.item() == 1
        with pytest.raises(RequestError, match="S = 1, P = 1, Q = 1"):
            one.components()
        nothing = tensor.tensor_sums(np.ones((2, 2, 1, 3), np.uint8), np.ones((2, 2, 1, 3), np.uint8))
        assert np.isnan(nothing.accuracy.values).all()
        assert nothing.accuracy[1:] == (1.0, 0)
        assert nothing.squares.sum() == nothing.right.sum() == 0
        flat = tensor.tensor_sums(answered((3, 4, 5)))
        np.testing.assert_array_equal(flat.right, answered((3, 4, 5)).sum(-1)[..., None])

    @pytest.mark.parametrize("weights", [[1.5, 1], [-1, 1], [0, 0], [1], [1 << 31, 1]])
    def test_refuses_weights(self, weights: list[float]) -> None:
        with pytest.raises(RequestError, match="weights must"):
            tensor.tensor_sums(np.ones((2, 2, 2), np.uint8), weights=weights)

    def test_refuses_other_arrays(self) -> None:
        with pytest.raises(RequestError, match=r"\[S, P, K, Q\] or \[S, P, Q\], got \[3\]"):
            tensor.tensor_sums(np.ones(3, np.uint8))
        with pytest.raises(RequestError, match="bool or integer 0 and 1, got float64"):
            tensor.tensor_sums(np.ones((2, 2, 2)))
        with pytest.raises(RequestError, match="its own state"):
            tensor.tensor_sums(tensor.ArrayBlocks(np.ones((2, 2, 2), np.uint8)), np.zeros((2, 2, 2)))


SMALL_BLOCKS = ComputeLimits(block_bytes=1000)
"""Blocks of four permutations, each of which has 222 bytes."""


class TestBlocks:
    @pytest.fixture
    def correct(self) -> Array:
        return answered((3, 11, 2, 37), 5)

    @pytest.fixture
    def state(self) -> Array:
        return drawn_state((3, 11, 2, 37), 6)

    @both_ways
    def test_every_source_gives_the_same_bits(
        self, limits: ComputeLimits, correct: Array, state: Array, tmp_path: Path
    ) -> None:
        weights, limits = (
            np.random.default_rng(7).integers(1, 6, 37),
            replace(limits, block_bytes=SMALL_BLOCKS.block_bytes),
        )
        whole = tensor.tensor_sums(correct, state, weights)
        np.save(tmp_path / "correct.npy", correct)
        np.save(tmp_path / "bool.npy", correct.astype(bool))
        np.save(tmp_path / "state.npy", state)
        strided = np.repeat(correct, 2, axis=3)[..., ::2]
        sources = [
            (correct, state),
            (strided, state),
            (correct.astype(np.int64), state),
            (np.asfortranarray(correct), state),
            (np.load(tmp_path / "correct.npy", mmap_mode="r"), tmp_path / "state.npy"),
            (tmp_path / "correct.npy", state),
            (tmp_path / "bool.npy", tmp_path / "state.npy"),
            (str(tmp_path / "correct.npy"), str(tmp_path / "state.npy")),
        ]
        for source, beside in sources:
            assert same(tensor.tensor_sums(source, beside, weights, limits=limits), whole)

    def test_blocks_cover_every_permutation_once(self, correct: Array, tmp_path: Path) -> None:
        np.save(tmp_path / "correct.npy", correct)
        for source in (
            tensor.FileBlocks(tmp_path / "correct.npy", limits=SMALL_BLOCKS),
            tensor.ArrayBlocks(correct.astype(np.int8), limits=SMALL_BLOCKS),
        ):
            pieces = [(block.permutations, block.correct.copy()) for block in source.blocks()]
            assert [piece[0] for piece in pieces] == [(0, 4), (4, 8), (8, 11)]
            np.testing.assert_array_equal(np.concatenate([piece[1] for piece in pieces], axis=1), correct)

    def test_a_split_of_a_run_is_never_spread_out(self) -> None:
        generator = np.random.default_rng(8)
        prediction, gold = generator.integers(-1, 3, (20, 37)).astype(np.int8), generator.integers(0, 3, 37)
        context_of = generator.integers(0, 20, (3, 11, 2))
        context_of.reshape(-1)[:20] = np.arange(20)
        context_state = np.where(prediction < 0, 1, 0).astype(np.uint8)
        context_state[1:, 5:] = prediction[1:, 5:] = 0
        items: Any = SimpleNamespace(
            gold=gold,
            context_of=context_of,
            context_state=context_state,
            is_right=lambda contexts, out: np.equal(prediction[contexts], gold, out=out),
        )
        correct, state = (prediction[context_of] == gold).view(np.uint8), context_state[context_of]
        assert same(tensor.tensor_sums(items, limits=SMALL_BLOCKS), tensor.tensor_sums(correct, state))

    def test_contexts_of_no_cell_spoil_no_query(self) -> None:
        items: Any = SimpleNamespace(
            gold=np.zeros(2, np.int64),
            context_of=np.zeros((2, 2, 1), np.int64),
            is_right=lambda contexts, out: out.fill(False),
            context_state=np.array([[0, 0], [1, 1]], np.uint8),
        )
        assert tensor.tensor_sums(items).usable.all()

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (np.ones((2, 2, 2)), r"uint8 or bool .* got float64 \[2, 2, 2\]"),
            (np.ones(3, np.uint8), r"got uint8 \[3\]"),
            (np.asfortranarray(np.ones((2, 3, 4), np.uint8)), "Fortran order"),
            (b"no array", "not a .npy file"),
            (b"", "not a .npy file"),
            (b"\x93NUMPY\x01\x00\x88\x13" + b"(" * 5000, "not a .npy file"),
        ],
    )
    def test_refuses_other_files(self, content: Any, message: str, tmp_path: Path) -> None:
        path = tmp_path / "file.npy"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            np.save(path, content)
        with pytest.raises(DataError, match=message):
            tensor.tensor_sums(path)

    def test_a_file_that_was_cut_is_refused(self, correct: Array, tmp_path: Path) -> None:
        path = tmp_path / "correct.npy"
        np.save(path, correct)
        source = tensor.FileBlocks(path, limits=SMALL_BLOCKS)
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(DataError, match="became shorter"):
            list(source.blocks())
        with pytest.raises(DataError, match=r"not a \.npy file"):
            tensor.tensor_sums(path)

    def test_objects_are_never_unpickled(self, tmp_path: Path) -> None:
        np.save(tmp_path / "objects.npy", np.array([[[{}]]], dtype=object), allow_pickle=True)
        with pytest.raises(DataError, match=r"not a \.npy file"):
            tensor.tensor_sums(tmp_path / "objects.npy")
        np.savez(tmp_path / "two.npz", np.ones((2, 2, 2), np.uint8))
        with pytest.raises(DataError, match=r"not a \.npy file"):
            tensor.tensor_sums(tmp_path / "two.npz")


class TestCrossedAndSegmentSums:
    @both_ways
    def test_crossed_sums_agree_with_the_oracle(self, limits: ComputeLimits) -> None:
        correct = answered((3, 5, 2, 9), 9)
        right, by_set, by_permutation, by_query, _ = reference.tensor_sums(correct, [True] * 9)
        for source in (correct, np.asfortranarray(correct)):
            found = tensor.crossed_sums(source, limits=limits)
            expected = (right, by_set, by_permutation, by_query)
            for got, want in zip(found, expected, strict=True):
                np.testing.assert_array_equal(got, want)
            assert found.by_permutation.dtype == np.uint8

    @both_ways
    def test_segment_sums(self, limits: ComputeLimits) -> None:
        correct, weights = answered((3, 5, 9), 10), np.arange(9)
        found = tensor.segment_sums(correct, [0, 2, 3, 9], weights, limits=limits)
        np.testing.assert_array_equal(found, reference.segment_sums(correct, [0, 2, 3, 9], weights.tolist()))
        assert found.dtype == np.int32
        whole = tensor.segment_sums(correct, [0, 9], limits=limits)
        np.testing.assert_array_equal(whole[..., 0], correct.sum(axis=-1))
        np.testing.assert_array_equal(found.sum(axis=-1), correct @ weights)

    @pytest.mark.parametrize("edges", [[0], [1, 9], [0, 8], [0, 3, 3, 9], [0, 5, 2, 9], [0.0, 9.0]])
    def test_refuses_edges(self, edges: list[int]) -> None:
        with pytest.raises(RequestError, match="edges must"):
            tensor.segment_sums(answered((2, 9)), edges)


class TestThreads:
    def test_their_number_changes_no_bit(self) -> None:
        correct, weights = answered((5, 70, 3, 101), 11), np.random.default_rng(12).integers(1, 9, 101)
        state = drawn_state(correct.shape, 13)
        found = [
            tensor.tensor_sums(correct, state, weights, limits=ComputeLimits(numba_from=1, threads=threads))
            for threads in (1, 2, 3, 8)
        ]
        assert all(same(found[0], other) for other in found[1:])


MEASURE = """
    import json, resource, sys, tracemalloc
    import numpy as np
    from iclperm.stats import _kernels, limits, tensor
    small = limits.ComputeLimits(numba_from=1, block_bytes=1 << 20)
    tensor.tensor_sums(np.ones((2, 2, 2, 8), np.uint8), limits=small)  # compiled before it is measured
    source = sys.argv[1] if sys.argv[2] == "file" else np.load(sys.argv[1])
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    sums = tensor.tensor_sums(source, limits=small)
    peak = tracemalloc.get_traced_memory()[1]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident
    print(json.dumps([peak, grown * 1024, float(sums.accuracy.values.sum()), int(sums.squares.sum())]))
"""


def test_memory_stays_within_a_twentieth_of_the_tensor(tmp_path: Path) -> None:
    """80 MB: from memory little beside it, from a file one block and little beside."""
    correct = answered((5, 800, 20, 1000), 14)
    np.save(tmp_path / "correct.npy", correct)
    found = {}
    for where in ("memory", "file"):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(MEASURE), str(tmp_path / "correct.npy"), where],
            capture_output=True,
            text=True,
            check=True,
        )
        peak, grown, *sums = json.loads(done.stdout)
        found[where] = sums
        limit = correct.nbytes // 20
        assert peak <= limit, where
        assert grown <= limit + (1 << 22), where
    assert found["memory"] == found["file"]
    assert found["file"][0] == pytest.approx(correct.mean() * 5 * 800 * 20)
