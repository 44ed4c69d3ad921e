"""Attention of one pack over its tree in Triton, with one list of key tiles for all layers.

A program takes a block of neighbouring query rows with the heads of one key-value head as its lines, and walks the
rows' paths in tiles of ``keys`` positions, multiples of it counted from the root. A tile is a list of pool slots and
pack rows, read where they lie. Rows of several visits share a block and the tiles that their paths have in common; a
tile of their own is masked for the others, for which it changes no bit. So a row's output is a function of its query
and of its path alone, given the launch configuration and the sharing of no arithmetic between the lines of a product.

Tiles that every row of the block sees whole come without a mask. In the others a key that is not finite is kept from
the rows that may not see it: its score is masked, its value is multiplied in as zero, and rows that do see a value
that is not finite come out NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from iclperm.engine.kernels.launching import TREE_ATTENTION, launching
from iclperm.engine.kernels.rule import AttentionRule, LayerStates
from iclperm.engine.kernels.stages import launched
from iclperm.engine.kernels.tiles import list_tiles
from iclperm.engine.kernels.triton_compilation import (
    ARCHITECTURES,
    MAX_HEAD_DIM,
    TYPE_NAMES,
    Compilation,
    KernelShapes,
    architecture,
    least_architecture,
)
from iclperm.engine.kernels.triton_math import hyperbolic_tangent
from iclperm.engine.link import Array
from iclperm.engine.plan import Pack
from iclperm.engine.tables import PackTables
from iclperm.errors import RequestError

_MAX_GRID_Y = 65535
_LOG2_E = math.log2(math.e)
# Sums and products are not contracted at the compiler's will: masked and whole tiles must give the same bits.
_OPTIONS = {"enable_fp_fusion": False}


@dataclass(frozen=True)
class Launch:
    """Lines (row, head) and keys a tile, warps, and stages of loading ahead."""

    lines: int
    keys: int
    num_warps: int
    num_stages: int


# By compute capability and whether the inputs are float32, then by the head dimension they reach to. Chosen, with
# benchmarks/triton_resources.py, for no spilled register under Triton 3.9 even with window and soft-cap, then for the
# most lines a warp, as each warp reads all keys of a tile from shared memory. Hopper's matrix unit takes 64 lines of 4
# warps, so there 8 warps hold 128, as on the Blackwell of data centres. float32 is multiplied on the plain cores, and
# so is all on Turing, whose matrix unit Triton left in 3.3; registers set their size. Lost: 128 keys a tile on Hopper
# (a suffix of 40 tokens has a tile or two of its own, mostly masked). Spilled: on an 80 4 warps with (128, 64) from 128
# dimensions on, with (128, 32) at 128 under Triton 3.6, with (64, 32) at 256; an 80's rows on an 86 and a 120 in
# float32 and from 128 dimensions on (2.2 KB at 128 in float32), and an 86's on an 80.
_FLOAT32 = {64: Launch(64, 32, 8, 2), 128: Launch(32, 32, 4, 2), 256: Launch(32, 16, 8, 2)}
_TURING = {64: Launch(32, 32, 4, 1), 128: Launch(32, 16, 4, 1), 256: Launch(32, 16, 8, 1)}
_LAUNCHES: dict[tuple[int, bool], dict[int, Launch]] = {
    (75, False): _TURING,
    (80, False): {64: Launch(128, 32, 4, 3), 128: Launch(64, 32, 4, 3), 256: Launch(32, 32, 4, 3)},
    (86, False): {64: Launch(128, 32, 4, 3), 128: Launch(128, 32, 8, 3), 256: Launch(32, 32, 4, 3)},
    (90, False): {64: Launch(128, 64, 8, 3), 128: Launch(128, 64, 8, 3), 256: Launch(64, 32, 8, 3)},
    (75, True): _TURING,
    (80, True): _FLOAT32,
    (86, True): {64: Launch(32, 32, 4, 2), 128: Launch(32, 16, 4, 2), 256: Launch(32, 16, 8, 2)},
    (90, True): _FLOAT32,
}
# For head dimensions that are no power of two, whose loads are masked: that takes registers.
_MASKED_FLOAT32 = _FLOAT32 | {128: Launch(32, 16, 4, 2), 256: Launch(16, 16, 4, 3)}
_MASKED_LAUNCHES = _LAUNCHES | {
    (75, False): _TURING | {64: Launch(16, 16, 4, 1)},
    (80, False): _LAUNCHES[80, False] | {256: Launch(32, 16, 4, 3)},
    (86, False): _LAUNCHES[86, False] | {256: Launch(32, 16, 8, 3)},
    (75, True): _TURING | {64: Launch(16, 16, 4, 1), 256: Launch(32, 8, 8, 1)},
    (80, True): _MASKED_FLOAT32,
    (90, True): _MASKED_FLOAT32,
}


def _launch(head_dim: int, dtype: torch.dtype, arch: int) -> Launch:
    # The consumers' Blackwell (120) has the shared memory of an 86 (99 KiB) and no matrix unit for groups of warps.
    of = 86 if arch >= 120 else next(row for row in (90, 86, 80, 75) if row <= arch)
    table = _LAUNCHES if head_dim == _block_d(head_dim) else _MASKED_LAUNCHES
    row = table[of, dtype == torch.float32]
    return next(launch for limit, launch in row.items() if head_dim <= limit)


def _block_d(head_dim: int) -> int:
    """Columns that a tile has: a power of two, and no fewer than a matrix product takes."""
    return max(16, 1 << (head_dim - 1).bit_length())


def _constants(
    launch: Launch, head_dim: int, group: int, has_window: bool, has_softcap: bool, has_sinks: bool, is_aligned: bool
) -> dict[str, Any]:
    return {
        "HAS_WINDOW": has_window,
        "HAS_SOFTCAP": has_softcap,
        "HAS_SINKS": has_sinks,
        "GROUP": group,
        "HEADS": min(group, launch.lines),
        "HEAD_DIM": head_dim,
        "BLOCK_D": _block_d(head_dim),
        "LINES": launch.lines,
        "TILE": launch.keys,
        "IS_ALIGNED": is_aligned,
    }


@dataclass(frozen=True)
class Tiles:
    """The tile lists of a pack for one launch configuration and window: of all its rows, or of the scored ones."""

    block_rows: int
    tile_keys: int
    window: int
    is_scored: bool

    def arrays(self, tables: PackTables) -> tuple[Array, ...]:
        pack = tables.pack
        if self.window >= _num_positions(pack) and self.window:  # one that nobody leaves is none
            return tables.arrays_of(replace(self, window=0))
        num_rows, rows = tables.num_rows, None
        if self.is_scored:
            num_rows, rows = tables.num_scored, pack.scored_rows.astype(np.int64)
        lists = list_tiles(
            pack, num_rows, rows, block_rows=self.block_rows, tile_keys=self.tile_keys, window=self.window
        )
        return lists.blocks, lists.entries, lists.keys, lists.row_pos


class TritonAttention:
    """The Triton kernel for one pack: fp32, bf16 and fp16, head dimensions up to 256, products never in TF32.

    Tile lists are built once for each combination of window and query rows, among the pack's ``tables`` or at the first
    layer that asks. Launch configurations are those of ``arch`` (a compute capability times ten), by default of the
    device.
    """

    def __init__(self, pack: Pack, arch: int | None = None, tables: PackTables | None = None) -> None:
        self._pack, self._arch, self._tables = pack, arch, tables
        self._alone: dict[tuple[object, ...], PackTables] = {}
        self._num_positions = _num_positions(pack)
        self._num_slots = int(pack.span_end[pack.span_source == 0].max(initial=0))

    def __call__(self, states: LayerStates, rule: AttentionRule) -> torch.Tensor:
        """As `PackAttention` says; raises RequestError for what the kernel cannot read."""
        rows = states.query_rows
        num_queries = len(self._pack) if rows is None else rows.size
        refuse_unreadable(states, rule, num_queries, len(self._pack), self._num_slots)
        q, k, v, k_pool, v_pool = states.q, states.k, states.v, states.k_pool, states.v_pool
        sinks, has_sinks = q if states.sinks is None else states.sinks, states.sinks is not None
        num_heads, head_dim = q.shape[1:]
        group = num_heads // k.shape[1]
        launch = _launch(head_dim, q.dtype, self._arch or architecture(q.device))
        window = rule.window if rule.window < self._num_positions else 0
        options = window > 0, rule.softcap > 0, has_sinks
        constants = _constants(launch, head_dim, group, *options, _is_aligned(k, v, k_pool, v_pool))
        heads = constants["HEADS"]
        tiles = Tiles(launch.lines // heads, launch.keys, rule.window, states.query_rows is not None)
        lists = self._tables_of(states).of(tiles, q.device)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        grid = (lists[0].shape[0], k.shape[1] * -(-group // heads))
        variant = _variant(head_dim, group, q.dtype, *options)
        if grid[0] == 0:
            return out

        def launch_with(num_stages: int) -> None:
            _tree_attention_kernel[grid](
                q, k, v, k_pool, v_pool, out, *lists, sinks,
                *(stride for x in (q, k, v, k_pool, v_pool, out) for stride in x.stride()[:2]),
                rule.scaling / rule.softcap if rule.softcap else 1.0,
                (rule.softcap or rule.scaling) * _LOG2_E,
                window,
                **constants,
                num_warps=launch.num_warps,
                num_stages=num_stages,
                **_OPTIONS,
            )  # fmt: skip

        with launching(TREE_ATTENTION, q):
            launched(variant, launch.num_stages, q.device, launch_with)
        return out

    def _tables_of(self, states: LayerStates) -> PackTables:
        """The pack's tables; where it came without, some for the rows that are asked about."""
        if self._tables is not None:
            return self._tables
        num_rows, device, rows = states.q.shape[0], states.q.device, states.query_rows
        key = num_rows, device, None if rows is None else rows.tobytes()
        if key not in self._alone:
            pack = self._pack if rows is None else replace(self._pack, scored_rows=rows.astype(np.int32))
            self._alone[key] = PackTables.alone(pack, device, num_rows)
        return self._alone[key]


