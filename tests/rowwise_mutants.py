"""Norms, rotations and gates, broken in one line: what `kernel_mutants` has of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from devices import DEVICE, poisoned_empty
from mutants import DTYPES, TOLERANCE, Site
from torch import nn
from transformers.activations import GELUTanh

from iclperm.engine import kernelcases
from iclperm.engine.kernels import rowwise, triton_layer_norm, triton_rowwise
from iclperm.engine.kernels.rowwise import CentredNorm, RmsNorm


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
        shipped = triton_layer_norm if hasattr(module, "layer_norm") else triton_rowwise
        names = ("layer_norm",) if shipped is triton_layer_norm else ("gate", "rms_norm", "rotate")
        for name in names if module is not shipped else ():
            patch.setattr(shipped, name, counted(name))
        found = error()
    assert ran or module is shipped
    return found


def _drawing(dtype: torch.dtype) -> kernelcases.Drawing:
    return kernelcases.Drawing(dtype, DEVICE)


WIDTHS = (24, 64, 136, 640, 2304, 5000, 9000)
"""Of rows that share a program, in blocks of every size, and of rows wider than one."""
HALVES = (8, 20, 64, 96, 128)


def norm_sites(dtypes: tuple[torch.dtype, ...] = DTYPES, *, of_sum: bool, is_wide: bool) -> list[Site]:
    def error(width: int, dtype: torch.dtype) -> float:
        draw = _drawing(dtype)
        norm = RmsNorm(draw(width), 1e-6, 1.0)
        if of_sum:
            return kernelcases.norm_of_sum_error(norm, draw)
        return kernelcases.norm_error(norm, 3 if width < 256 else 1, draw)

    widths = [width for width in WIDTHS if (width > triton_rowwise._WIDEST_BLOCK) == is_wide]
    return [
        Site(f"{width} {dtype}", partial(row_wise_error, partial(error, width, dtype)), TOLERANCE["RMS norm"][dtype])
        for dtype in dtypes
        for width in widths
    ]


def layer_norm_sites(
    dtypes: tuple[torch.dtype, ...] = DTYPES, *, of_sum: bool = False, is_wide: bool, has_bias: bool = True
) -> list[Site]:
    def error(width: int, dtype: torch.dtype) -> float:
        draw = _drawing(dtype)
        norm = CentredNorm(draw(width), 1e-5, draw(width) if has_bias else None)
        return kernelcases.norm_of_sum_error(norm, draw) if of_sum else kernelcases.norm_error(norm, 1, draw)

    widths = [width for width in WIDTHS if (width > triton_rowwise._WIDEST_BLOCK) == is_wide]
    return [
        Site(f"{width} {dtype}", partial(row_wise_error, partial(error, width, dtype)), TOLERANCE["layer norm"][dtype])
        for dtype in dtypes
        for width in widths
    ]


def rotation_sites(*, neighbours: bool = False) -> list[Site]:
    def error(half: int, stay: int, dtype: torch.dtype) -> float:
        return kernelcases.rotation_error(3, 2 * half + stay, 2 * half, _drawing(dtype), neighbours=neighbours)

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
    activation: nn.Module | None = None,
    *,
    is_packed: tuple[bool, ...] = (False, True),
    width: int = 2100,
    is_gated: bool = True,
) -> list[Site]:
    def error(packed: bool, dtype: torch.dtype) -> float:
        given = activation or nn.SiLU(), width, _drawing(dtype)
        return kernelcases.gate_error(*given, is_packed=packed, is_gated=is_gated)

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
NORM: list[tuple[str, str, str, list[Site]]] = [
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
        "a narrow norm has ten times its epsilon", _IN_NARROW + "tl.math.sqrt_rn(mean + eps)",
        _IN_NARROW + "tl.math.sqrt_rn(mean + 10 * eps)", norm_sites(of_sum=False, is_wide=False),
    ),
    (
        "a wide norm has ten times its epsilon", _IN_WIDE + "tl.math.sqrt_rn(mean + eps)",
        _IN_WIDE + "tl.math.sqrt_rn(mean + 10 * eps)", norm_sites(of_sum=False, is_wide=True),
    ),
    (
        "epsilon is added to the root", _IN_NARROW + "tl.math.sqrt_rn(mean + eps)",
        _IN_NARROW + "(tl.math.sqrt_rn(mean) + eps)", norm_sites(of_sum=True, is_wide=False),
    ),
    (
        "squares as float16 has them", "tl.sum(z * z, axis=1)",
        "tl.sum((z * z).to(out.dtype.element_ty).to(tl.float32), axis=1)",
        norm_sites((torch.float16,), of_sum=False, is_wide=False),
    ),
    (
        "every seventh weight is one percent more", "return z * scale[:, None] * factor[None, :]",
        "return z * scale[:, None] * (factor * tl.where(columns % 7 == 3, 1.01, 1.0))[None, :]",
        norm_sites(of_sum=False, is_wide=False),
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
_BEGINS = "for begin in range(0, WIDTH, BLOCK):\n            here = begin + columns[None, :]\n            {}"
LAYER_NORM: list[tuple[str, str, str, list[Site]]] = [
    (
        "no mean is taken off", "z - tl.math.div_rn(tl.sum(z, axis=1), 1.0 * WIDTH)[:, None], 0.0", "z, 0.0",
        layer_norm_sites(is_wide=False),
    ),
    (
        "a mean over the block", "z - tl.math.div_rn(tl.sum(z, axis=1), 1.0 * WIDTH)",
        "z - tl.math.div_rn(tl.sum(z, axis=1), 1.0 * BLOCK)", layer_norm_sites(is_wide=False)[:4:3],
    ),
    (
        "columns beyond the last are off, too",
        "off = tl.where(is_inside, z - tl.math.div_rn(tl.sum(z, axis=1), 1.0 * WIDTH)[:, None], 0.0)",
        "off = z - tl.math.div_rn(tl.sum(z, axis=1), 1.0 * WIDTH)[:, None]", layer_norm_sites(is_wide=False)[:4:3],
    ),
    ("no bias", "    if BIAS:\n", "    if False:\n", layer_norm_sites(is_wide=False)),
    ("the bias is the weight", "tl.load(bias + columns", "tl.load(weight + columns", layer_norm_sites(is_wide=False)),
    (
        "a bias that is not there", "    if BIAS:\n", "    if True:\n",
        layer_norm_sites(is_wide=False, has_bias=False),
    ),
    (
        "every block norms the first rows", "rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)",
        "rows = tl.arange(0, ROWS)", layer_norm_sites(is_wide=False),
    ),
    (
        "the last row is left out", "is_row = (rows < num_rows)", "is_row = (rows < num_rows - 1)",
        layer_norm_sites(is_wide=False),
    ),
    (
        "a narrow norm does not leave its sum", "        if ADD:\n" + _STORE.format("            ", "here"), "",
        layer_norm_sites(of_sum=True, is_wide=False),
    ),
    (
        "a wide norm does not leave its sum", _STORE.format("                ", "here"), "                pass\n",
        layer_norm_sites(of_sum=True, is_wide=True),
    ),
    ("a wide norm forgets numbers", "sums += _sum_or_self", "sums = _sum_or_self", layer_norm_sites(is_wide=True)),
    ("a wide norm forgets squares", "squares += off * off", "squares = off * off", layer_norm_sites(is_wide=True)),
    (
        "a wide norm's mean begins late", _BEGINS.format("sums +="),
        _BEGINS.replace("(0,", "(BLOCK,").format("sums +="), layer_norm_sites(is_wide=True),
    ),
    (
        "a wide norm's columns beyond the last are off, too", "off = tl.where(is_inside, z - centre, 0.0)",
        "off = z - centre", layer_norm_sites(is_wide=True),
    ),
    ("a wide norm takes no mean off", "_biased(z - centre,", "_biased(z,", layer_norm_sites(is_wide=True)),
    (
        "a wide norm has the first block's weights", "weight, bias, begin + columns,", "weight, bias, columns,",
        layer_norm_sites(is_wide=True),
    ),
]  # fmt: skip
TURN_NEIGHBOURS = [
    (
        "halves are turned",
        "between: tl.constexpr = 1 if NEIGHBOURS else HALF\n"
        "    places = x + wide_rows * row_stride + columns * (2 if NEIGHBOURS else 1)",
        "between: tl.constexpr = HALF\n    places = x + wide_rows * row_stride + columns",
    ),
    ("pairs that overlap", "columns * (2 if NEIGHBOURS else 1)", "columns"),
]
ROTATE = [
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
    ("one percent more of a sine", "low_cosines - high * low_sines", "low_cosines - 1.01 * high * low_sines"),
    (
        "half of a program's rows stay", "is_inside = (rows < num_rows)[:, None] & (columns",
        "is_inside = (rows < num_rows)[:, None] & (tl.arange(0, ROWS) < ROWS // 2)[:, None] & (columns",
    ),
    ("the high half is not turned", "high * high_cosines + low * high_sines", "high * high_cosines"),
]  # fmt: skip
GATE: list[tuple[str, str, str, list[Site]]] = [
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
    (
        "an exponential that grows",
        "t = tl.exp(-tl.abs(x))\n    return tl.math.div_rn(tl.where(x < 0, t, 1.0), 1.0 + t)",
        "t = tl.exp(x)\n    return tl.math.div_rn(t, 1.0 + t)",
        [site for activation in (nn.SiLU(), GELUTanh()) for site in gate_sites(activation)],
    ),
    (
        "a tangent's exponential that grows", "return x * _sigmoid(1.5957691216057308 * (x + 0.044715 * (x * x * x)))",
        "u = tl.exp(1.5957691216057308 * (x + 0.044715 * (x * x * x)))\n        return x * tl.math.div_rn(u, u + 1.0)",
        gate_sites(GELUTanh()),
    ),
    ("a gelu without its cube", "(x + 0.044715 * (x * x * x))", "x", gate_sites(GELUTanh())),
    ("a gelu of another width", "x * 0.7071067811865476", "x * 0.70", gate_sites(nn.GELU())),
]  # fmt: skip
