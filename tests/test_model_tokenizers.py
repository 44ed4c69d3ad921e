"""A folder's tokenizer is what its tokenizer.json says, whatever class transformers has for the architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import byte_level_tokenizer, dummy_prefix_tokenizer, greedy_tokenizer, make_model
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from iclperm import demo
from iclperm.endpoint.bill import _tokenizer as tokenizer_of_the_bill
from iclperm.engine.encoding import Encoder
from iclperm.engine.tokenizer import load_tokenizer
from iclperm.errors import ModelError, TokenizationError
from iclperm.prompts.encode import JointEncoder
from iclperm.runs.setting import tokenizer_hash

TEXTS = [
    "cafe\u0301 \u212b \uff21",
    "Thing: The  apple\n\n\tin 2023, 650841823!",
    " Red",
    "",
    "don't DON'T \u0130I",
    "<|endoftext|><s></s>",
]
KINDS = {
    "qwen2": [None, "Qwen2Tokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"],
    "llama": [None, "LlamaTokenizer", "PreTrainedTokenizerFast"],
    "mistral": [None, "LlamaTokenizerFast", "GPT2Tokenizer"],
    "gpt2": [None, "GPT2TokenizerFast", "NoSuchTokenizer"],
    "gemma2": [None, "GemmaTokenizer"],
    "gpt_neox": [None, "GPTNeoXTokenizerFast"],
    "cohere": [None, "CohereTokenizerFast"],
    "phi3": [None, "LlamaTokenizerFast"],
    "bloom": [None, "BloomTokenizerFast"],
}
MADE = {
    "byte level": byte_level_tokenizer,
    "dummy prefix": dummy_prefix_tokenizer,
    "greedy": greedy_tokenizer,
}


def edit(path: Path, **changes: Any) -> None:
    content = {**(json.loads(path.read_text()) if path.exists() else {}), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def folder_of(folder: Path, tokenizer: Any, kind: str, named: str | None) -> Path:
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    edit(folder / "tokenizer_config.json", tokenizer_class=named)
    return folder


def says(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def parts(tokenizer: Tokenizer) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    return content


def test_the_bundled_models_text_is_not_composed_anew() -> None:
    tokenizer, said = load_tokenizer(demo.model_path()), says(demo.model_path())
    for text in TEXTS:
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == said.encode(text, add_special_tokens=False).ids
        assert tokenizer(text)["input_ids"] == said.encode(text).ids
    assert parts(tokenizer.backend_tokenizer) == parts(said)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|bos|>", "<|eos|>")
    assert tokenizer.pad_token == tokenizer.unk_token == "<|pad|>"
    assert len(tokenizer) == len(AutoTokenizer.from_pretrained(demo.model_path())) == said.get_vocab_size()  # none more


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize(("kind", "named"), [(kind, named) for kind, names in KINDS.items() for named in names])
def test_ids_are_those_of_the_file(tmp_path: Path, kind: str, named: str | None, made: str) -> None:
    folder = folder_of(tmp_path, MADE[made](), kind, named)
    tokenizer, said = load_tokenizer(folder), says(folder)
    assert parts(tokenizer.backend_tokenizer) == parts(said)
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == said.encode(text).ids
        assert tokenizer.decode(said.encode(text).ids) == said.decode(said.encode(text).ids, skip_special_tokens=False)


def test_a_normalizer_and_a_splitting_of_their_own_are_kept(tmp_path: Path) -> None:
    """As R1-Distill-Qwen has it: a Qwen2 model, a Llama class, and neither's way to split."""
    made = byte_level_tokenizer()
    made.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.StripAccents()])
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    folder = folder_of(tmp_path, made, "qwen2", "LlamaTokenizerFast")
    text = "The RED caf\u00e9 of 650841823"
    expected = says(folder).encode(text).ids
    assert load_tokenizer(folder)(text)["input_ids"] == expected
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] != expected  # else nothing is shown here


