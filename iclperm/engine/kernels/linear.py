"""Matrix products of our decoder layers and of the head: oneDNN's on an x86 CPU, torch's own elsewhere; ours in tiles.

torch sends float32 products on a CPU to MKL, which on AMD's processors keeps to AVX2: where there is AVX-512 it is
15-25 % slower than oneDNN. With AVX2 alone it is the faster one in layers, but not for the many outputs of the head
(benchmarks/products.py). Its rows can change their last bits below 8 rows a thread; oneDNN's do not from 2 rows on. In
bfloat16 torch takes oneDNN itself.

Of few rows either reaches a third to two thirds of what the processor can do. Both add up by a plain rule, chains of
fused multiplications over blocks of columns, oneDNN bfloat16 in pairs, so few rows are multiplied by a kernel of our
own (csrc/thin_product.hpp) in the very order that the library was found to have: the same bits, sooner.

Where the processor multiplies bfloat16 in tiles (AMX) the library takes them or not by how many rows there are, and the
last bits with them. There all rows are multiplied in tiles by a kernel of our own (csrc/tile_product.hpp).
"""

from __future__ import annotations

import platform
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import numpy as np
import torch
from torch import nn

from iclperm import _core
from iclperm.engine.kernels.attention import as_numpy
from iclperm.engine.kernels.packed_weights import Key, PackedWeights
from iclperm.engine.kernels.quicker import Quicker
from iclperm.engine.shapes import padded_rows

_X86 = ("x86_64", "AMD64")
_DTYPES = (torch.float32, torch.bfloat16)
_ALL = slice(None)
FEW_ROWS = 128
"""For each of up to two threads: of so many our own kernel may be faster (benchmarks/products.py). Beside an AVX-512
library, half."""
FEWEST_ENTRIES = 1 << 16
"""Of a matrix that our own kernel multiplies; a product with a smaller one takes no time to speak of."""
FEWEST_PACKED_ENTRIES = 1 << 16
"""Of a matrix that is laid out once; likewise."""
TILE_COLUMNS = 32
"""Of which a tile's product adds up so many: a matrix that is multiplied in tiles has whole ones."""
_LAID_OUT_FOR = 2048  # rows, by which oneDNN chooses a layout
_PACKED_OUTPUTS = 1024  # of a drawn one
_COMPARED_BYTES = 32 << 20  # that a product gives, of whatever many outputs
_COMPARED_ROWS = (8, 72, 1024)  # oneDNN has other loops for few rows, for some, and for many
_BLOCKS = (192, 256, 384, 512, 768, 1024, 2048)  # of columns: MKL's is 192, oneDNN's 1,024 with AVX2
_TRIED_OUTPUTS = 96
_FEWEST_COLUMNS = 16  # with fewer, orders can hardly be told apart


def uses_onednn(device: torch.device, dtype: torch.dtype, *, is_head: bool = False) -> bool:
    """Whether ``linear`` runs oneDNN's product rather than torch's own."""
    return device.type == "cpu" and _is_onednn(dtype, is_head)


def multiplied_by(
    device: torch.device, dtype: torch.dtype, products: Iterable[tuple[nn.Linear, slice]], *, is_head: bool = False
) -> str:
    """What ``linear`` runs of these: ``amx``, which is ours in tiles, ``onednn``, ``torch``, or two of them."""
    library = "onednn" if uses_onednn(device, dtype, is_head=is_head) else "torch"
    if device.type != "cpu" or not _is_tiled(dtype):
        return library
    are_tiled = {MatrixProduct.of(*product).is_tiled for product in products}
    return " and ".join(["amx"] * (True in are_tiled) + [library] * (False in are_tiled))


