"""A GGUF file as a model: what it says is kept as a folder in the cache, and its weights are read from the file.

What is kept are configuration and tokenizer, made once by transformers from the file's own, and a link to the file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from iclperm.base.environment import cache_folder
from iclperm.base.files import what_fetches
from iclperm.errors import ConfigError, ModelError, is_out_of_memory, printable

WEIGHTS = "model.gguf"
"""What the link to the file is called in the folder of a GGUF file."""
_ABOUT = "gguf.json"
_SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_DTYPES = {"ALL_F32": "float32", "MOSTLY_F16": "float16", "MOSTLY_BF16": "bfloat16"}
"""By the kind of file, of weights that are not quantized; of others float32."""
# Keys that change numbers, most of which transformers' readers pass over.
_ROPE_SCALING = "rope.scaling."
_SCALES = re.compile(r"scale$|softcapping$")
# Of byte-level tokenizers: what llama.cpp splits by the rule that transformers takes for names that it does not know.
_SPLIT_AS_GPT2 = ("gpt-2", "mpt", "olmo", "jais")
_NO_SCALING = (None, "none")


def is_gguf(path: Path) -> bool:
    """Whether a file is called or begins like a GGUF file; its content is looked at by `gguf_folder`."""
    if not path.is_file():
        return False
    if path.suffix.lower() == _SUFFIX:
        return True
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def gguf_folder(path: Path) -> Path:
    """The folder of a GGUF file, made in the cache where it is not there yet (half a minute of a large vocabulary).

    Raises ModelError in one line for a file that is none, that is cut off, in several parts, or of an architecture that
    transformers does not read from such files; and where the file says what transformers would pass over, as its
    numbers would be others then. ConfigError without the package gguf.
    """
    path = path.resolve()
    with path.open("rb") as file:
        begin = file.read(64)
    if command := what_fetches(path, begin):
        raise ModelError(f"'{path}' is not here, only a pointer to it; run: {command}")
    if not begin.startswith(_MAGIC):
        raise ModelError(f"'{path}' is no GGUF file: it does not begin with {_MAGIC.decode()}; fetch it again")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            f"the model '{path}' needs the package gguf, which is not installed: pip install 'iclperm[gguf]'"
        )
    import transformers

    try:
        place = cache_folder() / "gguf" / f"{file_digest(path)}-{transformers.__version__}"
        if not (place / _ABOUT).is_file():
            _make(path, place)
        _link(path, place / WEIGHTS)
    except (OSError, RuntimeError) as error:
        raise ModelError(
            f"what '{path}' says cannot be kept in the cache ({_reason(error)}); set XDG_CACHE_HOME to a folder that "
            "can be written"
        ) from error
    return place


def file_of(folder: Path) -> Path | None:
    """The GGUF file whose folder this is; None for any other folder."""
    return (folder / WEIGHTS).resolve() if (folder / _ABOUT).is_file() and (folder / WEIGHTS).is_file() else None


def about_file(folder: Path) -> Mapping[str, Any]:
    """Of the folder of a GGUF file: how its weights are stored (``quantization``), and how many numbers they are
    (``num_weights``)."""
    found: Mapping[str, Any] = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    return found


def in_words(folder: Path, dtype: str) -> str:
    """Of the folder of a GGUF file that is loaded in a dtype, in a few words."""
    return f"GGUF ({about_file(folder)['quantization']}), dequantised to {dtype}"


def file_digest(path: Path) -> str:
    """SHA-256 of a file, read again when it has changed."""
    found = path.stat()
    return _digest(str(path), found.st_size, found.st_mtime_ns, found.st_ino)


@cache
def _digest(path: str, *_: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def without_a_bar() -> Iterator[None]:
    """Within: no progress bar of what transformers reads from GGUF files."""
    from transformers import modeling_gguf_pytorch_utils as reading

    module: Any = reading
    before, module.tqdm = module.tqdm, lambda tensors, **_: tensors
    try:
        yield
    finally:
        module.tqdm = before


def _make(path: Path, place: Path) -> None:
    """Writes the folder of a file beside its place, and moves it there whole."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=place.parent) as temporary:
        folder = Path(temporary) / "model"
        folder.mkdir()
        with _one_line(path):
            about = _write(path, folder)
        (folder / _ABOUT).write_text(json.dumps(about), encoding="utf-8")
        if place.exists() and not (place / _ABOUT).is_file():
            shutil.rmtree(place)
        try:
            folder.rename(place)
        except OSError:
            if not (place / _ABOUT).is_file():  # else somebody else has made it meanwhile
                raise


