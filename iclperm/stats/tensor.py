"""One pass over correct[S, P, K, Q], in memory or in pieces: accuracies, sums over sets and permutations, segments.

All sums are of integers: threads, blocks and where the tensor lies change no bit of a result. A tensor that does not
fit in memory is read in blocks of permutations, some megabytes at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from iclperm.errors import DataError, RequestError, printable
from iclperm.stats.components import VarianceComponents, components_from_sums, variance_components
from iclperm.stats.limits import LIMITS, ComputeLimits
from iclperm.stats.sensitivity import (
    Accuracy,
    Curve,
    FloatArray,
    accuracy_from_sums,
    accuracy_of_blocks,
    binary_items,
    curve_from_accuracy,
    is_large,
    plain_array,
    query_weights,
    usable_queries,
)

_MOST_SETS = 255  # what a byte can count

Shape = tuple[int, int, int, int]


class Block(NamedTuple):
    """Some permutations of every set."""

    permutations: tuple[int, int]
    """Half-open range."""
    correct: npt.NDArray[np.uint8]
    """[S, permutations, K, Q], C-contiguous; overwritten by the next block."""


@runtime_checkable
class Blocks(Protocol):
    """correct[S, P, K, Q], wherever it lies."""

    @property
    def shape(self) -> Shape: ...

    def usable(self) -> npt.NDArray[np.bool_]:
        """[Q] whether a query is ok in every cell."""
        ...

    def at(self, place: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]:
        """Answers [S, P, Q] and states at one place of K, for tensors of which some answers are missing."""
        ...

    def blocks(self) -> Iterator[Block]:
        """All permutations in ascending order; can be asked for again."""
        ...


class AnswersByContext(Protocol):
    """What `ItemBlocks` needs of a run's answers (`iclperm.runs.answers.Items`), stored once a distinct context."""

    @property
    def gold(self) -> npt.NDArray[np.int64]: ...
    @property
    def context_of(self) -> npt.NDArray[np.int64]: ...
    @property
    def context_state(self) -> npt.NDArray[np.uint8]: ...
    def is_right(self, contexts: npt.NDArray[np.int64], out: npt.NDArray[np.bool_]) -> None:
        """Writes whether the answers of ``contexts`` [...] are right into ``out`` [..., Q]."""
        ...


class ArrayBlocks:
    """An array or memory map [S, P, K, Q] or [S, P, Q] (as K = 1) of 0 and 1, with its state.

    Bytes in one piece are one block, read where they are; anything else is copied, a block at a time.
    """

    def __init__(
        self, correct: npt.ArrayLike, state: npt.ArrayLike | None = None, *, limits: ComputeLimits = LIMITS
    ) -> None:
        """Raises RequestError on another number of axes or a type but bool and integers."""
        items = plain_array(correct)
        if items.ndim not in (3, 4) or not items.size:
            raise RequestError(f"correct must have shape [S, P, K, Q] or [S, P, Q], got {list(items.shape)}")
        if items.dtype.kind not in "biu":
            raise RequestError(f"correct must hold bool or integer 0 and 1, got {items.dtype}")
        self._limits = limits
        self._usable = usable_queries(items.shape, state, limits)
        self._items = items if items.ndim == 4 else items[:, :, None]
        self._state = None if state is None else np.asarray(state).reshape(self._items.shape)

    @property
    def shape(self) -> Shape:
        """S, P, K, Q."""
        num_sets, num_permutations, num_shots, num_queries = self._items.shape
        return num_sets, num_permutations, num_shots, num_queries

    def usable(self) -> npt.NDArray[np.bool_]:
        """See `Blocks`."""
        return self._usable

    def at(self, place: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]:
        """See `Blocks`."""
        answers = binary_items(self._items[:, :, place], self._limits)
        return answers, np.zeros(answers.shape, np.uint8) if self._state is None else self._state[:, :, place]

    def blocks(self) -> Iterator[Block]:
        """See `Blocks`."""
        items = self._items
        if items.dtype in (np.uint8, np.bool_) and items.flags.c_contiguous and items.ctypes.data % 8 == 0:
            yield Block((0, items.shape[1]), items.view(np.uint8))
            return
        for low, high in _permutation_ranges(self.shape, self._limits):
            block = items[:, low:high]
            binary = block if block.dtype == np.uint8 else binary_items(block, self._limits)
            yield Block((low, high), np.ascontiguousarray(binary))


