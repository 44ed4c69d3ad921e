"""Studies whose answers have grades: from the task file through the folder to every report, and nowhere an accuracy."""

import pytest
import torch
from tiny import byte_level_tokenizer, make_rows, write_rows
from transformers import LlamaConfig, LlamaForCausalLM

from iclperm import Study

TASK = """
name: letters
data: {train: train.jsonl, test: test.jsonl, dev: dev.jsonl}
fields: {text: text, letters: letters}
answer: {field: letters, check: f1, rules: [{name: some, pattern: "[a-zA-Z]+"}, {name: a digit, pattern: "[0-9]"}]}
demonstration: "Text: {{ text }}\\nAnswer: {{ letters[0] }}"
query: "Text: {{ text }}\\nAnswer:"
stop: ["q"]
max_new_tokens: 5
shots: 3
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Weights large enough, and embeddings untied: it does not just repeat the last token."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), byte_level_tokenizer()
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=False, initializer_range=0.5,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def study(tmp_path, model):
    for split, number in (("train", 1), ("test", 2), ("dev", 3)):
        rows = [
            {**row, "letters": [" ".join("mTuJab"[place % 6 :]), "The T"], "size": place - 3}
            for place, row in enumerate(make_rows(number, 24))
        ]
        write_rows(tmp_path / f"{split}.jsonl", rows)
    path = tmp_path / "letters.yaml"
    path.write_text(TASK)
    return Study(model=str(model), task=str(path), sets=2, permutations=3, shots=[0, 1, 3], queries=6, seed=1)
