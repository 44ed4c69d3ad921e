"""Decoding rows' kernels, broken in one line: what `kernel_mutants` has of them.

Left out are changes that make no difference to a result: items that nobody sees could run, and keys that nobody sees
yet could be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from devices import poisoned_empty

from iclperm.engine import decodecases
from iclperm.engine.decodecases import DecodeCase
from iclperm.engine.kernels import triton_decode
from iclperm.engine.kernels.live import LiveSlots
from iclperm.engine.kernels.rule import AttentionRule
from iclperm.engine.plan import Pack
from iclperm.engine.tables import PackTables

PLAIN, SHORT, OPTIONS = (AttentionRule(0.1, *rest) for rest in ((0.0, 0), (0.0, 20), (30.0, 200)))
LONGEST = 700  # three chunks; what rows share of the last is a piece


@dataclass(frozen=True)
class Shape:
    """A launch size, in a model with so many heads."""

    dtype: torch.dtype
    head_size: int
    group: int
    num_kv: int

    @property
    def most_rows(self) -> int:
        """That an item holds."""
        lines = triton_decode._launch(self.head_size, self.dtype).lines
        return lines // min(self.group, lines)

    def __str__(self) -> str:
        return f"{self.num_kv} x {self.group} x {self.head_size} {str(self.dtype).removeprefix('torch.')}"


# Together every launch that is shipped; dimensions that are no power of two; a group that one item does not hold.
SHAPES = [
    Shape(torch.bfloat16, 64, 7, 1),
    Shape(torch.float32, 64, 4, 2),
    Shape(torch.bfloat16, 128, 4, 2),
    Shape(torch.float32, 128, 7, 1),
    Shape(torch.bfloat16, 256, 2, 3),
    Shape(torch.float32, 256, 5, 1),
    Shape(torch.float16, 80, 8, 2),
    Shape(torch.float32, 192, 17, 1),
]


def decode_error(
    shape: Shape, rule: AttentionRule, device: torch.device, module: ModuleType, *, has_sinks: bool = False
) -> float:
    """Of the module's kernels, in memory that held NaN before; asserts that they ran."""
    ran: list[bool] = []

    def prepare(pack: Pack, num_rows: int, backend: str, dense: int, tables: PackTables, slots: LiveSlots) -> Any:
        ran.append(pack.is_live)
        return module.DecodeAttention(tables, slots)

    num_sharing = max(8, 1 + shape.most_rows)
    case = DecodeCase.of(LONGEST, shape.num_kv * shape.group, shape.num_kv, shape.head_size, shape.dtype, num_sharing)
    case = case.with_sinks() if has_sinks else case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decodecases, "prepare", prepare)
        patch.setattr(torch, "empty", poisoned_empty)
        error = case.error(rule, device)
    assert ran == [True, True]
    return error


_LOOP = "acc, top, total, b_q, limit, slots, {}, seen_end,"
_STORED = "tl.load(marks + 2 * state{}, mask={}, other={})"
_WEIGHT = "(score - origin[:, None]) * to_log2"
_ORIGIN = """origin = tl.where(new_top == float("-inf"), 0.0, new_top)
        # Sub"""
_MERGED = """origin = tl.where(new_top == float("-inf"), 0.0, new_top)
        scale"""