class FileBlocks:
    """A .npy file of uint8 or bool [S, P, K, Q] or [S, P, Q] (as K = 1), read a block at a time and never mapped whole.

    `state` is an array or the path of a .npy file, which is mapped into memory and read once.
    """

    def __init__(
        self, path: str | Path, state: npt.ArrayLike | str | Path | None = None, *, limits: ComputeLimits = LIMITS
    ) -> None:
        """Raises DataError for a file that is no such array, or is cut short."""
        self.path, self._limits = Path(path), limits
        items = mapped(self.path)
        if items.ndim not in (3, 4) or not items.size or items.dtype not in (np.uint8, np.bool_):
            raise DataError(
                f"{path} must hold uint8 or bool of shape [S, P, K, Q] or [S, P, Q], got {items.dtype} "
                f"{list(items.shape)}"
            )
        if not items.flags.c_contiguous:
            raise DataError(f"{path} is in Fortran order; save numpy.ascontiguousarray of it")
        num_sets, num_permutations, *shots, num_queries = items.shape
        self._shape = (num_sets, num_permutations, *(shots or [1]), num_queries)
        self._offset = int(getattr(items, "offset", 0))
        states = mapped(Path(state)) if isinstance(state, str | Path) else state
        self._usable = usable_queries(items.shape, states, limits)
        self._state = None if states is None else np.asarray(states).reshape(self.shape)

    @property
    def shape(self) -> Shape:
        """S, P, K, Q."""
        num_sets, num_permutations, num_shots, num_queries = self._shape
        return num_sets, num_permutations, num_shots, num_queries

    def at(self, place: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]:
        """See `Blocks`; maps the file."""
        answers = binary_items(np.array(mapped(self.path).reshape(self.shape)[:, :, place]), self._limits)
        return answers, np.zeros(answers.shape, np.uint8) if self._state is None else self._state[:, :, place]

    def usable(self) -> npt.NDArray[np.bool_]:
        """See `Blocks`."""
        return self._usable

    def blocks(self) -> Iterator[Block]:
        """See `Blocks`; raises DataError where the file has become shorter."""
        num_sets, num_permutations, *plane = self.shape
        with self.path.open("rb") as file:
            for low, high, buffer in _buffers(self.shape, self._limits):
                for number in range(num_sets):
                    file.seek(self._offset + (number * num_permutations + low) * math.prod(plane))
                    if file.readinto(buffer[number].reshape(-1).data) != buffer[number].nbytes:
                        raise DataError(f"{self.path} became shorter while it was read; write it again")
                yield Block((low, high), buffer)


class ItemBlocks:
    """The answers of one split of a run (`Run.splits[...]`), made from what distinct contexts predict.

    What is held is what the run holds, a byte or two a distinct prompt, and a block; not the tensor [S, P, K, Q].
    """

    def __init__(self, items: AnswersByContext, *, limits: ComputeLimits = LIMITS) -> None:
        self._items, self._limits = items, limits

    @property
    def shape(self) -> Shape:
        """S, P, K, Q."""
        num_sets, num_permutations, num_shots = self._items.context_of.shape
        return num_sets, num_permutations, num_shots, len(self._items.gold)

    def usable(self) -> npt.NDArray[np.bool_]:
        """See `Blocks`."""
        state, used = self._items.context_state, np.unique(self._items.context_of)
        states = state if len(used) == len(state) else state[used]
        return usable_queries((len(used), state.shape[1]), states, self._limits)

    def at(self, place: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]:
        """See `Blocks`."""
        contexts = self._items.context_of[:, :, place]
        answers = np.empty((*contexts.shape, len(self._items.gold)), np.bool_)
        for one_set, right in zip(contexts, answers, strict=True):
            self._items.is_right(one_set, right)
        return answers.view(np.uint8), self._items.context_state[contexts]

    def blocks(self) -> Iterator[Block]:
        """See `Blocks`."""
        context_of = self._items.context_of
        for low, high, buffer in _buffers(self.shape, self._limits):
            answers = buffer.view(np.bool_)
            for number, place in np.ndindex(answers.shape[:2]):
                self._items.is_right(context_of[number, low + place], answers[number, place])
            yield Block((low, high), buffer)


