"""Text as token ids with offsets: tokenised jointly, then cut where the parts of a prompt meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from iclperm.base.tokenizer_file import told_where_it_gives_up
from iclperm.errors import TokenizationError, is_out_of_memory, printable
from iclperm.prompts.chat import ChatFormat
from iclperm.prompts.design import CONTENT_FREE_INPUTS
from iclperm.prompts.render import PromptText

Ids = NDArray[np.int32]


class Tokenizer(Protocol):
    """What is used of a fast tokenizer of Hugging Face (``chat_template`` and ``special_tokens_map`` as well, for a
    chat)."""

    is_fast: bool
    all_special_ids: list[int]
    bos_token_id: int | None
    eos_token_id: int | None
    unk_token_id: int | None

    def __call__(self, text: list[str], **options: Any) -> Any: ...

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]: ...

    def get_added_vocab(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class PromptTokens:
    """One prompt as the model reads it.

    ``opening`` is BOS, if tokenizer or chat template put it in front; ``pieces`` are all tokens up to the label, of
    which ``num_context`` belong to opening and demonstrations. ``labels`` [L] are the tokens of each label; they follow
    the prompt, from place ``len(pieces)`` on. Where ``is_resplit``, the query's last token merges with a label and is
    scored with it.
    """

    opening: list[str]
    pieces: list[str]
    num_context: int
    labels: list[list[str]]
    is_resplit: bool


def prompt_tokens(text: PromptText, tokenizer: Tokenizer) -> PromptTokens:
    """The tokens of one prompt, cut as they are for scoring."""
    prompt = text.context + text.query
    encode = JointEncoder(tokenizer, prompt if text.messages else None)
    joints = encode([prompt + continuation for continuation in text.continuations])
    split = split_at(len(prompt), joints)
    named = tokenizer.convert_ids_to_tokens
    return PromptTokens(
        opening=named(encode.opening.tolist()),
        pieces=named([*encode.start.tolist(), *split.prompt.ids.tolist()]),
        num_context=len(encode.start) + joints[0].cut(len(text.context)),
        labels=[named(ids.tolist()) for ids in split.continuations],
        is_resplit=split.is_resplit,
    )


def refuse_special_inputs(refuse_special: Callable[[Sequence[str]], None]) -> None:
    """Raises `TokenizationError` where a content-free input is a special token, which ``refuse_special`` finds out."""
    for text in CONTENT_FREE_INPUTS:
        try:
            refuse_special([text])
        except TokenizationError:
            raise TokenizationError(
                f"calibration is 'contextual', but its content-free input {text!r} is a special token of this "
                "tokenizer; set calibration to none"
            ) from None


@dataclass(frozen=True)
class EncodedText:
    """A text as token ids, int32 [N], and where each of them ends in it, int64 [N], never decreasing."""

    ids: Ids
    ends: NDArray[np.int64]

    def cut(self, place: int) -> int:
        """The number of tokens that end at or before ``place``; one that straddles it belongs to what follows."""
        return int(np.searchsorted(self.ends, place, side="right"))

    def until(self, end: int) -> EncodedText:
        """The tokens of the text up to ``end``."""
        last = self.cut(end)
        return EncodedText(self.ids[:last], self.ends[:last])

    def between(self, begin: int, end: int) -> EncodedText:
        """The tokens of one part of the text, as `cut` parts them; where they end is counted from ``begin``."""
        first, last = self.cut(begin), self.cut(end)
        return EncodedText(self.ids[first:last], self.ends[first:last] - begin)


class JointEncoder:
    """Tokenises whole texts, with offsets and without the special tokens that the tokenizer adds.

    ``start`` are those that it would put in front, and ``opening`` those that every prompt begins with: the same,
    unless the template of a chat writes BOS itself; then ``start`` is empty. A text that holds a special token is
    refused with a `TokenizationError`, except in a chat, whose template may write them; ``chat`` is one of its prompts.
    """

    def __init__(self, tokenizer: Tokenizer, chat: str | None = None) -> None:
        if not tokenizer.is_fast:
            raise TokenizationError("the tokenizer has no offsets; use the fast version of it (tokenizer.json)")
        self._tokenizer = tokenizer
        self._special = _special_ids(tokenizer)
        self._is_chat = chat is not None
        self.start = self.opening = self._start()
        if chat is not None and len(written := self._written(chat)):
            self.start, self.opening = written[:0], written

    def __call__(self, texts: Sequence[str]) -> list[EncodedText]:
        encoded = self._encoded(texts)
        if not self._is_chat:
            self._refuse(self._special, texts, encoded)
        return encoded

    def begun(self, text: EncodedText) -> EncodedText:
        """The tokens of a prompt's beginning with ``start`` before them, which ends at 0."""
        ends = np.zeros(len(self.start), dtype=np.int64)
        return EncodedText(np.concatenate([self.start, text.ids]), np.concatenate([ends, text.ends]))

    def refuse_special(self, texts: Sequence[str]) -> None:
        """Raises `TokenizationError` where a text holds a special token."""
        self._refuse(self._special, texts, self._encoded(texts))

    def refuse_control(self, texts: Sequence[str], chat: ChatFormat) -> None:
        """Raises `TokenizationError` where a text holds a special token, or an added one that the chat writes."""
        added = [number for token, number in self._tokenizer.get_added_vocab().items() if chat.writes(token)]
        self._refuse(np.union1d(self._special, added).astype(np.int32), texts, self._encoded(texts))

    def _encoded(self, texts: Sequence[str]) -> list[EncodedText]:
        if not texts:
            return []
        with told_where_it_gives_up():
            encoded = self._tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        return [
            EncodedText(
                np.array(ids, dtype=np.int32),
                np.maximum.accumulate(np.array(offsets, dtype=np.int64).reshape(-1, 2)[:, 1]),
            )
            for ids, offsets in pairs
        ]

    def _refuse(self, refused: Ids, texts: Sequence[str], encoded: Sequence[EncodedText]) -> None:
        for text, joint in zip(texts, encoded, strict=True):
            if np.isin(joint.ids, refused).any():
                raise TokenizationError(
                    f"the text {text[:60]!r}... holds a special token of this tokenizer; remove it from data or "
                    "template"
                )

    def _written(self, chat: str) -> Ids:
        """BOS, where the chat's template writes it; raises `TokenizationError` where it does so twice."""
        (joint,) = self._encoded([chat])
        bos = self._tokenizer.bos_token_id
        if len(joint.ids) > 1 and joint.ids[0] == joint.ids[1] == bos:
            raise TokenizationError(f"the chat template begins with BOS (id {bos}) twice; repair it")
        return joint.ids[:1] if len(joint.ids) and joint.ids[0] == bos else joint.ids[:0]

    def _start(self) -> Ids:
        try:
            with told_where_it_gives_up():
                plain = self._tokenizer(["a"], add_special_tokens=False)["input_ids"][0]
                whole = self._tokenizer(["a"])["input_ids"][0]
        except TokenizationError:
            raise
        except Exception as error:  # of files that are no tokenizer's after all; the library raises nothing narrower
            if is_out_of_memory(error):
                raise
            reason = printable(" ".join(str(error).split()))
            raise TokenizationError(
                f"the tokenizer fails on plain text ({reason}); repair its files, or use another"
            ) from None
        for begin in range(len(whole)):
            if whole[begin : begin + len(plain)] == plain:
                return np.array(whole[:begin], dtype=np.int32)
        raise TokenizationError("the tokenizer changes text when it adds special tokens; use another tokenizer")


