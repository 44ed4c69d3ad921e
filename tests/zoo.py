"""Random-weight models of every architecture that the engine promises to serve, small enough to score plainly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from transformers import PreTrainedModel

VOCAB = 96
WINDOW = 7

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_LOCAL_GLOBAL = ["sliding_attention", "full_attention", "sliding_attention"]


@dataclass(frozen=True)
class Entry:
    """A model class with its configuration; ``kinds`` are the layer types that must occur in it."""

    model: str
    config: str
    settings: dict[str, Any]
    kinds: frozenset[str] = frozenset()

    def build(self) -> PreTrainedModel:
        torch.manual_seed(0)
        config = getattr(tf, self.config)(**self.settings)
        assert self.kinds <= set(getattr(config, "layer_types", None) or ()), "the configuration lost a kind of layer"
        model: PreTrainedModel = getattr(tf, self.model)(config).eval()
        return _roughened(model)


def _roughened(model: PreTrainedModel) -> PreTrainedModel:
    """Random weights large enough that heads attend unevenly and norms and biases matter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise * 2.0 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(0.2 * noise)
    return model


_LAYERS = {"num_hidden_layers": 3}
_SLIDING = {"sliding_window": WINDOW, "layer_types": _LOCAL_GLOBAL}
_WINDOW = {"sliding_window": WINDOW}
_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "decoder_sparse_step": 1,
}
_BOTH = frozenset({"sliding_attention", "full_attention"})

ZOO: dict[str, Entry] = {
    "llama": Entry("LlamaForCausalLM", "LlamaConfig", {**_GROUPED, **_LAYERS}),
    "llama3-rope-tied": Entry(
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            **_GROUPED,
            **_LAYERS,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen2": Entry("Qwen2ForCausalLM", "Qwen2Config", {**_GROUPED, **_LAYERS}),
    "qwen2-window": Entry(
        "Qwen2ForCausalLM", "Qwen2Config", {**_GROUPED, **_LAYERS, **_SLIDING, "use_sliding_window": True}, _BOTH
    ),
    "qwen3": Entry("Qwen3ForCausalLM", "Qwen3Config", {**_GROUPED, **_LAYERS, "head_dim": 12}),
    "gemma": Entry("GemmaForCausalLM", "GemmaConfig", {**_COMMON, **_LAYERS, "num_key_value_heads": 1, "head_dim": 16}),
    "gemma2": Entry(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            **_GROUPED,
            **_LAYERS,
            **_SLIDING,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
        },
        _BOTH,
    ),
    "gemma3": Entry(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_GROUPED, **_LAYERS, **_SLIDING, "head_dim": 16, "query_pre_attn_scalar": 24},
        _BOTH,
    ),
    "mistral-window": Entry("MistralForCausalLM", "MistralConfig", {**_GROUPED, **_LAYERS, "sliding_window": WINDOW}),
    "gpt2": Entry(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 256,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "opt": Entry(
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "ffn_dim": 56,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            "word_embed_proj_dim": 24,
        },
    ),
    "qwen2-moe-window": Entry(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**_GROUPED, **_LAYERS, **_MOE, **_WINDOW, "use_sliding_window": True},
    ),
    "phimoe-window": Entry(
        "PhimoeForCausalLM",
        "PhimoeConfig",
        {**_GROUPED, **_LAYERS, **_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt-neox": Entry("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_COMMON, **_LAYERS}),
    "phi3": Entry("Phi3ForCausalLM", "Phi3Config", {**_GROUPED, **_LAYERS}),
    "phi3-window": Entry("Phi3ForCausalLM", "Phi3Config", {**_GROUPED, **_LAYERS, "sliding_window": WINDOW}),
    "olmo2": Entry("Olmo2ForCausalLM", "Olmo2Config", {**_GROUPED, **_LAYERS}),
    "olmo3-window": Entry(
        "Olmo3ForCausalLM",
        "Olmo3Config",
        {
            **_GROUPED,
            **_LAYERS,
            **_SLIDING,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "attention_factor": 1.2,
                },
            },
        },
        _BOTH,
    ),
    "granite": Entry(
        "GraniteForCausalLM",
        "GraniteConfig",
        {
            **_GROUPED,
            **_LAYERS,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.5,
            "residual_multiplier": 0.7,
            "logits_scaling": 0.6,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "smollm3-window": Entry(
        "SmolLM3ForCausalLM",
        "SmolLM3Config",
        {**_GROUPED, **_LAYERS, **_SLIDING, "use_sliding_window": True, "no_rope_layers": [1, 0, 1]},
        _BOTH,
    ),
    "glm": Entry("GlmForCausalLM", "GlmConfig", {**_GROUPED, **_LAYERS, "head_dim": 20, "attention_bias": True}),
    "glm4": Entry("Glm4ForCausalLM", "Glm4Config", {**_GROUPED, **_LAYERS, "head_dim": 16}),
    "cohere": Entry("CohereForCausalLM", "CohereConfig", {**_GROUPED, **_LAYERS, "logit_scale": 0.7}),
    "cohere2-window": Entry(
        "Cohere2ForCausalLM",
        "Cohere2Config",
        {**_GROUPED, **_LAYERS, **_SLIDING, "head_dim": 12, "logit_scale": 0.7, "attention_bias": True},
        _BOTH,
    ),
    "starcoder2-window": Entry(
        "Starcoder2ForCausalLM", "Starcoder2Config", {**_GROUPED, **_LAYERS, "sliding_window": WINDOW}
    ),
    "phi": Entry("PhiForCausalLM", "PhiConfig", {**_GROUPED, **_LAYERS, "hidden_size": 48}),
    "gpt-oss": Entry(
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **_GROUPED,
            **_LAYERS,
            **_SLIDING,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
        _BOTH,
    ),
    "granite-swa": Entry(
        "GraniteSWAForCausalLM",
        "GraniteSWAConfig",
        {**_GROUPED, **_LAYERS, **_SLIDING, "attention_multiplier": 0.4},
        _BOTH,
    ),
    "qwen2-moe": Entry("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {**_GROUPED, **_LAYERS, **_MOE}),
}
