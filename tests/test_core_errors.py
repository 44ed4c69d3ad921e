"""Every error of the C++ core: how to provoke it, and its whole text. A throw in csrc/ without a row here fails.

More than 600 lines because there is a row here for everything that the core refuses.
"""

import ctypes
import mmap
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from iclperm import _core
from iclperm.errors import RequestError

CSRC = Path(__file__).resolve().parents[1] / "csrc"
Array = npt.NDArray[Any]


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


def zeros(*shape: int, dtype: type = np.float32) -> Array:
    return np.zeros(shape, dtype)


def misaligned(*shape: int) -> Array:
    return shifted(zeros(*shape))


def shifted(array: Array) -> Array:
    """The same numbers one byte beside where a processor wants them."""
    return np.frombuffer(b"?" + array.tobytes(), array.dtype, array.size, offset=1).reshape(array.shape)


def read_only(*shape: int) -> Array:
    array = zeros(*shape)
    array.flags.writeable = False
    return array


def overlapping(*shape: int) -> Array:
    """An array to write to, the rows of which begin one element after each other."""
    memory = zeros(*shape)
    return np.lib.stride_tricks.as_strided(memory, shape, (memory.itemsize, *memory.strides[1:]))


def one_for_all(*shape: int) -> Array:
    """An array to write to, the rows of which are one."""
    memory = zeros(*shape)
    return np.lib.stride_tricks.as_strided(memory, shape, (0, *memory.strides[1:]))


def attention(**changes: object) -> None:
    """Two visits over 150 pool slots and 5 rows, two query heads to each of two key-value heads."""
    arguments: dict[str, Any] = {
        "q": zeros(5, 4, 8),
        "k_new": zeros(5, 2, 8),
        "v_new": zeros(5, 2, 8),
        "k_pool": zeros(150, 2, 8),
        "v_pool": zeros(150, 2, 8),
        "out": zeros(5, 4, 8),
        "visit_row_offsets": ints(0, 3, 5),
        "visit_pos": ints(9, 12),
        "span_offsets": ints(0, 1, 3),
        "span_source": ints(0, 0, 1),
        "span_begin": ints(0, 0, 0),
        "span_end": ints(9, 9, 3),
        "scaling": 1.0,
    }
    _core.tree_attention(**(arguments | changes))


def many_keys() -> None:
    """More keys in a visit's spans than 64 bits count: one slot stands for 2^56 of the pool."""
    pool = np.lib.stride_tricks.as_strided(zeros(1, 2, 8), (2**56, 2, 8), (0, 32, 4), writeable=False)
    attention(
        k_pool=pool,
        v_pool=pool,
        span_offsets=ints(0, 130, 132),
        span_source=ints(*[0] * 131, 1),
        span_begin=ints(*[0] * 132),
        span_end=ints(*[2**56] * 130, 9, 3),
    )


def norm(**changes: object) -> None:
    arguments: dict[str, Any] = {"x": zeros(3, 4), "weight": zeros(4), "out": zeros(3, 4), "eps": 1e-6}
    _core.rms_norm(**(arguments | changes))


def layer_norm(**changes: object) -> None:
    arguments: dict[str, Any] = {
        "x": zeros(3, 4),
        "weight": zeros(4),
        "out": zeros(3, 4),
        "bias": zeros(4),
        "eps": 1e-5,
    }
    _core.layer_norm(**(arguments | changes))


def rotate(cosines: Array, sines: Array) -> None:
    _core.rotate(zeros(3, 1, 4), cosines, sines)


def retain(**changes: object) -> None:
    arguments: dict[str, Any] = {"rows": zeros(3, 2, 4), "pool": zeros(5, 2, 4)}
    arguments |= {"begin": ints(0, 2), "end": ints(2, 3), "slot": ints(3, 0)}
    _core.retain_rows(**(arguments | changes))


def thin(**changes: object) -> None:
    arguments: dict[str, Any] = {"x": zeros(3, 4), "weight": zeros(5, 4), "out": zeros(3, 5), "block": 4}
    _core.thin_product(**(arguments | changes))


def tiles(**changes: object) -> None:
    shapes = {"x": (3, 64), "weight": (5, 64), "out": (3, 5)}
    _core.tile_product(**{name: zeros(*shape, dtype=np.uint16) for name, shape in shapes.items()} | changes)


def lay_out(rows: object, size: int = 2048) -> None:
    _core.lay_out_tiles(rows, zeros(size, dtype=np.uint16))


def without_tiles() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ICLPERM_ISA", "baseline")
        tiles()


