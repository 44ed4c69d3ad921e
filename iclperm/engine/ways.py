"""Which implementations a model's layers and head run in, or would run in on a device that it is not on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from iclperm.engine.kernels.linear import uses_onednn
from iclperm.engine.kernels.triton_compilation import MAX_HEAD_DIM
from iclperm.engine.kernels.triton_launch import may_launch, may_read_head
from iclperm.engine.layers import may_fuse
from iclperm.engine.model import TreeModel
from iclperm.engine.plain_model import PlainModel


@dataclass(frozen=True)
class Ways:
    """Which implementations the layers and the head of a model run in."""

    attention: str
    is_fused: bool
    num_inner: int  # rows of an MLP's width at once in our layers
    fuses_head: bool
    has_onednn: bool
    has_onednn_head: bool

    @classmethod
    def of(cls, model: PlainModel, place: torch.device, attention: str = "auto", layers: str = "auto") -> Ways:
        """Those of a model that is served; of one without weights, those that it would have on ``place`` if these were
        asked for."""
        head: object = model.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if isinstance(model, TreeModel):
            attention, is_fused, fuses_head = model.attention, model.layers == "fused", model.fuses_head
            calls_head = model.head_is_onednn
        else:
            is_native = place.type == "cpu" and model.dtype in (torch.float32, torch.bfloat16)
            takes_heads = model.facts.head_size <= MAX_HEAD_DIM and may_launch(place, model.dtype)
            best = "native" if is_native else "triton" if takes_heads else "torch"
            attention = best if attention == "auto" else attention
            is_fused = runs_our_layers(model, place, layers)
            is_plain = layers == "auto" and type(head) is nn.Linear
            fuses_head = is_plain and may_read_head(place, model.dtype) and place.type != "cpu"
            calls_head = is_plain and is_native and uses_onednn(place, model.dtype, is_head=True)
        # Of float32, torch itself sends no product to oneDNN.
        has_onednn = uses_onednn(place, model.dtype) and (is_fused or model.dtype != torch.float32)
        has_onednn_head = calls_head or (has_onednn and model.dtype != torch.float32)
        num_inner = decoder.family.mlp.num_inner if is_fused and (decoder := model.known_decoder) else 0
        return cls(attention, is_fused, num_inner, fuses_head, has_onednn, has_onednn_head)


def runs_our_layers(model: PlainModel, place: torch.device, layers: str = "auto") -> bool:
    """Whether a model without weights would run in our layers on ``place`` where these were asked for."""
    return layers == "auto" and may_fuse(place, model.dtype) and model.known_decoder is not None
