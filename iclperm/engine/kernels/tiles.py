"""Key tiles of a pack for kernels that take many query rows at once; arrays only, no torch.

Paths are cut in tiles of positions, multiples of the tile's size counted from the root. Query rows are cut in blocks;
a block has one list of tiles, those of all its rows' paths, a tile that neighbours share listed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from iclperm.engine.plan import Pack
from iclperm.engine.tree import IntArray, TokenArray

_Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class TileLists:
    """What each block of query rows walks: B blocks, E list entries, T distinct tiles of N keys.

    ``blocks`` int32 [B, 6]: first row, one past its last row, then borders in ``entries``: the first of the block, the
    first and one past the last of those that all its rows see whole, one past the last of the block. ``entries`` int32
    [E, 4]: tile, position of its first key over N, and the range of query rows that have it on their path; by rising
    position within a block. ``keys`` int32 [T, N]: pack row r as r, pool slot s as ~s; past the end of a path its last
    key again. ``row_pos`` int32: position of each query row, -1 where no visit owns it. Blocks come in falling order of
    their work.
    """

    blocks: TokenArray
    entries: TokenArray
    keys: TokenArray
    row_pos: TokenArray


def list_tiles(
    pack: Pack, num_rows: int, query_rows: IntArray | None, *, block_rows: int, tile_keys: int, window: int = 0
) -> TileLists:
    """Tile lists of a pack whose queries are ``num_rows`` rows: all of the pack's, or ``query_rows`` [R], ascending.

    Rows past the pack's, or past R, are padding. With a ``window`` the tiles that all rows of a block have left behind
    are not listed. Cost O(visits x tiles of the longest path + keys of the distinct tiles), in array operations.
    """
    rows = np.arange(min(num_rows, len(pack))) if query_rows is None else query_rows
    bounds = np.searchsorted(rows, pack.visit_row_offsets)
    visits = np.flatnonzero(np.diff(bounds))
    unowned = np.concatenate([_chunks(0, bounds[0], block_rows), _chunks(bounds[-1], num_rows, block_rows)])
    row_pos = np.full(num_rows, -1, np.int64)
    if not visits.size:
        return _as_int32(unowned, np.zeros((1, 4)), np.zeros((1, tile_keys)), row_pos)

    begin, end = bounds[visits], bounds[visits + 1]
    shift = pack.visit_pos[visits] - pack.visit_row_offsets[visits].astype(np.int64)
    row_pos[begin[0] : end[-1]] = rows[begin[0] : end[-1]] + np.repeat(shift, end - begin)
    paths = _paths(pack, visits, rows[end - 1] + 1)
    tile_of, keys = _tiles(paths, tile_keys)

    strangers = ~_is_related(paths, tile_keys)
    chains = np.append(begin[strangers], end[-1])
    counts = -(-np.diff(chains) // block_rows)
    blocks = np.repeat(chains[:-1], counts) + block_rows * _ramps(counts)
    entries, borders = _entries(tile_of, begin, np.append(blocks, end[-1]), row_pos, tile_keys, window)
    owned = np.column_stack([blocks, np.append(blocks[1:], end[-1]), borders])
    owned = owned[np.argsort(borders[:, 0] - borders[:, 3], kind="stable")]
    return _as_int32(np.concatenate([owned, unowned]), entries, keys, row_pos)


def _as_int32(*arrays: npt.NDArray[Any]) -> TileLists:
    return TileLists(*(array.astype(np.int32) for array in arrays))


def _chunks(begin: int, end: int, size: int) -> IntArray:
    """Blocks without tiles over rows that no visit owns."""
    starts = np.arange(begin, end, size)
    blocks = np.zeros((starts.size, 6), np.int64)
    blocks[:, 0], blocks[:, 1] = starts, np.minimum(starts + size, end)
    return blocks


def _ramps(counts: IntArray) -> IntArray:
    """0, 1, ..., count - 1 for each count."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) - np.repeat(ends - counts, counts)


@dataclass(frozen=True)
class _Paths:
    """Paths of V visits, one after the other on a line of addresses, in pieces of consecutive slots or rows."""

    offsets: IntArray  # [V + 1] address at which each path begins
    piece_begin: IntArray  # address
    piece_key: IntArray  # its first key, ~slot or row
    shared: IntArray  # [V] leading keys that a path has in common with the path before it

    @property
    def lengths(self) -> IntArray:
        return np.diff(self.offsets)

    def keys_at(self, addresses: IntArray) -> IntArray:
        piece = np.searchsorted(self.piece_begin, addresses, side="right") - 1
        key, distance = self.piece_key[piece], addresses - self.piece_begin[piece]
        return np.where(key < 0, key - distance, key + distance)  # ~slot falls as the slot rises


def _paths(pack: Pack, visits: IntArray, row_end: IntArray) -> _Paths:
    """Each visit's ancestors, then its own rows up to ``row_end``."""
    num_spans = pack.span_begin.size
    counts = np.diff(pack.span_offsets)[visits] + 1
    order = np.repeat(pack.span_offsets[visits], counts) + _ramps(counts)
    order[np.cumsum(counts) - 1] = num_spans + np.arange(visits.size)
    span_key = np.where(pack.span_source == 0, ~pack.span_begin, pack.span_begin)
    own = pack.visit_row_offsets[visits]
    key = np.concatenate([span_key, own]).astype(np.int64)[order]
    length = np.concatenate([pack.span_end - pack.span_begin, row_end - own]).astype(np.int64)[order]
    visit = np.repeat(np.arange(visits.size), counts)

    key, length, visit = (array[length > 0] for array in (key, length, visit))
    after = key + np.where(key < 0, -length, length)
    goes_on = (key[1:] == after[:-1]) & (visit[1:] == visit[:-1]) & ((key[1:] < 0) == (key[:-1] < 0))
    first = np.flatnonzero(np.append(True, ~goes_on))
    address = np.append(0, np.cumsum(length))
    first_piece = np.searchsorted(visit[first], np.arange(visits.size + 1))
    offsets = np.append(address[first], address[-1])[first_piece]
    shared = _shared(key[first], np.diff(np.append(address[first], address[-1])), first_piece)
    return _Paths(offsets, address[first], key[first], shared)


