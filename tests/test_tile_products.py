"""Products in the processor's tiles: the given order of sums to the last bit, in any company, laid out or not."""

import ctypes
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from isas import ISA_FLAGS
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from iclperm import _core
from iclperm.engine import Engine
from iclperm.engine.kernels import linear as products
from iclperm.engine.kernels import packed_weights
from iclperm.engine.kernels.attention import as_numpy
from iclperm.engine.kernels.linear import JoinedProducts, MatrixProduct, OutputRoom, multiplied_by
from iclperm.engine.kernels.packed_weights import PackedWeights
from iclperm.errors import RequestError
from iclperm.reference.products import in_tiles

CPU = torch.device("cpu")
CPUINFO = Path("/proc/cpuinfo")
SPECIAL = [0.0, -0.0, 1e-40, -1e-40, 1.1754944e-38, 3e38, -3e38, float("inf"), float("-inf"), float("nan")]
tiled = pytest.mark.needs_isa("amx_bf16")


@pytest.fixture(params=[pytest.param("amx_bf16", marks=tiled)])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ICLPERM_ISA", request.param)
    return request.param


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def module(outputs: int, inputs: int, *, bias: bool = False) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    made.weight.copy_(drawn(outputs, inputs, seed=1))
    if bias:
        made.bias.copy_(drawn(outputs, seed=2))
    return made


def multiplied(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **how: Any) -> torch.Tensor:
    num_outputs = how.pop("num_outputs", weight.shape[0])
    out = torch.empty(x.shape[0], num_outputs, dtype=torch.bfloat16)
    _core.tile_product(as_numpy(x), as_numpy(weight), as_numpy(out), None if bias is None else as_numpy(bias), **how)
    return out


def laid_out(weight: torch.Tensor, num_threads: int = 1) -> torch.Tensor:
    out = torch.empty(_core.laid_out_size(*weight.shape), dtype=torch.bfloat16)
    _core.lay_out_tiles(as_numpy(weight), as_numpy(out), num_threads=num_threads)
    return out