@dataclass(frozen=True)
class TensorSums:
    """What one pass over correct[S, P, K, Q] leaves: enough for accuracies, the curve and variance components."""

    accuracy: Accuracy
    """Its values [S, P, K]; heeds the weights."""
    usable: npt.NDArray[np.bool_]
    """[Q] whether a query is ok in every cell."""
    right: npt.NDArray[np.int64]
    """[S, P, K] right answers over the usable queries, each once."""
    by_set: npt.NDArray[np.int32]
    """[S, K, Q] sums over permutations, of all queries."""
    squares: npt.NDArray[np.int64]
    """[P, K] sum over the usable queries of (sum over sets)²: all that variance components need of [P, K, Q]."""
    source: Blocks | None = None
    """Where answers are missing: components are then computed from it, k by k."""
    weights: FloatArray | None = None

    @cached_property
    def by_query(self) -> npt.NDArray[np.int64]:
        """[K, Q] sums over sets and permutations, of all queries."""
        return np.asarray(self.by_set.sum(axis=0, dtype=np.int64))

    def curve(self) -> Curve:
        """As `stats.curve`, bit for bit."""
        return curve_from_accuracy(self.accuracy)

    def components(self) -> list[VarianceComponents]:
        """`variance_components` at every k, equal to the last bit; raises RequestError as it does.

        Weights count where answers are missing; of complete answers every query counts once.
        """
        if self.source is not None:
            return [
                variance_components(*self.source.at(place), weights=self.weights)
                for place in range(self.right.shape[2])
            ]
        return [
            components_from_sums(self.right[..., k], self.by_set[:, k][:, self.usable], self.squares[:, k].sum())
            for k in range(self.right.shape[2])
        ]


class CrossedSums(NamedTuple):
    """Sums of correct[S, P, K, Q] over one axis each, and over two."""

    by_ordering: npt.NDArray[np.int64]
    """[S, P, K] over queries."""
    by_set: npt.NDArray[np.int32]
    """[S, K, Q] over permutations."""
    by_permutation: npt.NDArray[Any]
    """[P, K, Q] over sets, in as few bytes as hold S."""
    by_query: npt.NDArray[np.int64]
    """[K, Q] over sets and permutations."""


def blocks_of(
    source: Any, state: npt.ArrayLike | str | Path | None = None, *, limits: ComputeLimits = LIMITS
) -> Blocks:
    """`source` in blocks: an array, a memory map, the path of a .npy file, a split of a run, or blocks themselves.

    Raises RequestError where a state is given to a source that has its own, and what the sources raise.
    """
    if isinstance(source, str | Path):
        return FileBlocks(source, state, limits=limits)
    if not hasattr(source, "context_of") and not isinstance(source, Blocks):
        return ArrayBlocks(source, mapped(Path(state)) if isinstance(state, str | Path) else state, limits=limits)
    if state is not None:
        raise RequestError("this source knows its own state; leave `state` out")
    return source if isinstance(source, Blocks) else ItemBlocks(source, limits=limits)


def tensor_sums(
    source: Any,
    state: npt.ArrayLike | str | Path | None = None,
    weights: npt.ArrayLike | None = None,
    *,
    limits: ComputeLimits = LIMITS,
) -> TensorSums:
    """Accuracies and crossed sums of correct[S, P, K, Q] in one pass over it, wherever it lies.

    Args:
        source: see `blocks_of`; an array [S, P, Q] is taken as K = 1.
        state: of an array or file: the same shape, 0 = ok; an array or the path of a .npy file.
        weights: [Q] whole numbers, how often each query counts in an accuracy; all 1 by default.
        limits: sizes of blocks, and from which the Numba loops run.

    Raises RequestError on shapes that do not fit, values but 0 and 1, weights that are not whole. Cost: the tensor is
    read once, at half the speed of memory or better; S·K·Q·(4 + P/32) bytes at most beside a block of 16 MB.
    """
    blocks = blocks_of(source, state, limits=limits)
    num_sets, num_permutations, num_shots, num_queries = blocks.shape
    usable, weight = blocks.usable(), whole_weights(weights, num_queries)
    counted = np.where(usable, weight, 0)
    is_weighted = bool((counted != usable).any())
    right = np.empty(blocks.shape[:3], np.int64)
    sums = np.empty_like(right) if is_weighted else right
    by_set = np.zeros((num_sets, num_shots, num_queries), np.int32)
    squares = np.empty((num_permutations, num_shots), np.int64)
    edges, large = np.array([0, num_queries]), math.prod(blocks.shape) >= limits.numba_from
    for (low, high), correct in blocks.blocks():
        right[:, low:high] = _segment_sums(correct, edges, usable.astype(np.int64), large, limits)[..., 0]
        if is_weighted:
            sums[:, low:high] = _segment_sums(correct, edges, counted, large, limits)[..., 0]
        added, squares[low:high], _ = _crossed(correct, usable, large, limits, keep=False)
        by_set += added
    counts: FloatArray = weight.astype(np.float64)
    if usable.all():
        return TensorSums(accuracy_from_sums(sums.astype(np.float64), usable, counts), usable, right, by_set, squares)

    def cells() -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]]:
        for place in range(num_shots):
            answers, states = blocks.at(place)
            yield answers.reshape(-1, num_queries), states.reshape(-1, num_queries) == 0

    found = accuracy_of_blocks(cells, counts)
    values = np.moveaxis(found.values.reshape(num_shots, num_sets, num_permutations), 0, 2)
    return TensorSums(found._replace(values=values), usable, right, by_set, squares, blocks, counts)


