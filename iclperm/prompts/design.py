"""Designs: which demonstrations, in which orders, how many of them, on which queries.

Every choice is a pure function of (seed, purpose, indices). Nothing depends on the order of calls, so a design that
grows in sets, permutations or queries keeps what it had.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import permutations as all_orders
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iclperm.errors import ConfigError, DataError
from iclperm.prompts.neighbours import Neighbours, own_neighbours
from iclperm.study.orderings import MOST_EXHAUSTIVE, MOVED
from iclperm.study.study import Study
from iclperm.tasks.task import Examples, Task

CONTENT_FREE = "content_free"
"""The split of the queries without content, whose answers show how a context favours the labels by itself."""
CONTENT_FREE_INPUTS = ("N/A", "", "[MASK]")
"""What stands in every field of these queries (Zhao et al. 2021, section 5)."""
_MAX_EXACT_FACTORIAL = 20


@dataclass(frozen=True)
class Orderings:
    """Sets under permutations, seen at some numbers of shots.

    ``sets`` int64 [S, K] are rows of the train split in default order, ``permutations`` int64 [P, K] are shared by all
    sets, ``shots`` are the prefixes to evaluate (ascending, the last is K).
    """

    sets: NDArray[np.int64]
    permutations: NDArray[np.int64]
    shots: tuple[int, ...]

    @property
    def rows(self) -> NDArray[np.int64]:
        """Train rows of every set under every permutation, int64 [S, P, K]."""
        return self.sets[:, self.permutations]


@dataclass(frozen=True)
class SplitQueries:
    """The queries of one split, each example once.

    ``rows`` int64 [Q] are rows of the split; ``draws`` int64 are the places in ``rows`` of every query that the study
    wants, in order: where a class is short its examples are drawn several times. ``num_excluded`` rows repeat the
    content of a demonstration (or, in dev, of a test row) and were left out.
    """

    split: str
    rows: NDArray[np.int64]
    draws: NDArray[np.int64]
    num_excluded: int

    @property
    def weights(self) -> NDArray[np.int64]:
        """How often each query counts, int64 [Q]."""
        return np.bincount(self.draws, minlength=len(self.rows))

    def num_distinct(self, count: int) -> int:
        """Distinct queries among the first ``count`` draws."""
        return int(self.draws[:count].max(initial=-1)) + 1


@dataclass(frozen=True)
class Design:
    """What a study runs, as row numbers: orderings on one side, queries on the other.

    One group of ``orderings`` holds all numbers of shots as prefixes; with ``resample: per_k`` each number of shots has
    sets and permutations of its own. ``queries`` has an entry for each split: test, then dev where the study wants it,
    last the content-free queries where it calibrates by them. Where each query has ``neighbours`` of its own, each
    number of shots has a group, whose ``sets`` and ``permutations`` are of ranks among these, best first.
    """

    orderings: tuple[Orderings, ...]
    queries: tuple[SplitQueries, ...]
    neighbours: Neighbours | None = None

    @property
    def num_sets(self) -> int:
        return len(self.orderings[0].sets)

    @property
    def num_permutations(self) -> int:
        return len(self.orderings[0].permutations)

    @property
    def shots(self) -> tuple[int, ...]:
        """The K axis."""
        return tuple(shots for group in self.orderings for shots in group.shots)

    @property
    def num_queries(self) -> int:
        """Distinct queries of all splits."""
        return sum(len(split.rows) for split in self.queries)

    @property
    def query_offsets(self) -> NDArray[np.int64]:
        """Where each split begins on the axis of all queries, int64 [splits + 1]."""
        return np.cumsum([0, *(len(split.rows) for split in self.queries)])

    @property
    def own(self) -> NDArray[np.int64]:
        """Train rows of each query's own demonstrations, best first, int64 [S, Q, K]."""
        assert self.neighbours is not None
        return self.neighbours.rows[:, self.queries[0].rows, : self.shots[-1]]

    @property
    def used_rows(self) -> NDArray[np.int64]:
        """The train rows that are demonstrations somewhere, ascending."""
        shared = np.concatenate([group.sets.ravel() for group in self.orderings])
        return np.unique(shared if self.neighbours is None else self.own)

    def demonstrations(self, index_set: int, permutation: int, place: int, query: int = 0) -> NDArray[np.int64]:
        """Train rows of one cell's context, in order; ``place`` is on the K axis, and ``query`` says whose they are
        where each has its own. int64 [k]."""
        for group in self.orderings:
            if place < len(group.shots):
                rows = group.rows[index_set, permutation, : group.shots[place]]
                return rows if self.neighbours is None else self.own[index_set, query][rows]
            place -= len(group.shots)
        raise IndexError(place)


