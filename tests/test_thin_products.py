"""Products of few rows: the given order of sums to the last bit, and whose order the engine gives."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from ways import First
from zoo import ZOO

from iclperm import _core
from iclperm.engine import Engine
from iclperm.engine.kernels import linear as products
from iclperm.engine.kernels.attention import as_numpy
from iclperm.engine.kernels.linear import MatrixProduct, OutputRoom, SumOrder, few_rows
from iclperm.engine.numerics import probe
from iclperm.engine.shapes import padded_rows
from iclperm.errors import RequestError
from iclperm.reference.products import chained, chained_pairs, fused

ISAS = [isa for isa in _core.available_isas() if isa != "baseline"]
IS_KNOWN = "avx512" not in ISAS  # in which order the libraries here add up
PAIR_ISAS = [isa for isa in ISAS if isa == "avx512_bf16"]  # that multiply bfloat16
HAS_TILES = "amx_bf16" in ISAS  # which the library takes as it likes, in an order that is no chain of pairs
DTYPES = [torch.float32, *([torch.bfloat16] if PAIR_ISAS else [])]
CHOICES: dict[str, Any] = {
    "bias": st.sampled_from([None, False, True]),
    "special": st.booleans(),
    "num_threads": st.integers(1, 3),
    "seed": st.integers(0, 2**16),
}
HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
SPECIAL = np.float32([0.0, -0.0, 1e-45, -1e-40, 1.1754944e-38, 3.4028235e38, -3.4028235e38, np.inf, -np.inf, np.nan])

fuses = pytest.mark.skipif(not ISAS, reason="this processor, or this build, fuses no products")


@pytest.fixture(autouse=True)
def small_ones_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no product is in tiles."""
    monkeypatch.setattr(products, "FEWEST_ENTRIES", 0)
    monkeypatch.setattr(products, "_is_tiled", lambda dtype: False)


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """What was found out of products, nothing yet."""
    found: dict[Any, Any] = {}
    monkeypatch.setattr(products, "_ORDERS", found)
    return found


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear(outputs: int, inputs: int, *, bias: bool = False) -> nn.Linear:
    module = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    module.weight.copy_(numbers(outputs, inputs, seed=1))
    if bias:
        module.bias.copy_(numbers(outputs, seed=2))
    return module


def keeps_bits(product: MatrixProduct, x: torch.Tensor) -> bool:
    """Whether the library gives rows the bits that the fewest rows have."""
    fewest = x[: padded_rows(1, x.device)]
    return torch.equal(product.by_library(x)[: len(fewest)], product.by_library(fewest))


def test_the_oracle_rounds_once() -> None:
    """By whole numbers, of which a sum of float32 is one after all are multiplied by a power of two."""
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(-(2**24), 2**24, 20_000).astype(np.float32) * scale for scale in (1, 1, 2**20))
    c[::2] = -a[::2] * b[::2]  # what is left is the rounding of the product
    for got, *given_numbers in zip(fused(a, b, c), a, b, c, strict=True):
        x, y, z = (int(number) for number in given_numbers)
        exact = x * y + z
        spacing = 1 << max(0, exact.__abs__().bit_length() - 24)
        assert abs(int(got) - exact) * 2 <= spacing
        if abs(int(got) - exact) * 2 == spacing:
            assert int(got) // spacing % 2 == 0  # of two as near, the even one


