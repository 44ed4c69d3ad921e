"""Adapters of PEFT: what was trained on top of a model, merged into its weights before anything runs.

Merged, an adapter costs nothing a token, and the tree, the kernels and the check on first use are those of any model.
In float32 the log-likelihoods are those of the adapter beside its model; in half precision the merged weights are
rounded once, as those of a checkpoint are that somebody merged and saved.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from iclperm.engine.facts import ADAPTER_FILES, TOKENIZER_FILE
from iclperm.engine.folder import first_line, json_object, refuse_pointers
from iclperm.errors import ConfigError, ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_SETTINGS, _WEIGHTS = ADAPTER_FILES
_ADDED_TOKENS = {"PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "CPT", "ADAPTION_PROMPT"}
"""Kinds that put something before a prompt instead of changing weights."""
_OF_TEXT = ("normalizer", "pre_tokenizer", "post_processor", "model", "added_tokens")
"""Parts of a tokenizer.json that decide which tokens a text has; not those on padding and cutting."""
_DIGEST = re.compile(r"[0-9a-f]{40}")
_PROBE = range(3, 35)
_MOST_NATS = {4: (1e-3, 1e-2), 2: (0.5, math.inf)}
"""By bytes of a number: how far log-probabilities may move when an adapter is merged that lay beside, on average and at
most, which a fault of one token's row alone exceeds. On Gemma 3 270M in float32 they move 4e-4 at most."""
_MOST_OF_EFFECT = 0.125
"""In half precision: of what the adapter itself moves them on average, as a strong one's merged weights are rounded."""


def check_adapter(adapter: Path, model: Path) -> None:
    """Raises ModelError in one line for what is no adapter that merges into the model of a folder; reads no weights."""
    if not adapter.is_dir():
        raise ModelError(
            f"there is no adapter folder {str(adapter)!r}; give the folder that PEFT's save_pretrained wrote"
        )
    refuse_pointers(adapter)
    if not (adapter / _SETTINGS).is_file():
        raise ModelError(f"adapter folder '{adapter}' has no {_SETTINGS}; give one that PEFT's save_pretrained wrote")
    kind = str(json_object(adapter / _SETTINGS).get("peft_type"))
    if kind in _ADDED_TOKENS:
        raise ModelError(
            f"the adapter {str(adapter)!r} is of the kind {kind}, which adds to every prompt and cannot be merged into "
            "weights; give one that changes them, such as LORA"
        )
    weights = adapter / _WEIGHTS
    if not weights.is_file():
        raise ModelError(
            f"adapter folder '{adapter}' has no {_WEIGHTS}; save it again with save_pretrained(..., "
            "safe_serialization=True), as a pickle can run code"
        )
    try:
        with safe_open(weights, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(f"'{weights}' cannot be read: {first_line(error)}; save or fetch it again") from error
    _refuse_other_tokens(adapter / TOKENIZER_FILE, model / TOKENIZER_FILE)


def other_base(adapter: Path, *names: str) -> str:
    """The model that an adapter's settings say it was trained on, where its name is none of ``names``, else nothing.

    Names are told apart by their last part: hub ids and folders are moved, and a hub's cache has digests for names.
    """
    base = str(json_object(adapter / _SETTINGS).get("base_model_name_or_path") or "")
    ours, *theirs = (re.split(r"[/\\]", name.rstrip("/\\"))[-1].casefold() for name in (base, *names))
    return "" if ours in ("", *theirs) or _DIGEST.fullmatch(ours) else base


def merged(model: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    """The model with the adapter in its weights, which are changed in place; of its own class, as before.

    Some prompt of a few tokens is asked before and after. Raises ConfigError without PEFT, ModelError in one line where
    the adapter does not fit the model, lacks weights, or answers otherwise when it is merged (as one does that changes
    the embedding or the head of a model where the two are one).
    """
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("an adapter needs PEFT, which is not installed: pip install 'iclperm[peft]'")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on training, and on what is tried below
            # What PEFT only warns of makes other numbers: weights that are missing, layers that are not there.
            warnings.filterwarnings("error", message=r".*([Mm]issing adapter keys|no .*(modules|layers) )")
            from peft import PeftModel, get_peft_model_state_dict

            bare = _next_tokens(model)
            on_top: Any = PeftModel.from_pretrained(model, str(adapter), is_trainable=False, local_files_only=True)
            with safe_open(adapter / _WEIGHTS, framework="pt") as stored:
                if unused := sorted(set(stored.keys()) - set(get_peft_model_state_dict(on_top))):
                    raise ValueError(f"it has no place for {unused[0]!r} and {len(unused) - 1} more")
            beside = _next_tokens(on_top)
            is_doubtful = _changes_one_of_two(on_top.get_base_model())
            whole: PreTrainedModel = on_top.merge_and_unload(safe_merge=True)
    except Exception as error:  # of PEFT, which has none of its own
        raise ModelError(
            f"the adapter {str(adapter)!r} does not merge into a {model.config.model_type!r} model: "
            f"{first_line(error)}; give the model that it was trained on"
        ) from error
    moved = (_next_tokens(whole) - beside).abs()
    found, bounds = (float(moved.mean()), float(moved.max())), _MOST_NATS[whole.dtype.itemsize]
    if whole.dtype.itemsize < 4:
        bounds = max(bounds[0], _MOST_OF_EFFECT * float((beside - bare).abs().mean())), bounds[1]
    if is_doubtful or not all(nats <= most for nats, most in zip(found, bounds, strict=True)):
        raise ModelError(
            f"the adapter {str(adapter)!r} answers otherwise when it is merged (by {found[1]:.2g} nats), as one "
            "does that changes an embedding and a head that are one; load both yourself: "
            "Engine(PeftModel.from_pretrained(...))"
        )
    whole.eval()  # type: ignore[no-untyped-call]
    return whole


def _changes_one_of_two(model: Any) -> bool:
    """Whether an adapter lies on an embedding or a head that are one, in half precision.

    Merged, it changes both. In float32 the answers tell whether that is what it was trained for; here rounding moves
    them as far.
    """
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    is_changed = any(hasattr(end, part) for end in ends for part in ("base_layer", "original_module"))
    is_one = bool(getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False))
    return is_changed and is_one and model.dtype.itemsize < 4


def _next_tokens(model: Any) -> torch.Tensor:
    """[32, V] float32 log-probabilities after each token of some prompt."""
    import torch

    with torch.inference_mode():
        ids = torch.tensor([_PROBE], device=model.device) % model.config.get_text_config(decoder=True).vocab_size
        logits: torch.Tensor = model.eval()(ids, use_cache=False).logits[0]
        return logits.float().log_softmax(-1)


def _refuse_other_tokens(own: Path, of_model: Path) -> None:
    """Raises ModelError where an adapter was saved with a tokenizer that makes other tokens than the model's."""
    if not (own.is_file() and of_model.is_file()) or own.read_bytes() == of_model.read_bytes():
        return
    ours, theirs = (json_object(path) for path in (own, of_model))
    for part in _OF_TEXT:
        if json.dumps(ours.get(part), sort_keys=True) != json.dumps(theirs.get(part), sort_keys=True):
            raise ModelError(
                f"the adapter in '{own.parent}' has a tokenizer of its own, whose {part} is not the model's; give the "
                "model that it was trained on, or merge both into one folder (merge_and_unload(), then save_pretrained)"
            )
