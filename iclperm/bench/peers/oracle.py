"""The yardstick of agreement: transformers, unmodified, one unpadded prompt at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from protocol import BenchWorkload, Logprobs, serve, versions

from iclperm.engine.load import load
from iclperm.reference.scoring import next_token_logprobs, score_one


class Oracle:
    def load(self, model: str, dtype: str, threads: int, device: str) -> dict[str, Any]:
        torch.set_num_threads(threads)
        self.model, _ = load(model, dtype="float32" if dtype == "float64" else dtype, device=device)
        if dtype == "float64":
            self.model.double()
        return {"versions": versions("torch", "transformers")}

    def warm(self, work: BenchWorkload) -> dict[str, Any]:
        return {}

    def score(self, work: BenchWorkload) -> tuple[Logprobs, dict[str, Any]]:
        rows = [self._labels(prompt, [label.tolist() for label in work.labels]) for prompt in work.prompts()]
        return np.array(rows, np.float32), {"tokens": int(work.lengths.sum())}

    @torch.inference_mode()
    def judge(self, work: str, texts: str) -> dict[str, Any]:
        """How many nats likelier than a token of the texts [N, new] the likeliest was, at the worst place of all."""
        asked, written, worst = BenchWorkload.load(Path(work)), np.load(texts, allow_pickle=False), 0.0
        for prompt, text in zip(asked.prompts(), written.tolist(), strict=True):
            ids = torch.tensor([[*prompt, *text[:-1]]], device=self.model.device)
            logprobs = torch.log_softmax(self.model(ids, use_cache=False).logits[0, len(prompt) - 1 :].double(), dim=-1)
            chosen = logprobs[torch.arange(len(text)), torch.tensor(text)]
            worst = max(worst, float((logprobs.max(dim=-1).values - chosen).max()))
        return {"worst": worst}

    def _labels(self, prompt: list[int], labels: list[list[int]]) -> list[float]:
        if any(len(label) > 1 for label in labels):
            return [score_one(self.model, prompt, label).logprob for label in labels]
        logprobs = next_token_logprobs(self.model, prompt)
        return [float(logprobs[label[0]]) for label in labels]


if __name__ == "__main__":
    serve(Oracle(), torch.cuda)