def test_special_tokens_that_no_file_names_are_those_of_the_class(tmp_path: Path) -> None:
    """GPT-2's own tokenizer_config.json names none."""
    made = byte_level_tokenizer()
    made.add_special_tokens({"eos_token": "<|endoftext|>"})
    folder = folder_of(tmp_path, made, "gpt2", None)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    tokenizer, plain = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for name in ("bos_token", "eos_token", "unk_token"):
        assert getattr(tokenizer, name) == getattr(plain, name) == "<|endoftext|>"
    assert tokenizer.eos_token_id == says(folder).token_to_id("<|endoftext|>")
    edit(folder / "tokenizer_config.json", eos_token=made.bos_token)
    (folder / "tokenizer_config.json").write_text('{"bos_token": null, "eos_token": "<|endoftext|>"}')
    assert load_tokenizer(folder).bos_token is None  # null is a word, too
    for kind in ("mistral", "llama", "nobody"):  # whose classes' tokens this vocabulary lacks, if they have any
        edit(folder / "config.json", model_type=kind)
        assert len(load_tokenizer(folder)) == len(made)


def test_what_tokenizer_config_says_is_kept(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, byte_level_tokenizer(), "qwen2", "Qwen2Tokenizer")
    edit(folder / "tokenizer_config.json", chat_template="{{ bos_token }}{{ messages[0].content }}", eos_token="Red")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_template == "{{ bos_token }}{{ messages[0].content }}"
    assert tokenizer.eos_token_id == says(folder).token_to_id("Red") is not None
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert load_tokenizer(folder).chat_template == "{{ messages }}"


def test_no_text_is_cut_off_or_filled_up(tmp_path: Path) -> None:
    made = byte_level_tokenizer()
    folder = folder_of(tmp_path, made, "llama", None)
    expected = [says(folder).encode(text).ids for text in TEXTS]
    backend = says(folder)
    backend.enable_truncation(2)
    backend.enable_padding(length=40, pad_token=made.bos_token, pad_id=made.bos_token_id)
    backend.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder)(TEXTS)["input_ids"] == expected
    assert [tokenizer_of_the_bill(str(folder)).encode(text).ids for text in TEXTS] == expected


def test_a_folder_without_the_file_is_read_by_its_class(tmp_path: Path) -> None:
    made = byte_level_tokenizer()
    model = json.loads(made.backend_tokenizer.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"])])
    (tmp_path / "merges.txt").write_text(merges + "\n", encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    edit(tmp_path / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer", eos_token=made.eos_token)
    tokenizer = load_tokenizer(tmp_path)
    assert type(tokenizer).__name__ == "GPT2Tokenizer"
    assert tokenizer("Thing: Red")["input_ids"] == made("Thing: Red", add_special_tokens=False)["input_ids"]


def test_the_identity_of_a_run_sees_whatever_the_tokenizer_is_made_of(tmp_path: Path) -> None:
    make_model(tmp_path)
    before = tokenizer_hash(tmp_path)
    (tmp_path / "tekken.json").write_text("{}")
    (tmp_path / "spiece.model").write_bytes(b"x")
    assert tokenizer_hash(tmp_path) == before  # tokenizer.json is what is read
    (tmp_path / "tokenizer.json").unlink()
    without = tokenizer_hash(tmp_path)
    for name in ("tekken.json", "spiece.model", "qwen.tiktoken", "source.spm", "merges.txt"):
        (tmp_path / name).write_bytes(b"other")
        assert tokenizer_hash(tmp_path) != without
        without = tokenizer_hash(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"model": 3}'),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"tokenizer_class": 3, "bos_token": 7}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}'),
        ("tokenizer_config.json", '{"post_processor": "x"}'),
        ("special_tokens_map.json", "nonsense"),
    ],
)
def test_files_that_make_no_tokenizer_get_one_line(tmp_path: Path, name: str, content: str) -> None:
    folder = folder_of(tmp_path, byte_level_tokenizer(), "llama", None)
    (folder / name).write_text(content)
    if name == "special_tokens_map.json":
        edit(folder / "tokenizer_config.json", added_tokens_decoder=None)
    with pytest.raises(ModelError) as error:
        load_tokenizer(folder)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)


