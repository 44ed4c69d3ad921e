"""Texts that begin alike are tokenised in windows, and get the ids of each whole, whatever the tokenizer."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from zoo import VOCAB, ZOO

from iclperm.demo import model_path
from iclperm.engine import Engine
from iclperm.engine.encoding import Encoder
from iclperm.engine.shared_text import SharedTexts, _common_length, added_tokens

TEXT = [
    "Article: Oil prices rose 2.5% on Monday, U.S. officials said.\nAnswer: Business\n\n",
    "Article: 世界杯 the final — “great”  game\tended 3-2\nAnswer: Sports\n\n",
    "Review:  it's   fine…\n Label: good\n\n",
    "def f(x):\n    return x  +  1\n",
    "A",
    " the quick brown fox jumps over the lazy dog and then some more words come",
]
WORDS = ["the", " a", "  ", "\n", "\n\n", " World", "Sports", "é", "世界", "🙂", "'s", "1,234"]
WORDS += ["Answer:", " answer", "\t", ".", "of the"]


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXT * 9, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))
    return made


def metaspace() -> Tokenizer:
    """As SentencePiece's: a space before the first word, unigrams."""
    made = Tokenizer(models.Unigram())
    made.normalizer, made.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    made.train_from_iterator(
        TEXT * 9, trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", special_tokens=["<unk>"])
    )
    return made


