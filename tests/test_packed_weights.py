"""Second copies of weights, laid out as oneDNN multiplies them: the same bits, in a call alone, and foretold."""

from typing import Any, NoReturn
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from ways import First, Last
from zoo import ZOO

from iclperm.engine import Engine, footprint, forward, layers
from iclperm.engine.forward import TreeForward
from iclperm.engine.kernels import linear as products
from iclperm.engine.kernels import packed_weights
from iclperm.engine.kernels.linear import (
    JoinedProducts,
    MatrixProduct,
    OutputRoom,
    SumOrder,
    few_rows,
    may_be_laid_out,
    uses_onednn,
)
from iclperm.engine.kernels.packed_weights import PackedWeights
from iclperm.engine.model import TreeModel

CPU = torch.device("cpu")
DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if uses_onednn(CPU, dtype)]


def packs(test: Any) -> Any:
    """A test of matrices laid out; there is none where oneDNN multiplies no layers, as with AVX2 alone."""
    return test if DTYPES else None


def drawn(outputs: int, inputs: int, dtype: torch.dtype, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(outputs)
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small matrices are laid out, too, and soon; what was found out of them is forgotten."""
    monkeypatch.setattr(products, "FEWEST_PACKED_ENTRIES", 0)
    monkeypatch.setattr(packed_weights, "PACKED_ROWS", 64)
    monkeypatch.setattr(packed_weights, "CHECKED_ROWS", 64)
    monkeypatch.setattr(products, "_KEPT", {})


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every product of a library's, whether its matrix was laid out."""
    seen: list[bool] = []
    by_library = MatrixProduct.by_library

    def counted(self: MatrixProduct, x: torch.Tensor, copy: torch.Tensor | None = None) -> torch.Tensor:
        seen.append(copy is not None)
        return by_library(self, x, copy)

    monkeypatch.setattr(MatrixProduct, "by_library", counted)
    return seen


@packs
@settings(deadline=None, max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    rows=st.integers(1, 90).map(lambda eights: 8 * eights),
    dtype=st.sampled_from(DTYPES or [torch.float32]),
    bias=st.booleans(),
    threads=st.integers(1, 2),
)
def test_a_matrix_laid_out_gives_the_same_bits(
    shape: tuple[int, int], rows: int, dtype: torch.dtype, bias: bool, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        product = MatrixProduct.of(drawn(*shape, dtype, bias=bias))
        x = torch.randn(max(rows, 8 * threads), shape[1]).to(dtype)
        with mock.patch.object(products, "FEWEST_PACKED_ENTRIES", 0):
            may_be = may_be_laid_out(product.weight)
        if may_be and product.keeps_bits_packed:
            assert torch.equal(product.by_library(x, product.packed()), product.by_library(x))
    finally:
        torch.set_num_threads(before)


@packs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(512, 128), (1408, 512), (512, 1408), (4864, 896)])
def test_shapes_of_models_keep_their_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert MatrixProduct.of(drawn(*shape, dtype)).keeps_bits_packed


@packs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_matrix_with_gaps_between_its_rows_is_torchs_to_multiply(dtype: torch.dtype) -> None:
    module = drawn(64, 48, dtype)
    for weight, is_onednn in (
        (torch.randn(64, 48).to(dtype), True),
        (torch.randn(48, 64).to(dtype).T, True),
        (torch.randn(64, 51).to(dtype)[:, 1:49], False),
    ):
        module.weight = nn.Parameter(weight, requires_grad=False)
        product = MatrixProduct.of(module)
        assert product.is_onednn is is_onednn
        assert product.packed_key is None or is_onednn
        x = torch.randn(16, 48).to(dtype)
        torch.testing.assert_close(product(x), nn.functional.linear(x, module.weight), rtol=1e-2, atol=1e-1)


@packs
def test_a_copy_is_made_once_enough_rows_came(small: None, multiplied: list[bool]) -> None:
    copied = PackedWeights()
    product = MatrixProduct.of(drawn(64, 48, DTYPES[0], bias=True), copied=copied)
    x = torch.randn(40, 48).to(DTYPES[0])
    wanted = product(x)
    copied.is_on = True
    assert product.keeps_bits_packed  # found out before products are counted
    multiplied.clear()
    results = [product(x) for _ in range(3)]
    assert all(torch.equal(result, wanted) for result in results)
    assert multiplied[1:] == [True, True]  # 80 rows by then
    assert not any(multiplied[:1])
    copied.end()
    multiplied.clear()
    assert torch.equal(product(x), wanted)
    assert not any(multiplied)


