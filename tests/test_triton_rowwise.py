"""Triton's norms, rotations and gates: accurate, each row by itself, and nothing beside their rows touched.

They run on a CUDA device, else in Triton's interpreter (`devices`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton_interpreter
from activations import ACTIVATIONS
from devices import DEVICE, DTYPES
from tolerances import TOLERANCES
from torch import Tensor

from iclperm.engine.kernels import rowwise, triton_layer_norm, triton_rowwise
from iclperm.errors import RequestError
from iclperm.reference import rowwise as reference

triton_interpreter.repair()

pytestmark = pytest.mark.gpu


def test_every_activation_of_the_cpu_has_a_branch_here():
    assert set(ACTIVATIONS) == set(rowwise._KINDS.values())


def randn(*shape: int, dtype: str, seed: int, scale: float = 1.0) -> Tensor:
    values = scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DTYPES[dtype]).to(DEVICE)


def poisoned(x: Tensor) -> Tensor:
    return torch.full_like(x, torch.nan, memory_format=torch.contiguous_format)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def gated(kind: str, x: Tensor, factor: Tensor | None) -> Tensor:
    out = poisoned(x)
    triton_rowwise.gate(kind, x, factor, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gate_is_accurate(kind: str, dtype: str) -> None:
    x, factor = randn(5, 1031, dtype=dtype, seed=0, scale=4.0), randn(5, 1031, dtype=dtype, seed=1)
    expected = reference.gate(ACTIVATIONS[kind], x, factor)
    bound = 2 * TOLERANCES["activation"][dtype] * (x.double() * factor.double()).abs()
    smallest = torch.finfo(DTYPES[dtype]).smallest_normal  # below it there are fewer bits
    assert ((gated(kind, x, factor).double() - expected).abs() <= bound + smallest).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_an_activation_alone_is_one_times_a_factor_of_one(kind: str, dtype: str) -> None:
    x = randn(3, 1031, dtype=dtype, seed=0, scale=4.0)
    assert same_bits(gated(kind, x, None), gated(kind, x, torch.ones_like(x)))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gate_at_the_ends_of_the_range(kind: str) -> None:
    x = torch.tensor([[0.0, -0.0, 88.8, -88.8, 3.4e38, -3.4e38, torch.inf, torch.nan]], device=DEVICE)
    out = gated(kind, x, torch.ones_like(x))[0]
    assert out[:6].abs().tolist() == [0.0, 0.0, x[0, 2], pytest.approx(0.0, abs=1e-30), x[0, 4], 0.0]
    assert out[6] == torch.inf
    assert out[7].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gate_bits_do_not_depend_on_company_strides_or_place(kind: str, dtype: str) -> None:
    both = randn(9, 74, dtype=dtype, seed=2)
    x, factor = both.chunk(2, dim=1)
    whole = gated(kind, x, factor)
    assert not whole.isnan().any()
    assert same_bits(gated(kind, x[4:5].clone(), factor[4:5].clone()), whole[4:5])
    triton_rowwise.gate(kind, x, factor, x)
    assert same_bits(x, whole)
    assert same_bits(factor, randn(9, 74, dtype=dtype, seed=2)[:, 37:])


def normed(x: Tensor, weight: Tensor, total: Tensor | None = None, **options: float) -> Tensor:
    out = poisoned(x)
    triton_rowwise.rms_norm(x, weight, out, total, **{"eps": 1e-6, **options})  # type: ignore[arg-type]
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5, 40, 64, 65, 1000, 8192, 8193, 20_000])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_is_accurate_with_a_sum_and_without(width: int, offset: float, dtype: str) -> None:
    num_rows = 37 if width < 100 else 3
    x, total = (randn(num_rows, width, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = randn(width, dtype=dtype, seed=2)

    def assert_close(out: Tensor, z: Tensor) -> None:
        expected = reference.rms_norm(z, weight, eps=1e-6, offset=offset)
        assert ((out.double() - expected).abs() <= 2 * TOLERANCES["activation"][dtype] * expected.abs() + 1e-7).all()

    assert_close(normed(x, weight, offset=offset), x)
    added, expected = total.clone(), total + x
    out = normed(x, weight, added, offset=offset)
    assert_close(out, expected)
    assert same_bits(added, expected)
    assert same_bits(out, normed(expected, weight, offset=offset)), "the norm is not that of the rounded sum"


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 9000])
def test_norm_bits_do_not_depend_on_company_strides_or_place(width: int, dtype: str) -> None:
    wide, weight = randn(70 if width < 100 else 4, width + 8, dtype=dtype, seed=3), randn(width, dtype=dtype, seed=4)
    x = wide[:, :width]
    whole = normed(x, weight)
    assert not whole.isnan().any()
    assert same_bits(normed(x, weight, torch.zeros_like(x, memory_format=torch.contiguous_format)), whole)
    for row in (0, x.shape[0] - 1):
        assert same_bits(normed(x[row : row + 1].clone(), weight), whole[row : row + 1])
    triton_rowwise.rms_norm(x, weight, x, eps=1e-6)
    assert same_bits(x, whole)
    assert same_bits(wide[:, width:], randn(*wide.shape, dtype=dtype, seed=3)[:, width:])
    broken = randn(*wide.shape, dtype=dtype, seed=3)[:, :width].contiguous()
    broken[1, 3] = torch.nan
    out = normed(broken, weight)
    assert out[1].isnan().all()
    assert same_bits(out[2:], whole[2:])


@pytest.mark.parametrize("width", [48, 72])
def test_a_norm_s_rows_are_read_in_one_way_from_any_place(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For strides and addresses that are multiples of 16 another kernel is compiled, which adds up in another order."""
    kernel, launched = triton_rowwise._rms_norm_kernel, []

    class Watched:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*given: Any, **options: Any) -> None:
                places = [
                    (given[0], given[5]),
                    (given[3], given[8]),
                    *([(given[1], given[7])] if options["ADD"] else []),
                ]
                launched.append({stride % 16 == 0 and each.data_ptr() % 16 == 0 for each, stride in places})
                kernel[grid](*given, **options)

            return launch

    monkeypatch.setattr(triton_rowwise, "_rms_norm_kernel", Watched())
    weight = randn(width, dtype="float32", seed=1)
    memory = torch.empty(4 * 200, device=DEVICE)
    first = -memory.data_ptr() // memory.itemsize % 16  # whose address is a multiple of 64 bytes
    for stride, begin in ((width, 0), (width + 8, 0), (width, 1), (width + 8, 1)):
        x = memory.as_strided((3, width), (stride, 1), first + begin)
        x.copy_(randn(3, width, dtype="float32", seed=2))
        total = x.clone()
        for sums in (None, total):
            triton_rowwise.rms_norm(x, weight, x, sums, eps=1e-6)
    assert len(launched) == 8
    assert all(each == {width % 16 == 0} for each in launched)


