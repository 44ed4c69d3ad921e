"""From a checkpoint to a model and its tokenizer: safetensors only, no remote code, one line where it cannot be."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from iclperm.engine.facts import MAKES_A_TOKENIZER
from iclperm.errors import ConfigError, ModelError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LAYER_KEY = re.compile(r"\.(layers|h|blocks)\.\d+\.")
# Of checkpoints of text and images: how the text part's keys are called in them, and what is left out.
_TEXT_KEYS = {
    "gemma3": {r"^language_model\.lm_head": "lm_head", r"^(model\.language_model|language_model\.model)": "model"}
}
_IMAGE_KEY = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
_SIZE_KEYS = ("vocab_size", "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head")
_WINDOW_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
BALANCED = "balanced"
"""Not a device but a way to place layers on all accelerators there are, and what finds no room there in the host."""


def load(
    name: str | Path, *, device: str = "auto", dtype: str | torch.dtype = "auto", revision: str | None = None
) -> tuple[PreTrainedModel, Any]:
    """Model and tokenizer from a folder or a hub id: safetensors only, no remote code.

    ``dtype="auto"``: the checkpoint's on a GPU, float32 on a CPU, so that results do not depend on the machine.
    ``device="balanced"`` spreads the layers over all GPUs, and over the host what they cannot hold. Of a checkpoint of
    text and images the text part is loaded. Raises ModelError in one line for a folder without weights, pickled
    weights, remote code, an unknown architecture or weights that do not fill the model, ConfigError for ``balanced``
    without accelerate.
    """
    place, wanted = _device(device), _dtype(dtype)
    if device == BALANCED:
        _refuse_without_accelerate()
    config = load_config(name, revision)
    _refuse_folder_without_weights(Path(name))
    if wanted == "auto" and place.type == "cpu":
        wanted = torch.float32
    text_keys = _TEXT_KEYS.get(config.model_type)
    try:
        with _quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                name,
                config=_text_part(config),
                revision=revision,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=wanted,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are reported below, by name
                **({} if text_keys is None else {"key_mapping": text_keys}),
                **({"device_map": BALANCED} if device == BALANCED else {}),
            )
    except Exception as error:
        raise ModelError(f"cannot load the weights of {str(name)!r}: {_first_line(error)}") from error
    model, info = loaded
    problems = {
        "missing keys": info["missing_keys"],
        "keys of another shape": info["mismatched_keys"],
        "layers that the configuration lacks": [
            key
            for key in map(str, info["unexpected_keys"])
            if _LAYER_KEY.search(key) and not (text_keys and _IMAGE_KEY.match(key))
        ],
    }
    for problem, keys in problems.items():
        if first := sorted(map(str, keys))[:3]:
            raise ModelError(
                f"the weights of {str(name)!r} do not fit its configuration: {problem}, {first}; "
                "use a complete checkpoint"
            )
    try:
        served: PreTrainedModel = (model if device == BALANCED else model.to(place)).eval()
    except Exception as error:
        raise ModelError(f"cannot put {str(name)!r} on {place}: {_first_line(error)}") from error
    return served, load_tokenizer(name, revision)


def load_config(name: str | Path, revision: str | None = None) -> Any:
    """The configuration of a causal language model in a folder or of a hub id; no weights are needed.

    Raises ModelError in one line for a folder without one, remote code, or an architecture that is none.
    """
    if Path(name).is_dir():
        _settings(Path(name))  # before transformers tries to read them
    try:
        with _quiet():
            config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"cannot read the configuration of {str(name)!r}: {_first_line(error)}") from error
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            f"{str(name)!r} is a {config.model_type!r} model, which is no causal language model that "
            "transformers knows; give a decoder-only model"
        )
    if config.model_type == "gemma" and config.hidden_act == "gelu":
        # What the first releases wrote for the tanh approximation; transformers 5.17 takes it at its word.
        config.hidden_act = "gelu_pytorch_tanh"
    return config


def load_shapes(
    name: str | Path, *, device: str = "auto", dtype: str | torch.dtype = "auto", revision: str | None = None
) -> tuple[PreTrainedModel, torch.device]:
    """The model that ``load`` would give, on the meta device (every shape, no numbers), and the device meant for it.

    A configuration that names no dtype counts as float32. Raises ModelError as ``load_config`` does.
    """
    place, wanted = _device(device), _dtype(dtype)
    config = load_config(name, revision)
    if not isinstance(wanted, torch.dtype):
        wanted = torch.float32 if place.type == "cpu" else _dtype(_named_dtype(config))
    auto: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"), _quiet():
            model: PreTrainedModel = auto.from_config(_text_part(config), dtype=wanted, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"the configuration of {str(name)!r} makes no model: {_first_line(error)}") from error
    return model, place


def has_device(name: str) -> bool:
    """Whether this machine has a device."""
    place = _device(name)
    return place.type == "cpu" or bool(getattr(torch, place.type).is_available())


def bos_ids(folder: Path) -> tuple[int, ...]:
    """The ids that a folder's config.json names as the beginning of a text; an architecture's default is not its word.

    Raises ModelError as ``load_config`` does.
    """
    given = _settings(folder).get("bos_token_id")
    return (given,) if isinstance(given, int) else tuple(given or ())


def _named_dtype(config: Any) -> str:
    """The dtype that a configuration names, first that of its part on text; float32 if it names none."""
    parts = (config.get_text_config(decoder=True), config)
    return str(next((part.dtype for part in parts if part.dtype), "float32")).removeprefix("torch.")


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
        raise ModelError(f"device {name!r} is unknown; give auto, cpu, cuda or cuda:0, or balanced") from error


def _refuse_without_accelerate() -> None:
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError(
            f"device {BALANCED!r} needs accelerate, which is not installed: pip install 'iclperm[accelerate]'"
        )


def _text_part(config: Any) -> Any:
    """The configuration of a checkpoint's text part; itself where there is no other part, or none that is left out."""
    return config.get_text_config(decoder=True) if config.model_type in _TEXT_KEYS else config