def draw(study: Study, task: Task, examples: Mapping[str, Examples]) -> Design:
    """The design of a study (arXiv 2511.09700: balanced sets, permutations shared across the sets).

    ``examples`` hold the splits train, test and, where the study asks for dev queries, dev. Raises `DataError` where a
    class has too few examples (naming task, class, number needed and number there), also for that many different sets,
    and `ConfigError` for more permutations than there are (or sets, of k = 0). Expected O(S * train + P * K + test).
    """
    train = examples["train"]
    known = set(train.hashes)
    queries = []
    for split, count in study.query_counts.items():
        drawn = draw_queries if study.balance == "classes" else draw_natural_queries
        queries.append(drawn(study.seed, count, task, examples[split], known))
        known |= set(examples[split].hashes)
    if study.calibration == "contextual":
        inputs = np.arange(len(CONTENT_FREE_INPUTS))
        queries.append(SplitQueries(CONTENT_FREE, inputs, inputs, num_excluded=0))
    shots = study.shot_list(task.shots)
    if study.is_per_query:
        own = own_neighbours(study, shots[-1], task, train, examples["test"])
        return Design(tuple(_rank_orders(study, shots)), tuple(queries), own)
    groups = _groups(study, shots)
    return Design(tuple(_draw_orderings(study, shots, task, train) for shots in groups), tuple(queries))


