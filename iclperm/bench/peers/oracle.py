"""The yardstick of agreement: transformers, unmodified, one unpadded prompt at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from protocol import BenchWorkload, Logprobs, serve, versions

from iclperm.engine.load import load
from iclperm.reference.scoring import next_token_logprobs, score_one


class Oracle:
    def load(self, model: str, dtype: str, threads: int, device: str) -> dict[str, Any]:
        torch.set_num_threads(threads)
        self.model, _ = load(model, dtype=dtype, device=device)
        return {"versions": versions("torch", "transformers")}

    def warm(self, work: BenchWorkload) -> dict[str, Any]:
        return {}

    def score(self, work: BenchWorkload) -> tuple[Logprobs, dict[str, Any]]:
        rows = [self._labels(prompt, [label.tolist() for label in work.labels]) for prompt in work.prompts()]
        return np.array(rows, np.float32), {"tokens": int(work.lengths.sum())}

    def _labels(self, prompt: list[int], labels: list[list[int]]) -> list[float]:
        if any(len(label) > 1 for label in labels):
            return [score_one(self.model, prompt, label).logprob for label in labels]
        logprobs = next_token_logprobs(self.model, prompt)
        return [float(logprobs[label[0]]) for label in labels]


if __name__ == "__main__":
    serve(Oracle(), torch.cuda)