def _dtype(name: str | torch.dtype) -> str | torch.dtype:
    wanted = name if name == "auto" or isinstance(name, torch.dtype) else getattr(torch, name, None)
    if wanted != "auto" and wanted not in _DTYPES:
        raise ModelError(f"dtype {name!r} is unknown; give auto, float32, bfloat16 or float16")
    return wanted


def load_tokenizer(name: str | Path, revision: str | None = None) -> Any:
    """The tokenizer beside a model, without its weights; None for a folder that has no tokenizer files.

    Raises ModelError for files that do not make a tokenizer.
    """
    if Path(name).is_dir() and not any((Path(name) / file).exists() for file in MAKES_A_TOKENIZER):
        return None
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"cannot load the tokenizer of {str(name)!r}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    """What an error says, in one line; where its first line ends in a colon, with those that follow."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    first = next((number for number, line in enumerate(lines, 1) if not line.rstrip().endswith(":")), len(lines))
    return " ".join(line.strip() for line in lines[:first])[:300]


def _settings(folder: Path) -> dict[str, Any]:
    """What a folder's config.json says, its part on text over the rest.

    Raises ModelError in one line for a folder or a file that is none, for remote code, and for sizes that are no
    whole numbers.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"model folder '{folder}' has no config.json; give a folder saved by save_pretrained")
    try:
        settings = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"'{config}' is not valid JSON: {_first_line(error)}") from error
    if not isinstance(settings, dict):
        raise ModelError(f"'{config}' is no configuration: a JSON object is needed")
    if "auto_map" in settings:
        raise ModelError(
            f"model folder '{folder}' brings its own code (auto_map in config.json), which is not run; "
            "use a checkpoint of an architecture that transformers has built in"
        )
    text = settings.get("text_config")
    if not isinstance(text, dict | None):
        raise ModelError(
            f"cannot read the configuration of {str(folder)!r}: text_config is {text!r}; a JSON object is needed"
        )
    settings |= text or {}
    for key in (*_SIZE_KEYS, *_WINDOW_KEYS):
        value = settings.get(key)
        if value is not None and (type(value) is not int or (key in _SIZE_KEYS and value < 1)):
            raise ModelError(
                f"cannot read the configuration of {str(folder)!r}: {key} is {value!r}; give a whole number from 1 on"
            )
    return settings


def _refuse_folder_without_weights(folder: Path) -> None:
    if not folder.is_dir() or any(not file.name.startswith("adapter_") for file in folder.glob("*.safetensors")):
        return
    pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in folder.glob(pattern))
    if pickled:
        raise ModelError(
            f"model folder '{folder}' has only pickled weights ({pickled[0]}), which can run code; "
            "convert them with save_pretrained(..., safe_serialization=True)"
        )
    raise ModelError(f"model folder '{folder}' has no weights; it needs model.safetensors")
