"""Kernels that are broken in one line, at every shipped launch size: what the first-use check must see.

A mutant is the shipped source with one piece changed. Left out are changes that make no difference to what our layers
ask for (heads of a norm that do not lie evenly), and those that leave an array's memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import decode_mutants
import pytest
import torch
from devices import DEVICE
from head_mutants import HEAD, MANY, MATH, head_sites
from mutants import TOLERANCE, Mutant, Site
from rowwise_mutants import (
    GATE,
    LAYER_NORM,
    NORM,
    ROTATE,
    TURN_NEIGHBOURS,
    gate_sites,
    layer_norm_sites,
    norm_sites,
    rotation_sites,
)
from torch import nn
from transformers.activations import GELUTanh

from iclperm.engine import kernelcases
from iclperm.engine.kernels import (
    triton_attention,
    triton_decode,
    triton_head,
    triton_layer_norm,
    triton_math,
    triton_rowwise,
)
from iclperm.engine.kernels.rule import AttentionRule
from iclperm.engine.plan import Pack

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
HALF_SHAPES = [shape for shape in SHAPES if shape[1] != torch.float32]
WIDE_GROUP = (80, torch.float32, 192, 17)
MANY_ROWS = (86, 20)  # more than a block of any shape, and fewer than the check has: the interpreter is slow
PLAIN, SHORT, OPTIONS = (AttentionRule(0.1, *rest) for rest in ((0.0, 0), (30.0, 70), (30.0, 200)))


def attention_error(
    shape: Shape,
    rule: AttentionRule,
    num_kv: int,
    longest: int,
    many_rows: tuple[int, int],
    module: ModuleType,
    *,
    has_sinks: bool = False,
) -> float:
    """Of the module's kernel in the tiles of a shape; asserts that this kernel ran."""
    arch, dtype, head_size, group = shape
    launched: list[int] = []

    def prepare(pack: Pack, *_: object) -> Any:
        launched.append(arch)
        return module.TritonAttention(pack, arch)

    case = kernelcases.AttentionCase.of(longest, num_kv * group, num_kv, head_size, dtype, many_rows)
    case = case.with_sinks() if has_sinks else case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernelcases, "prepare", prepare)
        error = case.error(rule, "triton", DEVICE)
    assert launched == [arch]
    return error


def attention_sites(
    rule: AttentionRule, num_kv: int = 1, shapes: list[Shape] = SHAPES, *, has_sinks: bool = False
) -> list[Site]:
    return [
        Site(
            f"{shape}{', sinks' * has_sinks}",
            partial(attention_error, shape, rule, num_kv, 300, MANY_ROWS, has_sinks=has_sinks),
            TOLERANCE["tree attention"][shape[1]],
        )
        for shape in shapes
    ]


def wide_group_site() -> Site:
    """Of two wide groups, on short paths: every row of theirs is a block."""
    tolerance = TOLERANCE["tree attention"][WIDE_GROUP[1]]
    return Site(f"{WIDE_GROUP}", partial(attention_error, WIDE_GROUP, PLAIN, 2, 20, (9, 3)), tolerance)


def decode_sites(rule: AttentionRule, least_kv: int = 1, least_rows: int = 1, *, has_sinks: bool = False) -> list[Site]:
    """Of models with at least so many heads of keys and values, where an item may hold at least so many rows."""
    return [
        Site(
            f"{shape}{', sinks' * has_sinks}",
            partial(decode_mutants.decode_error, shape, rule, DEVICE, has_sinks=has_sinks),
            TOLERANCE["decode attention"][shape.dtype],
        )
        for shape in decode_mutants.SHAPES
        if shape.num_kv >= least_kv and shape.most_rows >= least_rows
    ]


