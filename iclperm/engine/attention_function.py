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
# One learned score a head in the softmax, of no value: gpt-oss and others; transformers' name for it.
_SINKS = "s_aux"


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
    sinks = _sinks(arguments, query)
    known = _HARMLESS_ARGUMENTS if sinks is None else _HARMLESS_ARGUMENTS | {_SINKS}
    unknown = sorted(a for a, given in arguments.items() if given is not None and a not in known)
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
    return forward.attention(q, k, v, rule, sinks=sinks)[None], None


def _sinks(arguments: dict[str, Any], query: torch.Tensor) -> torch.Tensor | None:
    """The sink of each head, float32 [Hq] where the queries [1, Hq, M, d] lie; None where there are none, or such that
    say more than one number a head."""
    given = arguments.get(_SINKS)
    if not isinstance(given, torch.Tensor) or given.shape != query.shape[1:2]:
        return None
    return given.detach().to(query.device, torch.float32).contiguous()


AttentionInterface.register(ATTENTION_NAME, _tree_attention)
