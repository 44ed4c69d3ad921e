"""Arguments that nobody would write, for every binding of the C++ core.

    python tests/fuzz_core.py --seconds 600 --seed 1 --trace case

A case is a call with right arguments, of which some are then made wrong. It may return or raise what a caller can read
(`CLEAR`); anything else is a finding, as is a byte written beside an output. A crash takes the process with it: the
file of ``--trace`` names the case, and ``--only N`` runs it again.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from iclperm import _core
from iclperm.errors import RequestError

CLEAR = (RequestError, TypeError, MemoryError)
"""What a wrong argument may raise: our own words, or pybind11's for what cannot be an argument at all."""
GUARD, GUARD_BYTE = 64, 0xA5
SLOW_SECONDS = 60
Rng = np.random.Generator
Array = npt.NDArray[Any]


class Case:
    """One call: right arguments by name, which `damage` may spoil, and the outputs that are watched."""

    def __init__(self, rng: Rng) -> None:
        self.rng = rng
        self._guarded: list[Array] = []

    def count(self, least: int, most: int) -> int:
        return int(self.rng.integers(least, most + 1))

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def choose(self, *values: Any) -> Any:
        return values[self.count(0, len(values) - 1)]

    def elements(self, *shape: int, kind: type) -> Array:
        """Numbers of a model's kind, sometimes wide or not finite, in memory with guards on either side."""
        size = int(np.prod(shape))
        memory = np.full(size * np.dtype(kind).itemsize + 2 * GUARD, GUARD_BYTE, np.uint8)
        self._guarded.append(memory)
        array = memory[GUARD : memory.size - GUARD].view(kind).reshape(shape)
        values = self.rng.normal(size=shape).astype(np.float32) * self.choose(1, 1, 30, 1e30)
        if self.chance(0.1) and size:
            values.flat[self.count(0, size - 1)] = self.choose(np.nan, np.inf, -np.inf)
        array[...] = values if kind is np.float32 else values.view(np.uint32) >> 16
        return array

    def is_whole(self) -> bool:
        """Whether no byte beside an output was written."""
        return all((m[:GUARD] == GUARD_BYTE).all() and (m[-GUARD:] == GUARD_BYTE).all() for m in self._guarded)

    def rows(self) -> tuple[Array, Array]:
        """Rows of token ids that share prefixes."""
        stem = self.rng.integers(0, 5, 40)
        rows = [
            np.concatenate([stem[: self.count(0, 12)], self.rng.integers(0, 4, self.count(2, 6))])
            for _ in range(self.count(1, 40))
        ]
        return np.concatenate(rows).astype(np.int32), np.cumsum([0, *map(len, rows)], dtype=np.int64)

    def requests(self) -> dict[str, Any]:
        tokens, offsets = self.rows()
        begins = [self.count(1, int(length) - 1) for length in np.diff(offsets)]
        return {"tokens": tokens, "offsets": offsets, "score_begin": np.array(begins, np.int64)}

    def tree(self) -> _core.PrefixTree:
        return _core.build_requests(**self.requests())

    def plan(self) -> dict[str, Any]:
        contexts, blocks = self.tree(), [self.tree() for _ in range(self.count(0, 3))]
        ends = np.flatnonzero(self.rng.random(contexts.num_nodes) < 0.4).tolist()
        return {
            "contexts": contexts,
            "ends": ends,
            "blocks": blocks,
            "pack_tokens": self.choose(8, 13, 100, 2**31, 2**63 - 1),
            "kv_tokens": self.choose(60, 100, 2**63 - 1),
            "unit_tokens": self.choose(1, 50, 2**63 - 1),
        }


def _threads(case: Case) -> int:
    return int(case.choose(1, 1, 2, 3))


def _kind(case: Case) -> type:
    return np.float32 if case.chance(0.6) else np.uint16