# What is changed, into what, and the rule under which it must be seen.
MUTANTS: dict[str, tuple[str, str, AttentionRule]] = {
    "whole tiles left out": (_LOOP.format("first, whole_end"), _LOOP.format("first, first"), PLAIN),
    "the last whole tile left out": (
        _LOOP.format("first, whole_end"), _LOOP.format("first, tl.maximum(whole_end - 1, first)"), PLAIN,
    ),
    "whole tiles twice": (_LOOP.format("whole_end, after"), _LOOP.format("first, after"), PLAIN),
    "the tile at the end left out": (_LOOP.format("whole_end, after"), _LOOP.format("after, after"), PLAIN),
    "tiles at a window's border left out": (
        _LOOP.format("first, whole_begin"), _LOOP.format("whole_begin, whole_begin"), OPTIONS,
    ),
    "tiles at a window's border are whole": (
        "tl.maximum(begin, highest - window + 1)", "tl.maximum(begin, lowest - window + 1)", OPTIONS,
    ),
    "a window begins with the highest row's": (
        "seen_begin = tl.maximum(begin, lowest - window + 1)", "seen_begin = tl.maximum(begin, highest - window + 1)",
        OPTIONS,
    ),
    "the first tile of each loop left out": ("tl.range(tile_begin, ", "tl.range(tile_begin + 1, ", PLAIN),
    "the last tile of each loop left out": (", tile_end):", ", tile_end - 1):", PLAIN),
    "a tile read again": ("(i_tile + 1) * TILE + o_key, last", "i_tile * TILE + o_key, last", PLAIN),
    "a row sees what follows it": ("pos[None, :] <= limit[:, None]", "pos[None, :] <= limit[:, None] + 1", PLAIN),
    "a window one longer": (
        "limit[:, None] - pos[None, :] < window", "limit[:, None] - pos[None, :] <= window", OPTIONS,
    ),
    "no soft-cap": ("score = hyperbolic_tangent(score * to_unit)", "score = score * to_unit", OPTIONS),
    "what is not finite spreads": ("b_v = tl.where(is_broken[:, None], 0.0, b_v).to(b_v.dtype)", "b_v = b_v", OPTIONS),
    "what is not finite is lost": ('tl.where(is_broken[None, :], float("nan"), score)', "score", OPTIONS),
    "whole tiles do not raise the total": (
        "total = total * scale + tl.sum(b_p, axis=1)",
        "total = total * scale + (tl.sum(b_p, axis=1) if IS_MASKED else 0.0)", PLAIN,
    ),
    "whole tiles are not rescaled": (
        "b_v, acc * scale[:, None]", "b_v, acc * scale[:, None] if IS_MASKED else acc", PLAIN,
    ),
    "the total is not rescaled": ("total = total * scale + tl.sum", "total = total + tl.sum", PLAIN),
    "the softmax's top stays behind": (
        "top = new_top\n    return", "top = origin if IS_MASKED else top\n    return", PLAIN,
    ),
    "every lane is the first": ("tl.load(lanes + row_begin)", "(0 * row_begin)", PLAIN),
    "lanes are rows": ("tl.load(lanes + row_begin)", "row_begin", PLAIN),
    "what rows share is lost": (
        "resumed_end = tl.where(begin % CHUNK == 0, row_begin, row_end)", "resumed_end = row_begin", PLAIN,
    ),
    "every chunk goes on from what was there": (
        "resumed_end = tl.where(begin % CHUNK == 0, row_begin, row_end)", "resumed_end = row_end", PLAIN,
    ),
    "a window goes on from what it has left behind": (
        "resumed_end = tl.where(lowest - window + 1 < begin, resumed_end, row_begin)", "resumed_end = resumed_end",
        SHORT,
    ),
    "the first chunk's state for all": ("num_chunks + begin // CHUNK)", "num_chunks + 0 * begin)", PLAIN),
    "the sums that were left are lost": ("mask=m_q & goes_on[:, None]", "mask=m_q & (row < 0)[:, None]", PLAIN),
    "the total that was left is lost": (
        _STORED.format(" + 1", "goes_on", "0.0"), _STORED.format(" + 1", "row < 0", "0.0"), PLAIN,
    ),
    "the top that was left is lost": (
        _STORED.format("", "goes_on", 'float("-inf")'), _STORED.format("", "row < 0", 'float("-inf")'), PLAIN,
    ),
    "the first chunk left out": ("tl.range(first, ", "tl.range(first + 1, ", PLAIN),
    "the last chunk left out": ("(limit + CHUNK) // CHUNK", "limit // CHUNK", PLAIN),
    "a window merges all chunks": ("first = tl.maximum(limit - window + 1, 0) // CHUNK", "first = 0 * limit", SHORT),
    "every chunk is the first": ("num_chunks + i_chunk)", "num_chunks + 0 * i_chunk)", PLAIN),
    "a chunk's total is not rescaled": ("+ b_total * b_scale", "+ b_total", PLAIN),
    "a chunk's sums are not rescaled": ("+ b_acc * b_scale[:, None]", "+ b_acc", PLAIN),
    "earlier chunks' total is not rescaled": ("total = total * scale + b_total", "total = total + b_total", PLAIN),
    "earlier chunks' sums are not rescaled": ("acc = acc * scale[:, None] +", "acc = acc +", PLAIN),
    "chunks' top stays behind": (
        "b_scale[:, None]\n        top = new_top", "b_scale[:, None]\n        top = b_top", PLAIN,
    ),
    "merged heads are the first ones": ("head = tl.program_id(1) * HEADS +", "head = 0 * tl.program_id(1) +", PLAIN),
    "the last head is not merged": ("is_line = head < num_heads\n", "is_line = head < num_heads - 1\n", PLAIN),
    "scores of one percent more": (_WEIGHT, _WEIGHT.replace("to_log2", "to_log2 * 1.01"), PLAIN),
    "scores of one percent more within a window": (_WEIGHT, _WEIGHT.replace("to_log2", "to_log2 * 1.01"), OPTIONS),
    "a soft-cap of two percent less": ("tangent(score * to_unit)", "tangent(score * to_unit * 1.02)", OPTIONS),
    "the softmax's top begins at zero": (
        _STORED.format("", "goes_on", 'float("-inf")'), _STORED.format("", "goes_on", "0.0"), PLAIN,
    ),
    "chunks' top begins at zero": (
        'tl.full([HEADS], float("-inf"), dtype=tl.float32)', "tl.full([HEADS], 0.0, dtype=tl.float32)", PLAIN,
    ),
    "no top is taken off": (_ORIGIN, _ORIGIN.replace("0.0, new_top", "0.0, 0.0 * new_top"), PLAIN),
    "chunks are merged without their top": (
        _MERGED, _MERGED.replace("0.0, new_top", "0.0, 0.0 * new_top"), PLAIN,
    ),
    "a row's newest key is left out": ("pos[None, :] <= limit[:, None]", "pos[None, :] < limit[:, None]", PLAIN),
    "what rows share ends with the lowest": ("tl.minimum(end, highest + 1)", "tl.minimum(end, lowest)", PLAIN),
    "sums that are no means": ("acc / tl.where(total == 0.0, 1.0, total)[:, None]", "acc", PLAIN),
}  # fmt: skip
# Where an item holds several rows; alone a row shares nothing, and is the lowest and the highest.
AMONG_ROWS = {
    "tiles at a window's border are whole",
    "a window begins with the highest row's",
    "what rows share is lost",
    "a window goes on from what it has left behind",
    "the sums that were left are lost",
    "the total that was left is lost",
    "the top that was left is lost",
}
# Where there are several heads of keys and values.
BY_HEAD: dict[str, tuple[str, str, AttentionRule]] = {
    "keys of the first head": ("k_pool += i_kv * stride_kh", "k_pool += 0 * i_kv * stride_kh", PLAIN),
    "values of the first head": ("v_pool += i_kv * stride_vh", "v_pool += 0 * i_kv * stride_vh", PLAIN),
    "heads of the first group": ("line_head = i_kv * GROUP + head", "line_head = 0 * i_kv + head", PLAIN),
}
# Where there are heads between the first and the last.
AMONG_HEADS: dict[str, tuple[str, str, AttentionRule]] = {
    "a head amid others is zero": (
        "    tl.store(p_sums, acc, mask=m_q)", "    tl.store(p_sums, tl.where(i_kv == 1, 0.0, acc), mask=m_q)", PLAIN,
    ),
}  # fmt: skip
# Where heads have sinks, and there are several.
_SINK = "tl.load(sinks + head, mask=is_line, other=0.0)"
SINKS: dict[str, tuple[str, str, AttentionRule]] = {
    "sinks are left out": ("    if HAS_SINKS:\n", "    if False:\n", PLAIN),
    "sinks are left out within a window": ("    if HAS_SINKS:\n", "    if HAS_SINKS and not HAS_WINDOW:\n", SHORT),
    "every head has the first one's sink": (_SINK, _SINK.replace("sinks + head", "sinks + 0 * head"), PLAIN),
    "sinks of merged heads are the first ones": (
        _SINK, _SINK.replace("sinks + head", "sinks + head % HEADS"), PLAIN,
    ),
    "sinks are scaled as scores are": (_SINK, _SINK + " * (to_log2 * 0.6931471805599453)", PLAIN),
    "sinks are taken for scores before their scale": (
        "0.0), to_log2)", "0.0), 1.4426950408889634)", PLAIN,
    ),
    "sinks are weighed before chunks are merged": (
        "acc, total = with_sink(acc, top, total,", "acc, total = with_sink(acc, top * 0.0, total,", PLAIN,
    ),
    "sinks of one percent more": (_SINK, "1.01 * " + _SINK, PLAIN),
}  # fmt: skip
