"""From a checkpoint to a model and its tokenizer: safetensors only, no remote code, one line where it cannot be."""

from __future__ import annotations

import copy
import importlib.util
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

from iclperm.engine import quantized
from iclperm.engine.adapter import check_adapter, merged
from iclperm.engine.dtypes import dtype_of, fit_dtype
from iclperm.engine.folder import (
    Stored,
    check_generation,
    check_weights,
    first_line,
    is_no_part,
    model_folder,
    settings_of,
    stored_weights,
)
from iclperm.engine.gguf_file import WEIGHTS, about_file, file_of, in_words, without_a_bar
from iclperm.engine.tokenizer import load_tokenizer
from iclperm.errors import ConfigError, ModelError, printable

# Heads that predict something else than the next token.
_OTHER_HEAD = re.compile(r"For(MaskedLM|(Sequence|Token)Classification|QuestionAnswering|MultipleChoice)$")
_LAYER_KEY = re.compile(r"\.(layers|h|blocks)\.(\d+)\.")
_BOTH_WAYS = {"bert-generation", "xlnet"}
# Of checkpoints of text and images: how the text part's keys are called in them, and what is left out.
_TEXT_KEYS = {
    "gemma3": {r"^language_model\.lm_head": "lm_head", r"^(model\.language_model|language_model\.model)": "model"}
}
_IMAGE_KEY = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
BALANCED = "balanced"
"""Not a device but a way to place layers on all accelerators there are, and what finds no room there in the host."""


def load(
    name: str | Path,
    *,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    adapter: str | Path | None = None,
) -> tuple[PreTrainedModel, Any]:
    """Model and tokenizer from a folder, a hub id or a GGUF file: safetensors only but for that, no remote code.

    ``dtype="auto"``: the checkpoint's on a GPU, float32 on a CPU, so that results do not depend on the machine; for
    bfloat16 on a GPU without it float32 or float16, with a warning (`fit_dtype`).
    ``device="balanced"`` spreads the layers over all GPUs, and over the host what they cannot hold. Of a checkpoint of
    text and images the text part is loaded. Weights in fp8, mxfp8 and mxfp4 are multiplied out. ``adapter`` is the
    folder of one of PEFT's, which is merged into the weights. Raises ModelError in one line for a folder without
    weights, pickled weights, remote code, an unknown architecture or weights that do not fill the model, ConfigError
    for ``balanced`` and for such weights without accelerate.
    """
    place, wanted = _device(device), dtype_of(dtype)
    if device == BALANCED:
        _refuse_without_accelerate()
    folder = model_folder(name, revision)
    settings = settings_of(folder)
    if adapter is not None:
        _refuse_to_merge(adapter, folder, settings, device)
    config, file = _config_of(folder, folder, settings), file_of(folder)
    stored = stored_weights(folder) if file is None else {}
    check_generation(folder)
    if file is not None:
        _refuse_other_count(file, folder, config)
    else:
        _refuse_other_numbers(folder, config, check_weights(folder, stored, settings))
        if not settings.get("quantization_config"):
            _refuse_few_numbers(folder, config, sum(math.prod(weight.shape) for weight in stored.values()))
    if wanted == "auto" and place.type == "cpu":
        wanted = torch.float32
    wanted, said = fit_dtype(wanted, _dtype_kept(config, stored), _cards(device), lambda: _num_weights(folder, config))
    if said:
        warnings.warn(said, stacklevel=2)
    method = quantized.method_of(settings)
    if method is not None:
        quantized.refuse_other_scales(name, stored, settings["quantization_config"])
        config = quantized.multiplied_out(config, name)
    text_keys = _TEXT_KEYS.get(config.model_type)
    source: dict[str, Any] = {"use_safetensors": True} if file is None else {"gguf_file": WEIGHTS}
    try:
        with _quiet(), nullcontext() if file is None else without_a_bar():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=_text_part(config),
                local_files_only=True,
                trust_remote_code=False,
                dtype=wanted,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are reported below, by name
                **source,
                **({} if text_keys is None else {"key_mapping": text_keys}),
                **({"device_map": BALANCED} if device == BALANCED else {}),
            )
    except Exception as error:
        is_quantized = file is None and settings.get("quantization_config")
        remedy = "use a checkpoint that is not quantized" if is_quantized else "save or fetch the folder again"
        raise ModelError(f"cannot load the weights of {str(name)!r}: {_reason(error)}; {remedy}") from error
    model, info = loaded
    if file is not None:
        del model.config.quantization_config  # nothing is quantized any more
        model.stored_as = in_words(folder, str(model.dtype).removeprefix("torch."))
    if method is not None:
        quantized.to_one_dtype(model, _dtype_loaded(model, wanted))
        model.stored_as = quantized.in_words(method, str(model.dtype).removeprefix("torch."))
    unused = [key for key in map(str, info["unexpected_keys"]) if not is_no_part(key, stored, settings)]
    _refuse_misfit(name, config, info, [key for key in unused if not (text_keys and _IMAGE_KEY.match(key))])
    if adapter is not None:
        model = merged(model, Path(adapter))
    try:
        served: PreTrainedModel = (model if device == BALANCED else model.to(place)).eval()
    except Exception as error:
        remedy = "choose another device"
        if place.type == "cuda" and torch.version.cuda is None:
            remedy = "install PyTorch's build for your GPU (pytorch.org), or choose another device"
        raise ModelError(f"cannot put {str(name)!r} on {place}: {first_line(error)}; {remedy}") from error
    return served, load_tokenizer(folder)


