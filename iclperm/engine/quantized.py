"""Checkpoints of few bits with a scale a block (fp8, mxfp8, mxfp4): transformers multiplies them out as it loads."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from iclperm.errors import ConfigError, ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from iclperm.engine.folder import Stored

# Elsewhere transformers would compute in these on some cards, by kernels that it fetches, and not on others.
_METHODS = ("fp8", "mxfp8", "mxfp4")
_BLOCKS = {"fp8": (128, 128), "mxfp8": (1, 32)}  # of rows and columns, where a configuration does not say
_SCALES = ("weight_scale_inv", "scale", "qscale_weight")  # what it reads of a module's, in place of "weight"


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


def refuse_other_scales(name: object, stored: Mapping[str, Stored], told: Mapping[str, Any]) -> None:
    """Raises ModelError where weights in fp8 have no scales that transformers reads, or not one for each equal block.

    It takes the size of blocks from the number of scales: where the last ones of a row or column are smaller, or scales
    lie in another way, it would multiply by those of neighbours without a word.
    """
    block = told.get("weight_block_size", _BLOCKS.get(told["quant_method"]))
    for key, weight in stored.items():
        if not weight.kind.startswith("F8_E") or weight.kind == "F8_E8M0" or not _is_weight(key):
            continue
        module = key.removesuffix("weight")
        scale = next(
            (stored[each] for each in (f"{key}_scale_inv", *(module + of for of in _SCALES)) if each in stored), None
        )
        if scale is None:
            other = f"; {key}_scale is not read by transformers" if f"{key}_scale" in stored else ""
            raise ModelError(
                f"the weights of {str(name)!r} are quantized, and {key} has no scale {key}_scale_inv{other}; "
                "use a checkpoint of float32, bfloat16 or float16"
            )
        rows, columns = weight.shape[-2:]
        grid = scale.shape[-2:]
        if math.prod(scale.shape) in (0, 1):
            continue
        expected = (-(-rows // block[0]), -(-columns // block[1])) if block is not None else (rows, 1)
        are_equal = block is None or all(
            number == 1 or size == number * each
            for size, number, each in zip((rows, columns), grid, block, strict=True)
        )
        if grid != expected or not are_equal:
            cut = f"blocks of {block[0]} x {block[1]}" if block is not None else "rows"
            raise ModelError(
                f"the weights of {str(name)!r} are quantized, and {key} of {rows} x {columns} numbers has scales of "
                f"{' x '.join(map(str, grid))}, which are not those of equal {cut}; transformers would multiply by "
                "others. Use a checkpoint of float32, bfloat16 or float16"
            )


def _is_weight(key: str) -> bool:
    return not key.endswith(("_scale_inv", ".scale", ".qscale_weight", "_scale"))


def to_one_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Brings the weights of a model to one dtype that were no blocks of few bits and kept their own.

    Tables that no checkpoint holds, as angles of rotary embeddings, and weights that their architecture wants in
    float32 stay as they are, as in a checkpoint that was never quantized.
    """
    import torch

    wide = {*(model._keep_in_fp32_modules_strict or ())}
    if dtype == torch.float16:
        wide |= {*(model._keep_in_fp32_modules or ())}
    for name, weight in model.named_parameters():
        if weight.is_floating_point():
            stays = any(f".{part}." in f".{name}." for part in wide)
            weight.data = weight.data.to(torch.float32 if stays else dtype)


def in_words(method: str, dtype: str) -> str:
    """Of weights that were stored so and are loaded in a dtype, in a few words."""
    return f"{method} weights, dequantised to {dtype}"
