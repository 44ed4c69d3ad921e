"""The models: the bundled one, real shapes with random weights, written once into the cache folder, and one's own."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from iclperm.bench.environments import bench_folder
from iclperm.demo import model_path
from iclperm.engine.folder import model_folder
from iclperm.engine.gguf_file import file_of
from iclperm.errors import ModelError

_QWEN_25M = {
    "model_type": "qwen2", "vocab_size": 16_384, "hidden_size": 512, "intermediate_size": 1408,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}  # fmt: skip
_QWEN_HALF = {
    "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32_768,
    "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}  # fmt: skip
_GEMMA_2B = {
    "model_type": "gemma2", "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "query_pre_attn_scalar": 256, "max_position_embeddings": 8192, "sliding_window": 4096,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class BenchModel:
    """A model of the benchmark; on two cores, ``scale`` of a case and ``sample`` prompts of a slow peer will do.

    None where that follows from its size. ``config`` is empty for the bundled one, and for one in a folder, ``place``.
    """

    name: str
    scale: float | None = None
    sample: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    place: Path | None = None

    def folder(self) -> Path:
        """Its folder of safetensors and config, made if it is not there. Weights are drawn from one seed, in float32.

        Cost of making it: all weights, once, in memory and on disk.
        """
        if not self.config:
            return self.place or model_path()
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()[:8]
        folder = bench_folder() / "models" / f"{self.name}-{digest}"
        if not (folder / "config.json").is_file():
            _write(self.config, folder)
        return folder


MODELS = {
    model.name: model
    for model in (
        BenchModel("demo", scale=1, sample=96),
        BenchModel("qwen2-25m", scale=1, sample=96, config=_QWEN_25M),
        BenchModel("qwen2.5-0.5b", scale=1 / 16, sample=32, config=_QWEN_HALF),
        BenchModel("gemma-2-2b", scale=1 / 64, sample=8, config=_GEMMA_2B),
    )
}


def find_model(name: str) -> BenchModel:
    """One of `MODELS`, or that of a folder or a hub id, which is fetched; raises ModelError where there is none."""
    if name in MODELS:
        return MODELS[name]
    folder = model_folder(name)
    if (file := file_of(folder)) is not None:
        raise ModelError(
            f"the model '{file}' is a GGUF file, but the benchmark's peers take folders of safetensors; give such a "
            "folder"
        )
    is_hubs = not Path(name).is_dir()
    return BenchModel(name if is_hubs else folder.resolve().name, place=folder)


def facts(folder: Path) -> dict[str, int]:
    """What the workloads need to know of a model, from its config.json."""
    from iclperm.engine.plain_model import read_facts

    found = read_facts(folder, device="cpu", dtype="float32")
    return {"vocab_size": found.vocab_size, "max_tokens": found.max_tokens, "num_parameters": found.num_parameters}


def _write(config: dict[str, Any], folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    auto: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    model.save_pretrained(unfinished)
    _write_tokenizer(int(config["vocab_size"]), unfinished)
    unfinished.rename(folder)


def _write_tokenizer(vocab_size: int, folder: Path) -> None:
    """A word for every id; no peer is timed on it, but some do not start without one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(vocab_size)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(tokenizer_object=words, bos_token="t1", eos_token="t0", unk_token="t0", pad_token="t0").save_pretrained(
        folder
    )