def _refuse_to_merge(adapter: str | Path, folder: Path, settings: Mapping[str, Any], device: str) -> None:
    """Raises ModelError for an adapter that cannot be merged into this model, or where it is to lie."""
    check_adapter(Path(adapter), folder)
    if settings.get("quantization_config"):
        raise ModelError(
            f"the weights of {str(folder)!r} are quantized, and an adapter merges into others alone; give the "
            "checkpoint in float32, bfloat16 or float16"
        )
    if device == BALANCED:
        raise ModelError(
            f"an adapter is merged on one device, and device is {BALANCED!r}; choose one, or merge it first"
        )


def _refuse_misfit(name: str | Path, config: Any, info: Mapping[str, Any], unused: list[str]) -> None:
    """Raises ModelError, naming the first keys, where weights do not fill the model or hold what it does not use."""
    problems = {
        "missing keys": info["missing_keys"],
        "keys of another shape": info["mismatched_keys"],
        "layers that the configuration lacks": [key for key in unused if _layer_of(key) >= _num_layers(config)],
        "keys that its architecture does not use": unused,
    }
    for problem, keys in problems.items():
        if first := sorted(map(str, keys))[:3]:
            raise ModelError(
                f"the weights of {str(name)!r} do not fit its configuration: {problem}, {first}; "
                "use a complete checkpoint and its own config.json"
            )


def _layer_of(key: str) -> int:
    """The number of the layer that a weight belongs to; -1 for one of none."""
    found = _LAYER_KEY.search(key)
    return int(found[2]) if found else -1


def _num_layers(config: Any) -> int:
    return int(getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0) or 0)


def _reason(error: Exception) -> str:
    """What an error says in one line; of a name that was looked up, that it is unknown."""
    return f"there is no {first_line(error)}" if isinstance(error, KeyError) else first_line(error)


def _refuse_few_numbers(folder: Path, config: Any, stored: int) -> None:
    """Raises ModelError where a configuration asks for far more numbers than there are, before memory is taken."""
    asked = _num_weights(folder, config)
    if asked > 2 * stored:
        raise ModelError(
            f"config.json of {str(folder)!r} makes a model of {asked:,} numbers, but its weights hold {stored:,}; "
            "use a complete checkpoint and its own config.json"
        )


def _refuse_other_count(file: Path, folder: Path, config: Any) -> None:
    """Raises ModelError where a GGUF file holds other numbers than the model that its configuration makes takes."""
    asked, stored = _num_weights(folder, config), about_file(folder)["num_weights"]
    if asked != stored:
        raise ModelError(
            f"'{file}' holds {stored:,} numbers, but the {config.model_type!r} model that transformers makes of it has "
            f"{asked:,}; give the folder of the safetensors checkpoint"
        )


def _num_weights(name: str | Path, config: Any) -> int:
    return sum(parameter.numel() for parameter in _shapes(name, config, torch.float32).parameters())


