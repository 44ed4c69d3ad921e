"""iclperm itself, and the linear layers of its model alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from plain import endless
from protocol import Answers, BenchWorkload, Ids, serve, versions
from torch import nn

from iclperm.engine import ContextPaths, Engine, plan_product
from iclperm.engine.kernels.linear import uses_onednn
from iclperm.engine.tree import Rows

LINEAR_ROWS = 1024
LINEAR_PASSES = 5


class Ours:
    def load(self, model: str, dtype: str, threads: int, device: str) -> dict[str, Any]:
        torch.set_num_threads(threads)
        self.engine = Engine.from_pretrained(model, dtype=dtype, device=device)
        endless(self.engine.model)
        self.engine.tokenizer = None  # it knows what ends a text
        numerics = self.engine.numerics
        about = {name: numerics[name] for name in ("attention", "layers", "isa")}
        return {"versions": versions("iclperm", "torch", "transformers"), "settings": about}

    def warm(self, work: BenchWorkload) -> dict[str, Any]:
        self.score(work)
        return {}

    def score(self, work: BenchWorkload) -> tuple[Answers, dict[str, Any]]:
        paths = ContextPaths(Rows.of(work.paths), Rows.of(work.marks))
        if work.new_tokens:
            found: Answers = self._texts(work, paths)
        else:
            found = self.engine.score(paths, work.queries, work.labels)[work.cells[:, 0], work.cells[:, 1]]
        report = self.engine.report
        about = {"tokens": report.tokens_forwarded, "unique": report.tokens_unique, "naive": report.tokens_naive,
                 "kv_peak_tokens": report.kv_peak_tokens, "phases": dict(report.seconds)}  # fmt: skip
        return found, about

    def _texts(self, work: BenchWorkload, paths: ContextPaths) -> Ids:
        plan = plan_product(paths, work.queries, [[0]])
        of_context: dict[int, list[int]] = {}  # a context may be a prefix of several paths
        for number, distinct in enumerate(plan.context_index.tolist()):
            of_context.setdefault(distinct, []).append(number)
        place = {tuple(cell): number for number, cell in enumerate(work.cells.tolist())}
        texts = np.empty((len(work.cells), work.new_tokens), np.int32)
        for result in self.engine.generate_units(plan, max_new_tokens=work.new_tokens):
            cells = [(c, q) for c in result.contexts.tolist() for q in result.queries.tolist()]
            for (context, query), ids in zip(cells, result.outputs.token_ids, strict=True):
                for number in of_context[context]:
                    if (number, query) in place:
                        texts[place[number, query]] = ids
        return texts

    @torch.inference_mode()
    def linear(self) -> dict[str, Any]:
        """Seconds a token of every linear layer of the body, one after the other, on rows made beforehand.

        By each product that is known here: as the module itself runs, by the ``library`` named, by oneDNN's, on weights
        as they are and packed once as it likes them. ``fastest`` is the quickest by name.
        """
        model: Any = self.engine.model
        head = model.get_output_embeddings()
        layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
        like = layers[0].weight
        inputs = {
            width: torch.randn(LINEAR_ROWS, width, dtype=like.dtype, device=like.device)
            for width in {layer.in_features for layer in layers}
        }

        def seconds(product: Callable[[nn.Linear, torch.Tensor], torch.Tensor]) -> float:
            if like.is_cuda:
                torch.cuda.synchronize()
            started = time.perf_counter()
            for layer in layers:
                product(layer, inputs[layer.in_features])
            if like.is_cuda:
                torch.cuda.synchronize()
            return time.perf_counter() - started

        library = _library(like)
        products: dict[str, Callable[[nn.Linear, torch.Tensor], torch.Tensor]] = {library: nn.Linear.__call__}
        if uses_onednn(like.device, like.dtype, is_head=True):
            packed = {layer: torch.ops.mkldnn._reorder_linear_weight(layer.weight, LINEAR_ROWS) for layer in layers}
            products["oneDNN, called by name"] = lambda layer, rows: _onednn(layer, rows, layer.weight)
            products["oneDNN, weights packed"] = lambda layer, rows: _onednn(layer, rows, packed[layer])
        passes = [[seconds(product) for product in products.values()] for _ in range(1 + LINEAR_PASSES)]
        medians = [statistics.median(each) / LINEAR_ROWS for each in zip(*passes[1:], strict=True)]
        found = dict(zip(products, medians, strict=True))
        fastest = min(found, key=found.__getitem__)
        return {"torch": found[library], "library": library, "fastest": fastest, "seconds": found[fastest]}


def _onednn(layer: nn.Linear, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, layer.bias, "none", [], "")
    return product


def _library(weight: torch.Tensor) -> str:
    """What multiplies for torch where a weight lies, as far as torch says."""
    if weight.is_cuda:
        blas = str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2]  # torch's default picks between two
        return f"{'cuBLAS or cuBLASLt' if blas == 'Default' else blas} of CUDA {torch.version.cuda}"
    mkl, onednn = "BLAS_INFO=mkl" in torch.__config__.show(), "USE_MKLDNN=ON" in torch.__config__.show()
    return "MKL" if mkl and weight.dtype == torch.float32 else "oneDNN" if onednn else "torch's own"


if __name__ == "__main__":
    serve(Ours(), torch.cuda)
