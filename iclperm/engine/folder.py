"""What a model folder is, before anything in it is loaded: where it lies, what its config.json says, which weights."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from iclperm import demo
from iclperm.base.files import what_fetches
from iclperm.engine.facts import ADAPTER_FILES, TOKENIZER_FILE, TOKENIZER_FILES, WEIGHT_FILES
from iclperm.engine.gguf_file import gguf_folder, is_gguf
from iclperm.errors import ConfigError, ModelError, printable

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PATH_STARTS = ("/", "./", "../", "~")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_READ = (*TOKENIZER_FILES, "*.json", "*.model", WEIGHT_FILES)
_FILES = frozenset(
    {"config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", TOKENIZER_FILE}
    | {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"}
)
_ADAPTERS = (*ADAPTER_FILES, "adapter_model.bin")
_MOST_JSON_BYTES = 64 << 20
_SIZE_KEYS = ("vocab_size", "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head")
_WINDOW_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_PART_KEYS = ("num_key_value_heads", "head_dim", "intermediate_size", "n_inner", "ffn_dim")
_DTYPES = ("float32", "bfloat16", "float16", "float64")
# Those of towers for images and sound, of encoders and of stacks; not of windows.
_LAYER_COUNT = re.compile(r"(?!max_window)[a-z_]*(layers?|num_blocks)(_per_\w+)?")
_LABEL_KEYS = ("num_labels", "id2label", "label2id")
_MOST_LAYERS, _MOST_LABELS = 1_000, 30_000
_SCALES = re.compile(r"scale|absmax|SCB")
_MASK = re.compile(r"(^|\.)(attn|attention)\.(bias|masked_bias)$")
_TABLE = re.compile(r"(^|\.)(rotary_emb\.inv_freq|position_ids)$")
_OTHER_PART = re.compile(r"(model\.)?(vision|visual|audio|multi_modal|embed_(vision|audio))[a-z_]*\.")
_BESIDE_QUANTIZED = re.compile(r"scale|zero|g_idx|absmax|SCB|quant")
_MOST_WEIGHTS, _MOST_HEADER_BYTES = 500_000, 100_000_000
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def model_folder(name: str | Path, revision: str | None = None, *, weights: bool = True) -> Path:
    """The folder of a model: itself, the bundled one's (``demo``), that of a GGUF file, or that of a hub id, fetched
    where it is not there yet.

    A name that begins like a path, has two slashes or ends in .gguf is a path and nothing else; any other is a path if
    it is there, else a hub id, asked for once. Of a hub id without ``weights`` only the small files are fetched. Raises
    `ModelError` in one line for another file, and for what is not there; `ConfigError` for the revision of a folder or
    file.
    """
    text = str(name)
    folder = demo.model_path() if text == "demo" else Path(name)
    try:
        is_there, is_folder = folder.exists(), folder.is_dir()
    except OSError as error:
        why = (error.strerror or "").lower()
        raise ModelError(f"there is no model folder {_short(text)}: {why}; give 'demo', a folder or a hub id") from None
    is_file = not is_folder and is_gguf(folder)
    if is_folder or is_file:
        if revision is not None:
            raise ConfigError(
                f"revision is {revision!r}, but the model {text!r} is a {'file' if is_file else 'folder'}; a hub id "
                "has revisions: leave it out"
            )
        return gguf_folder(folder) if is_file else folder
    if is_there:
        raise ModelError(_refused_file(folder))
    if command := what_fetches(folder):
        raise ModelError(f"the model folder {text!r} is not here, only a pointer to it; run: {command}")
    is_path = text.startswith(_PATH_STARTS) or text in (".", "..") or text.count("/") > 1 or text.endswith(".gguf")
    if is_path or not _HUB_NAME.fullmatch(text):
        raise ModelError(f"there is no model folder {text!r}; give 'demo', a folder or a hub id")
    from huggingface_hub import snapshot_download

    patterns = [pattern for pattern in _READ if weights or pattern != WEIGHT_FILES]
    try:
        return Path(snapshot_download(text, revision=revision, allow_patterns=patterns))
    except Exception as error:  # also those of the HTTP library beneath it, where a connection breaks
        raise ModelError(
            f"the model {text!r} is neither a folder nor to be had from the hub: {first_line(error)}; give a model's "
            "folder, or a hub id that can be reached"
        ) from error


def _refused_file(path: Path) -> str:
    """Why a file is no model: a model is a folder, and a pickle is never opened."""
    if any(path.match(pattern) for pattern in _PICKLES):
        return f"the model {str(path)!r} is a file of pickled weights, which can run code; give a folder of safetensors"
    return f"the model {str(path)!r} is a file; give the folder that holds it and its config.json: {str(path.parent)!r}"


def settings_of(folder: Path) -> dict[str, Any]:
    """What a folder's config.json says, its part on text over the rest.

    Raises ModelError in one line for a folder that is none or holds an adapter, for a file that is no configuration,
    and for sizes that are no whole numbers.
    """
    _refuse_adapter(folder)
    for path in folder.iterdir():
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ModelError(f"{str(path)!r} is neither a file nor a folder; take it out of the model folder")
    refuse_pointers(folder)
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"model folder '{folder}' has no config.json; give a folder saved by save_pretrained")
    settings = json_object(config)
    text = settings.get("text_config")
    if not isinstance(text, dict | None):
        raise _unreadable(folder, "text_config", text, "a JSON object is needed")
    settings |= text or {}
    _refuse_values(folder, settings)
    if (other := settings.get("transformers_weights")) is not None:
        raise ModelError(
            f"config.json of {str(folder)!r} names other weights (transformers_weights: {_short(other)}); "
            "call the file model.safetensors and take the key out"
        )
    for key in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"):
        if "/" in json.dumps(settings.get(key)):
            raise ModelError(
                f"model folder '{folder}' asks for code from elsewhere ({key} in config.json is "
                f"{_short(settings[key])}), which is not run; take the key out"
            )
    return settings


def _refuse_values(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raises ModelError for a size that is no whole number, more layers than are built, and a type or names that are
    none."""
    for key in (*_SIZE_KEYS, *_WINDOW_KEYS, *_PART_KEYS):
        value = settings.get(key)
        is_free = value is None or key in _PART_KEYS  # some have a list of them, one a layer
        if not (value >= 1 if type(value) is int else is_free):
            raise _unreadable(folder, key, value, "give a whole number from 1 on")
    _refuse_many(folder, settings)
    for key in ("dtype", "torch_dtype"):
        value = settings.get(key)
        is_known = not isinstance(value, str) or value.removeprefix("torch.") in _DTYPES
        if not is_known and not settings.get("quantization_config"):
            raise _unreadable(folder, key, value, f"give one of {', '.join(_DTYPES)}")
    names = settings.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise _unreadable(folder, "architectures", names, "a list of names is needed")