def crossed_sums(correct: npt.ArrayLike, *, limits: ComputeLimits = LIMITS) -> CrossedSums:
    """Sums of correct[S, P, K, Q] over queries, over permutations, over sets and over both; [S, P, Q] is K = 1.

    The sums over sets are as large as the tensor over S: where only their squares matter, `tensor_sums` has those.
    Raises RequestError on another shape or values but 0 and 1. Cost: two passes at about the speed of memory.
    """
    blocks = ArrayBlocks(correct, limits=limits)
    num_sets, num_permutations, num_shots, num_queries = blocks.shape
    large = math.prod(blocks.shape) >= limits.numba_from
    by_ordering = np.empty(blocks.shape[:3], np.int64)
    by_set = np.zeros((num_sets, num_shots, num_queries), np.int32)
    by_permutation = np.empty(blocks.shape[1:], np.min_scalar_type(num_sets))
    every, edges = np.ones(num_queries, np.bool_), np.array([0, num_queries])
    for (low, high), items in blocks.blocks():
        by_ordering[:, low:high] = _segment_sums(items, edges, every.astype(np.int64), large, limits)[..., 0]
        added, _, kept = _crossed(items, every, large, limits, keep=True)
        by_set += added
        if high - low == num_permutations:
            by_permutation = kept  # or the largest result would be held twice
        else:
            by_permutation[low:high] = kept
    return CrossedSums(by_ordering, by_set, by_permutation, by_set.sum(axis=0, dtype=np.int64))


def segment_sums(
    correct: npt.ArrayLike,
    edges: npt.ArrayLike,
    weights: npt.ArrayLike | None = None,
    *,
    limits: ComputeLimits = LIMITS,
) -> npt.NDArray[np.int64] | npt.NDArray[np.int32]:
    """Weighted sums of correct [..., Q] over the query segments edges[b]:edges[b + 1], [..., B].

    Args:
        correct: 0 or 1, bool or integers.
        edges: [B + 1] integers that ascend from 0 to Q.
        weights: [Q] whole numbers of 0 or more, what each query counts.
        limits: sizes from which the Numba loops run, and how.

    Int32 where the sum of the weights allows it. Raises RequestError on anything else. Cost: one pass.
    """
    items = plain_array(correct)
    large = is_large(items, limits)
    items = items.view(np.uint8) if large else binary_items(items, limits)
    num_queries, bounds = items.shape[-1], np.asarray(edges)
    if bounds.ndim != 1 or len(bounds) < 2 or not np.issubdtype(bounds.dtype, np.integer):
        raise RequestError(f"edges must be two integers or more, got {bounds.tolist()}")
    if bounds[0] != 0 or bounds[-1] != num_queries or (np.diff(bounds) < 1).any():
        raise RequestError(f"edges must ascend from 0 to {num_queries}, got {bounds.tolist()}")
    return _segment_sums(items, bounds.astype(np.int64), whole_weights(weights, num_queries), large, limits)


def whole_weights(weights: npt.ArrayLike | None, num_queries: int) -> npt.NDArray[np.int64]:
    """`weights` as int64 [Q], all 1 by default; raises RequestError unless they are whole, >= 0 and not all 0."""
    values = query_weights(weights, num_queries)
    broken = values[(values != np.floor(values)) | (values >= 1 << 31)]
    if broken.size:
        raise RequestError(f"weights must be whole numbers below {1 << 31}, found {broken[0]}")
    return values.astype(np.int64)


