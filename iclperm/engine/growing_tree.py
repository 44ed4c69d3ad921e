"""A tree of tokens that only grows, and which of them have keys and values in a pool now; integers only.

A token is a number; 0 is the root, before any token. What does not fit in the pool is evicted, cheapest first: a token
is worth what making it again costs, added to a clock that runs on as others go (GreedyDual). Only tokens beneath which
nothing is in the pool are evicted, so what is left of a path always begins at its beginning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar
from weakref import KeyedRef

import numpy as np
import numpy.typing as npt

from iclperm.engine.rows import Ranges, Slots
from iclperm.engine.tree import IntArray, TokenArray

ROOT = 0
_NO_SLOT = -1


class GrowingTree:
    """Tokens with their parents, and the pool of ``num_slots`` that holds some of them.

    ``num_evicted`` counts the tokens whose keys and values had to make place.
    """

    def __init__(self, num_slots: int) -> None:
        self._size = 1
        self._parent, self._token, self._depth, self._slot, self._num_beneath = (
            np.zeros(64, np.int64) for _ in range(5)
        )
        self._worth = np.zeros(64)
        self._is_read = np.zeros(64, bool)
        self._slot[ROOT] = _NO_SLOT
        self._child: dict[tuple[int, int], int] = {}
        self._slots = Slots(num_slots)
        self.num_slots = num_slots
        self._clock = 0.0
        self.num_evicted = 0

    def __len__(self) -> int:
        """Distinct tokens."""
        return self._size - 1

    @property
    def num_resident(self) -> int:
        """Tokens in the pool."""
        return self._slots.num_used

    def insert(self, path: IntArray, ids: TokenArray) -> IntArray:
        """The path of ``path`` with token ids after it: numbers int64 [P + N], those that were not there are new."""
        last = int(path[-1]) if path.size else ROOT
        found: list[int] = []
        for place, token in enumerate(ids.tolist()):
            number = self._child.get((last, token))
            if number is None:
                return np.concatenate([path, np.array(found, np.int64), self._append(last, ids[place:])])
            found.append(number)
            last = number
        return np.concatenate([path, np.array(found, np.int64)])

    def ids_of(self, path: IntArray) -> TokenArray:
        """Token ids int32 along a path."""
        return self._token[path].astype(np.int32)

    def depth_of(self, tokens: IntArray) -> IntArray:
        """Tokens on the path of each, itself included."""
        return self._depth[tokens]

    def slots_of(self, path: IntArray) -> IntArray:
        """The slot of each token, -1 where its keys and values are not there."""
        return self._slot[path]

    def is_read(self, tokens: IntArray) -> npt.NDArray[np.bool_]:
        """Whether what comes out of the model after each token was kept in its slot, too."""
        return self._is_read[tokens]

    def mark_read(self, tokens: IntArray) -> None:
        """What comes out after these, which have slots, is kept now."""
        self._is_read[tokens] = True

    def touch(self, path: IntArray) -> None:
        """A path is used now."""
        self._worth[path] = self._clock + self._cost(path)

    def hold(self, tokens: IntArray, pinned: Iterable[IntArray]) -> bool:
        """Give tokens slots, evicting what is on none of the paths ``pinned`` if need be; False if there is no room
        even so."""
        if not self._make_room(tokens.size, pinned):
            return False
        self._slot[tokens] = _listed(self._slots.take(tokens.size))
        np.add.at(self._num_beneath, self._parent[tokens], 1)
        self.touch(tokens)
        return True

    def release(self, tokens: IntArray) -> None:
        """Take tokens out of the pool, but those beneath which others are in it."""
        for number in tokens[::-1].tolist():
            if self._slot[number] != _NO_SLOT and not self._num_beneath[number]:
                self._evict([number])

    def beneath(self, token: int) -> IntArray:
        """The tokens in the pool on all paths that go on from ``token``, each after its ancestors."""
        if not self._num_beneath[token]:
            return np.empty(0, np.int64)
        resident = np.flatnonzero(self._slot[: self._size] != _NO_SLOT)
        resident = resident[self._depth[resident] > self._depth[token]]
        is_beneath = np.zeros(self._size, bool)
        is_beneath[token] = True
        order = resident[np.argsort(self._depth[resident], kind="stable")]
        for level in np.split(order, np.flatnonzero(np.diff(self._depth[order])) + 1):
            is_beneath[level] = is_beneath[self._parent[level]]
        found: IntArray = order[is_beneath[order]]
        return found

    def forget(self) -> None:
        """Take all tokens out of the pool: what they have there is not known."""
        self._slot[:], self._num_beneath[:], self._is_read[:] = _NO_SLOT, 0, False
        self._slots = Slots(self.num_slots)

    def _append(self, parent: int, ids: TokenArray) -> IntArray:
        begin, end = self._size, self._size + ids.size
        self._grow(end)
        numbers = np.arange(begin, end)
        self._parent[begin:end] = np.concatenate([[parent], numbers[:-1]])
        self._token[begin:end], self._slot[begin:end] = ids, _NO_SLOT
        self._depth[begin:end] = self._depth[parent] + np.arange(1, ids.size + 1)
        keys = zip(self._parent[begin:end].tolist(), ids.tolist(), strict=True)
        self._size = end  # first, so that no number is given twice if an interrupt comes in between
        self._child.update(zip(keys, range(begin, end), strict=True))
        return numbers

    def _grow(self, size: int) -> None:
        if size > self._token.size:
            for name in ("_parent", "_token", "_depth", "_slot", "_num_beneath", "_worth", "_is_read"):
                array = getattr(self, name)
                setattr(
                    self, name, np.concatenate([array, np.zeros(max(size, 2 * array.size) - array.size, array.dtype)])
                )

    def _cost(self, tokens: IntArray) -> npt.NDArray[np.float64]:
        """What making tokens again costs, in forward passes of one: attention adds its part with the position."""
        return 1.0 + self._depth[tokens] / 4096.0

    def _make_room(self, count: int, pinned: Iterable[IntArray]) -> bool:
        missing = count - (self.num_slots - self._slots.num_used)
        if missing <= 0:
            return True
        is_pinned = np.zeros(self._size, bool)
        for path in pinned:
            is_pinned[path] = True
        resident = np.flatnonzero(self._slot[: self._size] != _NO_SLOT)
        if np.count_nonzero(~is_pinned[resident]) < missing:
            return False
        bare = resident[(self._num_beneath[resident] == 0) & ~is_pinned[resident]]
        heap = list(zip(self._worth[bare].tolist(), bare.tolist(), strict=True))
        heapify(heap)
        while missing and heap:
            worth, number = heappop(heap)
            self._clock = max(self._clock, worth)
            self._evict([number])
            self.num_evicted += 1
            missing -= 1
            parent = int(self._parent[number])
            if parent != ROOT and not self._num_beneath[parent] and not is_pinned[parent]:
                heappush(heap, (float(self._worth[parent]), parent))
        return not missing

    def _evict(self, numbers: list[int]) -> None:
        for number in numbers:
            slot = int(self._slot[number])
            self._slot[number], self._is_read[number] = _NO_SLOT, False
            self._num_beneath[self._parent[number]] -= 1
            self._slots.give([(slot, slot + 1)])  # last: an interrupt in between may lose a slot, never give it twice


Held = TypeVar("Held")
_Key = tuple[int, str | None]


class HeldPaths(Generic[Held]):
    """What a caller holds, each with its path, and how many of these paths go through each token.

    Held things are equal by key: the number of the last token, and a text. They are not kept alive; of one that the
    caller let go of the path is forgotten at the next call.
    """

    def __init__(self) -> None:
        self._held: dict[_Key, tuple[KeyedRef[_Key, Held], IntArray]] = {}
        self._through = np.zeros(64, np.int64)
        self._gone = deque[KeyedRef[_Key, Held]]()  # which garbage collection fills, at any time and in any thread

    def __len__(self) -> int:
        """How many are held."""
        self._settle()
        return len(self._held)

    def add(self, key: _Key, one: Held, path: IntArray) -> Held:
        """The one that is held by that key, and if there is none this one from now on. O(tokens)."""
        self._settle()
        there = self._held[key][0]() if key in self._held else None
        if there is not None:
            return there
        self._remove(key)
        self._held[key] = KeyedRef(one, self._gone.append, key), path
        if path.size and (last := int(path.max())) >= self._through.size:
            self._through = np.concatenate([self._through, np.zeros(last + 1, np.int64)])
        self._through[path] += 1
        return one

    def release(self, path: IntArray) -> int:
        """What has this path or a longer one is held no more; of how many of its tokens others hold the path.

        O(tokens), and O(held) where longer ones are among them.
        """
        self._settle()
        size, last = path.size, int(path[-1]) if path.size else ROOT
        ending = [key for key in self._held if key[0] == last]
        for key in ending if size and len(ending) == self._through[last] else list(self._held):
            theirs = self._held[key][1]
            if theirs.size >= size and (not size or theirs[size - 1] == last):
                self._remove(key)
        return int(np.count_nonzero(self._through[path] > 0))

    def _settle(self) -> None:
        while self._gone:
            gone = self._gone.popleft()
            if gone.key in self._held and self._held[gone.key][0] is gone:
                self._remove(gone.key)

    def _remove(self, key: _Key) -> None:
        if key in self._held:
            self._through[self._held.pop(key)[1]] -= 1


def _listed(ranges: Ranges) -> IntArray:
    return np.concatenate([np.arange(begin, end) for begin, end in ranges]) if ranges else np.empty(0, np.int64)