def one_piece() -> Tokenizer:
    """As Gemma's: spaces become marks, and the whole text is one piece."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.Replace(" ", "▁")
    made.train_from_iterator(TEXT * 9, trainers.BpeTrainer(vocab_size=700))
    return made


def lower_case() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.train_from_iterator(TEXT * 9, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"]))
    return made


MADE = {"byte level": byte_level, "metaspace": metaspace, "one piece": one_piece, "lower case": lower_case}


@cache
def tokenizer(name: str) -> Any:
    if name == "bundled":
        return AutoTokenizer.from_pretrained(model_path())
    return PreTrainedTokenizerFast(tokenizer_object=MADE[name]())


def whole(name: str, texts: list[str]) -> list[list[int]]:
    return [tokenizer(name)(text, add_special_tokens=False)["input_ids"] for text in texts]


pieces = st.lists(st.one_of(st.sampled_from(TEXT), st.sampled_from(WORDS)), max_size=25)


@pytest.mark.parametrize("name", ["bundled", *MADE])
@given(chains=st.lists(pieces, min_size=1, max_size=3), tails=st.lists(st.sampled_from(WORDS), min_size=1, max_size=3))
@settings(max_examples=40)
def test_ids_are_those_of_each_whole_text(name: str, chains: list[list[str]], tails: list[str]) -> None:
    texts = []
    for chain in chains:
        grown = "".join(TEXT[:3])
        for piece in chain:
            grown += piece
            texts += [grown, *(grown + tail for tail in tails)]
    texts.append("")
    found = SharedTexts(tokenizer(name))(texts)
    assert [text.ids.tolist() for text in found] == whole(name, texts)
    assert all((np.diff(text.ends) >= 0).all() for text in found)


@pytest.mark.parametrize("name", ["bundled", "byte level", "metaspace"])
def test_shared_beginnings_are_tokenised_about_once(name: str) -> None:
    contexts = ["".join(TEXT[number % 3] for number in range(k)) for k in range(80)]
    texts = [context + TEXT[5] for context in contexts]
    shared = SharedTexts(tokenizer(name))
    assert [text.ids.tolist() for text in shared(texts)] == whole(name, texts)
    assert not shared.num_whole
    distinct = len(contexts[-1]) + len(texts) * len(TEXT[5])
    assert shared.num_characters < 6 * distinct < sum(map(len, texts))


def test_a_token_of_many_words_is_seen_and_the_text_taken_whole() -> None:
    """A merge that reaches over every window: its end changes what stands far before it."""
    words = " one two three four five six seven eight nine ten eleven twelve"
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.Replace(" ", "▁")
    made.train_from_iterator([words * 9], trainers.BpeTrainer(vocab_size=10_000))
    odd = PreTrainedTokenizerFast(tokenizer_object=made)
    texts = [words * 5 + words[:n] for n in range(0, len(words), 3)]
    shared = SharedTexts(odd)
    found = shared(texts)
    assert [text.ids.tolist() for text in found] == [odd(text)["input_ids"] for text in texts]
    assert max(len(odd.convert_ids_to_tokens(int(i)).split("▁")) for i in found[-1].ids) > 5, "no token has many words"
    assert shared.num_whole > 0


def test_windows_that_lie_are_found_out() -> None:
    """A tokenizer for which no window is right, though each looks so: what it says depends on how long a text is."""

    class Counting:
        is_fast = True

        def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
            ids = [[ord(c) % 97 for c in text[:-1]] + [len(text)] for text in texts]
            return {"input_ids": ids, "offset_mapping": [[(n, n + 1) for n in range(len(row))] for row in ids]}

    texts = ["x y z " * 60 + "w " * n + "end" for n in range(5)]
    shared = SharedTexts(Counting())
    assert [int(text.ids[-1]) for text in shared(texts)] == [len(text) for text in texts]
    assert shared.num_whole == 4


def test_what_is_put_before_a_text_is_known_or_the_tokenizer_is_asked_for_each() -> None:
    bundled = tokenizer("bundled")
    encoder = Encoder(bundled, None)
    assert encoder._added.tolist() == bundled("")["input_ids"]
    slow = Encoder(type("Slow", (), {"is_fast": False, "bos_token_id": 1, "eos_token_id": 2})(), None)
    assert slow._shared is None
    assert added_tokens(bundled, lambda text: np.arange(len(text), dtype=np.int32)) is None


@given(a=st.text("ab", max_size=12), b=st.text("ab", max_size=12))
def test_the_common_length(a: str, b: str) -> None:
    expected = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert _common_length(a, b) == expected


@pytest.mark.parametrize("name", ["bundled", *MADE])
def test_a_product_of_text_is_the_general_path(name: str) -> None:
    """Also where a context has no words, and where the joins of some contexts do not hold."""
    engine = Engine(ZOO["llama"].build(), Small(tokenizer(name)), self_check=False)
    contexts = ["", *("".join(TEXT[:n]) for n in range(1, 4)), TEXT[0].strip(), TEXT[2] + "the"]
    queries, labels = ["Article: rain.\nAnswer:", " the end", "s"], [" World", " Sports now"]
    scores = engine.score(contexts, queries, labels)
    by_product = engine.report.tokens_forwarded
    cells = [engine._encoder.prompts_before([c + q], [labels])[0] for c in contexts for q in queries]
    expected = engine.loglikelihood([(prompt, each) for prompt, row in cells for each in row]).logprob
    assert np.array_equal(scores.ravel(), expected, equal_nan=True)
    found = engine._encoder.product(contexts, queries, [labels] * 3)
    assert found.holds.any() or name in ("metaspace", "one piece")
    assert by_product > 0


def alone(tokenizer: Any, requests: list[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
    """Each request by itself: the ids of its context without the white space at its end, and what follows them."""

    def ids(text: str) -> list[int]:
        return tokenizer([text], add_special_tokens=False, return_offsets_mapping=True)["input_ids"][0]

    contexts = [ids(context.rstrip()) for context, _ in requests]
    return [
        (before, ids(context + more)[len(before) :]) for before, (context, more) in zip(contexts, requests, strict=True)
    ]


@pytest.mark.parametrize("name", ["bundled", *MADE])
@given(
    contexts=st.lists(pieces.map("".join), min_size=1, max_size=12),
    endings=st.lists(st.sampled_from([*WORDS, *TEXT]), min_size=1, max_size=3),
    more=st.lists(st.sampled_from([*(word for word in WORDS if word.strip()), "x", "  y"]), min_size=1, max_size=3),
)
@settings(max_examples=40)
def test_continuations_after_the_same_words_are_those_of_each_whole_text(name, contexts, endings, more) -> None:
    requests = [(context + ending, each) for context in contexts for ending in endings for each in more]
    wanted = alone(tokenizer(name), requests)
    assume(all(after for _, after in wanted))
    encoder = Encoder(tokenizer(name), None)
    encoder.__dict__["_added"], encoder.prefix_id = np.empty(0, np.int32), 0  # nothing before texts
    found = [(before.tolist(), after.tolist()) for before, after in encoder.pairs(requests)]
    assert found == [(before or [0], after) for before, after in wanted]


def test_the_same_words_before_the_same_continuation_are_tokenised_once() -> None:
    """So that a text through ``loglikelihood`` costs about what its ids do, checks and all."""
    bundled, given_texts = tokenizer("bundled"), list[str]()

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(bundled, name)

        def __call__(self, texts: list[str], **options: Any) -> Any:
            given_texts.extend(texts)
            return bundled(texts, **options)

    start = "".join(TEXT[:3])
    asked = " and then some more words: Article: rain.\nAnswer:"
    requests = [(start * n + asked, label) for n in range(1, 100) for label in (" Sports", " World", " now")]
    encoder = Encoder(Counting(), None)
    encoder.pairs(requests[:1])
    given_texts.clear()
    assert [(a.tolist()[1:], b.tolist()) for a, b in encoder.pairs(requests)] == alone(bundled, requests)
    windows = [text for text in given_texts if not text.startswith("Article: Oil")]
    assert len(windows) <= 3 + 2 * 99  # of each label one; what follows a context and the context itself
    assert len(given_texts) < len(requests)


class FarWords:
    """A tokenizer that gives a text's last character another id where the text begins in some way."""

    is_fast = True
    bos_token_id = eos_token_id = None

    def __init__(self, odd: set[str]) -> None:
        self._odd = odd

    def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
        rows = [[3 + ord(c) % 97 for c in text] for text in texts]
        for text, row in zip(texts, rows, strict=True):
            if text.endswith("end") and any(text.startswith(begin) for begin in self._odd):
                row[-1] = 1
        return {"input_ids": rows, "offset_mapping": [[(n, n + 1) for n in range(len(row))] for row in rows]}


@pytest.mark.parametrize("num_odd", [0, 25])
def test_prompts_of_a_product_that_depend_on_far_words_are_found_out(num_odd: int) -> None:
    """Contexts end alike, so that one of them is looked at for all; others are, too, as a check."""
    contexts, queries = [f"{n} times: these same words" for n in range(53)], [" in the", " at an"]
    encoder = Encoder(FarWords({f"{n} times" for n in range(53 - num_odd, 53)}), None)
    encoder.__dict__["_added"] = np.empty(0, np.int32)
    found = encoder.product(contexts, queries, [[" end"]] * 2)
    assert found.holds.all() == found.holds.any() == (num_odd == 0)


class Small:
    """A tokenizer whose ids a small model knows."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole
        self.is_fast, self.bos_token_id, self.eos_token_id, self.eos_token = True, 1, 2, "</s>"

    def __call__(self, texts: Any, **options: Any) -> Any:
        encoded = self._whole(texts, **{**options, "add_special_tokens": False})
        return {**encoded, "input_ids": [[3 + number % (VOCAB - 3) for number in row] for row in encoded["input_ids"]]}
