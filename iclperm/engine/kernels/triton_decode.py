"""Attention of decoding rows in Triton, one query each: what rows share is read once, long paths are cut in chunks.

A row's keys all lie in the pool, its newest included; a table says which slot holds each position. A program takes an
item of `chunks`: the keys of a piece of a chunk, with the rows that share them, times the heads of one key-value head,
as its lines. Shared items run first and leave the state of each row's softmax (weighted sum, top, total) in float32;
items of single rows go on from there, and a last kernel merges a row's chunks in the order of their positions. Going on
from a stored state gives the bits of going on at once, a tile that a row does not see changes none, and the borders of
chunks are the same for all. So a row's output is a function of its query and of its path alone, given the launch
configuration and the sharing of no arithmetic between the lines of a product.

What differs from step to step is in tables on the device: a row sees what is not after its position, so items that
name all slots a row owns hold until it owns more, and programs find for themselves where a window begins.
"""

from __future__ import annotations

import math
from functools import cache, partial
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl

from iclperm.engine.kernels.chunks import CHUNK
from iclperm.engine.kernels.launching import DECODE_ATTENTION, launching
from iclperm.engine.kernels.live import LiveItems, LivePlaces, LiveSlots, live_rows
from iclperm.engine.kernels.rule import AttentionRule, LayerStates, PackAttention
from iclperm.engine.kernels.stages import launched
from iclperm.engine.kernels.triton_attention import Launch, _block_d, refuse_unreadable, with_sink
from iclperm.engine.kernels.triton_compilation import (
    MAX_HEAD_DIM,
    TYPE_NAMES,
    Compilation,
    KernelShapes,
    decoding_architectures,
)
from iclperm.engine.kernels.triton_math import hyperbolic_tangent
from iclperm.engine.tables import PackTables

_LOG2_E = math.log2(math.e)
# Sums and products are not contracted at the compiler's will: masked and whole tiles must give the same bits. Unasked,
# the assembler spills a few bytes of float32 to run more programs at a time.
_OPTIONS = {"enable_fp_fusion": False, "maxnreg": 255}
_MERGED_HEADS, _MERGE_WARPS = 4, 2  # of a row, that one program of the merge takes

# By whether the inputs are float32, then by the head dimension they reach to; the same on every architecture. Items of
# one row and of many have one shape: a row by itself must be multiplied by the very instructions that multiply it in
# company. Most programs have one row, for whose keys they wait, so lines are few. Chosen, with
# benchmarks/triton_resources.py, for no spilled register under Triton 3.9 whatever the group, window and soft-cap, and
# for several programs on a multiprocessor. Spilled: 4 warps with (32, 16) at 128 and (16, 16) at 256 in float32, with
# (64, 32) at 128 and (32, 32) at 256 in bfloat16.
_FLOAT32 = {64: Launch(32, 32, 4, 2), 128: Launch(32, 16, 8, 2), 256: Launch(16, 16, 8, 2)}
_HALF = {64: Launch(64, 32, 4, 3), 128: Launch(32, 32, 4, 3), 256: Launch(16, 32, 4, 2)}


def _launch(head_dim: int, dtype: torch.dtype) -> Launch:
    row = _FLOAT32 if dtype == torch.float32 else _HALF
    return next(launch for limit, launch in row.items() if head_dim <= limit)


