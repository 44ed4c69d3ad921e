"""Activations and the reduction of logits: accurate, and each row by itself."""

import math
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
import torch
from activations import ACTIVATIONS
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import TOLERANCES
from torch import Tensor

from iclperm import _core
from iclperm.errors import RequestError
from iclperm.reference import rowwise as reference

ISAS = _core.available_isas()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(params=ISAS, autouse=True)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ICLPERM_ISA", request.param)
    assert _core.isa() == request.param
    return str(request.param)


def as_numpy(x: Tensor) -> npt.NDArray[np.generic]:
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return as_numpy(a.contiguous()).tobytes() == as_numpy(b.contiguous()).tobytes()


def apply(name: str, x: Tensor, num_threads: int = 1) -> Tensor:
    out = torch.full(x.shape, torch.nan, dtype=x.dtype)
    _core.activate(name, as_numpy(x), as_numpy(out), num_threads=num_threads)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_is_accurate(name: str, dtype: str) -> None:
    tiny_to_large = torch.logspace(-37, 2, 20_001, dtype=torch.float64)
    x = torch.cat([torch.linspace(-12, 12, 200_001), tiny_to_large, -tiny_to_large]).to(DTYPES[dtype])[None]
    error = (apply(name, x).double() - ACTIVATIONS[name](x.double())).abs()
    assert (error <= TOLERANCES["activation"][dtype] * x.double().abs()).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_at_the_ends_of_the_range(name: str) -> None:
    x = torch.tensor([[0.0, -0.0, 88.8, -88.8, 3.4e38, -3.4e38, torch.inf, torch.nan]])
    out = apply(name, x)[0]
    assert out[:6].tolist() == [0.0, 0.0, x[0, 2], 0.0, x[0, 4], 0.0]
    assert out[6] == torch.inf
    assert out[7].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_bits_do_not_depend_on_place_strides_or_threads(name: str, dtype: str) -> None:
    x = torch.randn(37, 131, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    whole = apply(name, x)
    assert not whole.isnan().any()
    assert same_bits(apply(name, x, num_threads=3), whole)
    for begin, end in [(0, 1), (1, 131), (3, 20), (100, 131)]:
        assert same_bits(apply(name, x[:, begin:end]), whole[:, begin:end])
    in_place = x.clone()
    _core.activate(name, as_numpy(in_place), as_numpy(in_place))
    assert same_bits(in_place, whole)


def test_many_rows_are_shared_among_threads() -> None:
    x = torch.randn(600, 1000, generator=torch.Generator().manual_seed(2))
    assert same_bits(apply("silu", x, num_threads=4), apply("silu", x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_times_a_factor(name: str, dtype: str) -> None:
    kernel = partial(_core.activate, name)
    rng = torch.Generator().manual_seed(5)
    x, factor = ((3 * torch.randn(21, 131, generator=rng)).to(DTYPES[dtype]) for _ in range(2))
    out = torch.full(x.shape, torch.nan, dtype=x.dtype)
    kernel(as_numpy(x), as_numpy(out), as_numpy(factor), num_threads=2)
    error = (out.double() - reference.gate(ACTIVATIONS[name], x, factor)).abs()
    assert (error <= 2 * TOLERANCES["activation"][dtype] * (x.double() * factor.double()).abs()).all()
    in_place = x.clone()
    kernel(as_numpy(in_place[:, :57]), as_numpy(in_place[:, :57]), as_numpy(factor[:, :57]))
    assert same_bits(in_place[:, :57], out[:, :57])
    with pytest.raises(RequestError, match=r"^factor has shape \(20, 131\) and x \(21, 131\); they must be equal$"):
        kernel(as_numpy(x), as_numpy(out), as_numpy(factor[:20]))


def rms_norm(x: Tensor, weight: Tensor, total: Tensor | None = None, **options: float) -> Tensor:
    out = torch.full(x.shape, torch.nan, dtype=x.dtype)
    arrays = [as_numpy(x), as_numpy(weight), as_numpy(out), None if total is None else as_numpy(total)]
    _core.rms_norm(*arrays, **{"eps": 1e-6, **options})  # type: ignore[arg-type]
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5, 16, 63, 64, 65, 128, 1000])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_is_accurate_with_a_sum_and_without(width: int, offset: float, dtype: str) -> None:
    rng = torch.Generator().manual_seed(width)
    x, total, weight = (
        torch.randn(size, generator=rng).to(DTYPES[dtype]) for size in [(13, width), (13, width), width]
    )

    def exact(z: Tensor) -> Tensor:
        scale = (z.double().square().mean(dim=1, keepdim=True) + 1e-6).rsqrt()
        return z.double() * scale * (offset + weight.double())

    def assert_close(out: Tensor, expected: Tensor) -> None:
        assert ((out.double() - expected).abs() <= 2 * TOLERANCES["activation"][dtype] * expected.abs() + 1e-7).all()

    assert_close(rms_norm(x, weight, offset=offset), exact(x))
    added, expected = total.clone(), total + x
    assert_close(rms_norm(x, weight, added, offset=offset), exact(expected))
    assert same_bits(added, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_bits_do_not_depend_on_company_strides_threads_or_place(dtype: str) -> None:
    rng = torch.Generator().manual_seed(6)
    wide = torch.randn(300, 210, generator=rng).to(DTYPES[dtype])
    x, weight = wide[:, :200], torch.randn(200, generator=rng).to(DTYPES[dtype])
    whole = rms_norm(x, weight)
    assert not whole.isnan().any()
    assert same_bits(rms_norm(x, weight, num_threads=3), whole)
    assert same_bits(rms_norm(x, weight, torch.zeros_like(x)), whole)
    for row in (0, 7, 299):
        assert same_bits(rms_norm(x[row : row + 1].clone(), weight), whole[row : row + 1])
    in_place = x.contiguous()
    _core.rms_norm(as_numpy(in_place), as_numpy(weight), as_numpy(in_place), eps=1e-6)
    assert same_bits(in_place, whole)
    broken = x.clone()
    broken[4, 3] = torch.nan
    out = rms_norm(broken, weight)
    assert out[4].isnan().all()
    assert same_bits(out[5:], whole[5:])


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, total: Tensor | None = None) -> Tensor:
    out = torch.full(x.shape, torch.nan, dtype=x.dtype)
    optional = [None if each is None else as_numpy(each) for each in (bias, total)]
    _core.layer_norm(as_numpy(x), as_numpy(weight), as_numpy(out), *optional, eps=1e-5)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5, 16, 63, 64, 65, 128, 1000])
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm_is_accurate_with_a_sum_and_without(width: int, has_bias: bool, dtype: str) -> None:
    rng = torch.Generator().manual_seed(width)
    x, total, weight, bias = (
        torch.randn(size, generator=rng).to(DTYPES[dtype]) for size in [(13, width), (13, width), width, width]
    )
    x[3] += 100.0  # far from zero as a whole
    given = bias if has_bias else None

    def assert_close(out: Tensor, z: Tensor) -> None:
        expected = reference.layer_norm(z, weight, given, eps=1e-5)
        scale = (z.double().var(dim=1, correction=0, keepdim=True) + 1e-5).rsqrt()
        size = (z.double().abs() + z.double().mean(dim=1, keepdim=True).abs()) * scale * weight.double().abs()
        bound = 4 * TOLERANCES["activation"][dtype] * (size + (given.double().abs() if has_bias else 0.0))
        if dtype == "bfloat16":  # of which the input's rounding is no part
            bound = TOLERANCES["activation"][dtype] * expected.abs() + 1e-5 * size
        assert ((out.double() - expected).abs() <= bound + 1e-7).all()

    assert_close(layer_norm(x, weight, given), x)
    added, expected = total.clone(), total + x
    assert_close(layer_norm(x, weight, given, added), expected)
    assert same_bits(added, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_bits_do_not_depend_on_company_strides_threads_or_place(dtype: str) -> None:
    rng = torch.Generator().manual_seed(6)
    wide = torch.randn(300, 210, generator=rng).to(DTYPES[dtype])
    x, (weight, bias) = wide[:, :200], torch.randn(2, 200, generator=rng).to(DTYPES[dtype])
    whole = layer_norm(x, weight, bias)
    assert not whole.isnan().any()
    assert same_bits(layer_norm(x, weight, bias, torch.zeros_like(x)), whole)
    for row in (0, 7, 299):
        assert same_bits(layer_norm(x[row : row + 1].clone(), weight, bias), whole[row : row + 1])
    in_place = x.contiguous()
    arrays = map(as_numpy, (in_place, weight, in_place, bias))
    _core.layer_norm(*arrays, eps=1e-5, num_threads=3)
    assert same_bits(in_place, whole)
    broken = x.clone()
    broken[4, 3] = torch.nan
    out = layer_norm(broken, weight, bias)
    assert out[4].isnan().all()
    assert same_bits(out[5:], whole[5:])


def as_neighbours(x: Tensor, turned: int) -> Tensor:
    """The first ``turned`` columns of each head, whose halves are pairs, with each pair side by side."""
    pairs = torch.stack(x[..., :turned].chunk(2, dim=-1), dim=-1).flatten(-2)
    return torch.cat([pairs, x[..., turned:]], dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 6, 12, 20, 34, 64, 96, 128])
