"""The head, broken in one line: what `kernel_mutants` has of it."""

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

from iclperm.engine import headcases
from iclperm.engine.kernels import triton_head


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
        rows = triton_head._LAUNCHES[dtype].rows - 24  # with those of each kind, a little more than a block
        error = max(headcases.fused_head_errors(head, 0.5, softcap, rows))
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
_TOP = "top = tl.max(logits, axis=1)"
_HIGHER, _HIGHER_AND = "is_higher = top > maximum", "is_higher = (top > maximum) & "
_AMONG = 'tl.where(({})[None, :], logits, float("-inf")),'
_COLUMN = "column = tl.load(entry_ids + entry) - begin"
HEAD: list[tuple[str, str, str, list[Site]]] = [
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
    ("no likeliest id is in the first tile", _HIGHER, _HIGHER_AND + "(tile > 0)", head_sites()),
    ("no likeliest id is in a tile amid", _HIGHER, _HIGHER_AND + "(tile != 2)", head_sites()),
    ("no likeliest id is in the last tile", _HIGHER, _HIGHER_AND + "(tile < NUM_TILES - 1)", head_sites()),
    ("no likeliest id is a tile's first", _TOP, _TOP.replace("logits,", _AMONG.format("columns > 0")), head_sites()),
    ("no likeliest id is a tile's last", _TOP, _TOP.replace("logits,", _AMONG.format("columns < IDS - 1")),
     head_sites()),
    ("a scale of two thousandths more", "logits *= scale", "logits *= scale * 1.002", head_sites()),
    ("no maximum is taken off", "raised = tl.where(is_higher, top, maximum)", "raised = 0.0 * top", head_sites()),
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
MATH = [
    ("a tangent near zero is a line", "series * square * x + x, tl.where", "x, tl.where"),
    ("a tangent far below zero is above", "tl.where(x < 0, -far, far)", "far"),
    ("a tangent far from zero is one", "far = 1.0 - 2.0 /", "far = 1.0 - 0.0 /"),
]