def _link(path: Path, link: Path) -> None:
    """Lets a link lead to a file, at any time to one of the same content."""
    if link.is_symlink() and os.readlink(link) == str(path):
        return
    new = link.with_name(f"{link.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    new.symlink_to(path)
    new.replace(link)


def _write(path: Path, folder: Path) -> dict[str, Any]:
    """Configuration and tokenizer of a file, as transformers reads them, and what else is kept about it."""
    from gguf import GGUFReader
    from gguf.constants import LlamaFileType
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    reader = GGUFReader(str(path))
    said = {key: field.contents() for key, field in reader.fields.items() if len(field.data) <= 1}
    if (count := said.get("split.count") or 0) > 1:
        raise ModelError(f"'{path}' is one of {count} parts; join them with llama-gguf-split and give that file")
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    _refuse_other_numbers(path, said, [tensor.name for tensor in reader.tensors], config)
    file_type = {kind.value: kind.name for kind in LlamaFileType}.get(said.get("general.file_type", -1), "GUESSED")
    config.dtype = _DTYPES.get(file_type, "float32")
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    auto: Any = AutoTokenizer
    tokenizer = auto.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    _refuse_other_tokens(path, said, tokenizer)
    tokenizer.save_pretrained(folder)
    kinds = "/".join(sorted({tensor.tensor_type.name for tensor in reader.tensors}))
    return {
        "quantization": kinds if file_type == "GUESSED" else file_type.removeprefix("MOSTLY_").removeprefix("ALL_"),
        "num_weights": sum(int(tensor.n_elements) for tensor in reader.tensors),
    }


def _refuse_other_numbers(path: Path, said: Mapping[str, Any], tensors: list[str], config: Any) -> None:
    """Raises ModelError for what a file says that changes numbers and that transformers passes over: rotary factors,
    and keys that it does not read, where they say otherwise than its configuration."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    architecture = str(said.get("general.architecture"))
    reads: Any = GGUF_CONFIG_MAPPING.get(architecture, {})
    is_scaled = said.get(f"{architecture}.rope.scaling.type") not in _NO_SCALING and architecture != "gpt-oss"
    other = [name for name in tensors if name.startswith("rope_")]
    for key, value in said.items():
        name = key.removeprefix(f"{architecture}.")
        if name.startswith(_ROPE_SCALING):
            other += [key] * is_scaled
        elif _SCALES.search(name) and name not in reads and getattr(config, name, None) != value:
            other.append(key)
    if other:
        raise ModelError(
            f"'{path}' scales what transformers does not when it reads such a file ({printable(other[0])[:100]}), so "
            "its numbers would be others; give the folder of the safetensors checkpoint"
        )


def _refuse_other_tokens(path: Path, said: Mapping[str, Any], tokenizer: Any) -> None:
    """Raises ModelError where a file names a way to cut text that transformers does not take, without a word."""
    from transformers.integrations.gguf import gguf_tokenizer_mapping as reading

    kind, split = said.get("tokenizer.ggml.model"), said.get("tokenizer.ggml.pre")
    rule: str | None = None
    known: set[object] = {*reading.GGUF_PRE_TOKENIZER_SPLITS, *_SPLIT_AS_GPT2}
    if kind == "gpt2" and split not in known:
        rule = f"tokenizer.ggml.pre is {printable(repr(split))[:100]}"
    elif kind == "llama":
        begin = tokenizer.backend_tokenizer.encode("a", add_special_tokens=False).tokens[0]
        wanted = said.get("tokenizer.ggml.add_space_prefix", True)
        if begin.startswith("\u2581") != wanted:
            rule = f"tokenizer.ggml.add_space_prefix is {wanted}"
    if rule is not None:
        raise ModelError(
            f"'{path}' cuts text as transformers does not when it reads such a file ({rule}), so its tokens would be "
            "others; give the folder of the safetensors checkpoint"
        )


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except (ModelError, OSError) as error:
        if is_out_of_memory(error) or isinstance(error, ModelError) or error.filename:
            raise
        raise ModelError(
            f"cannot read the GGUF file '{path}': {_reason(error)}{_size(path)}; fetch it again"
        ) from error
    except Exception as error:  # whatever a damaged file makes of its readers
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"cannot read the GGUF file '{path}': {_reason(error)}{_size(path)}; fetch it again, or give the folder "
            "of the safetensors checkpoint"
        ) from error


def _size(path: Path) -> str:
    return f"; it has {path.stat().st_size:,} bytes, and may be cut off" if path.is_file() else ""


def _reason(error: BaseException) -> str:
    return printable(" ".join(str(error).split()) or type(error).__name__)[:200]
