"""The head in Triton: hidden rows times the vocabulary's weights, read off tile by tile, the logits never stored.

A program multiplies one block of rows with some tiles of the vocabulary, one after the other, and keeps of each row the
maximum, where it was first met, the sum of exponentials below it, and whether all was finite. Wanted logits are taken
from the same tiles, so that a log-probability is never positive and a greedy id has the very maximum. What the programs
of a row found is merged by a second kernel. Which tiles a program takes depends on the vocabulary alone, and no launch
on the number of rows: a row's bits do not depend on the rows beside it.

Logits stay in float32. transformers rounds those of a half-precision model to its dtype before anything reads them,
which is worth up to 0.06 nats a logit of 16 in bfloat16 and makes ties that the first index wins; against the float32
oracle ours are closer, and ``is_greedy`` can differ where transformers' logits tie after rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from iclperm.engine.kernels.launching import HEAD, launching
from iclperm.engine.kernels.stages import launched
from iclperm.engine.kernels.triton_compilation import (
    ARCHITECTURES,
    FUSION,
    TYPE_NAMES,
    Compilation,
    KernelShapes,
    architecture,
    multiplies_well,
)
from iclperm.engine.kernels.triton_math import hyperbolic_tangent
from iclperm.engine.link import Array
from iclperm.engine.tables import PackTables
from iclperm.errors import RequestError


@dataclass(frozen=True)
class _Launch:
    """Block shapes and launch options of the product."""

    rows: int
    ids: int
    inner: int
    num_warps: int
    num_stages: int


# Half precision: 64 accumulators a thread, with the registers that their reduction takes, are the most that do not
# spill (128 x 256 ids on 16 warps spill 1 KB a thread); one program a multiprocessor, so four stages. 128 rows multiply
# in the time that reading the weights takes, so fewer rows want no smaller tile. float32: no tensor cores (they would
# round to TF32), three programs a multiprocessor. Of data centres' Blackwell (100), 128 ids spill 48 bytes with a
# soft-cap, in any number of stages. Half precision without a matrix unit has no row: there the head is torch's.
_LAUNCHES = {
    torch.bfloat16: _Launch(rows=128, ids=128, inner=64, num_warps=8, num_stages=4),
    torch.float16: _Launch(rows=128, ids=128, inner=64, num_warps=8, num_stages=4),
    torch.float32: _Launch(rows=64, ids=64, inner=32, num_warps=4, num_stages=2),
}
_HALF_ON_BLACKWELL = _Launch(rows=128, ids=64, inner=64, num_warps=8, num_stages=4)
# Programs that share the vocabulary of a block of rows, at least: two for each multiprocessor of the largest devices.
LEAST_SPLITS = 264


def _launch(dtype: torch.dtype, arch: int) -> _Launch:
    return _HALF_ON_BLACKWELL if 100 <= arch < 120 and dtype != torch.float32 else _LAUNCHES[dtype]


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _read_tiles_kernel(
    hidden: tl.tensor,  # [num_rows, WIDTH]
    weight: tl.tensor,  # [NUM_IDS, WIDTH]
    bias: tl.tensor,  # [NUM_IDS]
    tile_entries: tl.tensor,  # [row blocks * NUM_TILES + 1] where each tile's entries begin
    entry_ids: tl.tensor,  # [entries] the wanted id of an entry
    maxima: tl.tensor,  # [num_rows, NUM_SPLITS], as the two that follow
    first_ids: tl.tensor,
    sums: tl.tensor,
    wanted: tl.tensor,  # [entries, ROWS] logits of an entry's id
    num_rows: tl.tensor,
    hidden_stride: tl.tensor,
    weight_stride: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    NUM_IDS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    NUM_TILES: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    TILES_A_SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    IDS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    block, split = tl.program_id(0), tl.program_id(1)
    places, columns, inner = tl.arange(0, ROWS), tl.arange(0, IDS), tl.arange(0, INNER)
    rows = block * ROWS + places
    # Rows beyond the last read the last one again, ids likewise: no mask in the product, and nothing of them is kept.
    hidden_rows = hidden + tl.minimum(rows, num_rows - 1).to(tl.int64)[:, None] * hidden_stride + inner[None, :]
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    first_id = tl.zeros([ROWS], tl.int32)
    total = tl.zeros([ROWS], tl.float32)
    broken = tl.zeros([ROWS], tl.int32)
    for tile in range(split * TILES_A_SPLIT, tl.minimum((split + 1) * TILES_A_SPLIT, NUM_TILES)):
        begin = tile * IDS
        ids = begin + columns
        held = tl.minimum(columns, NUM_IDS - 1 - begin)
        weight_rows = weight + tl.cast(begin, tl.int64) * weight_stride + held[:, None] * weight_stride + inner[None, :]
        logits = tl.zeros([ROWS, IDS], tl.float32)
        for start in range(0, WIDTH, INNER):
            if WIDTH % INNER == 0:
                left, right = tl.load(hidden_rows + start), tl.load(weight_rows + start)
            else:
                is_inside = inner[None, :] < WIDTH - start
                left = tl.load(hidden_rows + start, mask=is_inside, other=0.0)
                right = tl.load(weight_rows + start, mask=is_inside, other=0.0)
            logits = tl.dot(left, tl.trans(right), logits, input_precision="ieee")
        if HAS_BIAS:
            logits += tl.load(bias + begin + held).to(tl.float32)[None, :]
        logits *= scale
        broken = tl.maximum(broken, tl.max(tl.where(tl.abs(logits) < float("inf"), 0, 1), axis=1))
        if HAS_SOFTCAP:
            logits = softcap * hyperbolic_tangent(logits * (1.0 / softcap))

        entries = tile_entries + block * NUM_TILES + tile
        for entry in tl.range(tl.load(entries), tl.load(entries + 1), num_stages=1):
            column = tl.load(entry_ids + entry) - begin
            value = tl.sum(tl.where(columns[None, :] == column, logits, 0.0), axis=1)
            tl.store(wanted + tl.cast(entry, tl.int64) * ROWS + places, value)

        logits = tl.where(ids[None, :] < NUM_IDS, logits, float("-inf"))
        top = tl.max(logits, axis=1)
        met = tl.min(tl.where(logits == top[:, None], ids[None, :], NUM_IDS), axis=1)
        is_higher = top > maximum
        first_id = tl.where(is_higher, met, first_id)
        raised = tl.where(is_higher, top, maximum)
        total = total * tl.exp(maximum - raised) + tl.sum(tl.exp(logits - raised[:, None]), axis=1)
        maximum = raised
    part = rows.to(tl.int64) * NUM_SPLITS + split
    tl.store(maxima + part, maximum, mask=rows < num_rows)
    tl.store(first_ids + part, tl.where(broken == 0, first_id, -1), mask=rows < num_rows)
    tl.store(sums + part, total, mask=rows < num_rows)


@triton.jit  # type: ignore[untyped-decorator]
def _merge_kernel(
    maxima: tl.tensor,  # [R, NUM_SPLITS], as the two that follow
    first_ids: tl.tensor,
    sums: tl.tensor,
    maximum: tl.tensor,  # [R], as the two that follow
    log_sum: tl.tensor,
    argmax: tl.tensor,
    NUM_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,  # the next power of two
) -> None:
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    is_inside = splits < NUM_SPLITS
    parts = row * NUM_SPLITS + splits
    tops = tl.load(maxima + parts, mask=is_inside, other=float("-inf"))
    ids = tl.load(first_ids + parts, mask=is_inside, other=0)
    top = tl.max(tops, axis=0)
    total = tl.sum(tl.load(sums + parts, mask=is_inside, other=0.0) * tl.exp(tops - top), axis=0)
    first = tl.min(tl.where(tops == top, ids, 2147483647), axis=0)
    is_broken = tl.min(ids, axis=0) < 0
    tl.store(maximum + row, top)
    tl.store(log_sum + row, tl.log(total))
    tl.store(argmax + row, tl.where(is_broken, -1, first))


def read_rows(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pair_row: npt.NDArray[np.int32],
    pair_id: npt.NDArray[np.int32],
    *,
    scale: float = 1.0,
    softcap: float = 0.0,
    least_splits: int = LEAST_SPLITS,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
    """Read wanted ids off logits = scale * (hidden weight^T + bias), soft-capped first if ``softcap`` > 0.

    hidden [R, H], weight [V, H], bias [V], all of one dtype (float32, bfloat16, float16) on one device; pairs [X] of
    (row, id), in any order and as often as wanted. Returns argmax [R] (the first id of the maximum), is_finite [R] of
    the logits before the soft-cap, and the log-probability of each pair [X] in nats over the whole vocabulary. A row
    that is not finite has argmax -1 and a log-probability without meaning. At least ``least_splits`` programs share the
    vocabulary where it has as many tiles: a size for tests. Raises RequestError for pairs outside the
    logits, and for shapes, strides and dtypes that do not fit. Cost: 2 R V H operations; R x 12 bytes for each of
    some hundred programs, and 512 bytes for each wanted id of 128 rows.
    """
    _check(hidden, weight, bias)
    _check_pairs(hidden, weight, pair_row, pair_id)
    if not hidden.shape[0]:
        return np.empty(0, np.int32), np.empty(0, bool), np.empty(0, np.float32)
    entries = WantedIds.of(weight).entries(pair_row, pair_id, hidden.shape[0])
    wanted = [torch.from_numpy(each).to(hidden.device) for each in entries]
    found = found_in(hidden, weight, bias, wanted, scale, softcap, least_splits)
    return logprobs_of(pair_row, *(each.cpu().numpy() for each in found))


def choose_rows(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    scale: float = 1.0,
    softcap: float = 0.0,
    least_splits: int = LEAST_SPLITS,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """The argmax [R] of logits as of ``read_rows``, its log-probability in nats [R], and whether all are finite [R]."""
    _check(hidden, weight, bias)
    none = np.empty(0, np.int32)
    if not hidden.shape[0]:
        return none, np.empty(0, np.float32), np.empty(0, bool)
    entries = WantedIds.of(weight).entries(none, none, hidden.shape[0])
    wanted = [torch.from_numpy(each).to(hidden.device) for each in entries]
    argmax, _, log_sum, _ = found_in(hidden, weight, bias, wanted, scale, softcap, least_splits)
    greedy, logprob = argmax.cpu().numpy(), -log_sum.cpu().numpy()
    return greedy, logprob, greedy >= 0


def logprobs_of(
    pair_row: npt.NDArray[np.int32], argmax: Any, maximum: Any, log_sum: Any, logits: Any
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
    """What ``read_rows`` returns, from the arrays of ``found_in``."""
    with np.errstate(over="ignore", invalid="ignore"):  # in rows that are not finite, whose numbers mean nothing
        # The maximum is taken off first: its difference to a likely logit is exact.
        return argmax, argmax >= 0, (logits - maximum[pair_row]) - log_sum[pair_row]


def found_in(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    wanted: Sequence[torch.Tensor],
    scale: float,
    softcap: float,
    least_splits: int = LEAST_SPLITS,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Argmax (-1 where not finite), maximum and log of the sum of exponentials below it [R]; wanted logits [X].

    As ``read_rows``, with its pairs as ``wanted``, the arrays of `WantedIds` on the device, where the results stay.
    """
    tile_entries, entry_ids, pair_place = wanted
    num_rows, num_ids = hidden.shape[0], weight.shape[0]
    launch = _launch(hidden.dtype, architecture(hidden.device))
    blocks = _blocks(num_ids, launch, least_splits)
    num_splits = blocks["NUM_SPLITS"]
    variant = _variant(hidden.dtype, num_ids, hidden.shape[1], softcap > 0, bias is not None)

    def of_rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=hidden.device)

    maxima, sums = of_rows(num_rows, num_splits), of_rows(num_rows, num_splits)
    first_ids = of_rows(num_rows, num_splits, dtype=torch.int32)
    maximum, log_sum, argmax = of_rows(num_rows), of_rows(num_rows), of_rows(num_rows, dtype=torch.int32)
    logits = of_rows(max(1, entry_ids.numel()), launch.rows)

    def launch_with(num_stages: int) -> None:
        _read_tiles_kernel[(triton.cdiv(num_rows, launch.rows), num_splits)](
            hidden,
            weight,
            weight if bias is None else bias,
            tile_entries,
            entry_ids,
            maxima,
            first_ids,
            sums,
            logits,
            num_rows,
            hidden.stride(0),
            weight.stride(0),
            scale,
            softcap,
            NUM_IDS=num_ids,
            WIDTH=hidden.shape[1],
            HAS_BIAS=bias is not None,
            HAS_SOFTCAP=softcap > 0,
            **blocks,
            num_warps=launch.num_warps,
            num_stages=num_stages,
            **FUSION,
        )

    with launching(HEAD, hidden):
        launched(variant, launch.num_stages, hidden.device, launch_with)
        _merge_kernel[(num_rows,)](
            maxima,
            first_ids,
            sums,
            maximum,
            log_sum,
            argmax,
            NUM_SPLITS=num_splits,
            SPLITS=triton.next_power_of_2(num_splits),
            num_warps=1,
            **FUSION,
        )
    return argmax, maximum, log_sum, logits.view(-1)[pair_place]