def head(rows: tuple[int, ...], ids: tuple[int, ...], num_columns: int = 3, **options: Any) -> None:
    _core.head_rows(zeros(2, num_columns), ints(*rows), ints(*ids), **options)


def tree(tokens: list[int], offsets: list[int], mark_offsets: list[int], marks: list[int]) -> _core.PrefixTree:
    built, _ = _core.build_tree(np.array(tokens, np.int32), ints(*offsets), ints(*mark_offsets), np.int32(marks))
    return built


def rows(tokens: list[int], offsets: list[int]) -> None:
    tree(tokens, offsets, list(range(len(offsets))), [0] * (len(offsets) - 1))


def requests(tokens: list[int], offsets: list[int], score_begin: list[int]) -> _core.PrefixTree:
    return _core.build_requests(np.array(tokens, np.int32), ints(*offsets), ints(*score_begin))


def row_of_2_to_the_31() -> None:
    """A row of zeros that are never stored: one page of the system stands for all of them."""
    size = 2**31
    memory = mmap.mmap(-1, 4 * size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    _core.build_tree(np.frombuffer(memory, np.int32), ints(0, size), ints(0, 0), np.zeros(0, np.int32))


def broken(**changes: dict[int, int]) -> None:
    """Check the tree 1 -> (2, 3) after values of its frozen arrays were overwritten in memory."""
    built = tree([1, 2, 1, 3], [0, 2, 4], [0, 1, 2], [2, 2])
    assert built.parent.tolist() == [-1, 0, 1, 1]
    built.check()
    for name, values in changes.items():
        array = getattr(built, name)
        element = {4: ctypes.c_int32, 8: ctypes.c_int64}[array.itemsize]
        memory = (element * array.size).from_address(array.ctypes.data)
        for place, value in values.items():
            memory[place] = value
    built.check()


def plan(ends: tuple[int, ...] = (), **limits: int) -> _core.Plan:
    """The plan of one request of 30 tokens."""
    contexts = requests(list(range(30)), [0, 30], [29])
    return _core.Plan(contexts, list(ends), [], **({"pack_tokens": 8, "kv_tokens": 100, "unit_tokens": 1} | limits))


def unfinished(kind: type) -> Any:
    """An object whose __init__ never ran."""
    return kind.__new__(kind)


def small() -> _core.PrefixTree:
    return requests([1, 2], [0, 2], [1])


def made_of(contexts: Any, blocks: list[Any]) -> None:
    _core.Plan(contexts, [0], blocks, pack_tokens=8, kv_tokens=100, unit_tokens=1)


def isa(name: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ICLPERM_ISA", name)
        return _core.isa()


def thin_pairs(block: int = 4) -> None:
    """On instructions that do not multiply bfloat16."""
    shapes = {"x": (3, 4), "weight": (5, 4), "out": (3, 5)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ICLPERM_ISA", "baseline")
        thin(block=block, **{name: zeros(*shape, dtype=np.uint16) for name, shape in shapes.items()})


class Refusal(NamedTuple):
    message: str  # the whole of it
    provoke: Callable[[], object]
    kind: type[Exception] = RequestError


REFUSALS = {
    "bindings.cpp": [
        Refusal("query_rows has 2 axes; one is needed", lambda: attention(query_rows=ints(0, 1)[None])),
        Refusal("visit_pos has 2 axes; one is needed", lambda: attention(visit_pos=ints(9, 12)[None])),
        Refusal("span_begin has 2 axes; one is needed", lambda: attention(span_begin=ints(0, 0, 0)[None])),
        Refusal("begin has 2 axes; one is needed", lambda: retain(begin=ints(0, 2)[None])),
        Refusal(
            "pool has shape (5, 2, 3) and rows (3, 2, 4); their last axes must be equal",
            lambda: retain(pool=zeros(5, 2, 3)),
        ),
        Refusal(
            "pair_row has 2 axes; one is needed", lambda: _core.head_rows(zeros(2, 3), ints(0, 1)[None], ints(0, 1))
        ),
        Refusal(
            "tokens has 2 axes; one is needed",
            lambda: _core.build_tree(np.zeros((1, 2), np.int32), ints(0, 2), ints(0, 0), np.zeros(0, np.int32)),
        ),
        Refusal(
            "score_begin has 2 axes; one is needed",
            lambda: _core.build_requests(np.zeros(2, np.int32), ints(0, 2), ints(1)[None]),
        ),
        Refusal(
            "q is float64; float32, or bfloat16 viewed as uint16, is needed",
            lambda: attention(q=zeros(5, 4, 8, dtype=np.float64)),
        ),
        Refusal(
            "x is int32; float32, or bfloat16 viewed as uint16, is needed",
            lambda: _core.activate("silu", zeros(2, 3, dtype=np.int32), zeros(2, 3)),
        ),
        Refusal("k_new is uint16, unlike the first array", lambda: attention(k_new=zeros(5, 2, 8, dtype=np.uint16))),
        Refusal("out is uint16, unlike the first array", lambda: norm(out=zeros(3, 4, dtype=np.uint16))),
        Refusal("sines is uint16, unlike the first array", lambda: rotate(zeros(3, 4), zeros(3, 4, dtype=np.uint16))),
        Refusal("q has shape (5, 4); 3 axes are needed", lambda: attention(q=zeros(5, 4))),
        Refusal("x has shape (3,); 2 axes are needed", lambda: _core.activate("silu", zeros(3), zeros(3))),
        Refusal(
            "there is no activation 'relu'; give one of: silu gelu_tanh gelu_erf",
            lambda: _core.activate("relu", zeros(2, 3), zeros(2, 3)),
        ),
        Refusal("weight has shape (1, 4); 1 axes are needed", lambda: norm(weight=zeros(1, 4))),
        Refusal(
            "q has a stride of -128 bytes on axis 0; a multiple of its elements' size, not negative, is needed",
            lambda: attention(q=zeros(5, 4, 8)[::-1]),
        ),
        Refusal(
            "weight has a stride of 6 bytes on axis 0; a multiple of its elements' size, not negative, is needed",
            lambda: norm(weight=np.zeros(4, [("weight", np.float32), ("other", np.uint16)])["weight"]),
        ),
        Refusal(
            "q is not contiguous on its last axis (stride of 2 elements)",
            lambda: attention(q=zeros(5, 4, 16)[..., ::2]),
        ),
        Refusal("q is not aligned to its elements' size", lambda: attention(q=misaligned(5, 4, 8))),
        *(
            Refusal(f"{name} is not aligned to its elements' size", provoke)
            for name, provoke in [
                ("visit_pos", lambda: attention(visit_pos=shifted(ints(9, 12)))),
                ("span_offsets", lambda: attention(span_offsets=shifted(ints(0, 1, 3)))),
                ("span_end", lambda: attention(span_end=shifted(ints(9, 9, 3)))),
                ("query_rows", lambda: attention(query_rows=shifted(ints(0, 4)))),
                ("sinks", lambda: attention(sinks=misaligned(4))),
                ("pair_id", lambda: _core.head_rows(zeros(2, 3), ints(0, 1), shifted(ints(0, 1)))),
                ("tokens", lambda: _core.build_requests(shifted(np.zeros(2, np.int32)), ints(0, 2), ints(1))),
                ("offsets", lambda: _core.build_requests(np.zeros(2, np.int32), shifted(ints(0, 2)), ints(1))),
                ("score_begin", lambda: _core.build_requests(np.zeros(2, np.int32), ints(0, 2), shifted(ints(1)))),
                (
                    "marks",
                    lambda: _core.build_tree(
                        np.zeros(2, np.int32), ints(0, 2), ints(0, 1), shifted(np.ones(1, np.int32))
                    ),
                ),
            ]
        ),
        *(
            Refusal(f"{name} is of type {given}; a finished {wanted} is needed", provoke)
            for name, given, wanted, provoke in [
                ("contexts", "NoneType", "PrefixTree", lambda: made_of(None, [])),
                ("contexts", "int", "PrefixTree", lambda: made_of(3, [])),
                ("contexts", "PrefixTree", "PrefixTree", lambda: made_of(unfinished(_core.PrefixTree), [])),
                ("blocks[1]", "NoneType", "PrefixTree", lambda: made_of(small(), [small(), None])),
                ("self", "Plan", "Plan", lambda: unfinished(_core.Plan).num_units),
                ("self", "Plan", "Plan", lambda: unfinished(_core.Plan).held_after(0)),
                ("self", "Plan", "Plan", lambda: unfinished(_core.Plan).predict(0, 0)),
                ("self", "NoneType", "Plan", lambda: _core.Plan.unit_block.fget(None)),
                ("self", "PrefixTree", "PrefixTree", lambda: unfinished(_core.PrefixTree).tokens),
                ("self", "PrefixTree", "PrefixTree", lambda: unfinished(_core.PrefixTree).check()),
            ]
        ),
        Refusal("eps is -1.000000; it must be finite, and not negative", lambda: norm(eps=-1.0)),
        Refusal("eps is nan; it must be finite, and not negative", lambda: norm(eps=np.nan)),
        Refusal("offset is inf; it must be a finite number", lambda: norm(offset=np.inf)),
        Refusal(
            r"there is no activation '\udcff'; give one of: silu gelu_tanh gelu_erf",
            lambda: _core.activate("\udcff", zeros(2, 3), zeros(2, 3)),
        ),
        *(
            Refusal(
                f"weight has shape {shape} and x {rows.shape}; as many columns in both, and one at least, are needed",
                lambda shape=shape, rows=rows: thin(x=rows, weight=zeros(*shape)),
            )
            for shape, rows in [((5, 3), zeros(3, 4)), ((5, 0), zeros(3, 0))]
        ),
        Refusal(
            "out has shape (3, 4); x (3, 4) and weight (5, 4) ask for a row of each and a column of the other",
            lambda: thin(out=zeros(3, 4)),
        ),
        Refusal("bias has shape (4,); weight (5, 4) asks for an entry of each row", lambda: thin(bias=zeros(4))),
        Refusal("x is not of bfloat16", lambda: tiles(x=zeros(3, 64))),
        Refusal("weight is not of bfloat16", lambda: lay_out(zeros(5, 64))),
        Refusal(
            "out has shape (2, 5); x (3, 64) asks for a row of each",
            lambda: tiles(out=zeros(2, 5, dtype=np.uint16)),
        ),
        *(
            Refusal(
                f"weight has shape {shape}; x (3, 64) and out (3, 5) ask for another",
                lambda weight=weight, laid=laid: tiles(weight=weight, is_laid_out=laid),
            )
            for shape, weight, laid in (
                ("(5, 32)", zeros(5, 32, dtype=np.uint16), False),
                ("(2047,)", zeros(2047, dtype=np.uint16), True),
            )
        ),
        Refusal(
            "bias has shape (4,); out (3, 5) asks for an entry of each column",
            lambda: tiles(bias=zeros(4, dtype=np.uint16)),
        ),
        Refusal(
            "out has shape (2047,); weight (5, 64) asks for 2048 numbers",
            lambda: lay_out(zeros(5, 64, dtype=np.uint16), 2047),
        ),
        Refusal("x (3, 4), block 3: bfloat16 needs even columns, strides and block", lambda: thin_pairs(3)),
        Refusal("k_new has head dimension 8 and q 0; they must be equal", lambda: attention(q=zeros(5, 4, 0))),
        Refusal("out is read-only", lambda: attention(out=read_only(5, 4, 8))),
        Refusal("sum is read-only", lambda: norm(sum=read_only(3, 4))),
        Refusal("out is read-only", lambda: layer_norm(out=read_only(3, 4))),
        Refusal("x is read-only", lambda: _core.rotate(read_only(3, 1, 4), zeros(3, 4), zeros(3, 4))),
        *(
            Refusal(
                f"{name} has elements that overlap (strides of {strides} bytes for shape {shape}); give an array in "
                "which they lie apart",
                provoke,
            )
            for name, strides, shape, provoke in [
                ("out", "(4, 32, 4)", "(5, 4, 8)", lambda: attention(out=overlapping(5, 4, 8))),
                ("out", "(4, 4)", "(2, 3)", lambda: _core.activate("silu", zeros(2, 3), overlapping(2, 3))),
                ("out", "(4, 4)", "(3, 4)", lambda: norm(out=overlapping(3, 4))),
                ("sum", "(4, 4)", "(3, 4)", lambda: norm(sum=overlapping(3, 4))),
                ("x", "(4, 16, 4)", "(3, 1, 4)", lambda: _core.rotate(overlapping(3, 1, 4), zeros(3, 4), zeros(3, 4))),
                ("x", "(0, 16, 4)", "(3, 1, 4)", lambda: _core.rotate(one_for_all(3, 1, 4), zeros(3, 4), zeros(3, 4))),
            ]
        ),
        Refusal(
            "visit_row_offsets has shape (2,); 3 entries are needed (one per entry of visit_pos, and one more)",
            lambda: attention(visit_row_offsets=ints(0, 3)),
        ),
        Refusal(
            "span_source has shape (1, 3); 3 entries are needed (one per entry of span_begin)",
            lambda: attention(span_source=ints(0, 0, 1)[None]),
        ),
        Refusal("sinks has shape (2,); 4 entries are needed (one per head of q)", lambda: attention(sinks=zeros(2))),
        Refusal("pair_id has shape (2,); 1 entries are needed (one per entry of pair_row)", lambda: head((0,), (0, 1))),
        Refusal(
            "out has shape (3, 2) and x (2, 3); they must be equal",
            lambda: _core.activate("silu", zeros(2, 3), zeros(3, 2)),
        ),
        Refusal(
            "factor has shape (2, 2) and x (2, 3); they must be equal",
            lambda: _core.activate("silu", zeros(2, 3), zeros(2, 3), zeros(2, 2)),
        ),
        Refusal("out has shape (1, 4) and x (3, 4); they must be equal", lambda: norm(out=zeros(1, 4))),
        Refusal("sum has shape (3, 3) and x (3, 4); they must be equal", lambda: norm(sum=zeros(3, 3))),
        Refusal("weight has shape (2,); x asks for 4 entries", lambda: norm(weight=zeros(2))),
        Refusal("bias has shape (2,); x asks for 4 entries", lambda: layer_norm(bias=zeros(2))),
        *(
            Refusal(
                f"{name} has shape {shape}; x (3, 1, 4) asks for a row each of an even number of columns, at most its "
                "last axis, as many in both",
                provoke,
            )
            for name, shape, provoke in [
                ("cosines", "(2, 4)", lambda: rotate(zeros(2, 4), zeros(2, 4))),
                ("cosines", "(3, 3)", lambda: rotate(zeros(3, 3), zeros(3, 3))),
                ("cosines", "(3, 6)", lambda: rotate(zeros(3, 6), zeros(3, 6))),
                ("sines", "(3, 2)", lambda: rotate(zeros(3, 4), zeros(3, 2))),
            ]
        ),
    ],
    "isa.cpp": [
        Refusal("ICLPERM_ISA=sse9 is none of baseline, avx2, avx512, avx512_bf16, amx_bf16", lambda: isa("sse9")),
        *(
            Refusal(
                f"ICLPERM_ISA={name} cannot run on this processor or build; the best here is "
                f"{_core.available_isas()[-1]}",
                lambda name=name: isa(name),
            )
            for name in ("avx2", "avx512", "avx512_bf16", "amx_bf16")
            if name not in _core.available_isas()
        ),
    ],
    "thin_product.cpp": [
        Refusal("block is 0; give 1 at least", lambda: thin(block=0)),
        Refusal("bfloat16 is multiplied from avx512_bf16 on; this is baseline", thin_pairs),
    ],
    "tile_product.cpp": [
        Refusal("tiles are of amx_bf16 alone; this is baseline", without_tiles),
        *(
            Refusal(
                f"a matrix of {size[0]} outputs and {size[1]} columns cannot be laid out; give numbers from 0 to 2^31",
                lambda size=size: _core.laid_out_size(*size),
            )
            for size in ((-1, 32), (8, -32), (2**31 + 1, 32), (8, 2**62))
        ),
        *(
            [
                Refusal(
                    "the matrix has 40 columns; give a multiple of 32, and one at least",
                    lambda: tiles(x=zeros(3, 40, dtype=np.uint16), weight=zeros(5, 40, dtype=np.uint16)),
                )
            ]
            if "amx_bf16" in _core.available_isas()
            else []
        ),
    ],
    "parallel.cpp": [
        *(
            Refusal(f"num_threads is {number}; give a number from 1 to 4096", provoke)
            for number, provoke in [
                (0, lambda: norm(num_threads=0)),
                (-1, lambda: head((), (), num_threads=-1)),
                (4097, lambda: attention(num_threads=4097)),
                (2**31 - 1, lambda: _core.activate("silu", zeros(2, 3), zeros(2, 3), num_threads=2**31 - 1)),
            ]
        ),
    ],
    "plan.cpp": [
        Refusal("pack_tokens is 7; at least 8 are needed", lambda: plan(pack_tokens=7)),
        Refusal("unit_tokens is 0; at least 1 is needed", lambda: plan(unit_tokens=0)),
        *(
            Refusal(f"context end {end} at place {place} is no node of the tree in ascending order", provoke)
            for end, place, provoke in [
                (2, 0, lambda: plan((2,))),
                (-1, 0, lambda: plan((-1,))),
                (1, 1, lambda: plan((1, 1))),
            ]
        ),
        Refusal(
            "a KV budget of 36 tokens cannot hold the deepest path; it needs at least 37",
            lambda: plan(kv_tokens=36),
        ),
        Refusal("unit 1 is not among the plan's 1", lambda: plan().packs(1, 0)),
        Refusal("unit -1 is not among the plan's 1", lambda: plan().predict(-1, 0)),
        Refusal("unit 1 is not among the plan's 1", lambda: plan().held_after(1)),
        Refusal(f"unit {-(2**63)} is not among the plan's 1", lambda: plan().held_after(-(2**63))),
        Refusal("held node 2 is not in the context tree", lambda: plan().packs(0, 2)),
        Refusal("held node -1 is not in the context tree", lambda: plan().predict(0, -1)),
    ],
    "prefix_tree.cpp": [
        Refusal("row 0 has 2147483648 tokens; 2^31 are too many", row_of_2_to_the_31),
        Refusal("token offsets are empty; CSR needs one more offset than rows", lambda: tree([], [], [], [])),
        Refusal("request offsets are empty; CSR needs one more offset than rows", lambda: requests([], [], [])),
        Refusal("token row 0 starts at 1; offsets start at 0", lambda: rows([1, 2], [1, 2])),
        Refusal(
            "token row 1 ends at 1 before it starts at 2; offsets must not decrease",
            lambda: rows([1, 2], [0, 2, 1, 2]),
        ),
        Refusal("token row 0 ends at 1 but there are 2 tokens", lambda: rows([1, 2], [0, 1])),
        Refusal("token row 1 holds the negative token id -3", lambda: rows([1, 2, -3, 4], [0, 2, 4])),
        *(
            Refusal(f"mark offsets are not the CSR offsets of 2 marks over {count} rows", provoke)
            for count, provoke in [
                (2, lambda: tree([1, 2], [0, 1, 2], [0, 2], [1, 1])),
                (1, lambda: tree([1, 2], [0, 2], [1, 2], [1, 1])),
                (1, lambda: tree([1, 2], [0, 2], [0, 1], [1, 1])),
                (2, lambda: tree([1, 2], [0, 1, 2], [0, 3, 2], [1, 1])),
            ]
        ),
        *(
            Refusal(f"row 1 is marked at depth {mark} but has 2 tokens", provoke)
            for mark, provoke in [
                (3, lambda: tree([1, 1, 2], [0, 1, 3], [0, 1, 2], [1, 3])),
                (-1, lambda: tree([1, 1, 2], [0, 1, 3], [0, 1, 2], [1, -1])),
            ]
        ),
        Refusal("2 continuation starts for 1 requests", lambda: requests([1, 2], [0, 2], [1, 1])),
        *(
            Refusal(
                f"request row 1 of 2 tokens cannot be scored from token {begin}; both context and continuation need "
                "at least one token",
                lambda begin=begin: requests([1, 2, 1, 2], [0, 2, 4], [1, begin]),
            )
            for begin in (0, 2)
        ),
        *(
            Refusal(f"prefix tree: {message}", provoke, RuntimeError)
            for message, provoke in [
                ("node 0 is no root", lambda: broken(parent={0: 0})),
                ("node 3 has a parent that does not precede it", lambda: broken(parent={3: 3})),
                ("node 2 has an empty edge", lambda: broken(token_offsets={3: 1})),
                ("node 2 does not start where its parent ends", lambda: broken(depth={2: 2})),
                ("node 3 leaves its parent's subtree", lambda: broken(subtree_end={3: 3})),
                # As long as edges are positive, only a root that owns tokens gets this far.
                (
                    "node 2 is out of preorder",
                    lambda: broken(parent={2: 0, 3: 0}, token_offsets={0: 9}, depth={1: -9, 2: -9}, subtree_end={1: 2}),
                ),
                ("token offsets do not end at the tokens", lambda: broken(token_offsets={4: 4})),
            ]
        ),
    ],
    "retain.cpp": [
        Refusal("rows have 2 heads and the pool 3; they must be equal", lambda: retain(pool=zeros(5, 3, 4))),
        *(
            Refusal(
                f"run 1 takes rows [{begin}, {end}) of 3 to slot {slot} of 5", lambda changes=changes: retain(**changes)
            )
            for begin, end, slot, changes in (
                (-1, 3, 0, {"begin": ints(0, -1)}),
                (2, 1, 0, {"end": ints(2, 1)}),
                (2, 4, 0, {"end": ints(2, 4)}),
                (2, 3, -1, {"slot": ints(3, -1)}),
                (2, 3, 5, {"slot": ints(3, 5)}),
                (2, 3, 2**63 - 1, {"slot": ints(3, 2**63 - 1)}),
            )
        ),
    ],
    "rowwise.cpp": [
        Refusal("logits have 0 columns; at least 1 is needed", lambda: head((), (), num_columns=0)),
        Refusal("softcap is -1.000000; it must be positive, or 0 for none", lambda: head((), (), softcap=-1.0)),
        Refusal("softcap is inf; it must be positive, or 0 for none", lambda: head((), (), softcap=np.inf)),
        Refusal("pair 1 is (row 2, id 0), outside logits [2, 3]", lambda: head((0, 2), (0, 0))),
        Refusal("pair 0 is (row -1, id 0), outside logits [2, 3]", lambda: head((-1,), (0,))),
        Refusal("pair 0 is (row 0, id 3), outside logits [2, 3]", lambda: head((0,), (3,))),
        Refusal("pair 0 is (row 0, id -1), outside logits [2, 3]", lambda: head((0,), (-1,))),
    ],
    "tree_attention.cpp": [
        Refusal(
            "head_dim is 0; at least 1 is needed",
            lambda: attention(**{name: zeros(5, 2, 0) for name in ("q", "k_new", "v_new", "k_pool", "v_pool", "out")}),
        ),
        Refusal("q has 3 heads, not a multiple of the 2 key-value heads of k_new", lambda: attention(q=zeros(5, 3, 8))),
        Refusal("v_new is [4, 2, d]; k_new asks for [5, 2, d]", lambda: attention(v_new=zeros(4, 2, 8))),
        Refusal("v_pool is [3, 2, d]; k_pool asks for [150, 2, d]", lambda: attention(v_pool=zeros(3, 2, 8))),
        Refusal("out is [5, 2, d]; q asks for [5, 4, d]", lambda: attention(out=zeros(5, 2, 8))),
        Refusal(
            "k_new has 4 rows and q 5; they must be equal",
            lambda: attention(k_new=zeros(4, 2, 8), v_new=zeros(4, 2, 8)),
        ),
        Refusal(
            "k_pool has 1 heads and k_new 2; they must be equal",
            lambda: attention(k_pool=zeros(150, 1, 8), v_pool=zeros(150, 1, 8)),
        ),
        Refusal("scaling is nan; it must be finite", lambda: attention(scaling=np.nan)),
        Refusal("softcap is -1.000000; it must be positive, or 0 for none", lambda: attention(softcap=-1.0)),
        Refusal("window is -2; it must be positive, or 0 for none", lambda: attention(window=-2)),
        Refusal("visit_row_offsets falls from 4 to 3 at visit 1", lambda: attention(visit_row_offsets=ints(0, 4, 3))),
        Refusal("visit_row_offsets covers [0, 6), outside [0, 5)", lambda: attention(visit_row_offsets=ints(0, 4, 6))),
        Refusal("span_offsets covers [0, 4), outside [0, 3)", lambda: attention(span_offsets=ints(0, 1, 4))),
        Refusal(
            "visit 1: span source is 2; 0 (pool) or 1 (pack) is needed",
            lambda: attention(span_source=ints(0, 2, 1)),
        ),
        Refusal("visit 0: span [10, 9) is not within the 150 pool slots", lambda: attention(span_begin=ints(10, 0, 0))),
        Refusal("visit 1: span [0, 6) is not within the 5 pack rows", lambda: attention(span_end=ints(9, 9, 6))),
        Refusal(
            "visit 1: spans hold 12 keys but its first row is at position 13",
            lambda: attention(visit_pos=ints(9, 13)),
        ),
        Refusal(
            "query_rows has 3 entries, more than the 2 rows of q",
            lambda: attention(query_rows=ints(0, 1, 2), q=zeros(2, 4, 8), out=zeros(2, 4, 8)),
        ),
        Refusal("query_rows holds 5, a row that no visit owns", lambda: attention(query_rows=ints(0, 5))),
        Refusal("query_rows does not rise at entry 1", lambda: attention(query_rows=ints(3, 3))),
        Refusal("visit 0: spans hold 9223372036854775807 keys but its first row is at position 9", many_keys),
    ],
}

# Throws that no call from Python gets to, and why they stay.
OUT_OF_REACH = {
    "thin_product.cpp": {
        "x has 274877906944 rows, more than any memory holds": "takes a file of a terabyte that is never filled: "
        "test_thin_products.py"
    },
    "plan.cpp": {
        "the deepest path and eight more are 2147483648 tokens; positions end at 2^31 - 1": "takes trees of 2^31 "
        "tokens: over 20 GiB of memory",
    },
    "tile_product.cpp": {  # provoked above wherever there are tiles
        "the matrix has 40 columns; give a multiple of 32, and one at least": "this processor has no tiles"
    }
    if "amx_bf16" not in _core.available_isas()
    else {},
    "isa.cpp": {  # provoked above wherever there is such an instruction set
        "ICLPERM_ISA=avx512 cannot run on this processor or build; the best here is avx2": "this processor has all"
    }
    if len(_core.available_isas()) == 5
    else {},
    "prefix_tree.cpp": {
        "the tree would have more than 2^31 nodes; split the requests": "takes 2^31 marks: over 40 GiB of memory",
        "prefix tree: arrays differ in length": "a vector's length cannot be changed from outside; guards the reads "
        "that follow it in check()",
    },
}

CASES = [pytest.param(row, id=f"{file}: {row.message}") for file, refusals in REFUSALS.items() for row in refusals]


@pytest.mark.parametrize("row", CASES)
def test_a_wrong_argument_is_refused_in_these_words(row: Refusal) -> None:
    with pytest.raises(row.kind) as error:
        row.provoke()
    assert str(error.value) == row.message
    assert type(error.value) is row.kind


def test_what_the_rows_change_is_right_before_the_change() -> None:
    attention()
    attention(query_rows=ints(0, 4))
    retain()
    norm(sum=zeros(3, 4))
    layer_norm(sum=zeros(3, 4))
    rotate(zeros(3, 4), zeros(3, 4))
    head((0, 1), (0, 2))
    broken()
    assert plan((1,)).num_units == len(plan().packs(0, 0)[0]["visit_pos"]) == 1
    assert [isa(name) for name in _core.available_isas()] == _core.available_isas()


def test_a_request_error_is_a_value_error() -> None:
    assert issubclass(RequestError, ValueError)


# What makes an error of its arguments. Where one of these ends them, the text is the caller's.
RAISES = re.compile(r"\b(?:throw std::\w+|ICLPERM_REQUIRE|require|refuse|broken)\(")
PASSED_ON = ("message", "what", "__VA_ARGS__", "...")
TOKEN = re.compile(r'"[^"]*"|[^"]')
WORDS = re.compile(r'\?\s*"([^"]*)"\s*:\s*"([^"]*)"|"([^"]*)"')


def messages(source: str) -> Iterator[re.Pattern[str]]:
    """The text of every error that the source raises, with anything where it puts in a value."""
    source = re.sub(r"//.*", "", source)
    for found in RAISES.finditer(source):
        arguments, depth = "", 1
        for token in TOKEN.findall(source[found.end() :]):
            depth += {"(": 1, ")": -1}.get(token, 0)
            if depth == 0:
                break
            arguments += token
        if arguments.endswith(PASSED_ON):
            continue
        pattern, end = "", 0
        for words in WORDS.finditer(arguments):
            value_between = arguments[end : words.start()].strip()
            pattern += (".*" if value_between else "") + f"(?:{'|'.join(re.escape(w) for w in words.groups() if w)})"
            end = words.end()
        yield re.compile(pattern + (".*" if arguments[end:].strip(" )") else ""))


@pytest.mark.parametrize("file", sorted(path.name for path in CSRC.iterdir()))
def test_every_throw_has_a_row_and_every_row_a_throw(file: str) -> None:
    places = list(messages((CSRC / file).read_text()))
    told = [row.message for row in REFUSALS.get(file, [])] + list(OUT_OF_REACH.get(file, {}))
    matches = {message: [place.pattern for place in places if place.fullmatch(message)] for message in told}
    assert {message: found for message, found in matches.items() if len(found) != 1} == {}
    assert {place.pattern for place in places} - {found for (found,) in matches.values()} == set()
    assert len({place.pattern for place in places}) == len(places)


def test_a_new_throw_would_be_seen() -> None:
    source = (CSRC / "plan.cpp").read_text()
    more = source + '\nvoid f(int n) { if (n) throw std::invalid_argument("n is " + std::to_string(n) + "; why?"); }\n'
    assert [place.pattern for place in messages(more)][-1] == r"(?:n\ is\ ).*(?:;\ why\?)"
    assert len(list(messages(more))) == len(list(messages(source))) + 1 == 8
    assert not list(messages('// throw std::invalid_argument("a comment");'))


def test_every_file_of_the_table_is_there() -> None:
    assert {*REFUSALS, *OUT_OF_REACH} <= {path.name for path in CSRC.iterdir()}
