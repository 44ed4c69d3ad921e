"""The attention function that transformers' layers call while a pack runs; known to transformers by its name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from iclperm.engine.forward import TreeForward
from iclperm.engine.kernels.rule import AttentionRule
from iclperm.errors import PLAINLY, ModelError

# Free of "sdpa", "flash" and "flex_attention", which transformers looks for inside implementation names.
ATTENTION_NAME = "iclperm_tree"
# What an attention layer may pass on without changing what it computes.
_HARMLESS_ARGUMENTS = {
    "dropout", "scaling", "sliding_window", "softcap", "is_causal", "position_ids", "use_cache", "output_attentions",
    "output_hidden_states", "output_router_logits", "past_key_values", "cache_position", "position_embeddings",
    "return_dict", "tree",
}  # fmt: skip


def _tree_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls: query [1, Hq, M, d], key and value [1, Hkv, M, d]."""
    forward: TreeForward | None = arguments.get("tree")
    if forward is None:
        raise ModelError(
            f"{type(module).__name__} is not handed the arguments of its model, so the tree does not reach it; "
            f"{PLAINLY}"
        )
    unknown = sorted(a for a, given in arguments.items() if given is not None and a not in _HARMLESS_ARGUMENTS)
    if unknown:
        raise ModelError(
            f"{type(module).__name__} passes {unknown[0]!r} to its attention, which the tree cannot serve; {PLAINLY}"
        )
    forward.refuse_mask(module, attention_mask)
    scaling = arguments.get("scaling")
    rule = AttentionRule(
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=float(arguments.get("softcap") or 0.0),
        window=forward.window(module, arguments),
    )
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    return forward.attention(q, k, v, rule)[None], None


AttentionInterface.register(ATTENTION_NAME, _tree_attention)
