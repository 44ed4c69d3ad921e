"""Layer norms in Triton: as the norms of `iclperm.engine.kernels.triton_rowwise`, with the mean taken off."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from iclperm.engine.kernels.launching import LAYER_NORM, launching
from iclperm.engine.kernels.triton_compilation import FUSION, TYPE_NAMES, Compilation, KernelShapes, architectures_of
from iclperm.engine.kernels.triton_rowwise import (
    DTYPES,
    _adds_up_evenly,
    _check,
    _check_axes,
    _check_shape,
    _norm_blocks,
    _on_copies,
    _sum_or_self,
    _warps,
)


@triton.jit  # type: ignore[untyped-decorator]
def _biased(
    off: tl.tensor,
    scale: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    columns: tl.tensor,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
) -> tl.tensor:
    out = off * scale[:, None] * tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        out += tl.load(bias + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)[None, :]
    return out


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _layer_norm_kernel(
    x: tl.tensor,  # [num_rows, WIDTH], as total and out
    total: tl.tensor,
    weight: tl.tensor,  # [WIDTH], as bias
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    total_stride: tl.tensor,
    out_stride: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = (rows < num_rows)[:, None]
    row = rows.to(tl.int64)[:, None]
    x_rows, total_rows, out_rows = row * x_stride, row * total_stride, row * out_stride
    columns = tl.arange(0, BLOCK)
    if WIDTH <= BLOCK:
        here = columns[None, :]
        is_inside = is_row & (here < WIDTH)
        z = _sum_or_self(x, total, x_rows + here, total_rows + here, is_inside, ADD)
        off = tl.where(is_inside, z - tl.math.div_rn(tl.sum(z, axis=1), 1.0 * WIDTH)[:, None], 0.0)
        mean = tl.math.div_rn(tl.sum(off * off, axis=1), 1.0 * WIDTH)
        scale = tl.math.div_rn(1.0, tl.math.sqrt_rn(mean + eps))
        if ADD:
            tl.store(total + total_rows + here, z.to(total.dtype.element_ty), mask=is_inside)
        normed = _biased(off, scale, weight, bias, columns, WIDTH, BIAS)
        tl.store(out + out_rows + here, normed.to(out.dtype.element_ty), mask=is_inside)
    else:
        # Every pass adds up anew, so that no thread waits for what another has stored.
        sums = tl.zeros([ROWS, BLOCK], tl.float32)
        for begin in range(0, WIDTH, BLOCK):
            here = begin + columns[None, :]
            sums += _sum_or_self(x, total, x_rows + here, total_rows + here, is_row & (here < WIDTH), ADD)
        centre = tl.math.div_rn(tl.sum(sums, axis=1), 1.0 * WIDTH)[:, None]
        squares = tl.zeros([ROWS, BLOCK], tl.float32)
        for begin in range(0, WIDTH, BLOCK):
            here = begin + columns[None, :]
            is_inside = is_row & (here < WIDTH)
            z = _sum_or_self(x, total, x_rows + here, total_rows + here, is_inside, ADD)
            off = tl.where(is_inside, z - centre, 0.0)
            squares += off * off
        mean = tl.math.div_rn(tl.sum(squares, axis=1), 1.0 * WIDTH)
        scale = tl.math.div_rn(1.0, tl.math.sqrt_rn(mean + eps))
        for begin in range(0, WIDTH, BLOCK):
            here = begin + columns[None, :]
            is_inside = is_row & (here < WIDTH)
            z = _sum_or_self(x, total, x_rows + here, total_rows + here, is_inside, ADD)
            if ADD:
                tl.store(total + total_rows + here, z.to(total.dtype.element_ty), mask=is_inside)
            normed = _biased(z - centre, scale, weight, bias, begin + columns, WIDTH, BIAS)
            tl.store(out + out_rows + here, normed.to(out.dtype.element_ty), mask=is_inside)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
    *,
    eps: float,
) -> None:
    """out = (z - mean(z)) / sqrt(mean((z - mean(z))^2) + eps) * weight + bias of rows z = x, or z = total + x.

    x and out [M, H], weight and bias [H]; otherwise as ``rms_norm``.
    """
    of_columns = {"weight": weight, **({} if bias is None else {"bias": bias})}
    of_rows = {"x": x, "out": out, **({} if total is None else {"total": total})}
    _check({**of_rows, **of_columns})
    _check_axes("x", x, 2)
    for name, given in {**of_rows, **of_columns}.items():
        _check_shape(name, given, x.shape[-1:] if name in of_columns else x.shape)
    if not x.numel():
        return
    if not all(map(_adds_up_evenly, of_rows.values())):
        _on_copies(lambda x, out, total=None: layer_norm(x, weight, out, bias, total, eps=eps), x, out, total)
        return
    num_rows, width = x.shape
    blocks = _norm_blocks(width)
    with launching(LAYER_NORM, x):
        _layer_norm_kernel[(triton.cdiv(num_rows, blocks["ROWS"]),)](
            x,
            x if total is None else total,
            weight,
            weight if bias is None else bias,
            out,
            num_rows,
            x.stride(0),
            0 if total is None else total.stride(0),
            out.stride(0),
            eps,
            WIDTH=width,
            ADD=total is not None,
            BIAS=bias is not None,
            **blocks,
            num_warps=_warps(**blocks),
            **FUSION,
        )


def resource_cases() -> list[Compilation]:
    """As `triton_rowwise.resource_cases`."""
    norms = [(4096, False, False), (3072, False, True), (3072, True, True), (12288, True, True)]
    return [_case(dtype, *norm) for dtype in DTYPES for norm in norms]


def model_cases(shapes: KernelShapes) -> list[Compilation]:
    """What a model's layers launch, as it is compiled for them."""
    return [_case(shapes.dtype, *norm) for norm in sorted(shapes.layer_norms)]


def _case(dtype: torch.dtype, width: int, adds: bool, has_bias: bool) -> Compilation:
    strides = ("x_stride", "total_stride", "out_stride")
    constexprs = {"WIDTH": width, "ADD": adds, "BIAS": has_bias, **_norm_blocks(width)}
    return Compilation(
        name=f"layer_norm {width}{' of sum' * adds}{' with bias' * has_bias} {TYPE_NAMES[dtype]}",
        kernel=_layer_norm_kernel,
        signature=dict.fromkeys(("x", "total", "weight", "bias", "out"), "*" + TYPE_NAMES[dtype])
        | dict.fromkeys(("num_rows", *strides), "i32")
        | {"eps": "fp32"}
        | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs,
        num_warps=_warps(**_norm_blocks(width)),
        num_stages=3,
        multiples_of_16=strides if width % 16 == 0 else (),
        architectures=architectures_of(dtype),
        options=FUSION,
    )