class DecodeAttention:
    """Attention of a pack whose first rows are live ones, by the Triton kernels: fp32, bf16 and fp16, head dimensions
    up to 256, products never in TF32.

    ``tables`` are the pack's, ``slots`` those of all live rows. ``rest`` attends for the rows after the live ones;
    without it those are padding. The live rows' keys and values go into the pool first. Beside what comes out it takes
    R x chunks of the longest path x heads x (head dimension + 2) x 4 bytes.
    """

    def __init__(self, tables: PackTables, slots: LiveSlots, rest: PackAttention | None = None) -> None:
        self._tables, self._slots, self._rest = tables, slots, rest
        self._live = live_rows(tables)
        self._longest = int(self._live.lengths.max())
        self._newest: dict[torch.device, torch.Tensor] = {}  # slots of the newest keys int64 [R]

    def __call__(self, states: LayerStates, rule: AttentionRule) -> torch.Tensor:
        """As `PackAttention` says; raises RequestError for what the kernels cannot read."""
        refuse_unreadable(states, rule, len(self._live), len(self._live), 1)
        q, slots = states.q, self._slots.of(self._tables, states.q.device)
        lanes, positions, *_ = self._tables.of(LivePlaces(), q.device)
        if q.device not in self._newest:  # the same in all layers
            self._newest[q.device] = slots[lanes.long(), positions.long()].long()
        for new, pool in ((states.k, states.k_pool), (states.v, states.v_pool)):
            pool.index_copy_(0, self._newest[q.device], new[: len(self._live)])
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if self._rest is None else self._rest(states, rule)
        with launching(DECODE_ATTENTION, q):
            self._attend(states, rule, (slots, lanes, positions), out)
        return out

    def _attend(
        self, states: LayerStates, rule: AttentionRule, places: tuple[torch.Tensor, ...], out: torch.Tensor
    ) -> None:
        q, k_pool, v_pool = states.q, states.k_pool, states.v_pool
        (num_heads, head_dim), num_kv, num_rows = q.shape[1:], k_pool.shape[1], len(self._live)
        group = num_heads // num_kv
        launch = _launch(head_dim, q.dtype)
        window = rule.window if rule.window < self._longest else 0  # one that nobody leaves is none
        constants = _constants(launch, head_dim, group, window > 0, rule.softcap > 0)
        variant = _variant(head_dim, group, q.dtype, window > 0, rule.softcap > 0)
        heads, num_chunks = constants["HEADS"], -(-self._longest // CHUNK)
        states_of = (num_rows, num_chunks, num_heads)
        sums = torch.empty((*states_of, head_dim), dtype=torch.float32, device=q.device)
        marks = torch.empty((*states_of, 2), dtype=torch.float32, device=q.device)
        to_log2 = (rule.softcap or rule.scaling) * _LOG2_E

        def launch_with(items: torch.Tensor, num_stages: int) -> None:
            _attend_items_kernel[items.shape[0], num_kv * -(-group // heads)](
                q, k_pool, v_pool, sums, marks, items, *places,
                *(stride for x in (q, k_pool, v_pool) for stride in x.stride()[:2]), places[0].stride(0),
                num_heads, num_chunks, rule.scaling / rule.softcap if rule.softcap else 1.0, to_log2, window,
                **constants, num_warps=launch.num_warps, num_stages=num_stages, **_OPTIONS,
            )  # fmt: skip

        for items in self._tables.of(LiveItems(launch.lines // heads), q.device):
            if items.shape[0]:
                launched(variant, launch.num_stages, q.device, partial(launch_with, items))
        num_merged = q.shape[0] if self._rest is None else num_rows
        _merge_chunks_kernel[num_merged, -(-num_heads // _MERGED_HEADS)](
            sums, marks, out, places[2], marks if states.sinks is None else states.sinks, *out.stride()[:2],
            num_rows, num_heads, num_chunks, to_log2, window,
            **_merge_constants(head_dim, window > 0, states.sinks is not None), num_warps=_MERGE_WARPS, **_OPTIONS,
        )  # fmt: skip


def _constants(launch: Launch, head_dim: int, group: int, has_window: bool, has_softcap: bool) -> dict[str, Any]:
    return {
        "HAS_WINDOW": has_window,
        "HAS_SOFTCAP": has_softcap,
        "GROUP": group,
        "HEADS": min(group, launch.lines),
        "HEAD_DIM": head_dim,
        "BLOCK_D": _block_d(head_dim),
        "LINES": launch.lines,
        "TILE": launch.keys,
        "CHUNK": CHUNK,
    }


def _merge_constants(head_dim: int, has_window: bool, has_sinks: bool) -> dict[str, Any]:
    return {
        "HAS_WINDOW": has_window,
        "HAS_SINKS": has_sinks,
        "HEADS": _MERGED_HEADS,
        "HEAD_DIM": head_dim,
        "BLOCK_D": _block_d(head_dim),
        "CHUNK": CHUNK,
    }


@triton.jit  # type: ignore[untyped-decorator]
def _walk_positions(
    acc: tl.tensor, top: tl.tensor, total: tl.tensor, q: tl.tensor, limit: tl.tensor, slots: tl.tensor,
    tile_begin: tl.tensor, tile_end: tl.tensor, seen_end: tl.tensor, k_pool: tl.tensor, v_pool: tl.tensor,
    stride_k: tl.tensor, stride_v: tl.tensor, to_unit: tl.tensor, to_log2: tl.tensor, window: tl.tensor, o_d: tl.tensor,
    IS_MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Take some tiles into the running softmax: acc [lines, D], its top [lines] in unit scores, total [lines]."""
    o_key = tl.arange(0, TILE)
    # A tile's slots are fetched one round ahead, so that addresses never wait for memory. In place of keys that nobody
    # sees yet the last one is read again.
    last = seen_end - 1
    b_slot = tl.load(slots + tl.minimum(tile_begin * TILE + o_key, last)).to(tl.int64)
    for i_tile in tl.range(tile_begin, tile_end):
        p_k = k_pool + (b_slot * stride_k)[:, None] + o_d[None, :]
        p_v = v_pool + (b_slot * stride_v)[:, None] + o_d[None, :]
        if HEAD_DIM == BLOCK_D:
            b_k, b_v = tl.load(p_k), tl.load(p_v)
        else:
            b_k = tl.load(p_k, mask=o_d[None, :] < HEAD_DIM, other=0.0)
            b_v = tl.load(p_v, mask=o_d[None, :] < HEAD_DIM, other=0.0)
        b_slot = tl.load(slots + tl.minimum((i_tile + 1) * TILE + o_key, last)).to(tl.int64)
        score = tl.dot(q, tl.trans(b_k), input_precision="ieee")
        if HAS_SOFTCAP:
            score = hyperbolic_tangent(score * to_unit)
        if IS_MASKED:
            pos = i_tile * TILE + o_key
            visible = pos[None, :] <= limit[:, None]
            if HAS_WINDOW:
                visible &= limit[:, None] - pos[None, :] < window
                # Zero times a value that is not finite is NaN: out with those that a window has left behind, and NaN
                # for the rows that see one.
                is_broken = tl.max((tl.abs(b_v.to(tl.float32)) < float("inf")).to(tl.int32) ^ 1, axis=1) > 0
                b_v = tl.where(is_broken[:, None], 0.0, b_v).to(b_v.dtype)
                score = tl.where(is_broken[None, :], float("nan"), score)
            score = tl.where(visible, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        # A row that has seen nothing yet has no top: anything but -inf, from which -inf is NaN.
        origin = tl.where(new_top == float("-inf"), 0.0, new_top)
        # Subtracting first: a fused product would round top and score unlike, by more the larger they are.
        b_p = tl.exp2((score - origin[:, None]) * to_log2)
        scale = tl.exp2((top - origin) * to_log2)
        total = total * scale + tl.sum(b_p, axis=1)
        acc = tl.dot(b_p.to(b_v.dtype), b_v, acc * scale[:, None], input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=["num_heads", "num_chunks", "window"])  # type: ignore[untyped-decorator]
def _attend_items_kernel(
    q: tl.tensor, k_pool: tl.tensor, v_pool: tl.tensor, sums: tl.tensor, marks: tl.tensor, items: tl.tensor,
    slots: tl.tensor, lanes: tl.tensor, positions: tl.tensor, stride_qm: tl.tensor, stride_qh: tl.tensor,
    stride_ks: tl.tensor, stride_kh: tl.tensor, stride_vs: tl.tensor, stride_vh: tl.tensor, stride_lane: tl.tensor,
    num_heads: tl.tensor, num_chunks: tl.tensor, to_unit: tl.tensor, to_log2: tl.tensor, window: tl.tensor,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, LINES: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """One item with HEADS heads of one key-value head's GROUP; grid (items, key-value heads x parts)."""
    i_item = tl.program_id(0)
    parts: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    i_kv = (tl.program_id(1) // parts).to(tl.int64)
    i_part = tl.program_id(1) % parts
    row_begin = tl.load(items + 4 * i_item)
    row_end = tl.load(items + 4 * i_item + 1)
    begin = tl.load(items + 4 * i_item + 2)
    end = tl.load(items + 4 * i_item + 3)

    o_line = tl.arange(0, LINES)
    o_d = tl.arange(0, BLOCK_D)
    row = row_begin + o_line // HEADS
    head = i_part * HEADS + o_line % HEADS
    is_line = (row < row_end) & (head < GROUP)
    limit = tl.load(positions + row, mask=is_line, other=-1)
    highest = tl.max(limit, axis=0)
    lowest = tl.min(tl.where(is_line, limit, 2147483647), axis=0)
    # What rows share lies before all of them; of a row's own slots the last are not written yet.
    seen_begin, seen_end = begin, tl.minimum(end, highest + 1)
    if HAS_WINDOW:
        seen_begin = tl.maximum(begin, lowest - window + 1)
    if seen_begin >= seen_end:
        return

    line_head = i_kv * GROUP + head
    m_q = is_line[:, None] & (o_d[None, :] < HEAD_DIM)
    p_q = q + row.to(tl.int64) * stride_qm + line_head * stride_qh
    b_q = tl.load(p_q[:, None] + o_d[None, :], mask=m_q, other=0.0)
    slots += tl.load(lanes + row_begin).to(tl.int64) * stride_lane
    k_pool += i_kv * stride_kh
    v_pool += i_kv * stride_vh

    # An item that does not begin with its chunk goes on from what the shared one left, if that saw anything.
    state = (row.to(tl.int64) * num_chunks + begin // CHUNK) * num_heads + line_head
    p_sums = sums + (state * HEAD_DIM)[:, None] + o_d[None, :]
    resumed_end = tl.where(begin % CHUNK == 0, row_begin, row_end)
    if HAS_WINDOW:
        resumed_end = tl.where(lowest - window + 1 < begin, resumed_end, row_begin)
    goes_on = is_line & (row < resumed_end)
    acc = tl.load(p_sums, mask=m_q & goes_on[:, None], other=0.0)
    top = tl.load(marks + 2 * state, mask=goes_on, other=float("-inf"))
    total = tl.load(marks + 2 * state + 1, mask=goes_on, other=0.0)

    first = seen_begin // TILE
    after = tl.cdiv(seen_end, TILE)
    whole_end = seen_end // TILE
    if HAS_WINDOW:
        # Tiles that some row sees in part, then those that all see whole.
        whole_begin = tl.minimum(tl.cdiv(tl.maximum(begin, highest - window + 1), TILE), after)
        whole_end = tl.maximum(whole_begin, whole_end)
        acc, top, total = _walk_positions(
            acc, top, total, b_q, limit, slots, first, whole_begin, seen_end, k_pool, v_pool, stride_ks,
            stride_vs, to_unit, to_log2, window, o_d, True, HAS_WINDOW, HAS_SOFTCAP, HEAD_DIM, BLOCK_D, TILE,
        )  # fmt: skip
        first = whole_begin
    acc, top, total = _walk_positions(
        acc, top, total, b_q, limit, slots, first, whole_end, seen_end, k_pool, v_pool, stride_ks,
        stride_vs, to_unit, to_log2, window, o_d, False, HAS_WINDOW, HAS_SOFTCAP, HEAD_DIM, BLOCK_D, TILE,
    )  # fmt: skip
    acc, top, total = _walk_positions(
        acc, top, total, b_q, limit, slots, whole_end, after, seen_end, k_pool, v_pool, stride_ks,
        stride_vs, to_unit, to_log2, window, o_d, True, HAS_WINDOW, HAS_SOFTCAP, HEAD_DIM, BLOCK_D, TILE,
    )  # fmt: skip
    tl.store(p_sums, acc, mask=m_q)
    tl.store(marks + 2 * state, top, mask=is_line)
    tl.store(marks + 2 * state + 1, total, mask=is_line)


@triton.jit(do_not_specialize=["num_rows", "num_heads", "num_chunks", "window"])  # type: ignore[untyped-decorator]
def _merge_chunks_kernel(
    sums: tl.tensor, marks: tl.tensor, out: tl.tensor, positions: tl.tensor, sinks: tl.tensor, stride_om: tl.tensor,
    stride_oh: tl.tensor, num_rows: tl.tensor, num_heads: tl.tensor, num_chunks: tl.tensor, to_log2: tl.tensor,
    window: tl.tensor, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """HEADS heads of a row from the states of the chunks it sees; grid (rows, heads / HEADS). Zero past the rows."""
    row = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    o_d = tl.arange(0, BLOCK_D)
    is_line = head < num_heads
    m_d = is_line[:, None] & (o_d[None, :] < HEAD_DIM)
    limit = tl.load(positions + row, mask=row < num_rows, other=-1)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(limit - window + 1, 0) // CHUNK
    acc = tl.zeros([HEADS, BLOCK_D], dtype=tl.float32)
    top = tl.full([HEADS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([HEADS], dtype=tl.float32)
    for i_chunk in tl.range(first, (limit + CHUNK) // CHUNK):
        state = (row.to(tl.int64) * num_chunks + i_chunk) * num_heads + head
        b_top = tl.load(marks + 2 * state, mask=is_line, other=float("-inf"))
        b_total = tl.load(marks + 2 * state + 1, mask=is_line, other=0.0)
        b_acc = tl.load(sums + (state * HEAD_DIM)[:, None] + o_d[None, :], mask=m_d, other=0.0)
        new_top = tl.maximum(top, b_top)
        origin = tl.where(new_top == float("-inf"), 0.0, new_top)
        scale = tl.exp2((top - origin) * to_log2)
        b_scale = tl.exp2((b_top - origin) * to_log2)
        total = total * scale + b_total * b_scale
        acc = acc * scale[:, None] + b_acc * b_scale[:, None]
        top = new_top
    if HAS_SINKS:
        acc, total = with_sink(acc, top, total, tl.load(sinks + head, mask=is_line, other=0.0), to_log2)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    p_out = out + row.to(tl.int64) * stride_om + head * stride_oh
    tl.store(p_out[:, None] + o_d[None, :], acc.to(out.dtype.element_ty), mask=m_d)


def resource_cases() -> list[Compilation]:
    """The shipped launch configurations: sizes and kinds of head dimension and group, with and without the options."""
    dtypes = (torch.bfloat16, torch.float32)
    items = [
        _item_case(head_dim, group, dtype, has_options, has_options)
        for head_dim in (64, 80, 128, 192, 256)
        for group in (1, 4, 7)
        for dtype in dtypes
        for has_options in (False, True)
    ]
    return [*items, *(_merge_case(head_dim, dtype, True, False) for head_dim in (64, 80, 128, 256) for dtype in dtypes)]


def model_cases(shapes: KernelShapes) -> list[Compilation]:
    """What a model's layers launch for rows that decode: within a window and without, as texts outgrow it or not."""
    if not 0 < shapes.head_dim <= MAX_HEAD_DIM:
        return []
    windows = (False, True) if shapes.has_window else (False,)
    return [
        *(_item_case(shapes.head_dim, shapes.group, shapes.dtype, each, shapes.has_softcap) for each in windows),
        *(_merge_case(shapes.head_dim, shapes.dtype, *each) for each in product(windows, shapes.sinks)),
    ]


@cache
def _variant(head_dim: int, group: int, dtype: torch.dtype, has_window: bool, has_softcap: bool) -> str:
    """What a variant of the kernel of items is called."""
    return f"decode {group} x {head_dim} {TYPE_NAMES[dtype]}{', window' * has_window}{', soft-cap' * has_softcap}"


def _item_case(head_dim: int, group: int, dtype: torch.dtype, has_window: bool, has_softcap: bool) -> Compilation:
    launch = _launch(head_dim, dtype)
    constants = _constants(launch, head_dim, group, has_window, has_softcap)
    kinds = {"sums": "*fp32", "marks": "*fp32"} | dict.fromkeys(("q", "k_pool", "v_pool"), "*" + TYPE_NAMES[dtype])
    kinds |= dict.fromkeys(("items", "slots", "lanes", "positions"), "*i32")
    name = _variant(head_dim, group, dtype, has_window, has_softcap)
    return _compilation(name, dtype, _attend_items_kernel, kinds, constants, launch.num_warps, launch.num_stages)


def _merge_case(head_dim: int, dtype: torch.dtype, has_window: bool, has_sinks: bool) -> Compilation:
    kinds = {"sums": "*fp32", "marks": "*fp32", "out": "*" + TYPE_NAMES[dtype], "positions": "*i32"}
    kinds["sinks"] = "*fp32"
    name = f"decode merge {head_dim} {TYPE_NAMES[dtype]}{', window' * has_window}{', sinks' * has_sinks}"
    constants = _merge_constants(head_dim, has_window, has_sinks)
    return _compilation(name, dtype, _merge_chunks_kernel, kinds, constants, _MERGE_WARPS, 3)


def _compilation(
    name: str,
    dtype: torch.dtype,
    kernel: Any,
    kinds: dict[str, str],
    constants: dict[str, Any],
    num_warps: int,
    num_stages: int,
) -> Compilation:
    kinds = kinds | {"to_unit": "fp32", "to_log2": "fp32"} | dict.fromkeys(constants, "constexpr")
    return Compilation(
        name=name,
        kernel=kernel,
        signature={argument: kinds.get(argument, "i32") for argument in kernel.arg_names},
        constexprs=constants,
        num_warps=num_warps,
        num_stages=num_stages,
        multiples_of_16=tuple(argument for argument in kernel.arg_names if argument.startswith("stride")),
        architectures=decoding_architectures(dtype),
        options=_OPTIONS,
    )
