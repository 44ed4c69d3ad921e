"""Kernels that are broken in one line, at every shipped launch size: what the first-use check must see.

A mutant is the shipped source with one piece changed. Left out are changes that make no difference to what our layers
ask for (heads of a norm that do not lie evenly), and those that leave an array's memory.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import decode_mutants
import pytest
import torch
from devices import DEVICE, poisoned_empty
from torch import nn
from transformers.activations import GELUTanh

from iclperm.engine import kernelcases
from iclperm.engine.kernelcheck import KERNELS
from iclperm.engine.kernels import rowwise, triton_attention, triton_decode, triton_head, triton_math, triton_rowwise
from iclperm.engine.kernels.rowwise import RmsNorm
from iclperm.engine.kernels.rule import AttentionRule
from iclperm.engine.plan import Pack

TOLERANCE = {kernel.name: kernel.tolerance for kernel in KERNELS}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Site:
    """A kernel at one launch size: ``error`` runs its check on a module in place of the shipped one."""

    name: str
    error: Callable[[ModuleType], float]
    tolerance: float

    def is_right(self, module: ModuleType) -> bool:
        return self.error(module) <= self.tolerance


@dataclass(frozen=True)
class Mutant:
    """``old`` of a kernel's source is ``new``; ``sites`` are where that must be seen."""

    name: str
    module: ModuleType
    old: str
    new: str
    sites: list[Site]

    def build(self, folder: Path) -> ModuleType:
        """The shipped module, broken; of what several kernels call, a kernel that calls it broken."""
        caller = triton_head if self.module is triton_math else self.module
        broken = _changed(self.module, self.old, self.new, folder)
        if caller is self.module:
            return broken
        return _changed(caller, f"from {triton_math.__name__} import", f"from {broken.__name__} import", folder)


