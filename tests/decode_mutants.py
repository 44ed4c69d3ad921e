"""The kernels of decoding rows, broken in one line at every shipped launch size: what the first-use check must see.

Left out are changes that make no difference to a result: items that nobody sees could run, and keys that nobody sees
yet could be read. ``TRITON_INTERPRET=1 python tests/decode_mutants.py`` tries every mutant at every size.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton_interpreter

from iclperm.engine import decodecases
from iclperm.engine.decodecases import DecodeCase
from iclperm.engine.kernels import triton_decode
from iclperm.engine.kernels.live import LiveSlots
from iclperm.engine.kernels.rule import AttentionRule
from iclperm.engine.plan import Pack
from iclperm.engine.tables import PackTables

triton_interpreter.repair()

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
PLAIN, SHORT, OPTIONS = (AttentionRule(0.1, *rest) for rest in ((0.0, 0), (0.0, 20), (30.0, 200)))
LONGEST = 700  # three chunks; what rows share of the last is a piece


@dataclass(frozen=True)
class Site:
    """The kernels at one launch size, in a model with so many heads."""

    dtype: torch.dtype
    head_size: int
    group: int
    num_kv: int

    def __str__(self) -> str:
        return f"{self.num_kv} x {self.group} x {self.head_size} {str(self.dtype).removeprefix('torch.')}"

    def is_right(self, module: ModuleType, rule: AttentionRule) -> bool:
        """What the check says of a module's kernels; asserts that they ran, in memory that held NaN before."""
        ran: list[bool] = []

        def prepare(pack: Pack, num_rows: int, backend: str, dense: int, tables: PackTables, slots: LiveSlots) -> Any:
            ran.append(pack.is_live)
            return module.DecodeAttention(tables, slots)

        more_than_a_block = 1 + triton_decode._launch(self.head_size, self.dtype).lines // self.group
        case = DecodeCase.of(
            LONGEST, self.num_kv * self.group, self.num_kv, self.head_size, self.dtype, max(8, more_than_a_block)
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decodecases, "prepare", prepare)
            patch.setattr(torch, "empty", _nan_filled)
            error = case.error(rule, DEVICE)
        assert ran == [True, True]
        return error <= TOLERANCE[self.dtype]


def _nan_filled(*shape: Any, empty: Any = torch.empty, **options: Any) -> torch.Tensor:
    memory: torch.Tensor = empty(*shape, **options)
    return memory.fill_(torch.nan) if memory.is_floating_point() else memory


# Together every launch that is shipped; dimensions that are no power of two; a group that one item does not hold.
SITES = [
    Site(torch.bfloat16, 64, 7, 1),
    Site(torch.float32, 64, 4, 2),
    Site(torch.bfloat16, 128, 4, 2),
    Site(torch.float32, 128, 7, 1),
    Site(torch.bfloat16, 256, 2, 3),
    Site(torch.float32, 256, 5, 1),
    Site(torch.float16, 80, 8, 2),
    Site(torch.float32, 192, 17, 1),
]
_LOOP = "acc, top, total, b_q, limit, slots, {}, seen_end,"
_STORED = "tl.load(marks + 2 * state{}, mask={}, other={})"
_BY_HEAD = ("keys of the first head", "values of the first head", "heads of the first group")
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
    "keys of the first head": ("k_pool += i_kv * stride_kh", "k_pool += 0 * i_kv * stride_kh", PLAIN),
    "values of the first head": ("v_pool += i_kv * stride_vh", "v_pool += 0 * i_kv * stride_vh", PLAIN),
    "heads of the first group": ("line_head = i_kv * GROUP + head", "line_head = 0 * i_kv + head", PLAIN),
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
    "chunks' top stays behind": ("top = new_top\n    acc = acc /", "top = b_top\n    acc = acc /", PLAIN),
    "merged heads are the first ones": ("head = tl.program_id(1) * HEADS +", "head = 0 * tl.program_id(1) +", PLAIN),
    "the last head is not merged": ("is_line = head < num_heads\n", "is_line = head < num_heads - 1\n", PLAIN),
    "sums that are no means": ("acc / tl.where(total == 0.0, 1.0, total)[:, None]", "acc", PLAIN),
}  # fmt: skip


def sites_of(name: str) -> list[Site]:
    """Where a mutant must be seen."""
    return [site for site in SITES if site.num_kv > 1] if name in _BY_HEAD else SITES


def mutated(name: str, folder: Path) -> ModuleType:
    """The module of the kernels with one piece changed."""
    old, new, _ = MUTANTS[name]
    source = Path(triton_decode.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1, old
    module = f"decode_mutant_{abs(hash((old, new)))}"
    path = folder / f"{module}.py"
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(module, path)
    assert spec is not None
    assert spec.loader is not None
    changed = importlib.util.module_from_spec(spec)
    sys.modules[module] = changed
    spec.loader.exec_module(changed)
    return changed


def main() -> None:
    """Every mutant at every size; what is not seen is named."""
    for site in SITES:
        for rule in (PLAIN, SHORT, OPTIONS):
            assert site.is_right(triton_decode, rule), f"the shipped kernels fail at {site}"
    seen, missed = 0, []
    for name, (_, _, rule) in MUTANTS.items():
        for site in sites_of(name):
            with tempfile.TemporaryDirectory() as folder:
                if site.is_right(mutated(name, Path(folder)), rule):
                    missed.append(f"  not seen: {name} at {site}")
                else:
                    seen += 1
        print(f"{name}: {len(missed)} missed so far", flush=True)
    print(f"{seen} of {seen + len(missed)} seen ({len(MUTANTS)} mutants, {len(SITES)} sizes)", *missed, sep="\n")


if __name__ == "__main__":
    main()
