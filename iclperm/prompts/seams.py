"""Do the joins hold: parts cut out of jointly tokenised text, and the places where cutting them apart changes ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iclperm.prompts.design import keyed_sample
from iclperm.prompts.encode import EncodedText, Ids, JointEncoder, split_at, split_labels
from iclperm.prompts.render import DesignTexts

_Seam = tuple[str, int, int]  # what stands on the right, the class of the words before it, of the words after it


@dataclass(frozen=True)
class JoinChecks:
    """How many joins are looked at: all ``seams`` unless there are more, which are sampled; whole ``prompts``; and
    ``chats`` beside the shortest and the longest."""

    seams: int = 8_192
    prompts: int = 256
    chats: int = 12


CHECKS = JoinChecks()


@dataclass(frozen=True)
class EncodedParts:
    """The tokens of parts, with the places in each part's text where they end; a token that began before the part is
    its first."""

    opening: EncodedText
    first: list[EncodedText]
    inner: list[EncodedText]
    queries: list[EncodedText]


class PromptParts:
    """The ids of every part of a design's prompts, and the seams at which the parts do not simply join.

    A part's ids are cut out of those of a longer text: before it stands a demonstration with the commonest ending (or
    the opening, where there is none), after it a query. ``opening`` are the ids of what opens a prompt, ``first`` and
    ``inner`` those of each demonstration, right after the opening and elsewhere; ``queries`` [Q] reach up to the label,
    and ``continuations`` [L] are those of the labels after most queries, ``choices`` [Q] those of queries with choices
    of their own. ``encoded`` has the first four with the places
    where their tokens end. ``failed_seams`` are the seams out of
    ``num_seams`` checked at which tokens merge; ``num_resplit`` queries end in a token that merges with a label.
    """

    def __init__(self, texts: DesignTexts, encoder: JointEncoder, max_seams: int = CHECKS.seams) -> None:
        self._texts = texts
        self._encode = encoder
        self._max_seams = max_seams
        self._tails = _classes(list(map(_tail, texts.demonstrations)))
        self._lead = texts.demonstrations[_most_common(self._tails)] if texts.demonstrations else texts.opening
        self._follower = texts.queries[0]
        self.continuations: list[Ids] = []
        self.choices: list[list[Ids]] | None = None
        queries, self._odd_queries, self.num_resplit = (
            self._cut_queries() if texts.choices is None else self._cut_own(texts.choices)
        )
        self.encoded = EncodedParts(
            opening=self._cut_opening(),
            first=self._cut_demonstrations(texts.opening),
            inner=self._cut_demonstrations(self._lead),
            queries=queries,
        )
        self.opening = self.encoded.opening.ids
        self.first, self.inner, self.queries = (
            [part.ids for part in parts] for parts in (self.encoded.first, self.encoded.inner, queries)
        )
        self._demonstration_heads = _classes(list(map(_head, texts.demonstrations)))
        self._query_heads = _classes(list(map(_head, texts.queries)))
        self.failed_seams, self.num_seams = self._check_seams()
        self._opening_breaks = self._check_opening()

    def after(self, query: int) -> list[Ids]:
        """The ids that may follow a query: of its own choices, else of the labels of all."""
        return self.continuations if self.choices is None else self.choices[query]

    def holds(self, ordering: NDArray[np.int64]) -> bool:
        """Whether a context is the concatenation of its parts."""
        if not len(ordering):
            return True
        seams = zip(self._tails[ordering[:-1]], self._demonstration_heads[ordering[1:]], strict=True)
        inside = any(("demonstration", int(tail), int(head)) in self.failed_seams for tail, head in seams)
        return not inside and int(ordering[0]) not in self._opening_breaks

    def cells_outside(self, members: Iterable[NDArray[Any]]) -> set[tuple[int, int]]:
        """The (context, query) pairs whose query ids are not the shared ones."""
        num_queries = len(self.queries)
        outside: set[tuple[int, int]] = set()
        for context, ordering in enumerate(members):
            outside.update((context, query) for query in self._odd_queries)
            if not len(ordering):
                outside |= {(context, query) for query in self._queries_at_the_start()}
            elif self.failed_seams:
                tail = int(self._tails[ordering[-1]])
                seams = (("query", tail, int(head)) for head in self._query_heads)
                failed = [seam in self.failed_seams for seam in seams]
                outside |= {(context, query) for query in range(num_queries) if failed[query]}
        return outside

    def pairs_outside(self, shown: NDArray[np.int32], queries: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of some prompts are not their parts joined, bool [N]: their demonstrations [N, K], -1 where there are
        no more, and their queries [N]."""
        num_shown = (shown >= 0).sum(axis=1)
        outside = np.isin(queries, self._odd_queries)
        outside |= (num_shown == 0) & np.isin(queries, self._queries_at_the_start() if (num_shown == 0).any() else [])
        if self.failed_seams or self._opening_breaks:
            for place, (number, query) in enumerate(zip(num_shown.tolist(), queries.tolist(), strict=True)):
                if number:
                    ordering = shown[place, :number].astype(np.int64)
                    seam = ("query", int(self._tails[ordering[-1]]), int(self._query_heads[query]))
                    outside[place] |= seam in self.failed_seams or not self.holds(ordering)
        return np.asarray(outside)

    def _cut_opening(self) -> EncodedText:
        (joint,) = self._encode([self._texts.opening + self._follower])
        return joint.until(len(self._texts.opening))

    def _cut_demonstrations(self, lead: str) -> list[EncodedText]:
        joints = self._encode([lead + text + self._follower for text in self._texts.demonstrations])
        return [
            joint.between(len(lead), len(lead) + len(text))
            for joint, text in zip(joints, self._texts.demonstrations, strict=True)
        ]

    def _cut_own(self, choices: Sequence[Sequence[str]]) -> tuple[list[EncodedText], list[int], int]:
        """The queries before their own choices."""
        queries, begin = self._texts.queries, len(self._lead)
        splits = [
            split_at(begin + len(query), self._encode([self._lead + query + text for text in own]))
            for query, own in zip(queries, choices, strict=True)
        ]
        self.choices = [split.continuations for split in splits]
        cut = [split.prompt.between(begin, begin + len(query)) for split, query in zip(splits, queries, strict=True)]
        odd = [query for query, tokens in enumerate(cut) if not len(tokens.ids)]
        return cut, odd, sum(split.is_resplit for split in splits)

    def _cut_queries(self) -> tuple[list[EncodedText], list[int], int]:
        splits = split_labels(
            self._encode, [self._lead + query for query in self._texts.queries], self._texts.continuations
        )
        shared = Counter(split.key for split in splits).most_common(1)[0][0]
        self.continuations = next(split.continuations for split in splits if split.key == shared)
        begin = len(self._lead)
        queries = [
            split.prompt.between(begin, begin + len(query))
            for split, query in zip(splits, self._texts.queries, strict=True)
        ]
        # A product needs a token a query; an empty one is a prompt all the same.
        odd = [query for query, split in enumerate(splits) if split.key != shared or not len(queries[query].ids)]
        return queries, odd, sum(split.is_resplit for split in splits)

    def _check_seams(self) -> tuple[set[_Seam], int]:
        every = self._demonstration_seams() | self._query_seams()
        some = _sampled(every, self._max_seams)
        failed = self._failing(some)
        is_sample = len(some) < len(every)
        return (self._failing(every), len(every)) if failed and is_sample else (failed, len(some))

    def _failing(self, seams: Mapping[_Seam, tuple[int, int]]) -> set[_Seam]:
        texts = [
            self._lead + self._texts.demonstrations[left] + self._right_text(seam, right)
            for seam, (left, right) in seams.items()
        ]
        (lead,) = self._encode([self._lead + self._follower])
        before = lead.ids[: lead.cut(len(self._lead))]
        failed = set()
        for (seam, (left, right)), joint in zip(seams.items(), self._encode(texts), strict=True):
            expected = np.concatenate([before, self.inner[left], self._right_ids(seam, right)])
            if not np.array_equal(joint.ids[: len(expected)], expected):
                failed.add(seam)
        return failed

    def _right_text(self, seam: _Seam, right: int) -> str:
        if seam[0] == "query":
            return self._texts.queries[right] + self._texts.after(right)[0]
        return self._texts.demonstrations[right] + self._follower

    def _right_ids(self, seam: _Seam, right: int) -> Ids:
        return self.queries[right] if seam[0] == "query" else self.inner[right]

    def _demonstration_seams(self) -> dict[_Seam, tuple[int, int]]:
        """Each distinct seam of two demonstrations that adjoin somewhere, with one pair that shows it."""
        adjoining = [
            np.unique(np.stack([rows[..., :-1].ravel(), rows[..., 1:].ravel()], axis=1), axis=0)
            for rows in self._texts.shown()
        ]
        pairs = np.unique(np.concatenate(adjoining), axis=0)
        tails, heads = self._tails, self._demonstration_heads
        return {
            ("demonstration", int(tails[left]), int(heads[right])): (int(left), int(right)) for left, right in pairs
        }

    def _query_seams(self) -> dict[_Seam, tuple[int, int]]:
        lefts = {int(tail): demonstration for demonstration, tail in enumerate(self._tails)}
        rights = {int(head): query for query, head in enumerate(self._query_heads)}
        return {("query", tail, head): (lefts[tail], rights[head]) for tail, head in product(lefts, rights)}

    def _check_opening(self) -> set[int]:
        """The demonstrations that, right after the opening, change the opening's token ids."""
        texts = self._texts
        joints = self._encode([texts.opening + text + self._follower for text in texts.demonstrations])
        return {
            demonstration
            for demonstration, joint in enumerate(joints)
            if not np.array_equal(joint.ids[: joint.cut(len(texts.opening))], self.opening)
        }

    def _queries_at_the_start(self) -> list[int]:
        """The queries that, right after the opening, are not tokenised as they are after demonstrations."""
        texts = self._texts
        joints = self._encode(
            [texts.opening + query + texts.after(number)[0] for number, query in enumerate(texts.queries)]
        )
        return [
            query
            for query, joint in enumerate(joints)
            if not np.array_equal(joint.ids, np.concatenate([self.opening, self.queries[query], self.after(query)[0]]))
        ]