def test_neighbours_are_turned_with_the_bits_of_halves(head_dim: int, dtype: str) -> None:
    rng = torch.Generator().manual_seed(head_dim)
    for turned in {head_dim, head_dim - 2, head_dim // 4 * 2} - {0}:
        x = torch.randn(37, 3, head_dim, generator=rng).to(DTYPES[dtype])
        cosines, sines = (torch.randn(37, turned, generator=rng).numpy() for _ in range(2))
        halves, neighbours = x.clone(), as_neighbours(x, turned)
        _core.rotate(as_numpy(halves), cosines, sines)
        _core.rotate(as_numpy(neighbours), cosines, sines, neighbours=True, num_threads=2)
        assert not same_bits(halves, x)
        assert same_bits(neighbours, as_neighbours(halves, turned))
        tables = torch.from_numpy(cosines), torch.from_numpy(sines)
        expected = reference.rotate(as_neighbours(x, turned), *tables, neighbours=True)
        assert torch.allclose(expected, as_neighbours(reference.rotate(x, *tables), turned))
        assert torch.allclose(neighbours.double(), expected, rtol=0.0, atol=1e-5 if dtype == "float32" else 0.1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "turned"), [(2, 2), (12, 12), (20, 12), (64, 64), (128, 96), (80, 80)])