def tree_attention(case: Case) -> dict[str, Any]:
    kind, groups, heads = _kind(case), case.count(1, 3), case.count(1, 3)
    dim, slots = case.choose(1, 3, 8, 16, 40, 64), case.count(1, 300)
    lengths = [case.count(0, 5) for _ in range(case.count(1, 6))]
    row_offsets, pos, span_offsets = [case.count(0, 1)], [], [0]
    spans: list[tuple[int, int, int]] = []
    for length in lengths:
        row_offsets.append(row_offsets[-1] + length)
    num_rows = row_offsets[-1] + case.count(0, 1)
    for begin in row_offsets[:-1]:
        for source in (0, 1)[: case.count(0, 2)]:
            limit = slots if source == 0 else begin
            first = case.count(0, limit)
            spans.append((source, first, case.count(first, limit)))
        pos.append(sum(end - first for _, first, end in spans[span_offsets[-1] :]))
        span_offsets.append(len(spans))
    owned = np.arange(row_offsets[0], row_offsets[-1])
    chosen = owned[case.rng.random(owned.size) < 0.5] if case.chance(0.4) else None
    queries = num_rows if chosen is None else chosen.size + case.count(0, 2)
    table = np.array(spans, np.int64).reshape(-1, 3)
    return {
        "q": case.elements(queries, heads * groups, dim, kind=kind),
        "k_new": case.elements(num_rows, groups, dim, kind=kind),
        "v_new": case.elements(num_rows, groups, dim, kind=kind),
        "k_pool": case.elements(slots, groups, dim, kind=kind),
        "v_pool": case.elements(slots, groups, dim, kind=kind),
        "out": case.elements(queries, heads * groups, dim, kind=kind),
        "visit_row_offsets": np.array(row_offsets, np.int64),
        "visit_pos": np.array(pos, np.int64),
        "span_offsets": np.array(span_offsets, np.int64),
        "span_source": table[:, 0].astype(case.choose(np.uint8, np.int32, np.int64)),
        "span_begin": np.ascontiguousarray(table[:, 1]),
        "span_end": np.ascontiguousarray(table[:, 2]),
        "query_rows": chosen,
        "scaling": float(case.choose(1.0, 0.125, -1.0, 0.0)),
        "softcap": float(case.choose(0.0, 0.0, 5.0, 1e-45)),
        "window": case.choose(0, 0, 1, 7, 2**63 - 1),
        "sinks": case.elements(heads * groups, kind=np.float32) if case.chance(0.3) else None,
        "num_threads": _threads(case),
    }


def activate(case: Case) -> dict[str, Any]:
    kind, shape = _kind(case), (case.count(0, 70), case.count(0, 70))
    x = case.elements(*shape, kind=kind)
    return {
        "kind": case.choose("silu", "gelu_tanh", "gelu_erf"),
        "x": x,
        "out": x if case.chance(0.3) else case.elements(*shape, kind=kind),
        "factor": case.elements(*shape, kind=kind) if case.chance(0.5) else None,
        "num_threads": _threads(case),
    }


def rms_norm(case: Case) -> dict[str, Any]:
    kind, shape = _kind(case), (case.count(0, 20), case.count(0, 70))
    return {
        "x": case.elements(*shape, kind=kind),
        "weight": case.elements(shape[1], kind=kind),
        "out": case.elements(*shape, kind=kind),
        "sum": case.elements(*shape, kind=kind) if case.chance(0.5) else None,
        "eps": float(case.choose(0.0, 1e-6, 1.0)),
        "offset": float(case.choose(0.0, 1.0)),
        "num_threads": _threads(case),
    }


def layer_norm(case: Case) -> dict[str, Any]:
    given = rms_norm(case)
    del given["offset"]
    bias = case.elements(*given["weight"].shape, kind=given["weight"].dtype.type) if case.chance(0.5) else None
    return given | {"bias": bias}