@fuses
@pytest.mark.parametrize("isa", ISAS)
@settings(deadline=None)
@given(
    shape=st.tuples(st.integers(1, 75), st.integers(1, 110), st.integers(1, 70)),
    block=st.integers(1, 80),
    **CHOICES,
)
def test_sums_have_the_order_asked_for(isa, shape, block, bias, special, num_threads, seed) -> None:
    rng = np.random.default_rng(seed)
    num_rows, num_outputs, num_columns = shape
    # As they may lie: rows apart in memory.
    x, weight, out = (
        rng.normal(size=(rows, columns + apart)).astype(np.float32)[:, :columns]
        for rows, columns, apart in (
            (num_rows, num_columns, 3), (num_outputs, num_columns, 5), (num_rows, num_outputs, 1)
        )
    )  # fmt: skip
    shift = None if bias is None else rng.normal(size=num_outputs).astype(np.float32)
    if special:
        x[rng.integers(num_rows), rng.integers(num_columns)] = rng.choice(SPECIAL)
        weight[rng.integers(num_outputs), rng.integers(num_columns)] = rng.choice(SPECIAL)
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setenv("ICLPERM_ISA", isa)
        assert _core.isa() == isa
        assert _core.has_fused_products()
        _core.thin_product(x, weight, out, shift, block=block, bias_first=bool(bias), num_threads=num_threads)
        wanted = chained(x, weight, shift, block=block, bias_first=bool(bias))
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("isa", PAIR_ISAS or ["avx2"])
@settings(deadline=None)
@given(
    shape=st.tuples(st.integers(1, 75), st.integers(1, 110), st.integers(1, 35)),
    block=st.integers(1, 40),
    **CHOICES,
)
def test_pairs_of_bfloat16_have_the_order_asked_for(isa, shape, block, bias, special, num_threads, seed) -> None:
    """And are refused where no instruction multiplies them."""
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    num_rows, num_outputs, num_pairs = shape
    x, weight, out = (
        torch.randn(rows, columns + apart, generator=generator).bfloat16()[:, :columns]
        for rows, columns, apart in (
            (num_rows, 2 * num_pairs, 4), (num_outputs, 2 * num_pairs, 6), (num_rows, num_outputs, 1)
        )
    )  # fmt: skip
    shift = None if bias is None else torch.randn(num_outputs, generator=generator).bfloat16()
    if special:
        number = torch.tensor(rng.choice([0.0, -0.0, 3e38, -3e38, np.inf, -np.inf, np.nan]))
        x[rng.integers(num_rows), rng.integers(2 * num_pairs)] = number
    order = {"block": 2 * block, "bias_first": bool(bias)}
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setenv("ICLPERM_ISA", isa)
        given_arrays = (as_numpy(x), as_numpy(weight), as_numpy(out), None if shift is None else as_numpy(shift))
        if not _core.has_fused_products(bfloat16=True):
            with pytest.raises(RequestError, match="bfloat16 is multiplied from avx512_bf16 on; this is "):
                _core.thin_product(*given_arrays, **order)
            return
        _core.thin_product(*given_arrays, **order, num_threads=num_threads)
        floats = (x.float().numpy(), weight.float().numpy(), None if shift is None else shift.float().numpy())
        wanted = torch.from_numpy(chained_pairs(*floats, **order)).bfloat16()
    np.testing.assert_array_equal(out.float(), wanted.float())


def test_more_rows_than_any_memory_holds(tmp_path) -> None:
    rows = np.lib.stride_tricks.as_strided(np.zeros((1, 4), np.float32), (2**38, 4), (0, 4), writeable=False)
    with (tmp_path / "never filled").open("wb+") as file:
        out = np.memmap(file, np.float32, "w+", shape=(2**38, 1))
        with pytest.raises(RequestError, match="x has 274877906944 rows, more than any memory holds"):
            _core.thin_product(rows, np.zeros((1, 4), np.float32), out, block=4)


def test_without_fused_products_the_library_multiplies(monkeypatch, orders) -> None:
    monkeypatch.setenv("ICLPERM_ISA", "baseline")
    assert not _core.has_fused_products() or torch.backends.cpu.get_cpu_capability() == "DEFAULT"
    product = MatrixProduct.of(linear(40, 64))
    if not _core.has_fused_products():
        assert product.order is None
        assert not orders
    assert torch.equal(product(numbers(8, 64)), product.by_library(numbers(8, 64)))


