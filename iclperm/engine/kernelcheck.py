"""Attention by itself, on the device where a study will run it, against the same in float64.

Prompts short enough for the check of the whole model never come to the loop over whole tiles, which does nearly all of
the work of a study. These paths have up to 4,096 positions, and one fewer and one more than any tile's border.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from iclperm.engine.kernels.attention import prepare
from iclperm.engine.kernels.rule import AttentionRule, LayerStates
from iclperm.engine.model import TreeModel
from iclperm.engine.plan import Pack
from iclperm.reference.attention import tree_attention

Span = tuple[int, int, int]
Visit = tuple[int, int, list[Span]]

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Largest error of a row, as a share of its largest number."""
_PATHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 193, 256)
_LONG = (1023, 1025, 4095, 4096)
_LONGEST = {"cpu": 300}
"""Positions of the longest path; elsewhere that of `_LONG`."""
_MANY_ROWS = (150, 70)
_SMALL_WINDOWS = (70, 200)
"""One that ends within a tile, and one within which every shipped size has whole tiles for all rows of a block."""
_DENSE_ROWS = 256


def attention_agrees(model: TreeModel) -> bool:
    """Whether the model's attention is that of float64 but for rounding, with its numbers of heads and dimensions, its
    windows and its soft-cap; True where torch's operations attend.

    Paths of 1 to 4,096 positions (300 on a CPU) in the pool, in the pack and in both, of one row and of many, beside
    slots and rows that hold NaN and may not be seen. Cost: some 0.1 s; on a GPU the kernel is compiled, as the study
    needs it.
    """
    if model.attention == "torch":
        return True
    facts = model.facts
    longest = min(_LONGEST.get(model.device.type, max(_LONG)), facts.max_tokens)
    windows = {facts.window if facts.num_window_layers else 0}
    if 0 < facts.num_window_layers < facts.num_layers:
        windows.add(0)
    if facts.num_window_layers:
        windows.update(
            min(small, facts.window) for small in _SMALL_WINDOWS
        )  # the model's own may be longer than any path
    rules = [AttentionRule(facts.head_size**-0.5, facts.attention_softcap, window) for window in sorted(windows)]
    group = facts.num_heads // facts.num_kv_heads
    case = AttentionCase.of(longest, group, facts.head_size, model.dtype)
    return all(case.is_right(rule, model.attention, model.device) for rule in rules)


@dataclass(frozen=True)
class AttentionCase:
    """What is attended with: one head of keys and values, and the visits [M rows in all] of a pack."""

    visits: list[Visit]
    states: LayerStates

    @classmethod
    def of(cls, longest: int, group: int, head_size: int, dtype: torch.dtype) -> AttentionCase:
        """Paths of up to ``longest`` positions, with ``group`` heads of queries."""
        visits = _visits(longest)
        num_rows, num_slots = visits[-1][1], longest
        generator = torch.Generator().manual_seed(0)

        def drawn(count: int, heads: int) -> torch.Tensor:
            return torch.randn(count, heads, head_size, generator=generator).to(dtype)

        # Scores spread by more than one nat: of equal weights, long paths would give means near nothing.
        states = LayerStates(
            2 * drawn(num_rows, group), drawn(num_rows, 1), drawn(num_rows, 1), drawn(num_slots + 64, 1),
            drawn(num_slots + 64, 1),
        )  # fmt: skip
        for pool in (states.k_pool, states.v_pool):
            pool[num_slots:] = torch.nan
        # A row that nobody attends to but itself: what is after it, and other branches, may hold anything.
        begin, end, _ = visits[-1]
        states.k[begin:end], states.v[begin:end] = torch.nan, torch.nan
        return cls(visits, states)

    def is_right(self, rule: AttentionRule, backend: str, device: torch.device) -> bool:
        """Whether every row is that of the reference but for rounding, on a device."""
        own, pack = self.states, _pack_of(self.visits)
        q, k, v, k_pool, v_pool = (each.to(device) for each in (own.q, own.k, own.v, own.k_pool, own.v_pool))
        on_device = LayerStates(q, k, v, k_pool, v_pool)
        attend = prepare(pack, len(pack), backend, _DENSE_ROWS)
        last = self.visits[-1][0]
        ours = attend(on_device, rule)[:last].double().cpu()
        theirs = tree_attention(
            own.q, own.k, own.v, own.k_pool, own.v_pool, self.visits[:-1],
            scaling=rule.scaling, softcap=rule.softcap, window=rule.window,
        )[:last]  # fmt: skip
        error, scale = ((ours - theirs).abs().amax(dim=(1, 2)), theirs.abs().amax(dim=(1, 2)))
        return bool((error <= TOLERANCE[own.q.dtype] * scale).all())


def _visits(longest: int) -> list[Visit]:
    """One row and many behind each path of the pool; behind a path of the pack; and behind both."""
    paths = [path for path in (*_PATHS, *_LONG) if path < longest] + [longest - 1]
    visits: list[Visit] = []

    def visit(rows: int, spans: list[Span]) -> tuple[int, int]:
        begin = visits[-1][1] if visits else 0
        visits.append((begin, begin + rows, spans))
        return begin, begin + rows

    for path in paths:
        visit(1, [(0, 0, path)])
    many, some = _MANY_ROWS
    stem = visit(many, [(0, 0, min(193, longest - 1))])
    visit(some, [(0, 0, longest - 1)])
    root = visit(many, [])
    for begin, end in (stem, root):
        above: list[Span] = [(0, 0, min(193, longest - 1))] if begin == stem[0] else []
        for length in (1, 63, 64, 65, many):
            visit(3, [*above, (1, begin, min(begin + length, end))])
    visit(1, [])  # whose key and value are NaN
    return visits


def _pack_of(visits: list[Visit]) -> Pack:
    spans = [span for _, _, own in visits for span in own]
    before = [sum(end - begin for _, begin, end in own) for _, _, own in visits]
    positions = [first + np.arange(end - begin) for (begin, end, _), first in zip(visits, before, strict=True)]
    num_rows = visits[-1][1]
    source, begin, end = np.array(spans, np.int64).reshape(-1, 3).T
    return Pack.of(
        held_tokens=0,
        token_ids=np.zeros(num_rows, np.int32),
        positions=np.concatenate(positions),
        visit_row_offsets=[0, *(end for _, end, _ in visits)],
        visit_pos=before,
        span_offsets=np.cumsum([0, *(len(own) for _, _, own in visits)]),
        span_source=source,
        span_begin=begin,
        span_end=end,
    )