def _groups(study: Study, shots: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Numbers of shots that are prefixes of the same orderings; zero shots are a prefix of any."""
    if study.resample == "none":
        return [shots]
    has_none = len(shots) > 1 and shots[0] == 0
    alone: list[tuple[int, ...]] = [(count,) for count in shots[int(has_none) :]]
    return [(0, *alone[0]), *alone[1:]] if has_none else alone


def _draw_orderings(study: Study, shots: tuple[int, ...], task: Task, train: Examples) -> Orderings:
    # Orderings of their own are drawn by keys of their own, or small sets would be parts of large ones.
    own = "" if study.resample == "none" else f" of {shots[-1]}"
    if study.given_sets is None:
        sets = draw_sets(study.seed, study.sets, shots[-1], task, train, own)
    else:
        sets = _given_sets(study.given_sets, shots[-1], task, train)
    permutations = draw_permutations(study.seed, study.permutations, shots[-1], own, study.design)
    return Orderings(sets, permutations, shots)


def _rank_orders(study: Study, shots: tuple[int, ...]) -> Iterator[Orderings]:
    """The orders of ranks at each number of shots k: those of the largest without the ranks from k on."""
    most = shots[-1]
    if study.order == "permuted":
        orders = draw_permutations(study.seed, study.permutations, most)
    else:
        orders = np.arange(most)[:: -1 if study.order == "similar_last" else 1][None]
    for count in shots:
        ranks = np.tile(np.arange(count), (study.sets, 1))
        yield Orderings(ranks, orders[orders < count].reshape(len(orders), count), (count,))


def _given_sets(rows: list[list[int]], size: int, task: Task, train: Examples) -> NDArray[np.int64]:
    """Sets that the study names, int64 [S, size], in the order in which it names them."""
    sets = np.array(rows, dtype=np.int64)
    if sets.shape[1] != size:
        raise ConfigError(
            f"the largest of 'shots' is {size}, but 'demonstrations' has sets of {sets.shape[1]}; make them equal"
        )
    if sets.max() >= len(train):
        raise DataError(
            f"'demonstrations' names row {sets.max()}, but task {task.name!r} has {len(train)} train rows; correct it"
        )
    return sets


def draw_sets(seed: int, count: int, size: int, task: Task, train: Examples, own: str = "") -> NDArray[np.int64]:
    """``count`` different sets (see `draw_set`), int64 [count, size]; more keep the earlier ones. ``own`` is part of
    the key.

    A set that was drawn before is drawn anew from the same key. Raises `DataError`, also where there are fewer sets.
    """
    _refuse_too_many_sets(count, size, task, train)
    drawn: dict[bytes, NDArray[np.int64]] = {}
    for index in range(count):
        # Which draw is kept depends on earlier sets only; in another default order it is still the same set.
        draws = ((np.sort(rows).tobytes(), rows) for rows in _set_draws(seed, index, size, task, train, own))
        content, rows = next(draw for draw in draws if draw[0] not in drawn)
        drawn[content] = rows
    return np.stack(list(drawn.values()))


def draw_set(seed: int, index: int, size: int, task: Task, train: Examples) -> NDArray[np.int64]:
    """First draw of set number ``index``: ``size`` train rows, balanced over the classes, in default order; int64
    [size].

    A remainder goes to classes drawn anew for each set, first to those that have an example more than their share.
    Default order: by label word, then by text. Raises `DataError`.
    """
    return next(_set_draws(seed, index, size, task, train))


def _set_draws(
    seed: int, index: int, size: int, task: Task, train: Examples, own: str = ""
) -> Iterator[NDArray[np.int64]]:
    """Endless draws of one set: each continues the random streams of its key where the one before ended."""
    num_labels = len(task.classes)
    share, remainder = divmod(size, num_labels)
    pools = _pools(task, train)
    class_stream = _stream(seed, f"favoured classes{own}", index)
    streams = [_stream(seed, f"demonstrations{own}", index, label) for label in range(num_labels)]
    while True:
        favoured = sorted(_random_order(class_stream, num_labels), key=lambda label: len(pools[label]) <= share)
        favoured = favoured[:remainder]
        rows: list[int] = []
        for label, (pool, stream) in enumerate(zip(pools, streams, strict=True)):
            needed = share + int(label in favoured)
            if len(pool) < needed:
                raise DataError(
                    f"{_of_class(task, label)} has {len(pool)} train examples, but k = {size} needs {needed}"
                    f"{_of_it(task)}; lower the shots or add examples"
                )
            rows += pool[_random_order(stream, len(pool))[:needed]].tolist()
        yield _in_default_order(rows, task, train)


def _refuse_too_many_sets(count: int, size: int, task: Task, train: Examples) -> None:
    if size == 0 and count > 1:
        raise ConfigError(f"sets is {count}, but no demonstrations make only one set; set 'sets' to 1 or raise 'shots'")
    if 0 < (ways := num_different_sets(size, task, train)) < count:
        sizes = [len(pool) for pool in _pools(task, train)]
        scarce = int(np.argmin(sizes))
        holder = f"class {task.words[scarce]!r} has" if task.words else "there are"
        scarcity = f"{holder} {sizes[scarce]} train examples"
        raise DataError(
            f"task {task.name!r}: {count} sets were asked for, but there are only {ways} different "
            f"{'balanced ' if task.words else ''}sets of {size} demonstrations ({scarcity}); lower 'sets' or add "
            "examples"
        )


def num_different_sets(size: int, task: Task, train: Examples) -> int:
    """How many different balanced sets of ``size`` there are; 0 where a class has too few examples."""
    share, remainder = divmod(size, len(task.classes))
    # ways[r]: choices from the classes so far of which r give one more than their share.
    ways = [1] + [0] * remainder
    for available in (len(pool) for pool in _pools(task, train)):
        plain, more = math.comb(available, share), math.comb(available, share + 1)
        ways = [plain * ways[r] + (more * ways[r - 1] if r else 0) for r in range(remainder + 1)]
    return ways[remainder]


def _pools(task: Task, train: Examples) -> list[NDArray[np.int64]]:
    return [np.flatnonzero(train.labels == label) for label in range(len(task.classes))]


def draw_permutations(seed: int, count: int, size: int, own: str = "", design: str = "random") -> NDArray[np.int64]:
    """``count`` distinct permutations of ``size`` positions, int64 [count, size]; more keep the earlier ones. ``own``
    is part of the key.

    Every permutation by itself is uniform in every design; what differs is which come together. ``random`` draws each
    by itself. The others deal blocks (`study.orderings.block_size`), each drawn at random among those that are not
    there yet, their rows in random order; the last is a part of one where ``count`` is no multiple. ``latin``: the k
    shifts of a relabelled row, so that every demonstration stands at every position once, and, where k is even, comes
    directly after every other once (Williams 1949). ``antithetic``: an order and its reversal. ``prefix_coupled``: all
    orders of the last three positions after one beginning. ``exhaustive``: all size! orders, in random order.

    Raises `ConfigError` where there are fewer, and of an exhaustive design unless ``count`` is size!. Expected
    O(count * size), more as count nears size!.
    """
    if design == "exhaustive":
        return _every_order(seed, count, size, own)
    _refuse_too_many_orders(count, size, own)
    if design != "random":
        return _dealt_in_blocks(seed, count, size, own, design)
    drawn: dict[bytes, NDArray[np.int64]] = {}
    for index in range(count):
        stream = _stream(seed, f"permutation{own}", index)
        while (permutation := _random_order(stream, size)).tobytes() in drawn:
            pass  # the next draw of the same key: which one is kept depends on earlier permutations only
        drawn[permutation.tobytes()] = permutation
    return np.stack(list(drawn.values()))


def _refuse_too_many_orders(count: int, size: int, own: str) -> None:
    if size <= _MAX_EXACT_FACTORIAL and count > math.factorial(size):
        remedy = "lower 'permutations' or raise 'shots'"
        if own:
            least = next(k for k in range(1, _MAX_EXACT_FACTORIAL + 2) if math.factorial(k) >= count)
            remedy = f"leave k below {least} out of 'shots', such as 0,{least},{2 * least},{5 * least}"
        raise ConfigError(
            f"permutations is {count}, but {size} demonstrations have only {math.factorial(size)} orders; {remedy}"
        )


def _dealt_in_blocks(seed: int, count: int, size: int, own: str, design: str) -> NDArray[np.int64]:
    """Permutations of a design in blocks. Blocks of a design are a partition of all orders: two are equal or have no
    order in common, and the least row of a block tells which it is."""
    drawn: dict[bytes, NDArray[np.int64]] = {}
    num_rows = index = 0
    while num_rows < count:
        stream = _stream(seed, f"{design} permutations{own}", index)
        while (name := _least_row(rows := _block_of(design, _random_order(stream, size)))) in drawn:
            pass  # as for single permutations
        drawn[name] = rows[_random_order(stream, len(rows))]
        num_rows, index = num_rows + len(rows), index + 1
    return np.concatenate(list(drawn.values()))[:count]


def _block_of(design: str, first: NDArray[np.int64]) -> NDArray[np.int64]:
    """The permutations that a design deals together with ``first`` [size], or made of it; int64 [block, size]."""
    size = len(first)
    if size < 2:
        return first[None]
    if design == "antithetic":
        return np.stack([first, first[::-1]])
    if design == "prefix_coupled":
        kept = max(size - MOVED, 0)
        return np.stack([np.concatenate([first[:kept], tail]) for tail in map(np.array, all_orders(first[kept:]))])
    # 0, k-1, 1, k-2, ...: for even k every difference modulo k between neighbours comes once.
    zigzag = np.where(np.arange(size) % 2, size - (np.arange(size) + 1) // 2, np.arange(size) // 2)
    return np.asarray(first[(zigzag + np.arange(size)[:, None]) % size])


def _least_row(rows: NDArray[np.int64]) -> bytes:
    return rows[np.lexsort(rows.T[::-1])[0]].tobytes() if rows.shape[1] else b""


def _every_order(seed: int, count: int, size: int, own: str) -> NDArray[np.int64]:
    if size > MOST_EXHAUSTIVE:
        raise ConfigError(
            f"design is 'exhaustive', but {size} demonstrations have more than {math.factorial(MOST_EXHAUSTIVE):,} "
            f"orders; lower 'shots' to {MOST_EXHAUSTIVE} or choose another design, such as latin"
        )
    if count != (total := math.factorial(size)):
        raise ConfigError(
            f"permutations is {count}, but design 'exhaustive' of {size} demonstrations is all {total} orders and "
            f"cannot be smaller or grow; set 'permutations' to {total}"
        )
    orders = np.array(list(all_orders(range(size))), dtype=np.int64).reshape(total, size)
    return np.asarray(orders[keyed_permutation(total, seed, f"exhaustive permutations{own}")])


def draw_queries(seed: int, count: int, task: Task, examples: Examples, known: Set[str]) -> SplitQueries:
    """``count`` queries of a split, balanced over the classes, none of them of a content in ``known``.

    Classes take turns; one that has too few examples begins again with its first. A larger count keeps the earlier
    queries. Raises `DataError` for a class without examples. O(examples + count).
    """
    split, num_labels = examples.split, len(task.classes)
    fresh = np.array([content not in known for content in examples.hashes], dtype=bool)
    rows = np.empty(count, dtype=np.int64)
    suffix = _of_split(split)
    for turn, label in enumerate(keyed_permutation(num_labels, seed, f"query classes{suffix}")):
        pool = np.flatnonzero(fresh & (examples.labels == label))
        draws = np.arange(len(rows[turn::num_labels]))
        if not len(pool) and len(draws):
            num = int(np.sum(examples.labels == label))
            why = f" (all {num:,} repeat rows of another split, in the columns that are used)" if num else ""
            raise DataError(
                f"{_of_class(task, int(label))} has no usable {split} examples{why}, but {count} queries need "
                f"{len(draws)}{_of_it(task)}; add examples (or enlarge the split's share)"
                f"{', or remove the label and its rows' if task.words else ''}"
            )
        if len(draws):
            order = keyed_permutation(len(pool), seed, f"queries{suffix}", int(label))
            rows[turn::num_labels] = pool[order][draws % len(pool)]
    distinct, first, inverse = np.unique(rows, return_index=True, return_inverse=True)
    by_appearance = np.argsort(first, kind="stable")
    numbers = np.empty(len(distinct), dtype=np.int64)
    numbers[by_appearance] = np.arange(len(distinct))
    return SplitQueries(split, distinct[by_appearance], numbers[inverse], int(np.sum(~fresh)))


def deal_queries(
    seed: int, count: int, orderings: tuple[int, int], classes: Sequence[NDArray[np.int64]], *, is_even: bool
) -> NDArray[np.int64]:
    """The queries that each ordering is asked, ``count`` distinct ones, ascending; int64 [S, P, count].

    ``classes`` are the queries to deal, class by class: an ordering gets as many of each, but for one. ``is_even``
    deals decks of each class, shuffled anew when they end, over all ``orderings`` (S, P) in random order, so that
    every query of a class is asked as often as any other, but for one; any other size deals anew. Else every ordering
    draws by itself, whatever the others do. The caller sees that each class has enough. O(S * P * queries).
    """
    num_sets, num_permutations = orderings
    share, rest = divmod(count, len(classes))
    dealt = np.empty((num_sets * num_permutations, count), dtype=np.int64)
    order = keyed_permutation(len(dealt), seed, "orderings to deal queries to")
    decks = [np.empty(0, np.int64) for _ in classes]
    num_decks = 0
    for turn, ordering in enumerate(order.tolist()):
        place = divmod(ordering, num_permutations)
        begin = turn * rest if is_even else int(keyed_permutation(len(classes), seed, "its classes", *place)[0])
        extra = {(begin + one) % len(classes) for one in range(rest)}
        found: list[NDArray[np.int64]] = []
        for number, members in enumerate(classes):
            size = share + (number in extra)
            if not is_even:
                found.append(members[keyed_permutation(len(members), seed, "its queries", *place, number)[:size]])
                continue
            block, decks[number] = decks[number][:size], decks[number][size:]
            if len(block) < size:
                deck = members[keyed_permutation(len(members), seed, "deck of queries", num_decks)]
                num_decks += 1
                fresh = deck[~np.isin(deck, block)][: size - len(block)]
                block, decks[number] = np.concatenate([block, fresh]), deck[~np.isin(deck, fresh)]
            found.append(block)
        dealt[ordering] = np.sort(np.concatenate(found))
    return dealt.reshape(num_sets, num_permutations, count)


def draw_natural_queries(seed: int, count: int, task: Task, examples: Examples, known: Set[str]) -> SplitQueries:
    """``count`` queries of a split as they come, each once: a random sample of its rows of no content in ``known``.

    So classes are about as frequent as in the split, and every weight is 1. A larger count keeps the earlier queries.
    Raises `DataError` where there are fewer rows. O(examples log examples).
    """
    fresh = np.flatnonzero([content not in known for content in examples.hashes])
    if count > len(fresh):
        key = "queries" if examples.split == "test" else f"{examples.split}_queries"
        raise DataError(
            f"task {task.name!r} has {len(fresh)} usable {examples.split} examples, but {key!r} is {count} and balance "
            f"is 'natural', which asks each once; lower {key!r} to {len(fresh)} or add examples"
        )
    order = keyed_permutation(len(fresh), seed, f"natural queries{_of_split(examples.split)}")
    draws = np.arange(count)
    return SplitQueries(examples.split, fresh[order[:count]], draws, len(examples.hashes) - len(fresh))


def _of_split(split: str) -> str:
    """What a key of queries ends in: test keeps the keys that it had when it was the only split."""
    return "" if split == "test" else f" of {split}"


def content_free_examples(task: Task, train: Examples) -> Examples:
    """The content-free queries as a split: the first train row with each of `CONTENT_FREE_INPUTS` in place of every
    text and number; the label is -1, there is no right one.

    Raises `ConfigError` where the query template cannot be rendered with them.
    """
    fields = [_with_every_text(train.fields[0], text) for text in CONTENT_FREE_INPUTS]
    hashes = []
    for text, values in zip(CONTENT_FREE_INPUTS, fields, strict=True):
        try:
            hashes.append(hashlib.sha256(task.render_query(values).encode()).hexdigest())
        except DataError as error:
            raise ConfigError(
                f"calibration is 'contextual', but with {text!r} in every field {error}; set calibration to none"
            ) from None
    return Examples(
        split=CONTENT_FREE,
        fields=fields,
        labels=np.full(len(fields), -1, dtype=np.int64),
        answers=[""] * len(fields),
        hashes=hashes,
        num_duplicates=0,
        num_conflicting=0,
        digest=hashlib.sha256("/".join(hashes).encode()).hexdigest(),
    )


def _with_every_text(value: Any, text: str) -> Any:
    """``value`` with ``text`` for whatever is no list and no mapping in it."""
    if isinstance(value, Mapping):
        return {key: _with_every_text(entry, text) for key, entry in value.items()}
    return [_with_every_text(entry, text) for entry in value] if isinstance(value, list | tuple) else text


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


def _of_class(task: Task, label: int) -> str:
    return f"task {task.name!r}: class {task.words[label]!r}" if task.words else f"task {task.name!r}"


def _of_it(task: Task) -> str:
    return " of it" if task.words else ""


def _in_default_order(rows: list[int], task: Task, train: Examples) -> NDArray[np.int64]:
    """Train rows by label word, then by the text of the demonstration."""
    texts = task.render_demonstrations([train.fields[row] for row in rows], [train.answers[row] for row in rows])
    keys = [(task.classes[train.labels[row]], text) for row, text in zip(rows, texts, strict=True)]
    return np.array([rows[place] for place in sorted(range(len(rows)), key=keys.__getitem__)], dtype=np.int64)
