"""Designs: which demonstrations, in which orders, how many of them, on which queries.

Every choice is a pure function of (seed, purpose, indices). Nothing depends on the order of calls, so a design that
grows in sets, permutations or queries keeps what it had.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iclperm.errors import ConfigError, DataError
from iclperm.study import Study
from iclperm.tasks import Examples, Task

_MAX_EXACT_FACTORIAL = 20


@dataclass(frozen=True)
class Design:
    """What a study runs, as row numbers.

    ``sets`` int64 [S, K] are rows of the train split in default order, ``permutations`` int64 [P, K] are shared by all
    sets, ``shots`` are the prefixes to evaluate (ascending, the last is K), ``queries`` int64 [Q] are rows of the test
    split. ``num_excluded`` test rows repeat a train row's content and were left out.
    """

    sets: NDArray[np.int64]
    permutations: NDArray[np.int64]
    shots: tuple[int, ...]
    queries: NDArray[np.int64]
    num_excluded: int

    @property
    def orderings(self) -> NDArray[np.int64]:
        """Train rows of every set under every permutation, int64 [S, P, K]."""
        return self.sets[:, self.permutations]


def draw(study: Study, task: Task, train: Examples, test: Examples) -> Design:
    """The design of a study (arXiv 2511.09700: balanced sets, permutations shared across the sets).

    Raises `DataError` where a class has too few examples (naming task, class, number needed and number there), also
    for that many different sets, and `ConfigError` for more permutations than there are (or sets, of k = 0). Expected
    O(S * train + P * K + test).
    """
    shots = study.shot_list(task.shots)
    queries, num_excluded = draw_queries(study.seed, study.queries, task, train, test)
    return Design(
        sets=draw_sets(study.seed, study.sets, shots[-1], task, train),
        permutations=draw_permutations(study.seed, study.permutations, shots[-1]),
        shots=shots,
        queries=queries,
        num_excluded=num_excluded,
    )


def draw_sets(seed: int, count: int, size: int, task: Task, train: Examples) -> NDArray[np.int64]:
    """``count`` different sets (see `draw_set`), int64 [count, size]; more keep the earlier ones.

    A set that was drawn before is drawn anew from the same key. Raises `DataError`, also where there are fewer sets.
    """
    _refuse_too_many_sets(count, size, task, train)
    drawn: dict[bytes, NDArray[np.int64]] = {}
    for index in range(count):
        # Which draw is kept depends on earlier sets only; in another default order it is still the same set.
        draws = ((np.sort(rows).tobytes(), rows) for rows in _set_draws(seed, index, size, task, train))
        content, rows = next(draw for draw in draws if draw[0] not in drawn)
        drawn[content] = rows
    return np.stack(list(drawn.values()))


def draw_set(seed: int, index: int, size: int, task: Task, train: Examples) -> NDArray[np.int64]:
    """First draw of set number ``index``: ``size`` train rows, balanced over the classes, in default order; int64
    [size].

    A remainder goes to classes drawn anew for each set. Default order: by label word, then by text. Raises `DataError`.
    """
    return next(_set_draws(seed, index, size, task, train))


def _set_draws(seed: int, index: int, size: int, task: Task, train: Examples) -> Iterator[NDArray[np.int64]]:
    """Draw after draw of one set, each from where the key's streams stand."""
    num_labels = len(task.words)
    share, remainder = divmod(size, num_labels)
    pools = _pools(task, train)
    class_stream = _stream(seed, "favoured classes", index)
    streams = [_stream(seed, "demonstrations", index, label) for label in range(num_labels)]
    while True:
        favoured = _random_order(class_stream, num_labels)[:remainder]
        rows: list[int] = []
        for label, (pool, stream) in enumerate(zip(pools, streams, strict=True)):
            needed = share + int(label in favoured)
            if len(pool) < needed:
                raise DataError(
                    f"task {task.name!r}: class {task.words[label]!r} has {len(pool)} train examples, but k = {size} "
                    f"needs {needed} of it; lower the shots or add examples"
                )
            rows += pool[_random_order(stream, len(pool))[:needed]].tolist()
        yield np.array(sorted(rows, key=lambda row: _default_order(task, train, row)), dtype=np.int64)


