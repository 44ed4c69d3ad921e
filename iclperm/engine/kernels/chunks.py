"""Which keys of decoding rows are read together: work items over chunks of their paths; arrays only, no torch.

Paths are cut in chunks of `CHUNK` positions counted from the root. Each row has the state of a softmax for every chunk
of its path, whoever computes it and in how many pieces: rows that lie side by side and share the beginning of a chunk
have it computed at once, and each goes on from there with the keys of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from iclperm.engine.tree import IntArray, TokenArray

# The borders of chunks are where softmaxes are merged, so they set the last bits of what is generated: a rule, and the
# same on every device. 256 keys of a key-value head take several times as long to read as a row's state to write, and a
# path of a thousand positions is four programs.
CHUNK = 256
# What rows share is cut to whole pieces of this size; every kernel's tile divides it.
PIECE = 64


@dataclass(frozen=True)
class WorkItems:
    """What programs take: int32 [items, 4] of first row, one past the last, first position, one past the last.

    An item is of one chunk. ``shared`` items begin where their chunk does and come first; ``own`` ones are of one row
    and begin there or where a shared one of that row ended. Both come in falling order of their positions.
    """

    shared: TokenArray
    own: TokenArray


def list_items(lengths: TokenArray, shared: TokenArray, block_rows: int) -> WorkItems:
    """The items of R rows with paths of ``lengths`` [R] positions, of which the first ``shared`` [R] are those of the
    row before it; a shared item has at most ``block_rows`` rows.

    Cost O(R x chunks of the longest path), in array operations.
    """
    num_rows, num_chunks = lengths.size, -(-int(lengths.max(initial=0)) // CHUNK)
    first = CHUNK * np.arange(num_chunks)[:, None]
    alike = np.clip(shared // PIECE * PIECE - first, 0, CHUNK)  # [chunks, R] positions shared with the row before
    alike[:, :1] = 0
    if block_rows == 1:
        alike[:] = 0
    begins = _begins_group(alike)
    groups = np.flatnonzero(begins)
    common = np.minimum.reduceat(np.where(begins, CHUNK, alike).ravel(), groups)  # `CHUNK` where a row is alone
    sizes = np.diff(np.append(groups, begins.size))
    chunk, row = np.divmod(groups, max(1, num_rows))
    is_shared = sizes > 1
    end = np.where(is_shared, chunk * CHUNK + common, chunk * CHUNK)
    own_begin = np.repeat(end, sizes).reshape(begins.shape)
    own_end = np.minimum(first + CHUNK, lengths)
    at, alone = np.nonzero(own_begin < own_end)
    own = np.column_stack([alone, alone + 1, own_begin[at, alone], own_end[at, alone]])
    together = _blocks(row[is_shared], sizes[is_shared], block_rows)
    of = together[:, 0]
    begin = (chunk * CHUNK)[is_shared][of]
    shared_items = np.column_stack([together[:, 1:], begin, end[is_shared][of]])
    return WorkItems(_longest_first(shared_items), _longest_first(own))


def _begins_group(alike: IntArray) -> npt.NDArray[np.bool_]:
    """[chunks, R] whether a row begins a group of rows that have a chunk's beginning computed together.

    A row is in the group of the row before it unless it shares nothing with it, or less than half of what either of the
    two shares with its other neighbour: where one context ends and the next begins.
    """
    before = np.pad(alike[:, :-1], ((0, 0), (1, 0)))
    after = np.pad(alike[:, 1:], ((0, 0), (0, 1)))
    begins: npt.NDArray[np.bool_] = (alike == 0) | (2 * alike < np.maximum(before, after))
    return begins


def _blocks(row: IntArray, sizes: IntArray, block_rows: int) -> IntArray:
    """Groups of ``sizes`` rows from ``row`` on, cut as evenly as can be: [blocks, 3] of group, first row, end."""
    counts = -(-sizes // block_rows)
    group = np.repeat(np.arange(row.size), counts)
    number = np.arange(group.size) - np.repeat(np.cumsum(counts) - counts, counts)
    begin, end = (row[group] + (number + step) * sizes[group] // counts[group] for step in (0, 1))
    return np.column_stack([group, begin, end])


def _longest_first(items: IntArray) -> TokenArray:
    return items[np.argsort(items[:, 2] - items[:, 3], kind="stable")].astype(np.int32)
