"""Numba loops over the item tensor. Imported only where a tensor is large enough to be worth the compilation.

Answers are bytes 0 or 1. Eight of them are one 64-bit word, and words add lane by lane as long as no lane passes 255: a
row of 1,000 queries is 125 additions. Every loop sums integers, so threads and blocks never change a result. Threads
are Python's, with the lock released: prange is as fast, but its layers abort after a fork, or when two threads meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import config, njit

from iclperm.stats.limits import LIMITS, ComputeLimits

Counts = npt.NDArray[np.int32] | npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Array = TypeVar("_Array", bound=npt.NDArray[Any])

_ONES = 0x0101010101010101
_FLUSH = 240  # words added before their lanes are emptied: below 256, and whole vectors
_MOST = 255  # permutations, or sets, that a byte can count


def _loop(function: _Function) -> _Function:
    """Compiled without the lock, and kept on disk where some folder can be written: one second saved next time."""
    try:
        return cast(_Function, njit(nogil=True, cache=True)(function))
    except RuntimeError:  # neither beside the package nor in the user's cache
        return cast(_Function, njit(nogil=True)(function))


def num_threads() -> int:
    """One a core this process may use, or NUMBA_NUM_THREADS."""
    return int(config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]


def _frozen(values: _Array) -> _Array:
    """A view that cannot be written: one type, and one compilation, for arrays and for files mapped read-only."""
    view = values.view()
    view.flags.writeable = False
    return view


def _threads(limits: ComputeLimits) -> int:
    return num_threads() if limits.threads is None else limits.threads


def _share(work: Callable[[Any], Any], tasks: Iterable[Any], limits: ComputeLimits) -> list[Any]:
    """What `work` makes of every task, in their order, by as many threads as there may be."""
    tasks = list(tasks)
    workers = min(_threads(limits), len(tasks))
    if workers < 2:
        return [work(task) for task in tasks]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, tasks))


def _ranges(size: int, most: int) -> list[tuple[int, int]]:
    """At most `most` ranges of about equal length that cover 0..size."""
    edges = np.linspace(0, size, min(size, most) + 1).astype(int).tolist()
    return list(pairwise(edges))


@_loop
def crossed_sums(correct: Bytes) -> tuple[Counts, Counts, Counts]:
    """Sums of correct [S, P, Q] over one axis each: [S, P] over Q, [S, Q] over P, [P, Q] over S; one pass, any strides.

    Int32 for the sums that vectorise over queries (at most P and S): half the time of int64. 0.1 ns an item against
    1.3 ns for three NumPy sums.
    """
    num_sets, num_permutations, num_queries = correct.shape
    by_set_permutation = np.zeros((num_sets, num_permutations), dtype=np.int64)
    by_set_query = np.zeros((num_sets, num_queries), dtype=np.int32)
    by_permutation_query = np.zeros((num_permutations, num_queries), dtype=np.int32)
    for s in range(num_sets):
        for p in range(num_permutations):
            answers, of_set, of_permutation = correct[s, p], by_set_query[s], by_permutation_query[p]
            total = 0
            for q in range(num_queries):
                total += answers[q]
                of_set[q] += answers[q]
                of_permutation[q] += answers[q]
            by_set_permutation[s, p] = total
    return by_set_permutation, by_set_query, by_permutation_query


class _Masks(NamedTuple):
    """Which bytes of the words of a row count, for each of the 8 places in a word where a row can begin."""

    words: Words
    """[B, N] bit b of the weight of each query, in the lane of the query."""
    place: npt.NDArray[np.int64]
    """[8, segments, 3] of a segment: where its masks begin, its first word after that of the row, its words."""


def _masks(edges: npt.NDArray[np.int64], weights: npt.NDArray[np.int64]) -> _Masks:
    """Masks of the segments between `edges` [B + 1], for every bit of `weights` [Q] and every place in a word."""
    num_planes = max(int(weights.max(initial=0)).bit_length(), 1)
    num_segments = len(edges) - 1
    pad = 16 if len(weights) >= 512 * num_segments else 4  # a loop of whole vectors has no tail; the masks are 0 there
    place, planes, begin = np.empty((8, num_segments, 3), np.int64), [], 0
    for phase in range(8):
        for segment, (low, high) in enumerate(pairwise(edges)):
            first = (phase + low) // 8
            count = -(-((phase + high + 7) // 8 - first) // pad) * pad if high > low else 0
            lanes = np.zeros((num_planes, count * 8), np.uint8)
            at = phase + low - 8 * first
            lanes[:, at : at + high - low] = weights[low:high] >> np.arange(num_planes)[:, None] & 1
            place[phase, segment] = begin, first, count
            planes.append(lanes.view(np.uint64))
            begin += count
    return _Masks(_frozen(np.concatenate(planes, axis=1)), _frozen(place))


@_loop
def _add_rows(
    words: Words, masks: Words, place: npt.NDArray[np.int64], num_queries: int, first: int, last: int, sums: Counts
) -> np.uint64:
    """sums[first:last, segments] of rows of `num_queries` bytes; gives all words or-ed together."""
    even, ones, one_lane, top = (
        np.uint64(0x00FF00FF00FF00FF),
        np.uint64(0x0001000100010001),
        np.uint64(8),
        np.uint64(48),
    )
    seen = np.uint64(0)
    for row in range(first, last):
        begin = row * num_queries
        phase, word = begin & 7, begin >> 3
        for segment in range(place.shape[1]):
            low = word + place[phase, segment, 1]
            mask_low = place[phase, segment, 0]
            count = min(place[phase, segment, 2], words.size - low)
            total: Any = 0
            for plane in range(masks.shape[0]):
                for at in range(0, count, _FLUSH):
                    num = min(_FLUSH, count - at)
                    answers = words[low + at : low + at + num]
                    mask = masks[plane, mask_low + at : mask_low + at + num]
                    lanes = np.uint64(0)
                    for i in range(num):
                        lanes += answers[i] & mask[i]
                        seen |= answers[i]
                    pairs = (lanes & even) + ((lanes >> one_lane) & even)
                    total += np.int64((pairs * ones) >> top) << plane
            sums[row, segment] = total
    return seen


@_loop
def _add_short_segments(
    words: Words,
    masks: Words,
    place: npt.NDArray[np.int64],
    edges: npt.NDArray[np.int64],
    num_queries: int,
    first: int,
    last: int,
    sums: Counts,
) -> np.uint64:
    """As `_add_rows` with the masks of whole rows: counts word by word, then differences of their running sums.

    Counts of eight words are a word again, and times 0x0101010101010101 it holds their running sums, at most 64. For 16
    segments of 1,000 queries twice as fast as `_add_rows`, for 4 half as fast.
    """
    half, quarter, lane, low_lane, one = np.uint64(32), np.uint64(16), np.uint64(8), np.uint64(0xFF), np.uint64(1)
    ones, top = np.uint64(0x0101010101010101), np.uint64(56)
    seen = np.uint64(0)
    width = place[:, 0, 2].max()
    counts = np.zeros((width // 8 + 1) * 8, np.uint8)
    eights = counts.view(np.uint64)
    running, before = np.empty(eights.size, np.uint64), np.empty(eights.size, np.int64)
    for row in range(first, last):
        begin = row * num_queries
        phase, word = begin & 7, begin >> 3
        mask_low, count = place[phase, 0, 0], min(place[phase, 0, 2], words.size - word)
        answers, out = words[word : word + count], sums[row]
        out[:] = 0
        for plane in range(masks.shape[0]):
            mask = masks[plane, mask_low : mask_low + count]
            for i in range(count):
                lanes = answers[i]
                seen |= lanes
                lanes &= mask[i]
                lanes += lanes >> half
                lanes += lanes >> quarter
                lanes += lanes >> lane
                counts[i] = lanes & low_lane
            total = np.int64(0)
            for i in range(eights.size):
                running[i] = eights[i] * ones
                before[i] = total
                total += np.int64(running[i] >> top)
            previous = np.int64(0)
            for segment in range(out.size):
                end = phase + edges[segment + 1]
                word_end = end >> 3
                here = before[word_end >> 3]
                if word_end & 7:
                    here += np.int64((running[word_end >> 3] >> np.uint64(8 * ((word_end & 7) - 1))) & low_lane)
                if end & 7:  # within a word
                    part = answers[word_end] & mask[word_end] & ((one << np.uint64(8 * (end & 7))) - one)
                    part += part >> half
                    part += part >> quarter
                    part += part >> lane
                    here += np.int64(part & low_lane)
                out[segment] += (here - previous) << plane
                previous = here
    return seen


def segment_sums(
    correct: Bytes, edges: npt.NDArray[np.int64], weights: npt.NDArray[np.int64], limits: ComputeLimits = LIMITS
) -> tuple[Counts, bool]:
    """Weighted sums of correct [R, Q] between edges [B + 1], [R, B], and whether all values seen are 0 or 1.

    Int32 where the sum of the weights allows it, else int64; `weights` >= 0. C-contiguous and beginning at a multiple
    of 8 bytes. One pass at the speed of memory for weights to 7; each further bit of the largest weight is another pass
    over a row in cache.
    """
    num_rows, num_queries = correct.shape
    flat = correct.reshape(-1)
    words = _frozen(flat[: flat.size // 8 * 8].view(np.uint64))
    whole = 8 * words.size // num_queries  # rows that end within the last word
    are_short = len(edges) > 2 and num_queries < limits.short_segment * (len(edges) - 1)
    masks = _masks(np.array([0, num_queries]) if are_short else edges, weights)
    sums = np.empty((num_rows, len(edges) - 1), np.int32 if weights.sum() < 1 << 31 else np.int64)

    def part(rows: tuple[int, int]) -> int:
        if are_short:
            return int(_add_short_segments(words, masks.words, masks.place, edges, num_queries, *rows, sums))
        return int(_add_rows(words, masks.words, masks.place, num_queries, *rows, sums))

    seen = _share(part, _ranges(whole, 4 * _threads(limits)), limits)
    rest = correct[whole:]
    for segment, (low, high) in enumerate(pairwise(edges)):
        sums[whole:, segment] = rest[:, low:high] @ weights[low:high]
    is_binary = not any(bits & ~_ONES for bits in seen) and bool((rest <= 1).all())
    return sums, is_binary


@_loop
def _or_words(words: Words) -> np.uint64:
    """All words or-ed together."""
    seen = np.uint64(0)
    for word in words:
        seen |= word
    return seen


def is_binary(values: Bytes, limits: ComputeLimits = LIMITS) -> bool:
    """Whether all values, C-contiguous from a multiple of 8 bytes, are 0 or 1; one pass."""
    flat = values.reshape(-1)
    words = _frozen(flat[: flat.size // 8 * 8].view(np.uint64))
    parts = _ranges(words.size, 4 * _threads(limits))
    seen = _share(lambda part: int(_or_words(words[slice(*part)])), parts, limits)
    return not any(bits & ~_ONES for bits in seen) and bool((flat[8 * words.size :] <= 1).all())


@_loop
def _or_rows(rows: Bytes, first: int, last: int, found: Bytes) -> None:
    """Adds to found [Q] the bits that are set in rows first to last - 1."""
    for number in range(first, last):
        row = rows[number]
        for i in range(found.size):
            found[i] |= row[i]


def any_by_query(values: Bytes, limits: ComputeLimits = LIMITS) -> npt.NDArray[np.bool_]:
    """[Q] whether a query has a value but 0 in some row of values [R, Q], C-contiguous; one pass."""
    num_rows, num_queries = values.shape
    together = min(max(1, limits.tile_bytes // 4 // num_queries), num_rows)  # short rows pass as one
    whole = num_rows // together
    long_rows = _frozen(values[: whole * together].reshape(whole, together * num_queries))

    def part(rows: tuple[int, int]) -> Bytes:
        found = np.zeros(long_rows.shape[1], np.uint8)
        _or_rows(long_rows, *rows, found)
        return found

    found = np.array(_share(part, _ranges(whole, _threads(limits)), limits))
    rest = values[whole * together :]
    return np.asarray(found.reshape(-1, num_queries).any(axis=0) | rest.any(axis=0))


@_loop
def _add_planes(
    correct: Bytes,
    usable: Bytes,
    permutations: tuple[int, int],
    shots: tuple[int, int],
    by_set: Bytes,
    by_permutation: Bytes,
    squares: npt.NDArray[np.int64],
) -> None:
    """Of correct [S, P, K, Q], a range of P and of K: adds into by_set [S, K, Q] and, unless it is empty, writes
    by_permutation [P, K, Q]; squares [P, K] get the sum over usable queries of the square of the sum over sets.
    """
    num_sets, num_permutations, num_shots, num_queries = correct.shape
    flat = correct.reshape(num_sets, num_permutations, num_shots * num_queries)
    of_sets = by_set.reshape(num_sets, num_shots * num_queries)
    low, high = shots[0] * num_queries, shots[1] * num_queries
    size = high - low
    keep = by_permutation.size > 0
    scratch = np.zeros(size, np.uint8)
    for p in range(permutations[0], permutations[1]):
        total = by_permutation[p].reshape(-1)[low:high] if keep else scratch
        for i in range(size):
            total[i] = 0
        for s in range(0, num_sets - 1, 2):  # two sets at once: half the traffic of `total`
            one, two = flat[s, p, low:high], flat[s + 1, p, low:high]
            of_one, of_two = of_sets[s, low:high], of_sets[s + 1, low:high]
            for i in range(size):
                of_one[i] += one[i]
                of_two[i] += two[i]
                total[i] += one[i] + two[i]
        if num_sets % 2:
            one, of_one = flat[num_sets - 1, p, low:high], of_sets[num_sets - 1, low:high]
            for i in range(size):
                of_one[i] += one[i]
                total[i] += one[i]
        for k in range(shots[0], shots[1]):
            counts = total[k * num_queries - low : (k + 1) * num_queries - low]
            square: Any = 0
            for q in range(num_queries):
                square += np.int32(counts[q] & usable[q]) * np.int32(counts[q] & usable[q])
            squares[p, k] = square


def crossed_planes(
    correct: Bytes, usable: npt.NDArray[np.bool_], keep: bool = False, limits: ComputeLimits = LIMITS
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], Bytes]:
    """One pass over correct [S, P, K, Q]: sums over P int32 [S, K, Q], squares int64 [P, K], sums over S.

    A square is the sum over usable queries of (sum over sets)². The sums over S, uint8 [P, K, Q], are kept if asked
    for, else that array is empty. At most 255 sets; every [s, p] plane is C-contiguous. Beyond the results, one byte
    for every 32 of the tensor at most, or S·K·Q bytes.
    """
    num_sets, num_permutations, num_shots, num_queries = correct.shape
    if num_sets > _MOST:
        raise ValueError(f"a byte counts at most {_MOST} sets, got {num_sets}")
    by_permutation = np.empty(correct.shape[1:] if keep else (0, 0, 0), np.uint8)
    squares = np.empty((num_permutations, num_shots), np.int64)
    correct, mask = _frozen(correct), _frozen(np.where(usable, np.uint8(255), np.uint8(0)))
    threads = _threads(limits)
    most = min(threads, num_permutations // limits.task_permutations)
    chunks = _ranges(num_permutations, max(most, -(-num_permutations // _MOST), 1))
    tiles = _ranges(num_shots, max(-(-num_shots * num_queries // limits.tile_bytes), -(-threads // len(chunks))))
    by_set = np.zeros((len(chunks), num_sets, num_shots, num_queries), np.uint8)

    def part(task: tuple[int, tuple[int, int], tuple[int, int]]) -> None:
        number, permutations, shots = task
        _add_planes(correct, mask, permutations, shots, by_set[number], by_permutation, squares)

    _share(part, [(number, chunk, tile) for number, chunk in enumerate(chunks) for tile in tiles], limits)
    return by_set.sum(axis=0, dtype=np.int32), squares, by_permutation
