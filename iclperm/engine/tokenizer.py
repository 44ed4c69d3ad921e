"""The tokenizer beside a model: what its tokenizer.json says, whatever class transformers has for the architecture."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

from iclperm.base.environment import hand_back
from iclperm.base.tokenizer_file import check_tokenizer_file, told_where_it_gives_up
from iclperm.engine.facts import MAKES_A_TOKENIZER, TOKENIZER_FILE
from iclperm.engine.folder import first_line, json_object, model_folder, refuse_pointers
from iclperm.errors import ModelError, TokenizationError, printable

_NAMED = ("bos_token", "eos_token", "unk_token")


def has_tokenizer(name: str | Path, revision: str | None = None) -> bool:
    """Whether there are files of a tokenizer beside a model."""
    folder = model_folder(name, revision, weights=False)
    return any((folder / file).exists() for file in MAKES_A_TOKENIZER)


def load_tokenizer(name: str | Path, revision: str | None = None) -> Any:
    """The tokenizer beside a model, without its weights; None for a folder that has no tokenizer files.

    Where there is a tokenizer.json its ids are those of that file: of transformers' classes some take its vocabulary
    alone, and normalize or split text their own way (Qwen2Tokenizer, LlamaTokenizer, GPT2Tokenizer). Special tokens and
    chat template are those of tokenizer_config.json, and a class's own where that names none. Raises ModelError in one
    line for files that do not make a tokenizer.
    """
    folder = model_folder(name, revision, weights=False)
    refuse_pointers(folder)
    if not has_tokenizer(folder):
        return None
    try:
        if not (folder / TOKENIZER_FILE).is_file():
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        said = check_tokenizer_file(folder / TOKENIZER_FILE)
        with told_where_it_gives_up():
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        _refuse_other_ids(folder / TOKENIZER_FILE, said, tokenizer)
        if own := _tokens_of_its_class(folder, tokenizer):
            tokenizer.add_special_tokens(own)
        return tokenizer
    except (ModelError, TokenizationError):
        raise
    except Exception as error:
        raise ModelError(
            f"cannot load the tokenizer of {str(name)!r}: {first_line(error)}; save or fetch the folder again"
        ) from error
    finally:
        hand_back()  # reading 260,000 tokens left 230 MiB free in the heap


def _refuse_other_ids(path: Path, said: Mapping[str, Any], tokenizer: Any) -> None:
    """Raises ModelError where a file makes ids at random, or the library gives an added token another than the file's;
    for a token of the unknown that is unknown itself, which transformers would look up without end; and for a chat
    template that is no text."""
    if dropout := getattr(tokenizer.backend_tokenizer.model, "dropout", None):
        raise ModelError(
            f"'{path}' drops merges at random (dropout is {dropout}), so the same text would have other token ids each "
            "time; set dropout to null"
        )
    for token in said.get("added_tokens") or ():
        given = tokenizer.backend_tokenizer.token_to_id(token["content"])
        if given != token["id"]:
            raise ModelError(
                f"'{path}' gives the added token {printable(repr(token['content']))[:100]} the id {token['id']}, but "
                f"its vocabulary makes that {given}; save or fetch the folder again"
            )
    unknown = tokenizer.unk_token
    if unknown is not None and tokenizer.backend_tokenizer.token_to_id(unknown) is None:
        raise ModelError(
            f"'{path.parent / 'tokenizer_config.json'}' has the unk_token {printable(repr(unknown))[:100]}, which the "
            "vocabulary lacks; name a token that it has, or null"
        )
    template = tokenizer.chat_template
    texts = list(template.values()) if isinstance(template, dict) else [template]
    if template is not None and not all(isinstance(text, str) for text in texts):
        raise ModelError(
            f"the chat template of '{path.parent}' is {printable(repr(template))[:100]}; a text is needed, or texts by "
            "name"
        )


def _tokens_of_its_class(folder: Path, tokenizer: Any) -> dict[str, str]:
    """The special tokens that no file names (GPT-2's names none), as the class has them that transformers would take;
    none that the vocabulary lacks."""
    said, config = (
        json_object(path) if path.is_file() else {}
        for path in (folder / "tokenizer_config.json", folder / "config.json")
    )
    unnamed = [key for key in _NAMED if key not in said and getattr(tokenizer, key) is None]
    names = (said.get("tokenizer_class"), config.get("tokenizer_class"), _registered(config.get("model_type")))
    name = next((name for name in names if isinstance(name, str)), None)
    if not unnamed or name is None:
        return {}
    kind = tokenizer_class_from_name(name.removesuffix("Fast")) or tokenizer_class_from_name(name)
    if kind is None:
        return {}
    vocabulary = tokenizer.get_vocab()
    parameters = inspect.signature(kind.__init__).parameters
    own = {key: parameters[key].default for key in unnamed if key in parameters}
    return {key: token for key, token in own.items() if isinstance(token, str) and token in vocabulary}


def _registered(model_type: object) -> str | None:
    return TOKENIZER_MAPPING_NAMES.get(model_type) if isinstance(model_type, str) else None