def _refuse_many(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raises ModelError, at any depth of a configuration, for more layers than are built or more names of labels than
    are made, which takes time and memory before anything else is looked at."""
    waiting: list[Any] = [settings]
    while waiting:
        place = waiting.pop()
        if isinstance(place, list):
            waiting += place
        if not isinstance(place, dict):
            continue
        waiting += place.values()
        for key, value in place.items():
            count = len(value) if isinstance(value, dict) else value if isinstance(value, int) else 0
            if _LAYER_COUNT.fullmatch(key) and count > _MOST_LAYERS:
                raise _unreadable(folder, key, value, f"{_MOST_LAYERS} layers are the most that are built")
            if key in _LABEL_KEYS and count > _MOST_LABELS:
                raise _unreadable(folder, key, value, f"{_MOST_LABELS} are the most that are made")


def _unreadable(folder: Path, key: str, value: object, remedy: str) -> ModelError:
    return ModelError(f"cannot read the configuration of {str(folder)!r}: {key} is {_short(value)}; {remedy}")


def refuse_pointers(folder: Path) -> None:
    """Raises ModelError, with the command that fetches it, for a file that lies in a folder only as version control's
    pointer to it, and for a folder or a dead link in a file's place; what no model is made of may be what it likes."""
    names = sorted(os.listdir(folder))
    for name in names:
        path = folder / name.removesuffix(".dvc")
        if not any(fnmatch(path.name, pattern) for pattern in _READ):
            continue
        command = what_fetches(path)
        if path.is_file():
            with path.open("rb") as file:
                command = what_fetches(path, file.read(64))
        if command:
            raise ModelError(f"'{path}' is not here, only a pointer to it; run: {command}")
        if path.name in _FILES and path.name in names and not path.is_file():
            raise ModelError(f"'{path}' is no file, or a link that leads nowhere; fetch it again, or take it out")


class Stored(NamedTuple):
    """One weight as a safetensors header tells it."""

    kind: str
    shape: tuple[int, ...]

    @property
    def is_float(self) -> bool:
        return self.kind in _FLOATS


def stored_weights(folder: Path) -> dict[str, Stored]:
    """The weights in a folder by their keys, from the headers of its files alone.

    Raises ModelError in one line for a folder without weights, for pickled ones, for an index that names files that
    are not beside it, for a key in two files, and for more weights than any model has.
    """
    found: dict[str, Stored] = {}
    places: dict[str, str] = {}
    left = _MOST_WEIGHTS
    for path in _weight_files(folder):
        left -= _num_weights(path, left)
        try:
            with safe_open(path, framework="np") as weights:
                for key in weights.keys():  # noqa: SIM118
                    if key in places:
                        raise ModelError(
                            f"the weights of {str(folder)!r} hold {_short(key)} twice, in {places[key]} and in "
                            f"{path.name}; save or fetch the folder again"
                        )
                    part = weights.get_slice(key)
                    found[key], places[key] = Stored(part.get_dtype(), tuple(part.get_shape())), path.name
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(
                f"cannot load the weights of {str(folder)!r}: {path.name}: {first_line(error)}; save or fetch it again"
            ) from error
    return found


def _num_weights(path: Path, most: int) -> int:
    """About how many weights a file holds; raises ModelError for more than ``most``, which take long to go through."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        count = file.read(size).count(b"{") if size <= _MOST_HEADER_BYTES else 0  # the library refuses larger ones
    if count > most:
        raise ModelError(
            f"the weights of {str(path.parent)!r} are more than {_MOST_WEIGHTS:,} ({path.name} alone has about "
            f"{count:,}), which no model needs; save or fetch the folder again"
        )
    return count


def check_generation(folder: Path) -> None:
    """Raises ModelError in one line for a generation_config.json that is no object, or ends texts with no id."""
    path = folder / "generation_config.json"
    ends = json_object(path).get("eos_token_id") if path.is_file() else None
    if ends is not None and not all(type(end) is int for end in (ends if isinstance(ends, list) else [ends])):
        raise ModelError(f"'{path}' has eos_token_id {_short(ends)}; a token id, or a list of them, is needed")


def check_weights(folder: Path, stored: Mapping[str, Stored], settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The keys that hold no floating-point numbers, with their kinds. Of a folder whose configuration says that it is
    quantized, those whose scales are missing.

    Raises ModelError in one line for fewer rows than the configuration's vocabulary, for which memory would be taken
    first.
    """
    others = [(key, weight.kind) for key, weight in stored.items() if not weight.is_float]
    if not settings.get("quantization_config"):
        most_rows = max((size for weight in stored.values() for size in weight.shape), default=0)
        if (vocabulary := settings.get("vocab_size") or 0) > most_rows:
            raise ModelError(
                f"config.json of {str(folder)!r} has vocab_size {_short(vocabulary)}, but no weight has more than "
                f"{most_rows} rows; save or fetch the folder again"
            )
        return others
    scaled = {key[: found.start()].rpartition(".")[0] for key in stored if (found := _SCALES.search(key))}
    return [
        (key, kind)
        for key, kind in others
        if key.endswith(".weight") and scaled.isdisjoint({key, key.removesuffix(".weight")})
    ]


def is_no_part(key: str, stored: Mapping[str, Stored], settings: Mapping[str, Any]) -> bool:
    """Whether a weight that an architecture does not use is known to be none of it: a mask or table that old releases
    stored, the part on images or sound of a model whose text part is loaded, what quantization leaves beside the
    weights, and whatever is no floating-point number."""
    weight = stored.get(key)
    if weight is not None and (not weight.is_float or (_MASK.search(key) and weight.shape[:2] in ((), (1, 1)))):
        return True
    has_other_parts = "vision_config" in settings or "audio_config" in settings
    is_quantized = bool(settings.get("quantization_config"))
    return bool(
        _TABLE.search(key)
        or (has_other_parts and _OTHER_PART.match(key))
        or (is_quantized and _BESIDE_QUANTIZED.search(key))
    )


def _weight_files(folder: Path) -> Iterator[Path]:
    """The files that transformers takes weights from."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        yield whole
        return
    if not index.is_file():
        raise ModelError(_without_weights(folder))
    names = json_object(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ModelError(f"'{index}' is no index of weights: weight_map must give a file for each key")
    for name in sorted(set(names.values())):
        if PurePath(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"'{index}' names {_short(name)}; only .safetensors files beside it are read")
        if not (folder / name).is_file():
            raise ModelError(f"'{index}' names {_short(name)}, which is not there; use a complete checkpoint")
        yield folder / name


def _without_weights(folder: Path) -> str:
    others = sorted(path.name for path in folder.glob(WEIGHT_FILES))
    if others:
        return (
            f"model folder '{folder}' has no model.safetensors and no index of several files ({others[0]} is neither); "
            "give a folder saved by save_pretrained"
        )
    pickled = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickled:
        return (
            f"model folder '{folder}' has only pickled weights ({pickled[0]}), which can run code; "
            "convert them with save_pretrained(..., safe_serialization=True)"
        )
    if files := sorted(folder.glob("*.gguf")):
        return f"model folder '{folder}' has no model.safetensors; give the GGUF file itself, {str(files[0])!r}"
    return f"model folder '{folder}' has no weights; it needs model.safetensors"


def _refuse_adapter(folder: Path) -> None:
    """Whether transformers would apply an adapter that lies in a folder depends on what else is installed."""
    found = next((name for name in _ADAPTERS if (folder / name).exists()), None)
    if found is not None:
        raise ModelError(
            f"model folder '{folder}' holds an adapter ({found}), which is not applied by itself; give the folder of "
            "the model that it was trained on as the model, and this one as the adapter"
        )


def json_object(path: Path) -> dict[str, Any]:
    """What a small file says; raises ModelError in one line where it is no JSON object."""
    if path.stat().st_size > _MOST_JSON_BYTES:
        raise ModelError(f"'{path}' has {path.stat().st_size} bytes; {_MOST_JSON_BYTES} are the most that are read")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise ModelError(f"'{path}' is not valid JSON: {first_line(error)}; download or save it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"'{path}' is no configuration: a JSON object is needed")
    return content


def _short(value: Any) -> str:
    return printable(repr(value))[:100]


def first_line(error: BaseException) -> str:
    """What an error says, in one line; where its first line ends in a colon, with those that follow."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    first = next((number for number, line in enumerate(lines, 1) if not line.rstrip().endswith(":")), len(lines))
    return printable(" ".join(line.strip() for line in lines[:first]))[:300]