@fuses
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inputs", [16, 64, 200, 256, 640, 1408, 3000])
@pytest.mark.parametrize("is_onednn", [False, True] if HAS_ONEDNN else [False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_rows_have_the_bits_of_the_library(dtype, is_onednn, inputs, bias, orders) -> None:
    module = linear(203, inputs, bias=bias).to(dtype)
    product = MatrixProduct(module.weight, module.bias, is_onednn)
    step = 8 * torch.get_num_threads()
    for rows in range(step, few_rows() + 1, step):
        x = numbers(rows, inputs, seed=rows).to(dtype)
        assert torch.equal(product(x), product.by_library(x)) or not keeps_bits(product, x)
    assert len(orders) == 1
    # A row's bits are those of one among many, which the library multiplies.
    many = numbers(512, inputs).to(dtype)
    few = slice(100, 100 + step)
    assert torch.equal(product(many[few]), product(many)[few]) or not keeps_bits(product, many)
    if IS_KNOWN or (dtype == torch.bfloat16 and not HAS_TILES):
        assert product.order is not None
        assert keeps_bits(product, many)


@fuses
@pytest.mark.parametrize("num_columns", [16, 64, 194, 640, 2100])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_order_that_is_tried_is_found(dtype, num_columns, bias, monkeypatch, orders) -> None:
    """Of a library that adds up in that order, whatever numbers a module has: here a bias of zeros."""
    module = linear(40, num_columns, bias=bias).to(dtype)
    if bias:
        module.bias.zero_()
    for wanted in list(products._orders(num_columns, dtype, module.bias)):

        def library(x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor | None, order=wanted) -> torch.Tensor:
            return MatrixProduct(weight, shift, is_onednn=False).in_order(x, order)

        orders.clear()
        monkeypatch.setattr(nn.functional, "linear", library)
        assert MatrixProduct(module.weight, module.bias, is_onednn=False).order == wanted


@fuses
@pytest.mark.parametrize("first", ["no bias", "bias of zeros", "sparse", "other library", "rows apart"])
@pytest.mark.parametrize("num_columns", [193, 640, 1408])
def test_what_one_matrix_shows_is_right_for_the_next_of_its_shape(first, num_columns, orders) -> None:
    next_one = linear(256, num_columns, bias=first != "sparse")
    weight, bias = next_one.weight.clone(), None if first == "no bias" else next_one.bias
    is_onednn = HAS_ONEDNN and first == "other library"
    if first == "bias of zeros":
        bias = torch.zeros(256)
    elif first == "sparse":
        weight[:, :192] = 0
        weight[:, 384:] = 0
    elif first == "rows apart":
        weight = torch.cat([weight, weight], dim=1)[:, :num_columns]
    x = numbers(few_rows(), num_columns)
    for product in (MatrixProduct(weight, bias, is_onednn), MatrixProduct(next_one.weight, next_one.bias, False)):
        assert torch.equal(product(x), product.by_library(x)) or not keeps_bits(product, x)
        assert keeps_bits(product, x) or not IS_KNOWN
    if IS_KNOWN:
        assert MatrixProduct(weight, bias, is_onednn).order is not None


@fuses
def test_an_order_that_our_kernel_does_not_know_is_left_to_the_library(monkeypatch, orders) -> None:
    def backwards(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = torch.empty(x.shape[0], weight.shape[0])
        flipped = (np.ascontiguousarray(each.numpy()[:, ::-1]) for each in (x, weight))
        _core.thin_product(*flipped, out.numpy(), block=x.shape[1])
        return out

    product = MatrixProduct(linear(40, 64).weight, None, is_onednn=False)
    monkeypatch.setattr(nn.functional, "linear", backwards)
    x = numbers(8, 64)
    assert torch.equal(product(x), backwards(x, product.weight, None))
    assert product.order is None
    assert list(orders.values()) == [None]


@fuses
def test_a_matrix_that_tells_no_orders_apart(orders) -> None:
    """Zeros have the order of their shape, which other numbers told; what is no number has none."""
    module = linear(40, 64)
    told = MatrixProduct.of(module).order
    orders.clear()
    module.weight.zero_()
    assert MatrixProduct.of(module).order == told
    orders.clear()
    module.weight.fill_(torch.nan)
    assert MatrixProduct.of(module).order is None


@fuses
def test_one_output_that_differs_leaves_all_to_the_library(monkeypatch, orders) -> None:
    right = nn.functional.linear

    def wrong_at_the_end(*given_tensors: torch.Tensor) -> torch.Tensor:
        out = right(*given_tensors)
        out[-1, -1] += 1e-3
        return out

    monkeypatch.setattr(nn.functional, "linear", wrong_at_the_end)
    assert MatrixProduct(linear(300, 64).weight, None, is_onednn=False).order is None


@fuses
def test_a_small_matrix_is_left_to_the_library(monkeypatch, orders) -> None:
    monkeypatch.setattr(products, "FEWEST_ENTRIES", 1 << 17)
    assert MatrixProduct.of(linear(255, 512)).order is None
    assert not orders
    found = MatrixProduct.of(linear(256, 512)).order
    assert list(orders.values()) == [found]
    assert not IS_KNOWN or found is not None


@fuses
def test_what_our_kernel_cannot_read_is_left_to_the_library() -> None:
    wide = numbers(64, 40)
    odd = numbers(40, 65).bfloat16()
    for weight in (wide.T, wide.T.bfloat16(), wide.half(), odd, odd[:, :64], torch.empty(40, 64, device="meta")):
        assert MatrixProduct(weight, None, is_onednn=False).order is None
    assert MatrixProduct(numbers(40, 64), numbers(80)[::2], is_onednn=False).order is None


@fuses
def test_a_room_holds_one_product_after_the_other() -> None:
    product, order, room = (
        MatrixProduct(numbers(300, 40), None, is_onednn=False),
        SumOrder(40, bias_first=False),
        OutputRoom(),
    )
    many, few = numbers(24, 40), numbers(9, 40)
    first = product.in_order(many, order, room)
    assert torch.equal(first, product.in_order(many, order))
    second = product.in_order(few, order, room)
    assert torch.equal(second, product.in_order(few, order))
    assert second.data_ptr() == first.data_ptr()
    assert room.of(25, 300, torch.float32).shape == (25, 300)
    assert room.of(9, 600, torch.bfloat16).dtype == torch.bfloat16
    assert room.of(9, 600, torch.bfloat16).data_ptr() == room.of(25, 300, torch.float32).data_ptr()


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, object]]:
    """Which way products went, how many rows they had, and the library's order where it was asked for."""
    taken: list[tuple[str, int, object]] = []
    for name in ("in_order", "by_library"):
        method = getattr(MatrixProduct, name)

        def counted(self: MatrixProduct, x: torch.Tensor, *rest: SumOrder, name=name, method=method) -> torch.Tensor:
            taken.append((name, x.shape[0], vars(self).get("order", "not asked for")))
            return method(self, x, *rest)

        monkeypatch.setattr(MatrixProduct, name, counted)
    return taken


def asked(engine: Engine) -> list[np.ndarray]:
    """Answers of packs of few rows, of many, of a session and of generation."""
    contexts = [[5, 6, 7, 8, 9 + i, 10, 11] for i in range(3)]
    few = engine.score(contexts[:1], [[12, 13]], [[14], [15]])
    long = [[first, *range(4, 90)] for first in range(3, 13)]
    many = engine.score([*long, *contexts], [[12 + i, 13] for i in range(9)], [[14], [15, 16]])
    with engine.session() as session:
        node = session.extend(None, contexts[0])
        within = session.score([node], [[12, 13]], [[14], [15]])
    generated = engine.generate([contexts[0], contexts[1]], max_new_tokens=6)
    return [few, many, within, *generated.token_ids]


def test_the_probe_of_numerics_is_of_the_library(ways) -> None:
    """Else a run that was begun before our kernel came, or knew an order, would not be continued."""
    engine = Engine(ZOO["llama"].build(), self_check=False)
    assert probe(engine._model)
    assert {way for way, *_ in ways} <= {"by_library"}
    assert bool(ways) == (engine.layers == "fused")


@fuses
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in ("llama", "qwen2", "gemma3", "phi3", "opt")),
        *((name, dtype) for name in ("qwen2", "gemma3", "phi3") for dtype in DTYPES[1:]),
    ],
    ids=str,
)
def test_an_engine_has_the_same_bits_with_and_without(name, dtype, ways, monkeypatch) -> None:
    """Whichever way is the quicker one, and if ours is always taken."""
    torch.manual_seed(0)
    engine = Engine(ZOO[name].build().to(dtype), pack_tokens=2 * few_rows())
    quickest = asked(engine)
    monkeypatch.setattr(products, "_QUICKER", First())
    assert f"torch.{engine.numerics['dtype']}" == str(dtype)
    ways.clear()
    ours = asked(engine)
    if engine.layers == "fused":
        assert {rows <= few_rows() for _, rows, _ in ways} == {True, False}
        assert all(way == "by_library" for way, rows, _ in ways if rows > few_rows())
        few = [(way, order) for way, rows, order in ways if 0 < rows <= few_rows() and order != "not asked for"]
        assert few
        assert all(way == ("by_library" if order is None else "in_order") for way, order in few)
        if IS_KNOWN or (dtype == torch.bfloat16 and not HAS_TILES):
            assert all(order is not None for _, order in few)
    ways.clear()
    monkeypatch.setattr(products, "FEW_ROWS", 0)
    librarys = asked(engine)
    assert all(way == "by_library" for way, *_ in ways)
    for one, other, another in zip(ours, librarys, quickest, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
        np.testing.assert_array_equal(np.asarray(one), np.asarray(another))