def test_norm_of_heads_that_lie_apart() -> None:
    """As slices of one packed product lie: heads in a row, rows with something else between them."""
    packed, weight = randn(7, 5 * 12, dtype="float32", seed=5), randn(12, dtype="float32", seed=6)
    heads = packed[:, 12:48].view(7, 3, 12)
    expected = normed(heads.contiguous(), weight)
    triton_rowwise.rms_norm(heads, weight, heads, eps=1e-6)
    assert same_bits(heads, expected)
    untouched = randn(7, 5 * 12, dtype="float32", seed=5)
    assert same_bits(packed[:, :12], untouched[:, :12])
    assert same_bits(packed[:, 48:], untouched[:, 48:])


def layer_normed(x: Tensor, weight: Tensor, bias: Tensor | None = None, total: Tensor | None = None) -> Tensor:
    out = poisoned(x)
    triton_layer_norm.layer_norm(x, weight, out, bias, total, eps=1e-5)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5, 40, 64, 65, 1000, 8192, 8193, 20_000])
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm_is_accurate_with_a_sum_and_without(width: int, has_bias: bool, dtype: str) -> None:
    num_rows = 37 if width < 100 else 3
    x, total = (randn(num_rows, width, dtype=dtype, seed=seed) for seed in (0, 1))
    x[1] += 20.0  # far from zero as a whole
    weight, bias = (randn(width, dtype=dtype, seed=seed) for seed in (2, 3))
    given = bias if has_bias else None

    def assert_close(out: Tensor, z: Tensor) -> None:
        expected = reference.layer_norm(z, weight, given, eps=1e-5)
        scale = (z.double().var(dim=1, correction=0, keepdim=True) + 1e-5).rsqrt()
        size = (z.double().abs() + z.double().mean(dim=1, keepdim=True).abs()) * scale * weight.double().abs()
        size = size + bias.double().abs() if has_bias else size
        bound = TOLERANCES["activation"][dtype] * expected.abs() + 4 * TOLERANCES["activation"]["float32"] * size
        assert ((out.double() - expected).abs() <= bound + 1e-7).all()

    assert_close(layer_normed(x, weight, given), x)
    added, expected = total.clone(), total + x
    out = layer_normed(x, weight, given, added)
    assert_close(out, expected)
    assert same_bits(added, expected)
    assert same_bits(out, layer_normed(expected, weight, given)), "the norm is not that of the rounded sum"


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 9000])
def test_layer_norm_bits_do_not_depend_on_company_strides_or_place(width: int, dtype: str) -> None:
    wide, weight = randn(70 if width < 100 else 4, width + 8, dtype=dtype, seed=3), randn(width, dtype=dtype, seed=4)
    x = wide[:, :width]
    whole = layer_normed(x, weight, weight)
    assert not whole.isnan().any()
    added = torch.zeros_like(x, memory_format=torch.contiguous_format)
    assert same_bits(layer_normed(x, weight, weight, added), whole)
    for row in (0, x.shape[0] - 1):
        assert same_bits(layer_normed(x[row : row + 1].clone(), weight, weight), whole[row : row + 1])
    triton_layer_norm.layer_norm(x, weight, x, weight, eps=1e-5)
    assert same_bits(x, whole)
    assert same_bits(wide[:, width:], randn(*wide.shape, dtype=dtype, seed=3)[:, width:])
    broken = randn(*wide.shape, dtype=dtype, seed=3)[:, :width].contiguous()
    broken[1, 3] = torch.nan
    out = layer_normed(broken, weight, weight)
    assert out[1].isnan().all()
    assert same_bits(out[2:], whole[2:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "turned"), [(2, 2), (12, 12), (20, 12), (128, 64)])