def test_rotation_is_accurate_and_by_row(head_dim: int, turned: int, dtype: str) -> None:
    rng = torch.Generator().manual_seed(head_dim)
    x = torch.randn(37, 3, head_dim, generator=rng).to(DTYPES[dtype])
    cosines, sines = torch.randn(37, turned, generator=rng), torch.randn(37, turned, generator=rng)

    def rotated(x: Tensor, begin: int = 0, num_threads: int = 1) -> Tensor:
        out, end = x.clone(), begin + x.shape[0]
        _core.rotate(as_numpy(out), cosines[begin:end].numpy(), sines[begin:end].numpy(), num_threads=num_threads)
        return out

    exact = x.double()
    low, high = exact[..., : turned // 2], exact[..., turned // 2 : turned]
    turn = exact[..., :turned] * cosines[:, None] + torch.cat([-high, low], dim=-1) * sines[:, None]
    out = rotated(x)
    bound = (
        exact[..., :turned].abs() * cosines[:, None].abs() + torch.cat([high, low], dim=-1).abs() * sines[:, None].abs()
    )
    assert ((out.double()[..., :turned] - turn).abs() <= TOLERANCES["activation"][dtype] * bound).all()
    assert same_bits(out[..., turned:], x[..., turned:])
    assert same_bits(rotated(x, num_threads=3), out)
    assert same_bits(rotated(x[5:6], 5), out[5:6])
    wide = torch.cat([x, x], dim=1)
    _core.rotate(as_numpy(wide[:, 3:]), cosines.numpy(), sines.numpy())
    assert same_bits(wide[:, 3:], out)
    assert same_bits(wide[:, :3], x)


def test_activation_of_nothing() -> None:
    assert apply("silu", torch.empty(0, 5)).shape == (0, 5)
    assert apply("silu", torch.empty(5, 0)).shape == (5, 0)


class Reduced:
    """Results of head_rows as tensors."""

    def __init__(
        self, logits: Tensor, pairs: list[tuple[int, int]], softcap: float = 0.0, num_threads: int = 1
    ) -> None:
        rows = np.array([row for row, _ in pairs], dtype=np.int64)
        ids = np.array([token for _, token in pairs], dtype=np.int64)
        arrays = _core.head_rows(as_numpy(logits), rows, ids, softcap=softcap, num_threads=num_threads)
        self.logsumexp, self.argmax, self.finite, self.logprob = map(torch.from_numpy, arrays)


def cap(logits: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(logits.double() / softcap) if softcap else logits.double()


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(0, 5),
    num_columns=st.sampled_from([1, 3, 16, 17, 1000, 2047, 2048, 2049, 5000]),
    dtype=st.sampled_from(list(DTYPES)),
    softcap=st.sampled_from([0.0, 0.0, 5.0, 30.0]),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_agrees_with_float64(
    num_rows: int, num_columns: int, dtype: str, softcap: float, num_threads: int, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = (6 * torch.randn(num_rows, num_columns, generator=rng)).clamp(-30, 30).to(DTYPES[dtype])
    pairs = [(row, column) for row in range(num_rows) for column in range(0, num_columns, 1 + num_columns // 7)]
    out = Reduced(logits, pairs, softcap, num_threads)
    capped = cap(logits, softcap)
    expected = torch.logsumexp(capped, dim=1)
    assert out.finite.all()
    assert (out.logsumexp.double() - expected).abs().le(TOLERANCES["logsumexp"][dtype]).all()
    for (row, column), logprob in zip(pairs, out.logprob.tolist(), strict=True):
        assert logprob == pytest.approx(
            float(capped[row, column] - expected[row]), abs=TOLERANCES["logprob"][dtype], rel=0
        )
    if softcap == 0:
        assert out.argmax.tolist() == [int(np.argmax(row)) for row in logits.float().numpy()]
    else:
        best = capped[torch.arange(num_rows), out.argmax.long()]
        assert (best - capped.amax(dim=1)).abs().le(TOLERANCES["logsumexp"][dtype]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_unlikely_ids_are_not_lost(dtype: str) -> None:
    """Each of a large vocabulary weighs less than the last bit of a float32 sum that holds the likely ones."""
    logits = torch.full((1, 1 << 18), -17.75).to(DTYPES[dtype])
    logits[0, :64] = 0.0
    expected = torch.logsumexp(logits.double(), dim=1)
    assert expected.item() - math.log(64) > 10 * TOLERANCES["logsumexp"][dtype]
    found = Reduced(logits, [(0, 0)])
    assert (found.logsumexp.double() - expected).abs() <= TOLERANCES["logsumexp"][dtype]
    assert (found.logprob.double() + expected).abs() <= TOLERANCES["logsumexp"][dtype]


def test_ties_go_to_the_lowest_index() -> None:
    logits = torch.zeros(4, 6000)
    logits[1, [9, 40, 5999]] = 2.0
    logits[2, [2047, 2048]] = 2.0
    logits[3, [5000, 5998]] = 2.0
    assert Reduced(logits, []).argmax.tolist() == [0, 9, 2047, 5000]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("column", [0, 2050, 3000])
def test_a_row_that_is_not_finite_has_no_result_and_harms_no_other(bad: float, column: int, dtype: str) -> None:
    logits = torch.randn(3, 3001, generator=torch.Generator().manual_seed(3)).to(DTYPES[dtype])
    pairs = [(0, 5), (1, 5), (2, 5)]
    clean = Reduced(logits, pairs)
    logits[1, column] = bad
    out = Reduced(logits, pairs)
    assert out.finite.tolist() == [True, False, True]
    assert out.argmax[1] == -1
    assert out.logsumexp[1].isnan()
    assert out.logprob[1].isnan()
    for name in ("logsumexp", "argmax", "logprob"):
        assert same_bits(getattr(out, name)[::2], getattr(clean, name)[::2])


def test_row_bits_do_not_depend_on_company_strides_or_threads() -> None:
    wide = 5 * torch.randn(9, 4200, generator=torch.Generator().manual_seed(4))
    logits = wide[:, :4111]
    together = Reduced(logits, [(row, 77) for row in range(9)])
    threaded = Reduced(logits, [(row, 77) for row in range(9)], num_threads=3)
    assert same_bits(threaded.logsumexp, together.logsumexp)
    for row in range(9):
        single = Reduced(logits[row : row + 1].clone(), [(0, 77)])
        assert same_bits(single.logsumexp, together.logsumexp[row : row + 1])
        assert same_bits(single.logprob, together.logprob[row : row + 1])


def test_extreme_logits_do_not_overflow() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0], [-3e38, -3e38, -3e38]])
    out = Reduced(logits, [(0, 0), (1, 2)])
    assert out.finite.all()
    assert out.logprob[0] == 0.0
    assert out.logsumexp[1] == logits[1, 0]