@packs
@settings(deadline=None, max_examples=30)
@given(
    outputs=st.lists(st.integers(1, 200), min_size=1, max_size=3),
    inputs=st.integers(1, 200),
    rows=st.integers(1, 40).map(lambda eights: 8 * eights),
    dtype=st.sampled_from(DTYPES or [torch.float32]),
    bias=st.booleans(),
)
def test_products_that_are_joined_give_the_same_bits(
    outputs: list[int], inputs: int, rows: int, dtype: torch.dtype, bias: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "FEWEST_PACKED_ENTRIES", 0)
        patch.setattr(packed_weights, "PACKED_ROWS", 1)
        copied = PackedWeights()
        each = [MatrixProduct.of(drawn(size, inputs, dtype, bias=bias), copied=copied) for size in outputs]
        joined, x = JoinedProducts(each, copied), torch.randn(max(rows, 16), inputs).to(dtype)
        wanted = joined(x)
        copied.is_on = True
        for _ in range(2):
            assert all(torch.equal(one, other) for one, other in zip(joined(x), wanted, strict=True))
        if not all(may_be_laid_out(product.weight) for product in each):
            assert not copied._copies
            return
        assert list(copied._copies) == [joined.packed_key], "something else was laid out, or nothing"
        assert (copied._copies[joined.packed_key] is None) == (not joined.keeps_bits_packed)


@packs
@pytest.mark.parametrize("shapes", [((512, 512), (128, 512), (128, 512)), ((896, 896), (128, 896), (128, 896))])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes_of_models_are_joined(shapes: tuple[tuple[int, int], ...], dtype: torch.dtype) -> None:
    each = [MatrixProduct.of(drawn(*shape, dtype, bias=True)) for shape in shapes]
    assert JoinedProducts(each, PackedWeights()).keeps_bits_packed