def _blocks(num_ids: int, launch: _Launch, least_splits: int = LEAST_SPLITS) -> dict[str, int]:
    """Tiles of the vocabulary and how many a program takes; of the vocabulary alone."""
    num_tiles = triton.cdiv(num_ids, launch.ids)
    tiles_a_split = max(1, num_tiles // least_splits)
    return {
        "NUM_TILES": num_tiles,
        "NUM_SPLITS": triton.cdiv(num_tiles, tiles_a_split),
        "TILES_A_SPLIT": tiles_a_split,
        "ROWS": launch.rows,
        "IDS": launch.ids,
        "INNER": launch.inner,
    }


@dataclass(frozen=True)
class WantedIds:
    """Wanted pairs as entries: the distinct ids of each block of rows, in the order of the tiles that hold them.

    The product stores an entry's logits of all the block's rows; rows that share their labels share their entries.
    """

    num_ids: int
    launch: _Launch

    @classmethod
    def of(cls, weight: torch.Tensor) -> WantedIds:
        """For a head of weight [V, H]."""
        return cls(weight.shape[0], _launch(weight.dtype, architecture(weight.device)))

    def arrays(self, tables: PackTables) -> tuple[Array, ...]:
        pack = tables.pack
        return self.entries(pack.pair_row, pack.pair_id, pack.scored_rows.size)

    def entries(
        self, pair_row: npt.NDArray[np.int32], pair_id: npt.NDArray[np.int32], num_rows: int
    ) -> tuple[Array, ...]:
        """Where each tile's entries begin int32 [row blocks x tiles + 1], their ids int32 [E], pairs' places [X]."""
        num_tiles = triton.cdiv(self.num_ids, self.launch.ids)
        num_blocks = triton.cdiv(num_rows, self.launch.rows)
        block, place = np.divmod(pair_row.astype(np.int64), self.launch.rows)
        entries, entry = np.unique(block * self.num_ids + pair_id, return_inverse=True)
        tiles = entries // self.num_ids * num_tiles + entries % self.num_ids // self.launch.ids
        per_tile = np.bincount(tiles, minlength=num_blocks * num_tiles)
        tile_entries = np.concatenate([[0], np.cumsum(per_tile)]).astype(np.int32)
        return tile_entries, (entries % self.num_ids).astype(np.int32), entry * self.launch.rows + place


def _check(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if hidden.dtype not in _LAUNCHES:
        raise RequestError(f"hidden is {hidden.dtype}; the head reads float32, bfloat16 and float16")
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or not weight.numel():
        raise RequestError(f"hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}; [R, H], [V, H]?")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise RequestError(f"bias has shape {tuple(bias.shape)}; {weight.shape[0]} entries are needed")
    for name, given in (("weight", weight), ("bias", bias)):
        if given is not None and (given.dtype != hidden.dtype or given.device != hidden.device):
            raise RequestError(
                f"{name} is {given.dtype} on {given.device}, hidden {hidden.dtype} on {hidden.device}; make them equal"
            )
    for name, given in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if given is not None and given.shape[-1] > 1 and given.stride(-1) != 1:
            raise RequestError(f"the last axis of {name} has stride {given.stride(-1)}; it must be contiguous")


def _check_pairs(
    hidden: torch.Tensor, weight: torch.Tensor, pair_row: npt.NDArray[np.int32], pair_id: npt.NDArray[np.int32]
) -> None:
    outside = (pair_row < 0) | (pair_row >= hidden.shape[0]) | (pair_id < 0) | (pair_id >= weight.shape[0])
    if outside.any():
        first = int(outside.argmax())
        raise RequestError(
            f"pair {first} is (row {pair_row[first]}, id {pair_id[first]}), outside logits [{hidden.shape[0]}, "
            f"{weight.shape[0]}]"
        )


def resource_cases() -> list[Compilation]:
    """Every launch configuration at vocabularies of models in use, to be compiled without a device."""
    shapes = [(151_936, 1536, False, False), (256_000, 2304, True, False), (51_200, 2576, False, True)]
    products = [
        _product_case(arch, dtype, *shape)
        for arch in ARCHITECTURES
        for dtype in _LAUNCHES
        if multiplies_well(arch, dtype)
        for shape in shapes
    ]
    return [*products, _merge_case(LEAST_SPLITS + 32)]


def model_cases(shapes: KernelShapes, arch: int) -> list[Compilation]:
    """What a model's head launches; nothing where transformers' head runs."""
    if not shapes.num_ids or not multiplies_well(arch, shapes.dtype):
        return []
    product = _product_case(arch, shapes.dtype, shapes.num_ids, shapes.width, shapes.has_logit_softcap, shapes.has_bias)
    return [product, _merge_case(product.constexprs["NUM_SPLITS"])]


@cache
def _variant(dtype: torch.dtype, num_ids: int, width: int, has_softcap: bool, has_bias: bool) -> str:
    """What a variant of the product is called."""
    return f"head {num_ids} x {width}{' softcap' * has_softcap}{' bias' * has_bias} {TYPE_NAMES[dtype]}"


def _product_case(
    arch: int, dtype: torch.dtype, num_ids: int, width: int, has_softcap: bool, has_bias: bool
) -> Compilation:
    launch, pointer, strides = _launch(dtype, arch), "*" + TYPE_NAMES[dtype], ("hidden_stride", "weight_stride")
    constexprs = {
        "NUM_IDS": num_ids,
        "WIDTH": width,
        "HAS_BIAS": has_bias,
        "HAS_SOFTCAP": has_softcap,
        **_blocks(num_ids, launch),
    }
    return Compilation(
        name=_variant(dtype, num_ids, width, has_softcap, has_bias),
        kernel=_read_tiles_kernel,
        signature=dict.fromkeys(("hidden", "weight", "bias"), pointer)
        | dict.fromkeys(("tile_entries", "entry_ids"), "*i32")
        | {"maxima": "*fp32", "first_ids": "*i32", "sums": "*fp32", "wanted": "*fp32"}
        | dict.fromkeys(("num_rows", *strides), "i32")
        | {"scale": "fp32", "softcap": "fp32"}
        | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        multiples_of_16=strides if width % 16 == 0 else (),
        architectures=(arch,),
        options=FUSION,
    )


def _merge_case(num_splits: int) -> Compilation:
    constexprs = {"NUM_SPLITS": num_splits, "SPLITS": triton.next_power_of_2(num_splits)}
    return Compilation(
        name=f"head merge {num_splits}",
        kernel=_merge_kernel,
        signature={"maxima": "*fp32", "first_ids": "*i32", "sums": "*fp32"}
        | {"maximum": "*fp32", "log_sum": "*fp32", "argmax": "*i32"}
        | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs,
        num_warps=1,
        num_stages=3,
        options=FUSION,
    )
