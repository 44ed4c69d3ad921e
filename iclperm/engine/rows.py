"""Live rows, the tree above them, the slots that their keys lie in, and packs of live rows and tree rows; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from iclperm.engine.kernels.chunks import PIECE
from iclperm.engine.plan import LiveRows, Pack
from iclperm.engine.tree import IntArray, PrefixTree, TokenArray

Ranges = list[tuple[int, int]]
"""Half-open ranges of slots."""


class Slots:
    """Free slots of a pool, as ranges; the lowest that lie side by side are taken first."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free: Ranges = [(0, num_slots)]

    @property
    def num_used(self) -> int:
        return self._num_slots - sum(end - begin for begin, end in self._free)

    def take(self, count: int) -> Ranges:
        """``count`` slots, ascending: next to each other if there is room, for memory gives neighbours sooner."""
        if not count:
            return []
        for number, (begin, end) in enumerate(self._free):
            if end - begin >= count:
                self._free[number : number + 1] = [(begin + count, end)] if begin + count < end else []
                return [(begin, begin + count)]
        taken: Ranges = []
        while count:
            begin, end = self._free.pop(0)
            cut = min(end, begin + count)
            taken.append((begin, cut))
            count -= cut - begin
            if cut < end:
                self._free.insert(0, (cut, end))
        return taken

    def give(self, ranges: Ranges) -> None:
        """Free slots again."""
        self._free = _joined(sorted([*self._free, *ranges]))


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges in the same order, those that follow on each other made one."""
    joined: Ranges = []
    for begin, end in ranges:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined


def _part(ranges: Ranges, begin: int, end: int) -> Ranges:
    """The ``begin``-th to ``end``-th slots of ranges."""
    parts, passed = [], 0
    for first, last in ranges:
        low, high = max(begin - passed, 0), min(end - passed, last - first)
        if low < high:
            parts.append((first + low, first + high))
        passed += last - first
    return parts


@dataclass(slots=True, eq=False)
class Segment:
    """A piece of the tree, as long as rows beneath it are not done: tokens from position ``begin`` on."""

    tokens: TokenArray
    begin: int
    parent: Segment | None
    num_waiting: int  # rows at or beneath it that are not done
    slots: Ranges = field(default_factory=list)  # of all its tokens, once a row beneath it is let in
    filled: int = 0  # tokens whose keys and values are there
    fresh: int = 0  # tokens after them that are in the pack being made ...
    row: int = 0  # ... from this row on

    @property
    def path(self) -> list[Segment]:
        """From the root to this one."""
        segments: list[Segment] = []
        segment: Segment | None = self
        while segment is not None:
            segments.append(segment)
            segment = segment.parent
        return segments[::-1]


class Branches:
    """A tree cut into segments wherever a prompt ends; ``ends`` are the tokens that prompts end with, ascending."""

    def __init__(self, tree: PrefixTree, ends: IntArray) -> None:
        node_offsets = np.asarray(tree.token_offsets)
        offsets = np.union1d(node_offsets, ends + 1)
        begins = offsets[:-1]
        node = np.searchsorted(node_offsets, begins, side="right") - 1
        last_of_parent = node_offsets[tree.parent[node] + 1] - 1
        parent = np.searchsorted(offsets, last_of_parent, side="right") - 1
        self._parent = np.where(begins > node_offsets[node], np.arange(node.size) - 1, parent).tolist()
        self._begin = (tree.depth[node] + begins - node_offsets[node]).tolist()
        self._tokens = np.split(np.asarray(tree.tokens), begins[1:])
        self.ends: list[int] = (np.searchsorted(offsets, ends, side="right") - 1).tolist()
        self._num_waiting = [0] * node.size
        for end in self.ends:
            self._num_waiting[end] += 1
        for number in range(node.size - 1, -1, -1):
            if self._parent[number] >= 0:
                self._num_waiting[self._parent[number]] += self._num_waiting[number]

    def beneath(self, trunk: Segment | None) -> Iterator[list[Segment]]:
        """The path of every prompt after ``trunk``, in tree order."""
        depth = 0 if trunk is None else trunk.begin + trunk.tokens.size
        segments: list[Segment] = []
        for tokens, begin, parent, waiting in zip(
            self._tokens, self._begin, self._parent, self._num_waiting, strict=True
        ):
            segments.append(Segment(tokens, depth + begin, trunk if parent < 0 else segments[parent], waiting))
        return (segments[end].path for end in self.ends)


@dataclass(slots=True, eq=False)
class LiveRow:
    """A live row. Its keys lie, in the order of positions, in pool slots ``span_begin[i]`` to ``span_end[i]``.

    In a lane they lie where the table of slots says, and spans are not kept.
    """

    number: int
    path: list[Segment]
    ids: list[int] = field(default_factory=list)
    logprob: float = 0.0
    num_tokens: int = 0
    num_own: int = 0  # generated tokens whose keys and values are in the pool
    is_over: bool = False
    span_begin: list[int] = field(default_factory=list)
    span_end: list[int] = field(default_factory=list)
    slots: Ranges = field(default_factory=list)  # its own, for all tokens that it may come to feed
    lane: int = -1

    @property
    def prompt_length(self) -> int:
        return self.path[-1].begin + self.path[-1].tokens.size

    @property
    def position(self) -> int:
        """Of its last token."""
        return self.prompt_length + self.num_own

    @property
    def num_slots(self) -> int:
        """Positions that have a slot, used or not."""
        return self.prompt_length + sum(end - begin for begin, end in self.slots)

    def slot(self, number: int) -> int:
        """Where the keys of its ``number``-th generated token go."""
        for begin, end in self.slots:
            if number < end - begin:
                return begin + number
            number -= end - begin
        raise IndexError(f"row {self.number} feeds more tokens than it has slots for")

    def remember(self, begin: int, end: int) -> None:
        """Slots ``begin:end`` hold the keys of the positions that follow."""
        if self.span_end and self.span_end[-1] == begin:
            self.span_end[-1] = end
        else:
            self.span_begin.append(begin)
            self.span_end.append(end)


class Lanes:
    """Which lane of the table of slots each live row has, and what is new in the table since it was last asked for.

    A lane has room for the longest path, ``longest`` positions.
    """

    def __init__(self, num_lanes: int, longest: int) -> None:
        self._num_lanes, self._width = num_lanes, -(-longest // PIECE) * PIECE
        self._free = list(range(num_lanes))
        self._new: list[LiveRow] = []

    def enter(self, row: LiveRow) -> None:
        """Give a lane to a row that has all its slots."""
        row.lane = self._free.pop()
        self._new.append(row)

    def leave(self, row: LiveRow) -> None:
        """Free a row's lane."""
        if row.lane >= 0:
            self._free.append(row.lane)

    def rows(self, rows: Sequence[LiveRow]) -> LiveRows:
        """All rows that are in a lane, in the order of the tree."""
        places, slots = [np.empty(0, np.int64)], [np.empty(0, np.int32)]
        for row in self._new:
            places.append(row.lane * self._width + np.arange(row.num_slots))
            ranges = [*(each for segment in row.path for each in segment.slots), *row.slots]
            slots += [np.arange(begin, end, dtype=np.int32) for begin, end in ranges]
        self._new.clear()
        return LiveRows(
            num_lanes=self._num_lanes,
            width=self._width,
            lanes=np.array([row.lane for row in rows], np.int32),
            lengths=np.array([row.num_slots for row in rows], np.int32),
            shared=np.array([0, *(_in_common(*pair) for pair in pairwise(rows))], np.int32),
            changed_place=np.concatenate(places),
            changed_slot=np.concatenate(slots),
        )