def test_ids_that_change_or_are_not_the_files_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, byte_level_tokenizer(), "llama", None)
    whole = json.loads((folder / "tokenizer.json").read_text())
    edit(folder / "tokenizer.json", model={**whole["model"], "dropout": 0.5})
    with pytest.raises(ModelError, match=r"drops merges at random \(dropout is 0.5\), .*; set dropout to null$"):
        load_tokenizer(folder)
    added = {**whole["added_tokens"][0], "id": 2**31, "content": " Red"}
    edit(folder / "tokenizer.json", **{**whole, "added_tokens": [*whole["added_tokens"], added]})
    with pytest.raises(ModelError, match="gives the added token ' Red' the id 2147483648, but its vocabulary makes th"):
        load_tokenizer(folder)


def test_an_unknown_token_that_is_unknown_itself_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, byte_level_tokenizer(), "llama", None)
    edit(folder / "tokenizer_config.json", unk_token="")
    with pytest.raises(ModelError, match="has the unk_token '', which the vocabulary lacks; name a token that it has"):
        load_tokenizer(folder)


_LONG = {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 500}
_BACKTRACKS = {"Regex": "(a+)+$|([a-z ]+)*X"}
_PREPEND = {"type": "Prepend", "prepend": "x" * 30_000}
_BEGINS = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 2_000
_TEMPLATE = {"type": "TemplateProcessing", "single": _BEGINS, "pair": [], "special_tokens": {}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"normalizer": {"type": "Sequence", "normalizers": [_LONG] * 4}},
            "makes up to 62,500,000,000 characters",
        ),
        ({"normalizer": {"type": "Sequence", "normalizers": [_PREPEND]}}, "makes up to 30,000 characters of one"),
        ({"decoder": {"type": "Sequence", "decoders": [_LONG] * 4}}, "makes up to 62,500,000,000 characters"),
        ({"post_processor": _TEMPLATE}, "puts 2,000 tokens around each text"),
        ({"post_processor": {"type": "Sequence", "processors": [_TEMPLATE]}}, "puts 2,000 tokens around each text"),
    ],
)
def test_a_tokenizer_that_makes_much_of_little_is_refused_before_it_is_made(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = folder_of(tmp_path, byte_level_tokenizer(), "llama", None)
    edit(folder / "tokenizer.json", **changes)
    with pytest.raises(ModelError, match=f"^'{folder}/tokenizer.json' {message}") as error:
        load_tokenizer(folder)
    assert "\n" not in str(error.value)


def test_an_id_beyond_all_numbers_of_ids_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, byte_level_tokenizer(), "llama", None)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    edit(folder / "tokenizer.json", model={**model, "vocab": {**model["vocab"], "zz": 2**32 - 1}})
    with pytest.raises(ModelError, match="gives 'zz' the id 4294967295, beyond those that a model can have"):
        load_tokenizer(folder)


def test_a_pattern_on_which_the_library_gives_up_is_told_in_one_line(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, byte_level_tokenizer(), "llama", None)
    edit(folder / "tokenizer.json", normalizer={"type": "Replace", "pattern": _BACKTRACKS, "content": ""})
    tokenizer = load_tokenizer(folder)
    text = "the quick brown fox jumps over the lazy dog"
    for encode in (Encoder(tokenizer, None).prompts, lambda texts: JointEncoder(tokenizer)(texts)):
        with pytest.raises(TokenizationError, match="the tokenizers library gives up on a text") as error:
            encode([text])
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("template", [3, {"default": 3}, ["x"]])
def test_a_chat_template_is_text(tmp_path: Path, template: Any) -> None:
    folder = folder_of(tmp_path, byte_level_tokenizer(), "llama", None)
    edit(folder / "tokenizer_config.json", chat_template=template)
    with pytest.raises(ModelError, match=r"chat template|cannot load the tokenizer"):
        load_tokenizer(folder)