def test_neighbours_are_turned_with_the_bits_of_halves(head_dim: int, turned: int, dtype: str) -> None:
    x = randn(37, 3, head_dim, dtype=dtype, seed=head_dim)
    cosines, sines = (randn(37, turned, dtype="float32", seed=seed) for seed in (1, 2))

    def as_neighbours(x: Tensor) -> Tensor:
        pairs = torch.stack(x[..., :turned].chunk(2, dim=-1), dim=-1).flatten(-2)
        return torch.cat([pairs, x[..., turned:]], dim=-1)

    halves, neighbours = x.clone(), as_neighbours(x)
    triton_rowwise.rotate(halves, cosines, sines)
    triton_rowwise.rotate(neighbours, cosines, sines, neighbours=True)
    assert not same_bits(halves, x)
    assert same_bits(neighbours, as_neighbours(halves))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "turned"), [(2, 2), (12, 12), (20, 12), (64, 64), (128, 96), (80, 80), (256, 256)]
)
def test_rotation_is_accurate_and_by_row(head_dim: int, turned: int, dtype: str) -> None:
    x = randn(37, 3, head_dim, dtype=dtype, seed=head_dim)
    cosines, sines = (randn(37, turned, dtype="float32", seed=seed) for seed in (1, 2))

    def rotated(x: Tensor, begin: int = 0) -> Tensor:
        out, end = x.clone(), begin + x.shape[0]
        triton_rowwise.rotate(out, cosines[begin:end], sines[begin:end])
        return out

    out, exact = rotated(x), x.double()
    low, high = exact[..., : turned // 2], exact[..., turned // 2 : turned]
    bound = (
        exact[..., :turned].abs() * cosines[:, None].abs() + torch.cat([high, low], dim=-1).abs() * sines[:, None].abs()
    )
    error = (out.double() - reference.rotate(x, cosines, sines)).abs()[..., :turned]
    assert (error <= TOLERANCES["activation"][dtype] * bound + 1e-7).all()
    assert same_bits(out[..., turned:], x[..., turned:])
    assert same_bits(rotated(x[5:6], 5), out[5:6])
    wide = torch.cat([x, x], dim=1)
    triton_rowwise.rotate(wide[:, 3:], cosines, sines)
    assert same_bits(wide[:, 3:], out)
    assert same_bits(wide[:, :3], x)


def test_rotation_by_tables_of_the_model_s_own_dtype() -> None:
    x = randn(5, 2, 16, dtype="bfloat16", seed=0)
    cosines, sines = (randn(5, 16, dtype="bfloat16", seed=seed) for seed in (1, 2))
    same, wide = x.clone(), x.clone()
    triton_rowwise.rotate(same, cosines, sines)
    triton_rowwise.rotate(wide, cosines.float(), sines.float())
    assert not same_bits(same, x)
    assert same_bits(same, wide)


def test_nothing_is_done_to_nothing() -> None:
    for shape in [(0, 8), (3, 0)]:
        x = torch.empty(shape, device=DEVICE)
        triton_rowwise.gate("silu", x, x, x)
        triton_rowwise.rms_norm(x, torch.ones(shape[1], device=DEVICE), x, eps=1e-6)
        triton_layer_norm.layer_norm(x, torch.ones(shape[1], device=DEVICE), x, eps=1e-5)
        triton_rowwise.rotate(x[:, None], x, x)


ROWS = torch.ones(4, 6, device=DEVICE)
BAD: list[tuple[Callable[[], None], str]] = [
    (lambda: triton_rowwise.gate("silu", ROWS.double(), ROWS, ROWS), "x is torch.float64; float32, bfloat16 or "),
    (lambda: triton_rowwise.gate("silu", ROWS.T, ROWS.T, ROWS.T), "the last axis of x has stride 6; it must be contig"),
    (lambda: triton_rowwise.gate("silu", ROWS, ROWS[:, :5], ROWS), r"factor has shape \(4, 5\) and must have \(4, 6\)"),
    (lambda: triton_rowwise.gate("silu", ROWS, ROWS.half(), ROWS), "factor is torch.float16 on .*, x torch.float32"),
    (lambda: triton_rowwise.gate("silu", ROWS, ROWS, ROWS[0]), r"out has shape \(6,\) and must have \(4, 6\)"),
    (lambda: triton_rowwise.gate("silu", ROWS[0], ROWS[0], ROWS[0]), r"x has shape \(6,\); 2 axes are needed"),
    (lambda: triton_rowwise.rms_norm(ROWS, ROWS[0, :2], ROWS, eps=0.1), r"weight has shape \(2,\) and must have "),
    (lambda: triton_rowwise.rms_norm(ROWS, ROWS[0], ROWS[:2], eps=0.1), r"out has shape \(2, 6\) and must have "),
    (lambda: triton_rowwise.rms_norm(ROWS, ROWS[0], ROWS, ROWS[:2], eps=0.1), r"total has shape \(2, 6\) and must "),
    (lambda: triton_rowwise.rms_norm(ROWS, ROWS[0].double(), ROWS, eps=0.1), "weight is torch.float64 on "),
    (lambda: triton_layer_norm.layer_norm(ROWS, ROWS[0], ROWS, ROWS[0, :2], eps=0.1), r"bias has shape \(2,\) and "),
    (lambda: triton_layer_norm.layer_norm(ROWS[None], ROWS[0], ROWS[None], eps=0.1), r"x has shape \(1, 4, 6\); 2 "),
    (lambda: triton_rowwise.rotate(ROWS[:, None], ROWS[:2], ROWS[:2]), r"cosines has shape \(2, 6\); x \(4, 1, 6\) "),
    (lambda: triton_rowwise.rotate(ROWS[:, None], ROWS[:, :3], ROWS[:, :3]), r"cosines has shape \(4, 3\); x "),
    (lambda: triton_rowwise.rotate(ROWS[:, None], ROWS, ROWS[:, :2]), r"sines has shape \(4, 2\) and must have \(4, 6"),
    (lambda: triton_rowwise.rotate(ROWS, ROWS, ROWS), r"x has shape \(4, 6\); 3 axes are needed"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), BAD)
def test_what_does_not_fit_is_refused(call: Callable[[], None], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        call()
    assert (ROWS == 1).all()