def refuse_unreadable(
    states: LayerStates, rule: AttentionRule, num_queries: int, num_rows: int, num_slots: int
) -> None:
    """Raise RequestError for what the kernels cannot read, of so many rows and slots at least."""
    q, k = states.q, states.k
    (num_heads, head_dim), num_kv = q.shape[1:], k.shape[1]
    if num_heads % num_kv or num_heads > _MAX_GRID_Y:
        raise RequestError(
            f"q has {num_heads} heads, not a multiple up to {_MAX_GRID_Y} of the {num_kv} key-value heads of k"
        )
    if not 0 < head_dim <= MAX_HEAD_DIM:
        raise RequestError(f"q has head dimension {head_dim}; the Triton kernel takes 1 to {MAX_HEAD_DIM}")
    if not (0 < rule.scaling < math.inf and 0 <= rule.softcap < math.inf and rule.window >= 0):
        raise RequestError(f"{rule} cannot be: scaling must be positive, softcap and window 0 (for none) or positive")
    asked = {
        "q": (q, num_queries, num_heads),
        "k": (k, num_rows, num_kv),
        "v": (states.v, k.shape[0], num_kv),
        "k_pool": (states.k_pool, num_slots, num_kv),
        "v_pool": (states.v_pool, states.k_pool.shape[0], num_kv),
    }
    for name, (x, least_rows, heads) in asked.items():
        if x.dtype != q.dtype or x.dtype not in TYPE_NAMES or x.device != q.device:
            raise RequestError(
                f"{name} is {x.dtype} on {x.device} and q {q.dtype} on {q.device}; float32, bfloat16 or float16, "
                "and one device, are needed"
            )
        if x.shape[0] < least_rows or x.shape[1:] != (heads, head_dim):
            raise RequestError(f"{name} is {list(x.shape)}; at least [{least_rows}, {heads}, {head_dim}] is needed")
        if head_dim > 1 and x.stride(2) != 1:
            raise RequestError(f"{name} is not contiguous on its last axis (stride of {x.stride(2)} elements)")
    if (sinks := states.sinks) is None:
        return
    if sinks.dtype != torch.float32 or sinks.device != q.device or sinks.shape != (num_heads,):
        raise RequestError(
            f"sinks are {sinks.dtype} {list(sinks.shape)} on {sinks.device}; torch.float32 [{num_heads}] on {q.device} "
            "is needed"
        )
    if num_heads > 1 and sinks.stride(0) != 1:
        raise RequestError(f"sinks are not contiguous (stride of {sinks.stride(0)} elements)")