def _segment_sums(
    items: npt.NDArray[np.uint8],
    edges: npt.NDArray[np.int64],
    weights: npt.NDArray[np.int64],
    large: bool,
    limits: ComputeLimits,
) -> npt.NDArray[np.int64] | npt.NDArray[np.int32]:
    """`segment_sums` of C-contiguous items [..., Q]: by Numba where they are `large`. Refuses what is not 0 or 1."""
    if large:
        from iclperm.stats import _kernels

        sums, is_binary = _kernels.segment_sums(items.reshape(-1, items.shape[-1]), edges, weights, limits)
        if not is_binary:
            binary_items(items, limits)  # names the value
        return sums.reshape(*items.shape[:-1], len(edges) - 1)
    binary_items(items, limits)
    parts = [np.einsum("...q,q->...", items[..., low:high], weights[low:high]) for low, high in pairwise(edges)]
    sums = np.stack(parts, axis=-1)
    return sums.astype(np.int32) if weights.sum() < 1 << 31 else sums.astype(np.int64)


def _crossed(
    correct: npt.NDArray[np.uint8], usable: npt.NDArray[np.bool_], large: bool, limits: ComputeLimits, *, keep: bool
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[Any]]:
    """Of a block [S, P, K, Q]: sums over P, squares [P, K] of the sums over S, and those sums where they are kept."""
    if large and len(correct) <= _MOST_SETS:
        from iclperm.stats import _kernels

        return _kernels.crossed_planes(correct, usable, keep, limits)
    kind = np.min_scalar_type(len(correct))
    kept = np.empty(correct.shape[1:] if keep else (0, 0, 0), kind)
    squares = np.empty(correct.shape[1:3], np.int64)
    for p in range(correct.shape[1]):  # one permutation at a time: little beside the tensor
        total = correct[:, p].sum(axis=0, dtype=np.int64)
        squares[p] = (total[:, usable] ** 2).sum(axis=-1)
        if keep:
            kept[p] = total
    return correct.sum(axis=1, dtype=np.int32), squares, kept


def _permutation_ranges(shape: Shape, limits: ComputeLimits) -> list[tuple[int, int]]:
    """Half-open ranges of permutations whose answers fit into a block, one permutation at least."""
    num_sets, num_permutations, num_shots, num_queries = shape
    step = max(1, limits.block_bytes // (num_sets * num_shots * num_queries))
    return [(low, min(low + step, num_permutations)) for low in range(0, num_permutations, step)]


def _buffers(shape: Shape, limits: ComputeLimits) -> Iterator[tuple[int, int, npt.NDArray[np.uint8]]]:
    """Ranges of permutations, each with room for their answers; one allocation serves all of one length."""
    num_sets, _, num_shots, num_queries = shape
    buffer = np.empty((0, 0, num_shots, num_queries), np.uint8)
    for low, high in _permutation_ranges(shape, limits):
        if len(buffer) != num_sets or buffer.shape[1] != high - low:
            buffer = np.empty((num_sets, high - low, num_shots, num_queries), np.uint8)
        yield low, high, buffer


HEADER_ERRORS = (OSError, ValueError, EOFError, TokenError, RecursionError)
"""What NumPy raises for the header of a file that is none of its own."""


def mapped(path: Path) -> npt.NDArray[Any]:
    """A .npy file mapped into memory, read only; raises DataError for anything else."""
    try:
        with path.open("rb") as file:
            refuse_false_header(file, path.stat().st_size)
        return np.lib.format.open_memmap(path, mode="r")  # refuses objects, and archives
    except HEADER_ERRORS as error:
        reason = printable(str(error).split("\n")[0])[:200]
        raise DataError(
            f"{path} is not a .npy file that can be read: {reason}; save it anew, without objects"
        ) from None


def refuse_false_header(file: IO[bytes], num_bytes: int) -> None:
    """Raises one of `HEADER_ERRORS` where a .npy file of ``num_bytes`` has no header, or one that promises more than it
    holds: NumPy would ask for as much memory."""
    is_first = np.lib.format.read_magic(file) == (1, 0)
    read = np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if any(isinstance(size, bool) or size < 0 for size in shape):
        raise ValueError(f"shape is not valid: {shape}")
    if math.prod(shape) * dtype.itemsize > num_bytes:
        raise ValueError("it is shorter than its header says")