def _shared(key: IntArray, length: IntArray, first_piece: IntArray) -> IntArray:
    """Leading keys that each path has in common with the path before it; its pieces from ``first_piece`` [V + 1] on."""
    counts = np.diff(first_piece)
    number = _ramps(counts)
    before = np.repeat(np.append(0, first_piece[:-2]), counts) + number
    exists = number < np.repeat(np.append(0, counts[:-1]), counts)
    same = exists & (key[np.where(exists, before, 0)] == key)
    alike = np.where(same, np.minimum(length, length[np.where(exists, before, 0)]), 0)
    whole = alike == np.maximum(length, length[np.where(exists, before, 0)])
    # Pieces count up to the first that is not the same as a whole; that one counts as far as it is alike.
    broken = np.cumsum(~whole)
    breaks_before = broken - ~whole - np.repeat((broken - ~whole)[first_piece[:-1]], counts)
    return np.add.reduceat(np.where(breaks_before == 0, alike, 0), first_piece[:-1])


def _num_tiles(paths: _Paths, size: int) -> IntArray:
    return -(-paths.lengths // size)


def _is_related(paths: _Paths, size: int) -> _Bools:
    """[V] whether each path shares at least about half of its tiles with the path before it.

    Rows of such paths go into one block, which walks the shared tiles once. Rows of other paths go into blocks of their
    own, which run in parallel.
    """
    related = 2 * (paths.shared // size) >= _num_tiles(paths, size) - 1
    related[0] = False
    return related


def _tiles(paths: _Paths, size: int) -> tuple[IntArray, IntArray]:
    """The tile of every path at every level [levels, V], -1 past its end, and the keys of the tiles [T, size]."""
    lengths = paths.lengths
    level = np.arange(_num_tiles(paths, size).max())[:, None]
    exists = level * size < lengths
    # The path before may end within the tile: what it has of it must be what this path has.
    needed = np.minimum((level + 1) * size, np.append(0, lengths[:-1]))
    goes_on = exists & (paths.shared >= needed) & (needed > level * size)
    tile_of = np.where(exists, np.cumsum(exists & ~goes_on).reshape(exists.shape) - 1, -1)
    ends_run = exists & ~np.pad(goes_on[:, 1:], ((0, 0), (0, 1)))
    last_level, last_visit = np.nonzero(ends_run)
    position = last_level[:, None] * size + np.arange(size)
    address = paths.offsets[last_visit, None] + np.minimum(position, lengths[last_visit, None] - 1)
    return tile_of, paths.keys_at(address)


def _entries(
    tile_of: IntArray, visit_begin: IntArray, blocks: IntArray, row_pos: IntArray, size: int, window: int
) -> tuple[IntArray, IntArray]:
    """List entries [E, 4] of the blocks that begin at ``blocks`` [B + 1], and their borders [B, 4]."""
    num_blocks = blocks.size - 1
    # A segment is what one block has of one visit.
    begin = np.union1d(visit_begin, blocks[:-1])
    end = np.append(begin[1:], blocks[-1])
    block = np.searchsorted(blocks, begin, side="right") - 1
    tiles = tile_of[:, np.searchsorted(visit_begin, begin, side="right") - 1]
    level = np.arange(tiles.shape[0])[:, None]
    exists = level * size <= row_pos[end - 1]
    if window:
        exists &= (level + 1) * size > row_pos[begin] - window + 1
    same = exists[:, 1:] & exists[:, :-1] & (tiles[:, 1:] == tiles[:, :-1]) & (block[1:] == block[:-1])
    at, first = np.nonzero(exists & ~np.pad(same, ((0, 0), (1, 0))))
    last = np.nonzero(exists & ~np.pad(same, ((0, 0), (0, 1))))[1]

    home = block[first]
    lowest, highest = (f.reduceat(row_pos, blocks[:-1])[home] for f in (np.minimum, np.maximum))
    is_full = (begin[first] == blocks[home]) & (end[last] == blocks[home + 1]) & (lowest >= (at + 1) * size - 1)
    if window:
        is_full &= highest - at * size < window
    order = np.argsort(home, kind="stable")
    entries = np.column_stack([tiles[at, first], at, begin[first], end[last]])[order]
    return entries, _borders(home[order], is_full[order], num_blocks)


def _borders(block: IntArray, is_full: _Bools, num_blocks: int) -> IntArray:
    """Of each block: first entry, first full, one past the last full, one past the last; full ones are adjacent."""
    last = np.cumsum(np.bincount(block, minlength=num_blocks))
    first = np.append(0, last[:-1])
    num_full = np.bincount(block[is_full], minlength=num_blocks)
    full_begin = first.copy()
    full_begin[block[is_full][::-1]] = np.flatnonzero(is_full)[::-1]  # the first of a block is written last
    return np.column_stack([first, full_begin, full_begin + num_full, last])
