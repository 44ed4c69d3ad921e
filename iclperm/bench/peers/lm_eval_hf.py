"""lm-evaluation-harness, its hf backend: what its loglikelihood requests cost once they are token ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from lm_eval.models.huggingface import HFLM
from protocol import BenchWorkload, Logprobs, fastest, serve, versions

BATCH_SIZES = (1, 2, 4, 8, 16)


class LmEval:
    def load(self, model: str, dtype: str, threads: int, device: str) -> dict[str, Any]:
        torch.set_num_threads(threads)
        # In bfloat16 its log-softmax would be as coarse as the weights.
        self.model = HFLM(pretrained=model, dtype=dtype, device=device, batch_size=1, softmax_dtype="float32")
        self.tokens = 0
        self.model.model.register_forward_pre_hook(self._count, with_kwargs=True)
        return {"versions": versions("lm_eval", "torch", "transformers")}

    def warm(self, work: BenchWorkload) -> dict[str, Any]:
        self.batch_size = fastest(BATCH_SIZES, lambda size: self._score(work, size))
        return {"settings": {"batch": self.batch_size}}

    def score(self, work: BenchWorkload) -> tuple[Logprobs, dict[str, Any]]:
        return self._score(work, self.batch_size)

    def _score(self, work: BenchWorkload, batch_size: int) -> tuple[Logprobs, dict[str, Any]]:
        self.tokens = 0
        requests = [
            (("", ""), prompt, label) for prompt in work.prompts() for label in [ids.tolist() for ids in work.labels]
        ]
        found = self.model._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=batch_size)
        scores = np.array([logprob for logprob, _ in found], np.float32)
        return scores.reshape(len(work.cells), len(work.labels)), {"tokens": self.tokens}

    def _count(self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.tokens += (arguments[0] if arguments else keywords["input_ids"]).numel()


if __name__ == "__main__":
    serve(LmEval(), torch.cuda)