@packs
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "olmo2"])
def test_queries_keys_and_values_are_joined_but_in_the_last_layer(
    name: str, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(ZOO[name].build().to(DTYPES[0]))
    assert engine.layers == "fused"
    seen = set()
    by_library = JoinedProducts.by_library

    def counted(self: JoinedProducts, x: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        seen.add(self.packed_key)
        return by_library(self, x, copy)

    monkeypatch.setattr(JoinedProducts, "by_library", counted)
    asked(engine)
    seen.clear()  # what was found out of them
    asked(engine)
    assert len(seen) == engine._model.num_layers - 1


@packs
def test_few_rows_may_be_ours_beside_a_copy(monkeypatch: pytest.MonkeyPatch, multiplied: list[bool]) -> None:
    copied = PackedWeights()
    copied.is_on = True
    product = MatrixProduct.of(drawn(512, 512, DTYPES[0]), copied=copied)
    vars(product)["order"] = SumOrder(512, bias_first=False)  # as if it were the library's
    product(torch.randn(packed_weights.PACKED_ROWS, 512).to(DTYPES[0]))
    for way, is_ours in ((First(), True), (Last(), False)):
        monkeypatch.setattr(products, "_QUICKER", way)
        for rows in (few_rows(), few_rows() + 8):
            multiplied.clear()
            product(torch.randn(rows, 512).to(DTYPES[0]))
            assert multiplied == ([] if is_ours and rows <= few_rows() else [True])


@packs
def test_other_bits_are_never_taken(small: None, monkeypatch: pytest.MonkeyPatch, multiplied: list[bool]) -> None:
    packed = MatrixProduct.packed

    def other(self: MatrixProduct) -> torch.Tensor:
        nudged = nn.Linear(self.weight.shape[1], self.weight.shape[0], bias=False, dtype=self.weight.dtype)
        nudged.weight = nn.Parameter(self.weight * 1.01, requires_grad=False)
        return packed(MatrixProduct.of(nudged))

    monkeypatch.setattr(MatrixProduct, "packed", other)
    copied = PackedWeights()
    copied.is_on = True
    product = MatrixProduct.of(drawn(64, 48, DTYPES[0]), copied=copied)
    x = torch.randn(200, 48).to(DTYPES[0])
    assert not product.keeps_bits_packed
    multiplied.clear()
    plain = MatrixProduct.of(drawn(64, 48, DTYPES[0]))
    assert torch.equal(product(x), plain(x))
    assert not any(multiplied)


def asked(engine: Engine) -> list[np.ndarray]:
    contexts = [[5, 6, 7, 8, 9 + i, *range(10, 60)] for i in range(6)]
    scores = engine.score(contexts, [[12 + i, 13] for i in range(5)], [[14], [15, 16]])
    return [scores, *engine.generate(contexts[:3], max_new_tokens=5).token_ids]


@packs
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in ("llama", "gemma3", "phi3", "granite")
        for dtype in DTYPES
        if (name, dtype) != ("llama", torch.bfloat16)  # whose layers in bfloat16 are transformers' own
    ],
)
def test_answers_are_the_same(name: str, dtype: torch.dtype, small: None, multiplied: list[bool]) -> None:
    engine = Engine(ZOO[name].build().to(dtype))
    assert engine.layers == "fused"
    assert engine._model.copied.is_on
    found = asked(engine)
    linears = [module for module in engine._model.model.modules() if isinstance(module, nn.Linear)]
    assert any(multiplied) == any(may_be_laid_out(module.weight) for module in linears)
    assert not engine._model.copied._copies, "copies are in use after the call"
    multiplied.clear()
    engine._model.copied.is_on = False
    for one, other in zip(found, asked(engine), strict=True):
        np.testing.assert_array_equal(one, other)
    assert not any(multiplied)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of copies as they are made for a model, and not to be compared."""
    shapes: list[tuple[int, ...]] = []

    def counted(packed: Any) -> Any:
        def run(self: Any) -> torch.Tensor:
            copy: torch.Tensor = packed(self)
            if getattr(self, "copied", getattr(self, "_copied", None)) is not None:
                shapes.append(tuple(copy.shape))
            return copy

        return run

    for kind in (MatrixProduct, JoinedProducts):
        monkeypatch.setattr(kind, "packed", counted(kind.packed))
    return shapes


@packs
def test_copies_are_kept_for_the_next_call(
    small: None, made: list[tuple[int, ...]], multiplied: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ZOO["llama"].build().to(DTYPES[0])
    engine = Engine(model)
    found = asked(engine)
    assert made
    made.clear()
    multiplied.clear()
    for one, other in zip(found, asked(engine), strict=True):
        np.testing.assert_array_equal(one, other)
    assert any(multiplied)
    assert not made
    num_kept = len(engine._model.copied._kept)
    down = model.model.layers[0].mlp.down_proj
    down.weight = nn.Parameter(1.5 * down.weight, requires_grad=False)
    after = asked(engine)
    assert len(made) == num_kept, "copies of the model that was are kept"
    assert len(engine._model.copied._kept) == num_kept
    for one, other in zip(after, asked(Engine(model)), strict=True):
        np.testing.assert_array_equal(one, other)


@packs
def test_a_copy_is_of_the_numbers_there_are(
    small: None, made: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number written where nobody counts, and another instruction set or number of threads: a new copy."""
    copied = PackedWeights()
    copied.is_on = True
    module = drawn(64, 48, DTYPES[0])
    product = MatrixProduct.of(module, copied=copied)
    assert product.keeps_bits_packed  # found out before copies are counted
    x = torch.randn(64, 48).to(DTYPES[0])

    def copies(threads: int = 0) -> int:
        made.clear()
        before = torch.get_num_threads()
        torch.set_num_threads(threads or before)
        try:
            copied.end()
            torch.testing.assert_close(product(x), nn.functional.linear(x, module.weight), rtol=1e-2, atol=1e-1)
        finally:
            torch.set_num_threads(before)
        return len(made)

    assert [copies() for _ in range(3)] == [1, 0, 0]
    module.weight.data[5, 7] += 3.0
    assert [copies() for _ in range(2)] == [1, 0]
    module.weight.data.neg_()
    assert [copies() for _ in range(2)] == [1, 0]
    assert copies(3 - min(2, torch.get_num_threads())), "that of another number of threads was taken"
    monkeypatch.setenv("ICLPERM_ISA", "avx2")
    assert copies(), "that of another instruction set was taken"
    copied.begin("another")
    assert copies() == 1


@packs
def test_weights_written_to_between_calls_are_seen(small: None, multiplied: list[bool]) -> None:
    """Also where torch does not count: a single number, through ``data``."""
    model = ZOO["llama"].build().to(DTYPES[0])
    engine = Engine(model)
    before = asked(engine)[0]
    model.model.layers[0].mlp.down_proj.weight.data[3, 5] += 100.0
    after = asked(engine)[0]
    assert any(multiplied)
    assert not np.array_equal(before, after)
    np.testing.assert_array_equal(after, asked(Engine(model))[0])


