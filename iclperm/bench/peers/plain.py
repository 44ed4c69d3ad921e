"""Plain transformers: every prompt whole, in batches of like lengths, padded; the head at the scored positions only.

Texts are written by its `generate`, on batches padded on the left.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from protocol import Answers, BenchWorkload, Ids, Logprobs, fastest, serve, versions
from transformers import AutoModelForCausalLM

BATCH_SIZES = (1, 2, 4, 8, 16)
WRITING_SIZES = (8, 32, 64)  # of batches, where texts are written
_PART = 8192


class Plain:
    def load(self, model: str, dtype: str, threads: int, device: str) -> dict[str, Any]:
        torch.set_num_threads(threads)
        auto: Any = AutoModelForCausalLM
        self.model = auto.from_pretrained(model, dtype=getattr(torch, dtype)).to(device).eval()
        endless(self.model)
        return {"versions": versions("torch", "transformers")}

    def warm(self, work: BenchWorkload) -> dict[str, Any]:
        sizes, run = (WRITING_SIZES, self._write) if work.new_tokens else (BATCH_SIZES, self._score)
        self.batch_size = fastest(sizes, lambda size: run(work, size))
        return {"settings": {"batch": self.batch_size, "attention": self.model.config._attn_implementation}}

    def score(self, work: BenchWorkload) -> tuple[Answers, dict[str, Any]]:
        return (self._write if work.new_tokens else self._score)(work, self.batch_size)

    @torch.inference_mode()
    def _write(self, work: BenchWorkload, batch_size: int) -> tuple[Ids, dict[str, Any]]:
        order, prompts = np.argsort(work.lengths, kind="stable"), work.prompts()
        out, tokens = np.empty((len(prompts), work.new_tokens), np.int32), 0
        for begin in range(0, len(order), batch_size):
            chosen = order[begin : begin + batch_size]
            width = int(work.lengths[chosen].max())
            ids, mask = (torch.zeros(len(chosen), width, dtype=torch.long, device=self.model.device) for _ in range(2))
            for row, cell in enumerate(chosen):
                ids[row, width - len(prompts[cell]) :] = torch.tensor(prompts[cell])
                mask[row, width - len(prompts[cell]) :] = 1
            texts = self.model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=work.new_tokens, pad_token_id=0
            )
            out[chosen] = texts[:, width:].cpu().numpy()
            tokens += len(chosen) * (width + work.new_tokens - 1)
        return out, {"tokens": tokens}

    def _score(self, work: BenchWorkload, batch_size: int) -> tuple[Logprobs, dict[str, Any]]:
        # Labels of one token are all read off the prompt; longer ones are fed behind it, one row each.
        fed = [label[:-1] for label in work.labels]
        fed = fed if any(label.size for label in fed) else fed[:1]
        rows = [(cell, [*prompt, *label.tolist()]) for cell, prompt in enumerate(work.prompts()) for label in fed]
        order = sorted(range(len(rows)), key=lambda row: len(rows[row][1]))
        out, tokens = np.empty((len(work.cells), len(work.labels)), np.float32), 0
        for begin in range(0, len(order), batch_size):
            chosen = order[begin : begin + batch_size]
            batch = [rows[row][1] for row in chosen]
            keep = [torch.arange(int(work.lengths[rows[row][0]]) - 1, len(rows[row][1])) for row in chosen]
            tokens += len(batch) * max(map(len, batch))
            for row, logprobs in zip(chosen, self._forward(batch, keep), strict=True):
                cell, number = rows[row][0], row % len(fed)
                answered = slice(number, number + 1) if len(fed) > 1 else slice(None)
                out[cell, answered] = _sums(logprobs, work.labels[answered])
        return out, {"tokens": tokens}

    @torch.inference_mode()
    def _forward(self, batch: list[list[int]], keep: list[torch.Tensor]) -> list[torch.Tensor]:
        """Log-probabilities [scored positions, V] of each row; padding follows, so causal attention never sees it."""
        width = max(map(len, batch))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in batch], device=self.model.device)
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        scored = torch.cat([states[places] for states, places in zip(hidden, keep, strict=True)])
        logprobs = log_softmax(head(self.model, scored)).cpu()
        return list(torch.split(logprobs, [len(places) for places in keep]))


def endless(model: Any) -> None:
    """No token ends a text: everyone writes as much."""
    model.generation_config.eos_token_id = model.config.eos_token_id = None


def head(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Logits in float32, with the model's final soft-cap."""
    logits: torch.Tensor = model.lm_head(hidden).float()
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """As torch's, in the place of the logits [.., V], but of parts: one sum in float32 loses 1e-4 nats of 262,144
    logits. A row of so many takes .35 ms longer on two cores, some thousandths of its prompt."""
    parts = torch.stack([part.logsumexp(dim=-1) for part in torch.split(logits, _PART, dim=-1)])
    return logits.sub_(parts.logsumexp(dim=0).unsqueeze(-1))


def _sums(logprobs: torch.Tensor, labels: tuple[Ids, ...]) -> list[float]:
    return [float(logprobs[torch.arange(label.size), torch.from_numpy(label).long()].sum()) for label in labels]


if __name__ == "__main__":
    serve(Plain(), torch.cuda)
