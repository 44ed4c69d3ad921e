"""Which architectures the prefix tree serves, and what their logits are scaled and capped by."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from iclperm.errors import PLAINLY, ModelError

_SERVED_LAYERS = {"full_attention", "sliding_attention"}


def refuse_architecture(model: PreTrainedModel, config: Any) -> None:
    name = f"{type(model).__name__} ({config.model_type!r})"

    def refuse(feature: str) -> None:
        raise ModelError(f"{name} has {feature}, which the prefix tree cannot serve exactly; {PLAINLY}")

    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} has an encoder; give a decoder-only model")
    if not getattr(model, "_supports_attention_backend", False):
        refuse("attention that transformers' AttentionInterface does not reach")
    other = sorted(set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYERS)
    if other:
        refuse(f"layers of type {other[0]!r}")
    if both := getattr(config, "use_bidirectional_attention", None):
        if both != "vision":  # the text of Gemma's multimodal models is causal
            raise ModelError(f"{name} has bidirectional attention; give a decoder-only model")
        refuse("bidirectional attention")


def logit_scale(config: Any) -> float:
    """Constant factor between the head's output and the logits (Cohere multiplies, Granite divides)."""
    if (scale := getattr(config, "logit_scale", None)) is not None:
        return float(scale)
    if (scaling := getattr(config, "logits_scaling", None)) is not None:
        return 1.0 / float(scaling)
    return 1.0


def logit_softcap(config: Any) -> float:
    """What logits are soft-capped by, 0 for nothing (Gemma 2)."""
    return float(getattr(config, "final_logit_softcapping", None) or 0.0)
