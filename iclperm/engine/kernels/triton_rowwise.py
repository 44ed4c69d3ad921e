"""Element-wise rows in Triton: norms, rotations, gated activations, with the roundings of the C++ kernels.

Everything is computed in float32 and rounded once. A row's bits do not depend on the rows beside it: block shapes and
launch options depend on a row's width alone. All of it is bound by memory, so each kernel reads what it needs once and
writes it once; 16 bytes a thread and access, from 512 to 8192 elements a program.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from iclperm.engine.kernels.launching import GATE, NORM, ROTATION, launching
from iclperm.engine.kernels.triton_compilation import FUSION, TYPE_NAMES, Compilation, KernelShapes, architectures_of
from iclperm.errors import RequestError

DTYPES = tuple(TYPE_NAMES)

# Widest rows that a program holds in registers: 32 elements a thread. Wider ones are read twice.
_WIDEST_BLOCK = 8192
# Narrow rows (the norm of a head) share a program until it has this many elements.
_LEAST_ELEMENTS = 2048
_GATE_COLUMNS = 1024
_ROTATED_ELEMENTS = 512  # of a head's half, times rows
_PIECE = 16  # that strides and addresses are multiples of, or not: Triton compiles for each


@triton.jit  # type: ignore[untyped-decorator]
def _sigmoid(x: tl.tensor) -> tl.tensor:
    t = tl.exp(-tl.abs(x))
    return tl.math.div_rn(tl.where(x < 0, t, 1.0), 1.0 + t)


@triton.jit  # type: ignore[untyped-decorator]
def _activated(x: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    if KIND == "silu":
        return x * _sigmoid(x)
    elif KIND == "gelu_tanh":  # (1 + tanh(u)) / 2 = sigmoid(2 u), which does not cancel
        return x * _sigmoid(1.5957691216057308 * (x + 0.044715 * (x * x * x)))
    else:
        tl.static_assert(KIND == "gelu_erf", "an activation has no branch here")
        return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))


@triton.jit  # type: ignore[untyped-decorator]
def _gate_kernel(
    x: tl.tensor,  # [num_rows, NUM_COLUMNS], as the two that follow
    factor: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    factor_stride: tl.tensor,
    out_stride: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < NUM_COLUMNS
    value = _activated(tl.load(x + row * x_stride + columns, mask=is_inside, other=0.0).to(tl.float32), KIND)
    if IS_GATED:
        value *= tl.load(factor + row * factor_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, value.to(out.dtype.element_ty), mask=is_inside)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_or_self(
    x: tl.tensor, total: tl.tensor, x_place: tl.tensor, total_place: tl.tensor, is_inside: tl.tensor, ADD: tl.constexpr
) -> tl.tensor:
    """x, or total + x rounded as it will be stored; float32."""
    z = tl.load(x + x_place, mask=is_inside, other=0.0).to(tl.float32)
    if ADD:
        z += tl.load(total + total_place, mask=is_inside, other=0.0).to(tl.float32)
        z = z.to(total.dtype.element_ty).to(tl.float32)
    return z


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(
    z: tl.tensor, scale: tl.tensor, weight: tl.tensor, columns: tl.tensor, offset: tl.tensor, WIDTH: tl.constexpr
) -> tl.tensor:
    factor = offset + tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    return z * scale[:, None] * factor[None, :]


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _rms_norm_kernel(
    x: tl.tensor,  # [num_rows / heads, heads, WIDTH], as total and out
    total: tl.tensor,
    weight: tl.tensor,  # [WIDTH]
    out: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    x_head_stride: tl.tensor,
    total_stride: tl.tensor,
    out_stride: tl.tensor,
    out_head_stride: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = (rows < num_rows)[:, None]
    group, head = (rows // NUM_HEADS).to(tl.int64)[:, None], (rows % NUM_HEADS).to(tl.int64)[:, None]
    x_rows = group * x_stride + head * x_head_stride
    out_rows = group * out_stride + head * out_head_stride
    total_rows = group * total_stride
    columns = tl.arange(0, BLOCK)
    if WIDTH <= BLOCK:
        is_inside = is_row & (columns < WIDTH)[None, :]
        z = _sum_or_self(x, total, x_rows + columns[None, :], total_rows + columns[None, :], is_inside, ADD)
        mean = tl.math.div_rn(tl.sum(z * z, axis=1), 1.0 * WIDTH)
        scale = tl.math.div_rn(1.0, tl.math.sqrt_rn(mean + eps))
        if ADD:
            tl.store(total + total_rows + columns[None, :], z.to(total.dtype.element_ty), mask=is_inside)
        normed = _scaled(z, scale, weight, columns, offset, WIDTH)
        tl.store(out + out_rows + columns[None, :], normed.to(out.dtype.element_ty), mask=is_inside)
    else:
        # The second pass adds up anew, so that no thread waits for what another has stored.
        squares = tl.zeros([ROWS, BLOCK], tl.float32)
        for begin in range(0, WIDTH, BLOCK):
            here = begin + columns[None, :]
            z = _sum_or_self(x, total, x_rows + here, total_rows + here, is_row & (here < WIDTH), ADD)
            squares += z * z
        mean = tl.math.div_rn(tl.sum(squares, axis=1), 1.0 * WIDTH)
        scale = tl.math.div_rn(1.0, tl.math.sqrt_rn(mean + eps))
        for begin in range(0, WIDTH, BLOCK):
            here = begin + columns[None, :]
            is_inside = is_row & (here < WIDTH)
            z = _sum_or_self(x, total, x_rows + here, total_rows + here, is_inside, ADD)
            if ADD:
                tl.store(total + total_rows + here, z.to(total.dtype.element_ty), mask=is_inside)
            normed = _scaled(z, scale, weight, begin + columns, offset, WIDTH)
            tl.store(out + out_rows + here, normed.to(out.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _rotate_kernel(
    x: tl.tensor,  # [num_rows, NUM_HEADS, >= 2 HALF]
    cosines: tl.tensor,  # [num_rows, 2 HALF]
    sines: tl.tensor,
    num_rows: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    cosine_stride: tl.tensor,
    sine_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    is_inside = (rows < num_rows)[:, None] & (columns < HALF)
    wide_rows = rows.to(tl.int64)[:, None]
    cosine_places, sine_places = wide_rows * cosine_stride + columns, wide_rows * sine_stride + columns
    low_cosines = tl.load(cosines + cosine_places, mask=is_inside, other=0.0).to(tl.float32)
    high_cosines = tl.load(cosines + cosine_places + HALF, mask=is_inside, other=0.0).to(tl.float32)
    low_sines = tl.load(sines + sine_places, mask=is_inside, other=0.0).to(tl.float32)
    high_sines = tl.load(sines + sine_places + HALF, mask=is_inside, other=0.0).to(tl.float32)
    between: tl.constexpr = 1 if NEIGHBOURS else HALF
    places = x + wide_rows * row_stride + columns * (2 if NEIGHBOURS else 1)
    for head in range(NUM_HEADS):
        here = places + tl.cast(head, tl.int64) * head_stride
        low = tl.load(here, mask=is_inside, other=0.0).to(tl.float32)
        high = tl.load(here + between, mask=is_inside, other=0.0).to(tl.float32)
        tl.store(here, (low * low_cosines - high * low_sines).to(x.dtype.element_ty), mask=is_inside)
        tl.store(here + between, (high * high_cosines + low * high_sines).to(x.dtype.element_ty), mask=is_inside)


def gate(kind: str, x: torch.Tensor, factor: torch.Tensor | None, out: torch.Tensor) -> None:
    """out = activation(x) * factor for x, factor and out [M, N]; ``kind`` is silu, gelu_tanh or gelu_erf.

    Without a factor activation(x). Columns must be contiguous; ``out`` may be x or factor. Raises RequestError for what
    does not fit.
    """
    tensors = {"x": x, **({} if factor is None else {"factor": factor}), "out": out}
    _check(tensors)
    _check_axes("x", x, 2)
    for name, given in tensors.items():
        _check_shape(name, given, x.shape)
    if not x.numel():
        return
    num_rows, num_columns = x.shape
    with launching(GATE, x):
        _gate_kernel[(num_rows, triton.cdiv(num_columns, _GATE_COLUMNS))](
            x,
            x if factor is None else factor,
            out,
            x.stride(0),
            0 if factor is None else factor.stride(0),
            out.stride(0),
            NUM_COLUMNS=num_columns,
            KIND=kind,
            IS_GATED=factor is not None,
            BLOCK=_GATE_COLUMNS,
            num_warps=4,
            **FUSION,
        )


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
) -> None:
    """out = z / sqrt(mean(z^2) + eps) * (offset + weight) over the last axis of z = x, or of z = total + x.

    x and out [M, heads, H] or [M, H], weight [H]; columns must be contiguous. ``total`` [M, H] is rounded and left
    there before its norm is taken. x may be out. Raises RequestError for what does not fit. Rows that are not read as
    rows one after another would be are copied first, and back.
    """
    tensors = {"x": x, "out": out, "weight": weight, **({} if total is None else {"total": total})}
    _check(tensors)
    for name, given in tensors.items():
        _check_shape(name, given, x.shape[-1:] if name == "weight" else x.shape)
    _check_axes("x", x, *([2] if total is not None else [2, 3]))
    if not x.numel():
        return
    if not (_adds_up_evenly(x) and _adds_up_evenly(out) and (total is None or _adds_up_evenly(total))):
        _on_copies(lambda x, *changed: rms_norm(x, weight, *changed, eps=eps, offset=offset), x, out, total)
        return
    # Rows that lie evenly are one head each, whatever their axes: a kernel is compiled for each number of heads.
    are_even = x.is_contiguous() and out.is_contiguous()
    read, written = (y.view(-1, 1, y.shape[-1]) if are_even or y.ndim == 2 else y for y in (x, out))
    width, num_rows = x.shape[-1], read.shape[0] * read.shape[1]
    blocks = _norm_blocks(width)
    with launching(NORM, x):
        _rms_norm_kernel[(triton.cdiv(num_rows, blocks["ROWS"]),)](
            read,
            read if total is None else total,
            weight,
            written,
            num_rows,
            read.stride(0),
            read.stride(1),
            0 if total is None else total.stride(0),
            written.stride(0),
            written.stride(1),
            eps,
            offset,
            NUM_HEADS=read.shape[1],
            WIDTH=width,
            ADD=total is not None,
            **blocks,
            num_warps=_warps(**blocks),
            **FUSION,
        )


def _on_copies(norm: Callable[..., None], x: torch.Tensor, out: torch.Tensor, total: torch.Tensor | None) -> None:
    """A norm of rows one after another: x, out and total in memory of their own, and copied back."""
    # A single row is contiguous whatever its stride: only new memory surely has a row's own.
    changed = [out] if total is None else [out, total]
    given, *copies = (y.new_empty(y.shape).copy_(y) for y in (x, *changed))
    norm(given, *copies)
    for y, copy in zip(changed, copies, strict=True):
        y.copy_(copy)


def _adds_up_evenly(x: torch.Tensor) -> bool:
    """Whether rows are read as they would be if they lay one after another: a compiled kernel reads what begins at
    multiples of 16 in wider pieces, and adds up the squares of a row in another order."""
    strides = x.stride()[:2] if x.ndim == 3 and x.shape[1] > 1 else x.stride()[:1]
    is_wide = all(place % _PIECE == 0 for place in (*strides, x.data_ptr()))
    return is_wide == (x.shape[-1] % _PIECE == 0)


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, *, neighbours: bool = False) -> None:
    """Turn columns i and i + r / 2 of each head of x [M, heads, d] in place, by tables [M, r]; those from r on stay.

    Or columns 2 i and 2 i + 1 where ``neighbours`` are turned, by columns i and i + r / 2 of the tables. These may be
    of another dtype than x; columns must be contiguous. Raises RequestError for what does not fit.
    """
    _check({"x": x})
    _check({"cosines": cosines, "sines": sines})
    _check_axes("x", x, 3)
    _check_axes("cosines", cosines, 2)
    num_rows, num_heads, head_dim = x.shape
    turned = cosines.shape[1]
    if cosines.shape[0] != num_rows or turned % 2 or turned > head_dim:
        raise RequestError(
            f"cosines has shape {tuple(cosines.shape)}; x {tuple(x.shape)} asks for {num_rows} rows of an even number "
            f"of columns, at most {head_dim}"
        )
    _check_shape("sines", sines, cosines.shape)
    if cosines.device != x.device:
        raise RequestError(f"cosines is on {cosines.device} and x on {x.device}; move one of them")
    if not x.numel() or not turned:
        return
    blocks = _rotate_blocks(turned // 2)
    with launching(ROTATION, x):
        _rotate_kernel[(triton.cdiv(num_rows, blocks["ROWS"]),)](
            x,
            cosines,
            sines,
            num_rows,
            x.stride(0),
            x.stride(1),
            cosines.stride(0),
            sines.stride(0),
            NUM_HEADS=num_heads,
            HALF=turned // 2,
            NEIGHBOURS=neighbours,
            **blocks,
            num_warps=4,
            **FUSION,
        )


def _norm_blocks(width: int) -> dict[str, int]:
    block = min(_WIDEST_BLOCK, triton.next_power_of_2(width))
    return {"ROWS": max(1, _LEAST_ELEMENTS // block), "BLOCK": block}


def _rotate_blocks(half: int) -> dict[str, int]:
    block = triton.next_power_of_2(half)
    return {"ROWS": max(1, _ROTATED_ELEMENTS // block), "BLOCK": block}


def _warps(ROWS: int, BLOCK: int) -> int:
    """Warps of a norm's program: 16 elements a thread, and up to 32 in the widest."""
    return max(4, min(8, ROWS * BLOCK // 512))


def _check(tensors: dict[str, torch.Tensor]) -> None:
    """Raise RequestError naming the first tensor of another dtype or device than the first, or of strided columns."""
    first_name, first = next(iter(tensors.items()))
    if first.dtype not in DTYPES:
        raise RequestError(f"{first_name} is {first.dtype}; float32, bfloat16 or float16 is needed")
    for name, given in tensors.items():
        if given.dtype != first.dtype or given.device != first.device:
            raise RequestError(
                f"{name} is {given.dtype} on {given.device}, {first_name} {first.dtype} on {first.device}; "
                "make them equal"
            )
        if given.shape[-1] > 1 and given.stride(-1) != 1:
            raise RequestError(f"the last axis of {name} has stride {given.stride(-1)}; it must be contiguous")


def _check_axes(name: str, given: torch.Tensor, *num_axes: int) -> None:
    if given.ndim not in num_axes:
        raise RequestError(f"{name} has shape {tuple(given.shape)}; {' or '.join(map(str, num_axes))} axes are needed")


def _check_shape(name: str, given: torch.Tensor, expected: torch.Size) -> None:
    if given.shape != expected:
        raise RequestError(f"{name} has shape {tuple(given.shape)} and must have {tuple(expected)}")


def resource_cases() -> list[Compilation]:
    """Every launch configuration at widths of models in use, to be compiled without a device."""
    norms = [(1536, False), (1536, True), (4096, True), (8192, True), (12288, True)]
    rotations = [(14, 32, False), (12, 64, False), (8, 128, False), (32, 40, False), (32, 32, True)]
    return [
        case
        for dtype in DTYPES
        for case in (
            *(_gate_case(dtype, kind, 8960, True) for kind in ("silu", "gelu_tanh", "gelu_erf")),
            _gate_case(dtype, "gelu_tanh", 12288, False),
            *(_norm_case(dtype, 1, *norm) for norm in norms),
            _norm_case(dtype, 16, 128, False),
            *(_rotate_case(dtype, *rotation) for rotation in rotations),
        )
    ]


def model_cases(shapes: KernelShapes) -> list[Compilation]:
    """What a model's layers launch, as it is compiled for them."""
    return [
        *(_gate_case(shapes.dtype, *gate) for gate in sorted(shapes.gates)),
        *(_norm_case(shapes.dtype, 1, *norm) for norm in sorted(shapes.norms)),
        *(_rotate_case(shapes.dtype, *rotation) for rotation in sorted(shapes.rotations)),
    ]


def _gate_case(dtype: torch.dtype, kind: str, num_columns: int, is_gated: bool) -> Compilation:
    strides = ("x_stride", "factor_stride", "out_stride")
    return Compilation(
        name=f"{kind}{'' if is_gated else ' alone'} {TYPE_NAMES[dtype]}",
        kernel=_gate_kernel,
        signature=dict.fromkeys(("x", "factor", "out"), "*" + TYPE_NAMES[dtype])
        | dict.fromkeys(strides, "i32")
        | dict.fromkeys(("NUM_COLUMNS", "KIND", "IS_GATED", "BLOCK"), "constexpr"),
        constexprs={"NUM_COLUMNS": num_columns, "BLOCK": _GATE_COLUMNS, "KIND": kind, "IS_GATED": is_gated},
        num_warps=4,
        num_stages=3,
        multiples_of_16=strides if num_columns % 16 == 0 else (),
        architectures=architectures_of(dtype),
        options=FUSION,
    )


def _norm_case(dtype: torch.dtype, num_heads: int, width: int, adds: bool) -> Compilation:
    strides = ("x_stride", "x_head_stride", "total_stride", "out_stride", "out_head_stride")
    constexprs = {"NUM_HEADS": num_heads, "WIDTH": width, "ADD": adds, **_norm_blocks(width)}
    return Compilation(
        name=f"rms_norm {num_heads} x {width}{' of sum' * adds} {TYPE_NAMES[dtype]}",
        kernel=_rms_norm_kernel,
        signature=dict.fromkeys(("x", "total", "weight", "out"), "*" + TYPE_NAMES[dtype])
        | dict.fromkeys(("num_rows", *strides), "i32")
        | dict.fromkeys(("eps", "offset"), "fp32")
        | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs,
        num_warps=_warps(**_norm_blocks(width)),
        num_stages=3,
        multiples_of_16=strides if width % 16 == 0 else (),
        architectures=architectures_of(dtype),
        options=FUSION,
    )


def _rotate_case(dtype: torch.dtype, num_heads: int, half: int, neighbours: bool) -> Compilation:
    strides = ("row_stride", "head_stride", "cosine_stride", "sine_stride")
    constexprs = {"NUM_HEADS": num_heads, "HALF": half, "NEIGHBOURS": neighbours, **_rotate_blocks(half)}
    return Compilation(
        name=f"rotate{' neighbours' * neighbours} {num_heads} x {2 * half} {TYPE_NAMES[dtype]}",
        kernel=_rotate_kernel,
        signature=dict.fromkeys(("x", "cosines", "sines"), "*" + TYPE_NAMES[dtype])
        | dict.fromkeys(("num_rows", *strides), "i32")
        | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs,
        num_warps=4,
        num_stages=3,
        multiples_of_16=strides,
        architectures=architectures_of(dtype),
        options=FUSION,
    )