@packs
@pytest.mark.parametrize("way", [First(), Last()], ids=["apart", "joined"])
def test_few_rows_are_joined_where_that_is_quicker(
    way: First | Last, small: None, multiplied: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = PackedWeights()
    copied.is_on = True
    each = [MatrixProduct.of(drawn(size, 512, DTYPES[0]), copied=copied) for size in (512, 128)]
    joined = JoinedProducts(each, copied)
    for product in joined._products:
        vars(product)["order"] = SumOrder(512, bias_first=False)  # as if it were the library's
    if not joined.keeps_bits_packed:
        pytest.fail("products of these shapes are joined")
    monkeypatch.setattr(products, "_QUICKER", way)
    apart: list[int] = []
    monkeypatch.setattr(JoinedProducts, "apart", lambda self, x: apart.append(len(x)) or [x, x])
    few, many = few_rows(), few_rows() + 8
    joined(torch.randn(packed_weights.PACKED_ROWS + few, 512).to(DTYPES[0]))
    for rows in (few, many):
        joined(torch.randn(rows, 512).to(DTYPES[0]))
    assert apart == ([few] if isinstance(way, First) else [])


@packs
def test_the_quicker_way_is_told_by_rows_threads_and_copy(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[Any] = []

    class Told(First):
        def run(self, key: Any, *ways: Any) -> Any:
            keys.append(key)
            return super().run(key, *ways)

    monkeypatch.setattr(products, "_QUICKER", Told())
    copied = PackedWeights()
    product = MatrixProduct.of(drawn(512, 512, DTYPES[0]), copied=copied)
    vars(product)["order"] = SumOrder(512, bias_first=False)  # as if it were the library's
    x = torch.randn(few_rows(), 512).to(DTYPES[0])
    before = torch.get_num_threads()
    try:
        product(x)
        product(x[:-8])
        copied.is_on = True
        product(torch.randn(packed_weights.PACKED_ROWS + few_rows(), 512).to(DTYPES[0]))
        product(x)
        torch.set_num_threads(3 - min(2, before))
        product(x[:8])
        torch.set_num_threads(before)
        product(x[:8])
    finally:
        torch.set_num_threads(before)
    assert len(set(keys)) == len(keys) == 5


@packs
def test_biases_written_to_between_calls_are_seen(small: None) -> None:
    """Of queries, keys and values, which are joined, and also where torch does not count."""
    model = ZOO["qwen2"].build().to(DTYPES[0])
    engine = Engine(model)
    before = asked(engine)[0]
    model.model.layers[1].self_attn.q_proj.bias.data[0] += 3.0  # none of the numbers that `Condition` looks at
    after = asked(engine)[0]
    assert not np.array_equal(before, after)
    np.testing.assert_array_equal(after, asked(Engine(model))[0])


@packs
def test_weights_written_to_while_another_call_is_open_are_seen(small: None, multiplied: list[bool]) -> None:
    model = ZOO["llama"].build().to(DTYPES[0])
    engine = Engine(model)
    contexts = [[5, 6, 7, 8, 9 + i, *range(10, 60)] for i in range(6)]
    blocks = engine.stream(contexts, [[12 + i, 13] for i in range(5)], [[14], [15, 16]])
    next(blocks)
    assert any(multiplied)
    model.model.layers[0].mlp.down_proj.weight.data[3, 5] += 100.0
    found = asked(engine)[0]
    np.testing.assert_array_equal(found, asked(Engine(model))[0])
    blocks.close()


@packs
def test_weights_written_to_are_seen_by_a_call_within_a_call(small: None, multiplied: list[bool]) -> None:
    model = ZOO["llama"].build().to(DTYPES[0])
    engine = Engine(model, pack_tokens=64)
    contexts = [[5, 6, 7, 8, 9 + i, *range(10, 60)] for i in range(6)]
    asked_for = contexts, [[12 + i, 13] for i in range(5)], [[14], [15, 16]]
    within: list[np.ndarray] = []

    def write_and_ask(*_: Any) -> None:
        if any(multiplied) and not within:
            assert engine._model.copied._copies, "the call that this is within has none"
            model.model.layers[0].mlp.down_proj.weight.data[3, 5] += 100.0
            within.append(engine.score(*asked_for))

    engine.score(*asked_for, progress=write_and_ask)
    np.testing.assert_array_equal(*within, Engine(model).score(*asked_for))


@packs
def test_what_our_kernel_multiplies_in_a_room_is_not_copied() -> None:
    copied = PackedWeights()
    copied.is_on = True
    product = MatrixProduct.of(drawn(512, 512, DTYPES[0]), is_head=True, copied=copied)
    vars(product)["order"] = SumOrder(512, bias_first=False)  # as if it were the library's
    x, room = torch.randn(few_rows(), 512).to(DTYPES[0]), OutputRoom()
    for _ in range(2 * packed_weights.PACKED_ROWS // len(x)):
        product(x, room)
    assert not copied._rows
    assert not copied._copies


@packs
def test_a_copy_that_finds_no_memory_is_done_without(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = PackedWeights()
    copied.is_on = True
    product = MatrixProduct.of(drawn(64, 48, DTYPES[0]), copied=copied)
    x = torch.randn(200, 48).to(DTYPES[0])
    wanted = MatrixProduct.of(drawn(64, 48, DTYPES[0]))(x)
    with monkeypatch.context() as patch:
        patch.setattr(MatrixProduct, "packed", no_memory)
        assert torch.equal(product(x), wanted)
    assert not copied.give_up(), "none took any memory"
    copied.is_on = True
    assert torch.equal(product(x), wanted)
    copied.end()
    assert torch.equal(product(x), wanted)
    assert copied.give_up(), "one did"
    assert not copied.is_on
    assert not copied.give_up()
    assert torch.equal(product(x), wanted)


def no_memory(*_: object) -> NoReturn:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory")


@packs
def test_copies_are_given_up_before_packs_are_halved(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(ZOO["llama"].build().to(DTYPES[0]))
    wanted = asked(engine)
    failed: list[bool] = []
    run = TreeModel.run

    def fails_once(self: TreeModel, tree: TreeForward) -> torch.Tensor:
        hidden = run(self, tree)
        if self.copied._copies and not failed:
            failed.append(True)
            no_memory()
        return hidden

    monkeypatch.setattr(TreeModel, "run", fails_once)
    for one, other in zip(wanted, asked(engine), strict=True):
        np.testing.assert_array_equal(one, other)
    assert failed
    assert not engine._model.copied.is_on
    assert engine.totals.num_splits == 0


@packs
def test_no_copies_where_memory_is_short(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ZOO["llama"].build().to(DTYPES[0])
    engine = Engine(model)
    assert engine._sizes.copied > 0
    assert not Engine(model, memory_budget=1 << 30)._model.copied.is_on
    most = 8 * engine._sizes.copied
    monkeypatch.setattr(footprint, "all_bytes", lambda _: most)
    assert Engine(model)._model.copied.is_on
    monkeypatch.setattr(footprint, "all_bytes", lambda _: most - 1)
    assert not Engine(model)._model.copied.is_on
    assert not Engine(model)._sizes.copied


@packs
@pytest.mark.parametrize("logit_bytes", [16 << 20, 1 << 20], ids=["many rows of logits", "few"])
@pytest.mark.parametrize(
    "isa", [pytest.param(isa, marks=pytest.mark.needs_isa(isa)) for isa in ("avx512", "avx512_bf16", "amx_bf16")]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_are_foretold(dtype: torch.dtype, isa: str, logit_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes as all copies of layers take that a call makes, and the head's, but where few rows alone meet it
    and our kernel multiplies these: it does not if it knows no order."""
    from iclperm.bench.models import MODELS

    monkeypatch.setenv("ICLPERM_ISA", isa)
    monkeypatch.setattr(forward, "_LOGITS_IN_HEAP", logit_bytes)
    engine = Engine.from_pretrained(MODELS["qwen2-25m"].folder(), dtype=dtype)
    engine.loglikelihood([([1], [2])])
    made: dict[int, int] = {}
    end = PackedWeights.end

    def counted(self: PackedWeights) -> None:
        for key, copy in self._copies.items():
            for address, shape, _ in () if copy is None else key if isinstance(key[0], tuple) else (key,):
                made[address] = dtype.itemsize * int(np.prod(shape))
        end(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedWeights, "end", counted)
        patch.setattr(packed_weights, "PACKED_ROWS", 8)
        contexts = [[first, *range(4, 200)] for first in range(3, 15)]
        engine.score(contexts, [[12 + i, 13] for i in range(40)], [[14], [15, 16]])
    assert sum(made.values()) == engine._sizes.copied


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "granite"])
def test_an_mlp_in_parts_keeps_every_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(ZOO[name].build())
    assert engine.layers == "fused"
    whole = asked(engine)
    parts: list[int] = []
    together = layers._together

    def counted(x: torch.Tensor, width: int) -> list[slice]:
        found = list(together(x, width))
        assert sum(part.stop - part.start for part in found) == len(x)
        assert min(part.stop - part.start for part in found) >= min(8 * torch.get_num_threads(), len(x))
        parts.append(len(found))
        return found

    monkeypatch.setattr(layers, "_together", counted)
    monkeypatch.setattr(layers, "_INNER_BYTES", 1)
    monkeypatch.setattr(layers, "_FEWEST_AT_ONCE", 32)
    for one, other in zip(whole, asked(engine), strict=True):
        np.testing.assert_array_equal(one, other)
    assert max(parts) > 1