_LOOP = "acc, top, total, b_q, limit, row, entries, {}, {}, keys, k, v, k_pool, v_pool,"
_WEIGHT = "(score - origin[:, None]) * to_log2"
_NO_TOP = 'top = tl.full([LINES], float("-inf"), dtype=tl.float32)'
_ORIGIN = 'origin = tl.where(new_top == float("-inf"), 0.0, new_top)'
_SCORE = 'score = tl.dot(q, tl.trans(b_k), input_precision="ieee")'
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
    ("the total is not rescaled", "total = total * scale + tl.sum", "total = total + tl.sum", PLAIN),
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
    ("a row sees the visit before it", "(row < row_end), limit", "(row <= row_end), limit", PLAIN),
    ("scores of one percent more", _WEIGHT, _WEIGHT.replace("to_log2", "to_log2 * 1.01"), PLAIN),
    ("scores of one percent more within a window", _WEIGHT, _WEIGHT.replace("to_log2", "to_log2 * 1.01"), SHORT),
    ("a soft-cap of two percent less", "tangent(score * to_unit)", "tangent(score * to_unit * 1.02)", OPTIONS),
    ("the softmax's top begins at zero", _NO_TOP, _NO_TOP.replace('float("-inf")', "0.0"), PLAIN),
    ("no top is taken off", _ORIGIN, "origin = 0.0 * tl.maximum(new_top, 0.0)", PLAIN),
    ("rows of no visit keep what they had", "tl.where(total == 0.0, 1.0, total)", "total", PLAIN),
]  # fmt: skip
# What half precision must not round.
_ROUNDED = [
    ("scores are rounded", _SCORE, _SCORE + ".to(q.dtype).to(tl.float32)"),
    (
        "sums are rounded after each tile",
        "b_v, acc * scale[:, None]",
        "b_v, (acc * scale[:, None]).to(b_v.dtype).to(tl.float32)",
    ),
]
# What takes three key-value heads, and two, to be seen.
_AMONG_HEADS = [
    (
        "a head amid others is zero",
        "acc = acc / tl.where(total",
        "acc = tl.where(i_kv == 1, 0.0, acc) / tl.where(total",
    ),
    ("a head amid others has the first one's values", "v += i_kv * stride_vh", "v += (i_kv // 2) * 2 * stride_vh"),
]
_HEADS = [
    ("every head has the first one's keys", "k += i_kv * stride_kh", "k += 0 * i_kv * stride_kh"),
    ("every head has the first one's values", "v += i_kv * stride_vh", "v += 0 * i_kv * stride_vh"),
    ("every head has the first one's keys of the pool", "k_pool += i_kv * stride_kph", "k_pool += 0 * stride_kph"),
    ("every head has the first one's values of the pool", "v_pool += i_kv * stride_vph", "v_pool += 0 * stride_vph"),
    ("queries of the first group", "line_head = i_kv * GROUP + head", "line_head = 0 * i_kv * GROUP + head"),
]
# Of heads with sinks, the first two or more of them.
_SINK = "tl.load(sinks + line_head, mask=is_line, other=0.0)"
_SINKS = [
    ("sinks are left out", "    if HAS_SINKS:\n", "    if False:\n", PLAIN),
    ("sinks are left out within a window", "    if HAS_SINKS:\n", "    if HAS_SINKS and not HAS_WINDOW:\n", SHORT),
    ("every head has the first one's sink", _SINK, _SINK.replace("line_head", "0 * line_head"), PLAIN),
    ("sinks are those of the group", _SINK, _SINK.replace("line_head", "head"), PLAIN),
    ("sinks are scaled as scores are", _SINK, _SINK + " * (to_log2 * 0.6931471805599453)", PLAIN),
    ("sinks are taken for scores before their scale", "highest = top * (to_log2 * 0.6931471805599453)", "highest = top",
     PLAIN),
    ("sinks are capped", _SINK, "to_unit * " + _SINK, OPTIONS),
    ("what keys give is not rescaled by a sink", "return acc * scale[:, None], total", "return acc, total", PLAIN),
    ("the total is not rescaled by a sink", "total = total * scale + tl.exp2((sink", "total = total + tl.exp2((sink",
     PLAIN),
    ("sinks of one percent more", _SINK, "1.01 * " + _SINK, PLAIN),
]  # fmt: skip
# What takes a group of more heads than a block has lines.
_PARTS = [
    ("only the first heads of a wide group", "i_part = tl.program_id(1) % parts", "i_part = 0 * tl.program_id(1)"),
]


