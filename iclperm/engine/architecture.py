"""Which architectures the tree serves and which kernels attend there, and what logits are scaled and capped by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from iclperm.engine.kernels.triton_compilation import MAX_HEAD_DIM
from iclperm.engine.kernels.triton_launch import may_launch
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


def logit_scale(model: PreTrainedModel, config: Any) -> float:
    """Constant factor between the head's output and the logits (Cohere multiplies, Granite divides).

    Cohere's models keep it beside their configuration, whose own is then not read any more.
    """
    if (scale := getattr(model, "logit_scale", getattr(config, "logit_scale", None))) is not None:
        return float(scale)
    if (scaling := getattr(config, "logits_scaling", None)) is not None:
        return 1.0 / float(scaling)
    return 1.0


def logit_softcap(config: Any) -> float:
    """What logits are soft-capped by, 0 for nothing (Gemma 2)."""
    return float(getattr(config, "final_logit_softcapping", None) or 0.0)


def refuse_attention(attention: str, devices: Sequence[torch.device], dtype: torch.dtype, head_size: int) -> None:
    """Raises ModelError where a way to attend that is asked for by name runs no such heads on these devices."""
    where = devices[0]
    if attention == "native" and not attends_natively(devices, dtype, head_size):
        raise ModelError(
            f"native attention runs float32 and bfloat16 on a CPU, not {dtype} on {where}; choose attention='auto' "
            "(iclperm run --attention auto)"
        )
    if attention == "triton" and not attends_by_triton(devices, dtype, head_size):
        raise ModelError(
            f"triton attention runs float32, bfloat16 and float16 with heads of up to {MAX_HEAD_DIM} dimensions on "
            f"CUDA devices where triton is installed, not {dtype} with {head_size} on {where}; "
            "choose attention='auto' (iclperm run --attention auto)"
        )


def attends_natively(devices: Sequence[torch.device], dtype: torch.dtype, _: int) -> bool:
    """Whether our kernel of the CPU attends there."""
    return devices[0].type == "cpu" and dtype in (torch.float32, torch.bfloat16)


def attends_by_triton(devices: Sequence[torch.device], dtype: torch.dtype, head_size: int) -> bool:
    """Whether our kernel of GPUs attends there, to heads of this size."""
    return head_size <= MAX_HEAD_DIM and all(may_launch(device, dtype) for device in devices)