def _refuse_too_many_sets(count: int, size: int, task: Task, train: Examples) -> None:
    if size == 0 and count > 1:
        raise ConfigError(f"sets is {count}, but no demonstrations make only one set; set 'sets' to 1 or raise 'shots'")
    share, remainder = divmod(size, len(task.words))
    sizes = [len(pool) for pool in _pools(task, train)]
    # ways[r]: choices from the classes so far of which r give one more than their share.
    ways = [1] + [0] * remainder
    for available in sizes:
        plain, more = math.comb(available, share), math.comb(available, share + 1)
        ways = [plain * ways[r] + (more * ways[r - 1] if r else 0) for r in range(remainder + 1)]
    if 0 < ways[remainder] < count:
        scarce = int(np.argmin(sizes))
        raise DataError(
            f"task {task.name!r}: {count} sets were asked for, but there are only {ways[remainder]} different balanced "
            f"sets of {size} demonstrations (class {task.words[scarce]!r} has {sizes[scarce]} train examples); lower "
            "'sets' or add examples"
        )


def _pools(task: Task, train: Examples) -> list[NDArray[np.int64]]:
    return [np.flatnonzero(train.labels == label) for label in range(len(task.words))]


def draw_permutations(seed: int, count: int, size: int) -> NDArray[np.int64]:
    """``count`` distinct permutations of ``size`` positions, int64 [count, size]; more keep the earlier ones.

    Raises `ConfigError` where there are fewer. Expected O(count * size), more as count nears size!.
    """
    if size <= _MAX_EXACT_FACTORIAL and count > math.factorial(size):
        raise ConfigError(
            f"permutations is {count}, but {size} demonstrations have only {math.factorial(size)} orders; lower "
            "'permutations' or raise 'shots'"
        )
    drawn: dict[bytes, NDArray[np.int64]] = {}
    for index in range(count):
        stream = _stream(seed, "permutation", index)
        while (permutation := _random_order(stream, size)).tobytes() in drawn:
            pass  # the next draw of the same key: which one is kept depends on earlier permutations only
        drawn[permutation.tobytes()] = permutation
    return np.stack(list(drawn.values()))


def draw_queries(seed: int, count: int, task: Task, train: Examples, test: Examples) -> tuple[NDArray[np.int64], int]:
    """``count`` test rows, balanced over the classes, and how many rows were excluded for repeating a train row.

    Classes take turns, so that a larger count keeps the earlier queries. Raises `DataError` where a class is short.
    """
    num_labels = len(task.words)
    known = set(train.hashes)
    fresh = np.array([content not in known for content in test.hashes], dtype=bool)
    pools = [np.flatnonzero(fresh & (test.labels == label)) for label in range(num_labels)]
    most = num_labels * min(map(len, pools))
    remedy = f"lower 'queries' to {most} or add examples" if most else "add examples, or leave the label out"
    turns = keyed_permutation(num_labels, seed, "query classes")
    rows = np.empty(count, dtype=np.int64)
    for turn, label in enumerate(turns):
        pool = pools[label]
        needed = len(range(turn, count, num_labels))
        if len(pool) < needed:
            raise DataError(
                f"task {task.name!r}: class {task.words[label]!r} has {len(pool)} usable test examples, but {count} "
                f"queries need {needed} of it; {remedy}"
            )
        rows[turn::num_labels] = pool[keyed_permutation(len(pool), seed, "queries", int(label))[:needed]]
    return rows, int(np.sum(~fresh))


def keyed_permutation(size: int, seed: int, purpose: str, *indices: int) -> NDArray[np.int64]:
    """A random order of ``size`` things that depends on the key alone; int64 [size]. O(size log size)."""
    return _random_order(_stream(seed, purpose, *indices), size)


def keyed_sample(size: int, count: int, seed: int, purpose: str, *indices: int) -> NDArray[np.int64]:
    """At most ``count`` distinct numbers below ``size``, ascending, by key alone. O(count log count)."""
    draws = _stream(seed, purpose, *indices).random_raw(min(count, size)) % np.uint64(size)
    return np.unique(draws).astype(np.int64)


def _stream(seed: int, purpose: str, *indices: int) -> np.random.Philox:
    key = hashlib.sha256("/".join(map(str, (seed, purpose, *indices))).encode()).digest()
    return np.random.Philox(key=int.from_bytes(key[:16], "little"))


def _random_order(stream: np.random.Philox, size: int) -> NDArray[np.int64]:
    # The raw bits of a bit generator never change between NumPy versions; Generator.permutation may.
    return np.argsort(stream.random_raw(size), kind="stable").astype(np.int64)


def _default_order(task: Task, train: Examples, row: int) -> tuple[str, str]:
    label = int(train.labels[row])
    return task.words[label], task.render_demonstration(train.fields[row], label)