MUTANTS = {
    "tree attention": [
        *(Mutant(name, triton_attention, old, new, attention_sites(rule)) for name, old, new, rule in _ATTENTION),
        *(Mutant(name, triton_attention, old, new, attention_sites(PLAIN, num_kv=2)) for name, old, new in _HEADS),
        *(
            Mutant(name, triton_attention, old, new, attention_sites(PLAIN, num_kv=3, shapes=SHAPES[::4]))
            for name, old, new in _AMONG_HEADS
        ),
        *(
            Mutant(name, triton_attention, old, new, attention_sites(PLAIN, shapes=HALF_SHAPES))
            for name, old, new in _ROUNDED
        ),
        *(Mutant(name, triton_attention, old, new, [wide_group_site()]) for name, old, new in _PARTS),
        *(
            Mutant(name, triton_attention, old, new, attention_sites(rule, 2, SHAPES[:10:3], has_sinks=True))
            for name, old, new, rule in _SINKS
        ),
    ],
    "decode attention": [
        Mutant(name, triton_decode, old, new, decode_sites(rule, least_kv, 1 + (name in decode_mutants.AMONG_ROWS)))
        for table, least_kv in (
            (decode_mutants.MUTANTS, 1),
            (decode_mutants.BY_HEAD, 2),
            (decode_mutants.AMONG_HEADS, 3),
        )
        for name, (old, new, rule) in table.items()
    ]
    + [
        Mutant(name, triton_decode, old, new, decode_sites(rule, 2, has_sinks=True))
        for name, (old, new, rule) in decode_mutants.SINKS.items()
    ],
    "RMS norm": [Mutant(name, triton_rowwise, old, new, sites) for name, old, new, sites in NORM],
    "layer norm": [Mutant(name, triton_layer_norm, old, new, sites) for name, old, new, sites in LAYER_NORM],
    "rotation": [
        Mutant(name, triton_rowwise, old, new, rotation_sites(neighbours=neighbours))
        for table, neighbours in ((ROTATE, False), (TURN_NEIGHBOURS, True))
        for name, old, new in table
    ],
    "gated activation": [Mutant(name, triton_rowwise, old, new, sites) for name, old, new, sites in GATE],
    "head": [
        *(Mutant(name, triton_head, old, new, sites) for name, old, new, sites in HEAD),
        *(Mutant(name, triton_math, old, new, head_sites(softcap=9.0)) for name, old, new in MATH),
    ],
}
SHIPPED: dict[str, list[tuple[ModuleType, Site]]] = {
    "tree attention": [
        (triton_attention, site)
        for sites in (
            *(attention_sites(rule) for rule in (PLAIN, SHORT, OPTIONS)),
            [wide_group_site()],
            *(attention_sites(rule, 2, SHAPES[:10:3], has_sinks=True) for rule in (PLAIN, SHORT, OPTIONS)),
        )
        for site in sites
    ],
    "decode attention": [
        (triton_decode, site)
        for rule in (decode_mutants.PLAIN, decode_mutants.SHORT, decode_mutants.OPTIONS)
        for has_sinks in (False, True)
        for site in decode_sites(rule, has_sinks=has_sinks)
    ],
    "RMS norm": [
        (triton_rowwise, site)
        for of_sum in (False, True)
        for is_wide in (False, True)
        for site in norm_sites(of_sum=of_sum, is_wide=is_wide)
    ],
    "layer norm": [
        (triton_layer_norm, site)
        for of_sum, is_wide, has_bias in itertools.product((False, True), repeat=3)
        for site in layer_norm_sites(of_sum=of_sum, is_wide=is_wide, has_bias=has_bias)
    ],
    "rotation": [
        (triton_rowwise, site) for neighbours in (False, True) for site in rotation_sites(neighbours=neighbours)
    ],
    "gated activation": [
        *(
            (triton_rowwise, site)
            for activation in (nn.SiLU(), GELUTanh(), nn.GELU())
            for site in gate_sites(activation)
        ),
        *((triton_rowwise, site) for site in gate_sites(GELUTanh(), is_packed=(False,), is_gated=False)),
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