def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The shape of each product in tiles from now on."""
    shapes: list[tuple[int, int]] = []
    multiply = _core.tile_product

    def counted(*given: Any, **how: Any) -> None:
        shapes.append(given[2].shape)
        multiply(*given, **how)

    monkeypatch.setattr(_core, "tile_product", counted)
    return shapes


def qwen(hidden_size: int, intermediate_size: int, vocab_size: int = 640) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=intermediate_size, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).bfloat16().eval()


@tiled
@settings(deadline=None)
@given(
    shape=st.tuples(st.integers(1, 70), st.integers(1, 110), st.integers(1, 4)),
    has_bias=st.booleans(),
    special=st.booleans(),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_sums_have_their_order(shape, has_bias, special, num_threads, seed) -> None:
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    num_rows, num_outputs, steps = shape
    x, weight = (  # as they may lie: rows apart in memory
        torch.randn(rows, 32 * steps + apart, generator=generator).bfloat16()[:, : 32 * steps]
        for rows, apart in ((num_rows, 3), (num_outputs, 5))
    )
    bias = torch.randn(num_outputs, generator=generator).bfloat16() if has_bias else None
    if special:
        x[rng.integers(num_rows), rng.integers(32 * steps)] = float(rng.choice(SPECIAL))
        weight[rng.integers(num_outputs), rng.integers(32 * steps)] = float(rng.choice(SPECIAL))
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setenv("ICLPERM_ISA", "amx_bf16")
        got = multiplied(x, weight, bias, num_threads=num_threads)
        copy = laid_out(weight, num_threads)
        again = multiplied(x, copy, bias, is_laid_out=True, num_outputs=num_outputs, num_threads=num_threads)
        floats = (x.float().numpy(), weight.float().numpy(), None if bias is None else bias.float().numpy())
        wanted = torch.from_numpy(in_tiles(*floats)).bfloat16()
    np.testing.assert_array_equal(got.float(), wanted.float())
    np.testing.assert_array_equal(again.float(), wanted.float())


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (203, 64), (512, 1408), (96, 3008)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_has_the_same_bits_in_any_company(isa, outputs, inputs, bias) -> None:
    product = MatrixProduct.of(module(outputs, inputs, bias=bias))
    assert product.is_tiled
    x = drawn(700, inputs)
    whole, copy = product(x), product.packed()
    assert torch.equal(product.by_library(x, copy), whole)
    for begin, rows in ((0, 1), (3, 1), (5, 15), (7, 16), (1, 17), (100, 31), (9, 33), (200, 500)):
        some = slice(begin, begin + rows)
        assert torch.equal(product(x[some]), whole[some])
        assert torch.equal(product.by_library(x[some], copy), whole[some])


def test_it_is_right_to_the_rounding(isa) -> None:
    """Of bfloat16, which is far coarser than what sums of float32 lose."""
    x, made = drawn(64, 512), module(200, 512, bias=True)
    wanted = x.double() @ made.weight.double().T + made.bias.double()
    torch.testing.assert_close(MatrixProduct.of(made)(x).double(), wanted, rtol=2**-8, atol=2**-8)


def test_matrices_that_tiles_do_not_take_are_the_librarys(isa) -> None:
    weight = drawn(300, 512)
    for other in (weight[:, :40], weight[:, ::2], weight.T, weight.float(), weight[:0], drawn(300, 16)):
        product = MatrixProduct(other, None, is_onednn=False)
        assert not product.is_tiled
        assert product.by_library(drawn(8, other.shape[1]).to(other.dtype)).shape == (8, len(other))
    assert MatrixProduct(weight[10:, 64:], None, is_onednn=False).is_tiled


def test_once_laid_out_they_are_multiplied_as_one(isa, monkeypatch) -> None:
    copied = PackedWeights()
    copied.is_on = True
    each = [MatrixProduct.of(module(size, 640, bias=True), copied=copied) for size in (256, 128, 128)]
    joined, x = JoinedProducts(each, copied), drawn(packed_weights.PACKED_ROWS, 640)
    calls = told(monkeypatch)
    for found in (joined(x[:40]), joined(x)):  # before, and since
        for one, product in zip(found, each, strict=True):
            assert torch.equal(one, MatrixProduct(product.weight, product.bias, True)(x[: len(one)]))
    assert len(calls) == 3 + 3 + 1 + 3


def test_few_rows_are_written_to_a_room(isa) -> None:
    room, product = OutputRoom(), MatrixProduct.of(module(300, 64), is_head=True)
    few, many = drawn(products.few_rows(), 64), drawn(products.few_rows() + 1, 64)
    first = product(few, room)
    assert torch.equal(first, product(few))
    assert first.data_ptr() == product(few[:3], room).data_ptr() != product(many, room).data_ptr()


def test_an_engine_is_multiplied_in_tiles_and_its_rows_keep_their_bits(isa, monkeypatch) -> None:
    """Of sizes at which the library here takes other instructions for few rows than for many."""
    engine = Engine(qwen(512, 1408), pack_tokens=256)
    shapes = told(monkeypatch)
    contexts = [[5, 6, 7, 8, 9 + i, *range(20, 50)] for i in range(16)]
    together = engine.score(contexts, [[12, 13]], [[14], [15]])
    assert engine.row_invariant
    assert (engine.numerics["isa"], engine.numerics["products"], engine.numerics["head"]) == (isa, "amx", "amx")
    assert {outputs for _, outputs in shapes} >= {512, 128, 1408, 640}
    for context, scores in zip(contexts, together, strict=True):
        np.testing.assert_array_equal(engine.score([context], [[12, 13]], [[14], [15]])[0], scores)
    with engine.session() as session:
        for context, scores in zip(contexts, together, strict=True):
            node = session.extend(session.extend(None, context[:3]), context[3:])
            np.testing.assert_array_equal(session.score([node], [[12, 13]], [[14], [15]])[0], scores)


def test_what_tiles_do_not_take_is_named(isa) -> None:
    assert Engine(qwen(512, 1416), self_check=False).numerics["products"] == "amx and onednn"
    other = Engine(qwen(520, 1416), self_check=False).numerics
    assert (other["products"], other["head"]) == ("onednn", "onednn")


def test_another_instruction_set_within_an_engines_life(isa, monkeypatch) -> None:
    engine = Engine(qwen(128, 256))
    first = engine.score([[5, 6, 7]], [[12, 13]], [[14], [15]])
    monkeypatch.setenv("ICLPERM_ISA", "avx512_bf16")
    np.testing.assert_allclose(engine.score([[5, 6, 7]], [[12, 13]], [[14], [15]]), first, atol=0.1)
    monkeypatch.setenv("ICLPERM_ISA", isa)
    np.testing.assert_array_equal(engine.score([[5, 6, 7]], [[12, 13]], [[14], [15]]), first)


def test_a_head_of_another_class_is_torchs() -> None:
    class Head(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.T

    model = qwen(64, 96, vocab_size=200_000)
    model.set_output_embeddings(Head(model.lm_head.weight))
    engine = Engine(model, self_check=False)
    assert np.isfinite(engine.score([[5, 6, 7]], [[12, 13]], [[14], [15]])).all()
    assert engine.numerics["head"] == "torch"


@pytest.mark.skipif(not CPUINFO.is_file(), reason="the processor's flags are read on Linux")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instruction sets are those of x86")
def test_a_build_has_all_that_the_processor_has() -> None:
    """So that a test marked ``needs_isa`` is skipped for the lack of a processor alone."""
    (flags, *_) = (line.split() for line in CPUINFO.read_text().splitlines() if line.startswith("flags"))
    has = [name for name, needed in ISA_FLAGS.items() if needed <= set(flags)]
    arch_prctl, ask_for, tiles = 158, 0x1023, 18
    if "amx_bf16" in has and ctypes.CDLL(None).syscall(arch_prctl, ask_for, tiles):
        has.remove("amx_bf16")  # the system keeps none for this process
    assert _core.available_isas() == has, "the compiler knows fewer instruction sets than the processor"


def test_without_tiles_they_are_refused(monkeypatch) -> None:
    monkeypatch.setenv("ICLPERM_ISA", "baseline")
    assert not _core.has_tile_products()
    assert multiplied_by(CPU, torch.bfloat16, [(module(64, 64), slice(None))]) != "amx"
    assert not MatrixProduct.of(module(64, 64)).is_tiled
    with pytest.raises(RequestError, match="tiles are of amx_bf16 alone; this is baseline"):
        multiplied(drawn(4, 64), drawn(8, 64))