def _changed(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert source.count(old) == 1, old
    name = f"mutant_{module.__name__.rpartition('.')[2]}_{abs(hash((old, new)))}"
    path = folder / f"{name}.py"
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    changed = importlib.util.module_from_spec(spec)
    sys.modules[name] = changed
    spec.loader.exec_module(changed)
    return changed


Shape = tuple[int, torch.dtype, int, int]

# Attention: compute capability, dtype, head dimension and heads of a group, together every size of tiles that is
# shipped; in the last, the heads of a group do not fit one block.
SHAPES = [
    (80, torch.bfloat16, 64, 4),
    (80, torch.bfloat16, 128, 7),
    (80, torch.bfloat16, 256, 1),
    (80, torch.bfloat16, 192, 3),
    (90, torch.bfloat16, 64, 2),
    (90, torch.bfloat16, 256, 2),
    (80, torch.float32, 64, 1),
    (80, torch.float32, 128, 2),
    (80, torch.float32, 256, 2),
    (80, torch.float32, 192, 1),
    (75, torch.float32, 192, 2),
]
WIDE_GROUP = (80, torch.float32, 192, 17)
MANY_ROWS = (86, 20)  # more than a block of any shape, and fewer than the check has: the interpreter is slow
PLAIN, SHORT, OPTIONS = (AttentionRule(0.1, *rest) for rest in ((0.0, 0), (30.0, 70), (30.0, 200)))


def attention_error(
    shape: Shape, rule: AttentionRule, num_kv: int, longest: int, many_rows: tuple[int, int], module: ModuleType
) -> float:
    """Of the module's kernel in the tiles of a shape; asserts that this kernel ran."""
    arch, dtype, head_size, group = shape
    launched: list[int] = []

    def prepare(pack: Pack, *_: object) -> Any:
        launched.append(arch)
        return module.TritonAttention(pack, arch)

    case = kernelcases.AttentionCase.of(longest, num_kv * group, num_kv, head_size, dtype, many_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernelcases, "prepare", prepare)
        error = case.error(rule, "triton", DEVICE)
    assert launched == [arch]
    return error


def attention_sites(rule: AttentionRule, num_kv: int = 1, shapes: list[Shape] = SHAPES) -> list[Site]:
    return [
        Site(
            f"{shape}", partial(attention_error, shape, rule, num_kv, 300, MANY_ROWS),
            TOLERANCE["tree attention"][shape[1]],
        )
        for shape in shapes
    ]  # fmt: skip


def wide_group_site() -> Site:
    """Of two wide groups, on short paths: every row of theirs is a block."""
    tolerance = TOLERANCE["tree attention"][WIDE_GROUP[1]]
    return Site(f"{WIDE_GROUP}", partial(attention_error, WIDE_GROUP, PLAIN, 2, 20, (9, 3)), tolerance)


def decode_sites(rule: AttentionRule, least_kv: int = 1, least_rows: int = 1) -> list[Site]:
    """Of models with at least so many heads of keys and values, where an item may hold at least so many rows."""
    return [
        Site(
            f"{shape}", partial(decode_mutants.decode_error, shape, rule, DEVICE),
            TOLERANCE["decode attention"][shape.dtype],
        )
        for shape in decode_mutants.SHAPES if shape.num_kv >= least_kv and shape.most_rows >= least_rows
    ]  # fmt: skip


_LOOP = "acc, top, total, b_q, limit, row, entries, {}, {}, keys, k, v, k_pool, v_pool,"
_ATTENTION = [
    ("whole tiles left out", _LOOP.format("full_begin", "full_end"), _LOOP.format("full_end", "full_end"), PLAIN),
    (
        "last whole tile left out", _LOOP.format("full_begin", "full_end"),
        _LOOP.format("full_begin", "tl.maximum(full_end - 1, full_begin)"), PLAIN,
    ),
    ("whole tiles twice", _LOOP.format("full_end", "last"), _LOOP.format("full_begin", "last"), PLAIN),
    ("tiles at the end left out", _LOOP.format("full_end", "last"), _LOOP.format("last", "last"), PLAIN),
    (
        "tiles at a window's border left out", _LOOP.format("first", "full_begin"),
        _LOOP.format("full_begin", "full_begin"), OPTIONS,
    ),
    (
        "first tile of each loop left out", "tl.range(entry_begin, entry_end)",
        "tl.range(entry_begin + 1, entry_end)", PLAIN,
    ),
    (
        "a tile read again", "entries + 4 * (i_entry + 2), mask=i_entry + 2",
        "entries + 4 * (i_entry + 1), mask=i_entry + 1", PLAIN,
    ),
    (
        "whole tiles do not raise the total", "total = total * scale + tl.sum(b_p, axis=1)",
        "total = total * scale + (tl.sum(b_p, axis=1) if IS_MASKED else 0.0)", PLAIN,
    ),
    (
        "whole tiles are not rescaled", "b_v, acc * scale[:, None]",
        "b_v, acc * scale[:, None] if IS_MASKED else acc", PLAIN,
    ),
    ("the total is not rescaled", "total = total * scale +", "total = total +", PLAIN),
    (
        "the softmax's top stays behind", "        top = new_top\n",
        "        top = origin if IS_MASKED else top\n", PLAIN,
    ),
    ("keys of the pack are the pool's", "in_pack = b_key >= 0", "in_pack = b_key >= 1 << 20", PLAIN),
    ("values of the pool one slot on", "v_pool + (~b_key)", "v_pool + (~b_key + 1)", PLAIN),
    ("a row sees what follows it", "pos[None, :] <= last[:, None]", "pos[None, :] <= last[:, None] + 1", PLAIN),
    ("rows see other branches", "(row >= row_begin) & (row < row_end)", "row >= 0", PLAIN),
    ("a window one longer", "last[:, None] - pos[None, :] < window", "last[:, None] - pos[None, :] <= window", OPTIONS),
    ("no soft-cap", "score = hyperbolic_tangent(score * to_unit)", "score = score * to_unit", OPTIONS),
    (
        "what is not finite spreads", "b_v = tl.where(is_broken[:, None], 0.0, b_v).to(b_v.dtype)", "b_v = b_v", PLAIN,
    ),
    (
        "what is not finite is forgotten", 'score = tl.where(is_broken[None, :], float("nan"), score)',
        "score = score", PLAIN,
    ),
    ("rows of no visit keep what they had", "tl.where(total == 0.0, 1.0, total)", "total", PLAIN),
]  # fmt: skip
# What takes two key-value heads to be seen.
_HEADS = [
    ("every head has the first one's keys", "k += i_kv * stride_kh", "k += 0 * i_kv * stride_kh"),
    ("every head has the first one's values", "v += i_kv * stride_vh", "v += 0 * i_kv * stride_vh"),
    ("every head has the first one's keys of the pool", "k_pool += i_kv * stride_kph", "k_pool += 0 * stride_kph"),
    ("every head has the first one's values of the pool", "v_pool += i_kv * stride_vph", "v_pool += 0 * stride_vph"),
    ("queries of the first group", "line_head = i_kv * GROUP + head", "line_head = 0 * i_kv * GROUP + head"),
]
# What takes a group of more heads than a block has lines.
_PARTS = [
    ("only the first heads of a wide group", "i_part = tl.program_id(1) % parts", "i_part = 0 * tl.program_id(1)"),
]


def row_wise_error(error: Callable[[], float], module: ModuleType) -> float:
    """Of a case that runs a module's norm, rotation and gate, poisoning what is allocated; asserts that one ran."""
    ran: list[str] = []

    def counted(name: str) -> Callable[..., None]:
        def call(*given: Any, **options: Any) -> None:
            ran.append(name)
            getattr(module, name)(*given, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rowwise, "runs_triton", lambda x: True)
        patch.setattr(torch, "empty", poisoned_empty)
        for name in ("gate", "rms_norm", "rotate"):
            if module is not triton_rowwise:
                patch.setattr(triton_rowwise, name, counted(name))
        found = error()
    assert ran or module is triton_rowwise
    return found


def _drawing(dtype: torch.dtype) -> kernelcases.Drawing:
    return kernelcases.Drawing(dtype, DEVICE)


WIDTHS = (24, 64, 136, 640, 2304, 5000, 9000)
"""Of rows that share a program, in blocks of every size, and of rows wider than one."""
HALVES = (8, 20, 64, 96, 128)


def norm_sites(dtypes: tuple[torch.dtype, ...] = DTYPES, *, of_sum: bool, is_wide: bool) -> list[Site]:
    def error(width: int, dtype: torch.dtype) -> float:
        draw = _drawing(dtype)
        norm = RmsNorm(draw(width), 1e-2, 1.0)
        if of_sum:
            return kernelcases.norm_of_sum_error(norm, draw)
        return kernelcases.norm_error(norm, 3 if width < 256 else 1, draw)

    widths = [width for width in WIDTHS if (width > triton_rowwise._WIDEST_BLOCK) == is_wide]
    return [
        Site(f"{width} {dtype}", partial(row_wise_error, partial(error, width, dtype)), TOLERANCE["RMS norm"][dtype])
        for dtype in dtypes
        for width in widths
    ]


def rotation_sites() -> list[Site]:
    def error(half: int, stay: int, dtype: torch.dtype) -> float:
        return kernelcases.rotation_error(3, 2 * half + stay, 2 * half, _drawing(dtype))

    return [
        Site(
            f"{2 * half} of {2 * half + stay} {dtype}",
            partial(row_wise_error, partial(error, half, stay, dtype)),
            TOLERANCE["rotation"][dtype],
        )
        for dtype in DTYPES
        for half in HALVES
        for stay in (0, 16)
    ]


def gate_sites(
    activation: nn.Module | None = None, *, is_packed: tuple[bool, ...] = (False, True), width: int = 2100
) -> list[Site]:
    def error(packed: bool, dtype: torch.dtype) -> float:
        return kernelcases.gate_error(activation or nn.SiLU(), width, _drawing(dtype), is_packed=packed)

    return [
        Site(
            f"{width}{' packed' * packed} {dtype}",
            partial(row_wise_error, partial(error, packed, dtype)),
            TOLERANCE["gated activation"][dtype],
        )
        for dtype in DTYPES
        for packed in is_packed
    ]


_NARROW, _WIDE = "        ", "            "
_IN_NARROW = "mean = tl.math.div_rn(tl.sum(z * z, axis=1), 1.0 * WIDTH)\n        scale = tl.math.div_rn(1.0, "
_IN_WIDE = "mean = tl.math.div_rn(tl.sum(squares, axis=1), 1.0 * WIDTH)\n        scale = tl.math.div_rn(1.0, "
_LOOPS = "for begin in range(0, WIDTH, BLOCK):\n            here = begin + columns[None, :]\n            {}"
_FIRST, _SECOND = "z = _sum_or_self", "is_inside = is_row"
_STORE = "{}tl.store(total + total_rows + {}, z.to(total.dtype.element_ty), mask=is_inside)\n"
_NORM: list[tuple[str, str, str, list[Site]]] = [
    (
        "a narrow norm divides by its block", _IN_NARROW, _IN_NARROW.replace("WIDTH", "BLOCK"),
        [site for site in norm_sites(of_sum=False, is_wide=False) if not site.name.startswith("64 ")],
    ),
    (
        "a narrow norm has no epsilon", _IN_NARROW + "tl.math.sqrt_rn(mean + eps)",
        _IN_NARROW + "tl.math.sqrt_rn(mean)", norm_sites(of_sum=False, is_wide=False),
    ),
    (
        "a wide norm has no epsilon", _IN_WIDE + "tl.math.sqrt_rn(mean + eps)",
        _IN_WIDE + "tl.math.sqrt_rn(mean)", norm_sites(of_sum=False, is_wide=True),
    ),
    (
        "the weight's offset is lost", "factor = offset + tl.load", "factor = tl.load",
        norm_sites(of_sum=False, is_wide=False),
    ),
    ("the sum is lost", "z += tl.load(total", "z += 0.0 * tl.load(total", norm_sites(of_sum=True, is_wide=False)),
    (
        "the sum is not rounded", "z = z.to(total.dtype.element_ty).to(tl.float32)", "z = z",
        norm_sites((torch.bfloat16, torch.float16), of_sum=True, is_wide=False),
    ),
    (
        "a narrow norm does not leave its sum", _STORE.format("            ", "columns[None, :]"), "            pass\n",
        norm_sites(of_sum=True, is_wide=False),
    ),
    (
        "a wide norm does not leave its sum", _STORE.format("                ", "here"), "                pass\n",
        norm_sites(of_sum=True, is_wide=True),
    ),
    (
        "every block norms the first rows",
        "rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)\n    is_row = (rows < num_rows)[:, None]\n",
        "rows = tl.arange(0, ROWS)\n    is_row = (rows < num_rows)[:, None]\n",
        norm_sites(of_sum=False, is_wide=False),
    ),
    (
        "the last row is left out", "is_row = (rows < num_rows)[:, None]", "is_row = (rows < num_rows - 1)[:, None]",
        norm_sites(of_sum=False, is_wide=False),
    ),
    (
        "the last column is left out", "is_inside = is_row & (columns < WIDTH)[None, :]",
        "is_inside = is_row & (columns < WIDTH - 1)[None, :]", norm_sites(of_sum=False, is_wide=False),
    ),
    (
        "a wide norm's squares begin late", _LOOPS.format(_FIRST), _LOOPS.replace("(0,", "(BLOCK,").format(_FIRST),
        norm_sites(of_sum=False, is_wide=True),
    ),
    (
        "a wide norm's squares end early", _LOOPS.format(_FIRST),
        _LOOPS.replace("WIDTH,", "WIDTH - BLOCK,").format(_FIRST), norm_sites(of_sum=False, is_wide=True),
    ),
    ("a wide norm forgets squares", "squares += z * z", "squares = z * z", norm_sites(of_sum=False, is_wide=True)),
    (
        "a wide norm begins late", _LOOPS.format(_SECOND), _LOOPS.replace("(0,", "(BLOCK,").format(_SECOND),
        norm_sites(of_sum=False, is_wide=True),
    ),
    (
        "a wide norm ends early", _LOOPS.format(_SECOND), _LOOPS.replace("WIDTH,", "WIDTH - BLOCK,").format(_SECOND),
        norm_sites(of_sum=False, is_wide=True),
    ),
    (
        "a wide norm has the first block's weights", "_scaled(z, scale, weight, begin + columns,",
        "_scaled(z, scale, weight, columns,", norm_sites(of_sum=False, is_wide=True),
    ),
    (
        "a wide norm adds nothing on its second pass",
        "is_inside = is_row & (here < WIDTH)\n            z = _sum_or_self(x, total, x_rows + here, total_rows + here, "
        "is_inside, ADD)",
        "is_inside = is_row & (here < WIDTH)\n            z = _sum_or_self(x, total, x_rows + here, total_rows + here, "
        "is_inside, False)",
        norm_sites(of_sum=True, is_wide=True),
    ),
]  # fmt: skip
_ROTATE = [
    ("the first head is left out", "for head in range(NUM_HEADS)", "for head in range(1, NUM_HEADS)"),
    ("the last head is left out", "for head in range(NUM_HEADS)", "for head in range(NUM_HEADS - 1)"),
    ("the same head again", "places + tl.cast(head, tl.int64) * head_stride", "places + 0 * head * head_stride"),
    ("the last column is left out", "(columns < HALF)", "(columns < HALF - 1)"),
    (
        "every block turns the first rows",
        "rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)\n    columns = tl.arange(0, BLOCK)[None, :]",
        "rows = tl.arange(0, ROWS)\n    columns = tl.arange(0, BLOCK)[None, :]",
    ),
    (
        "the last row is left out", "is_inside = (rows < num_rows)[:, None] & (columns",
        "is_inside = (rows < num_rows - 1)[:, None] & (columns",
    ),
    ("one half's cosines for both", "cosines + cosine_places + HALF", "cosines + cosine_places"),
    ("one half's sines for both", "sines + sine_places + HALF", "sines + sine_places"),
    ("turned the other way", "low * low_cosines - high * low_sines", "low * low_cosines + high * low_sines"),
    ("the high half is not turned", "high * high_cosines + low * high_sines", "high * high_cosines"),
]  # fmt: skip
_GATE: list[tuple[str, str, str, list[Site]]] = [
    (
        "columns beyond a block are the first", "columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)",
        "columns = tl.arange(0, BLOCK)", gate_sites(),
    ),
    (
        "the last column is left out", "is_inside = columns < NUM_COLUMNS", "is_inside = columns < NUM_COLUMNS - 1",
        gate_sites(),
    ),
    ("rows lie as the result's", "x + row * x_stride", "x + row * out_stride", gate_sites(is_packed=(True,))),
    ("factors lie as the result's", "factor + row * factor_stride", "factor + row * out_stride",
     gate_sites(is_packed=(True,))),
    ("no factor", "value *= tl.load(factor", "value += 0.0 * tl.load(factor", gate_sites()),
    ("silu of one", "return x * _sigmoid(x)", "return _sigmoid(x)", gate_sites()),
    ("below zero as above", "tl.where(x < 0, t, 1.0)", "1.0", gate_sites()),
    ("a gelu without its cube", "(x + 0.044715 * (x * x * x))", "x", gate_sites(GELUTanh())),
    ("a gelu of another width", "x * 0.7071067811865476", "x * 0.70", gate_sites(nn.GELU())),
]  # fmt: skip


def head_error(
    dtype: torch.dtype, num_ids: int, width: int, has_bias: bool, softcap: float, splits: int, module: ModuleType
) -> float:
    """Of the module's head on a matrix of its own; asserts that it ran."""
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(width, num_ids, bias=has_bias).requires_grad_(False)
    head.weight.copy_(torch.randn(num_ids, width, generator=generator) / 4)
    if has_bias:
        head.bias.copy_(torch.randn(num_ids, generator=generator))
    head = head.to(dtype).to(DEVICE)
    ran: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            ran.append(name)
            return getattr(module, name)(*given, **options, least_splits=splits)

        return call

    shipped = triton_head.read_rows, triton_head.choose_rows
    with pytest.MonkeyPatch.context() as patch:
        if module is triton_head:
            original = ModuleType("original")
            original.read_rows, original.choose_rows = shipped  # type: ignore[attr-defined]
            module = original
        for name in ("read_rows", "choose_rows"):
            patch.setattr(triton_head, name, counted(name))
        patch.setattr(torch, "empty", poisoned_empty)
        rows = 1 + triton_head._LAUNCHES[dtype].rows - 8  # with those of each kind, a little more than a block
        error = max(kernelcases.fused_head_errors(head, 0.5, softcap, rows))
    assert set(ran) == {"read_rows", "choose_rows"}
    return error


def head_sites(
    *, width: int = 96, has_bias: bool = False, softcap: float = 0.0, splits: int = 2, dtypes: Any = DTYPES
) -> list[Site]:
    """Of 700 ids, which end within a tile of any size."""
    return [
        Site(
            f"{width}{' bias' * has_bias}{f' soft-cap {softcap}' if softcap else ''} {splits} splits {dtype}",
            partial(head_error, dtype, 700, width, has_bias, softcap, splits),
            TOLERANCE["head"][dtype],
        )
        for dtype in dtypes
    ]


MANY = triton_head.LEAST_SPLITS
_TIES = "tl.min(tl.where(logits == top[:, None], ids[None, :], NUM_IDS), axis=1)"
_COLUMN = "column = tl.load(entry_ids + entry) - begin"
_HEAD: list[tuple[str, str, str, list[Site]]] = [
    ("the first tile of a split is left out", "range(split * TILES_A_SPLIT,", "range(split * TILES_A_SPLIT + 1,",
     head_sites()),
    ("the last tile of a split is left out", "tl.minimum((split + 1) * TILES_A_SPLIT, NUM_TILES)",
     "tl.minimum((split + 1) * TILES_A_SPLIT - 1, NUM_TILES)", head_sites()),
    ("the last tile of all is left out", "tl.minimum((split + 1) * TILES_A_SPLIT, NUM_TILES)",
     "tl.minimum((split + 1) * TILES_A_SPLIT, NUM_TILES - 1)", head_sites(splits=MANY)),
    ("the last id is the one before", "held = tl.minimum(columns, NUM_IDS - 1 - begin)",
     "held = tl.minimum(columns, NUM_IDS - 2 - begin)", head_sites()),
    ("ids beyond the last count", 'tl.where(ids[None, :] < NUM_IDS, logits, float("-inf"))', "logits",
     head_sites()),
    ("the first columns are left out", "for start in range(0, WIDTH, INNER)", 
     "for start in range(INNER, WIDTH, INNER)", head_sites()),
    ("the last columns are left out", "for start in range(0, WIDTH, INNER)", 
     "for start in range(0, WIDTH - INNER, INNER)", head_sites(width=128)),
    ("whole columns again", "left, right = tl.load(hidden_rows + start), tl.load(weight_rows + start)",
     "left, right = tl.load(hidden_rows), tl.load(weight_rows)", head_sites(width=128)),
    ("a column at the end is left out", "is_inside = inner[None, :] < WIDTH - start",
     "is_inside = inner[None, :] < WIDTH - start - 1", head_sites(width=40)),
    ("no bias", "logits += tl.load(bias", "logits += 0.0 * tl.load(bias", head_sites(has_bias=True)),
    ("every tile has the first one's bias", "tl.load(bias + begin + held)", "tl.load(bias + held)",
     head_sites(has_bias=True)),
    ("no scale", "logits *= scale", "logits *= 1.0", head_sites()),
    ("no soft-cap", "logits = softcap * hyperbolic_tangent(logits * (1.0 / softcap))", "logits = logits",
     head_sites(softcap=9.0)),
    ("only the last tile may be broken", "broken = tl.maximum(broken, tl.max(",
     "broken = tl.maximum(0 * broken, tl.max(", head_sites(dtypes=(torch.float32, torch.bfloat16))),
    ("rows of later blocks are the first", "rows = block * ROWS + places", "rows = places", head_sites()),
    ("entries of the first block", "entries = tile_entries + block * NUM_TILES + tile", "entries = tile_entries + tile",
     head_sites()),
    ("the first entry is left out", "tl.range(tl.load(entries), ", "tl.range(tl.load(entries) + 1, ", head_sites()),
    ("the last entry is left out", "tl.load(entries + 1), num_stages=1", "tl.load(entries + 1) - 1, num_stages=1",
     head_sites()),
    ("an entry's neighbour", _COLUMN, _COLUMN + " - 1", head_sites()),
    ("ties within a tile go to the last", _TIES,
     _TIES.replace("tl.min", "tl.max").replace("NUM_IDS", "-1"), head_sites()),
    ("ties of tiles go to the last", "is_higher = top > maximum", "is_higher = top >= maximum", head_sites()),
    ("the last tile's best id", "first_id = tl.where(is_higher, met, first_id)", "first_id = met", head_sites()),
    ("a maximum that falls", "raised = tl.where(is_higher, top, maximum)", "raised = top", head_sites()),
    ("sums are not rescaled", "total = total * tl.exp(maximum - raised)", "total = total", head_sites()),
    ("sums are forgotten", "total = total * tl.exp(maximum - raised)", "total = 0.0 * total", head_sites()),
    ("merged without rescaling", "* tl.exp(tops - top), axis=0)", "* 1.0, axis=0)", head_sites()),
    ("the last split is left out", "is_inside = splits < NUM_SPLITS", "is_inside = splits < NUM_SPLITS - 1",
     [*head_sites(), *head_sites(splits=MANY)]),
    ("ties of splits go to the last", "first = tl.min(tl.where(tops == top, ids, 2147483647), axis=0)",
     "first = tl.max(tl.where(tops == top, ids, -1), axis=0)", [*head_sites(), *head_sites(splits=MANY)]),
    ("the first split's best id", "tl.where(tops == top, ids, 2147483647)", "tl.where(tops <= top, ids, 2147483647)",
     head_sites()),
    ("broken where every split is", "is_broken = tl.min(ids, axis=0) < 0", "is_broken = tl.max(ids, axis=0) < 0",
     head_sites(splits=MANY, dtypes=(torch.float32, torch.bfloat16))),
    ("the sum for its logarithm", "tl.store(log_sum + row, tl.log(total))", "tl.store(log_sum + row, total)",
     head_sites()),
]  # fmt: skip
_MATH = [
    ("a tangent near zero is a line", "series * square * x + x, tl.where", "x, tl.where"),
    ("a tangent far below zero is above", "tl.where(x < 0, -far, far)", "far"),
    ("a tangent far from zero is one", "far = 1.0 - 2.0 /", "far = 1.0 - 0.0 /"),
]

MUTANTS = {
    "tree attention": [
        *(Mutant(name, triton_attention, old, new, attention_sites(rule)) for name, old, new, rule in _ATTENTION),
        *(Mutant(name, triton_attention, old, new, attention_sites(PLAIN, num_kv=2)) for name, old, new in _HEADS),
        *(Mutant(name, triton_attention, old, new, [wide_group_site()]) for name, old, new in _PARTS),
    ],
    "decode attention": [
        Mutant(name, triton_decode, old, new, decode_sites(rule, least_kv, 1 + (name in decode_mutants.AMONG_ROWS)))
        for table, least_kv in ((decode_mutants.MUTANTS, 1), (decode_mutants.BY_HEAD, 2))
        for name, (old, new, rule) in table.items()
    ],
    "RMS norm": [Mutant(name, triton_rowwise, old, new, sites) for name, old, new, sites in _NORM],
    "rotation": [Mutant(name, triton_rowwise, old, new, rotation_sites()) for name, old, new in _ROTATE],
    "gated activation": [Mutant(name, triton_rowwise, old, new, sites) for name, old, new, sites in _GATE],
    "head": [
        *(Mutant(name, triton_head, old, new, sites) for name, old, new, sites in _HEAD),
        *(Mutant(name, triton_math, old, new, head_sites(softcap=9.0)) for name, old, new in _MATH),
    ],
}
SHIPPED: dict[str, list[tuple[ModuleType, Site]]] = {
    "tree attention": [
        (triton_attention, site)
        for sites in (
            *(attention_sites(rule) for rule in (PLAIN, SHORT, OPTIONS)),
            [wide_group_site()],
        )
        for site in sites
    ],
    "decode attention": [
        (triton_decode, site)
        for rule in (decode_mutants.PLAIN, decode_mutants.SHORT, decode_mutants.OPTIONS)
        for site in decode_sites(rule)
    ],
    "RMS norm": [
        (triton_rowwise, site)
        for of_sum in (False, True)
        for is_wide in (False, True)
        for site in norm_sites(of_sum=of_sum, is_wide=is_wide)
    ],
    "rotation": [(triton_rowwise, site) for site in rotation_sites()],
    "gated activation": [
        (triton_rowwise, site) for activation in (nn.SiLU(), GELUTanh(), nn.GELU()) for site in gate_sites(activation)
    ],
    "head": [
        (triton_head, site)
        for splits in (2, MANY)
        for options in ({}, {"has_bias": True}, {"softcap": 9.0}, {"width": 40}, {"width": 128})
        for site in head_sites(splits=splits, **options)
    ],
}


def in_turn(kernel: str) -> Iterator[tuple[Mutant, Site]]:
    """Every mutant of a kernel once, at its sites in turn."""
    for number, mutant in enumerate(MUTANTS[kernel]):
        yield mutant, mutant.sites[number % len(mutant.sites)]


def everywhere(kernel: str) -> Iterator[tuple[Mutant, Site]]:
    """Every mutant of a kernel at every site."""
    for mutant in MUTANTS[kernel]:
        for site in mutant.sites:
            yield mutant, site
