"""Checkpoints of few bits with a scale a block (fp8, mxfp8, mxfp4): transformers multiplies them out as it loads."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from iclperm.errors import ConfigError

# Elsewhere transformers would compute in these on some cards, by kernels that it fetches, and not on others.
_METHODS = ("fp8", "mxfp8", "mxfp4")


def method_of(settings: Mapping[str, Any]) -> str | None:
    """How the weights are stored of a folder whose config.json says ``settings``, if they are multiplied out on
    loading."""
    told = settings.get("quantization_config")
    method = told.get("quant_method") if isinstance(told, Mapping) else None
    return method if method in _METHODS else None


def multiplied_out(config: Any, name: object) -> Any:
    """The configuration, by which no weight stays in few bits.

    Raises ConfigError without accelerate, which transformers needs to load such weights.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError(
            f"the weights of {str(name)!r} are quantized, and to read them needs accelerate, which is not installed: "
            "pip install 'iclperm[accelerate]'"
        )
    config.quantization_config = {**config.quantization_config, "dequantize": True}
    return config


def in_words(method: str, dtype: str) -> str:
    """Of weights that were stored so and are loaded in a dtype, in a few words."""
    return f"{method} weights, dequantised to {dtype}"