def load_config(name: str | Path, revision: str | None = None) -> Any:
    """The configuration of a causal language model in a folder or of a hub id; no weights are needed.

    Raises ModelError in one line for a folder without one, remote code, or an architecture that is none. Code that a
    folder brings for an architecture that transformers has is left alone, with a warning.
    """
    folder = model_folder(name, revision, weights=False)
    return _config_of(name, folder, settings_of(folder))


def _config_of(name: str | Path, folder: Path, settings: dict[str, Any]) -> Any:
    if "auto_map" in settings:
        _refuse_foreign_code(folder, settings)
    try:
        with _quiet():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise ModelError(
            f"cannot read the configuration of {str(name)!r}: {first_line(error)}; use the config.json that came with "
            "the weights"
        ) from error
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            f"{str(name)!r} is a {config.model_type!r} model, which is no causal language model that "
            "transformers knows; give a decoder-only model"
        )
    _refuse_unknown_quantization(name, settings)
    if (reason := _not_causal(config)) is not None:
        raise ModelError(
            f"{str(name)!r} is no causal language model: {reason}; its answers would depend on what follows them. "
            "Give a decoder-only model"
        )
    if config.model_type == "gemma" and config.hidden_act == "gelu":
        # What the first releases wrote for the tanh approximation; transformers 5.17 takes it at its word.
        config.hidden_act = "gelu_pytorch_tanh"
    return config


def _refuse_foreign_code(folder: Path, settings: dict[str, Any]) -> None:
    """Raises ModelError where a folder's own code (auto_map) would be needed; else warns that it does not run."""
    kind, named = settings.get("model_type"), settings.get("architectures") or []
    ours = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) if isinstance(kind, str) else None
    if ours is None or (named and ours not in named):
        raise ModelError(
            f"model folder '{folder}' brings its own code (auto_map in config.json), which is not run; "
            "use a checkpoint of an architecture that transformers has built in"
        )
    warnings.warn(
        f"model folder '{folder}' brings its own code (auto_map in config.json), which is not run: "
        f"{ours} of transformers serves it",
        stacklevel=3,
    )


def _refuse_unknown_quantization(name: str | Path, settings: dict[str, Any]) -> None:
    """Raises ModelError for a way to quantize that transformers would pass over, taking the numbers as they are."""
    told = settings.get("quantization_config")
    method = told.get("quant_method") if isinstance(told, dict) else told
    is_bitsandbytes = isinstance(told, dict) and (told.get("load_in_8bit") or told.get("load_in_4bit"))
    is_known = isinstance(method, str) and method in AUTO_QUANTIZATION_CONFIG_MAPPING
    if told and not is_known and not is_bitsandbytes:
        raise ModelError(
            f"{str(name)!r} is quantized in a way that transformers does not know (quant_method "
            f"{printable(repr(method))[:100]}); use a checkpoint of float32, bfloat16 or float16"
        )


def _not_causal(config: Any) -> str | None:
    """Why a model of this configuration sees what follows a token, or predicts it otherwise than from what is before.

    What a configuration does not tell is found on the first use (`selfcheck.refuse_unless_causal`).
    """
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        return f"{kind!r} has an encoder (is_encoder_decoder)"
    if other := next((name for name in config.architectures or () if _OTHER_HEAD.search(name)), None):
        return f"its architecture is {other!r}"
    if (both := getattr(config, "use_bidirectional_attention", None)) and both != "vision":
        return f"{kind!r} attends in both directions (use_bidirectional_attention)"
    # Of the other kinds is_decoder says nothing: GPT-NeoX leaves it unset.
    key = "causal" if kind == "xlm" else "is_decoder"
    if (kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES or kind in _BOTH_WAYS) and not getattr(config, key, False):
        return f"{kind!r} attends in both directions ({key} is not set)"
    return None


def _refuse_other_numbers(folder: Path, config: Any, others: list[tuple[str, str]]) -> None:
    """Raises ModelError where weights that the model keeps as floating-point numbers are stored as others."""
    if not others:
        return
    is_told = getattr(config, "quantization_config", None)
    lack = "no key holds its scale" if is_told else "config.json has no quantization_config"
    own = {} if is_told else _shapes(folder, config, torch.float32).state_dict()
    for key, kind in others:
        is_float = own[key].is_floating_point() if key in own else key.endswith(".weight")
        if is_float:
            raise ModelError(
                f"the weights of {str(folder)!r} are quantized: {key} is {kind}, and {lack}, so their scales are not "
                "known; use a checkpoint of float32, bfloat16 or float16"
            )