def _is_tiled(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and _core.has_tile_products()


def may_be_laid_out(weight: torch.Tensor) -> bool:
    """Whether a matrix of this shape may have a second copy, on a CPU. Not in bfloat16 where the library takes tiles by
    how many rows there are: with a matrix laid out that is another number."""
    if weight.numel() < FEWEST_PACKED_ENTRIES:
        return False
    if weight.dtype != torch.bfloat16 or "amx_bf16" not in _core.available_isas():
        return True
    return _is_tiled(weight.dtype) and weight.shape[-1] % TILE_COLUMNS == 0


@cache
def _is_onednn(dtype: torch.dtype, is_head: bool) -> bool:
    return (
        dtype in _DTYPES
        and platform.machine() in _X86
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and (is_head or "avx512" in _core.available_isas() if dtype == torch.float32 else _has_bfloat16())
    )


def _has_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 here at all; torch has a way of its own elsewhere."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def few_rows() -> int:
    """How many rows are few, with the threads of now."""
    share = 1 if _core.isa() in ("baseline", "avx2") else 2
    return FEW_ROWS * min(2, torch.get_num_threads()) // share


@dataclass(frozen=True)
class SumOrder:
    """How a product is added up: chains over ``block`` columns, one after the other, the bias first or last."""

    block: int
    bias_first: bool


class OutputRoom:
    """Memory that products of few rows are written to, one after the other: fresh pages cost a fifth of a head's."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def of(self, num_rows: int, num_outputs: int, dtype: torch.dtype) -> torch.Tensor:
        """[num_rows, num_outputs] of ``dtype``, in place of what was there."""
        size = num_rows * num_outputs * dtype.itemsize
        if self._bytes.numel() < size:
            self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")  # first, so that both never exist
            self._bytes = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._bytes[:size].view(dtype).view(num_rows, num_outputs)


@dataclass(frozen=True)
class MatrixProduct:
    """x [M, H] @ weight.T + bias [M, N] of an unhooked module's numbers, or those ``outputs`` of the N alone.

    They are the module's of when this was made, wherever they lie. A row's bits are the same however many there are,
    and whether a second copy of them is ``copied``.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    is_onednn: bool
    copied: PackedWeights | None = None

    @classmethod
    def of(
        cls,
        module: nn.Linear,
        outputs: slice = _ALL,
        *,
        is_head: bool = False,
        copied: PackedWeights | None = None,
    ) -> MatrixProduct:
        """The product of a module as it is now."""
        weight: torch.Tensor = module.weight
        bias: torch.Tensor | None = module.bias
        if outputs != _ALL:
            weight, bias = weight[outputs], None if bias is None else bias[outputs]
        is_dense = weight.is_contiguous() or weight.T.is_contiguous()  # else oneDNN takes a thousand times as long
        is_onednn = is_dense and uses_onednn(weight.device, weight.dtype, is_head=is_head)
        return cls(weight, bias, is_onednn, copied)

    def __call__(self, x: torch.Tensor, room: OutputRoom | None = None) -> torch.Tensor:
        """Of x [M, H]; where our kernel runs, in the ``room`` if one is given."""
        num_rows = x.shape[0]
        if self.is_tiled:
            copy = None if self.copied is None else self.copied.of(self, num_rows)
            if room is None or num_rows > few_rows():
                return self.by_library(x, copy)
            return _in_tiles(x, self.weight if copy is None else copy, self.weight.shape[0], self.bias, room)
        order = self.order if num_rows <= few_rows() else None
        if order is not None and room is not None:  # what oneDNN gives takes new pages, which cost more than it saves
            return self.in_order(x, order, room)
        copy = None if self.copied is None else self.copied.of(self, num_rows)
        if order is None:
            return self.by_library(x, copy)
        key = (self.layout, *_here(), num_rows, copy is not None)
        return _QUICKER.run(key, lambda: self.in_order(x, order), lambda: self.by_library(x, copy))

    def by_library(self, x: torch.Tensor, copy: torch.Tensor | None = None) -> torch.Tensor:
        """Of x [M, H], as many rows are: in tiles, by oneDNN or torch, of the ``packed`` matrix if that is given."""
        weight = self.weight if copy is None else copy
        if self.is_tiled:
            return _in_tiles(x, weight, self.weight.shape[0], self.bias)
        if not self.is_onednn:
            return nn.functional.linear(x, weight, self.bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, self.bias, "none", [], "")
        return product

    def packed(self) -> torch.Tensor:
        """The matrix as oneDNN, or our kernel in tiles, lays it out, which `by_library` alone can read."""
        weight = self.weight.detach()
        if self.is_tiled:
            copy = weight.new_empty(_core.laid_out_size(*weight.shape))
            _core.lay_out_tiles(as_numpy(weight), as_numpy(copy), num_threads=torch.get_num_threads())
            return copy
        copied: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _LAID_OUT_FOR)
        return copied

    @property
    def is_tiled(self) -> bool:
        """Whether every number of rows is multiplied in the processor's tiles, as long as ``ICLPERM_ISA`` stays."""
        return self._fits_tiles and _is_tiled(self.weight.dtype)

    @cached_property
    def _fits_tiles(self) -> bool:
        """Whether it would be where there are tiles."""
        weight, bias = self.weight, self.bias
        is_ours = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and weight.stride(1) == 1
        return (
            is_ours and weight.shape[1] % TILE_COLUMNS == 0 < weight.numel() and (bias is None or bias.stride(0) == 1)
        )

    @cached_property
    def packed_key(self) -> Key | None:
        """Of the memory that the matrix lies in; None if it is not one to be laid out once."""
        weight = self.weight
        if not (self.is_onednn or self.is_tiled) or not may_be_laid_out(weight):
            return None
        return weight.data_ptr(), tuple(weight.shape), weight.stride()

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrix."""
        return self.weight.dtype

    @cached_property
    def layout(self) -> tuple[Hashable, ...]:
        """What the library may multiply it by, beside the numbers."""
        return self.weight.dtype, *self.weight.shape, *self.weight.stride(), self.bias is not None

    def numbers(self) -> Key:
        """What tells a copy of the matrix as it is, by the library as it is, from others; all numbers are read."""
        weight = self.weight.detach()
        rows = weight if weight.stride(1) == 1 else weight.T
        return *_here(), _core.checksum(as_numpy(rows), num_threads=torch.get_num_threads())

    @property
    def keeps_bits_packed(self) -> bool:
        """Whether a product of this shape has the same bits with its matrix ``packed``: found out once of a library.

        Cost, the first time: some products with a drawn matrix of 1,024 outputs at most, and with this one.
        """
        if self.is_tiled:
            return True
        key = (*self.layout, *_here())
        if key not in _KEPT:
            outputs, columns = self.weight.shape
            numbers = _telling_numbers(max(_COMPARED_ROWS), min(outputs, _PACKED_OUTPUTS), columns)
            x, weight, bias = (each.to(self.weight.dtype) for each in numbers)
            drawn = MatrixProduct(weight, None if self.bias is None else bias, is_onednn=True)
            _KEPT[key] = all(product._keeps_bits_of(x) for product in (drawn, self))
        return _KEPT[key]

    @torch.inference_mode()
    def _keeps_bits_of(self, x: torch.Tensor) -> bool:
        copy, a_row = self.packed(), self.weight.shape[0] * x.element_size()
        return all(
            torch.equal(self.by_library(x[:rows], copy), self.by_library(x[:rows])) for rows in _compared_rows(a_row)
        )

    @property
    def has_order(self) -> bool:
        """Whether our kernel multiplies few rows; of a matrix without numbers, whether it could."""
        if self.weight.is_meta:
            is_paired = self.weight.dtype == torch.bfloat16
            return not _is_tiled(self.weight.dtype) and _core.has_fused_products(bfloat16=is_paired)
        return self.order is not None

    def in_order(self, x: torch.Tensor, order: SumOrder, room: OutputRoom | None = None) -> torch.Tensor:
        """Of x [M, H], by our kernel for few rows."""
        num_rows, num_outputs = x.shape[0], self.weight.shape[0]
        out = x.new_empty(num_rows, num_outputs) if room is None else room.of(num_rows, num_outputs, x.dtype)
        weight, bias = self._arrays
        _core.thin_product(
            as_numpy(x),
            weight,
            as_numpy(out),
            bias,
            block=order.block,
            bias_first=order.bias_first,
            num_threads=torch.get_num_threads(),
        )
        return out

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray | None]:
        return as_numpy(self.weight.detach()), None if self.bias is None else as_numpy(self.bias.detach())

    @cached_property
    def order(self) -> SumOrder | None:
        """That of the library for a product of this shape, found out once; None where our kernel does not know it.

        Cost, the first time: the library's product of the fewest rows that it is run with, and ours.
        """
        weight, bias = self.weight, self.bias
        if weight.device.type != "cpu" or weight.dtype not in _DTYPES or weight.numel() < FEWEST_ENTRIES:
            return None
        if self.is_tiled:
            return None
        is_paired = weight.dtype == torch.bfloat16
        if not _core.has_fused_products(bfloat16=is_paired):
            return None
        if weight.stride(1) != 1 or weight.data_ptr() % 4 or (bias is not None and not bias.is_contiguous()):
            return None
        if is_paired and (weight.shape[1] % 2 or weight.stride(0) % 2):
            return None
        layout = (weight.dtype, *weight.shape, weight.stride(0), bias is not None)
        key = (self.is_onednn, *layout, *_here())
        if key not in _ORDERS:
            _ORDERS[key] = self._found_order()
        return _ORDERS[key]

    @torch.inference_mode()
    def _found_order(self) -> SumOrder | None:
        """The order that gives every bit of the library's product; None unless no other one does.

        What it gives must not depend on the numbers that a module happens to have, as zeros, which all orders treat
        alike: it is found by products with a drawn matrix of few outputs, and must fit the module's, too.
        """
        num_outputs, num_columns = self.weight.shape
        if num_columns < _FEWEST_COLUMNS:
            return None
        num_rows, few = padded_rows(1, self.weight.device), min(_TRIED_OUTPUTS, num_outputs)
        x, weight, bias = (numbers.to(self.weight.dtype) for numbers in _telling_numbers(num_rows, few, num_columns))
        tried = MatrixProduct(weight, None if self.bias is None else bias, self.is_onednn)
        wanted = tried.by_library(x)
        fitting = [
            order
            for order in _orders(num_columns, self.weight.dtype, self.bias)
            if torch.equal(tried.in_order(x, order), wanted)
        ]
        if len(fitting) != 1:
            return None
        (found,) = fitting
        x = torch.randn(num_rows, num_columns, generator=torch.Generator("cpu").manual_seed(1), device="cpu").to(
            x.dtype
        )
        return found if torch.equal(self.in_order(x, found), self.by_library(x)) else None


class JoinedProducts:
    """x [M, H] with several matrices, each product [M, N]: once they are laid out, as one, for few outputs take long.

    Every bit is that of the ``products`` by themselves. Second copies are ``copied``, of all together where that can
    be; None: they are never joined.
    """

    def __init__(self, products: Sequence[MatrixProduct], copied: PackedWeights | None) -> None:
        can_be = all(each.packed_key is not None for each in products)
        can_be &= len({(each.is_tiled, each.bias is None) for each in products}) == 1
        self._copied = copied if can_be else None
        self._products = products if self._copied is None else [replace(each, copied=None) for each in products]

    def __call__(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        num_rows = x.shape[0]
        copy = None if self._copied is None else self._copied.of(self, num_rows)
        if copy is None:
            return self.apart(x)
        if num_rows > few_rows() or all(product.order is None for product in self._products):
            return self.joined(x, copy)
        key = (*(product.layout for product in self._products), *_here(), num_rows)
        return _QUICKER.run(key, lambda: self.apart(x), lambda: self.joined(x, copy))

    def apart(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Each product by itself."""
        return [product(x) for product in self._products]

    def joined(self, x: torch.Tensor, copy: torch.Tensor) -> Sequence[torch.Tensor]:
        """Each product, with the matrices as ``packed``."""
        return torch.split(self.by_library(x, copy), [each.weight.shape[0] for each in self._products], dim=1)

    def by_library(self, x: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        """All products [M, N] side by side, with the matrices as ``packed``."""
        if self._products[0].is_tiled:
            return _in_tiles(x, copy, self.shape[0], self._bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, copy, self._bias, "none", [], "")
        return product

    @property
    def _bias(self) -> torch.Tensor | None:
        biases = [each.bias for each in self._products if each.bias is not None]
        return torch.cat(biases) if biases else None

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrices."""
        return self._products[0].weight.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs of all, and inputs."""
        return sum(each.weight.shape[0] for each in self._products), self._products[0].weight.shape[1]

    def as_one(self) -> MatrixProduct:
        """The product with all matrices, in memory of its own."""
        return MatrixProduct(torch.cat([each.weight.detach() for each in self._products]), self._bias, is_onednn=True)

    def packed(self) -> torch.Tensor:
        """The matrices as oneDNN lays them out together, which `by_library` alone can read."""
        return self.as_one().packed()

    @cached_property
    def packed_key(self) -> Key:
        """Of the memory that the matrices lie in."""
        return tuple(product.packed_key for product in self._products)

    def numbers(self) -> Key:
        """As of `MatrixProduct`, of every matrix."""
        return tuple(product.numbers() for product in self._products)

    @property
    def keeps_bits_packed(self) -> bool:
        """As of `MatrixProduct`, told from what the products give by themselves."""
        if self._products[0].is_tiled:
            return True
        layouts = tuple(product.layout for product in self._products)
        key = (layouts, *_here())
        if key not in _KEPT:
            numbers = [
                _telling_numbers(max(_COMPARED_ROWS), min(outputs, _PACKED_OUTPUTS), columns)
                for outputs, columns in (product.weight.shape for product in self._products)
            ]
            dtype = self.dtype
            x = numbers[0][0].to(dtype)
            drawn = JoinedProducts(
                [
                    MatrixProduct(weight.to(dtype), None if each.bias is None else bias.to(dtype), is_onednn=True)
                    for each, (_, weight, bias) in zip(self._products, numbers, strict=True)
                ],
                self._copied,
            )
            _KEPT[key] = all(joined._keeps_bits_of(x) for joined in (drawn, self))
        return _KEPT[key]

    @torch.inference_mode()
    def _keeps_bits_of(self, x: torch.Tensor) -> bool:
        copy, a_row = self.packed(), self.shape[0] * x.element_size()
        for some in (x[:rows] for rows in _compared_rows(a_row)):
            apart = torch.cat([product.by_library(some) for product in self._products], dim=1)
            if not torch.equal(self.by_library(some, copy), apart):
                return False
        return True


def _in_tiles(
    x: torch.Tensor,
    weight: torch.Tensor,
    num_outputs: int,
    bias: torch.Tensor | None,
    room: OutputRoom | None = None,
) -> torch.Tensor:
    """x [M, H] @ weight.T + bias [M, N] by our kernel in tiles; the weight as it is, or as it is laid out [..]."""
    num_rows = x.shape[0]
    out = x.new_empty(num_rows, num_outputs) if room is None else room.of(num_rows, num_outputs, x.dtype)
    _core.tile_product(
        as_numpy(x),
        as_numpy(weight.detach()),
        as_numpy(out),
        None if bias is None else as_numpy(bias.detach()),
        is_laid_out=weight.ndim == 1,
        num_threads=torch.get_num_threads(),
    )
    return out


def _compared_rows(a_row: int) -> Iterator[int]:
    """Rows that are compared of products that give so many bytes a row."""
    yield from (rows for rows in _COMPARED_ROWS if rows * a_row <= _COMPARED_BYTES or rows == _COMPARED_ROWS[0])


def _telling_numbers(num_rows: int, num_outputs: int, num_columns: int) -> tuple[torch.Tensor, ...]:
    """x [M, H], a matrix [N, H] and a bias [N] whose products tell orders of sums apart, also when they are rounded.

    Every product of a column is taken back by that of another one, so that what is left of a sum is how it was rounded
    on the way; the bias is no larger than that.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = partial(torch.randn, generator=generator, device="cpu")  # whatever device is the default one
    half, place = num_columns // 2, torch.randperm(num_columns, generator=generator, device="cpu")
    x, weight = drawn(num_rows, num_columns), drawn(num_outputs, num_columns)
    x[:, place[half : 2 * half]] = x[:, place[:half]]
    weight[:, place[half : 2 * half]] = -weight[:, place[:half]]
    return x, weight, 1e-6 * drawn(num_outputs)


def _here() -> tuple[object, ...]:
    """What a library's way with a product depends on beside its shape."""
    return torch.get_num_threads(), _core.isa()


_QUICKER = Quicker()
_ORDERS: dict[tuple[object, ...], SumOrder | None] = {}
_KEPT: dict[tuple[object, ...], bool] = {}


def _orders(num_columns: int, dtype: torch.dtype, bias: torch.Tensor | None) -> Iterator[SumOrder]:
    """Every order that is tried, each once: whole rows, halves, blocks that libraries have, and one that none has."""
    for block in dict.fromkeys((num_columns, *_BLOCKS, num_columns // 2, num_columns // 2 - 1)):
        if dtype == torch.bfloat16 and block % 2:
            continue
        if block < num_columns and bias is not None:
            yield SumOrder(block, bias_first=True)
        if block <= num_columns:
            yield SumOrder(block, bias_first=False)


def linear(
    module: nn.Linear,
    x: torch.Tensor,
    outputs: slice = _ALL,
    *,
    is_head: bool = False,
    room: OutputRoom | None = None,
    copied: PackedWeights | None = None,
) -> torch.Tensor:
    """The `MatrixProduct` of a module as it is now with x [M, H]."""
    return MatrixProduct.of(module, outputs, is_head=is_head, copied=copied)(x, room)
