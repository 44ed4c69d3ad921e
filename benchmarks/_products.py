"""The matrix products of a call, and what the fastest ones known here would take for them."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch

from iclperm.engine.kernels.linear import JoinedProducts, MatrixProduct, uses_onednn
from iclperm.engine.kernels.packed_weights import PackedWeights

# Rows that are measured; between them lines are straight.
ROWS = (8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096)
MOST_LOGITS = 1 << 26
MOST_OURS = 256
PASSES = 3
Shape = tuple[int, int]
Product = Callable[[torch.Tensor], torch.Tensor]


def clock() -> float:
    """Of this thread's work where it works alone, else of the wall."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


@dataclass
class Products:
    """All products within `recorded`: how often which rows met a matrix [outputs, inputs], and the seconds of each.

    ``laying_out`` are the seconds that second copies took to be made and compared, which are in none of these.
    """

    calls: dict[Shape, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    seconds: dict[Shape, float] = field(default_factory=lambda: defaultdict(float))
    laying_out: float = 0.0
    matrices: dict[Shape, dict[int, MatrixProduct | JoinedProducts]] = field(default_factory=lambda: defaultdict(dict))

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Within: every product of the engine's layers and head adds up here."""
        call, joined, copy_of = MatrixProduct.__call__, JoinedProducts.joined, PackedWeights.of

        def told(product: MatrixProduct, x: torch.Tensor, *room: Any) -> torch.Tensor:
            started, before = clock(), self.laying_out
            result = call(product, x, *room)
            shape = (product.weight.shape[0], product.weight.shape[1])
            self.seconds[shape] += clock() - started - (self.laying_out - before)
            self.calls[shape][x.shape[0]] += 1
            self.matrices[shape].setdefault(product.weight.data_ptr(), product)
            return result

        def told_of_joined(products: JoinedProducts, x: torch.Tensor, copy: torch.Tensor) -> Sequence[torch.Tensor]:
            started = clock()
            result = joined(products, x, copy)
            self.seconds[products.shape] += clock() - started
            self.calls[products.shape][x.shape[0]] += 1
            self.matrices[products.shape].setdefault(hash(products.packed_key), products)
            return result

        def told_of_copy(copied: PackedWeights, *given: Any) -> torch.Tensor | None:
            started = clock()
            copy = copy_of(copied, *given)
            self.laying_out += clock() - started
            return copy

        with (
            mock.patch.object(PackedWeights, "of", told_of_copy),
            mock.patch.object(MatrixProduct, "__call__", told),
            mock.patch.object(JoinedProducts, "joined", told_of_joined),
        ):
            yield

    def operations(self, shape: Shape) -> float:
        """Floating-point ones, of all rows."""
        return 2.0 * shape[0] * shape[1] * sum(rows * times for rows, times in self.calls[shape].items())

    def fastest(self) -> dict[Shape, tuple[float, str]]:
        """By shape: seconds of all its calls by the fastest product known, and which that is where most rows are.

        At the least and the most of `ROWS` around each number of rows, every product is timed on all matrices of the
        shape, one after the other, as a model's layers are; weights are packed before. Cost: that.
        """
        return {shape: self._fastest_of(shape) for shape in self.calls}

    @torch.inference_mode()
    def _fastest_of(self, shape: Shape) -> tuple[float, str]:
        known = sorted(rows for rows in ROWS if rows * shape[0] <= MOST_LOGITS)
        matrices = self.matrices[shape] = {
            key: each.as_one() if isinstance(each, JoinedProducts) else each
            for key, each in self.matrices[shape].items()
        }
        candidates = [_candidates(product) for product in matrices.values()]
        measured: dict[int, tuple[float, str]] = {}

        def best(rows: int) -> tuple[float, str]:
            if rows not in measured:
                measured[rows] = _best(candidates, torch.randn(rows, shape[1]).to(self._dtype(shape)))
            return measured[rows]

        def of(rows: int) -> float:
            place = min(bisect_left(known, rows), len(known) - 1)
            most = known[place]
            if most <= rows or place == 0:
                return best(most)[0] * rows / most
            least = known[place - 1]
            share = (rows - least) / (most - least)
            return best(least)[0] * (1 - share) + best(most)[0] * share

        total = sum(of(rows) * times for rows, times in self.calls[shape].items())
        usual = max(self.calls[shape], key=lambda rows: rows * self.calls[shape][rows])
        return total, best(known[min(bisect_left(known, usual), len(known) - 1)])[1]

    def _dtype(self, shape: Shape) -> torch.dtype:
        return next(iter(self.matrices[shape].values())).dtype


def _candidates(product: MatrixProduct) -> dict[str, Product]:
    """Every product that is known with this matrix."""
    weight, bias = product.weight.detach(), product.bias
    found: dict[str, Product] = {"torch": lambda x: torch.nn.functional.linear(x, weight, bias)}
    mkldnn: Any = torch.ops.mkldnn
    if uses_onednn(weight.device, weight.dtype, is_head=True):
        packed = mkldnn._reorder_linear_weight(weight.contiguous(), 64)
        found["oneDNN"] = lambda x: mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        found["oneDNN, packed"] = lambda x: mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    if product.is_tiled:
        laid_out = product.packed()
        found["ours, laid out"] = lambda x: product.by_library(x, laid_out)
    if (order := product.order) is not None:
        found["ours"] = partial(product.in_order, order=order)
    return found


def _best(candidates: list[dict[str, Product]], x: torch.Tensor) -> tuple[float, str]:
    """Seconds of a product of these rows by the fastest kind, and its name."""
    found: dict[str, float] = {}
    for kind in candidates[0]:
        if kind == "ours" and x.shape[0] > MOST_OURS:
            continue
        passes = []
        for _ in range(1 + PASSES):
            started = clock()
            for each in candidates:
                each[kind](x)
            passes.append((clock() - started) / len(candidates))
        found[kind] = min(passes[1:])
    kind = min(found, key=found.__getitem__)
    return found[kind], kind