def load_shapes(
    name: str | Path, *, device: str = "auto", dtype: str | torch.dtype = "auto", revision: str | None = None
) -> tuple[PreTrainedModel, torch.device]:
    """The model that ``load`` would give, on the meta device (every shape, no numbers), and the device meant for it.

    A configuration that names no dtype counts as float32. Raises ModelError as ``load_config`` does.
    """
    place, wanted = _device(device), dtype_of(dtype)
    config = load_config(name, revision)
    kept = "float32" if place.type == "cpu" else _dtype_kept(config, {})
    wanted, _ = fit_dtype(wanted, kept, _cards(device), lambda: _num_weights(name, config))
    if not isinstance(wanted, torch.dtype):
        wanted = dtype_of(kept)
    return _shapes(name, config, wanted), place


def _shapes(name: str | Path, config: Any, dtype: str | torch.dtype) -> PreTrainedModel:
    auto: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"), _quiet():
            # A copy, as transformers writes the dtype into what it is given.
            own = copy.deepcopy(_text_part(config))
            model: PreTrainedModel = auto.from_config(own, dtype=dtype, trust_remote_code=False)
    except Exception as error:
        raise ModelError(
            f"the configuration of {str(name)!r} makes no model: {_reason(error)}; use the config.json that came with "
            "the weights"
        ) from error
    return model


def has_device(name: str) -> bool:
    """Whether this machine has a device."""
    place = _device(name)
    return place.type == "cpu" or bool(getattr(torch, place.type).is_available())


def is_gpu(name: str) -> bool:
    """Whether a device, by its name, is an NVIDIA or AMD GPU that this machine has."""
    return _device(name).type == "cuda" and has_device(name)


def gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return named[:count] or [str(number) for number in range(count)]


def bos_ids(folder: Path) -> tuple[int, ...]:
    """The ids that a folder's config.json names as the beginning of a text; an architecture's default is not its word.

    Raises ModelError as ``load_config`` does.
    """
    given = settings_of(folder).get("bos_token_id")
    return (given,) if isinstance(given, int) else tuple(given or ())


def _dtype_kept(config: Any, stored: Mapping[str, Stored]) -> str:
    """The dtype that a configuration names, its part on text first; else bfloat16 if a weight is, or float32."""
    parts = (config.get_text_config(decoder=True), config)
    if named := next((part.dtype for part in parts if part.dtype), None):
        return str(named).removeprefix("torch.")
    return "bfloat16" if any(weight.kind == "BF16" for weight in stored.values()) else "float32"


def _dtype_loaded(model: PreTrainedModel, wanted: str | torch.dtype) -> torch.dtype:
    return model.dtype if isinstance(wanted, str) else wanted


@contextmanager
def _quiet() -> Iterator[None]:
    """Within: no load report and no progress bar of transformers'; what matters in them is raised as an error."""
    log: Any = transformers_logging
    verbosity, has_bar = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if has_bar:
            log.enable_progress_bar()


def _device(name: str) -> torch.device:
    """A device by its name; for ``balanced`` the one that prompts go to first."""
    try:
        return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name in ("auto", BALANCED) else name)
    except RuntimeError as error:
        raise ModelError(f"device {name!r} is unknown; give auto, cpu, cuda or cuda:0, mps, or balanced") from error


def _cards(name: str) -> list[torch.device]:
    """The CUDA devices that a device's name means and this machine has: one, none, or for ``balanced`` all."""
    place, count = _device(name), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == BALANCED:
        return [torch.device("cuda", number) for number in range(count)]
    return [place] if place.type == "cuda" and (place.index or 0) < count else []


def _refuse_without_accelerate() -> None:
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError(
            f"device {BALANCED!r} needs accelerate, which is not installed: pip install 'iclperm[accelerate]'"
        )


def _text_part(config: Any) -> Any:
    """The configuration of a checkpoint's text part; itself where there is no other part, or none that is left out."""
    return config.get_text_config(decoder=True) if config.model_type in _TEXT_KEYS else config