def _sampled(seams: Mapping[_Seam, tuple[int, int]], most: int) -> Mapping[_Seam, tuple[int, int]]:
    """All seams, or of more than ``most`` a keyed sample in which each side of a seam occurs."""
    if len(seams) <= most:
        return seams
    every = list(seams)
    drawn = keyed_sample(len(every), most, 0, "checked seams")
    of_left = {(kind, left): (kind, left, right) for kind, left, right in every}
    of_right = {(kind, right): (kind, left, right) for kind, left, right in every}
    chosen = {*(every[number] for number in drawn), *of_left.values(), *of_right.values()}
    return {seam: seams[seam] for seam in every if seam in chosen}


def _tail(text: str) -> str:
    """The last two words with the white space around them: no merge of any tokenizer in use reaches farther."""
    words = text.rsplit(None, 2)
    return text if len(words) < 3 else text[len(words[0]) :]


def _head(text: str) -> str:
    """The first two words, likewise."""
    words = text.split(None, 2)
    return text if len(words) < 3 else text[: len(text) - len(words[2])]


def _most_common(classes: NDArray[np.int64]) -> int:
    """The first member of the largest class."""
    return int(np.argmax(np.bincount(classes)[classes]))


def _classes(texts: Sequence[str]) -> NDArray[np.int64]:
    """Equal texts get equal numbers, int64 [N]."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(text, len(numbers)) for text in texts], dtype=np.int64)