def _num_positions(pack: Pack) -> int:
    return int(pack.positions.max(initial=-1)) + 1


def _is_aligned(*tensors: torch.Tensor) -> bool:
    """Whether every (row, head) of the tensors begins at a multiple of 16 bytes."""
    return all(
        x.data_ptr() % 16 == 0 and all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:2])
        for x in tensors
    )


@triton.jit  # type: ignore[untyped-decorator]
def _walk(
    acc: tl.tensor, top: tl.tensor, total: tl.tensor, q: tl.tensor, limit: tl.tensor,
    row: tl.tensor, entries: tl.tensor, entry_begin: tl.tensor, entry_end: tl.tensor, keys: tl.tensor,
    k: tl.tensor, v: tl.tensor, k_pool: tl.tensor, v_pool: tl.tensor, stride_k: tl.tensor,
    stride_v: tl.tensor, stride_k_pool: tl.tensor, stride_v_pool: tl.tensor, to_unit: tl.tensor, to_log2: tl.tensor,
    window: tl.tensor, o_d: tl.tensor,
    IS_MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, IS_ALIGNED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Take some tiles into the running softmax: acc [lines, D], its top [lines] in unit scores, total [lines]."""
    o_key = tl.arange(0, TILE)
    # The tile's number is fetched two rounds ahead and its keys one, so that addresses never wait for memory.
    i_tile = tl.load(entries + 4 * entry_begin, mask=entry_begin < entry_end, other=0)
    b_key = tl.load(keys + i_tile * TILE + o_key)
    i_tile = tl.load(entries + 4 * (entry_begin + 1), mask=entry_begin + 1 < entry_end, other=0)
    for i_entry in tl.range(entry_begin, entry_end):
        in_pack = b_key >= 0
        p_k = tl.where(in_pack, k + b_key.to(tl.int64) * stride_k, k_pool + (~b_key).to(tl.int64) * stride_k_pool)
        p_v = tl.where(in_pack, v + b_key.to(tl.int64) * stride_v, v_pool + (~b_key).to(tl.int64) * stride_v_pool)
        if IS_ALIGNED:  # to 16 bytes, which choosing between two pointers has hidden
            p_k = tl.multiple_of(p_k, 16)
            p_v = tl.multiple_of(p_v, 16)
        if HEAD_DIM == BLOCK_D:
            b_k = tl.load(p_k[:, None] + o_d[None, :])
            b_v = tl.load(p_v[:, None] + o_d[None, :])
        else:
            b_k = tl.load(p_k[:, None] + o_d[None, :], mask=o_d[None, :] < HEAD_DIM, other=0.0)
            b_v = tl.load(p_v[:, None] + o_d[None, :], mask=o_d[None, :] < HEAD_DIM, other=0.0)
        b_key = tl.load(keys + i_tile * TILE + o_key)
        i_tile = tl.load(entries + 4 * (i_entry + 2), mask=i_entry + 2 < entry_end, other=0)
        score = tl.dot(q, tl.trans(b_k), input_precision="ieee")
        if HAS_SOFTCAP:
            score = hyperbolic_tangent(score * to_unit)
        if IS_MASKED:
            row_begin = tl.load(entries + 4 * i_entry + 2)
            row_end = tl.load(entries + 4 * i_entry + 3)
            pos = tl.load(entries + 4 * i_entry + 1) * TILE + o_key
            last = tl.where((row >= row_begin) & (row < row_end), limit, -1)
            visible = pos[None, :] <= last[:, None]
            if HAS_WINDOW:
                visible &= last[:, None] - pos[None, :] < window
            # Zero times a value that is not finite is NaN: out with those, and NaN for the rows that see one.
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


@triton.jit  # type: ignore[untyped-decorator]
def with_sink(
    acc: tl.tensor, top: tl.tensor, total: tl.tensor, sink: tl.tensor, to_log2: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """A running softmax with one more score a line, of no value: acc [lines, D] and its total [lines].

    In nats, where no finite sink overflows; one of -inf leaves every bit.
    """
    highest = top * (to_log2 * 0.6931471805599453)
    origin = tl.maximum(highest, sink)
    origin = tl.where(origin == float("-inf"), 0.0, origin)
    scale = tl.exp2((highest - origin) * 1.4426950408889634)
    total = total * scale + tl.exp2((sink - origin) * 1.4426950408889634)
    return acc * scale[:, None], total


@triton.jit(do_not_specialize=["window"])  # type: ignore[untyped-decorator]
def _tree_attention_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, k_pool: tl.tensor, v_pool: tl.tensor,
    out: tl.tensor, blocks: tl.tensor, entries: tl.tensor, keys: tl.tensor, row_pos: tl.tensor, sinks: tl.tensor,
    stride_qm: tl.tensor, stride_qh: tl.tensor, stride_km: tl.tensor, stride_kh: tl.tensor, stride_vm: tl.tensor,
    stride_vh: tl.tensor, stride_kps: tl.tensor, stride_kph: tl.tensor, stride_vps: tl.tensor, stride_vph: tl.tensor,
    stride_om: tl.tensor, stride_oh: tl.tensor, to_unit: tl.tensor, to_log2: tl.tensor, window: tl.tensor,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, GROUP: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, LINES: tl.constexpr, TILE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    """One block of rows with HEADS heads of one key-value head's GROUP; grid (blocks, key-value heads x parts)."""
    i_block = tl.program_id(0)
    parts: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    i_kv = (tl.program_id(1) // parts).to(tl.int64)
    i_part = tl.program_id(1) % parts
    row_begin = tl.load(blocks + 6 * i_block)
    row_end = tl.load(blocks + 6 * i_block + 1)
    first = tl.load(blocks + 6 * i_block + 2)
    full_begin = tl.load(blocks + 6 * i_block + 3)
    full_end = tl.load(blocks + 6 * i_block + 4)
    last = tl.load(blocks + 6 * i_block + 5)

    o_line = tl.arange(0, LINES)
    o_d = tl.arange(0, BLOCK_D)
    row = row_begin + o_line // HEADS
    head = i_part * HEADS + o_line % HEADS
    is_line = (row < row_end) & (head < GROUP)
    limit = tl.load(row_pos + row, mask=is_line, other=-1)
    m_q = is_line[:, None] & (o_d[None, :] < HEAD_DIM)
    line_head = i_kv * GROUP + head
    p_q = q + row.to(tl.int64) * stride_qm + line_head * stride_qh
    b_q = tl.load(p_q[:, None] + o_d[None, :], mask=m_q, other=0.0)
    k += i_kv * stride_kh
    v += i_kv * stride_vh
    k_pool += i_kv * stride_kph
    v_pool += i_kv * stride_vph

    acc = tl.zeros([LINES, BLOCK_D], dtype=tl.float32)
    top = tl.full([LINES], float("-inf"), dtype=tl.float32)
    total = tl.zeros([LINES], dtype=tl.float32)
    if HAS_WINDOW:
        acc, top, total = _walk(
            acc, top, total, b_q, limit, row, entries, first, full_begin, keys, k, v, k_pool, v_pool,
            stride_km, stride_vm, stride_kps, stride_vps, to_unit, to_log2, window, o_d,
            True, HAS_WINDOW, HAS_SOFTCAP, HEAD_DIM, BLOCK_D, TILE, IS_ALIGNED,
        )  # fmt: skip
    acc, top, total = _walk(
        acc, top, total, b_q, limit, row, entries, full_begin, full_end, keys, k, v, k_pool, v_pool,
        stride_km, stride_vm, stride_kps, stride_vps, to_unit, to_log2, window, o_d,
        False, HAS_WINDOW, HAS_SOFTCAP, HEAD_DIM, BLOCK_D, TILE, IS_ALIGNED,
    )  # fmt: skip
    acc, top, total = _walk(
        acc, top, total, b_q, limit, row, entries, full_end, last, keys, k, v, k_pool, v_pool,
        stride_km, stride_vm, stride_kps, stride_vps, to_unit, to_log2, window, o_d,
        True, HAS_WINDOW, HAS_SOFTCAP, HEAD_DIM, BLOCK_D, TILE, IS_ALIGNED,
    )  # fmt: skip
    if HAS_SINKS:
        acc, total = with_sink(acc, top, total, tl.load(sinks + line_head, mask=is_line, other=0.0), to_log2)
    # A row that no visit owns has seen nothing: zero.
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    p_out = out + row.to(tl.int64) * stride_om + line_head * stride_oh
    tl.store(p_out[:, None] + o_d[None, :], acc.to(out.dtype.element_ty), mask=m_q)


def resource_cases() -> list[Compilation]:
    """The shipped launch configurations: sizes and kinds of head dimension and group, with and without the options."""
    return [
        _compilation(head_dim, group, dtype, arch, has_options, has_options, has_sinks=False)
        for arch in ARCHITECTURES
        for head_dim in (40, 64, 80, 96, 128, 192, 256)
        for group in (1, 4, 7)
        for dtype in (torch.bfloat16 if arch >= least_architecture(torch.bfloat16) else torch.float16, torch.float32)
        for has_options in (False, True)
    ]


def model_cases(shapes: KernelShapes, arch: int) -> list[Compilation]:
    """What a model's layers launch: within a window and without, as packs are longer than it or not."""
    if not 0 < shapes.head_dim <= MAX_HEAD_DIM:
        return []
    windows = (False, True) if shapes.has_window else (False,)
    return [
        _compilation(shapes.head_dim, shapes.group, shapes.dtype, arch, has_window, shapes.has_softcap, has_sinks)
        for has_window in windows
        for has_sinks in shapes.sinks
    ]


@cache
def _variant(
    head_dim: int, group: int, dtype: torch.dtype, has_window: bool, has_softcap: bool, has_sinks: bool
) -> str:
    """What a variant of the kernel is called."""
    options = f"{', window' * has_window}{', soft-cap' * has_softcap}{', sinks' * has_sinks}"
    return f"tree_attention {group} x {head_dim} {TYPE_NAMES[dtype]}{options}"


def _compilation(
    head_dim: int, group: int, dtype: torch.dtype, arch: int, has_window: bool, has_softcap: bool, has_sinks: bool
) -> Compilation:
    launch = _launch(head_dim, dtype, arch)
    value = "*" + TYPE_NAMES[dtype]
    names = _tree_attention_kernel.arg_names
    constants = _constants(launch, head_dim, group, has_window, has_softcap, has_sinks, is_aligned=True)
    kinds = {name: "constexpr" for name in constants} | {"to_unit": "fp32", "to_log2": "fp32", "window": "i32"}
    kinds |= dict.fromkeys(("q", "k", "v", "k_pool", "v_pool", "out"), value)
    kinds |= dict.fromkeys(("blocks", "entries", "keys", "row_pos"), "*i32")
    kinds["sinks"] = "*fp32" if has_sinks else value
    return Compilation(
        name=_variant(head_dim, group, dtype, has_window, has_softcap, has_sinks),
        kernel=_tree_attention_kernel,
        signature={name: kinds.get(name, "i32") for name in names},
        constexprs=constants,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        multiples_of_16=tuple(name for name in names if name.startswith("stride")),
        architectures=(arch,),
        options=_OPTIONS,
    )
