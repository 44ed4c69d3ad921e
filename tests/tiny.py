"""A tiny task and a tiny model, made in a moment, for tests of what surrounds the engine."""

import csv
import itertools
import json
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LABELS = ("Red", "Green", "Blue")
_THINGS = ("apple", "leaf", "river", "brick", "moss", "sky", "rose", "fern", "lake", "rust", "grass", "ocean")
_PLACES = ("in town", "by the road", "at night", "far away", "over there", "near home", "in spring", "on the hill")


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Rows of one header; tabs between for a .tsv file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """One JSON Lines file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def make_rows(split: int, count: int) -> list[dict[str, Any]]:
    """``count`` rows of a split, labels in turn; different splits share no text."""
    texts = [
        f"The {a} {place} is number {split}{n}" for n in range(9) for a, place in itertools.product(_THINGS, _PLACES)
    ]
    return [{"text": texts[number], "label": LABELS[number % len(LABELS)]} for number in range(count)]


def make_task(folder: Path, **changes: Any) -> Path:
    """A task file with its data; ``changes`` replace keys of the task, None removes one."""
    write_rows(folder / "train.jsonl", make_rows(1, 60))
    write_rows(folder / "test.jsonl", make_rows(2, 30))
    content = {
        "name": "colours",
        "data": {"train": "train.jsonl", "test": "test.jsonl"},
        "fields": {"text": "text"},
        "labels": list(LABELS),
        "demonstration": "Thing: {{ text }}\nColour: {{ label }}",
        "query": "Thing: {{ text }}\nColour:",
        "shots": 3,
    } | changes
    path = folder / "colours.yaml"
    path.write_text(
        yaml.safe_dump({key: value for key, value in content.items() if value is not None}, sort_keys=False)
    )
    return path


def texts() -> list[str]:
    """What the tokenizers are trained on; "RedThing" is there to be merged where no separator prevents it."""
    plain = [f"Thing: {row['text']}\nColour: {row['label']}\n\n" for row in make_rows(1, 60)]
    return plain + ["RedThing: "] * 600


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """GPT-2's kind: spaces belong to the word after them, BOS in front."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _trained(backend, 400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def dummy_prefix_tokenizer() -> PreTrainedTokenizerFast:
    """SentencePiece's kind: a dummy space in front of the text, and only there."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace()
    return _trained(backend, 300)


def greedy_tokenizer() -> PreTrainedTokenizerFast:
    """No borders at all: merges run across words, lines and parts."""
    return _trained(Tokenizer(models.BPE(unk_token="<unk>")), 500)


def _trained(backend: Tokenizer, size: int, **options: Any) -> PreTrainedTokenizerFast:
    special = ["<s>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False, **options)
    backend.train_from_iterator(texts(), trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def make_model(
    folder: Path, tokenizer: PreTrainedTokenizerFast | None = None, window: int = 512, seed: int = 0
) -> Path:
    """A model folder with random weights."""
    import torch

    tokenizer = tokenizer or byte_level_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=window, tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
