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
_TEXT_ENDS = {"ALL_F32": "float32", "MOSTLY_F16": "float16", "MOSTLY_BF16": "bfloat16"}
# Keys that change numbers, most of which transformers' readers pass over.
_CHANGES = re.compile(r"\.(rope\.scaling\.(?!type)|\w*(attention\.|logit_|embedding_|residual_)scale|\w*softcapping)")
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
        raise ConfigError(f"the model '{path}' needs the package gguf, which is not installed: pip install iclperm[gguf]")
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


def file_digest(path: Path) -> str:
    """SHA-256 of a file, read again when it has changed."""
    found = path.stat()
    return _digest(str(path), found.st_size, found.st_mtime_ns, found.st_ino)


@cache
def _digest(path: str, *_: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _make(path: Path, place: Path) -> None:
    """Writes the folder of a file beside its place, and moves it there whole."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=place.parent) as temporary:
        folder = Path(temporary) / "model"
        folder.mkdir()
        with _one_line(path):
            about = _looked_at(path)
            _write(path, folder, _TEXT_ENDS.get(about["file_type"], "float32"))
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


def _looked_at(path: Path) -> dict[str, Any]:
    """What the file's header says; raises ModelError for what transformers would pass over."""
    from gguf import GGUFReader
    from gguf.constants import LlamaFileType

    reader = GGUFReader(str(path))
    said = {
        key: field.contents() for key, field in reader.fields.items() if len(field.data) <= 1 and "tokenizer" not in key
    }
    _refuse_other_numbers(path, said, [tensor.name for tensor in reader.tensors])
    number = said.get("general.file_type")
    known = {kind.value: kind.name for kind in LlamaFileType}
    file_type = known.get(number, "GUESSED") if isinstance(number, int) else "GUESSED"
    kinds = sorted({tensor.tensor_type.name for tensor in reader.tensors})
    name = file_type.removeprefix("MOSTLY_").removeprefix("ALL_")
    return {
        "file_type": file_type,
        "quantization": "/".join(kinds) if file_type == "GUESSED" else name,
        "num_weights": int(sum(int(tensor.n_elements) for tensor in reader.tensors)),
    }


def _refuse_other_numbers(path: Path, said: Mapping[str, Any], tensors: list[str]) -> None:
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    if (count := said.get("split.count") or 0) > 1:
        raise ModelError(f"'{path}' is one of {count} parts; join them (llama-gguf-split --merge) and give that file")
    architecture = str(said.get("general.architecture"))
    reads = GGUF_CONFIG_MAPPING.get(architecture, {})
    other = [name for name in tensors if name.startswith("rope_")]
    if architecture != "gpt-oss":  # whose scaling is read
        is_scaled = said.get(f"{architecture}.rope.scaling.type") not in _NO_SCALING
        other += [key for key in said if _CHANGES.search(key) and key.partition(".")[2] not in reads and is_scaled]
    if other:
        raise ModelError(
            f"'{path}' scales what transformers does not scale when it reads such a file ({printable(other[0])[:100]}), "
            "so its numbers would be others; give the folder of the safetensors checkpoint"
        )


def _write(path: Path, folder: Path, dtype: str) -> None:
    """Configuration and tokenizer of a file, as transformers reads them."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    config.dtype = dtype
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    tokenizer: Any = AutoTokenizer
    tokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True).save_pretrained(folder)


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except (ModelError, OSError) as error:
        if is_out_of_memory(error) or isinstance(error, ModelError) or error.filename:
            raise
        raise ModelError(f"cannot read the GGUF file '{path}': {_reason(error)}; fetch it again") from error
    except Exception as error:  # whatever a damaged file makes of its readers
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"cannot read the GGUF file '{path}': {_reason(error)}; fetch it again, or give the folder of the "
            "safetensors checkpoint"
        ) from error


def _reason(error: BaseException) -> str:
    return printable(" ".join(str(error).split()) or type(error).__name__)[:200]
