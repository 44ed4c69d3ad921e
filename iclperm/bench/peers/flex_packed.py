"""A tree packed depth first through transformers with FlexAttention: each context path with all its queries at once.

A token sees those before it in the pack whose subtree it lies in: one interval a key, as iclperm's own kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from plain import head, log_softmax
from protocol import BenchWorkload, Ids, Logprobs, serve, versions
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AttentionInterface, AutoModelForCausalLM

ATTENTION_NAME = "packed_tree"
BLOCK = 128


@dataclass
class FlexPack:
    """Tokens of one path with all its queries: depth, end of each token's subtree, and where labels are read."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # -1: the end of the pack
    reads: list[tuple[int, int, int]] = field(default_factory=list)  # row, label's number, token id

    def add(self, tokens: Ids, depth: int) -> range:
        """Append tokens from a depth on; their rows."""
        begin = len(self.ids)
        self.ids += tokens.tolist()
        self.positions += range(depth, depth + tokens.size)
        self.ends += [-1] * tokens.size
        return range(begin, len(self.ids))

    def close(self, rows: range) -> None:
        """What follows from here on is beneath these rows no more."""
        for row in rows:
            self.ends[row] = len(self.ids)

    @classmethod
    def of(cls, path: Ids, marks: Ids, work: BenchWorkload) -> FlexPack:
        """The reads are in the order contexts, queries, labels; a label's tokens follow each other."""
        pack, held = cls(), 0
        for mark in marks.tolist():
            pack.add(path[held:mark], held)
            held = mark
            for query in work.queries:
                rows = pack.add(query, held)
                for number, label in enumerate(work.labels):
                    rest = pack.add(label[:-1], held + query.size)
                    pack.reads += zip([rows[-1], *rest], [number] * label.size, label.tolist(), strict=True)
                    pack.close(rest)
                pack.close(rows)
        return pack


class FlexPacked:
    def load(self, model: str, dtype: str, threads: int, device: str) -> dict[str, Any]:
        torch.set_num_threads(threads)
        AttentionInterface.register(ATTENTION_NAME, _attend)
        auto: Any = AutoModelForCausalLM
        self.model = auto.from_pretrained(model, dtype=getattr(torch, dtype)).to(device).eval()
        self.model.set_attn_implementation(ATTENTION_NAME)
        self.is_compiled = device.startswith("cuda")
        attend: Any = flex_attention
        self.attend = torch.compile(attend, dynamic=False) if self.is_compiled else attend
        return {"versions": versions("torch", "transformers")}

    def warm(self, work: BenchWorkload) -> dict[str, Any]:
        self.score(work)
        return {}

    @torch.inference_mode()
    def score(self, work: BenchWorkload) -> tuple[Logprobs, dict[str, Any]]:
        packs = [FlexPack.of(path, marks, work) for path, marks in zip(work.paths, work.marks, strict=True)]
        self._refuse_window(packs)
        size = -(-max(len(pack.ids) for pack in packs) // BLOCK) * BLOCK  # one size, so that one kernel is compiled
        scores = np.concatenate([self._score(pack, size, work) for pack in packs])
        return scores[work.cells[:, 0], work.cells[:, 1]], {"tokens": sum(len(pack.ids) for pack in packs)}

    def _score(self, pack: FlexPack, size: int, work: BenchWorkload) -> Logprobs:
        device, used = self.model.device, len(pack.ids)
        padding = [0] * (size - used)
        ids, positions = (torch.tensor([row + padding], device=device) for row in (pack.ids, pack.positions))
        ends = torch.tensor([used if end < 0 else end for end in pack.ends] + padding, device=device)

        def sees(batch: Any, heads: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (key == query) | ((key <= query) & (query < ends[key]))

        mask = create_block_mask(sees, None, None, size, size, device=device, _compile=self.is_compiled)
        out = self.model.model(input_ids=ids, position_ids=positions, use_cache=False, blocks=mask, attend=self.attend)
        rows, numbers, wanted = (torch.tensor(part, device=device) for part in zip(*pack.reads, strict=True))
        places, order = torch.unique(rows, return_inverse=True)
        logprobs = log_softmax(head(self.model, out.last_hidden_state[0, places]))[order, wanted]
        cells = torch.arange(len(rows), device=device) // sum(label.size for label in work.labels)
        sums = torch.zeros(int(cells[-1]) + 1, len(work.labels), device=device)
        sums.index_put_((cells, numbers), logprobs, accumulate=True)
        return np.asarray(sums.cpu().numpy().reshape(-1, len(work.queries), len(work.labels)))

    def _refuse_window(self, packs: list[FlexPack]) -> None:
        window = getattr(self.model.config, "sliding_window", None)
        longest = 1 + max(max(pack.positions) for pack in packs)
        if window and longest > window:
            raise RuntimeError(f"prompts of {longest} tokens outgrow the sliding window of {window}, not served here")


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, **arguments: Any
) -> tuple[torch.Tensor, None]:
    if arguments.get("s_aux") is not None:
        raise RuntimeError("heads with attention sinks are not served here")
    cap = float(arguments.get("softcap") or 0.0)

    def capped(score: torch.Tensor, *place: Any) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    out = arguments["attend"](
        query,
        key,
        value,
        score_mod=capped if cap else None,
        block_mask=arguments["blocks"],
        scale=arguments["scaling"],
        enable_gqa=True,
    )
    return out.transpose(1, 2).contiguous(), None


if __name__ == "__main__":
    serve(FlexPacked(), torch.cuda)
