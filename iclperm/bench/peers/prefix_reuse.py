"""Prefix reuse by hand in transformers: each context path forwarded once, its cache expanded over the queries."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from plain import head, log_softmax
from protocol import BenchWorkload, Ids, Logprobs, fastest, serve, versions
from transformers import AutoModelForCausalLM, DynamicCache

BATCH_SIZES = (8, 16, 32, 64)


class PrefixReuse:
    def load(self, model: str, dtype: str, threads: int, device: str) -> dict[str, Any]:
        torch.set_num_threads(threads)
        auto: Any = AutoModelForCausalLM
        self.model = auto.from_pretrained(model, dtype=getattr(torch, dtype)).to(device).eval()
        return {"versions": versions("torch", "transformers")}

    def warm(self, work: BenchWorkload) -> dict[str, Any]:
        self.batch_size = fastest(BATCH_SIZES, lambda size: self._score(work, size))
        return {"settings": {"batch": self.batch_size, "attention": self.model.config._attn_implementation}}

    def score(self, work: BenchWorkload) -> tuple[Logprobs, dict[str, Any]]:
        return self._score(work, self.batch_size)

    @torch.inference_mode()
    def _score(self, work: BenchWorkload, batch_size: int) -> tuple[Logprobs, dict[str, Any]]:
        order = sorted(range(len(work.queries)), key=lambda query: work.queries[query].size)
        batches = [order[begin : begin + batch_size] for begin in range(0, len(order), batch_size)]
        scores, self.tokens = [], 0
        seen: dict[bytes, Logprobs] = {}  # no demonstrations is the same context on every path
        for path, marks in zip(work.paths, work.marks, strict=True):
            cache, held = DynamicCache(), 0
            for mark in marks.tolist():
                self._feed([path[held:mark]], cache, held)
                held, key = mark, path[:mark].tobytes()
                if key not in seen:
                    seen[key] = self._context(cache, held, work, batches)
                scores.append(seen[key])
        return np.stack(scores)[work.cells[:, 0], work.cells[:, 1]], {"tokens": self.tokens}

    def _context(self, cache: DynamicCache, held: int, work: BenchWorkload, batches: list[list[int]]) -> Logprobs:
        rows = np.empty((len(work.queries), len(work.labels)), np.float32)
        for batch in batches:
            rows[batch] = self._labels(cache, held, [work.queries[query] for query in batch], work.labels)
        return rows

    def _labels(self, context: DynamicCache, held: int, queries: list[Ids], labels: tuple[Ids, ...]) -> torch.Tensor:
        """Log-likelihoods [queries, labels]: queries as one batch, then what is left of longer labels as another."""
        cache = _expanded(context, len(queries))
        hidden = self._feed(queries, cache, held)
        last = torch.tensor([query.size - 1 for query in queries], device=hidden.device)
        first = self._logprobs(hidden[torch.arange(len(queries)), last])
        scores = first[:, [int(label[0]) for label in labels]]
        longer = [number for number, label in enumerate(labels) if label.size > 1]
        if not longer:
            return scores.cpu()
        cache.batch_repeat_interleave(len(longer))
        rests = [labels[number] for _ in queries for number in longer]
        lengths = [query.size for query in queries for _ in longer]
        hidden = self._feed([rest[:-1] for rest in rests], cache, held, after=lengths)
        rows = torch.tensor([row for row, rest in enumerate(rests) for _ in rest[1:]], device=hidden.device)
        places = torch.tensor([place for rest in rests for place in range(rest.size - 1)], device=hidden.device)
        wanted = torch.from_numpy(np.concatenate([rest[1:] for rest in rests])).long().to(hidden.device)
        logprobs = self._logprobs(hidden[rows, places]).gather(1, wanted[:, None])[:, 0]
        columns = torch.tensor(longer, device=hidden.device)[rows % len(longer)]
        scores.index_put_((rows // len(longer), columns), logprobs, accumulate=True)
        return scores.cpu()

    def _feed(self, rows: list[Ids], cache: DynamicCache, held: int, after: list[int] | None = None) -> torch.Tensor:
        """Hidden states of rows padded on the right, which follow ``held`` tokens and ``after`` of a padded query."""
        width = max(row.size for row in rows)
        if width == 0:
            return torch.empty(0)
        device, gap = self.model.device, cache.get_seq_length() - held
        ids = torch.tensor([row.tolist() + [0] * (width - row.size) for row in rows], device=device)
        self.tokens += ids.numel()
        arguments: dict[str, Any] = {}
        if after is not None:
            ends = torch.tensor(after, device=device)[:, None]
            seen = torch.ones(len(rows), held + gap + width, dtype=torch.long, device=device)
            seen[:, held : held + gap] = torch.arange(gap, device=device) < ends
            arguments = {"attention_mask": seen, "position_ids": held + ends + torch.arange(width, device=device)}
        out = self.model.model(input_ids=ids, past_key_values=cache, use_cache=True, **arguments)
        states: torch.Tensor = out.last_hidden_state
        return states

    def _logprobs(self, hidden: torch.Tensor) -> torch.Tensor:
        logprobs: torch.Tensor = log_softmax(head(self.model, hidden))
        return logprobs


def _expanded(cache: DynamicCache, rows: int) -> DynamicCache:
    """The cache of one context for several rows, without a copy: what is appended goes into tensors of their own."""
    layers: list[Any] = cache.layers
    return DynamicCache([(part.keys.expand(rows, -1, -1, -1), part.values.expand(rows, -1, -1, -1)) for part in layers])


if __name__ == "__main__":
    serve(PrefixReuse(), torch.cuda)
