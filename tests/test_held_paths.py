"""Which paths of a growing tree a caller holds, against looking at all of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from iclperm.engine.growing_tree import GrowingTree, HeldPaths, IntArray


@dataclass(frozen=True, eq=False)
class Leaf:
    path: IntArray
    text: str | None = None

    @property
    def key(self) -> tuple[int, str | None]:
        return (int(self.path[-1]) if self.path.size else 0), self.text


def shared_with(held: list[Leaf], path: IntArray) -> tuple[list[Leaf], int]:
    """What stays held when a path is released, and of how many of its tokens that has the path: the obvious way."""
    kept = [leaf for leaf in held if leaf.path[: path.size].tolist() != path.tolist()]
    sizes = range(path.size + 1)
    alike = (size for leaf in kept for size in sizes if leaf.path[:size].tolist() == path[:size].tolist())
    return kept, max(alike, default=0)


@pytest.mark.parametrize("seed", range(10))
def test_as_looking_at_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree, paths, held = GrowingTree(10_000), HeldPaths[Leaf](), list[Leaf]()
    for _ in range(100):
        what = rng.random()
        above = held[rng.integers(len(held))].path if held and rng.random() < 0.7 else np.empty(0, np.int64)
        if what < 0.7 or len(held) < 3:
            path = tree.insert(above, rng.integers(0, 3, rng.integers(len(held) > 0, 4)).astype(np.int32))
            one = Leaf(path, [None, "a"][rng.integers(2)])
            found = paths.add(one.key, one, path)
            assert (found is one) == all(leaf.key != one.key for leaf in held)
            held += [one] if found is one else []
        elif what < 0.85:
            del held[rng.integers(len(held))]  # the caller lets go of it
            one = found = None  # type: ignore[assignment]
        else:
            path = held[rng.integers(len(held))].path
            held, shared = shared_with(held, path)  # of which the caller lets go at once
            assert paths.release(path) == shared
            one = found = None  # type: ignore[assignment]
        assert len(paths) == len(held)
    assert len(held) > 1


def test_one_of_many_is_released_without_looking_at_the_others() -> None:
    """Work, not seconds: of those that are not beneath it no path is read."""
    tree, paths = GrowingTree(10), HeldPaths[Leaf]()
    leaves = [Leaf(tree.insert(np.empty(0, np.int64), np.array([7, number], np.int32))) for number in range(2_000)]
    for leaf in leaves:
        paths.add(leaf.key, leaf, leaf.path)
    removed: list[object] = []
    remove = paths._remove
    paths._remove = lambda key: (removed.append(key), remove(key))[1]  # type: ignore[method-assign,func-returns-value]
    for number, leaf in enumerate(leaves):
        assert paths.release(leaf.path) == (number < len(leaves) - 1), "the token that all begin with"
    assert removed == [leaf.key for leaf in leaves]