def rotate(case: Case) -> dict[str, Any]:
    rows, dim = case.count(0, 20), 2 * case.count(0, 20)
    tables = (rows, 2 * case.count(0, dim // 2))
    return {
        "x": case.elements(rows, case.count(0, 5), dim, kind=_kind(case)),
        "cosines": case.elements(*tables, kind=np.float32),
        "sines": case.elements(*tables, kind=np.float32),
        "neighbours": case.chance(0.5),
        "num_threads": _threads(case),
    }


def retain_rows(case: Case) -> dict[str, Any]:
    rows, slots, shape = case.count(0, 20), case.count(0, 30), (case.count(1, 4), case.count(1, 20))
    runs = case.count(0, 6) if rows and slots else 0
    begin = case.rng.integers(0, max(rows, 1), runs)
    slot = case.rng.integers(0, max(slots, 1), runs)
    kind = _kind(case)
    return {
        "rows": case.elements(rows, *shape, kind=kind),
        "pool": case.elements(slots, *shape, kind=kind),
        "begin": begin,
        "end": np.minimum(np.minimum(begin + case.rng.integers(0, 9, runs), rows), begin + slots - slot),
        "slot": slot,
        "num_threads": _threads(case),
    }


def head_rows(case: Case) -> dict[str, Any]:
    shape, pairs = (case.count(1, 12), case.choose(1, 7, 33, 2049, 5000)), case.count(0, 20)
    return {
        "logits": case.elements(*shape, kind=_kind(case)),
        "pair_row": case.rng.integers(0, shape[0], pairs),
        "pair_id": case.rng.integers(0, shape[1], pairs),
        "softcap": float(case.choose(0.0, 30.0)),
        "num_threads": _threads(case),
    }


def thin_product(case: Case) -> dict[str, Any]:
    rows, columns, outputs = case.count(1, 70), case.choose(1, 7, 16, 33, 200), case.choose(1, 12, 95, 97, 200)
    block, kind = case.choose(1, 10, columns, 192), np.float32
    if _core.has_fused_products(bfloat16=True) and columns % 2 == block % 2 == 0 and case.chance(0.7):
        kind = np.uint16
    return {
        "x": case.elements(rows, columns, kind=kind),
        "weight": case.elements(outputs, columns, kind=kind),
        "out": case.elements(rows, outputs, kind=kind),
        "bias": case.elements(outputs, kind=kind) if case.chance(0.5) else None,
        "block": block,
        "bias_first": case.chance(0.5),
        "num_threads": _threads(case),
    }


def tile_product(case: Case) -> dict[str, Any]:
    rows, columns, outputs = case.count(0, 70), 32 * case.count(1, 4), case.count(0, 110)
    is_laid_out = case.chance(0.5)
    shape = (_core.laid_out_size(outputs, columns),) if is_laid_out else (outputs, columns)
    return {
        "x": case.elements(rows, columns, kind=np.uint16),
        "weight": case.elements(*shape, kind=np.uint16),
        "out": case.elements(rows, outputs, kind=np.uint16),
        "bias": case.elements(outputs, kind=np.uint16) if case.chance(0.5) else None,
        "is_laid_out": is_laid_out,
        "num_threads": _threads(case),
    }


def lay_out_tiles(case: Case) -> dict[str, Any]:
    columns, outputs = 32 * case.count(1, 4), case.count(0, 110)
    return {
        "weight": case.elements(outputs, columns, kind=np.uint16),
        "out": case.elements(_core.laid_out_size(outputs, columns), kind=np.uint16),
        "num_threads": _threads(case),
    }


def checksum(case: Case) -> dict[str, Any]:
    kind = np.float32 if case.chance(0.5) else np.uint16
    return {"matrix": case.elements(case.count(0, 40), case.count(0, 70), kind=kind), "num_threads": _threads(case)}


def laid_out_size(case: Case) -> dict[str, Any]:
    return {"num_outputs": case.count(0, 110), "num_columns": case.count(0, 110)}


def build_tree(case: Case) -> dict[str, Any]:
    tokens, offsets = case.rows()
    marks = [case.rng.integers(0, length + 1, case.count(0, 3)) for length in np.diff(offsets)]
    return {
        "tokens": tokens,
        "offsets": offsets,
        "mark_offsets": np.cumsum([0, *map(len, marks)], dtype=np.int64),
        "marks": np.concatenate(marks).astype(np.int32),
    }


def _unit(case: Case) -> dict[str, Any]:
    given = case.plan()
    plan = _core.Plan(**given)
    return {"self": plan, "unit": case.count(0, plan.num_units - 1)}


def _held(case: Case) -> dict[str, Any]:
    given = case.plan()
    plan = _core.Plan(**given)
    held = case.count(0, given["contexts"].num_nodes - 1)
    return {"self": plan, "unit": case.count(0, plan.num_units - 1), "held": held}


def _nothing(case: Case) -> dict[str, Any]:
    return {}


def _of_a_tree(case: Case) -> dict[str, Any]:
    return {"self": case.tree()}


def _of_a_plan(case: Case) -> dict[str, Any]:
    return {"self": _core.Plan(**case.plan())}


RECIPES: dict[str, Callable[[Case], dict[str, Any]]] = {
    "has_fused_products": _nothing,
    "isa": _nothing,
    "available_isas": _nothing,
    "thread_backend": _nothing,
    "tree_attention": tree_attention,
    "retain_rows": retain_rows,
    "activate": activate,
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "rotate": rotate,
    "head_rows": head_rows,
    "thin_product": thin_product,
    "has_tile_products": _nothing,
    "laid_out_size": laid_out_size,
    "tile_product": tile_product,
    "lay_out_tiles": lay_out_tiles,
    "checksum": checksum,
    "build_tree": build_tree,
    "build_requests": Case.requests,
    "PrefixTree.check": _of_a_tree,
    "Plan.__init__": Case.plan,
    "Plan.held_after": _unit,
    "Plan.predict": _held,
    "Plan.packs": _held,
}
"""Right arguments of every function and method; a property is read of what `OWNERS` makes."""
OWNERS = {"PrefixTree": _of_a_tree, "Plan": _of_a_plan}
WRITTEN = {
    "tree_attention": ["out"], "activate": ["out"], "rms_norm": ["out", "sum"], "layer_norm": ["out", "sum"],
    "rotate": ["x"], "retain_rows": ["pool"], "thin_product": ["out"],
    "tile_product": ["out"], "lay_out_tiles": ["out"],
}  # fmt: skip
"""The arguments that a call writes to."""
_IN_TILES = ("tile_product", "lay_out_tiles")  # refused where there are none
_WEIGHTS = {"tree_attention": 16, **dict.fromkeys(("build_tree", "build_requests", "Plan.__init__", "Plan.packs"), 8)}
_WEIGHTS |= dict.fromkeys(
    (
        "activate",
        "rms_norm",
        "layer_norm",
        "rotate",
        "head_rows",
        "retain_rows",
        "thin_product",
        "tile_product",
        "Plan.held_after",
        "Plan.predict",
    ),
    6,
)


def bindings(module: Any = _core) -> dict[str, Callable[..., Any]]:
    """Everything that the core offers, by name, as a function of its arguments; found by looking at it."""
    found: dict[str, Callable[..., Any]] = {}
    for name, thing in vars(module).items():
        if isinstance(thing, type):
            for member, value in vars(thing).items():
                if isinstance(value, property):
                    found[f"{name}.{member}"] = value.fget  # type: ignore[assignment]
                elif member == "__init__":
                    found[f"{name}.{member}"] = thing
                elif not member.startswith(("__", "_pybind11_")):
                    found[f"{name}.{member}"] = value
        elif callable(thing) and not name.startswith("_"):
            found[name] = thing
    # A class without a constructor has the __init__ of pybind11, which takes anything and says so.
    return {name: call for name, call in found.items() if name in RECIPES or name != "PrefixTree.__init__"}


def recipe(name: str) -> Callable[[Case], dict[str, Any]]:
    """Right arguments for a binding; a KeyError for one that has no recipe."""
    if name in RECIPES:
        return RECIPES[name]
    owner, _, member = name.partition(".")
    if owner in OWNERS and isinstance(vars(getattr(_core, owner)).get(member), property):
        return OWNERS[owner]
    raise KeyError(f"{name} has no recipe in {Path(__file__).name}")


def damage(case: Case, value: Any) -> Any:
    """Something else in place of an argument: now and then something near, now and then anything."""
    if isinstance(value, np.ndarray) and case.chance(0.8):
        return _another_array(case, value)
    if isinstance(value, bool | int | float) and case.chance(0.8):
        near = (value + 1, value - 1, -value, 0, -1, 1.5)
        return case.choose(*near, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, -(2**63), 2**64, np.nan, np.inf, 1e39)
    if isinstance(value, list) and case.chance(0.8):
        return case.choose([None, *value], value[::-1], value * 2, value[1:], [2**31], [-1], [1.5], None, (), [[]])
    return case.choose(
        None, 0, -1, "silu", "", "\udcff\0", b"\xff", 1.5, [], [None], {}, object(), np.zeros(0), np.zeros(()),
        np.float32(1), _core.PrefixTree.__new__(_core.PrefixTree), _core.Plan.__new__(_core.Plan), case.tree(),
        _core.Plan, np.ma.masked_array([1, 2], [0, 1]), np.zeros(3, object), "relu" * 500,
    )  # fmt: skip


def _another_array(case: Case, array: Array) -> Any:
    flat = array.reshape(-1)
    choices: list[Callable[[], Any]] = [
        lambda: np.frombuffer(b"?" + array.tobytes(), array.dtype, array.size, offset=1).reshape(array.shape),
        lambda: array.astype(array.dtype.newbyteorder()),
        lambda: array.astype(
            case.choose(np.float64, np.float16, np.int8, np.uint8, np.int32, np.int64, np.uint64, bool)
        ),
        lambda: array[::-1],
        lambda: array[::2],
        lambda: array[1:],
        lambda: array[..., ::2],
        lambda: array[..., None],
        lambda: array.T,
        lambda: array.tolist(),
        lambda: np.asfortranarray(array),
        lambda: np.resize(array, (case.count(0, 40), *array.shape[1:])),
        lambda: _endless(array) if array.ndim == 3 and array.size else array[:0],
        lambda: np.zeros((2**40, *array.shape[1:-1], 0), array.dtype),
        lambda: np.concatenate([array, array]),
        lambda: np.zeros((0, *array.shape[1:]), array.dtype),
        lambda: np.zeros((), array.dtype),
        lambda: np.zeros(array.shape, [("x", array.dtype), ("y", np.uint8)])["x"],
        lambda: np.ma.masked_array(array, array == 0),
        lambda: _read_only(array),
        lambda: _overlapping(case, array),
        lambda: _with(flat, case, array),
        lambda: _with(flat, case, array),
        lambda: _with(flat, case, array),
        lambda: case.rng.permutation(array),
    ]
    return case.choose(*choices)()


def _endless(array: Array) -> Array:
    """The first row, again and again."""
    shape, strides = (2**40, *array.shape[1:]), (0, *array.strides[1:])
    return np.lib.stride_tricks.as_strided(array, shape, strides, writeable=False)


def _overlapping(case: Case, array: Array) -> Array:
    """Of the same shape and in the same memory, with places that are one."""
    strides = [case.choose(0, step // 2, array.itemsize, step) for step in array.strides[:-1]]
    return np.lib.stride_tricks.as_strided(array, strides=(*strides, *array.strides[-1:]))


def _read_only(array: Array) -> Array:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def _with(flat: Array, case: Case, array: Array) -> Array:
    """With one number that is wrong by one, or by as much as can be."""
    changed = flat.copy()
    if changed.size:
        place = case.count(0, changed.size - 1)
        if changed.dtype.kind in "iu":
            bounds = np.iinfo(changed.dtype)
            near = int(changed[place]) + case.choose(-1, 1, 2, 100)
            changed[place] = min(bounds.max, max(bounds.min, case.choose(near, near, bounds.max, bounds.min, 0)))
        else:
            changed[place] = case.choose(np.nan, np.inf, 1e38)
    return changed.reshape(array.shape)


def call(name: str, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """A call by names; a property's getter knows none."""
    if "self" not in arguments:
        return function(**arguments)
    others = {key: value for key, value in arguments.items() if key != "self"}
    return function(arguments["self"], **others)


def run_case(seed: int, number: int, names: list[str]) -> tuple[str, str, str | None]:
    """Run one case: the binding, what came of it, and what is wrong with that, if anything."""
    case = Case(np.random.default_rng([seed, number]))
    name = case.choose(*names)
    function, arguments = bindings()[name], recipe(name)(case)
    wrong = case.rng.permutation(list(arguments))[: case.choose(0, 0, 1, 1, 1, 2, 3)]
    for key in wrong:
        arguments[key] = damage(case, arguments[key])
    try:
        result = call(name, function, arguments)
        _touch(result)
        outcome = "served"
    except CLEAR as error:
        outcome = type(error).__name__
        if not len(wrong) and (name not in _IN_TILES or _core.has_tile_products()):
            return name, outcome, f"right arguments were refused: {error}"
    except Exception as error:
        return name, type(error).__name__, f"{type(error).__name__}: {error}"
    if outcome == "served" and any(_overlaps(arguments.get(key)) for key in WRITTEN.get(name, ())):
        return name, outcome, "an output whose elements overlap was taken"
    return name, outcome, None if case.is_whole() else "a byte beside an output was written"


def _overlaps(array: Any) -> bool:
    """Whether two places of a small array are one in memory."""
    if not isinstance(array, np.ndarray) or array.size > 1 << 16:
        return False
    places = sum(np.ogrid[tuple(map(slice, array.shape))][axis] * step for axis, step in enumerate(array.strides))
    return array.size > np.unique(places).size


def _touch(result: Any) -> None:
    """Read all that came back, so that memory that is not there is found."""
    if isinstance(result, np.ndarray):
        result.tobytes()
    elif isinstance(result, tuple | list):
        for part in result:
            _touch(part)
    elif isinstance(result, dict):
        _touch(list(result.values()))
    elif isinstance(result, _core.PrefixTree):
        result.check()


def cases(seconds: float, number: int | None, only: int | None) -> Iterator[int]:
    """Numbers of cases: one, so many, or for so long."""
    if only is not None:
        yield only
        return
    end = time.monotonic() + seconds
    for case in itertools.count() if number is None else range(number):
        if number is None and time.monotonic() > end:
            return
        yield case


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, help="so many cases, however long they take")
    parser.add_argument("--only", type=int, help="the one case of this number")
    parser.add_argument("--trace", type=Path, help="a file that names the case that runs")
    chosen = parser.parse_args()
    faulthandler.enable()
    names = [name for name in bindings() for _ in range(_WEIGHTS.get(name, 1))]
    counts: Counter[tuple[str, str]] = Counter()
    findings = 0
    for number in cases(chosen.seconds, chosen.cases, chosen.only):
        if chosen.trace:
            chosen.trace.write_text(f"--seed {chosen.seed} --only {number}\n")
        faulthandler.dump_traceback_later(SLOW_SECONDS, exit=True)
        name, outcome, wrong = run_case(chosen.seed, number, names)
        counts[name, outcome] += 1
        if wrong:
            findings += 1
            print(f"--seed {chosen.seed} --only {number}: {name}: {wrong}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    for name in bindings():
        print(f"{name}:", *(f"{outcome} {count}" for (of, outcome), count in sorted(counts.items()) if of == name))
    print(f"{sum(counts.values())} cases, {findings} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
