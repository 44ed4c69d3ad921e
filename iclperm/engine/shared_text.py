"""Token ids of many texts that begin alike: what they share is tokenised about once, ids are those of each whole.

In sorted order a text shares with its neighbour all that it shares with any before it. So of each only a window is
tokenised: what is new, and some words before it. Where the words before it come out as they did in the neighbour, token
for token, the neighbour's ids before them are the text's. Where they do not, the whole text is tokenised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from iclperm.base.tokenizer_file import told_where_it_gives_up
from iclperm.engine.given import refuse_halves
from iclperm.engine.tree import TokenArray

# A window begins so many words before what is new; of these the first may be cut and the last may merge with it. No
# merge of any tokenizer in use reaches over two words.
_WORDS, _UNSURE = 7, 2
_MOST_WINDOW = 400  # characters in which so many words must lie, as they do not where a script has no spaces
_LIKELY_WINDOW = 100
_LEAST_SHARED = 200  # characters, below which a window saves nothing
_CHECKED, _CHECKED_OF = 16, 128  # texts that are tokenised whole besides, to see that windows tell the truth
_WORD = re.compile(r"\s+\S")


@dataclass(frozen=True)
class SpannedText:
    """Token ids of a whole text int32 [N], special tokens left out, and where each ends in it int64 [N], ascending."""

    ids: TokenArray
    ends: npt.NDArray[np.int64]

    def cut(self, place: int) -> int:
        """How many tokens end at or before a place; one that straddles it belongs to what follows."""
        return int(np.searchsorted(self.ends, place, side="right"))


class SharedTexts:
    """Tokenises texts with a fast tokenizer, without special tokens.

    ``is_strict``: a tokenizer that reads any text as one piece, so that nothing bounds how far a merge may reach, is
    given each text whole. The first windows are held against whole texts, and some of those after them.

    ``num_characters`` have been given to the tokenizer, in windows or whole; ``num_whole`` texts had a shared beginning
    and were tokenised whole all the same, since no window could be told to give the same ids.
    """

    def __init__(self, tokenizer: Any, *, is_strict: bool = False) -> None:
        self._tokenizer = tokenizer
        self._is_whole = is_strict and not cuts_texts(tokenizer)
        self._num_joined = 0
        self.num_characters = 0
        self.num_whole = 0

    @property
    def are_bounded(self) -> bool:
        """Whether ids of a text depend on no more than some words before it, as far as was seen."""
        return not self._is_whole

    def __call__(self, texts: Sequence[str], known: Mapping[str, SpannedText] | None = None) -> list[SpannedText]:
        """The ids of each text, as if it were tokenised alone; ``known`` are those of texts that others may begin with.

        Cost: about the characters of the tree of all texts, less the known ones.
        """
        known = known or {}
        order = sorted({*texts, *known})
        shared = [0, *(_common_length(a, b) for a, b in pairwise(order))][: len(order)]
        begins = [_window_begin(text, length) for text, length in zip(order, shared, strict=True)]
        if self._is_whole:
            self.num_whole += sum(begin > 0 and text not in known for text, begin in zip(order, begins, strict=True))
            begins = [0] * len(order)
        cut = [text[begin:] for text, begin in zip(order, begins, strict=True)]
        distinct = list(dict.fromkeys(window for text, window in zip(order, cut, strict=True) if text not in known))
        windows = dict(zip(distinct, self._encoded(distinct), strict=True))  # the same words with the same label, say
        found: dict[str, SpannedText] = {}
        before: SpannedText | None = None
        for text, length, begin, window in zip(order, shared, begins, cut, strict=True):
            whole = known.get(text)
            if whole is None:
                whole = windows[window] if not begin else _joined(before, windows[window], text, begin, length)
            if whole is None:
                self.num_whole += 1
                (whole,) = self._encoded([text])
            found[text] = before = whole
        self._check(found, [text for text, begin in zip(order, begins, strict=True) if begin and text not in known])
        return [found[text] for text in texts]

    def _check(self, found: dict[str, SpannedText], joined: list[str]) -> None:
        """Some texts once more, whole: if one differs, none of this tokenizer's windows can be trusted."""
        before, self._num_joined = self._num_joined, self._num_joined + len(joined)
        some = [text for place, text in enumerate(joined, before) if is_checked(place)]
        if all(
            np.array_equal(found[text].ids, whole.ids) for text, whole in zip(some, self._encoded(some), strict=True)
        ):
            return
        self.num_whole += len(joined)
        found.update(zip(joined, self._encoded(joined), strict=True))

    def _encoded(self, texts: Sequence[str]) -> list[SpannedText]:
        if not texts:
            return []
        self.num_characters += sum(map(len, texts))
        refuse_halves(texts)
        with told_where_it_gives_up():
            encoded = self._tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return [
            SpannedText(
                np.array(ids, np.int32), np.maximum.accumulate(np.array(offsets, np.int64).reshape(-1, 2)[:, 1])
            )
            for ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        ]


