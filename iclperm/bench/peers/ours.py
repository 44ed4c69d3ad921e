"""iclperm itself, and the linear layers of its model alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from protocol import BenchWorkload, Logprobs, serve, versions
from torch import nn

from iclperm.engine import ContextPaths, Engine
from iclperm.engine.kernels.linear import linear
from iclperm.engine.tree import Rows

LINEAR_ROWS = 1024
LINEAR_PASSES = 5


class Ours:
    def load(self, model: str, dtype: str, threads: int, device: str) -> dict[str, Any]:
        torch.set_num_threads(threads)
        self.engine = Engine.from_pretrained(model, dtype=dtype, device=device)
        numerics = self.engine.numerics
        about = {name: numerics[name] for name in ("attention", "layers", "isa")}
        return {"versions": versions("iclperm", "torch", "transformers"), "settings": about}

    def warm(self, work: BenchWorkload) -> dict[str, Any]:
        self.score(work)
        return {}

    def score(self, work: BenchWorkload) -> tuple[Logprobs, dict[str, Any]]:
        paths = ContextPaths(Rows.of(work.paths), Rows.of(work.marks))
        scores = self.engine.score(paths, work.queries, work.labels)
        report = self.engine.report
        about = {"tokens": report.tokens_forwarded, "unique": report.tokens_unique, "naive": report.tokens_naive,
                 "kv_peak_tokens": report.kv_peak_tokens, "phases": dict(report.seconds)}  # fmt: skip
        return scores[work.cells[:, 0], work.cells[:, 1]], about

    @torch.inference_mode()
    def linear(self) -> dict[str, Any]:
        """Seconds a token of every linear layer of the body, one after the other, on rows made beforehand.

        Twice: as the module itself runs, by the ``library`` named, and by the products that the engine takes.
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

        passes = [(seconds(nn.Linear.__call__), seconds(linear)) for _ in range(1 + LINEAR_PASSES)]
        by_torch, by_engine = (statistics.median(each) / LINEAR_ROWS for each in zip(*passes[1:], strict=True))
        return {"torch": by_torch, "engine": by_engine, "library": _library(like)}


def _library(weight: torch.Tensor) -> str:
    """What multiplies for torch where a weight lies, as far as torch says."""
    if weight.is_cuda:
        blas = str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2]  # torch's default picks between two
        return f"{'cuBLAS or cuBLASLt' if blas == 'Default' else blas} of CUDA {torch.version.cuda}"
    mkl, onednn = "BLAS_INFO=mkl" in torch.__config__.show(), "USE_MKLDNN=ON" in torch.__config__.show()
    return "MKL" if mkl and weight.dtype == torch.float32 else "oneDNN" if onednn else "torch's own"


if __name__ == "__main__":
    serve(Ours(), torch.cuda)