def _special_ids(tokenizer: Tokenizer) -> Ids:
    ordinary = {tokenizer.unk_token_id} - {tokenizer.bos_token_id, tokenizer.eos_token_id}
    return np.array(sorted(set(tokenizer.all_special_ids) - ordinary), dtype=np.int32)


@dataclass(frozen=True)
class LabelSplit:
    """A prompt and its labels, cut after the last token that is the same for all labels.

    ``continuations`` [L] are what follows the cut; ``is_resplit`` where a token of the prompt is among that.
    """

    prompt: EncodedText
    continuations: list[Ids]
    is_resplit: bool

    @property
    def key(self) -> tuple[bytes, ...]:
        """Equal for prompts whose labels have equal tokens."""
        return tuple(continuation.tobytes() for continuation in self.continuations)


def split_labels(encode: JointEncoder, prompts: Sequence[str], labels: Sequence[str]) -> list[LabelSplit]:
    """Each prompt with all labels after it. O(tokens of prompts * labels)."""
    joints = encode([prompt + label for prompt in prompts for label in labels])
    num_labels = len(labels)
    return [
        split_at(len(prompt), joints[number * num_labels : (number + 1) * num_labels])
        for number, prompt in enumerate(prompts)
    ]


def scored_ids(labels: Sequence[str], ids: Sequence[Ids], *, is_cut: bool) -> list[Ids]:
    """The ids of each label that are scored, [L]: all, or the first where ``is_cut``.

    Raises `TokenizationError` where they cannot distinguish the labels.
    """
    scored = [row[:1] for row in ids] if is_cut else list(ids)
    refuse_nothing(labels, scored)
    seen: dict[bytes, str] = {}
    for text, row in zip(labels, scored, strict=True):
        if (other := seen.setdefault(row.tobytes(), text)) != text:
            raise TokenizationError(
                f"the labels {other!r} and {text!r} begin with the same token; set scoring to loglikelihood"
                if is_cut
                else f"the labels {other!r} and {text!r} have the same tokens; change one label's word"
            )
    return scored


def refuse_nothing(labels: Sequence[str], ids: Sequence[Ids]) -> None:
    """Raises `TokenizationError` for a label or a choice without tokens."""
    for text, row in zip(labels, ids, strict=True):
        if text and not len(row):
            raise TokenizationError(f"the tokenizer makes no token of the label {text!r}; change its word")


def split_at(place: int, joints: Sequence[EncodedText]) -> LabelSplit:
    """``joints`` [L] are a prompt of ``place`` characters with each label after it."""
    cuts = [joint.cut(place) for joint in joints]
    stable = _common_prefix([joint.ids[:cut] for joint, cut in zip(joints, cuts, strict=True)])
    return LabelSplit(
        prompt=EncodedText(joints[0].ids[:stable], joints[0].ends[:stable]),
        continuations=[joint.ids[stable:] for joint in joints],
        is_resplit=any(
            len(joint.ids) > stable and (stable == 0 or joint.ends[stable - 1] != place) for joint in joints
        ),
    )


def _common_prefix(rows: Sequence[Ids]) -> int:
    length = min(map(len, rows))
    same = np.all([row[:length] == rows[0][:length] for row in rows], axis=0)
    return length if same.all() else int(np.argmin(same))
