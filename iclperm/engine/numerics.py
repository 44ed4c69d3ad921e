"""What the last bits of a result depend on besides model and prompt."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from iclperm import _core
from iclperm.engine.device import gpu_versions
from iclperm.engine.kernels.triton_launch import installed_version
from iclperm.engine.model import TreeModel
from iclperm.engine.plain_model import PlainModel


def numerics_of(model: PlainModel, pack_tokens: int | None, memory_budget: int | None) -> dict[str, Any]:
    """By name, JSON-safe: of the model's ways, its device and the libraries; sizes of packs as they are given."""
    on_cpu, is_fused = model.device.type == "cpu", model.layers == "fused"
    return {
        "attention": model.attention,
        "layers": model.layers,
        "products": "onednn" if is_fused and model.uses_onednn else "torch",
        "head": "onednn" if isinstance(model, TreeModel) and model.head_is_onednn else "torch",
        "isa": _core.isa() if on_cpu and (model.attention == "native" or is_fused) else None,
        "triton": None if on_cpu else installed_version(),
        "device": model.device_name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads() if on_cpu else None,
        **({} if on_cpu else gpu_versions(model.device)),
        "pack_tokens": pack_tokens,
        "memory_budget": memory_budget,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