def _in_common(one: LiveRow, other: LiveRow) -> int:
    """Leading positions that two rows share."""
    size = 0
    for mine, theirs in zip(one.path, other.path, strict=False):
        if mine is not theirs:
            break
        size = mine.begin + mine.tokens.size
    return size


class PackBuilder:
    """A pack in the making, of ``room`` more tokens at most."""

    def __init__(self, room: int, held_tokens: int) -> None:
        self.room = room
        self.fresh: list[Segment] = []
        self._held_tokens = held_tokens
        self._ids: list[int] = []
        self._positions: list[int] = []
        self._row_offsets, self._span_offsets = [0], [0]
        self._visit_pos: list[int] = []
        self._source: list[int] = []
        self._begin: list[int] = []
        self._end: list[int] = []
        self._retained: list[tuple[int, int, int]] = []
        self._scored: list[int] = []
        self._live: LiveRows | None = None

    def __len__(self) -> int:
        return len(self._ids)

    def go_on(self, row: LiveRow) -> None:
        """Take a row's last token, whose keys and values go to the next of its own slots."""
        number, position, slot = len(self._ids), row.position, row.slot(row.num_own)
        self._source += [0] * len(row.span_begin)
        self._begin += row.span_begin
        self._end += row.span_end
        self._scored.append(number)
        self._retained.append((number, number + 1, slot))
        self._ids.append(row.ids[-1])
        self._positions.append(position)
        self._visit_pos.append(position)
        self._row_offsets.append(number + 1)
        self._span_offsets.append(len(self._source))
        self.room -= 1

    def go_on_in_lanes(self, rows: Sequence[LiveRow], live: LiveRows) -> None:
        """Take the last token of all live rows, before anything else; where their keys lie ``live`` says."""
        self._live = live
        self._ids = [row.ids[-1] for row in rows]
        self._positions = [row.position for row in rows]
        self._scored = list(range(len(rows)))
        self._row_offsets = [len(rows)]
        self.room -= len(rows)

    def encode(self, path: list[Segment]) -> bool:
        """Take what is not encoded of a prompt, as far as there is room; whether its last token is taken."""
        for number, segment in enumerate(path):
            missing = segment.tokens.size - segment.filled - segment.fresh
            if not missing:
                continue
            if not self.room:
                return False
            for ancestor in path[:number]:
                self._spans_of(ancestor)
            self._spans_of(segment)
            segment.fresh, segment.row = min(missing, self.room), len(self)
            begin, end = segment.filled, segment.filled + segment.fresh
            self.fresh.append(segment)
            self._visit(segment.tokens[begin:end].tolist(), segment.begin + begin, _part(segment.slots, begin, end))
            if segment.fresh < missing:
                return False
        self._scored.append(path[-1].row + path[-1].fresh - 1)
        return True

    def pack(self) -> Pack:
        begins, ends, slots = zip(*self._retained, strict=True) if self._retained else ((), (), ())
        return Pack.of(
            token_ids=self._ids,
            positions=self._positions,
            visit_row_offsets=self._row_offsets,
            visit_pos=self._visit_pos,
            span_offsets=self._span_offsets,
            span_source=self._source,
            span_begin=self._begin,
            span_end=self._end,
            retain_begin=begins,
            retain_end=ends,
            retain_slot=slots,
            scored_rows=self._scored,
            held_tokens=self._held_tokens,
            live=self._live,
        )

    def _spans_of(self, segment: Segment) -> None:
        for begin, end in _part(segment.slots, 0, segment.filled):
            self._span(0, begin, end)
        if segment.fresh:
            self._span(1, segment.row, segment.row + segment.fresh)

    def _span(self, source: int, begin: int, end: int) -> None:
        starts_visit = len(self._source) == self._span_offsets[-1]
        if not starts_visit and self._source[-1] == source and self._end[-1] == begin:
            self._end[-1] = end
            return
        self._source.append(source)
        self._begin.append(begin)
        self._end.append(end)

    def _visit(self, ids: list[int], position: int, slots: Ranges) -> None:
        row = len(self)
        for begin, end in slots:
            self._retained.append((row, row + end - begin, begin))
            row += end - begin
        self._ids += ids
        self._positions += range(position, position + len(ids))
        self._visit_pos.append(position)
        self._row_offsets.append(len(self))
        self._span_offsets.append(len(self._source))
        self.room -= len(ids)
