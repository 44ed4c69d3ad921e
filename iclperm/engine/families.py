"""Architectures whose decoder layers we know piece by piece, each told by what sets it apart from Llama's.

A decoder is of one of them only if each of its modules is the very class of transformers' that is expected there, and
holds the parameters and children that are expected, and no others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from iclperm.engine.kernels import rowwise


@dataclass(frozen=True)
class NormNames:
    """Names of a layer's norms by where they stand; empty where none does."""

    before_attention: str = ""
    after_attention: str = ""
    before_mlp: str = ""
    after_mlp: str = ""


_BEFORE = NormNames(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
_AFTER = NormNames(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")
_AROUND = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
_AROUND_IN_GLM4 = NormNames(
    "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
)
_ONE = NormNames(before_attention="input_layernorm")


@dataclass(frozen=True)
class MlpNames:
    """Names in an MLP: ``into`` are the matrices of gates and of their factors, or the one of both; where it is not
    gated, the one that goes through the activation alone."""

    into: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    activation: str = "act_fn"
    is_gated: bool = True

    @property
    def is_packed(self) -> bool:
        """Whether gates and factors come out of one matrix."""
        return self.is_gated and len(self.into) == 1

    @property
    def num_inner(self) -> int:
        """Rows of the MLP's width alive at once: gates and factors, and their product where it has no place."""
        return 3 if self.is_packed else 2 if self.is_gated else 1


_PACKED = MlpNames(into=("gate_up_proj",), activation="activation_fn")


@dataclass(frozen=True)
class Family:
    """What sets an architecture's layers apart; its classes are ``<prefix>DecoderLayer``, ``<prefix>MLP``, ...

    - ``norm`` is the norms' class after the prefix, empty for torch's LayerNorm; ``norm_offset`` is added to their
      weights. ``qk_norm`` is of queries and keys: none, of each "head" by itself, or of the "whole" of them.
    - ``window`` says what has the sliding window as an attribute: nothing, the "layer" (its attention), the "config".
    - ``turns_if`` is the attention's attribute that tells whether queries and keys are turned at all; empty where they
      always are. Turned are the halves of a head's columns, or where it ``turns_neighbours`` columns 2 i and 2 i + 1,
      by tables that lie in halves all the same, unless it ``has_tables_of_neighbours``.
    - ``has_multiplier``: what attention and MLP add is multiplied by the layer's ``residual_multiplier``.
    - ``is_parallel``: the MLP is given what the attention is given, the normed hidden states.
    - ``dropouts`` of a layer, and the ``first_dropouts`` before all layers, do nothing in evaluation mode.
    """

    prefix: str
    norms: NormNames = _BEFORE
    mlp: MlpNames = MlpNames()
    decoder: str = "Model"
    final_norm: str = "norm"
    norm: str = "RMSNorm"
    qk_norm: str = ""
    norm_offset: float = 0.0
    window: str = ""
    has_softcap: bool = False
    packs_qkv: bool = False
    output: str = "o_proj"
    turns_if: str = ""
    turns_neighbours: bool = False
    has_tables_of_neighbours: bool = False
    has_multiplier: bool = False
    is_parallel: bool = False
    dropouts: tuple[str, ...] = ()
    first_dropouts: tuple[str, ...] = ()

    @property
    def norm_names(self) -> Iterator[str]:
        """A layer's norms of hidden states."""
        return filter(None, vars(self.norms).values())

    @property
    def is_centred(self) -> bool:
        """Whether the norms take the mean off."""
        return self.norm != "RMSNorm"


_FAMILIES = {
    "llama": Family("Llama"),
    "mistral": Family("Mistral", window="config"),
    "qwen2": Family("Qwen2", window="layer"),
    "qwen3": Family("Qwen3", qk_norm="head", window="layer"),
    "gemma": Family("Gemma", norm_offset=1.0),
    "gemma2": Family("Gemma2", _AROUND, norm_offset=1.0, window="layer", has_softcap=True),
    "gemma3": Family("Gemma3", _AROUND, decoder="TextModel", qk_norm="head", norm_offset=1.0, window="layer"),
    "olmo2": Family("Olmo2", _AFTER, qk_norm="whole"),
    "olmo3": Family("Olmo3", _AFTER, qk_norm="whole", window="layer"),
    "phi3": Family(
        "Phi3", mlp=_PACKED, window="config", packs_qkv=True, dropouts=("resid_attn_dropout", "resid_mlp_dropout")
    ),
    "smollm3": Family("SmolLM3", window="layer", turns_if="use_rope"),
    "granite": Family("Granite", has_multiplier=True),
    "glm": Family("Glm", mlp=_PACKED, turns_neighbours=True),
    "glm4": Family("Glm4", _AROUND_IN_GLM4, mlp=_PACKED, turns_neighbours=True),
    "cohere": Family(
        "Cohere", _ONE, norm="LayerNorm", turns_neighbours=True, has_tables_of_neighbours=True, is_parallel=True
    ),
    "cohere2": Family(
        "Cohere2",
        _ONE,
        norm="LayerNorm",
        window="layer",
        turns_if="sliding_window",
        turns_neighbours=True,
        has_tables_of_neighbours=True,
        is_parallel=True,
    ),
    "starcoder2": Family(
        "Starcoder2",
        mlp=MlpNames(into=("c_fc",), down="c_proj", activation="act", is_gated=False),
        norm="",
        window="config",
    ),
    "phi": Family(
        "Phi",
        _ONE,
        mlp=MlpNames(into=("fc1",), down="fc2", activation="activation_fn", is_gated=False),
        final_norm="final_layernorm",
        norm="",
        output="dense",
        is_parallel=True,
        dropouts=("resid_dropout",),
        first_dropouts=("embed_dropout",),
    ),
}


def family_of(decoder: Any) -> Family | None:
    """The family that a decoder is of; None unless every part is the very class that we know, and nothing more."""
    name = type(decoder).__module__.removeprefix("transformers.models.").partition(".")[0]
    family = _FAMILIES.get(name)
    if family is None or not _is(decoder, name, family.prefix + family.decoder):
        return None
    embedding, layers, norm, *dropouts = parts_of(decoder, family)
    if not isinstance(layers, nn.ModuleList) or not isinstance(norm, nn.Module) or not len(layers):
        return None
    if type(embedding) is not nn.Embedding and not _is(embedding, name, family.prefix + "TextScaledWordEmbedding"):
        return None
    if family.turns_neighbours and not _is(decoder.rotary_emb, name, family.prefix + "RotaryEmbedding"):
        return None  # the tables may lie in another way
    is_known = (
        _is_norm(norm, name, family)
        and all(_is_known_layer(layer, name, family) for layer in layers)
        and all(type(dropout) is nn.Dropout for dropout in dropouts)
    )
    return family if is_known else None


def parts_of(decoder: Any, family: Family) -> tuple[nn.Module, ...]:
    """A decoder's embedding, layers, final norm and dropouts: what runs but for its tables of rotations."""
    return (
        decoder.embed_tokens,
        decoder.layers,
        *(getattr(decoder, name) for name in (family.final_norm, *family.first_dropouts)),
    )


def _is(module: object, name: str, cls: str) -> bool:
    """Whether an object is of a class of transformers' own, itself and not derived from it."""
    kind = type(module)
    return kind.__module__ == f"transformers.models.{name}.modeling_{name}" and kind.__qualname__ == cls


def _is_norm(module: nn.Module, name: str, family: Family) -> bool:
    if not family.norm:
        return type(module) is nn.LayerNorm and module.weight is not None and _holds(module, ["bias", "weight"])
    return _is(module, name, family.prefix + family.norm) and _holds(module, ["weight"])


def _is_known_layer(layer: nn.Module, name: str, family: Family) -> bool:
    return (
        _is(layer, name, family.prefix + "DecoderLayer")
        and _holds(layer, [], ["self_attn", "mlp", *family.norm_names, *family.dropouts])
        and all(_is_norm(getattr(layer, norm), name, family) for norm in family.norm_names)
        and all(type(getattr(layer, dropout)) is nn.Dropout for dropout in family.dropouts)
        and _is_known_attention(layer.self_attn, name, family)
        and _is_known_mlp(layer.mlp, name, family)
    )


def _is_known_attention(attention: Any, name: str, family: Family) -> bool:
    linears = [*(["qkv_proj"] if family.packs_qkv else ["q_proj", "k_proj", "v_proj"]), family.output]
    norms = ["q_norm", "k_norm"] if family.qk_norm else []
    return (
        _is(attention, name, family.prefix + "Attention")
        and _holds(attention, [], [*linears, *norms])
        and all(type(getattr(attention, linear)) is nn.Linear for linear in linears)
        and all(_is_norm(getattr(attention, norm), name, family) for norm in norms)
    )


def _is_known_mlp(mlp: Any, name: str, family: Family) -> bool:
    linears = [*family.mlp.into, family.mlp.down]
    return (
        _is(mlp, name, family.prefix + "MLP")
        and _holds(mlp, [], [*linears, family.mlp.activation])
        and all(type(getattr(mlp, linear)) is nn.Linear for linear in linears)
        and rowwise.gate(getattr(mlp, family.mlp.activation)) is not None
    )


def _holds(module: nn.Module, parameters: list[str], children: list[str] | None = None) -> bool:
    """Whether a module has these parameters and children, and no others."""
    return sorted(module._parameters) == parameters and sorted(module._modules) == sorted(children or [])
