"""Packs of a session: what paths lack, and the tokens that something is read after; integers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.engine.growing_tree import GrowingTree
from iclperm.engine.plan import Pack
from iclperm.engine.tree import IntArray, TokenArray
from iclperm.errors import RequestError


@dataclass(frozen=True)
class WantedPath:
    """What is asked of one path: the log-probabilities of ``ids`` int32 [X], each after the token of the path at
    ``places`` int64 [X], rising."""

    path: IntArray
    places: IntArray
    ids: TokenArray


class PackPairs(NamedTuple):
    """What is read [X], rows rising: of which request, which of its ids, the id, and after which of ``tokens`` [U]."""

    number: IntArray
    place: IntArray
    ids: TokenArray
    row: IntArray
    tokens: IntArray


class Packer:
    """A pack in the making: what requests lack, and the tokens that something is read after.

    ``new`` are the tokens that have slots since, and will have keys and values when the pack has run (``has_run``).
    Tokens that something was read after before are read again from what was kept of them, unless ``is_anew``.
    """

    def __init__(self, tree: GrowingTree, room: int, *, is_anew: bool = False) -> None:
        self.has_run = False
        self._tree, self._room, self._is_anew = tree, room, is_anew
        self._row = np.full(len(tree) + 1, -1)  # of each token of the tree
        self._visits: list[IntArray] = []  # tokens of each, one after the other
        self._spans: list[IntArray] = []  # of each visit [n, 3]: source, begin, end
        self._new: list[IntArray] = []
        self._pinned: list[IntArray] = []
        self._pairs: list[tuple[int, int, int, int]] = []  # request, which of its ids, id, token
        self._path: IntArray | None = None  # the last one: others may ask about it as well
        self._size = 0

    def __len__(self) -> int:
        """Tokens to be forwarded."""
        return self._size

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to forward or to read."""
        return not (self._size or self._pairs)

    @property
    def new(self) -> IntArray:
        return np.concatenate(self._new) if self._new else np.empty(0, np.int64)

    def add(self, number: int, one: WantedPath, read: int) -> int:
        """Take what request ``number`` lacks, of whose ids ``read`` are done; how many are when the pack has run.

        Fewer than all if its path has no room here: it goes on in the next pack. Raises RequestError where the pool has
        no room for one path.
        """
        path, asked = one.path, one.path[one.places[read:]]
        if not (path is self._path and self._is_there(asked).all()) and not self._feed(path, one.places[read:]):
            return read
        is_there = self._is_there(asked)
        count = asked.size if is_there.all() else int(is_there.argmin())
        ids = one.ids[read : read + count].tolist()
        self._pairs += zip([number] * count, range(read, read + count), ids, asked[:count].tolist(), strict=True)
        return read + count

    def _feed(self, path: IntArray, places: IntArray) -> bool:
        """Take what a path lacks to be read at ``places``, as far as the pack has room; whether the pool has."""
        asked = path[places]
        self._tree.touch(path)
        is_fed = (self._tree.slots_of(path) < 0) & (self._row[path] < 0)
        is_fed[places[~self._is_there(asked)]] = True
        fed = path[is_fed][: self._room - self._size]
        new = fed[self._tree.slots_of(fed) < 0]
        self._new.append(new)
        if new.size and not self._tree.hold(new, [path, *self._pinned]):
            self._new.pop()
            if not self.is_empty:
                return False
            raise RequestError(
                f"a path of {path.size} tokens has no room in the session's memory, which holds "
                f"{self._tree.num_slots}; raise memory_budget, or shorten it"
            )
        self._pinned.append(path)
        self._visit(path, fed)
        self._path = path
        return True

    def _is_there(self, tokens: IntArray) -> npt.NDArray[np.bool_]:
        """Whether each token can be read after when the pack has run."""
        return (self._row[tokens] >= 0) | self._is_known(tokens)

    def _is_known(self, tokens: IntArray) -> npt.NDArray[np.bool_]:
        """Whether what something is read from was kept of each token."""
        return self._tree.is_read(tokens) & (not self._is_anew)

    def _visit(self, path: IntArray, fed: IntArray) -> None:
        """Rows for some tokens of a path, in visits of tokens that follow each other."""
        place = np.searchsorted(path, fed)  # a token's number is above those of its ancestors
        for run in np.split(np.arange(fed.size), np.flatnonzero(np.diff(place) != 1) + 1):
            if run.size:
                above = path[: place[run[0]]]
                row = self._row[above]
                self._spans.append(_runs(row >= 0, np.where(row >= 0, row, self._tree.slots_of(above))))
                self._visits.append(fed[run])
                self._row[fed[run]] = self._size + np.arange(run.size)
                self._size += run.size

    def pairs(self) -> PackPairs:
        """All that is read, from what this pack leaves and from what others left."""
        number, place, ids, token = np.array(self._pairs, np.int64).reshape(-1, 4).T
        order = np.argsort(token, kind="stable")
        tokens, row = np.unique(token[order], return_inverse=True)
        return PackPairs(number[order], place[order], ids[order].astype(np.int32), row, tokens)

    def pack(self, pairs: PackPairs) -> tuple[Pack, IntArray, IntArray]:
        """The pack, the tokens that its scored rows are of, and which of ``pairs`` its wanted pairs are."""
        tokens, new = np.concatenate(self._visits), self.new
        new = new[np.argsort(self._row[new])]
        kept = _runs(np.zeros(new.size, bool), self._row[new], self._tree.slots_of(new))
        row = self._row[pairs.tokens[pairs.row]]
        mine = np.argsort(row, kind="stable")[np.count_nonzero(row < 0) :]
        scored = np.unique(row[mine])
        begins = np.cumsum([0, *(visit.size for visit in self._visits)])
        spans = np.concatenate(self._spans)
        depth = self._tree.depth_of(tokens)
        pack = Pack.of(
            token_ids=self._tree.ids_of(tokens),
            positions=depth - 1,
            visit_row_offsets=begins,
            visit_pos=depth[begins[:-1]] - 1,
            span_offsets=np.cumsum([0, *(len(each) for each in self._spans)]),
            span_source=spans[:, 0],
            span_begin=spans[:, 1],
            span_end=spans[:, 2],
            retain_begin=kept[:, 1],
            retain_end=kept[:, 2],
            retain_slot=kept[:, 3],
            scored_rows=scored,
            pair_row=np.searchsorted(scored, row[mine]),
            pair_id=pairs.ids[mine],
            pair_out=np.arange(mine.size),
            held_tokens=self._tree.num_resident - new.size,
        )
        return pack, tokens[scored], mine