def is_checked(number: int) -> bool:
    """Whether the ``number``-th ids, from 0 on, that were not read off their whole text are held against it."""
    return number < _CHECKED or number % _CHECKED_OF == 0


def _joined(before: SpannedText | None, window: SpannedText, text: str, begin: int, shared: int) -> SpannedText | None:
    """The ids of ``text`` from those of the text before it, with which it shares ``shared`` characters, and of a window
    that begins at ``begin``; None where the two do not agree in between."""
    assert before is not None
    low, high = _inner_words(text[begin:shared])
    low, high, ends = begin + low, begin + high, window.ends + begin
    ours, theirs = (slice(*np.searchsorted(each, [low, high], side="right")) for each in (ends, before.ends))
    agree = (
        ours.start < ours.stop
        and np.array_equal(ends[ours], before.ends[theirs])
        and np.array_equal(window.ids[ours], before.ids[theirs])
    )
    if not agree:
        return None
    return SpannedText(
        np.concatenate([before.ids[: theirs.stop], window.ids[ours.stop :]]),
        np.concatenate([before.ends[: theirs.stop], ends[ours.stop :]]),
    )


def _window_begin(text: str, shared: int) -> int:
    """Where to begin with a text that shares its first characters with another; 0 where nothing is gained."""
    if shared < _LEAST_SHARED:
        return 0
    for window in (_LIKELY_WINDOW, _MOST_WINDOW):  # nearly always in the first, for a quarter of the cost
        words = [found.start() for found in _WORD.finditer(text, max(0, shared - window), shared)]
        if len(words) > _WORDS:  # the first may be cut
            return words[-_WORDS]
    return 0


def _inner_words(window: str) -> tuple[int, int]:
    """The part of a window, some words, that is neither at its cut nor at what is new."""
    words = [found.start() for found in _WORD.finditer(window)]
    return words[_UNSURE], words[-_UNSURE]


def _common_length(a: str, b: str) -> int:
    """Characters that two texts begin with alike. O(log n) comparisons of slices."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def cuts_texts(tokenizer: Any) -> bool:
    """Whether a fast tokenizer cuts a text into words before it merges anything, so that no merge leaves a word."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.pre_tokenizer is None:
        return False
    text = "some words and a few more"
    normal = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    return len(backend.pre_tokenizer.pre_tokenize_str(normal)) > 2


def added_tokens(tokenizer: Any, encode: Callable[[str], TokenArray]) -> TokenArray | None:
    """What a tokenizer puts before every text, int32; None where texts cannot be tokenised as `SharedTexts` does.

    ``encode`` gives ids with what it adds, as they are scored.
    """
    if not getattr(tokenizer, "is_fast", False):
        return None
    starts = []
    for probe in ("a", "the other one"):
        (plain,) = SharedTexts(tokenizer)([probe])
        whole = encode(probe)
        if not plain.ids.size or not np.array_equal(whole[whole.size - plain.ids.size :], plain.ids):
            return None
        starts.append(whole[: whole.size - plain.ids.size])
    first, second = starts
    return first if np.array_equal(first, second) else None
