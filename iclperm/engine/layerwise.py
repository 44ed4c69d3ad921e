"""Packs that go through the layers side by side, so that one layer's keys and values alone are ever held.

Between layers the hidden states of a *group* of packs are held. Keys and values that a group needs of earlier packs are
gone: the rows that had them are forwarded again ahead of it, cut out of those packs.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from iclperm.engine.forward import OneLayerPool, TreeForward
from iclperm.engine.model import TreeModel
from iclperm.engine.offload import joined
from iclperm.engine.plan import Pack
from iclperm.engine.shapes import padded_rows
from iclperm.engine.tree import IntArray


@dataclass(frozen=True)
class Group:
    """Packs that go through the layers together: ``again`` rows of earlier packs, then ``packs`` of the unit."""

    again: list[Pack]
    packs: list[Pack]


@dataclass(frozen=True)
class Forwarded:
    """A pack at the end of its way, as `TreeModel.forward` gives it; ``is_again``: it was there for its keys alone."""

    pack: Pack
    hidden: torch.Tensor
    tree: TreeForward
    is_again: bool


def forward_by_layer(
    model: TreeModel, pool: OneLayerPool, packs: Sequence[Pack], most_rows: int
) -> Generator[Forwarded]:
    """Every pack of a unit that starts without a path, in groups of at most ``most_rows`` rows if they can be so small.

    While the caller holds one, the model is attached.
    """
    for group in groups(packs, most_rows, model.device):
        yield from _sweep(model, pool, group)


def groups(packs: Sequence[Pack], most_rows: int, device: torch.device) -> Iterator[Group]:
    """Consecutive packs, as many as ``most_rows`` rows hold with what they need of earlier ones; at least one."""
    slots = _SlotRows()
    first = 0
    while first < len(packs):
        # Whatever is alive when the first begins is what has to be forwarded again at most.
        again = packs[first].held_tokens + padded_rows(0, device) * slots.num_packs
        end, rows = first + 1, again + padded_rows(len(packs[first]), device)
        while end < len(packs) and rows + padded_rows(len(packs[end]), device) <= most_rows:
            rows += padded_rows(len(packs[end]), device)
            end += 1
        group = list(packs[first:end])
        yield Group(slots.again(packs[:first], group), group)
        for number in range(first, end):
            slots.keep(number, packs[number])
        first = end


class _SlotRows:
    """Which pack, and which row of it, each slot was last filled by."""

    def __init__(self) -> None:
        self._pack = np.empty(0, np.int64)
        self._row = np.empty(0, np.int64)

    @property
    def num_packs(self) -> int:
        """Packs that rows may have to be cut out of."""
        return int(np.unique(self._pack[self._pack >= 0]).size)

    def keep(self, number: int, pack: Pack) -> None:
        self._grow(int((pack.retain_slot + pack.retain_end - pack.retain_begin).max(initial=0)))
        for begin, end, slot in zip(pack.retain_begin, pack.retain_end, pack.retain_slot, strict=True):
            self._pack[slot : slot + end - begin] = number
            self._row[slot : slot + end - begin] = np.arange(begin, end)

    def again(self, earlier: Sequence[Pack], group: Sequence[Pack]) -> list[Pack]:
        """The rows of earlier packs whose slots a group reads before it fills them, as packs."""
        needed = np.zeros(self._pack.size, bool)
        filled = np.zeros(self._pack.size, bool)
        for pack in group:
            in_pool = pack.span_source == 0
            for begin, end in joined(pack.span_begin[in_pool], pack.span_end[in_pool]):
                needed[begin:end] |= ~filled[begin:end]
            for begin, end in joined(pack.retain_slot, pack.retain_slot + pack.retain_end - pack.retain_begin):
                filled[begin:end] = True
        slots = np.flatnonzero(needed)
        numbers = self._pack[slots]
        return [_cut(earlier[number], self._row[slots[numbers == number]], slots[numbers == number])
                for number in np.unique(numbers)]  # fmt: skip

    def _grow(self, size: int) -> None:
        more = max(0, size - self._pack.size)
        self._pack, self._row = (np.append(each, np.full(more, -1)) for each in (self._pack, self._row))


def _cut(pack: Pack, rows: IntArray, slots: IntArray) -> Pack:
    """Some rows of a pack with all that they have of their ancestors in it, kept in ``slots``; nothing is scored."""
    order = np.argsort(rows)
    rows, slots = rows[order], slots[order]
    place = np.full(len(pack) + 1, -1)
    place[rows] = np.arange(rows.size)
    visits = np.searchsorted(pack.visit_row_offsets, rows, side="right") - 1
    numbers, first = np.unique(visits, return_index=True)
    span_offsets, spans = [0], [np.zeros((0, 3), np.int64)]
    for number in numbers:
        some = slice(pack.span_offsets[number], pack.span_offsets[number + 1])
        source, begin, end = (
            each[some].astype(np.int64) for each in (pack.span_source, pack.span_begin, pack.span_end)
        )
        # Ancestors in the pack are kept, too, and stay side by side.
        in_pack = source == 1
        begin[in_pack], end[in_pack] = place[begin[in_pack]], place[end[in_pack] - 1] + 1
        spans.append(np.stack([source, begin, end], axis=1))
        span_offsets.append(span_offsets[-1] + len(source))
    source, begin, end = np.concatenate(spans).T
    runs = np.flatnonzero(np.append(True, (np.diff(rows) != 1) | (np.diff(slots) != 1)))
    ends = np.append(runs[1:], rows.size)
    return Pack.of(
        token_ids=pack.token_ids[rows],
        positions=pack.positions[rows],
        visit_row_offsets=np.append(first, rows.size),
        visit_pos=pack.visit_pos[numbers],
        span_offsets=span_offsets,
        span_source=source,
        span_begin=begin,
        span_end=end,
        retain_begin=runs,
        retain_end=ends,
        retain_slot=slots[runs],
        held_tokens=0,
    )


def _sweep(model: TreeModel, pool: OneLayerPool, group: Group) -> Iterator[Forwarded]:
    """A group through all layers."""
    packs = [*group.again, *group.packs]
    trees = [model.start(pack, pool) for pack in packs]
    states: torch.Tensor | None = None
    borders = np.cumsum([0, *(tree.num_rows for tree in trees)]).tolist()
    for number in range(model.num_layers):
        with model.attached(layer=number):
            for place, tree in enumerate(trees):
                hidden = model.forward_layer(tree)
                if number == model.num_layers - 1:
                    yield Forwarded(packs[place], hidden, tree, place < len(group.again))
                    continue
                if states is None:
                    states = hidden.new_empty(borders[-1], hidden.shape[1])
                tree.hidden = states[borders[place] : borders[place + 1]]
                tree.hidden.copy_(hidden)