def filled(packer: Packer, wanted: Sequence[WantedPath], number: int, read: int) -> tuple[int, int]:
    """Take what requests lack from ``number`` on, of whose ids ``read`` are done, as far as there is room; the request
    that comes next, and how many of its ids will be done."""
    while number < len(wanted):
        read = packer.add(number, wanted[number], read)
        if read < wanted[number].places.size:
            break
        number, read = number + 1, 0
    return number, read


def tokens_naive(wanted: Sequence[WantedPath]) -> int:
    """Of each distinct prompt its tokens, and for each continuation its own before the last."""
    prompts, rows = {}, {}
    for one in wanted:
        prompt, size = int(one.path[one.places[0]]), int(one.places[0]) + 1
        prompts[prompt] = size
        rows[prompt, int(one.path[-1]), int(one.ids[-1])] = one.path.size - size
    return sum(prompts.values()) + sum(rows.values())


def _runs(in_pack: npt.NDArray[np.bool_], places: IntArray, slots: IntArray | None = None) -> IntArray:
    """Consecutive places as half-open ranges [n, 3]: whether they are rows of the pack, begin, end; of rows that go to
    ``slots`` [n, 4], as long as these follow each other, too, with the first."""
    breaks = (np.diff(in_pack) != 0) | (np.diff(places) != 1)
    if slots is not None:
        breaks |= np.diff(slots) != 1
    first = np.flatnonzero(np.append(True, breaks))[: places.size]
    ends = np.append(first, places.size)[1:] - 1
    columns = [in_pack[first].astype(np.int64), places[first], places[ends] + 1]
    return np.stack(columns if slots is None else [*columns, slots[first]], axis=1)
